"""A transport into an ASGI application of this process, with what a server would do: cancellation, streams, an end.

httpx2's own transport collects a whole answer before it returns, and loses a cancellation that the application takes
for the end of its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpx2

Message = MutableMapping[str, Any]
App = Callable[[Any, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class InProcess(httpx2.AsyncBaseTransport):
    """Hands requests to an application; each is served by a task of its own, as a server would."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.running: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Serve one request and return its answer once that begins."""
        answer = Answer(await request.aread())
        serving = asyncio.create_task(answer.serve(self.app, scope_of(request)))
        self.running.add(serving)
        serving.add_done_callback(self.running.discard)
        try:
            head = await answer.messages.get()
        except BaseException:
            answer.gone.set()       # the application learns that nobody waits any more
            raise
        if head is None:
            await serving
            raise httpx2.RemoteProtocolError("the application left without an answer", request=request)
        return httpx2.Response(head["status"], headers=head["headers"], stream=answer, request=request)

    async def aclose(self) -> None:
        """Wait until every request is done with."""
        await asyncio.gather(*self.running, return_exceptions=True)


class Answer(httpx2.AsyncByteStream):
    """What an application says to one request, piece by piece."""

    def __init__(self, body: bytes) -> None:
        self.body = [body]
        self.messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self.gone = asyncio.Event()

    async def serve(self, app: App, scope: dict[str, Any]) -> None:
        """Run the application; its end is the last message."""
        try:
            await app(scope, self.receive, self.messages.put)
        finally:
            self.messages.put_nowait(None)

    async def receive(self) -> Message:
        """Give the application the request, and later the news that its client has gone."""
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
        """Want no more of it."""
        self.gone.set()


def scope_of(request: httpx2.Request) -> dict[str, Any]:
    """Describe a request as ASGI does."""
    url = request.url
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method,
        "scheme": url.scheme, "path": url.path, "raw_path": url.raw_path.partition(b"?")[0], "query_string": url.query,
        "headers": [(name.lower(), value) for name, value in request.headers.raw], "root_path": "",
        "client": ("127.0.0.1", 1), "server": (url.host, url.port)}
