"""Reading requests: members that an operation does not know, and items of a batch that cannot be read.

Stock peers send members that mean nothing here, and people misspell some; both must be told apart from what was heard.
A request is decoded by a type that forbids them, so that one without any pays nothing; only when that fails it is read
again, slowly, to name them.  An item of a batch that cannot be read is refused by itself, the others are carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import cache, cached_property, reduce
from itertools import islice
from operator import or_
from types import UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Raw, Struct

from asyncgate.parts.model.errors import GateError, InvalidRequest
from asyncgate.parts.model.wire import UNTAGGED, Batch

Rule = Literal["warn", "refuse", "ignore"]
K = TypeVar("K", bound=Struct)
HEADER = b"x-asyncgate-warning"
MOST_TOLD, LONGEST_MEMBER_NAME, LONGEST_HEADER = 10, 60, 1000
BATCHES = ("tasks", "schedules")        # members that hold requests of their own
NO_NAME = f"Expected `str` matching regex {UNTAGGED!r}"       # how msgspec says it
VALID = Raw(b'[{"type":"any","schedule_id":"any"}]')    # stands for the items of a batch while the rest of it is read
QUERY = {"principal_kind", "principal_id", "principal_instance_id", "tenant_id"}    # what a query may say beside a body
NONE: tuple[str, ...] = ()

_members = msgspec.json.Decoder(dict[str, Raw]).decode
_items = msgspec.json.Decoder(Annotated[list[Raw], Batch]).decode
_any = msgspec.json.Decoder().decode


class Unreadable(Struct):
    """An item of a batch that cannot be carried out, and why."""

    problem: GateError
    task_id: str | None = None


class Reader(Generic[K]):
    """Reads the requests of one type."""

    def __init__(self, takes: type[K], refuses: bool = False) -> None:
        self.takes, self.refuses = takes, refuses

    @cached_property
    def exact(self) -> type[K]:
        """Return the type that forbids what it does not know, also in what it holds."""
        kind: type[K] = forbid_unknown_members(self.takes)
        return kind

    @cached_property
    def _exactly(self) -> Callable[[bytes | Raw], K]:
        return msgspec.json.Decoder(self.exact).decode

    @cached_property
    def _loosely(self) -> Callable[[bytes | Raw], K]:
        return msgspec.json.Decoder(self.takes).decode

    @cached_property
    def _batch(self) -> tuple[str, Reader[Any]] | None:
        """Return the member that holds the items, and what reads them, if this is a batch."""
        hints = get_type_hints(self.takes)
        return next(((name, Reader(get_args(hints[name])[0])) for name in BATCHES if name in hints), None)

    def rule(self, setting: Rule) -> Rule:
        """Return what is done about unknown members."""
        return "refuse" if self.refuses else setting

    def body(self, body: bytes | Raw, setting: Rule = "warn", most: int = MOST_TOLD) -> tuple[K, tuple[str, ...]]:
        """Read a request; raises what msgspec raises, or InvalidRequest where an unknown member is refused.

        At most so many members are named: to find what each resembles takes longer than to read it.
        """
        try:
            return self._exactly(body), NONE
        except msgspec.ValidationError:
            return self._slowly(body, self.rule(setting), most)

    def query(self, query: dict[str, str], setting: Rule = "warn") -> tuple[K, tuple[str, ...]]:
        """Make a request of a query."""
        try:
            return msgspec.convert(query, self.exact, strict=False), NONE
        except msgspec.ValidationError:
            said = {name: Raw(b"null") for name in query}
            return self._settle(lambda: msgspec.convert(query, self.takes, strict=False),
                                tuple(islice(find_unknown_members(self.takes, said), MOST_TOLD)), self.rule(setting))

    def beside(self, query: dict[str, str], setting: Rule, named: str = "") -> tuple[str, ...]:
        """Name what a query says beside a body and nobody hears; refuse it where that is the rule."""
        known = self.takes.__struct_fields__
        strays = (describe_unknown_member(name, known) for name in query if name not in QUERY | {named})
        return self._settle(lambda: None, tuple(islice(strays, MOST_TOLD)), self.rule(setting))[1]

    def _slowly(self, body: bytes | Raw, rule: Rule, most: int) -> tuple[K, tuple[str, ...]]:
        most = max(most, rule == "refuse")      # what is refused is told of one at least
        if not most and self._batch is None:
            return self._loosely(body), NONE
        try:
            members = _members(body)
        except msgspec.ValidationError:
            return self._loosely(body), NONE       # which says what is wrong with it
        items = list[Any]()
        below = list[str]()
        held, reader = self._batch or ("", None)
        if reader is not None and held in members:
            for number, item in enumerate(_items(members[held])):
                read, strays = reader.item(f"{held}[{number}]", item, rule, MOST_TOLD - len(below))
                items.append(read)
                below += strays
            body = msgspec.json.encode({**members, held: VALID})
        named = tuple(islice(find_unknown_members(self.takes, members), most))
        ask, own = self._settle(lambda: self._loosely(body), named, rule)
        if items:
            setattr(ask, held, items)
        return ask, (*own, *below)[:MOST_TOLD]

    def item(self, place: str, item: Raw, rule: Rule, most: int) -> tuple[Any, list[str]]:
        """Read an item of a batch, or say why it cannot be read."""
        try:
            read, strays = self.body(item, rule, max(most, 0))
        except (msgspec.DecodeError, GateError) as no:
            return Unreadable(InvalidRequest(f"{place}: {describe_problem(no)}"), read_task_id(item)), []
        return read, [f"{place}: {text}" for text in strays]

    def _settle(self, read: Callable[[], Any], strays: tuple[str, ...], rule: Rule) -> tuple[Any, tuple[str, ...]]:
        """Read what is understood; what is not decides by the rule, and stands beside any other refusal."""
        if strays and rule == "refuse":
            raise InvalidRequest("; ".join(strays))
        try:
            return read(), strays if rule == "warn" else NONE
        except msgspec.ValidationError as wrong:
            raise InvalidRequest("; ".join([describe_problem(wrong), *strays])) if strays else wrong from None


def describe_problem(wrong: Exception) -> str:
    """Say why a request cannot be read, without the expression that a name has to match."""
    return str(wrong).replace(NO_NAME, "Expected a name without invisible characters and without a blank before it")


def read_task_id(item: Raw) -> str | None:
    """Return the task that an unreadable item names, if it names one."""
    try:
        return msgspec.json.decode(_members(item)["task_id"], type=str)
    except (msgspec.DecodeError, KeyError):
        return None


@cache
def forbid_unknown_members(kind: type[Struct]) -> Any:
    """Make the type that forbids unknown members, in all that it holds."""
    hints = get_type_hints(kind, include_extras=True)
    narrowed = []
    for one in msgspec.structs.fields(kind):
        if (hint := narrow_type(hints[one.name])) is not hints[one.name]:
            narrowed.append((one.name, hint) if one.default is NODEFAULT else (one.name, hint, one.default))
    return msgspec.defstruct(kind.__name__, narrowed, bases=(kind,), kw_only=True, forbid_unknown_fields=True,
                             module=kind.__module__)


def narrow_type(hint: Any) -> Any:
    """Put the exact type of each Struct into a type that mentions it."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return forbid_unknown_members(hint)
    parts = get_args(hint)
    if not parts or get_origin(hint) is Literal:
        return hint
    narrowed = [narrow_type(part) for part in (parts[:1] if get_origin(hint) is Annotated else parts)]
    if all(new is old for new, old in zip(narrowed, parts, strict=False)):
        return hint
    if get_origin(hint) is Annotated:
        return Annotated[(narrowed[0], *hint.__metadata__)]  # type: ignore[index,unused-ignore]
    if get_origin(hint) in (Union, UnionType):
        return reduce(or_, narrowed)
    return get_origin(hint)[tuple(narrowed)]


def find_unknown_members(kind: type[Struct], members: dict[str, Raw], path: str = "") -> Iterator[str]:
    """Name the members that a type does not know, also of the objects that it holds, as far as somebody listens."""
    hints = structs_of(kind)
    for name, value in members.items():
        if name not in kind.__struct_encode_fields__:
            yield describe_unknown_member(name, kind.__struct_encode_fields__, path)
        elif (held := hints.get(name)) is not None:
            for place, inner in iterate_objects(value):
                yield from find_unknown_members(held, inner, f"{path}{name}{place}.")


@cache
def structs_of(kind: type[Struct]) -> dict[str, type[Struct]]:
    """Return which members of a type hold objects of known shape, but for the items of a batch."""
    return {name: found for name, hint in get_type_hints(kind).items()
            if name not in BATCHES and (found := find_struct(hint)) is not None}


def find_struct(hint: Any) -> type[Struct] | None:
    """Return the Struct that a type mentions."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint
    return next((found for part in get_args(hint) if (found := find_struct(part)) is not None), None)


def iterate_objects(value: Raw) -> Iterator[tuple[str, dict[str, Raw]]]:
    """Yield the object that a member is, or the objects of the list that it is, with their places."""
    first = bytes(value).lstrip()[:1]
    if first == b"{":
        yield "", _members(value)
    elif first == b"[":
        for number, one in enumerate(msgspec.json.decode(value, type=list[Raw])):
            if bytes(one).lstrip()[:1] == b"{":
                yield f"[{number}]", _members(one)


def describe_unknown_member(name: str, known: tuple[str, ...], path: str = "") -> str:
    """Say that a member is unknown, and which one may be meant."""
    shown = name[:LONGEST_MEMBER_NAME].encode("unicode_escape").decode()
    like = get_close_matches(name[:LONGEST_MEMBER_NAME], known, 1, 0.7)
    return f"unknown member {path}{shown}" + (f"; did you mean {path}{like[0]}?" if like else "")


def read_warnings(reply: Any) -> tuple[str, ...]:
    """Return the warnings that come beside a reply whose schema has no place for them (PH.6.2)."""
    return tuple(getattr(reply, "__dict__", {}).get("beside", ()))


def make_warning_header(warnings: tuple[str, ...]) -> tuple[bytes, bytes]:
    """Say it in a header, where the reply itself has no place for it; names are made printable before."""
    return HEADER, " | ".join(warnings).encode("ascii", "backslashreplace")[:LONGEST_HEADER]


def add_warnings(reply: bytes, warnings: tuple[str, ...]) -> bytes:
    """Add warnings to a reply, which may have some already."""
    members = _members(reply)
    before = _any(members["warnings"]) if "warnings" in members else []
    return msgspec.json.encode({**members, "warnings": [*before, *warnings]})
