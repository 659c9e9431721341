"""What `asyncgate reconcile --repair` does: nothing of it writes a receipt, and doing it again changes nothing.

A receipt that the ledger lacks goes through the outbox, like every other.  What the ledger has beyond this gate is
taken over as it is there: its receipts get skeletons here, the task becomes what they say, and an event
`task.reconciled` tells.  A task that stays open gets a higher fence, as one that has moved: who was at work on it under
a lease that nobody knows here is outranked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from asyncgate import (
    ACCEPTED,
    DISCHARGING,
    EXPIRED,
    FAILED,
    FENCES_SKIPPED,
    SCHEDULED,
    TERMINATES,
    UNSCHEDULED,
    Caller,
    Needs,
)
from asyncgate.parts.model.stored import ACTIVE, TERMINAL, Lease, Outgoing, Receipt, Schedule, Task
from asyncgate.parts.model.wire import Ask
from asyncgate.parts.receipts.reconcile import describe_lead, find_behind
from asyncgate.parts.receipts.restated import Story, body_of, restate_lease, story_of
from asyncgate.parts.receipts.strict import undo

if TYPE_CHECKING:
    from asyncgate import Engine, Work
    from asyncgate.parts.receipts.collected import Collected
    from asyncgate.parts.receipts.outbox import Ledger
    from asyncgate.parts.receipts.reconcile import Difference, Findings
    from asyncgate.parts.receipts.sinks import Sink

RECEIPTS_PER_RESEND = 200              # receipts that one transaction puts into the outbox
POLL_SECONDS, DELIVERY_SECONDS = 0.1, 30.0      # without a receipt that arrived
AHEAD = ("ended_at_ledger", "lease_ended_at_ledger", "not_committed")


class Resend(Ask, kw_only=True):
    """A repair's own request: let the ledger have these."""

    receipts: list[str]
    tasks: list[str] = []       # that they are about, for a ledger that is told of tasks


class TakeOver(Ask, kw_only=True):
    """A repair's own request: the ledger has this of a task beyond what is here."""

    task_id: str
    seen: tuple[str, int]
    whole: list[Receipt]
    ahead: list[Receipt]


class Withdraw(Ask, kw_only=True):
    """A repair's own request: the ledger does not back the lease of this task."""

    task_id: str
    accepted: str


class Mender:
    """Does what can safely be done, for a gate that nobody serves meanwhile."""

    def __init__(self, engine: Engine, ledger: Ledger) -> None:
        self.engine, self.ledger, self.done = engine, ledger, Counter[str]()
        engine.extend(ledger)

    async def __call__(self, tenant_id: str, collected: Collected | None, findings: Findings) -> None:
        """Repair what was found of one tenant."""
        unsent = findings.of(tenant_id, "missing_at_ledger", "parked")
        while batch := list(islice(unsent, RECEIPTS_PER_RESEND)):
            await self._write(tenant_id, partial(resend, self.ledger.sink), its_rows, Resend(
                receipts=[one.receipt_id for one in batch],
                tasks=[] if self.ledger.sink.reads else [one.task_id for one in batch if one.task_id]))
            self.done.update(one.kind for one in batch)
        for one in findings.of(tenant_id, "never_granted"):
            self.done[one.kind] += await self._undo(one)
        if collected is not None:
            for one in findings.of(tenant_id, *AHEAD):
                self.done[one.kind] += await self._take_over(one, collected)
        for one in findings.of(tenant_id, "lease_unbacked"):
            ask = Withdraw(task_id=one.task_id, accepted=one.receipt_id)
            self.done[one.kind] += bool(await self._write(tenant_id, end_unbacked_lease, its_lease, ask))

    async def _undo(self, one: Difference) -> bool:
        """Let the outbox have what undoes a lease that was never granted."""
        from asyncgate.parts.receipts import reconcile_receiptgate as part
        sink = self.ledger.sink
        if (found := await self.engine.backend.task(one.tenant_id, one.task_id)) is None:
            return False
        now = self.engine.backend.now()
        row = await part.find_acceptance(sink, one.tenant_id, found[0], one.receipt_id, now)
        if row is None:
            return False
        await self.engine.backend.transact(one.tenant_id, Needs(tasks={one.task_id}), partial(undo, sink, [row]))
        return True

    async def _take_over(self, one: Difference, collected: Collected) -> bool:
        backend = self.engine.backend
        if (found := await backend.task(one.tenant_id, one.task_id)) is None:
            return False
        task, lease, _ = found
        behind = await find_behind(backend, one.tenant_id, collected, task)
        if not behind.ahead or describe_lead(task, lease, behind) not in AHEAD:
            return False
        ask = TakeOver(task_id=task.task_id, seen=(task.status, task.fence), whole=behind.whole, ahead=behind.ahead)
        return bool(await self._write(one.tenant_id, take_over, its_evidence, ask))

    async def _write(self, tenant_id: str, run: Any, loads: Any, ask: Ask) -> Any:
        caller = self.engine.itself(tenant_id)
        return await self.engine.write(run, loads, caller, ask)

    async def send(self) -> int:
        """Send what waits in the outbox; return how much still waits when nothing more arrives."""
        sender, left = self.ledger.sender, -1
        sender.open()
        try:
            quiet = 0.0
            while (now := await self._waiting()) and quiet < DELIVERY_SECONDS:
                quiet = quiet + POLL_SECONDS if now == left else 0.0
                left = now
                await asyncio.sleep(POLL_SECONDS)
            return now
        finally:
            await sender.close()

    async def _waiting(self) -> int:
        backend = self.engine.backend
        return sum([(await backend.lag(tenant_id)).waiting for tenant_id in await backend.unsent()])


def its_rows(needs: Needs, caller: Caller, ask: Resend) -> None:
    """Load what the outbox has of some receipts, and the receipts."""
    needs.records.update((Outgoing, (receipt_id,)) for receipt_id in ask.receipts)
    needs.receipts.update(ask.receipts)
    needs.tasks.update(ask.tasks)


def resend(sink: Sink, engine: Engine, work: Work, caller: Caller, ask: Resend) -> None:
    """Put receipts into the outbox, or those that were refused back among what waits."""
    for receipt_id in ask.receipts:
        receipt, row = work.receipts[receipt_id], work.found(Outgoing, receipt_id)
        if row is not None:
            work.keep(replace(row, state="waiting", tries=0))
        elif receipt.body:
            task, lease = work.tasks.get(receipt.task_id), work.leases.get(receipt.task_id)
            if (content := sink.render(work.tenant_id, receipt, task, lease)) is not None:
                work.keep(Outgoing(receipt_id, receipt.task_id, content.decode(), work.now))


def its_lease(needs: Needs, caller: Caller, ask: Withdraw) -> None:
    """Load the task, with its lease."""
    needs.tasks.add(ask.task_id)


def end_unbacked_lease(engine: Engine, work: Work, caller: Caller, ask: Withdraw) -> bool:
    """End a lease that the ledger does not back; no receipt says so, for the ledger has none of its beginning."""
    task, lease = work.task(ask.task_id), work.leases.get(ask.task_id)
    if lease is None or lease.ending != "live" or lease.accepted != ask.accepted:
        return False
    work.hold(replace(lease, ending="released"))
    work.change(task, status="queued", fence=task.fence + FENCES_SKIPPED, started_at=None, next_eligible_at=None)
    work.tell(task.task_id, "task.reconciled", fences_skipped=FENCES_SKIPPED, was=task.status,
              lease_withdrawn=lease.lease_id)
    return True


def its_evidence(needs: Needs, caller: Caller, ask: TakeOver) -> None:
    """Load the task, and what the receipts answer."""
    needs.tasks.add(ask.task_id)
    needs.receipts.update(parent for one in ask.ahead for parent in one.parents)
    needs.records.update((Schedule, (one.schedule_id,)) for one in ask.ahead if one.schedule_id)


def take_over(engine: Engine, work: Work, caller: Caller, ask: TakeOver) -> bool:
    """Let a task become what the ledger says that it is."""
    task, lease = work.task(ask.task_id), work.leases.get(ask.task_id)
    if (task.status, task.fence) != ask.seen:
        return False
    for receipt in ask.ahead:
        work.known_elsewhere(work.record(receipt))
        _open_and_close(work, receipt)
    story, leased = story_of(ask.whole), sum(one.receipt_type == ACCEPTED.type for one in ask.ahead)
    over, was_over = bool(story.ends), task.status in TERMINAL
    loose = _end_lease(work, task, lease, story, ask.ahead, leased)
    skipped = FENCES_SKIPPED if not over and loose else 0
    changes: dict[str, Any] = {"fence": task.fence + leased + skipped, "owed": bool(task.owed) and story.owed,
                               **count_losses(task, ask.ahead)}
    if over and not was_over:
        work.use(active=-1, terminal=1)
        changes |= {"status": story.status, "completed_at": story.ended_at, "outcome": story.outcome, "held": None}
    elif task.status in ACTIVE and loose:
        changes |= {"status": "queued", "started_at": None, "next_eligible_at": None}
    if story.artifacts is not None:
        changes["artifacts"] = story.artifacts
    work.change(task, **changes)
    work.tell(task.task_id, "task.reconciled", fences_skipped=skipped, was=task.status,
              receipts=[one.receipt_id for one in ask.ahead])
    return True


def _open_and_close(work: Work, receipt: Receipt) -> None:
    """Keep the index of obligations what the evidence says; `record` has opened what a receipt opens."""
    if receipt.receipt_type in DISCHARGING:
        for parent in receipt.parents:
            opened = work.receipts.get(parent)
            if opened is not None and receipt.receipt_type in TERMINATES.get(opened.receipt_type, ()):
                work.close(parent, opened.to)
    if receipt.receipt_type == SCHEDULED.type and receipt.schedule_id:
        work.keep(Schedule(receipt.schedule_id, receipt.to_kind, receipt.to_id, receipt.from_kind, receipt.from_id,
                           receipt.receipt_id))
    elif receipt.receipt_type == UNSCHEDULED.type and receipt.schedule_id:
        work.drop(Schedule, receipt.schedule_id)


def _end_lease(work: Work, task: Task, lease: Lease | None, story: Story, ahead: list[Receipt], leased: int) -> bool:
    """Keep of the lease what the ledger says of it; tell whether one has come or gone."""
    last = restate_lease(story)
    if leased and last is not None:
        work.hold(replace(last, fence=task.fence + leased))
        return True
    told = bool(story.ends) or any(lease and one.lease_id == lease.lease_id for one in ahead)
    if lease is None or lease.ending != "live" or not told:
        return False
    work.hold(replace(lease, ending=story.ending))
    return True


def count_losses(task: Task, ahead: list[Receipt]) -> dict[str, int]:
    """Return how often the task has failed and lost its worker, with what the ledger has beyond this gate."""
    failed = sum(one.receipt_type == FAILED.type and task.duty not in one.parents for one in ahead)
    lost = sum(one.receipt_type == EXPIRED.type and body_of(one).get("reason") != "released" for one in ahead)
    return {"attempt": task.attempt + failed, "expiries": task.expiries + lost}
