"""SQLite's tables on one connection: what a batch loads and saves, and every read.

`Sqlite` puts a file, a writer thread and readers around it, `Memory` nothing.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from itertools import islice
from math import inf
from typing import Any, TypeVar, get_args

from msgspec import Struct
from msgspec.structs import astuple

from asyncgate import Needs, Work
from asyncgate.backends import pages
from asyncgate.backends.lanes import Lanes, Portions
from asyncgate.parts.model import queries, stored, stored_limits, stored_webhooks, wire
from asyncgate.parts.model.cards import CARDS, list_columns
from asyncgate.parts.model.clock import SteadyClock
from asyncgate.parts.model.counted import count_moves, measure_text, measure_use
from asyncgate.parts.model.ids import Ids
from asyncgate.parts.model.limiting import (
    MOST_TURNS,
    SPARE_TURNS,
    list_granted,
    list_names,
    list_opened,
    read_limits,
    read_pattern,
)
from asyncgate.parts.model.views import summarize

R = TypeVar("R", bound=Struct)
PIECE, MOST_WHOLE = 8, 16       # tasks of each of several lanes that a claim reads first, and how many it reads whole
REFUSALS = sqlite3.IntegrityError, sqlite3.DataError, OverflowError      # of what a batch would store
PROMOTED = 1000     # the most delayed tasks that one batch makes claimable when their time has come

# The columns of a table are tenant_id and the fields of its Struct, without the fields that other tables store.


def fields(kind: type[Struct]) -> list[str]:
    """Return the columns of a stored Struct."""
    return [column.name for column in list_columns(kind)]


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


TASK, LEASE, PROGRESS, RECEIPT = (len(fields(kind))
                                  for kind in (stored.Task, stored.Lease, stored.Progress, stored.Receipt))
MUTABLE = fields(stored.Task)[fields(stored.Task).index("asyncgate_instance"):]

NAMED = f"""
    SELECT {listed(stored.Task, 't.')}, {listed(stored.Lease, 'l.')}, {listed(stored.Progress, 'p.')}
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
          "parent_task_id": "tasks_parent", "type_prefix": "tasks_type", "summary_prefix": "tasks_summary",
          "age": "sqlite_autoindex_tasks_1", "changed": "tasks_changed"}
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
    SELECT -t.priority, t.task_id, {listed(stored.Task, 't.')}, {listed(stored.Progress, 'p.')}
    FROM tasks AS t LEFT JOIN progress AS p USING (tenant_id, task_id)"""
IN_QUEUE = """
    WHERE t.tenant_id = ? AND t.lane = ? AND t.status = 'queued' AND t.ready = 1 ORDER BY t.priority DESC, t.task_id
    LIMIT ? OFFSET ?"""
HEADS = QUEUED_TASK + IN_QUEUE
TURN_HEADS = f"""
    SELECT {listed(stored.Task, 't.')}, {listed(stored.Progress, 'p.')}
    FROM tasks AS t INDEXED BY tasks_turn LEFT JOIN progress AS p USING (tenant_id, task_id)
    WHERE t.tenant_id = ? AND t.lane = ? AND t.limits = ? AND t.status = 'queued' AND t.ready = 1
    ORDER BY t.priority DESC, t.task_id LIMIT ?"""
# A turn that begins again gets no more than its share: it is put level with the one that is next.
NEXT_SERVED = """coalesce((SELECT min(o.served) FROM turns AS o INDEXED BY turns_open
                  WHERE o.tenant_id = {tenant} AND o.lane = {lane} AND o.stage = 'open'), 0.0)"""
OPEN_TURN = f"""
    INSERT OR ROLLBACK INTO turns (tenant_id, lane, limits, served, stage, blocked_by, blocked_key)
    SELECT ?1, ?2, ?3, {NEXT_SERVED.format(tenant='?1', lane='?2')}, 'open', '', '' WHERE true
    ON CONFLICT (tenant_id, lane, limits) DO UPDATE SET stage = 'open', served = max(served, excluded.served)
    WHERE stage = 'idle'"""
BEGIN_TURNS = f"""
    INSERT OR ROLLBACK INTO turns (tenant_id, lane, limits, served, stage, blocked_by, blocked_key)
    SELECT DISTINCT ?1, CAST(t.lane AS TEXT), t.limits, {NEXT_SERVED.format(tenant='?1', lane='CAST(t.lane AS TEXT)')},
                    'open', '', ''
    FROM (SELECT lane, limits FROM tasks INDEXED BY tasks_limited
          WHERE tenant_id = ?1 AND status = 'queued' AND ready = 0 AND held IS NULL AND limits IS NOT NULL
          AND next_eligible_at <= ?2 ORDER BY next_eligible_at LIMIT ?3) AS t WHERE true
    ON CONFLICT (tenant_id, lane, limits) DO UPDATE SET stage = 'open', served = max(served, excluded.served)
    WHERE stage = 'idle'"""
OPEN_TURNS = f"""
    SELECT {listed(stored_limits.Turn)} FROM turns INDEXED BY turns_open
    WHERE tenant_id = ? AND lane = ? AND stage = 'open' ORDER BY served, limits LIMIT ?"""
AGAIN = f"""
    UPDATE turns SET stage = 'open', until = NULL, blocked_by = '', blocked_key = '',
        served = max(served, {NEXT_SERVED.format(tenant='?1', lane='turns.lane')})
    WHERE tenant_id = ?1 AND (lane, limits) IN ("""
WAKE_TURNS = AGAIN + """
    SELECT lane, limits FROM turns INDEXED BY turns_blocked
    WHERE tenant_id = ?1 AND stage = 'blocked' AND blocked_by = ?2 AND blocked_key = ?3 ORDER BY served LIMIT ?4)"""
CORRECT_USE = """
    UPDATE rate_uses SET used = max(0, used + ?4) WHERE tenant_id = ?1 AND limit_name = ?2 AND limit_key = ?3"""
WAKE_ALL_TURNS = AGAIN + """
    SELECT lane, limits FROM turns INDEXED BY turns_blocked
    WHERE tenant_id = ?1 AND stage = 'blocked' AND blocked_by = ?2)"""
OPEN_DUE = AGAIN + """
    SELECT lane, limits FROM turns INDEXED BY turns_until
    WHERE tenant_id = ?1 AND stage = 'blocked' AND until IS NOT NULL AND until <= ?2 ORDER BY until LIMIT ?3)"""
COUNT_HOLDS = "SELECT count(*) FROM (SELECT 1 FROM holds WHERE tenant_id = ? AND limit_name = ? LIMIT ?)"
WAITING_LANES = """
    SELECT l.pattern, q.queued FROM lanes AS l JOIN queues AS q USING (tenant_id, lane)
    WHERE l.tenant_id = ? AND l.pattern IS NOT NULL"""
COUNT_KEY_HOLDS = """
    SELECT count(*) FROM (SELECT 1 FROM holds WHERE tenant_id = ? AND limit_name = ? AND limit_key = ? LIMIT ?)"""
# After a limit was lowered there are more leases than it allows, and those that end in this batch make no room.
ALL_HOLDS = -1
PLACES = f"SELECT -t.priority, t.task_id FROM tasks AS t {IN_QUEUE}"
# In the order of the ids, which the CROSS JOIN keeps: an ORDER BY would read all payloads before the first row.
HEADS_BY_ID = QUEUED_TASK.replace("FROM tasks AS t", """FROM json_each(?2) AS i
    CROSS JOIN tasks AS t ON t.tenant_id = ?1 AND t.task_id = i.value""")
MOVE = f"""
    UPDATE OR ROLLBACK tasks SET {', '.join(f'{name} = ?' for name in MUTABLE)}, priority = ?, ready = ?
    WHERE tenant_id = ? AND task_id = ?"""
AMEND = """
    UPDATE OR ROLLBACK tasks SET payload = ?3, payload_pointer = ?4, terms = ?5, summary = ?6
    WHERE tenant_id = ?1 AND task_id = ?2"""
DISCHARGE = "DELETE FROM obligations WHERE tenant_id = ? AND to_kind = ? AND to_id = ? AND receipt_id = ?"
BY_KEY = {kind: " AND ".join(["tenant_id = ?", *(f"{name} = ?" for name in stored.export_order(kind))])
          for kind in stored.RECORDS}
RECORD = {kind: f"SELECT {listed(kind)} FROM {table} WHERE {BY_KEY[kind]}" for kind, table in stored.RECORDS.items()}
# The statements that delete a row and its dependents; triggers refuse to delete receipts and tasks not yet archived.
DROP: dict[type[Struct], list[str]] = {
    **{kind: [f"DELETE FROM {table} WHERE {BY_KEY[kind]}"] for kind, table in stored.RECORDS.items()},
    stored.Receipt: [f"DELETE FROM {table} WHERE tenant_id = ? AND {key} = ?" for table, key in (
        ("edges", "child_id"), ("deliveries", "receipt_id"), ("receipts", "receipt_id"))],
    stored.Audit: ["DELETE FROM audit WHERE tenant_id = ? AND audit_id = ?"],
    stored.Task: [f"DELETE FROM {table} WHERE tenant_id = ? AND task_id = ?" for table in (
        "tasks", "leases", "progress", "steps", "outputs", "events")]}
ERASE = {kind: f"UPDATE {card.table} SET {', '.join(f'{name} = ?' for name in card.erasable)} "
               f"WHERE tenant_id = ? AND {' AND '.join(f'{name} = ?' for name in card.erased_by)}"
         for kind, card in CARDS.items() if card.erasable}
EMPTY_LANES = """
    SELECT lane FROM lanes
    WHERE tenant_id = ?1
    AND NOT EXISTS (SELECT 1 FROM tasks AS t WHERE t.tenant_id = ?1 AND t.lane = lanes.lane AND t.status = 'queued'
                    AND t.ready = 1)
    AND lane NOT IN (SELECT t.lane FROM tasks AS t WHERE t.tenant_id = ?1 AND t.status = 'queued' AND t.ready = 0
                     AND t.held IS NULL)"""
WORKERS = f"""
    SELECT {listed(stored.Presence)} FROM presences
    WHERE tenant_id = ? AND claimed_at IS NOT NULL AND (kind, id) > (?, ?) ORDER BY kind, id LIMIT ?"""
LATEST_WORKERS = f"""
    SELECT {listed(stored.Presence)} FROM presences
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
COUNT_AHEAD_IN_TURN = COUNT_AHEAD.replace("lane = ?2", "lane = ?2 AND limits = ?6")
UNSENT_OF = f"""
    SELECT {listed(stored.Outgoing)} FROM outbox
    WHERE tenant_id = ?1 AND receipt_id IN (SELECT receipt_id FROM receipts WHERE tenant_id = ?1 AND task_id = ?2)
    LIMIT ?3"""
EMPTY_QUEUES = "DELETE FROM queues WHERE tenant_id = ? AND queued = 0 AND held = 0 AND leased = 0 AND counted_at <= ?"
WALL = "UPDATE wall SET tenant_id = ?"
TENANT = "INSERT INTO tenants (tenant_id, since) VALUES (?, ?) ON CONFLICT DO NOTHING"
ADD_RECEIPT = insert("receipts", [*fields(stored.Receipt), "parent_id"]) + (
    " ON CONFLICT (tenant_id, task_id, receipt_key) DO NOTHING")

RECEIPTS = f"""
    SELECT {listed(stored.Receipt, 'r.')}, r.parent_id, d.delivered_at,
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
        SELECT receipt_id FROM obligations WHERE tenant_id = ?1 AND receipt_id > ?2 ORDER BY receipt_id LIMIT ?3)"""
OPEN = RECEIPTS + """
    AND r.receipt_id IN (
        SELECT receipt_id FROM obligations
        WHERE tenant_id = ?1 AND to_kind = ?2 AND to_id = ?3 AND receipt_id > ?4 ORDER BY receipt_id LIMIT ?5)"""
LOST = """
    SELECT task_id FROM (SELECT task_id FROM leases WHERE tenant_id = ?1 AND ending = 'live' AND expires_at <= ?3
                         ORDER BY expires_at LIMIT ?4)
    UNION SELECT task_id FROM (
        SELECT task_id FROM tasks WHERE tenant_id = ?1 AND deadline_at IS NOT NULL AND deadline_at <= ?2
        AND status IN ('queued', 'leased', 'running') ORDER BY deadline_at LIMIT ?4)
    UNION SELECT task_id FROM (
        SELECT task_id FROM tasks WHERE tenant_id = ?1 AND status = 'queued' AND attempt >= max_attempts LIMIT ?4)
    UNION SELECT task_id FROM (
        SELECT task_id FROM tasks WHERE tenant_id = ?1 AND held IN ('input_required', 'children_open')
        AND next_eligible_at <= ?2
        ORDER BY next_eligible_at LIMIT ?4)"""
LATE_TENANTS = """
    SELECT tenant_id FROM tenants AS t
    WHERE EXISTS (SELECT 1 FROM leases WHERE tenant_id = t.tenant_id AND ending = 'live' AND expires_at <= ?2)
        OR EXISTS (SELECT 1 FROM tasks WHERE tenant_id = t.tenant_id AND deadline_at IS NOT NULL AND deadline_at <= ?1
                   AND status IN ('queued', 'leased', 'running'))
        OR EXISTS (SELECT 1 FROM tasks WHERE tenant_id = t.tenant_id AND status = 'queued' AND attempt >= max_attempts)
        OR EXISTS (SELECT 1 FROM tasks WHERE tenant_id = t.tenant_id AND held IN ('input_required', 'children_open')
                   AND next_eligible_at <= ?1)
        OR EXISTS (SELECT 1 FROM schedules WHERE tenant_id = t.tenant_id AND late_at <= ?1)"""
# The newest receipt is a sign of life too; it may be newer than the last heartbeat of a killed gate.
LAST_SIGN = """
    SELECT max(at) FROM (SELECT CAST(value AS REAL) AS at FROM meta WHERE name = 'sign_of_life'
                         UNION ALL SELECT * FROM (SELECT created_at FROM receipts ORDER BY rowid DESC LIMIT 1))"""
# The last time that any process has stored, also a command beside the gate: what a key begins at, say.
LAST_TIME = f"""
    SELECT max(at) FROM (SELECT ({LAST_SIGN}) AS at
                         UNION ALL SELECT (SELECT at FROM audit AS a WHERE a.tenant_id = t.tenant_id
                                           ORDER BY audit_id DESC LIMIT 1) FROM tenants AS t)"""
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
           (SELECT count(*) FROM tasks WHERE tenant_id = ?1 AND status IN ('succeeded', 'failed', 'canceled')),
           (SELECT coalesce(sum(step_bytes), 0) FROM progress WHERE tenant_id = ?1)"""
TALLY = """
    SELECT t.value, (SELECT count(*) FROM receipts WHERE tenant_id = ?1 AND task_id = t.value)
    FROM json_each(?2) AS t"""
HELD_BY = f"""
    SELECT t.type, {listed(stored.Lease, 'l.')}
    FROM leases AS l INDEXED BY leases_holder JOIN tasks AS t USING (tenant_id, task_id)
    WHERE l.tenant_id = ?1 AND l.ending = 'live' AND l.worker_kind = ?2 AND l.worker_id = ?3 ORDER BY l.acquired_at"""
LEASED_IN = """
    SELECT coalesce(sum(leased), 0) FROM queues WHERE tenant_id = ?1 AND (?2 IS NULL OR type = ?2)
    AND (?3 IS NULL OR lane = ?3)"""
LEASED_TO = f"""
    SELECT count(*) FROM leases INDEXED BY leases_holder WHERE tenant_id = ? AND ending = 'live' AND worker_id = ?
    AND worker_kind IN ({", ".join([f"'{kind}'" for kind in get_args(wire.Kind)])})"""
ARCHIVED = f"""
    SELECT {listed(stored.Archived)} FROM archived INDEXED BY archived_task
    WHERE tenant_id = ? AND task_id = ? ORDER BY receipt_id"""
FIND_KEY = f"""
    SELECT k.tenant_id, a.suspended_at IS NOT NULL, {listed(stored.Key, 'k.')}
    FROM api_keys AS k LEFT JOIN accounts AS a USING (tenant_id) WHERE k.key_id = ?"""
UNSENT = """
    SELECT tenant_id FROM tenants AS t
    WHERE EXISTS (SELECT 1 FROM outbox WHERE tenant_id = t.tenant_id)"""
WAITING = f"""
    SELECT {listed(stored.Outgoing)} FROM outbox
    WHERE tenant_id = ? AND state = 'waiting' AND receipt_id > ? ORDER BY receipt_id LIMIT ?"""
OFFERED = WAITING.replace("'waiting'", "'offered'")
OPEN_WEBHOOKS = f"""
    SELECT {listed(stored_webhooks.Webhook)} FROM webhooks INDEXED BY webhooks_open
    WHERE tenant_id = ? AND state <> 'ended' AND webhook_id > ? ORDER BY webhook_id LIMIT ?"""
WEBHOOK_DELIVERIES = f"SELECT {listed(stored_webhooks.WebhookDelivery)} FROM webhook_deliveries WHERE tenant_id = ?"
OUTGOING = f"""
    SELECT {listed(stored.Outgoing)} FROM outbox
    WHERE tenant_id = ? AND receipt_id IN (SELECT value FROM json_each(?))"""
LAG = """
    SELECT (SELECT count(*) FROM outbox WHERE tenant_id = ?1 AND state = 'waiting'),
           (SELECT count(*) FROM outbox WHERE tenant_id = ?1 AND state = 'parked'),
           (SELECT posted_at FROM outbox WHERE tenant_id = ?1 AND state = 'waiting' ORDER BY receipt_id LIMIT 1)"""
IDS_LIKE = {table: f"""
    SELECT {id} FROM {name} WHERE tenant_id = ?1 AND {id} >= ?2 AND {id} < ?3
    UNION
    SELECT {id} FROM (SELECT {id} FROM {name} WHERE tenant_id = ?1 ORDER BY {id} DESC LIMIT ?4)
    WHERE substr({id}, -length(?2)) = ?2
    LIMIT ?5""" for table, name, id in ((stored.Task, "tasks", "task_id"), (stored.Receipt, "receipts", "receipt_id"))}
SCHEDULES = f"""
    SELECT {listed(stored.Schedule)} FROM schedules
    WHERE tenant_id = ? AND schedule_id > ? ORDER BY schedule_id LIMIT ?"""
SCHEDULES_OF = f"""
    SELECT {listed(stored.Schedule)} FROM schedules
    WHERE tenant_id = ? AND owner_kind = ? AND owner_id = ? AND schedule_id > ? ORDER BY schedule_id LIMIT ?"""
LATE = "SELECT schedule_id FROM schedules WHERE tenant_id = ? AND late_at <= ? ORDER BY late_at LIMIT ?"
QUEUES = "SELECT lane, type, capabilities, queued, held, leased FROM queues WHERE tenant_id = ?1"
DELAYED = f"""
    SELECT lane, sum(next_eligible_at > ?2), min(next_eligible_at), count(*) FROM (
        SELECT lane, next_eligible_at FROM tasks
        WHERE tenant_id = ?1 AND status = 'queued' AND ready = 0 AND held IS NULL
        ORDER BY next_eligible_at LIMIT {queries.DELAYED_COUNTED + 1})
    GROUP BY lane"""


WAITS_SINCE = "max(h.updated_at, coalesce(h.next_eligible_at, 0))"


def find_heads(lanes: str, shown: str) -> str:
    """Return the query for the oldest tasks of each priority of some lanes; `lanes` selects tenant, lane and type.

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
        FROM priorities AS p WHERE p.priority IS NOT NULL AND number < {queries.MOST_PRIORITIES})
    SELECT {shown} FROM priorities AS p
    JOIN tasks AS h ON h.rowid = (
        SELECT t.rowid FROM tasks AS t WHERE {of_lane} AND t.priority = p.priority ORDER BY t.task_id LIMIT 1)"""


OLDEST = find_heads("SELECT ?1 AS tenant_id, value AS lane, '' AS type FROM json_each(?2)",
                    f"p.lane, h.task_id, h.fence, {WAITS_SINCE}")
OLDEST_OF_ALL = find_heads("SELECT tenant_id, lane, type FROM queues WHERE queued > 0",
                           f"p.type, min({WAITS_SINCE})") + " GROUP BY p.type"
DUE_OF_ALL = f"""
    SELECT t.type, min(t.next_eligible_at) FROM tenants AS n CROSS JOIN tasks AS t ON t.rowid IN (
        SELECT rowid FROM tasks WHERE tenant_id = n.tenant_id AND status = 'queued' AND ready = 0 AND held IS NULL
        AND next_eligible_at <= ? ORDER BY next_eligible_at LIMIT {queries.DUE_LOOKED_AT})
    GROUP BY t.type"""
DEPTHS = "SELECT type, sum(queued), sum(held), sum(leased) FROM queues GROUP BY type"
COUNT_OVERDUE = f"""
    SELECT count(*) FROM (SELECT 1 FROM tenants CROSS JOIN leases USING (tenant_id)
                          WHERE ending = 'live' AND expires_at <= ? LIMIT {queries.OVERDUE_COUNTED})"""
COUNT_UNANSWERED = f"""
    SELECT count(*), min(updated_at) FROM (
        SELECT updated_at FROM tenants CROSS JOIN tasks INDEXED BY tasks_held USING (tenant_id)
        WHERE held = '{stored.INPUT_REQUIRED}' LIMIT {queries.UNANSWERED_COUNTED})"""
CUT_CASCADES = "SELECT tenant_id, task_id FROM cascades WHERE since <= ? ORDER BY since LIMIT ?"
LIMIT_DEPTHS = f"""
    WITH named AS (
        SELECT l.tenant_id, j.key AS name, sum(q.queued) AS waiting
        FROM lanes AS l JOIN queues AS q USING (tenant_id, lane), json_each(l.pattern) AS j
        WHERE l.pattern IS NOT NULL AND q.queued > 0 GROUP BY l.tenant_id, j.key)
    SELECT l.name, 1, sum((SELECT count(*) FROM (
               SELECT 1 FROM holds AS h WHERE h.tenant_id = l.tenant_id AND h.limit_name = l.name
               LIMIT {queries.HOLDS_COUNTED}))), sum(coalesce(n.waiting, 0)), max(l.stopped_until)
    FROM limits AS l LEFT JOIN named AS n USING (tenant_id, name) GROUP BY l.name
    UNION ALL
    SELECT min(name), 0, 0, sum(waiting), NULL FROM named AS n
    WHERE NOT EXISTS (SELECT 1 FROM limits AS l WHERE l.tenant_id = n.tenant_id AND l.name = n.name)
    HAVING count(*) > 0"""
DUE = """
    SELECT min(due) FROM (
        SELECT min(next_eligible_at) AS due FROM tasks
        WHERE tenant_id = ?1 AND status = 'queued' AND ready = 0 AND held IS NULL AND next_eligible_at > ?2
        UNION ALL
        SELECT min(until) FROM turns INDEXED BY turns_until
        WHERE tenant_id = ?1 AND stage = 'blocked' AND until IS NOT NULL AND until > ?2)"""

ADD_TASK = insert("tasks", [*fields(stored.Task), "ready", "summary"])
# A batch beside it may have added the lane.
ADD_LANE = insert("lanes", ["lane", "type", "capabilities", "pattern"], "OR IGNORE")
COUNT_MOVES = insert("queues", ["lane", "type", "capabilities", "queued", "held", "leased", "counted_at"]) + (
    " ON CONFLICT (tenant_id, lane) DO UPDATE SET queued = queued + excluded.queued, held = held + excluded.held, "
    "leased = leased + excluded.leased, counted_at = excluded.counted_at")
COUNT_USE = insert("meters",
                   fields(stored.Meter)) + " ON CONFLICT (tenant_id, period, slot) DO UPDATE SET " + ", ".join(
    f"{name} = {name} + excluded.{name}" for name in fields(stored.Meter)[2:])
MEASURE = """
    SELECT coalesce(sum(length(CAST(body AS BLOB))), 0) FROM receipts
    WHERE tenant_id = ? AND receipt_id IN (SELECT value FROM json_each(?))"""
ADD_LEASE = upsert("leases", fields(stored.Lease), ["task_id"])
ADD_PROGRESS = upsert("progress", fields(stored.Progress), ["task_id"])
# Only together with its receipt: a receipt that was stored earlier is not sent again.
ADD_POSTED = (f"INSERT OR ROLLBACK INTO outbox (tenant_id, {listed(stored.Outgoing)}) "
              f"SELECT ?, {', '.join('?' * len(fields(stored.Outgoing)))} "
              "WHERE EXISTS (SELECT 1 FROM receipts WHERE tenant_id = ? AND receipt_id = ?)")
ADD_EDGE = insert("edges", ["child_id", "parent_id"])
ADD_OBLIGATION = insert("obligations", fields(stored.Obligation))
ADD_EVENT = insert("events", fields(stored.Event))
ADD_AUDIT = insert("audit", fields(stored.Audit))
KEEP = {kind: insert(table, fields(kind)) if CARDS[kind].append_only else upsert(
            table, fields(kind), stored.export_order(kind)) for kind, table in stored.RECORDS.items()}
ADD_DELIVERY = upsert("deliveries", ["receipt_id", "delivered_at"], ["receipt_id"])


def named_row(row: tuple[Any, ...]) -> tuple[stored.Task, stored.Lease | None, stored.Progress | None]:
    """Make a task, its lease and its progress of one row of NAMED."""
    lease, progress = row[TASK:TASK + LEASE], row[TASK + LEASE:]
    return (stored.Task(*row[:TASK]), stored.Lease(*lease) if lease[0] is not None else None,
            stored.Progress(*progress) if progress[0] is not None else None)


def make_binder(given: list[Any]) -> Callable[[Any], str]:
    """Return a function that adds a parameter to a query and returns its name."""
    def name(value: Any) -> str:
        given.append(value)
        return f"?{len(given)}"
    return name


def end_before_offered(bind: Callable[[Any], str], to: wire.Principal | None) -> str:
    """Return the condition that a page of receipts ends before what is offered for it, and may be committed later.

    Only of offered rows `reason` is JSON, and SQLite is free to look at it before it looks at their state.  The sign
    keeps SQLite from reading all receipts before that end, where obligations name a few.
    """
    return f"""
    AND +r.receipt_id < coalesce((
        SELECT receipt_id FROM outbox WHERE tenant_id = ?1 AND state = 'offered'
        AND coalesce(CASE state WHEN 'offered' THEN json_extract(reason, '$.receipt.to_id') END
                     = {bind(to and to.id)}, true)
        ORDER BY receipt_id LIMIT 1), '~')"""


def select_tasks(tenant_id: str, of: queries.TaskFilter, ranges: list[pages.TaskRange],
                 ids: list[str]) -> tuple[str, list[Any]]:
    """Return the query for a page of tasks from some ranges, and its parameters."""
    given: list[Any] = [tenant_id]
    bind = make_binder(given)
    # +: not by the index, the ids are
    also = pages.narrow_tasks(of, bind, "t", "+t.task_id" if ids else "t.task_id")
    also += [f"t.task_id IN (SELECT value FROM json_each({bind(json.dumps(ids))}))"] if ids else []
    led = NAMED.replace("FROM tasks AS t", f"FROM tasks AS t INDEXED BY {LED_BY[ranges[0].by]}")
    column = {"owner": "t.owner_kind", "type": "t.type"}.get(ranges[0].by)
    narrow = ([f"{column} = {bind(range_.value)}"] if range_.value else [] for range_ in ranges)
    order = pages.order_by(of, "t", "t.task_id")
    parts = [f"{' AND '.join([led, *also, *more])} ORDER BY {order} LIMIT {of.limit:d}" for more in narrow]
    return queries.merge_parts(parts, of.limit), given


def select_ids(tenant_id: str, of: queries.TaskFilter, range_: pages.TaskRange, most: int) -> tuple[str, list[Any]]:
    """Return the query for the ids of the tasks of a range, and its parameters."""
    given: list[Any] = [tenant_id]
    bind = make_binder(given)
    conditions, order = pages.limit_range(of, range_, bind)
    return (f"SELECT task_id FROM tasks INDEXED BY {LED_BY[range_.by]} WHERE tenant_id = ?1 AND {conditions} "
            f"ORDER BY {order} LIMIT {most:d}"), given


def select_count(tenant_id: str, of: queries.TaskFilter, range_: pages.TaskRange, most: int) -> tuple[str, list[Any]]:
    """Return the query that counts the tasks of a range, and those of them that pass, and its parameters."""
    sql, given = select_ids(tenant_id, of, range_, most)
    passing = " AND ".join(["true", *pages.narrow_tasks(of, make_binder(given), "t", "t.task_id")])
    return f"SELECT count(*), coalesce(sum({passing}), 0) FROM ({sql}) AS i JOIN tasks AS t " \
           f"ON t.tenant_id = ?1 AND t.task_id = i.task_id", given


def receipt_row(row: tuple[Any, ...]) -> stored.Receipt:
    """Make a receipt of one row of RECEIPTS."""
    first, delivered_at, further = row[RECEIPT:]
    parents = tuple(sorted([*([first] if first else ()), *(further.split() if further else ())]))
    return stored.Receipt(*row[:RECEIPT], parents, delivered_at)  # type: ignore[call-arg]  # mypy cannot count a slice


class SqliteTables(pages.Pages):
    """The tables of a database that one process uses."""

    db: sqlite3.Connection
    clock: SteadyClock

    def __init__(self) -> None:
        self.skew, self.ids = 0.0, Ids()
        self.tenant_id: str | None = None                   # the tenant of the running transaction, for the triggers
        self.lanes: defaultdict[str, Lanes] = defaultdict(Lanes)
        self.known: set[str] = set()

    def _load_caches(self) -> None:
        """Load lanes, tenants and keys, and continue ids after those of earlier processes."""
        for tenant_id, lane, type, capabilities, pattern in self.db.execute("SELECT * FROM lanes"):
            self.lanes[tenant_id].learn(lane, type, json.loads(capabilities), pattern)
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

    # Writing.

    def _decide(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> Work:
        """Load, decide and save one batch, without a commit."""
        if tenant_id != self.tenant_id:
            self.db.execute(WALL, (tenant_id,))
            self.tenant_id = tenant_id
        work = self._load(tenant_id, needs)
        decide(work)
        self._save(work)
        return work

    def _load(self, tenant_id: str, needs: Needs) -> Work:
        ids, now = set(needs.tasks), self.now()
        for sql, keys in ((KEYED, needs.keys), (CLAIMED, needs.repeats), (LEASED, ((id,) for id in needs.leases))):
            for key in keys:
                ids.update(task_id for (task_id,) in self.db.execute(sql, (tenant_id, *key)))
        rows = self.db.execute(BY_ID, (tenant_id, json.dumps(list(ids)))).fetchall() if ids else []
        tasks = [named_row(row) for row in rows]
        work = Work(tenant_id, now, self.ids, self.lanes[tenant_id].known, needs)
        work.limiting.patterns = self.lanes[tenant_id].patterns
        for task in tasks:
            work.load_task(*task)
        if needs.claims:
            self._offer(work, needs.claims)
        for granted in list_granted(work):
            self._load_granted(work, granted)
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
            work.keep_record(stored.Usage(*self.db.execute(COUNT, (tenant_id,)).fetchone()))
        if needs.tally:
            work.tallies.update(self.db.execute(TALLY, (tenant_id, json.dumps(work.list_named_tasks(needs)))))
        return work

    def _offer(self, work: Work, claims: list[wire.LeaseNext]) -> None:
        """Load the best claimable tasks: enough for every claim of the batch."""
        enough, lanes = sum(ask.max_tasks or 1 for ask in claims), self.lanes[work.tenant_id]
        if lanes.patterns:
            self.db.execute(BEGIN_TURNS, (work.tenant_id, work.now, PROMOTED))
        self.db.execute(PROMOTE, (work.tenant_id, work.now, PROMOTED))
        for row in self.db.execute(RECORD[stored.Pauses], (work.tenant_id,)):
            lanes.pauses = stored.Pauses(*row)
            work.load_record(lanes.pauses)
        for group in lanes.groups(claims, work.now):
            portions = Portions(len(claims))
            with contextlib.closing(self._heads(work.tenant_id, group, enough)) as heads:
                for _, _, *row in heads:
                    task, progress = stored.Task(*row[:TASK]), row[TASK:]
                    told = stored.Progress(*progress) if progress[0] is not None else None
                    work.add_claimable(task, told)
                    if enough > len(claims) and portions.add(task, told):
                        break
        if limited := lanes.find_limited(claims, work.now):
            self._offer_turns(work, limited, enough, len(claims))

    def _offer_turns(self, work: Work, lanes: list[int], enough: int, claims: int) -> None:
        """Load the limits of some lanes, their first open turns, and the first tasks of each."""
        limiting = work.limiting
        self.db.execute(OPEN_DUE, (work.tenant_id, work.now, PROMOTED))
        patterns = [limiting.patterns[lane] for lane in lanes]
        for name in list_names(patterns):
            self._load_limit(work, name)
        for name in list_names(patterns, unkeyed=True):
            self._load_key(work, name, "")
        most = min(enough + SPARE_TURNS, MOST_TURNS)
        for lane in lanes:
            if limiting.find_closed(lane) is not None:
                continue
            rows = self.db.execute(OPEN_TURNS, (work.tenant_id, str(lane), most)).fetchall()
            turns, portions = [stored_limits.Turn(*row) for row in rows], Portions(claims)
            limiting.cut |= {lane} if len(turns) == most else set()
            piece = min(enough, 2 * enough // max(1, len(turns)) + 1)
            for turn in turns:
                if self._load_turn(work, turn, piece, portions):
                    limiting.cut.add(lane)
                    break

    def _load_granted(self, work: Work, task: stored.Task) -> None:
        """Load what counts in the limits of a task, and its turn."""
        for name, key in read_limits(task.limits):
            self._load_limit(work, name)
            self._load_key(work, name, key)
        for row in self.db.execute(RECORD[stored_limits.Turn], (work.tenant_id, str(task.lane), task.limits)):
            work.load_record(stored_limits.Turn(*row))

    def _load_limit(self, work: Work, name: str) -> None:
        for row in self.db.execute(RECORD[stored_limits.Limit], (work.tenant_id, name)):
            work.load_record(stored_limits.Limit(*row))
        if work.limiting.find_most(name) is not None:
            number = self.db.execute(COUNT_HOLDS, (work.tenant_id, name, ALL_HOLDS)).fetchone()[0]
            work.limiting.held[name, None] = number

    def _load_key(self, work: Work, name: str, key: str) -> None:
        """Load how many leases there are under a key, and what it has used of its rate, if a rule asks for it."""
        if (name, key) in work.limiting.held:
            return
        if work.limiting.find_most(name, key) is not None:
            number = self.db.execute(COUNT_KEY_HOLDS, (work.tenant_id, name, key, ALL_HOLDS)).fetchone()[0]
            work.limiting.held[name, key] = number
        if work.limiting.find_rules(name).find_rate(key) is not None:
            for row in self.db.execute(RECORD[stored_limits.RateUse], (work.tenant_id, name, key)):
                work.load_record(stored_limits.RateUse(*row))

    def _load_turn(self, work: Work, turn: stored_limits.Turn, piece: int, portions: Portions) -> bool:
        """Load a turn and its first tasks; return whether the tasks that were read are enough for all claims."""
        for pair in read_limits(turn.limits):
            self._load_key(work, *pair)
        tasks, enough = list[str](), False
        with contextlib.closing(self.db.execute(TURN_HEADS, (
                work.tenant_id, int(turn.lane), turn.limits, piece))) as rows:
            for row in rows:
                task, progress = stored.Task(*row[:TASK]), stored.Progress(*row[TASK:]) if row[TASK] else None
                if task.task_id not in work.tasks:
                    work.load_task(task, progress=progress)
                tasks.append(task.task_id)
                if enough := portions.add(task, progress):
                    break
        work.limiting.add_turn(turn, tasks, len(tasks) < piece and not enough)
        return enough

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
        many(ADD_LANE, [(lane, type, json.dumps(sorted(needed)), pattern)
                        for lane, (type, needed, pattern) in work.lanes.items()])
        moves = count_moves(work.before, work.added, work.moved)
        many(COUNT_MOVES, [(*row, work.now) for row in moves])
        many(ADD_TASK, [(*astuple(task), task.offerable(work.now), summarize(task)) for task in work.added.values()])
        if work.moved:
            self.db.executemany(MOVE, [(*astuple(task)[-len(MUTABLE):], task.priority, task.offerable(work.now),
                                        tenant_id, task.task_id) for task in work.moved.values()])
        many(AMEND, [(task.task_id, task.payload, task.payload_pointer, task.terms, summarize(task))
                     for task in work.amended.values()])
        many(ADD_LEASE, [astuple(lease) for lease in work.leased.values()])
        many(ADD_PROGRESS, [astuple(progress) for progress in work.progressed.values()])
        before = self.db.total_changes
        many(ADD_RECEIPT,
             [(*astuple(receipt)[:RECEIPT], receipt.parents[0] if receipt.parents else None) for receipt in written])
        stored_bytes = self._measure_bodies(work, self.db.total_changes - before)
        if (meter := measure_use(work, sum([move[5] for move in moves]), stored_bytes)) is not None:
            many(COUNT_USE, [astuple(meter)])
        many(ADD_POSTED, [(*astuple(row), tenant_id, row.receipt_id) for row in work.posted.values()])
        many(ADD_EDGE, [(receipt.receipt_id, parent) for receipt in written for parent in receipt.parents[1:]])
        many(ADD_OBLIGATION, [(to.kind, to.id, receipt_id) for receipt_id, to in work.opened.items()])
        many(DISCHARGE, [(to.kind, to.id, receipt_id) for receipt_id, to in work.closed.items()])
        many(ADD_EVENT, [astuple(event) for event in work.events.values()])
        many(ADD_AUDIT, [astuple(line) for line in work.audited.values()])
        for (kind, key), row in work.kept.items():
            for sql in [KEEP[kind]] if row is not None else DROP[kind]:
                many(sql, [astuple(row) if row is not None else key])
        many(OPEN_TURN, list_opened(work))
        many(CORRECT_USE, [(*pair, more) for pair, more in work.limiting.costs.items()])
        many(WAKE_ALL_TURNS, [(name,) for name in work.limiting.changed])
        many(WAKE_TURNS, [(*pair, number) for pair, number in work.limiting.woken.items()])
        many(ADD_DELIVERY, work.delivered.items())
        for (kind, place), erased in work.erased.items():       # behind the records: the triggers look at those
            self.db.execute(ERASE[kind], (*(getattr(erased, name) for name in CARDS[kind].erasable), tenant_id, *place))

    def _measure_bodies(self, work: Work, added: int) -> int:
        """Return how many bytes a batch stores in receipts; one that was stored already is not stored again."""
        if added == len(work.written):
            return sum([measure_text(receipt.body) for receipt in work.written.values()])
        stored_bytes: int = self.db.execute(MEASURE, (work.tenant_id, json.dumps(list(work.written)))).fetchone()[0]
        return stored_bytes

    def _begin(self) -> None:
        self.db.execute("BEGIN IMMEDIATE")

    def _end(self) -> None:
        self.db.execute("COMMIT")

    def _roll_back(self) -> None:
        """Leave the transaction, which some errors have ended already."""
        self.tenant_id = None
        if self.db.in_transaction:
            self.db.execute("ROLLBACK")

    async def _write_alone(self, run: Callable[[], Any]) -> Any:
        """Run something that writes while no batch does."""
        return run()

    # Reading.

    async def _rows(self, sql: str, *given: Any) -> list[tuple[Any, ...]]:
        """Run one query."""
        return self.db.execute(sql, given).fetchall()

    async def task(self, tenant_id: str, task_id: str) -> tuple[stored.Task, stored.Lease | None,
                                                                stored.Progress | None] | None:
        """Return a task with its latest lease and progress."""
        rows = await self._rows(NAMED + "AND t.task_id = ?2", tenant_id, task_id)
        return named_row(rows[0]) if rows else None

    async def read_tasks(self, tenant_id: str, of: queries.TaskFilter, ranges: list[pages.TaskRange],
                         ids: list[str]) -> list[tuple[stored.Task, stored.Lease | None, stored.Progress | None]]:
        """Return a page of tasks from some ranges of one index."""
        sql, given = select_tasks(tenant_id, of, ranges, ids)
        return [named_row(row) for row in await self._rows(sql, *given)]

    async def count_range(self, tenant_id: str, of: queries.TaskFilter, range_: pages.TaskRange,
                          most: int) -> tuple[int, int]:
        """Return how many tasks of a range were looked at, and how many of these pass."""
        sql, given = select_count(tenant_id, of, range_, most)
        looked, number = (await self._rows(sql, *given))[0]
        return looked, number

    async def find_settled(self, tenant_id: str) -> float:
        """Return the time: nothing else runs while a batch does."""
        return self.now()

    async def find_types(self, tenant_id: str, prefix: str, most: int) -> list[str]:
        """Return the types of tasks that begin so."""
        return [row[0] for row in await self._rows(TYPES_OF, tenant_id, prefix, queries.end_of(prefix), most)]

    async def find_ids(self, tenant_id: str, of: queries.TaskFilter, range_: pages.TaskRange, most: int) -> list[str]:
        """Return tasks of a range."""
        sql, given = select_ids(tenant_id, of, range_, most)
        return [row[0] for row in await self._rows(sql, *given)]

    async def find_leases(self, tenant_id: str, of: queries.LeaseFilter) -> list[tuple[stored.Lease, str]]:
        """Return the live leases of a worker, and of their tasks only the types."""
        rows = await self._rows(HELD_BY, tenant_id, of.worker.kind, of.worker.id)
        return pages.read_leases(rows, of)

    async def count_leases(self, tenant_id: str, of: queries.LeaseCount) -> int:
        """Return how many leases are live."""
        find = (LEASED_IN, of.type, of.lane) if of.worker_id is None else (LEASED_TO, of.worker_id)
        number: int = (await self._rows(find[0], tenant_id, *find[1:]))[0][0]
        return number

    async def receipt(self, tenant_id: str, receipt_id: str) -> stored.Receipt | None:
        """Return one receipt."""
        rows = await self._rows(RECEIPTS + "AND r.receipt_id = ?2", tenant_id, receipt_id)
        return receipt_row(rows[0]) if rows else None

    async def find_receipts(self, tenant_id: str, of: queries.ReceiptFilter) -> list[stored.Receipt]:
        """Return a page of receipts, oldest first; the single writer makes ids in the order of commits.

        But not those that a strict gate has offered, before which the page ends.
        """
        given: list[Any] = [tenant_id, of.after or ""]
        bind = make_binder(given)
        sql = f"{RECEIPTS} AND r.receipt_id > ?2" + pages.narrow(
            bind, to_id=of.to and of.to.id, task_id=of.task_id, receipt_type=of.receipt_type)
        sql += end_before_offered(bind, of.to) if of.settled and of.task_id is None else ""
        order = "r.receipt_id DESC" if of.newest else "r.receipt_id"
        sql = queries.page_of(sql, of.to, "r.to_kind", order, 1, of.limit, bind)
        rows = await self._rows(sql, *given)
        return [receipt_row(row) for row in (rows[::-1] if of.newest else rows)]

    async def find_events(self, tenant_id: str, of: queries.EventFilter) -> list[stored.Event]:
        """Return a page of a task's events."""
        sql = (f"SELECT {listed(stored.Event)} FROM events WHERE tenant_id = ? AND task_id = ? AND event_id > ? "
               "ORDER BY event_id LIMIT ?")
        return [stored.Event(*row) for row in await self._rows(sql, tenant_id, of.task_id, of.after or "", of.limit)]

    async def find_obligations(self, tenant_id: str, of: queries.ObligationFilter) -> list[stored.Receipt]:
        """Return a page of open obligations from their index."""
        given = [tenant_id, *([of.to.kind, of.to.id] if of.to else []), of.after or "", of.limit]
        ahead = end_before_offered(make_binder(given), of.to) if of.settled else ""
        rows = await self._rows(f"{OPEN if of.to else OPEN_FOR_ALL}{ahead} ORDER BY r.receipt_id", *given)
        return [receipt_row(row) for row in rows]

    async def find_like(self, tenant_id: str, of: queries.IdFilter) -> list[str]:
        """Return ids of tasks or receipts that begin or end with a text."""
        rows = await self._rows(IDS_LIKE[of.table], tenant_id, of.part, queries.end_of(of.part), of.searched, of.limit)
        return [row[0] for row in rows]

    async def find_queues(self, tenant_id: str, of: queries.QueueFilter) -> list[stored.Queue]:
        """Return a page of what lanes have now, by type."""
        given: list[Any] = [tenant_id]
        counted = await self._rows(QUEUES + pages.narrow_queues(of, make_binder(given)), *given)
        now = self.now()
        heads = await self.find_heads(tenant_id, [row[0] for row in counted])
        later = {lane: rest for lane, *rest in await self._rows(DELAYED, tenant_id, now)}
        return list(pages.join_queues(counted, heads, later, now))

    async def find_heads(self, tenant_id: str, lanes: Sequence[int]) -> list[queries.Head]:
        """Return the oldest claimable task of each priority of some lanes."""
        return [queries.Head(*row) for row in await self._rows(OLDEST, tenant_id, json.dumps(lanes))]

    async def find_schedules(self, tenant_id: str, of: queries.ScheduleFilter) -> list[stored.Schedule]:
        """Return a page of schedules, in the order of their ids."""
        after = of.after or ""
        rows = await (self._rows(SCHEDULES_OF, tenant_id, of.owner.kind, of.owner.id, after, of.limit) if of.owner
                      else self._rows(SCHEDULES, tenant_id, after, of.limit))
        return [stored.Schedule(*row) for row in rows]

    async def find_workers(self, tenant_id: str, of: queries.WorkerFilter) -> list[stored.Presence]:
        """Return a page of those who have claimed tasks."""
        rows = await (self._rows(LATEST_WORKERS, tenant_id, of.limit) if of.latest
                      else self._rows(WORKERS, tenant_id, *of.after, of.limit))
        return [stored.Presence(*row) for row in rows]

    async def find_holdings(self, tenant_id: str, of: queries.HoldingsOf) -> list[stored.Holding]:
        """Return what some workers hold."""
        return [stored.Holding(*row) for row in await self._rows(
            HOLDINGS, tenant_id, json.dumps([(who.kind, who.id) for who in of.workers]), of.most)]

    async def count_ahead(self, tenant_id: str, of: queries.AheadOf) -> list[int]:
        """Return how many tasks come before one."""
        given = (tenant_id, of.lane, of.priority, of.task_id, of.most)
        rows = await (self._rows(COUNT_AHEAD, *given) if of.limits is None
                      else self._rows(COUNT_AHEAD_IN_TURN, *given, of.limits))
        return [row[0] for row in rows]

    async def count_limit(self, tenant_id: str, of: queries.LimitUse) -> tuple[int, int]:
        """Return how many leases count against a limit, and how many tasks that have it wait."""
        [(held,)] = await (self._rows(COUNT_HOLDS, tenant_id, of.name, of.most) if of.key is None
                           else self._rows(COUNT_KEY_HOLDS, tenant_id, of.name, of.key, of.most))
        rows = await self._rows(WAITING_LANES, tenant_id)
        return held, sum(queued for pattern, queued in rows if of.name in dict(read_pattern(pattern)))

    async def find_unsent(self, tenant_id: str, of: queries.UnsentOf) -> list[stored.Outgoing]:
        """Return the outbox rows of a task."""
        return [stored.Outgoing(*row) for row in await self._rows(UNSENT_OF, tenant_id, of.task_id, of.limit)]

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

    async def find_waiting(self, tenant_id: str, of: queries.OutboxFilter) -> list[stored.Outgoing]:
        """Return a page of the receipts that wait for the ledger."""
        return [stored.Outgoing(*row) for row in await self._rows(
            WAITING if of.state == "waiting" else OFFERED, tenant_id, of.after, of.limit)]

    async def find_outgoing(self, tenant_id: str, of: queries.OutboxOf) -> list[stored.Outgoing]:
        """Return the outbox rows of some receipts."""
        return [stored.Outgoing(*row) for row in await self._rows(OUTGOING, tenant_id, json.dumps(of.receipt_ids))]

    async def find_deliveries(self, tenant_id: str,
                              of: queries.DeliveryFilter) -> list[stored_webhooks.WebhookDelivery]:
        """Return a page of what became of the events of an endpoint."""
        sql, given = f"{WEBHOOK_DELIVERIES} AND webhook_id = ?", [tenant_id, of.webhook_id]
        for condition, value in (("state = ?", of.state), (f"delivery_id {'<' if of.newest else '>'} ?", of.after)):
            if value is not None:
                given.append(value)
                sql += f" AND {condition}"
        rows = await self._rows(f"{sql} ORDER BY delivery_id{' DESC' * of.newest} LIMIT {of.limit:d}", *given)
        return [stored_webhooks.WebhookDelivery(*row) for row in rows]

    async def find_open_webhooks(self, tenant_id: str, of: queries.OpenWebhooks) -> list[stored_webhooks.Webhook]:
        """Return a page of the endpoints that have not ended."""
        return [stored_webhooks.Webhook(*row) for row in await self._rows(OPEN_WEBHOOKS, tenant_id, of.after, of.limit)]

    async def webhook_tenants(self) -> list[str]:
        """Return the tenants that have endpoints for webhooks."""
        return [row[0] for row in await self._rows("SELECT tenant_id FROM webhook_heads WHERE number > 0 OR tasks > 0")]

    async def lag(self, tenant_id: str) -> stored.Lag:
        """Return how many receipts wait, how many are parked, and when the oldest waiting one came."""
        return stored.Lag(*(await self._rows(LAG, tenant_id))[0])

    async def find_entries(self, tenant_id: str, of: queries.EntryFilter) -> list[stored.Entry]:
        """Return a page of receipts that others stored in this ledger; arrival ids follow the order of commits."""
        given: list[Any] = [tenant_id, of.after or ""]
        bind = make_binder(given)
        sql = f"SELECT {listed(stored.Entry)} FROM ledger WHERE tenant_id = ?1 AND arrival > ?2" + pages.narrow(
            bind, to_id=of.to and of.to.id, task_id=of.task_id, receipt_type=of.receipt_type,
            asyncgate_instance=of.instance)
        sql = queries.page_of(sql, of.to, "to_kind", "arrival", 2, of.limit, bind)
        rows = await self._rows(sql, *given)
        return [stored.Entry(*row) for row in rows]

    async def find_archived(self, tenant_id: str, of: queries.ArchivedFilter) -> list[stored.Archived]:
        """Return the pointers to a task's archived receipts."""
        return [stored.Archived(*row) for row in await self._rows(ARCHIVED, tenant_id, of.task_id)]

    async def find_key(self, key_id: str) -> tuple[str, bool, stored.Key] | None:
        """Return a key before its tenant is known."""
        rows = await self._rows(FIND_KEY, key_id)
        return (rows[0][0], bool(rows[0][1]), stored.Key(*rows[0][2:])) if rows else None

    async def overdue(self, now: float, grace: float, limit: int) -> list[tuple[str, list[str], list[str]]]:
        """Return the tasks and schedules that upkeep must check, by tenant."""
        tenants = []
        for (tenant_id,) in await self._rows(LATE_TENANTS, now, now - grace):
            tasks = [row[0] for row in await self._rows(LOST, tenant_id, now, now - grace, limit)]
            schedules = [row[0] for row in await self._rows(LATE, tenant_id, now, limit)]
            tenants.append((tenant_id, tasks, schedules))
        return tenants

    async def depths(self, now: float) -> list[stored.Depth]:
        """Return what the queues of all tenants have by type."""
        oldest, due = dict(await self._rows(OLDEST_OF_ALL)), dict(await self._rows(DUE_OF_ALL, now))
        return [stored.Depth(type, queued, held, leased,
                             min((since[type] for since in (oldest, due) if type in since), default=None))
                for type, queued, held, leased in await self._rows(DEPTHS)]

    async def count_overdue(self, before: float) -> int:
        """Return how many live leases have expired before a time."""
        number: int = (await self._rows(COUNT_OVERDUE, before))[0][0]
        return number

    async def count_unanswered(self) -> tuple[int, float | None]:
        """Return how many tasks are on hold for an answer, and since when the first is."""
        row: tuple[int, float | None] = (await self._rows(COUNT_UNANSWERED))[0]
        return row

    async def limit_depths(self) -> list[stored_limits.LimitDepth]:
        """Return what the limits of all tenants have."""
        return [stored_limits.LimitDepth(name, bool(is_set), *rest)
                for name, is_set, *rest in await self._rows(LIMIT_DEPTHS)]

    async def cut_cascades(self, before: float, limit: int) -> list[tuple[str, str]]:
        """Return cascades that are not finished."""
        return await self._rows(CUT_CASCADES, before, limit)

    async def lapses(self, since: float, limit: int) -> list[tuple[float, str, str]]:
        """Return when live leases expire."""
        return await self._rows(LAPSES, since, limit)

    async def drop_lanes(self, tenant_id: str | None = None) -> int:
        """Delete the lanes in which no task waits."""
        number: int = await self._write_alone(lambda: self._drop_lanes(tenant_id))
        return number

    def _drop_lanes(self, only: str | None) -> int:
        dropped: dict[str, list[int]] = {}
        kept_since = inf if only else self.now() - queries.QUEUE_KEPT_SECONDS   # a clock may have been set back
        self._begin()
        for tenant_id in list(self.lanes) if only is None else [only]:
            self.db.execute(WALL, (tenant_id,))
            self.db.execute(EMPTY_QUEUES, (tenant_id, kept_since))
            dropped[tenant_id] = [lane for (lane,) in self.db.execute(EMPTY_LANES, (tenant_id,)).fetchall()]
            for table, kind in (("lanes", int), ("turns", str)):
                self.db.executemany(f"DELETE FROM {table} WHERE tenant_id = ? AND lane = ?",
                                    [(tenant_id, kind(lane)) for lane in dropped[tenant_id]])
        self._end()
        self.tenant_id = None       # so that the next batch sets its tenant
        for tenant_id, lanes in dropped.items():
            self.lanes[tenant_id].forget(lanes)
        return sum(map(len, dropped.values()))

    async def next_due(self, tenant_id: str) -> float | None:
        """Return when the next delayed task may be leased, or a turn that waits for its time."""
        due: float | None = (await self._rows(DUE, tenant_id, self.now()))[0][0]
        return due

    async def find_rows(self, tenant_id: str, table: type[Struct], after: str, limit: int) -> list[Any]:
        """Return the next rows of a table, in the order of its primary key."""
        if table is stored.Receipt:
            every = queries.ReceiptFilter(None, None, None, after, limit, settled=False)
            return await self.find_receipts(tenant_id, every)
        if not (order := stored.export_order(table)):
            return [] if after or (only := await self.record(tenant_id, table)) is None else [only]
        names, behind = ", ".join(order), after.split("\0") if after else [""] * len(order)
        sql = (f"SELECT {listed(table)} FROM {stored.TABLES[table]} WHERE tenant_id = ? "
               f"AND ({names}) > ({', '.join('?' * len(order))}) ORDER BY {names} LIMIT {limit:d}")
        return [table(*row) for row in await self._rows(sql, tenant_id, *behind)]

    async def tenants(self) -> list[str]:
        """Return every tenant that has stored anything."""
        return [row[0] for row in await self._rows("SELECT tenant_id FROM tenants ORDER BY tenant_id")]

    async def keep_secret(self, secret: bytes) -> None:
        """Replace the key that signs cursors, durably."""
        await self._write_alone(
            lambda: self.db.execute("UPDATE meta SET value = ? WHERE name = 'cursor_key'", (secret.hex(),)))
        self.secret = secret

    async def count_rows(self, tables: Iterable[type[Struct]]) -> int:
        """Return how many rows some tables have, over all tenants."""
        return sum([(await self._rows(f"SELECT count(*) FROM {stored.TABLES[table]}"))[0][0] for table in tables])
