"""MCP clients that nobody here wrote: the Inspector, two of TypeScript, and fastmcp; test_mcp.py has the SDK's own.

Each lists the tools, which it also validates, tells the story of a task from its creation to its end, and gets a
refusal in words that a model can act on.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients.http import Http
from asyncgate.parts.operations import OPERATIONS
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

TOKEN = "a-token-for-tests"
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parents[1].joinpath("support", "mcp_client.js")
NAMES = sorted(f"asyncgate.{name}" for name in OPERATIONS)
VERSIONS = {"legacy": "2025-11-25", "modern": "2026-07-28", "auto": "2026-07-28"}
NEW = {"type": "demo", "agent_id": "ada", "payload": {"word": "zwölf"}}
OUTCOME = {"result": {"count": 12}, "artifacts": [{"uri": "file:///x"}]}


def is_told(result: Any, code: str) -> bool:
    """Whether a refusal says what it is and what to do, and has nothing that a client would hold against a schema."""
    (content,) = result["content"]
    told = json.loads(content["text"])
    assert result["isError"] is True
    assert "structuredContent" not in result
    assert result["_meta"]["asyncgate/error"]["code"] == told["error"]
    return bool(told["error"] == code and told["message"])


def is_the_outcome(task: dict[str, Any]) -> bool:
    return (task["status"], task["payload"], task["result"]["result"]) == ("succeeded", NEW["payload"], {"count": 12})


class Inspector:
    """The Inspector's command line at one gate, in one era."""

    def __init__(self, node: Any, url: str, era: str) -> None:
        self.node = node
        self.at = ["--cli", "--server-url", f"{url}/mcp?tools=all", "--transport", "http", "--protocol-era", era,
                   "--header", f"Authorization: Bearer {TOKEN}", "--format", "json",
                   "--connect-timeout", f"{PATIENCE_SECONDS * 1000:.0f}"]

    def run(self, method: str, *options: str) -> tuple[int, dict[str, Any], str]:
        """Return its status, the result and what it complains of."""
        ran = self.node.run("mcp-inspector", *self.at, "--method", method, *options)
        result: dict[str, Any] = json.loads(ran.stdout)["result"] if ran.stdout else {}
        return ran.returncode, result, ran.stderr

    def call(self, operation: str, **fields: Any) -> tuple[int, dict[str, Any], str]:
        """Call a tool."""
        options = ("--tool-name", f"asyncgate.{operation}", "--tool-args-json", json.dumps(fields))
        return self.run("tools/call", *options)

    def said(self, operation: str, **fields: Any) -> Any:
        """Call a tool and return what it says."""
        status, result, complaint = self.call(operation, **fields)
        assert status == 0, complaint
        return result["structuredContent"]


@pytest.fixture(params=["legacy", "modern"])
def inspector(request: pytest.FixtureRequest, node: Any, live: Any) -> Inspector:
    return Inspector(node, live.url, request.param)


def test_the_inspector_finds_no_error_in_the_tools(inspector: Inspector) -> None:
    status, result, complaint = inspector.run("tools/list", "--strict")

    assert status == 0, complaint
    assert [tool["name"] for tool in result["tools"]] == NAMES


def test_the_inspector_takes_a_task_from_its_creation_to_its_end(inspector: Inspector) -> None:
    made = inspector.said("create_task", **NEW)
    (offer,) = inspector.said("lease_next", worker_id="w1")["tasks"]
    held = {"task_id": offer["task_id"], "lease_id": offer["lease_id"], "worker_id": "w1"}
    inspector.said("complete", **held, **OUTCOME)

    assert is_the_outcome(inspector.said("get_task", task_id=made["task_id"]))


def test_the_inspector_shows_a_refusal(inspector: Inspector) -> None:
    status, result, _ = inspector.call("get_task", task_id="nobody")

    assert status == 5      # the tool said no; 1 would be an error of the protocol
    assert is_told(result, "task_not_found")


def test_the_inspector_waits_for_the_end_of_a_task_by_its_handle(node: Any, live: Any) -> None:
    inspector = Inspector(node, live.url, "modern")

    with ThreadPoolExecutor(1) as aside, Http(live.url, TOKEN) as worker:
        waiting = aside.submit(inspector.call, "run_task", **NEW, wait_seconds=0)
        (offer,) = worker.call("lease_next", worker_id="w1", wait_seconds=20)["tasks"]
        shown = worker.call("get_task", task_id=offer["task_id"])
        assert (shown["status"], waiting.done()) == ("leased", False)
        worker.call("complete", task_id=offer["task_id"], lease_id=offer["lease_id"], worker_id="w1", **OUTCOME)
        status, result, complaint = waiting.result()

    assert status == 0, complaint
    assert is_the_outcome(result["structuredContent"])


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_the_inspector_works_over_standard_input_and_output(node: Any, live: Any, era: str) -> None:
    bridge = [sys.executable, "-m", "asyncgate", "mcp", "--url", live.url, "--token", TOKEN, "--tools", "all"]
    ran = node.run("mcp-inspector", "--cli", "--protocol-era", era, "--method", "tools/list", "--format", "json",
                   "-e", f"PYTHONPATH={ROOT}", "--", *bridge)

    assert ran.returncode == 0, ran.stderr
    assert [tool["name"] for tool in json.loads(ran.stdout)["result"]["tools"]] == NAMES


@pytest.mark.parametrize(("generation", "era"), [("v1", "legacy"), ("v2", "legacy"), ("v2", "auto")])
def test_a_typescript_client_takes_a_task_from_its_creation_to_its_end(
        node: Any, live: Any, generation: str, era: str) -> None:
    ran = node.run("node", "--input-type=module", "-", generation, era, f"{live.url}/mcp?tools=all", TOKEN,
                   input=SCRIPT.read_text(encoding="utf-8"))

    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert (told["version"], told["tools"]) == (VERSIONS[era], NAMES)
    assert is_the_outcome(told["task"])
    assert is_told(told["late"], "lease_invalid_or_expired")


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_fastmcp_takes_a_task_from_its_creation_to_its_end(live: Any, mode: str) -> None:
    fastmcp, transports = [pytest.importorskip(name) for name in ("fastmcp", "fastmcp.client.transports")]
    transport = transports.StreamableHttpTransport(f"{live.url}/mcp?tools=all",
                                                   headers={"authorization": f"Bearer {TOKEN}"})

    async with fastmcp.Client(transport, mode=mode) as client:
        tools = await client.list_tools()
        made = await client.call_tool("asyncgate.create_task", NEW)
        leased = await client.call_tool("asyncgate.lease_next", {"worker_id": "w1"})
        (offer,) = leased.structured_content["tasks"]
        held = {"task_id": offer["task_id"], "lease_id": offer["lease_id"], "worker_id": "w1"}
        await client.call_tool("asyncgate.complete", {**held, **OUTCOME})
        task = await client.call_tool("asyncgate.get_task", {"task_id": made.structured_content["task_id"]})
        late = await client.call_tool("asyncgate.renew_lease", held, raise_on_error=False)

    assert [tool.name for tool in tools] == NAMES
    assert is_the_outcome(task.structured_content)
    assert is_told({"isError": late.is_error, "_meta": late.meta, "content": [{"text": late.content[0].text}]},
                   "lease_invalid_or_expired")
