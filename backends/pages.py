"""Paged reads of an SQL database: `page` calls one method for each kind of query."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from msgspec import Struct

from asyncgate.parts.model import queries, stored, stored_webhooks, wire

T = TypeVar("T")
FEW = 1000          # tasks of a range that are read by their ids
PREFIXED = {"summary_prefix": "summary", "type_prefix": "type"}
MOST_TYPES = 20     # types that begin alike, whose ranges are merged; of more, tasks are read by age


def join_queues(counted: Iterable[tuple[Any, ...]], heads: Iterable[queries.Head], later: Mapping[int, Sequence[Any]],
                now: float) -> Iterator[stored.Queue]:
    """Join what is counted of each lane with since when its oldest task waits and what is known of its delayed tasks.

    A delayed task whose time has come stays one until somebody claims: here it waits since then.
    """
    more = sum(count for *_, count in later.values()) > queries.DELAYED_COUNTED
    oldest = {head.lane: head.since for head in sorted(heads, key=lambda head: -head.since)}
    for row in counted:
        delayed, first, _ = later.get(row[0], (0, None, 0))
        since = [at for at in (oldest.get(row[0]), first) if at is not None and at <= now]
        lane, type, capabilities, queued, held, leased = row
        yield stored.Queue(lane, type, capabilities, queued, held, leased, delayed=min(delayed, queued),
                           more_delayed=more,
                           oldest_at=min(since, default=None))


def narrow(bind: Callable[[Any], str], **wanted: Any) -> str:
    """Return the conditions that columns have the values that are wanted of them, behind other conditions."""
    return "".join(f" AND {column} = {bind(value)}" for column, value in wanted.items() if value is not None)


def narrow_queues(of: queries.QueueFilter, bind: Callable[[Any], str]) -> str:
    """Return what a query for a page of queues says behind its first condition."""
    behind = "" if of.after is None else f" AND (type, lane) > ({', '.join(map(bind, of.after))})"
    return f"{behind}{narrow(bind, type=of.type, lane=of.lane)} ORDER BY type, lane LIMIT {of.limit:d}"


class TaskRange(NamedTuple):
    """A range of an index of tasks."""

    by: Literal["age", "changed", "held", "owner", "parent_task_id", "status", "summary_prefix", "type", "type_prefix"]
    value: str = ""


def list_ranges(of: queries.TaskFilter) -> list[TaskRange]:
    """Return the ranges each of which has all tasks of a page, without that of the owner."""
    ranges = [TaskRange("held")] if of.held else []
    asked: tuple[tuple[Any, str | None], ...] = (
        ("parent_task_id", of.parent_task_id), ("summary_prefix", of.summary_prefix), ("status", of.status),
        ("type", of.type), ("type_prefix", of.type_prefix))
    return ranges + [TaskRange(by, value) for by, value in asked if value]


def list_owners(of: queries.TaskFilter) -> list[TaskRange]:
    """Return the range of an owner; none for an owner of any kind, whose tasks are in several."""
    return [TaskRange("owner")] if of.owner is not None and of.owner.kind else []


def narrow_tasks(of: queries.TaskFilter, bind: Callable[[str], str], state: str, task_id: str) -> list[str]:
    """Return the conditions of a page of tasks; `state` is the table of what changes, `task_id` a column of the index.

    How a text begins is not asked as a range: by the index of that range all its tasks would be read and sorted.
    """
    same = (("t.owner_id", of.owner and of.owner.id), ("t.owner_kind", of.owner and of.owner.kind),
            (f"{state}.status", of.status), ("t.type", of.type), ("t.parent_task_id", of.parent_task_id))
    conditions = [f"{column} = {bind(value)}" for column, value in same if value]
    conditions += [] if of.held is None else [f"{state}.held IS {'NOT ' * of.held}NULL"]
    for column, prefix in (("t.type", of.type_prefix), ("t.summary", of.summary_prefix)):
        if prefix:
            name = bind(prefix)
            conditions.append(f"substr({column}, 1, length({name})) = {name}")
    return conditions + limit_age(of, bind, task_id) + limit_changes(of, bind, f"{state}.")


def limit_range(of: queries.TaskFilter, range_: TaskRange, bind: Callable[[Any], str]) -> tuple[str, str]:
    """Return the conditions of a range and the order of its index; within the age, where that order is by age.

    A prefix is a range and no LIKE: behind row-level security Postgres looks for nothing by an index with LIKE.
    """
    if range_.by in PREFIXED:
        column, prefix = PREFIXED[range_.by], range_.value
        return f"{column} >= {bind(prefix)} AND {column} < {bind(queries.end_of(prefix))}", f"{column}, task_id"
    if range_.by == "changed":
        return " AND ".join(["updated_at >= 0", *limit_changes(of, bind)]), "updated_at DESC"
    match range_.by:
        case "age":
            conditions = ["task_id > ''"]
        case "held":
            conditions = ["held IS NOT NULL"]
        case "owner":
            conditions = [f"{column} = {bind(value)}" for column, value in name_owner(of, range_)]
        case column:
            conditions = [f"{column} = {bind(range_.value)}"]
    return " AND ".join([*conditions, *limit_age(of, bind, "task_id")]), "task_id DESC"


def name_owner(of: queries.TaskFilter, range_: TaskRange) -> list[tuple[str, str]]:
    """Return the columns of the owner of a range, and what they hold."""
    return [("owner_kind", range_.value or of.owner.kind), ("owner_id", of.owner.id)] if of.owner else []


def limit_age(of: queries.TaskFilter, bind: Callable[[str], str], task_id: str) -> list[str]:
    """Return the conditions for the age of tasks."""
    return [f"{task_id} {sign} {bind(value)}" for sign, value in (("<", of.before), (">=", of.since)) if value]


def limit_changes(of: queries.TaskFilter, bind: Callable[[Any], str], state: str = "") -> list[str]:
    """Return the conditions for the last change of tasks; `state` is the table of it, with a point."""
    at, task_id = f"{state}updated_at", f"{state}task_id"
    conditions = [] if of.changed_since is None else [f"{at} >= {bind(of.changed_since)}"]
    if of.behind is not None:
        moment, last = map(bind, of.behind)
        return [*conditions, f"{at} <= {moment}", f"({at} < {moment} OR {task_id} < {last})"]
    return conditions if of.changed_before is None else [*conditions, f"{at} < {bind(of.changed_before)}"]


def order_by(of: queries.TaskFilter, state: str, task_id: str) -> str:
    """Return the order of a page: by the last change, or by age."""
    return f"{state}.updated_at DESC, {task_id} DESC" if of.by_change else f"{task_id} DESC"


def read_leases(rows: Iterable[tuple[Any, ...]], of: queries.LeaseFilter) -> list[tuple[stored.Lease, str]]:
    """Read rows of a task's type and its lease; keep those of the instance, if the worker names one."""
    pairs = [(stored.Lease(*row[1:]), row[0]) for row in rows]
    return [(lease, type) for lease, type in pairs if of.worker.instance_id in (None, lease.worker_instance)]


class Pages(ABC):
    """The base class of the SQL backends that dispatches `page`."""

    async def page(self, tenant_id: str, query: queries.Query[T]) -> list[T]:
        """Return a page of rows."""
        rows: list[Any] = await self._found(tenant_id, query)
        return rows

    async def _found(self, tenant_id: str, query: queries.Query[Any]) -> list[Any]:
        match query:
            case queries.TaskFilter():
                return await self.find_tasks(tenant_id, query)
            case queries.TaskCount():
                return [await self.count_tasks(tenant_id, query.of, query.most)]
            case queries.Settled():
                return [await self.find_settled(tenant_id)]
            case queries.LeaseFilter():
                return await self.find_leases(tenant_id, query)
            case queries.LeaseCount():
                return [await self.count_leases(tenant_id, query)]
            case queries.EventFilter():
                return await self.find_events(tenant_id, query)
            case queries.ReceiptFilter():
                return await self.find_receipts(tenant_id, query)
            case queries.ObligationFilter():
                return await self.find_obligations(tenant_id, query)
            case queries.IdFilter():
                return await self.find_like(tenant_id, query)
            case queries.QueueFilter():
                return await self.find_queues(tenant_id, query)
            case queries.ScheduleFilter():
                return await self.find_schedules(tenant_id, query)
            case queries.WorkerFilter():
                return await self.find_workers(tenant_id, query)
            case queries.HoldingsOf():
                return await self.find_holdings(tenant_id, query)
            case queries.AheadOf():
                return await self.count_ahead(tenant_id, query)
            case queries.Heads():
                return await self.find_heads(tenant_id, query.lanes)
            case queries.LimitUse():
                return [await self.count_limit(tenant_id, query)]
            case queries.InstanceOf():
                return await self.find_instances(query.instance_id)
            case queries.UnsentOf():
                return await self.find_unsent(tenant_id, query)
            case queries.OutboxFilter():
                return await self.find_waiting(tenant_id, query)
            case queries.OutboxOf():
                return await self.find_outgoing(tenant_id, query)
            case queries.EntryFilter():
                return await self.find_entries(tenant_id, query)
            case queries.ArchivedFilter():
                return await self.find_archived(tenant_id, query)
            case queries.DeliveryFilter():
                return await self.find_deliveries(tenant_id, query)
            case queries.OpenWebhooks():
                return await self.find_open_webhooks(tenant_id, query)
            case queries.Rows():
                return await self.find_rows(tenant_id, query.table, query.after, query.limit)
        raise TypeError(f"no page of {query}")

    async def find_tasks(self, tenant_id: str, of: queries.TaskFilter) -> list[queries.Row]:
        """Return a page of tasks, newest first.

        Of several filters, the one that lets the fewest tasks pass must be asked first; a look at the beginning of
        each range tells which one that is.
        """
        ranges = list_ranges(of)
        several = of.summary_prefix or len(ranges) + (of.owner is not None) > 1
        for range_ in [*ranges, *list_owners(of)] if of.by_change else ranges if several else []:
            ids = await self.find_ids(tenant_id, of, range_, FEW + 1)
            if len(ids) <= FEW:
                return await self.read_tasks(tenant_id, of, [TaskRange("age")], ids) if ids else []
        parts = [TaskRange("changed")] if of.by_change else await self.order_ranges(tenant_id, of, ranges)
        return await self.read_tasks(tenant_id, of, parts, []) if parts else []

    async def count_tasks(self, tenant_id: str, of: queries.TaskFilter, most: int) -> tuple[int, bool]:
        """Return how many tasks pass, and whether there may be more.

        Of each range that has all of them so many are looked at; the first that has no more tells the number.
        """
        ranges = [*list_ranges(of), *list_owners(of), *[TaskRange("changed")] * (of.changed_since is not None)]
        least = 0
        for range_ in ranges or [TaskRange("age")]:
            looked, number = await self.count_range(tenant_id, of, range_, most + 1)
            if looked <= most:
                return number, False
            least = max(least, number)
        return min(least, most), True

    async def order_ranges(self, tenant_id: str, of: queries.TaskFilter, ranges: list[TaskRange]) -> list[TaskRange]:
        """Return the ranges that have a page in the order of age, one behind the other where they are several."""
        if of.parent_task_id:
            return [TaskRange("parent_task_id")]
        if of.owner:
            return list_owners(of) or [TaskRange("owner", kind) for kind in get_args(wire.Kind)]
        first = next((range_ for range_ in ranges if range_.by != "summary_prefix"), TaskRange("age"))
        if first.by == "type_prefix":
            types = await self.find_types(tenant_id, first.value, MOST_TYPES + 1)
            return [TaskRange("type", type) for type in types] if len(types) <= MOST_TYPES else [TaskRange("age")]
        return [TaskRange(first.by)]

    @abstractmethod
    async def read_tasks(self, tenant_id: str, of: queries.TaskFilter, ranges: list[TaskRange],
                         ids: list[str]) -> list[queries.Row]:
        """Return a page of the tasks of some ranges that each are in the order of age; with `ids`, only of these."""

    @abstractmethod
    async def find_ids(self, tenant_id: str, of: queries.TaskFilter, range_: TaskRange, most: int) -> list[str]:
        """Return tasks of a range, in any order."""

    @abstractmethod
    async def count_range(self, tenant_id: str, of: queries.TaskFilter, range_: TaskRange,
                          most: int) -> tuple[int, int]:
        """Return how many tasks of a range were looked at, and how many of these pass."""

    @abstractmethod
    async def find_settled(self, tenant_id: str) -> float:
        """Return before which moment no change of a task is missing, for whoever reads from now on."""

    @abstractmethod
    async def find_types(self, tenant_id: str, prefix: str, most: int) -> list[str]:
        """Return the types of tasks that begin so, without reading the tasks."""

    @abstractmethod
    async def find_leases(self, tenant_id: str, of: queries.LeaseFilter) -> list[tuple[stored.Lease, str]]:
        """Return the live leases of a worker, and of their tasks only the types."""

    @abstractmethod
    async def count_leases(self, tenant_id: str, of: queries.LeaseCount) -> int:
        """Return how many leases are live."""

    @abstractmethod
    async def find_events(self, tenant_id: str, of: queries.EventFilter) -> list[stored.Event]:
        """Return a page of a task's events."""

    @abstractmethod
    async def find_receipts(self, tenant_id: str, of: queries.ReceiptFilter) -> list[stored.Receipt]:
        """Return a page of receipts, oldest first."""

    @abstractmethod
    async def find_obligations(self, tenant_id: str, of: queries.ObligationFilter) -> list[stored.Receipt]:
        """Return a page of open obligations from their index."""

    @abstractmethod
    async def find_like(self, tenant_id: str, of: queries.IdFilter) -> list[str]:
        """Return ids of tasks or receipts that begin or end with a text."""

    @abstractmethod
    async def find_queues(self, tenant_id: str, of: queries.QueueFilter) -> list[stored.Queue]:
        """Return a page of what lanes have now, by type."""

    @abstractmethod
    async def find_schedules(self, tenant_id: str, of: queries.ScheduleFilter) -> list[stored.Schedule]:
        """Return a page of schedules, in the order of their ids."""

    @abstractmethod
    async def find_workers(self, tenant_id: str, of: queries.WorkerFilter) -> list[stored.Presence]:
        """Return a page of those who have claimed tasks."""

    @abstractmethod
    async def find_holdings(self, tenant_id: str, of: queries.HoldingsOf) -> list[stored.Holding]:
        """Return how many leases some workers have."""

    @abstractmethod
    async def count_ahead(self, tenant_id: str, of: queries.AheadOf) -> list[int]:
        """Return how many tasks come before one."""

    @abstractmethod
    async def find_heads(self, tenant_id: str, lanes: Sequence[int]) -> list[queries.Head]:
        """Return the oldest claimable task of each priority of some lanes."""

    @abstractmethod
    async def count_limit(self, tenant_id: str, of: queries.LimitUse) -> tuple[int, int]:
        """Return how many leases count against a limit, and how many tasks that have it wait."""

    async def find_instances(self, instance_id: str) -> list[stored.Instance]:
        """Return what is known of a gate process."""
        return []

    @abstractmethod
    async def find_unsent(self, tenant_id: str, of: queries.UnsentOf) -> list[stored.Outgoing]:
        """Return the outbox rows of a task."""

    @abstractmethod
    async def find_waiting(self, tenant_id: str, of: queries.OutboxFilter) -> list[stored.Outgoing]:
        """Return a page of the receipts that wait for the ledger."""

    @abstractmethod
    async def find_outgoing(self, tenant_id: str, of: queries.OutboxOf) -> list[stored.Outgoing]:
        """Return the outbox rows of some receipts."""

    @abstractmethod
    async def find_entries(self, tenant_id: str, of: queries.EntryFilter) -> list[stored.Entry]:
        """Return a page of the receipts that others stored in this ledger."""

    @abstractmethod
    async def find_archived(self, tenant_id: str, of: queries.ArchivedFilter) -> list[stored.Archived]:
        """Return the pointers to a task's archived receipts."""

    @abstractmethod
    async def find_deliveries(self, tenant_id: str,
                              of: queries.DeliveryFilter) -> list[stored_webhooks.WebhookDelivery]:
        """Return a page of what became of the events of an endpoint."""

    @abstractmethod
    async def find_open_webhooks(self, tenant_id: str, of: queries.OpenWebhooks) -> list[stored_webhooks.Webhook]:
        """Return a page of the endpoints that have not ended."""

    @abstractmethod
    async def find_rows(self, tenant_id: str, table: type[Struct], after: str, limit: int) -> list[Any]:
        """Return the next rows of a table."""
