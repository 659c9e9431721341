"""What the gate holds against what the ledger holds, and the cure of each difference: `asyncgate reconcile`.

The rules: a ledger that cannot be read to its end changes nothing.  On receipts the ledger wins, on everything else the
gate does (H.12).  Nothing here writes a receipt: what is repaired is a receipt that is sent once more, byte for byte,
or one of the ledger that the gate takes back.  An obligation whose task is not here is told, and no task is invented.
A lease that the ledger does not back is withdrawn.  Other content under the same id is tampering, and nobody mends it.

A difference counts when it is still there on a second look, so comparing goes on beside a gate that serves.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncgate import ACCEPTED, ASSIGNED, CANCELED, COMPLETED, EXPIRED, FAILED, RESULT_READY, TERMINATES
from asyncgate.parts.model.queries import OutboxOf, ReceiptFilter, Rows
from asyncgate.parts.model.stored import ACTIVE, TERMINAL, Archived, Lease, Outgoing, Receipt, Task, export_key
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.receipts.collected import (
    Collected,
    CountCopied,
    as_stored,
    collect_from_ledger,
    computed_hash,
    is_sound,
    retry_read,
)
from asyncgate.parts.receipts.marks import list_adopted
from asyncgate.parts.receipts.restated import story_of

if TYPE_CHECKING:
    from asyncgate.backends import Backend
    from asyncgate.parts.receipts.sinks import Sink

STEPS = {ACCEPTED.type, COMPLETED.type, FAILED.type, CANCELED.type, EXPIRED.type, RESULT_READY.type}
STATED_TYPES = {COMPLETED.type, FAILED.type}      # what workers may write to the ledger themselves
FACTS = ("receipt_key", "receipt_type", "sender", "to", "task_id", "lease_id", "schedule_id", "asyncgate_instance",
         "parents", "hash")
OF_A_STATEMENT = ("receipt_type", "sender", "task_id", "lease_id")      # a worker's own, which has no key


Mend = Callable[[str, Collected | None, "Findings"], Awaitable[None]]


class Kind(Struct, frozen=True):
    """One kind of difference: what is to be done about it, and whether --repair does."""

    cure: str
    repair: bool = False
    harmless: bool = False      # it is told, and nothing is wrong


KINDS = {
    "missing_at_ledger": Kind("send it again, by its key; --repair does", repair=True),
    "parked": Kind("see to it that the ledger takes it; then --repair offers it once more", repair=True),
    "lost_by_ledger": Kind("bring the ledger's backup back; here only its hash is left, which proves what it was"),
    "tampered": Kind("find out who changed it and bring the ledger's backup back; nothing here mends it"),
    "ended_at_ledger": Kind("take the end over as the ledger has it; --repair does", repair=True),
    "lease_ended_at_ledger": Kind("take the end of the lease over; --repair does", repair=True),
    "lease_unbacked": Kind("withdraw the lease, so that the task is offered again; --repair does", repair=True),
    "not_committed": Kind("take over what the ledger has, and this gate has not; --repair does", repair=True),
    "ended_otherwise": Kind("none: a task ends once, and the gate decides how (H.12); tell those who read the ledger"),
    "half_stated": Kind("none here: the ledger has a part of the step; the worker's next call, or the end of its "
                        "lease, decides what becomes of the task"),
    "obligation_unknown": Kind("none here: the task is not invented; `asyncgate rebuild` makes one in an empty "
                               "database, or whoever is owed it creates the task again"),
    "stated_by_worker": Kind("the gate looks at it while it serves, and tells the owner why it does not take it"),
    "never_granted": Kind("undo it at the ledger, which holds somebody to a lease never granted; --repair does",
                          repair=True),
    "ended_there": Kind("none here: the ledger has an end of the task that this gate has not; see what became of the "
                        "work, and complete or cancel the task"),
    "state": Kind("`asyncgate verify` tells more; bring a backup back, or `asyncgate rebuild`"),
    "stated_twice": Kind("none needed: a try that failed came before the one that counts", harmless=True),
    "overtaken": Kind("none needed: a change that did not count, and the task went on", harmless=True),
}


class Difference(Struct, omit_defaults=True):
    """One place in which the gate and the ledger differ."""

    kind: str
    tenant_id: str
    detail: str
    receipt_id: str = ""
    task_id: str = ""
    cure: str = ""


class Findings:
    """All differences, on disk: there may be as many as receipts."""

    def __init__(self) -> None:
        self.file = sqlite3.connect("", isolation_level=None)
        self.file.executescript(
            "PRAGMA journal_mode = OFF; CREATE TABLE found (tenant_id TEXT, kind TEXT, content BLOB);"
            "CREATE INDEX by_kind ON found (tenant_id, kind)")
        self.counts: Counter[str] = Counter()
        self.receipts = self.tasks = self.waiting = self.foreign = 0

    def add(self, kind: str, tenant_id: str, detail: str, receipt: Receipt | None = None, task_id: str = "",
            receipt_id: str = "") -> None:
        """Write one down."""
        self.counts[kind] += 1
        one = Difference(kind, tenant_id, detail, receipt_id or (receipt.receipt_id if receipt else ""),
                         task_id or (receipt.task_id if receipt else ""), KINDS[kind].cure)
        self.file.execute("INSERT INTO found VALUES (?, ?, ?)", (tenant_id, kind, msgspec.json.encode(one)))

    def all(self) -> Iterator[Difference]:
        """Yield all of them."""
        return self._rows("")

    def of(self, tenant_id: str, *kinds: str) -> Iterator[Difference]:
        """Yield those of some kinds that a tenant has."""
        return self._rows(f"AND tenant_id = ? AND kind IN ({', '.join('?' * len(kinds))})", tenant_id, *kinds)

    def _rows(self, which: str, *values: str) -> Iterator[Difference]:
        last = 0
        while rows := self.file.execute(f"SELECT rowid, content FROM found WHERE rowid > ? {which} "
                                        "ORDER BY rowid LIMIT 500", (last, *values)).fetchall():
            for _, content in rows:
                yield msgspec.json.decode(content, type=Difference)
            last = rows[-1][0]

    @property
    def wrong(self) -> int:
        """How many are more than worth telling."""
        return sum(count for kind, count in self.counts.items() if not KINDS[kind].harmless)

    def close(self) -> None:
        """Let the file go."""
        self.file.close()


async def compare_all(backend: Backend, sink: Sink, instances: Iterable[str], told: CountCopied,
                      tenants: Iterable[str] = (), mend: Mend | None = None) -> Findings:
    """Compare all of some tenants, or of every one; raises Unreadable.

    `mend` is called when all of a tenant is known, and never before.
    """
    findings = Findings()
    try:
        for tenant_id in list(tenants) or await backend.tenants():
            if not sink.reads:      # it gives back the receipts of a task, and not all of them
                from asyncgate.parts.receipts import reconcile_receiptgate as part
                await part.GateComparison(backend, sink, tenant_id, findings, told).run()
                if mend is not None:
                    await mend(tenant_id, None, findings)
                continue
            collected = await collect_from_ledger(sink, tenant_id, told)
            try:
                await Comparison(backend, sink, tenant_id, set(instances), collected, findings, told).run()
                if mend is not None:
                    await mend(tenant_id, collected, findings)
            finally:
                collected.close()
    except BaseException:
        findings.close()
        raise
    return findings


class Comparison:
    """One tenant."""

    def __init__(self, backend: Backend, sink: Sink, tenant_id: str, instances: set[str], collected: Collected,
                 findings: Findings, told: CountCopied) -> None:
        self.backend, self.sink, self.tenant_id, self.collected = backend, sink, tenant_id, collected
        self.instances, self.findings, self.told = instances, findings, told

    async def run(self) -> None:
        """Look from here into the ledger, and then from the ledger to here."""
        self.stated = {ours: theirs for theirs, ours in (await list_adopted(self.backend, self.tenant_id)).items()}
        async for page in self._pages(Receipt):
            await self._here(page)
            self.findings.receipts += len(page)
            self.told(len(page))
        async for pointers in self._pages(Archived):
            self._away([one.receipt_id for one in pointers])
        await self._leases()
        await self._there()

    async def _pages(self, table: type[Struct]) -> AsyncIterator[list[Any]]:
        after = ""
        while page := await self.backend.page(self.tenant_id, Rows(table, after)):
            yield page
            after = export_key(page[-1])

    def _found(self, kind: str, detail: str, receipt: Receipt | None = None, task_id: str = "") -> None:
        self.findings.add(kind, self.tenant_id, detail, receipt, task_id)

    # What is here.

    async def _here(self, page: list[Receipt]) -> None:
        self.instances.update(one.asyncgate_instance for one in page)
        ids = [one.receipt_id for one in page]
        outbox = {row.receipt_id: row for row in await self.backend.page(self.tenant_id, OutboxOf(tuple(ids)))}
        there = [self.stated.get(id, id) for id in ids]     # what a worker has stated may have an id of its own there
        theirs = self.collected.get(there)
        if late := [one for one in there if one not in theirs and one not in outbox]:   # it may have arrived meanwhile
            found = await retry_read(lambda: self.sink.fetch(self.tenant_id, late))
            self.collected.add([as_stored(one) for one in found])
            theirs |= self.collected.get(late)
        self.collected.know(there)
        for receipt, id in zip(page, there, strict=True):
            await self._one(receipt, outbox.get(receipt.receipt_id), theirs.get(id))

    async def _one(self, receipt: Receipt, row: Outgoing | None, theirs: Receipt | None) -> None:
        if theirs is not None:
            if wrong := differing_facts(receipt, theirs):
                self._found("tampered", f"the {receipt.receipt_type} at the ledger differs in {', '.join(wrong)}",
                            receipt)
            elif row is not None and row.state == "parked":
                self._found("parked", f"the ledger has the {receipt.receipt_type} by now, which it refused", receipt)
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

    def _accepted_itself(self, receipt: Receipt) -> bool:
        """Whether the worker has stated its acceptance in the ledger itself, as the lease protocol has it."""
        return any(one.receipt_type == ACCEPTED.type and not one.receipt_key and one.sender.same(receipt.sender)
                   and one.lease_id in (None, receipt.lease_id) for one in self.collected.of_task(receipt.task_id))

    def _away(self, ids: list[str]) -> None:
        """Know what is in the archive here: from before the ledger, which may have been given it."""
        self.collected.know(ids)
        for theirs in self.collected.get(ids).values():
            if not is_sound(theirs):
                self._found("tampered", f"the {theirs.receipt_type} at the ledger does not have the hash of what it "
                            "says, and is in the archive here", theirs)

    async def _leases(self) -> None:
        """See that the ledger backs each live lease, or will."""
        async for page in self._pages(Lease):
            live = {lease.accepted: lease for lease in page if lease.ending == "live"}
            known = self.collected.get(live)
            outbox = {row.receipt_id for row in await self.backend.page(self.tenant_id, OutboxOf(tuple(live)))}
            for receipt_id, lease in live.items():
                receipt = await self.backend.receipt(self.tenant_id, receipt_id)
                if receipt_id not in known and receipt_id not in outbox and not (receipt and receipt.body):
                    self._found("lease_unbacked", f"lease {lease.lease_id} of {lease.worker} lives here, and the "
                                "ledger has no task.accepted of it", receipt, lease.task_id)
            self.told(len(page))

    # What is there.

    async def _there(self) -> None:
        """Look at what the ledger has and this gate has not: one by one, then one task after another."""
        for receipt in self.collected.unknown():
            if await self.backend.receipt(self.tenant_id, receipt.receipt_id) is None:
                await self._unknown(receipt)
            else:       # it was written while the pages were read
                self.collected.know([receipt.receipt_id])
        for task_id in self.collected.unknown_tasks():
            if (found := await self.backend.task(self.tenant_id, task_id)) is not None:
                await self._behind(*found[:2])

    async def _unknown(self, receipt: Receipt) -> None:
        """Judge a receipt by itself; those of a task that is here are judged together."""
        task = await self.backend.task(self.tenant_id, receipt.task_id) if receipt.task_id else None
        if not (receipt.receipt_key and (receipt.asyncgate_instance in self.instances or task)):
            self.findings.foreign += 1
            self._stated(receipt, task)
        elif not is_sound(receipt):
            self._found("tampered", f"the ledger has a {receipt.receipt_type} that this gate never wrote, and it does "
                        "not have the hash of what it says", receipt)
        elif receipt.receipt_type in TERMINATES and not self.collected.answered(receipt) and (
                task is None or receipt.receipt_type == ASSIGNED.type):
            self._found("obligation_unknown", f"the ledger has a {receipt.receipt_type} to {receipt.to} that nothing "
                        "discharges, and nothing of it is here", receipt)

    def _stated(self, receipt: Receipt, task: Any) -> None:
        if receipt.receipt_type in STATED_TYPES and not receipt.receipt_key and task and task[0].status not in TERMINAL:
            self._found("stated_by_worker", f"{receipt.sender} states a {receipt.receipt_type} there, and the task is "
                        f"{task[0].status}", receipt)

    async def _behind(self, task: Task, lease: Lease | None) -> None:
        """Judge what the ledger knows of a task beyond what this gate knows."""
        behind = await find_behind(self.backend, self.tenant_id, self.collected, task)
        for receipt in behind.twice:
            self._found("stated_twice", f"the ledger has two {receipt.receipt_type} that state the same", receipt)
        for receipt in behind.overtaken:
            self._found("overtaken", f"the ledger has a {receipt.receipt_type} that did not count here", receipt)
        if not behind.ahead:
            return
        names = ", ".join(f"{one.receipt_type} {one.receipt_id}" for one in behind.ahead)
        self._found(describe_lead(task, lease, behind), f"the task is {task.status}, and the ledger has {names}",
                    behind.ahead[0])


def describe_lead(task: Task, lease: Lease | None, behind: Behind) -> str:
    """Say what it means that the ledger has more of a task."""
    story, over = story_of(behind.whole), task.status in TERMINAL
    if over and (story.contradicts or story.status != task.status):
        return "ended_otherwise"
    if story.ends and story.unready:
        return "half_stated"
    if (story.ends and not over) or (task.owed and not story.owed):
        return "ended_at_ledger"
    if lease and task.status in ACTIVE and any(one.lease_id == lease.lease_id for one in behind.ahead):
        return "lease_ended_at_ledger"
    return "not_committed"


DUTY_ENDS = TERMINATES[ASSIGNED.type]


def differing_facts(ours: Receipt, theirs: Receipt) -> list[str]:
    """Name what a receipt at the ledger says otherwise."""
    names = FACTS if theirs.receipt_key else OF_A_STATEMENT
    wrong = [name for name in names if getattr(ours, name) != getattr(theirs, name)]
    if theirs.receipt_key and to_utc(ours.created_at) != to_utc(theirs.created_at):
        wrong.append("created_at")
    said = computed_hash(replace(ours, body=theirs.body))
    body_fits = said == ours.hash or (not theirs.receipt_key and theirs.hash == ours.hash)
    return wrong if body_fits else [*wrong, "body"]


class Behind(Struct):
    """What the ledger has of a task, and this gate has not."""

    whole: list[Receipt]        # both together, oldest first, with bodies
    ahead: list[Receipt]        # newer than all steps that are known here, and fit to be taken over
    overtaken: list[Receipt]
    twice: list[Receipt]


async def find_behind(backend: Backend, tenant_id: str, collected: Collected, task: Task) -> Behind:
    """Sort what the ledger has of a task beyond what is known here."""
    here = await list_known_receipts(backend, tenant_id, task.task_id)
    known, keys = {one.receipt_id for one in here}, {one.receipt_key for one in here}
    newest = max((one.receipt_id for one in here if one.receipt_type in STEPS), default=task.duty)
    there = {one.receipt_id: one for one in collected.of_task(task.task_id)}
    fresh = [one for one in there.values() if one.receipt_id not in known and one.receipt_key and is_sound(one)
             and one.receipt_type != ASSIGNED.type]
    twice = [one for one in fresh if one.receipt_key in keys]
    ahead: list[Receipt] = []
    for one in fresh:       # oldest first, so what an unfit one has caused is unfit, too
        if one not in twice and one.receipt_id > newest and known.issuperset(one.parents):
            ahead.append(one)
            known.add(one.receipt_id)
    overtaken = [one for one in fresh if one not in twice and one not in ahead]
    whole = [one if one.body else there.get(one.receipt_id, one) for one in here]
    return Behind([*whole, *ahead], ahead, overtaken, twice)


async def list_known_receipts(backend: Backend, tenant_id: str, task_id: str) -> list[Receipt]:
    """Return all receipts of a task that are known here."""
    found: list[Receipt] = []
    after = None
    while page := await backend.page(tenant_id, ReceiptFilter(None, task_id, None, after, 500)):
        found += page
        after = page[-1].receipt_id
    return found
