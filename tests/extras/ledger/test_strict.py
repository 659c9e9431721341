"""Strict mode: a change counts only when the ledger has its receipts (spec 20.10, option B)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from asyncgate import Extension, Needs, Transact, Work
from asyncgate.conformance.harness import Gate, refused, under
from asyncgate.conformance.ledgers import HASTY
from asyncgate.extras.ledger.outbox import Ledger
from asyncgate.parts.model.errors import DatabaseUnavailable
from asyncgate.parts.model.queries import OutboxFilter
from asyncgate.parts.model.settings import LedgerSettings
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
        "task.assigned", "task.accepted", "task.canceled", "task.result_ready"]


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
    stub.answer = lambda receipt: CUT if receipt["body"].get("type") == "slow" else FINE
    with refused("receipt_ledger_unavailable"):
        await gate.create("slow", idempotency_key="k")
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
