"""What goes over the wire about the steps of a task."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType, field

from asyncgate.parts.model import errors, examples, wire

RECORDED = {"seq": 1, "name": "fetch", "value": {"status": 200}, "value_bytes": 14, "fence": 1,
            "recorded_at": examples.NOW}
Number = Annotated[int, Meta(ge=1, le=10**9)]


class RecordStep(wire.LeaseAsk, kw_only=True):
    """Record one step of a task."""

    example = ({**examples.HOLDER, "seq": 1, "name": "fetch", "value": {"status": 200}},
               {"seq": 1, "name": "fetch", "steps": 1})
    refusals = (*wire.LeaseAsk.refusals, errors.StepConflict, errors.JournalFull, errors.QuotaExceeded)
    next_step = "Do the next step. Recording does not renew the lease: call renew_lease."
    seq: Annotated[Number, wire.says("the number of the step: 1, 2, 3, … in the order of the program")]
    name: Annotated[wire.Name, wire.says("what the step does; under its number it stays the same")]
    value: Annotated[wire.AnyJson, wire.says("the outcome of the step, up to 256 KB; null if there is none")] = field(
        default_factory=wire.nothing)


class ListSteps(wire.PageAsk, kw_only=True):
    """List the steps of a task."""

    needed = ("task_id",)
    example = ({"task_id": examples.TASK_ID}, {"steps": [RECORDED]})
    refusals = (errors.TaskNotFound,)
    next_step = "A worker skips what is recorded and goes on with the first step that is not."
    task_id: Annotated[wire.Name, wire.says("the task")] = ""
    seq: Annotated[Number | None, wire.says("only the step with this number")] = None
    values: Annotated[bool, wire.says("false: without the values, to see what there is")] = True


class Recorded(Struct, omit_defaults=True):
    """A step that is recorded now, or was before: then `value` is what it gave the first time."""

    seq: int
    name: str
    steps: Annotated[int, wire.says("how many steps the task has")]
    replayed: bool = False
    value: wire.AnyJson | UnsetType = UNSET


class StepRecord(Struct):
    """One recorded step."""

    seq: int
    name: str
    value_bytes: Annotated[int, wire.says("how large its value is")]
    fence: Annotated[int, wire.says("the lease under which it was recorded")]
    recorded_at: datetime
    value: Annotated[wire.AnyJson | UnsetType, wire.says("its outcome; absent with values: false")] = UNSET


class Steps(Struct):
    """A page of steps, in the order of their numbers."""

    columns = "seq name fence recorded_at"
    steps: list[StepRecord]
    next_cursor: str | None = None
    cursor: str | None = None
