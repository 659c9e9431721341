"""Clients that register themselves (RFC 7591), and clients that nobody uses any more.

Registration is for clients that cannot be named by a metadata document.  It is off unless a setting turns it on: it
lets strangers write rows.  So it is bounded for each network and for the gate, and a client that nobody signs in with
is forgotten after a week, or after an hour where there are too many.
"""

from __future__ import annotations

import secrets
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from starlette.routing import Route

from asyncgate import SCOPES, Engine, Work
from asyncgate.extras.oauth import client_admin, wire
from asyncgate.extras.oauth.documents import MOST_NAME_LENGTH
from asyncgate.extras.oauth.redirects import check_redirects
from asyncgate.extras.oauth.server import AuthorizationServer, Endpoint
from asyncgate.parts.identity.directory import Directory
from asyncgate.parts.model import stored_oauth
from asyncgate.parts.model.connection import group_address
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.process.kit import Rate

REGISTER_PATH = "/oauth/register"
HOUR_SECONDS = 3600.0
PER_NETWORK, PER_GATE_AND_HOUR = 20, 200    # registrations in an hour
MOST_UNUSED = 1000                          # registered clients that nobody has signed in with
CROWDED_SECONDS = HOUR_SECONDS              # an unused client is kept so long when there are too many
# A session lasts 90 days at most, so nothing of a client is in use that long after the last sign-in.
LEFT_SECONDS = 100.0 * DAY_SECONDS
METHODS = ("none", "client_secret_basic", "client_secret_post")
GRANTS = ("authorization_code", "refresh_token")


class Registration(Struct):
    """What a client says of itself (RFC 7591 2); members that the gate does not need are ignored."""

    redirect_uris: list[str]
    client_name: str | None = None
    token_endpoint_auth_method: str | None = None
    grant_types: list[str] | None = None
    response_types: list[str] | None = None
    scope: str | None = None


def routes(server: AuthorizationServer) -> list[Route]:
    """Return the path of registration, if the settings turn it on; any page may call it."""
    if not server.oauth.dynamic_registration:
        return []
    return [Route(REGISTER_PATH, Endpoint(server, {"POST": Registrar(server).register}, open=True))]


class Registrar:
    """Registers clients, so many in an hour."""

    def __init__(self, server: AuthorizationServer) -> None:
        self.server, self.clock = server, time.monotonic
        self.networks = Rate(PER_NETWORK, HOUR_SECONDS, lambda: self.clock())
        self.gate = Rate(PER_GATE_AND_HOUR, HOUR_SECONDS, lambda: self.clock())

    async def register(self, server: AuthorizationServer, request: wire.Request) -> wire.Answer:
        """Register a client (RFC 7591 3.1)."""
        registration = read_registration(request)
        if not (self.networks.take(group_address(request.address)) and self.gate.take()):
            raise wire.OAuthError("temporarily_unavailable", "too many clients have registered; try again later", 429,
                                  headers=[(b"retry-after", b"3600")])
        if await is_crowded(server.engine):
            raise wire.OAuthError("temporarily_unavailable",
                                  "too many clients are registered that nobody uses; try again "
                                  "later", 503, headers=[(b"retry-after", b"3600")])
        method = registration.token_endpoint_auth_method or "client_secret_basic"       # RFC 7591 2
        secret = None if method == "none" else secrets.token_urlsafe(client_admin.CLIENT_SECRET_BYTES)
        client = await store_registration(server, registration, method, secret)
        server.auditor.note(server.settings.default_tenant_id, "client_registered", "info", place=request.address,
                            about_client=client.client_id, client_name=client.name, by="itself")
        return wire.Answer(201, encode_json(describe_registration(registration, client, secret)), wire.JSON)


def read_registration(request: wire.Request) -> Registration:
    """Read what a client says of itself; raises OAuthError with the codes of RFC 7591 3.2.2."""
    types = [value.partition(b";")[0].strip().lower() for name, value in request.headers if name == b"content-type"]
    if types != [wire.JSON]:
        raise wire.OAuthError("invalid_client_metadata", f"send the metadata as {wire.JSON.decode()}")
    try:
        registration = msgspec.json.decode(request.body, type=Registration)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
        code = "invalid_redirect_uri" if "redirect_uris" in str(wrong) else "invalid_client_metadata"
        raise wire.OAuthError(code, f"the metadata is invalid: {wrong}"[:300]) from None
    if why := check_redirects(registration.redirect_uris):
        raise wire.OAuthError("invalid_redirect_uri", why)
    if registration.token_endpoint_auth_method not in (None, *METHODS):
        raise wire.OAuthError("invalid_client_metadata", f"token_endpoint_auth_method is one of {', '.join(METHODS)}")
    if registration.grant_types is not None and GRANTS[0] not in registration.grant_types:
        raise wire.OAuthError("invalid_client_metadata", f"grant_types must contain {GRANTS[0]}")
    if registration.response_types is not None and "code" not in registration.response_types:
        raise wire.OAuthError("invalid_client_metadata", "response_types must contain code")
    return registration


async def store_registration(server: AuthorizationServer, registration: Registration, method: str,
                             secret: str | None) -> stored_oauth.OAuthClient:
    """Store a client that has registered itself.

    What it says of scopes means no limit: people decide what they allow, and clients ask for more as they learn more.
    """
    name = (registration.client_name or "").replace("\0", "")[:MOST_NAME_LENGTH] or (
        urlsplit(registration.redirect_uris[0]).hostname or "a client")

    def store(work: Work) -> stored_oauth.OAuthClient:
        client = stored_oauth.OAuthClient(
            work.new_id(), "dynamic", name, client_admin.encode_list(registration.redirect_uris), None,
            method,  # type: ignore[arg-type]
            client_admin.hash_client_secret(secret) if secret else None, None, None, trusted=False, pinned=False,
            access_days=None, created_at=work.now, created_by="itself", updated_at=work.now)
        work.keep_record(client)
        return client
    return await server.directory.change(store)


def describe_registration(registration: Registration, client: stored_oauth.OAuthClient,
                          secret: str | None) -> dict[str, Any]:
    """Return what a client is told of its registration (RFC 7591 3.2.1)."""
    scopes = sorted(SCOPES.intersection((registration.scope or "").replace(",", " ").split()))
    return {
        "client_id": client.client_id, "client_id_issued_at": int(client.created_at), "client_name": client.name,
        "redirect_uris": registration.redirect_uris, "token_endpoint_auth_method": client.auth_method,
        "grant_types": [grant for grant in GRANTS if grant in (registration.grant_types or GRANTS)],
        "response_types": ["code"], **({"scope": " ".join(scopes)} if scopes else {}),
        **({"client_secret": secret, "client_secret_expires_at": 0} if secret else {})}


# What nobody uses.


async def is_crowded(engine: Engine) -> bool:
    """Whether there is no room for one more client that nobody has used yet; makes room if it can."""
    if await count_unused(engine) < MOST_UNUSED:
        return False
    await forget_clients(engine, CROWDED_SECONDS)
    return await count_unused(engine) >= MOST_UNUSED


async def count_unused(engine: Engine) -> int:
    """Count the clients that came by themselves, and that nobody has ever signed in with."""
    return sum(client.last_used_at is None for client in await list_own(engine))


async def list_own(engine: Engine) -> list[stored_oauth.OAuthClient]:
    """Return the clients that came by themselves, and that no administrator has said anything of."""
    return [client async for client in Directory(engine).read(stored_oauth.OAuthClient) if is_own_registration(client)]


def is_own_registration(client: stored_oauth.OAuthClient) -> bool:
    """Whether a client came by itself, and no administrator has said anything of it."""
    return client.origin != "registered" and not (client.pinned or client.trusted) and (
        client.disabled_at, client.tenant, client.scopes, client.access_days) == (None, None, None, None)


def is_left(client: stored_oauth.OAuthClient, now: float, unused_seconds: float) -> bool:
    """Whether nobody uses a client any more."""
    if not is_own_registration(client):
        return False
    if client.last_used_at is None:
        return client.created_at <= now - unused_seconds
    return client.last_used_at <= now - LEFT_SECONDS


async def forget_clients(engine: Engine, unused_seconds: float) -> int:
    """Forget clients that nobody uses any more; return how many."""
    return await Directory(engine).drop(stored_oauth.OAuthClient, lambda row, now: is_left(row, now, unused_seconds))


async def prune_clients(engine: Engine) -> int:
    """Forget clients that nobody uses any more, in the one process that leads; return how many."""
    days = engine.settings.security.oauth.client_retention_days
    return await forget_clients(engine, days * DAY_SECONDS) if await engine.leads("clients") else 0
