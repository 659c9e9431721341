"""The tools of an AI worker: MCP servers, started once and shared by all its jobs, and the tools' names for a model.

If a call fails, the model gets the error as the result and can try something else.  A server that has died is started
again for the next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from asyncgate.extras.ai_worker import profile
from asyncgate.extras.ai_worker.model import JobFailed
from asyncgate.parts.model.connection import is_loopback
from asyncgate.parts.process.kit import take_error
from asyncgate.parts.process.spans import find_tracing

if TYPE_CHECKING:
    from mcp import Client

log = logging.getLogger("asyncgate.worker.ai")
LONGEST_FUNCTION_NAME = 64           # the limit of common endpoints
MOST_PAGES = 100            # the most pages of a server's list of tools
SERVER_STOP_SECONDS = 10.0         # time for a server to stop before it is cancelled


class Tool(Struct, frozen=True):
    """A tool as its server lists it."""

    name: str
    description: str
    schema: dict[str, Any]


class ToolResult(Struct, frozen=True):
    """The result or the error of a tool call."""

    text: str
    failed: bool = False


class McpServer:
    """One MCP server.  Its own asyncio task opens and closes it, because the SDK requires the same task for both."""

    def __init__(self, name: str, settings: profile.ServerProfile, secrets: profile.Secrets,
                 limits: profile.JobLimits) -> None:
        self.name, self.settings, self.secrets, self.limits = name, settings, secrets, limits
        self.tools: list[Tool] = []
        self._opening = asyncio.Lock()      # one caller starts it, the others wait
        self._keeper: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Client] | None = None
        self._leave = asyncio.Event()

    async def client(self) -> Client:
        """Return the connection; start the server if it does not run.  Raises JobFailed if it does not start."""
        async with self._opening:
            if self._keeper is None or self._keeper.done() or self._leave.is_set():
                await self.close()
                self._open()
            assert self._ready
            try:
                async with asyncio.timeout(self.limits.start_seconds):
                    return await asyncio.shield(self._ready)    # shielded: a cancelled job does not stop the start
            except TimeoutError:
                await self.close()
                raise JobFailed("tools_unavailable", f"the MCP server {self.name!r} did not start within "
                                                     f"{self.limits.start_seconds:g} s", retryable=True) from None

    def _open(self) -> None:
        loop = asyncio.get_running_loop()
        self._ready, self._leave = loop.create_future(), asyncio.Event()
        self._ready.add_done_callback(take_error)
        self._keeper = loop.create_task(self._keep(self._ready, self._leave), name=f"mcp {self.name}")

    async def _keep(self, ready: asyncio.Future[Client], leave: asyncio.Event) -> None:
        """Open the server, list its tools, and keep it open until `leave` is set."""
        try:
            async with self._connected() as client:
                self.tools = self._allowed([tool async for tool in list_tools(client)])
                ready.set_result(client)
                await leave.wait()
        except Exception as error:      # no error of a server may stop the worker
            why = self.secrets.hidden(describe_cause(error))
            log.warning("the MCP server %r has stopped: %s", self.name, why)
            if not ready.done():
                ready.set_exception(JobFailed("tools_unavailable", f"the MCP server {self.name!r} failed: {why}",
                                              retryable=True))

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        async with AsyncExitStack() as opened:
            if self.settings.command:
                program, *arguments = self.settings.command
                given = self.settings.env | {name: self.secrets[name] for name in self.settings.secrets}
                server: Any = StdioServerParameters(command=program, args=arguments, env=given, cwd=self.settings.cwd)
            else:
                url, token = str(self.settings.url), self.settings.token_env
                http = httpx2.AsyncClient(
                    headers={"authorization": f"Bearer {self.secrets[token]}"} if token else {},
                    timeout=max(self.limits.start_seconds, self.limits.tool_seconds),
                    trust_env=not is_loopback(urlsplit(url).hostname or ""))
                server = streamable_http_client(url, http_client=await opened.enter_async_context(http))
            yield await opened.enter_async_context(Client(server))

    def _allowed(self, tools: list[Tool]) -> list[Tool]:
        """Return the tools that the profile allows; raise LookupError if one of its names matches no tool."""
        for wish in self.settings.tools:
            if not any(fnmatchcase(tool.name, wish) for tool in tools):
                raise LookupError(f"servers.{self.name}.tools: the server has no tool {wish!r}")
        return [tool for tool in tools if any(fnmatchcase(tool.name, wish) for wish in self.settings.tools)]

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool; return errors as results, and raise only a cancellation."""
        client = None
        try:
            client = await self.client()
            async with asyncio.timeout(self.limits.tool_seconds):   # on timeout the SDK cancels the call at the server
                result = await client.call_tool(tool, arguments)
        except TimeoutError:
            return ToolResult(f"no answer within {self.limits.tool_seconds:g} s; the call was cancelled", failed=True)
        except Exception as error:
            if client is not None and is_broken(error) and self._is_current(client):
                self._leave.set()       # the next call opens a new connection
            log.warning("a call of %s at the MCP server %r failed (%s)", tool, self.name, type(error).__name__)
            return ToolResult(self.secrets.hidden(describe_cause(error)), failed=True)
        return ToolResult(self.secrets.hidden(format_result(result)), bool(result.is_error))

    def _is_current(self, client: Client) -> bool:
        return bool(self._ready and self._ready.done() and not self._ready.exception()
                    and self._ready.result() is client)

    async def close(self) -> None:
        """Stop the server."""
        if self._keeper is None:
            return
        self._leave.set()
        await asyncio.wait([self._keeper], timeout=SERVER_STOP_SECONDS)
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        self._keeper = self._ready = None


class Toolbox:
    """All tools of a profile, under unique names that endpoints accept."""

    def __init__(self, profile: profile.Profile, secrets: profile.Secrets, taken: Iterable[str] = ()) -> None:
        self.limits, self.taken, self.tracing = profile.limits, frozenset(taken), find_tracing()
        self.servers = {name: McpServer(name, server, secrets, profile.limits)
                        for name, server in profile.servers.items()}

    async def open(self) -> dict[str, tuple[McpServer, Tool]]:
        """Start all servers that do not run; return every tool by its name for the model."""
        await asyncio.gather(*(server.client() for server in self.servers.values()))
        tools = [(server, tool) for server in self.servers.values() for tool in server.tools]
        return make_tool_names(tools, self.taken)

    async def call(self, server: McpServer, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool, and cut its result to the limit."""
        with self.tracing.use_tool(tool.name) if self.tracing else contextlib.nullcontext():
            told = await server.call(tool.name, arguments)
        return ToolResult(cut_text(told.text, self.limits.tool_result_bytes), told.failed)

    async def close(self) -> None:
        """Stop all servers."""
        await asyncio.gather(*(server.close() for server in self.servers.values()))


def make_tool_names(tools: list[tuple[McpServer, Tool]], taken: frozenset[str]) -> dict[str, tuple[McpServer, Tool]]:
    """Give each tool a unique name: its own, with its server's name in front if several tools share it."""
    plain = Counter(callable_name(tool.name) for _, tool in tools) + Counter(taken)
    names: dict[str, tuple[McpServer, Tool]] = {}
    for server, tool in tools:
        own = callable_name(tool.name)
        name = own = callable_name(f"{server.name}_{tool.name}") if plain[own] > 1 else own
        number = 2
        while name in names or name in taken:
            name, number = f"{own[:LONGEST_FUNCTION_NAME - 4]}_{number}", number + 1
        names[name] = server, tool
    return names


def callable_name(name: str) -> str:
    """Replace the characters of a name that endpoints refuse, and cut it to length."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:LONGEST_FUNCTION_NAME]


async def list_tools(client: Client) -> AsyncIterator[Tool]:
    """List the tools of a server."""
    if client.server_capabilities.tools is None:
        return
    cursor = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            yield Tool(tool.name, tool.description or tool.title or "", dict(tool.input_schema))
        if not (cursor := page.next_cursor):
            return


def format_result(result: Any) -> str:
    """Return the result of a tool as text; other content is only named."""
    parts = [part for block in result.content if (part := format_block(block.model_dump(by_alias=True)))]
    if not parts and result.structured_content is not None:
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(parts)


def format_block(block: Mapping[str, Any]) -> str:
    """Return one block of a result as text."""
    kind, resource = block.get("type"), block.get("resource") or {}
    if kind == "text":
        return str(block["text"])
    if kind == "resource_link":
        return f"[{block.get('name')}: {block.get('uri')}]"
    if kind == "resource" and resource.get("text") is not None:
        return str(resource["text"])
    return f"[{kind} {block.get('mimeType') or resource.get('mimeType') or ''} is not shown]".replace("  ", " ")


def cut_text(text: str, most: int) -> str:
    """Cut a text to so many bytes, and note at its end that it was cut."""
    content = text.encode()
    if len(content) <= most:
        return text
    note = f"\n[cut off here: {len(content)} bytes in all]"
    return content[:most - len(note)].decode(errors="ignore") + note


def is_broken(error: Exception) -> bool:
    """Whether an error means that the connection or the session has ended."""
    from anyio import BrokenResourceError, ClosedResourceError, EndOfStream
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    if isinstance(error, MCPError):
        return error.code == CONNECTION_CLOSED or "Session terminated" in str(error)
    return isinstance(error, BrokenResourceError | ClosedResourceError | EndOfStream | OSError)


def describe_cause(error: BaseException) -> str:
    """Describe an error in one line; of a group of errors, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())[:500]
    if isinstance(error, JobFailed | LookupError):      # their texts need no class name
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
