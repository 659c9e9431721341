"""The Python client: hand over work and get its result, even if the gate or a worker restarts meanwhile.

    async with AsyncGate(agent_id="ada") as gate:           # ASYNCGATE_URL, ASYNCGATE_API_KEY
        handle = await gate.submit("ocr.page", {"page": 3}, needs={"ocr"}, key="doc-7")
        text = await handle.result()

Every operation is also a typed method: see operations.py, generated from the gate's own table.  The client retries a
failed call if a second call is safe, until its patience runs out; then it raises `Refusal` or `Unreachable`.  If what
answers is not a gate, it raises `NotAGate`, a kind of `Unreachable`, at once.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, Unpack

import msgspec

from asyncgate.clients import http, operations
from asyncgate.clients.call import CallSpec
from asyncgate.clients.values import make_reader
from asyncgate.parts.model import wire
from asyncgate.parts.process.spans import PRODUCERS, Tracing, find_tracing

if TYPE_CHECKING:
    import httpx2


R = TypeVar("R")
DEFAULT_PATIENCE_SECONDS = 30.0     # for one call with all its retries, in addition to `wait_seconds`
LONG_POLL_SECONDS = 25.0    # how many seconds one call waits for a task to end
LARGE_REQUEST = 2**20       # bytes; a gate may refuse a larger one before it has read it
ENDED_STATUSES = ("succeeded", "failed", "canceled")
NOT_OPEN = "this client is not open; over MCP call it inside `async with AsyncGate(...) as gate`"
CLOSED = "this client is closed; open() opens it again"
OTHER_LOOP = "this client is open on another event loop, which runs; make one for each loop, or take a SyncGate"
# NOT_DONE: the gate did nothing.  OUTCOME_UNKNOWN: the gate may have carried out the call.
NOT_DONE = {408, 429, 503}
OUTCOME_UNKNOWN = {"database_unavailable", "unexpected_answer"}


class TaskFailed(Exception):
    """The task failed and gets no further attempt; `error` is its worker's error, `task` the whole task."""

    def __init__(self, task: operations.TaskRecord) -> None:
        self.task, self.error = task, task.result.error if task.result else None
        super().__init__(f"task {task.task_id} ({task.type}) failed: {shorten_json(self.error)}")


class TaskCanceled(Exception):
    """The task was canceled; `task` is the whole task."""

    def __init__(self, task: operations.TaskRecord) -> None:
        self.task = task
        super().__init__(f"task {task.task_id} ({task.type}) was canceled")


def shorten_json(value: Any) -> str:
    """Write any JSON value in at most 200 characters."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= 200 else text[:199] + "…"


class Way(Protocol):
    """A transport to the gate: it sends each request once and never retries."""

    async def __aenter__(self) -> Way:
        """Open the connections."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Close the connections."""

    async def send(self, operation: str, fields: Mapping[str, Any]) -> http.CheckedReply:
        """Call an operation and return its reply, checked; raises Refusal or Unreachable."""


class Keeper(Protocol):
    """What keeps large values in a store of the clients: `asyncgate.extras.payloads.Payloads`."""

    async def stow_call(self, operation: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a call with pointers in place of large values."""

    async def fetch_result(self, result: Any, artifacts: Any) -> Any:
        """Return the result of a task, from the store if it is there."""


class Opening:
    """Where a client was opened: connections are for one process and one event loop."""

    pid, closed = 0, False
    loop: asyncio.AbstractEventLoop | None = None
    tracing: Tracing | None = None      # if there was a provider of spans then
    inherited: tuple[Any, ...] = ()     # of before a fork: if they were closed here, the parent could lose a connection

    def is_here(self) -> bool:
        """Whether that was in this process, on this loop; raises RuntimeError if it cannot be opened here by itself."""
        if self.closed:
            raise RuntimeError(CLOSED)
        here = asyncio.get_running_loop()
        if self.pid == os.getpid() and self.loop is not here and self.loop is not None and not self.loop.is_closed():
            raise RuntimeError(OTHER_LOOP)
        return self.pid == os.getpid() and self.loop is here


class AsyncGate(operations.AsyncOperations):
    """An asyncio client of a gate: one connection pool, the caller's name, and how long to retry.

    `agent_id` or `worker_id` names the caller if the credential does not.  Many asyncio tasks may share one AsyncGate.
    The first call opens it, `async with` or `aclose` closes it; a program may keep one as long as it runs.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, *, via: Literal["rest", "mcp"] = "rest",
        agent_id: str | None = None, worker_id: str | None = None, patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
        payloads: Keeper | None = None, transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self.payloads = payloads
        self.agent_id, self.worker_id, self.patience_seconds = agent_id, worker_id, patience_seconds
        self.way: Way = make_way(via, url, token, transport)
        self.lazy = via == "rest"       # a session of MCP belongs to the asyncio task that opens it
        self.opening = Opening()        # shared with those that speak as others

    async def open(self) -> Self:
        """Open the connections now; else the first call does it, also after a fork and on a new event loop."""
        if self.opening.pid not in (0, os.getpid()):
            self.opening.inherited += (getattr(self.way, "client", None),)
        await self.way.__aenter__()
        self.opening.pid, self.opening.loop = os.getpid(), asyncio.get_running_loop()
        self.opening.tracing, self.opening.closed = find_tracing(), False
        return self

    async def aclose(self) -> None:
        """Close the connections; only `open` opens them again."""
        await self.__aexit__(None, None, None)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self.opening.pid == os.getpid() and not self.opening.closed:
            await self.way.__aexit__(kind, error, at)
        self.opening.closed = True

    def speaking_as(self, *, agent_id: str | None = None, worker_id: str | None = None) -> Self:
        """Return a client for another caller; it shares this client's connections and closes with this client."""
        other = copy.copy(self)
        other.agent_id, other.worker_id = agent_id, worker_id
        return other

    # Handing over work.

    async def submit(
        self, type: str, payload: Any = None, *, needs: operations.Names = (), key: str | None = None,
        **terms: Unpack[operations.TaskTerms],
    ) -> Handle:
        """Create a task and return its handle; a repeated `key` returns the handle of the first task.

        If that was made from another request, `payload_differs` of the handle is true, and a warning is logged; so are
        the gate's own, as that nobody serves this type.
        `needs` are the capabilities that a worker must have.  By default (`result_delivery="inline"`) the worker only
        has to store the result in the gate.
        """
        fields: dict[str, Any] = {"result_delivery": "inline", **terms}
        wanted = {"capabilities": sort_names(needs)} if needs else None
        made = await self.create_task(type, payload=payload, requirements=wanted, idempotency_key=key, **fields)
        if made.payload_differs:
            log.warning("the key %r made task %s from another request; that task is returned", key, made.task_id)
        for warning in made.warnings or ():
            log.warning("task %s: %s", made.task_id, warning)
        return Handle(self, made.task_id, payload_differs=made.payload_differs)

    def handle(self, task_id: str) -> Handle:
        """Return the handle of an existing task, for example after a restart."""
        return Handle(self, task_id)

    # Lists and what comes.

    async def each(self, operation: str, /, **fields: Any) -> AsyncIterator[Any]:
        """Yield what a list operation lists, one page after another: `async for task in gate.each("list_tasks")`."""
        while True:
            page = (await self.send(operation, fields)).decoded
            for item in find_listed(page):
                yield item
            if page.next_cursor is None:
                return
            fields[find_position(operation)] = page.next_cursor

    async def follow(self, operation: Literal["list_receipts", "list_open_obligations"] = "list_receipts", /,
                     **fields: Any) -> AsyncIterator[Any]:
        """Yield receipts as they come, each once and without an end; `since_receipt_id` goes on behind one."""
        while True:
            asked = time.monotonic()
            page = (await self.send(operation, {"wait_seconds": LONG_POLL_SECONDS, **fields})).decoded
            for item in find_listed(page):
                yield item
            fields[find_position(operation)] = page.cursor
            if not find_listed(page) and time.monotonic() - asked < http.FIRST_PAUSE:
                await asyncio.sleep(http.SHORT_PAUSE)        # a gate that is stopping answers at once

    # Calling.

    async def ask(self, operation: str, reply: type[R], arguments: dict[str, Any]) -> R:
        """Call an operation and return its reply; `reply` is the type of this operation's replies."""
        needed = {"payload"} if arguments.get("payload_pointer") is None else set()      # None is a valid payload
        fields = {name: value for name, value in arguments.items()
                  if name != "self" and (value is not None or name in needed)}
        made: R = (await self.send(operation, fields)).decoded
        return made

    async def call(self, operation: str, /, **fields: Any) -> Any:
        """Call an operation by its name and return its reply as plain JSON values."""
        return msgspec.json.decode((await self.send(operation, fields)).content)

    async def send(self, operation: str, fields: Mapping[str, Any]) -> http.CheckedReply:
        """Call an operation, with retries while they are safe and time is left; return the reply, checked."""
        if not self.opening.is_here():
            if not self.lazy:
                raise RuntimeError(NOT_OPEN)
            await self.open()
        if self.payloads is not None:
            fields = await self.payloads.stow_call(operation, fields)
        if (tracing := self.opening.tracing) is None:
            return await self._send(operation, fields)
        with tracing.call(operation, fields) as span:
            reply = await self._send(operation, fields)
            if operation in PRODUCERS:
                tracing.note_created(span, reply.decoded)
            return reply

    async def _send(self, operation: str, fields: Mapping[str, Any]) -> http.CheckedReply:
        op = operations.CALLS[operation]
        members = {name: value for name, value in fields.items() if value is not None or name == "payload"}
        tries = Attempts(op, add_repeat_keys(op, {**self._who(op, members), **members}), self.patience_seconds)
        try:
            async with asyncio.timeout(tries.seconds) as clock:
                while True:
                    try:
                        return await self.way.send(operation, tries.fields())
                    except (http.Refusal, http.Unreachable) as error:
                        await asyncio.sleep(tries.pause(error))
        except TimeoutError:
            if not clock.expired():
                raise
            raise tries.last or http.Unreachable(
                f"the gate did not answer {op.name} within {tries.seconds:g} s") from None

    def _who(self, op: CallSpec, fields: Mapping[str, Any]) -> dict[str, str]:
        named = {name for name in fields if name in CALLER_FIELDS}
        if self.agent_id and not named and op.caller == "principal":
            return {"principal_kind": "agent", "principal_id": self.agent_id}
        if self.worker_id and not named and op.caller == "worker":
            return {"worker_id": self.worker_id}
        return {}


log = logging.getLogger("asyncgate.client")


def find_listed(page: Any) -> list[Any]:
    """Return what a page of a list lists."""
    return next(value for name in page.__struct_fields__ if isinstance(value := getattr(page, name), list))


def find_position(operation: str) -> str:
    """Return the field by which a list goes on behind its last page."""
    return "since_receipt_id" if operation in ("list_receipts", "list_open_obligations") else "cursor"


CALLER_FIELDS = {"principal_id", "agent_id", "worker_id", "created_by", "tasker_principal"}


def sort_names(needs: Any) -> list[str]:
    """Return the names of capabilities in order; raises TypeError for a text, whose letters would be the names."""
    if isinstance(needs, str):
        raise TypeError(f"needs is a collection of names, such as {{{needs!r}}}, not a text")
    return sorted(needs)


def make_way(via: str, url: str | None, token: str | None, transport: httpx2.AsyncBaseTransport | None) -> Way:
    """Return the transport to the gate by its name."""
    if via == "rest":
        return http.AsyncHttp(url, token, transport=transport)
    if via == "mcp":        # imported here, because it imports the large MCP SDK
        from asyncgate.clients.via_mcp import McpWay
        return McpWay(url, token, transport)
    raise ValueError(f"via must be 'rest' or 'mcp', not {via!r}")


# Trying again.


def add_repeat_keys(op: CallSpec, fields: dict[str, Any]) -> dict[str, Any]:
    """Add the idempotency keys to a request, or to each task of a batch, so that the gate deduplicates retries."""
    made = {name: uuid.uuid4().hex for name in op.keys}
    if op.name == "create_tasks":
        key = uuid.uuid4().hex
        fields["tasks"] = [{"idempotency_key": f"{key}-{number}", **{name: value for name, value in task.items()
                                                                     if value is not None}}     # null means absent
                           for number, task in enumerate(fields.get("tasks", ()))]
    return {**made, **fields}


class Attempts:
    """The attempts at one call: whether another one is allowed, and when.

    A read, or a write that the gate deduplicates, may always be repeated.  Any other call may be repeated only if the
    gate certainly did not carry it out.
    """

    def __init__(self, op: CallSpec, fields: dict[str, Any], patience_seconds: float) -> None:
        self.op, self.request, self.began, self.count = op, fields, time.monotonic(), 0
        self.waits = float(fields.get("wait_seconds", 30.0 if op.name == "run_task" else 0.0))
        self.seconds = patience_seconds + self.waits
        self.last: Exception | None = None
        self.told, self.broken, self.harmless = False, 0, op.repeatable

    def fields(self) -> dict[str, Any]:
        """Return the request; a repeated one asks the gate to wait only for the time that is left."""
        if self.count == 0 or not self.waits:
            return self.request
        left = self.waits - (time.monotonic() - self.began)
        return {**self.request, "wait_seconds": max(round(left, 3), 0.0)}

    def pause(self, error: http.Refusal | http.Unreachable) -> float:
        """Return how many seconds to wait before the next attempt; raise the error if none is allowed."""
        self.count, self.last = self.count + 1, error
        if isinstance(error, http.Unreachable) and error.size > LARGE_REQUEST:
            self.broken += 1
            if self.broken > 1:     # a gate that restarts does not do that twice in the middle of one request
                raise http.Refusal(413,
                                   {"error": "payload_too_large", "message": "the gate cut the connection twice while "
                                    f"it was sent {error.size:,} bytes: that is more than it takes in a request"})
        passed = time.monotonic() - self.began
        cut_off = self.count == 1 and isinstance(error, http.Unreachable) and self.waits and passed > http.FIRST_PAUSE
        # A gate that restarts cuts waiting calls off, and may be back already.
        pause = 0.0 if cut_off else http.pause_after(self.count)
        pause += (error.retry_after or 0.0) if isinstance(error, http.Refusal) else 0.0
        if not self._may_repeat(error) or passed + pause > self.seconds:
            raise error
        if passed > http.QUIET_SECONDS and not self.told:
            self.told = True
            log.warning("%s: %s; retrying for %.0f s", self.op.name, error, self.seconds - passed)
        return pause

    def _may_repeat(self, error: http.Refusal | http.Unreachable) -> bool:
        if isinstance(error, http.WrongAddress | http.NotAGate):
            return False
        if isinstance(error, http.Unreachable):
            return self.harmless or not error.sent
        if error.code in OUTCOME_UNKNOWN:
            return self.harmless and error.status in (502, 503, 504)
        return error.status in NOT_DONE and error.code != "quota_exceeded"


# Waiting for an outcome.


class Handle:
    """A task that was handed over; to find it again after a restart, keep only its id."""

    def __init__(self, gate: AsyncGate, task_id: str, *, payload_differs: bool = False) -> None:
        self.gate, self.task_id, self.payload_differs = gate, task_id, payload_differs

    def __repr__(self) -> str:
        return f"<task {self.task_id}>"

    async def task(self) -> operations.TaskRecord:
        """Return the whole task."""
        return await self.gate.get_task(self.task_id)

    async def status(self) -> wire.Status:
        """Return the task's status."""
        return (await self.task()).status

    async def progress(self) -> Any:
        """Return the worker's latest progress report, or None."""
        return (await self.task()).progress

    async def updates(self) -> AsyncIterator[operations.TaskRecord]:
        """Yield the task now, and after each change of its status, hold or progress, until it has ended."""
        last = None
        while True:
            task = await self.task()
            if (now := (task.status, task.held, task.progress)) != last:
                yield task
            if task.status in ENDED_STATUSES:
                return
            last = now
            await asyncio.sleep(http.SHORT_PAUSE)

    async def stream(self, after: int = 0) -> AsyncIterator[Any]:
        """Yield what the worker prints and streams, as it comes, until the task has ended.

        `after` is the offset of an entry of `read_output`, behind which this begins.
        """
        while True:
            page = await self.gate.call("read_output", task_id=self.task_id, after=after,
                                        wait_seconds=LONG_POLL_SECONDS)
            for entry in page["entries"]:
                if "chunk" in entry and "stream" not in entry:      # the log is not output
                    yield entry["chunk"]
            if page["ended"]:
                return
            if page["after"] == after:
                await asyncio.sleep(http.SHORT_PAUSE)       # a gate that is stopping answers at once
            after = page["after"]

    async def cancel(self, reason: str | None = None) -> bool:
        """Cancel the task; return whether its status is canceled now: False if the task had already ended."""
        return (await self.gate.cancel_task(self.task_id, reason=reason)).status == "canceled"

    async def result(self, timeout: float | None = None, *, type: Any = Any) -> Any:  # noqa: ASYNC109  # as asyncio
        """Wait until the task has ended and return its result, as a value of this type (a model, say).

        An unreachable gate does not end the wait.  Raises TaskFailed, TaskCanceled, or TimeoutError after `timeout`
        seconds; a timeout does not stop the task.
        """
        ended = await self.ended(timeout)
        if ended.status == "failed":
            raise TaskFailed(ended)
        if ended.status == "canceled":
            raise TaskCanceled(ended)
        outcome = ended.result
        value = outcome.result if outcome else None
        if outcome is not None and self.gate.payloads is not None:
            value = await self.gate.payloads.fetch_result(value, outcome.artifacts)
        return make_reader(type)(value)

    async def ended(self, timeout: float | None = None) -> operations.TaskRecord:  # noqa: ASYNC109
        """Wait until the task has ended, in success or not, and return the whole task."""
        try:
            async with asyncio.timeout(timeout) as clock:
                return await self._ended()
        except TimeoutError:
            if not clock.expired():
                raise
            raise TimeoutError(f"task {self.task_id} has not ended within {timeout:g} s") from None

    async def _ended(self) -> operations.TaskRecord:
        pauses, answered = 0, False
        while True:
            asked, least = time.monotonic(), 0.0
            try:
                task = await self.gate.get_task(self.task_id, wait_seconds=LONG_POLL_SECONDS)
                if task.status in ENDED_STATUSES:
                    return task
                answered = True
            except http.Unreachable as away:
                # Where a gate has answered, a captive portal or a proxy that answers for it goes away again.
                if isinstance(away, http.WrongAddress) or (isinstance(away, http.NotAGate) and not answered):
                    raise
            except http.Refusal as refusal:
                if refusal.status not in http.AWAY_STATUSES:
                    raise
                least = refusal.retry_after or 0.0
            # A gate that is stopping answers long polls at once: pause, so that this loop does not spin.
            pauses = 0 if time.monotonic() - asked > LONG_POLL_SECONDS / 2 else pauses + 1
            await asyncio.sleep(least + http.pause_after(pauses + 1))
