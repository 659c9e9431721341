"""What goes over the wire to look after the ledger: seals, export and import, the archive (spec H.11, 20.9)."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from asyncgate.parts.wire import Ask, Page


class SealReceipts(Ask, kw_only=True):
    """Seal what is new now."""


class ListSeals(Page, kw_only=True):
    """Read the seals."""


class SealEnd(Struct):
    """Where a tenant's seals end."""

    number: int
    last_receipt_id: str | None
    hash: str


class SealRecord(Struct, omit_defaults=True):
    """What some receipts were when it was made, chained to the seal before by its hash."""

    number: int
    last_receipt_id: str
    count: int
    digest: str
    marks: str
    sealed_at: datetime
    hash: str
    late: list[str] | None = None


class Seals(Struct):
    """A page of seals, oldest first."""

    seals: list[SealRecord]
    next_cursor: str | None = None
    cursor: str | None = None
