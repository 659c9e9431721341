"""`asyncgate run-task` and `asyncgate wait`: hand a task over, watch it, and end as it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import click
import msgspec

from asyncgate.clients.http import Http, Refusal, Unreachable, pause_after
from asyncgate.commands.calling import (
    EXIT_CANCELED,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_ENDED,
    ID_TYPE,
    Duration,
    as_json,
    at_gate,
    exit_with,
    gate_at,
)
from asyncgate.commands.profiles import Connection
from asyncgate.commands.terminal import console, escape_text, is_terminal, show_block

RUN_TASK_SECONDS = 30.0         # of run-task, unless it is told otherwise
FIRST_LOOK, LONGEST_LOOK = 1.0, 10.0        # seconds that a question for the end stays open: changes are seen between
EXIT_OF_END = {"succeeded": 0, "failed": EXIT_FAILED, "canceled": EXIT_CANCELED}
NOBODY_SECONDS = 3.0            # after which it is worth a word that no worker takes a task
MOST_PROGRESS_CHARACTERS = 200                      # characters of progress in a line


def run_task(at: Connection, body: Mapping[str, Any], printing_json: bool) -> int:
    """Hand a task over, say at once which it is, and wait for its end; return the exit status."""
    patience = float(body.get("wait_seconds", RUN_TASK_SECONDS))
    with gate_at(at) as gate:
        made = gate.send("run_task", {**body, "wait_seconds": 0})
        who = {name: value for name, value in body.items() if name in ("principal_kind", "principal_id", "agent_id")}
        watch = Watch(gate, made, who)
        return watch_to_end(watch, patience, printing_json, new=True)


@click.command()
@click.argument("task_id", type=ID_TYPE)
@click.option("--for", "patience", type=Duration(), metavar="DURATION",
              help="How long at most, as in 10m; without it until the task ends.")
@as_json
@at_gate
def wait(at: Connection, task_id: str, patience: float | None, as_json: bool) -> None:
    """Wait until a task has ended, show what happens to it meanwhile, then its record.

    Exit status: 0 it succeeded, 8 it failed, 9 it was canceled, 10 it has not ended.
    """
    with gate_at(at) as gate:
        watch = Watch(gate, gate.send("get_task", {"task_id": task_id}), {})
        sys.exit(watch_to_end(watch, float("inf") if patience is None else patience, as_json))


class Watch:
    """One task that is looked at until it ends."""

    def __init__(self, gate: Http, record: bytes, who: Mapping[str, Any]) -> None:
        self.gate, self.who = gate, who
        self.record, self.task = record, msgspec.json.decode(record)
        self.shown, self.away, self.began = "", 0, time.monotonic()
        self.drawn: Any = None

    @property
    def is_over(self) -> bool:
        """Whether the task has ended."""
        return self.task["status"] in EXIT_OF_END

    def follow(self, seconds: float) -> None:
        """Look until the task has ended, or the time is over; a gate that is away meanwhile comes back."""
        until, look = time.monotonic() + seconds, FIRST_LOOK
        with ExitStack() as opened:
            if is_terminal(sys.stderr) and not self.is_over and seconds > 0:
                self.drawn = opened.enter_context(console(err=True).status(format_state(self.task)))
            while not self.is_over and (left := until - time.monotonic()) > 0:
                self._look(min(look, left))
                look = min(look * 1.5, LONGEST_LOOK)
                self._say()

    def _look(self, seconds: float) -> None:
        try:
            self.record = self.gate.send("get_task", {**self.who, "task_id": self.task["task_id"],
                                                      "wait_seconds": round(seconds, 3)})
            self.task, self.away = msgspec.json.decode(self.record), 0
        except (Unreachable, Refusal) as error:
            if isinstance(error, Refusal) and error.status not in (429, 503):
                raise
            self.away += 1
            wait = max(pause_after(self.away, 0.5), getattr(error, "retry_after", None) or 0.0)
            self._tell(f"{escape_text(str(error))}; trying on")
            time.sleep(min(wait, seconds))

    def _say(self) -> None:
        if not self.is_over and not self.away:
            waits = self.task["status"] == "queued" and time.monotonic() - self.began > NOBODY_SECONDS
            self._tell(f"{format_state(self.task)}{format_worker_hint(self.task) * waits}")

    def _tell(self, text: str) -> None:
        """Say what is new: on a terminal in one line that changes, else in a line of its own."""
        if self.drawn is not None:
            self.drawn.update(text)
        elif text != self.shown:
            click.echo(text, err=True)
        self.shown = text


def watch_to_end(watch: Watch, patience: float, printing_json: bool, *, new: bool = False) -> int:
    """Say which task it is, if it is a new one, watch it, then print the record; return the exit status."""
    task_id = watch.task["task_id"]
    try:
        if new:
            click.echo(f"task {task_id}", err=True)
        watch.follow(patience)
    except KeyboardInterrupt:
        raise exit_with(f"the task goes on; wait for it again: asyncgate wait {task_id}", EXIT_INTERRUPTED) from None
    task = watch.task
    click.echo(watch.record) if printing_json else show_block(task)
    if not watch.is_over:
        click.echo(f"{format_state(task)}{format_worker_hint(task)}; wait for its end: asyncgate wait {task_id}",
                   err=True)
    return EXIT_OF_END.get(task["status"], EXIT_NOT_ENDED)


def format_state(task: Mapping[str, Any]) -> str:
    """Say in a line how an unfinished task fares, and what it waits for."""
    if task.get("held"):
        return escape_text(f"held ({task['held']}): asyncgate release-hold {task['task_id']} offers it again")
    if later := task["status"] == "queued" and task.get("next_eligible_at"):
        return escape_text(f"queued for attempt {task['attempt'] + 1}, not before {later}")
    worker, progress = task.get("leased_to") or {}, task.get("progress")
    by = f" by {worker['id']}" if worker.get("id") else ""
    more = "" if progress is None else f": {msgspec.json.encode(progress).decode()[:MOST_PROGRESS_CHARACTERS]}"
    return escape_text(f"{task['status']}{by}{more}")


def format_worker_hint(task: Mapping[str, Any]) -> str:
    """Say what would take a task that nobody takes."""
    if task["status"] != "queued" or task.get("next_eligible_at") or task.get("held"):
        return ""
    able = (task.get("requirements") or {}).get("capabilities") or []
    worker = " ".join(["asyncgate worker --type", task["type"], *(f"--capability {one}" for one in able)])
    return escape_text(f"; no worker has taken it yet (one would be `{worker} -- PROGRAM`)")
