"""A real MCP server to try an AI worker's tools on: `python tools_stand_in.py stdio FOLDER`, or `http` for `stdio`.

What happens to it is noted in FOLDER/notes, a line each.  Over HTTP it prints its address and wants a bearer token when
STAND_IN_TOKEN is set.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Any

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError

NOTES = Path(sys.argv[2]) / "notes"
FORGET = NOTES.parent / "forget"
NUMBER = {"type": "number"}
TOOLS: dict[str, dict[str, Any]] = {
    "add": {"a": NUMBER, "b": NUMBER}, "big": {"bytes": NUMBER}, "break": {}, "die": {}, "fail": {},
    "hold": {}, "math.half": {"of": NUMBER}, "secret": {}, "wait": {}}


def note(line: str) -> None:
    """Write down what happened."""
    with NOTES.open("a") as file:
        file.write(f"{line}\n")


def text(told: str, is_error: bool = False) -> types.CallToolResult:
    """Answer with a text."""
    return types.CallToolResult(content=[types.TextContent(type="text", text=told)], is_error=is_error)


async def list_tools(ctx: Any, params: Any) -> types.ListToolsResult:
    """List the tools, in two pages."""
    note("list")
    names = sorted(TOOLS)
    at = int(params.cursor) if params and params.cursor else 0
    tools = [types.Tool(name=name, description=f"Does {name}.",
                        input_schema={"type": "object", "properties": TOOLS[name]}) for name in names[at:at + 5]]
    return types.ListToolsResult(tools=tools, next_cursor=str(at + 5) if at + 5 < len(names) else None)


async def call_tool(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
    """Carry out one call."""
    given = params.arguments or {}
    note(f"call {params.name}")
    if params.name == "add":
        return text(str(given["a"] + given["b"]))
    if params.name == "math.half":
        return text(str(given["of"] / 2))
    if params.name == "big":
        return text("x" * int(given["bytes"]))
    if params.name == "secret":
        return text(f"the token is {os.environ.get('STAND_IN_TOKEN', 'nowhere')}; "
                    f"the gate's is {os.environ.get('ASYNCGATE_API_KEY', 'not here')}")
    if params.name == "fail":
        return text("the printer is on fire", is_error=True)
    if params.name == "break":
        raise MCPError(-32011, "it broke")
    if params.name == "die":
        os._exit(3)
    try:
        for _ in range(60_000):
            if params.name == "hold" and (NOTES.parent / "go").exists():
                return text("let go")
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        note("cancelled")
        raise
    return text("waited")


server: Server[Any] = Server("stand-in", on_list_tools=list_tools, on_call_tool=call_tool)


async def over_stdio() -> None:
    """Serve the program that started this one."""
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


class Guarded:
    """Lets in who has the token; it can be a server of old that knows sessions, and forgets one."""

    def __init__(self, app: Any) -> None:
        self.app, token = app, os.environ.get("STAND_IN_TOKEN")
        self.wants = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        headers, status = dict(scope.get("headers", [])), 0
        if os.environ.get("STAND_IN_LEGACY") and headers.get(b"mcp-method") == b"server/discover":
            status = 404
        elif scope.get("method") == "POST" and b"mcp-session-id" in headers and FORGET.exists():
            FORGET.unlink()
            status = 404
        elif scope["type"] == "http" and self.wants and headers.get(b"authorization") != self.wants:
            status = 401
        if not status:
            return await self.app(scope, receive, send)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def over_http() -> None:
    """Serve whoever comes."""
    import uvicorn

    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", int(sys.argv[3]) if sys.argv[3:] else 0))
        listening.listen(100)       # who reads the address calls at once
        print(f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", flush=True)
        config = uvicorn.Config(Guarded(server.streamable_http_app()), log_level="warning", timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    note("start")
    if sys.argv[1] == "http":
        over_http()
    else:
        asyncio.run(over_stdio())
