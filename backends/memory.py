"""Memory: the smallest complete backend; read it before you write your own.

Each tenant's rows are in dictionaries, and nothing survives the process.  The module shows the whole work of a backend:
load the rows that `Needs` names, call `decide` once, save the changes in `Work`; and a dozen plain reads.  It has no
rule.
"""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from math import inf
from operator import add
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from asyncgate import Needs, Work
from asyncgate.backends import Backend
from asyncgate.backends.lanes import Lanes
from asyncgate.parts.model.clock import SteadyClock
from asyncgate.parts.model.counted import add_meters, count_moves, measure_text, measure_use
from asyncgate.parts.model.errors import Refused
from asyncgate.parts.model.ids import Ids
from asyncgate.parts.model.overdue import has_passed, is_overdue
from asyncgate.parts.model.queries import (
    QUEUE_KEPT_SECONDS,
    AheadOf,
    ArchivedFilter,
    DeliveryFilter,
    EntryFilter,
    EventFilter,
    HoldingsOf,
    IdFilter,
    InstanceOf,
    LeaseCount,
    LeaseFilter,
    ObligationFilter,
    OutboxFilter,
    OutboxOf,
    Query,
    QueueFilter,
    ReceiptFilter,
    Row,
    Rows,
    ScheduleFilter,
    TaskFilter,
    UnsentOf,
    WorkerFilter,
    wanted_is,
)
from asyncgate.parts.model.settings import DatabaseSettings
from asyncgate.parts.model.stored import (
    RECORDS,
    TERMINAL,
    Account,
    Archived,
    Audit,
    Depth,
    Entry,
    Event,
    Holding,
    Key,
    Lag,
    Lease,
    Meter,
    Obligation,
    Outgoing,
    Pauses,
    Presence,
    Progress,
    Queue,
    Receipt,
    Schedule,
    Task,
    Usage,
    export_key,
    key_of,
)
from asyncgate.parts.model.stored_webhooks import Webhook, WebhookDelivery
from asyncgate.parts.model.views import summarize
from asyncgate.parts.model.wire import Principal

R = TypeVar("R", bound=Struct)
T = TypeVar("T")


class Tenant:
    """The rows of one tenant."""

    def __init__(self) -> None:
        self.lanes = Lanes()
        self.tasks: dict[str, Task] = {}
        self.queues: dict[int, tuple[str, str, int, int, int, float]] = {}      # by lane; at last, when it was counted
        self.leases: dict[str, Lease] = {}
        self.progress: dict[str, Progress] = {}
        self.receipts: dict[str, Receipt] = {}
        self.recorded: set[tuple[str, str]] = set()
        self.events: dict[str, Event] = {}
        self.audit: dict[str, Audit] = {}
        self.open: dict[str, Principal] = {}
        self.records: dict[type[Struct], dict[tuple[str, ...], Any]] = {kind: {} for kind in RECORDS}
        self.delivered: dict[str, float] = {}

    def row(self, task_id: str) -> Row:
        """Return a task with its latest lease and progress."""
        return self.tasks[task_id], self.leases.get(task_id), self.progress.get(task_id)

    def live(self) -> Iterator[Lease]:
        """Yield the leases that have not ended."""
        return (lease for lease in self.leases.values() if lease.ending == "live")

    def forget(self, kind: type[Struct], id: str) -> None:
        """Delete an archived receipt, or a task whose receipts are all archived, with its dependents."""
        if kind is Receipt:
            gone = self.receipts.pop(id)
            self.recorded.discard((gone.task_id, gone.receipt_key))
            self.delivered.pop(id, None)
            return
        self.tasks.pop(id)
        self.leases.pop(id, None)
        self.progress.pop(id, None)
        self.events = {event_id: event for event_id, event in self.events.items() if event.task_id != id}

    def erase(self, kind: type[Struct], place: tuple[str, ...], row: Any) -> None:
        """Put a row without its content in place of one."""
        if kind is Entry:
            rows = self.records[Entry]
            rows.pop(next(key for key, old in rows.items() if (old.arrival,) == place))
            rows[row.receipt_id,] = row
            return
        if kind is Receipt:
            old = self.receipts[place[0]]
            self.recorded.discard((old.task_id, old.receipt_key))
            self.recorded.add((row.task_id, row.receipt_key))
        tables: dict[type[Struct], dict[str, Any]] = {
            Receipt: self.receipts, Event: self.events, Audit: self.audit, Task: self.tasks, Lease: self.leases}
        tables[kind][place[-1]] = row

    def shown(self, receipt: Receipt) -> Receipt:
        """Return a receipt with its delivery time."""
        return replace(receipt, delivered_at=self.delivered.get(receipt.receipt_id))

    # The rows of pages.

    def find_tasks(self, of: TaskFilter) -> Iterator[Row]:
        """Yield tasks, newest first."""
        found = (id for id, task in sorted(self.tasks.items(), reverse=True)
                 if wanted_is(of.owner, task.owner) and of.status in (None, task.status)
                 and of.held in (None, task.held is not None) and task.type.startswith(of.type_prefix or "")
                 and (not of.summary_prefix or (summarize(task) or "").startswith(of.summary_prefix))
                 and of.type in (None, task.type) and (of.before is None or id < of.before)
                 and (of.since is None or id >= of.since))
        return map(self.row, islice(found, of.limit))

    def find_leases(self, of: LeaseFilter) -> Iterator[tuple[Lease, str]]:
        """Yield the live leases of a worker."""
        held = (lease for lease in self.live() if lease.worker.same(of.worker)
                and of.worker.instance_id in (None, lease.worker_instance))
        return ((lease, self.tasks[lease.task_id].type) for lease in sorted(held, key=lambda lease: lease.acquired_at))

    def find_workers(self, of: WorkerFilter) -> Iterator[Presence]:
        """Yield those who have claimed tasks."""
        found = [row for row in self.records[Presence].values() if row.claimed_at is not None]
        if of.latest:
            return islice(sorted(found, key=lambda row: -row.claimed_at), of.limit)
        return islice(sorted((row for row in found if (row.kind, row.id) > of.after),
                             key=lambda row: (row.kind, row.id)), of.limit)

    def find_queues(self, of: QueueFilter, now: float) -> Iterator[Queue]:
        """Yield what each lane has now."""
        found = sorted((row[0], lane) for lane, row in self.queues.items()
                       if of.type in (None, row[0]) and of.lane in (None, lane))
        for _, lane in islice((place for place in found if of.after is None or place > of.after), of.limit):
            type, capabilities, queued, held, leased, _ = self.queues[lane]
            waiting = [task for task in self.tasks.values()
                       if task.lane == lane and task.status == "queued" and task.held is None]
            since = [max(task.updated_at, task.next_eligible_at or 0.0) for task in waiting if task.offerable(now)]
            yield Queue(lane, type, capabilities, queued, held, leased, len(waiting) - len(since), False,
                        min(since, default=None))

    def find_receipts(self, of: ReceiptFilter) -> Iterator[Receipt]:
        """Yield receipts, oldest first."""
        found = (r for r in after(self.receipts, of.after) if wanted_is(of.to, r.to)
                 and of.task_id in (None, r.task_id) and of.receipt_type in (None, r.receipt_type))
        return map(self.shown, deque(found, of.limit) if of.newest else islice(found, of.limit))

    def find_entries(self, of: EntryFilter) -> Iterator[Entry]:
        """Yield the receipts that others stored in this ledger."""
        rows = {row.arrival: row for row in self.records[Entry].values()}
        found = (row for row in after(rows, of.after) if wanted_is(of.to, row.to)
                 and of.task_id in (None, row.task_id) and of.receipt_type in (None, row.receipt_type)
                 and of.instance in (None, row.asyncgate_instance))
        return islice(found, of.limit)

    def find_deliveries(self, of: DeliveryFilter) -> Iterator[WebhookDelivery]:
        """Yield what became of the events of an endpoint."""
        rows = {id: row for (owner, id), row in self.records[WebhookDelivery].items()
                if owner == of.webhook_id and of.state in (None, row.state)}
        if of.newest:
            ids = (id for id in sorted(rows, reverse=True) if of.after is None or id < of.after)
            return islice((rows[id] for id in ids), of.limit)
        return islice(after(rows, of.after), of.limit)

    def rows(self, table: type[Struct]) -> dict[str, Any]:
        """Return all rows of a table by their export keys."""
        tables: dict[type[Struct], Iterable[Any]] = {
            Task: self.tasks.values(), Lease: self.leases.values(), Progress: self.progress.values(),
            Receipt: map(self.shown, self.receipts.values()), Event: self.events.values(),
            Audit: self.audit.values(), **{kind: rows.values() for kind, rows in self.records.items()},
            Obligation: (Obligation(id, to.kind, to.id) for id, to in self.open.items())}
        return {export_key(row): row for row in tables[table]}


class Memory:
    """A backend in memory; a batch is one function call without an await, so no two batches overlap."""

    parallel = parallel_per_tenant = 1
    instance = "asyncgate-1"

    def __init__(self) -> None:
        self.ids, self.skew, self.secret = Ids(), 0.0, secrets.token_bytes(32)
        self.clock = SteadyClock()
        self.all: defaultdict[str, Tenant] = defaultdict(Tenant)

    def now(self) -> float:
        """Return the time of this process."""
        return self.clock() + self.skew

    async def alive(self) -> None:
        """Return at once."""

    async def keep_secret(self, secret: bytes) -> None:
        """Replace the key that signs cursors."""
        self.secret = secret

    async def close(self) -> None:
        """Delete everything."""
        self.all.clear()

    # Writing: load, decide, save.

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Carry out one batch."""
        tenant = self.all[tenant_id]
        work = Work(tenant_id, self.now(), self.ids, tenant.lanes.known)
        self._load(tenant, work, needs)
        decide(work)
        if set(work.added) & set(tenant.tasks):
            raise Refused("a new task has the id of another task")     # a database has a unique key for this
        self._save(tenant, work)

    def _load(self, tenant: Tenant, work: Work, needs: Needs) -> None:
        ids = needs.tasks & tenant.tasks.keys()
        ids |= {task.task_id for task in tenant.tasks.values() if needs.keys
                and (task.owner_kind, task.owner_id, task.idempotency_key) in needs.keys}
        ids |= {lease.task_id for lease in tenant.live() if lease.lease_id in needs.leases
                or (lease.worker_kind, lease.worker_id, lease.claim_id) in needs.repeats}
        for task_id in ids:
            work.load_task(*tenant.row(task_id))
        enough = sum(ask.max_tasks or 1 for ask in needs.claims)
        if needs.claims and (pauses := tenant.records[Pauses].get(())):
            work.load_record(pauses)
            tenant.lanes.pauses = pauses
        for group in tenant.lanes.groups(needs.claims, work.now):
            for task in islice(self._claimable(tenant, group, work.now), enough):
                work.add_claimable(task, tenant.progress.get(task.task_id))
        for receipt in tenant.receipts.values() if needs.receipts or needs.endings or needs.stated else ():
            if (receipt.receipt_id in needs.receipts or needs.receipts & set(receipt.parents)
                    or (receipt.task_id, receipt.lease_id) in needs.endings
                    or (receipt.task_id, receipt.receipt_key) in needs.stated):
                work.load_receipt(receipt)
        for kind, key in needs.records:
            if (row := tenant.records[kind].get(key)) is not None:
                work.load_record(row)
        if needs.recount:
            active = sum(task.status not in TERMINAL for task in tenant.tasks.values())
            work.keep_record(Usage(active, len(list(tenant.live())),
                                   sum(len(receipt.body.encode()) for receipt in tenant.receipts.values()),
                                   len(tenant.tasks) - active))
        if needs.tally:
            about = Counter(receipt.task_id for receipt in tenant.receipts.values())
            for task_id in work.list_named_tasks(needs):
                work.tallies[task_id] = about[task_id]

    def _claimable(self, tenant: Tenant, lanes: frozenset[int], now: float) -> Iterator[Task]:
        """Yield the tasks of some lanes that may be leased now, in the order of the queue."""
        fit = (task for task in tenant.tasks.values()
               if task.lane in lanes and task.status == "queued" and task.offerable(now))
        return iter(sorted(fit, key=lambda task: (-task.priority, task.task_id)))

    def _save(self, tenant: Tenant, work: Work) -> None:
        for lane, (type, needed) in work.lanes.items():
            tenant.lanes.learn(lane, type, needed)
        moves, stored = count_moves(work.before, work.added, work.moved), 0
        for lane, type, capabilities, *counts in moves:
            queued, held, leased = map(add, counts, tenant.queues.get(lane, ("", "", 0, 0, 0))[2:5])
            tenant.queues[lane] = type, capabilities, queued, held, leased, work.now
        tenant.tasks.update(work.added | work.moved)
        tenant.leases.update(work.leased)
        tenant.progress.update(work.progressed)
        for receipt in work.written.values():
            if (key := (receipt.task_id, receipt.receipt_key)) not in tenant.recorded:
                tenant.recorded.add(key)
                tenant.receipts[receipt.receipt_id] = receipt
                stored += measure_text(receipt.body)
        if (meter := measure_use(work, sum(move[5] for move in moves), stored)) is not None:
            meters = tenant.records[Meter]
            meters[key_of(meter)] = add_meters(meters.get(key_of(meter)), meter)
        tenant.records[Outgoing].update({(id,): row for id, row in work.posted.items() if id in tenant.receipts})
        tenant.events.update(work.events)
        tenant.audit.update(work.audited)
        tenant.open.update(work.opened)
        for receipt_id in work.closed:
            tenant.open.pop(receipt_id, None)
        for (kind, place), row in work.kept.items():
            if kind in (Receipt, Task):
                tenant.forget(kind, place[0])
                continue
            if kind is Audit:
                tenant.audit.pop(place[0], None)
                continue
            tenant.records[kind].pop(place, None)
            tenant.records[kind].update({place: row} if row is not None else {})
        tenant.delivered.update(work.delivered)
        for (kind, place), row in work.erased.items():
            tenant.erase(kind, place, row)

    # Reading.

    async def task(self, tenant_id: str, task_id: str) -> Row | None:
        """Return a task with its latest lease and progress."""
        tenant = self.all[tenant_id]
        return tenant.row(task_id) if task_id in tenant.tasks else None

    async def page(self, tenant_id: str, query: Query[T]) -> list[T]:
        """Return a page of rows."""
        return list(self._found(self.all[tenant_id], query))

    def _found(self, tenant: Tenant, query: Query[Any]) -> Iterable[Any]:
        match query:
            case TaskFilter():
                return tenant.find_tasks(query)
            case LeaseFilter():
                return tenant.find_leases(query)
            case LeaseCount():
                return [sum(map(partial(self._counts, tenant, query), tenant.live()))]
            case EventFilter():
                found = (event for event in after(tenant.events, query.after) if event.task_id == query.task_id)
                return islice(found, query.limit)
            case ReceiptFilter():
                return tenant.find_receipts(query)
            case ObligationFilter():
                mine = {id: tenant.receipts[id] for id, owner in tenant.open.items() if wanted_is(query.to, owner)}
                return map(tenant.shown, islice(after(mine, query.after), query.limit))
            case IdFilter():
                ids = sorted(tenant.tasks if query.table is Task else tenant.receipts, reverse=True)
                ends = (id for id in ids[:query.searched] if id.endswith(query.part))
                return islice(dict.fromkeys([*(id for id in ids if id.startswith(query.part)), *ends]), query.limit)
            case QueueFilter():
                return tenant.find_queues(query, self.now())
            case ScheduleFilter():
                theirs = {id: row for (id,), row in tenant.records[Schedule].items()
                          if wanted_is(query.owner, Principal(row.owner_kind, row.owner_id))}
                return islice(after(theirs, query.after), query.limit)
            case WorkerFilter():
                return tenant.find_workers(query)
            case HoldingsOf():
                held = Counter((lease.worker_kind, lease.worker_id) for lease in tenant.live())
                return (Holding(who.kind, who.id, min(held[who.kind, who.id], query.most)) for who in query.workers)
            case AheadOf():
                ahead = self._claimable(tenant, frozenset((query.lane,)), self.now())
                first = (-query.priority, query.task_id)
                return [sum((-task.priority, task.task_id) < first for task in islice(ahead, query.most))]
            case InstanceOf():
                return ()
            case UnsentOf():
                of_task = (row for row in tenant.records[Outgoing].values() if row.task_id == query.task_id)
                return islice(of_task, query.limit)
            case OutboxFilter():
                rows = {id: row for (id,), row in tenant.records[Outgoing].items() if row.state == query.state}
                return islice(after(rows, query.after), query.limit)
            case OutboxOf():
                return (row for (id,), row in tenant.records[Outgoing].items() if id in query.receipt_ids)
            case EntryFilter():
                return tenant.find_entries(query)
            case ArchivedFilter():
                pointers = {id: one for (id,), one in tenant.records[Archived].items() if one.task_id == query.task_id}
                return after(pointers, None)
            case DeliveryFilter():
                return tenant.find_deliveries(query)
            case Rows():
                return islice(after(tenant.rows(query.table), query.after), query.limit)
        raise TypeError(f"no page of {query}")

    def _counts(self, tenant: Tenant, of: LeaseCount, lease: Lease) -> bool:
        task = tenant.tasks[lease.task_id]
        return (of.type in (None, task.type) and of.lane in (None, task.lane)
                and of.worker_id in (None, lease.worker_id))

    async def receipt(self, tenant_id: str, receipt_id: str) -> Receipt | None:
        """Return one receipt."""
        tenant = self.all[tenant_id]
        return tenant.shown(tenant.receipts[receipt_id]) if receipt_id in tenant.receipts else None

    async def terminated(self, tenant_id: str, receipt_id: str, by: frozenset[str]) -> bool:
        """Whether a child of the receipt has one of the types."""
        return any(receipt.receipt_type in by and receipt_id in receipt.parents
                   for receipt in self.all[tenant_id].receipts.values())

    async def record(self, tenant_id: str, kind: type[R], *key: str) -> R | None:
        """Return one record."""
        return self.all[tenant_id].records[kind].get(key)

    async def unsent(self) -> list[str]:
        """Return the tenants whose outbox has receipts."""
        return [tenant_id for tenant_id, tenant in self.all.items() if tenant.records[Outgoing]]

    async def webhook_tenants(self) -> list[str]:
        """Return the tenants that have endpoints for webhooks."""
        return [tenant_id for tenant_id, tenant in self.all.items() if tenant.records[Webhook]]

    async def lag(self, tenant_id: str) -> Lag:
        """Return how many receipts wait, how many are parked, and when the oldest waiting one came."""
        rows = self.all[tenant_id].records[Outgoing].values()
        waiting = [row.posted_at for row in rows if row.state == "waiting"]
        return Lag(len(waiting), sum(row.state == "parked" for row in rows), min(waiting, default=None))

    async def find_key(self, key_id: str) -> tuple[str, bool, Key] | None:
        """Return a key before its tenant is known."""
        for tenant_id, tenant in self.all.items():
            if key := tenant.records[Key].get((key_id,)):
                account = tenant.records[Account].get(())
                return tenant_id, account is not None and account.suspended_at is not None, key
        return None

    async def overdue(self, now: float, grace: float, limit: int) -> list[tuple[str, list[str], list[str]]]:
        """Return the tasks and schedules that upkeep must check, by tenant."""
        found = []
        for tenant_id, tenant in self.all.items():
            tasks = [id for id, task in tenant.tasks.items() if is_overdue(task, tenant.leases.get(id), now, grace)]
            late = [id for (id,), schedule in tenant.records[Schedule].items() if has_passed(schedule.late_at, now)]
            if tasks or late:
                found.append((tenant_id, sorted(tasks)[:limit], late[:limit]))
        return found

    async def depths(self, now: float) -> list[Depth]:
        """Return what the queues of all tenants have by type."""
        found: defaultdict[str, list[Queue]] = defaultdict(list)
        for tenant in self.all.values():
            for row in tenant.find_queues(QueueFilter(None, None, None, 1_000_000), now):
                found[row.type].append(row)
        return [Depth(type, sum(row.queued for row in rows), sum(row.held for row in rows),
                      sum(row.leased for row in rows),
                      min((row.oldest_at for row in rows if row.oldest_at is not None), default=None))
                for type, rows in found.items()]

    async def count_overdue(self, before: float) -> int:
        """Return how many live leases have expired before a time."""
        return sum(lease.expires_at <= before for tenant in self.all.values() for lease in tenant.live())

    async def lapses(self, since: float, limit: int) -> list[tuple[float, str, str]]:
        """Return when live leases expire."""
        ends = [(lease.expires_at, id, lease.task_id) for id, tenant in self.all.items() for lease in tenant.live()]
        return sorted(end for end in ends if end[0] >= since)[:limit]

    async def drop_lanes(self, tenant_id: str | None = None) -> int:
        """Delete the lanes in which no task waits."""
        dropped, kept_since = 0, self.now() - QUEUE_KEPT_SECONDS if tenant_id is None else inf
        for tenant in self.all.values() if tenant_id is None else [self.all[tenant_id]]:
            waiting = {task.lane for task in tenant.tasks.values() if task.status == "queued" and task.held is None}
            gone = tenant.lanes.known.keys() - waiting
            tenant.lanes.forget(gone)
            dropped += len(gone)
            tenant.queues = {lane: row for lane, row in tenant.queues.items()
                             if any(row[2:5]) or row[5] > kept_since}
        return dropped

    async def next_due(self, tenant_id: str) -> float | None:
        """Return when the next delayed task may be leased."""
        now = self.now()
        return min((task.next_eligible_at for task in self.all[tenant_id].tasks.values() if task.status == "queued"
                    and task.held is None and task.next_eligible_at and task.next_eligible_at > now), default=None)

    async def tenants(self) -> list[str]:
        """Return every tenant that has stored anything."""
        return sorted(id for id, tenant in self.all.items() if tenant.tasks or tenant.receipts
                      or any(tenant.records.values()))


def after(rows: dict[str, Any], since: str | None) -> Iterable[Any]:
    """Yield rows in the order of their ids, after a given id."""
    return (row for id, row in sorted(rows.items()) if since is None or id > since)


async def open_backend(url: str, *, serving: bool = False, settings: DatabaseSettings | None = None) -> Memory:
    """Open a new, empty memory."""
    return Memory()


BACKEND: type[Backend] = Memory
