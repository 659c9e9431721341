"""What an operator lists: schedules, and what is owed to anybody."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import UNSET

from asyncgate.conformance import harness

pytestmark = pytest.mark.anyio


async def make_schedule(gate: harness.Gate, schedule_id: str, by: str = "ada") -> str:
    """Let a scheduler make a schedule for an agent; return the receipt that says so."""
    await gate.create("schedule.create", by=by)
    offer = await gate.claim("cron", accept_types=["schedule.create"])
    assert offer is not None
    made = await gate.as_worker("cron").emit_receipt(**harness.under(
        offer, receipt_type="schedule.created", schedule_id=schedule_id))
    await gate.as_worker("cron").complete(**harness.under(offer, artifacts=[{"schedule_id": schedule_id}]))
    return str(made.receipt_id)


async def report(gate: harness.Gate, schedule_id: str, **state: Any) -> None:
    """Report the state of a schedule, whose next run is a minute from now."""
    due = datetime.fromtimestamp(gate.now() + 60, UTC)
    await gate.as_worker("cron").report_schedule(schedules=[
        {"schedule_id": schedule_id, "next_run_at": due, "interval_seconds": 60, **state}])


async def pages(view: harness.View, operation: str, member: str, key: str, **fields: Any) -> list[list[str]]:
    """Follow a list to its end; return what each page names."""
    lists, cursor = list[list[str]](), None
    while True:
        page = await getattr(view, operation)(cursor=cursor, **fields)
        lists.append([getattr(row, key) for row in getattr(page, member)])
        if page.next_cursor is None:
            return lists
        cursor = page.next_cursor


# Schedules.


async def test_a_schedule_is_listed_with_what_its_scheduler_reported(gate: harness.Gate) -> None:
    created = await make_schedule(gate, "nightly")
    await report(gate, "nightly")

    [schedule] = (await gate.as_agent().list_schedules()).schedules

    assert (schedule.schedule_id, str(schedule.owner), str(schedule.scheduler)) == (
        "nightly", "agent ada", "worker cron")
    assert (schedule.enabled, schedule.interval_seconds, schedule.late_since, schedule.created_receipt_id) == (
        True, 60, None, created)
    assert schedule.next_run_at.timestamp() == pytest.approx(gate.now() + 60, abs=30)


async def expect_late_after(gate: harness.Gate, seconds: float) -> None:
    """Expect the only schedule to be on time for so long, and late from then on."""
    gate.skip(seconds)
    assert (await gate.as_agent().list_schedules()).schedules[0].late_since is None

    gate.skip(2)
    for _ in range(2):      # before and after the anomaly
        [schedule] = (await gate.as_agent().list_schedules()).schedules
        assert schedule.late_since == schedule.next_run_at
        await gate.sweep()


async def test_it_is_late_once_two_runs_are_missed_also_when_that_was_told(gate: harness.Gate) -> None:
    await make_schedule(gate, "nightly")
    await report(gate, "nightly")
    await expect_late_after(gate, 60 + 119)

    await report(gate, "nightly")
    assert (await gate.as_agent().list_schedules()).schedules[0].late_since is None


async def test_what_a_scheduler_knows_of_a_schedule_is_listed(gate: harness.Gate) -> None:
    await make_schedule(gate, "sched-1")
    runs = [datetime.fromtimestamp(int(gate.now()) + 60 * at, UTC) for at in range(1, 8)]
    await report(gate, "sched-1", name="weekdays", task_type="report.make", cron_expr="30 7 * * MON-FRI",
                 timezone="Europe/Berlin", next_runs=runs, last_run_at=runs[0], last_status="created",
                 last_task_id="t-1")
    await report(gate, "sched-1")       # what is left out keeps its value

    [five] = (await gate.as_agent().list_schedules()).schedules
    [all_of_them] = (await gate.as_agent().list_schedules(runs=200)).schedules

    assert (five.name, five.task_type, five.cron_expr, five.timezone, five.last_status, five.last_task_id) == (
        "weekdays", "report.make", "30 7 * * MON-FRI", "Europe/Berlin", "created", "t-1")
    assert (five.next_runs, five.last_run_at) == (runs[:5], runs[0])
    assert all_of_them.next_runs == runs


async def test_it_is_late_after_its_own_next_run_where_the_scheduler_says_how_long(gate: harness.Gate) -> None:
    await make_schedule(gate, "weekdays")
    await report(gate, "weekdays", interval_seconds=3 * 86400, late_after_seconds=300)
    await expect_late_after(gate, 60 + 299)

    told = (await gate.as_admin().list_receipts(receipt_type="system.anomaly")).receipts
    assert [json.loads(bytes(receipt.body))["kind"] for receipt in told] == ["schedule_late"]


@pytest.mark.parametrize("order", ["pause", "resume", "run"])
@pytest.mark.parametrize("by", ["owner", "admin"])
async def test_a_schedule_is_ordered_by_a_task_of_its_owner(gate: harness.Gate, order: str, by: str) -> None:
    await make_schedule(gate, "nightly")
    caller = gate.as_agent() if by == "owner" else gate.as_admin()

    made = await getattr(caller, f"{order}_schedule")(schedule_id="nightly")
    offer = await gate.claim("cron", accept_types=[f"schedule.{order}"])

    assert offer is not None
    assert (offer.task_id, bytes(offer.payload), str(offer.created_by)) == (
        made.task_id, b'{"schedule_id":"nightly"}', "agent ada")
    history = (await gate.as_admin().get_task_history(task_id=made.task_id)).events
    [payload] = [json.loads(bytes(event.payload)) for event in history if event.event_type == "schedule.ordered"]
    assert payload["by"]["id"] == ("ada" if by == "owner" else caller.caller.principal.id)


async def test_a_schedule_of_another_is_ordered_by_an_admin_only(gate: harness.Gate) -> None:
    await make_schedule(gate, "nightly")

    with harness.refused("forbidden"):
        await gate.as_agent("bob").pause_schedule(schedule_id="nightly")
    with harness.refused("schedule_not_found"):
        await gate.as_agent("ada").pause_schedule(schedule_id="weekly")
    with harness.refused("schedule_not_found"):
        await gate.stranger().as_admin().run_schedule(schedule_id="nightly")


async def test_a_schedule_that_is_disabled_is_never_late(gate: harness.Gate) -> None:
    await make_schedule(gate, "nightly")
    await report(gate, "nightly", enabled=False)
    gate.skip(3600)

    [schedule] = (await gate.as_agent().list_schedules()).schedules

    assert (schedule.enabled, schedule.late_since) == (False, None)


async def test_an_agent_lists_its_own_schedules_and_an_admin_all(gate: harness.Gate) -> None:
    for name, by in (("a", "ada"), ("b", "bob"), ("c", "ada")):
        await make_schedule(gate, name, by)

    def listed(view: harness.View, **fields: Any) -> Any:
        return pages(view, "list_schedules", "schedules", "schedule_id", **fields)

    assert await listed(gate.as_agent("ada")) == [["a", "c"]]
    assert await listed(gate.as_agent("bob")) == [["b"]]
    assert await listed(gate.as_admin()) == [["a", "b", "c"]]
    assert await listed(gate.as_admin(), principal_id="ada", limit=1) == [["a"], ["c"]]
    assert await listed(gate.as_admin(), limit=2) == [["a", "b"], ["c"]]
    assert await listed(gate.stranger().as_admin()) == [[]]
    with harness.refused("forbidden"):
        await listed(gate.as_agent("bob"), principal_id="ada")


async def test_a_deleted_schedule_is_listed_no_more(gate: harness.Gate) -> None:
    created = await make_schedule(gate, "nightly")
    await gate.as_worker("cron").emit_receipt(receipt_type="schedule.deleted", parents=[created])

    assert (await gate.as_admin().list_schedules()).schedules == []


# Obligations.


async def test_an_admin_sees_what_is_owed_to_whom_how_old_and_for_which_task(gate: harness.Gate) -> None:
    await gate.finished()
    first = await gate.create(by="bob")
    gate.skip(100)
    schedule = await make_schedule(gate, "nightly")
    second = await gate.create(by="ada")
    gate.skip(50)

    rows = (await gate.as_admin().list_obligations()).obligations

    assert [(row.task_id if row.schedule_id is None else row.schedule_id, str(row.to), row.receipt_type)
            for row in rows] == [(first, "agent bob", "task.assigned"), ("nightly", "agent ada", "schedule.created"),
                                 (second, "agent ada", "task.assigned")]
    assert rows[1].receipt_id == schedule
    assert rows[0].age_seconds == pytest.approx(150, abs=30)
    assert rows[2].age_seconds == pytest.approx(50, abs=30)


async def test_it_is_paged_oldest_first_and_for_one_principal_if_one_is_named(gate: harness.Gate) -> None:
    made = [await gate.create(by=by) for by in ("ada", "bob", "ada", "bob", "ada")]

    def listed(**fields: Any) -> Any:
        return pages(gate.as_admin(), "list_obligations", "obligations", "task_id", **fields)

    assert await listed(limit=2) == [made[:2], made[2:4], made[4:]]
    assert await listed(limit=2, principal_id="ada") == [[made[0], made[2]], [made[4]]]
    assert await listed(principal_id="eve") == [[]]


async def test_a_page_goes_on_where_the_last_one_ended_though_it_was_discharged(gate: harness.Gate) -> None:
    made = [await gate.create() for _ in range(3)]
    page = await gate.as_admin().list_obligations(limit=1)
    await gate.as_agent().cancel_task(task_id=made[0])

    rest = await gate.as_admin().list_obligations(cursor=page.next_cursor)

    assert [row.task_id for row in rest.obligations] == made[1:]


async def test_a_cursor_is_good_for_its_own_list_only(gate: harness.Gate) -> None:
    for _ in range(3):
        await gate.create()
    page = await gate.as_admin().list_obligations(limit=1)

    with harness.refused("invalid_cursor"):
        await gate.as_admin().list_obligations(cursor=page.next_cursor, principal_id="ada")
    with harness.refused("invalid_cursor"):
        await gate.as_admin().list_schedules(cursor=page.next_cursor)
    with harness.refused("invalid_cursor"):
        await gate.stranger().as_admin().list_obligations(cursor=page.next_cursor)


async def test_what_is_owed_to_whom_is_counted_if_it_is_asked_for(gate: harness.Gate) -> None:
    for by, many in (("ada", 3), ("bo", 1), ("cy", 2)):
        for _ in range(many):
            await gate.create(by=by)

    page = await gate.as_admin().list_obligations(limit=1, count=True)
    without = await gate.as_admin().list_obligations(limit=1)

    assert [(entry.to.id, entry.open, entry.at_least) for entry in page.owed_to] == [
        ("ada", 3, False), ("cy", 2, False), ("bo", 1, False)]
    assert without.owed_to is UNSET


async def test_only_admins_see_what_is_owed_to_others(gate: harness.Gate) -> None:
    await gate.create()

    with harness.refused("forbidden"):
        await gate.as_agent().list_obligations()
    assert (await gate.stranger().as_admin().list_obligations()).obligations == []
