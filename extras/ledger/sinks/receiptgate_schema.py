"""Translate a receipt and its task into the 41 fields of ReceiptGate's schema.

All functions are pure: a receipt always gives the same bytes, in any process and at any time.  A ledger answers a known
receipt_id with different content as a collision, so only values that never change are read: the receipt, the terms of
its task, and the result of an ended task.

Receipts are stored in the outbox in dialect 1.1, which requires `obligation_id`; dialect 1.0 forbids that field, so it
is removed before sending.  A ledger of dialect 1.1 also keeps custody: an obligation is accepted once, escalations hand
it on, and only its custodian may hand it on or complete it.  So each lease after the first is an escalation in 1.1 and
an acceptance in 1.0.  A lease that expires, is released or is followed by another attempt returns custody to the gate;
1.0 has no receipt for that.  If the dialects differ, the member `older` of a stored receipt holds the fields for 1.0,
or null if 1.0 gets no receipt.  `older` itself is never sent.

Only receipts that open, close or hand on a responsibility are sent.  Not sent: a success without a location of its
result, and a failure that is retried, because both leave the obligation open; and the end of a task that nobody
accepted.  The cause that a receipt names is a receipt that was sent, or "NA".  Values above the ledger's size limits
are cut, and the hash of the whole is given instead.
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

from asyncgate.parts.model import stored, wire
from asyncgate.parts.model.content import JsonObject, decode_json, to_canonical
from asyncgate.parts.model.views import decode_terms, read_cause

# ReceiptGate's phase and status for each receipt type.
PHASES = {
    "task.accepted": ("accepted", "NA"), "task.completed": ("complete", "success"),
    "task.failed": ("complete", "failure"), "task.canceled": ("complete", "canceled"),
    "task.escalated": ("escalate", "NA"), "lease.expired": ("escalate", "NA")}
# The values of `escalation_reason`.
GRANTED, RETURNED, TRIED_AGAIN, NOT_GRANTED = "lease_granted", "lease_{}", "attempt_failed", "lease_not_granted"
UNDONE = "lease.undone"     # the type of a receipt that only the ledger gets: its lease was never granted
OUTCOME_KINDS = frozenset({"NA", "none", "response_text", "artifact_pointer", "mixed"})
SENTINELS = frozenset({"", "NA", "TBD"})    # texts that stand for no value
SOURCE, OLDER = "asyncgate", "older"

# Size limits of fields in bytes, as ASCII JSON with blanks: the longest encoding that a ledger may measure.
ROOMY = {"inputs": 65_536, "task_body": 102_400, "outcome_text": 102_400, "body": 65_536}
# If all fields are that large, the ledger refuses the receipt (its limit is 262,144 bytes): then these limits apply.
TIGHT = {**ROOMY, "inputs": 49_152, "task_body": 24_576, "outcome_text": 49_152}
MOST_RECEIPT_BYTES, MOST_LINE, MOST_POINTER = 256_000, 4_000, 4_000
MOST_PARENTS = 100          # so metadata, with ids of at most 200 characters, stays below its limit of 16,384 bytes
WIDEST_CHARACTER = 13       # bytes of the longest encoded character with a blank; shorter texts are not measured

# The names under which workers give the parts of a pointer, the most specific name first.
POINTER = (
    "artifact_pointer", "url", "uri", "output_path", "pointer", "href", "path", "file", "location", "artifact_id")
LOCATION = ("artifact_location", "type", "store", "location", "sink_id", "sink", "bucket")
MIME = ("artifact_mime", "mime", "mime_type", "content_type", "media_type")
CHECKSUM = ("artifact_checksum", "checksum", "content_hash", "sha256", "etag")
SIZE = ("artifact_size_bytes", "size_bytes", "bytes", "size")
INSIDE = ("pointers", "artifacts", "artifact", "items", "files")
DEEPEST = 8
# Not the system's table of types: it differs from machine to machine, and the bytes of a receipt must not.
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
    """The location of a result as an artifact gives it; the mime type may be guessed."""

    pointer: str
    location: str
    mime: str
    checksum: str = "NA"
    size: int = 0


class Handed(Struct, frozen=True, array_like=True):
    """The content of `Task.handed`: the fence under which custody last moved back, the receipt, and the receiver."""

    fence: int
    receipt_id: str
    to: str | None      # the principal to whom the task was escalated; None is the gate itself
    by_worker: bool = False     # the worker itself stored its acceptance at the ledger, so the gate's was not sent

    @property
    def text(self) -> str:
        """Return the stored form."""
        return to_canonical(self).decode()


handed_of = msgspec.json.Decoder(Handed).decode


class Telling(Struct, frozen=True):
    """The context of a translation: the task, its latest lease, the gate's name at the ledger, and the size limits."""

    task: stored.Task
    lease: stored.Lease | None
    source: str
    most: Mapping[str, int]
    digests: bool       # send hashes instead of payloads and results
    custody: bool       # the ledger keeps custody (dialect 1.1)

    @property
    def fence(self) -> int:
        """Return the fence of the latest lease."""
        return self.lease.fence if self.lease else self.task.fence

    @property
    def handed(self) -> Handed | None:
        """Return how custody was last given back."""
        return handed_of(self.task.handed) if self.task.handed else None


def ledger_receipt(tenant_id: str, receipt: stored.Receipt, task: stored.Task | None, lease: stored.Lease | None = None,
                   source: str = SOURCE, digests: bool = False) -> bytes | None:
    """Return a receipt in dialect 1.1 with its `older` member, or None if the ledger does not get this receipt.

    `lease` is the task's latest lease.  A receipt by anybody else is sent in the name of the lease's worker, because
    the ledger lets only the custodian end an obligation.  `source` is the gate's name at the ledger.
    """
    if task is None or not is_forwarded(receipt, task):
        return None
    for most in (ROOMY, TIGHT):
        how = Telling(task, lease, source, most, digests, custody=True)
        whole = write_canonical(with_older(tenant_id, receipt, how))
        if len(whole) <= MOST_RECEIPT_BYTES:
            break
    return whole


def is_forwarded(receipt: stored.Receipt, task: stored.Task) -> bool:
    """Whether a receipt is sent to the ledger: it opens, hands on or ends an accepted obligation."""
    if receipt.receipt_type in ("task.accepted", "task.escalated") or gives_back(receipt, task):
        return True
    accepted = task.fence > 0 or task.handed is not None
    return receipt.receipt_type in PHASES and task.duty in receipt.parents and accepted


def gives_back(receipt: stored.Receipt, task: stored.Task) -> bool:
    """Whether a receipt ends a lease but not the task."""
    again = receipt.receipt_type == "task.failed" and task.duty not in receipt.parents
    return receipt.receipt_type == "lease.expired" or again


def handed_after(receipt: stored.Receipt, task: stored.Task, lease: stored.Lease | None,
                 by_worker: bool = False) -> str | None:
    """Return the new `Task.handed` if a receipt moves custody; None for the gate's own acceptance and all others."""
    fence = lease.fence if lease else task.fence
    before = handed_of(task.handed) if task.handed else None
    if by_worker:       # the gate sends only the hand-over
        return Handed(fence, receipt.receipt_id if before else "", receipt.from_id, True).text
    by_worker = before is not None and before.fence == fence and before.by_worker
    if gives_back(receipt, task):
        return Handed(fence, receipt.receipt_id, None, by_worker).text
    if receipt.receipt_type == "task.escalated":
        return Handed(fence, receipt.receipt_id, receipt.to_id, by_worker).text
    return None


def with_older(tenant_id: str, receipt: stored.Receipt, how: Telling) -> JsonObject:
    """Return all fields in dialect 1.1, and in `older` those that differ in 1.0."""
    newer = fields(tenant_id, receipt, how)
    if gives_back(receipt, how.task):
        return {**newer, OLDER: None}
    if how.handed is None:
        return newer
    older = fields(tenant_id, receipt, msgspec.structs.replace(how, custody=False))
    differing = {name: value for name, value in older.items() if value != newer[name]}
    return {**newer, OLDER: differing} if differing else newer


def in_dialect_1_0(receipt: bytes) -> bytes | None:
    """Return a stored receipt in dialect 1.0, or None if 1.0 has no such receipt."""
    known = decode_json(receipt)
    if (otherwise := known.pop(OLDER, {})) is None:
        return None
    known.pop("obligation_id", None)
    return write_canonical(known | otherwise)


def in_dialect_1_1(receipt: bytes) -> bytes:
    """Return a stored receipt in dialect 1.1, without `older`."""
    known = decode_json(receipt)
    if OLDER not in known:
        return receipt
    return write_canonical({name: value for name, value in known.items() if name != OLDER})


def as_accepted(receipt: bytes) -> bytes | None:
    """Turn a hand-over into an acceptance, for a ledger at which nobody has accepted; None for other receipts."""
    known = decode_json(receipt)
    if (otherwise := known.pop(OLDER, None)) is None or otherwise.get("phase") != "accepted":
        return None
    return write_canonical(known | otherwise)


def undo_acceptance(receipt: bytes, receipt_id: str, at: float, source: str) -> bytes | None:
    """Return the receipt that undoes an acceptance whose lease was never granted; None for other receipts.

    In dialect 1.1 it returns custody to the gate; in 1.0 it ends the obligation as canceled.
    """
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
    """Return a hand-over that is sent only in dialect 1.1; None for other receipts."""
    known = decode_json(receipt)
    return write_canonical({**known, OLDER: None}) if known["phase"] == "escalate" else None


def write_canonical(receipt: JsonObject) -> bytes:
    """Encode a receipt as canonical JSON."""
    try:
        return to_canonical(receipt)
    except OverflowError:       # an integer of more than 64 bits
        return _plainly(receipt).encode()


def fields(tenant_id: str, receipt: stored.Receipt, how: Telling) -> JsonObject:
    """Return all fields of the schema."""
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


def phase_of(receipt: stored.Receipt, how: Telling) -> tuple[str, str]:
    """Return the phase and the status of a receipt."""
    handover = receipt.receipt_type == "task.accepted" and how.custody and how.handed is not None
    return ("escalate", "NA") if handover or gives_back(receipt, how.task) else PHASES[receipt.receipt_type]


def cause_id(receipt: stored.Receipt, how: Telling) -> str:
    """Return the id of the receipt at the ledger that caused this one.

    The cause of an acceptance is the task's own cause or the last escalation.  The cause of every other receipt is the
    acceptance of its lease.
    """
    before = how.handed
    if receipt.receipt_type != "task.accepted":
        if before is not None and before.by_worker and before.fence == how.fence:
            return (before.receipt_id if how.custody else "") or "NA"
        return how.lease.accepted if how.lease else before.receipt_id if before else "NA"
    known = before is not None and (how.custody or before.to is not None)
    return read_cause(how.task.payload) or (before.receipt_id if before and known else "") or "NA"


def party_fields(receipt: stored.Receipt, body: JsonObject, how: Telling) -> dict[str, str]:
    """Return the parties: an acceptance goes from the owner to the worker, all later receipts come from the worker."""
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


def work_fields(terms: wire.Terms, how: Telling) -> JsonObject:
    """Return the fields that describe the work; they are the same in every receipt of a task."""
    task, most = how.task, how.most
    payload = None if task.payload == "null" else (
        hash_stand_in(task.payload) if how.digests else read_stored(task.payload))
    members = {"payload_pointer": task.payload_pointer, "payload": payload}
    inputs = {name: value for name, value in members.items() if value is not None}
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


def summary_of(task: stored.Task, terms: wire.Terms) -> str:
    """Return a task's summary in one line: never empty, because the ledger refuses an acceptance without one."""
    texts = (terms.task_summary or "", task.type, f"task {task.task_id}")
    return next(text for text in texts if text.strip() not in SENTINELS)


def metadata_fields(receipt: stored.Receipt) -> JsonObject:
    """Return the fields of a receipt for which the schema has no field of its own."""
    return {"receipt_type": receipt.receipt_type, "lease_id": receipt.lease_id, "hash": receipt.hash,
            "parents": receipt.parents[:MOST_PARENTS], "from_kind": receipt.from_kind, "from_id": receipt.from_id,
            "to_kind": receipt.to_kind, "to_id": receipt.to_id, "asyncgate_instance": receipt.asyncgate_instance}


# The end of a task, and escalations.

NO_OUTCOME: JsonObject = {
    "outcome_kind": "NA", "outcome_text": "NA", "artifact_location": "NA", "artifact_pointer": "NA",
    "artifact_checksum": "NA", "artifact_size_bytes": 0, "artifact_mime": "NA"}
NO_ESCALATION: JsonObject = {"escalation_class": "NA", "escalation_reason": "NA", "escalation_to": "NA"}
TOLD = ("result_summary", "result_payload", "result_sha256", "result_bytes", "error", "error_sha256", "error_bytes",
        "how_to_retrieve", "delivery_proof", "reason")
CONTENT = ("result_summary", "result_payload", "error", "delivery_proof", "artifacts", "reason")


def ending_fields(body: JsonObject, most: int, digests: bool = False) -> JsonObject:
    """Return the fields of a task's end; artifacts without a usable pointer are given as text."""
    where = first_located(body.get("artifacts"))
    told = {name: body[name] for name in (*TOLD, *(() if where else ("artifacts",))) if body.get(name) is not None}
    if digests:
        told = {name: hash_stand_in(write_canonical(value).decode()) if name in CONTENT else value
                for name, value in told.items()}
    outcome = {"outcome_text": clip(text_of(told), most)} if told else {}
    if where is None:
        return {**NO_OUTCOME, **outcome, "outcome_kind": "response_text" if told else "none"}
    return {**NO_OUTCOME, **outcome, "outcome_kind": "mixed" if told else "artifact_pointer",
            "artifact_pointer": where.pointer, "artifact_location": where.location, "artifact_mime": where.mime,
            "artifact_checksum": where.checksum, "artifact_size_bytes": where.size}


def text_of(told: JsonObject) -> str:
    """Return values as text: a single text unchanged, everything else as JSON."""
    (only, *more) = told.values()
    if not more and isinstance(only, str) and only.strip() not in SENTINELS:
        return only
    return write_canonical(told).decode()


def escalation_fields(receipt: stored.Receipt, body: JsonObject, how: Telling) -> JsonObject:
    """Return to whom custody goes and why; the class is always policy (lease protocol)."""
    to, why = how.source, TRIED_AGAIN
    if receipt.receipt_type == "task.accepted":
        to, why = receipt.from_id, GRANTED
    elif receipt.receipt_type == "task.escalated":
        to, why = body["escalation_to"]["id"], body["escalation_reason"]
    elif receipt.receipt_type == "lease.expired":
        why = RETURNED.format(body.get("reason", "expired"))
    return {"escalation_class": "policy", "escalation_reason": why, "escalation_to": to, "recipient_ai": to}


# Artifacts, in every form that workers send them in.


def first_located(artifacts: Any) -> Pointer | None:
    """Return the location of the first artifact that has one."""
    return next((pointer for candidate in candidates(artifacts) if (pointer := pointer_of(candidate)) is not None),
                None)


def candidates(value: Any, depth: int = 0) -> Iterator[str | JsonObject]:
    """Yield the values that may be artifacts, outer ones first."""
    if isinstance(value, list | tuple) and depth < DEEPEST:
        for part in value:
            yield from candidates(part, depth + 1)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield value
        for name in INSIDE if depth < DEEPEST else ():
            yield from candidates(value.get(name), depth + 1)


def pointer_of(artifact: str | JsonObject) -> Pointer | None:
    """Read one artifact; None if it has no location."""
    if isinstance(artifact, str):
        artifact = {"uri": artifact}
    pointer = first_text(artifact, POINTER, MOST_POINTER)
    if pointer is None:
        return None
    inner = artifact.get("metadata")
    more = {**(inner if isinstance(inner, dict) else {}), **artifact}
    if "/" in (kind := first_text(more, ("type",)) or ""):       # some workers give the mime type as `type`
        more = {**more, "type": None, "mime_type": first_text(more, MIME) or kind}
    mime = first_text(more, MIME) or guess_type(pointer)
    where = next((text for name in LOCATION if (text := first_text(more, (name,))) not in (None, pointer)), None)
    return Pointer(pointer, where or scheme_of(pointer), mime, first_text(more, CHECKSUM) or "NA", size_of(more))


def first_text(pointer: JsonObject, names: tuple[str, ...], most: int = 400) -> str | None:
    """Return the first member of these names that is a text with a value."""
    for name in names:
        text = pointer.get(name)
        if isinstance(text, str) and text.strip() not in SENTINELS and fits(text, most):
            return text
    return None


def size_of(pointer: JsonObject) -> int:
    """Return the size of an artifact in bytes, 0 if it is not given."""
    for name in SIZE:
        size = pointer.get(name)
        if isinstance(size, str) and re.fullmatch("[0-9]{1,16}", size):
            size = int(size)
        if isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= wire.WIDEST:
            return size
    return 0


def scheme_of(pointer: str) -> str:
    """Return the scheme of a pointer, or "file"."""
    match = re.match("([A-Za-z][A-Za-z0-9+.-]{1,40}):", pointer)
    return match[1].lower() if match else "file"


def guess_type(pointer: str) -> str:
    """Guess the mime type from the extension in a pointer."""
    name = re.split("[?#]", pointer)[0].rpartition("/")[2]
    return MIME_TYPES.get(name.rpartition(".")[2].lower(), UNKNOWN_TYPE) if "." in name else UNKNOWN_TYPE


# Sizes and times.


def most_bytes_of(value: Any) -> int:
    """Return the size of a value's longest JSON encoding in bytes."""
    return len(json.dumps(value))


def hash_stand_in(text: str) -> JsonObject:
    """Return the object that replaces JSON that is too long: its hash and its size."""
    whole = text.encode()
    return {"truncated": True, "sha256": hashlib.sha256(whole).hexdigest(), "bytes": len(whole)}


def is_short(text: str, most: int) -> bool:
    """Whether a text, or the JSON in it, is certainly within the limit in every encoding."""
    return (len(text) + 50) * WIDEST_CHARACTER <= most


def fits(text: str, most: int) -> bool:
    """Whether a text is within the limit in every encoding."""
    return is_short(text, most) or most_bytes_of(text) <= most


def enclose(text: str, value: JsonObject, most: int) -> JsonObject:
    """Return the value of a JSON text, or its hash if it is too long."""
    return value if is_short(text, most) or most_bytes_of(value) <= most else hash_stand_in(text)


def clip(text: str, most: int) -> str:
    """Cut a text that is too long; append the size and the hash of the whole."""
    if fits(text, most):
        return text
    whole = text.encode()
    mark = f" [cut: {len(whole)} bytes, sha256 {hashlib.sha256(whole).hexdigest()}]"
    room = bisect_right(range(min(len(text), most)), most, key=lambda length: most_bytes_of(text[:length] + mark))
    return text[:max(room - 1, 0)] + mark


def read_stored(text: str) -> Any:
    """Parse stored JSON; return its hash if this parser cannot read it, such as an integer of a thousand digits."""
    try:
        return decode_json(text)
    except (ValueError, RecursionError):
        return hash_stand_in(text)


def rfc3339(seconds: float) -> str:
    """Format a stored time as RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
