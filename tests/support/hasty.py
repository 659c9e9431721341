"""A gate that sweeps fast, for workers that die, park and ask; fixtures that a module takes by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncgate.clients.http import AsyncHttp
from tests.support.patience import PATIENCE_SECONDS

TOKEN = "a-token-for-tests"
HASTY = ("lease_sweep_interval_seconds=0.1", "expiry_jitter_seconds=0")


@pytest.fixture
def anyio_backend() -> str:
    """What a worker runs on."""
    return "asyncio"


@pytest.fixture
async def gate(request: pytest.FixtureRequest, start: Any, fresh: Any) -> AsyncIterator[AsyncHttp]:
    """A client of such a gate; `SETTINGS` of the module are its further settings, a parameter names its database."""
    more = {"database": await fresh(request.param)} if hasattr(request, "param") else {}
    running = start(*HASTY, *getattr(request.module, "SETTINGS", ()), **more)
    async with asyncio.timeout(2 * PATIENCE_SECONDS), AsyncHttp(running.url, TOKEN) as gate:
        yield gate


@pytest.fixture
async def either(request: pytest.FixtureRequest, start: Any, fresh: Any, anyio_backend: str) -> Any:
    """Such a gate on the database that a parameter names; on SQLite by default."""
    database = await fresh(getattr(request, "param", "sqlite"))
    return start(*HASTY, "restart_grace_seconds=0", database=database)


async def ended(gate: AsyncHttp, task_id: str) -> dict[str, Any]:
    """Return a task when it has ended."""
    task: dict[str, Any] = {"status": "queued"}
    while task["status"] not in ("succeeded", "failed", "canceled"):
        task = await gate.call("get_task", task_id=task_id, wait_seconds=30)
    return task
