"""Strict mode: a change counts only when the ledger has its receipts (spec 20.10, option B)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from asyncgate import Extension, Needs, Transact, Work
from asyncgate.conformance.harness import Gate, refused, under
from asyncgate.conformance.ledgers import HASTY
from asyncgate.conformance.torture import list_undone
from asyncgate.extras.ledger.outbox import Ledger
from asyncgate.extras.ledger.sinks import Garbled
from asyncgate.extras.ledger.strict import REPEAT_SECONDS
from asyncgate.extras.webhooks.sources import find_position
from asyncgate.parts.model import wire, wire_operating
from asyncgate.parts.model.errors import DatabaseUnavailable, ReceiptNotFound
from asyncgate.parts.model.queries import OutboxFilter, ReceiptFilter, Rows
from asyncgate.parts.model.settings import LedgerSettings
from asyncgate.parts.model.stored import Receipt
from tests.support.each import each
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stub_ledger import CUT, StubLedger

pytestmark = pytest.mark.anyio
FINE = (200, dict[str, Any](), "{}")


@pytest.fixture
async def stub() -> AsyncIterator[StubLedger]:
    async with StubLedger() as running:
        yield running


@pytest.fixture
async def gate(make_gate: Callable[..., Gate], stub: StubLedger) -> AsyncIterator[Gate]:
    """A gate that asks the stub before it commits."""
    gate = make_gate(receipt_mode="memorygate_integrated", receipt_consistency_mode="strict",
                     ledger=LedgerSettings(**{"url": stub.url, **HASTY}))
    gate.engine.extend(Ledger(gate.engine))
    async with gate.ledger:
        yield gate


def types(stub: StubLedger) -> list[str]:
    return [receipt["receipt_type"] for receipt in stub.taken]


async def lose_slow(gate: Gate, stub: StubLedger) -> None:
    """Ask for a task whose receipt the ledger may have: it cuts off the answers about each of that type."""
    stub.answer = lambda receipt: CUT if receipt["body"].get("type") == "slow" else FINE
    with refused("receipt_ledger_unavailable"):
        await gate.create("slow", idempotency_key="k")


async def test_the_ledger_has_a_receipt_before_its_change_is_there(gate: Gate, stub: StubLedger) -> None:
    seen: list[Any] = []

    def answer(receipt: dict[str, Any]) -> Any:
        seen.append(receipt["task_id"])
        return FINE
    stub.answer = answer
    task_id = await gate.create()

    assert seen == [task_id]
    assert (await gate.task(task_id)).status == "queued"
    assert await gate.backend.page(gate.tenant_id, OutboxFilter("", 10)) == []


@pytest.mark.parametrize("status", [422, 503])
async def test_what_the_ledger_does_not_take_does_not_happen(gate: Gate, stub: StubLedger, status: int) -> None:
    offer = await gate.leased()
    stub.answer = lambda receipt: (status, {}, "no")

    async with gate.unchanged():
        with refused("receipt_ledger_unavailable"):
            await gate.as_worker().complete(**under(offer), artifacts=[{"uri": "x"}])

    stub.answer = lambda receipt: FINE
    async with asyncio.timeout(PATIENCE_SECONDS):
        while gate.ledger.circuit == "open":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await gate.as_worker().complete(**under(offer), artifacts=[{"uri": "x"}])
    assert (await gate.task(offer.task_id)).status == "succeeded"


async def test_a_refused_receipt_spares_the_others_of_its_batch(gate: Gate, stub: StubLedger) -> None:
    stub.answer = lambda receipt: (422, {}, "no") if receipt["body"].get("type") == "bad" else FINE

    made = await asyncio.gather(*(gate.create(type) for type in ("good", "bad", "good")), return_exceptions=True)

    assert [isinstance(outcome, str) for outcome in made] == [True, False, True]
    assert {task.type for task in (await gate.as_admin().list_tasks()).tasks} == {"good"}


async def test_a_heartbeat_needs_no_ledger(gate: Gate, stub: StubLedger) -> None:
    offer = await gate.leased()
    stub.answer = lambda receipt: (503, {}, "down")

    assert (await gate.as_worker().renew_lease(**under(offer))).ok
    assert (await gate.as_worker().report_progress(**under(offer), progress=1)).ok


async def test_when_another_process_was_faster_it_is_decided_again(gate: Gate, stub: StubLedger) -> None:
    offer = await gate.leased()
    beside = gate.beside()

    async def answer(receipt: dict[str, Any]) -> Any:
        if receipt["receipt_type"] == "task.completed":
            await beside.as_agent().cancel_task(task_id=offer.task_id)
        return FINE
    stub.answer = answer

    with refused("lease_invalid_or_expired", reason="canceled"):
        await gate.as_worker().complete(**under(offer), artifacts=[{"uri": "x"}])

    assert (await gate.task(offer.task_id)).status == "canceled"
    assert [receipt.receipt_type for receipt in await gate.receipts(offer.task_id)] == [
        "task.assigned", "task.accepted", "task.canceled", "task.result_ready", "system.anomaly"]


async def test_a_paused_worker_gets_nothing_when_a_batch_is_decided_again(gate: Gate) -> None:
    task_id = await gate.create()
    await gate.as_admin().pause_work(worker="w1")

    offers = await asyncio.gather(gate.as_worker("w1").lease_next(), gate.as_worker("w2").lease_next())

    assert [[offer.task_id for offer in reply.tasks] for reply in offers] == [[], [task_id]]


async def test_rates_and_turns_count_when_a_batch_is_decided_again(gate: Gate) -> None:
    await gate.as_admin().set_limit(name="api", rate={"count": 2, "seconds": 600})
    for key in ("a", "a", "a", "b"):
        await gate.create(limits={"api": key})

    offers = [await gate.claim() for _ in range(4)]

    keys = [((await gate.task(offer.task_id)).limits or {})["api"] for offer in offers if offer is not None]
    assert keys in (["a", "b", "a"], ["b", "a", "a"])


async def test_what_another_process_changed_meanwhile_is_taken_in(gate: Gate, stub: StubLedger) -> None:
    task_id = await gate.create()
    beside, offers = gate.beside(), list[Any]()

    async def answer(receipt: dict[str, Any]) -> Any:
        if receipt["receipt_type"] == "task.canceled":
            offers.append(await beside.claim("w2"))
        return FINE
    stub.answer = answer

    assert (await gate.as_agent().cancel_task(task_id=task_id)).ok

    with refused("lease_invalid_or_expired", reason="canceled"):
        await beside.as_worker("w2").renew_lease(**under(offers[0]))


async def test_what_only_informs_goes_through_the_outbox(gate: Gate, stub: StubLedger) -> None:
    offer = await gate.leased()
    await gate.as_worker().complete(**under(offer))      # without saying where: an anomaly follows

    await stub.until(lambda: {"system.anomaly", "task.result_ready"} <= {*types(stub)})

    assert types(stub)[:4] == ["task.assigned", "task.accepted", "task.completed", "task.result_ready"]


class TriesTwice(Extension):
    """A database that loses each batch after it was decided, and tries it again."""

    def wrap_transact(self, transact: Transact) -> Transact:
        """Decide each batch once in vain."""
        async def try_twice(tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
            def lose(work: Work) -> None:
                decide(work)
                raise DatabaseUnavailable("a race is lost")
            with contextlib.suppress(DatabaseUnavailable):
                await transact(tenant_id, needs, lose)
            await transact(tenant_id, needs, decide)
        return try_twice


async def test_a_batch_that_the_database_tries_again_waits_for_the_ledger_too(
        make_gate: Callable[..., Gate], stub: StubLedger) -> None:
    gate = make_gate(receipt_mode="memorygate_integrated", receipt_consistency_mode="strict",
                     ledger=LedgerSettings(**{"url": stub.url, **HASTY}))
    gate.engine.extend(TriesTwice(), Ledger(gate.engine))
    async with gate.ledger:
        offer = await gate.leased()
        await gate.as_worker().complete(**under(offer), artifacts=[{"uri": "x"}])
        await stub.until(lambda: "task.result_ready" in types(stub))

        assert types(stub) == ["task.assigned", "task.accepted", "task.completed", "task.result_ready"]

        stub.answer = lambda receipt: (503, {}, "no")
        with refused("receipt_ledger_unavailable"):
            await gate.create()


@pytest.mark.parametrize("receipts", ["strict"], indirect=True)
async def test_a_receipt_that_another_process_has_sent_and_not_committed_yet_is_listed_once(
        make_gate: Callable[..., Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the ledger, not here, and not what others stated."""
    gate, other = make_gate(), make_gate(instance_id="asyncgate-2")
    beside, sink = Gate(other.engine, gate.tenant_id), gate.ledger.sink
    send, before = sink.send, list[Any]()

    async def send_and_look(tenant_id: str, content: bytes) -> None:
        await send(tenant_id, content)
        before.extend((await beside.as_agent().list_receipts()).receipts)
    monkeypatch.setattr(sink, "send", send_and_look)

    await gate.create()
    listed = (await beside.as_agent().list_receipts()).receipts

    assert before == []
    assert [receipt.receipt_type for receipt in listed] == ["task.assigned"]
    assert len(await beside.owed()) == 1


async def test_the_reader_of_an_inbox_does_not_go_past_a_receipt_whose_call_may_be_repeated(
        gate: Gate, stub: StubLedger) -> None:
    """The repeat takes the receipt that the ledger may have, which is older than what was committed meanwhile."""
    ada = gate.as_agent()
    await lose_slow(gate, stub)
    fast, other = await gate.create("fast"), await gate.create("fast", by="bob")

    before = await ada.list_receipts()
    bobs = await gate.as_agent("bob").list_receipts()
    stub.answer = lambda receipt: FINE
    slow = await gate.create("slow", idempotency_key="k")
    after = await ada.list_receipts(cursor=before.cursor)

    assert before.receipts == []
    assert [receipt.task_id for receipt in bobs.receipts] == [other]
    assert [receipt.task_id for receipt in after.receipts] == [slow, fast]
    assert [receipt.task_id for receipt in (await ada.list_receipts(newest=True, limit=1)).receipts] == [fast]


READS: dict[str, Callable[[Gate, str | None], Any]] = {
    "an inbox": lambda gate, since: gate.as_agent().list_receipts(since_receipt_id=since),
    "an inbox by type": lambda gate, since: gate.as_agent().list_receipts(
        receipt_type="task.assigned", cursor=since),
    "all receipts": lambda gate, since: gate.as_admin().list_receipts(cursor=since),
    "what somebody owes": lambda gate, since: gate.as_agent().list_open_obligations(since_receipt_id=since),
    "what all owe": lambda gate, since: gate.as_admin().list_obligations(cursor=since),
    "a session's beginning": lambda gate, since: gate.as_agent().bootstrap(since_receipt_id=since),
}


def read_page(reply: Any) -> tuple[list[str | None], str | None]:
    """Return the tasks of what a read shows, and where its reader goes on."""
    if isinstance(reply, wire.Welcome):
        return [row.task_id for row in reply.attention.inbox_receipts], reply.cursor.latest_receipt_id
    if isinstance(reply, wire_operating.AllObligations):
        return [row.task_id for row in reply.obligations], reply.cursor
    rows = reply.open_obligations if isinstance(reply, wire.Obligations) else reply.receipts
    return [row.task_id for row in rows], reply.cursor


@each("what", READS)
async def test_no_reader_goes_past_a_receipt_whose_call_may_be_repeated(
        what: str, gate: Gate, stub: StubLedger) -> None:
    """The repeat takes the receipt that the ledger may have, which is older than what was committed meanwhile."""
    gate = gate.stranger()
    first = await gate.create("fast")
    await lose_slow(gate, stub)
    fast = await gate.create("fast")

    before, position = read_page(await READS[what](gate, None))
    nothing, waiting = read_page(await READS[what](gate, position))
    stub.answer = lambda receipt: FINE
    slow = await gate.create("slow", idempotency_key="k")
    after, _ = read_page(await READS[what](gate, waiting))

    assert (before, nothing, after) == ([first], [], [slow, fast])


async def test_a_copy_or_a_check_gets_what_was_committed_behind_a_receipt_whose_call_may_be_repeated(
        gate: Gate, stub: StubLedger) -> None:
    """Both read all rows: what they left out would be lost, and each task behind it would seem to lack its receipts."""
    gate = gate.stranger()
    await lose_slow(gate, stub)
    fast = await gate.create("fast")

    rows = await gate.backend.page(gate.tenant_id, Rows(Receipt))

    assert [row.task_id for row in rows] == [fast]


async def test_who_begins_at_the_end_of_an_inbox_gets_what_may_still_be_committed(
        gate: Gate, stub: StubLedger) -> None:
    """Also an endpoint for webhooks that is added at that time."""
    await gate.create("fast")
    await lose_slow(gate, stub)
    fast = await gate.create("fast")

    end = await gate.as_agent().list_receipts(newest=True, limit=1)
    position = await find_position(gate.engine, gate.tenant_id, frozenset())
    stub.answer = lambda receipt: FINE
    slow = await gate.create("slow", idempotency_key="k")
    after = await gate.as_agent().list_receipts(cursor=end.cursor)
    events = await gate.backend.page(gate.tenant_id, ReceiptFilter(None, None, None, position, 10))

    assert [receipt.task_id for receipt in end.receipts] == [fast]
    assert [receipt.task_id for receipt in after.receipts] == [slow, fast]
    assert [receipt.task_id for receipt in events] == [slow, fast]


async def test_what_another_process_commits_while_the_ledger_is_asked_hides_no_result(
        gate: Gate, stub: StubLedger) -> None:
    """task.result_ready is decided before the ledger is asked, and is not offered."""
    offer, beside, ada = await gate.leased(), gate.beside(), gate.as_agent()
    pages: list[Any] = []

    async def answer(receipt: dict[str, Any]) -> Any:
        if receipt["receipt_type"] == "task.completed":
            await beside.create("beside")
            pages.append(await ada.list_receipts())
        return FINE
    stub.answer = answer

    await gate.as_worker().complete(**under(offer), artifacts=[{"uri": "x"}])
    pages.append(await ada.list_receipts(cursor=pages[0].cursor))

    assert [[receipt.receipt_type for receipt in page.receipts] for page in pages] == [
        ["task.assigned", "task.assigned"], ["task.result_ready"]]


@pytest.mark.parametrize("receipts", ["strict"], indirect=True)
async def test_a_receipt_that_the_ledger_has_and_the_gate_has_not_committed_cannot_be_got(
        make_gate: Callable[..., Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    gate, other = make_gate(), make_gate(instance_id="asyncgate-2")
    beside, sink = Gate(other.engine, gate.tenant_id), gate.ledger.sink
    send, offered, shown = sink.send, list[str](), list[Any]()

    async def send_and_get(tenant_id: str, content: bytes) -> None:
        await send(tenant_id, content)
        offered.append(json.loads(content)["receipt_id"])
        with contextlib.suppress(ReceiptNotFound):
            shown.append(await beside.as_admin().get_receipt(receipt_id=offered[0]))
    monkeypatch.setattr(sink, "send", send_and_get)

    await gate.create()

    assert shown == []
    assert (await beside.as_admin().get_receipt(receipt_id=offered[0])).receipt_type == "task.assigned"


async def test_where_nothing_is_offered_the_gate_reads_an_inbox_once(
        gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    await gate.create()
    asked, page = list[Any](), gate.engine.backend.page

    async def page_and_note(tenant_id: str, query: Any) -> Any:
        asked.append(type(query))
        return await page(tenant_id, query)
    monkeypatch.setattr(gate.engine.backend, "page", page_and_note)

    await gate.as_agent().list_receipts()

    assert asked.count(ReceiptFilter) == 1
    assert OutboxFilter not in asked


async def test_what_is_committed_after_another_process_has_its_place_behind_it(gate: Gate, stub: StubLedger) -> None:
    """A cancellation is decided, then another process leases the task, then the cancellation is committed."""
    task_id, beside = await gate.create(), gate.beside()

    async def answer(receipt: dict[str, Any]) -> Any:
        if receipt["receipt_type"] == "task.canceled" and len(stub.taken) < 2:
            gate.skip(1.0)
            assert await beside.claim() is not None
        return FINE
    stub.answer = answer

    await gate.as_agent().cancel_task(task_id=task_id)

    assert [receipt.receipt_type for receipt in await gate.receipts(task_id)] == [
        "task.assigned", "task.accepted", "task.canceled", "task.result_ready", "system.anomaly"]
    assert list_undone(stub.taken) == {stub.taken[1]["receipt_id"]}


@pytest.mark.parametrize("receipts", ["strict"], indirect=True)
async def test_what_a_strict_gate_has_sent_and_never_committed_is_not_what_others_stated(
        make_gate: Callable[..., Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a creation that was withdrawn nor an end that did not count: a later process reads both in the ledger."""
    gate, later = make_gate(), make_gate(instance_id="asyncgate-2")
    send = gate.ledger.sink.send

    async def send_and_lose(tenant_id: str, content: bytes) -> None:
        await send(tenant_id, content)
        raise Garbled("the answer is lost")

    async def lose(call: Any) -> None:
        with monkeypatch.context() as patch, refused("receipt_ledger_unavailable"):
            patch.setattr(gate.ledger.sink, "send", send_and_lose)
            await call
    await lose(gate.create("never"))
    offer = await gate.leased()
    await lose(gate.as_worker().complete(**under(offer), artifacts=[{"uri": "x"}]))
    await gate.beside().as_agent().cancel_task(task_id=offer.task_id)   # a process that does not know strict mode
    gate.skip(REPEAT_SECONDS + 1)
    assert gate.ledger.strict is not None
    await gate.ledger.strict.look()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await gate.backend.page(gate.tenant_id, OutboxFilter("", 10)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    listed = (await Gate(later.engine, gate.tenant_id).as_admin().list_receipts()).receipts

    assert {receipt.task_id for receipt in listed} == {offer.task_id}
    assert [receipt.receipt_type for receipt in listed].count("task.completed") == 0
