"""Disks that fail and machines that lose power: what a gate on SQLite has acknowledged is there, once.

    asyncgate conformance sqlite: -- -k disks --rounds 200      what test_disks.py runs, 10 rounds for each of N
    python -m asyncgate.conformance.disks faults 2000 [SEED]    the same without pytest; SEED repeats it
    python -m asyncgate.conformance.disks cuts 2000 [SEED]

Each gate is a process of its own, forked here, with `disks.c` preloaded: calls on its files fail in some way, once,
twice or for long, while clients use it.  It is killed or closed, started again, and its file is compared with what the
clients saw.  For the power cuts every call on the files is recorded.  A cut keeps what was synced; of the rest it
keeps everything, nothing, or any part, torn at sectors, as the order of the cache may be.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import json
import logging
import math
import os
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncgate import Needs, Work
from asyncgate.backends import open_backend, sqlite
from asyncgate.conformance import history
from asyncgate.conformance.harness import Gate, settings_for_tests
from asyncgate.conformance.life import find_strays
from asyncgate.conformance.load import TENANT, Client, Straight, StraightLoad, finish_cascades
from asyncgate.conformance.plugin import make_empty_file
from asyncgate.conformance.verify import verify
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.model import errors

SOURCE = Path(__file__).with_suffix(".c")
RECORD_HEAD = struct.Struct("<IIQqqq")
ENDLESS = -1
SECTORS = (512, 4096)
LONGEST = 600           # seconds of a life; it is killed then
CUTS_OF_A_WORLD = 25
CUT_AGAIN = 0.2         # of the starts after a cut
BORN = 0.2              # of the worlds begin without a file
COPIED_CHANGES = 30     # so that the log is copied back in a short life, too


class Did(IntEnum):
    """What a process did; the numbers are those of disks.c."""

    OPEN, WRITE, SYNC, TRUNCATE, UNLINK, NOTE = range(6)


class Harm(IntEnum):
    """What a call that fails has done: nothing, all, half, or the kernel forgot what waited for it; or it is slow."""

    BEFORE, AFTER, SHORT, LOST, SLOW = range(5)


FAULTY_FILES = ("gate.db-wal", "gate.db", "")        # of the log, of the database, of all files and their folder
FAULTY_CALLS = (1 << Did.SYNC, 1 << Did.WRITE, sum(1 << did for did in Did if did is not Did.NOTE))
FAULT_TIMES = (1, 2, 8, ENDLESS)
FAULT_ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
WAYS = [*product(FAULTY_CALLS, FAULTY_FILES, FAULT_ERRORS, FAULT_TIMES, [*Harm][:Harm.SLOW]),
        *product([1 << Did.SYNC], FAULTY_FILES, [0], FAULT_TIMES, [Harm.SLOW])]
# What is copied out of the log in parts is lost with the fsync behind it, if the kernel forgets it.
COPYING = [(1 << Did.SYNC, "gate.db", errno.EIO, times, Harm.LOST) for times in (1, 2)]
# What was asked of a gate that started before: its file may have that, too.
FIRST_USE = history.Call(tenant=TENANT, operation="create_task", ask={}, started=0.0, ended=math.inf)
REASONS = (*map(os.strerror, FAULT_ERRORS), "disk I/O error", "disk is full", "unable to open database file",
           "did not open it for writing")


class FaultRule(NamedTuple):
    """How calls on the files fail."""

    operations: int
    ending: str         # of the file's name
    error: int
    times: int
    how: int
    skip: int


class Life(NamedTuple):
    """One life of a gate."""

    seed: str
    rules: list[FaultRule]
    faulty_start: bool
    calls: int          # after which it ends
    heals: bool         # before the end
    closes: bool        # in order, else it is killed


class Write(NamedTuple):
    """Bytes that a file has been given, or None and its new length."""

    at: int
    data: bytes | None


class Record(NamedTuple):
    """One call of a process on a file, or a note of ours."""

    operation: int
    handle: int
    at: int
    length: int
    result: int
    path: str
    data: bytes


# The process of a gate.


class Shim:
    """The functions of disks.c in a process that has it preloaded."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(None)

    def watch(self, folder: str, trace: str, whole: bool) -> None:
        """Fail and record calls on the files of a folder from here on."""
        self.library.disk_watch(folder.encode(), trace.encode(), whole)

    def set_rules(self, rules: list[FaultRule]) -> None:
        """Let calls fail so."""
        for slot in range(4):
            rule = rules[slot] if slot < len(rules) else FaultRule(0, "", 0, 0, 0, 0)
            self.library.disk_fail(slot, rule.operations, rule.ending.encode(), rule.error, rule.skip, rule.times,
                                   rule.how)

    def note(self, call: history.Call, number: int) -> None:
        """Write a call into the trace, between the calls on files."""
        text = msgspec.json.encode((number, call))
        self.library.disk_note(text, len(text))

    def kill(self) -> None:
        """End this process as `kill -9` does, but not between a call on a file and its record."""
        self.library.disk_kill()

    @property
    def failures(self) -> int:
        """How many calls have failed so far."""
        return int(self.library.disk_failures())


class Noted(Straight):
    """A client whose answers are on the record at the moment when it has them."""

    load: DiskLoad
    number = 0

    def begin(self, call: history.Call) -> None:
        """Write a call into the trace."""
        self.load.numbers += 1
        self.number = self.load.numbers
        self.load.shim.note(call, self.number)

    def end(self, call: history.Call) -> None:
        """Write its answer into the trace."""
        self.load.shim.note(call, self.number)
        self.write(call)


class DiskLoad(StraightLoad):
    """The clients of the crash tests, and one that asks for the health and has batches refused."""

    def __init__(self, gate: Gate, shim: Shim, seed: str) -> None:
        super().__init__(gate, 0, workers=3)
        self.shim, self.now = shim, time.time
        self.random, self.numbers = random.Random(seed), random.Random(seed).randrange(10**9) * 1000
        self.agents = [f"a{n}-{seed}" for n in range(2)]        # a life's own: they begin without keys and cursors
        self.number = self.numbers      # and so is what workers append, whose names are those of every life

    def client(self, by: str) -> Client:
        """Return a client of this load."""
        self.clients.append(Noted(self, by))
        return self.clients[-1]

    async def probe(self) -> None:
        """Ask for the health, and have batches refused, again and again."""
        client = self.client("a9")

        def trespass(work: Work) -> None:
            self.gate.backend.db.execute(  # type: ignore[attr-defined]
                "INSERT INTO lanes VALUES ('another', 1, 'theirs', '[]', NULL)")
        while not self.stopping:
            await client.ask("health")
            with contextlib.suppress(errors.GateError, OSError):
                await self.gate.backend.transact(TENANT, Needs(), trespass)
            await asyncio.sleep(0.005)

    async def look(self, path: Path, copies: bool) -> None:
        """Read for long in one transaction, as a backup does, or copy the log back, too, as Litestream does."""
        while not self.stopping:
            with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as other:
                other.execute("BEGIN")
                other.execute("SELECT 1 FROM sqlite_master").fetchone()
                await asyncio.sleep(self.random.choice([0.02, 0.2]))
                other.execute("END")
                if copies and self.random.random() < 0.3:
                    other.execute(f"PRAGMA wal_checkpoint({self.random.choice(['PASSIVE', 'TRUNCATE'])})").fetchone()
            await asyncio.sleep(self.random.choice([0.02, 0.1]))


def run_life(folder: Path, plan: Life, shim: Shim, trace: Path, whole: bool) -> None:
    """Be a gate until the end that the plan says; fork before."""
    logging.disable()
    signal.alarm(LONGEST)
    sqlite.COPIED_CHANGES = COPIED_CHANGES
    shim.watch(str(folder), str(trace), whole)
    if plan.faulty_start:
        shim.set_rules(plan.rules)
    asyncio.run(live(folder / "gate.db", plan, shim))


async def live(path: Path, plan: Life, shim: Shim) -> None:
    """Serve clients, with faults; write how it went beside the file."""
    report: dict[str, Any] = {"refused": "", "unexpected": [], "calls": 0}
    try:
        backend = await open_backend(f"sqlite:///{path}", serving=True)
    except errors.StartupError as refused:
        return end_life(path, shim, report | {"refused": str(refused)}, plan)
    load = DiskLoad(Gate(engine_over(backend, settings_for_tests()), TENANT), shim, plan.seed)
    everybody = [*map(load.agent, load.agents), *map(load.worker, load.workers), load.reader(load.agents[0]),
                 load.pauser(), load.bulker(), load.probe(),
                 load.look(path, copies=not plan.rules)]     # of an fsync of others that fails a gate cannot know
    running = [asyncio.create_task(coroutine) for coroutine in everybody]
    half = plan.calls // 2
    await load.grown(half)
    shim.set_rules(plan.rules)
    await load.grown(plan.calls - half)
    if plan.heals:
        shim.set_rules([])
        await load.grown(half)
    report |= {"unexpected": load.unexpected[:3], "calls": len(load.calls)}
    if plan.closes:
        load.stopping = True
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await backend.close()
    end_life(path, shim, report, plan)


def end_life(path: Path, shim: Shim, report: dict[str, Any], plan: Life) -> None:
    """Store what is to be told, then die."""
    Path(f"{path.parent}.report").write_text(json.dumps({**report, "failures": shim.failures}))
    shim.kill()


def check_file(folder: Path, calls: list[history.Call], report: Path, trace: Path | None) -> None:
    """Start a gate over what is there, use it, and write down what is wrong; fork before."""
    logging.disable()
    signal.alarm(LONGEST)
    if trace:
        Shim().watch(str(folder), str(trace), whole=True)
    report.write_text(json.dumps(asyncio.run(list_problems(folder / "gate.db", calls))))
    os._exit(0)


async def list_problems(path: Path, calls: list[history.Call]) -> list[str]:
    """Return how a file differs from what clients saw, and from itself."""
    try:
        backend = await open_backend(f"sqlite:///{path}", serving=True)
    except errors.StartupError as refused:
        return [f"the start was refused: {refused}"]
    try:
        await finish_cascades(backend)
        rows: dict[str, history.Stored] = await history.read_stored(backend)
        problems = [*history.violations(calls, rows), *find_strays(rows),
                    *await backend.check(),     # type: ignore[attr-defined]
                    *(await verify(backend)).problems]
        await Gate(engine_over(backend, settings_for_tests()), TENANT).create()
        return problems
    except errors.GateError as error:
        return [f"the gate cannot use its file: {error}", *await backend.check()]  # type: ignore[attr-defined]
    finally:
        await backend.close()


def fork(run: Callable[[], None]) -> int:
    """Run a function in a process of its own; return the signal that ended it, 0 if none did."""
    if (child := os.fork()) == 0:
        try:
            run()
        except BaseException:
            logging.disable(logging.NOTSET)
            logging.exception("a process of the disk tests failed")
        os._exit(1)
    return os.waitpid(child, 0)[1] & 0x7F


def judge(folder: Path, calls: list[history.Call], trace: Path | None = None) -> list[str]:
    """Return what is wrong with the files in a folder; record what the start does."""
    report = Path(f"{folder}.problems")
    report.write_text('["the check has not ended"]')
    fork(partial(check_file, folder, calls, report, trace))
    problems: list[str] = json.loads(report.read_text())
    return problems


# The trace.


def read_trace(path: Path) -> Iterator[Record]:
    """Yield the records of a trace."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        operation, named, handle, place, length, result = RECORD_HEAD.unpack_from(data, at)
        name = data[at + RECORD_HEAD.size:at + RECORD_HEAD.size + named].decode()
        at += RECORD_HEAD.size + named
        size = length if operation in (Did.WRITE, Did.NOTE) else 0
        yield Record(operation, handle, place, length, result, name, data[at:at + size])
        at += size


def take_note(calls: dict[int, history.Call], record: Record) -> None:
    """Read a note of a call: its beginning, or its end."""
    number, call = msgspec.json.decode(record.data, type=tuple[int, history.Call])
    calls[number] = call


def list_calls(calls: dict[int, history.Call]) -> list[history.Call]:
    """Return the calls; one that has no answer might have had one until now."""
    return [call if call.ended else msgspec.structs.replace(call, ended=time.time()) for call in calls.values()]


# What a power cut leaves.


class Content:
    """A file: what is on the disk, and what waits for it."""

    def __init__(self, durable: bytes = b"") -> None:
        self.durable = bytearray(durable)
        self.waiting: list[Write] = []

    def sync(self) -> None:
        """Bring everything to the disk."""
        for write in self.waiting:
            put(self.durable, write)
        self.waiting = []


class Disk:
    """The files of a folder, as a sequence of records has left them."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.names = {path: Content(data) for path, data in files.items()}      # on the disk
        self.shown = dict(self.names)
        self.changed: list[tuple[str, Content | None]] = []     # names that wait for the disk
        self.open: dict[int, Content | None] = {}               # None is the folder

    def take(self, record: Record) -> None:
        """Do what a process has done."""
        if record.path.endswith(("-shm", ".lock")):     # what a new start makes again
            return
        if record.operation == Did.OPEN:
            self.open[record.handle] = None if record.at else self._find(record.path)
        elif record.operation == Did.UNLINK:
            self.shown.pop(record.path, None)
            self.changed.append((record.path, None))
        elif record.handle in self.open:
            self._change(record, self.open[record.handle])

    def _find(self, path: str) -> Content:
        if path not in self.shown:
            self.shown[path] = Content()
            self.changed.append((path, self.shown[path]))
        return self.shown[path]

    def _change(self, record: Record, content: Content | None) -> None:
        if content is None:
            if record.operation == Did.SYNC and record.result == 0:
                self.names = apply_names(self.names, self.changed)
                self.changed = []
        elif record.operation == Did.WRITE:
            content.waiting.append(Write(record.at, record.data))
        elif record.operation == Did.TRUNCATE and record.result == 0:
            content.waiting.append(Write(record.at, None))
        elif record.operation == Did.SYNC and record.result == 0:
            content.sync()
        elif record.operation == Did.SYNC and record.result == -2:
            content.waiting = []        # the kernel shows it, and does not write it any more

    def cut(self, draw: random.Random) -> dict[str, bytes]:
        """Return the files that a power cut leaves."""
        kept = draw.choice([0, len(self.changed), draw.randrange(len(self.changed) + 1)])
        names = apply_names(self.names, self.changed[:kept])
        # A file that was synced has its name, also where its folder was not.
        names |= {path: content for path, content in self.shown.items() if content.durable}
        return {path: keep_some(content, draw) for path, content in names.items()}


def apply_names(names: dict[str, Content], changed: list[tuple[str, Content | None]]) -> dict[str, Content]:
    """Return the names after some changes."""
    after = dict[str, Content | None](names) | dict(changed)
    return {path: content for path, content in after.items() if content is not None}


def put(data: bytearray, write: Write) -> None:
    """Write into a file, or cut it."""
    data.extend(bytes(max(write.at - len(data), 0)))
    if write.data is None:
        del data[write.at:]
    else:
        data[write.at:write.at + len(write.data)] = write.data


def keep_some(content: Content, draw: random.Random) -> bytes:
    """Return a file after a power cut: what is durable, and some of what waited."""
    data, waiting = bytearray(content.durable), content.waiting
    how = draw.choice(["nothing", "all", "first", "any", "last", "all but one", "torn", "torn"])
    if how == "nothing":
        waiting = []
    elif how == "first":
        waiting = waiting[:draw.randrange(len(waiting) + 1)]
    elif how == "any":
        waiting = [write for write in waiting if draw.random() < 0.5]
    elif how == "last":
        waiting = waiting[-1:]
    elif how == "all but one" and waiting:
        waiting = [write for at, write in enumerate(waiting) if at != draw.randrange(len(waiting))]
    elif how == "torn":
        waiting = list(tear(waiting, draw))
    for write in waiting:
        put(data, write)
    return bytes(data)


def tear(waiting: list[Write], draw: random.Random) -> Iterator[Write]:
    """Yield the sectors that reach the disk."""
    sector, kept = draw.choice(SECTORS), draw.choice([0.1, 0.5, 0.9])
    for write in waiting:
        if write.data is None:
            if draw.random() < kept:
                yield write
            continue
        start, end = write.at, write.at + len(write.data)
        while start < end:
            stop = min(start - start % sector + sector, end)
            if draw.random() < kept:
                yield Write(start, write.data[start - write.at:stop - write.at])
            start = stop


# Rounds.


def draw_life(seed: str, draw: random.Random, way: tuple[int, str, int, int, int] | None) -> Life:
    """Draw one life, with a disk that fails in some way."""
    rules = [FaultRule(*way, skip=draw.choice([0, 0, 1, 5]))] if way else []
    return Life(seed, rules, draw.random() < 0.1, draw.randint(15, 60) * draw.choice([1, 1, 3]),
                draw.random() < 0.5, draw.random() < 0.3)


def fill_folder(folder: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """Make a folder that has just these files; return them by their paths there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    there = {str(folder / Path(path).name): data for path, data in files.items()}
    for path, data in there.items():
        Path(path).touch(0o600)
        Path(path).write_bytes(data)
    return there


class Rounds:
    """Rounds of one kind: what they did, and what was wrong."""

    def __init__(self, folder: Path, seed: str, told: Callable[[str], None]) -> None:
        self.folder, self.seed, self.told, self.shim = folder, seed, told, Shim()
        self.world, self.trace = folder / "world", folder / "trace"
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.ways = random.Random(seed).sample(WAYS, len(WAYS))     # each in turn

    def run_lives(self, number: int, draw: random.Random, whole: bool) -> dict[str, bytes]:
        """Run one to three lives in a world, the first with faults; return the files with which it began."""
        self.trace.unlink(missing_ok=True)
        began = fill_folder(self.world, {} if draw.random() < BORN else {"gate.db": make_empty_file()})
        report = Path(f"{self.world}.report")
        for life in range(draw.randint(1, 3)):
            way = self.ways[number % len(WAYS)] if life == 0 else draw.choice([None, draw.choice(WAYS)])
            if whole and number % 3 == 0:
                way = draw.choice(COPYING)
            plan = draw_life(f"{self.seed}-{number}-{life}", draw, way)
            report.unlink(missing_ok=True)
            ended_by = fork(partial(run_life, self.world, plan, self.shim, self.trace, whole))
            self.counts["lives"] += 1
            if not report.exists():
                self.blame(plan.seed, [f"the gate ended by itself, by signal {ended_by}: {plan}"])
                continue
            told = json.loads(report.read_text())
            self.counts["faults"] += told["failures"]
            self.counts["refused starts"] += bool(told["refused"])
            true = plan.faulty_start and any(reason in told["refused"] for reason in REASONS)
            if told["unexpected"] or (told["refused"] and not true):
                self.blame(plan.seed, [f"{told}: {plan}"])
        return began

    def blame(self, name: str, problems: list[str]) -> None:
        """Note what is wrong."""
        self.problems += [f"{name}: {problem}" for problem in problems[:5]]
        for problem in problems[:5]:
            self.told(f"{name}: {problem}")

    def count(self, calls: dict[int, history.Call]) -> None:
        """Count what a file is compared with."""
        self.counts["acknowledged"] += sum(call.reply is not None for call in calls.values())
        self.counts["unanswered"] += sum(call.unknown for call in calls.values())

    def run_faults(self, rounds: int) -> None:
        """Let disks fail, and compare the file with what clients saw."""
        for number in range(rounds):
            self.run_lives(number, random.Random(f"{self.seed}-{number}"), whole=False)
            calls: dict[int, history.Call] = {}
            for record in read_trace(self.trace):
                take_note(calls, record)
            self.counts["rounds"] += 1
            if self.counts["rounds"] % 100 == 0:
                self.told(f"{self.counts['rounds']} rounds, {len(self.problems)} problems")
            self.count(calls)
            self.blame(f"{self.seed}-{number}", judge(self.world, list_calls(calls)))

    def run_cuts(self, cuts: int) -> None:
        """Cut the power at random moments of recorded lives, and start a gate over what is left."""
        number = 0
        while self.counts["cuts"] < cuts:
            draw = random.Random(f"{self.seed}-{number}")
            began = self.run_lives(number, draw, whole=True)
            self.cut_trace(number, Disk(began), draw, min(CUTS_OF_A_WORLD, cuts - self.counts["cuts"]))
            number += 1
            if number % 10 == 0:
                self.told(f"{self.counts['cuts']} cuts, {len(self.problems)} problems")

    def cut_trace(self, number: int, disk: Disk, draw: random.Random, cuts: int) -> None:
        """Cut at some places of the trace, half of them beside what makes things durable."""
        records, calls = list(read_trace(self.trace)), dict[int, history.Call]()
        edges = [at for at, record in enumerate(records) if record.operation in (Did.SYNC, Did.TRUNCATE, Did.UNLINK)]
        places = {draw.choice(edges) + draw.choice([0, 0, 1]) if edges and draw.random() < 0.5
                  else draw.randrange(len(records)) for _ in range(cuts)}
        for at, record in enumerate(records):
            if at in places:
                self.count(calls)
                self.cut_once(f"{self.seed}-{number}@{at}", disk, list_calls(calls), draw)
            if record.operation == Did.NOTE:
                take_note(calls, record)
            else:
                disk.take(record)

    def cut_once(self, name: str, disk: Disk, calls: list[history.Call], draw: random.Random) -> None:
        """Start a gate over what a power cut leaves here; sometimes cut the power again while it starts."""
        left, trace = self.folder / "left", self.folder / "again"
        began = fill_folder(left, disk.cut(draw))
        self.counts["cuts"] += 1
        trace.unlink(missing_ok=True)
        again = draw.random() < CUT_AGAIN
        self.blame(name, judge(left, calls, trace if again else None))
        if again and (records := [*read_trace(trace)]):
            disk, last = Disk(began), draw.randrange(len(records))
            for record in records[:last]:
                disk.take(record)
            fill_folder(left, disk.cut(draw))
            self.counts["cuts"] += 1
            self.counts["cuts during a start"] += 1
            self.blame(f"{name}, and again @{last}", judge(left, [*calls, FIRST_USE]))


def describe_rounds(rounds: Rounds, began: float) -> str:
    """Return what rounds did, as JSON."""
    return json.dumps({"seed": rounds.seed, **rounds.counts, "problems": rounds.problems[:50],
                       "wrong": len(rounds.problems), "seconds": round(time.time() - began)})


# Starting it.


class NoShim(Exception):
    """The shim cannot be used here; says why."""


def find_compiler() -> str | None:
    """Return the C compiler of a Linux."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None) if sys.platform == "linux" else None


def compile_shim(folder: Path, source: Path = SOURCE) -> Path:
    """Compile what is to be preloaded into a folder; raises NoShim."""
    compiler, shim = find_compiler(), folder / f"{source.stem}.so"
    if compiler is None:
        raise NoShim("failing disks need Linux and a C compiler: install cc, such as with `apt-get install gcc`")
    made = subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl", "-lpthread"],
                          check=False, capture_output=True, text=True)
    if made.returncode:
        raise NoShim(f"{compiler} does not compile {source.name}: {made.stderr[:500]}")
    return shim


def run_disks(what: str, number: int, seed: str, folder: Path, first: str = "") -> dict[str, Any]:
    """Run rounds in a process with the shim, which runs `first` before; return what they did.  Raises NoShim."""
    environment = {**os.environ, "LD_PRELOAD": str(compile_shim(folder))}
    script = f"{first}\nimport sys; from asyncgate.conformance.disks import main; main(*sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", script, what, str(number), seed, str(folder)],
                          check=True, stdout=subprocess.PIPE, env=environment, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def main(what: str, number: str, seed: str = "", folder: str = "") -> None:
    """Run rounds; without a folder start the process that has the shim."""
    import tempfile
    if not folder:
        with tempfile.TemporaryDirectory(prefix="asyncgate-disks-") as own:
            seed = seed or str(random.randrange(10**6))
            report = run_disks(what, int(number), seed, Path(own))
        print(json.dumps(report, indent=2))
        sys.exit(bool(report["wrong"]))
    make_empty_file()
    gc.freeze()     # what children share is not copied
    began, rounds = time.time(), Rounds(Path(folder), seed, lambda line: print(line, file=sys.stderr, flush=True))
    {"faults": rounds.run_faults, "cuts": rounds.run_cuts}[what](int(number))
    print(describe_rounds(rounds, began))


if __name__ == "__main__":
    main(*sys.argv[1:])
