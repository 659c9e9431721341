"""`asyncgate bulk` as its users meet it: the preview, the question, progress, interruptions and refusals."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients.http import Http
from asyncgate.conformance.postgres_server import free_port
from tests.commands.test_watching import environment, read_rest, read_until
from tests.conftest import TOKEN, Live
from tests.support.patience import PATIENCE_SECONDS

BULK = [sys.executable, "-m", "asyncgate", "bulk"]
AT_ONCE = "import asyncgate.parts.operating.bulk as part; part.GOOD_SECONDS = 0; from asyncgate import main; main()"
Start = Callable[..., Live]
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    """Return one gate for the tests that name their own type of task."""
    running = Live()
    yield running
    running.kill()


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """Return a type of task that belongs to one test alone."""
    return str(request.node.name)


def create(gate: Live, type: str, number: int = 1, **more: Any) -> list[str]:
    """Create tasks; return their ids."""
    made: list[str] = []
    with Http(gate.url, TOKEN) as http:
        while len(made) < number:
            tasks = [{"type": type, "payload": None, **more}] * min(number - len(made), 100)
            made += [task["task_id"] for task in http.call("create_tasks", tasks=tasks, agent_id="ada")["results"]]
    return made


def call(gate: Live, operation: str, **fields: Any) -> Any:
    """Call an operation as the operator."""
    with Http(gate.url, TOKEN) as http:
        return http.call(operation, **fields)


def count(gate: Live, type: str) -> dict[str, int]:
    """Return how many tasks of a type have each status."""
    counts = {status: call(gate, "preview_bulk", action="rerun" if status in ("failed", "canceled") else "cancel",
                           type=type, status=status)["matches"]
              for status in ("queued", "leased", "failed", "canceled")}
    return {status: number for status, number in counts.items() if number}


def issue(gate: Live, principal_kind: str, **fields: Any) -> str:
    """Issue a key of somebody else."""
    made = call(gate, "issue_key", name="another", principal_kind=principal_kind, principal_id="eve", **fields)
    return str(made["api_key"])


def fail(gate: Live, type: str, number: int = 1) -> list[str]:
    """Create tasks that have failed."""
    made = create(gate, type, number)
    for _ in made:
        [offer] = call(gate, "lease_next", worker_id="w1", accept_types=[type])["tasks"]
        call(gate, "fail", worker_id="w1", task_id=offer["task_id"], lease_id=offer["lease_id"], error="no")
    return made


def run(gate: Live, *arguments: str, **named: str) -> Done:
    """Run a command to its end; nobody is there to answer."""
    return subprocess.run([*BULK, *arguments], env={**environment(gate), **named}, stdin=subprocess.DEVNULL, text=True,
                          capture_output=True, timeout=PATIENCE_SECONDS)


class Terminal:
    """A bulk on a terminal, with somebody who answers."""

    def __init__(self, gate: Live, home: Path, *arguments: str) -> None:
        self.screen, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*BULK, *arguments], env={**environment(gate), "XDG_CACHE_HOME": str(home)}, stdin=theirs, stdout=theirs,
            stderr=theirs)
        os.close(theirs)

    def wait_for(self, wanted: str) -> str:
        """Read until a text came."""
        return read_until(self.screen, wanted)

    def answer(self, text: str) -> None:
        """Type an answer."""
        os.write(self.screen, f"{text}\n".encode())

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit status, and what was said last."""
        left = b""
        while chunk := read_rest(self.screen):
            left += chunk
        os.close(self.screen)
        return self.process.wait(PATIENCE_SECONDS), left.decode()


# The preview and the question.


def test_without_anybody_to_answer_it_shows_what_it_would_do_and_does_nothing(shared: Live, kind: str) -> None:
    made = create(shared, kind, 12)

    done = run(shared, "cancel", "--type", kind)

    assert done.returncode == 2
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["TASK_ID", "TYPE", "STATUS", "CREATED_BY", "PRIORITY", "CREATED_AT"]
    assert [row.split()[0] for row in rows] == made[:1:-1]
    assert "12 tasks: cancel them?  There is nobody to answer; --yes answers yes" in done.stderr
    assert count(shared, kind) == {"queued": 12}


@pytest.mark.parametrize(("answer", "left", "status"), [("y", {"canceled": 1}, 0), ("n", {"queued": 1}, 2),
                                                        ("", {"queued": 1}, 2)])
def test_on_a_terminal_it_asks_and_obeys(
        shared: Live, tmp_path: Path, kind: str, answer: str, left: dict[str, int], status: int) -> None:
    create(shared, kind)
    terminal = Terminal(shared, tmp_path, "cancel", "--type", kind)
    terminal.wait_for("1 task: cancel them? [y/N]: ")

    terminal.answer(answer)

    ended, output = terminal.end()
    assert ended == status
    assert count(shared, kind) == left
    assert ("1 canceled" in output) == (status == 0)


def test_more_than_a_thousand_are_not_counted_but_done(shared: Live, kind: str) -> None:
    create(shared, kind, 1050)

    asked = run(shared, "prioritize", "--priority", "3", "--type", kind)
    told = run(shared, "prioritize", "--priority", "3", "--type", kind, "--yes")

    assert "at least 1,000 tasks: give them this priority?" in asked.stderr
    assert (told.returncode, told.stdout.splitlines()[-1]) == (0, "1,050 prioritized")


@pytest.mark.parametrize("action", ["cancel", "release", "rerun"])
def test_where_there_is_nothing_to_do_it_says_so_and_asks_nothing(shared: Live, kind: str, action: str) -> None:
    done = run(shared, action, "--type", kind)
    told = run(shared, action, "--type", kind, "--json")

    assert (done.returncode, done.stdout, done.stderr) == (0, "there is no such task\n", "")
    assert (told.returncode, json.loads(told.stdout)) == (0, {"matches": 0})


# What is done.


def test_json_is_the_record_of_the_bulk_and_nothing_else(shared: Live, kind: str) -> None:
    create(shared, kind, 3)

    done = run(shared, "cancel", "--type", kind, "--reason", "the wrong batch", "--yes", "--json")

    record = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (record["action"], record["matches"], record["done"], record["ended"]) == ("cancel", 3, 3, True)
    assert call(shared, "get_bulk", bulk_id=record["bulk_id"]) == record


def test_what_failed_lately_runs_again_once(shared: Live, kind: str) -> None:
    fail(shared, kind, 2)

    [before, first, again] = [run(shared, "rerun", "--failed", "--type", kind, "--since", since, "--yes")
                              for since in ("2999-12-31", "1h", "1h")]

    assert before.stdout == "there is no such task\n"
    assert first.stdout.splitlines()[-1] == "2 run again"
    assert again.stdout.splitlines()[-1] == "0 run again, 2 skipped"
    assert count(shared, kind) == {"queued": 2, "failed": 2}


def test_what_is_on_hold_is_released(start: Start) -> None:
    gate = start("lease_sweep_interval_seconds=0.05", "expiry_jitter_seconds=0")
    [task_id] = create(gate, "lost", max_expiries=1)
    call(gate, "lease_next", worker_id="w1", lease_ttl_seconds=1)
    call(gate, "lease_next", worker_id="w2", wait_seconds=5)       # until the lease has run out
    while not call(gate, "get_task", task_id=task_id)["held"]:
        call(gate, "lease_next", worker_id="w2", wait_seconds=1)
    create(gate, "other")

    done = run(gate, "release", "--yes")

    assert done.stdout.splitlines()[-1] == "1 released"
    assert call(gate, "get_task", task_id=task_id)["held"] is None


def test_filters_narrow_it(shared: Live, kind: str) -> None:
    create(shared, kind, 2)
    call(shared, "lease_next", worker_id="w1", accept_types=[kind])

    def matches(*arguments: str) -> int:
        done = run(shared, "cancel", "--type", kind, *arguments)
        match = re.search(r"([\d,]+) tasks?: ", done.stderr)
        return int(match[1]) if match else 0

    assert [matches("--status", "queued"), matches("--status", "leased"), matches("--created-by", "ada"),
            matches("--created-by", "bob"), matches("--created-after", "1h"), matches("--created-before", "1h"),
            matches("--held"), matches("--not-held")] == [1, 1, 2, 0, 2, 0, 0, 2]


def test_what_a_rule_refuses_is_told_and_the_exit_status_says_so(shared: Live, kind: str) -> None:
    fail(shared, kind)
    key = issue(shared, "human", role="admin", task_types=["none of these"])

    done = run(shared, "rerun", "--type", kind, "--yes", ASYNCGATE_API_KEY=key)

    assert done.returncode == 5
    assert done.stdout.splitlines()[-1] == "0 run again, 1 refused"
    assert "this key is valid only for tasks of the types none of these" in done.stderr


# What was interrupted.


def test_after_ctrl_c_it_names_the_command_that_goes_on(start: Start, tmp_path: Path) -> None:
    gate = start()
    create(gate, "demo", 450)
    terminal = Terminal(gate, tmp_path, "cancel")
    terminal.wait_for("450 tasks: cancel them? [y/N]: ")
    gate.process.send_signal(signal.SIGSTOP)        # so that its first call has no answer yet
    terminal.answer("y")
    terminal.wait_for("0 of 450")
    terminal.process.send_signal(signal.SIGINT)
    status, output = terminal.end()
    gate.process.send_signal(signal.SIGCONT)

    confirmation = re.sub(r"\s", "", output.partition("bulk continue ")[2])
    went_on = run(gate, "continue", confirmation, "--json")

    assert status == 130
    assert "Traceback" not in output
    record = json.loads(went_on.stdout)
    assert (went_on.returncode, record["done"], record["skipped"], record["ended"]) == (0, 450, 0, True)
    assert json.loads(run(gate, "continue", confirmation, "--json").stdout) == record
    assert count(gate, "demo") == {"canceled": 450}


def test_a_gate_that_is_killed_and_comes_back_is_asked_again(start: Start, tmp_path: Path) -> None:
    gate = start(port=free_port(), database=f"sqlite:///{tmp_path}/gate.db")
    create(gate, "demo", 450)
    terminal = Terminal(gate, tmp_path, "cancel")
    terminal.wait_for("[y/N]: ")
    gate.kill()
    with socket.create_server(("127.0.0.1", gate.port)) as nobody:
        terminal.answer("y")
        nobody.accept()[0].close()      # its first call got no answer
        terminal.process.send_signal(signal.SIGSTOP)    # a gate may come back later than it waits
    back = start(port=gate.port, database=f"sqlite:///{tmp_path}/gate.db")
    terminal.process.send_signal(signal.SIGCONT)

    status, output = terminal.end()

    assert status == 0
    assert "450 canceled" in output
    assert count(back, "demo") == {"canceled": 450}


def test_a_gate_that_stays_away_ends_it_and_it_goes_on_later(start: Start, tmp_path: Path) -> None:
    gate = start(port=free_port(), database=f"sqlite:///{tmp_path}/gate.db")
    create(gate, "demo", 3)
    confirmation = call(gate, "preview_bulk", action="cancel")["confirmation"]
    gate.kill()

    began = time.monotonic()
    away = run(gate, "continue", confirmation)
    took = time.monotonic() - began
    back = start(port=gate.port, database=f"sqlite:///{tmp_path}/gate.db")

    assert away.returncode == 7
    assert took > 10        # longer than a gate needs to restart
    assert f"to go on: asyncgate bulk continue {confirmation}" in away.stderr
    assert run(back, "continue", confirmation).stdout == "3 canceled\n"


# Refusals.


def test_a_confirmation_that_expired_does_nothing(start: Start) -> None:
    gate = start(program=("-c", AT_ONCE))
    create(gate, "demo", 3)
    confirmation = call(gate, "preview_bulk", action="cancel")["confirmation"]

    for done in (run(gate, "continue", confirmation), run(gate, "cancel", "--yes")):
        assert done.returncode == 2
        assert "invalid_confirmation (400): this confirmation has expired" in done.stderr
        assert "preview again" in done.stderr
        assert "to go on" not in done.stderr
    assert count(gate, "demo") == {"queued": 3}


def test_nothing_is_done_without_the_confirmation_of_this_caller(shared: Live, kind: str) -> None:
    create(shared, kind)
    confirmation = call(shared, "preview_bulk", action="cancel", type=kind)["confirmation"]
    other = issue(shared, "human", role="admin")

    for wrong, named in (("nonsense", {}), (confirmation[:-1], {}), (confirmation, {"ASYNCGATE_API_KEY": other})):
        done = run(shared, "continue", wrong, **named)
        assert done.returncode == 2
        assert "invalid_confirmation (400)" in done.stderr
    assert run(shared, "continue").returncode == 2
    assert count(shared, kind) == {"queued": 1}


@pytest.mark.parametrize(("arguments", "status", "says"), [
    (["cancel", "--status", "gone"], 2, "'gone' is not one of 'queued', 'leased'"),
    (["cancel", "--created-by-kind", "agent"], 2, "say created_by too"),
    (["cancel", "--created-after", "yesterday"], 2, "'yesterday' is not a time: use a duration back from now"),
    (["cancel", "--failed"], 2, "No such option '--failed'"), (["prioritize"], 2, "Missing option '--priority'"),
    (["prioritize", "--priority", "much"], 2, "'much' is not a valid integer"),
    (["cancell"], 2, "Did you mean cancel?"), (["cancel", "--token", "wrong", "--yes"], 3, "asyncgate login")])
def test_a_wrong_request_is_refused_with_its_rule(
        shared: Live, arguments: list[str], status: int, says: str) -> None:
    done = run(shared, *arguments)

    assert (done.returncode, done.stdout) == (status, "")
    assert says in done.stderr


def test_it_is_for_admins(shared: Live, kind: str) -> None:
    create(shared, kind)

    done = run(shared, "cancel", "--type", kind, "--yes", ASYNCGATE_API_KEY=issue(shared, "agent"))

    assert done.returncode == 3
    assert "forbidden (403)" in done.stderr
    assert count(shared, kind) == {"queued": 1}
