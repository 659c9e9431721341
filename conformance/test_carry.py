"""Export and import of receipts: they stay unchanged, invalid ones are refused, nothing is overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import asdict, replace

from asyncgate import receipt_hash
from asyncgate.conformance.harness import Gate, refused, under
from asyncgate.conformance.test_erasure import erase, live, problems_of
from asyncgate.conformance.test_seals import checked
from asyncgate.parts.model import stored, wire_receipts
from asyncgate.parts.model.erased import read_note, write_note
from asyncgate.parts.receipts.carry import as_wire
from asyncgate.parts.receipts.seals import receipt_digest

pytestmark = pytest.mark.anyio


async def exported(gate: Gate, limit: int | None = None) -> list[stored.Receipt]:
    """Export all stored receipts of a tenant."""
    receipts: list[stored.Receipt] = []
    while page := (await gate.as_admin().export_receipts(after=receipts[-1].receipt_id if receipts else None,
                                                         limit=limit)).receipts:
        receipts += [msgspec.convert({**asdict(receipt)}, stored.Receipt) for receipt in page]
    return receipts


async def import_all(gate: Gate, receipts: list[stored.Receipt]) -> wire_receipts.Imported:
    """Import receipts into a tenant."""
    answer: wire_receipts.Imported = await gate.as_admin().import_receipts(receipts=[asdict(as_wire(receipt))
                                                                                     for receipt in receipts])
    return answer


@pytest.fixture
async def source(make_gate: Callable[..., Gate]) -> Gate:
    """Return a gate with a completed task, an open one, and an acknowledgement."""
    gate = make_gate()
    done = await gate.finished()
    await gate.as_agent().ack_receipt(receipt_id=done.obligation_receipt_id)
    await gate.leased()
    return gate


def change(receipt: stored.Receipt, **more: Any) -> stored.Receipt:
    """Return a changed receipt with a matching hash."""
    new = replace(receipt, **more)
    return replace(new, hash=receipt_hash(new.receipt_type, new.sender, new.to, new.task_id, new.lease_id,
                                          new.schedule_id, new.parents, new.body.encode()))


@pytest.mark.parametrize("limit", [None, 1, 3])
async def test_every_receipt_comes_along_as_it_is(source: Gate, limit: int | None) -> None:
    other = source.stranger()
    receipts = await exported(source, limit)

    answer = await import_all(other, receipts)

    assert (answer.imported, answer.present, answer.refused) == (len(receipts), 0, [])
    assert await exported(other) == receipts
    assert [receipt_digest(receipt) for receipt in await exported(other)] == [receipt_digest(receipt)
                                                                              for receipt in receipts]


async def test_what_is_owed_there_is_owed_here(source: Gate) -> None:
    other = source.stranger()

    await import_all(other, await exported(source))

    assert [receipt.receipt_id for receipt in await other.owed()] == [receipt.receipt_id
                                                                      for receipt in await source.owed()]
    assert len(await other.owed()) == 1


async def test_an_obligation_closes_whether_its_end_comes_with_it_or_later(source: Gate) -> None:
    other, receipts = source.stranger(), await exported(source)
    at = next(at for at, receipt in enumerate(receipts) if receipt.receipt_type == "task.completed")

    await import_all(other, receipts[:at])
    before = [receipt.receipt_id for receipt in await other.owed()]
    await import_all(other, receipts[at:])

    assert before == [receipts[0].receipt_id]
    assert [receipt.receipt_id for receipt in await other.owed()] == [receipt.receipt_id
                                                                      for receipt in await source.owed()]


async def test_again_is_no_error_and_writes_nothing(source: Gate) -> None:
    other, receipts = source.stranger(), await exported(source)
    await import_all(other, receipts)

    async with other.unchanged():
        answer = await import_all(other, receipts)

    assert (answer.imported, answer.present, answer.refused) == (0, len(receipts), [])


async def test_a_receipt_that_is_there_otherwise_is_told_and_not_written_over(source: Gate) -> None:
    other, receipts = source.stranger(), await exported(source)
    await import_all(other, receipts)

    async with other.unchanged():
        answer = await import_all(other, [change(receipts[0], body="{}"), replace(receipts[1], created_at=1.0)])

    assert [(refusal.receipt_id, refusal.reason) for refusal in answer.refused] == [
        (receipt.receipt_id, "differs") for receipt in receipts[:2]]


UNSOUND: dict[str, tuple[str, Callable[[stored.Receipt], stored.Receipt]]] = {
    "a changed body": ("wrong_hash", lambda receipt: replace(receipt, body="{}")),
    "a body that is not JSON": ("wrong_hash", lambda receipt: replace(receipt, body="{")),
    "a sender that nobody stated": ("wrong_hash", lambda receipt: replace(receipt, from_id="eve")),
    "a parent twice": ("wrong_hash", lambda receipt: change(receipt, parents=(receipt.parents[0],) * 2)),
    "a parent that is not here": ("parent_missing", lambda receipt: change(receipt, parents=("none",))),
    "too many parents": ("parent_missing", lambda receipt: change(receipt, parents=tuple(f"{at}" for at in range(11)))),
    "a body that is too large": ("too_large", lambda receipt: change(receipt, body=f'"{"x" * 70_000}"')),
    "an id from the future": ("too_young",
                              lambda receipt: replace(receipt, receipt_id=f"ffffffff{receipt.receipt_id[8:]}")),
    "the same fact under another id": ("stated_already", lambda receipt: replace(
        receipt, receipt_id=f"{receipt.receipt_id[:-4]}0000")),
}


@pytest.mark.one_store
@pytest.mark.parametrize("what", UNSOUND)
async def test_what_is_unsound_is_refused_and_the_others_are_not(source: Gate, what: str) -> None:
    other, receipts = source.stranger(), await exported(source)
    reason, spoil = UNSOUND[what]
    offered = [*receipts[:2], spoil(receipts[1])] if reason == "stated_already" else [receipts[0], spoil(receipts[1])]

    answer = await import_all(other, offered)

    assert [refusal.reason for refusal in answer.refused] == [reason]
    assert await exported(other) == offered[:-1]


async def test_what_was_erased_stays_erased_elsewhere_and_owes_nothing(gate: Gate) -> None:
    await live(gate)
    former = await exported(gate)
    await erase(gate)
    other, receipts = gate.stranger(), await exported(gate)
    erased = {receipt.receipt_id for receipt in receipts if read_note(receipt.body)}

    for part in (receipts[:7], receipts[7:], receipts, former):     # also what they were before: it does not come back
        answer = await import_all(other, part)
        assert answer.refused == []

    there = await exported(other)
    assert len(erased) > 5
    assert {receipt.receipt_id for receipt in there if read_note(receipt.body)} == erased
    assert [receipt_digest(receipt) for receipt in there] == [receipt_digest(receipt) for receipt in receipts]
    assert [receipt.receipt_id for receipt in await other.owed()] == [receipt.receipt_id
                                                                      for receipt in await gate.owed()]
    assert await problems_of(other) == []
    ended = (await other.as_admin().list_erasures()).erasures
    assert {erasure.pseudonym for erasure in ended} == {f"erased-{note.erasure_id}" for receipt in receipts
                                                        if (note := read_note(receipt.body))}
    assert all(erasure.ended for erasure in ended)

    third = other.stranger()        # and once more, from the gate that has imported them
    await import_all(third, there)
    assert [receipt_digest(receipt) for receipt in await exported(third)] == [receipt_digest(receipt)
                                                                              for receipt in receipts]
    assert await problems_of(third) == []


@pytest.mark.parametrize(("kind", "id"), [("worker", "cron"), ("agent", "ada")])
async def test_a_schedule_whose_party_was_erased_is_owed_nowhere(gate: Gate, kind: str, id: str) -> None:
    offer = await gate.leased("cron", type="schedule.create")
    await gate.as_worker("cron").emit_receipt(**under(offer), receipt_type="schedule.created", schedule_id="nightly")
    await gate.as_worker("cron").complete(**under(offer), artifacts=[{"schedule_id": "nightly"}])
    await gate.as_admin().erase_principal(principal_kind=kind, principal_id=id, confirm=id)
    other, receipts = gate.stranger(), await exported(gate)

    answer = await import_all(other, receipts)

    assert answer.refused == []
    assert [receipt.receipt_id for receipt in await other.owed()] == [receipt.receipt_id
                                                                      for receipt in await gate.owed()]
    assert await problems_of(other) == []


async def test_a_receipt_that_is_here_keeps_its_content_when_it_is_offered_as_erased(source: Gate) -> None:
    receipts = await exported(source)
    emptied = [replace(receipt, salt="", body=write_note(receipt.receipt_id, receipt_digest(receipt).hex()))
               for receipt in receipts]

    async with source.unchanged():
        answer = await import_all(source, emptied)

    assert (answer.imported, answer.present, answer.refused) == (0, len(receipts), [])


@pytest.mark.parametrize("together", [True, False])
async def test_an_obligation_is_discharged_once(gate: Gate, together: bool) -> None:
    """By the first receipt that comes, whether the second one comes with it or later."""
    await gate.finished()
    other, receipts = gate.stranger(), await exported(gate)
    end = next(receipt for receipt in receipts if receipt.receipt_type == "task.completed")
    second = change(end, receipt_id=f"{end.receipt_id[:-6]}ffffff", receipt_key="another", receipt_type="task.failed")

    answers = [await import_all(other, part) for part in ([[*receipts, second]] if together else [receipts, [second]])]

    [refused] = [refusal for answer in answers for refusal in answer.refused]
    assert (refused.receipt_id, refused.reason) == (second.receipt_id, "discharged_already")
    assert end.receipt_id in refused.message
    assert await exported(other) == receipts
    assert await problems_of(other) == []


async def test_a_success_is_refused_of_a_task_that_is_here_and_has_not_succeeded(source: Gate) -> None:
    completed = next(receipt for receipt in await exported(source) if receipt.receipt_type == "task.completed")
    task_id = await source.create()
    unlocated = change(completed, receipt_id=f"{completed.receipt_id[:-6]}ffffff", receipt_key="another",
                       task_id=task_id, parents=())

    async with source.unchanged():
        answer = await import_all(source, [unlocated])

    assert [refusal.reason for refusal in answer.refused] == ["contradicts_task"]


async def test_an_erased_receipt_ends_no_task_that_is_owed_here(source: Gate) -> None:
    completed = next(receipt for receipt in await exported(source) if receipt.receipt_type == "task.completed")
    leased = await source.leased()
    forged = replace(completed, receipt_id=f"{completed.receipt_id[:-6]}000000", receipt_key="forged", salt="",
                     task_id=leased.task_id, parents=(leased.obligation_receipt_id,),
                     body=write_note(completed.receipt_id, "0" * 64))

    async with source.unchanged():
        answer = await import_all(source, [forged])

    assert [refusal.reason for refusal in answer.refused] == ["contradicts_task"]


async def test_a_task_of_this_gate_is_ended_by_its_own_steps_alone(source: Gate) -> None:
    completed = next(receipt for receipt in await exported(source) if receipt.receipt_type == "task.completed")
    leased = await source.claim() or await source.leased()
    duty = leased.obligation_receipt_id
    forged = [change(completed, receipt_id=f"{completed.receipt_id[:-6]}00000{at}", receipt_key=f"forged {at}",
                     task_id=task_id, parents=(duty,)) for at, task_id in enumerate((leased.task_id, "elsewhere"))]

    async with source.unchanged():
        answer = await import_all(source, forged)

    assert [refusal.reason for refusal in answer.refused] == ["contradicts_task"] * 2
    await source.as_worker().complete(**under(leased), result={}, artifacts=[{"uri": "x"}])


async def test_the_receipts_of_a_task_that_is_here_come_back_when_they_agree_with_it(source: Gate) -> None:
    receipts = await exported(source)
    task_id = receipts[0].task_id
    again = change(receipts[0], receipt_id=f"{receipts[0].receipt_id[:-6]}000000", receipt_key="another")

    answer = await import_all(source, [again])

    assert [refusal.reason for refusal in answer.refused] == ["contradicts_task"]
    assert task_id in answer.refused[0].message


async def test_receipts_that_are_older_than_a_seal_get_one_of_their_own(source: Gate) -> None:
    other, receipts = source.stranger(), await exported(source)
    await other.finished()
    await other.as_admin().seal_receipts()

    await import_all(other, receipts[:4])
    await import_all(other, receipts[4:])
    report = await checked(other)

    assert (report.problems, report.unsealed) == ([], 0)
    assert report.seals == 3
    listed = (await other.as_admin().list_seals()).seals
    assert [seal.late for seal in listed[1:]] == [[receipt.receipt_id for receipt in part]
                                                  for part in (receipts[:4], receipts[4:])]


async def test_receipts_that_are_younger_than_all_seals_are_covered_by_the_next(source: Gate) -> None:
    other, receipts = source.stranger(), await exported(source)
    await import_all(other, receipts)
    await other.as_admin().seal_receipts()

    report = await checked(other)

    assert (report.problems, report.unsealed, report.seals) == ([], 0, 1)


@pytest.mark.one_store
async def test_export_and_import_are_for_an_admin(gate: Gate) -> None:
    for view in (gate.as_agent(), gate.as_worker()):
        with refused("forbidden"):
            await view.export_receipts()
        with refused("forbidden"):
            await view.import_receipts(receipts=[])


@pytest.mark.one_store
async def test_a_receipt_whose_id_is_not_a_uuid_is_refused_alone(source: Gate) -> None:
    [first, *_] = await exported(source)

    answer = await import_all(source.stranger(), [replace(first, receipt_id="first"), first])

    assert [(row.receipt_id, row.reason) for row in answer.refused] == [("first", "invalid")]
    assert answer.refused[0].message.startswith("receipts[0]: ")
    assert "$.receipt_id" in answer.refused[0].message
    assert answer.imported == 1
