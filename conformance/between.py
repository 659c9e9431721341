"""What stands between clients and gates: a wire that breaks at any byte, and a witness of what programs ask."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from functools import cache
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from asyncgate.conformance.history import Call
from asyncgate.conformance.load import Gates
from asyncgate.conformance.proxy import CHUNK, HOST, reset, send
from asyncgate.parts.operations import OPERATIONS

BYTES_OF_A_WIRE = 4000      # behind so many at most a wire breaks: some requests, or some answers
ENDLESS = 2**62


class Reset(Exception):
    """The wire breaks now."""


class Port:
    """A port before that of any live gate; to clients it looks like a gate."""

    def __init__(self, gates: Gates) -> None:
        self.gates, self.up, self.tenant, self.port = gates, gates.up, gates.tenant, 0
        self.links: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self.door = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self.door.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.door.close()
        for link in self.links:
            link.cancel()
        await asyncio.gather(*self.links, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.create_task(self._join(reader, writer))
        self.links.add(link)
        link.add_done_callback(self.links.discard)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        both = [writer]
        try:
            gate, to_gate = await asyncio.open_connection(HOST, self.gates.port)
            both.append(to_gate)
            await self.carry(reader, writer, gate, to_gate)
        except (OSError, EOFError, ValueError, Reset):
            pass
        finally:
            for wire in both:
                wire.transport.abort()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.StreamReader,
                    to_gate: asyncio.StreamWriter) -> None:
        """Carry bytes both ways until a side has had enough."""
        raise NotImplementedError


class BreakingWire(Port):
    """Resets each connection behind a number of bytes, in turn of what was asked and of what was answered."""

    def __init__(self, gates: Gates, first: int) -> None:
        super().__init__(gates)
        self.number, self.caught, self.armed = first, 0, False

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.StreamReader,
                    to_gate: asyncio.StreamWriter) -> None:
        """Carry bytes both ways, and no more of them than this connection may have."""
        at, self.number = self.number, self.number + 1
        asked, answered = [at // 2 % BYTES_OF_A_WIRE if way == at % 2 and self.armed else ENDLESS for way in (0, 1)]
        pumps = [asyncio.create_task(self._pump(reader, to_gate, asked)),
                 asyncio.create_task(self._pump(gate, writer, answered))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            ends = await asyncio.gather(*pumps, return_exceptions=True)
        if any(isinstance(end, Reset) for end in ends):
            self.caught += 1
            for wire in (writer, to_gate):
                reset(wire)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int) -> None:
        while chunk := await reader.read(CHUNK):
            send(writer, chunk[:most])
            if len(chunk) >= most:
                raise Reset
            most -= len(chunk)
            await writer.drain()


class Witness(Port):
    """Takes down what programs ask of a gate, and what they are answered, also when they die meanwhile."""

    def __init__(self, gates: Gates, write: Callable[[Call], None]) -> None:
        super().__init__(gates)
        self.write = write

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.StreamReader,
                    to_gate: asyncio.StreamWriter) -> None:
        """Carry one request and its answer after the other."""
        while True:
            head, body = await read_message(reader)
            call = self._recognize(head, body)
            send(to_gate, head + body)
            left = asyncio.create_task(reader.read(1))      # who asks says nothing more before the answer
            answering = asyncio.create_task(read_message(gate))
            try:
                await asyncio.wait([left, answering], return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    head, body = answering.result()
                    self._take(call, int(head.split()[1]), json.loads(body or b"null"))
                    send(writer, head + body)
            finally:
                for task in (left, answering):
                    task.cancel()
                await asyncio.gather(left, answering, return_exceptions=True)
                if call is not None:
                    call.ended = time.time()
                    self.write(call)
            if not answering.done() or answering.cancelled() or b"connection: close" in head.lower():
                await writer.drain()
                return

    def _recognize(self, head: bytes, body: bytes) -> Call | None:
        verb, target, _ = head.split(b"\r\n", 1)[0].decode().split()
        where = urlsplit(target)
        for name, pattern in list_routes(verb):
            if match := pattern.fullmatch(where.path):
                ask = {**dict(parse_qsl(where.query)), **json.loads(body or b"{}"),
                       **{key: unquote(value) for key, value in match.groupdict().items()}}
                by = ask.get("worker_id") or ask.get("agent_id") or ""
                return Call(tenant=self.tenant, operation=name, ask=ask, by=by, started=time.time(), ended=0.0)
        return None

    def _take(self, call: Call | None, status: int, answer: Any) -> None:
        if call is not None:
            call.reply, call.error = (answer, None) if status == 200 else (None, answer["error"])


@cache
def list_routes(verb: str) -> list[tuple[str, re.Pattern[str]]]:
    """Return the operations that are asked with a verb, with what their paths look like; plain ones first."""
    routes = [(name, path) for name, op in OPERATIONS.items() for way, path in op.rest if way == verb]
    return [(name, re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)))
            for name, path in sorted(routes, key=lambda route: "{" in route[1])]


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Read the head and the body of a request or an answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return head, await reader.readexactly(int(length[1]) if length else 0)
