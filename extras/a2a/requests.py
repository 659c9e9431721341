"""What A2A asks and says: ProtoJSON, of which a reader takes camelCase and snake_case; unknown members are ignored."""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from asyncgate.extras.a2a.refusals import A2AError
from asyncgate.parts.model import members
from asyncgate.parts.model.naming import A2A_SESSION

LONGEST_ID, LONGEST_URL, LONGEST_SECRET = 200, 2000, 3900
LONGEST_CONTEXT = LONGEST_ID - len(A2A_SESSION)      # it is a part of the session
TEXT_MODE, JSON_MODE, BYTES_MODE = "text/plain", "application/json", "application/octet-stream"
OPAQUE = frozenset({"data", "metadata"})        # whose members are not of the protocol
MISSING_MEMBER = re.compile(r"missing required field `(\w+)`")

Members = dict[str, Any]
Kind = TypeVar("Kind", bound=Struct)
ShortText = Annotated[str, Meta(max_length=LONGEST_ID)]
GivenId = Annotated[str, Meta(min_length=1, max_length=LONGEST_ID)]
Secret = Annotated[str, Meta(max_length=LONGEST_SECRET)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
State = Literal["TASK_STATE_UNSPECIFIED", "TASK_STATE_SUBMITTED", "TASK_STATE_WORKING", "TASK_STATE_INPUT_REQUIRED",
                "TASK_STATE_AUTH_REQUIRED", "TASK_STATE_COMPLETED", "TASK_STATE_FAILED", "TASK_STATE_CANCELED",
                "TASK_STATE_REJECTED"]


class Part(Struct, rename="camel", omit_defaults=True):
    """One part of a message or an artifact."""

    text: str | UnsetType = UNSET
    raw: Annotated[str, Meta(pattern="^[A-Za-z0-9+/_-]*={0,2}$")] | UnsetType = UNSET       # base64
    url: str | UnsetType = UNSET
    data: Any = UNSET
    media_type: ShortText | UnsetType = UNSET
    filename: ShortText | UnsetType = UNSET
    metadata: Members | UnsetType = UNSET

    def __post_init__(self) -> None:
        if sum(held is not UNSET for held in (self.text, self.raw, self.url, self.data)) != 1:
            raise ValueError("Expected exactly one of text, raw, url and data")
        if self.raw and len(self.raw.rstrip("=")) % 4 == 1:     # clients that read protobuf refuse the whole answer
            raise ValueError("Expected raw to be base64")

    @property
    def mode(self) -> str:
        """Return the media type."""
        return self.media_type or (TEXT_MODE if self.text is not UNSET else JSON_MODE if self.data is not UNSET
                                   else BYTES_MODE)


class WholePart(Part, forbid_unknown_fields=True):
    """A part that has nothing else."""


Parts = Annotated[list[Part], Meta(min_length=1)]


class Artifact(Struct, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """An artifact that a worker has made itself."""

    parts: Parts
    artifact_id: str = ""
    name: str = ""
    description: str = ""
    metadata: Members = {}


class Chunk(Struct, rename="camel", forbid_unknown_fields=True):
    """A chunk of output that is a message (`job.message`), or belongs to an artifact (`job.artifact`)."""

    parts: Parts
    role: Literal["ROLE_AGENT"] | UnsetType = UNSET
    artifact_id: str | UnsetType = UNSET
    append: bool | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (self.role is UNSET) == (self.artifact_id is UNSET) or (self.artifact_id is UNSET) != (self.append is UNSET):
            raise ValueError("Expected a role, or an artifact")


class Sent(Struct, rename="camel"):
    """A message of a client."""

    message_id: GivenId
    role: Literal["ROLE_USER", 1]
    parts: Parts
    context_id: Annotated[str, Meta(max_length=LONGEST_CONTEXT)] = ""
    task_id: ShortText = ""
    metadata: Members = {}
    reference_task_ids: list[Any] = []

    @property
    def text(self) -> str:
        """Return the words of the message."""
        return "\n".join(part.text for part in self.parts if part.text is not UNSET)


class Authentication(Struct, frozen=True):
    """What a receiver of notifications wants to see."""

    scheme: ShortText = "Bearer"
    credentials: Secret = ""


class Config(Struct, rename="camel"):
    """Where notifications of a task are posted."""

    url: Annotated[str, Meta(min_length=1, max_length=LONGEST_URL)]
    task_id: ShortText = ""
    id: ShortText = ""
    token: Secret = ""
    authentication: Authentication = Authentication()


class How(Struct, rename="camel", frozen=True):
    """How a message is taken."""

    history_length: Count | None = None
    return_immediately: bool = False
    task_push_notification_config: Config | None = None


class Sending(Struct, rename="camel"):
    """SendMessage and SendStreamingMessage."""

    message: Sent
    configuration: How = How()
    metadata: Members = {}


class OfTask(Struct, rename="camel"):
    """GetTask, CancelTask and SubscribeToTask."""

    id: GivenId
    history_length: Count | None = None


class Listing(Struct, rename="camel"):
    """ListTasks."""

    context_id: ShortText = ""
    status: State = "TASK_STATE_UNSPECIFIED"
    status_timestamp_after: ShortText = ""
    page_size: Annotated[int, Meta(ge=1, le=100)] = 50
    page_token: ShortText = ""
    history_length: Count | None = None
    include_artifacts: bool = False


class OfConfigs(Struct, rename="camel"):
    """ListTaskPushNotificationConfigs."""

    task_id: GivenId


class OfConfig(OfConfigs):
    """GetTaskPushNotificationConfig and DeleteTaskPushNotificationConfig."""

    id: GivenId


class Anything(Struct):
    """GetExtendedAgentCard."""


def read(kind: type[Kind], value: Any) -> Kind:
    """Read what a method is asked, of which a query has all as text; raises A2AError."""
    try:
        return msgspec.convert(to_camel(value), kind, strict=False)
    except msgspec.ValidationError as wrong:
        at = str(wrong).partition(" - at `$")[2]
        rule = members.describe_problem(wrong, kind).replace(f" - at `${at}", "")     # with the words it may be
        missing = MISSING_MEMBER.search(rule)
        place = ".".join(filter(None, (at.strip(".`"), missing and missing[1]))) or "params"
        raise A2AError("INVALID_PARAMS", f"{place}: {rule}", place) from None


def read_moment(text: str, field: str, what: str = "a time with its zone, such as 2026-01-31T12:00:00Z",
                ) -> datetime | None:
    """Read a time; a number is none, which msgspec would take for one where it reads a query."""
    try:
        return msgspec.convert(text, Annotated[datetime, Meta(tz=True)]) if text else None
    except msgspec.ValidationError:
        raise A2AError("INVALID_PARAMS", f"{field} must be {what}", field) from None


def to_camel(value: Any) -> Any:
    """Return a value with its members in camelCase; null is absence."""
    if isinstance(value, list):
        return [to_camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {re.sub(r"_([a-z])", lambda letter: letter[1].upper(), name): inner if name in OPAQUE else to_camel(inner)
            for name, inner in value.items() if inner is not None or name == "data"}


def fit(value: Any, kind: type[Kind]) -> Kind | None:
    """Return a value as one of a kind, None if it is not one."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None


def check_modes(parts: list[Part], modes: Collection[str]) -> None:
    """Refuse a part of another media type than an agent takes."""
    for part in parts:
        if (mode := part.mode.partition(";")[0].strip().lower()) not in modes:
            raise A2AError("CONTENT_TYPE_NOT_SUPPORTED", f"this agent takes {', '.join(sorted(modes))}, not {mode}",
                           mediaType=mode)
