"""Jobs that run every so often, each in a loop of its own: one that fails stops no other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

log = logging.getLogger("asyncgate")


class Duty(Struct):
    """A job that runs every so often, and how it has fared."""

    every_seconds: float
    run: Callable[[], Awaitable[int]]
    runs: int = 0
    failures: int = 0
    last_run_at: datetime | None = None
    last_done: int = 0
    last_error: str | None = None


class Duties:
    """Runs duties from `async with` to its end."""

    def __init__(self, duties: dict[str, Duty]) -> None:
        self.duties = duties
        self.loops: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Duties:
        self.loops = [asyncio.create_task(self._loop(name, duty)) for name, duty in self.duties.items()]
        return self

    async def __aexit__(self, *_: object) -> None:
        for loop in self.loops:
            loop.cancel()
        await asyncio.gather(*self.loops, return_exceptions=True)

    async def _loop(self, name: str, duty: Duty) -> None:
        while True:
            await self.once(name)
            await asyncio.sleep(duty.every_seconds)

    async def once(self, name: str) -> None:
        """Run one job now; its failure is logged and counted, and that is all."""
        duty = self.duties[name]
        duty.runs, duty.last_run_at = duty.runs + 1, datetime.now(UTC)
        try:
            duty.last_done, duty.last_error = await duty.run(), None
        except Exception as error:
            duty.failures, duty.last_error = duty.failures + 1, type(error).__name__
            log.exception("upkeep: %s failed; it is tried again in %s s", name, duty.every_seconds)

    def report(self) -> dict[str, Any]:
        """Tell how every job fares."""
        return {name: {"runs": duty.runs, "failures": duty.failures, "last_run_at": duty.last_run_at,
                       "last_done": duty.last_done, "last_error": duty.last_error}
                for name, duty in self.duties.items()}
