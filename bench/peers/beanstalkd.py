"""The driver of beanstalkd: its protocol over one connection a client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from asyncgate.bench.peers import child
from asyncgate.commands.bench.wire import Failed

PUT = b"put 0 0 300 %d\r\n%b\r\n" % (len(child.PAYLOAD), child.PAYLOAD)


class Pipe:
    """A connection to beanstalkd."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, command: bytes, wanted: bytes) -> list[bytes]:
        """Send a command; return the words after the wanted answer."""
        self.writer.write(command)
        first, *words = (await self.reader.readline()).split() or [b"nothing"]
        if first != wanted:
            raise Failed(f"beanstalkd answers {first.decode(errors='replace')}, not {wanted.decode()}")
        return words

    async def reserve(self) -> bytes:
        """Take a job; return its id."""
        job, size = await self.ask(b"reserve\r\n", b"RESERVED")
        await self.reader.readexactly(int(size) + 2)
        return job


@contextlib.asynccontextmanager
async def open_peer(url: str, clients: int) -> AsyncIterator[child.Modes]:
    """Connect every client."""
    where = urlsplit(url)
    pipes = [Pipe(*await asyncio.open_connection(where.hostname, where.port)) for _ in range(clients)]

    async def cycle(client: int) -> AsyncIterator[str]:
        await pipes[client].ask(PUT, b"INSERTED")
        yield child.CREATE
        job = await pipes[client].reserve()
        yield child.CLAIM
        await pipes[client].ask(b"delete %b\r\n" % job, b"DELETED")
        yield child.COMPLETE

    try:
        yield {"cycle": cycle}
    finally:
        for pipe in pipes:
            pipe.writer.close()
