"""Encode JSON, and refuse the numbers that JSON cannot express: msgspec would write null for them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncgate.clients.values import dump_model


def encode_finite(value: Any, name: str = "") -> bytes:
    """Encode a value as JSON; raises ValueError with the path of a NaN or an infinity, below `name`."""
    text = msgspec.json.encode(value, enc_hook=dump_model)
    if b"null" in text:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=leave_out)
        if flaw := find_infinite(plain, name):
            raise ValueError(f"{flaw}: JSON has no such number")
    return text


def to_json_value(value: Any, name: str = "") -> Any:
    """Convert a value into plain JSON values; raises TypeError or ValueError if JSON cannot express it."""
    plain = msgspec.to_builtins(value, str_keys=True, enc_hook=dump_model)
    encode_finite(plain, name)
    return plain


def encode_request(value: Mapping[str, Any]) -> bytes:
    """Encode a request; in an item half of a surrogate pair is sent, because the gate refuses only that item."""
    try:
        return encode_finite(value)
    except UnicodeEncodeError:
        if value.keys().isdisjoint(("tasks", "schedules")):
            raise
        return json.dumps(msgspec.to_builtins(value, str_keys=True, enc_hook=decode_raw)).encode()


def decode_raw(value: Any) -> Any:
    """Decode what is JSON already, and dump a model."""
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else dump_model(value)


def leave_out(value: Any) -> Any:
    """Leave out what is JSON already, which has no such number; dump a model."""
    return None if isinstance(value, msgspec.Raw) else dump_model(value)


def find_infinite(value: Any, name: str = "") -> str:
    """Return where a plain JSON value has a NaN or an infinity, and which; an empty text if it has none."""
    left = [(name, value)]
    while left:
        path, node = left.pop()
        if isinstance(node, float) and not math.isfinite(node):
            return f"{path or 'the value'} is {node}"
        if isinstance(node, Mapping):
            left += [(f"{path}.{key}" if path else str(key), inner) for key, inner in node.items()]
        elif isinstance(node, list | tuple | set | frozenset):
            left += [(f"{path}[{at}]", inner) for at, inner in enumerate(node)]
    return ""
