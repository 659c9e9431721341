"""Poll a ReceiptGate for ends of tasks that workers state there themselves (lease protocol, Lifecycle 4).

ReceiptGate lists the receipts of one task at a time, so each poll queries some of the leased tasks.  A ReceiptGate that
keeps custody binds a receipt to the credential that stored it, by `source_system`.  One of dialect 1.0 does not, so the
gate adopts nothing from it: there, workers complete at the gate, as `/v1/config` says.

An adopted end is decided like `complete` or `fail`.  Its receipt is stored here whole, and not sent, because
ReceiptGate has the worker's own.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from asyncgate import COMPLETED, FAILED
from asyncgate.extras.ledger.adoption import Adopter
from asyncgate.extras.ledger.sinks import Filed, Garbled
from asyncgate.parts.model import queries, stored
from asyncgate.parts.model.content import to_canonical
from asyncgate.parts.process.kit import Bounded

if TYPE_CHECKING:
    from asyncgate import Engine
    from asyncgate.extras.ledger.reading import Reading

log = logging.getLogger("asyncgate.ledger")

TASKS_PER_POLL = 100         # leased tasks of one tenant and status that one poll queries
RECEIPT_TYPE_OF_STATUS = {"success": COMPLETED.type, "failure": FAILED.type}
SAID = {"NA", "TBD", ""}


class Noticer(Adopter):
    """Polls the ledger for the tasks with live leases, from where it stopped the last time."""

    def __init__(self, engine: Engine, reading: Reading) -> None:
        super().__init__(engine, reading)
        self.places: dict[tuple[str, str], str | None] = {}
        self.judged: Bounded[tuple[str, str], None] = Bounded()

    async def poll(self) -> None:
        """Query some leased tasks of every tenant; a no-op in processes that do not lead the job."""
        if self.reading.sink.binds is not False:
            await super().poll()

    async def _poll_tenant(self, tenant_id: str) -> None:
        for status in ("leased", "running"):
            await self._poll_status(tenant_id, status)

    async def _poll_status(self, tenant_id: str, status: str) -> None:
        before = self.places.get((tenant_id, status))
        rows = await self.engine.backend.page(tenant_id, queries.TaskFilter(None, status, None, before, TASKS_PER_POLL))
        self.places[tenant_id, status] = rows[-1][0].task_id if len(rows) == TASKS_PER_POLL else None
        for task, lease, _ in rows:
            try:
                if lease is not None:
                    await self._adopt_ends(tenant_id, task, lease)
            except Garbled as refusal:       # what the ledger says of one task must not hold up the others
                log.warning("receipts in the ledger about task %s cannot be read now: %s", task.task_id, refusal)

    async def _adopt_ends(self, tenant_id: str, task: stored.Task, lease: stored.Lease) -> None:
        sink: Any = self.reading.sink
        theirs = await self.reading.ask_ledger(lambda: sink.of_task(tenant_id, task.task_id))
        if sink.binds is not True:
            return
        for row in theirs:
            receipt = stated_ending(row, task, lease, sink.source)
            if receipt is not None and (tenant_id, receipt.receipt_id) not in self.judged:
                await self._request(tenant_id, receipt)
                self.judged.put((tenant_id, receipt.receipt_id), None)


def stated_ending(row: dict[str, Any], task: stored.Task, lease: stored.Lease, source: str) -> Filed | None:
    """Return a worker's statement that its task has ended, in the form of a gate's receipt; None for other receipts."""
    receipt_type = RECEIPT_TYPE_OF_STATUS.get(row.get("status", "")) if row.get("phase") == "complete" else None
    by = row.get("source_system")
    if receipt_type is None or by == source:
        return None
    metadata, worker = row.get("metadata"), lease.worker_kind
    lease_id = metadata.get("lease_id") if isinstance(metadata, dict) else None
    try:
        return msgspec.convert({
            "receipt_id": row.get("receipt_id"), "receipt_type": receipt_type, "created_at": row.get("created_at"),
            "from": {"kind": worker, "id": row.get("from_principal")}, "to": {"kind": "asyncgate", "id": source},
            "task_id": task.task_id, "lease_id": lease_id or lease.lease_id, "tenant_id": "",
            "parents": [task.duty] if row.get("obligation_id") == task.duty else [],
            "body": Raw(to_canonical(stated_body(row, receipt_type))),
            "stated_by": {"kind": worker, "id": by}}, type=Filed)
    except msgspec.ValidationError:
        return None


def stated_body(row: dict[str, Any], receipt_type: str) -> dict[str, Any]:
    """Return the body of a ReceiptGate receipt in the form of a gate's body."""
    body, text = row.get("body"), row.get("outcome_text")
    members: dict[str, Any] = body if isinstance(body, dict) else {}
    text = None if text in SAID else text
    if receipt_type == FAILED.type:     # the obligation has ended at the ledger, so there is no further attempt
        return {"error": members.get("error") or {"code": "failed", "message": text}}
    where = {name: row[name] for name in ("artifact_pointer", "artifact_location", "artifact_mime", "artifact_checksum")
             if row.get(name) not in (None, *SAID)}
    result = members.get("result_payload", members.get("result", text))
    return {"result_payload": result, "artifacts": [where] if "artifact_pointer" in where else members.get("artifacts"),
            "delivery_proof": members.get("delivery_proof"), "result_summary": members.get("result_summary")}

