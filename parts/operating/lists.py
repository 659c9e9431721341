"""Lists for people who look after a gate: schedules, and what is owed to anybody."""

from __future__ import annotations

from collections import Counter

from msgspec import UNSET

from asyncgate import Caller, Engine, Operation
from asyncgate.parts.model import queries, stored, wire, wire_operating
from asyncgate.parts.model.naming import read_principal
from asyncgate.parts.model.overdue import has_passed
from asyncgate.parts.model.views import to_utc, to_utc_or_none

MOST_OWED = 10_000   # obligations that are counted


async def list_schedules(engine: Engine, caller: Caller, ask: wire_operating.ListSchedules) -> wire_operating.Schedules:
    """List schedules as their schedulers last reported them: an agent's own, or any in the tenant for an admin.

    late_since is set once the next run is overdue.  In the order of their ids.
    """
    owner = engine.require_subject(caller, ask) if not caller.sees_all else read_principal(ask)
    limit, mark = engine.limit_page(ask.limit), ("schedules", owner and (owner.kind, owner.id))
    after = engine.open_cursor(caller, ask.cursor, *mark)
    rows = await engine.backend.page(caller.tenant_id, queries.ScheduleFilter(owner, after, limit + 1))
    ends = engine.seal_cursors(caller, [row.schedule_id for row in rows], limit, ask.cursor, *mark)
    now = engine.backend.now()
    return wire_operating.Schedules([show_schedule(row, now, ask.runs) for row in rows[:limit]], *ends)


def show_schedule(row: stored.Schedule, now: float, runs: int) -> wire_operating.ScheduleRecord:
    """Show a schedule, with its next runs."""
    due, details = row.next_run_at, stored.read_details(row.details)
    late_since = due if has_passed(row.late_after, now) else None
    return wire_operating.ScheduleRecord(
        row.schedule_id, wire.Principal(row.owner_kind, row.owner_id), row.scheduler, bool(row.enabled),
        to_utc_or_none(due),
        row.interval_seconds, to_utc_or_none(late_since), row.created, details.name, details.task_type,
        details.cron_expr, details.timezone, [to_utc(run) for run in details.next_runs[:runs]] if row.enabled else [],
        to_utc_or_none(details.last_run_at), details.last_status, details.last_task_id)


async def list_obligations(engine: Engine, caller: Caller,
                           ask: wire_operating.ListObligations) -> wire_operating.AllObligations:
    """List what is still owed to anybody in the tenant, oldest first: to whom, how old, and for which task.

    With principal_id it is what is owed to that principal.
    """
    to = read_principal(ask)
    limit, mark = engine.limit_page(ask.limit), ("all obligations", to and (to.kind, to.id))
    after = engine.open_cursor(caller, ask.cursor, *mark)
    rows = await engine.backend.page(caller.tenant_id, queries.ObligationFilter(to, after, limit + 1, settled=True))
    ends = engine.seal_cursors(caller, [row.receipt_id for row in rows], limit, ask.cursor, *mark)
    now = engine.backend.now()
    owed = await count_owed(engine, caller.tenant_id) if ask.count else UNSET
    return wire_operating.AllObligations([
        wire_operating.OpenObligation(row.receipt_id, row.receipt_type, row.to, row.task_id or None, row.schedule_id,
                                      to_utc(row.created_at), max(now - row.created_at, 0.0))
        for row in rows[:limit]], *ends, owed)


async def count_owed(engine: Engine, tenant_id: str) -> list[wire_operating.Owed]:
    """Return how much is owed to whom, the most first, among the first obligations."""
    rows = await engine.backend.page(tenant_id, queries.Rows(stored.Obligation, "", MOST_OWED + 1))
    counts = Counter((row.to_kind, row.to_id) for row in rows[:MOST_OWED])
    return [wire_operating.Owed(wire.Principal(*who), count, len(rows) > MOST_OWED) for who,
            count in counts.most_common()]


OPERATIONS = [
    Operation(list_schedules, "GET /v1/schedules", "a A", "tasks:read", "R"),
    Operation(list_obligations, "GET /v1/obligations", "A", "admin:read", "R"),
]
