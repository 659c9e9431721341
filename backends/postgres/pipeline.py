"""Connections whose statements travel together: the pipeline mode of libpq, through psycopg.

`add` notes a statement, and `run` sends all noted ones in one round trip.  When one of them fails, the server skips
those behind it: a COMMIT behind a SAVE that failed commits nothing.  Parameters travel beside the texts, because the
server logs the text of a statement that fails, and no payload may be in a log.

Errors are asyncpg's, which connects where Postgres pushes: see instances.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import asyncpg
import psycopg
from psycopg import pq
from psycopg.adapt import Transformer

Fetched = list[tuple[Any, ...]]
KEYWORDS = frozenset(option.keyword.decode() for option in pq.Conninfo.get_defaults())
SOCKETS = "/run/postgresql,/var/run/postgresql,/var/pgsql_socket,/private/tmp,/tmp,localhost"   # of a URL without host
MOST_PREPARED = 1000        # statements that a session keeps
WATCH_SECONDS = 0.5         # how often somebody who waits for an answer looks for it
IDLE_SECONDS = 300.0        # how long a connection that nobody needs stays open
SPECIAL, ESCAPED = re.compile(r"([\\\s])"), r"\\\1"          # in a value of the options of a session
ERROR_FIELDS = {"S": pq.DiagnosticField.SEVERITY, "C": pq.DiagnosticField.SQLSTATE,
                "M": pq.DiagnosticField.MESSAGE_PRIMARY, "D": pq.DiagnosticField.MESSAGE_DETAIL}
# The server knows a statement no more, or what it returns has changed: it is prepared again.
UNPREPARED = (asyncpg.InvalidSQLStatementNameError, asyncpg.FeatureNotSupportedError)


class Loader:
    """Reads the rows of one statement; it knows their columns after the first ones."""

    def __init__(self) -> None:
        self.transformer, self.informed = Transformer(), False

    def load(self, result: Any) -> list[Any]:
        """Return all rows of a result."""
        self.transformer.set_pgresult(result, set_loaders=not self.informed)
        self.informed, rows = True, self.transformer.load_rows(0, result.ntuples, tuple)
        self.transformer.set_pgresult(None, set_loaders=False)  # else each statement of each connection keeps its last
        return rows


class Statement(NamedTuple):
    """A statement, prepared on one connection under a name; an empty name is that of none."""

    text: str
    name: bytes
    loader: Loader


class Connection:
    """A session of Postgres; what was added travels together."""

    def __init__(self, session: psycopg.AsyncConnection[Any], seconds: float, prepares: bool) -> None:
        self.session, self.pg, self.seconds, self.prepares = session, session.pgconn, seconds, prepares
        self.pg.nonblocking = 1
        self.pg.enter_pipeline_mode()
        self.warnings: list[str] = []
        self.pg.notice_handler = lambda notice: self.warnings.append(notice.get_error_message())
        self.statements: dict[str, Statement] = {}
        self.named = 0              # statements since the session began, also those that it has forgotten
        self.added: list[tuple[str, list[bytes | None], Fetched]] = []
        self.sent: deque[tuple[Statement, Fetched | None]] = deque()   # in order; None: it is prepared
        self.answer: asyncio.Future[asyncpg.PostgresError | None] | None = None
        self.error: asyncpg.PostgresError | None = None
        self.tag: bytes | None = None       # what the server calls the last command that returned no rows
        self.closed, self.idle_since = False, 0.0
        self.loop = asyncio.get_running_loop()
        self.socket = os.dup(self.pg.socket)    # libpq closes its own when it likes; that number may be used again
        self.loop.add_reader(self.socket, self._read)

    def is_closed(self) -> bool:
        """Whether the connection is lost."""
        return self.closed

    def is_in_transaction(self) -> bool:
        """Whether a transaction is open, as the server said last."""
        return self.pg.transaction_status in (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR)

    def get_server_pid(self) -> int:
        """Return the number of the session's process."""
        return self.pg.backend_pid

    def terminate(self, why: Exception | str = "the connection was given up") -> None:
        """Close the connection at once, and say so to whoever waits for an answer."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(RuntimeError):      # the loop is closed
                self.loop.remove_reader(self.socket)
                self.loop.remove_writer(self.socket)
            self.pg.finish()
            os.close(self.socket)
        self._fail(ConnectionError(str(why).partition("\n")[0]))

    async def fetch(self, text: str, *given: Any) -> Fetched:
        """Send all that was added and this statement; return its rows."""
        rows = self.add(text, *given)
        await self.run()
        return rows

    execute = fetch

    async def fetchval(self, text: str, *given: Any) -> Any:
        """Return the first value of the first row."""
        rows = await self.fetch(text, *given)
        return rows[0][0] if rows else None

    def add(self, text: str, *given: Any) -> Fetched:
        """Note a statement; return the list that will have its rows when `run` has returned."""
        rows: Fetched = []
        self.added.append((text, [encode_parameter(value) for value in given], rows))
        return rows

    def is_spent(self) -> bool:
        """Whether nobody can use the connection any more: it is lost, busy, in a transaction, or has prepared much."""
        return (self.closed or self.answer is not None or self.named >= MOST_PREPARED
                or self.pg.transaction_status != pq.TransactionStatus.IDLE)

    async def run(self) -> None:
        """Send all that was added; raises the error of the first statement that failed."""
        added, self.added, self.warnings, self.error = self.added, [], [], None
        answer = self.answer = self.loop.create_future()
        try:
            for text, given, rows in added:
                self._send(text, given, rows)
            self.pg.pipeline_sync()
            if self.pg.flush():
                self.loop.add_writer(self.socket, self._write)
        except psycopg.Error as error:
            self.terminate(error)
        self._watch(self.loop.time() + self.seconds)
        try:
            failed = await answer
        finally:
            self.watch.cancel()
        if failed is not None:
            if isinstance(failed, UNPREPARED):
                self.named = MOST_PREPARED
            raise failed

    def _send(self, text: str, given: Sequence[bytes | None], rows: Fetched) -> None:
        if not self.prepares:
            self.pg.send_query_params(text.encode(), given, result_format=pq.Format.BINARY)
            self.sent.append((Statement(text, b"", Loader()), rows))
            return
        if (statement := self.statements.get(text)) is None:
            self.named += 1
            statement = self.statements[text] = Statement(text, b"s%d" % self.named, Loader())
            self.pg.send_prepare(statement.name, text.encode())
            self.sent.append((statement, None))
        self.pg.send_query_prepared(statement.name, given, result_format=pq.Format.BINARY)
        self.sent.append((statement, rows))

    def _write(self) -> None:
        try:
            if not self.pg.flush():
                self.loop.remove_writer(self.socket)
        except psycopg.Error as error:
            self.terminate(error)

    def _watch(self, deadline: float, again: bool = False) -> None:
        """Look from time to time whether the connection is lost, in case that the event loop does not tell."""
        if again:
            self._read()
            if self.loop.time() >= deadline:
                self._fail(TimeoutError())
        self.watch = self.loop.call_later(min(WATCH_SECONDS, self.seconds), self._watch, deadline, True)

    def _read(self) -> None:
        waited = self.answer is not None
        try:
            self._take_what_is_there()
            if not waited or self.answer is not None:
                self._take_what_is_there()      # uvloop tells of a reset once, also with something to read before it
        except psycopg.Error as error:
            self.terminate(error)

    def _take_what_is_there(self) -> None:
        self.pg.consume_input()     # what it has read is taken here: for that the socket would not be readable again
        while self.answer is not None and not self.pg.is_busy():
            if (result := self.pg.get_result()) is not None:        # between two statements there is none
                self._take(result)

    def _take(self, result: Any) -> None:
        """Take the next result: of a statement, or of the end of all."""
        if result.status == pq.ExecStatus.PIPELINE_SYNC:
            answer, self.answer = self.answer, None
            if answer is not None and not answer.done():
                answer.set_result(self.error)
            return
        statement, rows = self.sent.popleft()
        if result.status == pq.ExecStatus.TUPLES_OK and rows is not None:
            if result.ntuples:
                rows += statement.loader.load(result)
        elif result.status == pq.ExecStatus.COMMAND_OK:
            self.tag = result.command_status
            return
        elif result.status == pq.ExecStatus.FATAL_ERROR:
            self.error = self.error or make_error(result)
        if rows is None:        # it was not prepared
            self.statements.pop(statement.text, None)

    def _fail(self, error: Exception) -> None:
        answer = self.answer
        if answer is not None and not answer.done():
            answer.set_exception(error)


class Pool:
    """The connections of a process, each opened when it is needed."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]], size: int, seconds: float,
                 lose: Callable[[Connection], None]) -> None:
        self.connect, self.size, self.seconds, self.lose = connect, size, seconds, lose
        self.permits = asyncio.Semaphore(size)
        self.idle: list[Connection] = []        # the one that was used last at the end
        self.used: dict[Connection, bool] = {}  # and whether to keep it
        self.closed = False

    @contextlib.asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        """Take a connection for a block; one that nobody else could use is given up behind it."""
        db = await self._take()
        try:
            yield db
        finally:
            self._give_back(db)

    async def _take(self) -> Connection:
        async with asyncio.timeout(self.seconds):
            await self.permits.acquire()
            try:
                if self.closed:
                    raise asyncpg.InterfaceError("the connections to the database are closed")
                db = None
                while self.idle and (db is None or db.closed):
                    db = self.idle.pop()
                if db is None or db.closed:
                    db = await self.connect()
            except BaseException:
                self.permits.release()
                raise
        self.used[db] = True
        return db

    def _give_back(self, db: Connection) -> None:
        self.permits.release()
        db.added.clear()
        keep, db.idle_since = self.used.pop(db), db.loop.time()
        if db.is_spent():
            self.lose(db)
        elif not keep or self.closed:
            db.terminate()
        else:
            self.idle.append(db)
            while self.idle[0].idle_since < db.idle_since - IDLE_SECONDS:
                self.idle.pop(0).terminate()

    def expire(self) -> None:
        """Let nobody use the connections that there are any more: they may be broken, too."""
        self.used = dict.fromkeys(self.used, False)
        while self.idle:
            self.idle.pop().terminate()

    async def close(self) -> None:
        """Close all connections when nobody uses them."""
        self.closed = True
        for _ in range(self.size):
            await self.permits.acquire()
        self.terminate()
        for _ in range(self.size):      # who waits for one is refused
            self.permits.release()

    def terminate(self) -> None:
        """Close all connections at once."""
        self.closed = True
        for db in (*self.idle, *self.used):
            db.terminate()


async def connect(url: str, keywords: Mapping[str, str], settings: Mapping[str, str], seconds: float, patience: float,
                  prepares: bool) -> Connection:
    """Connect to one host; raises ConnectionError or TimeoutError.  An answer may take as long as the patience."""
    parts = urlsplit(url)
    told = {"dbname" if name == "database" else name: value for name, value in parse_qsl(parts.query)}
    options = {**{name: value for name, value in told.items() if name not in KEYWORDS}, **settings}
    given: dict[str, Any] = {name: value for name, value in told.items() if name in KEYWORDS} | {**keywords}
    given |= {"client_encoding": "utf8", "autocommit": True}
    if "application_name" in options:       # PgBouncer knows it, but not the options
        given["application_name"] = options.pop("application_name")
    given["options"] = " ".join([given.get("options", ""), *(
        f"-c {name}={SPECIAL.sub(ESCAPED, value)}" for name, value in options.items())]).strip()
    if not (parts.netloc.rpartition("@")[2] or {"host", "service"} & told.keys() or "PGHOST" in os.environ):
        given["host"] = SOCKETS
    try:
        async with asyncio.timeout(seconds):
            session = await psycopg.AsyncConnection.connect(f"postgresql://{parts.netloc}{parts.path}", **given)
    except psycopg.Error as error:
        raise ConnectionError(str(error).partition("\n")[0]) from error
    return Connection(session, patience, prepares)


def encode_parameter(value: Any) -> bytes | None:
    """Return a parameter as text; raises CharacterNotInRepertoireError for one that no text of Postgres can be."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        value = "{" + ",".join([quote(item) for item in value]) + "}"
    try:
        encoded = str(value).encode()
    except UnicodeEncodeError as error:
        raise asyncpg.CharacterNotInRepertoireError("a text has a lone surrogate") from error
    if b"\0" in encoded:        # libpq would end it there
        raise asyncpg.CharacterNotInRepertoireError("a text has a NUL")
    return encoded


def quote(item: Any) -> str:
    """Return an item of an array."""
    if item is None:
        return "NULL"
    return '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(item, str) else str(item)


def make_error(result: Any) -> asyncpg.PostgresError:
    """Return asyncpg's error of a failed statement."""
    fields = {name: (result.error_field(code) or b"").decode(errors="replace") for name, code in ERROR_FIELDS.items()}
    error: asyncpg.PostgresError = asyncpg.PostgresError.new(fields)
    return error
