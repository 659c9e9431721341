"""Copy a whole gate into another database, for `asyncgate copy SOURCE TARGET`.

This module knows no specific database and no rule: it reads pages of stored rows on both sides, and writes the rows
that the target lacks.  So an interrupted copy is simply started again, and the last walk is the proof.  A row that is
different in the target, or only there, shows that somebody has used the target.

One thing differs in the target: the fence of each unfinished task is raised, and an event records that.  If the source
is started again by mistake, the next lease of the target outranks its leases.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from msgspec import Raw, Struct, field
from msgspec.structs import astuple, fields, replace

from asyncgate import FENCES_SKIPPED, Needs, Work
from asyncgate.parts.model import errors, queries, stored, wire
from asyncgate.parts.model.cards import CARDS
from asyncgate.parts.model.content import encode_json, needs_of
from asyncgate.parts.model.database import LastingBackend, SharedBackend
from asyncgate.parts.model.ids import Ids, mark_of
from asyncgate.parts.model.walking import Pages, merge, walk

# In this order, so that no task arrives before its history: see `TenantCopy.raised`.
COPIED_TABLES = {kind: table for kind, table in stored.TABLES.items() if CARDS[kind].copied}

# What every batch of the source changes: there the source's rows replace those of an earlier part of the copy.
COUNTERS = (stored.Meter, stored.UsageHead)
TRUTHS = {table: [field.name for field in fields(table) if field.type is bool] for table in COPIED_TABLES}
COPY_NAME, BEAT_SECONDS = "asyncgate-copy", 10.0     # a copy's instance name: one copy at a time

CountRows = Callable[[int], None]
ByKey = dict[str, Any]      # rows by their export keys


class CopyStore(Pages, Protocol):
    """The methods of a backend that a copy needs."""

    ids: Ids
    secret: bytes

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Save the changes that `decide` makes, all or nothing."""

    async def tenants(self) -> list[str]:
        """Return every tenant."""

    async def keep_secret(self, secret: bytes) -> None:
        """Store the key that signs cursors."""


class Served(errors.Stopped):
    """Somebody else uses one of the databases."""


class TargetUsed(errors.Conflicting):
    """The target has rows that the source lacks: it belongs to another gate, or one of them was used meanwhile."""

    def __init__(self, row: str) -> None:
        super().__init__(f"the target is in use; choose an empty database: {row}")
        self.row = row


class CopyFailed(errors.Stopped):
    """The target did not store a row, or returned a different one."""


class CopyPage(Struct):
    """A page of the source beside the target: by export key, the expected rows and the existing ones."""

    rows: ByKey
    there: ByKey = field(default_factory=dict)
    gone: list[Any] = field(default_factory=list)       # counters that the source has no more
    moved: int = 0      # events of this copy, which only the target has

    @property
    def missing(self) -> list[Any]:
        """Return the rows still to be written."""
        return [row for key, row in self.rows.items() if key not in self.there]


class TableTally(Struct):
    """The counts of a walk over one table; the hashes cover all rows of a side, in order."""

    source: int = 0
    target: int = 0
    missing: int = 0
    moved: int = 0
    source_hash: Any = field(default_factory=hashlib.sha256)
    target_hash: Any = field(default_factory=hashlib.sha256)

    def add(self, page: CopyPage) -> None:
        """Count a page."""
        self.source, self.target = self.source + len(page.rows), self.target + len(page.there)
        self.missing, self.moved = self.missing + len(page.missing) + len(page.gone), self.moved + page.moved

    def hash(self, tenant_id: str, page: CopyPage) -> None:
        """Add a page to the hashes."""
        for digest, rows in (self.source_hash, page.rows), (self.target_hash, page.there):
            for row in rows.values():
                digest.update(encode_json((tenant_id, astuple(row))))


Tallies = dict[str, TableTally]


async def join(side: CopyStore) -> None:
    """Join a database that nobody else uses; raises Served, or StartupError if another copy uses it."""
    if isinstance(side, LastingBackend):
        await side.join(COPY_NAME, BEAT_SECONDS, lambda news: None)
    await require_unused(side)


async def require_unused(*sides: CopyStore) -> None:
    """Check that no other process has joined."""
    for side in sides:
        if isinstance(side, LastingBackend):
            try:
                await side.beat()
            except Exception as error:      # any error of a database driver
                raise CopyFailed(f"a database does not answer: {error}") from error
        if isinstance(side, SharedBackend) and not side.is_alone():
            raise Served("another process uses it, or died less than a minute ago; stop that process and copy again")


async def prove(source: CopyStore, target: CopyStore, told: CountRows) -> Tallies:
    """Compare every row again, and make the source's cursors valid in the target; raises CopyFailed."""
    try:
        tallies = await traverse(source, target, told, hashed=True)
    except TargetUsed as differs:
        raise CopyFailed(f"the target returned a different row than was written: {differs.row}") from None
    for name, tally in tallies.items():
        if tally.missing or tally.source_hash.digest() != tally.target_hash.digest():
            raise CopyFailed(f"the target lost rows of {name}: {tally.missing} of {tally.source} are missing")
    if target.secret != source.secret:
        await target.keep_secret(source.secret)
    return tallies


async def traverse(source: CopyStore, target: CopyStore, told: CountRows, *, write: bool = False,
                   hashed: bool = False) -> Tallies:
    """Walk through all tables of all tenants on both sides, and `write` the rows that the target lacks.

    `told` is called with the number of rows of each page.  Raises TargetUsed unless the target is empty or a part of
    this copy.
    """
    tallies = {name: TableTally() for name in COPIED_TABLES.values()}
    for tenant_id in sorted({*await source.tenants(), *await target.tenants()}):
        await require_unused(source, target)
        tenant = TenantCopy(source, target, tenant_id)
        for table, name in COPIED_TABLES.items():
            async for page in tenant.pages(table):
                if write and (page.missing or page.gone):
                    await tenant.put(table, page.missing, page.gone)
                if hashed:
                    tallies[name].hash(tenant_id, page)
                tallies[name].add(page)
                told(len(page.rows))
    await require_unused(source, target)
    return tallies


class TenantCopy:
    """The rows of one tenant on both sides."""

    def __init__(self, source: CopyStore, target: CopyStore, tenant_id: str) -> None:
        self.source, self.target, self.tenant_id = source, target, tenant_id
        self.raised: set[str] = set()       # tasks in the target whose event task.moved has not been seen yet

    async def pages(self, table: type[Struct]) -> AsyncIterator[CopyPage]:
        """Yield what both sides have of a table, stretch by stretch; what is written meanwhile is not read again."""
        sides = (read_side(side, self.tenant_id, table) for side in (self.source, self.target))
        async for rows, there in merge(*sides):
            page = CopyPage({key: raise_fence(row) for key, row in rows.items()})
            # otherwise the event task.moved could seem older, if clocks differ
            if table is stored.Receipt and rows:
                self.source.ids.after(next(reversed(rows)))
            for key, row in there.items():
                self._compare(page, key, row)
            yield page
        if table is stored.Event and self.raised:
            raise TargetUsed(f"task {min(self.raised)} of tenant {self.tenant_id} has no event task.moved there")

    def _compare(self, page: CopyPage, key: str, row: Any) -> None:
        """Accept rows of the source, one event task.moved for each unfinished task, and counters; nothing else."""
        if page.rows.get(key) == row:
            page.there[key] = row
            self._remember(row)
        elif key not in page.rows and self._is_of_the_move(row):
            self.raised.remove(row.task_id)
            page.moved += 1
        elif isinstance(row, COUNTERS):
            page.gone += [row] * (key not in page.rows)
        else:
            why = "differs from the source" if key in page.rows else "is not in the source"
            raise TargetUsed(f"{COPIED_TABLES[type(row)]} row {key} of tenant {self.tenant_id} {why}")

    def _is_of_the_move(self, row: Any) -> bool:
        return (isinstance(row, stored.Event) and row.task_id in self.raised
                and stored.fences_skipped(row) == FENCES_SKIPPED)

    def _remember(self, row: Any) -> None:
        if isinstance(row, stored.Task) and row.status not in stored.TERMINAL:
            self.raised.add(row.task_id)

    async def put(self, table: type[Struct], rows: list[Any], gone: list[Any]) -> None:
        """Write rows unchanged, and drop those that are gone, in one transaction."""
        def decide(work: Work) -> None:
            work.metered = False    # the meters are copied
            work.limiting.settled = True
            for row in rows:
                add_row(work, row, self.source.ids)
            for row in gone:
                work.drop_record(table, *stored.key_of(row))

        tasks = {row.task_id for row in rows} if table in (stored.Lease, stored.Progress) else set()      # their tasks
        try:
            await self.target.transact(self.tenant_id, Needs(tasks=tasks), decide)
        except Exception as error:      # any error of a database driver
            raise CopyFailed(f"the target refuses these {COPIED_TABLES[table]}: {error}") from error
        for row in rows:
            self._remember(row)


async def read_side(side: CopyStore, tenant_id: str, table: type[Struct]) -> AsyncIterator[ByKey]:
    """Yield the pages of a table as the copy compares them."""
    async for page in walk(side, tenant_id, queries.Rows(table)):
        yield {stored.export_key(row): normalize_row(row) for row in page}


def normalize_row(row: Any) -> Any:
    """Return a row with the types of its Struct: some databases store booleans as numbers."""
    truths = {name: bool(getattr(row, name)) for name in TRUTHS[type(row)]}
    return replace(row, **truths) if truths else row


def raise_fence(row: Any) -> Any:
    """Return the row for the target: an unfinished task gets a higher fence."""
    unfinished = isinstance(row, stored.Task) and row.status not in stored.TERMINAL
    return replace(row, fence=row.fence + FENCES_SKIPPED) if unfinished else row


def add_row(work: Work, row: Any, ids: Ids) -> None:
    """Add a row to the unit of work without checking the rules; a task also adds its lane and the event of the move.

    The event's id comes from the source's `ids`, which continue after the ids of the source's receipts.
    """
    match row:
        case stored.Task():
            work.add_task(row, needs_of(Raw(row.requirements.encode())))
            if row.status not in stored.TERMINAL:
                event_id = ids.new(work.now, mark_of(work.tenant_id))
                work.add_event(row.task_id, "task.moved", event_id=event_id, fences_skipped=FENCES_SKIPPED)
        case stored.Lease():
            work.set_lease(row)
        case stored.Progress():
            work.progress[row.task_id] = work.progressed[row.task_id] = row
        case stored.Receipt():
            work.written[row.receipt_id] = replace(row, delivered_at=None)
            work.delivered.update({row.receipt_id: row.delivered_at} if row.delivered_at is not None else {})
        case stored.Obligation():
            work.opened[row.receipt_id] = wire.Principal(row.to_kind, row.to_id)
        case stored.Event():
            work.events[row.event_id] = row
        case stored.Audit():
            work.add_audit(row)
        case _:
            work.keep_record(row)
