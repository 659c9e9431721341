"""Sessions of people with clients, and what people let clients do (spec 21.9.1).

A person sees and ends its own sessions; an admin those of its tenant, the operator all.  A client that acts for a
person sees and ends only the session that it has itself, whatever its scopes, unless these are an admin's.  These
operations read and change rows.  They are there while the authorization server is off, too.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Struct

from asyncgate import Caller, Engine, Operation, Work, forbid
from asyncgate.extras.oauth import wire_oauth
from asyncgate.parts.identity.admin import audit_change, operates, read_page
from asyncgate.parts.identity.directory import Directory
from asyncgate.parts.identity.revocations import end_console_sessions, revoke
from asyncgate.parts.identity.session_rows import end_grants, find_grants, is_about_self, last_token_ends
from asyncgate.parts.model import errors, queries, stored_oauth, wire
from asyncgate.parts.model.caller import forbid_scope
from asyncgate.parts.model.console import CONSOLE_CLIENT
from asyncgate.parts.model.views import to_utc, to_utc_or_none

R = TypeVar("R", bound=Struct)


# Who may.


def is_client(caller: Caller) -> bool:
    """Whether a client asks that somebody let in; the console does not count, for there a person asks herself.

    Security: a session of the console counts as its credential does, for any client can begin one with its token.
    """
    return caller.token is not None and caller.token.client_id != CONSOLE_CLIENT


def belongs_to_caller(caller: Caller, row: stored_oauth.Grant | stored_oauth.User) -> bool:
    """Whether a row is the caller's to see and to end without an admin's rights."""
    if not is_client(caller):
        return is_about_self(caller, row)
    assert caller.token is not None
    return (isinstance(row, stored_oauth.Grant) and row.grant_id == caller.token.session_id
            and is_about_self(caller, row))


def may_see(engine: Engine, caller: Caller, row: stored_oauth.Grant | stored_oauth.User) -> bool:
    """Whether a caller may see a person or a session."""
    reach = row.tenant == caller.tenant_id or operates(engine, caller)
    return belongs_to_caller(caller, row) or (caller.sees_all and reach)


def require_person(caller: Caller, admitted: bool) -> None:
    """Refuse a client without an admin's rights: what a person allows is not for one of her clients to manage."""
    if is_client(caller) and not admitted:
        raise forbid(caller, "a client cannot see or end what a person lets other clients do; it can end its own "
                             "session with end_session.  The person does the rest in the console or with a key of her "
                             "own, or an admin does")


def require_right_to_end(caller: Caller, row: stored_oauth.Grant | stored_oauth.User) -> None:
    """Refuse an admin that may only read."""
    if not belongs_to_caller(caller, row) and not caller.unlimited:
        why = "only an admin with the scope admin:write ends the sessions of others"
        raise forbid_scope(caller, why, "admin:write") if caller.role == "admin" else forbid(caller, why)


async def find_people(engine: Engine, caller: Caller, user_id: str | None) -> dict[str, stored_oauth.User]:
    """Return the people whom a caller asks for and may see, by id."""
    directory = Directory(engine)
    if user_id is not None:
        user = await directory.find(stored_oauth.User, user_id)
        return {user_id: user} if user is not None and may_see(engine, caller, user) else {}
    return {user.user_id: user async for user in directory.read(stored_oauth.User) if may_see(engine, caller, user)}


# Operations.


async def list_sessions(engine: Engine, caller: Caller, ask: wire_oauth.ListSessions) -> wire_oauth.Sessions:
    """List your sessions with clients; an admin sees all of its tenant.  Ended ones are listed for some days.

    A client sees its own session only.
    """
    directory = Directory(engine)
    rows, *ends = await read_page(
        engine, caller, ask, ("sessions", ask.user_id), directory.tenant_id, queries.Rows(stored_oauth.Grant),
        lambda grant: (grant.code_used_at is not None and ask.user_id in (None, grant.user_id)
                       and may_see(engine, caller, grant)))
    names = await name_clients(directory, {grant.client_id for grant in rows})
    return wire_oauth.Sessions([wire_oauth.SessionRecord(
        grant.grant_id, grant.user_id, grant.client_id, grant.tenant, grant.principal_kind, grant.principal_id,
        grant.role, msgspec.json.decode(grant.scopes, type=list[str]), grant.resource, to_utc(grant.created_at),
        to_utc(grant.ends_at), names.get(grant.client_id), to_utc_or_none(grant.last_used_at), grant.place or None,
        to_utc_or_none(grant.ended_at), grant.ended_why) for grant in rows], *ends)


async def end_session(engine: Engine, caller: Caller, ask: wire_oauth.EndSession) -> wire.Ok:
    """End a session; its tokens are refused within five seconds.

    A client can end its own session only.
    """
    grant = await Directory(engine).find(stored_oauth.Grant, ask.session_id)
    if grant is None or not may_see(engine, caller, grant):
        raise errors.SessionNotFound(f"no session {ask.session_id}; list_sessions shows the sessions there are")
    require_right_to_end(caller, grant)
    await end_grants(engine, caller, [grant], "session_ended", ask.reason)
    return wire.Ok(True)


async def sign_out_everywhere(engine: Engine, caller: Caller,
                              ask: wire_oauth.SignOutEverywhere) -> wire_oauth.SignedOut:
    """End all your sessions, in the console too, or as an admin those of a user.

    Not for a client that acts for a person.
    """
    people = await require_people(engine, caller, ask.user_id)
    grants = await find_grants(engine, lambda grant: grant.user_id in people)

    def also(work: Work) -> None:
        for user_id in {*people, *(grant.user_id for grant in grants)}:
            until = max((last_token_ends(grant) for grant in grants if grant.user_id == user_id), default=work.now)
            revoke(work, "user", user_id, until, str(caller.principal), ask.reason)
        if ask.user_id is None and engine.settings.console.enabled:
            end_console_sessions(work, caller, everywhere=True, reason=ask.reason)
        audit_change(engine, work, "signed_out_everywhere", "warning", caller, about_users=sorted(people),
                     reason=ask.reason)
    return wire_oauth.SignedOut(await end_grants(engine, caller, grants, "signed_out", ask.reason, also))


async def require_people(engine: Engine, caller: Caller, user_id: str | None) -> dict[str, stored_oauth.User]:
    """Return the users whom a call is about: one that it names, or all who act as the caller."""
    require_person(caller, caller.unlimited)
    if user_id is None and not caller.bound:
        raise errors.InvalidRequest("this credential does not belong to a person, so name the user: user_id")
    people = await find_people(engine, caller, user_id)
    if user_id is None:
        return {id: user for id, user in people.items() if is_about_self(caller, user)}
    if not people:
        raise errors.UserNotFound(f"no user {user_id}; list_sessions shows whose sessions there are")
    require_right_to_end(caller, people[user_id])
    return people


async def list_consents(engine: Engine, caller: Caller, ask: wire_oauth.ListConsents) -> wire_oauth.Consents:
    """List what you let clients do; an admin sees all of its tenant.

    Not for a client that acts for a person.
    """
    require_person(caller, caller.sees_all)
    directory, people = Directory(engine), await find_people(engine, caller, ask.user_id)
    rows, *ends = await read_page(
        engine, caller, ask, ("consents", ask.user_id), directory.tenant_id, queries.Rows(stored_oauth.Consent),
        lambda consent: consent.user_id in people)
    names = await name_clients(directory, {consent.client_id for consent in rows})
    return wire_oauth.Consents([wire_oauth.ConsentRecord(
        row.user_id, row.client_id, msgspec.json.decode(row.scopes, type=list[str]), row.redirect_uri,
        to_utc(row.given_at), names.get(row.client_id)) for row in rows], *ends)


async def withdraw_consent(engine: Engine, caller: Caller, ask: wire_oauth.WithdrawConsent) -> wire_oauth.SignedOut:
    """Stop letting a client act for you, and end your sessions with it.

    Not for a client that acts for a person.
    """
    people = await require_people(engine, caller, ask.user_id)
    grants = await find_grants(engine, lambda grant: grant.client_id == ask.client_id and grant.user_id in people)

    def also(work: Work) -> None:
        for user_id in people:
            if work.find_record(stored_oauth.Consent, user_id, ask.client_id) is not None:
                work.drop_record(stored_oauth.Consent, user_id, ask.client_id)
                audit_change(engine, work, "consent_withdrawn", "warning", caller, about_user=user_id,
                             about_client=ask.client_id, reason=ask.reason)
    keys = [(stored_oauth.Consent, (user_id, ask.client_id)) for user_id in people]
    return wire_oauth.SignedOut(await end_grants(engine, caller, grants, "consent_withdrawn", ask.reason, also, *keys))


# How they are shown.


async def name_clients(directory: Directory, ids: set[str]) -> dict[str, str]:
    """Return the names of clients, by their ids."""
    rows = [await directory.find(stored_oauth.OAuthClient, id) for id in sorted(ids)]
    return {row.client_id: row.name for row in rows if row is not None}


OPERATIONS = [
    Operation(list_sessions, "GET /v1/sessions", "a A", "", "R"),
    Operation(end_session, "POST /v1/sessions/end", "a A", "", "W", idempotent=True),
    Operation(sign_out_everywhere, "POST /v1/sign-out", "a A", "", "W", idempotent=True),
    Operation(list_consents, "GET /v1/consents", "a A", "", "R"),
    Operation(withdraw_consent, "POST /v1/consents/withdraw", "a A", "", "W", idempotent=True),
]
