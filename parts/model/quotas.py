"""Quotas: what a tenant may have, and which calls are refused at the limit (spec 21.6).

A quota stops calls that begin or repeat work, and never calls that end it: a task can complete, fail, be canceled or
get its artifacts however full its tenant is; otherwise an obligation could never be discharged.  So a task reserves
its place among the ended ones when it is created.
"""

from __future__ import annotations

from msgspec.structs import replace

from asyncgate.parts.model import errors, stored
from asyncgate.parts.model.settings import RateLimits, Settings, Tier

GIGABYTE = 10**9
RETRY_SOON_SECONDS, RETRY_LATER_SECONDS = 60, 3600      # tasks end soon; upkeep prunes them much later
FULL_OF_LEASES = ("the tenant has reached its limit of leases (concurrent_leases): a claim gets a task again after one "
                  "is completed, failed or released; get_limits shows the limit, an admin raises it with set_limits")
STORAGE_QUOTA = "receipt_storage_gb"      # the archive makes room in this quota
PAYLOAD_QUOTA = "max_payload_bytes"       # largest payload of a new task of the tenant
RECEIPTS_QUOTA = "receipts_per_task"      # the quota, and why a task that has reached it is on hold


def tier_of(settings: Settings, account: stored.Account | None) -> str:
    """Return the tier of a tenant (spec 21.4.2)."""
    return (account.tier if account else "") or settings.security.rate_limiting.default_tier


def find_allowance(settings: Settings, account: stored.Account | None, now: float) -> Tier:
    """Return a tenant's limits; an exempt tenant has none (spec 21.4.5)."""
    if is_exempt(account, now):
        return Tier()
    tier: Tier = getattr(settings.rate_limits, f"{tier_of(settings, account)}_tier")
    return tier if account is None else apply_stricter_limits(tier, account, now)


def is_exempt(account: stored.Account | None, now: float) -> bool:
    """Whether a tenant has no limits; temporary stricter limits override an exemption."""
    return account is not None and (account.exempt_until or 0.0) > now and not is_throttled(account, now)


def is_throttled(account: stored.Account | None, now: float) -> bool:
    """Whether a tenant has stricter limits than its tier now (spec 21.9.2)."""
    return account is not None and (account.stricter_until or 0.0) > now


def apply_stricter_limits(may: Tier, account: stored.Account, now: float) -> Tier:
    """Return the limits of a tier, lowered by the tenant's stricter limits."""
    if not is_throttled(account, now):
        return may
    return replace(may, api_calls_per_hour=find_lower_limit(may.api_calls_per_hour, account.stricter_calls),
                   tasks_per_hour=find_lower_limit(may.tasks_per_hour, account.stricter_tasks))


def find_lower_limit(limit: int, other: int | None) -> int:
    """Return the lower of two limits; -1 and None are unlimited."""
    return limit if other is None else other if limit < 0 else min(limit, other)


def check_task_quotas(may: Tier, usage: stored.Usage) -> None:
    """Refuse a new task, which is counted already, if it exceeds a quota or its receipts find no room."""
    if 0 <= may.active_tasks < usage.active:
        raise errors.QuotaExceeded(f"{may.active_tasks} tasks of this tenant have not ended, which is the limit",
                                   quota="active_tasks", limit=may.active_tasks, retry_after=RETRY_SOON_SECONDS)
    if 0 <= may.terminal_tasks < usage.active + usage.terminal:
        raise errors.QuotaExceeded(f"{usage.terminal} tasks of this tenant have ended and {usage.active - 1} will: the "
                                   f"limit of {may.terminal_tasks} is reached", quota="terminal_tasks",
                                   limit=may.terminal_tasks, retry_after=RETRY_LATER_SECONDS)
    if 0 <= may.receipt_storage_gb * GIGABYTE < usage.receipt_bytes:
        raise errors.QuotaExceeded(f"this tenant's receipts fill their limit of {may.receipt_storage_gb} GB",
                                   quota=STORAGE_QUOTA, limit=may.receipt_storage_gb, retry_after=RETRY_SOON_SECONDS)


def check_step_quota(may: Tier, usage: stored.Usage, size: int) -> None:
    """Refuse a recorded step of so many bytes if the steps of the tenant fill their storage."""
    if 0 <= may.step_storage_gb * GIGABYTE < usage.step_bytes + size:
        raise errors.QuotaExceeded(f"the recorded steps of this tenant fill their limit of {may.step_storage_gb} GB; "
                                   "they go with their tasks", quota="step_storage_gb", limit=may.step_storage_gb,
                                   retry_after=RETRY_LATER_SECONDS)


def check_kinds(most: int, kinds: int) -> None:
    """Refuse a task that needs a further lane when all lanes are used; existing tasks are unaffected."""
    if 0 < most < kinds:
        raise errors.QuotaExceeded(
            f"tasks of {most} kinds wait already, which is the limit: a kind is a type and the "
            "capabilities it requires", quota="kinds", limit=most,
            retry_after=RETRY_SOON_SECONDS)


def check_payload_quota(account: stored.Account | None, payload: str, now: float) -> None:
    """Refuse a new task whose payload is larger than its tenant's own limit (21.6.1)."""
    if account is None or (most := account.max_payload_bytes) is None or is_exempt(account, now):
        return
    if (size := len(payload.encode())) > most:
        raise errors.PayloadTooLarge(
            f"payload is {size} bytes; the limit of this tenant is {most} (get_limits): store it "
            "elsewhere, send a pointer", quota=PAYLOAD_QUOTA, limit=most)


def find_largest_payload(settings: Settings, account: stored.Account | None, now: float) -> int:
    """Return how many bytes a payload may have: the tenant's own limit, but never more than the gate's (21.6.1)."""
    own = None if account is None or is_exempt(account, now) else account.max_payload_bytes
    return find_lower_limit(settings.max_payload_bytes, own)


def find_longest_lease(settings: Settings, account: stored.Account | None, now: float) -> int:
    """Return how many seconds a lease may last: the tenant's own limit, but never more than the gate's (21.6.2)."""
    own = None if account is None or is_exempt(account, now) else account.max_lease_ttl_seconds
    return find_lower_limit(settings.max_lease_ttl_seconds, own)


def check_receipt_quota(may: Tier, task_id: str, receipts: int) -> None:
    """Refuse a receipt about a task that has reached its limit of receipts; the end of a task is never refused."""
    if 0 <= may.receipts_per_task <= receipts:
        raise errors.QuotaExceeded(f"task {task_id or '(new)'} has {receipts} receipts, and the limit is "
                                   f"{may.receipts_per_task}; calls that end the task still work",
                                   quota=RECEIPTS_QUOTA, limit=may.receipts_per_task, retry_after=RETRY_LATER_SECONDS)


def counts_receipts(tiers: RateLimits) -> bool:
    """Whether any tier limits the receipts of a task, so that they must be counted."""
    return any(tier.receipts_per_task >= 0 for tier in (tiers.free_tier, tiers.paid_tier, tiers.enterprise_tier))
