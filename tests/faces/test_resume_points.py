"""A place to go on from is one that the gate gave, or it is refused; and small forms of requests that peers use."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from asyncgate import Operation
from asyncgate.parts.operations import OPERATIONS

pytestmark = pytest.mark.anyio

PLACES = ("cursor", "since_receipt_id", "after")
POINTS = [(op, name) for op in OPERATIONS.values() for name in PLACES
          if name in op.takes.__struct_fields__ and op.rest[0][0] == "GET"
          and op.name not in ("list_seals", "read_output")]      # where it is a number, and 0 the beginning


@pytest.mark.parametrize(("op", "name"), POINTS, ids=[f"{op.name} {name}" for op, name in POINTS])
async def test_a_place_that_the_gate_never_gave_is_refused(served: Any, op: Operation, name: str) -> None:
    made = await served.post("/v1/tasks", {"type": "x", "payload": 1, "agent_id": "ada"})
    known = {"task_id": made["task_id"], "agent_id": "ada", "worker_id": "w", "webhook_id": "x", "kind": "Task"}
    path = op.rest[0][1]
    for field in op.takes.needed:
        path = path.replace(f"{{{field}}}", known.get(field, "x"))
    who = "agent_id=ada&" if "agent_id" in op.takes.__struct_fields__ else ""

    for place in ("garbage", "0", "", "00000000-0000-7000-8000-000000000000"):
        answer = await served.call("GET", f"{path}?{who}{name}={quote(place)}")
        assert answer.status in (400, 404, 503), (place, answer)
        if answer.status == 400:
            assert answer.json()["error"] in ("invalid_cursor", "invalid_request")
        else:       # what it is about does not exist, or is not here
            assert op.name.startswith("list_deliver") or "archive" in op.name


async def test_an_export_goes_on_behind_a_receipt_of_the_tenant(served: Any) -> None:
    for _ in range(2):
        await served.post("/v1/tasks", {"type": "x", "payload": 1})
    first, second = (await served.get("/v1/export/receipts"))["receipts"]

    (rest,) = (await served.get(f"/v1/export/receipts?after={first['receipt_id']}"))["receipts"]
    end = await served.get(f"/v1/export/receipts?after={second['receipt_id']}")

    assert (rest["receipt_id"], end["receipts"]) == (second["receipt_id"], [])


@pytest.mark.parametrize("text", ['{"principal_kind":"agent","principal_id":"ada"}', '{"kind":"agent","id":"ada"}',
                                  "agent:ada", "ada"])
async def test_a_list_takes_a_creator_in_the_forms_of_the_specification(served: Any, text: str) -> None:
    for kind, id in (("agent", "ada"), ("agent", "bob")):
        await served.post("/v1/tasks", {"type": "x", "payload": 1, "principal_kind": kind, "principal_id": id})

    (task,) = (await served.get(f"/v1/tasks?created_by={quote(text)}"))["tasks"]
    preview = await served.post("/v1/bulks/preview", {"action": "cancel", "created_by": text})

    assert (task["created_by"]["id"], preview["matches"]) == ("ada", 1)


@pytest.mark.parametrize("text", ['{"principal_kind":"agent"}', "{", '{"kind":"king","id":"x"}', "human:ada"])
async def test_a_creator_in_half_of_a_form_is_refused_and_another_kind_finds_nothing(served: Any, text: str) -> None:
    await served.post("/v1/tasks", {"type": "x", "payload": 1, "agent_id": "ada"})

    answer = await served.call("GET", f"/v1/tasks?created_by={quote(text)}")

    assert (answer.status, answer.json().get("tasks")) == ((200, []) if text == "human:ada" else (400, None))


@pytest.mark.parametrize("text", ["2.0", "1e1", "2.", " 2", "+2", "two", ""])
async def test_an_integer_in_a_query_is_digits_as_in_a_body(served: Any, text: str) -> None:
    answer = await served.call("GET", f"/v1/tasks?limit={quote(text)}")

    assert (answer.status, answer.json()["error"]) == (400, "invalid_request")
    assert "$.limit" in answer.json()["message"]
    assert len((await served.get("/v1/tasks?limit=2"))["tasks"]) == 0


@pytest.mark.parametrize("path", ["/v1/tasks", "/mcp"])
async def test_a_byte_order_mark_before_a_body_is_ignored(served: Any, path: str) -> None:
    task = {"type": "x", "payload": 1}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {
        "name": "asyncgate.create_task", "arguments": task}}

    body = msgspec.json.encode(task if path == "/v1/tasks" else call)
    answer = await served.call("POST", path, b"\xef\xbb\xbf" + body)

    assert answer.status == 200
    assert len((await served.get("/v1/tasks"))["tasks"]) == 1


async def test_an_id_of_the_gate_is_the_same_in_upper_case(served: Any) -> None:
    offer = await served.leased()
    task, lease = offer["task_id"].upper(), offer["lease_id"].upper()
    held = {"worker_id": "w1", "lease_id": lease, "task_id": task}

    assert (await served.get(f"/v1/tasks/{task}"))["task_id"] == offer["task_id"]
    await served.post("/v1/leases/renew", held)
    assert (await served.call("GET", "/v1/tasks", headers=[("x-tenant-id", served.tenant_id.upper())])).status == 200
    (done,) = (await served.post("/v1/tasks/complete-batch", {"tasks": [held]}))["results"]
    assert done["status"] == "succeeded"
    receipt = offer["obligation_receipt_id"].upper()
    assert (await served.get(f"/v1/receipts/{receipt}"))["receipt_id"] == offer["obligation_receipt_id"]


async def test_a_name_of_the_caller_keeps_its_case(served: Any) -> None:
    name = "0198C5A0-7D7E-7C3F-9A51-2F7B0C6D1E42"
    made = await served.post("/v1/tasks", {"type": "x", "payload": 1, "agent_id": name, "idempotency_key": name})

    task = await served.get(f"/v1/tasks/{made['task_id']}")
    assert (task["created_by"]["id"], task["idempotency_key"]) == (name, name)
