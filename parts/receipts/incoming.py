"""The rules for receipts that the gate's own steps did not write: one table, and the functions that check it.

Such a receipt comes in one of four ways: a caller emits it, the gate adopts it from the ledger, an operator imports it,
or a gate is rebuilt from it.  In every way, a receipt discharges only its own obligation: the end of a task discharges
the duty of that task, the deletion of a schedule the creation of that schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from msgspec import MsgspecError, Struct

from asyncgate import COMPLETED, FAILED, RECEIPT_TYPES, SCHEDULED, TERMINATES, UNSCHEDULED, receipt_hash
from asyncgate.parts.model import stored
from asyncgate.parts.model.erased import PSEUDONYM, read_note

Way = Literal["emitted", "adopted", "imported", "rebuilt"]
EVERY = frozenset(RECEIPT_TYPES)


class May(Struct, frozen=True):
    """What receipts that come in one way may do."""

    types: frozenset[str]           # the allowed types
    discharges: frozenset[str]      # the types of the obligations that they may discharge
    own: bool                       # whether the sender must be a party to each parent


MAY: Mapping[Way, May] = {
    "emitted": May(frozenset({SCHEDULED.type, UNSCHEDULED.type}), frozenset({SCHEDULED.type}), own=True),
    "adopted": May(frozenset({COMPLETED.type, FAILED.type}), frozenset({"task.assigned"}), own=True),   # by its lease
    "imported": May(EVERY, frozenset(TERMINATES), own=False),       # by an admin, who vouches for all
    "rebuilt": May(EVERY, frozenset(TERMINATES), own=False),
}


def discharges(child: stored.Receipt, parent: stored.Receipt) -> bool:
    """Whether a receipt discharges an obligation: right type, named as parent, and about the same task or schedule."""
    if child.receipt_type not in TERMINATES.get(parent.receipt_type, ()) or parent.receipt_id not in child.parents:
        return False
    if parent.schedule_id:
        return child.schedule_id == parent.schedule_id or is_erased_schedule(child, parent)
    return child.task_id == parent.task_id


def is_erased_schedule(child: stored.Receipt, parent: stored.Receipt) -> bool:
    """Whether an erasure has taken the schedule's id from one of two receipts; which schedule it was shows no more."""
    return any(read_note(receipt.body) is not None and (receipt.schedule_id or "").startswith(PSEUDONYM)
               for receipt in (child, parent))


def broken_rule(way: Way, child: stored.Receipt, parents: Iterable[stored.Receipt],
                own: Callable[[stored.Receipt], bool] = lambda _: True) -> str | None:
    """Return a message about the rule that a receipt breaks; None if it breaks none."""
    may = MAY[way]
    if child.receipt_type not in may.types:
        return f"a receipt of the type {child.receipt_type} cannot be {way}; the gate writes it with its step (H.2)"
    for parent in parents:
        if may.own and not own(parent):
            return (f"you may not answer receipt {parent.receipt_id}: it is addressed to another principal, and its "
                    "task was neither created by you nor leased to you (PH.2)")
        if child.receipt_type not in TERMINATES.get(parent.receipt_type, ()):
            continue
        if not discharges(child, parent):
            return (f"it would discharge receipt {parent.receipt_id}, which is about another task or schedule (PH.1)")
        if parent.receipt_type not in may.discharges:
            return (f"a receipt that is {way} cannot discharge receipt {parent.receipt_id}; only the gate's own step "
                    "does (H.2)")
    return None


def computed_hash(receipt: stored.Receipt) -> str:
    """Return the hash of a receipt's content; empty if the content cannot be read."""
    try:
        return receipt_hash(receipt.receipt_type, receipt.sender, receipt.to, receipt.task_id, receipt.lease_id,
                            receipt.schedule_id, receipt.parents, receipt.body.encode())
    except (UnicodeEncodeError, MsgspecError):
        return ""
