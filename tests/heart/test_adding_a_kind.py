"""A new stored kind touches one file: everything that is said of it is on its card.

A copy of the house gets one, and nothing else of it is touched but what the generator of the tables writes.  What is
then there is asked by `tests/support/added_kind.py`, and by the tests that go through all kinds.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.heart.test_adding_an_operation import add, copy_house, run

KIND = '''@stored("notes", "what people have noted", "`bulk_retention_days` after it was written", SOMETIMES,
        last_moment="noted_at", left_alone="it is gone soon", indexes=("notes_place (tenant_id, place)",))
class Note(Struct, frozen=True):
    """Something that somebody has noted."""

    note_id: IdText                     # UUIDv7
    text: Content[Json]                 # what
    place: Location[str | None]         # where
    secret: Proof[str]                  # proves who
    noted_at: float                     # when


'''
OWN, TESTS = "test_added_kind", 6       # the tests of this kind alone, and how many they are
# Tests that go through all kinds; what they say of every kind they say of this one.
EVERY = ("tests/test_personal.py", "tests/extras/privacy/test_rules.py")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the house with one more stored kind."""
    copy = copy_house(tmp_path_factory.mktemp("house"))
    add(copy / "parts/model/stored.py", r"(?=# A module with further kinds)", KIND)
    run(copy, "-m", "asyncgate.commands.tables", "docs/data-map.md")
    (copy / "tests/heart/test_added_kind.py").write_text((copy / "tests/support/added_kind.py").read_text())
    return copy


def test_a_kind_that_was_added_in_one_place_is_nowhere_forgotten(house: Path) -> None:
    output = run(house, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/heart/{OWN}.py", *EVERY)

    match = re.search(r"(\d+) passed", output)
    assert match, output
    assert int(match[1]) > TESTS
