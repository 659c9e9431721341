"""Waiting: claims that wait for tasks, and reads that wait for the end of a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asyncgate.conformance import harness

pytestmark = pytest.mark.anyio


def start(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a call."""
    return asyncio.ensure_future(call)


async def settle(gate: harness.Gate, waiting: int) -> None:
    """Wait until a number of claims are waiting, and none is being processed."""
    async with asyncio.timeout(harness.PATIENCE):
        batches = gate.engine.batches
        while gate.engine.waiting.count != waiting or batches.flights or batches.waiting:  # noqa: ASYNC110 - not ours
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        await gate.engine.batches.wait_for_all()


async def got(call: asyncio.Task[Any]) -> list[str]:
    """Return the ids of the tasks that a claim finally gets."""
    async with asyncio.timeout(harness.PATIENCE):
        return [offer.task_id for offer in (await call).tasks]


async def wait(gate: harness.Gate, worker: str = "w1", **ask: Any) -> Any:
    """Claim with a wait."""
    return await gate.as_worker(worker).lease_next(**{"wait_seconds": 30, **ask})


async def test_a_waiting_claim_gets_the_task_that_is_created(gate: harness.Gate) -> None:
    claim = start(wait(gate))
    await settle(gate, 1)

    task_id = await gate.create()

    assert await got(claim) == [task_id]
    assert gate.engine.waiting.count == 0


async def test_a_claim_with_work_at_hand_does_not_wait(gate: harness.Gate) -> None:
    task_id = await gate.create()

    assert await got(start(wait(gate))) == [task_id]


async def test_a_claim_whose_time_is_over_gets_an_empty_list(gate: harness.Gate) -> None:
    assert await got(start(wait(gate, wait_seconds=0.01))) == []
    assert gate.engine.waiting.count == 0


async def test_a_wait_is_clamped(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(max_wait_seconds=0.01)

    assert await got(start(wait(gate, wait_seconds=10**9))) == []


async def test_who_waits_first_is_served_first(gate: harness.Gate) -> None:
    claims = []
    for number in range(5):
        claims.append(start(wait(gate, f"w{number}")))
        await settle(gate, number + 1)

    for claim in claims:    # one after another, because concurrent claims have no order
        task = await gate.create()
        assert await got(claim) == [task]


async def test_a_task_wakes_only_a_claim_that_it_fits(gate: harness.Gate) -> None:
    plain, gpu = start(wait(gate, "w1", accept_types=["a"])), start(wait(gate, "w2", capabilities=["gpu"]))
    await settle(gate, 2)

    wanted = await gate.create(type="b", requirements={"capabilities": ["gpu"]})

    assert await got(gpu) == [wanted]
    assert not plain.done()
    later = await gate.create(type="a")
    assert await got(plain) == [later]


async def test_tasks_created_together_wake_as_many_claims(gate: harness.Gate) -> None:
    claims = [start(wait(gate, f"w{number}")) for number in range(8)]
    await settle(gate, 8)

    made = await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 8)

    given = [task for claim in claims for task in await got(claim)]
    assert sorted(given) == sorted(item.task_id for item in made.results)


async def test_a_waiting_claim_gets_a_delayed_task_when_its_time_comes(gate: harness.Gate) -> None:
    claim = start(wait(gate))
    await settle(gate, 1)

    later = await gate.create(delay_seconds=0.05)
    assert await got(claim) == [later]


async def test_a_claim_that_comes_after_a_delayed_task_gets_it_when_its_time_comes(gate: harness.Gate) -> None:
    task_id = await gate.create(delay_seconds=0.1)

    assert await got(start(wait(gate))) == [task_id]


async def test_the_earlier_of_two_delayed_tasks_comes_first(gate: harness.Gate) -> None:
    claim = start(wait(gate))
    await settle(gate, 1)
    await gate.create(delay_seconds=3000)

    later = await gate.create(delay_seconds=0.05)
    assert await got(claim) == [later]


@pytest.mark.parametrize("way", ["release", "failure", "hold"])
async def test_a_waiting_claim_gets_what_comes_back(gate: harness.Gate, way: str) -> None:
    offer = await gate.leased("w1", retry_backoff_seconds=0, max_expiries=1)
    if way == "hold":
        await gate.lose(offer)
    claim = start(wait(gate, "w2"))
    await settle(gate, 1)

    if way == "release":
        await gate.as_worker("w1").release_lease(**harness.under(offer))
    elif way == "failure":
        await gate.as_worker("w1").fail(**harness.under(offer, retryable=True, error="no"))
    else:
        await gate.as_agent().release_hold(task_id=offer.task_id)

    assert await got(claim) == [offer.task_id]


async def test_a_waiting_claim_gets_what_the_sweep_takes_back(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(expiry_jitter_seconds=0)
    offer = await gate.leased("w1")
    claim = start(wait(gate, "w2"))
    await settle(gate, 1)

    await gate.wait(301)

    assert await got(claim) == [offer.task_id]


async def test_a_claim_that_is_given_up_leaves_its_task_to_the_next(gate: harness.Gate) -> None:
    first, second = start(wait(gate, "w1")), start(wait(gate, "w2"))
    await settle(gate, 2)

    creation = start(gate.create())
    first.cancel()
    task_id = await creation

    assert await got(second) == [task_id]


async def test_a_claim_that_gets_something_better_leaves_its_task_to_the_next(gate: harness.Gate) -> None:
    claims = []
    for worker, types in (("w1", ["a", "b"]), ("w2", ["b"]), ("w3", ["a"])):
        claims.append(start(wait(gate, worker, accept_types=types)))
        await settle(gate, len(claims))

    made = await gate.as_agent().create_tasks(tasks=[
        {"type": "a", "payload": None}, {"type": "b", "payload": None, "priority": 5}])

    plain, urgent = (item.task_id for item in made.results)
    assert await got(claims[0]) == [urgent]
    assert await got(claims[2]) == [plain], "w1 was called for it, and got the urgent one"
    await settle(gate, 1)
    assert not claims[1].done()
    gate.engine.drain()
    assert await got(claims[1]) == []


async def test_a_claim_called_for_a_task_that_another_took_waits_on(gate: harness.Gate) -> None:
    claim = start(wait(gate, "w1"))
    await settle(gate, 1)

    made, taken = await asyncio.gather(gate.as_agent().create_task(type="demo", payload=None), gate.claim("w2"))

    last = await gate.create()
    assert await got(claim) == [last if taken else made.task_id]


async def test_no_wake_up_is_lost_under_load(gate: harness.Gate) -> None:
    async def work(worker: str) -> int:
        done = 0
        while offers := (await wait(gate, worker)).tasks:
            if offers[0].type == "stop":
                return done
            await gate.as_worker(worker).complete(**harness.under(offers[0], artifacts=[{"uri": "x"}]))
            done += 1
        raise AssertionError("a worker waited without a result")

    async with asyncio.timeout(harness.PATIENCE):
        workers = [start(work(f"w{number}")) for number in range(8)]
        await asyncio.gather(*(gate.create() for _ in range(40)))
        for _ in range(40):
            await gate.create()
        await gate.as_agent().create_tasks(tasks=[{"type": "stop", "payload": None, "priority": -1}] * 8)
        assert sum(await asyncio.gather(*workers)) == 80


async def test_a_gate_that_stops_answers_waiting_claims_empty(gate: harness.Gate) -> None:
    claims = [start(wait(gate, f"w{number}")) for number in range(3)]
    await settle(gate, 3)

    gate.engine.drain()

    assert [await got(claim) for claim in claims] == [[], [], []]
    assert await got(start(wait(gate))) == [], "a new call must not wait either"


async def test_too_many_waiting_claims_are_refused(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(max_waiting_claims=2)
    claims = [start(wait(gate, f"w{number}")) for number in range(2)]
    await settle(gate, 2)

    with harness.refused("rate_limit_exceeded", retry_after=1):
        await wait(gate, "w3")

    claims[0].cancel()
    await asyncio.gather(claims[0], return_exceptions=True)
    third = start(wait(gate, "w3"))
    await settle(gate, 2)
    gate.engine.drain()
    assert await got(third) == []


async def test_work_of_another_tenant_wakes_nobody(gate: harness.Gate) -> None:
    claim = start(wait(gate))
    await settle(gate, 1)

    await gate.stranger().create()
    await settle(gate, 1)

    assert not claim.done()
    later = await gate.create()
    assert await got(claim) == [later]


@pytest.mark.parametrize("end", ["complete", "fail", "cancel"])
async def test_get_task_waits_for_the_end(gate: harness.Gate, end: str) -> None:
    offer = await gate.leased()
    reader = start(gate.as_agent().get_task(task_id=offer.task_id, wait_seconds=30))
    await settle(gate, 0)
    assert not reader.done()

    if end == "cancel":
        await gate.as_agent().cancel_task(task_id=offer.task_id)
    else:
        await getattr(gate.as_worker(), end)(**harness.NEEDED.get(end, {}), **harness.under(offer))

    async with asyncio.timeout(harness.PATIENCE):
        assert (await reader).status == {"complete": "succeeded", "fail": "failed", "cancel": "canceled"}[end]


async def test_get_task_waits_on_through_a_retry(gate: harness.Gate) -> None:
    offer = await gate.leased(retry_backoff_seconds=0)
    reader = start(gate.as_agent().get_task(task_id=offer.task_id, wait_seconds=30))
    await settle(gate, 0)

    await gate.as_worker().fail(**harness.under(offer, retryable=True, error="no"))
    await settle(gate, 0)
    assert not reader.done()

    again = await gate.claim()
    assert again is not None
    await gate.as_worker().complete(**harness.under(again))
    async with asyncio.timeout(harness.PATIENCE):
        assert (await reader).status == "succeeded"


async def test_get_task_answers_when_the_time_is_over(gate: harness.Gate) -> None:
    task_id = await gate.create()

    assert (await gate.as_agent().get_task(task_id=task_id, wait_seconds=0.01)).status == "queued"


async def test_get_task_of_an_ended_task_does_not_wait(gate: harness.Gate) -> None:
    offer = await gate.finished()

    async with asyncio.timeout(harness.PATIENCE):
        assert (await gate.as_agent().get_task(task_id=offer.task_id, wait_seconds=30)).status == "succeeded"


async def test_run_task_returns_the_outcome(gate: harness.Gate) -> None:
    worker = start(wait(gate))
    run = start(gate.as_agent().run_task(type="demo", payload=None, wait_seconds=30))
    async with asyncio.timeout(harness.PATIENCE):
        offer = (await worker).tasks[0]
        await gate.as_worker().complete(**harness.under(offer, result=42, artifacts=[{"uri": "x"}]))
        record = await run

    assert (record.task_id, record.status) == (offer.task_id, "succeeded")
    assert bytes(record.result.result) == b"42"


async def test_run_task_returns_the_task_when_the_time_is_over(gate: harness.Gate) -> None:
    record = await gate.as_agent().run_task(type="demo", payload=None, wait_seconds=0.01)

    assert record.status == "queued"
    assert [receipt.task_id for receipt in await gate.owed()] == [record.task_id]


async def test_a_gate_that_stops_answers_waiting_readers(gate: harness.Gate) -> None:
    task_id = await gate.create()
    reader = start(gate.as_agent().get_task(task_id=task_id, wait_seconds=30))
    await settle(gate, 0)

    gate.engine.drain()

    async with asyncio.timeout(harness.PATIENCE):
        assert (await reader).status == "queued"
