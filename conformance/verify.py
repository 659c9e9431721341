"""Verify a database: its tasks, leases and obligations must follow from its receipts, the evidence.

Each line of a tenant's audit log must have a valid hash, which covers the line and its predecessor.

It reads every row once, page by page, and keeps only ids and a few facts of each task.  It also works beside a running
server: a problem counts only if it is found twice, because a change between two pages can look like a problem once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from itertools import accumulate
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from asyncgate import DISCHARGING, TERMINATES, receipt_hash
from asyncgate.conformance.history import ENDING_RECEIPTS
from asyncgate.conformance.verify_erasures import find_false_erasure, read_erased
from asyncgate.parts.identity.audit import find_break, last_pruned
from asyncgate.parts.model import queries, stored, wire
from asyncgate.parts.model.counted import place_of
from asyncgate.parts.model.database import FileBackend
from asyncgate.parts.model.erased import is_erased_line, place_of_row, read_note
from asyncgate.parts.model.walking import walk
from asyncgate.parts.operating.queues import write_queue_id
from asyncgate.parts.receipts.incoming import discharges
from asyncgate.parts.receipts.ledger_marks import list_adopted

MOST = 1000     # at most this many problems are reported

Row = TypeVar("Row", bound=Struct)
Told = Callable[[int], None]


class Verdict(Struct):
    """The result: counts and problems."""

    tasks: int = 0
    receipts: int = 0
    created: int = 0            # obligations ever opened
    open: int = 0
    discharged: int = 0
    audited: int = 0            # lines of audit logs
    archived: int = 0           # archived receipts
    problems: list[str] = []

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


class Facts(Struct, gc=False):
    """The facts of a task that are kept until all its receipts have been read."""

    status: str
    duty: str
    fence: int
    owed: bool
    leased: bool = False
    assigned: int = 0
    accepted: int = 0
    result_ready: bool = False
    ended_by: str = ""          # types of its terminal receipts
    linked: bool = False        # whether one of them names the duty
    skipped: tuple[int, ...] = ()   # fences, by moves, oldest first

    def fences(self) -> set[int]:
        """Return the allowed fences of the newest lease: the task's fence, or the one before the latest moves."""
        return {self.fence - skipped for skipped in accumulate(reversed(self.skipped), initial=0)}


# the tables that are read
READ = (stored.Task, stored.Event, stored.Lease, stored.Receipt, stored.Archived, stored.Obligation, stored.Audit)


async def verify(backend: Any, *, progress: Told | None = None) -> Verdict:
    """Check everything in a database; `progress` is called with the number of rows read."""
    verdict = await _once(backend, progress)
    if verdict.problems:
        again = await _once(backend, progress)
        again.problems = [problem for problem in again.problems if problem in set(verdict.problems)]
        return again
    return verdict


async def _once(backend: Any, progress: Told | None) -> Verdict:
    verdict = Verdict()
    if isinstance(backend, FileBackend):
        verdict.problems += [f"the database file: {problem}" for problem in await backend.check()]
    read = 0
    for tenant_id in await backend.tenants():
        tenant = Tenant(backend, tenant_id, verdict)
        try:
            async for count in tenant.checked():
                read += count
                if progress is not None:
                    progress(read)
        except Exception as unreadable:     # a damaged file must not hide earlier findings
            verdict.problems.append(f"tenant {tenant_id} cannot be read completely: {unreadable}")
    del verdict.problems[MOST:]
    return verdict


class Tenant:
    """The rows of one tenant, and the facts known so far."""

    def __init__(self, backend: Any, tenant_id: str, verdict: Verdict) -> None:
        self.backend, self.tenant_id, self.verdict = backend, tenant_id, verdict
        self.tasks: dict[str, Facts] = {}
        self.receipts: set[str] = set()
        self.open: dict[str, stored.Receipt] = {}                  # undischarged obligations, without their bodies
        self.done: dict[str, str] = {}                      # types of the discharged ones
        self.early: dict[str, list[stored.Receipt]] = {}           # parents not read yet, and their children
        self.created = 0
        self.away: set[str] = set()                         # archived receipts
        self.settled: set[str] = set()                      # their tasks
        self.erased: dict[tuple[str, str], stored.Erased] = {}     # rows without their content
        self.queues: dict[int, list[int]] = {}              # by lane, its tasks: queued, on hold, leased

    async def checked(self) -> AsyncIterator[int]:
        """Check all data of the tenant; yield the number of rows of each page."""
        index: dict[str, wire.Principal] = {}
        counted = await self._read_queues()
        self.erased, problems = await read_erased(self.backend, self.tenant_id)
        for problem in problems:
            self._wrong(f"tenant {self.tenant_id}: {problem}")
        looks: tuple[tuple[type[Struct], Callable[[Any], None]], ...] = (
            (stored.Task, self._task), (stored.Event, self._event), (stored.Lease, self._lease),
            (stored.Receipt, self._receipt))
        for table, look in looks:
            async for page in self._pages(table):
                for row in page:
                    look(row)
                yield len(page)
            if table is stored.Task:
                self._check_queues(counted, await self._read_queues())
        async for pointers in self._pages(stored.Archived):
            self._archived(pointers)
            yield len(pointers)
        async for obligations in self._pages(stored.Obligation):
            index.update({row.receipt_id: wire.Principal(row.to_kind, row.to_id) for row in obligations})
            yield len(obligations)
        async for count in self._audit():
            yield count
        self._parents(await list_adopted(self.backend, self.tenant_id))
        self._obligations(index)
        for task_id, facts in self.tasks.items():
            self._ended(task_id, facts)
        self._count(len(index))

    async def _read_queues(self) -> dict[int, stored.Queue]:
        queues, after = dict[int, stored.Queue](), None
        while page := await self.backend.page(self.tenant_id, queries.QueueFilter(None, None, after, 1000)):
            queues.update((row.lane, row) for row in page)
            after = page[-1].type, page[-1].lane
        return queues

    def _check_queues(self, before: dict[int, stored.Queue], after: dict[int, stored.Queue]) -> None:
        """Check what is counted of each lane, unless it moved while the tasks were read."""
        for lane in before.keys() | after.keys() | self.queues.keys():
            counted, again = (numbers_of(rows.get(lane)) for rows in (before, after))
            if counted == again != (there := self.queues.get(lane, [0, 0, 0])):
                self._wrong(f"tenant {self.tenant_id}: the queue {write_queue_id(lane)} counts {describe(counted)}, "
                            f"but its tasks are {describe(there)}")

    def _archived(self, pointers: list[stored.Archived]) -> None:
        """Check that an archived receipt is not also in its table; its obligations were settled before it moved."""
        self.verdict.archived += len(pointers)
        for pointer in pointers:
            self.away.add(pointer.receipt_id)
            self.settled.add(pointer.task_id)
            if pointer.receipt_id in self.receipts:
                self._wrong(f"receipt {pointer.receipt_id} is in its table and in the archive")

    async def _audit(self) -> AsyncIterator[int]:
        """Check the chain; continue after an invalid line, so that every one is reported."""
        end, first, begin = stored.AuditHead(0, ""), None, None
        async for lines in self._pages(stored.Audit):
            for line in lines:
                first, begin = first or line, last_pruned(line) or begin
                if line is first and line.number > 1:
                    pass        # its predecessor was removed; a later line, covered by the chain, records that
                elif problem := find_break([line], end):
                    self._wrong(f"tenant {self.tenant_id}: {problem}")
                if is_erased_line(line):
                    self._note(line)
                end = stored.AuditHead(line.number, line.hash)
            self.verdict.audited += len(lines)
            yield len(lines)
        if first and first.number > 1 and (begin is None or find_break([first], begin)):
            self._wrong(f"tenant {self.tenant_id}: line 1 of the audit log is missing: {first.audit_id} is number "
                        f"{first.number}, and no line records that the earlier ones were pruned")
        head = await self.backend.record(self.tenant_id, stored.AuditHead) or stored.AuditHead(0, "")
        if head != end:
            self._wrong(f"tenant {self.tenant_id}: the audit log ends with line {end.number}, {end.hash[:16]}, "
                        f"but line {head.number}, {head.hash[:16]}, was the last one written")

    def _pages(self, table: type[Row]) -> AsyncIterator[list[Row]]:
        return walk(self.backend, self.tenant_id, queries.Rows(table))

    def _wrong(self, problem: str) -> None:
        self.verdict.problems.append(problem)

    # Row by row.

    def _task(self, task: stored.Task) -> None:
        if (place := place_of(task)) is not None:
            self.queues.setdefault(task.lane, [0, 0, 0])[place] += 1
        self.tasks[task.task_id] = Facts(task.status, task.duty, task.fence, bool(task.owed))

    def _event(self, event: stored.Event) -> None:
        if (facts := self.tasks.get(event.task_id)) is None:
            return self._wrong(f"event {event.event_id} ({event.event_type}) belongs to task {event.task_id}, which "
                               "does not exist")
        if skipped := stored.fences_skipped(event):
            facts.skipped += (skipped,)

    def _lease(self, lease: stored.Lease) -> None:
        if (facts := self.tasks.get(lease.task_id)) is None:
            return self._wrong(f"lease {lease.lease_id} belongs to task {lease.task_id}, which does not exist")
        facts.leased = True
        live = lease.ending == "live"
        if live != (facts.status in stored.ACTIVE):
            self._wrong(f"task {lease.task_id} is {facts.status}, but its lease {lease.lease_id} is "
                        f"{'live' if live else lease.ending}")
        if lease.fence not in facts.fences():
            self._wrong(f"task {lease.task_id} has fence {facts.fence}, "
                        f"but its lease {lease.lease_id} has {lease.fence}")

    def _receipt(self, receipt: stored.Receipt) -> None:
        self.receipts.add(receipt.receipt_id)
        if read_note(receipt.body) is not None:
            self._note(receipt)
        elif receipt.body and hash_of(receipt) != receipt.hash and (
                place_of_row(receipt) not in self.erased):      # the ledger has the body of a skeleton
            self._wrong(f"receipt {receipt.receipt_id} ({receipt.receipt_type}) does not match its hash")
        for parent in receipt.parents:
            if parent not in self.receipts:
                self.early.setdefault(parent, []).append(strip_body(receipt))
        if receipt.receipt_type in TERMINATES:
            self._opens(strip_body(receipt))
        if receipt.receipt_type in DISCHARGING:
            for parent in receipt.parents:
                self._discharges(parent, receipt)
        if facts := self.tasks.get(receipt.task_id):
            self._of_task(facts, receipt)

    def _note(self, row: stored.Receipt | stored.Audit) -> None:
        """Check that a row that says that it was erased is on the list of its erasure, and otherwise as it was."""
        if (problem := find_false_erasure(self.erased, row)) is not None:
            self._wrong(f"tenant {self.tenant_id}: {problem}")

    def _opens(self, receipt: stored.Receipt) -> None:
        self.created += 1
        self.open[receipt.receipt_id] = receipt
        for child in self.early.get(receipt.receipt_id, ()):
            self._discharges(receipt.receipt_id, child)

    def _discharges(self, parent: str, child: stored.Receipt) -> None:
        """Note that a receipt discharges an obligation: its own, and only once (PH.1.3)."""
        opened = self.open.get(parent)
        if opened and discharges(child, opened):
            del self.open[parent]
            self.done[parent] = opened.receipt_type
        elif opened and child.receipt_type in TERMINATES[opened.receipt_type]:
            self._wrong(f"receipt {child.receipt_id} ({child.receipt_type}) of {name_subject(child)} names as its "
                        f"parent {parent}, which is the obligation of {name_subject(opened)}")
        elif child.receipt_type in TERMINATES.get(self.done.get(parent, ""), ()):
            self._wrong(f"obligation {parent} is discharged already, and receipt {child.receipt_id} "
                        f"({child.receipt_type}) of {name_subject(child)} discharges it again")

    def _of_task(self, facts: Facts, receipt: stored.Receipt) -> None:
        type = receipt.receipt_type
        facts.assigned += type == "task.assigned"
        facts.accepted += type == "task.accepted"
        facts.result_ready |= type == "task.result_ready"
        linked = facts.duty in receipt.parents
        # A failure that was requeued ends nothing.
        if type == "task.completed" or (type in ENDING_RECEIPTS.values() and linked):
            facts.ended_by += f" {type}"
            facts.linked |= linked
        if type == "task.assigned" and receipt.receipt_id != facts.duty:
            self._wrong(f"task {receipt.task_id} names {facts.duty} as its duty, but its task.assigned is "
                        f"{receipt.receipt_id}")

    # After all rows have been read.

    def _parents(self, stated: Mapping[str, str]) -> None:
        missing = self.early.keys() - self.receipts - self.away - stated.keys()
        for parent in sorted(missing):
            self._wrong(f"receipt {parent} does not exist, but another names it as its parent")

    def _obligations(self, index: dict[str, wire.Principal]) -> None:
        for receipt_id, opened in self.open.items():
            type, to = opened.receipt_type, opened.to
            if receipt_id not in index:
                self._wrong(f"obligation {receipt_id} ({type}) is open by the evidence, but the index does not have it")
            elif not index[receipt_id].same(to):
                self._wrong(f"obligation {receipt_id} is owed to {to}, but the index says {index[receipt_id]}")
        for receipt_id in index.keys() - self.open.keys():
            known = receipt_id in self.receipts
            why = "it is discharged by the evidence, or is not an obligation" if known else "no such receipt exists"
            self._wrong(f"obligation {receipt_id} is in the index, but {why}")

    def _ended(self, task_id: str, facts: Facts) -> None:
        if task_id in self.settled and not facts.assigned:
            if facts.status not in stored.TERMINAL or facts.owed:
                self._wrong(f"task {task_id} is {facts.status}{' and owed' * facts.owed}, but its receipts are in the "
                            "archive")
            return
        if facts.assigned != 1:
            self._wrong(f"task {task_id} has {facts.assigned} receipts task.assigned instead of one")
        if facts.accepted != (leased := facts.fence - sum(facts.skipped)):
            self._wrong(f"task {task_id} was leased {leased} times, "
                        f"but has {facts.accepted} receipts task.accepted")
        if facts.status in stored.ACTIVE and not facts.leased:
            self._wrong(f"task {task_id} is {facts.status}, but has no lease")
        if facts.owed != (facts.duty in self.open):
            says = "still owed" if facts.owed else "discharged"
            self._wrong(f"task {task_id} says that its duty is {says}, but the evidence differs")
        if facts.status in stored.TERMINAL:
            self._terminal(task_id, facts)
        elif facts.ended_by:
            self._wrong(f"task {task_id} is {facts.status}, but has a receipt{facts.ended_by}")

    def _terminal(self, task_id: str, facts: Facts) -> None:
        ended_by = set(facts.ended_by.split())
        if ended_by != {ENDING_RECEIPTS[facts.status]}:
            has = " and ".join(sorted(ended_by)) or "no terminal receipt"
            self._wrong(f"task {task_id} is {facts.status}, but has {has}")
        if not facts.result_ready:
            self._wrong(f"task {task_id} is {facts.status}, but has no receipt task.result_ready")
        if not facts.owed and not facts.linked:
            self._wrong(f"task {task_id} owes nothing, but no terminal receipt names its duty as a parent")

    def _count(self, indexed: int) -> None:
        discharged = self.created - len(self.open)
        total = self.verdict
        total.tasks, total.receipts = total.tasks + len(self.tasks), total.receipts + len(self.receipts)
        total.created, total.open, total.discharged = (
            total.created + self.created, total.open + indexed, total.discharged + discharged)
        if self.created != indexed + discharged:
            self._wrong(f"tenant {self.tenant_id}: {self.created} obligations were created, but {indexed} open and "
                        f"{discharged} discharged ones are {indexed + discharged}")


def numbers_of(row: stored.Queue | None) -> list[int]:
    """Return what is counted of a lane; one without a row has nothing."""
    return [row.queued, row.held, row.leased] if row else [0, 0, 0]


def describe(numbers: list[int]) -> str:
    """Say how many tasks of each kind there are."""
    return "{} queued, {} on hold and {} leased".format(*numbers)


def strip_body(receipt: stored.Receipt) -> stored.Receipt:
    """Return a receipt without its body, which may be large, unless it is only the note that it was erased."""
    return receipt if read_note(receipt.body) is not None else replace(receipt, body="")


def name_subject(receipt: stored.Receipt) -> str:
    """Say what a receipt is about."""
    return f"schedule {receipt.schedule_id}" if receipt.schedule_id else f"task {receipt.task_id}"


def hash_of(receipt: stored.Receipt) -> str:
    """Return the hash of a receipt's contents."""
    return receipt_hash(receipt.receipt_type, receipt.sender, receipt.to, receipt.task_id, receipt.lease_id,
                        receipt.schedule_id, receipt.parents, receipt.body.encode())
