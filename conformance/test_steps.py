"""The step journal: what a worker has done of a task is kept by number and name, and is not done again."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.conformance import harness
from asyncgate.conformance.recount import wrong_levels
from asyncgate.extras.journal import wire_journal
from asyncgate.parts.model import errors, queries, settings, stored_journal, wire
from asyncgate.parts.model.content import sha256

pytestmark = pytest.mark.anyio
SHORT = 40      # bytes
DAY = 86_400


async def record(gate: harness.Gate, offer: wire.Offer, seq: int, name: str, value: Any,
                 worker: str = "w1") -> wire_journal.Recorded:
    """Record a step."""
    step: wire_journal.Recorded = await gate.as_worker(worker).record_step(
        **harness.under(offer), seq=seq, name=name, value=value)
    return step


def first_value(step: wire_journal.Recorded) -> bytes:
    """Return the value that was recorded first, with which the call was answered."""
    assert step.replayed
    assert isinstance(step.value, msgspec.Raw)
    return bytes(step.value)


async def steps_of(gate: harness.Gate, task_id: str) -> list[tuple[int, str, bytes]]:
    """Return the recorded steps of a task."""
    page = await gate.as_agent().list_steps(task_id=task_id)
    return [(step.seq, step.name, bytes(step.value)) for step in page.steps]


async def test_steps_are_listed_in_the_order_of_their_numbers(gate: harness.Gate) -> None:
    offer = await gate.leased()

    for seq, name, value in ((2, "send", {"id": 7}), (10, "wait", None), (1, "fetch", "a page")):
        await record(gate, offer, seq, name, value)

    assert await steps_of(gate, offer.task_id) == [
        (1, "fetch", b'"a page"'), (2, "send", b'{"id":7}'), (10, "wait", b"null")]


async def test_an_offer_and_the_task_tell_how_many_steps_there_are(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")
    assert offer.steps is msgspec.UNSET
    await record(gate, offer, 1, "fetch", 1)
    assert (await record(gate, offer, 2, "send", 2)).steps == 2

    await gate.lose(offer)

    again = await gate.claim("w2")
    assert again is not None
    assert (again.steps, (await gate.task(offer.task_id)).steps) == (2, 2)


async def test_a_step_starts_its_task_and_leaves_the_checkpoint_alone(gate: harness.Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().report_progress(**harness.under(offer), progress={"page": 1})

    await record(gate, offer, 1, "fetch", 1)

    task = await gate.task(offer.task_id)
    assert (task.status, bytes(task.progress)) == ("running", b'{"page":1}')


async def test_a_step_that_is_recorded_again_is_answered_with_its_first_value(gate: harness.Gate) -> None:
    offer = await gate.leased()
    first = await record(gate, offer, 1, "draw", 4)

    async with gate.unchanged():
        again = await record(gate, offer, 1, "draw", 5)

    assert (first.replayed, again.replayed, first_value(again), again.steps) == (False, True, b"4", 1)


async def test_a_step_keeps_its_name(gate: harness.Gate) -> None:
    offer = await gate.leased()
    await record(gate, offer, 1, "fetch", 1)

    async with gate.unchanged():
        with harness.refused("step_conflict", seq=1, name="fetch"):
            await record(gate, offer, 1, "send", 1)


@pytest.mark.one_store
async def test_a_worker_without_the_lease_records_nothing(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")
    await record(gate, offer, 1, "fetch", "mine")
    await gate.lose(offer)
    again = await gate.claim("w2")
    assert again is not None

    for name, value in (("fetch", "mine"), ("fetch", "late"), ("send", 1)):
        with harness.refused("lease_invalid_or_expired"):
            await record(gate, offer, 1 if name == "fetch" else 2, name, value, "w1")

    assert first_value(await record(gate, again, 1, "fetch", "yours", "w2")) == b'"mine"'
    await record(gate, again, 2, "send", 1, "w2")
    assert [step.fence for step in (await gate.as_agent().list_steps(task_id=offer.task_id)).steps] == [1, 2]


async def test_of_many_calls_for_one_number_one_is_kept(gate: harness.Gate) -> None:
    offer = await gate.leased()

    told = await asyncio.gather(*(record(gate, offer, 1, "draw", number) for number in range(10)))

    [(_, _, kept)] = await steps_of(gate, offer.task_id)
    assert sum(not step.replayed for step in told) == 1
    assert {first_value(step) for step in told if step.replayed} == {kept}
    assert (await gate.task(offer.task_id)).steps == 1


async def test_of_two_processes_that_record_one_number_one_is_kept(gate: harness.Gate, backend_url: str) -> None:
    backend: Any = gate.backend if backend_url == "memory:" else await open_backend(backend_url)
    other = harness.Gate(Engine(backend, gate.engine.settings), gate.tenant_id)
    try:
        offer = await gate.leased()
        told = await asyncio.gather(*(record(house, offer, seq, "draw", [seq, number]) for seq in (1, 2, 3)
                                      for number, house in enumerate((gate, other) * 3)))

        rows = await gate.backend.page(gate.tenant_id, queries.Rows(stored_journal.RecordedStep))
        assert sorted(row.place for row in rows) == [1, 2, 3]
        assert sum(not step.replayed for step in told) == (await other.task(offer.task_id)).steps == 3
    finally:
        if backend is not gate.backend:
            await backend.close()


async def test_the_completion_carries_the_digest_of_all_steps(gate: harness.Gate) -> None:
    offer = await gate.leased()
    for seq, value in ((2, b"2"), (1, b'{"a":1}')):
        await record(gate, offer, seq, f"step {seq}", msgspec.Raw(value))

    await gate.as_worker().complete(**harness.under(offer), result=1, artifacts=[{"uri": "x"}])

    digest = None
    for seq, value in ((2, b"2"), (1, b'{"a":1}')):
        digest = sha256(digest, seq, f"step {seq}", hashlib.sha256(value).hexdigest())
    told = harness.body(await gate.receipt(offer.task_id, "task.completed"))
    assert (told["steps"], told["steps_sha256"]) == (2, digest)


async def test_a_completion_without_steps_says_nothing_of_them(gate: harness.Gate) -> None:
    offer = await gate.leased()

    await gate.as_worker().complete(**harness.under(offer), result=1, artifacts=[{"uri": "x"}])

    assert not harness.body(await gate.receipt(offer.task_id, "task.completed")).keys() & {"steps", "steps_sha256"}


@pytest.mark.parametrize(("limit", "quota"), [
    ({"max_task_steps": 2}, "max_task_steps"), ({"max_task_step_bytes": 2 * SHORT}, "max_task_step_bytes")])
async def test_a_task_has_room_for_so_many_steps(make_gate: Callable[..., harness.Gate], limit: dict[str, int],
                                                 quota: str) -> None:
    gate = make_gate(**limit)
    offer = await gate.leased()
    value = "x" * (SHORT - 2)
    for seq in (1, 2):
        await record(gate, offer, seq, "a", value)

    with harness.refused("journal_full", quota=quota):
        await record(gate, offer, 3, "a", value)

    assert (await record(gate, offer, 2, "a", value)).replayed
    assert (await gate.as_worker().complete(**harness.under(offer), result=1)).ok


@pytest.mark.one_store
async def test_a_value_that_is_too_large_is_refused_with_its_limit(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(max_step_bytes=SHORT)
    offer = await gate.leased()

    with harness.refused("payload_too_large", limit=SHORT):
        await record(gate, offer, 1, "a", "x" * (SHORT - 1))

    assert await steps_of(gate, offer.task_id) == []


async def test_a_tenant_has_room_for_so_many_bytes_of_steps(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(security=settings.SecuritySettings(rate_limiting=settings.RateLimiting(enabled=True)),
                     rate_limits=settings.RateLimits(free_tier=settings.Tier(step_storage_gb=0)))
    offer = await gate.leased()

    with harness.refused("quota_exceeded", quota="step_storage_gb", limit=0):
        await record(gate, offer, 1, "a", 1)


async def test_a_long_journal_comes_in_pages_and_each_step_once(gate: harness.Gate) -> None:
    offer, other = await gate.leased(), await gate.leased("w2")
    await record(gate, other, 1, "of another task", 1, "w2")
    for seq in range(1, 24):
        await record(gate, offer, seq, "a", seq)

    seen, cursor = list[int](), None
    while True:
        page = await gate.as_worker().list_steps(task_id=offer.task_id, limit=5, cursor=cursor)
        seen += [step.seq for step in page.steps]
        if (cursor := page.next_cursor) is None:
            break

    assert seen == [*range(1, 24)]
    assert [step.seq for step in (await gate.as_worker().list_steps(task_id=offer.task_id)).steps] == seen


async def test_steps_are_looked_at_without_their_values_and_one_by_its_number(gate: harness.Gate) -> None:
    offer = await gate.leased()
    for seq, value in ((1, "a" * 100), (2, None)):
        await record(gate, offer, seq, f"step {seq}", value)
    ada = gate.as_agent()

    bare = (await ada.list_steps(task_id=offer.task_id, values=False)).steps
    [second] = (await ada.list_steps(task_id=offer.task_id, seq=2)).steps

    assert [(step.seq, step.name, step.value_bytes, step.value) for step in bare] == [
        (1, "step 1", 102, msgspec.UNSET), (2, "step 2", 4, msgspec.UNSET)]
    assert (second.seq, bytes(second.value)) == (2, b"null")
    assert (await ada.list_steps(task_id=offer.task_id, seq=3)).steps == []
    with harness.refused("forbidden"):
        await gate.as_agent("eve").list_steps(task_id=offer.task_id, seq=2)


async def test_a_page_with_large_values_ends_early(gate: harness.Gate) -> None:
    offer = await gate.leased()
    for seq in range(1, 21):
        await record(gate, offer, seq, "a", "x" * 250_000)

    first = await gate.as_worker().list_steps(task_id=offer.task_id)

    assert 16 <= len(first.steps) < 20
    rest = await gate.as_worker().list_steps(task_id=offer.task_id, cursor=first.next_cursor)
    assert [step.seq for step in first.steps + rest.steps] == [*range(1, 21)]
    assert rest.next_cursor is None


async def test_steps_are_read_by_those_who_may_read_the_task(gate: harness.Gate) -> None:
    offer = await gate.leased()
    await record(gate, offer, 1, "a", 1)

    for view in (gate.as_agent("ada"), gate.as_worker("w1"), gate.as_admin()):
        assert len((await view.list_steps(task_id=offer.task_id)).steps) == 1
    for view in (gate.as_agent("eve"), gate.as_worker("w2")):
        with harness.refused("forbidden"):
            await view.list_steps(task_id=offer.task_id)
    with pytest.raises(errors.GateError):
        await gate.stranger().as_admin().list_steps(task_id=offer.task_id)


async def test_the_bytes_of_steps_are_metered(gate: harness.Gate) -> None:
    offer = await gate.leased()

    for seq in (1, 1, 2):
        await record(gate, offer, seq, "a", "é" * 100)

    assert await wrong_levels(gate.engine, gate.tenant_id) == []


async def test_steps_go_with_their_task(make_gate: Callable[..., harness.Gate], tmp_path: Path) -> None:
    gate = make_gate(archive=settings.ArchiveSettings(directory=str(tmp_path)))
    kept, offer = await gate.leased("w2"), await gate.leased("w1")
    for lease, worker in ((kept, "w2"), (offer, "w1")):
        await record(gate, lease, 1, "a", "é" * 100, worker)
    await gate.as_worker("w1").complete(**harness.under(offer), result=1, artifacts=[{"uri": "x"}])
    await gate.wait(91 * DAY)

    await gate.as_admin().run_archive()

    rows = await gate.backend.page(gate.tenant_id, queries.Rows(stored_journal.RecordedStep))
    assert [row.task_id for row in rows] == [kept.task_id]
    assert await wrong_levels(gate.engine, gate.tenant_id) == []


async def test_steps_are_erased_with_their_owner(gate: harness.Gate) -> None:
    offer = await gate.leased()
    await record(gate, offer, 1, "a", "a secret")

    await gate.as_admin().erase_principal(principal_kind="agent", principal_id="ada", confirm="ada")

    assert await gate.backend.page(gate.tenant_id, queries.Rows(stored_journal.RecordedStep)) == []
