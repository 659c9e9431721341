"""The schema on Postgres: made by whom it may be made, once, whole, and so that the servers of today go on with it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.backends.lineage import FIRST, SAME_TABLES, digest
from asyncgate.backends.postgres import migrate_database, migration_sql
from asyncgate.backends.postgres.migrations import FOLDER, SCHEMA_VERSION, migrations
from asyncgate.backends.sqlite import first_digest
from asyncgate.conformance.harness import Gate, under
from asyncgate.conformance.postgres_server import Cluster, connected
from asyncgate.parts.model.cards import CARDS
from asyncgate.parts.model.errors import StartupError

pytestmark = pytest.mark.anyio

FILES = sorted(file.name for file in FOLDER.glob("*.sql"))
NEXT = SCHEMA_VERSION + 1
EXPAND = """
ALTER TABLE asyncgate.tasks ADD COLUMN colour text;
ALTER TABLE asyncgate.states ADD COLUMN mood text;
ALTER TABLE asyncgate.receipts ADD COLUMN seal text;
CREATE INDEX tasks_colour ON asyncgate.tasks (tenant_id, colour) WHERE colour IS NOT NULL;
CREATE TABLE asyncgate.colours (tenant_id uuid NOT NULL, colour asyncgate.id NOT NULL, PRIMARY KEY (tenant_id, colour));
GRANT SELECT ON asyncgate.colours TO asyncgate_app;
"""
# All that makes a schema, but for what is only found out by its use.
SHAPE = {
    "tables": """
        SELECT relname, relkind, relrowsecurity, relforcerowsecurity, reloptions, pg_get_userbyid(relowner),
            ARRAY(SELECT acl::text FROM unnest(relacl) AS acl ORDER BY 1)
        FROM pg_class WHERE relnamespace = 'asyncgate'::regnamespace""",
    "columns": """
        SELECT attrelid::regclass::text, attname, format_type(atttypid, atttypmod), attnotnull,
            attcollation::regcollation, attacl::text[], pg_get_expr(adbin, adrelid)
        FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
            LEFT JOIN pg_attrdef ON (adrelid, adnum) = (attrelid, attnum)
        WHERE relnamespace = 'asyncgate'::regnamespace AND relkind = 'r' AND attnum > 0 AND NOT attisdropped""",
    "indexes": "SELECT indexdef FROM pg_indexes WHERE schemaname = 'asyncgate'",
    "constraints": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE connamespace = 'asyncgate'::regnamespace""",
    "policies": "SELECT tablename, policyname, roles, cmd, qual, with_check FROM pg_policies",
    "functions": """
        SELECT pg_get_functiondef(oid), pg_get_userbyid(proowner),
            ARRAY(SELECT acl::text FROM unnest(proacl) AS acl ORDER BY 1)
        FROM pg_proc WHERE pronamespace = 'asyncgate'::regnamespace""",
    "types": """
        SELECT typname, typtype, typbasetype::regtype FROM pg_type WHERE typnamespace = 'asyncgate'::regnamespace""",
    "schema": """
        SELECT pg_get_userbyid(nspowner), ARRAY(SELECT acl::text FROM unnest(nspacl) AS acl ORDER BY 1)
        FROM pg_namespace WHERE nspname = 'asyncgate'""",
    "migrations": "SELECT number, name, code FROM asyncgate.migrations",
    "names": "SELECT name FROM asyncgate.meta",
}


async def shape(url: str) -> dict[str, list[str]]:
    """Return all that makes the schema of a database."""
    async with connected(url) as db:
        return {name: sorted(str(tuple(row)) for row in await db.fetch(query)) for name, query in SHAPE.items()}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A server where somebody who is not a superuser has made the first database of a gate, and with it the roles."""
    async def settle(running: Cluster) -> None:
        async with connected(running.admin_url()) as db:
            await db.execute("CREATE ROLE plain LOGIN CREATEROLE")
            await db.execute("CREATE DATABASE plain OWNER plain")
        assert await migrate_database(running.url("plain", "plain")) == FILES

    with Cluster() as running:
        asyncio.run(settle(running))
        yield running


@pytest.fixture
async def database(cluster: Cluster) -> str:
    """The name of an empty database."""
    name = f"d_{uuid.uuid4().hex}"
    await cluster.create_database(name)
    return name


@pytest.fixture
async def admin(cluster: Cluster, database: str) -> str:
    """An empty database, as a superuser gets in."""
    return cluster.admin_url(database)


@pytest.fixture
async def migrated(cluster: Cluster, database: str, admin: str) -> str:
    """The same database, migrated, as the gate gets in."""
    assert await migrate_database(admin) == FILES
    return cluster.url(database)


def folder_with(path: Path, **files: str) -> Path:
    """Return a folder with all migrations there are, and further ones, which follow by number."""
    shutil.copytree(FOLDER, path, dirs_exist_ok=True)
    for number, (name, text) in enumerate(files.items(), NEXT):
        (path / f"{number:04}_{name}.sql").write_text(text)
    return path


@contextlib.asynccontextmanager
async def backend_of(url: str) -> AsyncIterator[Any]:
    """Open a database for the time of a block."""
    backend: Any = await open_backend(url)
    try:
        yield backend
    finally:
        await backend.close()


async def work_on(backend: Any) -> None:
    """Let a gate do its work, from creating a task to finding nothing owed."""
    gate = Gate(Engine(backend), str(uuid.uuid4()))
    first, second = await gate.leased(idempotency_key="key"), await gate.leased()
    await gate.as_worker().renew_lease(lease_id=first.lease_id)
    await gate.as_worker().report_progress(**under(first), progress={"half": True})
    assert (await gate.as_agent().create_task(type="demo", payload=None,
                                              idempotency_key="key")).task_id == first.task_id
    await gate.as_worker().complete(**under(first), artifacts=[{"uri": "file:///out"}])
    assert [owed.receipt_id for owed in await gate.owed()] == [second.obligation_receipt_id]
    await gate.as_worker().fail(**under(second), error="no", retryable=True)
    await gate.lose(await gate.leased())
    await gate.as_agent().ack_receipt(receipt_id=first.obligation_receipt_id)
    await gate.as_agent().bootstrap()
    assert len((await gate.as_agent().list_tasks()).tasks) == 3
    assert [receipt.receipt_type for receipt in await gate.receipts(first.task_id)] == [
        "task.assigned", "task.accepted", "task.completed", "task.result_ready", "receipt.acknowledged"]
    assert (await gate.task(first.task_id)).status == "succeeded"


# Who may migrate, and how often.


async def test_a_plain_role_that_owns_the_database_makes_the_same_schema_as_a_superuser(
        cluster: Cluster, migrated: str, admin: str) -> None:
    assert await shape(cluster.admin_url("plain")) == await shape(admin)

    for url in (migrated, cluster.url("plain")):
        async with backend_of(url) as backend:
            await work_on(backend)


async def test_somebody_who_may_not_is_told_so_in_one_line_and_leaves_nothing(cluster: Cluster, database: str) -> None:
    with pytest.raises(StartupError, match=r"^0001_\w+.sql cannot be applied, nothing of it was kept: .*$") as refused:
        await migrate_database(cluster.url(database, "plain"))

    assert "\n" not in str(refused.value)
    async with connected(cluster.admin_url(database)) as db:
        assert await db.fetchval("SELECT to_regnamespace('asyncgate')") is None


async def test_to_migrate_again_does_nothing(migrated: str, admin: str) -> None:
    before = await shape(admin)

    assert await migrate_database(admin) == []
    assert await shape(admin) == before
    async with connected(admin) as db:
        await db.execute("REVOKE DELETE ON asyncgate.schedules FROM asyncgate_app")
    assert await shape(admin) != before


async def test_of_several_who_migrate_at_once_one_applies_a_file(admin: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, more="-- code: 1\nCREATE TABLE asyncgate.more ();\nSELECT pg_sleep(0.2);")

    applied = await asyncio.gather(*(migrate_database(admin, folder) for _ in range(3)))

    assert sorted(name for names in applied for name in names) == [*FILES, f"{NEXT:04}_more.sql"]
    async with connected(admin) as db:
        assert await db.fetchval("SELECT count(*) FROM asyncgate.migrations") == NEXT


async def test_several_databases_of_a_new_server_are_migrated_at_once() -> None:
    with Cluster() as fresh:
        for name in "abc":
            await fresh.create_database(name)

        applied = await asyncio.gather(*(migrate_database(fresh.admin_url(name)) for name in "abc"))

    assert applied == [FILES] * 3


# A file that cannot be applied.


async def test_a_file_that_fails_leaves_nothing_and_is_named(migrated: str, admin: str, tmp_path: Path) -> None:
    before = await shape(admin)
    folder = folder_with(tmp_path, halts="-- code: 1\nCREATE TABLE asyncgate.half ();\nSELECT 1 / 0;")

    with pytest.raises(StartupError) as refused:
        await migrate_database(admin, folder)

    assert str(refused.value) == f"{NEXT:04}_halts.sql cannot be applied, nothing of it was kept: division by zero"
    assert await shape(admin) == before
    folder_with(tmp_path, halts="-- code: 1\nCREATE TABLE asyncgate.whole ();")
    assert await migrate_database(admin, folder) == [f"{NEXT:04}_halts.sql"]


async def test_what_came_before_the_file_that_fails_is_kept(admin: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, good="-- code: 1\nCREATE TABLE asyncgate.good ();", bad="-- code: 1\nSELECT 1 / 0;")

    with pytest.raises(StartupError, match=f"^{NEXT + 1:04}_bad.sql cannot be applied"):
        await migrate_database(admin, folder)

    async with connected(admin) as db:
        assert await db.fetchval("SELECT max(number) FROM asyncgate.migrations") == NEXT


async def test_a_migration_waits_five_seconds_for_a_table_and_no_longer(
        migrated: str, admin: str, tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, told="-- code: 1\nCREATE TABLE asyncgate.told AS SELECT current_setting('lock_timeout') AS patience;",
        busy="-- code: 1\nSET LOCAL lock_timeout = '100ms';\nALTER TABLE asyncgate.tasks ADD COLUMN colour text;")

    async with connected(admin) as db:
        async with db.transaction():
            await db.execute("LOCK TABLE asyncgate.tasks IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(StartupError) as refused:
                await migrate_database(admin, folder)
        assert str(refused.value) == (f"{NEXT + 1:04}_busy.sql cannot be applied, nothing of it was kept: "
                                      "canceling statement due to lock timeout")
        assert await db.fetchval("SELECT patience FROM asyncgate.told") == "5s"
    assert await migrate_database(admin, folder) == [f"{NEXT + 1:04}_busy.sql"]


# The SQL for those who run it themselves.


async def run_with_asyncpg(cluster: Cluster, url: str, script: str) -> None:
    async with connected(url) as db:
        await db.execute(script)


async def run_with_psql(cluster: Cluster, url: str, script: str) -> None:
    psql = cluster.programs.bin / "psql"
    if not psql.exists():
        pytest.skip("these programs come without psql")
    command = [str(psql), "--no-psqlrc", "--set", "ON_ERROR_STOP=1", "--quiet", url]
    with tempfile.TemporaryFile() as told:
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stderr=told)
        await process.communicate(script.encode())
        told.seek(0)
        assert process.returncode == 0, told.read()


@pytest.mark.parametrize("run", [run_with_asyncpg, run_with_psql])
async def test_the_printed_sql_makes_the_same_schema(
        cluster: Cluster, migrated: str, admin: str, run: Any) -> None:
    by_hand = f"by_hand_{uuid.uuid4().hex}"
    await cluster.create_database(by_hand)

    await run(cluster, cluster.admin_url(by_hand), migration_sql(0))

    assert await shape(cluster.admin_url(by_hand)) == await shape(admin)
    async with backend_of(cluster.url(by_hand)) as backend:
        await work_on(backend)


def test_a_database_that_has_seen_all_needs_no_sql() -> None:
    assert migration_sql(SCHEMA_VERSION) == ""


# Servers and schemas of different age.


async def test_a_running_server_goes_on_while_the_schema_grows(migrated: str, admin: str, tmp_path: Path) -> None:
    async with backend_of(migrated) as backend:
        await work_on(backend)

        assert await migrate_database(admin, folder_with(tmp_path, expand=f"-- code: {SCHEMA_VERSION}\n{EXPAND}"))

        await work_on(backend)
    async with backend_of(migrated) as backend:
        await work_on(backend)


async def test_a_server_that_a_schema_has_left_behind_does_not_start(
        migrated: str, admin: str, tmp_path: Path) -> None:
    await migrate_database(admin, folder_with(tmp_path, contract=f"-- code: {NEXT}\n{EXPAND}"))

    with pytest.raises(StartupError) as refused:
        await open_backend(migrated)
    assert str(refused.value) == (f"this database has schema {NEXT}, which no longer supports this release "
                                  f"(schema {SCHEMA_VERSION}); run a newer release")


async def test_a_server_does_not_start_on_a_database_that_nobody_migrated(cluster: Cluster, database: str) -> None:
    with pytest.raises(StartupError) as refused:
        await open_backend(cluster.url(database))
    assert str(refused.value) == ("this database has no AsyncGate schema yet: "
                                  "run `asyncgate migrate --database URL` as its owner")


async def test_a_server_does_not_start_on_an_older_schema(migrated: str, admin: str) -> None:
    async with connected(admin) as db:
        await db.execute("UPDATE asyncgate.migrations SET number = number - 1")

    with pytest.raises(StartupError) as refused:
        await open_backend(migrated)
    assert str(refused.value) == (f"this database has schema {SCHEMA_VERSION - 1}, but this release needs "
                                  f"{SCHEMA_VERSION}: run `asyncgate migrate --database URL` as its owner")


# Databases of unreleased versions.


@pytest.mark.parametrize("change", ["UPDATE asyncgate.meta SET value = 'another' WHERE name = $1",
                                    "DELETE FROM asyncgate.meta WHERE name = $1"], ids=["otherwise", "unknown"])
async def test_a_database_of_an_unreleased_version_is_refused_and_left_as_it_is(
        migrated: str, admin: str, change: str) -> None:
    async with connected(admin) as db:
        await db.execute(change, FIRST)
    before = await shape(admin)

    for opening in (open_backend(migrated), migrate_database(admin)):
        with pytest.raises(StartupError, match=r"another first migration.*`asyncgate receipts export` with"):
            await opening
    assert await shape(admin) == before


def test_no_first_migration_is_taken_for_one_that_there_is_no_more() -> None:
    ours = {first_digest(), digest(migrations()[0].sql)}

    assert {*SAME_TABLES.values()} <= ours, "empty SAME_TABLES: older databases have other tables now"


# What the files say.

TABLE = re.compile(r"^CREATE TABLE asyncgate\.(\w+) \([^\n]*\n(.*?)^\)", re.S | re.M)
ADDED = re.compile(r"ALTER TABLE asyncgate\.(\w+)\n((?:    ADD COLUMN .*\n?)+)")
COLUMN = re.compile(r"^    ([a-z]\w*) +[a-z][^-\n]*(?:-- (.+))?$", re.M)
FIELD = re.compile(r"^    (\w+): [^#\n]+(?:# (.+))?$", re.M)


def columns() -> dict[tuple[str, str], str]:
    """Return what the files and the Structs say of each column, by table and name."""
    texts = [(FOLDER / file).read_text() for file in FILES]
    made = {(table, name): comment for text in texts for table, body in TABLE.findall(text)
            for name, comment in COLUMN.findall(body)}
    made |= {(card.table, name): comment for kind, card in CARDS.items() if not card.by_hand
             for name, comment in [("tenant_id", ""), *FIELD.findall(inspect.getsource(kind))]}
    return made | {(table, name): comment for text in texts for table, body in ADDED.findall(text)
                   for name, comment in COLUMN.findall(body.replace("ADD COLUMN ", ""))}


async def test_every_column_says_what_it_holds(migrated: str, admin: str) -> None:
    async with connected(admin) as db:
        there = {tuple(row) for row in await db.fetch("""
            SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'asyncgate'""")}

    assert set(columns()) == there
    assert [at for at, comment in columns().items() if not comment and at[1] != "tenant_id"] == []
