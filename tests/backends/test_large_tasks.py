"""What large tasks cost those who only look at them: a claim reads few payloads that it does not hand out."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from asyncgate import MOST_PAGE_BYTES, Engine
from asyncgate.backends import open_backend
from asyncgate.backends.lanes import Portions
from asyncgate.backends.sqlite_tables import MOST_WHOLE
from asyncgate.conformance.harness import Gate
from asyncgate.parts.model.stored import Task

pytestmark = pytest.mark.anyio

LARGE = 1_000_000
KINDS = 2 * MOST_WHOLE


@pytest.fixture(params=["sqlite", "postgres"])
async def gate(request: pytest.FixtureRequest, fresh: Callable[[str], Awaitable[str]]) -> AsyncIterator[Gate]:
    """A gate on a database; one in memory has all payloads there anyway."""
    backend = await open_backend(await fresh(request.param))
    yield Gate(Engine(backend), "00000000-0000-0000-0000-00000000000a")
    await backend.close()


async def queue(gate: Gate, kinds: int, each: int) -> dict[str, str]:
    """Queue large tasks of some kinds; return their types by their ids, in the order in which they shall be claimed."""
    tasks = list[tuple[int, str, str]]()
    for n in range(kinds * each):
        type, priority = f"k{n % kinds}", n * 7 % 5
        made = await gate.as_agent().create_task(type=type, payload="x" * LARGE, priority=priority)
        tasks.append((-priority, made.task_id, type))
    return {task_id: type for _, task_id, type in sorted(tasks)}


async def test_a_claim_of_one_task_of_many_kinds_reads_one_payload(gate: Gate) -> None:
    best, *_ = await queue(gate, KINDS, 1)

    tracemalloc.start()
    try:
        [offer] = (await gate.as_worker().lease_next()).tasks
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert offer.task_id == best
    assert peak < KINDS * LARGE / 4


@pytest.mark.parametrize(("kinds", "each"), [(1, 40), (KINDS, 2)])
async def test_a_claim_of_many_large_tasks_reads_little_more_than_it_hands_out(
        gate: Gate, kinds: int, each: int) -> None:
    order = await queue(gate, kinds, each)

    tracemalloc.start()
    try:
        offers = (await gate.as_worker().lease_next(max_tasks=50)).tasks
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert [offer.task_id for offer in offers] == list(order)[:MOST_PAGE_BYTES // LARGE + 1]
    assert peak < kinds * each * LARGE / 2


async def test_a_claim_ends_after_as_many_bytes_in_any_script(gate: Gate) -> None:
    for _ in range(10):
        await gate.as_agent().create_task(type="t", payload="語" * (LARGE // 3))

    offers = [(await gate.as_worker(f"w{n}").lease_next(max_tasks=50)).tasks for n in range(3)]

    assert [len(some) for some in offers] == [5, 5, 0]


async def test_claims_at_once_get_large_tasks_each_and_the_best_ones(gate: Gate) -> None:
    order = await queue(gate, KINDS, 1)
    types = list(order.values())
    kinds = [None, types[3:12], types[10:14], None]

    claimed = await asyncio.gather(*(gate.as_worker(f"w{n}").lease_next(max_tasks=50, accept_types=wanted)
                                     for n, wanted in enumerate(kinds)))

    taken = [[offer.task_id for offer in reply.tasks] for reply in claimed]
    assert [len(some) for some in taken] == [5, 5, 4, 5]
    assert taken[0] + taken[1] == list(order)[:10]
    assert taken[2] + taken[3] == list(order)[10:19]


def make_task(length: int) -> Task:
    """Return a task whose payload has this length."""
    return Task(**{**dict.fromkeys(Task.__struct_fields__, ""), "payload": "x" * length})    # type: ignore[arg-type]


def test_every_claim_of_a_batch_finds_a_portion() -> None:
    """Of two portions for each claim, less one: the last task of each claim may be a whole one."""
    portions, large, small = Portions(3), make_task(MOST_PAGE_BYTES + 1), make_task(1)

    assert [portions.add(task, None) for task in (small, large, small, large, large, large, small, large)] == [
        False, False, False, False, False, False, False, True]
