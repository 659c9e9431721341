"""Administration of the people who may sign in.

The rows stand in the operator's tenant; an admin of another tenant sees and changes those of its own people.  They are
there while the authorization server is off, too.
"""

from __future__ import annotations

from functools import partial

import msgspec
from msgspec.structs import replace

from asyncgate import Caller, Engine, Operation, Work, forbid
from asyncgate.extras.oauth import user_rows, wire_oauth
from asyncgate.parts.identity import admin
from asyncgate.parts.identity.directory import Directory, RecordKey, audit_in_tenant
from asyncgate.parts.identity.keys_stored import encode_names
from asyncgate.parts.identity.revocations import LONGEST_VALID_SECONDS, REVOCATION_KEYS, revoke
from asyncgate.parts.identity.session_rows import end_grant, find_grants
from asyncgate.parts.model import errors, queries, stored_oauth, wire
from asyncgate.parts.model.views import to_utc, to_utc_or_none


async def list_users(engine: Engine, caller: Caller, ask: wire_oauth.ListUsers) -> wire_oauth.Users:
    """List the people who may sign in or are invited, also disabled ones."""
    whole = ask.tenant is None and admin.operates(engine, caller)
    tenant = None if whole else await admin.target_tenant(engine, caller, ask.tenant)
    email = None if ask.email is None else ask.email.lower()

    def wanted(row: stored_oauth.User) -> bool:
        return row.accepted_as is None and tenant in (None, row.tenant) and email in (None, row.email)
    rows, *ends = await admin.read_page(engine, caller, ask, ("users", tenant, email), Directory(engine).tenant_id,
                                        queries.Rows(stored_oauth.User), wanted)
    return wire_oauth.Users([as_user_record(row) for row in rows], *ends)


async def invite_user(engine: Engine, caller: Caller, ask: wire_oauth.InviteUser) -> wire_oauth.UserRecord:
    """Invite a person by e-mail address: who signs in with it, verified by an identity provider, may come in.

    The person acts as the human principal with that address.  A repeated call changes an invitation that nobody has
    accepted yet.  Nothing is sent to the person.  An address that a rule of the operator gives to another tenant, by
    itself or by its domain, cannot be invited.  Refused above security.oauth.open_invitations.
    """
    tenant = await admin.tenant_to_issue_for(engine, caller, ask.tenant)
    if not (email := user_rows.read_email(ask.email)):
        raise errors.InvalidRequest(f"{ask.email!r} is not an e-mail address in ASCII, such as ada@example.com")
    user_id, now = user_rows.id_of_email(email), engine.backend.now()
    row = stored_oauth.User(user_id, "", "", email, ask.name or "", tenant, "human", email, ask.role,
                            encode_names(ask.scopes),
                            ask.access_days, str(caller.principal), now)
    user_rows.check_rights(caller, row)
    details = {"user_id": user_id, "email": email, "tenant": tenant, "new_role": ask.role}
    owners = user_rows.name_owners(engine.settings, email)
    if owners and tenant not in owners:
        raise refuse_foreign_address(engine, caller, email, owners)

    def invite(work: Work) -> stored_oauth.User:
        known = work.find_record(stored_oauth.User, user_id)
        void = known is not None and is_open(known) and owners and known.tenant not in owners
        if known is not None and known.tenant != tenant and not void:
            raise errors.InvalidTransition(f"{email} cannot be invited here; ask the operator")
        if known is not None and known.accepted_as is not None:
            raise errors.InvalidTransition(f"{email} is the user {known.accepted_as}; change_user changes its rights")
        work.keep_record(row)
        admin.audit_change(engine, work, "user_invited", "info", caller, **details)
        return row
    async with admin.take_room(engine, tenant, "open_invitations", engine.settings.security.oauth.open_invitations,
                               partial(count_open_invitations, engine, tenant, user_id),
                               "invitations of people who have not come yet",
                               "remove_user ends one that is not needed, list_users shows all"):
        done = await Directory(engine).change(invite, (stored_oauth.User, (user_id,)))
    await audit_in_tenant(engine, caller, tenant, "user_invited", "info", **details)
    return as_user_record(done)


async def count_open_invitations(engine: Engine, tenant: str, besides: str) -> int:
    """Return how many people a tenant has invited who have not come; one that is repeated needs no room."""
    open_ones = {row.user_id async for row in Directory(engine).read(stored_oauth.User) if row.tenant == tenant
                 and is_open(row)}
    return 0 if besides in open_ones else len(open_ones)


def is_open(row: stored_oauth.User) -> bool:
    """Whether a row is an invitation that nobody has accepted."""
    return not row.subject and row.accepted_as is None


def refuse_foreign_address(engine: Engine, caller: Caller, email: str,
                           owners: frozenset[str]) -> errors.InvalidTransition:
    """Refuse to invite an address of another tenant; only the operator, who has made the rules, learns of which."""
    if not admin.operates(engine, caller):        # the same words as for an address that somebody has already
        return errors.InvalidTransition(f"{email} cannot be invited here; ask the operator")
    return errors.InvalidTransition(
        f"security.oauth.admit gives {email} to the tenant {' or '.join(sorted(owners))}, so no "
        "other can invite it; put a rule for this address before the others, or name that "
        "tenant")


async def change_user(engine: Engine, caller: Caller, ask: wire_oauth.ChangeUser) -> wire_oauth.UserRecord:
    """Change a person's role, scopes or token life, or disable the person.

    With other rights, and when disabled, all access tokens of the person are refused within five seconds, and its
    clients have to ask again.
    """
    old = await require_user(engine, caller, ask.user_id)
    sessions = await list_sessions_of(engine, old.user_id) if has_less(old, apply_change(old, ask, 0.0)) else []

    def change(work: Work) -> stored_oauth.User:
        before = require_row(work.find_record(stored_oauth.User, ask.user_id), old)
        after = apply_change(before, ask, work.now)
        if after.disabled_at is None or ask.role is not None or ask.scopes is not None:
            user_rows.check_rights(caller, after)
        work.keep_record(after)
        if (claim := work.find_record(stored_oauth.User,
                                      user_rows.id_of_email(after.email))) and claim.accepted_as == after.user_id:
            work.keep_record(replace(claim, disabled_at=after.disabled_at))    # the same person by another provider
        if has_less(before, after):
            end_access(engine, work, after, sessions, caller, ask.reason)
        admin.audit_change(engine, work, "user_changed", "warning", caller,
                           **describe_change(before, after, ask.reason))
        return after
    done = await Directory(engine).change(change, *keys_of(old), *((stored_oauth.Grant, (id,)) for id in sessions))
    details = describe_change(old, done, ask.reason)
    await audit_in_tenant(engine, caller, done.tenant, "user_changed", "warning", **details)
    return as_user_record(done)


async def remove_user(engine: Engine, caller: Caller, ask: wire_oauth.RemoveUser) -> wire.Ok:
    """Forget a person or an invitation, with all that the person has allowed; its access tokens are refused.

    Whoever still fits a rule of security.oauth.admit can come in again; to keep a person out, disable it instead.  A
    repeated call is refused: the person is unknown.
    """
    old = await require_user(engine, caller, ask.user_id)
    given, sessions = await list_consents(engine, old.user_id), await list_sessions_of(engine, old.user_id)

    def remove(work: Work) -> wire.Ok:
        row = require_row(work.find_record(stored_oauth.User, ask.user_id), old)
        claim = work.find_record(stored_oauth.User, user_rows.id_of_email(row.email))
        for gone in (row, *([claim] if claim and claim.accepted_as == row.user_id else [])):
            work.drop_record(stored_oauth.User, gone.user_id)
        for consent in given:
            work.drop_record(stored_oauth.Consent, consent.user_id, consent.client_id)
        end_access(engine, work, row, sessions, caller, ask.reason)
        admin.audit_change(engine, work, "user_removed", "warning", caller, **describe_removal(row, ask.reason))
        return wire.Ok(True)
    await Directory(engine).change(remove, *keys_of(old),
                                   *((stored_oauth.Consent, (consent.user_id, consent.client_id)) for consent in given),
                                   *((stored_oauth.Grant, (id,)) for id in sessions))
    await audit_in_tenant(engine, caller, old.tenant, "user_removed", "warning", **describe_removal(old, ask.reason))
    return wire.Ok(True)


async def require_user(engine: Engine, caller: Caller, user_id: str) -> stored_oauth.User:
    """Return the row of a person whom a caller may change."""
    if caller.capabilities is not None or caller.task_types is not None:
        raise forbid(caller, "a key that is limited to capabilities or task types cannot administer people")
    row = await Directory(engine).find(stored_oauth.User, user_id)
    if row is None or row.accepted_as is not None or (
            row.tenant != caller.tenant_id and not admin.operates(engine, caller)):
        raise errors.UserNotFound(f"no user {user_id}; list_users shows all users")
    return row


def require_row(row: stored_oauth.User | None, old: stored_oauth.User) -> stored_oauth.User:
    """Return a row as it is in the transaction; raises UserNotFound if it went meanwhile."""
    if row is None or row.accepted_as is not None or row.tenant != old.tenant:
        raise errors.UserNotFound(f"no user {old.user_id}; list_users shows all users")
    return row


def keys_of(row: stored_oauth.User) -> list[RecordKey]:
    """Return what a change of a person needs loaded."""
    return [(stored_oauth.User, (row.user_id,)), (stored_oauth.User, (user_rows.id_of_email(row.email),)),
            *REVOCATION_KEYS]


def apply_change(row: stored_oauth.User, ask: wire_oauth.ChangeUser, now: float) -> stored_oauth.User:
    """Return a person with other rights."""
    if ask.role is not None and ask.role != row.role:
        row = replace(row, role=ask.role, scopes=None)
    if ask.scopes is not None:
        row = replace(row, scopes=encode_names(ask.scopes))
    if ask.access_days is not None:
        row = replace(row, access_days=ask.access_days)
    if ask.disabled is not None and ask.disabled != (row.disabled_at is not None):
        row = replace(row, disabled_at=now if ask.disabled else None)
    return row


def has_less(before: stored_oauth.User, after: stored_oauth.User) -> bool:
    """Whether tokens that a person has allowed before must not be good any more."""
    return (before.role, before.scopes) != (after.role, after.scopes) or (
        before.disabled_at is None and after.disabled_at is not None)


def end_access(engine: Engine, work: Work, row: stored_oauth.User, sessions: list[str], caller: Caller,
               reason: str | None) -> None:
    """End the sessions of a person, and refuse all access tokens that it has allowed."""
    for id in sessions:
        if (grant := work.find_record(stored_oauth.Grant, id)) and grant.user_id == row.user_id:
            end_grant(engine, work, grant, caller, "user_sessions_ended", "info")
    if row.last_seen_at is not None:
        revoke(work, "user", row.user_id, work.now + LONGEST_VALID_SECONDS, str(caller.principal), reason)


async def list_sessions_of(engine: Engine, user_id: str) -> list[str]:
    """Return the ids of the sessions of a person that have not ended."""
    return [grant.grant_id for grant in await find_grants(engine, lambda grant: grant.user_id == user_id)]


def describe_change(before: stored_oauth.User, after: stored_oauth.User, reason: str | None) -> dict[str, object]:
    """Return what the audit log says of a change."""
    changed = {name: getattr(after, name) for name in ("role", "scopes", "access_days", "disabled_at")
               if getattr(after, name) != getattr(before, name)}
    return {"user_id": after.user_id, "email": after.email, "tenant": after.tenant, "changed": changed,
            "reason": reason}


def describe_removal(row: stored_oauth.User, reason: str | None) -> dict[str, object]:
    """Return what the audit log says of a removal."""
    return {"user_id": row.user_id, "email": row.email, "tenant": row.tenant, "reason": reason}


async def list_consents(engine: Engine, user_id: str) -> list[stored_oauth.Consent]:
    """Return what a person has allowed."""
    consents = list[stored_oauth.Consent]()
    async for consent in Directory(engine).read(stored_oauth.Consent, f"{user_id}\0"):
        if consent.user_id != user_id:
            break
        consents.append(consent)
    return consents


def as_user_record(row: stored_oauth.User) -> wire_oauth.UserRecord:
    """Show a person."""
    state: wire_oauth.UserState = "disabled" if row.disabled_at is not None else "invited" if is_open(row) else "active"
    return wire_oauth.UserRecord(
        row.user_id, state, row.tenant, row.principal_kind, row.principal_id, row.role, row.admitted_by,
        to_utc(row.created_at), row.email, row.name, row.issuer, row.subject,
        None if row.scopes is None else msgspec.json.decode(row.scopes, type=list[str]), row.access_days,
        to_utc_or_none(row.last_seen_at), to_utc_or_none(row.disabled_at))


OPERATIONS = [
    Operation(list_users, "GET /v1/users", "A", "admin:read", "R"),
    Operation(invite_user, "POST /v1/users", "A", "admin:write", "W"),
    Operation(change_user, "POST /v1/users/{user_id}", "A", "admin:write", "W"),
    Operation(remove_user, "POST /v1/users/{user_id}/remove", "A", "admin:write", "W"),
]
