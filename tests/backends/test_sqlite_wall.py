"""On SQLite, too, a statement that lacks its tenant aborts instead of reaching a neighbour."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncgate import Engine, Needs, Work
from asyncgate.backends.sqlite import open_backend
from asyncgate.conformance.harness import Gate, settings_for_tests, under
from asyncgate.parts.model.stored import Entry, LedgerMark, Outgoing

pytestmark = pytest.mark.anyio
OURS, THEIRS = "00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"
REACHING_OUT = ["UPDATE tasks SET priority = 9", "DELETE FROM leases", "UPDATE tasks SET tenant_id = 'another'",
                "INSERT INTO edges (tenant_id, child_id, parent_id) VALUES ('another', 'a', 'b')",
                "UPDATE accounts SET tier = 'paid'", f"DELETE FROM api_keys WHERE tenant_id = '{THEIRS}'",
                "UPDATE api_keys SET revoked_at = NULL",
                "UPDATE audit_heads SET number = 9", "UPDATE outbox SET content = 'forged'", "DELETE FROM outbox",
                "DELETE FROM ledger_marks",
                "INSERT INTO ledger SELECT 'another', receipt_id, arrival, receipt_type, "
                "task_id, from_kind, from_id, to_kind, to_id, asyncgate_instance, digest, content, "
                "stated_kind, stated_id, stated_role FROM ledger",
                "UPDATE api_keys SET tenant_id = 'another'",
                "INSERT INTO audit SELECT 'another', audit_id, number, at, event, severity, body, hash FROM audit"]
APPEND_ONLY = {"receipts": "receipt_id", "edges": "child_id", "events": "event_id", "audit": "audit_id",
               "ledger": "receipt_id"}
# Each takes rows that are there already, and would leave others in their place.
CHANGES = {
    "an UPDATE": "UPDATE {table} SET {column} = 'made up' WHERE tenant_id = '{ours}'",
    "an UPDATE OR REPLACE": "UPDATE OR REPLACE {table} SET {column} = 'made up' WHERE tenant_id = '{ours}'",
    "a DELETE": "DELETE FROM {table} WHERE tenant_id = '{ours}'",
    "an INSERT OR REPLACE": "INSERT OR REPLACE INTO {table} SELECT * FROM {table} WHERE tenant_id = '{ours}'",
    "a REPLACE": "REPLACE INTO {table} SELECT * FROM {table} WHERE tenant_id = '{ours}'",
    "an UPSERT": "INSERT INTO {table} SELECT * FROM {table} WHERE tenant_id = '{ours}' "
    "ON CONFLICT DO UPDATE SET {column} = 'made up'",
}
# A receipt is also found by what it is about, and by its place in the file.
OTHER_KEYS = {
    "its key": "INSERT OR REPLACE INTO receipts SELECT tenant_id, 'made up', receipt_key, receipt_type, created_at, "
    "from_kind, from_id, to_kind, to_id, task_id, lease_id, schedule_id, asyncgate_instance, hash, body, "
    "salt, parent_id FROM receipts WHERE tenant_id = '{ours}' LIMIT 1",
    "its place": "INSERT OR REPLACE INTO receipts (rowid, tenant_id, receipt_id, receipt_key, receipt_type, "
    "created_at, from_kind, from_id, to_kind, to_id, task_id, asyncgate_instance, hash, body) "
    "SELECT rowid, tenant_id, 'made up', 'made up', 'x', 0, 'x', 'x', 'x', 'x', 'x', 'x', 'x', '{{}}' "
    "FROM receipts WHERE tenant_id = '{ours}' LIMIT 1",
}


def books(work: Work) -> None:
    """Leave something where receipts go to a ledger, or come from gates."""
    work.keep_record(Outgoing("r-1", "", "{}", 0.0))
    work.keep_record(Entry("r-1", work.new_id(), "plan.made", "", "agent", "ada", "agent", "bob", "", "d", "{}"))
    work.keep_record(LedgerMark("task.completed", "r-1"))


async def fill(url: str) -> None:
    opened: Any = await open_backend(url)
    for tenant in (THEIRS, OURS):
        gate = Gate(Engine(opened, settings_for_tests()), tenant)
        offer = await gate.leased()
        await gate.as_worker().start_task(**under(offer))       # an event
        opened.db.execute("INSERT INTO edges VALUES (?, 'child', 'parent')", (tenant,))
        await gate.beside(default_tenant_id=tenant).as_admin().create_tenant(tenant=tenant, name=f"a name {tenant}")
        await gate.as_admin().issue_key(name="a key", principal_id="w1")
        await opened.transact(tenant, Needs(), books)
    await opened.close()


@pytest.fixture
async def path(fresh: Callable[..., Awaitable[str]]) -> Path:
    """A file with tasks, leases, keys and logs of two tenants; ours has written last."""
    return Path((await fresh("sqlite", fill)).removeprefix("sqlite:///"))


@pytest.mark.parametrize("statement", REACHING_OUT)
async def test_a_statement_that_reaches_a_neighbour_aborts(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as db, pytest.raises(sqlite3.IntegrityError, match="another tenant's row"):
        db.execute(statement)


@pytest.mark.parametrize("table", APPEND_ONLY)
@pytest.mark.parametrize("change", CHANGES)
async def test_what_is_append_only_is_neither_changed_nor_taken_away(path: Path, table: str, change: str) -> None:
    await stays(path, table, CHANGES[change].format(table=table, column=APPEND_ONLY[table], ours=OURS))


@pytest.mark.parametrize("found_by", OTHER_KEYS)
async def test_no_other_receipt_takes_the_place_of_one(path: Path, found_by: str) -> None:
    await stays(path, "receipts", OTHER_KEYS[found_by].format(ours=OURS))


async def stays(path: Path, table: str, change: str) -> None:
    """Expect that the gate's own connection refuses a change, and that every row is what it was."""
    opened: Any = await open_backend(f"sqlite:///{path}")
    before = opened.db.execute(f"SELECT * FROM {table}").fetchall()
    assert OURS in {row[0] for row in before}

    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        opened.db.execute(change)

    assert opened.db.execute(f"SELECT * FROM {table}").fetchall() == before
    await opened.close()


async def test_every_table_with_rows_of_tenants_has_its_wall(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        columns = db.execute("SELECT m.name, c.name FROM sqlite_master AS m, pragma_table_info(m.name) AS c "
                             "WHERE m.type = 'table'").fetchall()
        walls = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")}
    there = {table for table, column in columns if column == "tenant_id"}
    tables = there - {"wall", "tenants"}        # these name tenants, and hold nothing of theirs

    kept = {table for table in tables if {f"{table}_stay", f"{table}_keep"} <= walls}      # nobody may change these
    needed = {f"{table}_{change}_wall" for table in tables
              for change in ("insert", *(("update", "delete") if table not in kept else ()))}
    assert needed - walls == set()
    assert {"audit", "receipts"} <= kept


async def test_each_batch_says_whose_it_is_before_it_writes(path: Path) -> None:
    opened = await open_backend(f"sqlite:///{path}")
    for tenant in (THEIRS, OURS, THEIRS):
        await Gate(Engine(opened), tenant).create()
        assert opened.db.execute("SELECT tenant_id FROM wall").fetchall() == [(tenant,)]
    await opened.close()


async def test_the_wall_takes_back_the_whole_transaction(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN")
        db.execute("UPDATE tasks SET priority = 9 WHERE tenant_id = ?", (OURS,))
        with pytest.raises(sqlite3.IntegrityError, match="another tenant's row"):
            db.execute("UPDATE tasks SET priority = 9 WHERE tenant_id = ?", (THEIRS,))

        assert not db.in_transaction
        assert db.execute("SELECT max(priority) FROM tasks").fetchone() == (0,)
