"""What the world sees of what is stored."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Raw, Struct

from asyncgate.parts.model.stored import KeptTerms, Lease, Progress, Receipt, Task
from asyncgate.parts.model.wire import (
    NOTHING,
    LeaseRecord,
    Offer,
    Outcome,
    Owner,
    Principal,
    ReceiptRecord,
    TaskRecord,
    Terms,
)

LONGEST_ID = 200
NO_REQUIREMENTS = Raw(b"{}")


class Caused(Struct):
    """The one member of a payload that the gate reads, where a peer puts it."""

    caused_by_receipt_id: str = ""


class Session(Struct):
    """What the body of a receipt says of the session that it was stated in (spec 18.2)."""

    principal_instance_id: str | None = None


terms_of = msgspec.json.Decoder(KeptTerms).decode
session_of = msgspec.json.Decoder(Session).decode
caused = msgspec.json.Decoder(Caused).decode


def outside(moment: float) -> datetime:
    """Return a stored time as the world sees it: UTC, RFC 3339."""
    return datetime.fromtimestamp(moment, UTC)


def maybe(moment: float | None) -> datetime | None:
    """Return a stored time that may be absent as the world sees it."""
    return None if moment is None else datetime.fromtimestamp(moment, UTC)


def raw(text: str | None) -> Raw:
    """Return stored JSON as it is."""
    return NOTHING if text is None else Raw(text.encode())


def record(tenant_id: str, task: Task, lease: Lease | None, progress: Progress | None) -> TaskRecord:
    """Show a task."""
    live, terms = lease if lease and lease.ending == "live" else None, terms_of(task.terms)
    return TaskRecord(
        task_id=task.task_id, tenant_id=tenant_id, type=task.type, status=task.status,
        created_by=owner(task, terms.principal_instance_id),
        principal_ai=task.principal_ai, payload=raw(task.payload), payload_pointer=task.payload_pointer,
        requirements=required(task), priority=task.priority, attempt=task.attempt,
        max_attempts=task.max_attempts, retry_backoff_seconds=task.retry_backoff_seconds,
        fence=lease.fence if lease else task.fence,     # of the newest lease: a move has raised the task's own
        expiries=task.expiries, max_expiries=task.max_expiries, held=task.held, idempotency_key=task.idempotency_key,
        asyncgate_instance=task.asyncgate_instance, obligation_receipt_id=task.duty, obligation_open=bool(task.owed),
        created_at=outside(task.created_at), updated_at=outside(task.updated_at),
        next_eligible_at=maybe(task.next_eligible_at) if task.status == "queued" else None,
        started_at=maybe(task.started_at), **public(terms),
        leased_to=live.worker if live else None, lease_expires_at=maybe(live.expires_at) if live else None,
        progress=raw(progress.progress if progress else None),
        progress_at=maybe(progress.updated_at if progress else None), result=ending(task))


def public(terms: KeptTerms) -> dict[str, Any]:
    """Return the terms that a task is shown with."""
    return {name: getattr(terms, name) for name in Terms.__struct_fields__}


def owner(task: Task, instance: str | None) -> Owner:
    """Show whose task it is, and in which session it was created."""
    return Owner(task.owner_kind, task.owner_id, instance, principal_kind=task.owner_kind, principal_id=task.owner_id,
                 principal_instance_id=instance)


def required(task: Task) -> Raw:
    """Show what a task requires; nothing is an empty object."""
    return NO_REQUIREMENTS if task.requirements == "null" else Raw(task.requirements.encode())


def stated_by(receipt: Receipt) -> Principal:
    """Show who states a receipt, with the session where the body names one; no key and no hash of ends has it."""
    if '"principal_instance_id"' not in receipt.body:
        return receipt.sender
    try:
        return Principal(receipt.from_kind, receipt.from_id, session_of(receipt.body).principal_instance_id)
    except msgspec.DecodeError:     # a body of somebody's own that uses the word otherwise
        return receipt.sender


def ending(task: Task) -> Outcome | None:
    """Show how a task ended, if it has."""
    if task.completed_at is None:
        return None
    result, error = (task.outcome, None) if task.status == "succeeded" else (None, task.outcome)
    return Outcome(task.status, raw(result), raw(error), raw(task.artifacts), outside(task.completed_at))


def offer(tenant_id: str, task: Task, lease: Lease, progress: Progress | None, now: float) -> Offer:
    """Show a leased task to the worker that is to do it."""
    terms = terms_of(task.terms)
    return Offer(
        task_id=task.task_id, lease_id=lease.lease_id, fence=lease.fence, type=task.type, payload=raw(task.payload),
        payload_pointer=task.payload_pointer, requirements=required(task), principal_ai=task.principal_ai,
        created_by=owner(task, terms.principal_instance_id), tenant_id=tenant_id, attempt=task.attempt,
        expires_at=outside(lease.expires_at), renew_every_seconds=(lease.expires_at - now) / 3, **public(terms),
        obligation_receipt_id=task.duty, caused_by_receipt_id=cause_of(task.payload) or task.duty,
        progress=raw(progress.progress if progress else None))


def cause_of(payload: str) -> str | None:
    """Return the receipt that a payload names as the cause of its task, if it names one."""
    if "caused_by_receipt_id" not in payload:
        return None
    try:
        named = caused(payload).caused_by_receipt_id
    except (msgspec.DecodeError, RecursionError):   # it means something else by the name
        return None
    return named if 0 < len(named) <= LONGEST_ID and named not in ("NA", "TBD") else None


def holding(task: Task, lease: Lease, now: float) -> LeaseRecord:
    """Show a lease to its holder."""
    return LeaseRecord(
        task.task_id, lease.lease_id, lease.fence, task.type, lease.worker, outside(lease.acquired_at),
        outside(lease.expires_at), lease.renewals, (lease.expires_at - now) / 3)


def shown(tenant_id: str, receipt: Receipt) -> ReceiptRecord:
    """Show a receipt."""
    return ReceiptRecord(
        receipt.receipt_id, tenant_id, receipt.receipt_type, outside(receipt.created_at), stated_by(receipt),
        receipt.to, receipt.task_id or None, receipt.lease_id, receipt.schedule_id, list(receipt.parents),
        receipt.asyncgate_instance, raw(receipt.body or None), receipt.hash, maybe(receipt.delivered_at))
