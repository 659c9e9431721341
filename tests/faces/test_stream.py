"""The stream of receipts over a real server: each receipt once, also across a kill, and an end for who may not read."""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from asyncgate.conformance.ledgers import LedgerServer
from asyncgate.parts.model.news import Change, News
from asyncgate.parts.operations import OPERATIONS
from asyncgate.parts.process.changes import AT_ONCE, LEFT_OUT, MOST_KEPT, MOST_SPREAD, Followers
from tests.conftest import TOKEN, Live, Served
from tests.support.patience import PATIENCE_SECONDS

STREAM = "/v1/receipts/stream"


class Listener:
    """A client of the stream, which may come back behind the last event that it saw."""

    def __init__(self, live: Any, after: str | None = None, token: str = TOKEN, **filter: str) -> None:
        self.client = httpx2.Client(base_url=live.url, timeout=PATIENCE_SECONDS,
                                    headers={"authorization": f"Bearer {token}"})
        headers = {"last-event-id": after} if after else {}
        self.opened = self.client.stream("GET", STREAM, params=filter, headers=headers)
        self.answer = self.opened.__enter__()
        self.lines: Iterator[str] = self.answer.iter_lines()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.answer.close()
        self.client.close()

    def take(self, number: int) -> list[tuple[str, dict[str, Any]]]:
        """Return the next events: the id of each, and its receipt."""
        return list(itertools.islice(self.events(), number))

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield receipts until the stream ends."""
        return ((event["id"], json.loads(event["data"])) for event in self.all() if event["event"] == "receipt")

    def changes(self) -> Iterator[dict[str, Any]]:
        """Yield changes until the stream ends; none has an id."""
        for event in self.all():
            if event["event"] != "receipt":
                assert event.keys() == {"event", "data"}
                yield {**json.loads(event["data"]), "event": event["event"]}

    def all(self) -> Iterator[dict[str, str]]:
        """Yield events until the stream ends."""
        event: dict[str, str] = {}
        for line in self.lines:
            name, _, value = line.partition(": ")
            event |= {name: value} if name.strip(":") else {}        # else it is a comment, or the end of an event
            if not line and "data" in event:
                yield event
                event = {}


def call(live: Any, method: str, path: str, **body: Any) -> Any:
    """Ask the gate, as the shared token."""
    answer = httpx2.request(method, live.url + path, headers={"authorization": f"Bearer {TOKEN}"}, json=body)
    return answer.raise_for_status().json()


def create(live: Any, owner: str = "ada") -> str:
    """Create a task; return its id."""
    return str(call(live, "POST", "/v1/tasks", type="demo", payload=None, agent_id=owner)["task_id"])


def test_receipts_come_as_they_are_written_and_only_ones_own(live: Any) -> None:
    before = create(live)
    with Listener(live, to_id="ada") as ada:
        first = ada.take(1)
        create(live, "bob")
        after = create(live)
        second = ada.take(1)

    assert [receipt["task_id"] for _, receipt in (*first, *second)] == [before, after]
    assert [receipt["receipt_id"] for _, receipt in (*first, *second)] == [place for place, _ in (*first, *second)]
    assert {name: ada.answer.headers[name] for name in ("content-type", "cache-control", "x-accel-buffering")} == {
        "content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}


def test_every_receipt_comes_once_although_client_and_gate_are_cut_off(start: Any, tmp_path: Path) -> None:
    database, seen, port = f"sqlite:///{tmp_path}/gate.db", list[tuple[str, dict[str, Any]]](), 0
    made = []
    for _ in range(3):
        live: Live = start(database=database, port=port)
        port = live.port
        made += [create(live) for _ in range(60)]
        with Listener(live, seen[-1][0] if seen else None, to_id="ada") as ada:
            seen += ada.take(40)                        # cut off within a page
        with Listener(live, seen[-1][0], to_id="ada") as ada:
            seen += ada.take(10)
            live.kill()
    live = start(database=database, port=port)
    with Listener(live, to_id="ada", since_receipt_id=seen[-1][0]) as ada:
        seen += ada.take(30)

    assert [receipt["task_id"] for _, receipt in seen] == made


def test_a_stream_begins_where_it_is_told(live: Any) -> None:
    early = create(live)
    with Listener(live, to_id="ada", created_after="2020-01-01T00:00:00Z") as ada:
        [(place, receipt)] = ada.take(1)
    with Listener(live, to_id="ada", created_after="2100-01-01T00:00:00Z") as later, Listener(
            live, to_id="ada", created_after="2100-01-01T00:00:00Z", after=place) as behind:
        second = create(live)
        seen = behind.take(1)
        assert later.answer.status_code == 200

    assert (receipt["task_id"], [content["task_id"] for _, content in seen]) == (early, [second])


def test_a_stream_ends_when_its_key_is_revoked(live: Any) -> None:
    issued = call(live, "POST", "/v1/keys", name="listener", principal_kind="agent", principal_id="ada", role="agent",
                  scopes=["receipts:read"])
    with Listener(live, token=issued["api_key"]) as ada:
        call(live, "POST", f"/v1/keys/{issued['key']['key_id']}/revoke")

        assert list(ada.events()) == []


def test_a_gate_that_stops_ends_its_streams(live: Any) -> None:
    with Listener(live, to_id="ada") as ada:
        live.process.send_signal(signal.SIGTERM)

        assert list(ada.events()) == []
    assert live.process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize(("method", "query", "token", "status"), [
    ("GET", {}, "wrong", 401), ("GET", {"to_kind": "agent"}, TOKEN, 400), ("GET", {"limit": "2"}, TOKEN, 400),
    ("GET", {"since_receipt_id": "nobody's"}, TOKEN, 400), ("GET", {"task_id": "none"}, TOKEN, 404),
    ("POST", {}, TOKEN, 405), ("HEAD", {}, TOKEN, 405)])
def test_what_a_stream_refuses_is_an_ordinary_answer(
        live_for_all: Any, method: str, query: dict[str, str], token: str, status: int) -> None:
    answer = httpx2.request(method, live_for_all.url + STREAM, params=query, headers={"x-api-key": token})

    assert answer.status_code == status, answer.text
    assert answer.headers.get("allow") == ("GET" if status == 405 else None)


def test_streams_take_the_places_of_waiting_reads(start: Any) -> None:
    live = start("max_waiting_readers=1")
    with Listener(live, to_id="ada"):
        refused = httpx2.get(live.url + STREAM, params={"to_id": "bob"}, headers={"x-api-key": TOKEN})

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")


def test_the_stream_is_no_tool_and_no_command() -> None:
    assert "stream_receipts" not in OPERATIONS


# Changes that have no receipt.


def claim(live: Any, worker: str = "w1") -> dict[str, Any]:
    """Lease the next task."""
    (offer,) = call(live, "POST", "/v1/leases/claim", worker_id=worker)["tasks"]
    return {"worker_id": worker, "task_id": offer["task_id"], "lease_id": offer["lease_id"]}


def progress(live: Any, under: dict[str, Any], told: Any = 1) -> None:
    call(live, "POST", f"/v1/tasks/{under['task_id']}/progress", **under, progress=told)


def test_changes_without_a_receipt_come_beside_receipts_but_only_of_ones_own_tasks(live: Any) -> None:
    task_id = create(live)
    create(live, "bob")
    with Listener(live, to_id="ada") as ada:
        ((place, receipt),) = ada.take(1)
        for under in (claim(live), claim(live)):
            progress(live, under, {"secret": under["task_id"]})
        call(live, "POST", f"/v1/tasks/{task_id}/cancel", agent_id="ada")
        told = list(itertools.islice(ada.all(), 3))

    changes = [json.loads(event["data"]) for event in told[:2]]
    assert [(event["event"], "id" in event) for event in told] == [("task.started", False), ("progress", False),
                                                                   ("receipt", True)]
    assert [{**change, "at": ""} for change in changes] == [
        {"change": "task.started", "at": "", "task_id": task_id, "type": "demo", "status": "running",
         "worker": {"kind": "worker", "id": "w1"}},
        {"change": "progress", "at": "", "task_id": task_id, "type": "demo", "status": "running", "sequence": 1,
         "worker": {"kind": "worker", "id": "w1"}}]
    assert receipt["task_id"] == task_id
    assert "secret" not in str(told)
    # They are not sent again: a client that comes back gets the receipts behind its place.
    with Listener(live, place, to_id="ada") as ada:
        assert next(ada.all())["event"] == "receipt"


def test_a_hold_and_its_release_are_told(start: Any) -> None:
    live = start("max_expiries=1", "lease_sweep_interval_seconds=0.1", "expiry_jitter_seconds=0")
    task_id = create(live)
    with Listener(live, task_id=task_id) as console:
        call(live, "POST", "/v1/leases/claim", worker_id="w1", lease_ttl_seconds=1)
        changes = console.changes()
        held = next(changes)
        call(live, "POST", f"/v1/tasks/{task_id}/release", agent_id="ada")
        released = next(changes)

    assert (held["event"], held["held"], held["task_id"]) == ("task.held", "lease_expiries", task_id)
    assert (released["event"], released["task_id"], "held" in released) == ("task.hold_released", task_id, False)


def test_whoever_sees_all_learns_which_workers_ask_but_not_at_every_call(live: Any) -> None:
    with Listener(live) as console:
        for _ in range(3):
            call(live, "POST", "/v1/leases/claim", worker_id="w1", worker_instance_id="i1")
        call(live, "POST", "/v1/leases/claim", worker_id="w2")
        told = [(change["event"], change["worker"]) for change in itertools.islice(console.changes(), 2)]

    assert told == [("worker.seen", {"kind": "worker", "id": "w1", "instance_id": "i1"}),
                    ("worker.seen", {"kind": "worker", "id": "w2"})]


def test_whoever_sees_all_learns_that_a_pause_has_begun_or_ended(live: Any) -> None:
    with Listener(live) as console, Listener(live, to_id="ada") as ada:
        call(live, "POST", "/v1/pauses", type="demo", reason="the model is down")
        call(live, "POST", "/v1/pauses/resume", type="demo")
        told = [change["event"] for change in itertools.islice(console.changes(), 2)]
        create(live)

        assert next(ada.all())["event"] == "receipt"
    assert told == ["work.pauses", "work.pauses"]


@pytest.mark.parametrize("filter", [{"receipt_type": "task.completed"}, {"task_id": ""}, {"to_id": "ada"}])
def test_what_is_filtered_away_is_not_told(live: Any, filter: dict[str, str]) -> None:
    bobs, adas = create(live, "bob"), create(live)
    filter = {**filter, **({"task_id": adas} if "task_id" in filter else {})}
    with Listener(live, **filter) as reader:
        under = [claim(live), claim(live)]
        progress(live, next(offer for offer in under if offer["task_id"] == bobs))
        mine = next(offer for offer in under if offer["task_id"] == adas)
        call(live, "POST", f"/v1/tasks/{adas}/complete", **mine, artifacts=[{"uri": "s3://a"}])
        told = [event["event"] for event in itertools.takewhile(lambda event: "task.completed" not in event["data"]
                                                                and "task.result_ready" not in event["data"],
                                                                reader.all())]

    assert set(told) <= {"receipt"}


def test_a_stream_ends_when_its_tenant_is_suspended(live: Any) -> None:
    other = call(live, "POST", "/v1/tenants", name="other")["tenant"]
    issued = call(live, "POST", "/v1/keys", tenant=other, name="listener", principal_kind="agent",
                  principal_id="ada", role="agent", scopes=["receipts:read"])
    with Listener(live, token=issued["api_key"]) as ada:
        call(live, "POST", f"/v1/tenants/{other}/suspend", reason="misuse")

        assert list(ada.all()) == []


@pytest.mark.anyio
async def test_for_a_reader_that_takes_nothing_a_bounded_number_of_changes_is_kept(served: Served) -> None:
    offer = await served.leased()
    sent: asyncio.Queue[bytes] = asyncio.Queue()
    begun, taken = asyncio.Event(), asyncio.Event()

    async def send(message: Any) -> None:
        begun.set()
        if message["type"] == "http.response.body":
            await sent.put(message["body"])
            if b"progress" in message["body"]:
                await taken.wait()

    gone = asyncio.Event()
    scope = {"type": "http", "method": "GET", "path": STREAM, "raw_path": STREAM.encode(), "query_string": b"",
             "headers": [(b"host", b"localhost"), (b"authorization", f"Bearer {TOKEN}".encode())], "scheme": "http",
             "client": ("127.0.0.1", 1), "root_path": ""}

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    stream = asyncio.create_task(served.gate(scope, receive, send))
    await begun.wait()
    under = {"task_id": offer["task_id"], "lease_id": offer["lease_id"], "worker_id": "w1"}

    async def report(number: int) -> None:
        for _ in range(number):
            await served.post(f"/v1/tasks/{offer['task_id']}/progress", {**under, "progress": 1})

    await report(1)
    while b"progress" not in await sent.get():
        pass
    await report(MOST_KEPT + 30)        # while the first is being sent
    taken.set()
    text = await sent.get()
    gone.set()
    await stream

    assert text.count(b"event: progress") == MOST_KEPT
    assert text.count(b"event: left_out") == 1
    assert b'"number":30' in text


def test_changes_are_told_in_integrated_mode_too(start: Any) -> None:
    with LedgerServer() as ledger:
        live = start("receipt_mode=memorygate_integrated", f"ledger.url={ledger.url}", "ledger.timeout_ms=30000",
                     f"ledger.auth_token={ledger.token}")
        task_id = create(live)
        with Listener(live, to_id="ada") as ada:
            progress(live, claim(live))
            call(live, "POST", f"/v1/tasks/{task_id}/cancel", agent_id="ada")
            told = [(event["event"], "id" in event) for event in itertools.islice(ada.all(), 4)]

    # Receipts come from the ledger, so a change may overtake them.
    assert sorted(told) == [("progress", False), ("receipt", True), ("receipt", True), ("task.started", False)]


@pytest.mark.anyio
async def test_changes_of_another_process_are_told(fresh: Any, start: Any) -> None:
    url = await fresh("postgres")
    here, there = start(database=url), start(database=url)
    await asyncio.to_thread(follow_another_process, here, there)


def follow_another_process(here: Any, there: Any) -> None:
    """Report progress there until a follower here is told."""
    create(there)
    under = claim(there)
    told: queue.Queue[dict[str, Any]] = queue.Queue()
    with Listener(here, to_id="ada") as ada:
        reader = threading.Thread(target=lambda: told.put(next(ada.changes())), daemon=True)
        reader.start()
        while reader.is_alive():        # at first the other process does not know that somebody follows here
            progress(there, under)
            reader.join(0.1)

    assert (change := told.get())["change"] in ("progress", "task.started")
    assert change["task_id"] == under["task_id"]


def test_other_processes_are_told_of_a_batch_in_short_news_and_how_many_changes_are_left_out() -> None:
    told: list[News] = []
    followers = Followers(told.append, lambda: 0.0)
    changes = [Change("progress", 1.0, f"task-{number}") for number in range(MOST_SPREAD + 7)]
    followers.spread("t", changes)      # nobody follows
    followers.hear(News("t", followed=True))
    followers.spread("t", changes)

    assert [change for news in told for change in news.changes] == [
        *changes[:MOST_SPREAD], Change(LEFT_OUT, 1.0, number=7)]
    assert {len(news.changes) for news in told[:-1]} == {AT_ONCE}
