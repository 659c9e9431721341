"""How fast a gate answers, measured from outside: a load of keep-alive connections that speak raw HTTP.

    asyncgate bench-server --database sqlite:///bench.db        # a gate, with a bare echo beside it
    asyncgate bench --mode echo --mode cycle --clients 1,8,32   # in turns, so that a ratio can be quoted

Each client sends its next request when the last one is answered.  A step is what a mode does again and again: one cycle
is create, claim and complete, three requests and four receipts.  Read ratios of one run, not times of one machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast
from urllib.parse import urlsplit

import click
import msgspec
from starlette.routing import Route

from asyncgate import configured, guard_start, serve_forever
from asyncgate.parts.logs import start_logging
from asyncgate.parts.settings import Configured

Took = defaultdict[str, list[float]]    # seconds by operation


class Failed(Exception):
    """An answer that no benchmark should see; the text is its first line."""


class Wire(asyncio.Protocol):
    """One connection: a request, its answer, and the next."""

    def __init__(self, head: str) -> None:
        self.head, self.held = head, b""
        self.answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way to the server."""
        self.transport = cast(asyncio.WriteTransport, transport)     # uvloop's are no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits that nothing will come."""
        if self.answer and not self.answer.done():
            self.answer.set_exception(Failed("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        """Gather an answer; the gate always says how long its body is."""
        self.held += data
        head, end, rest = self.held.partition(b"\r\n\r\n")
        if not end:
            return
        size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(rest) < size or self.answer is None or self.answer.done():
            return
        self.held = rest[size:]
        if head[9:12] == b"200":
            self.answer.set_result(rest[:size])
        else:
            self.answer.set_exception(Failed(f"{head[9:12].decode()} {rest[:300].decode(errors='replace')}"))

    async def post(self, path: str, body: bytes, more: str = "") -> bytes:
        """Send one request and return the body of its answer."""
        self.answer = asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\n{self.head}{more}content-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)
        return await self.answer


class Client:
    """One of the clients of a load."""

    def __init__(self, wire: Wire, number: int, took: Took) -> None:
        self.wire, self.name, self.took = wire, f"bench-{number}", took

    async def call(self, what: str, path: str, body: Any, more: str = "") -> Any:
        """Make one timed request."""
        sent, begun = msgspec.json.encode(body), time.perf_counter()
        answer = await self.wire.post(path, sent, more)
        self.took[what].append(time.perf_counter() - begun)
        return msgspec.json.decode(answer)

    async def create(self) -> None:
        """Hand over one task."""
        await self.call("create", "/v1/tasks", TASK)

    async def cycle(self) -> None:
        """Hand over a task, lease one, complete it; the task may be another client's."""
        await self.create()
        found = await self.call("claim", "/v1/leases/claim", {"worker_id": self.name, "accept_types": [TASK["type"]]})
        for task in found["tasks"]:
            done = {"worker_id": self.name, "lease_id": task["lease_id"], **RESULT}
            await self.call("complete", f"/v1/tasks/{task['task_id']}/complete", done)

    async def claim_empty(self) -> None:
        """Ask for work that nobody has."""
        await self.call("claim", "/v1/leases/claim", {"worker_id": self.name, "accept_types": ["bench.nothing"]})

    async def batch(self) -> None:
        """Hand over, lease and complete a hundred tasks in three requests."""
        await self.call("create 100", "/v1/tasks/batch", {"tasks": [TASK] * 100})
        wanted = {"worker_id": self.name, "accept_types": [TASK["type"]], "max_tasks": 100}
        found = await self.call("claim 100", "/v1/leases/claim", wanted)
        done = [{"task_id": task["task_id"], "lease_id": task["lease_id"], **RESULT} for task in found["tasks"]]
        if done:
            await self.call("complete 100", "/v1/tasks/complete-batch", {"worker_id": self.name, "tasks": done})

    async def echo(self) -> None:
        """Ask the bare echo of a bench-server, the yardstick."""
        await self.call("echo", "/echo", TASK)

    async def mcp(self) -> None:
        """Hand over one task through the newest MCP."""
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call",
                "params": {"name": "asyncgate.create_task", "arguments": TASK, "_meta": MCP_META}}
        await self.call("create over MCP", "/mcp", call, MCP_HEAD)


TASK = {"type": "bench.task", "payload": {"document": 7, "pages": [1, 2, 3]}, "principal_id": "bench"}
RESULT = {"result": {"ok": True}, "artifacts": [{"type": "file", "uri": "file:///dev/null"}]}
REVISION = "2026-07-28"
MCP_META = {"io.modelcontextprotocol/protocolVersion": REVISION, "io.modelcontextprotocol/clientCapabilities": {}}
MCP_HEAD = (f"accept: application/json, text/event-stream\r\nmcp-protocol-version: {REVISION}\r\n"
            "mcp-method: tools/call\r\nmcp-name: asyncgate.create_task\r\n")
MODES: dict[str, Callable[[Client], Awaitable[None]]] = {
    "cycle": Client.cycle, "create": Client.create, "claim-empty": Client.claim_empty, "batch": Client.batch,
    "mcp": Client.mcp, "echo": Client.echo}


class Row(msgspec.Struct):
    """One line of the table."""

    mode: str
    clients: int
    operation: str
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    p999_ms: float


async def load(url: str, token: str, mode: str, clients: int, seconds: float) -> list[Row]:
    """Run one mode with so many clients for so long."""
    where, loop = urlsplit(url), asyncio.get_running_loop()
    host, port = where.hostname or "127.0.0.1", where.port or 80
    head = f"host: {where.netloc}\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {token}\r\n" if token else ""
    took: Took = defaultdict(list)
    wires = [(await loop.create_connection(lambda: Wire(head), host, port))[1] for _ in range(clients)]
    begun = loop.time()

    async def run(client: Client) -> None:
        while loop.time() < begun + seconds:
            await MODES[mode](client)

    try:
        await asyncio.gather(*(run(Client(wire, number, took)) for number, wire in enumerate(wires)))
    finally:
        for wire in wires:
            wire.transport.close()
    return [row(mode, clients, name, times, loop.time() - begun) for name, times in took.items()]


def row(mode: str, clients: int, operation: str, times: list[float], seconds: float) -> Row:
    """Sum up one operation."""
    cuts = statistics.quantiles(times, n=1000) if len(times) > 1 else times * 999
    p50, p99, p999 = (round(cuts[at] * 1000, 3) for at in (499, 989, 998))
    return Row(mode, clients, operation, round(len(times) / seconds, 1), p50, p99, p999)


async def measured(url: str, token: str, modes: list[str], clients: list[int], seconds: float,
                   rounds: int) -> list[Row]:
    """Run every mode with every number of clients, in turns, and return the medians of the rounds."""
    found: defaultdict[tuple[str, int, str], list[Row]] = defaultdict(list)
    for turn in range(rounds):
        for number in clients:
            for mode in modes:
                told(f"round {turn + 1} of {rounds}: {mode} with {number} clients")
                for one in await load(url, token, mode, number, seconds):
                    found[one.mode, one.clients, one.operation].append(one)
    told("")
    return [median(rows) for rows in found.values()]


def median(rows: list[Row]) -> Row:
    """Return the medians of the figures of several rounds."""
    figures = {name: statistics.median(getattr(one, name) for one in rows)
               for name in ("requests_per_second", "p50_ms", "p99_ms", "p999_ms")}
    return Row(rows[0].mode, rows[0].clients, rows[0].operation, **figures)


def run(work: Coroutine[Any, Any, list[Row]]) -> list[Row]:
    """Run on the fastest loop there is: the load must not be what is measured."""
    with contextlib.suppress(ImportError):
        import uvloop
        return uvloop.run(work)
    return asyncio.run(work)


def told(text: str) -> None:
    """Show on a terminal what is going on."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", err=True, nl=False)


def table(rows: list[Row]) -> str:
    """Write the rows for people; a ratio to the echo stands where the echo was measured too."""
    echo = {one.clients: one.requests_per_second for one in rows if one.mode == "echo"}
    lines = [f"{'mode':12} {'clients':>7}  {'operation':16} {'requests/s':>10} {'of echo':>8} "
             f"{'p50 ms':>8} {'p99 ms':>8} {'p999 ms':>8}"]
    for one in sorted(rows, key=lambda one: (one.mode, one.clients)):
        alike = [other for other in rows if (other.mode, other.clients) == (one.mode, one.clients)]
        total = sum(other.requests_per_second for other in alike)
        ratio = f"{total / echo[one.clients]:.2f}" if one.clients in echo else "-"
        lines.append(f"{one.mode:12} {one.clients:7}  {one.operation:16} {one.requests_per_second:10,.0f} {ratio:>8} "
                     f"{one.p50_ms:8.2f} {one.p99_ms:8.2f} {one.p999_ms:8.2f}")
    return "\n".join(lines)


def numbers(ctx: click.Context, param: click.Parameter, said: str) -> list[int]:
    """Read a list of numbers such as 1,8,32."""
    try:
        found = [int(part) for part in said.split(",")]
    except ValueError:
        raise click.BadParameter(f"{said} is not a list of numbers such as 1,8,32") from None
    if min(found) < 1:
        raise click.BadParameter("there is at least one client")
    return found


@click.command()
@click.option("--mode", "modes", multiple=True, type=click.Choice(sorted(MODES)), default=["cycle"], show_default=True,
              help="What to do again and again; several run in turns.")
@click.option("--mcp", is_flag=True, help="MCP beside REST: the same as --mode create --mode mcp.")
@click.option("--clients", default="1,8,32", show_default=True, callback=numbers, help="How many at once, as a list.")
@click.option("--seconds", default=3.0, show_default=True, type=click.FloatRange(min=0.1), help="How long each lasts.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Rounds; medians are printed.")
@click.option("--url", envvar="ASYNCGATE_URL", default="http://127.0.0.1:8080", show_default=True, help="The gate.")
@click.option("--token", envvar="ASYNCGATE_API_KEY", default="", help="Its credential.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(modes: tuple[str, ...], mcp: bool, clients: list[int], seconds: float, rounds: int, url: str, token: str,
          as_json: bool) -> None:
    """Measure a gate from outside: rates and latencies, medians of several rounds.

    The load creates tasks of the type bench.task and leaves what it does not complete: use a database of its own.
    The mode echo needs `asyncgate bench-server`; every other mode then shows its rate as a part of the echo's.
    """
    modes = ("create", "mcp") if mcp else modes
    try:
        for mode in modes:      # warm up, and see whether it works at all
            run(load(url, token, mode, 1, 0.2))
        rows = run(measured(url, token, list(modes), clients, seconds, rounds))
    except (Failed, OSError) as wrong:
        raise click.ClickException(f"{url}: {wrong}") from None
    click.echo(msgspec.json.encode(rows).decode() if as_json else table(rows))


class Document(msgspec.Struct):
    """What the echo reads: a body like a task's."""

    type: str
    payload: msgspec.Raw


async def echo(request: Any) -> Any:
    """Decode a body into a Struct and answer with JSON, as a stock Starlette route would, and do nothing else."""
    from starlette.responses import Response
    document = msgspec.json.decode(await request.body(), type=Document)
    return Response(msgspec.json.encode({"type": document.type, "status": "queued"}), media_type="application/json")


@click.command("bench-server")
@click.option("--host", metavar="ADDRESS", help="Address to listen on; default 127.0.0.1.")
@click.option("--port", type=int, metavar="NUMBER", help="Port to listen on; default 8080, 0 takes any free one.")
@configured
def bench_server(configured: Configured) -> None:
    """Serve a gate with a bare echo at /echo beside it, the yardstick of `asyncgate bench`."""
    guard_start(configured.settings)
    start_logging(configured.settings)
    sys.exit(serve_forever(configured.settings, beside=[Route("/echo", echo, methods=["POST"])]))
