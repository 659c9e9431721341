"""The contract of a database: how large it is, and what our own databases can do besides."""

from __future__ import annotations

from typing import Any

import pytest

from asyncgate.backends import (
    ArchivingBackend,
    Around,
    Backend,
    FileBackend,
    LastingBackend,
    SharedBackend,
    is_lasting,
    is_shared,
)
from asyncgate.backends.memory import Memory
from asyncgate.backends.postgres import Postgres
from asyncgate.backends.sqlite import Sqlite

OPTIONAL: tuple[Any, ...] = (LastingBackend, SharedBackend, FileBackend, ArchivingBackend)
CAN: dict[str, tuple[type, set[Any]]] = {
    "memory": (Memory, set()), "sqlite": (Sqlite, {LastingBackend, FileBackend}),
    "postgresql": (Postgres, {LastingBackend, SharedBackend, ArchivingBackend})}


def test_every_database_must_have_24_methods() -> None:
    assert len([name for name, member in vars(Backend).items() if not name.startswith("_") and callable(member)]) == 24


@pytest.mark.parametrize("scheme", CAN)
def test_what_a_database_is_follows_from_its_methods(scheme: str) -> None:
    kind, can = CAN[scheme]

    assert {protocol for protocol in OPTIONAL if issubclass(kind, protocol)} == can
    assert is_lasting(f"{scheme}:") is (LastingBackend in can)
    assert is_shared(f"{scheme}:") is (SharedBackend in can)


def test_what_stands_before_a_backend_can_what_that_can() -> None:
    """Python 3.12 asks the class alone, so that must be the one of the innermost."""
    before: Any = Around(Around(memory := Memory()))

    assert not isinstance(before, LastingBackend)
    assert before.instance == memory.instance
    assert before.__class__ is Memory
