"""What a client asks for at /oauth/authorize (RFC 6749 4.1.1, RFC 7636, RFC 8707, RFC 9207; OAuth 2.1).

Order (RFC 6749 4.1.2.1): the client and its redirect URI are proven first.  Before that, nothing of the request
may lead a browser anywhere, so a refusal is a page.  After that, a refusal goes back to the client.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from msgspec import Struct

from asyncgate import SCOPES
from asyncgate.extras.oauth.clients import look_up_client
from asyncgate.extras.oauth.documents import UnusableDocument
from asyncgate.extras.oauth.redirects import is_same_redirect
from asyncgate.extras.oauth.server import AuthorizationServer
from asyncgate.extras.oauth.wire import Answer, redirect_to
from asyncgate.parts.identity.keys_stored import decode_names, default_scopes
from asyncgate.parts.model import stored_oauth
from asyncgate.parts.model.challenges import MOUNTS
from asyncgate.parts.model.console import CONSOLE_CLIENT

CHALLENGE = re.compile(r"[A-Za-z0-9._~-]{43,128}\Z")        # RFC 7636 4.2
# State is optional: the challenge, which is not, protects a client from a code that it did not ask for (RFC 9700
# 2.1), and the official TypeScript client sends none unless its user makes one.  It is echoed as it came.
MOST_STATE_LENGTH = 1024        # what is kept while somebody signs in has to fit a cookie
OWN_ERRORS = {"request": "request_not_supported", "request_uri": "request_uri_not_supported"}   # OpenID Connect 3.1.2.6


class AuthorizationRequest(Struct, frozen=True):
    """What a client asks for; everything in it is checked."""

    client_id: str
    redirect_uri: str
    state: str | None
    scopes: frozenset[str]
    resource: str
    challenge: str


class BadRequestPage(Exception):
    """A request that must not redirect: the person sees a page; `because` is the real reason, for the audit log."""

    def __init__(self, message: str, because: str | None = None) -> None:
        super().__init__(message)
        self.because = because or message


class RefusedRequest(Exception):
    """A request whose client is told the refusal: `redirect_back(server, no.asked, **no.parameters())`."""

    def __init__(self, asked: AuthorizationRequest, code: str, description: str) -> None:
        super().__init__(description)
        self.asked, self.code = asked, code

    def parameters(self) -> dict[str, str]:
        """Return what the client is told."""
        return {"error": self.code, "error_description": str(self)}


async def read_request(server: AuthorizationServer, query: dict[str, str]) -> tuple[stored_oauth.OAuthClient,
                                                                                    AuthorizationRequest]:
    """Return the client and what it asks for; raises BadRequestPage or RefusedRequest."""
    client = await read_client(server, query.get("client_id", ""))
    redirect_uri = read_redirect(client, query.get("redirect_uri", ""))
    state = query.get("state") or None
    if state is not None and len(state) > MOST_STATE_LENGTH:
        raise BadRequestPage(f"the state of the request is longer than {MOST_STATE_LENGTH} characters")
    back = AuthorizationRequest(client.client_id, redirect_uri, state, frozenset(), "", "")
    if refusal := find_refusal(query):
        raise RefusedRequest(back, *refusal)
    if (resource := find_resource(server.issuer, query.get("resource"))) is None:
        raise RefusedRequest(back, "invalid_target", "resource is not served here; it is one of "
                             + ", ".join(list_resources(server.issuer)))
    if not (scopes := choose_scopes(client, query.get("scope", ""))):
        raise RefusedRequest(back, "invalid_scope", "the client may have none of these scopes; it may ask for "
                             + " ".join(sorted(decode_names(client.scopes or "[]"))))
    return client, msgspec.structs.replace(back, scopes=scopes, resource=resource, challenge=query["code_challenge"])


async def read_client(server: AuthorizationServer, client_id: str) -> stored_oauth.OAuthClient:
    """Return the client that asks."""
    if not client_id:
        raise BadRequestPage("the request names no client_id")
    try:
        client = await look_up_client(server, client_id)
    except UnusableDocument as why:
        raise BadRequestPage(f"the metadata document of this client cannot be used: {why}") from None
    if client is None:
        raise BadRequestPage("no client with this client_id is known here; it may have been removed", "unknown client")
    if client.disabled_at is not None:
        raise BadRequestPage("an administrator has disabled this client", f"client {client.client_id} is disabled")
    return client


def read_redirect(client: stored_oauth.OAuthClient, asked: str) -> str:
    """Return the redirect URI that was asked for, if it is a registered one (D1)."""
    if not asked:
        raise BadRequestPage("the request names no redirect_uri")
    # The console has no consent page: a client at another port of this machine must not get its code.
    same = operator.eq if client.client_id == CONSOLE_CLIENT else is_same_redirect
    if not any(same(asked, known) for known in decode_names(client.redirect_uris)):
        raise BadRequestPage("the redirect_uri of the request is not one that this client has registered")
    return asked


def find_refusal(query: dict[str, str]) -> tuple[str, str] | None:
    """Return the error of the first parameter that is missing or not supported, and its description."""
    for name, code in OWN_ERRORS.items():
        if name in query:
            return code, f"{name} is not supported; send each parameter separately"
    if not (kind := query.get("response_type")):
        return "invalid_request", "response_type is missing; it must be code"
    if kind != "code":
        return "unsupported_response_type", "response_type must be code"
    if query.get("response_mode", "query") != "query":
        return "invalid_request", "response_mode must be query"
    if query.get("code_challenge_method") != "S256":
        return "invalid_request", "PKCE is required: code_challenge_method must be S256"
    if not CHALLENGE.match(query.get("code_challenge", "")):
        return "invalid_request", "PKCE is required: code_challenge has 43 to 128 characters of A-Z a-z 0-9 - . _ ~"
    return None


def choose_scopes(client: stored_oauth.OAuthClient, text: str) -> frozenset[str]:
    """Return the scopes that a client asks for and may have; none if it may have none of them.

    Scopes that this gate does not know (openid, offline_access) are ignored, as are known ones beyond the client's
    own: clients ask for all that the metadata lists.
    """
    allowed = None if client.scopes is None else decode_names(client.scopes)
    asked = SCOPES.intersection(re.split("[ ,]+", text))
    if not asked:
        return default_scopes("agent") if allowed is None else allowed & SCOPES
    return asked if allowed is None else asked & allowed


def list_resources(issuer: str) -> list[str]:
    """Return the URLs that an access token can be for."""
    return [issuer + mount for mount in MOUNTS]


TOOLS = re.compile(r"\?tools=[a-z,]*\Z")      # of the address that a host was given


def find_resource(issuer: str, named: str | None) -> str | None:
    """Return the URL that tokens are for (RFC 8707); by default the MCP endpoint; None for another's."""
    if not named:
        return issuer + "/mcp"
    bare = TOOLS.sub("", named).removesuffix("/")
    return bare if bare in list_resources(issuer) else None


def redirect_back(server: AuthorizationServer, asked: AuthorizationRequest, **parameters: str) -> Answer:
    """Send the browser back to the client, with its state and with who answers (RFC 9207)."""
    told: Iterable[tuple[str, str | None]] = (*parameters.items(), ("state", asked.state), ("iss", server.issuer))
    query = urlencode([(name, value) for name, value in told if value is not None], quote_via=quote)
    joint = "&" if urlsplit(asked.redirect_uri).query else "" if asked.redirect_uri.endswith("?") else "?"
    return redirect_to(asked.redirect_uri + joint + query)
