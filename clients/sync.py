"""The Python client for programs that do not await: `SyncGate`, an AsyncGate on an event loop of its own thread.

    with SyncGate(agent_id="ada") as gate:
        text = gate.submit("ocr.page", {"page": 3}, needs={"ocr"}, key="doc-7").result(timeout=60)

Nothing is done here: each call is handed to that loop and waited for, so both clients behave the same.  One SyncGate
may be used by many threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, Unpack

from asyncgate.clients.client import PATIENCE_SECONDS, AsyncGate, Handle
from asyncgate.clients.operations import Names, SyncOperations, TaskRecord, TaskTerms
from asyncgate.parts.model.wire import Status

R = TypeVar("R")
T = TypeVar("T")


class Aside(Generic[T]):
    """Keeps something open on an event loop of its own thread, and runs coroutines there for those who cannot await."""

    def __init__(self, what: AbstractAsyncContextManager[T]) -> None:
        self.what = what
        self.opened: Future[T] = Future()
        self.left: Future[None] = Future()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._stay()), name="asyncgate", daemon=True)

    def __enter__(self) -> T:
        self.thread.start()
        try:
            return self.opened.result()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave()
        if self.failed is not None and error is None:
            raise self.failed

    def _leave(self) -> None:
        self.left.set_result(None)
        self.thread.join()

    async def _stay(self) -> None:
        """Enter and leave in one task, as what is built of cancel scopes must be."""
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

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine there and wait for it; whoever is interrupted meanwhile cancels it."""
        if not self.opened.done() or self.left.done():
            work.close()
            raise RuntimeError("this is open only inside its `with` block")
        call = Call(work)
        try:
            return asyncio.run_coroutine_threadsafe(call.make(), self.loop).result()
        except BaseException:   # an interrupt comes at any point, also before there is a future to be cancelled
            with contextlib.suppress(RuntimeError):     # the loop may have ended
                self.loop.call_soon_threadsafe(call.give_up)
            raise


class Call(Generic[R]):
    """One coroutine that is run for a thread that waits; all of this happens on the loop."""

    def __init__(self, work: Coroutine[Any, Any, R]) -> None:
        self.work, self.given_up = work, False
        self.task: asyncio.Task[Any] | None = None

    async def make(self) -> R:
        """Run it."""
        self.task = asyncio.current_task()
        if self.given_up:
            self.work.close()
            raise asyncio.CancelledError
        return await self.work

    def give_up(self) -> None:
        """Cancel it, whether it has begun or not."""
        self.given_up = True
        if self.task:
            self.task.cancel()


class SyncGate(SyncOperations):
    """A gate, to call: what AsyncGate is, for programs that do not await."""

    def __init__(
        self, url: str | None = None, token: str | None = None, *, via: Literal["rest", "mcp"] = "rest",
        agent_id: str | None = None, worker_id: str | None = None, patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.gate = AsyncGate(url, token, via=via, agent_id=agent_id, worker_id=worker_id,
                              patience_seconds=patience_seconds)
        self.aside: Aside[Any] = Aside(self.gate)

    def __enter__(self) -> Self:
        self.aside.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.aside.__exit__(kind, error, at)

    def speaking_as(self, *, agent_id: str | None = None, worker_id: str | None = None) -> Self:
        """Return this gate for somebody else who asks; both share the connections, and are open as long as this is."""
        other = copy.copy(self)
        other.gate = self.gate.speaking_as(agent_id=agent_id, worker_id=worker_id)
        return other

    def ask(self, operation: str, reply: type[R], said: dict[str, Any]) -> R:
        """Call an operation with what was said, and make its reply of what comes back."""
        return self.aside.run(self.gate.ask(operation, reply, said))

    def call(self, operation: str, /, **fields: Any) -> Any:
        """Call an operation by its name and return its reply as plain JSON values."""
        return self.aside.run(self.gate.call(operation, **fields))

    def submit(
        self, type: str, payload: Any = None, *, needs: Names = (), key: str | None = None, **terms: Unpack[TaskTerms],
    ) -> SyncHandle:
        """Hand over a task and return its handle; the same `key` again returns the handle of the first task."""
        return SyncHandle(self.aside, self.aside.run(self.gate.submit(type, payload, needs=needs, key=key, **terms)))

    def handle(self, task_id: str) -> SyncHandle:
        """Return the handle of a task that is there already, as after a restart."""
        return SyncHandle(self.aside, self.gate.handle(task_id))


class SyncHandle:
    """A task that was handed over, for programs that do not await; see `Handle`."""

    def __init__(self, aside: Aside[Any], handle: Handle) -> None:
        self.aside, self.handle, self.task_id = aside, handle, handle.task_id

    def __repr__(self) -> str:
        return repr(self.handle)

    def task(self) -> TaskRecord:
        """Return all that is known of the task."""
        return self.aside.run(self.handle.task())

    def status(self) -> Status:
        """Return the task's status."""
        return self.aside.run(self.handle.status())

    def progress(self) -> Any:
        """Return what its worker reported last, or None."""
        return self.aside.run(self.handle.progress())

    def cancel(self, reason: str | None = None) -> bool:
        """Cancel the task; tell whether it is canceled now, which it is not when it had ended before."""
        return self.aside.run(self.handle.cancel(reason))

    def result(self, timeout: float | None = None) -> Any:
        """Wait until the task has ended and return its result; see `Handle.result`."""
        return self.aside.run(self.handle.result(timeout))

    def ended(self, timeout: float | None = None) -> TaskRecord:
        """Wait until the task has ended, well or not, and return all that is known of it."""
        return self.aside.run(self.handle.ended(timeout))
