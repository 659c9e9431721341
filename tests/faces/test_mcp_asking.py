"""Questions over MCP: what a model can ask and answer with the tools that it is shown."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.anyio
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
