"""Receipts that another gate has erased, and that come here without their content: an import, a rebuild.

What such a receipt was cannot be seen any more, only that it was: its id, type, time, task, parents, and the digest
that seals have of it.  Here it stays erased, on the list of an erasure of this gate, which has ended and names the one
of the other gate.  So it is verified as every other erased receipt is, and nothing can fill it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from asyncgate.parts.model import erased, stored
from asyncgate.parts.model.content import encode_json

if TYPE_CHECKING:
    from asyncgate import Work


def list_as_erased(work: Work, receipts: Iterable[stored.Receipt]) -> list[stored.Receipt]:
    """List those receipts that have no content under erasures of this gate; return all as they are to be stored."""
    ids, listed, kept = defaultdict[str, str](work.new_id), defaultdict[str, list[stored.Erased]](
        list), list[stored.Receipt]()
    for receipt in receipts:
        if (note := erased.read_note(receipt.body)) is None:
            kept.append(receipt)
            continue
        id = ids[note.erasure_id]
        kept.append(replace(receipt, body=erased.write_note(id, note.sealed), salt=""))
        listed[note.erasure_id].append(
            stored.Erased("receipts", receipt.receipt_id, id, note.sealed, erased.digest_of_kept(receipt)))
    for source, rows in listed.items():
        end_erasure(work, ids[source], source, sorted(rows, key=lambda row: row.row_id))
    return kept


def end_erasure(work: Work, erasure_id: str, source: str, rows: list[stored.Erased]) -> None:
    """Store an erasure of another gate as one of this gate that has ended, with the rows that it lists here."""
    for row in rows:
        work.keep_record(row)
    counts = encode_json({"receipts": {"changed": len(rows)}}).decode()
    work.keep_record(stored.Erasure(
        erasure_id, work.tenant_id, "asyncgate", f"{erased.PSEUDONYM}{source}", "[]", "", "ended", "[]", counts,
        work.now,
        work.now, erased.digest_of_list(rows)))
