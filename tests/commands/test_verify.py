"""`verify` finds each kind of damage and names it, and finds nothing wrong with a gate that is merely busy."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate import Engine
from asyncgate.backends import Around, open_backend
from asyncgate.conformance.harness import Gate, under
from asyncgate.conformance.verify import Verdict, hash_of, verify
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.stored import Receipt

pytestmark = pytest.mark.anyio
TENANT, OTHER = "00000000-0000-0000-0000-000000000000", "11111111-1111-4111-8111-111111111111"
LINES = 5       # of the audit log of each


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gate.db"


@pytest.fixture
async def gate(path: Path) -> AsyncIterator[Gate]:
    backend = await open_backend(f"sqlite:///{path}")
    yield Gate(Engine(backend, Settings(expiry_jitter_seconds=0.0)), TENANT)
    await backend.close()


@pytest.fixture
async def story(gate: Gate) -> dict[str, str]:
    """A gate in which everything has happened once; the tasks by what became of them."""
    tasks = {"succeeded": (await gate.finished()).task_id}
    unlocated = await gate.leased()
    await gate.as_worker().complete(**under(unlocated), result={"n": 1})
    located = await gate.leased()
    await gate.as_worker().complete(**under(located), result={"n": 1})
    await gate.as_agent().attach_artifacts(task_id=located.task_id, artifacts=[{"uri": "file:///out"}])
    failed = await gate.leased()
    await gate.as_worker().fail(**under(failed), error="broken", retryable=False)
    canceled = await gate.create()
    await gate.as_agent().cancel_task(task_id=canceled)
    leased = await gate.leased()
    retried = await gate.leased()
    await gate.as_worker().fail(**under(retried), error="once more", retryable=True)
    lost = await gate.leased(timeouts={"lease_ttl_seconds": 1})
    await gate.wait(2)
    for tenant_id in (TENANT, OTHER):
        await gate.as_admin().create_tenant(tenant=tenant_id, name=tenant_id[-1] + " name")
        for number in range(1, LINES):
            await gate.as_admin().set_limits(tenant=tenant_id, tier="free", reason=f"change {number}")
    return tasks | {"unlocated": unlocated.task_id, "located": located.task_id, "failed": failed.task_id,
                    "canceled": canceled, "leased": leased.task_id, "retried": retried.task_id, "lost": lost.task_id}


async def verified(path: Path) -> Verdict:
    backend = await open_backend(f"sqlite:///{path}")
    try:
        return await verify(backend)
    finally:
        await backend.close()


def damage(path: Path, sql: str, **given: Any) -> int:
    """Change the file behind the gate's back; the triggers that would prevent it come off first."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {name}")
        changed = db.execute(sql, {"tenant": TENANT, **given}).rowcount
        db.commit()
    return changed


async def test_a_gate_in_which_everything_has_happened_verifies(gate: Gate, story: dict[str, str]) -> None:
    verdict = await verify(gate.backend)

    assert verdict.problems == []
    assert (verdict.tasks, verdict.created, verdict.open, verdict.discharged) == (8, 8, 4, 4)
    assert verdict.audited == 2 * LINES


async def test_an_empty_gate_verifies(gate: Gate) -> None:
    assert await verify(gate.backend) == Verdict()


async def test_progress_is_told_up_to_the_last_row(gate: Gate, story: dict[str, str]) -> None:
    told: list[int] = []

    verdict = await verify(gate.backend, progress=told.append)

    leases = 7      # all but the canceled task had one; and nothing happened that is an event
    assert told == sorted(told)
    assert told[-1] == verdict.tasks + leases + verdict.receipts + verdict.open + verdict.audited


TASK = "task_id = :task_id AND tenant_id = :tenant"
RECEIPT = f"{TASK} AND receipt_type"
TWICE = f"""
    INSERT INTO receipts SELECT tenant_id, 'ffffffff-ffff-7fff-bfff-ffffffffffff', 'twice', receipt_type, created_at,
        from_kind, from_id, to_kind, to_id, task_id, lease_id, schedule_id, asyncgate_instance, hash, body,
        salt, parent_id
    FROM receipts WHERE {RECEIPT} = 'task.assigned'"""
EVENT = "INSERT INTO events VALUES (:tenant, '', {task}, 'task.moved', '{{\"fences_skipped\":1000}}', 0)"
DAMAGES = [
    ("succeeded", f"UPDATE receipts SET body = '{{}}' WHERE {RECEIPT} = 'task.accepted'", ["does not match its hash"]),
    ("succeeded", f"UPDATE receipts SET to_id = 'eve' WHERE {RECEIPT} = 'task.result_ready'",
     ["does not match its hash"]),
    ("leased", f"DELETE FROM obligations WHERE receipt_id = (SELECT duty FROM tasks WHERE {TASK})",
     ["the index does not have it", "obligations were created"]),
    ("succeeded", f"INSERT INTO obligations SELECT tenant_id, owner_kind, owner_id, duty FROM tasks WHERE {TASK}",
     ["is in the index, but it is discharged", "obligations were created"]),
    ("leased", f"UPDATE obligations SET to_id = 'eve' WHERE receipt_id = (SELECT duty FROM tasks WHERE {TASK})",
     ["the index says agent eve"]),
    ("leased", f"UPDATE tasks SET owed = 0 WHERE {TASK}", ["says that its duty is discharged"]),
    ("succeeded", f"UPDATE tasks SET owed = 1 WHERE {TASK}", ["says that its duty is still owed"]),
    ("leased", f"UPDATE tasks SET fence = 7 WHERE {TASK}", ["has fence 7, but", "was leased 7 times"]),
    ("leased", EVENT.format(task=":task_id"), ["was leased -999 times"]),
    ("leased", EVENT.format(task="'nobody'"), ["belongs to task nobody, which does not exist"]),
    ("leased", f"UPDATE leases SET fence = 7 WHERE {TASK}", ["its lease"]),
    ("leased", f"UPDATE leases SET ending = 'expired' WHERE {TASK}", ["is leased, but its lease"]),
    ("leased", f"DELETE FROM leases WHERE {TASK}", ["is leased, but has no lease"]),
    ("leased", f"DELETE FROM tasks WHERE {TASK}", ["which does not exist", "the queue"]),
    ("lost", f"UPDATE leases SET ending = 'live' WHERE {TASK}", ["is queued, but its lease"]),
    ("lost", f"UPDATE tasks SET status = 'canceled' WHERE {TASK}",
     ["is canceled, but has no terminal receipt", "has no receipt task.result_ready", "the queue"]),
    ("failed", f"UPDATE tasks SET status = 'queued' WHERE {TASK}",
     ["is queued, but has a receipt task.failed", "the queue"]),
    ("failed", f"UPDATE tasks SET status = 'succeeded' WHERE {TASK}", ["is succeeded, but has task.failed"]),
    ("unlocated", f"DELETE FROM receipts WHERE {RECEIPT} = 'task.result_ready'", ["has no receipt task.result_ready"]),
    ("retried", f"DELETE FROM receipts WHERE {RECEIPT} = 'task.accepted'",
     ["does not exist, but another names it", "has 0 receipts task.accepted"]),
    ("canceled", f"DELETE FROM receipts WHERE {RECEIPT} = 'task.canceled'",
     ["does not exist, but another names it", "the index does not have it", "says that its duty is discharged",
      "has no terminal receipt", "no terminal receipt names its duty", "obligations were created"]),
    ("leased", f"UPDATE tasks SET duty = 'nobody' WHERE {TASK}",
     ["names nobody as its duty", "says that its duty is still owed"]),
    ("leased", TWICE, ["but its task.assigned is ffffffff", "has 2 receipts task.assigned",
                       "ffffffffffff (task.assigned) is open by the evidence", "obligations were created"]),
]


@pytest.mark.parametrize(("which", "sql", "named"), DAMAGES,
                         ids=[f"{which}: {sql.partition(' WHERE')[0].strip()[:50]}" for which, sql, _ in DAMAGES])
async def test_each_damage_is_named_and_nothing_else(
        path: Path, gate: Gate, story: dict[str, str], which: str, sql: str, named: list[str]) -> None:
    assert damage(path, sql, task_id=story[which]) >= 1

    problems = (await verified(path)).problems

    assert len(problems) == len(named), problems
    assert [words for words in named if not any(words in problem for problem in problems)] == [], problems


async def test_a_discharge_that_was_moved_to_another_task_is_named_though_all_counts_are_equal(
        path: Path, gate: Gate, story: dict[str, str]) -> None:
    before, done, open_task = await verified(path), story["succeeded"], story["leased"]
    receipts = {(receipt.task_id, receipt.receipt_type): receipt
                for receipt in await gate.backend.page(TENANT, Rows(Receipt))}
    completed = receipts[done, "task.completed"]
    duties = [receipts[task_id, "task.assigned"] for task_id in (done, open_task)]
    moved = hash_of(replace(completed, parents=(duties[1].receipt_id,)))        # nothing but its place tells of it
    damage(path, "UPDATE receipts SET parent_id = :to, hash = :hash WHERE receipt_id = :id", id=completed.receipt_id,
           to=duties[1].receipt_id, hash=moved)
    damage(path, "UPDATE obligations SET receipt_id = :to WHERE receipt_id = :duty", to=duties[0].receipt_id,
           duty=duties[1].receipt_id)
    for task_id, owed in ((done, 1), (open_task, 0)):
        damage(path, f"UPDATE tasks SET owed = :owed WHERE {TASK}", task_id=task_id, owed=owed)

    verdict = await verified(path)

    assert (verdict.created, verdict.open) == (before.created, before.open)
    assert (f"receipt {completed.receipt_id} (task.completed) of task {done} names as its parent "
            f"{duties[1].receipt_id}, which is the obligation of task {open_task}") in verdict.problems


async def test_an_obligation_that_is_discharged_twice_is_named(
        path: Path, gate: Gate, story: dict[str, str]) -> None:
    damage(path, f"""
        INSERT INTO receipts SELECT tenant_id, 'ffffffff-ffff-7fff-bfff-ffffffffffff', 'twice', receipt_type,
            created_at, from_kind, from_id, to_kind, to_id, task_id, lease_id, schedule_id, asyncgate_instance, hash,
            body, salt, parent_id
        FROM receipts WHERE {RECEIPT} = 'task.completed'""", task_id=story["succeeded"])

    [problem] = (await verified(path)).problems

    assert "is discharged already, and receipt ffffffff-ffff-7fff-bfff-ffffffffffff" in problem


LINE = "tenant_id = :tenant AND number"
LATER = """
    INSERT INTO audit SELECT tenant_id, '000000000006', 6, at, event, severity, body, hash FROM audit
    WHERE tenant_id = :tenant AND number = 5"""
SWAPPED = """
    UPDATE audit SET at = o.at, event = o.event, body = o.body, hash = o.hash FROM audit AS o
    WHERE audit.tenant_id = :tenant AND o.tenant_id = :tenant AND audit.number IN (2, 3) AND o.number = 5 - audit.number
    """
TAMPERINGS = [
    (f"UPDATE audit SET body = '{{}}' WHERE {LINE} = 3", ["line 3 of the audit log, 000000000003, is not what was"]),
    (f"UPDATE audit SET body = 'no JSON' WHERE {LINE} = 3", ["line 3 of the audit log, 000000000003, is not what was"]),
    (f"UPDATE audit SET body = replace(body, 'root', 'eve') WHERE {LINE} = 1", ["line 1 of the audit log, "]),
    (f"UPDATE audit SET event = 'tenant_created' WHERE {LINE} = 2", ["line 2 of the audit log, "]),
    (f"UPDATE audit SET severity = 'info' WHERE {LINE} = 2", ["line 2 of the audit log, "]),
    (f"UPDATE audit SET at = at - 1 WHERE {LINE} = 5", ["line 5 of the audit log, "]),
    (f"UPDATE audit SET audit_id = '0000000000030' WHERE {LINE} = 3", ["line 3 of the audit log, "]),
    (f"UPDATE audit SET hash = 'made up' WHERE {LINE} = 3", ["line 3 of the audit log, ", "line 4 of the audit log, "]),
    (f"DELETE FROM audit WHERE {LINE} = 1", ["line 1 of the audit log is missing: 000000000002 is number 2"]),
    (f"DELETE FROM audit WHERE {LINE} = 3", ["line 3 of the audit log is missing: 000000000004 is number 4"]),
    (f"DELETE FROM audit WHERE {LINE} = 5", ["the audit log ends with line 4, "]),
    (f"DELETE FROM audit WHERE {LINE} > 0", ["the audit log ends with line 0, , but line 5, "]),
    (SWAPPED, ["line 2 of the audit log, ", "line 3 of the audit log, ", "line 4 of the audit log, "]),
    (f"UPDATE audit SET number = 4 WHERE {LINE} = 3", ["line 3 of the audit log is missing: 000000000003 is number 4",
                                                       "line 5 of the audit log is missing: 000000000004 is number 4"]),
    (LATER, ["line 6 of the audit log, 000000000006, ", "the audit log ends with line 6, "]),
    ("UPDATE audit_heads SET number = 4 WHERE tenant_id = :tenant", [" but line 4, "]),
    ("UPDATE audit_heads SET hash = 'made up' WHERE tenant_id = :tenant", [" but line 5, made up, was the last"]),
    ("DELETE FROM audit_heads WHERE tenant_id = :tenant", ["the audit log ends with line 5, "]),
]


@pytest.mark.parametrize(("sql", "named"), TAMPERINGS, ids=[" ".join(sql.split())[:70] for sql, _ in TAMPERINGS])
async def test_a_line_of_the_log_that_was_changed_moved_or_taken_away_is_named_and_nothing_else(
        path: Path, gate: Gate, story: dict[str, str], sql: str, named: list[str]) -> None:
    assert damage(path, sql) >= 1

    problems = (await verified(path)).problems

    assert len(problems) == len(named), problems
    assert all(problem.startswith(f"tenant {TENANT}: ") for problem in problems)
    assert [words for words in named if not any(words in problem for problem in problems)] == [], problems


async def test_a_log_that_grows_while_it_is_read_is_sound(gate: Gate, story: dict[str, str]) -> None:
    class Growing(Around):
        """A backend on which somebody writes to the log whenever its end is asked for."""

        async def record(self, tenant_id: str, kind: Any, *key: str) -> Any:
            await gate.as_admin().set_limits(tenant=tenant_id, tier="paid")
            return await gate.backend.record(tenant_id, kind, *key)

    assert (await verify(Growing(gate.backend))).problems == []


async def test_a_damaged_file_is_named(path: Path, gate: Gate, story: dict[str, str]) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        page_size = db.execute("PRAGMA page_size").fetchone()[0]
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'tasks_owner'").fetchone()
    with path.open("r+b") as file:
        file.seek((root - 1) * page_size + page_size // 2)
        file.write(b"\xff" * (page_size // 2))

    problems = (await verified(path)).problems

    assert any(problem.startswith("the database file: ") for problem in problems)
