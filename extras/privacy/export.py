"""export_tenant and export_principal: everything that the gate stores about somebody, page by page (spec 21.12.1).

The kinds of rows and their fields come from the cards of parts/model/cards.py, so nothing is left out that is not
declared as a proof of identity.  A page is read in the order of the table's key, in small parts, and no page holds a
transaction open: each row is as it was when its page was read, and whatever was stored when the export began, and not
changed or deleted meanwhile, is in it.  Receipts are read before the archive, so one that moves there meanwhile is not
missed.  One that comes back may stand behind the cursor: then both are read again, until none came back meanwhile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Raw, Struct

from asyncgate import Caller, Engine, Operation, Work, forbid
from asyncgate.extras.privacy import wire_privacy
from asyncgate.extras.privacy.rows import TABLE_OF_KIND, encode_row, has_open_keys, list_proofs
from asyncgate.extras.privacy.subjects import Subject, may_name
from asyncgate.parts.identity.admin import audit_change, change_record, target_tenant
from asyncgate.parts.identity.notices import read_rows
from asyncgate.parts.model import errors, queries, stored, wire
from asyncgate.parts.model.cards import CARDS
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.naming import make_filter
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.receipts.archive import count_returns, load_archived

PAGE_BYTES = 4 * 2**20
ExportAsk = wire_privacy.ExportTenant | wire_privacy.ExportPrincipal
FIRST_PART = 16             # rows that are read at first: each may have megabytes
VALID_SECONDS = 7 * DAY_SECONDS     # of cursors: a later export is audited again


class Position(NamedTuple):
    """Where an export is: when it began, in which kind, behind which row; how often receipts had come back before it
    began to read receipts."""

    begun_at: float
    kind: str
    returns: int = 0
    after: str = ""

    def __str__(self) -> str:
        return f"{self.begun_at!r} {self.kind} {self.returns} {self.after}"


class Look(NamedTuple):
    """What one look at a table found: lines of JSON, how many rows were looked at, and the last one if there may be
    more."""

    lines: list[bytes]
    looked_at: int
    after: str | None


async def export_tenant(engine: Engine, caller: Caller, ask: wire_privacy.ExportTenant) -> wire_privacy.ExportPage:
    """Export everything about a tenant, page by page, without secrets and their hashes.

    `asyncgate export tenant FILE` writes all pages into one archive.  The beginning is audited; a cursor is valid for
    seven days.  Each page says when it was read.  Spec 21.12.1.
    """
    tenant_id = await find_tenant(engine, caller, ask)
    return await export_page(caller, ask, Subject(engine, tenant_id, None))


async def export_principal(engine: Engine, caller: Caller,
                           ask: wire_privacy.ExportPrincipal) -> wire_privacy.ExportPage:
    """Export everything about a principal, page by page; without principal_id, about the caller itself.

    That is what names it, the tasks that it owns or was the last to work on, and what belongs to these.  An admin may
    name any principal of its tenant; others export themselves, and need the scope admin:read for it.  `asyncgate export
    principal FILE` writes all pages into one archive.  The beginning is audited; a cursor is valid for seven days.
    Spec 21.12.1.
    """
    tenant_id = await find_tenant(engine, caller, ask)
    return await export_page(caller, ask, Subject(engine, tenant_id, find_subject(caller, ask, tenant_id)))


def find_subject(caller: Caller, ask: wire_privacy.ExportPrincipal, tenant_id: str) -> wire.Principal:
    """Return the principal to export: the named one, or the caller; only an admin may name another."""
    kind = ask.principal_kind or ("agent" if ask.principal_id else None)
    named = make_filter("principal_kind", kind, "principal_id", ask.principal_id)
    if named is None and (not caller.bound or tenant_id != caller.tenant_id):
        raise errors.InvalidRequest("principal_id is missing: name the principal to export")
    whom = named or wire.Principal(caller.principal.kind, caller.principal.id)
    if not caller.sees_all and not whom.same(caller.principal):
        raise forbid(caller, f"this credential belongs to {caller.principal} and exports nobody else")
    return whom


async def find_tenant(engine: Engine, caller: Caller, ask: ExportAsk) -> str:
    """Return the tenant that a request is about; raises TenantNotFound for one that has nothing."""
    tenant_id = await target_tenant(engine, caller, ask.tenant)
    if tenant_id != caller.tenant_id and tenant_id not in await engine.backend.tenants():
        raise errors.TenantNotFound(f"no tenant {ask.tenant}; list_tenants shows all tenants")
    return tenant_id


async def export_page(caller: Caller, ask: ExportAsk, subject: Subject) -> wire_privacy.ExportPage:
    """Return one page, and where the next one begins."""
    engine, whom = subject.engine, subject.whom
    kinds = [kind for kind, table in TABLE_OF_KIND.items() if whom is None or may_name(table)]
    mark = ("export", subject.tenant_id, whom and str(whom))
    at = open_position(engine, caller, ask.cursor, mark) or Position(await begin(caller, subject), kinds[0])
    if at.kind not in kinds:
        raise errors.InvalidCursor("this release has no such kind of rows; begin a new export, without a cursor")
    read_at, table = engine.backend.now(), TABLE_OF_KIND[at.kind]
    if table is stored.Receipt and not at.after:
        at = at._replace(returns=await count_returns(engine, subject.tenant_id))
    page = await look(subject, table, at.after, min(ask.limit or wire_privacy.EXPORT_ROWS, wire_privacy.EXPORT_ROWS))
    following = await follow(subject, at, page.after, kinds)
    if ask.cursor and await was_erased_since(subject, at.begun_at):
        raise errors.InvalidCursor(
            "data was erased since this export began, and what it has read before may hold it; discard "
            "that, and begin a new export, without a cursor")
    return wire_privacy.ExportPage(
        subject.tenant_id, whom, at.kind, CARDS[table].purpose, to_utc(at.begun_at), to_utc(read_at), not at.after,
        page.looked_at, [Raw(line) for line in page.lines], list_proofs(table), kinds,
        following and engine.seal_cursor(caller, str(following), *mark))


def open_position(engine: Engine, caller: Caller, cursor: str | None, mark: tuple[Any, ...]) -> Position | None:
    """Return the position in a cursor; raises InvalidCursor for one of another export, or of one that is too old."""
    if (text := engine.open_cursor(caller, cursor, *mark)) is None:
        return None
    begun_at, kind, returns, after = text.split(" ", 3)
    if float(begun_at) < engine.backend.now() - VALID_SECONDS:
        raise errors.InvalidCursor("this export began more than seven days ago; begin a new one, without a cursor")
    return Position(float(begun_at), kind, int(returns), after)


async def was_erased_since(subject: Subject, begun_at: float) -> bool:
    """Whether an erasure in the tenant began or ended since a moment; asked after a page is read, not before."""
    async for row in read_rows(subject.engine, subject.tenant_id, stored.Erasure):
        if max(row.begun_at, row.ended_at or row.begun_at) >= begun_at:
            return True
    return False


async def follow(subject: Subject, at: Position, after: str | None, kinds: list[str]) -> Position | None:
    """Return where the next page begins: in the same kind, in the next one, at the receipts again, or nowhere."""
    if after is not None:
        return at._replace(after=after)
    if TABLE_OF_KIND[at.kind] is stored.Archived and at.returns != await count_returns(subject.engine,
                                                                                       subject.tenant_id):
        return Position(at.begun_at, stored.TABLES[stored.Receipt])
    later = kinds[kinds.index(at.kind) + 1:]
    return Position(at.begun_at, later[0], at.returns) if later else None


async def begin(caller: Caller, subject: Subject) -> float:
    """Write into the tenant's audit log that an export begins; return when."""
    event = "tenant_export_begun" if subject.whom is None else "principal_export_begun"

    def note(work: Work) -> float:
        audit_change(subject.engine, work, event, "warning", caller, about=subject.whom and str(subject.whom))
        return work.now
    return await change_record(subject.engine, caller, subject.tenant_id, stored.AuditHead, (), note)


async def look(subject: Subject, table: type[Struct], after: str, most: int) -> Look:
    """Read rows behind a key until they are `most` or large together, in parts that grow.

    Security: the last key of a page goes into its cursor.  If a key proves who somebody is, the table is read in one
    page; such tables are small.  Of a table that also has rows of other tenants only rows that are exported count, and
    none but these gives a cursor its key.
    """
    lines, looked_at, size, part, last = list[bytes](), 0, 0, FIRST_PART, after
    while True:
        rows = await subject.engine.backend.page(subject.home_of(table), queries.Rows(table, after, part))
        await subject.look_ahead(rows, after)
        pointers = [row for row in rows if isinstance(row, stored.Archived)]
        archived = {receipt.receipt_id: receipt for receipt in await load_archived(subject.engine, pointers)}
        for row in rows:
            receipt = archived[row.receipt_id] if isinstance(row, stored.Archived) else None
            if has_open_keys(table) and (looked_at >= most or size >= PAGE_BYTES):
                return Look(lines, looked_at, last)
            after = stored.export_key(row)
            if belongs := await subject.has(row, receipt):
                lines.append(encode_row(row, **{"receipt": receipt} if table is stored.Archived else {}))
                size += len(lines[-1])
            if belongs or subject.home_of(table) == subject.tenant_id:   # else other tenants' rows stand there, too
                looked_at, last = looked_at + 1, after
        if len(rows) < part:
            return Look(lines, looked_at, None)
        part = min(2 * part, wire_privacy.EXPORT_ROWS)


OPERATIONS = [
    Operation(export_tenant, "GET /v1/export/tenant", "A", "admin:read", "R"),
    Operation(export_principal, "GET /v1/export/principal", "a w A", "admin:read", "R"),
]
