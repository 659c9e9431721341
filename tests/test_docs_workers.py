"""The workers in other languages that the documentation shows do their work, with every kind of credential."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients.http import Http
from tests.support.pages import blocks

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
