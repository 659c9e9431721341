"""The Python client on a bad wire, and over restarts: real gates on real ports, over REST and over MCP."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx2
import msgspec
import pytest

from asyncgate.clients import AsyncGate, Refusal, SyncGate, TaskCanceled, TaskFailed, Unreachable
from asyncgate.clients.client import ENDED_STATUSES
from asyncgate.clients.sync import LoopThread, PendingCall
from asyncgate.clients.testing import Gate, SyncTestGate
from asyncgate.parts.model.wire import Principal, Timeouts
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

TOKEN = "a-token-for-tests"
HERE = "127.0.0.1"
LENGTH = re.compile(rb"content-length: *(\d+)", re.I)
CALLED = re.compile(rb"mcp-name: *asyncgate\.(\w+)", re.I)
vias = pytest.mark.parametrize("via", ["rest", "mcp"])


class Wire:
    """A port before that of a gate, which passes whole requests on, and does what it is told to the next ones.

    `lost`: the gate answers, and nobody hears it.  `cut`: the gate never hears of it.  `garbled`: instead of an answer
    comes what cannot be unpacked.  A dictionary is the answer.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.next: deque[str | dict[str, Any]] = deque()
        self.seen: list[bytes] = []         # the first line of each request, or the tool that it calls
        self.links: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Wire:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Take connections, always on the same port."""
        self.door = await asyncio.start_server(self._accept, HERE, self.port)
        self.port = self.door.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Refuse connections, and cut those that there are."""
        self.door.close()
        for link in self.links:
            link.cancel()
        await asyncio.gather(*self.links, return_exceptions=True)

    @property
    def url(self) -> str:
        """Return where clients find the gate."""
        return f"http://{HERE}:{self.port}"

    def calls(self, name: str) -> int:
        """Count the requests for a path or a tool of that name."""
        return sum(name.encode() in line for line in self.seen)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.create_task(self._link(reader, writer))
        self.links.add(link)
        link.add_done_callback(self.links.discard)

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await whole(reader):
                called = CALLED.search(request)
                self.seen.append(called[1] if called else request.partition(b"\r\n")[0])
                answer = await self._answer(self.next.popleft() if self.next else "pass", request)
                if not answer:
                    return
                writer.write(answer)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, what: str | dict[str, Any], request: bytes) -> bytes:
        if isinstance(what, dict):
            body = msgspec.json.encode(what["body"])
            after = f"retry-after: {what['retry_after']}\r\n" if "retry_after" in what else ""
            return (f"HTTP/1.1 {what['status']} No\r\ncontent-type: application/json\r\n{after}"
                    f"content-length: {len(body)}\r\n\r\n").encode() + body
        if what == "cut":
            return b""
        if what == "garbled":
            return (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n"
                    b"content-length: 2\r\n\r\n{}")
        reader, writer = await asyncio.open_connection(HERE, self.target)
        try:
            writer.write(request)
            answer = await whole(reader)
        finally:
            writer.close()
        return answer if what == "pass" else b""


async def whole(reader: asyncio.StreamReader) -> bytes:
    """Read a message of HTTP with its body, or nothing at the end."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = LENGTH.search(head)
        return head + await reader.readexactly(int(length[1]) if length else 0)
    except asyncio.IncompleteReadError:
        return b""


BUSY = {"status": 429, "retry_after": 0, "body": {"error": "rate_limit_exceeded", "message": "one at a time"}}


@pytest.fixture
def served() -> Iterator[SyncTestGate]:
    """Return a gate on a port and a thread of its own."""
    with Gate(port=0, api_key=TOKEN) as gate:
        yield gate


@pytest.fixture
async def wire(served: SyncTestGate) -> AsyncIterator[Wire]:
    """Return a wire to a gate."""
    async with asyncio.timeout(PATIENCE_SECONDS * 2), Wire(urlsplit(served.url).port or 0) as wire:
        yield wire


@asynccontextmanager
async def both(url: str, via: Any, **more: Any) -> AsyncIterator[tuple[AsyncGate, AsyncGate]]:
    """Open the gate for an agent and for a worker."""
    async with AsyncGate(url, TOKEN, via=via, agent_id="ada", **more) as gate:
        yield gate, gate.speaking_as(worker_id="w1")


# What a call does, over REST and over MCP.


@vias
async def test_a_task_goes_from_hand_to_hand(served: SyncTestGate, via: Any) -> None:
    async with both(served.url, via) as (gate, worker):
        handle = await gate.submit("ocr.page", {"page": 3}, needs={"ocr"}, key="doc-7", priority=2)
        waiting = asyncio.create_task(handle.result(PATIENCE_SECONDS))
        assert (await worker.lease_next(capabilities={"ink"})).tasks == []
        (offer,) = (await worker.lease_next(capabilities={"ocr", "ink"}, accept_types={"ocr.page"})).tasks
        await worker.report_progress(offer.task_id, offer.lease_id, progress={"line": 1})
        assert (await handle.status(), await handle.progress()) == ("running", {"line": 1})
        await worker.complete(offer.task_id, offer.lease_id, fence=offer.fence, result={"text": "ü"})

        assert await waiting == {"text": "ü"}
        assert offer.payload == {"page": 3}
        assert not (await gate.list_open_obligations()).open_obligations
        assert (await handle.ended()).created_by.id == "ada"
        again = await gate.submit("ocr.page", {"page": 3}, needs={"ocr"}, key="doc-7", priority=2)
        assert again.task_id == handle.task_id


@vias
async def test_a_task_that_ends_badly_is_an_exception(served: SyncTestGate, via: Any) -> None:
    async with both(served.url, via) as (gate, worker):
        failing, canceled = [await gate.submit("demo", key=key) for key in ("a", "b")]
        (offer,) = (await worker.lease_next()).tasks
        await worker.fail(offer.task_id, offer.lease_id, error={"why": "no ink"})

        assert await canceled.cancel("changed my mind")
        assert not await failing.cancel()
        with pytest.raises(TaskFailed, match="no ink") as failed:
            await failing.result()
        with pytest.raises(TaskCanceled, match=canceled.task_id):
            await canceled.result()
        assert failed.value.error == {"why": "no ink"}


@vias
async def test_a_refusal_says_the_same_over_both(served: SyncTestGate, via: Any) -> None:
    async with both(served.url, via) as (gate, worker):
        with pytest.raises(Refusal) as unknown:
            await gate.handle("nobody").result()
        with pytest.raises(Refusal) as lost:
            await worker.complete((await gate.submit("demo")).task_id, "no-lease")
        with pytest.raises(Refusal) as wrong:
            await gate.create_task("")
    async with AsyncGate(served.url, "another-token", via=via) as stranger:
        with pytest.raises(Refusal) as barred:
            await stranger.list_tasks()

    assert (unknown.value.status, unknown.value.code) == (404, "task_not_found")
    assert (lost.value.status, lost.value.code) == (409, "lease_invalid_or_expired")
    assert lost.value.more["reason"] == "unknown"
    assert (wrong.value.status, wrong.value.code) == (400, "invalid_request")
    assert (barred.value.status, barred.value.code) == (401, "unauthenticated")


@vias
async def test_replies_of_a_real_gate_are_what_the_methods_say(served: SyncTestGate, via: Any) -> None:
    async with both(served.url, via) as (gate, worker):
        ran = await gate.run_task("demo", payload=1, wait_seconds=0.01, timeouts=Timeouts(lease_ttl_seconds=9))
        tenant = await gate.create_tenant("Reading Room", tier="paid")
        issued = await gate.issue_key("the reader", "r1", principal_kind="worker", task_types={"page"})
        (offer,) = (await worker.lease_next(claim_id="c1")).tasks
        history = await gate.get_task_history(ran.task_id)
        receipts = await gate.list_receipts(task_id=ran.task_id)

        assert (ran.status, ran.payload, ran.timeouts) == ("queued", 1, Timeouts(lease_ttl_seconds=9))
        assert (await worker.list_leases()).leases[0].lease_id == offer.lease_id
        assert history.events[0].receipt == receipts.receipts[0]
        assert receipts.receipts[0].sender == Principal("agent", "ada")
        assert tenant.tenant in [record.tenant for record in (await gate.list_tenants()).tenants]
        assert (await gate.get_limits()).tier
        assert [key.key_id for key in (await gate.list_keys()).keys] == [issued.key.key_id]
        assert (await gate.revoke_key(issued.key.key_id, reason="a test")).ok
        assert "key_revoked" in [line.event for line in (await gate.list_audit()).lines]
        assert (await gate.check_terminator(receipts.receipts[0].receipt_id)).has_terminator is False
        assert (await gate.bootstrap()).attention.inbox_receipts
        assert (await gate.get_config()).version == (await gate.health()).version


# What may be repeated, and what may not.


@vias
async def test_a_write_whose_answer_is_lost_is_repeated_and_done_once(wire: Wire, via: Any) -> None:
    async with both(wire.url, via) as (gate, worker):
        await gate.health()
        wire.next.append("lost")
        handle = await gate.submit("demo")
        wire.next.extend(["lost", "lost"])
        await gate.create_tasks([{"type": "other", "payload": number} for number in range(3)])
        wire.next.append("lost")
        (offer,) = (await worker.lease_next(accept_types={"demo"})).tasks
        wire.next.append("lost")
        await worker.complete(offer.task_id, offer.lease_id, result=7)

        assert len((await gate.list_tasks()).tasks) == 4
        assert await handle.result() == 7
        assert (await handle.task()).fence == 1


@vias
async def test_a_write_that_the_gate_would_not_know_again_is_not_repeated(wire: Wire, via: Any) -> None:
    async with both(wire.url, via) as (gate, worker):
        await gate.submit("demo")
        (offer,) = (await worker.lease_next()).tasks
        before = len(wire.seen)
        wire.next.append("lost")

        with pytest.raises(Unreachable, match="broke before the answer came"):
            await worker.report_progress(offer.task_id, offer.lease_id, progress=1)

        assert len(wire.seen) == before + 1


@vias
async def test_what_was_certainly_not_done_is_tried_again(wire: Wire, via: Any) -> None:
    async with both(wire.url, via) as (gate, worker):
        await gate.submit("demo")
        (offer,) = (await worker.lease_next()).tasks
        wire.next.extend([BUSY, BUSY])
        assert (await worker.report_progress(offer.task_id, offer.lease_id, progress=1)).ok
        await wire.close()

        told = asyncio.create_task(worker.report_progress(offer.task_id, offer.lease_id, progress=2))
        await asyncio.wait([told], timeout=0.3)
        assert not told.done()
        await wire.open()

        assert (await told).ok
        assert not wire.next


@vias
async def test_an_outage_that_lasts_is_one_line(wire: Wire, via: Any) -> None:
    async with both(wire.url, via) as (gate, _):
        await gate.health()
        await wire.close()
        gate.patience_seconds = 0.5

        with pytest.raises(Unreachable, match=f"^no gate answers at {wire.url}; start one with `asyncgate dev`$"):
            await gate.list_tasks()


@vias
async def test_a_gate_that_is_silent_is_not_waited_for_longer_than_agreed(via: Any) -> None:
    taken: list[asyncio.StreamWriter] = []
    quiet = await asyncio.start_server(lambda _, writer: taken.append(writer), HERE, 0)
    url = f"http://{HERE}:{quiet.sockets[0].getsockname()[1]}"
    async with both(url, via, patience_seconds=0.3) as (gate, _):
        with pytest.raises(Unreachable, match=r"did not answer list_tasks within 0\.3 s"):
            await gate.list_tasks()
        with pytest.raises(TimeoutError, match=r"task t1 has not ended within 0\.2 s"):
            await gate.handle("t1").result(0.2)
    quiet.close()
    for writer in taken:
        writer.close()


@vias
async def test_a_gate_that_asks_for_more_time_than_there_is_is_not_asked_again(wire: Wire, via: Any) -> None:
    no_room = {"error": "overloaded", "message": "come back later"}
    wire.next.append({"status": 503, "retry_after": 3600, "body": no_room})
    async with both(wire.url, via) as (gate, _):
        with pytest.raises(Refusal, match="come back later") as refusal:
            await gate.list_tasks()

    shown = (refusal.value.status, refusal.value.code, refusal.value.retry_after, len(wire.seen))
    assert shown == (503, "overloaded", 3600, 1)


@vias
async def test_a_proxy_that_speaks_for_a_gate_that_is_away_is_understood(wire: Wire, via: Any) -> None:
    wire.next.extend([{"status": 502, "body": "Bad Gateway"}, {"status": 504, "body": {"told": "Gateway Timeout"}}])
    async with both(wire.url, via) as (gate, _):
        assert (await gate.list_tasks()).tasks == []
        wire.next.append({"status": 500, "body": "a web page"})
        with pytest.raises(Refusal, match="does not answer like a gate"):
            await gate.list_tasks()

    assert len(wire.seen) >= 4


@vias
async def test_an_answer_that_cannot_be_unpacked_is_no_answer(wire: Wire, via: Any) -> None:
    wire.next.extend(["garbled", "garbled"])
    async with both(wire.url, via) as (gate, _):
        assert (await gate.list_tasks()).tasks == []

        wire.next.append("garbled")
        with pytest.raises(Unreachable, match="broke before the answer came"):
            await gate.speaking_as(worker_id="w1").report_progress("t1", "l1", progress=1)


@vias
async def test_nobody_waits_for_an_outcome_at_a_wrong_address(via: Any) -> None:
    class Stranger(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            raise httpx2.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: expired (_ssl.c:1)")

    async with AsyncGate("https://gate.example", TOKEN, via=via, transport=Stranger()) as gate:
        with pytest.raises(Unreachable, match=r"the certificate of .* is refused: expired"):
            await gate.handle("t1").result(5.0)


async def test_who_waits_for_an_outcome_comes_back_no_sooner_than_a_gate_asks(wire: Wire) -> None:
    async with both(wire.url, "rest") as (gate, _):
        handle = await gate.submit("demo")
        gate.patience_seconds = 0.1
        away = {"status": 503, "retry_after": 3600, "body": {"error": "overloaded", "message": "come back later"}}
        wire.next.append(away)

        with pytest.raises(TimeoutError):
            await handle.result(1.0)

    assert wire.calls("GET /v1/tasks/") == 1


async def test_connections_are_used_again(wire: Wire) -> None:
    async with both(wire.url, "rest") as (gate, _):
        for _ in range(20):
            await gate.health()

        assert len(wire.links) == 1


@vias
async def test_a_wait_that_is_given_up_leaves_the_gate_usable(served: SyncTestGate, via: Any) -> None:
    async with both(served.url, via) as (gate, worker):
        handle = await gate.submit("demo")
        waiting = [asyncio.create_task(handle.result()) for _ in range(20)]
        await asyncio.wait(waiting, timeout=0.2)
        for job in waiting:
            job.cancel()
        ended = await asyncio.gather(*waiting, return_exceptions=True)

        assert {type(outcome) for outcome in ended} == {asyncio.CancelledError}
        (offer,) = (await worker.lease_next()).tasks
        await worker.complete(offer.task_id, offer.lease_id, result=1)
        assert await handle.result() == 1


# Restarts.


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
@vias
async def test_an_outcome_is_waited_for_over_restarts_of_the_gate(
    start: Callable[..., Any], tmp_path: Path, via: Any, by: signal.Signals,
) -> None:
    database = f"sqlite:///{tmp_path / 'gate.db'}"
    first = start(database=database)
    async with asyncio.timeout(PATIENCE_SECONDS * 2), Wire(first.port) as wire:
        async with both(wire.url, via) as (gate, worker):
            handle = await gate.submit("demo", {"n": 1}, key="once")
            waiting = asyncio.create_task(handle.result())
            (offer,) = (await worker.lease_next(lease_ttl_seconds=600)).tasks
            first.process.send_signal(by)
            await asyncio.to_thread(first.process.communicate, timeout=PATIENCE_SECONDS)
            completing = asyncio.create_task(worker.complete(offer.task_id, offer.lease_id, result={"n": 2}))
            await asyncio.wait([completing, waiting], timeout=0.3)
            assert not waiting.done()
            wire.target = start(database=database).port

            assert await waiting == {"n": 2}
            assert (await completing).status == "succeeded"
        async with both(wire.url, via) as (reborn, _):      # all that the caller has kept is the id, or the key
            assert await reborn.handle(handle.task_id).result(PATIENCE_SECONDS) == {"n": 2}
            again = await reborn.submit("demo", {"n": 1}, key="once")
            assert await again.status() in ENDED_STATUSES


@vias
async def test_a_number_that_json_does_not_have_is_refused_before_the_call(wire: Wire, via: Any) -> None:
    nan, inf = float("nan"), float("inf")
    async with both(wire.url, via) as (gate, worker):
        with pytest.raises(ValueError, match=r"^payload\.loss\[1\] is nan: JSON has no such number$"):
            await gate.submit("demo", {"loss": [None, nan]})
        with pytest.raises(ValueError, match=r"^tasks\[1\]\.payload is inf: "):
            await gate.create_tasks([{"type": "t", "payload": None}, {"type": "t", "payload": inf}])
        with pytest.raises(ValueError, match=r"^payload\.task_template\.payload\.x is -inf: "):
            await gate.submit("schedule.create", {"task_template": {"payload": {"x": -inf}}})
        with pytest.raises(ValueError, match=r"^progress is nan: "):
            await worker.report_progress("t1", "l1", progress=nan)
        with pytest.raises(ValueError, match=r"^artifacts\[0\]\.size is nan: "):
            await gate.attach_artifacts("t1", artifacts=[{"size": nan}])

    assert wire.seen == []


@vias
async def test_a_text_is_no_collection_of_capabilities(wire: Wire, via: Any) -> None:
    async with both(wire.url, via) as (gate, _):
        with pytest.raises(TypeError, match=r"^needs is a collection of names, such as \{'ocr'\}, not a text$"):
            await gate.submit("ocr.page", {"page": 3}, needs="ocr")  # type: ignore[arg-type]

    assert wire.seen == []


# For those who do not await.


@vias
def test_the_same_without_await(served: SyncTestGate, via: Any) -> None:
    with SyncGate(served.url, TOKEN, via=via, agent_id="ada") as gate:
        worker = gate.speaking_as(worker_id="w1")
        handle = gate.submit("demo", {"n": 1}, needs=["math"])
        assert gate.handle(handle.task_id).status() == "queued"
        with pytest.raises(TimeoutError):
            handle.result(timeout=0.05)
        (offer,) = worker.lease_next(capabilities=["math"]).tasks
        worker.report_progress(offer.task_id, offer.lease_id, progress=0.5)
        assert handle.progress() == 0.5
        worker.complete(offer.task_id, offer.lease_id, result=[1])

        assert (handle.result(), handle.ended().status, handle.task().fence) == ([1], "succeeded", 1)
        assert not handle.cancel()
        assert gate.call("health")["status"] == "healthy"


def test_many_threads_share_one_gate(served: SyncTestGate) -> None:
    with SyncGate(served.url, TOKEN, agent_id="ada") as gate, ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda number: gate.submit("demo", number).task_id, range(64)))

        assert len(set(made)) == len(gate.list_tasks(limit=100).tasks) == 64


def test_who_is_interrupted_gives_the_call_up(served: SyncTestGate) -> None:
    canceled, main = threading.Event(), threading.main_thread().ident or 0

    async def interrupt() -> NoReturn:
        signal.pthread_kill(main, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            canceled.set()
        raise AssertionError

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with SyncGate(served.url, TOKEN) as gate:
            with pytest.raises(KeyboardInterrupt):
                gate.loop_thread.run(interrupt())
            assert canceled.wait(PATIENCE_SECONDS)
            assert gate.health().status == "healthy"
    finally:
        signal.signal(signal.SIGINT, before)


class Shut:
    """Something that cannot be opened."""

    async def __aenter__(self) -> None:
        raise OSError("no such door")

    async def __aexit__(self, *_: object) -> None:
        raise AssertionError("it was never open")


def test_the_first_call_opens_a_blocking_client_and_close_closes_it(served: SyncTestGate) -> None:
    client = SyncGate(served.url, TOKEN)
    with ThreadPoolExecutor(8) as threads:      # they share one opening
        assert {status.status for status in threads.map(lambda _: client.health(), range(8))} == {"healthy"}
    assert [thread.name for thread in threading.enumerate()].count("asyncgate") == 2      # the fixture's and this one's
    with client:        # which owns it from here on
        client.health()
    with pytest.raises(RuntimeError, match=r"is closed; open\(\) opens it again"):
        client.health()
    assert client.open().health().status == "healthy"
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="is closed"):
        client.speaking_as(agent_id="bob").health()


def test_a_call_waits_for_the_opening_that_another_thread_has_begun() -> None:
    begun, go, order = threading.Event(), threading.Event(), list[str]()

    @asynccontextmanager
    async def opening() -> AsyncIterator[None]:
        begun.set()
        await asyncio.to_thread(go.wait)
        order.append("opened")
        yield

    async def call() -> None:
        order.append("called")

    loop_thread = LoopThread(opening())
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(loop_thread.run, call())
        assert begun.wait(PATIENCE_SECONDS)
        second = threads.submit(loop_thread.run, call())
        wait([second], timeout=0.1)     # it would go by in a moment if it did not wait
        go.set()
        first.result(), second.result()
    loop_thread.__exit__(None, None, None)

    assert order == ["opened", "called", "called"]


def test_a_blocking_client_that_was_never_used_can_be_closed(served: SyncTestGate) -> None:
    client = SyncGate(served.url, TOKEN)
    client.close()

    with pytest.raises(RuntimeError, match="is closed"):
        client.health()


# Nobody closes what ends with its loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_asyncio_client_lives_on_one_loop_after_another_but_not_on_two(served: SyncTestGate) -> None:
    client = AsyncGate(served.url, TOKEN)

    async def use() -> str:
        other = client.speaking_as(agent_id="bob")
        statuses = await asyncio.gather(client.health(), other.health())
        return statuses[0].status

    async def use_twice() -> None:
        await use()
        with ThreadPoolExecutor(1) as threads, pytest.raises(RuntimeError, match="another event loop"):
            threads.submit(asyncio.run, use()).result()
        await client.aclose()
        with pytest.raises(RuntimeError, match=r"is closed; open\(\)"):
            await use()
        async with client:
            await use()

    assert asyncio.run(use()) == "healthy"
    asyncio.run(use_twice())
    gc.collect()        # now, not in a test that does not expect it


async def test_a_call_that_is_given_up_before_it_begins_is_not_made() -> None:
    made: list[str] = []

    async def work() -> None:
        made.append("made")

    call = PendingCall(work())
    call.give_up()
    with pytest.raises(asyncio.CancelledError):
        await call.make()

    assert made == []


def test_what_cannot_be_opened_says_so_and_leaves_no_thread() -> None:
    with pytest.raises(OSError, match="no such door"):
        LoopThread(Shut()).__enter__()
    with pytest.raises(ValueError, match="like http://127"):
        SyncGate("gate:8080")

    assert "asyncgate" not in [thread.name for thread in threading.enumerate()]
