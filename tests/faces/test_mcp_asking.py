"""Questions over MCP: what a model can ask and answer with the tools that it is shown."""

from __future__ import annotations

import asyncio
from typing import Any

import mcp_types as types
import pytest

from asyncgate.clients.http import AsyncHttp, Http
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
TOKEN = "a-token-for-tests"
WINDOW = {"type": "object", "properties": {"window": {"type": "string", "enum": ["now", "tonight"]}},
          "required": ["window"]}
LONG = "Deploy version 7? " + "It has changed in this way, and in that way. " * 60


class Model:
    """A model that knows the tools in its list and no other, and reads what it is answered as a model does."""

    def __init__(self, client: Any, **me: str) -> None:
        self.client, self.me, self.tools = client, me, dict[str, Any]()

    async def call(self, name: str, **fields: Any) -> Any:
        """Call a listed tool with arguments that it lists."""
        if not self.tools:
            self.tools = {tool.name: tool for tool in (await self.client.list_tools()).tools}
        properties = self.tools[f"asyncgate.{name}"].input_schema["properties"]
        assert fields.keys() <= properties.keys()
        me = {key: value for key, value in self.me.items() if key in properties}
        result = await self.client.call_tool(f"asyncgate.{name}", {**me, **fields})
        assert not result.is_error, result.content
        return result.structured_content


async def test_a_model_with_the_default_tools_asks_and_another_sees_the_whole_question_and_answers(
        live: Any, connect: Any) -> None:
    as_worker = "/mcp?principal_kind=worker&principal_id=w1"
    async with connect(live, "auto") as agents, connect(live, "auto", path=as_worker) as workers:
        agent, worker = Model(agents, agent_id="ada"), Model(workers)
        made = await agent.call("create_task", type="deploy", payload=7)

        (offer,) = (await worker.call("lease_next"))["tasks"]
        asked = await worker.call("request_input", task_id=offer["task_id"], lease_id=offer["lease_id"], key="when",
                                  message=LONG, schema=WINDOW)
        owed = (await agent.call("list_open_obligations"))["open_obligations"]
        (question,) = (await agent.call("list_inputs", task_id=made["task_id"]))["inputs"]
        given = await agent.call("answer_input", task_id=made["task_id"], key=question["key"], action="accept",
                                 content={"window": "tonight"})
        (again,) = (await worker.call("lease_next"))["tasks"]
        await worker.call("complete", task_id=again["task_id"], lease_id=again["lease_id"],
                          result=again["inputs"]["when"]["content"], artifacts=[{"uri": "file:///out"}])
        task = await agent.call("get_task", task_id=made["task_id"])

    assert asked["lease_ended"] is True
    assert [row["receipt_type"] for row in owed] == ["task.assigned", "input.requested"]
    assert (question["message"], question["schema"]) == (LONG, WINDOW)
    assert given["open_inputs"] == 0
    assert (task["status"], task["result"]["result"]) == ("succeeded", {"window": "tonight"})


# In line.


class User:
    """Who sits before an MCP client, and answers its forms."""

    def __init__(self, *answers: types.ElicitResult) -> None:
        self.answers, self.asked = [*answers], list[Any]()

    async def __call__(self, context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        """Answer a form."""
        assert isinstance(params, types.ElicitRequestFormParams)
        self.asked.append((params.message, params.requested_schema))
        return self.answers.pop(0)


async def work(url: str, *questions: dict[str, Any], keep: bool = False) -> Any:
    """Lease the one task, ask each of these in turn, and complete the task with the answers."""
    answers: dict[str, Any] = {}
    async with AsyncHttp(url, TOKEN) as gate:
        for number in range(len(questions) + 1):
            while not (offers := (await gate.call("lease_next", worker_id="w1", wait_seconds=30))["tasks"]):
                continue
            held = {"task_id": offers[0]["task_id"], "lease_id": offers[0]["lease_id"], "worker_id": "w1"}
            answers = {key: {"by": told["by"]["id"], "action": told["action"], "content": told["content"]}
                       for key, told in offers[0].get("inputs", {}).items()}
            if number < len(questions):
                await gate.call("request_input", **held, **questions[number])
        return await gate.call("complete", **held, result=answers, artifacts=[{"uri": "file:///out"}])


async def test_a_client_that_waits_and_can_ask_its_user_is_asked_what_the_task_asks(live: Any, connect: Any) -> None:
    tonight = types.ElicitResult(action="accept", content={"window": "tonight"})
    user = User(tonight, types.ElicitResult(action="decline"))
    asks = {"key": "when", "message": "When?", "schema": WINDOW}, {"key": "tell", "message": "Tell everybody?"}
    working = asyncio.create_task(work(live.url, *asks))

    async with connect(live, "auto", elicitation_callback=user) as client:
        result = await client.call_tool("asyncgate.run_task", {
            "type": "deploy", "payload": 7, "agent_id": "ada", "wait_seconds": 30})
    await working

    assert [message for message, _ in user.asked] == ["When?", "Tell everybody?"]
    assert user.asked[0][1] == WINDOW
    record = result.structured_content
    assert record["status"] == "succeeded"
    assert record["result"]["result"] == {
        "when": {"by": "ada", "action": "accept", "content": {"window": "tonight"}},
        "tell": {"by": "ada", "action": "decline", "content": None}}
    with Http(live.url, TOKEN) as rest:
        assert len(rest.call("list_tasks", agent_id="ada")["tasks"]) == 1     # the repeated call made no other
        owed = rest.call("list_open_obligations", agent_id="ada")["open_obligations"]
        assert [row["receipt_type"] for row in owed if row["receipt_type"] == "input.requested"] == []


NESTED = {"type": "object", "properties": {"where": {"type": "object", "properties": {"city": {"type": "string"}}}}}
MANY = {"type": "array", "items": {"type": "string", "enum": ["red", "blue"]}}


@pytest.mark.parametrize(("schema", "field", "filled", "meant"), [
    (None, {"type": "string"}, "yes", "yes"),
    ({"type": "string", "maxLength": 3}, {"type": "string", "maxLength": 3}, "yes", "yes"),
    ({"type": "integer"}, {"type": "integer"}, 7, 7),
    ({"type": "boolean"}, {"type": "boolean"}, True, True),
    (MANY, MANY, ["red"], ["red"]),
    ({"type": "array", "items": {"type": "integer"}}, None, "[1, 2]", [1, 2]),
    (NESTED, None, '{"where": {"city": "Rome"}}', {"where": {"city": "Rome"}})])
async def test_an_answer_that_is_not_a_flat_object_is_the_one_field_of_a_form(
        live: Any, connect: Any, schema: Any, field: Any, filled: Any, meant: Any) -> None:
    user = User(types.ElicitResult(action="accept", content={"answer": filled}))
    working = asyncio.create_task(work(live.url, {"key": "q", "message": "What?", "schema": schema}))

    async with connect(live, "auto", elicitation_callback=user) as client:
        result = await client.call_tool("asyncgate.run_task", {
            "type": "deploy", "payload": 7, "agent_id": "ada", "wait_seconds": 30})
    await working

    [(_, form)] = user.asked
    shown = form["properties"]["answer"]
    assert shown["title"] == "Answer"
    assert field is None or shown == {"title": "Answer", **field}
    assert field is not None or (shown["type"], shown["description"][:5]) == ("string", "JSON,")
    assert result.structured_content["result"]["result"]["q"]["content"] == meant


async def test_a_refused_answer_is_asked_for_again_and_the_call_still_tells_its_task(live: Any, connect: Any) -> None:
    user = User(*[types.ElicitResult(action="accept", content={"window": when}) for when in ("never", "tonight")])
    working = asyncio.create_task(work(live.url, {"key": "when", "message": "When?", "schema": WINDOW}))

    async with connect(live, "auto", elicitation_callback=user) as client:
        result = await client.call_tool("asyncgate.run_task", {
            "type": "deploy", "payload": 7, "agent_id": "ada", "wait_seconds": 30})
    await working

    assert user.asked[0][0] == "When?"
    assert user.asked[1][0].startswith("When?\n\nRefused: content.window should be ")
    assert result.structured_content["result"]["result"]["when"]["content"] == {"window": "tonight"}


async def test_a_client_that_cannot_ask_waits_as_before(live: Any, connect: Any) -> None:
    working = asyncio.create_task(work(live.url, {"key": "when", "message": "When?"}))
    async with connect(live, "auto") as client:
        made = await client.call_tool("asyncgate.create_task", {"type": "deploy", "payload": 7, "agent_id": "ada"})
        task_id = made.structured_content["task_id"]
        async with asyncio.timeout(PATIENCE_SECONDS), AsyncHttp(live.url, TOKEN) as gate:
            while (await gate.call("get_task", task_id=task_id))["held"] is None:
                await gate.call("list_open_obligations", agent_id="eve", wait_seconds=0.05)
            seen = await client.call_tool("asyncgate.get_task", {"task_id": task_id, "wait_seconds": 0.1})
            await gate.call("answer_input", agent_id="ada", task_id=task_id, key="when", action="cancel")
    await working

    assert (seen.structured_content["status"], seen.structured_content["held"]) == ("queued", "input_required")


async def test_what_somebody_else_is_asked_is_not_asked_of_whoever_waits(live: Any, connect: Any) -> None:
    user = User()
    boss = {"kind": "human", "id": "boss"}
    working = asyncio.create_task(work(live.url, {"key": "when", "message": "When?", "to": boss}))
    async with connect(live, "auto", elicitation_callback=user) as client, AsyncHttp(live.url, TOKEN) as gate:
        waiting = asyncio.create_task(client.call_tool("asyncgate.run_task", {
            "type": "deploy", "payload": 7, "agent_id": "ada", "wait_seconds": 30}))
        while not (owed := (await gate.call("list_open_obligations", principal_kind="human", principal_id="boss",
                                            wait_seconds=30))["open_obligations"]):
            continue
        await gate.call("answer_input", principal_kind="human", principal_id="boss", task_id=owed[0]["task_id"],
                        key="when", action="cancel")
        result = await waiting
    await working

    assert (user.asked, result.structured_content["status"]) == ([], "succeeded")


async def test_a_user_who_answers_what_somebody_else_has_answered_meanwhile_gets_the_task(
        live: Any, connect: Any) -> None:
    class Late(User):
        """Who answers when an admin has answered already."""

        async def __call__(self, context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
            """Answer a form."""
            async with AsyncHttp(live.url, TOKEN) as gate:
                (owed,) = [row for row in (await gate.call("list_open_obligations", agent_id="ada"))["open_obligations"]
                           if row["receipt_type"] == "input.requested"]
                await gate.call("answer_input", agent_id="ada", task_id=owed["task_id"], key="when", action="cancel")
            return await super().__call__(context, params)
    working = asyncio.create_task(work(live.url, {"key": "when", "message": "When?"}))

    async with connect(live, "auto", elicitation_callback=Late(types.ElicitResult(action="decline"))) as client:
        result = await client.call_tool("asyncgate.run_task", {
            "type": "deploy", "payload": 7, "agent_id": "ada", "wait_seconds": 30})
    await working

    assert not result.is_error, result.content
    assert result.structured_content["result"]["result"]["when"]["action"] == "cancel"
