"""What an agent, or the ledger itself, may do through a ledger: nothing to anybody else (spec 20.8, 20.10)."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import httpx2
import msgspec
import pytest
from msgspec import UNSET

from asyncgate.backends import open_backend
from asyncgate.conformance.harness import Gate, refused, settings_for_tests
from asyncgate.conformance.ledgers import HASTY, LedgerServer
from asyncgate.extras.ledger.adoption import Adopter
from asyncgate.extras.ledger.collected import Unreadable, as_stored, collect_from_ledger
from asyncgate.extras.ledger.outbox import Ledger
from asyncgate.extras.ledger.reading import (
    BODIES_BYTES,
    BODIES_PER_READ,
    ROW_BYTES,
    SHELF_BYTES,
    SHELVES_BYTES,
    Reading,
    Shelf,
    receipt_weight,
)
from asyncgate.extras.ledger.server.app import LedgerGate
from asyncgate.extras.ledger.sinks import Garbled
from asyncgate.extras.ledger.sinks.memorygate import open_sink
from asyncgate.parts.app import Gate as Server
from asyncgate.parts.model.queries import EntryFilter
from asyncgate.parts.model.settings import CircuitBreaker, LedgerSettings, Settings
from asyncgate.parts.model.wire import ReceiptRecord
from tests.conftest import TOKEN, Served
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stub_ledger import StubLedger

pytestmark = pytest.mark.anyio
ONE_FAILURE = CircuitBreaker(failure_threshold=1, timeout_seconds=3600)
FINE: tuple[int, dict[str, Any], str] = (200, {}, "{}")
DEEP = "[" * 974 + "]" * 974


@pytest.fixture
async def stub() -> AsyncIterator[StubLedger]:
    async with StubLedger() as running:
        yield running


@contextlib.asynccontextmanager
async def serving(kind: type[Server], backend_url: str) -> AsyncIterator[Served]:
    """A gate, or a ledger, over an empty database."""
    gate = kind(settings_for_tests(api_key=TOKEN, instance_id="one"), await open_backend(backend_url))
    async with gate.app.router.lifespan_context(gate.app):
        yield Served(gate)


async def joined(make_gate: Callable[..., Gate], url: str, token: str = "", **more: Any) -> Gate:
    """A gate with a ledger that any one failure would shut off for an hour."""
    gate = make_gate(receipt_mode="memorygate_integrated", ledger=LedgerSettings(
        **{"url": url, "auth_token": token, **HASTY, "circuit_breaker": ONE_FAILURE}), **more)
    gate.engine.extend(Ledger(gate.engine))
    return gate


def states(gate: Gate) -> tuple[str, str, str]:
    """Whether the circuits of what is sent, read and committed are closed."""
    ledger: Any = gate.ledger
    return ledger.sender.breaker.state, ledger.reading_breaker.state, ledger.strict_breaker.state


@pytest.mark.one_store
@pytest.mark.parametrize("named", ["{}/chain", "{}%2Fchain", "../v1/receipts", "..", "{}?limit=1", "{}#", "a b", "é",
                                   "x" * 200, "%2e%2e", "{}%00"])
async def test_an_id_that_could_mean_another_address_is_asked_of_no_ledger(
        make_gate: Callable[..., Gate], ledger: LedgerServer, named: str) -> None:
    gate = await joined(make_gate, ledger.url, ledger.token)
    async with gate.ledger:
        owned = (await gate.receipts(await gate.create()))[0].receipt_id
        with refused("receipt_not_found"):
            await gate.as_agent().get_receipt(receipt_id=named.format(owned))

        assert states(gate) == ("closed", "closed", "closed")


async def test_a_slash_that_is_encoded_divides_no_path(backend_url: str) -> None:
    stored = {"receipt_id": "r1", "receipt_type": "plan.made", "from": {"kind": "agent", "id": "ada"},
              "to": {"kind": "agent", "id": "bob"}, "created_at": "2026-11-22T07:00:00Z", "body": {}}
    async with serving(LedgerGate, backend_url) as shelf:
        await shelf.post("/v1/receipts", stored)
        plain, encoded, twice = [await shelf.call("GET", f"/v1/receipts/{path}")
                                 for path in ("r1/chain", "r1%2Fchain", "r1%252Fchain")]

    assert (plain.status, encoded.status, twice.status) == (200, 400, 404)
    assert encoded.json()["error"] == "invalid_request"     # an id has no slash
    assert twice.json()["error"] == "receipt_not_found"


@pytest.mark.parametrize("path", ["/v1/tasks/x%2Fhistory", "/v1/tasks%2Fx", "/v1%2fhealth", "/mcp%2Fu"])
async def test_nor_at_the_gate(path: str) -> None:
    async with serving(Server, "memory:") as gate:
        assert (await gate.call("GET", path)).status == 404


@pytest.mark.one_store
@pytest.mark.parametrize("content", [
    "no json", "[]", '{"receipts": 5}', DEEP, '{"receipt_id": "another", "receipt_type": "t", "created_at": '
    '"2026-11-22T07:00:00Z", "from": {"kind": "agent", "id": "a"}, "to": {"kind": "agent", "id": "ada"}}'])
async def test_an_answer_that_is_no_good_takes_nobody_s_ledger_away(
        make_gate: Callable[..., Gate], stub: StubLedger, content: str) -> None:
    gate = await joined(make_gate, stub.url)
    stub.show = lambda path: (200, {}, content)
    async with gate.ledger:
        with refused("receipt_not_found"):
            await gate.as_agent().get_receipt(receipt_id=str(uuid.uuid4()))

        assert states(gate) == ("closed", "closed", "closed")


async def test_readers_of_one_inbox_at_the_same_time_cache_each_receipt_once(
        make_gate: Callable[..., Gate], stub: StubLedger) -> None:
    gate = await joined(make_gate, stub.url)
    stated = [{"receipt_id": f"r{number}", "receipt_type": "plan.made", "created_at": "2026-11-22T07:00:00Z",
               "from": {"kind": "agent", "id": "bob"}, "to": {"kind": "agent", "id": "ada"}, "body": {}}
              for number in range(3)]

    def show(path: str) -> Any:
        after = httpx2.URL(path).params.get("since_receipt_id", "")
        return 200, {}, json.dumps({"receipts": [receipt for receipt in stated
                                                 if str(receipt["receipt_id"]) > after][:2]})
    stub.show = show
    async with gate.ledger:
        told = await asyncio.gather(*(gate.as_agent().list_receipts() for _ in range(6)))
        reading = gate.engine.find_extension(Reading)

    assert [[receipt.receipt_id for receipt in page.receipts] for page in told] == [["r0", "r1", "r2"]] * 6
    assert reading
    [shelf] = reading.shelves.values()
    assert shelf.size == ROW_BYTES + sum(map(receipt_weight, shelf.rows.values()))


async def test_a_time_without_a_zone_is_utc_like_all_others_of_a_ledger(
        make_gate: Callable[..., Gate], stub: StubLedger) -> None:
    """Spec 19.1; Python's isoformat writes such times for naive moments."""
    gate = await joined(make_gate, stub.url)
    stated = {"receipt_id": "r1", "receipt_type": "plan.made", "created_at": "2026-11-22T07:00:00.5",
              "from": {"kind": "agent", "id": "bob"}, "to": {"kind": "agent", "id": "ada"}, "body": {}}
    stub.show = lambda path: (200, {}, json.dumps({"receipts": [] if "since_receipt_id" in path else [stated]}))
    async with gate.ledger:
        await gate.create()
        inbox = (await gate.as_agent().bootstrap()).attention.inbox_receipts
        page = await gate.ledger.sink.page(gate.tenant_id, EntryFilter(None, None, None, None, None, 10))

    times = {receipt.receipt_type: receipt.created_at for receipt in inbox}
    assert times["plan.made"] == datetime(2026, 11, 22, 7, 0, 0, 500_000, UTC)
    assert set(times) == {"plan.made", "task.assigned"}
    assert [as_stored(receipt).created_at for receipt in page.receipts] == [times["plan.made"].timestamp()]


async def test_a_receipt_that_cannot_be_read_hides_no_other_one(
        make_gate: Callable[..., Gate], stub: StubLedger, caplog: pytest.LogCaptureFixture) -> None:
    gate = await joined(make_gate, stub.url)
    fine = {"receipt_id": "r1", "receipt_type": "plan.made", "created_at": "2026-11-22T07:00:00Z", "tenant_id": None,
            "from": {"kind": "agent", "id": "bob"}, "to": {"kind": "agent", "id": "ada"}, "body": {}, "parents": None}
    stated = [{**fine, "receipt_id": "bad", "lease_id": 5}, fine, {**fine, "receipt_id": "r2", "stated_by": "me"}, 7]
    stub.show = lambda path: (200, {}, json.dumps({"receipts": [] if "since_receipt_id" in path else stated}))
    async with gate.ledger:
        page = await gate.as_agent().list_receipts()
        with pytest.raises(Unreadable):     # who compares or rebuilds must have all of them
            await collect_from_ledger(gate.ledger.sink, gate.tenant_id, lambda rows: None)

    assert (page.warnings, [receipt.receipt_id for receipt in page.receipts]) == (UNSET, ["r1", "r2"])
    assert "receipt bad in the ledger cannot be read and is skipped" in caplog.text


async def test_a_worker_s_receipt_that_cannot_be_read_holds_up_no_other_worker_s(
        make_gate: Callable[..., Gate], stub: StubLedger) -> None:
    gate = await joined(make_gate, stub.url)
    offer = await gate.leased()
    good = {"receipt_id": "r1", "receipt_type": "task.completed", "created_at": "2026-11-22T07:00:00Z",
            "from": {"kind": "worker", "id": "w1"}, "to": {"kind": "asyncgate", "id": "asyncgate-1"},
            "task_id": offer.task_id, "lease_id": offer.lease_id, "parents": [offer.obligation_receipt_id],
            "body": {"artifacts": [{"uri": "a:1"}]}}
    by = [{"kind": "worker", "id": "eve"}, {"kind": "worker", "id": "w1"}]

    def show(path: str) -> Any:
        fresh = "task.completed" in path and gate.tenant_id in path and "since_receipt_id" not in path
        return 200, {}, json.dumps({"receipts": [{**good, "receipt_id": "bad", "hash": 5}, good] if fresh else [],
                                    "stated_by": by if fresh else []})
    stub.show = show
    await Adopter(gate.engine, Reading(gate.engine, gate.ledger.sink, gate.ledger.sender.breaker)).poll()

    assert (await gate.task(offer.task_id)).status == "succeeded"


@pytest.mark.parametrize("poison", ["no json", "a long id"])
async def test_what_a_ledger_tells_of_one_tenant_holds_up_no_other(
        make_gate: Callable[..., Gate], stub: StubLedger, poison: str) -> None:
    gate = await joined(make_gate, stub.url)
    offer, _ = await gate.leased(), await gate.stranger().create()
    stated = {"receipt_id": "x" * 70_000, "receipt_type": "task.completed", "created_at": "2026-11-22T07:00:00Z",
              "from": {"kind": "worker", "id": "w1"}, "to": {"kind": "asyncgate", "id": "asyncgate-1"},
              "task_id": offer.task_id, "lease_id": offer.lease_id, "body": {},
              "parents": [offer.obligation_receipt_id]}
    asked: list[str] = []

    def show(path: str) -> Any:
        asked.append(httpx2.URL(path).params["tenant"])
        receipts = [stated] if gate.tenant_id in path else []
        return (200, {}, "no json" if receipts and poison == "no json" else json.dumps({"receipts": receipts}))
    stub.show = show
    await Adopter(gate.engine, Reading(gate.engine, gate.ledger.sink, gate.ledger.sender.breaker)).poll()

    assert set(asked) == set(await gate.backend.tenants())
    assert len(set(asked)) > 1


async def test_what_one_agent_reads_never_stops_what_is_sent_or_committed(
        make_gate: Callable[..., Gate], stub: StubLedger) -> None:
    gate = await joined(make_gate, stub.url, receipt_consistency_mode="strict")
    stub.show = lambda path: (503, {}, "I only answer writers")
    async with gate.ledger:
        with refused("receipt_not_found"):
            await gate.as_agent().get_receipt(receipt_id=str(uuid.uuid4()))
        open_now = states(gate)

        offer = await gate.leased()

    assert open_now == ("closed", "open", "closed")
    assert offer.task_id
    assert [receipt["receipt_type"] for receipt in stub.taken] == ["task.assigned", "task.accepted"]


async def test_a_receipt_that_makes_the_ledger_stumble_holds_up_no_other_one(
        make_gate: Callable[..., Gate], stub: StubLedger) -> None:
    gate = await joined(make_gate, stub.url)
    stub.answer = lambda receipt: (500, {}, "") if receipt["task_id"] == bad else FINE
    bad = ""
    async with gate.ledger:
        bad = await gate.create()
        good = [await gate.create() for _ in range(5)]
        await stub.until(lambda: len(stub.taken) == 5)

        assert gate.ledger.sender.breaker.state == "closed"
    assert [receipt["task_id"] for receipt in stub.taken] == good


@pytest.mark.one_store
@pytest.mark.parametrize("body", ['{"x": ' + DEEP + "}", '{"x": "a\\u0000b"}', "[" + "[]," * 100_001 + "[]]"],
                         ids=["nested too deep", "NUL", "too many values"])
async def test_a_ledger_takes_no_body_that_a_gate_would_not_take(body: str, backend_url: str) -> None:
    receipt = ('{"receipt_id": "r1", "receipt_type": "plan.made", "created_at": "2026-11-22T07:00:00Z", "from": '
               '{"kind": "agent", "id": "ada"}, "to": {"kind": "agent", "id": "bob"}, "body": ' + body + "}").encode()
    async with serving(LedgerGate, backend_url) as shelf:
        for content in (receipt, b"[%b]" % receipt, b'{"receipts": [%b]}' % receipt):
            answer = await shelf.call("POST", "/v1/receipts", content)

            # of a list, each by itself
            refused = [outcome["error"] for outcome in answer.json().get("results", [])]
            assert answer.status in (400, 413) or (content != receipt and all(refused)), answer
        assert (await shelf.get("/v1/receipts"))["receipts"] == []


LINE = {"receipt_id": "r1", "receipt_type": "plan.made", "from": {"kind": "agent", "id": "ada"},
        "to": {"kind": "agent", "id": "bob"}, "created_at": "2026-11-22T07:00:00Z", "body": {}}


@pytest.mark.one_store
@pytest.mark.parametrize(("method", "target", "more"), [
    ("POST", "/v1/receipts", {"receipt_id": "a\0b"}), ("POST", "/v1/receipts", {"task_id": "a\0b"}),
    ("POST", "/v1/receipts", {"asyncgate_instance": "a\0b"}), ("POST", "/v1/receipts", {"parents": ["a\0b"]}),
    ("POST", "/v1/receipts", {"tenant_id": "a\0b"}), ("POST", "/v1/receipts", {"body": "a\0b"}),
    ("POST", "/v1/receipts", {"from": {"kind": "a\0b", "id": "ada"}}),
    *(("GET", f"/v1/receipts{rest}", None) for rest in (
        "/a%00b", "/a%00b/chain", "?tenant=a%00b", "?task_id=a%00b", "?since_receipt_id=a%00b",
        "?asyncgate_instance=a%00b", "?to_id=a%00b")),
    ("GET", "/v1/audit?tenant=a%00b", None), ("GET", "/v1/limits?tenant=a%00b", None)])
async def test_a_name_that_some_database_could_not_hold_is_refused_by_every_ledger(
        method: str, target: str, more: Any, backend_url: str) -> None:
    async with serving(LedgerGate, backend_url) as shelf, shelf.unchanged():
        answer = await shelf.call(method, target, {**LINE, **more} if more else None)

    assert answer.status == 400, answer
    assert answer.json()["error"] == "invalid_request"


@pytest.mark.parametrize(("method", "target", "name"), [
    ("POST", "/v1/receipts", "tenant-123"), ("POST", "/v1/receipts", ""),
    *(("GET", f"/v1/receipts{rest}", None) for rest in (
        "/r1?tenant=tenant-123", "/r1/chain?tenant=tenant-123", "?tenant=tenant-123", "?tenant=%F0%9F%98%80"))])
async def test_a_tenant_that_no_ledger_has_is_refused_and_nothing_is_stored(
        method: str, target: str, name: str | None, backend_url: str) -> None:
    async with serving(LedgerGate, backend_url) as shelf, shelf.unchanged():
        answer = await shelf.call(method, target, None if name is None else {**LINE, "tenant_id": name})

    assert (answer.status, answer.json()["error"]) == (404, "tenant_not_found")


@pytest.mark.parametrize("number", ["9" * 19, "9" * 20, "9" * 30, "-" + "9" * 400, "1e308", "0.1"])
async def test_any_number_that_a_gate_takes_a_ledger_takes(number: str, backend_url: str) -> None:
    content = json.dumps({**LINE, "body": {"n": "N"}}).replace('"N"', number).encode()
    async with serving(LedgerGate, backend_url) as shelf:
        first, again = [await shelf.call("POST", "/v1/receipts", content) for _ in range(2)]

    assert (first.status, again.status, again.json()["replay"]) == (200, 200, True)


# How much is read.


def sink_to(url: str) -> Any:
    return open_sink(Settings(receipt_mode="memorygate_integrated", ledger=LedgerSettings(**{"url": url, **HASTY})))


@pytest.mark.parametrize("headers", [{}, {"content-encoding": "gzip"}], ids=["plain", "packed"])
async def test_an_answer_that_is_larger_than_a_receipt_is_not_read(stub: StubLedger, headers: dict[str, str]) -> None:
    text = json.dumps({"receipt_id": "r1", "body": "x" * 2**18})
    stub.show = lambda path: (200, headers, gzip.compress(text.encode()).decode("latin-1") if headers else text)
    sink = sink_to(stub.url)

    with pytest.raises(Garbled):
        await sink.fetch("t", ["r1"])
    await sink.close()


async def test_what_is_remembered_of_a_ledger_is_bounded_and_still_shown_to_the_end(
        make_gate: Callable[..., Gate], ledger: LedgerServer) -> None:
    gate = make_gate(receipt_mode="memorygate_integrated", ledger=ledger.settings(auth_token=ledger.token))
    gate.engine.extend(Ledger(gate.engine))
    many = [{"receipt_id": f"r{number:04}", "tenant_id": gate.tenant_id, "receipt_type": "plan.made",
             "created_at": "2026-11-22T07:00:00Z", "from": {"kind": "service", "id": "delegate"},
             "to": {"kind": "agent", "id": "ada"}, "parents": [], "body": {"says": "x" * 30_000}}
            for number in range(BODIES_PER_READ + 50)]
    for first in range(0, len(many), 50):
        ledger.call("POST", "/v1/receipts", many[first:first + 50])

    async with gate.ledger:
        seen, cursor, own = list[str](), None, gate.engine.on.substitutes["list_receipts"]
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                page = await gate.as_agent().list_receipts(cursor=cursor, limit=40)
                seen += [receipt.receipt_id for receipt in page.receipts]
                assert not page.warnings or page.warnings is msgspec.UNSET
                if (cursor := page.next_cursor) is None:
                    break

    reading: Any = own.__self__     # type: ignore[attr-defined]
    assert seen == [receipt["receipt_id"] for receipt in many]
    assert sum(shelf.size for shelf in reading.shelves.values()) <= SHELF_BYTES + 40_000
    assert all(shelf.cut for shelf in reading.shelves.values())


def test_a_shelf_lets_the_oldest_go() -> None:
    shelf = Shelf()
    for number in range(100):
        shelf.add(record_of(f"r{number}", 20_000))

    assert shelf.cut
    assert list(shelf.rows)[-1] == "r99"
    assert shelf.size <= SHELF_BYTES


async def test_bodies_and_inboxes_together_are_bounded(make_gate: Callable[..., Gate], stub: StubLedger) -> None:
    gate = await joined(make_gate, stub.url)
    reading = Reading(gate.engine, gate.ledger.sink, gate.ledger.reading_breaker)
    for number in range(300):
        reading._remember((gate.tenant_id, f"r{number}"), record_of("r", 60_000).body)
        shelf = reading._shelf((gate.tenant_id, None, f"task{number}"))
        shelf.add(record_of("r", 60_000))
        reading._trim_cache()

    assert reading.bodies_size <= BODIES_BYTES
    assert reading.bodies_size == sum(len(bytes(body)) + 1000 for body in reading.bodies.values())
    assert sum(shelf.size for shelf in reading.shelves.values()) <= SHELVES_BYTES


def record_of(receipt_id: str, size: int) -> ReceiptRecord:
    """A receipt of that size."""
    return msgspec.convert({
        "receipt_id": receipt_id, "receipt_type": "plan.made", "created_at": "2026-11-22T07:00:00Z",
        "from": {"kind": "service", "id": "d"}, "to": {"kind": "agent", "id": "ada"}, "tenant_id": "t",
        "task_id": None, "lease_id": None, "schedule_id": None, "parents": [], "asyncgate_instance": "", "hash": "",
        "body": msgspec.Raw(b'"' + b"x" * size + b'"')}, ReceiptRecord)
