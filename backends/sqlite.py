"""SQLite: one writer thread that runs whole batches, and concurrent readers on the write-ahead log.

A batch goes to the writer thread once, with its needs and its `decide`, and comes back durable: changing threads costs
more than ten statements.  Batches of all tenants that wait meanwhile share one fsync.  `BEGIN IMMEDIATE` takes the
write lock before the first read, so no row can change after a batch has loaded it.

A COMMIT that fails leaves open what is on the disk: all of it, where only the report of an fsync was lost, a part, or
nothing, where the kernel shows pages that the disk never took.  Its batches are answered with a 503, and the next one
begins on a new connection, with the write-ahead log made durable as it is read (`rewrite_log`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import queue
import re
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import aiosqlite

from asyncgate import Needs, News, Work
from asyncgate.backends import Backend, FileBackend, LastingBackend, sqlite_tables
from asyncgate.backends.lineage import FIRST, digest, require_lineage
from asyncgate.backends.tables import SQLITE_DIALECT, add_tables
from asyncgate.parts.model import errors
from asyncgate.parts.model.clock import SteadyClock
from asyncgate.parts.model.findings import Finding
from asyncgate.parts.model.settings import DatabaseSettings, Settings
from asyncgate.parts.process.folders import fsync_folder
from asyncgate.parts.process.outages import OFTEN
from asyncgate.parts.process.turns import counting

log = logging.getLogger("asyncgate.sqlite")
SCHEMA = Path(__file__).parent / "schema" / "sqlite"
CURRENT_SCHEMA = len(list(SCHEMA.glob("[0-9]*.sql")))
FILE_PAGE = 2048       # bytes, of a new file: a commit writes whole pages twice; smaller ones slow large commits down
COPIED_CHANGES = 16384      # of rows, after which the log is copied back: 6 to 30 MiB of it
LARGE_LOG = 32 << 20        # bytes of it, at which it is copied back at once
PRAGMAS = f"""
    PRAGMA page_size = {FILE_PAGE}; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;
    PRAGMA wal_autocheckpoint = 0; PRAGMA journal_size_limit = {LARGE_LOG}; PRAGMA cache_size = -65536;
    PRAGMA mmap_size = 1073741824; PRAGMA temp_store = MEMORY; PRAGMA foreign_keys = OFF;
    PRAGMA recursive_triggers = ON;
"""     # recursive_triggers: without it, REPLACE would delete rows without firing the triggers that protect them
HOW_TO_MIGRATE = "run `asyncgate migrate --database URL`"
WAY_ON = ("; what was acknowledged is in the file and its -wal, which stay as they are: make room on the disk, or "
          "repair it, then start again")
WAYS_ON = {sqlite3.SQLITE_IOERR: WAY_ON, sqlite3.SQLITE_FULL: WAY_ON,
           sqlite3.SQLITE_READONLY: "; the system did not open it for writing: see its rights and its disk, then start "
                                    "again"}
TENANTS_TABLES = """
    SELECT t.name FROM sqlite_master AS t JOIN pragma_table_info(t.name) AS c ON c.name = 'tenant_id'
    WHERE t.type = 'table' AND t.name NOT IN ('tenants', 'wall')"""
OTHERS = "tenant_id IS NOT (SELECT tenant_id FROM wall)"
WALLED = {"insert": f"NEW.{OTHERS}", "update": f"NEW.{OTHERS} OR OLD.tenant_id IS NOT NEW.tenant_id",
          "delete": f"OLD.{OTHERS}"}
COPIED_PAGES = 4096     # of a backup, at once
REWRITTEN = 1 << 20     # bytes of the log, at once
SHARE = 64          # the most batches that share one commit
LOOK_AGAIN_SECONDS = 0.0005     # our own tools look for a free write lock so often, SQLite every 100 ms or sooner
BUSY_SECONDS = 30           # how long the write lock of another program is waited for, except by a gate's batches
AGAIN_MS = 50               # how long they wait for it once one has waited in vain
NOTICED_SECONDS = 5.0       # how long another program may hold it, or a read may take, until the gate is unhealthy
# What the disk or another program is to blame for; everything else is a mistake and keeps its traceback.
OUTAGES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR,
           sqlite3.SQLITE_READONLY}

REPLICATORS = "_litestream_"        # tables of a replicator, which may open a new file before the gate has filled it
KEPT_OUT = "another program holds the write lock of the database file; nothing was stored, so try again"


class WriterCall(NamedTuple):
    """A function to run on the writer thread."""

    run: Callable[[], Any]
    answer: asyncio.Future[Any]


class Flight(NamedTuple):
    """A batch to run on the writer thread, and who waits until it has landed."""

    tenant_id: str
    needs: Needs
    decide: Callable[[Work], None]
    landed: asyncio.Future[None]


Landing = tuple[asyncio.Future[Any], Any, BaseException | None]


class Sqlite(sqlite_tables.SqliteTables):
    """A database file with one writer thread and two readers."""

    parallel, parallel_per_tenant = SHARE, 2        # while one batch of a tenant is committed, the next one fills

    def __init__(self, path: str, lock: FileLock | None = None, patience: float = BUSY_SECONDS) -> None:
        super().__init__()
        self.path, self.serving, self.lock, self.patience = path, lock is not None, lock, patience
        self.kept_out_at: float | None = None       # since when a batch waits for another program's lock
        self.queue: queue.SimpleQueue[Flight | WriterCall | None] = queue.SimpleQueue()
        self.readers: list[aiosqlite.Connection] = []
        self.opened = contextlib.AsyncExitStack()           # closes everything in reverse order of opening
        if lock:
            self.opened.callback(lock.release)
        self.turn = 0
        self.files: dict[str, int] = {}                     # the inodes of those that are open, by name
        self.doubted = False                                # whether a COMMIT has failed on the writer's connection
        self.copied = 0                                     # changes of the writer when its log was copied back last
        self.torn = False                                   # whether what was copied back may be lost
        self.writing_since: float | None = None             # before the batches that are being written had their time

    async def open(self) -> Sqlite:
        """Migrate, start the writer and open the readers; close everything again if that fails."""
        try:
            await self._open()
        except BaseException as error:
            await self.close()
            if isinstance(error, sqlite3.Error):
                cure = WAYS_ON.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "")
                raise errors.StartupError(f"cannot use {self.path} as a database: {error}{cure}") from error
            raise
        return self

    async def _open(self) -> None:
        refuse_left_log(self.path)
        if self.lock and b"://" in self.lock.left:
            notice_missing_log(self.path)
        self.db = connect(self.path)
        self.opened.callback(self._close_writer)
        require_ours(self.db, self.path)
        run_beside(self.db, PRAGMAS)
        self._take_over()
        migrate_file(self.db)
        self._load_caches()
        # what is damaged is told who reads it
        last, _ = attempt(lambda: self.db.execute(sqlite_tables.LAST_TIME).fetchone()[0])
        self.clock = SteadyClock(after=last)
        self.files = inodes(self.path)
        self.loop = asyncio.get_running_loop()
        for _ in range(2):
            reader = await aiosqlite.connect(self.path, isolation_level=None, timeout=BUSY_SECONDS)
            self.opened.push_async_callback(reader.close)
            await reader.execute("PRAGMA query_only = 1")
            self.readers.append(reader)
        self.writer = threading.Thread(target=self._write, name="sqlite-writer", daemon=True)
        self.writer.start()
        self.opened.push_async_callback(self._stop_writer)

    def _take_over(self) -> None:
        """Make durable what the last process has left; a tool beside a gate that serves the file leaves that to it."""
        from asyncgate.backends.sqlite_examination import read_holder  # which is made of this module
        if self.lock or not ((holder := read_holder(self.path)) and holder.lives):
            rewrite_log(self.db, self.path)

    def announce(self, url: str) -> None:
        """Store this process's address in the lock file, for the error of another process that wants the database."""
        if self.lock:
            self.lock.store_address(url)

    async def join(self, instance_id: str, beat_seconds: float, hear: Callable[[News], None]) -> float | None:
        """Return the time of the last sign of life; the file lock keeps other processes out."""
        sign: float | None = (await self._rows(sqlite_tables.LAST_SIGN))[0][0]
        return sign

    async def beat(self) -> None:
        """Store that this process is alive; a no-op without live leases, because only leases depend on it."""
        with translate_outages():
            await self._call_writer(self._sign)

    def _sign(self) -> None:
        self._begin()       # as batches do: so it is noticed that another program's lock has gone
        self.db.execute(sqlite_tables.SIGN, (self.now(),))
        self._end()

    async def alive(self) -> None:
        """Read one row; raises an exception if the file was deleted or replaced, or cannot be read, or written."""
        await self._look()

    async def is_current(self) -> bool:
        """Whether nobody has migrated the file, or put an older one in its place."""
        return await self._look() == [(str(CURRENT_SCHEMA),)]

    async def _look(self) -> list[tuple[Any, ...]]:
        """Read the number of the schema, and wait for no disk longer than an orchestrator does."""
        with translate_outages():
            self._require_same_file()
        if self.kept_out_at is not None and time.monotonic() - self.kept_out_at > NOTICED_SECONDS:
            raise errors.DatabaseUnavailable(KEPT_OUT, retry_after=1)
        try:
            async with asyncio.timeout(NOTICED_SECONDS):
                return await self._rows("SELECT value FROM meta WHERE name = 'schema_version'")
        except TimeoutError:
            raise errors.DatabaseUnavailable("the database does not answer; try again", retry_after=1) from None

    async def close(self) -> None:
        """Finish running work, close everything, and release the file for another process."""
        await self.opened.aclose()

    async def _stop_writer(self) -> None:
        if self.serving:
            # a full disk: the next start hears of an older sign
            with contextlib.suppress(errors.DatabaseUnavailable):
                await self.beat()
        self.queue.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self.writer.join)

    # Writing.

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Hand a batch to the writer and wait until it is durable."""
        landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queue.put(Flight(tenant_id, needs, decide, landed))
        with translate_outages(errors.outcome_unknown()):
            await landed

    def _write(self) -> None:
        """Take all waiting batches and commit them together, in a loop; the writer thread runs this."""
        while (first := self.queue.get()) is not None:
            flights, last = [first], False
            while len(flights) < SHARE and not self.queue.empty():
                if (following := self.queue.get()) is None:
                    last = True
                    break
                flights.append(following)
            for call in [item for item in flights if isinstance(item, WriterCall)]:
                self._answer([(call.answer, *attempt(partial(self._run_call, call)))])
            if batches := [item for item in flights if isinstance(item, Flight)]:
                self.writing_since = self.clock()
                outcomes = self._commit(batches)
                self.writing_since = None
                self._answer(outcomes)
            self._copy_back()
            if last:
                break

    def _copy_back(self) -> None:
        """Copy the write-ahead log into the file, when it has enough.

        SQLite does that by itself, and says nothing when the fsync of the file fails.  What it had copied before may
        then be lost, because the kernel drops it, and SQLite copies only what is newer.  So nothing more is copied
        after that, and the log keeps everything for the next start, which copies it from its beginning.
        """
        changes = self.db.total_changes
        try:
            if self.torn or self.doubted or (
                    changes - self.copied < COPIED_CHANGES and os.stat(f"{self.path}-wal").st_size <= LARGE_LOG):
                return
            self.db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except (sqlite3.Error, OSError) as error:
            self.torn = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_FSYNC
            log.error("%s-wal cannot be copied into the file%s: %s", self.path, ", and grows until the gate is started "
                      "again" if self.torn else "", error, extra=OFTEN)
        self.copied = changes

    def _close_writer(self) -> None:
        """Close the writer's connection; after a failed fsync keep it to the end of the process.

        The last connection that is closed copies the rest of the log back, and deletes it.
        """
        if self.torn:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.db))
        else:
            self.db.close()

    def _run_call(self, call: WriterCall) -> Any:
        """Run something else than a batch; some of it commits by itself."""
        self._renew_doubted()
        try:
            return call.run()
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY:     # that comes before a COMMIT
                self._doubt()
            raise

    def _doubt(self) -> None:
        """Use this connection no more: what it could not commit may be on the disk, or not."""
        self.doubted = True
        self._roll_back()

    def _renew_doubted(self) -> None:
        """Replace a connection on which a COMMIT has failed; raises an exception while the disk does not work.

        The old one is closed last: the log of a file that nobody has open would be read from its beginning, and then
        the COMMIT that has failed may count after all.
        """
        if not self.doubted:
            return
        self._require_same_file()
        fresh = connect(self.path)
        try:
            run_beside(fresh, PRAGMAS)
            rewrite_log(fresh, self.path)
        except BaseException:
            fresh.close()
            raise
        self.db, doubted = fresh, self.db
        doubted.close()
        self._load_caches()
        self.tenant_id, self.doubted, self.copied = None, False, 0
        log.warning("%s: a commit had failed; the gate writes on a new connection", self.path)

    def _answer(self, outcomes: list[Landing]) -> None:
        def settle() -> None:
            for future, value, error in outcomes:
                if not future.done():
                    future.set_exception(error) if error else future.set_result(value)
        with contextlib.suppress(RuntimeError):     # the event loop is closed, so nobody waits any more
            self.loop.call_soon_threadsafe(settle)

    def _commit(self, flights: list[Flight]) -> list[Landing]:
        """Run batches in one transaction; if one is refused, run each by itself.

        Without savepoints: with one, SQLite writes the pages that each statement touches to a temporary file, which
        was measured to take longer than everything else.
        """
        try:
            self._begin()
            done = [self._decide(*flight[:3]) for flight in flights]
            self._end()
        except sqlite_tables.REFUSALS as error:
            self._roll_back()
            if len(flights) > 1:
                return [outcome for flight in flights for outcome in self._commit([flight])]
            refused = errors.Refused(str(error))
            refused.__cause__ = error
            return [(flights[0].landed, None, refused)]
        except BaseException as error:
            self._roll_back()
            return [(flight.landed, None, error) for flight in flights]
        for work in done:
            self.known.add(work.tenant_id)
            for lane, kind in work.lanes.items():
                self.lanes[work.tenant_id].learn(lane, *kind)
        return [(flight.landed, None, None) for flight in flights]

    def _begin(self) -> None:
        """Begin to write; what waits behind a batch that another program kept out in vain does not wait again."""
        self._renew_doubted()
        waited = self.kept_out_at is not None
        self.db.execute(f"PRAGMA busy_timeout = {AGAIN_MS if waited else self.patience * 1000:.0f}")
        self.kept_out_at = self.kept_out_at if waited else time.monotonic()
        try:
            self.db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                raise errors.DatabaseUnavailable(KEPT_OUT, retry_after=1) from error
            self.kept_out_at = None
            raise
        self.kept_out_at = None

    def _end(self) -> None:
        """Commit; one that fails takes the trust in its connection with it."""
        try:
            self._require_same_file()
            self.db.execute("COMMIT")
        except BaseException:
            self._doubt()
            raise

    def _roll_back(self) -> None:
        """Leave the transaction, which some errors have ended already."""
        self.tenant_id = None
        if self.db.in_transaction and attempt(lambda: self.db.execute("ROLLBACK"))[1]:
            self.doubted = True

    def _require_same_file(self) -> None:
        """Refuse to use a file that was deleted or replaced while it was open; raises OSError."""
        for name, inode in self.files.items():
            if os.stat(name).st_ino != inode:
                raise OSError(f"{name} was replaced while the gate was using it")

    # Reading.

    async def _rows(self, sql: str, *given: Any) -> list[tuple[Any, ...]]:
        """Run one query; raises DatabaseUnavailable if the file cannot be read."""
        try:
            return await self._read(sql, given)
        except (sqlite3.OperationalError, OSError) as error:
            log.error("the database cannot be read: %s", error, extra=OFTEN)
            raise errors.DatabaseUnavailable("the database does not answer; try again", retry_after=1) from error
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:    # a mistake of ours
                raise
            log.error("%s is damaged: %s", self.path, error, extra=OFTEN)
            raise errors.DatabaseUnavailable(
                "the database file is damaged: `asyncgate verify` says how much of it is whole, "
                "docs/recovery.md how to restore a backup") from error

    async def _read(self, sql: str, given: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Run a query on a reader."""
        self.turn = (self.turn + 1) % len(self.readers)
        rows: list[tuple[Any, ...]] = await self.readers[self.turn].execute_fetchall(sql,
                                                                                     given)  # type: ignore[assignment]
        if (call := counting.get()) is not None:
            call.add_rows(len(rows))
        return rows

    async def find_settled(self, tenant_id: str) -> float:
        """Return before which moment no change of a task is missing: those of the batches being written are later."""
        now, since = self.now(), self.writing_since     # in this order: a batch that begins between them is later
        return now if since is None else min(now, since + self.skew)

    async def _write_alone(self, run: Callable[[], Any]) -> Any:
        """Run something that writes on the writer thread, where no batch runs meanwhile."""
        with translate_outages():
            return await self._call_writer(run)

    async def _call_writer(self, run: Callable[[], Any]) -> Any:
        """Run something on the writer thread, behind everything that was acknowledged."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.queue.put(WriterCall(run, answer))
        return await answer

    async def check(self) -> list[str]:
        """Return the problems that SQLite finds in its file; an empty list if it is sound."""
        try:
            return [row[0] for row in await self._read("PRAGMA integrity_check", ()) if row[0] != "ok"]
        except sqlite3.DatabaseError as error:
            return [str(error)]

    async def compact(self) -> None:
        """Shrink the file by its free pages, and empty its logs; writes wait meanwhile."""
        try:
            await self._call_writer(lambda: self.db.execute("VACUUM"))
            await self._call_writer(lambda: self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())
        except sqlite3.OperationalError as error:
            log.error("%s was not rewritten: %s", self.path, error)
            raise errors.DatabaseUnavailable(
                f"the rest is done, but the file was not rewritten and keeps its free pages: "
                f"{error}; this needs room for a second copy of it; call again") from error

    async def backup(self, target: str, told: Callable[[int, int], None] | None = None) -> None:
        """Copy a consistent snapshot of the database to a new file while the gate goes on.

        `told` is called with the number of copied pages and of all pages.
        """
        await asyncio.get_running_loop().run_in_executor(None, copy_file, self.path, target, told)


def inodes(path: str) -> dict[str, int]:
    """Return the inodes of a database's files."""
    return {name: os.stat(name).st_ino for name in (path, f"{path}-wal") if os.path.exists(name)}


@contextlib.contextmanager
def translate_outages(answer: errors.DatabaseUnavailable | None = None) -> Iterator[None]:
    """Turn an outage of the disk, or the lock of another program, into a 503, and a traceback into a line."""
    try:
        yield
    except (sqlite3.OperationalError, OSError) as error:
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF not in OUTAGES:
            raise
        log.error("the database does not answer: %s", error, extra=OFTEN)
        raise answer or errors.DatabaseUnavailable("the database does not answer; try again", retry_after=1) from error


def attempt(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Call a function; return its result, or its exception."""
    try:
        return call(), None
    except BaseException as error:
        return None, error


def connect(path: str) -> sqlite3.Connection:
    """Open a connection with explicit transactions; a new file is readable by its owner only."""
    if not os.path.exists(path):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))      # only a new file: closing drops locks
    elif os.name == "posix" and (mode := os.stat(path).st_mode) & 0o077 and stat.S_ISREG(mode):
        log.warning("%s can be accessed by other users (mode %o): run chmod 600 %s", path, stat.S_IMODE(mode), path)
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=512,
                           timeout=BUSY_SECONDS)


def require_ours(db: sqlite3.Connection, path: str) -> None:
    """Refuse another program's database, before anything in it is changed; raises StartupError."""
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
             if not name.startswith(REPLICATORS)]
    columns = {row[1] for row in db.execute("PRAGMA table_info(meta)")}
    if names and not ({"name", "value"} <= columns
                      and db.execute("SELECT 1 FROM meta WHERE name = 'schema_version'").fetchone()):
        some = ", ".join(names[:3]) + ", …" * (len(names) > 3)
        raise errors.StartupError(
            f"{path} is a database of another program (its tables are {some}): name another file; a new "
            "one is created if it does not exist")


def refuse_left_log(path: str) -> None:
    """Refuse a file beside a log that may have acknowledged work, and cannot be taken over; raises StartupError.

    SQLite would delete the write-ahead log of a file that is not there.  What of the redo log of a killed gate of an
    earlier release is in the file already, only that release can tell, and it takes the rest over.
    """
    wal = f"{path}-wal"
    if not os.path.exists(path) and os.path.exists(wal) and os.path.getsize(wal):
        raise errors.StartupError(
            f"{wal} is there and {path} is not: it may have the newest acknowledged work of a gate that "
            f"was killed; put {path} back beside it, or move {wal} to where {path} went")
    if os.path.exists(f"{path}-redo"):
        raise errors.StartupError(f"{path}-redo was left by a gate of an earlier release that was killed, and may have "
                                  f"acknowledged work that {path} lacks: start that release once and stop it in order, "
                                  "then "
                                  f"start this one; or move {path}-redo away, and give that work up")


def notice_missing_log(path: str) -> None:
    """Log that the write-ahead log of a killed gate is not there; a gate that ends deletes it, and says so in the lock.

    Whether anything is lost cannot be known, so nobody is refused: a restored backup has no log, and a program that
    has opened the file since has copied it back.
    """
    if os.path.exists(path) and not os.path.exists(f"{path}-wal"):
        log.error("%s-wal is not there, although the gate that served the file was killed: its newest work was in it. "
                  "That is lost, unless another program has opened the file since, or the file is a restored backup",
                  path)


def rewrite_log(db: sqlite3.Connection, path: str) -> None:
    """Write the write-ahead log once more as it is read, and wait for the disk; raises OSError.

    After an fsync that has failed, the kernel may show what the disk never took, also to the next process, and does
    not write it any more.  A commit behind such a piece would be lost with it.  The folder is synced too: SQLite does
    not look whether that has worked when it makes its log.
    """
    run_beside(db, "BEGIN IMMEDIATE")        # nobody appends meanwhile
    try:
        with open(f"{path}-wal", "r+b") as file:
            while piece := file.read(REWRITTEN):
                file.seek(-len(piece), os.SEEK_CUR)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(os.path.dirname(path))
    except FileNotFoundError:       # nothing was written yet
        pass
    finally:
        db.execute("ROLLBACK")


def migrations(folder: Path = SCHEMA) -> list[Path]:
    """Return the migration files in order."""
    return sorted(folder.glob("[0-9]*.sql"))


def first_digest() -> str:
    """Return the digest of the first migration."""
    return digest(read_migration(migrations()[0]))


@cache
def read_migration(file: Path) -> str:
    """Return a migration with all its statements."""
    return add_tables(file.read_text(), SQLITE_DIALECT)


def migrate_file(db: sqlite3.Connection, folder: Path = SCHEMA) -> None:
    """Apply the migrations that the database lacks, all in one transaction."""
    files = migrations(folder)
    with transaction(db):
        version, kept = beginning(db)
        if version:
            require_lineage(kept, digest(read_migration(files[0])))
        if version > len(files):
            raise errors.StartupError(f"this database has schema {version}, but this release knows only schemas up to "
                                      f"{len(files)}; run a newer release")
        for file in files[version:]:
            for statement in statements(read_migration(file)):
                db.execute(statement)
        if version < len(files):
            build_walls(db)
            store_version(db, len(files))
        db.execute("INSERT OR IGNORE INTO meta VALUES ('cursor_key', ?)", (secrets.token_hex(32),))
        # A random name, because two gates on one ledger must not have the same name.
        db.execute("INSERT OR IGNORE INTO meta VALUES ('instance_id', ?)", (f"asyncgate-{secrets.token_hex(4)}",))


def build_walls(db: sqlite3.Connection) -> None:
    """Build the wall between tenants: a statement that lacks its WHERE clause fails instead of changing others' rows.

    The triggers roll back the whole transaction: for a trigger that could ABORT only one statement, SQLite would save
    every page that the statement touches.
    """
    for (table,) in db.execute(TENANTS_TABLES).fetchall():
        for verb, row in WALLED.items():
            db.execute(f"CREATE TRIGGER IF NOT EXISTS {table}_{verb}_wall BEFORE {verb} ON {table} WHEN {row} "
                       "BEGIN SELECT RAISE(ROLLBACK, 'another tenant''s row'); END")


def beginning(db: sqlite3.Connection) -> tuple[int, str | None]:
    """Return the number of a file's schema (0 if it has none), and the digest of its first migration if stored."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        return 0, None
    meta = dict(db.execute("SELECT name, value FROM meta WHERE name IN ('schema_version', ?)", (FIRST,)).fetchall())
    return int(meta.get("schema_version", 0)), meta.get(FIRST)


def store_version(db: sqlite3.Connection, version: int) -> None:
    """Store the number of a file's schema, and the digest of its first migration."""
    db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", [
        ("schema_version", str(version)), (FIRST, first_digest())])


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run a block in one transaction that holds the write lock from the beginning."""
    run_beside(db, "BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def run_beside(db: sqlite3.Connection, script: str) -> None:
    """Run what needs a lock beside other programs; one under load leaves it free for short moments only.

    SQLite does not wait itself when a new file becomes one of WAL beside another's write, as a replicator's first one.
    """
    until = time.monotonic() + BUSY_SECONDS
    db.execute("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                db.executescript(script)
                return
            except sqlite3.OperationalError as busy:
                if busy.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
            time.sleep(LOOK_AGAIN_SECONDS)
    finally:
        db.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000:d}")


def statements(script: str) -> Iterator[str]:
    """Split a script into statements; executescript would commit the open transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


class FileLock:
    """An exclusive lock on `FILE.lock`: only one process may serve a file; the system releases it if that one dies."""

    def __init__(self, path: str) -> None:
        import fcntl
        try:
            self.file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise errors.StartupError(f"cannot open {path}: {error.strerror}") from error
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            who = describe_holder(os.pread(self.file, 200, 0))
            os.close(self.file)
            raise errors.NotNow(
                f"another asyncgate is serving {path}{who}; only one process may serve a SQLite file, use "
                "Postgres for several") from None
        self.left = os.pread(self.file, 200, 0)     # by a process that was killed while it served
        self.store_address("")

    def store_address(self, url: str) -> None:
        """Store this process's id and address in the lock file, for other processes."""
        with contextlib.suppress(OSError):      # a full disk shows in more important writes
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, f"{os.getpid()} {url}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock, so that another process may serve the file."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.file, 0)
        os.close(self.file)


def describe_holder(content: bytes) -> str:
    """Return the process id and address in a lock file as text."""
    match = re.match(rb"(\d{1,10}) ?(https?://[\w.:\[\]-]*)?", content)
    if not match:
        return ""
    return f": process {int(match[1])}{f' at {match[2].decode()}' if match[2] else ''}"


def copy_file(source: str, target: str, told: Callable[[int, int], None] | None = None) -> None:
    """Copy a database in use page by page, and check the copy; raises OSError."""
    try:
        verdict = copy_pages(source, target, told)
    except sqlite3.Error as error:      # the disk of the copy is full, or a page cannot be read
        raise OSError(str(error)) from error
    os.chmod(target, 0o600)
    if verdict != "ok":
        raise OSError(f"the copy at {target} is damaged: {verdict}")


def copy_pages(source: str, target: str, told: Callable[[int, int], None] | None) -> str:
    """Copy a database in use page by page; return what SQLite finds in the copy, "ok" if nothing."""
    with (contextlib.closing(sqlite3.connect(f"{Path(source).absolute().as_uri()}?mode=ro", uri=True)) as old,
          contextlib.closing(sqlite3.connect(target)) as new):
        tell = told or (lambda done, total: None)
        # In one read transaction: else each commit of the gate would make the copy begin anew.
        old.isolation_level = None
        old.execute("BEGIN")
        old.execute("SELECT 1 FROM sqlite_master").fetchone()
        old.backup(new, pages=COPIED_PAGES, progress=lambda _, left, total: tell(total - left, total))
        verdict: str = new.execute("PRAGMA integrity_check").fetchone()[0]
        return verdict


def path_of(url: str) -> str:
    """Return the path in a URL: sqlite:///relative.db, sqlite:////absolute.db."""
    if not (match := re.fullmatch(r"sqlite:///([^?#]+)", url)):
        raise errors.StartupError(
            "the URL of a SQLite database must be sqlite:///relative.db or sqlite:////absolute.db, "
            f"not {url}")
    if match[1] == ":memory:":
        raise errors.StartupError(f"{url} would be a database that is forgotten: if that is what you want, say memory:")
    # The logs and the lock are beside the file, as SQLite's own log is, whatever link leads to it.
    return os.path.realpath(match[1]) if os.path.islink(match[1]) else match[1]


async def open_backend(url: str, *, serving: bool = False, settings: DatabaseSettings | None = None) -> Sqlite:
    """Open the database of a URL; `serving` locks it against other serving processes."""
    path = path_of(url)
    lock = FileLock(path) if serving else None
    return await open_or_explain(Sqlite(path, lock, patience=(settings or DatabaseSettings()).timeout_seconds))


async def open_or_explain(backend: Sqlite) -> Sqlite:
    """Open a backend; raises StartupError if the file cannot be opened."""
    try:
        return await backend.open()
    except OSError as error:
        cure = WAY_ON if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT) else ""
        raise errors.StartupError(f"cannot open {backend.path}: {error.strerror or error}{cure}") from error


async def migrate_database(url: str) -> list[str]:
    """Migrate a file, as opening it does; there is nothing else to report."""
    await (await open_backend(url)).close()
    return []


async def examine_database(settings: Settings, clock: Callable[[], float]) -> AsyncIterator[Finding]:
    """Yield what is wrong with a file, on a thread."""
    from asyncgate.backends.sqlite_examination import examine_file  # which is made of this module
    path = path_of(settings.database.url)
    for finding in await asyncio.to_thread(lambda: list(examine_file(path, settings, clock()))):
        yield finding


BACKEND: type[Backend] = Sqlite

if TYPE_CHECKING:
    _lasting: type[LastingBackend] = Sqlite
    _file: type[FileBackend] = Sqlite
