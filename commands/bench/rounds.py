"""Rounds of `asyncgate bench`: run the modes in turns, compute medians, and show progress."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable

import click
import msgspec

from asyncgate.commands.bench import load
from asyncgate.commands.bench.wire import LoadGate


class Figures(msgspec.Struct):
    """One row of the table; the operation `all` stands for every request of a mode."""

    mode: str
    clients: int
    operation: str
    requests: int
    requests_per_second: float
    tasks_per_second: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    rival: int = 0
    database: str = ""
    kib_written: float = 0.0        # for each task of the operation; 0 where nobody tells


FIGURES = ("requests", "requests_per_second", "tasks_per_second", "p50_ms", "p99_ms", "p999_ms", "kib_written")


class Plan(msgspec.Struct):
    """The modes to measure, how often and for how long."""

    modes: list[str]
    clients: list[int]
    seconds: float
    count: int | None
    rounds: int
    warm_up: float

    def turns(self) -> list[tuple[int, int, str]]:
        """Return the round, clients and mode of every turn, in order."""
        return [(turn, number, mode) for turn in range(self.rounds) for number in self.clients for mode in self.modes]


Beside = Callable[[LoadGate], contextlib.AbstractAsyncContextManager[None]]


async def measure_rounds(gates: list[LoadGate], plan: Plan, rival: int = 0,
                         beside: Beside | None = None) -> list[Figures]:
    """Run every mode with every number of clients on every gate, in turns, and return the medians of the rounds.

    With a rival each turn is run twice: alone, and beside the rival.
    """
    groups: defaultdict[tuple[str, int, str, int, str], list[Figures]] = defaultdict(list)
    screen = ProgressLine(len(plan.turns()) * len(gates) * (2 if beside else 1))
    for gate in gates:
        await warm_up(gate, plan, screen)
    for number, clients, mode in plan.turns():
        for gate in gates:
            for rivals in (0, rival) if beside else (0,):
                turn = load.Turn(mode, clients, plan.seconds, plan.count)
                screen.next(f"round {number + 1} of {plan.rounds}: {mode}, {count_clients(clients)}", gate, rivals)
                async with beside(gate) if beside and rivals else contextlib.nullcontext():
                    before = await count_written(gate)
                    await load.run_turn(gate, turn, screen.watch)
                    written = await count_written(gate) - before
                for figures in sum_turn(turn, rivals, gate.name, written):
                    groups[figures.mode, figures.clients, figures.operation, figures.rival, figures.database].append(
                        figures)
    screen.clear()
    return [median(alike) for alike in groups.values()]


async def count_written(gate: LoadGate) -> float:
    """Return how many bytes the database of a gate has written; 0 if nobody tells."""
    return await gate.written() or 0.0 if gate.written else 0.0


async def warm_up(gate: LoadGate, plan: Plan, screen: ProgressLine) -> None:
    """Run every mode briefly with the largest number of clients, and discard the results."""
    for mode in plan.modes if plan.warm_up > 0 else ():
        screen.told(f"warming up: {mode}{f' on {gate.name}' if gate.name else ''}")
        await load.run_turn(gate, load.Turn(mode, max(plan.clients), plan.warm_up, None))


class ProgressLine:
    """A line on a terminal with the current measurement, its rate and the remaining time; silent elsewhere."""

    def __init__(self, turns: int) -> None:
        self.left, self.what, self.drawn = turns, "", False

    def next(self, what: str, gate: LoadGate, rivals: int) -> None:
        """Start the next turn."""
        self.left -= 1
        self.what = what + (f" on {gate.name}" if gate.name else "") + (f" beside {rivals} others" if rivals else "")
        self.told(self.what)

    async def watch(self, turn: load.Turn) -> None:
        """Redraw the line until the turn is over."""
        while sys.stderr.isatty():
            await asyncio.sleep(0.25)
            lasted = time.perf_counter() - turn.begun
            ahead = max(turn.until - turn.begun - lasted, 0.0) + self.left * turn.seconds
            left = f"{turn.begun_steps:,} of {turn.count:,}" if turn.count is not None else f"{ahead:.0f} s left"
            self.told(f"{self.what}: {turn.requests / lasted:,.0f} requests/s, {left}")

    def told(self, text: str) -> None:
        """Draw the line."""
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)
            self.drawn = True

    def clear(self) -> None:
        """Remove the line."""
        if self.drawn:
            click.echo("\r\x1b[K", err=True, nl=False)


def count_clients(clients: int) -> str:
    """Format a number of clients."""
    return "1 client" if clients == 1 else f"{clients} clients"


def sum_turn(turn: load.Turn, rival: int = 0, database: str = "", written: float = 0.0) -> list[Figures]:
    """Return the figures of each operation of a turn, and of all its requests together, which wrote so many bytes."""
    named = {**turn.took, "all": [seconds for times in turn.took.values() for seconds in times]}
    if len(turn.took) == 1:
        del named["all"]
    figures = [sum_operation(turn, name, sorted(times), rival, database) for name, times in named.items() if times]
    for figure in figures:
        if figure.operation == "all" and figure.tasks_per_second:     # a cycle's bytes are those of all its requests
            figure.kib_written = round(written / 1024 / (figure.tasks_per_second * turn.lasted), 2)
    return figures


def sum_operation(turn: load.Turn, operation: str, times: list[float], rival: int, database: str) -> Figures:
    """Return the figures of one operation from its sorted times."""
    p50, p99, p999 = (round(times[int(len(times) * part)] * 1000, 3) for part in (0.5, 0.99, 0.999))
    rate = len(times) / turn.lasted
    tasks: float = load.TASKS_PER_OPERATION.get(operation, 0) if turn.mode not in ("claim-empty", "echo") else 0
    if operation == "all":      # completed tasks
        tasks = sum(len(took) * load.COMPLETIONS.get(name, 0) for name, took in turn.took.items()) / len(times)
    return Figures(turn.mode, turn.clients, operation, len(times), round(rate, 1), round(rate * tasks, 1), p50, p99,
                   p999, rival, database)


def median(alike: list[Figures]) -> Figures:
    """Return the medians of several rounds; the number of requests is their sum."""
    middle = {name: sorted(getattr(row, name) for row in alike) for name in FIGURES}
    figures = {name: round((values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2, 3)
               for name, values in middle.items()}
    return msgspec.structs.replace(alike[0], **{**figures, "requests": sum(row.requests for row in alike)})
