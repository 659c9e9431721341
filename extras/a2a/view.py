"""How tasks of the gate look in A2A: a pure function of what the gate has stored, so the same at each gate."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from asyncgate.extras.a2a.requests import JSON_MODE, TEXT_MODE, Part, is_part, take
from asyncgate.parts.model import stored, wire
from asyncgate.parts.model.content import decode_json
from asyncgate.parts.model.naming import find_context

ENDED_STATES = frozenset({"COMPLETED", "FAILED", "CANCELED", "REJECTED"})
ASKS = frozenset({"INPUT_REQUIRED", "AUTH_REQUIRED"})
TASK_STATES = {"SUBMITTED", "WORKING"} | ENDED_STATES | ASKS
OWN_SCHEME = "asyncgate:"            # where a result is that the record itself has
OUTPUT = "output"       # the artifact that the output of a task is
QUESTION_KEY = "asyncgate/key"           # of a question, in the metadata of its message
AUTH = ("auth", "auth-", "auth:")       # a question whose key is the first, or begins with one of the others
GOES_ON = frozenset({"task.accepted", "lease.expired", "task.progress", "input.requested", "input.answered",
                     "input.expired"})
MAY_END = frozenset({"task.completed", "task.failed", "task.canceled"})
MADE = frozenset({"text", "parts", "context_id"})      # members of each payload that the face has made


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
        return [question for question in self.questions if self._is_open(question)]

    @property
    def asked_others(self) -> list[Any]:
        """Return what it waits for that others are to answer."""
        return [question for question in self.inputs if self._is_open(question) and question not in self.open]

    def _is_open(self, question: Any) -> bool:
        return bool(question.state == "open") and self.record.status not in stored.TERMINAL

    @property
    def context_id(self) -> str:
        """Return the context."""
        return read_context(self.record)

    @property
    def state(self) -> str:
        """Return the state; nothing goes back to SUBMITTED after a lost worker."""
        match self.record.status:
            case "succeeded":
                return "COMPLETED"
            case "canceled":
                return "CANCELED"
            case "failed":
                return "REJECTED" if read_error(self.record).get("code") == "rejected" else "FAILED"
        if self.open:
            return name_question(self.open[0].key)
        return "WORKING" if self.record.fence or self.record.held else "SUBMITTED"

    @property
    def is_still(self) -> bool:
        """Whether nothing happens until the client does something, or at all."""
        return self.state in ENDED_STATES | ASKS


def read_context(record: wire.TaskRecord) -> str:
    """Return the context of a task: the session in which it was created, else a context of its own."""
    session = record.created_by.instance_id
    return find_context(session) or session or record.task_id


def name_question(key: str) -> str:
    """Return the state of a task that has asked its client, which the key of the question tells."""
    return "AUTH_REQUIRED" if key == AUTH[0] or key.startswith(AUTH[1:]) else "INPUT_REQUIRED"


def show_task(seen: Seen, history: int | None = None, artifacts: bool = True) -> dict[str, Any]:
    """Show a task; `history` is how many messages to show, None all."""
    record, payload = seen.record, read_payload(seen.record)
    shown: dict[str, Any] = {"id": record.task_id, "contextId": seen.context_id, "status": show_status(seen)}
    if history != 0:
        shown["history"] = show_history(seen, payload)[-(history or 0):]
    output = show_outputs(seen.chunks)
    if artifacts and (made := [*output, *show_results(record, bool(output))]):
        shown["artifacts"] = made
    own = payload.get("request_metadata")
    shown["metadata"] = {**(own if isinstance(own, dict) else {}), "asyncgate/attempt": record.attempt,
                         "asyncgate/receipt_id": record.obligation_receipt_id}
    return shown


def read_payload(record: wire.TaskRecord) -> dict[str, Any]:
    """Return the payload if a message has become it; any other one is a part of a message."""
    payload = decode_json(bytes(record.payload))
    if isinstance(payload, dict) and payload.keys() >= MADE and isinstance(parts := payload["parts"], list) and all(
            is_part(part) for part in parts):
        return payload
    return {"parts": [to_part(payload)]}


def show_status(seen: Seen) -> dict[str, Any]:
    """Show the state of a task, and what is to be said of it."""
    status: dict[str, Any] = {"state": f"TASK_STATE_{seen.state}", "timestamp": to_moment(seen.record.updated_at)}
    if (message := find_message(seen)) is not None:
        status["message"] = message
    return status


def make_status(seen: Seen, receipt: wire.ReceiptRecord, asked: Iterable[wire.ReceiptRecord]) -> dict[str, Any]:
    """Return the state that a receipt leads to, while these questions are open."""
    state = "SUBMITTED" if receipt.receipt_type == "task.assigned" else "WORKING"
    status = {"state": f"TASK_STATE_{state}", "timestamp": to_moment(receipt.created_at)}
    for question in asked:
        if question.to.same(seen.record.created_by):
            body = decode_json(bytes(question.body)) or {}
            key = str(body.get("key"))
            message = show_question(seen, key, str(body.get("message")), body.get("schema"))
            return {**status, "state": f"TASK_STATE_{name_question(key)}", "message": message}
    return status


def find_message(seen: Seen) -> dict[str, Any] | None:
    """Return what is to be said of a state; of a completed task its artifacts say all, or clients show it twice."""
    record = seen.record
    if seen.open:
        asked = seen.open[0]
        return show_question(seen, asked.key, asked.message, decode_json(bytes(asked.schema)))
    if record.status == "failed":
        error = read_error(record)
        return say(seen, "error", str(error.get("message") or error.get("code") or "the task has failed"))
    if record.status in stored.TERMINAL:
        return None
    if seen.asked_others:
        asked = seen.asked_others[0]
        return say(seen, f"waits:{asked.key}", f"waits for {asked.to}: {asked.message}")
    if record.held is not None:
        return say(seen, f"held:{record.held}", f"on hold: {record.held}")
    if messages := [chunk for chunk in seen.chunks if is_message(decode_json(bytes(chunk.chunk)))]:
        return show_message(seen, messages[-1])
    progress = decode_json(bytes(record.progress))
    text = progress.get("message") if isinstance(progress, dict) else progress
    if isinstance(text, str) and text and record.progress_at is not None:
        return say(seen, f"progress:{to_moment(record.progress_at)}", text)
    return None


def say(seen: Seen, name: str, text: str) -> dict[str, Any]:
    """Return a message of the agent; its id is the same wherever it is made."""
    return make_message(seen, f"{seen.record.task_id}:{name}", "ROLE_AGENT", [{"text": text, "mediaType": TEXT_MODE}])


def make_message(seen: Seen, message_id: str, role: str, parts: list[Part]) -> dict[str, Any]:
    """Return a message about a task."""
    return {"messageId": message_id, "role": role, "parts": parts, "taskId": seen.record.task_id,
            "contextId": seen.context_id}


def show_question(seen: Seen, key: str, words: str, schema: Any) -> dict[str, Any]:
    """Show a question; the schema of its answer is a part beside the words, while it is open."""
    parts: list[Part] = [{"text": words, "mediaType": TEXT_MODE}]
    if schema is not None:
        parts.append({"data": schema, "mediaType": "application/schema+json"})
    message = make_message(seen, f"{seen.record.task_id}:input:{key}", "ROLE_AGENT", parts)
    return {**message, "metadata": {QUESTION_KEY: key}}


def show_history(seen: Seen, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Show what the client has said, and what it was asked before."""
    message_id = str(payload.get("message_id") or f"{seen.record.task_id}:message")
    first = make_message(seen, message_id, "ROLE_USER", payload["parts"])
    if isinstance(metadata := payload.get("metadata"), dict):
        first["metadata"] = metadata
    history = [first]
    for question in seen.questions:
        if question in seen.open[:1]:
            continue        # it is the status
        history.append(show_question(seen, question.key, question.message, decode_json(bytes(question.schema))))
        if question.receipt_id is not None and question.answered_by is not None:
            content = decode_json(bytes(question.content))
            history.append(make_message(seen, question.receipt_id, "ROLE_USER", [to_part(unwrap_text(content))]))
    return history


def unwrap_text(content: Any) -> Any:
    """Return the words of an answer that consists of words."""
    return content["text"] if isinstance(content, dict) and content.keys() == {"text"} else content


def show_outputs(chunks: list[Any]) -> list[dict[str, Any]]:
    """Show chunks of output: the artifacts that its worker has named, and one of the rest, whose words are joined."""
    made = dict[str, dict[str, Any]]()
    for chunk in chunks:
        if is_message(value := decode_json(bytes(chunk.chunk))):
            continue
        id, parts = find_artifact(value), value["parts"] if is_named(value) else [
            value if is_part(value) else to_part(value)]
        if id not in made or not appends(value):
            made[id] = {"artifactId": id, "parts": []}
        before = made[id]["parts"]
        if id == OUTPUT and isinstance(value, str) and before and before[-1].keys() == {"text", "mediaType"}:
            before[-1]["text"] += value
        else:
            before += parts
        made[id]["metadata"] = {"asyncgate/offset": chunk.offset}
    return list(made.values())


def is_named(value: Any) -> bool:
    """Whether a chunk is one of an artifact that its worker has named (`job.artifact`)."""
    return isinstance(value, dict) and value.keys() == {"artifactId", "append", "parts"} and isinstance(
        value["append"], bool) and is_artifact({name: value[name] for name in ("artifactId", "parts")})


def is_message(value: Any) -> bool:
    """Whether a chunk is a message of the worker (`job.message`)."""
    return isinstance(value, dict) and value.keys() == {"role", "parts"} and value["role"] == "ROLE_AGENT" and (
        is_artifact({"parts": value["parts"]}))


def find_artifact(value: Any) -> str:
    """Return the artifact to which a chunk belongs."""
    return str(value["artifactId"]) if is_named(value) else OUTPUT


def appends(value: Any) -> bool:
    """Whether a chunk stands behind those before it."""
    return bool(value["append"]) if is_named(value) else True


def show_message(seen: Seen, chunk: Any) -> dict[str, Any]:
    """Show a message of the worker."""
    parts = decode_json(bytes(chunk.chunk))["parts"]
    return make_message(seen, f"{seen.record.task_id}:output:{chunk.offset}", "ROLE_AGENT", parts)


def show_results(record: wire.TaskRecord, has_output: bool) -> list[dict[str, Any]]:
    """Show the result of a task: at least one artifact, because clients show something else where there is none."""
    if record.status != "succeeded" or record.result is None:
        return []
    made = list_results(decode_json(bytes(record.result.result)))
    pointers = decode_json(bytes(record.result.artifacts))
    for pointer in pointers if isinstance(pointers, list) else ():
        address = pointer.get("url") or pointer.get("uri") if isinstance(pointer, dict) else None
        if isinstance(address, str) and not address.startswith(OWN_SCHEME):
            mode = pointer.get("mime") or pointer.get("mime_type") or "application/octet-stream"
            made.append({"parts": [{"url": address, "mediaType": str(mode)}]})
    if not made and not has_output:
        made = [{"parts": [{"text": "", "mediaType": TEXT_MODE}]}]
    return [{"artifactId": "result" if at == 0 else f"result-{at}", **artifact} for at, artifact in enumerate(made)]


def list_results(result: Any) -> list[dict[str, Any]]:
    """Return the artifacts of a result: those that a worker has made itself, else one of its value."""
    if isinstance(result, dict):
        given = result["artifacts"] if result.keys() == {"artifacts"} else [result]
        if isinstance(given, list) and given and all(is_artifact(artifact) for artifact in given):
            return [{name: value for member in ("name", "description", "parts", "metadata")
                     for name, value in ((member, take(artifact, member)),) if value is not None}
                    for artifact in given]
    return [] if result is None else [{"parts": [to_part(result)]}]


def is_artifact(value: Any) -> bool:
    """Whether a value is an artifact as A2A has it."""
    if not isinstance(value, dict) or value.keys() - {"artifactId", "name", "description", "parts", "metadata"}:
        return False
    parts = value.get("parts")
    named = all(isinstance(value.get(name, ""), str) for name in ("artifactId", "name", "description"))
    return named and isinstance(value.get("metadata", {}), dict) and isinstance(parts, list) and bool(
        parts) and all(is_part(part) for part in parts)


def to_part(value: Any) -> Part:
    """Return a value as a part."""
    if isinstance(value, str):
        return {"text": value, "mediaType": TEXT_MODE}
    return {"data": value, "mediaType": JSON_MODE}


def read_error(record: wire.TaskRecord) -> dict[str, Any]:
    """Return the error of a failed task."""
    error = decode_json(bytes(record.result.error)) if record.result is not None else None
    return error if isinstance(error, dict) else {"message": error} if isinstance(error, str) else {}


def to_moment(moment: datetime) -> str:
    """Return a time as ProtoJSON has it, in milliseconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"
