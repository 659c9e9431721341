"""What a batch on SQLite leaves when it is refused, when its COMMIT fails, and beside other programs."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncgate import Engine, Needs, Work
from asyncgate.backends import open_backend, sqlite
from asyncgate.commands.read_only import open_for_reading
from asyncgate.conformance.harness import Gate
from asyncgate.conformance.load import TENANT
from asyncgate.conformance.verify import verify
from asyncgate.parts.identity.guard import Guard
from asyncgate.parts.model.clock import SteadyClock
from asyncgate.parts.model.errors import DatabaseUnavailable, NotNow, Refused, StartupError
from asyncgate.parts.model.settings import Settings

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gate.db"


@pytest.fixture
async def gate(path: Path) -> AsyncIterator[Gate]:
    backend = await open_backend(f"sqlite:///{path}", serving=True)
    yield Gate(Engine(backend, Settings()), TENANT)
    await backend.close()


def backend_of(gate: Gate) -> Any:
    return gate.backend


async def tasks_of(path: Path) -> set[str]:
    """Open a database; return its tasks."""
    backend = await open_backend(f"sqlite:///{path}")
    try:
        assert (await verify(backend)).problems == []
        return {task.task_id for task in (await Gate(Engine(backend), TENANT).everything())["Task"]}
    finally:
        await backend.close()


def contents(path: Path) -> dict[str, bytes]:
    """Return the content of a database and of what an earlier release has left beside it."""
    return {name: Path(name).read_bytes() for name in (str(path), f"{path}-redo")}


# Refused batches.


async def test_a_refused_batch_leaves_nothing_and_takes_nothing_along(gate: Gate, path: Path) -> None:
    neighbour = Gate(gate.engine, str(uuid.uuid4()))
    made = [await gate.create(), await neighbour.create()]
    backend = backend_of(gate)

    def trespass(work: Work) -> None:
        backend.db.execute("INSERT INTO lanes VALUES (?, 1, 'theirs', '[]', NULL)", (neighbour.tenant_id,))

    for _ in range(2):
        with pytest.raises(Refused):
            await backend.transact(TENANT, Needs(), trespass)
    made.append(await gate.create())

    stored = [task.task_id for peer in (gate, neighbour) for task in (await peer.everything())["Task"]]
    assert sorted(stored) == sorted(made)
    with closing(sqlite3.connect(path)) as db:
        assert not any("theirs" in line for line in db.iterdump())
    assert (await verify(backend)).problems == []


async def test_batches_beside_a_refused_one_are_stored(gate: Gate) -> None:
    await gate.create()
    backend = backend_of(gate)

    def trespass(work: Work) -> None:
        backend.db.execute("INSERT INTO lanes VALUES ('another', 1, 'theirs', '[]', NULL)")
    outcomes = await asyncio.gather(*(gate.create() for _ in range(3)), backend.transact(TENANT, Needs(), trespass),
                                    *(Gate(gate.engine, str(uuid.uuid4())).create() for _ in range(3)),
                                    return_exceptions=True)

    assert [isinstance(outcome, Refused) for outcome in outcomes] == [False] * 3 + [True] + [False] * 3
    assert len((await gate.everything())["Task"]) == 4
    assert (await verify(backend)).problems == []


# A COMMIT that fails.


async def test_after_a_commit_that_failed_the_next_one_is_made_on_a_new_connection(gate: Gate, path: Path) -> None:
    """Foreign keys that wait for the end of the transaction make a COMMIT fail, and nothing before it."""
    made = [await gate.create()]
    backend = backend_of(gate)
    doubted = backend.db

    def orphan(work: Work) -> None:
        doubted.execute("INSERT INTO orphans VALUES (1)")
    with closing(sqlite3.connect(path)) as other:
        other.executescript("CREATE TABLE parents (id INTEGER PRIMARY KEY); CREATE TABLE orphans "
                            "(id INTEGER REFERENCES parents DEFERRABLE INITIALLY DEFERRED)")
    await backend._call_writer(lambda: doubted.execute("PRAGMA foreign_keys = ON"))
    with pytest.raises(Refused):
        await backend.transact(TENANT, Needs(), orphan)

    made.append(await gate.create(type="new"))

    assert backend.db is not doubted
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        doubted.execute("SELECT 1")
    assert {task.task_id for task in (await gate.everything())["Task"]} == set(made)


async def test_while_no_new_connection_can_be_made_nothing_is_acknowledged(gate: Gate, path: Path) -> None:
    made = [await gate.create()]
    backend_of(gate).doubted = True
    os.rename(f"{path}-wal", f"{path}-aside")

    with pytest.raises(DatabaseUnavailable):
        await gate.create()
    os.rename(f"{path}-aside", f"{path}-wal")
    made.append(await gate.create())

    assert {task.task_id for task in (await gate.everything())["Task"]} == set(made)


# Copying the log back.


async def test_the_log_is_copied_into_the_file_when_it_has_enough(
        gate: Gate, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await gate.create()
    assert await tasks_of(copied_alone(path, tmp_path / "before")) == set()

    monkeypatch.setattr(sqlite, "COPIED_CHANGES", 1)
    for _ in range(2):      # it is done behind the answer
        await gate.backend.transact(TENANT, Needs(), lambda work: None)

    assert await tasks_of(copied_alone(path, tmp_path / "after")) == {made}


async def test_after_a_failed_fsync_of_the_file_its_log_is_kept_for_the_next_start(
        path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = await open_backend(f"sqlite:///{path}", serving=True)
    gate = Gate(Engine(backend, Settings()), TENANT)
    backend.torn = True
    monkeypatch.setattr(sqlite, "COPIED_CHANGES", 1)
    made = {await gate.create() for _ in range(3)}
    await backend.close()

    assert await tasks_of(copied_alone(path, tmp_path / "alone")) == set()
    assert await tasks_of(path) == made


def copied_alone(path: Path, to: Path) -> Path:
    """Copy a database without its log."""
    return Path(shutil.copy(path, to))


# The files.


async def test_a_redo_log_that_an_earlier_release_left_is_refused_with_the_way_on_and_kept(path: Path) -> None:
    backend = await open_backend(f"sqlite:///{path}")
    made = await Gate(Engine(backend), TENANT).create()
    await backend.close()
    os.link(path, f"{path}-redo")       # whatever is in it
    before = contents(path)

    for serving in (True, False):
        with pytest.raises(StartupError, match=r"gate\.db-redo was left by .* start that release once .*"):
            await open_backend(f"sqlite:///{path}", serving=serving)

    assert contents(path) == before
    os.rename(f"{path}-redo", f"{path}-aside")
    assert await tasks_of(path) == {made}


async def test_a_tool_that_takes_over_what_a_killed_gate_left_keeps_no_gate_from_starting(path: Path) -> None:
    backend: Any = await open_backend(f"sqlite:///{path}", serving=True)
    made = await Gate(Engine(backend), TENANT).create()
    backend.lock.release()      # as the system does for a killed one

    tool = await open_backend(f"sqlite:///{path}")
    gate = await open_backend(f"sqlite:///{path}", serving=True)
    await gate.close()
    await tool.close()

    assert await tasks_of(path) == {made}
    backend.opened.pop_all()


async def test_a_log_without_its_database_is_refused_and_kept(path: Path, tmp_path: Path) -> None:
    """Who moves a killed gate's file, and not its log, would lose the newest work when a new file is made."""
    other: Any = await open_backend(f"sqlite:///{tmp_path}/other.db", serving=True)
    made = await Gate(Engine(other), TENANT).create()
    for end in ("", "-wal"):
        shutil.copy(f"{tmp_path}/other.db{end}", f"{path}{end}")
    await other.close()
    os.rename(path, f"{path}-aside")

    with pytest.raises(StartupError, match=r"gate\.db-wal is there and .*gate\.db is not"):
        await open_backend(f"sqlite:///{path}", serving=True)

    os.rename(f"{path}-aside", path)        # nothing else was made meanwhile
    assert await tasks_of(path) == {made}


@pytest.mark.parametrize("ends", [["", ".lock"], ["", ".lock", "-wal"], [""]], ids=["no log", "killed", "restored"])
async def test_a_log_that_a_killed_gate_must_have_left_is_missed(
        path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: list[str]) -> None:
    killed: Any = await open_backend(f"sqlite:///{tmp_path}/other.db", serving=True)
    killed.announce("http://127.0.0.1:8080")
    await Gate(Engine(killed), TENANT).create()
    for end in ends:
        shutil.copy(f"{tmp_path}/other.db{end}", f"{path}{end}")
    await killed.close()

    for _ in range(2):      # the second start follows an end
        backend: Any = await open_backend(f"sqlite:///{path}", serving=True)
        backend.announce("http://127.0.0.1:8080")
        await backend.close()

    missed = [line.getMessage() for line in caplog.records if "its newest work was in it" in line.getMessage()]
    assert len(missed) == (ends == ["", ".lock"])


async def test_a_file_that_may_only_be_read_is_refused_beside_a_redo_log_too(
        path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await (await open_backend(f"sqlite:///{path}")).close()
    os.link(path, f"{path}-redo")
    monkeypatch.setattr("asyncgate.commands.read_only.is_writable", lambda path: False)

    with pytest.raises(StartupError, match=r"gate\.db-redo was left by"), open_for_reading(f"sqlite:///{path}"):
        pass


async def test_a_file_behind_a_symbolic_link_has_its_lock_beside_itself(path: Path, tmp_path: Path) -> None:
    """SQLite has its log there, and whoever opens the file by its name looks there."""
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.db"
    link.symlink_to(path)
    backend = await open_backend(f"sqlite:///{link}", serving=True)
    made = await Gate(Engine(backend), TENANT).create()

    assert list(link.parent.iterdir()) == [link]
    with pytest.raises(NotNow):
        await open_backend(f"sqlite:///{path}", serving=True)
    await backend.close()
    assert await tasks_of(path) == {made}


async def test_a_backup_ends_although_the_gate_commits_between_any_two_of_its_steps(
        gate: Gate, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "COPIED_PAGES", 8)
    made = {await gate.create() for _ in range(3)}
    steps = list[int]()

    def commit(done: int, total: int) -> None:
        steps.append(done)
        assert len(steps) <= total, "it begins anew again and again"
        with closing(sqlite3.connect(path)) as other:
            other.execute("INSERT INTO meta VALUES (?, '')", (f"step {len(steps)}",))
            other.commit()

    await backend_of(gate).backup(str(tmp_path / "copy.db"), commit)

    assert len(steps) > 3
    assert await tasks_of(tmp_path / "copy.db") == made


async def test_a_file_whose_name_looks_like_part_of_a_url_is_backed_up(tmp_path: Path) -> None:
    backend = await open_backend(f"sqlite:///{tmp_path}/50%41 off.db")
    try:
        gate = Gate(Engine(backend), TENANT)
        made = await gate.create()
        await backend_of(gate).backup(str(tmp_path / "copy.db"))
    finally:
        await backend.close()

    assert await tasks_of(tmp_path / "copy.db") == {made}


async def test_a_batch_that_is_not_committed_holds_back_the_end_of_a_list_of_changes(gate: Gate) -> None:
    task_id, decided, go = await gate.create(), threading.Event(), threading.Event()

    def decide(work: Work) -> None:
        work.change_task(work.tasks[task_id], priority=7)
        decided.set()
        go.wait()

    writing = asyncio.create_task(backend_of(gate).transact(TENANT, Needs(tasks={task_id}), decide))
    await asyncio.to_thread(decided.wait)
    before = await gate.as_agent().list_tasks(order="changed")
    go.set()
    await writing
    after = await gate.as_agent().list_tasks(changed_since=before.as_of)

    assert [task.priority for task in before.tasks] == [0]
    assert [task.priority for task in after.tasks] == [7]


def tell_time(ahead: float) -> float:
    return time.time() + ahead


async def test_a_key_is_good_after_a_restart_although_the_clock_was_set_back_meanwhile(
        path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for ahead in (60.0, 0.0):       # of this machine's clock, which is corrected while the gate is down
        monkeypatch.setattr(sqlite, "SteadyClock", partial(SteadyClock, wall=partial(tell_time, ahead)))
        backend = await open_backend(f"sqlite:///{path}", serving=True)
        gate = Gate(Engine(backend, Settings()), TENANT)
        if ahead:
            made = await gate.as_admin().issue_key(name="w", principal_kind="worker", principal_id="w1")
            assert made.key.not_before > datetime.fromtimestamp(time.time() + 30, UTC)
        else:
            guard = Guard(gate.engine)
            caller = await guard.keys.caller(made.api_key)
            await guard.keys.close()
        await backend.close()

    assert caller is not None
    assert caller.tenant_id == TENANT
