"""The response to leaked credentials, for operators and admins (spec 21.9)."""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec.structs import replace

from asyncgate import Caller, Engine, Needs, Operation, Work
from asyncgate.parts.identity import admin
from asyncgate.parts.identity.directory import Directory
from asyncgate.parts.identity.keys_stored import is_good, retire_key
from asyncgate.parts.identity.notices import list_admins, tell_admins
from asyncgate.parts.identity.revocations import REVOCATION_KEYS
from asyncgate.parts.identity.session_rows import end_grant, find_grants
from asyncgate.parts.model import queries, stored, stored_oauth, wire_admin
from asyncgate.parts.model.clock import instant
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.model.walking import walk

SESSIONS_PER_TRANSACTION = 100
KEYS_PER_CALL = 50        # keys that one call replaces: each needs an Argon2 hash


async def rotate_credentials(engine: Engine, caller: Caller,
                             ask: wire_admin.RotateCredentials) -> wire_admin.RotatedCredentials:
    """Replace all valid keys of a tenant, end all its sessions, and refuse access tokens issued before now.

    People have to sign in again: their refresh tokens are refused, too.  Only this answer shows the new texts.  The old
    keys, also your own, stay valid for overlap_seconds, by default 0.
    While the answer has more, call again with its issued_before.  Spec 21.9.1.
    """
    tenant_id, now = await admin.tenant_to_issue_for(engine, caller, ask.tenant), engine.backend.now()
    before = min(now, now if (given := instant(ask.issued_before)) is None else given)
    old: list[stored.Key] = []      # one that has a successor is not good any more
    async for page in walk(engine.backend, tenant_id, queries.Rows(stored.Key)):
        old += [key for key in page if key.created_at <= before and is_good(key, now)]
        if len(old) > KEYS_PER_CALL:        # one page more than a call replaces
            break
    for key in old[:KEYS_PER_CALL]:
        admin.require_own_rights(caller, key)
    replaced = [key.key_id for key in old[:KEYS_PER_CALL]]
    fresh = dict(zip(replaced, await admin.make_keys(engine, len(replaced)), strict=True))
    # Order: a session that goes on could refresh a token after the time from which tokens are good.
    sessions = await end_sessions_of_tenant(engine, caller, tenant_id, before)
    whom = await list_admins(engine, tenant_id)

    def rotate(work: Work) -> list[wire_admin.IssuedKey]:
        account = work.find_record(stored.Account) or stored.Account("", work.now)
        work.keep_record(replace(account, tokens_since=max(before, account.tokens_since or 0.0)))
        issued = [wire_admin.IssuedKey(text, admin.as_key_record(tenant_id, new)) for key_id,
                  (text, hash, new_id) in fresh.items()
                  if (new := replace_key(work, caller, key_id, new_id, hash, ask.overlap_seconds))]
        admin.audit_change(engine, work, "credentials_rotated", "critical", caller, reason=ask.reason, keys=len(issued),
                           sessions=sessions or None, tokens_since=to_utc(before))
        tell_admins(engine, work, whom, "credentials_rotated", reason=ask.reason, keys=len(issued),
                    sessions=sessions or None, by=str(caller.principal))
        return issued

    def load(needs: Needs, caller: Caller, ask: Any) -> None:
        needs.records |= {(stored.Account, ()), *((stored.Key, (key_id,)) for key_id in fresh)}
    issued = await admin.write_audited(engine, caller, tenant_id, load, rotate)
    return wire_admin.RotatedCredentials(issued, to_utc(before), len(old) > KEYS_PER_CALL, sessions)


async def end_sessions_of_tenant(engine: Engine, caller: Caller, tenant_id: str, before: float) -> int:
    """End the sessions for a tenant that began before a time, with their tokens; return how many."""
    grants = await find_grants(engine, lambda grant: grant.tenant == tenant_id and grant.created_at <= before)
    ids, done = [grant.grant_id for grant in grants], 0
    for at in range(0, len(ids), SESSIONS_PER_TRANSACTION):
        some = ids[at:at + SESSIONS_PER_TRANSACTION]
        done += await Directory(engine).change(partial(end_sessions_by_id, engine, caller, some),
                                               *((stored_oauth.Grant, (id,)) for id in some), *REVOCATION_KEYS)
    return done


def end_sessions_by_id(engine: Engine, caller: Caller, ids: list[str], work: Work) -> int:
    """End these sessions, unless somebody ended them meanwhile."""
    rows = [row for id in ids if (row := work.find_record(stored_oauth.Grant, id)) is not None]
    return sum(end_grant(engine, work, row, caller, "credentials_rotated", "warning") for row in rows)


def replace_key(work: Work, caller: Caller, key_id: str, new_id: str, hash: str, overlap: float) -> stored.Key | None:
    """Replace a key by a new one, unless somebody revoked or rotated it meanwhile."""
    old = work.find_record(stored.Key, key_id)
    if old is None or old.revoked_at is not None or old.rotated_to is not None:
        return None
    new = replace(old, key_id=new_id, hash=hash, not_before=work.now, created_at=work.now, last_used_at=None,
                  places=None, created_by=str(caller.principal))
    work.keep_record(retire_key(old, new_id, work.now, overlap))
    work.keep_record(new)
    return new


OPERATIONS = [
    Operation(rotate_credentials, "POST /v1/credentials/rotate", "A", "admin:write", "W"),
]
