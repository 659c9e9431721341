"""Reading requests: unknown members, and invalid items of a batch.

Stock peers send members that mean nothing here, and people misspell some; the caller must learn which were ignored.
A request is decoded by a type that forbids unknown members, so a clean request pays nothing; only when that fails, it
is read again, slowly, to name them.  An invalid item of a batch is refused alone; the others are carried out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from difflib import get_close_matches
from functools import cache, cached_property, reduce
from itertools import islice
from operator import or_
from types import UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Raw, Struct

from asyncgate.parts.model import errors, wire
from asyncgate.parts.model.identities import IDENTITY_MEMBERS, check_names
from asyncgate.parts.model.screening import NUL, check_members, find_mark

Rule = Literal["warn", "refuse", "ignore"]
K = TypeVar("K", bound=Struct)
HEADER = b"x-asyncgate-warning"
MOST_TOLD, LONGEST_MEMBER_NAME, LONGEST_HEADER = 10, 60, 1000
LONGEST_NAMES = 2**17       # bytes of a list of names: each name is matched with a regular expression
BATCHES = ("tasks", "schedules", "receipts")        # members that hold a list of requests
OPEN_MEMBERS = {"requirements": wire.Requirements}   # members whose object may have more than the gate knows
MOST_COMPARED = 8           # members of such an object; comparing names takes long, and nobody misspells one of many
NO_NAME = f"Expected `str` matching regex {wire.UNTAGGED!r}"       # msgspec's wording
QUERY = {"principal_kind", "principal_id", "principal_instance_id", "tenant_id"}    # allowed in a query beside a body
BAD_BYTE = re.compile(r"invalid character \(byte (\d+)\)")     # msgspec's wording
NO_NUMBER = re.compile(rb"NaN|Infinity")    # which Python's own encoder writes
NO_CHOICE = re.compile(r"Invalid enum value .* - at `\$\.([^`]+)`$", re.DOTALL)     # msgspec's wording
WHOLE_NUMBER = re.compile(r"-?[0-9]+").fullmatch
NONE: tuple[str, ...] = ()

_members = msgspec.json.Decoder(dict[str, Raw]).decode
_any = msgspec.json.Decoder().decode


class Unreadable(Struct):
    """An invalid item of a batch, and why it is invalid."""

    problem: errors.GateError
    task_id: str | None = None
    receipt_id: str | None = None


class Reader(Generic[K]):
    """Reads the requests of one type."""

    def __init__(self, takes: type[K], refuses: bool = False) -> None:
        self.takes, self.refuses = takes, refuses

    @cached_property
    def exact(self) -> type[K]:
        """Return the type that forbids unknown members, also in nested objects."""
        kind: type[K] = forbid_unknown_members(self.takes)
        return kind

    @cached_property    # a process that starts needs few of them
    def fields(self) -> dict[str, Any]:
        """Return the type of each member."""
        return get_type_hints(self.takes, include_extras=True)

    @cached_property
    def _exactly(self) -> Callable[[bytes | Raw], K]:
        return msgspec.json.Decoder(self.exact).decode

    @cached_property
    def _loosely(self) -> Callable[[bytes | Raw], K]:
        return msgspec.json.Decoder(self.takes).decode

    @cached_property
    def _batch(self) -> tuple[str, Reader[Any]] | None:
        """Return the member that holds the items of a batch, and their reader; None if this is not a batch."""
        return next(((name, Reader(kind)) for name in BATCHES if (kind := find_struct(self.fields.get(name)))), None)

    @cached_property
    def _items(self) -> Callable[[Raw], list[Raw]]:
        """Return what splits a batch into its items, within the limits of their number."""
        assert self._batch is not None
        kind: Any = list[Raw]
        for limit in get_args(self.fields[self._batch[0]])[1:]:
            kind = Annotated[kind, limit]
        return msgspec.json.Decoder(kind).decode

    @cached_property
    def _around(self) -> Callable[[bytes], K]:
        """Return what reads a batch without its items."""
        assert self._batch is not None
        kind: Any = msgspec.defstruct(self.takes.__name__, [(self._batch[0], Any)], bases=(self.takes,), kw_only=True)
        return msgspec.json.Decoder(kind).decode

    @cached_property
    def _names(self) -> frozenset[str]:
        """Return the members that hold lists of strings."""
        return frozenset(name for name, hint in get_type_hints(self.takes).items() if holds_strings(hint))

    @cached_property
    def _times(self) -> frozenset[str]:
        """Return the members that hold times."""
        return frozenset(name for name, hint in get_type_hints(self.takes).items() if holds_time(hint))

    @cached_property
    def is_batch(self) -> bool:
        """Whether each of its items is carried out or refused by itself; those of a ledger are read by the ledger."""
        return not set(BATCHES).isdisjoint(self.takes.__struct_fields__)

    @cached_property
    def _integers(self) -> frozenset[str]:
        """Return the members that hold integers alone."""
        return frozenset(name for name, hint in get_type_hints(self.takes).items()
                         if int in (parts := set(walk_type(hint))) and not parts & {float, str})

    def rule(self, setting: Rule) -> Rule:
        """Return the rule for unknown members."""
        return "refuse" if self.refuses else setting

    def body(self, body: bytes | Raw, setting: Rule = "warn", most: int = MOST_TOLD) -> tuple[K, tuple[str, ...]]:
        """Read a request; raises msgspec's errors, or InvalidRequest if unknown members are refused.

        At most `most` members are named, because finding a similar name takes longer than reading the request.
        """
        if len(body) > LONGEST_NAMES and self._names:
            self._check_names(body)
        if self._batch is not None and NUL.encode() in bytes(body):
            return self._slowly(body, self.rule(setting), most)
        try:
            ask = self._exactly(body)
        except msgspec.ValidationError:
            return self._slowly(body, self.rule(setting), most)
        if self._open and self._has_more_members(ask):
            return self._slowly(body, self.rule(setting), most)
        return ask, NONE

    @cached_property
    def _open(self) -> tuple[str, ...]:
        """Return the open members of this type, or of the items of a batch."""
        held = self._batch[1].takes if self._batch else self.takes
        return tuple(name for name in OPEN_MEMBERS if name in held.__struct_fields__)

    def _has_more_members(self, ask: K) -> bool:
        """Whether an open member of a request, or of an item, has members that the gate does not know."""
        asks = getattr(ask, self._batch[0]) if self._batch else [ask]
        return any(has_more_members(name, getattr(request, name)) for name in self._open for request in asks)

    def _check_names(self, body: bytes | Raw) -> None:
        """Refuse a very long list of names before each name is checked."""
        members = _members(body)
        for name in self._names & members.keys():
            if (size := len(members[name])) > LONGEST_NAMES:
                raise errors.PayloadTooLarge(f"{name} is {size} bytes; a list of names has {LONGEST_NAMES} at most")

    def query(self, query: dict[str, str], setting: Rule = "warn") -> tuple[K, tuple[str, ...]]:
        """Make a request from a query."""
        for name in self._times & query.keys():     # a conversion from text would take a bare number for seconds
            read_member(name, query[name], datetime)
        for name in self._integers & query.keys():
            if not WHOLE_NUMBER(query[name]):           # nor is 2.0 one in a body
                raise msgspec.ValidationError(f"Expected `int`, got {query[name][:40]!r} - at `$.{name}`")
        try:
            return msgspec.convert(query, self.exact, strict=False), NONE
        except msgspec.ValidationError:
            if not (IDENTITY_MEMBERS & query.keys()).issubset(self.takes.__struct_fields__):
                check_names(query.items())
            members = {name: Raw(b"null") for name in query}
            return self._settle(lambda: msgspec.convert(query, self.takes, strict=False),
                                tuple(islice(find_unknown_members(self.takes, members), MOST_TOLD)), self.rule(setting))

    def beside(self, query: dict[str, str], setting: Rule, named: str = "") -> tuple[str, ...]:
        """Name the unknown members of a query beside a body; refuse them if that is the rule."""
        known = self.takes.__struct_fields__
        strays = (describe_unknown_member(name, known) for name in query if name not in QUERY | {named})
        return self._settle(lambda: None, tuple(islice(strays, MOST_TOLD)), self.rule(setting))[1]

    def _slowly(self, body: bytes | Raw, rule: Rule, most: int) -> tuple[K, tuple[str, ...]]:
        most = max(most, rule == "refuse")      # a refusal names at least one member
        if not most and self._batch is None:
            return self._loosely(body), NONE
        try:
            members = _members(body)
        except msgspec.ValidationError:
            return self._loosely(body), NONE       # raises the error that describes it
        items = list[Any]()
        below = list[str]()
        held, reader = self._batch or ("", None)
        read_rest: Callable[[bytes | Raw], K] = self._loosely
        if reader is not None and held in members:
            with naming(held):      # for a body is not a list
                split = self._items(members[held])
            for number, item in enumerate(split):
                read, strays = reader.item(f"{held}[{number}]", item, rule, MOST_TOLD - len(below))
                items.append(read)
                below += strays
            body, read_rest = msgspec.json.encode({**members, held: None}), self._around
            if refusal := find_marked(body):
                raise refusal
        if not (IDENTITY_MEMBERS & members.keys()).issubset(self.takes.__struct_fields__):
            check_names((name, read_text(members[name])) for name in IDENTITY_MEMBERS & members.keys())
        named = tuple(islice(find_unknown_members(self.takes, members), most))
        ask, own = self._settle(lambda: read_rest(body), named, rule)
        if reader is not None and held in members:
            setattr(ask, held, items)
        return ask, (*own, *below)[:MOST_TOLD]

    def item(self, place: str, item: Raw, rule: Rule, most: int) -> tuple[Any, list[str]]:
        """Read an item of a batch, or return why it is invalid."""
        try:
            check_members(bytes(item))
            if refusal := find_marked(item, place):
                return make_unreadable(refusal, item), []
            read, strays = self.body(item, rule, max(most, 0))
        except (msgspec.DecodeError, errors.GateError) as refusal:
            return make_unreadable(errors.InvalidRequest(f"{place}: {describe_problem(refusal, self.takes)}"), item), []
        return read, [f"{place}: {text}" for text in strays]

    def _settle(self, read: Callable[[], Any], strays: tuple[str, ...], rule: Rule) -> tuple[Any, tuple[str, ...]]:
        """Read the known members; apply the rule to the unknown ones, and name them in any other refusal too."""
        if strays and rule == "refuse":
            raise errors.InvalidRequest("; ".join(strays))
        try:
            return read(), strays if rule == "warn" else NONE
        except msgspec.ValidationError as wrong:
            if not strays:
                raise
            raise errors.InvalidRequest("; ".join([describe_problem(wrong, self.takes), *strays])) from None


def describe_problem(wrong: Exception, kind: type[Struct], body: bytes = b"") -> str:
    """Say why a request of a type is invalid, and which words it may have; without the regular expression for names."""
    if flaw := find_no_number(wrong, body):
        return flaw
    if (place := NO_CHOICE.match(str(wrong))) and (choices := list_choices(kind, place[1])):
        return f"{wrong}: one of {', '.join(choices)}"
    return str(wrong).replace(NO_NAME, "Expected a name without invisible characters and without a leading blank")


def list_choices(kind: type[Struct], path: str) -> list[str]:
    """Return the words that the member at a path may be; an empty list if it may be another text, too."""
    holder: type[Struct] | None = kind
    *above, name = [part.split("[")[0] for part in path.split(".")]
    for member in above:
        holder = find_struct(find_hint(holder, member)) if holder else None
    return list_words(find_hint(holder, name)) if holder else []


def find_hint(kind: type[Struct], name: str) -> Any:
    """Return the type of a member, by its name in JSON; None if there is no such member."""
    fields = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
    return get_type_hints(kind).get(fields.get(name, ""))


def list_words(hint: Any) -> list[str]:
    """Return the words in a type, and that it may be a number if it may."""
    words = [str(word) for part in walk_type(hint) if get_origin(part) is Literal for word in get_args(part)]
    return [*words, "a number"] if words and not {int, float}.isdisjoint(walk_type(hint)) else words


def find_no_number(wrong: Exception, body: bytes) -> str:
    """Say which NaN or infinity makes a body invalid JSON; return an empty text if it is invalid for another reason."""
    place = BAD_BYTE.search(str(wrong))
    match = NO_NUMBER.match(body, int(place[1])) if place else None
    return f"{match[0].decode()} at byte {match.start()}: JSON has no such number" if match else ""


def read_member(name: str, text: str, hint: Any) -> Any:
    """Read a member that does not stand in the body; a refusal names it."""
    with naming(name):
        return msgspec.convert(text, hint)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Name a member in refusals of its value, as msgspec does where it reads a whole request."""
    try:
        yield
    except msgspec.ValidationError as wrong:
        raise msgspec.ValidationError(f"{wrong} - at `$.{name}`") from None


def find_marked(body: bytes | Raw, place: str = "") -> errors.GateError | None:
    """Return the refusal of what `mark_body` has marked, if there is any."""
    return find_mark(_any(body), place) if NUL.encode() in bytes(body) else None


def read_text(value: Raw) -> str | None:
    """Return the text that a member holds, if it holds one."""
    try:
        return msgspec.json.decode(value, type=str)
    except msgspec.DecodeError:
        return None


def make_unreadable(problem: errors.GateError, item: Raw) -> Unreadable:
    """Keep an invalid item with the task and the receipt that it names, if it does."""
    try:
        members = _members(item)
    except msgspec.DecodeError:
        members = {}
    return Unreadable(problem, *(read_text(members.get(name, Raw(b"null"))) for name in ("task_id", "receipt_id")))


@cache
def forbid_unknown_members(kind: type[Struct]) -> Any:
    """Make the type that forbids unknown members, also in nested objects."""
    hints = get_type_hints(kind, include_extras=True)
    narrowed = []
    for field in msgspec.structs.fields(kind):
        if (hint := narrow_type(hints[field.name])) is not hints[field.name]:
            narrowed.append((field.name, hint) if field.default is NODEFAULT else (field.name, hint, field.default))
    return msgspec.defstruct(kind.__name__, narrowed, bases=(kind,), kw_only=True, forbid_unknown_fields=True,
                             module=kind.__module__)


def narrow_type(hint: Any) -> Any:
    """Replace each Struct in a type by its exact type."""
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
    """Describe the unknown members of an object and of its nested objects, lazily."""
    hints = structs_of(kind)
    for name, value in members.items():
        if name not in kind.__struct_encode_fields__:
            yield describe_unknown_member(name, kind.__struct_encode_fields__, path)
        elif (held := hints.get(name)) is not None:
            for place, inner in iterate_objects(value, named=name in list_mappings(kind)):
                yield from find_unknown_members(held, inner, f"{path}{name}{place}.")
        elif (held := OPEN_MEMBERS.get(name)) is not None:
            for _, inner in iterate_objects(value):
                yield from find_misspelt_members(held, inner, f"{path}{name}.")


def find_misspelt_members(kind: type[Struct], members: dict[str, Raw], path: str) -> Iterator[str]:
    """Describe the members of an open object that look like a known one, which it does not have."""
    missing = tuple(name for name in kind.__struct_encode_fields__ if name not in members)
    for name in members if len(members) <= MOST_COMPARED else ():
        if get_close_matches(name[:LONGEST_MEMBER_NAME].lower(), missing, 1, 0.8):
            yield describe_unknown_member(name, missing, path)


def has_more_members(name: str, value: Raw) -> bool:
    """Whether an open object has members that the gate does not know."""
    if not bytes(value):
        return False        # it is absent
    try:
        find_open_decoder(name)(value)
    except msgspec.DecodeError:
        return True
    return False


@cache
def find_open_decoder(name: str) -> Callable[[Raw], Any]:
    """Return what decodes an open member if it has known members only."""
    kind: Any = forbid_unknown_members(OPEN_MEMBERS[name]) | None
    return msgspec.json.Decoder(kind).decode


@cache
def structs_of(kind: type[Struct]) -> dict[str, type[Struct]]:
    """Return the members of a type that hold Structs, except the items of a batch."""
    return {name: struct for name, hint in get_type_hints(kind).items()
            if name not in BATCHES and (struct := find_struct(hint)) is not None}


def find_struct(hint: Any) -> type[Struct] | None:
    """Return the first Struct in a type, if there is one."""
    return next((part for part in walk_type(hint) if isinstance(part, type) and issubclass(part, Struct)), None)


def holds_strings(hint: Any) -> bool:
    """Whether a type has lists or sets of strings."""
    return any(part in (list[str], frozenset[str]) for part in walk_type(hint))


def holds_time(hint: Any) -> bool:
    """Whether a type has times."""
    return any(part is datetime for part in walk_type(hint))


def walk_type(hint: Any) -> Iterator[Any]:
    """Yield a type and the types in it, each before those in itself."""
    yield hint
    for part in get_args(hint):
        yield from walk_type(part)


@cache
def list_mappings(kind: type[Struct]) -> frozenset[str]:
    """Return the members of a type that hold objects under names which the caller chooses."""
    return frozenset(name for name, hint in get_type_hints(kind).items()
                     if any(get_origin(part) is dict and find_struct(part) for part in walk_type(hint)))


def iterate_objects(value: Raw, *, named: bool = False) -> Iterator[tuple[str, dict[str, Raw]]]:
    """Yield the object that a member holds, or the objects of its list or under its names, with their places."""
    first = bytes(value).lstrip()[:1]
    if first == b"{" and not named:
        yield "", _members(value)
    held = _members(value) if first == b"{" else {}
    rows = msgspec.json.decode(value, type=list[Raw]) if first == b"[" else []
    for place, raw in [(f".{shorten_name(name)}", raw) for name, raw in held.items() if named] + [
            (f"[{number}]", raw) for number, raw in enumerate(rows)]:
        if bytes(raw).lstrip()[:1] == b"{":
            yield place, _members(raw)


def describe_unknown_member(name: str, known: tuple[str, ...], path: str = "") -> str:
    """Say that a member is unknown, and suggest a similar known one."""
    shown = shorten_name(name)
    like = get_close_matches(name[:LONGEST_MEMBER_NAME], known, 1, 0.7)
    return f"unknown member {path}{shown}" + (f"; did you mean {path}{like[0]}?" if like else "")


def shorten_name(name: str) -> str:
    """Return how a member's name is shown."""
    return name[:LONGEST_MEMBER_NAME].encode("unicode_escape").decode()


def read_warnings(reply: Any) -> tuple[str, ...]:
    """Return the warnings of a reply whose schema has no member for them (PH.6.2)."""
    return tuple(getattr(reply, "__dict__", {}).get("beside", ()))


def make_warning_header(warnings: tuple[str, ...]) -> tuple[bytes, bytes]:
    """Write warnings as a header, for replies without a member for them; names are printable already."""
    return HEADER, " | ".join(warnings).encode("ascii", "backslashreplace")[:LONGEST_HEADER]


def add_warnings(reply: bytes, warnings: tuple[str, ...]) -> bytes:
    """Add warnings to a reply, after those that it has."""
    members = _members(reply)
    before = _any(members["warnings"]) if "warnings" in members else []
    return msgspec.json.encode({**members, "warnings": [*before, *warnings]})
