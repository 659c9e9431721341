"""Generate the typed calls of the npm package, from the same table: `python -m asyncgate.commands.declare` does it too.

It writes clients/typescript/src/operations.ts: an interface per request and reply, a method per operation, how each is
called over REST, and what each refusal means.  Git ignores it, as it ignores that of the Python client.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from msgspec import Meta, Raw, Struct, UnsetType
from msgspec.structs import FieldInfo, fields

from asyncgate import Operation
from asyncgate.commands import declare
from asyncgate.parts.faces.changes import ChangeRecord
from asyncgate.parts.faces.tickets import TICKET
from asyncgate.parts.model import clauses, errors, wire
from asyncgate.parts.operations import OPERATIONS

TYPESCRIPT_FILE = Path(__file__).parents[1] / "clients" / "typescript" / "src" / "operations.ts"
LINE_WIDTH = 120
SPELLINGS = {Raw: "unknown", Any: "unknown", datetime: "string", str: "string", int: "number", float: "number",
         bool: "boolean", NoneType: "null"}
CALLERS = (wire.AsEither, wire.AsPrincipal, wire.AsWorker, wire.Ask)     # what requests have in common
# Of Python's modules each may have its own, and here all are in one file.
STRUCTS = {kind.__name__ for kind in declare.sort_structs(
    kind for op in OPERATIONS.values() for kind in (op.takes, op.gives))}
NAMED_CHOICES = {values: name for values, name in declare.CHOICES.items() if name not in STRUCTS}
OBJECT = "Record<string, unknown>"
FILE_HEAD = '''\
/**
 * Every operation of the gate: what it takes, what it gives, and how it is called over REST.
 *
 * Made by `python -m asyncgate.commands.declare` from the table of operations; change the table, then run it again.
 */
import type { CallOptions } from "./http.js";

/** How an operation is called: verb, path, whether to repeat it is harmless, its caller, its deduplicating keys. */
export type CallSpec = readonly [
  verb: string, path: string, repeatable: boolean, caller: "principal" | "worker" | "", keys: readonly string[]];
'''
CALL = """\
  abstract call<N extends OperationName>(
    operation: N, fields?: Operations[N]["takes"], options?: CallOptions): Promise<Operations[N]["gives"]>;"""


def spell_type(kind: Any) -> str:
    """Return a type for TypeScript."""
    if get_origin(kind) is Annotated:
        more = [meta.extra_json_schema for meta in get_args(kind)[1:]
                if isinstance(meta, Meta) and meta.extra_json_schema]
        if any(schema.get("type") == ["object", "null"] for schema in more):
            return f"{OBJECT} | null"
        listed = [schema["enum"] for schema in more if "enum" in schema]
        return spell_choices(listed[0]) if listed else spell_type(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        parts = [spell_type(part) for part in get_args(kind) if part is not UnsetType]
        return "unknown" if "unknown" in parts else " | ".join(dict.fromkeys(parts))
    if get_origin(kind) is Literal:
        return NAMED_CHOICES.get(get_args(kind)) or spell_choices(get_args(kind))
    if get_origin(kind) in (list, frozenset):
        inner = spell_type(get_args(kind)[0])
        return f"({inner})[]" if " | " in inner else f"{inner}[]"
    if get_origin(kind) is dict:
        inner = spell_type(get_args(kind)[1])
        return f"Record<string, {inner}>"
    return OBJECT if kind is dict else SPELLINGS.get(kind) or str(kind.__name__)


def spell_choices(values: Iterable[Any]) -> str:
    """Return the type of one of several values."""
    return " | ".join(json.dumps(value) for value in values)


def comment(text: str, indent: str = "") -> str:
    """Return a comment of documentation, on one line if it fits."""
    text = clauses.remove_clause_numbers(text).replace("*/", "* /")
    if len(indent) + len(text) + 7 <= LINE_WIDTH and "\n" not in text:
        return f"{indent}/** {text} */"
    lines = [line for paragraph in text.split("\n\n")
             for line in ("", *textwrap.wrap(" ".join(paragraph.split()), LINE_WIDTH - 3 - len(indent)))][1:]
    return "\n".join([f"{indent}/**", *(f"{indent} * {line}".rstrip() for line in lines), f"{indent} */"])


def describe_field(hint: Any) -> str:
    """Return what is said of a field."""
    metas = [meta for part in (hint, *get_args(hint)) if get_origin(part) is Annotated for meta in get_args(part)[1:]]
    return next((meta.description for meta in metas if isinstance(meta, Meta) and meta.description), "")


def render_interface(kind: type[Struct], *, asked: bool) -> str:
    """Return the interface of a Struct: in a request a field may be left out or null, in a reply it may be absent."""
    base = next((base for base in CALLERS if issubclass(kind, base) and kind is not base), None)
    own = [field for field in fields(kind) if base is None or field.name not in base.__struct_fields__
           or field.name in getattr(kind, "needed", ())]
    lines = []
    for field in own:
        hint = declare.read_hints(kind)[field.name]
        spelled, optional = spell_type(hint), may_be_absent(kind, field, hint, asked=asked)
        if asked and optional and spelled != "unknown" and "null" not in spelled.split(" | "):
            spelled += " | null"
        lines += [comment(text, "  ")] if (text := describe_field(hint)) else []
        lines.append(f"  {field.encode_name}{'?' if optional else ''}: {spelled};")
    extends = f" extends {base.__name__}" if base else ""
    return "\n".join([comment(declare.first_line(kind)), f"export interface {kind.__name__}{extends} {{", *lines, "}"])


def may_be_absent(kind: type[Struct], field: FieldInfo, hint: Any, *, asked: bool) -> bool:
    """Whether JSON may be without a field; a new task has its payload, if only null beside a pointer."""
    if asked:
        payload = field.name == "payload" and issubclass(kind, wire.CreateTask)
        return not (field.required or payload or field.name in getattr(kind, "needed", ()))
    return UnsetType in declare.list_plain_types(hint) or (kind.__struct_config__.omit_defaults and not field.required)


def camel(name: str) -> str:
    """Return a name as JavaScript writes it: createTask."""
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def list_required(op: Operation) -> list[str]:
    """Return the fields that a call must have."""
    return [field.name for field in fields(op.takes)
            if not may_be_absent(op.takes, field, declare.read_hints(op.takes)[field.name], asked=True)]


def render_method(op: Operation) -> str:
    """Return the method of an operation."""
    given = f"fields: {op.takes.__name__}{'' if list_required(op) else ' = {}'}"
    return "\n".join([
        comment(f"{op.summary}\n\n{op.text.strip()}".strip(), "  "),
        f"  {camel(op.name)}({given}, options?: CallOptions): Promise<{op.gives.__name__}> {{",
        f'    return this.call("{op.name}", fields, options);', "  }"])


def render_lists(ops: Iterable[Operation]) -> list[str]:
    """Return what each operation that pages through a list has on a page, by its name and under which member."""
    lists = {op.name: next((name, declare.read_hints(op.gives)[name]) for name in op.gives.__struct_fields__
                           if get_origin(declare.read_hints(op.gives)[name]) is list)
             for op in ops if "next_cursor" in op.gives.__struct_fields__}
    return [comment("What the operations list that page through something."), "export interface Lists {",
            *(f"  {name}: {spell_type(get_args(hint)[0])};" for name, (_, hint) in lists.items()), "}", "",
            comment("Under which member of a page the list stands."),
            "export const LISTED: { readonly [N in keyof Lists]: string } = {",
            *(f'  {name}: "{member}",' for name, (member, _) in lists.items()), "};", ""]


def render_refusals() -> str:
    """Return what each code of a refusal means, as the reference says it."""
    kinds = sorted({kind.code: kind for kind in [*errors.GateError.__subclasses__()][::-1]}.items())
    meanings = [f"  {code}: {json.dumps(first_line_of(kind), ensure_ascii=False)}," for code, kind in kinds]
    return "\n".join(["/** What each code of a refusal means, and what to do then. */", "export const REFUSALS = {",
                      *meanings, "} as const;", "", comment("The code of a refusal."),
                      "export type RefusalCode = keyof typeof REFUSALS;"])


def first_line_of(kind: type[errors.GateError]) -> str:
    """Return what a code means: the first paragraph of the docstring of its class."""
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())


def render_typescript() -> str:
    """Return the source of the whole file."""
    ops = sorted([*OPERATIONS.values(), TICKET], key=lambda op: op.name)
    takes, gives = declare.sort_structs(op.takes for op in ops), declare.sort_structs(op.gives for op in ops)
    asked: set[type[Struct]] = {*takes, wire.Requirements, *CALLERS}
    shown: set[type[Struct]] = {*asked, *gives, ChangeRecord}
    structs = sorted(shown, key=lambda kind: kind.__name__)
    calls = [f'  {op.name}: ["{op.rest[0][0]}", "{op.rest[0][1]}", {json.dumps(declare.is_repeatable(op))}, '
             f'"{declare.find_caller(op)}", {json.dumps(declare.list_key_fields(op))}],' for op in ops]
    interfaces = "\n".join(render_interface(kind, asked=kind in asked) + "\n" for kind in structs)
    choices = [f"export type {name} = {spell_choices(values)};" for values, name in sorted(
        NAMED_CHOICES.items(), key=lambda choice: choice[1]) if re.search(rf": .*\b{name}\b", interfaces)]
    table = [f"  {op.name}: {{ takes: {op.takes.__name__}; gives: {op.gives.__name__} }};" for op in ops]
    return "\n".join([
        FILE_HEAD, *choices, "", interfaces,
        comment("What each operation takes and gives, by its name."), "export interface Operations {", *table, "}", "",
        "export type OperationName = keyof Operations;", "",
        comment("How each operation is called over REST."),
        "export const CALLS: { readonly [N in OperationName]: CallSpec } = {", *calls, "};", "",
        *render_lists(ops), render_refusals(), "",
        comment("Every operation as a method; its fields have the names that they have on the wire."),
        "export abstract class OperationMethods {",
        CALL, "",
        "\n\n".join(render_method(op) for op in ops), "}", ""])
