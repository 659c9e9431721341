"""Does a claim stay as fast when the queue is full of work that the worker cannot do?

`python -m asyncgate.conformance.growth sqlite:///growth.db --tasks 1000000` fills an empty database and measures the
same claims before and after: compare the medians, not the single figures.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import click
import msgspec

from asyncgate import SCOPES, Caller, Engine
from asyncgate.backends import open_backend
from asyncgate.parts.model.wire import Principal
from asyncgate.parts.operations import OPERATIONS

CALLER = Caller("00000000-0000-0000-0000-000000000000", Principal("agent", "growth"), "admin", SCOPES, bound=False)
PIECE = 500


async def do(engine: Engine, name: str, caller: Caller = CALLER, **asked: Any) -> Any:
    """Perform one operation."""
    ask = OPERATIONS[name].reader.body(msgspec.json.encode(asked))[0]
    return await engine.perform(OPERATIONS[name], caller, ask)


def done(offer: Any) -> dict[str, Any]:
    """Return what a worker says to complete the task that it was offered."""
    return {"task_id": offer.task_id, "lease_id": offer.lease_id, "artifacts": [{"type": "none"}]}


async def claims(engine: Engine, rounds: int) -> list[float]:
    """Return the milliseconds that claims take which find their one task."""
    took = []
    for _ in range(rounds):
        await do(engine, "create_task", type="demo", payload=None)
        begun = time.perf_counter()
        offers = await do(engine, "lease_next", worker_id="w1")
        took.append((time.perf_counter() - begun) * 1000)
        [offer] = offers.tasks
        await do(engine, "complete", worker_id="w1", **done(offer))
    return took


def said(label: str, took: list[float]) -> None:
    """Print one line of the table."""
    last = statistics.quantiles(took, n=100)[98]
    click.echo(f"{label:>32}: p50 {statistics.median(took):6.3f} ms   p99 {last:6.3f} ms")


async def grow(url: str, tasks: int, rounds: int) -> None:
    """Open a database, measure it, and let go of it whatever happens."""
    backend = await open_backend(url, serving=True)
    try:
        await measure(Engine(backend), tasks, rounds)
    finally:
        await backend.close()


async def measure(engine: Engine, tasks: int, rounds: int) -> None:
    """Measure, fill, measure again."""
    await claims(engine, rounds)    # warm up
    said("an empty queue", await claims(engine, rounds))
    foreign = {"type": "render", "payload": None, "requirements": {"capabilities": ["gpu"]}}
    with click.progressbar(length=tasks, label="filling") as bar:
        for start in range(0, tasks, PIECE):
            size = min(PIECE, tasks - start)
            await do(engine, "create_tasks", tasks=[foreign] * size)
            bar.update(size)
    said(f"{tasks:,} tasks for others", await claims(engine, rounds))


@click.command()
@click.argument("url")
@click.option("--tasks", default=1_000_000, show_default=True, help="Tasks that the worker cannot do.")
@click.option("--rounds", default=1000, show_default=True, help="Claims to measure.")
def main(url: str, tasks: int, rounds: int) -> None:
    """Measure claims on an empty database at URL, before and after it is filled with other work."""
    asyncio.run(grow(url, tasks, rounds))


if __name__ == "__main__":
    main()
