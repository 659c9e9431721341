"""What goes over the wire to wait for several tasks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from asyncgate.parts.model import errors, examples, wire

MOST_WAITED_FOR = 100


class WaitTasks(wire.AsEither, kw_only=True):
    """Wait for tasks to end."""

    acts = False
    example = ({"ids": [examples.TASK_ID, examples.NEXT_TASK_ID], "until": "any", "wait_seconds": 30},
               {"done": True, "open": 1, "ended": [{"task_id": examples.TASK_ID, "status": "succeeded"}]})
    refusals = (errors.TaskNotFound,)
    next_step = ("get_task shows the result of each that has ended. While done is false, call it again; after any, "
                 "leave out those that have ended.")
    ids: Annotated[Annotated[list[wire.Name], Meta(min_length=1, max_length=MOST_WAITED_FOR)] | None, wire.says(
        "the tasks, up to 100; or parent_task_id")] = None
    parent_task_id: Annotated[wire.Name | None, wire.says("all children of this task")] = None
    until: Annotated[wire.UntilChildren, wire.says("all: each of them has ended; any: at least one")] = "all"
    wait_seconds: Annotated[wire.Wait, wire.says("seconds to wait; clamped to 30")] = 0.0


class Waited(Struct):
    """How many of the tasks are open, and how the others ended; of a family up to 100 ends, the last ones."""

    done: bool
    open: int
    ended: list[wire.ChildEnd]
