"""Fill a gate with tasks: `asyncgate bench --fill N`, so that one can see what stays fast when there is much of it.

Everything goes over the wire, 500 tasks a call, and is what it seems: a finished task was created, leased, completed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

from asyncgate.commands.bench.load import BATCH, LARGEST, LEASES, TASK, TYPE, Client, claim, encoded, sound, together
from asyncgate.commands.bench.wire import Failed, Gate, Wire

CONNECTIONS = 4
LANES, TENANTS = 1000, 100
DAY_SECONDS = 86_400
FILLED = "bench.filled"
STATES: dict[str, Callable[[int], dict[str, Any]]] = {
    "terminal": lambda number: {"type": FILLED, "payload": None},
    "queued": lambda number: {"type": TYPE, "payload": None},
    "foreign": lambda number: {"type": TYPE, "payload": None, "requirements": {"capabilities": ["bench.foreign"]}},
    "lanes": lambda number: {"type": f"bench.lane.{number % LANES}", "payload": None},
    "delayed": lambda number: {"type": TYPE, "payload": None, "delay_seconds": DAY_SECONDS},
    "tenants": lambda number: {"type": TYPE, "payload": None},
}
MEANING = {
    "terminal": "created, leased and completed",
    "queued": "claimable, first come first served with the tasks of the modes cycle, drain and batch",
    "foreign": "queued, but needs a capability that the clients lack",
    "lanes": f"queued, spread over {LANES:,} types",
    "delayed": "queued, not to be leased before tomorrow",
    "tenants": f"queued, spread over {TENANTS} tenants",
}


async def fill(gate: Gate, state: str, number: int, grown: Callable[[int], object]) -> None:
    """Create so many tasks in a state; tell after each call how many more there are."""
    pieces = split(state, number)
    async with gate.connected(CONNECTIONS) as wires:
        await together(*(pour(gate, wire, state, pieces, grown) for wire in wires))


def split(state: str, number: int) -> Iterator[tuple[int, int]]:
    """Return where each call begins and how many tasks it creates; every tenant gets some."""
    most = max(min(LARGEST, number // TENANTS), 1) if state == "tenants" else LARGEST
    return ((start, min(most, number - start)) for start in range(0, number, most))


async def pour(gate: Gate, wire: Wire, state: str, pieces: Iterator[tuple[int, int]],
               grown: Callable[[int], object]) -> None:
    """Take piece after piece over one connection until there is none left."""
    for start, size in pieces:
        body: dict[str, Any] = {"tasks": [{**TASK, **STATES[state](start + at)} for at in range(size)]}
        if state == "tenants":
            body["tenant_id"] = str(uuid.uuid5(uuid.NAMESPACE_OID, f"bench.{start // size % TENANTS}"))
        try:
            sound(await wire.ask(gate.post(b"/v1/tasks/batch", encoded(body))))
        except Failed as no:
            raise (no if state != "tenants" or no.status != 403 else Failed(ONE_TENANT, 403)) from None
        if state == "terminal":
            await finish(gate, wire, size)
        grown(size)


ONE_TENANT = ("this gate keeps the credential within its own tenant (tenant_mismatch): the state tenants needs one "
              "that may name others")


async def finish(gate: Gate, wire: Wire, size: int) -> None:
    """Lease and complete so many of the tasks that were created to be finished."""
    found: list[tuple[bytes, bytes]] = []
    while len(found) < size:
        leased = LEASES.findall(await wire.ask(claim(gate, 0, FILLED, min(BATCH, size - len(found)))))
        if not leased:
            raise Failed(f"somebody else leases tasks of the type {FILLED}")
        found += leased
    sound(await wire.ask(Client(gate, 0).completions(found)))
