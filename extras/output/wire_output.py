"""What goes over the wire about the output of a task."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from asyncgate.parts.model import errors, examples, wire

OutputKind = Literal["output", "log"]
MOST_CHUNKS_OF_A_CALL = 200
CHUNK = {"offset": 2, "at": examples.NOW, "fence": 1, "chunk": "Chapter 1"}


class AppendOutput(wire.LeaseAsk, kw_only=True):
    """Append to the output of a task."""

    example = ({**examples.HOLDER, "chunks": ["Chapter 1", {"page": 1}]}, {"offset": 3, "chunks": 2})
    refusals = (*wire.LeaseAsk.refusals, errors.OutputConflict, errors.OutputFull)
    next_step = "Append the next chunks. Output does not renew the lease: call renew_lease."
    chunks: Annotated[Annotated[list[wire.AnyJson], Meta(min_length=1, max_length=MOST_CHUNKS_OF_A_CALL)], wire.says(
        "texts, or any JSON, up to 64 KB each")]
    position: Annotated[wire.Natural | None, wire.says(
        "how many chunks the task has had before these; then a repeated call appends nothing twice")] = None
    stream: Annotated[OutputKind, wire.says(
        "log: lines for whoever looks after the worker, which are not output")] = "output"


class Appended(Struct):
    """Where the output of a task ends now."""

    offset: Annotated[int, wire.says("of the last entry")]
    chunks: Annotated[int, wire.says("how many chunks the task has had: the position of the next ones")]


class ReadOutput(wire.TaskAsk, kw_only=True):
    """Read the output of a task."""

    acts = False
    filters = True
    example = ({"task_id": examples.TASK_ID, "after": 1, "wait_seconds": 30},
               {"entries": [CHUNK], "after": 2, "ended": False})
    next_step = "Unless ended, repeat with after from the answer."
    after: Annotated[wire.Natural, wire.says("the offset of the last entry that is known; 0: from the beginning")] = 0
    limit: Annotated[wire.Whole | None, wire.says("default 50, clamped to 200")] = None
    wait_seconds: Annotated[wire.Wait, wire.says("seconds to wait for a further entry; clamped to 30")] = 0.0


class FollowOutput(ReadOutput, kw_only=True):
    """Follow the output of a task."""

    ticket: Annotated[str | None, wire.says("instead of a credential, for a browser")] = None


class EntryRecord(Struct, omit_defaults=True):
    """An entry: a chunk, or a change of the task's state."""

    offset: int
    at: datetime
    fence: Annotated[int, wire.says("the number of the lease")]
    chunk: wire.AnyJson | UnsetType = UNSET
    stream: Annotated[str | UnsetType, wire.says("log: the chunk is of the log, and not output")] = UNSET
    status: Annotated[wire.Status | UnsetType, wire.says("of the task from here on, if its state has changed")] = UNSET
    held: Annotated[str | UnsetType, wire.says("why it is on hold from here on")] = UNSET


class Output(Struct):
    """A page of the output of a task."""

    columns = "offset at status stream chunk"
    entries: list[EntryRecord]
    after: Annotated[int, wire.says("the offset of the last entry, or the given one if there is none")]
    ended: Annotated[bool, wire.says("true: the task has ended, and nothing comes after these")]
