"""The schema on SQLite: made whole, brought up to date with all that is in it, and no other taken for it."""

from __future__ import annotations

import re
import shutil
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from asyncgate import Engine
from asyncgate.backends.lineage import FIRST, digest
from asyncgate.backends.sqlite import (
    CARRIED,
    FILE_PAGE,
    SCHEMA,
    migrate_database,
    migrate_file,
    migrations,
    open_backend,
)
from asyncgate.conformance.harness import Gate
from asyncgate.conformance.verify import verify
from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.upkeep import Upkeep

pytestmark = pytest.mark.anyio
NEXT = len(migrations()) + 1
BEFORE = (Path(__file__).parent / "before" / "sqlite.sql").read_text()
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


@pytest.mark.parametrize(("before", "after"), [(None, FILE_PAGE), (4096, 4096)])
async def test_a_new_file_has_small_pages_and_an_older_one_keeps_its_own(
    tmp_path: Path, before: int | None, after: int
) -> None:
    """Small pages: a third less is written for each cycle."""
    path = tmp_path / "gate.db"
    if before:
        with closing(sqlite3.connect(path, isolation_level=None)) as old:
            old.executescript(f"PRAGMA page_size = {before}; VACUUM")
    backend = await open_backend(f"sqlite:///{path}")
    gate = Gate(Engine(backend), str(uuid.uuid4()))
    await gate.finished()

    assert (await verify(backend)).problems == []
    await backend.close()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA page_size").fetchone() == (after,)


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
    return [re.sub(r"\s*--.*|\s+", " ", told) for (told,) in (*columns, *others)]


def columns(db: sqlite3.Connection, table: str) -> list[str]:
    return [name for (name,) in db.execute(f"SELECT name FROM pragma_table_info('{table}')")]


def as_before(db: sqlite3.Connection, number: int) -> None:
    """Turn a file into one of the numbering before the first release, with the same rows."""
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    kept = {name: (columns(db, name), db.execute(f"SELECT * FROM {name}").fetchall()) for name in names}
    tables, *others = BEFORE.split("CREATE TRIGGER ")      # which would keep the rows of tenants apart
    db.executescript("".join(f"DROP TABLE {name};" for name in names) + tables)
    for name, (of, rows) in kept.items():
        if there := [place for place, column in enumerate(of) if column in columns(db, name)]:
            db.executemany(f"INSERT INTO {name} ({', '.join([of[place] for place in there])}) "
                           f"VALUES ({', '.join('?' * len(there))})", [[row[place] for place in there] for row in rows])
    db.executescript("".join(f"CREATE TRIGGER {other}" for other in others))
    db.execute("UPDATE meta SET value = ? WHERE name = 'schema_version'", (str(number),))
    db.execute("DELETE FROM meta WHERE name = ?", (FIRST,))


async def fill(url: str) -> None:
    """Leave a task in every place that a queue counts."""
    backend = await open_backend(url)
    gate = Gate(Engine(backend), str(uuid.uuid4()))
    held = await gate.leased(max_expiries=1, timeouts={"lease_ttl_seconds": 1})
    await gate.wait(2)
    assert (await gate.task(held.task_id)).held
    await gate.leased()
    await gate.create(type="another", requirements={"capabilities": ["gpu"]}, delay_seconds=60)
    await backend.close()


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
    await fill(url)
    fresh, tenant = shape(db), str(uuid.uuid4())
    backend = await open_backend(url)
    old = await Gate(Engine(backend), tenant).create(type="older", task_summary="Réad \\u0000 \"this\"" + "!" * 200)
    await backend.close()
    as_before(db, CARRIED)

    with pytest.raises(StartupError, match=f"schema {CARRIED} of the numbering before .*run `asyncgate migrate"):
        await open_backend(url)
    assert await migrate_database(url) == [f"schema {CARRIED} as 0001_initial.sql"]
    assert await migrate_database(url) == []

    assert shape(db) == fresh
    assert version(db) == NEXT - 1
    assert sorted(db.execute("SELECT type, capabilities, queued, held, leased FROM queues")) == [
        ("another", '["gpu"]', 1, 0, 0), ("demo", "[]", 0, 1, 1), ("older", "[]", 1, 0, 0)]
    backend = await open_backend(url)
    gate = Gate(Engine(backend), str(uuid.uuid4()))
    await gate.finished()
    await Upkeep(gate.engine).store_presences()
    found = await Gate(Engine(backend), tenant).as_admin().list_tasks(summary_prefix="Réad")
    assert [task.task_id for task in found.tasks] == [old]
    assert (await verify(backend)).problems == []
    await backend.close()
    done = db.execute("SELECT completed FROM presences WHERE id = 'w1' AND tenant_id = ?", (gate.tenant_id,))
    assert done.fetchall() == [(1,)]


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
