"""A worker that resumes its lease after a crash is recorded in the task's history (spec 3, audit events)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncgate.conformance.harness import Gate, under

pytestmark = pytest.mark.anyio


async def resumed(gate: Gate, task_id: str) -> list[dict[str, Any]]:
    """Return the resumptions in a task's history."""
    history = await gate.as_admin().get_task_history(task_id=task_id)
    return [json.loads(bytes(event.payload)) for event in history.events if event.event_type == "lease.resumed"]


async def test_asking_for_its_leases_is_resuming_them(gate: Gate) -> None:
    offer = await gate.leased("w1")

    await gate.as_worker("w1", instance="second").list_leases(worker_instance_id=None)
    await gate.as_worker("w1").list_leases()

    (told,) = await resumed(gate, offer.task_id)
    assert told == {"lease_id": offer.lease_id, "fence": 1, "worker_kind": "worker", "worker_id": "w1",
                    "worker_instance_id": None}


async def test_an_instance_that_comes_back_is_named_once(gate: Gate) -> None:
    await gate.create()
    offer = (await gate.as_worker("w1", instance="one").lease_next()).tasks[0]

    for _ in range(3):
        assert (await gate.as_worker("w1", instance="one").list_leases()).leases

    assert [told["worker_instance_id"] for told in await resumed(gate, offer.task_id)] == ["one"]


async def test_the_first_call_of_another_process_under_a_lease_is_told(gate: Gate) -> None:
    offer = await gate.leased("w1")
    await gate.as_worker("w1").renew_lease(**under(offer))
    assert await resumed(gate, offer.task_id) == []

    second = gate.as_worker("w1", instance="second")
    await second.renew_lease(**under(offer))
    await second.report_progress(**under(offer, progress=1))

    assert [told["worker_instance_id"] for told in await resumed(gate, offer.task_id)] == ["second"]
    assert (await second.complete(**under(offer, artifacts=["x"]))).ok


async def test_an_admin_that_looks_resumes_nothing(gate: Gate) -> None:
    offer = await gate.leased("w1")

    async with gate.unchanged():
        await gate.as_admin().list_leases(worker_id="w1")

    assert await resumed(gate, offer.task_id) == []


async def test_a_worker_that_only_looks_resumes_nothing(gate: Gate) -> None:
    await gate.create()
    worker = gate.as_worker("w1", instance="one")
    offer = (await worker.lease_next()).tasks[0]

    async with gate.unchanged():
        assert (await worker.list_leases(resume=False)).leases

    assert await resumed(gate, offer.task_id) == []
    assert (await worker.list_leases()).leases
    assert len(await resumed(gate, offer.task_id)) == 1


async def test_the_trace_is_bounded(gate: Gate) -> None:
    offer = await gate.leased("w1")

    for number in range(30):
        await gate.as_worker("w1", instance=f"i{number}").renew_lease(**under(offer))

    assert len(await resumed(gate, offer.task_id)) == 20
