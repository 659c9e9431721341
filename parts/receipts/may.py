"""The rules for receipts that the gate's own steps did not write: one table, and the one place that checks it.

A receipt reaches a gate in four ways: somebody emits it, a worker has stated it in the ledger and it is adopted, an
operator imports it, or a gate is rebuilt of it.  Whatever the way, it discharges only what it is about: a task's end
the duty of that task, a deletion the creation of that schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from msgspec import Struct

from asyncgate import COMPLETED, FAILED, RECEIPT_TYPES, SCHEDULED, TERMINATES, UNSCHEDULED
from asyncgate.parts.model.stored import Receipt

Way = Literal["emitted", "adopted", "imported", "rebuilt"]
EVERY = frozenset(RECEIPT_TYPES)


class May(Struct, frozen=True):
    """The rights of receipts that arrive in one way."""

    types: frozenset[str]           # that may come so
    discharges: frozenset[str]      # the types of receipts whose obligations they may close
    own: bool                       # whether each receipt that it answers must be its sender's to answer


MAY: Mapping[Way, May] = {
    "emitted": May(frozenset({SCHEDULED.type, UNSCHEDULED.type}), frozenset({SCHEDULED.type}), own=True),
    "adopted": May(frozenset({COMPLETED.type, FAILED.type}), frozenset({"task.assigned"}), own=True),   # by its lease
    "imported": May(EVERY, frozenset(TERMINATES), own=False),       # by an admin, who vouches for all
    "rebuilt": May(EVERY, frozenset(TERMINATES), own=False),
}


def discharges(child: Receipt, parent: Receipt) -> bool:
    """Whether a receipt closes the obligation that another opened: it is of a type that does, and about the same."""
    if child.receipt_type not in TERMINATES.get(parent.receipt_type, ()) or parent.receipt_id not in child.parents:
        return False
    return child.schedule_id == parent.schedule_id if parent.schedule_id else child.task_id == parent.task_id


def broken_rule(way: Way, child: Receipt, parents: Iterable[Receipt],
                own: Callable[[Receipt], bool] = lambda _: True) -> str | None:
    """Say which rule a receipt breaks that comes in some way and answers these; None if it breaks none."""
    may = MAY[way]
    if child.receipt_type not in may.types:
        return f"a receipt of the type {child.receipt_type} cannot be {way}; its step writes it (H.2)"
    for parent in parents:
        if may.own and not own(parent):
            return (f"receipt {parent.receipt_id} is not yours to answer: it is addressed to another, and its task is "
                    "neither yours nor was it leased to you (PH.2)")
        if child.receipt_type not in TERMINATES.get(parent.receipt_type, ()):
            continue
        if not discharges(child, parent):
            return f"it would discharge receipt {parent.receipt_id}, which is about something else (PH.1)"
        if parent.receipt_type not in may.discharges:
            return f"what is {way} cannot discharge receipt {parent.receipt_id}; its step does (H.2)"
    return None
