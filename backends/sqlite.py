"""SQLite: one writer thread that runs whole batches, and concurrent readers on the write-ahead log.

A batch goes to the writer thread once, with its needs and its `decide`, and comes back durable: changing threads costs
more than ten statements.  Batches of all tenants that wait meanwhile share one fsync.  `BEGIN IMMEDIATE` takes the
write lock before the first read, so no row can change after a batch has loaded it.

A COMMIT that fails leaves open what is on the disk: all of it, where only the report of an fsync was lost, a part, or
nothing, where the kernel shows pages that the disk never took.  Its batches are answered with a 503, and the next one
begins on a new connection, with the write-ahead log made durable as it is read (`rewrite_log`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import heapq
import json
import logging
import os
import queue
import re
import secrets
import sqlite3
import stat
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterable, Iterator
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

import aiosqlite
from msgspec import Struct
from msgspec.structs import astuple

from asyncgate import Needs, News, Work
from asyncgate.backends import Backend, FileBackend, LastingBackend
from asyncgate.backends.lanes import Lanes, Portions
from asyncgate.backends.lineage import FIRST, digest, require_lineage
from asyncgate.backends.pages import (
    Pages,
    TaskRange,
    join_queues,
    limit_range,
    narrow_tasks,
    read_leases,
)
from asyncgate.parts.model.clock import SteadyClock
from asyncgate.parts.model.counted import count_moves, measure_text, measure_use
from asyncgate.parts.model.errors import DatabaseUnavailable, NotNow, Refused, StartupError, outcome_unknown
from asyncgate.parts.model.findings import Finding
from asyncgate.parts.model.ids import Ids
from asyncgate.parts.model.queries import (
    DELAYED_COUNTED,
    DUE_LOOKED_AT,
    MOST_PRIORITIES,
    OVERDUE_COUNTED,
    QUEUE_KEPT_SECONDS,
    AheadOf,
    ArchivedFilter,
    DeliveryFilter,
    EntryFilter,
    EventFilter,
    HoldingsOf,
    IdFilter,
    LeaseCount,
    LeaseFilter,
    ObligationFilter,
    OutboxFilter,
    OutboxOf,
    QueueFilter,
    ReceiptFilter,
    ScheduleFilter,
    TaskFilter,
    UnsentOf,
    WorkerFilter,
    end_of,
    merge_parts,
    page_of,
)
from asyncgate.parts.model.settings import DatabaseSettings, Settings
from asyncgate.parts.model.stored import (
    APPEND_ONLY,
    ERASABLE,
    RECORDS,
    TABLES,
    Archived,
    Audit,
    Depth,
    Entry,
    Event,
    Holding,
    Key,
    Lag,
    Lease,
    Meter,
    Obligation,
    Outgoing,
    Pauses,
    Presence,
    Progress,
    Queue,
    Receipt,
    Schedule,
    Task,
    Usage,
    export_order,
)
from asyncgate.parts.model.stored_webhooks import WebhookDelivery
from asyncgate.parts.model.views import summarize
from asyncgate.parts.model.wire import Kind, LeaseNext
from asyncgate.parts.process.folders import fsync_folder
from asyncgate.parts.process.outages import OFTEN
from asyncgate.parts.process.turns import counting

log = logging.getLogger("asyncgate.sqlite")
R = TypeVar("R", bound=Struct)
SCHEMA = Path(__file__).parent / "schema" / "sqlite"
CURRENT_SCHEMA = len(list(SCHEMA.glob("[0-9]*.sql")))
FILE_PAGE = 2048       # bytes, of a new file: a commit writes whole pages twice; smaller ones slow large commits down
COPIED_CHANGES = 16384      # of rows, after which the log is copied back: 6 to 30 MiB of it
LARGE_LOG = 32 << 20        # bytes of it, at which it is copied back at once
PRAGMAS = f"""
    PRAGMA page_size = {FILE_PAGE}; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;
    PRAGMA wal_autocheckpoint = 0; PRAGMA journal_size_limit = {LARGE_LOG}; PRAGMA cache_size = -65536;
    PRAGMA mmap_size = 1073741824; PRAGMA temp_store = MEMORY; PRAGMA foreign_keys = OFF;
    PRAGMA recursive_triggers = ON;
"""     # recursive_triggers: without it, REPLACE would delete rows without firing the triggers that protect them
HOW_TO_MIGRATE = "run `asyncgate migrate --database URL`"
WAY_ON = ("; what was acknowledged is in the file and its -wal, which stay as they are: make room on the disk, or "
          "repair it, then start again")
WAYS_ON = {sqlite3.SQLITE_IOERR: WAY_ON, sqlite3.SQLITE_FULL: WAY_ON,
           sqlite3.SQLITE_READONLY: "; the system did not open it for writing: see its rights and its disk, then start "
                                    "again"}
COPIED_PAGES = 4096     # of a backup, at once
REWRITTEN = 1 << 20     # bytes of the log, at once
SHARE = 64          # the most batches that share one commit
LOOK_AGAIN_SECONDS = 0.0005     # our own tools look for a free write lock so often, SQLite every 100 ms or sooner
BUSY_SECONDS = 30           # how long the write lock of another program is waited for, except by a gate's batches
AGAIN_MS = 50               # how long they wait for it once one has waited in vain
NOTICED_SECONDS = 5.0       # how long another program may hold it, or a read may take, until the gate is unhealthy
# What the disk or another program is to blame for; everything else is a mistake and keeps its traceback.
OUTAGES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR,
           sqlite3.SQLITE_READONLY}
PIECE, MOST_WHOLE = 8, 16       # tasks of each of several lanes that a claim reads first, and how many it reads whole
PROMOTED = 1000     # the most delayed tasks that one batch makes claimable when their time has come

KEPT_OUT = "another program holds the write lock of the database file; nothing was stored, so try again"

# The columns of a table are tenant_id and the fields of its Struct, without the fields that other tables store.


def fields(kind: type[Struct]) -> list[str]:
    """Return the columns of a stored Struct."""
    return [name for name in kind.__struct_fields__ if name not in ("parents", "delivered_at")]


def listed(kind: type[Struct], prefix: str = "") -> str:
    """Return the columns of a Struct as the list of a SELECT."""
    return ", ".join(f"{prefix}{name}" for name in fields(kind))


def insert(table: str, columns: Iterable[str], or_else: str = "OR ROLLBACK") -> str:
    """Return an INSERT of whole rows.

    OR ROLLBACK is faster: a refused row rolls back the whole batch anyway, and to roll back a single statement SQLite
    would have to save each page that it touches.
    """
    names = ["tenant_id", *columns]
    return f"INSERT {or_else} INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


def upsert(table: str, columns: list[str], key: Iterable[str]) -> str:
    """Return an INSERT that updates the row with the same key; unlike REPLACE it does not delete that row first."""
    changes = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    return f"{insert(table, columns)} ON CONFLICT ({', '.join(['tenant_id', *key])}) DO UPDATE SET {changes}"


TASK, LEASE, PROGRESS, RECEIPT = (len(fields(kind)) for kind in (Task, Lease, Progress, Receipt))
MUTABLE = fields(Task)[fields(Task).index("asyncgate_instance"):]

NAMED = f"""
    SELECT {listed(Task, 't.')}, {listed(Lease, 'l.')}, {listed(Progress, 'p.')}
    FROM tasks AS t LEFT JOIN leases AS l USING (tenant_id, task_id) LEFT JOIN progress AS p USING (tenant_id, task_id)
    WHERE t.tenant_id = ?1 """
TYPES_OF = """
    WITH RECURSIVE found (type) AS (
        SELECT * FROM (SELECT type FROM tasks WHERE tenant_id = ?1 AND type >= ?2 AND type < ?3 ORDER BY type LIMIT 1)
        UNION ALL
        SELECT (SELECT t.type FROM tasks AS t
                WHERE t.tenant_id = ?1 AND t.type > found.type AND t.type < ?3 ORDER BY t.type LIMIT 1)
        FROM found WHERE found.type IS NOT NULL)
    SELECT type FROM found WHERE type IS NOT NULL LIMIT ?4"""
# By which index each range is read; the planner knows too little about a tenant to choose.
LED_BY = {"held": "tasks_held", "status": "tasks_status", "owner": "tasks_owner", "type": "tasks_type",
          "type_prefix": "tasks_type", "summary_prefix": "tasks_summary", "age": "sqlite_autoindex_tasks_1"}
BY_ID = NAMED + "AND t.task_id IN (SELECT value FROM json_each(?2))"
KEYED = "SELECT task_id FROM tasks WHERE tenant_id = ? AND owner_kind = ? AND owner_id = ? AND idempotency_key = ?"
LEASED = "SELECT task_id FROM leases WHERE tenant_id = ? AND ending = 'live' AND lease_id = ?"
# INDEXED BY where a table without rowids is read by something else than its key: the planner takes its key for as good,
# because that needs no second look-up, and then reads every lease that the tenant ever had.
CLAIMED = """
    SELECT task_id FROM leases INDEXED BY leases_holder
    WHERE tenant_id = ? AND ending = 'live' AND worker_kind = ? AND worker_id = ? AND claim_id = ?"""
PROMOTE = """
    UPDATE tasks SET ready = 1
    WHERE tenant_id = ?1 AND task_id IN (
        SELECT task_id FROM tasks
        WHERE tenant_id = ?1 AND status = 'queued' AND ready = 0 AND held IS NULL AND next_eligible_at <= ?2
        ORDER BY next_eligible_at LIMIT ?3)"""
QUEUED_TASK = f"""
    SELECT -t.priority, t.task_id, {listed(Task, 't.')}, {listed(Progress, 'p.')}
    FROM tasks AS t LEFT JOIN progress AS p USING (tenant_id, task_id)"""
IN_QUEUE = """
    WHERE t.tenant_id = ? AND t.lane = ? AND t.status = 'queued' AND t.ready = 1 ORDER BY t.priority DESC, t.task_id
    LIMIT ? OFFSET ?"""
HEADS = QUEUED_TASK + IN_QUEUE
PLACES = f"SELECT -t.priority, t.task_id FROM tasks AS t {IN_QUEUE}"
# In the order of the ids, which the CROSS JOIN keeps: an ORDER BY would read all payloads before the first row.
HEADS_BY_ID = QUEUED_TASK.replace("FROM tasks AS t", """FROM json_each(?2) AS i
    CROSS JOIN tasks AS t ON t.tenant_id = ?1 AND t.task_id = i.value""")
MOVE = f"""
    UPDATE OR ROLLBACK tasks SET {', '.join(f'{name} = ?' for name in MUTABLE)}, priority = ?, ready = ?
    WHERE tenant_id = ? AND task_id = ?"""
DISCHARGE = "DELETE FROM obligations WHERE tenant_id = ? AND to_kind = ? AND to_id = ? AND receipt_id = ?"
BY_KEY = {kind: " AND ".join(["tenant_id = ?", *(f"{name} = ?" for name in export_order(kind))]) for kind in RECORDS}
RECORD = {kind: f"SELECT {listed(kind)} FROM {table} WHERE {BY_KEY[kind]}" for kind, table in RECORDS.items()}
# The statements that delete a row and its dependents; triggers refuse to delete receipts and tasks not yet archived.
DROP: dict[type[Struct], list[str]] = {
    **{kind: [f"DELETE FROM {table} WHERE {BY_KEY[kind]}"] for kind, table in RECORDS.items()},
    Receipt: [f"DELETE FROM {table} WHERE tenant_id = ? AND {key} = ?" for table, key in (
        ("edges", "child_id"), ("deliveries", "receipt_id"), ("receipts", "receipt_id"))],
    Audit: ["DELETE FROM audit WHERE tenant_id = ? AND audit_id = ?"],
    Task: [f"DELETE FROM {table} WHERE tenant_id = ? AND task_id = ?" for table in (
        "tasks", "leases", "progress", "events")]}
ERASABLE_TABLES: dict[type[Struct], str] = {Receipt: "receipts", Event: "events", Audit: "audit", Entry: "ledger",
                                            Task: "tasks", Lease: "leases"}
ERASE = {kind: f"UPDATE {ERASABLE_TABLES[kind]} SET {', '.join(f'{name} = ?' for name in names)} WHERE tenant_id = ? "
               f"AND {' AND '.join(f'{name} = ?' for name in key)}" for kind, (names, key) in ERASABLE.items()}
EMPTY_LANES = """
    SELECT lane FROM lanes
    WHERE tenant_id = ?1
    AND NOT EXISTS (SELECT 1 FROM tasks AS t WHERE t.tenant_id = ?1 AND t.lane = lanes.lane AND t.status = 'queued'
                    AND t.ready = 1)
    AND lane NOT IN (SELECT t.lane FROM tasks AS t WHERE t.tenant_id = ?1 AND t.status = 'queued' AND t.ready = 0
                     AND t.held IS NULL)"""
WORKERS = f"""
    SELECT {listed(Presence)} FROM presences
    WHERE tenant_id = ? AND claimed_at IS NOT NULL AND (kind, id) > (?, ?) ORDER BY kind, id LIMIT ?"""
LATEST_WORKERS = f"""
    SELECT {listed(Presence)} FROM presences
    WHERE tenant_id = ? AND claimed_at IS NOT NULL ORDER BY claimed_at DESC LIMIT ?"""
HOLDINGS = """
    SELECT json_extract(w.value, '$[0]'), json_extract(w.value, '$[1]'), (
        SELECT count(*) FROM (
            SELECT 1 FROM leases INDEXED BY leases_holder WHERE tenant_id = ?1 AND ending = 'live'
            AND worker_kind = json_extract(w.value, '$[0]') AND worker_id = json_extract(w.value, '$[1]') LIMIT ?3))
    FROM json_each(?2) AS w"""
COUNT_AHEAD = """
    SELECT count(*) FROM (
        SELECT * FROM (SELECT 1 FROM tasks WHERE tenant_id = ?1 AND lane = ?2 AND status = 'queued' AND ready = 1
                       AND priority > ?3 LIMIT ?5)
        UNION ALL
        SELECT * FROM (SELECT 1 FROM tasks WHERE tenant_id = ?1 AND lane = ?2 AND status = 'queued' AND ready = 1
                       AND priority = ?3 AND task_id < ?4 LIMIT ?5)
        LIMIT ?5)"""
UNSENT_OF = f"""
    SELECT {listed(Outgoing)} FROM outbox
    WHERE tenant_id = ?1 AND receipt_id IN (SELECT receipt_id FROM receipts WHERE tenant_id = ?1 AND task_id = ?2)
    LIMIT ?3"""
EMPTY_QUEUES = "DELETE FROM queues WHERE tenant_id = ? AND queued = 0 AND held = 0 AND leased = 0 AND counted_at <= ?"
WALL = "UPDATE wall SET tenant_id = ?"
TENANT = "INSERT INTO tenants (tenant_id, since) VALUES (?, ?) ON CONFLICT DO NOTHING"
ADD_RECEIPT = insert("receipts", [*fields(Receipt), "parent_id"]) + (
    " ON CONFLICT (tenant_id, task_id, receipt_key) DO NOTHING")

RECEIPTS = f"""
    SELECT {listed(Receipt, 'r.')}, r.parent_id, d.delivered_at,
           (SELECT group_concat(e.parent_id, ' ') FROM edges AS e
            WHERE e.tenant_id = r.tenant_id AND e.child_id = r.receipt_id)
    FROM receipts AS r LEFT JOIN deliveries AS d USING (tenant_id, receipt_id)
    WHERE r.tenant_id = ?1 """
FAMILY = RECEIPTS + """
    AND r.receipt_id IN (
        SELECT value FROM json_each(?2)
        UNION SELECT receipt_id FROM receipts WHERE tenant_id = ?1 AND parent_id IN (SELECT value FROM json_each(?2))
        UNION SELECT child_id FROM edges WHERE tenant_id = ?1 AND parent_id IN (SELECT value FROM json_each(?2)))"""
ENDINGS = RECEIPTS + "AND r.task_id = ?2 AND r.lease_id = ?3"
STATES = RECEIPTS + "AND r.task_id = ?2 AND r.receipt_key = ?3"
TERMINATED = """
    SELECT EXISTS (SELECT 1 FROM receipts WHERE tenant_id = ?1 AND parent_id = ?2
                   AND receipt_type IN (SELECT value FROM json_each(?3)))
        OR EXISTS (SELECT 1 FROM edges AS e JOIN receipts AS r ON r.tenant_id = ?1 AND r.receipt_id = e.child_id
                   WHERE e.tenant_id = ?1 AND e.parent_id = ?2
                   AND r.receipt_type IN (SELECT value FROM json_each(?3)))"""
OPEN_FOR_ALL = RECEIPTS + """
    AND r.receipt_id IN (
        SELECT receipt_id FROM obligations WHERE tenant_id = ?1 AND receipt_id > ?2 ORDER BY receipt_id LIMIT ?3)
    ORDER BY r.receipt_id"""
OPEN = RECEIPTS + """
    AND r.receipt_id IN (
        SELECT receipt_id FROM obligations
        WHERE tenant_id = ?1 AND to_kind = ?2 AND to_id = ?3 AND receipt_id > ?4 ORDER BY receipt_id LIMIT ?5)
    ORDER BY r.receipt_id"""
LOST = """
    SELECT task_id FROM (SELECT task_id FROM leases WHERE tenant_id = ?1 AND ending = 'live' AND expires_at <= ?3
                         ORDER BY expires_at LIMIT ?4)
    UNION SELECT task_id FROM (
        SELECT task_id FROM tasks WHERE tenant_id = ?1 AND deadline_at IS NOT NULL AND deadline_at <= ?2
        AND status IN ('queued', 'leased', 'running') ORDER BY deadline_at LIMIT ?4)
    UNION SELECT task_id FROM (
        SELECT task_id FROM tasks WHERE tenant_id = ?1 AND status = 'queued' AND attempt >= max_attempts LIMIT ?4)"""
LATE_TENANTS = """
    SELECT tenant_id FROM tenants AS t
    WHERE EXISTS (SELECT 1 FROM leases WHERE tenant_id = t.tenant_id AND ending = 'live' AND expires_at <= ?2)
        OR EXISTS (SELECT 1 FROM tasks WHERE tenant_id = t.tenant_id AND deadline_at IS NOT NULL AND deadline_at <= ?1
                   AND status IN ('queued', 'leased', 'running'))
        OR EXISTS (SELECT 1 FROM tasks WHERE tenant_id = t.tenant_id AND status = 'queued' AND attempt >= max_attempts)
        OR EXISTS (SELECT 1 FROM schedules WHERE tenant_id = t.tenant_id AND late_at <= ?1)"""
# The newest receipt is a sign of life too; it may be newer than the last heartbeat of a killed gate.
LAST_SIGN = """
    SELECT max(at) FROM (SELECT CAST(value AS REAL) AS at FROM meta WHERE name = 'sign_of_life'
                         UNION ALL SELECT * FROM (SELECT created_at FROM receipts ORDER BY rowid DESC LIMIT 1))"""
SIGN = """
    INSERT OR REPLACE INTO meta SELECT 'sign_of_life', ?
    WHERE EXISTS (
        SELECT 1 FROM tenants CROSS JOIN leases INDEXED BY leases_live USING (tenant_id) WHERE ending = 'live')"""
LAPSES = """
    SELECT expires_at, tenant_id, task_id FROM tenants CROSS JOIN leases USING (tenant_id)
    WHERE ending = 'live' AND expires_at >= ? ORDER BY expires_at LIMIT ?"""
COUNT = """
    SELECT (SELECT count(*) FROM tasks WHERE tenant_id = ?1 AND status IN ('queued', 'leased', 'running')),
           (SELECT count(*) FROM leases INDEXED BY leases_live WHERE tenant_id = ?1 AND ending = 'live'),
           (SELECT coalesce(sum(length(CAST(body AS BLOB))), 0) FROM receipts WHERE tenant_id = ?1),
           (SELECT count(*) FROM tasks WHERE tenant_id = ?1 AND status IN ('succeeded', 'failed', 'canceled'))"""
TALLY = """
    SELECT t.value, (SELECT count(*) FROM receipts WHERE tenant_id = ?1 AND task_id = t.value)
    FROM json_each(?2) AS t"""
HELD_BY = f"""
    SELECT t.type, {listed(Lease, 'l.')}
    FROM leases AS l INDEXED BY leases_holder JOIN tasks AS t USING (tenant_id, task_id)
    WHERE l.tenant_id = ?1 AND l.ending = 'live' AND l.worker_kind = ?2 AND l.worker_id = ?3 ORDER BY l.acquired_at"""
LEASED_IN = """
    SELECT coalesce(sum(leased), 0) FROM queues WHERE tenant_id = ?1 AND (?2 IS NULL OR type = ?2)
    AND (?3 IS NULL OR lane = ?3)"""
LEASED_TO = f"""
    SELECT count(*) FROM leases INDEXED BY leases_holder WHERE tenant_id = ? AND ending = 'live' AND worker_id = ?
    AND worker_kind IN ({", ".join([f"'{kind}'" for kind in get_args(Kind)])})"""
ARCHIVED = f"""
    SELECT {listed(Archived)} FROM archived INDEXED BY archived_task
    WHERE tenant_id = ? AND task_id = ? ORDER BY receipt_id"""
FIND_KEY = f"""
    SELECT k.tenant_id, a.suspended_at IS NOT NULL, {listed(Key, 'k.')}
    FROM api_keys AS k LEFT JOIN accounts AS a USING (tenant_id) WHERE k.key_id = ?"""
UNSENT = """
    SELECT tenant_id FROM tenants AS t
    WHERE EXISTS (SELECT 1 FROM outbox WHERE tenant_id = t.tenant_id)"""
WAITING = f"""
    SELECT {listed(Outgoing)} FROM outbox
    WHERE tenant_id = ? AND state = 'waiting' AND receipt_id > ? ORDER BY receipt_id LIMIT ?"""
OFFERED = WAITING.replace("'waiting'", "'offered'")     # without an index: the outbox of a strict gate is short
WEBHOOK_DELIVERIES = f"SELECT {listed(WebhookDelivery)} FROM webhook_deliveries WHERE tenant_id = ?"
OUTGOING = f"""
    SELECT {listed(Outgoing)} FROM outbox WHERE tenant_id = ? AND receipt_id IN (SELECT value FROM json_each(?))"""
LAG = """
    SELECT (SELECT count(*) FROM outbox WHERE tenant_id = ?1 AND state = 'waiting'),
           (SELECT count(*) FROM outbox WHERE tenant_id = ?1 AND state = 'parked'),
           (SELECT posted_at FROM outbox WHERE tenant_id = ?1 AND state = 'waiting' ORDER BY receipt_id LIMIT 1)"""
IDS_LIKE = {table: f"""
    SELECT {id} FROM {name} WHERE tenant_id = ?1 AND {id} >= ?2 AND {id} < ?3
    UNION
    SELECT {id} FROM (SELECT {id} FROM {name} WHERE tenant_id = ?1 ORDER BY {id} DESC LIMIT ?4)
    WHERE substr({id}, -length(?2)) = ?2
    LIMIT ?5""" for table, name, id in ((Task, "tasks", "task_id"), (Receipt, "receipts", "receipt_id"))}
SCHEDULES = f"""
    SELECT {listed(Schedule)} FROM schedules WHERE tenant_id = ? AND schedule_id > ? ORDER BY schedule_id LIMIT ?"""
SCHEDULES_OF = f"""
    SELECT {listed(Schedule)} FROM schedules
    WHERE tenant_id = ? AND owner_kind = ? AND owner_id = ? AND schedule_id > ? ORDER BY schedule_id LIMIT ?"""
LATE = "SELECT schedule_id FROM schedules WHERE tenant_id = ? AND late_at <= ? ORDER BY late_at LIMIT ?"
QUEUES = "SELECT lane, type, capabilities, queued, held, leased FROM queues WHERE tenant_id = ?1"
DELAYED = f"""
    SELECT lane, sum(next_eligible_at > ?2), min(next_eligible_at), count(*) FROM (
        SELECT lane, next_eligible_at FROM tasks
        WHERE tenant_id = ?1 AND status = 'queued' AND ready = 0 AND held IS NULL
        ORDER BY next_eligible_at LIMIT {DELAYED_COUNTED + 1})
    GROUP BY lane"""


def find_oldest(lanes: str, by: str) -> str:
    """Return the query for since when the oldest tasks of some lanes wait; `lanes` selects tenant, lane and type.

    It goes from one priority of a lane to the next one; the oldest task of each is found by the index of the queue.
    """
    of_lane = "t.tenant_id = p.tenant_id AND t.lane = p.lane AND t.status = 'queued' AND t.ready = 1"
    return f"""
    WITH RECURSIVE priorities (tenant_id, lane, type, priority, number) AS (
        SELECT p.*, (SELECT t.priority FROM tasks AS t WHERE {of_lane} ORDER BY t.priority DESC LIMIT 1), 1
        FROM ({lanes}) AS p
        UNION ALL
        SELECT p.tenant_id, p.lane, p.type, (
            SELECT t.priority FROM tasks AS t WHERE {of_lane} AND t.priority < p.priority
            ORDER BY t.priority DESC LIMIT 1), number + 1
        FROM priorities AS p WHERE p.priority IS NOT NULL AND number < {MOST_PRIORITIES})
    SELECT p.{by}, min(max(h.updated_at, coalesce(h.next_eligible_at, 0))) FROM priorities AS p
    JOIN tasks AS h ON h.rowid = (
        SELECT t.rowid FROM tasks AS t WHERE {of_lane} AND t.priority = p.priority ORDER BY t.task_id LIMIT 1)
    GROUP BY p.{by}"""


OLDEST = find_oldest("SELECT ?1 AS tenant_id, value AS lane, '' AS type FROM json_each(?2)", "lane")
OLDEST_OF_ALL = find_oldest("SELECT tenant_id, lane, type FROM queues WHERE queued > 0", "type")
DUE_OF_ALL = f"""
    SELECT t.type, min(t.next_eligible_at) FROM tenants AS n CROSS JOIN tasks AS t ON t.rowid IN (
        SELECT rowid FROM tasks WHERE tenant_id = n.tenant_id AND status = 'queued' AND ready = 0 AND held IS NULL
        AND next_eligible_at <= ? ORDER BY next_eligible_at LIMIT {DUE_LOOKED_AT})
    GROUP BY t.type"""
DEPTHS = "SELECT type, sum(queued), sum(held), sum(leased) FROM queues GROUP BY type"
COUNT_OVERDUE = f"""
    SELECT count(*) FROM (SELECT 1 FROM tenants CROSS JOIN leases USING (tenant_id)
                          WHERE ending = 'live' AND expires_at <= ? LIMIT {OVERDUE_COUNTED})"""
DUE = """
    SELECT min(next_eligible_at) FROM tasks
    WHERE tenant_id = ? AND status = 'queued' AND ready = 0 AND held IS NULL AND next_eligible_at > ?"""


def named_row(row: tuple[Any, ...]) -> tuple[Task, Lease | None, Progress | None]:
    """Make a task, its lease and its progress of one row of NAMED."""
    lease, progress = row[TASK:TASK + LEASE], row[TASK + LEASE:]
    return (Task(*row[:TASK]), Lease(*lease) if lease[0] is not None else None,
            Progress(*progress) if progress[0] is not None else None)


def make_binder(given: list[str]) -> Callable[[str], str]:
    """Return a function that adds a parameter to a query and returns its name."""
    def name(value: str) -> str:
        given.append(value)
        return f"?{len(given)}"
    return name


def select_tasks(tenant_id: str, of: TaskFilter, ranges: list[TaskRange], ids: list[str]) -> tuple[str, list[str]]:
    """Return the query for a page of tasks from some ranges, and its parameters."""
    given = [tenant_id]
    bind = make_binder(given)
    also = narrow_tasks(of, bind, "t", "+t.task_id" if ids else "t.task_id")       # +: not by the index, the ids are
    also += [f"t.task_id IN (SELECT value FROM json_each({bind(json.dumps(ids))}))"] if ids else []
    led = NAMED.replace("FROM tasks AS t", f"FROM tasks AS t INDEXED BY {LED_BY[ranges[0].by]}")
    column = {"owner": "t.owner_kind", "type": "t.type"}.get(ranges[0].by)
    narrow = ([f"{column} = {bind(one.value)}"] if one.value else [] for one in ranges)
    parts = [f"{' AND '.join([led, *also, *more])} ORDER BY t.task_id DESC LIMIT {of.limit:d}" for more in narrow]
    return merge_parts(parts, of.limit), given


def select_ids(tenant_id: str, of: TaskFilter, one: TaskRange, most: int) -> tuple[str, list[str]]:
    """Return the query for the ids of the tasks of a range, and its parameters."""
    given = [tenant_id]
    bind = make_binder(given)
    conditions, order = limit_range(of, one, bind)
    return (f"SELECT task_id FROM tasks INDEXED BY {LED_BY[one.by]} WHERE tenant_id = ?1 AND {conditions} "
            f"ORDER BY {order} LIMIT {most:d}"), given


def receipt_row(row: tuple[Any, ...]) -> Receipt:
    """Make a receipt of one row of RECEIPTS."""
    first, delivered_at, further = row[RECEIPT:]
    parents = tuple(sorted([*([first] if first else ()), *(further.split() if further else ())]))
    return Receipt(*row[:RECEIPT], parents, delivered_at)  # type: ignore[call-arg]  # mypy cannot count a slice


class WriterCall(NamedTuple):
    """A function to run on the writer thread."""

    run: Callable[[], Any]
    answer: asyncio.Future[Any]


class Flight(NamedTuple):
    """A batch to run on the writer thread."""

    tenant_id: str
    needs: Needs
    decide: Callable[[Work], None]
    landed: asyncio.Future[None]


class Sqlite(Pages):
    """A database file with one writer thread and two readers."""

    parallel, parallel_per_tenant = SHARE, 2        # while one batch of a tenant is committed, the next one fills

    def __init__(self, path: str, lock: FileLock | None = None,
                 patience: float = BUSY_SECONDS) -> None:
        self.path, self.serving, self.lock, self.patience = path, lock is not None, lock, patience
        self.kept_out_at: float | None = None       # since when a batch waits for another program's lock
        self.skew, self.ids = 0.0, Ids()
        self.tenant_id: str | None = None                   # the tenant of the running transaction, for the triggers
        self.lanes: defaultdict[str, Lanes] = defaultdict(Lanes)
        self.known: set[str] = set()
        self.queue: queue.SimpleQueue[Flight | WriterCall | None] = queue.SimpleQueue()
        self.readers: list[aiosqlite.Connection] = []
        self.opened = contextlib.AsyncExitStack()           # closes everything in reverse order of opening
        if lock:
            self.opened.callback(lock.release)
        self.turn = 0
        self.files: dict[str, int] = {}                     # the inodes of those that are open, by name
        self.doubted = False                                # whether a COMMIT has failed on the writer's connection
        self.copied = 0                                     # changes of the writer when its log was copied back last
        self.torn = False                                   # whether what was copied back may be lost

    async def open(self) -> Sqlite:
        """Migrate, start the writer and open the readers; close everything again if that fails."""
        try:
            await self._open()
        except BaseException as error:
            await self.close()
            if isinstance(error, sqlite3.Error):
                cure = WAYS_ON.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "")
                raise StartupError(f"cannot use {self.path} as a database: {error}{cure}") from error
            raise
        return self

    async def _open(self) -> None:
        if self.path != ":memory:":
            refuse_left_log(self.path)
        self.db = connect(self.path)
        self.opened.callback(self._close_writer)
        require_ours(self.db, self.path)
        self.db.executescript(PRAGMAS)
        if self.path != ":memory:":
            self._take_over()
        migrate_file(self.db)
        self._load_caches()
        sign, _ = attempt(lambda: self.db.execute(LAST_SIGN).fetchone()[0])     # what is damaged is told who reads it
        self.clock = SteadyClock(after=sign)
        self.files = inodes(self.path)
        self.loop = asyncio.get_running_loop()
        for _ in range(0 if self.path == ":memory:" else 2):
            reader = await aiosqlite.connect(self.path, isolation_level=None, timeout=BUSY_SECONDS)
            self.opened.push_async_callback(reader.close)
            await reader.execute("PRAGMA query_only = 1")
            self.readers.append(reader)
        self.writer = threading.Thread(target=self._write, name="sqlite-writer", daemon=True)
        self.writer.start()
        self.opened.push_async_callback(self._stop_writer)

    def _take_over(self) -> None:
        """Make durable what the last process has left; a tool beside a gate that serves the file leaves that to it."""
        from asyncgate.backends.sqlite_examination import read_holder  # which is made of this module
        if self.lock or not ((holder := read_holder(self.path)) and holder.lives):
            rewrite_log(self.db, self.path)

    def _load_caches(self) -> None:
        """Load lanes, tenants and keys, and continue ids after those of earlier processes."""
        for tenant_id, lane, type, capabilities in self.db.execute("SELECT * FROM lanes"):
            self.lanes[tenant_id].learn(lane, type, json.loads(capabilities))
        for (tenant_id,) in self.db.execute("SELECT tenant_id FROM tenants").fetchall():
            self.known.add(tenant_id)
            for newest in ("SELECT max(receipt_id) FROM receipts WHERE tenant_id = ?",
                           "SELECT max(arrival) FROM ledger WHERE tenant_id = ?"):
                self.ids.after(self.db.execute(newest, (tenant_id,)).fetchone()[0])
        key = self.db.execute("SELECT value FROM meta WHERE name = 'cursor_key'").fetchone()
        self.secret = bytes.fromhex(key[0])
        self.instance: str = self.db.execute("SELECT value FROM meta WHERE name = 'instance_id'").fetchone()[0]

    def now(self) -> float:
        """Return this process's time: one process owns the file."""
        return self.clock() + self.skew

    def announce(self, url: str) -> None:
        """Store this process's address in the lock file, for the error of another process that wants the database."""
        if self.lock:
            self.lock.store_address(url)

    async def join(self, instance_id: str, beat_seconds: float, hear: Callable[[News], None]) -> float | None:
        """Return the time of the last sign of life; the file lock keeps other processes out."""
        sign: float | None = (await self._rows(LAST_SIGN))[0][0]
        return sign

    async def beat(self) -> None:
        """Store that this process is alive; a no-op without live leases, because only leases depend on it."""
        with translate_outages():
            await self._call_writer(self._sign)

    def _sign(self) -> None:
        self._begin()       # as batches do: so it is noticed that another program's lock has gone
        self.db.execute(SIGN, (self.now(),))
        self._end()

    async def alive(self) -> None:
        """Read one row; raises an exception if the file was deleted or replaced, or cannot be read, or written."""
        await self._look()

    async def is_current(self) -> bool:
        """Whether nobody has migrated the file, or put an older one in its place."""
        return await self._look() == [(str(CURRENT_SCHEMA),)]

    async def _look(self) -> list[tuple[Any, ...]]:
        """Read the number of the schema, and wait for no disk longer than an orchestrator does."""
        with translate_outages():
            self._require_same_file()
        if self.kept_out_at is not None and time.monotonic() - self.kept_out_at > NOTICED_SECONDS:
            raise DatabaseUnavailable(KEPT_OUT, retry_after=1)
        try:
            async with asyncio.timeout(NOTICED_SECONDS):
                return await self._rows("SELECT value FROM meta WHERE name = 'schema_version'")
        except TimeoutError:
            raise DatabaseUnavailable("the database does not answer; try again", retry_after=1) from None

    async def close(self) -> None:
        """Finish running work, close everything, and release the file for another process."""
        await self.opened.aclose()

    async def _stop_writer(self) -> None:
        if self.serving:
            with contextlib.suppress(DatabaseUnavailable):      # a full disk: the next start hears of an older sign
                await self.beat()
        self.queue.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self.writer.join)

    # Writing.

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Hand a batch to the writer and wait until it is durable."""
        landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queue.put(Flight(tenant_id, needs, decide, landed))
        with translate_outages(outcome_unknown()):
            await landed

    def _write(self) -> None:
        """Take all waiting batches and commit them together, in a loop; the writer thread runs this."""
        while (first := self.queue.get()) is not None:
            flights, last = [first], False
            while len(flights) < SHARE and not self.queue.empty():
                if (following := self.queue.get()) is None:
                    last = True
                    break
                flights.append(following)
            for call in [item for item in flights if isinstance(item, WriterCall)]:
                self._answer([(call.answer, *attempt(partial(self._run_call, call)))])
            if batches := [item for item in flights if isinstance(item, Flight)]:
                self._answer(self._commit(batches))
            self._copy_back()
            if last:
                break

    def _copy_back(self) -> None:
        """Copy the write-ahead log into the file, when it has enough.

        SQLite does that by itself, and says nothing when the fsync of the file fails.  What it had copied before may
        then be lost, because the kernel drops it, and SQLite copies only what is newer.  So nothing more is copied
        after that, and the log keeps everything for the next start, which copies it from its beginning.
        """
        changes = self.db.total_changes
        try:
            if self.torn or self.doubted or self.path == ":memory:" or (
                    changes - self.copied < COPIED_CHANGES and os.stat(f"{self.path}-wal").st_size <= LARGE_LOG):
                return
            self.db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except (sqlite3.Error, OSError) as error:
            self.torn = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_FSYNC
            log.error("%s-wal cannot be copied into the file%s: %s", self.path, ", and grows until the gate is started "
                      "again" if self.torn else "", error, extra=OFTEN)
        self.copied = changes

    def _close_writer(self) -> None:
        """Close the writer's connection; after a failed fsync keep it to the end of the process.

        The last connection that is closed copies the rest of the log back, and deletes it.
        """
        if self.torn:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.db))
        else:
            self.db.close()

    def _run_call(self, call: WriterCall) -> Any:
        """Run something else than a batch; some of it commits by itself."""
        self._renew_doubted()
        try:
            return call.run()
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY:     # that comes before a COMMIT
                self._doubt()
            raise

    def _doubt(self) -> None:
        """Use this connection no more: what it could not commit may be on the disk, or not."""
        self.doubted = self.path != ":memory:"
        self._roll_back()

    def _renew_doubted(self) -> None:
        """Replace a connection on which a COMMIT has failed; raises an exception while the disk does not work.

        The old one is closed last: the log of a file that nobody has open would be read from its beginning, and then
        the COMMIT that has failed may count after all.
        """
        if not self.doubted:
            return
        self._require_same_file()
        fresh = connect(self.path)
        try:
            fresh.executescript(PRAGMAS)
            rewrite_log(fresh, self.path)
        except BaseException:
            fresh.close()
            raise
        self.db, doubted = fresh, self.db
        doubted.close()
        self._load_caches()
        self.tenant_id, self.doubted, self.copied = None, False, 0
        log.warning("%s: a commit had failed; the gate writes on a new connection", self.path)

    def _answer(self, outcomes: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
        def settle() -> None:
            for future, value, error in outcomes:
                if not future.done():
                    future.set_exception(error) if error else future.set_result(value)
        with contextlib.suppress(RuntimeError):     # the event loop is closed, so nobody waits any more
            self.loop.call_soon_threadsafe(settle)

    def _commit(self, flights: list[Flight]) -> list[tuple[asyncio.Future[Any], Any, BaseException | None]]:
        """Run batches in one transaction; if one is refused, run each by itself.

        Without savepoints: with one, SQLite writes the pages that each statement touches to a temporary file, which
        was measured to take longer than everything else.
        """
        try:
            self._renew_doubted()
            self._begin()
            done = [self._decide(flight) for flight in flights]
            self._require_same_file()
            self._end()
        except (sqlite3.IntegrityError, sqlite3.DataError, OverflowError) as error:
            self._roll_back()
            if len(flights) > 1:
                return [outcome for flight in flights for outcome in self._commit([flight])]
            refused = Refused(str(error))
            refused.__cause__ = error
            return [(flights[0].landed, None, refused)]
        except BaseException as error:
            self._roll_back()
            return [(flight.landed, None, error) for flight in flights]
        for work in done:
            self.known.add(work.tenant_id)
            for lane, (type, capabilities) in work.lanes.items():
                self.lanes[work.tenant_id].learn(lane, type, capabilities)
        return [(flight.landed, None, None) for flight in flights]

    def _begin(self) -> None:
        """Begin to write; what waits behind a batch that another program kept out in vain does not wait again."""
        waited = self.kept_out_at is not None
        self.db.execute(f"PRAGMA busy_timeout = {AGAIN_MS if waited else self.patience * 1000:.0f}")
        self.kept_out_at = self.kept_out_at if waited else time.monotonic()
        try:
            self.db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                raise DatabaseUnavailable(KEPT_OUT, retry_after=1) from error
            self.kept_out_at = None
            raise
        self.kept_out_at = None

    def _end(self) -> None:
        """Commit; one that fails takes the trust in its connection with it."""
        try:
            self.db.execute("COMMIT")
        except BaseException:
            self._doubt()
            raise

    def _decide(self, flight: Flight) -> Work:
        """Load, decide and save one batch, without a commit."""
        if flight.tenant_id != self.tenant_id:
            self.db.execute(WALL, (flight.tenant_id,))
            self.tenant_id = flight.tenant_id
        work = self._load(flight.tenant_id, flight.needs)
        flight.decide(work)
        self._save(work)
        return work

    def _roll_back(self) -> None:
        """Leave the transaction, which some errors have ended already."""
        self.tenant_id = None
        if self.db.in_transaction and attempt(lambda: self.db.execute("ROLLBACK"))[1]:
            self.doubted = self.path != ":memory:"

    def _require_same_file(self) -> None:
        """Refuse to use a file that was deleted or replaced while it was open; raises OSError."""
        for name, inode in self.files.items():
            if os.stat(name).st_ino != inode:
                raise OSError(f"{name} was replaced while the gate was using it")

    def _load(self, tenant_id: str, needs: Needs) -> Work:
        ids, now = set(needs.tasks), self.now()
        for sql, keys in ((KEYED, needs.keys), (CLAIMED, needs.repeats), (LEASED, ((id,) for id in needs.leases))):
            for key in keys:
                ids.update(task_id for (task_id,) in self.db.execute(sql, (tenant_id, *key)))
        rows = self.db.execute(BY_ID, (tenant_id, json.dumps(list(ids)))).fetchall() if ids else []
        tasks = [named_row(row) for row in rows]
        work = Work(tenant_id, now, self.ids, self.lanes[tenant_id].known)
        for task in tasks:
            work.load_task(*task)
        if needs.claims:
            self._offer(work, needs.claims)
        if needs.receipts:
            for row in self.db.execute(FAMILY, (tenant_id, json.dumps(list(needs.receipts)))):
                work.load_receipt(receipt_row(row))
        for sql, pairs in ((ENDINGS, needs.endings), (STATES, needs.stated)):
            for pair in pairs:
                for row in self.db.execute(sql, (tenant_id, *pair)):
                    work.load_receipt(receipt_row(row))
        for kind, named in needs.records:
            for row in self.db.execute(RECORD[kind], (tenant_id, *named)):
                work.load_record(kind(*row))
        if needs.recount:
            work.keep_record(Usage(*self.db.execute(COUNT, (tenant_id,)).fetchone()))
        if needs.tally:
            work.tallies.update(self.db.execute(TALLY, (tenant_id, json.dumps(work.list_named_tasks(needs)))))
        return work

    def _offer(self, work: Work, claims: list[LeaseNext]) -> None:
        """Load the best claimable tasks: enough for every claim of the batch."""
        self.db.execute(PROMOTE, (work.tenant_id, work.now, PROMOTED))
        enough, lanes = sum(ask.max_tasks or 1 for ask in claims), self.lanes[work.tenant_id]
        for row in self.db.execute(RECORD[Pauses], (work.tenant_id,)):
            lanes.pauses = Pauses(*row)
            work.load_record(lanes.pauses)
        for group in lanes.groups(claims, work.now):
            portions = Portions(len(claims))
            with contextlib.closing(self._heads(work.tenant_id, group, enough)) as heads:
                for _, _, *row in heads:
                    task, progress = Task(*row[:TASK]), row[TASK:]
                    told = Progress(*progress) if progress[0] is not None else None
                    work.add_claimable(task, told)
                    if enough > len(claims) and portions.add(task, told):
                        break

    def _heads(self, tenant_id: str, lanes: frozenset[int], enough: int) -> Generator[tuple[Any, ...], None, None]:
        """Yield the best tasks of some lanes.

        One lane is read row by row, as far as somebody asks.  Of several, each has its best task read, and up to eight:
        where these are many, their places alone are read first, so that no payload is read of a task that stays.
        """
        if len(lanes) == 1:
            yield from self.db.execute(HEADS, (tenant_id, *lanes, enough, 0))
            return
        piece = min(enough, PIECE)
        few = len(lanes) * piece <= MOST_WHOLE
        queues = (self._queue(HEADS if few else PLACES, tenant_id, lane, piece) for lane in lanes)
        best = islice(heapq.merge(*queues), enough)
        if few:
            yield from best
        else:
            yield from self.db.execute(HEADS_BY_ID, (tenant_id, json.dumps([task_id for _, task_id in best])))

    def _queue(self, sql: str, tenant_id: str, lane: int, size: int) -> Iterator[tuple[Any, ...]]:
        """Yield the claimable tasks of one lane in order, in pieces that grow."""
        start = 0
        while rows := self.db.execute(sql, (tenant_id, lane, size, start)).fetchall():
            yield from rows
            start, size = start + len(rows), size * 2

    def _save(self, work: Work) -> None:
        tenant_id, written = work.tenant_id, work.written.values()

        def many(sql: str, rows: Collection[tuple[Any, ...]]) -> None:
            if rows:
                self.db.executemany(sql, [(tenant_id, *row) for row in rows])

        if tenant_id not in self.known:
            many(TENANT, [(work.now,)])
        many(ADD_LANE, [(lane, type, json.dumps(sorted(needed))) for lane, (type, needed) in work.lanes.items()])
        moves = count_moves(work.before, work.added, work.moved)
        many(COUNT_MOVES, [(*row, work.now) for row in moves])
        many(ADD_TASK, [(*astuple(task), task.offerable(work.now), summarize(task)) for task in work.added.values()])
        if work.moved:
            self.db.executemany(MOVE, [(*astuple(task)[-len(MUTABLE):], task.priority, task.offerable(work.now),
                                        tenant_id, task.task_id) for task in work.moved.values()])
        many(ADD_LEASE, [astuple(lease) for lease in work.leased.values()])
        many(ADD_PROGRESS, [astuple(progress) for progress in work.progressed.values()])
        before = self.db.total_changes
        many(ADD_RECEIPT, [(*astuple(one)[:RECEIPT], one.parents[0] if one.parents else None) for one in written])
        stored = self._measure_bodies(work, self.db.total_changes - before)
        if (meter := measure_use(work, sum([move[5] for move in moves]), stored)) is not None:
            many(COUNT_USE, [astuple(meter)])
        many(ADD_POSTED, [(*astuple(row), tenant_id, row.receipt_id) for row in work.posted.values()])
        many(ADD_EDGE, [(one.receipt_id, parent) for one in written for parent in one.parents[1:]])
        many(ADD_OBLIGATION, [(receipt_id, to.kind, to.id) for receipt_id, to in work.opened.items()])
        many(DISCHARGE, [(to.kind, to.id, receipt_id) for receipt_id, to in work.closed.items()])
        many(ADD_EVENT, [astuple(event) for event in work.events.values()])
        many(ADD_AUDIT, [astuple(line) for line in work.audited.values()])
        for (kind, key), row in work.kept.items():
            for sql in [KEEP[kind]] if row is not None else DROP[kind]:
                many(sql, [astuple(row) if row is not None else key])
        many(ADD_DELIVERY, work.delivered.items())
        for (kind, place), erased in work.erased.items():       # behind the records: the triggers look at those
            self.db.execute(ERASE[kind], (*(getattr(erased, name) for name in ERASABLE[kind][0]), tenant_id, *place))

    def _measure_bodies(self, work: Work, added: int) -> int:
        """Return how many bytes a batch stores in receipts; one that was stored already is not stored again."""
        if added == len(work.written):
            return sum([measure_text(receipt.body) for receipt in work.written.values()])
        stored: int = self.db.execute(MEASURE, (work.tenant_id, json.dumps(list(work.written)))).fetchone()[0]
        return stored

    # Reading.

    async def _rows(self, sql: str, *given: Any) -> list[tuple[Any, ...]]:
        """Run one query; raises DatabaseUnavailable if the file cannot be read."""
        try:
            return await self._read(sql, given)
        except (sqlite3.OperationalError, OSError) as error:
            log.error("the database cannot be read: %s", error, extra=OFTEN)
            raise DatabaseUnavailable("the database does not answer; try again", retry_after=1) from error
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:    # a mistake of ours
                raise
            log.error("%s is damaged: %s", self.path, error, extra=OFTEN)
            raise DatabaseUnavailable("the database file is damaged: `asyncgate verify` says how much of it is whole, "
                                      "docs/recovery.md how to restore a backup") from error

    async def _read(self, sql: str, given: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Run a query on a reader; a database in memory has only the writer's connection."""
        if not self.readers:
            return await self._on_writer(sql, given)
        self.turn = (self.turn + 1) % len(self.readers)
        rows: list[tuple[Any, ...]] = await self.readers[self.turn].execute_fetchall(sql, given)  # type: ignore[assignment]
        if (call := counting.get()) is not None:
            call.add_rows(len(rows))
        return rows

    async def _on_writer(self, sql: str, given: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = await self._call_writer(lambda: self.db.execute(sql, given).fetchall())
        return rows

    async def _call_writer(self, run: Callable[[], Any]) -> Any:
        """Run something on the writer thread, behind everything that was acknowledged."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.queue.put(WriterCall(run, answer))
        return await answer

    async def task(self, tenant_id: str, task_id: str) -> tuple[Task, Lease | None, Progress | None] | None:
        """Return a task with its latest lease and progress."""
        rows = await self._rows(NAMED + "AND t.task_id = ?2", tenant_id, task_id)
        return named_row(rows[0]) if rows else None

    async def read_tasks(self, tenant_id: str, of: TaskFilter, ranges: list[TaskRange],
                         ids: list[str]) -> list[tuple[Task, Lease | None, Progress | None]]:
        """Return a page of tasks from some ranges of one index."""
        sql, given = select_tasks(tenant_id, of, ranges, ids)
        return [named_row(row) for row in await self._rows(sql, *given)]

    async def find_types(self, tenant_id: str, prefix: str, most: int) -> list[str]:
        """Return the types of tasks that begin so."""
        return [row[0] for row in await self._rows(TYPES_OF, tenant_id, prefix, end_of(prefix), most)]

    async def find_ids(self, tenant_id: str, of: TaskFilter, one: TaskRange, most: int) -> list[str]:
        """Return tasks of a range."""
        sql, given = select_ids(tenant_id, of, one, most)
        return [row[0] for row in await self._rows(sql, *given)]

    async def find_leases(self, tenant_id: str, of: LeaseFilter) -> list[tuple[Lease, str]]:
        """Return the live leases of a worker, and of their tasks only the types."""
        rows = await self._rows(HELD_BY, tenant_id, of.worker.kind, of.worker.id)
        return read_leases(rows, of)

    async def count_leases(self, tenant_id: str, of: LeaseCount) -> int:
        """Return how many leases are live."""
        find = (LEASED_IN, of.type, of.lane) if of.worker_id is None else (LEASED_TO, of.worker_id)
        number: int = (await self._rows(find[0], tenant_id, *find[1:]))[0][0]
        return number

    async def receipt(self, tenant_id: str, receipt_id: str) -> Receipt | None:
        """Return one receipt."""
        rows = await self._rows(RECEIPTS + "AND r.receipt_id = ?2", tenant_id, receipt_id)
        return receipt_row(rows[0]) if rows else None

    async def find_receipts(self, tenant_id: str, of: ReceiptFilter) -> list[Receipt]:
        """Return a page of receipts, oldest first; the single writer makes ids in the order of commits."""
        sql, given = RECEIPTS, [tenant_id]
        for column, value in (("to_id", of.to.id if of.to else None), ("task_id", of.task_id),
                              ("receipt_type", of.receipt_type)):
            if value is not None:
                given.append(value)
                sql += f" AND r.{column} = ?{len(given)}"
        given.append(of.after or "")
        sql += f" AND r.receipt_id > ?{len(given)}"
        order = "r.receipt_id DESC" if of.newest else "r.receipt_id"
        sql = page_of(sql, of.to, "r.to_kind", order, 1, of.limit, make_binder(given))
        rows = await self._rows(sql, *given)
        return [receipt_row(row) for row in (rows[::-1] if of.newest else rows)]

    async def find_events(self, tenant_id: str, of: EventFilter) -> list[Event]:
        """Return a page of a task's events."""
        sql = (f"SELECT {listed(Event)} FROM events WHERE tenant_id = ? AND task_id = ? AND event_id > ? "
               "ORDER BY event_id LIMIT ?")
        return [Event(*row) for row in await self._rows(sql, tenant_id, of.task_id, of.after or "", of.limit)]

    async def find_obligations(self, tenant_id: str, of: ObligationFilter) -> list[Receipt]:
        """Return a page of open obligations from their index."""
        after = of.after or ""
        rows = await (self._rows(OPEN, tenant_id, of.to.kind, of.to.id, after, of.limit) if of.to
                      else self._rows(OPEN_FOR_ALL, tenant_id, after, of.limit))
        return [receipt_row(row) for row in rows]

    async def find_like(self, tenant_id: str, of: IdFilter) -> list[str]:
        """Return ids of tasks or receipts that begin or end with a text."""
        rows = await self._rows(IDS_LIKE[of.table], tenant_id, of.part, end_of(of.part), of.searched, of.limit)
        return [row[0] for row in rows]

    async def find_queues(self, tenant_id: str, of: QueueFilter) -> list[Queue]:
        """Return a page of what lanes have now, by type."""
        sql, given = QUEUES, list[Any]([tenant_id])
        for column, value in (("type", of.type), ("lane", of.lane)):
            if value is not None:
                given.append(value)
                sql += f" AND {column} = ?{len(given)}"
        if of.after is not None:
            given += of.after
            sql += f" AND (type, lane) > (?{len(given) - 1}, ?{len(given)})"
        counted = await self._rows(f"{sql} ORDER BY type, lane LIMIT {of.limit:d}", *given)
        now = self.now()
        oldest = dict(await self._rows(OLDEST, tenant_id, json.dumps([row[0] for row in counted])))
        later = {lane: rest for lane, *rest in await self._rows(DELAYED, tenant_id, now)}
        return list(join_queues(counted, oldest, later, now))

    async def find_schedules(self, tenant_id: str, of: ScheduleFilter) -> list[Schedule]:
        """Return a page of schedules, in the order of their ids."""
        after = of.after or ""
        rows = await (self._rows(SCHEDULES_OF, tenant_id, of.owner.kind, of.owner.id, after, of.limit) if of.owner
                      else self._rows(SCHEDULES, tenant_id, after, of.limit))
        return [Schedule(*row) for row in rows]

    async def find_workers(self, tenant_id: str, of: WorkerFilter) -> list[Presence]:
        """Return a page of those who have claimed tasks."""
        rows = await (self._rows(LATEST_WORKERS, tenant_id, of.limit) if of.latest
                      else self._rows(WORKERS, tenant_id, *of.after, of.limit))
        return [Presence(*row) for row in rows]

    async def find_holdings(self, tenant_id: str, of: HoldingsOf) -> list[Holding]:
        """Return what some workers hold."""
        return [Holding(*row) for row in await self._rows(
            HOLDINGS, tenant_id, json.dumps([(who.kind, who.id) for who in of.workers]), of.most)]

    async def count_ahead(self, tenant_id: str, of: AheadOf) -> list[int]:
        """Return how many tasks come before one."""
        rows = await self._rows(COUNT_AHEAD, tenant_id, of.lane, of.priority, of.task_id, of.most)
        return [row[0] for row in rows]

    async def find_unsent(self, tenant_id: str, of: UnsentOf) -> list[Outgoing]:
        """Return the outbox rows of a task."""
        return [Outgoing(*row) for row in await self._rows(UNSENT_OF, tenant_id, of.task_id, of.limit)]

    async def terminated(self, tenant_id: str, receipt_id: str, by: frozenset[str]) -> bool:
        """Whether a child of the receipt has one of the types."""
        return bool((await self._rows(TERMINATED, tenant_id, receipt_id, json.dumps(sorted(by))))[0][0])

    async def record(self, tenant_id: str, kind: type[R], *key: str) -> R | None:
        """Return one record."""
        rows = await self._rows(RECORD[kind], tenant_id, *key)
        return kind(*rows[0]) if rows else None

    async def unsent(self) -> list[str]:
        """Return the tenants whose outbox has receipts."""
        return [row[0] for row in await self._rows(UNSENT)]

    async def find_waiting(self, tenant_id: str, of: OutboxFilter) -> list[Outgoing]:
        """Return a page of the receipts that wait for the ledger."""
        return [Outgoing(*row) for row in await self._rows(
            WAITING if of.state == "waiting" else OFFERED, tenant_id, of.after, of.limit)]

    async def find_outgoing(self, tenant_id: str, of: OutboxOf) -> list[Outgoing]:
        """Return the outbox rows of some receipts."""
        return [Outgoing(*row) for row in await self._rows(OUTGOING, tenant_id, json.dumps(of.receipt_ids))]

    async def find_deliveries(self, tenant_id: str, of: DeliveryFilter) -> list[WebhookDelivery]:
        """Return a page of what became of the events of an endpoint."""
        sql, given = f"{WEBHOOK_DELIVERIES} AND webhook_id = ?", [tenant_id, of.webhook_id]
        for condition, value in (("state = ?", of.state), (f"delivery_id {'<' if of.newest else '>'} ?", of.after)):
            if value is not None:
                given.append(value)
                sql += f" AND {condition}"
        rows = await self._rows(f"{sql} ORDER BY delivery_id{' DESC' * of.newest} LIMIT {of.limit:d}", *given)
        return [WebhookDelivery(*row) for row in rows]

    async def webhook_tenants(self) -> list[str]:
        """Return the tenants that have endpoints for webhooks."""
        return [row[0] for row in await self._rows("SELECT tenant_id FROM webhook_heads WHERE number > 0")]

    async def lag(self, tenant_id: str) -> Lag:
        """Return how many receipts wait, how many are parked, and when the oldest waiting one came."""
        return Lag(*(await self._rows(LAG, tenant_id))[0])

    async def find_entries(self, tenant_id: str, of: EntryFilter) -> list[Entry]:
        """Return a page of receipts that others stored in this ledger; arrival ids follow the order of commits."""
        sql, given = f"SELECT {listed(Entry)} FROM ledger WHERE tenant_id = ?1", [tenant_id]
        for column, value in (("to_id", of.to.id if of.to else None), ("task_id", of.task_id),
                              ("receipt_type", of.receipt_type), ("asyncgate_instance", of.instance)):
            if value is not None:
                given.append(value)
                sql += f" AND {column} = ?{len(given)}"
        given.append(of.after or "")
        sql += f" AND arrival > ?{len(given)}"
        sql = page_of(sql, of.to, "to_kind", "arrival", 2, of.limit, make_binder(given))
        rows = await self._rows(sql, *given)
        return [Entry(*row) for row in rows]

    async def find_archived(self, tenant_id: str, of: ArchivedFilter) -> list[Archived]:
        """Return the pointers to a task's archived receipts."""
        return [Archived(*row) for row in await self._rows(ARCHIVED, tenant_id, of.task_id)]

    async def find_key(self, key_id: str) -> tuple[str, bool, Key] | None:
        """Return a key before its tenant is known."""
        rows = await self._rows(FIND_KEY, key_id)
        return (rows[0][0], bool(rows[0][1]), Key(*rows[0][2:])) if rows else None

    async def overdue(self, now: float, grace: float, limit: int) -> list[tuple[str, list[str], list[str]]]:
        """Return the tasks and schedules that upkeep must check, by tenant."""
        found = []
        for (tenant_id,) in await self._rows(LATE_TENANTS, now, now - grace):
            tasks = [row[0] for row in await self._rows(LOST, tenant_id, now, now - grace, limit)]
            schedules = [row[0] for row in await self._rows(LATE, tenant_id, now, limit)]
            found.append((tenant_id, tasks, schedules))
        return found

    async def depths(self, now: float) -> list[Depth]:
        """Return what the queues of all tenants have by type."""
        oldest, due = dict(await self._rows(OLDEST_OF_ALL)), dict(await self._rows(DUE_OF_ALL, now))
        return [Depth(type, queued, held, leased,
                      min((since[type] for since in (oldest, due) if type in since), default=None))
                for type, queued, held, leased in await self._rows(DEPTHS)]

    async def count_overdue(self, before: float) -> int:
        """Return how many live leases have expired before a time."""
        number: int = (await self._rows(COUNT_OVERDUE, before))[0][0]
        return number

    async def lapses(self, since: float, limit: int) -> list[tuple[float, str, str]]:
        """Return when live leases expire."""
        return await self._rows(LAPSES, since, limit)

    async def drop_lanes(self, tenant_id: str | None = None) -> int:
        """Delete the lanes in which no task waits; on the writer thread, so that no batch runs meanwhile."""
        with translate_outages():
            number: int = await self._call_writer(lambda: self._drop_lanes(tenant_id))
        return number

    def _drop_lanes(self, only: str | None) -> int:
        dropped: dict[str, list[int]] = {}
        kept_since = inf if only else self.now() - QUEUE_KEPT_SECONDS   # a clock may have been set back
        self._begin()
        for tenant_id in list(self.lanes) if only is None else [only]:
            self.db.execute(WALL, (tenant_id,))
            self.db.execute(EMPTY_QUEUES, (tenant_id, kept_since))
            dropped[tenant_id] = [lane for (lane,) in self.db.execute(EMPTY_LANES, (tenant_id,)).fetchall()]
            self.db.executemany("DELETE FROM lanes WHERE tenant_id = ? AND lane = ?",
                                [(tenant_id, lane) for lane in dropped[tenant_id]])
        self._end()
        self.tenant_id = None       # so that the next batch sets its tenant
        for tenant_id, lanes in dropped.items():
            self.lanes[tenant_id].forget(lanes)
        return sum(map(len, dropped.values()))

    async def next_due(self, tenant_id: str) -> float | None:
        """Return when the next delayed task may be leased."""
        due: float | None = (await self._rows(DUE, tenant_id, self.now()))[0][0]
        return due

    async def find_rows(self, tenant_id: str, table: type[Struct], after: str, limit: int) -> list[Any]:
        """Return the next rows of a table, in the order of its primary key."""
        if table is Receipt:
            return await self.find_receipts(tenant_id, ReceiptFilter(None, None, None, after, limit))
        if not (order := export_order(table)):
            return [] if after or (only := await self.record(tenant_id, table)) is None else [only]
        names, marks = ", ".join(order), ", ".join("?" * len(order))
        sql = (f"SELECT {listed(table)} FROM {TABLES[table]} WHERE tenant_id = ? AND ({names}) > ({marks}) "
               f"ORDER BY {names} LIMIT {limit:d}")
        behind = after.split("\0") if after else [""] * len(order)
        return [table(*row) for row in await self._rows(sql, tenant_id, *behind)]

    async def tenants(self) -> list[str]:
        """Return every tenant that has stored anything."""
        return [row[0] for row in await self._rows("SELECT tenant_id FROM tenants ORDER BY tenant_id")]

    async def keep_secret(self, secret: bytes) -> None:
        """Replace the key that signs cursors, durably."""
        await self._on_writer("UPDATE meta SET value = ? WHERE name = 'cursor_key'", (secret.hex(),))
        self.secret = secret

    async def check(self) -> list[str]:
        """Return the problems that SQLite finds in its file; an empty list if it is sound."""
        try:
            return [row[0] for row in await self._read("PRAGMA integrity_check", ()) if row[0] != "ok"]
        except sqlite3.DatabaseError as error:
            return [str(error)]

    async def compact(self) -> None:
        """Shrink the file by its free pages, and empty its logs; writes wait meanwhile."""
        try:
            for statement in ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
                await self._on_writer(statement, ())
        except sqlite3.OperationalError as error:
            log.error("%s was not rewritten: %s", self.path, error)
            raise DatabaseUnavailable(f"the rest is done, but the file was not rewritten and keeps its free pages: "
                                      f"{error}; this needs room for a second copy of it; call again") from error

    async def backup(self, target: str, told: Callable[[int, int], None] | None = None) -> None:
        """Copy a consistent snapshot of the database to a new file while the gate goes on.

        `told` is called with the number of copied pages and of all pages.
        """
        await asyncio.get_running_loop().run_in_executor(None, copy_file, self.path, target, told)

    async def count_rows(self, tables: Iterable[type[Struct]]) -> int:
        """Return how many rows some tables have, over all tenants."""
        names = ["receipts" if table is Receipt else TABLES[table] for table in tables]
        return sum([(await self._rows(f"SELECT count(*) FROM {name}"))[0][0] for name in names])


ADD_TASK = insert("tasks", [*fields(Task), "ready", "summary"])
ADD_LANE = insert("lanes", ["lane", "type", "capabilities"], "OR IGNORE")     # a batch beside it may have added it
COUNT_MOVES = insert("queues", ["lane", "type", "capabilities", "queued", "held", "leased", "counted_at"]) + (
    " ON CONFLICT (tenant_id, lane) DO UPDATE SET queued = queued + excluded.queued, held = held + excluded.held, "
    "leased = leased + excluded.leased, counted_at = excluded.counted_at")
COUNT_USE = insert("meters", fields(Meter)) + " ON CONFLICT (tenant_id, period, slot) DO UPDATE SET " + ", ".join(
    f"{name} = {name} + excluded.{name}" for name in fields(Meter)[2:])
MEASURE = """
    SELECT coalesce(sum(length(CAST(body AS BLOB))), 0) FROM receipts
    WHERE tenant_id = ? AND receipt_id IN (SELECT value FROM json_each(?))"""
ADD_LEASE = upsert("leases", fields(Lease), ["task_id"])
ADD_PROGRESS = upsert("progress", fields(Progress), ["task_id"])
# Only together with its receipt: a receipt that was stored earlier is not sent again.
ADD_POSTED = (f"INSERT OR ROLLBACK INTO outbox (tenant_id, {listed(Outgoing)}) "
              f"SELECT ?, {', '.join('?' * len(fields(Outgoing)))} "
              "WHERE EXISTS (SELECT 1 FROM receipts WHERE tenant_id = ? AND receipt_id = ?)")
ADD_EDGE = insert("edges", ["child_id", "parent_id"])
ADD_OBLIGATION = insert("obligations", fields(Obligation))
ADD_EVENT = insert("events", fields(Event))
ADD_AUDIT = insert("audit", fields(Audit))
KEEP = {kind: insert(table, fields(kind)) if kind in APPEND_ONLY else upsert(table, fields(kind), export_order(kind))
        for kind, table in RECORDS.items()}
ADD_DELIVERY = upsert("deliveries", ["receipt_id", "delivered_at"], ["receipt_id"])


def inodes(path: str) -> dict[str, int]:
    """Return the inodes of a database's files."""
    return {name: os.stat(name).st_ino for name in (path, f"{path}-wal") if os.path.exists(name)}


@contextlib.contextmanager
def translate_outages(answer: DatabaseUnavailable | None = None) -> Iterator[None]:
    """Turn an outage of the disk, or the lock of another program, into a 503, and a traceback into a line."""
    try:
        yield
    except (sqlite3.OperationalError, OSError) as error:
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF not in OUTAGES:
            raise
        log.error("the database does not answer: %s", error, extra=OFTEN)
        raise answer or DatabaseUnavailable("the database does not answer; try again", retry_after=1) from error


def attempt(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Call a function; return its result, or its exception."""
    try:
        return call(), None
    except BaseException as error:
        return None, error


def connect(path: str) -> sqlite3.Connection:
    """Open a connection with explicit transactions; a new file is readable by its owner only."""
    if path != ":memory:" and not os.path.exists(path):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))      # only a new file: closing drops locks
    elif path != ":memory:" and os.name == "posix" and (mode := stat.S_IMODE(os.stat(path).st_mode)) & 0o077:
        log.warning("%s can be accessed by other users (mode %o): run chmod 600 %s", path, mode, path)
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=512,
                           timeout=BUSY_SECONDS)


def require_ours(db: sqlite3.Connection, path: str) -> None:
    """Refuse another program's database, before anything in it is changed; raises StartupError."""
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    columns = {row[1] for row in db.execute("PRAGMA table_info(meta)")}
    if names and not ({"name", "value"} <= columns
                      and db.execute("SELECT 1 FROM meta WHERE name = 'schema_version'").fetchone()):
        some = ", ".join(names[:3]) + ", …" * (len(names) > 3)
        raise StartupError(f"{path} is a database of another program (its tables are {some}): name another file; a new "
                           "one is created if it does not exist")


def refuse_left_log(path: str) -> None:
    """Refuse a file beside a log that may have acknowledged work, and cannot be taken over; raises StartupError.

    SQLite would delete the write-ahead log of a file that is not there.  What of the redo log of a killed gate of an
    earlier release is in the file already, only that release can tell, and it takes the rest over.
    """
    wal = f"{path}-wal"
    if not os.path.exists(path) and os.path.exists(wal) and os.path.getsize(wal):
        raise StartupError(f"{wal} is there and {path} is not: it may have the newest acknowledged work of a gate that "
                           f"was killed; put {path} back beside it, or move {wal} to where {path} went")
    if os.path.exists(f"{path}-redo"):
        raise StartupError(f"{path}-redo was left by a gate of an earlier release that was killed, and may have "
                           f"acknowledged work that {path} lacks: start that release once and stop it in order, then "
                           f"start this one; or move {path}-redo away, and give that work up")


def rewrite_log(db: sqlite3.Connection, path: str) -> None:
    """Write the write-ahead log once more as it is read, and wait for the disk; raises OSError.

    After an fsync that has failed, the kernel may show what the disk never took, also to the next process, and does
    not write it any more.  A commit behind such a piece would be lost with it.  The folder is synced too: SQLite does
    not look whether that has worked when it makes its log.
    """
    begin_beside(db)        # nobody appends meanwhile
    try:
        with open(f"{path}-wal", "r+b") as file:
            while piece := file.read(REWRITTEN):
                file.seek(-len(piece), os.SEEK_CUR)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(os.path.dirname(path))
    except FileNotFoundError:       # nothing was written yet
        pass
    finally:
        db.execute("ROLLBACK")


def migrations(folder: Path = SCHEMA) -> list[Path]:
    """Return the migration files in order."""
    return sorted(folder.glob("[0-9]*.sql"))


def migrate_file(db: sqlite3.Connection, folder: Path = SCHEMA) -> None:
    """Apply the migrations that the database lacks, all in one transaction."""
    files = migrations(folder)
    with transaction(db):
        version, kept = beginning(db)
        if version:
            require_lineage(kept, digest(files[0].read_text()))
        if version > len(files):
            raise StartupError(f"this database has schema {version}, but this release knows only schemas up to "
                               f"{len(files)}; run a newer release")
        for file in files[version:]:
            for statement in statements(file.read_text()):
                db.execute(statement)
        if version < len(files):
            store_version(db, len(files))
        db.execute("INSERT OR IGNORE INTO meta VALUES ('cursor_key', ?)", (secrets.token_hex(32),))
        # A random name, because two gates on one ledger must not have the same name.
        db.execute("INSERT OR IGNORE INTO meta VALUES ('instance_id', ?)", (f"asyncgate-{secrets.token_hex(4)}",))


def beginning(db: sqlite3.Connection) -> tuple[int, str | None]:
    """Return the number of a file's schema (0 if it has none), and the digest of its first migration if stored."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        return 0, None
    said = dict(db.execute("SELECT name, value FROM meta WHERE name IN ('schema_version', ?)", (FIRST,)).fetchall())
    return int(said.get("schema_version", 0)), said.get(FIRST)


def store_version(db: sqlite3.Connection, version: int) -> None:
    """Store the number of a file's schema, and the digest of its first migration."""
    db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", [
        ("schema_version", str(version)), (FIRST, digest(migrations()[0].read_text()))])


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run a block in one transaction that holds the write lock from the beginning."""
    begin_beside(db)
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def begin_beside(db: sqlite3.Connection) -> None:
    """Begin to write, also beside a gate under load, which leaves the write lock free for short moments only."""
    until = time.monotonic() + BUSY_SECONDS
    db.execute("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                db.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as busy:
                if busy.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
            time.sleep(LOOK_AGAIN_SECONDS)
    finally:
        db.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000:d}")


def statements(script: str) -> Iterator[str]:
    """Split a script into statements; executescript would commit the open transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


class FileLock:
    """An exclusive lock on `FILE.lock`: only one process may serve a file; the system releases it if that one dies."""

    def __init__(self, path: str) -> None:
        import fcntl
        try:
            self.file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StartupError(f"cannot open {path}: {error.strerror}") from error
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            who = describe_holder(os.pread(self.file, 200, 0))
            os.close(self.file)
            raise NotNow(f"another asyncgate is serving {path}{who}; only one process may serve a SQLite file, use "
                         "Postgres for several") from None
        self.store_address("")

    def store_address(self, url: str) -> None:
        """Store this process's id and address in the lock file, for other processes."""
        with contextlib.suppress(OSError):      # a full disk shows in more important writes
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, f"{os.getpid()} {url}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock, so that another process may serve the file."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.file, 0)
        os.close(self.file)


def describe_holder(said: bytes) -> str:
    """Return the process id and address in a lock file as text."""
    found = re.match(rb"(\d{1,10}) ?(https?://[\w.:\[\]-]*)?", said)
    if not found:
        return ""
    return f": process {int(found[1])}{f' at {found[2].decode()}' if found[2] else ''}"


def copy_file(source: str, target: str, told: Callable[[int, int], None] | None = None) -> None:
    """Copy a database in use page by page, and check the copy; raises OSError."""
    try:
        verdict = copy_pages(source, target, told)
    except sqlite3.Error as error:      # the disk of the copy is full, or a page cannot be read
        raise OSError(str(error)) from error
    os.chmod(target, 0o600)
    if verdict != "ok":
        raise OSError(f"the copy at {target} is damaged: {verdict}")


def copy_pages(source: str, target: str, told: Callable[[int, int], None] | None) -> str:
    """Copy a database in use page by page; return what SQLite finds in the copy, "ok" if nothing."""
    with (contextlib.closing(sqlite3.connect(f"{Path(source).absolute().as_uri()}?mode=ro", uri=True)) as old,
          contextlib.closing(sqlite3.connect(target)) as new):
        tell = told or (lambda done, total: None)
        # In one read transaction: else each commit of the gate would make the copy begin anew.
        old.isolation_level = None
        old.execute("BEGIN")
        old.execute("SELECT 1 FROM sqlite_master").fetchone()
        old.backup(new, pages=COPIED_PAGES, progress=lambda _, left, total: tell(total - left, total))
        verdict: str = new.execute("PRAGMA integrity_check").fetchone()[0]
        return verdict


def path_of(url: str) -> str:
    """Return the path in a URL: sqlite:///relative.db, sqlite:////absolute.db or sqlite:///:memory:."""
    if not (found := re.fullmatch(r"sqlite:///([^?#]+)", url)):
        raise StartupError("the URL of a SQLite database must be sqlite:///relative.db or sqlite:////absolute.db, "
                           f"not {url}")
    # The logs and the lock are beside the file, as SQLite's own log is, whatever link leads to it.
    return os.path.realpath(found[1]) if os.path.islink(found[1]) else found[1]


async def open_backend(url: str, *, serving: bool = False, settings: DatabaseSettings | None = None) -> Sqlite:
    """Open the database of a URL; `serving` locks it against other serving processes."""
    path = path_of(url)
    lock = FileLock(path) if serving and path != ":memory:" else None
    return await open_or_explain(Sqlite(path, lock, patience=(settings or DatabaseSettings()).timeout_seconds))


async def open_or_explain(backend: Sqlite) -> Sqlite:
    """Open a backend; raises StartupError if the file cannot be opened."""
    try:
        return await backend.open()
    except OSError as error:
        cure = WAY_ON if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT) else ""
        raise StartupError(f"cannot open {backend.path}: {error.strerror or error}{cure}") from error


async def migrate_database(url: str) -> list[str]:
    """Migrate a file, as opening it does; there is nothing else to report."""
    await (await open_backend(url)).close()
    return []


async def examine_database(settings: Settings, clock: Callable[[], float]) -> AsyncIterator[Finding]:
    """Yield what is wrong with a file, on a thread."""
    from asyncgate.backends.sqlite_examination import examine_file  # which is made of this module
    path = path_of(settings.database.url)
    for finding in await asyncio.to_thread(lambda: list(examine_file(path, settings, clock()))):
        yield finding


BACKEND: type[Backend] = Sqlite

if TYPE_CHECKING:
    _lasting: type[LastingBackend] = Sqlite
    _file: type[FileBackend] = Sqlite
