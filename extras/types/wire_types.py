"""What goes over the wire about types of tasks: what is declared of them, and who serves them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType, field

from asyncgate.parts.model import errors, examples, wire

OnMismatch = Literal["refuse", "warn"]
TYPE = "ocr.scan"
PAYLOAD: dict[str, Any] = {"type": "object", "properties": {"file": {"type": "string"}}, "required": ["file"]}
RESULT: dict[str, Any] = {"type": "string"}
MEANING = "Read the text of a scanned page."
DECLARED = {"type": TYPE, "description": MEANING, "payload_schema": PAYLOAD, "result_schema": RESULT,
            "declared_at": examples.NOW}


class ListTypes(wire.Ask, kw_only=True):
    """List the types of tasks that somebody serves or has declared."""

    filters = True
    example = ({"type": TYPE}, {"types": [{
        "type": TYPE, "capabilities": ["web.read"], "workers": 2, "asked_at": examples.NOW, "description": MEANING,
        "payload_schema": PAYLOAD, "result_schema": RESULT}], "on_mismatch": "refuse"})
    next_step = "create_task or run_task with one of these types; explain_task tells why a task waits."
    type: Annotated[wire.Name | None, wire.says("only this type, with its schemas")] = None


class ServedType(Struct):
    """A type that workers ask for, with what they can do; a task of it may require that at most."""

    type: str | None                    # null: any
    capabilities: list[str]
    workers: int
    asked_at: datetime | None           # when the last of them asked; null: none has lately
    description: Annotated[str | UnsetType, wire.says("what its workers declare")] = UNSET
    payload_schema: Annotated[wire.AnyJson | UnsetType, wire.says("what each payload must fit")] = UNSET
    result_schema: Annotated[wire.AnyJson | UnsetType, wire.says("what each result fits")] = UNSET


class ServedTypes(Struct):
    """The types that somebody serves or has declared."""

    columns = "type capabilities workers asked_at description"
    types: list[ServedType]
    on_mismatch: Annotated[OnMismatch, wire.says("what happens to what does not fit its type")] = "refuse"


class DeclareType(wire.AsWorker, kw_only=True):
    """Declare a type."""

    needed = ("type",)
    example = ({"worker_id": "reader-1", "type": TYPE, "description": MEANING, "payload_schema": PAYLOAD,
                "result_schema": RESULT}, DECLARED)
    refusals = (errors.PayloadTooLarge, errors.QuotaExceeded)
    next_step = "lease_next with accept_types leases such tasks."
    type: Annotated[wire.Name, wire.says("the type of tasks")] = ""
    description: Annotated[wire.Text | None, wire.says("what such a task does, for agents")] = None
    payload_schema: Annotated[Raw, wire.says(
        "a JSON schema that each payload must fit, up to 64 KB; it refers to its own $defs only",
        type=["object", "null"])] = field(default_factory=wire.absent)
    result_schema: Annotated[Raw, wire.says("the same for each result", type=["object", "null"])] = field(
        default_factory=wire.absent)


class TypeRecord(Struct):
    """What is declared of a type."""

    type: str
    description: str
    payload_schema: wire.AnyJson        # null: anything
    result_schema: wire.AnyJson
    declared_at: datetime               # when it was last changed


class RemoveType(wire.AsWorker, kw_only=True):
    """Remove what is declared of a type."""

    needed = ("type",)
    example = ({"type": TYPE}, {"ok": True})
    refusals = (errors.TypeUnknown,)
    next_step = "Payloads of this type are not checked any more."
    type: Annotated[wire.Name, wire.says("the type of tasks")] = ""


class SetTypePolicy(wire.Ask, kw_only=True):
    """Choose what happens to what does not fit its type."""

    example = ({"on_mismatch": "warn"}, {"on_mismatch": "warn"})
    on_mismatch: Annotated[OnMismatch, wire.says(
        "refuse: payload_invalid or result_invalid; warn: take it, with a warning in the answer")]


class Policy(Struct):
    """What happens to what does not fit its type."""

    on_mismatch: OnMismatch
