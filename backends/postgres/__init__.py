"""Postgres: two round trips per batch, all of them behind the wall between tenants.

    BEGIN + tenant + LOAD (locks, claims, the clock)   →   SAVE (a statement for each table) + COMMIT

The statements of a trip travel together, see pipeline.py; those behind one that fails are not carried out.

Row-level security reads `app.tenant_id`, which is set for one transaction only; the gate's role can neither bypass it
nor change a receipt.

There are six kinds of lock, and each has its word.  In this order, so that no transactions wait in a circle:
    turn key        advisory, per transaction: batches that answer the same receipt or repeat the same claim take turns
    row lock        on the rows of `states`, by task id; claims skip locked rows and never wait
    limits lock     advisory, per transaction: alone for claims of tasks with limits, shared for who ends or queues one
and apart from these:
    writers lock    advisory, shared by all transactions that write a tenant's receipts; see `_horizon`
    name lock       advisory, per session: the name of a living instance, or a job that only one process does
    migration lock  advisory: one process migrates

The statements are in statements.py, the cooperation of several processes is in instances.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import asyncpg
from msgspec import Struct

from asyncgate import Needs, News, Work, backends
from asyncgate.backends import pages
from asyncgate.backends.lanes import Lanes
from asyncgate.backends.postgres import instances, migrations, pipeline, turns
from asyncgate.backends.postgres import statements as sql
from asyncgate.backends.postgres.examination import examine_database as examine_database
from asyncgate.backends.postgres.groups import GROUP_CALLS, Flight, Groups, Search
from asyncgate.backends.postgres.hosts import AWAY, CONNECT_SECONDS, Hosts, as_user, pin, startup_error
from asyncgate.backends.postgres.migrations import migrate_database as migrate_database
from asyncgate.backends.postgres.migrations import migration_sql as migration_sql
from asyncgate.backends.postgres.privileges import find_strengths
from asyncgate.parts.model import errors, queries, stored, stored_limits, stored_webhooks, wire
from asyncgate.parts.model.clock import elapsed
from asyncgate.parts.model.ids import Ids, first_id
from asyncgate.parts.model.limiting import list_granted, read_pattern
from asyncgate.parts.model.queue_changes import place
from asyncgate.parts.model.settings import DatabaseSettings
from asyncgate.parts.process.outages import OFTEN
from asyncgate.parts.process.turns import counting

log = logging.getLogger("asyncgate.postgres")
T = TypeVar("T")
R = TypeVar("R", bound=Struct)

ATTEMPTS = 8                # how often a batch that lost a race is tried
RACE_SECONDS = 0.005        # the longest pause after the first lost race; each further one doubles it
HIDDEN_SECONDS = 0.25       # how long a reader of receipts waits for transactions that may still add to its page
SLOTS = 3                   # of a tenant, in one process: each of the batches that run at once counts in its own
PROMOTED = 1000             # the most delayed tasks that one batch makes claimable when their time has come
SLACK, MOST_SLACK = 32, 32 * 16 ** 3    # extra candidates, in case other transactions have locked the first ones
ARCHIVIST = "asyncgate_archivist"
OVERDUE = 10_000            # the most rows that upkeep reads in one query
LOOK_AGAIN_SECONDS = 1.0    # pause before an expired lease is checked again that its own instance has not taken back

# Plans are cached for long.  Every statement is a handful of index probes, so the planner must not choose a plan that
# reads all rows of a tenant because a table is small at first, or a tenant unusual.
PROBES_ONLY = {"plan_cache_mode": "force_generic_plan", "jit": "off", "enable_seqscan": "off",
               "enable_bitmapscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off"}
LOST_RACE = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError, asyncpg.UniqueViolationError)
REFUSED = (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError)
# The connection is broken; another one may work.
BROKEN = (asyncpg.PostgresConnectionError, asyncpg.InterfaceError, asyncpg.AdminShutdownError,
          asyncpg.CrashShutdownError, asyncpg.CannotConnectNowError, asyncpg.ReadOnlySQLTransactionError,
          asyncpg.InternalClientError, ConnectionError)
# The errors of an outage; every other error of the database is logged with a traceback.
OUTAGE = (*BROKEN, OSError, TimeoutError, asyncpg.OperatorInterventionError, asyncpg.InsufficientResourcesError,
          asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError,
          asyncpg.TargetServerAttributeNotMatched, *LOST_RACE[:2])


class Queues:
    """A short-lived cache of where the live rows of a tenant's queues begin, for when finding them took long.

    While a long transaction is open, Postgres keeps every row that it may still see, so each claimed task leaves a dead
    row at the head of its queue.  If this process queues a task before the cached beginning, the beginning moves back
    at once.  A task that another process queues there is found after MOMENT_SECONDS at most.
    """

    MOMENT_SECONDS, SLOW_SECONDS = 5.0, 0.003
    HEAD = (1 << 62, "")

    def __init__(self) -> None:
        self.begins: dict[int, tuple[int, str]] = {}        # lane → position in its queue
        # By running search, tasks queued meanwhile; of one that failed until its batch has gone.
        self.watching: WeakKeyDictionary[Search, dict[int, tuple[int, str]]] = WeakKeyDictionary()
        self.until, self.forgotten = 0.0, 0

    def start(self, lane: int) -> tuple[int, str]:
        """Return the priority and the task id from which to read a lane."""
        if time.monotonic() > self.until:
            self.begins.clear()
        if (position := self.begins.get(lane)) is None:
            return self.HEAD
        return -position[0], position[1]

    def begin(self, search: Search) -> None:
        """Note that a search begins."""
        self.watching[search], search.forgotten = {}, self.forgotten

    def end(self, search: Search) -> None:
        """Cache the positions of the first tasks that a search found, if it took the database long."""
        put = self.watching.pop(search)
        if search.forgotten == self.forgotten and (self.begins or search.seconds > self.SLOW_SECONDS):
            self.until = self.until if self.begins else time.monotonic() + self.MOMENT_SECONDS
            for task in sorted(search.tasks, key=place, reverse=True):
                self.begins[task.lane] = min(place(task), put.get(task.lane, place(task)))

    def note_queued(self, task: stored.Task) -> None:
        """Note that this process has put a task into its queue."""
        for places in (*self.watching.values(), *([self.begins] if task.lane in self.begins else ())):
            places[task.lane] = min(place(task), places.get(task.lane, place(task)))

    def forget(self) -> None:
        """Empty the cache: read all queues from their heads again."""
        self.forgotten += 1
        self.begins.clear()


class Uncertain(Exception):
    """The reply to COMMIT did not arrive, and it could not be found out whether the batch was committed."""


class Unconfirmed(Exception):
    """COMMIT was answered with a warning: committed on this server, but perhaps on no standby."""


class Saved(NamedTuple):
    """How to find out later whether a transaction was committed."""

    tenant_id: str
    transaction: str
    proof: sql.Proof | None


class Requested(NamedTuple):
    """What a batch has asked for."""

    flight: Flight
    rows: pipeline.Fetched
    others: sql.Others
    lanes: Lanes
    wanted: dict[frozenset[int], int]
    stopped: Any
    turns: turns.TurnsRead | None
    skew: float


class Postgres(pages.Pages):
    """A pool of connections; each batch uses one."""

    parallel_per_tenant = SLOTS

    def __init__(self, pool: pipeline.Pool, hosts: Hosts, url: str, settings: DatabaseSettings) -> None:
        self.pool, self.hosts, self.url, self.settings = pool, hosts, url, settings
        self.hosts.now = self.now
        most = max(settings.pool_size - 2, 1)       # two connections stay free for readers
        self.groups, self.parallel = Groups(self._run_group, most), GROUP_CALLS
        self.alone = asyncio.Semaphore(max(most - self.groups.most, 1))     # batches that go alone
        self.skew, self.ids, self.secret = 0.0, Ids(), b""
        self.ahead = time.time() - elapsed()        # how far the database's clock is ahead of `elapsed`
        self.instance = instances.name_of_this_process()
        self.lanes: defaultdict[str, Lanes] = defaultdict(Lanes)
        self.queues: defaultdict[str, Queues] = defaultdict(Queues)
        self.known: set[str] = set()
        self.counting: defaultdict[str, set[int]] = defaultdict(set)    # in which slots batches count now, by tenant
        self.member: instances.Membership | None = None

    def now(self) -> float:
        """Return the database's time of its last answer, advanced by a clock that nobody can set."""
        return elapsed() + self.ahead + self.skew

    async def alive(self) -> None:
        """Return if the database answers; raises DatabaseUnavailable."""
        await self._ask("SELECT 1")

    async def is_current(self) -> bool:
        """Whether the schema is as new as this process needs, and has not left it behind."""
        number, code = (await self._ask("SELECT max(number), max(code) FROM asyncgate.migrations"))[0]
        return number is not None and number >= migrations.SCHEMA_VERSION >= code

    def is_joined(self) -> bool:
        """Whether this process holds its lock and hears the others."""
        return self.member is None or self.member.is_connected()

    async def close(self) -> None:
        """Leave the other processes and close all connections."""
        if self.member:
            await self.member.leave()
        with contextlib.suppress(*AWAY):
            async with asyncio.timeout(CONNECT_SECONDS):
                await self.pool.close()
        self.pool.terminate()

    async def register_segment(self, tenant_id: str, segment: str) -> None:
        """Register a written segment of the archive, as the archivist role; only then may its receipts be deleted."""
        settings, direct = self.settings, self.settings.direct_url or self.url
        trusted = {"role": ARCHIVIST} if settings.trusted_role else {}
        url = settings.archive_url or (direct if trusted else as_user(direct, ARCHIVIST))
        try:
            hosts = Hosts(url, settings.timeout_seconds, self.hosts.lineage)
            db = await hosts.connect(server_settings={**pin(settings.timeout_seconds), **trusted})
            try:
                async with db.transaction():
                    await db.execute("SELECT set_config('app.tenant_id', $1, true)", tenant_id)
                    await db.execute("INSERT INTO asyncgate.segments (tenant_id, segment) VALUES ($1, $2) "
                                     "ON CONFLICT DO NOTHING", tenant_id, segment)
            finally:
                await db.close()
        except (*AWAY, ValueError) as error:
            raise errors.ArchiveUnavailable(f"{ARCHIVIST} cannot register a segment of the archive: {error}; set "
                                            "database.archive_url to the address with that role") from error

    # Several processes.

    def is_alone(self) -> bool:
        """Whether no other living process shares the database, as far as is known."""
        return self.member is None or self.member.alone

    async def join(self, instance_id: str, beat_seconds: float, hear: Callable[[News], None]) -> float | None:
        """Join the processes that share the database, under a name that no other living process has."""
        self.member = instances.Membership(self.settings.direct_url or self.url, self.settings, instance_id,
                                           beat_seconds, hear, self.now, self.hosts.lineage)
        return await self.member.join()

    async def beat(self) -> None:
        """Store a sign of life of this process."""
        if self.member:
            with translate_outages():
                await self.member.beat()

    async def last_served(self) -> float:
        """Return the last sign of life of any other process, 0 if there is none."""
        served: float = (await self._ask(sql.LAST_SERVED, self.member.instance_id if self.member else ""))[0][0]
        return served

    def tell(self, news: News) -> None:
        """Send news to the other processes."""
        if self.member:
            self.member.tell(news)

    # Writing.

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Run one batch; try again after a lost race, or if the connection broke before COMMIT."""
        flight, problem = Flight(tenant_id, needs, decide), None
        with translate_outages("the database does not answer; nothing was stored, so try again"):
            try:
                if flight.may_share() and (problem := await self.groups.carry(flight)) is None:
                    return
                async with self.alone:
                    await self._retry(flight, problem)
            except Uncertain as unknown:
                log.error("it is unknown whether a batch was committed: %s", unknown, extra=OFTEN)
                raise errors.outcome_unknown() from unknown

    async def _run_group(self, flights: list[Flight]) -> None:
        """Carry batches out together; those that have to go alone have a problem afterwards."""
        try:
            await self._attempt(flights, shared=True)
        except (Uncertain, TimeoutError):
            raise
        except Exception as problem:
            if len(flights) == 1 and not isinstance(problem, (asyncpg.LockNotAvailableError, *LOST_RACE, *REFUSED,
                                                              *BROKEN)):
                raise
            if isinstance(problem, BROKEN):
                self.pool.expire()
            for flight in flights:
                flight.problem = problem

    async def _retry(self, flight: Flight, problem: Exception | None) -> None:
        """Carry a batch out alone, perhaps after a problem that it had."""
        for attempt in range(problem is not None, ATTEMPTS):
            if isinstance(problem, LOST_RACE):      # a pause, else the same ones meet again
                await asyncio.sleep(random.uniform(0, RACE_SECONDS * 2 ** (attempt - 1)))
            try:
                return await self._attempt([flight])
            except LOST_RACE as lost:
                problem = lost
            except REFUSED as refused:
                raise errors.Refused(type(refused).__name__) from refused
            except BROKEN as broken:
                if attempt:
                    raise
                problem = broken
                self.pool.expire()
        if isinstance(problem, asyncpg.UniqueViolationError):
            raise errors.Refused(f"{type(problem).__name__}, {ATTEMPTS} times") from problem
        raise errors.DatabaseUnavailable(
            "other transactions keep changing the same rows; nothing was stored, so try again",
            retry_after=1) from problem

    async def _attempt(self, flights: list[Flight], shared: bool = False) -> None:
        """Run a transaction of one batch, or of one for each of several tenants, each behind its own wall."""
        saved, done, several = None, list[tuple[Work, bool, Saved | None]](), len(flights) > 1
        try:
            async with self._transaction(flights[0].tenant_id, *flights, shared=shared) as db:
                with contextlib.ExitStack() as slots:
                    requested = [self._request(db, flight, several) for flight in flights]
                    await db.run()
                    for asked in requested:
                        if (outcome := await self._decide(db, asked, several, slots)) is not None:
                            done.append(outcome)
                    saves = [save for *_, save in done if save is not None]
                    saved = next((save for save in saves if save.proof and save.proof.sure), next(iter(saves), None))
                    await commit(db)
        except (*BROKEN, TimeoutError, Unconfirmed) as error:
            if saved is None and isinstance(error, Unconfirmed):    # it may have read what no standby has
                raise ConnectionError("no standby has confirmed what was read") from error
            if saved is None:
                raise
            if not await self._was_committed(saved):
                raise ConnectionError("the connection broke before COMMIT") from error
        for work, outdated, save in done:
            if save is not None:
                self.known.add(work.tenant_id)
            self._note_committed(work, outdated)

    async def _decide(self, db: pipeline.Connection, asked: Requested, several: bool,
                      slots: contextlib.ExitStack) -> tuple[Work, bool, Saved | None] | None:
        """Decide a batch, and add what saves it; None if it has to go alone."""
        if several:
            await asyncio.sleep(0)      # a batch may decide for long, and others want the loop
            db.add(sql.BEHIND_WALL, asked.flight.tenant_id)
        work, transaction, outdated = await self._load(db, asked)
        try:
            asked.flight.decide(work)
        except Exception as problem:
            if not several:
                raise
            asked.flight.problem = problem      # it shows when it goes alone
            self.queues[work.tenant_id].forget()
            return None
        slot = slots.enter_context(self._take_slot(work.tenant_id))
        return work, outdated, await self._save(db, work, transaction, slot)

    @contextlib.contextmanager
    def _take_slot(self, tenant_id: str) -> Iterator[int]:
        """Reserve a slot to count in: batches that count in one slot would wait for each other's commit."""
        base = self.member.number * SLOTS if self.member else 0
        slot = next((slot for slot in range(base, base + SLOTS) if slot not in self.counting[tenant_id]), base)
        self.counting[tenant_id].add(slot)
        try:
            yield slot
        finally:
            self.counting[tenant_id].discard(slot)

    def _note_committed(self, work: Work, outdated: bool) -> None:
        """Update the caches of lanes and queues after a commit."""
        for lane, kind in work.lanes.items():
            self.lanes[work.tenant_id].learn(lane, *kind)
        queues = self.queues[work.tenant_id]
        if outdated:       # delayed tasks were promoted, or tasks were locked and not offered
            queues.forget()
        left = (work.tasks[task_id] for ready in work.ready.values() for task_id in ready)
        for task in (*work.added.values(), *work.moved.values(), *left):    # other searches skipped or missed these
            if task.status == "queued":
                queues.note_queued(task)

    async def _was_committed(self, saved: Saved) -> bool:
        """Find out whether a batch was committed whose COMMIT got no proper answer; raises Uncertain."""
        deadline = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                there, status = await self._read_proof(saved)
            except (*AWAY, Unconfirmed) as away:
                if isinstance(away, Unconfirmed) and time.monotonic() < deadline:
                    continue
                raise Uncertain("the database cannot be asked whether the last COMMIT succeeded") from away
            if there or status == "aborted" or (status != "in progress" and saved.proof and saved.proof.sure):
                return there
            if status != "in progress" or time.monotonic() > deadline:
                raise Uncertain(f"the last COMMIT is {status or 'forgotten'}")
            await asyncio.sleep(0.02)

    async def _read_proof(self, saved: Saved) -> tuple[bool, str | None]:
        """Return whether a row of the batch is stored, and the database's status of its transaction.

        The status "committed" proves nothing: after a crash, or on a standby that took over without the transaction,
        the number may belong to another one.  "aborted" is proof: then this batch was not committed either.  Order: the
        row is read after the status, so a commit between the two reads is not missed.  The row counts only after a
        later write is committed: if COMMIT waits for a standby, the standby then has the row too.
        """
        try:
            async with self._transaction(saved.tenant_id) as db:
                db.add("SELECT pg_logical_emit_message(true, 'asyncgate', '')")
                status = await db.fetchval("SELECT pg_xact_status($1::text::xid8)", saved.transaction)
                there = saved.proof is not None and await db.fetchval(
                    saved.proof.statement, saved.tenant_id, saved.proof.row)
                await commit(db)
        except asyncpg.InvalidParameterValueError:      # a number that the database has not used yet
            return False, "aborted"
        return bool(there), status

    @contextlib.asynccontextmanager
    async def _transaction(self, tenant_id: str, *flights: Flight,
                           shared: bool = False) -> AsyncIterator[pipeline.Connection]:
        """Begin a transaction behind the wall of a tenant, with the locks of the batches that write in it."""
        async with self.pool.acquire() as db:
            try:
                db.add("BEGIN ISOLATION LEVEL READ COMMITTED")
                if self.settings.pgbouncer:
                    db.add(sql.HASTEN, f"{int(self.settings.timeout_seconds * 1000)}")
                db.add(sql.BEHIND_WALL, tenant_id)
                if flights:
                    take_locks(db, flights, shared)
                yield db
            except BaseException as error:
                for of in (tenant_id, *[flight.tenant_id for flight in flights]):
                    self.queues[of].forget()        # other searches skipped the rows that were locked here
                # Else its state is unknown; security: the tenant must not outlive the transaction, so it is given up.
                if isinstance(error, asyncpg.PostgresError) and db.is_in_transaction():
                    db.added.clear()
                    await db.execute("ROLLBACK")
                if isinstance(error, TimeoutError):
                    self.pool.expire()      # the other connections may be broken too
                raise

    def _request(self, db: pipeline.Connection, flight: Flight, several: bool) -> Requested:
        """Ask for what a batch needs."""
        tenant_id, needs, claims, now = flight.tenant_id, flight.needs, len(flight.needs.claims), self.now()
        lanes, queues = self.lanes[tenant_id], self.queues[tenant_id]
        if several:
            db.add(sql.BEHIND_WALL, tenant_id)
        wanted = count_wanted(lanes, needs.claims, now)
        named = tuple(way for way in sql.NAMED if getattr(needs, way))
        plain = len(wanted) == 1 and [queues.start(lane) for lane in next(iter(wanted))] == [queues.HEAD]
        given = {"tenant": tenant_id, "skew": self.skew, "portions": 2 * claims - 1}
        given |= sql.bind_needs(needs) if named else {}
        given |= sql.bind_wanted(wanted, SLACK, queues.start) if wanted else {}
        text, names = sql.load(named, bool(wanted), claims > 0, is_portioned(wanted, claims), plain,
                               claims > 0 and bool(lanes.patterns))
        queues.begin(flight.search)
        rows = db.add(text, *(given[name] for name in names))
        others = sql.Others(db, tenant_id, needs)
        return Requested(flight, rows, others, lanes, wanted, lanes.find_stopped(now),
                         self._request_turns(db, flight, lanes, now), self.skew)

    def _request_turns(self, db: pipeline.Connection, flight: Flight, lanes: Lanes,
                       now: float) -> turns.TurnsRead | None:
        """Ask for the turns of tasks with limits that claims may get, behind all locks of rows that are waited for."""
        claims = flight.needs.claims
        if not claims or not (limited := lanes.find_limited(claims, now)):
            return None
        patterns = {lane: lanes.patterns[lane] for lane in limited}
        return turns.TurnsRead(db, flight.tenant_id, patterns, sum(ask.max_tasks or 1 for ask in claims), now,
                               self.skew)

    async def _load(self, db: pipeline.Connection, asked: Requested) -> tuple[Work, str | None, bool]:
        """Load what a batch asked for; return also its transaction, and whether the cache of queues is out of date."""
        needs, search = asked.flight.needs, asked.flight.search
        work, transaction, outdated = await self._load_tasks(db, asked)
        search.tasks = [work.tasks[task_id] for ready in work.ready.values() for task_id in ready]
        self.queues[work.tenant_id].end(search)
        if needs.tally:
            work.tallies.update(await db.fetch(sql.TALLY, work.tenant_id, work.list_named_tasks(needs)))
        return work, transaction, outdated

    async def _load_tasks(self, db: pipeline.Connection, asked: Requested) -> tuple[Work, str | None, bool]:
        tenant_id, needs, lanes, wanted = asked.flight.tenant_id, asked.flight.needs, asked.lanes, asked.wanted
        head, named, offered = sql.read_load(asked.rows)
        self.ahead, asked.flight.search.seconds = head.clock - asked.skew - elapsed(), head.seconds
        self.ids.after(head.newest)     # ids never go back, even if the clock does
        if changed := head.lanes != str(lanes.version):     # another process has added or deleted lanes
            lanes = Lanes()
            for lane, type, capabilities, pattern in await db.fetch(sql.LANES, tenant_id):
                lanes.learn(lane, type, json.loads(capabilities), pattern)
            self.lanes[tenant_id] = lanes       # now, because another batch would take an empty cache for an empty gate
        work = Work(tenant_id, head.clock, self.ids, lanes.known, needs)
        work.limiting.patterns = lanes.patterns
        for row in await self._with_progress(db, tenant_id, named):
            work.load_task(*row)
        asked.others.load(work)
        if granted := list_granted(work):       # order: behind the locks of their rows, as for claims
            read = turns.GrantedRead(db, tenant_id, granted)
            await db.run()
            read.load(work)
        transaction, unread = head.transaction, False
        if needs.claims:
            if pauses := None if head.pauses is None else stored.Pauses(head.pauses):
                work.load_record(pauses)
            lanes.pauses = pauses
            if changed or lanes.find_stopped(head.clock) != asked.stopped:
                head, wanted = head._replace(due=True), count_wanted(lanes, needs.claims, head.clock)
            unread = await self._offer(db, work, head, wanted, offered, len(needs.claims))
            await self._offer_turns(db, work, asked, lanes, head.due)
        return work, transaction, bool(needs.claims) and (head.due or unread)

    async def _with_progress(self, db: pipeline.Connection, tenant_id: str,
                             rows: list[tuple[Any, ...]]) -> list[queries.Row]:
        """Return tasks with leases and progress; read progress again if a wait for a row lock made it stale."""
        tasks = [sql.named_row(row) for row in rows]
        if stale := [row[0] for row in rows if sql.is_stale(row)]:
            latest = {row[0]: stored.Progress(*row) for row in await db.fetch(sql.PROGRESS_OF, tenant_id, stale)}
            tasks = [(task, lease, latest.get(task.task_id, progress)) for task, lease, progress in tasks]
        return tasks

    async def _offer(self, db: pipeline.Connection, work: Work, head: sql.Head, wanted: dict[frozenset[int], int],
                     rows: list[tuple[Any, ...]], claims: int) -> bool:
        """Offer the best claimable tasks; search again, and further down the queues, if the first ones are locked.

        Return whether tasks were locked that are not offered, because those before them are enough.
        """
        queues, slack = self.queues[work.tenant_id], SLACK
        if head.due:
            if work.limiting.patterns:
                turns.lock(db, work.tenant_id)
                db.add(turns.BEGIN_PROMOTED, work.tenant_id, head.clock, PROMOTED)
            db.add(sql.PROMOTE, work.tenant_id, head.clock, PROMOTED)
            queues.forget()
        locked = {row[0]: row for row in sorted(rows, key=sql.is_read)}     # it may be read in one group only
        while wanted and (head.due or (head.full and slack < MOST_SLACK)
                          or (len(rows) < head.seen and slack == SLACK)):
            slack *= 1 if head.due else 16
            text, names = sql.load((), True, portioned=is_portioned(wanted, claims))
            given = {"tenant": work.tenant_id, "skew": self.skew, "portions": 2 * claims - 1,
                     **sql.bind_wanted(wanted, slack, queues.start)}
            head, _, rows = sql.read_load(await db.fetch(text, *(given[name] for name in names)))
            work.now = head.clock       # clock: later than every row lock, so that a task's ids and times never go back
            head = head._replace(due=False)
            # Together with the rows that earlier searches of this batch locked.
            locked |= {row[0]: row for row in sorted(rows, key=sql.is_read)}
        read = [row for row in locked.values() if sql.is_read(row)]
        offers = await self._with_progress(db, work.tenant_id, read)
        for task, _, progress in sorted(offers, key=lambda row: place(row[0])):
            work.add_claimable(task, progress)
        return len(read) < len(locked)

    async def _offer_turns(self, db: pipeline.Connection, work: Work, asked: Requested, lanes: Lanes,
                           due: bool) -> None:
        """Offer tasks with limits by turns; read these again if delayed tasks were promoted, or lanes have changed.

        Those of the lanes that this batch knows: another one may have read newer lanes meanwhile.
        """
        read = asked.turns
        if due and (read := self._request_turns(db, asked.flight, lanes, work.now)) is not None:
            await db.run()
        if read is not None:
            read.load(work)

    async def _save(self, db: pipeline.Connection, work: Work, transaction: str | None, slot: int) -> Saved | None:
        """Add what saves the changes of a batch, which COMMIT takes along; return how to find out later whether it was.

        None without changes.
        """
        if turns.is_touched(work):
            turns.lock(db, work.tenant_id, shared=True)
        changes = sql.changes(work, slot)
        # Order: functions that drop check rows that were saved just now, and those that amend check what was there.
        statements = [*sql.amend_statements(work), *sql.list_saves(work.tenant_id, changes), *sql.drop_statements(work),
                      *sql.erase_statements(work)]
        if not statements:
            return None
        if work.tenant_id not in self.known:
            db.add(sql.INSERT_TENANT, work.tenant_id, work.now)
        for statement, given in statements:
            db.add(statement, *given)
        turns.save(db, work)
        transaction = transaction or await db.fetchval(f"SELECT {sql.TRANSACTION}")
        return Saved(work.tenant_id, transaction, sql.find_proof(changes))

    # Reading.

    async def _reconnecting(self, run: Callable[[], Awaitable[T]]) -> T:
        """Run a repeatable read; if its connection broke, repeat it once on a new one."""
        try:
            return await run()
        except BROKEN:
            self.pool.expire()
            return await run()

    async def _fetch(self, statement: str, *given: Any) -> pipeline.Fetched:
        async with self.pool.acquire() as db:
            try:
                return await db.fetch(statement, *given)
            except TimeoutError:
                self.pool.expire()
                raise

    async def _ask(self, statement: str, *given: Any) -> list[Any]:
        """Read in one round trip; raises DatabaseUnavailable."""
        with translate_outages():
            return await self._reconnecting(lambda: self._fetch(statement, *given))

    async def _read(self, tenant_id: str, statement: str, *given: Any) -> list[Any]:
        """Read behind the wall of a tenant; raises DatabaseUnavailable."""
        with translate_outages():
            rows = await self._reconnecting(lambda: self._read_once(tenant_id, statement, *given))
        if (call := counting.get()) is not None:
            call.add_rows(len(rows))        # which the driver decodes in no task
        return rows

    async def _read_once(self, tenant_id: str, statement: str, *given: Any) -> list[Any]:
        async with self._transaction(tenant_id) as db:
            rows = db.add(statement, tenant_id, *given)
            await db.execute("COMMIT")
        return rows

    async def task(self, tenant_id: str, task_id: str) -> queries.Row | None:
        """Return a task with its latest lease and progress."""
        rows = await self._ask(sql.ONE_TASK, tenant_id, task_id)
        return sql.named_row(rows[0]) if rows else None

    async def read_tasks(self, tenant_id: str, of: queries.TaskFilter, ranges: list[pages.TaskRange],
                         ids: list[str]) -> list[queries.Row]:
        """Return a page of tasks from some ranges of one index."""
        statement, given = sql.select_tasks(of, ranges, ids)
        return [sql.named_row(row) for row in await self._read(tenant_id, statement, *given)]

    async def count_range(self, tenant_id: str, of: queries.TaskFilter, range_: pages.TaskRange,
                          most: int) -> tuple[int, int]:
        """Return how many tasks of a range were looked at, and how many of these pass."""
        statement, given = sql.select_count(of, range_, most)
        looked, number = (await self._read(tenant_id, statement, *given))[0]
        return looked, number

    async def find_types(self, tenant_id: str, prefix: str, most: int) -> list[str]:
        """Return the types of tasks that begin so."""
        return [row[0] for row in await self._read(tenant_id, sql.TYPES_OF, prefix, queries.end_of(prefix), most)]

    async def find_ids(self, tenant_id: str, of: queries.TaskFilter, range_: pages.TaskRange, most: int) -> list[str]:
        """Return tasks of a range."""
        statement, given = sql.select_ids(of, range_, most)
        return [row[0] for row in await self._read(tenant_id, statement, *given)]

    async def find_leases(self, tenant_id: str, of: queries.LeaseFilter) -> list[tuple[stored.Lease, str]]:
        """Return the live leases of a worker, and of their tasks only the types."""
        rows = await self._read(tenant_id, sql.LEASES, of.worker.kind, of.worker.id)
        return pages.read_leases(rows, of)

    async def count_leases(self, tenant_id: str, of: queries.LeaseCount) -> int:
        """Return how many leases are live."""
        find: tuple[Any, ...] = (sql.LEASED,)
        match of:
            case queries.LeaseCount(worker_id=str(worker_id)):
                find = (sql.LEASED_TO, worker_id)
            case queries.LeaseCount(lane=int(lane)):
                find = (sql.LEASED_IN, lane)
            case queries.LeaseCount(type=str(type)):
                find = (sql.LEASED_OF_TYPE, type)
        number: int = (await self._read(tenant_id, *find))[0][0]
        return number

    async def receipt(self, tenant_id: str, receipt_id: str) -> stored.Receipt | None:
        """Return one receipt."""
        rows = await self._read(tenant_id, f"{sql.RECEIPTS} AND r.receipt_id = $2", receipt_id)
        return sql.receipt_row(rows[0]) if rows else None

    async def find_receipts(self, tenant_id: str, of: queries.ReceiptFilter) -> list[stored.Receipt]:
        """Return a page of receipts, oldest first, only up to the horizon."""
        given: list[Any] = [of.after or "", await (
            self._find_settled_end(tenant_id, of.to) if of.settled and of.task_id is None
            else self._horizon(tenant_id, "receipts"))]
        bind = sql.make_binder(given)
        statement = f"{sql.RECEIPTS} AND r.receipt_id > $2 AND r.receipt_id <= $3" + pages.narrow(
            bind, to_id=of.to and of.to.id, task_id=of.task_id, receipt_type=of.receipt_type)
        order = "r.receipt_id DESC" if of.newest else "r.receipt_id"
        statement = queries.page_of(statement, of.to, "r.to_kind", order, 1, of.limit, bind)
        rows = await self._read(tenant_id, statement, *given)
        return [sql.receipt_row(row) for row in (rows[::-1] if of.newest else rows)]

    async def _find_settled_end(self, tenant_id: str, to: wire.Principal | None) -> str:
        """Return the horizon of the receipts for somebody, also where a strict gate has offered some."""
        return await self._horizon(tenant_id, "settled", None if to is None else to.id)

    async def _horizon(self, tenant_id: str, name: str, *given: str | None) -> str:
        """Return the last id below which no open transaction can still add a row; wait a moment for such transactions.

        A reader that follows a cursor would miss a row that is added behind its position.  Order: what is offered is
        looked at last, when each transaction that has offered something older than the target has ended.
        """
        deadline, target, key = time.monotonic() + HIDDEN_SECONDS, "", sql.writers_key(uuid.UUID(tenant_id))
        while True:
            newest, since, *offered = (await self._read(tenant_id, sql.HORIZONS[name], key, *given))[0]
            target = target or newest or ""
            sure = None if since is None else first_id(since + self.skew)
            is_settled = sure is None or target < sure
            if is_settled or time.monotonic() > deadline:
                end: str = min([target if is_settled else sure, *filter(None, offered)])
                return end
            await asyncio.sleep(0.003)

    async def find_settled(self, tenant_id: str) -> float:
        """Return before which moment no open transaction can still change a task; wait a moment for such ones."""
        deadline, wanted = time.monotonic() + HIDDEN_SECONDS, inf
        while True:
            now, since = (await self._read(tenant_id, sql.SETTLED, sql.writers_key(uuid.UUID(tenant_id))))[0]
            sure, wanted = now if since is None else min(now, since), min(wanted, now)
            if sure >= wanted or time.monotonic() > deadline:
                return float(sure) + self.skew
            await asyncio.sleep(0.003)

    async def find_events(self, tenant_id: str, of: queries.EventFilter) -> list[stored.Event]:
        """Return a page of a task's events."""
        return [stored.Event(*row)
                for row in await self._read(tenant_id, sql.EVENTS, of.task_id, of.after or "", of.limit)]

    async def find_obligations(self, tenant_id: str, of: queries.ObligationFilter) -> list[stored.Receipt]:
        """Return a page of open obligations from their index, only up to the horizon if that is asked for."""
        after, end = of.after or "", await self._find_settled_end(tenant_id, of.to) if of.settled else None
        rows = await (self._ask(sql.OPEN, tenant_id, of.to.kind, of.to.id, after, of.limit) if of.to
                      else self._read(tenant_id, sql.OPEN_FOR_ALL, after, of.limit))
        receipts = map(sql.receipt_row, rows)
        return [receipt for receipt in receipts if end is None or receipt.receipt_id <= end]

    async def find_like(self, tenant_id: str, of: queries.IdFilter) -> list[str]:
        """Return ids of tasks or receipts that begin or end with a text."""
        rows = await self._read(tenant_id, sql.IDS_LIKE[of.table], of.part, queries.end_of(of.part), of.searched,
                                of.limit)
        return [row[0] for row in rows]

    async def find_queues(self, tenant_id: str, of: queries.QueueFilter) -> list[stored.Queue]:
        """Return a page of what lanes have now, by type."""
        given: list[Any] = []
        statement = sql.QUEUES + pages.narrow_queues(of, sql.make_binder(given))
        counted = await self._read(tenant_id, statement, *given)
        now = self.now()
        heads = await self.find_heads(tenant_id, [row[0] for row in counted])
        later = {lane: rest for lane, *rest in await self._read(tenant_id, sql.DELAYED, now)}
        return list(pages.join_queues(counted, heads, later, now))

    async def find_heads(self, tenant_id: str, lanes: Sequence[int]) -> list[queries.Head]:
        """Return the oldest claimable task of each priority of some lanes."""
        return [queries.Head(*row) for row in await self._read(tenant_id, sql.OLDEST, list(lanes))]

    async def find_schedules(self, tenant_id: str, of: queries.ScheduleFilter) -> list[stored.Schedule]:
        """Return a page of schedules, in the order of their ids."""
        after = of.after or ""
        rows = await (self._read(tenant_id, sql.SCHEDULES_OF, of.owner.kind, of.owner.id, after, of.limit) if of.owner
                      else self._read(tenant_id, sql.SCHEDULES, after, of.limit))
        return [stored.Schedule(*row) for row in rows]

    async def find_workers(self, tenant_id: str, of: queries.WorkerFilter) -> list[stored.Presence]:
        """Return a page of those who have claimed tasks."""
        rows = await (self._read(tenant_id, sql.LATEST_WORKERS, of.limit) if of.latest
                      else self._read(tenant_id, sql.WORKERS, *of.after, of.limit))
        return [stored.Presence(*row) for row in rows]

    async def find_holdings(self, tenant_id: str, of: queries.HoldingsOf) -> list[stored.Holding]:
        """Return how many leases some workers have."""
        kinds, ids = [who.kind for who in of.workers], [who.id for who in of.workers]
        return [stored.Holding(*row) for row in await self._read(tenant_id, sql.HOLDINGS, kinds, ids, of.most)]

    async def count_ahead(self, tenant_id: str, of: queries.AheadOf) -> list[int]:
        """Return how many tasks come before one."""
        given = (of.lane, of.priority, of.task_id, of.most)
        rows = await (self._read(tenant_id, sql.COUNT_AHEAD, *given) if of.limits is None
                      else self._read(tenant_id, sql.COUNT_AHEAD_IN_TURN, *given, of.limits))
        return [row[0] for row in rows]

    async def find_instances(self, instance_id: str) -> list[stored.Instance]:
        """Return what is known of a gate process; it lives while its name lock is held."""
        return [stored.Instance(*row) for row in await self._ask(sql.INSTANCE, instance_id)]

    async def count_limit(self, tenant_id: str, of: queries.LimitUse) -> tuple[int, int]:
        """Return how many leases count against a limit, and how many tasks that have it wait."""
        [(held,)] = await (self._read(tenant_id, sql.COUNT_HOLDS, of.name, of.most) if of.key is None
                           else self._read(tenant_id, sql.COUNT_KEY_HOLDS, of.name, of.most, of.key))
        rows = await self._read(tenant_id, sql.WAITING_LANES)
        return held, sum(queued for pattern, queued in rows if of.name in dict(read_pattern(pattern)))

    async def find_unsent(self, tenant_id: str, of: queries.UnsentOf) -> list[stored.Outgoing]:
        """Return the outbox rows of a task."""
        return [stored.Outgoing(*row) for row in await self._read(tenant_id, sql.UNSENT_OF, of.task_id, of.limit)]

    async def terminated(self, tenant_id: str, receipt_id: str, by: frozenset[str]) -> bool:
        """Whether a child of the receipt has one of the types."""
        return bool((await self._read(tenant_id, sql.TERMINATED, receipt_id, sorted(by)))[0][0])

    async def record(self, tenant_id: str, kind: type[R], *key: str) -> R | None:
        """Return one record."""
        rows = await self._read(tenant_id, sql.RECORD[kind], *([part] for part in key))
        return kind(*rows[0]) if rows else None

    async def unsent(self) -> list[str]:
        """Return the tenants whose outbox has receipts."""
        return [row[0] for row in await self._ask(sql.UNSENT)]

    async def find_waiting(self, tenant_id: str, of: queries.OutboxFilter) -> list[stored.Outgoing]:
        """Return a page of the receipts that wait for the ledger."""
        return [stored.Outgoing(*row) for row in await self._read(
            tenant_id, sql.WAITING if of.state == "waiting" else sql.STRICTLY_OFFERED, of.after, of.limit)]

    async def find_outgoing(self, tenant_id: str, of: queries.OutboxOf) -> list[stored.Outgoing]:
        """Return the outbox rows of some receipts."""
        return [stored.Outgoing(*row) for row in await self._read(tenant_id, sql.ON_THE_WAY, list(of.receipt_ids))]

    async def find_deliveries(self, tenant_id: str,
                              of: queries.DeliveryFilter) -> list[stored_webhooks.WebhookDelivery]:
        """Return a page of what became of the events of an endpoint."""
        statement, given = sql.select_deliveries(of)
        return [stored_webhooks.WebhookDelivery(*row) for row in await self._read(tenant_id, statement, *given)]

    async def find_open_webhooks(self, tenant_id: str, of: queries.OpenWebhooks) -> list[stored_webhooks.Webhook]:
        """Return a page of the endpoints that have not ended."""
        return [stored_webhooks.Webhook(*row)
                for row in await self._read(tenant_id, sql.OPEN_WEBHOOKS, of.after, of.limit)]

    async def webhook_tenants(self) -> list[str]:
        """Return the tenants that have endpoints for webhooks."""
        return [row[0] for row in await self._ask(sql.WEBHOOK_TENANTS)]

    async def handover_tenants(self) -> list[str]:
        """Return the tenants in which applications have handed work over in SQL that is not a task yet."""
        return [row[0] for row in await self._ask(sql.HANDOVER_TENANTS)]

    async def lag(self, tenant_id: str) -> stored.Lag:
        """Return how many receipts wait, how many are parked, and when the oldest waiting one came."""
        return stored.Lag(*(await self._read(tenant_id, sql.LAG))[0])

    async def find_entries(self, tenant_id: str, of: queries.EntryFilter) -> list[stored.Entry]:
        """Return a page of the receipts that others stored in this ledger, only up to the horizon."""
        given: list[Any] = [of.after or "", await self._horizon(tenant_id, "ledger")]
        bind = sql.make_binder(given)
        statement = sql.ENTRIES + pages.narrow(bind, to_id=of.to and of.to.id, task_id=of.task_id,
                                               receipt_type=of.receipt_type, asyncgate_instance=of.instance)
        statement = queries.page_of(statement, of.to, "to_kind", "arrival", 2, of.limit, bind)
        rows = await self._read(tenant_id, statement, *given)
        return [stored.Entry(*row) for row in rows]

    async def lead(self, job: str) -> bool:
        """Whether this process leads a job that only one may do."""
        return self.member is None or await self.member.lead(job)

    async def find_archived(self, tenant_id: str, of: queries.ArchivedFilter) -> list[stored.Archived]:
        """Return the pointers to a task's archived receipts."""
        return [stored.Archived(*row) for row in await self._read(tenant_id, sql.ARCHIVED, of.task_id)]

    async def find_key(self, key_id: str) -> tuple[str, bool, stored.Key] | None:
        """Return a key before its tenant is known."""
        rows = await self._ask(sql.FIND_KEY, key_id)
        return (rows[0][0], rows[0][1], stored.Key(*rows[0][2:])) if rows else None

    async def overdue(self, now: float, grace: float, limit: int) -> list[tuple[str, list[str], list[str]]]:
        """Return the tasks and schedules that upkeep must check, by tenant, without those of other living processes."""
        others, name = (list(self.member.others), self.member.instance_id) if self.member else ([], None)
        tenants: defaultdict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        for tenant_id, kind, id in await self._ask(sql.OVERDUE, now, now - grace, others, name, max(OVERDUE, limit)):
            if kind == "others":    # left to its living instance; checked again soon, in case that one dies
                if self.member:
                    self.member.hear(News(tenant_id, lapse=now - grace + LOOK_AGAIN_SECONDS))
                continue
            ids = tenants[tenant_id][kind == "schedule"]
            if len(ids) < limit:
                ids.append(id)
        return [(tenant_id, *both) for tenant_id, both in tenants.items()]

    async def depths(self, now: float) -> list[stored.Depth]:
        """Return what the queues of all tenants have by type."""
        return [stored.Depth(*row) for row in await self._ask(sql.DEPTHS, now)]

    async def count_overdue(self, before: float) -> int:
        """Return how many live leases have expired before a time."""
        number: int = (await self._ask(sql.COUNT_OVERDUE, before))[0][0]
        return number

    async def count_unanswered(self) -> tuple[int, float | None]:
        """Return how many tasks are on hold for an answer, and since when the first is."""
        number, since = (await self._ask(sql.COUNT_UNANSWERED))[0]
        return number, since

    async def limit_depths(self) -> list[stored_limits.LimitDepth]:
        """Return what the limits of all tenants have."""
        return [stored_limits.LimitDepth(*row) for row in await self._ask(sql.LIMIT_DEPTHS)]

    async def cut_cascades(self, before: float, limit: int) -> list[tuple[str, str]]:
        """Return cascades that are not finished."""
        return [(tenant_id, task_id) for tenant_id, task_id in await self._ask(sql.CUT_CASCADES, before, limit)]

    async def lapses(self, since: float, limit: int) -> list[tuple[float, str, str]]:
        """Return when live leases expire, and deadlines of tasks, which are in the same index."""
        return [tuple(row) for row in await self._ask(sql.LAPSES, since, limit)]

    async def drop_lanes(self, tenant_id: str | None = None) -> int:
        """Delete the lanes in which no task waits, of the tenants that this process knows."""
        if tenant_id is not None:
            return await self._drop_lanes(tenant_id, inf)       # a clock may have been set back
        kept_since = self.now() - queries.QUEUE_KEPT_SECONDS
        return sum([await self._drop_lanes(lane, kept_since) for lane in self.lanes.keys() | self.counting.keys()])

    async def _drop_lanes(self, tenant_id: str, kept_since: float) -> int:
        if not (await self._read(tenant_id, f"{sql.EMPTY_LANES} LIMIT 1")
                or await self._read(tenant_id, f"{sql.EMPTY_QUEUES} LIMIT 1", kept_since)):
            return 0        # without the exclusive lock
        async with self._transaction(tenant_id) as db:
            db.add("SET LOCAL lock_timeout = '2s'")
            # Waits until no batch of the tenant runs, because batches rely on the known lanes.
            db.add("SELECT pg_advisory_xact_lock($1::int, $2::int)", sql.WRITERS, sql.writers_key(uuid.UUID(tenant_id)))
            lanes = [row[0] for row in await db.fetch(sql.EMPTY_LANES, tenant_id)]
            db.add("DELETE FROM asyncgate.lanes WHERE tenant_id = $1 AND lane = ANY ($2::bigint[])", tenant_id, lanes)
            db.add("DELETE FROM asyncgate.turns WHERE tenant_id = $1 AND lane = ANY ($2::text[])", tenant_id,
                   [str(lane) for lane in lanes])
            db.add(f"DELETE FROM asyncgate.queues WHERE tenant_id = $1 AND lane IN ({sql.EMPTY_QUEUES})",
                   tenant_id, kept_since)
            await db.execute("COMMIT")
        self.lanes.pop(tenant_id, None)     # the next batch reads the lanes again
        return len(lanes)

    async def next_due(self, tenant_id: str) -> float | None:
        """Return when the next delayed task may be leased, or a turn that waits for its time."""
        due: float | None = (await self._read(tenant_id, sql.NEXT_DUE, self.now()))[0][0]
        return due

    async def find_rows(self, tenant_id: str, table: type[Struct], after: str, limit: int) -> list[Any]:
        """Return the next rows of a table, in the order of their export keys."""
        if table is stored.Receipt:
            every = queries.ReceiptFilter(None, None, None, after, limit, settled=False)
            return await self.find_receipts(tenant_id, every)
        if not (keys := stored.export_order(table)):
            return [] if after or (only := await self.record(tenant_id, table)) is None else [only]
        if table in (stored.Task, stored.Lease):
            leased = " AND s.lease_id IS NOT NULL" * (table is stored.Lease)
            statement = f"{sql.ROWS} AND t.task_id > $2{leased} ORDER BY t.task_id LIMIT {limit:d}"
            return [row[table is stored.Lease]
                    for row in map(sql.named_row, await self._read(tenant_id, statement, after))]
        position = (*after.split("\0"), *[""] * len(keys))[:len(keys)]
        return [table(*row) for row in await self._read(tenant_id, sql.export(table, keys, limit), *position)]

    async def keep_secret(self, secret: bytes) -> None:
        """Replace the key that signs cursors, durably."""
        await self._ask("UPDATE asyncgate.meta SET value = $1 WHERE name = 'cursor_key'", secret.hex())
        self.secret = secret

    async def tenants(self) -> list[str]:
        """Return every tenant that has stored anything."""
        return [row[0] for row in await self._ask(sql.TENANTS)]


def take_locks(db: pipeline.Connection, flights: Sequence[Flight], shared: bool) -> None:
    """Take the advisory locks of a transaction in which these batches write.

    The shared writers lock tells readers of receipts which transactions may still add receipts; a batch that is `alone`
    waits for all of them, and they for it.  Batches with the same turn key wait for each other: they repeat the same
    claim, answer the same receipt or change the same record.  A `shared` transaction waits for no lock for long: the
    other tenants would wait, too.  Order: as every transaction takes them, and all of them before any row.
    """
    lock = sql.LOCK_ALONE if flights[0].needs.alone else sql.LOCK_SHARED if shared else sql.LOCK_WRITERS
    db.add(lock, sql.WRITERS, sorted([sql.writers_key(uuid.UUID(flight.tenant_id)) for flight in flights]))
    names = [(flight.tenant_id, *name) for flight in flights for name in (
        *flight.needs.repeats, *((id,) for id in flight.needs.receipts), *(key for _, key in flight.needs.records))]
    if names:
        db.add(sql.LOCK_TURNS, sorted({instances.turn_key(*name) for name in names}))


def count_wanted(lanes: Lanes, claims: list[wire.LeaseNext], now: float) -> dict[frozenset[int], int]:
    """Return for each group of lanes how many tasks are enough for all claims that may get one of its tasks."""
    asked = Counter[frozenset[frozenset[int]]]()
    for ask in claims:
        asked[frozenset(lanes.groups([ask], now))] += ask.max_tasks or 1
    return {group: sum(most for others, most in asked.items() if not all(map(group.isdisjoint, others)))
            for groups in asked for group in groups}


def is_portioned(wanted: dict[frozenset[int], int], claims: int) -> bool:
    """Whether the payloads of large tasks are counted before they are read: a claim of one task leaves few."""
    return sum(wanted.values()) > claims


@contextlib.contextmanager
def translate_outages(answer: str = "the database does not answer; try again") -> Iterator[None]:
    """Turn an outage of the database into DatabaseUnavailable with this answer."""
    try:
        yield
    except AWAY as error:
        why = None if isinstance(error, OUTAGE) else error      # a traceback for errors in statements
        log.error("the database does not answer: %s", error or type(error).__name__, exc_info=why, extra=OFTEN)
        raise errors.DatabaseUnavailable(answer, retry_after=1) from error


async def commit(db: pipeline.Connection) -> None:
    """Send what was added, and commit; raises Unconfirmed if the server stopped waiting for a standby.

    It reports that only as a warning.
    """
    await db.execute("COMMIT")
    if db.tag != b"COMMIT":
        raise asyncpg.InFailedSQLTransactionError(f"COMMIT was answered by {db.tag!r}")
    if db.warnings:
        raise Unconfirmed(db.warnings[0])


async def require_weak_role(db: asyncpg.Connection) -> None:
    """Refuse a role that is not restricted by the wall between tenants; raises StartupError."""
    role, strong = await find_strengths(db)
    for why in strong:
        raise errors.StartupError(
            f"the role {role} {why}, so the wall between tenants would not restrict it: connect as "
            "asyncgate_app, or set database.trusted_role=true for trials on your own machine")


async def open_backend(url: str, *, serving: bool = False, settings: DatabaseSettings | None = None) -> Postgres:
    """Open the database of a URL, as a role that is restricted by the wall between tenants."""
    settings = settings or DatabaseSettings()
    if serving and settings.pgbouncer and not settings.direct_url:
        raise errors.StartupError(
            "PgBouncer keeps no session, but locks and notifications need one: set database.direct_url "
            "to the address of Postgres itself")
    if settings.pgbouncer and settings.trusted_role:
        raise errors.StartupError("database.trusted_role does not work through PgBouncer: connect as asyncgate_app")
    hosts = Hosts(url, settings.timeout_seconds)
    # PgBouncer uses another session for each transaction, so prepared statements and session settings do not work; it
    # ends the sessions behind its own, which have other numbers.
    session = instances.session(settings) if settings.pgbouncer else {
        **instances.session(settings), **pin(settings.timeout_seconds), **PROBES_ONLY}
    pool = pipeline.Pool(lambda: hosts.open_pipeline(session, not settings.pgbouncer), settings.pool_size,
                         settings.timeout_seconds, pipeline.Connection.terminate if settings.pgbouncer else hosts.lose)
    backend = Postgres(pool, hosts, url, settings)
    try:
        db = await hosts.connect(server_settings=session, statement_cache_size=0,
                                 command_timeout=settings.timeout_seconds)      # asyncpg says best what is wrong
        try:
            await migrations.require_schema(db)
            await require_weak_role(db)
            key, now = await db.fetchrow(sql.BEGIN_WITH)
            backend.secret, backend.ahead = bytes.fromhex(key), now - elapsed()
        finally:
            db.terminate()
        async with pool.acquire():
            pass        # it is there when the first call comes
    except (*AWAY, ValueError) as error:
        raise startup_error(error, url) from None
    return backend


BACKEND: type[backends.Backend] = Postgres

if TYPE_CHECKING:
    _shared: type[backends.SharedBackend] = Postgres
    _archiving: type[backends.ArchivingBackend] = Postgres
