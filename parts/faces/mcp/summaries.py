"""Summaries: the answers of tools fit into the context of a model.

A list has few items, and their large values are cut; one record is cut only if it does not fit.  A cut value says how
large it is and how it begins, and the answer says where the whole is.
"""

from __future__ import annotations

from typing import Any

from msgspec import Raw, Struct
from msgspec.structs import replace

from asyncgate.parts.model.content import JsonObject, decode_json, encode_json

MOST_BYTES = 20_000     # of an answer: hosts refuse more than 25,000 tokens
DEFAULT_PAGE, LARGEST_PAGE = 10, 15     # items of a list, by default and at most
VALUE_BYTES = (1000, 300, 100, 40)      # of one value: the first of these that fits
LONGEST_NAME = 200      # characters; texts that are not longer are cut last, and ids of the gate's own making never
BY_RESOURCE = "read the resource asyncgate://tasks/{task_id}, or GET /v1/tasks/{task_id}"
# Where the whole is of what an operation's summary cuts.
WHOLE = {"get_task": BY_RESOURCE, "run_task": BY_RESOURCE, "list_tasks": "get_task shows one task",
         "get_receipt": "GET /v1/receipts/{receipt_id}", "list_inputs": "GET /v1/tasks/{task_id}/inputs"}


def is_list(name: str) -> bool:
    """Whether an operation answers a list for a reader; an export is for programs, and a question is read whole."""
    return (name.startswith("list_") and name != "list_inputs") or name in ("get_task_history", "bootstrap")


def limit_page(name: str, ask: Any) -> None:
    """Let a list have no more items than a model can read."""
    for field in ("limit", "max_items"):
        if is_list(name) and hasattr(ask, field):
            setattr(ask, field, min(getattr(ask, field) or DEFAULT_PAGE, LARGEST_PAGE))


def summarize(name: str, reply: Any) -> bytes:
    """Return a reply as JSON, cut if it is a list or too large."""
    listed = is_list(name)
    if not (listed or name in WHOLE):
        return encode_json(reply)
    whole = encode_json(reply) if not listed else b""
    if whole and len(whole) <= MOST_BYTES:
        return whole
    for most in VALUE_BYTES:
        short = cut_value(reply, most, 0)
        text = encode_json(short)
        if len(text) <= MOST_BYTES:
            break
    if listed and short is reply:
        return text
    record: JsonObject = decode_json(text)
    if len(text) > MOST_BYTES:
        record = drop_nulls(record)
    how = WHOLE.get(name, "get_task or get_receipt shows one of them")
    return encode_json({**record, "cut": f"values of more than {most} bytes are cut; {how}"})


def cut_value(value: Any, most: int, depth: int) -> Any:
    """Return a value whose large parts are cut: JSON of callers, and texts that are longer than a name."""
    if isinstance(value, Raw):
        return value if len(bytes(value)) <= most else Raw(encode_json(describe_cut(bytes(value), most)))
    if isinstance(value, str):
        longest = most if most == VALUE_BYTES[-1] and depth > 1 else max(most, LONGEST_NAME)
        return value if len(value) <= longest else f"{value[:most]}… ({len(value)} characters)"
    if isinstance(value, list | tuple) and depth <= 1:
        return [cut_value(part, most, depth + 1) for part in value]
    if isinstance(value, dict | list | tuple):
        text = encode_json(value)
        return value if len(text) <= most else describe_cut(text, most)
    if isinstance(value, Struct):
        parts = {name: getattr(value, name) for name in value.__struct_fields__}
        short = {name: cut_value(part, most, depth + 1) for name, part in parts.items()}
        changed = {name: part for name, part in short.items() if part is not parts[name] and part != parts[name]}
        return replace(value, **changed) if changed else value
    return value


def describe_cut(text: bytes, most: int) -> JsonObject:
    """Return what stands for a cut value."""
    return {"cut": True, "bytes": len(text), "begins": text[:most // 2].decode(errors="ignore")}


def drop_nulls(value: Any) -> Any:
    """Return JSON without members that are null, which say nothing that their absence would not."""
    if isinstance(value, list):
        return [drop_nulls(part) for part in value]
    if isinstance(value, dict):
        return {name: drop_nulls(part) for name, part in value.items() if part is not None}
    return value
