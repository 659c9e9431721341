"""The schema of the Postgres backend: numbered migration files, each applied once, in one transaction.

Expand and contract: a new release only adds to the schema, so gates of the previous release go on working with it.  A
later migration removes unused parts; its line `-- code: N` names the oldest release that works with the new schema.  A
gate refuses a schema that is too old, one that no longer supports its release, and one with another first migration.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
from msgspec import Struct

from asyncgate.backends.lineage import FIRST, digest, require_lineage
from asyncgate.backends.postgres.hosts import AWAY, PINNED, Hosts, startup_error
from asyncgate.backends.postgres.privileges import make_roles, restore_privileges, store_privileges, stored_privileges
from asyncgate.parts.model.errors import StartupError

FOLDER = Path(__file__).parents[1] / "schema" / "postgres"
MIGRATION_KEY = 0x6761_7465_6d69_6772       # of the advisory lock that only one migrating process holds
TABLE_WAIT = "5s"       # how long a migration waits for a table lock, because later statements queue behind it
HOW_TO_MIGRATE = "run `asyncgate migrate --database URL` as its owner"

# Before the first release there were fourteen files.  The statements below turn their schema into the first file's.
CARRIED = 14
CHANGE_TABLES = """
ALTER TABLE asyncgate.presences
    ADD COLUMN IF NOT EXISTS claims text NOT NULL DEFAULT '[]', ADD COLUMN IF NOT EXISTS claimed_at float8,
    ADD COLUMN IF NOT EXISTS leased bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS completed bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS failed bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS expired bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS released bigint NOT NULL DEFAULT 0;
ALTER TABLE asyncgate.accounts
    ADD COLUMN IF NOT EXISTS budgets text NOT NULL DEFAULT '{}',
    ADD COLUMN IF NOT EXISTS max_payload_bytes bigint, ADD COLUMN IF NOT EXISTS max_lease_ttl_seconds bigint;
ALTER TABLE asyncgate.schedules ADD COLUMN IF NOT EXISTS details text NOT NULL DEFAULT '{}';
ALTER TABLE asyncgate.receipts ADD COLUMN IF NOT EXISTS salt text NOT NULL DEFAULT '';
DROP INDEX IF EXISTS asyncgate.schedules_owner;
ALTER TABLE asyncgate.tasks ADD COLUMN IF NOT EXISTS summary asyncgate.id, ALTER COLUMN type TYPE asyncgate.id;
"""
MADE = re.compile(r"^(CREATE (?:TABLE|(?:UNIQUE )?INDEX) )(.*?;)(?=$| +--)", re.M | re.S)
# Its owner sees the rows of a table only while the wall between tenants is open.
COUNT_QUEUES = """
ALTER TABLE asyncgate.states NO FORCE ROW LEVEL SECURITY;
ALTER TABLE asyncgate.lanes NO FORCE ROW LEVEL SECURITY;
INSERT INTO asyncgate.queues (tenant_id, lane, slot, queued, held, leased, counted_at, type, capabilities)
SELECT tenant_id, lane, 0, count(*) FILTER (WHERE status = 'queued' AND held IS NULL),
    count(*) FILTER (WHERE status = 'queued' AND held IS NOT NULL), count(*) FILTER (WHERE status <> 'queued'),
    extract(epoch FROM now()), type, capabilities
FROM asyncgate.states JOIN asyncgate.lanes USING (tenant_id, lane)
WHERE status IN ('queued', 'leased', 'running') GROUP BY tenant_id, lane, type, capabilities;
"""
COUNT_STORED = """
ALTER TABLE asyncgate.tenants NO FORCE ROW LEVEL SECURITY;
ALTER TABLE asyncgate.tasks NO FORCE ROW LEVEL SECURITY;
ALTER TABLE asyncgate.receipts NO FORCE ROW LEVEL SECURITY;
INSERT INTO asyncgate.meters
SELECT tenant_id, lpad(floor(extract(epoch FROM now()) / 300)::bigint::text, 12, '0'), '0000', 0,
    (SELECT count(*) FROM asyncgate.states AS s WHERE s.tenant_id = t.tenant_id AND status IN ('leased', 'running')), 0,
    (SELECT coalesce(sum(octet_length(body)), 0) FROM asyncgate.receipts AS r WHERE r.tenant_id = t.tenant_id), 0,
    (SELECT coalesce(sum(octet_length(payload)), 0) FROM asyncgate.tasks AS k WHERE k.tenant_id = t.tenant_id)
    + (SELECT coalesce(sum(octet_length(outcome)), 0) FROM asyncgate.states AS s WHERE s.tenant_id = t.tenant_id),
    0, 0, 0, 0
FROM asyncgate.tenants AS t;
"""
SUMMARIZE = """
UPDATE asyncgate.tasks SET summary = nullif(left(terms::json ->> 'task_summary', 100), '')
WHERE terms LIKE '%"task_summary"%' AND position('\\u0000' IN replace(terms, '\\\\', '')) = 0;
"""
DROP_WALL = """
DO $$
DECLARE
    wall record;
    part regprocedure;
BEGIN
    FOR wall IN SELECT policyname, tablename FROM pg_policies WHERE schemaname = 'asyncgate' LOOP
        EXECUTE format('DROP POLICY %I ON asyncgate.%I', wall.policyname, wall.tablename);
    END LOOP;
    FOR part IN SELECT oid FROM pg_proc WHERE pronamespace = 'asyncgate'::regnamespace LOOP
        EXECUTE format('DROP FUNCTION %s', part);
    END LOOP;
END $$;
"""
WALL = "CREATE FUNCTION asyncgate.tenant()"     # policies, grants and functions of the first file
RENUMBER = """
DELETE FROM asyncgate.migrations WHERE number > 1;
UPDATE asyncgate.migrations SET privileges = NULL;
"""


# Large objects know no tenant and no wall, and everybody may make them until it is taken from PUBLIC; that is for a
# superuser.
NO_LARGE_OBJECTS = f"""\
BEGIN;
SELECT pg_advisory_xact_lock({MIGRATION_KEY});
DO $$
DECLARE
    name regprocedure;
BEGIN
    FOR name IN SELECT oid FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace
        AND proname IN ('lo_create', 'lo_creat', 'lo_from_bytea')
        AND has_function_privilege('asyncgate_app', oid, 'EXECUTE')
        AND pg_has_role(proowner, 'MEMBER') LOOP
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', name);
    END LOOP;
END $$;
COMMIT;
"""


class Migration(Struct, frozen=True):
    """One migration file."""

    number: int
    name: str
    code: int                       # the oldest release that works with this schema
    sql: str

    @property
    def script(self) -> str:
        """Return the whole script that applies the migration in one transaction."""
        role = "" if self.number == 1 else "SET LOCAL ROLE asyncgate_owner;\n"
        record = f"({self.number}, '{self.name}', {self.code})"
        begin = self.lineage if self.number == 1 else ""
        return (f"BEGIN;\nSET LOCAL lock_timeout = '{TABLE_WAIT}';\nSELECT pg_advisory_xact_lock({MIGRATION_KEY});\n"
                f"{role}{self.sql}\n{begin}"
                f"INSERT INTO asyncgate.migrations (number, name, code) VALUES {record};\nCOMMIT;\n")

    @property
    def lineage(self) -> str:
        """Return the statement that stores that a database began with this migration."""
        return f"INSERT INTO asyncgate.meta VALUES ('{FIRST}', '{digest(self.sql)}');\n"


def migrations(folder: Path = FOLDER) -> list[Migration]:
    """Return all migrations in order."""
    return [read(file) for file in sorted(folder.glob("[0-9]*.sql"))]


def read(file: Path) -> Migration:
    """Read one migration file."""
    text = file.read_text(encoding="utf-8")
    number, code = re.match(r"\d+", file.name), re.search(r"^-- code: (\d+)$", text, re.M)
    assert number, file
    assert code, f"{file} has no line `-- code: N`"
    return Migration(int(number[0]), file.name, int(code[1]), text)


SCHEMA_VERSION = len(list(FOLDER.glob("[0-9]*.sql")))


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    """Connect for the duration of a block; raises StartupError if that fails."""
    try:
        db = await Hosts(url, 10).connect(server_settings=PINNED)
    except (*AWAY, ValueError) as error:
        raise startup_error(error, url) from None
    try:
        yield db
    finally:
        await db.close()


async def is_migrated(db: Any) -> bool:
    """Whether a database has a schema of the gate."""
    there: bool = await db.fetchval("SELECT to_regclass('asyncgate.migrations') IS NOT NULL")
    return there


async def missing(db: Any, folder: Path = FOLDER) -> list[Migration]:
    """Return the migrations that a database lacks."""
    seen = 0
    if await is_migrated(db):
        seen = await db.fetchval("SELECT coalesce(max(number), 0) FROM asyncgate.migrations")
    return [migration for migration in migrations(folder) if migration.number > seen]


async def read_lineage(db: Any) -> tuple[int, str | None]:
    """Return the number of a database's schema, and the digest of its first migration if stored."""
    number, kept = await db.fetchrow("SELECT (SELECT max(number) FROM asyncgate.migrations), "
                                     "(SELECT value FROM asyncgate.meta WHERE name = $1)", FIRST)
    return number, kept


async def carry_over(db: Any) -> list[str]:
    """Renumber a schema of the fourteen old files; return what was done."""
    first = migrations()[0]
    try:
        async with db.transaction():
            await db.execute(f"SET LOCAL lock_timeout = '{TABLE_WAIT}'; SELECT pg_advisory_xact_lock({MIGRATION_KEY})")
            if await read_lineage(db) != (CARRIED, None):
                return []
            await db.execute(carried(first))
    except asyncpg.PostgresError as error:
        raise StartupError(f"schema {CARRIED} cannot be carried over; nothing was changed: {error}") from None
    return [f"schema {CARRIED} as {first.name}"]


def carried(first: Migration) -> str:
    """Return the script that turns the schema of the fourteen old files into the first file's.

    It creates the tables and indexes that are missing, and all policies, grants and functions anew.
    """
    tables, wall, rest = first.sql.partition(WALL)
    missing = "".join([f"{create}IF NOT EXISTS {made}\n" for create, made in MADE.findall(tables)])
    return (f"SET LOCAL ROLE asyncgate_owner;{CHANGE_TABLES}{missing}{COUNT_QUEUES}{COUNT_STORED}{SUMMARIZE}"
            f"{DROP_WALL}{wall}{rest}RESET ROLE;{RENUMBER}{first.lineage}")


async def migrate_database(url: str, folder: Path = FOLDER) -> list[str]:
    """Apply the migrations that a database lacks, each in one transaction; return their names.

    Also create missing roles and privileges again, as after a restore, and return their statements too.
    """
    async with connected(url) as db:
        applied = []
        if await is_migrated(db):
            if await read_lineage(db) != (CARRIED, None):
                await require_beginning(db)
            await make_roles(db, roles())
            applied = [*await restore_privileges(db), *await carry_over(db)]
        while todo := await missing(db, folder):
            try:
                await db.execute(todo[0].script)
            except asyncpg.PostgresError as error:
                await db.execute("ROLLBACK")
                if todo[0] not in await missing(db, folder):    # another process applied it first
                    continue
                raise StartupError(f"{todo[0].name} cannot be applied, nothing of it was kept: {error}") from None
            applied.append(todo[0].name)
        if applied or await stored_privileges(db) is None:
            await store_privileges(db)
        await db.execute(NO_LARGE_OBJECTS)
    return applied


def roles() -> str:
    """Return the statements that create the roles: the beginning of the first migration."""
    return migrations()[0].sql.partition("CREATE SCHEMA")[0]


def migration_sql(after: int) -> str:
    """Return all migrations after a schema number as a script for psql."""
    scripts = [migration.script for migration in migrations() if migration.number > after]
    return "\n".join([*scripts, NO_LARGE_OBJECTS] if scripts else [])


async def require_beginning(db: Any) -> None:
    """Refuse a database that began with another first migration; raises StartupError."""
    number, kept = await read_lineage(db)
    require_lineage(kept, digest(migrations()[0].sql), number, CARRIED, HOW_TO_MIGRATE)


async def require_schema(db: Any) -> None:
    """Refuse a schema that this release cannot use; raises StartupError."""
    if not await is_migrated(db):
        raise StartupError(f"this database has no AsyncGate schema yet: {HOW_TO_MIGRATE}")
    await require_beginning(db)
    number, code = await db.fetchrow("SELECT max(number), max(code) FROM asyncgate.migrations")
    if number < SCHEMA_VERSION:
        raise StartupError(f"this database has schema {number}, but this release needs {SCHEMA_VERSION}: "
                           f"{HOW_TO_MIGRATE}")
    if code > SCHEMA_VERSION:
        raise StartupError(f"this database has schema {number}, which no longer supports this release (schema "
                           f"{SCHEMA_VERSION}); run a newer release")
