"""What calls and the gate's own work cost SQLite with ever more stored tasks: `python -m asyncgate.bench.growth`.

It counts the statements and SQLite's own steps of each, with 1,000, 10,000 and 100,000 tasks that have ended: what
grows with the number of stored tasks shows, however busy the machine is.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

from asyncgate.backends.memory import Memory
from asyncgate.conformance import harness
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.model.settings import ArchiveSettings
from asyncgate.parts.upkeep import Upkeep

STORED_TASKS = (1_000, 10_000, 100_000)
ONLY_TENANT = "00000000-0000-4000-8000-000000000001"
UUID = "________-____-____-____-____________"
GROWTH_TURNS = 5           # of which the median counts
OFTEN = ("sweep", "beat", "presence", "traffic", "calls", "usage", "budgets", "retention", "lanes", "seal",
         "archive")


class Cost(NamedTuple):
    """What something cost."""

    statements: int
    steps: int


@asynccontextmanager
async def open_filled_gate(tasks: int) -> AsyncIterator[tuple[harness.Gate, Upkeep]]:
    """Open a gate in memory in which so many tasks have ended."""
    backend = Memory()
    with tempfile.TemporaryDirectory() as folder:
        settings = harness.settings_for_tests(archive=ArchiveSettings(enabled=True, directory=folder))
        gate = harness.Gate(engine_over(backend, settings), ONLY_TENANT)
        await finish_task(gate)
        multiply(backend, tasks)
        yield gate, Upkeep(gate.engine)
    await backend.close()


async def finish_task(gate: harness.Gate) -> None:
    """Let a task be created, claimed and completed, with a step."""
    await gate.create(type="demo")
    offer = await gate.claim()
    assert offer is not None
    await gate.as_worker().record_step(**harness.under(offer), seq=1, name="half", value=1)
    await complete(gate, offer)


async def complete(gate: harness.Gate, offer: Any) -> None:
    """Complete a task."""
    await gate.as_worker().complete(**harness.under(offer), result={"ok": True}, artifacts=[{"uri": "file:///out"}])


def multiply(backend: Memory, tasks: int) -> None:
    """Copy the rows of the only task, each time with other ids; through the gate that would take minutes."""
    db, numbers = backend.db, f"WITH RECURSIVE n (n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < {tasks})"
    tables = [name for [name] in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    for table in tables:
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        if "task_id" in columns and "tenant_id" in columns:
            chosen = ", ".join(name if name == "tenant_id" else f"iif({name} LIKE '{UUID}', printf('%08x', n) || "
                               f"substr({name}, 9), {name})" for name in columns)
            db.execute(f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) {numbers} "
                       f"SELECT {chosen} FROM {table}, n WHERE tenant_id = ?", (ONLY_TENANT,))


async def count(gate: harness.Gate, run: Callable[[], Awaitable[Any]]) -> Cost:
    """Return what something costs SQLite: the statements, and the steps of its own."""
    assert isinstance(gate.backend, Memory)
    db, steps, statements = gate.backend.db, 0, 0

    def take_step() -> int:
        nonlocal steps
        steps += 1
        return 0

    def take_statement(text: str) -> None:
        nonlocal statements
        statements += 1
    db.set_progress_handler(take_step, 1)
    db.set_trace_callback(take_statement)
    await run()
    db.set_progress_handler(None, 1)
    db.set_trace_callback(None)
    return Cost(statements, steps)


async def measure(tasks: int) -> dict[str, Cost]:
    """Return what each call and each job costs with so many stored tasks."""
    costs: dict[str, list[Cost]] = {}
    async with open_filled_gate(tasks) as (gate, upkeep):
        for _ in range(GROWTH_TURNS):
            async for name, cost in take_turn(gate, upkeep):
                costs.setdefault(name, []).append(cost)
    return {name: sorted(of)[len(of) // 2] for name, of in costs.items()}


async def take_turn(gate: harness.Gate, upkeep: Upkeep) -> AsyncIterator[tuple[str, Cost]]:
    """Make each call and do each job once."""
    agent, worker, admin, made = gate.as_agent(), gate.as_worker(), gate.as_admin(), list[Any]()

    async def keep(call: Awaitable[Any]) -> None:
        made.append(await call)

    yield "create_task", await count(gate, lambda: keep(gate.create(type="demo")))
    yield "lease_next", await count(gate, lambda: keep(gate.claim()))
    task_id, offer = made
    under = harness.under(offer)
    calls: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
        ("start_task", lambda: worker.start_task(**under)),
        ("renew_lease", lambda: worker.renew_lease(**under, extend_by_seconds=60)),
        ("record_step", lambda: worker.record_step(**under, seq=1, name="half", value=1)),
        ("get_task", lambda: agent.get_task(task_id=task_id)),
        ("complete", lambda: complete(gate, offer)),
        ("list_receipts", lambda: agent.list_receipts(to_kind="agent", to_id="ada", newest=True)),
        ("list_open_obligations", lambda: agent.list_open_obligations(limit=20)),
        ("rerun_task", lambda: keep(agent.rerun_task(task_id=task_id))),
        ("cancel_task", lambda: agent.cancel_task(task_id=made[-1].task_id)),
        ("list_tasks", lambda: admin.list_tasks(limit=50)),
        ("list_queues", admin.list_queues),
        ("list_workers", admin.list_workers),
        ("list_obligations, counted", lambda: admin.list_obligations(limit=1, count=True)),
        ("preview_bulk", lambda: admin.preview_bulk(action="cancel", status="queued", type="rare")),
        ("get_traffic", admin.get_traffic),
        *((f"upkeep: {name}", partial(upkeep.once, name)) for name in OFTEN)]
    for name, call in calls:
        yield name, await count(gate, call)


async def main() -> None:
    """Print a table."""
    sizes = [await measure(size) for size in STORED_TASKS]
    print("| | " + " | ".join(f"{size:,} tasks" for size in STORED_TASKS) + " |")
    print("| --- |" + " ---: |" * len(STORED_TASKS))
    for name in sizes[0]:
        print(f"| {name} | " + " | ".join(f"{of[name].statements}, {of[name].steps:,}" for of in sizes) + " |")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
