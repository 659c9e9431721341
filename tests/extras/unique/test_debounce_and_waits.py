"""Debounced requests that meet a task which waits for something else."""

from __future__ import annotations

from typing import Any

import pytest

from asyncgate.conformance.harness import Gate, under

pytestmark = pytest.mark.anyio
WORK: dict[str, Any] = {"type": "sync", "payload": None, "unique": {"key": "k"}}
BOSS = {"kind": "human", "id": "boss"}


@pytest.mark.parametrize("seconds", [1, 90_000])
@pytest.mark.parametrize("why", ["park", "retry", "question", "children"])
async def test_a_debounced_request_moves_no_time_that_a_worker_has_set(gate: Gate, why: str, seconds: int) -> None:
    offer, worker = await gate.leased(**WORK), gate.as_worker()
    if why == "park":
        await worker.release_lease(**under(offer), after_seconds=3600)
    elif why == "retry":
        await worker.fail(**under(offer), error="x", retryable=True, retry_after_seconds=600)
    elif why == "question":
        await worker.request_input(**under(offer), key="go", message="Go?", to=BOSS, expires_in_seconds=3600)
    else:
        await gate.create(parent_task_id=offer.task_id)
        await worker.release_lease(**under(offer), until_children="all", after_seconds=3600)
    before = await gate.task(offer.task_id)

    again = await gate.as_agent().create_task(**WORK, debounce={"seconds": seconds})

    assert (again.task_id, again.unique) == (offer.task_id, "returned")
    assert (await gate.task(offer.task_id)).next_eligible_at == before.next_eligible_at


async def test_a_question_ends_its_task_in_time_though_a_debounced_request_met_it(gate: Gate) -> None:
    offer = await gate.leased(**WORK)
    await gate.as_worker().request_input(**under(offer), key="go", message="Go?", to=BOSS, expires_in_seconds=60,
                                         on_expiry="fail")
    await gate.as_agent().create_task(**WORK, debounce={"seconds": 600})

    await gate.wait(61)

    assert (await gate.task(offer.task_id)).status == "failed"
    assert await gate.owed("boss", "human") == []
