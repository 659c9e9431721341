"""Serve an ASGI app with uvicorn, hardened against slow, oversized and ambiguous requests.

uvicorn reads HTTP with httptools, which has no clock and no limits of its own. `Http` adds both for about
two microseconds a request: it sets no timer and counts no header unless a message spans several reads.
With a certificate it speaks TLS, and everything here holds inside it too.
`Server` adds an orderly end: waiting polls are drained first, running requests finish, then the app's lifespan closes.

The app's bodies are not timed here: it reads them, so it knows how long one may take.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import math
import os
import signal
import socket
import ssl
import sys
from collections import Counter, deque
from collections.abc import Callable
from http import HTTPStatus
from operator import attrgetter, methodcaller
from types import FrameType
from typing import Any, NoReturn, Protocol, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from asyncgate.parts.model.connection import STRICT_TRANSPORT, is_https_by_proxy

MAX_HEAD_BYTES = 32 * 1024
# A client that polls comes back within 30 seconds, and common proxies keep a connection for 60. Whoever closes first
# can cut a request that is already on the wire, so the server waits longer than both.
KEEP_ALIVE_SECONDS = 75
# An answer that nobody reads is kept this long before its connection is cut.
STALL_SECONDS = 60.0
# What TLS 1.2 may use: forward secrecy and authenticated encryption only. Level 2 refuses certificates with RSA keys
# shorter than 2048 bits. TLS 1.3 has no other suites.
CIPHERS = "@SECLEVEL=2:ECDHE+AESGCM:ECDHE+CHACHA20"

log = logging.getLogger("asyncgate.server")


class Tls(Protocol):
    """The settings of the certificate."""

    @property
    def certificate_path(self) -> str: ...
    @property
    def private_key_path(self) -> str: ...
    @property
    def private_key_password(self) -> str: ...
    @property
    def minimum_version(self) -> str: ...


class Security(Protocol):
    """The settings of safety, as far as the server reads them."""

    @property
    def tls(self) -> Tls: ...


class Transport(Protocol):
    """The settings that the server reads."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def header_timeout_seconds(self) -> float: ...
    @property
    def shutdown_seconds(self) -> float: ...
    @property
    def limit_concurrency(self) -> int | None: ...
    @property
    def max_connections_per_address(self) -> int: ...
    @property
    def trusted_proxies(self) -> tuple[str, ...]: ...
    @property
    def log_level(self) -> str: ...
    @property
    def security(self) -> Security: ...


def _ignore(url: str) -> None:
    """Take the address and do nothing."""


def _at_once() -> float:
    """Leave no time between a signal and the end."""
    return 0.0


class Traffic:
    """What a server tells its app of the requests under way; the app may have clients come back another way."""

    def __init__(self) -> None:
        self.leaving = False
        self.state: ServerState | None = None   # of the server, once there is one

    def count(self) -> int:
        """Return how many requests are under way."""
        return len(self.state.tasks) if self.state else 0

    def leave(self) -> None:
        """From now on close each connection behind its next answer."""
        self.leaving = True
        for connection in self.state.connections if self.state else ():
            cycle = cast(Http, connection).cycle
            if cycle is not None and not cycle.response_started:
                cycle.keep_alive = False

    def stay(self) -> None:
        """Keep connections open again."""
        self.leaving = False


def run_server(
    app: Any,
    settings: Transport,
    *,
    drain: Callable[[], None],
    ready: Callable[[str], None] = _ignore,
    leave: Callable[[], float] = _at_once,
    traffic: Traffic | None = None,
    handed: list[socket.socket] | None = None,
    leash: int | None = None,
) -> int:
    """Serve the app until SIGTERM or SIGINT and return the exit status.

    `ready(url)` is called once the socket listens; with port 0 the url carries the port that the system chose.
    `leave()` is called in the event loop when the end begins: it says how many seconds the server still serves.
    `drain()` is called after them: it answers waiting polls and must keep later ones from waiting.
    A second signal cuts whatever still runs and makes the status 1.
    A parent process has `handed` over bound sockets; the end of the file `leash` means as much as SIGTERM.
    """
    try:
        context = make_tls_context(settings.security.tls)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        return _no_good(settings.security.tls, error)
    try:
        sockets = handed or bind_sockets(settings.host, settings.port)
    except OSError as error:
        return tell_cannot_listen(settings.host, settings.port, error)
    traffic = traffic or Traffic()
    server = HttpServer(make_config(app, settings, context, traffic), drain=drain, ready=ready, leave=leave)
    traffic.state = server.server_state
    server.leash = leash
    try:
        server.run(sockets)
    finally:
        for sock in sockets:
            sock.close()
    return server.status


def make_tls_context(tls: Tls) -> ssl.SSLContext | None:
    """Load the certificate and say how TLS is spoken; without one there is none."""
    if not tls.certificate_path:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion[tls.minimum_version.replace(".", "_")]
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    # A function, even for no password: without one OpenSSL would ask the terminal.
    context.load_cert_chain(
        tls.certificate_path, tls.private_key_path or None, password=lambda: tls.private_key_password
    )
    return context


def _no_good(tls: Tls, error: Exception) -> int:
    why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    print(f"asyncgate: security.tls: {tls.certificate_path!r}, or its private key, is no good: {why}", file=sys.stderr)
    return 2


def bind_sockets(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """Bind every address of the host, before the app starts, so that a taken port costs no start of the app.

    What is `shared` may be bound once more by this user, and each of the sockets gets a part of the connections.
    """
    sockets: list[socket.socket] = []
    skipped: list[OSError] = []
    for family, kind, proto, _, address in _addresses(host, port):
        # Port 0 means one free port, not one for each address.
        where = (address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:])
        try:
            sockets.append(_bound(family, kind, proto, where, shared))
        except OSError as error:
            # `localhost` names ::1 even on machines without IPv6; any other failure is the caller's to hear.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for sock in sockets:
                    sock.close()
                raise
            skipped.append(error)
    if not sockets:
        raise skipped[0]
    return sockets


def _addresses(host: str, port: int) -> list[Any]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys(found))


def _bound(family: int, kind: int, proto: int, address: Any, shared: bool) -> socket.socket:
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def tell_cannot_listen(host: str, port: int, error: OSError) -> int:
    """Say why nobody can be served; return the exit status."""
    print(f"asyncgate: cannot listen on {host}:{port}: {error.strerror or error}", file=sys.stderr)
    return 1


def make_config(
    app: Any, settings: Transport, context: ssl.SSLContext | None = None, about: Traffic | None = None
) -> uvicorn.Config:
    """Return uvicorn's configuration for an app and these settings; logging stays the caller's."""

    class Timed(Http):
        header_timeout_seconds = settings.header_timeout_seconds
        trusted_proxies = settings.trusted_proxies
        traffic = about or Traffic()
        # Behind a proxy all connections come from the proxy's address.
        crowd = Crowd(0 if settings.trusted_proxies else settings.max_connections_per_address)

    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="auto",
        http=Timed,
        ws="none",
        interface="asgi3",
        log_config=None,
        log_level=settings.log_level.lower(),
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=settings.limit_concurrency,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_seconds),
        ssl_context_factory=(lambda config, default: context) if context else None,
    )
    config.load()
    config.lifespan_class = Lifespan
    return config


class HttpServer(uvicorn.Server):
    """uvicorn's server with an orderly end and an exit status in place of `sys.exit`.

    In a running loop: `await Server(configure(app, settings), drain=…).serve(bind(host, port))`.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        drain: Callable[[], None],
        ready: Callable[[str], None] = _ignore,
        leave: Callable[[], float] = _at_once,
    ) -> None:
        super().__init__(config)
        self.drain = drain
        self.ready = ready
        self.leave = leave
        self.leash: int | None = None
        self.status = 0
        self.loop: asyncio.AbstractEventLoop

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on sockets from `bind` until told to stop."""
        self.loop = asyncio.get_running_loop()
        if self.leash is not None:
            self.loop.add_reader(self.leash, self._let_go)
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the app, then listen."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            # A signal in the meantime is not a failure.
            self.status = 0 if self.should_exit else getattr(self.lifespan.failure(), "exit_status", 1)
            self.should_exit = True
            self.lifespan.explain()
            return
        try:
            self.servers = [await self._listen(sock) for sock in sockets or ()]
        except OSError as error:
            self.status = tell_cannot_listen(self.config.host, self.config.port, error)
            self.should_exit = True
            await self.lifespan.shutdown()
        else:
            # What is there now stays; searching it again and again for garbage is what delays requests most.
            gc.collect()
            gc.freeze()
            gc.set_threshold(10_000, 20, 20)
            self.started = True
            self.ready(self.url())

    async def _listen(self, sock: socket.socket) -> asyncio.Server:
        # uvicorn would leave a client a minute for its handshake, and half a minute for its goodbye.
        seconds = cast(type[Http], self.config.http_protocol_class).header_timeout_seconds
        clock = seconds if self.config.ssl else None
        return await self.loop.create_server(
            self._connection,
            sock=sock,
            backlog=self.config.backlog,
            ssl=self.config.ssl,
            ssl_handshake_timeout=clock,
            ssl_shutdown_timeout=clock,
        )

    def _connection(self) -> asyncio.Protocol:
        made = cast(type[Http], self.config.http_protocol_class)
        return made(self.config, self.server_state, self.lifespan.state, self.loop)

    def url(self) -> str:
        """Return the address that the server answers on."""
        host = self.config.host or "0.0.0.0"  # noqa: S104  # it is only told: what is bound was bound before
        port = self.servers[0].sockets[0].getsockname()[1]
        scheme = "https" if self.config.ssl else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Waiting polls are running requests too: uvicorn would wait for them, so they are answered first.
        try:
            await self._linger(self.leave())
            self.drain()
        finally:
            await self._finish(sockets)

    async def _linger(self, seconds: float) -> None:
        """Go on serving, so that a load balancer can notice; a second signal ends it."""
        until, ticks = self.loop.time() + seconds, 0
        while self.loop.time() < until and not self.force_exit:
            ticks += 1
            await self.on_tick(ticks)       # else answers would carry the date of the signal
            await asyncio.sleep(0.1)

    async def _finish(self, sockets: list[socket.socket] | None) -> None:
        grace = cast(int, self.config.timeout_graceful_shutdown)
        try:
            # uvicorn bounds the running requests but not the lifespan; the whole takes less than a second more.
            async with asyncio.timeout(grace + 0.8):
                await super().shutdown(sockets)
        except TimeoutError:
            log.error("the app did not close within %s seconds", grace)
            self.status = 1
        if self.force_exit or self.lifespan.should_exit:
            self.status = 1

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop in order on the first signal, at once on the second."""
        # The signal is not kept for uvicorn to raise again: that would turn an orderly end into a death by signal.
        self.force_exit = self.should_exit
        self.should_exit = True
        self.loop.call_soon_threadsafe(self._interrupt)

    def _let_go(self) -> None:
        """Stop in order: the parent process says so, or has died."""
        if self.leash is not None and not os.read(self.leash, 1):
            self.loop.remove_reader(self.leash)
            if not self.should_exit:        # else a signal came first
                self.handle_exit(signal.SIGTERM, None)

    def _interrupt(self) -> None:
        if self.force_exit or not self.started:
            self.lifespan.cancel()
        if self.force_exit:
            for connection in list(self.server_state.connections):
                cast(Http, connection).transport.abort()


class Lifespan:
    """The app's lifespan as one task that keeps its exception, so that a refusal to start can be told in one line."""

    def __init__(self, config: uvicorn.Config) -> None:
        self.app = config.loaded_app
        self.state: dict[str, Any] = {}
        self.should_exit = False
        self.inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        self.reply: asyncio.Future[dict[str, str]]
        self.task: asyncio.Task[None]

    async def startup(self) -> None:
        """Start the app and note whether it refused."""
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        self.task = asyncio.create_task(self.app(scope, self.inbox.get, self.send))
        await self._tell("startup")

    async def shutdown(self) -> None:
        """Close the app, unless it has ended by itself."""
        if self.task.done():
            return
        await self._tell("shutdown")
        if self.should_exit:
            self.explain()

    async def _tell(self, phase: str) -> None:
        self.reply = asyncio.get_running_loop().create_future()
        self.inbox.put_nowait({"type": f"lifespan.{phase}"})
        await asyncio.wait((self.task, self.reply), return_when=asyncio.FIRST_COMPLETED)
        self.should_exit = not self.reply.done() or self.reply.result()["type"] != f"lifespan.{phase}.complete"
        if self.should_exit:
            # A framework reports the failure first and raises it afterwards; its exception says more.
            await asyncio.wait((self.task,), timeout=1)

    async def send(self, message: dict[str, str]) -> None:
        """Take the app's answer."""
        if not self.reply.done():
            self.reply.set_result(message)

    def cancel(self) -> None:
        """Stop an app that is still starting or closing."""
        self.task.cancel()

    def failure(self) -> BaseException | None:
        """Return what the app ended with, if it has."""
        return self.task.exception() if self.task.done() and not self.task.cancelled() else None

    def explain(self) -> None:
        """Say why the app failed: in its own words when the exception has some, else in the log."""
        if self.task.cancelled():
            return
        failure = self.failure()
        own_words = getattr(failure, "startup_message", None)
        if own_words is not None:
            print(own_words, file=sys.stderr)
            return
        told = self.reply.result().get("message", "") if self.reply.done() else "it has no lifespan"
        log.error("the app failed: %s", failure or told, exc_info=failure)


SAFE_HEADERS = [
    (b"content-type", b"application/json"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"connection", b"close"),
]


def make_safe_headers(scheme: str | None) -> list[tuple[bytes, bytes]]:
    """Return the headers of every answer that the app does not give."""
    return [*SAFE_HEADERS, STRICT_TRANSPORT] if scheme == "https" else SAFE_HEADERS


def _error(code: str, message: str, detail: str) -> bytes:
    return json.dumps({"error": code, "message": message, "detail": detail}).encode()


class HttpRefusal(Exception):
    """An answer that the connection gives by itself, and the last one on it."""

    def __init__(self, status: HTTPStatus, message: str, detail: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = _error("invalid_request", message, detail)

    def encode(self, default_headers: list[tuple[bytes, bytes]], scheme: str | None) -> bytes:
        """Return the whole response as it goes over the wire."""
        length = (b"content-length", b"%d" % len(self.body))
        lines = [b"%s: %s\r\n" % pair for pair in (*default_headers, *make_safe_headers(scheme), length)]
        return b"".join([STATUS_LINE[self.status], *lines, b"\r\n", self.body])


MALFORMED = HttpRefusal(
    HTTPStatus.BAD_REQUEST,
    "The request is not valid HTTP/1.1.",
    "Send one well-formed message; Content-Length and Transfer-Encoding exclude each other (RFC 9112 6.1).",
)
ONE_HOST = HttpRefusal(
    HTTPStatus.BAD_REQUEST,
    "The request needs exactly one Host header.",
    "None, or more than one, leaves open whom the request is for (RFC 9112 3.2).",
)
OTHER_HOST = HttpRefusal(
    HTTPStatus.BAD_REQUEST,
    "The request's target names another host than its Host header.",
    "Send the path alone, or the same authority in both (RFC 9112 3.2.2).",
)
OTHER_VERSION = HttpRefusal(
    HTTPStatus.HTTP_VERSION_NOT_SUPPORTED,
    "This server speaks HTTP/1.1 and HTTP/1.0.",
    "Say HTTP/1.1 in the first line of the request (RFC 9110 15.6.6).",
)
LARGE_HEAD = HttpRefusal(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"The request's headers exceed {MAX_HEAD_BYTES} bytes.",
    "The limit covers the path, all names and all values. Send large values in the body.",
)
OVERLOADED = _error(
    "overloaded", "The server is at its limit of connections.", "Repeat the request after the time in Retry-After."
)
# A list without room. Trailers are dropped: they would join the headers of a request that the app already judged.
TRAILERS = cast("list[tuple[bytes, bytes]]", deque[tuple[bytes, bytes]](maxlen=0))


class CycleShortcut:
    """A short way past the messages of ASGI, for a body that has come whole and an answer that is ready.

    The app finds it as `scope["extensions"]["asyncgate.whole"]`.  Each method says when it cannot serve; then the app
    goes the ordinary way, and nothing has happened.
    """

    __slots__ = ("cycle",)

    def __init__(self, cycle: Any) -> None:
        self.cycle = cycle

    def body(self) -> bytes | None:
        """Take the body of the request, if all of it is here."""
        cycle = self.cycle
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return body

    def answer(self, status: int, lines: bytes, body: bytes) -> bool:
        """Send an answer whose header lines are written already; tell whether it is on its way.

        `lines` must name the body's type and nothing about length or connection: those are added here.
        """
        cycle = self.cycle
        if cycle.transport.is_closing():    # the client has gone, and nobody was told so yet
            cycle.disconnected = True
        if (cycle.response_started or cycle.disconnected or cycle.flow.write_paused or not cycle.keep_alive
                or cycle.scope["method"] == "HEAD"):
            return False
        always = b"".join([b"%b: %b\r\n" % pair for pair in cycle.default_headers])
        head = b"%b%b%bcontent-length: %d\r\n\r\n" % (STATUS_LINE[status], always, lines, len(body))
        cycle.transport.write(head + body)
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        cycle.on_response()
        return True


async def _overloaded(scope: Any, receive: Any, send: Any) -> None:
    """Answer 503 in place of the app when `limit_concurrency` is reached."""
    # The app, which knows whom to believe, is not asked here; over plain HTTP browsers ignore the promise anyway.
    proxied = (b"x-forwarded-proto", b"https") in scope["headers"]
    safe = make_safe_headers("https" if proxied else scope["scheme"])
    headers = [*safe, (b"retry-after", b"1"), (b"content-length", b"%d" % len(OVERLOADED))]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": OVERLOADED})


class Crowd:
    """Counts the connections of each address, of IPv6 those of each /64, which is what a single host is given."""

    def __init__(self, most: int) -> None:
        self.most = most  # 0 is no limit
        self.counts: Counter[str] = Counter()
        self.told: set[str] = set()

    def enter(self, peer: tuple[str, int] | None) -> str | None:
        """Count a connection; return what to leave under, or None when it is not counted."""
        if not self.most or not peer:
            return None
        where = find_network(peer[0]) if ":" in peer[0] else peer[0]
        self.counts[where] += 1
        return where

    def is_too_large(self, where: str | None) -> bool:
        """Whether an address has more connections than it may; that goes to the log once, until it has none."""
        if where is None or self.counts[where] <= self.most:
            return False
        if where not in self.told:
            self.told.add(where)
            log.warning("%s has %d connections, the most of an address; more are cut", where, self.most)
        return True

    def leave(self, where: str | None) -> None:
        """Forget a connection."""
        if where is not None:
            self.counts[where] -= 1
            if not self.counts[where]:
                del self.counts[where]
                self.told.discard(where)


def find_network(address: str) -> str:
    """Write the /64 that an IPv6 address is in."""
    head = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8]
    return socket.inet_ntop(socket.AF_INET6, head + bytes(8)) + "/64"


class Http(HttpToolsProtocol):
    """One client's connection, with a clock on headers, a limit on their size and no doubt about their framing."""

    header_timeout_seconds = 10.0
    trusted_proxies: tuple[str, ...] = ()
    crowd = Crowd(0)
    traffic = Traffic()
    where: str | None = None

    # uvicorn's type does not say that there is none before the first request.
    cycle: Any
    running: Any = None         # the request that is being answered; `cycle` is the last one that was read
    idle_since = 0.0
    refused = False
    resuming = False
    # Bytes read since something came of them: a complete head, or a piece of a body that is still wanted.
    idle_bytes = 0
    refusal: HttpRefusal | None = None
    clock: asyncio.TimerHandle | None = None
    stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the client so long to send its headers, unless its address has too many connections already."""
        super().connection_made(transport)
        self.headers, self.idle_since = TRAILERS, self.loop.time()
        self.where = self.crowd.enter(self.client)
        if self.crowd.is_too_large(self.where):
            return transport.abort()
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop every clock of the connection, and let no request of it answer any more, pipelined ones among them.

        uvicorn tells the last one that was read only; the others would fail at writing, each with a traceback.
        """
        for cycle in (self.running, *(queued for queued, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)
        self.crowd.leave(self.where)
        self._stop_clock()
        self._stop_stall()

    def data_received(self, data: bytes) -> None:
        """Parse what came, and judge it before the application sees it."""
        if self.refused:
            return
        self._unset_keepalive_if_required()
        self.idle_bytes += len(data)
        before = self.cycle
        held = 0 if before is None else len(before.body)
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as stop:
            self._parse_on(data, stop)
        if self.cycle is not before and self.headers is TRAILERS:
            self.idle_bytes = 0
        else:
            self._judge_piece(before, held)

    def _parse_on(self, data: bytes | memoryview, stop: Exception) -> None:
        while isinstance(stop, httptools.HttpParserUpgrade):
            data = memoryview(data)[stop.args[0] :]
            try:
                self._ignore_upgrade()
                return self.parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as next_stop:
                stop = next_stop
        self._refuse(self.refusal or MALFORMED)

    def _judge_piece(self, before: Any, held: int) -> None:
        """Count and time a read that did not end with a whole head."""
        if self.refused:
            return
        cycle = self.cycle
        in_head = self._is_in_head()
        if cycle is not before or (cycle is not None and len(cycle.body) > held):
            self.idle_bytes = 0
        elif self.idle_bytes > MAX_HEAD_BYTES:
            return self._refuse(LARGE_HEAD if in_head else MALFORMED)
        # Between requests too: stray line ends have stopped the keep-alive clock and begin no message.
        if self.clock is None and (in_head or cycle is None or cycle.response_complete):
            self._start_clock()

    def _is_in_head(self) -> bool:
        return self.headers is not TRAILERS

    def _ignore_upgrade(self) -> None:
        """Go on in HTTP/1.1 after a request that offers another protocol.

        The parser takes such a request for the last one and its body for the other protocol; read afresh, that body
        would be a request nobody sent. So a new parser is told the framing and continues where the old one stopped.
        Clients that offer h2c with every request are common.
        """
        framing = [pair for pair in self.scope["headers"] if pair[0] in (b"content-length", b"transfer-encoding")]
        head = b"".join([b"POST / HTTP/1.1\r\n", *(b"%s: %s\r\n" % pair for pair in framing), b"\r\n"])
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.cycle.more_body = True
        self.cycle.message_event.clear()
        self.resuming = True
        self.parser.feed_data(head)
        self.resuming = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header without the blanks behind its value, which the parser leaves there (RFC 9110 5.5)."""
        super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        """Judge the head of a request once it is whole."""
        if self.resuming:
            self.headers = TRAILERS
            return
        if self.idle_bytes > MAX_HEAD_BYTES and self._head_bytes() > MAX_HEAD_BYTES:
            self._reject(LARGE_HEAD)
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            self._reject(OTHER_VERSION)
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) != 1 and (hosts or version != "1.0"):
            self._reject(ONE_HOST)
        if not self.url.startswith(b"/") and self._authority() not in (None, *map(bytes.lower, hosts)):
            self._reject(OTHER_HOST)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._make_room(len(self.connections) - self.limit_concurrency + 1)
        super().on_headers_complete()
        if self.traffic.leaving:
            self.cycle.keep_alive = False
        cast(dict[str, Any], self.scope)["extensions"] = {"asyncgate.whole": CycleShortcut(self.cycle)}
        self.headers = TRAILERS
        if self.clock is not None:
            self._stop_clock()

    def _make_room(self, places: int) -> None:
        """Close the connections that have been idle for longest: who only holds them keeps nobody out."""
        others: list[Any] = [one for one in self.connections if one is not self]
        for one in sorted(filter(methodcaller("is_idle"), others), key=attrgetter("idle_since"))[:places]:
            self.connections.discard(one)
            one.transport.close()

    def is_idle(self) -> bool:
        """Whether no request of this connection is under way."""
        return (self.cycle is None or self.cycle.response_complete) and not self.pipeline

    def on_response_complete(self) -> None:
        """Note since when nothing is asked."""
        self.idle_since = self.loop.time()
        super().on_response_complete()

    def _authority(self) -> bytes | None:
        """Return the authority of a target that is no path; None for `*`, which has none."""
        return None if self.url == b"*" else self.url.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0].lower()

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _reject(self, refusal: HttpRefusal) -> NoReturn:
        # Raised through the parser, which then takes no further message from the same read.
        self.refusal = refusal
        raise refusal

    def _refuse(self, refusal: HttpRefusal) -> None:
        """Answer with the refusal, if it can only be taken for the answer to its own request, and close."""
        self.refused = True
        cycle = self.cycle
        in_head = self._is_in_head()
        if cycle is not None and not cycle.response_complete:
            if in_head or self.pipeline or cycle.response_started or not cycle.more_body:
                return self.transport.abort()
            cycle.disconnected = True
            cycle.message_event.set()
        if in_head or cycle is None or not cycle.response_complete:
            self.transport.write(refusal.encode(self.server_state.default_headers, self._spoken()))
        # Closing under a client that still sends would make its system discard the answer unread, so what follows
        # is read and dropped until the client is done or the clock runs out.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._start_clock()

    def _spoken(self) -> str | None:
        """Return the scheme that the client speaks, as far as the headers read so far tell what a proxy knows of it."""
        before = self.cycle.scope["headers"] if self.cycle is not None else []
        headers = self.headers if self._is_in_head() else before
        scope = {"client": self.client, "headers": headers}
        return "https" if self.trusted_proxies and is_https_by_proxy(scope, self.trusted_proxies) else self.scheme

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.running = cycle
        super()._start_asgi_task(cycle, app if app is self.app else _overloaded)

    def _start_clock(self) -> None:
        self._stop_clock()
        self.clock = self.loop.call_later(self.header_timeout_seconds, self._time_out)

    def _stop_clock(self) -> None:
        if self.clock is not None:
            self.clock.cancel()
            self.clock = None

    def _time_out(self) -> None:
        self.clock = None
        if self.refused or self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
        else:
            # A client that sent a piece of its next request early still waits for us.
            self._start_clock()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stall = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall()

    def _stop_stall(self) -> None:
        if self.stall is not None:
            self.stall.cancel()
            self.stall = None

    def timeout_keep_alive_handler(self) -> None:
        # A plain close waits for a client that never reads its answer.
        self.transport.abort()
