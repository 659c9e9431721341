"""Rate limits of one gate, counted in memory; `redis` repeats the same arithmetic in Lua."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from asyncgate.parts.identity import limits
from asyncgate.parts.model.settings import Settings

SWEPT = 8       # the most idle buckets that one call removes; more than a call can add


def open_limits(settings: Settings) -> MemoryLimits:
    """Make limits for this process alone."""
    return MemoryLimits()


class Level(Struct, frozen=True, gc=False):
    """The state of a bucket; `tokens` are calls times the window in milliseconds, `last` is the last charge."""

    tokens: int
    at: int
    current: int
    previous: int
    last: int


class MemoryLimits:
    """Limits in a dict; later calls remove buckets that were idle for three windows."""

    degraded = False

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        # By window; the least recently charged bucket comes first, and is the first to be full again.
        self.kept: defaultdict[int, OrderedDict[str, Level]] = defaultdict(OrderedDict)
        self.clock = clock or steady_clock()

    def __len__(self) -> int:
        return sum(map(len, self.kept.values()))

    async def take(self, buckets: Sequence[limits.Bucket], cost: int = 1) -> limits.LimitVerdict:
        return self.take_now(buckets, cost)

    def take_now(self, buckets: Sequence[limits.Bucket], cost: int = 1) -> limits.LimitVerdict:
        """Charge buckets as `take` does, without a coroutine."""
        now, wait, at = self.clock(), 0, 0
        self._sweep(now)
        drawn: list[tuple[limits.Bucket, Level]] = []
        for bucket in buckets:
            if bucket.limit >= 0:
                level = refill(bucket, self.kept[bucket.window_seconds].get(bucket.key), now)
                if (longer := wait_for(bucket, level, cost, now)) > wait:
                    wait, at = longer, len(drawn)
                drawn.append((bucket, level))
        if not drawn:
            return limits.UNLIMITED
        if not wait and cost:
            drawn = [(bucket, self._charged(bucket, level, cost)) for bucket, level in drawn]
        left = [room_left(bucket, level) for bucket, level in drawn]
        at = at if wait else left.index(min(left))
        return limits.verdict_of(drawn[at][0], now, wait, left[at], full_in(*drawn[at]))

    async def give_back(self, bucket: limits.Bucket, cost: int) -> None:
        if (kept := self.kept[bucket.window_seconds].get(bucket.key)) is not None:
            window = bucket.window_seconds * 1000
            tokens = min(min(bucket.limit, bucket.burst) * window, kept.tokens + cost * window)
            self.kept[bucket.window_seconds][bucket.key] = replace(kept, tokens=tokens,
                                                                   current=max(0, kept.current - cost))

    def _charged(self, bucket: limits.Bucket, level: Level, cost: int) -> Level:
        states, window = self.kept[bucket.window_seconds], bucket.window_seconds * 1000
        states[bucket.key] = level = Level(level.tokens - cost * window, level.at, level.current + cost, level.previous,
                                         level.at)
        states.move_to_end(bucket.key)
        return level

    def _sweep(self, now: int) -> None:
        for seconds, states in self.kept.items():
            for _ in range(SWEPT):
                oldest = next(iter(states), None)
                # A bucket is full after two windows; the third is a margin for a clock that is set back.
                if oldest is None or states[oldest].at + 3000 * seconds > now:
                    break
                del states[oldest]

    async def close(self) -> None:
        self.kept.clear()


def refill(bucket: limits.Bucket, kept: Level | None, now: int) -> Level:
    """Bring a bucket up to now: add its gain, and drop calls that have left its windows."""
    window = bucket.window_seconds * 1000
    full = min(bucket.limit, bucket.burst) * window
    if kept is None:
        return Level(full, now, 0, 0, now)
    at = max(now, kept.at)
    tokens, passed = min(full, kept.tokens + (at - kept.at) * bucket.limit), at // window - kept.at // window
    if at - kept.at >= window:      # the last charge was longer ago than any window reaches
        return Level(tokens, at, 0, 0, kept.at)
    if not passed:
        return Level(tokens, at, kept.current, kept.previous, kept.at)
    return Level(tokens, at, 0, kept.current, kept.at)


def wait_for(bucket: limits.Bucket, level: Level, cost: int, now: int) -> int:
    """Return the milliseconds until a bucket has room for a cost, if nobody else draws from it; 0 is at once."""
    window, need = bucket.window_seconds * 1000, cost * bucket.window_seconds * 1000
    if cost > min(bucket.limit, bucket.burst):
        return window
    filling = -(-(need - level.tokens) // bucket.limit) if need > level.tokens else 0
    sliding = sliding_wait(bucket, level, cost)
    if not filling and not sliding:
        return 0
    wait = max(filling, min(sliding, window + level.last - level.at))
    return wait and wait + level.at - now


def sliding_wait(bucket: limits.Bucket, level: Level, cost: int) -> int:
    """Return the milliseconds until enough calls have left the windows."""
    window, room = bucket.window_seconds * 1000, bucket.limit - level.current - cost
    passed = level.at % window
    if room >= 0:
        if level.previous * (window - passed) <= room * window:
            return 0
        return window - passed - room * window // level.previous
    return 2 * window - passed - (bucket.limit - cost) * window // level.current


def room_left(bucket: limits.Bucket, level: Level) -> int:
    """Return how many calls a bucket has room for."""
    window = bucket.window_seconds * 1000
    used = level.previous * (window - level.at % window) + level.current * window
    return max(0, min(level.tokens, bucket.limit * window - used) // window)


def full_in(bucket: limits.Bucket, level: Level) -> int:
    """Return the milliseconds until a bucket holds its burst again."""
    window = bucket.window_seconds * 1000
    return -(-(min(bucket.limit, bucket.burst) * window - level.tokens) // bucket.limit) if bucket.limit else window


def steady_clock() -> Callable[[], int]:
    """Make a clock of epoch milliseconds that nobody can set back."""
    start = time.time() - time.monotonic()
    return lambda: int((start + time.monotonic()) * 1000)


if TYPE_CHECKING:
    _: type[limits.Limits] = MemoryLimits
