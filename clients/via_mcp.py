"""The Python client's MCP transport: it calls each operation as an MCP tool, with the official SDK's client.

The SDK ends a whole session if one request finds no server.  So this module turns transport errors into answers below
the SDK, and turns those answers into the client's own errors above it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import httpx2
import msgspec
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from asyncgate.clients import http
from asyncgate.clients.finite import encode_finite
from asyncgate.parts.model import errors
from asyncgate.parts.model.jsonrpc import INTERNAL_ERROR, spell_tool_name

REVISION = "2026-07-28"         # this revision has no handshake, so the client survives a restart of the gate
LONGEST_WAIT = 60.0             # seconds: the most that a gate's settings allow for one call
# Keys that this module adds to an answer.
UNREACHABLE, STATUS, NOT_MCP = "asyncgate/unreachable", "asyncgate/status", "asyncgate/foreign"


class McpWay(http.Exchange):
    """Calls the MCP tools of a gate at /mcp."""

    def __init__(self, url: str | None, token: str | None, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        super().__init__(url, token)
        self.settings |= {"transport": transport, "timeout": http.ANSWER_SECONDS + LONGEST_WAIT}
        self.opened = contextlib.AsyncExitStack()

    async def __aenter__(self) -> McpWay:
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(Answering(self))
            self.client = await stack.enter_async_context(Client(
                streamable_http_client(f"{self.url}/mcp?answers=full", http_client=http), mode=REVISION))
            self.opened = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.opened.aclose()

    async def send(self, operation: str, fields: Mapping[str, Any]) -> http.CheckedReply:
        """Call the tool of an operation and return its reply, checked; raises Refusal or Unreachable."""
        members = {k: v for k, v in fields.items() if v is not None or k == "payload"}
        arguments = msgspec.json.decode(encode_finite(members))
        try:
            result = await self.client.call_tool(spell_tool_name(operation)[0], arguments)
        except MCPError as error:
            raise translate_error(error, self.url) from error
        text = "".join(getattr(part, "text", "") for part in result.content)
        if not result.is_error:
            return self.read_reply(operation, text.encode())
        body = http.read_object(text.encode()) or {"message": text}
        raise make_refusal(find_status(str(body.get("error"))), body)


class Answering(httpx2.AsyncClient):
    """An HTTP client that always returns JSON-RPC, even if no server answers or the answer is not JSON-RPC."""

    def __init__(self, way: http.Exchange) -> None:
        super().__init__(**way.settings)
        self.way = way

    async def send(self, request: httpx2.Request, **more: Any) -> httpx2.Response:
        """Send a request and read its answer here, where a failure can still become an answer."""
        asked = time.monotonic()
        try:
            answer = await super().send(request, **more)
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                return answer
            body = http.read_object(await answer.aread())
            self.way.answered = True
        except httpx2.RequestError as error:
            none = self.way.unreachable(error, asked)
            is_wrong = isinstance(none, http.WrongAddress)
            return make_error_answer(request, str(none), {UNREACHABLE: True, "sent": none.sent, "wrong": is_wrong})
        if "jsonrpc" in body or answer.status_code == 202:      # 202: a notification has no reply
            return answer
        if answer.is_success or isinstance(self.way.refusal(answer), http.NotAGate):
            return make_error_answer(request, f"its answer (status {answer.status_code}) is not MCP", {NOT_MCP: True})
        body[STATUS] = answer.status_code
        if after := answer.headers.get("retry-after"):
            body.setdefault("retry_after", after)
        return make_error_answer(request, str(body.get("message", f"{self.way.url} does not answer like a gate")), body)


def make_error_answer(request: httpx2.Request, message: str, body: dict[str, Any]) -> httpx2.Response:
    """Return the JSON-RPC answer that carries a failure through the SDK."""
    error = {"code": INTERNAL_ERROR, "message": message, "data": body}
    return httpx2.Response(503, json={"jsonrpc": "2.0", "id": None, "error": error}, request=request)


def translate_error(error: MCPError, url: str) -> Exception:
    """Translate the error of an MCP call into this client's Refusal or Unreachable."""
    body = error.data if isinstance(error.data, dict) else {}
    if NOT_MCP in body:
        return http.NotAGate(url, error.message)
    if UNREACHABLE in body:
        return (http.WrongAddress if body["wrong"] else http.Unreachable)(error.message, sent=body["sent"])
    if "error" not in body and STATUS not in body:      # the SDK's own error: a timeout, or its session ended
        return http.Unreachable(f"no answer came through MCP: {error.message}")
    return make_refusal(body.pop(STATUS, None) or find_status(str(body["error"])), {"message": error.message, **body})


def make_refusal(status: int, body: dict[str, Any]) -> http.Refusal:
    """Return the refusal that REST would raise."""
    return http.Refusal(status, body, http.read_retry_after(body.get("retry_after")))


def find_status(code: str) -> int:
    """Return the HTTP status of an error code, which MCP does not transmit."""
    classes: list[type[errors.GateError]] = [errors.GateError]
    for kind in classes:
        if kind.code == code:
            return kind.status
        classes += kind.__subclasses__()
    return 500
