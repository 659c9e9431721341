"""The rules of output: what is appended, and in which order it stands with the changes of the task's state.

How far the output of a task is stands in the row of its progress, which each batch loads with the task.  So an offset
is given under the task's lock, and a batch that changes the state of such a task adds an entry for it.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from asyncgate import EVERYONE, Batches, Caller, Engine, Extension, Job, Needs, Operation, Task, Work, its_task
from asyncgate.extras.output import wire_output
from asyncgate.parts.model import errors, queries, stored, stored_output, wire
from asyncgate.parts.model.content import check_size, encode_json, parse_json, sha256
from asyncgate.parts.model.news import News
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.process.readers import Wants

MOST_CHUNK_BYTES = 64 * 2**10
MOST_CHUNKS = 100_000           # of a task
MOST_APPENDED_BYTES = 2**18     # in one call
MOST_READ_BYTES = 2**20         # of a page, after which it ends early
ROWS_TOGETHER = 20              # that are read together
TASKS_TOLD = 50                  # tasks that one News names
CHUNK_OF_OUTPUT, CHUNK_OF_LOG, STATE_CHANGE = "chunk", "log", "state"
CHUNK_KINDS = {"output": CHUNK_OF_OUTPUT, "log": CHUNK_OF_LOG}        # of what is appended, by its stream


class OutputState(Struct, frozen=True, omit_defaults=True):
    """The state of a task, as an entry tells it."""

    status: wire.Status
    held: str | None = None


decode_output_state = msgspec.json.Decoder(OutputState).decode


def write_offset(offset: int) -> str:
    """Write an offset so that it sorts."""
    return f"{offset:010d}"


# Writing.


class Outputs(Extension):
    """Appends in batches of its own, beside those of claims, and lets each further state of a task be an entry."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.batches = Batches(engine.backend, engine.settings.batch_size, engine.batches.after_commit)

    async def append(self, caller: Caller, ask: wire_output.AppendOutput) -> wire_output.Appended:
        """Append chunks in the next of these batches."""
        self.batches.transact = self.engine.batches.transact
        reply: wire_output.Appended = await self.batches.join(
            caller.tenant_id, Job(partial(append_chunks, self.engine), its_task, caller, ask))
        return reply

    def wrap_transact(self, transact: Any) -> Any:
        """Return what also notes the states of tasks that give output: the last one, and each before its next one."""
        async def noting(tenant_id: str, needs: Needs, decide: Any) -> None:
            def decide_and_note(work: Work) -> None:
                if any(progress.outputs for progress in work.progress.values()):
                    watch_states(work)
                decide(work)
                if (note := work.before_change) is not None:
                    for task_id in (*work.added, *work.moved):
                        note(work.tasks[task_id])
            await transact(tenant_id, needs, decide_and_note)
        return noting

    def after_record_change(self, work: Work) -> None:
        """Call those who follow the output, here and at other gates."""
        ids = list(dict.fromkeys(key[0] for kind, key in work.kept if kind is stored_output.OutputEntry))
        self.engine.readers.announce_output(work.tenant_id, ids)
        if ids and self.engine.shared and not self.engine.is_alone():
            self.engine.shared.tell(News(work.tenant_id, outputs=tuple(ids[:TASKS_TOLD]), many=len(ids) > TASKS_TOLD))


def append_chunks(engine: Engine, work: Work, caller: Caller, ask: wire_output.AppendOutput) -> wire_output.Appended:
    """Append the chunks that are not there yet."""
    task, lease = engine.require_lease(work, caller, ask)
    before = work.find_progress(task.task_id)
    fresh = [bytes(chunk) for chunk in ask.chunks[count_known(task, before, ask):]]
    for text in fresh:
        check_size(text, MOST_CHUNK_BYTES, "a chunk")
        parse_json(text, "a chunk")
    size = sum(map(len, fresh))
    if size > MOST_APPENDED_BYTES:
        raise errors.PayloadTooLarge(f"the chunks have {size} bytes together, and a call appends {MOST_APPENDED_BYTES} "
                                     "at most: append them in several calls", limit=MOST_APPENDED_BYTES)
    if not fresh:
        return wire_output.Appended(before.outputs, before.chunks)
    check_output_room(engine, before, len(fresh), size)
    note_state(work, engine.start_work(work, task))
    now = work.find_progress(task.task_id)
    digest, offset = now.output_sha256, now.outputs
    for text in fresh:
        offset += 1
        digest = sha256(digest, offset, hashlib.sha256(text).hexdigest())
        work.keep_record(stored_output.OutputEntry(task.task_id, write_offset(offset), CHUNK_KINDS[ask.stream],
                                                   text.decode(), lease.fence, work.now))
    after = work.set_progress(task, outputs=offset, chunks=now.chunks + len(fresh),
                              output_bytes=now.output_bytes + size, output_sha256=digest)
    watch_states(work)
    return wire_output.Appended(after.outputs, after.chunks)


def count_known(task: Task, before: stored.Progress, ask: wire_output.AppendOutput) -> int:
    """Return how many of the chunks were appended before, by a call whose answer was lost."""
    if ask.position is None:
        return 0
    if ask.position > before.chunks:
        raise errors.OutputConflict(f"task {task.task_id} has had {before.chunks} chunks, not {ask.position}: append "
                                    "those between, or leave position out", chunks=before.chunks)
    return before.chunks - ask.position


def check_output_room(engine: Engine, before: stored.Progress, chunks: int, size: int) -> None:
    """Refuse chunks for which the output of a task has no room."""
    most = engine.settings.max_task_output_bytes
    for quota, used, more, limit in (("output_chunks", before.chunks, chunks, MOST_CHUNKS),
                                     ("max_task_output_bytes", before.output_bytes, size, most)):
        if used + more > limit:
            raise errors.OutputFull(f"task {before.task_id} has given {used} and may give {limit} ({quota}): put the "
                                    "rest elsewhere, and name it as an artifact", quota=quota, limit=limit)


def watch_states(work: Work) -> None:
    """Note each state from now on before the task's next one."""
    work.before_change = partial(note_next_state, work)


def note_next_state(work: Work, task: Task) -> None:
    """Add an entry for the state of a task that has given output."""
    if (progress := work.progress.get(task.task_id)) is not None and progress.outputs:
        note_state(work, task)


def note_state(work: Work, task: Task) -> None:
    """Add an entry for the state of a task, unless the last one says the same."""
    before, state = work.find_progress(task.task_id), f"{task.fence} {task.status} {task.held or ''}"
    if before.output_state == state:
        return
    offset = before.outputs + 1
    content = encode_json(OutputState(task.status, task.held)).decode()
    work.keep_record(stored_output.OutputEntry(task.task_id, write_offset(offset), STATE_CHANGE, content, task.fence,
                                               work.now))
    work.keep_progress(replace(before, outputs=offset, output_state=state))


async def append_output(engine: Engine, caller: Caller, ask: wire_output.AppendOutput) -> wire_output.Appended:
    """Append chunks of output to a leased task, for those who follow it while it is worked on.

    With position, a repeated call appends nothing twice.  The end of the task has the digest of its output.
    """
    if (outputs := engine.find_extension(Outputs)) is None:     # of an engine that somebody has made without extras
        engine.extend(outputs := Outputs(engine))
    return await outputs.append(caller, ask)


# Reading.


async def read_output(engine: Engine, caller: Caller, ask: wire_output.ReadOutput) -> wire_output.Output:
    """Read the output of a task: chunks, and the changes of its state between them, in one order for all readers.

    Over HTTP with Accept: text/event-stream it comes as server-sent events, until the task has ended.
    """
    read = partial(read_entries, engine, caller, ask)
    if ask.wait_seconds <= 0:
        return await read()
    return await engine.wait_to_read(caller, ask, Wants(output_of=ask.task_id), read,
                                     lambda page: page.entries or page.ended)


async def read_entries(engine: Engine, caller: Caller, ask: wire_output.ReadOutput) -> wire_output.Output:
    """Read the entries behind an offset that are there now."""
    task, _, progress = await engine.read_task(caller, ask.task_id)
    last, over = (progress.outputs if progress else 0), task.status in stored.TERMINAL
    if over and not last:       # it has given none, and this is all that there is to say
        entry = wire_output.EntryRecord(1, to_utc(task.completed_at or task.updated_at), task.fence, status=task.status)
        return wire_output.Output([entry] if ask.after < 1 else [], max(ask.after, 1), True)
    rows, limit = list[stored_output.OutputEntry](), engine.limit_page(ask.limit)
    size, more = 0, last > ask.after
    while more and len(rows) < limit and size <= MOST_READ_BYTES:
        place = rows[-1].entry_id if rows else write_offset(ask.after)
        page = await engine.backend.page(caller.tenant_id, queries.Rows(
            stored_output.OutputEntry, f"{ask.task_id}\0{place}", min(ROWS_TOGETHER, limit - len(rows))))
        mine = [row for row in page if row.task_id == ask.task_id]
        rows += mine
        size += sum(len(row.content) for row in mine)
        more = len(mine) == len(page) > 0
    after = int(rows[-1].entry_id) if rows else ask.after
    gone = over and not rows and not more       # it was kept long enough
    return wire_output.Output([show_entry(row) for row in rows], after, (over and after >= last) or gone)


def show_entry(row: stored_output.OutputEntry) -> wire_output.EntryRecord:
    """Show an entry."""
    record = wire_output.EntryRecord(int(row.entry_id), to_utc(row.at), row.fence)
    if row.kind in (CHUNK_OF_OUTPUT, CHUNK_OF_LOG):
        record.chunk = Raw(row.content.encode())
        record.stream = "log" if row.kind == CHUNK_OF_LOG else msgspec.UNSET
    else:
        state = decode_output_state(row.content)
        record.status, record.held = state.status, msgspec.UNSET if state.held is None else state.held
    return record


OPERATIONS = [
    Operation(append_output, "POST /v1/tasks/{task_id}/output", "w A", "tasks:lease", "W"),
    Operation(read_output, "GET /v1/tasks/{task_id}/output", EVERYONE, "tasks:read tasks:lease", "R"),
]
