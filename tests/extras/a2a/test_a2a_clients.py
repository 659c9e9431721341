"""Clients of other makers, each a program of about 20 statements, with a kill -9 of gate and worker in the middle."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients.http import AsyncHttp
from tests.conftest import TOKEN, Live, Node, install_beside, tools_of_npm
from tests.extras.a2a.conftest import Programs, begun, looks
from tests.support.patience import PATIENCE_SECONDS
from tests.support.receiver import Receiver

pytestmark = pytest.mark.anyio
SUPPORT = Path(__file__).parents[2] / "support"


@pytest.fixture(scope="session")
def js_sdk(tmp_path_factory: pytest.TempPathFactory, tools_cache: Path) -> Node:
    """Return what npm has of A2A."""
    return Node(Node.install(tools_of_npm(tools_cache), ("@a2a-js/sdk@1.3.0",)), tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def old_sdk(tools_cache: Path) -> Path:
    """Return a folder with the last SDK of 0.3."""
    return install_beside(tools_cache, "a2a-sdk-0.3", "a2a-sdk==0.3.26")


def find_task(posted: dict[str, Any]) -> Any:
    """Return the task that is posted, at its end, or by 0.3 each time."""
    return posted.get("task", posted if posted.get("kind") == "task" else None)


async def posted(receiver: Receiver) -> None:
    """Wait until the end of the slow task is posted."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        await receiver.until(lambda: any("SLOW" in json.dumps(find_task(came.said)) for came in receiver.taken))


async def run(programs: Programs, receiver: Receiver, command: list[str], environment: dict[str, str]) -> Any:
    """Run a client beside a worker; return what it has seen."""
    programs.work()
    try:
        seen = await converse(programs, command, environment)
        await posted(receiver)
        return seen
    finally:
        programs.kill_worker()


async def converse(programs: Programs, command: list[str], environment: dict[str, str]) -> Any:
    """Run a client; kill gate and worker where it wants that; return what it has seen."""
    client = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert client.stdin
    assert client.stdout
    assert client.stderr
    seen: dict[str, Any] = {}
    while line := await client.stdout.readline():
        seen = json.loads(line)
        if "kill" in seen:
            await begun(programs)
            await pushes(programs)
            programs.kill_worker()
            await asyncio.to_thread(programs.kill_gate)
            programs.work()
            client.stdin.write(b"killed\n")
        if "go" in seen:
            programs.go()
    assert await client.wait() == 0, (await client.stderr.read()).decode()
    return seen


async def pushes(programs: Programs) -> None:
    """Wait until the slow task has its push configuration; a gate that dies before that has not answered the client."""
    async with AsyncHttp(programs.gate.url, TOKEN) as gate:
        tasks = (await gate.call("list_tasks", type="scan", limit=100))["tasks"]
        [slow] = [task["task_id"] for task in tasks if task["payload"]["text"] == "slow"]
        async for _ in looks():
            if (await gate.call("list_task_webhooks", task_id=slow))["webhooks"]:
                return


@pytest.mark.parametrize(("binding", "kind"), [("JSONRPC", "sqlite"), ("HTTP+JSON", "postgres")])
async def test_the_javascript_sdk_sends_asks_streams_is_pushed_and_comes_back(
        binding: str, kind: str, js_sdk: Node, start: Callable[..., Live], tmp_path: Path, fresh: Any) -> None:
    programs = Programs(start, tmp_path, await fresh(kind))
    async with Receiver() as receiver:
        seen = await run(programs, receiver, [
            "node", str(SUPPORT / "a2a_client.mjs"), str(js_sdk.folder / "node_modules" / "@a2a-js" / "sdk"),
            f"{programs.gate.url}/a2a/scan", binding, TOKEN, receiver.url], js_sdk.environment)

    check(seen, receiver)
    assert seen["listed"] == [seen["asking"]["id"], seen["read"]["id"]]
    assert seen["errors"] == ["TaskNotFoundError", "TaskNotCancelableError", "UnsupportedOperationError",
                              "TaskNotFoundError"]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a2a_sdk_0_3_sends_asks_streams_is_pushed_and_comes_back(
        kind: str, old_sdk: Path, start: Callable[..., Live], tmp_path: Path, fresh: Any) -> None:
    programs = Programs(start, tmp_path, await fresh(kind))
    async with Receiver() as receiver:
        seen = await run(programs, receiver, [
            sys.executable, str(SUPPORT / "a2a_old_client.py"), f"{programs.gate.url}/a2a/scan", TOKEN, receiver.url],
            {**os.environ, "PYTHONPATH": str(old_sdk)})

    check(seen, receiver)
    assert seen["errors"] == [-32001, -32002, -32004, -32001]


def check(seen: dict[str, Any], receiver: Receiver) -> None:
    """Check what each client sees, and what was posted."""
    states = {name: seen[name]["state"] for name in ("read", "asking", "answered", "failed", "gone", "late", "done")}
    assert states == {"read": "completed", "asking": "input-required", "answered": "completed", "failed": "failed",
                      "gone": "canceled", "late": "completed", "done": "completed"}
    assert [seen[name]["gave"] for name in ("read", "answered", "late", "done")] == [
        ["READ"], ["page 7"], ["page 9"], ["SLOW"]]
    assert (seen["name"], seen["asking"]["says"], seen["failed"]["says"]) == ("scan", "Which page?", "no paper")
    assert (seen["read"]["context"], seen["history"], seen["configs"]) == ("talk-1", ["read"], ["c-1"])
    assert (seen["streamed"][0], seen["streamed"][-2:]) == ("submitted", ["READ", "completed"])
    assert seen["asked"][-1] == "input-required"
    assert seen["rest"][-2:] == ["SLOW", "completed"]
    ends = [find_task(came.said) for came in receiver.taken if find_task(came.said)]
    assert ends[-1]["status"]["state"].removeprefix("TASK_STATE_").lower() == "completed"
    assert {task["id"] for task in ends} == {seen["done"]["id"]}
    assert {came.headers["authorization"] for came in receiver.taken} == {"Bearer s3cr3t"}


# Frameworks.  They are large, so they are installed where this names them, as `adk,microsoft,strands`.
FRAMEWORKS = "ASYNCGATE_TEST_A2A_FRAMEWORKS"
PACKAGES = {"adk": "google-adk[a2a]==2.13.0", "microsoft": "agent-framework-a2a==1.0.0b261022",
            "strands": "strands-agents[a2a]==1.62.0"}


# What stands in the answer to each statement of the story, and which tasks there are at its end.
SEEN = {
    "card": "scan", "read": "READ", "again": "READ IT", "umlauts": "LIES ÜBER ☃", "streamed": "page 1; page 2; page 3;",
    "data": "pages", "asking": "Which page?", "answered": "page 7", "failed": "no paper", "rejected": "not my job",
    "left": "LEFT", "right": "RIGHT", "once": "ONCE ONCE", "conflict": "another message before", "got": "True",
    "listed": "True", "history": "ask me", "canceled": "TASK_STATE_CANCELED", "stranger": "401", "foreign": "no task",
    "waiting": "Which page?", "late": "page 9", "back": "SLOW", "after": "READ MORE"}
MADE = {"read": "succeeded", "read it": "succeeded", "lies über ☃": "succeeded", "print": "succeeded",
        "ask": "succeeded", "fail": "failed", "reject": "failed", "left": "succeeded", "right": "succeeded",
        "once": "succeeded", "ask later": "succeeded", "slow": "succeeded", "read more": "succeeded"}
ENDED = ("succeeded", "failed", "canceled")
EXTRA = [("data", "data", "succeeded"), ("got", "ask me", "canceled"), ("foreign", "ask mine", "succeeded")]


def test_the_documentation_tells_what_each_framework_says_and_what_it_cannot() -> None:
    tree = ast.parse((SUPPORT / "a2a_frameworks.py").read_text())
    cannot = {each.name: ast.literal_eval(line.value) for each in tree.body if isinstance(each, ast.ClassDef)
              for line in each.body if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "cannot"}
    text = (SUPPORT.parents[1] / "docs" / "a2a.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    marks = {row[0].strip("`"): row[1:4] for row in rows if row[0].strip("`") in SEEN}
    reasons = text.partition("The reasons for the dashes")[2]

    assert marks.keys() == SEEN.keys()
    assert {name: {statement for statement, row in marks.items() if row[column] == "–"}
            for column, name in enumerate(cannot)} == cannot
    assert {cell for row in marks.values() for cell in row} == {"yes", "–"}
    assert all(f"`{statement}`" in reasons for names in cannot.values() for statement in names)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("framework", PACKAGES)
async def test_an_agent_of_a_framework_loses_doubles_and_blocks_nothing(
        framework: str, kind: str, tools_cache: Path, start: Callable[..., Live], tmp_path: Path, fresh: Any) -> None:
    if framework not in os.environ.get(FRAMEWORKS, "").split(","):
        pytest.skip(f"{PACKAGES[framework]} is installed only where {FRAMEWORKS} names {framework}: it takes a minute")
    folder = install_beside(tools_cache, f"a2a-{framework}", PACKAGES[framework])
    programs = Programs(start, tmp_path, await fresh(kind))
    async with AsyncHttp(programs.gate.url, TOKEN) as gate, Receiver() as receiver:
        other = await gate.call("issue_key", name="other", role="agent", scopes=["tasks:write", "tasks:read"],
                                principal_kind="agent", principal_id="other")
        programs.work()
        try:
            told = await converse(programs, [
                sys.executable, str(SUPPORT / "a2a_frameworks.py"), framework, f"{programs.gate.url}/a2a/scan", TOKEN,
                other["api_key"], receiver.url], {**os.environ, "PYTHONPATH": str(folder)})
            tasks = await end_all(programs)
            await posted(receiver)
        finally:
            programs.kill_worker()

    seen, cannot = told["seen"], set(told["cannot"])
    assert (seen.keys() | cannot, seen.keys() & cannot) == (SEEN.keys(), set())
    wrong = {name: seen[name] for name, words in SEEN.items() if name in seen and words not in str(seen[name])}

    assert wrong == {}
    made = {**MADE, **{words: status for name, words, status in EXTRA if name not in cannot}}
    assert sorted((task["payload"]["text"], task["status"]) for task in tasks) == sorted(made.items())
    contexts = {task["payload"]["text"]: task["created_by"]["instance_id"] for task in tasks}
    assert contexts["left"] != contexts["right"]
    assert (contexts["read"] == contexts["read it"]) == ("answered" not in cannot)
    assert {came.headers["authorization"] for came in receiver.taken} == {"Bearer s3cr3t"}
    ends = [find_task(came.said) for came in receiver.taken if find_task(came.said)]
    assert {task["id"] for task in ends} == {task["task_id"] for task in tasks if task["payload"]["text"] == "slow"}


async def end_all(programs: Programs) -> list[dict[str, Any]]:
    """Answer what the framework cannot, and return the tasks when all have ended."""
    async with AsyncHttp(programs.gate.url, TOKEN) as gate:
        async for _ in looks():
            tasks: list[dict[str, Any]] = (await gate.call("list_tasks", type="scan", limit=100))["tasks"]
            going_on = [task["task_id"] for task in tasks if task["status"] not in ENDED]
            if not going_on:
                return tasks
            for task_id in going_on:
                for question in (await gate.call("list_inputs", task_id=task_id))["inputs"]:
                    if question["state"] == "open":
                        await gate.call("answer_input", principal_kind="agent", principal_id="a2a", task_id=task_id,
                                        key=question["key"], action="accept", content={"text": "1"})
    raise AssertionError
