"""Integrated mode end to end: agents notice nothing, others' receipts are there, workers may state theirs (20.8)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any
from urllib.error import HTTPError

import pytest
from msgspec import UNSET

from asyncgate.conformance.harness import Gate, body, refused, under
from asyncgate.conformance.ledgers import LedgerServer
from asyncgate.conformance.verify import verify
from asyncgate.extras.ledger.adoption import Adopter
from asyncgate.extras.ledger.reading import UNREADABLE, Reading
from asyncgate.parts.faces.lease_protocol import PollForTask, offer_task
from asyncgate.parts.model.ids import Ids
from asyncgate.parts.model.members import read_warnings
from asyncgate.parts.model.settings import EscalationSettings, EscalationTarget, Settings
from asyncgate.parts.model.wire import ReceiptRecord
from tests.support.ledger_tools import emptied

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("receipts", ["eventual"], indirect=True)]
ARTIFACTS = [{"uri": "s3://bucket/result"}]


def stated(gate: Gate, receipt_type: str, to: tuple[str, str] = ("agent", "ada"), **more: Any) -> dict[str, Any]:
    """A receipt that somebody else wrote."""
    return {"receipt_id": str(uuid.uuid4()), "tenant_id": gate.tenant_id, "receipt_type": receipt_type,
            "created_at": "2026-11-22T07:00:00Z", "from": {"kind": "service", "id": "delegate"},
            "to": {"kind": to[0], "id": to[1]}, "parents": [], "body": {"says": "the delegate"}, **more}


def by_worker(gate: Gate, offer: Any, receipt_type: str = "task.completed", worker: str = "w1",
              **more: Any) -> dict[str, Any]:
    """A terminal receipt that a worker writes itself."""
    id = Ids().new(gate.now())
    return stated(gate, receipt_type, ("asyncgate", "asyncgate-1"), **{
        "receipt_id": id, "from": {"kind": "worker", "id": worker}, "task_id": offer.task_id,
        "lease_id": offer.lease_id, "parents": [offer.obligation_receipt_id], "asyncgate_instance": "asyncgate-1",
        "body": {"result_payload": {"n": 1}, "artifacts": ARTIFACTS}, **more})


async def state(gate: Gate, ledger: LedgerServer, receipt: dict[str, Any], worker: str = "w1") -> None:
    """Let a worker state a receipt in the ledger, with the key that bootstrap has given it."""
    routing = (await gate.as_worker(worker).bootstrap()).receipt_routing
    ledger.call("POST", "/v1/receipts", receipt, token=routing.auth_token)


async def adopt(gate: Gate) -> None:
    """Look through the ledger once."""
    ledger = gate.ledger
    await Adopter(gate.engine, Reading(gate.engine, ledger.sink, ledger.sender.breaker)).poll()


async def test_bodies_come_back_from_the_ledger(gate: Gate) -> None:
    offer = await gate.finished()
    before = await gate.receipts(offer.task_id)
    await emptied(gate)

    after = await gate.receipts(offer.task_id)

    assert after == before
    assert body(after[2])["artifacts"] == [{"uri": "file:///out"}]
    history = await gate.as_admin().get_task_history(task_id=offer.task_id)
    assert [event.receipt for event in history.events if event.receipt] == after
    assert await gate.as_admin().get_receipt(receipt_id=after[3].receipt_id) == after[3]


async def test_what_others_stated_in_the_ledger_is_in_the_inbox(gate: Gate, ledger: LedgerServer) -> None:
    task_id = await gate.create()
    plan, note = stated(gate, "plan.made"), stated(gate, "plan.changed")
    ledger.call("POST", "/v1/receipts", plan)
    await emptied(gate)

    page = await gate.as_agent().list_receipts()
    assert [receipt.receipt_type for receipt in page.receipts] == ["task.assigned", "plan.made"]
    assert body(page.receipts[1]) == {"says": "the delegate"}
    assert page.receipts[1].tenant_id == gate.tenant_id
    assert type(page.receipts[1]) is ReceiptRecord
    receipt = await gate.as_agent().get_receipt(receipt_id=plan["receipt_id"])
    assert receipt == page.receipts[1]

    ledger.call("POST", "/v1/receipts", note)
    other = await gate.create()
    later = await gate.as_agent().list_receipts(cursor=page.cursor)
    assert [(receipt.receipt_type, receipt.task_id) for receipt in later.receipts] == [
        ("task.assigned", other), ("plan.changed", None)]
    assert task_id != other
    assert (await gate.as_agent().list_receipts(cursor=later.cursor)).receipts == []


@pytest.mark.one_store
@pytest.mark.parametrize("member", ["parents", "hash", "receipt_key", "asyncgate_instance", "task_id", "lease_id",
                                    "schedule_id", "delivered_at", "stated_by", "signature", "body"])
async def test_an_optional_member_that_is_null_is_absent(gate: Gate, ledger: LedgerServer, member: str) -> None:
    """Spec 13, 20.7: programs write null for what they do not have."""
    ledger.call("POST", "/v1/receipts", {**stated(gate, "plan.made"), member: None})

    page = await gate.as_agent().list_receipts()

    assert (page.warnings, [receipt.receipt_type for receipt in page.receipts]) == (UNSET, ["plan.made"])


async def test_a_gate_files_its_receipts_under_the_name_of_a_tenant(
        make_gate: Callable[..., Gate], ledger: LedgerServer) -> None:
    """Spec 20.14: `tenant_id: tenant-123`."""
    ledger.call("POST", "/v1/tenants", {"name": "tenant-123"})
    home = str(uuid.uuid4())
    gate = Gate(make_gate(ledger=ledger.settings(tenant_id="tenant-123"), default_tenant_id=home).engine, home)

    offer = await gate.leased()
    await emptied(gate)

    assert (await gate.backend.lag(home)).parked == 0
    assert {receipt["receipt_type"] for receipt in ledger.receipts("tenant-123")} == {"task.assigned", "task.accepted"}
    assert [bytes(receipt.body) != b"null" for receipt in await gate.receipts(offer.task_id)] == [True, True]


async def test_pages_go_on_into_what_others_stated(gate: Gate, ledger: LedgerServer) -> None:
    for _ in range(3):
        await gate.create()
        ledger.call("POST", "/v1/receipts", stated(gate, "plan.made"))

    types, cursor = list[str](), None
    while True:
        page = await gate.as_agent().list_receipts(limit=2, cursor=cursor)
        types += [receipt.receipt_type for receipt in page.receipts]
        if (cursor := page.next_cursor) is None:
            break
        assert page.receipts

    assert types == ["task.assigned"] * 3 + ["plan.made"] * 3


async def test_nobody_sees_what_is_addressed_to_others_or_another_tenants(gate: Gate, ledger: LedgerServer) -> None:
    bobs = stated(gate, "plan.made", ("agent", "bob"))
    ledger.call("POST", "/v1/receipts", bobs)
    ledger.call("POST", "/v1/receipts", stated(gate.stranger(), "plan.made"))

    assert (await gate.as_agent().list_receipts()).receipts == []
    with refused("forbidden"):
        await gate.as_agent().get_receipt(receipt_id=bobs["receipt_id"])
    with refused("receipt_not_found"):
        await gate.stranger().as_admin().get_receipt(receipt_id=bobs["receipt_id"])


async def test_what_others_owe_is_an_open_obligation_until_the_ledger_has_its_end(
        gate: Gate, ledger: LedgerServer) -> None:
    mine = await gate.create()
    theirs = stated(gate, "task.assigned", task_id="T-1")
    ledger.call("POST", "/v1/receipts", theirs)

    owed = await gate.owed()
    assert [receipt.task_id for receipt in owed] == [mine, "T-1"]

    ledger.call("POST", "/v1/receipts", stated(gate, "task.completed", ("service", "delegate"), task_id="T-1",
                                               parents=[theirs["receipt_id"]]))
    assert [receipt.task_id for receipt in await gate.owed()] == [mine]


async def test_the_first_bootstrap_orders_what_others_stated_by_its_arrival(gate: Gate, ledger: LedgerServer) -> None:
    """Whatever their clocks say: one that is far ahead stands above nothing newer, one that is slow is still seen."""
    before = await gate.create()
    await emptied(gate)
    ahead, slow = [stated(gate, f"plan.{name}", created_at=f"{year}-01-01T00:00:00Z")
                   for name, year in (("ahead", 2099), ("slow", 2001))]
    ledger.call("POST", "/v1/receipts", ahead)
    between = await gate.create()
    await emptied(gate)
    ledger.call("POST", "/v1/receipts", slow)

    async def newest(count: int) -> list[Any]:
        inbox = (await gate.as_agent().bootstrap(max_items=count)).attention.inbox_receipts
        return [receipt.task_id or receipt.receipt_type for receipt in inbox]

    assert await newest(10) == [before, "plan.ahead", between, "plan.slow"]
    assert await newest(1) == ["plan.slow"]
    last = await gate.create()
    await emptied(gate)
    assert await newest(2) == ["plan.slow", last]
    assert await newest(1) == [last]


async def test_bootstrap_says_where_receipts_go_and_how_far_the_ledger_is_behind(
        make_gate: Callable[..., Gate], receipts: dict[str, Any], ledger: LedgerServer) -> None:
    gate = make_gate()
    ledger.call("POST", "/v1/receipts", stated(gate, "plan.made"))
    await gate.finished()
    await emptied(gate)

    agent, worker = await gate.as_agent().bootstrap(), await gate.as_worker().bootstrap()

    assert [receipt.receipt_type for receipt in agent.attention.inbox_receipts] == [
        "plan.made", "task.assigned", "task.result_ready"]       # by the times that they say
    assert (agent.receipt_routing.memorygate_url, agent.receipt_routing.auth_token) == (ledger.url, None)
    assert (worker.receipt_routing.emit_receipts_to, worker.receipt_routing.worker_must_emit_to_memorygate) == (
        "memorygate", False)
    assert worker.receipt_routing.auth_token.startswith("aga_")
    assert agent.receipt_ledger_lag is None
    config = await gate.as_agent().get_config()
    assert (config.receipt_mode, config.memorygate_url) == ("memorygate_integrated", ledger.url)
    assert config.worker_completion == "gate_or_ledger"
    assert ledger.token not in repr(worker)


@pytest.mark.one_store
@pytest.mark.parametrize("path", ["", "/", "/v1/receipts", "/v1/receipts/"])
async def test_an_address_with_the_path_of_h_6_is_told_without_it(
        make_gate: Callable[..., Gate], receipts: dict[str, Any], ledger: LedgerServer, path: str) -> None:
    gate = make_gate(ledger=ledger.settings(url=ledger.url + path))
    await asyncio.sleep(0)      # in which the ledger opens

    agent, config = await gate.as_agent().bootstrap(), await gate.as_agent().get_config()

    assert (agent.receipt_routing.memorygate_url, config.memorygate_url) == (ledger.url, ledger.url)


async def test_a_workers_key_states_its_own_receipts_in_its_own_tenant_and_nothing_else(
        gate: Gate, ledger: LedgerServer) -> None:
    """20.5: the token is the worker's, so no worker speaks for another, and no tenant reaches another's ledger."""
    offer, stranger = await gate.leased(), gate.stranger()
    mine = (await gate.as_worker().bootstrap()).receipt_routing.auth_token
    theirs = (await stranger.as_worker().bootstrap()).receipt_routing.auth_token
    assert (await gate.as_worker().bootstrap()).receipt_routing.auth_token == mine      # not one more for each call
    assert mine != theirs

    for token, receipt in ((mine, by_worker(gate, offer, worker="w2")), (theirs, by_worker(gate, offer)),
                           (mine, by_worker(stranger, offer))):
        with pytest.raises(HTTPError) as refusal:
            ledger.call("POST", "/v1/receipts", receipt, token=token)
        with refusal.value:
            assert refusal.value.code == 403

    await adopt(gate)
    assert (await gate.task(offer.task_id)).status == "leased"
    assert await gate.anomalies(offer.task_id) == []


@pytest.mark.one_store
async def test_nobody_is_given_the_key_of_somebody_else(gate: Gate) -> None:
    asked = await gate.as_admin().bootstrap(principal_kind="worker", principal_id="w1")

    assert asked.receipt_routing.auth_token is None
    assert (await gate.as_agent().bootstrap()).receipt_routing.auth_token is None


@pytest.mark.one_store
async def test_keys_for_workers_can_be_switched_off(make_gate: Callable[..., Gate], ledger: LedgerServer) -> None:
    gate = make_gate(ledger=ledger.settings(worker_tokens=False))
    await gate.create()

    assert (await gate.as_worker().bootstrap()).receipt_routing.auth_token is None


async def test_an_unreadable_ledger_is_a_warning_and_never_an_error(
        make_gate: Callable[..., Gate], receipts: dict[str, Any]) -> None:
    with LedgerServer() as books:
        gate = make_gate(ledger=books.settings(timeout_ms=1000))
        offer = await gate.finished()
        await emptied(gate)
    open_one = await gate.create()      # it waits here, whole

    page = await gate.as_agent().list_receipts()
    owed = await gate.as_agent().list_open_obligations()
    welcome = await gate.as_agent().bootstrap()
    history = await gate.as_agent().get_task_history(task_id=offer.task_id)

    assert page.warnings == [UNREADABLE]
    assert [(receipt.task_id, bytes(receipt.body) != b"null") for receipt in page.receipts] == [
        (offer.task_id, False), (offer.task_id, False), (open_one, True)]
    assert [obligation.task_id for obligation in owed.open_obligations] == [open_one]
    assert read_warnings(owed) == (UNREADABLE,)
    assert (welcome.warnings, welcome.receipt_ledger_lag.waiting) == ([UNREADABLE], 1)
    assert len(history.events) == 4
    with refused("receipt_not_found"):
        await gate.as_agent().get_receipt(receipt_id="nobody's")


# What workers state themselves.


async def test_a_completion_that_a_worker_wrote_to_the_ledger_ends_the_task_and_is_its_receipt(
        gate: Gate, ledger: LedgerServer) -> None:
    offer = await gate.leased()
    theirs = by_worker(gate, offer)
    await state(gate, ledger, theirs)

    await adopt(gate)
    await emptied(gate)

    task = await gate.task(offer.task_id)
    assert (task.status, task.obligation_open) == ("succeeded", False)
    told = await gate.receipts(offer.task_id)
    assert [receipt.receipt_type for receipt in told] == [
        "task.assigned", "task.accepted", "task.completed", "task.result_ready"]
    assert told[2].receipt_id == theirs["receipt_id"]
    assert body(told[2]) == theirs["body"]
    assert told[3].parents == [theirs["receipt_id"]]
    assert [receipt["receipt_type"] for receipt in ledger.receipts(gate.tenant_id)].count("task.completed") == 1
    async with gate.unchanged():
        await adopt(gate)


async def test_a_failure_that_a_worker_wrote_to_the_ledger_is_held_to_the_rules_of_fail(
        gate: Gate, ledger: LedgerServer) -> None:
    offer = await gate.leased(retry_backoff_seconds=0)
    await state(gate, ledger, by_worker(gate, offer, "task.failed", body={
        "error": {"code": "no luck"}, "retry_recommended": True}))

    await adopt(gate)

    task = await gate.task(offer.task_id)
    assert (task.status, task.attempt) == ("queued", 1)


async def test_an_id_that_does_not_order_by_age_is_the_receipts_own_in_the_ledger_and_there_is_no_second_one(
        gate: Gate, ledger: LedgerServer) -> None:
    offer = await gate.leased()
    theirs = by_worker(gate, offer, receipt_id=str(uuid.uuid4()))
    await state(gate, ledger, theirs)

    await adopt(gate)
    await emptied(gate)
    await adopt(gate)

    assert (await gate.task(offer.task_id)).status == "succeeded"
    told = await gate.receipts(offer.task_id)
    assert [receipt.receipt_type for receipt in told] == [
        "task.assigned", "task.accepted", "task.completed", "task.result_ready"]
    assert told == sorted(told, key=lambda receipt: receipt.receipt_id)     # a reader that follows a cursor misses none
    assert body(told[2]) == theirs["body"]
    assert told[3].parents == [theirs["receipt_id"]]
    there = ledger.receipts(gate.tenant_id)
    assert [receipt["receipt_id"] for receipt in there
            if receipt["receipt_type"] == "task.completed"] == [theirs["receipt_id"]]
    inbox = await gate.as_admin().list_receipts(task_id=offer.task_id)
    assert [receipt.receipt_type for receipt in inbox.receipts].count("task.completed") == 1
    assert (await verify(gate.backend)).problems == []
    assert await gate.anomalies(offer.task_id) == []


async def test_the_receipt_of_a_last_failure_is_the_workers_also_where_the_failure_is_escalated(
        make_gate: Callable[..., Gate], ledger: LedgerServer) -> None:
    target = EscalationTarget(escalation_class=1, to_kind="agent", to_id="eve")
    gate = make_gate(escalation=EscalationSettings(enabled=True, targets=(target,)))
    offer = await gate.leased(max_attempts=1)
    theirs = by_worker(gate, offer, "task.failed", body={"error": {"code": "no luck"}, "retry_recommended": True})
    await state(gate, ledger, theirs)

    await adopt(gate)

    assert (await gate.task(offer.task_id)).status == "failed"
    [failed] = await gate.receipts(offer.task_id, "task.failed")
    assert failed.receipt_id == theirs["receipt_id"]


@pytest.mark.one_store
@pytest.mark.parametrize(("wrong", "reason"), [
    ({"from": {"kind": "worker", "id": "w2"}}, "unknown"), ({"lease_id": "another"}, "unknown"),
    ({"lease_id": None}, "names no lease"), ({"body": {"artifacts": "x" * 10}}, "artifacts"),
    ({"parents": []}, "among its parents")])
async def test_a_receipt_that_proves_nothing_changes_nothing_and_is_told_once(
        gate: Gate, ledger: LedgerServer, wrong: dict[str, Any], reason: str) -> None:
    offer = await gate.leased()
    theirs = by_worker(gate, offer, **wrong)
    await state(gate, ledger, theirs, theirs["from"]["id"])

    await adopt(gate)
    await adopt(gate)

    assert (await gate.task(offer.task_id)).status == "leased"
    [told] = await gate.anomalies(offer.task_id)
    assert (told["kind"], told["details"]["receipt_id"]) == ("ledger_receipt_rejected", theirs["receipt_id"])
    assert reason in told["details"]["reason"]


async def test_what_the_ledger_does_not_ascribe_to_the_worker_ends_nothing(gate: Gate, ledger: LedgerServer) -> None:
    """16.4: whoever can write to the ledger as somebody else, such as another gate, forges no result here."""
    offer = await gate.leased()
    ledger.call("POST", "/v1/receipts", by_worker(gate, offer, stated_by={"kind": "worker", "id": "w1"}))

    await adopt(gate)

    assert (await gate.task(offer.task_id)).status == "leased"
    [told] = await gate.anomalies(offer.task_id)
    assert "system asyncgate stored it" in told["details"]["reason"]


async def test_an_acceptance_by_the_lease_protocol_is_the_workers_to_state(gate: Gate, ledger: LedgerServer) -> None:
    """Lease protocol, Worker Acceptance: the gate keeps a receipt of its own and sends none."""
    await gate.create()
    caller = gate.as_worker("worker.one").caller
    offer = await offer_task(gate.engine, caller, PollForTask(worker_id="worker.one"))
    assert offer is not None
    task_id = offer.task.task_id
    await gate.as_worker("worker.one").complete(task_id=task_id, lease_id=offer.lease_id, artifacts=ARTIFACTS)
    await emptied(gate)

    assert [receipt["receipt_type"] for receipt in ledger.receipts(gate.tenant_id)] == [
        "task.assigned", "task.completed", "task.result_ready"]
    assert [receipt.receipt_type for receipt in await gate.receipts(task_id)] == [
        "task.assigned", "task.accepted", "task.completed", "task.result_ready"]


async def test_a_worker_that_tells_both_has_told_it_once(gate: Gate, ledger: LedgerServer) -> None:
    offer = await gate.leased()
    await gate.as_worker().complete(**under(offer), artifacts=ARTIFACTS)
    await state(gate, ledger, by_worker(gate, offer))

    await adopt(gate)

    assert (await gate.task(offer.task_id)).status == "succeeded"
    assert await gate.anomalies(offer.task_id) == []


async def test_what_is_about_a_task_of_another_gate_is_left_alone(gate: Gate, ledger: LedgerServer) -> None:
    offer = await gate.leased()
    await state(gate, ledger, by_worker(gate, offer, task_id="T-elsewhere"))

    await adopt(gate)

    assert await gate.anomalies() == []


def test_a_gate_without_a_ledgers_address_does_not_start(receipts: dict[str, Any]) -> None:
    from asyncgate.extras.ledger.sinks import open_sink
    from asyncgate.parts.model.errors import StartupError

    with pytest.raises(StartupError, match=r"ledger\.url"):
        open_sink(Settings(receipt_mode="memorygate_integrated"))


@pytest.mark.parametrize("url", ["ftp://ledger", "ledger:8090", "http://", "http://[x"])
@pytest.mark.parametrize("mode", ["memorygate_integrated", "receiptgate_integrated"])
def test_an_address_that_is_none_is_refused_at_the_start(receipts: Any, mode: Any, url: str) -> None:
    from asyncgate.extras.ledger.sinks import open_sink
    from asyncgate.parts.model.errors import StartupError
    from asyncgate.parts.model.settings import LedgerSettings

    with pytest.raises(StartupError, match=r"^ledger\.url"):
        open_sink(Settings(receipt_mode=mode, ledger=LedgerSettings(url=url)))


@pytest.mark.parametrize("mode", ["memorygate_integrated", "receiptgate_integrated"])
def test_a_named_variable_without_the_token_is_refused_at_the_start(
        receipts: Any, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncgate.extras.ledger.sinks import open_sink
    from asyncgate.parts.model.errors import StartupError
    from asyncgate.parts.model.settings import LedgerSettings

    named = LedgerSettings(url="http://127.0.0.1:1", auth_token_env="TOKEN_OF_THE_LEDGER")
    monkeypatch.delenv("TOKEN_OF_THE_LEDGER", raising=False)
    with pytest.raises(StartupError, match="TOKEN_OF_THE_LEDGER, which is not set"):
        open_sink(Settings(receipt_mode=mode, ledger=named))

    monkeypatch.setenv("TOKEN_OF_THE_LEDGER", "t")
    open_sink(Settings(receipt_mode=mode, ledger=named))
