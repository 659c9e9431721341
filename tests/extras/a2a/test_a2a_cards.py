"""What a type declares is on the card of its agent, and decides what of a message is the payload."""

from __future__ import annotations

from typing import Any

import pytest

from tests.extras.a2a.conftest import Agent, said

pytestmark = pytest.mark.anyio
PAGES: dict[str, Any] = {"type": "object", "properties": {"page": {"type": "integer"}}, "required": ["page"]}


async def declare(agent: Agent, schema: Any) -> dict[str, Any]:
    """Declare what the agent takes; return its card."""
    await agent.served.post("/v1/types", {
        "type": agent.name, "worker_id": "w1", "description": "Read a page.", "payload_schema": schema,
        "result_schema": {"type": "string"}})
    answer = await agent.served.call("GET", f"{agent.path}/.well-known/agent-card.json", token=None)
    card: dict[str, Any] = answer.json()
    return card


async def test_a_card_says_what_is_declared(agent: Agent) -> None:
    card = await declare(agent, PAGES)
    [skill] = card["skills"]

    assert (card["description"], card["defaultInputModes"], card["defaultOutputModes"]) == (
        "Read a page.", ["application/json"], ["text/plain"])
    assert '"page"' in skill["description"]
    assert await agent.good("GetExtendedAgentCard") == card


@pytest.mark.parametrize(("schema", "part", "payload"), [
    (PAGES, {"data": {"page": 7}}, {"page": 7}), ({"type": "string"}, {"text": "page 7"}, "page 7")])
async def test_what_is_declared_is_the_payload_itself(agent: Agent, schema: Any, part: Any, payload: Any) -> None:
    await declare(agent, schema)
    task = await agent.begin(said(parts=[part]))

    assert (await agent.lease())["offer"]["payload"] == payload
    assert (await agent.task(task["id"]))["history"][0]["parts"][0].items() >= part.items()


async def test_a_type_that_takes_any_object_takes_whole_messages(agent: Agent) -> None:
    await declare(agent, {"type": "object"})
    await agent.begin(said("hello"))

    assert (await agent.lease())["offer"]["payload"]["text"] == "hello"


@pytest.mark.parametrize(("schema", "parts", "refusal"), [
    (PAGES, [{"text": "page 7"}], (-32005, "CONTENT_TYPE_NOT_SUPPORTED")),
    (PAGES, [{"data": {"page": 1}}, {"data": {"page": 2}}], (-32005, "CONTENT_TYPE_NOT_SUPPORTED")),
    (PAGES, [{"data": {"page": "seven"}}], (-32602, "payload.page")),
    ({"type": "string"}, [{"data": 1}], (-32005, "CONTENT_TYPE_NOT_SUPPORTED"))])
async def test_what_does_not_fit_is_refused(agent: Agent, schema: Any, parts: list[Any], refusal: tuple[int, str],
                                            ) -> None:
    await declare(agent, schema)
    async with agent.served.unchanged():
        assert await agent.refused("SendMessage", {"message": said(parts=parts)}) == refusal
