"""What a host is shown of the tools: what its credential allows, briefly; everything can be called all the same."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import jsonschema_rs
import msgspec
import pytest

from asyncgate.parts.faces.mcp.tools import (
    ADDITIVE,
    NOT_OF_FORM,
    SETS,
    ToolForm,
    describe_tools,
    is_in,
    make_brief_schema,
    make_input_schema,
)
from asyncgate.parts.operations import OPERATIONS
from tests.support.each import each

pytestmark = pytest.mark.anyio

LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
KB = 1000
EVERY_SCOPE = {"agent": ["tasks:read", "tasks:write", "receipts:read", "receipts:ack"],
               "worker": ["tasks:lease", "receipts:read", "receipts:ack"]}
STANDARD = [("accept", "application/json, text/event-stream"), ("content-type", "application/json")]


async def key_of(served: Any, role: str, **fields: Any) -> str:
    kind = "human" if role == "admin" else role
    issued = await served.post("/v1/keys", {
        "name": role, "principal_kind": kind, "principal_id": role, "role": role, **fields})
    key: str = issued["api_key"]
    return key


async def listed(served: Any, path: str = "/mcp", **more: Any) -> dict[str, Any]:
    answer = await served.post(path, LIST, **more)
    return {tool["name"].partition(".")[2]: tool for tool in answer["result"]["tools"]}


def every(node: Any) -> list[Any]:
    """Every member and its name, anywhere."""
    if isinstance(node, list):
        return [pair for part in node for pair in every(part)]
    return [pair for name, part in node.items() for pair in [(name, part), *every(part)]] if isinstance(
        node, dict) else []


@pytest.mark.parametrize("role", ["agent", "worker"])
async def test_a_list_is_small_also_where_the_credential_has_every_scope(
        served: Any, role: Literal["agent", "worker"]) -> None:
    key = await key_of(served, role, scopes=EVERY_SCOPE[role])
    most = 16 * KB

    answer = await served.call("POST", "/mcp", LIST, token=key)

    assert len(answer.content) <= most
    assert len(answer.json()["result"]["tools"]) <= 20
    # And where arguments say who asks, because the credential does not.
    sets = frozenset({name for name, of in SETS.items() if of == role})
    may = [op for op in OPERATIONS.values() if is_in(op, sets)]
    assert len(msgspec.json.encode({"tools": describe_tools(may, ".", role)})) <= most


@pytest.mark.parametrize("headers", [[], STANDARD], ids=["bare", "standard"])
@pytest.mark.parametrize(("role", "scopes"), [
    ("agent", None), ("agent", ["tasks:read"]), ("worker", None), ("worker", ["receipts:read"]),
    ("admin", ["admin:read"]), ("admin", None)])
async def test_a_credential_is_shown_what_its_role_and_scopes_allow(
        served: Any, role: str, scopes: list[str] | None, headers: Any) -> None:
    key = await key_of(served, role, **({"scopes": scopes} if scopes else {}))

    shown = await listed(served, "/mcp?tools=all", headers=headers, token=key)

    for name in OPERATIONS:
        answer = await served.call("POST", "/mcp", {"method": "tools/call", "params": {
            "name": f"asyncgate.{name}", "arguments": {"tenant_id": 1}}}, token=key)     # which is never carried out
        refused = answer.json().get("error", {}).get("data", {})
        by_role = refused.get("code") == "forbidden" and re.search("needs the scope|cannot", refused["message"])
        assert (name in shown) == (not by_role), (name, refused)


async def test_an_address_picks_sets_of_tools_and_all_can_be_called(served: Any) -> None:
    sets = {name: set(await listed(served, f"/mcp?tools={name}")) for name in SETS}
    both = set(await listed(served, "/mcp?tools=work,delegate"))

    assert set.union(*sets.values()) == set(await listed(served, "/mcp?tools=all")) == set(OPERATIONS)
    assert both == sets["work"] | sets["delegate"]
    assert {"create_task", "get_task"} <= sets["delegate"] - {"lease_next"}
    assert {"lease_next", "complete", "get_task"} <= sets["work"]
    assert "create_task" not in sets["work"]
    assert "issue_key" in sets["admin"]
    assert not sets["admin"] & both
    assert {"health", "bootstrap", "end_session"} <= sets["more"]
    call = {"method": "tools/call", "params": {"name": "asyncgate.create_task", "arguments": {"type": "demo",
                                                                                              "payload": None}}}
    assert (await served.post("/mcp?tools=work", call))["result"]["status"] == "queued"


@pytest.mark.parametrize("headers", [[], STANDARD], ids=["bare", "standard"])
async def test_a_credential_that_names_nobody_is_shown_the_tools_of_an_agent(served: Any, headers: Any) -> None:
    shown, as_worker = [set(await listed(served, path, headers=headers)) for path in (
        "/mcp", "/mcp?principal_kind=worker&principal_id=w1")]
    admin = set(await listed(served, token=await key_of(served, "admin")))

    assert {"create_task", "run_task", "get_task", "list_open_obligations", "explain_task"} <= shown
    assert shown == set(await listed(served, "/mcp?tools=delegate"))
    assert as_worker == set(await listed(served, "/mcp?tools=work"))
    assert "erase_tenant" in admin      # a credential that names an administrator


@each("name", OPERATIONS)
def test_every_argument_of_a_tool_is_described(name: str) -> None:
    for schema in (make_input_schema(OPERATIONS[name]), make_brief_schema(OPERATIONS[name], set())):
        assert [argument for argument, about in schema["properties"].items() if not about.get("description")] == []


# What the first word of a writing operation's name says about what was there before.
TAKES_AWAY = {"cancel", "change", "declare", "drain", "end", "erase", "fail", "pause", "remove", "revoke",
              "rotate", "run", "set", "sign", "suspend", "withdraw"}


@each("name", [op.name for op in OPERATIONS.values() if op.kind == "W"])
def test_a_tool_says_that_it_is_destructive_if_it_ends_stops_replaces_or_removes_anything(name: str) -> None:
    [tool] = describe_tools([OPERATIONS[name]], ".")
    verb = name.partition("_")[0]

    assert (verb in TAKES_AWAY) != (verb in ADDITIVE), f"say which of the two {verb} is"
    assert tool["annotations"]["destructiveHint"] == (verb in TAKES_AWAY and name != "run_task")


def test_no_tool_that_only_reads_is_destructive() -> None:
    reads = {op.name for op in OPERATIONS.values() if op.kind != "W"}

    assert not [tool["name"] for tool in describe_tools(OPERATIONS.values(), ".")
                if tool["name"].partition(".")[2] in reads and tool["annotations"]["destructiveHint"]]


@pytest.mark.parametrize("headers", [[], STANDARD], ids=["bare", "standard"])
async def test_a_set_that_there_is_not_is_refused_by_name(served: Any, headers: Any) -> None:
    answer = await served.call("POST", "/mcp?tools=work,play", LIST, headers=headers)

    assert "play" in answer.content.decode()
    assert "delegate, work, admin, more, types and all" in answer.content.decode()


@pytest.mark.parametrize("form", NOT_OF_FORM)
@each("name", OPERATIONS)
def test_a_brief_schema_takes_the_example_and_says_nothing_that_a_model_does_not_need(
        name: str, form: ToolForm) -> None:
    schema = make_brief_schema(OPERATIONS[name], NOT_OF_FORM[form])

    jsonschema_rs.meta.validate(schema)
    jsonschema_rs.validate(schema, OPERATIONS[name].takes.example[0])
    assert schema["type"] == "object"
    pairs = every(schema)
    assert not {key for key, _ in pairs} & {"pattern", "uniqueItems", "title"}
    assert ("default", None) not in pairs
    assert not re.search(r"\b(PH|H)\.\d|[Ss]pec \d|\(\d+\.\d+", json.dumps(schema))
    assert not {"tenant_id", "agent_instance_id", "worker_kind"} & {key for key, _ in pairs}


@each("name", OPERATIONS)
def test_no_schema_lets_a_required_argument_be_null_because_null_means_absent(name: str) -> None:
    for schema in (make_input_schema(OPERATIONS[name]), make_brief_schema(OPERATIONS[name], set())):
        for required in schema.get("required", ()):
            document = {**schema["properties"][required], "$defs": schema.get("$defs", {})}
            assert not jsonschema_rs.Draft202012Validator(document).is_valid(None), required


async def test_a_list_for_agents_has_their_id_and_a_list_for_workers_theirs(served: Any) -> None:
    paths = ("/mcp", "/mcp?tools=work", "/mcp?tools=work,delegate")
    shown = [(await listed(served, path))["get_task"]["inputSchema"]["properties"].keys() for path in paths]

    assert [sorted({"agent_id", "worker_id"} & names) for names in shown] == [
        ["agent_id"], ["worker_id"], ["agent_id", "worker_id"]]


async def test_a_brief_list_leaves_out_only_hints_that_mcp_takes_for_granted(served: Any) -> None:
    granted = {"readOnlyHint": False, "destructiveHint": True, "idempotentHint": False, "openWorldHint": True}
    full = {tool["name"].partition(".")[2]: tool["annotations"] for tool in describe_tools(OPERATIONS.values(), ".")}

    for name, tool in (await listed(served, "/mcp?tools=all")).items():
        hints = {**granted, **tool["annotations"]}
        counting = ["readOnlyHint", "openWorldHint", *([] if hints["readOnlyHint"] else ["destructiveHint",
                                                                                         "idempotentHint"])]
        assert [hints[hint] for hint in counting] == [full[name][hint] for hint in counting]


async def test_who_asks_is_no_argument_where_the_credential_says_it(served: Any) -> None:
    agent, everybody = await listed(served, token=await key_of(served, "agent")), await listed(served, "/mcp?tools=all")
    in_address = await listed(served, "/mcp?principal_kind=agent&principal_id=ada")

    def names(tools: Any, name: str) -> set[str]:
        return set(tools[name]["inputSchema"]["properties"])

    assert "agent_id" not in names(agent, "create_task") | names(in_address, "create_task")
    assert "agent_id" in names(everybody, "create_task")
    assert "worker_id" in names(everybody, "lease_next")
    assert {"principal_kind", "principal_id"} <= names(everybody, "issue_key")     # not who asks, but for whom


async def test_everything_there_is_to_say_is_shown_on_demand(served: Any) -> None:
    shown = await listed(served, "/mcp?schemas=full&tools=all")

    names = {tool["name"] for tool in describe_tools(OPERATIONS.values(), ".")}
    assert names == {tool["name"] for tool in shown.values()}
    assert "outputSchema" in shown["get_task"]
    assert "tenant_id" in shown["get_task"]["inputSchema"]["properties"]


async def test_a_list_is_no_longer_the_same_for_everybody(served: Any) -> None:
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
    answer = await served.post("/mcp", {**LIST, "params": {"_meta": meta}}, headers=[
        *STANDARD, ("mcp-protocol-version", "2026-07-28"),
        ("mcp-method", "tools/list")])

    assert answer["result"]["cacheScope"] == "private"


@pytest.mark.parametrize("query", ["", "?tools=all&schemas=full"])
async def test_a_list_is_the_same_for_hosts_and_peers(served: Any, query: str) -> None:
    to_peer = await served.post(f"/mcp{query}", LIST)
    to_host = await served.post(f"/mcp{query}", LIST, headers=[
        ("accept", "application/json, text/event-stream"), ("mcp-protocol-version", "2025-06-18")])

    assert to_host["result"] == to_peer["result"]
