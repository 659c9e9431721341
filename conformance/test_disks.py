"""Failing disks and power cuts: what a gate on SQLite has acknowledged is there, once, and each start says why not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from asyncgate.conformance.disks import NoShim, run_disks

pytestmark = pytest.mark.databases(fits=lambda url: url.startswith("sqlite:"))     # Postgres looks after its own disk
PER_ROUND = 10


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
