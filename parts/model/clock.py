"""Two clocks: one that goes on while nobody runs, and a wall clock that never jumps; and times as they are stored."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime

from asyncgate.parts.model import errors

log = logging.getLogger("asyncgate")
LAST_MOMENT = 253_402_214_400   # 9999-12-31
SLEW = 0.1                      # of the time that passes: how fast a steady clock approaches the wall clock
MOST_AHEAD_SECONDS = 86_400.0   # of an earlier process's clock: one further ahead was wrong, and is not followed
# The monotonic clock stops while a Linux machine sleeps, and BOOTTIME does not; on macOS it is the other way round.
COUNTING = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def elapsed() -> float:
    """Return seconds that nobody can set, and that go on while this process is stopped or its machine sleeps."""
    return time.monotonic() if COUNTING is None else time.clock_gettime(COUNTING)


def instant(moment: datetime | None) -> float | None:
    """Convert a time to the stored form; it must lie between 1970 and 9999, or it could not be shown."""
    if moment is None:
        return None
    if not 0 <= (stored := moment.timestamp()) < LAST_MOMENT:
        raise errors.InvalidRequest(f"{moment.isoformat()} is not a time between 1970 and 9999-12-31T00:00:00Z")
    return stored


class SteadyClock:
    """The time since 1970, which neither jumps nor goes back when somebody sets the clock of the machine.

    It is read from the wall clock once, counted on by `elapsed`, and approaches the wall clock by a tenth of the time
    that passes.  So an hour's jump neither ends a lease nor keeps a lost one, and ids, receipts and schedules stay in
    order.  `after` is the last time that an earlier process has stored: this one does not begin before it.
    """

    def __init__(self, after: float | None = None, *, wall: Callable[[], float] = time.time,
                 elapsed: Callable[[], float] = elapsed) -> None:
        self.wall, self.elapsed, self.lock = wall, elapsed, threading.Lock()
        self.read_at, self.time = elapsed(), wall()
        ahead = 0.0 if after is None else after - self.time
        if ahead > MOST_AHEAD_SECONDS:
            log.warning("the last gate's clock was %.0f s ahead of this machine's, too far to go on from: tasks that "
                        "it delayed wait as much longer", ahead)
        elif ahead > 0:
            self.time += ahead

    def __call__(self) -> float:
        """Return the time now; any thread may ask."""
        with self.lock:
            read_at = self.elapsed()
            passed = max(read_at - self.read_at, 0.0)
            steady = self.time + passed
            off = self.wall() - steady
            self.read_at, self.time = read_at, steady + min(max(off, -SLEW * passed), SLEW * passed)
            return self.time
