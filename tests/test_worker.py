"""Workers against a gate in a process of its own: what a task function sees, and what the gate sees of the worker."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncgate.clients.http import AsyncHttp
from asyncgate.clients.worker import Done, Fail, Job, Retry, Worker

pytestmark = pytest.mark.anyio

TOKEN = "a-token-for-tests"
PATIENCE_SECONDS = 30.0
HASTY = ("lease_sweep_interval_seconds=0.1", "expiry_jitter_seconds=0")


@pytest.fixture
def anyio_backend() -> str:
    """What a worker runs on."""
    return "asyncio"


class Page(msgspec.Struct):
    document: str
    pages: int = 1


class Read(msgspec.Struct):
    document: str
    words: int


@pytest.fixture
async def gate(start: Any) -> AsyncIterator[AsyncHttp]:
    """A client of a gate that sweeps fast."""
    async with asyncio.timeout(2 * PATIENCE_SECONDS), AsyncHttp(start(*HASTY).url, TOKEN) as gate:
        yield gate


def made(gate: AsyncHttp, worker_id: str = "w", state: Path | None = None, **more: Any) -> Worker:
    return Worker(gate.url, worker_id, token=TOKEN, state=state, **more)


@contextlib.asynccontextmanager
async def at_work(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    """Let a worker work for the time of a block; then it gives back at once what it holds."""
    working = asyncio.create_task(worker.serve())
    try:
        yield working
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working


async def run(gate: AsyncHttp, type: str = "t", payload: Any = None, **more: Any) -> dict[str, Any]:
    """Create a task and wait for its end."""
    made = await gate.call("create_task", type=type, payload=payload, retry_backoff_seconds=0, **more)
    return await ended(gate, made["task_id"])


async def ended(gate: AsyncHttp, task_id: str) -> dict[str, Any]:
    task: dict[str, Any] = {"status": "queued"}
    while task["status"] not in ("succeeded", "failed", "canceled"):
        task = await gate.call("get_task", task_id=task_id, wait_seconds=30)
    return task


async def until(look: Callable[[], Awaitable[Any]]) -> Any:
    """Look again and again until there is something to see."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (seen := await look()):  # noqa: ASYNC110  # another program changes what is seen
            await asyncio.sleep(0.02)
    return seen


async def history(gate: AsyncHttp, task_id: str) -> list[str]:
    return [event["event_type"] for event in (await gate.call("get_task_history", task_id=task_id))["events"]]


# What goes in and what comes out.


async def test_payload_and_result_have_the_types_that_the_function_declares(gate: AsyncHttp) -> None:
    worker = made(gate)

    @worker.task("t")
    async def read(page: Page) -> Read:
        assert isinstance(page, Page)
        return Read(page.document, 7 * page.pages)

    async with at_work(worker):
        task = await run(gate, payload={"document": "d", "pages": 2})

    assert (task["status"], task["result"]["result"]) == ("succeeded", {"document": "d", "words": 14})
    assert task["obligation_open"] is False
    assert task["result"]["artifacts"] == [
        {"type": "inline", "uri": f"asyncgate://{task['asyncgate_instance']}/tasks/{task['task_id']}/result"}]


async def test_a_plain_function_runs_in_a_thread_and_may_say_where_its_result_lies(gate: AsyncHttp) -> None:
    worker = made(gate)

    @worker.task("t")
    def read(page: dict[str, Any], job: Job) -> Done:
        assert threading.current_thread() is not threading.main_thread()
        return Done({"attempt": job.attempt}, artifacts=[{"type": "file", "uri": "file:///out"}], summary="read")

    async with at_work(worker):
        task = await run(gate, payload={})

    assert task["result"]["result"] == {"attempt": 0}
    assert task["result"]["artifacts"] == [{"type": "file", "uri": "file:///out"}]


async def test_a_payload_of_another_shape_fails_for_good_and_says_what_is_wrong(gate: AsyncHttp) -> None:
    worker = made(gate)

    @worker.task("t")
    def read(page: Page) -> None:
        raise AssertionError("it must not be called")

    async with at_work(worker):
        task = await run(gate, payload={"document": 5}, max_attempts=3)

    assert (task["status"], task["attempt"]) == ("failed", 0)
    assert task["result"]["error"] == {
        "code": "invalid_payload", "message": "the payload is not what this task takes: Expected `str`, got `int` - at "
                                              "`$.document`"}


@pytest.mark.parametrize(("error", "runs", "code"), [
    (Retry("busy", after=0), 3, "retry"), (Fail("no", code="unreadable"), 1, "unreadable"),
    (ConnectionError("gone"), 3, "ConnectionError"), (ValueError("bug"), 1, "ValueError"),
    (KeyError("mine"), 3, "KeyError"), (SystemExit(3), 1, "RuntimeError"), (StopIteration(), 1, "RuntimeError")],
    ids=repr)
async def test_an_error_costs_an_attempt_or_the_task_by_its_class(
        gate: AsyncHttp, error: BaseException, runs: int, code: str) -> None:
    worker, seen = made(gate), []

    @worker.task("t", retry=(OSError, KeyError))
    def read(page: Any) -> None:
        seen.append(page)
        raise error

    async with at_work(worker):
        task = await run(gate, max_attempts=3)

    assert (task["status"], len(seen), task["result"]["error"]["code"]) == ("failed", runs, code)


@pytest.mark.parametrize("result", [object(), float, {"big": "x" * 1_100_000}], ids=["object", "class", "too large"])
async def test_a_result_that_cannot_be_told_fails_the_task(gate: AsyncHttp, result: Any) -> None:
    worker = made(gate)
    worker.task("t")(lambda page: result)

    async with at_work(worker):
        task = await run(gate, max_attempts=3)

    assert (task["status"], task["attempt"]) == ("failed", 0)
    assert task["result"]["error"]["code"] in ("invalid_result", "payload_too_large")


@pytest.mark.parametrize("function", [lambda: None, lambda a, b, c: None])
async def test_a_function_that_takes_neither_payload_nor_payload_and_job_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="must take the payload"):
        Worker().task("t")(function)


# Leases.


async def test_a_function_that_blocks_the_event_loop_keeps_its_lease(gate: AsyncHttp) -> None:
    worker = made(gate, ttl_seconds=1)

    @worker.task("t")
    async def block(page: Any, job: Job) -> Any:
        until = time.monotonic() + 2.5      # many times a third of the lease
        while time.monotonic() < until:
            time.sleep(0.05)                # noqa: ASYNC251  # this is what must do no harm
        return job.fence

    async with at_work(worker):
        task = await run(gate)

    assert (task["status"], task["result"]["result"], task["expiries"]) == ("succeeded", 1, 0)
