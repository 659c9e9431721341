"""Waiting for several tasks, and canceling a task with its descendants."""

from __future__ import annotations

from typing import Any

from asyncgate import CORE_OPERATIONS, Caller, Engine, Extension, Operation, Task, Work
from asyncgate.extras.families import wire_families
from asyncgate.parts.model import errors, queries, stored, stored_families, wire
from asyncgate.parts.model.families import Family, read_family
from asyncgate.parts.model.identities import lower_id
from asyncgate.parts.process.readers import Wants, name_family

CHILDREN_AT_ONCE = 50       # children that are read together, and canceled in one transaction
RESUME_SECONDS, CUT_OFF_SECONDS = 30.0, 60.0    # between two looks for cascades that were cut off, and their age
MOST_RESUMED = 100          # of them, at one look
CANCEL_TASK = CORE_OPERATIONS["cancel_task"]


async def wait_tasks(engine: Engine, caller: Caller, ask: wire_families.WaitTasks) -> wire_families.Waited:
    """Tell which tasks have ended, and how: some by their ids, or all children of one.

    With wait_seconds the answer comes when all of them have ended (or with until: any the first), or when the time is
    over, whichever is first.  However a task ends, it has ended: succeeded, failed or canceled.
    """
    if (ask.ids is None) == (ask.parent_task_id is None):
        raise errors.InvalidRequest("wait_tasks takes ids, or parent_task_id for all children of a task")
    ids = list(dict.fromkeys(lower_id(task_id) for task_id in ask.ids or ()))
    ended = dict[str, wire.ChildEnd]()

    async def read() -> wire_families.Waited:
        if ask.parent_task_id is not None:
            _, _, progress = await engine.read_task(caller, ask.parent_task_id)
            family = read_family(progress) or Family()
            return make_answer(ask, family.open, family.ended, list(family.ends))
        for task_id in ids:
            if task_id not in ended:
                task, _, _ = await engine.read_task(caller, task_id)
                if task.status in stored.TERMINAL:
                    ended[task_id] = wire.ChildEnd(task_id, task.status)
        return make_answer(ask, len(ids) - len(ended), len(ended), [ended[task_id] for task_id in ids
                                                                    if task_id in ended])
    if ask.wait_seconds <= 0:
        return await read()
    wants = Wants(tuple(ids) or (name_family(ask.parent_task_id or ""),))
    return await engine.wait_to_read(caller, ask, wants, read, lambda reply: reply.done)


def make_answer(ask: wire_families.WaitTasks, open: int, ended: int,
                ends: list[wire.ChildEnd]) -> wire_families.Waited:
    """Return an answer: done when nothing is open, or when any is enough and has come."""
    return wire_families.Waited(open == 0 or (ask.until == "any" and ended > 0), open, ends)


class Families(Extension):
    """Cancels the descendants of a task that is canceled with cascade."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def begin_cascade(self, work: Work, task: Task, ask: wire.CancelTask, by: wire.Principal) -> None:
        """Note with the cancellation that the descendants follow, so that upkeep goes on if this process cannot."""
        family = read_family(work.progress.get(task.task_id))
        if family is not None and work.find_record(stored_families.Cascade, task.task_id) is None:
            work.keep_record(stored_families.Cascade(task.task_id, by.kind, by.id, ask.reason, work.now))

    async def after_call(self, op: Operation, caller: Caller, ask: wire.Ask, reply: Any) -> None:
        """Cancel the descendants; who gets no answer repeats the call, which goes on where this one was."""
        if op is CANCEL_TASK and isinstance(ask, wire.CancelTask) and ask.cascade:
            cascade = await self.engine.backend.record(caller.tenant_id, stored_families.Cascade, ask.task_id)
            reply.descendants = 0 if cascade is None else await finish_cascade(self.engine, caller.tenant_id, cascade)


async def resume_cascades(engine: Engine, cut_off_seconds: float = CUT_OFF_SECONDS) -> int:
    """Go on with cascades that were cut off, in the one process that leads; return how many tasks were canceled."""
    if not await engine.leads("families"):
        return 0
    begun_before = engine.backend.now() - cut_off_seconds
    canceled = 0
    for tenant_id, task_id in await engine.backend.cut_cascades(begun_before, MOST_RESUMED):
        if (cascade := await engine.backend.record(tenant_id, stored_families.Cascade, task_id)) is not None:
            canceled += await finish_cascade(engine, tenant_id, cascade)
    return canceled


async def finish_cascade(engine: Engine, tenant_id: str, cascade: stored_families.Cascade) -> int:
    """Cancel what has not ended below a task, from the top down; return how many tasks that were.

    A task gets no children once it has ended, so whoever reads the children of one behind its end sees all of them.
    """
    left, canceled = [cascade.task_id], 0
    while left:
        parent, before = left.pop(), None
        while rows := await engine.backend.page(tenant_id, queries.TaskFilter(
                None, None, None, before, CHILDREN_AT_ONCE, parent_task_id=parent)):
            before = rows[-1][0].task_id
            open = [task.task_id for task, *_ in rows if task.status not in stored.TERMINAL]
            left += [task.task_id for task, _, progress in rows if task.task_id not in open and read_family(progress)]
            if open:
                ended, parents = await cancel_children(engine, tenant_id, open, parent, cascade)
                canceled, left = canceled + ended, left + parents
    await engine.change(tenant_id, lambda work: work.drop_record(stored_families.Cascade, cascade.task_id),
                        (stored_families.Cascade, (cascade.task_id,)))
    return canceled


async def cancel_children(engine: Engine, tenant_id: str, ids: list[str], parent: str,
                          cascade: stored_families.Cascade) -> tuple[int, list[str]]:
    """Cancel some children of a task in one transaction; return how many, and which of them have children."""
    def cancel(work: Work) -> tuple[int, list[str]]:
        tasks: list[Task] = [work.tasks[task_id] for task_id in ids if task_id in work.tasks]
        open = [task for task in tasks if task.status not in stored.TERMINAL]
        for task in open:
            engine.cancel(work, task, wire.Principal(cascade.by_kind, cascade.by_id), reason=cascade.reason,
                          cascade_of=cascade.task_id)
        return len(open), [task.task_id for task in tasks if read_family(work.progress.get(task.task_id))]
    async with engine.batches.take_slice(tenant_id):
        return await engine.change(tenant_id, cancel, tasks=[*ids, parent])
