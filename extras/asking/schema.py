"""The part of JSON Schema that a question may use for its answer: what MCP elicitation has, and objects in objects.

Nothing here is slow or reaches outside, whatever a worker sends: no pattern, and no reference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from asyncgate.parts.model import errors
from asyncgate.parts.model.content import to_canonical

COMMON = {"type", "title", "description", "default", "enum", "enumNames", "const", "oneOf", "anyOf", "$schema"}
KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems", "uniqueItems"},
    "string": {"minLength", "maxLength", "format"},
    "number": {"minimum", "maximum"}, "integer": {"minimum", "maximum"}, "boolean": set[str](), "null": set[str]()}
NUMBERS = {"minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum"}
MOST_LOOKS, SIZE_OF_A_LOOK = 20_000, 64         # at parts of an answer, so that none takes long; elements, characters
EMAIL = re.compile(r"[^@\s]+@[^@\s]+")


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def has_type(type: str, value: Any) -> bool:
    """Whether a value has a type of JSON Schema."""
    if type in ("number", "integer"):
        return is_number(value) and (type == "number" or value == int(value))
    kinds: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": None.__class__}
    return isinstance(value, kinds[type])


# A schema, when it is sent.


def check_schema(schema: Any, path: str = "schema") -> None:
    """Refuse a schema that is not understood: an answer must not pass because a rule was ignored."""
    if not isinstance(schema, Mapping):
        raise errors.InvalidRequest(f"{path} is not an object; request_input takes a JSON schema there")
    type = schema.get("type")
    if type is not None and (not isinstance(type, str) or type not in KEYWORDS):
        raise errors.InvalidRequest(f"{path}.type is not one of {', '.join(KEYWORDS)}")
    if strange := sorted(schema.keys() - COMMON - KEYWORDS.get(type or "", set())):
        raise errors.InvalidRequest(f"{path}.{strange[0]} is not understood here; an input's schema may have "
                                    f"{', '.join(sorted(COMMON | KEYWORDS.get(type or '', set())))}")
    for name in NUMBERS & schema.keys():
        if not is_number(schema[name]):
            raise errors.InvalidRequest(f"{path}.{name} is not a number")
    for name in ("enum", "oneOf", "anyOf", "required"):
        if name in schema and not isinstance(schema[name], list):
            raise errors.InvalidRequest(f"{path}.{name} is not an array")
    if "format" in schema and schema["format"] not in [*FORMATS]:
        raise errors.InvalidRequest(f"{path}.format is not one of {', '.join(FORMATS)}")
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        raise errors.InvalidRequest(f"{path}.required is not an array of texts")
    for name in ("oneOf", "anyOf"):
        for at, inner in enumerate(schema.get(name, ())):
            check_schema(inner, f"{path}.{name}[{at}]")
    if "items" in schema:
        check_schema(schema["items"], f"{path}.items")
    if not isinstance(properties := schema.get("properties", {}), Mapping):
        raise errors.InvalidRequest(f"{path}.properties is not an object")
    for name, inner in properties.items():
        check_schema(inner, f"{path}.properties.{name}")


# An answer.


def check_answer(schema: Mapping[str, Any], value: Any) -> tuple[str, str] | None:
    """Return where a value does not match a schema, and what should be there; None if it matches."""
    return Check(MOST_LOOKS).find_mismatch(schema, value, "content")


class Check(Struct):
    """One look at an answer."""

    looks: int      # that are left

    def find_mismatch(self, schema: Mapping[str, Any], value: Any, path: str) -> tuple[str, str] | None:
        """Return the first part of a value that does not match, and what is wrong with it."""
        parts = (schema.get("enum"), schema.get("required"), value)     # each may be long, at each of many elements
        self.looks -= 1 + sum(len(part) for part in parts if isinstance(part, list | dict)) // SIZE_OF_A_LOOK
        if self.looks < 0:
            return path, "has more parts than an answer with a schema may have"
        if (type := schema.get("type")) is not None and not has_type(type, value):
            return path, f"should be {'an' if type[0] in 'aeio' else 'a'} {type}"
        for name, why in (("const", "should be"), ("enum", "should be one of")):
            if name in schema and not is_in(value, choices := [schema[name]] if name == "const" else schema[name]):
                text = ", ".join(to_canonical(choice).decode() for choice in choices)
                self.looks -= len(text) // SIZE_OF_A_LOOK
                return path, f"{why} {text[:2000]}"
        for name in ("oneOf", "anyOf"):
            if name in schema and not any(self.find_mismatch(inner, value, path) is None for inner in schema[name]):
                return path, "should be one of the choices of the schema"
        if isinstance(value, dict):
            return self.find_in_object(schema, value, path)
        if isinstance(value, list):
            return self.find_in_array(schema, value, path)
        if isinstance(value, str):
            return find_in_text(schema, value, path)
        if is_number(value) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            return path, f"should be {describe_bounds(schema, 'minimum', 'maximum')}"
        return None

    def find_in_object(self, schema: Mapping[str, Any], value: dict[str, Any], path: str) -> tuple[str, str] | None:
        """Return the first member that is missing, unknown or wrong."""
        properties: Mapping[str, Any] = schema.get("properties", {})
        if missing := [name for name in schema.get("required", ()) if name not in value]:
            return f"{path}.{missing[0]}", "is missing"
        for name, held in value.items():
            if name in properties:
                if (mismatch := self.find_mismatch(properties[name], held, f"{path}.{name}")) is not None:
                    return mismatch
            elif schema.get("additionalProperties") is False:
                return f"{path}.{name}", "is not in the schema"
        return None

    def find_in_array(self, schema: Mapping[str, Any], value: list[Any], path: str) -> tuple[str, str] | None:
        """Return the first element that is wrong, or that there are too few or too many, or one twice."""
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return path, f"has {len(value)} elements, and should have {describe_bounds(schema, 'minItems', 'maxItems')}"
        if schema.get("uniqueItems") is True:
            texts = [to_canonical(held) for held in value]
            self.looks -= sum(map(len, texts)) // SIZE_OF_A_LOOK
            if len(set(texts)) < len(texts):
                return path, "has an element twice"
        mismatches = (self.find_mismatch(schema.get("items", {}), held, f"{path}[{at}]")
                      for at, held in enumerate(value))
        return next((mismatch for mismatch in mismatches if mismatch is not None), None)


def is_in(value: Any, choices: list[Any]) -> bool:
    """Whether a JSON value is one of these; true is not 1."""
    return value in choices and isinstance(value, bool) in [isinstance(choice, bool) for choice in choices
                                                            if choice == value]


def describe_bounds(schema: Mapping[str, Any], least: str, most: str) -> str:
    """Say between which numbers a schema wants something."""
    return " and ".join(f"at {word} {schema[name]}" for word, name in (("least", least), ("most", most))
                        if name in schema)


def find_in_text(schema: Mapping[str, Any], value: str, path: str) -> tuple[str, str] | None:
    """Say that a text is too short, too long, or not of its format."""
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        return path, f"has {len(value)} characters, and should have {describe_bounds(schema, 'minLength', 'maxLength')}"
    if "format" in schema and not FORMATS[schema["format"]](value):
        return path, f"is not of the format {schema['format']}"
    return None


def is_date(text: str) -> bool:
    """Whether a text is a date, such as 2026-11-27."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def is_date_time(text: str) -> bool:
    """Whether a text is a time with its zone, such as 2026-11-27T09:00:00Z."""
    try:
        return "T" in text.upper() and datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def is_uri(text: str) -> bool:
    """Whether a text is an absolute address."""
    try:
        return bool(urlsplit(text).scheme) and " " not in text
    except ValueError:
        return False


FORMATS = {"email": lambda text: EMAIL.fullmatch(text) is not None, "uri": is_uri, "date": is_date,
           "date-time": is_date_time}
