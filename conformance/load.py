"""A real server, and clients that put load on it and record their observations."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from asyncgate.conformance.forks import ForkingPopen
from asyncgate.conformance.harness import Gate, are_here
from asyncgate.conformance.history import Call
from asyncgate.conformance.ledgers import PROCESS_SECONDS
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.model import errors
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.database import Around
from asyncgate.parts.model.settings import Settings, strip_settings
from asyncgate.parts.operations import OPERATIONS

KEY, NOT_COUNTED = "a-secret-of-the-crash-tests", "rate_limiter_unavailable"
HASTY_GATE: dict[str, Any] = {"lease_sweep_interval_seconds": 0.2, "expiry_jitter_seconds": 0.1}
TENANT = "00000000-0000-0000-0000-000000000000"
SERVE = "from asyncgate import main; main()"
ARTIFACTS = [{"uri": "file:///out"}]
REST = {
    "create_task": "POST /v1/tasks", "lease_next": "POST /v1/leases/claim", "get_task": "GET /v1/tasks/{task_id}",
    "renew_lease": "POST /v1/leases/renew", "release_lease": "POST /v1/leases/release",
    "record_step": "POST /v1/tasks/{task_id}/steps",
    "start_task": "POST /v1/tasks/{task_id}/running", "report_progress": "POST /v1/tasks/{task_id}/progress",
    "complete": "POST /v1/tasks/{task_id}/complete", "fail": "POST /v1/tasks/{task_id}/fail",
    "cancel_task": "POST /v1/tasks/{task_id}/cancel", "rerun_task": "POST /v1/tasks/{task_id}/rerun",
    "pause_work": "POST /v1/pauses", "drain_work": "POST /v1/pauses/drain", "resume_work": "POST /v1/pauses/resume",
    "preview_bulk": "POST /v1/bulks/preview", "run_bulk": "POST /v1/bulks",
    "list_receipts": "GET /v1/receipts", "list_open_obligations": "GET /v1/obligations/open",
    "request_input": "POST /v1/tasks/{task_id}/inputs", "answer_input": "POST /v1/tasks/{task_id}/inputs/answer",
    "set_limit": "POST /v1/task-limits", "remove_limit": "POST /v1/task-limits/{name}/remove",
    "append_output": "POST /v1/tasks/{task_id}/output", "list_tasks": "GET /v1/tasks", "health": "GET /v1/health"}

OPERATING = {"pause_work", "drain_work", "resume_work", "preview_bulk", "run_bulk", "set_limit", "remove_limit"}
KINDS_OF_TASK, REQUIREMENTS = ["demo", "demo", "rare"], [{}, {}, {"capabilities": ["gpu"]}]
TARGETS: list[dict[str, Any]] = [
    {"type": "demo"}, {"type": "rare"}, {"type": "rare", "capabilities": ["gpu"]}, {"type": "demo", "capabilities": []},
    {"worker": "w0"}, {"worker": "w1"}, {"worker": "w2"}, {"whole_tenant": True}]
BULKS: list[dict[str, Any]] = [
    {"action": "cancel", "type": "rare", "status": "queued"}, {"action": "release"},
    {"action": "prioritize", "status": "queued"}, {"action": "rerun", "status": "failed"}, {"action": "rerun"}]
# Limits that are set again and again, and what tasks name.
LIMITED: list[dict[str, Any]] = [
    {"name": "shared", "concurrency_total": 2}, {"name": "shared", "concurrency_total": 4},
    {"name": "each", "concurrency_per_key": 1}, {"name": "each", "concurrency_per_key": 2, "concurrency_total": 3}]
NAMED_LIMITS: list[dict[str, str] | None] = [
    None, None, None, {"shared": ""}, {"each": "a"}, {"each": "b"}, {"shared": "", "each": "a"},
    {"shared": "", "each": "c"}]
# What becomes of work that is asked for again, and for how long a task keeps the key.
UNIQUE: list[dict[str, Any]] = [
    {}, {"on_conflict": "refuse"}, {"on_conflict": "replace"}, {"while": "queued", "on_conflict": "replace"},
    {"while": "queued", "on_conflict": "supersede"}, {"while": 1, "on_conflict": "return"},
    *[{"on_conflict": "supersede"}] * 2, *[{"on_conflict": "keep_latest"}] * 4]
# What somebody tries with the lease of another.
THEFTS: list[tuple[str, dict[str, Any]]] = [
    ("complete", {"result": 1, "artifacts": ARTIFACTS}), ("fail", {"error": "theft"}),
    ("renew_lease", {"extend_by_seconds": 1})]
CAN_LIMIT = bool(are_here(["set_limit"]))
# What workers ask the boss, by key.
QUESTIONS: dict[str, dict[str, Any]] = {
    "wait": {}, "soon": {"expires_in_seconds": 1}, "must": {"expires_in_seconds": 1, "on_expiry": "fail"}}
CAN_CASCADE, CAN_APPEND = bool(are_here(["wait_tasks"])), bool(are_here(["append_output"]))
CAN_ASK = bool(are_here(["request_input"]))

T = TypeVar("T")


class OneTenant(Around):
    """The data of one tenant in a backend, because tests may share a database."""

    def __init__(self, backend: Any, tenant: str) -> None:
        super().__init__(backend)
        self.tenant = tenant

    async def tenants(self) -> list[str]:
        """Return the tenant, if it has stored anything."""
        return [tenant for tenant in await self.backend.tenants() if tenant == self.tenant]

    async def cut_cascades(self, before: float, limit: int) -> list[tuple[str, str]]:
        """Return the tenant's cascades that are not finished."""
        return [row for row in await self.backend.cut_cascades(before, limit) if row[0] == self.tenant]


async def finish_cascades(backend: Any) -> None:
    """Do what upkeep does a while after a crash: go on with cascades that were cut off."""
    if CAN_CASCADE:
        from asyncgate.extras.families import rules
        # With its extras: the children's questions end with them.
        await rules.resume_cascades(engine_over(backend, Settings()), 0.0)


def own_tenant() -> dict[str, Any]:
    """Return the setting of a new tenant for the clients of a server."""
    return {"default_tenant_id": str(uuid.uuid4())}


async def call_to_end(call: Callable[[], T]) -> T:
    """Call in a thread, and wait for its end even if cancelled: a program that it starts would be nobody's."""
    calling = asyncio.get_running_loop().run_in_executor(None, call)    # no task: who cancels all would not cancel it
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        await asyncio.wait([calling])
        raise


class Gates(Protocol):
    """The interface that a client needs of one server, or of several that share a database."""

    up: asyncio.Event
    tenant: str

    @property
    def port(self) -> int:
        """Return the port to connect to now."""


class GateServer:
    """A gate in a separate process, which can be killed and restarted on the same database."""

    def __init__(self, database: str, *, first: str = "", command: str = "serve", **settings: Any) -> None:
        self.database, self.settings, self.command = database, settings, command
        self.pipe: Any = None
        self.script = f"{first}\n{SERVE}"       # `first` is Python code that the process runs first
        self.tenant: str = settings.get("default_tenant_id", TENANT)
        self.lines: list[str] = []
        self.port = 0
        self.up = asyncio.Event()

    async def start(self) -> None:
        """Start the process and wait until it is ready."""
        flags = [part for name, value in self.settings.items() for part in ("--set", f"{name}={value}")]
        command = [sys.executable, "-c", self.script, self.command, "--port", "0", "--database", self.database, *flags]
        surroundings = {**strip_settings(os.environ), "ASYNCGATE_API_KEY": KEY}

        def begin() -> None:
            self.process = ForkingPopen(command, env=surroundings, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE, bufsize=0, start_new_session=True)
            self.pipe = self.process.stderr

        try:
            await call_to_end(begin)
            await self._follow()
        except BaseException:       # such as a signal to this program
            if "process" in vars(self):
                self.process.kill()
                self.pipe.close()
            raise

    async def _follow(self) -> None:
        """Wait for its address, and read what it says from then on."""
        self.errors = asyncio.StreamReader()
        self.pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self.errors), self.process.stderr)
        async with asyncio.timeout(PROCESS_SECONDS):
            while not (match := re.search(r" serves http://[^ ]*:(\d+)", await self._line())):
                pass
        self.port = int(match[1])
        self.reading = asyncio.create_task(self._read())
        self.up.set()

    async def _line(self) -> str:
        if not (line := await self.errors.readline()):
            self.pipe.close()
            await self.ended()
            raise RuntimeError("the server did not start:\n" + "\n".join(self.lines))
        self.lines.append(line.decode().rstrip())
        return self.lines[-1]

    async def _read(self) -> None:
        with contextlib.suppress(RuntimeError):
            while True:
                await self._line()

    async def stop(self, how: signal.Signals) -> int:
        """End the process with a signal; return its exit status."""
        self.up.clear()
        self.process.send_signal(how)       # nothing happens to one that has ended
        async with asyncio.timeout(PROCESS_SECONDS):
            await asyncio.shield(self.reading)      # who gives up may kill it and wait again
        return await self.ended()

    async def ended(self) -> int:
        """Wait for the end of the process; return its exit status."""
        return await asyncio.to_thread(self.process.wait, PROCESS_SECONDS)


@contextlib.asynccontextmanager
async def serving(database: str, *, first: str = "", command: str = "serve",
                  **settings: Any) -> AsyncIterator[GateServer]:
    """Serve a database during a block; always end the process."""
    server = GateServer(database, first=first, command=command, **settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(signal.SIGKILL)


class Fleet:
    """Several servers that look like one to a client, which uses any live one."""

    def __init__(self, servers: list[GateServer], seed: int) -> None:
        self.servers, self.random, self.tenant = servers, random.Random(seed), servers[0].tenant
        self.up = asyncio.Event()
        self.up.set()

    @property
    def port(self) -> int:
        """Return the port of a server that should be live."""
        return self.random.choice(self.living or self.servers).port

    @property
    def living(self) -> list[GateServer]:
        """Return the servers that should be live."""
        return [server for server in self.servers if server.up.is_set()]

    async def kill(self, number: int, tries: int = 1) -> None:
        """Kill a server and restart it, as often as a supervisor would where its database fails just then."""
        server = self.servers[number]
        if self.living == [server]:
            self.up.clear()
        assert await server.stop(signal.SIGKILL) == -signal.SIGKILL
        for attempt in range(tries):
            try:
                await server.start()
                break
            except RuntimeError:
                if attempt == tries - 1:
                    raise
        self.up.set()


@contextlib.asynccontextmanager
async def fleet(database: str, seed: int, count: int, first: str = "", **settings: Any) -> AsyncIterator[Fleet]:
    """Serve a database from several processes; half of them keep their name after a crash, the others get a new one."""
    async with contextlib.AsyncExitStack() as stack:
        own, run = own_tenant(), uuid.uuid4().hex[:8]       # other tests may use the same database
        names: list[dict[str, Any]] = [{"instance_id": f"gate-{run}-{n}"} if n % 2 else {} for n in range(count)]
        servers = [await stack.enter_async_context(serving(database, first=first, **settings, **own, **name))
                   for name in names]
        yield Fleet(servers, seed)


class Client:
    """A client with one connection, which records all its calls."""

    def __init__(self, server: Gates, by: str, write: Callable[[Call], None] = lambda call: None) -> None:
        self.server, self.by, self.write = server, by, write
        self.wire: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.closed: list[asyncio.StreamWriter] = []
        self.head = ""      # of the last answer, in lower case
        self.answer: Any = None     # the last one

    async def ask(self, operation: str, **ask: Any) -> Call:
        """Send one request; a broken connection counts as an unknown outcome."""
        call = Call(tenant=self.server.tenant, operation=operation, ask=ask, by=self.by, started=time.time(), ended=0.0)
        try:
            async with asyncio.timeout(PROCESS_SECONDS):
                call.reply, call.error = await self.exchange(operation, ask)
        except (OSError, EOFError, ValueError):
            self.close()
        except (KeyError, TypeError) as odd:
            raise RuntimeError(f"{operation} got an answer of no known form: {self.head!r} {self.answer!r}") from odd
        call.ended = time.time()
        self.write(call)
        return call

    async def insist(self, operation: str, **ask: Any) -> Call:
        """Retry until an answer comes, also across restarts of the server; a gate that never answers is a finding."""
        async with asyncio.timeout(5 * PROCESS_SECONDS):
            while (call := await self.ask(operation, **ask)).unknown or call.error == NOT_COUNTED:
                await self.server.up.wait()
                await asyncio.sleep(0.002)
        return call

    async def exchange(self, operation: str, ask: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
        """Send one request; return the reply, or the code of the refusal."""
        status, answer = await self.http(*self.request(operation, ask))
        return (answer, None) if status == 200 else (None, answer["error"])

    def request(self, operation: str, ask: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
        """Return the method, path and body of an operation."""
        verb, path = REST[operation].split()
        who = {"worker_id": self.by} if self.by.startswith("w") else {"agent_id": self.by}
        if operation in OPERATING:      # for admins; the credential says who it is
            who = {}
        return verb, path.format(**ask), {**who, **ask}

    async def http(self, verb: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Send one request on the kept connection and read its answer."""
        if self.wire is not None and self.wire[1].is_closing():     # uvloop raises where somebody writes to it
            self.close()
        if self.wire is None:
            self.wire = await asyncio.open_connection("127.0.0.1", self.server.port)
        reader, writer = self.wire
        text = b""
        if verb == "GET":
            path += "?" + "&".join(f"{name}={value}" for name, value in body.items() if name != "task_id" and value)
        else:
            text = json.dumps(body).encode()
        writer.write(f"{verb} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
                     f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text)
        self.head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = re.search(r"content-length: (\d+)", self.head)
        answer = await reader.readexactly(int(length[1]) if length else 0)
        if "connection: close" in self.head:
            self.close()
        self.answer = json.loads(answer)
        return int(self.head.split()[1]), self.answer

    def close(self) -> None:
        """Close the connection."""
        if self.wire is not None:
            self.wire[1].close()
            self.closed.append(self.wire[1])
            self.wire = None

    async def aclose(self) -> None:
        """Close this connection and all earlier ones, and wait until they are closed."""
        self.close()
        for writer in self.closed:
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class McpClient(Client):
    """A client that speaks MCP, in which each operation is a tool."""

    async def exchange(self, operation: str, ask: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
        """Call the tool of an operation."""
        verb, _, fields = self.request(operation, ask)
        arguments = {name: value for name, value in fields.items() if verb != "GET" or value}
        _, answer = await self.http("POST", "/mcp", {
            "jsonrpc": "2.0", "id": 1, "method": "tools/call",
            "params": {"name": f"asyncgate.{operation}", "arguments": arguments}})
        return (answer["result"], None) if "result" in answer else (None, answer["error"]["data"]["code"])


class Straight(Client):
    """A client in the process of the gate."""

    def __init__(self, load: StraightLoad, by: str) -> None:
        super().__init__(load, by, load.write)
        self.load = load

    async def ask(self, operation: str, **ask: Any) -> Call:
        """Perform an operation; what another error than a refusal leaves is unknown, and so is a lost reply."""
        load, op = self.load, OPERATIONS[operation]
        fields = self.request(operation, ask)[2] if operation != "health" else {}
        call = Call(tenant=TENANT, operation=operation, ask=ask, by=self.by, started=load.now(), ended=0.0)
        self.begin(call)
        if op.rest[0][0] == "GET":      # as on the wire, where what is empty is not said
            fields = {name: value for name, value in fields.items() if value}
        try:
            reply = await load.gate.perform(op, **fields)
            if not load.losing or load.random.random() >= load.losing:
                call.reply = json.loads(encode_json(reply))
        except errors.GateError as refusal:
            call.error = refusal.code
        except Exception as error:
            load.unexpected.append(repr(error))
        finally:        # also of a call that is canceled
            call.ended = load.now()
            self.end(call)
        return call

    def begin(self, call: Call) -> None:
        """Take note of a call that begins."""

    def end(self, call: Call) -> None:
        """Take note of a call that has ended."""
        self.write(call)


class Load:
    """Agents, workers and a reader that use a server until told to stop."""

    ttls: tuple[int, ...] = (1, 1, 60)      # of the workers' leases
    bulks = BULKS

    def __init__(self, server: Gates, seed: int, agents: int = 3, workers: int = 6, *, mixed: bool = False) -> None:
        self.server, self.random, self.calls = server, random.Random(seed), list[Call]()
        self.mixed = mixed      # every second client speaks MCP
        self.agents, self.workers = [f"a{n}" for n in range(agents)], [f"w{n}" for n in range(workers)]
        self.number = 0
        self.stopping = False
        self.made: list[str] = []
        self.leases: deque[dict[str, Any]] = deque(maxlen=10)       # the last that were granted
        self.now: Callable[[], float] = time.time
        self.clients: list[Client] = []
        self.goal, self.reached = 0, asyncio.Event()

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self.clients:
            await client.aclose()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Use the server during a block, then finish all running calls."""
        everybody = [*map(self.agent, self.agents), *map(self.worker, self.workers), self.reader(self.agents[0]),
                     self.thief(), self.pauser(), self.bulker(), *[self.boss()] * CAN_ASK,
                     *([self.limiter()] if CAN_LIMIT else [])]
        under_way = [asyncio.create_task(coroutine) for coroutine in everybody]
        try:
            yield
            self.stopping = True
            await asyncio.gather(*under_way)
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    def client(self, by: str) -> Client:
        """Return a client that records into this load's history."""
        speaks = McpClient if self.mixed and len(self.clients) % 2 else Client
        self.clients.append(speaks(self.server, by, self.write))
        return self.clients[-1]

    def write(self, call: Call) -> None:
        """Add a call to the history."""
        self.calls.append(call)
        if len(self.calls) >= self.goal:
            self.reached.set()

    async def grown(self, by: int) -> None:
        """Wait until the history has grown by a number of calls."""
        self.goal = len(self.calls) + by
        self.reached.clear()
        async with asyncio.timeout(PROCESS_SECONDS):
            await self.reached.wait()

    def next(self) -> int:
        """Return an unused number."""
        self.number += 1
        return self.number

    async def agent(self, name: str) -> None:
        """Create tasks with keys; sometimes read or cancel one."""
        client, mine, draw = self.client(name), list[str](), self.random
        while not self.stopping:
            asks = {"type": draw.choice(KINDS_OF_TASK), "requirements": draw.choice(REQUIREMENTS),
                    "payload": {"by": name}, "idempotency_key": f"{name}-{self.next()}", "priority": draw.randint(0, 3),
                    "max_attempts": 3, "retry_backoff_seconds": 0, "max_expiries": draw.choice([0, 2]),
                    "limits": draw.choice(NAMED_LIMITS)}
            if draw.random() < 0.3:
                asks |= {"unique": {"key": draw.choice("xyz"), **draw.choice(UNIQUE)}, "payload": {"n": self.number}}
            made = await client.insist("create_task", **asks)
            if draw.random() < 0.05:
                await client.insist("create_task", **asks)
            if made.reply:
                mine.append(made.reply["task_id"])
                self.made.append(mine[-1])
            if mine and draw.random() < 0.5:
                await client.ask("get_task", task_id=draw.choice(mine[-50:]))
            if mine and draw.random() < 0.05:
                await client.insist("cancel_task", task_id=draw.choice(mine[-20:]))
            if mine and draw.random() < 0.1:
                await self.rerun(client, draw.choice(mine[-50:]), mine)

    async def rerun(self, client: Client, task_id: str, mine: list[str]) -> None:
        """Run a task again, if it has ended."""
        made = await client.insist("rerun_task", task_id=task_id, idempotency_key=f"again-{client.by}-{self.next()}")
        if made.reply:
            mine.append(made.reply["task_id"])
            self.made.append(mine[-1])

    async def worker(self, name: str) -> None:
        """Claim tasks and end them in some way, or abandon them."""
        client = self.client(name)
        while not self.stopping:
            claim = await client.insist("lease_next", claim_id=f"{name}-{self.next()}",
                                        max_tasks=self.random.randint(1, 3), capabilities=["gpu"],
                                        lease_ttl_seconds=self.random.choice(self.ttls))
            for offer in claim.reply["tasks"] if claim.reply else ():
                await self.work(client, {"task_id": offer["task_id"], "lease_id": offer["lease_id"],
                                         "fence": offer["fence"]})
            if claim.reply and not claim.reply["tasks"]:
                await asyncio.sleep(0.01)

    async def work(self, client: Client, under: dict[str, Any]) -> None:
        """Complete, fail or abandon one task."""
        self.leases.append(under)
        draw = self.random.random()
        if draw < 0.10:
            await client.ask("renew_lease", **under, extend_by_seconds=self.random.choice([1, 60]))
        elif draw < 0.20:
            await client.ask("start_task", **under)
        elif draw < 0.30:
            await client.ask("report_progress", **under, progress={"half": "done"})
        for seq in range(1, self.random.choice([1, 1, 1, 3])):
            await client.insist("record_step", **under, seq=seq, name="half", value=self.random.random())
        draw = self.random.random()
        if CAN_APPEND and self.random.random() < 0.2:
            await self.append(client, under)
        if draw < 0.60:
            await client.insist("complete", **under, result={"n": 1}, artifacts=ARTIFACTS)
        elif draw < 0.70:
            await client.insist("complete", **under, result={"n": 1})
            await client.insist("complete", **under, result={"n": 1}, artifacts=ARTIFACTS)
        elif draw < 0.85:
            await client.insist("fail", **under, error="no luck", retryable=draw < 0.80)
        elif draw < 0.89:
            await client.insist("release_lease", **under)
        elif draw < 0.92:
            await client.insist("release_lease", **under, after_seconds=self.random.choice([0.0, 0.05]), checkpoint=1)
        elif draw < 0.95:
            await self.wait_for_children(client, under)
        elif draw < 0.98 and CAN_ASK:
            await self.ask(client, under)

    async def thief(self) -> None:
        """Use leases of others, which is refused, now and then."""
        client, draw = self.client("w-thief"), self.random
        while not self.stopping:
            if self.leases:
                operation, more = draw.choice(THEFTS)
                await client.ask(operation, **draw.choice(self.leases), **more)
            await self.server.up.wait()
            await asyncio.sleep(0.05)

    async def append(self, client: Client, under: dict[str, Any]) -> None:
        """Append chunks that differ, each of them once, though calls are repeated."""
        position: int | None = None
        for _ in range(self.random.randint(1, 3)):
            chunks = [f"{client.by} {self.next()}" for _ in range(self.random.randint(1, 3))]
            if position is None:
                appended = await client.ask("append_output", **under, chunks=chunks)
            else:
                appended = await client.insist("append_output", **under, chunks=chunks, position=position)
            if appended.reply is None:
                return
            position = appended.reply["chunks"]

    async def wait_for_children(self, client: Client, under: dict[str, Any]) -> None:
        """Create children, and give the lease back until they have ended; cancel some of them."""
        parent = under["task_id"]
        for number in range(self.random.randint(1, 3)):
            made = await client.insist("create_task", type=self.random.choice(KINDS_OF_TASK), payload={"n": number},
                                       parent_task_id=parent, idempotency_key=f"{parent}-{number}-{self.next()}")
            if made.reply:
                self.made.append(made.reply["task_id"])
        await client.insist("release_lease", **under, until_children=self.random.choice(["all", "any"]))
        if made.reply and self.random.random() < 0.5:
            await client.insist("cancel_task", task_id=made.reply["task_id"])
        if CAN_CASCADE and self.random.random() < 0.3:      # once: what a kill has cut off, upkeep goes on with
            await client.ask("cancel_task", task_id=parent, cascade=True)

    async def ask(self, client: Client, under: dict[str, Any]) -> None:
        """Ask the boss something; go on if there is an answer already."""
        key, keeps = self.random.choice([*QUESTIONS]), self.random.random() < 0.3
        asks = {"key": key, "message": "May I?", "to": {"kind": "agent", "id": "boss"}, **QUESTIONS[key]}
        asked = await client.insist("request_input", **under, **asks, keep_lease=keeps)
        if asked.reply and not asked.reply["lease_ended"]:
            await client.insist("complete", **under, result={"n": 1}, artifacts=ARTIFACTS)

    async def boss(self) -> None:
        """Answer what is asked, but not all at once, and sometimes twice."""
        client, draw = self.client("boss"), self.random
        while not self.stopping:
            page = await client.ask("list_open_obligations", limit=20)
            for request in page.reply["open_obligations"] if page.reply else ():
                if request["body"] is None:     # only the ledger has it, which is away
                    continue
                for _ in range(draw.choice([0, 1, 1, 2])):
                    await client.insist("answer_input", task_id=request["task_id"], key=request["body"]["key"],
                                        action=draw.choice(["accept", "decline"]), content={"by": "boss"})
            await self.server.up.wait()
            await asyncio.sleep(0.02)

    async def pauser(self) -> None:
        """Pause something for a while, again and again; resume it, or let it end by itself."""
        client, draw = self.client("o1"), self.random
        while not self.stopping:
            target = draw.choice(TARGETS)
            until = datetime.fromtimestamp(self.now() + draw.choice([0.05, 60.0]), UTC).isoformat()
            await client.insist(draw.choice(["pause_work", "drain_work"]), **target, until=until)
            await asyncio.sleep(0.2 * draw.random())
            await client.insist("resume_work", **target)
            await asyncio.sleep(0.05)

    async def limiter(self) -> None:
        """Set limits again and again, and remove one now and then."""
        client, draw = self.client("o3"), self.random
        while not self.stopping:
            limit = draw.choice(LIMITED)
            await client.insist("set_limit", **limit)
            await asyncio.sleep(0.5 * draw.random())
            if draw.random() < 0.2:
                await client.insist("remove_limit", name=limit["name"])

    async def bulker(self) -> None:
        """Do something to many tasks, again and again, in small pieces."""
        client, draw = self.client("o2"), self.random
        while not self.stopping:
            asks = dict(draw.choice(self.bulks))
            if draw.random() < 0.5:
                asks["created_by"] = draw.choice(self.agents)
            if asks["action"] == "prioritize":
                asks["priority"] = draw.randint(0, 5)
            preview = await client.insist("preview_bulk", **asks)
            ended = not (preview.reply and preview.reply["matches"])
            while not ended:
                step = await client.insist("run_bulk",
                                           confirmation=preview.reply["confirmation"] if preview.reply else "",
                                           max_tasks=draw.randint(1, 10))
                ended = step.reply is None or step.reply["ended"]
            await asyncio.sleep(0.05)

    async def reader(self, name: str) -> None:
        """Follow an agent's inbox with a cursor."""
        client, after = self.client(name), ""
        while not self.stopping:
            page = await client.ask("list_receipts", to_kind="agent", to_id=name, since_receipt_id=after, limit=100)
            if page.reply and page.reply["receipts"]:
                after = page.reply["cursor"]        # no receipt's id: a page may end with what others have stated
            else:
                await self.server.up.wait()
                await asyncio.sleep(0.01)


class StraightLoad(Load):
    """The clients of a gate in this process, which go by its clock."""

    def __init__(self, gate: Gate, seed: int, agents: int = 3, workers: int = 6) -> None:
        self.gate, self.up, self.tenant, self.port = gate, asyncio.Event(), TENANT, 0
        self.up.set()
        super().__init__(self, seed, agents, workers)
        self.now = gate.now
        self.unexpected: list[str] = []
        self.losing = 0.0       # the share of replies that get lost

    def client(self, by: str) -> Client:
        """Return a client of this load."""
        self.clients.append(Straight(self, by))
        return self.clients[-1]
