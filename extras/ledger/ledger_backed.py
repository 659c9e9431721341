"""Read an integrated gate's database with the receipts' bodies restored: the source of `asyncgate receipts home`.

Stored receipts never change, so skeletons (receipts without bodies) cannot be filled in place.  The command copies
into a fresh database instead.  `LedgerBackedGate` wraps the gate's backend and adds to each skeleton its body from the
outbox or the ledger.  It adds a body only if the receipt then matches its stored hash.  Receipts that others stated in
the ledger are not copied; they stay in the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncgate.extras.ledger.collected import Collected, CountCopied
from asyncgate.extras.ledger.reconcile import Findings, compare_all
from asyncgate.parts.model import errors, queries, stored
from asyncgate.parts.model.content import decode_json, to_canonical
from asyncgate.parts.model.database import Around
from asyncgate.parts.receipts.incoming import computed_hash
from asyncgate.parts.receipts.ledger_marks import list_adopted

# Differences that stop the copy: `asyncgate reconcile --repair` repairs the first ones; nothing repairs the others.
REPAIRED = ("ended_at_ledger", "lease_ended_at_ledger", "lease_unbacked", "not_committed")
FINAL = ("lost_by_ledger", "tampered")


class Unsettled(errors.Conflicting):
    """The gate and the ledger differ; the differences must be settled before the copy."""


class MissingBody(errors.Conflicting):
    """Neither the outbox nor the ledger has the body of a skeleton."""


class CopyCounts(Struct):
    """How many receipts the last pass through all receipts filled, left bare, or found whole."""

    filled: int = 0
    bare: int = 0           # the ledger lost or changed them; only their hashes are left
    own: int = 0            # never were skeletons


class LedgerBackedGate(Around):
    """A backend that passes reads on to another backend, and adds the missing bodies to receipts."""

    def __init__(self, backend: Any, sink: Any, *, lenient: bool) -> None:
        super().__init__(backend)
        self.sink, self.lenient = sink, lenient
        self.collected: dict[str, Collected] = {}
        self.stated: dict[str, dict[str, str]] = {}     # ids at the ledger of what workers stated under their own
        self.brought: dict[str, CopyCounts] = {}

    async def collect(self, instances: Iterable[str], count: CountCopied) -> Findings:
        """Read the whole ledger and compare it with the gate; raises Unreadable."""
        for tenant_id in await self.backend.tenants():
            adopted = await list_adopted(self.backend, tenant_id)
            self.stated[tenant_id] = {ours: theirs for theirs, ours in adopted.items()}
        return await compare_all(self.backend, self.sink, instances, count, kept=self.collected)

    def close(self) -> None:
        """Delete the temporary copy of the ledger."""
        for copy in self.collected.values():
            copy.close()

    async def page(self, tenant_id: str, query: queries.Query[Any]) -> list[Any]:
        """Return a page of rows; exported receipts have their bodies."""
        rows: list[Any] = await self.backend.page(tenant_id, query)
        if isinstance(query, queries.Rows) and query.table is stored.Receipt:
            return await self._whole(tenant_id, rows, query.after)
        return rows

    async def _whole(self, tenant_id: str, receipts: list[stored.Receipt], after: str) -> list[stored.Receipt]:
        bare = [receipt.receipt_id for receipt in receipts if not receipt.body]
        there = {self.stated.get(tenant_id, {}).get(id, id): id for id in bare}
        copies = self.collected[tenant_id].get(there) if bare and tenant_id in self.collected else {}
        theirs = {there[id]: receipt for id, receipt in copies.items()}
        waiting = {row.receipt_id: self.sink.body(row.content.encode())
                   for row in await self.backend.page(tenant_id, queries.OutboxOf(tuple(bare)))} if bare else {}
        if not after:
            self.brought[tenant_id] = CopyCounts()
        brought, whole = self.brought[tenant_id], list[stored.Receipt]()
        for receipt in receipts:
            row = receipt
            if not receipt.body:
                row = self._filled(receipt, waiting.get(receipt.receipt_id), theirs.get(receipt.receipt_id))
            brought.own += bool(receipt.body)
            brought.filled += bool(row.body) and not receipt.body
            brought.bare += not row.body
            whole.append(row)
        return whole

    def _filled(self, receipt: stored.Receipt, waiting: bytes | None, theirs: stored.Receipt | None) -> stored.Receipt:
        for body in (*([waiting.decode()] if waiting else ()), *([theirs.body] if theirs else ())):
            if (row := with_body(receipt, body, theirs)) is not None:
                return row
        if not self.lenient:
            raise MissingBody(f"neither the outbox nor the ledger has the body of receipt {receipt.receipt_id}")
        return receipt


def with_body(receipt: stored.Receipt, body: str, theirs: stored.Receipt | None) -> stored.Receipt | None:
    """Return a receipt with the given body, or None if its hash does not match.

    A worker that stated a receipt in the ledger may have chosen its hash itself, and the skeleton keeps that hash.  If
    the ledger's receipt has the same hash, the body is accepted and the hash is computed again as a gate does.
    """
    texts = [body]
    with suppress(msgspec.MsgspecError, UnicodeError):
        texts.append(to_canonical(decode_json(body)).decode())
    for text in texts:
        if computed_hash(row := replace(receipt, body=text)) == receipt.hash:
            return row
    stated = theirs is not None and not theirs.receipt_key and theirs.hash == receipt.hash
    return replace(first := replace(receipt, body=body), hash=computed_hash(first)) if stated else None


def require_settled(findings: Findings, lenient: bool) -> None:
    """Refuse to copy while unrepaired differences are left, because the copy makes them final; raises Unsettled."""
    kinds = Counter({kind: findings.counts[kind] for kind in (*REPAIRED, *FINAL)})
    if any(kinds[kind] for kind in REPAIRED):
        raise Unsettled(f"the ledger has receipts that this gate lacks: {describe_numbers(kinds, REPAIRED)}.  Run "
                        "`asyncgate reconcile --repair` first")
    if any(kinds[kind] for kind in FINAL) and not lenient:
        raise Unsettled(f"the ledger lost or changed some receipts: {describe_numbers(kinds, FINAL)}.  `asyncgate "
                        "reconcile` names them; --leave-lost copies them without their bodies")


def describe_numbers(kinds: Counter[str], names: Iterable[str]) -> str:
    """Return the count of each kind of difference as text."""
    return ", ".join(f"{kinds[name]} {name}" for name in names if kinds[name])
