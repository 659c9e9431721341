"""Five worker processes that are killed at random, and a gate that is restarted under them: all is done, nothing twice.

By default a hundred tasks; `--rounds 10` makes a thousand of them.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients.http import Http, Refusal, Unreachable
from asyncgate.conformance.postgres_server import free_port
from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
MAIN = [sys.executable, "-c", "import sys; from asyncgate import main; sys.exit(main())"]
TOKEN = "a-token-for-tests"
TASKS_PER_ROUND, KILLS_PER_ROUND, WORKERS, RESTARTS = 100, 3, 5, 2
HASTY = ("lease_sweep_interval_seconds=0.2", "expiry_jitter_seconds=0.2", "max_expiries=0")
# A lock says better than any clock whether two do one task at once: the system takes it from who is killed.
WORKER = """
import asyncio, fcntl, os, sys
from asyncgate.clients.worker import Worker

url, worker_id, folder = sys.argv[1:]
worker = Worker(url, worker_id, state=folder + "/state", concurrency=2, ttl_seconds=5, drain_seconds=1,
                delivery_tries=4)


@worker.task("short")
async def short(seconds, job):
    lock = os.open(f"{folder}/begun/{job.task_id}", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        await asyncio.sleep(seconds)
    except BlockingIOError:
        open(f"{folder}/twice/{job.task_id}", "w").close()
    finally:
        os.close(lock)
    return job.fence


worker.run()
"""


class Stage:
    """The processes, and the folder that they share."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.database = f"sqlite:///{folder / 'gate.db'}"
        self.around = {**os.environ, "PYTHONPATH": str(ROOT), "ASYNCGATE_API_KEY": TOKEN}
        self.gate: subprocess.Popen[bytes] | None = None
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("begun", "twice"):
            (folder / name).mkdir()

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(command, env=self.around, stdout=log, stderr=log)

    def serve(self) -> None:
        """Start the gate, and wait until it answers."""
        sets = [part for setting in HASTY for part in ("--set", setting)]
        self.gate = self._start(*MAIN, "serve", "--port", str(self.port), "--database", self.database, *sets)
        self.until(lambda: self.ask("health"))

    def restart(self, sign: signal.Signals) -> None:
        """End the gate, and start it again."""
        assert self.gate
        self.gate.send_signal(sign)
        self.gate.wait(PATIENCE_SECONDS)
        self.serve()

    def work(self, name: str) -> None:
        """Start a worker."""
        self.workers[name] = self._start(sys.executable, "-c", WORKER, self.url, name, str(self.folder))

    def end(self, name: str, sign: signal.Signals) -> int:
        """End a worker; return its exit status."""
        self.workers[name].send_signal(sign)
        return self.workers[name].wait(PATIENCE_SECONDS)

    def ask(self, operation: str, **fields: Any) -> Any:
        """Ask the gate; nothing if it is not there."""
        with contextlib.suppress(Unreachable), Http(self.url, TOKEN) as gate:
            return gate.call(operation, **fields)

    def count(self, name: str) -> int:
        """Count what is in a folder."""
        return len(os.listdir(self.folder / name))

    def until(self, look: Callable[[], Any]) -> None:
        """Look again and again until it is so."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not look():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-5000:]
            time.sleep(0.01)

    def close(self) -> None:
        """End everything for certain."""
        for process in filter(None, (self.gate, *self.workers.values())):
            process.kill()
            process.wait()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A stage whose processes are gone at the end."""
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def acts(stage: Stage, draw: random.Random, tasks: int, kills: int) -> list[tuple[int, Callable[[], Any]]]:
    """Return what happens when so many tasks have been begun."""

    def kill() -> None:
        name, sign = draw.choice(list(stage.workers)), draw.choice([signal.SIGKILL, signal.SIGTERM])
        status = stage.end(name, sign)
        assert status == (0 if sign == signal.SIGTERM and status >= 0 else -sign)   # one that only starts has no drain
        stage.work(name)

    def restart(sign: signal.Signals) -> Callable[[], None]:
        return lambda: stage.restart(sign)

    moments = [(draw.randrange(tasks), kill) for _ in range(kills)]
    signs = [signal.SIGKILL, signal.SIGTERM] * RESTARTS
    moments += [((at + 1) * tasks // (RESTARTS + 1), restart(signs[at])) for at in range(RESTARTS)]
    return sorted(moments, key=lambda act: act[0])


def test_killed_workers_and_a_restarted_gate_do_every_task_and_none_twice_at_once(
        stage: Stage, rounds: int, record_property: Any) -> None:
    seed = random.randrange(2**32)
    draw, tasks = random.Random(seed), rounds * TASKS_PER_ROUND
    print(f"seed {seed}, {tasks} tasks")
    stage.serve()
    made = create(stage, draw, tasks)
    for number in range(WORKERS):
        stage.work(f"worker-{number}")

    for begun, act in acts(stage, draw, tasks, rounds * KILLS_PER_ROUND):
        stage.until(lambda begun=begun: stage.count("begun") >= begun)      # type: ignore[misc]
        act()
    stage.until(lambda: not left(stage) and not letters(stage))     # a worker that has only begun delivers what is kept
    statuses = [stage.end(name, signal.SIGTERM) for name in stage.workers]

    ended = [stage.ask("get_task", task_id=task_id) for task_id in made]
    again = sum(task["fence"] > 1 for task in ended)
    numbers = f"{tasks} tasks, {rounds * KILLS_PER_ROUND} kills, {again} tasks begun more than once"
    record_property("chaos", numbers)
    print(numbers)
    assert [task["status"] for task in ended] == ["succeeded"] * tasks
    assert [task["task_id"] for task in ended if task["result"]["result"] != task["fence"]] == []
    assert [task_id for task_id in made if completions(stage, task_id) != 1] == []
    assert (stage.count("begun"), stage.count("twice")) == (tasks, 0)
    assert letters(stage) == []
    # A worker that has only just been started holds nothing yet and dies of the signal.
    assert set(statuses) <= {0, -signal.SIGTERM}
    assert 0 in statuses
    assert stage.ask("list_open_obligations", principal_kind="agent", principal_id="ada")["open_obligations"] == []
    subprocess.run([*MAIN, "verify", "--database", stage.database], env=stage.around, check=True, capture_output=True)


def create(stage: Stage, draw: random.Random, number: int) -> list[str]:
    """Create so many short tasks; return their ids."""
    made: list[str] = []
    while len(made) < number:
        batch = [{"type": "short", "payload": draw.uniform(0.005, 0.1)} for _ in range(min(100, number - len(made)))]
        made += [item["task_id"] for item in stage.ask("create_tasks", agent_id="ada", tasks=batch)["results"]]
    return made


def left(stage: Stage) -> bool:
    """Whether there is a task that has not come to its end."""
    for status in ("queued", "leased", "running"):
        try:
            if (page := stage.ask("list_tasks", status=status, limit=1)) is None or page["tasks"]:
                return True
        except Refusal:     # of a gate that only starts
            return True
    return False


def letters(stage: Stage) -> list[str]:
    """Return the files of results that no worker has delivered yet."""
    return [path.name for path in (stage.folder / "state").glob("*.letters*")]


def completions(stage: Stage, task_id: str) -> int:
    """Count the receipts that say that a task was done."""
    events = stage.ask("get_task_history", task_id=task_id, limit=200)["events"]
    return [event["event_type"] for event in events].count("task.completed")
