"""Lanes are dropped when they are empty and recreated when needed; their number is limited."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncgate.conformance.harness import Gate, refused, under

pytestmark = pytest.mark.anyio

GPU = {"capabilities": ["gpu"]}


async def test_a_lane_in_which_nothing_waits_is_dropped_and_comes_back_with_a_task(gate: Gate) -> None:
    for number in range(20):
        await gate.finished(type=f"t{number}")

    await gate.backend.drop_lanes()
    offer = await gate.leased(type="t3")

    assert offer.type == "t3"
    await gate.as_worker().complete(**under(offer, artifacts=["x"]))
    assert await gate.claim() is None


async def test_what_waits_keeps_its_lane_also_delayed(gate: Gate) -> None:
    await gate.create(type="now", requirements=GPU)
    await gate.create(type="later", delay_seconds=50)

    await gate.backend.drop_lanes()
    gate.skip(51)

    taken = [await gate.claim(capabilities=["gpu"]) for _ in range(2)]
    assert sorted(offer.type for offer in taken if offer) == ["later", "now"]


@pytest.mark.parametrize("end", ["release", "fail", "lose"])
async def test_what_goes_back_to_the_queue_is_offered_though_its_lane_was_dropped(gate: Gate, end: str) -> None:
    offer = await gate.leased(type="rare", requirements=None, retry_backoff_seconds=0)
    await gate.backend.drop_lanes()

    if end == "release":
        await gate.as_worker().release_lease(**under(offer))
    elif end == "fail":
        await gate.as_worker().fail(**under(offer, error="x", retryable=True))
    else:
        await gate.lose(offer)

    again = await gate.claim("w2")
    assert again is not None
    assert again.task_id == offer.task_id


async def test_a_held_task_is_offered_again_though_its_lane_was_dropped(make_gate: Callable[..., Gate]) -> None:
    gate = make_gate(max_expiries=1)
    offer = await gate.leased(type="rare")
    await gate.lose(offer)
    await gate.backend.drop_lanes()

    await gate.as_agent().release_hold(task_id=offer.task_id)

    assert await gate.claim("w2") is not None


async def test_a_tenant_invents_only_so_many_kinds(make_gate: Callable[..., Gate]) -> None:
    gate = make_gate(max_lanes=3)
    for number in range(3):
        await gate.create(type=f"t{number}")

    with refused("quota_exceeded", limit=3):
        await gate.create(type="t3")
    await gate.create(type="t0")
    items = (await gate.as_agent().create_tasks(tasks=[{"type": f"t{n}", "payload": None} for n in (1, 7, 2)])).results

    assert [item.error is None for item in items] == [True, False, True]
    assert await gate.stranger().create(type="another")


async def test_room_for_kinds_comes_back(make_gate: Callable[..., Gate]) -> None:
    gate = make_gate(max_lanes=2)
    for number in range(6):
        await gate.finished(type=f"t{number}")
        await gate.backend.drop_lanes()

    assert await gate.create(type="fresh")
