"""Batches of several tenants share a transaction, and nothing else: no rows, and no other's trouble."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace

from asyncgate import Batches, Engine, Needs, Work
from asyncgate.backends.postgres import SLOTS, Postgres, open_backend
from asyncgate.backends.postgres.groups import GROUP_CALLS, GROUPS, MOST_SHARING, Flight, Groups
from asyncgate.backends.postgres.pipeline import Connection
from asyncgate.conformance.harness import Gate
from asyncgate.conformance.postgres_server import connected
from asyncgate.parts.model.errors import DatabaseUnavailable, Refused
from asyncgate.parts.model.settings import DatabaseSettings, Settings
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
TENANTS = 8
LOCK = "SELECT FROM asyncgate.states WHERE tenant_id = $1 FOR UPDATE"


@pytest.fixture
async def backend(url: str) -> AsyncIterator[Postgres]:
    opened = await open_backend(url, settings=DatabaseSettings(pool_size=TENANTS, timeout_seconds=PATIENCE_SECONDS))
    yield opened
    await opened.close()


@pytest.fixture
async def gates(backend: Postgres) -> list[Gate]:
    """One for each tenant, who have a task each."""
    engine = Engine(backend, Settings(instance_id="asyncgate-1"))
    made = [Gate(engine, str(uuid.uuid4())) for _ in range(TENANTS)]
    await asyncio.gather(*(gate.create() for gate in made))
    return made


@pytest.fixture
def groups(backend: Postgres, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The tenants of each transaction, in the order in which they begin."""
    begun, attempt = list[set[str]](), backend._attempt

    async def noted(flights: list[Flight], **more: Any) -> None:
        begun.append({flight.tenant_id for flight in flights})
        await attempt(flights, **more)
    monkeypatch.setattr(backend, "_attempt", noted)
    return begun


def hold_saves(backend: Postgres, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Semaphore, asyncio.Event]:
    """Keep batches from being saved; return what tells of each that would be, and what lets all of them go on."""
    holding, go_on, save = asyncio.Semaphore(0), asyncio.Event(), backend._save

    async def slow(*asked: Any) -> Any:
        holding.release()
        await go_on.wait()
        return await save(*asked)
    monkeypatch.setattr(backend, "_save", slow)
    return holding, go_on


@contextlib.asynccontextmanager
async def locked(url: str, gate: Gate) -> AsyncIterator[None]:
    """Let somebody else lock the rows of a tenant."""
    db = await asyncpg.connect(url)
    try:
        async with db.transaction():
            await db.execute("SELECT set_config('app.tenant_id', $1, true)", gate.tenant_id)
            await db.fetch(LOCK, gate.tenant_id)
            yield
    finally:
        await db.close()


def fail(work: Work) -> None:
    raise ZeroDivisionError


async def writes_of(gates: list[Gate], fault: Callable[[Work], None]) -> list[BaseException | None]:
    """Let the first tenant commit a fault while each of the others adds a task; return what became of each."""
    async def add(gate: Gate) -> None:
        [task] = (await gate.everything())["Task"]
        added.append(lambda work: work.add_task(replace(task, task_id=work.new_id()), frozenset()))

    added = [fault]
    for gate in gates[1:]:
        await add(gate)
    return await asyncio.gather(*(gate.backend.transact(gate.tenant_id, Needs(), decide)
                                  for gate, decide in zip(gates, added, strict=True)), return_exceptions=True)


async def count_tasks(gates: list[Gate]) -> set[int]:
    """Return how many tasks tenants have."""
    return {len((await gate.everything())["Task"]) for gate in gates}


async def test_batches_that_arrive_together_share_a_transaction(gates: list[Gate], groups: list[set[str]]) -> None:
    await asyncio.gather(*(gate.create() for gate in gates))
    offers = await asyncio.gather(*(gate.claim() for gate in gates))

    assert groups == [{gate.tenant_id for gate in gates}] * 2
    assert [offer and offer.tenant_id for offer in offers] == [gate.tenant_id for gate in gates]
    assert await count_tasks(gates) == {2}


async def test_what_arrives_while_groups_are_under_way_leaves_together(
        backend: Postgres, gates: list[Gate], groups: list[set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    holding, go_on = hold_saves(backend, monkeypatch)

    calls = []
    for number, gate in enumerate(gates):
        calls.append(asyncio.create_task(gate.create()))
        if number < GROUPS:
            await holding.acquire()
    go_on.set()
    await asyncio.gather(*calls)

    assert [len(tenants) for tenants in groups] == [1] * GROUPS + [TENANTS - GROUPS]


async def test_a_group_takes_only_so_many_calls_and_only_so_many_groups_are_under_way() -> None:
    begun, go_on, most = list[int](), asyncio.Event(), GROUP_CALLS // MOST_SHARING

    async def run(flights: list[Flight]) -> None:
        begun.append(len(flights))
        await go_on.wait()
    groups = Groups(run, GROUPS)
    flights = [Flight(str(uuid.uuid4()), Needs(calls=MOST_SHARING), lambda work: None)
               for _ in range(most * GROUPS + 1)]
    carried = [asyncio.create_task(groups.carry(flight)) for flight in flights]
    for _ in range(5):      # turns of the loop, in which another group could begin
        await asyncio.sleep(0)
    early = [*begun]
    go_on.set()
    await asyncio.gather(*carried)

    assert early == [most] * GROUPS
    assert begun == [*early, 1]


async def test_a_long_list_does_not_wait_for_others_of_its_tenant(
        backend: Postgres, groups: list[set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), str(uuid.uuid4()))
    saving, go_on = hold_saves(backend, monkeypatch)

    calls = []
    for _ in range(SLOTS):
        many = [{"type": "ocr", "payload": number} for number in range(Batches.LARGE)]
        calls.append(asyncio.create_task(gate.as_agent("ada").create_tasks(tasks=many)))
        await saving.acquire()      # while those before it are under way
    go_on.set()
    await asyncio.gather(*calls)

    assert groups == [{gate.tenant_id}] * SLOTS
    assert len((await gate.everything())["Task"]) == SLOTS * Batches.LARGE


async def test_a_bug_of_one_batch_harms_no_other(gates: list[Gate], groups: list[set[str]]) -> None:
    result, *others = await writes_of(gates, fail)

    assert isinstance(result, ZeroDivisionError)
    assert others == [None] * (TENANTS - 1)
    assert await count_tasks(gates[1:]) == {2}
    assert groups == [{gate.tenant_id for gate in gates}, {gates[0].tenant_id}]


async def test_a_batch_that_the_database_refuses_is_refused_alone(gates: list[Gate], groups: list[set[str]]) -> None:
    [task] = (await gates[0].everything())["Task"]

    result, *others = await writes_of(gates, lambda work: work.add_task(task, frozenset()))

    assert isinstance(result, Refused)
    assert others == [None] * (TENANTS - 1)
    assert await count_tasks(gates[1:]) == {2}
    assert groups[0] == {gate.tenant_id for gate in gates}
    assert {len(tenants) for tenants in groups[1:]} == {1}


async def test_who_waits_for_a_lock_holds_up_nobody_else(url: str, gates: list[Gate]) -> None:
    held, *others = gates
    [task] = (await held.everything())["Task"]
    async with locked(url, held):
        waiting = asyncio.create_task(held.as_agent().cancel_task(task_id=task.task_id))
        made = await asyncio.wait_for(asyncio.gather(*(gate.create() for gate in others)), PATIENCE_SECONDS)
        again = await asyncio.wait_for(asyncio.gather(*(gate.create() for gate in others)), PATIENCE_SECONDS)
        assert not waiting.done()

    assert (await asyncio.wait_for(waiting, PATIENCE_SECONDS)).status == "canceled"
    assert len({*made, *again}) == 2 * len(others)


async def test_a_call_that_is_given_up_leaves_the_others_of_its_group_alone(
        url: str, backend: Postgres, gates: list[Gate]) -> None:
    held, *others = gates
    [task] = (await held.everything())["Task"]
    async with locked(url, held):
        waiting = asyncio.create_task(
            backend.transact(held.tenant_id, Needs(tasks={task.task_id}), lambda work: None))
        made = [asyncio.create_task(gate.create()) for gate in others]
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait_for(asyncio.gather(*made), PATIENCE_SECONDS)

    assert waiting.cancelled()
    assert not backend.groups.under_way


async def test_a_group_whose_connection_is_cut_is_carried_out_once(
        url: str, gates: list[Gate], groups: list[set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    run, cut = Connection.run, list[int]()

    async def cutting(db: Connection) -> None:
        if not cut and len(db.added) > TENANTS and db.added[-1][0] == "COMMIT":
            cut.append(db.pg.backend_pid)
            async with connected(url) as outside:
                await outside.execute("SELECT pg_terminate_backend($1)", *cut)
        await run(db)
    monkeypatch.setattr(Connection, "run", cutting)

    assert await writes_of(gates, lambda work: None) == [None] * TENANTS
    assert await count_tasks(gates[1:]) == {2}
    assert [len(tenants) for tenants in groups] == [TENANTS] + [1] * TENANTS


async def test_a_database_that_does_not_answer_is_said_to_all(backend: Postgres, gates: list[Gate]) -> None:
    backend.pool.terminate()

    results = await asyncio.gather(*(gate.create() for gate in gates), return_exceptions=True)

    assert {type(result) for result in results} == {DatabaseUnavailable}
