"""Streams of A2A over a real server: one order for all, an end at an end or a question, and nothing lost in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from asyncgate.clients import Job, Worker
from tests.conftest import TOKEN, Live
from tests.extras.a2a.conftest import said
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
SETTINGS = ("a2a.agents=scan", "lease_sweep_interval_seconds=0.2", "expiry_jitter_seconds=0", "restart_grace_seconds=0")


class Client:
    """A client of an agent, and a worker of it that does what a test says."""

    def __init__(self, gate: Live) -> None:
        self.http = httpx2.AsyncClient(base_url=gate.url, timeout=PATIENCE_SECONDS, trust_env=False,
                                       headers={"authorization": f"Bearer {TOKEN}"})

    async def events(self, method: str, params: dict[str, Any]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield the events of a stream: the kind of each, and what it says."""
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        async with self.http.stream("POST", "/a2a/scan/rpc", json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream"), await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data:"):
                    [(kind, event)] = json.loads(line.removeprefix("data:"))["result"].items()
                    yield kind, event

    def gather(self, method: str, params: dict[str, Any]) -> tuple[list[Any], asyncio.Task[None]]:
        """Return where the events of a stream arrive, and what ends with it."""
        arrived: list[Any] = []

        async def read() -> None:
            async for event in self.events(method, params):
                arrived.append(event)
        return arrived, asyncio.create_task(read())

    async def call(self, path: str, **body: Any) -> Any:
        """Call the gate as its worker."""
        answer = await self.http.post(path, json={"worker_id": "w1", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def lease(self, seconds: int = 60) -> dict[str, Any]:
        """Lease the next task."""
        while not (offers := (await self.call("/v1/leases/claim", lease_ttl_seconds=seconds, wait_seconds=5))["tasks"]):
            pass
        return {"task_id": offers[0]["task_id"], "lease_id": offers[0]["lease_id"]}

    async def under(self, lease: dict[str, Any], verb: str, **more: Any) -> Any:
        """Do something under a lease."""
        return await self.call(f"/v1/tasks/{lease['task_id']}/{verb}", **lease, **more)

    async def begin(self) -> str:
        """Send a message without waiting; return the id of the task."""
        task = await self.call("/a2a/scan/v1/message:send", message=said(), configuration={"returnImmediately": True})
        task_id: str = task["task"]["id"]
        return task_id


async def count(arrived: list[Any], least: int) -> None:
    """Wait until so many events have arrived."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(arrived) < least:     # noqa: ASYNC110  # they arrive in a task beside
            await asyncio.sleep(0.01)


def states(events: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The kinds of events, with the states that they tell."""
    return [event["status"]["state"].removeprefix("TASK_STATE_") if "status" in event else kind
            for kind, event in events]


@pytest.fixture
async def connect_to() -> AsyncIterator[Callable[[Live], Client]]:
    """Return what connects a client to a gate."""
    clients: list[Client] = []

    def connect_to(gate: Live) -> Client:
        clients.append(Client(gate))
        return clients[-1]
    yield connect_to
    for client in clients:
        await client.http.aclose()


@pytest.fixture
async def client(start: Callable[..., Live], connect_to: Callable[[Live], Client]) -> Client:
    """Return a client of a gate."""
    return connect_to(start(*SETTINGS))


async def test_a_stream_begins_with_the_task_and_ends_with_its_result(client: Client) -> None:
    arrived, reading = client.gather("SendStreamingMessage", {"message": said()})
    lease = await client.lease()
    await client.under(lease, "complete", result="hello")
    await reading

    assert states(arrived) == ["SUBMITTED", "WORKING", "artifactUpdate", "COMPLETED"]
    assert [kind for kind, _ in arrived] == ["task", "statusUpdate", "artifactUpdate", "statusUpdate"]
    assert arrived[2][1]["artifact"]["parts"] == [{"text": "hello", "mediaType": "text/plain"}]
    assert {event.get("taskId", event.get("id")) for _, event in arrived} == {lease["task_id"]}


async def test_a_stream_ends_when_the_task_begins_to_ask_and_one_that_is_opened_then_stays_open(client: Client) -> None:
    arrived, reading = client.gather("SendStreamingMessage", {"message": said()})
    lease = await client.lease()
    await client.under(lease, "inputs", key="page", message="Which page?")
    await reading
    later, waiting = client.gather("SubscribeToTask", {"id": lease["task_id"]})
    await count(later, 1)
    answer = said("7", taskId=lease["task_id"])
    told, going_on = client.gather("SendStreamingMessage", {"message": answer})
    await count(told, 1)
    await client.under(await client.lease(), "complete", result="done")
    await asyncio.gather(waiting, going_on)

    assert states(arrived)[-1] == "INPUT_REQUIRED"
    assert arrived[-1][1]["status"]["message"]["parts"][0]["text"] == "Which page?"
    assert states(later) == ["INPUT_REQUIRED", "WORKING", "WORKING", "artifactUpdate", "COMPLETED"]
    assert later[2:] == told[1:]        # one order for all: the answer, the next worker, the end


async def test_all_streams_of_a_task_have_the_same_events(client: Client) -> None:
    task_id = await client.begin()
    streams = [client.gather("SubscribeToTask", {"id": task_id}) for _ in range(4)]
    for arrived, _ in streams:
        await count(arrived, 1)
    lease = await client.lease()
    await client.under(lease, "fail", error={"code": "x", "message": "again"}, retryable=True, retry_after_seconds=0)
    await client.under(await client.lease(), "fail", error={"code": "rejected", "message": "no"})
    await asyncio.gather(*[reading for _, reading in streams])

    assert states(streams[0][0]) == ["SUBMITTED", "WORKING", "WORKING", "WORKING", "REJECTED"]
    assert all(arrived == streams[0][0] for arrived, _ in streams)


async def test_a_stream_of_a_message_tells_everything_from_its_beginning_also_when_all_has_happened(
        client: Client) -> None:
    async def send(text: str, **more: Any) -> list[Any]:
        arrived, reading = client.gather("SendStreamingMessage", {"message": said(text, **more)})
        await reading
        return arrived
    client.http.headers["idempotency-key"] = "k"
    _, reading = client.gather("SendStreamingMessage", {"message": said("do it")})
    lease = await client.lease()
    await client.under(lease, "inputs", key="page", message="Which page?")
    await reading
    answer = {"text": "7", "taskId": lease["task_id"], "metadata": {"key": "page"}}
    _, reading = client.gather("SendStreamingMessage", {"message": said(**answer)})
    await client.under(await client.lease(), "complete", result="done")
    await reading

    assert states(await send("do it")) == ["SUBMITTED", "WORKING", "INPUT_REQUIRED"]
    assert states(await send(**answer)) == ["WORKING", "WORKING", "artifactUpdate", "COMPLETED"]


async def test_output_is_one_artifact_in_one_order_with_the_states_whenever_a_stream_begins(client: Client) -> None:
    early, reading = client.gather("SendStreamingMessage", {"message": said()})
    lease = await client.lease()
    await client.under(lease, "output", chunks=["Chap", "ter 1"])
    await count(early, 4)
    late, reading_late = client.gather("SubscribeToTask", {"id": lease["task_id"]})
    await count(late, 1)
    await client.under(lease, "fail", error={"message": "again"}, retryable=True, retry_after_seconds=0)
    lease = await client.lease()
    await client.under(lease, "output", chunks=[{"page": 1}])
    await client.under(lease, "complete", result="done")
    await asyncio.gather(reading, reading_late)
    read = (await client.http.get(f"/a2a/scan/v1/tasks/{lease['task_id']}")).json()

    assert states(early) == ["SUBMITTED", "WORKING", "artifactUpdate", "artifactUpdate", "WORKING", "WORKING",
                             "artifactUpdate", "artifactUpdate", "COMPLETED"]
    assert [event.get("append") for kind, event in early if kind == "artifactUpdate"] == [False, True, True, None]
    assert late[0][1]["artifacts"][0]["parts"] == [{"text": "Chapter 1", "mediaType": "text/plain"}]
    assert late[1:] == early[4:]
    assert [(artifact["artifactId"], len(artifact["parts"])) for artifact in read["artifacts"]] == [
        ("output", 2), ("result", 1)]


async def test_the_log_of_a_worker_is_not_for_clients(client: Client) -> None:
    arrived, reading = client.gather("SendStreamingMessage", {"message": said()})
    lease = await client.lease()
    await client.under(lease, "output", chunks=["password=x"], stream="log")
    await client.under(lease, "output", chunks=["hello"])
    await client.under(lease, "complete", result="done")
    await reading
    read = (await client.http.get(f"/a2a/scan/v1/tasks/{lease['task_id']}")).json()

    assert "password" not in str(arrived) + str(read)
    assert [artifact["parts"][0]["text"] for artifact in read["artifacts"]] == ["hello", "done"]


async def test_a_stream_of_a_message_has_as_much_history_as_is_wanted(client: Client) -> None:
    arrived, reading = client.gather("SendStreamingMessage", {
        "message": said(), "configuration": {"historyLength": 0}})
    await client.under(await client.lease(), "complete", result="done")
    await reading

    assert "history" not in arrived[0][1]


async def test_a_task_that_has_ended_has_no_stream_and_a_foreign_one_neither(client: Client) -> None:
    task_id = await client.begin()
    await client.call(f"/a2a/scan/v1/tasks/{task_id}:cancel")
    ended = await client.http.get(f"/a2a/scan/v1/tasks/{task_id}:subscribe")
    none = await client.http.post("/a2a/scan/v1/tasks/none:subscribe")

    assert (ended.status_code, ended.json()["error"]["details"][0]["reason"]) == (400, "UNSUPPORTED_OPERATION")
    assert (none.status_code, none.json()["error"]["details"][0]["reason"]) == (404, "TASK_NOT_FOUND")


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_whoever_comes_back_after_a_kill_of_gate_and_worker_misses_nothing(
        start: Callable[..., Live], connect_to: Callable[[Live], Client], fresh: Any, kind: str) -> None:
    database = await fresh(kind)
    gate = start(*SETTINGS, database=database)
    client = connect_to(gate)
    task_id = await client.begin()
    arrived, reading = client.gather("SubscribeToTask", {"id": task_id})
    await count(arrived, 1)
    await client.lease(seconds=1)
    await count(arrived, 2)
    gate.kill()
    await asyncio.gather(reading, return_exceptions=True)
    client = connect_to(start(*SETTINGS, database=database, port=gate.port))
    again, reading = client.gather("SubscribeToTask", {"id": task_id})
    await count(again, 1)       # else the task may end before the stream has begun, and there is none of an ended task
    await client.under(await client.lease(), "complete", result="hello")
    await reading

    assert states(arrived)[:2] == ["SUBMITTED", "WORKING"]
    assert states(again)[-2:] == ["artifactUpdate", "COMPLETED"]
    assert "SUBMITTED" not in states(again)


async def test_streams_at_two_gates_have_the_same_events(
        start: Callable[..., Live], connect_to: Callable[[Live], Client], fresh: Any) -> None:
    database = await fresh("postgres")
    here, there = [connect_to(start(*SETTINGS, database=database)) for _ in range(2)]
    task_id = await here.begin()
    streams = [client.gather("SubscribeToTask", {"id": task_id}) for client in (here, there, here)]
    for arrived, _ in streams:
        await count(arrived, 1)
    lease = await there.lease()
    await here.under(lease, "output", chunks=["a", "b"])
    await there.under(lease, "fail", error={"message": "again"}, retryable=True, retry_after_seconds=0)
    lease = await here.lease()
    await there.under(lease, "output", chunks=["c"])
    await here.under(lease, "complete", result="done")
    await asyncio.gather(*[reading for _, reading in streams])

    assert states(streams[0][0]) == ["SUBMITTED", "WORKING", "artifactUpdate", "artifactUpdate", "WORKING", "WORKING",
                                     "artifactUpdate", "artifactUpdate", "COMPLETED"]
    assert all(arrived == streams[0][0] for arrived, _ in streams)


async def test_what_a_worker_says_and_gives_is_told_as_messages_and_artifacts(client: Client) -> None:
    def work(payload: Any, job: Job) -> str:
        job.message("I begin", {"page": 1})
        job.artifact("a", name="report")
        job.artifact("b", name="report", append=True)
        job.print("words")
        job.artifact({"url": "https://example.com/x", "mediaType": "image/png"}, name="picture")
        job.artifact("c", name="report")
        return "done"

    task_id = await client.begin()
    arrived, reading = client.gather("SubscribeToTask", {"id": task_id})
    await count(arrived, 1)
    worker = Worker(str(client.http.base_url).rstrip("/"), "w1", token=TOKEN, state=None, declare=False)
    worker.task("scan")(work)
    working = asyncio.create_task(worker.serve())
    await reading
    worker.stop()
    await working
    ended = (await client.http.get(f"/a2a/scan/v1/tasks/{task_id}")).json()["artifacts"]

    told = [(event["artifact"]["artifactId"], event["append"], event["artifact"]["parts"][0])
            for kind, event in arrived if kind == "artifactUpdate" and "append" in event]
    said_parts = [event["status"]["message"]["parts"] for kind, event in arrived
                  if kind == "statusUpdate" and "message" in event["status"]]
    words = {"text": "words\n", "mediaType": "text/plain"}
    picture = {"url": "https://example.com/x", "mediaType": "image/png"}
    assert said_parts == [[{"text": "I begin"}, {"data": {"page": 1}}]]
    assert told == [("report", False, {"text": "a"}), ("report", True, {"text": "b"}), ("output", False, words),
                    ("picture", False, picture), ("report", False, {"text": "c"})]
    assert [(artifact["artifactId"], artifact["parts"]) for artifact in ended][:-1] == [
        ("report", [{"text": "c"}]), ("output", [words]), ("picture", [picture])]


async def test_a_stream_ends_when_the_gate_stops(
        start: Callable[..., Live], connect_to: Callable[[Live], Client]) -> None:
    gate = start(*SETTINGS)
    client = connect_to(gate)
    arrived, reading = client.gather("SubscribeToTask", {"id": await client.begin()})
    await count(arrived, 1)
    gate.process.terminate()
    await reading

    assert states(arrived) == ["SUBMITTED"]


async def test_a_call_has_a_span_of_which_its_task_keeps_the_trace(
        start: Callable[..., Live], connect_to: Callable[[Live], Client], tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANS_FILE", str(tmp_path / "spans"))
    client = connect_to(start(*SETTINGS, program=("-m", "tests.support.traced_gate")))
    task = (await client.http.get(f"/v1/tasks/{await client.begin()}")).json()
    spans = [json.loads(line) for line in (tmp_path / "spans").read_text().splitlines()]
    [span] = [span for span in spans if span["name"] == "POST /a2a/{agent}/v1"]

    assert span["attributes"]["asyncgate.operation"] == "create_task"
    assert span["context"]["trace_id"].removeprefix("0x") == task["traceparent"].split("-")[1]
