"""What a repeated creation says of the task that held its key."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

from asyncgate.conformance.harness import Gate, under

pytestmark = pytest.mark.anyio


def ask(key: str, on_conflict: str) -> dict[str, Any]:
    return {"type": "sync", "payload": None, "idempotency_key": key,
            "unique": {"key": "k", "on_conflict": on_conflict}, "success_criteria": {"supersedes": "all"}}


async def test_a_repeated_creation_says_what_became_of_the_task_that_held_its_key(gate: Gate) -> None:
    ada = gate.as_agent()
    first = await ada.create_task(**ask("1", "supersede"))
    second = await ada.create_task(**ask("2", "supersede"))
    offer = await gate.claim()
    third = await ada.create_task(**ask("3", "keep_latest"))

    again = [await ada.create_task(**ask(key, how)) for key, how in (
        ("1", "supersede"), ("2", "supersede"), ("3", "keep_latest"))]

    assert [each.task_id for each in again] == [first.task_id, second.task_id, third.task_id]
    assert [first.unique, second.unique, third.unique] == [UNSET, "superseded", "waits"]
    assert [each.unique for each in again] == [UNSET, "superseded", "waits"]
    assert offer is not None
    await gate.as_worker().complete(**under(offer, artifacts=["file:///out"]))
    assert (await ada.create_task(**ask("3", "keep_latest"))).unique is UNSET     # it waits no more
