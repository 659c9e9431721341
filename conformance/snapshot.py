"""Do claims stay fast while somebody reads the database in one long transaction, as a backup or a report does?

`python -m asyncgate.conformance.snapshot postgresql://… --seconds 600 --rate 100` loads the gate steadily and prints a
line for each part of the time, the first without the reader.  What a long transaction may still see cannot be cleaned
away, so the leftovers of every claimed task pile up at the head of the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import click

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.conformance.growth import do, done, said

PARTS = 10


@contextlib.asynccontextmanager
async def reading(url: str) -> AsyncIterator[None]:
    """Hold a snapshot of the whole database for the time of a block."""
    import asyncpg
    db = await asyncpg.connect(url)
    try:
        async with db.transaction(isolation="repeatable_read", readonly=True):
            await db.fetchval("SELECT count(*) FROM asyncgate.states")
            yield
    finally:
        await db.close()


async def cycle(engine: Engine, took: list[float]) -> None:
    """Create a task, claim it and complete it; write down how long the claim took."""
    await do(engine, "create_task", type="demo", payload=None)
    begun = time.perf_counter()
    offers = await do(engine, "lease_next", worker_id="w1")
    took.append((time.perf_counter() - begun) * 1000)
    for offer in offers.tasks:      # another cycle may have been faster
        await do(engine, "complete", worker_id="w1", **done(offer))


async def steadily(engine: Engine, rate: float, seconds: float) -> list[float]:
    """Start so many cycles a second, whether or not the ones before have ended."""
    took: list[float] = []
    loop, begun = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as cycles:
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(begun + number / rate - loop.time(), 0))
            cycles.create_task(cycle(engine, took))
    return took


async def measure(url: str, rate: float, seconds: float) -> None:
    """Measure without the reader, then with it."""
    backend = await open_backend(url, serving=True)
    try:
        engine = Engine(backend)
        await steadily(engine, rate, 5)     # warm up
        said("nobody reads", await steadily(engine, rate, seconds / PARTS))
        async with reading(url):
            for part in range(1, PARTS + 1):
                said(f"read for {part * seconds / PARTS:.0f} s", await steadily(engine, rate, seconds / PARTS))
        await engine.batches.landed()
    finally:
        await backend.close()


@click.command()
@click.argument("url")
@click.option("--seconds", default=600.0, show_default=True, help="How long the reader holds its snapshot.")
@click.option("--rate", default=100.0, show_default=True, help="Tasks created, claimed and completed a second.")
def main(url: str, seconds: float, rate: float) -> None:
    """Measure claims at a steady load on the empty Postgres database at URL, with a long reader beside it."""
    asyncio.run(measure(url, rate, seconds))


if __name__ == "__main__":
    main()
