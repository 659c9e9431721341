"""Paged reads of an SQL database: `page` calls one method for each kind of query."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from asyncgate.parts.model.queries import (
    DELAYED_COUNTED,
    AheadOf,
    ArchivedFilter,
    EntryFilter,
    EventFilter,
    HoldingsOf,
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
)
from asyncgate.parts.model.stored import (
    Archived,
    Entry,
    Event,
    Holding,
    Instance,
    Lease,
    Outgoing,
    Presence,
    Queue,
    Receipt,
    Schedule,
    Task,
)

T = TypeVar("T")


def join_queues(counted: Iterable[tuple[Any, ...]], oldest: Mapping[int, float], later: Mapping[int, Sequence[Any]],
                now: float) -> Iterator[Queue]:
    """Join what is counted of each lane with since when its oldest task waits and what is known of its delayed tasks.

    A delayed task whose time has come stays one until somebody claims: here it waits since then.
    """
    more = sum(count for *_, count in later.values()) > DELAYED_COUNTED
    for row in counted:
        delayed, first, _ = later.get(row[0], (0, None, 0))
        since = [at for at in (oldest.get(row[0]), first) if at is not None and at <= now]
        lane, type, capabilities, queued, held, leased = row
        yield Queue(lane, type, capabilities, queued, held, leased, delayed=min(delayed, queued), more_delayed=more,
                    oldest_at=min(since, default=None))


class Pages(ABC):
    """The base class of the SQL backends that dispatches `page`."""

    async def page(self, tenant_id: str, query: Query[T]) -> list[T]:
        """Return a page of rows."""
        rows: list[Any] = await self._found(tenant_id, query)
        return rows

    async def _found(self, tenant_id: str, query: Query[Any]) -> list[Any]:
        match query:
            case TaskFilter():
                return await self.find_tasks(tenant_id, query)
            case LeaseFilter():
                return await self.find_leases(tenant_id, query)
            case LeaseCount():
                return [await self.count_leases(tenant_id, query)]
            case EventFilter():
                return await self.find_events(tenant_id, query)
            case ReceiptFilter():
                return await self.find_receipts(tenant_id, query)
            case ObligationFilter():
                return await self.find_obligations(tenant_id, query)
            case QueueFilter():
                return await self.find_queues(tenant_id, query)
            case ScheduleFilter():
                return await self.find_schedules(tenant_id, query)
            case WorkerFilter():
                return await self.find_workers(tenant_id, query)
            case HoldingsOf():
                return await self.find_holdings(tenant_id, query)
            case AheadOf():
                return await self.count_ahead(tenant_id, query)
            case InstanceOf():
                return await self.find_instances(query.instance_id)
            case UnsentOf():
                return await self.find_unsent(tenant_id, query)
            case OutboxFilter():
                return await self.find_waiting(tenant_id, query)
            case OutboxOf():
                return await self.find_outgoing(tenant_id, query)
            case EntryFilter():
                return await self.find_entries(tenant_id, query)
            case ArchivedFilter():
                return await self.find_archived(tenant_id, query)
            case Rows():
                return await self.find_rows(tenant_id, query.table, query.after)
        raise TypeError(f"no page of {query}")

    @abstractmethod
    async def find_tasks(self, tenant_id: str, of: TaskFilter) -> list[Row]:
        """Return a page of tasks, newest first."""

    @abstractmethod
    async def find_leases(self, tenant_id: str, of: LeaseFilter) -> list[tuple[Task, Lease]]:
        """Return the live leases of a worker."""

    @abstractmethod
    async def count_leases(self, tenant_id: str, of: LeaseCount) -> int:
        """Return how many leases are live."""

    @abstractmethod
    async def find_events(self, tenant_id: str, of: EventFilter) -> list[Event]:
        """Return a page of a task's events."""

    @abstractmethod
    async def find_receipts(self, tenant_id: str, of: ReceiptFilter) -> list[Receipt]:
        """Return a page of receipts, oldest first."""

    @abstractmethod
    async def find_obligations(self, tenant_id: str, of: ObligationFilter) -> list[Receipt]:
        """Return a page of open obligations from their index."""

    @abstractmethod
    async def find_queues(self, tenant_id: str, of: QueueFilter) -> list[Queue]:
        """Return a page of what lanes have now, by type."""

    @abstractmethod
    async def find_schedules(self, tenant_id: str, of: ScheduleFilter) -> list[Schedule]:
        """Return a page of schedules, in the order of their ids."""

    @abstractmethod
    async def find_workers(self, tenant_id: str, of: WorkerFilter) -> list[Presence]:
        """Return a page of those who have claimed tasks."""

    @abstractmethod
    async def find_holdings(self, tenant_id: str, of: HoldingsOf) -> list[Holding]:
        """Return how many leases some workers have."""

    @abstractmethod
    async def count_ahead(self, tenant_id: str, of: AheadOf) -> list[int]:
        """Return how many tasks come before one."""

    async def find_instances(self, instance_id: str) -> list[Instance]:
        """Return what is known of a gate process."""
        return []

    @abstractmethod
    async def find_unsent(self, tenant_id: str, of: UnsentOf) -> list[Outgoing]:
        """Return the outbox rows of a task."""

    @abstractmethod
    async def find_waiting(self, tenant_id: str, of: OutboxFilter) -> list[Outgoing]:
        """Return a page of the receipts that wait for the ledger."""

    @abstractmethod
    async def find_outgoing(self, tenant_id: str, of: OutboxOf) -> list[Outgoing]:
        """Return the outbox rows of some receipts."""

    @abstractmethod
    async def find_entries(self, tenant_id: str, of: EntryFilter) -> list[Entry]:
        """Return a page of the receipts that others stored in this ledger."""

    @abstractmethod
    async def find_archived(self, tenant_id: str, of: ArchivedFilter) -> list[Archived]:
        """Return the pointers to a task's archived receipts."""

    @abstractmethod
    async def find_rows(self, tenant_id: str, table: type[Struct], after: str) -> list[Any]:
        """Return the next 1,000 rows of a table."""
