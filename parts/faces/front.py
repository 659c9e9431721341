"""The HTTP front of a gate: check Host and Origin, find the operation of a path, and add headers to answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Set
from functools import cached_property, partial
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from asyncgate import Engine, Operation, __version__
from asyncgate.parts.faces import http, openapi
from asyncgate.parts.faces.lease_protocol import LEASE_PROTOCOL
from asyncgate.parts.faces.rest import Door, Endpoint
from asyncgate.parts.faces.serving import Doorkeeper, Meter, TypedTools
from asyncgate.parts.faces.stream import STREAM, ReceiptStream
from asyncgate.parts.faces.tickets import TICKET
from asyncgate.parts.model import connection, errors
from asyncgate.parts.model.challenges import Challenges
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.process.spans import find_tracing

# Before a caller is told that it is over a limit: the refusal costs so little that callers who come again at once would
# take the time of the others.  The answer waits, not the connection: behind a proxy others share that.
REFUSAL_PAUSE_SECONDS = 0.05
JSON_TYPE = (b"content-type", b"application/json")
EMPTY = (204, 304)      # answers without a body
SAFETY = [connection.GATE_MARK, (b"x-content-type-options", b"nosniff"), connection.BROWSER_POLICY,
          (b"referrer-policy", b"no-referrer"),
          (b"cache-control", b"no-store")]
STRICT_LINE = b"%b: %b\r\n" % connection.STRICT_TRANSPORT


# For pages of `allowed_origins` (CORS).  Never with cookies: a page shows a credential of its own.
PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"), (b"access-control-max-age", b"600"),
    (b"access-control-allow-headers",
     b"authorization, content-type, x-api-key, x-tenant-id, last-event-id, mcp-protocol-version, mcp-session-id, "
     b"mcp-method, mcp-name, a2a-version, idempotency-key, traceparent, tracestate")]
READABLE = (b"access-control-expose-headers",
            b"retry-after, www-authenticate, x-asyncgate-warning, x-ratelimit-limit, x-ratelimit-remaining, "
            b"x-ratelimit-reset, x-ratelimit-bucket, mcp-session-id")
SITE_HEADERS = frozenset({b"host", b"origin", b"sec-fetch-site"})
# What a browser says of a request that a page of another site, or of another name of this site, has made; a page needs
# no Origin for a GET, an image for example.
OTHER_SITES = (b"cross-site", b"same-site")
# Where people come by links, and programs through a browser; everything else is for pages of the gate alone.
PAGES = frozenset({"", ".well-known", "console", "docs", "oauth", "openapi.json"})


def find_path(scope: connection.Scope) -> str:
    """Return the path below the prefix that a proxy has added."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def is_page(path: str) -> bool:
    """Whether a path is for a browser itself, not for a program."""
    return path.removeprefix("/").partition("/")[0] in PAGES


def find_kind(scope: connection.Scope) -> tuple[str, str] | None:
    """Return the tenant and the operation of a call, if they are known."""
    caller = scope.get("asyncgate.caller")
    return (caller.tenant_id, scope.get("asyncgate.operation", "")) if caller is not None else None


class Front:
    """An ASGI application in front of an engine and its guard: REST, MCP and their documentation.

    The subclass sets `engine` and `guard` when its lifespan begins, and then `opened`.
    """

    engine: Engine
    guard: Doorkeeper

    def __init__(self, settings: Settings, operations: dict[str, Operation],
                 lifespan: Callable[[Starlette], Any]) -> None:
        self.settings, self.operations, self.opened = settings, operations, False
        self.meter: Meter | None = None
        self.challenges: Challenges | None = None       # of a gate with an authorization server
        self.typed_tools: TypedTools | None = None      # of a gate where types are declared
        self.tracing = find_tracing()
        self.headers = [*SAFETY, *([(b"x-asyncgate-insecure", b"true")] if settings.allow_insecure_dev else [])]
        self.lines = b"".join([b"%b: %b\r\n" % header for header in (JSON_TYPE, *self.headers)])
        self.mcp = Door(self, operations, __version__)
        self.open_paths: Set[str] = frozenset()     # that pages of any site may call, because they take no cookie
        self.endpoints = self._endpoints()      # by path; {} stands for the path parameter
        self.app = Starlette(routes=self._routes(), lifespan=lifespan, exception_handlers={
            HTTPException: self._answer_lost, Exception: self._answer_fault})  # type: ignore[dict-item]
        self.app.router.redirect_slashes = False

    async def __call__(self, scope: connection.Scope, receive: connection.Receive, send: connection.Send) -> None:
        """Refuse requests from other sites' pages (DNS rebinding, CSRF), then let the application answer."""
        if scope["type"] == "http":
            if self.settings.trusted_proxies and connection.is_https_by_proxy(scope, self.settings.trusted_proxies):
                scope["scheme"] = "https"
            if b"%" in (scope.get("raw_path") or b""):
                http.keep_slashes(scope)
            path = find_path(scope)     # with one slash more it is the same endpoint; a page's links need theirs
            if len(path) > 1 and path.endswith("/") and path[-2] != "/" and not path.startswith(("/console", "/docs")):
                scope["path"] = scope["path"].removesuffix("/")
            if refusal := self._check_site(scope):
                if self.opened:
                    self.guard.refused(scope, refusal)
                if self.meter is not None:
                    self.meter.note_refusal("rest", refusal)
                return await self.send(send, scope, refusal.status, encode_json(refusal.body()))
            if scope["method"] == "OPTIONS" and "asyncgate.cors" in scope:
                scope["asyncgate.limits"] = ()      # a preflight has no credential: nobody's calls are spent
                return await self.send(send, scope, 204, b"", PREFLIGHT)
            work = (self._endpoint(scope) or self.app)(scope, receive, send)
            if self.opened and self.guard.turns.mixed_until and self.guard.turns.is_mixed():
                return await self.guard.turns.count(work, partial(find_kind, scope))
            return await work
        await self.app(scope, receive, send)

    def _endpoint(self, scope: connection.Scope) -> Endpoint | None:
        """Find an operation by its path; Starlette's router would cost as much as reading the request."""
        path = find_path(scope)
        scope["path_params"] = {}
        if endpoint := self.endpoints.get(path):
            return endpoint
        parts = path.split("/", 4)
        if len(parts) < 4 or not parts[3]:      # a path parameter is always the third part of a path
            return None
        named, parts[3] = parts[3], "{}"
        if endpoint := self.endpoints.get("/".join(parts)):
            scope["path_params"][endpoint.names] = http.read_name(named) if "%" in named else named
        return endpoint

    def _endpoints(self) -> dict[str, Endpoint]:
        paths: dict[str, dict[str, Operation]] = {}
        for op in self.operations.values():
            for verb, path in op.rest:
                paths.setdefault(path, {})[verb] = op
        endpoints = {path: Endpoint(self, operations, path) for path, operations in paths.items()}
        if "list_receipts" in self.operations:
            endpoints |= {path: ReceiptStream(self, {verb: STREAM}, path) for verb, path in STREAM.rest}
            endpoints |= {path: Endpoint(self, {verb: TICKET}, path) for verb, path in TICKET.rest}
        return {path.replace(f"{{{endpoint.names}}}", "{}"): endpoint for path, endpoint in endpoints.items()}

    def _routes(self) -> list[Route]:
        streams = [STREAM, TICKET] if "list_receipts" in self.operations else []
        every = (*self.operations.values(), *LEASE_PROTOCOL, *streams)
        described = openapi.make_routes(every, __version__, self.send)
        polled = [Route(path, Endpoint(self, {verb: op}, path)) for op in LEASE_PROTOCOL for verb, path in op.rest]
        return [*(Route(path, self.mcp) for path in ("/mcp", "/mcp/u")), *polled, *described]

    @cached_property
    def _served_names(self) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """Return the Host names and Origins that are served, and the names of this machine (on loopback only)."""
        own = {"localhost", "127.0.0.1", "::1",
               self.settings.host} if connection.is_loopback(self.settings.host) else set()
        return frozenset(self.settings.allowed_hosts or own), frozenset(self.settings.allowed_origins), frozenset(own)

    def _check_site(self, scope: connection.Scope) -> errors.GateError | None:
        hosts, origins, own = self._served_names
        headers: connection.Headers = scope["headers"]
        host, asked_by = None, b""
        pages: list[bytes] = []
        for name, value in headers:
            if name not in SITE_HEADERS:
                continue
            if name == b"host":
                host = value if host is None else host
            elif name == b"origin":
                pages.append(value)
            else:
                asked_by = value
        if hosts and host is not None and not http.is_named(host, hosts):
            return errors.Misdirected(
                "this gate does not serve that Host; to allow it, add it to the setting allowed_hosts")
        if not pages and not asked_by:      # no browser
            return None
        if self.open_paths and find_path(scope) in self.open_paths:
            return None
        allowed = all(http.is_named(page, origins) or http.is_own_page(page, host or b"", own) for page in pages)
        if (origins or own) and not allowed:
            return errors.Forbidden("pages of that Origin may not call this gate; to allow it, add it to the setting "
                                    "allowed_origins")
        if len(pages) == 1 and origins and http.is_named(pages[0], origins):
            scope["asyncgate.cors"] = [(b"access-control-allow-origin", pages[0]), (b"vary", b"origin"), READABLE]
        if asked_by in OTHER_SITES and not (pages and allowed) and not is_page(find_path(scope)):
            return errors.Forbidden(
                "pages of other sites may not call this gate, nor lead a browser to its operations; to "
                "allow the calls of an Origin, add it to the setting allowed_origins")
        return None

    async def send(self, send: connection.Send, scope: connection.Scope, status: int, body: bytes,
                   more: Iterable[tuple[bytes, bytes]] = (),
                   type: tuple[bytes, bytes] = JSON_TYPE) -> None:
        """Send one complete answer with the headers of every answer; headers in `more` override them."""
        counted = not self.opened or "asyncgate.limits" in scope or not self.guard.enforced
        if not counted and (refusal := await self.guard.passing(scope)):
            status, body = refusal.status, encode_json(refusal.body())
            more, type = self.describe_refusal(scope, refusal), JSON_TYPE
        if status == HTTPStatus.TOO_MANY_REQUESTS or scope.get("asyncgate.over_limit"):
            await asyncio.sleep(REFUSAL_PAUSE_SECONDS)
        limits = scope.get("asyncgate.limits", ())
        plain = not more and type is JSON_TYPE and status not in EMPTY and "asyncgate.cors" not in scope
        if plain and (whole := connection.find_shortcut(scope)) is not None:
            lines = self.lines + STRICT_LINE if scope["scheme"] == "https" else self.lines
            lines += b"".join([b"%b: %b\r\n" % header for header in limits]) if limits else b""
            if whole.answer(status, lines, body):
                return
        safety = self.safety(scope, {name for name, _ in more})
        about = [type, (b"content-length", b"%d" % len(body))] if status not in EMPTY else []
        headers = [*about, *safety, *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def describe_refusal(self, scope: connection.Scope, refusal: errors.GateError) -> connection.Headers:
        """Return the additional HTTP headers of a refusal."""
        return http.make_refusal_headers(refusal, self.challenges.make(scope, refusal) if self.challenges else None)

    def safety(self, scope: connection.Scope, own: Set[bytes]) -> connection.Headers:
        """Return the headers of every answer, except those in `own`, which the answer sets itself."""
        headers = [header for header in self.headers if header[0] not in own] if own else self.headers
        headers = [*headers, *scope.get("asyncgate.limits", ()), *scope.get("asyncgate.cors", ())]
        return [*headers, connection.STRICT_TRANSPORT] if scope.get("scheme") == "https" else headers

    async def _answer_lost(self, request: Any, error: HTTPException) -> Any:
        if (request.method, request.scope["path"]) == ("GET", "/") and "text/html" in request.headers.get("accept", ""):
            return self._redirect_home
        return self._make_answer(errors.NotFound("nothing is at this path; /openapi.json lists all paths"))

    async def _redirect_home(self, scope: connection.Scope, receive: connection.Receive, send: connection.Send) -> None:
        """Redirect a browser to the first page; the address is relative, because a proxy may add a path prefix."""
        home = b"console/" if self.settings.console.enabled else b"docs"
        await self.send(send, scope, 302, b"", [(b"location", home)])

    async def _answer_fault(self, request: Any, error: Exception) -> Any:
        return self._make_answer(errors.log_fault(request.url.path, error))

    def _make_answer(self, refusal: errors.GateError) -> Any:
        async def answer(scope: connection.Scope, receive: connection.Receive, send: connection.Send) -> None:
            await self.send(send, scope, refusal.status, encode_json(refusal.body()))
        return answer
