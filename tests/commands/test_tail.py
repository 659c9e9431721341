"""`asyncgate tail`: each receipt once, in a pipe, as JSON and on a terminal, also across a restart of the gate."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients.events import parse_event, read_events
from asyncgate.clients.http import Http
from asyncgate.conformance.postgres_server import free_port
from tests.commands.test_watching import environment, read_until
from tests.conftest import TOKEN, Live
from tests.support.patience import PATIENCE_SECONDS

TAIL = [sys.executable, "-m", "asyncgate", "tail"]


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Live]:
    running = Live(port=free_port(), database=f"sqlite:///{tmp_path}/gate.db")
    yield running
    if running.process.poll() is None:
        running.kill()


def create(gate: Live, owner: str = "ada", type: str = "demo") -> str:
    with Http(gate.url, TOKEN) as http:
        return str(http.call("create_task", type=type, payload=None, agent_id=owner)["task_id"])


def start(gate: Live, *more: str, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE,
          **named: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*TAIL, *more], env={**environment(gate), **named}, stdin=subprocess.DEVNULL,
                            stdout=stdout, stderr=stderr)


def interrupt(tailing: subprocess.Popen[bytes]) -> int:
    """Press Ctrl-C; return the exit status."""
    tailing.send_signal(signal.SIGINT)
    tailing.communicate(timeout=PATIENCE_SECONDS)
    return tailing.returncode


def read_lines(tailing: subprocess.Popen[bytes], number: int) -> list[Any]:
    """Read lines of JSON."""
    assert tailing.stdout
    return [json.loads(tailing.stdout.readline()) for _ in range(number)]


def test_a_line_says_when_what_about_which_task_and_from_whom_to_whom(gate: Live) -> None:
    task_id = create(gate)
    with start(gate, "--all") as tailing:
        assert tailing.stdout
        words = read_until(tailing.stdout.fileno(), "\n").split()

        assert interrupt(tailing) == 130

    assert words[1:] == ["task.assigned", task_id, "agent", "ada", "to", "agent", "ada"]
    assert words[0].endswith("Z")


def test_only_what_is_asked_for_comes(gate: Live) -> None:
    create(gate, "bob")
    first, second = create(gate), create(gate)
    asked = (["--to", "ada"], ["--task", second], ["--type", "task.assigned", "--to", "bob", "--to-kind", "agent"])
    for more, owners, ids in zip(asked, ("ada", "ada", "bob"), ({first}, {second}, None), strict=True):
        with start(gate, "--all", "--json", *more) as tailing:
            [receipt] = read_lines(tailing, 1)
            interrupt(tailing)
        assert receipt["to"]["id"] == owners
        assert ids is None or receipt["task_id"] in ids


def test_it_begins_with_what_is_new_or_with_the_last_minutes(gate: Live) -> None:
    before = create(gate)
    with start(gate, "--json", "--since", "10m") as tailing:
        assert read_lines(tailing, 1)[0]["task_id"] == before
        interrupt(tailing)
    with start(gate, "--json", stderr=subprocess.DEVNULL) as tailing:
        made = create_until_seen(gate, tailing)
        interrupt(tailing)

    assert before not in made


def create_until_seen(gate: Live, tailing: subprocess.Popen[bytes]) -> list[str]:
    """Create tasks until one is shown; return the tasks shown. A client that is still starting misses the first."""
    assert tailing.stdout
    for _ in range(600):
        create(gate)
        if select.select([tailing.stdout], [], [], 0.05)[0]:
            return [json.loads(tailing.stdout.readline())["task_id"]]
    raise AssertionError("nothing was shown")


def test_each_receipt_comes_once_although_the_gate_is_killed(gate: Live, tmp_path: Path) -> None:
    made = [create(gate) for _ in range(3)]
    with start(gate, "--all", "--json") as tailing:
        assert tailing.stderr
        seen = read_lines(tailing, 3)
        gate.kill()
        read_until(tailing.stderr.fileno(), "; trying again")
        back = Live(port=gate.port, database=f"sqlite:///{tmp_path}/gate.db")
        try:
            made += [create(back) for _ in range(3)]
            seen += read_lines(tailing, 3)
            interrupt(tailing)
        finally:
            back.kill()

    assert [receipt["task_id"] for receipt in seen] == made


def test_a_terminal_shows_short_ids(gate: Live) -> None:
    task_id = create(gate)
    ours, theirs = pty.openpty()
    with start(gate, "--all", stdout=theirs, stderr=theirs) as tailing:
        os.close(theirs)
        output = read_until(ours, task_id[-12:])
        interrupt(tailing)
    os.close(ours)

    assert task_id not in output


@pytest.mark.parametrize(("more", "status", "says"), [
    (["--type", "nope"], 2, "no receipt has the type nope"), (["--task", "nope"], 4, "no task nope"),
    (["--token", "wrong"], 3, "asyncgate login"), (["--to-kind", "agent"], 2, "to_id"),
    (["--since", "yesterday"], 2, "is not a duration")])
def test_what_is_refused_ends_the_command(gate: Live, more: list[str], status: int, says: str) -> None:
    done = subprocess.run([*TAIL, *more], env=environment(gate), capture_output=True, text=True,
                          timeout=PATIENCE_SECONDS)

    assert (done.returncode, done.stdout) == (status, "")
    assert says in done.stderr


def test_events_are_read_however_they_are_cut() -> None:
    stream = (': hello\n\nid: 1\nevent: receipt\ndata: {"a":"\u2028"}\n\n:\n\n'
              'id: 2\ndata: b: c\n\ndata: cut').encode()
    pieces = [stream[at:at + 1] for at in range(len(stream))]

    assert list(read_events(pieces)) == list(read_events([stream])) == [
        ("receipt", '{"a":"\u2028"}', "1"), ("message", "b: c", "2")]
    assert parse_event(b": only a comment") is None
