"""The Python client's way through MCP: every operation as a call of its tool, with the official SDK's client.

The SDK ends a whole session when one request finds no server.  So what goes wrong on the way is turned into an answer
here, below the SDK, and into the client's own errors again above it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import httpx2
import msgspec
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from asyncgate.clients.http import PATIENCE_SECONDS, Exchange, Refusal, Unreachable, pause_asked
from asyncgate.parts.model.errors import GateError
from asyncgate.parts.model.jsonrpc import INTERNAL_ERROR, spell_tool_name

REVISION = "2026-07-28"         # needs no handshake, so that a restarted gate is no matter
LONGEST_WAIT = 60.0             # that a gate can be set to keep a call open
UNREACHABLE, STATUS = "asyncgate/unreachable", "asyncgate/status"       # what this module puts into an answer


class McpWay(Exchange):
    """Calls the tools of a gate at /mcp."""

    def __init__(self, url: str | None, token: str | None, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        super().__init__(url, token)
        self.settings |= {"transport": transport, "timeout": PATIENCE_SECONDS + LONGEST_WAIT}
        self.opened = contextlib.AsyncExitStack()

    async def __aenter__(self) -> McpWay:
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(Answering(self))
            self.client = await stack.enter_async_context(Client(
                streamable_http_client(f"{self.url}/mcp", http_client=http), mode=REVISION))
            self.opened = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.opened.aclose()

    async def send(self, operation: str, fields: Mapping[str, Any]) -> bytes:
        """Call the tool of an operation and return its reply as JSON; raises Refusal or Unreachable."""
        said = {k: v for k, v in fields.items() if v is not None or k == "payload"}
        arguments = msgspec.json.decode(msgspec.json.encode(said))
        try:
            told = await self.client.call_tool(spell_tool_name(operation)[0], arguments)
        except MCPError as error:
            raise understood(error) from error
        text = "".join(getattr(part, "text", "") for part in told.content)
        if not told.is_error:
            return text.encode()
        body = members(text.encode()) or {"message": text}
        raise refusal(status_of(str(body.get("error"))), body)


class Answering(httpx2.AsyncClient):
    """An HTTP client that always answers in JSON-RPC, also when nobody is there or what is there refuses outright."""

    def __init__(self, way: Exchange) -> None:
        super().__init__(**way.settings)
        self.way = way

    async def send(self, request: httpx2.Request, **more: Any) -> httpx2.Response:
        """Send a request, and read its answer while failures can still be told."""
        try:
            answer = await super().send(request, **more)
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                return answer
            body = members(await answer.aread())
        except httpx2.TransportError as error:
            none = self.way.unreachable(error)
            return problem(request, str(none), {UNREACHABLE: True, "sent": none.sent})
        if answer.status_code < 400 or "jsonrpc" in body:
            return answer
        told = {**body, STATUS: answer.status_code}
        if after := answer.headers.get("retry-after"):
            told.setdefault("retry_after", after)
        return problem(request, str(body.get("message", f"{self.way.url} does not answer like a gate")), told)


def problem(request: httpx2.Request, message: str, told: dict[str, Any]) -> httpx2.Response:
    """Make the answer that carries a failure through the SDK."""
    error = {"code": INTERNAL_ERROR, "message": message, "data": told}
    return httpx2.Response(503, json={"jsonrpc": "2.0", "id": None, "error": error}, request=request)


def members(body: bytes) -> dict[str, Any]:
    """Read a JSON object; anything else has no members."""
    try:
        found = msgspec.json.decode(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def understood(error: MCPError) -> Exception:
    """Return what the error of an MCP call is for this client."""
    told = error.data if isinstance(error.data, dict) else {}
    if UNREACHABLE in told:
        return Unreachable(error.message, sent=told["sent"])
    if "error" not in told and STATUS not in told:      # of the SDK itself: it took too long, or its session ended
        return Unreachable(f"no answer came through MCP: {error.message}")
    return refusal(told.pop(STATUS, None) or status_of(str(told["error"])), {"message": error.message, **told})


def refusal(status: int, body: dict[str, Any]) -> Refusal:
    """Make the same refusal that REST would give."""
    return Refusal(status, body, pause_asked(body.get("retry_after")))


def status_of(code: str) -> int:
    """Return what HTTP calls a refusal; MCP does not say."""
    found: list[type[GateError]] = [GateError]
    for kind in found:
        if kind.code == code:
            return kind.status
        found += kind.__subclasses__()
    return 500
