"""Quotas: what a tenant may have, and what becomes of a call that would make it too much (spec 21.6).

A quota stops what begins or repeats, and never what ends: a task completes, fails, is canceled or says where its result
lies however full its tenant is, or an obligation could never be closed.  So a task reserves its place among the ended
ones when it is created.
"""

from __future__ import annotations

from msgspec.structs import replace

from asyncgate.parts.model.errors import QuotaExceeded
from asyncgate.parts.model.settings import RateLimits, Settings, Tier
from asyncgate.parts.model.stored import Account, Usage

GIGABYTE = 10**9
RETRY_SOON_SECONDS, RETRY_LATER_SECONDS = 60, 3600      # to the next try: tasks end soon; upkeep prunes them much later
FULL_OF_LEASES = ("the tenant holds as many leases at once as it may (concurrent_leases): a claim gets a task when one "
                  "is completed, failed or released; get_limits shows the limit, an admin raises it with set_limits")
STORAGE_QUOTA = "receipt_storage_gb"      # the quota that the archive makes room in
RECEIPTS_QUOTA = "receipts_per_task"      # the quota, and why a task is held that has reached it


def tier_of(settings: Settings, account: Account | None) -> str:
    """Return the tier of a tenant (spec 21.4.2)."""
    return (account.tier if account else "") or settings.security.rate_limiting.default_tier


def find_allowance(settings: Settings, account: Account | None, now: float) -> Tier:
    """Return what a tenant may use; one that is exempt may use everything (spec 21.4.5)."""
    if is_exempt(account, now):
        return Tier()
    found: Tier = getattr(settings.rate_limits, f"{tier_of(settings, account)}_tier")
    return found if account is None else apply_stricter_limits(found, account, now)


def is_exempt(account: Account | None, now: float) -> bool:
    """Whether nothing is limited; stricter limits for a time go before an exemption."""
    return account is not None and (account.exempt_until or 0.0) > now and not is_throttled(account, now)


def is_throttled(account: Account | None, now: float) -> bool:
    """Whether a tenant has stricter limits than its tier, for a time (spec 21.9.2)."""
    return account is not None and (account.stricter_until or 0.0) > now


def apply_stricter_limits(may: Tier, account: Account, now: float) -> Tier:
    """Return what is left of an allowance under stricter limits."""
    if not is_throttled(account, now):
        return may
    return replace(may, api_calls_per_hour=find_lower_limit(may.api_calls_per_hour, account.stricter_calls),
                   tasks_per_hour=find_lower_limit(may.tasks_per_hour, account.stricter_tasks))


def find_lower_limit(limit: int, other: int | None) -> int:
    """Return the lower of two limits; -1 is none, and so is nothing."""
    return limit if other is None else other if limit < 0 else min(limit, other)


def check_task_quotas(may: Tier, usage: Usage) -> None:
    """Refuse a new task, which is counted already, if it is one too many or its receipts find no room."""
    if 0 <= may.active_tasks < usage.active:
        raise QuotaExceeded(f"{may.active_tasks} tasks of this tenant have not ended, which is all there may be",
                            quota="active_tasks", limit=may.active_tasks, retry_after=RETRY_SOON_SECONDS)
    if 0 <= may.terminal_tasks < usage.active + usage.terminal:
        raise QuotaExceeded(f"{usage.terminal} tasks of this tenant have ended and {usage.active - 1} will: all "
                            f"{may.terminal_tasks} that may be kept", quota="terminal_tasks", limit=may.terminal_tasks,
                            retry_after=RETRY_LATER_SECONDS)
    if 0 <= may.receipt_storage_gb * GIGABYTE < usage.receipt_bytes:
        raise QuotaExceeded(f"this tenant's receipts take up all {may.receipt_storage_gb} GB that they may",
                            quota=STORAGE_QUOTA, limit=may.receipt_storage_gb, retry_after=RETRY_SOON_SECONDS)


def check_receipt_quota(may: Tier, task_id: str, receipts: int) -> None:
    """Refuse to write about a task that has all the receipts it may have, unless that ends it."""
    if 0 <= may.receipts_per_task <= receipts:
        raise QuotaExceeded(f"task {task_id or 'that is new'} has {receipts} receipts, and {may.receipts_per_task} is "
                            "the most; what ends it is still taken", quota=RECEIPTS_QUOTA, limit=may.receipts_per_task,
                            retry_after=RETRY_LATER_SECONDS)


def counts_receipts(tiers: RateLimits) -> bool:
    """Whether any tier limits the receipts of a task, so that they must be counted."""
    return any(tier.receipts_per_task >= 0 for tier in (tiers.free_tier, tiers.paid_tier, tiers.enterprise_tier))
