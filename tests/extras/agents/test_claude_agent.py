"""An agent of the Claude Agent SDK as a task function: the real program, a scripted model, kills, approvals."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients.http import Http
from asyncgate.clients.worker.children import find_parents, is_of
from tests.conftest import TOKEN, Live
from tests.support import hasty, scripted_claude
from tests.support.pages import ROOT, blocks
from tests.support.patience import poll
from tests.support.scripted_claude import Script

claude_sdk, either, model = scripted_claude.claude_sdk, hasty.either, scripted_claude.model
BOSS = {"principal_kind": "human", "principal_id": "boss"}
ON_POSTGRES = pytest.mark.parametrize("either", ["postgres"], indirect=True)


class Agent:
    """The program of the documentation, a gate, and somebody who answers."""

    def __init__(self, live: Live, model: Script, sdk: Path, folder: Path, stack: ExitStack) -> None:
        self.live, self.model, self.folder, self.stack = live, model, folder, stack
        self.gate = stack.enter_context(Http(live.url, TOKEN))
        self.around = {**os.environ, **model.surroundings(folder), "PYTHONPATH": f"{ROOT}{os.pathsep}{sdk}",
                       "XDG_STATE_HOME": str(folder), "ASYNCGATE_URL": live.url, "ASYNCGATE_API_KEY": TOKEN}
        self.notes = folder / "notes"
        self.task_id: str = self.gate.call("create_task", type="clerk", payload="deploy it", agent_id="ada",
                                           max_attempts=1)["task_id"]

    def work(self, **more: str) -> subprocess.Popen[bytes]:
        """Start the worker, with other arguments of `run_agent`."""
        [page] = [block for block in blocks("python", mark="agent:run") if block.more == "claude_agent"]
        text = page.text.replace('["Read"]', more.pop("allowed_tools", '["Read"]'))
        given = "".join(f", {name}={value}" for name, value in more.items())
        return self.start(text.replace('to="human:boss"', f'to="human:boss"{given}'))

    def start(self, text: str) -> subprocess.Popen[bytes]:
        """Start a program."""
        (program := self.folder / "program.py").write_text(text)
        process = self.stack.enter_context(subprocess.Popen([sys.executable, program], env=self.around,
                                                            cwd=self.folder))
        self.stack.callback(process.kill)
        return process

    def asked(self) -> dict[str, Any]:
        """Return the next question."""
        while not (owed := self.gate.call("list_open_obligations", **BOSS, wait_seconds=30)["open_obligations"]):
            continue
        question: dict[str, Any] = owed[0]["body"]
        return question

    def answer(self, action: str = "accept") -> dict[str, Any]:
        """Answer the next question."""
        question = self.asked()
        self.gate.call("answer_input", **BOSS, task_id=self.task_id, key=question["key"], action=action,
                       content={"reason": "not today"})
        return question

    def task(self) -> dict[str, Any]:
        """Return the task."""
        task: dict[str, Any] = self.gate.call("get_task", task_id=self.task_id)
        return task

    def ended(self) -> dict[str, Any]:
        """Return the task when it has ended."""
        task: dict[str, Any] = {}
        while task.get("status") not in ("succeeded", "failed", "canceled"):
            task = self.gate.call("get_task", task_id=self.task_id, wait_seconds=30)
        return task

    def steps(self) -> list[str]:
        """Return the names of what was recorded."""
        return [step["name"] for step in self.gate.call("list_steps", task_id=self.task_id)["steps"]]

    def has_noted_call(self) -> bool:
        """Whether Claude Code has stored the call that it asks about, which it does beside asking."""
        return any("tool_use" in file.read_text() for file in (self.folder / ".claude" / "projects").rglob("*.jsonl"))

    def running(self) -> list[int]:
        """Return the processes that run for the task."""
        leases = self.gate.call("list_leases", worker_id="clerk-1", resume=False)["leases"]
        return [pid for pid in find_parents() if any(is_of(pid, lease["lease_id"]) for lease in leases)]


def command_of(pid: int) -> bytes:
    """Return the command line of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def children_of(worker: subprocess.Popen[bytes]) -> Iterator[int]:
    """Yield the processes that a worker has started and that have not ended."""
    for pid, parent in find_parents().items():
        if parent == worker.pid and command_of(pid):
            yield pid


def guardian_of(worker: subprocess.Popen[bytes]) -> int:
    """Return the process that kills what a killed worker has left."""
    [pid] = [pid for pid in children_of(worker) if b"children.py" in command_of(pid)]
    return pid


@pytest.fixture
def agent(either: Live, model: Script, claude_sdk: Path, tmp_path: Path) -> Iterator[Agent]:
    """An agent with a task that nobody works on yet."""
    with ExitStack() as stack:
        yield Agent(either, model, claude_sdk, tmp_path, stack)


def test_an_agent_that_is_killed_while_it_asks_goes_on_in_its_session_and_its_approval_is_used_once(
        agent: Agent) -> None:
    agent.model.command = f"echo done >> {agent.notes}"
    first = agent.work()
    question = agent.asked()
    poll(agent.has_noted_call)      # else there is no session to go on in
    left = agent.running()
    assert left
    first.send_signal(signal.SIGKILL)
    first.wait()
    poll(lambda: not {*left} & {*find_parents()})      # the program has not outlived its worker
    agent.work()
    poll(lambda: agent.model.cut_off == 1)
    agent.answer()
    task = agent.ended()

    assert task["status"] == "succeeded", task["result"]
    assert "echo done" in question["message"]
    assert agent.notes.read_text() == "done\n"
    assert agent.steps() == ["claude session", "claude call"]
    [_] = (agent.folder / ".claude" / "projects").rglob("*.jsonl")      # one session for both processes


@ON_POSTGRES
def test_a_command_dies_with_its_worker_and_runs_again_only_with_another_approval(agent: Agent) -> None:
    agent.model.command = (f"echo $ASYNCGATE_API_KEY >> {agent.notes}; "
                           f"test $(wc -l < {agent.notes}) = 2 || (setsid sleep 600; echo late >> {agent.notes})")
    first = agent.work()
    key = agent.answer()["key"]
    poll(agent.notes.exists)
    poll(lambda: len(left := agent.running()) >= 2 and any(b"sleep" in command_of(pid) for pid in left))
    left = agent.running()
    first.send_signal(signal.SIGKILL)
    first.wait()
    poll(lambda: not {*left} & {*find_parents()})
    agent.work()
    again = agent.answer()["key"]
    task = agent.ended()

    assert task["status"] == "succeeded", task["result"]
    assert key != again
    assert agent.notes.read_text() == "\n\n"        # two runs for two approvals, and none of them had the key
    assert agent.steps() == ["claude session", "claude call", "claude call"]


def test_a_session_that_has_waited_long_enough_ends_and_goes_on_with_the_answer(agent: Agent) -> None:
    agent.model.command = f"echo done >> {agent.notes}"
    worker = agent.work(keep_lease="0")
    poll(lambda: agent.task()["held"] == "input_required")
    poll(lambda: [*children_of(worker)] == [guardian_of(worker)])
    agent.answer()
    task = agent.ended()

    assert task["status"] == "succeeded", task["result"]
    assert agent.notes.read_text() == "done\n"
    # Claude Code may have been ended before it had noted its call; then the model makes the call again.
    assert agent.model.cut_off <= 1


def test_a_session_of_which_nothing_was_stored_is_begun_anew(agent: Agent) -> None:
    agent.model.command = f"echo done >> {agent.notes}"
    worker = agent.work(keep_lease="0")
    poll(lambda: agent.task()["held"] == "input_required")
    poll(lambda: [*children_of(worker)] == [guardian_of(worker)])
    shutil.rmtree(agent.folder / ".claude" / "projects", ignore_errors=True)    # a busy machine has stored nothing yet
    agent.answer()
    task = agent.ended()

    assert task["status"] == "succeeded", task["result"]
    assert agent.notes.read_text() == "done\n"


def test_what_is_declined_is_not_done_and_the_model_is_told_why(agent: Agent) -> None:
    agent.model.command = f"echo done >> {agent.notes}"
    agent.work()
    agent.answer("decline")

    assert "human boss has declined this call: not today" in agent.ended()["result"]["result"]
    assert not agent.notes.exists()


ASKING = """
import asyncio, json, re
from pathlib import Path

from claude_agent_sdk import ClaudeAgentOptions

from asyncgate.clients import Job, Worker
from asyncgate.clients.http import Http
from asyncgate.extras.agents.claude_agent import AgentRun

worker = Worker(worker_id="clerk-1")


@worker.task("clerk")
async def clerk(prompt: str, job: Job) -> None:
    run = AgentRun(job, ClaudeAgentOptions(), None, re.compile("Bash"), 60)
    call = {"session_id": "s", "tool_name": "Read", "tool_input": {}}
    decisions = [await run.decide(call, "toolu_1", None)]
    with Http(worker.gate.url, worker.gate.token) as gate:
        gate.call("cancel_task", task_id=job.task_id, agent_id="ada")
    asking = asyncio.ensure_future(run.decide(call, "toolu_2", None))      # it outlives the function
    asking.add_done_callback(lambda asked: Path("decisions").write_text(json.dumps([*decisions, asked.result()])))
    await asyncio.wait([asking])

worker.run()
"""


def test_without_a_lease_nothing_begins(agent: Agent) -> None:
    """Although the worker does not know it yet, and nobody has to approve the call."""
    decisions = agent.folder / "decisions"
    agent.start(ASKING)
    first, second = json.loads(poll(lambda: decisions.exists() and decisions.read_text()))

    assert first == {}
    assert second["hookSpecificOutput"]["permissionDecision"] == "deny"
    assert "canceled" in second["hookSpecificOutput"]["permissionDecisionReason"]


def test_a_program_that_has_outlived_its_worker_begins_nothing(agent: Agent) -> None:
    """As where there is no guardian, or somebody has killed it."""
    agent.model.command = f"echo done >> {agent.notes}"
    agent.model.may_answer.clear()
    first = agent.work(approve='"None"', allowed_tools='["Bash"]')
    left = poll(agent.running)
    poll(lambda: agent.model.asked)
    os.kill(guardian_of(first), signal.SIGKILL)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert {*left} & {*find_parents()}
    agent.model.may_answer.set()
    poll(lambda: not {*left} & {*find_parents()})

    assert not agent.notes.exists()
