"""Carry a whole gate into another database: what `asyncgate copy SOURCE TARGET` does.

It knows no database and no rule: it reads pages of stored rows on both sides and writes those that the target lacks,
as they are.  So an interrupted copy is just started again, the last walk is the proof, and a row that only the target
has, or has otherwise, shows that somebody has used it.

One thing differs at the target: the fence of each unfinished task is raised, and an event says so.  The source may be
started again by mistake; what it then leases is outranked by the next lease of the target.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

from msgspec import Raw, Struct, field
from msgspec.structs import astuple, fields, replace

from asyncgate import FENCES_SKIPPED, Needs, Work, fences_skipped
from asyncgate.parts.model.content import encode_json, needs_of
from asyncgate.parts.model.database import LastingBackend, SharedBackend
from asyncgate.parts.model.ids import Ids, mark_of
from asyncgate.parts.model.queries import Query, Rows
from asyncgate.parts.model.stored import (
    TERMINAL,
    Account,
    Archived,
    Audit,
    AuditHead,
    Entry,
    Event,
    Key,
    Lease,
    LedgerMark,
    Obligation,
    Outgoing,
    Presence,
    Progress,
    Receipt,
    Schedule,
    Seal,
    SealHead,
    Task,
    export_key,
)
from asyncgate.parts.model.wire import Principal

# In this order, or a task would be there without what it was: see `Tenant.raised`.  Usage is counted anew.
COPIED_TABLES: dict[type[Struct], str] = {
    Task: "tasks", Lease: "leases", Progress: "progress", Receipt: "receipts", Obligation: "obligations",
    Event: "events", Schedule: "schedules", Presence: "presences", Account: "accounts", Key: "api_keys",
    Audit: "audit", AuditHead: "audit_heads", Outgoing: "outbox", Entry: "ledger",
    LedgerMark: "ledger_marks", Seal: "seals", SealHead: "seal_heads", Archived: "archived"}

TRUTHS = {table: [field.name for field in fields(table) if field.type is bool] for table in COPIED_TABLES}
COPY_NAME, BEAT_SECONDS = "asyncgate-copy", 10.0     # how a copy takes part where several processes can: one at a time

CountRows = Callable[[int], None]
ByKey = dict[str, Any]      # rows by their export keys
T = TypeVar("T")


class CopyStore(Protocol):
    """What a copy needs of a backend."""

    ids: Ids
    secret: bytes

    async def page(self, tenant_id: str, query: Query[T]) -> list[T]:
        """Return the next rows of a table."""

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Save what `decide` puts into the work, all or nothing."""

    async def tenants(self) -> list[str]:
        """Return every tenant."""

    async def keep_secret(self, secret: bytes) -> None:
        """Sign cursors with this key."""


class Served(Exception):
    """Somebody else uses one of the databases."""


class TargetUsed(Exception):
    """The target has what the source has not: it is another gate's, or one of the two was used since they parted."""

    def __init__(self, row: str) -> None:
        super().__init__(f"the target is in use, take an empty database: {row}")
        self.row = row


class CopyFailed(Exception):
    """The target did not take a row, or gave back another one."""


class CopyPage(Struct):
    """What a page of the source is at the target: by export key the rows as they belong there, and those that are."""

    rows: ByKey
    there: ByKey = field(default_factory=dict)
    moved: int = 0      # events of this very move, which only the target has

    @property
    def missing(self) -> list[Any]:
        """Return what is still to be written."""
        return [row for key, row in self.rows.items() if key not in self.there]


class TableTally(Struct):
    """What a walk has seen of one table; the hashes are over all rows of a side, in their order."""

    source: int = 0
    target: int = 0
    missing: int = 0
    moved: int = 0
    source_hash: Any = field(default_factory=hashlib.sha256)
    target_hash: Any = field(default_factory=hashlib.sha256)

    def add(self, page: CopyPage) -> None:
        """Count a page."""
        self.source, self.target = self.source + len(page.rows), self.target + len(page.there)
        self.missing, self.moved = self.missing + len(page.missing), self.moved + page.moved

    def hash(self, tenant_id: str, page: CopyPage) -> None:
        """Add a page to the hashes."""
        for digest, rows in (self.source_hash, page.rows), (self.target_hash, page.there):
            for row in rows.values():
                digest.update(encode_json((tenant_id, astuple(row))))


Tallies = dict[str, TableTally]


async def join(side: CopyStore) -> None:
    """Take part in a database that nobody else uses; raises Served, or StartupError when another copy does."""
    if isinstance(side, LastingBackend):
        await side.join(COPY_NAME, BEAT_SECONDS, lambda news: None)
    await require_undisturbed(side)


async def require_undisturbed(*sides: CopyStore) -> None:
    """See that nobody has come."""
    for side in sides:
        if isinstance(side, LastingBackend):
            try:
                await side.beat()
            except Exception as error:      # whatever a database may raise
                raise CopyFailed(f"a database does not answer: {error}") from error
        if isinstance(side, SharedBackend) and not side.is_alone():
            raise Served("another process is using it, or died less than a minute ago; stop it, and copy again")


async def survey(source: CopyStore, target: CopyStore, told: CountRows) -> Tallies:
    """Count both sides and write nothing; raises TargetUsed unless the target is empty or a part of this copy."""
    return await walk(source, target, told)


async def carry(source: CopyStore, target: CopyStore, told: CountRows) -> None:
    """Write what the target lacks, up to 1,000 rows in a transaction."""
    await walk(source, target, told, write=True)


async def prove(source: CopyStore, target: CopyStore, told: CountRows) -> Tallies:
    """Compare every row once more, and let the target honour the source's cursors; raises CopyFailed."""
    try:
        tallies = await walk(source, target, told, hashed=True)
    except TargetUsed as differs:
        raise CopyFailed(f"the target did not keep what was written: {differs.row}") from None
    for name, tally in tallies.items():
        if tally.missing or tally.source_hash.digest() != tally.target_hash.digest():
            raise CopyFailed(f"the target did not keep all {name}: {tally.missing} of {tally.source} are missing")
    if target.secret != source.secret:
        await target.keep_secret(source.secret)
    return tallies


async def walk(source: CopyStore, target: CopyStore, told: CountRows, *, write: bool = False,
               hashed: bool = False) -> Tallies:
    """Go through all tables of all tenants on both sides; `told` learns of every page how many rows it had."""
    tallies = {name: TableTally() for name in COPIED_TABLES.values()}
    for tenant_id in sorted({*await source.tenants(), *await target.tenants()}):
        await require_undisturbed(source, target)
        tenant = TenantCopy(source, target, tenant_id)
        for table, name in COPIED_TABLES.items():
            async for page in tenant.pages(table):
                if write and page.missing:
                    await tenant.put(table, page.missing)
                if hashed:
                    tallies[name].hash(tenant_id, page)
                tallies[name].add(page)
                told(len(page.rows))
    await require_undisturbed(source, target)
    return tallies


class TenantCopy:
    """One tenant's rows on both sides."""

    def __init__(self, source: CopyStore, target: CopyStore, tenant_id: str) -> None:
        self.source, self.target, self.tenant_id = source, target, tenant_id
        self.raised: set[str] = set()       # tasks at the target whose event of the move has not been seen yet

    async def pages(self, table: type[Struct]) -> AsyncIterator[CopyPage]:
        """Yield every page of the source, and at last an empty one, beside which stands what else the target has.

        The target is read once, ahead of what is written: a row of one's own is never read again.
        """
        after: str | None = ""
        there = self._at_target(table)
        key, row = await anext(there)
        while after is not None:
            found = await self.source.page(self.tenant_id, Rows(table, after))
            page = CopyPage({export_key(one): raise_fence(normalize_row(one)) for one in found})
            after = next(reversed(page.rows), None)
            if table is Receipt and after:
                self.source.ids.after(after)    # or the event of the move could seem older, where clocks differ
            while key is not None and (after is None or key <= after):
                self._compare(page, key, row)
                key, row = await anext(there)
            yield page
        if table is Event and self.raised:
            raise TargetUsed(f"task {min(self.raised)} of tenant {self.tenant_id} has no event task.moved there")

    async def _at_target(self, table: type[Struct]) -> AsyncIterator[tuple[str | None, Any]]:
        after = ""
        while page := await self.target.page(self.tenant_id, Rows(table, after)):
            for row in page:
                yield export_key(row), normalize_row(row)
            after = export_key(page[-1])
        yield None, None

    def _compare(self, page: CopyPage, key: str, row: Any) -> None:
        """Accept what the source has, and the event of this move once for each unfinished task; nothing else."""
        if page.rows.get(key) == row:
            page.there[key] = row
            self._remember(row)
        elif key not in page.rows and self._is_of_the_move(row):
            self.raised.remove(row.task_id)
            page.moved += 1
        else:
            why = "is not as in the source" if key in page.rows else "is not in the source"
            raise TargetUsed(f"{COPIED_TABLES[type(row)]} row {key} of tenant {self.tenant_id} {why}")

    def _is_of_the_move(self, row: Any) -> bool:
        return isinstance(row, Event) and row.task_id in self.raised and fences_skipped(row) == FENCES_SKIPPED

    def _remember(self, row: Any) -> None:
        if isinstance(row, Task) and row.status not in TERMINAL:
            self.raised.add(row.task_id)

    async def put(self, table: type[Struct], rows: list[Any]) -> None:
        """Write rows as they are, in one transaction."""
        def decide(work: Work) -> None:
            for row in rows:
                add_row(work, row, self.source.ids)

        tasks = {row.task_id for row in rows} if table in (Lease, Progress) else set()      # what they belong to
        try:
            await self.target.transact(self.tenant_id, Needs(tasks=tasks), decide)
        except Exception as error:      # whatever a database may raise
            raise CopyFailed(f"the target does not take these {COPIED_TABLES[table]}: {error}") from error
        for row in rows:
            self._remember(row)


def normalize_row(row: Any) -> Any:
    """Return a row as its Struct declares it: a truth value is a number in some databases."""
    truths = {name: bool(getattr(row, name)) for name in TRUTHS[type(row)]}
    return replace(row, **truths) if truths else row


def raise_fence(row: Any) -> Any:
    """Return a row as it belongs at the target."""
    unfinished = isinstance(row, Task) and row.status not in TERMINAL
    return replace(row, fence=row.fence + FENCES_SKIPPED) if unfinished else row


def add_row(work: Work, row: Any, ids: Ids) -> None:
    """Add a row to the unit of work without checking the rules; a task also adds its lane and the event of the move.

    The event's id comes from the source's `ids`, which continue after the ids of the source's receipts.
    """
    match row:
        case Task():
            work.add_task(row, needs_of(Raw(row.requirements.encode())))
            if row.status not in TERMINAL:
                event_id = ids.new(work.now, mark_of(work.tenant_id))
                work.add_event(row.task_id, "task.moved", event_id=event_id, fences_skipped=FENCES_SKIPPED)
        case Lease():
            work.set_lease(row)
        case Progress():
            work.progress[row.task_id] = work.progressed[row.task_id] = row
        case Receipt():
            work.written[row.receipt_id] = replace(row, delivered_at=None)
            work.delivered.update({row.receipt_id: row.delivered_at} if row.delivered_at is not None else {})
        case Obligation():
            work.opened[row.receipt_id] = Principal(row.to_kind, row.to_id)
        case Event():
            work.events[row.event_id] = row
        case Audit():
            work.add_audit(row)
        case (Schedule() | Presence() | Account() | Key() | AuditHead() | Outgoing() | Entry() | LedgerMark()
              | Seal() | SealHead() | Archived()):
            work.keep_record(row)
