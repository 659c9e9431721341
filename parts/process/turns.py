"""Turns of tenants: who has used the interpreter for long waits before the next such call, while others are about.

Python runs one thread at a time, so what the call of one tenant computes keeps the calls of others waiting.  A call
pays for the last one of its tenant and kind: where that took long, this one begins only after a rest of REST times as
long, behind the tenant's other such calls.  Calls that take little never wait here.  Large writes go by slices.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakValueDictionary

R = TypeVar("R")
MIXED_SECONDS = 1.0         # after another tenant's call, in which several tenants are about
LARGE_READ_SECONDS = 0.0001
LARGE_WRITE_SECONDS = 0.0005    # twice as much as a creation; small writes share commits, and take turns by batches
REST = 3                    # so one tenant's large calls have a quarter of the interpreter at most
ROW_SECONDS = 8e-6          # that a row takes, which is read on another thread or by the driver
LONGEST_TURN_SECONDS = 5.0  # before a call; and one that lasts longer, such as a stream, says nothing of the next
MOST_KNOWN = 10_000         # tenants and kinds of calls


class Timed(Coroutine[Any, Any, R]):
    """A call, and for how many seconds of the processor it has used the interpreter."""

    def __init__(self, work: Coroutine[Any, Any, R]) -> None:
        self.work, self.seconds = work, 0.0

    def add_rows(self, number: int) -> None:
        """Add what reading rows has taken outside of this call's own task."""
        self.seconds += number * ROW_SECONDS

    def __await__(self) -> Generator[Any, Any, R]:
        return self

    def __iter__(self) -> Timed[R]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        """Go on until the coroutine waits again."""
        return self._step(self.work.send, value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception where the coroutine waits."""
        return self._step(self.work.throw, *error)

    def close(self) -> None:
        """End the coroutine."""
        self.work.close()

    def _step(self, step: Callable[..., Any], *given: Any) -> Any:
        begun = time.thread_time()
        try:
            return step(*given)
        finally:
            self.seconds += time.thread_time() - begun


counting: ContextVar[Timed[Any] | None] = ContextVar("counting", default=None)      # the call that is carried out


class LoopTurns:
    """Whose large call may begin on the event loop, and what the last one of each kind has cost."""

    def __init__(self) -> None:
        self.last, self.mixed_until = "", 0.0
        self.costs: dict[tuple[str, str], float] = {}
        self.free_at: dict[str, float] = {}

    def is_mixed(self) -> bool:
        """Whether several tenants are about."""
        return time.monotonic() <= self.mixed_until

    async def wait(self, tenant_id: str, operation: str, writes: bool) -> None:
        """Wait for the turn of a call, if it is large and others are about."""
        if tenant_id != self.last:
            self.mixed_until = time.monotonic() + MIXED_SECONDS if self.last else 0.0
            self.last = tenant_id
        cost = self.costs.get((tenant_id, operation), 0.0)
        if cost < (LARGE_WRITE_SECONDS if writes else LARGE_READ_SECONDS) or not self.is_mixed():
            return
        now = time.monotonic()
        begins = min(max(now, self.free_at.get(tenant_id, 0.0)), now + LONGEST_TURN_SECONDS)
        self.free_at[tenant_id] = begins + (1 + REST) * cost
        if begins > now:
            await asyncio.sleep(begins - now)

    async def count(self, work: Coroutine[Any, Any, R], find_kind: Callable[[], tuple[str, str] | None]) -> R:
        """Carry out a call and note what it has cost, under the tenant and the operation that it turned out to be."""
        begun, timed = time.monotonic(), Timed(work)
        token = counting.set(timed)
        try:
            return await timed
        finally:
            counting.reset(token)
            if (kind := find_kind()) is not None and time.monotonic() - begun < LONGEST_TURN_SECONDS:
                self._note(kind, timed.seconds)

    def _note(self, kind: tuple[str, str], seconds: float) -> None:
        if seconds < LARGE_READ_SECONDS:
            self.costs.pop(kind, None)
            return
        if len(self.costs) >= MOST_KNOWN:
            self.costs.clear()
            self.free_at.clear()
        self.costs[kind] = seconds


class SliceTurns:
    """Lets the large calls of a tenant write one slice at a time, and rest for as long, while others are about."""

    def __init__(self) -> None:
        self.locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def take(self, tenant_id: str, mixed: bool) -> AsyncIterator[None]:
        """Hold the tenant's turn to write a slice during a block."""
        if not mixed:
            yield
            return
        async with self.locks.setdefault(tenant_id, asyncio.Lock()):
            begun = time.monotonic()
            yield
            await asyncio.sleep(time.monotonic() - begun)
