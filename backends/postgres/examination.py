"""What Postgres tells an examination, in transactions that only read: roles, grants, schema, settings, clock, gates."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import asyncpg

from asyncgate.backends import judged
from asyncgate.backends.lineage import ANOTHER, HOW_TO_MOVE
from asyncgate.backends.postgres import hosts
from asyncgate.backends.postgres.instances import LIVING
from asyncgate.backends.postgres.migrations import SCHEMA_VERSION, is_migrated, require_beginning
from asyncgate.backends.postgres.privileges import find_missing, find_strengths
from asyncgate.parts.model import errors, findings
from asyncgate.parts.model.settings import DatabaseSettings, Settings
from asyncgate.parts.model.words import say_length

LEAST_POSTGRES = 14
MIGRATE = "run `asyncgate migrate --database URL` as the database's owner or a superuser"
FOR_TRIALS = "it is allowed because database.trusted_role is on"
DURABLE = {
    "fsync": "a power cut can destroy the database",
    "full_page_writes": "a power cut can destroy the database",
    "synchronous_commit": "a crash loses what was acknowledged last",
}
MOST_CONNECTIONS = """
SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,
       (SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user)"""
GONE = f"""
SELECT instance_id::text, extract(epoch FROM now() - beat_at)::float8 FROM asyncgate.instances
WHERE beat_seconds > 0 AND instance_id::text NOT IN ({LIVING}) ORDER BY beat_at DESC LIMIT 5"""
SOONEST = "SELECT look_at, tenant_id, task_id FROM asyncgate.lapses(0, 1)"
AS_TENANT = "SELECT set_config('app.tenant_id', $1, true)"
OWNING_GATE = """
SELECT asyncgate_instance::text, expires_at FROM asyncgate.states
WHERE tenant_id = $1 AND task_id = $2 AND status IN ('leased', 'running')"""
OUTBOX_OF = """
SELECT count(*) FILTER (WHERE state = 'waiting'), count(*) FILTER (WHERE state = 'parked'),
       min(posted_at) FILTER (WHERE state = 'waiting')
FROM asyncgate.outbox WHERE tenant_id = $1"""
HAS_KEY = "SELECT EXISTS (SELECT FROM asyncgate.api_keys WHERE tenant_id = $1)"


@contextlib.asynccontextmanager
async def only_reading(url: str, settings: DatabaseSettings) -> AsyncIterator[Any]:
    """Connect for a block, in one transaction that can change nothing; raises StartupError."""
    seconds = settings.timeout_seconds
    try:
        db = await hosts.Hosts(url, seconds).connect(statement_cache_size=0, command_timeout=seconds)
    except (*hosts.AWAY, ValueError) as error:
        raise hosts.startup_error(error, url) from None
    try:
        async with db.transaction(readonly=True):
            yield db
    finally:
        await db.close()


async def examine_database(settings: Settings, clock: Callable[[], float]) -> AsyncIterator[findings.Finding]:
    """Yield what is wrong with the database of the settings."""
    database = settings.database
    for url in dict.fromkeys([database.url, database.direct_url or database.url]):
        try:
            async with only_reading(url, database) as db:
                if url != database.url or not database.direct_url:
                    async for finding in look_around(db, settings, clock):
                        yield finding
                else:
                    yield findings.all_well("PgBouncer lets the gate in")
        except errors.StartupError as away:
            yield findings.alarm(str(away), "start Postgres, or correct database.url and database.direct_url")
        except asyncpg.PostgresError as error:
            yield findings.alarm(f"Postgres refuses what the gate must read: {error}", MIGRATE)
    if settings.archive.enabled:
        async for finding in look_at_archivist(database):
            yield finding


async def look_around(db: Any, settings: Settings, clock: Callable[[], float]) -> AsyncIterator[findings.Finding]:
    """Yield what one connection can see."""
    for finding in (*judge_server(db), *await judge_role(db, settings.database), *await judge_durability(db),
                    *await judge_connections(db, settings.database), *await measure_skew(db, clock)):
        yield finding
    schema = [*await judge_schema(db)]
    for finding in schema:
        yield finding
    if not any(finding.severity == "error" for finding in schema):
        for finding in (*await judge_grants(db), *await judge_instances(db, settings),
                        *await judge_tenants(db, settings)):
            yield finding


def judge_server(db: Any) -> Iterator[findings.Finding]:
    """Yield what the version of the server means."""
    version = db.get_server_version()
    if version.major < LEAST_POSTGRES:
        yield findings.alarm(f"Postgres is {version.major}, and the gate needs {LEAST_POSTGRES}", "upgrade Postgres")
    else:
        yield findings.all_well(f"Postgres {version.major}.{version.minor}")


async def judge_role(db: Any, database: DatabaseSettings) -> list[findings.Finding]:
    """Return what the gate's role may do beyond what it should."""
    if not await db.fetchval("SELECT count(*) = 3 FROM pg_roles WHERE rolname IN ('asyncgate_owner', "
                             "'asyncgate_sweeper', 'asyncgate_auth')"):
        return [findings.alarm("the roles of the gate are not on this server", MIGRATE)]
    role, strong = await find_strengths(db)
    if not strong:
        return [findings.all_well(f"the role {role} stays behind the wall between tenants")]
    cure = "connect as asyncgate_app, or as a role that is a member of asyncgate_app alone"
    if database.trusted_role:
        return [findings.warn(f"the role {role} {strong[0]}: {FOR_TRIALS}", cure)]
    return [findings.alarm(f"the role {role} {strong[0]}, so the wall between tenants does not hold: `serve` refuses "
                           "to start", cure)]


async def judge_durability(db: Any) -> list[findings.Finding]:
    """Return the settings of the server under which what was acknowledged can be lost."""
    off = [name for name in DURABLE if await db.fetchval(f"SHOW {name}") == "off"]
    flaws = [findings.alarm(f"{name} is off in Postgres: {DURABLE[name]}",
                            f"ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf(); and see that no role or database "
                            "sets it")
             for name in off]
    if await db.fetchval("SELECT pg_is_in_recovery()"):
        flaws.append(findings.alarm("this Postgres is a standby, which takes no writes",
                                    "name the primary in database.url, or all hosts with "
                                    "target_session_attrs=read-write"))
    return flaws or [findings.all_well("Postgres keeps what was acknowledged (fsync, synchronous_commit)")]


async def judge_connections(db: Any, database: DatabaseSettings) -> list[findings.Finding]:
    """Return whether a gate gets the connections that it may ask for: its pool, and one for locks and news."""
    most, limit = await db.fetchrow(MOST_CONNECTIONS)
    room = min(most, limit) if limit >= 0 else most
    if not database.pgbouncer and database.pool_size + 1 > room:
        return [findings.warn(
            f"database.pool_size is {database.pool_size}, and Postgres gives this role {room} connections",
            "lower database.pool_size, or raise max_connections in Postgres")]
    return []


async def measure_skew(db: Any, clock: Callable[[], float]) -> list[findings.Finding]:
    """Return how far the two clocks are apart; the answer was made between two looks at ours."""
    before = clock()
    theirs = await db.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
    after = clock()
    return [*judged.judge_skew(theirs - (before + after) / 2, (after - before) / 2)]


async def judge_schema(db: Any) -> list[findings.Finding]:
    """Return what the schema means for this release."""
    if not await is_migrated(db):
        return [findings.alarm("this database has no schema of the gate yet", MIGRATE)]
    if not await db.fetchval("SELECT has_schema_privilege('asyncgate', 'USAGE') "
                             "AND has_table_privilege('asyncgate.migrations', 'SELECT')"):
        return [findings.alarm("this role may not read the schema of the gate",
                               f"connect as asyncgate_app, or {MIGRATE}")]
    try:
        await require_beginning(db)
    except errors.StartupError:
        return [findings.alarm(ANOTHER, HOW_TO_MOVE)]
    number, code = await db.fetchrow("SELECT max(number), max(code) FROM asyncgate.migrations")
    if number < SCHEMA_VERSION:
        return [findings.alarm(f"the database has schema {number}, and this release needs {SCHEMA_VERSION}", MIGRATE)]
    if code > SCHEMA_VERSION:
        return [findings.alarm(
            f"the database has schema {number}, which has left this release behind ({SCHEMA_VERSION})",
            "run the newer release")]
    if number > SCHEMA_VERSION:
        return [findings.note(
            f"the database has schema {number} of a newer release; this one ({SCHEMA_VERSION}) works on it",
            "upgrade this gate, too")]
    return [findings.all_well(f"the database has schema {number}, as this release")]


async def judge_grants(db: Any) -> list[findings.Finding]:
    """Return what is missing of the owners, grants and policies that the last migration left."""
    async with db.transaction():        # with a search path of its own
        missing = await find_missing(db)
    if not missing:
        return [findings.all_well("owners, grants and policies are as the last migration left them")]
    shown = "; ".join(missing[:3]) + f"; and {len(missing) - 3} more" * (len(missing) > 3)
    return [findings.alarm(f"privileges are missing in Postgres: {shown}", f"{MIGRATE}: it makes them again")]


async def judge_instances(db: Any, settings: Settings) -> list[findings.Finding]:
    """Return which gates died, and which tasks nobody looks after."""
    living = [row[0] for row in await db.fetch(LIVING)]
    silent = [findings.note(
        f"the gate {name} gave its last sign {say_length(seconds)} ago and did not stop in order; others "
        "adopt its tasks", "start it again, or leave it: its row is forgotten after a day")
              for name, seconds in await db.fetch(GONE)]
    now = await db.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
    late, what = None, "a lease"
    if (row := await db.fetchrow(SOONEST)) is not None and row[0] < now:
        await db.execute(AS_TENANT, str(row[1]))
        if (held := await db.fetchrow(OWNING_GATE, row[1], row[2])) is not None and held[1] is not None:
            gone = "" if held[0] in living else ", which is gone and whose tasks nobody adopts"
            late, what = now - held[1], f"the lease of task {row[2]} of the gate {held[0]}{gone}"
    return [*silent, *judged.judge_overdue(late, what, ", ".join(living), settings),
            findings.all_well(f"gates that serve this database: {len(living)}")]


async def judge_tenants(db: Any, settings: Settings) -> list[findings.Finding]:
    """Return what is in the outboxes, and whether anybody can enter."""
    waiting, parked, since = 0, 0, None
    for (tenant_id,) in await db.fetch("SELECT * FROM asyncgate.unsent()"):
        await db.execute(AS_TENANT, str(tenant_id))
        more, refused, oldest = await db.fetchrow(OUTBOX_OF, tenant_id)
        waiting, parked, since = waiting + more, parked + refused, min(filter(None, (since, oldest)), default=None)
    now = await db.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
    verdicts = [*judged.judge_outbox(waiting, parked, 0.0 if since is None else now - since, settings)]
    verdicts += judged.judge_sharing(await db.fetchval("SELECT count(*) FROM asyncgate.all_tenants()"), settings)
    served = bool(await db.fetch(LIVING))       # with settings that may not be ours
    if not served and judged.needs_issued_key(settings) and not await has_issued_key(db):
        verdicts.append(judged.NO_WAY_IN)
    return verdicts


async def has_issued_key(db: Any) -> bool:
    """Whether any tenant has an issued key."""
    for (tenant_id,) in await db.fetch("SELECT * FROM asyncgate.all_tenants()"):
        await db.execute(AS_TENANT, str(tenant_id))
        if await db.fetchval(HAS_KEY, tenant_id):
            return True
    return False


async def look_at_archivist(database: DatabaseSettings) -> AsyncIterator[findings.Finding]:
    """Yield whether the role that registers segments of the archive can log in."""
    url = database.archive_url or hosts.as_user(database.direct_url or database.url, "asyncgate_archivist")
    try:
        if not database.trusted_role:
            async with only_reading(url, database):
                yield findings.all_well("the role asyncgate_archivist can log in")
    except errors.StartupError as away:
        yield findings.alarm(f"the role asyncgate_archivist cannot log in, so no receipt is archived: {away}",
                             "set database.archive_url to the address of asyncgate_archivist, with its password")
