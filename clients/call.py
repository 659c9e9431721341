"""How an operation is called; the generated table of them is in `operations.py`."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Call(NamedTuple):
    """An operation over REST: its verb and path, and how a client completes and repeats it."""

    name: str
    verb: str
    path: str
    repeatable: bool                            # a second call does no harm
    caller: Literal["principal", "worker", ""]  # who may be named in the request
    keys: tuple[str, ...]                       # members that tell the gate a repetition from a new call
