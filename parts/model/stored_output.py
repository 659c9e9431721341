"""The rows of output: what a task gives while it is worked on, in one order with its changes of state."""

from __future__ import annotations

from msgspec import Struct

from asyncgate.parts.model.cards import WITH_IT, Content, IdText, Json, Plain, stored


@stored("outputs", "what a task gives while it is worked on",
        "`output_retention_days` after the end of its task, and no longer than its task", WITH_IT,
        key="task_id entry_id", append_only=True, rowid=True,
        left_alone="goes with its task; of another principal's task it is that principal's")
class OutputEntry(Struct, frozen=True):
    """One entry of a task's output: a chunk that its worker appended, or a change of its state; never changed."""

    task_id: IdText                     # of the task
    entry_id: IdText                    # its offset, written so that it sorts: 1, 2, 3, …
    kind: Plain[str]                    # chunk, log or state
    content: Content[Json]              # JSON: the chunk, or the state
    fence: int                          # the lease under which it was appended, or the latest one
    at: float                           # when
