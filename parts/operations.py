"""The table of operations: the core's, those of each part and of the extras; every face is generated from it."""

from __future__ import annotations

from msgspec.structs import astuple

from asyncgate import CORE_OPERATIONS, Caller, Engine, Operation
from asyncgate.parts import service
from asyncgate.parts.extras import find_extras
from asyncgate.parts.identity import admin, budgets, incidents, usage
from asyncgate.parts.model import wire
from asyncgate.parts.operating import bulk, explain, lists, pausing, queues, rerun, searching, short_ids, workers
from asyncgate.parts.operating.listing import LIST_TASKS
from asyncgate.parts.receipts import admin as receipts_admin
from asyncgate.parts.receipts import archive_admin, schedules
from asyncgate.parts.receipts.emitting import EMIT_RECEIPT


def table_of(*operations: Operation) -> dict[str, Operation]:
    """Join operations into a table, and add `whoami`, which lists the operations that a caller may use."""
    async def whoami(engine: Engine, caller: Caller, ask: wire.WhoAmI) -> wire.You:
        """Tell who the credential belongs to, and what it may do.

        With bound: false it belongs to nobody in particular: each request names its caller (principal_id, worker_id).
        """
        kind, id, instance_id = astuple(caller.principal) if caller.bound else (None, None, None)
        return wire.You(
            caller.tenant_id, caller.bound, caller.role, sorted(caller.scopes),
            sorted(op.name for op in table.values() if op.fits(caller)), kind, id, instance_id, caller.key_id,
            sort_names(caller.capabilities), sort_names(caller.task_types))

    table = {op.name: op for op in (*operations, Operation(whoami, "GET /v1/whoami", "a w A", "", "B"))}
    return table


def sort_names(limited: frozenset[str] | None) -> list[str] | None:
    """Return the names that a key is limited to, sorted; None if it has no limit."""
    return None if limited is None else sorted(limited)


CORE = list(CORE_OPERATIONS.values())
BEFORE = [op.name for op in CORE].index("get_task_history")     # where list_tasks is listed
AT = [op.name for op in CORE].index("check_terminator")     # operations of schedules are listed among those of receipts
OPERATIONS: dict[str, Operation] = table_of(
    *CORE[:BEFORE], LIST_TASKS, *CORE[BEFORE:AT], EMIT_RECEIPT, schedules.REPORT_SCHEDULE, *CORE[AT:],
    *rerun.OPERATIONS, *explain.OPERATIONS, *lists.OPERATIONS, *schedules.OPERATIONS, *short_ids.OPERATIONS,
    *searching.OPERATIONS,
    *queues.OPERATIONS, *workers.OPERATIONS, *pausing.OPERATIONS, *bulk.OPERATIONS,
    *admin.OPERATIONS, *usage.OPERATIONS, *budgets.OPERATIONS, *incidents.OPERATIONS, *receipts_admin.OPERATIONS,
    *archive_admin.OPERATIONS, *service.OPERATIONS,
    *(op for extra in find_extras().values() for op in extra.operations))
