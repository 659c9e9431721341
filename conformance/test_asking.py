"""Questions: a task that waits for an answer, who may give it, and what becomes of it when nobody does."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from asyncgate.conformance.harness import Gate, body, refused, under
from asyncgate.parts.model import stored, wire
from asyncgate.parts.model.views import to_utc

pytestmark = pytest.mark.anyio
BOSS = {"kind": "human", "id": "boss"}
CHOICE = {"type": "object", "properties": {"window": {"type": "string", "enum": ["now", "tonight"]}},
          "required": ["window"]}


async def ask(gate: Gate, offer: wire.Offer, key: str = "deploy", *, worker: str = "w1", **more: Any) -> Any:
    """Ask the boss something under a lease."""
    given = {"message": "Deploy it?", "to": BOSS, **more}
    return await gate.as_worker(worker).request_input(**under(offer), key=key, **given)


def as_boss(gate: Gate) -> Any:
    """Return the gate as the boss sees it."""
    return gate.as_caller("human", "boss", "agent")


async def answer(gate: Gate, task_id: str, key: str = "deploy", action: str = "accept", **more: Any) -> Any:
    """Answer as the boss."""
    return await as_boss(gate).answer_input(task_id=task_id, key=key, action=action, **more)


async def asked_of(gate: Gate) -> list[str]:
    """Return the keys of what the boss is asked."""
    return [body(row)["key"] for row in await gate.owed("boss", "human")]


# The whole way.


async def test_a_question_ends_the_lease_and_its_answer_comes_with_the_next_offer(gate: Gate) -> None:
    offer = await gate.leased()

    asked = await ask(gate, offer, checkpoint={"step": 3}, schema=CHOICE)
    waiting = await gate.task(offer.task_id)
    nothing = await gate.claim("w2")
    given = await answer(gate, offer.task_id, content={"window": "tonight"})
    again = await gate.claim("w2")

    assert (asked.state, asked.status, asked.lease_ended, asked.input) == ("open", "queued", True, None)
    assert (waiting.status, waiting.held, waiting.attempt, waiting.expiries) == ("queued", "input_required", 0, 0)
    assert nothing is None
    assert (given.action, given.status, given.open_inputs) == ("accept", "queued", 0)
    assert again is not None
    assert bytes(again.progress) == b'{"step":3}'
    assert isinstance(again.inputs, dict)
    outcome = again.inputs["deploy"]
    assert (outcome.action, bytes(outcome.content), outcome.by) == (
        "accept", b'{"window":"tonight"}', wire.Principal("human", "boss"))
    assert outcome.receipt_id == given.receipt_id
    assert (await gate.as_worker("w2").complete(**under(again), artifacts=["file:///out"])).ok


async def test_a_question_is_an_obligation_of_whoever_is_asked_and_its_answer_discharges_it(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer, schema=CHOICE, expires_in_seconds=60)

    (request,) = await gate.owed("boss", "human")
    given = await answer(gate, offer.task_id, content={"window": "now"})

    assert (request.receipt_type, request.sender) == ("input.requested", wire.Principal("worker", "w1"))
    assert body(request) | {"message": "Deploy it?", "schema": CHOICE, "on_expiry": "resume", "lease_ended": True} == (
        body(request))
    answered = await gate.receipt(offer.task_id, "input.answered")
    assert (answered.receipt_id, answered.parents) == (given.receipt_id, [request.receipt_id])
    assert answered.sender == wire.Principal("human", "boss")
    assert body(answered).keys() >= {"action", "question_sha256", "content_sha256", "content_bytes"}
    assert b"now" not in bytes(answered.body)       # of what was answered a receipt has the hash
    assert await gate.owed("boss", "human") == []
    assert (await as_boss(gate).check_terminator(parent_receipt_id=request.receipt_id)).has_terminator


async def test_the_owner_is_asked_where_nobody_is_named(gate: Gate) -> None:
    offer = await gate.leased(by="ada")
    await ask(gate, offer, to=None)

    assert [row.receipt_type for row in await gate.owed("ada")] == ["task.assigned", "input.requested"]
    assert (await gate.as_agent("ada").answer_input(task_id=offer.task_id, key="deploy", action="decline")).ok


@pytest.mark.parametrize("action", ["accept", "decline", "cancel"])
async def test_each_answer_lets_the_task_go_on_and_says_which_it_was(gate: Gate, action: str) -> None:
    offer = await gate.leased()
    await ask(gate, offer)

    await answer(gate, offer.task_id, action=action)

    again = await gate.claim()
    assert again is not None
    assert isinstance(again.inputs, dict)
    assert again.inputs["deploy"].action == action


async def test_a_task_waits_until_every_question_is_answered(gate: Gate) -> None:
    offer = await gate.leased()
    kept = await ask(gate, offer, "first", keep_lease=True)
    await ask(gate, offer, "second")

    left = [(await answer(gate, offer.task_id, key)).open_inputs for key in ("first", "second")]

    assert (kept.status, kept.lease_ended) == ("leased", False)
    assert left == [1, 0]
    again = await gate.claim()
    assert again is not None
    assert isinstance(again.inputs, dict)
    assert [*again.inputs] == ["first", "second"]


@pytest.mark.parametrize("how", ["release", "park", "fail"])
async def test_whoever_gives_a_task_back_is_told_when_it_is_offered_though_it_waits_for_an_answer(
        gate: Gate, how: str) -> None:
    offer = await gate.leased()
    await ask(gate, offer, keep_lease=True, expires_in_seconds=600)
    worker = gate.as_worker()

    def give_back() -> Any:
        if how == "fail":
            return worker.fail(**under(offer, error="busy", retryable=True, retry_after_seconds=60))
        return worker.release_lease(**under(offer, **{"after_seconds": 60} if how == "park" else {}))
    first, again = await give_back(), await give_back()

    assert first == again
    assert (first.status, first.requeued) == ("queued", True)
    assert first.next_eligible_at == (await gate.task(offer.task_id)).next_eligible_at
    await gate.wait(first.next_eligible_at.timestamp() - gate.now() + 1)
    assert await gate.claim() is not None


@pytest.mark.parametrize("how", ["release_lease", "fail"])
async def test_whoever_gives_a_task_back_is_told_that_its_question_has_ended_it(gate: Gate, how: str) -> None:
    offer = await gate.leased()
    await ask(gate, offer, keep_lease=True, expires_in_seconds=60, on_expiry="fail")
    gate.skip(61)

    call, more = getattr(gate.as_worker(), how), {"error": "busy", "retryable": True} if how == "fail" else {}
    told = await call(**under(offer, **more))

    async with gate.unchanged():
        again = await call(**under(offer, **more))
    for outcome in (told, again):
        assert (outcome.status, outcome.requeued, outcome.next_eligible_at) == ("failed", False, None)
    assert (await gate.task(offer.task_id)).status == "failed"


async def test_an_offer_of_a_task_that_has_asked_nothing_says_nothing_of_inputs(gate: Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().report_progress(**under(offer), progress=1)
    await gate.lose(offer)

    again = await gate.claim()

    assert again is not None
    assert again.inputs is msgspec.UNSET


async def test_tasks_that_wait_for_an_answer_are_counted_with_the_first_of_them(gate: Gate) -> None:
    before, _ = await gate.backend.count_unanswered()
    offer = await gate.leased()
    await ask(gate, offer, "first", keep_lease=True)
    kept, _ = await gate.backend.count_unanswered()
    asked_at = gate.now()
    await ask(gate, offer, "second")
    gate.skip(100)
    later = await gate.leased()
    await ask(gate, later)

    waiting, since = await gate.backend.count_unanswered()
    for key in ("first", "second"):
        await answer(gate, offer.task_id, key)
    left, _ = await gate.backend.count_unanswered()

    assert (kept, waiting, left) == (before, before + 2, before + 1)
    assert since is not None
    assert since <= asked_at + 1        # of all tests in this database


# The same again.


async def test_the_same_question_again_asks_nothing_more(gate: Gate) -> None:
    offer = await gate.leased()
    first = await ask(gate, offer, schema=CHOICE)

    async with gate.unchanged():
        assert await ask(gate, offer, schema=CHOICE) == first
    await answer(gate, offer.task_id, content={"window": "now"})
    async with gate.unchanged():
        late = await ask(gate, offer, schema=CHOICE)

    assert (late.state, late.receipt_id, late.lease_ended) == ("accept", first.receipt_id, True)


async def test_a_key_names_one_question_in_the_life_of_a_task(gate: Gate) -> None:
    offer = await gate.leased()
    first = await ask(gate, offer)

    async with gate.unchanged():
        with refused("key_conflict", receipt_id=first.receipt_id):
            await ask(gate, offer, message="Something else?")
    await answer(gate, offer.task_id)
    again = await gate.claim("w2")
    assert again is not None
    async with gate.unchanged():
        with refused("key_conflict", receipt_id=first.receipt_id):
            await ask(gate, again, worker="w2", to={"kind": "human", "id": "other"})


async def test_a_worker_that_asks_what_is_answered_gets_the_answer_and_keeps_its_lease(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer)
    await answer(gate, offer.task_id, content="yes")
    again = await gate.claim("w2")
    assert again is not None

    async with gate.unchanged():
        outcome = await ask(gate, again, worker="w2")

    assert (outcome.state, outcome.lease_ended) == ("accept", False)
    assert bytes(outcome.input.content) == b'"yes"'


async def test_the_same_answer_again_returns_the_first_one_and_another_is_refused(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer)
    first = await answer(gate, offer.task_id, content={"a": 1, "b": 2})

    async with gate.unchanged():
        assert (await answer(gate, offer.task_id, content={"b": 2, "a": 1})).receipt_id == first.receipt_id
        with refused("already_answered", receipt_id=first.receipt_id):
            await answer(gate, offer.task_id, content={"a": 2})
        with refused("already_answered", receipt_id=first.receipt_id):
            await answer(gate, offer.task_id, action="decline", content={"a": 1, "b": 2})
        with refused("already_answered"):
            await gate.as_admin("root").answer_input(task_id=offer.task_id, key="deploy", action="accept",
                                                     content={"a": 1, "b": 2})


# Who may answer.


@pytest.mark.one_store
async def test_only_whoever_is_asked_may_answer(gate: Gate) -> None:
    offer = await gate.leased(by="ada")
    await ask(gate, offer)

    async with gate.unchanged():
        for view in (gate.as_agent("ada"), gate.as_agent("boss"), gate.as_caller("human", "bob", "agent"),
                     gate.as_worker("w2")):
            with refused("not_addressed"):
                await view.answer_input(task_id=offer.task_id, key="deploy", action="accept")
        with refused("task_not_found"):
            await gate.stranger().as_admin().answer_input(task_id=offer.task_id, key="deploy", action="accept")


@pytest.mark.one_store
async def test_the_worker_that_asks_cannot_answer_whatever_its_role(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer)

    async with gate.unchanged():
        for role in ("worker", "admin"):
            with refused("self_answer"):
                await gate.as_caller("worker", "w1", role).answer_input(task_id=offer.task_id, key="deploy",
                                                                        action="accept")
        with refused("self_answer"):
            await gate.answer_input(task_id=offer.task_id, key="deploy", action="accept", worker_id="w1")


@pytest.mark.one_store
async def test_nobody_asks_itself(gate: Gate) -> None:
    offer = await gate.leased()

    async with gate.unchanged():
        with refused("self_answer"):
            await ask(gate, offer, to={"kind": "worker", "id": "w1"})


async def test_an_admin_answers_in_the_place_of_whoever_is_asked_and_the_receipt_says_so(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer)

    await gate.as_admin("root").answer_input(task_id=offer.task_id, key="deploy", action="accept")

    answered = await gate.receipt(offer.task_id, "input.answered")
    assert answered.sender == wire.Principal("human", "root")
    assert body(answered)["in_place_of"] == BOSS


async def test_a_question_that_was_not_asked_is_unknown_to_the_owner_and_nothing_to_others(gate: Gate) -> None:
    offer = await gate.leased(by="ada")

    with refused("input_not_found"):
        await gate.as_agent("ada").answer_input(task_id=offer.task_id, key="deploy", action="accept")
    with refused("not_addressed"):
        await answer(gate, offer.task_id)


@pytest.mark.one_store
async def test_only_the_holder_of_the_lease_may_ask(gate: Gate) -> None:
    offer = await gate.leased()

    async with gate.unchanged():
        with refused("lease_invalid_or_expired"):
            await ask(gate, offer, worker="w2")
        gate.skip(301)
        with refused("lease_invalid_or_expired"):
            await ask(gate, offer)


# What an answer must be.


@pytest.mark.one_store
async def test_content_that_does_not_match_the_schema_is_refused_with_its_place(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer, schema=CHOICE)

    async with gate.unchanged():
        with refused("answer_invalid", path="content.window"):
            await answer(gate, offer.task_id, content={"window": "never"})
        with refused("answer_invalid", path="content"):
            await answer(gate, offer.task_id)

    assert (await answer(gate, offer.task_id, action="decline", content="not now")).ok


@pytest.mark.one_store
async def test_a_schema_that_is_not_understood_is_refused_when_it_is_sent(gate: Gate) -> None:
    offer = await gate.leased()

    async with gate.unchanged():
        for schema in ({"type": "string", "pattern": "(a+)+$"}, {"$ref": "http://elsewhere"}, {"type": "thing"}):
            with refused("invalid_request"):
                await ask(gate, offer, schema=schema)


@pytest.mark.one_store
async def test_content_is_limited(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer)

    async with gate.unchanged():
        with refused("payload_too_large"):
            await answer(gate, offer.task_id, content="x" * 65_536)


# When nobody answers.


async def test_a_question_that_expires_lets_the_task_go_on_without_an_answer(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer, expires_in_seconds=60)

    await gate.wait(59)
    early = await gate.claim()
    await gate.wait(2)
    again = await gate.claim()

    assert early is None
    assert again is not None
    assert isinstance(again.inputs, dict)
    outcome = again.inputs["deploy"]
    assert (outcome.action, bytes(outcome.content), outcome.by) == ("expired", b"null", None)
    expired = await gate.receipt(offer.task_id, "input.expired")
    assert (expired.to, body(expired)["reason"]) == (wire.Principal("human", "boss"), "expired")
    assert await gate.owed("boss", "human") == []
    with refused("input_expired"):
        await answer(gate, offer.task_id)


async def test_an_answer_that_comes_too_late_does_not_count_also_before_the_sweep(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer, expires_in_seconds=60)
    gate.skip(61)

    async with gate.unchanged():
        with refused("input_expired"):
            await answer(gate, offer.task_id)


async def test_a_task_that_a_question_ends_stays_ended_though_its_deadline_has_passed_in_the_same_sweep(
        gate: Gate) -> None:
    offer = await gate.leased(timeouts={"deadline": to_utc(gate.now() + 90)})
    await ask(gate, offer, keep_lease=True, expires_in_seconds=60, on_expiry="fail")

    await gate.wait(3600)

    task = await gate.task(offer.task_id)
    told = [receipt.receipt_type for receipt in await gate.receipts(offer.task_id)]
    assert (task.status, task.held, task.obligation_open) == ("failed", None, False)
    assert told[-4:] == ["lease.expired", "input.expired", "task.failed", "task.result_ready"]


async def test_a_task_fails_that_cannot_go_on_without_its_answer(gate: Gate) -> None:
    offer = await gate.leased(by="ada")
    await ask(gate, offer, "other", keep_lease=True)
    await ask(gate, offer, expires_in_seconds=60, on_expiry="fail")

    await gate.wait(61)

    task = await gate.task(offer.task_id)
    assert (task.status, task.held, task.obligation_open) == ("failed", None, False)
    assert task.result is not None
    assert msgspec.json.decode(task.result.error)["code"] == "input_expired"
    assert [body(row)["reason"] for row in await gate.receipts(offer.task_id, "input.expired")] == [
        "expired", "task_ended"]
    assert await gate.owed("boss", "human") == [] == await gate.owed("ada")
    assert (await gate.receipt(offer.task_id, "task.failed")).sender.kind == "asyncgate"


async def test_a_question_without_an_end_waits_for_ever(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer)

    await gate.wait(400 * 86_400)

    assert (await gate.task(offer.task_id)).held == "input_required"
    assert (await answer(gate, offer.task_id)).ok


async def test_the_first_of_several_questions_to_expire_leaves_the_others_open(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer, "soon", keep_lease=True, expires_in_seconds=60)
    await ask(gate, offer, "later", expires_in_seconds=120)

    await gate.wait(61)
    between = (await asked_of(gate), (await gate.task(offer.task_id)).held)
    await gate.wait(60)

    assert between == (["later"], "input_required")
    assert (await asked_of(gate), (await gate.task(offer.task_id)).held) == ([], None)


# When the task ends first, or its worker does.


async def test_the_end_of_a_task_discharges_what_it_has_asked(gate: Gate) -> None:
    canceled, completed, failed = [await gate.leased(f"w{number}") for number in (1, 2, 3)]
    for number, offer in enumerate((canceled, completed, failed), 1):
        await ask(gate, offer, worker=f"w{number}", keep_lease=number > 1)

    await gate.as_agent("ada").cancel_task(task_id=canceled.task_id)
    await gate.as_worker("w2").complete(**under(completed), artifacts=["file:///out"])
    await gate.as_worker("w3").fail(**under(failed), error="no luck")

    assert await asked_of(gate) == []
    for offer in (canceled, completed, failed):
        expired = await gate.receipt(offer.task_id, "input.expired")
        assert body(expired)["reason"] == "task_ended"
        async with gate.unchanged():
            with refused("input_expired"):
                await answer(gate, offer.task_id)


async def test_a_hold_for_an_answer_is_not_released(gate: Gate) -> None:
    offer = await gate.leased(by="ada")
    await ask(gate, offer)

    async with gate.unchanged():
        for view in (gate.as_agent("ada"), gate.as_admin()):
            with refused("invalid_state_transition"):
                await view.release_hold(task_id=offer.task_id)


@pytest.mark.parametrize("why", ["lease_expiries", "max_parks"])
async def test_a_task_with_a_question_waits_for_the_answer_when_it_is_released_from_another_hold(
        gate: Gate, why: str) -> None:
    offer = await gate.leased(max_expiries=1, max_parks=1)
    await ask(gate, offer, keep_lease=True, expires_in_seconds=3600)
    if why == "max_parks":
        await gate.as_worker().release_lease(**under(offer), after_seconds=0)
    else:
        await gate.lose(offer)
    first = await gate.task(offer.task_id)

    released = await gate.as_agent().release_hold(task_id=offer.task_id)
    waiting = await gate.task(offer.task_id)
    unclaimed = await gate.claim("w2")
    await answer(gate, offer.task_id)

    assert (first.held, released.ok, waiting.held, unclaimed) == (why, True, "input_required", None)
    assert await gate.claim("w2") is not None


async def test_a_question_that_has_expired_under_a_hold_ends_its_task_when_the_hold_is_released(gate: Gate) -> None:
    offer = await gate.leased(max_expiries=1)
    await ask(gate, offer, keep_lease=True, expires_in_seconds=600, on_expiry="fail")
    await gate.lose(offer)
    await gate.wait(601)
    held = await gate.task(offer.task_id)

    released = await gate.as_agent().release_hold(task_id=offer.task_id)

    assert (held.status, held.held, released.status) == ("queued", "lease_expiries", "failed")
    assert await asked_of(gate) == []


async def test_questions_are_neither_answered_nor_passed_over_in_bulk(gate: Gate) -> None:
    for number in (1, 2):
        await ask(gate, await gate.leased(f"w{number}"), worker=f"w{number}")
    admin = gate.as_admin()

    preview = await admin.preview_bulk(action="release", held=True)
    outcome = await admin.run_bulk(confirmation=preview.confirmation)

    assert outcome.done == 0
    assert await asked_of(gate) == ["deploy", "deploy"]
    assert await gate.claim("w3") is None


@pytest.mark.parametrize("way", ["release", "expire", "fail"])
async def test_a_task_waits_for_its_answer_however_the_lease_ends_that_was_kept(gate: Gate, way: str) -> None:
    offer = await gate.leased(retry_backoff_seconds=0)
    await ask(gate, offer, keep_lease=True, expires_in_seconds=3600)
    if way == "release":
        await gate.as_worker().release_lease(**under(offer))
    elif way == "fail":
        await gate.as_worker().fail(**under(offer), error="no luck", retryable=True)
    else:
        await gate.lose(offer)

    held = (await gate.task(offer.task_id)).held
    nothing = await gate.claim("w2")
    await answer(gate, offer.task_id)

    assert (held, nothing) == ("input_required", None)
    assert await gate.claim("w2") is not None
    assert await gate.anomalies() == []


async def test_who_keeps_the_lease_may_ask_again_without_it(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer, keep_lease=True)

    left = await ask(gate, offer)

    assert (left.status, left.lease_ended) == ("queued", True)
    assert await asked_of(gate) == ["deploy"]
    assert body(await gate.receipt(offer.task_id, "lease.expired"))["reason"] == "input_required"
    await answer(gate, offer.task_id)
    assert await gate.claim("w2") is not None


async def test_a_kept_lease_whose_question_has_expired_is_told_when_it_asks_again(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer, keep_lease=True, expires_in_seconds=60)
    gate.skip(61)

    outcome = await ask(gate, offer, keep_lease=True, expires_in_seconds=60)

    assert (outcome.state, outcome.lease_ended) == ("expired", False)
    assert await asked_of(gate) == []


async def test_a_kept_lease_learns_that_its_question_has_expired_although_it_asks_no_more(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer, keep_lease=True, expires_in_seconds=60, on_expiry="fail")
    gate.skip(61)

    (unwritten,) = (await gate.as_worker().list_inputs(task_id=offer.task_id)).inputs
    await gate.as_worker().renew_lease(**under(offer))
    (written,) = (await gate.as_worker().list_inputs(task_id=offer.task_id)).inputs

    assert (unwritten.state, unwritten.receipt_id) == ("expired", None)
    assert (written.state, written.receipt_id) == (
        "expired", (await gate.receipt(offer.task_id, "input.expired")).receipt_id)
    assert await asked_of(gate) == []
    assert (await gate.task(offer.task_id)).status == "leased"
    with refused("input_expired"):
        await answer(gate, offer.task_id)


# Races.


async def test_two_answers_at_once_count_once(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer)

    outcomes = await asyncio.gather(
        answer(gate, offer.task_id, content=1), answer(gate, offer.task_id, content=2),
        gate.as_admin().answer_input(task_id=offer.task_id, key="deploy", action="decline"), return_exceptions=True)

    assert [getattr(outcome, "code", "ok") for outcome in outcomes].count("ok") == 1
    assert len(await gate.receipts(offer.task_id, "input.answered")) == 1
    assert await asked_of(gate) == []


async def test_the_last_two_questions_answered_at_once_release_the_task(gate: Gate) -> None:
    for _ in range(5):
        offer = await gate.leased()
        await ask(gate, offer, "a", keep_lease=True)
        await ask(gate, offer, "b")
        other = gate.beside()

        await asyncio.gather(answer(gate, offer.task_id, "a"), answer(other, offer.task_id, "b"))

        again = await gate.claim()
        assert again is not None
        await gate.as_worker().complete(**under(again), artifacts=["file:///out"])


async def test_an_answer_is_not_lost_that_comes_as_soon_as_the_question_can_be_seen(gate: Gate) -> None:
    offer = await gate.leased()

    async def answer_at_once() -> Any:
        page = await as_boss(gate).list_open_obligations(wait_seconds=30)
        (request,) = page.open_obligations
        return await answer(gate, request.task_id, body(request)["key"])

    answering = asyncio.ensure_future(answer_at_once())
    asked, given = await asyncio.gather(ask(gate, offer), answering)

    request = await gate.receipt(offer.task_id, "input.requested")
    assert (asked.receipt_id, given.open_inputs) == (request.receipt_id, 0)
    assert await gate.claim() is not None


async def test_an_answer_wakes_the_worker_that_waits_for_work_and_the_one_that_waits_for_it(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer, keep_lease=True)
    waiting = asyncio.ensure_future(gate.as_worker().list_inputs(task_id=offer.task_id, wait_seconds=30))
    await asyncio.sleep(0)
    await answer(gate, offer.task_id)
    assert [question.state for question in (await waiting).inputs] == ["accept"]

    await ask(gate, offer, "more")
    claiming = asyncio.ensure_future(gate.claim("w2", wait_seconds=30))
    await asyncio.sleep(0)
    await answer(gate, offer.task_id, "more")
    assert await claiming is not None


async def test_the_expiry_of_a_question_wakes_the_worker_that_waits_under_its_lease(gate: Gate) -> None:
    waiting = []
    for worker, seconds in (("w1", 1), ("w2", None)):
        offer = await gate.leased(worker)
        await ask(gate, offer, worker=worker, keep_lease=True, expires_in_seconds=seconds)
        inputs = gate.as_worker(worker).list_inputs(task_id=offer.task_id, wait_seconds=30)
        waiting.append(asyncio.ensure_future(inputs))

    ended, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()

    assert ended == {waiting[0]}
    assert [question.state for question in (await waiting[0]).inputs] == ["expired"]


async def test_a_cancel_and_an_answer_at_once_leave_nothing_open(gate: Gate) -> None:
    offer = await gate.leased(by="ada")
    await ask(gate, offer)

    await asyncio.gather(answer(gate, offer.task_id), gate.as_agent("ada").cancel_task(task_id=offer.task_id),
                         return_exceptions=True)

    assert await asked_of(gate) == []
    types = [row.receipt_type for row in await gate.receipts(offer.task_id)]
    assert types.count("input.answered") + types.count("input.expired") == 1
    assert (await gate.task(offer.task_id)).status == "canceled"


# Reading.


async def test_the_owner_the_worker_and_an_admin_see_all_questions_others_their_own(gate: Gate) -> None:
    offer = await gate.leased(by="ada")
    await ask(gate, offer, "mine", keep_lease=True, schema=CHOICE)
    await ask(gate, offer, "theirs", to=None)

    async def seen_by(view: Any) -> list[str]:
        return [question.key for question in (await view.list_inputs(task_id=offer.task_id)).inputs]

    for view in (gate.as_agent("ada"), gate.as_worker(), gate.as_admin()):
        assert await seen_by(view) == ["mine", "theirs"]
    assert await seen_by(as_boss(gate)) == ["mine"]
    with refused("forbidden"):
        await seen_by(gate.as_agent("eve"))
    with refused("task_not_found"):
        await seen_by(gate.stranger())


async def test_a_question_says_who_asked_whom_what_since_when_and_how_it_ended(gate: Gate) -> None:
    offer = await gate.leased()
    await ask(gate, offer, schema=CHOICE, expires_in_seconds=60)
    (before,) = (await as_boss(gate).list_inputs(task_id=offer.task_id)).inputs
    await answer(gate, offer.task_id, content={"window": "now"})
    (after,) = (await as_boss(gate).list_inputs(task_id=offer.task_id)).inputs

    assert (before.message, before.state, before.to.id, before.asked_by.id, before.on_expiry) == (
        "Deploy it?", "open", "boss", "w1", "resume")
    assert msgspec.json.decode(before.schema) == CHOICE
    assert (before.expires_at - before.asked_at).total_seconds() == pytest.approx(60)
    assert (after.state, bytes(after.content), after.answered_by.id) == ("accept", b'{"window":"now"}', "boss")
    assert bytes(after.schema) == b"null"


async def test_every_question_ends_with_its_task_in_the_index(gate: Gate) -> None:
    """Open obligations are those created and not discharged, by the rows and by the receipts."""
    offer = await gate.leased(by="ada")
    await ask(gate, offer, "a", keep_lease=True)
    await ask(gate, offer, "b")
    await answer(gate, offer.task_id, "a")
    await gate.as_agent("ada").cancel_task(task_id=offer.task_id)

    rows = await gate.everything()

    assert [row for row in rows["Obligation"] if row.to_id == "boss"] == []
    (progress,) = rows["Progress"]
    assert [question.state for question in stored.read_questions(progress).values()] == ["accept", "expired"]


async def test_a_task_goes_on_when_whoever_it_has_asked_is_erased(gate: Gate) -> None:
    offer = await gate.leased(by="ada")
    await ask(gate, offer)

    await gate.as_admin().erase_principal(principal_kind="human", principal_id="boss", confirm="boss")

    again = await gate.claim()
    assert again is not None
    assert isinstance(again.inputs, dict)
    assert again.inputs["deploy"].action == "expired"
    (question,) = (await gate.as_admin().list_inputs(task_id=offer.task_id)).inputs
    assert question.to.id != "boss"


# Why it waits.


async def test_what_waits_for_an_answer_says_who_asked_whom_what_and_until_when(gate: Gate) -> None:
    offer = await gate.leased(by="ada")
    await ask(gate, offer, "other", keep_lease=True)
    asked = await ask(gate, offer, expires_in_seconds=7200)
    gate.skip(3600)

    outcome = await gate.as_agent("ada").explain_task(task_id=offer.task_id)
    to_admin = await gate.as_admin().explain_task(task_id=offer.task_id)

    assert [outcome.cause, *(cause.cause for cause in outcome.also)] == ["input_required"]
    assert outcome.summary.startswith(
        "Worker w1 asked human boss 1 h ago: \u201cDeploy it?\u201d (other). Nobody has answered")
    assert "1 other question of it is open" in outcome.summary
    assert (outcome.evidence.held, outcome.evidence.by, outcome.evidence.receipt_ids[-1]) == (
        "input_required", wire.Principal("worker", "w1"), asked.receipt_id)
    assert (outcome.next.operation, to_admin.next.operation) == ("get_task", "answer_input")
    assert (await gate.as_admin().answer_input(**to_admin.next.arguments)).ok
