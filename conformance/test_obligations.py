"""Obligations: owed to the owner, discharged by evidence (PH.1, PH.6)."""

from __future__ import annotations

import msgspec
import pytest

from asyncgate.conformance.harness import NEEDED, Gate, under
from asyncgate.parts.model import wire
from asyncgate.parts.operations import OPERATIONS

pytestmark = pytest.mark.anyio


async def test_open_obligations_are_created_minus_discharged(gate: Gate) -> None:
    offers = [await gate.leased() for _ in range(6)]
    w1 = gate.as_worker()
    await w1.complete(**under(offers[0], artifacts=[{"uri": "x"}]))
    await w1.complete(**under(offers[1]))
    await w1.fail(**under(offers[2], error="no"))
    await w1.fail(**under(offers[3], retryable=True, error="no"))
    await gate.as_agent().cancel_task(task_id=offers[4].task_id)
    await w1.release_lease(**under(offers[5]))

    owed = await gate.owed()

    assert [r.receipt_id for r in owed] == [offers[n].obligation_receipt_id for n in (1, 3, 5)]
    assert {r.receipt_type for r in owed} == {"task.assigned"}


async def test_an_obligation_is_addressed_to_the_owner_and_to_nobody_else(gate: Gate) -> None:
    await gate.leased("w1")

    assert len(await gate.owed("ada")) == 1
    assert await gate.owed("bob") == []
    assert await gate.owed("w1", "worker") == []
    assert await gate.owed("ada", "human") == []


async def test_an_obligation_is_listed_as_the_receipt_that_opened_it(gate: Gate) -> None:
    task_id = await gate.create()

    assert await gate.owed() == [await gate.receipt(task_id, "task.assigned")]


@pytest.mark.parametrize("end", ["complete", "fail", "cancel"])
async def test_has_terminator_turns_true_with_the_receipt_that_discharges(gate: Gate, end: str) -> None:
    offer = await gate.leased()
    ask = {"parent_receipt_id": offer.obligation_receipt_id}
    assert not (await gate.as_agent().check_terminator(**ask)).has_terminator

    if end == "cancel":
        await gate.as_agent().cancel_task(task_id=offer.task_id)
    else:
        more = {"artifacts": [{"uri": "x"}]} if end == "complete" else {}
        await getattr(gate.as_worker(), end)(**NEEDED.get(end, {}), **under(offer, **more))

    answer = await gate.as_agent().check_terminator(**ask)
    assert (answer.parent_receipt_id, answer.has_terminator) == (offer.obligation_receipt_id, True)


async def test_a_success_without_location_is_no_terminator(gate: Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().complete(**under(offer, result=1))

    assert not (await gate.as_agent().check_terminator(parent_receipt_id=offer.obligation_receipt_id)).has_terminator


async def test_a_child_of_another_type_is_no_terminator(gate: Gate) -> None:
    offer = await gate.leased()
    await gate.as_agent().ack_receipt(receipt_id=offer.obligation_receipt_id)

    assert not (await gate.as_agent().check_terminator(parent_receipt_id=offer.obligation_receipt_id)).has_terminator


async def test_what_opens_no_obligation_has_no_terminator(gate: Gate) -> None:
    offer = await gate.finished()
    for type in ("task.completed", "task.accepted", "task.result_ready"):
        receipt = await gate.receipt(offer.task_id, type)
        assert not (await gate.as_admin().check_terminator(parent_receipt_id=receipt.receipt_id)).has_terminator
    assert not (await gate.as_admin().check_terminator(parent_receipt_id="unknown")).has_terminator


async def test_the_index_of_obligations_equals_the_evidence(gate: Gate) -> None:
    for _ in range(3):
        await gate.finished()
    for _ in range(2):
        await gate.create()
    admin = gate.as_admin()

    for receipt in await gate.receipts(type="task.assigned"):
        ended = (await admin.check_terminator(parent_receipt_id=receipt.receipt_id)).has_terminator
        assert ended is (receipt.receipt_id not in {owed.receipt_id for owed in await gate.owed()})


async def test_obligations_are_followed_page_by_page(gate: Gate) -> None:
    for _ in range(7):
        await gate.create()
    ada, seen, cursor = gate.as_agent(), [], None
    while (page := await ada.list_open_obligations(limit=3, since_receipt_id=cursor)).open_obligations:
        assert len(page.open_obligations) <= 3
        seen += page.open_obligations
        assert page.cursor is not None
        cursor = page.cursor

    assert page.cursor == cursor, "spec 17: a poller goes on from where it is"
    assert seen == await gate.owed()


async def test_a_page_is_filled_however_much_history_lies_between(gate: Gate) -> None:
    first = await gate.create(type="open")
    for _ in range(10):
        await gate.finished(type="closed", priority=9)
    last = await gate.create(type="open")

    page = await gate.as_agent().list_open_obligations(limit=2)

    assert [receipt.task_id for receipt in page.open_obligations] == [first, last]


async def test_fifty_obligations_are_a_page_and_two_hundred_the_most(gate: Gate) -> None:
    await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 210)

    assert len((await gate.as_agent().list_open_obligations()).open_obligations) == 50
    assert len((await gate.as_agent().list_open_obligations(limit=1000)).open_obligations) == 200


async def test_the_answer_has_no_bucket_and_its_schema_forbids_one(gate: Gate) -> None:
    answer = await gate.as_agent().list_open_obligations()

    assert set(msgspec.to_builtins(answer)) == {"server", "relationship", "open_obligations", "cursor"}
    assert OPERATIONS["list_open_obligations"].gives is wire.Obligations
    schema = msgspec.json.schema(wire.Obligations)["$defs"]["Obligations"]
    assert schema["additionalProperties"] is False, "PH.6.2"
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(answer) | {"assigned_tasks": []}, wire.Obligations)


async def test_the_answer_names_the_gate_and_the_principal(gate: Gate) -> None:
    answer = await gate.as_agent("ada").list_open_obligations()

    assert (answer.server.name, answer.server.instance_id) == ("AsyncGate", "asyncgate-1")
    assert (answer.relationship.principal_kind, answer.relationship.principal_id) == ("agent", "ada")


async def test_bootstrap_shows_the_inbox_and_empty_buckets(gate: Gate) -> None:
    offer = await gate.finished()
    await gate.create()

    welcome = await gate.as_agent("ada").bootstrap()

    inbox = await gate.receipts(to_kind="agent", to_id="ada")
    shown = welcome.attention
    assert [r.receipt_id for r in shown.inbox_receipts] == [r.receipt_id for r in inbox]
    assert offer.obligation_receipt_id in {r.receipt_id for r in shown.inbox_receipts}
    others = (shown.assigned_tasks, shown.waiting_results, shown.running_or_scheduled, shown.anomalies)
    assert others == ([], [], [], [])
    assert (welcome.server.name, welcome.server.instance_id) == ("AsyncGate", "asyncgate-1")
    assert (welcome.relationship.principal_kind, welcome.relationship.principal_id) == ("agent", "ada")
    assert welcome.environment == "development"


async def test_bootstrap_goes_on_from_its_cursor(gate: Gate) -> None:
    for _ in range(5):
        await gate.create()
    first, *rest = [receipt.receipt_id for receipt in await gate.receipts()]
    ada, seen, cursor = gate.as_agent(), list[str](), first
    while (welcome := await ada.bootstrap(max_items=2, since_receipt_id=cursor)).attention.inbox_receipts:
        seen += [receipt.receipt_id for receipt in welcome.attention.inbox_receipts]
        cursor = welcome.cursor.latest_receipt_id

    assert seen == rest
    assert cursor == welcome.cursor.latest_receipt_id == rest[-1], "nothing came: the given one"


async def test_bootstrap_stamps_delivery_once_and_nothing_of_the_receipt(gate: Gate) -> None:
    task_id = await gate.create()
    before = await gate.receipt(task_id, "task.assigned")
    assert before.delivered_at is None

    await gate.as_agent().bootstrap()
    first = await gate.receipt(task_id, "task.assigned")
    gate.skip(60)
    await gate.as_agent().bootstrap()

    after = await gate.receipt(task_id, "task.assigned")
    assert first.delivered_at is not None
    assert after.delivered_at == first.delivered_at
    assert msgspec.structs.replace(after, delivered_at=None) == before


async def test_listing_stamps_no_delivery(gate: Gate) -> None:
    task_id = await gate.create()

    await gate.as_agent().list_receipts()
    await gate.as_agent().list_open_obligations()

    assert (await gate.receipt(task_id, "task.assigned")).delivered_at is None
