"""Owners, grants and policies of the schema: read from the catalog, stored, and restored if they are lost.

Roles belong to a whole server, so a dump of a database does not contain them.  After a restore on a server without the
roles, the restoring user owns everything, and the wall between tenants is missing.  Each migration therefore stores the
statements that make the present privileges, in the table of migrations; `migrate` creates missing roles and runs the
missing statements.
"""

from __future__ import annotations

import re
from typing import Any

import asyncpg

from asyncgate.parts.model import errors

ROLES = ("asyncgate_owner", "asyncgate_app", "asyncgate_sweeper", "asyncgate_auth", "asyncgate_archivist")
OUR_SCHEMA = "(SELECT oid FROM pg_namespace WHERE nspname = 'asyncgate')"
RESTORE_AGAIN = ("this database was restored without its roles, and has no stored privileges; the roles exist now: "
                 "restore the dump again, into an empty database")

# A query for the statements that make all privileges, with their order: owners come first, because changing an owner
# also changes existing grants.
PRIVILEGES = f"""
WITH granted AS (
    SELECT 'SCHEMA asyncgate' AS what, a.* FROM pg_namespace AS n, aclexplode(n.nspacl) AS a WHERE n.oid = {OUR_SCHEMA}
    UNION ALL SELECT 'TABLE ' || c.oid::regclass, a.* FROM pg_class AS c, aclexplode(c.relacl) AS a
        WHERE c.relnamespace = {OUR_SCHEMA} AND c.relkind = 'r'
    UNION ALL SELECT 'FUNCTION ' || p.oid::regprocedure, a.* FROM pg_proc AS p, aclexplode(p.proacl) AS a
        WHERE p.pronamespace = {OUR_SCHEMA})
SELECT 0, format('ALTER SCHEMA asyncgate OWNER TO %I', pg_get_userbyid(nspowner))
    FROM pg_namespace WHERE oid = {OUR_SCHEMA}
UNION ALL SELECT 0, format('ALTER TABLE %s OWNER TO %I', oid::regclass, pg_get_userbyid(relowner))
    FROM pg_class WHERE relnamespace = {OUR_SCHEMA} AND relkind = 'r'
UNION ALL SELECT 0, format('ALTER FUNCTION %s OWNER TO %I', oid::regprocedure, pg_get_userbyid(proowner))
    FROM pg_proc WHERE pronamespace = {OUR_SCHEMA}
UNION ALL SELECT 0, format('ALTER DOMAIN %s OWNER TO %I', oid::regtype, pg_get_userbyid(typowner))
    FROM pg_type WHERE typnamespace = {OUR_SCHEMA} AND typtype = 'd'
UNION ALL SELECT 1, format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', oid::regprocedure)
    FROM pg_proc WHERE pronamespace = {OUR_SCHEMA} AND proacl IS NOT NULL
    AND NOT EXISTS (SELECT FROM aclexplode(proacl) WHERE grantee = 0)
UNION ALL SELECT 2, format('GRANT %s ON %s TO %I', privilege_type, what, pg_get_userbyid(grantee))
    FROM granted WHERE grantee <> grantor AND pg_get_userbyid(grantee) = ANY ($2)      -- other roles are their owner's
UNION ALL SELECT 2, format('GRANT %s (%I) ON TABLE %s TO %I', a.privilege_type, attname, attrelid::regclass,
                           pg_get_userbyid(a.grantee))
    FROM pg_attribute JOIN pg_class AS c ON c.oid = attrelid, aclexplode(attacl) AS a
    WHERE c.relnamespace = {OUR_SCHEMA} AND a.grantee <> 0
UNION ALL SELECT 3, format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', oid::regclass)
    FROM pg_class WHERE relnamespace = {OUR_SCHEMA} AND relrowsecurity
UNION ALL SELECT 3, format('ALTER TABLE %s FORCE ROW LEVEL SECURITY', oid::regclass)
    FROM pg_class WHERE relnamespace = {OUR_SCHEMA} AND relforcerowsecurity
UNION ALL SELECT 4, format('DROP POLICY IF EXISTS %1$I ON %2$s; CREATE POLICY %1$I ON %2$s FOR %3$s TO %4$s%5$s%6$s',
        polname, polrelid::regclass,
        CASE polcmd WHEN 'r' THEN 'SELECT' WHEN 'a' THEN 'INSERT' WHEN 'w' THEN 'UPDATE' WHEN 'd' THEN 'DELETE'
                    ELSE 'ALL' END,
        (SELECT string_agg(quote_ident(rolname), ', ' ORDER BY rolname) FROM pg_roles WHERE oid = ANY (polroles)),
        CASE WHEN $1 THEN ' USING (' || pg_get_expr(polqual, polrelid) || ')' END,
        CASE WHEN $1 THEN ' WITH CHECK (' || pg_get_expr(polwithcheck, polrelid) || ')' END)
    FROM pg_policy JOIN pg_class AS c ON c.oid = polrelid WHERE c.relnamespace = {OUR_SCHEMA}
ORDER BY 1, 2"""


async def find_strengths(db: Any) -> tuple[str, list[str]]:
    """Return the role of a connection, and why the wall between tenants does not restrict it; nothing if it does."""
    role, superuser, bypass, *ours = await db.fetchrow("""
        SELECT current_user::text,
               EXISTS (SELECT FROM pg_roles WHERE rolsuper AND pg_has_role(current_user, oid, 'MEMBER')),
               EXISTS (SELECT FROM pg_roles WHERE rolbypassrls AND pg_has_role(current_user, oid, 'MEMBER')),
               pg_has_role(current_user, 'asyncgate_owner', 'MEMBER'),
               pg_has_role(current_user, 'asyncgate_sweeper', 'MEMBER'),
               pg_has_role(current_user, 'asyncgate_auth', 'MEMBER')""")
    strong = {"is a superuser": superuser, "may bypass row-level security": bypass, "owns the tables": ours[0],
              "sees all tenants' work": ours[1], "sees all tenants' keys": ours[2]}
    return role, [why for why, holds in strong.items() if holds]


async def privileges(db: Any, whole: bool = True) -> list[str]:
    """Return the statements that make the present privileges in the schema.

    Reading the conditions of policies takes a table lock; without `whole` they are left out, and no lock is taken.
    """
    async with db.transaction():
        await db.execute("SET LOCAL search_path = pg_catalog; SET LOCAL lock_timeout = '5s'")   # so names are whole
        return [row[1] for row in await db.fetch(PRIVILEGES, whole, ROLES)]


def outline(statement: str) -> str:
    """Return a statement without the conditions of a policy."""
    return re.sub(r" (USING|WITH CHECK) \(.*", "", statement, flags=re.DOTALL)


async def make_roles(db: Any, roles: str) -> None:
    """Create the roles that this server lacks."""
    if await db.fetchval("SELECT count(*) FROM pg_roles WHERE rolname = ANY ($1)", ROLES) < len(ROLES):
        await db.execute(roles)


async def find_missing(db: Any) -> list[str]:
    """Return the stored statements of missing privileges."""
    stored, there = await stored_privileges(db) or [], set(await privileges(db, whole=False))
    return [statement for statement in stored if outline(statement) not in there]


async def restore_privileges(db: Any) -> list[str]:
    """Run the stored statements of missing privileges; return these statements."""
    if await stored_privileges(db) is None:
        owner = await db.fetchval(f"SELECT pg_get_userbyid(nspowner) FROM pg_namespace WHERE oid = {OUR_SCHEMA}")
        if owner != ROLES[0]:
            raise errors.StartupError(RESTORE_AGAIN)
        return []
    missing = await find_missing(db)
    try:
        async with db.transaction():
            await db.execute("SET LOCAL lock_timeout = '5s'")
            for statement in missing:
                await db.execute(statement)
    except asyncpg.PostgresError as error:
        raise errors.StartupError(f"{len(missing)} privileges are missing, as after a restore on another server, and "
                                  f"cannot be restored: {error}; run this command as a superuser") from None
    return missing


async def stored_privileges(db: Any) -> list[str] | None:
    """Return the stored statements of the last migration; None if none are stored."""
    if not await db.fetchval("SELECT EXISTS (SELECT FROM pg_attribute WHERE attname = 'privileges' "
                             "AND attrelid = to_regclass('asyncgate.migrations'))"):
        return None
    lines: list[str] | None = await db.fetchval(
        "SELECT privileges FROM asyncgate.migrations ORDER BY number DESC LIMIT 1")
    return lines


async def store_privileges(db: Any) -> None:
    """Store the statements of the present privileges, as the schema's owner."""
    if await db.fetchval("SELECT EXISTS (SELECT FROM pg_attribute WHERE attname = 'privileges' "
                         "AND attrelid = to_regclass('asyncgate.migrations'))"):
        now = await privileges(db)
        async with db.transaction():
            await db.execute("SET LOCAL ROLE asyncgate_owner")
            await db.execute("UPDATE asyncgate.migrations SET privileges = $1 "
                             "WHERE number = (SELECT max(number) FROM asyncgate.migrations)", now)
