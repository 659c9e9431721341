"""The queues that a batch has read for its claims, and what it changes of them.

A claim gets the best of the tasks that were read before the batch was decided.  What an earlier call of the batch has
put into a queue is not among them; and where it took a task out, the one behind the last one was perhaps not read.  So
a claim that would get another task for it, or none, is decided in the next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from math import inf
from typing import Any, NamedTuple

from asyncgate.parts.model import stored

Journal = Callable[[dict[Any, Any], Any, Any], None]        # sets a value, until its operation is undone


class ReadQueue:
    """The tasks of a lane that were read for claims, best first."""

    def __init__(self, tasks: Mapping[str, stored.Task], change: Journal) -> None:
        self.tasks, self.change = tasks, change
        self.ids: list[str] = []
        self.passed: dict[str, int] = {}    # how many of them are taken: of a claim that is taken back none are

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def find_head(self) -> stored.Task | None:
        """Return the first task that nobody has taken."""
        at = passed = self.passed.get("", 0)
        while at < len(self.ids) and self.tasks[self.ids[at]].status != "queued":
            at += 1
        if at > passed:
            self.change(self.passed, "", at)
        return self.tasks[self.ids[at]] if at < len(self.ids) else None


class Change(NamedTuple):
    """Where a lane may have another task now than what was read of it."""

    type: str
    priority: float
    task_id: str


class QueueChanges:
    """The first place that has changed in each lane, and what of it was before a claim."""

    def __init__(self, change: Journal) -> None:
        self.change = change            # which is undone with its operation
        self.first: dict[int, Change] = {}
        self.before: dict[int, Change] = {}
        self.freed = False              # whether a lease under a limit has ended: a lane may have room that had none

    def note(self, before: stored.Task | None, task: stored.Task, now: float) -> None:
        """Note that a task has come into its queue, or left it otherwise than by a claim."""
        was, now_at = place_in_queue(before, now), place_in_queue(task, now)
        if was == now_at or task.status == "leased":
            return
        if now_at is None or (was is not None and was < now_at):
            now_at = -inf, ""       # nothing that is left in the queue is certain to be the best
        known = self.first.get(task.lane)
        if known is None or now_at < (-known.priority, known.task_id):
            self.change(self.first, task.lane, Change(task.type, -now_at[0], now_at[1]))

    def begin_claim(self, freed: Collection[str]) -> None:
        """Let a claim go by what was before it: what it changes itself would put it off for ever."""
        self.before, self.freed = {**self.first}, bool(freed)


def place(task: stored.Task) -> tuple[int, str]:
    """Return the position of a task in its queue: highest priority first, then oldest."""
    return -task.priority, task.task_id


def place_in_queue(task: stored.Task | None, now: float) -> tuple[float, str] | None:
    """Return the place of a task in its queue; None if it is in none."""
    return place(task) if task is not None and task.claimable(now) else None
