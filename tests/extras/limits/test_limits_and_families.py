"""Tasks with limits that have children: what their children change must not hide them from claims."""

from __future__ import annotations

from typing import Any

import pytest

from asyncgate.conformance.harness import Gate, under

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("limits", [{"openai": ""}, {"customer": "42"}])
@pytest.mark.parametrize("way", ["parked", "tried again"])
async def test_a_delayed_task_is_leased_though_its_child_ends_between_its_time_and_the_next_claim(
        gate: Gate, limits: dict[str, str], way: str) -> None:
    parent = await gate.leased("w1", limits=limits)
    await gate.create("page", parent_task_id=parent.task_id)
    child: Any = await gate.claim("w2")
    if way == "parked":
        await gate.as_worker("w1").release_lease(**under(parent), after_seconds=10)
    else:
        await gate.as_worker("w1").fail(**under(parent), error="x", retryable=True, retry_after_seconds=10)
    assert await gate.claim("w3") is None       # finds its turn empty

    gate.skip(11)
    await gate.as_worker("w2").complete(**under(child), artifacts=["file:///out"])
    again = await gate.claim("w3")

    assert again is not None
    assert again.task_id == parent.task_id
