"""Settle receipts that a strict gate has offered to the ledger, and whose change it has not committed (spec 20.10).

A strict gate stores each receipt as `offered` before it sends it, and deletes that row in the commit of the change.  So
what a crash, a lost answer or a lost commit has left is known, also to the next process, and one rule settles it:

    adopted     an end of a lease or a task: it is decided again with its ids and its time, and committed if that gives
                the same receipts; so is a claim that its worker repeats; not what its call was answered otherwise for
    withdrawn   a lease or a task that nobody was told of: the ledger also gets the receipt that undoes it
    overtaken   what is not lawful any more, because the task went on: the owner and the ledger are told which it is

A creation with an idempotency key waits for its repeat, which takes the same ids.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

import asyncgate
from asyncgate import Caller, Engine, Needs, Sweep
from asyncgate.extras.ledger.adoption import WORDS
from asyncgate.parts.model import errors, stored, wire
from asyncgate.parts.model.content import decode_json, encode_json
from asyncgate.parts.model.parking import GIVEN_BACK
from asyncgate.parts.receipts.ledger_marks import OVERTAKEN, UNDONE_PREFIX

if TYPE_CHECKING:
    from asyncgate import Work
    from asyncgate.extras.ledger.sinks import Sink

BIRTHS = {asyncgate.ASSIGNED.type, asyncgate.SCHEDULED.type}        # what they begin exists only with their commit
END_RECEIPTS = {asyncgate.CANCELED.type, asyncgate.COMPLETED.type, asyncgate.EXPIRED.type, asyncgate.FAILED.type}
IN_NO_RECEIPT = ("cost", "stop_limit", "until_children", "checkpoint", "cascade")       # of a call that ends something


class Memo(Struct, frozen=True):
    """What settling a receipt needs, besides the bytes that were sent."""

    receipt: stored.Receipt
    outcome: str | None = None          # of the task that it ended; of a large one the receipt has only the hash
    claim_id: str | None = None
    ttl_seconds: float | None = None    # of the lease that it began
    instance: str | None = None         # of the worker that it was for
    key: str | None = None              # the idempotency key of the task that it began
    rest: dict[str, Any] = {}           # of `IN_NO_RECEIPT`, what the call asked for
    dropped: bool = False               # its call was decided otherwise in the end, and answered so


class Tried(Struct, frozen=True):
    """A receipt that was offered to the ledger, and is not committed."""

    row: stored.Outgoing
    memo: Memo

    @property
    def receipt(self) -> stored.Receipt:
        """Return the receipt, with its body."""
        return self.memo.receipt

    @property
    def claim(self) -> tuple[str, str, str] | None:
        """Return by which claim a repeat is recognized."""
        made = self.memo
        return None if made.claim_id is None else (made.receipt.from_kind, made.receipt.from_id, made.claim_id)

    def may_be_repeated(self) -> bool:
        """Whether a repeat of the call would be recognized, so that it is worth waiting for."""
        return bool(self.claim or self.memo.key) or self.receipt.receipt_type not in {asyncgate.ACCEPTED.type, *BIRTHS}

    def names(self) -> Iterator[tuple[Any, str]]:
        """Yield the ids that it has, each with what a batch asks for it by (`Work.new_id`)."""
        yield self.receipt.receipt_key, self.receipt.receipt_id
        if self.receipt.receipt_type == asyncgate.ACCEPTED.type:
            yield (self.receipt.task_id, decode_json(self.receipt.body)["fence"]), self.receipt.lease_id or ""
        if self.memo.key is not None:
            yield (self.receipt.from_kind, self.receipt.from_id, self.memo.key), self.receipt.task_id


def keep_rest(ask: wire.Ask, receipt: stored.Receipt) -> str | None:
    """Return as JSON what a call asked for that the receipt of its end does not tell; adopting the end needs it."""
    calls = getattr(ask, ask.items) if ask.items else [ask]
    call = next((call for call in calls if getattr(call, "task_id", None) == receipt.task_id), None)
    rest = {name: value for name in IN_NO_RECEIPT if (value := getattr(call, name, None)) is not None}
    return encode_json(rest).decode() if rest and receipt.receipt_type in END_RECEIPTS else None


def write_row(row: stored.Outgoing, work: Work, sink: Sink) -> stored.Outgoing:
    """Return the row that remembers a receipt just decided, for as long as it is not committed."""
    receipt, task, lease = work.written[row.receipt_id], work.tasks.get(row.task_id), work.leases.get(row.task_id)
    whole = receipt if receipt.body else replace(receipt, body=sink.body(row.content.encode()).decode())
    memo = Memo(whole, outcome=task.outcome if task and task.status in stored.TERMINAL else None,
                rest=decode_json(row.reason or "{}"))
    if receipt.receipt_type == asyncgate.ACCEPTED.type and lease is not None:
        memo = replace(memo, claim_id=lease.claim_id, ttl_seconds=lease.ttl_seconds, instance=lease.worker_instance)
    if receipt.receipt_type == asyncgate.ASSIGNED.type and task is not None:
        memo = replace(memo, key=task.idempotency_key)
    return offer_row(row, memo)


def offer_row(row: stored.Outgoing, memo: Memo) -> stored.Outgoing:
    """Return the row that remembers a receipt for as long as it is not committed."""
    return replace(row, state="offered", reason=encode_json(memo).decode())


def drop_row(row: stored.Outgoing) -> stored.Outgoing:
    """Return the row of a receipt whose call was decided otherwise: it must not be adopted."""
    return offer_row(replace(row, tries=1), replace(read_row(row).memo, dropped=True))


def read_row(row: stored.Outgoing) -> Tried:
    """Read what `write_row` has written."""
    return Tried(row, msgspec.json.decode(row.reason or "", type=Memo))


def group_by_task(tried: Iterable[Tried]) -> list[list[Tried]]:
    """Return the receipts of each task together, oldest first."""
    groups = defaultdict[str, list[Tried]](list)
    for attempt in sorted(tried, key=lambda attempt: attempt.row.receipt_id):
        groups[attempt.row.task_id or attempt.row.receipt_id].append(attempt)
    return list(groups.values())


def needs_of(group: list[Tried], engine: Engine, tenant_id: str) -> Needs:
    """Return what settling receipts of one task needs loaded, also by those who count what is written."""
    ids = {attempt.row.receipt_id for attempt in group}
    bulks = {find_bulk(attempt) for attempt in group} - {""}
    needs = Needs(tasks={attempt.row.task_id for attempt in group if attempt.row.task_id}, receipts=ids,
                  granted={attempt.row.task_id for attempt in group
                           if attempt.receipt.receipt_type == asyncgate.ACCEPTED.type},
                  records={(stored.Outgoing, (id,)) for id in ids} | {(stored.Bulk, (id,)) for id in bulks},
                  endings={(attempt.row.task_id, attempt.receipt.lease_id) for attempt in group
                           if attempt.receipt.lease_id})
    engine.name_needs(None, needs, engine.make_own_caller(tenant_id), wire.Ask())
    return needs


def find_bulk(attempt: Tried) -> str:
    """Return the bulk that canceled a task, as its receipt says; "" if none did."""
    body = decode_json(attempt.receipt.body) if attempt.receipt.receipt_type == asyncgate.CANCELED.type else {}
    bulk_id: str = body.get("bulk_id") or ""
    return bulk_id


def drop_committed(group: list[Tried], work: Work) -> list[Tried]:
    """Forget receipts that are committed after all; return those that are still to be settled."""
    for attempt in group:
        if attempt.row.receipt_id in work.receipts:
            work.drop_record(stored.Outgoing, attempt.row.receipt_id)
    return [attempt for attempt in group if work.find_record(stored.Outgoing, attempt.row.receipt_id) is not None]


# Withdrawn.


def withdraw(sink: Sink, group: list[Tried], work: Work) -> None:
    """Send what began and was never committed, each receipt with the one that undoes it."""
    undo(sink, [attempt.row for attempt in drop_committed(group, work)], work)


def undo(sink: Sink, rows: list[stored.Outgoing], work: Work) -> None:
    """Put receipts whose change was never committed into the outbox, each with the receipt that undoes it."""
    for row in rows:
        task, lease = work.tasks.get(row.task_id), work.leases.get(row.task_id)
        back = work.new_id()
        if (content := sink.undone(row.content.encode(), back, work.now)) is None:
            work.drop_record(stored.Outgoing, row.receipt_id)
            continue
        work.keep_record(replace(row, state="waiting", reason=None))
        work.keep_record(stored.Outgoing(back, row.task_id, content.decode(), work.now))
        for id in (row.receipt_id, back):
            work.keep_record(stored.LedgerMark(UNDONE_PREFIX + id, back))
        if task is not None and (handed := sink.taken_back(back, task, lease)) is not None:
            work.change_task(task, handed=handed)


# Adopted.


def act_as(engine: Engine, instance: str) -> Engine:
    """Return the engine under the name of the process that has offered a receipt."""
    same = copy.copy(engine)
    same.instance, same.gate = instance, wire.Principal("asyncgate", instance)
    return same


def decide_again(engine: Engine, group: list[Tried], work: Work) -> None:
    """Decide once more what has led to some receipts of one task; a task that went on meanwhile stays as it is."""
    left = drop_committed(group, work)
    if not left or (task := work.tasks.get(left[0].row.task_id)) is None:
        return
    now = act_as(engine, left[0].receipt.asyncgate_instance)
    try:
        with work.undo_on_error():
            if left[0].receipt.receipt_type == asyncgate.ACCEPTED.type:
                now.decide_write(lease_again, work, by_worker(work, left[0]), Repeated(tried=left[0]))
            elif (call := call_of(work, left[0], task.status in stored.ACTIVE)) is not None:
                run, by, ask = call
                now.decide_write(run, work, replace(by, no_new_tasks=None), ask)
    except (errors.GateError, msgspec.ValidationError):
        return


class Repeated(wire.Ask, kw_only=True):
    """Internal request: grant the lease of a claim that is repeated."""

    tried: Tried


def by_worker(work: Work, attempt: Tried) -> Caller:
    """Return the worker of a receipt as the caller."""
    return Caller(work.tenant_id,
                  wire.Principal(attempt.receipt.from_kind, attempt.receipt.from_id, attempt.memo.instance), "worker",
                  frozenset({"tasks:lease"}))


def lease_again(engine: Engine, work: Work, caller: Caller, ask: Repeated) -> None:
    """Lease a task to the worker that repeats its claim; the lease begins now, because nobody knew of it."""
    memo, task = ask.tried.memo, work.require_task(ask.tried.row.task_id)
    wanted = decode_json(memo.receipt.body)
    if task.fence + 1 != wanted["fence"] or not task.claimable(work.now):
        return
    if work.limiting.find_keeping(task) is not None:    # who claimed meanwhile has taken its place
        return
    claim = wire.LeaseNext(claim_id=memo.claim_id, capabilities=frozenset(wanted["worker_capabilities"]),
                           lease_ttl_seconds=None if memo.ttl_seconds is None else int(memo.ttl_seconds))
    engine.lease_task(work, caller.principal, claim, task)
    lease = work.leases[task.task_id]
    length = lease.expires_at - lease.acquired_at
    work.set_lease(replace(lease, expires_at=max(lease.expires_at, engine.backend.now() + length)))


def call_of(work: Work, attempt: Tried, active: bool) -> tuple[Any, Caller, wire.Ask] | None:
    """Return the call that has led to a receipt: what it runs, for whom, and what was asked."""
    receipt, lease, body = attempt.receipt, work.leases.get(attempt.row.task_id), decode_json(attempt.receipt.body)
    by = Caller(work.tenant_id, wire.Principal(receipt.from_kind, receipt.from_id, body.get("principal_instance_id")),
                "system", frozenset())
    held: dict[str, Any] = {"task_id": receipt.task_id, "lease_id": receipt.lease_id or ""}
    fields, rest = {name: body[name] for name in WORDS if name in body}, dict(attempt.memo.rest)
    if lease is not None and receipt.lease_id == lease.lease_id and receipt.receipt_type != asyncgate.CANCELED.type:
        by = replace(by, principal=lease.worker)
    match receipt.receipt_type:
        case asyncgate.COMPLETED.type if active:
            return Engine.complete, by, wire.Complete(**held, **fields, **rest,
                                                      result=outcome_of(attempt, body.get("result_payload")))
        case asyncgate.COMPLETED.type:
            return Engine.attach_artifacts, replace(by, principal=receipt.sender), wire.AttachArtifacts(
                task_id=receipt.task_id, artifacts=body.get("artifacts"), delivery_proof=body.get("delivery_proof"))
        case asyncgate.FAILED.type:
            return Engine.fail, by, wire.Fail(**held, **rest, error=outcome_of(attempt, body.get("error")),
                                              retryable=bool(body.get("retry_recommended")),
                                              retry_after_seconds=body.get("retry_after_seconds"))
        case asyncgate.CANCELED.type if bulk_id := find_bulk(attempt):
            return cancel_for_bulk, by, OfBulk(task_id=receipt.task_id, reason=body.get("reason"), bulk_id=bulk_id)
        case asyncgate.CANCELED.type:
            return Engine.cancel_task, by, wire.CancelTask(task_id=receipt.task_id, reason=body.get("reason"), **rest)
        case asyncgate.EXPIRED.type if body.get("reason") in GIVEN_BACK:
            return Engine.release_lease, by, wire.ReleaseLease(
                **held, reason=body.get("why"), until=msgspec.convert(body.get("parked_until"), datetime | None),
                checkpoint=Raw(encode_json(rest.pop("checkpoint", None))), **rest)
        case asyncgate.EXPIRED.type:
            return Engine.sweep, by, Sweep(tasks=[receipt.task_id])
    return None


class OfBulk(wire.CancelTask, kw_only=True):
    """Internal request: cancel a task as a bulk has."""

    bulk_id: str


def cancel_for_bulk(engine: Engine, work: Work, caller: Caller, ask: OfBulk) -> None:
    """Cancel a task for a bulk, which counts it, as if its batch had been committed up to this task."""
    task = work.require_task(ask.task_id)
    if task.status not in stored.TERMINAL:
        engine.cancel(work, task, caller.principal, reason=ask.reason, bulk_id=ask.bulk_id)
        if (bulk := work.find_record(stored.Bulk, ask.bulk_id)) is not None:
            work.keep_record(replace(bulk, done=bulk.done + 1))


def outcome_of(attempt: Tried, told: Any) -> Raw:
    """Return what a worker gave as its result or error."""
    return Raw(attempt.memo.outcome.encode() if attempt.memo.outcome is not None else encode_json(told))


# Overtaken.


class Overtaken(wire.Ask, kw_only=True):
    """Internal request: tell that the ledger has receipts that did not count."""

    tried: list[Tried]
    known: set[str]         # which of them the ledger has


def overtake(engine: Engine, group: list[Tried], known: set[str], work: Work) -> None:
    """Forget receipts that are not lawful any more; tell the owner, and the ledger, of those that the ledger has."""
    left = drop_committed(group, work)
    engine.decide_write(tell_overtaken, work, engine.make_own_caller(work.tenant_id),
                         Overtaken(tried=left, known=known))


def tell_overtaken(engine: Engine, work: Work, caller: Caller, ask: Overtaken) -> None:
    """Write the anomalies about receipts that did not count."""
    for attempt in ask.tried:
        work.drop_record(stored.Outgoing, attempt.row.receipt_id)
        if attempt.row.receipt_id in ask.known:
            work.keep_record(stored.LedgerMark(UNDONE_PREFIX + attempt.row.receipt_id, attempt.row.receipt_id))
            receipt = attempt.receipt
            by = receipt.to if receipt.from_kind == "asyncgate" else receipt.sender
            write_overtaken(engine, work, receipt.task_id, receipt.receipt_id, by)


def write_overtaken(engine: Engine, work: Work, task_id: str, receipt_id: str,
                    by: wire.Principal | None = None) -> None:
    """Tell a task's owner, and those who read the ledger, that a receipt there states what did not happen.

    Of a task that was withdrawn, whoever made the call is told.
    """
    if (task := work.tasks.get(task_id)) is None and by is None:
        return
    ended = "  The end that counts has a task.result_ready." if task else ""
    body = {"kind": OVERTAKEN, "recommended_action": f"Nothing: it did not count.{ended}",
            "details": {"receipt_id": receipt_id, "status": task.status if task else None}}
    engine.write_receipt(work, asyncgate.ANOMALY, task, body, to=by, discriminator=f"{OVERTAKEN} {receipt_id}")
