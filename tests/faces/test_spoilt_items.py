"""A string that no database stores refuses the item of a batch that has it; the other items are carried out."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from asyncgate import Engine
from asyncgate.clients.finite import encode_request
from asyncgate.commands.cli import JSON
from asyncgate.parts.model.screening import mark_spoilt
from asyncgate.parts.operations import OPERATIONS

pytestmark = pytest.mark.anyio

SPOILT = {
    "NUL": b'"a\\u0000b"', "NUL in a name": b'{"a":[1,{"b\\u0000":1}]}', "half a pair": b'"a\\ud800"',
    "the other half": b'{"a":"\\ud83d\\ude00\\udc00x"}', "bytes": b'{"a":["x\xff\xfey"]}', "a cut character": b'"\xc3"',
    "depth": b"[" * 100 + b'"]"' + b"]" * 100, "bytes behind a backslash": b'{"a":"\\\\\xff"}'}
PLACES = {"create_tasks": "tasks payload", "complete_tasks": "tasks result", "report_schedule": "schedules next_run_at",
          "import_receipts": "receipts body"}
META = (b',"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28",'
        b'"io.modelcontextprotocol/clientInfo":{"name":"t","version":"1"},'
        b'"io.modelcontextprotocol/clientCapabilities":{}}')
HEADERS = [("mcp-protocol-version", "2026-07-28"), ("mcp-method", "tools/call"),
           ("accept", "application/json, text/event-stream")]


async def send(served: Any, face: str, name: str, ask: bytes) -> Any:
    """Call an operation with a request of these bytes; return its answer."""
    if face == "rest":
        answer = await served.call("POST", OPERATIONS[name].rest[0][1], ask)
        assert answer.status == 200, answer
        return answer.json()
    body = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"asyncgate.%b","arguments":%b%b}}' % (
        name.encode(), ask, META if face == "mcp" else b"")
    headers = [*HEADERS, ("mcp-name", f"asyncgate.{name}")] if face == "mcp" else []
    result = (await served.call("POST", "/mcp", body, headers=headers)).json()["result"]
    return json.loads(result["content"][0]["text"]) if "content" in result else result


async def make_good_item(served: Any, name: str) -> bytes:
    """Return an item that its operation carries out."""
    if name == "create_tasks":
        return b'{"type":"demo","payload":1}'
    await served.post("/v1/tasks", {"type": "schedule.create", "payload": 1})
    if name == "import_receipts":
        return json.dumps((await served.get("/v1/export/receipts"))["receipts"][0]).encode()
    (offer,) = (await served.post("/v1/leases/claim", {"worker_id": "w"}))["tasks"]
    held = {"task_id": offer["task_id"], "lease_id": offer["lease_id"], "worker_id": "w"}
    if name == "complete_tasks":
        return json.dumps(held).encode()
    await served.post("/v1/receipts", {**held, "receipt_type": "schedule.created", "schedule_id": "s"})
    return b'{"schedule_id":"s","enabled":true}'


@pytest.mark.parametrize("face", ["rest", "mcp", "json-rpc"])
@pytest.mark.parametrize("name", PLACES)
async def test_what_cannot_be_stored_refuses_its_item_alone_and_the_refusal_names_the_member(
        served: Any, name: str, face: str) -> None:
    items, member = PLACES[name].split()
    for value in SPOILT.values():
        good = await make_good_item(served, name)
        bad = b'%b,"%b":%b}' % (good[:-1], member.encode(), value)
        worker = b'"worker_id":"w",' if name == "report_schedule" else b""

        answer = await send(served, face, name, b'{%b"%b":[%b,%b]}' % (worker, items.encode(), bad, good))

        (refusal,) = answer["refused"] if "refused" in answer else [
            item["error"] for item in answer["results"] if "error" in item]
        assert refusal["message"].startswith(f"{items}[0].{member}")
        assert refusal.get("error") == ("payload_too_deep" if value[:1] == b"[" else "invalid_request") or (
            refusal["reason"], refusal["receipt_id"]) == ("invalid", json.loads(good)["receipt_id"])


@pytest.mark.parametrize("member", ['"created_by":{"id":"\\ud800"}', '"note":"\\u0000"', '"a\\u0000":1'])
async def test_what_cannot_be_stored_outside_of_the_items_refuses_the_batch(served: Any, member: str) -> None:
    body = b'{"tasks":[{"type":"a","payload":1}],%b}' % member.encode()
    async with served.unchanged():
        answer = await served.call("POST", "/v1/tasks/batch", body)

    assert (answer.status, answer.json()["error"]) == (400, "invalid_request")


async def test_half_of_a_surrogate_pair_is_not_called_truncated(served: Any) -> None:
    whole, half = [(await served.call("POST", "/v1/tasks", b'{"type":"demo","payload":"\\ud83d%b' % rest)).json()
                   for rest in (b'\\ude00"}', b'"}')]

    assert whole["status"] == "queued"
    assert "surrogate pair" in half["message"]


async def test_a_text_that_only_looks_like_half_of_a_pair_is_stored(served: Any) -> None:
    made = await served.post("/v1/tasks/batch", b'{"tasks":[{"type":"demo","payload":"C:\\\\ud800 \\\\u0000"}]}')

    (item,) = made["results"]
    assert (await served.get(f"/v1/tasks/{item['task_id']}"))["payload"] == "C:\\ud800 \\u0000"


async def test_a_schedule_whose_time_cannot_be_shown_is_refused_alone(served: Any) -> None:
    await make_good_item(served, "report_schedule")

    answer = await served.post("/v1/schedules/report", {"worker_id": "w", "schedules": [
        {"schedule_id": "s", "next_run_at": "1950-01-01T00:00:00Z"}, {"schedule_id": "s", "enabled": False}]})

    assert [refusal["message"].partition(":")[0] for refusal in answer["refused"]] == ["s"]
    assert [row["enabled"] for row in (await served.get("/v1/schedules"))["schedules"]] == [False]


async def test_a_fault_in_one_item_spares_the_others(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    create = Engine.create_task

    def create_or_break(engine: Engine, work: Any, caller: Any, ask: Any) -> Any:
        made = create(engine, work, caller, ask)
        return made if ask.type == "good" else 1 / 0
    monkeypatch.setattr(Engine, "create_task", create_or_break)

    made = await served.post("/v1/tasks/batch", {"tasks": [{"type": name, "payload": 1} for name in ("bad", "good")]})

    assert [item.get("error", {}).get("error") for item in made["results"]] == ["internal_error", None]
    assert len((await served.get("/v1/tasks"))["tasks"]) == 1


def test_the_client_and_the_command_line_send_such_an_item() -> None:
    sent = encode_request({"tasks": [{"payload": "\ud800"}, {"payload": msgspec.Raw(b'{"a":1}')}]})
    item = '[{"payload":"\\ud800"}]'

    assert json.loads(sent) == {"tasks": [{"payload": "\ud800"}, {"payload": {"a": 1}}]}
    assert bytes(JSON.convert(item, None, None)) == item.encode()


def test_marks_change_nothing_that_can_be_stored() -> None:
    text = '{"a":["\\u00e9\\ud83d\\ude00\\\\ud800\\"[[[",{"b":[]}],"é":"😀"}'.encode()

    assert mark_spoilt(text) == text
