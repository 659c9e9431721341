"""The ends of a task: their receipts, proofs, and open obligations (PH.3, PH.5, H.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncgate.conformance import harness
from asyncgate.parts.model import errors

pytestmark = pytest.mark.anyio

FAILED = {"mode": "push", "target": {"endpoint": "https://example.com"}, "status": "failed"}
SUCCEEDED = {**FAILED, "status": "succeeded"}
FILE = [{"uri": "file:///out"}]


# A pointer has something to point with; else it leads nobody to a result.
EMPTY: list[Any] = [
    [None], [{}], [""], [" "], [[]], [False], [True], [0], {"pointers": [{}]}, {"pointers": [None]}, {"a": None},
    {"uri": ""}, [{"uri": None}], [{"uri": "NA"}], [{"type": "file", "size_bytes": 3}], [{"note": "in the drawer"}],
    [{"metadata": {"uri": "x"}}], [[{"a": [{"b": " "}]}]], [{"n": 1}]]
POINTING: list[Any] = [
    ["file:///out"], [{"url": "https://h/x"}], [None, {"uri": "x"}], {"output_path": "/out"}, [{"a": {"b": ["x"]}}],
    [{"type": "db", "table": "reports", "row_id": 12345}], [{"type": "db", "row_id": 12345}],
    {"pointers": [{"sink_id": "s", "uri": "s://a", "metadata": {}}]}, {"artifacts": {"items": [{"href": "h:1"}]}}]


@pytest.mark.one_store
@pytest.mark.parametrize("locatability", ["lenient", "strict"])
async def test_artifacts_without_a_pointer_discharge_nothing(make_gate: Callable[..., harness.Gate],
                                                             locatability: str) -> None:
    gate = make_gate(locatability=locatability)
    for artifacts in EMPTY:
        offer = await gate.leased()
        if locatability == "strict":
            with harness.refused("not_locatable"):
                await gate.as_worker().complete(**harness.under(offer, artifacts=artifacts))
            continue
        done = await gate.as_worker().complete(**harness.under(offer, artifacts=artifacts))
        assert (done.status, done.obligation) == ("succeeded", "open")
        with harness.refused("not_locatable"):
            await gate.as_agent().attach_artifacts(task_id=offer.task_id, artifacts=artifacts)
        assert (await gate.as_worker().complete(**harness.under(offer, artifacts=artifacts))).obligation == "open"

    assert len(await gate.owed()) == len(EMPTY)


@pytest.mark.one_store
async def test_artifacts_with_a_pointer_of_any_form_discharge(gate: harness.Gate) -> None:
    for artifacts in POINTING:
        offer = await gate.leased()
        assert (await gate.as_worker().complete(**harness.under(offer, artifacts=artifacts))).obligation == "discharged"


@pytest.mark.one_store
@pytest.mark.parametrize("proof", [{"x": 1}, {"status": "pending"}, {"mode": "push"}, {"status": None},
                                   {"status": "not succeeded"}, {"status": {"status": "succeeded"}}], ids=str)
async def test_a_proof_that_does_not_say_succeeded_discharges_nothing(gate: harness.Gate, proof: Any) -> None:
    offer = await gate.leased()

    done = await gate.as_worker().complete(**harness.under(offer, delivery_proof=proof))

    assert (done.status, done.obligation) == ("succeeded", "open")
    with harness.refused("not_locatable"):
        await gate.as_agent().attach_artifacts(task_id=offer.task_id, delivery_proof=proof)


@pytest.mark.parametrize("status", ["succeeded", "Success", " delivered ", True])
async def test_a_proof_that_says_succeeded_discharges(gate: harness.Gate, status: Any) -> None:
    offer = await gate.leased()

    done = await gate.as_worker().complete(**harness.under(offer, delivery_proof={"status": status}))

    assert done.obligation == "discharged"


@pytest.mark.one_store
@pytest.mark.parametrize("status", ["failed", "FAILED", " failure ", "error"])
async def test_a_proof_that_says_failed_discharges_nothing(gate: harness.Gate, status: str) -> None:
    offer = await gate.leased()

    done = await gate.as_worker().complete(**harness.under(offer, delivery_proof={**FAILED, "status": status}))

    assert (done.status, done.obligation) == ("succeeded", "open")
    assert [receipt.receipt_id for receipt in await gate.owed()] == [offer.obligation_receipt_id]
    assert harness.body(await gate.receipt(offer.task_id, "task.completed"))["delivery_proof"]["status"] == status
    with harness.refused("not_locatable"):
        await gate.as_agent().attach_artifacts(task_id=offer.task_id, delivery_proof=FAILED)
    assert (await gate.as_agent().attach_artifacts(task_id=offer.task_id, delivery_proof=SUCCEEDED)
            ).obligation == "discharged"
    assert await gate.owed() == []


@pytest.mark.one_store
async def test_a_strict_gate_refuses_a_proof_that_says_failed(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(locatability="strict")
    offer = await gate.leased()

    async with gate.unchanged():
        with harness.refused("not_locatable"):
            await gate.as_worker().complete(**harness.under(offer, delivery_proof=FAILED))
        with harness.refused("not_locatable"):
            await gate.as_worker().complete(**harness.under(offer, delivery_proof={"mode": "push"}))


async def test_artifacts_discharge_beside_a_proof_that_says_failed(gate: harness.Gate) -> None:
    offer = await gate.leased()

    done = await gate.as_worker().complete(**harness.under(offer, delivery_proof=FAILED, artifacts=FILE))

    assert (done.obligation, await gate.owed()) == ("discharged", [])


async def test_a_completion_says_whether_the_obligation_is_discharged_and_what_discharges_it(
    gate: harness.Gate) -> None:
    offer = await gate.leased()

    first = await gate.as_worker().complete(**harness.under(offer, result=1))
    again = await gate.as_worker().complete(**harness.under(offer, result=1))
    located = await gate.as_worker().complete(**harness.under(offer, artifacts=FILE))

    assert (first.obligation, again.obligation, located.obligation) == ("open", "open", "discharged")
    assert "attach_artifacts" in first.next
    assert located.next is None


async def test_a_batch_of_completions_says_it_of_each(gate: harness.Gate) -> None:
    first, second = await gate.leased(), await gate.leased()

    reply = await gate.as_worker().complete_tasks(tasks=[harness.under(first), harness.under(second, artifacts=FILE)])

    assert [item.obligation for item in reply.results] == ["open", "discharged"]
    assert "attach_artifacts" in reply.results[0].next


async def test_a_success_that_cannot_be_found_is_told_with_details(gate: harness.Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().complete(**harness.under(offer))

    (told,) = await gate.anomalies(offer.task_id)

    assert told["details"] == {
        "worker_id": "w1", "obligation_receipt_id": offer.obligation_receipt_id, "result_delivery": None,
        "receipt_id": (await gate.receipt(offer.task_id, "task.completed")).receipt_id}


async def test_the_owner_reads_who_canceled_and_why(gate: harness.Gate) -> None:
    task_id = await gate.create()
    await gate.as_agent().cancel_task(task_id=task_id, reason="not needed")

    told = harness.body(await gate.receipt(task_id, "task.result_ready"))

    assert (told["status"], told["canceled_by"], told["reason"]) == (
        "canceled", {"kind": "agent", "id": "ada"}, "not needed")


async def test_a_task_that_has_ended_is_released_from_nothing(gate: harness.Gate) -> None:
    offer = await gate.finished()

    async with gate.unchanged():
        reply = await gate.as_agent().release_hold(task_id=offer.task_id)

    assert (reply.ok, reply.status) == (False, "succeeded")


async def test_only_who_had_the_lease_or_owns_the_task_is_told_how_it_is_doing(gate: harness.Gate) -> None:
    offer = await gate.finished("w1")

    async def told(worker: str, lease_id: str) -> dict[str, Any]:
        with pytest.raises(errors.GateError) as refusal:
            await gate.as_worker(worker).renew_lease(task_id=offer.task_id, lease_id=lease_id)
        return refusal.value.more

    assert await told("w1", offer.lease_id) == {"reason": "completed", "status": "succeeded"}
    assert await told("w2", offer.lease_id) == {"reason": "unknown"}
    assert "status" not in await told("w2", "made-up")


async def test_a_summary_may_be_as_long_as_the_body_of_a_receipt(gate: harness.Gate) -> None:
    offer = await gate.leased()

    with harness.refused("receipt_too_large"):
        await gate.as_worker().complete(**harness.under(offer, result_summary="x" * 65_500, artifacts=FILE))
    await gate.as_worker().complete(**harness.under(offer, result_summary="x" * 60_000, artifacts=FILE))

    assert len(harness.body(await gate.receipt(offer.task_id, "task.completed"))["result_summary"]) == 60_000


async def test_an_emitted_receipt_carries_no_more_artifacts_than_any(gate: harness.Gate) -> None:
    offer = await gate.leased(type="schedule.create")

    async with gate.unchanged():
        with harness.refused(errors.TooManyArtifacts.code):
            await gate.as_worker().emit_receipt(
                **harness.under(offer), receipt_type="schedule.created", schedule_id="s", body={"artifacts": [1] * 101})


@pytest.mark.one_store
@pytest.mark.parametrize(("type", "why"), [
    ("task.completed", "is written only by the gate"), ("task.complete", "is not a receipt type")])
async def test_an_offered_receipt_of_another_type_is_refused_with_the_truth(gate: harness.Gate, type: str,
                                                                            why: str) -> None:
    parent = (await gate.owed() or [(await gate.receipt(await gate.create(), "task.assigned"))])[0].receipt_id

    with pytest.raises(errors.GateError, match=why):
        await gate.as_worker().emit_receipt(receipt_type=type, parents=[parent])
