"""Queues for people who look after a gate: how much waits in each, for how long, and how much is on its way.

A queue is a lane: the tasks of one type that require the same capabilities.  Each batch counts its own changes, so
nothing here depends on how many tasks there are.
"""

from __future__ import annotations

from asyncgate import Caller, Engine, Operation
from asyncgate.parts.model.content import decode_json
from asyncgate.parts.model.errors import QueueNotFound
from asyncgate.parts.model.queries import QueueFilter
from asyncgate.parts.model.stored import Queue
from asyncgate.parts.model.wire_operating import GetQueue, ListQueues, QueueRecord, Queues


async def list_queues(engine: Engine, caller: Caller, ask: ListQueues) -> Queues:
    """List queues, by type: how many tasks wait in each and for how long, are on hold, or are leased.

    A queue is what has one type and requires the same capabilities; one without any such task is not listed.
    """
    limit, mark = engine.limit_page(ask.limit), ("queues", ask.type)
    place = engine.open_cursor(caller, ask.cursor, *mark)
    rows = await engine.backend.page(caller.tenant_id, QueueFilter(ask.type, None, read_place(place), limit + 1))
    ends = engine.seal_cursors(caller, [f"{row.lane} {row.type}" for row in rows], limit, ask.cursor, *mark)
    now = engine.backend.now()
    return Queues([show_queue(row, now) for row in rows[:limit]], *ends)


def read_place(place: str | None) -> tuple[str, int] | None:
    """Return the type and the lane that a cursor holds."""
    if place is None:
        return None
    lane, _, type = place.partition(" ")
    return type, int(lane)


async def get_queue(engine: Engine, caller: Caller, ask: GetQueue) -> QueueRecord:
    """Return how many tasks of one queue wait and for how long, are on hold, or are leased."""
    lane = read_queue_id(ask.queue_id)
    rows = await engine.backend.page(caller.tenant_id, QueueFilter(None, lane, None, 1)) if lane is not None else []
    if not rows:
        raise QueueNotFound(f"no queue {ask.queue_id} has a task now; list_queues shows those that have")
    return show_queue(rows[0], engine.backend.now())


def show_queue(row: Queue, now: float) -> QueueRecord:
    """Show a queue."""
    waits = max(now - row.oldest_at, 0.0) if row.oldest_at is not None else None
    return QueueRecord(write_queue_id(row.lane), row.type, decode_json(row.capabilities), row.queued - row.delayed,
                       row.delayed, row.more_delayed, row.held, row.leased, waits)


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
]
