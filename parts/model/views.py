"""How stored rows are shown to callers."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from asyncgate.parts.model import errors, stored, wire
from asyncgate.parts.model.families import show_children
from asyncgate.parts.model.trace import Trace

R = TypeVar("R", bound=Struct)
LONGEST_ID = 200
NO_REQUIREMENTS = Raw(b"{}")
NO_TRACE: dict[str, Any] = {}
NO_UNIQUE: dict[str, Any] = {}


class Caused(Struct):
    """The only member of a payload that the gate reads, if a peer sends it."""

    caused_by_receipt_id: str = ""


class Session(Struct):
    """The session in which a receipt was stated, as its body names it (spec 18.2)."""

    principal_instance_id: str | None = None


LOCATE = "Complete again with artifacts or delivery_proof, or call attach_artifacts."
SUMMARY_LETTERS = 100       # of a summary, that are stored apart, to be looked for
decode_terms = msgspec.json.Decoder(stored.KeptTerms).decode
decode_session = msgspec.json.Decoder(Session).decode
decode_cause = msgspec.json.Decoder(Caused).decode


def answer_success(task: stored.Task, result_differs: bool = False) -> wire.Ok:
    """Answer for a task that succeeded: whether its obligation is still open, and what discharges it."""
    return wire.Ok(True, "succeeded", obligation="open" if task.owed else "discharged",
                   next=LOCATE if task.owed else None, result_differs=result_differs)


def to_utc(moment: float) -> datetime:
    """Return a stored time as replies show it: UTC, RFC 3339."""
    return datetime.fromtimestamp(moment, UTC)


def to_utc_or_none(moment: float | None) -> datetime | None:
    """Return a stored time as replies show it, or None."""
    return None if moment is None else datetime.fromtimestamp(moment, UTC)


def to_raw(text: str | None) -> Raw:
    """Return stored JSON unchanged."""
    return wire.JSON_NULL if text is None else Raw(text.encode())


def show_task(tenant_id: str, task: stored.Task, lease: stored.Lease | None,
              progress: stored.Progress | None) -> wire.TaskRecord:
    """Show a task."""
    live, terms = lease if lease and lease.ending == "live" else None, decode_terms(task.terms)
    return wire.TaskRecord(
        task_id=task.task_id, tenant_id=tenant_id, type=task.type, status=task.status,
        created_by=show_owner(task, terms.principal_instance_id),
        principal_ai=task.principal_ai, payload=to_raw(task.payload), payload_pointer=task.payload_pointer,
        requirements=show_requirements(task), priority=task.priority, attempt=task.attempt,
        max_attempts=task.max_attempts, retry_backoff_seconds=task.retry_backoff_seconds,
        fence=lease.fence if lease else task.fence,     # of the newest lease: a move to another gate raised the task's
        expiries=task.expiries, max_expiries=task.max_expiries, parks=progress.parks if progress else 0,
        steps=progress.steps if progress else 0, outputs=progress.outputs if progress else 0,
        held=task.held, idempotency_key=task.idempotency_key, asyncgate_instance=task.asyncgate_instance,
        obligation_receipt_id=task.duty, obligation_open=bool(task.owed),
        created_at=to_utc(task.created_at), updated_at=to_utc(task.updated_at),
        next_eligible_at=to_utc_or_none(task.next_eligible_at) if task.status == "queued" else None,
        started_at=to_utc_or_none(task.started_at), **show_terms(terms),
        leased_to=live.worker if live else None, lease_expires_at=to_utc_or_none(live.expires_at) if live else None,
        progress=to_raw(progress.progress if progress else None),
        progress_at=to_utc_or_none(progress.updated_at if progress else None), result=show_outcome(task),
        rerun_of=terms.rerun_of, limits=msgspec.json.decode(task.limits) if task.limits else None,
        parent_task_id=task.parent_task_id, children=show_children(progress), **show_trace(terms),
        **show_unique(task, terms, progress))


def show_unique(task: stored.Task, terms: stored.KeptTerms, progress: stored.Progress | None) -> dict[str, Any]:
    """Return what a task is shown with of its key, and of the tasks before it and behind it."""
    successor = progress.successor if progress else None
    if terms.unique is None and successor is None:
        return NO_UNIQUE
    behind = {"superseded_by" if task.status == "canceled" else "next_task_id": successor}
    members = {"unique": terms.unique, "debounce": terms.debounce, "amendments": terms.amendments or None,
               "supersedes": terms.supersedes, **behind}
    return {name: value for name, value in members.items() if value is not None}


def describe_steps(progress: stored.Progress | None) -> dict[str, Any]:
    """Return what the receipt of a completion says of the steps that were recorded, and of the output."""
    if progress is None:
        return {}
    steps = {"steps": progress.steps, "steps_sha256": progress.steps_sha256} if progress.steps else {}
    return steps if not progress.chunks else {
        **steps, "output_chunks": progress.chunks, "output_sha256": progress.output_sha256}


def measure_task(task: stored.Task, lease: stored.Lease | None, progress: stored.Progress | None) -> int:
    """Return how many bytes the texts have that a task is shown with."""
    texts = (task.payload, task.requirements, task.terms, task.outcome, task.artifacts, progress and progress.progress,
             progress and progress.inputs, progress and progress.family)
    return sum(len(text if text.isascii() else text.encode()) for text in texts if text)


def summarize(task: stored.Task) -> str | None:
    """Return the beginning of a task's summary, by which it can be looked for."""
    summary = decode_terms(task.terms).task_summary if '"task_summary"' in task.terms else None
    return summary[:SUMMARY_LETTERS].replace("\0", "") if summary else None


def show_terms(terms: stored.KeptTerms) -> dict[str, Any]:
    """Return the terms that a task is shown with."""
    return {name: getattr(terms, name) for name in wire.Terms.__struct_fields__}


def show_trace(terms: stored.KeptTerms) -> dict[str, Any]:
    """Return the trace that a task is shown with, if its creator named one."""
    if terms.traceparent is None and terms.trace_link is None:
        return NO_TRACE
    return Trace(terms.traceparent, terms.tracestate, terms.trace_link).members


def show_owner(task: stored.Task, instance: str | None) -> wire.Owner:
    """Show the owner of a task, and the session in which it was created."""
    return wire.Owner(task.owner_kind, task.owner_id, instance, principal_kind=task.owner_kind,
                      principal_id=task.owner_id,
                      principal_instance_id=instance)


def show_requirements(task: stored.Task) -> Raw:
    """Show a task's requirements; none are an empty object."""
    return NO_REQUIREMENTS if task.requirements == "null" else Raw(task.requirements.encode())


def show_sender(receipt: stored.Receipt) -> wire.Principal:
    """Show the sender of a receipt, with the session if the body names it; no hash covers it."""
    if '"principal_instance_id"' not in receipt.body:
        return receipt.sender
    try:
        return wire.Principal(receipt.from_kind, receipt.from_id, decode_session(receipt.body).principal_instance_id)
    except msgspec.DecodeError:     # a foreign body that uses the word with another meaning
        return receipt.sender


def show_outcome(task: stored.Task) -> wire.Outcome | None:
    """Show how a task ended, if it has."""
    if task.completed_at is None:
        return None
    result, error = (task.outcome, None) if task.status == "succeeded" else (None, task.outcome)
    return wire.Outcome(task.status, to_raw(result), to_raw(error), to_raw(task.artifacts), to_utc(task.completed_at))


def show_offer(tenant_id: str, task: stored.Task, lease: stored.Lease, progress: stored.Progress | None,
               now: float) -> wire.Offer:
    """Show a leased task to the worker that is to do it."""
    terms = decode_terms(task.terms)
    return wire.Offer(
        task_id=task.task_id, lease_id=lease.lease_id, fence=lease.fence, type=task.type, payload=to_raw(task.payload),
        payload_pointer=task.payload_pointer, requirements=show_requirements(task), principal_ai=task.principal_ai,
        created_by=show_owner(task, terms.principal_instance_id), tenant_id=tenant_id, attempt=task.attempt,
        expires_at=to_utc(lease.expires_at), renew_every_seconds=(lease.expires_at - now) / 3,
        task_summary=terms.task_summary, instructions=terms.instructions, success_criteria=terms.success_criteria,
        expected_outcome_kind=terms.expected_outcome_kind, expected_artifact_mime=terms.expected_artifact_mime,
        result_delivery=terms.result_delivery, timeouts=terms.timeouts, obligation_receipt_id=task.duty,
        caused_by_receipt_id=read_cause(task.payload) or task.duty,
        progress=to_raw(progress.progress if progress else None),
        steps=progress.steps if progress and progress.steps else msgspec.UNSET,
        steps_lost=True if progress and progress.steps_sha256 == stored.STEPS_LOST else msgspec.UNSET,
        chunks=progress.chunks if progress and progress.chunks else msgspec.UNSET, inputs=show_inputs(progress),
        children=show_children(progress), **show_trace(terms))


def show_inputs(progress: stored.Progress | None) -> dict[str, wire.Input] | msgspec.UnsetType:
    """Show how the questions of a task have ended, if it has asked any."""
    if progress is None or progress.inputs is None:
        return msgspec.UNSET
    return {key: show_input(question) for key, question in stored.read_questions(progress).items()
            if question.state != "open"}


def show_input(question: stored.Question) -> wire.Input:
    """Show how a question has ended."""
    return wire.Input(question.state, question.content, question.answered_by, question.answer_id)


def read_cause(payload: str) -> str | None:
    """Return the receipt that a payload names as the cause of its task, if any."""
    if "caused_by_receipt_id" not in payload:
        return None
    try:
        named = decode_cause(payload).caused_by_receipt_id
    except (msgspec.DecodeError, RecursionError):   # the payload uses the name with another meaning
        return None
    return named if 0 < len(named) <= LONGEST_ID and named not in ("NA", "TBD") else None


def show_lease(lease: stored.Lease, type: str, now: float) -> wire.LeaseRecord:
    """Show a lease of a task of this type to its holder."""
    return wire.LeaseRecord(
        lease.task_id, lease.lease_id, lease.fence, type, lease.worker, to_utc(lease.acquired_at),
        to_utc(lease.expires_at), lease.renewals, (lease.expires_at - now) / 3)


def show_receipt(tenant_id: str, receipt: stored.Receipt) -> wire.ReceiptRecord:
    """Show a receipt."""
    return wire.ReceiptRecord(
        receipt.receipt_id, tenant_id, receipt.receipt_type, to_utc(receipt.created_at), show_sender(receipt),
        receipt.to, receipt.task_id or None, receipt.lease_id, receipt.schedule_id, list(receipt.parents),
        receipt.asyncgate_instance, to_raw(receipt.body or None), receipt.hash, to_utc_or_none(receipt.delivered_at))


def note_repeats(reply: R, repeats: int) -> R:
    """Note how many tasks of a reply existed already: repeating a creation is none."""
    vars(reply)["repeats"] = repeats
    return reply


def refuse_item(item: Any, refusal: errors.GateError) -> wire.Item:
    """Return the refusal of one item of a call with many."""
    return wire.Item(task_id=getattr(item, "task_id", None), error=msgspec.convert(refusal.body(), wire.Problem))
