"""Adoption: turn a receipt that a worker wrote to the ledger into a request to the gate (lease protocol).

Receipts do not drive state (H.2): a task.completed or task.failed that a worker wrote to the ledger must pass the
checks of `complete` or `fail`.  If it passes, it becomes the receipt of the step, and the gate writes only
task.result_ready.  If it fails, the task's owner is told why.  An unreadable ledger changes nothing.

Security: the ledger itself must confirm that the worker stored the receipt, because anybody can write any sender.

Lists are ordered by id, and ids order by age.  A receipt with an id of another form would break cursors, so its
skeleton gets an id from this gate, and two marks lead from each id to the other.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from asyncgate import ANOMALY, COMPLETED, FAILED, Caller, Needs, Work, receipt_hash
from asyncgate.extras.ledger.sinks import Filed, Garbled, Outage
from asyncgate.parts.model import errors, queries, stored, wire
from asyncgate.parts.model.content import encode_json, to_canonical
from asyncgate.parts.model.views import LONGEST_ID
from asyncgate.parts.receipts.incoming import MAY
from asyncgate.parts.receipts.ledger_marks import ADOPTED_PREFIX, STATED_PREFIX

if TYPE_CHECKING:
    from asyncgate import Engine
    from asyncgate.extras.ledger.reading import Reading
    from asyncgate.parts.model import stored

log = logging.getLogger("asyncgate.ledger")

JOB = "send receipts"       # one of several processes leads this job, and adopts as well
ENTRIES_PER_PAGE = 200
WORDS = ("result_summary", "artifacts", "delivery_proof", "completion_metadata", "retry_after_seconds")
LONG_AGO, SOON = 86_400.0, 60.0     # seconds by which a worker's clock may be behind, and ahead


class Adopt(wire.Ask, kw_only=True):
    """Internal request: adopt a receipt that a worker stated in the ledger."""

    statement: Filed
    ask: wire.Complete | wire.Fail
    whole: bool = False     # the gate keeps receipts with bodies: this step's too, which is not sent to the ledger


class Adopter:
    """Polls the ledger for receipts that workers stated, from where it stopped the last time."""

    def __init__(self, engine: Engine, reading: Reading) -> None:
        self.engine, self.reading = engine, reading

    async def run(self) -> None:
        """Poll until canceled."""
        while (pause := self.engine.settings.ledger.adopt_seconds) > 0:
            try:
                await self.poll()
            except (Outage, errors.GateError) as away:
                log.warning("receipts that workers stated in the ledger cannot be read now: %s", away)
            except Exception:
                log.exception("adopting receipts from the ledger failed; the next poll tries again")
            await asyncio.sleep(pause)

    async def poll(self) -> None:
        """Read all new receipts of every tenant; a no-op in processes that do not lead the job."""
        if await self.engine.leads(JOB):
            for tenant_id in await self.engine.backend.tenants():
                await self._poll_tenant(tenant_id)

    async def _poll_tenant(self, tenant_id: str) -> None:
        """Poll for one tenant; what fails because of its receipts must not hold up another tenant's."""
        try:
            for contract in (COMPLETED, FAILED):
                await self._poll_type(tenant_id, contract.type)
        except (Garbled, errors.GateError) as refusal:
            if isinstance(refusal, errors.GateError) and refusal.status >= 500:
                raise
            log.warning("receipts that workers of tenant %s stated in the ledger cannot be read now: %s", tenant_id,
                        refusal)

    async def _poll_type(self, tenant_id: str, receipt_type: str) -> None:
        known = await self.engine.backend.record(tenant_id, stored.LedgerMark, receipt_type)
        after = known.receipt_id if known else None
        while True:
            of = queries.EntryFilter(None, None, receipt_type, None, after, ENTRIES_PER_PAGE)
            page = await self.reading.ask_ledger(lambda of=of: self.reading.sink.page(tenant_id,
                                                                                      of))  # type: ignore[misc]
            for receipt in page.receipts:
                await self._request(tenant_id, receipt)
            if page.cursor in (None, after):
                return
            after = page.cursor
            keep = partial(Work.keep_record, row=stored.LedgerMark(receipt_type, after))
            await self.engine.change(tenant_id, keep, (stored.LedgerMark, (receipt_type,)))

    async def _request(self, tenant_id: str, receipt: Filed) -> None:
        """Check and adopt one receipt; skip a receipt of a gate, or about a task of another gate."""
        backend = self.engine.backend
        if len(receipt.receipt_id) > LONGEST_ID:
            return log.warning("a receipt in the ledger was skipped: its id has %d characters", len(receipt.receipt_id))
        if (receipt.receipt_key or receipt.task_id is None
                or await backend.receipt(tenant_id, receipt.receipt_id) is not None):
            return
        if await backend.record(tenant_id, stored.LedgerMark, ADOPTED_PREFIX + receipt.receipt_id) is not None:
            return
        if (row := await backend.task(tenant_id, receipt.task_id)) is None:
            return
        task, lease, _ = row
        try:
            require_author(receipt)
            require_parents(receipt, task, lease)
            if lease is None or receipt.lease_id is None:
                raise errors.LeaseInvalid("the receipt names no lease of this task", reason="unknown")
            worker = wire.Principal(receipt.sender.kind, receipt.sender.id, lease.worker_instance)
            caller = Caller(tenant_id, worker, "worker", frozenset({"tasks:lease"}))
            await self.engine.write(adopt, load_step, caller, Adopt(
                statement=receipt, ask=request_of(receipt), whole=not self.reading.sink.reads))
        except errors.TaskNotFound:
            return
        except (errors.GateError, msgspec.ValidationError) as refusal:
            if isinstance(refusal, errors.GateError) and refusal.status >= 500:
                raise
            log.warning("receipt %s in the ledger was rejected: %s", receipt.receipt_id, refusal)
            tell = partial(report, self.engine, receipt, str(refusal))
            await self.engine.change(tenant_id, tell, tasks=[receipt.task_id])


def request_of(receipt: Filed) -> wire.Complete | wire.Fail:
    """Return the request that a receipt stands for; raises ValidationError if a field is invalid."""
    body = msgspec.json.decode(receipt.body) if receipt.body else {}
    body = body if isinstance(body, dict) else {}
    common = {"task_id": receipt.task_id, "lease_id": receipt.lease_id, "worker_kind": receipt.sender.kind,
              "worker_id": receipt.sender.id, **{name: body[name] for name in WORDS if body.get(name) is not None}}
    if receipt.receipt_type == COMPLETED.type:
        result = body.get("result_payload", body.get("result"))
        return msgspec.json.decode(encode_json({**common, "result": result}), type=wire.Complete)
    return msgspec.json.decode(encode_json({**common, "error": body.get("error"),
                                            "retryable": bool(body.get("retry_recommended"))}), type=wire.Fail)


def require_author(receipt: Filed) -> None:
    """Check that, by the ledger's word, the sender of a receipt stored it; raises LeaseInvalid."""
    if receipt.stated_by is None:
        raise errors.LeaseInvalid("the ledger does not say who stored the receipt; complete the task at the gate",
                                  reason="unknown")
    if not receipt.stated_by.same(receipt.sender):
        raise errors.LeaseInvalid(
            f"the receipt names {receipt.sender} as its sender, but {receipt.stated_by} stored it", reason="unknown")


def require_parents(receipt: Filed, task: stored.Task, lease: stored.Lease | None) -> None:
    """Check that a receipt names the task's task.assigned, or for a failed attempt its task.accepted, as parent (PH.2).

    Raises ParentsRequired.
    """
    needed = {task.duty}
    if receipt.receipt_type == FAILED.type and lease is not None:
        needed.add(lease.accepted)
    if needed.isdisjoint(receipt.parents):
        raise errors.ParentsRequired(
            f"a {receipt.receipt_type} of task {task.task_id} must name the task's task.assigned, "
            f"{task.duty}, among its parents (PH.2)")


def load_step(needs: Needs, caller: Caller, ask: Adopt) -> None:
    """Load the task, the receipts that ended the lease, and the last seal from before the ledger was used."""
    needs.tasks.add(ask.ask.task_id)
    needs.records.add((stored.SealHead, ()))
    needs.endings.add((ask.ask.task_id, ask.ask.lease_id))


def adopt(engine: Engine, work: Work, caller: Caller, ask: Adopt) -> None:
    """End an attempt as a worker's receipt in the ledger states, with that receipt as the proof.

    The step's receipt gets the id that the ledger knows, so that task.result_ready names the ledger's receipt.
    """
    if ask.statement.receipt_type not in MAY["adopted"].types:
        raise errors.InvalidRequest(f"a receipt of the type {ask.statement.receipt_type} is not adopted")
    statement = ask.statement
    if ask.whole:
        take_step(engine, work, caller, ask.ask)
        work.add_event(ask.ask.task_id, "task.adopted", receipt_id=statement.receipt_id)
        return
    own = work.new_id()         # before the step, so that the receipts that follow in the step have greater ids
    take_step(engine, work, caller, ask.ask, statement.receipt_id)
    if (receipt := work.written.get(statement.receipt_id)) is None:     # the worker has made the same call at the gate
        return
    digest = receipt_hash(receipt.receipt_type, receipt.sender, receipt.to, receipt.task_id, receipt.lease_id,
                          receipt.schedule_id, receipt.parents, to_canonical(Raw(statement.body)))
    work.keep_skeleton(replace(receipt, hash=statement.hash or digest))
    sealed = (work.find_record(stored.SealHead) or stored.SealHead()).last_id
    if not is_ordered(statement.receipt_id, work.now) or statement.receipt_id <= sealed:
        work.rename_receipt(statement.receipt_id, own)
        work.keep_record(stored.LedgerMark(ADOPTED_PREFIX + statement.receipt_id, own))
        work.keep_record(stored.LedgerMark(STATED_PREFIX + own, statement.receipt_id))


def take_step(engine: Engine, work: Work, caller: Caller, ask: wire.Complete | wire.Fail,
              receipt_id: str | None = None) -> None:
    """Complete or fail the task as the worker stated."""
    if isinstance(ask, wire.Complete):
        engine.complete(work, caller, ask, receipt_id)
    else:
        engine.fail(work, caller, ask, receipt_id)


def is_ordered(receipt_id: str, now: float) -> bool:
    """Whether an id is a UUIDv7 of a plausible time, so that it orders by age among the gate's own ids."""
    try:
        made = uuid.UUID(receipt_id)
    except ValueError:
        return False
    return made.version == 7 and str(made) == receipt_id and now - LONG_AGO < (made.int >> 80) / 1000 < now + SOON


def report(engine: Engine, statement: Filed, reason: str, work: Work) -> None:
    """Tell the owner of a task that a worker's receipt in the ledger was rejected (H.2)."""
    if (task := work.tasks.get(statement.task_id or "")) is not None:
        body = {"kind": "ledger_receipt_rejected", "recommended_action": "Check what that worker does.",
                "details": {"receipt_id": statement.receipt_id, "receipt_type": statement.receipt_type,
                            "reason": reason, "status": task.status}}
        engine.write_receipt(work, ANOMALY, task, body, discriminator=f"ledger_receipt_rejected {statement.receipt_id}")


def write_anomaly(engine: Engine, work: Work, receipt: stored.Receipt | None, kind: str, mark: str, advice: str,
            **details: Any) -> None:
    """Write a system.anomaly to a task's owner, or else to a receipt's recipient, or else to the fallback owner."""
    task = work.tasks.get(receipt.task_id) if receipt else None
    nobody = wire.Principal(engine.settings.default_fallback_owner_kind, engine.settings.default_fallback_owner_id)
    body = {"kind": kind, "details": details, "recommended_action": advice}
    engine.write_receipt(work, ANOMALY, task, body, to=receipt.to if receipt else nobody,
                         discriminator=f"{kind} {mark}")
