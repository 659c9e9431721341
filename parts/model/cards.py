"""The card of a stored kind: what is said of it once, on its Struct, and read by everybody.

Both schemas, the statements, copies, exports, erasures, retention and the data map (docs/data-map.md) read the cards.
So a new kind is a Struct under `@stored(…)`, and its rule in extras/privacy/rules.py if an erasure changes it.

A principal may be a person, a program that acts for one, or neither: the gate cannot know.  So it treats every
principal's id as personal.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from msgspec import Struct


class Says(Enum):
    """What a field may say of a person."""

    NOTHING = 0
    PRINCIPAL = 1
    PERSON = 2
    CONTENT = 3
    PLACE = 4
    PROOF = 5


class Form(Enum):
    """What a field is beside its type."""

    ID = 0
    JSON = 1
    ELSEWHERE = 2


T = TypeVar("T")
S = TypeVar("S", bound=type[Struct])

# Every text says what it may say of a person; numbers, times, words of a list and an IdText alone say nothing.
Plain = Annotated[T, Says.NOTHING]
Actor = Annotated[T, Says.PRINCIPAL]    # names a principal
Person = Annotated[T, Says.PERSON]      # names a person, and no principal
Content = Annotated[T, Says.CONTENT]    # what callers have written: it may say anything about anybody
Location = Annotated[T, Says.PLACE]    # where somebody was: a network, a process
Proof = Annotated[T, Says.PROOF]        # proves who somebody is; never exported, not even as a hash
IdText = Annotated[str, Form.ID]            # sorted byte by byte
Json = Annotated[str, Form.JSON]        # exported as JSON
Elsewhere = Annotated[T, Form.ELSEWHERE]    # another table stores it

PERSONAL = (Says.PRINCIPAL, Says.PERSON, Says.CONTENT, Says.PLACE, Says.PROOF)


class Lifetime(Struct, frozen=True):
    """How long rows are kept, and who deletes them or why nobody does (spec 21.12.1)."""

    how_long: str       # with the settings that decide it, as code
    ended_by: str       # who deletes them; "nobody: " and why
    what: str = ""      # what they are, where the table is not a kind of row by itself

    def list_settings(self) -> list[str]:
        """Return the settings that decide it."""
        return self.how_long.split("`")[1::2]


HOURLY, SOMETIMES, WITH_IT = "upkeep, hourly", "upkeep, four times a day", "whoever deletes that"
OF_TASK = "as long as its task"
OF_TENANT, OF_ARCHIVE, OF_DATABASE = "as long as the tenant", "as long as the archive", "as long as the database"


class Card(Struct, frozen=True, kw_only=True):
    """What is said of a stored kind."""

    table: str
    purpose: str                        # why the gate keeps such rows
    lifetime: Lifetime
    key: tuple[str, ...]                # of the table, behind the tenant; empty: a tenant has one row
    record: bool = True                 # loaded and saved by its key alone: a batch may keep such a row or drop it
    append_only: bool = False           # a row is never kept a second time
    protected: bool = False             # the gate may not delete a row; the database may have a function that does
    copied: bool = True
    of_operator: bool = False           # stands in the operator's tenant, whichever tenant it is for
    last_moment: str = ""               # the field with the last moment of a row, from which upkeep counts `how_long`
    left_alone: str = ""                # why no erasure changes it; empty: extras/privacy/rules.py has its rule
    erasable: tuple[str, ...] = ()      # what an erasure may change of rows that only their own steps change, or nobody
    erased_by: tuple[str, ...] = ()     # the key by which it finds such a row
    by_hand: bool = False               # its table is written out in the schema of each database
    rowid: bool = False                 # SQLite: an ordinary table, as its rows are large or are appended in order
    defaults: tuple[str, ...] = ()      # columns for which the database has the default, too
    indexes: tuple[str, ...] = ()       # as in CREATE INDEX, without the table

    @property
    def droppable(self) -> bool:
        """Whether the gate may delete single rows by their keys."""
        return self.record and bool(self.key) and not self.protected


class Column(NamedTuple):
    """A field that is a column."""

    name: str
    type: type          # bool, int, float or str
    optional: bool
    says: Says | None   # None: nobody has said what
    form: Form | None
    default: Any


CARDS: dict[type[Struct], Card] = {}


def stored(table: str, purpose: str, how_long: str, ended_by: str, *, key: str = "", single: bool = False,
           erasable: str = "", erased_by: str = "", defaults: str = "", **facts: Any) -> Callable[[S], S]:
    """Give a Struct its card; `key` is its first field unless it says more, and empty for the `single` row of a tenant.

    Several names stand between blanks.
    """
    def deal(kind: S) -> S:
        by = () if single else tuple(key.split()) or kind.__struct_fields__[:1]
        CARDS[kind] = Card(
            table=table, purpose=purpose, lifetime=Lifetime(how_long, ended_by), key=by,
            erasable=tuple(erasable.split()), erased_by=tuple(erased_by.split()) or by,
            defaults=tuple(defaults.split()), **facts)
        return kind
    return deal


@cache
def list_columns(kind: type[Struct]) -> list[Column]:
    """Return the fields of a kind, but those that other tables store."""
    defaults = dict(zip(reversed(kind.__struct_fields__), reversed(kind.__struct_defaults__), strict=False))
    columns = [read_column(name, read_hint(kind.__module__, kind.__annotations__[name]), defaults.get(name))
               for name in kind.__struct_fields__]
    return [column for column in columns if column.form is not Form.ELSEWHERE]


@cache
def read_hint(module: str, text: str) -> Any:
    """Return the type that a text means in a module; hundreds of fields have few of them, and a start waits for all."""
    holder = types.SimpleNamespace(__annotations__={"field": text})
    return get_type_hints(holder, vars(sys.modules[module]), include_extras=True)["field"]


def read_column(name: str, hint: Any, default: Any) -> Column:
    """Return what the type of a field says."""
    marks, optional = list[Any](), False
    while (origin := get_origin(hint)) in (Annotated, Union, types.UnionType):
        if origin is Annotated:
            marks += hint.__metadata__
            hint = hint.__origin__
        else:
            optional, (hint, *_) = True, [part for part in get_args(hint) if part is not type(None)]
    kind = hint if hint in (bool, int, float) else str
    form = next((mark for mark in marks if isinstance(mark, Form)), None)
    silent = hint is not str or form is Form.ID     # a number, a word of a list, an id
    says = next((mark for mark in marks if isinstance(mark, Says)), Says.NOTHING if silent else None)
    return Column(name, kind, optional, says, form, default)


@cache
def list_fields(kind: type[Struct], *says: Says) -> list[str]:
    """Return the fields that may say such things of a person."""
    return [column.name for column in list_columns(kind) if column.says in says]


def is_personal(kind: type[Struct]) -> bool:
    """Whether such a row may be about a person."""
    return bool(list_fields(kind, *PERSONAL))
