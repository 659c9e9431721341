"""Emitted receipts cannot discharge the obligations of others (PH.1, PH.2, H.2)."""

from __future__ import annotations

from typing import Any

import pytest

from asyncgate import RECEIPT_TYPES, TERMINATES
from asyncgate.conformance.harness import Gate, refused, under
from asyncgate.parts.model import stored
from asyncgate.parts.receipts.incoming import MAY, broken_rule, discharges

pytestmark = pytest.mark.anyio


async def scheduled(gate: Gate, worker: str, schedule_id: str, by: str = "ada") -> str:
    """Let a scheduler create a schedule for an agent; return its schedule.created."""
    offer = await gate.leased(worker, type="schedule.create", by=by)
    made = await gate.as_worker(worker).emit_receipt(**under(offer), receipt_type="schedule.created",
                                                     schedule_id=schedule_id)
    await gate.as_worker(worker).complete(**under(offer), artifacts=["schedule:x"])
    return str(made.receipt_id)


async def test_a_deletion_discharges_no_schedule_of_somebody_else(gate: Gate) -> None:
    victims, own = await scheduled(gate, "clock", "theirs"), await scheduled(gate, "eve", "mine", by="eve")

    async with gate.unchanged():
        for parents in ([own, victims], [victims, own], [victims]):
            with refused("forbidden"):
                await gate.as_worker("eve").emit_receipt(receipt_type="schedule.deleted", parents=parents,
                                                         schedule_id=None)

    assert not (await gate.as_agent().check_terminator(parent_receipt_id=victims)).has_terminator


async def test_a_deletion_discharges_one_schedule_only_also_of_the_same_scheduler(gate: Gate) -> None:
    first, second = await scheduled(gate, "clock", "one"), await scheduled(gate, "clock", "two")

    async with gate.unchanged():
        with refused("forbidden"):
            await gate.as_worker("clock").emit_receipt(receipt_type="schedule.deleted", parents=[first, second])


async def test_an_offered_receipt_names_no_parent_that_is_not_its_senders_to_answer(gate: Gate) -> None:
    theirs = await gate.leased("w1", by="bob")
    offer = await gate.leased("eve", type="schedule.create", by="eve")
    own = await scheduled(gate, "mallory", "mine", by="mallory")

    async with gate.unchanged():
        for parent in (theirs.obligation_receipt_id, own):
            with refused("forbidden"):
                await gate.as_worker("eve").emit_receipt(
                    **under(offer), receipt_type="schedule.created", schedule_id="s", parents=[parent])


async def test_who_held_the_lease_may_answer_what_belongs_to_the_task(gate: Gate) -> None:
    offer = await gate.leased("clock", type="schedule.create", by="ada")

    made = await gate.as_worker("clock").emit_receipt(
        **under(offer), receipt_type="schedule.created", schedule_id="s", parents=[offer.obligation_receipt_id])

    assert made.ok
    assert (await gate.as_agent("ada").emit_receipt(receipt_type="schedule.deleted", parents=[made.receipt_id])).ok


async def test_a_deletion_writes_into_no_task_of_somebody_else(gate: Gate) -> None:
    own, theirs = await scheduled(gate, "eve", "mine", by="eve"), await gate.create(by="bob")

    async with gate.unchanged():
        for task_id in (theirs, "no-such-task"):
            with refused("forbidden"):
                await gate.as_worker("eve").emit_receipt(receipt_type="schedule.deleted", parents=[own],
                                                         task_id=task_id, body={"text": "hello"})


async def test_a_deletion_is_written_once_whatever_it_says_the_second_time(gate: Gate) -> None:
    created = await scheduled(gate, "clock", "s")
    first = await gate.as_worker("clock").emit_receipt(receipt_type="schedule.deleted", parents=[created])

    async with gate.unchanged():
        again: Any = await gate.as_worker("clock").emit_receipt(
            receipt_type="schedule.deleted", parents=[created], body={"padding": "x" * 1000})

    assert again.receipt_id == first.receipt_id


async def test_an_old_deletion_does_not_drop_a_schedule_that_has_its_id_now(gate: Gate) -> None:
    old = await scheduled(gate, "clock", "nightly")
    await gate.as_worker("clock").emit_receipt(receipt_type="schedule.deleted", parents=[old], schedule_id="nightly")
    new = await scheduled(gate, "clock", "nightly")

    async with gate.unchanged():
        await gate.as_worker("clock").emit_receipt(receipt_type="schedule.deleted", parents=[old],
                                                   schedule_id="nightly")

    assert (await gate.as_worker("clock").report_schedule(schedules=[{"schedule_id": "nightly"}])).unknown == []
    assert new in [receipt.receipt_id for receipt in await gate.owed()]


def made(type: str, id: str = "r", *, task: str = "t", schedule: str | None = None,
         parents: tuple[str, ...] = ()) -> stored.Receipt:
    """Make a receipt."""
    return stored.Receipt(id, "", type, 0.0, "worker", "w", "agent", "ada", task, None, schedule, "", "", "",
                          parents=parents)


def test_what_each_way_may_state_and_discharge_is_in_the_table() -> None:
    assert MAY.keys() == {"emitted", "adopted", "imported", "rebuilt"}
    assert MAY["emitted"].types == {"schedule.created", "schedule.deleted"}
    assert MAY["adopted"].types == {"task.completed", "task.failed"}
    assert MAY["imported"].types == MAY["rebuilt"].types == set(RECEIPT_TYPES)


@pytest.mark.parametrize("way", ["imported", "rebuilt"])
@pytest.mark.parametrize(("opening", "ending"), [(type, by) for type,
                                                 ends in TERMINATES.items() for by in sorted(ends)])
def test_whatever_its_way_a_receipt_discharges_only_what_it_is_about(way: Any, opening: str, ending: str) -> None:
    schedule = "s" if opening.startswith("schedule") else None
    parent, another = made(opening, "p", schedule=schedule), "other" if schedule else None
    same, other = (made(ending, task=task, schedule=about, parents=("p",))
                   for task, about in (("t", schedule), ("other", another)))

    assert discharges(same, parent)
    assert broken_rule(way, same, [parent]) is None
    assert not discharges(other, parent)
    assert "about another task" in (broken_rule(way, other, [parent]) or "")
