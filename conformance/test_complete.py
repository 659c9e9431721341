"""Completing: replay, locatability and its exceptions (spec 6.2, H.3, PH.3)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from asyncgate.conformance import harness
from asyncgate.parts.model import wire

pytestmark = pytest.mark.anyio

WHERE = [{"type": "s3", "uri": "s3://out"}]
PROOF = {"mode": "push", "status": "succeeded"}


async def types(gate: harness.Gate, offer: wire.Offer) -> list[str]:
    """Return the types of a task's receipts, in order."""
    return [receipt.receipt_type for receipt in await gate.receipts(offer.task_id)]


async def test_a_completed_task_has_succeeded_and_shows_its_result(gate: harness.Gate) -> None:
    offer = await gate.leased()

    answer = await gate.as_worker().complete(**harness.under(offer, result={"answer": 42}, artifacts=WHERE))

    task = await gate.task(offer.task_id)
    assert (answer.ok, answer.status, task.status) == (True, "succeeded", "succeeded")
    assert task.result is not None
    assert (task.result.outcome, task.result.completed_at) == ("succeeded", task.updated_at)
    assert msgspec.json.decode(task.result.result) == {"answer": 42}
    assert msgspec.json.decode(task.result.artifacts) == WHERE
    assert bytes(task.result.error) == b"null"
    assert (task.leased_to, task.lease_expires_at, task.attempt) == (None, None, 0)


@pytest.mark.parametrize("where", [{"artifacts": WHERE}, {"delivery_proof": PROOF}], ids=["artifacts", "proof"])
async def test_a_located_success_discharges_the_duty(gate: harness.Gate, where: dict[str, Any]) -> None:
    offer = await gate.leased()

    await gate.as_worker().complete(**harness.under(offer, **where))

    completed = await gate.receipt(offer.task_id, "task.completed")
    assert completed.parents == [offer.obligation_receipt_id]
    assert {name: harness.body(completed)[name] for name in where} == where
    assert await gate.owed() == []
    assert not (await gate.task(offer.task_id)).obligation_open
    assert await gate.anomalies() == []


@pytest.mark.one_store
@pytest.mark.parametrize(("shape", "listed"), [
    (WHERE, WHERE), ({"pointers": WHERE}, WHERE), (WHERE[0], WHERE), ({"pointers": WHERE[0]}, WHERE)], ids=range(4))
async def test_artifacts_come_in_three_shapes(gate: harness.Gate, shape: Any, listed: Any) -> None:
    offer = await gate.leased()

    await gate.as_worker().complete(**harness.under(offer, artifacts=shape))

    assert harness.body(await gate.receipt(offer.task_id, "task.completed"))["artifacts"] == listed
    assert await gate.owed() == []


@pytest.mark.one_store
@pytest.mark.parametrize("empty", [None, [], {}, {"pointers": []}], ids=str)
async def test_empty_artifacts_are_none(gate: harness.Gate, empty: Any) -> None:
    offer = await gate.leased()

    await gate.as_worker().complete(**harness.under(offer, result=1, artifacts=empty))

    assert len(await gate.owed()) == 1


@pytest.mark.one_store
@pytest.mark.parametrize("wrong", ["s3://out", 7, True])
async def test_artifacts_of_another_shape_are_refused(gate: harness.Gate, wrong: Any) -> None:
    offer = await gate.leased()

    async with gate.unchanged():
        with harness.refused("invalid_request"):
            await gate.as_worker().complete(**harness.under(offer, artifacts=wrong))


async def test_a_success_that_cannot_be_located_discharges_nothing(gate: harness.Gate) -> None:
    offer = await gate.leased()

    answer = await gate.as_worker().complete(**harness.under(offer, result={"summary": "trust me"}))

    assert answer.status == (await gate.task(offer.task_id)).status == "succeeded"
    assert (await gate.receipt(offer.task_id, "task.completed")).parents == []
    assert [receipt.receipt_id for receipt in await gate.owed()] == [offer.obligation_receipt_id]
    assert (await gate.task(offer.task_id)).obligation_open
    assert [anomaly["kind"] for anomaly in await gate.anomalies(offer.task_id)] == ["success_without_locatability"]


async def test_a_strict_gate_refuses_a_success_that_cannot_be_located_and_the_lease_lives_on(
        make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(locatability="strict")
    offer = await gate.leased()

    async with gate.unchanged():
        with harness.refused("not_locatable"):
            await gate.as_worker().complete(**harness.under(offer, result={"summary": "trust me"}))

    assert (await gate.as_worker().complete(**harness.under(offer, artifacts=WHERE))).ok
    assert await gate.owed() == []


async def test_the_same_completion_again_returns_the_same_answer_and_writes_nothing(gate: harness.Gate) -> None:
    offer = await gate.leased()
    first = await gate.as_worker().complete(**harness.under(offer, result=1, artifacts=WHERE))

    async with gate.unchanged():
        assert await gate.as_worker().complete(**harness.under(offer, result=1, artifacts=WHERE)) == first
        again = await gate.as_worker().complete(**harness.under(offer, result="another", artifacts=[{"uri": "other"}]))
        assert again == replace(first, result_differs=True)


async def test_the_same_completion_without_location_again_writes_nothing(gate: harness.Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().complete(**harness.under(offer, result=1))

    async with gate.unchanged():
        assert (await gate.as_worker().complete(**harness.under(offer, result=1))).ok


async def test_a_completion_is_still_answered_long_after_the_lease_would_have_ended(gate: harness.Gate) -> None:
    offer = await gate.finished()
    await gate.wait(5000)

    async with gate.unchanged():
        assert (await gate.as_worker().complete(**harness.under(offer))).status == "succeeded"


async def test_another_worker_cannot_repeat_a_completion(gate: harness.Gate) -> None:
    offer = await gate.finished("w1")

    async with gate.unchanged():
        with harness.refused("lease_invalid_or_expired", reason="unknown"):
            await gate.as_worker("w2").complete(**harness.under(offer))


async def late(gate: harness.Gate, offer: wire.Offer, way: str) -> str:
    """Locate a result after the completion, in one of the ways; return the caller."""
    if way == "complete":
        await gate.as_worker().complete(**harness.under(offer, result=1, artifacts=WHERE))
        return "worker w1"
    view, who = {"owner": (gate.as_agent("ada"), "agent ada"), "worker": (gate.as_worker("w1"), "worker w1"),
                 "admin": (gate.as_admin("root"), "human root")}[way]
    await view.attach_artifacts(task_id=offer.task_id, artifacts=WHERE)
    return who


@pytest.mark.parametrize("way", ["complete", "owner", "worker", "admin"])
async def test_saying_later_where_the_result_lies_discharges_the_duty(gate: harness.Gate, way: str) -> None:
    offer = await gate.leased()
    await gate.as_worker().complete(**harness.under(offer, result=1))
    before = await gate.task(offer.task_id)
    gate.skip(10)

    who = await late(gate, offer, way)

    assert await gate.owed() == []
    assert (await types(gate, offer)).count("task.completed") == 2
    assert (await types(gate, offer)).count("task.result_ready") == 2
    linked = (await gate.receipts(offer.task_id, "task.completed"))[1]
    assert (linked.parents, linked.lease_id) == ([offer.obligation_receipt_id], offer.lease_id)
    assert (str(linked.sender), harness.body(linked)["artifacts"]) == (who, WHERE)
    assert (await gate.receipts(offer.task_id, "task.result_ready"))[1].parents == [linked.receipt_id]
    after = await gate.task(offer.task_id)
    assert before.result is not None
    assert after.result is not None
    assert msgspec.json.decode(after.result.artifacts) == WHERE
    assert (after.status, after.result.result, after.result.completed_at) == (
        before.status, before.result.result, before.result.completed_at)


@pytest.mark.parametrize("way", ["complete", "owner", "worker", "admin"])
async def test_saying_it_twice_writes_nothing(gate: harness.Gate, way: str) -> None:
    offer = await gate.leased()
    await gate.as_worker().complete(**harness.under(offer, result=1))
    await late(gate, offer, "owner")

    async with gate.unchanged():
        await late(gate, offer, way)


async def test_a_delivery_proof_may_come_later_too(gate: harness.Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().complete(**harness.under(offer))

    await gate.as_agent().attach_artifacts(task_id=offer.task_id, delivery_proof=PROOF)

    assert await gate.owed() == []
    assert harness.body((await gate.receipts(offer.task_id, "task.completed"))[1])["delivery_proof"] == PROOF


@pytest.mark.one_store
@pytest.mark.parametrize("nothing", [
    {}, {"artifacts": []}, {"artifacts": {"pointers": []}}, {"delivery_proof": {}}], ids=str)
async def test_attaching_nothing_is_refused(gate: harness.Gate, nothing: dict[str, Any]) -> None:
    offer = await gate.leased()
    await gate.as_worker().complete(**harness.under(offer))

    async with gate.unchanged():
        with harness.refused("not_locatable"):
            await gate.as_agent().attach_artifacts(task_id=offer.task_id, **nothing)


@pytest.mark.one_store
@pytest.mark.parametrize("state", ["queued", "leased", "failed", "canceled"])
async def test_artifacts_are_attached_to_succeeded_tasks_only(gate: harness.Gate, state: str) -> None:
    offer = await gate.leased()
    if state == "queued":
        await gate.as_worker().release_lease(**harness.under(offer))
    elif state == "failed":
        await gate.as_worker().fail(**harness.under(offer, error="no"))
    elif state == "canceled":
        await gate.as_agent().cancel_task(task_id=offer.task_id)

    async with gate.unchanged():
        with harness.refused("invalid_state_transition", status=state):
            await gate.as_agent().attach_artifacts(task_id=offer.task_id, artifacts=WHERE)


async def test_a_task_that_asks_for_its_result_inline_is_discharged_by_a_stored_result(gate: harness.Gate) -> None:
    offer = await gate.leased(result_delivery="inline")

    await gate.as_worker().complete(**harness.under(offer, result={"answer": 42}))

    uri = f"asyncgate://asyncgate-1/tasks/{offer.task_id}/result"
    completed = await gate.receipt(offer.task_id, "task.completed")
    assert completed.parents == [offer.obligation_receipt_id]
    assert harness.body(completed)["artifacts"] == [{"type": "asyncgate", "uri": uri}]
    assert await gate.owed() == []


@pytest.mark.one_store
@pytest.mark.parametrize("empty", [None, "", [], {}], ids=repr)
async def test_an_empty_result_is_not_delivered_inline(gate: harness.Gate, empty: Any) -> None:
    offer = await gate.leased(result_delivery="inline")

    await gate.as_worker().complete(**harness.under(offer, result=empty))

    assert len(await gate.owed()) == 1


@pytest.mark.one_store
@pytest.mark.parametrize("result", [0, False, "x", [0]], ids=repr)
async def test_a_small_result_is_delivered_inline_whatever_it_is(gate: harness.Gate, result: Any) -> None:
    offer = await gate.leased(result_delivery="inline")

    await gate.as_worker().complete(**harness.under(offer, result=result))

    assert await gate.owed() == []


async def test_a_small_result_is_in_the_receipts(gate: harness.Gate) -> None:
    offer = await gate.finished()

    completed, ready = (await gate.receipts(offer.task_id))[-2:]
    assert harness.body(completed)["result_payload"] == {"ok": True}
    assert harness.body(ready)["result_payload"] == {"ok": True}
    assert harness.body(ready)["status"] == "succeeded"


async def test_a_large_result_enters_a_receipt_as_its_hash_size_and_how_to_fetch_it(gate: harness.Gate) -> None:
    offer, result = await gate.leased(), "x" * 20_000

    await gate.as_worker().complete(**harness.under(offer, result=result, artifacts=WHERE))

    body, text = harness.body(await gate.receipt(offer.task_id, "task.completed")), msgspec.json.encode(result)
    assert "result_payload" not in body
    assert (body["result_sha256"], body["result_bytes"]) == (hashlib.sha256(text).hexdigest(), len(text))
    assert body["how_to_retrieve"] == {"operation": "get_task", "task_id": offer.task_id}


@pytest.mark.parametrize(("size", "inside"), [(16_384, True), (16_385, False)])
async def test_a_result_up_to_16_kb_enters_its_receipt(gate: harness.Gate, size: int, inside: bool) -> None:
    offer = await gate.leased()

    await gate.as_worker().complete(**harness.under(offer, result="x" * (size - 2)))

    assert ("result_payload" in harness.body(await gate.receipt(offer.task_id, "task.completed"))) is inside


async def test_the_receipt_keeps_summary_and_metadata(gate: harness.Gate) -> None:
    offer = await gate.leased()

    more = {"result_summary": "done", "completion_metadata": {"ms": 5}}
    await gate.as_worker().complete(**harness.under(offer, artifacts=WHERE, **more))

    body = harness.body(await gate.receipt(offer.task_id, "task.completed"))
    assert (body["result_summary"], body["completion_metadata"]) == ("done", {"ms": 5})


@pytest.mark.one_store
async def test_a_waiting_worker_cannot_complete_a_task_in_the_queue(gate: harness.Gate) -> None:
    task_id = await gate.create()

    async with gate.unchanged():
        with harness.refused("lease_invalid_or_expired", reason="unknown"):
            await gate.as_worker().complete(task_id=task_id, lease_id="x", result=1)


@pytest.mark.parametrize(("again", "differs"), [(1, False), (1.0, False), (2, True), ({"n": 1}, True), (None, False)])
async def test_a_repeated_completion_with_another_result_says_so_and_changes_nothing(
        gate: harness.Gate, again: Any, differs: bool) -> None:
    offer = await gate.leased()
    await gate.as_worker().complete(**harness.under(offer, result=1, artifacts=WHERE))

    async with gate.unchanged():
        answer = await gate.as_worker().complete(**harness.under(offer, result=again, artifacts=WHERE))
        [item] = (await gate.as_worker().complete_tasks(tasks=[harness.under(offer, result=again)])).results

    assert (answer.ok, answer.result_differs, item.result_differs) == (True, differs, differs)


async def test_a_repeated_failure_with_another_error_says_so(gate: harness.Gate) -> None:
    offer = await gate.leased()
    first = await gate.as_worker().fail(**harness.under(offer, error="one"))

    same, other = [await gate.as_worker().fail(**harness.under(offer, error=error)) for error in ("one", "two")]

    assert (same, other.error_differs, other.status) == (first, True, "failed")
