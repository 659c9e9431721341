"""What can go wrong with the SQLite file is a 503 or one clear line at the start, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.conformance.harness import Gate, under
from asyncgate.conformance.load import KEY, SERVE, TENANT, Client, GateServer, Load, serving
from asyncgate.conformance.verify import verify
from asyncgate.parts.model.errors import DatabaseUnavailable
from asyncgate.parts.model.settings import Settings
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
SMALL_FILES = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, 2**21))"
KILLED_BEFORE_ITS_COMMIT = """
import asyncio, os, signal, sys
from asyncgate import Engine, Settings
from asyncgate.backends import open_backend
from asyncgate.conformance.harness import Gate

async def main():
    backend = await open_backend("sqlite:///" + sys.argv[1], serving=True)
    gate = Gate(Engine(backend, Settings()), sys.argv[2])
    print(await gate.create(), flush=True)
    backend._require_same_file = lambda: os.kill(os.getpid(), signal.SIGKILL)     # all is written, nothing is committed
    await asyncio.gather(*(gate.create() for _ in range(20)))

asyncio.run(main())
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gate.db"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture
async def gate(url: str) -> AsyncIterator[Gate]:
    backend = await open_backend(url)
    yield Gate(Engine(backend, Settings()), TENANT)
    await backend.close()


@contextlib.asynccontextmanager
async def agent_of(server: GateServer) -> AsyncIterator[Client]:
    async with aclosing(Client(server, "ada")) as client:
        yield client


async def stored_tasks(url: str) -> set[str]:
    """The ids of all stored tasks; the file must verify."""
    backend = await open_backend(url)
    try:
        assert (await verify(backend)).problems == []
        return {task.task_id for task in (await Gate(Engine(backend), TENANT).everything())["Task"]}
    finally:
        await backend.close()


async def filled(client: Client, most: int = 5000) -> list[str]:
    """Create tasks until the gate cannot take any more; return those that it acknowledged."""
    made = []
    for _ in range(most):
        call = await client.ask("create_task", type="demo", payload="x" * 10_000)
        if call.reply is None:
            break
        made.append(call.reply["task_id"])
    return made


def refused_start(url: str) -> str:
    """Try to serve; return the one line that says why not."""
    done = subprocess.run([sys.executable, "-c", SERVE, "serve", "--port", "0", "--database", url], check=False,
                          text=True, capture_output=True, timeout=PATIENCE_SECONDS,
                          env={**os.environ, "ASYNCGATE_API_KEY": KEY})
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert done.returncode not in (0, None)
    assert done.returncode > 0, "it was killed"
    assert len(lines) == 1, done.stderr
    return lines[0]


# At the start.


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    line = refused_start(f"sqlite:///{tmp_path}")

    assert str(tmp_path) in line


def test_a_file_in_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    line = refused_start(f"sqlite:///{tmp_path}/missing/gate.db")

    assert f"{tmp_path}/missing/gate.db" in line
    assert not (tmp_path / "missing").exists()


def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path, url: str) -> None:
    path.write_text("Dear diary, " * 100)
    path.chmod(0o600)

    line = refused_start(url)

    assert "not a database" in line
    assert path.read_text() == "Dear diary, " * 100


async def test_a_database_of_a_newer_release_is_refused_and_left_alone(path: Path, url: str, gate: Gate) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE meta SET value = '99' WHERE name = 'schema_version'")
        db.commit()

    line = refused_start(url)

    assert "99" in line
    assert "newer" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_database_that_may_only_be_read_is_refused(url: str, path: Path, gate: Gate) -> None:
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        name.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        line = refused_start(url)
    finally:
        path.parent.chmod(0o700)

    assert str(path) in line


async def test_a_second_server_on_the_same_file_is_refused_and_the_first_goes_on(url: str) -> None:
    async with serving(url) as server, agent_of(server) as ada:
        line = await asyncio.to_thread(refused_start, url)

        assert "another asyncgate" in line
        assert (await ada.ask("create_task", type="demo", payload=None)).reply is not None


async def test_a_server_that_was_killed_leaves_no_lock_behind(url: str) -> None:
    async with serving(url) as server:
        await server.stop(signal.SIGKILL)
        await server.start()

        assert await server.stop(signal.SIGTERM) == 0


# While it serves.


async def test_a_full_disk_is_a_503_loses_nothing_and_is_over_when_there_is_room(url: str) -> None:
    async with serving(url, first=SMALL_FILES) as server, agent_of(server) as ada:
        made = await filled(ada)
        refused = await ada.ask("create_task", type="demo", payload="x" * 10_000)

        assert refused.error == "database_unavailable"
        assert "retry-after:" in ada.head
        assert (await ada.ask("get_task", task_id=made[-1])).reply is not None
        assert await server.stop(signal.SIGTERM) == 0
    assert set(made) <= await stored_tasks(url)

    async with serving(url) as server, agent_of(server) as ada:
        assert (await ada.ask("create_task", type="demo", payload=None)).reply is not None


async def unavailable(gate: Gate) -> bool:
    try:
        await gate.create(payload="x" * 10_000)
    except DatabaseUnavailable:
        return True
    return False


async def test_a_full_database_takes_writes_again_without_a_restart(gate: Gate) -> None:
    offer = await gate.leased()
    writer: sqlite3.Connection = gate.backend.db  # type: ignore[attr-defined]  # of this backend
    limit = writer.execute("PRAGMA page_count").fetchone()[0]
    writer.execute(f"PRAGMA max_page_count = {limit + 2}")

    full = [await unavailable(gate) for _ in range(5)]
    before = await gate.everything()
    writer.execute("PRAGMA max_page_count = 1000000")
    await gate.as_worker().complete(**under(offer), result={"n": 1}, artifacts=[{"uri": "file:///out"}])

    assert full[-1]
    assert len((await gate.everything())["Task"]) == len(before["Task"]) == 1 + full.count(False)
    assert (await verify(gate.backend)).problems == []


@pytest.fixture(params=["deleted", "replaced"])
def missing(request: pytest.FixtureRequest, path: Path) -> contextlib.AbstractContextManager[None]:
    """A way to take the file away under a server, with what belongs to it, and to bring it back."""
    @contextlib.contextmanager
    def taken_away() -> Iterator[None]:
        files = [file for file in path.parent.glob("gate.db*") if file.suffix != ".lock"]
        for file in files:
            file.rename(file.with_name(f"aside-{file.name}"))
        if request.param == "replaced":
            with contextlib.closing(sqlite3.connect(path)) as other:
                other.execute("CREATE TABLE tasks (another TEXT)")
                other.commit()
        yield
        for file in files:
            file.with_name(f"aside-{file.name}").replace(file)
    return taken_away()


async def test_without_its_file_the_gate_acknowledges_nothing_and_with_it_again_everything_is_there(
        url: str, missing: contextlib.AbstractContextManager[None]) -> None:
    async with serving(url) as server, agent_of(server) as ada:
        before = (await ada.ask("create_task", type="demo", payload=None)).reply
        with missing:
            refused = await ada.ask("create_task", type="demo", payload=None)
            assert refused.error == "database_unavailable"
            assert "retry-after:" in ada.head
            sick = await ada.http("GET", "/v1/health", {})
            assert (sick[0], sick[1]["status"], sick[1]["database"]) == (503, "unhealthy", "unavailable")
            assert "retry-after:" in ada.head
        after = (await ada.ask("create_task", type="demo", payload=None)).reply
        assert (await ada.http("GET", "/v1/health", {}))[0] == 200
        assert await server.stop(signal.SIGTERM) == 0

    assert before is not None
    assert after is not None
    assert await stored_tasks(url) == {before["task_id"], after["task_id"]}


async def test_no_client_hears_of_a_lock_that_another_program_holds_for_two_seconds(path: Path, url: str) -> None:
    async with serving(url) as server, agent_of(server) as ada, agent_of(server) as bob:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as tool:
            tool.execute("BEGIN IMMEDIATE")
            write = asyncio.create_task(ada.ask("create_task", type="demo", payload=None))
            until = asyncio.get_running_loop().time() + 2.0
            while asyncio.get_running_loop().time() < until:    # who reads does not even wait
                assert (await bob.http("GET", "/v1/health", {}))[0] == 200
            assert not write.done()
            tool.execute("COMMIT")

        assert (await write).reply is not None
        assert "locked" not in "\n".join(server.lines)


async def test_a_lock_that_another_program_keeps_is_a_503_for_all_who_write_and_costs_no_lease(
        path: Path, url: str) -> None:
    patient: dict[str, Any] = {
        "database.timeout_seconds": 1, "restart_grace_seconds": 60, "lease_sweep_interval_seconds": 0.2}
    async with (serving(url, **patient) as server, agent_of(server) as ada, agent_of(server) as bob,
                aclosing(Client(server, "w1")) as worker):
        await ada.ask("create_task", type="demo", payload=None)
        claim = await worker.ask("lease_next", lease_ttl_seconds=3)
        assert claim.reply is not None
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as tool:
            tool.execute("BEGIN IMMEDIATE")
            async with asyncio.timeout(PATIENCE_SECONDS):
                for _ in range(20):         # behind the first, which waits in vain, nobody waits as long
                    refused = await ada.ask("create_task", type="demo", payload=None)
                    assert refused.error == "database_unavailable"
                    assert ada.answer["message"].startswith("another program holds the write lock")
                    assert "outcome" not in ada.answer
                while (await bob.http("GET", "/v1/ready", {}))[0] == 200:
                    pass
            assert (await bob.http("GET", "/v1/health", {}))[0] == 503
            tool.execute("COMMIT")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await bob.http("GET", "/v1/ready", {}))[0] != 200:
                pass
        named = {name: claim.reply["tasks"][0][name] for name in ("task_id", "lease_id")}
        done = await worker.ask("complete", **named, artifacts=[{"uri": "file:///out"}])

    assert done.error is None
    assert [line for line in server.lines if "Traceback" in line] == []


async def test_a_tool_verifies_the_file_of_a_loaded_server(url: str) -> None:
    async with serving(url, lease_sweep_interval_seconds=0.2) as server, aclosing(Load(server, 7)) as load:
        async with load.running():
            verdicts = []
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(load.calls) < 1500:
                    tool = await open_backend(url)
                    verdicts.append(await verify(tool))
                    await tool.close()
        assert await server.stop(signal.SIGTERM) == 0

    assert [verdict.problems for verdict in verdicts] == [[]] * len(verdicts)
    assert [call.error for call in load.calls if call.unknown] == []
    assert await stored_tasks(url) >= set(load.made)


async def test_a_writer_killed_between_its_writes_and_its_commit_leaves_nothing_of_them(path: Path, url: str) -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED_BEFORE_ITS_COMMIT, str(path), TENANT,
                                                 stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(child.communicate(), PATIENCE_SECONDS)

    assert child.returncode == -signal.SIGKILL
    assert await stored_tasks(url) == {output.decode().strip()}


async def test_each_file_has_a_name_of_its_own_and_keeps_it(tmp_path: Path) -> None:
    first, again, other = [await named(tmp_path / name) for name in ("a.db", "a.db", "b.db")]

    assert first == again != other
    assert first.startswith("asyncgate-")


async def named(path: Path) -> str:
    backend = await open_backend(f"sqlite:///{path}")
    await backend.close()
    return backend.instance
