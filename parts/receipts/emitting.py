"""emit_receipt: a scheduler offers its schedule.created and schedule.deleted (spec 8, PH.1.3, PH.2).

The module `may` declares and checks what such a receipt may do.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import asyncgate
from asyncgate import Caller, Engine, Needs, Operation, Work, forbid, speaker
from asyncgate.parts.model import errors, stored, wire
from asyncgate.parts.receipts.incoming import MAY, broken_rule, discharges

if TYPE_CHECKING:
    from asyncgate import Contract


MOST_PARENTS = 1000         # the most that any setting allows; no more are loaded


def load_schedule(needs: Needs, caller: Caller, ask: wire.EmitReceipt) -> None:
    """Load the parents, the task and the schedule of an offered receipt."""
    needs.receipts.update(tuple(dict.fromkeys(ask.parents or ()))[:MOST_PARENTS])
    needs.tasks.update({ask.task_id} if ask.task_id else ())
    needs.records.update({(stored.Schedule, (ask.schedule_id,))} if ask.schedule_id else ())


def emit_receipt(engine: Engine, work: Work, caller: Caller, ask: wire.EmitReceipt) -> wire.Ok:
    """Offer a receipt of one's own: a scheduler's schedule.created or schedule.deleted.

    schedule.created needs the live lease of a schedule.create task and goes to that task's creator;
    schedule.deleted names the schedule.created among its parents and discharges it.  Spec 8, PH.1.3, PH.2.
    """
    return wire.Ok(True, receipt_id=emit(engine, work, caller, ask, speaker(caller, ask)))


def emit(engine: Engine, work: Work, caller: Caller, ask: wire.EmitReceipt, by: wire.Principal) -> str:
    """Write an offered receipt; return its id."""
    parents = require_parents(engine, work, ask)
    engine.check_artifacts((ask.body or {}).get("artifacts"))
    if ask.receipt_type not in MAY["emitted"].types:
        why = "is written only by the gate, with the step that it proves (H.2)" if (
            ask.receipt_type in asyncgate.RECEIPT_TYPES) else "is not a receipt type"
        raise errors.InvalidRequest(
            f"emit_receipt accepts only schedule.created and schedule.deleted; {ask.receipt_type} {why}")
    write = schedule if ask.receipt_type == asyncgate.SCHEDULED.type else unschedule
    return write(engine, work, caller, ask, by, parents)


def require_parents(engine: Engine, work: Work, ask: wire.EmitReceipt) -> tuple[str, ...]:
    """Return the parents without repeats (PH.2); raises ParentsRequired for no parent of a discharging receipt.

    Raises ParentNotFound for a parent that this tenant does not have.
    """
    parents = tuple(dict.fromkeys(ask.parents or ()))
    if ask.receipt_type in asyncgate.DISCHARGING and not parents:
        raise errors.ParentsRequired(f"{ask.receipt_type} discharges an obligation and must name it among its parents; "
                                     "without parents the obligation would stay open for ever (PH.2)")
    engine.check_parents(parents)      # before each parent is looked up and reported
    if missing := [parent for parent in parents if parent not in work.receipts]:
        raise errors.ParentNotFound(f"no receipt {missing[0]}; parents must exist in the same tenant (PH.2)")
    return parents


def schedule(engine: Engine, work: Work, caller: Caller, ask: wire.EmitReceipt, by: wire.Principal,
             parents: tuple[str, ...]) -> str:
    """Write schedule.created under the lease of its schedule.create task; return its id."""
    if not (ask.schedule_id and ask.task_id and ask.lease_id):
        raise errors.InvalidRequest(
            "schedule.created needs schedule_id, and the task_id and lease_id of schedule.create")
    if (known := work.find_record(stored.Schedule, ask.schedule_id)) and known.scheduler.same(by):
        return known.created
    lease_ask = wire.LeaseAsk(worker_id=ask.worker_id, worker_kind=ask.worker_kind, task_id=ask.task_id,
                              lease_id=ask.lease_id, worker_instance_id=ask.worker_instance_id, fence=ask.fence)
    task, lease = engine.require_lease(work, caller, lease_ask)
    if task.type != "schedule.create" or known is not None:
        raise errors.InvalidRequest(f"schedule.created belongs to a task of type schedule.create and a new schedule; "
                                    f"task {task.task_id} is {task.type}")
    require_allowed(work, caller, by, asyncgate.SCHEDULED, ask, parents, task.task_id)
    with engine.check_optional_receipts(work, task.task_id):
        receipt = engine.write_receipt(work, asyncgate.SCHEDULED, task, ask.body or {}, by=by, lease=lease,
                                       schedule_id=ask.schedule_id, parents=parents or (lease.accepted,),
                                       discriminator=ask.schedule_id)
    work.keep_record(stored.Schedule(ask.schedule_id, task.owner_kind, task.owner_id, by.kind, by.id,
                                     receipt.receipt_id))
    return receipt.receipt_id


def unschedule(engine: Engine, work: Work, caller: Caller, ask: wire.EmitReceipt, by: wire.Principal,
               parents: tuple[str, ...]) -> str:
    """Write schedule.deleted, once; return its id.  A later schedule with the same id is not affected."""
    created = next((work.receipts[parent] for parent in parents
                    if work.receipts[parent].receipt_type == asyncgate.SCHEDULED.type), None)
    if created is None or created.schedule_id is None or ask.schedule_id not in (None, created.schedule_id):
        raise errors.InvalidRequest(
            "schedule.deleted must name the schedule.created of that schedule among its parents")
    engine.check_party(caller, by, created, caller.unlimited)
    if ask.task_id not in (None, created.task_id) and not takes_part(work, caller, by, ask.task_id):
        raise forbid(caller, f"task {ask.task_id} was neither created by you nor leased to you; leave task_id out")
    if first := next((other for other in work.receipts.values() if discharges(other, created)), None):
        return first.receipt_id
    task_id = ask.task_id or created.task_id
    require_allowed(work, caller, by, asyncgate.UNSCHEDULED, ask, parents, task_id, created.schedule_id)
    # A discharging receipt of the creation's own task is accepted whatever the limits (21.6.3): there is only one.
    with engine.check_optional_receipts(work, task_id) if task_id != created.task_id else contextlib.nullcontext():
        receipt = engine.write_receipt(work, asyncgate.UNSCHEDULED, None, ask.body or {}, by=by, to=created.to,
                                       parents=parents, task_id=task_id, schedule_id=created.schedule_id,
                                       discriminator=created.schedule_id)
    work.close_obligation(created.receipt_id, created.to)
    if (known := work.find_record(stored.Schedule, created.schedule_id)) is None or known.created == created.receipt_id:
        work.drop_record(stored.Schedule, created.schedule_id)
    return receipt.receipt_id


def require_allowed(work: Work, caller: Caller, by: wire.Principal, contract: Contract, ask: wire.EmitReceipt,
                    parents: tuple[str, ...], task_id: str, schedule_id: str | None = None) -> None:
    """Check an offered receipt against the table in `may`; raises Forbidden."""
    def own(parent: stored.Receipt) -> bool:
        return caller.unlimited or parent.to.same(by) or parent.sender.same(by) or takes_part(
            work, caller, by, parent.task_id)
    receipt = stored.Receipt("", "", contract.type, work.now, by.kind, by.id, "", "", task_id, ask.lease_id,
                             schedule_id or ask.schedule_id, "", "", "", parents=parents)
    if why := broken_rule("emitted", receipt, [work.receipts[parent] for parent in parents], own):
        raise forbid(caller, why)


def takes_part(work: Work, caller: Caller, by: wire.Principal, task_id: str | None) -> bool:
    """Whether a principal owns a task, or holds or held a lease of it; earlier leases show in their task.accepted."""
    task, lease = work.tasks.get(task_id or ""), work.leases.get(task_id or "")
    accepted: Any = (receipt.sender for receipt in work.receipts.values()
                     if (receipt.task_id, receipt.receipt_type) == (
        task_id, asyncgate.ACCEPTED.type))
    return caller.unlimited or (task is not None and task.owner.same(by)) or (
        lease is not None and lease.worker.same(by)) or any(who.same(by) for who in accepted)


EMIT_RECEIPT = Operation(emit_receipt, "POST /v1/receipts", asyncgate.EVERYONE, "receipts:ack tasks:lease", "W",
                         load_schedule, idempotent=True)
