"""The rows of families: what is still to be done with the descendants of a task."""

from __future__ import annotations

from msgspec import Struct

from asyncgate.parts.model.cards import Actor, Content, IdText, stored


@stored("cascades", "whose descendants are still to be canceled, also after a crash", "until all of them have ended",
        "the call that cancels them, or upkeep", left_alone="goes as soon as the descendants have ended")
class Cascade(Struct, frozen=True):
    """A task that was canceled with its descendants, while some of these may be open."""

    task_id: IdText                     # the task
    by_kind: Actor[str]                 # who cancels
    by_id: Actor[str]                   # that principal's id
    reason: Content[str | None]         # why, for the receipts
    since: float                        # when it was asked for
