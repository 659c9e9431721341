"""A connection to a gate for `asyncgate bench`: raw HTTP over asyncio, to keep the overhead of measuring small."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import msgspec

from asyncgate.clients.http import require_private

T = TypeVar("T")
CONNECT_SECONDS = 10.0


class Failed(Exception):
    """An unexpected answer, with one line of text and the HTTP status."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NoGate(Failed):
    """The gate does not answer."""


HINTS = {401: "; give --token or set ASYNCGATE_API_KEY",
         429: "; measure without limits: --set security.rate_limiting.enabled=false",
         404: "; the mode echo and --self need `asyncgate bench-server`, other modes a gate of this release"}


def make_failure(status: bytes, body: bytes) -> Failed:
    """Describe a failed answer in one line."""
    number = int(status) if status.isdigit() else 0
    try:
        error = msgspec.json.decode(body)
        text = f"{error['error']} ({number}): {error['message']}"
    except (ValueError, KeyError, TypeError):
        text = f"the answer has the status {number}: {body[:200].decode(errors='replace')!r}"
    return Failed(text + HINTS.get(number, ""), number)


class Wire(asyncio.Protocol):
    """One connection for one request at a time; its user sets the callbacks for answers and failures."""

    def __init__(self) -> None:
        self.held = b""
        self.taken: Callable[[bytes], None] | None = None
        self.failed: Callable[[Exception], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.WriteTransport, transport)     # uvloop's transports are not subclasses

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss to the waiting caller."""
        if self.failed is not None:
            self.failed(Failed("the gate closed the connection"))

    def data_received(self, data: bytes) -> None:
        """Collect an answer; the gate always sends its length."""
        if self.held:
            data = self.held + data
        end = data.find(b"\r\n\r\n")
        last = end + 4 + read_length(data, end) if end >= 0 else 0
        if end < 0 or len(data) < last:
            self.held = data
            return
        self.held = data[last:]
        if data[9:12] == b"200" and self.taken is not None:
            self.taken(data[end + 4:last])
        elif self.failed is not None:
            self.failed(make_failure(data[9:12], data[end + 4:last]))

    def send(self, request: bytes) -> None:
        """Send one request; call `taken` with the body of the answer, or `failed` with the error."""
        if self.transport.is_closing():
            return self.connection_lost(None)
        self.transport.write(request)

    def ask(self, request: bytes) -> asyncio.Future[bytes]:
        """Send one request and return the body of its answer as a future."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def taken(body: bytes) -> None:
            if not answer.done():
                answer.set_result(body)

        def failed(wrong: Exception) -> None:
            if not answer.done():
                answer.set_exception(wrong)

        self.taken, self.failed = taken, failed
        self.send(request)
        return answer

    def close(self) -> None:
        """Close the connection without waiting for an answer."""
        self.taken = self.failed = None
        self.transport.abort()


def read_length(data: bytes, end: int) -> int:
    """Return the length of the body after this head."""
    at = data.find(b"content-length:", 0, end)
    if at < 0:
        at = data[:end].lower().find(b"content-length:")
    return int(data[at + 15:data.index(b"\r\n", at)]) if at >= 0 else 0


class LoadGate:
    """A gate under load: where it is, how requests to it begin, and what was made ready on it."""

    def __init__(self, url: str, token: str = "", name: str = "") -> None:
        where = urlsplit(url)
        if where.scheme not in ("http", "https") or not where.hostname:
            raise ValueError(f"a gate's URL is like http://127.0.0.1:8080, not {url!r}")
        if not re.fullmatch(r"[!-~]*", token):
            raise ValueError("a token is made of printable ASCII characters without blanks")
        require_private(token, url)
        self.url, self.token, self.name, self.host = url, token, name, where.hostname
        self.written: Callable[[], Awaitable[float | None]] | None = None   # tells what its database has written
        self.tls = ssl.create_default_context() if where.scheme == "https" else None
        self.port = where.port or (443 if self.tls else 80)
        credential = f"authorization: Bearer {token}\r\n" if token else ""
        self.prefix = where.path.rstrip("/").encode()
        self.head = f" HTTP/1.1\r\nhost: {where.netloc.rpartition('@')[2]}\r\n{credential}".encode()
        self.posts = self.head + b"content-type: application/json\r\n"
        self.stocked, self.waiting = 0, b""     # tasks to drain; the task that is explained
        self.tenants: list[LoadGate] = []       # to which clients go in turns, if there are several

    def post(self, path: bytes, body: bytes, more: bytes = b"") -> bytes:
        """Return the bytes of a request with a body."""
        size = b"content-length: %d\r\n\r\n" % len(body)
        return b"".join((b"POST ", self.prefix, path, self.posts, more, size, body))

    def get(self, path: bytes) -> bytes:
        """Return the bytes of a request without a body."""
        return b"".join((b"GET ", self.prefix, path, self.head, b"\r\n"))

    async def connect(self) -> Wire:
        """Open one connection."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return (await loop.create_connection(Wire, self.host, self.port, ssl=self.tls))[1]
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise Failed("too many open files: raise the limit (ulimit -n), or ask for fewer connections") from None
            raise NoGate(f"no gate answers at {self.url}; start one with `asyncgate bench-server`") from None

    @contextlib.asynccontextmanager
    async def connected(self, number: int) -> AsyncIterator[list[Wire]]:
        """Open a number of connections for a block."""
        wires: list[Wire] = []
        try:
            for _ in range(number):
                wires.append(await self.connect())
            yield wires
        finally:
            for wire in wires:
                wire.close()


def run_on_fastest_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run on the fastest available loop, so that the load does not distort the measurement."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
