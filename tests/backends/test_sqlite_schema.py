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
from asyncgate.backends.lineage import FIRST, SAME_TABLES, digest
from asyncgate.backends.sqlite import (
    FILE_PAGE,
    SCHEMA,
    first_digest,
    migrate_database,
    migrate_file,
    migrations,
    open_backend,
)
from asyncgate.backends.sqlite_tables import insert, listed, upsert
from asyncgate.conformance.harness import Gate
from asyncgate.conformance.verify import verify
from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.model.stored import Seal

pytestmark = pytest.mark.anyio
NEXT = len(migrations()) + 1
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


@pytest.mark.parametrize("first_write", ["PRAGMA user_version = 1", "CREATE TABLE _litestream_seq (seq INTEGER)"])
async def test_a_new_file_that_a_replicator_opens_at_the_same_moment_is_waited_for_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_write: str
) -> None:
    """SQLite fails at once, without waiting, when a file becomes one of WAL beside another program's write."""
    path, waits = tmp_path / "gate.db", []
    path.touch(0o600)
    with closing(sqlite3.connect(path, isolation_level=None)) as replicator:
        replicator.execute("BEGIN IMMEDIATE")

        def wait(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 2:
                replicator.execute(first_write)
                replicator.execute("COMMIT")
        monkeypatch.setattr("asyncgate.backends.sqlite.time.sleep", wait)
        backend = await open_backend(f"sqlite:///{path}")
        monkeypatch.undo()
        try:
            await Gate(Engine(backend), str(uuid.uuid4())).finished()
        finally:
            await backend.close()
        assert len(waits) >= 2
    with closing(sqlite3.connect(path)) as later:
        assert later.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    backend = await open_backend(f"sqlite:///{path}")       # and its tables are not taken for another program's later
    await backend.close()


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


@pytest.mark.parametrize("began", [before for before, after in SAME_TABLES.items() if after == first_digest()])
async def test_a_file_whose_first_migration_wrote_the_same_tables_otherwise_opens_as_it_is(
        url: str, db: sqlite3.Connection, began: str) -> None:
    db.execute("UPDATE meta SET value = ? WHERE name = ?", (began, FIRST))
    before = "\n".join(db.iterdump())

    await (await open_backend(url)).close()

    assert "\n".join(db.iterdump()) == before


@pytest.mark.parametrize("began", [(digest("CREATE TABLE tasks ();"),), None], ids=["otherwise", "unknown"])
async def test_a_file_of_an_unreleased_version_is_refused_and_left_as_it_is(
        url: str, db: sqlite3.Connection, began: tuple[str] | None) -> None:
    db.execute("DELETE FROM meta WHERE name = ?", (FIRST,))
    db.executemany("INSERT INTO meta VALUES (?, ?)", [(FIRST, *began)] if began else [])
    before = "\n".join(db.iterdump())

    for opening in (open_backend, migrate_database):
        with pytest.raises(StartupError, match=r"another first migration.*`asyncgate receipts export` with"):
            await opening(url)
    assert "\n".join(db.iterdump()) == before


def test_comments_and_white_space_do_not_make_another_migration() -> None:
    original = digest("-- what\nCREATE TABLE tasks (\n    one  text  -- why\n);")

    assert original == digest("CREATE TABLE tasks (one text);".replace("(one text)", "( one text )"))
    assert original != digest("CREATE TABLE tasks (two text);")


def test_statements_name_the_tenant_first_and_change_no_part_of_a_key() -> None:
    assert insert("t", ["a", "b"]) == "INSERT OR ROLLBACK INTO t (tenant_id, a, b) VALUES (?, ?, ?)"
    assert upsert("t", ["a", "b", "c"], ["a"]) == (
        "INSERT OR ROLLBACK INTO t (tenant_id, a, b, c) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (tenant_id, a) DO UPDATE SET b = excluded.b, c = excluded.c")
    assert listed(Seal, "s.").startswith("s.seal_id, s.number, s.last_id")
