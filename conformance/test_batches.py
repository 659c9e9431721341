"""Batches: many items in one call, many callers in one transaction, and failures of single items."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Raw

from asyncgate import Caller, Engine, Job, Work, decide
from asyncgate.conformance import harness
from asyncgate.conformance.verify import verify
from asyncgate.parts.model import errors, wire

pytestmark = pytest.mark.anyio

BAD = {"type": "bad", "payload": None, "requirements": {"capabilities": "not a list"}}


async def test_a_batch_creates_its_tasks_in_the_order_they_were_sent(gate: harness.Gate) -> None:
    answer = await gate.as_agent().create_tasks(tasks=[{"type": f"t{n}", "payload": None} for n in range(5)])

    listed = (await gate.as_agent().list_tasks()).tasks
    assert [item.task_id for item in answer.results] == [task.task_id for task in reversed(listed)]
    assert [(item.status, item.error) for item in answer.results] == [("queued", None)] * 5
    assert [task.type for task in reversed(listed)] == [f"t{n}" for n in range(5)]


async def test_one_refused_item_spares_the_others(gate: harness.Gate) -> None:
    answer = await gate.as_agent().create_tasks(tasks=[{"type": "a", "payload": None}, BAD, {"type": "c",
                                                                                             "payload": None}])

    good, bad, last = answer.results
    assert (bad.task_id, bad.error.error) == (None, "invalid_request")
    assert [good.error, last.error] == [None, None]
    assert {task.type for task in (await gate.as_agent().list_tasks()).tasks} == {"a", "c"}
    assert len(await gate.owed()) == 2


async def test_one_key_twice_in_a_batch_is_one_task(gate: harness.Gate) -> None:
    item = {"type": "demo", "payload": None, "idempotency_key": "k"}

    first, again, differs = (await gate.as_agent().create_tasks(tasks=[item, item, item | {"payload": 1}])).results

    assert first.task_id == again.task_id == differs.task_id
    assert [item.payload_differs for item in (first, again, differs)] == [False, False, True]
    assert len((await gate.as_agent().list_tasks()).tasks) == 1


async def test_the_creator_of_a_batch_is_the_creator_of_its_items(gate: harness.Gate) -> None:
    answer = await gate.create_tasks(principal_kind="service", principal_id="cron", tasks=[
        {"type": "a", "payload": None}, {"type": "b", "payload": None, "principal_id": "eve"}])

    owners = [str((await gate.task(item.task_id)).created_by) for item in answer.results]
    assert owners == ["service cron", "agent eve"]


async def test_a_batch_that_takes_long_leaves_the_rest_to_the_next(
        gate: harness.Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tenants get their turn, however long one tenant's operations take."""
    first, decided = await gate.create(), list[int]()      # the first one reads the declared types, and so comes late

    def counted(jobs: list[Job], works: list[Work], work: Work) -> None:
        decide(jobs, works, work)
        decided.append(sum(not job.left for job in jobs))
    monkeypatch.setattr("asyncgate.decide", counted)
    monkeypatch.setattr("asyncgate.SLICE_SECONDS", -1.0)

    made = await asyncio.gather(*(gate.create(type=f"t{number}") for number in range(6)))

    *listed, before = (await gate.as_agent().list_tasks()).tasks
    assert before.task_id == first
    assert [task.type for task in reversed(listed)] == [f"t{number}" for number in range(6)]
    assert [task.task_id for task in reversed(listed)] == made
    assert decided == [1] * 6


@pytest.mark.one_store
async def test_an_agent_cannot_create_for_another_within_a_batch(gate: harness.Gate) -> None:
    answer = await gate.as_agent("ada").create_tasks(tasks=[{"type": "a", "payload": None, "principal_id": "eve"},
                                                            {"type": "b", "payload": None}])

    assert answer.results[0].error.error == "forbidden"
    assert answer.results[1].error is None
    assert await gate.owed("eve") == []


@pytest.mark.one_store
@pytest.mark.parametrize("count", [0, 501])
@pytest.mark.parametrize("operation", ["create_tasks", "complete_tasks"])
async def test_a_batch_has_1_to_500_items(gate: harness.Gate, operation: str, count: int) -> None:
    item = {"type": "demo", "payload": None} if operation == "create_tasks" else {"task_id": "t", "lease_id": "l"}

    async with gate.unchanged():
        with harness.refused("invalid_request"):
            await getattr(gate.as_admin(), operation)(tasks=[item] * count)


async def test_each_completion_of_a_batch_stands_for_itself(gate: harness.Gate) -> None:
    await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 4)
    offers = (await gate.as_worker().lease_next(max_tasks=4)).tasks
    await gate.as_agent().cancel_task(task_id=offers[1].task_id)
    items = [harness.under(offer, artifacts=[{"uri": "x"}])
             for offer in offers] + [{"task_id": "none", "lease_id": "x"}]

    results = (await gate.as_worker().complete_tasks(tasks=items)).results

    assert [(item.status, item.error and (item.error.error, item.error.reason)) for item in results] == [
        ("succeeded", None), (None, ("lease_invalid_or_expired", "canceled")), ("succeeded", None), ("succeeded", None),
        (None, ("task_not_found", None))]
    assert [item.task_id for item in results] == [item["task_id"] for item in items]
    assert await gate.owed() == []


async def test_a_repeated_batch_of_completions_writes_nothing(gate: harness.Gate) -> None:
    offer = await gate.leased()
    item = harness.under(offer, artifacts=[{"uri": "x"}])
    first = await gate.as_worker().complete_tasks(tasks=[item, item])

    async with gate.unchanged():
        assert await gate.as_worker().complete_tasks(tasks=[item, item]) == first


async def test_the_worker_of_a_batch_is_the_worker_of_its_items(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")

    wrong = await gate.complete_tasks(worker_id="w2", tasks=[harness.under(offer)])
    right = await gate.complete_tasks(worker_id="w1", tasks=[harness.under(offer)])

    assert (wrong.results[0].error.error, wrong.results[0].error.status) == ("lease_invalid_or_expired", "leased")
    assert right.results[0].status == "succeeded"


async def together(gate: harness.Gate, *asks: Any) -> list[Any]:
    """Perform operations in one tick of the loop, so that they share a batch."""
    return list(await asyncio.gather(*asks, return_exceptions=True))


async def test_an_operation_that_raises_fails_alone(gate: harness.Gate) -> None:
    def broken(engine: Engine, work: Work, caller: Caller, ask: wire.CreateTask) -> wire.Created:
        engine.create_task(work, caller, ask)
        raise RuntimeError("a bug, on purpose")
    ada = gate.as_agent()

    before, bug, after = await together(
        gate, ada.create_task(type="a", payload=None), gate.engine.write(broken, None, ada.caller,
                                                                         wire.CreateTask(type="bug",
                                                                                         payload=Raw(b"null"))),
        ada.create_task(type="b", payload=None))

    assert isinstance(bug, errors.GateError)
    assert (bug.code, "on purpose" in str(bug)) == ("internal_error", False), "a bug's text stays inside"
    assert {task.type for task in (await ada.list_tasks()).tasks} == {"a", "b"}
    assert len(await gate.receipts()) == len(await gate.owed()) == 2
    assert (before.status, after.status) == ("queued", "queued")


class Once(harness.Numbered):
    """Ids that repeat the first one on demand."""

    again = 0

    def new(self, now: float, mark: int = 0, name: object = None) -> str:
        """Return the next id, or the first one again."""
        self.again -= 1
        return f"00000000-0000-7000-8000-{1:012x}" if self.again == 0 else super().new(now)


async def test_an_operation_that_the_database_refuses_fails_alone(gate: harness.Gate) -> None:
    ids = gate.backend.backend.ids = Once()     # type: ignore[attr-defined]
    ada, first = gate.as_agent(), await gate.create(type="first")
    assert first == f"00000000-0000-7000-8000-{1:012x}"

    def clash(engine: Engine, work: Work, caller: Caller, ask: wire.CreateTask) -> wire.Created:
        ids.again = 1
        return engine.create_task(work, caller, ask)
    answers = await together(
        gate, ada.create_task(type="a", payload=None), gate.engine.write(clash, None, ada.caller,
                                                                         wire.CreateTask(type="clash",
                                                                                         payload=Raw(b"null"))),
        ada.create_task(type="b", payload=None))

    assert isinstance(answers[1], errors.GateError)
    assert answers[1].code == "internal_error"
    assert [task.type for task in (await ada.list_tasks()).tasks] in (["b", "a", "first"], ["a", "b", "first"])
    assert (await gate.task(first)).type == "first"
    assert len(await gate.owed()) == 3
    problems = (await verify(gate.backend)).problems
    assert [problem for problem in problems if gate.tenant_id in problem] == [], "something of it was kept"


async def test_an_operation_whose_client_has_gone_is_not_started(gate: harness.Gate) -> None:
    ada = gate.as_agent()
    gone = asyncio.ensure_future(ada.create_task(type="gone", payload=None))
    stays = asyncio.ensure_future(ada.create_task(type="stays", payload=None))
    await asyncio.sleep(0)

    gone.cancel()
    await together(gate, gone, stays)
    await gate.engine.batches.wait_for_all()

    assert [task.type for task in (await ada.list_tasks()).tasks] == ["stays"]


async def test_a_batch_sees_what_earlier_operations_of_it_did(gate: harness.Gate) -> None:
    made, offers = await together(gate, gate.as_agent().create_task(type="demo", payload=None),
                                  gate.as_worker().lease_next())

    assert [offer.task_id for offer in offers.tasks] in ([], [made.task_id])
    assert (await gate.task(made.task_id)).status == ("leased" if offers.tasks else "queued")


async def test_more_operations_than_a_batch_holds_are_all_carried_out(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(batch_size=7)

    made = await together(gate, *(gate.as_agent().create_task(type="demo", payload=None) for _ in range(50)))

    assert len({task.task_id for task in made}) == 50
    assert len(await gate.owed()) == 50


async def test_a_call_with_many_items_lets_other_tenants_pass(gate: harness.Gate) -> None:
    other = gate.stranger()
    await asyncio.gather(gate.create(), other.create())      # so that two tenants are about
    items = [{"type": f"t{number}", "payload": None} for number in range(100)]

    large = asyncio.create_task(gate.as_agent().create_tasks(tasks=items))
    for _ in range(3):
        await other.create()
        assert not large.done()
        await asyncio.sleep(0)
    made = (await large).results

    listed = (await gate.as_agent().list_tasks(limit=100)).tasks
    assert [item.task_id for item in made] == [task.task_id for task in reversed(listed)]
    assert [task.type for task in reversed(listed)] == [item["type"] for item in items]


async def test_large_calls_of_a_tenant_write_one_slice_at_a_time_while_others_are_about(gate: harness.Gate) -> None:
    await asyncio.gather(gate.create(), gate.stranger().create())
    transact, under_way = gate.engine.batches.transact, list[int]()

    async def watch(tenant_id: str, *asked: Any) -> None:
        under_way.append(len(gate.engine.batches.under_way[tenant_id]))
        await transact(tenant_id, *asked)
    gate.engine.batches.transact = watch
    items = [{"type": "slice", "payload": None}] * 20

    made = await asyncio.gather(*(gate.as_agent().create_tasks(tasks=items) for _ in range(3)))

    assert [len(reply.results) for reply in made] == [20] * 3
    assert set(under_way) == {1}
    assert len(under_way) >= 3 * 3


async def test_a_large_call_goes_by_slices_also_where_nobody_else_has_been_about(gate: harness.Gate) -> None:
    transact, calls = gate.engine.batches.transact, list[str]()

    async def watch(tenant_id: str, *asked: Any) -> None:
        calls.append(tenant_id)
        await transact(tenant_id, *asked)
    gate.engine.batches.transact = watch

    await gate.as_agent().create_tasks(tasks=[{"type": "slice", "payload": None}] * 250)

    assert len(calls) == 3


@pytest.mark.parametrize("keyed", [False, True])
async def test_a_slice_that_fails_is_the_answer_of_its_items_and_of_those_after_it(
        gate: harness.Gate, monkeypatch: pytest.MonkeyPatch, keyed: bool) -> None:
    monkeypatch.setattr(gate.engine.batches, "MIXED_SIZE", 2)
    await asyncio.gather(gate.create(), gate.stranger().create())
    transact, calls = gate.engine.batches.transact, 0

    async def fail_later(*asked: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise errors.DatabaseUnavailable("the database is away; try again")
        await transact(*asked)
    gate.engine.batches.transact = fail_later
    items = [{"type": "slice", "payload": None, "idempotency_key": f"k{n}" if keyed else None} for n in range(5)]

    made = (await gate.as_agent().create_tasks(tasks=items)).results

    assert [item.error and item.error.error for item in made] == [None, None] + ["database_unavailable"] * 3
    assert len((await gate.as_agent().list_tasks(type="slice")).tasks) == 2
    if keyed:
        again = (await gate.as_agent().create_tasks(tasks=items)).results
        assert [item.task_id for item in again[:2]] == [item.task_id for item in made[:2]]
        assert len((await gate.as_agent().list_tasks(type="slice")).tasks) == 5
