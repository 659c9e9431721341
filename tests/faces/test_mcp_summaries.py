"""What tools answer fits into the context of a model: short pages, large values cut, nothing said twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.identity_tools import mcp_call

pytestmark = pytest.mark.anyio

MOST = 20_000
BIG = {"text": "x" * 30_000}
eras = pytest.mark.parametrize("era", ["legacy", "modern"])


async def answer(served: Any, name: str, fields: dict[str, Any], era: str = "modern", query: str = "") -> Any:
    """Call a tool and return its result."""
    verb, path, message, headers = mcp_call(name, fields, era)
    told = await served.call(verb, path + query, message, headers=headers)
    return told.json()["result"]


def read(result: Any) -> Any:
    """Return what a tool says; insist that a host can show all of it."""
    assert not result["isError"], result
    [content] = result["content"]
    size = len(content["text"].encode())
    assert size <= MOST
    assert size + len(json.dumps(result.get("structuredContent", ""), ensure_ascii=False).encode()) <= 1.2 * MOST
    return json.loads(content["text"])


@pytest.fixture
async def full(served: Any) -> Any:
    """A gate with 60 tasks whose payloads, results and other texts are large."""
    long = "ü" * 2000
    for at in range(60):
        await served.post("/v1/tasks", {"type": "demo", "payload": {**BIG, "at": at}, "agent_id": "ada",
                                        "task_summary": long, "instructions": long, "success_criteria": [long]})
    for offer in (await served.post("/v1/leases/claim", {"worker_id": "w1", "max_tasks": 30}))["tasks"]:
        held = {"lease_id": offer["lease_id"], "worker_id": "w1"}
        await served.post(f"/v1/tasks/{offer['task_id']}/complete", {
            **held, "result": BIG, "result_summary": long, "artifacts": [{"uri": f"file:///{long}"}] * 4})
    return served


@eras
@pytest.mark.parametrize("limit", [None, 15, 200])
async def test_a_page_of_large_tasks_is_a_summary_and_goes_on(full: Any, era: str, limit: int | None) -> None:
    first = read(await answer(full, "list_tasks", {"agent_id": "ada", "limit": limit}, era))
    page = read(await answer(full, "list_tasks", {"agent_id": "ada", "limit": limit, "cursor": first["next_cursor"]},
                             era))

    assert 10 <= len(first["tasks"]) <= 20
    assert not {task["task_id"] for task in first["tasks"]} & {task["task_id"] for task in page["tasks"]}
    task = first["tasks"][0]
    assert (task["payload"]["cut"], task["payload"]["bytes"]) == (True, 30_022)
    assert "get_task" in first["cut"]


@pytest.mark.parametrize(("name", "items"), [
    ("list_open_obligations", "open_obligations"), ("list_receipts", "receipts"), ("list_obligations", "obligations")])
async def test_every_list_is_a_summary(full: Any, name: str, items: str) -> None:
    assert 10 <= len(read(await answer(full, name, {"principal_id": "ada"} if "owed" in name else {
        "agent_id": "ada"}))[items]) <= 20


async def test_the_history_of_a_task_is_a_summary(full: Any) -> None:
    done = (await full.get("/v1/tasks?status=succeeded&limit=1"))["tasks"][0]["task_id"]

    events = read(await answer(full, "get_task_history", {"task_id": done}))["events"]

    assert (events[0]["event_type"], len(events) > 3) == ("task.assigned", True)


async def test_one_task_is_whole_unless_it_is_too_large_and_its_resource_has_all_of_it(full: Any) -> None:
    large = (await full.get("/v1/tasks?limit=1"))["tasks"][0]["task_id"]
    small = (await full.post("/v1/tasks", {"type": "demo", "payload": "x" * 9000, "agent_id": "ada"}))["task_id"]

    cut, whole = [read(await answer(full, "get_task", {"task_id": task_id})) for task_id in (large, small)]
    again = await answer(full, "get_task", {"task_id": large}, query="?answers=full")

    assert cut["payload"]["begins"].startswith('{"text":')
    assert "asyncgate://tasks/" in cut["cut"]
    assert (whole["payload"], "cut" in whole) == ("x" * 9000, False)
    assert json.loads(again["content"][0]["text"]) == again["structuredContent"]
    assert again["structuredContent"]["payload"]["text"] == BIG["text"]


async def test_a_worker_is_given_its_payload_whole(served: Any) -> None:
    await served.post("/v1/tasks", {"type": "demo", "payload": BIG, "agent_id": "ada"})

    result = await answer(served, "lease_next", {"worker_id": "w1"})

    assert json.loads(result["content"][0]["text"])["tasks"][0]["payload"] == BIG
    assert "structuredContent" not in result


async def test_a_small_answer_is_the_one_of_rest(served: Any) -> None:
    await served.post("/v1/tasks", {"type": "demo", "payload": {"n": 1}, "agent_id": "ada"})

    result = await answer(served, "list_tasks", {"agent_id": "ada"})

    assert json.loads(result["content"][0]["text"]) == result["structuredContent"]
    assert result["structuredContent"]["tasks"] == (await served.get("/v1/tasks"))["tasks"]
