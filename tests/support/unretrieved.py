"""Errors of asyncio's tasks that nobody retrieves, which it logs once they are forgotten."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest


async def cancel_failing(call: Callable[[Awaitable[Any]], Awaitable[Any]], error: Exception) -> list[dict[str, Any]]:
    """Cancel a call of work that answers its cancellation with an error; return what asyncio logs of it."""
    problems, begun = list[dict[str, Any]](), asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))

    async def fail() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise error from None

    calling = asyncio.ensure_future(call(fail()))
    await begun.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    del calling
    await asyncio.sleep(0)      # until now the loop has kept it
    gc.collect()
    return problems
