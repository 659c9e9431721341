"""Enterprise-managed authorization: an identity provider vouches for a person, and nobody is asked in a browser.

A client sends what the provider of its company has signed about its user, an identity assertion (ID-JAG, RFC 7523 2.1
and draft-ietf-oauth-identity-assertion-authz-grant).  Only providers that the operator has marked as
`enterprise_managed` are believed.  Who may come in, and as whom, is decided as for everybody else.  The session that
begins has no refresh token: for another access token the client brings another assertion.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from joserfc.util import urlsafe_b64decode
from msgspec import Meta, Struct

from asyncgate import Work
from asyncgate.extras.oauth import admission, grants, providers
from asyncgate.extras.oauth.clients import note_sign_in
from asyncgate.extras.oauth.requests import find_resource
from asyncgate.extras.oauth.wire import OAuthError
from asyncgate.parts.identity import jwt
from asyncgate.parts.identity.admin import audit_change
from asyncgate.parts.identity.keys_stored import encode_names
from asyncgate.parts.identity.session_rows import describe_grant
from asyncgate.parts.model import stored_oauth

if TYPE_CHECKING:
    from asyncgate.extras.oauth.server import AuthorizationServer

JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"
ID_JAG_PROFILE = "urn:ietf:params:oauth:grant-profile:id-jag"
ASSERTION_TYPE = "oauth-id-jag+jwt"
LONGEST_JAG_SECONDS = 3600.0
# The namespace of sessions that begin with an assertion: its issuer and jti name one session, so it begins only one.
SESSIONS_OF_ASSERTIONS = uuid.UUID("5b0c1f39-7d4e-4f0a-9d3c-2f6a8e1b7c54")


class IdentityAssertion(Struct, frozen=True):
    """The claims of an identity assertion that decide."""

    iss: str
    sub: providers.Subject
    aud: str | list[str]
    client_id: str
    jti: Annotated[str, Meta(min_length=1, max_length=500)]
    exp: Annotated[float, Meta(ge=0)]
    iat: Annotated[float, Meta(ge=0)]
    resource: str | None = None
    scope: str | None = None
    cnf: Any = None                         # these two would bind or limit the token in ways that this gate
    authorization_details: Any = None       # does not enforce


class Vouched(Struct, frozen=True):
    """What a proven assertion says."""

    claims: IdentityAssertion
    who: admission.Person


def is_vouching_on(server: AuthorizationServer) -> bool:
    """Whether some identity provider may vouch for people."""
    return any(provider.enterprise_managed for provider in server.oauth.providers)


def refuse_assertion(because: str) -> OAuthError:
    """Refuse an assertion; the client is not told why."""
    return OAuthError("invalid_grant", "the assertion is unknown, used or expired, or it is not for this client_id and "
                      "this server; get a new one from the identity provider", because=because)


async def begin_vouched_session(server: AuthorizationServer, client: stored_oauth.OAuthClient, assertion: str,
                                asked: frozenset[str] | None, resource: str | None, place: str) -> grants.Allowed:
    """Begin the session of a person for whom an identity provider vouches; raises OAuthError.

    One transaction: of two uses of one assertion only one succeeds.
    """
    if client.auth_method == "none":    # whoever finds an assertion could use it
        raise OAuthError("unauthorized_client", "a client needs a secret or a key to use this grant")
    vouched = await prove_assertion(server, client, assertion)
    resource = read_vouched_resource(server, vouched.claims, resource)
    try:
        user = await admission.admit(server, vouched.who)
        await admission.check_tenant(server, user, client)
    except admission.SignInRefused as refusal:
        raise refuse_assertion(refusal.because) from None
    scopes = grants.limit_scopes(user, client)      # assertion and request may name none, and then set no limit
    for limit in (None if vouched.claims.scope is None else frozenset(vouched.claims.scope.split()), asked):
        scopes = scopes if limit is None else scopes & limit
    if not scopes:
        raise OAuthError("invalid_scope", "the person or the client may have none of these scopes")
    return await keep_session(server, client, user, vouched.claims, scopes, resource, place)


async def keep_session(server: AuthorizationServer, client: stored_oauth.OAuthClient, user: stored_oauth.User,
                       claims: IdentityAssertion,
                       scopes: frozenset[str], resource: str, place: str) -> grants.Allowed:
    """Store a session; its id comes from the assertion, which is so kept against a second use in every gate."""
    grant_id = str(uuid.uuid5(SESSIONS_OF_ASSERTIONS, f"{claims.iss}\0{claims.jti}"))
    seconds = grants.find_access_seconds(server, client, user)

    def begin(work: Work) -> stored_oauth.Grant | None:
        if work.find_record(stored_oauth.Grant, grant_id) is not None or not note_sign_in(work, client):
            return None
        grant = stored_oauth.Grant(grant_id, user.user_id, client.client_id, user.tenant, user.principal_kind,
                                   user.principal_id,
                                   user.role, encode_names(scopes) or "[]", resource, "", "", "", work.now, seconds,
                                   work.now,
                                   work.now + seconds, work.now, place=place, last_used_at=work.now)
        work.keep_record(grant)
        audit_change(server.engine, work, "session_begun", "info", grants.caller_of_grant(server, grant),
                     **describe_grant(grant), scopes=sorted(scopes), issuer=claims.iss)
        return grant
    keys = (stored_oauth.Grant, (grant_id,)), (stored_oauth.OAuthClient, (client.client_id,))
    if (grant := await server.directory.change(begin, *keys)) is None:
        raise refuse_assertion("the assertion was used before, or the client was removed a moment ago")
    return grants.Allowed(grant, scopes, "")


async def prove_assertion(server: AuthorizationServer, client: stored_oauth.OAuthClient, text: str) -> Vouched:
    """Return what an assertion says after every check; raises OAuthError."""
    try:
        provider = find_provider(server, text)
        discovery = await provider.discover()
        content = await provider.verify(text, ASSERTION_TYPE)
        claims = jwt.decode_strictly(content, IdentityAssertion)
        if flaw := find_flaw_of_assertion(claims, discovery.issuer, server.issuer, client, provider.now()):
            raise jwt.Flaw(flaw)
        return Vouched(claims, providers.read_person(provider.config, discovery.issuer, msgspec.json.decode(content)))
    except admission.SignInRefused as refusal:
        raise refuse_assertion(refusal.because) from None
    except jwt.UNFIT as wrong:
        raise refuse_assertion(f"the assertion: {jwt.reason_of(wrong)[1]}") from None


def find_provider(server: AuthorizationServer, text: str) -> providers.OpenId:
    """Return the provider that an assertion says it is from, which proves nothing yet; raises Flaw."""
    if len(text) > jwt.MOST_TOKEN_BYTES or text.count(".") != 2:
        raise jwt.Flaw("this is not a signed JWT, or it is too long")
    issuer = jwt.decode_strictly(urlsafe_b64decode(text.split(".")[1].encode()), dict[str, Any]).get("iss")
    for provider in server.providers.values():
        if isinstance(provider, providers.OpenId) and provider.config.enterprise_managed and provider.is_issuer(issuer):
            return provider
    raise jwt.Flaw("its issuer may not vouch for people here")


def find_flaw_of_assertion(claims: IdentityAssertion, issuer: str, audience: str, client: stored_oauth.OAuthClient,
                           now: float) -> str | None:
    """Return why an assertion is not for this client here and now; None if it is."""
    wrong = {
        "iss is another issuer": claims.iss != issuer,
        "aud is not this server alone": claims.aud not in (audience, [audience]),
        "client_id is another client": claims.client_id != client.client_id,
        "it has cnf or authorization_details": claims.cnf is not None or claims.authorization_details is not None,
        "exp has passed": now >= claims.exp + providers.LEEWAY_SECONDS,
        "exp is too long after iat": claims.exp - claims.iat > LONGEST_JAG_SECONDS,
        "iat is in the future": claims.iat > now + providers.LEEWAY_SECONDS,
    }
    return next((what for what, is_so in wrong.items() if is_so), None)


def read_vouched_resource(server: AuthorizationServer, claims: IdentityAssertion, asked: str | None) -> str:
    """Return the resource of the session: the one of the assertion; raises OAuthError if the client names another."""
    named = find_resource(server.issuer, claims.resource) if claims.resource else asked
    if claims.resource and named is None:
        raise OAuthError("invalid_target", "the assertion is for a resource that is not served here")
    if asked not in (None, named):
        raise OAuthError("invalid_target", "the assertion is for another resource")
    return named or server.issuer + "/mcp"
