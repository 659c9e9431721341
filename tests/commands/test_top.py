"""`asyncgate top`: what each key does, which rows are shown in which order, and the whole on a real terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from asyncgate.clients.http import Http
from asyncgate.commands.top import (
    ONE_KEY,
    VIEWS,
    Screen,
    Shot,
    choose_rows,
    choose_view,
    draw_screen,
    press_key,
    shorten_seconds,
)
from asyncgate.parts.operations import OPERATIONS
from tests.commands.test_watching import environment, read_until
from tests.conftest import TOKEN, Live
from tests.support.patience import PATIENCE_SECONDS

TOP = [sys.executable, "-m", "asyncgate", "top"]
QUEUES = [{"queue_id": "q", "type": type, "capabilities": able, "claimable": claimable, "delayed": 0, "held": 0,
           "leased": 1, "oldest_wait_seconds": oldest}
          for type, able, claimable, oldest in (
              ("ocr", ["gpu"], 3, 5.0), ("mail", [], 20, 90.0), ("idle", [], 0, None))]


def press(screen: Screen, *keys: str) -> Screen | None:
    now: Screen | None = screen
    for key in keys:
        assert now is not None, "a key came after the one that ends"
        now = press_key(now, key)
    return now


def types(screen: Screen | None) -> list[str]:
    assert screen is not None
    return [row["type"] for row in choose_rows(screen, QUEUES)]


# Keys.


def test_queues_are_shown_first_the_one_that_waits_longest_on_top() -> None:
    assert types(choose_view(Screen(), "queues")) == ["mail", "ocr", "idle"]


@pytest.mark.parametrize(("keys", "view"), [("2", "workers"), ("3", "schedules"), ("4", "obligations"), ("1", "queues"),
                                            ("\t", "workers"), ("\t\t\t\t", "queues")])
def test_a_key_chooses_the_view(keys: str, view: str) -> None:
    assert press(choose_view(Screen(), "queues"), *keys).view == view  # type: ignore[union-attr]


@pytest.mark.parametrize(("keys", "order"), [
    ("<<<<", ["mail", "ocr", "idle"]), ("r", ["ocr", "mail", "idle"]), (">", ["ocr", "mail", "idle"]),
    (">r", ["idle", "mail", "ocr"]), (">>r", ["idle", "mail", "ocr"])])
def test_keys_choose_the_column_and_the_order(keys: str, order: list[str]) -> None:
    assert types(press(choose_view(Screen(), "queues"), *keys)) == order


def test_arrows_are_keys_too() -> None:
    screen = choose_view(Screen(), "queues")

    assert press(screen, "\x1b[C") == press(screen, ">")
    assert press(screen, "\x1b[D") == press(screen, "<")


@pytest.mark.parametrize(("text", "keys"), [
    ("\x1bq", ["\x1b", "q"]), ("\x1b[C\x1b[C", ["\x1b[C", "\x1b[C"]), ("\x1bOD/é", ["\x1bOD", "/", "é"]),
    ("\x1b", ["\x1b"]), ("\x1b[5~\r\n", ["\x1b[5~", "\r", "\n"]), ("", [])])
def test_keys_that_come_at_once_are_told_apart(text: str, keys: list[str]) -> None:
    assert ONE_KEY.findall(text) == keys


def test_a_filter_is_typed_kept_and_cleared() -> None:
    screen = choose_view(Screen(), "queues")

    assert types(press(screen, *"/GPx\x7f")) == ["ocr"]
    assert press(screen, *"/mail\r", "q") is None
    assert types(press(screen, *"/mail\r")) == ["mail"]
    assert types(press(screen, *"/mail\r", "\x1b")) == ["mail", "ocr", "idle"]


def test_space_stops_and_resumes_and_other_keys_do_nothing() -> None:
    screen = choose_view(Screen(), "queues")

    assert press(screen, " ").stopped  # type: ignore[union-attr]
    assert press(screen, " ", " ") == press(screen, "x", "\x1b[A", "9") == screen


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0s"), (0.9, "0s"), (59, "59s"), (60, "1m0s"), (3_723, "1h2m"), (90_000, "1d1h"), (864_000, "10d0h")])
def test_durations_are_short(seconds: float, text: str) -> None:
    assert shorten_seconds(seconds) == text


# Output.


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 8), (200, 50)])
def test_the_screen_fits_the_terminal(view: str, width: int, height: int) -> None:
    from rich.console import Console

    row = {column.partition(".")[0]: "x" * 50 for column in OPERATIONS[VIEWS[view]].columns}
    rows = QUEUES * 40 if view == "queues" else [row] * 100
    health = {"instance_id": "gate", "status": "healthy", "uptime": 5}
    on = Console(width=width, height=height, file=io.StringIO())
    with on.capture() as shown:
        on.print(draw_screen(choose_view(Screen(), view), Shot(rows, True, health, "12:00:00Z"), "http://gate", width,
                             height))

    lines = shown.get().rstrip("\n").split("\n")
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert "more rows" in shown.get()


@pytest.fixture
def gate() -> Iterator[Live]:
    running = Live()
    with Http(running.url, TOKEN) as http:
        for type in ("mail", "ocr", "ocr"):
            http.call("create_task", type=type, payload=None, agent_id="ada")
    yield running
    running.kill()


def test_a_pipe_gets_what_is_there_now(gate: Live) -> None:
    done = subprocess.run([*TOP, "--sort", "claimable"], env=environment(gate), capture_output=True, text=True,
                          timeout=PATIENCE_SECONDS)
    owed = subprocess.run([*TOP, "--view", "obligations", "--filter", "nobody"], env=environment(gate),
                          capture_output=True, text=True, timeout=PATIENCE_SECONDS)

    assert (done.returncode, done.stderr, owed.stdout) == (0, "", "nothing\n")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["TYPE", "ocr", "mail"]


@pytest.mark.parametrize(("more", "status", "says"), [
    (["--sort", "size"], 2, "there are type, capabilities"), (["--view", "moon"], 2, "'moon' is not one of"),
    (["--token", "wrong"], 3, "asyncgate login"), (["--every", "0"], 2, "not between 0.1 seconds")])
def test_what_is_wrong_ends_the_command(gate: Live, more: list[str], status: int, says: str) -> None:
    done = subprocess.run([*TOP, *more], env=environment(gate), capture_output=True, text=True,
                          timeout=PATIENCE_SECONDS)

    assert (done.returncode, done.stdout) == (status, "")
    assert says in done.stderr


@contextmanager
def open_top(gate: Live, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start it on a terminal of 80 columns, and return it with our end; it must leave the terminal as it was.

    A failure of the test ends it, too.
    """
    env = {name: value for name, value in environment(gate).items() if name not in ("COLUMNS", "LINES")}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    running = subprocess.Popen([*TOP, *more], env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    try:
        yield running, ours
        assert termios.tcgetattr(theirs) == before
    finally:
        running.kill()
        running.wait()
        os.close(theirs)
        os.close(ours)


def wait_for_end(running: subprocess.Popen[bytes], ours: int) -> int:
    """Return the exit status; read meanwhile, as the command may wait for that."""
    deadline, text = time.monotonic() + PATIENCE_SECONDS, b""
    while running.poll() is None:
        assert time.monotonic() < deadline, text[-2000:].decode(errors="replace")
        if select.select([ours], [], [], 0.05)[0]:
            text += os.read(ours, 65536)
    return running.returncode


def test_on_a_terminal_it_is_live_and_leaves_the_terminal_as_it_was(gate: Live) -> None:
    with open_top(gate, "--every", "0.2s") as (running, ours):
        read_until(ours, "3 claimable")
        with Http(gate.url, TOKEN) as http:
            http.call("create_task", type="late", payload=None, agent_id="ada")
        read_until(ours, "4 claimable")
        os.write(ours, b"4")
        read_until(ours, "task.assigned")
        os.write(ours, b"/nob")
        read_until(ours, "nothing")
        os.write(ours, b"\x1b")
        read_until(ours, "task.assigned")
        os.write(ours, b"q")

        assert wait_for_end(running, ours) == 0

def test_ctrl_c_ends_it(gate: Live) -> None:
    with open_top(gate) as (running, ours):
        read_until(ours, "claimable")
        running.send_signal(signal.SIGINT)

        assert wait_for_end(running, ours) == 130
