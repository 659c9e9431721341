"""The typed methods of the Python client, made from the table of operations: `python -m asyncgate.commands.declare`.

It writes clients/operations.py: a method per operation, once to await and once to call, the replies with their JSON as
plain values, and the shapes of what goes into a batch.  A test holds that file equal to what this makes.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, Meta, Raw, Struct, UnsetType
from msgspec.structs import FieldInfo, fields

from asyncgate import Operation
from asyncgate.parts.model import findings, wire, wire_admin, wire_receipts
from asyncgate.parts.model.wire import AsEither, AsPrincipal, CreateTask
from asyncgate.parts.operations import OPERATIONS

MODULES = (findings, wire, wire_admin, wire_receipts)
FILE = Path(__file__).parents[1] / "clients" / "operations.py"
WIDE = 120
KEY_FIELDS = ("idempotency_key", "claim_id")
CALLER_FIELDS = frozenset(AsEither.__struct_fields__)     # who asks: after what is asked
SUBMITTED = ("type", "payload", "requirements", "idempotency_key")     # which `submit` has better names for
CHOICES = {get_args(choice): name for module in MODULES for name, choice in vars(module).items()
           if get_origin(choice) is Literal}
PLAIN = {Raw: "Any", Any: "Any", datetime: "datetime", str: "str", int: "int", float: "float", bool: "bool",
         NoneType: "None", UnsetType: "None"}      # what may be left out is shown as None
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
    "AsyncOperations": ("async def", "await ", "All operations, to await; who makes a request is filled in."),
    "SyncOperations": ("def", "", "All operations, to call from where nothing can be awaited."),
}


# Types.


def spelled(kind: Any, *, asked: bool) -> str:
    """Write a type as the client shows it: requests take what is convenient, replies are what they are."""
    if get_origin(kind) is Annotated:
        return "Mapping[str, Any]" if asked and is_object(kind) else spelled(get_args(kind)[0], asked=asked)
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(dict.fromkeys(spelled(one, asked=asked) for one in get_args(kind)))
    if get_origin(kind) is Literal:
        return CHOICES.get(get_args(kind)) or f"Literal[{', '.join(map(repr, get_args(kind)))}]"
    if get_origin(kind) in (list, frozenset):
        inner = spelled(get_args(kind)[0], asked=asked)
        return f"list[{inner}]" if not asked else "Names" if inner == "str" else f"Sequence[{inner}]"
    if get_origin(kind) is dict:
        return "Mapping[str, Any]" if asked else "dict[str, Any]"
    shaped = asked and is_struct(kind) and not holds_json(kind)
    return PLAIN.get(kind) or f"{kind.__name__}{' | Mapping[str, Any]' if shaped else ''}"


def is_object(kind: Any) -> bool:
    """Whether a field of any JSON is said to be an object."""
    return any(isinstance(meta, Meta) and (meta.extra_json_schema or {}).get("type") == ["object", "null"]
               for meta in get_args(kind)[1:])


def inside(kind: Any) -> Iterator[Any]:
    """Yield the plain types that a type is made of."""
    if not get_args(kind) or get_origin(kind) is Literal:
        yield kind
    for one in get_args(kind) if get_origin(kind) is not Annotated else get_args(kind)[:1]:
        yield from inside(one)


def is_struct(kind: Any) -> bool:
    """Whether a type is a Struct."""
    return isinstance(kind, type) and issubclass(kind, Struct)


def hints(kind: type[Struct]) -> dict[str, Any]:
    """Return the types of a Struct's fields."""
    return get_type_hints(kind, include_extras=True)


def parts_of(kind: type[Struct]) -> Iterator[Any]:
    """Yield the plain types of all fields of a Struct."""
    for hint in hints(kind).values():
        yield from inside(hint)


def reached(kinds: Iterable[type[Struct]]) -> list[type[Struct]]:
    """Return Structs and all that they are made of, what is used before what uses it."""
    found: dict[type[Struct], None] = {}
    for kind in kinds:
        found |= dict.fromkeys([*reached(part for part in parts_of(kind) if is_struct(part)), kind])
    return list(found)


def holds_json(kind: type[Struct]) -> bool:
    """Whether a reply has any JSON in it, which the client shows as a plain value."""
    return any(one is Raw or (is_struct(one) and holds_json(one)) for one in parts_of(kind))


def nullable(hint: Any) -> bool:
    """Whether a field may be null."""
    return not {NoneType, UnsetType}.isdisjoint(inside(hint))


# Replies and shapes.


def reply(kind: type[Struct]) -> str:
    """Write the Struct of a reply."""
    lines = [f"    {one.name}: {spelled(hints(kind)[one.name], asked=False)}{default(kind, one)}"
             for one in fields(kind)]
    return "\n".join([f"class {kind.__name__}(Struct, kw_only=True):", f'    """{first_line(kind)}"""', "", *lines])


def default(kind: type[Struct], one: FieldInfo) -> str:
    """Write the default of a reply's field: what may be null may be absent, as in the answer of an older gate."""
    if one.encode_name != one.name:
        return f' = field(name="{one.encode_name}")'
    if nullable(hints(kind)[one.name]) or (one.default_factory is wire.nothing):
        return " = None"
    if one.default is not NODEFAULT:
        return f" = {one.default!r}"
    return " = []" if one.default_factory is list else ""


def shape(kind: type[Struct], name: str, base: str, of: list[FieldInfo], says: str) -> str:
    """Write the shape of a part of a request: a dictionary with these members."""
    needed = getattr(kind, "needed", ())
    types = {one.name: spelled(hints(kind)[one.name], asked=True) for one in of}
    lines = [f"    {one.name}: Required[{types[one.name]}]" if one.required or one.name in needed else
             f"    {one.name}: {types[one.name]}" for one in of]
    return "\n".join([f"class {name}({base}, total=False):", f'    """{says}"""', "", *lines])


def shapes(kind: type[Struct]) -> list[str]:
    """Write a part of a request; that of a new task without what `submit` names otherwise is a shape of its own."""
    if kind is not CreateTask:
        return [shape(kind, kind.__name__, "TypedDict", [*fields(kind)], first_line(kind))]
    terms = [one for one in fields(kind) if one.name not in SUBMITTED]
    rest = [one for one in fields(kind) if one.name in SUBMITTED]
    return [shape(kind, "TaskTerms", "TypedDict", terms, "What may be said of a task beside its type and payload."),
            shape(kind, kind.__name__, "TaskTerms", rest, first_line(kind))]


def first_line(kind: type[Struct]) -> str:
    """Return what a Struct says it is."""
    return (kind.__doc__ or "").partition("\n")[0]


# Methods.


def asked_first(op: Operation) -> list[str]:
    """Return the fields without which a request is nothing, in order: they may be given by position."""
    return [one.name for one in fields(op.takes) if one.required or one.name in op.takes.needed]


def arguments(op: Operation) -> list[str]:
    """Write the arguments of a method: what must be said, what may be said, and who says it."""
    types = {one.name: spelled(op.reader.fields[one.name], asked=True) for one in fields(op.takes)}
    first = asked_first(op)
    rest = sorted((name for name in types if name not in first), key=CALLER_FIELDS.__contains__)
    said = [f"{name}: {types[name].removesuffix(' | None')}" for name in first]
    return ["self", *said, "*", *(f"{name}: {optional(types[name])} = None" for name in rest)]


def optional(spelling: str) -> str:
    """Let an argument be left out."""
    return spelling if spelling.endswith("None") or spelling == "Any" else f"{spelling} | None"


def method(op: Operation, define: str, wait: str) -> str:
    """Write the method of an operation."""
    taken = textwrap.fill(", ".join(arguments(op)).replace(" ", "\0").replace(",\0", ", "), WIDE - 8,
                          break_long_words=False, break_on_hyphens=False).replace("\0", " ")
    gives = op.gives.__name__
    text = "\n".join(textwrap.fill(line, WIDE - 8) for line in op.text.strip().splitlines())
    said = f'"""{op.summary}' + (f"\n\n{text}\n" if text else "") + '"""'
    body = f'{said}\nreturn {wait}self.ask("{op.name}", {gives}, locals())'
    return (f"    {define} {op.name}(\n{textwrap.indent(taken, ' ' * 8)},\n    ) -> {gives}:\n"
            + textwrap.indent(body, " " * 8))


def methods(name: str) -> str:
    """Write the class of all methods."""
    define, wait, says = CLASS_ABOUT[name]
    ask = (f"    {define} ask(self, operation: str, reply: type[R], said: dict[str, Any]) -> R:\n"
           f'        """Call an operation and return its reply, decoded into `reply`."""\n'
           f"        raise NotImplementedError")
    made = (method(op, define, wait) for op in sorted(OPERATIONS.values(), key=lambda op: op.name))
    return "\n\n".join([f'class {name}:\n    """{says}"""', ask, *made])


# The file.


def imports(text: str) -> str:
    """Write the imports of the words of the wire that a text uses."""
    words = "".join(letter if letter.isidentifier() or letter.isdigit() else " " for letter in text).split()
    made = {line.split()[1].partition("(")[0] for line in text.splitlines() if line.startswith("class ")}
    used, lines = set(words) - made, []
    for module in MODULES:
        names = sorted(name for name in used if is_own(module, name))
        lines.append(textwrap.fill(f"from {module.__name__} import (\0{', '.join(names)},\n)", WIDE).partition("\0")[0])
        lines += [f"    {name}," for name in names]
        lines.append(")")
    return "\n".join(lines)


def is_own(module: Any, name: str) -> bool:
    """Whether a module is where a word of the wire is declared: a reply without JSON, or a choice."""
    found = vars(module).get(name)
    choice = get_origin(found) is Literal and (module is wire or name not in vars(wire))
    return choice or (is_struct(found) and found.__module__ == module.__name__)


def calls(ops: Sequence[Operation]) -> str:
    """Write how each operation is called over REST, and whether its repetition does no harm."""
    lines = [f'    "{op.name}": CallSpec("{op.name}", "{op.rest[0][0]}", "{op.rest[0][1]}", {is_repeatable(op)}, '
             f'"{find_caller(op)}", {keys_of(op)}),'.replace("'", '"') for op in ops]
    return "\n".join(["CALLS = {", *lines, "}"])


def find_caller(op: Operation) -> str:
    """Say as what a caller may name itself in a request."""
    if issubclass(op.takes, AsPrincipal):
        return "principal"
    return "worker" if "worker_id" in op.takes.__struct_fields__ else ""


def keys_of(op: Operation) -> tuple[str, ...]:
    """Return the members by which the gate knows a request again."""
    return tuple(name for name in KEY_FIELDS if name in op.takes.__struct_fields__)


def is_repeatable(op: Operation) -> bool:
    """Whether a call may be repeated when nobody knows whether it was carried out."""
    return op.idempotent or any(name in KEY_FIELDS for kind in reached([op.takes]) for name in kind.__struct_fields__)


def source() -> str:
    """Write the whole file."""
    ops = sorted(OPERATIONS.values(), key=lambda op: op.name)
    replies = [reply(kind) for kind in reached(op.gives for op in ops) if holds_json(kind)]
    within = reached(part for op in ops for part in parts_of(op.takes) if is_struct(part) and holds_json(part))
    parts = [text for kind in within if holds_json(kind) for text in shapes(kind)]
    body = "\n\n\n".join([*parts, *replies, calls(ops), *(methods(name) for name in CLASS_ABOUT)]) + "\n"
    return HEAD + imports(body) + "\n" + SHARED_FIELDS + "\n\n" + body


def main() -> None:
    """Write the file, into another place where one is named."""
    Path((sys.argv[1:] or [str(FILE)])[0]).write_text(source(), encoding="utf-8")


if __name__ == "__main__":
    main()
