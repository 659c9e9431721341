"""Each declared type is a tool of MCP: called with its payload it gives a durable task."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncgate.clients.http import Http
from tests.faces.test_mcp_tasks import Handle, state, taking

pytestmark = pytest.mark.anyio
TOKEN = "a-token-for-tests"
OCR = {"type": "object", "required": ["file"], "properties": {"file": {"type": "string"}, "dpi": {"$ref": "#/$defs/n"}},
       "$defs": {"n": {"type": "integer"}}}
STANDARD = [("accept", "application/json, text/event-stream"), ("content-type", "application/json")]


@pytest.fixture
async def served(serve: Any) -> Any:
    """Return a gate that waits for nothing."""
    return await serve(max_wait_seconds=0.01)


async def declare(served: Any, type: str = "ocr.scan", **more: Any) -> None:
    await served.post("/v1/types", {"type": type, "worker_id": "w1", "description": "Read a scanned page.", **more})


async def tools(served: Any, query: str = "tools=types", **more: Any) -> dict[str, Any]:
    answer = await served.post(f"/mcp?{query}", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, headers=STANDARD,
                               **more)
    return {tool["name"]: tool for tool in answer["result"]["tools"]}


async def call(served: Any, name: str, arguments: Any, query: str = "tools=types&agent_id=ada", **more: Any) -> Any:
    answer = await served.post(f"/mcp?{query}", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {
        "name": name, "arguments": arguments}}, headers=STANDARD, **more)
    return answer["result"] if "result" in answer else answer["error"]


async def test_a_declared_type_is_a_tool_with_its_own_schema_where_a_host_asks_for_types(served: Any) -> None:
    await declare(served, payload_schema=OCR)

    shown = await tools(served)

    assert shown["ocr_scan"]["inputSchema"] == OCR
    assert shown["ocr_scan"]["description"].startswith("Read a scanned page.")
    assert {"asyncgate.get_task", "asyncgate.cancel_task", "ocr_scan"} == shown.keys()
    assert "ocr_scan" not in await tools(served, "tools=delegate")
    assert "ocr_scan" not in await tools(served, "tools=all")
    assert {"ocr_scan", "asyncgate.create_task"} <= (await tools(served, "tools=delegate,types")).keys()


@pytest.mark.parametrize("arguments", [{"file": "a.png"}, {"file": "a.png", "dpi": 300}])
async def test_a_call_of_the_tool_runs_a_task_of_the_type(served: Any, arguments: Any) -> None:
    await declare(served, payload_schema=OCR)
    answer = await call(served, "ocr_scan", arguments, "tools=types&principal_id=ada")
    record = json.loads(answer["content"][0]["text"])

    assert (record["type"], record["payload"], record["created_by"]["id"]) == ("ocr.scan", arguments, "ada")
    assert (await served.get(f"/v1/tasks/{record['task_id']}"))["payload"] == arguments


async def test_arguments_that_do_not_fit_are_refused_with_the_path(served: Any) -> None:
    await declare(served, payload_schema=OCR)

    answer = await call(served, "ocr_scan", {"dpi": 300})

    assert answer["isError"]
    assert json.loads(answer["content"][0]["text"])["error"] == "payload_invalid"
    assert json.loads(answer["content"][0]["text"])["path"] == "payload.file"
    assert "no tool" in (await call(served, "ocr_scan", {"file": "a"}, "tools=delegate"))["message"]


async def test_a_payload_that_is_no_object_is_one_argument(served: Any) -> None:
    await declare(served, "double", payload_schema={"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}})

    shown = (await tools(served))["double"]["inputSchema"]
    answer = await call(served, "double", {"payload": 4})

    assert shown == {"type": "object", "properties": {"payload": {"$ref": "#/$defs/n"}}, "required": ["payload"],
                     "$defs": {"n": {"type": "integer"}}}
    assert json.loads(answer["content"][0]["text"])["payload"] == 4


async def test_types_that_would_share_a_name_get_one_of_their_own(served: Any) -> None:
    for type in ("a.b", "a-b", "a b", "get_task", "x" * 100):
        await declare(served, type)

    shown = {name for name in await tools(served) if not name.startswith("asyncgate")}

    assert len(shown) == 5
    assert "a-b" in shown
    assert {name for name in shown if len(name) > 64 or name == "get_task"} == set()
    assert sum(name.startswith("a_b_") for name in shown) == 2


async def test_a_tool_is_shown_to_those_who_may_create_such_tasks(served: Any) -> None:
    await declare(served)
    keys = [(await served.post("/v1/keys", {"name": "k", "principal_kind": kind, "principal_id": "x", "role": role,
                                            **more}))["api_key"]
            for kind, role, more in (("agent", "agent", {"task_types": ["other"]}), ("worker", "worker", {}),
                                     ("agent", "agent", {"task_types": ["ocr.scan"]}))]

    assert ["ocr_scan" in await tools(served, token=key) for key in keys] == [False, False, True]
    assert "no tool" in (await call(served, "ocr_scan", {}, "tools=types", token=keys[0]))["message"]


async def test_the_official_client_gets_a_durable_handle_from_the_tool_of_a_type(start: Any, connect: Any) -> None:
    gate = start()
    with Http(gate.url, TOKEN) as rest:
        rest.call("declare_type", worker_id="w1", type="ocr.scan", payload_schema=OCR)
        async with connect(gate, "auto", path="/mcp?tools=types&agent_id=ada", **taking()) as client:
            assert "ocr_scan" in [tool.name for tool in (await client.list_tools()).tools]
            handle = await client.session.call_tool("ocr_scan", {"file": "a.png"}, allow_claimed=True)

            assert isinstance(handle, Handle)
            (offer,) = rest.call("lease_next", worker_id="w1")["tasks"]
            assert (offer["task_id"], offer["payload"]) == (handle.task_id, {"file": "a.png"})
            rest.call("complete", worker_id="w1", task_id=offer["task_id"], lease_id=offer["lease_id"], result="text",
                      artifacts=[{"uri": "file:///x"}])
            assert (await state(client, handle.task_id)).status == "completed"
