"""Several gate processes on one Postgres: their names, which of them are alive, and how they notify each other.

Each process has a row in `instances` with its last sign of life, and holds a name lock (an advisory lock for its name)
on a connection of its own; the database releases the lock at once when the process dies.  The same connection carries
news of committed batches: sent after the commit, several in one message, and allowed to get lost.
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
from asyncgate.backends.postgres import hosts
from asyncgate.backends.postgres.statements import NAME_KEY, SERVES
from asyncgate.parts.model import errors
from asyncgate.parts.model.settings import DatabaseSettings
from asyncgate.parts.process.outages import OFTEN

log = logging.getLogger("asyncgate.postgres")
CHANNEL = "asyncgate"
MESSAGE_BYTES = 7900        # the limit of Postgres is 8000
MOST_PENDING = 10_000       # news that wait to be sent
PATIENCE_SECONDS = 3.0      # how long to wait for the name lock of a process that is just ending
PATIENCE_BESIDE_SECONDS = 60.0      # how long to wait for a process that starts concurrently and has many leases
NUMBERS = 64                # processes beyond share the first number
BEGINNING = "job\nbegin"    # the name that a starting process locks
AGAIN_SECONDS = 0.5         # pause between attempts to reach the database
FORGOTTEN = "1 day"         # how long the row of a dead instance is kept

# Alive: its last sign of life is at most three heartbeats old, or six while its name lock is held.
LIVING = f"""
SELECT instance_id::text FROM asyncgate.instances AS i
WHERE beat_at > now() - make_interval(secs => 3 * beat_seconds) OR {SERVES}"""
TAKE_NAME = f"SELECT pg_try_advisory_lock({NAME_KEY.format('$1::text')})"
# The first free one of the small numbers by which processes tell apart where they count.
TAKE_NUMBER = f"""
SELECT number FROM generate_series(0, {NUMBERS - 1}) AS number
WHERE pg_try_advisory_lock({NAME_KEY.format("'number' || number")}) LIMIT 1"""
RELEASE_NAME = f"SELECT pg_advisory_unlock({NAME_KEY.format('$1::text')})"
# A process that holds its name lock is serving; a recent heartbeat may be that of a process that was killed since.
LAST_SIGN = f"""
SELECT extract(epoch FROM max(beat_at))::float8 FROM asyncgate.instances
WHERE NOT EXISTS (SELECT FROM asyncgate.instances AS i WHERE instance_id <> $1 AND {SERVES})"""
SIGN = """
INSERT INTO asyncgate.instances (instance_id, beat_seconds) VALUES ($1, $2)
ON CONFLICT (instance_id) DO UPDATE SET beat_at = now(), beat_seconds = excluded.beat_seconds"""
FORGET = f"DELETE FROM asyncgate.instances WHERE beat_at < now() - interval '{FORGOTTEN}'"
# The row stays, because the next process to start reads from it when the gate was last alive.
LEAVE = "UPDATE asyncgate.instances SET beat_at = now(), beat_seconds = 0 WHERE instance_id = $1"


class Message(Struct):
    """A notification of one process to all others."""

    sender: str
    news: list[News]


pack, unpack = msgspec.json.encode, msgspec.json.Decoder(Message).decode


def name_of_this_process() -> str:
    """Return a unique name: the host's name and a random part."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:80]
    return f"{host or 'gate'}-{secrets.token_hex(4)}"


def turn_key(*names: str) -> int:
    """Return the turn key of some names: an advisory lock's number, the same in every process."""
    return int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:8], "big", signed=True)


def pack_messages(sender: str, news: Iterable[News]) -> Iterator[str]:
    """Put news into as few messages as possible; news too long for a message become a note to read the database."""
    batch: list[News] = []
    for item in news:
        if len(pack(Message(sender, [item]))) > MESSAGE_BYTES:
            item = News(item.tenant_id, many=True)
        if batch and len(pack(Message(sender, [*batch, item]))) > MESSAGE_BYTES:
            yield pack(Message(sender, batch)).decode()
            batch = []
        batch.append(item)
    yield pack(Message(sender, batch)).decode()


class Membership:
    """This process's membership among the processes that share the database."""

    def __init__(self, url: str, settings: DatabaseSettings, instance_id: str, beat_seconds: float,
                 hear: Callable[[News], None], now: Callable[[], float] = time.time,
                 lineage: hosts.Lineage | None = None) -> None:
        self.url, self.settings, self.instance_id = url, settings, instance_id
        self.hosts = hosts.Hosts(url, settings.timeout_seconds, lineage)
        self.hosts.now = now
        self.beat_seconds, self.hear = beat_seconds, hear
        self.others: set[str] = set()       # other living instances
        self.db: asyncpg.Connection | None = None
        self.leads: dict[str, asyncpg.Connection] = {}      # jobs that this process leads, by connection
        self.using = asyncio.Lock()
        self.beginning, self.last_sign = False, None
        self.number = 0                     # a small one that no other living process has
        self.pending: list[News] = []
        self.wanted = asyncio.Event()       # there is news to send, or the connection is lost
        self.keeping: asyncio.Task[None] | None = None

    @property
    def alone(self) -> bool:
        """Whether no other process lives."""
        return not self.others

    def is_connected(self) -> bool:
        """Whether the connection that holds the lock is there."""
        return self.db is not None and not self.db.is_closed()

    async def join(self) -> float | None:
        """Take the name lock and listen for news; return the last sign of life if no other process is alive."""
        try:
            await self._connect(PATIENCE_SECONDS)
        except hosts.AWAY as error:
            raise hosts.startup_error(error, self.url, "the database for name locks") from None
        self.keeping = asyncio.create_task(self._keep())
        self.tell()
        return self.last_sign

    async def leave(self) -> None:
        """Release the name, so that other processes take over at once."""
        if self.keeping:
            self.keeping.cancel()
            await asyncio.gather(self.keeping, return_exceptions=True)
        with contextlib.suppress(*hosts.AWAY):
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._run("execute", LEAVE, self.instance_id)
        if self.db is not None:
            self.db.terminate()

    async def beat(self) -> None:
        """Store a sign of life, read the others', and release the start lock if this process holds it."""
        await self._sign()
        if self.beginning:
            await self._run("execute", RELEASE_NAME, BEGINNING)
            self.beginning = False

    async def _sign(self) -> None:
        try:
            await self._run("execute", SIGN, self.instance_id, self.beat_seconds)
        except asyncpg.ReadOnlySQLTransactionError:
            if self.db is not None:
                self.db.terminate()     # a session may stay read-only after the database has become writable
            raise
        await self._run("execute", FORGET)
        living = {row[0] for row in await self._run("fetch", LIVING)} - {self.instance_id}
        self._note_living(living)
        self.others = living

    def _note_living(self, names: set[str]) -> None:
        """Note living instances; for a new one, make upkeep run at once, because it may lease tasks of this instance.

        Only this process takes back such leases while it is alive.
        """
        if new := names - self.others:
            self.others |= new
            self.hear(News("", lapse=0.0))

    async def lead(self, job: str) -> bool:
        """Whether this process leads a job that only one may do; it does while it holds the job's name lock."""
        if self.db is not None and not self.db.is_closed() and self.leads.get(job) is self.db:
            return True
        db = self.db
        with contextlib.suppress(*hosts.AWAY):
            if await self._run("fetchval", TAKE_NAME, f"job\n{job}") and db is self.db and db is not None:
                self.leads[job] = db
                return True
        return False

    def tell(self, *news: News) -> None:
        """Send news to the other processes; news that come while a message is sent share the next message.

        While none can be sent, only the newest are kept: the others look for themselves.
        """
        self.pending += news if self.settings.notify else ()
        if len(self.pending) > MOST_PENDING:
            del self.pending[:MOST_PENDING // 2]
        self.wanted.set()

    async def _connect(self, patience: float) -> None:
        db = await self.hosts.connect(statement_cache_size=0, command_timeout=self.settings.timeout_seconds,
                                      server_settings=session(self.settings) | hosts.pin(self.settings.timeout_seconds))
        try:
            deadline = time.monotonic() + patience
            while not await db.fetchval(TAKE_NAME, self.instance_id):
                if time.monotonic() > deadline:
                    raise errors.NotNow(
                        f"another process runs as {self.instance_id} on this database; give this one another "
                             "instance_id")
                await asyncio.sleep(0.1)
            if self.db is None:
                await self._begin(db)
            self.number = await db.fetchval(TAKE_NUMBER) or 0
            if self.settings.notify:
                await db.add_listener(CHANNEL, self._receive)
        except BaseException:
            db.terminate()
            raise
        db.add_termination_listener(lambda _: self.wanted.set())
        self.db = db
        await self._sign()

    async def _begin(self, db: asyncpg.Connection) -> None:
        """Read when a process last served; processes that start concurrently do so one after another."""
        deadline = time.monotonic() + PATIENCE_BESIDE_SECONDS
        while not await db.fetchval(TAKE_NAME, BEGINNING):
            if time.monotonic() > deadline:
                raise errors.NotNow("another process is starting and still extends leases; start this one again later")
            await asyncio.sleep(0.1)
        self.beginning, self.last_sign = True, await db.fetchval(LAST_SIGN, self.instance_id)

    def _receive(self, db: Any, pid: int, channel: str, text: object) -> None:
        with contextlib.suppress(msgspec.DecodeError):      # a later release may send unknown messages
            message = unpack(str(text))
            if message.sender != self.instance_id:
                if message.sender:      # and not an application that hands work over
                    self._note_living({message.sender})
                for news in message.news:
                    self.hear(news)

    async def _run(self, how: str, statement: str, *given: Any) -> Any:
        async with self.using:
            if self.db is None or self.db.is_closed():
                self.wanted.set()
                raise ConnectionError("the connection for name locks and news is lost")
            try:
                return await getattr(self.db, how)(statement, *given)
            except TimeoutError:
                self.hosts.lose(self.db)        # a hanging host never closes its connections; another may answer
                raise

    async def _keep(self) -> None:
        """Send pending news, and connect again when the connection is lost."""
        while True:
            await self.wanted.wait()
            self.wanted.clear()
            try:
                if self.db is None or self.db.is_closed():
                    await self._connect(0.0)
                    log.info("%s has its name lock again", self.instance_id)
                await self._send()
            except (*hosts.AWAY, errors.StartupError) as error:
                log.warning("name locks and news are unavailable now: %s", error or type(error).__name__, extra=OFTEN)
                await asyncio.sleep(AGAIN_SECONDS)
                self.wanted.set()

    async def _send(self) -> None:
        pending, self.pending = self.pending, []
        if self.settings.notify:
            try:
                for message in pack_messages(self.instance_id, pending):
                    await self._run("execute", "SELECT pg_notify($1, $2)", CHANNEL, message)
            except asyncpg.ProgramLimitExceededError:
                # Postgres frees the queue of notifications behind a notification, and a full queue takes none; reading
                # how full it is frees it, too, once nobody keeps it full any more.
                await self._run("execute", "SELECT pg_notification_queue_usage()")
                raise


def session(settings: DatabaseSettings) -> dict[str, str]:
    """Return the settings of a session."""
    role = {"role": "asyncgate_app"} if settings.trusted_role else {}     # behind the wall, whoever logs in
    return {"application_name": "asyncgate", **role}
