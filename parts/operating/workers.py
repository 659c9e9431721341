"""list_workers: who claims tasks, with which types and capabilities, what each holds, and what it did.

The facts are those of presence (parts/process/presence.py): stored every half minute, and what this process has seen
since is added.
"""

from __future__ import annotations

from asyncgate import Caller, Engine, Operation
from asyncgate.parts.model.naming import read_principal
from asyncgate.parts.model.queries import HoldingsOf, WorkerFilter
from asyncgate.parts.model.stored import Claimed, Presence
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.model.wire import Principal
from asyncgate.parts.model.wire_workers import LastClaim, ListWorkers, WorkerRecord, Workers
from asyncgate.parts.process.presence import decode_claims

MOST_HELD = 1000        # leases of a worker that are counted


async def list_workers(engine: Engine, caller: Caller, ask: ListWorkers) -> Workers:
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
    return Workers([show_worker(row, held[row.kind, row.id]) for row in rows[:limit]], *ends)


async def read_workers(engine: Engine, tenant_id: str, after: tuple[str, str], limit: int) -> list[Presence]:
    """Return the workers behind a place, as stored and as seen since."""
    backend, sightings, now = engine.backend, engine.sightings, engine.backend.now()
    stored = {(row.kind, row.id): row for row in await backend.page(tenant_id, WorkerFilter(after, limit))}
    fresh = {place for place in sightings.claimants(tenant_id) if place > after}
    places = sorted(stored.keys() | fresh)[:limit]
    found = list[Presence]()
    for place in places:
        known = stored.get(place) or await backend.record(tenant_id, Presence, *place)     # it had not claimed before
        found.append(sightings.known(tenant_id, Principal(*place), known, now))
    return found


async def read_worker(engine: Engine, tenant_id: str, who: Principal) -> list[Presence]:
    """Return one worker, if it has claimed."""
    stored = await engine.backend.record(tenant_id, Presence, who.kind, who.id)
    known = engine.sightings.known(tenant_id, who, stored, engine.backend.now())
    return [known] if known.claimed_at is not None else []


async def count_holdings(engine: Engine, tenant_id: str, rows: list[Presence], most: int) -> dict[tuple[str, str], int]:
    """Return how many live leases each of some workers has, counted up to `most`."""
    workers = tuple(Principal(row.kind, row.id) for row in rows)
    found = await engine.backend.page(tenant_id, HoldingsOf(workers, most)) if workers else []
    return {(one.kind, one.id): one.leases for one in found}


def show_worker(row: Presence, holding: int) -> WorkerRecord:
    """Show a worker."""
    claims = [show_claim(claim) for claim in decode_claims(row.claims)]
    return WorkerRecord(Principal(row.kind, row.id, row.instance_id), to_utc(row.first_seen_at),
                        to_utc(row.last_seen_at), row.sessions, claims[0].claimed_at, holding, row.leased,
                        row.completed, row.failed, row.expired, row.released, claims)


def show_claim(claim: Claimed) -> LastClaim:
    """Show a claim."""
    return LastClaim(to_utc(claim.at), claim.types, claim.capabilities, claim.given, claim.why)


OPERATIONS = [
    Operation(list_workers, "GET /v1/workers", "A", "admin:read", "R"),
]
