"""What a worker declares of its types, as their functions say it: in annotations and in the docstring."""

from __future__ import annotations

import collections.abc
import inspect
import sys
from typing import Any, get_args, get_origin

import msgspec

from asyncgate.clients.values import find_adapter, mentions_model

ANYTHING: tuple[dict[str, Any], ...] = ({}, {"title": "Any"})
REFERENCE = "#/$defs/"


def describe_function(function: Any, payload: Any, result: Any, description: str | None) -> dict[str, Any]:
    """Return what is declared of a function's types; empty if it says nothing of what it takes and gives."""
    facts = {"payload_schema": derive_schema(payload, "validation"),
             "result_schema": derive_schema(unwrap_awaited(result), "serialization"), "description": description}
    facts = {name: value for name, value in facts.items() if value is not None}
    if facts and description is None and (text := inspect.getdoc(function)):
        facts["description"] = " ".join(text.partition("\n\n")[0].split())
    return facts


def unwrap_awaited(type: Any) -> Any:
    """Return what an annotation gives in the end."""
    waits = get_origin(type) in (collections.abc.Awaitable, collections.abc.Coroutine)
    return get_args(type)[-1] if waits else type


def derive_schema(type: Any, mode: str) -> dict[str, Any] | None:
    """Return the JSON schema of an annotation; None if it says nothing, or nothing that a schema can say."""
    if type in (Any, object, None) or get_origin(type) is collections.abc.Awaitable:
        return None
    try:
        if mentions_model(type):
            schema = find_adapter(type).json_schema(mode=mode, by_alias=True)
        else:
            schema = msgspec.json.schema(type)
    except (TypeError, ValueError, NotImplementedError, RecursionError):
        return None
    except Exception:       # pydantic's, for what it has no schema of
        if "pydantic" not in sys.modules:
            raise
        return None
    schema = raise_root(schema)
    return None if schema in ANYTHING else schema


def raise_root(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with its members at the root, where hosts of tools look for them, not behind a reference."""
    if schema.keys() - {"$ref", "$defs"} or not str(schema.get("$ref", "")).startswith(REFERENCE):
        return schema
    name = schema["$ref"].removeprefix(REFERENCE)
    root = schema["$defs"][name]
    rest = {other: inner for other, inner in schema["$defs"].items()
            if other != name or f'"{REFERENCE}{name}"'.encode() in msgspec.json.encode(schema["$defs"])}
    return {**root, "$defs": rest} if rest else root
