"""Whoever creates tasks learns which types somebody serves, and at once that nobody serves one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.identity_tools import House, mcp_call, rest_call

pytestmark = pytest.mark.anyio

faces = pytest.mark.parametrize("face", ["rest", "legacy", "modern", "bare"])


async def say(served: Any, name: str, fields: dict[str, Any], face: str) -> Any:
    """Call an operation over a face; return its reply, as a model reads it."""
    verb, target, body, headers = rest_call(name, fields) if face == "rest" else mcp_call(name, fields, face)
    answer = (await served.call(verb, target, body, headers=headers)).json()
    return answer if face == "rest" else json.loads(answer["result"]["content"][0]["text"])


@faces
async def test_a_task_of_a_type_that_nobody_serves_says_so_with_the_next_step(served: Any, face: str) -> None:
    await served.post("/v1/leases/claim", {"worker_id": "w1", "accept_types": ["echo", "sum"]})

    good, typo = [await say(served, "create_task", {"type": type, "payload": 1, "agent_id": "ada"}, face)
                  for type in ("echo", "ecko")]

    assert "warnings" not in good
    [warning] = typo["warnings"]
    assert f"explain_task with task_id {typo['task_id']}" in warning
    assert "type ecko" in warning
    assert "echo and sum" in warning


@faces
async def test_run_task_and_batches_say_it_too(served: Any, face: str) -> None:
    await served.post("/v1/leases/claim", {"worker_id": "w1", "accept_types": ["echo"], "capabilities": ["fast"]})

    ran = await say(served, "run_task", {"type": "ecko", "payload": 1, "agent_id": "ada", "wait_seconds": 0}, face)
    batch = await say(served, "create_tasks", {"agent_id": "ada", "tasks": [
        {"type": "echo", "payload": 1, "requirements": {"capabilities": need}} for need in (["fast"], ["slow"])]}, face)

    assert ran["task_id"] in ran["warnings"][0]
    [warning] = batch["warnings"]
    assert batch["results"][1]["task_id"] in warning


async def test_where_no_worker_has_asked_lately_nobody_is_warned(served: Any) -> None:
    assert "warnings" not in await served.post("/v1/tasks", {"type": "ecko", "payload": 1, "agent_id": "ada"})


async def test_a_worker_that_takes_any_type_serves_all(served: Any) -> None:
    await served.post("/v1/leases/claim", {"worker_id": "w1"})

    assert "warnings" not in await served.post("/v1/tasks", {"type": "anything", "payload": 1, "agent_id": "ada"})


@faces
async def test_a_payload_in_quotes_is_kept_as_it_is_and_warned_of(served: Any, face: str) -> None:
    await served.post("/v1/leases/claim", {"worker_id": "w1"})

    warned, text, value = [await say(served, "create_task", {"type": "x", "payload": payload, "agent_id": "ada"}, face)
                           for payload in ('{"page": 3}', "{no JSON", {"page": "[3]"})]

    assert "without quotes" in warned["warnings"][0]
    assert (await served.get(f"/v1/tasks/{warned['task_id']}"))["payload"] == '{"page": 3}'
    assert not text.keys() & value.keys() & {"warnings"}


async def test_an_agent_sees_the_types_that_workers_of_its_tenant_serve_and_not_who_they_are(serve: Any) -> None:
    house = House(await serve())
    agent = await house.key("agent", "ada")
    for worker in ("w1", "w2"):
        await house.good("lease_next", {"worker_id": worker, "accept_types": ["echo"], "capabilities": ["fast"]})
    await house.good("lease_next", {"worker_id": "w3"})

    told = await house.good("list_types", token=agent)

    assert [(row["type"], row["capabilities"], row["workers"]) for row in told["types"]] == [
        (None, [], 1), ("echo", ["fast"], 2)]
    assert "w1" not in json.dumps(told)


async def test_types_of_other_tenants_are_not_shown(serve: Any) -> None:
    house = House(await serve())
    other = await house.admin_of("6f1c2b9e-0000-4000-8000-00000000000a")
    await house.good("lease_next", {"worker_id": "w1", "accept_types": ["secret"]})

    assert (await house.good("list_types", token=other))["types"] == []
    await house.good("lease_next", {"worker_id": "w2", "accept_types": ["own"]}, token=other)
    made = await house.good("create_task", {"type": "x", "payload": 1}, token=other)
    assert "secret" not in made["warnings"][0]
