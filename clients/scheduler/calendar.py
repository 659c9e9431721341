"""When a schedule runs: intervals, cron expressions in a time zone, jitter, and what becomes of missed runs (H.5).

Everything here is a pure function of its arguments; nobody reads a clock.  Times are whole seconds since 1970, in UTC:
they are what a run is named by, so two processes that compute the same run name it alike.

A cron expression has five fields and is read on the clock of its zone, as Debian's cron reads it:

- Where neither minute nor hour begins with `*`, it names times on the wall.  A time that the clock skips in spring runs
  at the moment when the clock has skipped it; a time that comes twice in autumn runs once, the first time.
- Otherwise it means "every so often" and runs at each moment at which the clock shows a time that matches: never in an
  hour that is skipped, twice in an hour that comes twice.

cronsim knows the calendar; the time zone is dealt with here, so that a run never depends on where a search began.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, tzinfo
from itertools import chain, islice, pairwise
from math import floor, inf
from typing import Literal, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from msgspec import Struct

DAY = 86_400
MisfirePolicy = Literal["skip", "catch_up_one", "catch_up_all"]


class Calendar(Protocol):
    """The run times of a schedule."""

    def after(self, moment: float) -> Iterator[int]:
        """Yield the run times after a moment, in order and each once; do not yield the moment itself."""


class Every(Struct, frozen=True):
    """An interval, counted from an anchor that is no run time itself."""

    anchor: int
    seconds: int

    def after(self, moment: float) -> Iterator[int]:
        """Yield anchor + seconds, anchor + 2 * seconds, and so on."""
        count = max(floor((moment - self.anchor) / self.seconds), 0)
        while True:
            count += 1
            yield self.anchor + count * self.seconds


class Cron:
    """A cron expression of five fields on the clock of a zone; raises ValueError, which says what is wrong with it."""

    def __init__(self, expr: str, zone: str) -> None:
        self.expr, self.zone = expr, zone_of(zone)
        if len(fields := expr.split()) != 5:
            raise ValueError(f"a cron expression has five fields (minute, hour, day of month, month, day of week), "
                             f"not {len(fields)}: {expr!r}")
        self.on_the_wall = not (fields[0].startswith("*") or fields[1].startswith("*"))
        if next(self._walls(0), None) is None:
            raise ValueError(f"{expr!r} names a time that never comes")

    def after(self, moment: float) -> Iterator[int]:
        """Yield the run times after a moment."""
        return self._named(moment) if self.on_the_wall else self._matching(moment)

    def _named(self, moment: float) -> Iterator[int]:
        """Find the moment of each time on the wall; several times in a skipped hour share one."""
        last = moment
        for wall in self._walls(floor(moment) + self._offset(moment)):
            if (run := self._moment_of(wall)) > last:
                last = run
                yield run

    def _moment_of(self, wall: int) -> int:
        first, second = (wall - self._offset_at(wall, fold) for fold in (0, 1))
        if self._offset(first) == wall - first:
            return first
        return self._change(second, first)      # in a gap fold=0 lies after the change, and fold=1 before it

    def _matching(self, moment: float) -> Iterator[int]:
        """Match what the clock shows from one change of its offset to the next: between them it runs evenly."""
        start = floor(moment)
        while True:
            offset, end = self._offset(start), self._steady_until(start)
            run = None
            for wall in self._walls(start + offset - 1):
                if (run := wall - offset) >= end:
                    break
                if run > moment:
                    yield run
            if run is None or run < end:
                return
            # Days without a match are jumped over, but never a change: it can bring matches back.
            start = end if self._offset(end) != offset else max(end, run - 2 * DAY)

    def _steady_until(self, start: int) -> int:
        end = start + DAY
        return end if self._offset(end) == self._offset(start) else self._change(start, end)

    def _change(self, before: int, after: int) -> int:
        """Return the first second of the offset that holds at `after`."""
        held = self._offset(after)
        while after - before > 1:
            middle = (before + after) // 2
            before, after = (before, middle) if self._offset(middle) == held else (middle, after)
        return after

    def _walls(self, wall: int) -> Iterator[int]:
        """Yield the times on a wall that match, as if the clock there never changed; cronsim gives up in 50 years."""
        from cronsim import CronSim, CronSimError

        try:
            for found in CronSim(self.expr, datetime.fromtimestamp(wall, UTC).replace(tzinfo=None)):
                yield int(found.replace(tzinfo=UTC).timestamp())
        except CronSimError as wrong:
            raise ValueError(f"{self.expr!r} is no cron expression: {str(wrong).lower()}") from None
        except OverflowError:       # the year 9999 is the last one
            return

    def _offset(self, moment: float) -> int:
        return seconds_of(datetime.fromtimestamp(moment, self.zone))

    def _offset_at(self, wall: int, fold: int) -> int:
        return seconds_of(datetime.fromtimestamp(wall, UTC).replace(tzinfo=self.zone, fold=fold))


def seconds_of(local: datetime) -> int:
    """Return how many seconds a clock is ahead of UTC."""
    ahead = local.utcoffset()
    assert ahead is not None
    return int(ahead.total_seconds())


def zone_of(name: str) -> ZoneInfo:
    """Return a time zone by its IANA name; raise ValueError if there is none."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    try:
        ZoneInfo("Europe/London")
    except ZoneInfoNotFoundError:
        raise ValueError("the scheduler's machine has no time zone database (pip install tzdata)") from None
    raise ValueError(f"{name!r} is no time zone; its name is like Europe/Berlin or UTC")


class Timing(Struct, frozen=True):
    """The run times of one schedule, and when each of them is due: up to `jitter` seconds later, but always before
    the next run.  Which delay a run gets follows from its name, so it is the same after a restart."""

    schedule_id: str
    calendar: Calendar
    jitter: int = 0

    def after(self, moment: float) -> Iterator[tuple[int, float]]:
        """Yield the run times after a moment, each with the time when it is due."""
        for run, following in pairwise(chain(self.calendar.after(moment), [inf])):
            yield int(run), self._due(int(run), following)

    def _due(self, run: int, following: float) -> float:
        if not self.jitter:
            return float(run)
        lot = hashlib.sha256(f"{self.schedule_id}:{run}".encode()).digest()
        return run + int.from_bytes(lot[:4]) / 2**32 * min(self.jitter, following - run)

    def expected(self, since: float, until: float) -> Iterator[int]:
        """Yield the run times after `since` that are due by `until`."""
        for run, due in self.after(since):
            if run > until:
                return
            if due <= until:
                yield run

    def newest(self, since: float, until: float, count: int) -> list[int]:
        """Return the last few expected run times, without a walk through all of them."""
        width = 60.0
        while True:
            start = max(since, until - width)
            found = deque(self.expected(start, until), maxlen=count)
            if len(found) == count or start <= since:
                return list(found)
            width *= 4


# H.5.  The newest expected run is the current one, however late it is; those before it were missed.


def to_run(timing: Timing, policy: MisfirePolicy, since: float, now: float, most: int = 500) -> list[int]:
    """Return the runs that a schedule owes at `now`, oldest first, when everything up to `since` is settled.

    The last of them settles all before it.  catch_up_all owes every run, and gives `most` of them at a time.
    """
    return CHOICES[policy](timing, since, now, most)


CHOICES: dict[str, Callable[[Timing, float, float, int], list[int]]] = {
    "skip": lambda timing, since, now, most: timing.newest(since, now, 1),
    "catch_up_one": lambda timing, since, now, most: timing.newest(since, now, 2),
    "catch_up_all": lambda timing, since, now, most: list(islice(timing.expected(since, now), most)),
}


def iso(moment: float, zone: tzinfo = UTC) -> str:
    """Write a time as RFC 3339, to the second: in UTC, or as the clock of a zone shows it."""
    return datetime.fromtimestamp(floor(moment), zone).isoformat()
