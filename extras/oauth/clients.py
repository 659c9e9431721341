"""The clients that may ask for access, and how each proves at the token endpoint that it is itself (RFC 6749 2.3)."""

from __future__ import annotations

import base64
import hmac
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote_plus

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncgate import Work
from asyncgate.extras.oauth.assertions import read_subject
from asyncgate.extras.oauth.client_admin import hash_client_secret
from asyncgate.extras.oauth.documents import UnusableDocument, list_methods
from asyncgate.extras.oauth.redirects import find_document_url_flaw
from asyncgate.extras.oauth.wire import OAuthError, Request, read_parameters
from asyncgate.parts.model import stored_oauth, wire
from asyncgate.parts.model.console import CONSOLE, CONSOLE_CLIENT

if TYPE_CHECKING:
    from asyncgate.extras.oauth.server import AuthorizationServer

CONSOLE_NAME = "AsyncGate console"
SHORTEST_DAYS = 5               # the shortest life of an access token (spec 21.2.1)
BASIC_CHALLENGE = (b"www-authenticate", b'Basic realm="asyncgate"')
SECRET_METHODS = frozenset({"client_secret_basic", "client_secret_post"})
CLIENT_ID = re.compile(r"[!-~]{1,500}\Z")       # visible ASCII, as RFC 6749 A.1 has it, without blanks
CREDENTIALS = ("client_secret", "client_assertion")
ASSERTION_TYPE = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"       # RFC 7523 2.2


async def find_client(server: AuthorizationServer, client_id: str) -> stored_oauth.OAuthClient | None:
    """Return a client that may ask; None for an unknown or disabled one, or one whose document cannot be read."""
    try:
        client = await look_up_client(server, client_id)
    except UnusableDocument:
        return None
    return None if client is None or client.disabled_at is not None else client


async def look_up_client(server: AuthorizationServer, client_id: str) -> stored_oauth.OAuthClient | None:
    """Return a client, also a disabled one; raises UnusableDocument for a metadata document that cannot be used."""
    if not CLIENT_ID.match(client_id):
        return None
    row = await server.directory.find(stored_oauth.OAuthClient, client_id)
    if client_id == CONSOLE_CLIENT:
        return make_console_client(server, row) if server.settings.console.enabled else None
    if row.origin != "document" if row else find_document_url_flaw(client_id):
        return row
    return await server.documents.find(client_id, row)


def note_sign_in(work: Work, client: stored_oauth.OAuthClient) -> bool:
    """Note that somebody has signed in with a client; return whether it may still be used.

    Its key must be loaded: `(OAuthClient, (client.client_id,))`.  Only now a metadata document becomes a row, and so
    does the console.
    """
    known = client.origin == "document" or client.client_id == CONSOLE_CLIENT
    row = work.find_record(stored_oauth.OAuthClient, client.client_id) or (client if known else None)
    if row is None or row.disabled_at is not None:      # it was removed or disabled while somebody signed in
        return False
    work.keep_record(replace(row, last_used_at=work.now))
    return True


def make_console_client(server: AuthorizationServer, row: stored_oauth.OAuthClient | None) -> stored_oauth.OAuthClient:
    """Return the gate's own console, a client that nobody has to register; an admin may disable its row.

    Its person is asked for no consent, so its redirect is compared to the letter: see `read_redirect`.
    """
    now = server.engine.backend.now()
    row = row or stored_oauth.OAuthClient(
        CONSOLE_CLIENT, "registered", CONSOLE_NAME, "[]", None, "none", None, None, None, True, True, None, now,
        str(wire.Principal("system", "asyncgate")), now)
    return replace(row, name=CONSOLE_NAME, redirect_uris=msgspec.json.encode([f"{server.issuer}{CONSOLE}/"]).decode(),
                   scopes=None, auth_method="none", secret_hash=None, tenant=None, trusted=True,
                   access_days=SHORTEST_DAYS)


# Authentication at the token endpoint.


class Presented(Struct, frozen=True):
    """How a request says which client it is from."""

    client_id: str
    method: str                 # none, client_secret_basic, client_secret_post or private_key_jwt
    credential: str = ""        # the secret or the assertion

    def __repr__(self) -> str:
        return f"<Presented {self.client_id} {self.method}>"    # the credential stays out of logs and tracebacks


async def authenticate_client(server: AuthorizationServer, request: Request,
                              form: dict[str, str]) -> stored_oauth.OAuthClient:
    """Return the client that a request to the token endpoint is from; raises OAuthError.

    Everything that does not fit is the same refusal for the caller; the audit log has the reason.
    """
    shown = read_presented(request, form)
    try:
        client = await look_up_client(server, shown.client_id)
    except UnusableDocument as why:
        raise refuse_client(shown, f"its metadata document cannot be used: {why}") from None
    if client is None:
        raise refuse_client(shown, "unknown client")
    if mismatch := find_mismatch(client, shown):
        raise refuse_client(shown, mismatch)
    if shown.method == "private_key_jwt" and (flaw := await server.assertions.find_flaw(client, shown.credential)):
        raise refuse_client(shown, flaw)
    return client


def read_presented(request: Request, form: dict[str, str]) -> Presented:
    """Return the one credential of a request; raises OAuthError for none, two, or one in the query."""
    named = form.get("client_id", "")
    query = read_parameters(request.scope["query_string"])
    if any(name in query for name in CREDENTIALS):      # a query is written into logs of proxies
        raise OAuthError("invalid_request", "send credentials in the body or the Authorization header, not in the URL")
    given = [name for name in CREDENTIALS if form.get(name)]
    headers = [value for name, value in request.headers if name == b"authorization"]
    if len(given) + len(headers) > 1:
        raise OAuthError("invalid_request", "send one credential of the client, not two (RFC 6749 2.3)")
    if headers:
        return read_basic(headers[0], named)
    if given == ["client_assertion"]:
        text = form["client_assertion"]
        if form.get("client_assertion_type") != ASSERTION_TYPE:
            raise OAuthError("invalid_client", f"client_assertion_type must be {ASSERTION_TYPE}", 401)
        return Presented(named or read_subject(text), "private_key_jwt", text)      # RFC 7521 4.2
    if not named:
        raise OAuthError("invalid_client", "the request names no client_id", 401)
    if given == ["client_secret"]:
        return Presented(named, "client_secret_post", form["client_secret"])
    return Presented(named, "none")


def read_basic(header: bytes, named: str) -> Presented:
    """Read HTTP Basic authentication; id and secret are form-encoded in it (RFC 6749 2.3.1)."""
    scheme, _, text = header.partition(b" ")
    try:
        if scheme.lower() != b"basic":
            raise ValueError("another scheme")
        id, colon, secret = base64.b64decode(text.strip(), validate=True).decode("ascii").partition(":")
        shown = Presented(unquote_plus(id, errors="strict"), "client_secret_basic",
                          unquote_plus(secret, errors="strict"))
    except ValueError:
        raise OAuthError("invalid_client", "the Authorization header does not hold the id and secret of a client", 401,
                         headers=[BASIC_CHALLENGE]) from None
    if not colon or not id or (named and named != shown.client_id):
        raise OAuthError("invalid_client", "the Authorization header and client_id name different clients, or none",
                         401, headers=[BASIC_CHALLENGE])
    return shown


def find_mismatch(client: stored_oauth.OAuthClient, shown: Presented) -> str | None:
    """Return why a request is not from the client that it names, as far as its row says."""
    if client.disabled_at is not None:
        return "the client is disabled"
    if not uses_method(client, shown.method):
        return f"the client authenticates by {client.auth_method}, not by {shown.method}"
    if shown.method in SECRET_METHODS and not hmac.compare_digest(hash_client_secret(shown.credential),
                                                                  client.secret_hash or ""):
        return "the secret of the client is wrong"
    return None


def uses_method(client: stored_oauth.OAuthClient, method: str) -> bool:
    """Whether a client may prove itself in a way; where a secret is carried is up to the client."""
    if client.auth_method in SECRET_METHODS:
        return method in SECRET_METHODS
    return method in list_methods(client)


def refuse_client(shown: Presented, why: str) -> OAuthError:
    """Refuse a client: it must register again or be told its id (RFC 6749 5.2)."""
    headers = [BASIC_CHALLENGE] if shown.method == "client_secret_basic" else []
    return OAuthError("invalid_client", "the client is unknown here, was removed, or did not prove that it is itself; "
                      "register it again", 401, f"{why} ({shown.client_id[:200]})", headers)
