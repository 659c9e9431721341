"""Read what A2A asks: ProtoJSON, of which a reader takes camelCase and snake_case."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct

from asyncgate.extras.a2a.refusals import A2AError
from asyncgate.parts.model.naming import A2A_SESSION

HELD = ("text", "raw", "url", "data")       # of which a part has exactly one
LONGEST_ID = 200
LONGEST_CONTEXT = LONGEST_ID - len(A2A_SESSION)      # it is a part of the session
MOST_INTEGER = 2**31 - 1
TEXT_MODE, JSON_MODE, BYTES_MODE = "text/plain", "application/json", "application/octet-stream"
Part = dict[str, Any]
to_snake = re.compile(r"([A-Z])").sub


class Sent(Struct):
    """A message of a client."""

    message_id: str
    parts: list[Part]
    context_id: str | None
    task_id: str | None
    metadata: dict[str, Any]
    references: list[Any]
    request_metadata: dict[str, Any]

    @property
    def text(self) -> str:
        """Return the words of the message."""
        return "\n".join(part["text"] for part in self.parts if "text" in part)


def take(members: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return a member under either of its two names; null is absence."""
    value = members.get(name)
    if value is None:
        value = members.get(to_snake(r"_\1", name).lower())
    return default if value is None else value


def take_object(members: Mapping[str, Any], name: str, place: str = "") -> dict[str, Any]:
    """Return a member that is an object; absent, it is empty."""
    value = take(members, name, {})
    if not isinstance(value, dict):
        raise refuse(f"{place}{name}", "an object")
    return value


def take_text(members: Mapping[str, Any], name: str, place: str = "", longest: int = LONGEST_ID) -> str | None:
    """Return a member that is a text; an empty one is absent, as ProtoJSON has it."""
    value = take(members, name, "")
    if not isinstance(value, str) or len(value) > longest:
        raise refuse(f"{place}{name}", f"a text of {longest} characters at most")
    return value or None


def take_integer(members: Mapping[str, Any], name: str, least: int, most: int = MOST_INTEGER) -> int | None:
    """Return a member that is an integer; in a query it is a text."""
    if (value := take(members, name)) is None:
        return None
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,10}", value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise refuse(name, f"an integer from {least} to {most}")
    return value


def take_flag(members: Mapping[str, Any], name: str) -> bool:
    """Return a member that is true or false; in a query it is a text."""
    value = take(members, name, False)
    if value in ("true", "false"):
        return bool(value == "true")
    if not isinstance(value, bool):
        raise refuse(name, "true or false")
    return value


def refuse(field: str, rule: str) -> A2AError:
    """Return the refusal of a member that is not as it must be."""
    return A2AError("INVALID_PARAMS", f"{field} must be {rule}", field)


def require_id(params: Mapping[str, Any], name: str = "id") -> str:
    """Return the id of a task."""
    if (task_id := take_text(params, name)) is None:
        raise refuse(name, "the id of a task")
    return task_id


def read_message(params: Mapping[str, Any]) -> Sent:
    """Read the message of a client; raises A2AError."""
    message = take_object(params, "message")
    message_id, parts = take_text(message, "messageId", "message."), take(message, "parts")
    if message_id is None:
        raise refuse("message.messageId", "an id, which the sender makes")
    if message.get("role") not in ("ROLE_USER", 1):
        raise refuse("message.role", "ROLE_USER")
    if not isinstance(parts, list) or not parts:
        raise refuse("message.parts", "a list of one part or more")
    references = take(message, "referenceTaskIds", [])
    if not isinstance(references, list):
        raise refuse("message.referenceTaskIds", "a list of ids")
    return Sent(message_id, [read_part(part, f"message.parts[{at}]") for at, part in enumerate(parts)],
                take_text(message, "contextId", "message.", LONGEST_CONTEXT), take_text(message, "taskId", "message."),
                take_object(message, "metadata", "message."), references, take_object(params, "metadata"))


def read_part(part: Any, place: str) -> Part:
    """Read one part, with its members in camelCase."""
    if not is_part(part):
        raise refuse(place, "an object with exactly one of text, raw, url (a text each) and data")
    held = next(name for name in HELD if name in part)
    kept: Part = {held: part[held]}
    for name in ("mediaType", "filename"):
        if (text := take_text(part, name, f"{place}.")) is not None:
            kept[name] = text
    if metadata := take_object(part, "metadata", f"{place}."):
        kept["metadata"] = metadata
    return kept


def is_part(part: Any) -> bool:
    """Whether a value is a part."""
    if not isinstance(part, dict) or sum(name in part for name in HELD) != 1:
        return False
    return "data" in part or all(isinstance(part[name], str) for name in HELD if name in part)


def find_mode(part: Part) -> str:
    """Return the media type of a part."""
    return part.get("mediaType") or (TEXT_MODE if "text" in part else JSON_MODE if "data" in part else BYTES_MODE)


def check_modes(parts: list[Part], modes: Collection[str]) -> None:
    """Refuse a part of another media type than an agent takes."""
    for part in parts:
        if (mode := find_mode(part).partition(";")[0].strip().lower()) not in modes:
            raise A2AError("CONTENT_TYPE_NOT_SUPPORTED", f"this agent takes {', '.join(sorted(modes))}, not {mode}",
                           mediaType=mode)
