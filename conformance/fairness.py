"""Does one tenant's flood slow another tenant's single task?

`python -m asyncgate.conformance.fairness sqlite:///fair.db` measures a tenant that creates, claims and completes one
task after another: alone, and beside a tenant that keeps thousands of creations waiting in the gate.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import click

from asyncgate import SCOPES, Caller, Engine
from asyncgate.backends import open_backend
from asyncgate.conformance.growth import do, done, said
from asyncgate.parts.model.wire import Principal

LONE, GREEDY = (Caller(f"00000000-0000-4000-8000-00000000000{n}", Principal("agent", "fair"), "admin", SCOPES,
                       bound=False) for n in (1, 2))


async def single(engine: Engine, rounds: int) -> list[float]:
    """Return the milliseconds of each request of a tenant that has one task at a time."""
    took: list[float] = []

    async def timed(name: str, **asked: Any) -> Any:
        begun = time.perf_counter()
        reply = await do(engine, name, LONE, **asked)
        took.append((time.perf_counter() - begun) * 1000)
        return reply

    for _ in range(rounds):
        await timed("create_task", type="demo", payload=None)
        [offer] = (await timed("lease_next", worker_id="w1")).tasks
        await timed("complete", worker_id="w1", **done(offer))
    return took


async def flood(engine: Engine, waiting: int) -> None:
    """Keep so many creations waiting, until cancelled."""
    async def greedy() -> None:
        while True:
            await do(engine, "create_task", GREEDY, type="flood", payload=None)
    await asyncio.gather(*(greedy() for _ in range(waiting)))


async def measure(url: str, rounds: int, waiting: int) -> None:
    """Measure alone, beside the flood, and alone again."""
    backend = await open_backend(url, serving=True)
    try:
        engine = Engine(backend)
        await single(engine, rounds // 4)       # warm up
        said("alone", await single(engine, rounds))
        flooding = asyncio.create_task(flood(engine, waiting))
        said(f"beside {waiting:,} creations", await single(engine, rounds))
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
        await engine.batches.landed()
        said("alone again", await single(engine, rounds))
    finally:
        await backend.close()


@click.command()
@click.argument("url")
@click.option("--rounds", default=300, show_default=True, help="Tasks of the single tenant in each measurement.")
@click.option("--waiting", default=2000, show_default=True, help="Creations that the other tenant keeps waiting.")
def main(url: str, rounds: int, waiting: int) -> None:
    """Measure one tenant's requests at URL, alone and beside another tenant's flood."""
    asyncio.run(measure(url, rounds, waiting))


if __name__ == "__main__":
    main()
