"""The repairs of `asyncgate reconcile --repair`: they write no receipt, and a second repair is a no-op.

A receipt that the ledger lacks is sent through the outbox, like every other.  If the ledger has receipts that this
gate lacks, the gate stores skeletons of those receipts, changes the task to the state that the receipts describe, and
writes an event `task.reconciled`.  A task that stays open gets a higher fence, as after a move: a worker whose lease
this gate does not know then has an outdated fence.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

import asyncgate
from asyncgate import Needs
from asyncgate.extras.ledger import restated
from asyncgate.extras.ledger.collected import is_sound
from asyncgate.extras.ledger.reconcile import describe_lead, find_behind
from asyncgate.extras.ledger.settling import undo, write_overtaken
from asyncgate.parts.model import stored
from asyncgate.parts.model.parking import GIVEN_BACK
from asyncgate.parts.model.walking import batches

if TYPE_CHECKING:
    from asyncgate import Engine, Work
    from asyncgate.extras.ledger.collected import Collected
    from asyncgate.extras.ledger.outbox import Ledger
    from asyncgate.extras.ledger.reconcile import Behind, Difference, Findings
    from asyncgate.extras.ledger.sinks import Sink

RECEIPTS_PER_RESEND = 200              # receipts that one transaction puts into the outbox
POLL_SECONDS, DELIVERY_SECONDS = 0.1, 30.0      # `send` gives up after this long without a delivered receipt
AHEAD = ("ended_at_ledger", "lease_ended_at_ledger", "not_committed")


class Mender:
    """Makes the safe repairs; no process may serve the gate meanwhile."""

    def __init__(self, engine: Engine, ledger: Ledger) -> None:
        self.engine, self.ledger, self.done = engine, ledger, Counter[str]()
        engine.extend(ledger)

    async def __call__(self, tenant_id: str, collected: Collected | None, findings: Findings) -> None:
        """Repair the differences found for one tenant."""
        unsent = findings.of(tenant_id, "missing_at_ledger", "parked")
        for batch in batches(unsent, RECEIPTS_PER_RESEND):
            await resend(self.engine, self.ledger.sink, tenant_id, batch)
            self.done.update(difference.kind for difference in batch)
        for difference in findings.of(tenant_id, "never_granted"):
            self.done[difference.kind] += await self._undo(difference)
        if collected is not None:
            for difference in findings.of(tenant_id, *AHEAD):
                self.done[difference.kind] += await self._take_over(difference, collected)
        for difference in findings.of(tenant_id, "ended_twice"):
            overtaken = partial(write_overtaken, self.engine, task_id=difference.task_id,
                                receipt_id=difference.receipt_id)
            await self.engine.change(tenant_id, overtaken, tasks=[difference.task_id])
            self.done[difference.kind] += 1
        for difference in findings.of(tenant_id, "ended_there"):
            self.done[difference.kind] += await self._note_end(difference)
        for difference in findings.of(tenant_id, "lease_unbacked"):
            end = partial(end_unbacked_lease, task_id=difference.task_id, accepted=difference.receipt_id)
            self.done[difference.kind] += await self.engine.change(tenant_id, end, tasks=[difference.task_id])

    async def _undo(self, difference: Difference) -> bool:
        """Put the receipt into the outbox that undoes a lease that was never granted; tell whether there was one."""
        from asyncgate.extras.ledger import reconcile_receiptgate as part
        sink = self.ledger.sink
        if (snapshot := await self.engine.backend.task(difference.tenant_id, difference.task_id)) is None:
            return False
        now = self.engine.backend.now()
        row = await part.find_acceptance(sink, difference.tenant_id, snapshot[0], difference.receipt_id, now)
        if row is None:
            return False
        await self.engine.backend.transact(difference.tenant_id, Needs(tasks={difference.task_id}),
                                           partial(undo, sink, [row]))
        return True

    async def _note_end(self, difference: Difference) -> bool:
        """Note an end that only the ledger has as offered; the gate adopts it when it serves, if it was lawful."""
        from asyncgate.extras.ledger import reconcile_receiptgate as part
        if (snapshot := await self.engine.backend.task(difference.tenant_id, difference.task_id)) is None:
            return False
        row = await part.find_stated_end(self.ledger.sink, difference.tenant_id, snapshot[0], difference.receipt_id)
        if row is not None:
            await self.engine.backend.transact(difference.tenant_id, Needs(), lambda work: work.keep_record(row))
        return row is not None

    async def _take_over(self, difference: Difference, collected: Collected) -> bool:
        backend = self.engine.backend
        if (snapshot := await backend.task(difference.tenant_id, difference.task_id)) is None:
            return False
        task, lease, _ = snapshot
        behind = await find_behind(backend, difference.tenant_id, collected, task)
        if not behind.ahead or describe_lead(task, lease, behind) not in AHEAD:
            return False
        return await self.engine.change(
            difference.tenant_id, partial(take_over, seen=task, behind=behind),
            *((stored.Schedule, (receipt.schedule_id,)) for receipt in behind.ahead if receipt.schedule_id),
            tasks=[task.task_id], receipts=[parent for receipt in behind.ahead for parent in receipt.parents])

    async def send(self) -> int:
        """Send the receipts in the outbox; return how many still wait when 30 s pass without a delivery."""
        sender, backend, left = self.ledger.sender, self.engine.backend, -1

        async def count_waiting() -> int:
            return sum([(await backend.lag(tenant_id)).waiting for tenant_id in await backend.unsent()])
        sender.open()
        try:
            quiet = 0.0
            while (now := await count_waiting()) and quiet < DELIVERY_SECONDS:
                quiet = quiet + POLL_SECONDS if now == left else 0.0
                left = now
                await asyncio.sleep(POLL_SECONDS)
            return now
        finally:
            await sender.close()


async def resend(engine: Engine, sink: Sink, tenant_id: str, lacking: list[Difference],
                 bodies: Mapping[str, str] = MappingProxyType({})) -> None:
    """Put receipts into the outbox, with their bodies from here or from `bodies`; refused ones wait again."""
    ids = [difference.receipt_id for difference in lacking]

    def put(work: Work) -> None:
        for receipt_id in ids:
            receipt, row = work.receipts.get(receipt_id), work.find_record(stored.Outgoing, receipt_id)
            if receipt is None:         # it was pruned meanwhile
                continue
            if row is None and not receipt.body and receipt_id in bodies:
                whole = replace(receipt, body=bodies[receipt_id])
                receipt = whole if is_sound(whole) else receipt     # else it was erased since its body was restored
            if row is not None:
                work.keep_record(replace(row, state="waiting", tries=0))
            elif receipt.body:
                task, lease = work.tasks.get(receipt.task_id), work.leases.get(receipt.task_id)
                if (content := sink.render(work.tenant_id, receipt, task, lease)) is not None:
                    work.keep_record(stored.Outgoing(receipt_id, receipt.task_id, content.decode(), work.now))

    # A ledger that does not read receipts is also told of tasks.
    tasks = [] if sink.reads else [difference.task_id for difference in lacking if difference.task_id]
    await engine.change(tenant_id, put, *((stored.Outgoing, (id,)) for id in ids), tasks=tasks, receipts=ids)


def end_unbacked_lease(work: Work, task_id: str, accepted: str) -> bool:
    """End a lease that the ledger does not know, without a receipt: the ledger has no receipt of its beginning."""
    task, lease = work.require_task(task_id), work.leases.get(task_id)
    if lease is None or lease.ending != "live" or lease.accepted != accepted:
        return False
    work.set_lease(replace(lease, ending="withdrawn"))
    work.change_task(task, status="queued", fence=task.fence + asyncgate.FENCES_SKIPPED, started_at=None,
                     next_eligible_at=None)
    work.add_event(task.task_id, "task.reconciled", fences_skipped=asyncgate.FENCES_SKIPPED, was=task.status,
                   lease_withdrawn=lease.lease_id)
    return True


def take_over(work: Work, seen: stored.Task, behind: Behind) -> bool:
    """Change a task to the state that the ledger's receipts describe; tell whether it was changed."""
    task, lease, ahead = work.require_task(seen.task_id), work.leases.get(seen.task_id), behind.ahead
    if (task.status, task.fence) != (seen.status, seen.fence):
        return False
    for receipt in ahead:
        work.keep_skeleton(work.add_receipt(receipt))
        _open_and_close(work, receipt)
    leased = sum(receipt.receipt_type == asyncgate.ACCEPTED.type for receipt in ahead)
    story = restated.story_of(behind.whole)
    over, was_over = bool(story.ends), task.status in stored.TERMINAL
    loose = _end_lease(work, task, lease, story, ahead, leased)
    skipped = asyncgate.FENCES_SKIPPED if not over and loose else 0
    failed = sum(row.receipt_type == asyncgate.FAILED.type and task.duty not in row.parents for row in ahead)
    lost = sum(row.receipt_type == asyncgate.EXPIRED.type and restated.body_of(row).get("reason") not in GIVEN_BACK
               for row in ahead)
    changes: dict[str, Any] = {"fence": task.fence + leased + skipped, "owed": bool(task.owed) and story.owed,
                               "attempt": task.attempt + failed, "expiries": task.expiries + lost}
    if over and not was_over:
        work.count_usage(active=-1, terminal=1)
        changes |= {"status": story.status, "completed_at": story.ended_at, "outcome": story.outcome, "held": None}
    elif task.status in stored.ACTIVE and loose:
        changes |= {"status": "queued", "started_at": None, "next_eligible_at": None}
    if story.artifacts is not None:
        changes["artifacts"] = story.artifacts
    work.change_task(task, **changes)
    work.add_event(task.task_id, "task.reconciled", fences_skipped=skipped, was=task.status,
                   receipts=[receipt.receipt_id for receipt in ahead])
    return True


def _open_and_close(work: Work, receipt: stored.Receipt) -> None:
    """Close obligations, and keep or drop schedules, as a receipt says; `work.record` has opened the obligations."""
    if receipt.receipt_type in asyncgate.DISCHARGING:
        for parent in receipt.parents:
            opened = work.receipts.get(parent)
            if opened is not None and receipt.receipt_type in asyncgate.TERMINATES.get(opened.receipt_type, ()):
                work.close_obligation(parent, opened.to)
    if receipt.receipt_type == asyncgate.SCHEDULED.type and receipt.schedule_id:
        work.keep_record(stored.Schedule(receipt.schedule_id, receipt.to_kind, receipt.to_id, receipt.from_kind,
                                         receipt.from_id, receipt.receipt_id))
    elif receipt.receipt_type == asyncgate.UNSCHEDULED.type and receipt.schedule_id:
        work.drop_record(stored.Schedule, receipt.schedule_id)


def _end_lease(work: Work, task: stored.Task, lease: stored.Lease | None, story: restated.Story,
               ahead: list[stored.Receipt], leased: int) -> bool:
    """Store the lease as the ledger's receipts describe it; tell whether a lease began or ended."""
    last = restated.restate_lease(story)
    if leased and last is not None:
        work.set_lease(replace(last, fence=task.fence + leased))
        return True
    told = bool(story.ends) or any(lease and receipt.lease_id == lease.lease_id for receipt in ahead)
    if lease is None or lease.ending != "live" or not told:
        return False
    work.set_lease(replace(lease, ending=story.ending))
    return True
