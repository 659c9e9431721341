"""Clocks that jump: what a gate of torture runs first, and the times of its clients' calls, told by its own clock.

A gate on SQLite goes by the clock of its machine, and `SteadyClock` keeps it from jumping with that: it only goes
faster or slower by a tenth.  A jump meanwhile is none; behind a kill a gate goes on from what is stored, or from a
clock that is ahead of it.  So its time and that of the clients part for good.  It notes each reading of its clock, and
before the history is judged, each call is said to have begun and ended at the readings that it lies between.
"""

from __future__ import annotations

import random
import struct
import time
from bisect import bisect_left, bisect_right
from pathlib import Path

from asyncgate.conformance.history import Call

MOST_SECONDS, MOST_DRIFT = 3600.0, 0.01
READING = struct.Struct("dd")       # the real time, and the time of the gate
# A gate whose clock is an hour behind, right or ahead, drifts, and jumps at SIGUSR1: of several, which ask Postgres.
OWN_CLOCK = """
import random, signal, time
real, since, ahead, drift = time.time, time.time(), random.sample([-3600.0, 0.0, 3600.0], 3), random.uniform(-.01, .01)
time.time = lambda: real() + ahead[0] + drift * (real() - since)
signal.signal(signal.SIGUSR1, lambda *_: ahead.append(ahead.pop(0)))
"""
MACHINE_CLOCK = """
import os, struct, time
real, setting, readings = time.time, os.open({setting!r}, os.O_RDONLY), os.open({readings!r}, os.O_WRONLY | os.O_APPEND)
def tell_time():
    now, (ahead, since, drift) = real(), struct.unpack("ddd", os.pread(setting, 24, 0))
    return now + ahead + drift * (now - since)
time.time = tell_time
from asyncgate.parts.model.clock import SteadyClock
read_clock = SteadyClock.__call__
def note_reading(clock):
    now = read_clock(clock)
    os.write(readings, struct.pack("dd", real(), now))
    return now
SteadyClock.__call__ = note_reading
"""


class MachineClock:
    """The clock of the machine of a gate, which may be set while the gate runs and while it does not."""

    def __init__(self, folder: Path) -> None:
        self.setting, self.readings = folder / "setting", folder / "readings"
        self.readings.touch()
        self.set(0.0)
        self.first = MACHINE_CLOCK.format(setting=str(self.setting), readings=str(self.readings))

    def set(self, ahead: float, drift: float = 0.0) -> None:
        """Set the clock to so many seconds ahead, and let it go wrong by a part of what passes from now on."""
        with self.setting.open("r+b" if self.setting.exists() else "wb") as file:
            file.write(struct.pack("ddd", ahead, time.time(), drift))

    def jump(self, draw: random.Random) -> float:
        """Set the clock to a moment within an hour, before or behind, as it drifts; return how far it is ahead then."""
        self.set(ahead := draw.uniform(-MOST_SECONDS, MOST_SECONDS), draw.uniform(-MOST_DRIFT, MOST_DRIFT))
        return ahead

    def translate(self, calls: list[Call]) -> None:
        """Let calls have begun and ended by the clock of the gate.

        What a call does has the time of a reading between its begin and its end, but what it reads may be as old as the
        last one before it began.  A new process may begin a little before the last reading of the one that was killed,
        so it is the least and the greatest of these readings.
        """
        readings = sorted(READING.iter_unpack(self.readings.read_bytes()))
        moments = [moment for moment, _ in readings]
        for call in calls:
            at, end = bisect_left(moments, call.started), bisect_right(moments, call.ended)
            before, within = readings[max(at - 1, 0)], [now for _, now in readings[at:end]]
            if not within:      # nothing was done: it lies behind the last reading
                within = [before[1] + max(moment - before[0], 0.0) for moment in (call.started, call.ended)]
            call.started, call.ended = min(before[1], *within), max(within)
