"""Connecting to Postgres: choose one of several hosts, and explain to the operator why none can be used.

A hanging server accepts connections and never answers, so each host has a timeout of its own, and one that did not
answer is not asked again for a while.  A path may also die in silence, while the server still holds the locks of a
transaction: each side probes it, and the next connection ends the sessions of those that were lost.  An old primary may
come back beside the one that took over, and takes writes as before: so all hosts are asked, the newest timeline is
taken, and who has seen it takes no older one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit
from weakref import WeakKeyDictionary

import asyncpg

from asyncgate.backends.postgres import pipeline
from asyncgate.parts.model import errors
from asyncgate.parts.process.lookups import Lookups

Session: TypeAlias = asyncpg.Connection | pipeline.Connection
C = TypeVar("C", bound=Session)
CONNECT_SECONDS = 5.0
PORT = 5432
# What every statement was written for, whatever a database or a role has as its default.  WARNING is the only word of a
# COMMIT that no standby has confirmed.
PINNED = {
    "default_transaction_isolation": "read committed", "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off", "search_path": "pg_catalog, pg_temp", "row_security": "on",
    "TimeZone": "UTC", "client_min_messages": "warning", "standard_conforming_strings": "on",
    "statement_timeout": "0", "lock_timeout": "0", "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0"}
# It counts from the start of a session, so that it is told with it; servers before 17 refuse to hear of it.
UNTIMED = {"transaction_timeout": "0"}
IDLE, INTERVAL, PROBES = 10, 5, 3       # keepalives: seconds, and how many may be lost
MOST_LOST = 100
SILENT_SECONDS = 10.0   # how long a host that did not answer in time is left alone, if another one works
# Each promotion begins a timeline; one that has just begun is in no checkpoint yet.
TIMELINE = """
SELECT system_identifier::text,
       CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) ELSE '0' END
FROM pg_control_system()"""
# A number is given to another session only after its own has ended, so that one began later.
END_LOST = """
SELECT pg_terminate_backend(pid)
FROM unnest($1::int[], $2::float8[]) AS lost (pid, at) JOIN pg_stat_activity USING (pid)
WHERE usename = session_user AND backend_start < to_timestamp(at)"""
# The database is unavailable now; asyncpg raises the last one if a connection breaks in the middle.
AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
# Another host of the same database would answer the same.
DEFINITE = (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError)


class Lineage:
    """The newest timeline of a database that this process has seen: who has an older one was replaced."""

    def __init__(self) -> None:
        self.newest: defaultdict[str, int] = defaultdict(int)       # by cluster: a restored copy may be another one
        self.open: WeakKeyDictionary[Session, tuple[str, int]] = WeakKeyDictionary()

    async def read(self, db: Session) -> int:
        """Return the timeline of a server, 0 if it tells none; raises ConnectionError if a newer one was seen."""
        try:
            system, timeline = (await db.fetch(TIMELINE))[0]
        except (asyncpg.PostgresConnectionError, asyncpg.OperatorInterventionError):
            raise
        except asyncpg.PostgresError:       # another database that speaks as Postgres does
            return 0
        number, newest = int(timeline, 16), self.newest[system]
        if 0 < number < newest:
            raise ConnectionError(f"it was the primary before another one took over (timeline {number}, not {newest})")
        self.open[db], self.newest[system] = (system, number), max(number, newest)
        return number

    def end_older(self) -> None:
        """End the connections to servers that were replaced: they may go on to answer, and to commit."""
        for db, (system, number) in list(self.open.items()):
            if 0 < number < self.newest[system]:
                db.terminate()


class Hosts:
    """The hosts of a URL, the one that worked last first."""

    def __init__(self, url: str, seconds: float, lineage: Lineage | None = None) -> None:
        self.urls, self.lineage, self.lookups = one_by_one(url), lineage or Lineage(), Lookups()
        self.silent: dict[str, float] = {}      # hosts that did not answer in time, and until when
        most = min(CONNECT_SECONDS, seconds)
        # With several hosts, one hanging host must leave time for the next one and for the query.
        self.seconds = most if len(self.urls) == 1 else most / (len(self.urls) + 1)
        self.patience = seconds
        self.older = set[str]()         # hosts that refused settings of newer servers
        self.lost: dict[int, float] = {}        # sessions whose path may be dead, and since when
        self.now: Callable[[], float] = time.time       # or the database's clock

    async def connect(self, **given: Any) -> asyncpg.Connection:
        """Connect to the newest primary; takes the arguments of `asyncpg.connect` except the address."""
        async def connect(url: str, attributes: dict[str, str]) -> asyncpg.Connection:
            db = await self._begin(url, given.get("server_settings", {}), lambda settings: asyncpg.connect(
                url, **{**given, **attributes, "server_settings": settings, "timeout": self.seconds}))
            try:
                probe(db, self.patience)
            except BaseException:
                db.terminate()
                raise
            return db

        return await self._find_host(connect)

    async def open_pipeline(self, settings: Mapping[str, str], prepares: bool) -> pipeline.Connection:
        """Connect to the newest primary, for statements that travel together."""
        async def connect(url: str, attributes: dict[str, str]) -> pipeline.Connection:
            return await self._begin(url, settings, lambda settings: pipeline.connect(
                url, probes | attributes, settings, self.seconds, self.patience, prepares))

        probes = {"keepalives_idle": f"{IDLE}", "keepalives_interval": f"{INTERVAL}", "keepalives_count": f"{PROBES}",
                  "tcp_user_timeout": f"{int(self.patience * 1000)}"}
        return await self._find_host(connect)

    async def _find_host(self, connect: Callable[[str, dict[str, str]], Awaitable[C]]) -> C:
        several = len(self.urls) > 1 and wants_any_server(self.urls[0])
        attributes = {"target_session_attrs": "read-write"} if several else {}      # a standby cannot be used
        problems: dict[str, Exception] = {}
        answers: dict[str, tuple[C, int]] = {}

        async def ask(url: str) -> None:
            try:
                await self._look_up(url)
                db = await connect(url, attributes)
                answers[url] = db, 0
                async with asyncio.timeout(self.seconds):
                    answers[url] = db, await self.lineage.read(db)
            except AWAY as error:
                problems[url] = error
                if isinstance(error, TimeoutError):
                    self.silent[url] = time.monotonic() + SILENT_SECONDS

        chosen, awake = None, [url for url in self.urls if self.silent.get(url, 0.0) <= time.monotonic()]
        try:
            for urls in (awake, [url for url in self.urls if url not in awake]):
                for problem in await asyncio.gather(*map(ask, urls), return_exceptions=True):
                    if problem is not None:
                        raise problem
                usable = [url for url in urls if url not in problems]
                if usable:
                    chosen = max(usable, key=lambda url: answers[url][1])       # the first of those that are equal
                    break
        finally:
            for url, (db, _) in answers.items():
                if url != chosen:
                    db.terminate()
        self.lineage.end_older()
        if chosen is None:
            raise next((error for error in problems.values() if isinstance(error, DEFINITE)), None) or (
                combine_problems({url: problems[url] for url in self.urls}))
        self.urls.sort(key=lambda url: url != chosen)       # the others stay in their order
        db = answers[chosen][0]
        if db.is_closed():      # while another host was waited for
            raise ConnectionError(f"{address(chosen)}: the connection was lost at once")
        try:
            await self._end_lost(db)
        except BaseException:       # also that the caller has gone: nobody else knows of the connection
            db.terminate()
            raise
        return db

    async def _look_up(self, url: str) -> None:
        """Wait until a host's address is known: by connecting, a name server that hangs takes a thread of the loop."""
        parts = urlsplit(url)
        if (host := unquote(parts.hostname or "")) and not host.startswith("/"):
            async with asyncio.timeout(self.seconds):
                await self.lookups.resolve(host, parts.port or PORT)

    async def _begin(self, url: str, settings: Mapping[str, str],
                     connect: Callable[[Mapping[str, str]], Awaitable[C]]) -> C:
        """Connect with settings, and with those that only newer servers know."""
        if "lock_timeout" in settings and url not in self.older:
            try:
                return await connect({**settings, **UNTIMED})
            except (ConnectionError, asyncpg.UndefinedObjectError) as error:
                if not any(name in str(error) for name in UNTIMED):
                    raise
                self.older.add(url)
        return await connect(settings)

    def lose(self, db: Session) -> None:
        """Give up a connection whose path may be dead; the next one ends its session, which may hold locks."""
        if not db.is_closed() and len(self.lost) < MOST_LOST:
            self.lost[db.get_server_pid()] = self.now()     # of either library's
        db.terminate()

    async def _end_lost(self, db: Any) -> None:
        if self.lost:
            lost = dict(self.lost)
            with contextlib.suppress(asyncpg.PostgresError):    # a superuser's: those end by their timeouts
                await db.fetch(END_LOST, [*lost], [*lost.values()])
            self.lost = {pid: since for pid, since in self.lost.items() if lost.get(pid) != since}


def pin(seconds: float) -> dict[str, str]:
    """Return the settings of a session that waits no longer than this, for statements and for a path that is dead."""
    wait = f"{int(seconds * 1000)}"
    return {**PINNED, "statement_timeout": wait, "idle_in_transaction_session_timeout": wait,
            "tcp_user_timeout": wait, "tcp_keepalives_idle": f"{IDLE}", "tcp_keepalives_interval": f"{INTERVAL}",
            "tcp_keepalives_count": f"{PROBES}"}


def probe(db: asyncpg.Connection, seconds: float) -> None:
    """Have this machine probe the path of a connection, as the server does."""
    transport: Any = getattr(db, "_transport", None)        # asyncpg has no public way to the socket
    path = transport.get_extra_info("socket") if transport else None
    if path is None or path.family not in (socket.AF_INET, socket.AF_INET6):
        return
    path.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": IDLE, "TCP_KEEPINTVL": INTERVAL, "TCP_KEEPCNT": PROBES,
                        "TCP_USER_TIMEOUT": int(seconds * 1000)}.items():
        if hasattr(socket, name):       # not every system has all of them
            path.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def as_user(url: str, user: str) -> str:
    """Return a URL for another user, without a password: Postgres then takes it from PGPASSWORD or a password file."""
    parts = urlsplit(url)
    query = "&".join(pair for pair in parts.query.split("&") if pair.partition("=")[0] not in ("user", "password"))
    return parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}", query=query).geturl()


def one_by_one(url: str) -> list[str]:
    """Return one URL for each host in a URL; Postgres separates hosts by commas."""
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    return [parts._replace(netloc=f"{login}{at}{host}").geturl() for host in hosts.split(",")]


def wants_any_server(url: str) -> bool:
    """Whether neither the URL nor the environment says which kind of server to use."""
    return "target_session_attrs=" not in urlsplit(url).query and "PGTARGETSESSIONATTRS" not in os.environ


def address(url: str) -> str:
    """Return the host and port of a URL, without the credentials."""
    host = urlsplit(url).netloc.rpartition("@")[2]
    if not host:
        return "the host of its settings"
    return unquote(host) if host.rpartition("]")[2].count(":") else f"{unquote(host)}:{PORT}"


def combine_problems(problems: dict[str, Exception]) -> Exception:
    """Return one error that says for each host why it cannot be used."""
    first, *others = problems.values()
    if not others and isinstance(first, asyncpg.PostgresError):
        return first  # type: ignore[no-any-return]  # asyncpg has no types
    text = "; ".join(f"{address(url)}: {describe_problem(error)}" for url, error in problems.items())
    silent = all(isinstance(error, TimeoutError) for error in problems.values())
    return (TimeoutError if silent else ConnectionError)(text)


def describe_problem(error: Exception) -> str:
    """Return in a few words why a host cannot be used."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return "it is read-only, or otherwise not what target_session_attrs requires"
    if isinstance(error, socket.gaierror):      # its number is not an errno
        return f"no such host ({error.strerror})"
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):      # nor is TLS's
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def startup_error(error: Exception, url: str, what: str = "the database") -> errors.StartupError:
    """Return an error that says in one line why a database cannot be used, and what to do."""
    where, user = ", ".join(map(address, one_by_one(url))), urlsplit(url).username or "the user of this process"
    name = unquote(urlsplit(url).path.lstrip("/")) or user
    if isinstance(error, asyncpg.InvalidCatalogNameError):
        return errors.StartupError(
            f"there is no database {name!r} at {where}: create it with `createdb {flags(url)}{name}`, "
            "then run `asyncgate migrate --database URL`")
    if isinstance(error, asyncpg.InvalidAuthorizationSpecificationError):
        return errors.StartupError(
            f"Postgres at {where} refuses the user {unquote(user)}: {error}; put the password into "
            "database.url; `asyncgate migrate` creates the role asyncgate_app")
    if isinstance(error, asyncpg.ProtocolViolationError) and "startup parameter" in str(error):
        return errors.StartupError(
            f"PgBouncer answers at {where}: set database.pgbouncer=true, and set database.direct_url "
            "to the address of Postgres itself")
    if isinstance(error, ValueError):
        return errors.StartupError(f"database.url is not a valid Postgres URL: {error}")
    if isinstance(error, OSError | TimeoutError):
        return errors.NotNow(
            f"cannot reach {what}: {str(error) or where}; is Postgres running there, and is database.url "
            "right?")
    return errors.NotNow(f"cannot use {what} at {where}: {str(error) or type(error).__name__}")


def flags(url: str) -> str:
    """Return the options -h, -p and -U with which Postgres' programs reach the server of a URL.

    The gate's own role may create nothing, so it is not named.
    """
    def named() -> Iterator[str]:
        host, _, port = address(one_by_one(url)[0]).rpartition(":")
        user = unquote(urlsplit(url).username or "")
        if host:
            yield f"-h {host.strip('[]')} -p {port} "
        if user not in ("", "asyncgate_app"):
            yield f"-U {shlex.quote(user)} "
    return "".join(named())
