"""Seals, export and import of receipts over the wire, for the tenant's admins."""

from __future__ import annotations

import msgspec

from asyncgate import Caller, Engine, Operation
from asyncgate.parts.identity.admin import read_page
from asyncgate.parts.model import queries, stored, wire_receipts
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.receipts.carry import export_receipts, import_receipts, load_import
from asyncgate.parts.receipts.sealing import require_bodies, seal

decode_names = msgspec.json.Decoder(list[str]).decode


async def seal_receipts(engine: Engine, caller: Caller, ask: wire_receipts.SealReceipts) -> wire_receipts.SealEnd:
    """Seal all unsealed receipts, and return the last seal's number and hash; upkeep does it every minute.

    Keep the number and the hash elsewhere: `asyncgate verify --ledger --seal NUMBER:HASH` proves later that no receipt
    up to last_receipt_id was rewritten.
    """
    require_bodies(engine)
    head = await seal(engine, caller.tenant_id)
    return wire_receipts.SealEnd(caller.tenant_id, head.number, head.last_id or None, head.hash)


async def list_seals(engine: Engine, caller: Caller, ask: wire_receipts.ListSeals) -> wire_receipts.Seals:
    """List the seals over the tenant's receipts, oldest first."""
    begin = ask.after
    if ask.last is not None:
        head = await engine.backend.record(caller.tenant_id, stored.SealHead)
        begin = max(begin, head.number - ask.last) if head else begin
    rows, *ends = await read_page(
        engine, caller, ask, ("seals", ask.after, ask.last), caller.tenant_id,
        queries.Rows(stored.Seal, f"{begin:012d}"))
    return wire_receipts.Seals([wire_receipts.SealRecord(row.number, row.last_id, row.count, row.digest, row.marks,
                                                         to_utc(row.sealed_at),
                                                         row.hash, decode_names(row.late) if row.late else None)
                                for row in rows], *ends)


SEALING = [
    Operation(seal_receipts, "POST /v1/seals", "A", "admin:write", "W"),
    Operation(list_seals, "GET /v1/seals", "A", "admin:read", "R"),
]
OPERATIONS = [
    *SEALING,
    Operation(export_receipts, "GET /v1/export/receipts", "A", "admin:read", "R"),
    Operation(import_receipts, "POST /v1/import/receipts", "A", "admin:write", "W", load_import),
]
