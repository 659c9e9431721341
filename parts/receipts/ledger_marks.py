"""Marks that join the two ids of an adopted receipt, its author's id in the ledger and this gate's id; others too."""

from __future__ import annotations

from typing import Any

from asyncgate.parts.model import queries, stored
from asyncgate.parts.model.walking import walk_rows

ADOPTED_PREFIX = "adopted "     # the gate's id of a receipt, by its author's id
STATED_PREFIX = "stated "       # the author's id of a receipt, by the gate's id
UNDONE_PREFIX = "undone "       # what undid a receipt in the ledger that never counted here, by that receipt's id
OVERTAKEN = "receipt_overtaken"  # the kind of the anomaly that names a receipt in the ledger which did not count
WITHDRAWN = "never_committed"   # the reason of a receipt that undoes another one, whose change was never committed


async def list_adopted(backend: Any, tenant_id: str) -> dict[str, str]:
    """Return the gate's ids of adopted receipts, by their authors' ids."""
    return {mark.name.removeprefix(ADOPTED_PREFIX): mark.receipt_id
            async for mark in walk_rows(backend, tenant_id, queries.Rows(stored.LedgerMark))
            if mark.name.startswith(ADOPTED_PREFIX)}
