"""What a batch on Postgres owes to those that run beside it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from asyncgate import Engine, Needs
from asyncgate.backends.postgres import Postgres, Queues, commit, open_backend, pipeline
from asyncgate.backends.postgres import statements as sql
from asyncgate.backends.postgres.pipeline import Connection
from asyncgate.conformance.harness import Gate, under
from asyncgate.parts.model.errors import DatabaseUnavailable
from asyncgate.parts.model.queries import LeaseCount
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.wire import LeaseNext

pytestmark = pytest.mark.anyio


@pytest.fixture
async def backend(url: str) -> AsyncIterator[Postgres]:
    opened = await open_backend(url)
    yield opened
    await opened.close()


async def test_every_value_arrives_in_the_database_as_it_was_sent(backend: Postgres) -> None:
    """Rows travel as JSON, which knows neither 64 bits nor the types of the columns."""
    texts = ["", "null", "a'b\"c\\d", "line\nline\ttab", "\x01\x1f\x7f", "Grüße 👋", '{"n": "\\u0000"}', None]
    numbers = [0, -1, 2**53 + 1, 2**63 - 1, -2**63, None]
    moments = [0.0, -0.1, 0.1 + 0.2, 1e-300, 1.7976931348623157e308, 1763946985.1234567, None]
    rows = [(text, number, moment, truth) for text in texts for number in numbers for moment in moments
            for truth in (True, False, None)]
    source = sql.unpacked("$1", {"text": "text", "number": "bigint", "moment": "float8", "truth": "bool"})

    stored_rows = await backend._ask(f"SELECT r.* FROM {source}", sql.pack(rows))

    assert stored_rows == rows


async def test_the_time_of_a_batch_is_later_than_its_last_lock_also_when_it_looks_twice(
        backend: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, read = [], sql.read_load

    def noted(rows: Any) -> Any:
        loaded = read(rows)
        clocks.append(loaded[0].clock)
        return loaded

    gate = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), str(uuid.uuid4()))
    await gate.create(delay_seconds=5)
    gate.skip(6)
    monkeypatch.setattr(sql, "read_load", noted)

    offer = await gate.claim()

    assert offer is not None
    assert len(clocks) == 2         # the delayed task was put into its queue between two looks
    [lease] = (await gate.everything())["Lease"]
    assert lease.acquired_at == clocks[1] > clocks[0]


async def test_no_long_queue_is_searched_further_down_for_a_claim_of_other_tasks(
        backend: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, read = list[int](), sql.read_load

    def noted(rows: Any) -> Any:
        looks.append(len(rows))
        return read(rows)

    gate = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), str(uuid.uuid4()))
    for _ in range(40):
        await gate.create("demo")
    await gate.create("rare")
    await gate.claim(accept_types=["rare"])
    monkeypatch.setattr(sql, "read_load", noted)

    rare, demo = await asyncio.gather(gate.claim(accept_types=["rare"]), gate.claim(accept_types=["demo"]))

    assert rare is None
    assert demo is not None
    assert looks == [1]         # both claims share one look


async def test_a_test_that_moves_the_clock_beside_a_batch_moves_it_once(
        backend: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, decide = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), str(uuid.uuid4())), backend._decide

    async def decided_later(*asked: Any) -> Any:
        gate.skip(300)      # the batch has read its time
        return await decide(*asked)

    await gate.create()
    before = gate.now()
    monkeypatch.setattr(backend, "_decide", decided_later)
    await gate.create()

    assert gate.now() - before >= 300


@pytest.mark.parametrize("ending", ["takes nothing", "loses a race"])
async def test_what_a_batch_had_locked_and_left_is_found_at_once(
        backend: Postgres, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    holding, go_on, save = asyncio.Event(), asyncio.Event(), backend._save

    async def slow(*asked: Any) -> Any:
        if not holding.is_set():
            holding.set()
            await go_on.wait()
            if ending == "loses a race":
                raise asyncpg.DeadlockDetectedError
        return await save(*asked)

    gate = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), str(uuid.uuid4()))
    first, second = await gate.create(), await gate.create()
    monkeypatch.setattr(Queues, "SLOW_SECONDS", 0.0)     # every look remembers where the queue began
    monkeypatch.setattr(backend, "_save", slow)
    looked = asyncio.create_task(backend.transact(
        gate.tenant_id, Needs(claims=[LeaseNext(worker_id="w0", max_tasks=1)]), lambda work: None))
    await holding.wait()
    other = await gate.claim("w1")
    go_on.set()
    await looked

    again = await gate.claim("w2")

    assert other is not None
    assert other.task_id == second
    assert again is not None
    assert again.task_id == first


async def test_what_a_claim_locked_and_did_not_read_is_found_at_once(
        backend: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    holding, go_on, save = asyncio.Event(), asyncio.Event(), backend._save

    async def slow(*asked: Any) -> Any:
        if not holding.is_set():
            holding.set()
            await go_on.wait()
        return await save(*asked)

    gate = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), str(uuid.uuid4()))
    tasks = [await gate.create(payload="x" * 1_000_000) for _ in range(9)]
    monkeypatch.setattr(Queues, "SLOW_SECONDS", 0.0)     # every look remembers where the queue began
    monkeypatch.setattr(backend, "_save", slow)
    claiming = asyncio.create_task(gate.as_worker("w0").lease_next(max_tasks=8))
    await holding.wait()
    other = await gate.claim("w1")
    go_on.set()
    taken = [offer.task_id for offer in (await claiming).tasks]

    again = await gate.claim("w2")

    assert (taken, other and other.task_id) == (tasks[:5], tasks[8])
    assert again is not None
    assert again.task_id == tasks[5]


async def test_a_batch_that_looks_twice_offers_all_that_it_has_locked(
        backend: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    holding, go_on, save, offer = asyncio.Event(), asyncio.Event(), backend._save, backend._offer
    read = sql.read_load
    looks: list[set[str]] = []
    gate = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), str(uuid.uuid4()))
    await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 40)
    await gate.create(type="other")     # of one type only, no second look is needed

    def claims(most: int) -> Needs:
        return Needs(claims=[LeaseNext(worker_id="w", max_tasks=most)])

    async def slow(*asked: Any) -> Any:
        if not holding.is_set():
            holding.set()
            await go_on.wait()
        return await save(*asked)

    def looked(rows: Any) -> Any:
        loaded = read(rows)
        looks.append({row[0] for row in loaded[2]})
        return loaded

    async def offered_later(*asked: Any) -> Any:
        go_on.set()     # what the other batch had locked is free again before the second look
        await other
        return await offer(*asked)

    monkeypatch.setattr(backend, "_save", slow)
    other = asyncio.create_task(backend.transact(gate.tenant_id, claims(35), lambda work: None))
    await holding.wait()
    monkeypatch.setattr(sql, "read_load", looked)
    monkeypatch.setattr(backend, "_offer", offered_later)
    offered: set[str] = set()
    await backend.transact(gate.tenant_id, claims(5), lambda work: offered.update(*work.ready.values()))

    assert len(looks) == 2
    assert looks[0] - looks[1]      # locked by the first look, and not seen by the second
    assert offered == looks[0] | looks[1]


@pytest.mark.parametrize("types", [["demo"], ["demo", "other"]])
async def test_a_claim_that_comes_late_to_the_last_task_of_its_snapshot_looks_again(
        backend: Postgres, monkeypatch: pytest.MonkeyPatch, types: list[str]) -> None:
    offer, created = backend._offer, list[str]()
    gate = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), str(uuid.uuid4()))
    for type in types:
        await gate.create(type=type)

    async def offered_later(*asked: Any) -> Any:
        monkeypatch.setattr(backend, "_offer", offer)
        created.append(await gate.create())     # committed behind the snapshot of the claim
        return await offer(*asked)

    monkeypatch.setattr(backend, "_offer", offered_later)
    async with backend._transaction(gate.tenant_id) as db:
        await db.fetch("SELECT FROM asyncgate.states WHERE tenant_id = $1 FOR UPDATE", gate.tenant_id)
        late = await gate.claim("w1")

    assert late is not None
    assert [late.task_id] == created


async def test_a_claim_that_finds_an_empty_queue_looks_once(
        backend: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), str(uuid.uuid4()))
    await gate.create()
    await gate.claim("w1")
    looks, read = list[Any](), sql.read_load

    def looked(rows: Any) -> Any:
        looks.append(rows)
        return read(rows)

    monkeypatch.setattr(sql, "read_load", looked)

    assert await gate.claim("w2") is None
    assert len(looks) == 1


# Reads.

WHERE = "SELECT pg_backend_pid(), extract(epoch FROM now()), asyncgate.tenant() = $1::uuid"     # now() is its beginning


async def test_a_read_is_one_trip_behind_the_wall_of_its_tenant(
        backend: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    trips, run = [], Connection.run

    async def counted(db: Connection) -> None:
        trips.append([text for text, *_ in db.added])
        await run(db)
    monkeypatch.setattr(Connection, "run", counted)

    [row] = await backend._read(str(uuid.uuid4()), WHERE)

    assert row[2]
    assert [trip[-1] for trip in trips] == ["COMMIT"]


async def test_a_batch_is_two_trips(backend: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), str(uuid.uuid4()))
    await gate.create()     # the first of a tenant adds a lane
    trips, run = [], Connection.run

    async def counted(db: Connection) -> None:
        trips.append(db.added[-1][0])
        await run(db)
    monkeypatch.setattr(Connection, "run", counted)

    await gate.create()
    offer = await gate.claim()
    assert offer is not None
    await gate.as_worker().complete(**under(offer), artifacts=[{"uri": "file:///out"}])
    assert await gate.claim("w2") is not None

    assert [text == "COMMIT" for text in trips] == [False, True] * 4


async def test_a_read_begins_on_a_new_connection_when_its_own_was_cut(backend: Postgres, url: str) -> None:
    tenant, outside = str(uuid.uuid4()), await asyncpg.connect(url)
    [before] = await backend._read(tenant, WHERE)
    await outside.execute("SELECT pg_terminate_backend($1)", before[0])
    await outside.close()

    [after] = await backend._read(tenant, WHERE)

    assert after[0] != before[0]
    assert after[2]


async def test_a_read_whose_connection_is_cut_says_that_the_database_is_away(backend: Postgres) -> None:
    tenant = str(uuid.uuid4())

    with pytest.raises(DatabaseUnavailable):
        await backend._read(tenant, "SELECT $1, pg_terminate_backend(pg_backend_pid())")

    assert await backend.page(tenant, LeaseCount()) == [0]


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
async def test_a_text_that_no_text_of_postgres_can_be_is_refused_and_not_cut_short(
        backend: Postgres, text: str) -> None:
    with pytest.raises(DatabaseUnavailable):
        await backend.receipt(str(uuid.uuid4()), text)


async def test_a_connection_that_has_prepared_many_statements_is_replaced(
        backend: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    async with backend.pool.acquire() as db:
        own = db.named      # what each connection asks for when it begins
    monkeypatch.setattr(pipeline, "MOST_PREPARED", own + 10)

    pids = [(await backend._ask(f"SELECT pg_backend_pid(), {n}"))[0][0] for n in range(25)]

    assert len(set(pids)) == 3


async def test_a_statement_is_prepared_once_on_each_connection(backend: Postgres) -> None:
    async with backend.pool.acquire() as db:
        before = db.named
        values = [await db.fetchval("SELECT 7 + $1::int", number) for number in range(3)]

        assert values == [7, 8, 9]
        assert db.named == before + 1
        named = await db.fetch("SELECT name FROM pg_prepared_statements WHERE statement LIKE 'SELECT 7 +%'")
        assert len(named) == 1


async def test_a_pool_that_is_being_closed_waits_for_what_runs_and_refuses_what_comes_later(backend: Postgres) -> None:
    async with backend.pool.acquire() as db:
        closing = asyncio.create_task(backend.pool.close())
        await asyncio.sleep(0)
        later = asyncio.create_task(backend.pool._take())
        await asyncio.sleep(0)
        assert await db.fetchval("SELECT 1") == 1
    await closing

    assert db.closed
    with pytest.raises(asyncpg.InterfaceError):
        await later


async def test_a_connection_keeps_no_rows_of_the_statements_that_it_has_prepared(backend: Postgres) -> None:
    async with backend.pool.acquire() as db:
        for _ in range(2):
            rows = db.add("SELECT repeat('x', 1000), $1::int FROM generate_series(1, 1000)", 7)
            await db.run()

            assert rows == [("x" * 1000, 7)] * 1000
        assert [statement.text for statement in db.statements.values()
                if statement.loader.transformer.pgresult is not None] == []


async def test_a_commit_that_the_server_made_a_rollback_is_no_commit(backend: Postgres) -> None:
    async with backend._transaction(str(uuid.uuid4())) as db:
        with pytest.raises(asyncpg.PostgresSyntaxError):
            await db.fetch("no statement")

        with pytest.raises(asyncpg.InFailedSQLTransactionError):
            await commit(db)
