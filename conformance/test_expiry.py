"""Expired leases: the sweep, holds, adoption, and the anomalies of H.7 (spec 15, PH.4)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from asyncgate import Needs, Work
from asyncgate.conformance import harness
from asyncgate.parts.upkeep import Upkeep

pytestmark = pytest.mark.anyio


async def lose_often(gate: harness.Gate, times: int, **task: Any) -> str:
    """Create a task and lose its lease a number of times, each time with another worker."""
    task_id = await gate.create(**task)
    for number in range(times):
        offer = await gate.claim(f"w{number}")
        assert offer is not None, f"not offered after {number} losses"
        await gate.lose(offer)
    return task_id


async def kinds(gate: harness.Gate, task_id: str | None = None) -> list[str]:
    """Return the kinds of all anomalies so far."""
    return [anomaly["kind"] for anomaly in await gate.anomalies(task_id)]


async def test_a_lost_lease_costs_no_attempt(gate: harness.Gate) -> None:
    task_id = await lose_often(gate, 2)

    task = await gate.task(task_id)
    assert (task.status, task.attempt, task.expiries, task.leased_to) == ("queued", 0, 2, None)


async def test_a_loss_after_a_failure_keeps_the_attempt(gate: harness.Gate) -> None:
    offer = await gate.leased(retry_backoff_seconds=0)
    await gate.as_worker().fail(**harness.under(offer, retryable=True, error="no"))
    again = await gate.claim()
    assert again is not None

    await gate.lose(again)

    assert (await gate.task(offer.task_id)).attempt == 1


async def test_a_lost_task_is_offered_again_within_five_seconds(gate: harness.Gate) -> None:
    offers = [await gate.leased() for _ in range(20)]
    await gate.wait(301)

    waits = []
    for offer in offers:
        task = await gate.task(offer.task_id)
        waits.append((task.next_eligible_at - task.updated_at).total_seconds() if task.next_eligible_at else 0)
    assert all(0 <= wait <= 5 for wait in waits)
    assert len(set(waits)) > 5, "leases that expire together must not all be requeued together"
    gate.skip(5)
    assert len((await gate.as_worker().lease_next(max_tasks=100)).tasks) == 20


async def test_one_lost_task_is_offered_again_at_once(gate: harness.Gate) -> None:
    offer = await gate.leased()

    await gate.wait(301)

    task = await gate.task(offer.task_id)
    assert (task.status, task.next_eligible_at) == ("queued", None)


async def test_a_lease_is_taken_back_when_it_runs_out_not_at_the_next_sweep(make_gate: Callable[...,
                                                                                                harness.Gate]) -> None:
    gate = make_gate(lease_sweep_interval_seconds=86400)
    async with Upkeep(gate.engine), asyncio.timeout(harness.PATIENCE):
        task_id = await gate.create()
        await gate.claim("w1", lease_ttl_seconds=1)

        again = await gate.claim("w2", wait_seconds=30)

    assert again is not None
    assert (again.task_id, again.fence) == (task_id, 2)


async def test_a_renewed_lease_is_taken_back_when_it_runs_out_at_last(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(lease_sweep_interval_seconds=86400)
    async with Upkeep(gate.engine), asyncio.timeout(harness.PATIENCE):
        await gate.create()
        offer = await gate.claim("w1", lease_ttl_seconds=1)
        assert offer is not None
        renewed = await gate.as_worker("w1").renew_lease(**harness.under(offer), extend_by_seconds=2)

        again = await gate.claim("w2", wait_seconds=30)

    assert again is not None
    assert renewed.expires_at > offer.expires_at
    assert (await gate.receipt(again.task_id, "lease.expired")).created_at >= renewed.expires_at


async def test_leases_that_live_when_upkeep_begins_are_taken_back_in_time(make_gate: Callable[...,
                                                                                              harness.Gate]) -> None:
    gate = make_gate(lease_sweep_interval_seconds=86400)
    await gate.create()
    await gate.claim("w1", lease_ttl_seconds=1)

    async with Upkeep(gate.engine), asyncio.timeout(harness.PATIENCE):
        assert await gate.claim("w2", wait_seconds=30) is not None


async def begin(gate: harness.Gate, silent_since: float) -> None:
    """Start upkeep, as after a time in which no gate served."""
    await Upkeep(gate.engine).begin(silent_since)


async def test_time_in_which_no_gate_served_does_not_count_against_a_lease(gate: harness.Gate) -> None:
    task_id = await gate.create()
    offer = await gate.claim("w1", lease_ttl_seconds=60)
    assert offer is not None
    fell_silent = gate.now()
    gate.skip(90)

    await begin(gate, fell_silent)
    await gate.sweep()

    assert (await gate.task(task_id)).status == "leased"
    assert "lease.prolonged" in await gate.events(task_id)
    assert (await gate.as_worker("w1").complete(**harness.under(offer), artifacts=[{"uri": "file:///out"}])).ok


async def test_a_lease_is_prolonged_once_by_what_was_left_and_a_grace_period(gate: harness.Gate) -> None:
    task_id = await gate.create()
    await gate.claim("w1", lease_ttl_seconds=60)
    fell_silent = gate.now()
    gate.skip(90)

    for _ in range(3):      # a gate that is killed meanwhile starts again
        await begin(gate, fell_silent)

    until = (await gate.task(task_id)).lease_expires_at
    assert until is not None
    assert 45 < until.timestamp() - gate.now() <= 65
    await gate.wait(65.001)
    assert (await gate.task(task_id)).status == "queued"


async def test_a_lease_that_had_run_out_before_the_gate_fell_silent_stays_lost(gate: harness.Gate) -> None:
    task_id = await gate.create()
    await gate.claim("w1", lease_ttl_seconds=3)
    gate.skip(4)
    fell_silent = gate.now()
    gate.skip(8)

    await begin(gate, fell_silent)
    await gate.sweep()

    assert (await gate.task(task_id)).status == "queued"
    assert "lease.prolonged" not in await gate.events(task_id)


async def test_a_gate_that_begins_beside_another_prolongs_nothing(gate: harness.Gate) -> None:
    await gate.create()
    await gate.claim("w1", lease_ttl_seconds=3)

    async with gate.unchanged():
        await Upkeep(gate.engine).begin(None)


async def test_any_number_of_leases_gets_its_time_back(make_gate: Callable[..., harness.Gate],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Upkeep, "PAGE", 20)
    gate = make_gate()
    await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 130)
    for _ in range(2):      # all leases of a claim expire at the same moment
        await gate.as_worker().lease_next(max_tasks=65, lease_ttl_seconds=60)
    fell_silent = gate.now()
    gate.skip(90)

    await begin(gate, fell_silent)
    await gate.sweep()

    assert len((await gate.as_worker().list_leases()).leases) == 130


async def test_a_lost_lease_is_told_to_the_owner(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")
    accepted = await gate.receipt(offer.task_id, "task.accepted")

    await gate.wait(301)

    told = await gate.receipt(offer.task_id, "lease.expired")
    assert (told.sender.kind, str(told.to), told.lease_id) == ("asyncgate", "agent ada", offer.lease_id)
    assert told.parents == [accepted.receipt_id]
    body = {"task_id": offer.task_id, "previous_worker_id": "w1", "attempt": 0, "requeued": True, "reason": "expired"}
    assert body.items() <= harness.body(told).items()
    assert len(await gate.owed()) == 1


async def test_a_sweep_takes_only_what_is_overdue(gate: harness.Gate) -> None:
    offer = await gate.leased()

    async with gate.unchanged():
        await gate.wait(270)

    await gate.wait(30.001)
    assert (await gate.task(offer.task_id)).status == "queued"


async def test_a_second_sweep_finds_nothing(gate: harness.Gate) -> None:
    await gate.leased()
    await gate.wait(301)

    async with gate.unchanged():
        await gate.sweep()


async def test_a_sweep_takes_any_number_of_leases(gate: harness.Gate) -> None:
    await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 250)
    for _ in range(3):
        await gate.as_worker().lease_next(max_tasks=100)

    await gate.wait(301)

    assert len(await gate.receipts(type="lease.expired")) == 250
    assert (await gate.as_worker().list_leases()).leases == []


async def test_a_task_that_keeps_losing_its_workers_is_held(gate: harness.Gate) -> None:
    task_id = await lose_often(gate, 3, max_expiries=3)

    task = await gate.task(task_id)
    assert (task.status, task.held, task.expiries) == ("queued", "lease_expiries", 3)
    assert task.obligation_open
    await gate.wait(10_000)
    assert await gate.claim() is None


async def test_a_task_is_held_after_ten_losses_by_default(gate: harness.Gate) -> None:
    task_id = await lose_often(gate, 10)

    assert (await gate.task(task_id)).held == "lease_expiries"


async def test_zero_expiries_means_never_held(gate: harness.Gate) -> None:
    task_id = await lose_often(gate, 12, max_expiries=0)

    assert (await gate.task(task_id)).held is None


async def test_the_anomaly_of_a_held_task_names_its_workers_and_the_last_progress(gate: harness.Gate) -> None:
    offer = await gate.leased("w1", max_expiries=2)
    await gate.as_worker("w1").report_progress(**harness.under(offer, progress={"page": 7}))
    await gate.lose(offer)
    again = await gate.claim("w2")
    assert again is not None
    await gate.lose(again)

    held = [anomaly for anomaly in await gate.anomalies(offer.task_id) if anomaly["kind"] == "task_held"]
    assert len(held) == 1
    assert (held[0]["details"]["workers"], held[0]["details"]["last_progress"]) == (["w1", "w2"], {"page": 7})
    assert harness.body((await gate.receipts(offer.task_id, "lease.expired"))[-1])["requeued"] is False


@pytest.mark.parametrize("progress", ["x" * 65_000, [1e15] * 5_000], ids=["a text", "numbers that grow"])
async def test_a_task_with_large_progress_is_held_like_any_other(
        make_gate: Callable[..., harness.Gate], progress: Any) -> None:
    gate = make_gate(inline_result_bytes=65_536)
    offer = await gate.leased("w1", max_expiries=1)
    told = msgspec.Raw(msgspec.json.encode(progress).replace(b"1000000000000000.0", b"1e15"))
    await gate.as_worker("w1").report_progress(**harness.under(offer, progress=told))

    await gate.lose(offer)

    task = await gate.task(offer.task_id)
    assert (task.status, task.held, task.leased_to) == ("queued", "lease_expiries", None)
    assert (await gate.anomalies(offer.task_id))[-1]["details"]["last_progress_bytes"] == len(bytes(told))


async def test_a_released_hold_offers_the_task_at_once_and_counts_anew(gate: harness.Gate) -> None:
    task_id = await lose_often(gate, 2, max_expiries=2)

    answer = await gate.as_agent().release_hold(task_id=task_id)

    assert (answer.ok, answer.status) == (True, "queued")
    task = await gate.task(task_id)
    assert (task.held, task.expiries) == (None, 0)
    for _ in range(2):
        offer = await gate.claim()
        assert offer is not None
        await gate.lose(offer)
    assert (await gate.task(task_id)).held == "lease_expiries"
    assert (await kinds(gate, task_id)).count("task_held") == 2


async def test_releasing_what_is_not_held_changes_nothing(gate: harness.Gate) -> None:
    task_id = await gate.create()

    async with gate.unchanged():
        assert (await gate.as_agent().release_hold(task_id=task_id)).status == "queued"


async def test_only_owner_or_admin_releases_a_hold(gate: harness.Gate) -> None:
    task_id = await lose_often(gate, 1, max_expiries=1)

    with harness.refused("forbidden"):
        await gate.as_agent("bob").release_hold(task_id=task_id)

    assert (await gate.as_admin().release_hold(task_id=task_id)).ok


async def test_a_fourth_loss_is_an_anomaly_told_once(gate: harness.Gate) -> None:
    task_id = await lose_often(gate, 3)
    assert await kinds(gate) == []

    for _ in range(4):
        offer = await gate.claim()
        assert offer is not None
        await gate.lose(offer)

    assert await kinds(gate, task_id) == ["lease_expired_often"]
    anomaly = await gate.receipt(task_id, "system.anomaly")
    assert (anomaly.sender.kind, str(anomaly.to)) == ("asyncgate", "agent ada")
    assert harness.body(anomaly)["details"]["expiries"] == 4


@pytest.mark.parametrize("reported", [True, False])
async def test_an_eleventh_renewal_is_an_anomaly_told_once_and_says_whether_progress_came(
        gate: harness.Gate, reported: bool) -> None:
    offer = await gate.leased()
    if reported:
        await gate.as_worker().report_progress(**harness.under(offer, progress=1))
    for _ in range(10):
        await gate.as_worker().renew_lease(**harness.under(offer))
    assert await kinds(gate) == []

    for _ in range(5):
        await gate.as_worker().renew_lease(**harness.under(offer))

    told = await gate.anomalies(offer.task_id)
    assert [anomaly["kind"] for anomaly in told] == ["lease_renewed_often"]
    assert told[0]["details"] == {"renewals": 11, "progress_reported": reported}


async def test_each_lease_that_is_renewed_too_often_is_told(gate: harness.Gate) -> None:
    offer = await gate.leased()
    for _ in range(2):
        for _ in range(11):
            await gate.as_worker().renew_lease(**harness.under(offer))
        await gate.as_worker().release_lease(**harness.under(offer))
        again = await gate.claim()
        assert again is not None
        offer = again

    assert await kinds(gate, offer.task_id) == ["lease_renewed_often"] * 2


async def test_a_queued_task_with_no_attempts_left_is_an_anomaly_told_once(gate: harness.Gate) -> None:
    task_id = await gate.create(max_attempts=2)

    def spoil(work: Work) -> None:      # no operation produces this state
        work.change_task(work.require_task(task_id), attempt=2)
    await gate.backend.transact(gate.tenant_id, Needs(tasks={task_id}), spoil)
    for _ in range(3):
        await gate.wait(10)

    assert await kinds(gate, task_id) == ["attempts_spent_but_queued"]
    assert (await gate.task(task_id)).status == "queued", "an anomaly changes nothing (H.7)"


async def test_a_passed_deadline_is_an_anomaly_told_once_and_nothing_else(gate: harness.Gate) -> None:
    deadline = datetime.fromtimestamp(gate.now(), UTC) + timedelta(seconds=60)
    task_id = await gate.create(timeouts={"deadline": deadline})
    await gate.wait(50)
    assert await kinds(gate) == []

    for _ in range(3):
        await gate.wait(20)

    assert await kinds(gate, task_id) == ["deadline_passed"]
    assert (await gate.task(task_id)).status == "queued"
    assert await gate.claim() is not None


async def test_a_deadline_that_passes_after_the_end_is_no_anomaly(gate: harness.Gate) -> None:
    deadline = datetime.fromtimestamp(gate.now(), UTC) + timedelta(seconds=60)
    await gate.finished(timeouts={"deadline": deadline})

    await gate.wait(100)

    assert await kinds(gate) == []


async def test_a_task_of_an_instance_that_is_gone_is_adopted_and_swept(make_gate: Callable[..., harness.Gate]) -> None:
    gone = make_gate(instance_id="gone")
    offer = await gone.leased()
    assert (await gone.task(offer.task_id)).asyncgate_instance == "gone"

    here = gone.beside(instance_id="here")
    await here.wait(301)

    task = await here.task(offer.task_id)
    assert (task.status, task.asyncgate_instance) == ("queued", "here")
    told = await here.receipt(offer.task_id, "lease.expired")
    assert (told.asyncgate_instance, told.sender.id) == ("here", "here")


async def test_a_tasks_work_goes_on_under_another_instance(make_gate: Callable[..., harness.Gate]) -> None:
    gone = make_gate(instance_id="gone")
    offer = await gone.leased()

    here = gone.beside(instance_id="here")

    assert (await here.as_worker().complete(**harness.under(offer, artifacts=[{"uri": "x"}]))).ok
    assert await here.owed() == []
