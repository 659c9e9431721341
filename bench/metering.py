"""What metering costs: `python -m asyncgate.bench.metering`.

Two gates of this process, one that meters its batches and one that does not, do the same cycles in turns, without
sockets, as in `counting`.  Then a month passes in steps of five minutes, each with a cycle, and each is closed.
CPU is counted, not time.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from statistics import median

from asyncgate import Extension, Needs, Transact, Work
from asyncgate.backends import open_backend
from asyncgate.bench import counting
from asyncgate.parts.app import Gate
from asyncgate.parts.identity.metering import Closer, floor_to
from asyncgate.parts.model.counted import PERIOD_SECONDS
from asyncgate.parts.model.settings import Settings

TURNS, PERIODS = 300, 30 * 288


class Unmetered(Extension):
    """Keeps batches from being metered."""

    def wrap_transact(self, transact: Transact) -> Transact:
        """Let each batch say that it is counted elsewhere."""
        async def run(tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
            def unmetered(work: Work) -> None:
                work.metered = False
                decide(work)
            await transact(tenant_id, needs, unmetered)
        return run


@contextlib.asynccontextmanager
async def open_gate(folder: str, metered: bool) -> AsyncIterator[Gate]:
    """Open a gate over a new file."""
    gate = Gate(Settings(api_key=counting.TOKEN), await open_backend(f"sqlite:///{folder}/{metered}.db"))
    async with gate.app.router.lifespan_context(gate.app):
        if not metered:
            gate.engine.extend(Unmetered())
        await counting.run_cycles(gate, counting.WARM_UP)
        yield gate


async def pass_month(gate: Gate) -> tuple[float, float]:
    """Let a month pass with a cycle in each five minutes; return the CPU seconds of a cycle and of closing a period."""
    closer, cycles, closing = Closer(gate.engine), 0.0, 0.0
    tenant_id, backend = gate.engine.settings.default_tenant_id, gate.engine.backend
    for _ in range(PERIODS):
        cycles += await counting.run_cycles(gate, 1)
        backend.skew += PERIOD_SECONDS
        since = time.process_time()
        await closer.close(tenant_id, floor_to(backend.now(), PERIOD_SECONDS))
        closing += time.process_time() - since
    return cycles / PERIODS, closing / PERIODS


async def main() -> None:
    """Run both in turns, the one that goes first by turns too, and print the medians; then the month."""
    with tempfile.TemporaryDirectory() as folder:
        async with open_gate(folder, False) as off, open_gate(folder, True) as on:
            times: dict[bool, list[float]] = {False: [], True: []}
            for number in range(TURNS):
                for metered in (False, True) if number % 2 else (True, False):
                    times[metered].append(await counting.run_cycles(on if metered else off, counting.CYCLES))
        async with open_gate(folder, True) as gate:
            cycle, closing = await pass_month(gate)
    shares = [metering / plain for plain, metering in zip(times[False], times[True], strict=True)]
    least = min(times[True]) / min(times[False])
    sys.stdout.write(
        f"CPU of a cycle: {median(times[False]) * 1e6:.0f} µs unmetered, {median(times[True]) * 1e6:.0f} µs metered; "
        f"median ratio of {TURNS} turns {median(shares):.3f}, of the least of each {least:.3f}\n"
        f"a month of {PERIODS} periods: {closing * 1e6:.0f} µs to close one, beside {cycle * 1e6:.0f} µs of its cycle; "
        f"of one cycle a second that is {closing / cycle / PERIOD_SECONDS:.5f}\n")


if __name__ == "__main__":
    asyncio.run(main())
