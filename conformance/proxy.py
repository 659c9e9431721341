"""A TCP proxy before Postgres that fails when it is told to, and in the one moment that matters most: at COMMIT."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Self
from urllib.parse import urlsplit

from asyncgate.conformance.postgres_server import free_port

HOST = "127.0.0.1"
STARTUP = b"\0\3"               # the major version of the protocol; before it a client may ask for encryption
COMMITTED = b"C\0\0\0\x0bCOMMIT\0"
LAST_WORD = b"N\0\0\0\x20SWARNING\0C01000\0Mlast word\0\0"
CHUNK = 2 ** 16
Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with a reset; one that the other side has ended meanwhile has no socket any more."""
    if (wire := writer.get_extra_info("socket")) is not None:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def send(writer: asyncio.StreamWriter, chunk: bytes) -> None:
    """Write to a connection; raise ConnectionResetError if it has ended meanwhile."""
    if writer.is_closing():     # uvloop's own error is not an OSError
        raise ConnectionResetError
    writer.write(chunk)


class Messages:
    """Cuts what one side says into messages; the first ones of a client have no type."""

    def __init__(self, typed: bool) -> None:
        self.typed, self.held = typed, b""

    def of(self, chunk: bytes) -> Iterator[bytes]:
        """Return the messages that are whole now."""
        self.held += chunk
        while len(self.held) >= 4 + self.typed and len(self.held) >= (end := self._end()):
            message, self.held = self.held[:end], self.held[end:]
            self.typed = self.typed or message[4:6] == STARTUP
            yield message

    def _end(self) -> int:
        return self.typed + int.from_bytes(self.held[self.typed:self.typed + 4], "big")


class Cut(Exception):
    """The connection is to be cut now."""


@dataclass
class Trap:
    """What is to happen at one of the next COMMITs."""

    nth: int
    before: bool = False        # it is not passed on; else it is carried out and its reply is lost
    again: bool = False         # at every nth
    gone: bool = False          # and the database cannot be reached any more
    late: float = 0.0           # seconds: its reply gets through, but not before
    of: bytes = b""             # only COMMITs of transactions that sent this count
    seen: int = 0
    caught: int = 0

    def springs(self, sent: bytes) -> bool:
        """Count one more COMMIT of what was sent; say whether it is meant."""
        if self.of not in sent:
            return False
        self.seen += 1
        meant = self.seen % self.nth == 0 if self.again else self.seen == self.nth
        self.caught += meant
        return meant


class Link:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, client: Wire) -> None:
        self.proxy, self.client, self.passing = proxy, client, proxy.passing
        self.asked, self.lost = Messages(typed=False), Messages(typed=True)
        self.losing: Trap | None = None
        self.texts: dict[bytes, bytes] = {}     # of prepared statements, by name
        self.sent = b""                 # in the running transaction

    async def run(self) -> None:
        """Carry bytes both ways until one side has had enough."""
        try:
            await self.passing.wait()
            server = await asyncio.open_connection(HOST, self.proxy.target)
        except OSError:
            return
        port = server[1].get_extra_info("sockname")[1]
        self.proxy.ports.add(port)
        try:
            await self._between(server)
        finally:
            self.proxy.ports.discard(port)

    async def _between(self, server: Wire) -> None:
        pumps = [asyncio.create_task(self._up(self.client[0], server[1])),
                 asyncio.create_task(self._down(server[0], self.client[1]))]
        over = False
        try:
            ended, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            over = all(pump.exception() is None for pump in ended)
        finally:
            for _, writer in (self.client, server):     # at once: whoever cuts may cut again
                writer.close() if over else writer.transport.abort()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await self._read(reader):
            for message in self.asked.of(chunk):
                text = self._text(message)
                self.sent = message if text.startswith(b"BEGIN") else self.sent + message
                if text == b"COMMIT" and (trap := self.proxy.trap) and trap.springs(self.sent):
                    if trap.before:
                        raise Cut
                    self.losing = trap
                send(writer, message)
            await writer.drain()

    def _text(self, message: bytes) -> bytes:
        """Return the statement that a message asks to run."""
        if message[:1] == b"P":
            name, text, _ = message[5:].split(b"\0", 2)
            self.texts[name] = text
        return self.texts[message[5:].split(b"\0", 2)[1]] if message[:1] == b"B" else b""

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await self._read(reader):
            trap = self.losing
            if trap is not None and any(message == COMMITTED for message in self.lost.of(chunk)):
                if trap.gone:
                    self.proxy.close_door()
                if not trap.late:
                    raise Cut
                await asyncio.sleep(trap.late)
                self.losing, self.lost = None, Messages(typed=True)
            if trap is None or trap.late:
                send(writer, chunk)
                await writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        try:
            chunk = await reader.read(CHUNK)
        except OSError:
            chunk = b""
        await self.passing.wait()       # a black hole does not even pass on that somebody has left
        if self.proxy.delay_seconds:
            await asyncio.sleep(self.proxy.delay_seconds)
        return chunk


class Proxy:
    """A port before that of a server; it passes everything on until it is told otherwise."""

    def __init__(self, target: int) -> None:
        self.target, self.port = target, free_port()
        self.delay_seconds = 0.0            # of each chunk, each way
        self.trap: Trap | None = None
        self.ports: set[int] = set()        # from which it speaks to the server
        self.links: set[asyncio.Task[None]] = set()
        self.clients: set[asyncio.StreamWriter] = set()
        self.passing = asyncio.Event()
        self.door: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.restore()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close_door()
        await asyncio.gather(*self.links, return_exceptions=True)

    def url(self, url: str) -> str:
        """Return the URL by which a database of the server is reached through the proxy."""
        parts = urlsplit(url)
        return parts._replace(netloc=f"{parts.username}@{HOST}:{self.port}").geturl()

    async def restore(self) -> None:
        """Pass everything on, from now on."""
        self.trap, self.delay_seconds = None, 0.0
        self.passing.set()
        if self.door is None:
            self.door = await asyncio.start_server(self._accept, HOST, self.port)

    def close_door(self) -> None:
        """Refuse new connections, and cut all that there are."""
        if self.door is not None:
            self.door.close()
            self.door = None
        self.cut()

    def cut(self) -> None:
        """Cut all connections."""
        for link in self.links:
            link.cancel()

    def reset(self) -> None:
        """Say a last word on all connections that there are, and reset them."""
        for writer in self.clients:
            with contextlib.suppress(ConnectionResetError):
                send(writer, LAST_WORD)
            reset(writer)

    def swallow(self) -> None:
        """Be a black hole: take everything, pass on nothing, and let nobody know."""
        self.passing.clear()

    def forget(self) -> None:
        """Be a black hole for the connections that there are, like a router that lost its memory; pass on new ones."""
        self.passing.clear()
        self.passing = asyncio.Event()
        self.passing.set()

    def lose_reply(self, nth: int = 1, *, again: bool = False, gone: bool = False, of: bytes = b"") -> Trap:
        """Let the nth COMMIT from now on be carried out, and cut its connection before its reply gets through."""
        self.trap = Trap(nth, again=again, gone=gone, of=of)
        return self.trap

    def cut_before(self, nth: int = 1, *, again: bool = False) -> Trap:
        """Cut the connection of the nth COMMIT from now on before it gets through."""
        self.trap = Trap(nth, before=True, again=again)
        return self.trap

    def delay_reply(self, nth: int = 1, *, again: bool = False, late: float = 3.0) -> Trap:
        """Let the nth COMMIT from now on be carried out, and its reply get through some seconds later."""
        self.trap = Trap(nth, again=again, late=late)
        return self.trap

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.door is None:       # the loop had accepted it before the door was closed
            return writer.transport.abort()
        link = asyncio.create_task(Link(self, (reader, writer)).run())
        self.links.add(link)
        self.clients.add(writer)
        link.add_done_callback(partial(self._over, writer))

    def _over(self, writer: asyncio.StreamWriter, link: asyncio.Task[None]) -> None:
        self.links.discard(link)
        self.clients.discard(writer)
        writer.transport.abort()        # it may have been cut before it began
