"""The stream of receipts over a real server: each receipt once, also across a kill, and an end for who may not read."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from asyncgate.parts.operations import OPERATIONS
from tests.conftest import PATIENCE_SECONDS, TOKEN, Live

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
        """Yield events until the stream ends."""
        said: dict[str, str] = {}
        for line in self.lines:
            name, _, value = line.partition(": ")
            said |= {name: value} if name else {}
            if not line and "data" in said:
                yield said["id"], json.loads(said["data"])
                said = {}


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

    assert (receipt["task_id"], [one["task_id"] for _, one in seen]) == (early, [second])


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


def test_streams_take_the_places_of_waiting_reads(start: Any) -> None:
    live = start("max_waiting_readers=1")
    with Listener(live, to_id="ada"):
        refused = httpx2.get(live.url + STREAM, params={"to_id": "bob"}, headers={"x-api-key": TOKEN})

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")


def test_the_stream_is_no_tool_and_no_command() -> None:
    assert "stream_receipts" not in OPERATIONS
