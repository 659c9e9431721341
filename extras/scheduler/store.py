"""The file of a scheduler: schedules, runs to create, and answers to send.

One SQLite file, one process.  Each method is one transaction and is synced to disk when it returns.  So after a kill
the next process finds every decision, and repeats it under the same keys:

    schedules   the plan of each, and the time up to which its runs are settled
    firings     runs that are decided but not confirmed as created, each with the whole create_task
    controls    control tasks that were carried out, with the answer to repeat if the gate offers the task again
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
from msgspec import Struct, structs

from asyncgate.extras.scheduler.calendar import Timing
from asyncgate.extras.scheduler.plan import Plan

SCHEMA = 1
SCHEDULE_TABLES = """
CREATE TABLE schedules (
    schedule_id TEXT PRIMARY KEY,
    state TEXT NOT NULL,            -- new: not confirmed to its owner; live; deleted: receipt not sent yet
    due_at REAL,                    -- when the next run is due; NULL if there is none
    record BLOB NOT NULL            -- the Schedule, as JSON
) WITHOUT ROWID;
CREATE INDEX schedules_due ON schedules (due_at) WHERE state = 'live' AND due_at IS NOT NULL;
CREATE TABLE firings (
    schedule_id TEXT NOT NULL,
    run_at INTEGER NOT NULL,        -- seconds since 1970
    ask BLOB NOT NULL,              -- create_task, as JSON
    PRIMARY KEY (schedule_id, run_at)
) WITHOUT ROWID;
CREATE TABLE controls (
    task_id TEXT PRIMARY KEY,
    done_at REAL,                   -- when the gate had the answer; NULL until then
    record BLOB NOT NULL            -- the Control, as JSON
) WITHOUT ROWID;
CREATE INDEX controls_open ON controls (task_id) WHERE done_at IS NULL;
"""


class StoreError(Exception):
    """The file cannot be used; the text says why."""


class Schedule(Struct, kw_only=True):
    """One schedule (spec 8.1)."""

    schedule_id: str
    plan: Plan
    owner_kind: str
    owner_id: str
    task_id: str                        # of its schedule.create
    created_at: int                     # the anchor of an interval
    since: float                        # runs up to here are settled: decided, or passed while paused
    state: Literal["new", "live", "deleted"] = "new"
    enabled: bool = True
    next_run_at: int | None = None
    due_at: float | None = None
    last_run_at: int | None = None
    last_status: str | None = None
    last_task_id: str | None = None
    receipt_id: str | None = None       # its schedule.created

    def timing(self) -> Timing:
        """Return the run times of the schedule."""
        return self.plan.timing(self.schedule_id, self.created_at)

    def settled(self, since: float) -> Schedule:
        """Return the schedule with everything up to a time settled, and its next run after it."""
        run, due = next(self.timing().after(since), (None, None)) if self.enabled else (None, None)
        return structs.replace(self, since=since, next_run_at=run, due_at=due)


class Firing(Struct):
    """A run that is decided but not confirmed as created."""

    schedule_id: str
    run_at: int
    ask: dict[str, Any]


class Fired(Struct):
    """The outcome of a firing: a task, or a refusal."""

    firing: Firing
    status: str
    task_id: str | None = None


class Control(Struct, kw_only=True):
    """A control task that was carried out or refused; its answer is `result` or `error`."""

    task_id: str
    type: str
    lease: dict[str, Any]               # the task's latest lease, which an answer must name
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    schedule_id: str | None = None


class Store:
    """The file of one scheduler, locked while it is open."""

    def __init__(self, path: str) -> None:
        with contextlib.ExitStack() as opened:
            try:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))     # only the owner may read payloads
                self.db = sqlite3.connect(path, isolation_level=None, timeout=0)
                opened.callback(self.db.close)
                self._migrate()
            except (OSError, sqlite3.Error) as error:
                taken = "another scheduler has it open" if "locked" in str(error) else None
                raise StoreError(f"cannot use {path}: {taken or getattr(error, 'strerror', '') or error}") from None
            opened.pop_all()

    def _migrate(self) -> None:
        # No write-ahead log: the next process reads of it what the kernel shows, also behind a failed fsync, and writes
        # on behind what the disk never took.  A rollback journal holds old pages only.
        self.db.executescript("PRAGMA locking_mode = EXCLUSIVE; PRAGMA synchronous = EXTRA; "
                              "PRAGMA journal_mode = DELETE; BEGIN EXCLUSIVE; COMMIT;")
        version = self.db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA:
            raise sqlite3.DatabaseError(f"its schema is {version}, of a newer AsyncGate: use that version")
        if version == 0:
            self.db.executescript(f"BEGIN IMMEDIATE; {SCHEDULE_TABLES} PRAGMA user_version = {SCHEMA}; COMMIT;")

    def close(self) -> None:
        """Close and unlock the file."""
        self.db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")

    # Schedules.

    def schedule(self, schedule_id: str) -> Schedule | None:
        """Return a schedule, unless it is deleted."""
        schedules = self._schedules("WHERE schedule_id = ? AND state <> 'deleted'", schedule_id)
        return next(schedules, None)

    def live(self) -> list[Schedule]:
        """Return all live schedules."""
        return list(self._schedules("WHERE state = 'live'"))

    def deleted(self) -> list[Schedule]:
        """Return the schedules whose schedule.deleted is not sent yet."""
        return list(self._schedules("WHERE state = 'deleted'"))

    def due(self, now: float) -> list[Schedule]:
        """Return the schedules with runs to decide, but none whose last runs are not yet created."""
        return list(self._schedules("WHERE state = 'live' AND due_at <= ? AND NOT EXISTS ("
                                    "SELECT 1 FROM firings AS f WHERE f.schedule_id = schedules.schedule_id)", now))

    def next_due_at(self) -> float | None:
        """Return the earliest time of a run to decide, or None."""
        moment: float | None = self.db.execute(
            "SELECT min(due_at) FROM schedules WHERE state = 'live' AND due_at IS NOT NULL AND NOT EXISTS ("
            "SELECT 1 FROM firings AS f WHERE f.schedule_id = schedules.schedule_id)").fetchone()[0]
        return moment

    def _schedules(self, where: str, *values: Any) -> Iterator[Schedule]:
        for (record,) in self.db.execute(f"SELECT record FROM schedules {where} ORDER BY schedule_id", values):
            yield msgspec.json.decode(record, type=Schedule)

    def _keep(self, schedule: Schedule) -> None:
        self.db.execute("INSERT OR REPLACE INTO schedules (schedule_id, state, due_at, record) VALUES (?, ?, ?, ?)",
                        (schedule.schedule_id, schedule.state, schedule.due_at, msgspec.json.encode(schedule)))

    def keep(self, schedule: Schedule) -> None:
        """Write a schedule."""
        with self._transaction():
            self._keep(schedule)

    def remove(self, schedule_id: str) -> None:
        """Remove a deleted schedule from the file."""
        with self._transaction():
            self.db.execute("DELETE FROM schedules WHERE schedule_id = ? AND state = 'deleted'", (schedule_id,))

    # Runs.

    def decide(self, decisions: Iterable[tuple[Schedule, list[Firing]]]) -> None:
        """Write the runs to create, and their schedules, which are settled up to these runs."""
        with self._transaction():
            for schedule, firings in decisions:
                self._keep(schedule)
                for firing in firings:
                    self._add_run(firing)

    def _add_run(self, firing: Firing) -> None:
        self.db.execute("INSERT OR IGNORE INTO firings (schedule_id, run_at, ask) VALUES (?, ?, ?)",
                        (firing.schedule_id, firing.run_at, msgspec.json.encode(firing.ask)))

    def firings(self) -> list[Firing]:
        """Return the runs that are not confirmed as created, by schedule, oldest first."""
        rows = self.db.execute("SELECT schedule_id, run_at, ask FROM firings ORDER BY schedule_id, run_at")
        return [Firing(schedule_id, run_at, msgspec.json.decode(ask)) for schedule_id, run_at, ask in rows]

    def fired(self, outcomes: Iterable[Fired]) -> None:
        """Write the outcomes of runs, by schedule, oldest first."""
        with self._transaction():
            for fired in outcomes:
                named = fired.firing.schedule_id, fired.firing.run_at
                self.db.execute("DELETE FROM firings WHERE schedule_id = ? AND run_at = ?", named)
                if schedule := self.schedule(named[0]):
                    self._keep(structs.replace(schedule, last_run_at=named[1], last_status=fired.status,
                                               last_task_id=fired.task_id))

    # Control tasks.

    def control(self, task_id: str) -> Control | None:
        """Return a control task that was carried out before, or None."""
        row = self.db.execute("SELECT record FROM controls WHERE task_id = ?", (task_id,)).fetchone()
        return msgspec.json.decode(row[0], type=Control) if row else None

    def unanswered(self) -> list[Control]:
        """Return the control tasks whose answers the gate has not accepted yet."""
        rows = self.db.execute("SELECT record FROM controls WHERE done_at IS NULL ORDER BY task_id")
        return [msgspec.json.decode(record, type=Control) for (record,) in rows]

    def carry_out(self, control: Control, schedule: Schedule | None = None, run: Firing | None = None) -> None:
        """Write an answer, and its change of the schedule or its extra run; a paused schedule loses its open runs."""
        with self._transaction():
            self._keep_control(control, None)
            if schedule is not None:
                self._change(schedule)
            if run is not None:
                self._add_run(run)      # a run of the same second is the same run

    def answered(self, control: Control, now: float, schedule: Schedule | None = None) -> None:
        """Write that the gate has the answer or no longer needs it, and the resulting change of the schedule."""
        with self._transaction():
            self._keep_control(control, now)
            if schedule is not None:
                self._change(schedule)

    def _change(self, schedule: Schedule) -> None:
        self._keep(schedule)
        if schedule.state == "deleted" or not schedule.enabled:
            self.db.execute("DELETE FROM firings WHERE schedule_id = ?", (schedule.schedule_id,))

    def _keep_control(self, control: Control, done_at: float | None) -> None:
        self.db.execute("INSERT OR REPLACE INTO controls (task_id, done_at, record) VALUES (?, ?, ?)",
                        (control.task_id, done_at, msgspec.json.encode(control)))

    def forget(self, before: float) -> None:
        """Remove old answers that the gate has accepted: it never offers an ended task again."""
        with self._transaction():
            self.db.execute("DELETE FROM controls WHERE done_at < ?", (before,))
