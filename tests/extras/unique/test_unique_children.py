"""Children that take the place of one another, and the parent that waits for them."""

from __future__ import annotations

from typing import Any

import pytest

from asyncgate.conformance.harness import Gate, under

pytestmark = pytest.mark.anyio
NEWEST = {"key": "doc", "on_conflict": "supersede"}


async def count_children(gate: Gate, task_id: str) -> tuple[int, int, int]:
    """Return how many children of a task are open, have succeeded and were canceled."""
    children: Any = (await gate.task(task_id)).children
    return children.open, children.succeeded, children.canceled


async def test_a_parent_waits_on_where_its_last_child_is_superseded_by_another_one(gate: Gate) -> None:
    parent = await gate.leased("w1")
    await gate.create("page", parent_task_id=parent.task_id, unique=NEWEST)
    await gate.as_worker("w1").release_lease(**under(parent), until_children="all")
    await gate.create("page", parent_task_id=parent.task_id, unique=NEWEST)

    child = await gate.claim("w2")
    assert child is not None
    assert child.task_id != parent.task_id
    assert await gate.claim("w3") is None
    await gate.as_worker("w2").complete(**under(child), artifacts=["file:///out"])
    again = await gate.claim("w3")

    assert again is not None
    assert again.task_id == parent.task_id
    assert await count_children(gate, again.task_id) == (0, 1, 1)


async def test_a_parent_that_waits_for_any_child_goes_on_where_one_is_superseded(gate: Gate) -> None:
    parent = await gate.leased("w1")
    await gate.create("page", parent_task_id=parent.task_id, unique=NEWEST)
    await gate.as_worker("w1").release_lease(**under(parent), until_children="any")
    await gate.create("page", parent_task_id=parent.task_id, unique=NEWEST)

    assert (await gate.task(parent.task_id)).held is None


async def test_a_child_that_is_superseded_by_another_parents_lets_its_own_go_on(gate: Gate) -> None:
    parent, other = await gate.leased("w1"), await gate.leased("w2")
    await gate.create("page", parent_task_id=parent.task_id, unique=NEWEST)
    await gate.as_worker("w1").release_lease(**under(parent), until_children="all")

    await gate.create("page", parent_task_id=other.task_id, unique=NEWEST)

    assert (await gate.task(parent.task_id)).held is None
    assert await count_children(gate, other.task_id) == (1, 0, 0)
