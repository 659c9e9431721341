"""Jobs that run at intervals or when something is due, each in its own loop: a failing job does not stop others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct, field

from asyncgate.parts.process.outages import OFTEN

log = logging.getLogger("asyncgate")


class Alarm:
    """Ends a pause early, at the earliest time set."""

    REST_SECONDS = 0.1      # at least, between two runs: work that falls due meanwhile shares the next run

    def __init__(self) -> None:
        self.rings_at = math.inf        # by the loop's clock
        self.moved = asyncio.Event()

    def set(self, rings_at: float) -> bool:
        """Set the alarm to a time of the loop's clock; return whether that is earlier than before."""
        earlier = rings_at < self.rings_at
        if earlier:
            self.rings_at = rings_at
            self.moved.set()
        return earlier

    async def pause(self, seconds: float) -> None:
        """Wait until the time is over or the alarm rings, then clear the alarm."""
        loop = asyncio.get_running_loop()
        end, soonest = loop.time() + seconds, loop.time() + min(self.REST_SECONDS, seconds)
        while (left := max(min(end, self.rings_at), soonest) - loop.time()) > 0:
            self.moved.clear()
            with contextlib.suppress(TimeoutError):     # wait_for may swallow a cancellation before Python 3.12
                async with asyncio.timeout(left):
                    await self.moved.wait()
        self.rings_at = math.inf


class Duty(Struct):
    """A job that runs at intervals, and its statistics."""

    every_seconds: float
    run: Callable[[], Awaitable[int]]
    alarm: Alarm = field(default_factory=Alarm)
    runs: int = 0
    failures: int = 0
    last_run_at: datetime | None = None
    last_done: int = 0
    done: int = 0           # in all runs
    last_error: str | None = None


class Duties:
    """Runs jobs inside an `async with` block."""

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
            await duty.alarm.pause(duty.every_seconds)

    async def once(self, name: str) -> None:
        """Run one job now; log and count a failure, never raise it."""
        duty = self.duties[name]
        duty.runs, duty.last_run_at = duty.runs + 1, datetime.now(UTC)
        try:
            duty.last_done, duty.last_error = await duty.run(), None
            duty.done += duty.last_done
        except Exception as error:
            duty.failures, duty.last_error = duty.failures + 1, type(error).__name__
            if isinstance(error, OSError | TimeoutError):       # an outage: its cause is elsewhere
                log.error("upkeep: %s failed: %s", name, str(error) or type(error).__name__, extra=OFTEN)
            else:
                log.exception("upkeep: %s failed; retry in %s s", name, duty.every_seconds)

    def report(self) -> dict[str, Any]:
        """Return the statistics of every job."""
        return {name: {"runs": duty.runs, "failures": duty.failures, "last_run_at": duty.last_run_at,
                       "last_done": duty.last_done, "last_error": duty.last_error}
                for name, duty in self.duties.items()}
