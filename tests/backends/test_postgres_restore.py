"""A dump of Postgres is restored on another server: roles and privileges are there again, and the wall holds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.backends import open_backend
from asyncgate.backends.postgres import migrate_database
from asyncgate.backends.postgres.privileges import privileges
from asyncgate.conformance.harness import Gate
from asyncgate.conformance.plugin import MISSING
from asyncgate.conformance.postgres_server import Cluster, connected, find_programs
from asyncgate.conformance.verify import verify
from asyncgate.parts.model.errors import StartupError
from tests.backends.test_postgres_faults import opened

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def source() -> Iterator[Cluster]:
    """The server that is dumped."""
    if find_programs() is None:
        pytest.skip(MISSING)
    with Cluster() as running:
        if not (running.programs.bin / "pg_restore").exists():
            pytest.skip("this Postgres has no pg_restore")
        asyncio.run(running.migrated_database("gate"))
        yield running


@pytest.fixture
def fresh() -> Iterator[Cluster]:
    """A server that has never seen a gate."""
    with Cluster() as running:
        yield running


def run(server: Cluster, program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program of Postgres as this user."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return subprocess.run([server.programs.bin / program, *arguments], env=clean, text=True, capture_output=True,
                          check=False)


@pytest.fixture(scope="module")
def worked(source: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """A dump, and all that was in the database."""
    everything = asyncio.run(work(source))
    dump = tmp_path_factory.mktemp("dumps") / "gate.dump"
    assert run(source, "pg_dump", "--format=custom", "--file", dump, source.admin_url("gate")).returncode == 0
    return dump, everything


async def work(source: Cluster) -> dict[str, list[Any]]:
    """Do some work; return all that is stored then."""
    async with opened(source.url("gate")) as gate:
        offer = await gate.leased()
        await gate.as_worker().report_progress(task_id=offer.task_id, lease_id=offer.lease_id, progress={"half": True})
        await gate.create()
        return await gate.everything()


async def restore(server: Cluster, dump: Path, name: str = "gate") -> str:
    """Make a database of a dump; return what pg_restore has to say."""
    await server.create_database(name)
    return run(server, "pg_restore", "--dbname", server.admin_url(name), dump).stderr


async def test_a_dump_restored_on_a_fresh_server_is_whole_after_migrate(
        source: Cluster, fresh: Cluster, worked: tuple[Path, dict[str, list[Any]]]) -> None:
    dump, before = worked

    complaints = await restore(fresh, dump)
    made = await migrate_database(fresh.admin_url("gate"))

    assert 'role "asyncgate_app" does not exist' in complaints
    assert any(statement.startswith("DROP POLICY IF EXISTS tenant") for statement in made)
    assert await everything_granted(fresh) == await everything_granted(source)
    assert await migrate_database(fresh.admin_url("gate")) == []
    async with opened(fresh.url("gate")) as gate:       # as asyncgate_app, behind the wall
        assert await gate.everything() == before
        assert (await verify(gate.backend)).problems == []
        assert (await Gate(gate.engine, str(uuid.uuid4())).as_agent().list_tasks()).tasks == []
        await gate.create()


async def test_a_dump_restored_where_the_roles_are_needs_nothing_more(
        fresh: Cluster, worked: tuple[Path, dict[str, list[Any]]]) -> None:
    """The recipe: migrate an empty database first, which makes the roles of the server."""
    dump, before = worked
    await fresh.migrated_database("any")

    assert await restore(fresh, dump) == ""
    assert await migrate_database(fresh.admin_url("gate")) == []
    async with opened(fresh.url("gate")) as gate:
        assert await gate.everything() == before


async def test_a_restored_database_that_does_not_remember_its_privileges_is_refused_with_the_way_out(
        fresh: Cluster, worked: tuple[Path, dict[str, list[Any]]]) -> None:
    """Its dump was made by an older release; nobody may think that the wall holds."""
    dump, before = worked
    await restore(fresh, dump)
    async with connected(fresh.admin_url("gate")) as db:
        await db.execute("UPDATE asyncgate.migrations SET privileges = NULL")

    with pytest.raises(StartupError, match="restore the dump again, into an empty database"):
        await migrate_database(fresh.admin_url("gate"))

    assert await restore(fresh, dump, "again") == ""
    async with opened(fresh.url("again")) as gate:
        assert await gate.everything() == before


async def test_a_server_does_not_start_on_a_database_whose_roles_are_missing(
        fresh: Cluster, worked: tuple[Path, dict[str, list[Any]]]) -> None:
    await restore(fresh, worked[0])

    with pytest.raises(StartupError, match="`asyncgate migrate` creates the role asyncgate_app"):
        await open_backend(fresh.url("gate"))


async def test_a_privilege_that_somebody_took_away_is_made_again(source: Cluster) -> None:
    await source.create_database("robbed", "gate")
    async with connected(source.admin_url("robbed")) as db:
        await db.execute("REVOKE UPDATE ON asyncgate.states FROM asyncgate_app")

    made = await migrate_database(source.admin_url("robbed"))

    assert made == ["GRANT UPDATE ON TABLE asyncgate.states TO asyncgate_app"]
    assert await everything_granted(source, "robbed") == await everything_granted(source)


async def everything_granted(server: Cluster, name: str = "gate") -> list[str]:
    async with connected(server.admin_url(name)) as db:
        return await privileges(db)
