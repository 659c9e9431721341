"""Creating tasks: stored members, defaults, idempotency (spec 6.1, 19.3)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from asyncgate.conformance.harness import Gate, body, refused

pytestmark = pytest.mark.anyio


async def test_a_new_task_is_queued_and_owed_to_its_creator(gate: Gate) -> None:
    made = await gate.as_agent("ada").create_task(type="demo", payload=None)

    task = await gate.task(made.task_id)
    assert made.status == task.status == "queued"
    assert (task.created_by.kind, task.created_by.id) == ("agent", "ada")
    assert task.obligation_open
    assert [receipt.receipt_id for receipt in await gate.owed("ada")] == [task.obligation_receipt_id]


async def test_a_task_that_says_nothing_gets_the_defaults_of_spec_19(gate: Gate) -> None:
    task = await gate.task(await gate.create())

    assert (task.priority, task.max_attempts, task.retry_backoff_seconds, task.max_expiries) == (0, 3, 30, 10)
    assert (task.attempt, task.fence, task.expiries) == (0, 0, 0)
    assert (task.held, task.next_eligible_at, task.started_at, task.result, task.leased_to) == (None,) * 5
    assert bytes(task.payload) == b"null"
    assert task.principal_ai == "ada"
    assert task.tenant_id == gate.tenant_id
    assert task.created_at == task.updated_at


async def test_a_task_keeps_all_that_its_creator_said(gate: Gate) -> None:
    terms: dict[str, Any] = {
        "task_summary": "sum", "instructions": "do", "success_criteria": ["a", {"b": 1}], "result_delivery": "artifact",
        "expected_outcome_kind": "file", "expected_artifact_mime": "text/csv", "principal_ai": "claude",
        "payload_pointer": "s3://in", "priority": -3, "max_attempts": 7, "retry_backoff_seconds": 11,
        "max_expiries": 2, "idempotency_key": "k"}

    task = await gate.task(await gate.create(timeouts={"lease_ttl_seconds": 77}, **terms))

    assert {name: getattr(task, name) for name in terms} == terms
    assert task.timeouts is not None
    assert task.timeouts.lease_ttl_seconds == 77


async def test_tags_and_unknown_requirements_are_kept_and_never_matched(gate: Gate) -> None:
    task_id = await gate.create(requirements={"capabilities": [], "tags": ["gpu"], "region": "eu"})

    offer = await gate.claim()

    assert offer is not None
    wanted = {"capabilities": [], "tags": ["gpu"], "region": "eu"}
    assert msgspec.json.decode(offer.requirements) == wanted
    assert msgspec.json.decode((await gate.task(task_id)).requirements) == wanted


@pytest.mark.parametrize("payload", [
    b'{"price":1.10}', b"1e2", b"123456789012345678901234567890", b'{"b":1,"a":2,"b2":{"z":0,"y":0}}', b"-0.0",
    '{"text":"žluťoučký 🐎 \\u00e9 \\ud83d\\ude00"}'.encode(), b"[]", b'""', b"false", b"null",
    b"[1.0,1,10000000000000000000]"],
    ids=range(11))
async def test_a_payload_is_returned_as_the_very_bytes_it_came_as(gate: Gate, payload: bytes) -> None:
    task_id = await gate.create(payload=msgspec.Raw(payload))

    offer = await gate.claim()

    assert offer is not None
    assert bytes(offer.payload) == payload
    assert bytes((await gate.task(task_id)).payload) == payload


async def test_a_result_and_a_progress_are_returned_as_the_very_bytes_they_came_as(gate: Gate) -> None:
    text, offer, w1 = msgspec.Raw(b'{"z":1.10,"a":1e2}'), await gate.leased(), gate.as_worker()

    await w1.report_progress(task_id=offer.task_id, lease_id=offer.lease_id, progress=text)
    await w1.complete(task_id=offer.task_id, lease_id=offer.lease_id, result=text)

    task = await gate.task(offer.task_id)
    assert task.result is not None
    assert bytes(task.progress) == bytes(task.result.result) == bytes(text)


async def test_a_payload_never_enters_a_receipt_but_its_hash_and_size_do(gate: Gate) -> None:
    payload = {"secret": "swordfish", "a": [1, 2]}
    text = msgspec.json.encode(payload)

    task_id = await gate.create(payload=msgspec.Raw(text))

    assigned = await gate.receipt(task_id, "task.assigned")
    assert b"swordfish" not in bytes(assigned.body)
    canonical = msgspec.json.Encoder(order="deterministic").encode(payload)
    assert body(assigned)["payload_sha256"] == hashlib.sha256(canonical).hexdigest()
    assert body(assigned)["payload_bytes"] == len(text)


async def test_the_same_key_from_the_same_creator_returns_the_first_task_and_writes_nothing(gate: Gate) -> None:
    first = await gate.as_agent("ada").create_task(type="demo", payload={"a": 1}, idempotency_key="k")

    async with gate.unchanged():
        again = await gate.as_agent("ada").create_task(type="demo", payload={"a": 1}, idempotency_key="k")

    assert (again.task_id, again.status, again.payload_differs) == (first.task_id, "queued", False)


async def test_a_replayed_create_tells_the_status_of_now(gate: Gate) -> None:
    offer = await gate.finished(idempotency_key="k")

    again = await gate.as_agent("ada").create_task(type="demo", payload=None, idempotency_key="k")

    assert (again.task_id, again.status) == (offer.task_id, "succeeded")


@pytest.mark.one_store
@pytest.mark.parametrize("other", [
    {"payload": {"a": 2}}, {"type": "else", "payload": None}, {"priority": 1}, {"max_attempts": 9},
    {"delay_seconds": 5},
    {"requirements": {"capabilities": ["x"]}}, {"task_summary": "t"}], ids=lambda other: next(iter(other)))
async def test_the_same_key_with_another_body_says_so_and_writes_nothing(gate: Gate, other: dict[str, Any]) -> None:
    ada, first = gate.as_agent("ada"), {"type": "demo", "payload": {"a": 1}, "idempotency_key": "k"}
    made = await ada.create_task(**first)

    async with gate.unchanged():
        again = await ada.create_task(**{**first, **other})

    assert (again.task_id, again.payload_differs) == (made.task_id, True)


@pytest.mark.one_store
async def test_white_space_and_the_order_of_keys_are_no_other_body(gate: Gate) -> None:
    await gate.create(payload=msgspec.Raw(b'{"a":1,"b":2}'), idempotency_key="k")

    spaced = msgspec.Raw(b'{ "b": 2, "a": 1 }')
    again = await gate.as_agent("ada").create_task(type="demo", payload=spaced, idempotency_key="k")

    assert not again.payload_differs


async def test_a_gate_may_refuse_the_same_key_with_another_body(make_gate: Callable[..., Gate]) -> None:
    gate = make_gate(idempotency_mismatch="refuse")
    task_id = await gate.create(payload=1, idempotency_key="k")

    async with gate.unchanged():
        with refused("idempotency_conflict", task_id=task_id):
            await gate.create(payload=2, idempotency_key="k")

    assert await gate.create(payload=1, idempotency_key="k") == task_id


async def test_equal_keys_of_two_creators_are_two_tasks(gate: Gate) -> None:
    assert await gate.create(by="ada", idempotency_key="k") != await gate.create(by="bob", idempotency_key="k")


async def test_equal_keys_of_two_kinds_of_creator_are_two_tasks(gate: Gate) -> None:
    agent = await gate.as_caller("agent", "x", "agent").create_task(type="demo", payload=None, idempotency_key="k")
    human = await gate.as_caller("human", "x", "agent").create_task(type="demo", payload=None, idempotency_key="k")

    assert agent.task_id != human.task_id


async def test_an_instance_is_a_session_and_not_another_creator(gate: Gate) -> None:
    first = await gate.as_agent("ada", instance="one").create_task(type="demo", payload=None, idempotency_key="k")
    again = await gate.as_agent("ada", instance="two").create_task(type="demo", payload=None, idempotency_key="k")

    assert again.task_id == first.task_id


async def test_tasks_without_a_key_are_always_new(gate: Gate) -> None:
    assert await gate.create() != await gate.create()


async def test_a_delayed_task_waits_for_its_time(gate: Gate) -> None:
    task = await gate.task(await gate.create(delay_seconds=60))
    assert task.next_eligible_at is not None
    assert task.next_eligible_at - task.created_at == timedelta(seconds=60)
    assert await gate.claim() is None

    gate.skip(60)

    assert (await gate.claim() or task).task_id == task.task_id
    assert (await gate.task(task.task_id)).status == "leased"


async def test_a_deadline_is_kept(gate: Gate) -> None:
    deadline = datetime(2040, 1, 2, 3, 4, 5, tzinfo=UTC)

    task = await gate.task(await gate.create(timeouts={"deadline": deadline}))

    assert task.timeouts is not None
    assert task.timeouts.deadline == deadline


@pytest.mark.one_store
@pytest.mark.parametrize("by", [
    {"principal_id": "eve", "principal_kind": "service"}, {"created_by": {"kind": "service", "id": "eve"}},
    {"created_by": {"principal_kind": "service", "principal_id": "eve"}}], ids=range(3))
async def test_an_unbound_credential_lets_the_request_name_the_creator(gate: Gate, by: dict[str, Any]) -> None:
    made = await gate.create_task(type="demo", payload=None, **by)

    owner = (await gate.task(made.task_id)).created_by
    assert (owner.kind, owner.id) == ("service", "eve")


@pytest.mark.one_store
async def test_an_agent_id_is_a_principal_of_kind_agent(gate: Gate) -> None:
    made = await gate.create_task(type="demo", payload=None, agent_id="eve")

    owner = (await gate.task(made.task_id)).created_by
    assert (owner.kind, owner.id) == ("agent", "eve")


@pytest.mark.one_store
async def test_explicit_nulls_mean_absent(gate: Gate) -> None:
    task = await gate.task(await gate.create(priority=None, max_attempts=None, timeouts=None, requirements=None,
                                             idempotency_key=None, created_by=None, delay_seconds=None))

    assert (task.priority, task.max_attempts, task.idempotency_key, task.next_eligible_at) == (0, 3, None, None)


@pytest.mark.one_store
async def test_unknown_fields_change_nothing(gate: Gate) -> None:
    assert (await gate.task(await gate.create(colour="red"))).status == "queued"


@pytest.mark.one_store
async def test_nothing_turns_the_assignment_off(gate: Gate) -> None:
    """Spec 18.6 names `emit_assignment_receipt`; the receipt is the obligation (PH.1), so there is no such choice."""
    task_id = await gate.create(emit_assignment_receipt=False)

    assert [receipt.receipt_type for receipt in await gate.receipts(task_id)] == ["task.assigned"]
    assert [receipt.task_id for receipt in await gate.owed()] == [task_id]
