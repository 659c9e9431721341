"""Compare a gate with its ledger, and name the repair of each difference: the work of `asyncgate reconcile`.

The rules: if the ledger cannot be read to its end, nothing changes.  The ledger decides about receipts, the gate about
everything else (H.12).  A repair never writes a receipt: it sends an existing one again, byte for byte, or takes over
one from the ledger.  An obligation whose task is not here is reported; no task is made for it.  A lease without
task.accepted in the ledger is ended.  Different content under the same id is tampering, which nothing repairs.

A difference counts only if a second read still shows it, so a gate may serve while it is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncgate import ACCEPTED, ASSIGNED, CANCELED, COMPLETED, EXPIRED, FAILED, RESULT_READY, TERMINATES
from asyncgate.extras.ledger.collected import (
    Collected,
    CountCopied,
    TemporaryFile,
    as_stored,
    collect_from_ledger,
    is_sound,
    retry_read,
)
from asyncgate.extras.ledger.restated import list_overtaken, list_ready, story_of
from asyncgate.parts.model import queries, stored
from asyncgate.parts.model.erased import PSEUDONYM, read_note
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.model.walking import walk, walk_rows
from asyncgate.parts.receipts.incoming import computed_hash
from asyncgate.parts.receipts.ledger_marks import list_adopted

if TYPE_CHECKING:
    from asyncgate.backends import Backend
    from asyncgate.extras.ledger.sinks import Sink

STEPS = {ACCEPTED.type, COMPLETED.type, FAILED.type, CANCELED.type, EXPIRED.type, RESULT_READY.type}
STATED_TYPES = {COMPLETED.type, FAILED.type}      # what workers may write to the ledger themselves
FACTS = ("receipt_key", "receipt_type", "sender", "to", "task_id", "lease_id", "schedule_id", "asyncgate_instance",
         "parents", "hash")
OF_A_STATEMENT = ("receipt_type", "sender", "task_id", "lease_id")      # compared of a worker's own, without key


T = TypeVar("T", bound=Struct)
Mend = Callable[[str, Collected | None, "Findings"], Awaitable[None]]


class Kind(Struct, frozen=True):
    """One kind of difference: how to repair it, and whether --repair does."""

    cure: str
    repair: bool = False
    harmless: bool = False      # it is reported, and nothing is wrong


KINDS = {
    "missing_at_ledger": Kind("send it again, by its key; --repair does", repair=True),
    "parked": Kind("make the ledger accept it; then --repair sends it again", repair=True),
    "lost_by_ledger": Kind("serve the gate: it sends it again if its task still tells what it said; else restore the "
                           "ledger's backup; here only its hash is left, which proves its content"),
    "end_unproven": Kind("none: `asyncgate verify` tells what else is wrong with the task; restore a backup"),
    "tampered": Kind("find out who changed it, and restore the ledger's backup; no command repairs it"),
    "ended_at_ledger": Kind("take over the end of the task from the ledger; --repair does", repair=True),
    "lease_ended_at_ledger": Kind("take over the end of the lease from the ledger; --repair does", repair=True),
    "lease_unbacked": Kind("end the lease, so that the task is offered again; --repair does", repair=True),
    "not_committed": Kind("take over the receipts that only the ledger has; --repair does", repair=True),
    "ended_otherwise": Kind("none: a task ends once, and the gate decides how (H.12); tell those who read the ledger"),
    "half_stated": Kind("none here: the ledger has a part of the step; the worker's next call, or the end of its "
                        "lease, decides how the task goes on"),
    "obligation_unknown": Kind("none here: no task is made for it; `asyncgate rebuild` makes one in an empty "
                               "database, or the creditor creates the task again"),
    "stated_by_worker": Kind("none needed: the gate checks it while it serves, and tells the owner if it rejects it"),
    "never_granted": Kind("undo the acceptance at the ledger, because no lease was granted; --repair does",
                          repair=True),
    "ended_there": Kind("adopt the end from the ledger: --repair notes it, and the gate does when it serves, if the "
                        "task still is as it was then", repair=True),
    "state": Kind("`asyncgate verify` tells more; restore a backup, or run `asyncgate rebuild`"),
    "ended_twice": Kind("tell those who read the ledger that this end did not count: the other one has a "
                        "task.result_ready; --repair does", repair=True),
    "stated_twice": Kind("none needed: an earlier attempt failed, and a later one counts", harmless=True),
    "overtaken": Kind("none needed: the change did not count, and the task went on", harmless=True),
}


class Difference(Struct, omit_defaults=True):
    """One difference between the gate and the ledger."""

    kind: str
    tenant_id: str
    detail: str
    receipt_id: str = ""
    task_id: str = ""
    cure: str = ""


class Findings(TemporaryFile):
    """All differences: there may be as many as receipts."""

    def __init__(self) -> None:
        super().__init__("CREATE TABLE found (tenant_id TEXT, kind TEXT, content BLOB);"
                         "CREATE INDEX by_kind ON found (tenant_id, kind)")
        self.counts: Counter[str] = Counter()
        self.receipts = self.tasks = self.waiting = self.foreign = 0

    def add(self, kind: str, tenant_id: str, detail: str, receipt: stored.Receipt | None = None, task_id: str = "",
            receipt_id: str = "") -> None:
        """Add a difference."""
        self.counts[kind] += 1
        difference = Difference(kind, tenant_id, detail, receipt_id or (receipt.receipt_id if receipt else ""),
                                task_id or (receipt.task_id if receipt else ""), KINDS[kind].cure)
        self.file.execute("INSERT INTO found VALUES (?, ?, ?)", (tenant_id, kind, msgspec.json.encode(difference)))

    def all(self) -> Iterator[Difference]:
        """Yield all differences."""
        return self._rows("")

    def of(self, tenant_id: str, *kinds: str) -> Iterator[Difference]:
        """Yield a tenant's differences of some kinds."""
        return self._rows(f"AND tenant_id = ? AND kind IN ({', '.join('?' * len(kinds))})", tenant_id, *kinds)

    def _rows(self, which: str, *values: str) -> Iterator[Difference]:
        rows = self.walk(f"SELECT rowid, content FROM found WHERE rowid > ? {which} ORDER BY rowid", 0, *values)
        return (msgspec.json.decode(content, type=Difference) for content in rows)

    @property
    def wrong(self) -> int:
        """Return how many differences are not harmless."""
        return sum(count for kind, count in self.counts.items() if not KINDS[kind].harmless)


async def compare_all(backend: Backend, sink: Sink, instances: Iterable[str], count: CountCopied,
                      tenants: Iterable[str] = (), mend: Mend | None = None,
                      kept: dict[str, Collected] | None = None) -> Findings:
    """Compare some tenants, or all; raises Unreadable.

    `mend` is called for a tenant only after the whole comparison of that tenant.  `kept` gets the receipts of the
    ledger, which are deleted otherwise.
    """
    findings = Findings()
    try:
        for tenant_id in list(tenants) or await backend.tenants():
            if not sink.reads:      # such a ledger lists the receipts of one task, but not all receipts
                from asyncgate.extras.ledger import reconcile_receiptgate as part
                await part.GateComparison(backend, sink, tenant_id, findings, count).run()
                if mend is not None:
                    await mend(tenant_id, None, findings)
                continue
            collected = await collect_from_ledger(sink, tenant_id, count)
            try:
                await Comparison(backend, sink, tenant_id, set(instances), collected, findings, count).run()
                if mend is not None:
                    await mend(tenant_id, collected, findings)
            finally:
                collected.close() if kept is None else kept.update({tenant_id: collected})
    except BaseException:
        findings.close()
        raise
    return findings


class Comparison:
    """Compares one tenant of the gate with the ledger."""

    def __init__(self, backend: Backend, sink: Sink, tenant_id: str, instances: set[str], collected: Collected,
                 findings: Findings, count: CountCopied) -> None:
        self.backend, self.sink, self.tenant_id, self.collected = backend, sink, tenant_id, collected
        self.instances, self.findings, self.count = instances, findings, count
        self.stated = dict[str, str]()      # ids of workers' own statements at the ledger, by the gate's ids of these

    async def run(self) -> None:
        """Search the ledger for each receipt of the gate, then the gate for each receipt of the ledger."""
        self.stated = {ours: theirs for theirs, ours in (await list_adopted(self.backend, self.tenant_id)).items()}
        async for row in walk_rows(self.backend, self.tenant_id, queries.OutboxFilter("", 500, "offered")):
            self.collected.forget(row.receipt_id)       # a strict gate settles it by itself when it serves
            self.findings.waiting += 1
        async for page in self._pages(stored.Receipt):
            await self.compare_page(page)
            self.findings.receipts += len(page)
            self.count(len(page))
        async for pointers in self._pages(stored.Archived):    # they may be older than the ledger, or were pushed to it
            ids = [pointer.receipt_id for pointer in pointers]
            self.collected.know(ids)
            for theirs in self.collected.get(ids).values():
                if not is_sound(theirs):
                    self._found("tampered", f"the hash of the {theirs.receipt_type} at the ledger does not match its "
                                "content; here the receipt is in the archive", theirs)
        await self._leases()
        await self._there()

    def _pages(self, table: type[T]) -> AsyncIterator[list[T]]:
        return walk(self.backend, self.tenant_id, queries.Rows(table))

    def _found(self, kind: str, detail: str, receipt: stored.Receipt | None = None, task_id: str = "") -> None:
        self.findings.add(kind, self.tenant_id, detail, receipt, task_id)

    # Receipts of the gate.

    async def compare_page(self, page: list[stored.Receipt]) -> None:
        """Search the ledger for some receipts of the gate."""
        self.instances.update(row.asyncgate_instance for row in page)
        ids = [row.receipt_id for row in page]
        outbox = {row.receipt_id: row for row in await self.backend.page(self.tenant_id, queries.OutboxOf(tuple(ids)))}
        there = [self.stated.get(id, id) for id in ids]     # a worker's statement may have another id at the ledger
        theirs = self.collected.get(there)
        # may have arrived since
        if late := [receipt_id for receipt_id in there if receipt_id not in theirs and receipt_id not in outbox]:
            receipts = await retry_read(lambda: self.sink.fetch(self.tenant_id, late))
            self.collected.add([as_stored(row) for row in receipts])
            theirs |= self.collected.get(late)
        self.collected.know(there)
        for receipt, id in zip(page, there, strict=True):
            await self._one(receipt, outbox.get(receipt.receipt_id), theirs.get(id))

    async def _one(self, receipt: stored.Receipt, row: stored.Outgoing | None, theirs: stored.Receipt | None) -> None:
        if is_erased(receipt) and (theirs is not None or not receipt.body):
            return      # the ledger has the content, until an erasure there takes it and the receipt's id
        if theirs is not None:
            if wrong := differing_facts(receipt, theirs):
                self._found("tampered", f"the {receipt.receipt_type} at the ledger differs in {', '.join(wrong)}",
                            receipt)
            elif row is not None and row.state == "parked":
                self._found("parked", f"the ledger refused the {receipt.receipt_type}, but has it now", receipt)
        elif row is not None and row.state == "waiting":
            self.findings.waiting += 1
        elif receipt.receipt_type == ACCEPTED.type and self._accepted_itself(receipt):
            return
        elif row is not None:
            self._found("parked", f"the ledger refuses the {receipt.receipt_type}: {row.reason}", receipt)
        else:
            kind = "missing_at_ledger" if receipt.body else "lost_by_ledger"
            owes = " and counts an obligation as open" if receipt.parents and receipt.receipt_type in DUTY_ENDS else ""
            self._found(kind, f"the ledger does not have the {receipt.receipt_type}{owes}", receipt)

    def _accepted_itself(self, receipt: stored.Receipt) -> bool:
        """Whether the worker has stated its acceptance in the ledger itself, as the lease protocol allows."""
        return any(other.receipt_type == ACCEPTED.type and not other.receipt_key and other.sender.same(receipt.sender)
                   and other.lease_id in (None, receipt.lease_id) for other in self.collected.of_task(receipt.task_id))

    async def _leases(self) -> None:
        """Check that the ledger has, or the outbox will deliver, the task.accepted of each live lease."""
        async for page in self._pages(stored.Lease):
            live = {lease.accepted: lease for lease in page if lease.ending == "live"}
            known = self.collected.get(live)
            outbox = {row.receipt_id for row in await self.backend.page(self.tenant_id, queries.OutboxOf(tuple(live)))}
            for receipt_id, lease in live.items():
                receipt = await self.backend.receipt(self.tenant_id, receipt_id)
                if receipt_id not in known and receipt_id not in outbox and not (receipt and receipt.body):
                    self._found("lease_unbacked", f"lease {lease.lease_id} of {lease.worker} is live here, but the "
                                "ledger has no task.accepted of it", receipt, lease.task_id)
            self.count(len(page))

    # Receipts of the ledger.

    async def _there(self) -> None:
        """Judge the receipts that only the ledger has: one by one, then together for each task."""
        for receipt in self.collected.unknown():
            if await self.backend.receipt(self.tenant_id, receipt.receipt_id) is None:
                await self._unknown(receipt)
            else:       # it was written while the pages were read
                self.collected.know([receipt.receipt_id])
        for task_id in self.collected.unknown_tasks():
            if (snapshot := await self.backend.task(self.tenant_id, task_id)) is not None:
                await self._behind(*snapshot[:2])

    async def _unknown(self, receipt: stored.Receipt) -> None:
        """Judge one receipt that only the ledger has; the receipts of a known task are also judged together."""
        task = await self.backend.task(self.tenant_id, receipt.task_id) if receipt.task_id else None
        if not (receipt.receipt_key and (receipt.asyncgate_instance in self.instances or task)):
            self.findings.foreign += 1
            if receipt.receipt_type in STATED_TYPES and not receipt.receipt_key and task and (
                    task[0].status not in stored.TERMINAL):
                self._found("stated_by_worker", f"{receipt.sender} states a {receipt.receipt_type} there, but the task "
                            f"is {task[0].status}", receipt)
        elif not is_sound(receipt):
            self._found("tampered", f"the ledger has a {receipt.receipt_type} that this gate never wrote, and its "
                        "hash does not match its content", receipt)
        elif receipt.receipt_type in TERMINATES and not self.collected.answered(receipt) and (
                task is None or receipt.receipt_type == ASSIGNED.type):
            self._found("obligation_unknown", f"the ledger has a {receipt.receipt_type} to {receipt.to} that no "
                        "receipt discharges, and this gate does not know it", receipt)

    async def _behind(self, task: stored.Task, lease: stored.Lease | None) -> None:
        """Judge the receipts of a task that only the ledger has."""
        behind = await find_behind(self.backend, self.tenant_id, self.collected, task)
        for receipt in behind.twice:
            self._found("stated_twice", f"the ledger has two {receipt.receipt_type} that state the same", receipt)
        for receipt in behind.unmade:
            self._found("ended_twice", f"the ledger has a {receipt.receipt_type} that did not count: another end of "
                        "the task has a task.result_ready", receipt)
        for receipt in behind.overtaken:
            self._found("overtaken", f"the ledger has a {receipt.receipt_type} that did not count here", receipt)
        if not behind.ahead:
            return
        names = ", ".join(f"{row.receipt_type} {row.receipt_id}" for row in behind.ahead)
        self._found(describe_lead(task, lease, behind), f"the task is {task.status}, but the ledger has {names}",
                    behind.ahead[0])


def describe_lead(task: stored.Task, lease: stored.Lease | None, behind: Behind) -> str:
    """Return the kind of difference when the ledger has newer receipts of a task than the gate."""
    story, over = story_of(behind.whole), task.status in stored.TERMINAL
    if over and (story.contradicts or story.status != task.status):
        return "ended_otherwise"
    if story.ends and story.unready:
        return "half_stated"
    if (story.ends and not over) or (task.owed and not story.owed):
        return "ended_at_ledger"
    if lease and task.status in stored.ACTIVE and any(receipt.lease_id == lease.lease_id for receipt in behind.ahead):
        return "lease_ended_at_ledger"
    return "not_committed"


DUTY_ENDS = TERMINATES[ASSIGNED.type]


def is_erased(receipt: stored.Receipt) -> bool:
    """Whether an erasure has changed a receipt, so that it cannot be compared any more."""
    return receipt.from_id.startswith(PSEUDONYM) or receipt.to_id.startswith(PSEUDONYM) or (
        read_note(receipt.body) is not None)


def differing_facts(ours: stored.Receipt, theirs: stored.Receipt) -> list[str]:
    """Name the fields in which the ledger's copy of a receipt differs."""
    names = FACTS if theirs.receipt_key else OF_A_STATEMENT
    wrong = [name for name in names if getattr(ours, name) != getattr(theirs, name)]
    if theirs.receipt_key and to_utc(ours.created_at) != to_utc(theirs.created_at):
        wrong.append("created_at")
    digest = computed_hash(replace(ours, body=theirs.body))
    body_fits = digest == ours.hash or (not theirs.receipt_key and theirs.hash == ours.hash)
    return wrong if body_fits else [*wrong, "body"]


class Behind(Struct):
    """The receipts of a task that only the ledger has."""

    whole: list[stored.Receipt]        # the gate's receipts and those to take over, oldest first, with bodies
    ahead: list[stored.Receipt]        # newer than all steps known here, and their parents are known: to take over
    overtaken: list[stored.Receipt]
    twice: list[stored.Receipt]
    unmade: list[stored.Receipt]       # ends that did not count


async def find_behind(backend: Backend, tenant_id: str, collected: Collected, task: stored.Task) -> Behind:
    """Sort the receipts of a task that only the ledger has."""
    here = await list_known_receipts(backend, tenant_id, task.task_id)
    known, keys = {receipt.receipt_id for receipt in here}, {receipt.receipt_key for receipt in here}
    newest = max((receipt.receipt_id for receipt in here if receipt.receipt_type in STEPS), default=task.duty)
    there = {receipt.receipt_id: receipt for receipt in collected.of_task(task.task_id)}
    fresh = [receipt for receipt in there.values() if receipt.receipt_id not in known and receipt.receipt_key
             and is_sound(receipt)
             and receipt.receipt_type != ASSIGNED.type]
    every = [*here, *there.values()]
    false = list_overtaken(every, list_ready(every))
    unmade = [receipt for receipt in fresh if receipt.receipt_id in false]
    fresh = [receipt for receipt in fresh if receipt.receipt_id not in false]
    twice = [receipt for receipt in fresh if receipt.receipt_key in keys]
    ahead: list[stored.Receipt] = []
    for receipt in fresh:       # oldest first, so a receipt whose parent is not taken over is not taken over either
        if receipt not in twice and receipt.receipt_id > newest and known.issuperset(receipt.parents):
            ahead.append(receipt)
            known.add(receipt.receipt_id)
    overtaken = [receipt for receipt in fresh if receipt not in twice and receipt not in ahead]
    whole = [receipt if receipt.body else there.get(receipt.receipt_id, receipt) for receipt in here]
    return Behind([*whole, *ahead], ahead, overtaken, twice, unmade)


async def list_known_receipts(backend: Backend, tenant_id: str, task_id: str) -> list[stored.Receipt]:
    """Return all receipts of a task at this gate."""
    return [row async for row in walk_rows(backend, tenant_id, queries.ReceiptFilter(None, task_id, None, None, 500))]
