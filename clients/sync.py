"""The blocking Python client: `SyncGate` runs an AsyncGate on an event loop in its own thread.

    with SyncGate(agent_id="ada") as gate:
        text = gate.submit("ocr.page", {"page": 3}, needs={"ocr"}, key="doc-7").result(timeout=60)

Each call runs on that loop while the calling thread waits, so both clients behave the same.  Many threads may share
one SyncGate.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, Unpack

from asyncgate.clients import client, operations
from asyncgate.parts.model import wire

R = TypeVar("R")
T = TypeVar("T")


class LoopThread(Generic[T]):
    """An event loop in its own thread: it holds a context manager open and runs coroutines for blocking callers."""

    def __init__(self, what: AbstractAsyncContextManager[T]) -> None:
        self.what = what
        self.opened: Future[T] = Future()
        self.left: Future[None] = Future()
        self.pid = 0        # of the process that has opened it
        self.entered = False        # by `with`, which will close it

    def __enter__(self) -> T:
        with opening.lock:
            return self._enter()

    def _enter(self) -> T:
        if self.is_open() and self.entered:
            raise RuntimeError("this client is open already; leave its `with` block before you enter another")
        self.entered = True
        return self.opened.result() if self.is_open() else self._start()

    def _start(self) -> T:
        # Made here: of a thread from before a fork, Python says in the child that it has ended.
        self.opened, self.left, self.pid = Future(), Future(), 0
        self.thread = threading.Thread(target=lambda: asyncio.run(self._stay()), name="asyncgate", daemon=True)
        self.thread.start()
        try:
            opened = self.opened.result()
        except BaseException:
            self._leave()
            raise
        self.pid = os.getpid()      # last: other threads do not take the lock once they see it
        return opened

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave()
        if self.failed is not None and error is None:
            raise self.failed

    def _leave(self) -> None:
        self.left.set_result(None)
        self.thread.join()

    async def _stay(self) -> None:
        """Enter and exit in one asyncio task: cancel scopes require it."""
        self.loop = asyncio.get_running_loop()
        self.failed: BaseException | None = None
        try:
            async with self.what as opened:
                self.opened.set_result(opened)
                await asyncio.wrap_future(self.left)
        except BaseException as error:
            if self.opened.done():
                self.failed = error
            else:
                self.opened.set_exception(error)

    def is_open(self) -> bool:
        """Whether the loop runs in this process."""
        return self.pid == os.getpid() and not self.left.done()

    def open(self) -> None:
        """Start the loop if it does not run here: it was never started, or this process was forked since."""
        with opening.lock:      # another thread may have begun to do so
            if not self.is_open():
                self.entered = False
                self._start()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the loop and wait for it; an interrupt of the caller cancels the coroutine."""
        try:
            if self.left.done():
                raise RuntimeError(client.CLOSED)
            if not self.is_open():
                self.open()
        except BaseException:
            work.close()
            raise
        call = PendingCall(work)
        try:
            return asyncio.run_coroutine_threadsafe(call.make(), self.loop).result()
        except BaseException:   # an interrupt may come before there is a future to cancel
            with contextlib.suppress(RuntimeError):     # the loop may have ended
                self.loop.call_soon_threadsafe(call.give_up)
            raise

    def iterate(self, items: AsyncIterator[R]) -> Iterator[R]:
        """Yield what an asynchronous iterator yields."""
        async def step() -> list[R]:
            with contextlib.suppress(StopAsyncIteration):
                return [await anext(items)]
            return []
        while page := self.run(step()):
            yield from page


class OpeningLock:
    """A lock that a fork does not inherit locked."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """Make the lock anew."""
        self.lock = threading.Lock()


opening = OpeningLock()


class PendingCall(Generic[R]):
    """One coroutine that a thread waits for; its methods run on the loop."""

    def __init__(self, work: Coroutine[Any, Any, R]) -> None:
        self.work, self.given_up = work, False
        self.task: asyncio.Task[Any] | None = None

    async def make(self) -> R:
        """Run the coroutine."""
        self.task = asyncio.current_task()
        if self.given_up:
            self.work.close()
            raise asyncio.CancelledError
        return await self.work

    def give_up(self) -> None:
        """Cancel the coroutine, whether it has begun or not."""
        self.given_up = True
        if self.task:
            self.task.cancel()


class SyncGate(operations.SyncOperations):
    """A blocking client of a gate, with the same methods as AsyncGate.

    The first call opens it, also in a forked child; `with` or `close` closes it.  A web application keeps one.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, *, via: Literal["rest", "mcp"] = "rest",
        agent_id: str | None = None, worker_id: str | None = None,
        patience_seconds: float = client.DEFAULT_PATIENCE_SECONDS, payloads: client.Keeper | None = None,
    ) -> None:
        self.gate = client.AsyncGate(url, token, via=via, agent_id=agent_id, worker_id=worker_id,
                                     patience_seconds=patience_seconds, payloads=payloads)
        self.loop_thread: LoopThread[Any] = LoopThread(self.gate)

    def open(self) -> Self:
        """Open the connections now; else the first call does it."""
        self.loop_thread.open()
        return self

    def close(self) -> None:
        """Close the connections; only `open` opens them again."""
        if self.loop_thread.is_open():
            self.loop_thread.__exit__(None, None, None)
        elif not self.loop_thread.left.done():
            self.loop_thread.left.set_result(None)

    def __enter__(self) -> Self:
        self.loop_thread.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.loop_thread.__exit__(kind, error, at)

    def speaking_as(self, *, agent_id: str | None = None, worker_id: str | None = None) -> Self:
        """Return a client for another caller; it shares this client's connections and closes with this client."""
        other = copy.copy(self)
        other.gate = self.gate.speaking_as(agent_id=agent_id, worker_id=worker_id)
        return other

    def ask(self, operation: str, reply: type[R], arguments: dict[str, Any]) -> R:
        """Call an operation and return its reply; `reply` is the type of this operation's replies."""
        return self.loop_thread.run(self.gate.ask(operation, reply, arguments))

    def call(self, operation: str, /, **fields: Any) -> Any:
        """Call an operation by its name and return its reply as plain JSON values."""
        return self.loop_thread.run(self.gate.call(operation, **fields))

    def each(self, operation: str, /, **fields: Any) -> Iterator[Any]:
        """Yield what a list operation lists, one page after another: `for task in gate.each("list_tasks")`."""
        return self.loop_thread.iterate(self.gate.each(operation, **fields))

    def follow(self, operation: Literal["list_receipts", "list_open_obligations"] = "list_receipts", /,
               **fields: Any) -> Iterator[Any]:
        """Yield receipts as they come, each once and without an end; `since_receipt_id` goes on behind one."""
        return self.loop_thread.iterate(self.gate.follow(operation, **fields))

    def submit(
        self, type: str, payload: Any = None, *, needs: operations.Names = (), key: str | None = None,
        **terms: Unpack[operations.TaskTerms],
    ) -> SyncHandle:
        """Create a task and return its handle; a repeated `key` returns the handle of the first task."""
        handle = self.loop_thread.run(self.gate.submit(type, payload, needs=needs, key=key, **terms))
        return SyncHandle(self.loop_thread, handle)

    def handle(self, task_id: str) -> SyncHandle:
        """Return the handle of an existing task, for example after a restart."""
        return SyncHandle(self.loop_thread, self.gate.handle(task_id))


class SyncHandle:
    """A task that was handed over, with blocking methods; see `Handle`."""

    def __init__(self, loop_thread: LoopThread[Any], handle: client.Handle) -> None:
        self.loop_thread, self.handle, self.task_id = loop_thread, handle, handle.task_id

    def __repr__(self) -> str:
        return repr(self.handle)

    @property
    def payload_differs(self) -> bool:
        """Whether the key had made this task from another request."""
        return self.handle.payload_differs

    def updates(self) -> Iterator[operations.TaskRecord]:
        """Yield the task now, and after each change of its status, hold or progress, until it has ended."""
        return self.loop_thread.iterate(self.handle.updates())

    def stream(self, after: int = 0) -> Iterator[Any]:
        """Yield what the worker prints and streams, as it comes, until the task has ended."""
        return self.loop_thread.iterate(self.handle.stream(after))

    def task(self) -> operations.TaskRecord:
        """Return the whole task."""
        return self.loop_thread.run(self.handle.task())

    def status(self) -> wire.Status:
        """Return the task's status."""
        return self.loop_thread.run(self.handle.status())

    def progress(self) -> Any:
        """Return the worker's latest progress report, or None."""
        return self.loop_thread.run(self.handle.progress())

    def cancel(self, reason: str | None = None) -> bool:
        """Cancel the task; return whether its status is canceled now: False if the task had already ended."""
        return self.loop_thread.run(self.handle.cancel(reason))

    def result(self, timeout: float | None = None, *, type: Any = Any) -> Any:
        """Wait until the task has ended and return its result; see `Handle.result`."""
        return self.loop_thread.run(self.handle.result(timeout, type=type))

    def ended(self, timeout: float | None = None) -> operations.TaskRecord:
        """Wait until the task has ended, in success or not, and return the whole task."""
        return self.loop_thread.run(self.handle.ended(timeout))
