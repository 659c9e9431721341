"""When a lease ends, and what upkeep must look at (H.7): the one place that says so.

Databases say the same in SQL, to find it among all tenants; the conformance suite compares (test_overdue.py).
"""

from __future__ import annotations

import hashlib

from asyncgate.parts.model import stored, wire

CROWD = 100                     # leases that expire together and come back over all of the jitter


def alive(lease: stored.Lease | None, now: float, grace: float) -> bool:
    """Whether a lease still protects its task; it ends at its time, whether or not the sweep has seen it."""
    return lease is not None and lease.ending == "live" and lease.expires_at + grace > now


def lost(lease: stored.Lease | None, holder: wire.Principal, ask: wire.LeaseAsk, now: float,
         grace: float) -> str | None:
    """Say why `holder` does not hold the latest lease of a task, or None if it does."""
    if lease is None:
        return "unknown"
    if lease.lease_id != ask.lease_id or ask.fence not in (None, lease.fence):
        return "superseded" if lease.fence > (ask.fence or 1) else "unknown"
    if not lease.worker.same(holder) or (
            lease.worker_instance and holder.instance_id and lease.worker_instance != holder.instance_id):
        return "unknown"
    if lease.ending != "live":
        return lease.ending
    return None if alive(lease, now, grace) else "expired"


def is_spent(task: stored.Task, attempt: int) -> bool:
    """Whether a task has failed as often as it may, with so many failures."""
    return attempt >= task.max_attempts


def is_stuck(task: stored.Task) -> bool:
    """Whether a task is queued although its attempts are spent: nothing should have queued it."""
    return task.status == "queued" and is_spent(task, task.attempt)


def is_lost(task: stored.Task, lease: stored.Lease | None, now: float, grace: float) -> bool:
    """Whether the lease of a task has run out."""
    return task.status in stored.ACTIVE and lease is not None and not alive(lease, now, grace)


def has_passed(moment: float | None, now: float) -> bool:
    """Whether there was a moment at which something is late, and it has come."""
    return moment is not None and moment <= now


def is_late(task: stored.Task, now: float) -> bool:
    """Whether the deadline of a task has passed and it has not ended."""
    return task.status not in stored.TERMINAL and has_passed(task.deadline_at, now)


def waits_too_long(task: stored.Task, now: float) -> bool:
    """Whether a task waits for an answer, or for its children, and that was to come by now."""
    return task.held in stored.AWAITING and has_passed(task.next_eligible_at, now)


def backoff(base: int, attempt: int, limit: int) -> float:
    """Seconds that a task waits after its failed attempt number `attempt`: base, 2·base, 4·base, … up to `limit`."""
    return float(min(base * 2 ** min(attempt - 1, 64), limit))


def jitter(lease_id: str, spread: float, crowd: int) -> float:
    """Spread the requeueing of leases that expire together: not at all for one, over all of `spread` for a crowd.

    Derived from the lease's id, so that rules stay pure.
    """
    share = min((crowd - 1) / (CROWD - 1), 1.0)
    return hashlib.sha256(lease_id.encode()).digest()[0] / 256 * spread * share


def prolong_lease(lease: stored.Lease, silent_since: float, now: float, grace: float) -> float:
    """Return a lease's new end after no gate served for a while: the time it had left then, and `grace`, from now.

    Never more than its own length is left, so a process that dies over this and begins again prolongs it only once.
    If the clock went back meanwhile, that is sooner than its old end.
    """
    left = min(lease.expires_at - silent_since, lease.ttl_seconds or lease.expires_at - lease.acquired_at)
    return max(lease.expires_at if silent_since <= now else 0.0, now + left + grace)
