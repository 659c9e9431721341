"""What is counted of what a batch changes, in this one place for every database: tasks of each lane, and usage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, Protocol

from msgspec import Raw, Struct

from asyncgate.parts.model import stored, stored_journal
from asyncgate.parts.model.content import needs_of

Moved = tuple[int, str, str, int, int, int]       # lane, type, capabilities; queued, on hold, leased or running


def place_of(task: stored.Task | None) -> int | None:
    """Return which number of its lane a task is counted in: queued, on hold, leased; an ended task in none."""
    if task is None:
        return None
    if task.status == "queued":
        return 0 if task.held is None else 1
    return 2 if task.status in stored.ACTIVE else None


def count_moves(before: Mapping[str, stored.Task], *after: Mapping[str, stored.Task]) -> list[Moved]:
    """Return by how much the numbers of each lane change, in the order of lanes; those that stay are left out."""
    moved: dict[int, tuple[stored.Task, list[int]]] = {}
    for task in chain.from_iterable([tasks.values() for tasks in after]):
        was, now = place_of(before.get(task.task_id)), place_of(task)
        if was == now:
            continue
        if (entry := moved.get(task.lane)) is None:
            entry = moved[task.lane] = (task, [0, 0, 0])
        if was is not None:
            entry[1][was] -= 1
        if now is not None:
            entry[1][now] += 1
    return [(lane, task.type, write_capabilities(task), counts[0], counts[1], counts[2])
            for lane, (task, counts) in sorted(moved.items()) if any(counts)]


def find_wait(lease: stored.Lease, task: stored.Task, now: float) -> float | None:
    """Return how long a task has waited for its first lease; a later one waited since an end that no row tells."""
    return max(now - max(task.created_at, task.next_eligible_at or 0.0), 0.0) if lease.fence == 1 else None


def write_capabilities(task: stored.Task) -> str:
    """Return what a task requires, as it is stored: a sorted JSON array."""
    return write_names(needs_of(Raw(task.requirements.encode())))


@lru_cache(4096)
def write_names(names: frozenset[str]) -> str:
    """Write names as a sorted JSON array."""
    return json.dumps(sorted(names))


PERIOD_SECONDS = 300        # of usage


def write_period(number: int) -> str:
    """Write the number of five minutes in Unix time so that it sorts."""
    return f"{number:012d}"


def passed_ms(now: float) -> int:
    """Return how many milliseconds of its five minutes have passed at a moment."""
    return int(now * 1000) % (PERIOD_SECONDS * 1000)


def measure_text(text: str | None) -> int:
    """Return how many bytes a text has in UTF-8."""
    return 0 if text is None else len(text) if text.isascii() else len(text.encode())


def measure_stored(task: stored.Task) -> int:
    """Return how many bytes the payload and the outcome of a task have."""
    return measure_text(task.payload) + measure_text(task.outcome)


def measure_payloads(before: Mapping[str, stored.Task], added: Mapping[str, stored.Task],
                     moved: Mapping[str, stored.Task]) -> int:
    """Return by how many bytes the stored payloads and outcomes change."""
    size = sum([measure_stored(task) for task in added.values()])
    for task_id, task in moved.items():
        if task.outcome is not (was := before[task_id].outcome):
            size += measure_text(task.outcome) - measure_text(was)
        if task.payload is not (had := before[task_id].payload):      # it was replaced, before anybody had it
            size += measure_text(task.payload) - measure_text(had)
    return size


class Changed(Protocol):
    """What a batch has loaded and changed, as far as usage depends on it: the heart's `Work`."""

    now: float
    tasks: dict[str, stored.Task]
    before: dict[str, stored.Task]
    added: dict[str, stored.Task]
    moved: dict[str, stored.Task]
    progress: dict[str, stored.Progress]
    receipts: dict[str, stored.Receipt]
    written: dict[str, stored.Receipt]
    kept: dict[tuple[type[Struct], tuple[str, ...]], Any]
    called: dict[str, int]
    freed: dict[Struct, int]
    metered: bool


def measure_use(work: Changed, leases: int, receipt_bytes: int, slot: int = 0) -> stored.Meter | None:
    """Return what a batch adds to the tenant's usage, given by how much live leases and stored bodies change.

    A backend adds it to the row with its key, in the batch's transaction.  A task counts as created in the batch whose
    time it bears: one that is rebuilt or copied bears an older one.
    """
    receipt_bytes -= sum(work.freed.values())
    payloads = measure_payloads(work.before, work.added, work.moved)
    for (kind, key), row in work.kept.items():
        if row is None and kind is stored.Receipt:
            receipt_bytes -= measure_text(work.receipts[key[0]].body)
        elif row is None and kind is stored.Task:
            kept = work.progress.get(key[0])
            payloads -= measure_stored(work.tasks[key[0]]) + (kept.step_bytes if kept else 0)
        elif isinstance(row, stored_journal.RecordedStep):
            payloads += measure_text(row.value)
    created = sum([task.created_at == work.now for task in work.added.values()])
    if not work.metered or not (created or leases or receipt_bytes or payloads or work.called or work.written):
        return None
    return make_meter(work.now, slot, created, leases, receipt_bytes, payloads, work.called)


def make_meter(now: float, slot: int, tasks: int, leases: int, receipt_bytes: int, payload_bytes: int,
               calls: Mapping[str, int]) -> stored.Meter:
    """Return what a batch adds to its tenant's usage at this moment, in whole milliseconds and seconds."""
    number, passed = divmod(int(now * 1000), PERIOD_SECONDS * 1000)
    return stored.Meter(write_period(number), f"{slot:04d}", tasks, leases, leases * passed, receipt_bytes,
                        receipt_bytes * (passed // 1000), payload_bytes, payload_bytes * (passed // 1000), **calls)
