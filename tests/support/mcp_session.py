# may run in a fork of a process that has imported asyncgate
"""A session of the official Python SDK, told by standard input: mcp_session.py URL TOKEN MODE.

Each line is a tool call, or "connect"; each is answered with a line: the result, or the error and what it carries.
A call with a third member is also told of its progress, which is shown in lines before.
It runs under both generations of the SDK; the first knows no MODE.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any


@contextlib.asynccontextmanager
async def connect(url: str, token: str, mode: str) -> AsyncIterator[Any]:
    headers = {"authorization": f"Bearer {token}"}
    try:
        from mcp import Client
    except ImportError:     # the first generation
        from mcp import ClientSession
        from mcp.client import streamable_http as transport
        first: Any = transport
        async with (first.streamablehttp_client(url, headers=headers) as (read, write, _),
                    ClientSession(read, write) as session):
            await session.initialize()
            yield session
        return
    import httpx2
    from mcp.client.streamable_http import streamable_http_client
    async with (httpx2.AsyncClient(headers=headers, trust_env=False, timeout=60) as http,
                Client(streamable_http_client(url, http_client=http), mode=mode) as client):
        yield client


def show(result: Any) -> dict[str, Any]:
    return dict(result.model_dump(mode="json", by_alias=True, exclude_none=True))


def show_error(error: BaseException) -> dict[str, Any]:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    told = getattr(error, "error", None)
    return {"failed": type(error).__name__, "text": str(error), "data": getattr(told, "data", None)}


async def tell(progress: float, total: float | None, message: str | None) -> None:
    print(json.dumps({"told": [progress, total, message]}), flush=True)


async def main(url: str, token: str, mode: str) -> None:
    async with contextlib.AsyncExitStack() as opened:
        session: Any = None
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                if (asked := json.loads(line)) == "connect":
                    session = await opened.enter_async_context(connect(url, token, mode))
                    told = {"connected": True}
                else:
                    more = {"progress_callback": tell} if asked[2:] else {}
                    told = show(await session.call_tool(*asked[:2], **more))
            except Exception as error:
                told = show_error(error)
            print(json.dumps(told), flush=True)


asyncio.run(main(*sys.argv[1:]))
