"""Whom a row names: an export and its tests ask the same declarations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from msgspec import Struct

from asyncgate.extras.privacy.subjects import BARE_FIELDS, LISTS, has_name, list_names
from asyncgate.parts.model.cards import Says, list_fields
from asyncgate.parts.model.stored import TABLES
from asyncgate.parts.model.wire import Principal
from tests.support.each import each


def row_of(kind: type[Struct], named: dict[str, str]) -> Any:
    """A row that names nobody but these."""
    return SimpleNamespace(**{**dict.fromkeys(kind.__struct_fields__, ""), **dict.fromkeys(LISTS, "[]"), **named})


@each("kind", TABLES)
def test_each_field_that_may_name_a_principal_finds_its_rows(kind: type[Struct]) -> None:
    ada, bob, worker = Principal("agent", "ada"), Principal("agent", "bob"), Principal("worker", "ada")
    pairs, singles = list_names(kind)
    names = [{kind_field: "agent", id_field: "ada"} for kind_field, id_field in pairs]
    names += [{name: '["ada"]' if name in LISTS else "ada" if name in BARE_FIELDS else "agent ada"}
              for name in singles]

    for named in names:
        row = row_of(kind, named)
        assert has_name(kind, row, ada), named
        assert not has_name(kind, row, bob), named
        assert not has_name(kind, row, worker) or set(named) & BARE_FIELDS, named
    assert sorted(sum(map(list, pairs), singles)) == sorted(list_fields(kind, Says.PRINCIPAL))
