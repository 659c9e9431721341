"""Generate the typed methods of the clients: `python -m asyncgate.commands.declare`.

It writes clients/operations.py from the table of operations: an async and a sync method per operation, the replies with
JSON as plain values, and the types of batch items.  Git ignores it: each build makes it, `pip install -e .` among them,
and a test says when a changed table needs it again.
"""

from __future__ import annotations

import ast
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, Meta, Raw, Struct, UnsetType
from msgspec.structs import FieldInfo, fields

from asyncgate import Operation
from asyncgate.parts.model import wire
from asyncgate.parts.operations import OPERATIONS

FILE = Path(__file__).parents[1] / "clients" / "operations.py"
WIDE = 120
KEY_FIELDS = ("idempotency_key", "claim_id")
SUBMITTED = ("type", "payload", "requirements", "idempotency_key")     # `submit` has its own names for these
PLAIN = {Raw: "Any", Any: "Any", datetime: "datetime", str: "str", int: "int", float: "float", bool: "bool",
         NoneType: "None", UnsetType: "None"}      # an optional argument defaults to None
HEAD = '''\
"""Every operation of the gate as a typed method, and what comes back.

Made by `python -m asyncgate.commands.declare` from the table of operations; change the table, then run it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from datetime import datetime
from typing import Any, Required, TypedDict, TypeVar

from msgspec import Struct, field

from asyncgate.clients.call import CallSpec
'''
SHARED_FIELDS = '''
R = TypeVar("R")
Names = Set[str] | list[str] | tuple[str, ...]      # a text alone is not a collection of names
'''
CLASS_ABOUT = {
    "AsyncOperations": ("async def", "await ", "All operations, async; the client fills in the caller."),
    "SyncOperations": ("def", "", "All operations, for synchronous code; the client fills in the caller."),
}


# Types.


def annotate(kind: Any, *, asked: bool) -> str:
    """Return a type annotation for the client: wide in requests, exact in replies."""
    if get_origin(kind) is Annotated:
        is_object = any(isinstance(meta, Meta) and (meta.extra_json_schema or {}).get("type") == ["object", "null"]
                        for meta in get_args(kind)[1:])
        return "Mapping[str, Any]" if asked and is_object else annotate(get_args(kind)[0], asked=asked)
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(dict.fromkeys(annotate(part, asked=asked) for part in get_args(kind)))
    if get_origin(kind) is Literal:
        return CHOICES.get(get_args(kind)) or f"Literal[{', '.join(map(repr, get_args(kind)))}]"
    if get_origin(kind) in (list, frozenset):
        inner = annotate(get_args(kind)[0], asked=asked)
        return f"list[{inner}]" if not asked else "Names" if inner == "str" else f"Sequence[{inner}]"
    if get_origin(kind) is dict:
        return "Mapping[str, Any]" if asked else "dict[str, Any]"
    shaped = asked and is_struct(kind) and not holds_json(kind)
    return PLAIN.get(kind) or f"{kind.__name__}{' | Mapping[str, Any]' if shaped else ''}"


def list_plain_types(kind: Any) -> Iterator[Any]:
    """Yield the plain types in a type."""
    if not get_args(kind) or get_origin(kind) is Literal:
        yield kind
    for part in get_args(kind) if get_origin(kind) is not Annotated else get_args(kind)[:1]:
        yield from list_plain_types(part)


def is_struct(kind: Any) -> bool:
    """Whether a type is a Struct."""
    return isinstance(kind, type) and issubclass(kind, Struct)


def read_hints(kind: type[Struct]) -> dict[str, Any]:
    """Return the types of a Struct's fields."""
    return get_type_hints(kind, include_extras=True)


def list_field_types(kind: type[Struct]) -> Iterator[Any]:
    """Yield the plain types of all fields of a Struct."""
    for hint in read_hints(kind).values():
        yield from list_plain_types(hint)


def sort_structs(kinds: Iterable[type[Struct]]) -> list[type[Struct]]:
    """Return Structs and the Structs in them, in order of definition."""
    structs: dict[type[Struct], None] = {}
    for kind in kinds:
        structs |= dict.fromkeys([*sort_structs(part for part in list_field_types(kind) if is_struct(part)), kind])
    return list(structs)


# Those that have the words of the operations, of extras among them.
MODULES = [sys.modules[name] for name in sorted({
    kind.__module__ for kind in sort_structs(kind for op in OPERATIONS.values() for kind in (op.takes, op.gives))})]
CHOICES = {get_args(choice): name for module in MODULES for name, choice in vars(module).items()
           if get_origin(choice) is Literal}


def holds_json(kind: type[Struct]) -> bool:
    """Whether a reply contains arbitrary JSON, which the client returns as a plain value."""
    return any(field_type is Raw or (is_struct(field_type) and holds_json(field_type))
               for field_type in list_field_types(kind))


def allows_null(hint: Any) -> bool:
    """Whether a field may be null."""
    return not {NoneType, UnsetType}.isdisjoint(list_plain_types(hint))


# Replies and parts of requests.


def render_reply(kind: type[Struct]) -> str:
    """Return the source of a reply's Struct."""
    lines = [f"    {field.name}: {annotate(read_hints(kind)[field.name], asked=False)}{render_default(kind, field)}"
             for field in fields(kind)]
    return "\n".join([f"class {kind.__name__}(Struct, kw_only=True):", f'    """{first_line(kind)}"""', "", *lines])


def render_default(kind: type[Struct], field: FieldInfo) -> str:
    """Return the default of a reply's field: a nullable field may be absent, as in the reply of an older gate."""
    if field.encode_name != field.name:
        return f' = field(name="{field.encode_name}")'
    if allows_null(read_hints(kind)[field.name]) or (field.default_factory is wire.nothing):
        return " = None"
    if field.default is not NODEFAULT:
        return f" = {field.default!r}"
    return " = []" if field.default_factory is list else ""


def render_shape(kind: type[Struct], name: str, base: str, of: list[FieldInfo], says: str) -> str:
    """Return the source of a TypedDict for a part of a request."""
    needed = getattr(kind, "needed", ())
    types = {field.name: annotate(read_hints(kind)[field.name], asked=True) for field in of}
    lines = [f"    {field.name}: Required[{types[field.name]}]" if field.required or field.name in needed else
             f"    {field.name}: {types[field.name]}" for field in of]
    return "\n".join([f"class {name}({base}, total=False):", f'    """{says}"""', "", *lines])


def render_shapes(kind: type[Struct]) -> list[str]:
    """Return the source of the TypedDicts for a part of a request; `submit` gets its own for a new task."""
    if kind is not wire.CreateTask:
        return [render_shape(kind, kind.__name__, "TypedDict", [*fields(kind)], first_line(kind))]
    terms = [field for field in fields(kind) if field.name not in SUBMITTED]
    rest = [field for field in fields(kind) if field.name in SUBMITTED]
    return [render_shape(kind, "TaskTerms", "TypedDict", terms, "Fields of a task, besides its type and payload."),
            render_shape(kind, kind.__name__, "TaskTerms", rest, first_line(kind))]


def first_line(kind: type[Struct]) -> str:
    """Return the first line of a Struct's docstring."""
    return (kind.__doc__ or "").partition("\n")[0]


# Methods.


def render_arguments(op: Operation) -> list[str]:
    """Return the arguments of a method: required, optional, then the caller's."""
    types = {field.name: annotate(op.reader.fields[field.name], asked=True) for field in fields(op.takes)}
    first = [field.name for field in fields(op.takes) if field.required or field.name in op.takes.needed]
    rest = sorted((name for name in types if name not in first), key=partial(wire.names_caller, op.takes))
    parameters = [f"{name}: {types[name].removesuffix(' | None')}" for name in first]
    return ["self", *parameters, "*", *(f"{name}: {make_optional(types[name])} = None" for name in rest)]


def make_optional(spelling: str) -> str:
    """Make an annotation optional."""
    return spelling if spelling.endswith("None") or spelling == "Any" else f"{spelling} | None"


def render_method(op: Operation, define: str, wait: str) -> str:
    """Return the source of an operation's method."""
    taken = textwrap.fill(", ".join(render_arguments(op)).replace(" ", "\0").replace(",\0", ", "), WIDE - 9,
                          break_long_words=False, break_on_hyphens=False).replace("\0", " ")
    gives = op.gives.__name__
    paragraphs = (" ".join(paragraph.split()) for paragraph in op.text.strip().split("\n\n"))
    text = "\n\n".join(textwrap.fill(paragraph, WIDE - 8) for paragraph in paragraphs)
    docstring = f'"""{op.summary}' + (f"\n\n{text}\n" if text else "") + '"""'
    body = f'{docstring}\nreturn {wait}self.ask("{op.name}", {gives}, locals())'
    return (f"    {define} {op.name}(\n{textwrap.indent(taken, ' ' * 8)},\n    ) -> {gives}:\n"
            + textwrap.indent(body, " " * 8))


def render_class(name: str) -> str:
    """Return the source of the class with all methods."""
    define, wait, says = CLASS_ABOUT[name]
    ask = (f"    {define} ask(self, operation: str, reply: type[R], said: dict[str, Any]) -> R:\n"
           f'        """Call an operation and return its reply; `reply` is its type."""\n'
           f"        raise NotImplementedError")
    made = (render_method(op, define, wait) for op in sorted(OPERATIONS.values(), key=lambda op: op.name))
    return "\n\n".join([f'class {name}:\n    """{says}"""', ask, *made])


# The file.


def render_imports(text: str) -> str:
    """Return the imports that a text needs."""
    nodes = [*ast.walk(ast.parse(text))]
    made = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    used, lines = {node.id for node in nodes if isinstance(node, ast.Name)} - made, list[str]()
    for module in MODULES:
        names = sorted(name for name in used if is_own(module, name))
        if not names:       # they are those of an extra that is not here
            continue
        lines.append(textwrap.fill(f"from {module.__name__} import (\0{', '.join(names)},\n)", WIDE).partition("\0")[0])
        lines += [f"    {name}," for name in names]
        lines.append(")")
    return "\n".join(lines)


def is_own(module: Any, name: str) -> bool:
    """Whether a module declares a name itself: a reply without JSON, or a choice."""
    member = vars(module).get(name)
    choice = get_origin(member) is Literal and (module is wire or name not in vars(wire))
    return choice or (is_struct(member) and member.__module__ == module.__name__)


def render_calls(ops: Sequence[Operation]) -> str:
    """Return the source of the REST call of each operation, whether a retry is safe, and the type of its reply."""
    lines = [f'    "{op.name}": CallSpec("{op.name}", "{op.rest[0][0]}", "{op.rest[0][1]}", {is_repeatable(op)}, '
             f'"{find_caller(op)}", {list_key_fields(op)}, {op.gives.__name__}),'.replace("'", '"') for op in ops]
    wrapped = [line if len(line) <= WIDE else line.replace(": CallSpec(", ": CallSpec(\n        ") for line in lines]
    return "\n".join(["CALLS = {", *wrapped, "}"])


def find_caller(op: Operation) -> str:
    """Return the role in which a request names its caller."""
    if issubclass(op.takes, wire.AsPrincipal):
        return "principal"
    return "worker" if "worker_id" in op.takes.__struct_fields__ else ""


def list_key_fields(op: Operation) -> tuple[str, ...]:
    """Return the members by which the gate deduplicates a request."""
    return tuple(name for name in KEY_FIELDS if name in op.takes.__struct_fields__)


def is_repeatable(op: Operation) -> bool:
    """Whether a call may be retried when its outcome is unknown."""
    kinds = sort_structs([op.takes])
    return op.idempotent or any(name in KEY_FIELDS for kind in kinds for name in kind.__struct_fields__)


def render_file() -> str:
    """Return the source of the whole file."""
    ops = sorted(OPERATIONS.values(), key=lambda op: op.name)
    replies = [render_reply(kind) for kind in sort_structs(op.gives for op in ops) if holds_json(kind)]
    within = sort_structs(
        part for op in ops for part in list_field_types(op.takes) if is_struct(part) and holds_json(part))
    parts = [text for kind in within if holds_json(kind) for text in render_shapes(kind)]
    body = "\n\n\n".join([*parts, *replies, render_calls(ops), *(render_class(name) for name in CLASS_ABOUT)]) + "\n"
    return HEAD + render_imports(body) + "\n" + SHARED_FIELDS + "\n\n" + body


def write_generated(file: Path, text: str) -> None:
    """Write a file if it changes; other processes may be reading it, so it is replaced as a whole."""
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(file)


def main() -> None:
    """Write the file of the Python client, and in a checkout that of the npm package."""
    from asyncgate.commands.declare_typescript import TYPESCRIPT_FILE, render_typescript

    write_generated(FILE, render_file())
    if TYPESCRIPT_FILE.parent.exists():     # an installed gate has no source of the package
        write_generated(TYPESCRIPT_FILE, render_typescript())


if __name__ == "__main__":
    main()
