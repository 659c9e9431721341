"""How often strangers may make the gate work: so many times in so many seconds, for each key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

MOST_BUDGET_KEYS = 10_000      # that are remembered; the longest unused are forgotten


class Budget:
    """So many uses of each key in a window of time."""

    def __init__(self, most: int, seconds: float, clock: Callable[[], float]) -> None:
        self.most, self.seconds, self.clock = most, seconds, clock
        self.used: OrderedDict[str, tuple[float, int]] = OrderedDict()      # since when, how often

    def take(self, key: str = "") -> bool:
        """Use a key once; return whether it may be used."""
        since, times = self.used.pop(key, (self.clock(), 0))
        if self.clock() - since >= self.seconds:
            since, times = self.clock(), 0
        self.used[key] = since, min(times + 1, self.most + 1)
        if len(self.used) > MOST_BUDGET_KEYS:
            self.used.popitem(last=False)
        return times < self.most
