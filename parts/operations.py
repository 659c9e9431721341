"""The table of operations: those of the heart, and those that each part declares; every face is made of it."""

from __future__ import annotations

from msgspec.structs import astuple

from asyncgate import CORE_OPERATIONS, Caller, Engine, Operation
from asyncgate.parts import service
from asyncgate.parts.identity import admin, incidents
from asyncgate.parts.model.wire import WhoAmI, You
from asyncgate.parts.operating import rerun
from asyncgate.parts.receipts import admin as receipts_admin
from asyncgate.parts.receipts import archive_admin
from asyncgate.parts.receipts.emitting import EMIT_RECEIPT
from asyncgate.parts.receipts.schedules import REPORT_SCHEDULE


def table_of(*operations: Operation) -> dict[str, Operation]:
    """Join operations into the table of a gate, with `whoami`, which names those that a caller may use."""
    async def whoami(engine: Engine, caller: Caller, ask: WhoAmI) -> You:
        """Tell who the credential stands for, and what it may do.

        With bound: false it stands for everybody: each request says who makes it (principal_id, worker_id).
        """
        kind, id, instance_id = astuple(caller.principal) if caller.bound else (None, None, None)
        return You(
            caller.tenant_id, caller.bound, caller.role, sorted(caller.scopes),
            sorted(op.name for op in table.values() if op.fits(caller)), kind, id, instance_id, caller.key_id,
            names(caller.capabilities), names(caller.task_types))

    table = {op.name: op for op in (*operations, Operation(whoami, "GET /v1/whoami", "a w A", "", "B"))}
    return table


def names(limited: frozenset[str] | None) -> list[str] | None:
    """Return what a key is limited to; None is no limit."""
    return None if limited is None else sorted(limited)


CORE = list(CORE_OPERATIONS.values())
AT = [op.name for op in CORE].index("check_terminator")     # those of schedules stand among those of receipts
OPERATIONS: dict[str, Operation] = table_of(
    *CORE[:AT], EMIT_RECEIPT, REPORT_SCHEDULE, *CORE[AT:], *rerun.OPERATIONS, *admin.OPERATIONS, *incidents.OPERATIONS,
    *receipts_admin.OPERATIONS, *archive_admin.OPERATIONS, *service.OPERATIONS)
