"""Encode JSON, and refuse the numbers that JSON cannot express: msgspec would write null for them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec


def encode_finite(value: Any, name: str = "") -> bytes:
    """Encode a value as JSON; raises ValueError with the path of a NaN or an infinity, below `name`."""
    text = msgspec.json.encode(value)
    if b"null" in text:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=leave_out)
        if found := find_infinite(plain, name):
            raise ValueError(f"{found}: JSON has no such number")
    return text


def encode_request(value: Any) -> bytes:
    """Encode a request; half of a surrogate pair is sent, because the gate refuses only the item that has it."""
    try:
        return encode_finite(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value, str_keys=True, enc_hook=msgspec.json.decode)).encode()


def leave_out(value: Any) -> None:
    """Leave out what is JSON already, which has no such number; raises TypeError for any other value."""
    if not isinstance(value, msgspec.Raw):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def find_infinite(value: Any, name: str = "") -> str:
    """Return where a plain JSON value has a NaN or an infinity, and which; an empty text if it has none."""
    left = [(name, value)]
    while left:
        path, one = left.pop()
        if isinstance(one, float) and not math.isfinite(one):
            return f"{path or 'the value'} is {one}"
        if isinstance(one, Mapping):
            left += [(f"{path}.{key}" if path else str(key), inner) for key, inner in one.items()]
        elif isinstance(one, list | tuple | set | frozenset):
            left += [(f"{path}[{at}]", inner) for at, inner in enumerate(one)]
    return ""
