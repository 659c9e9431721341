"""The conformance suite runs on a database that a third party names, again and again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from asyncgate.conformance.plugin import MISSING
from asyncgate.conformance.postgres_server import Cluster, find_programs
from tests.support.programs import FEW_PLUGINS

SUITE = "import sys; from asyncgate.conformance.run import run; sys.exit(run([sys.argv[1]] * 2, sys.argv[2:]))"
# One leaves tasks queued, which the other would claim.
CHOSEN = "test_sigterm_under_load or test_of_64_clients"


@pytest.fixture(scope="module")
def named() -> Iterator[str]:
    if find_programs() is None:
        pytest.skip(MISSING)
    with Cluster() as running:
        yield asyncio.run(running.migrated_database("named"))


def test_two_runs_on_the_same_database_are_green(named: str) -> None:
    told = subprocess.run([sys.executable, "-c", SUITE, named, "-q", "-k", CHOSEN, "--rounds", "1"], text=True,
                          env={**os.environ, **FEW_PLUGINS}, capture_output=True, check=False)

    assert told.returncode == 0, told.stdout[-3000:]
    assert "4 passed" in told.stdout
