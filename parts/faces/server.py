"""Serve an ASGI app with uvicorn, hardened against slow, oversized and ambiguous requests.

uvicorn reads HTTP with httptools, which has no timeouts and no limits of its own. `Http` adds both for about
two microseconds a request: it sets no timer and counts no header unless a message spans several reads.
With a certificate the server uses TLS, with the same limits.
`HttpServer` adds a graceful shutdown: waiting polls are answered first, running requests finish, then the app closes.

The app times request bodies itself, because it reads them and knows how long one may take.
"""

from __future__ import annotations

import asyncio
import contextlib
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
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from http import HTTPStatus
from operator import attrgetter, methodcaller
from types import FrameType
from typing import Any, NoReturn, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from asyncgate.parts.faces.traffic import Traffic
from asyncgate.parts.model import connection, errors
from asyncgate.parts.model.settings import Settings, Tls
from asyncgate.parts.process.forks import release_children

MAX_HEAD_BYTES = 32 * 1024
# A polling client returns within 30 seconds, and common proxies keep a connection for 60. The side that closes first
# may cut a request that is already on the wire, so the server waits longer than both.
KEEP_ALIVE_SECONDS = 75
# A client that does not read its answer is disconnected after this time.
STALL_SECONDS = 60.0
# Between two reads of what a refused client still sends: at 256 KiB a read it gets rid of 10 MiB in a second.
UNWANTED_READ_SECONDS = 0.025
# TLS 1.2 may only use forward secrecy and authenticated encryption. Level 2 refuses certificates with RSA keys
# shorter than 2048 bits. TLS 1.3 has no weaker suites.
CIPHERS = "@SECLEVEL=2:ECDHE+AESGCM:ECDHE+CHACHA20"

log = logging.getLogger("asyncgate.server")


def _ignore_url(url: str) -> None:
    """No-op: nobody wants to know the address."""


def _at_once() -> float:
    """Shut down without a delay after a signal."""
    return 0.0


def run_server(
    app: Any,
    settings: Settings,
    *,
    drain: Callable[[], None],
    ready: Callable[[str], None] = _ignore_url,
    leave: Callable[[], float] = _at_once,
    traffic: Traffic | None = None,
    handed: list[socket.socket] | None = None,
    leash: int | None = None,
) -> int:
    """Serve the app until SIGTERM or SIGINT and return the exit status.

    `ready(url)` is called once the socket listens; with port 0 the URL has the port that the system chose.
    `leave()` is called in the event loop when the shutdown begins: it returns for how many seconds to keep serving.
    `drain()` is called after that time: it must answer waiting polls and let no later poll wait.
    A second signal aborts all running requests and makes the status 1.
    A parent process has `handed` over bound sockets; the end of the file `leash` means as much as SIGTERM.
    """
    try:
        context = make_tls_context(settings.security.tls)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        print(f"asyncgate: security.tls: {settings.security.tls.certificate_path!r} or its private key is "
              f"invalid: {why}", file=sys.stderr)
        return 2
    try:
        sockets = handed or bind_sockets(settings.host, settings.port)
    except OSError as error:
        return report_bind_failure(settings.host, settings.port, error)
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
    """Load the certificate into a TLS context; return None if no certificate is set."""
    if not tls.certificate_path:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion[tls.minimum_version.replace(".", "_")]
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    # A function, even for no password: otherwise OpenSSL would prompt on the terminal.
    context.load_cert_chain(
        tls.certificate_path, tls.private_key_path or None, password=lambda: tls.private_key_password
    )
    return context


def bind_sockets(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """Bind every address of the host; run before the app starts, so that a port in use fails early.

    A `shared` address may be bound again by this user; each of the sockets gets a part of the connections.
    """
    sockets: list[socket.socket] = []
    skipped: list[OSError] = []
    for family, kind, proto, _, address in _find_addresses(host, port):
        # Port 0 means one free port for all addresses.
        where = (address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:])
        try:
            sockets.append(_bind_socket(family, kind, proto, where, shared))
        except OSError as error:
            # `localhost` includes ::1 even on machines without IPv6; any other failure is raised.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for sock in sockets:
                    sock.close()
                raise
            skipped.append(error)
    if not sockets:
        raise skipped[0]
    return sockets


def _find_addresses(host: str, port: int) -> list[Any]:
    addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys(addresses))


def _bind_socket(family: int, kind: int, proto: int, address: Any, shared: bool) -> socket.socket:
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


def report_bind_failure(host: str, port: int, error: OSError) -> int:
    """Say why the port cannot be used; return the exit status."""
    print(f"asyncgate: cannot listen on {host}:{port}: {error.strerror or error}", file=sys.stderr)
    return 1


def make_config(
    app: Any, settings: Settings, context: ssl.SSLContext | None = None, about: Traffic | None = None
) -> uvicorn.Config:
    """Return uvicorn's configuration for an app and these settings; the caller configures logging."""

    class ConfiguredHttp(Http):
        header_timeout_seconds = settings.header_timeout_seconds
        trusted_proxies = settings.trusted_proxies
        traffic = about or Traffic()
        # Behind a proxy, all connections come from the proxy's address: no limit.
        crowd = Crowd(0 if settings.trusted_proxies else settings.max_connections_per_address)

    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="auto",
        http=ConfiguredHttp,
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
    """uvicorn's server with a graceful shutdown, and an exit status instead of `sys.exit`.

    In a running loop: `await HttpServer(make_config(app, settings), drain=…).serve(bind_sockets(host, port))`.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        drain: Callable[[], None],
        ready: Callable[[str], None] = _ignore_url,
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
        """Serve on sockets from `bind_sockets` until told to stop."""
        self.loop = asyncio.get_running_loop()
        if self.leash is not None:
            self.loop.add_reader(self.leash, self._let_go)
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the app, then listen."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            # A signal during startup is not a failure.
            self.status = 0 if self.should_exit else getattr(self.lifespan.failure(), "exit_status", 1)
            self.should_exit = True
            self.lifespan.explain()
            return
        try:
            self.servers = [await self._listen(sock) for sock in sockets or ()]
        except OSError as error:
            self.status = report_bind_failure(self.config.host, self.config.port, error)
            self.should_exit = True
            await self.lifespan.shutdown()
        else:
            # These objects stay: repeated garbage collections over them would delay requests.
            gc.collect()
            gc.freeze()
            gc.set_threshold(10_000, 20, 20)
            self.started = True
            self.ready(self.url())

    async def _listen(self, sock: socket.socket) -> asyncio.Server:
        # uvicorn would give a client a minute for the handshake, and half a minute for the shutdown.
        seconds = cast(type[Http], self.config.http_protocol_class).header_timeout_seconds
        clock = seconds if self.config.ssl else None
        return await self.loop.create_server(
            self._make_connection,
            sock=sock,
            backlog=self.config.backlog,
            ssl=self.config.ssl,
            ssl_handshake_timeout=clock,
            ssl_shutdown_timeout=clock,
        )

    def _make_connection(self) -> asyncio.Protocol:
        made = cast(type[Http], self.config.http_protocol_class)
        return made(self.config, self.server_state, self.lifespan.state, self.loop)

    def url(self) -> str:
        """Return the URL of the server."""
        host = self.config.host or "0.0.0.0"  # noqa: S104  # only displayed: the sockets are bound already
        port = self.servers[0].sockets[0].getsockname()[1]
        scheme = "https" if self.config.ssl else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Waiting polls are running requests: uvicorn would wait for them, so they are answered first.
        try:
            until, ticks = self.loop.time() + self.leave(), 0       # until a load balancer has noticed
            while self.loop.time() < until and not self.force_exit:
                ticks += 1
                await self.on_tick(ticks)       # else answers would carry the date of the signal
                await asyncio.sleep(0.1)
            self.drain()
        finally:
            await self._finish(sockets)

    async def _finish(self, sockets: list[socket.socket] | None) -> None:
        grace = cast(int, self.config.timeout_graceful_shutdown)
        try:
            # uvicorn limits the running requests but not the lifespan; both together get less than a second more.
            async with asyncio.timeout(grace + 0.8):
                await super().shutdown(sockets)
        except TimeoutError:
            log.error("the app did not close within %s seconds", grace)
            self.status = 1
        if self.force_exit or self.lifespan.should_exit:
            self.status = 1
        if self.status:
            await self.lifespan.give_up()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Obey SIGTERM and SIGINT, and the end of the terminal unless whoever started this ignores it (nohup)."""
        obeyed = (hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread()
                  and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL)
        release_children()
        with super().capture_signals():
            if obeyed:
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                if obeyed:
                    signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down gracefully on the first signal, at once on the second."""
        # uvicorn would raise the signal again after a graceful shutdown, so the signal is not kept for it.
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
            self.ending = self.loop.create_task(self.lifespan.give_up())
        if self.force_exit:
            for connection in list(self.server_state.connections):
                cast(Http, connection).transport.abort()


@contextlib.asynccontextmanager
async def listen_beside(app: Any, settings: Settings, tls: Tls | None) -> AsyncIterator[None]:
    """Serve a second app in the running loop while the block runs; raises StartupError if it cannot listen."""
    try:
        config = make_config(app, settings, make_tls_context(tls) if tls else None)
        sockets = bind_sockets(settings.host, settings.port)
    except (OSError, ValueError) as error:
        raise errors.StartupError(f"cannot listen on {settings.host}:{settings.port} as well: {error}") from None
    server = HttpServer(config, drain=lambda: None)
    server.loop, server.lifespan = asyncio.get_running_loop(), Lifespan(config)
    listeners = [await server._listen(sock) for sock in sockets]
    try:
        yield
    finally:
        for listener in listeners:
            listener.close()
        for connection in list(server.server_state.connections):
            cast(Http, connection).transport.abort()


class Lifespan:
    """The app's lifespan as one task that keeps its exception, so that a failed start is reported in one line."""

    def __init__(self, config: uvicorn.Config) -> None:
        self.app = config.loaded_app
        self.state: dict[str, Any] = {}
        self.should_exit = False
        self.inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        self.reply: asyncio.Future[dict[str, str]]
        self.task: asyncio.Task[None]

    async def startup(self) -> None:
        """Start the app, and note whether it failed."""
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        self.task = asyncio.create_task(self.app(scope, self.inbox.get, self.send))
        await self._run_phase("startup")

    async def shutdown(self) -> None:
        """Close the app, unless it has already ended."""
        if self.task.done():
            return
        await self._run_phase("shutdown")
        if self.should_exit:
            self.explain()

    async def _run_phase(self, phase: str) -> None:
        self.reply = asyncio.get_running_loop().create_future()
        self.inbox.put_nowait({"type": f"lifespan.{phase}"})
        await asyncio.wait((self.task, self.reply), return_when=asyncio.FIRST_COMPLETED)
        self.should_exit = not self.reply.done() or self.reply.result()["type"] != f"lifespan.{phase}.complete"
        if self.should_exit:
            # A framework reports the failure first and raises it afterwards; the exception has more details.
            await asyncio.wait((self.task,), timeout=1)

    async def send(self, message: dict[str, str]) -> None:
        """Receive the app's answer."""
        if not self.reply.done():
            self.reply.set_result(message)

    async def give_up(self) -> None:
        """Cancel the app, and each step by which it still closes: a database that hangs may hold up all of them."""
        while not self.task.done():
            self.task.cancel()
            await asyncio.wait((self.task,), timeout=0.1)

    def failure(self) -> BaseException | None:
        """Return the exception that ended the app, if any."""
        return self.task.exception() if self.task.done() and not self.task.cancelled() else None

    def explain(self) -> None:
        """Report why the app failed: print the exception's `startup_message` if it has one, else log the failure."""
        if self.task.cancelled():
            return
        failure = self.failure()
        message = getattr(failure, "startup_message", None)
        if message is not None:
            print(message, file=sys.stderr)
            return
        reported = self.reply.result().get("message", "") if self.reply.done() else "it has no lifespan"
        log.error("the app failed: %s", failure or reported, exc_info=failure)


SAFE_HEADERS = [
    connection.GATE_MARK,
    (b"content-type", b"application/json"),
    (b"cache-control", b"no-store"),
    connection.BROWSER_POLICY,
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"connection", b"close"),
]


def make_safe_headers(scheme: str | None) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer that does not come from the app."""
    return [*SAFE_HEADERS, connection.STRICT_TRANSPORT] if scheme == "https" else SAFE_HEADERS


def _encode_error(code: str, message: str, detail: str) -> bytes:
    return json.dumps({"error": code, "message": message, "detail": detail}).encode()


class HttpRefusal(Exception):
    """A refusal that the server sends itself; it closes the connection."""

    def __init__(self, status: HTTPStatus, message: str, detail: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = _encode_error("invalid_request", message, detail)

    def encode(self, default_headers: list[tuple[bytes, bytes]], scheme: str | None) -> bytes:
        """Return the whole response in wire format."""
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
    "Without exactly one the target of the request is ambiguous (RFC 9112 3.2).",
)
OTHER_HOST = HttpRefusal(
    HTTPStatus.BAD_REQUEST,
    "The request's target and its Host header name different hosts.",
    "Send only the path as the target, or the same host in both (RFC 9112 3.2.2).",
)
OTHER_VERSION = HttpRefusal(
    HTTPStatus.HTTP_VERSION_NOT_SUPPORTED,
    "This server supports HTTP/1.1 and HTTP/1.0.",
    "Send HTTP/1.1 in the first line of the request (RFC 9110 15.6.6).",
)
LARGE_HEAD = HttpRefusal(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"The request's headers exceed {MAX_HEAD_BYTES} bytes.",
    "The limit includes the path and all header names and values. Send large values in the body.",
)
OVERLOADED = _encode_error(
    "overloaded", "The server is at its limit of connections.", "Repeat the request after the time in Retry-After."
)
# A list that stays empty drops trailers: they would be added to the headers of a request that was already checked.
TRAILERS = cast("list[tuple[bytes, bytes]]", deque[tuple[bytes, bytes]](maxlen=0))


BODIES = frozenset({b"content-length", b"transfer-encoding"})       # headers of requests that have a body


class CycleShortcut:
    """A shortcut past ASGI messages, for a body that has arrived completely and an answer that is ready.

    The app finds it as `scope["extensions"]["asyncgate.whole"]`.  If a method returns None or False, the
    app must use ASGI messages: nothing was done.
    """

    __slots__ = ("cycle",)

    def __init__(self, cycle: Any) -> None:
        self.cycle = cycle

    def body(self) -> bytes | None:
        """Return the body of the request if all of it has arrived, else None."""
        cycle = self.cycle
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return body

    def answer(self, status: int, lines: bytes, body: bytes) -> bool:
        """Send an answer with formatted header lines; return whether it was sent.

        `lines` must contain the content type, but neither length nor connection: those are added here.
        """
        cycle = self.cycle
        if cycle.transport.is_closing():    # the client has disconnected, and the cycle does not know it yet
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


class Lingering:
    """The transport of one request whose body the app may refuse: it closes when the client has read the answer."""

    def __init__(self, http: Http, cycle: Any) -> None:
        self.http, self.cycle, self.transport = http, cycle, cycle.transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def close(self) -> None:
        """Close now, or when the client is done with sending its body."""
        if self.cycle.more_body and not self.cycle.disconnected:
            self.http.discard_rest()
        else:
            self.transport.close()


async def _overloaded(scope: Any, receive: Any, send: Any) -> None:
    """Answer 503 in place of the app when `limit_concurrency` is reached."""
    # Only the app knows which proxies to trust; over plain HTTP, browsers ignore Strict-Transport-Security anyway.
    proxied = (b"x-forwarded-proto", b"https") in scope["headers"]
    safe = make_safe_headers("https" if proxied else scope["scheme"])
    headers = [*safe, (b"retry-after", b"1"), (b"content-length", b"%d" % len(OVERLOADED))]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": OVERLOADED})


class Crowd:
    """Counts the connections of each address; for IPv6 those of each /64, because one host gets a whole /64."""

    def __init__(self, most: int) -> None:
        self.most = most  # 0 means no limit
        self.counts: Counter[str] = Counter()
        self.told: set[str] = set()

    def enter(self, peer: tuple[str, int] | None) -> str | None:
        """Count a connection; return the key to pass to `leave`, or None if it is not counted."""
        if not self.most or not peer:
            return None
        where = peer[0]
        if ":" in where:
            network = socket.inet_pton(socket.AF_INET6, where.partition("%")[0])[:8] + bytes(8)
            where = socket.inet_ntop(socket.AF_INET6, network) + "/64"
        self.counts[where] += 1
        return where

    def is_too_large(self, where: str | None) -> bool:
        """Whether an address exceeds its limit of connections; log a warning once, until it has none."""
        if where is None or self.counts[where] <= self.most:
            return False
        if where not in self.told:
            self.told.add(where)
            log.warning("%s has %d connections, the limit per address; further ones are closed", where, self.most)
        return True

    def leave(self, where: str | None) -> None:
        """Stop counting a connection."""
        if where is not None:
            self.counts[where] -= 1
            if not self.counts[where]:
                del self.counts[where]
                self.told.discard(where)


class Http(HttpToolsProtocol):
    """One client's connection, with a timeout and a size limit for headers, and unambiguous framing."""

    header_timeout_seconds = 10.0
    trusted_proxies: tuple[str, ...] = ()
    crowd = Crowd(0)
    traffic = Traffic()
    where: str | None = None

    # uvicorn's type does not allow None, which it is before the first request.
    cycle: Any
    running: Any = None         # the request being answered; `cycle` is the last request read
    idle_since = 0.0
    refused = False
    resuming = False
    # Bytes read since the last complete head or the last piece of an expected body.
    idle_bytes = 0
    refusal: HttpRefusal | None = None
    clock: asyncio.TimerHandle | None = None
    stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for headers, or close the connection if its address has too many."""
        super().connection_made(transport)
        self.headers, self.idle_since = TRAILERS, self.loop.time()
        self.where = self.crowd.enter(self.client)
        if self.crowd.is_too_large(self.where):
            return transport.abort()
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers of the connection, and mark all its requests, also pipelined ones, as disconnected.

        uvicorn marks only the last request read; the others would fail when they write, each with a traceback.
        """
        for cycle in (self.running, *(queued for queued, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.crowd.leave(self.where)
        self._stop_clock()
        self._stop_stall()

    def data_received(self, data: bytes) -> None:
        """Parse and check received data before the app sees it."""
        if self.refused:
            return self._rest_between_reads()
        self.idle_bytes += len(data)
        before = self.cycle
        held = 0 if before is None else len(before.body)
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as stop:
            self._resume_parsing(data, stop)
        if self.cycle is not before and self.headers is TRAILERS:
            self.idle_bytes = 0
        else:
            self._check_partial(before, held)

    def _resume_parsing(self, data: bytes | memoryview, stop: Exception) -> None:
        while isinstance(stop, httptools.HttpParserUpgrade):
            data = memoryview(data)[stop.args[0] :]
            try:
                self._ignore_url_upgrade()
                return self.parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as next_stop:
                stop = next_stop
        self._refuse(self.refusal or MALFORMED)

    def _check_partial(self, before: Any, held: int) -> None:
        """Limit the size and time of a read that did not complete a head."""
        if self.refused:
            return
        cycle = self.cycle
        in_head = self._is_in_head()
        if cycle is not before or (cycle is not None and len(cycle.body) > held):
            self.idle_bytes = 0
        elif self.idle_bytes > MAX_HEAD_BYTES:
            return self._refuse(LARGE_HEAD if in_head else MALFORMED)
        # Also between requests: stray line ends begin no message.
        if self.clock is None and (in_head or cycle is None or cycle.response_complete):
            self._start_clock()

    def _is_in_head(self) -> bool:
        return self.headers is not TRAILERS

    def _ignore_url_upgrade(self) -> None:
        """Continue in HTTP/1.1 after a request that offers another protocol.

        The parser treats such a request as the last one, and its body as the other protocol. Parsed again, that body
        would become a request that nobody sent (request smuggling). So a new parser gets the framing and continues
        where the old one stopped. Clients that offer h2c with every request are common.
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
        """Strip trailing whitespace from a header's value, which the parser keeps (RFC 9110 5.5)."""
        name, value = name.lower(), value.rstrip(b" \t")
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Check the head of a request once it is complete."""
        if self.resuming:
            self.headers = TRAILERS
            return
        if self.idle_bytes > MAX_HEAD_BYTES < len(self.url) + sum(
                len(name) + len(value) + 4 for name, value in self.headers):
            self._reject(LARGE_HEAD)
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            self._reject(OTHER_VERSION)
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) != 1 and (hosts or version != "1.0"):
            self._reject(ONE_HOST)
        if not self.url.startswith(b"/") and self.url != b"*":      # an absolute target: its authority is the host
            authority = self.url.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0].lower()
            if authority not in map(bytes.lower, hosts):
                self._reject(OTHER_HOST)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._make_room(len(self.connections) - self.limit_concurrency + 1)
        super().on_headers_complete()
        if self.traffic.leaving:
            self.cycle.keep_alive = False
        if any(name in BODIES for name, _ in self.headers):
            self.cycle.transport = Lingering(self, self.cycle)
        cast(dict[str, Any], self.scope)["extensions"] = {"asyncgate.whole": CycleShortcut(self.cycle)}
        self.headers = TRAILERS
        if self.clock is not None:
            self._stop_clock()

    def _make_room(self, places: int) -> None:
        """Close the connections that have been idle longest, so that idle clients do not block others."""
        others: list[Any] = [other for other in self.connections if other is not self]
        for idle in sorted(filter(methodcaller("is_idle"), others), key=attrgetter("idle_since"))[:places]:
            self.connections.discard(idle)
            idle.transport.close()

    def is_idle(self) -> bool:
        """Whether this connection has no running request."""
        return (self.cycle is None or self.cycle.response_complete) and not self.pipeline

    def on_response_complete(self) -> None:
        """Start the request that waits, if there is one; else the connection is idle from now on."""
        self.running.scope["extensions"].clear()     # else it would hold itself until a garbage collection
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.idle_since = self.loop.time()
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self.timeout_keep_alive_task is None:      # one timer for many requests: it looks again when it ends
            self._wait_for_more(self.timeout_keep_alive)

    def _wait_for_more(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _reject(self, refusal: HttpRefusal) -> NoReturn:
        # Raised through the parser, so that it parses no further message of the same read.
        self.refusal = refusal
        raise refusal

    def _refuse(self, refusal: HttpRefusal) -> None:
        """Send the refusal, unless a client could take it for the answer to another request, and close."""
        self.refused = True
        cycle = self.cycle
        in_head = self._is_in_head()
        if cycle is not None and not cycle.response_complete:
            if in_head or self.pipeline or cycle.response_started or not cycle.more_body:
                return self.transport.abort()
            cycle.disconnected = True
            cycle.message_event.set()
        if in_head or cycle is None or not cycle.response_complete:
            self.transport.write(refusal.encode(self.server_state.default_headers, self._find_scheme()))
        self.discard_rest()

    def discard_rest(self) -> None:
        """Send the end of the answers, then read and drop what the client still sends, and close (RFC 9112 9.6).

        If the server closed before, the client's system would discard the answer unread.
        """
        self.refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._start_clock()

    def _rest_between_reads(self) -> None:
        """Read on a little later: a client that sends what nobody wants must not take the time of the others."""
        if not self.transport.is_closing():
            self.flow.pause_reading()
            self.loop.call_later(UNWANTED_READ_SECONDS, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _find_scheme(self) -> str | None:
        """Return the client's scheme; a trusted proxy tells it in a header, if that header was read already."""
        before = self.cycle.scope["headers"] if self.cycle is not None else []
        headers = self.headers if self._is_in_head() else before
        scope = {"client": self.client, "headers": headers}
        return "https" if self.trusted_proxies and connection.is_https_by_proxy(scope,
                                                                                self.trusted_proxies) else self.scheme

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.running = cycle
        path = cycle.scope["path"].removeprefix(cycle.scope["root_path"])
        if app is not self.app and path.startswith("/mcp"):     # whose clients need an answer in JSON-RPC
            cycle.scope["asyncgate.overloaded"], app = True, self.app
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
            # A client that sent a part of its next request early is still waiting for the answer.
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
        """Close the connection if it has been idle for long enough."""
        self.timeout_keep_alive_task = None
        if not self.is_idle() or self.clock is not None:
            return      # the next answer starts the time again; a head that is being read has its own
        if (left := self.idle_since + self.timeout_keep_alive - self.loop.time()) > 0:
            self._wait_for_more(left)
        else:       # a plain close would wait for a client that never reads its answer
            self.transport.abort()
