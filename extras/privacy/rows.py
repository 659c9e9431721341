"""How a stored row is exported: every field by its name, except those that prove who somebody is.

A new field is exported unless its type is a Proof (parts/model/cards.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, get_args

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import fields

from asyncgate.parts.model import cards, stored
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.views import to_utc

TABLE_OF_KIND: dict[str, type[Struct]] = {table: kind for kind, table in stored.TABLES.items()}

TIMES = frozenset({"at", "until", "since", "before"})   # the last words of the names of times

require_json = msgspec.json.Decoder(Raw).decode


def list_proofs(table: type[Struct]) -> list[str]:
    """Return the fields of a table that are never exported."""
    return cards.list_fields(table, cards.Says.PROOF)


def has_open_keys(table: type[Struct]) -> bool:
    """Whether the keys of a table may be shown; a cursor shows one."""
    return not set(stored.export_order(table)) & set(list_proofs(table))


def encode_row(row: Struct, **more: Struct | None) -> bytes:
    """Return a row as one line of JSON; `more` are further rows that belong to it."""
    shown = show_row(row) | {name: other and show_row(other) for name, other in more.items()}
    return bytes(msgspec.json.format(encode_json(shown), indent=-1))     # stored JSON may have line breaks


def show_row(row: Struct) -> dict[str, Any]:
    """Return a row's fields without proofs."""
    return {name: show(getattr(row, name)) for name, show in plan_fields(type(row))}


@cache
def plan_fields(table: type[Struct]) -> list[tuple[str, Callable[[Any], Any]]]:
    """Return the exported fields of a table, and how each is shown."""
    proofs = list_proofs(table)
    nested = [column.name for column in cards.list_columns(table) if column.form is cards.Form.JSON]
    return [(field.name, choose_form(field.name, field.type, nested)) for field in fields(table)
            if field.name not in proofs]


def choose_form(name: str, type: Any, nested: list[str]) -> Callable[[Any], Any]:
    """Return how a field is shown: JSON nested, times as RFC 3339, truths as such, everything else unchanged."""
    kinds = get_args(type) or (type,)
    if name in nested:
        return show_json
    if float in kinds and name.rpartition("_")[2] in TIMES:
        return show_time
    return show_truth if bool in kinds else show_unchanged


def show_json(text: str | None) -> Raw | str | None:
    """Show stored JSON as JSON, and anything else as the text that it is."""
    try:
        return require_json(text) if text else text
    except (msgspec.DecodeError, RecursionError):
        return text


def show_time(moment: float | None) -> Any:
    """Show a stored time; one that no calendar has stays a number."""
    try:
        return None if moment is None else to_utc(moment)
    except (OverflowError, ValueError, OSError):
        return moment


def show_truth(value: Any) -> bool | None:
    """Show a truth value; some databases store it as a number."""
    return None if value is None else bool(value)


def show_unchanged(value: Any) -> Any:
    """Show a value as it is."""
    return value
