"""Workers against a gate in a process of its own: what a task function sees, and what the gate sees of the worker."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import json
import logging
import math
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from asyncgate.clients import AsyncGate
from asyncgate.clients.http import AsyncHttp, Http, Refusal, Unreachable
from asyncgate.clients.worker import Done, Fail, Job, Lost, Retry, Worker
from asyncgate.clients.worker.heart import Heart, Pulse
from asyncgate.clients.worker.state import Letter, Place, StateError, take_place
from tests.support.patience import PATIENCE_SECONDS
from tests.support.unretrieved import cancel_failing

pytestmark = pytest.mark.anyio

TOKEN = "a-token-for-tests"
NUMBER: Any = 404
WORD: Any = "soon"
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


class Door:
    """A port before that of the gate, which can be shut, and which loses an answer when it is told to."""

    def __init__(self, target: str) -> None:
        self.target, self.losing, self.asked = int(target.rpartition(":")[2]), b"", list[str]()
        self.barred = b""       # what is not let through
        self.busy = b""         # what the gate has no time for, once
        self.port, self.server, self.links = 0, None, set[asyncio.Task[None]]()
        self.writers: list[asyncio.StreamWriter] = []

    server: asyncio.Server | None

    @property
    def url(self) -> str:
        """Where the gate is, for those outside."""
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        """Let everybody in."""
        self.server = await asyncio.start_server(self._enter, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def shut(self) -> None:
        """Let nobody in, and cut all connections."""
        if self.server:
            self.server.close()
            self.server = None
        while self.writers:
            writer = self.writers.pop()
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        await asyncio.gather(*self.links, return_exceptions=True)

    def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.server is None:     # the loop had accepted it before the door was shut
            return writer.transport.abort()
        self.writers.append(writer)
        link = asyncio.create_task(self._carry(reader, writer))
        self.links.add(link)
        link.add_done_callback(self.links.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.target)
        self.writers.append(back)
        lost: list[bytes] = []
        up = self._up(reader, back, lost, writer)
        both = [asyncio.create_task(up), asyncio.create_task(self._down(there, writer, lost))]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for stream in (writer, back):
            stream.transport.abort()
        await asyncio.gather(*both, return_exceptions=True)

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lost: list[bytes],
                  home: asyncio.StreamWriter) -> None:
        while part := await reader.read(2**16):
            if self.barred and self.barred in part:
                return
            if self.busy and self.busy in part:
                self.busy = b""
                home.write(b"HTTP/1.1 503 X\r\nretry-after: 0\r\ncontent-length: 0\r\n\r\n")
                continue
            if part.startswith((b"POST ", b"GET ")):
                self.asked.append(part.split()[1].decode())
            if self.losing and self.losing in part:
                lost.append(self.losing)
                self.losing = b""
            writer.write(part)

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lost: list[bytes]) -> None:
        while (part := await reader.read(2**16)) and not lost:
            writer.write(part)


@pytest.fixture
async def door(gate: AsyncHttp) -> AsyncIterator[Door]:
    """A door to the gate."""
    door = Door(gate.url)
    await door.open()
    yield door
    await door.shut()


def through(door: Door, state: Path | None = None, **more: Any) -> Worker:
    return Worker(door.url, "w", token=TOKEN, state=state, declare=False, **more)


def made(gate: AsyncHttp, worker_id: str = "w", state: Path | None = None, **more: Any) -> Worker:
    return Worker(gate.url, worker_id, token=TOKEN, state=state, declare=False, **more)


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


async def until_so(look: Callable[[], Any]) -> Any:
    """The same, for what can be seen without asking the gate."""
    async def seen() -> Any:
        return look()
    return await until(seen)


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
        "code": "invalid_payload", "message": "the payload is invalid for this task: Expected `str`, got `int` - at "
        "`$.document`"}


@pytest.mark.parametrize(("error", "runs", "code"), [
    (Retry("busy", after=0), 3, "retry"), (Fail("no", code="unreadable"), 1, "unreadable"),
    (ConnectionError("gone"), 3, "ConnectionError"), (ValueError("bug"), 1, "ValueError"),
    (KeyError("mine"), 3, "KeyError"), (Fail("a\0b\ud800", detail=object()), 1, "failed"),
    (Fail("deep", detail=json.loads("[" * 80 + "]" * 80)), 1, "payload_too_deep"),
    (SystemExit(3), 1, "RuntimeError"), (StopIteration(), 1, "RuntimeError"), (Fail("no", code=NUMBER), 1, "404"),
    (Retry("soon", after=WORD), 3, "retry"), (Retry("sooner", after=-5), 3, "retry")],
    ids=["retry", "fail", "retried class", "other class", "named class", "strange text", "deep detail", "exit", "stop",
         "number", "no time", "time past"])
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


async def test_a_worker_stops_a_limit_of_its_task(gate: AsyncHttp) -> None:
    worker = made(gate)

    @worker.task("t")
    def read(page: Any) -> None:
        raise Retry("slow down", after=60, stop_limit="openai")

    async with at_work(worker):
        await run(gate, limits={"openai": ""}, max_attempts=1)
    limit = await gate.call("get_limit", name="openai")

    assert limit["stopped_until"] is not None


class Odd(BaseException):
    """No Exception, and it cannot even be shown."""

    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(("error", "runs"), [
    (ConnectionError("gone"), 2), (ValueError("bug"), 2), (ExceptionGroup("both", [KeyError(1)]), 2), (Fail("no"), 1),
    (NameError("nobody"), 1), (NotImplementedError(), 1), (Odd(), 1)], ids=repr)
async def test_by_default_an_attempt_follows_every_error_but_fail_and_what_can_never_succeed(
        gate: AsyncHttp, error: BaseException, runs: int) -> None:
    worker, seen = made(gate), []

    @worker.task("t")
    def read(page: Any) -> None:
        seen.append(page)
        raise error

    async with at_work(worker):
        task = await run(gate, max_attempts=2)

    assert (task["status"], len(seen)) == ("failed", runs)


def fetch(page: dict[str, int]) -> int:
    """Fail below another function, with a long text."""
    return page["number"] // 0


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
async def test_the_traceback_of_an_error_is_kept_with_the_failure_unless_it_is_switched_off(
        gate: AsyncHttp, plain: bool, kept: bool, caplog: pytest.LogCaptureFixture) -> None:
    worker = made(gate, tracebacks=kept)

    async def read(page: dict[str, int]) -> int:
        return fetch(page)

    worker.task("t")(fetch if plain else read)

    async with at_work(worker):
        error = (await run(gate, payload={"number": 1}, max_attempts=1))["result"]["error"]

    assert (error["code"], "traceback" in error) == ("ZeroDivisionError", kept)
    if kept:
        first, *_, last = error["traceback"].splitlines()
        assert (first, last.partition(":")[0]) == ("Traceback (most recent call last):", "ZeroDivisionError")
        assert "in fetch" in error["traceback"]
        assert "job.py" not in error["traceback"]
    told = [record.getMessage() for record in caplog.records if "ZeroDivisionError" in record.getMessage() or
            "division" in record.getMessage() or "last attempt" in record.getMessage()]
    assert ["attempt 1 failed" in told[0], "that was its last attempt" in told[1]] == [True, True]


class Hostile(Exception):
    """An error that raises when it is asked for its class."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError("no")


def caused(*errors: Exception) -> Exception:
    """Each error as the cause of the one before."""
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[0]


@pytest.mark.parametrize(("error", "code", "message"), [
    (caused(ValueError("page 3"), RuntimeError("read"), OSError("gone")), "ValueError", "page 3: read: gone"),
    (caused(ValueError("page 3: gone"), OSError("gone")), "ValueError", "page 3: gone"),
    (caused(looped := ValueError("a"), ValueError("b"), looped), "ValueError", "a: b: a: b: a: b"),
    (ExceptionGroup("all", [OSError("the first")]), "ExceptionGroup", "all (1 sub-exception): the first"),
    (Hostile(), "internal_error", "internal error of the worker: RuntimeError")],
    ids=["chain", "said already", "circle", "group", "hostile"])
async def test_an_error_tells_its_causes_and_fails_its_task_whatever_it_is(
        gate: AsyncHttp, error: Exception, code: str, message: str) -> None:
    worker = made(gate, tracebacks=False)

    @worker.task("t")
    def read(page: Any) -> None:
        raise error

    async with at_work(worker):
        task = await run(gate, max_attempts=1)

    assert task["result"]["error"] == {"code": code, "message": message}
    assert "lease.expired" not in await history(gate, task["task_id"])


async def test_a_type_that_is_registered_while_a_claim_waits_is_asked_for_at_once_and_declared(
        gate: AsyncHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(gate.url, "w", token=TOKEN, state=None)
    call, asked, waits = worker.gate.call, list[list[str]](), asyncio.Event()

    async def called(operation: str, **fields: Any) -> Any:
        if operation == "lease_next":
            asked.append(fields["accept_types"])
            waits.set()
        return await call(operation, **fields)
    monkeypatch.setattr(worker.gate, "call", called)
    worker.task("first")(len)

    async with at_work(worker):
        await waits.wait()

        @worker.task("late")
        def late(page: int) -> int:
            return page + 1
        task = await run(gate, "late", 1)

        async def declared() -> Any:
            return (await gate.call("list_types", type="late"))["types"]
        await until(declared)

    assert task["result"]["result"] == 2
    assert asked[:2] == [["first"], ["first", "late"]]


async def test_a_traceback_is_bounded(gate: AsyncHttp) -> None:
    worker = made(gate)

    @worker.task("t")
    def deep(depth: int) -> int:
        if depth:
            return deep(depth - 1)
        raise ValueError("x" * 100_000)

    async with at_work(worker):
        error = (await run(gate, payload=200, max_attempts=1))["result"]["error"]

    assert len(error["traceback"]) <= 4000


@pytest.mark.parametrize("way", ["partial", "partial of a method", "decorator", "wraps", "future", "nested"])
async def test_whatever_can_be_awaited_is_awaited(gate: AsyncHttp, way: str) -> None:
    async def read(page: Page, *, add: int = 1) -> int:
        await asyncio.sleep(0)
        return page.pages + add

    def plain(page: Page) -> Any:
        return read(page)

    @functools.wraps(read)
    def wrapped(*given: Any) -> Any:
        return read(*given)

    async def nested(page: Page) -> Any:
        return read(page)

    class Reader:
        async def read(self, page: Page, add: int) -> int:
            return page.pages + add

    async def future(page: Page) -> Any:
        return asyncio.ensure_future(read(page))

    worker = made(gate)
    functions: dict[str, Callable[..., Any]] = {
        "partial": functools.partial(read, add=1), "partial of a method": functools.partial(Reader().read, add=1),
        "decorator": plain, "wraps": wrapped, "future": future, "nested": nested}
    worker.task("t")(functions[way])

    async with at_work(worker):
        task = await run(gate, payload={"document": "a", "pages": 2}, max_attempts=1)

    assert task["result"].get("result") == 3


async def test_a_lost_lease_cancels_an_async_function_behind_a_plain_one(gate: AsyncHttp) -> None:
    worker, begun, canceled = made(gate), asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            canceled.set()

    worker.task("t")(lambda page: wait())
    async with at_work(worker):
        made_task = await gate.call("create_task", type="t", payload=None)
        await begun.wait()
        await gate.call("cancel_task", task_id=made_task["task_id"])
        await canceled.wait()


def yields(page: Any) -> Any:
    yield page


async def yields_too(page: Any) -> Any:
    yield page


class Opaque:
    """Nothing that JSON has a word for."""


def takes_opaque(page: Opaque) -> None: ...
def takes_many(page: list[Opaque | int]) -> None: ...
def gives_opaque(page: Any) -> Opaque | None: raise NotImplementedError
def gives_path(page: Any) -> dict[str, list[Path]]: raise NotImplementedError
async def gives_opaque_later(page: Any) -> Opaque: raise NotImplementedError


@pytest.mark.parametrize("function", [yields, yields_too, takes_opaque, takes_many, gives_opaque, gives_path,
                                      gives_opaque_later, functools.partial(gives_opaque)])
def test_a_function_of_which_json_cannot_express_payload_or_result_is_refused_when_it_is_registered(
        function: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot be a task function|yields"):
        Worker("http://127.0.0.1:9", "w", state=None).task("t")(function)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
@pytest.mark.parametrize(("error", "code"), [
    (Odd(), "Odd"), (SystemExit(3), "RuntimeError"), (KeyboardInterrupt(), "RuntimeError")],
    ids=["odd", "exit", "ctrl-c"])
async def test_whatever_a_function_raises_ends_its_task_and_not_its_worker(
        gate: AsyncHttp, error: BaseException, code: str, plain: bool) -> None:
    worker = made(gate)

    def read(page: Any) -> None:
        raise error

    async def read_async(page: Any) -> None:
        raise error

    worker.task("t")(read if plain else read_async)
    worker.task("good")(lambda page: "done")

    async with at_work(worker):
        task = await run(gate, max_attempts=1)
        good = await run(gate, "good")

    assert (task["status"], task["result"]["error"]["code"]) == ("failed", code)
    assert good["result"]["result"] == "done"


async def test_a_plain_function_that_raises_a_cancellation_is_not_waited_for_for_ever(gate: AsyncHttp) -> None:
    worker = made(gate)

    @worker.task("t")
    def read(page: Any) -> None:
        raise asyncio.CancelledError

    async with at_work(worker):
        task = await run(gate, max_attempts=1)

    assert (task["status"], task["result"]["error"]["code"]) == ("failed", "RuntimeError")


@pytest.mark.parametrize("result", [object(), float, {"big": "x" * 1_100_000}], ids=["object", "class", "too large"])
async def test_a_result_that_cannot_be_told_fails_the_task(gate: AsyncHttp, result: Any) -> None:
    worker = made(gate)
    worker.task("t")(lambda page: result)

    async with at_work(worker):
        task = await run(gate, max_attempts=3)

    assert (task["status"], task["attempt"]) == ("failed", 0)
    assert task["result"]["error"]["code"] in ("invalid_result", "payload_too_large")


@pytest.mark.parametrize(("result", "path"), [
    ({"loss": [0.5, math.nan], "note": None}, "result.loss[1] is nan"), (-math.inf, "result is -inf"),
    (Done(1, artifacts=[{"score": math.inf}]), "artifacts[0].score is inf"),
    (Done(1, delivery_proof={"at": {"x": math.nan}}), "delivery_proof.at.x is nan")])
async def test_a_number_that_json_does_not_have_fails_the_task_and_is_named(
        gate: AsyncHttp, result: Any, path: str) -> None:
    worker = made(gate)
    worker.task("t")(lambda page: result)

    async with at_work(worker):
        task = await run(gate, max_attempts=3)

    assert (task["status"], task["result"]["error"]["code"]) == ("failed", "invalid_result")
    assert task["result"]["error"]["message"].endswith(f": {path}: JSON has no such number")


@pytest.mark.parametrize("how", ["report", "save"])
async def test_progress_with_a_number_that_json_does_not_have_fails_the_task(gate: AsyncHttp, how: str) -> None:
    worker = made(gate, tracebacks=False)

    @worker.task("t")
    async def train(page: Any, job: Job) -> None:
        getattr(job, how)({"loss": math.nan})

    async with at_work(worker):
        task = await run(gate, max_attempts=1)

    path = {"report": "progress", "save": "checkpoint"}[how]
    assert task["result"]["error"] == {"code": "ValueError", "message": f"{path}.loss is nan: JSON has no such number"}


async def test_a_pause_without_an_end_is_left_to_the_gate(gate: AsyncHttp) -> None:
    worker = made(gate)

    @worker.task("t")
    def read(page: Any) -> None:
        raise Retry("later", after=math.inf)

    async with at_work(worker):
        task = await run(gate, max_attempts=1)

    assert (task["status"], task["result"]["error"]["code"]) == ("failed", "retry")


@pytest.mark.parametrize("function", [lambda: None, lambda a, b, c: None])
async def test_a_function_that_takes_neither_payload_nor_payload_and_job_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="must take one argument"):
        Worker().task("t")(function)


# Leases.


async def test_a_function_that_blocks_the_event_loop_keeps_its_lease(gate: AsyncHttp) -> None:
    worker = made(gate, ttl_seconds=2)

    @worker.task("t")
    async def block(page: Any) -> Any:
        renewals = 0
        with Http(gate.url, TOKEN) as other:    # which waits, and so does the event loop
            while renewals < 4:                 # a third of the lease lies between two
                renewals = other.call("list_leases", worker_id="w")["leases"][0]["renewals"]
        return renewals

    async with at_work(worker):
        task = await run(gate)

    assert (task["status"], task["fence"], task["expiries"]) == ("succeeded", 1, 0)


async def test_an_async_function_is_canceled_when_its_task_is(gate: AsyncHttp) -> None:
    worker, told = made(gate, ttl_seconds=600), []

    @worker.task("t")
    async def read(page: Any, job: Job) -> None:
        job.report("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.append(job.reason)
            raise

    async with at_work(worker):
        task_id = (await gate.call("create_task", type="t", payload=None, priority=1))["task_id"]
        await until(lambda: progress(gate, task_id))
        await gate.call("cancel_task", task_id=task_id)
        await until_so(lambda: not worker.jobs)

    assert told == ["canceled"]


async def progress(gate: AsyncHttp, task_id: str) -> Any:
    return (await gate.call("get_task", task_id=task_id))["progress"]


async def test_a_plain_function_learns_it_from_the_job_and_the_worker_goes_on(gate: AsyncHttp) -> None:
    worker, told = made(gate, ttl_seconds=600), list[Any]()

    @worker.task("t")
    def read(page: Any, job: Job) -> int:
        if page != "cancel me":
            return 1
        job.report("begun")
        told.append(job.lost.wait(PATIENCE_SECONDS))
        with pytest.raises(Lost) as lost:
            job.report("more")
        told.append(lost.value.reason)
        job.check()
        return 2

    async with at_work(worker):
        task_id = (await gate.call("create_task", type="t", payload="cancel me"))["task_id"]
        await until(lambda: progress(gate, task_id))
        await gate.call("cancel_task", task_id=task_id)
        task = await run(gate)

    assert told == [True, "canceled"]
    assert (task["status"], (await ended(gate, task_id))["status"]) == ("succeeded", "canceled")


async def test_a_task_that_takes_longer_than_a_moment_is_running(gate: AsyncHttp) -> None:
    worker = made(gate)

    @worker.task("t")
    async def read(page: Any) -> None:
        await asyncio.Event().wait()

    async with at_work(worker):
        task_id = (await gate.call("create_task", type="t", payload=None))["task_id"]
        await until(lambda: running(gate, task_id))


async def running(gate: AsyncHttp, task_id: str) -> bool:
    return bool((await gate.call("get_task", task_id=task_id))["status"] == "running")


async def test_work_ends_with_its_lease_when_the_gate_is_away_and_no_outage_is_allowed(
        gate: AsyncHttp, door: Door) -> None:
    worker, told, begun = through(door, ttl_seconds=1, outage_seconds=0), list[str](), asyncio.Event()

    @worker.task("t")
    async def read(page: Any, job: Job) -> int:
        if job.fence == 1:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                told.append(job.reason)
        return int(job.fence)

    async with at_work(worker):
        task_id = (await gate.call("create_task", type="t", payload=None))["task_id"]
        await begun.wait()
        await door.shut()
        await until_so(lambda: bool(told))
        await door.open()
        task = await ended(gate, task_id)

    assert told == ["expired"]
    assert (task["result"]["result"], task["expiries"]) == (2, 1)


async def test_work_goes_on_while_a_frozen_gate_serves_nobody_longer_than_its_lease(start: Any) -> None:
    frozen, begun, go = start(*HASTY, database="memory://"), asyncio.Event(), asyncio.Event()
    worker = Worker(frozen.url, "w", token=TOKEN, state=None, ttl_seconds=3)

    @worker.task("t")
    async def read(page: Any, job: Job) -> int:
        begun.set()
        await go.wait()
        return int(job.fence)

    async with at_work(worker), AsyncHttp(frozen.url, TOKEN) as gate:
        task_id = (await gate.call("create_task", type="t", payload=None))["task_id"]
        await begun.wait()
        (pulse,) = worker.heart.pulses.values()
        frozen.process.send_signal(signal.SIGSTOP)
        await until_so(lambda: time.monotonic() > pulse.until + 1)
        frozen.process.send_signal(signal.SIGCONT)
        await until_so(lambda: time.monotonic() < pulse.until)      # it was renewed
        go.set()
        task = await ended(gate, task_id)

    assert (task["result"]["result"], task["expiries"]) == (1, 0)


async def test_no_end_is_told_under_a_lease_that_is_known_to_be_lost(gate: AsyncHttp, door: Door) -> None:
    worker = through(door, ttl_seconds=1, outage_seconds=0)
    begun, go = threading.Event(), threading.Event()

    @worker.task("t")
    def read(page: Any) -> str:
        begun.set()
        go.wait(PATIENCE_SECONDS)
        return "late"

    async with at_work(worker):
        task_id = (await gate.call("create_task", type="t", payload=None))["task_id"]
        await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)
        await door.shut()
        [offer] = (await gate.call("lease_next", worker_id="heir", wait_seconds=30))["tasks"]
        await gate.call("complete", task_id=task_id, lease_id=offer["lease_id"], worker_id="heir", result="in time")
        await until_so(lambda: not worker.heart.pulses)     # it knows: the heir may have been faster than its clock
        await door.open()
        go.set()
        task = await run(gate)

    assert task["status"] == "succeeded"
    assert not any(f"{task_id}/complete" in asked for asked in door.asked)
    assert (await ended(gate, task_id))["result"]["result"] == "in time"


async def test_an_end_that_waits_for_delivery_is_dropped_when_nobody_wants_it_any_more(
        gate: AsyncHttp, door: Door, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    worker = through(door, tmp_path, ttl_seconds=600, delivery_tries=1000)
    worker.task("t")(lambda page: "late")
    door.barred = b"/complete"

    async with at_work(worker):
        task_id = (await gate.call("create_task", type="t", payload=None))["task_id"]
        await until_so(lambda: worker.jobs)
        await gate.call("cancel_task", task_id=task_id)
        await until_so(lambda: not worker.jobs)

    assert "its result is dropped, the lease is lost (canceled)" in caplog.text
    assert not any("/complete" in asked for asked in door.asked)
    assert nothing_kept(tmp_path)


async def test_an_end_that_the_gate_refuses_is_dropped_and_never_sent_again(
        gate: AsyncHttp, door: Door, caplog: pytest.LogCaptureFixture) -> None:
    worker = through(door)

    @worker.task("t")
    async def read(page: Any, job: Job) -> str:
        if page == "cancel me":
            await gate.call("cancel_task", task_id=job.task_id)
        return "done"

    async with at_work(worker):
        canceled = await run(gate, payload="cancel me")
        await run(gate)

    sent = [asked for asked in door.asked if f"{canceled['task_id']}/complete" in asked]
    assert (canceled["status"], len(sent)) == ("canceled", 1)
    assert [record.levelname for record in caplog.records if "its result is dropped" in record.getMessage()
            and "(canceled)" in record.getMessage()] == ["WARNING"]


async def test_an_end_whose_answer_is_lost_is_told_once_more_and_counts_once(gate: AsyncHttp, door: Door) -> None:
    worker = through(door)
    worker.task("t")(lambda page: page)
    door.losing = b"/complete"

    async with at_work(worker):
        task = await run(gate, payload=7)
        await until_so(lambda: sum(f"{task['task_id']}/complete" in asked for asked in door.asked) == 2)

    assert (await history(gate, task["task_id"])).count("task.completed") == 1


async def test_a_claim_whose_answer_is_lost_gets_its_task_all_the_same(gate: AsyncHttp, door: Door) -> None:
    worker = through(door)
    worker.task("t")(lambda page: page)
    await gate.call("create_task", type="other", payload=None)
    task_id = (await gate.call("create_task", type="t", payload=None))["task_id"]
    door.losing = b"/leases/claim"

    async with at_work(worker):
        task = await ended(gate, task_id)

    assert (task["fence"], task["expiries"]) == (1, 0)


# What is handed on.


async def test_a_checkpoint_comes_back_with_the_next_lease_and_reports_keep_it(gate: AsyncHttp) -> None:
    worker, seen = made(gate), list[Any]()

    @worker.task("t")
    def read(page: Any, job: Job) -> str:
        seen.append((job.checkpoint, job.progress))
        if job.attempt == 0:
            job.save({"page": 3})
        job.report({"percent": 10 * job.attempt})
        assert job.flush()
        if job.attempt < 2:
            raise Retry(after=0)
        return "read"

    async with at_work(worker):
        await run(gate, max_attempts=3)

    assert seen == [(None, None), ({"page": 3}, {"checkpoint": {"page": 3}, "percent": 0}),
                    ({"page": 3}, {"checkpoint": {"page": 3}, "percent": 10})]


async def test_progress_that_the_gate_does_not_take_harms_nothing(
        gate: AsyncHttp, caplog: pytest.LogCaptureFixture) -> None:
    worker = made(gate)

    @worker.task("t")
    def read(page: Any, job: Job) -> bool:
        job.report("x" * 70_000)
        return job.flush()

    async with at_work(worker):
        task = await run(gate)

    assert task["result"]["result"] is False
    assert any("its progress is not sent" in record.getMessage() for record in caplog.records)


def test_progress_that_is_refused_takes_no_newer_one_with_it() -> None:
    heart, pulse = Heart("http://127.0.0.1:9", "", {}, 30, 0.0), Pulse({"task_id": "t", "lease_id": "l"}, 100, print)
    refusal, old, new = Refusal(413, {"error": "payload_too_large"}), {"page": 1}, {"page": 2}
    heart.keep(pulse)
    heart.tell(pulse, old)
    heart.tell(pulse, new)      # while the old one is on its way

    heart._refused(pulse, "report_progress", refusal, old)
    assert (pulse.news, pulse.refused, pulse.silent.is_set()) == (new, None, False)

    heart._refused(pulse, "report_progress", refusal, new)
    assert (pulse.news, pulse.refused, pulse.silent.is_set()) == (None, refusal, True)


async def test_several_tasks_are_done_at_a_time_and_no_more(gate: AsyncHttp) -> None:
    worker, doing, most, full = made(gate, concurrency=3), set[str](), list[int](), asyncio.Event()

    @worker.task("t")
    async def read(page: Any, job: Job) -> None:
        doing.add(job.task_id)
        most.append(len(doing))
        if len(doing) == 3:
            full.set()
        await full.wait()
        await asyncio.sleep(0.05)       # in which a fourth one could begin
        doing.remove(job.task_id)

    async with at_work(worker):
        await asyncio.gather(*(run(gate) for _ in range(12)))

    assert max(most) == 3


async def test_a_worker_takes_what_it_has_functions_and_capabilities_for(gate: AsyncHttp) -> None:
    worker = made(gate, capabilities=["ocr"])
    worker.task("a", "b")(lambda page: "read")

    async with at_work(worker):
        others = [await gate.call("create_task", type="c", payload=None),
                  await gate.call("create_task", type="a", payload=None, requirements={"capabilities": ["gpu"]})]
        done = [await run(gate, "a"), await run(gate, "b", requirements={"capabilities": ["ocr"]})]

    assert [task["status"] for task in done] == ["succeeded"] * 2
    assert [(await gate.call("get_task", task_id=task["task_id"]))["status"] for task in others] == ["queued"] * 2


@pytest.mark.parametrize("worker_id", [None, "ocr-1"])
@pytest.mark.parametrize("kind", ["worker", "service"])
async def test_an_issued_key_of_a_worker_is_enough(
        gate: AsyncHttp, tmp_path: Path, kind: str, worker_id: str | None) -> None:
    """The worker asks the gate who it is; nobody has to say it twice."""
    key = await gate.call("issue_key", name="ocr", principal_kind=kind, principal_id="ocr-1", role="worker")
    worker = Worker(gate.url, worker_id, token=key["api_key"], ttl_seconds=3, state=tmp_path)
    place = take_place(tmp_path, "ocr-1")
    await gate.call("create_task", type="t", payload=0)
    async with AsyncHttp(gate.url, key["api_key"]) as held:
        [offer] = (await held.call("lease_next", worker_instance_id=place.instance_id))["tasks"]
    place.close()

    @worker.task("t")
    async def read(page: Any, job: Job) -> Any:
        job.save(page)
        if page:
            await until(lambda: running(gate, job.task_id))
        return job.fence

    async with at_work(worker):
        tasks = [await ended(gate, offer["task_id"]), await run(gate, payload=1)]

    assert [task["result"]["result"] for task in tasks] == [1, 1]
    assert (worker.worker_id, worker.worker_kind) == ("ocr-1", kind)


async def test_a_worker_with_the_shared_token_and_no_name_has_its_hosts(gate: AsyncHttp) -> None:
    worker = Worker(gate.url, token=gate.token, state=None)

    @worker.task("t")
    async def read(page: Any) -> Any:
        return page

    async with at_work(worker):
        assert (await run(gate, payload=1))["result"]["result"] == 1

    assert worker.worker_id == socket.gethostname()


def test_a_gate_that_only_this_loop_reaches_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a gate on a port"):
        Worker(AsyncGate("http://localhost", transport=httpx2.AsyncHTTPTransport()))


# Over several lives.


async def test_an_end_that_no_gate_hears_of_is_kept_and_told_when_it_is_back(
        gate: AsyncHttp, door: Door, tmp_path: Path) -> None:
    worker = through(door, tmp_path, delivery_tries=2)

    @worker.task("t")
    async def read(page: Any) -> str:
        await door.shut()
        return "done"

    async with at_work(worker):
        task_id = (await gate.call("create_task", type="t", payload=None))["task_id"]
        letters = await until_so(lambda: kept(tmp_path))
        mode = letters.stat().st_mode & 0o777
        [letter] = [json.loads(line) for line in letters.read_text().splitlines()]
        await door.open()
        task = await ended(gate, task_id)
        await until_so(lambda: nothing_kept(tmp_path))

    assert (letter["operation"], letter["fields"]["result"], mode) == ("complete", "done", 0o600)
    assert (task["result"]["result"], task["fence"]) == ("done", 1)


@pytest.mark.parametrize("hangs", [False, True], ids=["refused", "silent"])
async def test_an_end_is_on_disk_as_soon_as_the_gate_does_not_take_it_at_once(
        gate: AsyncHttp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool) -> None:
    worker, back, tries = made(gate, state=tmp_path), asyncio.Event(), 0
    call, keep, written = worker.gate.call, Place.keep, list[Letter]()

    async def called(operation: str, **fields: Any) -> Any:
        nonlocal tries
        if operation == "complete" and not back.is_set():
            tries += 1
            if hangs:
                await back.wait()
            raise Unreachable("away")
        return await call(operation, **fields)

    def counted(place: Place, letter: Letter) -> str:
        written.append(letter)
        return keep(place, letter)
    monkeypatch.setattr(worker.gate, "call", called)
    monkeypatch.setattr(Place, "keep", counted)
    worker.task("t")(lambda page: "done")

    async with at_work(worker):
        task_id = (await gate.call("create_task", type="t", payload=None))["task_id"]
        await until_so(lambda: kept(tmp_path))
        tries_until_kept = tries
        back.set()
        results = [(await ended(gate, task_id))["result"]["result"], (await run(gate))["result"]["result"]]
        await until_so(lambda: nothing_kept(tmp_path))

    assert results == ["done", "done"]
    assert tries_until_kept < 10
    assert len(written) == 1        # not at each attempt, and not for the task that was delivered at once


async def test_an_end_that_could_not_be_told_cuts_a_waiting_claim_short(
        gate: AsyncHttp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, waiting = made(gate, state=tmp_path, delivery_tries=1, concurrency=2), asyncio.Event()
    call, seen = worker.gate.call, list[str]()

    async def called(operation: str, **fields: Any) -> Any:
        seen.append(operation)
        if (operation, seen.count(operation)) == ("complete", 1):
            raise Unreachable("away")
        if (operation, seen.count(operation)) == ("lease_next", 2):
            waiting.set()
        try:
            return await call(operation, **fields)
        except asyncio.CancelledError:
            seen.append(f"{operation} was cut")
            raise
    monkeypatch.setattr(worker.gate, "call", called)

    @worker.task("t")
    async def read(page: Any) -> str:
        await waiting.wait()
        return "done"

    async with at_work(worker):
        assert (await run(gate))["status"] == "succeeded"

    assert seen.index("complete") < seen.index("lease_next was cut") < len(seen) - seen[::-1].index("complete") - 1


def kept(state: Path) -> Path | None:
    return next((path for path in state.glob("*.letters") if path.read_bytes().endswith(b"\n")), None)


def nothing_kept(state: Path) -> bool:
    return not list(state.glob("*.letters"))


@pytest.mark.parametrize("in_time", [True, False])
async def test_the_next_life_tells_what_the_last_could_not_unless_somebody_else_has_the_task(
        gate: AsyncHttp, door: Door, tmp_path: Path, in_time: bool, caplog: pytest.LogCaptureFixture) -> None:
    worker, begun = through(door, tmp_path, ttl_seconds=600 if in_time else 1), asyncio.Event()

    @worker.task("t")
    async def read(page: Any) -> str:
        await door.shut()
        begun.set()
        return "first"

    async with at_work(worker):
        task_id = (await gate.call("create_task", type="t", payload=None))["task_id"]
        await begun.wait()
    assert kept(tmp_path)
    if not in_time:
        [offer] = (await gate.call("lease_next", worker_id="heir", wait_seconds=30))["tasks"]
        await gate.call("complete", task_id=task_id, lease_id=offer["lease_id"], worker_id="heir", result="second")
    await door.open()
    again = through(door, tmp_path)
    again.task("t")(lambda page: "third")
    async with at_work(again):
        await run(gate)

    assert nothing_kept(tmp_path)
    assert (await ended(gate, task_id))["result"]["result"] == ("first" if in_time else "second")
    assert (await history(gate, task_id)).count("task.completed") == 1
    assert any("(superseded)" in record.getMessage() or "(completed)" in record.getMessage()
               for record in caplog.records) is not in_time


async def test_what_other_processes_of_a_worker_left_is_told_when_nobody_takes_their_place(
        gate: AsyncHttp, tmp_path: Path) -> None:
    places = [take_place(tmp_path, "w") for _ in range(3)]
    ids = [(await gate.call("create_task", type="t", payload=None))["task_id"] for _ in places]
    for place in places:
        me = {"worker_id": "w", "worker_instance_id": place.instance_id}
        [offer] = (await gate.call("lease_next", **me))["tasks"]
        under = {name: offer[name] for name in ("task_id", "lease_id", "fence")}
        place.keep(Letter("complete", {**me, **under, "result": "kept"}, "away"))
    places[0].close()
    places[2].close()
    worker = made(gate, state=tmp_path)
    worker.task("other")(lambda page: page)

    async with at_work(worker):
        await run(gate, "other")

    statuses = [(await gate.call("get_task", task_id=task_id))["status"] for task_id in ids]
    assert statuses == ["succeeded", "leased", "succeeded"]     # the second place is held, so its letters are, too
    assert [name for name in sorted(os.listdir(tmp_path)) if name.endswith(".letters")] == ["w.2.letters"]
    places[1].close()


async def test_a_worker_that_is_started_again_goes_on_under_its_lease(gate: AsyncHttp, tmp_path: Path) -> None:
    place = take_place(tmp_path, "w")
    me = {"worker_id": "w", "worker_instance_id": place.instance_id}
    task_id = (await gate.call("create_task", type="t", payload="page"))["task_id"]
    [offer] = (await gate.call("lease_next", **me))["tasks"]
    await gate.call("report_progress", **me, task_id=task_id, lease_id=offer["lease_id"],
                    progress={"checkpoint": 3})
    unknown = (await gate.call("create_task", type="unknown", payload=None))["task_id"]
    await gate.call("lease_next", **me)
    place.close()
    worker = made(gate, state=tmp_path)
    worker.task("t")(lambda page, job: [page, job.fence, job.checkpoint])

    async with at_work(worker):
        task = await ended(gate, task_id)

    assert task["result"]["result"] == ["page", 1, 3]
    left = await gate.call("get_task", task_id=unknown)
    assert (left["status"], left["expiries"]) == ("queued", 1)


async def test_a_gate_that_is_busy_for_a_moment_costs_a_restarted_worker_no_lease(
        gate: AsyncHttp, door: Door, tmp_path: Path) -> None:
    place = take_place(tmp_path, "w")
    task_id = (await gate.call("create_task", type="t", payload=None))["task_id"]
    await gate.call("lease_next", worker_id="w", worker_instance_id=place.instance_id)
    place.close()
    door.busy = f"GET /v1/tasks/{task_id}".encode()
    worker = through(door, tmp_path)
    worker.task("t")(lambda page: page)

    async with at_work(worker), asyncio.timeout(PATIENCE_SECONDS):      # the lease lasts longer
        task = await ended(gate, task_id)

    assert (task["status"], task["fence"], door.busy) == ("succeeded", 1, b"")


async def test_two_processes_of_one_worker_keep_out_of_each_others_leases(gate: AsyncHttp, tmp_path: Path) -> None:
    first, second = made(gate, state=tmp_path), made(gate, state=tmp_path)
    going, done = asyncio.Event(), list[str]()

    @first.task("t")
    async def long(page: Any) -> str:
        await going.wait()
        return "first"

    second.task("t")(lambda page: done.append(page))

    async with at_work(first):
        task_id = (await gate.call("create_task", type="t", payload=None))["task_id"]
        await until_so(lambda: bool(first.jobs))
        async with at_work(second):
            await run(gate, payload="other")
            going.set()
            task = await ended(gate, task_id)

    assert (task["result"]["result"], task["fence"], done) == ("first", 1, ["other"])
    assert sorted(os.listdir(tmp_path)) == ["w.1", "w.2"]


def test_letters_survive_a_crash_in_the_middle_of_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place, letters = take_place(tmp_path, "a/b"), [Letter("complete", {"task_id": str(n)}, "away") for n in range(3)]
    for letter in letters:
        place.keep(letter)
    assert place.file
    with place.file.open("ab") as file:
        file.write(b'{"operation": "comp')

    assert place.letters() == letters
    letters.append(Letter("fail", {"task_id": "3"}, "away"))
    place.keep(letters[3])
    assert place.letters() == letters       # the half line has spoiled nothing that came after it
    place.forget(letters[1])
    assert place.letters() == [letters[0], *letters[2:]]
    for letter in letters:
        place.forget(letter)
    place.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a%2Fb.1"]
    assert os.stat(tmp_path / "a%2Fb.1").st_mode & 0o777 == 0o600
    assert "has an invalid line" in caplog.text


def test_a_worker_without_a_folder_tells_an_end_for_as_long_as_it_lives(caplog: pytest.LogCaptureFixture) -> None:
    place, letters = Place(), [Letter("complete", {"task_id": f"t-{n}"}, "away") for n in (1, 2)]
    for letter in letters:
        place.keep(letter)

    assert place.letters() == letters
    assert place.forget(letters[0])
    place.close()
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "task t-2: its result is lost: away"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no disk that is always full")
def test_a_full_disk_spoils_no_letter_and_ends_no_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place, letters = take_place(tmp_path, "w"), [Letter("complete", {"task_id": str(n)}, "away") for n in range(3)]
    assert place.file
    for letter in letters[:2]:
        place.keep(letter)
    beside = tmp_path / "w.1.letters.new"
    beside.symlink_to("/dev/full")

    assert place.keep(letters[2]) == "memory only ([Errno 28] No space left on device)"
    assert place.letters() == letters
    assert (place.forget(letters[0]), place.forget(letters[2])) == (False, True)

    beside.unlink()
    assert (place.forget(letters[0]), place.letters()) == (True, [letters[1]])


def test_a_worker_leaves_the_letters_of_another_whose_name_begins_like_its_own(tmp_path: Path) -> None:
    other = take_place(tmp_path, "web.example")
    other.keep(Letter("complete", {"task_id": "t"}, "away"))
    other.close()

    assert [place.path for place in take_place(tmp_path, "web").abandoned()] == []


def test_a_worker_with_a_very_long_name_has_a_place(tmp_path: Path) -> None:
    places = [take_place(tmp_path, "\u5de5" * 199 + last) for last in "ab"]

    assert len({place.path for place in places}) == 2


@pytest.mark.parametrize("damage", [b"\0" * 32, b"abc\ndef", b"0123"], ids=["zeros", "lines", "cut"])
def test_a_damaged_instance_id_is_replaced_for_good(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "w.1").write_bytes(damage)

    first = take_place(tmp_path, "w")
    first.close()
    again = take_place(tmp_path, "w")
    again.close()

    assert uuid.UUID(first.instance_id) == uuid.UUID(again.instance_id)
    assert (tmp_path / "w.1").read_bytes() == first.instance_id.encode()


@pytest.mark.parametrize("folder", ["file", "file/within"])
def test_a_folder_that_cannot_be_used_is_named_with_a_way_out(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StateError, match=r"cannot be kept in .*/file.*--forget"):
        take_place(tmp_path / folder, "w")


def test_a_worker_that_has_no_home_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)

    with pytest.raises(StateError, match=r"no home directory .*--forget"):
        Worker()


# Stopping and starting.


async def test_a_worker_that_is_told_to_stop_ends_what_it_has_and_takes_no_more(gate: AsyncHttp) -> None:
    worker, begun, go = made(gate), asyncio.Event(), asyncio.Event()

    @worker.task("t")
    async def read(page: Any) -> str:
        begun.set()
        await go.wait()
        return "done"

    async with at_work(worker) as working:
        first = (await gate.call("create_task", type="t", payload=None))["task_id"]
        await begun.wait()
        worker.stop()
        second = (await gate.call("create_task", type="t", payload=None))["task_id"]
        go.set()
        await working

    assert (await ended(gate, first))["result"]["result"] == "done"
    assert (await gate.call("get_task", task_id=second))["status"] == "queued"


async def test_a_worker_that_is_stopped_before_it_runs_ends_that_run_and_works_in_the_next(gate: AsyncHttp) -> None:
    worker = made(gate)
    worker.task("t")(lambda payload: payload)

    worker.stop()
    await asyncio.wait_for(worker.serve(), PATIENCE_SECONDS)
    assert (await gate.call("list_workers"))["workers"] == []

    async with at_work(worker):
        assert (await run(gate, payload=7))["result"]["result"] == 7


@pytest.mark.parametrize("hurried", [True, False])
async def test_what_does_not_end_in_time_is_given_back(gate: AsyncHttp, hurried: bool) -> None:
    worker, begun = made(gate, drain_seconds=600 if hurried else 0.1), asyncio.Event()

    @worker.task("t")
    async def read(page: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with at_work(worker) as working:
        task_id = (await gate.call("create_task", type="t", payload=None))["task_id"]
        await begun.wait()
        worker.stop()
        if hurried:
            worker.stop()
        await working

    assert await history(gate, task_id) == ["task.assigned", "task.accepted", "lease.expired"]
    assert (await gate.call("get_task", task_id=task_id))["expiries"] == 0


async def test_the_lease_of_a_plain_function_that_does_not_end_is_not_given_back(gate: AsyncHttp) -> None:
    worker, begun, go = made(gate), threading.Event(), threading.Event()

    @worker.task("t")
    def read(page: Any) -> None:
        begun.set()
        go.wait(PATIENCE_SECONDS)

    async with at_work(worker):
        task_id = (await gate.call("create_task", type="t", payload=None))["task_id"]
        await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)

    assert (await gate.call("get_task", task_id=task_id))["leased_to"]["id"] == "w"
    go.set()


async def test_a_worker_that_is_refused_from_the_start_ends(gate: AsyncHttp) -> None:
    worker = Worker(gate.url, "w", token="wrong", state=None)
    worker.task("t")(lambda page: page)

    with pytest.raises(Refusal, match="credential") as refusal:
        await worker.serve()

    assert refusal.value.status == 401


async def test_a_worker_whose_claims_are_refused_from_the_start_ends(gate: AsyncHttp) -> None:
    worker = made(gate, ttl_seconds=2**70)
    worker.task("t")(lambda page: page)

    with pytest.raises(Refusal, match="lease_ttl_seconds"):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.serve()


@pytest.mark.parametrize(("option", "number", "wanted"), [
    ("concurrency", 0, "a whole number of 1 or more"), ("concurrency", 1.5, "a whole number of 1 or more"),
    ("ttl_seconds", 0.5, "a whole number of 1 or more"), ("ttl_seconds", math.nan, "a whole number of 1 or more"),
    ("delivery_tries", -1, "a whole number of 1 or more"), ("drain_seconds", -1, "0 or more"),
    ("outage_seconds", math.nan, "0 or more")])
def test_a_worker_says_which_of_its_numbers_is_wrong(option: str, number: float, wanted: str) -> None:
    options: Any = {option: number}
    with pytest.raises(ValueError, match=f"{option} must be {wanted}, not {number}"):
        Worker("http://127.0.0.1:9", "w", state=None, **options)


async def test_a_worker_that_could_do_nothing_is_refused(gate: AsyncHttp) -> None:
    task_id = (await gate.call("create_task", type="t", payload=None))["task_id"]

    with pytest.raises(ValueError, match="no function"):
        await made(gate).serve()

    assert (await gate.call("get_task", task_id=task_id))["status"] == "queued"


async def test_a_worker_that_starts_before_its_gate_waits_for_it(
        gate: AsyncHttp, door: Door, caplog: pytest.LogCaptureFixture) -> None:
    await door.shut()
    worker = through(door)
    worker.task("t")(lambda page: page)

    async with at_work(worker):
        await until_so(lambda: "retrying" in caplog.text)
        await door.open()
        task = await run(gate)

    assert task["status"] == "succeeded"


class Overtaken(Worker):
    """A worker of whose leases one ends just after it has listed them."""

    async def _held(self, resume: bool) -> list[dict[str, Any]]:
        leases = await super()._held(resume)
        if leases:
            await self.gate.call("cancel_task", task_id=leases[0]["task_id"])
        return leases


async def test_a_lease_that_ends_meanwhile_does_not_keep_a_worker_from_giving_back_the_others(gate: AsyncHttp) -> None:
    worker, begun = Overtaken(gate.url, "w", token=TOKEN, state=None, concurrency=3), list[str]()

    @worker.task("t")
    async def read(page: Any, job: Job) -> None:
        begun.append(job.task_id)
        await asyncio.Event().wait()

    async with at_work(worker):
        for _ in range(3):
            await gate.call("create_task", type="t", payload=None)
        await until_so(lambda: len(begun) == 3)

    assert sorted([(await gate.call("get_task", task_id=task_id))["status"] for task_id in begun]) == [
        "canceled", "queued", "queued"]


async def test_a_worker_begins_although_a_lease_of_its_last_life_ends_meanwhile(
        gate: AsyncHttp, tmp_path: Path) -> None:
    place = take_place(tmp_path, "w")
    await gate.call("create_task", type="forgotten", payload=None)
    await gate.call("lease_next", worker_id="w", worker_instance_id=place.instance_id)
    place.close()
    worker = Overtaken(gate.url, "w", token=TOKEN, state=tmp_path)
    worker.task("t")(lambda page: "done")

    async with at_work(worker):
        assert (await run(gate))["status"] == "succeeded"


async def test_the_end_of_a_function_that_nobody_waits_for_is_not_logged_as_an_error(gate: AsyncHttp) -> None:
    worker, begun, problems = made(gate), threading.Event(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    thread: list[threading.Thread] = []

    @worker.task("t")
    def read(page: Any, job: Job) -> None:
        thread.append(threading.current_thread())
        begun.set()
        job.lost.wait(PATIENCE_SECONDS)
        job.check()

    async with at_work(worker):
        await gate.call("create_task", type="t", payload=None)
        await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)
    await asyncio.to_thread(thread.pop().join)
    gc.collect()

    assert problems == [], "asyncio says so of an error that was never retrieved"


async def test_a_worker_runs_in_a_thread_and_is_stopped_from_another(gate: AsyncHttp) -> None:
    worker = Worker(gate.url, "w", token=TOKEN, state=None)
    worker.task("t")(lambda payload: payload)
    thread = threading.Thread(target=worker.run)
    thread.start()

    made = await gate.call("create_task", type="t", payload=7)
    assert (await ended(gate, made["task_id"]))["result"]["result"] == 7
    worker.stop()
    await asyncio.to_thread(thread.join)


async def test_a_call_that_fails_while_the_worker_stops_is_not_logged_as_an_error(gate: AsyncHttp) -> None:
    worker = made(gate)

    assert await cancel_failing(lambda work: worker._unless(asyncio.Event(), work),
                                Unreachable("the gate stops too")) == []


async def test_a_worker_that_is_canceled_while_it_finishes_its_work_leaves_nothing_running(
        gate: AsyncHttp, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    worker, begun, before = made(gate), asyncio.Event(), asyncio.all_tasks()

    @worker.task("t")
    async def work(payload: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with at_work(worker):
        await gate.call("create_task", type="t", payload=None)
        await begun.wait()
        worker.stop()
        await until_so(lambda: "jobs running: 1" in caplog.text)

    assert asyncio.all_tasks() == before
