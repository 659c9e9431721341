"""Soak: gates that serve everything at once for long, are measured meanwhile, and are judged at the end.

    asyncgate torture sqlite: postgres: --soak 60 --report evidence

No fault comes.  The clients of torture work at a steady rate; beside them another tenant has a real scheduler and
worker; the pages of a console ask and listen; metrics are scraped; somebody reads one old state of the database for
minutes; receipts are sealed, and move to the archive when they are a "day" old, which is short here.  In the end what
was archived is restored, the history of the clients is judged, and so are the measurements (`drift`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import sqlite3
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from itertools import cycle
from pathlib import Path
from statistics import quantiles
from typing import Any

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.conformance import torture
from asyncgate.conformance.drift import LEAST_SAMPLES, MIB, Sample
from asyncgate.conformance.faults import DATABASE_NAME, Site, open_site
from asyncgate.conformance.history import Call
from asyncgate.conformance.load import BULKS, HASTY_GATE, KEY, SERVE, Client, Fleet, Gates, Load, OneTenant, fleet
from asyncgate.conformance.postgres_server import connected
from asyncgate.conformance.verify import verify
from asyncgate.parts.model import queries, stored
from asyncgate.parts.model.settings import ArchiveSettings, Settings, strip_settings
from asyncgate.parts.model.walking import walk_rows
from asyncgate.parts.receipts.archive import restore_chain

CALLS_PER_SECOND = 50.0
SOAK_CLIENTS = 2, 8        # agents and workers
LEAST_SAMPLE_SECONDS, MOST_SAMPLE_SECONDS, SAMPLES = 0.1, 10.0, 150
SNAPSHOT_SECONDS = 120.0
CONSOLE_SECONDS, SCRAPE_SECONDS = 0.75, 5.0
DAYS = 15               # of the archive, in a soak
SCHEDULED_SECONDS = (1, 2, 3)
WORK_ROUNDS = 20_000    # of the fixed piece of work
CREW_PATIENCE = 60.0    # seconds in which schedules must be there, and their last runs end
LOOSE_RUNS = 3          # of a schedule, which may be under way when its tasks are counted
# What the views of the console ask for: each in turn, as a page that is open does every 15 seconds.
VIEWS = (
    "tasks?limit=50", "tasks?limit=50&status=queued", "tasks?held=true&limit=50", "queues?minutes=15",
    "queues?limit=200", "workers", "pauses", "traffic?span=hour", "traffic?span=day", "schedules", "task-limits",
    "leases?worker_kind=worker&worker_id=w1&resume=false",
    "obligations?limit=1&count=true", "receipts?newest=true&limit=50&receipt_type=task.accepted", "types",
    "health", "ready", "examination", "seals?last=10&limit=10", "keys", "tenants", "audit?limit=50", "limits",
    "usage?period=month", "budgets", "config", "archive/receipts?limit=20")


class SteadyClient(Client):
    """A client that waits for its turn before each call."""

    load: Steady

    async def ask(self, operation: str, **ask: Any) -> Call:
        await self.load.turn()
        return await super().ask(operation, **ask)


class Steady(Load):
    """Clients that together ask so many calls a second."""

    ttls, bulks = (5, 60, 60), BULKS[:3]        # nothing that makes more tasks the more there are

    def __init__(self, server: Fleet, seed: int, rate: float) -> None:
        super().__init__(server, seed, *SOAK_CLIENTS)
        self.pause, self.due = 1 / rate, 0.0

    async def turn(self) -> None:
        """Wait until the next call may begin."""
        now = time.monotonic()
        self.due = max(self.due + self.pause, now)
        await asyncio.sleep(self.due - now)

    def client(self, by: str) -> Client:
        """Return a client of this load."""
        client = SteadyClient(self.server, by, self.write)
        client.load = self
        self.clients.append(client)
        return client


# What is beside the clients.


async def fetch(gates: Gates, verb: str, path: str, body: Any = None, key: str = KEY) -> bytes:
    """Send one request on a connection of its own; return the body of its answer, or raise ValueError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gates.port)
    try:
        text = b"" if body is None else json.dumps(body).encode()
        writer.write(f"{verb} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
                     f"connection: close\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
                     .encode() + text)
        head, _, answer = (await reader.read(-1)).partition(b"\r\n\r\n")
        if head.split(b" ")[1:2] != [b"200"]:
            raise ValueError(f"{verb} {path} was answered {head[:40]!r} {answer[:300]!r}")
        return answer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def poll_console(gates: Fleet, count: Callable[[str], None]) -> None:
    """Ask what the views of a console ask, one after another."""
    files = ["/console/", *[f"/console/{name}" for name in ("console.js", "api.js", "style.css")]]
    for path in cycle([*files, *(f"/v1/{view}" for view in VIEWS)]):
        await fetch(gates, "GET", path)
        count("console")
        await asyncio.sleep(CONSOLE_SECONDS)


async def listen(gates: Fleet, count: Callable[[str], None]) -> None:
    """Follow the stream of receipts as a page of the console, which is opened again and again."""
    draw = random.Random(gates.port)
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", gates.port)
        try:
            writer.write(f"GET /v1/receipts/stream HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
                         "accept: text/event-stream\r\n\r\n".encode())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(draw.uniform(2, 30)):
                    while line := await reader.readline():
                        if line.startswith(b"data:"):
                            count("events")
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def scrape(gates: Fleet, key: str, count: Callable[[str], None]) -> None:
    """Scrape the metrics, as Prometheus would."""
    while True:
        if b"asyncgate_" not in await fetch(gates, "GET", "/metrics", key=key):
            raise ValueError("/metrics shows nothing of the gate")
        count("scrapes")
        await asyncio.sleep(SCRAPE_SECONDS)


async def read_old_state(site: Site, database: str, seconds: float, count: Callable[[str], None]) -> None:
    """Read one state of the database for long, again and again: nothing may change in it."""
    while True:
        if site.cluster is not None:
            async with (connected(site.cluster.admin_url(DATABASE_NAME)) as db,
                        db.transaction(isolation="repeatable_read", readonly=True)):
                before = await db.fetchval("SELECT count(*) FROM asyncgate.receipts")
                await asyncio.sleep(seconds)
                after = await db.fetchval("SELECT count(*) FROM asyncgate.receipts")
        else:
            path = database.removeprefix("sqlite:///")
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)) as db:
                db.execute("BEGIN")
                [before] = db.execute("SELECT count(*) FROM receipts").fetchone()
                await asyncio.sleep(seconds)
                [after] = db.execute("SELECT count(*) FROM receipts").fetchone()
        if before != after:
            raise ValueError(f"a snapshot had {before} receipts, and later {after}")
        count("snapshots")
        await asyncio.sleep(seconds / 4)


class Crew:
    """A scheduler and a worker in processes of their own, for a tenant of its own."""

    def __init__(self, gates: Fleet, folder: Path) -> None:
        self.gates, self.folder, self.tenant = gates, folder, str(uuid.uuid4())
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.scrape_key = self.agent_key = ""

    async def __aenter__(self) -> Crew:
        await fetch(self.gates, "POST", "/v1/tenants", {"tenant": self.tenant, "name": f"crew {self.tenant[:8]}"})
        clock, worker, self.agent_key = [await self.issue(f"crew-{number}", kind) for number, kind in
                                         enumerate(("worker", "worker", "agent"))]
        self.scrape_key = await self.issue("prometheus", "service", "", scopes=["metrics:read"])
        url, state = f"http://127.0.0.1:{self.gates.port}", self.folder / "state"
        self.begin("scheduler", "scheduler", "--url", url, "--file", str(self.folder / "schedules.db"),
                   ASYNCGATE_WORKER_KEY=clock, ASYNCGATE_AGENT_KEY=self.agent_key)
        self.begin("worker", "worker", "echo", "--url", url, "--state", str(state), "--concurrency", "4",
                   ASYNCGATE_API_KEY=worker)
        for seconds in SCHEDULED_SECONDS:
            plan = {"name": f"every {seconds}", "mode": "interval", "interval_seconds": seconds, "misfire_policy":
                    "catch_up_all", "task_template": {"type": "echo", "payload_template": {"at": "{{run_at}}"}}}
            await fetch(self.gates, "POST", "/v1/tasks", {"type": "schedule.create", "payload": plan}, self.agent_key)
        await self.wait_for("type=schedule.create", lambda tasks: all(task["status"] == "succeeded" for task in tasks))
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            await asyncio.to_thread(process.wait)

    async def issue(self, name: str, kind: str, tenant: str | None = None, **more: Any) -> str:
        """Issue a key, by default of the crew's tenant."""
        asks = {"name": name, "principal_kind": kind, "principal_id": name, **more}
        asks |= {"tenant": self.tenant} if tenant is None else {}
        key: str = json.loads(await fetch(self.gates, "POST", "/v1/keys", asks))["api_key"]
        return key

    def begin(self, name: str, *arguments: str, **environment: str) -> None:
        """Start a program of this package; what it says is in a file."""
        surroundings = {**strip_settings(os.environ), **environment}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen([sys.executable, "-c", SERVE, *arguments], env=surroundings,
                                                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder)

    def list_dead(self) -> list[str]:
        """Return which of the programs have ended, with the last that they said."""
        return [f"CREW: the {name} ended with {process.poll()}: {(self.folder / f'{name}.log').read_text()[-500:]}"
                for name, process in self.processes.items() if process.poll() is not None]

    async def wait_for(self, filters: str, enough: Callable[[list[dict[str, Any]]], bool]) -> list[str]:
        """Wait until the newest tasks of a kind are as they should be; return what is wrong if that does not come."""
        deadline = time.monotonic() + CREW_PATIENCE
        while True:
            page = json.loads(await fetch(self.gates, "GET", f"/v1/tasks?limit=200&{filters}", key=self.agent_key))
            if enough(page["tasks"]):
                return []
            if time.monotonic() > deadline:
                return [f"CREW: within {CREW_PATIENCE:g} s scheduler and worker have not done what they should"]
            await asyncio.sleep(0.1)


def have_all_run(tasks: list[dict[str, Any]]) -> bool:
    """Whether each schedule has run, and few runs are left."""
    schedules = {task["idempotency_key"].split(":")[1] for task in tasks}
    left = sum(task["status"] != "succeeded" for task in tasks)
    return len(schedules) == len(SCHEDULED_SECONDS) and left <= LOOSE_RUNS


def judge_runs(tasks: list[stored.Task]) -> list[str]:
    """Return which runs of schedules there are twice, are missing, or have not ended."""
    runs: dict[str, list[str]] = {}
    for task in tasks:
        if task.type == "echo":
            _, schedule, moment = (task.idempotency_key or "").split(":", 2)
            runs.setdefault(schedule, []).append(moment)
    problems = [f"CREW: run {moment} of schedule {schedule} was created twice" for schedule, moments in runs.items()
                for moment, times in Counter(moments).items() if times > 1]
    if len(runs) < len(SCHEDULED_SECONDS):
        problems.append(f"CREW: only {len(runs)} of {len(SCHEDULED_SECONDS)} schedules ran")
    left = [task for task in tasks if task.type == "echo" and task.status != "succeeded"]
    if len(left) > LOOSE_RUNS * len(SCHEDULED_SECONDS):
        problems.append(f"CREW: {len(left)} runs of schedules have not ended")
    return problems


# Measuring.


def read_process(pid: int) -> dict[str, float]:
    """Return what Linux tells of a process: CPU seconds, bytes, and numbers."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    links = list[str]()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):      # closed meanwhile
            links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {"cpu": (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
            "memory": int(fields[21]) * os.sysconf("SC_PAGE_SIZE"), "threads": int(fields[17]),
            "descriptors": len(links), "connections": sum(link.startswith("socket:") for link in links)}


def do_work() -> int:
    """Do a fixed piece of work, by which a machine is seen that others make slow."""
    total = 0
    for number in range(WORK_ROUNDS):
        total ^= hash((number, total))
    return total


class Gauge:
    """Measures gates and what is beside them, again and again."""

    def __init__(self, site: Site, database: str, gates: Fleet, load: Load, crew: Crew) -> None:
        self.site, self.database, self.gates, self.load, self.crew = site, database, gates, load, crew
        self.began, self.seen = time.monotonic(), 0
        self.samples: list[Sample] = []
        self.counts, self.all_begun = Counter[str](), asyncio.Event()

    def count(self, what: str) -> None:
        """Count something that was done beside the clients."""
        self.counts[what] += 1
        if {"console", "events", "scrapes"} <= self.counts.keys():
            self.all_begun.set()

    async def take(self) -> None:
        """Take one sample."""
        calls, self.seen = self.load.calls[self.seen:], len(self.load.calls)
        sums = {"cpu": 0.0, "calls": float(self.seen), "tasks": float(len(self.load.made))}
        values = dict[str, float]()
        for server in self.gates.servers:
            for name, value in read_process(server.process.pid).items():
                of = sums if name == "cpu" else values
                of[name] = of.get(name, 0.0) + value
        for name, process in self.crew.processes.items():
            if process.poll() is None:
                values[f"{name} memory"] = read_process(process.pid)["memory"]
        if len(calls) > 1:
            cuts = quantiles([(call.ended - call.started) * 1000 for call in calls], n=100)
            values |= {"p50 ms": cuts[49], "p99 ms": cuts[98]}
        wall, cpu = time.perf_counter(), time.process_time()
        do_work()
        values |= {"work ms": (time.perf_counter() - wall) * 1000, "work cpu ms": (time.process_time() - cpu) * 1000}
        values |= await self.measure_disk()
        self.samples.append(Sample(time.monotonic() - self.began, values, sums))

    async def measure_disk(self) -> dict[str, float]:
        """Return the bytes of the database with its archive, and those of its write-ahead log."""
        archive = sum(map(size_of, (self.site.folder / "archive").rglob("*")))
        if self.site.cluster is not None:
            async with connected(self.site.cluster.admin_url(DATABASE_NAME)) as db:
                size, log = await db.fetchrow("SELECT pg_database_size(current_database()), "
                                               "(SELECT sum(size) FROM pg_ls_waldir())")
            return {"disk": size + archive, "log": max(float(log), 1024 * MIB)}     # it is kept up to max_wal_size
        if not self.database.startswith("sqlite:///"):
            return {"disk": archive}
        path = self.database.removeprefix("sqlite:///")
        return {"disk": size_of(Path(path)) + archive, "log": size_of(Path(f"{path}-wal"))}


def size_of(path: Path) -> int:
    """Return the bytes of a file, or 0 for what is not a file."""
    return path.stat().st_size if path.is_file() else 0


# A soak.


async def run_soak(plan: torture.TorturePlan, seconds: float, rate: float,
                   told: Callable[[torture.Round], None]) -> None:
    """Soak one database; `told` gets what came of it."""
    if sys.platform != "linux":
        raise torture.Unfit("a soak reads what Linux tells of processes in /proc")
    async with open_site(plan.url, ()) as site:
        told(await soak_site(plan, site, seconds, rate))


async def soak_site(plan: torture.TorturePlan, site: Site, seconds: float, rate: float) -> torture.Round:
    """Serve clients for some time, measure meanwhile, and judge both."""
    done, database, problems = torture.Round(1), site.make_database(1), list[str]()
    began, draw, archive = time.monotonic(), random.Random(plan.seed), site.folder / "archive"
    archive.mkdir()
    day = max(seconds / DAYS, 0.5)
    first = f"import asyncgate.parts.receipts.archive as archive\narchive.DAY_SECONDS = {day}\n{plan.first}"
    async with (fleet(database, draw.randrange(2**32), plan.gates, first, **settings_of(archive, day)) as gates,
                aclosing(Steady(gates, draw.randrange(2**32), rate)) as load):
        async with Crew(gates, site.folder) as crew:
            gauge = Gauge(site, database, gates, load, crew)
            try:
                async with load.running(), beside(gauge, crew, min(SNAPSHOT_SECONDS, seconds / 5)):
                    await measure(gauge, seconds)
                    load.stopping = True
                problems += await crew.wait_for("type=echo", have_all_run)
            except Exception as error:      # of a client, or of what was beside them
                problems.append(f"LOAD: the soak broke off: {error!r}")
            problems += crew.list_dead()
        problems += [problem for server in gates.servers for problem in await torture.stop_server(server)]
        problems += torture.list_errors(gates) + torture.list_odd_answers(load.calls)
    gauge.counts["archived"] = await restore_archive(database, archive, (load.server.tenant, crew.tenant))
    # What was in the archive for a while cannot be counted again.
    done.record = await torture.read_round(database, load, recounted=not gauge.counts["archived"])
    done.record.samples = gauge.samples
    done.record.others = [*problems, *await judge_crew(database, crew.tenant), *done.record.others]
    done.violations = [*done.record.judge(), *done.record.others]
    done.faults, done.operations, done.tasks = gauge.counts, len(load.calls), len(load.made)
    done.unknown, done.seconds = sum(call.unknown for call in load.calls), time.monotonic() - began
    return done


def settings_of(archive: Path, day: float) -> dict[str, Any]:
    """Return the settings of the gates: what a day brings comes within minutes."""
    return {**HASTY_GATE, "metrics.enabled": "true", "console.enabled": "true", "archive.enabled": "true",
            "archive.directory": archive, "archive.interval_seconds": day / 4, "archive.terminal_days": 1,
            "receipt_retention_days": 1, "task_retention_days": 36_500, "receipts.seal_interval_seconds": day / 8}


@contextlib.asynccontextmanager
async def beside(gauge: Gauge, crew: Crew, snapshot_seconds: float) -> AsyncIterator[None]:
    """Let everything else go on during a block; what ends by itself has failed, and ends the block."""
    gates, count, site = gauge.gates, gauge.count, gauge.site
    others: list[Awaitable[None]] = [poll_console(gates, count), listen(gates, count),
                                     scrape(gates, crew.scrape_key, count)]
    if site.cluster is not None or gauge.database.startswith("sqlite:///"):
        others.append(read_old_state(site, gauge.database, snapshot_seconds, count))
    block = asyncio.current_task()
    assert block is not None
    running = [asyncio.ensure_future(other) for other in others]
    for task in running:
        task.add_done_callback(lambda ended: ended.cancelled() or block.cancel())
    try:
        yield
    except asyncio.CancelledError:
        for task in running:
            if task.done() and (error := task.exception()):
                block.uncancel()
                raise error from None
        raise
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def measure(gauge: Gauge, seconds: float) -> None:
    """Take a sample every so often until the time is over."""
    step = min(MOST_SAMPLE_SECONDS, max(seconds / SAMPLES, LEAST_SAMPLE_SECONDS))
    for number in range(max(math.ceil(seconds / step), LEAST_SAMPLES) + 1):
        await asyncio.sleep(max(0.0, gauge.began + number * step - time.monotonic()))
        await gauge.take()
        if dead := gauge.crew.list_dead():
            raise RuntimeError(dead[0])
    async with asyncio.timeout(CREW_PATIENCE):      # a short run on a busy machine does each thing once
        await gauge.all_begun.wait()


async def restore_archive(database: str, folder: Path, tenants: tuple[str, ...]) -> int:
    """Restore what was archived, so that it can be judged; return how many receipts that were."""
    backend, count = await open_backend(database), 0
    try:
        engine = Engine(backend, Settings(archive=ArchiveSettings(directory=str(folder))))
        for tenant in tenants:
            chains = {row.chain: row.task_id async for row in walk_rows(backend, tenant, queries.Rows(stored.Archived))}
            for task_id in sorted(set(chains.values())):
                if await backend.page(tenant, queries.ArchivedFilter(task_id)):
                    count += (await restore_chain(engine, tenant, task_id))[1]
    finally:
        await backend.close()
    return count


async def judge_crew(database: str, tenant: str) -> list[str]:
    """Judge what the scheduler and the worker have left."""
    backend = await open_backend(database)
    try:
        tasks = [row async for row in walk_rows(backend, tenant, queries.Rows(stored.Task))]
        own: Any = OneTenant(backend, tenant)
        verdict = await verify(own)
        return [*judge_runs(tasks), *(f"VERIFY: {problem}" for problem in verdict.problems)]
    finally:
        await backend.close()
