"""The rows of declared types: what workers say of the types of tasks that they take."""

from __future__ import annotations

from msgspec import Struct

from asyncgate.parts.model.cards import OF_TENANT, Content, IdText, Json, Plain, stored


@stored("declared_types", "what a type of tasks takes and gives, for agents", "until it is removed",
        "`remove_type`")
class DeclaredType(Struct, frozen=True):
    """What workers have declared of a type of tasks."""

    type: Content[IdText]               # the type
    description: Content[str]           # for agents; may be empty
    payload_schema: Content[Json | None]  # a JSON schema; None: anything
    result_schema: Content[Json | None]  # the same of results
    declared_at: float                  # when it was last changed


@stored("type_policies", "what happens to a task that does not fit its declared type", OF_TENANT,
        "nobody: it is one word", single=True, left_alone="one word")
class TypePolicy(Struct, frozen=True):
    """Whether what does not fit a declared schema is refused, or taken with a warning."""

    on_mismatch: Plain[str] = "refuse"  # or warn
