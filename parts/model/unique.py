"""Unique work: at most one task holds a key of its creator and type at a time.

How long a task holds its key was said when it was created: until its first lease, until its end, or for some seconds.
Which task holds a key stands in a row of its own, which a batch loads only if a request names the key; the row may name
a task that holds it no more, so ends of tasks cost nothing.  Only an end for which another task waits is looked at: the
row of its progress names that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import UNSET, UnsetType

from asyncgate.parts.model import errors, stored, wire
from asyncgate.parts.model.content import sha256
from asyncgate.parts.model.views import decode_terms


def hash_key(owner: wire.Principal, type: str, key: str) -> str:
    """Return under which name a key is stored: those of two creators, or of two types, have nothing to do with it."""
    return sha256(owner.kind, owner.id, type, key)


def find_unique(task: stored.Task) -> wire.Unique | None:
    """Return under which key a task is unique."""
    unique: wire.Unique | None = decode_terms(task.terms).unique if '"unique"' in task.terms else None
    return unique


def name_key(task: stored.Task) -> str | None:
    """Return under which name the key of a task is stored."""
    unique = find_unique(task)
    return None if unique is None else hash_key(task.owner, task.type, unique.key)


def has_begun(task: stored.Task, lease: stored.Lease | None) -> bool:
    """Whether some worker has had a task, or it has ended."""
    return task.status != "queued" or lease is not None


def holds_key(task: stored.Task, lease: stored.Lease | None, now: float) -> bool:
    """Whether a task holds its key now."""
    unique = find_unique(task)
    if unique is None:      # what its terms said was erased
        return False
    if unique.lasts == "queued":
        return not has_begun(task, lease)
    if unique.lasts == "unfinished":
        return task.status not in stored.TERMINAL
    return now < task.created_at + unique.lasts


def settle_unique(hooks: Iterable[Callable[..., stored.Task | wire.Created | None]],
                  *asked: Any) -> stored.Task | wire.Created:
    """Return the task to create under a key, or what to answer instead, as the extra decides that this gate has."""
    for hook in hooks:
        if (settled := hook(*asked)) is not None:
            return settled
    raise errors.InvalidRequest("unique needs the extra unique, which this installation lacks; leave it out")


def tell_outcome(task: stored.Task) -> wire.UniqueOutcome | UnsetType:
    """Return what became of the task that held the key of a new one."""
    if task.held == stored.KEY_TAKEN:
        return "waits"
    return "superseded" if '"supersedes":' in task.terms and decode_terms(task.terms).supersedes else UNSET


def offer_successor(work: Any, ended: stored.Task) -> None:
    """Offer the task that waits for the end of another one."""
    progress = work.progress.get(ended.task_id)
    if progress is None or progress.successor is None:
        return
    waiting = work.reach_task(progress.successor)
    if waiting is not None and waiting.held == stored.KEY_TAKEN:
        work.add_event(waiting.task_id, "task.key_free", after=ended.task_id)
        work.change_task(waiting, held=None)
