"""list_workers: who claims tasks, with which types and capabilities, what each holds, and what it did.

The facts are those of presence (parts/process/presence.py): stored every half minute, and what this process has seen
since is added.
"""

from __future__ import annotations

from asyncgate import Caller, Engine, Operation
from asyncgate.parts.model import queries, stored, wire, wire_workers
from asyncgate.parts.model.naming import read_principal
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.views import to_utc, to_utc_or_none
from asyncgate.parts.process.presence import STORED_EVERY_SECONDS, decode_claims

MOST_HELD = 1000        # leases of a worker that are counted
SLACK_SECONDS = 60.0        # after which a worker that could wait no longer counts as one that no longer asks


async def list_workers(engine: Engine, caller: Caller, ask: wire_workers.ListWorkers) -> wire_workers.Workers:
    """List those who claim tasks: what they offer, what they hold and did, and when they were last seen.

    In the order of their kinds and ids.  What they hold is exact; what another process has seen in the last half minute
    may be missing from all else.
    """
    who = read_principal(ask)
    limit, mark = engine.limit_page(ask.limit), ("workers", who and (who.kind, who.id))
    kind, _, id = (engine.open_cursor(caller, ask.cursor, *mark) or "").partition(" ")
    rows = (await read_workers(engine, caller.tenant_id, (kind, id), limit + 1) if who is None
            else await read_worker(engine, caller.tenant_id, who))
    ends = engine.seal_cursors(caller, [f"{row.kind} {row.id}" for row in rows], limit, ask.cursor, *mark)
    held = await count_holdings(engine, caller.tenant_id, rows[:limit], MOST_HELD)
    shown = [show_worker(row, held[row.kind, row.id], engine.settings, engine.backend.now()) for row in rows[:limit]]
    return wire_workers.Workers(shown, *ends)


async def read_workers(engine: Engine, tenant_id: str, after: tuple[str, str], limit: int) -> list[stored.Presence]:
    """Return the workers behind a place, as stored and as seen since."""
    backend, sightings, now = engine.backend, engine.sightings, engine.backend.now()
    kept = {(row.kind, row.id): row for row in await backend.page(tenant_id, queries.WorkerFilter(after, limit))}
    fresh = {place for place in sightings.claimants(tenant_id) if place > after}
    places = sorted(kept.keys() | fresh)[:limit]
    presences = list[stored.Presence]()
    for place in places:
        # it had not claimed before
        known = kept.get(place) or await backend.record(tenant_id, stored.Presence, *place)
        presences.append(sightings.known(tenant_id, wire.Principal(*place), known, now))
    return presences


async def read_worker(engine: Engine, tenant_id: str, who: wire.Principal) -> list[stored.Presence]:
    """Return one worker, if it has claimed."""
    presence = await engine.backend.record(tenant_id, stored.Presence, who.kind, who.id)
    known = engine.sightings.known(tenant_id, who, presence, engine.backend.now())
    return [known] if known.claimed_at is not None else []


async def count_holdings(engine: Engine, tenant_id: str, rows: list[stored.Presence],
                         most: int) -> dict[tuple[str, str], int]:
    """Return how many live leases each of some workers has, counted up to `most`."""
    workers = tuple(wire.Principal(row.kind, row.id) for row in rows)
    holdings = await engine.backend.page(tenant_id, queries.HoldingsOf(workers, most)) if workers else []
    return {(holding.kind, holding.id): holding.leases for holding in holdings}


def show_worker(row: stored.Presence, holding: int, settings: Settings, now: float) -> wire_workers.WorkerRecord:
    """Show a worker."""
    claims = decode_claims(row.claims)
    return wire_workers.WorkerRecord(wire.Principal(row.kind, row.id, row.instance_id), to_utc(row.first_seen_at),
                                     to_utc(row.last_seen_at), row.sessions, to_utc(claims[0].at), holding, row.leased,
                                     row.completed, row.failed, row.expired, row.released,
                                     [wire_workers.LastClaim(to_utc(claim.at), claim.types, claim.capabilities,
                                                             claim.given, claim.why, claim.process,
                                                             to_utc_or_none(claim.gone_at)) for claim in claims],
                                     judge_worker(row, claims, holding, settings, now), claims[0].process)


def judge_worker(row: stored.Presence, claims: list[stored.Claimed], holding: int, settings: Settings,
                 now: float) -> wire_workers.WorkerState:
    """Tell whether a worker works, asks for tasks, or does neither."""
    if holding and row.last_seen_at > now - find_silence(settings):
        return "working"
    return "idle" if any(claim.asks(now - find_patience(settings)) for claim in claims) else "silent"


def find_patience(settings: Settings) -> float:
    """Return the seconds after which a worker that has not asked for tasks again asks for none."""
    return settings.max_wait_seconds + STORED_EVERY_SECONDS + SLACK_SECONDS


def find_silence(settings: Settings) -> float:
    """Return the seconds without a call after which a worker that holds leases gives no sign of life.

    Whoever lives renews a lease after a third of it.
    """
    renewal = settings.default_lease_ttl_seconds / 3
    return max(find_patience(settings), renewal + STORED_EVERY_SECONDS + SLACK_SECONDS)


OPERATIONS = [
    Operation(list_workers, "GET /v1/workers", "A", "admin:read", "R"),
]
