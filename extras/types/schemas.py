"""JSON Schema, as the jsonschema library knows it, with limits: a schema comes from a worker, who may be hostile.

Nothing here reaches outside, because only references within a schema are taken.  Nothing is slow: a check counts what
it looks at, and patterns are matched by an engine whose time does not depend on the pattern.  Errors say what a schema
wants and where, and never what a value holds.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import Any

from msgspec import Struct

from asyncgate.parts.model import errors
from asyncgate.parts.model.content import decode_json, parse_json, to_canonical

MOST_SCHEMA_BYTES = 64 * 2**10
MOST_SCHEMAS, DEEPEST = 2000, 32    # schemas within a schema, and how deep they stand
LOOKS_OF_A_CALL = 200_000        # at keywords with values, in one call
LOOKS_IN_A_BATCH = 2_000           # the same of a small value, which is checked in the batch
REF_LOOKS = 5               # what following a reference counts as
SMALL_BYTES = 4096
MOST_PATTERN, MOST_MATCHED = 500, 10_000        # characters of a pattern, and of a text that is held against one
SINGLE = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
OF_ITSELF = frozenset({"allOf", "anyOf", "dependentSchemas", "else", "if", "not", "oneOf", "then"})
BY_NAME_IN = ("$defs", "definitions", "dependentSchemas", "properties")
# What would make a check reach outside, or take a time that nobody can foresee.
UNFORESEEABLE = frozenset({"$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveAnchor", "$recursiveRef",
                     "$vocabulary", "dependencies", "patternProperties", "unevaluatedItems", "unevaluatedProperties"})
DIALECTS = ("https://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2019-09/schema",
            "http://json-schema.org/draft-07/schema")
PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class TooMuch(Exception):
    """A check has looked at more than it may."""


class Flaw(Struct, frozen=True):
    """Where a value does not fit its schema, and why."""

    path: str
    why: str


# Values whose text says nothing of what they hold: the library quotes values in its errors.


class SomeText(str):
    """A text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "this text"


class SomeList(list[Any]):
    """An array."""

    def __repr__(self) -> str:
        return "this array"


class SomeObject(dict[str, Any]):
    """An object."""

    def __repr__(self) -> str:
        return "this object"


def veil_value(value: Any) -> Any:
    """Return a JSON value as one whose text says nothing."""
    if isinstance(value, str):
        return SomeText(value)
    if isinstance(value, list):
        return SomeList(map(veil_value, value))
    if isinstance(value, dict):
        return SomeObject({name: veil_value(held) for name, held in value.items()})
    return value        # a number, whose text `tell_flaw` takes out


# A schema, when it is declared.


def check_declared_schema(text: bytes, name: str) -> None:
    """Refuse a schema that is not one, or that a check could not follow; it takes a while, so call it on a thread."""
    if len(text) > MOST_SCHEMA_BYTES:
        raise errors.PayloadTooLarge(f"{name} is {len(text)} bytes; a schema has {MOST_SCHEMA_BYTES} at most",
                                     limit=MOST_SCHEMA_BYTES)
    schema = parse_json(text, name)
    if not isinstance(schema, dict):
        raise errors.InvalidRequest(f"{name} is not an object; declare_type takes a JSON schema there")
    waiting: deque[tuple[str, Any, int]] = deque([(name, schema, 0)])
    paths, same_value = dict[int, str](), dict[int, list[int]]()    # by the id of a schema: which hold the same value
    while waiting:
        path, inner, depth = waiting.pop()
        if not isinstance(inner, dict) or id(inner) in paths:
            continue
        if len(paths) >= MOST_SCHEMAS or depth > DEEPEST:
            raise errors.InvalidRequest(f"{name} has more than {MOST_SCHEMAS} schemas within it, or more than "
                                        f"{DEEPEST} levels of them")
        check_keywords(inner, path)
        paths[id(inner)] = path
        parts = [*list_schemas(inner)]
        waiting += [(f"{path}.{place}", part, depth + 1) for _, place, part in parts]
        same_value[id(inner)] = [id(part) for keyword, _, part in parts if keyword in OF_ITSELF]
        if "$ref" in inner:
            target = follow_reference(schema, inner["$ref"], path)
            waiting.appendleft((f"{path}.$ref", target, 0))     # last: most are found elsewhere, too
            same_value[id(inner)].append(id(target))
    try:
        TopologicalSorter(same_value).prepare()
    except CycleError as circle:
        raise errors.InvalidRequest(f"{paths[circle.args[1][0]]} refers to itself for the same value, so a check would "
                                    "never end; let it refer to itself within properties or items") from None
    from jsonschema.exceptions import SchemaError

    try:
        find_dialect(str(schema.get("$schema", DIALECTS[0])).rstrip("#")).check_schema(schema)
    except (SchemaError, RecursionError) as wrong:
        where = ".".join(map(str, getattr(wrong, "path", ()))) or "it"
        raise errors.InvalidRequest(f"{name} is not a JSON schema: {where} breaks the rules of its dialect") from None


def list_schemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the schemas within a schema, each with its keyword and its place."""
    yield from ((name, name, schema[name]) for name in SINGLE if isinstance(schema.get(name), dict))
    for name in SEVERAL:
        if isinstance(parts := schema.get(name), list):
            yield from ((name, f"{name}[{at}]", part) for at, part in enumerate(parts))
    for name in BY_NAME_IN:
        if isinstance(parts := schema.get(name), dict):
            yield from ((name, f"{name}.{member}", part) for member, part in parts.items())


def follow_reference(schema: Any, reference: Any, path: str) -> Any:
    """Return what a reference within a schema leads to, as a check will; raises InvalidRequest."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    try:
        part = Registry().resolver_with_root(DRAFT202012.create_resource(schema)).lookup(str(reference)).contents
    except (Unresolvable, TypeError, ValueError):      # the latter two: a step into what has no such members
        part = None
    if not isinstance(part, dict | bool):
        raise errors.InvalidRequest(f"{path}.$ref leads to no schema: there is none at {reference}")
    return part


def check_keywords(schema: Mapping[str, Any], path: str) -> None:
    """Refuse the keywords that no check follows."""
    if strange := sorted(UNFORESEEABLE & schema.keys()):
        raise errors.InvalidRequest(f"{path}.{strange[0]} is not accepted here; a declared schema does without "
                                    f"{', '.join(sorted(UNFORESEEABLE))}")
    if "$schema" in schema and str(schema["$schema"]).rstrip("#") not in DIALECTS:
        raise errors.InvalidRequest(f"{path}.$schema is not one of {', '.join(DIALECTS)}")
    if "$ref" in schema and not str(schema["$ref"]).startswith("#"):
        raise errors.InvalidRequest(f"{path}.$ref leads outside; a declared schema refers to its own $defs only")
    if (pattern := schema.get("pattern")) is not None:
        try:
            make_matcher(pattern)
        except ValueError as wrong:
            raise errors.InvalidRequest(f"{path}.pattern {wrong}") from None


@cache
def make_matcher(pattern: Any) -> Callable[[str], bool]:
    """Return what holds a text against a pattern, in linear time; raises ValueError."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    if not isinstance(pattern, str) or len(pattern) > MOST_PATTERN:
        raise ValueError(f"is not a text of {MOST_PATTERN} characters at most")
    try:
        matcher: Callable[[str], bool] = SchemaValidator(
            core_schema.str_schema(pattern=pattern, regex_engine="rust-regex")).isinstance_python
    except SchemaError:
        raise ValueError("is not a regular expression that is matched in linear time: it has no look-around and no "
                         "reference back, and is not large") from None
    return matcher


# A value, when it is sent.


@cache
def find_dialect(name: str) -> Any:
    """Return the library's class for a dialect, which counts what it looks at; importing it takes long."""
    import jsonschema
    from jsonschema import validators

    plain: Any = {DIALECTS[0]: jsonschema.Draft202012Validator, DIALECTS[1]: jsonschema.Draft201909Validator,
                  DIALECTS[2]: jsonschema.Draft7Validator}[name]
    own = {"additionalProperties": find_additional, "pattern": find_unmatched, "uniqueItems": find_repeated}
    # A format only tells a reader something: what the library makes of one depends on what else is installed.
    kept = {keyword: own.get(keyword, check) for keyword, check in plain.VALIDATORS.items()
            if keyword not in UNFORESEEABLE and keyword != "format"}
    return validators.create(plain.META_SCHEMA, {keyword: count_looks(check, REF_LOOKS if keyword == "$ref" else 1)
                                                 for keyword, check in kept.items()}, type_checker=plain.TYPE_CHECKER)


def count_looks(check: Any, weight: int) -> Any:
    """Let a check of a keyword be counted."""
    def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        looks: Looks = validator.format_checker
        looks.left -= weight
        if looks.left < 0:
            raise TooMuch
        return check(validator, value, instance, schema)
    return checked


class Looks:
    """How often a check may look, and where it stands; the library hands its format checker on, and has no other."""

    def __init__(self, left: int) -> None:
        self.left = left


def find_additional(validator: Any, rule: Any, instance: Any, schema: Any) -> Any:
    """Yield what is wrong with the members that no property names, of which there may be very many."""
    from jsonschema import ValidationError

    if isinstance(instance, dict):
        for name in instance.keys() - schema.get("properties", {}).keys():
            if rule is False:
                yield ValidationError("is not in the schema", path=[name])
                return
            if isinstance(rule, dict):
                yield from validator.descend(instance[name], rule, path=name)


def find_unmatched(validator: Any, pattern: Any, instance: Any, schema: Any) -> Any:
    """Yield what is wrong with a text that a pattern should match."""
    from jsonschema import ValidationError

    if isinstance(instance, str) and len(instance) > MOST_MATCHED:
        yield ValidationError(f"has a pattern, and so {MOST_MATCHED} characters at most")
    elif isinstance(instance, str) and not make_matcher(pattern)(str(instance)):
        yield ValidationError(f"does not match {pattern}")


def find_repeated(validator: Any, wanted: Any, instance: Any, schema: Any) -> Any:
    """Yield that an array has an element twice."""
    from jsonschema import ValidationError

    if wanted is True and isinstance(instance, list) and len({
            json.dumps(held, sort_keys=True) for held in instance}) < len(instance):
        yield ValidationError("has an element twice")


class Checker:
    """Holds values against one schema."""

    def __init__(self, text: str) -> None:
        """Prepare for a schema; it takes a while the first time, so call it on a thread."""
        from referencing import Registry

        self.text, self.schema, self.registry = text, decode_json(text), Registry()     # which fetches nothing
        self.dialect = find_dialect(str(self.schema.get("$schema", DIALECTS[0])).rstrip("#"))

    def find_flaw(self, text: bytes, name: str, looks: Looks) -> Flaw | None:
        """Return the first flaw of a value; `looks` may be shared by the checks of a call."""
        try:
            validator = self.dialect(self.schema, registry=self.registry, format_checker=looks)
            wrong = next(validator.iter_errors(veil_value(decode_json(text))), None)
        except (TooMuch, RecursionError):
            return Flaw(name, "is too large to be held against the schema of its type: send a pointer to it")
        except Exception as broken:     # such as a reference to what is not there
            return Flaw(name, f"cannot be held against the schema of its type ({type(broken).__name__})")
        return None if wrong is None else tell_flaw(wrong, name)


def tell_flaw(wrong: Any, name: str) -> Flaw:
    """Say where a value has a flaw, and what the schema wants there."""
    path = name + "".join(write_step(step) for step in wrong.absolute_path)
    if wrong.validator == "required":
        missing = next((member for member in wrong.validator_value if member not in wrong.instance), "")
        return Flaw(path + write_step(missing), "is missing")
    if wrong.validator == "type":
        kinds = wrong.validator_value
        return Flaw(path, f"is not of type {' or '.join(kinds) if isinstance(kinds, list) else kinds}")
    if wrong.validator in ("items", "additionalItems"):
        return Flaw(path, "has more elements than the schema has")
    why = str(wrong.message).removeprefix(repr(wrong.instance)).strip()
    return Flaw(path, (why if len(why) <= 300 else f"does not fit {wrong.validator}") or "does not fit")


def write_step(step: str | int) -> str:
    """Write one step of a path."""
    if isinstance(step, int):
        return f"[{step}]"
    return f".{step}" if PLAIN_NAME.fullmatch(step) and len(step) <= 100 else f"[{to_canonical(step[:100]).decode()}]"
