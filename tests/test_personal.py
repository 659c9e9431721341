"""Every stored field is declared: what it may say of a person, and how long it is kept."""

from __future__ import annotations

import pytest
from msgspec import Struct

from asyncgate.commands.copy import COPIED_TABLES
from asyncgate.commands.tables import make_tables
from asyncgate.parts.model.personal import DECLARED
from asyncgate.parts.model.settings import Settings, list_settings
from asyncgate.parts.model.stored import APPEND_ONLY, RECORDS

STORED = sorted({*COPIED_TABLES, *RECORDS, *APPEND_ONLY}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", STORED, ids=lambda kind: kind.__name__)
def test_each_field_of_a_stored_row_is_declared_once(kind: type[Struct]) -> None:
    assert kind in DECLARED, f"add {kind.__name__} to DECLARED in parts/model/personal.py"

    assert sorted(DECLARED[kind].list_fields()) == sorted(kind.__struct_fields__)


def test_nothing_is_declared_that_is_not_stored() -> None:
    assert set(DECLARED) == set(STORED)


def test_the_settings_that_are_named_exist() -> None:
    known = {one.name for one in list_settings(Settings)}
    named = {word for one in DECLARED.values() for word in one.kept.split("`")[1::2]}

    assert named <= known


def test_the_data_map_has_every_personal_field() -> None:
    shown = make_tables()["data"]

    for one in DECLARED.values():
        for field in f"{one.person} {one.content} {one.place} {one.proof}".split():
            assert f"`{field}`" in shown
