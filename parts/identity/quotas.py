"""Quotas: the extension that counts what a tenant has, and refuses what would be too much (spec 21.6).

The limits and the refusals themselves are in parts/model/quotas.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncgate import Extension
from asyncgate.parts.model.quotas import (
    FULL_OF_LEASES,
    GIGABYTE,
    RECEIPTS_QUOTA,
    check_receipt_quota,
    check_task_quotas,
    counts_receipts,
    find_allowance,
)
from asyncgate.parts.model.stored import Account, Usage

if TYPE_CHECKING:
    from asyncgate import Caller, Engine, Needs, Work
    from asyncgate.parts.model.settings import Tier
    from asyncgate.parts.model.stored import Task
    from asyncgate.parts.model.wire import Ask


class Quotas(Extension):
    """Counts the tasks, leases and receipts of each tenant, and keeps them within its tier."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.settings = engine, engine.settings
        self.tallies = counts_receipts(engine.settings.rate_limits)
        self.exact: set[str] = set()        # tenants whose usage this process has counted itself

    def name_needs(self, needs: Needs, caller: Caller, ask: Ask) -> None:
        """Load what quotas are decided by; who counts takes turns with the tenant's other writers."""
        needs.records |= {(Account, ()), (Usage, ())}
        needs.recount |= caller.tenant_id not in self.exact
        needs.tally |= self.tallies

    def check_new_task(self, work: Work) -> None:
        """Refuse a new task for which there is no room; what is there can be finished."""
        if (usage := work.find_record(Usage)) is not None:
            check_task_quotas(may := self._allowance(work), usage)
            check_receipt_quota(may, "", 0)

    def check_optional_receipt(self, work: Work, task_id: str) -> None:
        """Refuse a receipt about a task that had all the receipts it may have (21.6.3)."""
        if task_id in work.tallies:
            check_receipt_quota(self._allowance(work), task_id, work.tallies[task_id] - 1)

    def why_no_lease(self, work: Work) -> str | None:
        """Let a claim come back empty when the tenant holds all the leases that it may (spec 21.6.2)."""
        usage = work.find_record(Usage)
        most = self._allowance(work).concurrent_leases if usage else -1
        return FULL_OF_LEASES if usage is not None and 0 <= most <= usage.leases else None

    def why_hold(self, work: Work, task: Task) -> str | None:
        """Put a task on hold when its lease ends and another one would be a receipt too many (21.6.3)."""
        most = self._allowance(work).receipts_per_task if task.task_id in work.tallies else -1
        return RECEIPTS_QUOTA if 0 <= most <= work.tallies[task.task_id] + 1 else None

    def _allowance(self, work: Work) -> Tier:
        return find_allowance(self.settings, work.find_record(Account), work.now)

    def after_commit(self, work: Work) -> None:
        """Remember that the usage of a tenant is exact now."""
        if work.find_record(Usage) is not None:
            self.exact.add(work.tenant_id)

    async def list_warnings(self, caller: Caller) -> list[str]:
        """Say in time that the room for receipts comes to its end (spec 21.6.3)."""
        backend = self.engine.backend
        if (usage := await backend.record(caller.tenant_id, Usage)) is None:
            return []
        account = await backend.record(caller.tenant_id, Account)
        most = find_allowance(self.settings, account, backend.now()).receipt_storage_gb
        used = usage.receipt_bytes / GIGABYTE
        if not 0 <= 0.8 * most <= used:
            return []
        return [f"receipts take up {used:.1f} of {most} GB; beyond that no task can be created"]
