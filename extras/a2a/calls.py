"""What each method of A2A does: it calls operations of the table, and shows what they answer."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, DecodeError

from asyncgate import Caller, speaker
from asyncgate.extras.a2a import cards, push, requests, view
from asyncgate.extras.a2a.refusals import A2AError, no_task, translate
from asyncgate.extras.a2a.requests import Members, Sent
from asyncgate.extras.a2a.view import Seen
from asyncgate.parts.model import errors, members, wire
from asyncgate.parts.model.content import decode_json, encode_json
from asyncgate.parts.model.naming import A2A_SESSION
from asyncgate.parts.process.readers import Wants

if TYPE_CHECKING:
    from asyncgate.parts.faces.serving import Serving

MOST_LISTED = 1000      # tasks that a list looks at: those that were created last
TASKS_PER_PAGE = 100
MOST_CHUNKS = 2000      # of its output that a task is shown with; a stream has all
PAGE_EVENTS = 200
BLAMED = {"create_task_webhook": "pushNotificationConfig"}      # to blame for a refusal; else the message is
# What a client calls members of an operation.
CLIENTS_WORDS = {"principal_instance_id": "message.contextId", "action": "message.metadata.action"}
ANYBODY = {"principal_kind": "agent", "principal_id": "a2a"}       # who calls with a credential that names nobody


class Visit:
    """One call of one agent."""

    def __init__(self, gate: Serving, agent: str, caller: Caller, key: str | None = None,
                 card: Callable[[Caller], Awaitable[Any]] | None = None, is_old: bool = False) -> None:
        self.gate, self.agent, self.caller, self.card = gate, agent, caller, card
        self.key, self.is_old = key, is_old     # of the header Idempotency-Key; whether it speaks 0.3
        self.who = {} if caller.bound else ANYBODY

    async def perform(self, operation: str, **fields: Any) -> Any:
        """Carry out an operation, of which a request is read as one of REST; raises A2AError."""
        try:
            ask = self.read_ask(operation, **fields)
            return await self.gate.engine.perform(self.gate.operations[operation], self.caller, ask)
        except errors.GateError as refusal:
            raise translate(refusal, fields.get("task_id"), BLAMED.get(operation, "message")) from None

    def read_ask(self, operation: str, **fields: Any) -> Any:
        """Return the request of an operation."""
        op = self.gate.operations[operation]
        named = self.who if "principal_id" in op.takes.__struct_fields__ else {}
        try:
            return op.reader.body(body := encode_json({**named, **fields}), "refuse")[0]
        except (DecodeError, ValueError) as wrong:
            rule, _, member = (problem := members.describe_problem(wrong, op.takes, body)).partition(" - at `$.")
            if (place := CLIENTS_WORDS.get(member.removesuffix("`"))) is not None:
                raise errors.InvalidRequest(f"{place}: {rule}", path=place) from None
            raise errors.InvalidRequest(problem) from None

    def permit(self, *operations: str) -> None:
        """Refuse a caller that may not call one of these, before the first of them changes anything."""
        for operation in operations:
            self.gate.engine.permit(self.gate.operations[operation], self.caller)

    async def read(self, task_id: str) -> Seen:
        """Return a task of this agent that the caller may read."""
        record = await self.perform("get_task", task_id=task_id)
        if record.type != self.agent:
            raise no_task(task_id)
        return await self.look(record)

    async def read_chunks(self, task_id: str, most: int, after: int = 0) -> list[Any]:
        """Return chunks of a task's output behind an offset, a page beyond `most` at most, without its log."""
        chunks, page = list[Any](), None
        while "read_output" in self.gate.operations and len(chunks) < most and (page is None or page.entries):
            page = await self.perform("read_output", task_id=task_id, after=page.after if page else after, limit=200)
            chunks += [entry for entry in page.entries if entry.chunk is not UNSET and entry.stream is UNSET]
        return chunks

    async def read_receipts(self, task_id: str, place: dict[str, str]) -> list[wire.ReceiptRecord]:
        """Return the receipts of a task behind a place, in their order, and move the place behind them."""
        receipts, more = list[wire.ReceiptRecord](), True
        while more:
            page = await self.perform("get_task_history", task_id=task_id, limit=PAGE_EVENTS, **place)
            receipts += [event.receipt for event in page.events if event.receipt is not None]
            place |= {"cursor": page.cursor} if page.cursor is not None else {}
            more = page.next_cursor is not None
        return receipts

    async def look(self, record: wire.TaskRecord, whole: bool = True) -> Seen:
        """Return a task with what it has asked, and if it is wanted whole, its output."""
        asks = "list_inputs" in self.gate.operations
        inputs = (await self.perform("list_inputs", task_id=record.task_id)).inputs if asks else []
        chunks = await self.read_chunks(record.task_id, MOST_CHUNKS) if whole and record.outputs else []
        return Seen(record, inputs, chunks)

    async def wait(self, task_id: str) -> Seen:
        """Return a task when it has ended or asks, or when its time is over; the call waits without a connection."""
        engine, settings, clock = self.gate.engine, self.gate.settings, asyncio.get_running_loop().time
        until, seen = clock() + settings.a2a.max_wait_seconds, await self.read(task_id)
        with engine.polls.place(self.caller.tenant_id, speaker(self.caller, wire.GetTask(task_id=task_id))):
            while not seen.is_still and (left := until - clock()) > 0 and (
                    engine.longest_wait >= settings.max_wait_seconds):      # else the gate is about to stop
                ask = wire.GetTask(task_id=task_id, wait_seconds=min(left, settings.max_wait_seconds))
                seen = await engine.wait_to_read(self.caller, ask, Wants(task_id=task_id),
                                                 lambda: self.read(task_id), lambda seen: seen.is_still)
        return seen


class OwnVisit(Visit):
    """The gate itself reads, for what it tells: nobody has called, so nothing is counted or audited."""

    async def perform(self, operation: str, **fields: Any) -> Any:
        """Carry out an operation that reads."""
        return await self.gate.operations[operation].run(
            self.gate.engine, self.caller, self.read_ask(operation, **fields))


# Messages.


async def send_message(visit: Visit, params: requests.Sending) -> Members:
    """Take a message; answer when the task has ended or asks, or at once if the client wants that."""
    task_id, _ = await take_message(visit, params)
    how = params.configuration
    seen = await (visit.read(task_id) if how.return_immediately else visit.wait(task_id))
    return {"task": view.show_task(seen, how.history_length)}


async def take_message(visit: Visit, params: requests.Sending) -> tuple[str, str]:
    """Make a task of a message, or give it to the task that has asked; return the task and the receipt of that."""
    sent, config = params.message, push.check_sent(visit, params.configuration)
    if sent.task_id:
        visit.permit("answer_input", "get_task")
        if config is not None:      # before the answer, behind which the task may end
            await visit.read(sent.task_id)
            await push.keep_config(visit, sent.task_id, config, past=False)
        return await answer(visit, sent, sent.task_id)
    visit.permit("create_task", "get_task")
    context = sent.context_id or make_context(visit)
    payload = await make_payload(visit, params, context)
    made = await visit.perform("create_task", type=visit.agent, payload=payload, result_delivery="inline",
                               idempotency_key=find_key(visit, sent), principal_instance_id=f"{A2A_SESSION}{context}")
    if made.payload_differs:        # the gate returns the first task, unless its settings say otherwise
        raise make_conflict(made.task_id)
    record = await visit.perform("get_task", task_id=made.task_id)
    if config is not None:      # it is told from the beginning, so the task may have ended meanwhile
        await push.keep_config(visit, made.task_id, config, past=True)
    return record.task_id, record.obligation_receipt_id


def find_key(visit: Visit, sent: Sent) -> str | None:
    """Return the idempotency key of a message; a digest keeps it within the length of one."""
    key = visit.key
    if key is None and visit.gate.settings.a2a.deduplicate_messages:
        key = f"message {sent.message_id}"
    return None if key is None else f"a2a:{hashlib.sha256(key.encode()).hexdigest()}"


def make_conflict(task_id: str) -> A2AError:
    """Return the refusal of another message under a key."""
    return A2AError("IDEMPOTENCY_CONFLICT", "this key has sent another message before; a key names one message: use a "
                    "new key", taskId=task_id)


def make_context(visit: Visit) -> str:
    """Return a new context; a message that is sent again with its key gets the same."""
    if visit.key is None:
        return str(uuid.uuid4())
    who = visit.caller.principal
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{visit.caller.tenant_id} {who.kind} {who.id} {visit.key}"))


async def make_payload(visit: Visit, params: requests.Sending, context: str) -> Any:
    """Return the payload of a new task: a data part, or words, if the type declares that, else the whole message.

    A client makes a new id for a message that it sends again, so under a key the id is not part of the payload.
    """
    sent, form = params.message, (await cards.describe_agent(visit.gate, visit.caller, visit.agent)).form
    requests.check_modes(sent.parts, cards.list_modes(form, visit.gate.settings.a2a.modes))
    if form == "text":
        return sent.text
    if form == "data":
        if len(sent.parts) != 1 or sent.parts[0].data is UNSET:
            raise A2AError("CONTENT_TYPE_NOT_SUPPORTED", f"{visit.agent} takes one data part, in the form that "
                           "its card describes", mediaType=requests.JSON_MODE)
        return sent.parts[0].data
    more = {"metadata": sent.metadata, "request_metadata": params.metadata,
            "reference_task_ids": sent.reference_task_ids, "message_id": None if visit.key else sent.message_id}
    return {"text": sent.text, "parts": msgspec.to_builtins(sent.parts), "context_id": context,
            **{name: value for name, value in more.items() if value}}


async def answer(visit: Visit, sent: Sent, task_id: str) -> tuple[str, str]:
    """Answer the oldest question of a task to its owner, or the one that the metadata of the message names."""
    seen = await visit.read(task_id)
    if sent.context_id not in ("", seen.context_id):
        raise A2AError("INVALID_PARAMS", f"task {task_id} belongs to another context", "message.contextId")
    key, action = sent.metadata.get(view.QUESTION_KEY, sent.metadata.get("key")), sent.metadata.get("action", "accept")
    session = find_key(visit, sent)     # under which the answer is given, so that it never answers the next question
    if session is not None and (first := await find_answer(visit, seen, session)) is not None:
        content = read_content(first, sent) if action == "accept" else None
        if (first.state, decode_json(bytes(first.content))) != (action, content) or key not in (None, first.key):
            raise make_conflict(task_id)
        return task_id, first.receipt_id
    asked = [question for question in seen.questions if question.key == key] if key is not None else seen.asked
    if not asked:
        what = "no open question" if key is None else f"not asked {key}"
        raise A2AError("UNSUPPORTED_OPERATION", f"task {task_id} is {seen.state} and has {what}; a message without "
                       "taskId begins another task", taskId=task_id)
    content = read_content(asked[0], sent) if action == "accept" else None
    reply = await visit.perform("answer_input", task_id=task_id, key=asked[0].key, action=action, content=content,
                                principal_instance_id=session)
    return task_id, reply.receipt_id


async def find_answer(visit: Visit, seen: Seen, session: str) -> Any:
    """Return the question of a task that was answered in a session, None if there is none."""
    answers = {receipt.receipt_id: decode_json(bytes(receipt.body)) for receipt in await visit.read_receipts(
        seen.record.task_id, {}) if receipt.receipt_type == "input.answered"}
    if None in answers.values():        # a ledger has them
        raise errors.LedgerUnavailable("nobody knows whether this key has answered before, because the ledger cannot "
                                       "be read: send the message again later")
    given = {id for id, body in answers.items() if body.get("principal_instance_id") == session}
    return next((question for question in seen.questions if question.receipt_id in given), None)


def read_content(question: Any, sent: Sent) -> Any:
    """Return the content of an answer: a data part, or words in the only text member that the schema has."""
    if (part := next((part for part in sent.parts if part.data is not UNSET), None)) is not None:
        return part.data
    if question.state != "open":        # its schema is gone: the same words are the same answer
        first = decode_json(bytes(question.content))
        same = first == sent.text or (isinstance(first, dict) and list(first.values()) == [sent.text])
        return first if same else {"text": sent.text}
    schema = decode_json(bytes(question.schema)) or {}
    if schema.get("type") == "string":
        return sent.text
    match list((schema.get("properties") or {}).items()):
        case [(name, {"type": "string"})]:
            return {name: sent.text}
    return {"text": sent.text}


# Tasks.


async def get_task(visit: Visit, params: requests.OfTask) -> Members:
    """Show a task."""
    return view.show_task(await visit.read(params.id), params.history_length)


async def cancel_task(visit: Visit, params: requests.OfTask) -> Members:
    """Cancel a task; what it has asked is discharged with it."""
    visit.permit("cancel_task", "get_task")
    seen = await visit.read(params.id)
    if seen.state in view.ENDED_STATES or not (await visit.perform("cancel_task", task_id=params.id)).ok:
        raise A2AError("TASK_NOT_CANCELABLE", f"task {params.id} has already ended", taskId=params.id)
    return view.show_task(await visit.read(params.id))


async def list_tasks(visit: Visit, params: requests.Listing) -> Members:
    """List the tasks of this agent that the caller may read, the last change first."""
    behind, wanted = read_page_token(params.page_token), await find_tasks(visit, params)
    page = [seen for seen in wanted if behind is None or find_place(seen) < behind]
    more = len(page) > params.page_size
    shown = [await visit.look(seen.record, params.include_artifacts or not seen.is_still)
             for seen in page[:params.page_size]]
    return {"tasks": [view.show_task(seen, params.history_length, params.include_artifacts) for seen in shown],
            "nextPageToken": "~".join(find_place(shown[-1])) if more else "", "pageSize": params.page_size,
            "totalSize": len(wanted)}


async def find_tasks(visit: Visit, params: requests.Listing) -> list[Seen]:
    """Return the tasks that are asked for, the last change first.

    The gate lists by creation: of more than MOST_LISTED tasks those are left out that were created first.
    """
    wanted, cursor = list[Seen](), dict[str, str]()
    after = requests.read_moment(params.status_timestamp_after, "statusTimestampAfter")
    for _ in range(MOST_LISTED // TASKS_PER_PAGE):
        reply = await visit.perform("list_tasks", type=visit.agent, limit=TASKS_PER_PAGE, **cursor)
        for record in reply.tasks:
            seen = Seen(record, [])
            if params.context_id not in ("", seen.context_id) or (after is not None and record.updated_at < after):
                continue
            if record.fence and not seen.is_still:      # only then may it ask
                seen = await visit.look(record, whole=False)
            if params.status in ("TASK_STATE_UNSPECIFIED", f"TASK_STATE_{seen.state}"):
                wanted.append(seen)
        if reply.next_cursor is None:
            break
        cursor = {"cursor": reply.next_cursor}
    return sorted(wanted, key=find_place, reverse=True)


def find_place(seen: Seen) -> tuple[str, str]:
    """Return the place of a task among others: the time of its last change, then its id."""
    return seen.record.updated_at.isoformat(timespec="microseconds"), seen.record.task_id


def read_page_token(token: str) -> tuple[str, str] | None:
    """Return the place behind which a page begins."""
    moment, _, task_id = token.partition("~")
    requests.read_moment(moment or token, "pageToken", "the nextPageToken of the previous page")
    return (moment, task_id) if token else None


async def get_card(visit: Visit, params: requests.Anything) -> Any:
    """Show the card, also where it is not public."""
    assert visit.card is not None
    return await visit.card(visit.caller)
