"""A client that waits is told of progress, if it names a token for that and takes a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from asyncgate.clients.http import AsyncHttp
from asyncgate.clients.in_process import InProcess
from asyncgate.parts.faces.changes import Changes
from asyncgate.parts.faces.mcp import progress
from asyncgate.parts.faces.mcp.progress import ProgressMeter
from asyncgate.parts.operating.pausing import Drain
from asyncgate.parts.operations import OPERATIONS
from tests.faces.test_mcp_refusals import CLIENTS, Open, open_session
from tests.support.identity_tools import mcp_call
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

__all__ = ["open_session"]

TOKEN = "a-token-for-tests"
PAGES = ["page 1", "page 2", "page 3"]
eras = pytest.mark.parametrize("era", ["legacy", "modern"])
# Of every operation that can wait, a call that waits for something that does not happen.
WAITING: dict[str, dict[str, Any]] = {
    "get_task": {}, "run_task": {"type": "demo", "payload": None, "agent_id": "ada"}, "lease_next": {"worker_id": "w2"},
    "list_receipts": {"agent_id": "ada", "receipt_type": "task.failed"}, "list_open_obligations": {"agent_id": "eve"},
    "drain_work": {"worker": "w1"}, "list_inputs": {}, "wait_tasks": {}, "read_output": {}}
OF_A_TASK = ("get_task", "list_inputs", "read_output")


def make_call(name: str, fields: dict[str, Any], face: str, token: Any = "t-1") -> tuple[str, str, bytes, Any]:
    """Return a call that names a token for its progress."""
    verb, target, body, headers = mcp_call(name, fields, face)
    if token is not None:
        body["params"]["_meta"] = {**body["params"].get("_meta", {}), "progressToken": token}
    return verb, target, json.dumps(body).encode(), [*headers, ("authorization", f"Bearer {TOKEN}")]


async def read_events(answer: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the messages of a stream."""
    async for line in answer.aiter_lines():
        if line.startswith("data:"):
            yield json.loads(line[5:])


# With the official clients.


@pytest.mark.parametrize("client", CLIENTS)
async def test_an_official_client_is_told_what_the_worker_reports(
        start: Any, open_session: Open, tmp_path: Path, client: str) -> None:
    live = await asyncio.to_thread(start, "max_wait_seconds=60", database=f"sqlite:///{tmp_path}/gate.db")
    session = await asyncio.to_thread(open_session, client, f"{live.url}/mcp")
    assert await session.say("connect") == {"connected": True}
    heard: list[Any] = []
    async with AsyncHttp(live.url, TOKEN) as rest, asyncio.timeout(PATIENCE_SECONDS):
        first = asyncio.create_task(session.say(
            "asyncgate.run_task", {"type": "demo", "payload": None, "agent_id": "ada", "wait_seconds": 60}, True))
        (offer,) = (await rest.call("lease_next", worker_id="w1", wait_seconds=60))["tasks"]
        held = {"task_id": offer["task_id"], "lease_id": offer["lease_id"], "worker_id": "w1"}
        for done, page in enumerate(PAGES, 1):
            await rest.call("report_progress", **held, progress={"done": done, "total": 3, "message": page})
            while not heard or heard[-1][2] != page:
                heard.append((await (session.hear() if heard else first))["told"])
        await rest.call("complete", **held, result={"n": 7})
        while "told" in (last := await session.hear()):
            heard.append(last["told"])

    amounts = [amount for amount, _, _ in heard]
    assert amounts == sorted(set(amounts))
    assert {page: total for _, total, page in heard if page in PAGES} == dict.fromkeys(PAGES, 3)
    assert not last.get("isError")
    assert json.loads(last["content"][0]["text"])["result"]["result"] == {"n": 7}


# What is streamed, and what is not.


@eras
@pytest.mark.parametrize("name", WAITING)
async def test_every_waiting_call_beats_until_its_client_goes(
        served: Any, monkeypatch: pytest.MonkeyPatch, name: str, era: str) -> None:
    monkeypatch.setattr(progress, "FIRST_SIGN_SECONDS", 0.0)
    monkeypatch.setattr(progress, "SIGN_SECONDS", 0.0)
    offer = await served.leased()
    if name == "list_inputs":
        await served.post(f"/v1/tasks/{offer['task_id']}/inputs", {
            "worker_id": "w1", "lease_id": offer["lease_id"], "key": "deploy", "message": "Deploy?"})
    if name == "wait_tasks":
        WAITING[name]["ids"] = [offer["task_id"]]
    fields = {**WAITING[name], **({"task_id": offer["task_id"]} if name in OF_A_TASK else {}), "wait_seconds": 30}
    verb, target, body, headers = make_call(name, fields, era)
    async with (asyncio.timeout(PATIENCE_SECONDS), httpx2.AsyncClient(transport=InProcess(served.gate)) as client,
                client.stream(verb, f"http://localhost{target}", content=body, headers=headers) as answer):
        events = read_events(answer)
        first, second = [(await anext(events)) for _ in range(2)]

    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-content-type-options"] == "nosniff"
    for event in (first, second):
        assert event["method"] == "notifications/progress"
        assert event["params"]["progressToken"] == "t-1"
        assert event["params"]["message"].startswith("waiting") or name == "get_task"
    assert second["params"]["progress"] > first["params"]["progress"]
    # The transport has waited until the call has ended: nothing waits and nobody follows any more.
    assert served.engine.waiting.count == 0
    assert not served.engine.find_extension(Changes).followers.here
    assert served.engine.find_extension(Drain) is None


def test_every_operation_that_waits_is_tried() -> None:
    assert {op.name for op in OPERATIONS.values() if "wait_seconds" in op.takes.__struct_fields__} == WAITING.keys()


@pytest.mark.parametrize(("face", "change"), [
    ("legacy", "no token"), ("modern", "no token"), ("legacy", "no stream"),
    ("modern", "no stream"), ("bare", "nothing"), ("legacy", "an answer at once"), ("modern", "an answer at once")])
async def test_other_calls_are_answered_with_json(
        served: Any, monkeypatch: pytest.MonkeyPatch, face: str, change: str) -> None:
    at_once = change == "an answer at once"
    monkeypatch.setattr(progress, "FIRST_SIGN_SECONDS", 60.0 if at_once else 0.0)
    task_id = (await served.leased())["task_id"]
    if at_once:
        await served.post(f"/v1/tasks/{task_id}/cancel", {"agent_id": "ada"})
    token = None if change == "no token" else 7
    fields = {"task_id": task_id, "wait_seconds": 60 if at_once else 0.05}
    verb, target, body, headers = make_call("get_task", fields, face, token)
    if change == "no stream":
        headers = [(name, "application/json" if name == "accept" else value) for name, value in headers]

    answer = await served.call(verb, target, body, headers=headers, token=None)

    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.json()["result"]["content"][0]["text"])["task_id"] == task_id


@eras
async def test_the_answer_is_the_last_event(served: Any, monkeypatch: pytest.MonkeyPatch, era: str) -> None:
    monkeypatch.setattr(progress, "FIRST_SIGN_SECONDS", 0.0)
    task_id = (await served.leased())["task_id"]
    verb, target, body, headers = make_call("get_task", {"task_id": task_id, "wait_seconds": 30}, era)
    async with (asyncio.timeout(PATIENCE_SECONDS), httpx2.AsyncClient(transport=InProcess(served.gate)) as client,
                client.stream(verb, f"http://localhost{target}", content=body, headers=headers) as answer):
        events = read_events(answer)
        first = await anext(events)
        await served.post(f"/v1/tasks/{task_id}/cancel", {"agent_id": "ada"})
        *_, last = [event async for event in events]

    assert first["method"] == "notifications/progress"
    assert last["id"] == 1
    assert json.loads(last["result"]["content"][0]["text"])["status"] == "canceled"


async def test_nothing_is_told_to_a_credential_that_is_revoked_meanwhile(
        served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_SIGN_SECONDS", 0.0)
    key = await served.post("/v1/keys", {"name": "ada", "principal_kind": "agent", "principal_id": "ada"})
    offer = await served.leased()
    held = {"lease_id": offer["lease_id"], "worker_id": "w1"}
    verb, target, body, headers = make_call("get_task", {"task_id": offer["task_id"], "wait_seconds": 30}, "modern")
    headers[-1] = ("authorization", f"Bearer {key['api_key']}")
    async with (asyncio.timeout(PATIENCE_SECONDS), httpx2.AsyncClient(transport=InProcess(served.gate)) as client,
                client.stream(verb, f"http://localhost{target}", content=body, headers=headers) as answer):
        events = read_events(answer)
        await anext(events)
        await served.post(f"/v1/keys/{key['key']['key_id']}/revoke")
        await served.post(f"/v1/tasks/{offer['task_id']}/progress", {**held, "progress": "a secret"})
        await served.post(f"/v1/tasks/{offer['task_id']}/complete", {**held, "result": "a secret"})
        rest = [event async for event in events]

    assert rest[-1]["result"]["isError"]
    assert "a secret" not in json.dumps(rest)


# What is told.


@pytest.mark.parametrize(("report", "amount", "total", "message"), [
    ({"done": 3, "total": 9, "message": "third"}, 3, 9, "third"), ({"percent": 40}, 40, 100, '{"percent":40}'),
    ({"page": 3, "total": 9}, 3, 9, '{"page":3,"total":9}'), ("half way", 0, None, "half way"),
    ({"progress": "half way", "checkpoint": {"at": 7}}, 0, None, "half way"), (0.5, 0.5, None, "0.5"),
    ({"step": "wash"}, 0, None, '{"step":"wash"}'), ([1, 2], 0, None, "[1,2]"), (True, 0, None, "true"),
    ({"done": 5, "total": 3}, 5, 5, '{"done":5,"total":3}'), ({"done": -1, "total": None}, 0, None, None),
    ({"done": 1e300}, 0, None, None), ({"pages_done": 2}, 0, None, None), ("x" * 2000, 0, None, "x" * 500)])
def test_numbers_and_words_of_a_report_are_told(report: Any, amount: float, total: float | None, message: Any) -> None:
    told = ProgressMeter().measure(report, 1)

    assert (told["progress"], told.get("total")) == (amount, total)
    assert message in (None, told["message"])


def test_progress_rises_whatever_the_worker_says() -> None:
    meter = ProgressMeter()
    told = [meter.rise("waiting"), meter.measure({"done": 0, "total": 4}, 1), meter.measure({"done": 4, "total": 4}, 2),
            meter.rise("waiting: queued"), meter.measure({"done": 1, "total": 4}, 3), meter.measure("more", 4),
            meter.measure("more", 4), meter.measure(1 / 3, 5), meter.measure(7.3333333, 6), meter.rise("waiting"),
            meter.measure({"done": 1e9}, 7), meter.rise("waiting")]

    amounts = [message["progress"] for message in told]
    assert amounts == sorted(set(amounts))
    assert [amounts[at] for at in (2, 5, 8, 10)] == [4, 5, 7.3333333, 1e9]
    assert all(message["progress"] <= message.get("total", message["progress"]) for message in told)
