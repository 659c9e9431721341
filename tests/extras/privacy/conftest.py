"""A gate in which somebody has left marks in every place, over a database in files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.conformance.harness import Gate, settings_for_tests
from asyncgate.parts.model.settings import ArchiveSettings

HOME = "00000000-0000-4000-8000-00000000000a"
Opened = Callable[..., Awaitable[Gate]]


@pytest.fixture(params=["sqlite", "postgres"])
async def new_url(request: pytest.FixtureRequest, fresh: Callable[..., Awaitable[str]]) -> str:
    """Name an empty database of each kind."""
    return await fresh(request.param)


@pytest.fixture
async def opened(new_url: str, tmp_path: Path) -> AsyncIterator[Opened]:
    """Return what opens a gate over the database, as another process would."""
    backends: list[Any] = []

    async def open_gate(wrap: Callable[[Any], Any] = lambda backend: backend, tenant_id: str = HOME,
                        home: str = HOME, again: bool = False) -> Gate:
        if again:
            await backends.pop().close()
        if not backends:
            backends.append(await open_backend(new_url))
        settings = settings_for_tests(
            archive=ArchiveSettings(directory=str(tmp_path / "archive")), default_tenant_id=home)
        return Gate(Engine(wrap(backends[0]), settings), tenant_id)

    yield open_gate
    for backend in backends:
        await backend.close()
