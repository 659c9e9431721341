"""list_tasks: by age, or by the last change for whoever follows what changes.

A list by changes ends at `as_of`: whatever is committed later has changed later.  So a client that goes on from there
misses nothing and gets nothing twice, however many gates write meanwhile.
"""

from __future__ import annotations

from math import floor

from msgspec.structs import replace

from asyncgate import MOST_PAGE_BYTES, TASKS_AT_ONCE, Caller, Engine, Operation
from asyncgate.parts.model import queries, stored, wire
from asyncgate.parts.model.clock import instant
from asyncgate.parts.model.ids import span_ids
from asyncgate.parts.model.naming import make_filter, read_principal
from asyncgate.parts.model.views import measure_task, show_task, to_utc

MOST_TOTALED = 10_000       # tasks that are looked at for a total


async def list_tasks(engine: Engine, caller: Caller, ask: wire.ListTasks) -> wire.Tasks:
    """List tasks, newest first: an agent's own, or any in the tenant for an admin.

    By changes, as_of is the next changed_since.
    """
    limit, of = engine.limit_page(ask.limit), read_filters(engine, caller, ask)
    read = list_by_change if ask.order == "changed" or ask.changed_since is not None else list_by_age
    reply = await read(engine, caller, ask, replace(of, limit=limit + 1))
    if ask.count:
        [(reply.total, reply.at_least)] = await engine.backend.page(caller.tenant_id, queries.TaskCount(
            replace(of, changed_since=instant(ask.changed_since)), MOST_TOTALED))
    return reply


def read_filters(engine: Engine, caller: Caller, ask: wire.TaskFilters) -> queries.TaskFilter:
    """Return which tasks a caller asks for, of those that it may see."""
    owner = make_filter("created_by_kind", ask.created_by_kind, "created_by", ask.created_by) or read_principal(ask)
    if not caller.sees_all:
        owner = engine.require_self(caller, owner)
    since, end = span_ids(instant(ask.created_after), instant(ask.created_before), ask.id_prefix)
    return queries.TaskFilter(owner, ask.status, ask.type, end, 0, since, ask.held, ask.type_prefix,
                              ask.summary_prefix, ask.parent_task_id)


async def list_by_age(engine: Engine, caller: Caller, ask: wire.TaskFilters, of: queries.TaskFilter) -> wire.Tasks:
    """List tasks, newest first."""
    filters = ("tasks", *name_filters(of))
    before = engine.open_cursor(caller, ask.cursor, *filters) or of.before
    rows, shown = await read_listed(engine, caller.tenant_id, replace(of, before=before))
    ends = engine.seal_cursors(caller, [task.task_id for task, *_ in rows], shown, ask.cursor, *filters)
    return wire.Tasks([show_task(caller.tenant_id, *row) for row in rows[:shown]], *ends)


async def list_by_change(engine: Engine, caller: Caller, ask: wire.ListTasks, of: queries.TaskFilter) -> wire.Tasks:
    """List tasks, the latest change first; all pages up to the moment of the first."""
    of, tenant_id = replace(of, by_change=True, changed_since=instant(ask.changed_since)), caller.tenant_id
    filters = ("changed tasks", of.changed_since, *name_filters(of))
    if (place := engine.open_cursor(caller, ask.cursor, *filters)) is None:
        as_of, behind = await find_settled(engine, tenant_id), None
    else:
        settled, changed, last = place.split(" ")
        as_of, behind = float(settled), (float(changed), last)
    rows, shown = await read_listed(engine, tenant_id, replace(of, changed_before=as_of, behind=behind))
    places = [f"{as_of!r} {task.updated_at!r} {task.task_id}" for task, *_ in rows]
    ends = engine.seal_cursors(caller, places, shown, ask.cursor, *filters)
    return wire.Tasks([show_task(tenant_id, *row) for row in rows[:shown]], *ends, to_utc(as_of))


async def find_settled(engine: Engine, tenant_id: str) -> float:
    """Return before which moment no change is missing, as exactly as an answer tells it."""
    [settled] = await engine.backend.page(tenant_id, queries.Settled())
    # A strict gate decides as of the moment at which it has offered the receipts, and may commit much later.  Order:
    # what it had not offered when the database was asked is decided later.
    if engine.settings.receipt_consistency_mode == "strict":
        for row in await engine.backend.page(tenant_id, queries.OutboxFilter("", 1, "offered")):
            settled = min(settled, row.posted_at)
    return to_utc(floor(max(settled, 0.0) * 1_000_000) / 1_000_000).timestamp()


def name_filters(of: queries.TaskFilter) -> tuple[object, ...]:
    """Return what a cursor is sealed for: nobody goes on with other filters."""
    return (of.owner, of.status, of.type, of.since, of.before, of.held, of.type_prefix, of.summary_prefix,
            of.parent_task_id)


async def read_listed(engine: Engine, tenant_id: str, of: queries.TaskFilter) -> tuple[list[queries.Row], int]:
    """Return the tasks of a page, with one more where there is more, and how many of them to show.

    Large tasks end a page early, and few are read at a time: a page of them would fill the memory of a machine.
    """
    rows, size, step = list[queries.Row](), 0, TASKS_AT_ONCE
    while len(rows) < of.limit:
        step = min(step, of.limit - len(rows))
        if rows:
            of = place_behind(of, rows[-1][0])
        page = await engine.backend.page(tenant_id, replace(of, limit=step))
        for row in page:
            rows.append(row)
            size += measure_task(*row)
            if size > MOST_PAGE_BYTES and len(rows) > 1:
                return rows, len(rows) - 1
        if len(page) < step:
            break
        step = 1 + (MOST_PAGE_BYTES - size) * len(rows) // size     # as many as fit, if they are like those so far
    return rows, of.limit - 1


def place_behind(of: queries.TaskFilter, last: stored.Task) -> queries.TaskFilter:
    """Return the query that goes on behind a task."""
    return replace(of, behind=(last.updated_at, last.task_id)) if of.by_change else replace(of, before=last.task_id)


LIST_TASKS = Operation(list_tasks, "GET /v1/tasks", "a A s", "tasks:read", "R")
