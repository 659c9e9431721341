"""A Postgres of a test alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncgate.conformance.plugin import MISSING
from asyncgate.conformance.postgres_server import Cluster, find_programs


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Return a Postgres of this test alone."""
    if find_programs() is None:
        pytest.skip(MISSING)
    with Cluster() as running:
        yield running
