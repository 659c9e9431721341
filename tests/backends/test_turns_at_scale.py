"""A claim of tasks with limits costs as much with thousands of keys waiting as with one.

It is counted in SQLite's steps, and in statements and in the rows that Postgres reads.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncgate.backends import open_backend
from asyncgate.backends.memory import Memory
from asyncgate.backends.postgres.pipeline import Connection
from asyncgate.conformance import harness
from asyncgate.conformance.postgres_server import connected
from asyncgate.parts.extensions import engine_over

pytestmark = pytest.mark.anyio
TENANT = "00000000-0000-4000-8000-000000000001"
KEYS, MANY_KEYS = 3000, 100_000
CLAIMS = 10


@pytest.fixture
async def gate() -> AsyncIterator[harness.Gate]:
    backend = Memory()
    yield harness.Gate(engine_over(backend, harness.settings_for_tests()), TENANT)
    await backend.close()


def database(gate: harness.Gate) -> sqlite3.Connection:
    """Return the tables of the gate."""
    assert isinstance(gate.backend, Memory)
    return gate.backend.db


async def fill(gate: harness.Gate, keys: int, tasks: int = 1) -> None:
    """Let tasks of many keys wait."""
    asked = [{"type": "t", "payload": None, "limits": {"customer": f"c{number}", "openai": ""}}
             for number in range(keys) for _ in range(tasks)]
    for at in range(0, len(asked), 500):
        await gate.as_admin().create_tasks(tasks=asked[at:at + 500])


def multiply(gate: harness.Gate, keys: int) -> None:
    """Let as many tasks wait as there are keys, all like the only one; through the gate that would take minutes."""
    db, numbers = database(gate), f"WITH RECURSIVE n (n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < {keys})"
    changed = {"task_id": "substr(task_id, 1, 24) || printf('%012x', n)", "duty": "duty || n",
               "limits": """printf('{"customer":"c%d","openai":""}', n)"""}
    for table in ("tasks", "turns"):
        names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        chosen = ", ".join(changed.get(name, name) for name in names)
        db.execute(f"INSERT INTO {table} {numbers} SELECT {chosen} FROM {table}, n WHERE tenant_id = ?",
                   (gate.tenant_id,))
    db.execute("UPDATE queues SET queued = queued + ? WHERE tenant_id = ?", (keys, gate.tenant_id))
    db.execute("ANALYZE")


async def count_steps(gate: harness.Gate) -> float:
    """Return how many steps of its own SQLite takes for a claim, on average."""
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0
    database(gate).set_progress_handler(step, 1)
    for _ in range(10):
        assert await gate.claim(accept_types=["t"]) is not None
    database(gate).set_progress_handler(None, 1)
    return steps / 10


async def test_a_claim_costs_as_much_with_thousands_of_keys_as_with_one(gate: harness.Gate) -> None:
    other = gate.stranger()
    for each in (gate, other):
        await each.as_admin().set_limit(name="customer", concurrency_per_key=50)
        await each.as_admin().set_limit(name="openai", concurrency_total=500)
    await fill(gate, 1, 40)
    await fill(other, KEYS)

    alone, among_many = await count_steps(gate), await count_steps(other)

    assert among_many <= 1.5 * alone, (alone, among_many)


async def test_a_claim_costs_as_much_with_a_hundred_thousand_keys_as_with_one(gate: harness.Gate) -> None:
    other = gate.stranger()
    for each in (gate, other):
        await each.as_admin().set_limit(name="customer", concurrency_per_key=50)
        await each.as_admin().set_limit(name="openai", concurrency_total=500)
    await fill(gate, 1, 40)
    await fill(other, 1)
    multiply(other, MANY_KEYS)

    alone, among_many = await count_steps(gate), await count_steps(other)

    assert among_many <= 1.5 * alone, (alone, among_many)
    [(open,)] = database(gate).execute("SELECT count(*) FROM turns WHERE tenant_id = ? AND stage = 'open'",
                                       (other.tenant_id,))
    assert open > MANY_KEYS - 20


async def test_thousands_of_full_keys_cost_a_claim_nothing(gate: harness.Gate) -> None:
    other = gate.stranger()
    for each in (gate, other):
        await each.as_admin().set_limit(name="customer", concurrency_per_key=0, overrides={
            "free": {"concurrency_per_key": 100}})
    await fill(other, KEYS)
    assert await other.claim(accept_types=["t"]) is None       # which finds all of them full
    for each in (gate, other):
        for _ in range(12):
            await each.create(type="t", limits={"customer": "free", "openai": ""})

    alone, among_many = await count_steps(gate), await count_steps(other)

    assert among_many <= 1.2 * alone, (alone, among_many)


async def test_a_task_without_limits_is_claimed_by_the_statements_of_ever(gate: harness.Gate) -> None:
    for _ in range(2):
        await gate.create(type="t")
    sent: list[str] = []
    database(gate).set_trace_callback(sent.append)

    offer = await gate.claim(accept_types=["t"])

    database(gate).set_trace_callback(None)
    assert offer is not None
    assert [text for text in sent if re.search(r"\b(turns|holds|rate_uses|FROM limits)\b", text)] == []


# Postgres.

ROWS_READ = """
SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_user_tables WHERE schemaname = 'asyncgate'"""
SERVED = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename = 'asyncgate_app'"


async def multiply_in_postgres(url: str, keys: int) -> None:
    """Let as many tasks wait as there are keys, all like the only one; one key stays as it is."""
    changed = {"task_id": "left(task_id, 24) || lpad(to_hex(n), 12, '0')", "duty": "duty || n",
               "limits": """'{"customer":"c' || n || '","openai":""}'"""}
    async with connected(url.replace("asyncgate_app@", "postgres@")) as db:
        for table in ("tasks", "states", "turns"):
            names = [row[0] for row in await db.fetch(
                "SELECT attname FROM pg_attribute WHERE attrelid = $1::regclass AND attnum > 0 ORDER BY attnum",
                f"asyncgate.{table}")]
            chosen = ", ".join(changed.get(name, name) for name in names)
            await db.execute(f"INSERT INTO asyncgate.{table} SELECT {chosen} FROM asyncgate.{table}, "
                             f"generate_series(2, {keys}) AS n")
            await db.execute(f"ANALYZE asyncgate.{table}")


async def count_rows_read(url: str) -> int:
    """Return how many rows Postgres has read, when all who could have read some have told it and are gone."""
    async with connected(url.replace("asyncgate_app@", "postgres@")) as db:
        while await db.fetchval(SERVED):
            pass
        number: int = await db.fetchval(ROWS_READ)
        return number


async def measure_claims(url: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return how many statements some claims send, and how many rows are read for them."""
    before, sent, add = await count_rows_read(url), 0, Connection.add

    def count(self: Connection, statement: str, *given: Any) -> Any:
        nonlocal sent
        sent += 1
        return add(self, statement, *given)
    backend = await open_backend(url)
    gate = harness.Gate(engine_over(backend, harness.settings_for_tests()), TENANT)
    with monkeypatch.context() as counting:
        counting.setattr(Connection, "add", count)
        for _ in range(CLAIMS):
            assert await gate.claim(accept_types=["t"]) is not None
    await backend.close()
    return sent, await count_rows_read(url) - before


async def test_on_postgres_a_claim_sends_and_reads_as_much_with_a_hundred_thousand_keys_as_with_some(
        fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    for keys in (1, 1_000, MANY_KEYS):
        url = await fresh("postgres")
        backend = await open_backend(url)
        gate = harness.Gate(engine_over(backend, harness.settings_for_tests()), TENANT)
        await gate.as_admin().set_limit(name="customer", concurrency_per_key=50)
        await gate.as_admin().set_limit(name="openai", concurrency_total=500)
        await fill(gate, 1, 40 if keys == 1 else 1)
        await backend.close()
        await multiply_in_postgres(url, keys)
        measured.append(await measure_claims(url, monkeypatch))

    (statements, rows), few, many = measured
    assert statements == few[0] == many[0], measured
    # Of several keys a claim looks at some; of how many, makes no difference.
    assert rows <= few[1] <= 2 * rows, measured
    assert many[1] <= 1.1 * few[1], measured
