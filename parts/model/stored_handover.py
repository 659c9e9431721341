"""The rows of the hand-over in SQL: what an application has handed over in the gate's own database, and no task yet."""

from __future__ import annotations

from msgspec import Struct

from asyncgate.parts.model.cards import Actor, Content, IdText, Json, Plain, stored


@stored("handovers", "work that an application has handed over in SQL and that is not a task yet (Postgres)",
        "until the gate has its task; refused ones until the application drops them", "the courier, or the application",
        key="stage owner_kind owner_id handover_id")
class Handover(Struct, frozen=True):
    """A request for a task, committed with the application's own rows."""

    stage: Plain[IdText]                # waiting; refused: it never becomes a task as it is
    owner_kind: Actor[IdText]           # who hands it over: the principal of the application's role
    owner_id: Actor[IdText]             # its id
    handover_id: IdText                 # rises with time; the idempotency key of the task, unless the request has one
    request: Content[Json]              # JSON: the fields of create_task
    at: float                           # when
    problem: Plain[str | None] = None   # why it is refused
