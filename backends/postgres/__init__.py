"""Postgres: four round trips a batch, and the wall between tenants around all of them.

    BEGIN + tenant    →   LOAD (locks, claims, the clock)   →   SAVE (one writable CTE)   →   COMMIT

Row-level security reads `app.tenant_id`, which lives and dies with the transaction; the server's role can neither
bypass it nor change a receipt.  Whoever waits does so in one order, so that nobody waits in a circle: advisory locks
by number, then states by task id; claims skip what is locked and wait for nobody.  The statements are in
statements.py, what several processes need beside them in instances.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import asyncpg
from msgspec import Struct

from asyncgate import Needs, News, Work
from asyncgate.backends import ArchivingBackend, Backend, SharedBackend
from asyncgate.backends.lanes import Lanes
from asyncgate.backends.pages import Pages
from asyncgate.backends.postgres import statements as sql
from asyncgate.backends.postgres.hosts import AWAY, CONNECT_SECONDS, Hosts, as_user, startup_error
from asyncgate.backends.postgres.instances import Membership, lock_of, name_of_this_process, session
from asyncgate.backends.postgres.migrations import migrate_database as migrate_database
from asyncgate.backends.postgres.migrations import migration_sql as migration_sql
from asyncgate.backends.postgres.migrations import require_schema
from asyncgate.parts.model.errors import ArchiveUnavailable, DatabaseUnavailable, Refused, StartupError, outcome_unknown
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
    Row,
    TaskFilter,
    page_of,
)
from asyncgate.parts.model.settings import DatabaseSettings
from asyncgate.parts.model.stored import (
    Archived,
    Entry,
    Event,
    Key,
    Lag,
    Lease,
    Outgoing,
    Progress,
    Receipt,
    Task,
    Usage,
    export_order,
)
from asyncgate.parts.model.wire import LeaseNext
from asyncgate.parts.process.outages import OFTEN

log = logging.getLogger("asyncgate.postgres")
T = TypeVar("T")
R = TypeVar("R", bound=Struct)

ATTEMPTS = 8                # at a batch that lost a race, before it is given up
HIDDEN_SECONDS = 0.25       # how long a reader of receipts waits for writers that might still add to its page
PROMOTED = 1000             # delayed tasks whose time has come that one batch takes in
SLACK, MOST_SLACK = 32, 32 * 16 ** 3    # candidates beyond what is claimed, in case others hold the first ones
ARCHIVIST = "asyncgate_archivist"
OVERDUE = 10_000            # rows that upkeep looks at in one query
LOOK_AGAIN_SECONDS = 1.0    # at a lost lease whose owner has not taken it back yet

# A plan is kept for long.  Every statement is a handful of index probes, so the planner must not be tempted, while a
# table is small or a tenant unlike the others, into a plan that reads all of a tenant's rows.
PROBES_ONLY = {"plan_cache_mode": "force_generic_plan", "jit": "off", "enable_seqscan": "off",
               "enable_bitmapscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off"}
LOST_RACE = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError, asyncpg.UniqueViolationError)
REFUSED = (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError)
# The connection is gone or no good any more; another one may be better.
BROKEN = (asyncpg.PostgresConnectionError, asyncpg.InterfaceError, asyncpg.AdminShutdownError,
          asyncpg.CrashShutdownError, asyncpg.CannotConnectNowError, asyncpg.ReadOnlySQLTransactionError,
          asyncpg.InternalClientError, ConnectionError)
# What an outage looks like; of any other error of the database the log gets a traceback.
OUTAGE = (*BROKEN, OSError, TimeoutError, asyncpg.OperatorInterventionError, asyncpg.InsufficientResourcesError,
          asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError,
          asyncpg.TargetServerAttributeNotMatched)


class Queues:
    """Where the live rows of a tenant's queues begin, remembered for a moment when it took long to find them.

    While a long transaction is open, Postgres keeps every row that it may still see, so each claimed task leaves a dead
    row at the head of its queue.  If this process queues a task before the remembered beginning, the beginning moves
    back at once.  A task that another process queues there is seen after MOMENT_SECONDS at most.
    """

    MOMENT_SECONDS, SLOW_SECONDS = 5.0, 0.003
    FIRST = (-(1 << 62), "")

    def __init__(self) -> None:
        self.begins: dict[int, tuple[int, str]] = {}        # lane → place in its queue
        self.looking: dict[object, dict[int, tuple[int, str]]] = {}     # what was put where, for each look under way
        self.until, self.forgotten = 0.0, 0

    def start(self, lane: int) -> tuple[int, str]:
        """Return the priority and the id from which a lane is to be read."""
        if time.monotonic() > self.until:
            self.begins.clear()
        first, task_id = self.begins.get(lane, self.FIRST)
        return -first, task_id

    @contextlib.contextmanager
    def look(self) -> Iterator[list[Task]]:
        """Remember where the first of the tasks are that a block finds, if that took long."""
        look, put = object(), dict[int, tuple[int, str]]()
        found: list[Task] = []
        begun, forgotten = time.monotonic(), self.forgotten
        self.looking[look] = put
        try:
            yield found
        finally:
            del self.looking[look]
        now = time.monotonic()
        if forgotten == self.forgotten and (self.begins or now - begun > self.SLOW_SECONDS):
            self.until = self.until if self.begins else now + self.MOMENT_SECONDS
            for task in sorted(found, key=place, reverse=True):
                self.begins[task.lane] = min(place(task), put.get(task.lane, place(task)))

    def saved(self, task: Task) -> None:
        """Take in that a task has been put into its queue."""
        for places in (*self.looking.values(), *([self.begins] if task.lane in self.begins else ())):
            places[task.lane] = min(place(task), places.get(task.lane, place(task)))

    def forget(self) -> None:
        """Read all queues from their heads again."""
        self.forgotten += 1
        self.begins.clear()


def place(task: Task) -> tuple[int, str]:
    """Return the place of a task in its queue."""
    return -task.priority, task.task_id


class Uncertain(Exception):
    """The reply to COMMIT did not arrive, and the database could not be asked what became of it."""


class Unconfirmed(Exception):
    """COMMIT was answered with a warning: it was carried out here, and perhaps on no standby."""


class Saved(NamedTuple):
    """What is known of a batch before its COMMIT."""

    transaction: str
    proof: sql.Proof | None


class Postgres(Pages):
    """A pool of connections; each batch has one to itself."""

    parallel_per_tenant = 2

    def __init__(self, pool: asyncpg.Pool, url: str, settings: DatabaseSettings) -> None:
        self.pool, self.url, self.settings = pool, url, settings
        self.parallel = max(settings.pool_size - 2, 1)      # readers find a connection, however many batches wait
        self.skew, self.ahead, self.ids, self.secret = 0.0, 0.0, Ids(), b""
        self.instance = name_of_this_process()
        self.lanes: defaultdict[str, Lanes] = defaultdict(Lanes)
        self.queues: defaultdict[str, Queues] = defaultdict(Queues)
        self.known: set[str] = set()
        self.member: Membership | None = None

    def now(self) -> float:
        """Return the database's time as of its last answer, carried on by this process's clock."""
        return time.time() + self.ahead + self.skew

    async def alive(self) -> None:
        """Return when the database has answered."""
        await self._ask("SELECT 1")

    async def close(self) -> None:
        """Leave the other processes, and let go of the database."""
        if self.member:
            await self.member.leave()
        with contextlib.suppress(*AWAY):
            async with asyncio.timeout(CONNECT_SECONDS):
                await self.pool.close()
        self.pool.terminate()

    async def register_segment(self, tenant_id: str, segment: str) -> None:
        """Say as another role than the gate's that a segment of the archive is written; only then receipts may go."""
        settings, direct = self.settings, self.settings.direct_url or self.url
        trusted = {"server_settings": {"role": ARCHIVIST}} if settings.trusted_role else {}
        url = settings.archive_url or (direct if trusted else as_user(direct, ARCHIVIST))
        try:
            db = await Hosts(url, settings.timeout_seconds).connect(**trusted)
            try:
                async with db.transaction():
                    await db.execute("SELECT set_config('app.tenant_id', $1, true)", tenant_id)
                    await db.execute("INSERT INTO asyncgate.segments (tenant_id, segment) VALUES ($1, $2) "
                                     "ON CONFLICT DO NOTHING", tenant_id, segment)
            finally:
                await db.close()
        except (*AWAY, ValueError) as error:
            raise ArchiveUnavailable(f"{ARCHIVIST} cannot register a segment of the archive: {error}; the address "
                                     "of that role belongs into database.archive_url") from error

    # Several processes.

    def is_alone(self) -> bool:
        """Whether no other process is known to share the database."""
        return self.member is None or self.member.alone

    async def join(self, instance_id: str, beat_seconds: float, hear: Callable[[News], None]) -> float | None:
        """Take part under a name that no living process has."""
        self.member = Membership(self.settings.direct_url or self.url, self.settings, instance_id, beat_seconds, hear)
        return await self.member.join()

    async def beat(self) -> None:
        """Say that this process lives."""
        if self.member:
            with unavailable():
                await self.member.beat()

    def tell(self, news: News) -> None:
        """Let other processes know."""
        if self.member:
            self.member.tell(news)

    # Writing.

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Carry out one batch; after a lost race, or when the connection broke before COMMIT, from the start again."""
        with unavailable("the database does not answer; nothing of this was kept, so try again"):
            try:
                await self._until_kept(tenant_id, needs, decide)
            except Uncertain as unknown:
                log.error("nobody knows what became of a batch: %s", unknown, extra=OFTEN)
                raise outcome_unknown() from unknown

    async def _until_kept(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        problem: Exception | None = None
        for attempt in range(ATTEMPTS):
            try:
                return await self._attempt(tenant_id, needs, decide)
            except LOST_RACE as lost:
                problem = lost
            except REFUSED as refused:
                raise Refused(type(refused).__name__) from refused
            except BROKEN as broken:
                if attempt:
                    raise
                problem = broken
                await self.pool.expire_connections()
        raise Refused(f"{type(problem).__name__}, {ATTEMPTS} times") from problem

    async def _attempt(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        saved = None
        try:
            async with self._transaction(tenant_id, needs) as db:
                work, promoted = await self._load(db, tenant_id, needs)
                decide(work)
                saved = await self._save(db, work)
                await commit(db)
        except (*BROKEN, TimeoutError, Unconfirmed) as error:
            if saved is None:
                raise
            if not await self._was_committed(tenant_id, saved):
                raise ConnectionError("the connection broke before COMMIT") from error
        if saved is not None:
            self.known.add(tenant_id)
        self._learn(work, promoted)

    def _learn(self, work: Work, promoted: bool) -> None:
        """Take in what has just become true."""
        for lane, (type, capabilities) in work.lanes.items():
            self.lanes[work.tenant_id].learn(lane, type, capabilities)
        queues = self.queues[work.tenant_id]
        if promoted:
            queues.forget()
        left = (work.tasks[task_id] for ready in work.ready.values() for task_id in ready)
        for task in (*work.added.values(), *work.moved.values(), *left):    # nobody else has seen these
            if task.status == "queued":
                queues.saved(task)

    async def _was_committed(self, tenant_id: str, saved: Saved) -> bool:
        """Find out what became of a batch whose COMMIT was sent and not answered as it should be."""
        deadline = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                there, status = await self._look_for(tenant_id, saved)
            except (*AWAY, Unconfirmed) as away:
                if isinstance(away, Unconfirmed) and time.monotonic() < deadline:
                    continue
                raise Uncertain("nobody knows whether the last COMMIT went through") from away
            if there or status == "aborted" or (status != "in progress" and saved.proof and saved.proof.sure):
                return there
            if status != "in progress" or time.monotonic() > deadline:
                raise Uncertain(f"the last COMMIT is {status or 'forgotten'}")
            await asyncio.sleep(0.02)

    async def _look_for(self, tenant_id: str, saved: Saved) -> tuple[bool, str | None]:
        """Return whether what a batch has saved is there, and what the database says of its transaction.

        "committed" proves nothing: after a crash, and on a standby that has taken over without it, its number belongs
        to somebody else.  "aborted" does, because then ours was not committed either.  The row is looked for later than
        the number, so a batch that was committed between the two looks is not missed.  The row is trusted only after a
        later write has been committed: where COMMIT waits for a standby, the standby then has the row, too.
        """
        try:
            async with self._transaction(tenant_id) as db:
                await db.execute("SELECT pg_logical_emit_message(true, 'asyncgate', '')")
                status = await db.fetchval("SELECT pg_xact_status($1::text::xid8)", saved.transaction)
                there = saved.proof is not None and await db.fetchval(
                    saved.proof.statement, tenant_id, *saved.proof.given)
                await commit(db)
        except asyncpg.InvalidParameterValueError:      # a number that the database has not given to anybody yet
            return False, "aborted"
        return bool(there), status

    @contextlib.asynccontextmanager
    async def _transaction(self, tenant_id: str, needs: Needs | None = None) -> AsyncIterator[asyncpg.Connection]:
        """Open a transaction behind the wall of one tenant; a writer also takes the locks that `needs` asks for."""
        begin = sql.begin(uuid.UUID(tenant_id), None if needs is None else locks(tenant_id, needs))
        async with self.pool.acquire(timeout=self.settings.timeout_seconds) as db:
            try:
                await db.execute(begin)
                yield db
            except BaseException as error:
                self.queues[tenant_id].forget()     # others may have looked past what was locked here
                if isinstance(error, asyncpg.PostgresError) and not isinstance(error, BROKEN):
                    await db.execute("ROLLBACK")
                else:
                    db.terminate()      # nobody knows what it is doing; the tenant must not outlive the transaction
                if isinstance(error, TimeoutError):
                    await self.pool.expire_connections()    # the others may be as dead, and not know it either
                raise

    async def _load(self, db: asyncpg.Connection, tenant_id: str, needs: Needs) -> tuple[Work, bool]:
        """Load what a batch needs; tell whether that has put delayed tasks into their queues."""
        with self.queues[tenant_id].look() as found:
            work, promoted = await self._look(db, tenant_id, needs)
            found += [work.tasks[task_id] for ready in work.ready.values() for task_id in ready]
        await self._give(db, work, needs)
        return work, promoted

    async def _look(self, db: asyncpg.Connection, tenant_id: str, needs: Needs) -> tuple[Work, bool]:
        lanes, starts = self.lanes[tenant_id], self.queues[tenant_id].start
        wanted = wanted_of(lanes, needs.claims)
        named = bool(needs.tasks or needs.keys or needs.leases or needs.repeats)
        given = {**(sql.bind_needs(needs) if named else {}), **(sql.offered(wanted, SLACK, starts) if wanted else {})}
        head, asked_for, offered = await self._rows(db, tenant_id, sql.load(named, bool(wanted)), given)
        self.ahead = head.clock - self.skew - time.time()
        self.ids.after(head.newest)     # ids go on, whatever has become of the clock
        if changed := head.lanes != str(lanes.version):     # another process has opened or dropped some
            lanes = self.lanes[tenant_id] = Lanes()
            for lane, type, capabilities in await db.fetch(sql.LANES, tenant_id):
                lanes.learn(lane, type, json.loads(capabilities))
        work = Work(tenant_id, head.clock, self.ids, lanes.known)
        for row in await self._fresh(db, tenant_id, asked_for):
            work.load_task(*row)
        if needs.claims:
            if changed:
                head, wanted = head._replace(due=True), wanted_of(lanes, needs.claims)
            await self._offer(db, work, head, wanted, offered)
        return work, bool(needs.claims) and head.due

    async def _rows(self, db: asyncpg.Connection, tenant_id: str, statement: tuple[str, tuple[str, ...]],
                    given: dict[str, Any]) -> tuple[sql.Head, list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        """Run LOAD; return its head, the rows that were asked for, and those that are offered."""
        text, names = statement
        given |= {"tenant": tenant_id, "skew": self.skew}
        rows = [tuple(row) for row in await db.fetch(text, *(given[name] for name in names))]
        found: dict[bool, list[tuple[Any, ...]]] = {True: [], False: []}
        for row in rows:
            if (group := row[sql.HEAD - 1]) is not None:
                found[group == sql.ASKED_FOR].append(row[sql.HEAD:])
        return sql.Head(*rows[-1][:sql.HEAD]), found[True], found[False]

    async def _fresh(self, db: asyncpg.Connection, tenant_id: str, rows: list[tuple[Any, ...]]) -> list[Row]:
        """Return tasks with their leases and their latest progress, which a wait for a lock may have made stale."""
        found = [sql.named_row(row) for row in rows]
        if stale := [row[0] for row in rows if sql.is_stale(row)]:
            latest = {row[0]: Progress(*row) for row in await db.fetch(sql.PROGRESS_OF, tenant_id, stale)}
            found = [(task, lease, latest.get(task.task_id, progress)) for task, lease, progress in found]
        return found

    async def _offer(self, db: asyncpg.Connection, work: Work, head: sql.Head, wanted: dict[frozenset[int], int],
                     rows: list[tuple[Any, ...]]) -> None:
        """Offer the best claimable tasks; look further down the queues when others hold all that were looked at."""
        queues, slack, enough = self.queues[work.tenant_id], SLACK, sum(wanted.values())
        if head.due:
            await db.execute(sql.PROMOTE, work.tenant_id, head.clock, PROMOTED)
            queues.forget()
        locked = {row[0]: row for row in rows}
        while wanted and (head.due or (head.full and len(locked) < enough and slack < MOST_SLACK)):
            slack *= 1 if head.due else 16
            given = sql.offered(wanted, slack, queues.start)
            head, _, rows = await self._rows(db, work.tenant_id, sql.load(False, True), given)
            work.now = head.clock       # later than every lock: ids and times of a task must follow one another
            head = head._replace(due=False)
            locked |= {row[0]: row for row in rows}     # what an earlier look has locked, nobody else can offer
        offers = await self._fresh(db, work.tenant_id, list(locked.values()))
        for task, _, progress in sorted(offers, key=lambda row: place(row[0])):
            work.add_claimable(task, progress)

    async def _give(self, db: asyncpg.Connection, work: Work, needs: Needs) -> None:
        """Load what few batches need, each with a statement of its own: it is younger than all locks."""
        tenant_id, receipts = work.tenant_id, list[Any]()
        if needs.receipts:
            receipts += await db.fetch(sql.FAMILY, tenant_id, list(needs.receipts))
        if needs.endings:
            receipts += await db.fetch(sql.ENDINGS, tenant_id, *sql.columns(needs.endings, 2))
        if needs.stated:
            receipts += await db.fetch(sql.STATES, tenant_id, *sql.columns(needs.stated, 2))
        for row in receipts:
            work.load_receipt(sql.receipt_row(tuple(row)))
        for kind in {kind for kind, _ in needs.records}:
            keys = [key for of, key in needs.records if of is kind]
            for row in await db.fetch(sql.RECORD[kind], tenant_id, *sql.columns(keys, len(keys[0]))):
                work.load_record(kind(*row))
        if needs.recount:
            work.keep_record(Usage(*await db.fetchrow(sql.COUNT, tenant_id)))
        if needs.tally:
            work.tallies.update(map(tuple, await db.fetch(sql.TALLY, tenant_id, work.list_named_tasks(needs))))

    async def _save(self, db: asyncpg.Connection, work: Work) -> Saved | None:
        """Save what a batch has changed; return how to find it, None if there was nothing."""
        changes = sql.changes(work)
        tables, dropped = tuple(table for table, rows in changes.items() if rows), sql.dropped(work)
        if not tables and not dropped:
            return None
        if work.tenant_id not in self.known:
            changes["tenants"], tables = [(work.now,)], ("tenants", *tables)
        text, names = sql.save(tables)
        given = {"tenant": work.tenant_id, **sql.saved(tables, changes)}
        transaction: str = await db.fetchval(text, *(given[name] for name in names))
        for statement, ids in dropped:      # they look at what was saved just now
            await db.fetchval(statement, ids)
        return Saved(transaction, sql.proof(changes))

    # Reading.

    async def _trip(self, statement: str, *given: Any) -> list[Any]:
        """Run one statement that needs no transaction."""
        return await self._reconnecting(lambda: self._fetch(statement, *given))

    async def _reconnecting(self, run: Callable[[], Awaitable[T]]) -> T:
        """Run something that may be run again; if its connection broke, once more on a new one."""
        try:
            return await run()
        except BROKEN:
            await self.pool.expire_connections()
            return await run()

    async def _fetch(self, statement: str, *given: Any) -> list[Any]:
        async with self.pool.acquire(timeout=self.settings.timeout_seconds) as db:
            try:
                found: list[Any] = await db.fetch(statement, *given)
            except TimeoutError:
                db.terminate()
                await self.pool.expire_connections()
                raise
            return found

    async def _ask(self, statement: str, *given: Any) -> list[Any]:
        """Read in one trip; what keeps the database from answering is not the caller's fault."""
        with unavailable():
            return [tuple(row) for row in await self._trip(statement, *given)]

    async def _read(self, tenant_id: str, statement: str, *given: Any) -> list[Any]:
        """Read behind the wall of a tenant."""
        with unavailable():
            return await self._reconnecting(lambda: self._read_once(tenant_id, statement, *given))

    async def _read_once(self, tenant_id: str, statement: str, *given: Any) -> list[Any]:
        async with self._transaction(tenant_id) as db:
            rows = [tuple(row) for row in await db.fetch(statement, tenant_id, *given)]
            await db.execute("COMMIT")
        return rows

    async def task(self, tenant_id: str, task_id: str) -> Row | None:
        """Return a task with its latest lease and progress."""
        rows = await self._ask(sql.ONE_TASK, tenant_id, task_id)
        return sql.named_row(rows[0]) if rows else None

    async def find_tasks(self, tenant_id: str, of: TaskFilter) -> list[Row]:
        """Return a page of tasks, newest first."""
        statement: str = sql.ROWS
        given: list[Any] = []
        for column, value in (("t.owner_id", of.owner and of.owner.id), ("s.status", of.status), ("t.type", of.type)):
            if value is not None:
                given.append(value)
                statement += f" AND {column} = ${len(given) + 1}"
        if of.before is not None:
            given.append(of.before)
            statement += f" AND t.task_id < ${len(given) + 1}"
        statement = page_of(statement, of.owner, "t.owner_kind", "t.task_id DESC", 1, of.limit, sql.placed(given))
        rows = await self._read(tenant_id, statement, *given)
        return [sql.named_row(row) for row in rows]

    async def find_leases(self, tenant_id: str, of: LeaseFilter) -> list[tuple[Task, Lease]]:
        """Return the live leases of a worker."""
        rows = await self._read(tenant_id, sql.LEASES, of.worker.kind, of.worker.id)
        return [(task, lease) for task, lease, _ in map(sql.named_row, rows)
                if lease and of.worker.instance_id in (None, lease.worker_instance)]

    async def receipt(self, tenant_id: str, receipt_id: str) -> Receipt | None:
        """Return one receipt."""
        rows = await self._read(tenant_id, f"{sql.RECEIPTS} AND r.receipt_id = $2", receipt_id)
        return sql.receipt_row(rows[0]) if rows else None

    async def find_receipts(self, tenant_id: str, of: ReceiptFilter) -> list[Receipt]:
        """Return a page of receipts, oldest first, and none that a transaction still open could add to."""
        newest = await self._horizon(tenant_id, "receipts")
        statement = f"{sql.RECEIPTS} AND r.receipt_id > $2 AND r.receipt_id <= $3"
        given: list[Any] = [of.after or "", newest]
        for column, value in (("to_id", of.to and of.to.id), ("task_id", of.task_id),
                              ("receipt_type", of.receipt_type)):
            if value is not None:
                given.append(value)
                statement += f" AND r.{column} = ${len(given) + 1}"
        order = "r.receipt_id DESC" if of.newest else "r.receipt_id"
        statement = page_of(statement, of.to, "r.to_kind", order, 1, of.limit, sql.placed(given))
        rows = await self._read(tenant_id, statement, *given)
        return [sql.receipt_row(row) for row in (rows[::-1] if of.newest else rows)]

    async def _horizon(self, tenant_id: str, table: str) -> str:
        """Return up to which row nothing can be added any more; wait a moment for those who still might."""
        deadline, target = time.monotonic() + HIDDEN_SECONDS, ""
        while True:
            newest, since = (await self._read(tenant_id, sql.HORIZONS[table], sql.writers_of(uuid.UUID(tenant_id))))[0]
            target = target or newest or ""
            sure = None if since is None else sql.before(since + self.skew)
            if sure is None or target < sure:
                return target
            if time.monotonic() > deadline:
                return sure
            await asyncio.sleep(0.003)

    async def find_events(self, tenant_id: str, of: EventFilter) -> list[Event]:
        """Return a page of a task's events."""
        return [Event(*row) for row in await self._read(tenant_id, sql.EVENTS, of.task_id, of.after or "", of.limit)]

    async def find_obligations(self, tenant_id: str, of: ObligationFilter) -> list[Receipt]:
        """Return a page of open obligations from their index."""
        rows = await self._ask(sql.OPEN, tenant_id, of.to.kind, of.to.id, of.after or "", of.limit)
        return [sql.receipt_row(row) for row in rows]

    async def terminated(self, tenant_id: str, receipt_id: str, by: frozenset[str]) -> bool:
        """Whether a child of the receipt has one of the types."""
        return bool((await self._read(tenant_id, sql.TERMINATED, receipt_id, sorted(by)))[0][0])

    async def record(self, tenant_id: str, kind: type[R], *key: str) -> R | None:
        """Return one record."""
        rows = await self._read(tenant_id, sql.RECORD[kind], *([part] for part in key))
        return kind(*rows[0]) if rows else None

    async def unsent(self) -> list[str]:
        """Return the tenants with receipts that the ledger does not have."""
        return [row[0] for row in await self._ask(sql.UNSENT)]

    async def find_waiting(self, tenant_id: str, of: OutboxFilter) -> list[Outgoing]:
        """Return a page of the receipts that wait for the ledger."""
        return [Outgoing(*row) for row in await self._read(tenant_id, sql.WAITING, of.after, of.limit)]

    async def find_outgoing(self, tenant_id: str, of: OutboxOf) -> list[Outgoing]:
        """Return those of some receipts that the ledger does not have yet."""
        return [Outgoing(*row) for row in await self._read(tenant_id, sql.ON_THE_WAY, list(of.receipt_ids))]

    async def lag(self, tenant_id: str) -> Lag:
        """Return how many receipts wait, how many are parked, and since when the oldest waits."""
        return Lag(*(await self._read(tenant_id, sql.LAG))[0])

    async def find_entries(self, tenant_id: str, of: EntryFilter) -> list[Entry]:
        """Return a page of what others have stored here, and none that a transaction still open could add to."""
        statement, given = sql.ENTRIES, list[Any]([of.after or "", await self._horizon(tenant_id, "ledger")])
        for column, value in (("to_id", of.to and of.to.id), ("task_id", of.task_id),
                              ("receipt_type", of.receipt_type), ("asyncgate_instance", of.instance)):
            if value is not None:
                given.append(value)
                statement += f" AND {column} = ${len(given) + 1}"
        statement = page_of(statement, of.to, "to_kind", "arrival", 2, of.limit, sql.placed(given))
        rows = await self._read(tenant_id, statement, *given)
        return [Entry(*row) for row in rows]

    async def lead(self, job: str) -> bool:
        """Whether this process does a job that only one may do."""
        return self.member is None or await self.member.lead(job)

    async def find_archived(self, tenant_id: str, of: ArchivedFilter) -> list[Archived]:
        """Return where the archived receipts of a task are."""
        return [Archived(*row) for row in await self._read(tenant_id, sql.ARCHIVED, of.task_id)]

    async def find_key(self, key_id: str) -> tuple[str, bool, Key] | None:
        """Return a key before its tenant is known."""
        rows = await self._ask(sql.FIND_KEY, key_id)
        return (rows[0][0], rows[0][1], Key(*rows[0][2:])) if rows else None

    async def overdue(self, now: float, grace: float, limit: int) -> list[tuple[str, list[str], list[str]]]:
        """Return what upkeep must look at, tenant by tenant, but for what other living processes look after."""
        others, name = (list(self.member.others), self.member.instance_id) if self.member else ([], None)
        found: defaultdict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        for tenant_id, kind, id in await self._ask(sql.OVERDUE, now, now - grace, others, name, max(OVERDUE, limit)):
            if kind == "others":    # its owner lives and should see to it; should it die now, we will see that
                if self.member:
                    self.member.hear(News(tenant_id, lapse=now - grace + LOOK_AGAIN_SECONDS))
                continue
            ids = found[tenant_id][kind == "schedule"]
            if len(ids) < limit:
                ids.append(id)
        return [(tenant_id, *both) for tenant_id, both in found.items()]

    async def lapses(self, since: float, limit: int) -> list[tuple[float, str, str]]:
        """Return when live leases run out; a task with a deadline is named too, for both have one index."""
        return [tuple(row) for row in await self._ask(sql.LAPSES, since, limit)]

    async def drop_lanes(self) -> int:
        """Forget the lanes in which no task waits, of the tenants that this process knows."""
        return sum([await self._drop_lanes(tenant_id) for tenant_id in list(self.lanes)])

    async def _drop_lanes(self, tenant_id: str) -> int:
        if not await self._read(tenant_id, f"{sql.EMPTY_LANES} LIMIT 1"):
            return 0        # and nobody had to wait
        async with self._transaction(tenant_id) as db:
            await db.execute(sql.LOCK_LANES.format(writers=sql.writers_of(uuid.UUID(tenant_id))))
            lanes = [row[0] for row in await db.fetch(sql.EMPTY_LANES, tenant_id)]
            await db.execute("DELETE FROM asyncgate.lanes WHERE tenant_id = $1 AND lane = ANY ($2::bigint[])",
                             tenant_id, lanes)
            await db.execute("COMMIT")
        self.lanes.pop(tenant_id, None)     # the next batch reads those that are left
        return len(lanes)

    async def next_due(self, tenant_id: str) -> float | None:
        """Return when the next delayed task may be leased."""
        due: float | None = (await self._read(tenant_id, sql.NEXT_DUE, self.now()))[0][0]
        return due

    async def find_rows(self, tenant_id: str, table: type[Struct], after: str) -> list[Any]:
        """Return the next 1,000 rows of a table, in the order of their export keys."""
        keys = export_order(table)
        if table is Receipt:
            return await self.find_receipts(tenant_id, ReceiptFilter(None, None, None, after, 1000))
        if not keys:
            return [] if after or (only := await self.record(tenant_id, table)) is None else [only]
        if table in (Task, Lease):
            held = " AND s.lease_id IS NOT NULL" * (table is Lease)
            statement = f"{sql.ROWS} AND t.task_id > $2{held} ORDER BY t.task_id LIMIT 1000"
            return [row[table is Lease] for row in map(sql.named_row, await self._read(tenant_id, statement, after))]
        position = (*after.split("\0"), *[""] * len(keys))[:len(keys)]
        return [table(*row) for row in await self._read(tenant_id, sql.export(table, keys), *position)]

    async def keep_secret(self, secret: bytes) -> None:
        """Sign cursors with another key, also after a restart."""
        await self._ask("UPDATE asyncgate.meta SET value = $1 WHERE name = 'cursor_key'", secret.hex())
        self.secret = secret

    async def tenants(self) -> list[str]:
        """Return every tenant that has stored anything."""
        return [row[0] for row in await self._ask(sql.TENANTS)]


def locks(tenant_id: str, needs: Needs) -> Iterable[int]:
    """Return the locks of those who take turns: at repeating a claim, answering a receipt, changing a record."""
    names = [*needs.repeats, *((id,) for id in needs.receipts), *(key for _, key in needs.records)]
    return (lock_of(tenant_id, *name) for name in names)


def wanted_of(lanes: Lanes, claims: list[LeaseNext]) -> dict[frozenset[int], int]:
    """Return how many tasks of which groups of lanes are enough for all claims."""
    wanted: defaultdict[frozenset[int], int] = defaultdict(int)
    for ask in claims:
        for group in lanes.groups([ask]):
            wanted[group] += ask.max_tasks or 1
    return wanted


@contextlib.contextmanager
def unavailable(answer: str = "the database does not answer; try again") -> Iterator[None]:
    """Turn what keeps the database from answering into the answer that says so."""
    try:
        yield
    except AWAY as error:
        why = None if isinstance(error, OUTAGE) else error      # a fault in a statement is to be found
        log.error("the database does not answer: %s", error or type(error).__name__, exc_info=why, extra=OFTEN)
        raise DatabaseUnavailable(answer, retry_after=1) from error


async def commit(db: asyncpg.Connection) -> None:
    """Commit; raises Unconfirmed when the server gave up waiting for a standby, which it says in a warning only."""
    warnings: list[Any] = []

    def hear(_: Any, warning: Any) -> None:
        warnings.append(warning)
    db.add_log_listener(hear)
    try:
        await db.execute("COMMIT")
    finally:
        db.remove_log_listener(hear)
    if warnings:
        raise Unconfirmed(str(warnings[0]))


async def keep_session(db: asyncpg.Connection) -> None:
    """Nothing outlives a transaction here, so a connection that goes back needs no reset, which is a round trip."""


async def require_weak_role(db: asyncpg.Connection) -> None:
    """Refuse to work as somebody for whom the wall between tenants does not hold."""
    role, superuser, bypass, owner, sweeper, auth = await db.fetchrow("""
        SELECT current_user::text,
               EXISTS (SELECT FROM pg_roles WHERE rolsuper AND pg_has_role(current_user, oid, 'MEMBER')),
               EXISTS (SELECT FROM pg_roles WHERE rolbypassrls AND pg_has_role(current_user, oid, 'MEMBER')),
               pg_has_role(current_user, 'asyncgate_owner', 'MEMBER'),
               pg_has_role(current_user, 'asyncgate_sweeper', 'MEMBER'),
               pg_has_role(current_user, 'asyncgate_auth', 'MEMBER')""")
    strong = {"is a superuser": superuser, "may bypass row-level security": bypass, "owns the tables": owner,
              "sees all tenants' work": sweeper, "sees all tenants' keys": auth}
    for why in (why for why, holds in strong.items() if holds):
        raise StartupError(f"the role {role} {why}, so the wall between tenants would not hold: connect as "
                           "asyncgate_app, or set database.trusted_role=true to try things on your own machine")


async def open_backend(url: str, *, serving: bool = False, settings: DatabaseSettings | None = None) -> Postgres:
    """Open the database that a URL names, as a role that stays behind the wall between tenants."""
    settings = settings or DatabaseSettings()
    if serving and settings.pgbouncer and not settings.direct_url:
        raise StartupError("PgBouncer keeps no session: set database.direct_url to the address of Postgres itself, "
                           "for what needs one (locks and notifications)")
    if settings.pgbouncer and settings.trusted_role:
        raise StartupError("database.trusted_role does not work through PgBouncer: connect as asyncgate_app")
    try:
        pool = await connect(url, settings)
    except (*AWAY, ValueError) as error:
        raise startup_error(error, url) from None
    backend = Postgres(pool, url, settings)
    try:
        async with pool.acquire() as db:
            await require_schema(db)
            await require_weak_role(db)
            key = await db.fetchval("SELECT value FROM asyncgate.meta WHERE name = 'cursor_key'")
            backend.secret = bytes.fromhex(key)
    except BaseException as error:
        pool.terminate()
        if isinstance(error, AWAY):
            raise startup_error(error, url) from None
        raise
    return backend


async def connect(url: str, settings: DatabaseSettings) -> asyncpg.Pool:
    """Make the pool; its connections are opened when they are needed."""
    # PgBouncer hands out another session for each transaction: it knows no prepared statements and no settings.
    ours = session(settings) if settings.pgbouncer else {
        **session(settings), **PROBES_ONLY, "idle_in_transaction_session_timeout": "60s",
        "statement_timeout": f"{int(settings.timeout_seconds * 1000)}"}
    hosts = Hosts(url, settings.timeout_seconds)
    return await asyncpg.create_pool(
        url, connect=hosts.connect, min_size=1, max_size=settings.pool_size, reset=keep_session, server_settings=ours,
        statement_cache_size=0 if settings.pgbouncer else 1000, max_cached_statement_lifetime=0,
        max_cacheable_statement_size=0, command_timeout=settings.timeout_seconds)


BACKEND: type[Backend] = Postgres

if TYPE_CHECKING:
    _shared: type[SharedBackend] = Postgres
    _archiving: type[ArchivingBackend] = Postgres
