"""Fixtures for pytest: `pytest_plugins = ["asyncgate.clients.pytest_fixtures"]`.

Use `async_gate` in async tests (run by anyio's plugin, or by pytest-asyncio in auto mode) and `sync_gate` in plain
tests.  Each is a fresh gate in memory with a clock that the test can advance.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from asyncgate.clients.testing import AsyncTestGate, Gate, SyncTestGate


@pytest.fixture
async def async_gate() -> AsyncIterator[AsyncTestGate]:
    """Yield a running gate with an asyncio client."""
    async with Gate() as gate:
        yield gate


@pytest.fixture
def sync_gate() -> Iterator[SyncTestGate]:
    """Yield a running gate with a blocking client."""
    with Gate() as gate:
        yield gate
