"""What a batch on Postgres owes to those that run beside it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from asyncgate import Engine, Needs
from asyncgate.backends.postgres import Postgres, Queues, open_backend
from asyncgate.conformance.harness import Gate
from asyncgate.conformance.plugin import POSTGRES, database_of, urls
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.wire import LeaseNext

pytestmark = pytest.mark.anyio


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if POSTGRES not in urls(request.config):
        pytest.skip("of the Postgres backend")
    return database_of(POSTGRES, request.config, tmp_path)


@pytest.fixture
async def backend(url: str) -> AsyncIterator[Postgres]:
    opened = await open_backend(url)
    yield opened
    await opened.close()


async def test_the_time_of_a_batch_is_later_than_its_last_lock_also_when_it_looks_twice(
        backend: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, rows = [], backend._rows

    async def noted(*asked: Any) -> Any:
        found = await rows(*asked)
        clocks.append(found[0].clock)
        return found

    gate = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), str(uuid.uuid4()))
    await gate.create(delay_seconds=5)
    gate.skip(6)
    monkeypatch.setattr(backend, "_rows", noted)

    offer = await gate.claim()

    assert offer is not None
    assert len(clocks) == 2         # the delayed task was put into its queue between two looks
    [lease] = (await gate.everything())["Lease"]
    assert lease.acquired_at == clocks[1] > clocks[0]


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


async def test_a_batch_that_looks_twice_offers_all_that_it_has_locked(
        backend: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    holding, go_on, save, rows = asyncio.Event(), asyncio.Event(), backend._save, backend._rows
    looks: list[set[str]] = []
    gate = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), str(uuid.uuid4()))
    await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 40)

    def claims(most: int) -> Needs:
        return Needs(claims=[LeaseNext(worker_id="w", max_tasks=most)])

    async def slow(*asked: Any) -> Any:
        if not holding.is_set():
            holding.set()
            await go_on.wait()
        return await save(*asked)

    async def looked(*asked: Any) -> Any:
        if looks:       # what the other batch had locked is free again before the second look
            go_on.set()
            await other
        found = await rows(*asked)
        looks.append({row[0] for row in found[2]})
        return found

    monkeypatch.setattr(backend, "_save", slow)
    other = asyncio.create_task(backend.transact(gate.tenant_id, claims(35), lambda work: None))
    await holding.wait()
    monkeypatch.setattr(backend, "_rows", looked)
    offered: set[str] = set()
    await backend.transact(gate.tenant_id, claims(5), lambda work: offered.update(*work.ready.values()))

    assert len(looks) == 2
    assert looks[0] - looks[1]      # locked by the first look, and not seen by the second
    assert offered == looks[0] | looks[1]
