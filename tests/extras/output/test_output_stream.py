"""The output of a task as server-sent events: resumable, the same for each reader, closed at the end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from asyncgate.clients.http import Http
from asyncgate.clients.worker import Job, Worker
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
TOKEN = "a-token-for-tests"
Events = list[tuple[str, str, Any]]


async def follow(url: str, task_id: str, headers: dict[str, str] | None = None, query: str = "",
                 until: int = 10**6) -> tuple[int, Events]:
    """Return the status and the events of a stream: of each its id, its type and its data."""
    events, event = Events(), dict[str, str]()
    auth = {} if "ticket" in query else {"authorization": f"Bearer {TOKEN}"}
    async with httpx2.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as client, client.stream(
            "GET", f"{url}/v1/tasks/{task_id}/output{query}",
            headers={"accept": "text/event-stream", **auth, **(headers or {})}) as answer:
        if answer.status_code >= 300:
            return answer.status_code, [("", "", json.loads(await answer.aread()))]
        async for line in answer.aiter_lines():
            if line.startswith(":"):
                continue
            if not line and event:
                events.append((event.get("id", ""), event["event"], json.loads(event["data"])))
                event = {}
                if len(events) >= until:
                    break
            elif line:
                name, _, value = line.partition(": ")
                event[name] = value
        return answer.status_code, events


def plain(events: Events) -> list[tuple[str, Any]]:
    """Return what a reader gets of each: its id and the chunk or the status."""
    return [(id, data.get("chunk", data.get("status"))) for id, _, data in events]


def lease(rest: Http) -> dict[str, Any]:
    rest.call("create_task", type="t", payload=None, agent_id="ada")
    (offer,) = rest.call("lease_next", worker_id="w1")["tasks"]
    return {"worker_id": "w1", "task_id": offer["task_id"], "lease_id": offer["lease_id"]}


async def test_each_reader_gets_the_same_events_and_one_that_comes_back_goes_on_behind_its_last(live: Any) -> None:
    with Http(live.url, TOKEN) as rest:
        held = await asyncio.to_thread(lease, rest)
        first = asyncio.create_task(follow(live.url, held["task_id"]))
        cut = asyncio.create_task(follow(live.url, held["task_id"], until=2))
        await asyncio.to_thread(rest.call, "append_output", **held, chunks=["a\nb", {"n": 1}])
        _, before = await cut
        await asyncio.to_thread(rest.call, "append_output", **held, chunks=["c"])
        await asyncio.to_thread(rest.call, "complete", **held, result=1, artifacts=[{"uri": "x"}])
        status, events = await first
        _, late = await follow(live.url, held["task_id"])
        _, rest_of = await follow(live.url, held["task_id"], {"last-event-id": before[-1][0]})
        over, nothing = await follow(live.url, held["task_id"], {"last-event-id": "5"})

    assert status == 200
    assert plain(events) == [("1", "running"), ("2", "a\nb"), ("3", {"n": 1}), ("4", "c"), ("5", "succeeded"),
                             ("", None)]
    assert [kind for _, kind, _ in events] == ["state", "output", "output", "output", "state", "end"]
    assert late == events
    assert before + rest_of == events
    assert (over, nothing) == (204, [])


async def test_a_stream_goes_on_after_a_restart(start: Any, tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/gate.db"
    first = start(database=database)
    with Http(first.url, TOKEN) as rest:
        held = await asyncio.to_thread(lease, rest)
        await asyncio.to_thread(rest.call, "append_output", **held, chunks=["a", "b"])
    _, before = await follow(first.url, held["task_id"], until=2)
    first.kill()

    second = start(database=database)
    with Http(second.url, TOKEN) as rest:
        await asyncio.to_thread(rest.call, "cancel_task", task_id=held["task_id"])
    _, after = await follow(second.url, held["task_id"], {"last-event-id": before[-1][0]})

    assert plain(before + after) == [("1", "running"), ("2", "a"), ("3", "b"), ("4", "canceled"), ("", None)]


async def test_a_ticket_opens_the_stream_of_its_task_alone(live: Any) -> None:
    with Http(live.url, TOKEN) as rest:
        held, other = await asyncio.to_thread(lease, rest), await asyncio.to_thread(lease, rest)
        async with httpx2.AsyncClient(trust_env=False) as client:
            answer = await client.post(f"{live.url}/v1/receipts/stream/ticket", json={
                "task_id": held["task_id"], "agent_id": "ada"}, headers={"authorization": f"Bearer {TOKEN}"})
            ticket = answer.json()["ticket"]
        for task in (held, other):
            await asyncio.to_thread(rest.call, "append_output", **task, chunks=["a"])
            await asyncio.to_thread(rest.call, "cancel_task", task_id=task["task_id"])
        status, events = await follow(live.url, held["task_id"], query=f"?ticket={ticket}")
        refused, [(_, _, body)] = await follow(live.url, other["task_id"], query=f"?ticket={ticket}")

    assert (status, plain(events)[:2]) == (200, [("1", "running"), ("2", "a")])
    assert (refused, body["error"]) == (403, "forbidden")


async def test_a_stream_of_what_one_may_not_read_is_an_ordinary_refusal(live: Any) -> None:
    assert (await follow(live.url, "nothing"))[0] == 404
    assert (await follow(live.url, "nothing", {"last-event-id": "x"}))[0] == 400


async def test_without_the_wish_for_events_the_same_path_gives_pages(live: Any) -> None:
    with Http(live.url, TOKEN) as rest:
        held = await asyncio.to_thread(lease, rest)
        await asyncio.to_thread(rest.call, "append_output", **held, chunks=["a"])
        page = await asyncio.to_thread(rest.call, "read_output", task_id=held["task_id"], after=1)

    assert [(entry["offset"], entry["chunk"]) for entry in page["entries"]] == [(2, "a")]
    assert (page["after"], page["ended"]) == (2, False)


async def test_a_task_function_prints_and_streams_and_all_of_it_stands_before_the_end(live: Any) -> None:
    worker = Worker(live.url, "w", token=TOKEN, state=None, declare=False)

    @worker.task("t")
    def work(payload: Any, job: Job) -> int:
        job.print("begin", 1)
        for _ in job.stream({"page": number} for number in range(300)):
            pass
        job.print("x" * 40_000, end="")
        return 1

    @worker.task("u")
    async def work_async(payload: Any, job: Job) -> str:
        async def tokens() -> Any:
            for token in ("one ", "two"):
                yield token
        return "".join([token async for token in job.stream(tokens())])

    working = asyncio.create_task(worker.serve())
    try:
        with Http(live.url, TOKEN) as rest:
            made = [await asyncio.to_thread(rest.call, "create_task", type=type, payload=None, agent_id="ada")
                    for type in ("t", "u")]
            streams = [(await follow(live.url, task["task_id"]))[1] for task in made]
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    chunks = [[data["chunk"] for _, kind, data in events if kind == "output"] for events in streams]
    texts = [chunk for chunk in chunks[0] if isinstance(chunk, str)]
    assert "".join(texts) == "begin 1\n" + "x" * 40_000
    assert [chunk for chunk in chunks[0] if not isinstance(chunk, str)] == [{"page": number} for number in range(300)]
    assert chunks[1] == ["one ", "two"]
    assert [plain(events)[-2][1] for events in streams] == ["succeeded", "succeeded"]
