"""What goes over the wire for questions: a task that waits for an answer of somebody."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from msgspec import Meta, Raw, Struct, field

from asyncgate.parts.model import errors, examples, wire

BOSS = {"kind": "human", "id": "boss"}
QUESTION = {"key": "deploy", "message": "Deploy version 7 to production?"}
WINDOW: dict[str, Any] = {"type": "object", "properties": {"window": {"type": "string", "enum": ["now", "tonight"]}}}
ANSWER: dict[str, Any] = {"action": "accept", "content": {"window": "tonight"}}
Message = Annotated[str, Meta(min_length=1, max_length=16_384)]


class Addressee(Struct):
    """A principal that is asked."""

    kind: wire.GivenKind
    id: wire.Name


class RequestInput(wire.LeaseAsk, kw_only=True):
    """Ask somebody a question that the task needs answered."""

    example = ({**examples.HOLDER, **QUESTION, "schema": WINDOW, "to": BOSS, "expires_in_seconds": 86400},
               {"key": "deploy", "state": "open", "receipt_id": examples.DONE, "status": "queued", "lease_ended": True,
                "expires_at": examples.LATER, "input": None})
    refusals = (*wire.LeaseAsk.refusals, errors.ReceiptTooLarge, errors.KeyConflict)
    next_step = ("With lease_ended: true stop the work: the task is offered again when every question has its answer, "
                 "and the offer carries inputs. With an input, go on with it under the same lease.")
    key: Annotated[wire.Name, wire.says("names the question, once in a task's life; a repeat does not ask again")]
    message: Annotated[Message, wire.says("the question, for people")]
    schema: Annotated[Raw, wire.says(
        "a JSON schema of the content of an answer, as MCP elicitation has it; absent: any JSON",
        type=["object", "null"])] = field(default_factory=wire.nothing)
    to: Annotated[Addressee | None, wire.says("who is asked; default: the owner of the task")] = None
    expires_in_seconds: Annotated[Annotated[float, Meta(gt=0, le=wire.LONGEST_PAUSE_SECONDS)] | None, wire.says(
        "how long an answer is waited for; default: until the task ends")] = None
    on_expiry: Annotated[wire.OnExpiry, wire.says("without an answer the task is offered again, or fails")] = "resume"
    checkpoint: Annotated[wire.AnyJson, wire.says("progress for the next worker, as report_progress takes it")] = field(
        default_factory=wire.absent)
    keep_lease: Annotated[bool, wire.says(
        "true: ask, and go on under the lease; the same call again returns the answer when it is there")] = False


class AnswerInput(wire.TaskAsk, kw_only=True):
    """Answer a question of a task."""

    example = ({"task_id": examples.TASK_ID, "key": "deploy", **ANSWER},
               {"ok": True, "key": "deploy", "action": "accept", "receipt_id": examples.DONE, "status": "queued",
                "open_inputs": 0})
    refusals = (*wire.TaskAsk.refusals, errors.InputNotFound, errors.NotAddressed, errors.SelfAnswer,
                errors.AlreadyAnswered, errors.AnswerInvalid, errors.InputExpired)
    next_step = "When open_inputs is 0 the task goes on, unless it is on hold for another reason, which get_task says."
    key: Annotated[wire.Name, wire.says("which question")]
    action: Annotated[wire.InputAction, wire.says("cancel: no choice was made")]
    content: Annotated[wire.AnyJson, wire.says("the answer, up to 64 KB; it matches the question's schema")] = field(
        default_factory=wire.nothing)


class ListInputs(wire.TaskAsk, kw_only=True):
    """List the questions of a task."""

    acts = False
    filters = True
    example = ({"task_id": examples.TASK_ID}, {"inputs": [{
        **QUESTION, "state": "open", "to": BOSS, "asked_by": examples.WORKER, "asked_at": examples.NOW,
        "expires_at": examples.LATER, "on_expiry": "resume", "schema": WINDOW, "request_receipt_id": examples.DUTY,
        "content": None, "answered_by": None, "answered_at": None, "receipt_id": None}]})
    next_step = "answer_input answers one whose state is open."
    wait_seconds: Annotated[wire.Wait, wire.says(
        "seconds to wait at most; clamped to 30")] = 0.0


class InputRequested(Struct):
    """A question that was asked now, or before."""

    key: str
    state: wire.InputState
    receipt_id: str                     # the input.requested
    status: wire.Status                 # of the task
    lease_ended: Annotated[bool, wire.says("true: the worker has no lease any more")]
    expires_at: datetime | None
    input: Annotated[wire.Input | None, wire.says("the answer, if there is one already")] = None


class Answered(Struct):
    """An answer that counts."""

    ok: bool
    key: str
    action: wire.InputState
    receipt_id: str                     # the input.answered
    status: wire.Status                 # of the task
    open_inputs: Annotated[int, wire.says("questions of the task that are still open")]


class InputRecord(Struct):
    """A question of a task, and its answer."""

    key: str
    message: str
    state: wire.InputState
    to: wire.Principal
    asked_by: wire.Principal
    asked_at: datetime
    expires_at: datetime | None
    on_expiry: wire.OnExpiry
    schema: Annotated[wire.AnyJson, wire.says("while it is open")]
    request_receipt_id: str
    content: wire.AnyJson
    answered_by: wire.Principal | None
    answered_at: datetime | None
    receipt_id: str | None              # the input.answered or input.expired


class Inputs(Struct):
    """The questions of a task, in the order of asking."""

    columns = "key state to message expires_at answered_by"
    inputs: list[InputRecord]
