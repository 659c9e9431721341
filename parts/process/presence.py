"""Presence: noted at each call, stored by upkeep every half minute, and merged into reads in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncgate.parts.model import stored, wire
from asyncgate.parts.model.clock import elapsed

STORED_EVERY_SECONDS = 30.0
PAUSE = 1800.0                              # seconds without a call after which the next call begins a new session
JITTER_SECONDS = 1.0                        # by which what is known of the database's clock may change between answers
MOST_CALLS = 256                            # calls noted before they are counted
MOST_SEEN, MOST_INSTANCES = 10_000, 100     # principals, and instances per principal, noted until they are stored
MOST_CLAIMED = 1_000_000                    # letters of the claims that are noted until they are stored
MOST_PROFILES, PROFILE_LETTERS = 4, 8_000   # claims of a worker that are kept, and letters of all but the latest
Profile = tuple[frozenset[str] | None, frozenset[str] | None]      # accepted types, offered capabilities
COUNTED = frozenset({"completed", "failed", "expired", "released"})

decode_claims = msgspec.json.Decoder(list[stored.Claimed]).decode


class Clock(Protocol):
    """The database's clock."""

    skew: float     # seconds that tests add to it

    def now(self) -> float:
        """Return the time."""


class Sighting(Struct):
    """What a principal did since upkeep last stored presences."""

    instances: dict[str | None, tuple[float, float]] = {}   # when each was first and last seen
    claims: dict[Profile, stored.Claimed] = {}                     # its last claim with each profile
    steps: dict[str, int] = {}                              # number of leases granted ("leased"), and ended in each way
    gone_at: float | None = None                            # when it last hung up while a claim waited, or lost a lease


class Sightings:
    """Callers seen since upkeep last stored them; bounded, because callers can invent any number of names."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.latest = clock, 0.0
        # tenant, caller, and time by this process's own clock
        self.calls: list[tuple[str, wire.Principal, float]] = []
        self.claims: list[tuple[str, wire.Principal, wire.LeaseNext, wire.Offers, float]] = []
        # changed by a committed batch, and its time
        self.leases: list[tuple[str, Iterable[stored.Lease], float]] = []
        self.waiting = Counter[tuple[str, str, str]]()          # claims of each worker that wait now
        self.hangups: list[tuple[str, wire.Principal, float]] = []   # workers whose last waiting claim was broken off
        self.fresh: dict[tuple[str, str, str], Sighting] = {}
        self.leaving = self.fresh       # the sightings that upkeep is storing now
        self.letters = 0                # of all noted claims

    def _read_clock(self) -> float:
        """Return the database's time, later than before.

        Each answer of a database tells its clock anew, some milliseconds off: a claim may not come after a hang-up.
        """
        now = self.clock.now()
        if 0 <= self.latest - now < JITTER_SECONDS:
            now = self.latest + 1e-6
        self.latest = now
        return now

    def note_claim(self, tenant_id: str, worker: wire.Principal, ask: wire.LeaseNext, offers: wire.Offers) -> None:
        """Note what a claim offered, and what it got."""
        self.claims.append((tenant_id, worker, ask, offers, self._read_clock()))
        if len(self.claims) >= MOST_CALLS:
            self.count()

    @contextlib.contextmanager
    def watch_claim(self, tenant_id: str, worker: wire.Principal) -> Iterator[None]:
        """Note it if the worker hangs up while its claim waits: a killed one does, long before it would ask again."""
        key = tenant_id, worker.kind, worker.id
        self.waiting[key] += 1
        try:
            yield
        except asyncio.CancelledError:
            if self.waiting[key] == 1:      # else another process of this worker waits
                self.hangups.append((tenant_id, worker, self._read_clock()))
            raise
        finally:
            self.waiting[key] -= 1
            if not self.waiting[key]:
                del self.waiting[key]

    def count(self) -> None:
        """Count what is noted; convert the times of calls to the database's clock."""
        calls, claims, leases, hangups = self.calls, self.claims, self.leases, self.hangups
        self.calls, self.claims, self.leases, self.hangups = [], [], [], []
        ahead = self.clock.now() - self.clock.skew - elapsed()
        for tenant_id, who, at in calls:
            self._count(tenant_id, who, at + ahead)
        for tenant_id, worker, ask, offers, at in claims:
            self._count_claim(tenant_id, worker, ask, offers, at)
        for tenant_id, leased, now in leases:
            for lease in leased:
                if lease.acquired_at == now:
                    self._count_step(tenant_id, lease.worker, "leased")
                if lease.ending in COUNTED:
                    self._count_step(tenant_id, lease.worker, lease.ending)
                if lease.ending == "expired" and not self.waiting[tenant_id, lease.worker_kind, lease.worker_id]:
                    self._count_gone(tenant_id, lease.worker, now)
        for tenant_id, worker, at in hangups:
            self._count_gone(tenant_id, worker, at)

    def _sighting(self, tenant_id: str, who: wire.Principal) -> Sighting | None:
        """Return the sighting of a principal; None when there is no room for another one."""
        sighting = self.fresh.get(key := (tenant_id, who.kind, who.id))
        if sighting is None and len(self.fresh) < MOST_SEEN:
            sighting = self.fresh[key] = Sighting()
        return sighting

    def _count(self, tenant_id: str, who: wire.Principal, now: float) -> None:
        if (sighting := self._sighting(tenant_id, who)) is None:
            return
        instances = sighting.instances
        instance = who.instance_id if len(instances) < MOST_INSTANCES or who.instance_id in instances else None
        instances[instance] = (instances.get(instance, (now,))[0], now)

    def _count_claim(self, tenant_id: str, worker: wire.Principal, ask: wire.LeaseNext, offers: wire.Offers,
                     now: float) -> None:
        if (sighting := self._sighting(tenant_id, worker)) is None:
            return
        given = len(offers.tasks)
        profile = (ask.accept_types or None, ask.capabilities or None)
        if (known := sighting.claims.pop(profile, None)) is None:
            known = stored.Claimed(now, sorted(ask.accept_types or ()), sorted(ask.capabilities or ()),
                                   process=ask.process)
            self.letters += known.letters
            if self.letters > MOST_CLAIMED:
                return
        why = None if given or not offers.warnings else offers.warnings[0]
        sighting.claims[profile] = replace(known, at=now, given=given, why=why, process=ask.process)  # latest last
        while len(sighting.claims) > MOST_PROFILES:
            del sighting.claims[next(iter(sighting.claims))]

    def _count_gone(self, tenant_id: str, worker: wire.Principal, now: float) -> None:
        if (sighting := self._sighting(tenant_id, worker)) is not None:
            sighting.gone_at = max(now, sighting.gone_at or now)

    def _count_step(self, tenant_id: str, worker: wire.Principal, step: str) -> None:
        if (sighting := self._sighting(tenant_id, worker)) is not None:
            sighting.steps[step] = sighting.steps.get(step, 0) + 1

    def take(self) -> dict[str, list[tuple[wire.Principal, Sighting]]]:
        """Return the sightings to store, by tenant; what is read meanwhile includes them until `forget_taken`."""
        self.count()
        self.leaving, self.fresh, self.letters = self.fresh, {}, 0
        sightings: dict[str, list[tuple[wire.Principal, Sighting]]] = {}
        for (tenant_id, kind, id), sighting in self.leaving.items():
            sightings.setdefault(tenant_id, []).append((wire.Principal(kind, id), sighting))
        return sightings

    def forget_taken(self) -> None:
        """Forget the sightings that `take` returned; they are stored."""
        self.leaving = self.fresh

    def forget(self, tenant_id: str, who: wire.Principal | None) -> None:
        """Forget what was noted of a principal, or of all principals of a tenant."""
        self.count()
        for seen in (self.fresh, self.leaving):
            for key in [key for key in seen if key[0] == tenant_id and who in (None, wire.Principal(key[1], key[2]))]:
                del seen[key]

    def known(self, tenant_id: str, who: wire.Principal, row: stored.Presence | None, now: float) -> stored.Presence:
        """Return the presence of a principal: the stored presence plus newer sightings."""
        self.count()
        known, key = row, (tenant_id, who.kind, who.id)
        if self.leaving is not self.fresh and (leaving := self.leaving.get(key)) and (      # not stored yet
                row is None or any(last > row.last_seen_at for _, last in leaving.instances.values())):
            known = add_sighting(known, who, leaving)
        if (fresh := self.fresh.get(key)) is not None:
            known = add_sighting(known, who, fresh)
        return known or stored.Presence(who.kind, who.id, None, now, now, 0)

    def claimants(self, tenant_id: str) -> dict[tuple[str, str], float]:
        """Return the kind and id of who has claimed tasks of a tenant since upkeep last stored that, and when last."""
        self.count()
        return {(kind, id): max(claim.at for claim in sighting.claims.values())
                for seen in (self.leaving, self.fresh) for (tenant, kind, id), sighting in seen.items()
                if tenant == tenant_id and sighting.claims}


def add_sighting(known: stored.Presence | None, who: wire.Principal, sighting: Sighting) -> stored.Presence:
    """Add what a principal did to its presence."""
    for instance, (first, last) in sighting.instances.items():
        known = add_visit(known, wire.Principal(who.kind, who.id, instance), first, last)
    claims = list(sighting.claims.values())
    first = claims[0].at if claims else 0.0     # a claim is a call, too, but may have been noted just before it
    known = known or stored.Presence(who.kind, who.id, None, first, first, 0)
    steps = {name: getattr(known, name) + number for name, number in sighting.steps.items()}
    known = add_claims(replace(known, **steps), claims)
    return known if sighting.gone_at is None else mark_gone(known, sighting.gone_at)


def mark_gone(known: stored.Presence, at: float) -> stored.Presence:
    """Mark the claims of a worker that are older than its disappearance."""
    claims = [replace(claim, gone_at=at) if claim.at <= at else claim for claim in decode_claims(known.claims)]
    return replace(known, claims=msgspec.json.encode(claims).decode())


def add_visit(known: stored.Presence | None, who: wire.Principal, first: float, last: float) -> stored.Presence:
    """Add a sighting to a presence; a session begins with a new instance or after a pause."""
    known = known or stored.Presence(who.kind, who.id, None, first, 0.0, 0)
    begins = first - known.last_seen_at > PAUSE or who.instance_id not in (None, known.instance_id)
    return replace(known, instance_id=who.instance_id or known.instance_id, last_seen_at=max(last, known.last_seen_at),
                   sessions=known.sessions + begins)


def add_claims(known: stored.Presence, claims: list[stored.Claimed]) -> stored.Presence:
    """Add claims to those of a presence; the latest of each profile stays, and the oldest profiles go."""
    if not claims:
        return known
    kept, letters = list[stored.Claimed](), 0
    for claim in sorted((*claims, *decode_claims(known.claims)), key=lambda claim: -claim.at):
        if any(claim.profile == later.profile for later in kept):
            continue
        letters += claim.letters
        if not kept or letters <= PROFILE_LETTERS:
            kept.append(claim)
    return replace(known, claims=msgspec.json.encode(kept[:MOST_PROFILES]).decode(), claimed_at=kept[0].at)
