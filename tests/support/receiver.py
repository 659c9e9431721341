"""A receiver of webhooks on a port of its own, which answers as a test wants and keeps what came."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import standardwebhooks
from msgspec import Struct

FLOOD_BYTES = 2**26


class Came(Struct):
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        """Return the id of the event."""
        return self.headers["webhook-id"]

    @property
    def said(self) -> dict[str, Any]:
        """Return the body."""
        content: dict[str, Any] = json.loads(self.body)
        return content

    @property
    def type(self) -> str:
        """Return the type of the event."""
        return str(self.said["type"])

    @property
    def task_id(self) -> str:
        """Return the task that the event is about."""
        return str(self.said["data"].get("task_id"))

    def verify(self, secret: str) -> None:
        """Check the signature with a program that is not ours; raises WebhookVerificationError."""
        standardwebhooks.Webhook(secret).verify(self.body, self.headers)


# What a receiver does with a request: answers with a status and headers, or misbehaves.
Reply = tuple[int, dict[str, str]] | str
OK: Reply = (204, {})
CUT, HANG, FLOOD, TRICKLE = "cut", "hang", "flood", "trickle"


class Receiver:
    """Takes events; `answer` says what each request gets."""

    def __init__(self, answer: Callable[[Came], Reply] = lambda came: OK, host: str = "127.0.0.1",
                 port: int = 0) -> None:
        self.answer, self.host, self.port = answer, host, port
        self.came: list[Came] = []          # every request
        self.taken: list[Came] = []         # those that were answered with a success
        self.sent_bytes = 0                 # of the longest flood
        self.moved = asyncio.Event()
        self.ended = asyncio.Event()
        self.under_way: set[asyncio.Task[Any]] = set()
        self.writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Receiver:
        self.server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://{self.host}:{self.port}/hook"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        self.ended.set()
        while self.writers:
            (writer := self.writers.pop()).transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        await asyncio.gather(*self.under_way)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.under_way.add(task)
        self.writers.add(writer)
        with contextlib.suppress(EOFError, OSError):
            line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (header.partition(": ") for header in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.came.append(came := Came(line.split()[1], headers, body))
            reply = self.answer(came)
            if not isinstance(reply, str) and reply[0] in range(200, 300):
                self.taken.append(came)
            self.moved.set()
            await self._reply(writer, reply)
        if writer in self.writers:
            self.writers.discard(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        self.under_way.discard(task)

    async def _reply(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        if reply == HANG:
            await self.ended.wait()
        if reply == TRICKLE:            # a header that never ends
            writer.write(b"HTTP/1.1 200 OK\r\nx-slow: ")
            while not (self.ended.is_set() or writer.transport.is_closing()):
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        if reply == FLOOD:
            writer.write(b"HTTP/1.1 500 X\r\ncontent-type: text/plain\r\n\r\n")
            for sent_bytes in range(65536, FLOOD_BYTES + 1, 65536):
                if writer.is_closing():     # by whom it floods; uvloop refuses what is written then
                    return
                writer.write(b"x" * 65536)
                await writer.drain()
                self.sent_bytes = max(self.sent_bytes, sent_bytes)
        if isinstance(reply, tuple):
            lines = "".join(f"{name}: {value}\r\n" for name, value in reply[1].items())
            writer.write(f"HTTP/1.1 {reply[0]} X\r\n{lines}content-length: 0\r\n\r\n".encode())
            await writer.drain()

    async def until(self, enough: Callable[[], bool]) -> None:
        """Wait until what came is enough."""
        while not enough():
            self.moved.clear()
            await self.moved.wait()
