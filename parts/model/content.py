"""How JSON is read, measured, hashed and written everywhere in the gate."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from asyncgate.parts.model import errors, wire

JsonObject = dict[str, Any]

DELIVERED = {"succeeded", "success", "successful", "delivered", "ok", "done", "complete", "completed", "true"}
# Members of an artifact that describe it, and point to nothing; and words that stand for nothing.
DESCRIBING = frozenset((
    "type", "kind", "mime", "mime_type", "media_type", "content_type", "artifact_mime", "format", "encoding",
    "language", "title", "description", "note", "notes", "summary", "status", "metadata", "size", "size_bytes",
    "artifact_size_bytes", "bytes", "length", "checksum", "artifact_checksum", "content_hash", "sha256", "md5", "etag",
    "digest", "created_at", "updated_at", "timestamp", "at", "store", "sink", "sink_id", "bucket"))
NOTHING = {"", "na", "n/a", "none", "null", "nil", "tbd", "undefined", "unknown", "-"}
to_canonical = msgspec.json.Encoder(order="sorted").encode
encode_json = msgspec.json.Encoder().encode
decode_json = msgspec.json.Decoder().decode
decode_requirements = msgspec.json.Decoder(wire.Requirements | None).decode


def sha256(*parts: Any) -> str:
    """Hash the canonical JSON of `parts`."""
    return hashlib.sha256(to_canonical(parts)).hexdigest()


def find_summary(result: Any) -> str | None:
    """Return the summary that a result has of itself, as far as a receipt tells it."""
    summary = result.get("summary") if isinstance(result, dict) else None
    return summary[:1000] if isinstance(summary, str) else None


def enclose_whole(name: str, value: Any) -> dict[str, Any]:
    """Return how a receipt encloses a small result or error."""
    return {f"{name}_payload" if name == "result" else name: value}


def enclose_digest(name: str, value: Any, size: int, task_id: str) -> dict[str, Any]:
    """Return how a receipt encloses a large result or error: its hash, its size, and how to fetch it."""
    return {f"{name}_sha256": hashlib.sha256(to_canonical(value)).hexdigest(), f"{name}_bytes": size,
            "how_to_retrieve": {"operation": "get_task", "task_id": task_id}}


def read_artifacts(artifacts: Any) -> list[Any]:
    """Read artifacts as peers send them: a list, {"pointers": [...]}, one object, or nothing."""
    if isinstance(artifacts, list):
        return artifacts
    if isinstance(artifacts, Mapping):
        inner = artifacts.get("pointers", [artifacts] if artifacts else [])
        return inner if isinstance(inner, list) else [inner]
    if artifacts is None:
        return []
    raise errors.InvalidRequest("artifacts must be a list, an object or null")


def points_somewhere(artifact: Any, name: str = "") -> bool:
    """Whether an artifact has something to point with: a text, or the number of an id, that does not only describe."""
    if isinstance(artifact, Mapping):
        return any(points_somewhere(held, key.lower()) for key, held in artifact.items()
                   if key.lower() not in DESCRIBING)
    if isinstance(artifact, list):
        return any(points_somewhere(held, name) for held in artifact)
    if isinstance(artifact, str):
        return artifact.strip().lower() not in NOTHING
    return name.endswith("id") and isinstance(artifact, int) and not isinstance(artifact, bool)


def tells_another(told: Raw, first: str | None) -> bool:
    """Whether a repeated end tells another result or error than the first, which stands; none is not another."""
    value = decode_json(told)
    return value is not None and value != decode_json(first or "null")


def is_proof(proof: Mapping[str, Any] | None) -> bool:
    """Whether a delivery proof says that the delivery succeeded; one that says nothing of it proves nothing."""
    return str((proof or {}).get("status", "")).strip().lower() in DELIVERED


def find_location(artifacts: list[Any], proof: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what locates a result (PH.3): artifacts if one of them points somewhere, and a proof of delivery."""
    location = {"artifacts": artifacts} if any(map(points_somewhere, artifacts)) else {}
    return {**location, "delivery_proof": proof} if is_proof(proof) else location


def check_size(text: bytes, most: int, what: str) -> None:
    """Raise PayloadTooLarge if a text is too large to be stored."""
    if len(text) > most:
        raise errors.PayloadTooLarge(
            f"{what} is {len(text)} bytes; the limit of this gate is {most}: store it elsewhere, "
            "send a pointer", limit=most)


def parse_json(text: bytes, what: str) -> Any:
    """Read JSON that the gate stores verbatim; refuse invalid JSON now, not when it is read later."""
    try:
        return decode_json(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as wrong:
        raise errors.InvalidRequest(f"{what}: {wrong}") from None


def find_ordered_types(type: str, payload: Any) -> set[str]:
    """Return the types of all tasks that one task leads to: a schedule.create task has further tasks created."""
    types = {type}
    while type == "schedule.create" and isinstance(payload, dict) and isinstance(
            template := payload.get("task_template"), dict) and isinstance(template.get("type"), str):
        type, payload = template["type"], template.get("payload_template")
        types.add(type)
    return types


def needs_of(requirements: Raw) -> frozenset[str]:
    """Return the capabilities that a task requires."""
    try:
        asked = decode_requirements(requirements)
    except msgspec.DecodeError as wrong:
        raise errors.InvalidRequest(f"requirements: {wrong}") from None
    return (asked.capabilities if asked else None) or frozenset()
