"""`asyncgate demo`: watch an agent's work survive a killed worker.

Everything is real: a server process on a SQLite file, an agent that creates tasks and exits, two workers, and SIGKILL.
The narrator only watches, kills, and asks the gate for the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from asyncgate import TERMINATES
from asyncgate.clients.http import Http, Refusal, Unreachable
from asyncgate.clients.worker import Job, Worker
from asyncgate.commands.dev import start_program, stop_children, watch_lifeline
from asyncgate.commands.main import main
from asyncgate.commands.verdicts import format_counts, verify_url
from asyncgate.parts.model.content import JsonObject
from asyncgate.parts.process.forks import clean_up_on_signals

TASK_COUNT = 20
TTL_SECONDS = 2
PAGE_SECONDS = 0.06
WAIT_LIMIT_SECONDS = 120.0
AGENT = {"principal_kind": "agent", "principal_id": "scribe"}
VICTIM, HEIR = "worker-1", "worker-2"
SKILLS = {VICTIM: ["cpu", "gpu"], HEIR: ["cpu", "gpu", "ocr"]}
NEEDS = ["cpu", "gpu", "ocr", "cpu"]
SERVE = ["serve", "--port", "0", "--set", "lease_sweep_interval_seconds=0.5", "--set", "expiry_jitter_seconds=0.5"]
# Whoever reaches this machine's loopback may look and act, as at a gate for development: the demo has nothing to hide.
WITH_CONSOLE = ["--set", "allow_insecure_dev=true", "--set", "console.enabled=true"]
RARE_SKILL = "french"       # of the tasks that are left to look at: no worker has it
END_STATUSES = ("succeeded", "failed", "canceled")


class DemoFailed(Exception):
    """The demo did not succeed."""


# The parts that run in separate processes.


class Document(Struct):
    """A document to read."""

    document: str
    pages: int


async def read_document(document: Document, job: Job) -> JsonObject:
    """Read a document page by page, report each page, and resume where a lost worker stopped."""
    done = (job.progress or {}).get("page", 0)
    for page in range(done + 1, document.pages + 1):
        await asyncio.sleep(PAGE_SECONDS)
        job.report({"page": page})
    return {"pages": document.pages, "begun_at_page": done + 1}


def create_tasks() -> None:
    """Run the agent: create the tasks in one call, and exit."""
    tasks = [{"type": "read", "payload": {"document": f"doc-{number:02}", "pages": 3 + number % 4},
              "requirements": {"capabilities": [NEEDS[number % 4]]}, "priority": 10 * (number % 3),
              "idempotency_key": f"doc-{number:02}"} for number in range(1, TASK_COUNT + 1)]
    with Http() as gate:
        gate.call("create_tasks", **AGENT, tasks=tasks)


# The stage: processes and the folder they work in.


class Stage:
    """The processes of the demo and their folder; both are always removed at the end."""

    def __init__(self, folder: Path, *, console: bool = False) -> None:
        self.folder, self.console, self.token = folder, console, secrets.token_urlsafe(24)
        self.log = folder / "server.log"
        self.database = f"sqlite:///{folder / 'gate.db'}"
        self.children: dict[str, subprocess.Popen[Any]] = {}
        self.url = ""

    def serve(self) -> str:
        """Start the server and return its address."""
        self.run("server", "serve", self.database, *(WITH_CONSOLE if self.console else []))
        self.url = self.wait(self._address, "the server to start")
        return self.url

    def _address(self) -> str | None:
        if (status := self.children["server"].poll()) is not None:
            raise DemoFailed(f"the server ended with status {status}")
        _, separator, rest = self.log.read_text(errors="replace").partition(" serves ")
        return rest.split()[0] if separator and "\n" in rest else None

    def run(self, name: str, *arguments: str) -> None:
        """Start a part in a separate process."""
        with self.log.open("ab") as log:
            self.children[name] = start_program("asyncgate.commands.demo", *arguments, url=self.url, token=self.token,
                                        stdout=log, stderr=log, cwd=self.folder)

    def finish(self, name: str) -> None:
        """Wait until a part has finished."""
        if status := self.children[name].wait(WAIT_LIMIT_SECONDS):
            raise DemoFailed(f"the {name} ended with status {status}")

    def wait(self, look: Callable[[], Any], what: str) -> Any:
        """Poll until `look` returns something."""
        deadline = time.monotonic() + WAIT_LIMIT_SECONDS
        while not (seen := look()):
            if time.monotonic() > deadline:
                raise DemoFailed(f"timeout: waited {WAIT_LIMIT_SECONDS:g} s for {what}")
            time.sleep(0.03)
        return seen

    def close(self) -> None:
        """End every process: the workers first, so that the gate still receives their released leases."""
        server = self.children.pop("server", None)
        stop_children(*self.children.values())
        stop_children(*([server] if server else []))


# The display.


class DemoScreen:
    """Permanent lines; below them a block redrawn on a terminal, or an occasional line elsewhere."""

    def __init__(self) -> None:
        self.began, self.live, self.shown = time.monotonic(), sys.stdout.isatty(), 0
        self.drawn: list[str] = []

    def say(self, text: str = "") -> None:
        """Print a permanent line with the time."""
        self._wipe()
        click.echo(f"{time.monotonic() - self.began:5.1f} s  {text}" if text else "")

    def end(self, text: str) -> None:
        """Print a permanent line without the time."""
        self._wipe()
        click.echo(text)

    def _wipe(self) -> None:
        if self.drawn:
            click.echo(f"\x1b[{len(self.drawn)}A\x1b[J", nl=False)
            self.drawn = []

    def draw(self, tasks: list[JsonObject]) -> None:
        """Show the progress of the tasks."""
        done = sum(task["status"] in END_STATUSES for task in tasks)
        if self.live:
            lines = [line[:shutil.get_terminal_size().columns - 1] for line in format_progress(tasks)]
            if lines != self.drawn:
                self._wipe()
                click.echo("\n".join(lines))
                self.drawn = lines
        elif done // 5 > self.shown // 5 and done < len(tasks):
            self.say(f"{done} of {len(tasks)} tasks are done")
        self.shown = done


def format_progress(tasks: list[JsonObject]) -> Iterator[str]:
    """Draw a bar for all tasks, and a line for each worker."""
    count = Counter("done" if task["status"] in END_STATUSES else "held" if task["leased_to"] else "queued"
                    for task in tasks)
    bar = "█" * count["done"] + "▒" * count["held"] + "·" * count["queued"]
    yield f"         [{bar}] {count['done']} done, {count['held']} at work, {count['queued']} queued"
    for worker, skills in SKILLS.items():
        held = next((task for task in tasks if (task["leased_to"] or {}).get("id") == worker), None)
        yield f"         {worker} ({' '.join(skills)}): {describe_progress(held) if held else '-'}"


def describe_progress(task: JsonObject) -> str:
    """Describe the progress of a task."""
    page = (task["progress"] or {}).get("page", 0)
    return f"{task['payload']['document']}, page {page} of {task['payload']['pages']}"


def format_tree(events: list[JsonObject]) -> Iterator[str]:
    """Draw the receipts of a task as a tree: each below the receipt that it answers."""
    receipts = [event["receipt"] for event in events if event.get("receipt")]
    known = {receipt["receipt_id"] for receipt in receipts}
    below: defaultdict[str, list[JsonObject]] = defaultdict(list)
    for receipt in receipts:
        below[next((parent for parent in receipt["parents"] if parent in known), "")].append(receipt)

    def draw(receipt: JsonObject, lead: str, branch: str, bar: str) -> Iterator[str]:
        children = below[receipt["receipt_id"]]
        yield f"{lead + branch + receipt['receipt_type']:30}{describe_receipt(receipt, children)}"
        for child in children:
            last = child is children[-1]
            yield from draw(child, lead + bar, "└─ " if last else "├─ ", "   " if last else "│  ")

    for root in below[""]:
        yield from draw(root, "  ", "", "")


def describe_receipt(receipt: JsonObject, children: list[JsonObject]) -> str:
    """Describe the sender and recipient of a receipt, and whether an obligation is discharged."""
    ends = f"{format_principal(receipt['from'])} → {format_principal(receipt['to'])}"
    if receipt["receipt_type"] == "lease.expired":
        return f"{ends}   the lease of {receipt['body']['previous_worker_id']} expired"
    if receipt["receipt_type"] not in TERMINATES:
        return ends
    closed = any(child["receipt_type"] in TERMINATES[receipt["receipt_type"]] for child in children)
    return f"{ends}   {'obligation, discharged' if closed else 'OBLIGATION, OPEN'}"


def format_principal(principal: JsonObject) -> str:
    """Name a principal: the gate by its kind, others by their id."""
    return "gate" if principal["kind"] == "asyncgate" else str(principal["id"])


# The story.


def run_demo(*, keep: bool = False, console: bool = False) -> int:
    """Run the demo; return the exit status."""
    folder = Path(tempfile.mkdtemp(prefix="asyncgate-demo-"))
    stage, screen = Stage(folder, console=console), DemoScreen()
    clean_up_on_signals()
    try:
        play_story(stage, screen)
        if console:
            show_console(stage, screen)
        return 0
    except Exception as error:      # report any error, and leave nothing behind
        expected = isinstance(error, DemoFailed | Refusal | Unreachable)
        screen.end(f"\nThe demo failed: {error if expected else repr(error)}\n\n"
                   f"The end of the log:\n{read_tail(stage.log)}")
        return 1
    except KeyboardInterrupt:
        screen.end("\nstopped")
        return 128 + signal.SIGINT
    finally:
        stage.close()
        if keep:
            click.echo(f"\nkept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def read_tail(log: Path) -> str:
    """Return the last lines of the log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:]) if log.exists() else "(there is none)"


def play_story(stage: Stage, screen: DemoScreen) -> None:
    """Run the steps of the demo in order."""
    url = stage.serve()
    screen.say(f"a gate serves {url} from a SQLite file")
    with Http(url, stage.token) as gate:
        stage.run("agent", "agent")
        stage.finish("agent")
        screen.say(f"an agent has created {TASK_COUNT} tasks and exited; it remembers nothing")
        for worker, skills in SKILLS.items():
            stage.run(worker, "worker", worker)
            screen.say(f"{worker} starts; it can do {', '.join(skills)}")
            if worker == VICTIM:    # before the other one starts, which on a slow machine would leave nothing to it
                task_id = kill_victim(stage, screen, gate)
        watch_tasks(stage, screen, gate, task_id)
        show_proof(stage, screen, gate, task_id)


def read_tasks(gate: Http, screen: DemoScreen) -> list[JsonObject]:
    """Read and show all tasks."""
    tasks: list[JsonObject] = gate.call("list_tasks", limit=TASK_COUNT + 1)["tasks"]
    screen.draw(tasks)
    return tasks


def kill_victim(stage: Stage, screen: DemoScreen, gate: Http) -> str:
    """Kill the first worker during a task; return the task."""
    def reading(pages_left: int = 0) -> JsonObject | None:
        return next((task for task in read_tasks(gate, screen) if (task["leased_to"] or {}).get("id") == VICTIM
                     and 0 < (task["progress"] or {}).get("page", 0) < task["payload"]["pages"] - pages_left), None)
    while True:
        stage.wait(lambda: reading(pages_left=2), f"{VICTIM} to work on a task")
        victim = stage.children[VICTIM]
        victim.kill()
        victim.wait()
        if task := reading():
            break
        stage.run(VICTIM, "worker", VICTIM)     # on a slow machine it may have ended its task before it was killed
    screen.say(f"{VICTIM} is killed (SIGKILL) while it reads {describe_progress(task)}; "
               f"its lease expires in {TTL_SECONDS} s")
    return str(task["task_id"])


def watch_tasks(stage: Stage, screen: DemoScreen, gate: Http, task_id: str) -> None:
    """Watch the lease expire, the other worker take over, and all tasks end."""
    told = 0

    def finished() -> bool:
        nonlocal told
        tasks = read_tasks(gate, screen)
        task = next(task for task in tasks if task["task_id"] == task_id)
        if told == 0 and task["expiries"]:
            told += 1
            screen.say(f"the lease on {task['payload']['document']} has expired; the gate offers the task again")
        if told == 1 and ((task["leased_to"] or {}).get("id") == HEIR or task["status"] in END_STATUSES):
            told += 1
            screen.say(f"{HEIR} takes over {describe_progress(task)}")
        if stage.children[HEIR].poll() is not None:
            raise DemoFailed(f"{HEIR} has ended")
        return all(task["status"] in END_STATUSES for task in tasks)

    stage.wait(finished, "all tasks to end")
    done = Counter(task["status"] for task in read_tasks(gate, screen))
    screen.say(f"{done['succeeded']} of {TASK_COUNT} tasks succeeded")
    if done["succeeded"] != TASK_COUNT:
        raise DemoFailed(f"not every task succeeded: {dict(done)}")


def show_proof(stage: Stage, screen: DemoScreen, gate: Http, task_id: str) -> None:
    """Show the receipts of the task that survived, the open obligations, and the result of `verify`."""
    task, history = gate.call("get_task", task_id=task_id), gate.call("get_task_history", task_id=task_id, limit=200)
    screen.end(f"\nThe history of {task['payload']['document']}, from its receipts:\n")
    screen.end("\n".join(format_tree(history["events"])))
    page = task["result"]["result"]["begun_at_page"]
    screen.end(f"\n  {HEIR} started at page {page}: the gate passed on the progress of {VICTIM}")
    owed = gate.call("list_open_obligations", **AGENT)["open_obligations"]
    screen.end(f"\n{len(owed)} open obligations: the gate's answer when the agent asks what it is still owed")
    verdict = asyncio.run(verify_url(stage.database))
    screen.end(f"verified: {format_counts(verdict)}")
    if owed or verdict.problems:
        raise DemoFailed("; ".join([f"{len(owed)} obligations are open", *map(str, verdict.problems)]))
    screen.end(f"Nothing was lost.  The demo took {time.monotonic() - screen.began:.1f} s.")


def show_console(stage: Stage, screen: DemoScreen) -> None:
    """Leave the gate open to a browser, with a few tasks that nobody can take, until Ctrl-C."""
    tasks = [{"type": "translate", "payload": {"document": document}, "task_summary": f"Translate {document}",
              "requirements": {"capabilities": [RARE_SKILL]}} for document in ("doc-01", "doc-02", "doc-03")]
    with Http(stage.url, stage.token) as gate:
        gate.call("create_tasks", **AGENT, tasks=tasks)
    screen.end(f"\nThe agent has created {len(tasks)} tasks more; they need {RARE_SKILL}, which no worker has.\n"
               f"What is owed, where it is, and why it waits, in a browser:\n\n  {stage.url}/console\n\n"
               "No credential is needed; only this machine has access.  Ctrl-C ends the demo.")
    with contextlib.suppress(KeyboardInterrupt):
        raise DemoFailed(f"the server ended with status {stage.children['server'].wait()}")


def play_part(role: str, *arguments: str) -> None:
    """Run one part, in a process that ends with the demo."""
    watch_lifeline()
    if role == "serve":
        main([*SERVE, "--database", *arguments])
    elif role == "agent":
        create_tasks()
    else:
        worker = Worker(worker_id=arguments[0], capabilities=SKILLS[arguments[0]], ttl_seconds=TTL_SECONDS, state=None,
                        drain_seconds=0, declare=False)
        worker.task("read")(read_document)
        worker.run()


if __name__ == "__main__":
    play_part(*sys.argv[1:])
