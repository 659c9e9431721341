"""The authorization server of a gate: what its parts share, and its paths."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from starlette.routing import Route

from asyncgate import Engine
from asyncgate.extras.oauth import wire, wire_oauth
from asyncgate.extras.oauth.assertions import Assertions
from asyncgate.extras.oauth.documents import Documents
from asyncgate.extras.oauth.revoking import PublishedKeys
from asyncgate.parts.identity.audit import Auditor, visit
from asyncgate.parts.identity.directory import Directory
from asyncgate.parts.identity.jwt import AccessTokens, Issuer
from asyncgate.parts.identity.signing import SigningKeys
from asyncgate.parts.model import connection, errors
from asyncgate.parts.model.challenges import MOUNTS
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.settings import OAuth, Settings
from asyncgate.parts.model.views import to_utc, to_utc_or_none

if TYPE_CHECKING:
    from asyncgate.extras.oauth.providers import Provider
    from asyncgate.parts.identity.guard import Guard

LONGEST_LIFE_SECONDS = 90 * DAY_SECONDS     # of an access token (spec 21.2.1)
Handler = Callable[["AuthorizationServer", wire.Request], Awaitable[wire.Answer]]
# For documents and endpoints that any page may read: they take no cookie, and give nothing to whoever has no secret.
ANY_ORIGIN = [(b"access-control-allow-origin", b"*")]
PREFLIGHT = [(b"access-control-allow-headers", b"authorization, content-type, mcp-protocol-version"),
             (b"access-control-max-age", b"86400")]


class Sender(Protocol):
    """Sends one complete answer with the headers of every answer; those in `more` override them."""

    async def __call__(self, send: connection.Send, scope: connection.Scope, status: int, body: bytes,
                       more: Iterable[tuple[bytes, bytes]] = (), type: tuple[bytes, bytes] = ...) -> None: ...


class AuthorizationServer:
    """What the parts of the authorization server share; `open` gives it the engine of a running gate."""

    engine: Engine
    auditor: Auditor
    # counts a request; returns the refusal of one too many
    passing: Callable[[connection.Scope], Awaitable[errors.GateError | None]]
    directory: Directory

    def __init__(self, settings: Settings, send: Sender) -> None:
        self.settings, self.send = settings, send
        self.issuer, self.keys = read_issuer(settings), SigningKeys.load(settings)
        self.documents, self.assertions = Documents(self), Assertions(self)
        self.providers: dict[str, Provider] = {}
        self.secure = self.issuer.startswith("https:")      # whether browsers send its cookies over TLS alone

    @property
    def oauth(self) -> OAuth:
        """Return the settings of the authorization server."""
        return self.settings.security.oauth

    def accept_own_tokens(self, tokens: AccessTokens) -> None:
        """Let the gate accept what it issues: for any tenant, role and scope, and for each of its resources."""
        resources = frozenset(self.issuer + mount for mount in MOUNTS)
        tokens.trust(Issuer(self.issuer, self.keys, resources, frozenset(), frozenset({"agent", "worker", "admin"}),
                            frozenset(), LONGEST_LIFE_SECONDS))
        self.keys.changed.append(tokens.proven.clear)

    def list_keys(self) -> list[wire_oauth.SigningKeyRecord]:
        """Return the keys that sign or verify now, as list_signing_keys shows them."""
        return [wire_oauth.SigningKeyRecord(str(key.key.kid), to_utc(key.since), to_utc_or_none(key.until))
                for key in self.keys.in_force()]

    def open(self, engine: Engine, guard: Guard) -> None:
        """Take over the engine and the guard of a gate that begins to serve."""
        self.engine, self.directory = engine, Directory(engine)
        self.auditor, self.passing = guard.auditor, guard.passing
        engine.extend(PublishedKeys(self.list_keys))

    def routes(self) -> list[Route]:
        """Return the paths of the authorization server."""
        from asyncgate.extras.oauth import (  # the parts import this module
            metadata,
            providers,
            registration,
            sign_in,
            tokens,
        )

        self.providers = providers.make_providers(self.settings, self.issuer)
        return [route for part in (metadata, registration, sign_in, tokens) for route in part.routes(self)]


class Endpoint:
    """One path: reads the request, calls its handler, sends the answer; pages of any site may call an `open` one."""

    def __init__(self, server: AuthorizationServer, methods: dict[str, Handler], open: bool = False) -> None:
        self.server, self.methods, self.open = server, methods, open

    async def __call__(self, scope: connection.Scope, receive: connection.Receive, send: connection.Send) -> None:
        """Answer one request."""
        answer = await self._answer(scope, receive)
        headers = [*answer.headers, *(ANY_ORIGIN if self.open else ())]
        await self.server.send(send, scope, answer.status, answer.body, headers, type=(b"content-type", answer.type))

    async def _answer(self, scope: connection.Scope, receive: connection.Receive) -> wire.Answer:
        # Order: counted first, or the refusal would take the place of tokens whose code is spent.
        if (too_many := await self.server.passing(scope)) is not None:
            error = wire.as_oauth_error(too_many)
            return wire.Answer(error.status, error.body(), headers=error.headers)
        try:
            return await self._handle(scope, receive)
        except wire.OAuthError as refusal:
            return refuse(self.server, scope, refusal)
        except errors.GateError as refusal:
            return refuse(self.server, scope, wire.as_oauth_error(refusal))
        except Exception as bug:
            return wire.Answer(500, wire.OAuthError("server_error", str(errors.log_fault(scope["path"], bug))).body())

    async def _handle(self, scope: connection.Scope, receive: connection.Receive) -> wire.Answer:
        settings = self.server.settings
        address = connection.find_client_address(scope, scope["headers"], settings.trusted_proxies)
        scope["asyncgate.address"] = address
        visit.set(scope)
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if method == "OPTIONS" and self.open:
            may = ", ".join(self.methods).encode()
            return wire.Answer(204, headers=[(b"access-control-allow-methods", may), *PREFLIGHT])
        if (handler := self.methods.get(method)) is None:
            return wire.Answer(405, wire.OAuthError("invalid_request", f"use {' or '.join(self.methods)}").body(),
                               headers=[(b"allow", ", ".join(self.methods).encode())])
        body = await receive_body(receive, settings.body_timeout_seconds) if method == "POST" else b""
        return await handler(self.server, wire.Request(scope, body, address))


def refuse(server: AuthorizationServer, scope: connection.Scope, refusal: wire.OAuthError) -> wire.Answer:
    """Answer with a refusal, and note its real reason."""
    server.auditor.note(server.settings.default_tenant_id, "oauth_refused", "info", place=scope["asyncgate.address"],
                        path=scope["path"], code=refusal.code, reason=refusal.because)
    return wire.Answer(refusal.status, refusal.body(), headers=refusal.headers)


async def receive_body(receive: connection.Receive, seconds: float) -> bytes:
    """Read a small body within the limits of size and time."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while True:
                message: Any = await receive()
                if message["type"] == "http.disconnect":
                    raise asyncio.CancelledError
                body += message.get("body", b"")
                if len(body) > wire.MOST_FORM_BYTES:
                    raise errors.PayloadTooLarge(f"the body is larger than {wire.MOST_FORM_BYTES} bytes")
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise errors.RequestTimeout("the body did not arrive in time; send it again") from None


def read_issuer(settings: Settings) -> str:
    """Return the issuer, which is the gate's public URL without a slash at its end; raises StartupError."""
    url = settings.public_url.rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise errors.StartupError(
            "security.oauth.enabled needs public_url, the gate's URL as its clients type it, such as "
            "https://gate.example.com")
    if parts.scheme == "http" and not connection.is_loopback(parts.hostname):
        raise errors.StartupError(
            f"public_url is {url}: OAuth needs https, except on this machine (http://127.0.0.1:8080)")
    return url
