"""Bulks: one thing that is done to many tasks, found by a filter, previewed and confirmed.

A preview changes nothing.  Its confirmation is sealed for the caller and holds the whole request, so that what is
confirmed is what was previewed.  A bulk goes through the tasks from the newest to the oldest, in small batches; each
batch stores how far it is in the transaction that changes its tasks.  So whoever asks again with the confirmation goes
on where it was, also after a crash, and no task is changed twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from asyncgate import Caller, Engine, Needs, Operation, Work
from asyncgate.parts.identity.admin import audit_change, write_audited
from asyncgate.parts.model import errors, queries, stored, wire, wire_operating
from asyncgate.parts.model.clock import instant
from asyncgate.parts.model.ids import first_id, mark_of, span_ids
from asyncgate.parts.model.naming import make_filter
from asyncgate.parts.model.views import summarize, to_utc, to_utc_or_none
from asyncgate.parts.operating import rerun

PAGE = 100              # tasks that are read together, and changed in one transaction
MOST_MATCHES = 1000     # that a preview counts
MOST_READ = 5000        # tasks that a preview reads, or a call that finds nothing to do
SAMPLE = 10
USUAL_TASKS, MOST_TASKS, MOST_SECONDS = 500, 5000, 5.0      # of one call
GOOD_SECONDS = 900      # a confirmation, to begin
PREFIX = "bulk_"        # of a confirmation: without it one of 64 begins with a dash, as an option of a command does


class Order(Struct, frozen=True):
    """What a confirmation holds."""

    bulk_id: str
    asked: wire_operating.PreviewBulk
    end: str                # newer tasks are not meant
    matches: int
    at_least: bool
    good_until: float


class Batch(Struct, frozen=True):
    """What a bulk does in one transaction."""

    tasks: list[stored.Task]
    position: str           # how far it is then
    over: bool              # whether there are no more tasks

    def halve(self) -> Batch:
        """Return its first half."""
        tasks = self.tasks[:len(self.tasks) // 2]
        return Batch(tasks, tasks[-1].task_id, False)


class Carried(Struct, frozen=True):
    """How far a bulk is after a batch, and how many of the tasks that it would create it did not."""

    bulk: stored.Bulk
    repeats: int = 0


T = TypeVar("T")
Plans = Mapping[str, rerun.RerunPlan | errors.GateError]


async def preview_bulk(engine: Engine, caller: Caller, ask: wire_operating.PreviewBulk) -> wire_operating.BulkPreview:
    """Count the tasks that a filter finds and show some; change nothing.  run_bulk then carries it out.

    It counts up to 1,000, and reads up to 5,000; at_least says whether there may be more.  A filter by held,
    status, type or created_by is the fastest.
    """
    if (ask.priority is not None) != (ask.action == "prioritize"):
        raise errors.InvalidRequest("priority belongs to the action prioritize, which needs it")
    make_filter("created_by_kind", ask.created_by_kind, "created_by", ask.created_by)
    now = engine.backend.now()
    end, tasks, read, more = find_end(ask, first_id(now + 1)), list[stored.Task](), 0, True
    position = end
    while more and len(tasks) < MOST_MATCHES and read < MOST_READ:
        rows = await read_tasks(engine, caller, ask, position)
        tasks += [task for task in rows if fits(ask, task)]
        position, read, more = rows[-1].task_id if rows else position, read + len(rows), len(rows) == PAGE
    matches, at_least = len(tasks[:MOST_MATCHES]), more or len(tasks) > MOST_MATCHES
    order = Order(engine.backend.ids.new(now, mark_of(caller.tenant_id)), ask, end, matches, at_least,
                  now + GOOD_SECONDS)
    text = msgspec.json.encode(order).decode()
    confirmation = PREFIX + engine.seal_cursor(caller, text, "bulk", caller.principal.kind, caller.principal.id)
    return wire_operating.BulkPreview(ask.action, matches, at_least, [
        wire_operating.BulkSample(task.task_id, task.type, task.status, task.owner, task.priority, task.held,
                                  to_utc(task.created_at), summarize(task))
        for task in tasks[:SAMPLE]], confirmation, to_utc(order.good_until))


async def run_bulk(engine: Engine, caller: Caller, ask: wire_operating.RunBulk) -> wire_operating.BulkRecord:
    """Carry out a bulk on the tasks that preview_bulk found: up to max_tasks of them, or for five seconds.

    While ended is false, call it again with the same confirmation; it goes on where it was, also after a crash, and
    does nothing twice.  Each task gets the receipts or the event that the single call would write, and counts as a
    call.  A task that is run again counts as a new one, too: where a limit is reached, what fits is done first.
    """
    order = open_order(engine, caller, ask.confirmation)
    left = most = min(ask.max_tasks or USUAL_TASKS, MOST_TASKS)
    until = asyncio.get_running_loop().time() + MOST_SECONDS
    bulk = await engine.backend.record(caller.tenant_id, stored.Bulk, order.bulk_id) or await begin_bulk(engine, caller,
                                                                                                         order)
    while bulk.ended_at is None and left > 0 and asyncio.get_running_loop().time() < until:
        batch = await find_batch(engine, caller, order, bulk.position, left)
        try:
            batch = await charge_batch(engine, caller, batch)
        except errors.RateLimitExceeded:
            if left == most:
                raise
            break       # the caller shall know what is done
        async with engine.batches.take_slice(caller.tenant_id):
            bulk = await carry_out_batch(engine, caller, order, bulk, batch)
        left -= max(len(batch.tasks), 1)
    return show_bulk(bulk)


async def get_bulk(engine: Engine, caller: Caller, ask: wire_operating.GetBulk) -> wire_operating.BulkRecord:
    """Return how far a bulk has got."""
    if (bulk := await engine.backend.record(caller.tenant_id, stored.Bulk, ask.bulk_id)) is None:
        raise errors.BulkNotFound(f"no bulk {ask.bulk_id}; preview_bulk and then run_bulk begin one")
    return show_bulk(bulk)


# What is asked.


def find_end(ask: wire_operating.PreviewBulk, now: str) -> str:
    """Return which id all tasks that are meant lie before."""
    _, end = span_ids(instant(ask.created_after), instant(ask.created_before), ask.id_prefix)
    return now if end is None else min(end, now)


async def read_tasks(engine: Engine, caller: Caller, ask: wire_operating.PreviewBulk, before: str,
                     most: int = PAGE) -> list[stored.Task]:
    """Return the next tasks that the filter of the database finds, newest first."""
    since, _ = span_ids(instant(ask.created_after), instant(ask.created_before), ask.id_prefix)
    owner = make_filter("created_by_kind", ask.created_by_kind, "created_by", ask.created_by)
    query = queries.TaskFilter(owner, ask.status, ask.type, before, most, since, ask.action == "release" or ask.held)
    return [task for task, *_ in await engine.backend.page(caller.tenant_id, query)]


def fits(ask: wire_operating.PreviewBulk, task: stored.Task) -> bool:
    """Whether a task is meant, as it is now."""
    owner = make_filter("created_by_kind", ask.created_by_kind, "created_by", ask.created_by)
    ended_after = instant(ask.ended_after)
    return (ask.status in (None, task.status) and ask.type in (None, task.type) and queries.wanted_is(owner, task.owner)
            and ask.held in (None, task.held is not None) and can_be(ask, task)
            and (ended_after is None or (task.completed_at is not None and task.completed_at >= ended_after)))


def can_be(ask: wire_operating.PreviewBulk, task: stored.Task) -> bool:
    """Whether the action changes anything about a task."""
    if ask.action == "release":
        return task.held is not None
    if ask.action == "prioritize":
        return task.status not in stored.TERMINAL and task.priority != ask.priority
    return (task.status in stored.TERMINAL) == (ask.action == "rerun")


def open_order(engine: Engine, caller: Caller, confirmation: str) -> Order:
    """Return the order of a confirmation that this caller was given."""
    try:
        sealed = confirmation.removeprefix(PREFIX)      # the releases before gave it without
        text = engine.open_cursor(caller, sealed, "bulk", caller.principal.kind, caller.principal.id)
    except errors.InvalidCursor:
        raise errors.InvalidConfirmation(
            "this confirmation was not given to this caller by preview_bulk; preview again "
            "and use the one that you get") from None
    return msgspec.json.decode(text or "", type=Order)


# One batch after another.


async def begin_bulk(engine: Engine, caller: Caller, order: Order) -> stored.Bulk:
    """Store that a bulk begins, unless somebody else has just done so."""
    def begin(work: Work) -> stored.Bulk:
        if (bulk := work.find_record(stored.Bulk, order.bulk_id)) is not None:
            return bulk
        if work.now > order.good_until:
            raise errors.InvalidConfirmation("this confirmation has expired, because its tasks may have changed; "
                                             "preview again")
        asked, by = order.asked, caller.principal
        bulk = stored.Bulk(order.bulk_id, asked.action, msgspec.json.encode(asked).decode(), by.kind, by.id,
                           order.matches,
                           order.at_least, work.now, work.now, order.end)
        work.keep_record(bulk)
        members = {name: value for name, value in msgspec.to_builtins(asked).items()
                   if value is not None and name not in ("action", "reason")}
        audit_change(engine, work, "bulk_begun", "warning", caller, bulk_id=bulk.bulk_id, action=asked.action,
                     asked=members, matches=order.matches, at_least=order.at_least, reason=asked.reason)
        return bulk
    return await write_bulk(engine, caller, order, [], begin)


async def find_batch(engine: Engine, caller: Caller, order: Order, position: str, most: int) -> Batch:
    """Return the next tasks that are meant; where there are none for long, only how far it has looked."""
    read, page = 0, min(PAGE, 3 * engine.batches.find_slice_size(PAGE))     # small while others want their turn
    while True:
        rows = await read_tasks(engine, caller, order.asked, position, page)
        tasks = [task for task in rows if fits(order.asked, task)]
        over, read = len(rows) < page, read + len(rows)
        position = rows[-1].task_id if rows else position
        if len(tasks) > most:
            return Batch(tasks[:most], tasks[most - 1].task_id, False)
        if tasks or over or read >= MOST_READ:
            return Batch(tasks, position, over)


async def charge_batch(engine: Engine, caller: Caller, batch: Batch) -> Batch:
    """Count each task of a batch as a call, or of as many of them as the rate limit has left; return those."""
    while len(batch.tasks):
        try:
            for charge in engine.on.charge:
                await charge(caller, RUN_BULK, len(batch.tasks))
            break
        except errors.RateLimitExceeded:
            if len(batch.tasks) == 1:
                raise
            batch = batch.halve()
    return batch


async def carry_out_batch(engine: Engine, caller: Caller, order: Order, before: stored.Bulk,
                          batch: Batch) -> stored.Bulk:
    """Change the tasks of a batch, or as many as the limit of new tasks has left."""
    plans = {task.task_id: plan for task in batch.tasks if order.asked.action == "rerun"
             and (plan := await plan_once(engine, caller, task)) is not None}
    while True:
        new = [plan.order for task in batch.tasks if isinstance(plan := plans.get(task.task_id), rerun.RerunPlan)]
        store = partial(store_batch, engine, order, before, batch, plans, len(new))
        try:
            done = await (engine.create(caller, wire.CreateTasks(tasks=[*new]), store) if new else store(caller))
        except errors.RateLimitExceeded:
            if len(batch.tasks) == 1:
                raise
            batch = batch.halve()
        else:
            bulk: stored.Bulk = done.bulk
            return bulk


async def store_batch(engine: Engine, order: Order, before: stored.Bulk, batch: Batch, plans: Plans, new: int,
                      caller: Caller) -> Carried:
    """Change the tasks of a batch, of which so many would be new, and store how far the bulk is: one transaction."""
    asked = order.asked

    def carry_out(work: Work) -> Carried:
        bulk = work.find_record(stored.Bulk, before.bulk_id)
        assert bulk is not None
        if (bulk.position, bulk.ended_at, bulk.done) != (before.position, before.ended_at, before.done):
            return Carried(bulk, new)       # somebody else goes on with it, too, or a strict gate settled a step of it
        bulk, whole = change_tasks(engine, work, caller, asked, bulk, batch, plans)
        bulk = replace(bulk, updated_at=work.now, ended_at=work.now if whole and batch.over else None)
        work.keep_record(bulk)
        if bulk.ended_at is not None:
            audit_change(engine, work, "bulk_ended", "warning", caller, bulk_id=bulk.bulk_id, action=bulk.action,
                         done=bulk.done, skipped=bulk.skipped, refused=bulk.refused)
        return Carried(bulk, new - (bulk.done - before.done))
    reruns = [plan for plan in plans.values() if isinstance(plan, rerun.RerunPlan)]
    return await write_bulk(engine, caller, order, batch.tasks, carry_out, reruns)


async def plan_once(engine: Engine, caller: Caller, task: stored.Task) -> rerun.RerunPlan | errors.GateError | None:
    """Return the plan to run a task again, or why it cannot be; None for one that was run again before."""
    events = await rerun.read_all_events(engine, caller.tenant_id, task)
    if any(event.event_type == "task.rerun" for event in events):
        return None
    if rerun.has_lost_payload(events):
        return errors.InvalidRequest(
            "its payload was lost when the gate was rebuilt from receipts; rerun_task takes another")
    try:
        return await rerun.plan_rerun(engine, replace(caller, principal=task.owner), task, Raw(task.payload.encode()))
    except errors.DatabaseUnavailable as refusal:
        return refusal


def change_tasks(engine: Engine, work: Work, caller: Caller, asked: wire_operating.PreviewBulk, bulk: stored.Bulk,
                 batch: Batch,
                 plans: Plans) -> tuple[stored.Bulk, bool]:
    """Change one task after another; return how far the bulk is, and whether it got through the batch.

    A quota that is full stops it there: the tasks behind it shall not be given up.
    """
    for task in batch.tasks:
        try:
            with work.undo_on_error():
                done = change_task(engine, work, caller, asked, bulk, task.task_id, plans.get(task.task_id))
            bulk = replace(bulk, done=bulk.done + done, skipped=bulk.skipped + (not done))
        except errors.QuotaExceeded:
            if task is batch.tasks[0]:
                raise
            return bulk, False
        except errors.GateError as refusal:
            bulk = replace(bulk, refused=bulk.refused + 1, problem=f"task {task.task_id}: {refusal}"[:1000])
        bulk = replace(bulk, position=task.task_id)
    return replace(bulk, position=batch.position), True


def change_task(engine: Engine, work: Work, caller: Caller, asked: wire_operating.PreviewBulk, bulk: stored.Bulk,
                task_id: str, plan: rerun.RerunPlan | errors.GateError | None) -> bool:
    """Do to one task what is asked; return whether anything was changed."""
    task = work.tasks.get(task_id)
    if task is None or not fits(asked, task):
        return False
    if asked.action == "cancel":
        engine.cancel(work, task, caller.principal, reason=asked.reason, bulk_id=bulk.bulk_id)
        return True
    if asked.action == "release":
        return engine.release_hold(work, caller, wire.ReleaseHold(task_id=task_id)).ok
    if asked.action == "prioritize":
        priority, by = asked.priority or 0, caller.principal
        work.add_event(task.task_id, "task.reprioritized", before=task.priority, priority=priority,
                       by={"kind": by.kind, "id": by.id})
        work.change_task(task, priority=priority)
        return True
    if isinstance(plan, errors.GateError):
        raise plan
    if plan is None or rerun.is_run_again(work, plan):
        return False
    return rerun.carry_out_rerun(engine, work, plan, caller.principal).repeats == 0


async def write_bulk(engine: Engine, caller: Caller, order: Order, tasks: list[stored.Task],
                     run: Callable[[Work], T], reruns: Iterable[rerun.RerunPlan] = ()) -> T:
    """Let `run` change a bulk and these tasks, in the tenant's next batch, with what it takes to run some again."""
    def load(needs: Needs, caller: Caller, ask: wire.Ask) -> None:
        needs.tasks.update([task.task_id for task in tasks])
        for plan in reruns:
            rerun.load_rerun(needs, plan)
        needs.records.add((stored.Bulk, (order.bulk_id,)))
    return await write_audited(engine, caller, caller.tenant_id, load, run)


# What is shown.


def show_bulk(bulk: stored.Bulk) -> wire_operating.BulkRecord:
    """Show how far a bulk is."""
    return wire_operating.BulkRecord(bulk.bulk_id, bulk.action, bulk.matches, bool(bulk.at_least), bulk.done,
                                     bulk.skipped,
                                     bulk.refused, bulk.problem, bulk.ended_at is not None,
                                     wire.Principal(bulk.by_kind, bulk.by_id),
                                     to_utc(bulk.begun_at), to_utc(bulk.updated_at), to_utc_or_none(bulk.ended_at))


RUN_BULK = Operation(run_bulk, "POST /v1/bulks", "A", "admin:write", "W", idempotent=True)
OPERATIONS = [
    Operation(preview_bulk, "POST /v1/bulks/preview", "A", "admin:read", "R"),
    RUN_BULK,
    Operation(get_bulk, "GET /v1/bulks/{bulk_id}", "A", "admin:read", "R"),
]
