"""The tables of the stored kinds, made of their cards, as each database writes them.

The first migration of each database has a line for them.  The tables that a database lays out for speed, and those that
are not rows of a kind, are written out there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from asyncgate.parts.model import stored
from asyncgate.parts.model.cards import (
    CARDS,
    OF_ARCHIVE,
    OF_DATABASE,
    OF_TASK,
    WITH_IT,
    Card,
    Column,
    Form,
    Lifetime,
    list_columns,
)

PLACE = "-- The tables of the stored kinds stand here: see backends/tables.py.\n"

# How long the rows of tables are kept that are not a kind of row by themselves.
OTHER_TABLES: dict[str, Lifetime] = {
    "states": Lifetime(OF_TASK, WITH_IT, "what changes of a task (Postgres)"),
    "lanes": Lifetime("until no task waits in it", "upkeep, each minute", "which tasks need which capabilities"),
    "queues": Lifetime("an hour after its last task", "upkeep, each minute", "how many tasks of a lane wait"),
    "edges": Lifetime("as long as its receipt", WITH_IT, "further parents of a receipt"),
    "deliveries": Lifetime("as long as its receipt", WITH_IT, "when a receipt was first handed out"),
    "segments": Lifetime(OF_ARCHIVE, "nobody: no receipt leaves the database without it",
                         "which files of the archive are written (Postgres)"),
    "tenants": Lifetime(OF_DATABASE, "nobody: upkeep begins there", "which tenants have stored anything"),
    "enqueuers": Lifetime(OF_DATABASE, "nobody: its owner writes and deletes them",
                          "as whom the roles of applications hand work over in SQL (Postgres)"),
    "instances": Lifetime("a day after it ended", "the other processes", "which processes serve (Postgres)"),
    "wall": Lifetime(OF_DATABASE, "nobody: it is one row", "the tenant of the running transaction (SQLite)"),
    "meta": Lifetime(OF_DATABASE, "nobody: it is some rows", "what the database says of itself"),
    "migrations": Lifetime(OF_DATABASE, "nobody: it is some rows", "which schema it has (Postgres)"),
}


class Dialect(Struct, frozen=True):
    """How a database writes its tables."""

    schema: str                 # before the name of a table
    tenant: str                 # the type of tenant_id
    types: Mapping[Any, str]    # by what a column holds
    rows_by_key: str            # behind a table whose rows lie in the order of its key
    grants: bool                # whether the gate is a role that needs rights


SQLITE_DIALECT = Dialect("", "TEXT", {bool: "INTEGER", int: "INTEGER", float: "REAL", str: "TEXT", Form.ID: "TEXT"},
                 " WITHOUT ROWID", False)
POSTGRES_DIALECT = Dialect("asyncgate.", "uuid", {
    bool: "boolean", int: "bigint", float: "float8", str: "text", Form.ID: "asyncgate.id"}, "", True)


def list_lifetimes() -> dict[str, Lifetime]:
    """Return how long the rows of each table are kept."""
    return {**{table: CARDS[kind].lifetime for kind, table in stored.TABLES.items()}, **OTHER_TABLES}


def add_tables(migration: str, dialect: Dialect) -> str:
    """Return a migration with the tables of the stored kinds in their place."""
    return migration.replace(PLACE, "\n".join(
        make_table(kind, CARDS[kind], dialect) for kind in stored.TABLES if not CARDS[kind].by_hand))


def make_table(kind: type[Struct], card: Card, dialect: Dialect) -> str:
    """Return the statements that make a kind's table and its indexes, and grant the gate what its card allows."""
    columns = [f"tenant_id {dialect.tenant} {'NOT NULL' if card.key else 'PRIMARY KEY'}",
               *(define_column(column, column.name in card.defaults, dialect) for column in list_columns(kind)),
               *[f"PRIMARY KEY ({', '.join(['tenant_id', *card.key])})"] * bool(card.key)]
    name, inner = f"{dialect.schema}{card.table}", ",\n    ".join(columns)
    made = [f"CREATE TABLE {name} (\n    {inner}\n){'' if card.rowid else dialect.rows_by_key};"]
    for index in card.indexes:
        called, _, over = index.removeprefix("UNIQUE ").partition(" ")
        made.append(f"CREATE {'UNIQUE ' * index.startswith('UNIQUE ')}INDEX {called} ON {name} {over};")
    rights = ["UPDATE"] * (card.record and not card.append_only) + ["DELETE"] * card.droppable
    if rights and dialect.grants:
        made.append(f"GRANT {', '.join(rights)} ON {name} TO asyncgate_app;")
    return "\n".join(made) + "\n"


def define_column(column: Column, defaulted: bool, dialect: Dialect) -> str:
    """Return the definition of a column."""
    kind = dialect.types[column.form if column.form is Form.ID else column.type]
    value = f"'{column.default}'" if column.type is str else column.default
    return f"{column.name} {kind}{' NOT NULL' * (not column.optional)}{f' DEFAULT {value}' * defaulted}"
