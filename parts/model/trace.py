"""The trace that a request belongs to, as text: W3C trace context, checked and bounded.

A header that is not a valid `traceparent` counts as none: the standard says so, and no request fails because of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

LONGEST_STATE = 512         # characters; the standard asks to pass on at least so many
MOST_STATES = 32
# A later version may add parts; what it has in common with version 00 is passed on as version 00.
PARENT = re.compile(r"(?!ff)(?P<version>[0-9a-f]{2})-(?P<ids>(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})"
                    r"(?P<more>-[!-~]{0,200})?")
STATE = re.compile(r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
                   r"=[ !-+\--<>-~]{0,255}[!-+\--<>-~]")


class Trace(Struct, frozen=True):
    """The trace that something belongs to, and another one to link to."""

    traceparent: str | None = None
    tracestate: str | None = None
    trace_link: str | None = None

    @property
    def members(self) -> dict[str, str]:
        """Return what is known."""
        known = (("traceparent", self.traceparent), ("tracestate", self.tracestate), ("trace_link", self.trace_link))
        return {name: value for name, value in known if value is not None}


def read_trace(parents: list[str], states: Iterable[str]) -> Trace | None:
    """Return the trace that a request names; none if it names no valid one, or more than one."""
    parent = read_parent(parents[0]) if len(parents) == 1 else None
    return None if parent is None else Trace(parent, read_state(",".join(states)))


def read_parent(header: str) -> str | None:
    """Return a valid `traceparent`, or None."""
    match = PARENT.fullmatch(header.strip(" \t"))
    if match is None or (match["version"] == "00" and match["more"] is not None):
        return None
    return f"00-{match['ids']}"


def read_state(header: str) -> str | None:
    """Return a valid `tracestate`, or None: a trace is good without it."""
    parts = header.split(",") if len(header) <= LONGEST_STATE else []
    entries = [entry for part in parts if (entry := part.strip(" \t"))]
    keys = {entry.partition("=")[0] for entry in entries}
    if not 0 < len(entries) == len(keys) <= MOST_STATES or not all(map(STATE.fullmatch, entries)):
        return None
    return ",".join(entries)


def find_trace(headers: Iterable[tuple[bytes, bytes]]) -> Trace | None:
    """Return the trace that the headers of a request name."""
    parents = [value.decode("latin-1") for name, value in headers if name == b"traceparent"]
    if not parents:
        return None
    return read_trace(parents, [value.decode("latin-1") for name, value in headers if name == b"tracestate"])
