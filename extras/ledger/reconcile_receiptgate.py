"""Compare a gate with a ReceiptGate, one task after another through `list_task_receipts`.

ReceiptGate stores receipts in a schema of its own, with the hash of the gate's receipt in `metadata`.  The gate keeps
its receipts whole, so it can send again those that ReceiptGate lacks, and undo there an acceptance whose lease it never
granted.  An end of a task that only ReceiptGate has is reported; the gate does not take it over.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from asyncgate import ANOMALY
from asyncgate.extras.ledger import collected
from asyncgate.extras.ledger.reconcile import Findings, is_erased, list_known_receipts
from asyncgate.extras.ledger.restated import body_of
from asyncgate.extras.ledger.settling import Memo, offer_row
from asyncgate.extras.ledger.sinks import receiptgate_schema
from asyncgate.parts.model import queries, stored
from asyncgate.parts.model.content import to_canonical
from asyncgate.parts.model.walking import walk_rows
from asyncgate.parts.receipts.ledger_marks import OVERTAKEN

if TYPE_CHECKING:
    from asyncgate.backends import Backend

Theirs = dict[str, dict[str, Any]]


class GateComparison:
    """Compares one tenant of the gate with ReceiptGate."""

    def __init__(self, backend: Backend, sink: Any, tenant_id: str, findings: Findings,
                 count: collected.CountCopied) -> None:
        self.backend, self.sink, self.tenant_id = backend, sink, tenant_id
        self.findings, self.count = findings, count
        self.overtaken = set[str]()     # receipts that, as this gate has said, did not count

    async def run(self) -> None:
        """Compare every task of the gate."""
        async for task in walk_rows(self.backend, self.tenant_id, queries.Rows(stored.Task)):
            await self.compare_task(task)
            self.count(1)

    async def compare_task(self, task: stored.Task) -> None:
        """Compare the receipts of one task."""
        rows = await collected.retry_read(lambda: self.sink.of_task(self.tenant_id, task.task_id))
        theirs = {row["receipt_id"]: row for row in rows if isinstance(row.get("receipt_id"), str)}
        ours = await list_known_receipts(self.backend, self.tenant_id, task.task_id)
        self.findings.receipts += len(ours)
        ids = [*theirs, *(row.receipt_id for row in ours)]
        outbox = {row.receipt_id: row for row in await self.backend.page(self.tenant_id, queries.OutboxOf(tuple(ids)))}
        self.overtaken = {body_of(row)["details"]["receipt_id"] for row in ours if row.receipt_type == ANOMALY.type
                          and body_of(row).get("kind") == OVERTAKEN}
        keeps_custody = any("obligation_id" in row for row in rows)
        for receipt in ours:
            sent = receiptgate_schema.is_forwarded(receipt, task) and (
                keeps_custody or not receiptgate_schema.gives_back(receipt, task))
            if sent and not is_erased(receipt):
                self._ours(receipt, outbox.get(receipt.receipt_id), theirs)
        known = {row.receipt_id for row in ours} | outbox.keys()
        for receipt_id, row in theirs.items():
            if receipt_id not in known:
                await self._theirs(task, row, theirs)

    def _found(self, kind: str, detail: str, receipt_id: str, task_id: str) -> None:
        self.findings.add(kind, self.tenant_id, detail, None, task_id, receipt_id)

    def _ours(self, receipt: stored.Receipt, row: stored.Outgoing | None, theirs: Theirs) -> None:
        """Compare a receipt of the gate with the ledger's copy."""
        there, what = theirs.get(receipt.receipt_id), receipt.receipt_type
        if there is not None:
            if metadata_of(there).get("hash") != receipt.hash:
                self.findings.add(
                    "tampered", self.tenant_id, f"the {what} at the ledger differs from the one here", receipt)
        elif row is not None and row.state == "waiting":
            self.findings.waiting += 1
        elif row is not None:
            self.findings.add("parked", self.tenant_id, f"the ledger refuses the {what}: {row.reason}", receipt)
        elif not self._stated_by_its_worker(receipt, theirs):
            self.findings.add("missing_at_ledger", self.tenant_id, f"the ledger does not have the {what}", receipt)

    def _stated_by_its_worker(self, receipt: stored.Receipt, theirs: Theirs) -> bool:
        """Whether the worker stated this acceptance or end at the ledger itself, so that the gate did not send it."""
        phase = "accepted" if receipt.receipt_type == "task.accepted" else "complete"
        return any(row.get("phase") == phase and row.get("source_system") not in (None, self.sink.source)
                   for row in theirs.values())

    async def _theirs(self, task: stored.Task, row: dict[str, Any], theirs: Theirs) -> None:
        """Judge a receipt that only the ledger has."""
        id, ended = row["receipt_id"], row.get("phase") == "complete"
        if row.get("source_system") != self.sink.source:
            self.findings.foreign += 1
            if ended and task.status not in stored.TERMINAL:
                self._found("stated_by_worker", f"{row.get('source_system')} states an end there, but the task is "
                            f"{task.status}", id, task.task_id)
        elif metadata_of(row).get("receipt_type") == "task.accepted":
            if await self._is_open(task, row, theirs):
                self._found("never_granted", f"the ledger has an acceptance by {row.get('for_principal')} that this "
                            "gate never granted", id, task.task_id)
        elif ended and metadata_of(row).get("receipt_type") != receiptgate_schema.UNDONE and id not in self.overtaken:
            kind = "ended_twice" if task.status in stored.TERMINAL else "ended_there"
            self._found(kind, f"the ledger has an end of the task ({row.get('status')}), but here the task is "
                        f"{task.status}", id, task.task_id)

    async def _is_open(self, task: stored.Task, row: dict[str, Any], theirs: Theirs) -> bool:
        """Whether an acceptance at the ledger is still open, and this gate has not just committed it."""
        over = any(other.get("phase") == "complete" or other.get("dedupe_key") == f"undo {row['receipt_id']}"
                   for other in theirs.values())
        if over or task.status in stored.TERMINAL:
            return False
        # a strict gate commits only after the ledger has the receipt
        await asyncio.sleep(collected.READ_PAUSE_SECONDS)
        return await self.backend.receipt(self.tenant_id, row["receipt_id"]) is None


def metadata_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the `metadata` of a ReceiptGate receipt, or an empty object."""
    metadata = row.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


async def find_stated_end(sink: Any, tenant_id: str, task: stored.Task, receipt_id: str) -> stored.Outgoing | None:
    """Return a gate's end of a task at the ledger as an offered row; None if its body is not there as it was."""
    for statement in await sink.of_task(tenant_id, task.task_id):
        known = metadata_of(statement)
        if statement.get("receipt_id") != receipt_id or statement.get("source_system") != sink.source:
            continue
        try:
            receipt = msgspec.convert({
                **known, "receipt_id": receipt_id, "receipt_key": statement["dedupe_key"], "task_id": task.task_id,
                "created_at": datetime.fromisoformat(statement["created_at"]).timestamp(), "schedule_id": None,
                "body": to_canonical(statement["body"]).decode()}, type=stored.Receipt)
        except (KeyError, ValueError, TypeError, msgspec.ValidationError):
            return None
        content = receiptgate_schema.write_canonical({**statement, "obligation_id": task.duty}).decode()
        row = stored.Outgoing(receipt_id, task.task_id, content, receipt.created_at)
        return offer_row(row, Memo(receipt)) if collected.is_sound(receipt) else None
    return None


async def find_acceptance(sink: Any, tenant_id: str, task: stored.Task, receipt_id: str,
                          at: float) -> stored.Outgoing | None:
    """Return an acceptance at the ledger as a row of the outbox, so that it can be undone."""
    for row in await sink.of_task(tenant_id, task.task_id):
        if row.get("receipt_id") == receipt_id and metadata_of(row).get("receipt_type") == "task.accepted":
            content = receiptgate_schema.write_canonical({**row, "obligation_id": task.duty})
            return stored.Outgoing(receipt_id, task.task_id, content.decode(), at)
    return None
