"""`asyncgate bulk`: do one thing to many tasks, after a look at them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import click

from asyncgate.clients import http
from asyncgate.commands import calling
from asyncgate.commands.profiles import Connection
from asyncgate.commands.terminal import Bar, escape_text, show_table
from asyncgate.commands.verdicts import print_answer
from asyncgate.parts.model.words import say_count

TASKS_PER_CALL = 200
TRIES, TRIES_SECONDS = 10, 12.0      # without an answer, after both of which it ends; a gate restarts in less
COLUMNS = ("task_id", "type", "status", "created_by", "priority", "held", "created_at")
QUESTIONS = {"cancel": "cancel them?", "release": "release them from hold?", "prioritize": "give them this priority?",
             "rerun": "run them again, but for those that were run again before?"}
DONE = {"cancel": "canceled", "release": "released", "prioritize": "prioritized", "rerun": "run again"}


@click.group(cls=calling.CommandGroup)
def bulk() -> None:
    """Cancel, release, prioritize or rerun many tasks: count them, show some, ask, then do it.

    For admins.  If it is interrupted, it prints the command that goes on where it stopped.
    """


FILTERS = [
    click.Option(["--status"], type=click.Choice(["queued", "leased", "running", "succeeded", "failed", "canceled"]),
                 help="Only tasks with this status."),
    click.Option(["--type"], help="Only tasks of this type."),
    click.Option(["--created-by"], metavar="ID", help="Only tasks of this creator."),
    click.Option(["--created-by-kind"], metavar="KIND", help="Kind of the creator; default any."),
    click.Option(["--created-after"], type=calling.PAST, help="Created then or later; 1h is an hour ago."),
    click.Option(["--created-before"], type=calling.PAST, help="Created earlier than then."),
    click.Option(["--id-prefix"], metavar="TEXT", help="Only tasks whose id begins so."),
    click.Option(["--held/--not-held"], default=None, help="Only tasks that are on hold, or none of them."),
    click.Option(["--reason"], help="Why; audited."),
    click.Option(["--yes"], is_flag=True, help="Do not ask."),
]
OF_RERUN = [
    click.Option(["--failed"], is_flag=True, help="The same as --status failed."),
    click.Option(["--since", "ended_after"], type=calling.PAST, help="Ended then or later; 1h is an hour ago."),
]
OF_PRIORITIZE = [click.Option(["--priority"], type=int, required=True, help="The new priority; higher is first.")]


def make_action(action: str, text: str, *more: click.Option) -> None:
    """Add the command of one action."""
    @calling.as_json
    @calling.add_gate_options
    def run(at: Connection, as_json: bool, yes: bool, failed: bool = False, **asked: Any) -> None:
        if failed:
            asked["status"] = "failed"
        filters = {name: value for name, value in asked.items() if value is not None}
        sys.exit(preview_and_run(at, {"action": action, **filters}, yes, as_json))

    params = [*more, *FILTERS, *run.__click_params__[::-1]]     # type: ignore[attr-defined]
    bulk.add_command(click.Command(action, params=params, callback=run, help=text))


make_action("cancel", "End tasks that have not ended.")
make_action("release", "Offer tasks that are on hold again.")
make_action("prioritize", "Give tasks that have not ended another priority.", *OF_PRIORITIZE)
make_action("rerun", "Run ended tasks again, as new ones; none that was run again before.", *OF_RERUN)


@bulk.command("continue")
@click.argument("confirmation")
@calling.as_json
@calling.add_gate_options
def go_on(at: Connection, confirmation: str, as_json: bool) -> None:
    """Go on with a bulk that was interrupted."""
    with calling.connect_to_gate(at) as gate:
        sys.exit(run_to_end(gate, confirmation, None, as_json))


def preview_and_run(at: Connection, asked: dict[str, Any], yes: bool, as_json: bool) -> int:
    """Count the tasks, ask, and do it; return the exit status."""
    with calling.connect_to_gate(at) as gate:
        preview = gate.call("preview_bulk", **asked)
        if not preview["matches"]:
            print_answer(as_json, {"matches": 0}, "there is no such task")
            return 0
        if not as_json:
            show_table(COLUMNS, preview["sample"])
        number = f"{'at least ' * preview['at_least']}{say_count(preview['matches'], 'task')}"
        if not yes and not ask(f"{number}: {QUESTIONS[preview['action']]}"):
            return calling.EXIT_WRONG
        return run_to_end(gate, preview["confirmation"], None if preview["at_least"] else preview["matches"], as_json)


def ask(question: str) -> bool:
    """Ask on the terminal; without one the answer is no."""
    if not sys.stdin.isatty():
        raise calling.exit_with(f"{question}  There is nobody to answer; --yes answers yes", calling.EXIT_WRONG)
    return click.confirm(question, err=True)


def run_to_end(gate: http.Http, confirmation: str, total: int | None, as_json: bool) -> int:
    """Call again and again until the bulk has ended; return the exit status."""
    again = f"to go on: asyncgate bulk continue {confirmation}"
    try:
        with closing(Bar("bulk", "tasks", total)) as bar:
            if total is not None:
                bar.show(0)
            record = call_until_ended(lambda: gate.call("run_bulk", confirmation=confirmation,
                                                        max_tasks=TASKS_PER_CALL), partial(show_progress, bar))
    except KeyboardInterrupt:
        raise calling.exit_with(again, calling.EXIT_INTERRUPTED) from None
    except (http.Refusal, http.Unreachable) as refusal:
        if getattr(refusal, "code", None) != "invalid_confirmation":
            click.echo(again, err=True)
        raise
    more = [f"{record[name]:,} {name}" for name in ("skipped", "refused") if record[name]]
    print_answer(as_json, record, ", ".join([f"{record['done']:,} {DONE[record['action']]}", *more]))
    if record["problem"]:
        click.echo(f"refused: {escape_text(record['problem'])}", err=True)
    return calling.EXIT_CONFLICT if record["refused"] else 0


def show_progress(bar: Bar, record: dict[str, Any]) -> None:
    """Show how many tasks had their turn."""
    if not record["at_least"]:
        bar.of(record["matches"])
    bar.show(record["done"] + record["skipped"] + record["refused"])


def call_until_ended(call: Callable[[], Any], show: Callable[[dict[str, Any]], None]) -> Any:
    """Call until the bulk has ended, also over a short outage."""
    away, last = 0, time.monotonic()
    while True:
        try:
            record, away, last = call(), 0, time.monotonic()
        except (http.Unreachable, http.Refusal) as error:
            passing = isinstance(error, http.Unreachable) or error.status in http.AWAY_STATUSES
            away += 1
            if not passing or (away > TRIES and time.monotonic() - last > TRIES_SECONDS):
                raise
            time.sleep(max(http.pause_after(away, 0.5), getattr(error, "retry_after", None) or 0.0))
            continue
        show(record)
        if record["ended"]:
            return record
