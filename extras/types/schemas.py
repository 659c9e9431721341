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
from functools import cache, lru_cache
from graphlib import CycleError, TopologicalSorter
from math import prod
from typing import Any

from msgspec import Struct

from asyncgate.parts.model import errors
from asyncgate.parts.model.content import decode_json, parse_json, to_canonical

MOST_SCHEMA_BYTES = 64 * 2**10
MOST_SCHEMAS, DEEPEST = 2000, 32    # schemas within a schema, and how deep they stand
LOOKS_OF_A_CALL = 200_000        # at keywords with values, in one call
LOOKS_IN_A_BATCH = 2_000           # the same of a small value, which is checked in the batch
REF_LOOKS = 5               # what following a reference counts as
SIZE_OF_A_LOOK = 64         # characters of choices and of texts, members of a rule, elements without a rule
SMALL_BYTES = 4096
MOST_PATTERN, MOST_MATCHED = 500, 10_000        # characters of a pattern, and of a text that is held against one
MOST_WEIGHT, MOST_MATCHERS = 4 * 2**20, 50      # of the patterns of a schema; those of all schemas that stay compiled
# An atom of a pattern with what repeats it, and the bytes that atoms take.  In `(?x)` this is not what repeats one.
ATOM = re.compile(
    r"(?s)(\(\?[a-zA-Z-]*x|\[(?:\\.|[^][\\])*\]|\\[pP](?:\{[^}]*\}|.)|\\.|[^\\])((?:[?*+]|\{[\d, ]{1,500}\})*)")
WEIGHTS = [(re.compile(kind), weight) for kind, weight in (
    (r"^\(\?", 2**30), (r"\\[wWpP]", 50_000), (r"\\[dD]", 13_000), (r"^(?:\.|\[|\\)", 1000), ("", 300))]
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
VEILS: dict[type, Any] = {kind: type(kind.__name__, (kind,), {"__repr__": lambda _, word=word: f"this {word}"})
                          for kind, word in ((str, "text"), (list, "array"), (dict, "object"))}


def veil_value(value: Any) -> Any:
    """Return a JSON value as one whose text says nothing."""
    if isinstance(value, list):
        value = [veil_value(held) for held in value]
    elif isinstance(value, dict):
        value = {name: veil_value(held) for name, held in value.items()}
    return VEILS[type(value)](value) if type(value) in VEILS else value     # `tell_flaw` takes a number out


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
    paths, same_value, weight = dict[int, str](), dict[int, list[int]](), 0     # by id: which hold the same value
    while waiting:
        path, inner, depth = waiting.pop()
        if not isinstance(inner, dict) or id(inner) in paths:
            continue
        if len(paths) >= MOST_SCHEMAS or depth > DEEPEST:
            raise errors.InvalidRequest(f"{name} has more than {MOST_SCHEMAS} schemas within it, or more than "
                                        f"{DEEPEST} levels of them")
        if (weight := weight + weigh_pattern(inner.get("pattern"))) > MOST_WEIGHT:
            raise errors.InvalidRequest(rf"{path}.pattern is too large beside the others of the schema: \w{{90}} is by "
                                        "itself, since it knows the letters of every language, and [a-z]{90} is not")
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
    if isinstance(pattern := schema.get("pattern"), str):       # the dialect refuses anything else
        try:
            make_matcher(pattern)
        except ValueError as wrong:
            raise errors.InvalidRequest(f"{path}.pattern {wrong}") from None


def weigh_pattern(pattern: Any) -> int:
    """Return about how many bytes a pattern takes when it is compiled, rather too many than too few."""
    total, times = 0, 1
    for atom, repeats in ATOM.findall(pattern) if isinstance(pattern, str) else ():
        count = prod(max(1, int(most)) for most in re.findall(r"(\d+)[, ]*\}", repeats))
        if atom in (")", "]"):      # of a group, or a class within a class
            times *= count
        else:
            total += count * (100 * len(atom) + next(weight for kind, weight in WEIGHTS if kind.search(atom)))
    return total * times


@lru_cache(MOST_MATCHERS)
def make_matcher(pattern: str) -> Callable[[str], bool]:
    """Return what holds a text against a pattern, in linear time; raises ValueError."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    if len(pattern) > MOST_PATTERN:
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
    kept = {keyword: count_looks(keyword, own.get(keyword, check)) for keyword, check in plain.VALIDATORS.items()
            if keyword not in UNFORESEEABLE and keyword != "format"}
    return validators.create(plain.META_SCHEMA, kept, type_checker=plain.TYPE_CHECKER)


def count_looks(keyword: str, check: Any) -> Any:
    """Let a check of a keyword be counted; to go through a value whose elements have no rule takes looks, too."""
    size = 1 if keyword in ("contains", "uniqueItems") else SIZE_OF_A_LOOK

    def checked(validator: Any, rule: Any, instance: Any, schema: Any) -> Any:
        validator.format_checker.spend(
            weigh_rule(keyword, rule) + (len(instance) // size if isinstance(instance, list | dict) else 0))
        return check(validator, rule, instance, schema)
    return checked


def weigh_rule(keyword: str, rule: Any) -> int:
    """Return how many looks a rule is: a large one must not be one look at each of many elements."""
    if keyword in ("const", "enum"):        # the library compares with one choice after another
        return 1 + len(to_canonical(rule)) // SIZE_OF_A_LOOK
    if not isinstance(rule, list | dict):
        return REF_LOOKS if keyword == "$ref" else 1
    return 1 + len(rule) // SIZE_OF_A_LOOK + sum(isinstance(part, bool) for part in rule)   # schemas without a keyword


class Looks(Struct):
    """How often a check may look, and where it stands; the library hands its format checker on, and has no other."""

    left: int

    def spend(self, looks: int) -> None:
        """Count looks; raises TooMuch."""
        self.left -= looks
        if self.left < 0:
            raise TooMuch


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

    if wanted is True and isinstance(instance, list):
        texts = [json.dumps(held, sort_keys=True) for held in instance]
        validator.format_checker.spend(sum(map(len, texts)) // SIZE_OF_A_LOOK)
        if len(set(texts)) < len(texts):
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
