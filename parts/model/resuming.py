"""Losses: how a worker ceases to hold a lease without a word: the lease runs out, or another process resumes it."""

from __future__ import annotations

from typing import Any

from asyncgate.parts.model import stored, wire
from asyncgate.parts.model.content import decode_json, to_canonical

MOST_RESUMED = 20               # of a lease, that its task's history tells of
MOST_LOST_TO = 10                 # workers that a task remembers as lost


def name_process(lease: stored.Lease, worker: wire.Principal, resumption_id: str | None) -> str:
    """Tell a process that asks for a lease from those before it: by its resumption_id, or by the renewals since then.

    Who renews a lease knows of it, so after a renewal only another process asks for it.
    """
    if resumption_id:
        return f"{resumption_id}@"
    same = lease.worker_instance == worker.instance_id      # else somebody looks at the leases of all instances
    return f"{worker.instance_id or ''}@{lease.renewals if same else 0}"


def is_new_process(process: str) -> bool:
    """Whether the holder before this process is lost; a lease without renewals runs out by itself if it is."""
    return not process.endswith("@0")


def is_resumption(lease: stored.Lease, process: str) -> bool:
    """Whether a process takes up a lease that another one held; what is not a loss is noted a few times only."""
    return lease.resumed_by != process and (is_new_process(process) or lease.resumptions < MOST_RESUMED)


def add_loss(task: stored.Task, lease: stored.Lease) -> dict[str, Any]:
    """Return what changes of a task when the holder of its lease is lost."""
    lost_to = [*decode_json(task.lost_to), lease.worker_id][-MOST_LOST_TO:]
    return {"expiries": task.expiries + 1, "lost_to": to_canonical(lost_to).decode()}


def would_hold(task: stored.Task, losses: int = 1) -> bool:
    """Whether so many more losses would put the task on hold."""
    return 0 < task.max_expiries <= task.expiries + losses
