"""Several gate processes on one Postgres: who they are, which of them live, and how they wake each other.

Each has a row in `instances` with its last sign of life, and holds an advisory lock named after it on a connection of
its own, which the database takes back at once when the process dies.  The same connection carries the news of what
was committed: sent after the commit, never inside it, many in one message, and allowed to get lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import asyncpg
import msgspec
from msgspec import Struct

from asyncgate import News
from asyncgate.backends.postgres.hosts import AWAY, Hosts, startup_error
from asyncgate.backends.postgres.statements import LOCK, LOCKED
from asyncgate.parts.model.errors import NotNow, StartupError
from asyncgate.parts.model.settings import DatabaseSettings
from asyncgate.parts.process.outages import OFTEN

log = logging.getLogger("asyncgate.postgres")
CHANNEL = "asyncgate"
MESSAGE_BYTES = 7900        # Postgres takes 8000
PATIENCE_SECONDS = 3.0      # for the lock of a process that is just dying
PATIENCE_BESIDE_SECONDS = 60.0      # for one that begins at the same time and has many leases to look at
BEGINNING = "job\nbegin"    # the lock of the process that begins
AGAIN_SECONDS = 0.5         # between attempts to reach the database
FORGOTTEN = "1 day"         # after which nobody remembers an instance that gave no sign
# The database gives up the lock of a machine that vanished without a word in half a minute, not in two hours.
PROBED = "SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3"

# Alive: its lock is held, or it gave a sign within three beats.
LIVING = f"""
SELECT instance_id::text FROM asyncgate.instances AS i
WHERE beat_at > now() - make_interval(secs => 3 * beat_seconds) OR {LOCKED}"""
TAKE = f"SELECT pg_try_advisory_lock({LOCK.format('$1::text')})"
GIVE = f"SELECT pg_advisory_unlock({LOCK.format('$1::text')})"
# Whoever holds a lock serves; a beat alone proves nothing, it may be that of a process that was killed since.
LAST_SIGN = f"""
SELECT extract(epoch FROM max(beat_at))::float8 FROM asyncgate.instances
WHERE NOT EXISTS (SELECT FROM asyncgate.instances AS i WHERE instance_id <> $1 AND {LOCKED})"""
SIGN = """
INSERT INTO asyncgate.instances (instance_id, beat_seconds) VALUES ($1, $2)
ON CONFLICT (instance_id) DO UPDATE SET beat_at = now(), beat_seconds = excluded.beat_seconds"""
FORGET = f"DELETE FROM asyncgate.instances WHERE beat_at < now() - interval '{FORGOTTEN}'"
# The row stays, as the sign of life that leases are measured by when the next process comes.
LEAVE = "UPDATE asyncgate.instances SET beat_at = now(), beat_seconds = 0 WHERE instance_id = $1"


class Message(Struct):
    """What one process says to all others."""

    sender: str
    news: list[News]


pack, unpack = msgspec.json.encode, msgspec.json.Decoder(Message).decode


def name_of_this_process() -> str:
    """Return a name that no other process has: the host's, and a random part."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:80]
    return f"{host or 'gate'}-{secrets.token_hex(4)}"


def lock_of(*names: str) -> int:
    """Return the number of the lock that stands for some names, the same in every process."""
    return int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:8], "big", signed=True)


def packed(sender: str, news: Iterable[News]) -> Iterator[str]:
    """Put news into as few messages as hold them; what is too long for one says only that there is something."""
    held: list[News] = []
    for item in news:
        if len(pack(Message(sender, [item]))) > MESSAGE_BYTES:
            item = News(item.tenant_id, many=True)
        if held and len(pack(Message(sender, [*held, item]))) > MESSAGE_BYTES:
            yield pack(Message(sender, held)).decode()
            held = []
        held.append(item)
    yield pack(Message(sender, held)).decode()


class Membership:
    """This process among those that share the database."""

    def __init__(self, url: str, settings: DatabaseSettings, instance_id: str, beat_seconds: float,
                 hear: Callable[[News], None]) -> None:
        self.url, self.settings, self.instance_id = url, settings, instance_id
        self.hosts = Hosts(url, settings.timeout_seconds)
        self.beat_seconds, self.hear = beat_seconds, hear
        self.others: set[str] = set()       # that live
        self.db: asyncpg.Connection | None = None
        self.leads: dict[str, asyncpg.Connection] = {}      # what only one process does, and who holds the lock
        self.using = asyncio.Lock()
        self.beginning, self.last_sign = False, None
        self.pending: list[News] = []
        self.wanted = asyncio.Event()       # a connection, or the pending news sent
        self.keeping: asyncio.Task[None] | None = None

    @property
    def alone(self) -> bool:
        """Whether no other process lives."""
        return not self.others

    def is_connected(self) -> bool:
        """Whether the connection that holds the lock is there."""
        return self.db is not None and not self.db.is_closed()

    async def join(self) -> float | None:
        """Take the name, which no living process may have, and begin to listen; return the last sign if none lives."""
        try:
            await self._connect(PATIENCE_SECONDS)
        except AWAY as error:
            raise startup_error(error, self.url, "the database for locks") from None
        self.keeping = asyncio.create_task(self._keep())
        self.tell()
        return self.last_sign

    async def leave(self) -> None:
        """Give up the name; the others take over at once what is left here."""
        if self.keeping:
            self.keeping.cancel()
            await asyncio.gather(self.keeping, return_exceptions=True)
        with contextlib.suppress(*AWAY):
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._run("execute", LEAVE, self.instance_id)
        if self.db is not None:
            self.db.terminate()

    async def beat(self) -> None:
        """Give a sign of life, see who else does, and let the next process begin if it waits for this one."""
        await self._sign()
        if self.beginning:
            await self._run("execute", GIVE, BEGINNING)
            self.beginning = False

    async def _sign(self) -> None:
        try:
            await self._run("execute", SIGN, self.instance_id, self.beat_seconds)
        except asyncpg.ReadOnlySQLTransactionError:
            if self.db is not None:
                self.db.terminate()     # a session may stay read-only when the database is so no more
            raise
        await self._run("execute", FORGET)
        living = {row[0] for row in await self._run("fetch", LIVING)} - {self.instance_id}
        self._meet(living)
        self.others = living

    def _meet(self, names: set[str]) -> None:
        """Take in who lives; a new one may lease out tasks of ours, so upkeep must look at once and often from now on.

        Nobody else takes such a lease back while this process lives.
        """
        if new := names - self.others:
            self.others |= new
            self.hear(News("", lapse=0.0))

    async def lead(self, job: str) -> bool:
        """Whether this process does a job that only one may; the lock goes with the connection, as the name does."""
        if self.db is not None and not self.db.is_closed() and self.leads.get(job) is self.db:
            return True
        db = self.db
        with contextlib.suppress(*AWAY):
            if await self._run("fetchval", TAKE, f"job\n{job}") and db is self.db and db is not None:
                self.leads[job] = db
                return True
        return False

    def tell(self, *news: News) -> None:
        """Let the others know; what is told while a message is on its way shares the next one."""
        self.pending += news if self.settings.notify else ()
        self.wanted.set()

    async def _connect(self, patience: float) -> None:
        db = await self.hosts.connect(statement_cache_size=0, command_timeout=self.settings.timeout_seconds,
                                      server_settings=session(self.settings))
        try:
            deadline = time.monotonic() + patience
            while not await db.fetchval(TAKE, self.instance_id):
                if time.monotonic() > deadline:
                    raise NotNow(f"another process runs as {self.instance_id} on this database; give this one "
                                       "an instance_id of its own")
                await asyncio.sleep(0.1)
            if self.db is None:
                await self._begin(db)
            if self.settings.notify:
                await db.add_listener(CHANNEL, self._heard)
            await db.execute(PROBED)
        except BaseException:
            db.terminate()
            raise
        db.add_termination_listener(lambda _: self.wanted.set())
        self.db = db
        await self._sign()

    async def _begin(self, db: asyncpg.Connection) -> None:
        """Learn since when nobody serves; two processes that begin together do so one after the other."""
        deadline = time.monotonic() + PATIENCE_BESIDE_SECONDS
        while not await db.fetchval(TAKE, BEGINNING):
            if time.monotonic() > deadline:
                raise NotNow("another process is still giving leases time back; start this one again")
            await asyncio.sleep(0.1)
        self.beginning, self.last_sign = True, await db.fetchval(LAST_SIGN, self.instance_id)

    def _heard(self, db: Any, pid: int, channel: str, text: object) -> None:
        with contextlib.suppress(msgspec.DecodeError):      # a later release may say what we do not know
            message = unpack(str(text))
            if message.sender != self.instance_id:
                self._meet({message.sender})
                for news in message.news:
                    self.hear(news)

    async def _run(self, how: str, statement: str, *given: Any) -> Any:
        async with self.using:
            if self.db is None or self.db.is_closed():
                self.wanted.set()
                raise ConnectionError("the connection for locks and news is lost")
            try:
                return await getattr(self.db, how)(statement, *given)
            except TimeoutError:
                self.db.terminate()     # a host that hangs keeps its connections for ever: another may be there
                raise

    async def _keep(self) -> None:
        """Send what is pending, and connect again when the connection is lost."""
        while True:
            await self.wanted.wait()
            self.wanted.clear()
            try:
                if self.db is None or self.db.is_closed():
                    await self._connect(0.0)
                    log.info("%s has its lock again", self.instance_id)
                await self._send()
            except (*AWAY, StartupError) as error:
                log.warning("no locks and no news for now: %s", error or type(error).__name__, extra=OFTEN)
                await asyncio.sleep(AGAIN_SECONDS)
                self.wanted.set()

    async def _send(self) -> None:
        pending, self.pending = self.pending, []
        if self.settings.notify:
            for message in packed(self.instance_id, pending):
                await self._run("execute", "SELECT pg_notify($1, $2)", CHANNEL, message)


def session(settings: DatabaseSettings) -> dict[str, str]:
    """Return what a session of ours is set to."""
    role = {"role": "asyncgate_app"} if settings.trusted_role else {}     # behind the wall, whoever logs in
    return {"application_name": "asyncgate", **role}
