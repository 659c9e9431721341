"""Schemas of a hostile worker: none makes a check go on for long, and none takes much memory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncgate.extras.types.schemas import (
    LOOKS_IN_A_BATCH,
    LOOKS_OF_A_CALL,
    SMALL_BYTES,
    Checker,
    Looks,
    check_declared_schema,
)
from asyncgate.parts.model.errors import InvalidRequest

MANY = list(range(60_000))
NAMES = {f"name-{number}": True for number in range(3000)}


@pytest.mark.parametrize(("schema", "value", "looks"), [
    ({"items": {"not": {"enum": [1] * 32_000}}}, [0] * 1000, LOOKS_IN_A_BATCH),
    ({"items": {"not": {"const": [1] * 30_000}}}, [0] * 1000, LOOKS_IN_A_BATCH),
    ({"items": {"not": {"anyOf": [False] * 10_000}}}, [0] * 1000, LOOKS_IN_A_BATCH),
    ({"items": {"properties": NAMES}}, [{}] * 1000, LOOKS_IN_A_BATCH),
    ({"items": {"required": [*NAMES]}}, [{}] * 1000, LOOKS_IN_A_BATCH),
    ({"allOf": [{"uniqueItems": True}] * 100}, MANY, LOOKS_OF_A_CALL),
    ({"allOf": [{"uniqueItems": True}] * 100}, [MANY], LOOKS_OF_A_CALL),
    ({"allOf": [{"contains": False, "minContains": 0}] * 100}, MANY, LOOKS_OF_A_CALL),
    ({"allOf": [{"items": True}] * 1000}, MANY, LOOKS_OF_A_CALL)])
def test_a_check_counts_what_is_large_in_a_rule_and_in_a_value(schema: dict[str, Any], value: Any, looks: int) -> None:
    text, held = json.dumps(schema, separators=(",", ":")), json.dumps(value, separators=(",", ":")).encode()
    check_declared_schema(text.encode(), "payload_schema")
    counted = Looks(looks)

    flaw = Checker(text).find_flaw(held, "payload", counted)

    assert flaw is not None
    assert (counted.left < 0) == ("is too large to be held against the schema" in flaw.why)
    assert counted.left < 0 or "required" in text       # the first flaw ends that one


def test_a_small_value_fits_beside_a_long_list_of_choices() -> None:
    schema = {"type": "object", "required": ["code"], "additionalProperties": False,
              "properties": {"code": {"enum": [f"code-{number}" for number in range(4000)]}, **NAMES}}
    value = json.dumps({"code": "code-3999", "name-7": ["x" * 10] * 100}).encode()
    assert len(value) < SMALL_BYTES

    assert Checker(json.dumps(schema)).find_flaw(value, "payload", Looks(LOOKS_IN_A_BATCH)) is None


@pytest.mark.parametrize("pattern", [
    r"\w{200}", r"(\w{20}){10}", r"\w{20}{10}", r"[a[\w]]{200}", r"[[\w]a]{200}", r"\pL{200}", r"\p{Greek}{200}",
    r"(?x)\w{ 200 }", r"(?ix:\w{ 200 })", r"[^\W]{0,200}", r"\d{900}"])
def test_a_pattern_that_takes_much_memory_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="too large beside the others"):
        check_declared_schema(json.dumps({"pattern": pattern}).encode(), "payload_schema")


def test_patterns_that_take_much_memory_together_are_refused() -> None:
    some = [{"pattern": rf"^\w{{1,64}}{letter}"} for letter in "abc"]
    check_declared_schema(json.dumps(some[0]).encode(), "payload_schema")

    with pytest.raises(InvalidRequest, match="too large beside the others"):
        check_declared_schema(json.dumps({"anyOf": some}).encode(), "payload_schema")


@pytest.mark.parametrize("pattern", [
    r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$", r"^[\w.+-]+@[\w-]+(\.[\w-]+)+$", r"\(?ext",
    r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:\d{2})$", r"^[a-zA-Z0-9_-]{1,255}$", r"^.{1,2000}$",
    r"^https?://[^/]{1,255}/.*$", r"^(\d{1,3}\.){3}\d{1,3}$"])
def test_a_pattern_as_people_write_them_is_accepted(pattern: str) -> None:
    check_declared_schema(json.dumps({"pattern": pattern}).encode(), "payload_schema")


@pytest.mark.parametrize("pattern", [[], {}, 1, None])
def test_a_pattern_that_is_no_text_is_refused(pattern: Any) -> None:
    with pytest.raises(InvalidRequest, match="is not a JSON schema: pattern"):
        check_declared_schema(json.dumps({"pattern": pattern}).encode(), "payload_schema")
