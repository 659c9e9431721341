"""What a ledger elsewhere keeps of somebody who is erased: a task asks for it, and is owed until it is completed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from asyncgate.conformance.harness import Gate, under
from asyncgate.conformance.test_erasure import MARK, live, text_of
from asyncgate.extras.ledger.outbox import Ledger
from asyncgate.parts.model.settings import LedgerSettings

pytestmark = pytest.mark.anyio


@pytest.fixture
def gate(make_gate: Callable[..., Gate]) -> Gate:
    """A gate whose receipts go to a ledger, and nobody sends them yet."""
    gate = make_gate(receipt_mode="memorygate_integrated", ledger=LedgerSettings(url="http://127.0.0.1:9"))
    gate.engine.extend(Ledger(gate.engine))
    return gate


async def test_the_request_is_a_task_that_names_nobody_and_is_owed_to_who_asked(gate: Gate) -> None:
    await gate.create(by=MARK, payload=MARK)
    admin = gate.as_admin()
    planned = await admin.erase_principal(principal_kind="agent", principal_id=MARK, plan=True)
    assert "erasure.ledger" in " ".join(planned.afterwards)
    assert planned.ledger_task_id is None

    report = await admin.erase_principal(principal_kind="agent", principal_id=MARK, confirm=MARK)
    await admin.erase_principal(principal_kind="worker", principal_id=MARK, confirm=MARK)

    asked = await admin.get_task(task_id=report.ledger_task_id)
    assert (asked.type, asked.status) == ("erasure.ledger", "queued")
    assert json.loads(bytes(asked.payload))["erasure_id"] == report.erasure_id
    assert MARK not in await text_of(gate)
    owed = (await admin.list_open_obligations(principal_kind=asked.created_by.kind,
                                              principal_id=asked.created_by.id)).open_obligations
    assert asked.task_id in [obligation.task_id for obligation in owed]

    offer = await gate.claim(accept_types=["erasure.ledger"])
    assert offer is not None
    assert offer.task_id == asked.task_id
    await gate.as_worker().complete(**under(offer), result={"answer": "they are gone"}, artifacts=[])
    assert (await admin.get_task(task_id=asked.task_id)).status == "succeeded"


async def test_a_gate_without_a_ledger_asks_nobody(make_gate: Callable[..., Gate]) -> None:
    gate = make_gate(receipt_mode="standalone")
    await live(gate)

    report = await gate.as_admin().erase_principal(principal_kind="agent", principal_id=MARK, confirm=MARK)

    assert report.state == "erased"
    assert report.ledger_task_id is None
