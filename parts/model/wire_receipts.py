"""What goes over the wire to maintain receipts: seals, export and import, the archive (spec H.11, 20.9)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from asyncgate.parts.model import errors, examples, wire, wire_admin

MOST_IMPORTED = 250      # receipts of one import; each is locked while the gate decides
SealNumber = Annotated[int, Meta(ge=0, le=10**12)]
UnixSeconds = Annotated[float, Meta(ge=0, lt=253_402_214_400), wire.says("Unix seconds, as stored")]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$(?!\\n)")]


class SealReceipts(wire.Ask, kw_only=True):
    """Seal new receipts now."""

    example = ({}, {"tenant_id": examples.TENANT_ID, "number": 12, "last_receipt_id": examples.DONE,
                    "hash": "9b1f04ce" * 8})


class ListSeals(wire.PageAsk, kw_only=True):
    """Read the seals."""

    example = ({"limit": 20}, {"seals": [{
        "number": 12, "last_receipt_id": examples.DONE, "count": 2, "digest": "c0ffee11" * 8, "marks": "3q2+78r+uq8=",
        "sealed_at": examples.NOW, "hash": "9b1f04ce" * 8}]})
    after: Annotated[SealNumber, wire.says("the page begins after the seal with this number")] = 0
    last: Annotated[wire.Whole | None, wire.says("begin with the last so many seals")] = None


class ExportReceipts(wire.Ask, kw_only=True):
    """Read receipts as they are stored."""

    example = ({"limit": 1000}, {"receipts": [examples.STORED_RECEIPT]})
    refusals = (errors.InvalidCursor, errors.ArchiveUnavailable)
    after: Annotated[wire.Name | None, wire.says("the last receipt_id of the previous page")] = None
    limit: Annotated[wire.Whole | None, wire.says("receipts a page, 1000 at most")] = None


class StoredReceipt(Struct, omit_defaults=True):
    """A receipt as it is stored, byte for byte."""

    receipt_id: wire_admin.Uuid
    receipt_key: wire.Name
    receipt_type: wire.Name
    created_at: UnixSeconds
    from_kind: wire.Kind
    from_id: wire.Name
    to_kind: wire.Kind
    to_id: wire.Name
    task_id: Annotated[str, Meta(max_length=200), wire.says("empty when it belongs to no task")]
    lease_id: wire.Name | None
    schedule_id: wire.Name | None
    asyncgate_instance: wire.Name
    hash: Digest
    body: Annotated[str, wire.says("JSON, as text")]
    parents: Annotated[list[wire.Name], Meta(max_length=1000)]
    salt: Annotated[str, Meta(max_length=64), wire.says("random; seals cover it")] = ""
    delivered_at: UnixSeconds | None = None


class ImportReceipts(wire.Ask, kw_only=True):
    """Write receipts of another gate unchanged."""

    example = ({"receipts": [examples.STORED_RECEIPT]}, {"imported": 0, "present": 0, "refused": [{
        "receipt_id": examples.DUTY, "reason": "differs", "message": "another receipt has this id here"}]})
    paged = True
    items = "receipts"
    receipts: Annotated[list[StoredReceipt], Meta(max_length=MOST_IMPORTED),
                        wire.says("as export_receipts gives them, in its order")]


class RunArchive(wire.Ask, kw_only=True):
    """Archive receipts that are old enough."""

    example = ({"most": 5000}, {"receipts": 4711, "segments": 3, "tasks_pruned": 815, "more": False})
    refusals = (errors.ArchiveUnavailable,)
    most: Annotated[wire.Whole,
                    wire.says("approximate number of receipts to move; the reply says whether there are more")] = 5000
    vacuum: Annotated[bool, wire.says("on SQLite: then return free pages to the system; writes wait meanwhile")] = False


class ListArchivedReceipts(wire.PageAsk, kw_only=True):
    """Read receipts in the archive."""

    example = ({"task_id": examples.TASK_ID}, {"receipts": [examples.ASSIGNED], "next_cursor": None, "cursor": None})
    refusals = (errors.ArchiveUnavailable,)
    lists = "all"
    task_id: Annotated[wire.Name | None, wire.says("only receipts of this task")] = None
    receipt_id: Annotated[wire.Name | None, wire.says("only this receipt")] = None


class RestoreArchive(wire.Ask, kw_only=True):
    """Bring the receipts of a task back from the archive."""

    needed: ClassVar[tuple[str, ...]] = ("task_id",)
    example = ({"task_id": examples.TASK_ID}, {"task_ids": [examples.TASK_ID], "receipts": 4})
    refusals = (errors.ReceiptNotFound, errors.ArchiveUnavailable)
    task_id: Annotated[wire.Name, wire.says("the task whose receipts come back")] = ""


class ArchiveRun(Struct):
    """What was archived."""

    receipts: int
    segments: int
    tasks_pruned: int
    more: bool


class Restored(Struct):
    """What was restored."""

    task_ids: list[str]
    receipts: int


class Exported(Struct):
    """A page of receipts as they are stored, oldest first; an empty one is the last."""

    receipts: list[StoredReceipt]


class NotImported(Struct):
    """A receipt that was not written, and why."""

    receipt_id: str | None      # null: it has none that can be read
    # invalid, differs, wrong_hash, parent_missing, stated_already, discharged_already, too_young, too_large,
    # contradicts_task, contradicts_receipt
    reason: str
    message: str


class Imported(Struct):
    """The outcome of an import."""

    imported: int
    present: int        # already there, byte for byte
    refused: list[NotImported]

    def __add__(self, more: Imported) -> Imported:
        return Imported(self.imported + more.imported, self.present + more.present, self.refused + more.refused)


class SealEnd(Struct):
    """Where a tenant's seals end."""

    tenant_id: str
    number: int
    last_receipt_id: str | None
    hash: str


class SealRecord(Struct, omit_defaults=True):
    """A hash over some receipts, chained to the previous seal."""

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

    columns = "number last_receipt_id count sealed_at hash"
    seals: list[SealRecord]
    next_cursor: str | None = None
    cursor: str | None = None
