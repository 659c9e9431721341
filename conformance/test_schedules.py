"""Schedules: a scheduler's receipts, and the anomalies of late schedules (spec 8, H.7.4)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from asyncgate.conformance.harness import Gate, refused, under
from asyncgate.parts.model import wire

pytestmark = pytest.mark.anyio


async def scheduled(gate: Gate, schedule_id: str = "s1", **more: Any) -> tuple[wire.Offer, str]:
    """Let a scheduler lease a schedule.create task and report that it created the schedule."""
    offer = await gate.leased("cron", type="schedule.create")
    ask = under(offer, receipt_type="schedule.created", schedule_id=schedule_id, **more)
    return offer, (await gate.as_worker("cron").emit_receipt(**ask)).receipt_id


def at(gate: Gate, seconds: float) -> datetime:
    """Return the time in a number of seconds."""
    return datetime.fromtimestamp(gate.now(), UTC) + timedelta(seconds=seconds)


async def late(gate: Gate) -> list[Any]:
    """Return the anomalies of late schedules."""
    return [anomaly["details"] for anomaly in await gate.anomalies() if anomaly["kind"] == "schedule_late"]


async def test_a_schedule_is_owed_to_the_creator_of_its_task_until_it_is_deleted(gate: Gate) -> None:
    offer, receipt_id = await scheduled(gate)
    await gate.as_worker("cron").complete(**under(offer, artifacts=[{"schedule_id": "s1"}]))
    created = await gate.receipt(offer.task_id, "schedule.created")
    assert (created.receipt_id, created.schedule_id) == (receipt_id, "s1")
    assert (str(created.sender), str(created.to)) == ("worker cron", "agent ada")
    assert [receipt.receipt_id for receipt in await gate.owed()] == [receipt_id]

    await gate.as_worker("cron").emit_receipt(receipt_type="schedule.deleted", parents=[receipt_id])

    deleted = (await gate.receipts(type="schedule.deleted"))[0]
    assert (deleted.parents, deleted.schedule_id, str(deleted.to)) == ([receipt_id], "s1", "agent ada")
    assert await gate.owed() == []
    assert (await gate.as_agent().check_terminator(parent_receipt_id=receipt_id)).has_terminator


async def test_a_schedule_needs_the_live_lease_of_its_task(gate: Gate) -> None:
    offer = await gate.leased("cron", type="schedule.create")
    ask = under(offer, receipt_type="schedule.created", schedule_id="s1")
    async with gate.unchanged():
        with refused("lease_invalid_or_expired", reason="unknown"):
            await gate.as_worker("w2").emit_receipt(**ask)
    gate.skip(301)

    async with gate.unchanged():
        with refused("lease_invalid_or_expired", reason="expired"):
            await gate.as_worker("cron").emit_receipt(**ask)


async def test_a_task_of_another_type_makes_no_schedule(gate: Gate) -> None:
    offer = await gate.leased("cron", type="demo")

    async with gate.unchanged():
        with refused("invalid_request"):
            await gate.as_worker("cron").emit_receipt(**under(offer, receipt_type="schedule.created", schedule_id="s1"))


@pytest.mark.parametrize("missing", ["schedule_id", "task_id", "lease_id"])
async def test_a_schedule_says_which_and_under_which_lease(gate: Gate, missing: str) -> None:
    offer = await gate.leased("cron", type="schedule.create")
    ask = under(offer, receipt_type="schedule.created", schedule_id="s1")

    async with gate.unchanged():
        with refused("invalid_request"):
            await gate.as_worker("cron").emit_receipt(**{**ask, missing: None})


async def test_the_same_schedule_again_returns_the_first_receipt(gate: Gate) -> None:
    offer, receipt_id = await scheduled(gate)

    async with gate.unchanged():
        again = await gate.as_worker("cron").emit_receipt(
            **under(offer, receipt_type="schedule.created", schedule_id="s1"))

    assert again.receipt_id == receipt_id


async def test_a_schedule_of_another_scheduler_cannot_be_taken_over(gate: Gate) -> None:
    await scheduled(gate)
    offer = await gate.leased("other", type="schedule.create")

    async with gate.unchanged():
        with refused("invalid_request"):
            await gate.as_worker("other").emit_receipt(
                **under(offer, receipt_type="schedule.created", schedule_id="s1"))


async def test_a_deletion_names_its_schedule_among_its_parents(gate: Gate) -> None:
    offer, receipt_id = await scheduled(gate)
    cron = gate.as_worker("cron")

    async with gate.unchanged():
        with refused("parents_required"):
            await cron.emit_receipt(receipt_type="schedule.deleted", schedule_id="s1")
        with refused("parent_not_found"):
            await cron.emit_receipt(receipt_type="schedule.deleted", parents=["none"])
        with refused("invalid_request"):
            await cron.emit_receipt(receipt_type="schedule.deleted", parents=[offer.obligation_receipt_id])
        with refused("invalid_request"):
            await cron.emit_receipt(receipt_type="schedule.deleted", parents=[receipt_id], schedule_id="s2")


@pytest.mark.one_store
async def test_a_third_party_cannot_delete_a_schedule(gate: Gate) -> None:
    _, receipt_id = await scheduled(gate)

    async with gate.unchanged():
        with refused("forbidden"):
            await gate.as_worker("other").emit_receipt(receipt_type="schedule.deleted", parents=[receipt_id])


async def test_a_receipt_has_ten_parents_at_most(gate: Gate) -> None:
    _, receipt_id = await scheduled(gate)
    others = [(await gate.task(await gate.create())).obligation_receipt_id for _ in range(10)]
    deletion = {"receipt_type": "schedule.deleted", "worker_id": "cron"}      # an admin may answer all

    async with gate.unchanged():
        with refused("too_many_parents"):
            await gate.emit_receipt(**deletion, parents=[receipt_id, *others])
    await gate.emit_receipt(**deletion, parents=[receipt_id, *others[:9]])

    deleted = (await gate.receipts(type="schedule.deleted"))[0]
    assert deleted.parents == sorted([receipt_id, *others[:9]])
    assert len(await gate.owed()) == 11, "a deletion discharges no task (PH.1.3)"


async def test_each_parent_of_a_receipt_finds_it(gate: Gate) -> None:
    for schedule_id, further in (("s1", 0), ("s2", 1)):
        offer, created = await scheduled(gate, schedule_id)

        await gate.as_worker("cron").emit_receipt(receipt_type="schedule.deleted", schedule_id=schedule_id,
                                                  parents=[created, offer.obligation_receipt_id][:1 + further])

        assert (await gate.as_agent().check_terminator(parent_receipt_id=created)).has_terminator


async def test_a_schedule_that_misses_two_of_its_times_is_told_once_to_its_owner(gate: Gate) -> None:
    await scheduled(gate)
    cron, due = gate.as_worker("cron"), at(gate, 60)
    state = {"schedule_id": "s1", "enabled": True, "next_run_at": due, "interval_seconds": 30}
    assert (await cron.report_schedule(schedules=[state])).unknown == []
    await gate.wait(119)
    assert await late(gate) == []

    for _ in range(3):
        await gate.wait(2)
        await cron.report_schedule(schedules=[state])

    assert [(details["schedule_id"], details["interval_seconds"]) for details in await late(gate)] == [("s1", 30)]
    anomaly = (await gate.receipts(type="system.anomaly"))[0]
    assert (str(anomaly.to), anomaly.schedule_id) == ("agent ada", "s1")


async def test_a_schedule_that_is_late_again_is_told_again(gate: Gate) -> None:
    await scheduled(gate)
    for _ in range(2):
        await gate.as_worker("cron").report_schedule(schedules=[
            {"schedule_id": "s1", "next_run_at": at(gate, 10), "interval_seconds": 10}])
        await gate.wait(31)

    assert len(await late(gate)) == 2


@pytest.mark.parametrize("state", [{"enabled": False}, {"next_run_at": None}, {"interval_seconds": None}], ids=str)
async def test_a_schedule_that_is_off_or_has_no_time_is_never_late(gate: Gate, state: dict[str, Any]) -> None:
    await scheduled(gate)
    await gate.as_worker("cron").report_schedule(schedules=[
        {"schedule_id": "s1", "next_run_at": at(gate, 10), "interval_seconds": 10, **state}])

    await gate.wait(1000)

    assert await late(gate) == []


async def test_a_deleted_schedule_is_never_late(gate: Gate) -> None:
    _, receipt_id = await scheduled(gate)
    cron = gate.as_worker("cron")
    state = {"schedule_id": "s1", "next_run_at": at(gate, 10), "interval_seconds": 10}
    await cron.report_schedule(schedules=[state])
    await cron.emit_receipt(receipt_type="schedule.deleted", parents=[receipt_id])

    await gate.wait(1000)

    assert await late(gate) == []
    assert (await cron.report_schedule(schedules=[state])).unknown == ["s1"]


async def test_a_schedule_that_the_gate_does_not_know_is_named(gate: Gate) -> None:
    await scheduled(gate)

    answer = await gate.as_worker("cron").report_schedule(schedules=[{"schedule_id": "s1"}, {"schedule_id": "s2"}])
    other = await gate.as_worker("other").report_schedule(schedules=[{"schedule_id": "s1"}])

    assert (answer.ok, answer.unknown, other.unknown) == (True, ["s2"], ["s1"])
