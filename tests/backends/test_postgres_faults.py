"""What can go wrong with Postgres is a 503, nothing acknowledged is lost, nothing is done twice, and it heals."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import asyncpg
import pytest

from asyncgate import Engine, Needs, News
from asyncgate.backends import open_backend
from asyncgate.backends.postgres import hosts
from asyncgate.backends.postgres import statements as sql
from asyncgate.backends.postgres.groups import Flight
from asyncgate.backends.postgres.instances import Membership
from asyncgate.conformance.harness import Gate, under
from asyncgate.conformance.history import Call
from asyncgate.conformance.load import KEY, SERVE, TENANT, Client, GateServer, Load, serving
from asyncgate.conformance.plugin import MISSING
from asyncgate.conformance.postgres_server import BIN_GIVEN, Cluster, connected, find_programs
from asyncgate.conformance.proxy import Proxy
from asyncgate.conformance.torture import wrong_with
from asyncgate.conformance.verify import verify
from asyncgate.extras.ledger.calls import Calls
from asyncgate.parts.model.database import LastingBackend
from asyncgate.parts.model.errors import DatabaseUnavailable, Refused
from asyncgate.parts.model.settings import DatabaseSettings, Settings
from asyncgate.parts.process.outgoing import make_client
from asyncgate.parts.upkeep import Upkeep
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
POLL_SECONDS = 0.02
ARTIFACTS = [{"uri": "file:///out"}]
HASTY: dict[str, Any] = {"lease_sweep_interval_seconds": 0.2, "expiry_jitter_seconds": 0.1}
QUICK: dict[str, Any] = {"database.timeout_seconds": 1}
FEW: dict[str, Any] = {"database.pool_size": 3}
SOON = 3.0      # seconds: a busy machine opens its connections in less, and a test has to wait them out
OURS = "datname = $1 AND application_name = 'asyncgate'"
OPEN = f"SELECT count(*) FROM pg_stat_activity WHERE {OURS} AND (state LIKE 'idle in%' OR backend_xid IS NOT NULL)"
BLOCKED = f"SELECT count(*) FROM pg_stat_activity WHERE {OURS} AND wait_event_type = 'Lock'"
TERMINATE = f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE {OURS}"
# Who holds the lock of an instance: batches take theirs for a moment only.
HOLDERS = """
SELECT array_agg(DISTINCT pid) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted
AND database = (SELECT oid FROM pg_database WHERE datname = $1)"""

END = "SELECT count(pg_terminate_backend(pid)) FROM unnest($1::int[]) AS h (pid)"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A server that may be stopped: no other test uses it."""
    if find_programs() is None:
        pytest.skip(MISSING)
    with Cluster() as running:
        asyncio.run(running.migrated_database("template"))
        yield running


@pytest.fixture
async def database(cluster: Cluster) -> str:
    """The name of an empty database."""
    name = f"gate_{uuid.uuid4().hex[:8]}"
    await cluster.create_database(name, "template")
    return name


@pytest.fixture
async def proxy(cluster: Cluster) -> AsyncIterator[Proxy]:
    async with Proxy(cluster.port) as running:
        yield running


@pytest.fixture
def direct(cluster: Cluster, database: str) -> str:
    """The URL of the database, past the proxy."""
    return cluster.url(database)


@pytest.fixture
def url(proxy: Proxy, direct: str) -> str:
    return proxy.url(direct)


@contextlib.asynccontextmanager
async def opened(url: str, **database: Any) -> AsyncIterator[Gate]:
    """A gate over a database, in this process."""
    settings = DatabaseSettings(**database)
    backend = await open_backend(url, settings=settings)
    engine = Engine(backend, Settings(database=settings))
    try:
        yield Gate(engine, TENANT)
    finally:
        engine.drain()
        await engine.batches.wait_for_all()
        await backend.close()


@pytest.fixture
async def gate(url: str) -> AsyncIterator[Gate]:
    async with opened(url) as gate:
        yield gate


@contextlib.asynccontextmanager
async def client_of(server: GateServer, by: str = "ada") -> AsyncIterator[Client]:
    async with aclosing(Client(server, by)) as client:
        yield client


class Outside:
    """What a superuser sees of a database and does to it."""

    def __init__(self, cluster: Cluster, database: str) -> None:
        self.cluster, self.database = cluster, database

    async def value(self, question: str, *given: Any) -> Any:
        """Ask one question of the database."""
        async with connected(self.cluster.admin_url(self.database)) as db:
            return await db.fetchval(question, *given)

    async def make(self, setting: str) -> None:
        """Change what new sessions begin with."""
        async with connected(self.cluster.admin_url()) as db:
            await db.execute(f"ALTER DATABASE {self.database} {setting}")

    async def end_sessions(self) -> None:
        """End all that the gate has."""
        await self.value(TERMINATE, self.database)

    async def is_at_rest(self) -> bool:
        """Whether no session of the gate is in a transaction."""
        return not await self.value(OPEN, self.database)

    async def is_blocked(self) -> bool:
        """Whether a session of the gate waits for a lock."""
        return bool(await self.value(BLOCKED, self.database))


@pytest.fixture
def outside(cluster: Cluster, database: str) -> Outside:
    return Outside(cluster, database)


async def until(holds: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if await holds():
                return
            await asyncio.sleep(POLL_SECONDS)


async def acknowledged(client: Client, operation: str = "create_task", **ask: Any) -> dict[str, Any]:
    """Ask until there is a good answer; until then there are only 503s that say when to come again."""
    ask = ask or {"type": "demo", "payload": None}
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (call := await client.ask(operation, **ask)).reply is None:
            assert call.error == "database_unavailable"
            assert "retry-after:" in client.head
            await asyncio.sleep(POLL_SECONDS)
    return call.reply


async def stored_tasks(url: str) -> set[str]:
    """The ids of all stored tasks; the database must verify."""
    async with opened(url) as gate:
        assert (await verify(gate.backend)).problems == []
        return {task.task_id for task in (await gate.everything())["Task"]}


def codes(calls: list[Call]) -> set[str | None]:
    """The errors of the calls of which nobody knows what became."""
    return {call.error for call in calls if call.unknown}


def refused_start(url: str, **settings: Any) -> str:
    """Try to serve; return the one line that says why not."""
    flags = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    done = subprocess.run([sys.executable, "-c", SERVE, "serve", "--port", "0", "--database", url, *flags], text=True,
                          check=False, capture_output=True, timeout=PATIENCE_SECONDS,
                          env={**os.environ, "ASYNCGATE_API_KEY": KEY})
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert done.returncode > 0
    assert len(lines) == 1, done.stderr
    return lines[0]


async def test_a_batch_that_the_database_refuses_leaves_no_payload_in_the_log_of_the_server(
        cluster: Cluster, gate: Gate) -> None:
    """The server logs the text of each query that fails, so no row may be in it."""
    await gate.create(payload="a-payload-that-is-private")
    [task] = (await gate.everything())["Task"]

    with pytest.raises(Refused, match="UniqueViolationError"):
        await gate.backend.transact(TENANT, Needs(), lambda work: work.add_task(task, frozenset()))

    log = cluster.log.read_text(errors="replace")
    assert "duplicate key value violates unique constraint" in log
    assert "STATEMENT:" in log
    assert "a-payload-that-is-private" not in log


# Nobody knows whether the COMMIT went through.


@pytest.fixture(params=["lose_reply", "cut_before"])
def trap(request: pytest.FixtureRequest, proxy: Proxy) -> Callable[..., Any]:
    """Return what makes one of the next COMMITs go wrong: after it was carried out, or before."""
    return {"lose_reply": proxy.lose_reply, "cut_before": proxy.cut_before}[request.param]


@pytest.mark.parametrize("key", [None, "k"])
async def test_a_create_whose_commit_is_lost_is_answered_and_makes_one_task(
        gate: Gate, trap: Callable[..., Any], key: str | None) -> None:
    first = await gate.create()

    sprung = trap()
    made = await gate.create(idempotency_key=key)

    assert sprung.caught == 1
    assert {task.task_id for task in (await gate.everything())["Task"]} == {first, made}
    assert len(await gate.receipts()) == 2
    assert (await verify(gate.backend)).problems == []


async def test_twenty_creates_whose_commit_is_lost_are_twenty_tasks(gate: Gate, trap: Callable[..., Any]) -> None:
    sprung = trap()
    made = await asyncio.gather(*(gate.create(idempotency_key=f"k{n}" if n % 2 else None) for n in range(20)))

    assert sprung.caught == 1
    assert {task.task_id for task in (await gate.everything())["Task"]} == set(made)
    assert len(set(made)) == len(await gate.receipts()) == 20


async def test_creates_of_several_tenants_whose_common_commit_is_lost_are_one_task_each(
        gate: Gate, trap: Callable[..., Any]) -> None:
    gates = [Gate(gate.engine, str(uuid.uuid4())) for _ in range(8)]
    await asyncio.gather(*(each.create() for each in gates))

    sprung = trap()
    made = await asyncio.gather(*(each.create() for each in gates))

    assert sprung.caught == 1
    for each, task_id in zip(gates, made, strict=True):
        assert len((await each.everything())["Task"]) == len(await each.receipts()) == 2
        assert (await each.task(task_id)).status == "queued"
    assert (await verify(gate.backend)).problems == []


async def test_a_claim_whose_commit_is_lost_is_one_lease(gate: Gate, trap: Callable[..., Any]) -> None:
    task_id = await gate.create()

    sprung = trap()
    offer = await gate.claim()

    assert sprung.caught == 1
    assert offer is not None
    assert (offer.task_id, offer.fence) == (task_id, 1)
    assert len(await gate.receipts(task_id, "task.accepted")) == 1


async def test_a_completion_whose_commit_is_lost_is_one_completion(gate: Gate, trap: Callable[..., Any]) -> None:
    offer = await gate.leased()

    sprung = trap()
    await gate.as_worker().complete(**under(offer), result={"n": 1}, artifacts=ARTIFACTS)

    assert sprung.caught == 1
    assert (await gate.task(offer.task_id)).status == "succeeded"
    assert len(await gate.receipts(offer.task_id, "task.completed")) == 1
    assert await gate.owed() == []


async def test_a_renewal_whose_commit_is_lost_is_one_renewal(gate: Gate, trap: Callable[..., Any]) -> None:
    """It changes a row that others may change too, and writes none of its own."""
    offer = await gate.leased()

    sprung = trap()
    kept = await gate.as_worker().renew_lease(task_id=offer.task_id, lease_id=offer.lease_id, extend_by_seconds=900)

    assert sprung.caught == 1
    assert kept.expires_at > offer.expires_at
    assert [lease.renewals for lease in (await gate.everything())["Lease"]] == [1]


async def test_every_proof_of_a_commit_can_be_looked_for(gate: Gate) -> None:
    backend: Any = gate.backend
    for table in sql.PROOFS:
        nothing = sql.pack([(None,) * len(sql.SAVES[table][0])])

        rows = await backend._read(TENANT, sql.proof_statement(table), nothing)

        assert [tuple(row) for row in rows] == [(False,)], table


@pytest.mark.parametrize(("table", "sure"), [
    ("contracts", True), ("events", True), ("audit", True), ("moved", False), ("progress", False), ("receipts", False)])
def test_only_a_row_that_nobody_may_have_changed_since_proves_by_its_absence_that_nothing_was_committed(
        table: str, sure: bool) -> None:
    proof = sql.find_proof({table: [("a row",)], "lanes": [("no proof",)]})

    assert proof is not None
    assert (proof.statement, proof.sure) == (sql.proof_statement(table), sure)


async def test_a_read_whose_commit_is_lost_is_answered(gate: Gate, trap: Callable[..., Any]) -> None:
    task_id = await gate.create()

    sprung = trap()
    page = await gate.as_agent().list_tasks()

    assert sprung.caught == 1
    assert [task.task_id for task in page.tasks] == [task_id]


async def test_a_create_of_which_nobody_knows_is_a_503_and_its_key_makes_no_second_task(
        url: str, direct: str, proxy: Proxy) -> None:
    async with serving(url) as server, client_of(server) as ada:
        first = await acknowledged(ada)

        sprung = proxy.lose_reply(gone=True, of=b"task.assigned")
        refused = await ada.ask("create_task", type="demo", payload=None, idempotency_key="k")
        head, body = ada.head, ada.answer
        kept = await stored_tasks(direct)
        await proxy.restore()
        again = await acknowledged(ada, type="demo", payload=None, idempotency_key="k")

    assert sprung.caught == 1
    assert refused.error == "database_unavailable"
    assert (body["outcome"], "idempotency_key" in body["message"]) == ("unknown", True)
    assert "retry-after: 1" in head
    assert kept == await stored_tasks(direct) == {first["task_id"], again["task_id"]}


async def test_a_completion_of_which_nobody_knows_is_a_503_and_can_be_repeated(
        url: str, direct: str, proxy: Proxy) -> None:
    async with serving(url) as server, client_of(server) as ada, client_of(server, "w1") as worker:
        await acknowledged(ada)
        offer = (await acknowledged(worker, "lease_next", max_tasks=1))["tasks"][0]
        asks = {"task_id": offer["task_id"], "lease_id": offer["lease_id"], "result": {"n": 1}, "artifacts": ARTIFACTS}

        sprung = proxy.lose_reply(gone=True, of=b"task.completed")
        refused = await worker.ask("complete", **asks)
        await proxy.restore()
        await acknowledged(worker, "complete", **asks)

    async with opened(direct) as gate:
        types = [receipt.receipt_type for receipt in await gate.receipts(offer["task_id"])]
    assert sprung.caught == 1
    assert refused.error == "database_unavailable"
    assert types == ["task.assigned", "task.accepted", "task.completed", "task.result_ready"]


async def test_under_load_no_lost_commit_loses_or_repeats_anything(
        url: str, direct: str, proxy: Proxy, trap: Callable[..., Any], rounds: int, record_property: Any) -> None:
    """`--rounds 100` is at least 1,000 lost commits."""
    seed = random.randrange(2**32)
    async with serving(url, **HASTY) as server, aclosing(Load(server, seed)) as load:
        sprung = trap(9, again=True)
        async with load.running():
            while sprung.caught < 10 * rounds:
                await load.grown(200)
        await proxy.restore()
        status = await server.stop(signal.SIGTERM)

    numbers = f"{sprung.caught} commits went wrong, {len(load.calls)} operations, {len(load.made)} tasks"
    record_property("lost commits", numbers)
    print(numbers)
    assert await wrong_with(direct, load) == [], f"seed {seed}"
    assert codes(load.calls) <= {"database_unavailable"}
    assert sprung.caught > 0
    assert status == 0


# Postgres comes to its end, and comes back.


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_a_restart_of_postgres_under_load_is_a_few_503s_and_loses_nothing(
        cluster: Cluster, direct: str, mode: Literal["fast", "immediate"], rounds: int, record_property: Any) -> None:
    seed, took = random.randrange(2**32), list[float]()
    async with serving(direct, **HASTY) as server, aclosing(Load(server, seed)) as load:
        async with load.running():
            for _ in range(rounds):
                await load.grown(200)
                await asyncio.to_thread(cluster.restart, mode)
                back = time.time()
                took.append(await first_success(load, back) - back)
            await load.grown(200)
        assert server.process.poll() is None
        status = await server.stop(signal.SIGTERM)

    numbers = f"{mode}: first success {max(took):.3f} s after Postgres was back, {len(load.made)} tasks"
    record_property("recovery", numbers)
    print(numbers)
    assert await wrong_with(direct, load) == [], f"seed {seed}"
    assert codes(load.calls) == {"database_unavailable"}
    assert status == 0
    assert max(took) < 40


async def first_success(load: Load, since: float) -> float:
    """Wait for the first write that is acknowledged after a moment; return when that was."""
    while True:
        for call in load.calls:
            if call.ended >= since and call.reply is not None and call.operation == "create_task":
                return call.ended
        await load.grown(10)


async def test_after_a_crash_of_postgres_the_gate_has_its_lock_and_its_heartbeat_again(
        cluster: Cluster, database: str, direct: str, outside: Outside) -> None:
    async with serving(direct, **HASTY) as server:
        await asyncio.to_thread(cluster.restart, "immediate")
        back = await outside.value("SELECT now()")

        await until(lambda: outside.value(HOLDERS, database))
        await until(lambda: outside.value("SELECT count(*) FROM asyncgate.instances WHERE beat_at > $1", back))
        assert server.process.poll() is None


async def test_gates_hear_each_other_again_after_the_queue_of_notifications_was_full() -> None:
    programs = find_programs()
    if programs is None:
        pytest.skip(MISSING)
    if int(programs.version().partition(".")[0]) < 17:
        pytest.skip("before Postgres 17 that queue has 8 GB")
    with Cluster() as own:
        url = await own.migrated_database("full")
        async with connected(own.admin_url()) as db:
            await db.execute("ALTER SYSTEM SET max_notify_queue_pages = 64")
        await asyncio.to_thread(own.restart)
        heard, settings = list[News](), DatabaseSettings()
        members = [Membership(url, settings, name, 10.0, heard.append) for name in ("a", "b")]
        for member in members:
            await member.join()
            await member.beat()
        async with connected(own.admin_url("full")) as reader, connected(own.admin_url("full")) as db:
            await reader.execute("LISTEN flood")
            async with reader.transaction():        # what came before its end is kept for it
                await reader.execute("SELECT 1")
                with contextlib.suppress(asyncpg.ProgramLimitExceededError):
                    while True:
                        await db.execute("SELECT pg_notify('flood', repeat('x', 7000))")
        heard.clear()

        async def hears() -> bool:
            members[0].tell(News(TENANT))
            return TENANT in [news.tenant_id for news in heard]
        await until(hears)

        for member in members:
            await member.leave()


# The database cannot be reached, or hardly.


async def test_a_database_that_refuses_connections_at_the_start_is_one_line(url: str, proxy: Proxy) -> None:
    proxy.close_door()

    line = await asyncio.to_thread(refused_start, url)

    assert f"cannot reach the database: 127.0.0.1:{proxy.port}: Connection refused" in line


async def test_a_host_that_nobody_knows_is_one_line_in_words() -> None:
    line = await asyncio.to_thread(refused_start, "postgresql://asyncgate_app@nowhere.invalid/gate")

    assert "cannot reach the database: nowhere.invalid:5432: no such host (" in line
    assert "Unknown error" not in line


async def test_a_database_that_says_nothing_at_the_start_is_one_line(url: str, proxy: Proxy) -> None:
    proxy.swallow()

    line = await asyncio.to_thread(refused_start, url, **QUICK)

    assert f"cannot reach the database: 127.0.0.1:{proxy.port}: no answer in time" in line


async def test_a_database_that_is_not_there_is_one_line_with_the_command_that_makes_it(cluster: Cluster) -> None:
    line = await asyncio.to_thread(refused_start, cluster.url("nowhere"))
    told = await asyncio.to_thread(refused_start, cluster.url("nowhere", "postgres"))

    command = f"createdb -h 127.0.0.1 -p {cluster.port}"
    assert f"no database 'nowhere' at 127.0.0.1:{cluster.port}: create it with `{command} nowhere`" in line
    assert f"create it with `{command} -U postgres nowhere`" in told


async def test_a_role_that_is_not_there_is_one_line(cluster: Cluster, direct: str) -> None:
    line = await asyncio.to_thread(refused_start, direct.replace("asyncgate_app", "nobody_here"))

    assert f"Postgres at 127.0.0.1:{cluster.port} refuses the user nobody_here" in line


@pytest.mark.parametrize("how", ["close_door", "swallow", "cut"])
async def test_while_the_database_is_away_everything_is_a_503_and_afterwards_all_works_without_a_restart(
        url: str, direct: str, proxy: Proxy, how: str) -> None:
    async with serving(url, **QUICK, **HASTY) as server:
        async with contextlib.AsyncExitStack() as stack:
            ada, bob, doctor = [await stack.enter_async_context(client_of(server)) for _ in range(3)]
            before = await acknowledged(ada)
            getattr(proxy, how)()
            if how != "cut":
                await everything_is_unavailable(ada, bob, doctor, before["task_id"])
            await proxy.restore()
            after = await acknowledged(ada)
            await until(lambda: is_well(doctor))
            assert (await bob.ask("get_task", task_id=before["task_id"])).reply is not None
            assert {before["task_id"], after["task_id"]} <= await stored_tasks(direct)
        assert await server.stop(signal.SIGTERM) == 0


@pytest.mark.parametrize("how", ["close_door", "swallow"])
async def test_an_outage_of_the_database_that_is_longer_than_a_lease_costs_no_lease(
        url: str, proxy: Proxy, how: str) -> None:
    async with (serving(url, **QUICK, **HASTY, restart_grace_seconds=60) as server, client_of(server) as ada,
                client_of(server, "w1") as worker):
        await acknowledged(ada)
        offer = (await acknowledged(worker, "lease_next", lease_ttl_seconds=3))["tasks"][0]
        named = {name: offer[name] for name in ("task_id", "lease_id")}
        getattr(proxy, how)()
        while time.time() < datetime.fromisoformat(offer["expires_at"]).timestamp() + 1:
            assert (await worker.ask("renew_lease", **named)).error == "database_unavailable"
        await proxy.restore()

        await acknowledged(worker, "complete", **named, artifacts=ARTIFACTS)


async def test_an_outage_is_a_few_lines_in_the_log_and_no_traceback(url: str, proxy: Proxy) -> None:
    """A gate that many ask would fill its disk with what is known after the first line."""
    async with serving(url, **QUICK, **HASTY) as server, client_of(server) as ada:
        await acknowledged(ada)
        before = len(server.lines)
        proxy.close_door()
        for _ in range(100):
            write = await ada.ask("create_task", type="demo", payload=None)
            assert (write.error, "outcome" in ada.answer) == ("database_unavailable", False)
            await ada.ask("get_task", task_id="t")
            await ada.http("GET", "/v1/health", {})
        await server.stop(signal.SIGKILL)

    lines = server.lines[before:]
    assert any("the database does not answer" in line for line in lines)
    assert [line for line in lines if "Traceback" in line or line.startswith(" ")] == [], "\n".join(lines)
    assert len(lines) < 60


async def everything_is_unavailable(ada: Client, bob: Client, doctor: Client, task_id: str) -> None:
    """See that writes, reads and the health say so, and when to come again, in a few seconds."""
    async with asyncio.timeout(15):
        write, read, health = await asyncio.gather(
            ada.ask("create_task", type="demo", payload=None), bob.ask("get_task", task_id=task_id),
            doctor.http("GET", "/v1/health", {}))
    assert write.error == read.error == "database_unavailable"
    assert (health[0], health[1]["status"], health[1]["database"]) == (503, "unhealthy", "unavailable")
    assert all("retry-after: 1" in client.head for client in (ada, bob, doctor))


async def is_well(client: Client) -> bool:
    return (await client.http("GET", "/v1/health", {}))[0] == 200


async def test_a_slow_database_changes_no_answer(gate: Gate, proxy: Proxy) -> None:
    proxy.delay_seconds = 0.1
    made = await asyncio.gather(*(gate.create(idempotency_key=f"k{n % 5}") for n in range(10)))
    claims = await asyncio.gather(*(gate.claim(f"w{n}") for n in range(5)))
    assert claims[0] is not None
    await gate.as_worker("w0").complete(**under(claims[0]), result={"n": 1}, artifacts=ARTIFACTS)
    await proxy.restore()

    assert len(set(made)) == 5
    assert {offer.task_id for offer in claims if offer} == set(made)
    assert (await gate.task(claims[0].task_id)).status == "succeeded"
    assert (await verify(gate.backend)).problems == []


async def test_a_database_slower_than_the_timeout_is_a_503_and_leaves_no_transaction_open(
        url: str, proxy: Proxy, outside: Outside) -> None:
    async with opened(url, timeout_seconds=SOON) as gate:
        task_id = await gate.create()
        proxy.delay_seconds = 0.6 * SOON
        answers = await asyncio.gather(gate.create(), gate.as_agent().list_tasks(), gate.as_agent().get_task(
            task_id=task_id), gate.owed(), return_exceptions=True)
        await proxy.restore()

        assert {type(answer) for answer in answers} == {DatabaseUnavailable}
        await until(outside.is_at_rest)
        assert await gate.create() != task_id
        assert (await verify(gate.backend)).problems == []


# A path that dies in silence, in the middle of transactions: the server still holds their locks.


async def test_a_gate_is_back_soon_after_its_path_to_the_database_has_died_in_mid_transaction(
        cluster: Cluster, database: str, rounds: int, record_property: Any) -> None:
    """At once after the timeout; `--rounds 50` is as many black holes."""
    seed, took, seconds = random.randrange(2**32), list[float](), 2.0
    draw = random.Random(seed)
    async with Proxy(cluster.port) as proxy:
        url, settings = proxy.url(cluster.url(database)), {**HASTY, "database.timeout_seconds": seconds}
        async with serving(url, **settings) as server, contextlib.AsyncExitStack() as stack:
            ada, *workers = [await stack.enter_async_context(client_of(server, name)) for name in ("ada", "w1", "w1")]
            await acknowledged(ada)
            offer = (await acknowledged(workers[0], "lease_next", lease_ttl_seconds=900))["tasks"][0]
            under = {name: offer[name] for name in ("task_id", "lease_id")}
            for _ in range(rounds):
                busy = [asyncio.create_task(worker.ask("report_progress", **under, progress={"n": 1}))
                        for worker in workers]
                await asyncio.sleep(draw.uniform(0, 0.02))      # somewhere in a transaction
                proxy.forget()
                since = time.monotonic()
                await asyncio.gather(*busy)
                await acknowledged(workers[0], "report_progress", **under, progress={"n": 2})
                took.append(time.monotonic() - since)
            await acknowledged(workers[0], "complete", **under, artifacts=ARTIFACTS)

    numbers = f"{rounds} black holes: back after {max(took):.2f} s at most, with a timeout of {seconds:.0f} s"
    record_property("black holes", numbers)
    print(numbers)
    async with opened(cluster.url(database)) as gate:
        assert (await verify(gate.backend)).problems == []
    assert max(took) < 40, f"seed {seed}"       # on a busy machine, too; without an end of lost sessions it is 60


# Clients that leave.


async def test_a_cancelled_call_leaves_no_tenant_and_no_transaction_on_its_connection(
        direct: str, outside: Outside) -> None:
    draw = random.Random(4)
    # Without a look whether the server offers TLS: asyncpg says so in the log when it is cancelled at that.
    async with opened(f"{direct}?sslmode=disable", pool_size=5) as gate:
        task_id = await gate.create()
        for _ in range(150):
            await abandoned(asyncio.create_task(some_call(gate, draw, task_id)), draw)
        await gate.engine.batches.wait_for_all()

        await until(outside.is_at_rest)
        assert await settings_of(gate.backend, 5) == [("", None)] * 5
        assert (await verify(gate.backend)).problems == []


async def some_call(gate: Gate, draw: random.Random, task_id: str) -> Any:
    """Read or write something, straight at the backend or not."""
    ada = gate.as_agent()
    calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
        gate.create, gate.claim, gate.owed, ada.list_tasks, ada.list_receipts, partial(ada.get_task, task_id=task_id),
        partial(ada.get_task_history, task_id=task_id)]
    return await draw.choice(calls)()


async def abandoned(call: asyncio.Task[Any], draw: random.Random) -> None:
    """Wait a moment for a call, and no longer."""
    await asyncio.wait([call], timeout=draw.uniform(0, 0.006))
    call.cancel()
    await asyncio.wait([call])
    if not call.cancelled():
        call.result()


async def settings_of(backend: Any, size: int) -> list[tuple[str, str | None]]:
    """Take all connections of a backend at once; return the tenant and the transaction of each."""
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(PATIENCE_SECONDS):
        taken = [await stack.enter_async_context(backend.pool.acquire()) for _ in range(size)]
        rows = [(await db.fetch("SELECT coalesce(current_setting('app.tenant_id', true), ''), "
                                "pg_current_xact_id_if_assigned()::text"))[0] for db in taken]
    return rows


async def test_clients_that_hang_up_in_mid_call_take_no_connection_with_them(
        direct: str, outside: Outside) -> None:
    draw = random.Random(5)
    async with serving(direct, **FEW) as server:
        for _ in range(60):
            async with client_of(server) as rude:
                call = asyncio.create_task(rude.ask(draw.choice(["create_task", "list_receipts"]), type="demo"))
                await asyncio.wait([call], timeout=draw.uniform(0, 0.01))
                call.cancel()
                await asyncio.wait([call])
        async with contextlib.AsyncExitStack() as stack:
            polite = [await stack.enter_async_context(client_of(server, f"a{n}")) for n in range(20)]
            calls = await asyncio.gather(*(client.ask("create_task", type="demo", payload=None) for client in polite))

        assert [call.error for call in calls if call.reply is None] == []
        await until(outside.is_at_rest)
    assert len(await stored_tasks(direct)) >= 20


# Losing a race.


async def test_a_deadlock_with_somebody_else_is_never_heard_of(
        cluster: Cluster, database: str, gate: Gate, outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flight, "may_share", lambda self: False)     # in a group, a wait ends before it is a deadlock
    low, high = sorted([await gate.create(), await gate.create()])
    lock = "SELECT FROM asyncgate.states WHERE task_id = $1 FOR UPDATE"
    async with connected(cluster.admin_url(database)) as other:
        await other.execute("SET deadlock_timeout = '60s'; SET lock_timeout = '60s'")     # the gate is to give way
        async with other.transaction():
            await other.fetch(lock, high)
            calls = asyncio.gather(*(gate.as_agent().cancel_task(task_id=id) for id in (low, high)))
            await until(outside.is_blocked)
            await other.fetch(lock, low)        # now each has what the other wants
        answers = await asyncio.wait_for(calls, PATIENCE_SECONDS)

    assert [answer.status for answer in answers] == ["canceled"] * 2
    assert "deadlock detected" in cluster.log.read_text()
    assert (await verify(gate.backend)).problems == []


@pytest.mark.parametrize("default", [
    "default_transaction_isolation = 'serializable'", "default_transaction_isolation = 'repeatable read'",
    "default_transaction_read_only = on", "default_transaction_deferrable = on", "statement_timeout = '1ms'",
    "lock_timeout = '1ms'", "transaction_timeout = '1ms'",
    "idle_in_transaction_session_timeout = '1ms'", "idle_session_timeout = '1ms'",
    "search_path = 'nowhere'", "TimeZone = 'Pacific/Kiritimati'", "row_security = off", "client_min_messages = error",
    "standard_conforming_strings = off", "DateStyle = 'SQL, DMY'", "extra_float_digits = -10"])
async def test_no_default_of_a_database_changes_what_a_session_of_the_gate_does(
        cluster: Cluster, database: str, direct: str, outside: Outside, default: str) -> None:
    async with connected(cluster.admin_url()) as admin:     # for the gate's role, so that this test's are not affected
        known = "SELECT count(*) FROM pg_settings WHERE lower(name) = lower($1)"
        if not await admin.fetchval(known, default.split()[0]):
            pytest.skip("this server does not know the setting")
        await admin.execute(f"ALTER ROLE asyncgate_app IN DATABASE {database} SET {default}")
    async with joined(direct, "gate-1") as gate:
        task_id = await gate.create()
        async with connected(cluster.admin_url(database)) as other, other.transaction():
            await other.execute("UPDATE asyncgate.states SET updated_at = updated_at WHERE task_id = $1", task_id)
            call = asyncio.create_task(gate.as_agent().cancel_task(task_id=task_id))
            await until(outside.is_blocked)
        assert (await asyncio.wait_for(call, PATIENCE_SECONDS)).status == "canceled"
        offer = await gate.leased()
        assert abs(offer.expires_at.timestamp() - gate.backend.now() - 300) < PATIENCE_SECONDS
        await gate.as_worker().complete(**under(offer), artifacts=ARTIFACTS)
        assert {task.task_id for task in (await gate.as_agent().list_tasks()).tasks} == {task_id, offer.task_id}
        assert "could not serialize" not in cluster.log.read_text()
        assert (await verify(gate.backend)).problems == []


async def test_a_session_is_begun_with_all_settings_of_the_gate(direct: str) -> None:
    told = "SELECT name FROM pg_settings WHERE source = 'client'"
    own = hosts.Hosts(direct, 10.0)
    db, pipelined = await own.connect(server_settings=hosts.pin(10.0)), await own.open_pipeline(hosts.pin(10.0), True)
    for session in (db, pipelined):
        names = {name for (name,) in await session.fetch(told)}
        assert names >= {*hosts.pin(10.0)}
        known = await session.fetchval("SHOW server_version_num")
        assert "transaction_timeout" in names or int(known) < 170000, "a default could end the session before it is set"
        session.terminate()


async def test_a_server_that_knows_fewer_settings_is_told_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    old = [folder for version in (14, 15, 16) if (folder := Path(f"/usr/lib/postgresql/{version}/bin")).is_dir()]
    if not old:
        pytest.skip("Debian's Postgres 14 to 16 is not installed")
    monkeypatch.setenv(BIN_GIVEN, str(old[-1]))
    with Cluster() as server:
        own = hosts.Hosts(server.admin_url(), 10.0)
        for _ in range(2):
            db = await own.connect(server_settings=hosts.pin(10.0))
            pipelined = await own.open_pipeline(hosts.pin(10.0), True)
            for session in (db, pipelined):
                assert await session.fetchval("SHOW row_security") == "on"
                assert await session.fetchval("SHOW statement_timeout") == "10s"
                session.terminate()

        assert server.log.read_text().count('parameter "transaction_timeout"') == 1, "it was asked again"


async def test_races_that_are_lost_again_and_again_end_as_a_503(gate: Gate) -> None:
    backend: Any = gate.backend
    task_id = await gate.create()
    tries = 0

    def lose(work: Any) -> None:
        nonlocal tries
        tries += 1
        raise asyncpg.SerializationError("could not serialize access due to concurrent update")

    with pytest.raises(DatabaseUnavailable, match="nothing was stored") as refused:
        await backend.transact(TENANT, Needs(tasks={task_id}), lose)

    assert (tries, refused.value.more["retry_after"]) == (8, 1)


# The connection of an instance.


@contextlib.asynccontextmanager
async def joined(url: str, name: str, **database: Any) -> AsyncIterator[Gate]:
    """A gate among others, that only news can wake."""
    async with opened(url, poll_seconds=600, **database) as gate:
        assert isinstance(gate.backend, LastingBackend)
        await gate.backend.join(name, 10.0, gate.engine.hear_news)
        await gate.backend.beat()       # as upkeep does when it begins; until then the next one waits
        yield gate


class HungNames:
    """A name server that hangs, for hosts called .example, until it says that there are none."""

    def __init__(self) -> None:
        self.resolve, self.answer, self.asked = socket.getaddrinfo, threading.Event(), list[str]()

    def look_up(self, host: Any, *given: Any, **named: Any) -> Any:
        """Look up a host, as `socket.getaddrinfo` does."""
        if str(host).endswith(".example"):
            self.asked.append(host)
            self.answer.wait(2 * PATIENCE_SECONDS)
            raise socket.gaierror
        return self.resolve(host, *given, **named)


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungNames]:
    """Name servers that hang until the test ends."""
    names = HungNames()
    monkeypatch.setattr(socket, "getaddrinfo", names.look_up)
    yield names
    names.answer.set()


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})])       # its resolver is Python's
async def test_a_host_whose_name_server_hangs_keeps_nobody_from_the_other_one(
        cluster: Cluster, direct: str, outside: Outside, hung: HungNames, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "SILENT_SECONDS", 0.0)       # it is asked each time
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))      # as a small machine has
    both = f"h.example:{cluster.port},localhost:{cluster.port}"
    async with opened(direct.replace(f"127.0.0.1:{cluster.port}", both)) as gate:
        for _ in range(5):
            await outside.end_sessions()
            await gate.create()
    assert hung.asked


@pytest.mark.parametrize("whose", ["strangers", "the ledger's"])
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})])       # its resolver is Python's
async def test_strangers_hosts_whose_name_servers_hang_keep_no_database_away(
        direct: str, outside: Outside, hung: HungNames, whose: str) -> None:
    async def are_hung() -> bool:
        return len(hung.asked) == 10
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))      # as a small machine has
    calls = Calls("", 10)
    async with opened(direct.replace("127.0.0.1", "localhost")) as gate, make_client(timeout_seconds=600) as http:
        async def ask(url: str) -> Any:
            return await (http.get(url) if whose == "strangers" else calls.ask("GET", url, seconds=600.0))
        try:
            strangers = [asyncio.create_task(ask(f"https://h{at}.example/c.json")) for at in range(10)]
            await until(are_hung)
            await outside.end_sessions()
            await gate.create()
            assert not any(stranger.done() for stranger in strangers)
        finally:
            hung.answer.set()
            await asyncio.gather(*strangers, return_exceptions=True)
            await calls.close()


async def test_a_lost_instance_connection_comes_back_with_its_lock_and_its_news(
        database: str, direct: str, outside: Outside) -> None:
    async with joined(direct, "gate-1") as gate, joined(direct, "gate-2") as other:
        before = await outside.value(HOLDERS, database)
        await outside.value(END, before)
        await until(lambda: outside.value(f"SELECT cardinality(h) = 2 AND NOT h && $2 FROM ({HOLDERS}) AS h (h)",
                                          database, before))
        claim = asyncio.create_task(gate.claim(wait_seconds=30))
        await until(waiting_at(gate))
        task_id = await other.create()

        offer = await asyncio.wait_for(claim, PATIENCE_SECONDS)
        assert offer is not None
        assert offer.task_id == task_id


def waiting_at(gate: Gate) -> Callable[[], Coroutine[Any, Any, bool]]:
    async def is_waiting() -> bool:
        return bool(gate.engine.waiting.places.get(TENANT))
    return is_waiting


async def test_a_name_that_a_living_process_has_is_refused_and_that_of_a_killed_one_is_free(direct: str) -> None:
    async with serving(direct, instance_id="gate-1") as server, client_of(server) as ada:
        line = await asyncio.to_thread(refused_start, direct, instance_id="gate-1")

        assert "another process runs as gate-1" in line
        await acknowledged(ada)
        await server.stop(signal.SIGKILL)
        await server.start()
        ada.close()
        await acknowledged(ada)
        assert await server.stop(signal.SIGTERM) == 0


async def test_connections_that_died_in_silence_are_given_up_together(url: str, proxy: Proxy) -> None:
    async with opened(url, timeout_seconds=SOON) as gate:
        await asyncio.gather(*(gate.as_agent().list_tasks() for _ in range(8)))
        proxy.forget()

        with pytest.raises(DatabaseUnavailable):
            await gate.create()
        task_id = await gate.create()

        assert [task.task_id for task in (await gate.as_agent().list_tasks()).tasks] == [task_id]


@pytest.mark.parametrize("waits", [False, True])
async def test_a_connection_that_is_reset_behind_a_last_word_is_replaced_at_once(
        url: str, proxy: Proxy, waits: bool) -> None:
    async with opened(url, timeout_seconds=2 * PATIENCE_SECONDS) as gate:
        backend: Any = gate.backend
        task_id = await gate.create()

        async def is_waiting() -> bool:
            return not backend.pool.idle

        proxy.swallow()
        call = asyncio.create_task(gate.as_agent().list_tasks()) if waits else None
        if waits:
            await until(is_waiting)
        proxy.reset()
        await proxy.restore()
        page = await asyncio.wait_for(call or gate.as_agent().list_tasks(), PATIENCE_SECONDS)

        assert [task.task_id for task in page.tasks] == [task_id]


async def test_an_instance_whose_connection_died_in_silence_is_back_when_the_database_has_noticed(
        database: str, url: str, proxy: Proxy, outside: Outside) -> None:
    async with joined(url, "gate-1", timeout_seconds=SOON) as gate:
        before = await outside.value(HOLDERS, database)
        backend: Any = gate.backend
        assert await backend.member.db.fetchval("SHOW tcp_keepalives_idle") == "10"
        proxy.forget()
        await outside.value(END, before)    # as the probes would, after half a minute

        await until(lambda: beats(gate))
        assert before != await outside.value(HOLDERS, database)


async def beats(gate: Gate) -> bool:
    """Try to give a sign of life."""
    with contextlib.suppress(DatabaseUnavailable):
        assert isinstance(gate.backend, LastingBackend)
        await gate.backend.beat()
        return True
    return False


# The leases of an instance that has died.


async def lost_to_a_ghost(direct: str, outside: Outside) -> str:
    """Let a lease of an instance run out that gave a sign of life just now, and let another task be past its deadline.

    Return the first task.
    """
    settings = DatabaseSettings()
    ghost = Gate(Engine(await open_backend(direct), Settings(database=settings, instance_id="ghost")), TENANT)
    offer = await ghost.leased()
    await ghost.create(timeouts={"deadline": datetime.now(UTC) + timedelta(seconds=60)})
    await ghost.backend.close()
    await outside.value("INSERT INTO asyncgate.instances (instance_id, beat_seconds) VALUES ('ghost', 10)")
    return offer.task_id


async def tasks_due(gate: Gate, now: float | None = None) -> list[str]:
    """What upkeep would look at when all leases and deadlines have passed."""
    now = gate.now() + 301 if now is None else now
    return [task for _, tasks, _ in await gate.backend.overdue(now, 0.0, 100) for task in tasks]


async def test_a_lost_lease_of_a_dead_instance_is_taken_back_at_once(direct: str, outside: Outside) -> None:
    """Its lock is free, though its last beat is fresh; what is not a lost lease waits for three missed beats."""
    task_id = await lost_to_a_ghost(direct, outside)
    async with joined(direct, "gate-2") as gate:
        assert await tasks_due(gate) == [task_id]

        await outside.value("UPDATE asyncgate.instances SET beat_at = now() - interval '31 s' "
                            "WHERE instance_id = 'ghost'")
        assert isinstance(gate.backend, LastingBackend)
        await gate.backend.beat()
        assert len(await tasks_due(gate)) == 2


async def test_a_lost_lease_of_an_instance_that_holds_its_lock_is_left_to_it_and_looked_at_again_soon(
        cluster: Cluster, database: str, direct: str, outside: Outside) -> None:
    await lost_to_a_ghost(direct, outside)
    heard: list[News] = []
    async with opened(direct) as gate, connected(cluster.admin_url(database)) as ghost:
        await ghost.execute("SELECT pg_advisory_lock(hashtextextended('ghost', 25959))")
        assert isinstance(gate.backend, LastingBackend)
        await gate.backend.join("gate-2", 10.0, heard.append)
        heard.clear()       # whoever joins looks at once

        assert await tasks_due(gate, now := gate.now() + 301) == []
        assert [news.lapse for news in heard] == [now + 1.0]

        await ghost.execute("SELECT pg_advisory_unlock_all()")
        assert len(await tasks_due(gate)) == 1


async def test_who_is_not_alone_looks_for_lost_leases_every_second(direct: str) -> None:
    """A process may die before it has told when a lease that it has granted runs out."""
    async with joined(direct, "gate-1") as gate:
        alone = Upkeep(gate.engine)
        await alone.sweep()
        async with joined(direct, "gate-2") as other:
            beside = Upkeep(other.engine)
            await beside.sweep()

        now = asyncio.get_running_loop().time()
        assert alone.duties["sweep"].alarm.rings_at == math.inf
        assert beside.duties["sweep"].alarm.rings_at <= now + 1.1


async def test_a_task_of_a_dead_instance_is_adopted_by_the_sweep_that_takes_it_back(
        direct: str, outside: Outside) -> None:
    """Adoption and expiry are one transaction (Clarification C)."""
    task_id = await lost_to_a_ghost(direct, outside)
    async with joined(direct, "gate-2") as gate:
        backend: Any = gate.backend
        backend.skew = 301.0
        gate.engine.instance = "gate-2"
        await Upkeep(gate.engine).sweep()

        task = await gate.task(task_id)
        assert (task.status, task.asyncgate_instance) == ("queued", "gate-2")


async def test_a_claim_reads_turns_of_the_lanes_it_knows_though_another_batch_has_read_newer_ones(direct: str) -> None:
    async with opened(direct) as gate, opened(direct) as other:
        await other.create("a", limits={"first": ""})
        backend: Any = gate.backend
        offer, seen = backend._offer, list[str]()

        async def offer_late(*given: Any) -> bool:
            unread: bool = await offer(*given)
            if not seen:
                seen.append("a")
                await other.create("b", limits={"second": ""})
                newer = await gate.claim("w2", accept_types=["b"])      # another batch, with newer lanes
                seen.append(newer.type if newer is not None else "nothing")
            return unread
        backend._offer = offer_late

        claimed = await gate.claim("w1")

    assert claimed is not None
    assert (claimed.type, seen) == ("a", ["a", "b"])


async def test_an_open_transaction_holds_back_the_end_of_a_list_of_changes(direct: str) -> None:
    async with opened(direct) as gate, connected(direct) as other:
        task_id, ada = await gate.create(), gate.as_agent()
        async with other.transaction():
            await other.execute("SELECT set_config('app.tenant_id', $1, true)", TENANT)
            key = sql.writers_key(uuid.UUID(TENANT))
            await other.execute("SELECT pg_advisory_xact_lock_shared($1::int, $2::int)", sql.WRITERS, key)
            await other.execute("UPDATE asyncgate.states SET priority = 7, "
                                "updated_at = extract(epoch FROM clock_timestamp()) WHERE task_id = $1", task_id)
            before = await ada.list_tasks(order="changed")
        after = await ada.list_tasks(changed_since=before.as_of)

        assert [task.priority for task in before.tasks] == [0]
        assert [task.priority for task in after.tasks] == [7]
        assert (await ada.list_tasks(changed_since=after.as_of)).tasks == []


async def test_an_open_transaction_holds_back_the_end_of_what_somebody_owes(direct: str) -> None:
    """It may add a duty that is older than the last: who follows with the cursor would never see it."""
    async with opened(direct) as gate, connected(direct) as other:
        ada, first = gate.as_agent(), await gate.create()
        async with other.transaction():
            await other.execute("SELECT set_config('app.tenant_id', $1, true)", TENANT)
            key = sql.writers_key(uuid.UUID(TENANT))
            await other.execute("SELECT pg_advisory_xact_lock_shared($1::int, $2::int)", sql.WRITERS, key)
            second = await gate.create()
            before = await ada.list_open_obligations()
        after = await ada.list_open_obligations(since_receipt_id=before.cursor)

        assert [receipt.task_id for receipt in before.open_obligations] == [first]
        assert [receipt.task_id for receipt in after.open_obligations] == [second]
