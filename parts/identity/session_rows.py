"""The rows of sessions of people with clients: who they are about, and their end, with that of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from asyncgate import Caller, Engine, Work
from asyncgate.parts.identity.admin import audit_change
from asyncgate.parts.identity.directory import Directory, audit_in_tenant
from asyncgate.parts.identity.revocations import REVOCATION_KEYS, revoke
from asyncgate.parts.model import stored_oauth, wire_admin

REVOKED_LONGER_SECONDS = 300.0      # the longest security.jwt.leeway_seconds, for which an expired token may be valid
MOST_ENDED = 100                    # sessions that one transaction ends


def is_about_self(caller: Caller, row: stored_oauth.Grant | stored_oauth.User) -> bool:
    """Whether a row is about the caller itself."""
    return caller.bound and row.tenant == caller.tenant_id and row.principal.same(caller.principal)


async def find_grants(engine: Engine, wanted: Callable[[stored_oauth.Grant], bool]) -> list[stored_oauth.Grant]:
    """Return the sessions that have not ended and that are wanted."""
    return [grant async for grant in Directory(engine).read(stored_oauth.Grant) if grant.ended_at is None
            and wanted(grant)]


def end_grant(engine: Engine, work: Work, grant: stored_oauth.Grant, caller: Caller, event: str,
              severity: wire_admin.Severity,
              reason: str | None = None) -> bool:
    """End a session with its tokens and audit it; return whether it had not ended before.

    The batch must have loaded REVOCATION_KEYS.
    """
    if grant.ended_at is not None:
        return False
    work.keep_record(replace(grant, ended_at=work.now, ended_why=event))
    if grant.last_used_at is not None:      # it gave access tokens
        revoke(work, "session", grant.grant_id, last_token_ends(grant), str(caller.principal), reason or event)
    audit_change(engine, work, event, severity, caller, **describe_grant(grant), reason=reason)
    return True


def last_token_ends(grant: stored_oauth.Grant) -> float:
    """Return when the last access token of a session has expired, by any clock that the gate allows for."""
    return min((grant.last_used_at or 0.0) + grant.access_seconds, grant.ends_at) + REVOKED_LONGER_SECONDS


def describe_grant(grant: stored_oauth.Grant) -> dict[str, str]:
    """Return what the audit log says of a session; its own session is what a caller's line calls session_id."""
    return {"about_session": grant.grant_id, "about_client": grant.client_id, "about_user": grant.user_id,
            "of_tenant": grant.tenant}


async def end_grants(engine: Engine, caller: Caller, grants: list[stored_oauth.Grant], event: str, reason: str | None,
                     also: Callable[[Work], None] = lambda work: None, *keys: Any) -> int:
    """End sessions with their tokens, a hundred in a transaction; `also` runs in the first one; return how many."""
    directory, ended = Directory(engine), 0
    for at in range(0, len(grants) or 1, MOST_ENDED):
        part, first = grants[at:at + MOST_ENDED], at == 0

        def end(work: Work, part: list[stored_oauth.Grant] = part, first: bool = first) -> int:
            if first:
                also(work)
            rows = [row for grant in part if (row := work.find_record(stored_oauth.Grant, grant.grant_id))]
            return sum(end_grant(engine, work, row, caller, event, "warning", reason) for row in rows)
        ended += await directory.change(end, *((stored_oauth.Grant, (grant.grant_id,)) for grant in part),
                                        *REVOCATION_KEYS, *keys)
        for grant in part:
            await audit_in_tenant(engine, caller, grant.tenant, event, "warning", **describe_grant(grant),
                                  reason=reason)
    return ended
