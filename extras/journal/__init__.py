"""The step journal: a worker records what each step of a task gave, and the next worker skips what is done.

The gate only remembers: the worker replays its program, in the same order, and asks for nothing twice that is recorded.
A step is recorded under the lease, so a worker that has lost the task changes nothing.  Its number keeps its name and
its first value for ever; the same call again is answered with that value.
"""

from __future__ import annotations

import hashlib

from msgspec import UNSET, Raw

from asyncgate import EVERYONE, Caller, Engine, Needs, Operation, Settings, Work
from asyncgate.extras.journal import wire_journal
from asyncgate.parts.identity.quotas import check_step
from asyncgate.parts.model import errors, queries, stored, stored_journal
from asyncgate.parts.model.content import check_size, parse_json, sha256
from asyncgate.parts.model.views import to_utc

MOST_STEP_BYTES = 2**22     # of a page, after which it ends early
ROWS_AT_ONCE = 8            # that are read together


def its_step(needs: Needs, caller: Caller, ask: wire_journal.RecordStep) -> None:
    """Load the task that the ask names, and the step that has its number."""
    needs.tasks.add(ask.task_id)
    needs.records.add((stored_journal.RecordedStep, (ask.task_id, stored_journal.write_number(ask.seq))))


def record_step(engine: Engine, work: Work, caller: Caller, ask: wire_journal.RecordStep) -> wire_journal.Recorded:
    """Record the outcome of one step of a leased task, so that it is not repeated if this worker is lost.

    The same seq and name again is answered with the value that was recorded first; another name is refused.
    """
    value = bytes(ask.value)
    check_size(value, engine.settings.max_step_bytes, "value")
    parse_json(value, "value")
    task, lease = engine.require_lease(work, caller, ask)
    before, number = work.find_progress(task.task_id), stored_journal.write_number(ask.seq)
    if (known := work.find_record(stored_journal.RecordedStep, task.task_id, number)) is not None:
        if known.name != ask.name:
            raise errors.StepConflict(
                f"step {ask.seq} of task {task.task_id} was recorded as {known.name!r}, not {ask.name!r}: a program "
                "repeats its steps in the same order; list_steps shows them", seq=ask.seq, name=known.name)
        return wire_journal.Recorded(ask.seq, ask.name, before.steps, True, Raw(known.value.encode()))
    check_room(engine.settings, before, len(value))
    check_step(engine.settings, work, len(value))
    engine.start_work(work, task)
    digest = link_step(before.steps_sha256, ask.seq, ask.name, value)
    work.keep_record(stored_journal.RecordedStep(task.task_id, number, ask.name, value.decode(), before.steps + 1,
                                                 lease.fence, work.now, digest))
    after = work.set_progress(task, steps=before.steps + 1, step_bytes=before.step_bytes + len(value),
                              steps_sha256=digest)
    return wire_journal.Recorded(ask.seq, ask.name, after.steps)


def link_step(before: str | None, seq: int, name: str, value: bytes) -> str:
    """Return the digest of a step: the last one of a task is over all of them, in the order of recording."""
    return sha256(before, seq, name, hashlib.sha256(value).hexdigest())


def check_room(settings: Settings, before: stored.Progress, size: int) -> None:
    """Refuse a step for which the journal of its task has no room."""
    for name, used, more, most in (("max_task_steps", before.steps, 1, settings.max_task_steps),
                                   ("max_task_step_bytes", before.step_bytes, size, settings.max_task_step_bytes)):
        if used + more > most:
            raise errors.JournalFull(f"task {before.task_id} has recorded {used} and may record {most} ({name}): keep "
                                     "large values elsewhere and record pointers, or let a task of its own do the rest",
                                     quota=name, limit=most)


async def list_steps(engine: Engine, caller: Caller, ask: wire_journal.ListSteps) -> wire_journal.Steps:
    """List the recorded steps of a task, by number: for its owner, and for its worker to go on from.

    A page with large values ends early: follow next_cursor.
    """
    _, _, progress = await engine.read_task(caller, ask.task_id)
    if ask.seq is not None:
        row = await engine.backend.record(caller.tenant_id, stored_journal.RecordedStep, ask.task_id,
                                          stored_journal.write_number(ask.seq))
        return wire_journal.Steps([show_step(row, ask.values)] if row else [])
    limit, filters = engine.limit_page(ask.limit), ("steps", ask.task_id)
    place = engine.open_cursor(caller, ask.cursor, *filters) or ""
    rows, size, more = list[stored_journal.RecordedStep](), 0, progress is not None and progress.steps > 0
    while more and len(rows) <= limit and size <= MOST_STEP_BYTES:
        after = rows[-1].step_id if rows else place
        page = await engine.backend.page(caller.tenant_id, queries.Rows(
            stored_journal.RecordedStep, f"{ask.task_id}\0{after}", min(ROWS_AT_ONCE, limit + 1 - len(rows))))
        mine = [row for row in page if row.task_id == ask.task_id]
        rows += mine
        size += sum(len(row.value) for row in mine)
        more = len(mine) == len(page) > 0 and len(rows) <= limit
    shown = min(limit, len(rows) - (more and len(rows) > 1))
    ends = engine.seal_cursors(caller, [row.step_id for row in rows], shown, ask.cursor, *filters)
    return wire_journal.Steps([show_step(row, ask.values) for row in rows[:shown]], *ends)


def show_step(row: stored_journal.RecordedStep, valued: bool) -> wire_journal.StepRecord:
    """Show a step, with its value or without."""
    value = row.value.encode()
    return wire_journal.StepRecord(int(row.step_id), row.name, len(value), row.fence, to_utc(row.recorded_at),
                                   Raw(value) if valued else UNSET)


OPERATIONS = [
    Operation(record_step, "POST /v1/tasks/{task_id}/steps", "w A", "tasks:lease", "W", its_step, idempotent=True),
    Operation(list_steps, "GET /v1/tasks/{task_id}/steps", EVERYONE, "tasks:read tasks:lease", "R"),
]
