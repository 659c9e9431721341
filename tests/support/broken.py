"""Backends that break one rule each, on purpose: `broken:NAME` is Memory with the fault NAME."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from msgspec.structs import replace

from asyncgate import Needs, Work
from asyncgate.backends.memory import Memory
from asyncgate.backends.sqlite_tables import TASK
from asyncgate.parts.model.overdue import is_stuck
from asyncgate.parts.model.queries import ObligationFilter, Query, ReceiptFilter, Row
from asyncgate.parts.model.settings import DatabaseSettings
from asyncgate.parts.model.stored import Key, Task
from asyncgate.parts.model.wire import LeaseNext

T = TypeVar("T")
MANY = 1000      # tasks, more than any test has


class DropsParents(Memory):
    """Stores receipts without what they answer."""

    def _save(self, work: Work) -> None:
        work.written = {id: replace(receipt, parents=()) for id, receipt in work.written.items()}
        super()._save(work)


class OffersDelayedTasks(Memory):
    """Does not look at the time."""

    def _offer(self, work: Work, claims: list[LeaseNext]) -> None:
        now, work.now = work.now, work.now + 1e9
        super()._offer(work, claims)
        work.now = now


class ForgetsPriority(Memory):
    """Offers the oldest task, whatever its priority."""

    def _heads(self, tenant_id: str, lanes: frozenset[int], enough: int) -> Generator[tuple[Any, ...], None, None]:
        yield from sorted(super()._heads(tenant_id, lanes, MANY), key=lambda row: row[1])


class LosesRenewals(Memory):
    """Stores the first state of a lease and none that follows."""

    def _save(self, work: Work) -> None:
        work.leased = {id: lease for id, lease in work.leased.items() if lease.ending != "live" or not lease.renewals}
        super()._save(work)


class LosesCommits(Memory):
    """Acknowledges every fourth batch and keeps nothing of it."""

    saved = 0

    def _save(self, work: Work) -> None:
        self.saved += 1
        if self.saved % 4:
            super()._save(work)


class ShowsOthersObligations(Memory):
    """Answers with the obligations of every tenant."""

    async def page(self, tenant_id: str, query: Query[T]) -> list[T]:
        """Return a page, of anybody's open obligations."""
        tenants = await self.tenants() if isinstance(query, ObligationFilter) else [tenant_id]
        return [row for other in tenants for row in await super(ShowsOthersObligations, self).page(other, query)]


class ForgetsDischarge(Memory):
    """Never takes an obligation off its index."""

    def _save(self, work: Work) -> None:
        work.closed = {}
        super()._save(work)


class ReadsStale(Memory):
    """Shows a task as it was when it was first read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[str, str], Row | None] = {}

    async def task(self, tenant_id: str, task_id: str) -> Row | None:
        """Return a task as it once was."""
        if (tenant_id, task_id) not in self.seen:
            self.seen[tenant_id, task_id] = await super().task(tenant_id, task_id)
        return self.seen[tenant_id, task_id]


class FiltersAfterTheLimit(Memory):
    """Cuts a page of receipts before it looks at what was asked for."""

    async def page(self, tenant_id: str, query: Query[Any]) -> list[Any]:
        """Return what happens to fit of the next rows."""
        if not isinstance(query, ReceiptFilter):
            return await super().page(tenant_id, query)
        rows = await super().page(tenant_id, ReceiptFilter(None, None, None, query.after, query.limit))
        return [row for row in rows if (query.to is None or row.to.same(query.to))
                and query.task_id in (None, row.task_id) and query.receipt_type in (None, row.receipt_type)]


class ForgetsKeys(Memory):
    """Does not find a task by its idempotency key."""

    def _load(self, tenant_id: str, needs: Needs) -> Work:
        needs.keys = set()
        return super()._load(tenant_id, needs)


class IgnoresLanes(Memory):
    """Takes every lane for every other one."""

    def _load(self, tenant_id: str, needs: Needs) -> Work:
        work = super()._load(tenant_id, needs)
        work.known = {lane: (type, frozenset()) for lane, (type, _) in self.lanes[tenant_id].known.items()}
        for _, _, *row in self._heads(tenant_id, frozenset(work.known), MANY) if needs.claims and work.known else ():
            work.add_claimable(Task(*row[:TASK]))
        return work


class KeepsRefusedBatches(Memory):
    """Stores a batch before it finds out that it must refuse it."""

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Carry out a batch, too early."""
        def eager(work: Work) -> None:
            decide(work)
            work.added, added = {}, work.added
            self._save(work)
            self.db.execute("COMMIT")
            self.db.execute("BEGIN IMMEDIATE")
            for saved in (work.lanes, work.moved, work.leased, work.progressed, work.written, work.posted, work.opened,
                          work.closed, work.events, work.audited, work.kept, work.delivered, work.erased):
                saved.clear()
            work.added = added
        await super().transact(tenant_id, needs, eager)


class KeepsOneLine(Memory):
    """Keeps the last line of each batch in the audit log, where the others are lost."""

    def _save(self, work: Work) -> None:
        work.audited = dict(list(work.audited.items())[-1:])
        super()._save(work)


class OverlooksStuckTasks(Memory):
    """Does not tell upkeep of tasks that wait although their attempts are spent."""

    async def overdue(self, now: float, grace: float, limit: int) -> list[tuple[str, list[str], list[str]]]:
        """Return the others."""
        return [(tenant_id, [id for id in tasks if not await self._is_stuck(tenant_id, id)], schedules)
                for tenant_id, tasks, schedules in await super().overdue(now, grace, limit)]

    async def _is_stuck(self, tenant_id: str, task_id: str) -> bool:
        row = await self.task(tenant_id, task_id)
        return row is not None and is_stuck(row[0])


class ForgetsSuspensions(Memory):
    """Finds keys, whatever has become of their tenants."""

    async def find_key(self, key_id: str) -> tuple[str, bool, Key] | None:
        """Return a key that seems good."""
        row = await super().find_key(key_id)
        return row and (row[0], False, row[2])


FAULTS: dict[str, Any] = {
    "drops_parents": DropsParents, "offers_delayed_tasks": OffersDelayedTasks, "forgets_priority": ForgetsPriority,
    "loses_renewals": LosesRenewals, "loses_commits": LosesCommits, "shows_others_obligations": ShowsOthersObligations,
    "forgets_discharge": ForgetsDischarge, "reads_stale": ReadsStale, "filters_after_the_limit": FiltersAfterTheLimit,
    "forgets_keys": ForgetsKeys, "ignores_lanes": IgnoresLanes, "keeps_refused_batches": KeepsRefusedBatches,
    "keeps_one_line": KeepsOneLine, "overlooks_stuck_tasks": OverlooksStuckTasks,
    "forgets_suspensions": ForgetsSuspensions}


BACKEND = Memory


async def open_backend(url: str, *, serving: bool = False, settings: DatabaseSettings | None = None) -> Memory:
    """Open a new memory with the fault that the URL names."""
    backend: Memory = FAULTS[url.partition(":")[2]]()
    return backend
