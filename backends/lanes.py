"""Lanes: the distinct (type, capabilities) pairs of a tenant's waiting tasks, so that each pair is matched only once.

A backend keeps one `Lanes` per tenant in memory, beside its table: a claim reads the heads of the lanes that it may
serve.  Other lanes cost a claim nothing, because lanes are indexed by type and by a capability that they need.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from asyncgate import MOST_PAGE_BYTES, matches
from asyncgate.parts.model import stored, wire
from asyncgate.parts.model.pausing import find_pauses
from asyncgate.parts.model.views import measure_task

MOST_PROFILES, MOST_CACHED = 1024, 100_000      # cached profiles of claims, and lanes in all of them


class Portions:
    """Says when the tasks that were read are enough for the claims of a batch: each ends after MOST_PAGE_BYTES.

    A portion is more than that.  All but the last task of a claim are less, so of two portions for each claim, less
    one, every claim finds a whole portion that the others have left, whichever lanes they may serve.
    """

    def __init__(self, claims: int) -> None:
        self.left, self.size = 2 * claims - 1, 0

    def add(self, task: stored.Task, progress: stored.Progress | None) -> bool:
        """Count a task that was read; return whether the tasks are enough now."""
        self.size += measure_task(task, None, progress)
        if self.size > MOST_PAGE_BYTES:
            self.left, self.size = self.left - 1, 0
        return self.left <= 0


class Lanes:
    """The distinct (type, capabilities) pairs of one tenant."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[str, frozenset[str]]] = {}
        self.patterns: dict[int, str] = {}             # of those whose tasks have limits
        self.pauses: stored.Pauses | None = None       # as the last batch with claims has loaded them
        self.version = 0                # the sum of the lanes' ids: shows whether another process changed the table
        self._types: defaultdict[str, set[int]] = defaultdict(set)
        self._needing: defaultdict[str, set[int]] = defaultdict(set)    # by the first capability; "" if none
        # by profile: preferred lanes, others
        self._eligible: dict[Any, tuple[wire.LeaseNext, set[int], set[int]]] = {}
        self._cached = 0

    def learn(self, lane: int, type: str, capabilities: Iterable[str], pattern: str | None = None) -> None:
        """Add a lane; a no-op if it is known."""
        if lane in self.known:
            return
        if pattern is not None:
            self.patterns[lane] = pattern
        needed = frozenset(capabilities)
        self.known[lane] = (type, needed)
        self.version += lane
        self._types[type].add(lane)
        self._needing[min(needed, default="")].add(lane)
        for ask, first, rest in self._eligible.values():
            if matches(type, needed, ask):
                (first if type in (ask.preferred_kinds or ()) else rest).add(lane)
                self._cached += 1

    def forget(self, lanes: Iterable[int]) -> None:
        """Remove lanes in which no task waits any more."""
        gone = set(lanes) & self.known.keys()
        for lane in gone:
            type, needed = self.known.pop(lane)
            self.patterns.pop(lane, None)
            self.version -= lane
            for table, key in ((self._types, type), (self._needing, min(needed, default=""))):
                table[key].discard(lane)
                if not table[key]:
                    del table[key]
        for _, first, rest in self._eligible.values() if gone else ():
            first -= gone
            rest -= gone

    def groups(self, claims: list[wire.LeaseNext], now: float) -> set[frozenset[int]]:
        """Return sets of lanes such that the claims need only the best tasks of each set, enough for all claims.

        Paused lanes are in none: their tasks would be the best ones, and keep others from being found.  So are those
        with limits: their tasks are read by turns.
        """
        stopped = self.find_stopped(now) | self.patterns.keys()
        groups = {frozenset(group - stopped) for ask in {profile_of(ask): ask for ask in claims}.values()
                  for group in self._groups(ask)}
        return groups - {frozenset()}

    def find_limited(self, claims: list[wire.LeaseNext], now: float) -> list[int]:
        """Return the lanes with limits that some claim may serve, without those that are paused."""
        if not self.patterns:       # as in most tenants
            return []
        near = {lane for ask in claims for group in self._groups(ask) for lane in group}
        return sorted(near & self.patterns.keys() - self.find_stopped(now))

    def find_stopped(self, now: float) -> frozenset[int]:
        """Return the lanes that are paused."""
        if self.pauses is None:
            return frozenset()
        pauses = [pause for pause in find_pauses(self.pauses, now) if pause.worker is None]
        near = [self.known if pause.type is None else self._types.get(pause.type, ()) for pause in pauses]
        return frozenset([lane for pause, lanes in zip(pauses, near, strict=True) for lane in lanes
                          if pause.stops_lane(*self.known[lane])])

    def _groups(self, ask: wire.LeaseNext) -> tuple[set[int], set[int]]:
        if (profile := profile_of(ask)) not in self._eligible:
            if len(self._eligible) >= MOST_PROFILES or self._cached > MOST_CACHED:
                self._eligible.clear()
                self._cached = 0
            fit = {lane for lane in self._near(ask) if matches(*self.known[lane], ask)}
            first = {lane for lane in fit if self.known[lane][0] in (ask.preferred_kinds or ())}
            self._eligible[profile] = ask, first, fit - first
            self._cached += len(fit)
        return self._eligible[profile][1:]

    def _near(self, ask: wire.LeaseNext) -> set[int]:
        """Return the lanes to match: a superset of those that a claim may serve, found by index."""
        types, capabilities = ask.accept_types, {"", *(ask.capabilities or ())}
        near = [self._types.get(type, ()) for type in types] if types else [
            self._needing.get(capability, ()) for capability in capabilities]
        return {lane for lanes in near for lane in lanes}


def profile_of(ask: wire.LeaseNext) -> tuple[frozenset[str] | None, frozenset[str] | None, frozenset[str] | None]:
    """Return the fields of a claim that decide which lanes it may serve."""
    return ask.capabilities, ask.accept_types, ask.preferred_kinds
