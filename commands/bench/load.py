"""The load of `asyncgate bench`: the requests of its clients.

A mode is a generator: it yields the name of an operation and the bytes of a request, and receives the body of the
answer.  The connection drives it directly from the event loop, without a task or a future in between, and decodes only
what the next request needs, so that the load does not distort the measurement.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import msgspec

from asyncgate.commands.bench.wire import Failed, LoadGate, Wire

Took = defaultdict[str, list[float]]                            # seconds by operation
Step = Generator[tuple[str, bytes], bytes, bool | None]         # returns True when no work is left

TASKS_PER_BATCH = 100             # tasks per call of the mode batch
TASKS_PER_FILL = 500           # tasks per call when filling
DRAINED = 5000          # tasks prepared per second of draining: more than a gate can complete
ASKING = 100            # workers that have asked before a task is explained
OWED = 20               # open obligations of the principal whose list is read
CLAIM_HEAD_START_SECONDS = 0.005   # for a claim to arrive and wait, before its task is created
CLAIM_WAIT_SECONDS = 30       # timeout of a waiting claim
LAST_ANSWER_SECONDS = 60   # for the last answers of a turn
TYPE, LEFT, OWNER, AWAITED = "bench.task", "bench.left", "bench.owed", "bench.awaited"
LIMITED_TYPE, IN_TOTAL, BY_KEY = "bench.limited", "bench.total", "bench.customer"     # a type, limits of its tasks
TASK_BODY: dict[str, Any] = {"type": TYPE, "payload": {"document": 7, "pages": [1, 2, 3]}, "principal_id": "bench"}
RESULT = {"result": {"ok": True}, "artifacts": [{"type": "file", "uri": "file:///dev/null"}]}
REVISION = "2026-07-28"
MCP_META = {"io.modelcontextprotocol/protocolVersion": REVISION, "io.modelcontextprotocol/clientCapabilities": {}}
MCP_HEAD = (f"accept: application/json, text/event-stream\r\nmcp-protocol-version: {REVISION}\r\n"
            "mcp-method: tools/call\r\nmcp-name: asyncgate.create_task\r\n").encode()
LEASES = re.compile(rb'"task_id":\s*"([^"]+)",\s*"lease_id":\s*"([^"]+)"')      # the first members of each offer
encoded = msgspec.json.encode


class Client:
    """One client of a load, with its prepared requests."""

    def __init__(self, gate: LoadGate, number: int) -> None:
        self.gate, self.number = gate, number
        self.mine = encoded({"worker_id": f"bench-{number}", **RESULT})[:-1]
        self.batched = encoded({"worker_id": f"bench-{number}"})[:-1]
        self.task, self.left = make_create(gate, TASK_BODY), make_create(gate, {**TASK_BODY, "type": LEFT})
        self.hundred = gate.post(b"/v1/tasks/batch", encoded({"tasks": [TASK_BODY] * TASKS_PER_BATCH}))
        self.single, self.many = (make_claim(gate, number, TYPE, most) for most in (1, TASKS_PER_BATCH))
        self.limited_task = make_create(gate, {**TASK_BODY, "type": LIMITED_TYPE,
                                               "limits": {IN_TOTAL: "", BY_KEY: f"customer-{number}"}})
        self.limited_one = make_claim(gate, number, LIMITED_TYPE, 1)
        self.nothing = make_claim(gate, number, "bench.nothing", 1)
        self.result = encoded(RESULT)[1:]
        owner = f"principal_kind=agent&principal_id={OWNER}".encode()
        self.owed = gate.get(b"/v1/obligations/open?" + owner)
        self.bare = gate.post(b"/echo", encoded(TASK_BODY))
        self.well = gate.get(b"/v1/health")
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call",
                "params": {"name": "asyncgate.create_task", "arguments": {**TASK_BODY, "type": LEFT},
                           "_meta": MCP_META}}
        self.tool = gate.post(b"/mcp", encoded(call), MCP_HEAD)

    def completion(self, task_id: bytes, lease_id: bytes) -> bytes:
        """Return the request that completes a task."""
        return self.gate.post(b"/v1/tasks/%b/complete" % task_id, b'%b,"lease_id":"%b"}' % (self.mine, lease_id))

    def cycle(self) -> Step:
        """Create a task, lease one, complete it; the leased task may be another client's."""
        return self._run_through(self.task, self.single)

    def limits(self) -> Step:
        """Do the same with tasks that have two limits, one of them with a key of each client."""
        return self._run_through(self.limited_task, self.limited_one)

    def _run_through(self, task: bytes, claim: bytes) -> Step:
        yield "create", task
        for task_id, lease_id in LEASES.findall((yield "claim", claim)):
            yield "complete", self.completion(task_id, lease_id)
        return None

    def create(self) -> Step:
        """Create one task."""
        yield "create", self.left
        return None

    def drain(self) -> Step:
        """Lease and complete a task that was created before the measurement."""
        leases = LEASES.findall((yield "claim", self.single))
        for task_id, lease_id in leases:
            self.gate.stocked -= 1
            yield "complete", self.completion(task_id, lease_id)
        return not leases

    def claim_empty(self) -> Step:
        """Claim a type that has no tasks."""
        yield "claim", self.nothing
        return None

    def batch(self) -> Step:
        """Create, lease and complete a hundred tasks in three requests."""
        require_sound((yield f"create {TASKS_PER_BATCH}", self.hundred))
        leases = LEASES.findall((yield f"claim {TASKS_PER_BATCH}", self.many))
        if leases:
            require_sound((yield f"complete {TASKS_PER_BATCH}", self.completions(leases)))
        return None

    def completions(self, leases: list[tuple[bytes, bytes]]) -> bytes:
        """Return the request that completes many tasks."""
        tasks = b",".join([b'{"task_id":"%b","lease_id":"%b",%b' % (*ids, self.result) for ids in leases])
        return self.gate.post(b"/v1/tasks/complete-batch", b'%b,"tasks":[%b]}' % (self.batched, tasks))

    def obligations(self) -> Step:
        """List the open obligations of a principal that has a few."""
        yield "list", self.owed
        return None

    def explain(self) -> Step:
        """Ask why the last task of a queue is not done."""
        yield "explain", self.gate.get(b"/v1/tasks/%b/explain" % self.gate.waiting)
        return None

    def mcp(self) -> Step:
        """Create one task over the newest version of MCP."""
        answer = yield "create over MCP", self.tool
        if b'"isError":true' in answer or b'"error":' in answer:
            raise Failed(f"the call over MCP failed: {answer[:200].decode(errors='replace')}")
        return None

    def health(self) -> Step:
        """Call the health check, which needs no credential."""
        yield "health", self.well
        return None

    def echo(self) -> Step:
        """Call the bare echo of a bench-server, the baseline."""
        yield "echo", self.bare
        return None


def make_create(gate: LoadGate, task: dict[str, Any]) -> bytes:
    """Return the request that creates a task."""
    return gate.post(b"/v1/tasks", encoded(task))


def make_claim(gate: LoadGate, number: int, type: str, most: int, wait_seconds: float = 0) -> bytes:
    """Return the request of a client that leases tasks of one type."""
    asked = {"worker_id": f"bench-{number}", "accept_types": [type], "max_tasks": most, "wait_seconds": wait_seconds}
    return gate.post(b"/v1/leases/claim", encoded(asked))


def require_sound(answer: bytes) -> bytes:
    """Return the answer to a batch; raise Failed if one of its items failed."""
    at = answer.find(b'"error":{')
    if at >= 0:
        raise Failed(f"an item of a batch failed: {answer[at:at + 200].decode(errors='replace')}")
    return answer


MODES: dict[str, Callable[[Client], Step]] = {
    "cycle": Client.cycle, "limits": Client.limits, "create": Client.create, "drain": Client.drain,
    "batch": Client.batch, "claim-empty": Client.claim_empty, "obligations": Client.obligations,
    "explain": Client.explain, "mcp": Client.mcp, "health": Client.health, "echo": Client.echo}
LONG_POLL = "long-poll"
EVERY_MODE = ["cycle", "limits", "create", "drain", "batch", "claim-empty", LONG_POLL, "obligations", "explain", "mcp",
              "health", "echo"]
BESIDE_MODES = ("cycle", "batch")        # what other queues can do, too
OF_TENANTS = ("cycle", "create", "batch", "claim-empty")     # what needs nothing made ready at a tenant
COMPLETIONS = {"complete": 1, f"complete {TASKS_PER_BATCH}": TASKS_PER_BATCH}
TASKS_PER_OPERATION = {**COMPLETIONS, "create": 1, "claim": 1, f"create {TASKS_PER_BATCH}": TASKS_PER_BATCH,
                       f"claim {TASKS_PER_BATCH}": TASKS_PER_BATCH,
         "create over MCP": 1, "wake": 1}


class Turn:
    """One run of a mode, limited in time or in steps, with the times of its requests."""

    def __init__(self, mode: str, clients: int, seconds: float, count: int | None) -> None:
        self.mode, self.clients, self.seconds, self.count = mode, clients, seconds, count
        self.took: Took = defaultdict(list)
        self.begun, self.begun_steps, self.lasted = 0.0, 0, 0.0

    def start(self) -> None:
        """Start the clock."""
        self.begun = time.perf_counter()
        self.until = math.inf if self.count is not None else self.begun + self.seconds

    def may_continue(self) -> bool:
        """Whether a client may begin another step."""
        if time.perf_counter() >= self.until or self.begun_steps == self.count:
            return False
        self.begun_steps += 1
        return True

    @property
    def requests(self) -> int:
        """Return the number of answered requests."""
        return sum(map(len, self.took.values()))


class Runner:
    """Drives a mode over one connection until its turn ends."""

    def __init__(self, wire: Wire, steps: Callable[[], Step], turn: Turn) -> None:
        self.wire, self.steps, self.turn = wire, steps, turn
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Begin, and wait for the end."""
        self.wire.taken, self.wire.failed = self.taken, self.fail
        self.begin()
        await self.ended

    def begin(self) -> None:
        """Begin the next step, unless the turn is over."""
        if not self.turn.may_continue():
            return self.end()
        self.step = self.steps()
        self.what, request = next(self.step)
        self.sent = time.perf_counter()
        self.wire.send(request)

    def taken(self, answer: bytes) -> None:
        """Record the time of the answer, and send the next request."""
        took = time.perf_counter() - self.sent
        self.turn.took[self.what].append(took)
        try:
            self.what, request = self.step.send(answer)
        except StopIteration as last:
            return self.run_dry() if last.value else self.begin()
        except Failed as wrong:
            return self.fail(wrong)
        self.sent = time.perf_counter()
        self.wire.send(request)

    def run_dry(self) -> None:
        """End early, and do not count the last answer, which found no work."""
        self.turn.took[self.what].pop()
        self.end()

    def end(self) -> None:
        """Finish."""
        self.wire.taken = self.wire.failed = None
        self.ended.set_result(None)

    def fail(self, wrong: Exception) -> None:
        """Finish with an error."""
        self.wire.taken = self.wire.failed = None
        if not self.ended.done():
            self.ended.set_exception(wrong)


async def run_turn(gate: LoadGate, turn: Turn, watch: Callable[[Turn], Awaitable[None]] | None = None) -> Took:
    """Run one turn and return its times; prepare what the mode needs before the clock starts."""
    if turn.mode in READY:
        await READY[turn.mode](gate, turn)
    polls = turn.mode == LONG_POLL
    async with gate.connected(turn.clients * (2 if polls else 1)) as wires:
        turn.start()
        watching = asyncio.ensure_future(watch(turn)) if watch else None
        try:
            async with asyncio.timeout(None if turn.count is not None else turn.seconds + LAST_ANSWER_SECONDS):
                await run_together(*(make_pollers(gate, wires, turn) if polls else make_runners(gate, wires, turn)))
        except TimeoutError:
            raise Failed(f"{turn.mode}: the gate received a request and did not answer") from None
        finally:
            turn.lasted = time.perf_counter() - turn.begun
            if watching:
                watching.cancel()
    return turn.took


async def run_together(*works: Coroutine[Any, Any, None]) -> None:
    """Run all; if one fails, stop the others and raise its exception."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def make_runners(gate: LoadGate, wires: list[Wire], turn: Turn) -> list[Coroutine[Any, Any, None]]:
    """Return a runner for each client; with several tenants it takes the next one with each step."""
    tenants = [[Client(tenant, number) for number in range(turn.clients)] for tenant in gate.tenants or [gate]]
    rounds = [cycle([clients[number] for clients in (*tenants[number % len(tenants):],
                                                     *tenants[:number % len(tenants)])])
              for number in range(turn.clients)]
    return [Runner(wire, partial(begin_step, turn.mode, clients), turn).run()
            for wire, clients in zip(wires, rounds, strict=True)]


def begin_step(mode: str, clients: Iterator[Client]) -> Step:
    """Begin the next step of a connection, as its next client."""
    return MODES[mode](next(clients))


def make_pollers(gate: LoadGate, wires: list[Wire], turn: Turn) -> list[Coroutine[Any, Any, None]]:
    """Return a measurement of long polls for each client, with two connections and a unique task type."""
    pairs = zip(wires[::2], wires[1::2], strict=True)
    return [measure_wakes(gate, number, *pair, turn) for number, pair in enumerate(pairs)]


async def measure_wakes(gate: LoadGate, number: int, waiting: Wire, creating: Wire, turn: Turn) -> None:
    """Let a claim wait, create its task over the other connection, and time the answer of the claim."""
    own, client = f"{AWAITED}.{number}", Client(gate, number)
    task, wait = make_create(gate, {**TASK_BODY, "type": own}), make_claim(gate, number, own, 1, CLAIM_WAIT_SECONDS)
    while turn.may_continue():
        claimed, answered = waiting.ask(wait), list[float]()
        claimed.add_done_callback(partial(note_time, answered))
        await asyncio.wait([claimed], timeout=CLAIM_HEAD_START_SECONDS)
        if not claimed.done():      # otherwise it found a task of an earlier run
            sent = time.perf_counter()
            await asyncio.gather(creating.ask(task), claimed)
            turn.took["wake"].append(answered[0] - sent)
        for ids in LEASES.findall(await claimed):
            await waiting.ask(client.completion(*ids))


def note_time(times: list[float], answer: object) -> None:
    """Record the time of an answer."""
    times.append(time.perf_counter())


# Preparation before the clock starts.


async def stock_tasks(gate: LoadGate, turn: Turn) -> None:
    """Create enough tasks to drain, counting those that the previous turn left."""
    wanted = turn.count if turn.count is not None else math.ceil(DRAINED * turn.seconds)
    async with gate.connected(1) as [wire]:
        while (missing := wanted - gate.stocked) > 0:
            size = min(missing, TASKS_PER_FILL)
            require_sound(await wire.ask(gate.post(b"/v1/tasks/batch", encoded({"tasks": [TASK_BODY] * size}))))
            gate.stocked += size


async def open_obligations(gate: LoadGate, turn: Turn) -> None:
    """Make sure that a few obligations are open."""
    async with gate.connected(1) as [wire]:
        answer = msgspec.json.decode(await wire.ask(Client(gate, 0).owed))
        if (missing := OWED - len(answer["open_obligations"])) > 0:
            task = {**TASK_BODY, "type": LEFT, "principal_kind": "agent", "principal_id": OWNER}
            require_sound(await wire.ask(gate.post(b"/v1/tasks/batch", encoded({"tasks": [task] * missing}))))


async def queue_last(gate: LoadGate, turn: Turn) -> None:
    """Create the task that is explained, behind all others of its queue, and let workers ask for such tasks."""
    async with gate.connected(1) as [wire]:
        for number in range(ASKING):
            await wire.ask(make_claim(gate, number, "bench.nothing", 1))
        made = msgspec.json.decode(await wire.ask(make_create(gate, {**TASK_BODY, "priority": -1})))
        gate.waiting = made["task_id"].encode()


async def set_limits(gate: LoadGate, turn: Turn) -> None:
    """Set the limits that tasks have, wide enough that they keep none."""
    async with gate.connected(1) as [wire]:
        for name, rules in ((IN_TOTAL, {"concurrency_total": 10_000}), (BY_KEY, {"concurrency_per_key": 1_000})):
            await wire.ask(gate.post(b"/v1/task-limits", encoded({"name": name, **rules})))


READY: dict[str, Callable[[LoadGate, Turn], Awaitable[None]]] = {
    "drain": stock_tasks, "limits": set_limits, "obligations": open_obligations, "explain": queue_last}
