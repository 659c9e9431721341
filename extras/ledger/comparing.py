"""Compare the gate with its ledger from time to time, while it serves (spec 20.6, Consistency Model).

One process of those on a database reads the gate's receipts, a page at a time, and looks for each at the ledger.  A
receipt that the ledger had and lost is put into the outbox again, if its body is still known here or can be restored
from the task.  All other differences are only told: in the log, in the audit log, in the health report, in metrics.
Nothing at the ledger is ever changed or deleted.

A round that is interrupted begins again; nothing is stored about it.  `asyncgate reconcile` compares more: also the
receipts that only the ledger has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from typing import Any

from asyncgate import ASSIGNED, Engine, Work
from asyncgate.extras.ledger import reconcile
from asyncgate.extras.ledger.adoption import JOB
from asyncgate.extras.ledger.collected import (
    READ_PAUSE_SECONDS,
    RECEIPTS_PER_COPY,
    Collected,
    Unreadable,
    as_stored,
    retry_read,
)
from asyncgate.extras.ledger.mending import resend
from asyncgate.extras.ledger.outbox import Compared, Ledger
from asyncgate.extras.ledger.reconcile_receiptgate import GateComparison
from asyncgate.extras.ledger.restated import ENDING_STATUSES
from asyncgate.extras.ledger.restoring import restore_bodies
from asyncgate.extras.ledger.sinks import open_sink
from asyncgate.parts.identity.admin import audit_change
from asyncgate.parts.model import queries, stored, wire
from asyncgate.parts.model.settings import allow_slow_reads
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.model.walking import walk
from asyncgate.parts.process.duties import Alarm
from asyncgate.parts.receipts.ledger_marks import STATED_PREFIX

log = logging.getLogger("asyncgate.ledger")

FIRST_SECONDS = 60.0            # after the start: a gate that has just started has other work, and much to send
AGAIN_SECONDS = 300.0           # after a round that could not be finished
SETTLED_SECONDS = 300.0         # younger receipts are compared in the next round: a worker may still state one itself
PAUSE_SECONDS = 0.1             # between pages: agents and the sender also need the ledger
RECEIPTS_PER_LOOK, TASKS_PER_LOOK = 100, 20
READS_AHEAD, MOST_AHEAD = 2, 1000   # reads of the ledger's list for one page, and receipts of it that are remembered
NAMED_PER_TENANT = 10           # differences of a tenant that the log and the audit log name in one round
# Told elsewhere: a parked receipt by its owner's anomaly and the lag, a worker's statement by its adoption.
TOLD_ELSEWHERE = {"parked", "stated_by_worker"}


class Interrupted(Exception):
    """A round cannot go on now, and begins again later."""


class Comparer:
    """Compares the gate with its ledger, in the process that also sends the receipts."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.alarm, self.begun = engine, Alarm(), False

    async def run(self) -> int:
        """Compare all tenants; return how many receipts are sent again.  The first run only waits a moment."""
        if not self.begun:
            self.begun = True
            self._run_again_in(FIRST_SECONDS)
            return 0
        try:
            return await self.compare() if await self.engine.leads(JOB) else 0
        except (Unreadable, Interrupted) as why:
            log.warning("the gate was not compared with its ledger to the end: %s; next try in %d s", why,
                        AGAIN_SECONDS)
            self._run_again_in(AGAIN_SECONDS)
            return 0

    def _run_again_in(self, seconds: float) -> None:
        self.alarm.set(asyncio.get_running_loop().time() + seconds)

    async def compare(self) -> int:
        """Compare all tenants once; raises Unreadable and Interrupted."""
        ledger = self.engine.find_extension(Ledger)
        assert ledger is not None       # the gate is in integrated mode
        sink, comparison = open_sink(allow_slow_reads(self.engine.settings)), Compared()
        try:
            for tenant_id in await self.engine.backend.tenants():
                await TenantComparison(self.engine, ledger, sink, tenant_id, comparison).run()
        finally:
            await sink.close()
        ledger.last_comparison = wire.LedgerComparison(
            to_utc(self.engine.backend.now()), comparison.receipts, comparison.sent_again, dict(comparison.differences))
        return comparison.sent_again


class TenantComparison:
    """Compares one tenant with the ledger, in one round."""

    def __init__(self, engine: Engine, ledger: Ledger, sink: Any, tenant_id: str, comparison: Compared) -> None:
        self.engine, self.backend, self.ledger, self.sink, self.tenant_id = (
            engine, engine.backend, ledger, sink, tenant_id)
        self.settled_at = self.backend.now() - SETTLED_SECONDS
        self.own = Compared()
        self.counts = self.own, comparison, ledger.compared      # of this tenant, of this round, since the start
        self.named: list[reconcile.Difference] = []
        self.places = dict[str, str | None]()   # in the ledger's list of the receipts of each instance
        self.listed = set[str]()                # instances whose list was read to its end

    async def run(self) -> None:
        """Compare page by page; then tell what differs, also when the round is interrupted."""
        try:
            await (self._compare_receipts() if self.sink.reads else self._compare_tasks())
        finally:
            if self.own.differences:
                await self._tell()

    async def _compare_receipts(self) -> None:
        """Compare the receipts of a gate that keeps only skeletons."""
        collected = Collected()
        try:
            every = queries.ReceiptFilter(None, None, None, None, RECEIPTS_PER_LOOK, settled=False)
            async for page in walk(self.backend, self.tenant_id, every):
                await self._compare_page([receipt for receipt in page if receipt.created_at <= self.settled_at],
                                         collected)
                for receipt in page:
                    collected.forget(receipt.receipt_id)
                if collected.count() > MOST_AHEAD:      # of receipts that are not here, or will be fetched one by one
                    collected.close()
                    collected = Collected()
        finally:
            collected.close()

    async def _compare_page(self, page: list[stored.Receipt], collected: Collected) -> None:
        with closing(reconcile.Findings()) as findings:
            await self._collect(page, collected)
            comparison = reconcile.Comparison(self.backend, self.sink, self.tenant_id, set(), collected, findings,
                                              count_none)
            comparison.stated = await self._list_stated(page)
            await comparison.compare_page(page)
            await self._check_ends(page, findings)
            await self._settle(findings, collected, len(page))

    async def _compare_tasks(self) -> None:
        """Compare task by task with a ledger that cannot list all receipts; here the receipts are whole."""
        async for page in walk(self.backend, self.tenant_id, queries.Rows(stored.Task, limit=TASKS_PER_LOOK)):
            with closing(reconcile.Findings()) as findings:
                for task in (row for row in page if row.updated_at <= self.settled_at):
                    await self._compare_task(task, findings)
                await self._settle(findings, None, findings.receipts)

    async def _compare_task(self, task: stored.Task, findings: reconcile.Findings) -> None:
        """Compare one task; look twice before something counts, because the sender may deliver between two reads."""
        with closing(reconcile.Findings()) as first:
            await GateComparison(self.backend, self.sink, self.tenant_id, first, count_none).compare_task(task)
            if not first.counts.keys() - TOLD_ELSEWHERE:
                findings.receipts += first.receipts
                return
        await asyncio.sleep(READ_PAUSE_SECONDS)
        await GateComparison(self.backend, self.sink, self.tenant_id, findings, count_none).compare_task(task)

    async def _collect(self, page: list[stored.Receipt], collected: Collected) -> None:
        """Read from the ledger the receipts of a page, and all of the tasks of those that it lacks.

        Order: the outbox is read before the ledger.  What has left it by then is at the ledger.
        """
        ids = tuple(receipt.receipt_id for receipt in page)
        waiting = {row.receipt_id for row in await self.backend.page(self.tenant_id, queries.OutboxOf(ids))}
        sent = {receipt.receipt_id: receipt for receipt in page if receipt.receipt_id not in waiting
                and not reconcile.is_erased(receipt)}
        await self._read_ahead(sent, collected)
        there = collected.get(sent)
        if left := [id for id in sent if id not in there]:
            collected.add([as_stored(receipt)
                           for receipt in await retry_read(lambda: self.sink.fetch(self.tenant_id, left))])
            there = collected.get(left) | there
        for task_id in {receipt.task_id for id, receipt in sent.items() if id not in there} - {""}:
            of = queries.EntryFilter(None, task_id, None, None, None, RECEIPTS_PER_COPY)
            theirs = await retry_read(partial(self.sink.page, self.tenant_id, of))
            collected.add([as_stored(receipt) for receipt in theirs.receipts])

    async def _read_ahead(self, sent: dict[str, stored.Receipt], collected: Collected) -> None:
        """Read the ledger's list in step with the gate's, so that one call finds many receipts.

        Both lists are in the order of time, but not exactly; what is not found in this way is fetched by its id.
        """
        for instance in {receipt.asyncgate_instance for receipt in sent.values()}:
            wanted = [id for id, receipt in sent.items() if receipt.asyncgate_instance == instance]
            for _ in range(READS_AHEAD):
                before = self.places.get(instance)
                if len(collected.get(wanted)) == len(wanted) or instance in self.listed:
                    break
                of = queries.EntryFilter(None, None, None, instance, before, RECEIPTS_PER_COPY)
                listed = await retry_read(partial(self.sink.page, self.tenant_id, of))
                collected.add([as_stored(receipt) for receipt in listed.receipts])
                self.places[instance] = listed.cursor
                if listed.cursor in (None, before):
                    self.listed.add(instance)

    async def _list_stated(self, page: Iterable[stored.Receipt]) -> dict[str, str]:
        """Return the ids at the ledger of ends that workers stated there themselves, by their ids here."""
        marks = dict[str, str]()
        for receipt in page:
            if receipt.receipt_type in reconcile.STATED_TYPES and (mark := await self.backend.record(
                    self.tenant_id, stored.LedgerMark, STATED_PREFIX + receipt.receipt_id)) is not None:
                marks[receipt.receipt_id] = mark.receipt_id
        return marks

    async def _check_ends(self, page: Iterable[stored.Receipt], findings: reconcile.Findings) -> None:
        """Check that each task that has ended also has a receipt of its end; whether the ledger has it is compared."""
        for duty in page:
            if duty.receipt_type != ASSIGNED.type:
                continue
            snapshot = await self.backend.task(self.tenant_id, duty.task_id)
            if snapshot is None or snapshot[0].status not in stored.TERMINAL:
                continue
            receipts = await reconcile.list_known_receipts(self.backend, self.tenant_id, duty.task_id)
            if not any(ENDING_STATUSES.get(receipt.receipt_type) == snapshot[0].status for receipt in receipts):
                findings.add("end_unproven", self.tenant_id, f"the task is {snapshot[0].status}, and no receipt of the "
                             "gate states that", None, duty.task_id)

    # What follows.

    async def _settle(self, findings: reconcile.Findings, collected: Collected | None, receipts: int) -> None:
        """Count what was compared, and send again what the ledger lacks; raises Interrupted."""
        real = [finding for finding in findings.all() if finding.kind not in TOLD_ELSEWHERE
                and await self._is_current(finding)]
        for difference in real:
            log.log(logging.WARNING if len(self.named) < NAMED_PER_TENANT else logging.DEBUG,
                    "gate and ledger differ: %s tenant=%s task=%s receipt=%s: %s", difference.kind, self.tenant_id,
                    difference.task_id, difference.receipt_id, difference.detail)
            self.named += [difference] if len(self.named) < NAMED_PER_TENANT else []
        for count in self.counts:
            count.receipts += receipts
            count.differences.update(difference.kind for difference in real)
        await self._send_again(real, collected)
        await asyncio.sleep(PAUSE_SECONDS)
        if not await self.engine.leads(JOB):
            raise Interrupted("another process does it")
        most = self.engine.settings.ledger.emission_retry.buffer_size
        if real and (await self.backend.lag(self.tenant_id)).waiting > most:
            raise Interrupted(f"more than {most} receipts wait for the ledger")

    async def _is_current(self, difference: reconcile.Difference) -> bool:
        """Whether the receipt of a difference is still here as it was: it may have been pruned or erased since."""
        if not difference.receipt_id or difference.kind in ("never_granted", "ended_there"):
            return True
        receipt = await self.backend.receipt(self.tenant_id, difference.receipt_id)
        return receipt is not None and not reconcile.is_erased(receipt)

    async def _send_again(self, differences: list[reconcile.Difference], collected: Collected | None) -> None:
        """Put what the ledger lacks into the outbox, with its body from here, or restored from its task."""
        lost = [difference for difference in differences if difference.kind == "lost_by_ledger"]
        bodies = dict[str, str]()
        if collected is not None:
            pairs = [(difference.task_id, difference.receipt_id) for difference in lost]
            bodies = await restore_bodies(self.backend, self.tenant_id, pairs, collected)
        again = [difference for difference in differences if difference.kind == "missing_at_ledger"]
        again += [difference for difference in lost if difference.receipt_id in bodies]
        if not again:
            return
        await resend(self.engine, self.ledger.sink, self.tenant_id, again, bodies)
        for count in self.counts:
            count.sent_again += len(again)
        self.ledger.sender.call(self.tenant_id)

    async def _tell(self) -> None:
        """Write one line of the audit log about the tenant's differences."""
        severity: Any = "critical" if self.own.differences["tampered"] else "warning"
        named = [f"{difference.kind} {difference.receipt_id or difference.task_id}" for difference in self.named]

        def write(work: Work) -> None:
            audit_change(self.engine, work, "ledger_differs", severity, self.engine.make_own_caller(self.tenant_id),
                         differences=dict(self.own.differences), sent_again=self.own.sent_again, named=named)
        await self.engine.change(self.tenant_id, write, (stored.AuditHead, ()))


def count_none(count: int) -> None:
    """Count nothing: nobody watches."""
