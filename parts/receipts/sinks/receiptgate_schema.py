"""Receipts as ReceiptGate takes them: one of ours and its task become the 41 fields of its schema, or nothing.

Nothing here decides or remembers anything: the same receipt gives the same bytes at any time and in any process, for a
ledger answers a receipt that it knows with other content as a collision.  So only what never changes is read: the
receipt, the terms of its task, and, of a task that has ended, how it ended.

What is kept is written in dialect 1.1, which asks for `obligation_id`; 1.0 refuses that name, so there it is taken out.
A ledger of 1.1 also keeps custody: an obligation is accepted once, then it is handed on by escalations, and only its
custodian may hand it on or complete it.  So each lease after the first is a hand-over there and an acceptance in 1.0;
a lease that is lost, given back or followed by another attempt returns custody to the gate, which 1.0 is not told.
Where the two differ, `older` holds what 1.0 is told instead, or null; it is never sent.

Only what opens, closes or hands on a responsibility is sent.  A success that says nowhere where its result lies, and a
failure that is tried again, leave the obligation open here, so they must not close it there; and what nobody ever
accepted cannot be closed.  Each receipt names as its cause another that was sent, or none.  The size limits are the
ledger's: what is longer is cut, and the hash of the whole stands in its place.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct

from asyncgate.parts.model.content import JsonObject, decode_json, to_canonical
from asyncgate.parts.model.stored import Lease, Receipt, Task
from asyncgate.parts.model.views import decode_terms, read_cause
from asyncgate.parts.model.wire import WIDEST, Terms

# What becomes of our types: the phase, and the status of an end.
PHASES = {
    "task.accepted": ("accepted", "NA"), "task.completed": ("complete", "success"),
    "task.failed": ("complete", "failure"), "task.canceled": ("complete", "canceled"),
    "task.escalated": ("escalate", "NA"), "lease.expired": ("escalate", "NA")}
# Why custody moves, as `escalation_reason` says it.
GRANTED, RETURNED, TRIED_AGAIN, NOT_GRANTED = "lease_granted", "lease_{}", "attempt_failed", "lease_not_granted"
UNDONE = "lease.undone"     # the type of a receipt that is at the ledger only: the lease that it undoes never was
OUTCOME_KINDS = frozenset({"NA", "none", "response_text", "artifact_pointer", "mixed"})
SENTINELS = frozenset({"", "NA", "TBD"})    # words that say that there is nothing to say
SOURCE, OLDER = "asyncgate", "older"

# Most bytes of a field, as JSON in ASCII with blanks: no way of writing it that a ledger may measure takes more.
ROOMY = {"inputs": 65_536, "task_body": 102_400, "outcome_text": 102_400, "body": 65_536}
# If all of them are large, the whole is refused (262,144 bytes is the most): then the repeated ones make room.
TIGHT = {**ROOMY, "inputs": 49_152, "task_body": 24_576, "outcome_text": 49_152}
MOST_RECEIPT_BYTES, MOST_LINE, MOST_POINTER = 256_000, 4_000, 4_000
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
MIME_TYPES = {
    "csv": "text/csv", "gif": "image/gif", "gz": "application/gzip", "htm": "text/html", "html": "text/html",
    "jpeg": "image/jpeg", "jpg": "image/jpeg", "json": "application/json", "log": "text/plain", "md": "text/markdown",
    "mp3": "audio/mpeg", "mp4": "video/mp4", "parquet": "application/vnd.apache.parquet", "pdf": "application/pdf",
    "png": "image/png", "py": "text/x-python", "svg": "image/svg+xml", "tar": "application/x-tar", "txt": "text/plain",
    "wav": "audio/wav", "webp": "image/webp", "xml": "application/xml", "yaml": "application/yaml",
    "yml": "application/yaml", "zip": "application/zip"}
UNKNOWN_TYPE = "application/octet-stream"

_plainly = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode


class Pointer(Struct, frozen=True):
    """Where a result lies, as far as an artifact says it; the mime type may be a guess."""

    pointer: str
    location: str
    mime: str
    checksum: str = "NA"
    size: int = 0


class Handed(Struct, frozen=True, array_like=True):
    """What `Task.handed` holds: under which fence custody was given back, by which receipt, and to whom."""

    fence: int
    receipt_id: str
    to: str | None      # whom the task was proposed to; None is the gate itself
    by_worker: bool = False     # the worker of that fence states its acceptance there itself, so ours is not there

    @property
    def text(self) -> str:
        """Return it as it is stored."""
        return to_canonical(self).decode()


handed_of = msgspec.json.Decoder(Handed).decode


class Telling(Struct, frozen=True):
    """What a receipt is told of, and how: its task, the task's latest lease, our name at the ledger, the limits."""

    task: Task
    lease: Lease | None
    source: str
    most: Mapping[str, int]
    digests: bool       # payloads and results are told by their hashes
    custody: bool       # to a ledger that keeps custody

    @property
    def fence(self) -> int:
        """Return the fence of the latest lease."""
        return self.lease.fence if self.lease else self.task.fence

    @property
    def handed(self) -> Handed | None:
        """Return how custody was last given back."""
        return handed_of(self.task.handed) if self.task.handed else None


def ledger_receipt(tenant_id: str, receipt: Receipt, task: Task | None, lease: Lease | None = None,
                   source: str = SOURCE, digests: bool = False) -> bytes | None:
    """Return a receipt as the ledger takes it, in dialect 1.1, or None when it is none of the ledger's business.

    `lease` is the task's latest: what others say about its work is said on behalf of its worker, for the ledger lets
    only the custodian of an obligation end it.  `source` is the name that the ledger knows us by.
    """
    if task is None or not is_forwarded(receipt, task):
        return None
    for most in (ROOMY, TIGHT):
        how = Telling(task, lease, source, most, digests, custody=True)
        whole = write_canonical(with_older(tenant_id, receipt, how))
        if len(whole) <= MOST_RECEIPT_BYTES:
            break
    return whole


def is_forwarded(receipt: Receipt, task: Task) -> bool:
    """Whether the ledger is told of a receipt: it opens, hands on or really ends what somebody has accepted."""
    if receipt.receipt_type in ("task.accepted", "task.escalated") or gives_back(receipt, task):
        return True
    accepted = task.fence > 0 or task.handed is not None
    return receipt.receipt_type in PHASES and task.duty in receipt.parents and accepted


def gives_back(receipt: Receipt, task: Task) -> bool:
    """Whether a receipt ends a lease and not the task."""
    again = receipt.receipt_type == "task.failed" and task.duty not in receipt.parents
    return receipt.receipt_type == "lease.expired" or again


def handed_after(receipt: Receipt, task: Task, lease: Lease | None, by_worker: bool = False) -> str | None:
    """Return what `Task.handed` becomes by a receipt, if custody moves in another way than by our acceptance."""
    fence = lease.fence if lease else task.fence
    before = handed_of(task.handed) if task.handed else None
    if by_worker:       # only what is handed on is told by us
        return Handed(fence, receipt.receipt_id if before else "", receipt.from_id, True).text
    by_worker = before is not None and before.fence == fence and before.by_worker
    if gives_back(receipt, task):
        return Handed(fence, receipt.receipt_id, None, by_worker).text
    if receipt.receipt_type == "task.escalated":
        return Handed(fence, receipt.receipt_id, receipt.to_id, by_worker).text
    return None


def with_older(tenant_id: str, receipt: Receipt, how: Telling) -> JsonObject:
    """Return every field in dialect 1.1, and beside them what 1.0 is told otherwise."""
    newer = fields(tenant_id, receipt, how)
    if gives_back(receipt, how.task):
        return {**newer, OLDER: None}
    if how.handed is None:
        return newer
    older = fields(tenant_id, receipt, msgspec.structs.replace(how, custody=False))
    differing = {name: value for name, value in older.items() if value != newer[name]}
    return {**newer, OLDER: differing} if differing else newer


def in_dialect_1_0(receipt: bytes) -> bytes | None:
    """Return a receipt in dialect 1.0, or None if that has no place for it."""
    known = decode_json(receipt)
    if (otherwise := known.pop(OLDER, {})) is None:
        return None
    known.pop("obligation_id", None)
    return write_canonical(known | otherwise)


def in_dialect_1_1(receipt: bytes) -> bytes:
    """Return a receipt as it is sent in dialect 1.1."""
    known = decode_json(receipt)
    if OLDER not in known:
        return receipt
    return write_canonical({name: value for name, value in known.items() if name != OLDER})


def as_accepted(receipt: bytes) -> bytes | None:
    """Return a hand-over as the acceptance that it is where nobody has accepted yet; None of any other receipt."""
    known = decode_json(receipt)
    if (otherwise := known.pop(OLDER, None)) is None or otherwise.get("phase") != "accepted":
        return None
    return write_canonical(known | otherwise)


def undo_acceptance(receipt: bytes, receipt_id: str, at: float, source: str) -> bytes | None:
    """Return what undoes an acceptance whose lease was never granted: custody goes back, and 1.0 is told of an end."""
    known = decode_json(receipt)
    if known["metadata"]["receipt_type"] != "task.accepted":
        return None
    worker, told, when = known["for_principal"], known["receipt_id"], rfc3339(at)
    lost = {"reason": NOT_GRANTED}
    common = {**known, **NO_OUTCOME, **NO_ESCALATION, "receipt_id": receipt_id, "dedupe_key": f"undo {told}",
              "caused_by_receipt_id": told, "from_principal": worker, "for_principal": worker, "created_at": when,
              "stored_at": when, "body": lost, "status": "NA", "phase": "escalate",
              "metadata": {**known["metadata"], "receipt_type": UNDONE, "parents": [told]}}
    back = {"escalation_class": "policy", "escalation_reason": NOT_GRANTED, "escalation_to": source,
            "recipient_ai": source}
    ended = {**NO_ESCALATION, "phase": "complete", "status": "canceled", "completed_at": when,
             "outcome_kind": "response_text", "outcome_text": NOT_GRANTED,
             "recipient_ai": known.get(OLDER, {}).get("recipient_ai", known["recipient_ai"])}
    return write_canonical({**common, **back, OLDER: ended})


def as_custody_only(receipt: bytes) -> bytes | None:
    """Return a hand-over that is nothing where no custody is kept; None of what is none."""
    known = decode_json(receipt)
    return write_canonical({**known, OLDER: None}) if known["phase"] == "escalate" else None


def write_canonical(receipt: JsonObject) -> bytes:
    """Write a receipt in the one way that it is always written."""
    try:
        return to_canonical(receipt)
    except OverflowError:       # an integer of more than 64 bits
        return _plainly(receipt).encode()


def fields(tenant_id: str, receipt: Receipt, how: Telling) -> JsonObject:
    """Return every field that the schema requires."""
    task, most = how.task, how.most
    phase, status = phase_of(receipt, how)
    body, terms, at = read_stored(receipt.body), decode_terms(task.terms), rfc3339(receipt.created_at)
    common = {
        "schema_version": "1.0", "obligation_id": task.duty, "tenant_id": tenant_id, "receipt_id": receipt.receipt_id,
        "task_id": task.task_id, "parent_task_id": "NA", "dedupe_key": receipt.receipt_key,
        "caused_by_receipt_id": cause_id(receipt, how), "attempt": body.get("attempt", task.attempt),
        "source_system": how.source, "recipient_ai": task.principal_ai, "trust_domain": "default", "phase": phase,
        "status": status, "realtime": False, "retry_requested": False, "created_at": at, "stored_at": at,
        "started_at": None, "completed_at": None, "read_at": None, "archived_at": None,
        "body": hash_stand_in(receipt.body) if how.digests else enclose(receipt.body, body, most["body"]),
        "metadata": metadata_fields(receipt)}
    made = common | party_fields(receipt, body, how) | work_fields(terms, how) | NO_OUTCOME | NO_ESCALATION
    if phase == "complete":
        started = None if task.started_at is None else rfc3339(task.started_at)
        made |= {"started_at": started, "completed_at": at} | ending_fields(body, most["outcome_text"], how.digests)
    return made | (escalation_fields(receipt, body, how) if phase == "escalate" else {})


def phase_of(receipt: Receipt, how: Telling) -> tuple[str, str]:
    """Return the phase and the status of a receipt."""
    handover = receipt.receipt_type == "task.accepted" and how.custody and how.handed is not None
    return ("escalate", "NA") if handover or gives_back(receipt, how.task) else PHASES[receipt.receipt_type]


def cause_id(receipt: Receipt, how: Telling) -> str:
    """Name the receipt at the ledger that caused one: of an acceptance the task's own cause or the escalation before.

    All else was caused by the acceptance of the lease that it is about.
    """
    before = how.handed
    if receipt.receipt_type != "task.accepted":
        if before is not None and before.by_worker and before.fence == how.fence:
            return (before.receipt_id if how.custody else "") or "NA"
        return how.lease.accepted if how.lease else before.receipt_id if before else "NA"
    known = before is not None and (how.custody or before.to is not None)
    return read_cause(how.task.payload) or (before.receipt_id if before and known else "") or "NA"


def party_fields(receipt: Receipt, body: JsonObject, how: Telling) -> dict[str, str]:
    """Say who promises what to whom: the owner hands over to the worker, and from then on the worker answers."""
    task, before = how.task, how.handed
    if receipt.receipt_type == "task.accepted":
        giver = (before.to or how.source) if before and how.custody else task.owner_id
        return {"from_principal": giver, "for_principal": receipt.from_id}
    worker = how.lease.worker_id if how.lease else receipt.from_id
    if receipt.receipt_type == "task.escalated":
        worker = body["previous_worker_id"]
    if how.custody and before and before.fence == how.fence:
        worker = before.to or how.source
    return {"from_principal": worker, "for_principal": worker}


def work_fields(terms: Terms, how: Telling) -> JsonObject:
    """Say what the work is; the same in every receipt of a task."""
    task, most = how.task, how.most
    payload = None if task.payload == "null" else (
        hash_stand_in(task.payload) if how.digests else read_stored(task.payload))
    said = {"payload_pointer": task.payload_pointer, "payload": payload}
    inputs = {name: value for name, value in said.items() if value is not None}
    limit = most["inputs"]
    if not is_short(task.payload + (task.payload_pointer or ""), limit) and most_bytes_of(inputs) > limit:
        inputs["payload"] = hash_stand_in(task.payload)
    kind = terms.expected_outcome_kind
    told = write_canonical(payload).decode() if how.digests and payload is not None else task.payload
    text = terms.instructions or ("" if payload is None else told) or task.payload_pointer or "TBD"
    return {"task_type": task.type, "task_summary": clip(summary_of(task, terms), MOST_LINE), "inputs": inputs,
            "task_body": clip(text, most["task_body"]),
            "expected_outcome_kind": kind if kind in OUTCOME_KINDS else "NA",
            "expected_artifact_mime": terms.expected_artifact_mime or "NA"}


def summary_of(task: Task, terms: Terms) -> str:
    """Say in a line what the task is; an accepted one must not leave that to be decided."""
    said = (terms.task_summary or "", task.type, f"task {task.task_id}")
    return next(text for text in said if text.strip() not in SENTINELS)


def metadata_fields(receipt: Receipt) -> JsonObject:
    """Say what of a receipt has no field of its own."""
    return {"receipt_type": receipt.receipt_type, "lease_id": receipt.lease_id, "hash": receipt.hash,
            "parents": receipt.parents[:MOST_PARENTS], "from_kind": receipt.from_kind, "from_id": receipt.from_id,
            "to_kind": receipt.to_kind, "to_id": receipt.to_id, "asyncgate_instance": receipt.asyncgate_instance}


# How it ended, or whom it is proposed to.

NO_OUTCOME: JsonObject = {
    "outcome_kind": "NA", "outcome_text": "NA", "artifact_location": "NA", "artifact_pointer": "NA",
    "artifact_checksum": "NA", "artifact_size_bytes": 0, "artifact_mime": "NA"}
NO_ESCALATION: JsonObject = {"escalation_class": "NA", "escalation_reason": "NA", "escalation_to": "NA"}
TOLD = ("result_summary", "result_payload", "result_sha256", "result_bytes", "error", "error_sha256", "error_bytes",
        "how_to_retrieve", "delivery_proof", "reason")
CONTENT = ("result_summary", "result_payload", "error", "delivery_proof", "artifacts", "reason")


def ending_fields(body: JsonObject, most: int, digests: bool = False) -> JsonObject:
    """Say how a task ended; what looks like a pointer and is not enough of one is told as text instead."""
    where = first_located(body.get("artifacts"))
    told = {name: body[name] for name in (*TOLD, *(() if where else ("artifacts",))) if body.get(name) is not None}
    if digests:
        told = {name: hash_stand_in(write_canonical(value).decode()) if name in CONTENT else value
                for name, value in told.items()}
    said = {"outcome_text": clip(text_of(told), most)} if told else {}
    if where is None:
        return {**NO_OUTCOME, **said, "outcome_kind": "response_text" if told else "none"}
    return {**NO_OUTCOME, **said, "outcome_kind": "mixed" if told else "artifact_pointer",
            "artifact_pointer": where.pointer, "artifact_location": where.location, "artifact_mime": where.mime,
            "artifact_checksum": where.checksum, "artifact_size_bytes": where.size}


def text_of(told: JsonObject) -> str:
    """Write what was told: a single text as it is, all else as JSON."""
    (only, *more) = told.values()
    if not more and isinstance(only, str) and only.strip() not in SENTINELS:
        return only
    return write_canonical(told).decode()


def escalation_fields(receipt: Receipt, body: JsonObject, how: Telling) -> JsonObject:
    """Say to whom custody goes, and why; all of it is a matter of policy (lease protocol)."""
    to, why = how.source, TRIED_AGAIN
    if receipt.receipt_type == "task.accepted":
        to, why = receipt.from_id, GRANTED
    elif receipt.receipt_type == "task.escalated":
        to, why = body["escalation_to"]["id"], body["escalation_reason"]
    elif receipt.receipt_type == "lease.expired":
        why = RETURNED.format(body.get("reason", "expired"))
    return {"escalation_class": "policy", "escalation_reason": why, "escalation_to": to, "recipient_ai": to}


# What artifacts say, in every shape that peers send them in.


def first_located(artifacts: Any) -> Pointer | None:
    """Return the first artifact that says where it lies."""
    return next((found for one in candidates(artifacts) if (found := pointer_of(one)) is not None), None)


def candidates(value: Any, depth: int = 0) -> Iterator[str | JsonObject]:
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


def pointer_of(one: str | JsonObject) -> Pointer | None:
    """Read one artifact; None when it does not say where it lies."""
    if isinstance(one, str):
        one = {"uri": one}
    pointer = first_text(one, POINTER, MOST_POINTER)
    if pointer is None:
        return None
    inner = one.get("metadata")
    more = {**(inner if isinstance(inner, dict) else {}), **one}
    if "/" in (kind := first_text(more, ("type",)) or ""):       # some say there what others call mime
        more = {**more, "type": None, "mime_type": first_text(more, MIME) or kind}
    mime = first_text(more, MIME) or guess_type(pointer)
    where = next((text for name in LOCATION if (text := first_text(more, (name,))) not in (None, pointer)), None)
    return Pointer(pointer, where or scheme_of(pointer), mime, first_text(more, CHECKSUM) or "NA", size_of(more))


def first_text(one: JsonObject, names: tuple[str, ...], most: int = 400) -> str | None:
    """Return the first of these that is a text that says something."""
    for name in names:
        text = one.get(name)
        if isinstance(text, str) and text.strip() not in SENTINELS and fits(text, most):
            return text
    return None


def size_of(one: JsonObject) -> int:
    """Return how many bytes an artifact has, if it says so; 0 is unknown."""
    for name in SIZE:
        said = one.get(name)
        if isinstance(said, str) and re.fullmatch("[0-9]{1,16}", said):
            said = int(said)
        if isinstance(said, int) and not isinstance(said, bool) and 0 <= said <= WIDEST:
            return said
    return 0


def scheme_of(pointer: str) -> str:
    """Return what kind of place a pointer leads to."""
    found = re.match("([A-Za-z][A-Za-z0-9+.-]{1,40}):", pointer)
    return found[1].lower() if found else "file"


def guess_type(pointer: str) -> str:
    """Guess the type of what lies there from how it is called."""
    name = re.split("[?#]", pointer)[0].rpartition("/")[2]
    return MIME_TYPES.get(name.rpartition(".")[2].lower(), UNKNOWN_TYPE) if "." in name else UNKNOWN_TYPE


# Sizes and times.


def most_bytes_of(value: Any) -> int:
    """Return how many bytes a value takes at most."""
    return len(json.dumps(value))


def hash_stand_in(text: str) -> JsonObject:
    """Stand in for JSON that is too long."""
    whole = text.encode()
    return {"truncated": True, "sha256": hashlib.sha256(whole).hexdigest(), "bytes": len(whole)}


def is_short(text: str, most: int) -> bool:
    """Whether a text, or the JSON that it is, is within the limit however it is written."""
    return (len(text) + 50) * WIDEST_CHARACTER <= most


def fits(text: str, most: int) -> bool:
    """Whether a text is within the limit."""
    return is_short(text, most) or most_bytes_of(text) <= most


def enclose(text: str, value: JsonObject, most: int) -> JsonObject:
    """Return an object that a text is, or what stands in for one that is too long."""
    return value if is_short(text, most) or most_bytes_of(value) <= most else hash_stand_in(text)


def clip(text: str, most: int) -> str:
    """Cut a text that is too long, and say so with the hash of the whole."""
    if fits(text, most):
        return text
    whole = text.encode()
    mark = f" [cut: {len(whole)} bytes, sha256 {hashlib.sha256(whole).hexdigest()}]"
    room = bisect_right(range(min(len(text), most)), most, key=lambda length: most_bytes_of(text[:length] + mark))
    return text[:max(room - 1, 0)] + mark


def read_stored(text: str) -> Any:
    """Read stored JSON, or stand in for what this reader cannot take, such as an integer of a thousand digits."""
    try:
        return decode_json(text)
    except (ValueError, RecursionError):
        return hash_stand_in(text)


def rfc3339(seconds: float) -> str:
    """Write a stored time as RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
