"""How a client calls one operation; `operations.py` holds the generated table of all of them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct


class CallSpec(NamedTuple):
    """One operation over REST: verb, path, what a client may fill in and repeat, and the type of its reply."""

    name: str
    verb: str
    path: str
    repeatable: bool                            # a second call is a no-op
    caller: Literal["principal", "worker", ""]  # whom the request may name as its caller
    keys: tuple[str, ...]                       # fields by which the gate deduplicates
    reply: type[Struct]
