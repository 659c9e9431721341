"""`asyncgate run-task` and `asyncgate wait`: create a task, watch it, and exit with its outcome."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import click
import msgspec

from asyncgate.clients import http
from asyncgate.commands import calling, terminal
from asyncgate.commands.profiles import Connection

RUN_TASK_SECONDS = 30.0         # default of run-task
FIRST_LOOK, LONGEST_LOOK = 1.0, 10.0        # seconds that a call waits for the end; changes are shown between calls
EXIT_OF_END = {"succeeded": 0, "failed": calling.EXIT_FAILED, "canceled": calling.EXIT_CANCELED}
NO_WORKER_SECONDS = 3.0         # after which a hint says that no worker has taken the task
MOST_PROGRESS_CHARACTERS = 200                      # characters of progress in a line


def run_task(at: Connection, body: Mapping[str, Any], printing_json: bool) -> int:
    """Create a task, print its id at once, and wait for its end; return the exit status."""
    patience = float(body.get("wait_seconds", RUN_TASK_SECONDS))
    with calling.connect_to_gate(at) as gate:
        made = gate.send("run_task", {**body, "wait_seconds": 0}).content
        who = {name: value for name, value in body.items() if name in ("principal_kind", "principal_id", "agent_id")}
        watch = Watch(gate, made, who)
        return watch_to_end(watch, patience, printing_json, new=True)


@click.command()
@click.argument("task_id", type=calling.ID_TYPE)
@click.option("--for", "patience", type=calling.Duration(), metavar="DURATION",
              help="Longest time to wait, such as 10m; default: until the task ends.")
@calling.as_json
@calling.add_gate_options
def wait(at: Connection, task_id: str, patience: float | None, as_json: bool) -> None:
    """Wait until a task has ended; show its progress meanwhile, then its record.

    Exit status: 0 succeeded, 8 failed, 9 canceled, 10 not ended.
    """
    with calling.connect_to_gate(at) as gate:
        watch = Watch(gate, gate.send("get_task", {"task_id": task_id}).content, {})
        sys.exit(watch_to_end(watch, float("inf") if patience is None else patience, as_json))


class Watch:
    """Watches one task until it ends."""

    def __init__(self, gate: http.Http, record: bytes, who: Mapping[str, Any]) -> None:
        self.gate, self.who = gate, who
        self.record, self.task = record, msgspec.json.decode(record)
        self.shown, self.began = "", time.monotonic()
        self.outage = calling.Outage()
        self.drawn: Any = None

    @property
    def is_over(self) -> bool:
        """Whether the task has ended."""
        return self.task["status"] in EXIT_OF_END

    def follow(self, seconds: float) -> None:
        """Poll until the task has ended or the time is over; retry while the gate does not answer."""
        until, look = time.monotonic() + seconds, FIRST_LOOK
        with ExitStack() as opened:
            if terminal.is_terminal(sys.stderr) and not self.is_over and seconds > 0:
                self.drawn = opened.enter_context(terminal.console(err=True).status(format_state(self.task)))
            while not self.is_over and (left := until - time.monotonic()) > 0:
                self._poll(min(look, left))
                look = min(look * 1.5, LONGEST_LOOK)
                self._show_state()

    def _poll(self, seconds: float) -> None:
        with self.outage:
            self.record = self.gate.send("get_task", {**self.who, "task_id": self.task["task_id"],
                                                      "wait_seconds": round(seconds, 3)}).content
            self.task, self.outage.times = msgspec.json.decode(self.record), 0
            return
        self._show(self.outage.text)
        time.sleep(min(self.outage.pause_seconds, seconds))

    def _show_state(self) -> None:
        if not self.is_over and not self.outage.times:
            waits = self.task["status"] == "queued" and time.monotonic() - self.began > NO_WORKER_SECONDS
            self._show(f"{format_state(self.task)}{format_worker_hint(self.task) * waits}")

    def _show(self, text: str) -> None:
        """Show a new state: on a terminal in one changing line, else in a new line."""
        if self.drawn is not None:
            self.drawn.update(text)
        elif text != self.shown:
            click.echo(text, err=True)
        self.shown = text


def watch_to_end(watch: Watch, patience: float, printing_json: bool, *, new: bool = False) -> int:
    """Print the id of a new task, watch the task, then print its record; return the exit status."""
    task_id = watch.task["task_id"]
    try:
        if new:
            click.echo(f"task {task_id}", err=True)
        watch.follow(patience)
    except KeyboardInterrupt:
        again = f"the task continues; to wait for it again: asyncgate wait {task_id}"
        raise calling.exit_with(again, calling.EXIT_INTERRUPTED) from None
    task = watch.task
    click.echo(watch.record) if printing_json else terminal.show_block(task)
    if not watch.is_over:
        click.echo(f"{format_state(task)}{format_worker_hint(task)}; to wait for its end: asyncgate wait {task_id}",
                   err=True)
    return EXIT_OF_END.get(task["status"], calling.EXIT_NOT_ENDED)


def format_state(task: Mapping[str, Any]) -> str:
    """Describe the state of an unfinished task in one line."""
    if task.get("held"):
        return terminal.escape_text(
            f"on hold ({task['held']}); to offer it again: asyncgate release-hold {task['task_id']}")
    if later := task["status"] == "queued" and task.get("next_eligible_at"):
        return terminal.escape_text(f"queued for attempt {task['attempt'] + 1}, not before {later}")
    worker, progress = task.get("leased_to") or {}, task.get("progress")
    by = f" by {worker['id']}" if worker.get("id") else ""
    more = "" if progress is None else f": {msgspec.json.encode(progress).decode()[:MOST_PROGRESS_CHARACTERS]}"
    return terminal.escape_text(f"{task['status']}{by}{more}")


def format_worker_hint(task: Mapping[str, Any]) -> str:
    """Return a hint with the command of a worker that could take the task."""
    if task["status"] != "queued" or task.get("next_eligible_at") or task.get("held"):
        return ""
    able = (task.get("requirements") or {}).get("capabilities") or []
    worker = shlex.join(["asyncgate", "worker", "--type", task["type"],
                         *(word for capability in able for word in ("--capability", capability))])
    return terminal.escape_text(f"; no worker has taken it yet (to start one: `{worker} -- PROGRAM`)")
