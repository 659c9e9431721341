"""`asyncgate torture`: kill and cut off real gates under load, and judge the history of what their clients saw."""

from __future__ import annotations

import asyncio
import atexit
import random
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncgate.commands import calling

if TYPE_CHECKING:
    from asyncgate.conformance.evidence import TortureReport
    from asyncgate.conformance.torture import Round

FAULTS = ("kill, pause, worker, scheduler, ledger, lies, limits, names, reset, restart, commit, failover, comeback, "
          "bouncer, silence, sessions, lock, notices, exhaust, snapshot, clock, disk, power")


def read_faults(ctx: click.Context, param: click.Parameter, text: str) -> tuple[str, ...]:
    """Read a list of faults such as kill,pause."""
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    if names == ("all",):
        return names
    if wrong := [name for name in names if name not in FAULTS.split(", ")]:
        raise click.BadParameter(f"there is no fault {wrong[0]}; there are {FAULTS}")
    return names


@click.command(epilog="Example: asyncgate torture sqlite: postgres: --rounds 20 --report evidence")
@click.argument("urls", metavar="[URL]...", nargs=-1)
@click.option("--rounds", type=click.IntRange(1), help="How many rounds of each database; default 5.")
@click.option("--seconds", type=click.FloatRange(0), default=0.0,
              help="Begin no round of a database after this time; without --rounds as many as fit.")
@click.option("--faults", callback=read_faults, default="", metavar="NAME,...",
              help=f"Which faults come: {FAULTS}; or all, which leaves out only disk and power. By default kill and "
                   "pause, on a Postgres that is started here restart and commit, too. Disk and power are for sqlite: "
                   "and need Linux and a C compiler.")
@click.option("--strikes", type=click.IntRange(1), default=4, help="How many faults come in a round; default 4.")
@click.option("--calls", type=click.IntRange(1), default=500,
              help="How many calls of clients lie between two faults, at most; default 500.")
@click.option("--gates", type=click.IntRange(1, 16), default=1, help="How many gates share the database.")
@click.option("--seed", type=int, help="Decides what clients ask and when which fault comes; default a random one.")
@click.option("--report", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="Write torture.json and torture.html there, and of each failed round its history, the smallest "
                   "part that shows the failure, and a drawing.")
@click.option("--soak", type=click.FloatRange(0, min_open=True), metavar="MINUTES",
              help="No faults: serve each database for so long, and judge whether memory, disk and times grow.")
@click.option("--simulate", "steps", type=click.IntRange(1), metavar="STEPS",
              help="Only simulate gates and faults, for at least so many calls; --seed repeats it exactly.")
@click.option("--judge", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Judge a history that was written earlier, and do nothing else.")
def torture(urls: tuple[str, ...], judge: Path | None, steps: int | None, **asked: Any) -> None:
    """Serve clients from real gates while faults come, and check that nothing is lost, repeated or contradicted.

    A URL is sqlite: (a fresh file each round), postgres: (a server that is started for it), or that of any backend;
    {tmp} in it is a new folder.  Use a database that you can throw away: what the clients create stays there.
    The exit status is 1 if an invariant was violated, and 130 if Ctrl-C ended the run before.
    """
    from importlib.util import find_spec
    if find_spec("pytest") is None:
        raise click.UsageError("torture needs the package's extra test: pip install 'asyncgate[test]'")
    if asked["soak"] and (asked["rounds"] or asked["seconds"] or asked["faults"]):
        raise click.UsageError("a soak has no rounds and no faults: leave --rounds, --seconds and --faults out")
    if [bool(urls), bool(judge), bool(steps)].count(True) != 1:
        raise click.UsageError("name the databases, such as sqlite: and postgres:, or use --judge or --simulate")
    wrong = judge_again(judge) if judge else simulate(steps, **asked) if steps else torture_databases(urls, **asked)
    sys.exit(1 if wrong else 0)


def judge_again(path: Path) -> int:
    """Judge a history again; return the number of violations."""
    from asyncgate.conformance.recording import read_record
    try:
        record = read_record(path)
    except ValueError as wrong:
        raise click.ClickException(str(wrong)) from None
    problems = record.judge()
    for text in [*problems, *(f"{other} (found in the database then)" for other in record.others)]:
        click.echo(text)
    unknown = sum(call.unknown for call in record.calls)
    click.echo(f"{len(record.calls):,} operations, {unknown} unknown, {len(problems) + len(record.others)} violations")
    return len(problems) + len(record.others)


def simulate(steps: int, seed: int | None, report: Path | None, **others: Any) -> int:
    """Simulate round after round; return the number of violations."""
    from asyncgate.conformance.simulated_programs import run_steps
    return print_summary(run_steps(steps, seed, shlex.join(["asyncgate", *sys.argv[1:]]), report, click.echo))


def torture_databases(urls: tuple[str, ...], rounds: int | None, seconds: float, faults: tuple[str, ...],
                      strikes: int, calls: int, gates: int, seed: int | None, report: Path | None,
                      soak: float | None) -> int:
    """Run the rounds of each database; return the number of violations."""
    from asyncgate.conformance import evidence as part
    from asyncgate.conformance.disks import NoShim
    from asyncgate.conformance.forks import ForkingPopen
    from asyncgate.conformance.run import try_databases
    from asyncgate.conformance.soak import CALLS_PER_SECOND, run_soak
    from asyncgate.conformance.torture import TorturePlan, Unfit, plan_faults, run_rounds
    from asyncgate.parts.process.forks import clean_up_on_signals
    seed = random.randrange(2**32) if seed is None else seed
    most = rounds or (sys.maxsize if seconds else 5)
    try_databases(urls)
    try:
        plans = [TorturePlan(url, () if soak else fit, seed, gates, strikes=strikes, calls=calls)
                 for url in urls for fit in [plan_faults(url, faults, gates)]]
    except Unfit as why:
        raise click.UsageError(str(why)) from None
    atexit.register(ForkingPopen.close_nursery)
    clean_up_on_signals()
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["asyncgate", *map(part.mask, sys.argv[1:])])
    shown = part.begin_evidence(command, seed, gates)
    click.echo(f"seed {seed}")
    for plan in plans:
        click.echo(f"{part.mask(plan.url)}: {', '.join(plan.faults) or f'a soak of {soak:g} minutes'}")

        def tell(done: Round, plan: TorturePlan = plan) -> None:
            click.echo(done.describe())
            for text in done.violations[:part.LISTED_VIOLATIONS]:
                click.echo(f"  {text}")
            shown.count(plan, done, report)
        try:
            with shown.ending_when_interrupted():
                asyncio.run(run_soak(plan, soak * 60, CALLS_PER_SECOND, tell) if soak else
                            run_rounds(plan, most, seconds, tell))
        except NoShim as why:
            raise click.ClickException(str(why)) from None
        if report is not None:
            part.write_evidence(report, shown)
        if shown.interrupted:
            break
    return print_summary(shown)


def print_summary(shown: TortureReport) -> int:
    """Print what was done to each database; return the number of violations, or exit as after Ctrl-C without any."""
    for row in shown.databases:
        faults = ", ".join(f"{count:,} {name}" for name, count in sorted(row.done.items())) or "no faults"
        click.echo(f"{row.database}: {row.rounds} rounds, {faults}, {row.operations:,} operations, {row.unknown:,} "
                   f"unknown, {row.violations} violations")
    wrong = sum(row.violations for row in shown.databases)
    if shown.interrupted and not wrong:
        raise calling.exit_with("interrupted; what was done until then stands above", calling.EXIT_INTERRUPTED)
    return wrong
