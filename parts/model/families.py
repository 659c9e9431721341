"""Families: tasks that another one, their parent, may wait for.

What a parent knows of its children stands in the row of its progress, which each batch loads with it.  A child that
ends says so there in the transaction of its end, whatever ends it; so a parent that waits is offered again at once, and
one that begins to wait knows who has ended before.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from asyncgate.parts.model import errors, stored, stored_families, wire
from asyncgate.parts.model.caller import Caller
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.overdue import alive, has_passed

MOST_ENDS_TOLD = 100                 # children whose ends an offer names, the last ones


class Family(Struct, frozen=True, omit_defaults=True):
    """What a parent knows of its children."""

    open: int = 0
    succeeded: int = 0
    failed: int = 0
    canceled: int = 0
    told: int = 0               # how many ends its last offer has told
    until: wire.UntilChildren = "all"       # what it waits for, while it is on hold for its children
    ends: tuple[wire.ChildEnd, ...] = ()    # the last ones, in the order in which they came

    @property
    def ended(self) -> int:
        """Return how many children have ended."""
        return self.succeeded + self.failed + self.canceled

    def add_end(self, task_id: str, status: wire.Status) -> Family:
        """Count the end of a child."""
        ends = (*self.ends, wire.ChildEnd(task_id, status))[-MOST_ENDS_TOLD:]
        return replace(self, open=self.open - 1, ends=ends, **{status: getattr(self, status) + 1})

    def has_come(self, until: wire.UntilChildren) -> bool:
        """Whether a parent need not wait (any more): any is an end that its last offer has not told."""
        return self.open == 0 or (until == "any" and self.ended > self.told)


decode_family = msgspec.json.Decoder(Family).decode


def read_family(progress: stored.Progress | None) -> Family | None:
    """Return what a task knows of its children; None if it never had any."""
    return None if progress is None or progress.family is None else decode_family(progress.family)


def keep_family(work: Any, task: stored.Task, family: Family) -> None:
    """Store what a task knows of its children."""
    work.keep_progress(replace(work.find_progress(task.task_id), family=encode_json(family).decode()))


def add_child(work: Any, caller: Caller, child: stored.Task, grace: float) -> None:
    """Count a new child: of the owner of its parent, of the worker that holds that, or of an admin."""
    parent: stored.Task = work.require_task(child.parent_task_id)
    lease = work.leases.get(parent.task_id)
    holds = alive(lease, work.now, grace) and lease.worker.same(child.owner)
    if not (caller.unlimited or parent.owner.same(child.owner) or holds):
        raise errors.Forbidden(f"task {parent.task_id} belongs to another principal, and is not leased to this one",
                               your_role=caller.role)
    if parent.status in stored.TERMINAL:
        raise errors.InvalidTransition(f"task {parent.task_id} is {parent.status}; only a task that has not ended gets "
                                       "children: leave parent_task_id out", status=parent.status)
    family = read_family(work.progress.get(parent.task_id)) or Family()
    keep_family(work, parent, replace(family, open=family.open + 1))


def end_child(work: Any, child: stored.Task, status: wire.Status) -> None:
    """Tell the parent of a task, if it has one, that it ends; offer the parent again if that is what it waits for."""
    parent = None if child.parent_task_id is None else work.reach_task(child.parent_task_id)
    if parent is None or (family := read_family(work.progress.get(parent.task_id))) is None:
        return      # the parent has been pruned, or came without its progress
    keep_family(work, parent, family := family.add_end(child.task_id, status))
    if parent.held == stored.CHILDREN_OPEN and family.has_come(family.until):
        resume_parent(work, parent, family)


def resume_parent(work: Any, parent: stored.Task, family: Family) -> None:
    """Offer a task again that waits for its children."""
    work.add_event(parent.task_id, "task.children_ended", until=family.until, **count_children(family))
    work.change_task(parent, held=None, next_eligible_at=None)


def park_for_children(work: Any, task: stored.Task, until: wire.UntilChildren | None,
                      at: float | None) -> tuple[str | None, float | None]:
    """Let a task wait for its children, if it shall, and until a time; return why it is on hold, and that time.

    There is neither where what it would wait for has come.
    """
    if until is None:
        return None, at
    if (family := read_family(work.progress.get(task.task_id))) is None:
        raise errors.InvalidTransition(f"task {task.task_id} has no children to wait for; create_task with "
                                       "parent_task_id makes some, and release_lease takes after_seconds or until",
                                       status=task.status)
    if family.has_come(until):
        return None, None
    keep_family(work, task, replace(family, until=until))
    return stored.CHILDREN_OPEN, at


def count_awaited(work: Any, task_id: str) -> int | None:
    """Return how many open children a task waits for, if it does."""
    family = read_family(work.progress.get(task_id))
    return family.open if family is not None and work.tasks[task_id].held == stored.CHILDREN_OPEN else None


def end_wait(work: Any, task: stored.Task) -> None:
    """Offer a task again that has waited for its children as long as it may."""
    family = read_family(work.progress.get(task.task_id))
    if family is not None and task.held == stored.CHILDREN_OPEN and has_passed(task.next_eligible_at, work.now):
        resume_parent(work, task, family)


def note_told(work: Any, task: stored.Task) -> None:
    """Note that the offer which is made now tells of all ends so far."""
    family = read_family(work.progress.get(task.task_id))
    if family is not None and family.told != family.ended:
        keep_family(work, task, replace(family, told=family.ended))


def count_children(family: Family) -> dict[str, int]:
    """Return how many children a task has, by what became of them."""
    return {"open": family.open, "succeeded": family.succeeded, "failed": family.failed, "canceled": family.canceled}


def show_children(progress: stored.Progress | None) -> wire.Children | UnsetType:
    """Show what a task knows of its children, if it has any."""
    if (family := read_family(progress)) is None:
        return UNSET
    return wire.Children(**count_children(family), ends=list(family.ends))


def its_cascade(needs: Any, caller: Caller, ask: wire.CancelTask) -> None:
    """Load the task, and whether a cascade from it is under way, where one is asked for."""
    needs.tasks.add(ask.task_id)
    if ask.cascade:
        needs.records.add((stored_families.Cascade, (ask.task_id,)))
