"""What the client does beyond one call: lists, what comes, repeated keys, and true words about a failure."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from asyncgate.clients import AsyncGate, Refusal, SyncGate, Unreachable, Worker
from asyncgate.clients.http import Http
from asyncgate.clients.testing import Gate

pytestmark = pytest.mark.anyio
LARGE = "x" * 8_000_000


@pytest.fixture
def anyio_backend() -> str:
    """What the client runs on."""
    return "asyncio"


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[tuple[str, list[int]]]:
    """Serve connections by a function; return the URL, and the connections so far."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        calls: list[int] = []

        def serve() -> None:
            while True:
                try:
                    link, _ = server.accept()
                except OSError:
                    return
                calls.append(1)
                with link:
                    answer(link)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", calls
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def reset(link: socket.socket) -> None:
    """Read a little, then reset the connection, as a server does that does not want the rest."""
    link.recv(1000)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_request_that_is_too_large_is_told_so_and_not_sent_again_and_again() -> None:
    with answering(reset) as (url, calls), SyncGate(url) as gate, pytest.raises(Refusal) as refusal:
        gate.submit("t", LARGE)

    assert (refusal.value.status, refusal.value.code, len(calls)) == (413, "payload_too_large", 2)
    assert "8,000," in str(refusal.value)


def test_a_gate_refuses_a_large_request_with_413() -> None:
    with Gate(port=0) as gate, pytest.raises(Refusal) as refusal:
        gate.submit("t", LARGE)

    assert refusal.value.status == 413


def test_only_who_hangs_up_at_once_and_has_never_answered_may_speak_tls() -> None:
    with answering(lambda link: link.recv(1000)) as (url, _), Http(url) as http:
        with pytest.raises(Unreachable, match="if it speaks TLS"):
            http.call("health")
        cut = httpx2.RemoteProtocolError("Server disconnected without sending a response.",
                                         request=httpx2.Request("GET", url))
        assert "TLS" not in str(http.unreachable(cut, time.monotonic() - 5))
        http.answered = True
        assert "TLS" not in str(http.unreachable(cut, time.monotonic()))


@pytest.mark.parametrize("kind", [AsyncGate, SyncGate])
def test_a_worker_works_for_the_gate_of_either_client(kind: Any) -> None:
    worker = Worker(kind("http://127.0.0.1:9", "a-token"), "w", state=None)

    assert (worker.gate.url, worker.gate.token) == ("http://127.0.0.1:9", "a-token")


async def test_a_key_that_made_another_request_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with Gate() as gate:
        first = await gate.submit("t", 1, key="k")
        same, other = await gate.submit("t", 1, key="k"), await gate.submit("t", 2, key="k")

    assert {handle.task_id for handle in (first, same, other)} == {first.task_id}
    assert [handle.payload_differs for handle in (first, same, other)] == [False, False, True]
    assert [record.getMessage() for record in caplog.records if "'k'" in record.getMessage()] == [
        f"the key 'k' made task {first.task_id} from another request; that task is returned"]


async def test_a_type_that_nobody_serves_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with Gate() as gate:
        await gate.lease_next(worker_id="w", accept_types=["report"])
        await gate.submit("report")
        task_id = (await gate.submit("repport")).task_id

    told = [record.getMessage() for record in caplog.records if record.name == "asyncgate.client"]
    assert [text.split(": ")[0] for text in told] == [f"task {task_id}"]
    assert "others ask for report" in told[0]


async def test_a_list_is_read_to_its_end_and_receipts_as_they_come() -> None:
    async with Gate() as gate:
        made = [(await gate.submit("t", number)).task_id for number in range(5)]
        assert {task.task_id async for task in gate.each("list_tasks", limit=2)} == set(made)
        assert [receipt.task_id async for receipt in gate.each("list_receipts", limit=2)] == made

        seen: list[str] = []
        async for receipt in gate.follow(limit=2):
            seen.append(receipt.task_id)
            if len(seen) == 5:      # the next one comes while the list waits
                made.append((await gate.submit("t", 5)).task_id)
            if len(seen) == 6:
                break
        assert seen == made


async def test_the_changes_of_a_task_come_until_it_has_ended() -> None:
    async with Gate() as gate:
        handle, worker = await gate.submit("t"), gate.speaking_as(worker_id="w")
        seen = []
        async for task in handle.updates():
            seen.append((task.status, task.progress))
            if task.status == "queued":
                offer = (await worker.lease_next()).tasks[0]
            elif task.progress is None:
                await worker.report_progress(handle.task_id, lease_id=offer.lease_id, progress={"page": 1})
            elif task.status == "running":
                await worker.complete(handle.task_id, lease_id=offer.lease_id, result=1)

        assert seen == [("queued", None), ("leased", None), ("running", {"page": 1}), ("succeeded", {"page": 1})]


def test_the_blocking_client_iterates_too() -> None:
    with Gate() as gate:
        handles = [gate.submit("t", number) for number in range(3)]
        assert len([*gate.each("list_tasks", limit=2)]) == 3
        assert next(gate.follow()).task_id == handles[0].task_id
        handles[0].cancel()
        assert [task.status for task in handles[0].updates()] == ["canceled"]
