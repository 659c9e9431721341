"""Workers that park their task, and that record what they have done of it, so that it is done once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncgate.clients import Job, Park, Worker
from asyncgate.clients.http import AsyncHttp
from tests.support import hasty
from tests.support.hasty import TOKEN, ended

pytestmark = pytest.mark.anyio
anyio_backend, gate = hasty.anyio_backend, hasty.gate
SETTINGS = ("max_progress_bytes=2000",
         "max_step_bytes=3000")


async def run(gate: AsyncHttp, function: Callable[..., Any], **more: Any) -> dict[str, Any]:
    """Run a function for one task, until the task has ended."""
    worker = Worker(gate.url, "w", token=TOKEN, state=None)
    worker.task("t")(function)
    made = await gate.call("create_task", type="t", payload=None, **{"retry_backoff_seconds": 0, **more})
    working = asyncio.create_task(worker.serve())
    try:
        return await ended(gate, made["task_id"])
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working


class Page(msgspec.Struct):
    number: int


# Steps.


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
async def test_what_was_recorded_is_not_done_again(gate: AsyncHttp, plain: bool) -> None:
    done: list[str] = []

    def fetch(number: int) -> Page:
        done.append(f"fetch {number}")
        return Page(number)

    async def send(page: Page) -> dict[str, int]:
        done.append(f"send {page.number}")
        return {"sent": page.number}

    def send_plainly(page: Page) -> dict[str, int]:
        done.append(f"send {page.number}")
        return {"sent": page.number}

    async def work(payload: Any, job: Job) -> Any:
        page = await job.step("fetch", fetch, 7)
        assert isinstance(page, Page)
        sent = await job.step("send", send, page)
        if job.attempt == 0:
            raise ConnectionError("the third service is away")
        return [sent, await job.step("count", lambda: 3)]

    def work_plainly(payload: Any, job: Job) -> Any:
        page = job.step("fetch", fetch, number=7)
        assert isinstance(page, Page)
        sent = job.step("send", send_plainly, page)
        if job.attempt == 0:
            raise ConnectionError("the third service is away")
        return [sent, job.step("count", lambda: 3)]

    task = await run(gate, work_plainly if plain else work)

    assert (task["status"], task["result"]["result"], task["attempt"], task["steps"]) == (
        "succeeded", [{"sent": 7}, 3], 1, 3)
    assert done == ["fetch 7", "send 7"]
    steps = (await gate.call("list_steps", task_id=task["task_id"]))["steps"]
    assert [(step["seq"], step["name"], step["value"], step["fence"]) for step in steps] == [
        (1, "fetch", {"number": 7}, 1), (2, "send", {"sent": 7}, 1), (3, "count", 3, 2)]


async def test_steps_that_are_done_together_are_numbered_in_the_order_of_their_calls(gate: AsyncHttp) -> None:
    async def slow(number: int) -> int:
        await asyncio.sleep(0.02 * (3 - number))
        return number

    async def work(payload: Any, job: Job) -> Any:
        return await asyncio.gather(*(job.step(f"n{number}", slow, number) for number in range(3)))

    task = await run(gate, work)

    assert task["result"]["result"] == [0, 1, 2]
    steps = (await gate.call("list_steps", task_id=task["task_id"]))["steps"]
    assert [(step["seq"], step["value"]) for step in steps] == [(1, 0), (2, 1), (3, 2)]


async def test_a_function_that_takes_other_steps_than_before_is_told_what_was_recorded(gate: AsyncHttp) -> None:
    async def work(payload: Any, job: Job) -> None:
        await job.step("fetch" if job.attempt == 0 else "send", lambda: 1)
        raise ConnectionError("away")

    task = await run(gate, work, max_attempts=2)

    error = task["result"]["error"]
    assert error["code"] == "StepMismatch"
    assert "step 1" in error["message"]
    assert "was recorded as 'fetch', and is 'send' now" in error["message"]


async def test_a_step_that_json_cannot_express_is_not_begun_if_that_is_declared(gate: AsyncHttp) -> None:
    def work(payload: Any, job: Job) -> None:
        def connect() -> threading.Thread:
            raise AssertionError("it must not be called")
        job.step("connect", connect)

    task = await run(gate, work, max_attempts=1)

    assert task["result"]["error"]["code"] == "TypeError"


@pytest.mark.parametrize(("how", "limit"), [("save", "2000"), ("step", "3000")])
async def test_what_is_too_large_is_an_error_at_the_call_with_the_limit(
        gate: AsyncHttp, how: str, limit: str) -> None:
    runs: list[int] = []

    def work(payload: Any, job: Job) -> None:
        runs.append(job.attempt)
        job.step("large", lambda: "x" * 3000) if how == "step" else getattr(job, how)("x" * 2000)

    task = await run(gate, work)

    assert (task["status"], runs) == ("failed", [0])
    assert task["result"]["error"]["code"] == "TooLarge"
    assert limit in task["result"]["error"]["message"]
    advice = {"save": "job.step", "step": "what step large gave is too large for the gate"}
    assert advice[how] in task["result"]["error"]["message"]


async def test_a_function_that_goes_on_from_a_checkpoint_may_keep_more_than_one_checkpoint_holds(
        gate: AsyncHttp) -> None:
    def work(payload: Any, job: Job) -> int:
        return sum(len(job.step("call", lambda: "x" * 1000)) for _ in range(10))

    task = await run(gate, work)

    assert (task["result"]["result"], task["steps"]) == (10_000, 10)


CHILD = """
import os, pathlib, sys
from asyncgate.clients import Worker
out = pathlib.Path(sys.argv[2])
worker = Worker(sys.argv[1], "w", token=sys.argv[3], state=None, ttl_seconds=1)

def note(number):
    with out.open("a") as file:
        file.write(f"{number}\\n")
    return number

@worker.task("t")
def work(payload, job):
    numbers = []
    for number in range(6):
        numbers.append(job.step(f"n{number}", note, number))
        if number == 3 and job.fence == 1:
            os.kill(os.getpid(), 9)
    return numbers

worker.run()
"""


async def test_the_worker_after_a_killed_one_does_only_what_is_not_recorded(gate: AsyncHttp, tmp_path: Path) -> None:
    made = await gate.call("create_task", type="t", payload=None)
    out = tmp_path / "done"

    def child() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", CHILD, gate.url, str(out), TOKEN], env={**os.environ})

    with child() as first:
        assert await asyncio.to_thread(first.wait) == -signal.SIGKILL
    with child() as second:
        try:
            task = await ended(gate, made["task_id"])
        finally:
            second.terminate()

    assert task["result"]["result"] == [*range(6)]
    assert out.read_text().split() == [str(number) for number in range(6)]
    assert (task["fence"], task["attempt"]) == (2, 0)


# Parking.


async def test_a_parked_task_comes_back_with_its_checkpoint_and_at_no_cost(gate: AsyncHttp) -> None:
    def work(payload: Any, job: Job) -> Any:
        if job.checkpoint is None:
            job.report({"phase": "asked"})
            raise Park("no answer yet", after=0.05, checkpoint={"asked": 1})
        if job.checkpoint == {"asked": 1}:
            raise Park(until=datetime.now(UTC) + timedelta(seconds=0.05), checkpoint={"asked": 2})
        return [job.checkpoint, job.progress]

    task = await run(gate, work, max_attempts=1)

    assert (task["status"], task["attempt"], task["expiries"], task["parks"]) == ("succeeded", 0, 0, 2)
    assert task["result"]["result"] == [{"asked": 2}, {"checkpoint": {"asked": 2}}]


async def test_a_parent_parks_until_its_children_have_ended_and_is_told_how(gate: AsyncHttp) -> None:
    seen: list[Any] = []

    async def parent(payload: Any, job: Job) -> Any:
        seen.append(job.children)
        if job.children is None:
            for number in range(2):
                await gate.call("create_task", type="t", payload={"child": number}, parent_task_id=job.task_id,
                                idempotency_key=f"{job.task_id} {number}", max_attempts=1)
            raise Park(children="all", checkpoint="asked")
        return [job.checkpoint, sorted(job.children.values())]

    async def either(payload: Any, job: Job) -> Any:
        return await parent(payload, job) if payload is None else 1 // payload["child"]

    task = await run(gate, either)

    assert task["result"]["result"] == ["asked", ["failed", "succeeded"]]
    assert (task["parks"], task["attempt"], seen[0]) == (1, 0, None)
    assert {**task["children"], "ends": None} == {"open": 0, "succeeded": 1, "failed": 1, "canceled": 0, "ends": None}


async def test_a_parent_without_children_that_waits_for_them_fails_and_says_so(gate: AsyncHttp) -> None:
    def work(payload: Any, job: Job) -> None:
        raise Park(children="all")

    task = await run(gate, work)

    assert (task["status"], task["expiries"], task["parks"]) == ("failed", 0, 0)
    assert task["result"]["error"]["code"] == "invalid_state_transition"
    assert "the gate refused the park: task" in task["result"]["error"]["message"]
    assert "has no children to wait for" in task["result"]["error"]["message"]


@pytest.mark.parametrize("more", [{}, {"after": 1, "until": datetime.now(UTC)}])
async def test_a_park_says_its_time_once(more: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"after .* or until"):
        Park(**more)


@pytest.mark.parametrize(("checkpoint", "code"), [("x" * 2000, "TooLarge"), (object(), "TypeError")])
async def test_a_park_whose_checkpoint_cannot_be_kept_fails_the_attempt(
        gate: AsyncHttp, checkpoint: Any, code: str) -> None:
    def work(payload: Any, job: Job) -> None:
        raise Park(after=60, checkpoint=checkpoint)

    task = await run(gate, work, max_attempts=1)

    assert (task["status"], task["result"]["error"]["code"], task["parks"]) == ("failed", code, 0)
