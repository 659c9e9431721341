"""How tasks of the gate look in A2A: a pure function of what the gate has stored, so the same at each gate."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from asyncgate.extras.a2a.requests import JSON_MODE, TEXT_MODE, Artifact, Chunk, Members, Part, WholePart, fit
from asyncgate.parts.model import stored, wire
from asyncgate.parts.model.content import decode_json
from asyncgate.parts.model.naming import find_context

ENDED_STATES = frozenset({"COMPLETED", "FAILED", "CANCELED", "REJECTED"})
ASKS = frozenset({"INPUT_REQUIRED", "AUTH_REQUIRED"})
OWN_SCHEME = "asyncgate:"            # where a result is that the record itself has
OUTPUT = "output"       # the artifact that the output of a task is
QUESTION_KEY = "asyncgate/key"           # of a question, in the metadata of its message
AUTH = ("auth", "auth-", "auth:")       # a question whose key is the first, or begins with one of the others
GOES_ON = frozenset({"task.accepted", "lease.expired", "task.progress", "input.requested", "input.answered",
                     "input.expired"})
MAY_END = frozenset({"task.completed", "task.failed", "task.canceled"})


class Seen(Struct):
    """A task, and what it has asked."""

    record: wire.TaskRecord
    inputs: list[Any]
    chunks: list[Any] = []      # of its output, that has come so far

    @property
    def questions(self) -> list[Any]:
        """Return what it has asked its owner, who is the client."""
        return [question for question in self.inputs if question.to.same(self.record.created_by)]

    @property
    def open(self) -> list[Any]:
        """Return what it waits for."""
        return [] if self.record.status in stored.TERMINAL else [
            question for question in self.inputs if question.state == "open"]

    @property
    def asked(self) -> list[Any]:
        """Return what it waits for that the client is to answer."""
        return [question for question in self.open if question in self.questions]

    @property
    def context_id(self) -> str:
        """Return the context: the session in which it was created, else a context of its own."""
        session = self.record.created_by.instance_id
        return find_context(session) or session or self.record.task_id

    @property
    def state(self) -> str:
        """Return the state; nothing goes back to SUBMITTED after a lost worker."""
        match self.record.status:
            case "succeeded":
                return "COMPLETED"
            case "canceled":
                return "CANCELED"
            case "failed":
                return "REJECTED" if self.error.get("code") == "rejected" else "FAILED"
        if self.asked:
            return name_question(self.asked[0].key)
        return "WORKING" if self.record.fence or self.record.held else "SUBMITTED"

    @property
    def is_still(self) -> bool:
        """Whether nothing happens until the client does something, or at all."""
        return self.state in ENDED_STATES | ASKS

    @property
    def error(self) -> Members:
        """Return the error of a failed task."""
        error = decode_json(bytes(self.record.result.error)) if self.record.result is not None else None
        return error if isinstance(error, dict) else {"message": error} if isinstance(error, str) else {}

    @property
    def payload(self) -> Members:
        """Return the payload if a message has become it; any other one is a part of a message."""
        payload = decode_json(bytes(self.record.payload))
        if isinstance(payload, dict) and payload.keys() >= {"text", "context_id"} and (
                message := fit({"parts": payload.get("parts")}, Artifact)) is not None:
            return {**payload, "parts": message.parts}
        return {"parts": [to_part(payload)]}


def name_question(key: str) -> str:
    """Return the state of a task that has asked its client, which the key of the question tells."""
    return "AUTH_REQUIRED" if key == AUTH[0] or key.startswith(AUTH[1:]) else "INPUT_REQUIRED"


def show_task(seen: Seen, history: int | None = None, artifacts: bool = True) -> Members:
    """Show a task; `history` is how many messages to show, None all."""
    record, own = seen.record, seen.payload.get("request_metadata")
    shown: Members = {"id": record.task_id, "contextId": seen.context_id, "status": show_status(seen)}
    if history != 0:
        shown["history"] = show_history(seen)[-(history or 0):]
    output = show_outputs(seen.chunks)
    if artifacts and (made := [*output, *show_results(record, bool(output))]):
        shown["artifacts"] = made
    shown["metadata"] = {**(own if isinstance(own, dict) else {}), "asyncgate/attempt": record.attempt,
                         "asyncgate/receipt_id": record.obligation_receipt_id}
    return shown


def show_status(seen: Seen) -> Members:
    """Show the state of a task, and what is to be said of it."""
    return make_status(seen.state, seen.record.updated_at, find_message(seen))


def make_status(state: str, moment: datetime, message: Members | None = None) -> Members:
    """Return a status; its time is as ProtoJSON has it, in milliseconds."""
    time = moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"state": f"TASK_STATE_{state}", "timestamp": time, **({"message": message} if message else {})}


def follow_status(seen: Seen, receipt: wire.ReceiptRecord, asked: Iterable[wire.ReceiptRecord]) -> Members:
    """Return the status that a receipt leads to, while these questions are open."""
    for question in asked:
        if question.to.same(seen.record.created_by):
            body = read_receipt_body(seen, question)
            key = str(body.get("key"))
            return make_status(name_question(key), receipt.created_at,
                               show_question(seen, key, str(body.get("message")), body.get("schema")))
    return make_status("SUBMITTED" if receipt.receipt_type == "task.assigned" else "WORKING", receipt.created_at)


def read_receipt_body(seen: Seen, receipt: wire.ReceiptRecord) -> Members:
    """Return what a receipt says; where a ledger has that, what the task has of a question itself."""
    body = decode_json(bytes(receipt.body))
    if isinstance(body, dict):
        return body
    known = next((question for question in seen.inputs if question.request_receipt_id == receipt.receipt_id), None)
    return {} if known is None else {
        "key": known.key, "message": known.message, "schema": decode_json(bytes(known.schema))}


def find_message(seen: Seen) -> Members | None:
    """Return what is to be said of a state; of a completed task its artifacts say all, or clients show it twice."""
    record = seen.record
    if seen.asked:
        return show_input(seen, seen.asked[0])
    if record.status == "failed":
        return say(seen, "error", str(seen.error.get("message") or seen.error.get("code") or "the task has failed"))
    if record.status in stored.TERMINAL:
        return None
    if seen.open:
        other = seen.open[0]
        return say(seen, f"waits:{other.key}", f"waits for {other.to}: {other.message}")
    if record.held is not None:
        return say(seen, f"held:{record.held}", f"on hold: {record.held}")
    if spoken := [message for chunk in seen.chunks if (message := show_spoken(seen, chunk)) is not None]:
        return spoken[-1]
    progress = decode_json(bytes(record.progress))
    text = progress.get("message") if isinstance(progress, dict) else progress
    if isinstance(text, str) and text and record.progress_at is not None:
        return say(seen, f"progress:{record.progress_at.isoformat()}", text)
    return None


def say(seen: Seen, name: str, text: str) -> Members:
    """Return words of the agent."""
    return make_message(seen, name, [to_part(text)])


def make_message(seen: Seen, name: str, parts: list[Part], **more: Any) -> Members:
    """Return a message about a task; its id is the same wherever it is made."""
    return {"messageId": f"{seen.record.task_id}:{name}", "role": "ROLE_AGENT", "parts": parts,
            "taskId": seen.record.task_id, "contextId": seen.context_id, **more}


def show_input(seen: Seen, question: Any) -> Members:
    """Show a question of a task."""
    return show_question(seen, question.key, question.message, decode_json(bytes(question.schema)))


def show_question(seen: Seen, key: str, words: str, schema: Any) -> Members:
    """Show a question; the schema of its answer is a part beside the words, while it is open."""
    of_answer = [] if schema is None else [Part(data=schema, media_type="application/schema+json")]
    return make_message(seen, f"input:{key}", [to_part(words), *of_answer], metadata={QUESTION_KEY: key})


def show_spoken(seen: Seen, chunk: Any) -> Members | None:
    """Show a chunk that is a message of the worker."""
    spoken = fit(decode_json(bytes(chunk.chunk)), Chunk)
    return make_message(seen, f"output:{chunk.offset}", spoken.parts) if spoken and spoken.role else None


def show_history(seen: Seen) -> list[Members]:
    """Show what the client has said, and what it was asked before."""
    payload = seen.payload
    known = {"messageId": str(payload["message_id"])} if payload.get("message_id") else {}
    metadata = {"metadata": payload["metadata"]} if isinstance(payload.get("metadata"), dict) else {}
    history = [make_message(seen, "message", payload["parts"], role="ROLE_USER", **known, **metadata)]
    for question in seen.questions:
        if question in seen.asked[:1]:
            continue        # it is the status
        history.append(show_input(seen, question))
        if question.receipt_id is not None and question.answered_by is not None:
            content = decode_json(bytes(question.content))
            words = content["text"] if isinstance(content, dict) and content.keys() == {"text"} else (
                content if question.state == "accept" else question.state)
            history.append(make_message(seen, "answer", [to_part(words)], role="ROLE_USER",
                                        messageId=question.receipt_id))
    if seen.record.status == "failed" and (why := find_message(seen)) is not None:
        history.append(why)     # a client that looks for the last words finds them, and not its own
    return history


def show_outputs(chunks: list[Any]) -> list[Members]:
    """Show chunks of output: the artifacts that its worker has named, and one of the rest, whose words are joined."""
    made = dict[str, Members]()
    for chunk in chunks:
        value = decode_json(bytes(chunk.chunk))
        id, parts, append = read_chunk(value)
        if not id:
            continue        # a message
        if id not in made or not append:
            made[id] = {"artifactId": id, "parts": []}
        before = made[id]["parts"]
        if isinstance(value, str) and before and before[-1].media_type == TEXT_MODE and before[-1].text:
            before[-1] = to_part(before[-1].text + value)
        else:
            before += parts
        made[id]["metadata"] = {"asyncgate/offset": chunk.offset}
    return list(made.values())


def read_chunk(value: Any) -> tuple[str, list[Part], bool]:
    """Return the artifact of a chunk, if it is not a message, its parts, and whether they stand behind those before."""
    if (made := fit(value, Chunk)) is not None:
        return made.artifact_id or "", made.parts, made.append or False
    return OUTPUT, [fit(value, WholePart) or to_part(value)], True


def show_results(record: wire.TaskRecord, has_output: bool) -> list[Artifact]:
    """Show the result of a task: at least one artifact, because clients show something else where there is none."""
    if record.status != "succeeded" or record.result is None:
        return []
    made = list_results(decode_json(bytes(record.result.result)))
    pointers = decode_json(bytes(record.result.artifacts))
    for pointer in pointers if isinstance(pointers, list) else ():
        address = pointer.get("url") or pointer.get("uri") if isinstance(pointer, dict) else None
        if isinstance(address, str) and not address.startswith(OWN_SCHEME):
            mode = pointer.get("mime") or pointer.get("mime_type") or "application/octet-stream"
            made.append(Artifact([Part(url=address, media_type=str(mode))]))
    if not made and not has_output:
        made = [Artifact([to_part("")])]
    for at, artifact in enumerate(made):
        artifact.artifact_id = f"result-{at}" if at else "result"
    return made


def list_results(result: Any) -> list[Artifact]:
    """Return the artifacts of a result: those that a worker has made itself, else one of its value."""
    given = result["artifacts"] if isinstance(result, dict) and result.keys() == {"artifacts"} else [result]
    made = [artifact for value in given if (artifact := fit(value, Artifact))] if isinstance(given, list) else []
    if made and len(made) == len(given):
        return made
    return [] if result is None else [Artifact([to_part(result)])]


def to_part(value: Any) -> Part:
    """Return a value as a part."""
    return Part(text=value, media_type=TEXT_MODE) if isinstance(value, str) else Part(data=value, media_type=JSON_MODE)
