"""`asyncgate new` and `asyncgate worker --watch`: from nothing to a worker that is changed while it works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asyncgate.clients.http import Http
from asyncgate.commands.main import main
from asyncgate.commands.reloading import look_at_code

TOKEN = "a-token-for-tests"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The folder that `asyncgate new` has made, with less to wait for."""
    folder = tmp_path / "my first"
    told = CliRunner().invoke(main, ["new", str(folder)])
    assert told.exit_code == 0, told.output
    assert f"cd '{folder}' && asyncgate worker --watch -- python3 worker.py" in told.output
    worker = folder / "worker.py"
    worker.write_text(worker.read_text().replace("time.sleep(1)", "time.sleep(0.1)"))
    return folder


@pytest.fixture
def working(made: Path, live: Any, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A worker of that folder, which is started again when it changes."""
    environment = {**os.environ, "ASYNCGATE_URL": live.url, "ASYNCGATE_API_KEY": TOKEN, "XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "asyncgate", "worker", "--watch", "--drain", "0", "--",
               sys.executable, "worker.py"]
    with subprocess.Popen(command, cwd=made, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        try:
            yield process, environment
        finally:
            process.kill()


def test_a_first_worker_does_what_the_first_agent_wants(
        made: Path, working: tuple[subprocess.Popen[str], dict[str, str]]) -> None:
    agent = subprocess.run([sys.executable, "agent.py"], cwd=made, env=working[1], capture_output=True, text=True)

    assert agent.stdout == "{'words': 6}\n", agent.stderr
    working[0].terminate()
    assert working[0].wait() == 0


def test_a_worker_that_is_changed_goes_on_with_its_task_as_the_new_one(
        made: Path, live: Any, working: tuple[subprocess.Popen[str], dict[str, str]]) -> None:
    process, _ = working
    with Http(live.url, TOKEN) as gate:
        task_id = gate.call("create_task", type="words.count", payload=" ".join(["word"] * 40), agent_id="ada",
                            result_delivery="inline")["task_id"]
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "word 1\n"
        worker = made / "worker.py"
        worker.write_text(worker.read_text().replace('"words": done', '"counted": done'))
        assert process.stderr.readline() == "worker.py has changed: starting again\n"
        while (task := gate.call("get_task", task_id=task_id, wait_seconds=30))["status"] != "succeeded":
            pass

    assert task["result"]["result"] == {"counted": 40}
    process.terminate()
    words = process.communicate()[0].splitlines()
    assert len(words) < 2 * 40 - 1      # it has not begun anew
    assert "word 1" not in words


def test_a_program_that_ends_is_started_again_by_a_change(tmp_path: Path) -> None:
    (tmp_path / "broken.sh").write_text("exit 3\n")
    command = [sys.executable, "-m", "asyncgate", "worker", "--watch", str(tmp_path), "--", "sh",
               str(tmp_path / "broken.sh")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stderr
            assert process.stderr.readline().startswith("sh ended with status 3; it starts again when a file in ")
            (tmp_path / "broken.sh").write_text("echo mended\nexec sleep 600\n")
            assert process.stdout.readline() == "mended\n"
            process.send_signal(signal.SIGINT)
            assert process.wait() == 0
        finally:
            process.kill()


STUBBORN = """
import signal, sys, time

def end(*_):
    time.sleep(0.5)
    print("VERSION has ended", flush=True)
    sys.exit()

signal.signal(signal.SIGTERM, end)
print("VERSION works", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("script", ['"$0" worker.py; true', '"$0" worker.py &'], ids=["in a shell", "left by a shell"])
def test_the_old_worker_has_ended_before_the_new_one_begins(script: str, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(STUBBORN.replace("VERSION", "the old one"))
    command = [sys.executable, "-m", "asyncgate", "worker", "--watch", "--", "sh", "-c", script, sys.executable]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "the old one works\n"
            worker.write_text(STUBBORN.replace("VERSION", "the new one"))
            assert process.stdout.readline() == "the old one has ended\n"
            assert process.stdout.readline() == "the new one works\n"
            process.send_signal(signal.SIGINT)
            assert process.communicate()[0] == "the new one has ended\n"
            assert process.returncode == 0
        finally:
            process.kill()


def test_only_code_counts(tmp_path: Path) -> None:
    for name in ("a.py", "b.log", ".git/c.py", "node_modules/d.js", "sub/e.ts", "gate.db"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    assert {os.path.relpath(path, tmp_path) for path in look_at_code(tmp_path)} == {"a.py", "sub/e.ts"}


def test_nothing_is_written_over(made: Path) -> None:
    told = CliRunner().invoke(main, ["new", str(made)])

    assert told.exit_code == 1
    assert "has worker.py, agent.py already: name another folder" in told.output


@pytest.mark.parametrize("arguments", [
    ["echo", "--watch"], ["--watch", ".", "--type", "a", "--", "sh"], ["--watch", "."]])
def test_what_is_watched_is_itself_a_worker(arguments: list[str]) -> None:
    told = CliRunner().invoke(main, ["worker", *arguments])

    assert told.exit_code == 2
    assert "--watch takes a program that is itself a worker" in told.output
