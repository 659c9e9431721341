"""The rows of the step journal: what workers have done of a task, so that it need not be done again."""

from __future__ import annotations

from msgspec import Struct

from asyncgate.parts.model.cards import OF_TASK, WITH_IT, Content, IdText, Json, Plain, stored


@stored("steps", "what is done of a task, for the next worker", OF_TASK, WITH_IT, key="task_id step_id",
        append_only=True, protected=True, rowid=True,
        left_alone="goes with its task; of another principal's task it is that principal's")
class RecordedStep(Struct, frozen=True):
    """One step of a task that is done, and what it gave; never changed."""

    task_id: IdText                     # of the task
    step_id: IdText                     # its number, written so that it sorts
    name: Content[str]                  # as its worker calls it
    value: Content[Json]                # JSON
    place: int                          # 1, 2, 3, … in the order in which the steps of a task were recorded
    fence: int                          # the lease under which it was recorded
    recorded_at: float                  # when
    digest: Plain[str]                  # SHA-256 over this step and the digest of the one in the place before


def write_number(seq: int) -> str:
    """Write the number of a step so that it sorts."""
    return f"{seq:010d}"
