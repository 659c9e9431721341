"""Receipts as ReceiptGate takes them: one of ours and its task become the 41 fields of its schema, or nothing.

Nothing here decides or remembers anything: the same receipt gives the same bytes at any time and in any process, for a
ledger answers a receipt that it knows with other content as a collision.  So only what never changes is read: the
receipt, the terms of its task, and, of a task that has ended, how it ended.

What is sent is written in dialect 1.1, which asks for `obligation_id`; 1.0 refuses that name, so there it is taken out.

Only what opens, closes or proposes to hand on a responsibility is sent.  A success that says nowhere where its result
lies, and a failure that is tried again, leave the obligation open here, so they must not close it there; and what
nobody ever accepted cannot be closed.  The size limits are the ledger's: what is longer is cut, and the hash of the
whole stands in its place.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from asyncgate.parts.content import any_json, canonical
from asyncgate.parts.stored import Receipt, Task
from asyncgate.parts.views import terms_of
from asyncgate.parts.wire import WIDEST, Principal, Terms

# What becomes of our types: the phase, and the status of an end.
PHASES = {
    "task.accepted": ("accepted", "NA"), "task.completed": ("complete", "success"),
    "task.failed": ("complete", "failure"), "task.canceled": ("complete", "canceled"),
    "task.escalated": ("escalate", "NA")}
OUTCOME_KINDS = frozenset({"NA", "none", "response_text", "artifact_pointer", "mixed"})
SENTINELS = frozenset({"", "NA", "TBD"})    # words that say that there is nothing to say
SOURCE = "asyncgate"

# Most bytes of a field, as JSON in ASCII with blanks: no way of writing it that a ledger may measure takes more.
ROOMY = {"inputs": 65_536, "task_body": 102_400, "outcome_text": 102_400, "body": 65_536}
# If all of them are large, the whole is refused (262,144 bytes is the most): then the repeated ones make room.
TIGHT = {**ROOMY, "inputs": 49_152, "task_body": 24_576, "outcome_text": 49_152}
MOST_BYTES, MOST_LINE, MOST_POINTER = 256_000, 4_000, 4_000
MOST_PARENTS = 100          # and so metadata, whose ids have 200 characters at most, stays within its 16,384 bytes
WIDEST_CHARACTER = 13       # bytes, with a blank behind it: what is short even so need not be measured

# Where peers put what a pointer is made of, the most telling name first.
POINTER = (
    "artifact_pointer", "url", "uri", "output_path", "pointer", "href", "path", "file", "location", "artifact_id")
LOCATION = ("artifact_location", "type", "store", "location", "sink_id", "sink", "bucket")
MIME = ("artifact_mime", "mime", "mime_type", "content_type", "media_type")
CHECKSUM = ("artifact_checksum", "checksum", "content_hash", "sha256", "etag")
SIZE = ("artifact_size_bytes", "size_bytes", "bytes", "size")
INSIDE = ("pointers", "artifacts", "artifact", "items", "files")
DEEPEST = 8
# The system's table of types differs from machine to machine, and a guess must not.
TYPES = {
    "csv": "text/csv", "gif": "image/gif", "gz": "application/gzip", "htm": "text/html", "html": "text/html",
    "jpeg": "image/jpeg", "jpg": "image/jpeg", "json": "application/json", "log": "text/plain", "md": "text/markdown",
    "mp3": "audio/mpeg", "mp4": "video/mp4", "parquet": "application/vnd.apache.parquet", "pdf": "application/pdf",
    "png": "image/png", "py": "text/x-python", "svg": "image/svg+xml", "tar": "application/x-tar", "txt": "text/plain",
    "wav": "audio/wav", "webp": "image/webp", "xml": "application/xml", "yaml": "application/yaml",
    "yml": "application/yaml", "zip": "application/zip"}
UNKNOWN_TYPE = "application/octet-stream"

Json = dict[str, Any]
_plainly = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode


class Pointer(Struct, frozen=True):
    """Where a result lies, as far as an artifact says it; the mime type may be a guess."""

    pointer: str
    location: str
    mime: str
    checksum: str = "NA"
    size: int = 0


def ledger_receipt(tenant_id: str, receipt: Receipt, task: Task | None, holder: Principal | None = None,
                   source: str = SOURCE) -> bytes | None:
    """Return a receipt as the ledger takes it, in dialect 1.1, or None when it is none of the ledger's business.

    `holder` is the worker of the task's latest lease: what is said about its work by others is said on its behalf, for
    the ledger lets only the custodian of an obligation end it.  `source` is the name that the ledger knows us by.
    """
    if task is None or not is_forwarded(receipt, task):
        return None
    whole = written(fields(tenant_id, receipt, task, holder, source, ROOMY))
    return whole if len(whole) <= MOST_BYTES else written(fields(tenant_id, receipt, task, holder, source, TIGHT))


def is_forwarded(receipt: Receipt, task: Task) -> bool:
    """Whether the ledger is told of a receipt: it opens, hands on or really ends what somebody has accepted."""
    if receipt.receipt_type in ("task.accepted", "task.escalated"):
        return True
    return receipt.receipt_type in PHASES and task.duty in receipt.parents and task.fence > 0


def plain(receipt: bytes) -> bytes:
    """Return a receipt in dialect 1.0."""
    known = any_json(receipt)
    known.pop("obligation_id", None)
    return written(known)


def written(receipt: Json) -> bytes:
    """Write a receipt in the one way that it is always written."""
    try:
        return canonical(receipt)
    except OverflowError:       # an integer of more than 64 bits
        return _plainly(receipt).encode()


def fields(tenant_id: str, receipt: Receipt, task: Task, holder: Principal | None, source: str,
           most: Mapping[str, int]) -> Json:
    """Return every field that the schema requires."""
    phase, status = PHASES[receipt.receipt_type]
    body, terms, at = read(receipt.body), terms_of(task.terms), moment(receipt.created_at)
    common = {
        "schema_version": "1.0", "obligation_id": task.duty, "tenant_id": tenant_id, "receipt_id": receipt.receipt_id,
        "task_id": task.task_id, "parent_task_id": "NA", "dedupe_key": receipt.receipt_key,
        "caused_by_receipt_id": receipt.parents[0] if receipt.parents else "NA",
        "attempt": body.get("attempt", task.attempt), "source_system": source, "recipient_ai": task.principal_ai,
        "trust_domain": "default", "phase": phase, "status": status, "realtime": False, "retry_requested": False,
        "created_at": at, "stored_at": at, "started_at": None, "completed_at": None, "read_at": None,
        "archived_at": None, "body": enclosed(receipt.body, body, most["body"]), "metadata": metadata(receipt)}
    made = common | parties(receipt, task, body, holder) | work(task, terms, most) | NO_OUTCOME | NO_ESCALATION
    if phase == "complete":
        started = None if task.started_at is None else moment(task.started_at)
        made |= {"started_at": started, "completed_at": at} | outcome(body, most["outcome_text"])
    return made | (escalation(body) if phase == "escalate" else {})


def parties(receipt: Receipt, task: Task, body: Json, holder: Principal | None) -> dict[str, str]:
    """Say who promises what to whom: the owner hands over to the worker, and from then on the worker answers."""
    if receipt.receipt_type == "task.accepted":
        return {"from_principal": task.owner_id, "for_principal": receipt.from_id}
    worker = holder.id if holder else receipt.from_id
    worker = body["previous_worker_id"] if receipt.receipt_type == "task.escalated" else worker
    return {"from_principal": worker, "for_principal": worker}


def work(task: Task, terms: Terms, most: Mapping[str, int]) -> Json:
    """Say what the work is; the same in every receipt of a task."""
    payload = None if task.payload == "null" else read(task.payload)
    said = {"payload_pointer": task.payload_pointer, "payload": payload}
    inputs = {name: value for name, value in said.items() if value is not None}
    if not is_short(task.payload + (task.payload_pointer or ""), most["inputs"]) and weight(inputs) > most["inputs"]:
        inputs["payload"] = hashed(task.payload)
    kind = terms.expected_outcome_kind
    text = terms.instructions or ("" if payload is None else task.payload) or task.payload_pointer or "TBD"
    return {"task_type": task.type, "task_summary": clipped(summary(task, terms), MOST_LINE), "inputs": inputs,
            "task_body": clipped(text, most["task_body"]),
            "expected_outcome_kind": kind if kind in OUTCOME_KINDS else "NA",
            "expected_artifact_mime": terms.expected_artifact_mime or "NA"}


def summary(task: Task, terms: Terms) -> str:
    """Say in a line what the task is; an accepted one must not leave that to be decided."""
    said = (terms.task_summary or "", task.type, f"task {task.task_id}")
    return next(text for text in said if text.strip() not in SENTINELS)


def metadata(receipt: Receipt) -> Json:
    """Say what of a receipt has no field of its own."""
    return {"receipt_type": receipt.receipt_type, "lease_id": receipt.lease_id, "hash": receipt.hash,
            "parents": receipt.parents[:MOST_PARENTS], "from_kind": receipt.from_kind, "from_id": receipt.from_id,
            "to_kind": receipt.to_kind, "to_id": receipt.to_id, "asyncgate_instance": receipt.asyncgate_instance}


# How it ended, or whom it is proposed to.

NO_OUTCOME: Json = {
    "outcome_kind": "NA", "outcome_text": "NA", "artifact_location": "NA", "artifact_pointer": "NA",
    "artifact_checksum": "NA", "artifact_size_bytes": 0, "artifact_mime": "NA"}
NO_ESCALATION: Json = {"escalation_class": "NA", "escalation_reason": "NA", "escalation_to": "NA"}
TOLD = ("result_summary", "result_payload", "result_sha256", "result_bytes", "error", "error_sha256", "error_bytes",
        "how_to_retrieve", "delivery_proof", "reason")


def outcome(body: Json, most: int) -> Json:
    """Say how a task ended; what looks like a pointer and is not enough of one is told as text instead."""
    where = located(body.get("artifacts"))
    told = {name: body[name] for name in (*TOLD, *(() if where else ("artifacts",))) if body.get(name) is not None}
    said = {"outcome_text": clipped(text_of(told), most)} if told else {}
    if where is None:
        return {**NO_OUTCOME, **said, "outcome_kind": "response_text" if told else "none"}
    return {**NO_OUTCOME, **said, "outcome_kind": "mixed" if told else "artifact_pointer",
            "artifact_pointer": where.pointer, "artifact_location": where.location, "artifact_mime": where.mime,
            "artifact_checksum": where.checksum, "artifact_size_bytes": where.size}


def text_of(told: Json) -> str:
    """Write what was told: a single text as it is, all else as JSON."""
    (only, *more) = told.values()
    if not more and isinstance(only, str) and only.strip() not in SENTINELS:
        return only
    return written(told).decode()


def escalation(body: Json) -> Json:
    """Say whom the work is proposed to; a lost lease and spent attempts are matters of policy (lease protocol)."""
    to = body["escalation_to"]["id"]
    return {"escalation_class": "policy", "escalation_reason": body["escalation_reason"], "escalation_to": to,
            "recipient_ai": to}


# What artifacts say, in every shape that peers send them in.


def located(artifacts: Any) -> Pointer | None:
    """Return the first artifact that says where it lies."""
    return next((found for one in candidates(artifacts) if (found := pointer_of(one)) is not None), None)


def candidates(value: Any, depth: int = 0) -> Iterator[str | Json]:
    """Yield what may be an artifact, from the outside in."""
    if isinstance(value, list | tuple) and depth < DEEPEST:
        for one in value:
            yield from candidates(one, depth + 1)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield value
        for name in INSIDE if depth < DEEPEST else ():
            yield from candidates(value.get(name), depth + 1)


def pointer_of(one: str | Json) -> Pointer | None:
    """Read one artifact; None when it does not say where it lies."""
    if isinstance(one, str):
        one = {"uri": one}
    pointer = first(one, POINTER, MOST_POINTER)
    if pointer is None:
        return None
    inner = one.get("metadata")
    more = {**(inner if isinstance(inner, dict) else {}), **one}
    if "/" in (kind := first(more, ("type",)) or ""):       # some say there what others call mime
        more = {**more, "type": None, "mime_type": first(more, MIME) or kind}
    mime = first(more, MIME) or guessed(pointer)
    where = next((text for name in LOCATION if (text := first(more, (name,))) not in (None, pointer)), None)
    return Pointer(pointer, where or scheme(pointer), mime, first(more, CHECKSUM) or "NA", size(more))


def first(one: Json, names: tuple[str, ...], most: int = 400) -> str | None:
    """Return the first of these that is a text that says something."""
    for name in names:
        text = one.get(name)
        if isinstance(text, str) and text.strip() not in SENTINELS and fits(text, most):
            return text
    return None


def size(one: Json) -> int:
    """Return how many bytes an artifact has, if it says so; 0 is unknown."""
    for name in SIZE:
        said = one.get(name)
        if isinstance(said, str) and re.fullmatch("[0-9]{1,16}", said):
            said = int(said)
        if isinstance(said, int) and not isinstance(said, bool) and 0 <= said <= WIDEST:
            return said
    return 0


def scheme(pointer: str) -> str:
    """Return what kind of place a pointer leads to."""
    found = re.match("([A-Za-z][A-Za-z0-9+.-]{1,40}):", pointer)
    return found[1].lower() if found else "file"


def guessed(pointer: str) -> str:
    """Guess the type of what lies there from how it is called."""
    name = re.split("[?#]", pointer)[0].rpartition("/")[2]
    return TYPES.get(name.rpartition(".")[2].lower(), UNKNOWN_TYPE) if "." in name else UNKNOWN_TYPE


# Sizes and times.


def weight(value: Any) -> int:
    """Return how many bytes a value takes at most."""
    return len(json.dumps(value))


def hashed(text: str) -> Json:
    """Stand in for JSON that is too long."""
    whole = text.encode()
    return {"truncated": True, "sha256": hashlib.sha256(whole).hexdigest(), "bytes": len(whole)}


def is_short(text: str, most: int) -> bool:
    """Whether a text, or the JSON that it is, is within the limit however it is written."""
    return (len(text) + 50) * WIDEST_CHARACTER <= most


def fits(text: str, most: int) -> bool:
    """Whether a text is within the limit."""
    return is_short(text, most) or weight(text) <= most


def enclosed(text: str, value: Json, most: int) -> Json:
    """Return an object that a text is, or what stands in for one that is too long."""
    return value if is_short(text, most) or weight(value) <= most else hashed(text)


def clipped(text: str, most: int) -> str:
    """Cut a text that is too long, and say so with the hash of the whole."""
    if fits(text, most):
        return text
    whole = text.encode()
    mark = f" [cut: {len(whole)} bytes, sha256 {hashlib.sha256(whole).hexdigest()}]"
    room = bisect_right(range(min(len(text), most)), most, key=lambda length: weight(text[:length] + mark))
    return text[:max(room - 1, 0)] + mark


def read(text: str) -> Any:
    """Read stored JSON, or stand in for what this reader cannot take, such as an integer of a thousand digits."""
    try:
        return any_json(text)
    except (ValueError, RecursionError):
        return hashed(text)


def moment(seconds: float) -> str:
    """Write a stored time as RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
