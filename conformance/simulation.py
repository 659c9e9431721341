"""Deterministic simulation: gates, their database, their clients, and all that may happen to them, from one seed.

    asyncgate torture --simulate 1000000 --seed 7       # with programs beside the oracle, in simulated_programs.py

A round is one process without threads, sockets and real time.  Its event loop draws which callback is next, and time
passes when nobody can go on.  The seed also decides how long each message takes, which gets lost or comes twice, before
or behind which statement or await a gate dies, which COMMITs are not confirmed, how clocks go and jump, what clients
ask, and all ids and secrets.  So a round is the same each time and everywhere; the hash of its trace shows that.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import json
import logging
import os
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar, TypeVarTuple

from asyncgate import Engine, Needs, News, Operation, Work
from asyncgate.backends.lanes import Lanes
from asyncgate.backends.memory import Memory, make_empty, make_template
from asyncgate.backends.sqlite import SHARE, migrate_file
from asyncgate.backends.sqlite_tables import LAST_SIGN, SIGN
from asyncgate.conformance.harness import Gate, settings_for_tests
from asyncgate.conformance.history import Call, read_checked_rows
from asyncgate.conformance.load import HASTY_GATE, TENANT, Client, Straight, StraightLoad, finish_cascades
from asyncgate.conformance.recording import Mark, Recorded
from asyncgate.conformance.recount import wrong_usage
from asyncgate.conformance.torture import Round
from asyncgate.conformance.verify import verify
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.model import errors, ids
from asyncgate.parts.model.clock import SteadyClock
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.heartbeat import Heartbeat
from asyncgate.parts.operations import OPERATIONS
from asyncgate.parts.upkeep import Upkeep

ROUND_CALLS = 500                 # calls of a round
EPOCH = 1_800_000_000.0
CALLBACK_SECONDS = 1e-6
DISTANCE = 2500             # between faults: as many statements, or callbacks, on average
UNCONFIRMED = 0.005         # the share of COMMITs whose outcome the gate does not learn
LOST_SHARE, TWICE_SHARE, SLOW_SHARE = 0.01, 0.02, 0.01    # the shares of messages
SLOW_SECONDS = 1.5          # which a slow one takes at most
GIVEN_UP_SECONDS = 1.0      # of clients for an answer
DOWN_SECONDS = 1.5          # for which a gate is down at most
OFF_SECONDS = 0.002         # by which the clocks of gates that share a database differ from its clock at most
JUMPS = (-3600.0, -5.0, -0.5, 0.5, 5.0, 3600.0)     # of the clock of a machine
SERVES_SECONDS = 10.0       # how old the last sign of life of a process may be that serves

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
PROCESS: contextvars.ContextVar[Member | None] = contextvars.ContextVar("here", default=None)


class Stuck(Exception):
    """Everybody waits, and nothing will ever happen."""


class ReadyCallbacks(deque[Any]):
    """The callbacks that are ready: a drawn one is next."""

    def __init__(self, draw: random.Random, step: Callable[[], None]) -> None:
        super().__init__()
        self.draw, self.step = draw.random, step

    def popleft(self) -> Any:
        """Return a drawn callback."""
        self.step()
        if (number := len(self)) > 1:
            self.rotate(-int(self.draw() * number))
        return super().popleft()


class SimulatedLoop(asyncio.BaseEventLoop):
    """An event loop without the world outside: its time goes on when nobody can, and threads' work is done at once."""

    def __init__(self, draw: random.Random, step: Callable[[], None]) -> None:
        super().__init__()
        self.moment, self._selector, self._ready = 0.0, self, ReadyCallbacks(draw, step)

    def time(self) -> float:
        """Return the time since the beginning."""
        return self.moment

    def select(self, timeout: float | None) -> tuple[()]:
        """Let time pass until somebody has something to do."""
        if timeout is None:
            raise Stuck
        self.moment += timeout
        return ()

    def _process_events(self, events: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """There is nobody who sleeps."""

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run a function here and now."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


@contextlib.contextmanager
def replaced_sources(draw: random.Random, loop: SimulatedLoop) -> Iterator[None]:
    """Let this process take its time and its random numbers from the simulation during a block."""
    state = random.getstate()
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
                (time, "time", lambda: EPOCH + loop.moment), (time, "monotonic", lambda: loop.moment),
                (time, "clock_gettime", lambda which: loop.moment), (os, "urandom", draw.randbytes),
                (random, "_urandom", draw.randbytes)):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.callback(ids._salts.clear)
        stack.callback(random.setstate, state)
        ids._salts.clear()
        random.seed(draw.getrandbits(64))
        yield


# The database, and the gates.


class Database:
    """The tables that all gates share, and who of them serves."""

    def __init__(self) -> None:
        self.db = make_empty()
        make_template().backup(self.db)
        migrate_file(self.db)
        self.db.execute("PRAGMA recursive_triggers = ON")
        self.lanes, self.known, self.ids = defaultdict[str, Lanes](Lanes), set[str](), ids.Ids()
        self.signs: dict[str, float] = {}           # of life, by the name of the gate
        self.members: dict[str, SharingMember] = {}
        self.leads: dict[str, SharingMember] = {}
        self.beginning: SharingMember | None = None

    def read_sign(self) -> float | None:
        """Return the last sign of life."""
        sign: float | None = self.db.execute(LAST_SIGN).fetchone()[0]
        return sign

    def relearn(self) -> None:
        """Read what the gate that has died, or was not told of its commit, could not note."""
        for tenant_id, lane, type, capabilities, pattern in self.db.execute("SELECT * FROM lanes"):
            self.lanes[tenant_id].learn(lane, type, json.loads(capabilities), pattern)
        self.known.update(tenant_id for (tenant_id,) in self.db.execute("SELECT tenant_id FROM tenants"))


class Statements:
    """The connection of one gate to the database, which may be gone before or after each statement."""

    def __init__(self, member: Member) -> None:
        self.world, self.host, self.strike = member.world, member.host, member.strike
        self.db, self.saves = self.world.database.db, False

    def execute(self, sql: str, given: Any = ()) -> Any:
        """Run one statement."""
        self.strike()
        self.saves &= not sql.startswith("BEGIN")
        rows = self.db.execute(sql, given)
        if sql == "COMMIT":     # a batch that lacks a row is carried out again, and has stored nothing
            self.world.commits, self.saves = self.world.commits + self.saves, False
            self.world.trace("commit", self.host.name)
        self.strike()
        return rows

    def executemany(self, sql: str, given: Any) -> Any:
        """Run a statement several times."""
        self.strike()
        rows, self.saves = self.db.executemany(sql, given), True
        self.strike()
        return rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.db, name)


class Member(Memory):
    """The backend of one gate that has the database for itself; its process may die at any moment."""

    parallel, parallel_per_tenant = SHARE, 2

    def __init__(self, world: World, host: Host) -> None:
        super(Memory, self).__init__()
        self.world, self.host, self.database, self.lives = world, host, world.database, True
        self.tasks: list[asyncio.Task[Any]] = []
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)
        self.db = self.database.db
        self.lanes, self.known = self.database.lanes, self.database.known
        self._load_caches()
        self.clock = self.read_clock()
        self.db = Statements(self)  # type: ignore[assignment]

    def read_clock(self) -> SteadyClock:
        """Return the clock of this process: that of its machine, which may jump."""
        return SteadyClock(self.database.read_sign(), wall=self.host.wall, elapsed=self.host.elapsed)

    def strike(self) -> None:
        """Let the process die here, if its time has come; nothing that is dead does anything."""
        if self.lives:
            if not self.world.striking:
                return
            self.world.statements -= 1
            if self.world.statements > 0:
                return
            self.world.statements = self.world.draw_distance()
            self.world.kill(self.host, "at a statement")
        raise asyncio.CancelledError

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Carry out one batch: at once, because others wait for it, but somewhat later, and the answer is later too."""
        await self.world.travel()
        await super().transact(tenant_id, needs, decide)
        await self.world.travel()

    def _end(self) -> None:
        confirmed, draw = True, self.world.draw.random
        if self.world.striking and draw() < UNCONFIRMED:
            self.world.note("commit", "is not confirmed")
            confirmed = False
            if draw() < 0.5:
                raise errors.outcome_unknown()
        super()._end()
        if not confirmed:
            self.database.relearn()
            raise errors.outcome_unknown()

    def _roll_back(self) -> None:
        self.tenant_id = None
        if self.database.db.in_transaction:
            self.database.db.execute("ROLLBACK")

    async def _rows(self, sql: str, *given: Any) -> list[tuple[Any, ...]]:
        await self.world.travel()
        rows = await super()._rows(sql, *given)
        await self.world.travel()
        return rows

    async def _write_alone(self, run: Callable[[], Any]) -> Any:
        await self.world.travel()
        try:
            return await super()._write_alone(run)
        except BaseException:
            self._roll_back()
            raise

    async def join(self, instance_id: str, beat_seconds: float, hear: Callable[[News], None]) -> float | None:
        """Return the time of the last sign of life."""
        sign: float | None = (await self._rows(LAST_SIGN))[0][0]
        return sign

    async def beat(self) -> None:
        """Store a sign of life."""
        await self._write_alone(self._sign)

    def _sign(self) -> None:
        self._begin()
        self.db.execute(SIGN, (self.now(),))
        self._end()


class SharingMember(Member):
    """The backend of one of several gates that share the database, as on Postgres: they go by its clock, nearly."""

    def __init__(self, world: World, host: Host) -> None:
        super().__init__(world, host)
        self.ids = self.database.ids        # each goes on behind all that the others have made

    def read_clock(self) -> SteadyClock:
        """Return an estimate of the database's clock."""
        off = self.world.draw.uniform(-OFF_SECONDS, OFF_SECONDS)
        return SteadyClock(wall=lambda: self.world.time() + off, elapsed=self.world.loop.time)

    def is_serving(self) -> bool:
        """Whether the process lives, and has said so not long ago."""
        sign = self.database.signs.get(self.host.name, 0.0)
        return self.lives and self.database.members.get(self.host.name) is self and (
            self.world.time() - sign < SERVES_SECONDS)

    def list_others(self) -> list[SharingMember]:
        """Return the other members that serve."""
        return [member for member in self.database.members.values() if member is not self and member.is_serving()]

    async def join(self, instance_id: str, beat_seconds: float, hear: Callable[[News], None]) -> float | None:
        """Return the last sign of life of any process if none lives now; who comes next waits for the first beat."""
        await self.world.travel()
        while self.database.beginning is not None and self.database.beginning.lives:    # noqa: ASYNC110  # as there
            await asyncio.sleep(0.1)
        self.database.beginning, self.hear = self, hear
        sign = None if self.list_others() else max(self.database.signs.values(), default=None)
        self.database.signs[self.host.name] = self.world.time()
        self.database.members[self.host.name] = self
        return sign

    async def beat(self) -> None:
        """Give a sign of life; the others look whether this process has leased what was theirs."""
        await self.world.travel()
        self.database.signs[self.host.name] = self.world.time()
        if self.database.beginning is self:
            self.database.beginning = None
            for other in self.list_others():
                self.world.pass_on(other, News("", lapse=0.0))

    def is_joined(self) -> bool:
        """Whether the process has its place."""
        return True

    async def last_served(self) -> float:
        """Return the last sign of life of any other process."""
        return max([sign for name, sign in self.database.signs.items() if name != self.host.name], default=0.0)

    def is_alone(self) -> bool:
        """Whether no other process serves."""
        return not self.list_others()

    def tell(self, news: News) -> None:
        """Let the others know, if the news do not get lost."""
        for other in self.list_others():
            self.world.pass_on(other, news)

    async def lead(self, job: str) -> bool:
        """Whether this process leads a job."""
        if (leader := self.database.leads.get(job)) is None or not leader.lives:
            self.database.leads[job] = self
        return self.database.leads[job] is self

    async def overdue(self, now: float, grace: float, limit: int) -> list[tuple[str, list[str], list[str]]]:
        """Return what upkeep must check, without what other living processes look after."""
        others = json.dumps([member.host.name for member in self.list_others()])
        tenants = list[tuple[str, list[str], list[str]]]()
        for tenant_id, tasks, schedules in await super().overdue(now, grace, 10_000):
            rows = await self._rows(
                "SELECT task_id FROM tasks WHERE tenant_id = ? AND task_id IN (SELECT value FROM json_each(?)) "
                "AND asyncgate_instance NOT IN (SELECT value FROM json_each(?)) ORDER BY task_id",
                tenant_id, json.dumps(tasks), others)
            if len(rows) < len(tasks):
                self.hear(News(tenant_id, lapse=now - grace + 1.0))
            tenants.append((tenant_id, [row[0] for row in rows[:limit]], schedules))
        return tenants


class Host:
    """A machine, and the gate on it, which is started again when it has died."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.member: Member | None = None
        self.gate: Gate | None = None           # while it serves
        self.died_at = EPOCH                    # by its clock
        self.ahead, self.rate = 0.0, 1.0 + world.draw.choice([0.0, 0.0, -0.001, 0.001, 0.01])
        self.starts, self.name = 0, ""

    def wall(self) -> float:
        """Return the time by the clock of the machine, which somebody may set."""
        return EPOCH + self.elapsed() + self.ahead

    def elapsed(self) -> float:
        """Return the time by the clock that counts on."""
        return self.world.loop.moment * self.rate

    def start(self) -> None:
        """Start the gate, unless all is over; every second one has another name each time."""
        if self.world.over:
            return
        self.starts += 1
        self.name = f"gate-{self.number}" if self.number % 2 == 0 else f"gate-{self.number}-{self.starts}"
        self.member = (SharingMember if len(self.world.hosts) > 1 else Member)(self.world, self)
        self.world.spawn(self.member, self._serve(self.member))

    async def _serve(self, member: Member) -> None:
        engine = engine_over(member, settings_for_tests(instance_id=self.name, **HASTY_GATE))
        upkeep = Upkeep(engine)
        upkeep.heart = Heartbeat(self.elapsed)
        engine.extend(upkeep)
        try:
            sign = await member.join(self.name, HASTY_GATE["lease_sweep_interval_seconds"], engine.hear_news)
            await upkeep.begin(sign)
        except errors.DatabaseUnavailable:      # as its supervisor would
            return self.world.kill(self, "while it starts")
        async with upkeep:
            self.gate = Gate(engine, TENANT)
            self.world.up.set()
            await asyncio.get_running_loop().create_future()


# Clients.


class SimulatedClient(Straight):
    """A client whose messages take their time, get lost, or come twice."""

    load: SimulatedLoad

    async def ask(self, operation: str, **ask: Any) -> Call:
        """Send a request to some gate; what is not answered in time is unknown."""
        world, op = self.load.world, OPERATIONS[operation]
        fields = self.request(operation, ask)[2]
        if op.rest[0][0] == "GET":
            fields = {name: value for name, value in fields.items() if value}
        call = Call(tenant=TENANT, operation=operation, ask=ask, by=self.by, started=world.earliest(), ended=0.0)
        answer = asyncio.get_running_loop().create_future()
        world.send(self._carry(call, op, fields, answer))
        if world.striking and world.draw.random() < TWICE_SHARE and not (
                operation == "append_output" and "position" not in ask):    # which nothing may repeat
            again = Call(tenant=TENANT, operation=operation, ask=ask, by=self.by, started=call.started,
                         ended=call.started)
            self.load.write(again)
            world.faults["message"] += 1
            world.send(self._carry(again, op, fields, None))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GIVEN_UP_SECONDS):
                call.reply, call.error = await answer
        call.ended = world.latest()
        world.trace(call.by, operation, call.reply, call.error, call.ended)
        self.write(call)
        return call

    async def _carry(self, call: Call, op: Operation, fields: dict[str, Any],
                     answer: asyncio.Future[Any] | None) -> None:
        """Bring a request to a gate and the answer back."""
        world, outcome = self.load.world, (None, None)
        if await world.deliver() and (host := world.find_host()) is not None:
            assert host.gate is not None
            assert host.member is not None
            serving = world.spawn(host.member, self._perform(host.gate, op, fields))
            await asyncio.wait([serving])
            if not serving.cancelled():
                outcome = serving.result()
            delivered = await world.deliver()
            if answer is None or answer.done():     # it was carried out when nobody waited for it any more
                call.ended = max(call.ended, world.latest())
            if not delivered:
                return
        if answer is not None and not answer.done():
            answer.set_result(outcome)

    async def _perform(self, gate: Gate, op: Operation, fields: dict[str, Any]) -> tuple[Any, str | None]:
        try:
            return json.loads(encode_json(await gate.perform(op, **fields))), None
        except errors.GateError as refusal:
            return None, refusal.code
        except Exception as error:
            self.load.unexpected.append(repr(error))
            return None, None


class SimulatedLoad(StraightLoad):
    """The clients of a simulation."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed, agents=2, workers=4)  # type: ignore[arg-type]
        self.world, self.up = world, world.up

    def client(self, by: str) -> Client:
        """Return a client of this load."""
        self.clients.append(SimulatedClient(self, by))
        return self.clients[-1]


# The world.


class World:
    """All that there is in a round, and what happens to it."""

    def __init__(self, seed: int, gates: int = 0) -> None:
        self.draw, self.striking = random.Random(f"simulation {seed}"), False
        self.over = False
        self.hash, self.marks, self.sent = hashlib.sha256(), list[Mark](), list[asyncio.Task[Any]]()
        self.statements, self.callbacks = self.draw_distance(), self.draw_distance()
        self.loop = SimulatedLoop(self.draw, self.step)
        self.loop.set_task_factory(make_task)
        self.hosts = list[Host]()
        self.gates = gates or self.draw.choice([1, 1, 2, 3])
        self.jumpy = self.gates == 1 and self.draw.random() < 0.4       # whether somebody sets the clock
        self.up, self.high = asyncio.Event(), EPOCH     # while a gate serves; the latest time that one has had
        self.faults, self.record = Counter[str](), Recorded()
        self.count = self.commits = 0
        self.kinds = ["kill", "kill", "stall", "clock"]     # of what happens between callbacks

    def open(self) -> None:
        """Make the database, and start the gates."""
        self.database = Database()
        self.hosts += [Host(self, number) for number in range(self.gates)]
        for host in self.hosts:
            host.start()

    def draw_distance(self, mean: int = DISTANCE) -> int:
        """Return after how many steps something happens."""
        return self.draw.randint(1, 2 * mean)

    def trace(self, *told: Any) -> None:
        """Take note of what has happened."""
        self.hash.update(f"{self.count} {self.loop.moment!r} {told!r}\n".encode())

    # Time.

    def time(self) -> float:
        """Return the time by the clock of the database."""
        return EPOCH + self.loop.moment

    def now(self) -> float:
        """Return the time as gates have it."""
        member = self.hosts[0].member
        if self.gates > 1 or member is None:
            return self.time()
        return member.now() if member.lives else self.hosts[0].died_at

    def earliest(self) -> float:
        """Return the earliest time at which a gate can carry out what is asked now.

        After somebody has set the clock back, a gate goes on from the last sign of the one before.
        """
        if self.gates > 1:
            return self.time() - OFF_SECONDS
        return min(self.now(), self.database.read_sign() or EPOCH) if self.jumpy else self.now()

    def latest(self) -> float:
        """Return the latest time at which a gate can have carried out something."""
        self.high = max(self.high, self.now() if self.gates == 1 else self.time() + OFF_SECONDS)
        return self.high

    async def travel(self) -> None:
        """Wait as long as a message takes."""
        draw = self.draw.random()
        if draw < 0.7:
            await asyncio.sleep(0)
        else:
            await asyncio.sleep((draw - 0.7) * (SLOW_SECONDS if draw > 1 - SLOW_SHARE and self.striking else 0.01))

    async def deliver(self) -> bool:
        """Wait as long as a message takes; return whether it comes."""
        await self.travel()
        comes = not self.striking or self.draw.random() >= LOST_SHARE
        self.faults["message"] += not comes
        return comes

    async def run(self, steps: int) -> None:
        """Serve clients while all kinds of things happen; record what they saw, and what is stored."""
        self.open()
        load, problems = SimulatedLoad(self, self.draw.getrandbits(32)), list[str]()
        try:
            async with load.running():
                self.striking = True
                await load.grown(steps)
                self.striking = False
        except Exception as error:
            problems.append(f"LOAD: the clients broke off: {error!r}")
        self.striking = False
        await asyncio.gather(*self.sent)
        self.over = True
        for host in self.hosts:
            if host.member is not None and host.member.lives:
                self.kill(host, "")
        await asyncio.sleep(DOWN_SECONDS)
        backend = Member(self, self.hosts[0])
        await finish_cascades(backend)
        rows = {kind.__name__: of_kind for kind, of_kind in (await read_checked_rows(backend, TENANT)).items()}
        problems += [f"VERIFY: {problem}" for problem in (await verify(backend)).problems]
        problems += [f"USAGE: {problem}" for problem in await wrong_usage(Engine(backend), TENANT)]
        problems += [f"ANSWERS: {text}" for text in load.unexpected]
        self.hash.update(encode_json([rows, problems]))
        self.record = Recorded({"gates": self.gates}, TENANT, load.calls, self.marks, rows, problems)

    # Messages and processes.

    def spawn(self, member: Member, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something in the process of a gate."""
        return self.loop.create_task(work, context=member.context.copy())

    def send(self, carrying: Coroutine[Any, Any, None]) -> None:
        """Send a message."""
        self.sent = [task for task in self.sent if not task.done()]
        self.sent.append(self.loop.create_task(carrying))

    def find_host(self) -> Host | None:
        """Return a host whose gate serves."""
        serving = [host for host in self.hosts if host.gate is not None]
        return self.draw.choice(serving) if serving else None

    def pass_on(self, member: SharingMember, news: News) -> None:
        """Bring news to a gate, perhaps."""
        async def bring() -> None:
            if await self.deliver() and member.lives:
                member.hear(news)
        self.spawn(member, bring())

    # What happens.

    def step(self) -> None:
        """Before each callback: let something happen, if its time has come."""
        self.count += 1
        self.loop.moment += CALLBACK_SECONDS        # so that nothing seems to be at once what is one behind the other
        if not self.striking:
            return
        self.callbacks -= 1
        if self.callbacks <= 0:
            self.callbacks = self.draw_distance()
            self.strike()

    def strike(self) -> None:
        """Let something happen between two callbacks."""
        host = self.draw.choice(self.hosts)
        match self.draw.choice(self.kinds):
            case "kill" if host.member is not None and host.member.lives:
                self.kill(host, "between two callbacks")
            case "stall":
                seconds = self.draw.uniform(0.05, 3.0)
                self.note("stall", f"for {seconds:.2f} s")
                self.loop.moment += seconds
            case "clock" if self.jumpy:
                host.ahead += (jump := self.draw.choice(JUMPS))
                self.note("clock", f"of {host.name} jumps by {jump} s")

    def note(self, fault: str, text: str) -> None:
        """Take note of a fault."""
        self.faults[fault] += 1
        self.marks.append(Mark(self.now() if self.hosts else EPOCH, f"{fault} {text}"))
        self.trace(fault, text)

    def kill(self, host: Host, where: str) -> None:
        """Let a gate die, and start it again some time later."""
        member, host.gate = host.member, None
        assert member is not None
        if not self.over:
            self.note("kill", f"{host.name} {where}")
        host.died_at, member.lives = member.now(), False
        if self.database.db.in_transaction:
            self.database.db.execute("ROLLBACK")
        self.database.relearn()
        if not any(host.gate for host in self.hosts):
            self.up.clear()
        current = asyncio.current_task(self.loop)
        for task in member.tasks:
            task._log_destroy_pending = False       # type: ignore[attr-defined]  # some wait for what died with them
            if task is not current:
                task.cancel()
        if self.striking and not self.over:
            self.loop.call_later(self.draw.random() * DOWN_SECONDS, host.start, context=contextvars.Context())


def make_task(loop: Any, work: Any, **how: Any) -> asyncio.Task[Any]:
    """Make a task, and note to which process it belongs."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **how)
    context = how.get("context")
    member = PROCESS.get() if context is None else context.get(PROCESS)
    if member is not None:
        member.tasks.append(task)
        if len(member.tasks) > 1000:
            member.tasks[:] = [task for task in member.tasks if not task.done()]
    return task


class Errors(logging.Handler):
    """What the gates log as an error, but for what tells of a database that does not answer."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, errors.DatabaseUnavailable | asyncio.CancelledError):
            self.texts.append(f"LOG: {record.getMessage()} {error!r}")


@contextlib.contextmanager
def collected_errors() -> Iterator[list[str]]:
    """Collect the errors that gates log during a block, and write no line of their logs."""
    log, handler = logging.getLogger("asyncgate"), Errors()
    propagate, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield handler.texts
    finally:
        log.removeHandler(handler)
        log.propagate = propagate


def simulate(seed: int, steps: int = ROUND_CALLS, gates: int = 0) -> tuple[Round, str]:
    """Run one round; return what it did, and the hash of all that happened."""
    make_template()         # once, and not of drawn numbers
    begun, world = time.monotonic(), World(seed, gates)
    with collected_errors() as logged, replaced_sources(world.draw, world.loop), asyncio.Runner(
            loop_factory=lambda: world.loop) as runner:
        try:
            runner.run(world.run(steps))        # without a result: at its end asyncio writes it out
        except Stuck:
            world.record.others.append("STUCK: everybody waits, and nothing will ever happen")
        world.database.db.close()
    record = world.record
    record.others += logged
    done = Round(seed, world.faults, len(record.calls), sum(call.unknown for call in record.calls),
                 len(record.rows.get("Task", ())), violations=[*record.judge(), *record.others], record=record)
    done.seconds = time.monotonic() - begun
    return done, world.hash.hexdigest()
