"""Parking: a worker gives its lease back until a time; it costs nothing, and is counted."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.conformance import harness
from asyncgate.parts.model import views, wire

pytestmark = pytest.mark.anyio
DAY = 86_400


async def park(gate: harness.Gate, offer: wire.Offer, worker: str = "w1", **fields: Any) -> wire.Released:
    """Park a task."""
    parked: wire.Released = await gate.as_worker(worker).release_lease(**harness.under(offer), **fields)
    return parked


async def test_a_parked_task_is_offered_when_its_time_has_come_and_costs_nothing(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")

    parked = await park(gate, offer, after_seconds=2 * DAY, reason="the export is not ready")

    task = await gate.task(offer.task_id)
    assert (task.status, task.attempt, task.expiries, task.parks, task.held) == ("queued", 0, 0, 1, None)
    assert parked.next_eligible_at == task.next_eligible_at
    await gate.wait(DAY)
    assert await gate.claim("w2") is None
    await gate.wait(DAY + 1)
    again = await gate.claim("w2")
    assert again is not None
    assert (again.task_id, again.fence, again.attempt) == (offer.task_id, 2, 0)


async def test_a_task_is_parked_until_a_moment_and_one_that_has_passed_is_now(gate: harness.Gate) -> None:
    offer = await gate.leased()
    now = views.to_utc(gate.backend.now())

    await park(gate, offer, until=now - timedelta(hours=1))
    again = await gate.claim()
    assert again is not None
    until = now + timedelta(days=30)
    parked = await park(gate, again, until=until)

    assert parked.next_eligible_at == until
    assert (await gate.task(offer.task_id)).parks == 2


async def test_a_park_says_its_time_once(gate: harness.Gate) -> None:
    offer = await gate.leased()

    with harness.refused("invalid_request"):
        await park(gate, offer, after_seconds=1, until=views.to_utc(gate.backend.now()))

    assert (await gate.task(offer.task_id)).status == "leased"


@pytest.mark.parametrize("fields", [{}, {"after_seconds": 60}], ids=["released", "parked"])
async def test_a_lease_is_given_back_with_a_checkpoint_for_the_next_worker(
        gate: harness.Gate, fields: dict[str, Any]) -> None:
    offer = await gate.leased()
    await gate.as_worker().report_progress(**harness.under(offer), progress={"page": 1})

    await park(gate, offer, checkpoint={"page": 2}, **fields)

    await gate.wait(61)
    again = await gate.claim("w2")
    assert again is not None
    assert bytes(again.progress) == b'{"page":2}'


async def test_a_parked_task_keeps_the_checkpoint_that_it_had(gate: harness.Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().report_progress(**harness.under(offer), progress={"page": 1})

    await park(gate, offer, after_seconds=0)

    again = await gate.claim()
    assert again is not None
    assert bytes(again.progress) == b'{"page":1}'


async def test_a_checkpoint_that_is_too_large_parks_nothing(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(max_progress_bytes=100)
    offer = await gate.leased()

    with harness.refused("payload_too_large", limit=100):
        await park(gate, offer, after_seconds=60, checkpoint="x" * 100)

    assert (await gate.as_worker().complete(**harness.under(offer), result=None)).ok


async def test_a_park_is_told_to_the_owner_with_its_time_and_its_reason(gate: harness.Gate) -> None:
    offer = await gate.leased()
    accepted = await gate.receipt(offer.task_id, "task.accepted")

    parked = await park(gate, offer, after_seconds=60, reason="no answer yet")

    told = await gate.receipt(offer.task_id, "lease.expired")
    body = harness.body(told)
    assert (body["reason"], body["parks"], body["why"], body["requeued"]) == ("parked", 1, "no answer yet", True)
    assert parked.next_eligible_at is not None
    assert body["parked_until"] == parked.next_eligible_at.isoformat().replace("+00:00", "Z")
    assert told.parents == [accepted.receipt_id]
    assert (told.to.kind, told.to.id) == ("agent", "ada")


async def test_a_repeated_park_returns_its_first_outcome_and_writes_nothing(gate: harness.Gate) -> None:
    offer = await gate.leased()
    first = await park(gate, offer, after_seconds=60)

    async with gate.unchanged():
        assert await park(gate, offer, after_seconds=60) == first
    await gate.wait(61)
    again = await gate.claim("w2")
    assert again is not None
    async with gate.unchanged():
        assert (await park(gate, offer, after_seconds=60)).ok


async def test_only_who_holds_the_lease_parks_its_task(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")

    with harness.refused("lease_invalid_or_expired"):
        await park(gate, offer, "w2", after_seconds=60)

    await gate.wait(301)
    with harness.refused("lease_invalid_or_expired", reason="expired"):
        await park(gate, offer, after_seconds=60)


@pytest.mark.parametrize(("setting", "own", "most"), [(2, None, 2), (1000, 3, 3), (1, 0, None)])
async def test_a_task_is_on_hold_when_it_was_parked_as_often_as_it_may(
        make_gate: Callable[..., harness.Gate], setting: int, own: int | None, most: int | None) -> None:
    gate = make_gate(max_parks=setting)
    task_id = await gate.create(max_parks=own)

    for times in range(1, (most or 5) + 1):
        offer = await gate.claim()
        assert offer is not None
        await park(gate, offer, after_seconds=0)
        assert (await gate.task(task_id)).parks == times

    task = await gate.task(task_id)
    assert task.held == ("max_parks" if most else None)
    if most:
        assert not harness.body((await gate.receipts(task_id, "lease.expired"))[-1])["requeued"]
        assert await gate.claim() is None
        await gate.as_agent().release_hold(task_id=task_id)
        task = await gate.task(task_id)
        assert (task.held, task.parks) == (None, 0)
        assert await gate.claim() is not None


async def test_parks_count_neither_as_failures_nor_as_losses(gate: harness.Gate) -> None:
    task_id = await gate.create(max_attempts=1, max_expiries=1)

    for _ in range(5):
        offer = await gate.claim()
        assert offer is not None
        await park(gate, offer, after_seconds=0)

    task = await gate.task(task_id)
    assert (task.status, task.held, task.attempt, task.expiries, task.parks) == ("queued", None, 0, 0, 5)


async def test_a_parked_task_is_canceled_at_once(gate: harness.Gate) -> None:
    offer = await gate.leased()
    await park(gate, offer, after_seconds=DAY)

    assert (await gate.as_agent().cancel_task(task_id=offer.task_id)).status == "canceled"


async def test_a_park_survives_the_gate(gate: harness.Gate, backend_url: str) -> None:
    offer = await gate.leased()
    await park(gate, offer, after_seconds=60)
    backend: Any = gate.backend if backend_url == "memory:" else await open_backend(backend_url)
    other = harness.Gate(Engine(backend, gate.engine.settings), gate.tenant_id)

    try:
        assert (await other.task(offer.task_id)).parks == 1
        assert await other.claim() is None
    finally:
        if backend is not gate.backend:
            await backend.close()
