"""How a flood of bad requests affects other callers: `asyncgate bench --bad-keys` (threat A10) and `--bad-bodies`
(threat E3).

The benchmark starts a server and calls its health check, alone and beside N connections that send bad keys, or the
worst bodies, without a pause.  Half of the keys have an existing id and a wrong secret, which costs the server most;
half are unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import string
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from zlib import crc32

import click
import msgspec

from asyncgate.bench.bodies import make_worst
from asyncgate.commands.bench.beside import BAD_BODY, BAD_KEY, run_rival
from asyncgate.commands.bench.rounds import Figures, Plan, measure_rounds
from asyncgate.commands.bench.servers import BenchServer
from asyncgate.commands.bench.wire import LoadGate, Wire
from asyncgate.parts.identity.keys_stored import ID_LENGTH, KEY_PREFIX, SECRET_LENGTH

# A key: a prefix, its id, its secret, and a CRC32 checksum of six digits over these.
CHECK_LENGTH = 6
REFUSALS = {BAD_KEY: (401, 429, 503), BAD_BODY: (400, 413, 429, 503)}
BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase


class Memory(msgspec.Struct):
    """The resident memory of a server in KiB; None if the system does not report it."""

    before: int | None
    after: int | None
    most: int | None        # the peak since its start


class Flood(msgspec.Struct):
    """The results of a measurement."""

    kind: str
    number: int
    memory: Memory
    rows: list[Figures]


async def measure_flood(server: BenchServer, plan: Plan, kind: str, number: int) -> Flood:
    """Measure a server's answers alone and during a flood of bad requests."""
    pid, known = server.child.pid, await issue_key(server.gate) if kind == BAD_KEY else ""
    before, _ = read_memory(pid)
    rows = await measure_rounds([server.gate], plan, number, partial(run_rival, token=known, kind=kind, number=number))
    after, most = read_memory(pid)
    return Flood(kind, number, Memory(before, after, most), rows)


async def keep_trying(gate: LoadGate, kind: str, number: int) -> None:
    """Keep a number of bad requests in flight until this process is stopped."""
    make = bad_keys(gate) if kind == BAD_KEY else bad_bodies(gate)
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def taken(wire: Wire, place: int, answer: bytes) -> None:
        wire.send(make(place))

    def refused(wire: Wire, place: int, wrong: Exception) -> None:
        if getattr(wrong, "status", 0) in REFUSALS[kind]:
            wire.send(make(place))
        elif not ended.done():
            ended.set_exception(wrong)

    async with gate.connected(number) as wires:
        for place, wire in enumerate(wires):
            wire.taken, wire.failed = partial(taken, wire, place), partial(refused, wire, place)
            wire.send(make(place))
        click.echo("ready")
        await ended


def bad_keys(gate: LoadGate) -> Callable[[int], bytes]:
    """Return a function that makes a request with a bad key for each connection."""
    return lambda place: LoadGate(gate.url, make_bad_key(gate.token, place)).get(b"/v1/config")


def bad_bodies(gate: LoadGate) -> Callable[[int], bytes]:
    """Return a function that makes requests from the worst bodies, in turn."""
    bodies = cycle(make_worst())
    return lambda place: gate.post(*next(bodies))


async def issue_key(gate: LoadGate) -> str:
    """Issue a key; half of the bad keys have its id."""
    fields = {"name": "bench", "principal_kind": "worker", "principal_id": "bench"}
    async with gate.connected(1) as [wire]:
        answer = await wire.ask(gate.post(b"/v1/keys", msgspec.json.encode(fields)))
    text: str = msgspec.json.decode(answer)["api_key"]
    return text


def make_bad_key(known: str, number: int) -> str:
    """Return a well-formed invalid key; it has the id of an existing key if the number is even."""
    is_unknown = number % 2 or not known.startswith(KEY_PREFIX)
    key_id = random_text(ID_LENGTH) if is_unknown else known[len(KEY_PREFIX):][:ID_LENGTH]
    start = KEY_PREFIX + key_id + random_text(SECRET_LENGTH)
    check = crc32(start.encode())
    return start + "".join([BASE62[check // 62 ** place % 62] for place in range(CHECK_LENGTH - 1, -1, -1)])


def random_text(length: int) -> str:
    """Return random digits of this length."""
    return "".join([secrets.choice(BASE62) for _ in range(length)])


def read_memory(pid: int) -> tuple[int | None, int | None]:
    """Return the current and the peak memory of a process, in KiB."""
    with contextlib.suppress(OSError):
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return int(status["VmRSS"].split()[0]), int(status["VmHWM"].split()[0])
    return None, None


def format_memory(flood: Flood) -> str:
    """Describe the use of memory in one line."""
    memory = flood.memory
    if memory.before is None or memory.after is None or memory.most is None:
        return "this system does not report the server's memory"
    return (f"the server's memory: {memory.before / 1024:.1f} MiB before, {memory.after / 1024:.1f} MiB after "
            f"{flood.number} at once, {memory.most / 1024:.1f} MiB at most")
