"""Server-sent events: read them from the bytes of a response."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

LONGEST_EVENT = 2**26       # bytes; a receipt is far smaller, and a server that never ends one is not a gate


class StreamEvent(NamedTuple):
    """One event: its type, its data, and the id to come back with."""

    type: str
    data: str
    id: str


def read_events(chunks: Iterable[bytes]) -> Iterator[StreamEvent]:
    """Yield the events in a stream of bytes; comments are left out, and so is an event that was cut off."""
    rest = b""
    for chunk in chunks:
        *blocks, rest = (rest + chunk).split(b"\n\n")
        yield from (event for block in blocks if (event := parse_event(block)) is not None)
        if len(rest) > LONGEST_EVENT:
            raise ValueError(f"an event is larger than {LONGEST_EVENT} bytes")


def parse_event(block: bytes) -> StreamEvent | None:
    """Read the lines of one event; None if it has no data.

    Only a line feed ends a line: other line ends of Unicode may stand within JSON.
    """
    fields: dict[str, str] = {}
    for line in block.decode("utf-8", "replace").split("\n"):
        name, _, value = line.partition(":")
        fields[name] = value.removeprefix(" ")
    return StreamEvent(fields.get("event", "message"), fields["data"],
                       fields.get("id", "")) if "data" in fields else None
