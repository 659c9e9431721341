"""The rules of asking: what a question and its answer change, inside a batch.

A question is an obligation of whoever is asked, and an answer is a receipt.  What a task has asked stands in the row of
its progress, which each batch loads with the task: so every end of a task discharges what is open, and a claim costs
nothing more.
"""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial
from typing import Any

from msgspec import Raw
from msgspec.structs import replace

import asyncgate
from asyncgate import Caller, Engine, Extension, Lease, Task, Work, forbid, speaker
from asyncgate.extras.asking import wire_asking
from asyncgate.extras.asking.schema import check_answer, check_schema
from asyncgate.parts.model import errors, stored, wire
from asyncgate.parts.model.content import check_size, decode_json, encode_json, parse_json, sha256, to_canonical
from asyncgate.parts.model.overdue import has_passed
from asyncgate.parts.model.views import show_input, to_utc_or_none
from asyncgate.parts.process.readers import Wants

MOST_QUESTIONS = 100            # of one task in its life
MOST_CONTENT_BYTES = 64 * 2**10
MOST_INPUT_BYTES = 256 * 2**10  # of all questions and answers of one task: its worker gets them with each offer
SHORT_WAIT_SECONDS = 0.01       # behind an expiry, for a clock that may be a little late

Questions = dict[str, stored.Question]


# Asking.


def request_input(engine: Engine, work: Work, caller: Caller, ask: wire_asking.RequestInput
                  ) -> wire_asking.InputRequested:
    """Ask somebody a question; the task is put on hold until the answer, and its lease ends.

    That costs neither attempt nor expiry.  Whoever is asked finds the question with list_open_obligations, and answers
    with answer_input.  The same call again asks nothing more; if there is an answer already, it is returned and the
    lease lives on.
    """
    schema = parse_json(bytes(ask.schema), "schema")
    if schema is not None:
        check_schema(schema)
    questions = stored.read_questions(work.progress.get(work.require_task(ask.task_id).task_id))
    known, digest = questions.get(ask.key), digest_request(ask, schema)
    if known is not None and is_repeated(work, caller, ask, known):
        require_same(known, digest)
        return show_request(work.tasks[ask.task_id], known, lease_ended=True)
    task, lease = engine.require_lease(work, caller, ask)
    if known is not None:
        require_same(known, digest)
    if bytes(ask.checkpoint):
        check_size(bytes(ask.checkpoint), engine.settings.max_progress_bytes, "checkpoint")
        parse_json(bytes(ask.checkpoint), "checkpoint")
        work.set_progress(task, progress=bytes(ask.checkpoint).decode())
    if known is not None and has_passed(known.expires_at, work.now) and known.state == "open":
        questions[ask.key] = known = expire(engine, work, known, task.task_id, "expired")
        keep(work, task, questions)
    if known is not None and known.state != "open":
        return show_request(work.tasks[ask.task_id], known, lease_ended=False)
    if known is None:
        known = add_question(engine, work, ask, task, lease, digest, questions)
    elif not ask.keep_lease:
        body = engine.describe_expiry(replace(task, held=stored.INPUT_REQUIRED), lease, stored.INPUT_REQUIRED)
        engine.write_receipt(work, asyncgate.EXPIRED, task, body, lease=lease, discriminator="asked")
    if not ask.keep_lease:
        work.set_lease(replace(lease, ending="asked"))
        work.move_task(work.tasks[task.task_id], asyncgate.ASK, held=stored.INPUT_REQUIRED, started_at=None,
                       next_eligible_at=find_next_expiry(questions))
    return show_request(work.tasks[ask.task_id], known, lease_ended=not ask.keep_lease)


def is_repeated(work: Work, caller: Caller, ask: wire_asking.RequestInput, known: stored.Question) -> bool:
    """Whether the worker repeats a call that has ended its lease, perhaps after a later lease."""
    lease = work.leases.get(ask.task_id)
    lives = lease is not None and (lease.lease_id, lease.ending) == (ask.lease_id, "live")
    return not lives and known.lease_id == ask.lease_id and known.asked_by.same(speaker(caller, ask))


def digest_request(ask: wire_asking.RequestInput, schema: Any) -> str:
    """Return by what a repetition is known."""
    to = None if ask.to is None else (ask.to.kind, ask.to.id)
    return sha256(ask.key, ask.message, schema, to, ask.expires_in_seconds, ask.on_expiry)


def require_same(known: stored.Question, digest: str) -> None:
    """Refuse another question under the same key."""
    if known.digest != digest:
        raise errors.KeyConflict(f"this task has asked something else as {known.key}; a key names one question in the "
                                 "life of a task: use another key", receipt_id=known.receipt_id)


def add_question(engine: Engine, work: Work, ask: wire_asking.RequestInput, task: Task, lease: Lease, digest: str,
                 questions: Questions) -> stored.Question:
    """Write the receipt of a new question, which is an obligation of whoever is asked, and keep the question."""
    to = task.owner if ask.to is None else wire.Principal(ask.to.kind, ask.to.id)
    if to.same(lease.worker):
        raise errors.SelfAnswer(f"{to} is the worker that asks, so it cannot answer: name another principal as to")
    if len(questions) >= MOST_QUESTIONS:
        raise errors.InvalidRequest(f"task {task.task_id} has asked {MOST_QUESTIONS} questions, which is the limit")
    expires_at = None if ask.expires_in_seconds is None else work.now + ask.expires_in_seconds
    body = {"key": ask.key, "message": ask.message, "schema": decode_json(bytes(ask.schema)),
            "expires_in_seconds": ask.expires_in_seconds, "on_expiry": ask.on_expiry, "attempt": task.attempt,
            "lease_ended": not ask.keep_lease, "question_sha256": digest}
    with engine.check_optional_receipts(work, task.task_id):
        receipt = engine.write_receipt(work, asyncgate.INPUT_REQUESTED, task, body, by=lease.worker, to=to, lease=lease,
                                       discriminator=ask.key)
    question = stored.Question(
        ask.key, receipt.receipt_id, lease.lease_id, to, replace(lease.worker, instance_id=None), work.now, digest,
        ask.message, ask.schema, expires_at, ask.on_expiry)
    questions[ask.key] = question
    keep(work, task, questions)
    return question


def show_request(task: Task, question: stored.Question, *, lease_ended: bool) -> wire_asking.InputRequested:
    """Return the answer to a request."""
    given = None if question.state == "open" else show_input(question)
    return wire_asking.InputRequested(
        question.key, question.state, question.receipt_id, task.status, lease_ended,
        to_utc_or_none(question.expires_at), given)


def keep(work: Work, task: Task, questions: Questions) -> None:
    """Store the questions of a task, if they are not too large together."""
    text = encode_json(list(questions.values()))
    check_size(text, MOST_INPUT_BYTES, "all that this task has asked and been answered")
    work.keep_progress(replace(work.find_progress(task.task_id), inputs=text.decode()))


def find_next_expiry(questions: Questions) -> float | None:
    """Return when the first open question expires."""
    moments = [question.expires_at for question in stored.list_open(questions)]
    return min((moment for moment in moments if moment is not None), default=None)


# Answering.


def answer_input(engine: Engine, work: Work, caller: Caller, ask: wire_asking.AnswerInput) -> wire_asking.Answered:
    """Answer a question of a task: accept with content, decline, or cancel.

    For whoever is asked, or an admin in its place; never for the worker that asks.  With the last answer the task is
    offered again.  The first answer counts; the same again returns it.
    """
    task, by = work.require_task(ask.task_id), speaker(caller, ask)
    questions = stored.read_questions(work.progress.get(task.task_id))
    question = require_addressed(caller, task, by, questions.get(ask.key), ask.key)
    text = bytes(ask.content) or b"null"
    check_size(text, MOST_CONTENT_BYTES, "content")
    content = parse_json(text, "content")
    if question.answer_id is not None and question.state != "expired":
        same = question.state == ask.action and by.same(question.answered_by or by) and (
            to_canonical(decode_json(question.content)) == to_canonical(content))
        if not same:
            raise errors.AlreadyAnswered(f"{ask.key} was answered before: {question.state}; the first answer counts",
                                         receipt_id=question.answer_id)
        return show_answer(task, question, questions)
    if question.state == "expired" or has_passed(question.expires_at, work.now):
        over = f"task {task.task_id} has ended" if task.status in stored.TERMINAL else f"{ask.key} has expired"
        raise errors.InputExpired(f"{over}, so no answer to {ask.key} counts any more; get_task shows what became of "
                                  f"task {task.task_id}", receipt_id=question.answer_id)
    if ask.action == "accept":
        require_match(question, content)
    answered = write_answer(engine, work, caller, by, task, question, ask.action, content, text)
    questions[ask.key] = answered
    keep(work, task, questions)
    return show_answer(wait_or_resume(work, task, questions), answered, questions)


def require_addressed(caller: Caller, task: Task, by: wire.Principal, question: stored.Question | None,
                      key: str) -> stored.Question:
    """Return the question if it is for this principal to answer, or for an admin in the place of whoever is asked."""
    if question is None:
        if caller.unlimited or task.owner.same(by):
            raise errors.InputNotFound(f"task {task.task_id} has not asked {key}; list_inputs shows what it has asked")
        raise errors.NotAddressed(f"task {task.task_id} has not asked {by} anything as {key}")
    if question.asked_by.same(by):
        raise errors.SelfAnswer(f"{by} has asked {key} itself; {question.to} answers it, or an admin")
    if not (question.to.same(by) or caller.unlimited):
        raise errors.NotAddressed(f"task {task.task_id} has not asked {by} anything as {key}")
    return question


def require_match(question: stored.Question, content: Any) -> None:
    """Refuse content that is not as the question wants it."""
    schema = decode_json(bytes(question.schema))
    if schema is not None and (mismatch := check_answer(schema, content)) is not None:
        path, why = mismatch
        raise errors.AnswerInvalid(f"{path} {why}; list_inputs shows the schema of {question.key}", path=path)


def write_answer(engine: Engine, work: Work, caller: Caller, by: wire.Principal, task: Task, question: stored.Question,
                 action: wire.InputAction, content: Any, text: bytes) -> stored.Question:
    """Write the receipt of an answer, which discharges the question; of the content it has the hash."""
    in_place = {} if question.to.same(by) else {"in_place_of": {"kind": question.to.kind, "id": question.to.id}}
    body = {"key": question.key, "action": action, "question_sha256": question.digest,
            "content_sha256": hashlib.sha256(to_canonical(content)).hexdigest(), "content_bytes": len(text),
            "credential_id": caller.key_id, **in_place}
    receipt = engine.write_receipt(work, asyncgate.INPUT_ANSWERED, task, body, by=by, parents=(question.receipt_id,))
    work.close_obligation(question.receipt_id, question.to)
    return replace(question, state=action, content=Raw(text), schema=wire.JSON_NULL, answer_id=receipt.receipt_id,
                   answered_by=replace(by, instance_id=None), answered_at=work.now)


def show_answer(task: Task, question: stored.Question, questions: Questions) -> wire_asking.Answered:
    """Return the answer to an answer."""
    return wire_asking.Answered(True, question.key, question.state, question.answer_id or "", task.status,
                                len(stored.list_open(questions)))


def wait_or_resume(work: Work, task: Task, questions: Questions) -> Task:
    """Offer a task again if nothing is asked any more; else it waits until the next question expires."""
    if task.held != stored.INPUT_REQUIRED:
        return task
    held = stored.INPUT_REQUIRED if stored.list_open(questions) else None
    return work.change_task(task, held=held, next_eligible_at=find_next_expiry(questions))


# Ends.


class Asking(Extension):
    """Discharges what a task has asked when it ends, and what nobody has answered in time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.waiting: tuple[int, float | None] | None = None    # tasks, and since when the first, at the last look

    async def look(self) -> None:
        """Look how many tasks wait for an answer."""
        self.waiting = await self.engine.backend.count_unanswered()

    def why_hold(self, work: Work, task: Task) -> str | None:
        """Keep a task that waits for an answer from the next worker."""
        questions = stored.read_questions(work.progress.get(task.task_id))
        return stored.INPUT_REQUIRED if stored.list_open(questions) else None

    def look_after(self, work: Work, task: Task) -> None:
        """Let open questions end with their task, or when their time has come."""
        questions, late = stored.read_questions(work.progress.get(task.task_id)), list[stored.Question]()
        if not (waiting := stored.list_open(questions)):
            return
        for question in waiting:
            if question.receipt_id in work.closed:      # by somebody else, such as an erasure
                questions[question.key] = replace(question, state="expired", answered_at=work.now)
            elif task.status in stored.TERMINAL:
                questions[question.key] = expire(self.engine, work, question, task.task_id, "task_ended")
            elif has_passed(question.expires_at, work.now):
                questions[question.key] = expire(self.engine, work, question, task.task_id, "expired")
                late.append(question)
        if any(questions[question.key] is not question for question in waiting):
            keep(work, task, questions)
        fatal = [question for question in late if question.on_expiry == "fail"]
        if fatal and task.status == "queued":       # whatever else it waits for; who has kept its lease decides itself
            give_up(self.engine, work, task, questions[fatal[0].key])
        else:
            wait_or_resume(work, task, questions)


def expire(engine: Engine, work: Work, question: stored.Question, task_id: str, reason: str) -> stored.Question:
    """Tell whoever was asked that no answer is needed any more."""
    receipt = engine.write_receipt(work, asyncgate.INPUT_EXPIRED, work.tasks[task_id],
                                   {"key": question.key, "reason": reason},
                                   to=question.to, parents=(question.receipt_id,))
    work.close_obligation(question.receipt_id, question.to)
    return replace(question, state="expired", schema=wire.JSON_NULL, answer_id=receipt.receipt_id,
                   answered_at=work.now)


def give_up(engine: Engine, work: Work, task: Task, question: stored.Question) -> None:
    """Let a task fail because an answer has not come without which its worker cannot go on."""
    error = {"code": "input_expired", "key": question.key,
             "message": f"{question.to} has not answered {question.key} in time"}
    task = work.move_task(task, asyncgate.GIVE_UP, completed_at=work.now, outcome=encode_json(error).decode(),
                          held=None, next_eligible_at=None)
    task = engine.discharge_duty(work, task)
    body = {"error": error, "attempt": task.attempt, "requeued": False, "retry_recommended": False}
    ended = engine.write_receipt(work, asyncgate.EMISSION["give_up"], task, body)
    engine.announce_end(work, task, ended, {"error": error})


# Reading.


async def list_inputs(engine: Engine, caller: Caller, ask: wire_asking.ListInputs) -> wire_asking.Inputs:
    """List what a task has asked, and the answers: all for its owner, its worker or an admin, else one's own.

    With wait_seconds the call waits until no question is open.
    """
    read, clock = partial(read_inputs, engine, caller, ask), asyncio.get_running_loop().time
    wants = Wants(task_id=ask.task_id, types=frozenset((asyncgate.INPUT_ANSWERED.type, asyncgate.INPUT_EXPIRED.type)))
    reply, begun = await read(), clock()
    while waiting := list_waiting(reply):
        if (left := begun + min(ask.wait_seconds, engine.longest_wait) - clock()) <= 0:
            break
        # Nothing tells of an expiry under a kept lease: it is written down with the next call about the task.
        due = [question.expires_at.timestamp() - engine.backend.now() for question in waiting if question.expires_at]
        until_next = replace(ask, wait_seconds=min(left, max(min(due, default=left), SHORT_WAIT_SECONDS)))
        reply = await engine.wait_to_read(caller, until_next, wants, read, lambda seen: not list_waiting(seen))
    return reply


def list_waiting(reply: wire_asking.Inputs) -> list[wire_asking.InputRecord]:
    """Return the questions that wait for an answer."""
    return [question for question in reply.inputs if question.state == "open"]


async def read_inputs(engine: Engine, caller: Caller, ask: wire_asking.ListInputs) -> wire_asking.Inputs:
    """Read the questions of a task that the caller may see."""
    if (row := await engine.backend.task(caller.tenant_id, ask.task_id)) is None:
        raise errors.no_task(ask.task_id)
    task, lease, progress = row
    who, questions = caller.principal, list(stored.read_questions(progress).values())
    if not (caller.sees_all or task.owner.same(who) or (lease is not None and lease.worker.same(who))):
        questions = [question for question in questions if question.to.same(who) or question.asked_by.same(who)]
        if not questions:
            raise forbid(caller, f"task {task.task_id} belongs to another principal, and has not asked this one")
    return wire_asking.Inputs([show_question(question, engine.backend.now()) for question in questions])


def show_question(question: stored.Question, now: float) -> wire_asking.InputRecord:
    """Show a question; one whose time has passed is over, also before that is written down."""
    state = "expired" if question.state == "open" and has_passed(question.expires_at, now) else question.state
    moments = [to_utc_or_none(moment) for moment in (question.asked_at, question.expires_at, question.answered_at)]
    asked_at, expires_at, answered_at = moments
    assert asked_at is not None
    return wire_asking.InputRecord(
        question.key, question.message, state, question.to, question.asked_by, asked_at, expires_at,
        question.on_expiry, question.schema, question.receipt_id, question.content, question.answered_by, answered_at,
        question.answer_id)
