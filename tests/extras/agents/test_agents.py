"""Agents of five frameworks as task functions, with scripted models: each is killed in the middle, and goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients.http import AsyncHttp
from asyncgate.extras.agents.approvals import ask_for_approval
from tests.support import hasty
from tests.support.filled_gate import Filled
from tests.support.hasty import TOKEN
from tests.support.pages import ROOT, blocks

pytestmark = pytest.mark.anyio
gate = hasty.gate
BOSS = {"principal_kind": "human", "principal_id": "boss"}
FRAMEWORKS = {"pydantic_ai": "pydantic_ai", "langgraph": "langgraph", "openai_agents": "agents",
              "langchain": "langchain", "smolagents": "smolagents"}
# What each program begins with: what happens is noted in a file, and the first process dies at one of its moments.
HEAD = """
import os, sys
from asyncgate.clients import Job, Worker

notes, dies_at = sys.argv[3], sys.argv[4]
CALLS, SAYS = [("build", {"number": 7}), ("deploy", {"version": "version-7"})], "it is {}"
# The first process dies, and its task waits for so long; the second one is to keep its lease on a slow machine.
worker = Worker(sys.argv[1], "w", token=sys.argv[2], state=None, ttl_seconds=30 if os.path.exists(notes) else 3)


def note(what):
    with open(notes, "a") as file:
        file.write(what + "\\n")
    if what == dies_at and open(notes).read().split().count(what) == 1:
        os.kill(os.getpid(), 9)
"""
# What each model says: `CALLS` one after another, then `SAYS` with what the last one gave.
MODELS = {"pydantic_ai": """
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import FunctionModel


def think(messages, info):
    told = [part.content for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
    note(f"model{len(told)}")
    calls = [ToolCallPart(name, given, tool_call_id=f"call_{len(told)}") for name, given in CALLS[len(told):][:1]]
    return ModelResponse(parts=calls or [TextPart(SAYS.format(told[-1]))])
""", "langgraph": "", "openai_agents": """
import json
from agents import Model, ModelResponse, Usage, set_tracing_disabled
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

set_tracing_disabled(True)


class Script(Model):
    async def get_response(self, system_instructions, input, *given, **more):
        told = [] if isinstance(input, str) else [
            item["output"] for item in input if item.get("type") == "function_call_output"]
        note(f"model{len(told)}")
        if len(told) < len(CALLS):
            name, arguments = CALLS[len(told)]
            output = ResponseFunctionToolCall(type="function_call", call_id=f"call_{len(told)}", name=name,
                                              arguments=json.dumps(arguments))
        else:
            text = ResponseOutputText(type="output_text", text=SAYS.format(told[-1]), annotations=[])
            output = ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=[text])
        return ModelResponse(output=[output], usage=Usage(), response_id=None)

    def stream_response(self, *given, **more):
        raise NotImplementedError
""", "langchain": """
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult


class Script(BaseChatModel):
    @property
    def _llm_type(self):
        return "script"

    def bind_tools(self, tools, **more):
        return self

    def _generate(self, messages, stop=None, run_manager=None, **more):
        told = [message.content for message in messages if isinstance(message, ToolMessage)]
        note(f"model{len(told)}")
        calls = [{"name": name, "args": given, "id": f"call_{len(told)}"} for name, given in CALLS[len(told):][:1]]
        answer = AIMessage("" if calls else SAYS.format(told[-1]), tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=answer)])
""", "smolagents": """
from smolagents import ChatMessage, MessageRole, Model


class Script(Model):
    def generate(self, messages, **more):
        told = [part["text"].removeprefix("Observation:").strip() for message in messages
                if message.role == MessageRole.TOOL_RESPONSE for part in message.content]
        note(f"model{len(told)}")
        last = ("final_answer", {"answer": SAYS.format(told[-1] if told else "")})
        name, given = [*CALLS, last][len(told)]
        return ChatMessage(MessageRole.ASSISTANT, "", [
            {"id": f"call_{len(told)}", "type": "function", "function": {"name": name, "arguments": given}}])
"""}
PROGRAMS = {"pydantic_ai": """
from pydantic_ai import Agent
from pydantic_ai.capabilities.request_input import RequestInput
from asyncgate.extras.agents.pydantic_ai import AskAtGate, AsyncGateDurability, durable

agent = Agent(FunctionModel(think), name="clerk",
              capabilities=[AsyncGateDurability(), RequestInput(AskAtGate("human:boss"))])


@agent.tool_plain
def build(number: int) -> str:
    note("build")
    return f"version-{number}"


@agent.tool_plain(requires_approval=True)
def deploy(version: str) -> str:
    note("deploy")
    return f"deployed: {version}"


@worker.task("t")
async def work(prompt: str, job: Job) -> str:
    with durable(job):
        return (await agent.run(prompt)).output

worker.run()
""", "langgraph": """
from typing import TypedDict
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt
from asyncgate.extras.agents.langgraph import open_saver, run_graph


class State(TypedDict, total=False):
    prompt: str
    version: str
    told: str


def build(state):
    note("build")
    return {"version": "version-7"}


def check(state):
    note("model1")
    return {}


def deploy(state):
    answer = interrupt({"message": f"May {state['version']} be deployed?"})
    if answer["action"] != "accept":
        return {"told": "it is not deployed"}
    note("deploy")
    return {"told": f"it is deployed: {state['version']}"}


builder = StateGraph(State)
for name, node, before in (("build", build, START), ("check", check, "build"), ("deploy", deploy, "check")):
    builder.add_node(name, node)
    builder.add_edge(before, name)
builder.add_edge("deploy", END)


@worker.task("t")
async def work(prompt: str, job: Job) -> str:
    graph = builder.compile(checkpointer=await open_saver(job))
    return (await run_graph(graph, {"prompt": prompt}, job, to="human:boss"))["told"]

worker.run()
""", "openai_agents": """
from agents import Agent, function_tool
from asyncgate.extras.agents.openai_agents import run_agent


@function_tool
def build(number: int) -> str:
    note("build")
    return f"version-{number}"


@function_tool(needs_approval=True)
def deploy(version: str) -> str:
    note("deploy")
    return f"deployed: {version}"


agent = Agent(name="clerk", model=Script(), tools=[build, deploy])


@worker.task("t")
async def work(prompt: str, job: Job) -> str:
    return await run_agent(agent, prompt, job, to="human:boss")

worker.run()
""", "langchain": """
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain.tools import tool
from asyncgate.extras.agents.langgraph import open_saver, run_graph


@tool
def build(number: int) -> str:
    "Build a version."
    note("build")
    return f"version-{number}"


@tool
def deploy(version: str) -> str:
    "Deploy a version."
    note("deploy")
    return f"deployed: {version}"


@worker.task("t")
async def work(prompt: str, job: Job) -> str:
    agent = create_agent(Script(), [build, deploy], checkpointer=await open_saver(job),
                         middleware=[HumanInTheLoopMiddleware({"deploy": True})])
    state = await run_graph(agent, {"messages": [{"role": "user", "content": prompt}]}, job, to="human:boss")
    return state["messages"][-1].content

worker.run()
""", "smolagents": """
from smolagents import ToolCallingAgent, tool
from asyncgate.extras.agents.smolagents import DurableModel, durable_tool


@tool
def build(number: int) -> str:
    '''Build a version.

    Args:
        number: which one
    '''
    note("build")
    return f"version-{number}"


@tool
def deploy(version: str) -> str:
    '''Deploy a version.

    Args:
        version: which one
    '''
    note("deploy")
    return f"deployed: {version}"


@worker.task("t")
def work(prompt: str, job: Job) -> str:
    tools = [durable_tool(build, job), durable_tool(deploy, job, to="human:boss")]
    agent = ToolCallingAgent(tools, DurableModel(Script(), job), max_tool_threads=1, verbosity_level=0)
    return str(agent.run(prompt))

worker.run()
"""}


@contextmanager
def child(framework: str, gate: AsyncHttp, notes: Path, dies_at: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker with an agent."""
    # A file, because smolagents reads the source of its tools.
    (program := notes.with_suffix(".py")).write_text(HEAD + MODELS[framework] + PROGRAMS[framework])
    with running(gate, str(program), gate.url, TOKEN, str(notes), dies_at) as process:
        yield process


@contextmanager
def running(gate: AsyncHttp | Filled, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of Python, with the gate in its surroundings."""
    around = {**os.environ, "PYTHONPATH": str(ROOT), "LANGSMITH_TRACING": "false", "ASYNCGATE_URL": gate.url,
              "ASYNCGATE_API_KEY": TOKEN}
    with subprocess.Popen([sys.executable, *command], env=around) as process:
        try:
            yield process
        finally:
            process.kill()


async def run(framework: str, gate: AsyncHttp, notes: Path, dies_at: str, action: str) -> tuple[str, Any]:
    """Let an agent work that dies at a moment, and answer it; return what it was asked, and its result."""
    if find_spec(FRAMEWORKS[framework]) is None:
        pytest.skip(f"{FRAMEWORKS[framework]} is not installed")
    made = await gate.call("create_task", type="t", payload="deploy it", agent_id="ada", max_attempts=1)
    asked = ""
    with child(framework, gate, notes, dies_at) as first:
        if dies_at != "deploy":
            assert await asyncio.to_thread(first.wait) == -signal.SIGKILL
        else:
            asked = await answer(gate, action)
            assert await asyncio.to_thread(first.wait) == -signal.SIGKILL
    with child(framework, gate, notes, dies_at):
        asked = asked or await answer(gate, action)
        task: dict[str, Any] = {"status": "queued"}
        while task["status"] not in ("succeeded", "failed"):
            task = await gate.call("get_task", task_id=made["task_id"], wait_seconds=30)
    return asked, task["result"].get("result", task["result"])


async def answer(gate: AsyncHttp, action: str) -> str:
    """Answer the next question as the boss; return what was asked."""
    while not (owed := (await gate.call("list_open_obligations", **BOSS, wait_seconds=30))["open_obligations"]):
        continue
    asked = owed[0]["body"]
    told = {"task_id": owed[0]["task_id"], "key": asked["key"], "action": action}
    await gate.call("answer_input", **BOSS, **told, content={"reason": "not today"})
    return str(asked["message"])


@pytest.mark.parametrize("framework", PROGRAMS)
@pytest.mark.parametrize(("dies_at", "gate"), [("model1", "sqlite"), ("deploy", "postgres")], indirect=["gate"])
async def test_an_agent_that_is_killed_goes_on_and_is_approved_in_another_process(
        framework: str, dies_at: str, gate: AsyncHttp, tmp_path: Path) -> None:
    asked, result = await run(framework, gate, tmp_path / "notes", dies_at, "accept")

    assert "version-7" in asked
    assert result == "it is deployed: version-7"
    done = Counter((tmp_path / "notes").read_text().split())
    # What was recorded is not done again; what was under way when the process died is. One step of the Agents SDK is a
    # whole turn.
    assert done["build"] == (2 if framework == "openai_agents" and dies_at == "model1" else 1)
    assert done[dies_at] == 2
    assert done["deploy"] == (2 if dies_at == "deploy" else 1)


@pytest.mark.parametrize("framework", PROGRAMS)
async def test_what_is_declined_is_not_done_and_the_agent_is_told_why(
        framework: str, gate: AsyncHttp, tmp_path: Path) -> None:
    _, result = await run(framework, gate, tmp_path / "notes", "build", "decline")

    assert "deploy" not in (tmp_path / "notes").read_text().split()
    assert ("it is not deployed" if framework == "langgraph" else "not today") in result


# The programs of the documentation, with a scripted model in the place of theirs.
QUIET = """
CALLS, SAYS = [("deploy", {"version": "v7"})], "{}"


def note(what):
    pass
"""
SCRIPTS = {"pydantic_ai": ("\"openai:gpt-5\"", "FunctionModel(think)"), "langgraph": ("", ""),
           "openai_agents": ("\"gpt-5\"", "Script()"), "langchain": ("\"openai:gpt-5\"", "Script()"),
           "smolagents": ("InferenceClientModel()", "Script()")}


def write_page(framework: str) -> str:
    """Return the program of the documentation, with its scripted model."""
    [block] = [block for block in blocks("python", mark="agent:run") if block.more == framework]
    return QUIET + MODELS[framework] + block.text.replace(*SCRIPTS[framework])


@pytest.mark.parametrize("framework", SCRIPTS)
async def test_a_program_of_the_documentation_waits_for_its_approval(
        framework: str, gate: AsyncHttp, tmp_path: Path) -> None:
    if find_spec(FRAMEWORKS[framework]) is None:
        pytest.skip(f"{FRAMEWORKS[framework]} is not installed")
    made = await gate.call("create_task", type="clerk", payload="v7", agent_id="ada")

    (program := tmp_path / "program.py").write_text(write_page(framework))
    with running(gate, str(program)):
        asked = await answer(gate, "accept")
        task = await gate.call("get_task", task_id=made["task_id"], wait_seconds=30)

    assert "v7" in asked
    assert task["result"]["result"] == "deployed: v7"


def test_nobody_is_asked_for_what_json_cannot_express() -> None:
    """The question would show null in its place."""
    with pytest.raises(ValueError, match=r"^pay\.euros is nan: JSON has no such number$"):
        ask_for_approval("1", "pay", {"euros": float("nan")}, "human:boss")
    pytest.importorskip("langgraph")
    from langgraph.types import Interrupt

    from asyncgate.extras.agents.langgraph import ask_interrupt
    with pytest.raises(ValueError, match=r"^interrupt\.euros is inf: JSON has no such number$"):
        ask_interrupt(Interrupt({"message": "pay?", "euros": float("inf")}, id="1"), None)
