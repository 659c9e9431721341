"""`asyncgate scheduler` as people start it, and the examples of docs/schedules.md."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asyncgate.clients.http import Http
from asyncgate.commands.main import main
from asyncgate.extras.scheduler.plan import read_plan
from asyncgate.extras.scheduler.store import Store
from tests.conftest import TOKEN, Live
from tests.support.pages import blocks
from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]
SECONDLY = {"name": "beat", "mode": "interval", "interval_seconds": 1, "misfire_policy": "catch_up_all",
            "task_template": {"type": "tick", "payload_template": {"at": "{{run_at}}"}}}


@pytest.fixture
def gate(start: Callable[..., Live]) -> Iterator[Http]:
    """A gate in a process of its own."""
    live = start()
    with Http(live.url, TOKEN) as gate:
        yield gate


@pytest.fixture
def begin(gate: Http, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """What starts a program beside the gate; none of what it started is left afterwards."""
    running = []

    def begin(*command: str, **environment: str) -> subprocess.Popen[str]:
        surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "ASYNCGATE_URL": gate.url, **environment}
        running.append(subprocess.Popen(command, cwd=tmp_path, env=surroundings, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, start_new_session=True))
        return running[-1]

    yield begin
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def waited(look: Callable[[], Any]) -> Any:
    """Look again and again until there is something to see."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (seen := look()):
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.05)
    return seen


def ticks(gate: Http, type: str = "tick") -> list[str]:
    """Return the runs that were created, oldest first."""
    tasks = gate.call("list_tasks", type=type, limit=200)["tasks"]
    return sorted(task["payload"]["at"] for task in tasks)


def test_it_runs_with_keys_from_files_ends_when_told_and_goes_on_where_it_was(
        gate: Http, begin: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    files = {}
    for kind in ("worker", "agent"):
        issued = gate.call("issue_key", name=kind, principal_kind=kind, principal_id=f"clock-{kind}")
        (tmp_path / kind).write_text(issued["api_key"] + "\n")
        files[f"ASYNCGATE_{kind.upper()}_KEY_FILE"] = str(tmp_path / kind)
    command = (sys.executable, "-m", "asyncgate", "scheduler", "--file", "s.db")
    first = begin(*command, **files)
    made = gate.call("run_task", type="schedule.create", payload=SECONDLY, agent_id="ada", wait_seconds=30)
    assert made["status"] == "succeeded", made
    waited(lambda: len(ticks(gate)) >= 2)

    first.send_signal(signal.SIGTERM)
    output = first.communicate(timeout=PATIENCE_SECONDS)[0]
    begin(*command, **files)
    seen = len(ticks(gate))
    waited(lambda: len(ticks(gate)) >= seen + 2)

    assert first.returncode == 0, output
    assert "0 schedules" in output
    runs = ticks(gate)
    assert len(set(runs)) == len(runs)


@pytest.mark.parametrize(("arguments", "environment", "says"), [
    (["--worker-key", "k"], {}, "the keys of both"),
    ([], {"ASYNCGATE_AGENT_KEY": "k"}, "the keys of both"),
    ([], {"ASYNCGATE_AGENT_KEY": "k", "ASYNCGATE_AGENT_KEY_FILE": "f"}, "both set"),
    ([], {"ASYNCGATE_WORKER_KEY_FILE": "nowhere"}, "No such file"),
    ([], {"ASYNCGATE_WORKER_KEY_FILE": os.devnull}, "is empty"),
    (["--url", "ftp://gate"], {}, "a gate's URL"),
    (["--file", "no/where.db"], {}, "No such file"),
    (["--file", "locked.db"], {}, "another scheduler has it open"),
])
def test_what_keeps_it_from_starting_is_told(arguments: list[str], environment: dict[str, str], says: str,
                                             tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with closing(Store("locked.db")):
        told = CliRunner().invoke(main, ["scheduler", *arguments], env={"ASYNCGATE_API_KEY": "", **environment})

    assert told.exit_code in (1, 2)
    assert says in " ".join(told.output.split())


def test_a_shell_with_the_schedulers_keys_can_start_a_gate_too(monkeypatch: pytest.MonkeyPatch) -> None:
    told = CliRunner().invoke(main, ["config"], env={"ASYNCGATE_WORKER_KEY": "k", "ASYNCGATE_AGENT_KEY_FILE": "f"})

    assert told.exit_code == 0


def test_the_example_of_the_documentation_runs(gate: Http, begin: Callable[..., subprocess.Popen[str]]) -> None:
    [example] = blocks("sh", mark="schedule:run")
    program = f'asyncgate() {{ "{sys.executable}" -m asyncgate "$@"; }}\n{example.text}\nwait'

    begin("bash", "-c", program, ASYNCGATE_API_KEY=TOKEN)

    assert waited(lambda: ticks(gate, "echo"))


def test_the_plans_of_the_documentation_are_plans() -> None:
    plans = blocks("json", mark="schedule:plan")

    assert plans
    for plan in plans:
        assert read_plan(json.loads(plan.text), time.time()).name
