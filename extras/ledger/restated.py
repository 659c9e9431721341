"""Derive a task's state from its receipts, read from the first to the last.

Receipts are proof and not a log (H.12), so only two commands use this: `asyncgate rebuild` after a disaster, and
`asyncgate reconcile --repair` if the ledger has newer receipts of a task than the gate.  Receipts have only the hashes
of payloads, and they lack the task's other settings, such as its priority, and the state of its leases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Raw, Struct, field
from msgspec.structs import replace

import asyncgate
from asyncgate import lane_of
from asyncgate.parts.model import stored, wire
from asyncgate.parts.model.content import decode_json, encode_json, needs_of, to_canonical
from asyncgate.parts.model.erased import read_note
from asyncgate.parts.model.limiting import find_pattern, write_limits
from asyncgate.parts.model.parking import GIVEN_BACK
from asyncgate.parts.model.views import decode_terms

if TYPE_CHECKING:
    from asyncgate.parts.model.settings import Settings

ENDING_STATUSES: dict[str, wire.Status] = {
    asyncgate.COMPLETED.type: "succeeded", asyncgate.FAILED.type: "failed", asyncgate.CANCELED.type: "canceled"}
UNSTATED = ("priority", "max_attempts", "retry_backoff_seconds", "max_expiries", "idempotency_key", "principal_ai")
NO_PAYLOAD = hashlib.sha256(b"null").hexdigest()


class Story(Struct):
    """The state of one task as its receipts describe it."""

    duty: stored.Receipt | None = None
    amended: dict[str, Any] = field(default_factory=dict)       # what the last receipt of a replaced payload says
    status: wire.Status = "queued"
    owed: bool = True
    attempt: int = 0
    expiries: int = 0
    lost_to: list[str] = field(default_factory=list)
    accepted: list[stored.Receipt] = field(default_factory=list)
    fence: int = 0
    ending: str = "superseded"                  # how the last lease ended; superseded unless a receipt says otherwise
    ended_at: float | None = None
    outcome: str | None = None
    artifacts: str | None = None
    unknown: list[str] = field(default_factory=list)
    steps: bool = False                         # whether its completion has the digest of steps
    progress: stored.Receipt | None = None
    questions: dict[str, stored.Question] = field(default_factory=dict)     # by the receipt of each
    updated_at: float = 0.0
    contradicts: bool = False                   # the receipts state different ends
    ends: list[stored.Receipt] = field(default_factory=list)
    unready: list[stored.Receipt] = field(default_factory=list)       # ends without a task.result_ready


def story_of(receipts: Sequence[stored.Receipt]) -> Story:
    """Derive a task's state from its receipts, given oldest first and with their bodies."""
    story, ready = Story(), list_ready(receipts)
    overtaken = list_overtaken(receipts, ready)
    for receipt in receipts:
        story.updated_at = max(story.updated_at, receipt.created_at)
        if receipt.receipt_id in overtaken:
            continue
        if (tell := TELLING.get(receipt.receipt_type)) is not None:
            tell(story, receipt, body_of(receipt))
    story.unready = [end for end in story.ends if end.receipt_id not in ready]
    return story


def list_ready(receipts: Sequence[stored.Receipt]) -> set[str]:
    """Return the ends that have a task.result_ready, which is written only with an end that was committed."""
    return {parent for receipt in receipts if receipt.receipt_type == asyncgate.RESULT_READY.type
            for parent in receipt.parents}


def list_overtaken(receipts: Sequence[stored.Receipt], ready: set[str]) -> set[str]:
    """Return the ends that a strict gate offered and never committed: another end of the task has a result_ready."""
    duties = {receipt.receipt_id for receipt in receipts if receipt.receipt_type == asyncgate.ASSIGNED.type}
    ends = {receipt.receipt_id for receipt in receipts if receipt.receipt_type in ENDING_STATUSES and (
        not duties.isdisjoint(receipt.parents) or receipt.receipt_id in ready)}
    return ends - ready if ends & ready else set()


def body_of(receipt: stored.Receipt) -> dict[str, Any]:
    """Return the body of a receipt, or an empty object if it has none, or had one before an erasure."""
    body = decode_json(receipt.body) if receipt.body and read_note(receipt.body) is None else {}
    return body if isinstance(body, dict) else {}


def _assigned(story: Story, receipt: stored.Receipt, body: dict[str, Any]) -> None:
    story.duty = story.duty or receipt


def _amended(story: Story, receipt: stored.Receipt, body: dict[str, Any]) -> None:
    story.amended = body


def _accepted(story: Story, receipt: stored.Receipt, body: dict[str, Any]) -> None:
    story.accepted.append(receipt)
    story.ending = "superseded"
    fence = body.get("fence")
    story.fence = max(story.fence + 1, fence if isinstance(fence, int) else 0)


def _progressed(story: Story, receipt: stored.Receipt, body: dict[str, Any]) -> None:
    story.progress = receipt


def _expired(story: Story, receipt: stored.Receipt, body: dict[str, Any]) -> None:
    reason = "released" if body.get("reason") in GIVEN_BACK else "expired"
    _end_lease(story, receipt, reason)
    if reason == "expired":
        story.expiries += 1
        story.lost_to = [*story.lost_to, str(body.get("previous_worker_id", ""))][-10:]


def _failed(story: Story, receipt: stored.Receipt, body: dict[str, Any]) -> None:
    _end_lease(story, receipt, "failed")
    if _answers_duty(story, receipt):
        _end(story, receipt, body, "error")
    else:
        story.attempt += 1


def _completed(story: Story, receipt: stored.Receipt, body: dict[str, Any]) -> None:
    _end_lease(story, receipt, "completed")
    story.steps |= "steps_sha256" in body
    _end(story, receipt, body, "result_payload")
    if (where := body.get("artifacts")) is not None:
        story.artifacts = to_canonical(where).decode()


def _canceled(story: Story, receipt: stored.Receipt, body: dict[str, Any]) -> None:
    if story.ending == "superseded":
        story.ending = "canceled"
    _end(story, receipt, body, "")


def _asked(story: Story, receipt: stored.Receipt, body: dict[str, Any]) -> None:
    """Note a question; of one that was erased nothing is known but that it was asked."""
    if body.get("lease_ended"):
        _end_lease(story, receipt, "asked")
    within = body.get("expires_in_seconds")
    story.questions[receipt.receipt_id] = stored.Question(
        str(body.get("key", receipt.receipt_id)), receipt.receipt_id, receipt.lease_id or "", receipt.to,
        receipt.sender, receipt.created_at, str(body.get("question_sha256", "")), str(body.get("message", "")),
        Raw(to_canonical(body.get("schema"))), None if within is None else receipt.created_at + float(within),
        body.get("on_expiry", "resume"))


def _answered(story: Story, receipt: stored.Receipt, body: dict[str, Any]) -> None:
    """Note the end of a question; of an answer its receipt has only the hash."""
    for parent in receipt.parents:
        if (question := story.questions.get(parent)) is not None:
            by = receipt.sender if receipt.receipt_type == asyncgate.INPUT_ANSWERED.type else None
            story.questions[parent] = replace(
                question, state=body.get("action", "expired"), schema=Raw(b"null"), answered_by=by,
                answer_id=receipt.receipt_id, answered_at=receipt.created_at)


TELLING = {asyncgate.INPUT_REQUESTED.type: _asked, asyncgate.INPUT_ANSWERED.type: _answered,
           asyncgate.INPUT_EXPIRED.type: _answered, asyncgate.ASSIGNED.type: _assigned,
           asyncgate.AMENDED.type: _amended, asyncgate.ACCEPTED.type: _accepted,
           asyncgate.PROGRESSED.type: _progressed, asyncgate.EXPIRED.type: _expired, asyncgate.FAILED.type: _failed,
           asyncgate.COMPLETED.type: _completed, asyncgate.CANCELED.type: _canceled}


def _answers_duty(story: Story, receipt: stored.Receipt) -> bool:
    return story.duty is not None and story.duty.receipt_id in receipt.parents


def _end_lease(story: Story, receipt: stored.Receipt, ending: str) -> None:
    if story.accepted and story.accepted[-1].lease_id == receipt.lease_id:
        story.ending = ending


def _end(story: Story, receipt: stored.Receipt, body: dict[str, Any], name: str) -> None:
    """Note an end; a success whose location was given only later has two receipts, and the first has the result."""
    status = ENDING_STATUSES[receipt.receipt_type]
    story.contradicts |= bool(story.ends) and status != story.status
    story.owed = story.owed and not _answers_duty(story, receipt)
    if not story.ends:
        story.status, story.ended_at = status, receipt.created_at
        digest = f"{name.removesuffix('_payload')}_sha256"
        if name and (digest in body or read_note(receipt.body) is not None):
            story.unknown.append(name.removesuffix("_payload"))
        elif name:
            story.outcome = to_canonical(body.get(name)).decode()
    story.ends.append(receipt)


# From the story to stored rows.


def read_contract(story: Story) -> dict[str, Any]:
    """Return the contract of a task: as it was assigned, and what has taken the place of its payload since."""
    assert story.duty is not None
    assigned = body_of(story.duty)
    if not story.amended:
        return assigned
    gone = {*wire.Terms.__struct_fields__, "payload_pointer"}
    return {**{name: value for name, value in assigned.items() if name not in gone}, **story.amended}


def restate_task(story: Story, settings: Settings, held: str) -> stored.Task:
    """Return the task of a story: fields that no receipt states are as in a new task; an open task is on hold."""
    assert story.duty is not None
    duty, body, is_open = story.duty, read_contract(story), not story.ends
    requirements, limits = to_canonical(body.get("requirements")).decode(), write_limits(body.get("limits"))
    terms = to_canonical({name: body[name] for name in stored.KeptTerms.__struct_fields__ if name in body}).decode()
    timeouts = decode_terms(terms).timeouts
    deadline = timeouts.deadline if timeouts and is_open else None
    return stored.Task(
        task_id=duty.task_id, type=body["type"], limits=limits,
        lane=lane_of(body["type"], needs_of(Raw(requirements.encode())), find_pattern(limits)),
        payload="null", payload_pointer=body.get("payload_pointer"), requirements=requirements, terms=terms,
        owner_kind=duty.to_kind, owner_id=duty.to_id, principal_ai=duty.to_id, priority=settings.default_priority,
        max_attempts=max(settings.default_max_attempts, story.attempt + 1),
        retry_backoff_seconds=settings.default_retry_backoff_seconds, max_expiries=settings.max_expiries,
        created_at=duty.created_at, duty=duty.receipt_id, idempotency_key=None, fingerprint=None,
        parent_task_id=body.get("parent_task_id"),
        asyncgate_instance=duty.asyncgate_instance, updated_at=story.updated_at, status=story.status,
        attempt=story.attempt, fence=story.fence, expiries=story.expiries, owed=story.owed,
        held=held if is_open else None, lost_to=to_canonical(story.lost_to).decode(),
        deadline_at=deadline.timestamp() if deadline else None, completed_at=story.ended_at, outcome=story.outcome,
        artifacts=story.artifacts)


def restate_lease(story: Story) -> stored.Lease | None:
    """Return the last lease of a story, always as ended, because no receipt states when it would have expired."""
    if not story.accepted:
        return None
    last = story.accepted[-1]
    over = max([last.created_at, *([story.ended_at] if story.ended_at else [])])
    return stored.Lease(last.task_id, last.lease_id or "", last.from_kind, last.from_id, None, story.fence,
                        last.created_at, over, 0, last.receipt_id, None, story.ending)


def restate_progress(story: Story) -> stored.Progress | None:
    """Return the last progress of a story and what it has asked, as far as there are receipts.

    They have no steps, so of a task that a worker had it is noted that its steps are lost.
    """
    receipt, inputs, lost = story.progress, None, stored.STEPS_LOST if story.accepted else None
    if story.questions:
        inputs = encode_json(list(story.questions.values())).decode()
    if receipt is None:
        task_id = story.duty.task_id if story.duty else ""
        return None if (inputs, lost) == (None, None) else stored.Progress(
            task_id, "null", 1, 0, story.updated_at, inputs=inputs, steps_sha256=lost)
    body = body_of(receipt)
    progress, sequence = to_canonical(body.get("progress")).decode(), int(body.get("sequence", 1))
    return stored.Progress(receipt.task_id, progress, sequence, story.fence, receipt.created_at, inputs=inputs,
                           steps_sha256=lost)


def unknown_fields(story: Story) -> list[str]:
    """Name the task fields that no receipt states."""
    assert story.duty is not None
    payload = [] if read_contract(story).get("payload_sha256") == NO_PAYLOAD else ["payload"]
    steps = ["steps"] if story.steps or (story.accepted and not story.ends) else []
    return [*payload, *UNSTATED, *story.unknown, *steps]
