"""Lists of tasks by their last change: who follows what changes misses nothing and gets nothing twice."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import UNSET

from asyncgate.conformance import harness
from asyncgate.parts.model import queries, wire

pytestmark = pytest.mark.anyio
WRITERS, TASKS_EACH = 6, 12


async def listed(gate: harness.Gate, **ask: Any) -> list[str]:
    """Return the tasks of a page by the last change."""
    return [task.task_id for task in (await gate.as_agent().list_tasks(order="changed", **ask)).tasks]


async def follow(view: harness.View, since: datetime | None, **ask: Any) -> AsyncIterator[wire.Tasks]:
    """Yield the pages of one poll."""
    page = await view.list_tasks(order="changed", changed_since=since, **ask)
    yield page
    while page.next_cursor is not None:
        page = await view.list_tasks(order="changed", changed_since=since, cursor=page.next_cursor, **ask)
        yield page


async def poll(view: harness.View, since: datetime | None, **ask: Any) -> tuple[list[wire.TaskRecord], datetime]:
    """Return what has changed since a moment, and the moment for the next poll."""
    pages = [page async for page in follow(view, since, **ask)]
    assert len({page.as_of for page in pages}) == 1, "all pages of a list end at the same moment"
    assert isinstance(pages[0].as_of, datetime)
    return [task for page in pages for task in page.tasks], pages[0].as_of


@pytest.mark.parametrize("limit", [1, 2, 50])
async def test_the_latest_change_comes_first(gate: harness.Gate, limit: int) -> None:
    first, second, third = [await gate.create() for _ in range(3)]
    await gate.as_agent().cancel_task(task_id=first)
    await gate.as_agent().cancel_task(task_id=third)

    tasks, _ = await poll(gate.as_agent(), None, limit=limit)

    assert [task.task_id for task in tasks] == [third, first, second]
    assert [task.updated_at for task in tasks] == sorted((task.updated_at for task in tasks), reverse=True)


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_tasks_of_one_change_are_listed_page_by_page(gate: harness.Gate, limit: int) -> None:
    made = await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": n} for n in range(5)])

    tasks, _ = await poll(gate.as_agent(), None, limit=limit)

    assert [task.task_id for task in tasks] == [item.task_id for item in made.results][::-1]


async def test_a_poll_lists_what_has_changed_since_the_last_one(gate: harness.Gate) -> None:
    first, second = await gate.create(), await gate.create()
    before, as_of = await poll(gate.as_agent(), None)
    nothing, then = await poll(gate.as_agent(), as_of)
    await gate.as_agent().cancel_task(task_id=first)
    created = await gate.create()

    changed, _ = await poll(gate.as_agent(), then)

    assert [task.task_id for task in before] == [second, first]
    assert nothing == []
    assert [(task.task_id, task.status) for task in changed] == [(created, "queued"), (first, "canceled")]


async def test_every_kind_of_change_is_one(gate: harness.Gate) -> None:
    task_id, (_, as_of) = await gate.create(max_attempts=3), await poll(gate.as_agent(), None)
    w1, statuses = gate.as_worker(), list[tuple[str, int]]()

    async def step(change: Any) -> Any:
        nonlocal as_of
        reply = await change
        [task], as_of = await poll(gate.as_agent(), as_of)
        statuses.append((task.status, task.attempt))
        return reply

    offer = await step(gate.claim())
    await step(w1.start_task(**harness.under(offer)))
    await step(w1.fail(**harness.under(offer), error={"message": "no"}, retryable=True))
    gate.skip(60)
    offer = await step(gate.claim())
    await step(gate.lose(offer))
    gate.skip(60)
    offer = await step(gate.claim())
    await step(w1.complete(**harness.under(offer), result=1))

    assert statuses == [("leased", 0), ("running", 0), ("queued", 1), ("leased", 1), ("queued", 1), ("leased", 1),
                        ("succeeded", 1)]
    assert offer.task_id == task_id


async def test_a_task_that_changes_between_two_pages_comes_with_the_next_poll(gate: harness.Gate) -> None:
    made = [await gate.create() for _ in range(4)]
    pages = follow(gate.as_agent(), None, limit=2)
    first = await anext(pages)
    await gate.as_agent().cancel_task(task_id=made[0])
    rest = [task.task_id async for page in pages for task in page.tasks]

    assert isinstance(first.as_of, datetime)
    changed, _ = await poll(gate.as_agent(), first.as_of)

    assert [task.task_id for task in first.tasks] == made[:1:-1]
    assert rest == [made[1]], "the other one has changed behind the end of this list"
    assert [task.task_id for task in changed] == [made[0]]


@pytest.mark.parametrize("few", [1000, 0], ids=["ids", "index"])
async def test_filters_apply(gate: harness.Gate, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncgate.backends.pages.FEW", few)
    parent = await gate.create(type="parent")
    made = []
    for type in ("b", "a", "a", "b"):
        gate.skip(1)
        made.append(await gate.create(type=type, parent_task_id=parent, task_summary=f"{type} it"))
    theirs = await gate.create(type="a", by="bob")
    await gate.as_agent().cancel_task(task_id=made[1])
    moment = (await gate.task(made[2])).created_at
    await gate.as_agent().cancel_task(task_id=made[0])

    assert await listed(gate, type="a") == [made[1], made[2]]
    assert await listed(gate, status="canceled", type="a") == [made[1]]
    assert await listed(gate, type_prefix="a", summary_prefix="a i") == [made[1], made[2]]
    assert await listed(gate, parent_task_id=parent, status="canceled") == [made[0], made[1]]
    assert await listed(gate, created_after=moment) == [made[3], made[2]]
    assert await listed(gate, held=True) == []
    everything = await gate.as_admin().list_tasks(order="changed", type="a")
    assert [task.task_id for task in everything.tasks] == [made[1], theirs, made[2]]
    anybody = await gate.as_admin().list_tasks(order="changed", created_by="bob")
    assert [task.task_id for task in anybody.tasks] == [theirs]
    assert (await gate.stranger().as_admin().list_tasks(order="changed")).tasks == []


async def test_a_cursor_of_another_order_is_refused(gate: harness.Gate) -> None:
    for _ in range(2):
        await gate.create()
    by_age = (await gate.as_agent().list_tasks(limit=1)).next_cursor
    by_change = (await gate.as_agent().list_tasks(limit=1, order="changed")).next_cursor

    with harness.refused("invalid_cursor"):
        await gate.as_agent().list_tasks(order="changed", cursor=by_age)
    with harness.refused("invalid_cursor"):
        await gate.as_agent().list_tasks(cursor=by_change)
    with harness.refused("invalid_cursor"):
        await gate.as_agent().list_tasks(changed_since=datetime.now(UTC), cursor=by_change)


async def test_a_total_counts_what_the_filters_leave(gate: harness.Gate) -> None:
    made = [await gate.create(type=type) for type in ("a", "b", "a", "a")]
    await gate.create(type="a", by="bob")
    _, as_of = await poll(gate.as_agent(), None)
    await gate.as_agent().cancel_task(task_id=made[0])
    await gate.as_agent().cancel_task(task_id=made[1])

    async def total(view: harness.View, **ask: Any) -> Any:
        page = await view.list_tasks(limit=1, count=True, **ask)
        assert page.at_least is False
        return page.total

    ada, root = gate.as_agent(), gate.as_admin()
    assert [await total(view) for view in (ada, root)] == [4, 5]
    assert [await total(view, type="a") for view in (ada, root)] == [3, 4]
    assert [await total(root, type="a", status="queued"), await total(root, created_by="bob")] == [3, 1]
    assert [await total(root, held=held) for held in (True, False)] == [0, 5]
    assert await total(root, type_prefix="x") == 0
    assert [await total(ada, changed_since=as_of), await total(ada, changed_since=as_of, type="a")] == [2, 1]
    assert (await ada.list_tasks(limit=1)).total is UNSET


async def test_a_total_says_when_counting_ended_early(gate: harness.Gate) -> None:
    for type in ("a", "a", "a", "b"):
        await gate.create(type=type)

    async def count(most: int, **fields: Any) -> tuple[int, bool]:
        of = queries.TaskFilter(**{"owner": None, "status": None, "type": None, "before": None, "limit": 0, **fields})
        [number] = await gate.backend.page(gate.tenant_id, queries.TaskCount(of, most))
        return number

    assert [await count(most) for most in (3, 4)] == [(3, True), (4, False)]
    assert [await count(most, type="a") for most in (2, 3)] == [(2, True), (3, False)]
    assert await count(3, type="b", status="queued") == (1, False), "few are of that type, though many wait"


@pytest.mark.parametrize("engines", [1, 3])
async def test_who_polls_while_many_write_misses_nothing_and_gets_nothing_twice(
        make_gate: Callable[..., harness.Gate], engines: int) -> None:
    gate = make_gate()
    gates = [gate, *(gate.beside() for _ in range(engines - 1))]
    done, seen, as_of = asyncio.Event(), list[wire.TaskRecord](), None

    async def write(own: harness.Gate, writer: int) -> None:
        for number in range(TASKS_EACH):
            await own.create(type=f"type {writer % 2}")
            if offer := await own.claim(f"w{writer}"):
                if number % 3 == 0:
                    await own.as_worker(f"w{writer}").start_task(**harness.under(offer))
                await own.as_worker(f"w{writer}").complete(**harness.under(offer), result=number)

    async def read() -> None:
        nonlocal as_of
        while not done.is_set():
            changes, as_of = await poll(gate.as_agent(), as_of, limit=7)
            seen.extend(changes)

    reader = asyncio.create_task(read())
    writers = itertools.islice(itertools.cycle(gates), WRITERS)
    await asyncio.gather(*(write(own, writer) for writer, own in enumerate(writers)))
    done.set()
    await reader
    rest, _ = await poll(gate.as_agent(), as_of, limit=7)
    seen += rest

    everything, _ = await poll(gate.as_agent(), None)
    assert len(everything) == WRITERS * TASKS_EACH
    changes = [(task.task_id, task.updated_at) for task in seen]
    assert len(set(changes)) == len(changes)
    latest = {task.task_id: task for task in sorted(seen, key=lambda task: task.updated_at)}
    assert latest == {task.task_id: task for task in everything}
