"""`asyncgate dev` as a newcomer meets it, and the echo worker beside it: real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients.http import Http
from asyncgate.conformance.postgres_server import free_port
from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
DEV = [sys.executable, "-c", "import sys; from asyncgate import main; sys.exit(main())", "dev"]
Process = subprocess.Popen[str]
Start = Callable[..., tuple[Process, str]]


def clean(**more: str) -> dict[str, str]:
    """The environment without settings of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCGATE_")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start dev in an empty folder; return it with what it printed."""
    with contextlib.ExitStack() as stack:

        def begin(*options: str, port: int = 0, **environment: str) -> tuple[Process, str]:
            command = [*DEV, "--port", str(port), *options]
            dev = stack.enter_context(subprocess.Popen(
                command, cwd=tmp_path, env=clean(**environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True))
            stack.callback(dev.kill)
            return dev, banner(dev)

        yield begin


def banner(dev: Process) -> str:
    """Read what dev prints until it has said how to stop it; other words would make the test wait for ever."""
    told = ""
    assert dev.stdout
    (patience := threading.Timer(PATIENCE_SECONDS, dev.kill)).start()
    try:
        while "Ctrl-C stops the gate" not in told:
            told += (line := dev.stdout.readline())
            assert line, told
    finally:
        patience.cancel()
    return told


def address(told: str) -> str:
    match = re.search(r"is ready at (http://\S+)", told)
    assert match
    return match[1]


def paste(told: str) -> Any:
    """Do what the printed curl line does."""
    line = next(line for line in told.splitlines() if line.strip().startswith("curl "))
    words = shlex.split(line)
    assert [words[at] for at in (0, 1, 3, 5)] == ["curl", "-s", "-H", "-d"]
    name, _, value = words[4].partition(": ")
    request = urllib.request.Request(words[2], data=words[6].encode(), headers={name: value})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as reply:
        return json.load(reply)


def ended(url: str, task_id: str) -> Any:
    with Http(url, "") as gate:
        return gate.call("get_task", task_id=task_id, wait_seconds=30)


def left_over(dev: Process) -> str:
    """Read to the end of the output: it comes when dev and its child, which share the pipe, are both gone."""
    rest, _ = dev.communicate(timeout=PATIENCE_SECONDS)
    return str(rest)


def test_the_printed_curl_line_creates_a_task_and_the_echo_worker_ends_it(start: Start, tmp_path: Path) -> None:
    _, told = start()

    made = paste(told)
    task = ended(address(told), made["task_id"])

    assert made["status"] == "queued"
    assert (task["status"], task["obligation_open"]) == ("succeeded", False)
    assert task["result"]["result"] == task["payload"] == {"hello": "world"}
    assert task["result"]["artifacts"] == [
        {"type": "inline", "uri": f"asyncgate://{task['asyncgate_instance']}/tasks/{made['task_id']}/result"}]
    assert (tmp_path / "asyncgate-dev.db").exists()


def test_every_command_that_is_suggested_works(start: Start) -> None:
    _, told = start()
    task_id, url = paste(told)["task_id"], address(told)

    suggested = [re.split(r"\s{2,}", line.strip())[0] for line in told.splitlines() if line.startswith("  asyncgate ")]
    done = [subprocess.run([*DEV[:-1], *shlex.split(line.replace("TASK_ID", task_id))[1:]], capture_output=True,
                           text=True, env=clean(ASYNCGATE_URL=url)) for line in suggested]

    assert len(suggested) == 4
    assert [process.stderr for process in done if process.returncode] == []
    assert f"export ASYNCGATE_URL={url}" in told


def test_without_a_worker_one_is_the_worker_oneself(start: Start) -> None:
    _, told = start("--no-worker")
    task_id = paste(told)["task_id"]

    with Http(address(told), "") as gate:
        [offer] = gate.call("lease_next", worker_id="me", accept_types=["echo"])["tasks"]

    assert offer["task_id"] == task_id
    assert "asyncgate lease-next --worker-id me" in told


def test_sigterm_stops_it_with_status_0_and_its_child_with_it(start: Start) -> None:
    dev, told = start()
    ended(address(told), paste(told)["task_id"])

    dev.send_signal(signal.SIGTERM)

    assert left_over(dev).strip() == ""
    assert dev.returncode == 0


def test_the_child_of_a_dev_that_is_killed_ends_too(start: Start) -> None:
    dev, told = start()
    ended(address(told), paste(told)["task_id"])

    dev.send_signal(signal.SIGKILL)

    left_over(dev)
    assert dev.returncode == -signal.SIGKILL


def test_a_key_in_the_environment_lets_the_worker_and_its_user_in(start: Start) -> None:
    _, told = start(ASYNCGATE_API_KEY="my-key")
    made = paste(told)

    with Http(address(told), "my-key") as gate:
        assert gate.call("get_task", task_id=made["task_id"], wait_seconds=30)["status"] == "succeeded"


@pytest.mark.parametrize(("more", "word"), [
    ({"ASYNCGATE_HOST": "0.0.0.0"}, "loopback"),
    ({"ASYNCGATE_DATABASE_URL": "nothing://"}, "no backend for nothing:"),
    ({"ASYNCGATE_PRIORITY": "1"}, "is not a setting"),
])
def test_a_dev_that_cannot_start_says_why_in_one_line(tmp_path: Path, more: dict[str, str], word: str) -> None:
    done = subprocess.run([*DEV, "--port", "0"], cwd=tmp_path, env=clean(**more), capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (2, "")
    lines = [line for line in done.stderr.splitlines() if "INSECURE" not in line]
    assert len(lines) == 1
    assert word in lines[0]


def test_an_echo_worker_waits_for_a_gate_that_is_away(start: Start) -> None:
    port = free_port()
    command = [*DEV[:-1], "worker", "echo", "--forget", "--url", f"http://127.0.0.1:{port}", "--lifeline"]
    with subprocess.Popen(command, env=clean(), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr
        assert "no gate answers" in worker.stderr.readline()

        _, told = start("--no-worker", port=port)
        task = ended(address(told), paste(told)["task_id"])
        worker.communicate(timeout=PATIENCE_SECONDS)       # closes its standard input

    assert task["status"] == "succeeded"
    assert worker.returncode == 0


def test_on_postgres_it_says_what_to_run_instead() -> None:
    done = subprocess.run([*DEV, "--database", "postgresql://nobody@127.0.0.1:1/gate"], capture_output=True, text=True,
                          timeout=PATIENCE_SECONDS)

    assert done.returncode == 2
    assert "set ASYNCGATE_API_KEY and run `asyncgate serve`" in done.stderr
