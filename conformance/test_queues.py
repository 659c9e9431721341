"""Queues: how many tasks each has, counted with each batch; and for how long the oldest has been waiting."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import astuple

from asyncgate.conformance import harness
from asyncgate.parts.model import queries, stored
from asyncgate.parts.upkeep import Upkeep

pytestmark = pytest.mark.anyio

OCR = {"capabilities": ["ocr"]}
LONG = 3600


async def numbers(gate: harness.Gate, type: str = "demo") -> tuple[int, int, int, int]:
    """Return how many tasks of a type are claimable, delayed, on hold and leased."""
    rows = (await gate.as_admin().list_queues(type=type)).queues
    return (rows[0].claimable, rows[0].delayed, rows[0].held, rows[0].leased) if rows else (0, 0, 0, 0)


async def test_a_task_is_counted_from_its_creation_to_its_end(gate: harness.Gate) -> None:
    assert (await gate.as_admin().list_queues()).queues == []
    task_id = await gate.create()
    assert await numbers(gate) == (1, 0, 0, 0)

    offer = await gate.claim()
    assert offer is not None
    assert await numbers(gate) == (0, 0, 0, 1)
    await gate.as_worker().start_task(**harness.under(offer))
    assert await numbers(gate) == (0, 0, 0, 1)
    await gate.as_worker().release_lease(**harness.under(offer))
    assert await numbers(gate) == (1, 0, 0, 0)
    await gate.as_agent().cancel_task(task_id=task_id)

    assert await numbers(gate) == (0, 0, 0, 0)
    assert await harness.miscounted(gate) == []


async def test_a_queue_is_what_has_one_type_and_requires_the_same(gate: harness.Gate) -> None:
    await gate.create("scan", requirements=OCR)
    await gate.create("scan", requirements={"capabilities": ["ocr", "gpu"]})
    await gate.create("scan", requirements={**OCR, "tags": ["x"]})
    await gate.create("mail")

    queues = (await gate.as_admin().list_queues()).queues

    assert sorted((row.type, row.capabilities, row.claimable) for row in queues) == [
        ("mail", [], 1), ("scan", ["gpu", "ocr"], 1), ("scan", ["ocr"], 2)]
    assert [row.type for row in queues] == ["mail", "scan", "scan"]
    assert [row.type for row in (await gate.as_admin().list_queues(type="mail")).queues] == ["mail"]


async def test_a_delayed_task_becomes_claimable_when_its_time_comes_though_nobody_claims(gate: harness.Gate) -> None:
    await gate.create(delay_seconds=50)
    await gate.create(delay_seconds=LONG)
    assert await numbers(gate) == (0, 2, 0, 0)

    gate.skip(60)

    assert await numbers(gate) == (1, 1, 0, 0)
    [row] = (await gate.as_admin().list_queues()).queues
    assert row.oldest_wait_seconds == pytest.approx(10, abs=5)
    assert await gate.claim() is not None
    assert await numbers(gate) == (0, 1, 0, 1)


async def test_a_task_that_failed_waits_for_its_next_attempt(gate: harness.Gate) -> None:
    offer = await gate.leased(retry_backoff_seconds=30)
    await gate.as_worker().fail(**harness.under(offer, error="x", retryable=True))
    assert await numbers(gate) == (0, 1, 0, 0)

    gate.skip(31)

    assert await numbers(gate) == (1, 0, 0, 0)


async def test_a_task_on_hold_is_counted_apart(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(max_expiries=1)
    offer = await gate.leased()
    await gate.lose(offer)
    assert await numbers(gate) == (0, 0, 1, 0)

    await gate.backend.drop_lanes()
    assert await numbers(gate) == (0, 0, 1, 0)
    await gate.as_agent().release_hold(task_id=offer.task_id)

    assert await numbers(gate) == (1, 0, 0, 0)


async def test_the_oldest_wait_is_that_of_the_oldest_claimable_task_whatever_its_priority(gate: harness.Gate) -> None:
    for priority, seconds in ((0, 100), (5, 10), (-3, 40), (5, 1)):
        await gate.create(priority=priority)
        gate.skip(seconds)

    waits = []
    for _ in range(4):
        [row] = (await gate.as_admin().list_queues()).queues
        waits.append(row.oldest_wait_seconds)
        await gate.claim()      # priorities 5, 5, 0, -3

    assert waits == [pytest.approx(seconds, abs=8) for seconds in (151, 151, 151, 41)]
    [row] = (await gate.as_admin().list_queues()).queues
    assert (row.leased, row.oldest_wait_seconds) == (4, None)


async def test_what_went_back_to_the_queue_waits_since_then(gate: harness.Gate) -> None:
    offer = await gate.leased()
    gate.skip(100)
    await gate.as_worker().release_lease(**harness.under(offer))
    gate.skip(20)

    [row] = (await gate.as_admin().list_queues()).queues

    assert row.oldest_wait_seconds == pytest.approx(20, abs=8)


async def test_one_queue_is_read_by_its_id(gate: harness.Gate) -> None:
    await gate.create("scan", requirements=OCR)
    [row] = (await gate.as_admin().list_queues()).queues

    queue = await gate.as_admin().get_queue(queue_id=row.queue_id)
    assert (queue.queue_id, queue.type, queue.capabilities, queue.claimable) == (row.queue_id, "scan", ["ocr"], 1)
    for unknown in ("0" * 16, "scan", "f" * 15, "f" * 18, row.queue_id + " "):
        with harness.refused("queue_not_found"):
            await gate.as_admin().get_queue(queue_id=unknown)
    with harness.refused("queue_not_found"):
        await gate.stranger().as_admin().get_queue(queue_id=row.queue_id)


async def test_a_list_is_followed_to_its_end_and_a_cursor_is_good_for_its_list_only(gate: harness.Gate) -> None:
    for number in range(5):
        await gate.create(f"t {number}")
        await gate.create(f"t {number}", requirements=OCR)
    queues, cursor = list[tuple[str, str]](), None
    while True:
        page = await gate.as_admin().list_queues(limit=3, cursor=cursor)
        queues += [(row.type, row.queue_id) for row in page.queues]
        if (cursor := page.next_cursor) is None:
            break
        last = cursor

    assert len(set(queues)) == 10
    assert [type for type, _ in queues] == sorted(type for type, _ in queues)
    with harness.refused("invalid_cursor"):
        await gate.as_admin().list_queues(type="t 1", cursor=last)
    with harness.refused("invalid_cursor"):
        await gate.stranger().as_admin().list_queues(cursor=last)


async def test_only_admins_see_queues(gate: harness.Gate) -> None:
    await gate.create()

    for view in (gate.as_agent(), gate.as_worker()):
        with harness.refused("forbidden"):
            await view.list_queues()
        with harness.refused("forbidden"):
            await view.get_queue(queue_id="0" * 16)
    assert (await gate.stranger().as_admin().list_queues()).queues == []


async def test_a_batch_of_all_kinds_is_counted(gate: harness.Gate) -> None:
    order: dict[str, Any] = {"type": "demo", "payload": None}
    made = await gate.as_agent().create_tasks(tasks=[order, {**order, "delay_seconds": LONG}, {**order, "type": "t"},
                                                     {**order, "max_attempts": 0}])
    first = made.results[0].task_id

    await asyncio.gather(gate.claim("w1"), gate.claim("w2"), gate.create(), gate.create("t"),
                         gate.as_agent().cancel_task(task_id=first), return_exceptions=True)

    assert await harness.miscounted(gate) == []


async def test_what_is_refused_is_not_counted(gate: harness.Gate) -> None:
    task_id = await gate.create(idempotency_key="k")
    await gate.create(idempotency_key="k")
    offer = await gate.claim()
    assert offer is not None
    with harness.refused("lease_invalid_or_expired"):
        await gate.as_worker("w2").complete(**harness.under(offer, artifacts=["x"]))

    assert await numbers(gate) == (0, 0, 0, 1)
    await gate.as_agent().cancel_task(task_id=task_id)
    assert await harness.miscounted(gate) == []


async def test_a_queue_is_listed_for_an_hour_after_its_last_task(gate: harness.Gate) -> None:
    await gate.finished(type="once")
    await gate.leased(type="other")
    for seconds, listed in ((1800, ["once", "other"]), (1801, ["other"])):
        gate.skip(seconds)
        await gate.backend.drop_lanes()
        assert [row.type for row in (await gate.as_admin().list_queues()).queues] == listed

    assert await numbers(gate, "other") == (0, 0, 0, 1)
    assert await harness.miscounted(gate) == []
    await gate.finished(type="once")
    assert await harness.miscounted(gate) == []


# What happened.


async def flows(gate: harness.Gate, type: str = "demo") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what happened in the queue of a type in the last minute, and in the last hour."""
    [row] = (await gate.as_admin().list_queues(type=type)).queues
    return astuple(row.last_minute), astuple(row.last_hour)


async def to_a_new_minute(gate: harness.Gate) -> None:
    """Move the clock to the beginning of a minute: numbers are kept by whole minutes."""
    gate.skip(60 - gate.now() % 60)


async def test_what_happens_in_a_queue_is_counted_by_the_minute_and_by_the_hour(gate: harness.Gate) -> None:
    await to_a_new_minute(gate)
    await gate.finished()
    await gate.as_agent().cancel_task(task_id=await gate.create())
    for retryable in (True, False):
        offer = await gate.leased(retry_backoff_seconds=0)
        await gate.as_worker().fail(**harness.under(offer, error="x", retryable=retryable))
        if retryable:
            await gate.as_agent().cancel_task(task_id=offer.task_id)
    await gate.leased()
    assert await flows(gate) == ((4, 4, 2, 0), (4, 4, 2, 0))

    gate.skip(310)
    await gate.sweep()
    assert await flows(gate) == ((0, 0, 0, 1), (4, 4, 2, 1))
    gate.skip(3700)

    assert await flows(gate) == ((0, 0, 0, 0), (0, 0, 0, 0))


async def test_the_minutes_are_returned_one_by_one_if_they_are_asked_for(gate: harness.Gate) -> None:
    other = gate.beside()
    await to_a_new_minute(gate)
    await gate.finished()
    gate.skip(120)
    await other.finished()
    await Upkeep(other.engine).store_traffic()
    await gate.leased()

    [row] = (await gate.as_admin().list_queues(minutes=4)).queues
    [without] = (await gate.as_admin().list_queues()).queues

    assert (row.by_minute.started, row.by_minute.ended) == ([0, 1, 0, 2], [0, 1, 0, 1])
    assert row.by_minute == (await gate.as_admin().get_queue(queue_id=row.queue_id, minutes=4)).by_minute
    assert without.by_minute is UNSET


async def test_the_minute_slides(gate: harness.Gate) -> None:
    await to_a_new_minute(gate)
    for _ in range(4):
        await gate.finished()
    gate.skip(60)
    assert (await flows(gate))[0] == (4, 4, 0, 0)

    gate.skip(30)

    assert (await flows(gate))[0] == (2, 2, 0, 0)


async def test_what_another_process_has_done_is_known_when_it_has_stored_it(gate: harness.Gate) -> None:
    other = gate.beside()
    await to_a_new_minute(gate)
    await other.finished()
    await gate.finished()
    assert (await flows(gate))[1] == (1, 1, 0, 0)

    for _ in range(2):
        await Upkeep(other.engine).store_traffic()
        await Upkeep(gate.engine).store_traffic()
        assert await flows(gate) == await flows(other) == ((2, 2, 0, 0), (2, 2, 0, 0))
    assert (await flows(gate.beside()))[1] == (2, 2, 0, 0)


async def test_beside_another_process_tasks_are_counted_at_once_and_workers_when_they_are_stored(
    gate: harness.Gate) -> None:
    other = gate.beside()
    await gate.create()
    await gate.create()
    assert await gate.claim() is not None

    before = (await other.as_admin().list_queues()).queues
    await Upkeep(gate.engine).store_presences()
    after = (await other.as_admin().list_queues()).queues

    assert [(row.claimable, row.leased, row.workers) for row in before] == [(1, 1, 0)]
    assert [(row.claimable, row.leased, row.workers) for row in after] == [(1, 1, 1)]


async def test_what_a_worker_holds_is_known_at_once_beside_another_process(gate: harness.Gate) -> None:
    other = gate.beside()
    await gate.finished()
    await Upkeep(gate.engine).store_presences()
    await gate.create()
    assert await gate.claim() is not None

    [worker] = (await other.as_admin().list_workers()).workers

    assert (worker.holding, worker.leased) == (1, 1)      # one lease of two that it was granted


async def test_old_minutes_are_dropped(gate: harness.Gate) -> None:
    upkeep = Upkeep(gate.engine)
    await to_a_new_minute(gate)
    for seconds in (0, 1800, 1800, 1800, 1800):
        gate.skip(seconds)
        await gate.finished()
        assert await upkeep.store_traffic() == 1
    assert await upkeep.store_traffic() == 0

    kept = await gate.backend.page(gate.tenant_id, queries.Rows(stored.Traffic))

    assert [row.process != "" for row in kept] == [False, False, True, True, True]     # the last hour by the minute


async def test_a_queue_tells_how_many_workers_can_take_its_tasks(gate: harness.Gate) -> None:
    await gate.create("scan", requirements=OCR)
    await gate.create("mail", requirements=OCR)
    await gate.claim("w1", capabilities=["gpu"])
    await gate.claim("w2", accept_types=["mail"], capabilities=["gpu", "ocr"])
    await gate.claim("w3", accept_types=["none"], capabilities=["ocr"])
    await gate.claim("w4", capabilities=["ocr"])

    def by_type(rows: list[Any]) -> dict[str, int]:
        return {row.type: row.workers for row in rows}

    assert by_type((await gate.as_admin().list_queues()).queues) == {"scan": 1, "mail": 2}
    gate.skip(LONG)
    await gate.sweep()
    assert by_type((await gate.as_admin().list_queues()).queues) == {"scan": 0, "mail": 0}


# Over all tenants.


def share_of(rows: list[stored.Depth], type: str) -> tuple[int, int, int]:
    """Return what the queues of a type have; other tests may share the database, so types are named by chance."""
    return next(((row.queued, row.held, row.leased) for row in rows if row.type == type), (0, 0, 0))


async def test_the_queues_of_all_tenants_are_summed_by_type(gate: harness.Gate) -> None:
    type, other = f"t-{uuid.uuid4()}", gate.stranger()
    for tenant in (gate, other):
        await tenant.create(type=type)
        await tenant.create(type=type, requirements=OCR)
        await tenant.create(type=type, delay_seconds=LONG)
    assert await gate.claim(accept_types=[type]) is not None

    rows = await gate.backend.depths(gate.now())

    assert share_of(rows, type) == (5, 0, 1)
    [row] = [row for row in rows if row.type == type]
    assert row.oldest_at == pytest.approx(gate.now(), abs=30)


async def test_the_oldest_of_all_may_be_one_whose_time_came_while_nobody_claimed(gate: harness.Gate) -> None:
    type = f"t-{uuid.uuid4()}"
    await gate.create(type=type, delay_seconds=40)
    assert [row.oldest_at for row in await gate.backend.depths(gate.now()) if row.type == type] == [None]

    gate.skip(100)
    [row] = [row for row in await gate.backend.depths(gate.now()) if row.type == type]

    assert row.oldest_at == pytest.approx(gate.now() - 60, abs=20)


async def test_leases_that_have_run_out_are_counted_until_they_are_swept(gate: harness.Gate) -> None:
    before = await gate.backend.count_overdue(gate.now())
    offer = await gate.leased()
    gate.skip(offer.expires_at.timestamp() - gate.now() + 1)

    assert await gate.backend.count_overdue(gate.now()) >= before + 1
    await gate.sweep()
    assert (await gate.task(offer.task_id)).status == "queued"
