"""What A2A refuses: who may not, what is not of the protocol, and what is too large; foreign callers see nothing."""

from __future__ import annotations

from typing import Any

import pytest

from asyncgate.extras.a2a.face import METHODS
from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.model.settings import A2ASettings
from tests.conftest import Serve
from tests.extras.a2a.conftest import AGENT, Agent, said

pytestmark = pytest.mark.anyio
BAD: list[tuple[str, dict[str, Any], tuple[int, str]]] = [
    ("SendMessage", {}, (-32602, "message")), ("SendMessage", {"message": {}}, (-32602, "message.messageId")),
    ("SendMessage", {"message": said(messageId="")}, (-32602, "message.messageId")),
    ("SendMessage", {"message": said(role="ROLE_AGENT")}, (-32602, "message.role")),
    ("SendMessage", {"message": said(parts=[])}, (-32602, "message.parts")),
    ("SendMessage", {"message": said(parts=[{}])}, (-32602, "message.parts[0]")),
    ("SendMessage", {"message": said(parts=[{"text": "a", "data": 1}])}, (-32602, "message.parts[0]")),
    ("SendMessage", {"message": said(parts=[{"text": 1}])}, (-32602, "message.parts[0].text")),
    ("SendMessage", {"message": said(parts=[{"raw": "no base64!"}])}, (-32602, "message.parts[0].raw")),
    ("SendMessage", {"message": said(parts=[{"raw": "aGkhI"}])}, (-32602, "message.parts[0]")),
    ("SendMessage", {"message": said(contextId="c" * 197)}, (-32602, "message.contextId")),
    ("SendMessage", {"message": said(contextId="a\u202eb")}, (-32602, "message.contextId")),
    ("SendMessage", {"message": said(parts=[{"text": "a", "mediaType": "video/mp4"}])},
     (-32005, "CONTENT_TYPE_NOT_SUPPORTED")),
    ("SendMessage", {"message": said(), "configuration": {"historyLength": -1}},
     (-32602, "configuration.historyLength")),
    ("SendMessage", {"message": said(taskId="none")}, (-32001, "TASK_NOT_FOUND")),
    ("GetTask", {}, (-32602, "id")), ("GetTask", {"id": "none"}, (-32001, "TASK_NOT_FOUND")),
    ("CancelTask", {"id": "none"}, (-32001, "TASK_NOT_FOUND")),
    ("ListTasks", {"pageSize": 101}, (-32602, "pageSize")), ("ListTasks", {"pageSize": 0}, (-32602, "pageSize")),
    ("ListTasks", {"status": "DONE"}, (-32602, "status")), ("ListTasks", {"pageToken": "x"}, (-32602, "pageToken")),
    ("ListTasks", {"pageToken": "x~y"}, (-32602, "pageToken")),
    ("ListTasks", {"statusTimestampAfter": "yesterday"}, (-32602, "statusTimestampAfter")),
    ("ListTasks", {"statusTimestampAfter": "2026"}, (-32602, "statusTimestampAfter")),
    ("ListTasks", {"statusTimestampAfter": 1700000000}, (-32602, "statusTimestampAfter")),
    ("Nothing", {}, (-32601, "METHOD_NOT_FOUND"))]


@pytest.mark.parametrize(("method", "params", "refusal"), BAD)
async def test_what_is_not_as_the_protocol_has_it_is_refused_with_its_place(
        agent: Agent, method: str, params: dict[str, Any], refusal: tuple[int, str]) -> None:
    async with agent.served.unchanged():
        assert await agent.refused(method, params) == refusal


async def test_a_word_that_is_none_of_the_protocol_is_refused_with_those_that_are(agent: Agent) -> None:
    error = (await agent.rpc("SendMessage", {"message": said(role="ROLE_AGENT")})).json()["error"]

    assert error["message"] == "message.role: Invalid enum value 'ROLE_AGENT': one of ROLE_USER, 1"


async def test_parameters_that_are_null_are_absent(agent: Agent) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "GetExtendedAgentCard", "params": None}
    answer = await agent.served.call("POST", f"{agent.path}/rpc", body)

    assert answer.json()["result"]["name"] == AGENT


async def make_key(agent: Agent, name: str, role: str = "agent", scopes: str = "tasks:write tasks:read") -> Agent:
    """Issue a key, and return the agent as its holder sees it."""
    issued = await agent.served.post("/v1/keys", {"name": name, "role": role, "scopes": scopes.split(),
                                                  "principal_kind": "agent", "principal_id": name})
    return agent.known_as(issued["api_key"])


CALLS: dict[str, dict[str, Any]] = {
    "SendMessage": {"message": said()}, "SendStreamingMessage": {"message": said()}, "ListTasks": {},
    "GetExtendedAgentCard": {}}


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("ListTasks", "GetExtendedAgentCard")])
async def test_a_foreign_caller_learns_of_a_task_what_it_learns_of_none(agent: Agent, method: str) -> None:
    ada, bob = await make_key(agent, "ada"), await make_key(agent, "bob")
    task = await ada.begin()
    lease = await agent.lease()
    await agent.ask(lease)

    def params(task_id: str) -> dict[str, Any]:
        return {"id": task_id, "taskId": task_id, "message": said(taskId=task_id)}
    async with agent.served.unchanged():
        real, none = [(await bob.rpc(method, params(id))).json()["error"] for id in (task["id"], "none")]

    assert str(real).replace(task["id"], "none") == str(none)
    assert (await bob.good("ListTasks"))["totalSize"] == 0
    assert (await ada.good("ListTasks"))["totalSize"] == 1


async def test_a_task_of_another_type_is_not_of_this_agent(agent: Agent) -> None:
    task = await agent.begin()
    other = Agent(agent.served, "other")

    for method in ("GetTask", "CancelTask"):
        assert await other.refused(method, {"id": task["id"]}) == (-32001, "TASK_NOT_FOUND")
    assert (await other.good("ListTasks"))["tasks"] == []


async def test_who_may_not_write_changes_nothing_and_who_may_not_read_cannot_send(agent: Agent) -> None:
    reader = await make_key(agent, "reader", scopes="tasks:read")
    writer = await make_key(agent, "writer", scopes="tasks:write")
    worker = await make_key(agent, "worker", "worker", "tasks:lease")
    async with agent.served.unchanged():
        for caller in (reader, writer, worker):
            answer = await caller.rpc("SendMessage", {"message": said()})

            assert (answer.status, answer.json()["error"]["code"]) == (403, -32011)


@pytest.mark.parametrize("method", METHODS)
async def test_without_a_credential_nobody_learns_anything(agent: Agent, method: str) -> None:
    answer = await agent.known_as(None).rpc(method, CALLS.get(method, {"id": "none"}))
    unknown = await agent.known_as(None).http("GET", "extendedAgentCard")

    assert (answer.status, answer.json()["error"]["code"]) == (401, -32010)
    assert answer.headers["www-authenticate"] == "Bearer"
    assert (unknown.status, unknown.json()["error"]["status"]) == (401, "UNAUTHENTICATED")


async def test_a_body_that_is_too_large_or_too_deep_is_refused_before_it_is_read(serve: Serve) -> None:
    agent = Agent(await serve(a2a=A2ASettings(agents=(AGENT,)), max_request_bytes=10_000))
    deep: Any = 1
    for _ in range(70):
        deep = [deep]

    large = await agent.rpc("SendMessage", {"message": said("x" * 20_000)})
    nested = await agent.rpc("SendMessage", {"message": said(parts=[{"data": deep}])})

    assert (large.status, large.json()["error"]["code"]) == (413, -32014)
    assert nested.json()["error"]["code"] == -32602


RAW: list[tuple[bytes, dict[str, Any], int]] = [
    (b"{", {}, -32700), (b"[]", {}, -32600), (b'{"jsonrpc": "1.0", "method": "GetTask"}', {}, -32600),
    (b'{"jsonrpc": "2.0", "method": "GetTask", "id": true}', {}, -32600),
    (b'{"jsonrpc": "2.0", "id": 1, "method": "GetTask", "params": []}', {}, -32602),
    (b"{}", {"headers": [("content-type", "text/plain")]}, -32005)]


@pytest.mark.parametrize(("body", "more", "code"), RAW)
async def test_what_is_not_json_rpc_is_refused(agent: Agent, body: bytes, more: dict[str, Any], code: int) -> None:
    answer = await agent.served.call("POST", f"{agent.path}/rpc", body, **more)

    assert answer.json()["error"]["code"] == code


@pytest.mark.parametrize("method", ["SendMessage", "message/send", "SendStreamingMessage", "GetTask", "Nothing"])
async def test_a_notification_is_carried_out_and_not_replied_to(agent: Agent, method: str) -> None:
    old = {"messageId": "m-1", "role": "user", "parts": [{"kind": "text", "text": "hello"}]}
    params = {"message": old, "configuration": {"blocking": False}} if "/" in method else {
        "message": said(), "configuration": {"returnImmediately": True}}
    body = {"jsonrpc": "2.0", "method": method, "params": params}

    answer = await agent.served.call("POST", f"{agent.path}/rpc", body)
    stranger = await agent.served.call("POST", f"{agent.path}/rpc", body, token="none")

    assert (answer.status, answer.content) == (204, b"")
    assert stranger.status == 401
    assert (await agent.good("ListTasks"))["totalSize"] == ("essage" in method)


async def test_json_rpc_is_posted(agent: Agent) -> None:
    answer = await agent.served.call("GET", f"{agent.path}/rpc")

    assert (answer.status, answer.headers["allow"], answer.json()["error"]["code"]) == (405, "POST", -32601)


@pytest.mark.parametrize(("version", "spoken"), [("1.0", True), ("1.0.1", True), ("2.0", False), ("0.1", False)])
async def test_another_version_is_refused(agent: Agent, version: str, spoken: bool) -> None:
    answers = [await agent.rpc("ListTasks", headers=[("a2a-version", version)]),
               await agent.http("GET", f"tasks?A2A-Version={version}")]

    assert [answer.status == 200 and "error" not in answer.json() for answer in answers] == [spoken, spoken]
    if not spoken:
        assert (answers[0].json()["id"], answers[0].json()["error"]["code"]) == (1, -32009)
        assert answers[1].json()["error"]["details"][0]["reason"] == "VERSION_NOT_SUPPORTED"


async def test_both_bindings_do_the_same(agent: Agent) -> None:
    how = {"return_immediately": True}
    sent = await agent.http("POST", "message:send", {"message": said(), "configuration": how})
    task_id = sent.json()["task"]["id"]
    read = await agent.http("GET", f"tasks/{task_id}?historyLength=0")
    listed = await agent.http("GET", "tasks?pageSize=1")
    canceled = await agent.http("POST", f"tasks/{task_id}:cancel")
    again = await agent.http("POST", f"tasks/{task_id}:cancel", {})
    lost = await agent.http("GET", "tasks/none")

    assert [answer.headers["content-type"] for answer in (sent, read, lost)] == [
        "application/a2a+json", "application/a2a+json", "application/json"]
    assert "history" not in read.json()
    assert listed.json()["tasks"][0]["id"] == task_id
    assert canceled.json()["status"]["state"] == "TASK_STATE_CANCELED"
    assert (again.status, again.json()["error"]["details"][0]["reason"]) == (400, "TASK_NOT_CANCELABLE")
    assert (lost.status, lost.json()["error"]["status"]) == (404, "NOT_FOUND")


async def test_a_tenant_in_a_path_is_the_callers_own(agent: Agent) -> None:
    own, foreign = [await agent.http("GET", f"{tenant}/tasks") for tenant in (agent.served.tenant_id, "another")]

    assert (own.status, foreign.status) == (200, 403)
    assert (await agent.rpc("ListTasks", {"tenant": "another"})).status == 403


async def test_a_card_names_what_the_operator_offers_and_nothing_else(agent: Agent) -> None:
    answer = await agent.served.call("GET", f"{agent.path}/.well-known/agent-card.json", token=None)
    card, tag = answer.json(), answer.headers["etag"]
    assert answer.headers["last-modified"].endswith(" GMT")
    known = await agent.served.call("GET", f"{agent.path}/.well-known/agent-card.json", token=None,
                                    headers=[("if-none-match", tag)])
    root = await agent.served.call("GET", "/.well-known/agent-card.json", token=None)
    missing = await agent.served.call("GET", "/a2a/secret/.well-known/agent-card.json", token=None)

    assert [(at["url"], at["protocolBinding"]) for at in card["supportedInterfaces"]] == [
        ("http://localhost/a2a/scan/rpc", "JSONRPC"), ("http://localhost/a2a/scan/v1", "HTTP+JSON")]
    assert (known.status, answer.headers["cache-control"], root.json()) == (304, "public, max-age=300", card)
    assert missing.status == 404
    assert (await agent.good("GetExtendedAgentCard")) == card


async def test_a_card_behind_a_credential_is_shown_to_nobody_else(serve: Serve) -> None:
    agent = Agent(await serve(a2a=A2ASettings(agents=(AGENT,), public_card=False), public_url="https://gate.example.com"))
    hidden, shown = [await agent.served.call("GET", f"{agent.path}/.well-known/agent-card.json", token=token)
                     for token in (None, agent.token)]

    assert (hidden.status, hidden.headers["www-authenticate"], shown.status) == (401, "Bearer", 200)
    assert shown.json()["supportedInterfaces"][0]["url"] == "https://gate.example.com/a2a/scan/rpc"


async def test_without_agents_there_is_no_face(serve: Serve) -> None:
    served = await serve()

    assert (await served.call("GET", "/a2a/scan/.well-known/agent-card.json")).status == 404
    assert (await served.call("POST", "/a2a/scan/rpc", {})).status == 404


@pytest.mark.parametrize("settings", [{"agents": ("a/b",)}, {"agents": ("",)}, {"agents": (AGENT,), "root": "other"}])
async def test_a_gate_does_not_start_with_agents_that_nobody_could_call(serve: Serve, settings: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match="a2a"):
        await serve(a2a=A2ASettings(**settings))
