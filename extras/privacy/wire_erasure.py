"""What goes over the wire to erase what is kept of a principal or of a tenant (spec 21.12.1)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, ClassVar, Literal

from msgspec import Struct

from asyncgate.parts.model import errors, examples, wire, wire_admin

ROWS_GONE = [{"table": "receipts", "changed": 12, "deleted": 0}, {"table": "tasks", "changed": 0, "deleted": 3}]
ERASURE_PLANNED = {
    "state": "planned", "changes": ROWS_GONE, "in_flight": 1, "leases": 0, "obligations": 1, "segments": 0,
    "goes": ["Its tasks, …"], "stays": ["Receipts keep …"], "afterwards": ["Backups keep …"]}
ERASED_AT_LAST = {
    "state": "erased", "changes": ROWS_GONE, "in_flight": 0, "leases": 0, "obligations": 0, "segments": 0, "goes": [],
    "stays": ["Receipts keep …"], "afterwards": ["Backups keep …"], "erasure_id": examples.NEXT_TASK_ID,
    "begun_at": examples.NOW,
    "ended_at": examples.LATER, "digest": "5f1b…", "proof": None}
ERASURE_SHOWN = {
    "erasure_id": examples.NEXT_TASK_ID, "tenant_id": examples.OTHER, "scope": "principal", "pseudonym": "erased-0c3a…",
    "ended": True, "changes": ROWS_GONE, "begun_at": examples.NOW, "ended_at": examples.LATER, "digest": "5f1b…",
    "proof": None}
NEXT_CALL = ("While state is planned, call it again with confirm. While it is erasing, call it again likewise: it "
             "goes on where it was. When it is nothing, look whether kind and spelling are "
             "right: nothing is kept under that name.")
Vacuum = Annotated[bool,
                   wire.says("on SQLite, by the operator: rewrite the file at the end, so that no page keeps what "
                             "was erased; writes wait meanwhile")]
PlanOnly = Annotated[bool, wire.says("only say what would go and what stays; changes nothing")]


class ErasePrincipal(wire.Ask, kw_only=True):
    """Erase what is kept of a principal."""

    example = ({"principal_kind": "human", "principal_id": "ada", "plan": True}, ERASURE_PLANNED)
    refusals = (errors.TenantNotFound, errors.InvalidConfirmation, errors.ArchiveUnavailable, errors.Forbidden)
    next_step = NEXT_CALL
    tenant: wire_admin.Whose = None
    principal_kind: Annotated[wire.Kind, wire.says("kind of the principal to erase")] = "agent"
    principal_id: Annotated[wire.Name, wire.says("the principal to erase")]
    plan: PlanOnly = False
    confirm: Annotated[wire.Name | None,
                       wire.says("the same principal_id again: what is erased never comes back")] = None
    vacuum: Vacuum = False


class EraseTenant(wire.Ask, kw_only=True):
    """Erase what is kept of a whole tenant."""

    needed: ClassVar[tuple[str, ...]] = ("tenant",)
    example = ({"tenant": examples.OTHER, "confirm": examples.OTHER}, ERASED_AT_LAST)
    refusals = (errors.TenantNotFound, errors.InvalidConfirmation, errors.ArchiveUnavailable, errors.Forbidden)
    next_step = NEXT_CALL
    tenant: wire_admin.Whose = None
    plan: PlanOnly = False
    confirm: Annotated[wire.Name | None,
                       wire.says("tenant again, as it is named there: what is erased never comes back")] = None
    vacuum: Vacuum = False


class ListErasures(wire.PageAsk, kw_only=True):
    """List erasures."""

    example = ({"limit": 20}, {"erasures": [ERASURE_SHOWN]})
    refusals = (errors.TenantNotFound,)
    tenant: wire_admin.Whose = None


class ErasedRows(Struct, frozen=True):
    """What happens or happened to the rows of one table."""

    table: str
    changed: int                # rows that lose their content and identifiers, and stay
    deleted: int


class ErasureReport(Struct):
    """What an erasure would do, does or did."""

    state: Literal["planned", "erasing", "erased", "nothing"]     # nothing: it was erased before, or was never here
    changes: list[ErasedRows]
    in_flight: int              # tasks that are canceled first, with receipts
    leases: int                 # leases on others' tasks that are given back first
    obligations: int            # open obligations that are discharged first
    segments: int               # files of the archive that are deleted, their other receipts brought back before
    goes: list[str]             # in words: what goes
    stays: list[str]            # what stays, and why
    afterwards: list[str]       # what is outside of the gate's reach, and what to do there
    erasure_id: str | None = None
    begun_at: datetime | None = None
    ended_at: datetime | None = None
    digest: str | None = None   # SHA-256 over the list of changed rows
    proof: str | None = None    # the signed statement (JWS), if the gate has a signing key
    ledger_task_id: str | None = None   # the task that asks for erasure at a ledger elsewhere, until it is completed
    at_least: bool = False      # a plan had no time to look at everything: it may be more, and segments are not counted


class ErasureRecord(Struct):
    """An erasure."""

    erasure_id: str
    tenant_id: str
    scope: Literal["principal", "tenant"]
    pseudonym: str | None       # that stands in the principal's place; none while it is under way
    ended: bool
    changes: list[ErasedRows]
    begun_at: datetime
    ended_at: datetime | None
    digest: str | None          # SHA-256 over the list of changed rows
    proof: str | None           # the signed statement (JWS), if the gate has a signing key


class Erasures(Struct):
    """A page of erasures, the oldest first."""

    columns = "erasure_id scope ended begun_at ended_at pseudonym"
    erasures: list[ErasureRecord]
    next_cursor: str | None = None
    cursor: str | None = None
