"""What a question may want of its answer: the schemas that are understood, and what matches them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncgate.extras.asking.schema import Check, check_answer, check_schema
from asyncgate.parts.model.errors import InvalidRequest

# A schema, what matches it, and what does not, with the place that is at fault.
CASES: list[tuple[dict[str, Any], list[Any], list[tuple[Any, str]]]] = [
    ({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
     [{"n": 1}, {"n": 1.0}, {"n": 1, "more": None}], [({}, "content.n"), ({"n": 1.5}, "content.n"), (None, "content"),
                                                      ({"n": True}, "content.n"), ([], "content")]),
    ({"type": "object", "properties": {}, "additionalProperties": False}, [{}], [({"x": 1}, "content.x")]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc"], [("a", "content"), ("abcd", "content")]),
    ({"type": "string", "format": "email"}, ["a@b"], [("a", "content"), ("a b@c", "content")]),
    ({"type": "string", "format": "date"}, ["2026-11-27"], [("2026-11-31", "content"), ("27.11.", "content")]),
    ({"type": "string", "format": "date-time"}, ["2026-11-27T09:00:00Z"], [("2026-11-27T09:00:00", "content"),
                                                                          ("2026-11-27", "content")]),
    ({"type": "string", "format": "uri"}, ["https://example.com/a"], [("example", "content"), ("http://[", "content")]),
    ({"type": "number", "minimum": 1, "maximum": 2}, [1, 1.5, 2], [(0.9, "content"), (3, "content"), ("1", "content")]),
    ({"type": "boolean"}, [True], [(1, "content"), (None, "content")]),
    ({"enum": ["a", 1]}, ["a", 1], [("b", "content"), (True, "content")]),
    ({"const": 0}, [0], [(False, "content"), (1, "content")]),
    ({"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}]}, ["a", "b"], [("c", "content")]),
    ({"type": "array", "items": {"anyOf": [{"const": "a"}, {"const": "b"}]}, "minItems": 1, "maxItems": 2,
      "uniqueItems": True}, [["a"], ["b", "a"]],
     [([], "content"), (["a", "c"], "content[1]"), (["a", "a"], "content"), (["a", "b", "a"], "content")]),
    ({"type": "object", "properties": {"in": {"type": "object", "required": ["x"]}}}, [{"in": {"x": 1}}],
     [({"in": {}}, "content.in.x")]),
    ({}, [None, 1, "x", []], []),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES, ids=[json.dumps(schema)[:40] for schema, _, _ in CASES])
def test_an_answer_matches_or_the_place_is_named(
        schema: dict[str, Any], right: list[Any], wrong: list[tuple[Any, str]]) -> None:
    check_schema(schema)

    assert [check_answer(schema, value) for value in right] == [None] * len(right)
    assert [(check_answer(schema, value) or ("",))[0] for value, _ in wrong] == [place for _, place in wrong]


@pytest.mark.parametrize(("schema", "value", "why"), [
    ({"type": "integer", "minimum": 1}, 0, "should be at least 1"),
    ({"type": "number", "minimum": 1, "maximum": 2.5}, 3, "should be at least 1 and at most 2.5"),
    ({"type": "string", "maxLength": 3}, "four", "has 4 characters, and should have at most 3"),
    ({"type": "array", "minItems": 2}, [1], "has 1 elements, and should have at least 2"),
    ({"enum": ["now", True, None]}, "no", 'should be one of "now", true, null')])
def test_a_refused_answer_is_told_what_would_do(schema: dict[str, Any], value: Any, why: str) -> None:
    assert check_answer(schema, value) == ("content", why)


@pytest.mark.parametrize("schema", [
    [], {"type": "thing"}, {"type": ["string"]}, {"type": "string", "pattern": "a"}, {"$ref": "#/x"},
    {"type": "string", "minLength": "2"}, {"enum": "ab"}, {"type": "string", "format": "ipv4"},
    {"type": "object", "properties": []}, {"type": "object", "properties": {"a": {"allOf": []}}},
    {"type": "array", "items": {"not": {}}}, {"oneOf": [1]}, {"type": "integer", "multipleOf": 2},
    {"type": "object", "required": [{}]}, {"type": "object", "required": [1]}, {"type": "string", "format": []},
    {"type": "string", "format": {}}])
def test_a_schema_that_is_not_understood_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest):
        check_schema(schema)


def test_an_answer_that_would_take_long_to_be_checked_is_refused() -> None:
    schema = {"type": "array", "items": {"anyOf": [{"const": str(number)} for number in range(700)]}}

    assert check_answer(schema, ["699"] * 20) is None
    assert check_answer(schema, ["699"] * 10_000) is not None


@pytest.mark.parametrize("items", [
    {"enum": [1] * 100_000 + [0]}, {"enum": [[1]] * 60_000 + [0]}, {"required": ["a"] * 50_000},
    {"oneOf": [{"const": [1] * 100_000}, {"const": 0}]}, {"oneOf": [{"enum": ["x" * 200_000]}, {"const": 0}]}])
def test_a_long_rule_is_more_than_one_look_at_each_element(items: dict[str, Any]) -> None:
    several = {"type": "array", "items": items}
    held: Any = {"a": 1} if "required" in items else 0

    assert check_answer(several, [held] * 3) is None
    assert check_answer(several, [held] * 8000) is not None


def test_a_list_that_is_gone_through_again_and_again_is_more_than_one_look() -> None:
    again = {"anyOf": [{"type": "array", "uniqueItems": True}] * 7000}
    answer = Check(20_000)

    assert answer.find_mismatch(again, [*range(10_000), 0], "content") is not None
    assert answer.looks < 0


def test_an_error_does_not_name_choices_without_end() -> None:
    for schema in ({"enum": ["x" * 50] * 1000}, {"const": "x" * 50_000}):
        mismatch = check_answer(schema, "y")

        assert mismatch is not None
        assert len(mismatch[1]) < 2100
