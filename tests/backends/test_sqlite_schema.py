"""The schema on SQLite: made whole, brought up to date with all that is in it, and no other taken for it."""

from __future__ import annotations

import shutil
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from asyncgate import Engine
from asyncgate.backends.lineage import FIRST, digest
from asyncgate.backends.sqlite import CARRIED, SCHEMA, migrate_database, migrate_file, migrations, open_backend
from asyncgate.conformance.harness import Gate
from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.upkeep import Upkeep

pytestmark = pytest.mark.anyio
NEXT = len(migrations()) + 1
BEFORE = """
DROP INDEX presences_worker;
DROP INDEX presences_claimed;
DROP INDEX obligations_age;
DROP INDEX leases_holder;
CREATE INDEX leases_claim ON leases (tenant_id, worker_kind, worker_id, claim_id)
    WHERE ending = 'live' AND claim_id IS NOT NULL;
""" + "".join(f"ALTER TABLE presences DROP COLUMN {name};" for name in (
    "claims", "claimed_at", "leased", "completed", "failed", "expired", "released"))
COLOUR = """
ALTER TABLE tasks ADD COLUMN colour TEXT DEFAULT 'red';
CREATE INDEX tasks_colour ON tasks (tenant_id, colour);
"""


@pytest.fixture
async def url(tmp_path: Path) -> str:
    """A file with one finished task."""
    url = f"sqlite:///{tmp_path / 'gate.db'}"
    backend = await open_backend(url)
    await Gate(Engine(backend), str(uuid.uuid4())).finished()
    await backend.close()
    return url


@pytest.fixture
def db(url: str) -> Iterator[sqlite3.Connection]:
    """The same file, past the gate."""
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as db:
        yield db


def folder_with(path: Path, text: str) -> Path:
    """Return a folder with all migrations there are and one more."""
    shutil.copytree(SCHEMA, path)
    (path / f"{NEXT:04}_more.sql").write_text(text)
    return path


def version(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone()[0])


def shape(db: sqlite3.Connection) -> list[str]:
    """The columns of all tables in a file, and the statements that made all else."""
    columns = db.execute("SELECT json_array(m.name, t.name, t.type, t.\"notnull\", t.dflt_value) "
                         "FROM sqlite_master AS m, pragma_table_info(m.name) AS t WHERE m.type = 'table' ORDER BY 1")
    others = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND type <> 'table' ORDER BY name")
    return [told for (told,) in (*columns, *others)]


def as_before(db: sqlite3.Connection, number: int) -> None:
    """Make a file look like one of the numbering before the first release."""
    db.executescript(BEFORE)
    db.execute("UPDATE meta SET value = ? WHERE name = 'schema_version'", (str(number),))
    db.execute("DELETE FROM meta WHERE name = ?", (FIRST,))
    for table in ("pauses", "bulks"):
        db.execute(f"DROP TABLE {table}")


async def test_a_file_of_the_release_before_is_brought_up_to_date_with_all_that_is_in_it(
        url: str, db: sqlite3.Connection, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "more", COLOUR)

    migrate_file(db, folder)
    migrate_file(db, folder)

    assert version(db) == NEXT
    assert db.execute("SELECT status, colour FROM tasks").fetchall() == [("succeeded", "red")]


async def test_a_file_that_fails_leaves_nothing(url: str, db: sqlite3.Connection, tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError, match="nowhere"):
        migrate_file(db, folder_with(tmp_path / "more", f"{COLOUR}\nDROP TABLE nowhere;"))

    assert version(db) == NEXT - 1
    await (await open_backend(url)).close()


async def test_a_file_of_a_newer_release_is_refused(url: str, db: sqlite3.Connection, tmp_path: Path) -> None:
    migrate_file(db, folder_with(tmp_path / "more", COLOUR))

    with pytest.raises(StartupError, match=f"schema {NEXT}, but this release knows only schemas"):
        await open_backend(url)


async def test_a_file_of_the_numbering_before_the_first_release_is_carried_over_by_migrate(
        url: str, db: sqlite3.Connection) -> None:
    fresh = shape(db)
    as_before(db, CARRIED)

    with pytest.raises(StartupError, match=f"schema {CARRIED} of the numbering before .*run `asyncgate migrate"):
        await open_backend(url)
    assert await migrate_database(url) == [f"schema {CARRIED} as 0001_initial.sql"]
    assert await migrate_database(url) == []

    backend = await open_backend(url)
    gate = Gate(Engine(backend), str(uuid.uuid4()))
    await gate.finished()
    await Upkeep(gate.engine).store_presences()
    await backend.close()
    assert version(db) == NEXT - 1
    assert db.execute("SELECT completed FROM presences WHERE id = 'w1'").fetchall() == [(1,)]
    assert shape(db) == fresh


@pytest.mark.parametrize("number", [1, CARRIED - 1])
async def test_an_older_one_is_refused_with_the_way_there(url: str, db: sqlite3.Connection, number: int) -> None:
    as_before(db, number)

    with pytest.raises(StartupError, match=f"schema {number} of .*: bring it to schema {CARRIED} with the last"):
        await migrate_database(url)
    assert version(db) == number


async def test_a_file_that_began_with_another_first_migration_is_refused(url: str, db: sqlite3.Connection) -> None:
    db.execute("UPDATE meta SET value = ? WHERE name = ?", (digest("CREATE TABLE tasks ();"), FIRST))

    for opening in (open_backend, migrate_database):
        with pytest.raises(StartupError, match=r"another first migration.*`asyncgate receipts export` with"):
            await opening(url)


def test_comments_and_white_space_do_not_make_another_migration() -> None:
    said = digest("-- what\nCREATE TABLE tasks (\n    one  text  -- why\n);")

    assert said == digest("CREATE TABLE tasks (one text);".replace("(one text)", "( one text )"))
    assert said != digest("CREATE TABLE tasks (two text);")
