"""What a host of a model is told that asks for permission: by a client of the official SDK, over standard input."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from mcp.client.stdio import StdioServerParameters, stdio_client

from asyncgate.clients.http import AsyncHttp
from tests.support import scripted_claude
from tests.support.patience import PATIENCE_SECONDS, patient_mcp_client
from tests.support.programs import anyio_backend

__all__ = ["anyio_backend"]
pytestmark = pytest.mark.anyio
claude, claude_sdk, model = scripted_claude.claude, scripted_claude.claude_sdk, scripted_claude.model
TOKEN = "a-token-for-tests"
BOSS = {"principal_kind": "human", "principal_id": "boss"}
GIVEN = {"command": "git push", "description": "publish"}


@pytest.fixture
async def gate(live: Any) -> AsyncIterator[AsyncHttp]:
    """A client of a gate."""
    async with asyncio.timeout(PATIENCE_SECONDS), AsyncHttp(live.url, TOKEN) as gate:
        yield gate


async def lease(gate: AsyncHttp) -> dict[str, str]:
    """Return the surroundings of a program that works on a task."""
    await gate.call("create_task", type="t", payload=None, agent_id="ada")
    (offer,) = (await gate.call("lease_next", worker_id="w1"))["tasks"]
    return {**os.environ, "ASYNCGATE_URL": gate.url, "ASYNCGATE_API_KEY": TOKEN, "ASYNCGATE_WORKER_ID": "w1",
            "ASYNCGATE_TASK_ID": offer["task_id"], "ASYNCGATE_LEASE_ID": offer["lease_id"]}


async def ask(around: dict[str, str], given: Any, tool: str = "Bash") -> Any:
    """Ask as a host does; return what it is told."""
    command = ["-m", "asyncgate", "permission-prompt", "--to", "human:boss"]
    async with patient_mcp_client()(stdio_client(StdioServerParameters(
            command=sys.executable, args=command, env=around)), mode="legacy") as client:
        assert [listed.name for listed in (await client.list_tools()).tools] == ["approve"]
        result = await client.call_tool("approve", {"tool_name": tool, "input": given, "tool_use_id": "toolu_1"})
    (text,) = result.content
    return json.loads(text.text)


async def answer(gate: AsyncHttp, action: str, content: Any = None) -> str:
    """Answer the next question as the boss; return what was asked."""
    while not (owed := (await gate.call("list_open_obligations", **BOSS, wait_seconds=30))["open_obligations"]):
        continue
    asked = owed[0]["body"]
    told = {"task_id": owed[0]["task_id"], "key": asked["key"], "action": action, "content": content}
    await gate.call("answer_input", **BOSS, **told)
    return str(asked["message"])


@pytest.mark.parametrize(("action", "content", "told"), [
    ("accept", {}, {"behavior": "allow", "updatedInput": GIVEN}),
    ("decline", {"reason": "not today"}, {"behavior": "deny", "message": "declined by human boss: not today"}),
    ("decline", None, {"behavior": "deny", "message": "declined by human boss"}),
    ("cancel", None, {"behavior": "deny", "message": "nobody has decided"})])
async def test_a_host_is_told_what_somebody_has_answered(
        gate: AsyncHttp, action: str, content: Any, told: dict[str, Any]) -> None:
    around = await lease(gate)
    asking = asyncio.create_task(ask(around, GIVEN))

    asked = await answer(gate, action, content)

    assert await asking == told
    assert "Bash" in asked
    assert '"command": "git push"' in asked
    task = await gate.call("get_task", task_id=around["ASYNCGATE_TASK_ID"])
    assert (task["status"], task["held"]) == ("running" if task["started_at"] else "leased", None)


async def test_a_host_that_was_started_again_gets_the_answer_of_before(gate: AsyncHttp) -> None:
    around = await lease(gate)
    asking = asyncio.create_task(ask(around, GIVEN))
    await answer(gate, "accept", {})

    assert await ask(around, GIVEN) == await asking


async def test_what_nobody_can_be_shown_or_asked_is_denied(gate: AsyncHttp) -> None:
    around = await lease(gate)

    long = await ask(around, {"content": "x" * 20_000}, "Write")
    lost = await ask({**around, "ASYNCGATE_LEASE_ID": "another"}, GIVEN)

    assert [told["behavior"] for told in (long, lost)] == ["deny", "deny"]
    assert "smaller" in long["message"]
    assert "lease" in lost["message"]


# The real program, with a model that always wants the same.


@pytest.mark.parametrize("action", ["accept", "decline"])
async def test_claude_code_calls_a_tool_only_if_somebody_has_said_so_at_the_gate(
        gate: AsyncHttp, claude: str, model: scripted_claude.Script, tmp_path: Path, action: str) -> None:
    around, home, made = await lease(gate), tmp_path / "home", tmp_path / "made"
    home.mkdir()
    model.command = f"echo done > {made}"
    config = {"mcpServers": {"asyncgate": {"command": sys.executable, "args": [
        "-m", "asyncgate", "permission-prompt", "--to", "human:boss"],
        "env": {name: f"${{{name}}}" for name in around if name.startswith("ASYNCGATE_") or name == "PYTHONPATH"}}}}
    (tmp_path / "mcp.json").write_text(json.dumps(config))
    running = await asyncio.create_subprocess_exec(
        claude, "-p", "go on", "--output-format", "json", "--permission-prompt-tool", "mcp__asyncgate__approve",
        "--mcp-config", str(tmp_path / "mcp.json"), "--strict-mcp-config", cwd=home,
        env={**around, **model.surroundings(home)},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    telling = asyncio.create_task(running.communicate())

    answering = asyncio.create_task(answer(gate, action, {"reason": "not today"}))
    await asyncio.wait([telling, answering], return_when=asyncio.FIRST_COMPLETED)
    assert answering.done(), telling.result()
    out, _ = await telling

    assert made.exists() == (action == "accept")
    assert ("declined by human boss: not today" in out.decode()) == (action == "decline")
