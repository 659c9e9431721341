"""Overdue rows: a database finds exactly those that the law calls overdue (H.7)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from asyncgate import Needs, Work
from asyncgate.conformance.harness import Gate
from asyncgate.parts.model import stored
from asyncgate.parts.model.overdue import has_passed, is_late, is_lost, is_stuck, waits_too_long

pytestmark = pytest.mark.anyio
GRACE = 5.0
NEVER: list[float | None] = [None]
AROUND: list[float] = [-1.0, 0.0, 1.0]      # seconds relative to the moment when a row becomes overdue


class Case(NamedTuple):
    """A possible stored task."""

    status: str
    attempt: int
    deadline: float | None
    ends: float | None          # of its lease, which is live while the task is leased or running
    held: str | None = None
    waits: float | None = None  # when it is eligible, or its answer is late


def cases() -> Iterator[Case]:
    """Yield tasks in every state, around every relevant moment."""
    for status in (*sorted(stored.TERMINAL | stored.ACTIVE), "queued"):
        leases = [end - GRACE for end in AROUND] if status in stored.ACTIVE else [None, -100.0]
        yield from (Case(status, *rest) for rest in product((0, 2, 3, 4), [*NEVER, *AROUND], leases))
    yield from (Case("queued", *rest) for rest in product(
        (0, 3), [None, 1.0], [-100.0], [None, "lease_expiries", stored.INPUT_REQUIRED], [*NEVER, *AROUND]))


async def template(gate: Gate) -> stored.Task:
    """Return a task with three attempts, as a template for the cases."""
    snapshot = await gate.backend.task(gate.tenant_id, await gate.create(max_attempts=3))
    assert snapshot is not None
    return snapshot[0]


def lease_of(task: stored.Task, case: Case, lease_id: str, now: float) -> stored.Lease | None:
    """Return the lease of a task in a case."""
    if case.ends is None:
        return None
    return stored.Lease(task.task_id, lease_id, "worker", "w1", None, 1, now - 200.0, now + case.ends, 0, "r-1", None,
                        "live" if case.status in stored.ACTIVE else "expired", 60)


async def found_by(gate: Gate, now: float) -> tuple[list[str], list[str]]:
    """Return the tasks and schedules of a tenant that the database finds overdue."""
    rows = await gate.backend.overdue(now, GRACE, 10_000)
    mine = [(tasks, schedules) for tenant_id, tasks, schedules in rows if tenant_id == gate.tenant_id]
    assert len(mine) <= 1
    return (sorted(mine[0][0]), sorted(mine[0][1])) if mine else ([], [])


async def test_a_database_finds_the_tasks_that_the_law_calls_overdue(gate: Gate) -> None:
    kind, now, wanted = await template(gate), float(int(gate.now())), dict[str, Case]()

    def store(work: Work) -> None:
        wanted.clear()
        for case in cases():
            deadline = None if case.deadline is None else now + case.deadline
            task = replace(kind, task_id=work.new_id(), status=case.status, attempt=case.attempt, deadline_at=deadline,
                           held=case.held, next_eligible_at=None if case.waits is None else now + case.waits)
            lease = lease_of(task, case, work.new_lease_id(), now)
            work.add_task(task, frozenset())
            if lease is not None:
                work.set_lease(lease)
            if is_lost(task, lease, now, GRACE) or is_late(task, now) or is_stuck(task) or waits_too_long(task, now):
                wanted[task.task_id] = case

    await gate.backend.transact(gate.tenant_id, Needs(), store)
    tasks, schedules = await found_by(gate, now)

    assert 0 < len(wanted) < len(list(cases()))
    assert [wanted[id] for id in wanted if id not in tasks] == []
    assert [id for id in tasks if id not in wanted] == []
    assert schedules == []


async def test_a_database_finds_the_schedules_that_the_law_calls_late(gate: Gate) -> None:
    now = float(int(gate.now()))
    kept: list[Any] = [stored.Schedule(f"s{number}", "agent", "ada", "agent", "ada", "r-1", True, now, 1.0,
                                       None if late is None else now + late) for number,
                       late in enumerate([*NEVER, *AROUND])]

    def store(work: Work) -> None:
        for schedule in kept:
            work.keep_record(schedule)

    await gate.backend.transact(gate.tenant_id, Needs(), store)

    late = [schedule.schedule_id for schedule in kept if has_passed(schedule.late_at, now)]
    assert await found_by(gate, now) == ([], late)
    assert late == ["s1", "s2"]
