"""find_id: from some digits of an id, as people see and type them, to the whole."""

from __future__ import annotations

from typing import Literal

from asyncgate import Caller, Engine, Operation
from asyncgate.parts.model import errors, queries, stored, wire, wire_operating

MOST_FOUND = 10
SEARCHED = 200_000          # newest ids of which the ends are compared: an index of ends would cost each task a row
MOST_SCHEDULES = 1000


async def find_id(engine: Engine, caller: Caller, ask: wire_operating.FindId) -> wire_operating.FoundIds:
    """Find the whole id of a task, receipt or schedule from its last 12 digits, or from how it begins.

    Ends are looked for among the newest 200,000.  A schedule is found by its name, too.  Whoever is not an admin finds
    what they may read.
    """
    part, matches = ask.part.lower(), list[wire_operating.FoundId]()
    kinds: list[tuple[type[stored.Task] | type[stored.Receipt],
                      Literal["task", "receipt"]]] = [(stored.Task, "task"), (stored.Receipt, "receipt")]
    for table, kind in kinds:
        ids = await engine.backend.page(caller.tenant_id, queries.IdFilter(table, part, MOST_FOUND, SEARCHED))
        matches += [wire_operating.FoundId(kind, id) for id in sorted(ids) if await may_read(engine, caller, kind, id)]
    return wire_operating.FoundIds(matches + await find_schedules(engine, caller, ask.part))


async def may_read(engine: Engine, caller: Caller, kind: str, id: str) -> bool:
    """Whether a caller may read a task or a receipt."""
    if caller.sees_all:
        return True
    try:
        await (engine.get_task(caller, wire.GetTask(task_id=id)) if kind == "task"
               else engine.get_receipt(caller, wire.GetReceipt(receipt_id=id)))
    except errors.GateError:
        return False
    return True


async def find_schedules(engine: Engine, caller: Caller, part: str) -> list[wire_operating.FoundId]:
    """Return the schedules with this name, or with an id that begins or ends so."""
    owner = None if caller.sees_all else caller.principal
    rows = await engine.backend.page(caller.tenant_id, queries.ScheduleFilter(owner, None, MOST_SCHEDULES))
    return [wire_operating.FoundId("schedule", row.schedule_id) for row in rows if stored.read_details(row.details).name
            == part
            or row.schedule_id.removeprefix("sched-").startswith(part) or row.schedule_id.endswith(part)]


OPERATIONS = [
    Operation(find_id, "GET /v1/ids/{part}", "a w A", "tasks:read tasks:lease", "R"),
]
