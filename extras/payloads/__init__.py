"""Large payloads and results in a store of the clients: the gate has their address, their length and their SHA-256.

    payloads = Payloads(FolderStore("/srv/payloads"))               # or S3Store("bucket", "tasks/")
    gate, worker = SyncGate(payloads=payloads), Worker(payloads=payloads)

What is larger than `above_bytes` goes to the store before the call, under the name of its hash; so a repeated call is
the same request, and whoever reads it can tell that nobody has changed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from asyncgate.clients.finite import to_json_value
from asyncgate.extras.payloads.stores import FolderStore, KeptValue, NotInStore, S3Store, open_store
from asyncgate.parts.model.content import read_artifacts

__all__ = ["FolderStore", "KeptValue", "NotInStore", "PayloadDamaged", "Payloads", "Pointer", "S3Store", "Store",
           "open_store"]
ABOVE_BYTES = 256 * 2**10
MOST_VALUE_BYTES = 2**30          # that a reader takes; a pointer that promises more is refused before anything is read
RESULT_TYPE = "result"      # of the artifact that holds a result
POINTER = re.compile(r"(?P<uri>[^#]+)#sha256=(?P<sha256>[0-9a-f]{64})&bytes=(?P<bytes>[0-9]{1,15})")


class PayloadDamaged(ValueError):
    """What the store gives is not what the receipt names."""


class Store(Protocol):
    """Where the content is: it keeps bytes under names."""

    def put(self, name: str, content: bytes) -> str:
        """Keep content under a name, anew if it is there; return its URI."""

    def get(self, uri: str, most: int) -> bytes:
        """Return up to `most` bytes and one of what a URI names; raises NotInStore, also for a URI of another place."""


class Pointer(Struct, frozen=True):
    """Where a value is, its SHA-256 and its length; as `payload_pointer` it is a URI with both behind a #."""

    uri: str
    sha256: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.uri}#sha256={self.sha256}&bytes={self.bytes}"


def read_pointer(text: str | None) -> Pointer | None:
    """Read a pointer that a client with a store has made; None for any other one."""
    match = POINTER.fullmatch(text or "")
    return Pointer(match["uri"], match["sha256"], int(match["bytes"])) if match else None


def find_results(artifacts: Any) -> list[Pointer]:
    """Return what the artifacts of a task point to in the way of a result in a store; others are passed over."""
    results = [artifact for artifact in read_artifacts(artifacts)
               if isinstance(artifact, Mapping) and artifact.get("type") == RESULT_TYPE]
    pointers = list[Pointer | None]()
    for artifact in results:
        with contextlib.suppress(msgspec.ValidationError):
            pointers.append(read_pointer(str(msgspec.convert(artifact, Pointer))))
    return [pointer for pointer in pointers if pointer is not None]


def find_result(artifacts: Any) -> Pointer | None:
    """Return where the result of a task is, if it is in a store: behind the artifacts of the worker's own."""
    return next(reversed(find_results(artifacts)), None)


class Payloads:
    """What a client or a worker does with large values; it may be shared."""

    def __init__(self, store: Store, above_bytes: int = ABOVE_BYTES, most_bytes: int = MOST_VALUE_BYTES) -> None:
        self.store, self.above_bytes, self.most_bytes = store, above_bytes, most_bytes

    async def put(self, value: Any) -> Pointer | None:
        """Put a value into the store if it is large; else return None."""
        text = msgspec.json.encode(to_json_value(value))
        if len(text) <= self.above_bytes:
            return None
        digest = hashlib.sha256(text).hexdigest()
        return Pointer(await asyncio.to_thread(self.store.put, digest, text), digest, len(text))

    async def get(self, pointer: Pointer) -> Any:
        """Return the value that a pointer names; raises NotInStore, or PayloadDamaged if it is another one now."""
        if pointer.bytes > self.most_bytes:
            raise PayloadDamaged(f"{pointer.uri} has {pointer.bytes} bytes, and most_bytes is {self.most_bytes}")
        text = await asyncio.to_thread(self.store.get, pointer.uri, pointer.bytes)
        if len(text) != pointer.bytes or hashlib.sha256(text).hexdigest() != pointer.sha256:
            raise PayloadDamaged(f"{pointer.uri} is not what was stored: its SHA-256 or its length differs")
        return msgspec.json.decode(text)

    # What a call sends instead, and what a reader gets.

    async def stow_call(self, operation: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a call with pointers in place of large values."""
        if operation in ("create_task", "run_task"):
            return await self.stow_payload(fields)
        if operation in ("create_tasks", "complete_tasks"):
            stow = self.stow_payload if operation == "create_tasks" else self.stow_result
            return {**fields, "tasks": [await stow(item) for item in fields.get("tasks", ())]}
        return await self.stow_result(fields) if operation == "complete" else fields

    async def stow_payload(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a new task with a pointer in place of a large payload."""
        if fields.get("payload_pointer") is not None or (pointer := await self.put(fields.get("payload"))) is None:
            return fields
        return {**fields, "payload": None, "payload_pointer": str(pointer)}

    async def stow_result(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a completion with an artifact in place of a large result."""
        if (pointer := await self.put(fields.get("result"))) is None:
            return fields
        artifact = {"type": RESULT_TYPE, **msgspec.to_builtins(pointer)}
        others = [other for other in read_artifacts(fields.get("artifacts"))
                  if not (isinstance(other, Mapping) and other.get("type") == "inline")]
        return {**fields, "result": None, "artifacts": [*others, artifact]}

    async def fetch_payload(self, offer: dict[str, Any]) -> None:
        """Put the payload into an offer whose pointer names it."""
        if offer.get("payload") is None and (pointer := read_pointer(offer.get("payload_pointer"))) is not None:
            offer["payload"] = await self.get(pointer)

    async def fetch_result(self, result: Any, artifacts: Any) -> Any:
        """Return the result of a task, from the store if it is there."""
        pointer = find_result(artifacts) if result is None else None
        return result if pointer is None else await self.get(pointer)
