"""Canceling (spec 6.1)."""

from __future__ import annotations

import pytest

from asyncgate.conformance import harness

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("state", ["queued", "delayed", "leased", "running", "held"])
async def test_whatever_has_not_ended_can_be_canceled(gate: harness.Gate, state: str) -> None:
    task_id = await gate.create(delay_seconds=50 if state == "delayed" else 0, max_expiries=1)
    if state in ("leased", "running", "held"):
        offer = await gate.claim()
        assert offer is not None
        if state == "running":
            await gate.as_worker().start_task(**harness.under(offer))
        if state == "held":
            await gate.lose(offer)

    answer = await gate.as_agent().cancel_task(task_id=task_id, reason="no need")

    task = await gate.task(task_id)
    assert (answer.ok, answer.status, task.status) == (True, "canceled", "canceled")
    assert (task.held, task.leased_to, task.next_eligible_at) == (None, None, None)
    assert task.result is not None
    assert task.result.outcome == "canceled"
    assert await gate.owed() == []


async def test_a_cancellation_says_who_did_it_and_why(gate: harness.Gate) -> None:
    task_id = await gate.create(by="ada")

    await gate.as_admin("root").cancel_task(task_id=task_id, reason="too dear")

    told = await gate.receipt(task_id, "task.canceled")
    assert (str(told.sender), told.to.kind) == ("human root", "asyncgate")
    assert told.parents == [(await gate.task(task_id)).obligation_receipt_id]
    assert (harness.body(told)["canceled_by"], harness.body(told)["reason"]) == ({"kind": "human", "id": "root"},
                                                                                 "too dear")


@pytest.mark.parametrize("end", ["complete", "fail", "cancel"])
async def test_a_task_that_has_ended_stays_as_it_is(gate: harness.Gate, end: str) -> None:
    offer = await gate.leased()
    if end == "cancel":
        await gate.as_agent().cancel_task(task_id=offer.task_id)
    else:
        await getattr(gate.as_worker(), end)(**harness.NEEDED.get(end, {}), **harness.under(offer))
    status = {"complete": "succeeded", "fail": "failed", "cancel": "canceled"}[end]

    async with gate.unchanged():
        answer = await gate.as_agent().cancel_task(task_id=offer.task_id)

    assert (answer.ok, answer.status) == (end == "cancel", status)


@pytest.mark.one_store
async def test_another_agent_cannot_cancel(gate: harness.Gate) -> None:
    task_id = await gate.create(by="ada")

    async with gate.unchanged():
        with harness.refused("forbidden", required_role="admin", your_role="agent"):
            await gate.as_agent("bob").cancel_task(task_id=task_id)


@pytest.mark.one_store
async def test_an_unknown_task_cannot_be_canceled(gate: harness.Gate) -> None:
    with harness.refused("task_not_found"):
        await gate.as_agent().cancel_task(task_id="none")


async def test_a_canceled_lease_is_not_swept(gate: harness.Gate) -> None:
    offer = await gate.leased()
    await gate.as_agent().cancel_task(task_id=offer.task_id)

    async with gate.unchanged():
        await gate.wait(1000)


async def test_the_worker_of_a_canceled_task_no_longer_holds_a_lease(gate: harness.Gate) -> None:
    offer = await gate.leased()
    await gate.as_agent().cancel_task(task_id=offer.task_id)

    assert (await gate.as_worker().list_leases()).leases == []


async def test_a_repeated_cancel_is_answered_as_the_first(gate: harness.Gate) -> None:
    task_id = await gate.create(by="ada")
    first = await gate.as_agent().cancel_task(task_id=task_id, reason="too dear")

    async with gate.unchanged():
        assert await gate.as_agent().cancel_task(task_id=task_id, reason="too dear") == first
