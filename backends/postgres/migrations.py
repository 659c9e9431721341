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
from asyncgate.backends.postgres import hosts, privileges
from asyncgate.backends.tables import POSTGRES_DIALECT, add_tables
from asyncgate.parts.model import errors

FOLDER = Path(__file__).parents[1] / "schema" / "postgres"
MIGRATION_KEY = 0x6761_7465_6d69_6772       # of the advisory lock that only one migrating process holds
TABLE_WAIT = "5s"       # how long a migration waits for a table lock, because later statements queue behind it
HOW_TO_MIGRATE = "run `asyncgate migrate --database URL` as its owner"
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
    text = add_tables(file.read_text(encoding="utf-8"), POSTGRES_DIALECT)
    number, code = re.match(r"\d+", file.name), re.search(r"^-- code: (\d+)$", text, re.M)
    assert number, file
    assert code, f"{file} has no line `-- code: N`"
    return Migration(int(number[0]), file.name, int(code[1]), text)


SCHEMA_VERSION = len(list(FOLDER.glob("[0-9]*.sql")))


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    """Connect for the duration of a block; raises StartupError if that fails."""
    try:
        db = await hosts.Hosts(url, 10).connect(server_settings=hosts.PINNED)
    except (*hosts.AWAY, ValueError) as error:
        raise hosts.startup_error(error, url) from None
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


async def migrate_database(url: str, folder: Path = FOLDER) -> list[str]:
    """Apply the migrations that a database lacks, each in one transaction; return their names.

    Also create missing roles and privileges again, as after a restore, and return their statements too.
    """
    async with connected(url) as db:
        applied = []
        if await is_migrated(db):
            await require_beginning(db)
            await privileges.make_roles(db, roles())
            applied = await privileges.restore_privileges(db)
        while todo := await missing(db, folder):
            try:
                await db.execute(todo[0].script)
            except asyncpg.PostgresError as error:
                await db.execute("ROLLBACK")
                if todo[0] not in await missing(db, folder):    # another process applied it first
                    continue
                raise errors.StartupError(
                    f"{todo[0].name} cannot be applied, nothing of it was kept: {error}") from None
            applied.append(todo[0].name)
        if applied or await privileges.stored_privileges(db) is None:
            await privileges.store_privileges(db)
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
    kept = await db.fetchval("SELECT value FROM asyncgate.meta WHERE name = $1", FIRST)
    require_lineage(kept, digest(migrations()[0].sql))


async def require_schema(db: Any) -> None:
    """Refuse a schema that this release cannot use; raises StartupError."""
    if not await is_migrated(db):
        raise errors.StartupError(f"this database has no AsyncGate schema yet: {HOW_TO_MIGRATE}")
    await require_beginning(db)
    number, code = await db.fetchrow("SELECT max(number), max(code) FROM asyncgate.migrations")
    if number < SCHEMA_VERSION:
        raise errors.StartupError(f"this database has schema {number}, but this release needs {SCHEMA_VERSION}: "
                                  f"{HOW_TO_MIGRATE}")
    if code > SCHEMA_VERSION:
        raise errors.StartupError(f"this database has schema {number}, which no longer supports this release (schema "
                                  f"{SCHEMA_VERSION}); run a newer release")
