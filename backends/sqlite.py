"""SQLite: one writer thread that takes whole batches, readers beside it on the write-ahead log.

A batch crosses to the writer once, as what it needs and how to decide it, and comes back committed: a hop costs more
than ten statements.  Batches of all tenants that wait meanwhile share one commit, and so one fsync.  `BEGIN IMMEDIATE`
takes the write lock before the first read, so nothing that a batch loaded can move.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import logging
import os
import queue
import re
import secrets
import sqlite3
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import aiosqlite
from msgspec import Struct
from msgspec.structs import astuple

from asyncgate import Needs, News, Work
from asyncgate.backends import Backend, FileBackend, LastingBackend
from asyncgate.backends.lanes import Lanes
from asyncgate.backends.lineage import FIRST, digest, require_lineage
from asyncgate.backends.pages import Pages
from asyncgate.parts.model.errors import DatabaseUnavailable, NotNow, Refused, StartupError
from asyncgate.parts.model.ids import Ids
from asyncgate.parts.model.queries import (
    ArchivedFilter,
    EntryFilter,
    EventFilter,
    LeaseFilter,
    ObligationFilter,
    OutboxFilter,
    OutboxOf,
    ReceiptFilter,
    TaskFilter,
    page_of,
)
from asyncgate.parts.model.settings import DatabaseSettings
from asyncgate.parts.model.stored import (
    APPEND_ONLY,
    RECORDS,
    Archived,
    Audit,
    Entry,
    Event,
    Key,
    Lag,
    Lease,
    Obligation,
    Outgoing,
    Progress,
    Receipt,
    Task,
    Usage,
    export_order,
)
from asyncgate.parts.model.wire import LeaseNext
from asyncgate.parts.process.outages import OFTEN

log = logging.getLogger("asyncgate.sqlite")
R = TypeVar("R", bound=Struct)
SCHEMA = Path(__file__).parent / "schema" / "sqlite"
PRAGMAS = """
    PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 4000; PRAGMA cache_size = -65536;
    PRAGMA mmap_size = 1073741824; PRAGMA temp_store = MEMORY; PRAGMA foreign_keys = OFF;
    PRAGMA recursive_triggers = ON;
"""     # the last one, or REPLACE would delete rows past the triggers that keep them
CARRIED = 11        # the last schema before the first release: its tables are those that today's first file makes
HOW_TO_MIGRATE = "run `asyncgate migrate --database URL`"
SHARE = 64          # batches that may share one commit
PROMOTED = 1000     # delayed tasks whose time has come that one batch takes in

# The columns of a table are the fields of its Struct, behind tenant_id; what is kept elsewhere is left out.


def fields(kind: type[Struct]) -> list[str]:
    """Return the columns that a Struct is stored in."""
    return [name for name in kind.__struct_fields__ if name not in ("parents", "delivered_at")]


def listed(kind: type[Struct], prefix: str = "") -> str:
    """Return the columns of a Struct as a SELECT names them."""
    return ", ".join(f"{prefix}{name}" for name in fields(kind))


def insert(table: str, columns: Iterable[str], or_else: str = "OR ROLLBACK") -> str:
    """Return an INSERT of whole rows.

    What refuses a row takes the batch back anyway; were it only the statement, SQLite would note the state of each page
    that it touches.
    """
    names = ["tenant_id", *columns]
    return f"INSERT {or_else} INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


def upsert(table: str, columns: list[str], key: Iterable[str]) -> str:
    """Return an INSERT that changes the row with the same key; unlike REPLACE it leaves alone what stays the same."""
    changes = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    return f"{insert(table, columns)} ON CONFLICT ({', '.join(['tenant_id', *key])}) DO UPDATE SET {changes}"


TASK, LEASE, PROGRESS, RECEIPT = (len(fields(kind)) for kind in (Task, Lease, Progress, Receipt))
MUTABLE = fields(Task)[fields(Task).index("asyncgate_instance"):]

NAMED = f"""
    SELECT {listed(Task, 't.')}, {listed(Lease, 'l.')}, {listed(Progress, 'p.')}
    FROM tasks AS t LEFT JOIN leases AS l USING (tenant_id, task_id) LEFT JOIN progress AS p USING (tenant_id, task_id)
    WHERE t.tenant_id = ?1 """
BY_ID = NAMED + "AND t.task_id IN (SELECT value FROM json_each(?2))"
KEYED = "SELECT task_id FROM tasks WHERE tenant_id = ? AND owner_kind = ? AND owner_id = ? AND idempotency_key = ?"
LEASED = "SELECT task_id FROM leases WHERE tenant_id = ? AND ending = 'live' AND lease_id = ?"
CLAIMED = """
    SELECT task_id FROM leases
    WHERE tenant_id = ? AND ending = 'live' AND worker_kind = ? AND worker_id = ? AND claim_id = ?"""
PROMOTE = """
    UPDATE tasks SET ready = 1
    WHERE tenant_id = ?1 AND task_id IN (
        SELECT task_id FROM tasks
        WHERE tenant_id = ?1 AND status = 'queued' AND ready = 0 AND held IS NULL AND next_eligible_at <= ?2
        ORDER BY next_eligible_at LIMIT ?3)"""
HEADS = f"""
    SELECT -t.priority, t.task_id, {listed(Task, 't.')}, {listed(Progress, 'p.')}
    FROM tasks AS t LEFT JOIN progress AS p USING (tenant_id, task_id)
    WHERE t.tenant_id = ? AND t.lane = ? AND t.status = 'queued' AND t.ready = 1 ORDER BY t.priority DESC, t.task_id
    LIMIT ? OFFSET ?"""
MOVE = f"""
    UPDATE OR ROLLBACK tasks SET {', '.join(f'{name} = ?' for name in MUTABLE)}, ready = ?
    WHERE tenant_id = ? AND task_id = ?"""
DISCHARGE = "DELETE FROM obligations WHERE tenant_id = ? AND to_kind = ? AND to_id = ? AND receipt_id = ?"
BY_KEY = {kind: " AND ".join(["tenant_id = ?", *(f"{name} = ?" for name in export_order(kind))]) for kind in RECORDS}
RECORD = {kind: f"SELECT {listed(kind)} FROM {table} WHERE {BY_KEY[kind]}" for kind, table in RECORDS.items()}
# What goes with a row; receipts and tasks go in this way only when the triggers find them archived.
DROP: dict[type[Struct], list[str]] = {
    **{kind: [f"DELETE FROM {table} WHERE {BY_KEY[kind]}"] for kind, table in RECORDS.items()},
    Receipt: [f"DELETE FROM {table} WHERE tenant_id = ? AND {key} = ?" for table, key in (
        ("edges", "child_id"), ("deliveries", "receipt_id"), ("receipts", "receipt_id"))],
    Audit: ["DELETE FROM audit WHERE tenant_id = ? AND audit_id = ?"],
    Task: [f"DELETE FROM {table} WHERE tenant_id = ? AND task_id = ?" for table in (
        "tasks", "leases", "progress", "events")]}
EMPTY_LANES = """
    SELECT lane FROM lanes
    WHERE tenant_id = ?1
    AND NOT EXISTS (SELECT 1 FROM tasks AS t WHERE t.tenant_id = ?1 AND t.lane = lanes.lane AND t.status = 'queued'
                    AND t.ready = 1)
    AND lane NOT IN (SELECT t.lane FROM tasks AS t WHERE t.tenant_id = ?1 AND t.status = 'queued' AND t.ready = 0
                     AND t.held IS NULL)"""
WALL = "UPDATE wall SET tenant_id = ?"
TENANT = "INSERT INTO tenants (tenant_id, since) VALUES (?, ?) ON CONFLICT DO NOTHING"
ADD_RECEIPT = insert("receipts", [*fields(Receipt), "parent_id"]) + (
    " ON CONFLICT (tenant_id, task_id, receipt_key) DO NOTHING")

RECEIPTS = f"""
    SELECT {listed(Receipt, 'r.')}, r.parent_id, d.delivered_at,
           (SELECT group_concat(e.parent_id, ' ') FROM edges AS e
            WHERE e.tenant_id = r.tenant_id AND e.child_id = r.receipt_id)
    FROM receipts AS r LEFT JOIN deliveries AS d USING (tenant_id, receipt_id)
    WHERE r.tenant_id = ?1 """
FAMILY = RECEIPTS + """
    AND r.receipt_id IN (
        SELECT value FROM json_each(?2)
        UNION SELECT receipt_id FROM receipts WHERE tenant_id = ?1 AND parent_id IN (SELECT value FROM json_each(?2))
        UNION SELECT child_id FROM edges WHERE tenant_id = ?1 AND parent_id IN (SELECT value FROM json_each(?2)))"""
ENDINGS = RECEIPTS + "AND r.task_id = ?2 AND r.lease_id = ?3"
STATES = RECEIPTS + "AND r.task_id = ?2 AND r.receipt_key = ?3"
TERMINATED = """
    SELECT EXISTS (SELECT 1 FROM receipts WHERE tenant_id = ?1 AND parent_id = ?2
                   AND receipt_type IN (SELECT value FROM json_each(?3)))
        OR EXISTS (SELECT 1 FROM edges AS e JOIN receipts AS r ON r.tenant_id = ?1 AND r.receipt_id = e.child_id
                   WHERE e.tenant_id = ?1 AND e.parent_id = ?2
                   AND r.receipt_type IN (SELECT value FROM json_each(?3)))"""
OPEN = RECEIPTS + """
    AND r.receipt_id IN (
        SELECT receipt_id FROM obligations
        WHERE tenant_id = ?1 AND to_kind = ?2 AND to_id = ?3 AND receipt_id > ?4 ORDER BY receipt_id LIMIT ?5)
    ORDER BY r.receipt_id"""
LOST = """
    SELECT task_id FROM (SELECT task_id FROM leases WHERE tenant_id = ?1 AND ending = 'live' AND expires_at <= ?3
                         ORDER BY expires_at LIMIT ?4)
    UNION SELECT task_id FROM (
        SELECT task_id FROM tasks WHERE tenant_id = ?1 AND deadline_at IS NOT NULL AND deadline_at <= ?2
        AND status IN ('queued', 'leased', 'running') ORDER BY deadline_at LIMIT ?4)
    UNION SELECT task_id FROM (
        SELECT task_id FROM tasks WHERE tenant_id = ?1 AND status = 'queued' AND attempt >= max_attempts LIMIT ?4)"""
LATE_TENANTS = """
    SELECT tenant_id FROM tenants AS t
    WHERE EXISTS (SELECT 1 FROM leases WHERE tenant_id = t.tenant_id AND ending = 'live' AND expires_at <= ?2)
        OR EXISTS (SELECT 1 FROM tasks WHERE tenant_id = t.tenant_id AND deadline_at IS NOT NULL AND deadline_at <= ?1
                   AND status IN ('queued', 'leased', 'running'))
        OR EXISTS (SELECT 1 FROM tasks WHERE tenant_id = t.tenant_id AND status = 'queued' AND attempt >= max_attempts)
        OR EXISTS (SELECT 1 FROM schedules WHERE tenant_id = t.tenant_id AND late_at <= ?1)"""
# The youngest receipt is a sign of life too, younger than the last beat of a gate that was killed.
LAST_SIGN = """
    SELECT max(at) FROM (SELECT CAST(value AS REAL) AS at FROM meta WHERE name = 'sign_of_life'
                         UNION ALL SELECT * FROM (SELECT created_at FROM receipts ORDER BY rowid DESC LIMIT 1))"""
SIGN = """
    INSERT OR REPLACE INTO meta SELECT 'sign_of_life', ?
    WHERE EXISTS (SELECT 1 FROM tenants CROSS JOIN leases USING (tenant_id) WHERE ending = 'live')"""
LAPSES = """
    SELECT expires_at, tenant_id, task_id FROM tenants CROSS JOIN leases USING (tenant_id)
    WHERE ending = 'live' AND expires_at >= ? ORDER BY expires_at LIMIT ?"""
COUNT = """
    SELECT (SELECT count(*) FROM tasks WHERE tenant_id = ?1 AND status IN ('queued', 'leased', 'running')),
           (SELECT count(*) FROM leases WHERE tenant_id = ?1 AND ending = 'live'),
           (SELECT coalesce(sum(length(CAST(body AS BLOB))), 0) FROM receipts WHERE tenant_id = ?1),
           (SELECT count(*) FROM tasks WHERE tenant_id = ?1 AND status IN ('succeeded', 'failed', 'canceled'))"""
TALLY = """
    SELECT t.value, (SELECT count(*) FROM receipts WHERE tenant_id = ?1 AND task_id = t.value)
    FROM json_each(?2) AS t"""
ARCHIVED = f"SELECT {listed(Archived)} FROM archived WHERE tenant_id = ? AND task_id = ? ORDER BY receipt_id"
FIND_KEY = f"""
    SELECT k.tenant_id, a.suspended_at IS NOT NULL, {listed(Key, 'k.')}
    FROM api_keys AS k LEFT JOIN accounts AS a USING (tenant_id) WHERE k.key_id = ?"""
UNSENT = """
    SELECT tenant_id FROM tenants AS t
    WHERE EXISTS (SELECT 1 FROM outbox WHERE tenant_id = t.tenant_id)"""
WAITING = f"""
    SELECT {listed(Outgoing)} FROM outbox
    WHERE tenant_id = ? AND state = 'waiting' AND receipt_id > ? ORDER BY receipt_id LIMIT ?"""
OUTGOING = f"""
    SELECT {listed(Outgoing)} FROM outbox WHERE tenant_id = ? AND receipt_id IN (SELECT value FROM json_each(?))"""
LAG = """
    SELECT (SELECT count(*) FROM outbox WHERE tenant_id = ?1 AND state = 'waiting'),
           (SELECT count(*) FROM outbox WHERE tenant_id = ?1 AND state = 'parked'),
           (SELECT posted_at FROM outbox WHERE tenant_id = ?1 AND state = 'waiting' ORDER BY receipt_id LIMIT 1)"""
LATE = "SELECT schedule_id FROM schedules WHERE tenant_id = ? AND late_at <= ? ORDER BY late_at LIMIT ?"
DUE = """
    SELECT min(next_eligible_at) FROM tasks
    WHERE tenant_id = ? AND status = 'queued' AND ready = 0 AND held IS NULL AND next_eligible_at > ?"""
EXPORTS: dict[type[Struct], str] = {Task: "tasks", Lease: "leases", Progress: "progress",
                                    Event: "events", Obligation: "obligations", Audit: "audit", **RECORDS}


def named_row(row: tuple[Any, ...]) -> tuple[Task, Lease | None, Progress | None]:
    """Make a task, its lease and its progress of one row of NAMED."""
    lease, progress = row[TASK:TASK + LEASE], row[TASK + LEASE:]
    return (Task(*row[:TASK]), Lease(*lease) if lease[0] is not None else None,
            Progress(*progress) if progress[0] is not None else None)


def numbered(given: list[str]) -> Callable[[str], str]:
    """Return what takes another parameter of a query and names it."""
    def name(value: str) -> str:
        given.append(value)
        return f"?{len(given)}"
    return name


def receipt_row(row: tuple[Any, ...]) -> Receipt:
    """Make a receipt of one row of RECEIPTS."""
    first, delivered_at, further = row[RECEIPT:]
    parents = tuple(sorted([*([first] if first else ()), *(further.split() if further else ())]))
    return Receipt(*row[:RECEIPT], parents, delivered_at)  # type: ignore[call-arg]  # mypy cannot count a slice


class Call(NamedTuple):
    """Something else for the writer's thread to do."""

    run: Callable[[], Any]
    answer: asyncio.Future[Any]


class Flight(NamedTuple):
    """A batch on its way to the writer."""

    tenant_id: str
    needs: Needs
    decide: Callable[[Work], None]
    landed: asyncio.Future[None]


class Sqlite(Pages):
    """A file, one writer, a few readers."""

    parallel, parallel_per_tenant = SHARE, 2        # while one batch of a tenant is committed, the next one gathers

    def __init__(self, path: str, lock: Serving | None = None, carries: bool = False) -> None:
        self.path, self.serving, self.lock = path, lock is not None, lock
        self.carries, self.carried = carries, False         # a schema of the old numbering is carried over; it was
        self.skew, self.ids = 0.0, Ids()
        self.tenant_id: str | None = None                   # of the running transaction, for the triggers
        self.lanes: defaultdict[str, Lanes] = defaultdict(Lanes)
        self.known: set[str] = set()
        self.queue: queue.SimpleQueue[Flight | Call | None] = queue.SimpleQueue()
        self.readers: list[aiosqlite.Connection] = []
        self.opened = contextlib.AsyncExitStack()           # what is open, in the order in which it was opened
        if lock:
            self.opened.callback(lock.release)
        self.turn = 0

    async def open(self) -> Sqlite:
        """Migrate, start the writer, open the readers; what is open is closed again if that fails."""
        try:
            await self._open()
        except BaseException as error:
            await self.close()
            if isinstance(error, sqlite3.Error):
                raise StartupError(f"cannot use {self.path} as a database: {error}") from error
            raise
        return self

    async def _open(self) -> None:
        self.db = self.opened.enter_context(contextlib.closing(connect(self.path)))
        require_ours(self.db, self.path)
        self.db.executescript(PRAGMAS)
        self.carried = self.carries and carry_over(self.db)
        migrate_file(self.db)
        self._learn()
        self.files = inodes(self.path)
        self.loop = asyncio.get_running_loop()
        for _ in range(0 if self.path == ":memory:" else 2):
            reader = await aiosqlite.connect(self.path, isolation_level=None, timeout=30)
            self.opened.push_async_callback(reader.close)
            await reader.execute("PRAGMA query_only = 1")
            self.readers.append(reader)
        self.writer = threading.Thread(target=self._write, name="sqlite-writer", daemon=True)
        self.writer.start()
        self.opened.push_async_callback(self._write_last)

    def _learn(self) -> None:
        """Know lanes and tenants, and give no id that an earlier process has given."""
        for tenant_id, lane, type, capabilities in self.db.execute("SELECT * FROM lanes"):
            self.lanes[tenant_id].learn(lane, type, json.loads(capabilities))
        for (tenant_id,) in self.db.execute("SELECT tenant_id FROM tenants").fetchall():
            self.known.add(tenant_id)
            for newest in ("SELECT max(receipt_id) FROM receipts WHERE tenant_id = ?",
                           "SELECT max(arrival) FROM ledger WHERE tenant_id = ?"):
                self.ids.after(self.db.execute(newest, (tenant_id,)).fetchone()[0])
        key = self.db.execute("SELECT value FROM meta WHERE name = 'cursor_key'").fetchone()
        self.secret = bytes.fromhex(key[0])
        self.instance: str = self.db.execute("SELECT value FROM meta WHERE name = 'instance_id'").fetchone()[0]

    def now(self) -> float:
        """Return this process's time: one process owns the file."""
        return time.time() + self.skew

    def announce(self, url: str) -> None:
        """Write down where this process answers, for another one that wants the file."""
        if self.lock:
            self.lock.say(url)

    async def join(self, instance_id: str, beat_seconds: float, hear: Callable[[News], None]) -> float | None:
        """Return the last sign of life; the lock on the file has kept others out."""
        sign: float | None = (await self._rows(LAST_SIGN))[0][0]
        return sign

    async def beat(self) -> None:
        """Write down that this process lives, if any lease does: nobody else needs to know."""
        await self._on_writer(SIGN, (self.now(),))

    async def alive(self) -> None:
        """Read one row, of the file that everybody finds under its name."""
        self._still_there()
        await self._rows("SELECT value FROM meta WHERE name = 'schema_version'")

    async def close(self) -> None:
        """Commit what is under way, close everything, let another server have the file."""
        await self.opened.aclose()

    async def _write_last(self) -> None:
        if self.serving:
            await self.beat()
        self.queue.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self.writer.join)

    # Writing.

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Hand a batch to the writer and wait until it is durable."""
        landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queue.put(Flight(tenant_id, needs, decide, landed))
        await landed

    def _write(self) -> None:
        """Take all batches that wait, commit them together, and again; this is the writer's thread."""
        while (first := self.queue.get()) is not None:
            flights, last = [first], False
            while len(flights) < SHARE and not self.queue.empty():
                if (following := self.queue.get()) is None:
                    last = True
                    break
                flights.append(following)
            for call in [item for item in flights if isinstance(item, Call)]:
                self._answer([(call.answer, *attempt(call.run))])
            if batches := [item for item in flights if isinstance(item, Flight)]:
                self._answer(self._commit(batches))
            if last:
                return

    def _answer(self, outcomes: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
        def settle() -> None:
            for future, value, error in outcomes:
                if not future.done():
                    future.set_exception(error) if error else future.set_result(value)
        with contextlib.suppress(RuntimeError):     # the loop is gone, and with it everybody who waits
            self.loop.call_soon_threadsafe(settle)

    def _commit(self, flights: list[Flight]) -> list[tuple[asyncio.Future[Any], Any, BaseException | None]]:
        """Carry out batches in one transaction; if one is refused, each in a transaction of its own.

        No savepoint keeps them apart: under one, SQLite writes the pages that each statement touches to a temporary
        file, which took longer than everything else.
        """
        try:
            self.db.execute("BEGIN IMMEDIATE")
            done = [self._carry_out(flight) for flight in flights]
            self._still_there()
            self.db.execute("COMMIT")
        except (sqlite3.IntegrityError, sqlite3.DataError, OverflowError) as error:
            self._roll_back()
            if len(flights) > 1:
                return [outcome for flight in flights for outcome in self._commit([flight])]
            refused = Refused(str(error))
            refused.__cause__ = error
            return [(flights[0].landed, None, refused)]
        except BaseException as error:
            self._roll_back()
            return [(flight.landed, None, error) for flight in flights]
        for work in done:
            self.known.add(work.tenant_id)
            for lane, (type, capabilities) in work.lanes.items():
                self.lanes[work.tenant_id].learn(lane, type, capabilities)
        return [(flight.landed, None, None) for flight in flights]

    def _carry_out(self, flight: Flight) -> Work:
        if flight.tenant_id != self.tenant_id:
            self.db.execute(WALL, (flight.tenant_id,))
            self.tenant_id = flight.tenant_id
        work = self._load(flight.tenant_id, flight.needs)
        flight.decide(work)
        self._save(work)
        return work

    def _roll_back(self) -> None:
        self.tenant_id = None
        with contextlib.suppress(sqlite3.Error):
            self.db.execute("ROLLBACK")

    def _still_there(self) -> None:
        """Refuse to commit to a file that nobody will find again: it was deleted or replaced under us."""
        for name, inode in self.files.items():
            if os.stat(name).st_ino != inode:
                raise OSError(f"{name} was replaced while the gate was using it")

    def _load(self, tenant_id: str, needs: Needs) -> Work:
        ids, now = set(needs.tasks), self.now()
        for sql, keys in ((KEYED, needs.keys), (CLAIMED, needs.repeats), (LEASED, ((id,) for id in needs.leases))):
            for key in keys:
                ids.update(task_id for (task_id,) in self.db.execute(sql, (tenant_id, *key)))
        rows = self.db.execute(BY_ID, (tenant_id, json.dumps(list(ids)))).fetchall() if ids else []
        tasks = [named_row(row) for row in rows]
        work = Work(tenant_id, now, self.ids, self.lanes[tenant_id].known)
        for task in tasks:
            work.load_task(*task)
        if needs.claims:
            self._offer(work, needs.claims)
        if needs.receipts:
            for row in self.db.execute(FAMILY, (tenant_id, json.dumps(list(needs.receipts)))):
                work.load_receipt(receipt_row(row))
        for sql, pairs in ((ENDINGS, needs.endings), (STATES, needs.stated)):
            for pair in pairs:
                for row in self.db.execute(sql, (tenant_id, *pair)):
                    work.load_receipt(receipt_row(row))
        for kind, named in needs.records:
            for row in self.db.execute(RECORD[kind], (tenant_id, *named)):
                work.load_record(kind(*row))
        if needs.recount:
            work.keep_record(Usage(*self.db.execute(COUNT, (tenant_id,)).fetchone()))
        if needs.tally:
            work.tallies.update(self.db.execute(TALLY, (tenant_id, json.dumps(work.list_named_tasks(needs)))))
        return work

    def _offer(self, work: Work, claims: list[LeaseNext]) -> None:
        """Load the best claimable tasks: enough for every claim of the batch, whatever the others take."""
        self.db.execute(PROMOTE, (work.tenant_id, work.now, PROMOTED))
        enough = sum(ask.max_tasks or 1 for ask in claims)
        for group in self.lanes[work.tenant_id].groups(claims):
            for _, _, *row in self._heads(work.tenant_id, group, enough):
                progress = row[TASK:]
                work.add_claimable(Task(*row[:TASK]), Progress(*progress) if progress[0] is not None else None)

    def _heads(self, tenant_id: str, lanes: frozenset[int], enough: int) -> Iterator[tuple[Any, ...]]:
        """Merge the queues of some lanes, reading little more of each than is needed."""
        queues = (self._queue(tenant_id, lane, min(enough, 8) if len(lanes) > 1 else enough) for lane in lanes)
        return islice(heapq.merge(*queues), enough)

    def _queue(self, tenant_id: str, lane: int, size: int) -> Iterator[tuple[Any, ...]]:
        """Yield the claimable tasks of one lane in order, in pieces that grow."""
        start = 0
        while rows := self.db.execute(HEADS, (tenant_id, lane, size, start)).fetchall():
            yield from rows
            start, size = start + len(rows), size * 2

    def _save(self, work: Work) -> None:
        tenant_id, receipts = work.tenant_id, work.written.values()

        def many(sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
            if given := [(tenant_id, *row) for row in rows]:
                self.db.executemany(sql, given)

        if tenant_id not in self.known:
            self.db.execute(TENANT, (tenant_id, work.now))
        # Another batch of the same commit may have opened a lane before it is known to be there.
        many(insert("lanes", ["lane", "type", "capabilities"], "OR IGNORE"),
             ((lane, type, json.dumps(sorted(needed))) for lane, (type, needed) in work.lanes.items()))
        many(ADD_TASK, ((*astuple(task), task.offerable(work.now)) for task in work.added.values()))
        if moved := [(*astuple(task)[-len(MUTABLE):], task.offerable(work.now), tenant_id, task.task_id)
                     for task in work.moved.values()]:
            self.db.executemany(MOVE, moved)
        many(ADD_LEASE, map(astuple, work.leased.values()))
        many(ADD_PROGRESS, map(astuple, work.progressed.values()))
        many(ADD_RECEIPT, ((*astuple(r)[:RECEIPT], r.parents[0] if r.parents else None) for r in receipts))
        many(ADD_POSTED, ((*astuple(row), tenant_id, row.receipt_id) for row in work.posted.values()))
        many(ADD_EDGE, ((r.receipt_id, parent) for r in receipts for parent in r.parents[1:]))
        many(ADD_OBLIGATION, ((id, to.kind, to.id) for id, to in work.opened.items()))
        many(DISCHARGE, ((to.kind, to.id, id) for id, to in work.closed.items()))
        many(ADD_EVENT, map(astuple, work.events.values()))
        many(ADD_AUDIT, map(astuple, work.audited.values()))
        for (kind, key), row in work.kept.items():
            for sql in [KEEP[kind]] if row is not None else DROP[kind]:
                many(sql, [astuple(row) if row is not None else key])
        many(ADD_DELIVERY, work.delivered.items())

    # Reading.

    async def _rows(self, sql: str, *given: Any) -> list[tuple[Any, ...]]:
        """Run one query; what keeps the database from answering is not the caller's fault."""
        try:
            return await self._read(sql, given)
        except (sqlite3.OperationalError, OSError) as error:
            log.error("the database cannot be read: %s", error, extra=OFTEN)
            raise DatabaseUnavailable("the database does not answer; try again", retry_after=1) from error

    async def _read(self, sql: str, given: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Read on a reader; a database in memory has one connection, so there the writer reads."""
        if not self.readers:
            return await self._on_writer(sql, given)
        self.turn = (self.turn + 1) % len(self.readers)
        return await self.readers[self.turn].execute_fetchall(sql, given)  # type: ignore[return-value]

    async def _on_writer(self, sql: str, given: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.queue.put(Call(lambda: self.db.execute(sql, given).fetchall(), answer))
        return await answer  # type: ignore[no-any-return]

    async def task(self, tenant_id: str, task_id: str) -> tuple[Task, Lease | None, Progress | None] | None:
        """Return a task with its latest lease and progress."""
        rows = await self._rows(NAMED + "AND t.task_id = ?2", tenant_id, task_id)
        return named_row(rows[0]) if rows else None

    async def find_tasks(self, tenant_id: str, of: TaskFilter) -> list[tuple[Task, Lease | None, Progress | None]]:
        """Return a page of tasks, newest first."""
        sql, given = NAMED, [tenant_id]
        for column, value in (("owner_id", of.owner.id if of.owner else None), ("status", of.status),
                              ("type", of.type)):
            if value is not None:
                given.append(value)
                sql += f" AND t.{column} = ?{len(given)}"
        if of.before is not None:
            given.append(of.before)
            sql += f" AND t.task_id < ?{len(given)}"
        sql = page_of(sql, of.owner, "t.owner_kind", "t.task_id DESC", 1, of.limit, numbered(given))
        rows = await self._rows(sql, *given)
        return [named_row(row) for row in rows]

    async def find_leases(self, tenant_id: str, of: LeaseFilter) -> list[tuple[Task, Lease]]:
        """Return the live leases of a worker."""
        sql = NAMED + "AND l.ending = 'live' AND l.worker_kind = ?2 AND l.worker_id = ?3 ORDER BY l.acquired_at"
        found = [named_row(row) for row in await self._rows(sql, tenant_id, of.worker.kind, of.worker.id)]
        return [(task, lease) for task, lease, _ in found
                if lease and of.worker.instance_id in (None, lease.worker_instance)]

    async def receipt(self, tenant_id: str, receipt_id: str) -> Receipt | None:
        """Return one receipt."""
        rows = await self._rows(RECEIPTS + "AND r.receipt_id = ?2", tenant_id, receipt_id)
        return receipt_row(rows[0]) if rows else None

    async def find_receipts(self, tenant_id: str, of: ReceiptFilter) -> list[Receipt]:
        """Return a page of receipts, oldest first; one writer gives ids in the order of commits."""
        sql, given = RECEIPTS, [tenant_id]
        for column, value in (("to_id", of.to.id if of.to else None), ("task_id", of.task_id),
                              ("receipt_type", of.receipt_type)):
            if value is not None:
                given.append(value)
                sql += f" AND r.{column} = ?{len(given)}"
        given.append(of.after or "")
        sql += f" AND r.receipt_id > ?{len(given)}"
        order = "r.receipt_id DESC" if of.newest else "r.receipt_id"
        sql = page_of(sql, of.to, "r.to_kind", order, 1, of.limit, numbered(given))
        rows = await self._rows(sql, *given)
        return [receipt_row(row) for row in (rows[::-1] if of.newest else rows)]

    async def find_events(self, tenant_id: str, of: EventFilter) -> list[Event]:
        """Return a page of a task's events."""
        sql = (f"SELECT {listed(Event)} FROM events WHERE tenant_id = ? AND task_id = ? AND event_id > ? "
               "ORDER BY event_id LIMIT ?")
        return [Event(*row) for row in await self._rows(sql, tenant_id, of.task_id, of.after or "", of.limit)]

    async def find_obligations(self, tenant_id: str, of: ObligationFilter) -> list[Receipt]:
        """Return a page of open obligations from their index."""
        rows = await self._rows(OPEN, tenant_id, of.to.kind, of.to.id, of.after or "", of.limit)
        return [receipt_row(row) for row in rows]

    async def terminated(self, tenant_id: str, receipt_id: str, by: frozenset[str]) -> bool:
        """Whether a child of the receipt has one of the types."""
        return bool((await self._rows(TERMINATED, tenant_id, receipt_id, json.dumps(sorted(by))))[0][0])

    async def record(self, tenant_id: str, kind: type[R], *key: str) -> R | None:
        """Return one record."""
        rows = await self._rows(RECORD[kind], tenant_id, *key)
        return kind(*rows[0]) if rows else None

    async def unsent(self) -> list[str]:
        """Return the tenants with receipts that the ledger does not have."""
        return [row[0] for row in await self._rows(UNSENT)]

    async def find_waiting(self, tenant_id: str, of: OutboxFilter) -> list[Outgoing]:
        """Return a page of the receipts that wait for the ledger."""
        return [Outgoing(*row) for row in await self._rows(WAITING, tenant_id, of.after, of.limit)]

    async def find_outgoing(self, tenant_id: str, of: OutboxOf) -> list[Outgoing]:
        """Return those of some receipts that the ledger does not have yet."""
        return [Outgoing(*row) for row in await self._rows(OUTGOING, tenant_id, json.dumps(of.receipt_ids))]

    async def lag(self, tenant_id: str) -> Lag:
        """Return how many receipts wait, how many are parked, and since when the oldest waits."""
        return Lag(*(await self._rows(LAG, tenant_id))[0])

    async def find_entries(self, tenant_id: str, of: EntryFilter) -> list[Entry]:
        """Return a page of what others have stored here; one writer numbers them in the order of commits."""
        sql, given = f"SELECT {listed(Entry)} FROM ledger WHERE tenant_id = ?1", [tenant_id]
        for column, value in (("to_id", of.to.id if of.to else None), ("task_id", of.task_id),
                              ("receipt_type", of.receipt_type), ("asyncgate_instance", of.instance)):
            if value is not None:
                given.append(value)
                sql += f" AND {column} = ?{len(given)}"
        given.append(of.after or "")
        sql += f" AND arrival > ?{len(given)}"
        sql = page_of(sql, of.to, "to_kind", "arrival", 2, of.limit, numbered(given))
        rows = await self._rows(sql, *given)
        return [Entry(*row) for row in rows]

    async def find_archived(self, tenant_id: str, of: ArchivedFilter) -> list[Archived]:
        """Return where the archived receipts of a task are."""
        return [Archived(*row) for row in await self._rows(ARCHIVED, tenant_id, of.task_id)]

    async def find_key(self, key_id: str) -> tuple[str, bool, Key] | None:
        """Return a key before its tenant is known."""
        rows = await self._rows(FIND_KEY, key_id)
        return (rows[0][0], bool(rows[0][1]), Key(*rows[0][2:])) if rows else None

    async def overdue(self, now: float, grace: float, limit: int) -> list[tuple[str, list[str], list[str]]]:
        """Return what upkeep must look at, tenant by tenant."""
        found = []
        for (tenant_id,) in await self._rows(LATE_TENANTS, now, now - grace):
            tasks = [row[0] for row in await self._rows(LOST, tenant_id, now, now - grace, limit)]
            schedules = [row[0] for row in await self._rows(LATE, tenant_id, now, limit)]
            found.append((tenant_id, tasks, schedules))
        return found

    async def lapses(self, since: float, limit: int) -> list[tuple[float, str, str]]:
        """Return when live leases run out."""
        return await self._rows(LAPSES, since, limit)

    async def drop_lanes(self) -> int:
        """Forget the lanes in which no task waits; the writer does, so no batch is being decided."""
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.queue.put(Call(self._drop_lanes, answer))
        return await answer

    def _drop_lanes(self) -> int:
        dropped: dict[str, list[int]] = {}
        with transaction(self.db):
            for tenant_id in list(self.lanes):
                self.db.execute(WALL, (tenant_id,))
                dropped[tenant_id] = [lane for (lane,) in self.db.execute(EMPTY_LANES, (tenant_id,)).fetchall()]
                self.db.executemany("DELETE FROM lanes WHERE tenant_id = ? AND lane = ?",
                                    [(tenant_id, lane) for lane in dropped[tenant_id]])
        self.tenant_id = None       # the next batch says whose it is
        for tenant_id, lanes in dropped.items():
            self.lanes[tenant_id].forget(lanes)
        return sum(map(len, dropped.values()))

    async def next_due(self, tenant_id: str) -> float | None:
        """Return when the next delayed task may be leased."""
        due: float | None = (await self._rows(DUE, tenant_id, self.now()))[0][0]
        return due

    async def find_rows(self, tenant_id: str, table: type[Struct], after: str) -> list[Any]:
        """Return the next 1,000 rows of a table, in the order of its primary key."""
        if table is Receipt:
            return await self.find_receipts(tenant_id, ReceiptFilter(None, None, None, after, 1000))
        if not (order := export_order(table)):
            return [] if after or (only := await self.record(tenant_id, table)) is None else [only]
        names, marks = ", ".join(order), ", ".join("?" * len(order))
        sql = (f"SELECT {listed(table)} FROM {EXPORTS[table]} WHERE tenant_id = ? AND ({names}) > ({marks}) "
               f"ORDER BY {names} LIMIT 1000")
        behind = after.split("\0") if after else [""] * len(order)
        return [table(*row) for row in await self._rows(sql, tenant_id, *behind)]

    async def tenants(self) -> list[str]:
        """Return every tenant that has stored anything."""
        return [row[0] for row in await self._rows("SELECT tenant_id FROM tenants ORDER BY tenant_id")]

    async def keep_secret(self, secret: bytes) -> None:
        """Sign cursors with another key, also after a restart."""
        await self._on_writer("UPDATE meta SET value = ? WHERE name = 'cursor_key'", (secret.hex(),))
        self.secret = secret

    async def check(self) -> list[str]:
        """Return what SQLite finds wrong with its own file; nothing when it is sound."""
        try:
            return [row[0] for row in await self._rows("PRAGMA integrity_check") if row[0] != "ok"]
        except sqlite3.DatabaseError as error:
            return [str(error)]

    async def compact(self) -> None:
        """Give the file's free pages back to the system; writes wait meanwhile."""
        for statement in ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
            await self._on_writer(statement, ())

    async def backup(self, target: str, told: Callable[[int, int], None] | None = None) -> None:
        """Copy the whole database, as of one moment, to a new file; the gate goes on meanwhile.

        `told` learns how many pages of how many are copied.
        """
        await asyncio.get_running_loop().run_in_executor(None, copy_file, self.path, target, told)

    async def count_rows(self, tables: Iterable[type[Struct]]) -> int:
        """Return how many rows tables have, of all tenants."""
        names = ["receipts" if table is Receipt else EXPORTS[table] for table in tables]
        return sum([(await self._rows(f"SELECT count(*) FROM {name}"))[0][0] for name in names])


ADD_TASK = insert("tasks", [*fields(Task), "ready"])
ADD_LEASE = upsert("leases", fields(Lease), ["task_id"])
ADD_PROGRESS = upsert("progress", fields(Progress), ["task_id"])
# Only with its receipt: one that was written before is not sent again.
ADD_POSTED = (f"INSERT OR ROLLBACK INTO outbox (tenant_id, {listed(Outgoing)}) "
              f"SELECT ?, {', '.join('?' * len(fields(Outgoing)))} "
              "WHERE EXISTS (SELECT 1 FROM receipts WHERE tenant_id = ? AND receipt_id = ?)")
ADD_EDGE = insert("edges", ["child_id", "parent_id"])
ADD_OBLIGATION = insert("obligations", fields(Obligation))
ADD_EVENT = insert("events", fields(Event))
ADD_AUDIT = insert("audit", fields(Audit))
KEEP = {kind: insert(table, fields(kind)) if kind in APPEND_ONLY else upsert(table, fields(kind), export_order(kind))
        for kind, table in RECORDS.items()}
ADD_DELIVERY = upsert("deliveries", ["receipt_id", "delivered_at"], ["receipt_id"])


def inodes(path: str) -> dict[str, int]:
    """Return which files a database consists of now."""
    return {name: os.stat(name).st_ino for name in (path, f"{path}-wal") if os.path.exists(name)}


def attempt(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Call, and return what came of it."""
    try:
        return call(), None
    except BaseException as error:
        return None, error


def connect(path: str) -> sqlite3.Connection:
    """Open a connection that leaves transactions to us, on a file that only its owner may read."""
    if path != ":memory:" and not os.path.exists(path):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))      # closing an older one would drop SQLite's locks
    elif path != ":memory:" and os.name == "posix" and (mode := stat.S_IMODE(os.stat(path).st_mode)) & 0o077:
        log.warning("%s may be read or written by others than its owner (mode %o): chmod 600 %s", path, mode, path)
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=512, timeout=30)


def require_ours(db: sqlite3.Connection, path: str) -> None:
    """Refuse a file that another program keeps its tables in, before anything of it is changed."""
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    columns = {row[1] for row in db.execute("PRAGMA table_info(meta)")}
    if names and not ({"name", "value"} <= columns
                      and db.execute("SELECT 1 FROM meta WHERE name = 'schema_version'").fetchone()):
        some = ", ".join(names[:3]) + ", …" * (len(names) > 3)
        raise StartupError(f"{path} is a database of something else (its tables are {some}): name another file, which "
                           "is made if it is not there")


def migrations(folder: Path = SCHEMA) -> list[Path]:
    """Return the numbered files in their order."""
    return sorted(folder.glob("[0-9]*.sql"))


def migrate_file(db: sqlite3.Connection, folder: Path = SCHEMA) -> None:
    """Apply the numbered files that the database has not seen, all in one transaction."""
    files = migrations(folder)
    with transaction(db):
        version, kept = beginning(db)
        if version:
            require_lineage(kept, digest(files[0].read_text()), version, CARRIED, HOW_TO_MIGRATE)
        if version > len(files):
            raise StartupError(f"this database has schema {version}, which is newer than this release knows "
                               f"({len(files)}); run the newer release")
        for file in files[version:]:
            for statement in statements(file.read_text()):
                db.execute(statement)
        if version < len(files):
            write_down(db, len(files))
        db.execute("INSERT OR IGNORE INTO meta VALUES ('cursor_key', ?)", (secrets.token_hex(32),))
        # Two gates on one ledger must not have one name.
        db.execute("INSERT OR IGNORE INTO meta VALUES ('instance_id', ?)", (f"asyncgate-{secrets.token_hex(4)}",))


def beginning(db: sqlite3.Connection) -> tuple[int, str | None]:
    """Return the number of a file's schema (0: it has none) and the digest of its first migration, if it keeps one."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        return 0, None
    said = dict(db.execute("SELECT name, value FROM meta WHERE name IN ('schema_version', ?)", (FIRST,)).fetchall())
    return int(said.get("schema_version", 0)), said.get(FIRST)


def write_down(db: sqlite3.Connection, version: int) -> None:
    """Keep which schema a file has now, and which first migration it began with."""
    db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", [
        ("schema_version", str(version)), (FIRST, digest(migrations()[0].read_text()))])


def carry_over(db: sqlite3.Connection) -> bool:
    """Number a schema anew that the files before the first release have made; return whether this is one."""
    with transaction(db):
        if beginning(db) != (CARRIED, None):
            return False
        write_down(db, 1)
        return True


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run a block in one transaction that holds the write lock from its first line."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def statements(script: str) -> Iterator[str]:
    """Split a script into statements; executescript would commit behind our back."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


class Serving:
    """The right to serve a file: one process has it, and the system takes it back when that process dies."""

    def __init__(self, path: str) -> None:
        import fcntl
        try:
            self.file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StartupError(f"cannot open {path}: {error.strerror}") from error
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            who = holder(os.pread(self.file, 200, 0))
            os.close(self.file)
            raise NotNow(f"another asyncgate is serving {path}{who}; one process serves a SQLite file, use Postgres "
                         "for several") from None
        self.say("")

    def say(self, url: str) -> None:
        """Write down for others who has the file, and where it answers."""
        with contextlib.suppress(OSError):      # a disk that is full is told by what matters more
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, f"{os.getpid()} {url}\n".encode(), 0)

    def release(self) -> None:
        """Let another process serve the file."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.file, 0)
        os.close(self.file)


def holder(said: bytes) -> str:
    """Say who has a file, as far as it has written that down in its lock."""
    found = re.match(rb"(\d{1,10}) ?(https?://[\w.:\[\]-]*)?", said)
    if not found:
        return ""
    return f": process {int(found[1])}{f' at {found[2].decode()}' if found[2] else ''}"


def copy_file(source: str, target: str, told: Callable[[int, int], None] | None = None) -> None:
    """Copy a live database page by page and check the copy."""
    with (contextlib.closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as old,
          contextlib.closing(sqlite3.connect(target)) as new):
        tell = told or (lambda done, total: None)
        old.backup(new, pages=4096, progress=lambda _, left, total: tell(total - left, total))
        verdict = new.execute("PRAGMA integrity_check").fetchone()[0]
    os.chmod(target, 0o600)
    if verdict != "ok":
        raise OSError(f"the copy at {target} is damaged: {verdict}")


def path_of(url: str) -> str:
    """Return the file that a URL names: sqlite:///relative.db, sqlite:////absolute.db or sqlite:///:memory:."""
    if not (found := re.fullmatch(r"sqlite:///([^?#]+)", url)):
        raise StartupError("the URL of a SQLite database is sqlite:///relative.db or sqlite:////absolute.db, "
                           f"not {url}")
    return found[1]


async def open_backend(url: str, *, serving: bool = False, settings: DatabaseSettings | None = None) -> Sqlite:
    """Open the database that a URL names; `serving` makes sure that nobody else serves it."""
    path = path_of(url)
    return await opened(Sqlite(path, Serving(path) if serving and path != ":memory:" else None))


async def opened(backend: Sqlite) -> Sqlite:
    """Open a backend; a file that cannot be opened is told in one line."""
    try:
        return await backend.open()
    except OSError as error:
        raise StartupError(f"cannot open {backend.path}: {error.strerror or error}") from error


async def migrate_database(url: str) -> list[str]:
    """Bring a file up to date, one of the numbering before the first release too; return whether it was one."""
    backend = await opened(Sqlite(path_of(url), carries=True))
    await backend.close()
    return [f"schema {CARRIED} as {migrations()[0].name}"] if backend.carried else []


BACKEND: type[Backend] = Sqlite

if TYPE_CHECKING:
    _lasting: type[LastingBackend] = Sqlite
    _file: type[FileBackend] = Sqlite
