"""MCP over standard input and output, for hosts that start a program instead of calling a URL.

Each line is one message and becomes one POST to a gate's /mcp: to a running gate, with its credential, or to a gate
inside this process.  The gate is stateless, so this module only keeps the protocol version that an older client
negotiated.  Standard output carries only messages.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import sys
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlencode

import msgspec

from asyncgate.clients import http
from asyncgate.clients.client import DEFAULT_PATIENCE_SECONDS
from asyncgate.clients.in_process import InProcess
from asyncgate.clients.operations import CALLS
from asyncgate.clients.worker.job import run_in_thread
from asyncgate.parts.app import Gate
from asyncgate.parts.model import jsonrpc
from asyncgate.parts.model.content import JsonObject
from asyncgate.parts.model.settings import Settings

if TYPE_CHECKING:
    import httpx2

VERSION = "io.modelcontextprotocol/protocolVersion"
LISTEN = "subscriptions/listen"
BETWEEN = {HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}      # of a proxy
NAME_FIELDS = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}      # repeated in Mcp-Name
ACCEPTED = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
FINISH_SECONDS = 5.0              # for calls that wait for something, after the host closes its end
LONGEST_WAIT_SECONDS = 60.0     # the upper limit of a gate's setting

log = logging.getLogger("asyncgate")


class Bridge:
    """Passes messages from a host to a gate, and the answers back."""

    def __init__(self, client: httpx2.AsyncClient, exchange: http.Exchange, path: str, write: Callable[[bytes], None],
                 *, streams: bool, patience_seconds: float = 0.0) -> None:
        self.client, self.exchange, self.url, self.write = client, exchange, exchange.url + path, write
        self.patience_seconds = patience_seconds        # for a gate that does not answer now
        self.reached = False        # whether it ever did
        self.streams = streams      # whether answers can be streamed
        self.agreed = ""            # the version of the handshake, if any
        self.under_way: dict[Any, asyncio.Task[None]] = {}
        self.waiting: set[asyncio.Task[None]] = set()       # those that may take until something happens

    async def serve(self, read: Callable[[], bytes]) -> None:
        """Pass on messages until the host closes its end."""
        while line := await run_in_thread(read):
            if line.strip():
                self.take(line)
        left = list(self.under_way.values())
        # Who pipes calls into this program waits for their answers; a host that does not wait ends the process.
        await asyncio.gather(*[task for task in left if task not in self.waiting], return_exceptions=True)
        if self.waiting:
            await asyncio.wait(self.waiting, timeout=FINISH_SECONDS)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def take(self, line: bytes) -> None:
        """Start sending one message; several may run at once."""
        try:
            message = msgspec.json.decode(line)
        except (ValueError, RecursionError) as wrong:
            return self.refuse(None, jsonrpc.PARSE_ERROR, f"this line is not JSON: {wrong}")
        if not isinstance(message, dict):
            return self.refuse(None, jsonrpc.PARSE_ERROR, "send one message per line: a JSON object")
        id, method = message.get("id"), message.get("method")
        if method == "notifications/cancelled":
            canceled = read_params(message).get("requestId")
            if isinstance(canceled, str | int) and (task := self.under_way.get(canceled)):
                task.cancel()       # the gate sees the disconnect
        elif isinstance(method, str) and isinstance(id, str | int):    # notifications get no answer
            self.under_way[id] = task = asyncio.create_task(self.carry(line.strip(), message, method, id))
            task.add_done_callback(lambda _: self.under_way.pop(id, None))
            if waits(message, method):
                self.waiting.add(task)
                task.add_done_callback(self.waiting.discard)
        elif isinstance(method, str) and not method.startswith("notifications/"):
            self.refuse(None, jsonrpc.INVALID_MESSAGE, f"{method} needs an id, a string or an integer")

    async def carry(self, line: bytes, message: JsonObject, method: str, id: str | int) -> None:
        """Send one request and write its answer."""
        import httpx2

        if method == LISTEN and not self.streams:
            return self.refuse(id, jsonrpc.UNKNOWN_METHOD, "subscriptions need a running gate: use --url")
        begun, tries = time.monotonic(), 0
        while True:
            headers = self.headers(message, method)
            timeout = httpx2.Timeout(http.ANSWER_SECONDS, read=None) if method == LISTEN else self.client.timeout
            try:
                async with self.client.stream("POST", self.url, content=line, headers=headers,
                                              timeout=timeout) as answer:
                    if answer.headers.get("content-type", "").startswith("text/event-stream"):
                        self.reached = True
                        return await self.pass_on(answer)
                    await answer.aread()
                if answer.status_code not in BETWEEN or "jsonrpc" in http.read_object(answer.content):
                    self.reached = True
                    return self.answer(answer, method, id)
                why = http.Unreachable(f"no gate answers behind {self.exchange.url} (status {answer.status_code})",
                                       sent=answer.status_code == HTTPStatus.GATEWAY_TIMEOUT)
            except httpx2.RequestError as error:
                why = self.exchange.unreachable(error)
            left = self.patience_seconds - (time.monotonic() - begun)
            if left <= 0 or isinstance(why, http.WrongAddress) or (why.sent and not is_repeatable(message, method)):
                return self.refuse(id, jsonrpc.INTERNAL_ERROR, self.describe_outage(why))
            if (tries := tries + 1) == 1:
                log.warning("%s: trying again for %.0f s", why, left)
            await asyncio.sleep(min(left, http.pause_after(tries)))

    def describe_outage(self, why: http.Unreachable) -> str:
        """Return what a model may do: a gate that is away comes back, and another one would not have its tasks."""
        if isinstance(why, http.WrongAddress) or why.sent or not self.reached:
            return str(why)
        return (f"the gate at {self.exchange.url} does not answer now, and its tasks are kept: it may be restarting. "
                "Nothing of this call was carried out: repeat it later")

    async def pass_on(self, answer: httpx2.Response) -> None:
        """Write the messages of a subscription as they arrive."""
        async for text in answer.aiter_lines():
            if text.startswith("data:"):
                self.write(text[5:].strip().encode())

    def answer(self, answer: httpx2.Response, method: str, id: str | int) -> None:
        """Write the answer to one request."""
        message = http.read_object(answer.content)
        if "jsonrpc" not in message and "error" not in message:
            return self.refuse(id, jsonrpc.INTERNAL_ERROR, str(self.exchange.refusal(answer) if not answer.is_success
                               else http.NotAGate(self.exchange.url, "its answer is not MCP")))
        if "jsonrpc" not in message:
            return self.refuse(id, jsonrpc.CODES.get(answer.status_code, jsonrpc.INTERNAL_ERROR),
                               str(message.get("message")), message)
        if method == "initialize" and isinstance(result := message.get("result"), dict):
            self.agreed = str(result.get("protocolVersion", ""))
        # Verbatim except for a missing id, so that numbers stay as the gate wrote them.
        self.write(answer.content if message.get("id") is not None else msgspec.json.encode({**message, "id": id}))

    def headers(self, message: JsonObject, method: str) -> dict[str, str]:
        """Return the HTTP headers that MCP requires for a message."""
        params = read_params(message)
        meta = params.get("_meta")
        version = meta.get(VERSION) if isinstance(meta, dict) else None
        if not isinstance(version, str):
            return {**ACCEPTED, "mcp-protocol-version": self.agreed} if self.agreed else ACCEPTED
        name = params.get("taskId" if method.startswith("tasks/") else NAME_FIELDS.get(method, ""))
        named = {"mcp-name": encode_header(name)} if isinstance(name, str) else {}
        return {**ACCEPTED, "mcp-protocol-version": encode_header(version), "mcp-method": encode_header(method),
                **named}

    def refuse(self, id: Any, code: int, text: str, data: Any = None) -> None:
        """Write an error of this bridge."""
        error = {"code": code, "message": text, **({"data": data} if data is not None else {})}
        self.write(msgspec.json.encode({"jsonrpc": "2.0", "id": id, "error": error}))


def is_repeatable(message: JsonObject, method: str) -> bool:
    """Whether a request may be sent again although the gate may have carried it out."""
    params = read_params(message)
    if method != "tools/call":
        return True
    op = CALLS.get(str(params.get("name")).removeprefix(jsonrpc.TOOL_PREFIX)[1:])
    arguments = params.get("arguments")
    keyed = isinstance(arguments, dict) and not arguments.keys().isdisjoint(op.keys) if op else False
    return op is not None and op.repeatable and (keyed or not op.keys)


def read_params(message: JsonObject) -> dict[str, Any]:
    """Return the parameters of a message."""
    params = message.get("params")
    return params if isinstance(params, dict) else {}


def waits(message: JsonObject, method: str) -> bool:
    """Whether a request is answered only when something happens."""
    arguments = read_params(message).get("arguments")
    return method == LISTEN or (isinstance(arguments, dict) and bool(arguments.get("wait_seconds")))


def encode_header(text: str) -> str:
    """Encode a text for a header: unchanged, or in MCP's encoding if a header cannot contain it."""
    safe = text.isascii() and text.isprintable() and text == text.strip() and not text.startswith("=?base64?")
    return text if safe else f"=?base64?{base64.b64encode(text.encode()).decode()}?="


def open_input() -> BinaryIO:
    """Return standard input for a thread that still reads when the process ends: with sys.stdin Python would crash."""
    return open(sys.stdin.fileno(), "rb", closefd=False)


def write_message(line: bytes) -> None:
    """Write one message to standard output."""
    sys.stdout.buffer.write(line.replace(b"\n", b" ") + b"\n")
    sys.stdout.buffer.flush()


def make_path(agent: str | None, underscored: bool, tools: str = "") -> str:
    """Return the path and query for the spelling of tools, the listed sets, and the default caller."""
    query = {"principal_kind": "agent", "principal_id": agent} if agent else {}
    query |= {"tools": tools} if tools else {}
    return f"/mcp{'/u' if underscored else ''}{'?' if query else ''}{urlencode(query, safe=',')}"


async def serve_running(url: str | None, token: str | None, path: str,
                        patience_seconds: float = DEFAULT_PATIENCE_SECONDS) -> None:
    """Serve standard input and output from a running gate."""
    import httpx2

    exchange = http.Exchange(url, token)
    patience = http.ANSWER_SECONDS + LONGEST_WAIT_SECONDS
    async with httpx2.AsyncClient(**exchange.settings, timeout=patience) as client:
        bridge = Bridge(client, exchange, path, write_message, streams=True, patience_seconds=patience_seconds)
        await bridge.serve(open_input().readline)


async def serve_embedded(settings: Settings, path: str) -> None:
    """Serve standard input and output from a gate inside this process, which needs no credential."""
    import httpx2

    logging.getLogger("asyncgate.audit").setLevel(logging.WARNING)      # a host shows stderr to its user
    gate = Gate(msgspec.structs.replace(settings, host="127.0.0.1", api_key="", allow_insecure_dev=True))
    async with gate.app.router.lifespan_context(gate.app):
        async with httpx2.AsyncClient(transport=InProcess(gate)) as client:
            bridge = Bridge(client, http.Exchange("http://localhost", ""), path, write_message, streams=False)
            await bridge.serve(open_input().readline)
        gate.drain()
