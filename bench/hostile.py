"""How a hostile tenant affects another one: `asyncgate bench --hostile` (threats E3, E8, A10 and F1).

The benchmark measures a tenant's creations alone, and beside four clients of another tenant that attack without a
pause: with expensive bodies, new task types and claim profiles, dropped connections, unknown credentials, and wrong
secrets for existing keys; at its rate limit, and before it has reached its limit.  Then with each of BODIES alone.
The control is the same attack on another gate of this machine, which costs the shared processors alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import chain, count, cycle
from itertools import repeat as repeated

import click

from asyncgate.bench.bad import make_bad_key
from asyncgate.bench.bodies import make_many_names, make_worst
from asyncgate.commands.bench.beside import HOSTILE, run_rival
from asyncgate.commands.bench.load import encoded
from asyncgate.commands.bench.rounds import Figures, Plan, measure_rounds
from asyncgate.commands.bench.servers import BenchServer
from asyncgate.commands.bench.tenants import make_tenant
from asyncgate.commands.bench.wire import Failed, LoadGate, read_length
from asyncgate.parts.model.examples import STORED_RECEIPT

CLIENTS = 4
# Both tenants call from this machine, so a limit per address would let one slow down the other.
LIMITED = ("security.rate_limiting.enabled=true", "security.rate_limiting.address_calls_per_minute=-1")
VICTIM, SPENT, FRESH = "bench-victim", "bench-spent", "bench-hostile"
TIERS = {VICTIM: "enterprise", SPENT: "free", FRESH: "paid"}
ATTACKERS = {SPENT: "a hostile tenant at its rate limit", FRESH: "a hostile tenant below its rate limit"}
ELSEWHERE = ", another gate"
UNLIMITED = ("security.rate_limiting.enabled=false",)
Requests = Callable[[LoadGate], Iterator[bytes]]
BREAK_SECONDS = 0.01        # pause before a closed connection is opened again


async def measure_victim(server: BenchServer, other: BenchServer, plan: Plan, limits: bool) -> list[Figures]:
    """Measure a tenant's calls alone, beside each attack on its gate, and beside the same attack on another gate."""
    victim, attacks = await make_tenant(server.gate, VICTIM, TIERS[VICTIM]), dict[str, tuple[LoadGate, str, str]]()
    for gate, place in ((server.gate, ""), (other.gate, ELSEWHERE)):
        tokens = {name: await make_tenant(gate, name, TIERS[name]) for name in ATTACKERS}
        if limits:
            await use_up_calls(LoadGate(gate.url, tokens[SPENT]))
            attacks[ATTACKERS[SPENT] + place] = gate, tokens[SPENT], HOSTILE
        attacks[ATTACKERS[FRESH] + place] = gate, tokens[FRESH], HOSTILE
        attacks |= {body + place: (gate, tokens[FRESH], f"{HOSTILE} {body}") for body in BODIES}

    def attack(measured: LoadGate) -> contextlib.AbstractAsyncContextManager[None]:
        gate, token, kind = attacks[measured.name]
        return run_rival(gate, token=token, kind=kind, number=CLIENTS)
    return await measure_rounds([LoadGate(server.gate.url, victim, place) for place in attacks], plan, CLIENTS, attack)


async def use_up_calls(gate: LoadGate) -> None:
    """Make calls as one tenant until its rate limit refuses them."""
    async with open_connection(gate) as (reader, writer):
        head = b""
        while b" 429 " not in head[:16]:
            writer.write(gate.get(b"/v1/config"))
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(read_length(head, len(head) - 4))


async def keep_hostile(gate: LoadGate, number: int, body: str) -> None:
    """Attack over a number of connections until this process is stopped: by one kind of body, or by all means."""
    means = cycle([BODIES[body]] if body else [yield_bodies, yield_inventions, None, yield_wrong_secrets])
    clients = [asyncio.create_task(hang_up(gate) if make is None else repeat(gate, make(gate)))
               for _, make in zip(range(number), means, strict=False)]
    click.echo("ready")
    await asyncio.gather(*clients)


def yield_bodies(gate: LoadGate) -> Iterator[bytes]:
    """Yield requests with the most expensive bodies."""
    return (gate.post(*body) for body in cycle(make_worst()))


def yield_inventions(gate: LoadGate) -> Iterator[bytes]:
    """Yield creations of unique types, and claims with unique profiles."""
    for number in count():
        yield gate.post(b"/v1/tasks", encoded({"type": f"bench.invented.{number}", "payload": number}))
        profile = {"capabilities": [f"c{number}"], "accept_types": [f"bench.invented.{number}"]}
        yield gate.post(b"/v1/leases/claim", encoded({"worker_id": "bench-hostile", **profile}))


def yield_wrong_secrets(gate: LoadGate) -> Iterator[bytes]:
    """Yield requests with an existing key and wrong secrets."""
    return (LoadGate(gate.url, make_bad_key(gate.token, 0)).get(b"/v1/config") for _ in count())


def yield_lists(path: bytes, member: str, items: list[object], **more: object) -> Requests:
    """Return what yields one call with many items again and again."""
    return lambda gate: repeated(gate.post(path, encoded({**more, member: items})))


def yield_pages(path: bytes, payload: str = "") -> Requests:
    """Return what makes 200 tasks, and then yields a page of all of them again and again."""
    tasks = [{"type": "bench.hostile", "payload": payload}] * 10
    fill = encoded({"tasks": tasks})
    return lambda gate: chain((gate.post(b"/v1/tasks/batch", fill) for _ in range(20)), repeated(gate.get(path)))


def list_imports() -> list[object]:
    """Return receipts of another gate, which are all refused: none of them has its hash."""
    return [{**STORED_RECEIPT, "receipt_id": str(uuid.UUID(int=number))} for number in range(250)]


TASK = {"type": "bench.hostile", "payload": None}
LIST_TOOLS = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
BODIES: dict[str, Requests] = {
    "create_tasks": yield_lists(b"/v1/tasks/batch", "tasks", [TASK] * 500),
    "complete_tasks": yield_lists(b"/v1/tasks/complete-batch", "tasks", [
        {"task_id": str(number), "lease_id": "none"} for number in range(500)], worker_id="bench-hostile"),
    "import_receipts": yield_lists(b"/v1/import/receipts", "receipts", list_imports()),
    "preview_bulk": lambda gate: repeated(gate.post(b"/v1/bulks/preview", encoded({"action": "cancel"}))),
    "tools/list": lambda gate: repeated(gate.post(b"/mcp", encoded(LIST_TOOLS))),
    "list_receipts": yield_pages(b"/v1/receipts?limit=200"),
    "payloads": yield_pages(b"/v1/tasks?limit=200", "x" * 2**15),
    "many members": lambda gate: repeated(gate.post(b"/v1/tasks", make_many_names(b"payload"))),
    "wrong secrets": yield_wrong_secrets,
}


async def repeat(gate: LoadGate, requests: Iterator[bytes]) -> None:
    """Send one request after another, ignoring the answers; reconnect if the gate closes the connection."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            async with open_connection(gate) as (reader, writer):
                for request in requests:
                    if writer.is_closing():     # uvloop's own error is not an OSError
                        break
                    writer.write(request)
                    head = await reader.readuntil(b"\r\n\r\n")
                    await reader.readexactly(read_length(head, len(head) - 4))
        await asyncio.sleep(BREAK_SECONDS)


async def hang_up(gate: LoadGate) -> None:
    """Send three requests and disconnect; then send one with an unknown credential and name."""
    while True:
        stranger = LoadGate(gate.url, secrets.token_hex(8))
        odd = stranger.get(b"/v1/config").replace(b"host:", b"user-agent: %b\r\nhost:" % secrets.token_hex(8).encode())
        for request in (gate.get(b"/health") * 3, odd):
            with contextlib.suppress(OSError):
                async with open_connection(gate) as (_, writer):
                    writer.write(request)
                    await writer.drain()
        await asyncio.sleep(BREAK_SECONDS)


@contextlib.asynccontextmanager
async def open_connection(gate: LoadGate) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Keep a connection to a gate open during a block."""
    reader, writer = await asyncio.open_connection(gate.host, gate.port)
    try:
        yield reader, writer
    finally:
        writer.close()


def format_verdict(rows: list[Figures]) -> str:
    """Compare the measured tenant beside each attack with itself beside the same attack on another gate."""
    places = dict.fromkeys(row.database for row in rows if row.rival and not row.database.endswith(ELSEWHERE))
    if not places:
        raise Failed("nothing was measured")
    p50, p99 = ({place: find_worst_ratio(rows, place, of) for place in places} for of in ("p50_ms", "p99_ms"))
    return "\n".join(f"beside {place}: p50 {p50[place]:.2f} × (goal: 2), p99 {p99[place]:.2f} × (goal: 3) of the same "
                     "attack on another gate" for place in places)


def find_worst_ratio(rows: list[Figures], place: str, of: str) -> float:
    """Return the highest time beside an attack, in multiples of that beside the control."""
    here, control = ([getattr(row, of) for row in rows if row.database == where and row.rival]
                     for where in (place, place + ELSEWHERE))
    return max(float(mine / theirs) for mine, theirs in zip(here, control, strict=True))
