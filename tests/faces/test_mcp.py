"""The tools at /mcp, with the official SDK's client in both eras, and with what no good client sends."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from asyncgate.parts.faces.mcp.tools import describe_tools, make_input_schema, make_output_schema
from asyncgate.parts.model.jsonrpc import spell_tool_name
from asyncgate.parts.operations import OPERATIONS
from tests.support.each import each
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-for-tests"
MODERN, LEGACY = "2026-07-28", "2025-11-25"
META = {"io.modelcontextprotocol/protocolVersion": MODERN, "io.modelcontextprotocol/clientCapabilities": {}}
eras = pytest.mark.parametrize("mode", ["legacy", "auto"])


async def said(client: Any, operation: str, **arguments: Any) -> Any:
    """Call a tool and return its structured content, which its text must repeat."""
    result = await client.call_tool(f"asyncgate.{operation}", arguments)
    assert not result.is_error, result
    (content,) = result.content
    assert json.loads(content.text) == result.structured_content
    return result.structured_content


async def code(client: Any, operation: str, **arguments: Any) -> str:
    """Call a tool and return the code of its refusal, which has all that a refusal must have."""
    result = await client.call_tool(f"asyncgate.{operation}", arguments)
    assert result.is_error
    assert result.structured_content is None
    (content,) = result.content
    told = json.loads(content.text)
    assert told["detail"] == told["message"] != ""
    assert result.meta["asyncgate/error"]["code"] == told["error"]
    return str(told["error"])


def request(operation: str, arguments: Any, name: str = "") -> tuple[bytes, list[tuple[str, str]]]:
    """Return the message and the headers of a tool call in the modern era."""
    name = name or f"asyncgate.{operation}"
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    body = (f'{{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{{"name":"{name}","arguments":{arguments},'
            f'"_meta":{json.dumps(META)}}}}}')
    headers = [("content-type", "application/json"), ("accept", "application/json, text/event-stream"),
               ("mcp-protocol-version", MODERN), ("mcp-method", "tools/call"), ("mcp-name", name)]
    return body.encode(), headers


async def posted(served: Any, operation: str, arguments: Any, path: str = "/mcp", **more: Any) -> Any:
    """POST a modern tool call as it is and return the result."""
    body, headers = request(operation, arguments)
    headers += more.pop("headers", [])
    answer = await served.call("POST", path, body, headers=headers, **more)
    assert answer.status == 200, answer
    return answer.json()["result"]


# What is listed.


@eras
async def test_both_eras_list_every_operation_once_in_a_fixed_order(live_for_all: Any, connect: Any, mode: str) -> None:
    async with connect(live_for_all, mode, "/mcp?tools=all") as client:
        first, second = [await client.list_tools() for _ in range(2)]

        assert client.protocol_version == {"legacy": LEGACY, "auto": MODERN}[mode]
    assert [tool.name for tool in first.tools] == sorted(f"asyncgate.{name}" for name in OPERATIONS)
    assert first.tools == second.tools


@eras
async def test_names_with_dots_and_with_underscores_are_both_accepted_on_both_paths(
        live_for_all: Any, connect: Any, mode: str) -> None:
    for path, separator in (("/mcp", "."), ("/mcp/u", "_")):
        async with connect(live_for_all, mode, path) as client:
            assert {tool.name[9] for tool in (await client.list_tools()).tools} == {separator}
            for name in spell_tool_name("get_config"):
                result = await client.call_tool(name, {})
                assert result.structured_content["receipt_mode"] == "standalone"


async def test_the_setting_chooses_the_names_that_are_listed(serve: Any) -> None:
    served = await serve(mcp_tool_names="underscore")

    answer = await served.post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})

    assert {tool["name"][:10] for tool in answer["result"]["tools"]} == {"asyncgate_"}


@each("name", OPERATIONS)
def test_the_schemas_of_a_tool_take_the_example_of_its_operation_and_nothing_unknown(name: str) -> None:
    takes, gives = make_input_schema(OPERATIONS[name]), make_output_schema(OPERATIONS[name])
    asked, answered = OPERATIONS[name].takes.example

    for schema in (takes, gives):
        jsonschema_rs.meta.validate(schema)
        assert schema["type"] == "object"
    jsonschema_rs.validate(takes, asked)
    jsonschema_rs.validate(gives, answered)
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(takes, {**asked, "no_such_argument": 1})


@each("name", OPERATIONS)
def test_every_argument_may_be_null_unless_the_call_is_nothing_without_it(name: str) -> None:
    schema = make_input_schema(OPERATIONS[name])

    for field in schema["properties"].keys() - set(schema["required"]):
        jsonschema_rs.validate(schema, {**OPERATIONS[name].takes.example[0], field: None})


def test_no_argument_and_no_reply_has_an_empty_schema() -> None:
    def empty(node: Any, path: str) -> list[str]:
        if isinstance(node, list):
            return [place for at, part in enumerate(node) for place in empty(part, f"{path}/{at}")]
        if not isinstance(node, dict):
            return []
        here = [f"{path}/{name}" for name, schema in node.get("properties", {}).items()
                if not schema.keys() - {"default", "description"}]
        return here + [place for name, part in node.items() for place in empty(part, f"{path}/{name}")]

    listed = describe_tools(OPERATIONS.values(), ".")
    assert [place for tool in listed for place in empty(tool, tool["name"])] == []


def test_tools_say_what_they_do_and_what_comes_next() -> None:
    listed = {tool["name"]: tool for tool in describe_tools(OPERATIONS.values(), ".")}

    lease = listed["asyncgate.lease_next"]["description"]
    assert "renew_every_seconds" in lease
    assert "Next: " in lease
    assert all(".  " not in tool["description"] and "PH." not in tool["description"] for tool in listed.values())
    assert listed["asyncgate.get_task"]["annotations"]["readOnlyHint"] is True
    assert listed["asyncgate.cancel_task"]["annotations"]["destructiveHint"] is True
    assert all(tool["annotations"]["openWorldHint"] is False for tool in listed.values())


@eras
async def test_no_news_of_lists_that_never_change_is_promised(live_for_all: Any, connect: Any, mode: str) -> None:
    async with connect(live_for_all, mode) as client:
        can = client.server_capabilities

    assert [part.list_changed for part in (can.tools, can.prompts, can.resources)] == [False] * 3
    assert can.resources.subscribe is (mode == "auto")


# What is called.


@eras
async def test_a_task_goes_from_its_creation_to_its_end(live: Any, connect: Any, mode: str) -> None:
    async with connect(live, mode) as client:
        made = await said(client, "create_task", type="demo", payload={"n": 1}, agent_id="ada")
        (offer,) = (await said(client, "lease_next", worker_id="w1"))["tasks"]
        held = {"task_id": offer["task_id"], "lease_id": offer["lease_id"], "worker_id": "w1"}
        await said(client, "report_progress", **held, progress={"half": True})
        await said(client, "complete", **held, result={"ok": True}, artifacts=[{"type": "file", "uri": "file:///x"}])
        task = await said(client, "get_task", task_id=made["task_id"])

        assert (task["status"], task["obligation_open"], task["payload"]) == ("succeeded", False, {"n": 1})
        assert (await said(client, "list_open_obligations", agent_id="ada"))["open_obligations"] == []


@eras
async def test_refusals_are_results_with_the_code_of_every_facade(live_for_all: Any, connect: Any, mode: str) -> None:
    async with connect(live_for_all, mode) as client:
        assert await code(client, "get_task", task_id="nobody") == "task_not_found"
        assert await code(client, "get_task") == "invalid_request"
        assert await code(client, "create_task", type="demo", payload=None, prioritty=3) == "invalid_request"
        assert await code(client, "create_task", type="demo", payload=None, tenant_id="another") == "tenant_mismatch"
        assert await code(client, "list_tasks", cursor="made-up") == "invalid_cursor"


@eras
async def test_an_explicit_null_is_an_absent_argument(live_for_all: Any, connect: Any, mode: str) -> None:
    async with connect(live_for_all, mode) as client:
        made = await said(client, "create_task", type="nulls", payload=None, priority=None, idempotency_key=None,
                          agent_id=None)

    assert made["status"] == "queued"


@eras
async def test_a_tool_that_does_not_exist_is_an_error_of_the_protocol(
        live_for_all: Any, connect: Any, mode: str) -> None:
    from mcp.shared.exceptions import MCPError

    async with connect(live_for_all, mode) as client:
        with pytest.raises(MCPError, match="tools/list shows the tools") as caught:
            await client.call_tool("asyncgate.no_such_tool", {})

    assert caught.value.error.code == -32602


async def test_a_payload_is_stored_as_it_was_written(served: Any) -> None:
    payload = '{"a": 1.0, "b": 1e2, "c": 12345678901234567890123, "d": "\\u00e9"}'

    made = await posted(served, "create_task", f'{{"type":"demo","payload":{payload}}}')

    answer = await served.call("GET", f"/v1/tasks/{made['structuredContent']['task_id']}")
    assert payload.encode() in answer.content


# Who may come in, and with what.


@pytest.mark.parametrize(("headers", "challenge"), [
    ([], "Bearer"), ([("authorization", "Bearer wrong")], 'Bearer error="invalid_token"'),
    ([("x-api-key", "wrong")], 'Bearer error="invalid_token"'),
    ([("authorization", "Bearer wrong"), ("x-api-key", "other")], 'Bearer error="invalid_request"')])
async def test_without_a_credential_the_sdk_sees_nothing(
        served: Any, headers: list[tuple[str, str]], challenge: str) -> None:
    body, more = request("create_task", {"type": "demo", "payload": None})

    async with served.unchanged():
        answer = await served.call("POST", "/mcp", body, headers=[*headers, *more], token=None)

    rest = await served.call("GET", "/v1/tasks", headers=headers, token=None)
    assert (answer.status, answer.json()["error"]) == (401, "unauthenticated")
    assert answer.headers["www-authenticate"] == rest.headers["www-authenticate"] == challenge


@pytest.mark.parametrize("path", ["/mcp", "/mcp/u"])
@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
async def test_there_is_no_stream_to_get_and_no_session_to_delete(served: Any, method: str, path: str) -> None:
    answer = await served.call(method, path, headers=[("accept", "text/event-stream"), ("mcp-session-id", "x")])

    assert (answer.status, answer.headers["allow"]) == (405, "POST")


async def test_pages_of_other_sites_are_kept_out(served: Any) -> None:
    body, headers = request("get_config", {})

    foreign = await served.call("POST", "/mcp", body, headers=[*headers, ("host", "evil.example")])
    page = await served.call("POST", "/mcp", body, headers=[*headers, ("origin", "https://evil.example")])

    assert (foreign.status, page.status) == (421, 403)


async def test_answers_carry_the_headers_of_every_answer(served: Any) -> None:
    body, headers = request("get_config", {})

    answer = await served.call("POST", "/mcp", body, headers=headers)

    assert (answer.headers["x-content-type-options"], answer.headers["cache-control"]) == ("nosniff", "no-store")
    assert len(dict(answer.pairs)) == len(answer.pairs)


@pytest.mark.parametrize(("arguments", "expected"), [
    ('{"type": "demo", "payload": "\\u0000"}', "invalid_request"),
    ('{"type": "demo", "payload": ' + "[" * 63 + "]" * 63 + "}", None),
    ('{"type": "demo", "payload": ' + "[" * 64 + "]" * 64 + "}", "payload_too_deep"),
])
async def test_arguments_are_screened_by_the_rule_of_rest(served: Any, arguments: str, expected: str | None) -> None:
    rest = await served.call("POST", "/v1/tasks", arguments.encode())

    result = await posted(served, "create_task", arguments)

    assert rest.json().get("error") == expected
    assert result.get("_meta", {}).get("asyncgate/error", {}).get("code") == expected


@pytest.mark.parametrize("body", [b"", b"[]", b"nonsense", b'{"jsonrpc":"2.0"}', b"[" * 100_000, b'"\xff"',
                                  b'{"jsonrpc":"2.0","id":"\xff","method":"tools/list"}',
                                  b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":1}}',
                                  b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":' + b"[" * 50_000])
async def test_what_is_no_message_is_refused_and_nothing_breaks(served: Any, body: bytes) -> None:
    _, headers = request("create_task", {})

    for given in (headers, [("content-type", "application/json")]):
        answer = await served.call("POST", "/mcp", body, headers=given)
        assert answer.status in (200, 400), answer
        assert "error" in answer.json()


@pytest.mark.parametrize(("wrong", "named"), [
    ({"id": None}, "needs an id"), ({"id": 2.0}, "needs an id"), ({"id": True}, "needs an id"),
    ({"jsonrpc": "1.0"}, "jsonrpc"), ({"method": 5}, "method"), ({"params": []}, "params")])
@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_a_message_that_nobody_could_answer_is_refused_in_words_and_nothing_is_done(
        served: Any, era: str, wrong: dict[str, Any], named: str) -> None:
    body, headers = request("create_task", {"type": "demo", "payload": None, "agent_id": "ada"})
    message = json.loads(body) | wrong
    if era == "legacy":
        headers = [*headers[:2], ("mcp-protocol-version", "2025-11-25")]

    async with served.unchanged():
        single, batch = [await served.call("POST", "/mcp", json.dumps(given).encode(), headers=headers)
                     for given in (message, [message])]

    assert [(answer.status, answer.json()["error"]["code"]) for answer in (single, batch)] == [(400, -32600)] * 2
    assert named in single.json()["error"]["message"]
    assert "batches" in batch.json()["error"]["message"]


async def test_a_request_without_parameters_and_a_notification_without_an_id_are_good(served: Any) -> None:
    _, headers = request("create_task", {})
    headers = [*headers[:2], ("mcp-protocol-version", "2025-11-25")]

    for more, status in (({"id": 1, "method": "ping"}, 200), ({"id": "", "method": "ping", "params": None}, 200),
                         ({"method": "notifications/initialized"}, 202), ({"id": 1, "result": {}}, 202)):
        answer = await served.call("POST", "/mcp", {"jsonrpc": "2.0", **more}, headers=headers)
        assert answer.status == status, more


@pytest.mark.parametrize("query", [
    "principal_id=%ff", "principal_id=\xff", "principal_id=%00", "principal_kind=nobody"])
async def test_an_address_that_makes_no_sense_is_refused_and_nothing_breaks(served: Any, query: str) -> None:
    body, headers = request("create_task", {"type": "demo", "payload": None})

    bare = json.dumps({"method": "tools/call", "params": {"name": "asyncgate.create_task",
                                                          "arguments": {"type": "x", "payload": None}}})
    async with served.unchanged():
        answers = [await served.call("POST", f"/mcp?{query}", sent, headers=given)
                   for sent, given in ((body, headers), (bare.encode(), []))]

    assert all(b"invalid_request" in answer.content for answer in answers), answers


INITIALIZE: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
    "protocolVersion": LEGACY, "capabilities": {}, "clientInfo": {"name": "a-host", "version": "1"}}}


@pytest.mark.parametrize("path", ["/mcp/", "/mcp/u/", "/mcp/?tools=work"])
async def test_a_slash_at_the_end_of_the_address_makes_no_difference(served: Any, path: str) -> None:
    made = await posted(served, "create_task", {"type": "demo", "payload": None}, path)
    task_id = made["structuredContent"]["task_id"]

    assert (await served.get("/v1/tasks/"))["tasks"][0]["task_id"] == task_id
    assert (await served.get(f"/v1/tasks/{task_id}/"))["status"] == "queued"
    assert (await served.post("/v1/tasks/", {"type": "demo", "payload": None}))["status"] == "queued"
    assert (await served.post("/v1/leases/claim/", {"worker_id": "w1"}))["tasks"]
    assert (await served.call("GET", "/health/", token=None)).status == 200


async def test_a_client_that_names_no_type_takes_any(served: Any) -> None:
    answer = await served.post("/mcp", INITIALIZE)

    assert answer["result"]["protocolVersion"] == LEGACY


async def test_the_revision_with_batches_is_not_agreed_on_because_they_are_not_served(served: Any) -> None:
    asked = {**INITIALIZE, "params": {**INITIALIZE["params"], "protocolVersion": "2025-03-26"}}

    answers = [await served.post("/mcp", {**asked, "params": {**asked["params"], "protocolVersion": version}})
               for version in ("2024-11-05", "2025-03-26", "2025-06-18", LEGACY)]

    assert [answer["result"]["protocolVersion"] for answer in answers] == [
        "2024-11-05", "2024-11-05", "2025-06-18", LEGACY]


async def test_an_address_lists_names_without_a_prefix_for_hosts_that_add_their_own(served: Any) -> None:
    listed = await served.post("/mcp?names=short", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
    body, headers = request("get_config", {}, name="get_config")

    called = await served.call("POST", "/mcp", body, headers=headers)

    tools = {tool["name"]: tool for tool in listed["result"]["tools"]}
    assert "Next: " in tools["get_task"]["description"]
    assert called.json()["result"]["isError"] is False


async def test_arguments_that_are_no_object_are_refused(served: Any) -> None:
    body, headers = request("create_task", "[1]")

    answer = await served.call("POST", "/mcp", body, headers=headers)

    assert answer.json()["error"]["code"] == -32602


async def test_the_address_may_say_who_asks_and_may_not_name_another_tenant(served: Any) -> None:
    made = await posted(served, "create_task", {"type": "demo", "payload": None},
                        "/mcp?principal_kind=agent&principal_id=ada")
    other = await posted(served, "create_task", {"type": "demo", "payload": None}, headers=[("x-tenant-id", "another")])

    task = await served.get(f"/v1/tasks/{made['structuredContent']['task_id']}")
    assert task["created_by"]["principal_id"] == "ada"
    assert other["_meta"]["asyncgate/error"]["code"] == "tenant_mismatch"


async def test_a_waiting_claim_ends_with_its_client(served: Any) -> None:
    body, headers = request("lease_next", {"worker_id": "w1", "wait_seconds": 30})
    gone = asyncio.Event()
    given = [*headers, ("authorization", f"Bearer {TOKEN}")]
    call = asyncio.create_task(served.send("POST", "/mcp", body, headers=given, gone=gone))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while served.engine.waiting.count == 0:  # noqa: ASYNC110  # there is nothing to be told by
            await asyncio.sleep(0)

        gone.set()

        await call
    assert served.engine.waiting.count == 0


def test_a_gate_that_speaks_rest_only_never_imports_the_sdk() -> None:
    script = """
import asyncio, sys
from asyncgate import Gate, Settings
from asyncgate.backends import open_backend

async def main():
    gate = Gate(Settings(api_key="x"), await open_backend("memory:"))
    sent = []
    async def receive(): return {"type": "http.request", "body": b"", "more_body": False}
    async def send(message): sent.append(message)
    async with gate.app.router.lifespan_context(gate.app):
        await gate({"type": "http", "method": "GET", "path": "/health", "raw_path": b"/health", "query_string": b"",
                    "headers": [], "scheme": "http", "root_path": ""}, receive, send)
    print(sent[0]["status"], "mcp" in sys.modules, "pydantic" in sys.modules)

asyncio.run(main())
"""
    told = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert told.split() == ["200", "False", "False"]
