"""Escalation: lost leases and spent attempts are reported to the configured targets; nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncgate.conformance.harness import Gate, body, under
from asyncgate.parts.model import wire
from asyncgate.parts.model.settings import EscalationSettings, EscalationTarget

pytestmark = pytest.mark.anyio

FALLBACK = EscalationTarget(escalation_class=1, to_kind="worker", to_id="fallback")
HUMAN = EscalationTarget(escalation_class=2, to_kind="human", to_id="grace")
MakeGate = Callable[..., Gate]


def escalating(*targets: EscalationTarget, **more: Any) -> dict[str, Any]:
    """Return settings with escalation enabled."""
    return {"escalation": EscalationSettings(enabled=True, targets=targets or (FALLBACK, HUMAN), **more)}


async def told(gate: Gate, to: EscalationTarget = FALLBACK) -> list[wire.ReceiptRecord]:
    """Return the escalations in a principal's inbox."""
    view = gate.as_caller(to.to_kind, to.to_id, "worker" if to.to_kind == "worker" else "agent")
    page = await view.list_receipts(receipt_type="task.escalated")
    receipts: list[wire.ReceiptRecord] = page.receipts
    return receipts


async def test_nothing_is_escalated_unless_that_is_enabled(make_gate: MakeGate) -> None:
    gate = make_gate(escalation=EscalationSettings(targets=(FALLBACK,)))

    await gate.lose(await gate.leased())

    assert await told(gate) == []


async def test_a_lost_lease_is_told_to_the_target_once(make_gate: MakeGate) -> None:
    gate = make_gate(**escalating())
    offer = await gate.leased(expected_artifact_mime="text/html")

    await gate.lose(offer)
    await gate.wait(600)

    (receipt,) = await told(gate)
    assert (receipt.sender.kind, receipt.to.id, receipt.lease_id) == ("asyncgate", "fallback", offer.lease_id)
    assert receipt.parents == [offer.obligation_receipt_id]
    assert body(receipt) == {
        "escalation_class": 1, "escalation_reason": "lease_expired", "attempt": 0, "expiries": 1, "type": offer.type,
        "escalation_to": {"kind": "worker", "id": "fallback"}, "previous_worker_id": "w1", "schema_version": "1",
        "expected_artifact_mime": "text/html"}


async def test_an_escalation_moves_nothing(make_gate: MakeGate) -> None:
    gate, plain = make_gate(**escalating()), make_gate()
    tasks, owed = [], []
    for peer in (gate, plain):
        offer = await peer.leased()
        await peer.lose(offer)
        task = await peer.task(offer.task_id)
        tasks.append((task.status, task.attempt, task.expiries, task.created_by, task.obligation_open))
        owed.append(len((await peer.as_agent("ada").list_open_obligations()).open_obligations))
        assert (await peer.as_worker("fallback").list_open_obligations()).open_obligations == []
        checked = await peer.as_agent("ada").check_terminator(parent_receipt_id=offer.obligation_receipt_id)
        assert not checked.has_terminator

    assert tasks[0] == tasks[1]
    assert owed == [1, 1]


async def test_anybody_may_take_up_an_escalated_task_and_end_it(make_gate: MakeGate) -> None:
    gate = make_gate(**escalating(), expiry_jitter_seconds=0.0)
    await gate.lose(await gate.leased())

    offer = await gate.claim("w2")
    assert offer is not None
    await gate.as_worker("w2").complete(**under(offer, artifacts=[{"uri": "file:///a"}]))

    assert (await gate.as_agent("ada").list_open_obligations()).open_obligations == []


async def test_every_lost_lease_is_a_cause_of_its_own(make_gate: MakeGate) -> None:
    gate = make_gate(**escalating(), expiry_jitter_seconds=0.0)
    offer = await gate.leased()
    await gate.lose(offer)
    again = await gate.claim("w2")
    assert again is not None
    await gate.lose(again)

    assert [receipt.lease_id for receipt in await told(gate)] == [offer.lease_id, again.lease_id]


async def test_a_lease_that_is_given_back_is_not_escalated(make_gate: MakeGate) -> None:
    gate = make_gate(**escalating())
    offer = await gate.leased()

    await gate.as_worker().release_lease(**under(offer))

    assert await told(gate) == []


async def test_the_payload_may_name_another_class(make_gate: MakeGate) -> None:
    gate = make_gate(**escalating())

    for payload in ({"escalation_class": 2}, {"escalation_class": 3}, {"escalation_class": "2"}, {}, [2]):
        await gate.leased(payload=payload)
    await gate.wait(301)

    assert [body(receipt)["escalation_class"] for receipt in await told(gate, HUMAN)] == [2]
    assert [body(receipt)["escalation_class"] for receipt in await told(gate)] == [1, 1, 1]


async def test_spent_attempts_are_escalated_and_a_final_failure_is_not(make_gate: MakeGate) -> None:
    gate = make_gate(**escalating(attempts_spent_class=2))
    for max_attempts, retryable in ((1, True), (2, True), (1, False)):
        offer = await gate.leased(max_attempts=max_attempts)
        await gate.as_worker().fail(**under(offer, retryable=retryable, error="no"))

    (receipt,) = await told(gate, HUMAN)
    assert body(receipt)["escalation_reason"] == "max_retries_exceeded"
    assert await told(gate) == []


async def test_a_target_of_one_tenant_is_told_of_no_other(make_gate: MakeGate) -> None:
    elsewhere = EscalationTarget(escalation_class=1, to_kind="worker", to_id="fallback",
                                 tenant_id="11111111-1111-4111-8111-111111111111")
    gate = make_gate(**escalating(elsewhere))

    await gate.lose(await gate.leased())

    assert await told(gate) == []


async def test_what_is_said_for_a_tenant_goes_before_what_is_said_for_all(make_gate: MakeGate) -> None:
    probe = make_gate()
    own = EscalationTarget(escalation_class=1, to_kind="human", to_id="grace", tenant_id=probe.tenant_id)
    rules = EscalationSettings(enabled=True, targets=(FALLBACK, own))

    assert rules.target(probe.tenant_id, 1) == own
    assert rules.target("11111111-1111-4111-8111-111111111111", 1) == FALLBACK
    assert rules.target(probe.tenant_id, 2) is None


async def test_no_other_tenant_sees_an_escalation(make_gate: MakeGate) -> None:
    gate, other = make_gate(**escalating()), make_gate(**escalating())

    await gate.lose(await gate.leased())

    assert len(await told(gate)) == 1
    assert await told(other) == []
