"""A transport into an ASGI application of this process, with a server's cancellation, streaming and shutdown.

httpx2's own transport buffers the whole answer before it returns.  It also never tells the application that a
cancelled client has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2

from asyncgate.parts.model.connection import AsgiMessage

App = Callable[[Any, Callable[[], Awaitable[AsgiMessage]], Callable[[AsgiMessage], Awaitable[None]]], Awaitable[None]]


class InProcess(httpx2.AsyncBaseTransport):
    """Passes requests to an application; each request runs in its own asyncio task, as in a server."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.running: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Serve one request; return as soon as its answer begins."""
        answer = StreamedAnswer(await request.aread())
        serving = asyncio.create_task(answer.serve(self.app, scope_of(request)))
        self.running.add(serving)
        serving.add_done_callback(self.running.discard)
        try:
            head = await answer.messages.get()
        except BaseException:
            answer.gone.set()       # tell the application that its client has gone
            raise
        if head is None:
            await serving
            raise httpx2.RemoteProtocolError("the application ended without an answer", request=request)
        return httpx2.Response(head["status"], headers=head["headers"], stream=answer, request=request)

    async def aclose(self) -> None:
        """Wait until every request has ended."""
        await asyncio.gather(*self.running, return_exceptions=True)


class StreamedAnswer(httpx2.AsyncByteStream):
    """The streamed answer of an application to one request."""

    def __init__(self, body: bytes) -> None:
        self.body = [body]
        self.messages: asyncio.Queue[AsgiMessage | None] = asyncio.Queue()
        self.gone = asyncio.Event()

    async def serve(self, app: App, scope: dict[str, Any]) -> None:
        """Run the application; a final None marks its end."""
        try:
            await app(scope, self.receive, self.messages.put)
        finally:
            self.messages.put_nowait(None)

    async def receive(self) -> AsgiMessage:
        """Give the application the request body, and later the disconnect of its client."""
        if self.body:
            return {"type": "http.request", "body": self.body.pop(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self.messages.get()) is not None:
            yield message.get("body", b"")
            if not message.get("more_body"):
                return

    async def aclose(self) -> None:
        """Disconnect: tell the application that its client has gone."""
        self.gone.set()


def scope_of(request: httpx2.Request) -> dict[str, Any]:
    """Return the ASGI scope of a request."""
    url = request.url
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method,
        "scheme": url.scheme, "path": url.path, "raw_path": url.raw_path.partition(b"?")[0], "query_string": url.query,
        "headers": [(name.lower(), value) for name, value in request.headers.raw], "root_path": "",
        "client": ("127.0.0.1", 1), "server": (url.host, url.port)}
