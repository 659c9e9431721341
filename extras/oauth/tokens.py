"""The token endpoint: codes and refresh tokens against access tokens (RFC 6749, 7009; OAuth 2.1)."""

from __future__ import annotations

import re
import secrets
import uuid
from typing import Any

from starlette.routing import Route

from asyncgate import Caller, Work
from asyncgate.extras.oauth import grants, wire
from asyncgate.extras.oauth.clients import authenticate_client
from asyncgate.extras.oauth.enterprise import JWT_BEARER, begin_vouched_session, is_vouching_on
from asyncgate.extras.oauth.requests import find_resource
from asyncgate.extras.oauth.server import AuthorizationServer, Endpoint
from asyncgate.parts.identity import jwt
from asyncgate.parts.identity.admin import audit_change
from asyncgate.parts.identity.directory import audit_in_tenant
from asyncgate.parts.identity.keys import place_of
from asyncgate.parts.identity.revocations import REVOCATION_KEYS, RevocationSet, revoke
from asyncgate.parts.identity.session_rows import REVOKED_LONGER_SECONDS, describe_grant
from asyncgate.parts.model import stored, stored_oauth

TOKEN_PATH, REVOKE_PATH = "/oauth/token", "/oauth/revoke"
# What must not stand in a URL: proxies write URLs into their logs.
SECRET_PARAMETERS = frozenset({"code", "code_verifier", "refresh_token", "token", "client_secret", "client_assertion"})
NO_CACHE = (b"pragma", b"no-cache")         # RFC 6749 5.1; every answer of the gate has cache-control: no-store
# What the transaction itself has written into the operator's log.
IN_TRANSACTION = frozenset({"session_begun", "session_ended", "code_replay", "refresh_replay"})
ADVICE = {
    "client_credentials": "; a worker uses an issued key: `asyncgate issue-key`",
    "password": "; people sign in at /oauth/authorize",
}


def routes(server: AuthorizationServer) -> list[Route]:
    """Return the paths of tokens."""
    return [Route(TOKEN_PATH, Endpoint(server, {"POST": give_token}, open=True)),
            Route(REVOKE_PATH, Endpoint(server, {"POST": take_back_token}, open=True))]


async def give_token(server: AuthorizationServer, request: wire.Request) -> wire.Answer:
    """Answer a request for a token."""
    form = read_form(request)
    kind = form.get("grant_type", "")
    if kind == "authorization_code":
        return await answer_code(server, request, form)
    if kind == "refresh_token":
        return await answer_refresh(server, request, form)
    if kind == JWT_BEARER and is_vouching_on(server):
        client = await authenticate_client(server, request, form)
        if "assertion" not in form:
            raise wire.OAuthError("invalid_request", "assertion is missing")
        allowed = await begin_vouched_session(server, client, form["assertion"], read_scopes(form.get("scope")),
                                              read_resource(server, form), place_of(request.address))
        return answer_outcome(server, allowed.grant, allowed, "session_begun")
    if not kind:
        raise wire.OAuthError("invalid_request", "grant_type is missing; it is authorization_code or refresh_token")
    raise wire.OAuthError("unsupported_grant_type",
                          "grant_type is authorization_code or refresh_token" + ADVICE.get(kind, ""))


def read_form(request: wire.Request) -> dict[str, str]:
    """Return the parameters that have a value (RFC 6749 3.2); raises OAuthError for a secret in the URL."""
    if names := SECRET_PARAMETERS & wire.read_parameters(request.scope["query_string"]).keys():
        raise wire.OAuthError("invalid_request", f"send {min(names)} in the body, not in the URL")
    return {name: value for name, value in request.form().items() if value}


async def answer_code(server: AuthorizationServer, request: wire.Request, form: dict[str, str]) -> wire.Answer:
    """Exchange a code for the first tokens of a session."""
    client = await authenticate_client(server, request, form)
    for name in ("code", "redirect_uri", "code_verifier"):
        if name not in form:
            raise wire.OAuthError("invalid_request", f"{name} is missing")
    code = form["code"]
    grant = await require_grant(server, grants.read_grant_id(grants.CODE, code), grants.refuse_code("no such code"))
    first = grants.write_refresh(server.keys.secret("refresh"), grant.grant_id,
                                 grants.encode_bytes(secrets.token_bytes(32)))
    sent = grants.Exchange(code, client.client_id, form["redirect_uri"], form["code_verifier"],
                           read_resource(server, form),
                           place_of(request.address), first)
    done = await change_grant(server, grant, lambda work: grants.exchange_code(server, work, sent))
    return answer_outcome(server, grant, done, "session_begun")


async def answer_refresh(server: AuthorizationServer, request: wire.Request, form: dict[str, str]) -> wire.Answer:
    """Exchange a refresh token for an access token and the next refresh token."""
    client = await authenticate_client(server, request, form)
    if "refresh_token" not in form:
        raise wire.OAuthError("invalid_request", "refresh_token is missing")
    grant = await require_grant(server, grants.read_grant_id(grants.REFRESH, form["refresh_token"]),
                                grants.refuse_session("no such session"))
    sent = grants.Renewal(form["refresh_token"], client.client_id, read_scopes(form.get("scope")),
                          read_resource(server, form),
                          place_of(request.address), grants.encode_bytes(secrets.token_bytes(32)))
    done = await change_grant(server, grant, lambda work: grants.renew(server, work, sent))
    return answer_outcome(server, grant, done, "token_refreshed")


async def change_grant(server: AuthorizationServer, grant: stored_oauth.Grant,
                       run: Any) -> grants.Allowed | grants.Denial:
    """Let `run` change a session in one transaction, with all rows that its rules look at."""
    done: grants.Allowed | grants.Denial = await server.directory.change(
        run, (stored_oauth.Grant, (grant.grant_id,)), (stored_oauth.User, (grant.user_id,)),
        (stored_oauth.OAuthClient, (grant.client_id,)),
        *REVOCATION_KEYS)
    return done


def read_resource(server: AuthorizationServer, form: dict[str, str]) -> str | None:
    """Return the resource that a request names (RFC 8707 2.2)."""
    if "resource" not in form:
        return None
    if (resource := find_resource(server.issuer, form["resource"])) is None:
        raise wire.OAuthError("invalid_target", "the resource is not one of this gate")
    return resource


def read_scopes(text: str | None) -> frozenset[str] | None:
    """Return the scopes that a request names, separated by blanks or commas."""
    return None if text is None else frozenset(filter(None, re.split("[ ,]+", text)))


async def require_grant(server: AuthorizationServer, grant_id: str | None,
                        unknown: grants.Denial) -> stored_oauth.Grant:
    """Return a session that this gate serves; raises OAuthError, for an unknown one the denial that is given."""
    if grant_id is None or (grant := await server.directory.find(stored_oauth.Grant, grant_id)) is None:
        raise unknown.error()
    await require_served(server, grant)
    return grant


async def require_served(server: AuthorizationServer, grant: stored_oauth.Grant) -> None:
    """Refuse a session for a resource or a tenant that this gate does not serve any more."""
    if find_resource(server.issuer, grant.resource) is None:
        raise grants.refuse_session(f"the resource {grant.resource} is not served any more").error()
    account = await server.engine.backend.record(grant.tenant, stored.Account)
    if account is None and grant.tenant != server.settings.default_tenant_id and (
            grant.tenant not in await server.engine.backend.tenants()):
        raise grants.refuse_session("the tenant was removed").error()
    if account is not None and account.suspended_at is not None:
        raise grants.refuse_session("the tenant is suspended").error()
    if account is not None and account.tokens_since is not None and grant.created_at < account.tokens_since:
        raise grants.refuse_session("all credentials of the tenant were rotated since the session began").error()


def answer_outcome(server: AuthorizationServer, grant: stored_oauth.Grant, done: grants.Allowed | grants.Denial,
                   event: str) -> wire.Answer:
    """Answer with tokens, or with the refusal; tell the person's tenant of it."""
    if isinstance(done, grants.Denial):
        if done.event:
            tell_tenant(server, grant, done.event, "critical" if done.event.endswith("replay") else "warning")
        raise done.error()
    tell_tenant(server, grant, event, "info")
    if done.moved:
        tell_tenant(server, grant, "unusual_address", "warning")
    token, seconds = sign_access_token(server, done)
    refresh = {"refresh_token": done.refresh_token} if done.refresh_token else {}
    return wire.answer_json({"access_token": token, "token_type": "Bearer", "expires_in": seconds, **refresh,
                             "scope": " ".join(sorted(done.scopes))}, NO_CACHE)


def tell_tenant(server: AuthorizationServer, grant: stored_oauth.Grant, event: str, severity: Any) -> None:
    """Note in the log of the person's tenant what happened to a session; of a theft also tell its admins."""
    details = {**describe_grant(grant), "principal_kind": grant.principal_kind, "principal_id": grant.principal_id}
    if grant.tenant != server.settings.default_tenant_id or event not in IN_TRANSACTION:
        server.auditor.note(grant.tenant, event, severity, **details)
    if severity == "critical":
        server.auditor.notice(grant.tenant, event, session_id=grant.grant_id, client_id=grant.client_id,
                              principal=str(grant.principal))


def sign_access_token(server: AuthorizationServer, allowed: grants.Allowed) -> tuple[str, int]:
    """Return an access token (RFC 9068), and for how many seconds it is valid."""
    grant, now = allowed.grant, allowed.grant.last_used_at or 0.0
    ends_at = min(now + grant.access_seconds, grant.ends_at)
    # `iat` has fractions of a second, so that a token issued right after a revocation is not taken for an older one.
    return server.keys.sign({
        "iss": server.issuer, "aud": ["asyncgate-api", grant.resource], "sub": grant.user_id, "sid": grant.grant_id,
        "jti": str(uuid.uuid4()), "client_id": grant.client_id, "scope": " ".join(sorted(allowed.scopes)),
        "tenant_id": grant.tenant, "principal_kind": grant.principal_kind, "principal_id": grant.principal_id,
        "role": grant.role, "iat": now, "nbf": now, "exp": ends_at}), int(ends_at - now)


# Revocation (RFC 7009).


async def take_back_token(server: AuthorizationServer, request: wire.Request) -> wire.Answer:
    """Revoke a token of the client that asks: a refresh token with its session, an access token alone.

    An unknown token is as good as revoked.  The text says what a token is, so token_type_hint is ignored.
    """
    form = read_form(request)
    client = await authenticate_client(server, request, form)
    if not (token := form.get("token", "")):
        raise wire.OAuthError("invalid_request", "token is missing")
    if (grant_id := grants.read_grant_id(grants.REFRESH, token)) is not None:
        if (grant := await server.directory.find(stored_oauth.Grant, grant_id)) is not None:
            done = await change_grant(server, grant,
                                      lambda work: grants.end_by_token(server, work, token, client.client_id))
            if isinstance(done, grants.Denial):
                tell_tenant(server, grant, done.event, "warning")
                raise done.error()
            tell_tenant(server, grant, "session_ended", "info")
    elif (claims := await read_own_token(server, token)) is not None:
        await revoke_access_token(server, claims, client.client_id)
    return wire.Answer(200, headers=[NO_CACHE])


async def read_own_token(server: AuthorizationServer, token: str) -> jwt.Claims | None:
    """Return the claims of an access token that this gate has issued and that has not expired; None for others."""
    try:
        if len(token) > jwt.MOST_TOKEN_BYTES:
            return None
        claims = jwt.decode_strictly(jwt.verify_signature(token, await server.keys.find(jwt.key_id(token))), jwt.Claims)
    except jwt.UNFIT:
        return None
    return claims if claims.iss == server.issuer and claims.exp > server.engine.backend.now() else None


async def revoke_access_token(server: AuthorizationServer, claims: jwt.Claims, client_id: str) -> None:
    """Revoke one access token, once."""
    if claims.client_id != client_id:
        raise wire.OAuthError("invalid_grant", "the token is another client's")
    known, jti = server.engine.find_extension(RevocationSet), claims.jti or ""
    if known is not None:
        await known.freshen()
        if known.has("token", jti) or known.has("session", claims.sid):
            return      # so that nobody fills the table with one token
    by = Caller(server.settings.default_tenant_id, claims.principal, claims.role or "agent", frozenset())
    details = {"about_token": jti, "about_session": claims.sid, "about_client": client_id,
               "of_tenant": claims.tenant_id}

    def take_back(work: Work) -> None:
        revoke(work, "token", jti, claims.exp + REVOKED_LONGER_SECONDS, str(by.principal), "by the client")
        audit_change(server.engine, work, "token_revoked", "info", by, **details)
    await server.directory.change(take_back, *REVOCATION_KEYS)
    await audit_in_tenant(server.engine, by, claims.tenant_id, "token_revoked", "info", **details)
