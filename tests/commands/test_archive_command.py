"""`asyncgate archive`: the archive as an operator runs it, and as upkeep does."""

from __future__ import annotations

import asyncio
import fcntl
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.commands.main import main
from asyncgate.conformance.harness import Gate
from asyncgate.conformance.verify_ledger import verify_ledger
from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.settings import ArchiveSettings, Settings
from asyncgate.parts.model.stored import Archived, Receipt
from asyncgate.parts.upkeep import Upkeep
from tests.conftest import TOKEN, Live

pytestmark = pytest.mark.anyio
TENANT, OTHER = "00000000-0000-0000-0000-000000000000", "11111111-1111-4111-8111-111111111111"
MONTH = 31 * 86_400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Any]:
    backend: Any = await open_backend(f"sqlite:///{tmp_path / 'gate.db'}")
    yield backend
    await backend.close()


def settings(folder: Path, **more: Any) -> Settings:
    return Settings(archive=ArchiveSettings(directory=str(folder), **more))


async def aged(backend: Any, folder: Path, tasks: int, tenant_id: str = TENANT, size: int = 1) -> Engine:
    """Let tasks be done, and a month go by."""
    gate = Gate(Engine(backend, settings(folder)), tenant_id)
    for _ in range(tasks):
        await gate.finished(payload={"text": "x" * size})
    gate.skip(MONTH)
    return gate.engine


async def left(backend: Any, table: Any, tenant_id: str = TENANT) -> int:
    return len(await backend.page(tenant_id, Rows(table)))


async def test_upkeep_archives_for_every_tenant_where_that_is_turned_on(backend: Any, folder: Path) -> None:
    for tenant_id in (TENANT, OTHER):
        await aged(backend, folder, 2, tenant_id)
    upkeep = Upkeep(Engine(backend, settings(folder, enabled=True)))

    await upkeep.once("archive")

    assert upkeep.duties["archive"].last_error is None
    # The second tenant's tasks were done a month later, and are no older than that.
    assert [await left(backend, Receipt, tenant) for tenant in (TENANT, OTHER)] == [0, 0]
    assert [await left(backend, Archived, tenant) for tenant in (TENANT, OTHER)] == [8, 8]
    assert files(folder) == {TENANT, OTHER}


async def test_it_is_off_unless_it_is_turned_on(backend: Any, folder: Path) -> None:
    assert "archive" not in Upkeep(Engine(backend, settings(folder))).duties


async def test_turned_on_without_a_folder_nothing_starts(backend: Any) -> None:
    with pytest.raises(StartupError, match=r"archive\.directory"):
        Upkeep(Engine(backend, Settings(archive=ArchiveSettings(enabled=True))))


async def test_the_operator_archives_for_all_and_others_for_themselves(backend: Any, folder: Path) -> None:
    for tenant_id in (TENANT, OTHER):
        await aged(backend, folder, 1, tenant_id)
    engine = Engine(backend, settings(folder))

    assert (await Gate(engine, OTHER).as_admin().run_archive()).receipts == 4
    assert await left(backend, Receipt) == 4
    assert (await Gate(engine, TENANT).as_admin().run_archive()).receipts == 4


async def test_sqlite_gives_the_space_back(backend: Any, folder: Path, tmp_path: Path) -> None:
    engine = await aged(backend, folder, 150, size=20_000)

    done = await Gate(engine, TENANT).as_admin().run_archive(vacuum=True)

    assert (done.receipts, done.tasks_pruned) == (600, 150)
    assert size_of(tmp_path / "gate.db") < 1_000_000      # 150 payloads alone were three million
    assert await backend.check() == []
    await Gate(engine, TENANT).create()


async def test_what_a_killed_run_left_unfinished_goes_and_what_another_one_writes_stays(
        backend: Any, folder: Path) -> None:
    (dead := folder / TENANT / "a.jsonl.1.partial").parent.mkdir(parents=True)
    dead.write_bytes(b"the beginning of a file")
    (written := folder / TENANT / "b.jsonl.2.partial").write_bytes(b"the same")
    engine = await aged(backend, folder, 1)

    with written.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        done = await Gate(engine, TENANT).as_admin().run_archive()

    assert done.receipts == 4
    assert (dead.exists(), written.exists()) == (False, True)


async def test_that_all_seals_were_removed_with_their_head_is_noticed_where_the_archive_has_receipts(
        backend: Any, folder: Path, tmp_path: Path) -> None:
    engine = await aged(backend, folder, 1)
    await Gate(engine, TENANT).as_admin().run_archive()
    assert (await verify_ledger(backend, directory=str(folder))).problems == []
    with closing(sqlite3.connect(tmp_path / "gate.db")) as db:
        for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {name}")
        db.executescript("DELETE FROM seals; DELETE FROM seal_heads;")

    [problem] = (await verify_ledger(backend, directory=str(folder))).problems

    assert "4 receipts up to" in problem
    assert "are in the archive, but no seal covers them: seals were removed" in problem


def size_of(path: Path) -> int:
    return path.stat().st_size


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


async def test_the_commands_run_list_and_restore(tmp_path: Path, folder: Path, start: Any, backend: Any) -> None:
    database = f"sqlite:///{tmp_path / 'cli.db'}"
    other: Any = await open_backend(database)
    other.skew = -MONTH
    gate = Gate(Engine(other, Settings()), TENANT)
    task_id = (await gate.finished()).task_id
    await other.close()
    live: Live = await asyncio.to_thread(start, f"archive.directory={folder}", database=database)
    where = ("--url", live.url, "--token", TOKEN)

    moved = await asyncio.to_thread(run, "archive", "run", *where)
    listed = await asyncio.to_thread(run, "archive", "list", task_id, *where)
    tree = await asyncio.to_thread(run, "archive", "restore", task_id, *where)
    again = await asyncio.to_thread(run, "archive", "restore", task_id, *where)
    checked = await asyncio.to_thread(
        run, "verify", "--ledger", "--database", database, "--set", f"archive.directory={folder}")

    assert moved.output == "4 receipts moved to 1 segment, 1 task pruned\n"
    assert [line.split()[1] for line in listed.output.splitlines()[1:]] == [
        "task.assigned", "task.accepted", "task.completed", "task.result_ready"]
    assert tree.output == "restored: 4 receipts of 1 task\n"
    assert again.exit_code == 4
    assert checked.exit_code == 0, checked.output
