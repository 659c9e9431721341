"""Turns of tenants: a large call waits behind the tenant's own ones while others are about, and small ones never do."""

from __future__ import annotations

import asyncio
import time

import pytest

from asyncgate.conformance.harness import Gate
from asyncgate.parts.process import turns
from asyncgate.parts.process.turns import LARGE_WRITE_SECONDS, LoopTurns, Timed, counting

pytestmark = pytest.mark.anyio
LARGE, HOUR = 2 * LARGE_WRITE_SECONDS, 3600.0


async def compute(seconds: float) -> str:
    """Use the processor for so long, with a pause in between, and read ten rows."""
    for _ in range(2):
        begun = time.thread_time()
        while time.thread_time() - begun < seconds / 2:
            pass
        await asyncio.sleep(0)
    if (call := counting.get()) is not None:
        call.add_rows(10)
    return "done"


async def make_turns() -> LoopTurns:
    """Return turns while two tenants are about, of which one has made an endless call."""
    turns = LoopTurns()
    await turns.wait("neighbour", "ready", False)
    await turns.wait("large", "list_tasks", False)
    turns.mixed_until = time.monotonic() + HOUR
    turns.costs["large", "list_tasks"] = HOUR
    await turns.wait("large", "list_tasks", False)
    return turns


async def is_kept_waiting(turns: LoopTurns, tenant_id: str, operation: str, writes: bool = False) -> bool:
    waiting = asyncio.create_task(turns.wait(tenant_id, operation, writes))
    await asyncio.sleep(0)
    try:
        return not waiting.done()
    finally:
        waiting.cancel()


async def test_what_a_call_has_cost_is_noted_for_its_tenant_and_its_kind() -> None:
    turns = LoopTurns()

    assert await turns.count(compute(LARGE), lambda: ("large", "list_tasks")) == "done"
    await turns.count(compute(0.0), lambda: ("small", "whoami"))
    await turns.count(compute(LARGE), lambda: None)     # nobody's: its credential was refused

    assert turns.costs["large", "list_tasks"] >= LARGE
    assert {tenant for tenant, _ in turns.costs} <= {"large", "small"}
    assert counting.get() is None


async def test_a_large_call_waits_behind_the_last_one_of_its_tenant_and_others_do_not() -> None:
    turns = await make_turns()

    assert await is_kept_waiting(turns, "large", "list_tasks")
    assert not await is_kept_waiting(turns, "large", "renew_lease", writes=True)
    assert not await is_kept_waiting(turns, "neighbour", "list_tasks")


async def test_a_tenant_that_is_alone_never_waits() -> None:
    turns = await make_turns()
    turns.mixed_until = 0.0

    assert not await is_kept_waiting(turns, "large", "list_tasks")


async def test_small_writes_share_commits_instead() -> None:
    turns = await make_turns()
    turns.costs["large", "create_task"] = turns.costs["large", "get_task"] = LARGE_WRITE_SECONDS / 2

    assert not await is_kept_waiting(turns, "large", "create_task", writes=True)
    assert await is_kept_waiting(turns, "large", "get_task")


async def test_errors_and_an_end_reach_the_call_that_is_counted() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("wrong")
    ended = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(KeyError):
        await Timed(fail())
    turns = LoopTurns()
    waiting = asyncio.create_task(turns.count(wait(), lambda: None))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert ended == [True]


@pytest.mark.anyio
async def test_the_rows_that_a_call_reads_are_a_part_of_its_cost(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "ROW_SECONDS", 100.0)
    for _ in range(3):
        await gate.create()
    loop_turns = turns.LoopTurns()

    await loop_turns.count(gate.as_agent().list_tasks(), lambda: (gate.tenant_id, "list_tasks"))

    assert loop_turns.costs[gate.tenant_id, "list_tasks"] >= 300
