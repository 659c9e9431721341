"""The plans of SQLite: a list of tasks is read by the index of what it lists, in the order of that index."""

from __future__ import annotations

import contextlib
import itertools
import re
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest

from asyncgate.backends.pages import TaskRange, list_ranges
from asyncgate.backends.postgres.statements import LEASES
from asyncgate.backends.sqlite import migrations, read_migration
from asyncgate.backends.sqlite_tables import (
    ARCHIVED,
    CLAIMED,
    COUNT,
    HELD_BY,
    HOLDINGS,
    LEASED,
    LEASED_TO,
    SIGN,
    select_count,
    select_ids,
    select_tasks,
)
from asyncgate.parts.model.queries import TaskFilter
from asyncgate.parts.model.wire import Principal

TENANT = "00000000-0000-0000-0000-00000000000a"
IDS = (None, "00000000-0000-7000-8000-000000000100")
RANGES = [("sqlite_autoindex_tasks_1", TaskRange("age"), {}), ("tasks_held", TaskRange("held"), {"held": True}),
          ("tasks_status", TaskRange("status"), {"status": "queued"}),
          ("tasks_owner", TaskRange("owner"), {"owner": Principal("agent", "ada")}),
          ("tasks_type", TaskRange("type"), {"type": "demo"}),
          ("tasks_parent", TaskRange("parent_task_id"), {"parent_task_id": "parent"}),
          ("tasks_type", TaskRange("type", "demo"), {"type_prefix": "de"})]
EVERY: dict[str, Any] = {"owner": Principal("agent", "ada"), "status": "queued", "held": True, "type": "demo",
                         "type_prefix": "de", "summary_prefix": "Sum", "parent_task_id": "parent"}


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    """A database that nobody has analyzed."""
    with contextlib.closing(sqlite3.connect(":memory:")) as empty:
        empty.executescript("".join(map(read_migration, migrations())))
        yield empty


def filtered(before: str | None = None, since: str | None = None, **fields: Any) -> TaskFilter:
    """Return what asks for a list of tasks."""
    return TaskFilter(**{"owner": None, "status": None, "type": None, **fields, "before": before, "limit": 50,
                         "since": since})


def plan(db: sqlite3.Connection, sql: str, given: list[str]) -> list[str]:
    """Return the steps of a query."""
    steps = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", given)]
    assert not [step for step in steps if "TEMP B-TREE" in step or step.startswith("SCAN t")], steps
    return steps


@pytest.mark.parametrize("age", list(itertools.product(IDS, IDS)), ids=str)
@pytest.mark.parametrize(("index", "range_", "fields"), RANGES, ids=lambda of: str(of))
def test_a_list_is_read_by_the_index_of_what_it_lists(
        db: sqlite3.Connection, index: str, range_: TaskRange, fields: dict[str, Any],
        age: tuple[str | None, str | None]) -> None:
    for more in ({}, EVERY):
        first, *_ = plan(db, *select_tasks(TENANT, filtered(*age, **{**more, **fields}), [range_], []))

        assert f" {index} (tenant_id=?" in first
        assert ("task_id<?" in first, "task_id>?" in first) == (age[0] is not None, age[1] is not None), first


@pytest.mark.parametrize("age", list(itertools.product(IDS, IDS)), ids=str)
def test_a_look_at_each_range_reads_its_index_alone(
        db: sqlite3.Connection, age: tuple[str | None, str | None]) -> None:
    indexes = {"held": "tasks_held", "status": "tasks_status", "type": "tasks_type", "type_prefix": "tasks_type",
               "summary_prefix": "tasks_summary", "parent_task_id": "tasks_parent"}
    for range_ in list_ranges(of := filtered(*age, **EVERY)):
        [step] = plan(db, *select_ids(TENANT, of, range_, 10))

        assert f" INDEX {indexes.pop(range_.by)} (tenant_id=?" in step
    assert not indexes


@pytest.mark.parametrize("fields", [{}, {"changed_since": 1.0}, {"behind": (1.0, "a")}, EVERY], ids=str)
def test_a_list_by_changes_is_read_by_their_index(db: sqlite3.Connection, fields: dict[str, Any]) -> None:
    of = filtered(**fields, by_change=True, changed_before=2.0)
    sql, given = select_tasks(TENANT, of, [TaskRange("changed")], [])

    first, *others = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", given)]

    assert " tasks_changed (tenant_id=? AND updated_at" in first
    sorts = [step for step in others if "TEMP" in step or "SCAN" in step]
    assert sorts in (["USE TEMP B-TREE FOR LAST TERM OF ORDER BY"], ["USE TEMP B-TREE FOR RIGHT PART OF ORDER BY"])


def test_a_total_is_counted_by_the_index_of_a_range(db: sqlite3.Connection) -> None:
    indexes = {by: index for index, (by, *_), _ in RANGES} | {
        "type_prefix": "tasks_type", "summary_prefix": "tasks_summary", "changed": "tasks_changed"}
    of = filtered(*IDS, **EVERY, changed_since=1.0)
    for range_ in [*list_ranges(of), TaskRange("age"), TaskRange("changed"), TaskRange("owner")]:
        steps = plan(db, *select_count(TENANT, of, range_, 10))

        assert any(f" {indexes[range_.by]} (tenant_id=?" in step for step in steps), (range_, steps)


def test_some_tasks_are_found_by_their_ids(db: sqlite3.Connection) -> None:
    first, *_ = plan(db, *select_tasks(TENANT, filtered(*IDS, **EVERY), [TaskRange("age")], ["a", "b"]))

    assert "sqlite_autoindex_tasks_1 (tenant_id=? AND task_id=?)" in first


@pytest.mark.parametrize(("sql", "given", "index"), [
    (CLAIMED, 4, "leases_holder (tenant_id=? AND worker_kind=? AND worker_id=? AND claim_id=?)"),
    (HOLDINGS, 3, "leases_holder (tenant_id=? AND worker_kind=? AND worker_id=?)"),
    (HELD_BY, 3, "leases_holder (tenant_id=? AND worker_kind=? AND worker_id=?)"),
    (LEASED_TO, 2, "leases_holder (tenant_id=? AND worker_kind=? AND worker_id=?)"),
    (LEASED, 2, "leases_id (tenant_id=? AND lease_id=?)"), (SIGN, 1, "leases_live (tenant_id=?)"),
    (COUNT, 1, "leases_live (tenant_id=?)"), (ARCHIVED, 2, "archived_task (tenant_id=? AND task_id=?)")])
def test_leases_are_found_by_an_index_however_many_have_ended(
        db: sqlite3.Connection, sql: str, given: int, index: str) -> None:
    """The planner, left alone, reads all leases of a tenant by their key: 0.1 s for each claim after 200,000 tasks."""
    steps = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", ["[]"] * given)]

    assert [step for step in steps if step.endswith(f" INDEX {index}")], steps
    assert not [step for step in steps if "USING PRIMARY KEY (tenant_id=?)" in step and "progress" not in step], steps


def test_the_leases_of_a_worker_are_listed_without_the_payloads_of_their_tasks() -> None:
    assert not {"payload", "outcome", "terms"} & set(re.findall(r"\w+", HELD_BY + LEASES))
