"""Sealing: upkeep covers the receipts of each tenant with a chain of seals.

Sealing never delays a write.  A receipt is protected once its seal is committed, by default a minute after the receipt.
A manipulation of the database before that is not detected.  A seal covers only ids up to which no open transaction can
still add a receipt, so no receipt can appear below a seal.  An import may write older receipts; it changes the head of
the chain, so the sealer reads again.  In a ledger, receipts that others stored are sealed in the same chain, in the
order of arrival.
"""

from __future__ import annotations

import asyncio
import logging

from asyncgate import Caller, Engine, Extension, Needs, Work
from asyncgate.parts.model import errors, queries, stored, wire
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.receipts import seals

log = logging.getLogger("asyncgate.ledger")
RECEIPTS_PER_SEAL = 1000      # receipts of one seal, at most


def load_head(needs: Needs, caller: Caller, ask: wire.Ask) -> None:
    """Load and lock the head of the chain of seals."""
    needs.records.add((stored.SealHead, ()))


def ledger_profile(settings: Settings) -> str:
    """Return the profile of the ledger in the settings."""
    if settings.receipt_mode == "standalone":
        return "standalone"
    return "receiptgate" if settings.receipt_mode == "receiptgate_integrated" else settings.ledger.profile.lower()


def keeps_bodies(settings: Settings) -> bool:
    """Whether the gate keeps receipts with bodies; it does beside a ReceiptGate, which cannot give them back."""
    return ledger_profile(settings) != "memorygate"


def require_bodies(engine: Engine) -> None:
    """Refuse to seal or archive at a gate that keeps only skeletons of receipts; raises InvalidRequest."""
    if not keeps_bodies(engine.settings):
        raise errors.InvalidRequest(
            f"receipt_mode is {engine.settings.receipt_mode}: the ledger keeps the receipts, so it "
            "seals and archives them")


async def seal(engine: Engine, tenant_id: str) -> stored.SealHead:
    """Seal all receipts of a tenant that can be sealed; return the new head of the chain.

    A receipt without its body is never sealed: `asyncgate receipts home` could not restore the body any more.
    """
    while True:
        head = await engine.backend.record(tenant_id, stored.SealHead) or seals.START
        digests = await next_digests(engine, tenant_id, head.last_id)
        if not digests:
            return head

        def write(work: Work, head: stored.SealHead = head, digests: dict[str, bytes] = digests) -> None:
            # else another process was faster, or an import came in
            if (work.find_record(stored.SealHead) or seals.START) == head:
                made = seals.make_seal(head, list(digests.values()), max(digests), round(work.now, 3))
                work.keep_record(made)
                work.keep_record(seals.seal_head(made, head.imports))

        await engine.change(tenant_id, write, (stored.SealHead, ()))


async def next_digests(engine: Engine, tenant_id: str, after: str) -> dict[str, bytes]:
    """Return the digests of the next receipts to seal, oldest first; in a ledger, of the receipts stored there."""
    receipts = await engine.backend.page(tenant_id, queries.ReceiptFilter(None, None, None, after, RECEIPTS_PER_SEAL))
    entries = await engine.backend.page(tenant_id,
                                        queries.EntryFilter(None, None, None, None, after, RECEIPTS_PER_SEAL))
    elsewhere = next((row.receipt_id for row in receipts if not row.body), None)
    if elsewhere is not None:
        receipts = [row for row in receipts if row.receipt_id < elsewhere]
        entries = [row for row in entries if row.arrival < elsewhere]
        if not receipts and not entries:
            log.error("receipts of tenant %s are not sealed: the body of receipt %s is in a ledger; restore it with "
                      "`asyncgate receipts home`", tenant_id, elsewhere)
    digests = await asyncio.to_thread(lambda: {**{row.receipt_id: seals.receipt_digest(row) for row in receipts},
                                               **{row.arrival: seals.entry_digest(row) for row in entries}})
    return {id: digests[id] for id in sorted(digests)[:RECEIPTS_PER_SEAL]}


class Sealer(Extension):
    """Seals the receipts of tenants for which this process has written new ones."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.newest: dict[str, str] = {}        # by tenant, its newest unsealed receipt
        self.begun = False
        engine.extend(self)

    def after_commit(self, work: Work) -> None:
        """Note the newest receipt of a committed batch."""
        arrived = [row.arrival for row in work.kept.values() if isinstance(row, stored.Entry)]
        if work.written or arrived:
            self.newest[work.tenant_id] = max(*work.written, *arrived, self.newest.get(work.tenant_id, ""))

    async def run(self) -> int:
        """Seal new receipts, the first time of every tenant; return how many seals were made."""
        if not self.begun:
            self.begun = True
            self.newest |= {tenant_id: self.newest.get(tenant_id, "")
                            for tenant_id in await self.engine.backend.tenants()}
        return sum([await self._seal(tenant_id) for tenant_id in list(self.newest)])

    async def _seal(self, tenant_id: str) -> int:
        before = await self.engine.backend.record(tenant_id, stored.SealHead) or seals.START
        try:
            head = await seal(self.engine, tenant_id)
        except errors.GateError:
            log.exception("the receipts of tenant %s could not be sealed; the next run tries again", tenant_id)
            return 0
        if head.last_id >= self.newest[tenant_id]:      # else an open transaction keeps some receipts from being sealed
            del self.newest[tenant_id]
        if head.number > before.number:     # this line, kept elsewhere, proves later that no receipt was rewritten
            log.info("sealed tenant=%s seal=%d:%s", tenant_id, head.number, head.hash)
        return head.number - before.number
