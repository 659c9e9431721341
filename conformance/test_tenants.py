"""Tenants: one cannot see, change or guess the data of another (spec 21)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncgate.conformance import harness
from asyncgate.parts.model import errors

pytestmark = pytest.mark.anyio

# Every operation with an id, and the source of the id.
NAMING: dict[str, dict[str, Any]] = {
    "get_task": {"task_id": "task"}, "get_task_history": {"task_id": "task"}, "cancel_task": {"task_id": "task"},
    "explain_task": {"task_id": "task"}, "release_hold": {"task_id": "task"},
    "attach_artifacts": {"task_id": "task", "artifacts": [{"uri": "x"}]},
    "list_receipts": {"task_id": "task"}, "renew_lease": {"task_id": "task", "lease_id": "lease"},
    "start_task": {"task_id": "task", "lease_id": "lease"}, "release_lease": {"task_id": "task", "lease_id": "lease"},
    "report_progress": {"task_id": "task", "lease_id": "lease", "progress": 1}, "complete": {"task_id": "task",
                                                                                             "lease_id": "lease"},
    "request_input": {"task_id": "task", "lease_id": "lease", "key": "a", "message": "?"},
    "answer_input": {"task_id": "task", "key": "a", "action": "accept"}, "list_inputs": {"task_id": "task"},
    "record_step": {"task_id": "task", "lease_id": "lease", "seq": 1, "name": "a", "value": 1},
    "list_steps": {"task_id": "task"}, "wait_tasks": {"parent_task_id": "task"},
    "read_output": {"task_id": "task"},
    "append_output": {"task_id": "task", "lease_id": "lease", "chunks": ["a"]},
    "fail": {"task_id": "task", "lease_id": "lease", "error": "no"}, "get_receipt": {"receipt_id": "receipt"},
    "ack_receipt": {"receipt_id": "receipt"},
    "emit_receipt": {"receipt_type": "schedule.deleted", "parents": ["receipt"]},
    "check_terminator": {"parent_receipt_id": "receipt"},
}


async def answer(view: Any, operation: str, names: dict[str, str]) -> Any:
    """Return the answer of an operation with these ids; mask the ids."""
    def put(value: Any) -> Any:
        return [put(item) for item in value] if isinstance(value, list) else names.get(value, value) if isinstance(
            value, str) else value
    try:
        text = repr(await getattr(view, operation)(**{name: put(value) for name, value in NAMING[operation].items()}))
    except errors.GateError as refusal:
        text = f"{refusal.code} {refusal} {refusal.more}"
    for name in names.values():
        text = text.replace(name, "…")
    return text


@pytest.mark.parametrize("operation", NAMING)
async def test_a_foreign_id_is_answered_like_an_unknown_one(gate: harness.Gate, operation: str) -> None:
    offer, there = await gate.leased(), gate.stranger()
    foreign = {"task": offer.task_id, "lease": offer.lease_id, "receipt": offer.obligation_receipt_id}
    unknown = dict.fromkeys(foreign, "unknown")

    async with gate.unchanged():
        for view in (there.as_admin(), there.as_agent("ada"), there.as_worker("w1")):
            assert await answer(view, operation, foreign) == await answer(view, operation, unknown)


async def test_a_foreign_lease_is_not_renewed_by_its_id_alone(gate: harness.Gate) -> None:
    offer = await gate.leased()

    async with gate.unchanged():
        with harness.refused("lease_invalid_or_expired", reason="unknown"):
            await gate.stranger().as_worker("w1").renew_lease(lease_id=offer.lease_id)


async def test_no_list_shows_anything_of_another_tenant(gate: harness.Gate) -> None:
    await gate.finished()
    await gate.leased("w1")
    there = gate.stranger()
    admin = there.as_admin()

    assert (await admin.list_tasks()).tasks == []
    assert (await admin.list_receipts()).receipts == []
    assert (await there.as_worker("w1").list_leases()).leases == []
    assert await there.owed("ada") == []
    assert (await there.as_agent("ada").bootstrap()).attention.inbox_receipts == []
    assert (await there.everything()) == {name: [] for name in await there.everything()}


async def test_work_of_another_tenant_is_never_offered(gate: harness.Gate) -> None:
    await gate.create()
    there = gate.stranger()

    assert await there.claim() is None
    mine = await there.create()
    offer = await there.claim()

    assert offer is not None
    assert (offer.task_id, offer.tenant_id) == (mine, there.tenant_id)


async def test_equal_keys_in_two_tenants_are_two_tasks(gate: harness.Gate) -> None:
    assert await gate.create(idempotency_key="k") != await gate.stranger().create(idempotency_key="k")


async def test_equal_claim_ids_in_two_tenants_are_two_claims(gate: harness.Gate) -> None:
    there = gate.stranger()
    mine, theirs = await gate.create(), await there.create()

    offers = [await where.claim("w1", claim_id="c") for where in (gate, there)]

    assert [offer and offer.task_id for offer in offers] == [mine, theirs]


async def test_equal_ids_in_two_tenants_are_two_of_everything(gate: harness.Gate) -> None:
    there, lives = gate.stranger(), []
    for where in (gate, there):
        where.backend.backend.ids = harness.Numbered()      # type: ignore[attr-defined]
        offer = await where.finished(payload=where.tenant_id)
        await where.create()
        lives.append(offer)
    assert lives[0].task_id == lives[1].task_id

    for where in (gate, there):
        assert where.tenant_id.encode() in bytes((await where.task(lives[0].task_id)).payload)
        assert len(await where.receipts()) == 5
        assert len(await where.owed()) == 1
    await gate.as_agent().cancel_task(task_id=(await gate.owed())[0].task_id)
    assert (len(await gate.owed()), len(await there.owed())) == (0, 1)


async def test_a_schedule_id_belongs_to_one_tenant(gate: harness.Gate) -> None:
    there = gate.stranger()
    for where in (gate, there):
        offer = await where.leased("cron", type="schedule.create")
        ask = harness.under(offer, receipt_type="schedule.created", schedule_id="s1")
        assert (await where.as_worker("cron").emit_receipt(**ask)).ok

    assert len(await gate.owed()) == len(await there.owed()) == 2


async def test_the_sweep_writes_each_tenants_receipts_to_that_tenant(gate: harness.Gate) -> None:
    there = gate.stranger()
    mine, theirs = await gate.leased(), await there.leased()

    await gate.wait(301)

    assert (await gate.receipt(None, "lease.expired")).task_id == mine.task_id
    assert (await there.receipt(None, "lease.expired")).task_id == theirs.task_id


@pytest.mark.one_store
async def test_a_tenant_id_that_is_not_the_credentials_own_is_refused(gate: harness.Gate) -> None:
    async with gate.unchanged():
        with harness.refused("tenant_mismatch"):
            await gate.as_agent().create_task(type="demo", payload=None, tenant_id=gate.stranger().tenant_id)
        with harness.refused("tenant_mismatch"):
            await gate.as_agent().create_task(type="demo", payload=None, tenant_id="default")

    assert (await gate.as_agent().create_task(type="demo", payload=None, tenant_id=gate.tenant_id)).status == "queued"


@pytest.mark.one_store
async def test_the_default_tenant_answers_to_the_name_default(make_gate: Callable[..., harness.Gate]) -> None:
    tenant_id = make_gate().tenant_id
    gate = harness.Gate(make_gate(default_tenant_id=tenant_id).engine, tenant_id)

    assert (await gate.as_agent().create_task(type="demo", payload=None, tenant_id="default")).status == "queued"
