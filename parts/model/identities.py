"""The members with which a request names a principal.  All of them must name the same one.

Whichever of two names counted, the other would be ignored, and somebody would act or ask as another than they wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from msgspec import Struct

from asyncgate.parts.model import errors, wire

KIND_MEMBERS, ID_MEMBERS = ("principal_kind", "worker_kind", "kind"), ("principal_id", "agent_id", "worker_id", "id")
INSTANCE_MEMBERS = ("principal_instance_id", "agent_instance_id", "worker_instance_id", "instance_id")
CREATORS = ("created_by", "tasker_principal")
# In a request itself; CREATORS hold all of them.
IDENTITY_MEMBERS = frozenset((*KIND_MEMBERS[:2], *ID_MEMBERS[:3], *INSTANCE_MEMBERS[:3]))
IMPLIED = {"agent_id": "agent", "worker_id": "worker"}          # kinds

# Fields with ids that a gate has made; it makes them in lower case.
OURS = frozenset({"task_id", "parent_task_id", "lease_id", "receipt_id", "parent_receipt_id", "since_receipt_id",
                  "tenant_id", "tenant", "after", "webhook_id", "bulk_id", "user_id", "client_id", "session_id",
                  "erasure_id"})
_is_uuid = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}").fullmatch


@cache
def list_own_fields(kind: type[Struct]) -> tuple[str, ...]:
    """Return the fields of a request with ids that a gate has made."""
    return tuple(name for name in kind.__struct_fields__ if name in OURS)


def lower_ids(ask: Struct) -> None:
    """Write the ids that a gate has made as it wrote them: some databases and languages show UUIDs in upper case."""
    for name in list_own_fields(type(ask)):
        if isinstance(value := getattr(ask, name), str) and (lowered := lower_id(value)) != value:
            setattr(ask, name, lowered)


def lower_id(id: str) -> str:
    """Return a UUID in lower case, and any other text as it is."""
    return id if id.islower() or not _is_uuid(id) else id.lower()


@cache
def list_identity_fields(kind: type[Struct]) -> tuple[str, ...]:
    """Return the fields with which a request of a type may name a principal."""
    return tuple(name for name in kind.__struct_fields__ if name in IDENTITY_MEMBERS or name in CREATORS)


def check_identities(ask: Struct) -> None:
    """Refuse a request that names two principals, or two sessions of one."""
    named = list_identities(ask)
    if len(named) > 1 or any(name in CREATORS for name, _ in named):
        check_names(named)


def list_identities(ask: Struct) -> list[tuple[str, Any]]:
    """Return the members of a request that name a principal, with their values."""
    return [(name, value) for name in list_identity_fields(type(ask)) if (value := getattr(ask, name)) is not None]


def check_needed(ask: wire.Ask) -> None:
    """Refuse a request that lacks a required member."""
    for name in ask.needed:
        if not getattr(ask, name):
            raise errors.InvalidRequest(f"{name} is missing")


def check_names(named: Iterable[tuple[str, Any]]) -> None:
    """Refuse members that name two principals, or two sessions of one."""
    given = dict(spread_creators(named))
    for part in (KIND_MEMBERS, ID_MEMBERS, INSTANCE_MEMBERS):
        told = {path: value for path, value in given.items() if path.rpartition(".")[2] in part}
        if part is KIND_MEMBERS:
            told |= {path: IMPLIED[name] for path in given if (name := path.rpartition(".")[2]) in IMPLIED
                     and not (name == "worker_id" and path[:-2] + "kind" in given)}
        if len(set(told.values())) > 1:
            conflict = " and ".join(f"{path} says {value}" for path, value in told.items())
            raise errors.InvalidRequest(
                f"{conflict}: a request names one principal, and one session of it; leave the others out")


def spread_creators(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the members with texts, those of a creator with their paths."""
    for name, value in named:
        if isinstance(value, Struct):
            value = {inner: getattr(value, inner) for inner in value.__struct_fields__}
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", text) for inner, text in value.items()
                        if isinstance(text, str) and (inner in IDENTITY_MEMBERS or name in CREATORS))
        elif isinstance(value, str) and name in IDENTITY_MEMBERS:
            yield name, value
