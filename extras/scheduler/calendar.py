"""When a schedule runs: intervals, cron expressions in a time zone, jitter, and missed runs (H.5).

Every function here is pure; none reads a clock.  Times are whole seconds since 1970, in UTC.  A run's time is part of
its idempotency key, so two processes that compute the same run give it the same key.

A cron expression has five fields and means local times of its zone, as in Debian's cron:

- If neither minute nor hour begins with `*`, it names local times.  A time that the clock skips in spring runs at the
  moment of the change; a time that occurs twice in autumn runs once, the first time.
- Otherwise it means "every so often" and runs whenever the local time matches: never in a skipped hour, twice in a
  repeated hour.

cronsim computes the calendar; this module handles the time zone, so that a run never depends on where a search began.
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

from asyncgate.parts.model.durations import DAY_SECONDS

MisfirePolicy = Literal["skip", "catch_up_one", "catch_up_all"]


class Calendar(Protocol):
    """The run times of a schedule."""

    def after(self, moment: float) -> Iterator[int]:
        """Yield the run times after a moment, in order and each once; do not yield the moment itself."""


class Every(Struct, frozen=True):
    """An interval, counted from an anchor; the anchor itself is not a run."""

    anchor: int
    seconds: int

    def after(self, moment: float) -> Iterator[int]:
        """Yield anchor + seconds, anchor + 2 * seconds, and so on."""
        count = max(floor((moment - self.anchor) / self.seconds), 0)
        while True:
            count += 1
            yield self.anchor + count * self.seconds


class Cron:
    """A cron expression of five fields in a time zone; raises ValueError, which says what is wrong."""

    def __init__(self, expr: str, zone: str) -> None:
        self.expr, self.zone = expr, load_zone(zone)
        if len(fields := expr.split()) != 5:
            raise ValueError(f"a cron expression has five fields (minute, hour, day of month, month, day of week), "
                             f"not {len(fields)}: {expr!r}")
        self.on_the_wall = not (fields[0].startswith("*") or fields[1].startswith("*"))
        if next(self._walls(0), None) is None:
            raise ValueError(f"{expr!r} never runs: no date matches it")

    def after(self, moment: float) -> Iterator[int]:
        """Yield the run times after a moment."""
        return self._named(moment) if self.on_the_wall else self._matching(moment)

    def _named(self, moment: float) -> Iterator[int]:
        """Yield the moment of each local time; several times in a skipped hour share one moment."""
        last = moment
        for wall in self._walls(floor(moment) + self._offset(moment)):
            if (run := self._moment_of(wall)) > last:
                last = run
                yield run

    def _moment_of(self, wall: int) -> int:
        first, second = (wall - self._offset_at(wall, fold) for fold in (0, 1))
        if self._offset(first) == wall - first:
            return first
        return self._change(second, first)      # in a gap, fold=0 lies after the change and fold=1 before it

    def _matching(self, moment: float) -> Iterator[int]:
        """Match local times from one change of the UTC offset to the next; in between the offset is constant."""
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
            # Skip days without a match, but never an offset change, because it can repeat matches.
            start = end if self._offset(end) != offset else max(end, run - 2 * DAY_SECONDS)

    def _steady_until(self, start: int) -> int:
        end = start + DAY_SECONDS
        return end if self._offset(end) == self._offset(start) else self._change(start, end)

    def _change(self, before: int, after: int) -> int:
        """Return the first second of the offset that holds at `after`."""
        held = self._offset(after)
        while after - before > 1:
            middle = (before + after) // 2
            before, after = (before, middle) if self._offset(middle) == held else (middle, after)
        return after

    def _walls(self, wall: int) -> Iterator[int]:
        """Yield matching local times, as if the offset never changed; cronsim stops searching after 50 years."""
        from cronsim import CronSim, CronSimError

        try:
            for moment in CronSim(self.expr, datetime.fromtimestamp(wall, UTC).replace(tzinfo=None)):
                yield int(moment.replace(tzinfo=UTC).timestamp())
        except CronSimError as wrong:
            raise ValueError(f"{self.expr!r} is not a cron expression: {str(wrong).lower()}") from None
        except OverflowError:       # after the year 9999
            return

    def _offset(self, moment: float) -> int:
        return utc_offset_seconds(datetime.fromtimestamp(moment, self.zone))

    def _offset_at(self, wall: int, fold: int) -> int:
        return utc_offset_seconds(datetime.fromtimestamp(wall, UTC).replace(tzinfo=self.zone, fold=fold))


def utc_offset_seconds(local: datetime) -> int:
    """Return how many seconds a local time is ahead of UTC."""
    ahead = local.utcoffset()
    assert ahead is not None
    return int(ahead.total_seconds())


def load_zone(name: str) -> ZoneInfo:
    """Return a time zone by its IANA name; raise ValueError if it is unknown."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    try:
        ZoneInfo("Europe/London")
    except ZoneInfoNotFoundError:
        raise ValueError("the scheduler's machine has no time zone database: pip install tzdata") from None
    raise ValueError(f"{name!r} is not a time zone; use an IANA name such as Europe/Berlin or UTC")


class Timing(Struct, frozen=True):
    """The run times of one schedule, and when each of them is due: up to `jitter` seconds later, but always before
    the next run.  The delay of a run is derived from its id and time, so it is the same after a restart."""

    schedule_id: str
    calendar: Calendar
    jitter: int = 0

    def after(self, moment: float) -> Iterator[tuple[int, float]]:
        """Yield the run times after a moment, each with its due time."""
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
        """Return the last `count` expected run times without computing all of them."""
        width = 60.0
        while True:
            start = max(since, until - width)
            runs = deque(self.expected(start, until), maxlen=count)
            if len(runs) == count or start <= since:
                return list(runs)
            width *= 4


# H.5.  The newest expected run is the current one, however late it is; the earlier ones were missed.


def find_due_runs(timing: Timing, policy: MisfirePolicy, since: float, now: float, most: int = 500) -> list[int]:
    """Return the runs to create at `now`, oldest first; runs up to `since` are settled.

    The last of them settles all before it.  catch_up_all creates every missed run, at most `most` per call.
    """
    return CHOICES[policy](timing, since, now, most)


CHOICES: dict[str, Callable[[Timing, float, float, int], list[int]]] = {
    "skip": lambda timing, since, now, most: timing.newest(since, now, 1),
    "catch_up_one": lambda timing, since, now, most: timing.newest(since, now, 2),
    "catch_up_all": lambda timing, since, now, most: list(islice(timing.expected(since, now), most)),
}


def format_time(moment: float, zone: tzinfo = UTC) -> str:
    """Format a time as RFC 3339, to the second: in UTC, or in a time zone."""
    return datetime.fromtimestamp(floor(moment), zone).isoformat()
