"""Presence: noted at each call, stored by upkeep once a minute, and merged into reads in between."""

from __future__ import annotations

import time
from typing import Protocol

from msgspec.structs import replace

from asyncgate.parts.model.stored import Presence
from asyncgate.parts.model.wire import Principal

PAUSE = 1800.0                              # seconds without a call after which the next call begins a new session
MOST_CALLS = 256                            # calls noted before they are counted
MOST_SEEN, MOST_INSTANCES = 10_000, 100     # principals, and instances per principal, noted in a minute
Seen = tuple[Principal, float, float]       # who, when first and when last since the last minute


class Clock(Protocol):
    """The database's clock."""

    skew: float     # seconds that tests add to it

    def now(self) -> float:
        """Return the time."""


class Sightings:
    """Callers seen since upkeep last stored them; bounded, because callers can invent any number of names."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.calls: list[tuple[str, Principal, float]] = []     # tenant, caller, and time by this process's own clock
        self.fresh: dict[tuple[str, str, str], dict[str | None, tuple[float, float]]] = {}
        self.leaving = self.fresh       # the sightings that upkeep is storing now

    def count(self) -> None:
        """Count the noted calls; convert their times to the database's clock."""
        calls, self.calls = self.calls, []
        ahead = self.clock.now() - self.clock.skew - time.time()
        for tenant_id, who, at in calls:
            self._count(tenant_id, who, at + ahead)

    def _count(self, tenant_id: str, who: Principal, now: float) -> None:
        if (key := (tenant_id, who.kind, who.id)) not in self.fresh and len(self.fresh) >= MOST_SEEN:
            return
        instances = self.fresh.setdefault(key, {})
        instance = who.instance_id if len(instances) < MOST_INSTANCES or who.instance_id in instances else None
        instances[instance] = (instances.get(instance, (now,))[0], now)

    def take(self) -> dict[str, list[Seen]]:
        """Return the sightings to store, by tenant; `known` includes them until `forget_taken`."""
        self.count()
        self.leaving, self.fresh = self.fresh, {}
        found: dict[str, list[Seen]] = {}
        for (tenant_id, kind, id), instances in self.leaving.items():
            found.setdefault(tenant_id, []).extend(
                (Principal(kind, id, instance), *when) for instance, when in instances.items())
        return found

    def forget_taken(self) -> None:
        """Forget the sightings that `take` returned; they are stored."""
        self.leaving = self.fresh

    def known(self, tenant_id: str, who: Principal, stored: Presence | None, now: float) -> Presence:
        """Return the presence of a principal: the stored presence plus newer sightings."""
        self.count()
        known, key = stored, (tenant_id, who.kind, who.id)
        for seen in (self.leaving, self.fresh) if self.leaving is not self.fresh else (self.fresh,):
            for instance, (first, last) in seen.get(key, {}).items():
                if stored is None or last > stored.last_seen_at:      # otherwise it has been stored meanwhile
                    known = add_visit(known, Principal(who.kind, who.id, instance), first, last)
        return known or Presence(who.kind, who.id, None, now, now, 0)


def add_visit(known: Presence | None, who: Principal, first: float, last: float) -> Presence:
    """Add a sighting to a presence; a session begins with a new instance or after a pause."""
    known = known or Presence(who.kind, who.id, None, first, 0.0, 0)
    begins = first - known.last_seen_at > PAUSE or who.instance_id not in (None, known.instance_id)
    return replace(known, instance_id=who.instance_id or known.instance_id, last_seen_at=max(last, known.last_seen_at),
                   sessions=known.sessions + begins)
