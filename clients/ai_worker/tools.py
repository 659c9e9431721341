"""The tools of an AI worker: MCP servers, started once and shared by all its jobs, and what a model calls their tools.

Whatever goes wrong with a call is told to the model as a result: it can try something else.  A server that is gone is
started again for the next call.
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

from asyncgate.clients.ai_worker.model import JobFailed
from asyncgate.clients.ai_worker.profile import Limits, Profile, Secrets, Server
from asyncgate.parts.model.connection import is_loopback

if TYPE_CHECKING:
    from mcp import Client

log = logging.getLogger("asyncgate.worker.ai")
LONGEST_NAME = 64           # of a function, as endpoints take it
MOST_PAGES = 100            # of a server's list of tools
LAST_SECONDS = 10.0         # that a server has to end


class Tool(Struct, frozen=True):
    """A tool as its server lists it."""

    name: str
    description: str
    schema: dict[str, Any]


class Told(Struct, frozen=True):
    """What a call of a tool came to."""

    text: str
    failed: bool = False


class McpServer:
    """One MCP server.  A task of its own opens and closes it, as the SDK wants both to happen in one task."""

    def __init__(self, name: str, settings: Server, secrets: Secrets, limits: Limits) -> None:
        self.name, self.settings, self.secrets, self.limits = name, settings, secrets, limits
        self.tools: list[Tool] = []
        self._opening = asyncio.Lock()      # one caller starts it, the others wait
        self._keeper: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Client] | None = None
        self._leave = asyncio.Event()

    async def client(self) -> Client:
        """Return the connection; start the server if it does not run.  Raises JobFailed when it cannot be had."""
        async with self._opening:
            if self._keeper is None or self._keeper.done() or self._leave.is_set():
                await self.close()
                self._open()
            assert self._ready
            try:
                async with asyncio.timeout(self.limits.start_seconds):
                    return await asyncio.shield(self._ready)    # a job that is cancelled leaves the start to the next
            except TimeoutError:
                await self.close()
                raise JobFailed("tools_unavailable", f"the MCP server {self.name!r} did not start within "
                                                     f"{self.limits.start_seconds:g} s", retryable=True) from None

    def _open(self) -> None:
        loop = asyncio.get_running_loop()
        self._ready, self._leave = loop.create_future(), asyncio.Event()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())     # it counts as heard
        self._keeper = loop.create_task(self._keep(self._ready, self._leave), name=f"mcp {self.name}")

    async def _keep(self, ready: asyncio.Future[Client], leave: asyncio.Event) -> None:
        """Open the server, list its tools, hold it open until told to leave."""
        try:
            async with self._connected() as client:
                self.tools = self._allowed([tool async for tool in listed(client)])
                ready.set_result(client)
                await leave.wait()
        except Exception as error:      # whatever breaks a server breaks no worker
            why = self.secrets.hidden(cause(error))
            log.warning("the MCP server %r is gone: %s", self.name, why)
            if not ready.done():
                ready.set_exception(JobFailed("tools_unavailable", f"the MCP server {self.name!r} does not work: {why}",
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

    def _allowed(self, found: list[Tool]) -> list[Tool]:
        """Return the tools that the profile allows; a name in it that leads to none is a mistake worth hearing of."""
        for wish in self.settings.tools:
            if not any(fnmatchcase(tool.name, wish) for tool in found):
                raise LookupError(f"servers.{self.name}.tools: the server has no tool {wish!r}")
        return [tool for tool in found if any(fnmatchcase(tool.name, wish) for wish in self.settings.tools)]

    async def call(self, tool: str, arguments: dict[str, Any]) -> Told:
        """Call a tool; what goes wrong is told and not raised, but for a cancellation."""
        client = None
        try:
            client = await self.client()
            async with asyncio.timeout(self.limits.tool_seconds):   # the SDK tells the server when a call is given up
                result = await client.call_tool(tool, arguments)
        except TimeoutError:
            return Told(f"no answer within {self.limits.tool_seconds:g} s; the call was given up", failed=True)
        except Exception as error:
            if client is not None and is_broken(error) and self._is_current(client):
                self._leave.set()       # the next call opens another connection
            log.warning("a call of %s at the MCP server %r failed (%s)", tool, self.name, type(error).__name__)
            return Told(self.secrets.hidden(cause(error)), failed=True)
        return Told(self.secrets.hidden(spoken(result)), bool(result.is_error))

    def _is_current(self, client: Client) -> bool:
        return bool(self._ready and self._ready.done() and not self._ready.exception()
                    and self._ready.result() is client)

    async def close(self) -> None:
        """End the server."""
        if self._keeper is None:
            return
        self._leave.set()
        await asyncio.wait([self._keeper], timeout=LAST_SECONDS)
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        self._keeper = self._ready = None


class Toolbox:
    """All tools of a profile, under names that a model can call."""

    def __init__(self, profile: Profile, secrets: Secrets, taken: Iterable[str] = ()) -> None:
        self.limits, self.taken = profile.limits, frozenset(taken)
        self.servers = {name: McpServer(name, one, secrets, profile.limits)
                        for name, one in profile.servers.items()}

    async def open(self) -> dict[str, tuple[McpServer, Tool]]:
        """Return every tool by the name that the model calls it; servers that do not run are started."""
        await asyncio.gather(*(server.client() for server in self.servers.values()))
        return named([(server, tool) for server in self.servers.values() for tool in server.tools], self.taken)

    async def call(self, server: McpServer, tool: Tool, arguments: dict[str, Any]) -> Told:
        """Call a tool; its result is cut to what the model may see of it."""
        told = await server.call(tool.name, arguments)
        return Told(shortened(told.text, self.limits.tool_result_bytes), told.failed)

    async def close(self) -> None:
        """End all servers."""
        await asyncio.gather(*(server.close() for server in self.servers.values()))


def named(found: list[tuple[McpServer, Tool]], taken: frozenset[str]) -> dict[str, tuple[McpServer, Tool]]:
    """Give each tool a name of its own: its plain one, or with its server in front where several have it."""
    plain = Counter(callable_name(tool.name) for _, tool in found) + Counter(taken)
    names: dict[str, tuple[McpServer, Tool]] = {}
    for server, tool in found:
        own = callable_name(tool.name)
        name = own = callable_name(f"{server.name}_{tool.name}") if plain[own] > 1 else own
        number = 2
        while name in names or name in taken:
            name, number = f"{own[:LONGEST_NAME - 4]}_{number}", number + 1
        names[name] = server, tool
    return names


def callable_name(name: str) -> str:
    """Write a name as endpoints take it."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:LONGEST_NAME]


def function_of(name: str, tool: Tool) -> dict[str, Any]:
    """Describe a tool to a model."""
    return {"type": "function", "function": {"name": name, "description": tool.description, "parameters": tool.schema}}


async def listed(client: Client) -> AsyncIterator[Tool]:
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


def spoken(result: Any) -> str:
    """Return the result of a tool as text; what is no text is named."""
    parts = [part for block in result.content if (part := spoken_block(block.model_dump(by_alias=True)))]
    if not parts and result.structured_content is not None:
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(parts)


def spoken_block(block: Mapping[str, Any]) -> str:
    """Return one block of a result as text."""
    kind, resource = block.get("type"), block.get("resource") or {}
    if kind == "text":
        return str(block["text"])
    if kind == "resource_link":
        return f"[{block.get('name')}: {block.get('uri')}]"
    if kind == "resource" and resource.get("text") is not None:
        return str(resource["text"])
    return f"[{kind} {block.get('mimeType') or resource.get('mimeType') or ''} is not shown]".replace("  ", " ")


def shortened(text: str, most: int) -> str:
    """Cut a text to so many bytes, and say that it was cut."""
    content = text.encode()
    if len(content) <= most:
        return text
    note = f"\n[cut off here: {len(content)} bytes in all]"
    return content[:most - len(note)].decode(errors="ignore") + note


def is_broken(error: Exception) -> bool:
    """Whether an error says that the connection or the session is no more."""
    from anyio import BrokenResourceError, ClosedResourceError, EndOfStream
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    if isinstance(error, MCPError):
        return error.code == CONNECTION_CLOSED or "Session terminated" in str(error)
    return isinstance(error, BrokenResourceError | ClosedResourceError | EndOfStream | OSError)


def cause(error: BaseException) -> str:
    """Say in one line what went wrong; a group of errors is told by its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())[:500]
    if isinstance(error, JobFailed | LookupError):      # these speak for themselves
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
