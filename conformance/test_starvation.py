"""A task that waits much longer than others of its queue, which is served: its owner is told, and nothing changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from asyncgate.conformance import harness

pytestmark = pytest.mark.anyio
KIND = "waiting_too_long"


async def look(gate: harness.Gate) -> int:
    """Let a process look once."""
    from asyncgate.extras.starvation.rules import StarvationWatch
    return await StarvationWatch(gate.engine).run()


async def serve(gate: harness.Gate, number: int = 10, **fields: Any) -> None:
    """Lease urgent tasks, each at once."""
    for _ in range(number):
        task_id = await gate.create(priority=5, **fields)
        assert await claimed(gate) == task_id


async def claimed(gate: harness.Gate, **fields: Any) -> str | None:
    """Return which task a claim gets."""
    offer = await gate.claim(**fields)
    return offer.task_id if offer else None


async def starved(gate: harness.Gate, task_id: str) -> list[dict[str, Any]]:
    """Return what was told of a task that waits."""
    return [anomaly for anomaly in await gate.anomalies(task_id) if anomaly["kind"] == KIND]


async def test_who_waits_much_longer_than_others_of_a_served_queue_is_told_once(gate: harness.Gate) -> None:
    task_id = await gate.create()
    await serve(gate)
    assert await look(gate) == 0
    gate.skip(120)
    before = await gate.task(task_id)

    assert [await look(gate), await look(gate)] == [1, 0]

    [anomaly] = await starved(gate, task_id)
    details = anomaly["details"]
    assert (details["type"], details["priority"], details["leased_in_last_hour"]) == ("demo", 0, 10)
    assert details["usual_seconds"] < 10 < 120 <= details["waits_seconds"]
    assert "priority" in anomaly["recommended_action"]
    assert await gate.task(task_id) == before, "an anomaly changes nothing (H.7)"
    await serve(gate, 1)


async def test_a_task_that_waits_again_is_told_of_again(gate: harness.Gate) -> None:
    task_id = await gate.create()
    await serve(gate)
    gate.skip(120)
    assert await look(gate) == 1
    offer = await gate.claim()
    assert offer is not None
    assert offer.task_id == task_id
    await gate.as_worker().release_lease(**harness.under(offer))
    await serve(gate)
    gate.skip(120)

    assert await look(gate) == 1
    assert len(await starved(gate, task_id)) == 2


async def test_nobody_is_told_in_a_queue_that_nobody_serves_now(gate: harness.Gate) -> None:
    await gate.create()
    await serve(gate)
    gate.skip(600)

    assert await look(gate) == 0


async def test_nobody_is_told_where_too_few_were_leased_to_compare_with(gate: harness.Gate) -> None:
    await gate.create()
    await serve(gate, 9)
    gate.skip(120)

    assert await look(gate) == 0


async def test_nobody_is_told_where_all_wait_alike(gate: harness.Gate) -> None:
    for _ in range(12):
        await gate.create()
    gate.skip(120)
    for _ in range(10):
        assert await claimed(gate)
    gate.skip(120)

    assert await look(gate) == 0, "240 s are not ten times 120 s"


async def test_the_queues_of_others_tell_nothing(gate: harness.Gate) -> None:
    task_id = await gate.create(type="other")
    for _ in range(10):
        await gate.create()
        assert await claimed(gate, accept_types=["demo"])
    gate.skip(120)

    assert await look(gate) == 0
    assert await starved(gate, task_id) == []


@pytest.mark.parametrize(("factor", "told"), [(0, 0), (0.5, 1), (100_000_000, 0)])
async def test_how_much_longer_is_a_setting(make_gate: Callable[..., harness.Gate], factor: float, told: int) -> None:
    gate = make_gate(starvation_factor=min(factor, 1e6))
    await gate.create()
    gate.skip(1)
    await serve(gate)
    gate.skip(100)
    task_id = await gate.create(priority=5)
    gate.skip(20)
    assert await claimed(gate) == task_id, "which makes the usual wait two seconds"

    assert await look(gate) == told


async def test_explain_task_says_so_with_what_is_usual(gate: harness.Gate) -> None:
    task_id = await gate.create()
    await serve(gate)
    fresh = await gate.as_agent().explain_task(task_id=task_id)
    gate.skip(120)
    await serve(gate, 1)

    told = await gate.as_agent().explain_task(task_id=task_id)

    assert KIND not in [fresh.cause, *(cause.cause for cause in fresh.also)]
    assert told.cause == KIND
    assert told.summary.startswith("It has been waiting for 2 min")
    assert re.search("the 11 tasks leased from its queue in the last hour had waited for [0-9]+ (ms|s) on average.$",
                     told.summary)
    assert told.evidence.usual_seconds is not None
    assert told.next.operation == "get_task"
    assert (await gate.as_admin().explain_task(task_id=task_id)).next.operation == "list_workers"
