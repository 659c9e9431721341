"""What a load balancer asks and is told: /ready beside /health, over real databases."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate.backends import Around, open_backend
from asyncgate.backends.memory import Memory
from asyncgate.backends.postgres.statements import NAME_KEY
from asyncgate.conformance.plugin import SHARED
from asyncgate.conformance.postgres_server import PostgresServer, connected
from asyncgate.parts.app import Gate
from asyncgate.parts.model.granted import GrantedLeases
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.stored import Lease
from asyncgate.parts.service import Service
from tests.conftest import TOKEN, Live, Served
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
Fresh = Callable[[str], Awaitable[str]]
WELL = {"ready": True, "migrated": True, "database": True, "joined": True, "draining": False}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every question ask the database, and none wait long for it."""
    monkeypatch.setattr(Service, "FRESH_SECONDS", -1.0)


@contextlib.asynccontextmanager
async def serving(backend: Any) -> AsyncIterator[Served]:
    """Serve over a backend."""
    gate = Gate(Settings(api_key=TOKEN), backend)
    async with gate.app.router.lifespan_context(gate.app):
        yield Served(gate)


class Asked(Around):
    """A database that counts who asks whether it lives."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.times, self.begun, self.answers = 0, asyncio.Event(), asyncio.Event()
        self.answers.set()

    async def alive(self) -> None:
        """Count, and answer when the test lets it."""
        self.times += 1
        self.begun.set()
        await self.answers.wait()


async def refused(served: Served) -> dict[str, Any]:
    """Return the checks of a gate that is not ready."""
    answer = await served.call("GET", "/ready", token=None)
    assert answer.status == 503
    told: dict[str, Any] = answer.json()
    assert told.pop("error") == "not_ready"
    assert told.pop("message") == told.pop("detail")
    return told


@pytest.mark.parametrize("path", ["/ready", "/v1/ready"])
async def test_anybody_is_told_that_a_gate_is_ready_and_nothing_else(served: Served, path: str) -> None:
    assert await served.get(path, token=None) == WELL
    assert (await served.call("HEAD", path, token=None)).status == 200


async def test_a_flood_of_questions_asks_the_database_once() -> None:
    async with serving(asked := Asked(Memory())) as served:
        asked.answers.clear()
        flood = [asyncio.create_task(served.get("/ready", token=None)) for _ in range(200)]
        await asked.begun.wait()
        flood[0].cancel()
        asked.answers.set()

        told = await asyncio.gather(*flood[1:])
        await asyncio.gather(flood[0], return_exceptions=True)

    assert told == [WELL] * 199
    assert asked.times == 1


async def test_a_database_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    monkeypatch.setattr(Service, "PATIENCE_SECONDS", 0.01)
    async with serving(asked := Asked(Memory())) as served:
        asked.answers.clear()

        told = await refused(served)

        assert (told["ready"], told["database"]) == (False, False)
        asked.answers.set()
        assert await served.get("/ready", token=None) == WELL


async def test_a_file_with_another_schema_is_not_ready(fresh: Fresh, at_once: None) -> None:
    path = (url := await fresh("sqlite")).removeprefix("sqlite:///")
    async with serving(await open_backend(url, serving=True)) as served:
        assert await served.get("/ready", token=None) == WELL
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("UPDATE meta SET value = '99' WHERE name = 'schema_version'")

        assert await refused(served) == {**WELL, "ready": False, "migrated": False}


async def test_a_file_that_was_replaced_is_not_ready(fresh: Fresh, at_once: None) -> None:
    path = (url := await fresh("sqlite")).removeprefix("sqlite:///")
    async with serving(await open_backend(url, serving=True)) as served:
        os.rename(path, f"{path}.old")

        assert (await refused(served))["database"] is False

        os.rename(f"{path}.old", path)
        assert await served.get("/ready", token=None) == WELL


async def test_a_newer_schema_that_left_this_release_behind_is_not_ready(
        fresh: Fresh, pytestconfig: pytest.Config, at_once: None) -> None:
    url = await fresh("postgres")
    server = pytestconfig.stash[SHARED].server
    assert isinstance(server, PostgresServer)
    owner = server.admin_url(url.rpartition("/")[2])
    async with serving(await open_backend(url)) as served:
        assert await served.get("/ready", token=None) == WELL
        async with connected(owner) as db:
            await db.execute("INSERT INTO asyncgate.migrations (number, name, code) VALUES (99, 'later', 1)")
            assert await served.get("/ready", token=None) == WELL      # a newer schema that this release can use
            await db.execute("UPDATE asyncgate.migrations SET code = 99 WHERE number = 99")

        assert await refused(served) == {**WELL, "ready": False, "migrated": False}


async def test_a_process_without_its_lock_is_not_ready_until_it_has_it_again(fresh: Fresh, at_once: None) -> None:
    async with serving(backend := await open_backend(url := await fresh("postgres"))) as served:
        name = served.engine.instance
        async with connected(url) as thief:
            taken = asyncio.create_task(thief.fetchval(f"SELECT pg_advisory_lock({NAME_KEY.format('$1::text')})", name))
            await until(lambda: waits_for_a_lock(url))
            backend.member.db.terminate()       # type: ignore[attr-defined]
            await taken

            assert await refused(served) == {**WELL, "ready": False, "joined": False}

        await until(lambda: is_ready(served))


async def waits_for_a_lock(url: str) -> bool:
    async with connected(url) as db:        # the server is shared with other tests, and each has a database of its own
        return bool(await db.fetchval(
            "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database "
            "WHERE locktype = 'advisory' AND NOT granted AND datname = current_database()"))


async def is_ready(served: Served) -> bool:
    return (await served.call("GET", "/ready", token=None)).status == 200


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await holds():  # noqa: ASYNC110  # nothing tells it
            await asyncio.sleep(0.02)


# Draining.


@pytest.fixture
def breathless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call wait for next to nothing while the gate drains."""
    monkeypatch.setattr(Service, "BREATH_SECONDS", 0.01)


async def claim(served: Served, **more: Any) -> list[Any]:
    """Ask for work; return what there is."""
    offers: list[Any] = (await served.post("/v1/leases/claim", {"worker_id": "w1", **more}))["tasks"]
    return offers


async def waiting(served: Served, calls: int) -> None:
    """Wait until so many calls wait."""
    async def all_wait() -> bool:
        return sum(served.engine.polls.tenants.values()) == calls and not served.engine.batches.flights
    await until(all_wait)


async def test_who_waits_is_answered_and_nothing_is_refused_while_a_gate_drains(
        served: Served, breathless: None) -> None:
    made = await served.post("/v1/tasks", {"type": "demo", "payload": None, "requirements": {"capabilities": ["x"]}})
    worker = asyncio.create_task(claim(served, wait_seconds=30))
    reader = asyncio.create_task(served.get(f"/v1/tasks/{made['task_id']}?wait_seconds=30"))
    await waiting(served, 2)

    told = await served.post("/v1/gate/drain", {"reason": "release 0.2"})

    async with asyncio.timeout(20):     # their own 30 seconds are not over
        assert await worker == []
        assert (await reader)["status"] == "queued"
        assert await claim(served, wait_seconds=30) == []
    assert (told["instance_id"], told["draining"], told["leases"]) == (served.engine.instance, True, 0)
    assert await refused(served) == {**WELL, "ready": False, "draining": True}
    assert (await served.get("/health"))["status"] == "healthy"
    offer = await served.leased()
    assert (await served.post("/v1/gate/drain"))["leases"] == 1
    await served.post(f"/v1/tasks/{offer['task_id']}/complete", {"lease_id": offer["lease_id"], "worker_id": "w1"})
    again = await served.post("/v1/gate/drain")
    assert (again["leases"], again["waiting"], again["since"]) == (0, 0, told["since"])


async def test_a_gate_that_drains_no_more_lets_calls_wait_again(served: Served, breathless: None) -> None:
    await served.post("/v1/gate/drain")

    told = await served.post("/v1/gate/resume")

    assert (told["draining"], told["since"]) == (False, None)
    assert await served.get("/ready", token=None) == WELL
    worker = asyncio.create_task(claim(served, wait_seconds=30))
    await waiting(served, 1)
    await served.post("/v1/tasks", {"type": "demo", "payload": None})
    async with asyncio.timeout(20):
        assert len(await worker) == 1


async def test_leases_that_ran_out_are_not_left(served: Served) -> None:
    await served.leased()
    served.backend.skew = 3600.0

    assert (await served.post("/v1/gate/drain"))["leases"] == 0


def test_forgotten_leases_do_not_pile_up() -> None:
    granted, lease = GrantedLeases(), Lease("t", "l", "worker", "w", None, 1, 0.0, 10.0, 0, "r", None)

    for number in range(5 * GrantedLeases.TIDY):
        granted.note({f"t{number}": replace(lease, expires_at=number + 1.0)}, now=float(number))

    assert len(granted.ends) <= GrantedLeases.TIDY + 1


async def test_only_the_operator_drains_and_only_the_process_that_is_meant(served: Served) -> None:
    room = await served.post("/v1/tenants", {"name": "Reading Room"})
    issued = await served.post("/v1/keys", {"tenant": room["tenant"], "name": "theirs", "principal_kind": "human",
                                            "principal_id": "bob", "role": "admin"})

    theirs = await served.call("POST", "/v1/gate/drain", {}, token=issued["api_key"])
    other = await served.call("POST", "/v1/gate/drain", {"instance_id": "another"})

    assert (theirs.status, other.status) == (403, 421)
    assert await served.get("/ready", token=None) == WELL


async def test_who_drains_a_gate_and_why_is_audited(served: Served) -> None:
    await served.post("/v1/gate/drain", {"reason": "release 0.2"})
    await served.post("/v1/gate/resume", {"reason": "it waits"})
    await served.gate.guard.auditor.flush()

    lines = [line for line in (await served.get("/v1/audit"))["lines"] if line["event"].startswith("gate_")]

    assert [(line["event"], line["severity"], line["reason"]) for line in lines] == [
        ("gate_draining", "warning", "release 0.2"), ("gate_resumed", "warning", "it waits")]
    assert {line["details"]["instance_id"] for line in lines} == {served.engine.instance}


async def test_a_stop_that_drains_is_audited(serve: Callable[..., Awaitable[Served]]) -> None:
    served = await serve(drain_seconds=60.0)

    assert 50 < served.gate.leave() <= 60

    await served.gate.guard.auditor.flush()
    lines = [line for line in (await served.get("/v1/audit"))["lines"] if line["event"] == "gate_draining"]
    assert [(line["severity"], line["reason"]) for line in lines] == [("info", "told to stop")]


async def test_the_time_since_an_admin_drained_a_process_counts_when_it_stops(
        serve: Callable[..., Awaitable[Served]]) -> None:
    served = await serve(drain_seconds=60.0)
    await served.post("/v1/gate/drain")
    served.backend.skew = 45.0

    assert 5 < served.gate.leave() <= 15
    served.backend.skew = 90.0
    assert served.gate.leave() == 0


# In a process of its own.


def ask(live: Live, path: str, method: str = "GET") -> tuple[int, dict[str, str]]:
    """Ask on a new connection; return the status and the headers."""
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=PATIENCE_SECONDS)
    connection.request(method, path, "{}" if method == "POST" else None, headers)
    with contextlib.closing(connection), connection.getresponse() as answer:
        answer.read()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}


def ended(live: Live) -> int:
    """Wait for the end of a process; return its status."""
    status = live.process.wait(PATIENCE_SECONDS)
    live.kill()     # which closes what it wrote to
    return status


def test_connections_close_behind_their_answer_while_a_gate_drains(live: Live) -> None:
    assert "connection" not in ask(live, "/v1/config")[1]

    assert ask(live, "/v1/gate/drain", "POST")[0] == 200

    assert ask(live, "/v1/config")[1]["connection"] == "close"
    assert ask(live, "/v1/gate/resume", "POST")[0] == 200
    assert "connection" not in ask(live, "/v1/config")[1]


def test_a_gate_that_is_told_to_stop_says_so_before_it_stops_listening(start: Callable[..., Live]) -> None:
    live = start("drain_seconds=3")
    assert ask(live, "/ready")[0] == 200

    live.process.send_signal(signal.SIGTERM)

    while ask(live, "/ready")[0] != 503:
        pass
    status, headers = ask(live, "/v1/config")
    assert (status, headers["connection"]) == (200, "close")
    assert ended(live) == 0


@pytest.fixture
def terminal() -> Iterator[None]:
    """As in a terminal, where no program ignores SIGHUP: under nohup every child does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("terminal")
def test_the_end_of_the_terminal_stops_a_gate_in_order(start: Callable[..., Live]) -> None:
    live = start()

    live.process.send_signal(signal.SIGHUP)

    assert ended(live) == 0


def test_a_second_signal_ends_the_time_that_load_balancers_have(start: Callable[..., Live]) -> None:
    live = start("drain_seconds=3600")
    live.process.send_signal(signal.SIGTERM)
    while ask(live, "/ready")[0] != 503:
        pass

    live.process.send_signal(signal.SIGTERM)

    assert ended(live) == 1
