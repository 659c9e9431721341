"""rerun_task: a new task with the contract of an ended one, and linked to it by receipt.

A terminal status never changes (I7), so the ended task stays as it is.  Its owner owns the new task, too.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Raw, Struct
from msgspec.structs import replace

from asyncgate import EMISSION, Caller, Contract, Engine, Needs, Operation, Work, forbid, its_key, speaker
from asyncgate.parts.model import errors, queries, stored, wire
from asyncgate.parts.model.content import decode_json, parse_json
from asyncgate.parts.model.limiting import read_limits
from asyncgate.parts.model.trace import Trace
from asyncgate.parts.model.views import decode_terms

MOST_EVENTS = 200       # a rebuild is among the first events of a task
ABSENT = (b"", b"null")  # a lost payload may have been null; elsewhere null is not a payload
ENDS: dict[str, Contract] = {
    "succeeded": EMISSION["succeed"], "failed": EMISSION["fail"], "canceled": EMISSION["cancel"]}


class Rerun(wire.CreateTask, kw_only=True):
    """The gate's own request: create the task that runs an ended one again."""

    kept = (*wire.CreateTask.kept, "rerun_of")
    rerun_of: str


class RerunPlan(Struct, frozen=True):
    """What it takes to run an ended task again, read before the batch that does it."""

    task_id: str
    caller: Caller                      # the owner, whose new task it is
    order: Rerun
    parents: tuple[str, ...]


async def rerun_task(engine: Engine, caller: Caller, ask: wire.RerunTask) -> wire.Created:
    """Run an ended task again: a new task with its contract and payload, for the same owner.

    For the owner, or an admin.  The ended task stays as it is; its history names the new task, whose rerun_of names it.
    Its deadline and delay are not copied.  The same idempotency key again returns the first task.
    """
    if given := bytes(ask.payload):
        parse_json(given, "payload")
    if (snapshot := await engine.backend.task(caller.tenant_id, ask.task_id)) is None:
        raise errors.no_task(ask.task_id)
    task, by = snapshot[0], speaker(caller, ask)
    if not caller.unlimited and not task.owner.same(by):
        raise forbid(caller, f"task {task.task_id} belongs to another principal")
    if task.status not in stored.TERMINAL:
        raise errors.InvalidTransition(
            f"task {task.task_id} is {task.status}; rerun_task needs one that has ended: wait for "
            "its end with get_task, or end it with cancel_task", status=task.status)
    owner = by if task.owner.same(by) else task.owner
    payload = await choose_payload(engine, caller.tenant_id, task, ask)
    plan = await plan_rerun(engine, replace(caller, principal=owner), task, payload, ask.idempotency_key)

    def create(engine: Engine, work: Work, caller: Caller, order: Rerun) -> wire.Created:
        return carry_out_rerun(engine, work, plan, by)

    def load(needs: Needs, caller: Caller, order: Rerun) -> None:
        needs.tasks.add(task.task_id)
        load_rerun(needs, plan)

    made: wire.Created = await engine.write(create, load, plan.caller, plan.order)
    return made


async def plan_rerun(engine: Engine, caller: Caller, task: stored.Task, payload: Raw,
                     key: str | None = None) -> RerunPlan:
    """Read what it takes to run an ended task again, for its owner as the caller."""
    order, end = restate_order(task, payload, key), await find_end(engine, caller.tenant_id, task)
    trace = follow_trace(caller.trace, decode_terms(task.terms))
    return RerunPlan(task.task_id, replace(caller, bound=True, trace=trace), order, (end,))


def load_rerun(needs: Needs, plan: RerunPlan) -> None:
    """Load what creating the new task needs, and the answers to the end of the old one: two who run it again wait."""
    needs.receipts.update(plan.parents)
    its_key(needs, plan.caller, plan.order)


def carry_out_rerun(engine: Engine, work: Work, plan: RerunPlan, by: wire.Principal) -> wire.Created:
    """Create the new task, and let the history of the ended one name it."""
    work.require_task(plan.task_id)     # it may have been pruned meanwhile
    before = len(work.added)
    made = engine.create_task(work, plan.caller, plan.order, plan.parents)
    if len(work.added) > before:
        work.add_event(plan.task_id, "task.rerun", rerun_as=made.task_id, by={"kind": by.kind, "id": by.id})
    return made


def is_run_again(work: Work, plan: RerunPlan) -> bool:
    """Whether a new task answers the end of the ended one; only where the receipts that answer it are loaded."""
    return any(receipt.receipt_type == EMISSION["create"].type and not set(plan.parents).isdisjoint(receipt.parents)
               for receipt in work.receipts.values())


def follow_trace(trace: Trace | None, ended: stored.KeptTerms) -> Trace | None:
    """Return the trace of a new task: the caller's or none, and a link to that of the ended task."""
    if ended.traceparent is None:
        return trace
    return replace(trace or Trace(), trace_link=ended.traceparent)


async def find_end(engine: Engine, tenant_id: str, task: stored.Task) -> str:
    """Return the receipt that ended a task, also when it is in the archive."""
    type = ENDS[task.status].type
    query = queries.ReceiptFilter(None, task.task_id, type, None, 1, newest=True)
    if rows := await engine.backend.page(tenant_id, query):
        return rows[0].receipt_id
    away = await engine.backend.page(tenant_id, queries.ArchivedFilter(task.task_id))
    if ids := [pointer.receipt_id for pointer in away if pointer.receipt_type == type]:
        return ids[-1]
    raise errors.DatabaseUnavailable(f"the receipt that ended task {task.task_id} cannot be read yet; try again",
                                     retry_after=1)


async def choose_payload(engine: Engine, tenant_id: str, task: stored.Task, ask: wire.RerunTask) -> Raw:
    """Return the payload of an ended task, or the given one for a task whose payload was lost."""
    lost = has_lost_payload(await read_events(engine, tenant_id, task))
    if lost and not bytes(ask.payload):
        raise errors.InvalidRequest(
            f"the payload of task {task.task_id} was lost when the gate was rebuilt from receipts; "
            "rerun_task needs it as payload")
    if bytes(ask.payload) not in ABSENT and not lost:
        raise errors.InvalidRequest(
            f"task {task.task_id} has its payload, and rerun_task uses that; leave payload out, or "
            "call create_task for a task with another one")
    return ask.payload if lost else Raw(task.payload.encode())


async def read_events(engine: Engine, tenant_id: str, task: stored.Task,
                      after: str | None = None) -> list[stored.Event]:
    """Return the first events of a task, or the next ones."""
    return await engine.backend.page(tenant_id, queries.EventFilter(task.task_id, after, MOST_EVENTS))


async def read_all_events(engine: Engine, tenant_id: str, task: stored.Task) -> list[stored.Event]:
    """Return all events of a task."""
    events = page = await read_events(engine, tenant_id, task)
    while len(page) == MOST_EVENTS:
        page = await read_events(engine, tenant_id, task, page[-1].event_id)
        events = events + page
    return events


def has_lost_payload(events: Iterable[stored.Event]) -> bool:
    """Whether a task was rebuilt from receipts, which hold only the hash of a payload."""
    return any(event.event_type == "task.rebuilt" and "payload" in decode_json(event.payload)["unknown"]
               for event in events)


def restate_order(task: stored.Task, payload: Raw, idempotency_key: str | None) -> Rerun:
    """Return the request for a task with the contract of another one."""
    terms: stored.KeptTerms = decode_terms(task.terms)
    kept = {name: getattr(terms, name) for name in wire.Terms.__struct_fields__}
    length = terms.timeouts.lease_ttl_seconds if terms.timeouts else None
    # a deadline was meant for the first run
    kept["timeouts"] = wire.Timeouts(lease_ttl_seconds=length) if length else None
    return Rerun(
        type=task.type, payload=payload, payload_pointer=task.payload_pointer, principal_ai=task.principal_ai,
        requirements=Raw(task.requirements.encode()), priority=task.priority, max_attempts=task.max_attempts,
        retry_backoff_seconds=task.retry_backoff_seconds, max_expiries=task.max_expiries,
        idempotency_key=idempotency_key, rerun_of=task.task_id, limits=dict(read_limits(task.limits)),
        unique=terms.unique, **kept)


OPERATIONS = [
    Operation(rerun_task, "POST /v1/tasks/{task_id}/rerun", "a A", "tasks:write", "W"),
]
