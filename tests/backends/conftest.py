"""What the tests of the Postgres backend share."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncgate.conformance.plugin import POSTGRES, database_of, urls


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database on Postgres."""
    if POSTGRES not in urls(request.config):
        pytest.skip("of the Postgres backend")
    return database_of(POSTGRES, request.config, tmp_path)
