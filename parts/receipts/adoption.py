"""What workers state in the ledger themselves, as the lease protocol describes it, becomes a request to the gate.

Receipts do not drive state (H.2): a task.completed or task.failed that a worker wrote to the ledger is held to the
checks of `complete` or `fail`.  If it passes, that receipt is the one of the step, and only task.result_ready follows;
if not, its task's owner is told why.  An unreadable ledger changes nothing.

The ledger itself must say that the worker has stated it: what a receipt says of its author is anybody's word.

A receipt whose id does not order by age among ours cannot stand in our lists under it, or readers that follow a cursor
would miss what came before.  Its skeleton here has an id of ours, and two marks lead from one id to the other.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from asyncgate import ANOMALY, COMPLETED, FAILED, Caller, Needs, receipt_hash
from asyncgate.parts.model.content import encode_json, to_canonical
from asyncgate.parts.model.errors import GateError, InvalidRequest, LeaseInvalid, ParentsRequired, TaskNotFound
from asyncgate.parts.model.queries import EntryFilter
from asyncgate.parts.model.stored import LedgerMark, Receipt, SealHead
from asyncgate.parts.model.wire import Ask, Complete, Fail, Principal
from asyncgate.parts.receipts.marks import ADOPTED_PREFIX, STATED_PREFIX
from asyncgate.parts.receipts.may import MAY
from asyncgate.parts.receipts.sinks import Filed, Outage

if TYPE_CHECKING:
    from asyncgate import Engine, Work
    from asyncgate.parts.model.stored import Lease, Task
    from asyncgate.parts.receipts.reading import Reading

log = logging.getLogger("asyncgate.ledger")

JOB = "send receipts"       # which one of several processes does, and this with it
ENTRIES_PER_PAGE = 200
WORDS = ("result_summary", "artifacts", "delivery_proof", "completion_metadata", "retry_after_seconds")
LONG_AGO, SOON = 86_400.0, 60.0     # seconds by which the clock of a worker may be off


class Adopt(Ask, kw_only=True):
    """The gate's own request: a worker has stated this in the ledger."""

    found: Filed
    ask: Complete | Fail
    whole: bool = False     # receipts stay here with their bodies: the one of this step too, and it is not sent


class Report(Ask, kw_only=True):
    """The gate's own request: tell that a receipt in the ledger proves nothing."""

    found: Filed
    reason: str


class Marked(Ask, kw_only=True):
    """The gate's own request: so far the ledger was looked through."""

    mark: LedgerMark


class Adopter:
    """Looks through the ledger for what workers have stated, from where it stopped the last time."""

    def __init__(self, engine: Engine, reading: Reading) -> None:
        self.engine, self.reading = engine, reading

    async def run(self) -> None:
        """Look now and then."""
        while (pause := self.engine.settings.ledger.adopt_seconds) > 0:
            try:
                await self.look()
            except (Outage, GateError) as away:
                log.warning("what workers stated in the ledger is not looked at now: %s", away)
            except Exception:
                log.exception("what workers stated in the ledger could not be looked at")
            await asyncio.sleep(pause)

    async def look(self) -> None:
        """Look through all that is new, of every tenant; one of several processes does."""
        if await self.engine.leads(JOB):
            for tenant_id in await self.engine.backend.tenants():
                for contract in (COMPLETED, FAILED):
                    await self._look(tenant_id, contract.type)

    async def _look(self, tenant_id: str, receipt_type: str) -> None:
        known = await self.engine.backend.record(tenant_id, LedgerMark, receipt_type)
        after = known.receipt_id if known else None
        while True:
            of = EntryFilter(None, None, receipt_type, None, after, ENTRIES_PER_PAGE)
            page = await self.reading.asked(lambda of=of: self.reading.sink.page(tenant_id, of))  # type: ignore[misc]
            for found in page.receipts:
                await self._request(tenant_id, found)
            if page.cursor in (None, after):
                return
            after = page.cursor
            await self._write(mark, its_mark, tenant_id, Marked(mark=LedgerMark(receipt_type, after)))

    async def _request(self, tenant_id: str, found: Filed) -> None:
        """Hold one receipt to the rules; what a gate wrote, or what is about another gate's task, is none of ours."""
        backend = self.engine.backend
        if found.receipt_key or found.task_id is None or await backend.receipt(tenant_id, found.receipt_id) is not None:
            return
        if await backend.record(tenant_id, LedgerMark, ADOPTED_PREFIX + found.receipt_id) is not None:
            return
        if (row := await backend.task(tenant_id, found.task_id)) is None:
            return
        task, lease, _ = row
        try:
            by_its_author(found)
            answers(found, task, lease)
            if lease is None or found.lease_id is None:
                raise LeaseInvalid("it names no lease of this task", reason="unknown")
            worker = Principal(found.sender.kind, found.sender.id, lease.worker_instance)
            caller = Caller(tenant_id, worker, "worker", frozenset({"tasks:lease"}))
            await self.engine.write(adopt, its_step, caller, Adopt(
                found=found, ask=asked(found), whole=not self.reading.sink.reads))
        except TaskNotFound:
            return
        except (GateError, msgspec.ValidationError) as no:
            if isinstance(no, GateError) and no.status >= 500:
                raise
            log.warning("receipt %s in the ledger ends nothing: %s", found.receipt_id, no)
            await self._write(report, its_task, tenant_id, Report(found=found, reason=str(no)))

    async def _write(self, run: Any, loads: Any, tenant_id: str, ask: Ask) -> None:
        await self.engine.write(run, loads, self.engine.itself(tenant_id), ask)


def asked(found: Filed) -> Complete | Fail:
    """Return the request that a receipt stands for; raises ValidationError where it says what no request may."""
    body = msgspec.json.decode(found.body) if found.body else {}
    body = body if isinstance(body, dict) else {}
    held = {"task_id": found.task_id, "lease_id": found.lease_id, "worker_kind": found.sender.kind,
            "worker_id": found.sender.id, **{name: body[name] for name in WORDS if body.get(name) is not None}}
    if found.receipt_type == COMPLETED.type:
        result = body.get("result_payload", body.get("result"))
        return msgspec.json.decode(encode_json({**held, "result": result}), type=Complete)
    return msgspec.json.decode(encode_json({**held, "error": body.get("error"),
                                            "retryable": bool(body.get("retry_recommended"))}), type=Fail)


def by_its_author(found: Filed) -> None:
    """See that the ledger says of a receipt that its sender has stated it."""
    if found.stated_by is None:
        raise LeaseInvalid("the ledger does not say who stated it; complete the task at the gate", reason="unknown")
    if not found.stated_by.same(found.sender):
        raise LeaseInvalid(f"it says that it is from {found.sender}, and {found.stated_by} has stated it",
                           reason="unknown")


def answers(found: Filed, task: Task, lease: Lease | None) -> None:
    """PH.2: a terminal receipt names what it ends; an attempt that failed may name its acceptance alone."""
    needed = {task.duty}
    if found.receipt_type == FAILED.type and lease is not None:
        needed.add(lease.accepted)
    if needed.isdisjoint(found.parents):
        raise ParentsRequired(f"a {found.receipt_type} of task {task.task_id} names its task.assigned, {task.duty}, "
                              "among its parents (PH.2)")


def its_step(needs: Needs, caller: Caller, ask: Adopt) -> None:
    """Load the task, what was told under the lease, and how far receipts were sealed before there was a ledger."""
    needs.tasks.add(ask.ask.task_id)
    needs.records.add((SealHead, ()))
    needs.endings.add((ask.ask.task_id, ask.ask.lease_id))


def its_task(needs: Needs, caller: Caller, ask: Report) -> None:
    """Load the task that a receipt is about."""
    needs.tasks.add(ask.found.task_id or "")


def its_mark(needs: Needs, caller: Caller, ask: Marked) -> None:
    """Load the place."""
    needs.records.add((LedgerMark, (ask.mark.name,)))


def mark(engine: Engine, work: Work, caller: Caller, ask: Marked) -> None:
    """Write down how far the ledger was looked through."""
    work.keep(ask.mark)


def adopt(engine: Engine, work: Work, caller: Caller, ask: Adopt) -> None:
    """Take the step that a receipt proves, with that receipt for the proof.

    The step writes its receipt under the id that the ledger knows, so that what answers it names the receipt there.
    """
    if ask.found.receipt_type not in MAY["adopted"].types:
        raise InvalidRequest(f"a receipt of the type {ask.found.receipt_type} is not adopted")
    found = ask.found
    if ask.whole:
        take_step(engine, work, caller, ask.ask)
        work.tell(ask.ask.task_id, "task.adopted", receipt_id=found.receipt_id)
        return
    own = work.new_id()         # before the step, so that what the step writes behind its receipt is younger
    take_step(engine, work, caller, ask.ask, found.receipt_id)
    if (receipt := work.written.get(found.receipt_id)) is None:     # the worker has said it here as well
        return
    said = receipt_hash(receipt.receipt_type, receipt.sender, receipt.to, receipt.task_id, receipt.lease_id,
                        receipt.schedule_id, receipt.parents, to_canonical(Raw(found.body)))
    work.known_elsewhere(replace(receipt, hash=found.hash or said))
    if not ages(found.receipt_id, work.now) or found.receipt_id <= (work.found(SealHead) or SealHead()).last_id:
        work.rename(found.receipt_id, own)
        work.keep(LedgerMark(ADOPTED_PREFIX + found.receipt_id, own))
        work.keep(LedgerMark(STATED_PREFIX + own, found.receipt_id))


def take_step(engine: Engine, work: Work, caller: Caller, ask: Complete | Fail, receipt_id: str | None = None) -> None:
    """End the attempt as the worker has stated."""
    if isinstance(ask, Complete):
        engine.complete(work, caller, ask, receipt_id)
    else:
        engine.fail(work, caller, ask, receipt_id)


def ages(receipt_id: str, now: float) -> bool:
    """Whether an id orders by age among ours: then it may stand among them."""
    try:
        made = uuid.UUID(receipt_id)
    except ValueError:
        return False
    return made.version == 7 and str(made) == receipt_id and now - LONG_AGO < (made.int >> 80) / 1000 < now + SOON


def report(engine: Engine, work: Work, caller: Caller, ask: Report) -> None:
    """Tell the owner of a task that a receipt in the ledger says otherwise (H.2)."""
    if (task := work.tasks.get(ask.found.task_id or "")) is not None:
        body = {"kind": "ledger_receipt_rejected", "recommended_action": "see what that worker does",
                "details": {"receipt_id": ask.found.receipt_id, "receipt_type": ask.found.receipt_type,
                            "reason": ask.reason, "status": task.status}}
        engine.write_receipt(work, ANOMALY, task, body, mark=f"ledger_receipt_rejected {ask.found.receipt_id}")


def anomaly(engine: Engine, work: Work, receipt: Receipt | None, kind: str, mark: str, advice: str,
            **details: Any) -> None:
    """Tell the owner of a task, or else the recipient of a receipt, or else whoever looks after the gate."""
    task = work.tasks.get(receipt.task_id) if receipt else None
    nobody = Principal(engine.settings.default_fallback_owner_kind, engine.settings.default_fallback_owner_id)
    body = {"kind": kind, "details": details, "recommended_action": advice}
    engine.write_receipt(work, ANOMALY, task, body, to=receipt.to if receipt else nobody, mark=f"{kind} {mark}")
