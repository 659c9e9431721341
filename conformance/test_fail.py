"""Failing: retries, back-off, and the end (spec 6.2, PH.4)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from asyncgate.conformance.harness import Gate, body, under
from asyncgate.parts.model import wire

pytestmark = pytest.mark.anyio


async def failed(gate: Gate, offer: wire.Offer, **more: Any) -> float:
    """Fail a retryable attempt; return the seconds until the retry."""
    answer = await gate.as_worker().fail(**under(offer, error={"why": "x"}, retryable=True, **more))
    task = await gate.task(offer.task_id)
    assert (answer.status, answer.requeued, task.status) == ("queued", True, "queued")
    waits: timedelta = answer.next_eligible_at - task.updated_at
    assert task.next_eligible_at == answer.next_eligible_at
    return waits.total_seconds()


async def test_a_failure_is_final_unless_it_says_that_it_is_retryable(gate: Gate) -> None:
    offer = await gate.leased()

    answer = await gate.as_worker().fail(**under(offer, error={"why": "broken"}))

    task = await gate.task(offer.task_id)
    assert (answer.ok, answer.status, answer.requeued, answer.next_eligible_at) == (True, "failed", False, None)
    assert task.status == "failed"
    assert task.result is not None
    assert (task.result.outcome, bytes(task.result.result)) == ("failed", b"null")
    assert msgspec.json.decode(task.result.error) == {"why": "broken"}


async def test_a_final_failure_discharges_the_duty(gate: Gate) -> None:
    offer = await gate.leased()

    await gate.as_worker().fail(**under(offer, error="x"))

    assert (await gate.receipt(offer.task_id, "task.failed")).parents == [offer.obligation_receipt_id]
    assert await gate.owed() == []


async def test_each_retry_waits_twice_as_long_as_the_one_before_up_to_900_seconds(gate: Gate) -> None:
    offer, waits = await gate.leased(max_attempts=9, retry_backoff_seconds=30), []
    for _ in range(7):
        waits.append(await failed(gate, offer))
        gate.skip(waits[-1])
        again = await gate.claim()
        assert again is not None
        offer = again

    assert waits == [30, 60, 120, 240, 480, 900, 900]


async def test_a_task_is_not_offered_before_its_wait_is_over(gate: Gate) -> None:
    offer = await gate.leased(retry_backoff_seconds=30)
    await failed(gate, offer)

    gate.skip(29)
    assert await gate.claim() is None

    gate.skip(1)
    assert await gate.claim() is not None


@pytest.mark.one_store
@pytest.mark.parametrize(("wished", "given"), [(0, 0), (0.5, 0.5), (7, 7), (900, 900), (901, 900), (10**6, 900)])
async def test_a_worker_may_say_how_long_to_wait_under_the_same_cap(gate: Gate, wished: float, given: float) -> None:
    offer = await gate.leased()

    assert await failed(gate, offer, retry_after_seconds=wished) == pytest.approx(given, abs=1e-5)


async def test_a_backoff_of_nothing_offers_the_task_at_once(gate: Gate) -> None:
    offer = await gate.leased(retry_backoff_seconds=0)

    assert await failed(gate, offer) == 0
    assert await gate.claim() is not None


async def test_each_failure_spends_one_attempt_and_the_last_is_final(gate: Gate) -> None:
    offer, seen = await gate.leased(max_attempts=3, retry_backoff_seconds=0), []
    while True:
        answer = await gate.as_worker().fail(**under(offer, retryable=True, error="no"))
        seen.append((offer.attempt, answer.requeued))
        if not answer.requeued:
            break
        again = await gate.claim()
        assert again is not None
        offer = again

    assert seen == [(0, True), (1, True), (2, False)]
    assert (await gate.task(offer.task_id)).status == "failed"
    assert await gate.owed() == []


async def test_a_task_with_one_attempt_is_never_retried(gate: Gate) -> None:
    offer = await gate.leased(max_attempts=1)

    answer = await gate.as_worker().fail(**under(offer, retryable=True, error="no"))

    assert (answer.status, answer.requeued) == ("failed", False)


async def test_a_requeued_failure_answers_the_acceptance_and_discharges_nothing(gate: Gate) -> None:
    offer = await gate.leased()
    accepted = await gate.receipt(offer.task_id, "task.accepted")

    await failed(gate, offer)

    told = await gate.receipt(offer.task_id, "task.failed")
    assert told.parents == [accepted.receipt_id]
    assert {name: body(told)[name] for name in ("requeued", "retry_recommended", "attempt", "error")} == {
        "requeued": True, "retry_recommended": True, "attempt": 0, "error": {"why": "x"}}
    assert [receipt.receipt_id for receipt in await gate.owed()] == [offer.obligation_receipt_id]
    assert await gate.receipts(offer.task_id, "task.result_ready") == []
    assert not (await gate.as_agent().check_terminator(parent_receipt_id=offer.obligation_receipt_id)).has_terminator


async def test_each_failure_of_a_task_has_its_own_receipt(gate: Gate) -> None:
    offer = await gate.leased(retry_backoff_seconds=0)
    for _ in range(2):
        await failed(gate, offer)
        again = await gate.claim()
        assert again is not None
        offer = again

    assert len(await gate.receipts(offer.task_id, "task.failed")) == 2


@pytest.mark.parametrize("retryable", [True, False])
async def test_the_same_failure_again_returns_the_same_answer_and_writes_nothing(gate: Gate, retryable: bool) -> None:
    offer = await gate.leased()
    first = await gate.as_worker().fail(**under(offer, error="x", retryable=retryable))

    async with gate.unchanged():
        assert await gate.as_worker().fail(**under(offer, error="x", retryable=retryable)) == first
        again = await gate.as_worker().fail(**under(offer, error="y", retryable=not retryable))
        assert again == replace(first, error_differs=not retryable)     # an error of an attempt is not kept


async def test_a_failure_repeated_when_another_worker_has_the_task_returns_its_first_outcome(gate: Gate) -> None:
    offer = await gate.leased("w1", retry_backoff_seconds=0)
    ask = under(offer, error="x", retryable=True)
    first = await gate.as_worker("w1").fail(**ask)
    again = await gate.claim("w2")
    assert again is not None

    async with gate.unchanged():
        second = await gate.as_worker("w1").fail(**ask)

    assert (second.ok, second.status, second.requeued) == (first.ok, first.status, first.requeued), "a replay differs"
    assert (await gate.as_worker("w2").complete(**under(again))).ok


async def test_the_error_of_the_last_attempt_reaches_the_owner(gate: Gate) -> None:
    offer = await gate.leased()

    await gate.as_worker().fail(**under(offer, error={"why": "x"}))

    ready = await gate.receipt(offer.task_id, "task.result_ready")
    assert (body(ready)["status"], body(ready)["error"]) == ("failed", {"why": "x"})
    assert str(ready.to) == "agent ada"
