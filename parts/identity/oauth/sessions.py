"""Sessions of people with programs, as people and admins see and end them (spec 21.9.1).

The rows are there while the authorization server is off, too, so nothing heavy is imported here.
"""

from __future__ import annotations

from msgspec.structs import replace

from asyncgate import Caller, Engine, Work
from asyncgate.parts.identity.admin import audit_change
from asyncgate.parts.identity.oauth.revocations import revoke
from asyncgate.parts.model.stored_oauth import Grant
from asyncgate.parts.model.wire_admin import Severity

REVOKED_LONGER_SECONDS = 300.0      # the longest security.jwt.leeway_seconds, for which an expired token may be valid


def end_grant(engine: Engine, work: Work, grant: Grant, caller: Caller, why: str, severity: Severity) -> bool:
    """End a session with its tokens, and audit it under the name `why`; return whether it had not ended before.

    The batch must have loaded REVOCATION_KEYS.
    """
    if grant.ended_at is not None:
        return False
    if grant.last_used_at is not None:      # it gave an access token, the last of which is valid until then
        until = min(grant.last_used_at + grant.access_seconds, grant.ends_at)
        revoke(work, "session", grant.grant_id, until + REVOKED_LONGER_SECONDS, str(caller.principal), why)
    work.keep_record(replace(grant, ended_at=work.now, ended_why=why))
    audit_change(engine, work, why, severity, caller, **describe_grant(grant))
    return True


def describe_grant(grant: Grant) -> dict[str, str]:
    """Return what the audit log says of a session."""
    return {"session_id": grant.grant_id, "client_id": grant.client_id, "user_id": grant.user_id,
            "of_tenant": grant.tenant}
