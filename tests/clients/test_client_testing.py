"""The testing kit: a real gate in the process of a test, whose time passes when the test says so."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients import AsyncGate, Refusal, SyncGate
from asyncgate.clients.testing import AsyncTestGate, Gate, SyncTestGate
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
pytest_plugins = ["asyncgate.clients.pytest_fixtures"]

ROOT = Path(__file__).parents[2]


async def until(look: Callable[[], bool]) -> None:
    """Look again and again, until it is so."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not look():  # noqa: ASYNC110  # the engine tells nobody that a claim has begun to wait
            await asyncio.sleep(0.001)


async def lose_a_lease(gate: AsyncTestGate) -> None:
    """Let a lease run out and the task be finished under the next one, in no time."""
    handle = await gate.submit("demo", {"n": 1})
    worker, began = gate.speaking_as(worker_id="w1"), gate.now()
    (offer,) = (await worker.lease_next(lease_ttl_seconds=60)).tasks
    await gate.advance(59)
    assert await handle.status() == "leased"
    await gate.advance(2)
    assert await handle.status() == "queued"
    with pytest.raises(Refusal, match="expired"):
        await worker.complete(offer.task_id, offer.lease_id, result=1)
    (again,) = (await worker.lease_next()).tasks
    await worker.complete(again.task_id, again.lease_id, result=2)

    assert (await handle.result(), again.fence) == (2, 2)
    assert (gate.now() - began).total_seconds() >= 61


@pytest.mark.parametrize("where", ["memory:", "sqlite:///{tmp}/gate.db"])
@pytest.mark.parametrize("port", [None, 0])
async def test_a_lease_runs_out_when_the_clock_is_advanced(tmp_path: Path, where: str, port: int | None) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), Gate(where.format(tmp=tmp_path), port=port) as gate:
        await lose_a_lease(gate)


async def test_a_claim_that_waits_is_answered_when_a_delayed_task_becomes_due() -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), Gate() as gate:
        handle = await gate.submit("demo", delay_seconds=3600)
        claim = asyncio.create_task(gate.speaking_as(worker_id="w1").lease_next(wait_seconds=30))
        waiting = gate.running.server.engine.waiting
        await until(lambda: waiting.count == 1)
        await gate.advance(3600)

        assert [offer.task_id for offer in (await claim).tasks] == [handle.task_id]


async def test_a_claim_that_is_given_up_leaves_its_place() -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), Gate() as gate:
        worker, waiting = gate.speaking_as(worker_id="w1"), gate.running.server.engine.waiting
        claim = asyncio.create_task(worker.lease_next(wait_seconds=30))
        await until(lambda: waiting.count == 1)
        claim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claim
        await until(lambda: waiting.count == 0)

        await gate.submit("demo")
        assert len((await worker.lease_next()).tasks) == 1


async def test_a_gate_that_is_left_answers_those_that_wait() -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        async with Gate() as gate:
            claim = asyncio.create_task(gate.speaking_as(worker_id="w1").lease_next(wait_seconds=30))
            await until(lambda: gate.running.server.engine.waiting.count == 1)
        assert (await claim).tasks == []


async def test_what_a_file_holds_is_there_for_the_next_gate(tmp_path: Path) -> None:
    where = f"sqlite:///{tmp_path / 'gate.db'}"
    async with Gate(where) as gate:
        handle = await gate.submit("demo", key="once")
    async with Gate(where) as gate:
        assert await gate.handle(handle.task_id).status() == "queued"


async def test_settings_are_those_of_the_gate() -> None:
    async with Gate(max_expiries=0, default_max_attempts=7, agent_id="ada") as gate:
        task = await (await gate.submit("demo")).task()

    assert (task.max_attempts, task.max_expiries, task.created_by.id) == (7, 0, "ada")


async def test_another_program_reaches_a_gate_that_has_a_port() -> None:
    async with Gate(port=0) as gate:
        async with AsyncGate(gate.url, gate.token, via="mcp", agent_id="bob") as other:
            handle = await other.submit("demo")
        with SyncGate(gate.url, gate.token) as another:     # it blocks this loop, but not the gate, which has its own
            assert another.get_task(handle.task_id).created_by.id == "bob"


async def test_a_gate_that_has_a_port_answers_at_once() -> None:
    took = 1.0
    async with Gate(port=0) as gate, asyncio.timeout(PATIENCE_SECONDS):
        while took > 0.03:      # Nagle's algorithm holds each answer back for 0.04 s; a busy machine, some of them
            begun = time.monotonic()
            await gate.submit("demo")
            took = time.monotonic() - begun


async def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            await Gate(port=port).__aenter__()
        with pytest.raises(OSError, match="in use"), Gate(port=port):
            raise AssertionError("it was opened")


async def test_time_goes_forward_only() -> None:
    async with Gate() as gate:
        with pytest.raises(ValueError, match="forward"):
            await gate.advance(-1)


async def test_an_error_of_the_test_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with Gate():
            raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), Gate():
        raise ZeroDivisionError


@pytest.mark.parametrize("port", [None, 0])
def test_the_same_without_await(port: int | None) -> None:
    with Gate(port=port) as gate:
        handle = gate.submit("demo", {"n": 1})
        worker, began = gate.speaking_as(worker_id="w1"), gate.now()
        worker.lease_next(lease_ttl_seconds=60)
        gate.advance(61)
        assert (gate.now() - began).total_seconds() >= 61
        (offer,) = worker.lease_next().tasks
        worker.complete(offer.task_id, offer.lease_id, result=offer.payload)

        assert (handle.result(), handle.task().expiries) == ({"n": 1}, 1)

    assert "asyncgate" not in [thread.name for thread in threading.enumerate()]


async def test_the_fixture_to_await_is_a_gate(async_gate: AsyncTestGate) -> None:
    await lose_a_lease(async_gate)


def test_the_fixture_to_call_is_a_gate(sync_gate: SyncTestGate) -> None:
    assert sync_gate.submit("demo").status() == "queued"


@pytest.mark.parametrize("name", ["asyncgate.clients.testing", "asyncgate.clients.client", "asyncgate.clients.sync"])
def test_importing_it_imports_nothing_heavy_and_no_pytest(name: str) -> None:
    ask = f"import json, sys, {name}; print(json.dumps(sorted(sys.modules)))"

    told = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    loaded: set[Any] = set(json.loads(told))
    assert name in loaded
    assert not loaded & {"pytest", "httpx2", "mcp", "uvicorn", "aiosqlite", "asyncpg", "argon2", "joserfc", "redis"}
