"""Several processes on one database: they wake each other, and look for themselves where news may be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from asyncgate import Engine, Needs, News, Work
from asyncgate.backends import Around
from asyncgate.backends.memory import Memory
from asyncgate.backends.postgres.instances import MOST_PENDING, Membership
from asyncgate.conformance import harness
from asyncgate.conformance.harness import PATIENCE, under
from asyncgate.parts.app import Gate
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.faces.mcp.context import Feed
from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.model.settings import DatabaseSettings, Settings
from asyncgate.parts.model.stored import Task
from asyncgate.parts.model.wire import Principal

pytestmark = pytest.mark.anyio
TENANT = "t"


class Process(Around):
    """What one of several processes sees of a memory that they share."""

    instance = "asyncgate-7"

    def __init__(self, memory: Memory, others: list[Process] | None = None) -> None:
        super().__init__(memory)
        self.others = others
        self.told: list[News] = []
        self.steps: list[str] = []
        self.batches, self.alone = 0, False

    async def join(self, instance_id: str, beat_seconds: float, hear: Callable[[News], None]) -> None:
        """Listen to the others."""
        self.steps.append(f"join as {instance_id}, {beat_seconds} s")
        self.hear = hear
        if self.others is not None:
            self.others.append(self)

    async def beat(self) -> None:
        """Note it."""
        self.steps.append("beat")

    async def close(self) -> None:
        """Note it."""
        self.steps.append("close")

    def is_alone(self) -> bool:
        """Say what the test says."""
        return self.alone

    async def lead(self, job: str) -> bool:
        """Let each do everything."""
        return True

    def tell(self, news: News) -> None:
        """Tell those that have joined, as bytes."""
        self.told.append(news)
        sent = msgspec.json.encode(news)
        for other in self.others or ():
            if other is not self:
                asyncio.get_running_loop().call_soon(other.hear, msgspec.json.decode(sent, type=News))

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Count the batches."""
        self.batches += 1
        await self.backend.transact(tenant_id, needs, decide)


async def gates(*, poll_seconds: float, listening: bool, build: Any = Engine) -> list[harness.Gate]:
    """Return the gates of two processes on one memory."""
    memory, others = Memory(), list[Process]() if listening else None
    settings = Settings(database=DatabaseSettings(poll_seconds=poll_seconds))
    made = []
    for _ in range(2):
        process: Any = Process(memory, others)
        engine = build(process, settings)
        await process.join(engine.instance, 10.0, engine.hear_news)
        made.append(harness.Gate(engine, TENANT))
    return made


# Either no news arrives and everybody looks often, or news arrive and nobody looks within a test.
told_or_looking = pytest.mark.parametrize("way", [{"poll_seconds": 0.01, "listening": False},
                                                  {"poll_seconds": 60.0, "listening": True}], ids=["looking", "told"])


def start(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Let a call begin."""
    return asyncio.ensure_future(call)


async def waiting(gate: harness.Gate, claims: int) -> None:
    """Wait until so many claims wait, and have looked."""
    async with asyncio.timeout(PATIENCE):
        while gate.engine.waiting.count != claims or gate.engine.batches.flights:  # noqa: ASYNC110  # nothing tells it
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)


async def reading(gate: harness.Gate) -> None:
    """Wait until somebody waits for an outcome, and has looked."""
    async with asyncio.timeout(PATIENCE):
        while not gate.engine.readers.count:  # noqa: ASYNC110  # nothing tells it
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)


async def finish(call: asyncio.Task[Any]) -> Any:
    """Return what a call answers at last."""
    async with asyncio.timeout(PATIENCE):
        return await call


async def claimed(call: asyncio.Task[Any]) -> list[str]:
    """Return the ids of the tasks that a claim gets at last."""
    return [offer.task_id for offer in (await finish(call)).tasks]


@told_or_looking
async def test_a_waiting_claim_gets_the_task_that_another_process_creates(way: dict[str, Any]) -> None:
    here, there = await gates(**way)
    claim = start(here.as_worker().lease_next(wait_seconds=30))
    await waiting(here, 1)

    task_id = await there.create()

    assert await claimed(claim) == [task_id]


@told_or_looking
async def test_a_waiting_claim_gets_a_delayed_task_of_another_process_when_its_time_comes(way: dict[str, Any]) -> None:
    here, there = await gates(**way)
    claim = start(here.as_worker().lease_next(wait_seconds=30))
    await waiting(here, 1)

    task_id = await there.create(delay_seconds=0.05)

    assert await claimed(claim) == [task_id]


async def test_a_waiting_claim_gets_what_a_rate_keeps_that_a_claim_of_another_process_has_met() -> None:
    here, there = await gates(poll_seconds=60.0, listening=True, build=engine_over)
    await there.as_admin().set_limit(name="api", rate={"count": 1, "seconds": 0.5})
    await there.as_admin().pause_work(worker="w1")
    claim = start(here.as_worker("w1").lease_next(wait_seconds=30))
    await waiting(here, 1)

    made = [await there.create(limits={"api": "a"}) for _ in range(2)]
    met = [await there.as_worker("w2").lease_next(wait_seconds=0) for _ in range(2)]
    await there.as_admin().resume_work(worker="w1")

    assert [len(offers.tasks) for offers in met] == [1, 0]
    assert await claimed(claim) == made[1:]


@told_or_looking
async def test_a_waiting_reader_learns_the_outcome_that_another_process_stores(way: dict[str, Any]) -> None:
    here, there = await gates(**way)
    offer = await there.leased()
    read = start(here.as_agent().get_task(task_id=offer.task_id, wait_seconds=30))
    await reading(here)

    await there.as_worker().complete(**under(offer), result={"ok": True}, artifacts=[{"uri": "file:///out"}])

    assert (await finish(read)).status == "succeeded"
    assert not here.engine.readers.count


@told_or_looking
@pytest.mark.parametrize(("operation", "rows"), [("list_receipts", "receipts"),
                                                 ("list_open_obligations", "open_obligations")])
async def test_a_waiting_reader_learns_what_another_process_has_written_to_it(
        way: dict[str, Any], operation: str, rows: str) -> None:
    here, there = await gates(**way)
    read = start(getattr(here.as_agent("ada"), operation)(wait_seconds=30))
    of_all = start(here.as_admin().list_receipts(receipt_type="task.assigned", wait_seconds=30))
    await reading(here)

    task_id = await there.create(by="ada")

    assert [row.task_id for row in getattr(await finish(read), rows)] == [task_id]
    assert [row.task_id for row in (await finish(of_all)).receipts] == [task_id]
    assert not here.engine.readers.count


async def test_a_reader_does_not_look_for_what_another_process_writes_to_others() -> None:
    here, there = await gates(poll_seconds=60.0, listening=True)
    task_id = await there.create(by="ada")
    reads = [start(here.as_agent("bob").list_receipts(wait_seconds=30)),
             start(here.as_admin().list_receipts(receipt_type="task.failed", wait_seconds=30)),
             start(here.as_agent("ada").list_receipts(task_id=task_id, receipt_type="task.canceled", wait_seconds=30))]
    await reading(here)
    first, second, third = here.engine.readers.list_seats()

    await there.create(by="ada")
    await asyncio.sleep(0)
    assert not any(seat.call.done() for seat in (first, second, third))

    await there.as_agent().cancel_task(task_id=task_id)
    assert len((await finish(reads[2])).receipts) == 1
    here.engine.drain()
    await asyncio.gather(*reads)


async def test_news_of_many_receipts_say_less_about_each() -> None:
    gate, _ = await gates(poll_seconds=60.0, listening=False)

    made = await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 21)
    (created,) = await told(gate)
    await gate.as_admin().create_tasks(tasks=[{"type": "demo", "payload": None, "created_by": {"id": f"a{number}"}}
                                              for number in range(21)])
    (of_many,) = await told(gate)

    assert len(made.results) == 21
    assert created.receipts == (("ada", "task.assigned", ""),)
    assert of_many.receipts == (("", "", ""),)


async def test_tasks_of_another_process_wake_as_many_claims_as_they_fit() -> None:
    here, there = await gates(poll_seconds=60.0, listening=True)
    plain = [start(here.as_worker(f"w{n}").lease_next(wait_seconds=30)) for n in range(3)]
    await waiting(here, 3)
    gpu = start(here.as_worker("w9").lease_next(wait_seconds=30, capabilities=["gpu"], accept_types=["draw"]))
    await waiting(here, 4)
    process: Any = here.engine.backend
    before = process.batches

    needed = {"capabilities": ["gpu"]}
    drawn = await there.create(type="draw", requirements=needed)
    assert await claimed(gpu) == [drawn]
    assert process.batches == before + 1, "nobody else has looked"

    made = await there.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 3)
    assert sorted([task for claim in plain for task in await claimed(claim)]) == [task.task_id for task in made.results]


async def test_more_than_news_can_list_wake_everybody() -> None:
    here, there = await gates(poll_seconds=60.0, listening=True)
    claims = [start(here.as_worker(f"w{n}").lease_next(wait_seconds=30)) for n in range(60)]
    await waiting(here, 60)

    await there.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 60)

    assert len({task for claim in claims for task in await claimed(claim)}) == 60


async def test_news_that_list_not_every_end_wake_every_reader_of_the_tenant() -> None:
    here, there = await gates(poll_seconds=60.0, listening=True)
    await there.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 101)
    offers = [offer for _ in range(2) for offer in (await there.as_worker().lease_next(max_tasks=100)).tasks]
    reads = [start(here.as_agent().get_task(task_id=offer.task_id, wait_seconds=30)) for offer in offers]
    await reading(here)

    await there.complete_tasks(worker_id="w1", tasks=[under(offer) for offer in offers])

    assert [(await finish(read)).status for read in reads] == ["succeeded"] * 101


async def test_a_reader_that_is_woken_too_early_goes_on_waiting() -> None:
    here, there = await gates(poll_seconds=60.0, listening=True)
    offer = await there.leased()
    read = start(here.as_agent().get_task(task_id=offer.task_id, wait_seconds=30))
    await reading(here)

    here.engine.hear_news(News(TENANT, ended=(offer.task_id,)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not read.done()

    await there.as_agent().cancel_task(task_id=offer.task_id)
    assert (await finish(read)).status == "canceled"


async def test_news_of_another_tenant_wake_nobody() -> None:
    here, _ = await gates(poll_seconds=60.0, listening=True)
    task_id = await here.create(delay_seconds=3000)
    calls = [start(here.as_worker().lease_next(wait_seconds=30)),
             start(here.as_agent().get_task(task_id=task_id, wait_seconds=30))]
    await waiting(here, 1)
    await reading(here)
    process: Any = here.engine.backend
    before = process.batches

    here.engine.hear_news(News("another", queued=(("demo", ()),), ended=(task_id,), due=0.0, many=True))
    for _ in range(20):
        await asyncio.sleep(0)

    assert process.batches == before
    assert not any(call.done() for call in calls)
    here.engine.drain()
    await asyncio.gather(*calls)


@pytest.mark.parametrize("alone", [True, False])
async def test_nobody_looks_without_being_called_where_no_other_process_writes(alone: bool) -> None:
    here, _ = await gates(poll_seconds=0.01, listening=False)
    process: Any = here.engine.backend
    process.alone = alone

    assert await claimed(start(here.as_worker().lease_next(wait_seconds=0.2))) == []

    assert (process.batches == 1) is alone


# What is told.


async def told(gate: harness.Gate) -> list[News]:
    """Return what a process has told the others since the last time."""
    process: Any = gate.engine.backend
    news, process.told = process.told, []
    return list(news)


async def test_a_batch_tells_what_can_be_claimed_what_ended_and_when_more_is_due() -> None:
    gate, _ = await gates(poll_seconds=60.0, listening=False)
    needed = {"requirements": {"capabilities": ["b", "a"]}}

    await gate.as_agent().create_tasks(tasks=[
        {"type": "x", "payload": None, **needed}, {"type": "x", "payload": None, **needed},
        {"type": "y", "payload": None}, {"type": "z", "payload": None, "delay_seconds": 100},
        {"type": "z", "payload": None, "delay_seconds": 50}])
    (news,) = await told(gate)

    assert news.queued == (("x", ("a", "b")), ("x", ("a", "b")), ("y", ()))
    assert news.due == pytest.approx(gate.now() + 50, abs=5)
    assert (news.tenant_id, news.ended, news.many) == (TENANT, (), False)

    offer = await gate.claim(accept_types=["y"])
    assert offer is not None
    assert await told(gate) == [], "a lease is nothing that anybody waits for"

    await gate.as_worker().renew_lease(**under(offer))
    assert await told(gate) == []

    await gate.as_agent().cancel_task(task_id=offer.task_id)
    assert await told(gate) == [News(TENANT, ended=(offer.task_id,), receipts=(
        ("asyncgate-7", "task.canceled", offer.task_id), ("ada", "task.result_ready", offer.task_id)))]


async def test_news_stay_short_whatever_a_batch_does() -> None:
    gate, _ = await gates(poll_seconds=60.0, listening=False)

    made = await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 101)
    created = await told(gate)         # of each slice
    offers = [offer for _ in range(2) for offer in (await gate.as_worker().lease_next(max_tasks=100)).tasks]
    await gate.as_worker().complete_tasks(tasks=[under(offer) for offer in offers])
    ended = await told(gate)

    assert len(made.results) == len(offers) == 101
    assert [(len(news.queued), len(news.ended), news.many) for news in created] == [(50, 0, True), (1, 0, False)]
    assert [(len(news.queued), len(news.ended), news.many) for news in ended] == [(0, 100, False), (0, 1, False)]


async def test_a_held_task_is_no_news_to_waiting_claims() -> None:
    gate, _ = await gates(poll_seconds=60.0, listening=False)
    offer = await gate.leased(max_expiries=1)
    await told(gate)

    await gate.lose(offer)

    assert (await gate.task(offer.task_id)).held == "lease_expiries"
    (news,) = await told(gate)
    assert (news.queued, news.due) == ((), None)
    assert {to for to, _, _ in news.receipts} == {"ada"}


async def test_a_gate_that_is_alone_tells_nobody() -> None:
    gate, _ = await gates(poll_seconds=60.0, listening=False)
    process: Any = gate.engine.backend
    process.alone = True

    await gate.finished()

    assert process.told == []


async def test_a_subscriber_learns_that_a_task_ended_in_another_process() -> None:
    here, there = await gates(poll_seconds=60.0, listening=True)
    heard, task_id = list[Any](), await there.create()
    end = Feed(here.engine, TENANT, Principal("agent", "ada")).subscribe(heard.append)

    here.engine.hear_news(News("another", ended=("x",)))
    await there.as_agent().cancel_task(task_id=task_id)
    await asyncio.sleep(0)
    end()

    assert [event.uri for event in heard] == [f"asyncgate://tasks/{task_id}"]
    assert not here.engine.extensions


# Taking part.


async def test_a_gate_takes_part_before_its_upkeep_begins_and_leaves_last() -> None:
    process: Any = Process(Memory())
    gate = Gate(Settings(api_key="x", lease_sweep_interval_seconds=3600.0), process)

    async with gate.app.router.lifespan_context(gate.app):
        async with asyncio.timeout(PATIENCE):
            while process.steps.count("beat") < 2:  # noqa: ASYNC110  # nothing tells it
                await asyncio.sleep(0)
        report = gate.upkeep.report()

    assert process.steps == ["join as asyncgate-7, 3600.0 s", "beat", "beat", "close"]     # the first before upkeep
    assert (report["beat"]["runs"], report["beat"]["failures"]) == (1, 0)


async def test_a_gate_whose_name_is_taken_does_not_start() -> None:
    class Taken(Process):
        async def join(self, instance_id: str, beat_seconds: float, hear: Callable[[News], None]) -> None:
            raise StartupError(f"{instance_id} lives")
    process: Any = Taken(Memory())
    gate = Gate(Settings(api_key="x"), process)

    with pytest.raises(StartupError, match="asyncgate-7 lives"):
        async with gate.app.router.lifespan_context(gate.app):
            raise AssertionError("it started")

    assert process.steps == ["close"], "no upkeep, and nothing is left open"


async def test_a_given_name_counts_more_than_the_backends() -> None:
    process: Any = Process(Memory())

    assert Engine(process, Settings(instance_id="mine")).instance == "mine"
    assert Engine(process).instance == "asyncgate-7"
    assert Engine(Memory()).instance != Engine(Memory()).instance


async def test_tasks_carry_the_name_of_the_instance_that_made_them() -> None:
    gate, _ = await gates(poll_seconds=60.0, listening=False)
    await gate.create()

    tasks: list[Task] = (await gate.everything())["Task"]
    assert [task.asyncgate_instance for task in tasks] == ["asyncgate-7"]


async def test_news_that_cannot_be_sent_do_not_pile_up() -> None:
    """The pool may work while the connection for news is away, for a day."""
    away = Membership("postgresql://127.0.0.1:1/away", DatabaseSettings(), "gate-1", 10.0, lambda _: None)

    for number in range(3 * MOST_PENDING):
        away.tell(News(TENANT, ended=(str(number),)))

    assert MOST_PENDING // 2 <= len(away.pending) <= MOST_PENDING
    assert away.pending[-1].ended == (str(3 * MOST_PENDING - 1),)
