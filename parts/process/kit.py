"""What holds against floods and slow peers: a bounded cache, a rate by key, shared calls, and rests between fetches."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST_ENTRIES = 10_000


class Bounded(OrderedDict[K, V]):
    """A mapping of limited size that drops its least recently used entry."""

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        super().__init__()
        self.most = most

    def put(self, key: K, value: V) -> None:
        """Set an entry and mark it as the most recently used."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)


class Rate:
    """So many uses of each key in a window of time, which begins with the first; memory is bounded."""

    def __init__(self, most: int, seconds: float, clock: Callable[[], float]) -> None:
        self.most, self.seconds, self.clock = most, seconds, clock
        self.counted: Bounded[str, tuple[float, int]] = Bounded()       # since when, how often

    def take(self, key: str = "") -> bool:
        """Use a key once; return whether it may be used."""
        allowed = self.over(key) is None
        self.add(key)
        return allowed

    def add(self, *keys: str) -> None:
        """Count one use of each key."""
        for key in keys:
            since, times = self._window(key)
            self.counted.put(key, (since, times + 1))

    def over(self, *keys: str) -> float | None:
        """Return the start of the window in which one of the keys was used up; None if none was."""
        windows = (self._window(key) for key in keys)
        return next((since for since, times in windows if times >= self.most), None)

    def _window(self, key: str) -> tuple[float, int]:
        now = self.clock()
        since, times = self.counted.get(key, (now, 0))
        return (since, times) if 0 <= now - since < self.seconds else (now, 0)      # a clock may be set back


class Flights(Generic[K, V]):
    """Calls under way, one for each key: whoever asks meanwhile shares it, and may hang up without ending it."""

    def __init__(self) -> None:
        self.under_way: dict[K, asyncio.Task[V]] = {}

    async def join(self, key: K, call: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """Return or raise what the call for a key does, which is made unless it is under way."""
        flight = self.under_way.get(key)
        if flight is None or flight.done():
            flight = self.under_way[key] = asyncio.create_task(call())
            flight.add_done_callback(partial(self._end, key))
        return await asyncio.shield(flight)

    def _end(self, key: K, flight: asyncio.Task[V]) -> None:
        if self.under_way.get(key) is flight:
            del self.under_way[key]
        if not flight.cancelled():
            flight.exception()      # retrieved: nobody may wait any more

    def is_current(self, key: K) -> bool:
        """Whether the running call is still the one for its key: `forget` has not been called since it began."""
        return self.under_way.get(key) is asyncio.current_task()

    def forget(self, key: K) -> None:
        """Have the next caller make a call of its own: what the one under way reads has changed since."""
        self.under_way.pop(key, None)


class Refetch:
    """Something that is fetched again now and then: one fetch at a time, and a rest between them, however many ask."""

    def __init__(self, fetch: Callable[[], Coroutine[Any, Any, None]], clock: Callable[[], float]) -> None:
        self.fetch, self.clock, self.begun_at = fetch, clock, float("-inf")
        self.fetching: asyncio.Task[None] | None = None

    def begin(self, after_seconds: float) -> None:
        """Start to fetch, unless the last fetch is under way or began less than `after_seconds` ago."""
        if (self.fetching is None or self.fetching.done()) and self.clock() - self.begun_at >= after_seconds:
            self.begun_at = self.clock()
            self.fetching = asyncio.create_task(self.fetch())

    async def wait(self) -> None:
        """Wait for the fetch that is under way, if one is."""
        if self.fetching is not None and not self.fetching.done():
            await asyncio.shield(self.fetching)


def take_error(work: asyncio.Future[Any]) -> None:
    """Take the error of work, because asyncio logs one that nobody wants: that of a lost lease, for example."""
    if not work.cancelled():
        work.exception()
