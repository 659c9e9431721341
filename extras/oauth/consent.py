"""What a person allows: which client may act for whom, with which scopes, and where the answer goes."""

from __future__ import annotations

from urllib.parse import urlsplit

from asyncgate import Caller, Work
from asyncgate.extras.oauth.documents import list_methods
from asyncgate.extras.oauth.server import AuthorizationServer
from asyncgate.parts.identity.admin import audit_change
from asyncgate.parts.identity.keys_stored import decode_names, encode_names
from asyncgate.parts.model import stored_oauth
from asyncgate.parts.model.connection import is_loopback


def find_place(redirect_uri: str) -> str:
    """Return where a redirect goes, as a person may judge it: a host, or the scheme of an app with its host.

    The port of a loopback address is another one each time, so it is not a part of the place.
    """
    parts = urlsplit(redirect_uri)
    if parts.scheme not in ("http", "https"):
        return f"{parts.scheme}://{parts.netloc}"
    return (parts.hostname or "") if is_local(redirect_uri) else parts.netloc.lower()


def is_local(redirect_uri: str) -> bool:
    """Whether a redirect goes to a client on the person's own machine by HTTP."""
    parts = urlsplit(redirect_uri)
    return parts.scheme in ("http", "https") and is_loopback(parts.hostname or "")


def covers(given: stored_oauth.Consent | None, redirect_uri: str, scopes: frozenset[str]) -> bool:
    """Whether a person has already allowed as much, to a client at the same place."""
    return (given is not None and find_place(given.redirect_uri) == find_place(redirect_uri)
            and scopes <= decode_names(given.scopes))


async def is_allowed(server: AuthorizationServer, client: stored_oauth.OAuthClient, user: stored_oauth.User,
                     redirect_uri: str,
                     scopes: frozenset[str]) -> bool:
    """Whether a person need not be asked."""
    if client.trusted:
        return True
    # Any client on the person's machine can send a request in the name of one that has no secret, and whose redirect
    # goes to a port or a scheme of that machine (RFC 8252 8.6).
    if "none" in list_methods(client) and (is_local(redirect_uri) or urlsplit(redirect_uri).scheme != "https"):
        return False
    given = await server.directory.find(stored_oauth.Consent, user.user_id, client.client_id)
    return covers(given, redirect_uri, scopes)


async def give_consent(server: AuthorizationServer, client: stored_oauth.OAuthClient, user: stored_oauth.User,
                       redirect_uri: str,
                       scopes: frozenset[str]) -> None:
    """Keep what a person allows, with an audit line, in one transaction."""
    key = (user.user_id, client.client_id)

    def give(work: Work) -> None:
        before = work.find_record(stored_oauth.Consent, *key)
        same = before is not None and find_place(before.redirect_uri) == find_place(redirect_uri)
        known = decode_names(before.scopes) if before is not None and same else frozenset()
        work.keep_record(stored_oauth.Consent(*key, encode_names(scopes | known) or "[]", redirect_uri, work.now))
        by = Caller(user.tenant, user.principal, user.role, frozenset())
        audit_change(server.engine, work, "consent_given", "info", by, user_id=user.user_id, tenant=user.tenant,
                     client_id=client.client_id, place=find_place(redirect_uri), scopes=sorted(scopes))
    await server.directory.change(give, (stored_oauth.Consent, key))
    note_consent(server, user, client, "consent_given")


def note_consent(server: AuthorizationServer, user: stored_oauth.User, client: stored_oauth.OAuthClient,
                 event: str) -> None:
    """Tell the log of a tenant that is not the operator's."""
    if user.tenant != server.settings.default_tenant_id:
        server.auditor.note(user.tenant, event, "info", principal_kind=user.principal_kind,
                            principal_id=user.principal_id, user_id=user.user_id, client_id=client.client_id)
