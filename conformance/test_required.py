"""Required members are required, and absent members never erase stored values (spec 3, 6, 14.1, 18.2, 19.6)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from asyncgate.conformance.harness import Gate, refused, under

pytestmark = pytest.mark.anyio

SOON = datetime(2030, 1, 1, tzinfo=UTC)


async def test_a_create_without_payload_or_pointer_is_refused(gate: Gate) -> None:
    async with gate.unchanged():
        with refused("invalid_request"):
            await gate.as_agent().create_task(type="demo")
        (item,) = (await gate.as_agent().create_tasks(tasks=[{"type": "demo"}])).results

    assert item.error.error == "invalid_request"


@pytest.mark.parametrize("fields", [{"payload": None}, {"payload_pointer": "s3://in"}, {"payload": 0}])
async def test_a_null_is_a_payload_and_a_pointer_stands_for_one(gate: Gate, fields: dict[str, Any]) -> None:
    made = await gate.as_agent().create_task(type="demo", **fields)

    task = await gate.task(made.task_id)
    assert bytes(task.payload) == (b"0" if fields == {"payload": 0} else b"null")
    assert task.payload_pointer == fields.get("payload_pointer")


async def test_a_report_without_progress_erases_no_checkpoint(gate: Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().report_progress(**under(offer, progress={"page": 7}))

    async with gate.unchanged():
        with refused("invalid_request"):
            await gate.as_worker().report_progress(**under(offer))

    assert bytes((await gate.task(offer.task_id)).progress) == b'{"page":7}'


async def test_a_failure_without_an_error_is_refused_and_the_lease_lives_on(gate: Gate) -> None:
    offer = await gate.leased()

    async with gate.unchanged():
        with refused("invalid_request"):
            await gate.as_worker().fail(**under(offer, retryable=True))

    assert (await gate.as_worker().fail(**under(offer, error="no luck"))).ok


async def test_what_a_scheduler_does_not_report_stays_as_it_was(gate: Gate) -> None:
    offer = await gate.leased(type="schedule.create")
    await gate.as_worker().emit_receipt(**under(offer), receipt_type="schedule.created", schedule_id="nightly")
    full = {"schedule_id": "nightly", "next_run_at": SOON, "interval_seconds": 60}
    await gate.as_worker().report_schedule(schedules=[full])
    await gate.as_worker().report_schedule(schedules=[{"schedule_id": "nightly", "enabled": False}])

    await gate.as_worker().report_schedule(schedules=[{"schedule_id": "nightly"}])

    (known,) = (await gate.everything())["Schedule"]
    assert (known.enabled, known.next_run_at, known.interval_seconds) == (False, SOON.timestamp(), 60)


@pytest.mark.one_store
@pytest.mark.parametrize(("delivery", "meant"), [
    ("return result payload", "inline"), ("store artifact pointer", "artifact"), ("inline", "inline"),
    ("\u201cReturn  result payload\u201d", "inline"), ("by pigeon", "by pigeon")])
async def test_the_delivery_of_a_result_is_said_in_the_words_of_the_spec(gate: Gate, delivery: str, meant: str) -> None:
    offer = await gate.leased(result_delivery=delivery)

    await gate.as_worker().complete(**under(offer, result={"n": 1}))

    task = await gate.task(offer.task_id)
    assert task.result_delivery == offer.result_delivery == meant
    assert task.obligation_open == (meant != "inline")


async def test_a_lease_lives_as_long_as_timeouts_lease_ttl_says(gate: Gate) -> None:
    offer = await gate.leased(timeouts={"lease_ttl": 900})

    assert 870 < offer.expires_at.timestamp() - gate.now() <= 900
    assert (await gate.task(offer.task_id)).timeouts.lease_ttl_seconds == 900  # type: ignore[union-attr]


@pytest.mark.one_store
@pytest.mark.parametrize("requirements", [None, {}])
async def test_nothing_required_is_an_empty_object(gate: Gate, requirements: Any) -> None:
    offer = await gate.leased(requirements=requirements)

    assert bytes(offer.requirements) == bytes((await gate.task(offer.task_id)).requirements) == b"{}"


async def test_a_key_knows_its_task_whether_its_requirements_are_absent_or_empty(gate: Gate) -> None:
    await gate.create(idempotency_key="k")

    assert not (await gate.as_agent().create_task(type="demo", payload=None, idempotency_key="k",
                                                  requirements={})).payload_differs


async def test_the_creator_is_shown_in_both_spellings_with_its_session(gate: Gate) -> None:
    made = await gate.as_agent("ada", instance="laptop").create_task(type="demo", payload=None)

    owner = (await gate.task(made.task_id)).created_by
    assert (owner.kind, owner.id, owner.instance_id) == ("agent", "ada", "laptop")
    assert (owner.principal_kind, owner.principal_id, owner.principal_instance_id) == ("agent", "ada", "laptop")


async def test_receipts_say_in_which_session_they_were_stated(gate: Gate) -> None:
    made = await gate.as_agent("ada", instance="laptop").create_task(type="demo", payload=None)
    offer = (await gate.as_worker("w1", instance="node-3").lease_next()).tasks[0]
    await gate.as_worker("w1", instance="node-3").complete(**under(offer), artifacts=["file:///x"])

    senders = {receipt.receipt_type: receipt.sender for receipt in await gate.receipts(made.task_id)}
    assert {type: who.instance_id for type, who in senders.items()} == {
        "task.assigned": "laptop", "task.accepted": "node-3", "task.completed": "node-3", "task.result_ready": None}


async def test_another_session_with_the_same_key_gets_the_first_task(gate: Gate) -> None:
    first = await gate.as_agent("ada", instance="a").create_task(type="demo", payload=None, idempotency_key="k")

    again = await gate.as_agent("ada", instance="b").create_task(type="demo", payload=None, idempotency_key="k")

    assert (again.task_id, again.payload_differs) == (first.task_id, False)
