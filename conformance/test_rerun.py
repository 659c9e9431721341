"""Running an ended task again: a new task with its contract, linked to its end, which never changes (I7)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from asyncgate.conformance import harness
from asyncgate.parts.model import wire

pytestmark = pytest.mark.anyio

SAID: dict[str, Any] = {
    "type": "demo", "payload": msgspec.Raw(b'{"n": 1.10}'), "payload_pointer": "s3://in", "priority": 4,
    "max_attempts": 7, "retry_backoff_seconds": 11, "max_expiries": 2, "principal_ai": "claude",
    "requirements": {"capabilities": [], "tags": ["x"]}, "task_summary": "sum", "instructions": "do",
    "success_criteria": ["a"], "expected_outcome_kind": "file", "expected_artifact_mime": "text/csv",
    "result_delivery": "artifact"}
CONTRACT = ("type", "payload", "payload_pointer", "priority", "max_attempts", "retry_backoff_seconds", "max_expiries",
            "principal_ai", "requirements", *(name for name in wire.Terms.__struct_fields__ if name != "timeouts"))


def contract(task: wire.TaskRecord) -> list[Any]:
    """What was agreed about a task."""
    return [getattr(task, name) for name in CONTRACT]


async def ended(gate: harness.Gate, how: str, **fields: Any) -> str:
    """Bring a task to its end; return its id."""
    if how == "canceled":
        task_id = await gate.create(**fields)
        await gate.as_agent().cancel_task(task_id=task_id)
        return task_id
    if how == "succeeded":
        return (await gate.finished(**fields)).task_id
    offer = await gate.leased(**fields)
    if how == "failed":
        await gate.as_worker().fail(**harness.under(offer), error="no")
    else:
        await gate.as_worker().complete(**harness.under(offer), result={"n": 1})
    return offer.task_id


@pytest.mark.parametrize("how", ["succeeded", "failed", "canceled", "succeeded without a place"])
async def test_an_ended_task_is_run_again_as_a_new_one_with_its_contract(gate: harness.Gate, how: str) -> None:
    task_id = await ended(gate, how, **SAID)
    before = await gate.task(task_id)

    made = await gate.as_agent().rerun_task(task_id=task_id)

    again = await gate.task(made.task_id)
    assert made.task_id != task_id
    assert (again.status, again.attempt, again.fence, again.rerun_of) == ("queued", 0, 0, task_id)
    assert contract(again) == contract(before)
    assert (again.created_by.id, again.obligation_open, before.rerun_of) == ("ada", True, None)
    assert await gate.task(task_id) == before       # I7
    offer = await gate.claim()
    assert offer is not None
    assert (offer.task_id, bytes(offer.payload)) == (made.task_id, b'{"n": 1.10}')


@pytest.mark.parametrize(("how", "type"), [
    ("succeeded", "task.completed"), ("failed", "task.failed"), ("canceled", "task.canceled"),
    ("succeeded without a place", "task.completed")])
async def test_its_assignment_has_the_end_of_the_first_task_as_parent(gate: harness.Gate, how: str, type: str) -> None:
    task_id = await ended(gate, how)
    end = await gate.receipt(task_id, type)

    made = await gate.as_agent().rerun_task(task_id=task_id)

    assigned = await gate.receipt(made.task_id, "task.assigned")
    assert assigned.parents == [end.receipt_id]
    assert harness.body(assigned)["rerun_of"] == task_id
    assert (str(assigned.sender), str(assigned.to)) == ("agent ada", "agent ada")


async def test_the_end_is_that_of_the_last_attempt(gate: harness.Gate) -> None:
    offer = await gate.leased(retry_backoff_seconds=0)
    await gate.as_worker().fail(**harness.under(offer), error="no", retryable=True)
    last = await gate.claim()
    assert last is not None
    await gate.as_worker().fail(**harness.under(last), error="no")

    made = await gate.as_agent().rerun_task(task_id=offer.task_id)

    _, failed = await gate.receipts(offer.task_id, "task.failed")
    assert (await gate.receipt(made.task_id, "task.assigned")).parents == [failed.receipt_id]


async def test_both_are_owed_and_discharged_each_by_itself(gate: harness.Gate) -> None:
    first = await ended(gate, "succeeded without a place")
    second = (await gate.as_agent().rerun_task(task_id=first)).task_id
    assert {receipt.task_id for receipt in await gate.owed()} == {first, second}

    offer = await gate.claim()
    assert offer is not None
    await gate.as_worker().complete(**harness.under(offer), artifacts=[{"uri": "x"}])

    assert [receipt.task_id for receipt in await gate.owed()] == [first]


async def test_the_history_of_the_first_task_names_the_new_one(gate: harness.Gate) -> None:
    task_id = await ended(gate, "failed")

    made = await gate.as_admin().rerun_task(task_id=task_id)

    told = (await gate.as_agent().get_task_history(task_id=task_id)).events[-1]
    assert told.event_type == "task.rerun"
    assert msgspec.json.decode(told.payload) == {"rerun_as": made.task_id, "by": {"kind": "human", "id": "root"}}


async def test_what_was_run_again_may_be_run_again(gate: harness.Gate) -> None:
    first = await ended(gate, "failed", payload={"n": 1})
    second = (await gate.as_agent().rerun_task(task_id=first)).task_id
    await gate.as_agent().cancel_task(task_id=second)

    third = await gate.task((await gate.as_agent().rerun_task(task_id=second)).task_id)

    assert third.rerun_of == second
    assert contract(third) == contract(await gate.task(first))


async def test_a_deadline_and_a_delay_were_meant_for_the_first_run(gate: harness.Gate) -> None:
    deadline = datetime.fromtimestamp(gate.now(), UTC) + timedelta(minutes=5)
    task_id = await gate.create(delay_seconds=60, timeouts={"lease_ttl_seconds": 77, "deadline": deadline})
    await gate.as_agent().cancel_task(task_id=task_id)

    again = await gate.task((await gate.as_agent().rerun_task(task_id=task_id)).task_id)

    assert again.next_eligible_at is None
    assert again.timeouts is not None
    assert (again.timeouts.lease_ttl_seconds, again.timeouts.deadline) == (77, None)


@pytest.mark.parametrize("status", ["queued", "leased", "running"])
async def test_a_task_that_has_not_ended_is_refused_with_the_next_call(gate: harness.Gate, status: str) -> None:
    task_id = await gate.create()
    if status != "queued":
        offer = await gate.claim()
        assert offer is not None
        if status == "running":
            await gate.as_worker().start_task(**harness.under(offer))

    async with gate.unchanged():
        with harness.refused("invalid_state_transition", status=status) as refusal:
            await gate.as_agent().rerun_task(task_id=task_id)

    assert "get_task" in str(refusal.value)
    assert "cancel_task" in str(refusal.value)


@pytest.mark.one_store
async def test_only_the_owner_and_admins_run_a_task_again(gate: harness.Gate) -> None:
    task_id = await ended(gate, "failed")

    async with gate.unchanged():
        with harness.refused("forbidden"):
            await gate.as_agent("bob").rerun_task(task_id=task_id)
        with harness.refused("forbidden"):
            await gate.as_worker().rerun_task(task_id=task_id)
        with harness.refused("task_not_found"):
            await gate.stranger().as_admin().rerun_task(task_id=task_id)

    made = await gate.as_admin().rerun_task(task_id=task_id)
    again = await gate.task(made.task_id)
    assert (again.created_by.kind, again.created_by.id) == ("agent", "ada")
    assert task_id not in {receipt.task_id for receipt in await gate.owed("root", "human")}


@pytest.mark.one_store
async def test_an_unknown_task_is_not_run_again(gate: harness.Gate) -> None:
    async with gate.unchanged():
        with harness.refused("task_not_found"):
            await gate.as_agent().rerun_task(task_id="none")


async def test_the_same_key_again_returns_the_first_task_and_writes_nothing(gate: harness.Gate) -> None:
    task_id = await ended(gate, "failed")
    made = await gate.as_agent().rerun_task(task_id=task_id, idempotency_key="again")

    async with gate.unchanged():
        same = await gate.as_agent().rerun_task(task_id=task_id, idempotency_key="again")
        by_admin = await gate.as_admin().rerun_task(task_id=task_id, idempotency_key="again")

    assert (same.task_id, same.status, same.payload_differs) == (made.task_id, "queued", False)
    assert (by_admin.task_id, by_admin.payload_differs) == (made.task_id, False)
    assert (await gate.events(task_id)).count("task.rerun") == 1


async def test_without_a_key_each_call_makes_a_task(gate: harness.Gate) -> None:
    task_id = await ended(gate, "failed")

    made = [(await gate.as_agent().rerun_task(task_id=task_id)).task_id for _ in range(2)]

    assert len({task_id, *made}) == 3
    assert (await gate.events(task_id)).count("task.rerun") == 2


async def test_a_key_that_made_another_task_says_so(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(idempotency_mismatch="refuse")
    first = await ended(gate, "failed", idempotency_key="k")
    second = await ended(gate, "canceled")
    await gate.as_agent().rerun_task(task_id=first, idempotency_key="again")

    async with gate.unchanged():
        with harness.refused("idempotency_conflict", task_id=first):        # the key of the task itself
            await gate.as_agent().rerun_task(task_id=first, idempotency_key="k")
        with harness.refused("idempotency_conflict"):                       # the key of another rerun
            await gate.as_agent().rerun_task(task_id=second, idempotency_key="again")


async def test_a_payload_is_not_changed_by_the_way(gate: harness.Gate) -> None:
    task_id = await ended(gate, "failed", payload=1)

    async with gate.unchanged():
        with harness.refused("invalid_request"):
            await gate.as_agent().rerun_task(task_id=task_id, payload=2)


async def test_a_key_limited_to_types_runs_no_other_type_again(gate: harness.Gate) -> None:
    task_id = await ended(gate, "failed", type="secret")
    ada = gate.as_agent()
    ada.caller = msgspec.structs.replace(ada.caller, task_types=frozenset({"demo"}))

    async with gate.unchanged():
        with harness.refused("forbidden"):
            await ada.rerun_task(task_id=task_id)


@pytest.mark.one_store
async def test_with_the_shared_token_the_request_names_who_asks(gate: harness.Gate) -> None:
    task_id = await ended(gate, "failed")

    made = await gate.rerun_task(task_id=task_id, principal_kind="agent", principal_id="ada",
                                 principal_instance_id="later")

    again = await gate.task(made.task_id)
    assert (again.created_by.id, again.created_by.instance_id) == ("ada", "later")
