"""Queues for people who look after a gate: how much waits in each, for how long, and how much is on its way.

A queue is a lane: the tasks of one type that require the same capabilities.  Each batch counts its own changes, so
nothing here depends on how many tasks there are.
"""

from __future__ import annotations

from asyncgate import Caller, Engine, Operation
from asyncgate.parts.model import errors, queries, stored, wire_operating
from asyncgate.parts.model.content import decode_json
from asyncgate.parts.operating.explain import Claimant, find_able, read_asked
from asyncgate.parts.operating.traffic import Flows, get_traffic, read_flows
from asyncgate.parts.operating.workers import count_holdings, find_patience, find_silence


async def list_queues(engine: Engine, caller: Caller, ask: wire_operating.ListQueues) -> wire_operating.Queues:
    """List queues, by type: how many tasks wait in each and for how long, are on hold, or are leased.

    A queue is what has one type and requires the same capabilities.  One without a task for an hour is not listed.
    The numbers of tasks are exact; what another process has seen in the last half minute may be missing from workers,
    last_minute and last_hour.
    """
    limit, mark = engine.limit_page(ask.limit), ("queues", ask.type)
    place = engine.open_cursor(caller, ask.cursor, *mark)
    rows = await engine.backend.page(caller.tenant_id,
                                     queries.QueueFilter(ask.type, None, read_place(place), limit + 1))
    ends = engine.seal_cursors(caller, [f"{row.lane} {row.type}" for row in rows], limit, ask.cursor, *mark)
    return wire_operating.Queues(await show_queues(engine, caller.tenant_id, rows[:limit], ask.minutes), *ends)


def read_place(place: str | None) -> tuple[str, int] | None:
    """Return the type and the lane that a cursor holds."""
    if place is None:
        return None
    lane, _, type = place.partition(" ")
    return type, int(lane)


async def get_queue(engine: Engine, caller: Caller, ask: wire_operating.GetQueue) -> wire_operating.QueueRecord:
    """Return how many tasks of one queue wait and how long, are on hold or leased, and what happened lately.

    The numbers of tasks are exact; what another process has seen in the last half minute may be missing from workers,
    last_minute and last_hour.
    """
    lane = read_queue_id(ask.queue_id)
    rows = await engine.backend.page(caller.tenant_id,
                                     queries.QueueFilter(None, lane, None, 1)) if lane is not None else []
    if not rows:
        raise errors.QueueNotFound(
            f"no queue {ask.queue_id} has had a task in the last hour; list_queues shows those that "
            "had")
    return (await show_queues(engine, caller.tenant_id, rows, ask.minutes))[0]


async def show_queues(engine: Engine, tenant_id: str, rows: list[stored.Queue],
                      minutes: int) -> list[wire_operating.QueueRecord]:
    """Show queues, with what happened in them and how many workers can take their tasks."""
    now = engine.backend.now()
    flows = await read_flows(engine, tenant_id, {row.lane for row in rows}, now, minutes)
    asked = await read_active(engine, tenant_id, now) if rows else []
    return [show_queue(row, now, asked, flows[row.lane]) for row in rows]


async def read_active(engine: Engine, tenant_id: str, now: float) -> list[Claimant]:
    """Return those of the last workers that asked which ask for tasks still, or hold leases and give signs of life."""
    asked = await read_asked(engine, tenant_id, now)
    patience, silence = find_patience(engine.settings), find_silence(engine.settings)
    holding = await count_holdings(engine, tenant_id, [row for row, _ in asked], 1)
    return [(row, claims) for row, claims in asked
            if any(claim.asks(now - patience) for claim in claims)
            or (row.last_seen_at > now - silence and holding.get((row.kind, row.id)))]


def show_queue(row: stored.Queue, now: float, asked: list[Claimant], flows: Flows) -> wire_operating.QueueRecord:
    """Show a queue."""
    needed: list[str] = decode_json(row.capabilities)
    waits = max(now - row.oldest_at, 0.0) if row.oldest_at is not None else None
    return wire_operating.QueueRecord(write_queue_id(row.lane), row.type, needed, row.queued - row.delayed, row.delayed,
                                      row.more_delayed, row.held, row.leased, waits,
                                      len(find_able(row.type, frozenset(needed), asked)), flows.minute, flows.hour,
                                      flows.by_minute)


def write_queue_id(lane: int) -> str:
    """Write the number of a lane for readers that know no 64-bit integers."""
    return f"{lane % 2**64:016x}"


def read_queue_id(queue_id: str) -> int | None:
    """Read the number of a lane."""
    try:
        lane = int.from_bytes(bytes.fromhex(queue_id), "big", signed=True)
    except ValueError:
        return None
    return lane if write_queue_id(lane) == queue_id else None


OPERATIONS = [
    Operation(list_queues, "GET /v1/queues", "A", "admin:read", "R"),
    Operation(get_queue, "GET /v1/queues/{queue_id}", "A", "admin:read", "R"),
    Operation(get_traffic, "GET /v1/traffic", "A", "admin:read", "R"),
]
