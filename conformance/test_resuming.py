"""A worker that resumes its lease after a crash is recorded in the task's history (spec 3, audit events)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncgate.conformance.harness import Gate, refused, under

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
                    "worker_instance_id": None, "expiries": 0}


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
    offer = await gate.leased("w1", max_expiries=0)

    for number in range(30):
        await gate.as_worker("w1", instance=f"i{number}").renew_lease(**under(offer))

    assert len(await resumed(gate, offer.task_id)) == 20


async def resume(gate: Gate, process: str, worker: str = "w1") -> list[str]:
    """Resume a worker's leases as a new process of it, which renews them; return their tasks."""
    leases = (await gate.as_worker(worker).list_leases(resumption_id=process)).leases
    for lease in leases:
        await gate.as_worker(worker).renew_lease(lease_id=lease.lease_id)
    return [lease.task_id for lease in leases]


async def test_each_process_that_resumes_a_lease_is_a_loss_and_too_many_put_the_task_on_hold(gate: Gate) -> None:
    offer = await gate.leased("w1", max_expiries=3)

    assert [await resume(gate, process) for process in ("p1", "p1", "p2")] == [[offer.task_id]] * 3
    task = await gate.task(offer.task_id)
    assert (task.status, task.expiries, task.held) == ("leased", 2, None)
    assert await resume(gate, "p3") == []

    task = await gate.task(offer.task_id)
    assert (task.status, task.expiries, task.held) == ("queued", 3, "lease_expiries")
    assert [told["expiries"] for told in await resumed(gate, offer.task_id)] == [1, 2, 3]
    assert "w1 lost its lease 3 times" in (await gate.as_admin().explain_task(task_id=offer.task_id)).summary
    assert await gate.claim("w1") is None
    with refused("lease_invalid_or_expired", reason="expired"):
        await gate.as_worker("w1").complete(**under(offer, result=1, artifacts=["x"]))


async def test_losses_by_expiry_and_by_resumption_share_one_budget(gate: Gate) -> None:
    offer = await gate.leased("w1", max_expiries=3)
    await resume(gate, "p1")
    await gate.lose(offer)
    again = await gate.claim("w1")
    assert again is not None

    assert await resume(gate, "p2") == []

    assert (await gate.task(offer.task_id)).held == "lease_expiries"


async def test_the_fourth_loss_is_an_anomaly_however_workers_are_lost(gate: Gate) -> None:
    offer = await gate.leased("w1")

    for process in range(5):
        await resume(gate, f"p{process}")

    told = [anomaly for anomaly in await gate.anomalies(offer.task_id) if anomaly["kind"] == "lease_expired_often"]
    assert [anomaly["details"]["expiries"] for anomaly in told] == [4]


async def test_losses_beyond_the_trace_are_counted(gate: Gate) -> None:
    offer = await gate.leased("w1", max_expiries=25)

    for process in range(25):
        await resume(gate, f"p{process}")

    assert (await gate.task(offer.task_id)).held == "lease_expiries"


@pytest.mark.parametrize("instance", [None, "here"])
async def test_a_stock_worker_that_asks_for_a_lease_after_its_renewal_is_another_process(
        gate: Gate, instance: str | None) -> None:
    task_id, worker = await gate.create(max_expiries=3), gate.as_worker("w1", instance)
    offer = (await worker.lease_next()).tasks[0]

    for _ in range(3):      # it is killed before it renews: the lease runs out by itself
        assert len((await worker.list_leases()).leases) == 1
    assert (await gate.task(task_id)).expiries == 0
    for _ in range(2):
        await worker.renew_lease(**under(offer))
        assert len((await worker.list_leases()).leases) == len((await worker.list_leases()).leases) == 1
    await worker.renew_lease(**under(offer))

    assert (await worker.list_leases()).leases == []
    assert (await gate.task(task_id)).held == "lease_expiries"


async def test_a_claim_that_is_repeated_after_a_renewal_is_of_another_process(gate: Gate) -> None:
    task_id, worker = await gate.create(max_expiries=2), gate.as_worker("w1")
    offer = (await worker.lease_next(claim_id="always the same")).tasks[0]
    assert (await worker.lease_next(claim_id="always the same")).tasks[0].lease_id == offer.lease_id
    assert (await gate.task(task_id)).expiries == 0

    for expiries in (1, 2):
        await worker.renew_lease(**under(offer))
        await worker.lease_next(claim_id="always the same")
        assert (await gate.task(task_id)).expiries == expiries

    assert (await gate.task(task_id)).held == "lease_expiries"


async def test_processes_that_name_themselves_under_a_lease_without_a_name_are_losses(gate: Gate) -> None:
    offer = await gate.leased("w1", max_expiries=2)
    await gate.as_worker("w1", "one").renew_lease(**under(offer))
    assert (await gate.task(offer.task_id)).expiries == 1

    with refused("lease_invalid_or_expired", reason="expired"):
        await gate.as_worker("w1", "two").renew_lease(**under(offer))       # so the lease runs out

    assert (await gate.as_worker("w1", "two").complete(**under(offer, artifacts=["x"]))).ok


async def test_who_looks_at_the_leases_of_all_instances_is_not_a_loss(gate: Gate) -> None:
    task_id, worker = await gate.create(max_expiries=1), gate.as_worker("w1", "here")
    offer = (await worker.lease_next()).tasks[0]
    await worker.renew_lease(**under(offer))

    assert len((await gate.as_worker("w1").list_leases()).leases) == 1

    assert (await gate.task(task_id)).expiries == 0


async def test_a_task_without_a_limit_of_losses_is_resumed_for_ever(gate: Gate) -> None:
    offer = await gate.leased("w1", max_expiries=0)

    for process in range(15):
        assert await resume(gate, f"p{process}") == [offer.task_id]
