"""Integrated mode keeps each receipt for the ledger in the transaction that writes it (spec 20.12)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from asyncgate.conformance.harness import Gate, under
from asyncgate.extras.ledger.outbox import Ledger
from asyncgate.parts.model.queries import OutboxFilter, ReceiptFilter, Rows
from asyncgate.parts.model.settings import LedgerSettings
from asyncgate.parts.model.stored import Receipt

pytestmark = pytest.mark.anyio
LEDGER = LedgerSettings(url="http://127.0.0.1:9")


@pytest.fixture
def gate(make_gate: Callable[..., Gate]) -> Gate:
    """A gate whose receipts go to a ledger, and nobody sends them yet."""
    gate = make_gate(receipt_mode="memorygate_integrated", ledger=LEDGER)
    gate.engine.extend(Ledger(gate.engine))
    return gate


async def outbox(gate: Gate) -> list[dict[str, Any]]:
    return [json.loads(row.content) for row in await gate.backend.page(gate.tenant_id, OutboxFilter("", 1000))]


async def test_every_receipt_waits_whole_and_leaves_a_skeleton(gate: Gate) -> None:
    offer = await gate.finished()

    waiting = await outbox(gate)
    stored = await gate.backend.page(gate.tenant_id, Rows(Receipt))

    types = ["task.assigned", "task.accepted", "task.completed", "task.result_ready"]
    assert [receipt["receipt_type"] for receipt in waiting] == types
    assert [(receipt["receipt_id"], receipt["receipt_key"], receipt["hash"], receipt["parents"])
            for receipt in waiting] == [
        (row.receipt_id, row.receipt_key, row.hash, list(row.parents)) for row in stored]
    assert {row.body for row in stored} == {""}
    assert waiting[2]["body"]["artifacts"] == [{"uri": "file:///out"}]
    assert {receipt["task_id"] for receipt in waiting} == {offer.task_id}


async def test_a_receipt_that_was_written_before_is_not_sent_again(gate: Gate) -> None:
    offer = await gate.finished()
    [receipt] = await gate.backend.page(gate.tenant_id, of_type("task.result_ready"))
    await gate.as_agent().ack_receipt(receipt_id=receipt.receipt_id)
    before = await outbox(gate)

    await gate.as_agent().ack_receipt(receipt_id=receipt.receipt_id)
    await gate.as_worker().complete(**under(offer), result={"ok": True}, artifacts=[{"uri": "file:///out"}])

    assert await outbox(gate) == before
    assert len(before) == 5


async def test_what_a_step_takes_back_is_not_sent(gate: Gate) -> None:
    made = await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None},
                                                     {"type": "demo", "payload": None, "tenant_id": "another"}])

    assert [item.error is None for item in made.results] == [True, False]
    assert [receipt["task_id"] for receipt in await outbox(gate)] == [made.results[0].task_id]


async def test_a_release_can_be_repeated_although_its_receipt_has_left_its_body(gate: Gate) -> None:
    first = await gate.leased("w1")
    await gate.as_worker("w1").release_lease(**under(first))
    assert await gate.claim("w2") is not None

    again = await gate.as_worker("w1").release_lease(**under(first))

    assert (again.ok, again.requeued) == (True, True)
    assert len([receipt for receipt in await outbox(gate) if receipt["receipt_type"] == "lease.expired"]) == 1


async def test_what_waits_is_counted_for_each_tenant(gate: Gate) -> None:
    await gate.create()
    other = gate.stranger()
    await other.leased()

    assert {gate.tenant_id, other.tenant_id} <= set(await gate.backend.unsent())
    assert [(lag.waiting, lag.parked)
            for lag in [await gate.backend.lag(peer.tenant_id) for peer in (gate, other)]] == [
        (1, 0), (2, 0)]


async def test_a_standalone_gate_has_an_empty_outbox(make_gate: Callable[..., Gate]) -> None:
    gate = make_gate()
    await gate.finished()

    assert await outbox(gate) == []
    assert gate.tenant_id not in await gate.backend.unsent()


def of_type(receipt_type: str) -> Any:
    return ReceiptFilter(None, None, receipt_type, None, 10)
