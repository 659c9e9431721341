"""Marks of receipts that a worker has stated in the ledger under an id that cannot stand among ours."""

from __future__ import annotations

from typing import Any

from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.stored import LedgerMark, export_key

ADOPTED, STATED = "adopted ", "stated "     # our id of a receipt by the author's, and the author's by ours


async def adopted(backend: Any, tenant_id: str) -> dict[str, str]:
    """Return our ids of such receipts, by the authors'."""
    found, after = dict[str, str](), ""
    while page := await backend.page(tenant_id, Rows(LedgerMark, after)):
        found.update({one.name.removeprefix(ADOPTED): one.receipt_id for one in page if one.name.startswith(ADOPTED)})
        after = export_key(page[-1])
    return found
