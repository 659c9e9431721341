"""The schema of the Postgres backend: numbered files, each applied once and whole.

Expand and contract: a new release only adds to the schema, so the servers of the release before go on working on it
until the last of them is gone; what nobody uses any more is taken away by a later file, which says in its `-- code: N`
line which servers it leaves behind.  A server refuses a schema that is too old for it, or that has left it behind, or
that began with another first file.
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
from asyncgate.backends.postgres.hosts import AWAY, Hosts, startup_error
from asyncgate.backends.postgres.privileges import last, make_roles, mend, remember
from asyncgate.parts.model.errors import StartupError

FOLDER = Path(__file__).parents[1] / "schema" / "postgres"
LOCK = 0x6761_7465_6d69_6772        # held by the one that migrates
LOCK_TIMEOUT = "5s"                 # who waits for a table keeps everybody waiting who comes after
HOW_TO_MIGRATE = "run `asyncgate migrate --database URL` as its owner"

# Before the first release there were fourteen files.  Their schema differs from that of the first file only in this.
CARRIED = 14
CARRY_OVER = """
DROP FUNCTION asyncgate.overdue(float8, float8, text[], int);
ALTER FUNCTION asyncgate.overdue_but(float8, float8, text[], text[], int) RENAME TO overdue;
DELETE FROM asyncgate.migrations WHERE number > 1;
UPDATE asyncgate.migrations SET privileges = NULL;
"""


class Migration(Struct, frozen=True):
    """One file."""

    number: int
    name: str
    code: int                       # the oldest release of the schema whose server works on this one
    sql: str

    @property
    def script(self) -> str:
        """Return all that applies it, for `psql` or for us; it must be one transaction."""
        role = "" if self.number == 1 else "SET LOCAL ROLE asyncgate_owner;\n"
        record = f"({self.number}, '{self.name}', {self.code})"
        begin = self.lineage if self.number == 1 else ""
        return (f"BEGIN;\nSET LOCAL lock_timeout = '{LOCK_TIMEOUT}';\nSELECT pg_advisory_xact_lock({LOCK});\n{role}"
                f"{self.sql}\n{begin}"
                f"INSERT INTO asyncgate.migrations (number, name, code) VALUES {record};\nCOMMIT;\n")

    @property
    def lineage(self) -> str:
        """Return the statement that says that a database began with this file."""
        return f"INSERT INTO asyncgate.meta VALUES ('{FIRST}', '{digest(self.sql)}');\n"


def migrations(folder: Path = FOLDER) -> list[Migration]:
    """Return all migrations in their order."""
    return [read(file) for file in sorted(folder.glob("[0-9]*.sql"))]


def read(file: Path) -> Migration:
    """Read one file."""
    text = file.read_text(encoding="utf-8")
    number, code = re.match(r"\d+", file.name), re.search(r"^-- code: (\d+)$", text, re.M)
    assert number, file
    assert code, f"{file} does not say with which code it works"
    return Migration(int(number[0]), file.name, int(code[1]), text)


SCHEMA_VERSION = len(list(FOLDER.glob("[0-9]*.sql")))


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    """Connect for the time of a block; what goes wrong is one clear line."""
    try:
        db = await Hosts(url, 10).connect()
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
    """Return the migrations that a database has not seen."""
    seen = 0
    if await is_migrated(db):
        seen = await db.fetchval("SELECT coalesce(max(number), 0) FROM asyncgate.migrations")
    return [migration for migration in migrations(folder) if migration.number > seen]


async def beginning(db: Any) -> tuple[int, str | None]:
    """Return the number of a database's schema and the digest of the file that it began with, if it keeps one."""
    number, kept = await db.fetchrow("SELECT (SELECT max(number) FROM asyncgate.migrations), "
                                     "(SELECT value FROM asyncgate.meta WHERE name = $1)", FIRST)
    return number, kept


async def carry_over(db: Any) -> list[str]:
    """Number the schema anew that the files before the first release have made; return what was done."""
    first = migrations()[0]
    try:
        async with db.transaction():
            await db.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'; SELECT pg_advisory_xact_lock({LOCK})")
            if await beginning(db) != (CARRIED, None):
                return []
            await db.execute(CARRY_OVER + first.lineage)
    except asyncpg.PostgresError as error:
        raise StartupError(f"schema {CARRIED} cannot be carried over, nothing was changed: {error}") from None
    return [f"schema {CARRIED} as {first.name}"]


async def migrate_database(url: str, folder: Path = FOLDER) -> list[str]:
    """Apply what a database has not seen, each file in one transaction; return their names.

    What a restore has lost of roles and privileges is made again, and named as well.
    """
    async with connected(url) as db:
        applied = []
        if await is_migrated(db):
            if await beginning(db) != (CARRIED, None):
                await require_beginning(db)
            await make_roles(db, roles())
            applied = [*await mend(db), *await carry_over(db)]
        while todo := await missing(db, folder):
            try:
                await db.execute(todo[0].script)
            except asyncpg.PostgresError as error:
                await db.execute("ROLLBACK")
                if todo[0] not in await missing(db, folder):    # another has applied it, while we waited for the lock
                    continue
                raise StartupError(f"{todo[0].name} cannot be applied, nothing of it was kept: {error}") from None
            applied.append(todo[0].name)
        if applied or await last(db) is None:
            await remember(db)
    return applied


def roles() -> str:
    """Return the statements that make the roles: the first file begins with them."""
    return migrations()[0].sql.partition("CREATE SCHEMA")[0]


def migration_sql(after: int) -> str:
    """Return what a database with a schema of that number lacks, as a script for psql."""
    return "\n".join(migration.script for migration in migrations() if migration.number > after)


async def require_beginning(db: Any) -> None:
    """Refuse a database that began with another first file than this release has."""
    number, kept = await beginning(db)
    require_lineage(kept, digest(migrations()[0].sql), number, CARRIED, HOW_TO_MIGRATE)


async def require_schema(db: Any) -> None:
    """Refuse a database whose schema this server does not know how to use."""
    if not await is_migrated(db):
        raise StartupError(f"this database has no schema of the gate yet: {HOW_TO_MIGRATE}")
    await require_beginning(db)
    number, code = await db.fetchrow("SELECT max(number), max(code) FROM asyncgate.migrations")
    if number < SCHEMA_VERSION:
        raise StartupError(f"this database has schema {number}, this release needs {SCHEMA_VERSION}: {HOW_TO_MIGRATE}")
    if code > SCHEMA_VERSION:
        raise StartupError(f"this database has schema {number}, which has left this release behind "
                           f"({SCHEMA_VERSION}); run a newer one")
