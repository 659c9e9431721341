"""How many tasks each lane has: derived from what a batch changes, in this one place for every database."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain

from msgspec import Raw

from asyncgate.parts.model.content import needs_of
from asyncgate.parts.model.stored import ACTIVE, Task

Moved = tuple[int, str, str, int, int, int]       # lane, type, capabilities; queued, on hold, leased or running


def place_of(task: Task | None) -> int | None:
    """Return which number of its lane a task is counted in: queued, on hold, leased; an ended task in none."""
    if task is None:
        return None
    if task.status == "queued":
        return 0 if task.held is None else 1
    return 2 if task.status in ACTIVE else None


def count_moves(before: Mapping[str, Task], *after: Mapping[str, Task]) -> list[Moved]:
    """Return by how much the numbers of each lane change, in the order of lanes; those that stay are left out."""
    moved = dict[int, tuple[Task, list[int]]]()
    for task in chain.from_iterable(tasks.values() for tasks in after):
        was, now = place_of(before.get(task.task_id)), place_of(task)
        if was == now:
            continue
        if (found := moved.get(task.lane)) is None:
            found = moved[task.lane] = (task, [0, 0, 0])
        if was is not None:
            found[1][was] -= 1
        if now is not None:
            found[1][now] += 1
    return [(lane, task.type, write_capabilities(task), counts[0], counts[1], counts[2])
            for lane, (task, counts) in sorted(moved.items()) if any(counts)]


def write_capabilities(task: Task) -> str:
    """Return what a task requires, as it is stored: a sorted JSON array."""
    return json.dumps(sorted(needs_of(Raw(task.requirements.encode()))))
