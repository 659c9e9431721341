"""Bulks: one thing is done to many tasks, after a preview, in batches, once for each task, also after a crash."""

from __future__ import annotations

import asyncio
import base64
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from asyncgate import SCOPES, Caller
from asyncgate.conformance import harness
from asyncgate.conformance.test_pausing import audited
from asyncgate.parts.model import settings, wire
from asyncgate.parts.operating import rerun
from asyncgate.parts.operating.bulk import PREFIX

pytestmark = pytest.mark.anyio


async def confirmed(view: harness.View, **asked: Any) -> str:
    """Preview; return the confirmation."""
    return str((await view.preview_bulk(**asked)).confirmation)


async def done(view: harness.View, **asked: Any) -> Any:
    """Preview, and carry out to the end."""
    confirmation = await confirmed(view, **asked)
    while not (record := await view.run_bulk(confirmation=confirmation)).ended:
        pass
    return record


async def make(gate: harness.Gate, number: int, **fields: Any) -> list[str]:
    """Create tasks at once; return their ids."""
    tasks = [{"type": "demo", "payload": {"n": n}, **fields} for n in range(number)]
    return [task.task_id for task in (await gate.as_agent().create_tasks(tasks=tasks)).results]


async def fail(gate: harness.Gate, **fields: Any) -> str:
    """Create a task that fails."""
    offer = await gate.leased(**fields)
    await gate.as_worker().fail(**harness.under(offer), error="no")
    return offer.task_id


async def hold(gate: harness.Gate, **fields: Any) -> str:
    """Create a task that is on hold."""
    offer = await gate.leased(max_expiries=1, **fields)
    await gate.lose(offer)
    assert (await gate.task(offer.task_id)).held
    return offer.task_id


async def records(gate: harness.Gate, tasks: list[str]) -> list[wire.TaskRecord]:
    """Return tasks."""
    return [await gate.task(task_id) for task_id in tasks]


# The preview.


async def test_a_preview_counts_and_shows_some_and_changes_nothing(gate: harness.Gate) -> None:
    made = await make(gate, 12)
    async with gate.unchanged():
        preview = await gate.as_admin().preview_bulk(action="cancel", type="demo")

    assert (preview.action, preview.matches, preview.at_least) == ("cancel", 12, False)
    assert [task.task_id for task in preview.sample] == made[:1:-1]
    assert (preview.sample[0].status, preview.sample[0].type, str(preview.sample[0].created_by)) == (
        "queued", "demo", "agent ada")
    assert preview.expires_at.timestamp() == pytest.approx(gate.now() + 900, abs=30)


async def test_a_preview_stops_counting(gate: harness.Gate) -> None:
    for _ in range(3):
        await make(gate, 400)

    preview = await gate.as_admin().preview_bulk(action="cancel")

    assert (preview.matches, preview.at_least) == (1000, True)


@pytest.mark.parametrize(("asked", "wanted"), [
    ({}, ["a", "b", "held"]), ({"type": "b"}, ["b"]), ({"status": "failed"}, []), ({"status": "queued"}, ["a", "b",
                                                                                                         "held"]),
    ({"created_by": "bob"}, ["b"]), ({"created_by": "bob", "created_by_kind": "worker"}, []),
    ({"held": True}, ["held"]), ({"held": False}, ["a", "b"])])
async def test_a_bulk_is_for_the_tasks_that_its_filter_finds(
        gate: harness.Gate, asked: dict[str, Any], wanted: list[str]) -> None:
    tasks = {"failed": await fail(gate), "held": await hold(gate), "a": await gate.create("a"),
             "b": await gate.create("b", by="bob")}

    record = await done(gate.as_admin(), action="cancel", **asked)

    ended = [name for name, task_id in tasks.items() if (await gate.task(task_id)).status == "canceled"]
    assert sorted(ended) == sorted(wanted)
    assert (record.done, record.skipped, record.refused, record.matches) == (len(wanted), 0, 0, len(wanted))


async def test_it_is_for_tasks_by_age_and_by_how_their_ids_begin(gate: harness.Gate) -> None:
    old = await gate.create()
    gate.skip(3600)
    new = await gate.create()
    middle = datetime.fromtimestamp(gate.now() - 1800, UTC)

    async def sampled(**asked: Any) -> list[str]:
        return [task.task_id for task in (await gate.as_admin().preview_bulk(action="cancel", **asked)).sample]

    assert await sampled(created_before=middle) == [old]
    assert await sampled(created_after=middle) == [new]
    assert await sampled(id_prefix=new[:30]) == [new]


async def test_a_sample_names_what_each_task_is_about(gate: harness.Gate) -> None:
    await gate.create()
    await gate.create(task_summary="The page on rivers")

    sample = (await gate.as_admin().preview_bulk(action="cancel")).sample

    assert [task.task_summary for task in sample] == ["The page on rivers", None]


async def test_tasks_that_come_later_are_not_meant(gate: harness.Gate) -> None:
    await gate.create()
    confirmation = await confirmed(gate.as_admin(), action="cancel")
    gate.skip(10)
    later = await gate.create()

    assert (await gate.as_admin().run_bulk(confirmation=confirmation)).done == 1
    assert (await gate.task(later)).status == "queued"


# What is done.


async def test_each_canceled_task_has_its_receipts(gate: harness.Gate) -> None:
    tasks = [(await gate.leased(type="other")).task_id, *await make(gate, 3)]

    record = await done(gate.as_admin(), action="cancel", reason="the wrong batch")

    assert (record.done, record.ended) == (4, True)
    for task_id in tasks:
        told = await gate.receipt(task_id, "task.canceled")
        assert harness.body(told)["reason"] == "the wrong batch"
        assert harness.body(told)["canceled_by"] == {"kind": "human", "id": "root"}
        await gate.receipt(task_id, "task.result_ready")
    assert await gate.owed() == []


async def test_tasks_on_hold_are_offered_again(gate: harness.Gate) -> None:
    held, other = await hold(gate, type="a"), await gate.create("b")

    record = await done(gate.as_admin(), action="release", held=True)

    assert record.done == 1
    assert (await gate.task(held)).held is None
    assert (await gate.events(held))[-1] == "task.hold_released"
    assert "task.hold_released" not in await gate.events(other)


async def test_tasks_get_another_priority_and_are_offered_by_it(gate: harness.Gate) -> None:
    offer = await gate.leased(type="c")
    first, second = await gate.create("a"), await gate.create("b")

    record = await done(gate.as_admin(), action="prioritize", type="b", priority=7)
    leased = await done(gate.as_admin(), action="prioritize", type="c", priority=9)

    assert (record.done, leased.done) == (1, 1)
    assert [task.priority for task in await records(gate, [first, second, offer.task_id])] == [0, 7, 9]
    assert [task.task_id for task in (await gate.as_worker().lease_next(max_tasks=2)).tasks] == [second, first]
    told = (await gate.as_agent().get_task_history(task_id=second)).events
    event = next(change for change in told if change.event_type == "task.reprioritized")
    assert msgspec.json.decode(event.payload) == {"before": 0, "priority": 7, "by": {"kind": "human", "id": "root"}}
    again = await done(gate.as_admin(), action="prioritize", type="b", priority=7)
    assert (again.matches, again.done) == (0, 0)


async def test_failed_tasks_are_run_again_once(gate: harness.Gate) -> None:
    failed = [await fail(gate, payload={"n": n}) for n in range(3)]
    await gate.finished()

    record = await done(gate.as_admin(), action="rerun", status="failed")

    assert (record.done, record.skipped, record.refused) == (3, 0, 0)
    page = await gate.as_admin().list_tasks(status="queued", limit=50)
    assert sorted(task.rerun_of for task in page.tasks) == sorted(failed)
    for task in page.tasks:
        assert str(task.created_by.id) == "ada"
        end = await gate.receipt(task.rerun_of, "task.failed")
        assert (await gate.receipt(task.task_id, "task.assigned")).parents == [end.receipt_id]
    again = await done(gate.as_admin(), action="rerun", status="failed")
    assert (again.done, again.skipped) == (0, 3)


async def test_two_bulks_at_once_run_no_task_again_twice(gate: harness.Gate) -> None:
    for _ in range(3):
        await fail(gate)
    views = [gate.as_admin(), gate.beside().as_admin()]
    orders = [(view, await confirmed(view, action="rerun", status="failed")) for view in views]

    told = await asyncio.gather(*(view.run_bulk(confirmation=order) for view, order in orders))

    assert sum(record.done for record in told) == sum(record.skipped for record in told) == 3
    assert [record.ended for record in told] == [True, True]
    assert len((await gate.as_admin().list_tasks(status="queued")).tasks) == 3


async def test_a_long_history_hides_no_rerun(gate: harness.Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    task_id = await fail(gate)
    monkeypatch.setattr(rerun, "MOST_EVENTS", 2)    # that are read together
    await gate.as_admin().rerun_task(task_id=task_id)
    assert len(await gate.events(task_id)) > 3

    record = await done(gate.as_admin(), action="rerun", status="failed")

    assert (record.done, record.skipped) == (0, 1)


async def test_tasks_that_failed_lately_are_run_again(gate: harness.Gate) -> None:
    await fail(gate)
    gate.skip(7200)
    late = await fail(gate)
    since = datetime.fromtimestamp(gate.now() - 3600, UTC)

    record = await done(gate.as_admin(), action="rerun", status="failed", ended_after=since)

    assert record.done == 1
    assert [task.rerun_of for task in (await gate.as_admin().list_tasks(status="queued")).tasks] == [late]


async def test_what_has_changed_in_between_is_skipped(gate: harness.Gate) -> None:
    first, second = await make(gate, 2)
    confirmation = await confirmed(gate.as_admin(), action="cancel", status="queued")
    await gate.claim()

    record = await gate.as_admin().run_bulk(confirmation=confirmation)

    assert (record.matches, record.done) == (2, 1)
    assert [task.status for task in await records(gate, [first, second])] == ["leased", "canceled"]


async def test_a_quota_that_is_full_stops_a_rerun_and_it_goes_on_later(gate: harness.Gate) -> None:
    for _ in range(3):
        await fail(gate)
    full = gate.beside(security=settings.SecuritySettings(rate_limiting=settings.RateLimiting(enabled=True)),
                       rate_limits=settings.RateLimits(free_tier=settings.Tier(active_tasks=2)))
    confirmation = await confirmed(full.as_admin(), action="rerun", status="failed")

    with harness.refused("quota_exceeded"):     # what got through is kept
        await full.as_admin().run_bulk(confirmation=confirmation)
    assert (await gate.as_admin().run_bulk(confirmation=confirmation)).done == 3

    assert len((await gate.as_admin().list_tasks(status="queued")).tasks) == 3


# In pieces, again, at once, and after a crash.


async def test_a_bulk_goes_on_where_it_was(gate: harness.Gate) -> None:
    tasks = await make(gate, 250)
    confirmation = await confirmed(gate.as_admin(), action="cancel")

    seen = []
    while not (record := await gate.as_admin().run_bulk(confirmation=confirmation, max_tasks=60)).ended:
        seen.append(record.done)

    assert seen == [60, 120, 180, 240]
    assert (record.done, record.skipped) == (250, 0)
    assert {task.status for task in await records(gate, tasks[::50])} == {"canceled"}
    assert await gate.as_admin().run_bulk(confirmation=confirmation) == record
    assert await gate.as_admin().get_bulk(bulk_id=record.bulk_id) == record


async def test_another_process_goes_on_after_a_crash(gate: harness.Gate) -> None:
    for _ in range(5):
        await fail(gate)
    confirmation = await confirmed(gate.as_admin(), action="rerun", status="failed")
    first = await gate.as_admin().run_bulk(confirmation=confirmation, max_tasks=2)
    assert (first.done, first.ended) == (2, False)
    gate.skip(86_400)       # it began in time

    record = await gate.beside().as_admin().run_bulk(confirmation=confirmation)

    assert (record.done, record.skipped, record.ended) == (5, 0, True)
    assert len((await gate.as_admin().list_tasks(status="queued")).tasks) == 5


async def test_two_that_carry_out_the_same_at_once_do_nothing_twice(gate: harness.Gate) -> None:
    for _ in range(12):
        await fail(gate)
    confirmation = await confirmed(gate.as_admin(), action="rerun", status="failed")
    views = [gate.as_admin(), gate.beside().as_admin()] * 2

    for _ in range(8):
        told = await asyncio.gather(*(view.run_bulk(confirmation=confirmation, max_tasks=2) for view in views))

    assert {(record.done, record.skipped, record.ended) for record in told} == {(12, 0, True)}
    assert len((await gate.as_admin().list_tasks(status="queued", limit=50)).tasks) == 12


# Who, and what is written down.


async def test_a_bulk_is_audited_when_it_begins_and_when_it_ends(gate: harness.Gate) -> None:
    await make(gate, 3)
    confirmation = await confirmed(gate.as_admin(), action="cancel", type="demo", reason="wrong")
    for _ in range(3):
        record = await gate.as_admin().run_bulk(confirmation=confirmation, max_tasks=2)

    (first, begun), (last, ended) = await audited(gate)

    assert (first, last) == ("bulk_begun", "bulk_ended")
    assert (begun["bulk_id"], begun["action"], begun["asked"], begun["reason"], begun["principal_id"]) == (
        record.bulk_id, "cancel", {"type": "demo"}, "wrong", "root")
    assert (begun["matches"], ended["done"], ended["skipped"], ended["refused"]) == (3, 3, 0, 0)


@pytest.mark.one_store
async def test_only_an_admin_who_may_write_carries_out(gate: harness.Gate) -> None:
    who = Caller(gate.tenant_id, wire.Principal("human", "root"), "admin", SCOPES - {"admin:write"})
    reader = harness.View(gate.engine, who)
    confirmation = await confirmed(reader, action="cancel")

    with harness.refused("forbidden"):
        await reader.run_bulk(confirmation=confirmation)
    for view in (gate.as_agent(), gate.as_worker()):
        for name, arguments in (("preview_bulk", {"action": "cancel"}), ("run_bulk", {"confirmation": confirmation}),
                                ("get_bulk", {"bulk_id": "x"})):
            with harness.refused("forbidden"):
                await getattr(view, name)(**arguments)


async def test_a_confirmation_is_good_for_its_caller_and_its_tenant_alone(gate: harness.Gate) -> None:
    await gate.create()
    confirmation = await confirmed(gate.as_admin(), action="cancel")

    for view in (gate.as_admin("bob"), gate.stranger().as_admin()):
        with harness.refused("invalid_confirmation"):
            await view.run_bulk(confirmation=confirmation)


@pytest.mark.one_store
async def test_a_confirmation_cannot_be_made_up_or_changed(gate: harness.Gate) -> None:
    await gate.create("a")
    await gate.create("b")
    confirmation = await confirmed(gate.as_admin(), action="cancel", type="a")
    sealed = confirmation.removeprefix(PREFIX)
    text = base64.urlsafe_b64decode(sealed + "=" * (-len(sealed) % 4))
    changed = PREFIX + base64.urlsafe_b64encode(text.replace(b'"type":"a"', b'"type":"b"')).decode().rstrip("=")
    cursor = (await gate.as_admin().list_tasks(limit=1)).next_cursor

    for wrong in (changed, confirmation[:-2], confirmation + "A", "", "x", "mXz0…", cursor):
        with harness.refused("invalid_confirmation"):
            await gate.as_admin().run_bulk(confirmation=wrong)
    assert len((await gate.as_admin().list_tasks(status="queued")).tasks) == 2


@pytest.mark.one_store
async def test_a_confirmation_is_no_option_of_a_command_and_one_of_before_works(gate: harness.Gate) -> None:
    """The releases before gave it without what it begins with now, and one of 64 began with a dash."""
    confirmation = await confirmed(gate.as_admin(), action="cancel")

    assert PREFIX.isidentifier()
    assert confirmation.startswith(PREFIX)
    assert (await gate.as_admin().run_bulk(confirmation=confirmation.removeprefix(PREFIX))).ended


async def test_a_confirmation_expires_before_it_is_used(gate: harness.Gate) -> None:
    task_id = await gate.create()
    confirmation = await confirmed(gate.as_admin(), action="cancel")
    gate.skip(901)

    with harness.refused("invalid_confirmation"):
        await gate.as_admin().run_bulk(confirmation=confirmation)
    assert (await gate.task(task_id)).status == "queued"


async def test_nobody_reads_the_bulk_of_another_tenant(gate: harness.Gate) -> None:
    record = await done(gate.as_admin(), action="cancel")

    for bulk_id in (record.bulk_id, "none"):
        with harness.refused("bulk_not_found"):
            await gate.stranger().as_admin().get_bulk(bulk_id=bulk_id)


async def test_the_tasks_of_another_tenant_are_not_touched(gate: harness.Gate) -> None:
    other = gate.stranger()
    task_id = await other.create()

    assert (await done(gate.as_admin(), action="cancel")).done == 0
    assert (await other.task(task_id)).status == "queued"


@pytest.mark.one_store
@pytest.mark.parametrize("fields", [
    {"action": "prioritize"}, {"action": "cancel", "priority": 3}, {"action": "delete"},
    {"action": "cancel", "created_by_kind": "agent"}])
async def test_a_request_that_says_too_little_or_too_much_is_refused(gate: harness.Gate,
                                                                     fields: dict[str, Any]) -> None:
    with harness.refused("invalid_request"):
        await gate.as_admin().preview_bulk(**fields)
