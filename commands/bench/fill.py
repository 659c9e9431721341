"""Fill a gate with tasks: `asyncgate bench --fill N`, to measure what stays fast with many tasks.

All tasks are created over the wire, 500 per call, and are real: a finished task was created, leased and completed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

from asyncgate.commands.bench import load
from asyncgate.commands.bench.wire import Failed, LoadGate, Wire
from asyncgate.parts.model.durations import DAY_SECONDS

CONNECTIONS = 4
FILL_LANES, FILL_TENANTS = 1000, 100
FILLED = "bench.filled"
FILL_STATES: dict[str, Callable[[int], dict[str, Any]]] = {
    "terminal": lambda number: {"type": FILLED, "payload": None},
    "queued": lambda number: {"type": load.TYPE, "payload": None},
    "foreign": lambda number: {"type": load.TYPE, "payload": None, "requirements": {"capabilities": ["bench.foreign"]}},
    "lanes": lambda number: {"type": f"bench.lane.{number % FILL_LANES}", "payload": None},
    "delayed": lambda number: {"type": load.TYPE, "payload": None, "delay_seconds": DAY_SECONDS},
    "tenants": lambda number: {"type": load.TYPE, "payload": None},
}
FILL_MEANING = {
    "terminal": "created, leased and completed",
    "queued": "claimable, in one queue with the tasks of the modes cycle, drain and batch",
    "foreign": "queued, but needs a capability that the clients lack",
    "lanes": f"queued, spread over {FILL_LANES:,} types",
    "delayed": "queued, not to be leased before tomorrow",
    "tenants": f"queued, spread over {FILL_TENANTS} tenants",
}


async def fill(gate: LoadGate, state: str, number: int, grown: Callable[[int], object]) -> None:
    """Create tasks in a state; report the number created after each call."""
    pieces = split_calls(state, number)
    async with gate.connected(CONNECTIONS) as wires:
        await load.run_together(*(fill_pieces(gate, wire, state, pieces, grown) for wire in wires))


def split_calls(state: str, number: int) -> Iterator[tuple[int, int]]:
    """Return the first number and the size of each call; every tenant gets some tasks."""
    most = max(min(load.TASKS_PER_FILL, number // FILL_TENANTS), 1) if state == "tenants" else load.TASKS_PER_FILL
    return ((start, min(most, number - start)) for start in range(0, number, most))


async def fill_pieces(gate: LoadGate, wire: Wire, state: str, pieces: Iterator[tuple[int, int]],
               grown: Callable[[int], object]) -> None:
    """Create one piece after another over a connection until none is left."""
    for start, size in pieces:
        body: dict[str, Any] = {"tasks": [{**load.TASK_BODY, **FILL_STATES[state](start + at)} for at in range(size)]}
        if state == "tenants":
            body["tenant_id"] = str(uuid.uuid5(uuid.NAMESPACE_OID, f"bench.{start // size % FILL_TENANTS}"))
        try:
            load.require_sound(await wire.ask(gate.post(b"/v1/tasks/batch", load.encoded(body))))
        except Failed as refusal:
            raise (refusal if state != "tenants" or refusal.status != 403 else Failed(ONE_TENANT, 403)) from None
        if state == "terminal":
            await finish(gate, wire, size)
        grown(size)


ONE_TENANT = ("the gate limits this credential to its own tenant (tenant_mismatch): the state tenants needs one "
              "for all tenants")


async def finish(gate: LoadGate, wire: Wire, size: int) -> None:
    """Lease and complete tasks that were created to be finished."""
    leases: list[tuple[bytes, bytes]] = []
    while len(leases) < size:
        leased = load.LEASES.findall(await wire.ask(load.make_claim(gate, 0, FILLED,
                                                                    min(load.TASKS_PER_BATCH, size - len(leases)))))
        if not leased:
            raise Failed(f"another worker leases tasks of the type {FILLED}")
        leases += leased
    load.require_sound(await wire.ask(load.Client(gate, 0).completions(leases)))
