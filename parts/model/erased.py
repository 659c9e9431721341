"""What stands in place of erased content: a note that names the erasure and the digest that others have of the row.

A seal covers the digests of receipts, and each line of the audit log the hash of the line before it.  So both can still
be verified when the content is gone: the note of a receipt has its digest, and an erased line keeps its hash.  A table
of its own lists what was erased, and the proof of each erasure covers that list.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import singledispatch

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from asyncgate.parts.model import stored

PSEUDONYM = "erased-"       # every pseudonym begins so
SALT = "salt"               # member of an audit line: random, gone when anything else goes from that line
NOTE = re.compile(r'\{"erased":"([0-9a-f-]{36})","sealed":"([0-9a-f]{64})"\}\Z')
LINE_NOTE = re.compile(r'"erased":"([0-9a-f-]{36})"')

_encode = msgspec.json.Encoder().encode


class Note(Struct, frozen=True):
    """What is left of erased content."""

    erasure_id: str
    sealed: str     # the digest that the row had


def write_note(erasure_id: str, sealed: str) -> str:
    """Return what stands in place of a receipt's body."""
    return f'{{"erased":"{erasure_id}","sealed":"{sealed}"}}'


def read_note(content: str) -> Note | None:
    """Return the note that stands in place of a receipt's body; None for a body."""
    match = NOTE.match(content) if content.startswith('{"erased":"') else None
    return None if match is None else Note(match[1], match[2])


def is_erased_line(line: stored.Audit) -> bool:
    """Whether an erasure has changed a line of the audit log."""
    return '"erased":"' in line.body and LINE_NOTE.search(line.body) is not None


def place_of_row(row: stored.Receipt | stored.Audit | stored.Entry) -> tuple[str, str]:
    """Return by which source and id the list of erased rows names a row."""
    if isinstance(row, stored.Receipt):
        return "receipts", row.receipt_id
    return ("audit", row.audit_id) if isinstance(row, stored.Audit) else ("ledger", row.arrival)


@singledispatch
def digest_of_kept(row: Struct) -> str:
    """Hash what no erasure changes of a row."""
    raise TypeError(f"no erasure is noted of {type(row).__name__}")


@digest_of_kept.register
def _(row: stored.Receipt) -> str:
    return hash_fields(row.receipt_id, row.receipt_type, row.created_at, row.from_kind, row.to_kind, row.task_id,
                       row.lease_id, row.asyncgate_instance, row.parents)


@digest_of_kept.register
def _(row: stored.Audit) -> str:
    return hash_fields(row.audit_id, row.number, row.at, row.event, row.severity, row.hash)


@digest_of_kept.register
def _(row: stored.Entry) -> str:
    return hash_fields(row.arrival, row.receipt_type, row.task_id, row.from_kind, row.to_kind, row.asyncgate_instance,
                       row.stated_kind, row.stated_role)


def hash_fields(*fields: object) -> str:
    """Hash some values as a JSON array."""
    return hashlib.sha256(_encode(fields)).hexdigest()


def digest_of_list(rows: Iterable[stored.Erased]) -> str:
    """Hash the rows that one erasure has changed, in the order of their keys."""
    total = hashlib.sha256()
    for row in rows:
        total.update(_encode(astuple(row)) + b"\n")
    return total.hexdigest()
