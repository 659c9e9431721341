"""What is sharing a commit worth on a slow disk?

`python -m asyncgate.conformance.slow_disk` puts a pause into every commit of a SQLite file, as a cloud's disk would,
and compares many clients that share commits with the same clients when each write has a transaction of its own.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.conformance.growth import do, done
from asyncgate.parts.model.settings import Settings


class SlowToCommit:
    """A connection whose commits take longer."""

    def __init__(self, db: Any, pause: float) -> None:
        self.db, self.pause = db, pause

    def __getattr__(self, name: str) -> Any:
        return getattr(self.db, name)

    def execute(self, statement: str, *given: Any) -> Any:
        """Run a statement, a COMMIT after a pause."""
        if statement == "COMMIT":
            time.sleep(self.pause)
        return self.db.execute(statement, *given)


async def cycles(engine: Engine, worker: str, until: float) -> int:
    """Create, claim and complete one task after another; return how many."""
    count = 0
    while time.monotonic() < until:
        await do(engine, "create_task", type=worker, payload=None)
        [offer] = (await do(engine, "lease_next", worker_id=worker, accept_types=[worker])).tasks
        await do(engine, "complete", worker_id=worker, **done(offer))
        count += 1
    return count


async def rate(pause: float, clients: int, seconds: float, together: bool) -> float:
    """Return the cycles a second of some clients on a slow disk."""
    with tempfile.TemporaryDirectory() as folder:
        backend: Any = await open_backend(f"sqlite:///{Path(folder, 'gate.db')}")
        backend.db = SlowToCommit(backend.db, pause)
        if not together:
            backend.parallel = backend.parallel_per_tenant = 1
        engine = Engine(backend, Settings(batch_size=256 if together else 1))
        until = time.monotonic() + seconds
        try:
            counts = await asyncio.gather(*(cycles(engine, f"w{number}", until) for number in range(clients)))
            await engine.batches.landed()
        finally:
            await backend.close()
    return sum(counts) / seconds


@click.command()
@click.option("--pause", default=4.0, show_default=True, help="Milliseconds in each commit.")
@click.option("--clients", default=32, show_default=True, help="Clients at once.")
@click.option("--seconds", default=5.0, show_default=True, help="How long each measurement lasts.")
@click.option("--rounds", default=3, show_default=True, help="Rounds; both are measured in each.")
def main(pause: float, clients: int, seconds: float, rounds: int) -> None:
    """Compare shared commits with a commit for each write, on a disk that is slow to commit."""
    for _ in range(rounds):
        shared = asyncio.run(rate(pause / 1000, clients, seconds, True))
        alone = asyncio.run(rate(pause / 1000, clients, seconds, False))
        click.echo(f"{clients} clients, {pause:g} ms a commit: shared {shared:,.0f} cycles/s, "
                   f"each by itself {alone:,.0f} cycles/s, {shared / alone:.1f} ×")


if __name__ == "__main__":
    main()
