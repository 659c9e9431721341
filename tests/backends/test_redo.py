"""The redo log: what was acknowledged survives a kill at any moment, and nothing else comes back."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import sqlite3
import stat
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncgate import Engine, Needs, Work
from asyncgate.backends import open_backend, redo, sqlite
from asyncgate.conformance.harness import Gate, under
from asyncgate.conformance.load import TENANT
from asyncgate.conformance.verify import verify
from asyncgate.parts.model.errors import DatabaseUnavailable, NotNow, Refused, StartupError
from asyncgate.parts.model.settings import Settings
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
KILLED_IN_A_GENERATION = """
import asyncio, os, signal, sys
from asyncgate import Engine, Settings
from asyncgate.backends import open_backend, sqlite
from asyncgate.conformance.harness import Gate

async def main():
    sqlite.GENERATION_SECONDS = 3600.0
    backend = await open_backend("sqlite:///" + sys.argv[1], serving=True)
    gate = Gate(Engine(backend, Settings()), sys.argv[2])
    for _ in range(20):
        print(await gate.create(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gate.db"


@pytest.fixture
async def gate(path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    """A gate whose generation ends only when somebody reads, or needs the file."""
    monkeypatch.setattr(sqlite, "GENERATION_SECONDS", 3600.0)
    backend = await open_backend(f"sqlite:///{path}", serving=True)
    yield Gate(Engine(backend, Settings()), TENANT)
    await backend.close()


def backend_of(gate: Gate) -> Any:
    return gate.backend


def copied(path: Path, to: Path) -> Path:
    """Copy a database with its logs, as a crash of the machine leaves them."""
    to.mkdir()
    for ending in ("", "-wal", "-redo"):
        shutil.copy(f"{path}{ending}", to / f"{path.name}{ending}")
    return to / path.name


def dump(path: Path) -> list[str]:
    """Return everything in a file, but for the mark of its log."""
    with closing(sqlite3.connect(path)) as db:
        return [line for line in db.iterdump() if "'redo'" not in line]


def log_of(path: Path) -> bytes | None:
    """Return the whole log of a file, None if it has none."""
    log = Path(f"{path}-redo")
    return log.read_bytes() if log.exists() else None


def tear(path: Path, at: int) -> None:
    """Cut the log of a file."""
    with open(f"{path}-redo", "r+b") as log:
        log.truncate(at)


async def recovered(path: Path) -> list[str]:
    await (await open_backend(f"sqlite:///{path}")).close()
    assert log_of(path) is None
    return dump(path)


async def live(gate: Gate) -> None:
    """Change rows of each kind, in a batch each."""
    offer = await gate.leased(payload={"n": "ü" * 50})
    await gate.as_worker().report_progress(**under(offer), progress={"done": 0.5})
    await gate.create(type="later", delay_seconds=60)
    await gate.as_worker().complete(**under(offer), result={"ok": True}, artifacts=["file:///out"])


async def test_what_is_made_again_is_what_would_have_been_committed(gate: Gate, path: Path, tmp_path: Path) -> None:
    await live(gate)
    assert backend_of(gate).redo.pending

    copy = copied(path, tmp_path / "copy")
    before = dump(copy)
    again = await recovered(copy)
    await backend_of(gate).tenants()        # a read settles the generation

    assert not backend_of(gate).redo.pending
    assert again == dump(path) != before


async def test_a_log_that_is_torn_at_any_byte_has_the_whole_batches_before_it(gate: Gate, path: Path) -> None:
    await live(gate)
    with closing(sqlite3.connect(path)) as db:
        mark = db.execute(redo.READ_MARK).fetchone()[0]
    whole = log_of(path) or b""
    key = bytes.fromhex(mark.partition(":")[0])
    bodies = list(redo.list_records(whole, key, 1))
    ends = [sum(redo.RECORD_HEAD.size + len(body) for body in bodies[:number]) for number in range(len(bodies) + 1)]

    whole = whole[:ends[-1]]

    assert len(bodies) >= 5
    for at in range(len(whole)):
        flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:]
        for torn in (whole[:at], whole[:at] + bytes(len(whole) - at), flipped):
            complete = sum(torn[:end] == whole[:end] for end in ends[1:])
            assert list(redo.list_records(torn, key, 1)) == bodies[:complete]
    assert redo.read_back(str(path), mark) == (0, backend_of(gate).redo.pending)


async def test_each_whole_batch_of_a_torn_log_comes_back(gate: Gate, path: Path, tmp_path: Path) -> None:
    made = [await gate.create() for _ in range(3)]
    log = backend_of(gate).redo
    bodies = list(redo.list_records(log_of(path) or b"", log.key, 1))

    for number in range(4):
        copy = copied(path, tmp_path / str(number))
        tear(copy, sum(redo.RECORD_HEAD.size + len(body) for body in bodies[:number]) + 20)
        backend = await open_backend(f"sqlite:///{copy}")
        stored = {task.task_id for task in (await Gate(Engine(backend), TENANT).everything())["Task"]}
        assert (await verify(backend)).problems == []
        await backend.close()

        assert stored == set(made[:number])


async def test_a_generation_that_was_committed_is_not_made_again(gate: Gate, path: Path, tmp_path: Path) -> None:
    await gate.create()
    await backend_of(gate).tenants()
    copy = copied(path, tmp_path / "copy")
    before = dump(copy)

    assert await recovered(copy) == before
    assert await recovered_beside_another_log(path, tmp_path) == before


async def recovered_beside_another_log(path: Path, tmp_path: Path) -> list[str]:
    """Recover a copy beside the log of another file."""
    other = await open_backend(f"sqlite:///{tmp_path}/other.db", serving=True)
    await Gate(Engine(other), TENANT).create()
    copy = copied(path, tmp_path / "beside")
    shutil.copy(f"{tmp_path}/other.db-redo", f"{copy}-redo")
    await other.close()
    return await recovered(copy)


async def test_a_kill_between_two_commits_loses_nothing_that_was_acknowledged(path: Path) -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED_IN_A_GENERATION, str(path), TENANT,
                                                 stdout=asyncio.subprocess.PIPE)
    said, _ = await asyncio.wait_for(child.communicate(), PATIENCE_SECONDS)
    assert child.returncode == -signal.SIGKILL

    backend = await open_backend(f"sqlite:///{path}")       # a tool, such as asyncgate verify
    stored = {task.task_id for task in (await Gate(Engine(backend), TENANT).everything())["Task"]}

    assert (await verify(backend)).problems == []
    await backend.close()
    assert stored == set(said.decode().split())
    assert len(stored) == 20
    assert log_of(path) is None


async def test_a_refused_batch_leaves_nothing_and_takes_nothing_along(gate: Gate, path: Path) -> None:
    """A refusal rolls back the transaction in which others were acknowledged."""
    neighbour = Gate(gate.engine, str(uuid.uuid4()))
    made = [await gate.create(), await neighbour.create()]
    backend = backend_of(gate)

    def trespass(work: Work) -> None:
        backend.db.execute("INSERT INTO lanes VALUES (?, 1, 'theirs', '[]')", (neighbour.tenant_id,))

    for _ in range(2):
        with pytest.raises(Refused):
            await backend.transact(TENANT, Needs(), trespass)
    made.append(await gate.create())

    stored = [task.task_id for one in (gate, neighbour) for task in (await one.everything())["Task"]]
    assert sorted(stored) == sorted(made)
    assert not any("theirs" in line for line in dump(path))
    assert (await verify(backend)).problems == []


async def test_a_fault_in_a_batch_leaves_nothing_acknowledged_outside_of_the_file(gate: Gate, path: Path) -> None:
    made = await gate.create()

    def fail(work: Work) -> None:
        raise RuntimeError("a bug")
    with pytest.raises(RuntimeError):
        await gate.backend.transact(TENANT, Needs(), fail)

    assert not backend_of(gate).redo.pending
    assert any(made in line for line in dump(path))


async def test_another_program_that_writes_between_a_rollback_and_its_repair_is_noticed(
        gate: Gate, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = backend_of(gate)
    await gate.create(idempotency_key="k")
    await backend._call_writer(backend._roll_back, inside=True)
    other = await open_backend(f"sqlite:///{path}")
    await Gate(Engine(other), TENANT).create(idempotency_key="k")
    await other.close()

    with pytest.raises(DatabaseUnavailable):
        await gate.create()

    assert "another program has changed" in caplog.text
    backend.opened.pop_all()        # a kill: nothing is closed in order
    backend.lock.release()
    with pytest.raises(StartupError, match="another program has changed"):
        await open_backend(f"sqlite:///{path}", serving=True)


async def test_a_transaction_that_changed_nothing_ends_by_itself(
        gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is open, no other program can write."""
    monkeypatch.setattr(sqlite, "GENERATION_SECONDS", 0.01)
    backend = backend_of(gate)

    await backend._on_writer("SELECT 1", (), inside=True)

    async with asyncio.timeout(PATIENCE_SECONDS):
        while backend.db.in_transaction:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_file_behind_a_symbolic_link_has_its_log_and_its_lock_beside_itself(path: Path, tmp_path: Path) -> None:
    """SQLite has its own log there, and whoever opens the file by its name looks there."""
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.db"
    link.symlink_to(path)
    backend = await open_backend(f"sqlite:///{link}", serving=True)
    made = await Gate(Engine(backend), TENANT).create()

    assert log_of(path)
    assert list(link.parent.iterdir()) == [link]
    with pytest.raises(NotNow):
        await open_backend(f"sqlite:///{path}", serving=True)
    await backend.close()
    assert await tasks_of(path) == {made}


async def test_batches_beside_a_refused_one_are_stored(gate: Gate) -> None:
    await gate.create()
    backend = backend_of(gate)

    def trespass(work: Work) -> None:
        backend.db.execute("INSERT INTO lanes VALUES ('another', 1, 'theirs', '[]')")
    outcomes = await asyncio.gather(*(gate.create() for _ in range(3)), backend.transact(TENANT, Needs(), trespass),
                                    *(Gate(gate.engine, str(uuid.uuid4())).create() for _ in range(3)),
                                    return_exceptions=True)

    assert [isinstance(one, Refused) for one in outcomes] == [False] * 3 + [True] + [False] * 3
    assert len((await gate.everything())["Task"]) == 4
    assert (await verify(backend)).problems == []


async def test_a_log_that_cannot_be_written_costs_nothing_but_time(
        gate: Gate, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: int) -> None:
        raise OSError(errno.EIO, "input/output error")
    first = await gate.create()
    with monkeypatch.context() as patch:
        patch.setattr(redo, "sync", broken)
        second = await gate.create()
        copy = copied(path, tmp_path / "copy")

    backend = await open_backend(f"sqlite:///{copy}")
    stored = {task.task_id for task in (await Gate(Engine(backend), TENANT).everything())["Task"]}
    await backend.close()
    assert stored == {first, second}
    third = await gate.create()
    assert {task.task_id for task in (await gate.everything())["Task"]} == {first, second, third}


async def test_a_record_of_which_the_disk_takes_only_a_part_does_not_count(
        gate: Gate, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full file system may write less than it was asked to, without an error."""
    write, made = os.pwrite, [await gate.create()]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:len(data) // 2], at))
        made.append(await gate.create())
    made.append(await gate.create())

    copy = copied(path, tmp_path / "copy")

    assert await tasks_of(copy) == set(made)


async def test_a_first_record_that_can_neither_be_synced_nor_taken_back_is_not_made_again(
        gate: Gate, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise OSError(errno.EIO, "input/output error")
    write, made = os.pwrite, [await gate.create()]
    await backend_of(gate).tenants()        # a read settles the generation
    with monkeypatch.context() as patch:
        patch.setattr(redo, "sync", broken)
        patch.setattr(os, "pwrite", lambda file, data, at: write(file, data, at) if any(data) else broken())
        made.append(await gate.create())
    copy = copied(path, tmp_path / "copy")

    assert await tasks_of(copy) == set(made)
    made.append(await gate.create())
    assert await tasks_of(copied(path, tmp_path / "later")) == set(made)


async def tasks_of(path: Path) -> set[str]:
    """Recover a database; return its tasks."""
    backend = await open_backend(f"sqlite:///{path}")
    try:
        assert (await verify(backend)).problems == []
        return {task.task_id for task in (await Gate(Engine(backend), TENANT).everything())["Task"]}
    finally:
        await backend.close()


async def test_what_could_not_be_stored_anywhere_does_not_come_back(
        gate: Gate, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await gate.create()
    backend = backend_of(gate)
    calls = []

    def broken_once(file: int) -> None:
        calls.append(file)
        if len(calls) == 1:
            raise OSError(errno.EIO, "input/output error")
    monkeypatch.setattr(redo, "sync", broken_once)
    monkeypatch.setattr(backend, "_settle", lambda: (_ for _ in ()).throw(sqlite3.OperationalError("disk I/O error")))
    with pytest.raises(DatabaseUnavailable):
        await gate.create()
    copy = copied(path, tmp_path / "copy")
    monkeypatch.undo()

    other = await open_backend(f"sqlite:///{copy}")
    assert [task.task_id for task in (await Gate(Engine(other), TENANT).everything())["Task"]] == [made]
    await other.close()
    later = await gate.create()
    assert {task.task_id for task in (await gate.everything())["Task"]} == {made, later}


async def test_a_large_batch_and_a_full_log_are_committed(gate: Gate, path: Path) -> None:
    await gate.create()
    assert backend_of(gate).redo.pending
    large = await gate.create(payload="x" * redo.LARGEST)
    assert not backend_of(gate).redo.pending
    for _ in range(3 * redo.SIZE // 50_000):
        await gate.create(payload="x" * 50_000)

    assert large in {task.task_id for task in (await gate.everything())["Task"]}
    assert len(log_of(path) or b"") == redo.SIZE


async def test_a_generation_ends_by_itself(path: Path) -> None:
    backend: Any = await open_backend(f"sqlite:///{path}", serving=True)
    await Gate(Engine(backend), TENANT).create()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while backend.redo.pending:  # noqa: ASYNC110  # a thread ends it
            await asyncio.sleep(0.01)

    assert any("INSERT INTO \"tasks\"" in line for line in dump(path))
    await backend.close()


async def test_the_log_is_private_and_is_emptied_and_removed(gate: Gate, path: Path) -> None:
    await gate.create(payload="a-secret-word")

    assert stat.S_IMODE(os.stat(f"{path}-redo").st_mode) == 0o600
    assert b"a-secret-word" in (log_of(path) or b"")
    await backend_of(gate).compact()        # an erasure ends with it
    assert log_of(path) == bytes(redo.SIZE)
    await gate.create()
    await backend_of(gate).close()
    assert log_of(path) is None


async def test_a_log_that_was_deleted_meanwhile_is_noticed(gate: Gate, path: Path) -> None:
    await gate.create()
    os.unlink(f"{path}-redo")

    with pytest.raises(DatabaseUnavailable):
        await gate.create()


async def test_while_a_generation_cannot_be_committed_nothing_more_is_acknowledged(gate: Gate) -> None:
    backend = backend_of(gate)
    made = [await gate.create()]
    backend.begun = -1e9        # it is overdue
    full = backend.db.execute("PRAGMA page_count").fetchone()[0]
    backend.db.execute(f"PRAGMA max_page_count = {full}")

    for _ in range(3):
        with pytest.raises(DatabaseUnavailable):
            await gate.create(payload="x" * 10_000)

    backend.db.execute("PRAGMA max_page_count = 1000000")
    made.append(await gate.create())
    assert sorted(task.task_id for task in (await gate.everything())["Task"]) == sorted(made)


async def test_a_file_that_litestream_replicates_has_no_log(gate: Gate, path: Path) -> None:
    """What SQLite has committed is all that Litestream sends, so everything acknowledged must be."""
    made = [await gate.create()]
    (path.parent / f".{path.name}-litestream").mkdir()
    await backend_of(gate).tenants()        # a read ends the generation

    assert log_of(path) is None
    made.append(await gate.create())
    assert all(any(task_id in line for line in dump(path)) for task_id in made)
    await backend_of(gate).close()
    again = await open_backend(f"sqlite:///{path}", serving=True)
    assert log_of(path) is None
    await again.close()


async def test_a_log_of_before_another_program_went_on_with_the_file_is_refused(
        gate: Gate, path: Path, tmp_path: Path) -> None:
    """An older release knows no log: after a kill it would go on without the changes that only the log has."""
    made = await gate.create()
    copy = copied(path, tmp_path / "copy")
    os.rename(f"{copy}-redo", tmp_path / "aside")
    older = await open_backend(f"sqlite:///{copy}")
    later = await Gate(Engine(older), TENANT).create()
    await older.close()
    os.rename(tmp_path / "aside", f"{copy}-redo")

    with pytest.raises(StartupError, match=r"another program has changed .*gate\.db-redo does not fit"):
        await open_backend(f"sqlite:///{copy}")

    os.unlink(f"{copy}-redo")
    again = await open_backend(f"sqlite:///{copy}")
    assert {task.task_id for task in (await Gate(Engine(again), TENANT).everything())["Task"]} == {later} != {made}
    await again.close()


async def test_what_another_program_wrote_before_a_generation_began_is_no_hindrance(
        gate: Gate, path: Path, tmp_path: Path) -> None:
    tool = await open_backend(f"sqlite:///{path}")
    made = [await Gate(Engine(tool), TENANT).create()]
    await tool.close()
    made.append(await gate.create())
    copy = copied(path, tmp_path / "copy")

    backend = await open_backend(f"sqlite:///{copy}")
    assert {task.task_id for task in (await Gate(Engine(backend), TENANT).everything())["Task"]} == set(made)
    await backend.close()


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
        made = await Gate(Engine(backend), TENANT).create()
        await backend_of(Gate(Engine(backend), TENANT)).backup(str(tmp_path / "copy.db"))
    finally:
        await backend.close()

    assert await tasks_of(tmp_path / "copy.db") == {made}
