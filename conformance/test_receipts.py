"""Receipts: those of each step, their parties, and their hashes (spec 14, H.3, PH.5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.conformance import harness
from asyncgate.parts.model import wire
from asyncgate.parts.model.settings import ReceiptSettings

pytestmark = pytest.mark.anyio

ADA, W1, GATE = "agent ada", "worker w1", "asyncgate"
# Type, sender, recipient and parent's type of every receipt in a life of a task.
CLAIMED = [("task.assigned", ADA, ADA, None), ("task.accepted", W1, GATE, "task.assigned")]
LIVES: dict[str, list[tuple[str, str, str, str | None]]] = {
    "created": CLAIMED[:1],
    "claimed": CLAIMED,
    "completed": [*CLAIMED, ("task.completed", W1, GATE, "task.assigned"),
                  ("task.result_ready", GATE, ADA, "task.completed")],
    "completed nowhere": [*CLAIMED, ("task.completed", W1, GATE, None),
                          ("task.result_ready", GATE, ADA, "task.completed"),
                          ("system.anomaly", GATE, ADA, None)],
    "failed": [*CLAIMED, ("task.failed", W1, GATE, "task.assigned"), ("task.result_ready", GATE, ADA, "task.failed")],
    "requeued": [*CLAIMED, ("task.failed", W1, GATE, "task.accepted")],
    "canceled": [*CLAIMED[:1], ("task.canceled", ADA, GATE, "task.assigned"),
                 ("task.result_ready", GATE, ADA, "task.canceled")],
    "canceled on lease": [*CLAIMED, ("task.canceled", ADA, GATE, "task.assigned"),
                          ("task.result_ready", GATE, ADA, "task.canceled")],
    "expired": [*CLAIMED, ("lease.expired", GATE, ADA, "task.accepted")],
    "released": [*CLAIMED, ("lease.expired", GATE, ADA, "task.accepted")],
}
STATED = {      # spec 14.1-14.7: the required members of a body
    "task.assigned": {"type", "payload_sha256", "payload_bytes", "requirements", "schema_version"},
    "task.accepted": {"worker_capabilities", "attempt", "fence", "schema_version"},
    "task.completed": {"schema_version"},
    "task.failed": {"error", "attempt", "requeued", "retry_recommended", "schema_version"},
    "task.canceled": {"canceled_by", "schema_version"},
    "task.result_ready": {"status", "schema_version"},
    "lease.expired": {"task_id", "previous_worker_id", "attempt", "requeued", "reason", "schema_version"},
    "system.anomaly": {"kind", "details", "recommended_action", "schema_version"},
}


async def live(gate: harness.Gate, life: str) -> str:
    """Run a task through one of the lives."""
    ada, w1 = gate.as_agent("ada"), gate.as_worker("w1")
    task_id = await gate.create(requirements={"capabilities": []})
    if life in ("created", "canceled"):
        if life == "canceled":
            await ada.cancel_task(task_id=task_id)
        return task_id
    offer = (await w1.lease_next(capabilities=["x"])).tasks[0]
    match life:
        case "completed": await w1.complete(**harness.under(offer, result=1, artifacts=[{"uri": "x"}]))
        case "completed nowhere": await w1.complete(**harness.under(offer, result=1))
        case "failed": await w1.fail(**harness.under(offer, error="x"))
        case "requeued": await w1.fail(**harness.under(offer, error="x", retryable=True))
        case "canceled on lease": await ada.cancel_task(task_id=task_id)
        case "expired": await gate.wait(301)
        case "released": await w1.release_lease(**harness.under(offer))
    return task_id


def told(receipts: list[wire.ReceiptRecord]) -> list[tuple[str, str, str, str | None]]:
    """Return type, sender, recipient and parent's type of receipts, without the gate's name."""
    types = {receipt.receipt_id: receipt.receipt_type for receipt in receipts}

    def end(who: Any) -> str:
        return GATE if who.kind == "asyncgate" else str(who)
    assert all(len(receipt.parents) <= 1 for receipt in receipts)
    return [(r.receipt_type, end(r.sender), end(r.to), types[r.parents[0]] if r.parents else None) for r in receipts]


@pytest.mark.parametrize("life", LIVES)
async def test_each_step_writes_exactly_its_receipts(gate: harness.Gate, life: str) -> None:
    task_id = await live(gate, life)

    assert sorted(told(await gate.receipts(task_id)), key=str) == sorted(LIVES[life], key=str)
    assert await gate.receipts() == await gate.receipts(task_id)


@pytest.mark.one_store
@pytest.mark.parametrize("life", LIVES)
async def test_a_receipt_says_what_spec_14_wants(gate: harness.Gate, life: str) -> None:
    for receipt in await gate.receipts(await live(gate, life)):
        assert harness.body(receipt).keys() >= STATED[receipt.receipt_type]
        assert harness.body(receipt)["schema_version"] == "1"
        assert receipt.tenant_id == gate.tenant_id
        assert receipt.asyncgate_instance == "asyncgate-1"


@pytest.mark.one_store
@pytest.mark.parametrize("life", LIVES)
async def test_receipts_under_a_lease_name_it(gate: harness.Gate, life: str) -> None:
    receipts = await gate.receipts(await live(gate, life))

    leases = {receipt.lease_id for receipt in receipts if receipt.receipt_type == "task.accepted"}
    for receipt in receipts:
        if receipt.receipt_type in ("task.completed", "task.failed", "lease.expired"):
            assert {receipt.lease_id} == leases


async def test_an_accepted_receipt_says_attempt_fence_and_capabilities(gate: harness.Gate) -> None:
    accepted = await gate.receipt(await live(gate, "claimed"), "task.accepted")

    body = harness.body(accepted)
    assert (body["attempt"], body["fence"], body["worker_capabilities"]) == (0, 1, ["x"])


async def test_a_gate_lists_a_receipt_as_it_shows_it_alone(gate: harness.Gate) -> None:
    for receipt in await gate.receipts(await live(gate, "completed")):
        assert await gate.as_admin().get_receipt(receipt_id=receipt.receipt_id) == receipt


async def program(gate: harness.Gate) -> list[wire.ReceiptRecord]:
    """Run a program that uses every kind of receipt."""
    for life in LIVES:
        if life != "expired":
            await live(gate, life)
            while (offer := await gate.claim("w9")) is not None:
                await gate.as_worker("w9").complete(**harness.under(offer, artifacts=[{"uri": "x"}]))
    return await gate.receipts()


async def test_equal_programs_write_equal_hashes_on_every_backend(gate: harness.Gate) -> None:
    other = await open_backend("memory:")
    there = harness.Gate(Engine(other), "22222222-2222-4222-8222-222222222222")
    gate.backend.backend.ids, other.ids = harness.Numbered(), harness.Numbered()    # type: ignore[attr-defined]

    mine, theirs = await program(gate), await program(there)

    assert [receipt.hash for receipt in mine] == [receipt.hash for receipt in theirs]
    assert len({receipt.hash for receipt in mine}) == len(mine)


async def test_a_hash_leaves_out_ids_times_and_the_gates_name(make_gate: Callable[..., harness.Gate]) -> None:
    first, second = make_gate(instance_id="one"), make_gate(instance_id="two")
    hashes = []
    for gate in (first, second):
        gate.skip(17)
        gate.backend.backend.ids = harness.Numbered()   # type: ignore[attr-defined]
        hashes.append([receipt.hash for receipt in await program(gate)])
        assert all(len(seal) == 64 and int(seal, 16) for seal in hashes[-1])

    assert hashes[0] == hashes[1]


async def test_an_ack_is_a_receipt_and_changes_nothing_else(gate: harness.Gate) -> None:
    offer = await gate.finished()
    ready = await gate.receipt(offer.task_id, "task.result_ready")
    before = await gate.task(offer.task_id)

    answer = await gate.as_agent("ada").ack_receipt(receipt_id=ready.receipt_id)

    ack = await gate.receipt(offer.task_id, "receipt.acknowledged")
    assert (answer.ok, answer.receipt_id) == (True, ack.receipt_id)
    assert (str(ack.sender), ack.to.kind, ack.parents) == ("agent ada", "asyncgate", [ready.receipt_id])
    assert await gate.task(offer.task_id) == before


async def test_an_ack_discharges_nothing(gate: harness.Gate) -> None:
    owed = (await gate.owed()) or [await gate.receipt(await gate.create(), "task.assigned")]

    await gate.as_agent("ada").ack_receipt(receipt_id=owed[0].receipt_id)

    assert len(await gate.owed()) == 1


async def test_the_same_ack_again_returns_the_first_and_writes_nothing(gate: harness.Gate) -> None:
    assigned = await gate.receipt(await gate.create(), "task.assigned")
    first = await gate.as_agent("ada").ack_receipt(receipt_id=assigned.receipt_id)

    async with gate.unchanged():
        assert await gate.as_agent("ada").ack_receipt(receipt_id=assigned.receipt_id) == first


async def test_acks_of_two_receipts_of_one_task_are_two(gate: harness.Gate) -> None:
    offer = await gate.finished()
    inbox = await gate.receipts(offer.task_id, to_kind="agent", to_id="ada")

    for receipt in inbox:
        await gate.as_agent("ada").ack_receipt(receipt_id=receipt.receipt_id)

    acks = await gate.receipts(offer.task_id, "receipt.acknowledged")
    assert [ack.parents for ack in acks] == [[receipt.receipt_id] for receipt in inbox]
    assert len(acks) == 2


async def test_what_lies_in_anothers_inbox_cannot_be_acknowledged(gate: harness.Gate) -> None:
    assigned = await gate.receipt(await gate.create(by="ada"), "task.assigned")

    async with gate.unchanged():
        with harness.refused("forbidden"):
            await gate.as_agent("bob").ack_receipt(receipt_id=assigned.receipt_id)


async def test_an_unknown_receipt_is_not_found(gate: harness.Gate) -> None:
    with harness.refused("receipt_not_found"):
        await gate.as_agent().ack_receipt(receipt_id="none")
    with harness.refused("receipt_not_found"):
        await gate.as_agent().get_receipt(receipt_id="none")


@pytest.mark.one_store
@pytest.mark.parametrize("type", ["task.assigned", "task.accepted", "system.anomaly", "made.up"])
async def test_nobody_offers_a_receipt_that_a_step_writes(gate: harness.Gate, type: str) -> None:
    async with gate.unchanged():
        with harness.refused("invalid_request"):
            await gate.as_worker().emit_receipt(receipt_type=type)


@pytest.mark.one_store
@pytest.mark.parametrize("type", ["task.completed", "task.failed", "task.canceled", "schedule.deleted"])
async def test_a_terminal_receipt_without_parents_is_refused(gate: harness.Gate, type: str) -> None:
    async with gate.unchanged():
        with harness.refused("parents_required"):
            await gate.as_worker().emit_receipt(receipt_type=type, parents=[])


async def test_parents_must_exist(gate: harness.Gate) -> None:
    async with gate.unchanged():
        with harness.refused("parent_not_found"):
            await gate.as_worker().emit_receipt(receipt_type="task.completed", parents=["none"])


async def test_a_receipt_has_a_hundred_artifacts_at_most(gate: harness.Gate) -> None:
    offer = await gate.leased()

    async with gate.unchanged():
        with harness.refused("too_many_artifacts"):
            await gate.as_worker().complete(**harness.under(offer, artifacts=[{"uri": f"f:{n}"} for n in range(101)]))

    assert (await gate.as_worker().complete(**harness.under(offer,
                                                            artifacts=[{"uri": f"f:{n}"} for n in range(100)]))).ok


async def test_a_receipt_body_is_64_kb_at_most_and_nothing_is_written_otherwise(gate: harness.Gate) -> None:
    offer = await gate.leased()

    async with gate.unchanged():
        with harness.refused("receipt_too_large"):
            await gate.as_worker().complete(**harness.under(offer, artifacts=[{"uri": "x" * 70_000}]))
    async with gate.unchanged():
        with harness.refused("receipt_too_large"):
            await gate.create(success_criteria="x" * 70_000)


async def test_the_refusal_of_a_large_receipt_says_what_receipts_are(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(receipts=ReceiptSettings(max_body_size_bytes=300))

    with pytest.raises(Exception, match=r"Receipt bodies are contracts, not chat messages\."):
        await gate.create(task_summary="x" * 300)
