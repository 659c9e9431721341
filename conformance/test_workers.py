"""Workers: what each offered with its last claims, what it holds, and what it did."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from asyncgate.conformance import harness
from asyncgate.parts.model import queries, stored, wire_workers
from asyncgate.parts.process.presence import MOST_PROFILES, PROFILE_LETTERS
from asyncgate.parts.upkeep import Upkeep

pytestmark = pytest.mark.anyio


async def store(gate: harness.Gate) -> None:
    """Let upkeep store what was seen."""
    await Upkeep(gate.engine).store_presences()


async def workers(gate: harness.Gate, **fields: Any) -> list[wire_workers.WorkerRecord]:
    """Return the workers that an admin sees."""
    return list((await gate.as_admin().list_workers(**fields)).workers)


@pytest.mark.parametrize("stored", [False, True])
async def test_a_worker_is_listed_with_what_it_offered_holds_and_did(gate: harness.Gate, stored: bool) -> None:
    await gate.finished(capabilities=["web"])
    failed, released, held = [await gate.leased() for _ in range(3)]
    await gate.as_worker().fail(**harness.under(failed), error="no", retryable=False)
    await gate.as_worker().release_lease(**harness.under(released))
    await gate.as_worker().lease_next(capabilities=["web", "pdf"], accept_types=["other"])
    if stored:
        await store(gate)

    [worker] = await workers(gate)

    assert (str(worker.worker), worker.holding, worker.leased, worker.completed, worker.failed, worker.expired,
            worker.released) == (
        "worker w1", 1, 4, 1, 1, 0, 1)
    assert [(claim.accept_types, claim.capabilities, claim.tasks) for claim in worker.claims] == [
        (["other"], ["pdf", "web"], 0), ([], [], 1)]
    assert worker.last_claim_at == worker.claims[0].claimed_at
    assert held.lease_id


async def test_looking_at_somebody_is_no_sign_of_their_life(gate: harness.Gate) -> None:
    await gate.leased("w1")
    await store(gate)
    before = await workers(gate)
    gate.skip(600)

    await gate.list_workers(worker_id="w1")
    await gate.list_leases(worker_id="w1", resume=False)
    await gate.list_obligations(worker_id="w2")
    await gate.list_tasks(worker_id="w3")
    await store(gate)

    assert [(worker.worker.id, worker.last_seen_at)
            for worker in await workers(gate)] == [("w1", before[0].last_seen_at)]
    await gate.list_leases(worker_id="w1")
    assert (await workers(gate))[0].last_seen_at != before[0].last_seen_at


async def test_another_process_knows_what_was_stored(gate: harness.Gate) -> None:
    await gate.finished()
    other = gate.beside()
    assert await workers(other) == []

    await store(gate)
    before = await workers(other)
    await store(other)

    assert [(worker.worker.id, worker.completed) for worker in before] == [("w1", 1)]
    assert before == await workers(gate)
    assert before == await workers(other)


async def test_what_is_stored_and_what_was_seen_since_are_added_up(gate: harness.Gate) -> None:
    for _ in range(3):
        await gate.finished()
        [worker] = await workers(gate)
        await store(gate)
        assert [worker] == await workers(gate)

    assert (worker.leased, worker.completed) == (3, 3)


async def test_a_lost_lease_is_counted_for_the_worker_that_lost_it(gate: harness.Gate) -> None:
    await gate.lose(await gate.leased())

    [worker] = await workers(gate)

    assert (worker.leased, worker.expired, worker.holding) == (1, 1, 0)


async def test_a_claim_that_is_told_why_it_gets_nothing_is_kept_with_the_reason(gate: harness.Gate) -> None:
    def refuse(work: Any, worker: Any) -> str:
        return "no more leases today"
    vars(gate.engine.on)["why_no_lease"] = (refuse,)
    await gate.create()
    await gate.claim()

    [worker] = await workers(gate)

    assert [(claim.tasks, claim.why_none) for claim in worker.claims] == [(0, "no more leases today")]


async def test_those_who_claimed_last_are_read_first(gate: harness.Gate) -> None:
    for worker in ("w2", "w3", "w1"):
        await gate.claim(worker)
        gate.skip(1)
    await store(gate)

    rows = await gate.backend.page(gate.tenant_id, queries.WorkerFilter(("", ""), 2, latest=True))

    assert [row.id for row in rows] == ["w1", "w3"]


async def test_a_worker_has_a_few_profiles_and_the_latest_stay(gate: harness.Gate) -> None:
    for number in range(MOST_PROFILES + 2):
        await gate.claim(capabilities=[f"c{number}"])
        gate.skip(1)
        if number % 2:
            await store(gate)
    await gate.claim(capabilities=["c3"])

    [worker] = await workers(gate)

    assert [claim.capabilities for claim in worker.claims] == [["c3"], ["c5"], ["c4"], ["c2"]]


async def test_long_profiles_take_no_more_room_than_the_latest_one_needs(gate: harness.Gate) -> None:
    for number in range(4):
        await gate.claim(capabilities=[f"{number}{at:099}" for at in range(64)])
        gate.skip(1)
    await store(gate)

    row = await gate.backend.record(gate.tenant_id, stored.Presence, "worker", "w1")

    assert row is not None
    assert [claim["capabilities"][0][0] for claim in json.loads(row.claims)] == ["3"]
    assert len(row.claims) < PROFILE_LETTERS


async def test_a_claim_that_waits_is_seen_before_it_is_answered(gate: harness.Gate) -> None:
    waiting = asyncio.create_task(gate.as_worker().lease_next(capabilities=["web"], wait_seconds=20))
    async with asyncio.timeout(harness.PATIENCE):
        while not await workers(gate):      # noqa: ASYNC110  # a claim under way has no event
            await asyncio.sleep(0)

    await gate.create(requirements={"capabilities": ["web"]})
    await waiting

    [worker] = await workers(gate)
    assert worker.claims[0].tasks == 1


async def wait_for_work(gate: harness.Gate, process: str) -> asyncio.Task[Any]:
    """Let a process claim, and return when its claim waits."""
    waiting = asyncio.create_task(gate.as_worker().lease_next(
        wait_seconds=20, process=process, capabilities=[process[:3]]))
    async with asyncio.timeout(harness.PATIENCE):
        # A claim under way has no event.
        while not any(worker.process == process for worker in await workers(gate)):     # noqa: ASYNC110
            await asyncio.sleep(0)
    return waiting


async def hang_up(gate: harness.Gate) -> None:
    """Break off a claim that waits, as a killed process does."""
    waiting = await wait_for_work(gate, "web-3:4711")
    waiting.cancel()
    await asyncio.wait([waiting])


@pytest.mark.parametrize("stored", [False, True])
async def test_a_worker_that_hangs_up_while_its_claim_waits_is_silent_until_it_asks_again(
        gate: harness.Gate, stored: bool) -> None:
    await gate.claim()
    assert [worker.state for worker in await workers(gate)] == ["idle"]

    gate.skip(1)
    await hang_up(gate)
    if stored:
        await store(gate)
    [gone] = await workers(gate)
    gate.skip(1)
    await gate.claim()
    [back] = await workers(gate)

    assert (gone.state, gone.process) == ("silent", "web-3:4711")
    assert gone.claims[0].gone_at is not None
    assert (back.state, back.claims[0].gone_at) == ("idle", None)


async def test_it_is_idle_while_another_claim_of_the_same_worker_waits(gate: harness.Gate) -> None:
    others = await wait_for_work(gate, "one:1")

    await hang_up(gate)
    [worker] = await workers(gate)
    others.cancel()
    await asyncio.wait([others])

    assert worker.state == "idle"
    assert [row.state for row in await workers(gate)] == ["silent"]


async def test_a_worker_that_loses_a_lease_is_silent_until_it_asks_again(gate: harness.Gate) -> None:
    offer = await gate.leased()
    assert [worker.state for worker in await workers(gate)] == ["working"]

    await gate.lose(offer)
    [lost] = await workers(gate)
    await gate.claim("w1", accept_types=["other"])

    assert lost.state == "silent"
    assert [worker.state for worker in await workers(gate)] == ["idle"]


async def test_who_hung_up_counts_for_no_queue_and_explains_why_a_task_waits(gate: harness.Gate) -> None:
    await hang_up(gate)

    task_id = await gate.create()
    [queue] = (await gate.as_admin().list_queues()).queues
    why = await gate.as_agent().explain_task(task_id=task_id)

    assert queue.workers == 0
    assert why.cause == "no_worker"


async def test_workers_are_paged_in_the_order_of_their_ids_stored_or_not(gate: harness.Gate) -> None:
    for at, name in enumerate(("w3", "w1", "w5", "w2", "w4")):
        await gate.claim(name)
        if at < 3:
            await store(gate)
    pages, cursor = [], None
    while True:
        page = await gate.as_admin().list_workers(limit=2, cursor=cursor)
        pages.append([worker.worker.id for worker in page.workers])
        if (cursor := page.next_cursor) is None:
            break

    assert pages == [["w1", "w2"], ["w3", "w4"], ["w5"]]
    assert [worker.worker.id for worker in await workers(gate, worker_id="w4")] == ["w4"]
    assert await workers(gate, worker_id="w9") == []


async def test_who_never_claimed_is_no_worker(gate: harness.Gate) -> None:
    await gate.create()
    await gate.as_worker("w1").list_leases()
    await store(gate)

    assert await workers(gate) == []
    await gate.claim("w1")
    [worker] = await workers(gate)
    assert worker.last_seen_at >= worker.first_seen_at


@pytest.mark.one_store
async def test_only_an_admin_of_the_tenant_lists_its_workers(gate: harness.Gate) -> None:
    await gate.claim()

    assert await workers(gate.stranger()) == []
    for view in (gate.as_agent(), gate.as_worker()):
        with harness.refused("forbidden"):
            await view.list_workers()
