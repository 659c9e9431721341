"""Fixtures for pytest: `pytest_plugins = ["asyncgate.clients.pytest_fixtures"]`.

`async_gate` is for coroutines (run by anyio's plugin, or by pytest-asyncio in its automatic mode), `sync_gate` for
plain tests.  Each is a fresh gate in memory with a clock that the test can advance.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from asyncgate.clients.testing import AsyncTestGate, Gate, SyncTestGate


@pytest.fixture
async def async_gate() -> AsyncIterator[AsyncTestGate]:
    """Return a running gate, to await."""
    async with Gate() as gate:
        yield gate


@pytest.fixture
def sync_gate() -> Iterator[SyncTestGate]:
    """Return a running gate, to call."""
    with Gate() as gate:
        yield gate
