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
async def gate(request: pytest.FixtureRequest, start: Any) -> AsyncIterator[AsyncHttp]:
    """A client of such a gate; `SETTINGS` of the module are its further settings."""
    running = start(*HASTY, *getattr(request.module, "SETTINGS", ()))
    async with asyncio.timeout(2 * PATIENCE_SECONDS), AsyncHttp(running.url, TOKEN) as gate:
        yield gate


async def ended(gate: AsyncHttp, task_id: str) -> dict[str, Any]:
    """Return a task when it has ended."""
    task: dict[str, Any] = {"status": "queued"}
    while task["status"] not in ("succeeded", "failed", "canceled"):
        task = await gate.call("get_task", task_id=task_id, wait_seconds=30)
    return task
