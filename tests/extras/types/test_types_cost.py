"""A task of a type that nobody has declared costs the same statements beside declared types as without any."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from asyncgate.backends.memory import Memory
from asyncgate.conformance import harness
from asyncgate.parts.extensions import engine_over

pytestmark = pytest.mark.anyio
TENANT = "00000000-0000-4000-8000-000000000001"


@pytest.fixture
async def gate() -> AsyncIterator[harness.Gate]:
    backend = Memory()
    yield harness.Gate(engine_over(backend, harness.settings_for_tests()), TENANT)
    await backend.close()


async def list_statements(gate: harness.Gate) -> list[str]:
    """Return the statements of a task of an undeclared type, from its creation to its end, without their values."""
    assert isinstance(gate.backend, Memory)
    await gate.finished(type="plain")       # what is declared is read once
    sent: list[str] = []
    gate.backend.db.set_trace_callback(sent.append)
    await gate.finished(type="plain")
    gate.backend.db.set_trace_callback(None)
    return [re.sub(r"'(?:[^']|'')*'|\b[0-9.e+-]+\b", "?", text) for text in sent]


async def test_a_task_of_an_undeclared_type_costs_no_statement_more_beside_declared_ones(gate: harness.Gate) -> None:
    before = await list_statements(gate)
    schema = {"type": "object", "required": ["file"]}
    for number in range(20):
        await gate.as_worker().declare_type(type=f"declared-{number}", payload_schema=schema, result_schema=schema)

    beside = await list_statements(gate)

    assert before == beside
    assert len(before) > 10
    assert [text for text in before if re.search(r"\b(declared_types|type_policies)\b", text)] == []
