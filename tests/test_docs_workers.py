"""The workers in other languages that the documentation shows do their work, with every kind of credential."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients.http import Http
from tests.support.pages import blocks
from tests.support.patience import PATIENCE_SECONDS

TOKEN = "a-token-for-tests"
# How a loop is run, its mark in the documentation, its type and name, and what it makes of a payload.
LOOPS = {
    "python": ([sys.executable], "worker:loop", "image.resize", "resizer-1", {"ok": True}),
    "shell": (["sh"], "worker:shell", "words.count", "words-1", {"words": 6}),
    "node": (["node"], "worker:node", "words.count", "words-1", {"words": 6}),
}
NEEDS = {"python": (), "shell": ("sh", "curl", "jq"), "node": ("node",)}


@pytest.fixture(scope="module", params=["shared token", "issued key"])
def gate(request: pytest.FixtureRequest, live_for_all: Any) -> tuple[str, Callable[[str], str]]:
    """Return the address of a gate, and what gives a worker its credential."""
    def credential(name: str) -> str:
        if request.param == "shared token":
            return TOKEN
        with Http(live_for_all.url, TOKEN) as admin:
            issued = admin.call("issue_key", name=name, principal_kind="worker", principal_id=name)
        key: str = issued["api_key"]
        return key
    return live_for_all.url, credential


@pytest.fixture(params=LOOPS)
def working(request: pytest.FixtureRequest, gate: Any, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """Run a loop; return the type that it takes and what it makes of a payload."""
    program, mark, kind, name, result = LOOPS[request.param]
    if missing := [tool for tool in NEEDS[request.param] if not shutil.which(tool)]:
        pytest.skip(f"{', '.join(missing)} is not installed: the loop in {request.param} does not run")
    [shown] = blocks("python", "sh", "js", mark=mark)
    (tmp_path / "loop.mjs").write_text(shown.text)
    url, credential = gate
    surroundings = {**os.environ, "ASYNCGATE_URL": url, "ASYNCGATE_API_KEY": credential(name), "TMPDIR": str(tmp_path)}
    loop = subprocess.Popen([*program, str(tmp_path / "loop.mjs")], env=surroundings, start_new_session=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    yield kind, result
    os.killpg(loop.pid, 15)
    output = loop.communicate()[1]
    assert "Traceback" not in output
    assert "returned error" not in output     # of curl; one that is killed before it has read its answer says nothing


def test_a_loop_of_the_documentation_does_one_task_after_another(working: Any, gate: Any) -> None:
    kind, result = working

    with Http(gate[0], TOKEN) as agent:
        for _ in range(3):
            made = agent.call("create_task", type=kind, payload="to be or not\nto be", agent_id="ada",
                              result_delivery="inline")
            for _ in range(3000):
                done = agent.call("get_task", task_id=made["task_id"], wait_seconds=30)
                if done["status"] in ("succeeded", "failed"):
                    break

            assert (done["status"], done["result"]["result"]) == ("succeeded", result)
            assert done["obligation_open"] is False


def test_a_shell_that_is_told_to_stop_drops_no_task(gate: Any, tmp_path: Path) -> None:
    """A shell learns of SIGTERM when its claim has ended, and that claim may have brought a task."""
    if missing := [tool for tool in NEEDS["shell"] if not shutil.which(tool)]:
        pytest.skip(f"{', '.join(missing)} is not installed: the loop in shell does not run")
    [shown] = blocks("sh", mark="worker:shell")
    url, credential = gate
    (tmp_path / "words.sh").write_text(shown.text.replace("words-1", "words-2").replace("words.count", "words.stop"))
    os.mkfifo(claims := tmp_path / "claims")
    (tmp_path / "curl").write_text(f'#!/bin/sh\necho "$@" >"{claims}"\nexec {shutil.which("curl")} "$@"\n')
    (tmp_path / "curl").chmod(0o755)
    surroundings = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ASYNCGATE_URL": url,
                    "ASYNCGATE_API_KEY": credential("words-2"), "TMPDIR": str(tmp_path)}

    with (Http(url, TOKEN) as agent, subprocess.Popen(["sh", str(tmp_path / "words.sh")], env=surroundings) as loop):
        assert "/v1/leases/claim" in claims.read_text()     # the shell waits for its first claim
        claims.unlink()
        loop.send_signal(signal.SIGTERM)
        last = agent.call("create_task", type="words.stop", payload="a b", agent_id="ada")["task_id"]
        loop.wait()

        assert agent.call("get_task", task_id=last)["status"] == "succeeded"


class Loop:
    """A loop of the documentation whose work takes long the first time, and the gate that it works for."""

    # The line in which the work is done, and what makes it wait where a file is not there yet.
    SLOW = {"shell": ("words=$(", '[ -e "$TMPDIR/once" ] || { touch "$TMPDIR/once"; sleep 600; }\n    words=$('),
            "node": ("  return { words:", """  const { existsSync, writeFileSync } = await import("node:fs");
  const once = process.env.TMPDIR + "/once";
  if (!existsSync(once)) {
    writeFileSync(once, "");
    await pause(600_000, null, { signal }).finally(() => writeFileSync(process.env.TMPDIR + "/awake", ""));
  }
  return { words:""")}

    def __init__(self, name: str, gate: Any, folder: Path, **changes: str) -> None:
        if missing := [tool for tool in NEEDS[name] if not shutil.which(tool)]:
            pytest.skip(f"{', '.join(missing)} is not installed: the loop in {name} does not run")
        program, mark, *_ = LOOPS[name]
        [shown] = blocks("sh", "js", mark=mark)
        text = shown.text
        for old, new in [self.SLOW[name], *changes.items()]:
            assert old in text
            text = text.replace(old, new)
        (folder / "loop.mjs").write_text(text)
        self.command, self.folder, self.agent = [*program, str(folder / "loop.mjs")], folder, gate
        self.surroundings = {**os.environ, "ASYNCGATE_URL": gate.url, "ASYNCGATE_API_KEY": TOKEN, "TMPDIR": str(folder)}
        self.processes: list[subprocess.Popen[Any]] = []

    def start(self) -> subprocess.Popen[Any]:
        """Start the loop in a process group of its own."""
        self.processes.append(subprocess.Popen(self.command, env=self.surroundings, start_new_session=True))
        return self.processes[-1]

    def create(self, **more: Any) -> str:
        """Create a task, and wait until its work has begun."""
        made = self.agent.call("create_task", type="words.count", payload="a b", agent_id="ada",
                               result_delivery="inline", **more)
        self.await_file("once")
        return str(made["task_id"])

    def await_file(self, name: str) -> None:
        """Wait until the work has left a file."""
        until = time.monotonic() + PATIENCE_SECONDS
        while not (self.folder / name).exists():
            assert time.monotonic() < until
            threading.Event().wait(0.02)

    def end(self) -> None:
        """End what still runs."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def slow_loop(start: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Loop]]:
    """Return what makes a loop that is slow the first time."""
    with contextlib.ExitStack() as stack:
        agent = stack.enter_context(Http(start("expiry_jitter_seconds=0").url, TOKEN))

        def make(name: str, **changes: str) -> Loop:
            loop = Loop(name, agent, tmp_path, **changes)
            stack.callback(loop.end)
            return loop
        yield make


@pytest.mark.parametrize("name", ["shell", "node"])
def test_a_loop_that_is_killed_leaves_its_task_to_the_next_one(slow_loop: Callable[..., Loop], name: str) -> None:
    loop = slow_loop(name, **({"lease_ttl_seconds: 30": "lease_ttl_seconds: 5"} if name == "node" else {}))
    killed = loop.start()
    task_id = loop.create(timeouts={"lease_ttl_seconds": 5})
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()

    loop.start()
    while (task := loop.agent.call("get_task", task_id=task_id, wait_seconds=30))["status"] != "succeeded":
        pass

    assert task["result"]["result"] == {"words": 2}
    assert task["expiries"] >= 1


def test_the_loop_of_javascript_stops_its_work_when_the_task_is_canceled(slow_loop: Callable[..., Loop]) -> None:
    loop = slow_loop("node")
    loop.start()
    task_id = loop.create()
    loop.agent.call("cancel_task", task_id=task_id)

    loop.await_file("awake")        # a renewal would come after ten seconds, the work by itself after ten minutes
    other = loop.create()
    while (task := loop.agent.call("get_task", task_id=other, wait_seconds=30))["status"] != "succeeded":
        pass
    assert task["result"]["result"] == {"words": 2}


def test_the_loop_of_javascript_gives_back_what_does_not_end_in_time(slow_loop: Callable[..., Loop]) -> None:
    loop = slow_loop("node", **{"20_000": "200"})
    process = loop.start()
    task_id = loop.create()
    process.terminate()

    assert process.wait(PATIENCE_SECONDS) == 0
    task = loop.agent.call("get_task", task_id=task_id)
    assert (task["status"], task["attempt"], task["expiries"]) == ("queued", 0, 0)


def test_the_loop_of_javascript_that_waits_for_tasks_ends_at_once(slow_loop: Callable[..., Loop]) -> None:
    loop = slow_loop("node", **{"wait_seconds: 25": "wait_seconds: 0.01"})
    process = loop.start()
    (loop.folder / "once").touch()
    task_id = loop.create()
    while loop.agent.call("get_task", task_id=task_id, wait_seconds=30)["status"] != "succeeded":
        pass
    process.terminate()

    assert process.wait(PATIENCE_SECONDS) == 0
