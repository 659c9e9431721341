"""How a hostile tenant affects another one: `asyncgate bench --hostile` (threats E3, E8, A10 and F1).

The benchmark starts a server with rate limits.  It measures a tenant's creations alone, and beside four clients of
another tenant that attack without a pause: with expensive bodies, new task types and claim profiles, dropped
connections, unknown credentials, and wrong secrets for existing keys.  The attacker is measured at its rate limit,
and before it has reached its limit.  The same attack on another server of this machine shows the cost of the shared
processors alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from itertools import count, cycle

import click
import msgspec

from asyncgate.commands.bench.bad import make_bad_key
from asyncgate.commands.bench.beside import HOSTILE, run_rival
from asyncgate.commands.bench.bodies import make_worst
from asyncgate.commands.bench.load import encoded
from asyncgate.commands.bench.rounds import Figures, Plan, measure_rounds
from asyncgate.commands.bench.servers import BenchServer
from asyncgate.commands.bench.wire import Failed, LoadGate, read_length

CLIENTS = 4
# Both tenants call from this machine, so a limit per address would let one slow down the other.
LIMITED = ("security.rate_limiting.enabled=true", "security.rate_limiting.address_calls_per_minute=-1")
VICTIM, SPENT, FRESH = "bench-victim", "bench-spent", "bench-hostile"
TIERS = {VICTIM: "enterprise", SPENT: "free", FRESH: "paid"}
ATTACKERS = {SPENT: "at its rate limit", FRESH: "below its rate limit"}
ELSEWHERE = ", another gate"
BREAK_SECONDS = 0.01        # pause before a closed connection is opened again


async def measure_victim(server: BenchServer, other: BenchServer, plan: Plan) -> list[Figures]:
    """Measure a tenant's calls alone, beside an attack on its gate, and beside an attack on another gate."""
    victim = await make_tenant(server.gate, VICTIM)
    attacks = {says + place: (gate, await make_tenant(gate, name))
               for name, says in ATTACKERS.items() for gate, place in ((server.gate, ""), (other.gate, ELSEWHERE))}
    for place in ("", ELSEWHERE):
        gate, token = attacks[ATTACKERS[SPENT] + place]
        await use_up_calls(LoadGate(gate.url, token))

    def attack(measured: LoadGate) -> contextlib.AbstractAsyncContextManager[None]:
        gate, token = attacks[measured.name]
        return run_rival(gate, token=token, kind=HOSTILE, number=CLIENTS)
    return await measure_rounds([LoadGate(server.gate.url, victim, place) for place in attacks], plan, CLIENTS, attack)


async def make_tenant(gate: LoadGate, name: str) -> str:
    """Create a tenant; return a key of its admin."""
    async with gate.connected(1) as [wire]:
        made = await wire.ask(gate.post(b"/v1/tenants", encoded({"name": name, "tier": TIERS[name]})))
        fields = {"name": name, "principal_kind": "agent", "principal_id": name, "role": "admin",
                  "tenant": msgspec.json.decode(made)["tenant"]}
        answer = await wire.ask(gate.post(b"/v1/keys", encoded(fields)))
    key: str = msgspec.json.decode(answer)["api_key"]
    return key


async def use_up_calls(gate: LoadGate) -> None:
    """Make calls as one tenant until its rate limit refuses them."""
    async with open_connection(gate) as (reader, writer):
        head = b""
        while b" 429 " not in head[:16]:
            writer.write(gate.get(b"/v1/config"))
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(read_length(head, len(head) - 4))


async def keep_hostile(gate: LoadGate, number: int) -> None:
    """Attack over a number of connections until this process is stopped."""
    means = cycle([yield_bodies(gate), yield_inventions(gate), None, yield_wrong_secrets(gate)])
    clients = [asyncio.create_task(hang_up(gate) if requests is None else repeat(gate, requests))
               for _, requests in zip(range(number), means, strict=False)]
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


async def repeat(gate: LoadGate, requests: Iterator[bytes]) -> None:
    """Send one request after another, ignoring the answers; reconnect if the gate closes the connection."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            async with open_connection(gate) as (reader, writer):
                for request in requests:
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
    """Compare the p99 of the measured tenant with the goal, and with the cost of the shared processors alone."""
    return "\n".join(
        f"beside a hostile tenant {says} p99 is {find_worst_ratio(rows, says):.2f} × that of alone (goal: 2); the same "
        f"attack on another gate of this machine makes it {find_worst_ratio(rows, says + ELSEWHERE):.2f} ×"
        for says in ATTACKERS.values())


def find_worst_ratio(rows: list[Figures], place: str) -> float:
    """Return the highest p99 beside the attack, in multiples of alone."""
    alone, beside = ([one for one in rows if one.database == place and bool(one.rival) == rivals]
                     for rivals in (False, True))
    if not (alone and beside):
        raise Failed("nothing was measured")
    return max(one.p99_ms / of.p99_ms for of, one in zip(alone, beside, strict=True))
