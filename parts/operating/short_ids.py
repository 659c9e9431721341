"""find_id: from some digits of an id, as people see and type them, to the whole."""

from __future__ import annotations

from typing import Literal

from asyncgate import Caller, Engine, Operation
from asyncgate.parts.model.errors import GateError
from asyncgate.parts.model.queries import IdFilter, ScheduleFilter
from asyncgate.parts.model.stored import Receipt, Task, read_details
from asyncgate.parts.model.wire import GetReceipt, GetTask
from asyncgate.parts.model.wire_operating import FindId, FoundId, FoundIds

MOST_FOUND = 10
SEARCHED = 200_000          # newest ids of which the ends are compared: an index of ends would cost each task a row
MOST_SCHEDULES = 1000


async def find_id(engine: Engine, caller: Caller, ask: FindId) -> FoundIds:
    """Find the whole id of a task, receipt or schedule from its last 12 digits, or from how it begins.

    Ends are looked for among the newest 200,000.  A schedule is found by its name, too.  Whoever is not an admin finds
    what they may read.
    """
    part, found = ask.part.lower(), list[FoundId]()
    kinds: list[tuple[type[Task] | type[Receipt], Literal["task", "receipt"]]] = [(Task, "task"), (Receipt, "receipt")]
    for table, kind in kinds:
        ids = await engine.backend.page(caller.tenant_id, IdFilter(table, part, MOST_FOUND, SEARCHED))
        found += [FoundId(kind, id) for id in sorted(ids) if await may_read(engine, caller, kind, id)]
    return FoundIds(found + await find_schedules(engine, caller, ask.part))


async def may_read(engine: Engine, caller: Caller, kind: str, id: str) -> bool:
    """Whether a caller may read a task or a receipt."""
    if caller.sees_all:
        return True
    try:
        await (engine.get_task(caller, GetTask(task_id=id)) if kind == "task"
               else engine.get_receipt(caller, GetReceipt(receipt_id=id)))
    except GateError:
        return False
    return True


async def find_schedules(engine: Engine, caller: Caller, part: str) -> list[FoundId]:
    """Return the schedules with this name, or with an id that begins or ends so."""
    owner = None if caller.sees_all else caller.principal
    rows = await engine.backend.page(caller.tenant_id, ScheduleFilter(owner, None, MOST_SCHEDULES))
    return [FoundId("schedule", row.schedule_id) for row in rows if read_details(row.details).name == part
            or row.schedule_id.removeprefix("sched-").startswith(part) or row.schedule_id.endswith(part)]


OPERATIONS = [
    Operation(find_id, "GET /v1/ids/{part}", "a w A", "tasks:read tasks:lease", "R"),
]
