"""A gate in a process of its own, a remote agent, and a worker between them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients.http import Http
from tests.conftest import TOKEN, Live
from tests.support.patience import poll

AGENT = Path(__file__).parents[2] / "support" / "a2a_agent.py"
WORKER = [sys.executable, "-c", "import sys; from asyncgate import main; sys.exit(main())", "worker"]
SETTINGS = ("lease_sweep_interval_seconds=0.1", "expiry_jitter_seconds=0", "restart_grace_seconds=0", "a2a.agents=scan")


class Bridge:
    """What a test starts and kills: the gate, the remote agent, the worker."""

    def __init__(self, start: Callable[..., Live], folder: Path, running: contextlib.ExitStack) -> None:
        self.start, self.folder, self.running = start, folder, running
        self.programs = dict[str, subprocess.Popen[str]]()
        self.address = ""

    live: Live
    gate: Http

    def open(self, database: str = "memory://", port: int = 0) -> None:
        """Start the gate."""
        self.live = self.start(*SETTINGS, database=database, port=port)
        self.gate = self.running.enter_context(Http(self.live.url, TOKEN))

    def agent(self, binding: str = "JSONRPC", version: str = "1.0", port: str = "0", streams: str = "yes") -> str:
        """Start the agent; return its address."""
        program = self.begin("agent", [sys.executable, str(AGENT), str(self.folder), binding, version, port, streams],
                             stdout=subprocess.PIPE)
        assert program.stdout
        self.address = program.stdout.readline().strip()
        return self.address

    def work(self, *more: str, address: str = "", **around: str) -> subprocess.Popen[str]:
        """Start the worker."""
        around = {"ASYNCGATE_URL": self.live.url, "ASYNCGATE_API_KEY": TOKEN, "ASYNCGATE_A2A_KEY": "s3cret",
                  "XDG_STATE_HOME": str(self.folder / "state"), **around}
        command = [*WORKER, "--a2a", address or self.address, "--type", "read", "--worker-id", "bridge", "--ttl", "1s",
                   *more]
        return self.begin("worker", command, stderr=subprocess.PIPE, env={**os.environ, **around})

    def begin(self, name: str, command: list[str], **more: Any) -> subprocess.Popen[str]:
        """Start a program that a test may kill by its name."""
        program = self.running.enter_context(subprocess.Popen(command, text=True, **more))
        self.running.callback(program.kill)
        self.programs[name] = program
        return program

    def kill(self, name: str) -> None:
        """Kill a program at once."""
        self.programs[name].kill()
        self.programs[name].wait()

    def create(self, payload: Any, type: str = "read", **more: Any) -> str:
        """Create a task."""
        made = self.gate.call("create_task", type=type, payload=payload, retry_backoff_seconds=0, **more)
        return str(made["task_id"])

    def task(self, task_id: str) -> Any:
        """Read a task."""
        return self.gate.call("get_task", task_id=task_id)

    def ended(self, task_id: str) -> Any:
        """Return a task when it has ended."""
        return poll(lambda: (task := self.gate.call("get_task", task_id=task_id, wait_seconds=30))["result"] and task)

    def run(self, payload: Any, **more: Any) -> Any:
        """Create a task; return it when it has ended."""
        return self.ended(self.create(payload, **more))

    def question(self, task_id: str) -> Any:
        """Return what a task asks, when it asks."""
        def look() -> Any:
            assert self.task(task_id)["result"] is None, self.task(task_id)
            inputs = self.gate.call("list_inputs", task_id=task_id)["inputs"]
            return next((row for row in inputs if row["state"] == "open"), None)
        return poll(look)

    def answer(self, task_id: str, content: Any = None, action: str = "accept") -> Any:
        """Answer what a task asks."""
        return self.gate.call("answer_input", task_id=task_id, key=self.question(task_id)["key"], action=action,
                              content=content)

    def lines(self, name: str) -> list[str]:
        """Return what the agent has noted."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def called(self, name: str, count: int = 1) -> list[str]:
        """Return what the agent has noted, when that is so much."""
        return list(poll(lambda: len(lines := self.lines(name)) >= count and lines))

    def go(self) -> None:
        """Let slow tasks end."""
        (self.folder / "go").touch()


@pytest.fixture
def bridge(start: Callable[..., Live], tmp_path: Path) -> Iterator[Bridge]:
    """Return what is to be started."""
    with contextlib.ExitStack() as running:
        yield Bridge(start, tmp_path, running)
