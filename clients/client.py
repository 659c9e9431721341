"""The Python client: hand over work and get its outcome, whatever is restarted meanwhile.

    async with AsyncGate(agent_id="ada") as gate:           # ASYNCGATE_URL, ASYNCGATE_API_KEY
        handle = await gate.submit("ocr.page", {"page": 3}, needs={"ocr"}, key="doc-7")
        text = await handle.result()

Every operation is a method beside that, typed: see operations.py, which is made from the gate's own table.  A call that
fails is repeated where that can do no harm, and only for so long; `Refusal` and `Unreachable` say what is wrong.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, Unpack

import msgspec

from asyncgate.clients.call import Call
from asyncgate.clients.http import FIRST_PAUSE, AsyncHttp, Refusal, Unreachable, WrongAddress, pause_after
from asyncgate.clients.operations import CALLS, AsyncOperations, Names, TaskRecord, TaskTerms
from asyncgate.parts.model.wire import Status

if TYPE_CHECKING:
    import httpx2


R = TypeVar("R")
PATIENCE_SECONDS = 30.0     # for a call with all its repetitions, beyond what it asks the gate to wait
QUIET_SECONDS = 1.0         # that a gate may be away before anybody is told
LONG_POLL = 25.0            # that a question for an outcome stays open
OVER = ("succeeded", "failed", "canceled")
# Answers that come before anything is done, and one after which nobody knows.
NOT_DONE = {408, 429, 503}
OUTCOME_UNKNOWN = {"database_unavailable", "unexpected_answer"}
AWAY = {*NOT_DONE, 502, 504}


class TaskFailed(Exception):
    """The task failed for good; `error` is what its worker said, `task` all that is known."""

    def __init__(self, task: TaskRecord) -> None:
        self.task, self.error = task, task.result.error if task.result else None
        super().__init__(f"task {task.task_id} ({task.type}) failed: {brief(self.error)}")


class TaskCanceled(Exception):
    """The task was canceled; `task` is all that is known."""

    def __init__(self, task: TaskRecord) -> None:
        self.task = task
        super().__init__(f"task {task.task_id} ({task.type}) was canceled")


def brief(value: Any) -> str:
    """Write any JSON in one short line."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= 200 else text[:199] + "…"


class Way(Protocol):
    """How requests reach the gate, once, and without a second try."""

    async def __aenter__(self) -> Way:
        """Make ready."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Let go."""

    async def send(self, operation: str, fields: Mapping[str, Any]) -> bytes:
        """Call an operation and return its reply as JSON; raises Refusal or Unreachable."""


class AsyncGate(AsyncOperations):
    """A gate, to await: one connection pool, who asks, and how long to go on trying.

    `agent_id` or `worker_id` say who asks where the credential does not.  One AsyncGate may be used by many tasks.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, *, via: Literal["rest", "mcp"] = "rest",
        agent_id: str | None = None, worker_id: str | None = None, patience_seconds: float = PATIENCE_SECONDS,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self.agent_id, self.worker_id, self.patience_seconds = agent_id, worker_id, patience_seconds
        self.way: Way = way_to(via, url, token, transport)
        self.opened = False

    async def __aenter__(self) -> Self:
        await self.way.__aenter__()
        self.opened = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.way.__aexit__(kind, error, at)

    def speaking_as(self, *, agent_id: str | None = None, worker_id: str | None = None) -> Self:
        """Return this gate for somebody else who asks; both share the connections, and are open as long as this is."""
        other = copy.copy(self)
        other.agent_id, other.worker_id = agent_id, worker_id
        return other

    # Handing over work.

    async def submit(
        self, type: str, payload: Any = None, *, needs: Names = (), key: str | None = None, **terms: Unpack[TaskTerms],
    ) -> Handle:
        """Hand over a task and return its handle; the same `key` again returns the handle of the first task.

        `needs` are the capabilities that a worker must have.  Unless `result_delivery` says otherwise, the result that
        the worker stores with the gate is all that is owed.
        """
        said: dict[str, Any] = {"result_delivery": "inline", **terms}
        wanted = {"capabilities": sorted(needs)} if needs else None
        made = await self.create_task(type, payload=payload, requirements=wanted, idempotency_key=key, **said)
        return self.handle(made.task_id)

    def handle(self, task_id: str) -> Handle:
        """Return the handle of a task that is there already, as after a restart."""
        return Handle(self, task_id)

    # Calling.

    async def ask(self, operation: str, reply: type[R], said: dict[str, Any]) -> R:
        """Call an operation with what was said, and make its reply of what comes back."""
        needed = {"payload"} if said.get("payload_pointer") is None else set()      # None is a payload like another
        fields = {name: value for name, value in said.items()
                  if name != "self" and (value is not None or name in needed)}
        return decode(await self.send(operation, fields), reply)

    async def call(self, operation: str, /, **fields: Any) -> Any:
        """Call an operation by its name and return its reply as plain JSON values."""
        return msgspec.json.decode(await self.send(operation, fields))

    async def send(self, operation: str, fields: Mapping[str, Any]) -> bytes:
        """Call an operation, again and again while that is safe and there is time; return the reply as JSON."""
        if not self.opened:
            raise RuntimeError("a gate is used inside `async with AsyncGate(...) as gate`")
        op = CALLS[operation]
        tries = Tries(op, self._complete(op, fields), self.patience_seconds)
        try:
            async with asyncio.timeout(tries.seconds) as clock:
                while True:
                    try:
                        return await self.way.send(operation, tries.fields())
                    except (Refusal, Unreachable) as error:
                        await asyncio.sleep(tries.pause(error))
        except TimeoutError:
            if not clock.expired():
                raise
            raise tries.too_late() from None

    def _complete(self, op: Call, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Say who asks, where nobody is named, and give the request what makes a repetition harmless."""
        told = {name: value for name, value in fields.items() if value is not None or name == "payload"}
        return repeatable(op, {**self._who(op, told), **told})

    def _who(self, op: Call, told: Mapping[str, Any]) -> dict[str, str]:
        named = {name for name in told if name in WHO}
        if self.agent_id and not named and op.caller == "principal":
            return {"principal_kind": "agent", "principal_id": self.agent_id}
        if self.worker_id and not named and op.caller == "worker":
            return {"worker_id": self.worker_id}
        return {}


log = logging.getLogger("asyncgate.client")

READERS: dict[Any, Callable[[bytes], Any]] = {}
WHO = {"principal_id", "agent_id", "worker_id", "created_by"}


def way_to(via: str, url: str | None, token: str | None, transport: httpx2.AsyncBaseTransport | None) -> Way:
    """Return the way to the gate that was asked for."""
    if via == "rest":
        return AsyncHttp(url, token, transport=transport)
    if via == "mcp":        # imported here: it takes the SDK along, which is large
        from asyncgate.clients.via_mcp import McpWay
        return McpWay(url, token, transport)
    raise ValueError(f"a gate is reached via rest or mcp, not {via!r}")


def decode(text: bytes, reply: type[R]) -> R:
    """Make a reply of its JSON."""
    if reply not in READERS:
        READERS[reply] = msgspec.json.Decoder(reply).decode
    made: R = READERS[reply](text)
    return made


# Trying again.


def repeatable(op: Call, fields: dict[str, Any]) -> dict[str, Any]:
    """Give a request, and each task of a batch, the key by which the gate knows that it has seen it before."""
    made = {name: uuid.uuid4().hex for name in op.keys}
    if op.name == "create_tasks":
        key = uuid.uuid4().hex
        fields["tasks"] = [{"idempotency_key": f"{key}-{number}", **present(task)}
                           for number, task in enumerate(fields.get("tasks", ()))]
    return {**made, **fields}


def present(task: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is null, which means absent."""
    return {name: value for name, value in task.items() if value is not None}


class Tries:
    """The attempts at one call: whether there is another one, and when.

    A read, and a write that the gate knows again, may be repeated whatever happened; any other call only when it was
    certainly not carried out.
    """

    def __init__(self, op: Call, fields: dict[str, Any], patience_seconds: float) -> None:
        self.op, self.said, self.began, self.count = op, fields, time.monotonic(), 0
        self.waits = float(fields.get("wait_seconds", 30.0 if op.name == "run_task" else 0.0))
        self.seconds = patience_seconds + self.waits
        self.last: Exception | None = None
        self.told = False
        self.harmless = op.repeatable

    def fields(self) -> dict[str, Any]:
        """Return the request; one that is repeated asks the gate to wait only for the time that is left."""
        if self.count == 0 or not self.waits:
            return self.said
        left = self.waits - (time.monotonic() - self.began)
        return {**self.said, "wait_seconds": max(round(left, 3), 0.0)}

    def pause(self, error: Refusal | Unreachable) -> float:
        """Return how many seconds to wait before the next attempt; raise the error when there is none."""
        self.count, self.last = self.count + 1, error
        passed = time.monotonic() - self.began
        cut_off = self.count == 1 and isinstance(error, Unreachable) and self.waits and passed > FIRST_PAUSE
        pause = 0.0 if cut_off else pause_after(self.count)     # whoever cut a waiting call off may be back already
        pause += (error.retry_after or 0.0) if isinstance(error, Refusal) else 0.0
        if not self._may_repeat(error) or passed + pause > self.seconds:
            raise error
        if passed > QUIET_SECONDS and not self.told:
            self.told = True
            log.warning("%s: %s; trying on for %.0f s", self.op.name, error, self.seconds - passed)
        return pause

    def _may_repeat(self, error: Refusal | Unreachable) -> bool:
        if isinstance(error, WrongAddress):
            return False
        if isinstance(error, Unreachable):
            return self.harmless or not error.sent
        if error.code in OUTCOME_UNKNOWN:
            return self.harmless and error.status in (502, 503, 504)
        return error.status in NOT_DONE and error.code != "quota_exceeded"

    def too_late(self) -> Exception:
        """Return what to raise when the time is over in the middle of an attempt."""
        return self.last or Unreachable(f"the gate did not answer {self.op.name} within {self.seconds:g} s")


# Waiting for an outcome.


class Handle:
    """A task that was handed over: its id is all that must be remembered."""

    def __init__(self, gate: AsyncGate, task_id: str) -> None:
        self.gate, self.task_id = gate, task_id

    def __repr__(self) -> str:
        return f"<task {self.task_id}>"

    async def task(self) -> TaskRecord:
        """Return all that is known of the task."""
        return await self.gate.get_task(self.task_id)

    async def status(self) -> Status:
        """Return the task's status."""
        return (await self.task()).status

    async def progress(self) -> Any:
        """Return what its worker reported last, or None."""
        return (await self.task()).progress

    async def cancel(self, reason: str | None = None) -> bool:
        """Cancel the task; tell whether it is canceled now, which it is not when it had ended before."""
        return (await self.gate.cancel_task(self.task_id, reason=reason)).status == "canceled"

    async def result(self, timeout: float | None = None) -> Any:  # noqa: ASYNC109  # as asyncio's own waits
        """Wait until the task has ended and return its result.

        A gate that is away is waited for.  Raises TaskFailed, TaskCanceled, or TimeoutError after `timeout` seconds;
        the task itself goes on then.
        """
        ended = await self.ended(timeout)
        if ended.status == "failed":
            raise TaskFailed(ended)
        if ended.status == "canceled":
            raise TaskCanceled(ended)
        return ended.result.result if ended.result else None

    async def ended(self, timeout: float | None = None) -> TaskRecord:  # noqa: ASYNC109
        """Wait until the task has ended, well or not, and return all that is known of it."""
        try:
            async with asyncio.timeout(timeout) as clock:
                return await self._ended()
        except TimeoutError:
            if not clock.expired():
                raise
            raise TimeoutError(f"task {self.task_id} has not ended within {timeout:g} s") from None

    async def _ended(self) -> TaskRecord:
        pauses = 0
        while True:
            asked, least = time.monotonic(), 0.0
            try:
                task = await self.gate.get_task(self.task_id, wait_seconds=LONG_POLL)
                if task.status in OVER:
                    return task
            except Unreachable:
                pass
            except Refusal as no:
                if no.status not in AWAY:
                    raise
                least = no.retry_after or 0.0
            # A gate that stops, or waits for nobody, answers at once: then this does not ask without a pause.
            pauses = 0 if time.monotonic() - asked > LONG_POLL / 2 else pauses + 1
            await asyncio.sleep(least + pause_after(pauses + 1))
