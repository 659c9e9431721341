"""What goes over the wire to export everything about a tenant or a principal (spec 21.12.1)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, ClassVar

from msgspec import Struct

from asyncgate.parts.model import errors, examples, wire, wire_admin

EXPORT_ROWS = 1000      # of a page
EXAMPLE_PAGE = {
    "tenant": examples.TENANT_ID, "principal": None, "kind": "progress",
    "purpose": "how far a task is, for the next worker",
    "begun_at": examples.NOW, "read_at": examples.LATER, "is_first": True, "looked_at": 1, "rows": [{
        "task_id": examples.TASK_ID, "progress": {"pages": 2}, "sequence": 1, "fence": 1, "updated_at": examples.NOW}],
    "left_out": [], "kinds": ["tasks", "leases", "progress"], "next_cursor": None}
Limit = Annotated[wire.Whole | None, wire.says("rows to look at; default and at most 1,000")]
Cursor = Annotated[str | None, wire.says("next_cursor; an export begins without one, which is audited")]
NEXT_STEP = "While next_cursor is not null, repeat with it as cursor."


class ExportTenant(wire.Ask, kw_only=True):
    """Read everything about a tenant."""

    example = ({"limit": 1000}, EXAMPLE_PAGE)
    refusals = (errors.TenantNotFound, errors.InvalidCursor, errors.ArchiveUnavailable)
    next_step = NEXT_STEP
    filters: ClassVar[bool] = True
    tenant: wire_admin.Whose = None
    limit: Limit = None
    cursor: Cursor = None


class ExportPrincipal(wire.Ask, kw_only=True):
    """Read everything about a principal."""

    example = ({"principal_kind": "agent", "principal_id": "ada"}, EXAMPLE_PAGE | {"principal": examples.ADA})
    refusals = (errors.TenantNotFound, errors.InvalidCursor, errors.ArchiveUnavailable)
    next_step = NEXT_STEP
    filters: ClassVar[bool] = True
    principal_kind: Annotated[wire.Kind | None, wire.says("default agent")] = None
    principal_id: Annotated[wire.Name | None, wire.says("default: the caller")] = None
    tenant: wire_admin.Whose = None
    limit: Limit = None
    cursor: Cursor = None


class ExportPage(Struct):
    """One page of an export: some rows of one kind."""

    tenant: str                 # whose rows these are: the tenant's id
    principal: wire.Principal | None     # and the principal, if the export is about one
    kind: str                   # the table that the rows are from
    purpose: str                # why the gate keeps such rows
    begun_at: datetime          # when the export began
    read_at: datetime           # when these rows were read
    is_first: bool              # of its kind: drop the rows of this kind that came before, because all come again
    looked_at: int              # number of rows read; an export of a principal leaves some of them out
    rows: list[wire.AnyJson]         # objects: times are RFC 3339, stored JSON is nested
    left_out: list[str]         # fields that no export has, because they prove who somebody is
    kinds: list[str]            # all kinds of the export, in its order
    next_cursor: str | None     # null at the end
