"""What explain_task says of questions, and that the call it names works."""

from __future__ import annotations

import pytest

from asyncgate.conformance.harness import Gate, under

pytestmark = pytest.mark.anyio
BOSS = {"kind": "human", "id": "boss"}


async def test_each_caller_is_told_of_the_question_that_it_may_answer(gate: Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().request_input(**under(offer), key="first", message="Deploy?", to=BOSS, keep_lease=True)
    await gate.as_worker().request_input(**under(offer), key="second", message="Which region?")

    outcome = await gate.as_agent().explain_task(task_id=offer.task_id)
    answered = await gate.as_agent().answer_input(**outcome.next.arguments)

    assert (outcome.next.operation, answered.key, answered.open_inputs) == ("answer_input", "second", 1)
    assert "\u201cWhich region?\u201d (second)" in outcome.summary
    waits = await gate.as_agent().explain_task(task_id=offer.task_id)
    assert (waits.next.operation, waits.next.why) == (
        "get_task", "wait until human boss answers, or end it: cancel_task")


async def test_nobody_is_sent_to_answer_what_has_expired_but_was_not_swept_yet(gate: Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().request_input(**under(offer), key="first", message="Deploy?", expires_in_seconds=60,
                                         keep_lease=True)
    await gate.as_worker().request_input(**under(offer), key="second", message="Which region?", expires_in_seconds=90)

    gate.skip(61)
    second = await gate.as_agent().explain_task(task_id=offer.task_id)
    gate.skip(30)
    over = await gate.as_agent().explain_task(task_id=offer.task_id)

    assert (second.next.operation, second.next.arguments["key"]) == ("answer_input", "second")
    assert (over.cause, over.next.operation) == ("input_required", "get_task")
    assert over.summary.endswith("Nobody has answered; its time is over, and 1 other question of it is open.")


async def test_an_admin_that_has_asked_as_the_worker_is_not_sent_to_answer_itself(gate: Gate) -> None:
    await gate.create()
    root = gate.as_admin()
    [offer] = (await root.lease_next()).tasks
    await root.request_input(**under(offer), key="go", message="Go?", to=BOSS)

    assert (await root.explain_task(task_id=offer.task_id)).next.operation == "get_task"
