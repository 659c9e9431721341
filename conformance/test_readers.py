"""Waiting readers: a list of receipts or obligations that is empty stays open until something comes for its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asyncgate.conformance import harness

pytestmark = pytest.mark.anyio
LISTS = {"list_receipts": "receipts", "list_open_obligations": "open_obligations"}
both = pytest.mark.parametrize("operation", list(LISTS))


def start(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Let a call begin."""
    return asyncio.ensure_future(call)


async def settle(gate: harness.Gate, waiting: int) -> None:
    """Wait until so many reads wait, and all of them have looked."""
    async with asyncio.timeout(harness.PATIENCE):
        while gate.engine.readers.count != waiting or any(  # noqa: ASYNC110  # nothing tells it
                seat.call.done() or seat.looking for seat in gate.engine.readers.list_seats()):
            await asyncio.sleep(0)


async def read(view: harness.View, operation: str, **ask: Any) -> list[str]:
    """Read a page, waiting if it is empty; return the ids of its receipts."""
    page = await getattr(view, operation)(**{"wait_seconds": 30, **ask})
    return [receipt.receipt_id for receipt in getattr(page, LISTS[operation])]


async def got(call: asyncio.Task[Any]) -> Any:
    """Return what a call answers at last."""
    async with asyncio.timeout(harness.PATIENCE):
        return await call


@both
async def test_an_empty_page_waits_for_what_comes(gate: harness.Gate, operation: str) -> None:
    call = start(read(gate.as_agent(), operation))
    await settle(gate, 1)

    task_id = await gate.create()

    assert await got(call) == [(await gate.receipt(task_id, "task.assigned")).receipt_id]
    assert gate.engine.readers.count == 0


@both
async def test_a_page_that_has_something_never_waits(gate: harness.Gate, operation: str) -> None:
    await gate.create()

    assert len(await got(start(read(gate.as_agent(), operation)))) == 1


@both
async def test_a_reader_waits_behind_its_cursor(gate: harness.Gate, operation: str) -> None:
    await gate.create()
    [seen] = await read(gate.as_agent(), operation)
    call = start(read(gate.as_agent(), operation, since_receipt_id=seen))
    await settle(gate, 1)

    task_id = await gate.create()

    assert await got(call) == [(await gate.receipt(task_id, "task.assigned")).receipt_id]


@both
async def test_an_empty_page_comes_when_the_time_is_over_and_keeps_the_cursor(gate: harness.Gate,
                                                                              operation: str) -> None:
    await gate.create()
    [seen] = await read(gate.as_agent(), operation)

    page = await getattr(gate.as_agent(), operation)(since_receipt_id=seen, wait_seconds=0.01)

    assert (getattr(page, LISTS[operation]), page.cursor) == ([], seen)
    assert gate.engine.readers.count == 0


@both
async def test_what_comes_for_others_wakes_nobody(gate: harness.Gate, operation: str) -> None:
    call = start(read(gate.as_agent("ada"), operation))
    await settle(gate, 1)

    await gate.create(by="bob")
    await gate.stranger().create(by="ada")
    await settle(gate, 1)
    assert not call.done()

    await gate.create(by="ada")
    assert len(await got(call)) == 1


async def test_a_filter_decides_what_a_reader_waits_for(gate: harness.Gate) -> None:
    offer, other = await gate.leased(), await gate.create()
    calls = {
        "type": start(read(gate.as_agent(), "list_receipts", receipt_type="task.canceled")),
        "to anybody": start(read(gate.as_admin(), "list_receipts", receipt_type="task.canceled")),
        "task": start(read(gate.as_agent(), "list_receipts", task_id=other, receipt_type="task.canceled")),
        "to": start(read(gate.as_admin(), "list_receipts", to_id="eve")),
        "to a kind": start(read(gate.as_admin(), "list_receipts", to_kind="worker", to_id="eve"))}
    await settle(gate, 5)

    await gate.as_worker().complete(**harness.under(offer), artifacts=[{"uri": "x"}])
    await settle(gate, 5)
    assert not any(call.done() for call in calls.values())

    await gate.as_agent().cancel_task(task_id=other)
    canceled = (await gate.receipt(other, "task.canceled")).receipt_id
    assert await got(calls["to anybody"]) == await got(calls["task"]) == [canceled]
    await settle(gate, 3)
    await gate.create(by="eve")
    assert len(await got(calls["to"])) == 1
    assert not calls["to a kind"].done()
    assert not calls["type"].done(), "a cancellation is told to the gate, and the creator is told of a result"
    gate.engine.drain()
    assert await got(calls["to a kind"]) == await got(calls["type"]) == []


async def test_receipts_that_open_nothing_do_not_answer_a_reader_of_obligations(gate: harness.Gate) -> None:
    offer = await gate.leased(max_expiries=0)
    [duty] = await read(gate.as_agent(), "list_open_obligations")
    call = start(read(gate.as_agent(), "list_open_obligations", since_receipt_id=duty))
    await settle(gate, 1)

    await gate.lose(offer)
    await settle(gate, 1)
    assert not call.done()

    await gate.create()
    assert len(await got(call)) == 1


async def test_a_reader_that_follows_sees_every_receipt_once(gate: harness.Gate) -> None:
    seen: list[str] = []

    async def follow() -> None:
        while len(seen) < 60:
            seen.extend(await read(gate.as_agent(), "list_receipts", limit=7,
                                   **({"since_receipt_id": seen[-1]} if seen else {})))

    follower = start(follow())
    await asyncio.gather(*(gate.create() for _ in range(30)))
    for _ in range(30):
        await gate.create()

    await got(follower)
    assert seen == [receipt.receipt_id for receipt in await gate.receipts()]


@both
async def test_a_gate_that_stops_answers_waiting_readers_of_lists(gate: harness.Gate, operation: str) -> None:
    calls = [start(read(gate.as_agent(f"a{number}"), operation)) for number in range(3)]
    await settle(gate, 3)

    gate.engine.drain()

    assert [await got(call) for call in calls] == [[], [], []]
    assert await got(start(read(gate.as_agent(), operation))) == [], "nor does a new one wait"


@both
async def test_a_reader_that_is_given_up_frees_its_place(gate: harness.Gate, operation: str) -> None:
    call = start(read(gate.as_agent(), operation))
    await settle(gate, 1)

    call.cancel()

    await asyncio.gather(call, return_exceptions=True)
    assert (gate.engine.readers.count, dict(gate.engine.readers.seats)) == (0, {})


@both
async def test_too_many_waiting_readers_are_refused(make_gate: Callable[..., harness.Gate], operation: str) -> None:
    gate = make_gate(max_waiting_readers=1)
    call = start(read(gate.as_agent(), operation))
    await settle(gate, 1)

    with harness.refused("rate_limit_exceeded", retry_after=1):
        await read(gate.as_agent("bob"), operation)
    assert await read(gate.as_agent("bob"), operation, wait_seconds=0) == []
    gate.engine.drain()
    assert await got(call) == []


@both
async def test_hundreds_of_readers_wait_at_once(gate: harness.Gate, operation: str) -> None:
    calls = [start(read(gate.as_agent(), operation)) for _ in range(200)]
    await settle(gate, 200)

    task_id = await gate.create()

    duty = (await gate.receipt(task_id, "task.assigned")).receipt_id
    assert [await got(call) for call in calls] == [[duty]] * 200


async def test_who_may_not_read_does_not_wait_either(gate: harness.Gate) -> None:
    task_id = await gate.create(by="ada")

    with harness.refused("forbidden"):
        await read(gate.as_agent("eve"), "list_receipts", task_id=task_id)
    with harness.refused("forbidden"):
        await read(gate.as_agent("eve"), "list_receipts", to_id="ada")
    with harness.refused("forbidden"):
        await read(gate.as_agent("eve"), "list_open_obligations", principal_kind="agent", principal_id="ada")
    assert gate.engine.readers.count == 0
