"""docs/design.md says the truth about its tests: each departure from the specification names one that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = [line for line in (ROOT / "docs" / "design.md").read_text().splitlines() if line.startswith("| ")][1:]
# What the specification or its readers ask to find on that page.
EXPECTED = ("idempotency key", "release_lease", "attach_artifacts", "archived", "workers emit", "receipt_ledger_lag",
            "task.assigned")


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip() for row in ROWS])
def test_each_departure_names_a_test_that_exists(row: str) -> None:
    """A row is the text, what the gate does instead, why, and what pins it."""
    *_, pins, _ = cells = row.split("|")
    named = re.findall(r"`((?:\w+/)+\w+\.py)::(\w+)`", pins)

    assert len(cells) == 6
    assert all(cell.strip() for cell in cells[1:-1])
    assert named
    for file, test in named:
        assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.M), f"{file} has no {test}"


@pytest.mark.parametrize("departure", EXPECTED)
def test_what_readers_ask_about_is_on_the_page(departure: str) -> None:
    assert any(departure in row for row in ROWS)
