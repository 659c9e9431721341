"""The gate behind PgBouncer in transaction mode, where every transaction may run on another session."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import pytest

from asyncgate import Engine, Needs
from asyncgate.backends import open_backend
from asyncgate.backends.postgres.hosts import startup_error
from asyncgate.conformance.harness import Gate, under
from asyncgate.conformance.load import KEY, SERVE, Client, serving
from asyncgate.conformance.plugin import MISSING
from asyncgate.conformance.postgres_server import Bouncer, Cluster, connected, find_bouncer, find_programs
from asyncgate.conformance.proxy import Proxy
from asyncgate.conformance.verify import verify
from asyncgate.parts.model.database import LastingBackend
from asyncgate.parts.model.errors import GateError
from asyncgate.parts.model.settings import DatabaseSettings, Settings
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
POLL_SECONDS = 0.02
# What a session sees that has no tenant, and whether one was left to it.
SEEN = """
SELECT coalesce(current_setting('app.tenant_id', true), '') || (SELECT count(*) FROM asyncgate.tasks)
|| (SELECT count(*) FROM asyncgate.states) || (SELECT count(*) FROM asyncgate.receipts)"""
HOLDERS = """
SELECT client_port FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND datname = $1"""
CLIENTS = "SELECT count(*) FROM pg_stat_activity WHERE datname = $1"
ARTIFACTS = [{"uri": "file:///out"}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if find_programs() is None:
        pytest.skip(MISSING)
    with Cluster() as running:
        asyncio.run(running.migrated_database("template"))
        yield running


@pytest.fixture(scope="module")
def bouncer(cluster: Cluster) -> Iterator[Bouncer]:
    """A PgBouncer before the cluster."""
    if find_bouncer() is None:
        pytest.skip("pgbouncer is not installed")
    with Bouncer(cluster) as running:
        yield running


@pytest.fixture
async def database(cluster: Cluster) -> str:
    """The name of an empty database."""
    name = f"gate_{uuid.uuid4().hex[:8]}"
    await cluster.create_database(name, "template")
    return name


@pytest.fixture
def direct(cluster: Cluster, database: str) -> str:
    """The URL of the database, past PgBouncer."""
    return cluster.url(database)


@pytest.fixture
def url(bouncer: Bouncer, direct: str) -> str:
    """The URL of the database through PgBouncer."""
    return bouncer.url(direct)


@contextlib.asynccontextmanager
async def opened(url: str, direct: str, **more: Any) -> AsyncIterator[Gate]:
    """A gate behind PgBouncer, in this process, among others; only news can wake it."""
    settings = DatabaseSettings(url=url, pgbouncer=True, direct_url=direct, poll_seconds=600, pool_size=20, **more)
    backend = await open_backend(url, serving=True, settings=settings)
    engine = Engine(backend, Settings(database=settings))
    try:
        assert isinstance(backend, LastingBackend)
        await backend.join(engine.instance, 10.0, engine.hear_news)
        await backend.beat()        # it has begun: the next one may
        yield Gate(engine, str(uuid.uuid4()))
    finally:
        engine.drain()
        await engine.batches.wait_for_all()
        await backend.close()


@pytest.fixture
async def gate(url: str, direct: str) -> AsyncIterator[Gate]:
    async with opened(url, direct) as gate:
        yield gate


async def story(gate: Gate, name: str) -> str:
    """Let one task be done well and another one lose its worker; return the first."""
    worker = gate.as_worker(name)
    offer = await gate.leased(name, type=name, payload={"of": gate.tenant_id})
    await worker.start_task(**under(offer))
    await worker.report_progress(**under(offer), progress={"half": "done"})
    await worker.renew_lease(**under(offer), extend_by_seconds=100)
    await worker.complete(**under(offer), result={"n": 1}, artifacts=ARTIFACTS)
    await gate.leased(name, type=name, payload={"of": gate.tenant_id})
    return offer.task_id


async def one_of_all(gate: Gate, number: int) -> Any:
    """Carry out one of several operations."""
    ada = gate.as_agent()
    match number % 6:
        case 0 | 1:
            return await ada.create_task(type="bulk", payload={"of": gate.tenant_id}, idempotency_key=f"k{number}")
        case 2:
            return await gate.as_worker(f"w{number}").lease_next(max_tasks=2)
        case 3:
            return await ada.list_tasks(limit=100)
        case 4:
            return await ada.list_receipts(limit=100)
        case _:
            return await gate.owed()


async def looks(url: str, until: asyncio.Event) -> set[str]:
    """Look again and again, without a tenant, through the same sessions as the gate; return what was seen."""
    seen = set()
    db = await asyncpg.connect(url, statement_cache_size=0)
    try:
        while not until.is_set():
            seen.add(await db.fetchval(SEEN))
    finally:
        await db.close()
    return seen


async def test_a_story_of_two_tenants_runs_as_ever(gate: Gate) -> None:
    other = gate.stranger()

    done = await asyncio.gather(story(gate, "w1"), story(other, "w1"))
    for each, task_id in zip((gate, other), done, strict=True):
        page = await each.as_agent().list_tasks()
        assert (await each.task(task_id)).status == "succeeded"
        assert [task.status for task in page.tasks] == ["leased", "succeeded"]
        assert {bytes(task.payload) for task in page.tasks} == {b'{"of":"%s"}' % each.tenant_id.encode()}
        assert len(await each.owed()) == 1
        assert (await each.as_worker("w1").list_leases()).leases[0].task_id == page.tasks[0].task_id
        assert len(await each.events(task_id)) > 0
    await gate.wait(1000)

    assert [len(await each.receipts(type="lease.expired")) for each in (gate, other)] == [1, 1]
    assert (await verify(gate.backend)).problems == []


async def test_two_hundred_operations_at_once_on_three_sessions_leak_no_tenant(
        cluster: Cluster, database: str, gate: Gate, url: str) -> None:
    tenants = [gate, gate.stranger(), gate.stranger()]
    over = asyncio.Event()
    looking = [asyncio.create_task(looks(url, over)) for _ in range(4)]

    await asyncio.gather(*(one_of_all(tenants[n % 3], n // 3) for n in range(201)))
    over.set()
    seen = set().union(*await asyncio.gather(*looking))
    async with connected(cluster.admin_url()) as db:
        sessions = await db.fetchval(CLIENTS, database)

    assert seen == {"000"}
    assert sessions == Bouncer.sessions + 1     # and that of the instance
    for tenant in tenants:
        tasks = (await tenant.everything())["Task"]
        assert {task.payload for task in tasks} == {f'{{"of":"{tenant.tenant_id}"}}'}
        assert len(tasks) == len({task.idempotency_key for task in tasks}) == 23
    assert (await verify(gate.backend)).problems == []


async def test_calls_that_are_cancelled_leave_no_tenant_to_the_next_client(gate: Gate, url: str) -> None:
    draw = random.Random(6)
    for number in range(100):
        call = asyncio.create_task(one_of_all(gate, number))
        await asyncio.wait([call], timeout=draw.uniform(0, 0.006))
        call.cancel()
        await asyncio.wait([call])
    await gate.engine.batches.wait_for_all()

    once = asyncio.Event()
    looking = [asyncio.create_task(looks(url, once)) for _ in range(10)]
    await asyncio.gather(*(one_of_all(gate, number) for number in range(50)))
    once.set()

    assert set().union(*await asyncio.gather(*looking)) == {"000"}
    assert (await verify(gate.backend)).problems == []


async def test_locks_and_news_take_the_direct_way(
        cluster: Cluster, database: str, url: str, direct: str) -> None:
    async with (Proxy(cluster.port) as proxy, opened(url, proxy.url(direct)) as gate,
                opened(url, proxy.url(direct)) as other, connected(cluster.admin_url()) as db):
        holders = {row[0] for row in await db.fetch(HOLDERS, database)}
        assert len(holders) == 2
        assert holders == proxy.ports

        waiter = Gate(other.engine, gate.tenant_id)
        claim = asyncio.create_task(waiter.claim(wait_seconds=30))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                if other.engine.waiting.places.get(gate.tenant_id):
                    break
                await asyncio.sleep(POLL_SECONDS)
            task_id = await gate.create()
            offer = await claim
        assert offer is not None
        assert offer.task_id == task_id


async def test_without_the_direct_way_the_gate_goes_on_working(cluster: Cluster, url: str, direct: str) -> None:
    async with Proxy(cluster.port) as proxy, opened(url, proxy.url(direct)) as gate:
        proxy.close_door()

        assert (await gate.leased()).fence == 1


async def test_a_transaction_whose_path_died_in_silence_keeps_its_locks_no_longer_than_a_timeout(
        cluster: Cluster, direct: str, bouncer: Bouncer) -> None:
    async with Proxy(cluster.port) as proxy:
        with Bouncer(cluster, proxy.port) as behind:
            async with opened(behind.url(direct), direct, timeout_seconds=1) as gate:
                task_id = await gate.create()

                with pytest.raises(GateError):      # between what it locks and what it writes
                    await gate.backend.transact(gate.tenant_id, Needs(tasks={task_id}), lambda work: proxy.forget())

                async with asyncio.timeout(PATIENCE_SECONDS):
                    while True:
                        with contextlib.suppress(GateError):
                            await gate.cancel_task(task_id=task_id)
                            break


async def test_serving_without_a_direct_way_is_refused_in_one_line(url: str) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", SERVE, "serve", "--port", "0", "--database", url, "--set", "database.pgbouncer=true"],
        check=False, text=True, capture_output=True, timeout=PATIENCE_SECONDS,
        env={**os.environ, "ASYNCGATE_API_KEY": KEY})

    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert done.returncode > 0
    assert len(lines) == 1, done.stderr
    assert "database.direct_url" in lines[0]


async def test_a_server_behind_pgbouncer_answers_and_stops_in_order(url: str, direct: str) -> None:
    settings: dict[str, Any] = {"database.pgbouncer": "true", "database.direct_url": direct}
    async with serving(url, **settings, lease_sweep_interval_seconds=0.2) as server:
        async with contextlib.aclosing(Client(server, "ada")) as ada:
            assert (await ada.ask("create_task", type="demo", payload=None)).reply is not None
            assert (await ada.http("GET", "/v1/health", {}))[0] == 200
        assert await server.stop(signal.SIGTERM) == 0


def test_a_pgbouncer_without_its_setting_is_named() -> None:
    """It knows none of the settings that a session of ours begins with."""
    refusal = asyncpg.ProtocolViolationError("unsupported startup parameter: plan_cache_mode")

    line = str(startup_error(refusal, "postgresql://asyncgate_app:secret@db:6432/gate"))

    assert "PgBouncer answers at db:6432: set database.pgbouncer=true, and set database.direct_url" in line
    assert "secret" not in line
