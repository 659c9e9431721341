"""What a run logs is kept with its task where the worker is told so, bounded, and apart from its output."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import pytest

from asyncgate.clients.client import AsyncGate
from asyncgate.clients.worker import Job, Worker
from asyncgate.clients.worker.program import Program

pytestmark = pytest.mark.anyio
TOKEN = "a-token-for-tests"
log = logging.getLogger("shop.orders")


async def run(live: Any, worker: Worker, type: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the entries of a task that this worker has done, and what a reader of its output gets."""
    working = asyncio.create_task(worker.serve())
    async with AsyncGate(live.url, TOKEN, agent_id="ada") as gate:
        handle = await gate.submit(type, 1)
        await handle.ended(30)
        entries = (await gate.call("read_output", task_id=handle.task_id, limit=200))["entries"]
        output = [chunk async for chunk in handle.stream()]
    worker.stop()
    await working
    return entries, output


@pytest.fixture
def worker(live: Any) -> Worker:
    """A worker that keeps what is logged, and one function that logs."""
    worker = Worker(live.url, "w", token=TOKEN, state=None, declare=False, keep_logs=logging.WARNING)

    @worker.task("plain")
    def plain(payload: int, job: Job) -> None:
        log.warning("order %d has no stock", 7)
        job.print("for the customer")
        log.info("beneath the level")

    @worker.task("async")
    async def in_loop(payload: int) -> None:
        await asyncio.to_thread(log.error, "in a thread")

    @worker.task("chatty")
    def chatty(payload: int) -> None:
        for _ in range(300):
            log.warning("x" * 1000)

    return worker


async def test_what_a_function_logs_stands_with_its_task_and_not_in_its_output(live: Any, worker: Worker) -> None:
    entries, output = await run(live, worker, "plain")

    assert [(entry.get("stream"), entry["chunk"]) for entry in entries if "chunk" in entry] == [
        ("log", "WARNING shop.orders: order 7 has no stock\n"), (None, "for the customer\n")]
    assert output == ["for the customer\n"]


async def test_a_line_that_is_logged_in_a_thread_of_an_async_function_is_kept_too(live: Any, worker: Worker) -> None:
    entries, output = await run(live, worker, "async")

    assert [entry["chunk"] for entry in entries if "chunk" in entry] == ["ERROR shop.orders: in a thread\n"]
    assert output == []


async def test_output_that_no_gate_stores_is_cleaned_or_left_out_alone(
        live: Any, worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    deep: Any = 1
    for _ in range(500):
        deep = [deep]

    @worker.task("strange")
    def strange(payload: int, job: Job) -> None:
        job.print("a\0b\ud800")
        list(job.stream(["c\0d", {"\0": "\udfff \U0001f600", "path": "C:\\u0000"}, deep, "e", "x" * 1_500_000, "f"]))
        job.log("g\0h")

    entries, output = await run(live, worker, "strange")

    assert output == ["a\ufffdb?\n", "c\ufffdd", {"\ufffd": "\ufffd \U0001f600", "path": "C:\\u0000"}, "e", "f"]
    assert [entry["chunk"] for entry in entries if entry.get("stream") == "log"] == ["g\ufffdh\n"]
    assert caplog.text.count("a chunk of its output is not sent") == 2


async def test_a_run_that_logs_without_end_keeps_so_much_and_says_that_there_was_more(
        live: Any, worker: Worker) -> None:
    entries, _ = await run(live, worker, "chatty")

    text = "".join(entry["chunk"] for entry in entries if "chunk" in entry)
    assert 95_000 < len(text) < 105_000
    assert text.endswith("(further lines of this run are not kept)\n")


async def test_what_a_program_writes_to_standard_error_is_kept(live: Any) -> None:
    worker = Worker(live.url, "w", token=TOKEN, state=None, declare=False, keep_logs=logging.INFO)
    worker.task("program")(Program([sys.executable, "-c", "import sys; print('beware', file=sys.stderr)"], worker))

    entries, _ = await run(live, worker, "program")

    assert [(entry["stream"], entry["chunk"]) for entry in entries if "chunk" in entry] == [("log", "beware\n")]


async def test_what_a_program_writes_in_parts_is_kept_by_lines(live: Any) -> None:
    """As a bar of progress comes, or a letter that a full buffer cuts."""
    worker = Worker(live.url, "w", token=TOKEN, state=None, declare=False, keep_logs=logging.INFO)
    parts = ("loading ", "done\n", "gr\\303", "\\274n\n\nlast")
    script = "; sleep 0.2; ".join(f"printf '{part}' >&2" for part in parts)
    worker.task("program")(Program(["sh", "-c", script], worker))

    entries, _ = await run(live, worker, "program")

    assert "".join(entry["chunk"] for entry in entries if "chunk" in entry) == "loading done\ngr\u00fcn\n\nlast\n"


async def test_a_worker_that_is_not_told_to_keep_logs_appends_nothing(live: Any, worker: Worker) -> None:
    worker.keep_logs = None

    entries, _ = await run(live, worker, "async")

    assert [entry.get("status") for entry in entries] == ["succeeded"]
