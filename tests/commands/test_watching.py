"""`--watch`: a list that is read again and again, in a pipe and on a terminal, until Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from asyncgate.clients.http import Http
from asyncgate.conformance.postgres_server import free_port
from tests.conftest import TOKEN, Live
from tests.support.patience import PATIENCE_SECONDS

LIST = [sys.executable, "-m", "asyncgate", "list-tasks", "--watch", "0.1s"]


@pytest.fixture
def gate() -> Iterator[Live]:
    running = Live()
    yield running
    running.kill()


def create(gate: Live, name: str) -> None:
    with Http(gate.url, TOKEN) as http:
        http.call("create_task", type=name, payload=None)


def environment(gate: Live) -> dict[str, str]:
    return {**os.environ, "ASYNCGATE_URL": gate.url, "ASYNCGATE_API_KEY": TOKEN, "TERM": "xterm", "COLUMNS": "100"}


def read_until(file: int, wanted: str) -> str:
    """Read until an ASCII text came; what was read may end within another character."""
    deadline, text = time.monotonic() + PATIENCE_SECONDS, ""
    while wanted not in text:
        assert select.select([file], [], [], max(deadline - time.monotonic(), 0.0))[0], text
        text += os.read(file, 65536).decode(errors="replace")
    return text


def start(gate: Live, *more: str, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE,
          ) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*LIST, *more], env=environment(gate), stdin=subprocess.DEVNULL, stdout=stdout,
                            stderr=stderr)


def interrupt(watching: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Press Ctrl-C; return the exit status, and what was said on stderr."""
    watching.send_signal(signal.SIGINT)
    output = watching.communicate(timeout=PATIENCE_SECONDS)[1]
    return watching.returncode, (output or b"").decode()


def test_a_pipe_gets_one_list_below_the_other(gate: Live) -> None:
    with start(gate) as watching:
        assert watching.stdout
        first = read_until(watching.stdout.fileno(), "nothing\n\n")
        create(gate, "sing")
        later = read_until(watching.stdout.fileno(), "sing")

        assert interrupt(watching) == (130, "")

    assert first.startswith("nothing")
    assert "STATUS" in later


def test_json_is_one_line_for_each_reading(gate: Live) -> None:
    create(gate, "sing")
    with start(gate, "--json") as watching:
        assert watching.stdout
        lines = [json.loads(watching.stdout.readline()) for _ in range(3)]

        assert interrupt(watching) == (130, "")

    assert [[task["type"] for task in line["tasks"]] for line in lines] == [["sing"]] * 3


def test_a_terminal_shows_the_list_in_place(gate: Live) -> None:
    ours, theirs = pty.openpty()
    with start(gate, stdout=theirs, stderr=theirs) as watching:
        os.close(theirs)
        first = read_until(ours, "nothing")
        create(gate, "sing")
        later = read_until(ours, "sing")

        status = interrupt(watching)[0]
        left = b""
        while chunk := read_rest(ours):
            left += chunk
    os.close(ours)

    assert "list-tasks, every 0.1 s" in first
    assert "\x1b[" in later       # the cursor goes back up
    assert status == 130
    assert b"Traceback" not in left


def read_rest(file: int) -> bytes:
    """Read what is left; a terminal whose last user has gone fails."""
    try:
        return os.read(file, 65536)
    except OSError:
        return b""


def test_a_gate_that_is_away_for_a_moment_is_asked_again() -> None:
    gate = Live(port=free_port())
    with start(gate) as watching:
        assert watching.stdout
        assert watching.stderr
        read_until(watching.stdout.fileno(), "nothing")
        gate.kill()
        read_until(watching.stderr.fileno(), "; trying again")
        back = Live(port=gate.port)
        try:
            create(back, "sing")
            read_until(watching.stdout.fileno(), "sing")
        finally:
            back.kill()

        assert interrupt(watching)[0] == 130


def test_a_call_that_is_wrong_ends_at_once(gate: Live) -> None:
    with start(gate, "--token", "wrong") as watching:
        output = watching.communicate(timeout=PATIENCE_SECONDS)[1].decode()

    assert watching.returncode == 3
    assert "401" in output


def test_only_lists_are_watched() -> None:
    for command, there in (("list-tasks", True), ("list-keys", True), ("get-task", False), ("create-task", False)):
        told = subprocess.run([sys.executable, "-m", "asyncgate", command, "--help"], capture_output=True, text=True,
                              check=True).stdout
        assert ("--watch" in told) == there, command
