"""What a soak finds out by hours, without a clock: what a call costs does not grow with what is stored."""

from __future__ import annotations

import pytest

from asyncgate.bench.growth import measure
from asyncgate.bench.peers.strikes import Struck

pytestmark = pytest.mark.anyio
ARCHIVE = "upkeep: archive"     # it looks through one page of what is old


async def test_calls_and_upkeep_cost_as_much_with_thousands_of_stored_tasks_as_with_a_hundred() -> None:
    few, many = await measure(100), await measure(3000)

    assert {name: (few[name], cost) for name, cost in many.items() if name != ARCHIVE and (
        cost.statements > few[name].statements or cost.steps > few[name].steps + 500)} == {}
    assert many[ARCHIVE].steps <= 100_000
    assert many["lease_next"].steps > 100


def test_jobs_of_a_queue_that_is_struck_are_lost_stuck_or_done_twice() -> None:
    struck = Struck("made up")

    struck.count(["a", "b", "c", "d"], ["b"], ["a", "b", "b"], {"c"})

    assert (struck.jobs, struck.unknown, struck.lost, struck.stuck, struck.twice) == (4, 1, 1, 1, 1)
