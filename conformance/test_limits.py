"""Limits: requests that are too large or invalid are refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from asyncgate.conformance import harness

pytestmark = pytest.mark.anyio

MB, WIDEST = 2**20, 2**53 - 1


@pytest.mark.parametrize(("size", "fits"), [(MB, True), (MB + 1, False)])
async def test_a_payload_may_be_a_megabyte(gate: harness.Gate, size: int, fits: bool) -> None:
    if fits:
        task_id = await gate.create(payload="x" * (size - 2))
        assert len(bytes((await gate.task(task_id)).payload)) == size
        assert harness.body(await gate.receipt(task_id, "task.assigned"))["payload_bytes"] == size
    else:
        async with gate.unchanged():
            with harness.refused("payload_too_large"):
                await gate.create(payload="x" * (size - 2))


@pytest.mark.parametrize(("verb", "field"), [("complete", "result"), ("fail", "error")])
@pytest.mark.parametrize(("size", "fits"), [(MB, True), (MB + 1, False)])
async def test_a_result_or_an_error_may_be_a_megabyte(gate: harness.Gate, verb: str, field: str, size: int,
                                                      fits: bool) -> None:
    offer = await gate.leased()
    ask = harness.under(offer, **{field: "x" * (size - 2)})

    if fits:
        assert (await getattr(gate.as_worker(), verb)(**ask)).ok
        outcome = (await gate.task(offer.task_id)).result
        assert len(bytes(getattr(outcome, field))) == size
    else:
        async with gate.unchanged():
            with harness.refused("payload_too_large"):
                await getattr(gate.as_worker(), verb)(**ask)


@pytest.mark.one_store
@pytest.mark.parametrize("wrong", [
    {"type": ""}, {"type": "x" * 201}, {"type": None}, {"type": 7}, {"type": "a\nb"}, {"type": " a"},
    {"type": "a\u202eb"}, {"priority": WIDEST + 1}, {"priority": -WIDEST - 1}, {"priority": 1.5},
    {"priority": "1"}, {"priority": True}, {"max_attempts": 0}, {"max_attempts": -1}, {"max_attempts": 1.5},
    {"retry_backoff_seconds": -1}, {"delay_seconds": -1}, {"delay_seconds": "1"}, {"max_expiries": -1},
    {"idempotency_key": ""},
    {"idempotency_key": "k" * 201}, {"requirements": []}, {"requirements": {"capabilities": "gpu"}},
    {"requirements": {"capabilities": ["c" * 101]}}, {"requirements": {"capabilities": [f"c{n}" for n in range(65)]}},
    {"requirements": {"capabilities": [1]}}, {"timeouts": {"lease_ttl_seconds": 0}},
    {"timeouts": {"deadline": "tomorrow"}},
    {"timeouts": {"deadline": "2030-01-01T00:00:00"}}, {"result_delivery": 7}, {"task_summary": 7},
    {"principal_kind": "wizard", "principal_id": "x"}], ids=lambda wrong: str(wrong)[:50])
async def test_a_task_that_makes_no_sense_is_refused(gate: harness.Gate, wrong: dict[str, Any]) -> None:
    async with gate.unchanged():
        with harness.refused("invalid_request"):
            await gate.as_agent().create_task(**{"type": "demo", "payload": None, **wrong})


@pytest.mark.parametrize("right", [
    {"type": "x" * 200}, {"type": "ünï/code:ok #1"}, {"priority": WIDEST}, {"priority": -WIDEST},
    {"max_attempts": 1000},
    {"retry_backoff_seconds": 0}, {"max_expiries": 0}, {"idempotency_key": "k" * 200},
    {"requirements": {"capabilities": [f"{n:0100}" for n in range(64)]}}, {"requirements": {}},
    {"timeouts": {"lease_ttl_seconds": 10**9}}], ids=lambda right: str(right)[:50])
async def test_a_task_at_the_limit_is_taken(gate: harness.Gate, right: dict[str, Any]) -> None:
    made = await gate.as_agent().create_task(**{"type": "demo", "payload": None, **right})

    task = await gate.task(made.task_id)
    for name, value in right.items():
        kept = getattr(task, name)
        assert (msgspec.json.decode(kept) if isinstance(kept, msgspec.Raw) else
                msgspec.to_builtins(kept) | value if isinstance(value, dict) else kept) == value


async def test_the_widest_priorities_are_ordered_exactly(gate: harness.Gate) -> None:
    low, high = await gate.create(priority=WIDEST - 1), await gate.create(priority=WIDEST)

    assert [offer.task_id for offer in (await gate.as_worker().lease_next(max_tasks=2)).tasks] == [high, low]


@pytest.mark.one_store
@pytest.mark.parametrize("missing", ["task_id", "lease_id"])
@pytest.mark.parametrize("verb", ["start_task", "report_progress", "complete", "fail", "release_lease"])
async def test_a_verb_that_does_not_say_which_lease_is_refused(gate: harness.Gate, verb: str, missing: str) -> None:
    offer = await gate.leased()
    ask = harness.under(offer)
    del ask[missing]

    async with gate.unchanged():
        with harness.refused("invalid_request"):
            await getattr(gate.as_worker(), verb)(**harness.NEEDED.get(verb, {}), **ask)


@pytest.mark.parametrize("fence", [1.5, "1", WIDEST + 1])
async def test_a_fence_is_an_integer(gate: harness.Gate, fence: Any) -> None:
    offer = await gate.leased()

    with harness.refused("invalid_request"):
        await gate.as_worker().complete(**harness.under(offer, fence=fence))


@pytest.mark.parametrize("wait", [-1, "5", None])
async def test_a_pause_before_a_retry_is_no_less_than_nothing(gate: harness.Gate, wait: Any) -> None:
    offer = await gate.leased()
    ask = harness.under(offer, error="no luck", retryable=True, retry_after_seconds=wait)

    if wait is None:
        assert (await gate.as_worker().fail(**ask)).requeued
    else:
        async with gate.unchanged():
            with harness.refused("invalid_request"):
                await gate.as_worker().fail(**ask)


async def test_the_limits_are_settings(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(max_payload_bytes=10, max_result_bytes=10, max_progress_bytes=10)
    offer = await gate.leased()
    long, w1 = "x" * 20, gate.as_worker()

    async with gate.unchanged():
        for refusal in (gate.create(payload=long), w1.complete(**harness.under(offer, result=long)),
                        w1.fail(**harness.under(offer, error=long)),
                        w1.report_progress(**harness.under(offer, progress=long))):
            with harness.refused("payload_too_large"):
                await refusal


async def test_the_defaults_are_settings(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(default_priority=4, default_max_attempts=9, default_retry_backoff_seconds=2, max_expiries=6,
                     default_lease_ttl_seconds=50, max_lease_ttl_seconds=60)
    offer = await gate.leased()

    task = await gate.task(offer.task_id)
    assert (task.priority, task.max_attempts, task.retry_backoff_seconds, task.max_expiries) == (4, 9, 2, 6)
    assert offer.renew_every_seconds == pytest.approx(50 / 3)
    renewed = await gate.as_worker().renew_lease(**harness.under(offer, extend_by_seconds=999))
    assert renewed.renew_every_seconds == pytest.approx(20)
