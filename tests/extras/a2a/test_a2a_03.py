"""A2A 0.3: other names for the same, over JSON-RPC alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.extras.a2a.conftest import Agent

pytestmark = pytest.mark.anyio
PARTS: list[dict[str, Any]] = [
    {"kind": "text", "text": "read"}, {"kind": "data", "data": {"page": 1}, "metadata": {"a": 1}},
    {"kind": "file", "file": {"bytes": "aGk=", "mimeType": "image/png", "name": "a.png"}},
    {"kind": "file", "file": {"uri": "https://files.example.com/a.pdf", "mimeType": "application/pdf"}}]
AT_ONCE = {"blocking": False}


def said(parts: Any = PARTS[:1], **more: Any) -> dict[str, Any]:
    """Return a message of 0.3."""
    return {"kind": "message", "messageId": "m-1", "role": "user", "parts": parts, **more}


async def test_each_part_comes_back_as_it_was_sent(agent: Agent) -> None:
    task = await agent.good("message/send", {"message": said(PARTS), "configuration": AT_ONCE})
    read = await agent.good("tasks/get", {"id": task["id"], "historyLength": 5})
    new = await agent.task(task["id"])

    assert (task["kind"], task["status"]["state"]) == ("task", "submitted")
    assert read["history"][0] == {**said(PARTS), "taskId": task["id"], "contextId": task["contextId"]}
    assert [next(name for name in ("text", "data", "raw", "url") if name in part)
            for part in new["history"][0]["parts"]] == ["text", "data", "raw", "url"]


async def test_results_that_are_no_objects_are_the_value_of_one(agent: Agent) -> None:
    task = await agent.good("message/send", {"message": said(), "configuration": AT_ONCE})
    await agent.under(await agent.lease(), "complete", result=[1, 2])
    done = await agent.good("tasks/get", {"id": task["id"]})

    assert done["artifacts"][0]["parts"] == [{"kind": "data", "data": {"value": [1, 2]}}]


@pytest.mark.parametrize(("params", "field"), [
    ({}, "message"), ({"message": said(role="agent")}, "message.role"), ({"message": 7}, "message"),
    ({"message": said([])}, "message.parts"), ({"message": said([7])}, "message.parts[0]"),
    ({"message": said([{"kind": "file", "file": 7}])}, "message.parts[0]"),
    ({"message": said([{"kind": "text"}])}, "message.parts[0]"),
    ({"message": said([{"kind": ["text"]}])}, "message.parts[0]"), ({"message": said("x")}, "message.parts")])
async def test_what_is_not_as_it_must_be_is_refused(agent: Agent, params: Any, field: str) -> None:
    assert await agent.refused("message/send", params) == (-32602, field)


async def test_the_old_card_leads_to_the_same_endpoint_and_to_nothing_of_1_0(agent: Agent) -> None:
    new, old = [(await agent.served.call("GET", f"{agent.path}{at}/.well-known/agent-card.json", token=None)).json()
                for at in ("", "/0.3")]

    assert old["url"] == new["supportedInterfaces"][0]["url"]
    assert (old["protocolVersion"], old["preferredTransport"]) == ("0.3.0", "JSONRPC")
    assert "supportedInterfaces" not in old
    assert "url" not in new
    assert await agent.good("agent/getAuthenticatedExtendedCard") == old


async def test_0_3_is_spoken_over_json_rpc_alone(agent: Agent) -> None:
    header = [("a2a-version", "0.3")]
    over_http = await agent.http("GET", "tasks", headers=header)

    assert over_http.json()["error"]["details"][0]["reason"] == "VERSION_NOT_SUPPORTED"
    assert await agent.refused("tasks/get", {"id": "none"}, headers=header) == (-32001, "TASK_NOT_FOUND")
    assert await agent.refused("tasks/pushNotificationConfig/set", {}) == (-32602, "url")


@pytest.mark.parametrize(("method", "version"), [("SendMessage", "0.3"), ("tasks/get", "1.0"), ("tasks/get", "1.0.1")])
async def test_a_method_of_one_version_is_refused_under_the_header_of_the_other(
        agent: Agent, method: str, version: str) -> None:
    assert await agent.refused(method, {}, headers=[("a2a-version", version)]) == (-32009, "VERSION_NOT_SUPPORTED")


@pytest.mark.parametrize(("method", "params", "code"), [
    ("message/stream", {"message": said([])}, -32602), ("tasks/resubscribe", {"id": "none"}, -32001)])
async def test_a_refused_stream_has_the_refusal_as_its_event(agent: Agent, method: str, params: Any, code: int) -> None:
    answer = await agent.rpc(method, params)
    stranger = await agent.known_as("none").rpc(method, params)

    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
    assert json.loads(answer.content.removeprefix(b"data: "))["error"]["code"] == code
    assert answer.content.endswith(b"\n\n")
    assert (stranger.status, stranger.headers["content-type"]) == (401, "application/json")
