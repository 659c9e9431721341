"""`asyncgate bench --beside`: measure a gate and other queues on this machine in turns, and print one table.

Every client of a queue does what a client of the gate does in the mode cycle: it creates a task, takes one, completes
it, and waits for each answer.  Each queue's package runs in a process of its own, which talks to the queue's server.
"""

from __future__ import annotations

import contextlib
import select
import shutil
import sqlite3
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import IO, Any, Protocol, cast

import msgspec

from asyncgate import __version__
from asyncgate.bench.hostile import UNLIMITED
from asyncgate.bench.peers import known
from asyncgate.bench.peers.child import PAYLOAD, Order, OrderTime
from asyncgate.bench.peers.servers import Databases, last_line, open_databases, serve_peer
from asyncgate.commands.bench import load, rounds, servers
from asyncgate.commands.bench.tenants import make_tenants
from asyncgate.commands.bench.wire import Failed, LoadGate, run_on_fastest_loop
from asyncgate.commands.dev import start_program, stop_children
from asyncgate.parts.process import forks

GATE_STEPS = "create; claim; complete: three requests, each on disk before its answer. Lists of 100."
GATE_REMARK = "HTTP, a credential checked with each request, four receipts a cycle."


class Measured(Protocol):
    """What is measured: a gate, or another queue."""

    name: str
    modes: tuple[str, ...]

    def run(self, turn: load.Turn) -> None:
        """Run a turn, which then holds its times."""


class GateTarget:
    """A gate on one database."""

    def __init__(self, gate: LoadGate) -> None:
        self.gate, self.name = gate, f"AsyncGate on {gate.name}"
        self.modes: tuple[str, ...] = load.BESIDE_MODES

    def run(self, turn: load.Turn) -> None:
        run_on_fastest_loop(load.run_turn(self.gate, turn))


class PeerTarget:
    """The process of another queue."""

    def __init__(self, name: str, child: subprocess.Popen[str], log: Path) -> None:
        self.name, self.child, self.log = name, child, log
        self.modes = tuple(msgspec.json.decode(self.read(load.LAST_ANSWER_SECONDS))["modes"])

    def run(self, turn: load.Turn) -> None:
        order = Order(turn.mode, turn.clients, turn.seconds, turn.count)
        with contextlib.suppress(BrokenPipeError):      # read() tells why
            cast(IO[str], self.child.stdin).write(msgspec.json.encode(order).decode() + "\n")
            cast(IO[str], self.child.stdin).flush()
        patience = None if turn.count is not None else turn.seconds + load.LAST_ANSWER_SECONDS
        answer = msgspec.json.decode(self.read(patience), type=OrderTime)
        turn.took.update(answer.took)
        turn.lasted = answer.lasted

    def read(self, seconds: float | None) -> str:
        """Return the next line of the process; raise Failed if it ended or does not answer."""
        told = cast(IO[str], self.child.stdout)
        if not select.select([told], [], [], seconds)[0]:
            raise Failed(f"{self.name} did not answer within {seconds:g} s")
        if not (line := told.readline()):
            raise Failed(f"{self.name} ended: {last_line(self.log)}")
        return line


class About(msgspec.Struct):
    """What a reader has to know of one line of the table."""

    name: str
    version: str
    server: str
    steps: str
    remark: str


class Comparison(msgspec.Struct):
    """All that `--json` prints."""

    method: dict[str, Any]
    queues: list[About]
    missing: list[known.Missing]
    rows: list[rounds.Figures]


def measure_peers(names: list[str], database: str, plan: rounds.Plan, tenants: int | None = None) -> Comparison:
    """Start a gate and the queues that are installed, measure them in turns, and stop them."""
    candidates, missing = known.find_peers(names, database)
    if not candidates:
        raise Failed("nothing to measure beside: " + "; ".join(format_missing(peer) for peer in missing))
    forks.clean_up_on_signals()
    with contextlib.ExitStack() as stack:
        on_postgres = bool(database) or any(candidate.peer.server == known.POSTGRES for candidate in candidates)
        databases = stack.enter_context(open_databases(database)) if on_postgres else None
        targets, queues = start_targets(stack, candidates, databases, max(plan.clients), tenants)
        rows = measure_in_turns(targets, plan)
        trip = databases.time_trip() if databases else None
    method = servers.describe_method(plan, rows) | {"postgres_trip_us": trip}
    del method["echo_requests_per_second"]      # no echo is served here
    return Comparison(method, queues, missing, rows)


def start_targets(stack: contextlib.ExitStack, candidates: list[known.Found], databases: Databases | None,
                  clients: int, tenants: int | None) -> tuple[list[Measured], list[About]]:
    """Start gates, servers and queues; the stack stops them."""
    folder = Path(tempfile.mkdtemp(prefix="asyncgate-bench-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    urls = (databases.make_for_gate(),) if databases else ()
    targets, queues = list[Measured](), list[About]()
    versions = [f"SQLite {sqlite3.sqlite_version}", *([databases.version] if databases else [])]
    gates = stack.enter_context(servers.start_servers(urls, 0, UNLIMITED if tenants else ()))
    for gate, version in zip([server.gate for server in gates], versions, strict=True):
        several = [run_on_fastest_loop(make_tenants(gate, tenants))] if tenants else []
        targets += [GateTarget(target) for target in (gate, *several)]
        queues += [About(target.name, __version__, version, GATE_STEPS, GATE_REMARK)
                   for target in targets[-1 - len(several):]]
    for candidate in candidates:
        if candidate.peer.server == known.POSTGRES and databases:
            url, server = databases.make_empty(), databases.version
        else:
            address = stack.enter_context(serve_peer(candidate.peer.server, folder / f"{candidate.peer.name}-server"))
            url, server = address.url, address.version
        targets.append(start_peer(stack, candidate, url, clients, folder / f"{candidate.peer.name}.log"))
        queues.append(About(candidate.peer.name, candidate.version, server, candidate.peer.steps,
                            candidate.peer.remark))
    return targets, queues


def start_peer(stack: contextlib.ExitStack, candidate: known.Found, url: str, clients: int, log: Path) -> PeerTarget:
    """Start the process of a queue, and wait until it is ready."""
    file = stack.enter_context(log.open("wb"))
    arguments = [candidate.peer.name.replace("-", "_") if candidate.peer.of == "pip" else candidate.peer.name, url,
                 str(clients)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": file, "text": True}
    if candidate.peer.of == "npm":
        command = [str(shutil.which("node")), str(known.NODE_SIDE), *arguments, PAYLOAD.decode()]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, **options)
    else:
        child = start_program("asyncgate.bench.peers.child", *arguments, **options)
    stack.callback(cast(IO[str], child.stdout).close)
    stack.callback(stop_children, child)
    return PeerTarget(candidate.peer.name, child, log)


def measure_in_turns(targets: list[Measured], plan: rounds.Plan) -> list[rounds.Figures]:
    """Run every mode with every number of clients on every target, in turns; return the medians of the rounds."""
    groups: defaultdict[tuple[str, str, int, str], list[rounds.Figures]] = defaultdict(list)
    most = {"cycle": max(plan.clients), "batch": min(plan.clients)}
    turns = [(number, clients, mode) for number, clients, mode in plan.turns()
             if mode == "cycle" or clients == most[mode]]
    screen = rounds.ProgressLine(len(turns) * len(targets))
    for target in targets if plan.warm_up > 0 else ():
        for mode in [mode for mode in plan.modes if mode in target.modes]:
            screen.told(f"warming up: {mode} on {target.name}")
            target.run(load.Turn(mode, most[mode], plan.warm_up, None))
    for number, clients, mode in turns:
        for target in [target for target in targets if mode in target.modes]:
            screen.told(
                f"round {number + 1} of {plan.rounds}: {mode}, {rounds.count_clients(clients)} on {target.name}")
            turn = load.Turn(mode, clients, plan.seconds, plan.count)
            target.run(turn)
            for figures in rounds.sum_turn(turn, database=target.name):
                groups[target.name, mode, clients, figures.operation].append(figures)
    screen.clear()
    return [rounds.median(alike) for alike in groups.values()]


# The table of docs/numbers.md.


def format_comparison(comparison: Comparison) -> str:
    """Format the table: a line per queue, cycles a second by clients; then the method, and what each queue does."""
    rates = {(figures.database, figures.mode, figures.clients): figures.tasks_per_second for figures in comparison.rows
             if figures.operation in load.COMPLETIONS}
    columns = sorted({(mode, clients) for _, mode, clients in rates},
                     key=lambda column: (load.BESIDE_MODES.index(column[0]), column[1]))
    heads = [rounds.count_clients(clients) if mode == "cycle"
             else f"{load.TASKS_PER_BATCH} a call, {rounds.count_clients(clients)}"
             for mode, clients in columns]
    lines = ["| cycles/s | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * len(columns)]
    for queue in comparison.queues:
        cells = [f"{rates[key]:,.0f}" if (key := (queue.name, *column)) in rates else "–" for column in columns]
        lines.append("| " + " | ".join([queue.name, *cells]) + " |")
    return "\n".join([*lines, "", format_peers_method(comparison), "", *map(format_about, comparison.queues),
                      *(f"- {format_missing(missing)}" for missing in comparison.missing)])


def format_peers_method(comparison: Comparison) -> str:
    """Format the method in one line."""
    method = comparison.method
    each = f"{method['count']:,} cycles" if method["count"] is not None else f"{method['seconds']:g} s"
    rounds = f"medians of {method['rounds']} rounds" if method["rounds"] > 1 else "one round"
    memory = ", in memory (set TMPDIR)" if method["temporary_folder"] in ("tmpfs", "ramfs") else ""
    trip, cores = method["postgres_trip_us"], format_cores(method["cores"])
    return (f"Python {method['python']}{memory}. Clients, queues and their servers share {cores}; {rounds} of {each}, "
            "everything in turns."
            + (f" A round trip to Postgres takes {trip:.0f} µs." if trip else ""))


def format_cores(number: int) -> str:
    """Format a number of cores."""
    return "one core" if number == 1 else f"{number} cores"


def format_about(about: About) -> str:
    """Format what a queue's steps are, and what it does not do."""
    package = "" if about.server.startswith(f"{about.name} ") else f" {about.version}"
    return f"- **{about.name}**{package} ({about.server}): {about.steps} {about.remark}"


def format_missing(missing: known.Missing) -> str:
    """Format what a queue needs that is not here."""
    return f"{missing.name} is not installed: {missing.install}"
