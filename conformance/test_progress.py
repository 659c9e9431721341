"""Starting and reporting progress: queued, leased, running, and the checkpoint (spec 5)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from asyncgate.conformance import harness

pytestmark = pytest.mark.anyio


async def test_start_makes_a_leased_task_running(gate: harness.Gate) -> None:
    offer = await gate.leased()

    started = await gate.as_worker().start_task(**harness.under(offer))

    task = await gate.task(offer.task_id)
    assert (started.ok, started.status, task.status) == (True, "running", "running")
    assert started.started_at == task.started_at == task.updated_at


async def test_a_repeated_start_changes_nothing(gate: harness.Gate) -> None:
    offer = await gate.leased()
    first = await gate.as_worker().start_task(**harness.under(offer))
    gate.skip(5)

    async with gate.unchanged():
        assert await gate.as_worker().start_task(**harness.under(offer)) == first


async def test_the_first_progress_makes_a_leased_task_running(gate: harness.Gate) -> None:
    offer = await gate.leased()

    answer = await gate.as_worker().report_progress(**harness.under(offer, progress={"percent": 10}))

    task = await gate.task(offer.task_id)
    assert (answer.ok, answer.status, task.status) == (True, "running", "running")
    assert task.started_at is not None


async def test_the_last_progress_is_shown_with_its_time(gate: harness.Gate) -> None:
    offer = await gate.leased()
    for percent in (10, 20):
        await gate.as_worker().report_progress(**harness.under(offer, progress={"percent": percent}))

    task = await gate.task(offer.task_id)
    assert msgspec.json.decode(task.progress) == {"percent": 20}
    assert task.progress_at is not None


async def test_progress_does_not_prolong_a_lease(gate: harness.Gate) -> None:
    offer = await gate.leased()
    gate.skip(200)
    await gate.as_worker().report_progress(**harness.under(offer, progress=1))

    assert (await gate.task(offer.task_id)).lease_expires_at == offer.expires_at


@pytest.mark.parametrize("ending", ["expiry", "release", "failure"])
async def test_the_next_worker_is_handed_the_last_progress(gate: harness.Gate, ending: str) -> None:
    offer = await gate.leased("w1", retry_backoff_seconds=0)
    await gate.as_worker("w1").report_progress(**harness.under(offer, progress={"page": 7}))
    if ending == "expiry":
        await gate.lose(offer)
    elif ending == "release":
        await gate.as_worker("w1").release_lease(**harness.under(offer))
    else:
        await gate.as_worker("w1").fail(**harness.under(offer, retryable=True, error="no"))

    again = await gate.claim("w2")

    assert again is not None
    assert msgspec.json.decode(again.progress) == {"page": 7}


async def test_a_requeued_task_has_not_started(gate: harness.Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().start_task(**harness.under(offer))

    await gate.lose(offer)

    task = await gate.task(offer.task_id)
    assert (task.status, task.started_at) == ("queued", None)


async def test_progress_writes_no_receipt_by_default(gate: harness.Gate) -> None:
    offer = await gate.leased()
    before = await gate.receipts()

    await gate.as_worker().report_progress(**harness.under(offer, progress=1))

    assert await gate.receipts() == before


async def test_a_gate_may_write_a_receipt_for_each_progress(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(progress_receipts=True)
    offer = await gate.leased()
    for percent in (10, 10, 20):
        await gate.as_worker().report_progress(**harness.under(offer, progress={"percent": percent}))

    told = await gate.receipts(offer.task_id, "task.progress")
    accepted = await gate.receipt(offer.task_id, "task.accepted")
    assert [(harness.body(r)["progress"], harness.body(r)["sequence"]) for r in told] == [
        ({"percent": 10}, 1), ({"percent": 10}, 2), ({"percent": 20}, 3)]
    assert {tuple(r.parents) for r in told} == {(accepted.receipt_id,)}
    assert {(r.sender.kind, r.sender.id, r.to.kind, r.lease_id) for r in told} == {
        ("worker", "w1", "asyncgate", offer.lease_id)}


async def test_progress_receipts_open_and_close_no_obligation(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(progress_receipts=True)
    offer = await gate.leased()
    owed = await gate.owed()

    await gate.as_worker().report_progress(**harness.under(offer, progress=1))

    assert await gate.owed() == owed


@pytest.mark.parametrize(("size", "fits"), [(65_536, True), (65_537, False)])
async def test_progress_may_be_64_kb(gate: harness.Gate, size: int, fits: bool) -> None:
    offer, text = await gate.leased(), "x" * (size - 2)

    if fits:
        assert (await gate.as_worker().report_progress(**harness.under(offer, progress=text))).ok
    else:
        async with gate.unchanged():
            with harness.refused("payload_too_large"):
                await gate.as_worker().report_progress(**harness.under(offer, progress=text))


async def test_a_worker_may_complete_without_starting(gate: harness.Gate) -> None:
    offer = await gate.leased()

    await gate.as_worker().complete(**harness.under(offer, artifacts=[{"uri": "x"}]))

    assert (await gate.task(offer.task_id)).status == "succeeded"


async def test_the_history_tells_receipts_and_events_in_order(gate: harness.Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().start_task(**harness.under(offer))
    await gate.as_worker().complete(**harness.under(offer, artifacts=[{"uri": "x"}]))

    assert await gate.events(offer.task_id) == [
        "task.assigned", "task.accepted", "task.started", "task.completed", "task.result_ready"]


async def test_the_history_tells_when_each_thing_happened(gate: harness.Gate) -> None:
    offer = await gate.leased()
    gate.skip(60)
    await gate.as_worker().start_task(**harness.under(offer))
    gate.skip(60)

    happened = {event.event_type: event.created_at
                for event in (await gate.as_agent().get_task_history(task_id=offer.task_id)).events}
    task = await gate.task(offer.task_id)

    assert [happened["task.assigned"], happened["task.started"]] == [task.created_at, task.started_at]


async def test_a_history_can_be_read_page_by_page(gate: harness.Gate) -> None:
    offer = await gate.finished()
    ada, seen, cursor = gate.as_agent(), [], None
    while True:
        page = await ada.get_task_history(task_id=offer.task_id, limit=1, cursor=cursor)
        seen += page.events
        assert page.cursor is not None
        assert page.next_cursor in (None, page.cursor)
        if (cursor := page.next_cursor) is None:
            break

    assert [event.event_type for event in seen] == await gate.events(offer.task_id)
