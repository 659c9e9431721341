"""How long tasks usually wait in a queue, by what was leased there in the last hour."""

from __future__ import annotations

from msgspec import Struct

from asyncgate import Engine
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.operating.traffic import HOUR, iterate_since, read_tallies

SERVED_MINUTES = 5          # a queue of which nothing was leased for so long is not served: nobody is preferred
LEAST_LEASED = 10           # tasks that tell what is usual
LEAST_SECONDS = 60.0        # a wait that is never too long


class Usual(Struct, frozen=True):
    """What was leased of a queue in the last hour for the first time, and how long that had waited on average."""

    leased: int
    seconds: float


async def read_usual(engine: Engine, tenant_id: str, now: float) -> dict[int, Usual]:
    """Return what is usual in the queues of a tenant that are served, by their lanes."""
    minute, served = int(now // 60), set[int]()
    sums: dict[int, tuple[int, int]] = {}
    async for row in iterate_since(engine, tenant_id, minute - HOUR, minute):
        for lane, counts in read_tallies(row.counts).items():
            leased, waited = sums.get(lane, (0, 0))
            sums[lane] = leased + counts.begun, waited + counts.waited_ms
            if counts.started and minute - int(row.minute) <= SERVED_MINUTES:
                served.add(lane)
    return {lane: Usual(leased, waited / 1000 / leased) for lane, (leased, waited) in sums.items()
            if lane in served and leased >= LEAST_LEASED}


def find_longest(settings: Settings, usual: Usual) -> float:
    """Return after how many seconds a task of a queue has waited too long."""
    return max(settings.starvation_factor * usual.seconds, LEAST_SECONDS)
