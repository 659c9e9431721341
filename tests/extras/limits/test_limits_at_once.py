"""What shares a moment with claims: limits that are set, and turns that are deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from asyncgate.conformance import harness
from asyncgate.conformance.test_task_limits import claim
from asyncgate.extras.limits.pruning import TurnPruner

pytestmark = pytest.mark.anyio


async def call_at_once(gate: harness.Gate, before: list[Coroutine[Any, Any, Any]],
                       *calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Make calls while the batch of those `before` is under way, so that they share the next one, in this order."""
    batches, turn = gate.engine.batches, asyncio.Lock()
    transact, asked, launched = batches.transact, list[asyncio.Task[Any]](), list[int]()

    async def transact_in_turn(tenant_id: str, needs: Any, decide: Any) -> None:
        launched.append(needs.calls)
        async with turn:
            await transact(tenant_id, needs, decide)

    async def ask(*calls: Coroutine[Any, Any, Any]) -> None:
        asked.extend(map(asyncio.create_task, calls))
        while sum(map(len, batches.waiting.values())) + sum(launched) < len(asked):  # noqa: ASYNC110
            await asyncio.sleep(0)

    before += [gate.create("another") for _ in calls]       # a batch that is as large starts beside it
    batches.transact = transact_in_turn
    async with turn:
        await ask(*before)
        for call in calls:
            await ask(call)
    return (await asyncio.gather(*asked))[len(before):]


async def test_a_limit_counts_what_was_leased_before_it_was_set(gate: harness.Gate) -> None:
    for _ in range(2):
        await gate.create(limits={"openai": ""})
    assert len(await claim(gate)) == 1

    _, offers = await call_at_once(gate, [], gate.as_admin().set_limit(name="openai", concurrency_total=1),
                                   claim(gate, accept_types=["demo"]))

    assert offers == []


class LateWriter:
    """An engine whose changes wait, so that what was read for them is old."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.asked, self.wanted = engine, asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def change(self, *arguments: Any, **named: Any) -> Any:
        """Change something when it is wanted."""
        self.asked.set()
        await self.wanted.wait()
        return await self.engine.change(*arguments, **named)


async def test_claims_and_new_tasks_go_on_while_turns_are_deleted(gate: harness.Gate) -> None:
    await gate.as_admin().set_limit(name="customer", concurrency_per_key=1)
    offer = await gate.leased(limits={"customer": "a"})
    await gate.leased(limits={"customer": "b"})
    await gate.create(limits={"customer": "b"})     # so that its lane is looked at
    assert await claim(gate) == []      # which finds the turn of the first one empty
    late: Any = LateWriter(gate.engine)
    pruning = asyncio.create_task(TurnPruner(late).run())
    await late.asked.wait()
    await gate.as_worker().release_lease(**harness.under(offer))
    await gate.cancel_task(task_id=offer.task_id)

    async def prune() -> int:
        late.wanted.set()
        return await pruning

    first, _, second, task_id = await call_at_once(
        gate, [], claim(gate, accept_types=["demo"]), prune(), claim(gate, accept_types=["demo"]),
        gate.create(limits={"customer": "a"}))

    assert (first, second) == ([], [])
    assert [offer.task_id for offer in await claim(gate, accept_types=["demo"])] == [task_id]
