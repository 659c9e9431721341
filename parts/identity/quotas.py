"""Quotas: the extensions that count a tenant's tasks, leases and receipts, and keep it within its limits.

Spec 21.6.  The limits and the refusals themselves are in parts/model/quotas.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncgate import Extension
from asyncgate.parts.model import quotas, stored

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncgate import Caller, Engine, Needs, Work
    from asyncgate.parts.model import stored, wire
    from asyncgate.parts.model.settings import Settings, Tier


class Quotas(Extension):
    """Counts the tasks, leases and receipts of each tenant, and keeps them within its tier."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.settings = engine, engine.settings
        self.tallies = quotas.counts_receipts(engine.settings.rate_limits)
        self.exact: set[str] = set()        # tenants whose usage this process has counted from the rows

    def name_needs(self, needs: Needs, caller: Caller, ask: wire.Ask) -> None:
        """Load the account and the usage; their locks make the tenant's counting writers take turns."""
        needs.records |= {(stored.Account, ()), (stored.Usage, ())}
        needs.recount |= caller.tenant_id not in self.exact
        needs.tally |= self.tallies

    def check_new_task(self, work: Work) -> None:
        """Refuse a new task above the quotas; existing tasks can always be finished."""
        if (usage := work.find_record(stored.Usage)) is not None:
            quotas.check_task_quotas(may := self._allowance(work), usage)
            quotas.check_receipt_quota(may, "", 0)

    def check_optional_receipt(self, work: Work, task_id: str) -> None:
        """Refuse an optional receipt about a task that has its maximum number of receipts (21.6.3)."""
        if task_id in work.tallies:
            quotas.check_receipt_quota(self._allowance(work), task_id, work.tallies[task_id] - 1)

    def why_no_lease(self, work: Work, worker: wire.Principal) -> str | None:
        """Return why a claim gets no task: the tenant has its maximum number of leases (spec 21.6.2)."""
        usage = work.find_record(stored.Usage)
        most = self._allowance(work).concurrent_leases if usage else -1
        return quotas.FULL_OF_LEASES if usage is not None and 0 <= most <= usage.leases else None

    def why_hold(self, work: Work, task: stored.Task) -> str | None:
        """Return why a task is put on hold after a lease: another lease would exceed its receipts (21.6.3)."""
        most = self._allowance(work).receipts_per_task if task.task_id in work.tallies else -1
        return quotas.RECEIPTS_QUOTA if 0 <= most <= work.tallies[task.task_id] + 1 else None

    def _allowance(self, work: Work) -> Tier:
        return quotas.find_allowance(self.settings, work.find_record(stored.Account), work.now)

    def after_commit(self, work: Work) -> None:
        """Note that the stored usage of a tenant is exact now; call waiting claims if it has room for leases again."""
        if (usage := work.find_loaded(stored.Usage)) is None:
            return
        self.exact.add(work.tenant_id)
        begun = sum(lease.acquired_at == work.now for lease in work.leased.values())
        ended = sum(lease.ending != "live" for lease in work.leased.values())
        if ended and usage.leases < self._allowance(work).concurrent_leases <= usage.leases - begun + ended:
            self.engine.waiting.wake_tenant(work.tenant_id)

    async def list_warnings(self, caller: Caller) -> list[str]:
        """Return a warning if the storage for receipts is at least 80 % full (spec 21.6.3)."""
        backend = self.engine.backend
        if (usage := await backend.record(caller.tenant_id, stored.Usage)) is None:
            return []
        account = await backend.record(caller.tenant_id, stored.Account)
        most = quotas.find_allowance(self.settings, account, backend.now()).receipt_storage_gb
        used = usage.receipt_bytes / quotas.GIGABYTE
        if not 0 <= 0.8 * most <= used:
            return []
        return [f"receipts use {used:.1f} of {most} GB; when the storage is full, no task can be created"]


def check_step(settings: Settings, work: Work, size: int) -> None:
    """Refuse a recorded step of so many bytes if the steps of its tenant fill their storage."""
    if (usage := work.find_loaded(stored.Usage)) is not None:
        may = quotas.find_allowance(settings, work.find_record(stored.Account), work.now)
        quotas.check_step_quota(may, usage, size)


class OwnLimits(Extension):
    """Keeps a tenant within the limits that it has of its own: of payloads (21.6.1), and of leases (21.6.2).

    Where quotas are counted each batch has loaded the tenant's account; else `find_account` tells it from memory.  So
    these limits cost no call a further read.
    """

    def __init__(self, settings: Settings, find_account: Callable[[str], stored.Account | None] | None = None) -> None:
        self.settings, self.find_account = settings, find_account

    def check_new_task(self, work: Work) -> None:
        """Refuse a task whose payload is larger than its tenant allows."""
        quotas.check_payload_quota(self._find(work), next(reversed(work.added.values())).payload, work.now)

    def limit_lease(self, work: Work) -> int:
        """Return how long a lease of the tenant may last."""
        return quotas.find_longest_lease(self.settings, self._find(work), work.now)

    def _find(self, work: Work) -> stored.Account | None:
        if (account := work.find_loaded(stored.Account)) is None and self.find_account is not None:
            return self.find_account(work.tenant_id)
        return account
