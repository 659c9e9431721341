"""The demo is played for real, to its end, and nothing of it is left."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncgate.commands.demo import format_tree
from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-c", "import sys; from asyncgate import main; sys.exit(main())", "demo"]

processes = pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks at processes in /proc")


def surroundings(folder: Path, **more: str) -> dict[str, str]:
    """An environment whose temporary folder is our own, so that what stays behind is seen."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), **more}


def parts(folder: Path) -> dict[str, int]:
    """The processes that work in the demo's folder: what they are told to be, and their ids."""
    numbers = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):      # it may end while we look
            if os.readlink(process / "cwd").startswith(str(folder)):
                words = (process / "cmdline").read_text().split("\0")
                numbers[" ".join(words[4:]).strip()] = int(process.name)
    return numbers


def poll(look: Callable[[], bool]) -> None:
    """Look again and again until it is so."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not look():
        assert time.monotonic() < deadline


@contextlib.contextmanager
def playing(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo that has got as far as its second worker."""
    with subprocess.Popen(DEMO, env=surroundings(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as demo:
        try:
            assert demo.stdout
            while "worker-2 starts" not in (line := demo.stdout.readline()):
                assert line, "the demo has ended"
            yield demo
        finally:
            demo.kill()


def test_the_demo_survives_a_killed_worker_and_proves_it(tmp_path: Path) -> None:
    # Settings of the user's own shell must not reach the demo's gate.
    environment = surroundings(tmp_path, ASYNCGATE_DATABASE_URL="sqlite:////nowhere/gate.db", ASYNCGATE_API_KEY="mine")

    done = subprocess.run(DEMO, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)

    assert done.returncode == 0, done.stdout + done.stderr
    story = done.stdout
    assert re.search(r"worker-1 is killed \(SIGKILL\) while it reads doc-\d\d, page \d of \d", story)
    assert "has expired; the gate offers the task again" in story
    assert "worker-2 takes over doc-" in story
    assert "20 of 20 tasks succeeded" in story
    assert "0 open obligations" in story
    assert "obligations: 20 created = 20 discharged + 0 open" in story
    assert receipts(story) == [
        "  task.assigned scribe → scribe obligation, discharged",
        "  ├─ task.accepted worker-1 → gate",
        "  │  └─ lease.expired gate → scribe the lease of worker-1 expired",
        "  ├─ task.accepted worker-2 → gate",
        "  └─ task.completed worker-2 → gate",
        "     └─ task.result_ready gate → scribe",
    ]
    assert (parts(tmp_path), list(tmp_path.iterdir())) == ({}, [])


def receipts(story: str) -> list[str]:
    """The lines of the tree, without the room between the columns."""
    lines = [line for line in story.splitlines() if re.search(r"(task|lease)\.[a-z_]+ ", line) and "→" in line]
    return [re.sub(r"(?<=[a-z]) {2,}", " ", line) for line in lines]


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_demo_that_is_stopped_leaves_nothing_behind(tmp_path: Path, sign: signal.Signals) -> None:
    with playing(tmp_path) as demo:
        demo.send_signal(sign)
        demo.communicate(timeout=PATIENCE_SECONDS)

        assert demo.returncode == 128 + sign
        assert parts(tmp_path) == {}
        assert list(tmp_path.iterdir()) == []


@processes
def test_when_the_demo_itself_is_killed_its_processes_end_too(tmp_path: Path) -> None:
    with playing(tmp_path) as demo:
        # A fork has no words before it executes a program.
        poll(lambda: "worker worker-2" in parts(tmp_path) and len(parts(tmp_path)) > 1)
        demo.kill()

    poll(lambda: parts(tmp_path) == {})


@processes
def test_a_demo_that_fails_says_what_went_wrong_and_shows_the_log(tmp_path: Path) -> None:
    with playing(tmp_path) as demo:
        [server] = [process for told, process in parts(tmp_path).items() if told.startswith("serve ")]
        os.kill(server, signal.SIGKILL)
        story, errors = demo.communicate(timeout=PATIENCE_SECONDS)

    assert (demo.returncode, errors) == (1, "")
    assert "The demo failed: " in story
    assert "Started server process" in story.split("The end of the log:")[1]
    assert (parts(tmp_path), list(tmp_path.iterdir())) == ({}, [])


def test_keep_keeps_the_database_and_the_log(tmp_path: Path) -> None:
    command = [*DEMO, "--keep"]

    done = subprocess.run(command, env=surroundings(tmp_path), capture_output=True, text=True, timeout=PATIENCE_SECONDS)

    assert done.returncode == 0, done.stdout
    [folder] = tmp_path.iterdir()
    assert {"gate.db", "server.log"} <= {path.name for path in folder.iterdir()}
    assert str(folder) in done.stdout


def test_with_console_it_stays_open_to_a_browser_until_ctrl_c_and_then_leaves_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([*DEMO, "--console"], env=surroundings(tmp_path), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout
            told = iter(demo.stdout.readline, "")
            story = "".join(itertools.takewhile(lambda line: "/console" not in line, told))
            assert "20 of 20 tasks succeeded" in story
            url = next(re.finditer(r"serves (\S+) from", story))[1]
            assert next(told) == "\n"
            assert "Ctrl-C" in next(told)
            pages = [read(url + path) for path in ("/console/", "/v1/queues?type=translate", "/v1/workers")]

            demo.send_signal(signal.SIGINT)
            rest, errors = demo.communicate(timeout=PATIENCE_SECONDS)
        finally:
            demo.kill()

    assert pages[0].startswith("<!doctype html>")
    [queue] = json.loads(pages[1])["queues"]
    assert (queue["claimable"], queue["workers"]) == (3, 0)
    assert {worker["worker"]["id"] for worker in json.loads(pages[2])["workers"]} == {"worker-1", "worker-2"}
    assert (demo.returncode, rest, errors) == (0, "", "")
    assert (parts(tmp_path), list(tmp_path.iterdir())) == ({}, [])


def read(url: str) -> str:
    """What the gate sends without a credential."""
    with urllib.request.urlopen(url) as answer:
        return str(answer.read().decode())


def test_an_obligation_that_nothing_answers_is_marked_open() -> None:
    owner = {"kind": "agent", "id": "scribe"}
    assigned = {"receipt_id": "r1", "receipt_type": "task.assigned", "from": owner, "to": owner, "parents": []}
    accepted = {"receipt_id": "r2", "receipt_type": "task.accepted", "from": {"kind": "worker", "id": "w"},
                "to": {"kind": "asyncgate", "id": "g"}, "parents": ["r1"]}

    lines = list(format_tree([{"receipt": assigned}, {"event_type": "task.started"}, {"receipt": accepted}]))

    assert [line.split() for line in lines] == [
        ["task.assigned", "scribe", "→", "scribe", "OBLIGATION,", "OPEN"],
        ["└─", "task.accepted", "w", "→", "gate"],
    ]
