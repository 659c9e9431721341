"""Every stored field is declared: what it may say of a person, and how long it is kept."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

import asyncgate
from asyncgate.backends import sqlite
from asyncgate.backends.postgres import migrations as postgres
from asyncgate.backends.tables import OTHER_TABLES, list_lifetimes
from asyncgate.commands.tables import make_tables
from asyncgate.parts.model.cards import CARDS, PERSONAL, Says, list_columns, list_fields
from asyncgate.parts.model.settings import Settings, list_settings
from asyncgate.parts.model.stored import TABLES, Archived, Receipt
from asyncgate.parts.model.stored_oauth import User
from tests.support.each import each

CREATED = re.compile(r"^CREATE TABLE (?:asyncgate\.)?(\w+)", re.M)


@each("kind", TABLES)
def test_each_text_of_a_stored_row_says_what_it_may_say_of_a_person(kind: type[Struct]) -> None:
    assert [column.name for column in list_columns(kind) if column.says is None] == []
    assert {*kind.__struct_fields__} - {column.name for column in list_columns(kind)} == (
        {"parents", "delivered_at"} if kind is Receipt else set())


def test_each_module_of_stored_kinds_is_known() -> None:
    modules = {path.stem for path in Path(asyncgate.__file__).parent.glob("parts/model/*.py")
               if "\n@stored(" in path.read_text()}

    assert {kind.__module__.rpartition(".")[2] for kind in TABLES} == modules


def test_what_is_said_of_columns_is_said_of_fields() -> None:
    for kind, card in CARDS.items():
        assert {*card.key, *card.erasable, *card.erased_by, *card.defaults} <= {*kind.__struct_fields__}


def test_each_table_of_both_databases_has_a_lifetime() -> None:
    texts = [*map(sqlite.read_migration, sqlite.migrations()), *(file.sql for file in postgres.migrations())]
    made = {name for text in texts for name in CREATED.findall(text)}

    assert made == {*list_lifetimes()} == {*TABLES.values(), *OTHER_TABLES}
    assert {name for name, lifetime in list_lifetimes().items() if lifetime.what} == {*OTHER_TABLES}


def test_each_setting_for_days_that_rows_are_kept_decides_a_lifetime() -> None:
    known = {setting.name for setting in list_settings(Settings)}
    named = {name for lifetime in list_lifetimes().values() for name in lifetime.list_settings()}

    assert named <= known
    assert {name for name in known if re.search(r"retention_days|log_days|terminal_days", name)} == named


def test_what_a_setting_or_a_time_ends_is_deleted_by_somebody() -> None:
    for_ever = re.compile("as long as the (tenant|archive|database)")

    assert {name for name, lifetime in list_lifetimes().items() if "nobody: " in lifetime.ended_by} - {"receipts"} == {
        name for name, lifetime in list_lifetimes().items() if for_ever.fullmatch(lifetime.how_long)}


def test_the_data_map_has_every_personal_field() -> None:
    shown = make_tables()["data"]

    for kind in TABLES:
        for field in list_fields(kind, *PERSONAL):
            assert f"`{field}`" in shown


# Hashes over what the gate wrote itself.
OVER_ROWS = {"Receipt.hash", "Audit.hash", "AuditHead.hash", "Seal.hash", "SealHead.hash", "Account.tokens_since"}


@each("kind", TABLES)
def test_what_sounds_like_a_secret_is_declared_as_a_proof(kind: type[Struct]) -> None:
    proofs = list_fields(kind, Says.PROOF)
    sounding = {name for name in kind.__struct_fields__
                if re.search(r"secret|passw|token|seed|(^|_)(hash|code|key)$", name) and (
                    name not in ("idempotency_key", "limit_key", "blocked_key"))}

    assert {f"{kind.__name__}.{name}" for name in sounding - {*proofs}} <= OVER_ROWS | {"Receipt.receipt_key"}


def test_the_rows_of_the_authorization_server_are_known_to_be_those_of_many_tenants() -> None:
    assert {kind for kind in CARDS if kind.__module__ == User.__module__} == {
        kind for kind, card in CARDS.items() if card.of_operator}


def test_receipts_are_exported_before_those_that_move_into_the_archive_meanwhile() -> None:
    assert list(TABLES).index(Receipt) < list(TABLES).index(Archived)
