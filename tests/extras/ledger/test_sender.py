"""What waits in the outbox reaches the ledger: in order per task, byte by byte, once, whatever happens (20.10, H.7)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from msgspec import UNSET

from asyncgate.conformance.harness import Gate, under
from asyncgate.conformance.ledgers import HASTY, LedgerServer
from asyncgate.extras.ledger import outbox
from asyncgate.extras.ledger.outbox import Breaker, Ledger
from asyncgate.parts.model.caller import NOBODY
from asyncgate.parts.model.errors import DatabaseUnavailable
from asyncgate.parts.model.queries import OutboxFilter, ReceiptFilter, Rows
from asyncgate.parts.model.settings import CircuitBreaker, EmissionRetry, LedgerSettings
from asyncgate.parts.model.stored import Lag, Receipt
from asyncgate.parts.model.wire import Health
from tests.support.ledger_tools import emptied
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stub_ledger import CUT, Answer, StubLedger

pytestmark = pytest.mark.anyio
ALL = ReceiptFilter(None, None, None, None, 1000)
Integrated = Callable[..., Any]


@pytest.fixture
async def stub() -> AsyncIterator[StubLedger]:
    async with StubLedger() as running:
        yield running


@pytest.fixture
def integrated(make_gate: Callable[..., Gate]) -> Integrated:
    """What makes a gate that sends its receipts to a URL, for the time of a block."""
    @contextlib.asynccontextmanager
    async def make(url: str, tenant_id: str = "", **more: Any) -> AsyncIterator[Gate]:
        ledger = LedgerSettings(**{"url": url, **HASTY, **more})
        gate = make_gate(receipt_mode="memorygate_integrated", ledger=ledger)
        if tenant_id:
            gate = Gate(gate.engine, tenant_id)
        gate.engine.extend(Ledger(gate.engine))
        async with gate.ledger:
            yield gate
    return make


def types(receipts: list[dict[str, Any]]) -> list[str]:
    return [receipt["receipt_type"] for receipt in receipts]


async def test_the_ledger_has_every_receipt_as_the_gate_would_show_it(
        integrated: Integrated, make_gate: Callable[..., Gate], ledger: LedgerServer) -> None:
    async with integrated(ledger.url, auth_token=ledger.token) as gate:
        offer = await gate.finished()
        await emptied(gate)

        there = ledger.receipts(gate.tenant_id)

    assert types(there) == ["task.assigned", "task.accepted", "task.completed", "task.result_ready"]
    alone = make_gate()
    await alone.finished()
    here = [json.loads(row.body) for row in await alone.backend.page(alone.tenant_id, Rows(Receipt))]
    assert [receipt["body"] for receipt in there] == here
    assert {receipt["task_id"] for receipt in there} == {offer.task_id}
    assert {receipt["tenant_id"] for receipt in there} == {gate.tenant_id}


async def test_many_receipts_share_a_call_and_the_refused_ones_are_parked(
        integrated: Integrated, ledger: LedgerServer) -> None:
    async with integrated(ledger.url, auth_token="not yet good") as gate:
        for _ in range(30):
            await gate.finished()
        [first, *_] = await gate.backend.page(gate.tenant_id, OutboxFilter("", 1))
        ledger.call("POST", "/v1/receipts", {**json.loads(first.content), "body": {"another": True}})
    async with integrated(ledger.url, gate.tenant_id, auth_token=ledger.token) as gate:
        await emptied(gate)

        assert (await gate.backend.lag(gate.tenant_id)).parked == 1
        assert gate.ledger.sender.singly_until == 0
    there = ledger.receipts(gate.tenant_id)
    assert len(there) == 121        # one of them the other's, one the anomaly that tells of it
    tasks: dict[str, list[str]] = {receipt["task_id"]: [] for receipt in there}
    for receipt in there:
        tasks[receipt["task_id"]] += [receipt["receipt_type"]] * (receipt["receipt_type"] != "system.anomaly")
    assert set(map(tuple, tasks.values())) == {
        ("task.assigned", "task.accepted", "task.completed", "task.result_ready")}


async def test_a_portal_that_answers_for_the_ledger_has_no_receipt(integrated: Integrated, stub: StubLedger) -> None:
    foreign: list[Answer] = [(200, {}, text) for text in ("<html>Welcome</html>", '"ok"', '{"receipt_id":"another"}',
                                                              '{"ok":true}')]
    good: Answer = (200, {}, "{}")
    answers = itertools.chain(foreign, itertools.repeat(good))
    stub.answer = lambda receipt: next(answers)
    async with integrated(stub.url) as gate:
        await gate.finished()
        await emptied(gate)

    assert len(stub.sent) == len(set(stub.sent)) + len(foreign)
    assert types(stub.taken) == ["task.assigned", "task.accepted", "task.completed", "task.result_ready"]


async def test_receipts_of_a_task_arrive_in_their_order(integrated: Integrated, stub: StubLedger) -> None:
    cut = itertools.cycle([CUT, (200, {}, "{}"), (503, {}, "busy"), (200, {}, "{}"), (429, {}, "slowly")])
    stub.answer = lambda receipt: next(cut)
    breaker = CircuitBreaker(failure_threshold=1000)
    async with integrated(stub.url, circuit_breaker=breaker) as gate:
        offers = [await gate.finished() for _ in range(5)]
        await emptied(gate)

    arrived = [receipt["receipt_id"] for receipt in stub.taken]
    for offer in offers:
        mine = [receipt for receipt in stub.taken if receipt["task_id"] == offer.task_id]
        assert types(mine) == ["task.assigned", "task.accepted", "task.completed", "task.result_ready"]
    assert len(arrived) == len(set(arrived)) == 20
    assert {json.loads(body)["receipt_id"] for body in stub.sent} == set(arrived)
    assert len(set(stub.sent)) == 20 < len(stub.sent)       # tried again with the same bytes


async def test_the_health_check_tells_the_last_known_lag_while_the_database_takes_long_to_count(
        integrated: Integrated, stub: StubLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MEASURE_SECONDS", 0.0)
    counted = asyncio.Event()

    async def count_slowly() -> list[str]:
        await counted.wait()
        return [gate.tenant_id]
    async with integrated(stub.url) as gate:
        await gate.finished()
        await emptied(gate)
        unsent, gate.backend.unsent = gate.backend.unsent, count_slowly

        during = [(await gate.engine.health(NOBODY, Health())).receipt_ledger_lag for _ in range(2)]
        counted.set()
        await gate.ledger.measuring
        gate.backend.unsent = unsent
        monkeypatch.setattr(outbox, "MEASURE_SECONDS", PATIENCE_SECONDS)
        after = (await gate.engine.health(NOBODY, Health())).receipt_ledger_lag

    assert during == [UNSET, UNSET]
    assert after.waiting == 0


async def test_a_count_that_fails_when_nobody_waits_for_it_any_more_is_not_logged_as_never_retrieved(
        integrated: Integrated, stub: StubLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MEASURE_SECONDS", 0.0)
    counted, problems = asyncio.Event(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))

    async def count_in_vain() -> list[str]:
        await counted.wait()
        raise DatabaseUnavailable("it has gone meanwhile", retry_after=1)
    async with integrated(stub.url) as gate:
        unsent, gate.backend.unsent = gate.backend.unsent, count_in_vain
        await gate.engine.health(NOBODY, Health())
        counted.set()
        await asyncio.wait([gate.ledger.measuring])
        gate.backend.unsent = unsent
        await gate.engine.health(NOBODY, Health())
        gc.collect()

    assert problems == []


async def test_a_refused_receipt_is_parked_and_told_and_does_not_open_the_circuit(
        integrated: Integrated, stub: StubLedger) -> None:
    stub.answer = lambda receipt: (422, {}, "no") if receipt["receipt_type"] == "task.accepted" else (200, {}, "{}")
    async with integrated(stub.url, circuit_breaker=CircuitBreaker(failure_threshold=2)) as gate:
        for _ in range(4):
            await gate.finished()
        await emptied(gate)
        lag = await gate.ledger.lag(gate.tenant_id)
        assert (await gate.engine.health(NOBODY, Health())).receipt_ledger_lag.parked == 4
        rows = await gate.backend.page(gate.tenant_id, ALL)

    assert (lag.waiting, lag.parked, lag.circuit) == (0, 4, "closed")
    told = [receipt["body"] for receipt in stub.taken if receipt["receipt_type"] == "system.anomaly"]
    assert [notice["kind"] for notice in told] == ["receipt_refused"] * 4
    assert {notice["details"]["reason"] for notice in told} == {"422 no"}
    assert {notice["details"]["receipt_id"] for notice in told} == {
        row.receipt_id for row in rows if row.receipt_type == "task.accepted"}


async def test_a_ledger_that_refuses_everything_is_not_told_about_that_for_ever(
        integrated: Integrated, stub: StubLedger) -> None:
    stub.answer = lambda receipt: (400, {}, "nothing of yours")
    async with integrated(stub.url) as gate:
        await gate.create()
        await emptied(gate)

        assert await gate.backend.lag(gate.tenant_id) == lag_of(parked=2)
    assert len(stub.sent) == 2


async def test_a_receipt_whose_answer_was_lost_is_sent_again_and_is_there_once(
        integrated: Integrated, ledger: LedgerServer, stub: StubLedger) -> None:
    lost = set[str]()

    def answer(receipt: dict[str, Any]) -> Any:
        stored = ledger.call("POST", "/v1/receipts", receipt)
        if receipt["receipt_id"] in lost:
            assert stored["replay"] is True
            return 200, {}, "{}"
        lost.add(receipt["receipt_id"])
        return CUT
    stub.answer = answer
    async with integrated(stub.url, circuit_breaker=CircuitBreaker(enabled=False)) as gate:
        await gate.finished()
        await emptied(gate)

    assert types(ledger.receipts(gate.tenant_id)) == [
        "task.assigned", "task.accepted", "task.completed", "task.result_ready"]
    assert len(stub.sent) == 8


@pytest.mark.parametrize("status", [401, 403, 404, 500, 503])
async def test_what_says_nothing_about_the_receipt_parks_none(
        integrated: Integrated, stub: StubLedger, status: int) -> None:
    stub.answer = lambda receipt: (status, {}, "no")
    async with integrated(stub.url) as gate:
        await gate.create()
        await stub.until(lambda: len(stub.sent) >= 3)
        stub.answer = lambda receipt: (200, {}, "{}")
        await emptied(gate)

    assert len(stub.taken) == 1
    assert len(set(stub.sent)) == 1


async def test_an_open_circuit_leaves_the_ledger_in_peace_and_closes_again(
        integrated: Integrated, stub: StubLedger) -> None:
    stub.answer = lambda receipt: (503, {}, "down")
    breaker = CircuitBreaker(failure_threshold=2, timeout_seconds=3600)
    async with integrated(stub.url, circuit_breaker=breaker, parallel=1) as gate:
        for _ in range(10):
            await gate.create()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while gate.ledger.sender.breaker.state != "open":  # noqa: ASYNC110  # the gate tells nobody
                await asyncio.sleep(0.01)
        lag = await gate.ledger.lag(gate.tenant_id)
        asked = len(stub.sent)
        assert (lag.waiting, lag.circuit, asked) == (10, "open", 2)
        assert lag.oldest_seconds >= 0

        stub.answer = lambda receipt: (200, {}, "{}")
        gate.ledger.sender.breaker.opened_at -= 3601
        gate.ledger.sender.call(gate.tenant_id)
        await emptied(gate)
        assert gate.ledger.sender.breaker.state == "closed"
    assert len(stub.taken) == 10


async def test_what_a_stopped_gate_left_is_sent_by_the_next_one(integrated: Integrated, stub: StubLedger) -> None:
    stub.answer = lambda receipt: CUT
    async with integrated(stub.url) as first:
        offer = await first.leased()
        await stub.until(lambda: len(stub.sent) > 1)
    stub.answer = lambda receipt: (200, {}, "{}")

    async with integrated(stub.url, first.tenant_id) as second:
        await second.as_worker().complete(**under(offer), artifacts=[{"uri": "x"}])
        await emptied(second)

    assert types(stub.taken) == ["task.assigned", "task.accepted", "task.completed", "task.result_ready"]


async def test_a_backlog_beyond_the_buffer_is_told_once_and_nothing_is_dropped(
        integrated: Integrated, stub: StubLedger, caplog: pytest.LogCaptureFixture) -> None:
    stub.answer = lambda receipt: (503, {}, "down")
    retry = EmissionRetry(buffer_size=5, retry_interval_seconds=0.02, max_retries=0)
    breaker = CircuitBreaker(enabled=False)
    async with integrated(stub.url, emission_retry=retry, circuit_breaker=breaker) as gate:
        for _ in range(8):
            await gate.create()
        await stub.until(lambda: any(json.loads(content)["receipt_type"] == "system.anomaly" for content in stub.sent))
        seen = len(stub.sent)
        await stub.until(lambda: len(stub.sent) > seen + 30)
        stub.answer = lambda receipt: (200, {}, "{}")
        await emptied(gate)

    told = [receipt for receipt in stub.taken if receipt["receipt_type"] == "system.anomaly"]
    assert [receipt["body"]["kind"] for receipt in told] == ["receipt_backlog"]
    assert told[0]["body"]["details"]["buffer_size"] == 5
    assert len(stub.taken) == 9
    assert [record.levelno for record in caplog.records if "wait for the ledger" in record.message] == [
        logging.CRITICAL]


def test_the_breaker_opens_probes_and_closes() -> None:
    now = [0.0]
    breaker = Breaker(CircuitBreaker(failure_threshold=2, timeout_seconds=10, half_open_max_calls=2,
                                     success_threshold=2), lambda: now[0])
    breaker.note_outage()
    assert seen(breaker) == ("closed", True)
    breaker.note_answer()
    breaker.note_outage()
    assert seen(breaker) == ("closed", True)
    breaker.note_outage()
    assert seen(breaker) == ("open", False)
    assert breaker.wait() == 10.0
    now[0] = 10.0
    assert [breaker.let_through() for _ in range(3)] == [True, True, False]
    assert seen(breaker) == ("half_open", False)
    breaker.note_outage()
    assert seen(breaker) == ("open", False)
    now[0] = 20.0
    assert breaker.let_through()
    assert not breaker.note_answer()
    assert breaker.let_through()
    assert breaker.note_answer()
    assert seen(breaker) == ("closed", True)


def seen(breaker: Breaker) -> tuple[str, bool]:
    """What it is, and whether it lets one more through."""
    return breaker.state, breaker.let_through()


def test_a_breaker_that_is_switched_off_never_opens() -> None:
    breaker = Breaker(CircuitBreaker(enabled=False, failure_threshold=1))
    for _ in range(5):
        breaker.note_outage()
    assert seen(breaker) == ("closed", True)


def lag_of(**fields: Any) -> Any:
    return Lag(**fields)
