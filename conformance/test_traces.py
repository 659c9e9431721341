"""The trace of a task's creator is kept with the task, handed to its worker, and in no receipt."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate.conformance.harness import Gate, View
from asyncgate.parts.model import wire
from asyncgate.parts.model.trace import Trace

pytestmark = pytest.mark.anyio

FIRST = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
STATE = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"


def traced(gate: Gate, trace: Trace | None) -> View:
    """Return ada, within a trace."""
    return View(gate.engine, replace(gate.as_agent().caller, trace=trace))


async def create(gate: Gate, trace: Trace | None, **fields: Any) -> str:
    """Create a task within a trace."""
    made: wire.Created = await traced(gate, trace).create_task(type="demo", payload=None, **fields)
    return made.task_id


async def test_each_worker_of_a_task_is_handed_the_trace_of_its_creator(gate: Gate) -> None:
    task_id = await create(gate, Trace(FIRST, STATE))
    first = await gate.claim()
    assert first
    await gate.lose(first)

    second, task = await gate.claim(), await gate.task(task_id)

    assert second
    assert {(record.traceparent, record.tracestate) for record in (first, second, task)} == {(FIRST, STATE)}


async def test_a_task_without_a_trace_is_shown_without_one(gate: Gate) -> None:
    offer = await gate.leased()

    assert offer.traceparent is offer.tracestate is offer.trace_link
    assert not isinstance(offer.traceparent, str)


async def test_no_receipt_says_to_which_trace_its_task_belongs(gate: Gate) -> None:
    with_trace, without = await create(gate, Trace(FIRST, STATE)), await create(gate, None)

    (told,), (also,) = await gate.receipts(with_trace), await gate.receipts(without)

    assert told.body == also.body
    assert FIRST[3:35] not in bytes(told.body).decode()


async def test_a_repeated_key_returns_the_first_task_whatever_the_trace(gate: Gate) -> None:
    first = await traced(gate, Trace(FIRST)).create_task(type="demo", payload=None, idempotency_key="k")
    again = await traced(gate, Trace(OTHER)).create_task(type="demo", payload=None, idempotency_key="k")

    assert (again.task_id, again.payload_differs) == (first.task_id, False)
    assert (await gate.task(first.task_id)).traceparent == FIRST


@pytest.mark.parametrize("asked", [None, OTHER])
async def test_a_task_that_runs_again_links_to_the_trace_of_the_first_and_belongs_to_that_of_its_caller(
        gate: Gate, asked: str | None) -> None:
    task_id = await create(gate, Trace(FIRST, STATE))
    await gate.as_agent().cancel_task(task_id=task_id)

    again = await traced(gate, Trace(asked) if asked else None).rerun_task(task_id=task_id)
    offer = await gate.claim()

    assert offer
    assert offer.task_id == again.task_id
    assert (offer.trace_link, offer.traceparent or None) == (FIRST, asked)
