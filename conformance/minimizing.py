"""The smallest part of a history that shows a violation: delta debugging (Zeller, ddmin) over its calls and rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from asyncgate.conformance.history import Call
from asyncgate.conformance.recording import Recorded

T = TypeVar("T")
Part = Call | tuple[str, Struct]        # a row has its kind
WORD = re.compile(r"[\w-]+")


def find_smallest(parts: list[T], shows: Callable[[list[T]], bool]) -> list[T]:
    """Return a part of the parts that still shows it, of which none can be left out alone."""
    pieces = 2
    while len(parts) > 1:
        size = -(-len(parts) // pieces)
        for begin in range(0, len(parts), size):
            rest = parts[:begin] + parts[begin + size:]
            if shows(rest):
                parts, pieces = rest, max(pieces - 1, 2)
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, len(parts))
    return parts


def minimize(record: Recorded, violation: str) -> Recorded:
    """Return the smallest part of a round of which the same check says the same of the same ids."""
    parts: list[Part] = [*record.calls, *((kind, row) for kind, rows in record.rows.items() for row in rows)]
    check, words = violation.partition(":")[0], set(WORD.findall(violation))
    ids = words & set().union(*map(names_of, parts))

    def shows(parts: list[Part]) -> bool:
        try:
            told = rebuild(record, parts).judge(frozenset({check}))
        except Exception:       # the checker may miss what was left out
            return False
        return any(ids <= set(WORD.findall(text)) for text in told)

    close = [part for part in parts if ids & names_of(part)]
    near = set().union(*map(names_of, close)) if ids else set[str]()
    around = [part for part in parts if near & names_of(part)]
    start = next((chosen for chosen in (close, around) if shows(chosen)), parts)
    return rebuild(record, find_smallest(start, shows))


def names_of(part: Part) -> set[str]:
    """Return the ids that a call or a row names."""
    return set(list_ids([part.ask, part.reply] if isinstance(part, Call) else to_builtins(part[1])))


def list_ids(value: Any) -> Iterator[str]:
    """Yield each text whose name says that it is an id."""
    if isinstance(value, dict):
        yield from (text for name, text in value.items() if name.endswith("_id") and isinstance(text, str))
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from list_ids(inner)


def rebuild(record: Recorded, parts: list[Part]) -> Recorded:
    """Return a round that has these parts only."""
    rows: dict[str, list[Struct]] = {}
    for part in parts:
        if not isinstance(part, Call):
            rows.setdefault(part[0], []).append(part[1])
    return replace(record, calls=[part for part in parts if isinstance(part, Call)], rows=rows, others=[])
