"""Ends of tasks that workers state at a ReceiptGate themselves (lease protocol, Lifecycle 4), found by polling.

ReceiptGate lists the receipts of one task at a time, so the gate asks for those of the tasks that are leased now, some
at each look.  One that keeps custody binds a receipt to whose credential it came with: its `source_system`.  One of
dialect 1.0 does not, and nothing is taken from it: there workers complete at the gate, as `/v1/config` says.

The step is decided as `complete` and `fail` are, and its receipt stays here whole, like every other beside a
ReceiptGate; it is not sent, for the obligation has ended there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from asyncgate import COMPLETED, FAILED
from asyncgate.parts.model.content import to_canonical
from asyncgate.parts.model.queries import TaskFilter
from asyncgate.parts.model.stored import Lease, Task
from asyncgate.parts.receipts.adoption import JOB, Adopter
from asyncgate.parts.receipts.sinks import Filed

if TYPE_CHECKING:
    from asyncgate import Engine
    from asyncgate.parts.receipts.reading import Reading

TASKS_PER_LOOK = 100              # tasks that one look asks after
MOST_REMEMBERED = 10_000     # receipts that have been judged
RECEIPT_TYPE_OF_STATUS = {"success": COMPLETED.type, "failure": FAILED.type}
SAID = {"NA", "TBD", ""}


class Noticer(Adopter):
    """Looks up the live leases at the ledger, from where it stopped the last time."""

    def __init__(self, engine: Engine, reading: Reading) -> None:
        super().__init__(engine, reading)
        self.places: dict[tuple[str, str], str | None] = {}
        self.judged: OrderedDict[tuple[str, str], None] = OrderedDict()

    async def look(self) -> None:
        """Look up some leases of every tenant; only one of several processes does."""
        if self.reading.sink.binds is not False and await self.engine.leads(JOB):
            for tenant_id in await self.engine.backend.tenants():
                for status in ("leased", "running"):
                    await self._ask_after(tenant_id, status)

    async def _ask_after(self, tenant_id: str, status: str) -> None:
        before = self.places.get((tenant_id, status))
        rows = await self.engine.backend.page(tenant_id, TaskFilter(None, status, None, before, TASKS_PER_LOOK))
        self.places[tenant_id, status] = rows[-1][0].task_id if len(rows) == TASKS_PER_LOOK else None
        for task, lease, _ in rows:
            if lease is not None:
                await self._look_at(tenant_id, task, lease)

    async def _look_at(self, tenant_id: str, task: Task, lease: Lease) -> None:
        sink: Any = self.reading.sink
        theirs = await self.reading.asked(lambda: sink.of_task(tenant_id, task.task_id))
        if sink.binds is not True:
            return
        for one in theirs:
            found = stated_ending(one, task, lease, sink.source)
            if found is not None and (tenant_id, found.receipt_id) not in self.judged:
                await self._request(tenant_id, found)
                self.judged[tenant_id, found.receipt_id] = None
                while len(self.judged) > MOST_REMEMBERED:
                    self.judged.popitem(last=False)


def stated_ending(one: dict[str, Any], task: Task, lease: Lease, source: str) -> Filed | None:
    """Return the end of a task that a worker states, as a ledger that gives receipts back would; None if it is none."""
    receipt_type = RECEIPT_TYPE_OF_STATUS.get(one.get("status", "")) if one.get("phase") == "complete" else None
    by = one.get("source_system")
    if receipt_type is None or by == source:
        return None
    metadata, worker = one.get("metadata"), lease.worker_kind
    lease_id = metadata.get("lease_id") if isinstance(metadata, dict) else None
    try:
        return msgspec.convert({
            "receipt_id": one.get("receipt_id"), "receipt_type": receipt_type, "created_at": one.get("created_at"),
            "from": {"kind": worker, "id": one.get("from_principal")}, "to": {"kind": "asyncgate", "id": source},
            "task_id": task.task_id, "lease_id": lease_id or lease.lease_id, "tenant_id": "",
            "parents": [task.duty] if one.get("obligation_id") == task.duty else [],
            "body": Raw(to_canonical(stated_body(one, receipt_type))),
            "stated_by": {"kind": worker, "id": by}}, type=Filed)
    except msgspec.ValidationError:
        return None


def stated_body(one: dict[str, Any], receipt_type: str) -> dict[str, Any]:
    """Return the receipt's statement as the body of a receipt of this gate."""
    held, text = one.get("body"), one.get("outcome_text")
    said: dict[str, Any] = held if isinstance(held, dict) else {}
    text = None if text in SAID else text
    if receipt_type == FAILED.type:     # the obligation has ended there, so there is no other attempt
        return {"error": said.get("error") or {"code": "failed", "message": text}}
    where = {name: one[name] for name in ("artifact_pointer", "artifact_location", "artifact_mime", "artifact_checksum")
             if one.get(name) not in (None, *SAID)}
    result = said.get("result_payload", said.get("result", text))
    return {"result_payload": result, "artifacts": [where] if "artifact_pointer" in where else said.get("artifacts"),
            "delivery_proof": said.get("delivery_proof"), "result_summary": said.get("result_summary")}

