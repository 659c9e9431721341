"""What the doctor finds in a real Postgres: roles, grants, schema, durability, connections, clock, gates that died."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.conformance.harness import Gate
from asyncgate.conformance.postgres_server import Cluster, connected
from asyncgate.extras.doctor import examine
from asyncgate.extras.doctor.database import check_database
from asyncgate.extras.doctor.installation import Installation
from asyncgate.parts.model.database import LastingBackend
from asyncgate.parts.model.findings import Finding
from asyncgate.parts.model.settings import ArchiveSettings, DatabaseSettings, Settings

pytestmark = pytest.mark.anyio

TENANT = "00000000-0000-4000-8000-000000000001"
numbers = count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A server that keeps what it has acknowledged: a hasty one would be a finding itself."""
    with Cluster(durable=True) as running:
        yield running


@pytest.fixture
async def name(cluster: Cluster) -> str:
    """Name a database that is migrated and empty."""
    await cluster.migrated_database(name := f"examined_{next(numbers)}")
    return name


def settings_of(url: str, **database: Any) -> Settings:
    return Settings(api_key="correct-horse-battery-staple-42", database=DatabaseSettings(url=url, **database))


async def findings(settings: Settings, clock: Callable[[], float] = time.time) -> list[Finding]:
    return await examine(Installation(settings, clock=clock), {"database": check_database})


async def only(settings: Settings, seen: str, **more: Any) -> Finding:
    """Return the one finding that is not ok; there is no other."""
    faults = [finding for finding in await findings(settings, **more) if finding.severity != "ok"]
    assert len(faults) == 1, faults
    assert seen in faults[0].seen
    return faults[0]


async def run(cluster: Cluster, name: str, *statements: str) -> None:
    """Change a database as the superuser."""
    async with connected(cluster.admin_url(name)) as db:
        for statement in statements:
            await db.execute(statement)


async def contents(cluster: Cluster, name: str) -> list[Any]:
    """What a database holds, and what was ever written in it."""
    async with connected(cluster.admin_url(name)) as db:
        return [tuple(row) for row in await db.fetch(
            "SELECT relname, n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_user_tables ORDER BY relname")]


async def test_a_healthy_database_has_no_finding_and_is_not_changed(cluster: Cluster, name: str) -> None:
    before = await contents(cluster, name)

    reported = await findings(settings_of(cluster.url(name)))

    assert [finding for finding in reported if finding.severity != "ok"] == []
    assert len(reported) >= 8
    assert await contents(cluster, name) == before


@pytest.mark.parametrize(("make", "why"), [
    ("SUPERUSER", "is a superuser"), ("BYPASSRLS IN ROLE asyncgate_app", "may bypass row-level security"),
    ("IN ROLE asyncgate_owner, asyncgate_app", "owns the tables"),
    ("IN ROLE asyncgate_sweeper, asyncgate_app", "sees all tenants' work")])
async def test_a_role_that_is_too_strong_is_found(cluster: Cluster, name: str, make: str, why: str) -> None:
    await run(cluster, name, f"CREATE ROLE strong_{name} LOGIN {make}")

    finding = await only(settings_of(cluster.url(name, f"strong_{name}")), why)
    trusted = await only(settings_of(cluster.url(name, f"strong_{name}"), trusted_role=True), why)

    assert (finding.severity, trusted.severity) == ("error", "warning")
    assert finding.cure.startswith("connect as asyncgate_app")


async def test_a_missing_grant_is_found_and_the_cure_cures_it(cluster: Cluster, name: str) -> None:
    from asyncgate.backends.postgres import migrate_database
    await run(cluster, name, "REVOKE SELECT ON asyncgate.states FROM asyncgate_app")

    finding = await only(settings_of(cluster.url(name)), "GRANT SELECT ON TABLE asyncgate.states TO asyncgate_app")
    assert (finding.severity, "asyncgate migrate" in finding.cure) == ("error", True)

    await migrate_database(cluster.admin_url(name))
    assert [finding for finding in await findings(settings_of(cluster.url(name))) if finding.severity != "ok"] == []


async def test_a_wall_that_was_taken_down_is_found(cluster: Cluster, name: str) -> None:
    await run(cluster, name, "ALTER TABLE asyncgate.receipts DISABLE ROW LEVEL SECURITY")

    finding = await only(settings_of(cluster.url(name)), "ALTER TABLE asyncgate.receipts ENABLE ROW LEVEL SECURITY")

    assert (finding.severity, "asyncgate migrate" in finding.cure) == ("error", True)


async def test_a_database_that_is_not_migrated_is_found(cluster: Cluster) -> None:
    await cluster.create_database(name := f"examined_{next(numbers)}")
    await cluster.migrated_database(f"examined_{next(numbers)}")     # which makes the roles

    finding = await only(settings_of(cluster.url(name)), "has no schema of the gate yet")

    assert (finding.severity, "asyncgate migrate" in finding.cure) == ("error", True)


@pytest.mark.parametrize(("change", "severity", "seen", "cure"), [
    ("UPDATE asyncgate.migrations SET number = 0", "error", "this release needs", "asyncgate migrate"),
    ("UPDATE asyncgate.migrations SET number = 99, code = 99", "error", "has left this release behind",
     "run the newer release"),
    ("UPDATE asyncgate.migrations SET number = 99", "note", "of a newer release", "upgrade this gate"),
    ("UPDATE asyncgate.meta SET value = 'f00' WHERE name = 'first_migration'", "error", "another first migration",
     "asyncgate receipts export")])
async def test_a_schema_of_another_release_is_found(
        cluster: Cluster, name: str, change: str, severity: str, seen: str, cure: str) -> None:
    await run(cluster, name, change)

    finding = await only(settings_of(cluster.url(name)), seen)

    assert (finding.severity, cure in finding.cure) == (severity, True)


async def test_commits_that_do_not_wait_for_the_disk_are_found(cluster: Cluster, name: str) -> None:
    await run(cluster, name, f"ALTER DATABASE {name} SET synchronous_commit = off")

    finding = await only(settings_of(cluster.url(name)), "synchronous_commit is off")

    assert (finding.severity, "ALTER SYSTEM SET synchronous_commit = on" in finding.cure) == ("error", True)


async def test_a_server_that_never_waits_for_the_disk_is_found() -> None:
    with Cluster() as hasty:        # as the suite uses it
        url = await hasty.migrated_database("hasty")

        faults = {finding.seen.split()[0]: finding for finding in await findings(settings_of(url))
                 if finding.severity != "ok"}

    assert {*faults} == {"fsync", "full_page_writes"}
    assert faults["fsync"].severity == "error"
    assert "ALTER SYSTEM SET fsync = on" in faults["fsync"].cure


async def test_a_pool_that_is_larger_than_the_server_allows_is_found(cluster: Cluster, name: str) -> None:
    finding = await only(settings_of(cluster.url(name), pool_size=1000), "database.pool_size is 1000")

    assert (finding.severity, finding.cure) == (
        "warning", "lower database.pool_size, or raise max_connections in Postgres")


@pytest.mark.parametrize(("off", "severity"), [(10, "warning"), (-10, "warning"), (-3600, "error")])
async def test_a_clock_that_is_off_is_found(cluster: Cluster, name: str, off: float, severity: str) -> None:
    finding = await only(settings_of(cluster.url(name)), "the clock of the database is",
                         clock=lambda: time.time() + off)

    assert (finding.severity, "timedatectl set-ntp true" in finding.cure) == (severity, True)
    assert f"{abs(off)}." in finding.seen
    assert ("behind" if off > 0 else "ahead of") in finding.seen


async def test_a_server_that_is_away_is_found(cluster: Cluster) -> None:
    finding = await only(settings_of("postgresql://asyncgate_app@127.0.0.1:9/gate"), "cannot reach the database")

    assert (finding.severity, "start Postgres" in finding.cure) == ("error", True)


async def test_a_database_that_is_not_there_is_found(cluster: Cluster) -> None:
    finding = await only(settings_of(cluster.url("nowhere")), "'nowhere'")

    assert (finding.severity, "database.url" in finding.cure) == ("error", True)


async def test_a_gate_without_a_way_in_is_found(cluster: Cluster, name: str) -> None:
    finding = await only(replace(settings_of(cluster.url(name)), api_key=""), "nobody can enter")

    assert (finding.severity, "asyncgate keys issue" in finding.cure) == ("error", True)


async def test_an_archivist_who_cannot_log_in_is_found(cluster: Cluster, name: str) -> None:
    settings = settings_of(cluster.url(name), archive_url=cluster.url(name, "nobody_knows_this_role"))
    archiving = replace(settings, archive=ArchiveSettings(enabled=True, directory="archive"))

    finding = await only(archiving, "the role asyncgate_archivist cannot log in")

    assert (finding.severity, "database.archive_url" in finding.cure) == ("error", True)


@pytest.fixture
async def leased(cluster: Cluster, name: str) -> AsyncIterator[Callable[..., Awaitable[Settings]]]:
    """Return what lets a gate lease a task and lets an hour pass in the database; the gate lives on if it `stays`."""
    async with contextlib.AsyncExitStack() as opened:
        async def lease(stays: bool = True) -> Settings:
            backend = await open_backend(cluster.url(name))
            opened.push_async_callback(backend.close)
            assert isinstance(backend, LastingBackend)
            gate = Gate(Engine(backend), TENANT)
            await backend.join(gate.engine.instance, 10.0, lambda news: None)
            await backend.beat()
            await gate.leased()
            await run(cluster, name, "UPDATE asyncgate.states SET expires_at = expires_at - 3600, "
                                     "check_at = check_at - 3600 WHERE status = 'leased'")
            if not stays:
                await opened.aclose()
            return settings_of(cluster.url(name))
        yield lease


async def test_a_sweep_that_is_stuck_is_found(leased: Callable[..., Awaitable[Settings]]) -> None:
    finding = await only(await leased(), "its sweep is stuck")

    assert (finding.severity, "restart the gate" in finding.cure) == ("error", True)


async def test_a_gate_that_died_and_whose_tasks_nobody_adopts_is_found(
        cluster: Cluster, name: str, leased: Callable[..., Awaitable[Settings]]) -> None:
    settings = await leased()
    beside = await open_backend(cluster.url(name))
    assert isinstance(beside, LastingBackend)
    try:
        await beside.join("beside", 10.0, lambda news: None)
        await beside.beat()
        await run(cluster, name, "UPDATE asyncgate.states SET asyncgate_instance = 'dead'",
                  "INSERT INTO asyncgate.instances (instance_id, beat_at, beat_seconds) "
                  "VALUES ('dead', now() - interval '1 hour', 10)")

        faults = [finding for finding in await findings(settings) if finding.severity != "ok"]
    finally:
        await beside.close()

    assert [finding.severity for finding in faults] == ["note", "error"]
    assert "the gate dead gave its last sign 1 h ago" in faults[0].seen
    assert "of the gate dead, which is gone and whose tasks nobody adopts" in faults[1].seen
    assert "restart the gate" in faults[1].cure


async def test_leases_that_ran_out_while_nobody_served_are_a_note(
        leased: Callable[..., Awaitable[Settings]]) -> None:
    finding = await only(await leased(stays=False), "and no gate serves")

    assert (finding.severity, "asyncgate serve" in finding.cure) == ("note", True)
