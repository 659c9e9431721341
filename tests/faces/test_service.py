"""What a load balancer asks and is told: /ready beside /health, over real databases."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from asyncgate.backends import Around, open_backend
from asyncgate.backends.memory import Memory
from asyncgate.backends.postgres.statements import NAME_KEY
from asyncgate.conformance.plugin import SHARED
from asyncgate.conformance.postgres_server import PostgresServer, connected
from asyncgate.parts.app import Gate
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.service import Service
from tests.conftest import TOKEN, Served

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
    async with connected(url) as db:
        return bool(await db.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))


async def is_ready(served: Served) -> bool:
    return (await served.call("GET", "/ready", token=None)).status == 200


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(60):
        while not await holds():  # noqa: ASYNC110  # nothing tells it
            await asyncio.sleep(0.02)
