"""Work that is called for: one round at a time, and another one where it was called meanwhile or planned for later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any


class Rounds:
    """Rounds of a courier: what is called for during a round is done in the next one, so no call is missed."""

    def __init__(self, carry_out: Callable[[], Awaitable[None]], rest_seconds: float = 0.0) -> None:
        self.carry_out, self.rest_seconds = carry_out, rest_seconds     # it handles what goes wrong in a round
        self.called = self.closed = False
        self.running: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def call(self) -> None:
        """Begin a round now, or once more after the one under way."""
        self.called = True
        if self.running is None and not self.closed:
            self.running = asyncio.create_task(self._run())

    def call_later(self, seconds: float) -> None:
        """Begin a round in so many seconds, in place of the one that was planned."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.closed:
            self.timer = asyncio.get_running_loop().call_later(seconds, self.call)

    async def close(self, patience_seconds: float) -> None:
        """Begin no round any more, and wait a moment for the one under way."""
        self.closed = True
        if self.timer is not None:
            self.timer.cancel()
        if (running := self.running) is not None:
            await asyncio.wait([running], timeout=patience_seconds)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while self.called and not self.closed:
                self.called = False
                await self.carry_out()
                await asyncio.sleep(self.rest_seconds)
        finally:
            self.running = None


async def store_meanwhile(
    send: Coroutine[Any, Any, None], store: Callable[[], Awaitable[None]], every_seconds: float
) -> None:
    """Send, and store the results now and then and at the end: a slow receiver may need minutes."""
    sending = asyncio.create_task(send)
    try:
        while not sending.done():
            await asyncio.wait([sending], timeout=every_seconds)
            await store()
        await sending
        await store()       # what ended while the rest was being stored: else it would be sent again
    finally:
        sending.cancel()
