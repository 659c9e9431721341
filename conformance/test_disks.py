"""Failing disks and power cuts: what a gate on SQLite has acknowledged is there, once, and each start says why not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from asyncgate.conformance.disks import NoShim, run_disks
from asyncgate.conformance.plugin import choose_databases

PER_ROUND = 10


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run on SQLite only: Postgres has a server of its own, which looks after its disk."""
    choose_databases(metafunc, lambda url: url.startswith("sqlite:"))


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str:
    """Return what the test runs on; it makes files of its own."""
    return str(request.param)


def wrong_after(what: str, rounds: int, folder: Path, record_property: Any) -> list[str]:
    """Return what is wrong after some rounds; skip where disks cannot be made to fail."""
    try:
        done = run_disks(what, rounds * PER_ROUND, str(random.randrange(10**6)), folder)
    except NoShim as why:
        pytest.skip(str(why))
    problems: list[str] = done.pop("problems")
    record_property(what, str(done))
    print(what, done)
    assert done["acknowledged"] > 0
    return problems


def test_a_disk_that_fails_in_any_way_loses_and_repeats_nothing(
        database: str, rounds: int, tmp_path: Path, record_property: Any) -> None:
    assert wrong_after("faults", rounds, tmp_path, record_property) == []


def test_a_power_cut_at_any_moment_loses_and_repeats_nothing(
        database: str, rounds: int, tmp_path: Path, record_property: Any) -> None:
    assert wrong_after("cuts", rounds, tmp_path, record_property) == []
