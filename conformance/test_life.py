"""The law of one task is explored whole, a gate needs each of its rules, and what it stores is a walk of the law."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate.conformance.harness import Gate, under
from asyncgate.conformance.history import read_stored, violations
from asyncgate.conformance.life import Bounds, Explored, Guards, Moves, compare, explore, find_strays
from asyncgate.conformance.load import OneTenant
from asyncgate.parts.model import stored


@pytest.mark.parametrize("bounds", [Bounds(fences=1, outbox=True), Bounds(fences=2, calls=1)], ids=["outbox", "fences"])
def test_in_every_state_what_is_stored_is_what_receipts_tell_and_a_task_can_end(bounds: Bounds) -> None:
    explored = explore(Moves(bounds=bounds))

    assert explored == Explored(explored.states)
    assert explored.states > 10_000     # far fewer would mean that the model has lost its steps


@pytest.mark.parametrize(("rule", "wrong", "most"), [
    ("raises_fence", "receipts tell of", 4), ("compares_fence", "is told of", 5),
    ("compares_time", "an expired lease did something", 4), ("looks_again", "swept before its time", 6),
    ("reads_status", "is told of", 2), ("writes_receipt", "receipts tell of", 1),
    ("keeps_outbox", "left the outbox", 2), ("adopts", "can never end", 3)])
def test_a_gate_without_one_of_its_rules_breaks_the_law_in_a_few_steps(rule: str, wrong: str, most: int) -> None:
    explored = explore(Moves(Guards()._replace(**{rule: False}), Bounds(outbox=rule == "keeps_outbox")))

    assert wrong in explored.violation
    assert len(explored.path) <= most


async def live(gate: Gate) -> None:
    """Let tasks end in all ways that there are."""
    await gate.finished()
    worker, boss = gate.as_worker("w1"), gate.as_admin()
    await worker.complete(**under(await gate.leased()), result=1)      # not said where
    located = await gate.leased()
    await worker.complete(**under(located), result=1)
    await worker.complete(**under(located), result=1, artifacts=["file:///out"])
    await worker.fail(**under(await gate.leased(max_attempts=1)), error={"message": "no"})
    retried = await gate.leased(max_attempts=2, retry_backoff_seconds=0)
    await worker.fail(**under(retried), error={"message": "once more"}, retryable=True, retry_after_seconds=0)
    again = await gate.claim("w2")
    assert again is not None
    await gate.as_worker("w2").release_lease(**under(again))
    await boss.cancel_task(task_id=again.task_id)
    parked = await gate.leased()
    until = datetime.fromtimestamp(gate.now(), UTC) + timedelta(hours=1)
    await worker.release_lease(**under(parked), until=until)
    await boss.cancel_task(task_id=(await gate.leased()).task_id)
    await gate.leased()
    gate.skip(86_400)
    await gate.sweep()


@pytest.mark.anyio
async def test_what_a_gate_stores_is_a_walk_of_the_law(gate: Gate) -> None:
    await live(gate)
    final = await read_stored(OneTenant(gate.backend, gate.tenant_id))
    [end] = final.values()

    assert find_strays(final) == []
    assert {task.status for task in end.tasks.values()} == {"queued", "succeeded", "failed", "canceled"}
    for task in end.tasks.values():
        others = [{"status": status} for status in ("queued", "leased", "succeeded") if status != task.status]
        wrongs: list[dict[str, Any]] = [{"fence": task.fence + 1}, {"owed": not task.owed}, *others]
        for wrong in wrongs:
            assert compare(replace(task, **wrong), end.leases.get(task.task_id), end.chains[task.task_id])


@pytest.mark.anyio
async def test_a_receipt_that_is_missing_shows(gate: Gate) -> None:
    await live(gate)
    [end] = (await read_stored(OneTenant(gate.backend, gate.tenant_id))).values()

    steps = {"task.accepted", "task.completed", "task.failed", "lease.expired", "task.canceled"}
    for task_id, chain in end.chains.items():
        for number, receipt in enumerate(chain):
            rest = [*chain[:number], *chain[number + 1:]]
            # The second of two completions would be taken for the only one.
            has_twin = receipt.receipt_type == "task.completed" in [row.receipt_type for row in chain[number + 1:]]
            is_step = receipt.receipt_type in steps and not has_twin
            assert bool(compare(end.tasks[task_id], end.leases.get(task_id), rest)) is is_step, receipt


class Meanwhile(OneTenant):
    """A backend in which a lease ends between the readings of two kinds."""

    end: Any = None

    async def page(self, tenant_id: str, query: Any) -> Any:
        """Return a page; before the first of receipts end the lease."""
        if getattr(query, "table", None) is stored.Receipt and (end := self.end):
            self.end = None
            await end()
        return await self.backend.page(tenant_id, query)


@pytest.mark.anyio
async def test_what_is_judged_is_read_at_one_moment_though_a_gate_is_at_work(gate: Gate) -> None:
    """Tasks that were read before, and receipts that were read after a completion, would not agree."""
    backend, offer = Meanwhile(gate.backend, gate.tenant_id), await gate.leased()
    backend.end = partial(gate.as_worker().complete, **under(offer), result=1)

    final = await read_stored(backend)

    assert backend.end is None
    assert final[gate.tenant_id].tasks[offer.task_id].status == "succeeded"
    assert violations([], final) == []
