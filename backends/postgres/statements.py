"""The statements of the Postgres backend, built from the Structs that they load and save.

A batch has one statement that finds and locks its rows and one that saves its changes, because a round trip costs more
than a dozen index probes.  Each `LATERAL (… LIMIT 1)` is one index probe, whatever the planner assumes about a tenant's
size.  MATERIALIZED makes sure that a subquery with row locks runs only once.
"""

from __future__ import annotations

import itertools
import json
import re
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import astuple, replace

from asyncgate import MOST_PAGE_BYTES, Needs, Work
from asyncgate.backends.pages import TaskRange, limit_range, name_owner, narrow_tasks, order_by
from asyncgate.backends.postgres.pipeline import Connection, Fetched
from asyncgate.parts.model import queries, stored, stored_webhooks, wire
from asyncgate.parts.model.cards import CARDS, list_columns
from asyncgate.parts.model.counted import count_moves, measure_use, passed_ms
from asyncgate.parts.model.ids import HIGHEST
from asyncgate.parts.model.overdue import is_stuck
from asyncgate.parts.model.views import summarize

TYPES = {bool: "boolean", int: "bigint", float: "float8", str: "text"}


def typed(kind: type[Struct], but: Iterable[str] = ()) -> dict[str, str]:
    """Return the columns of a stored Struct, each with its type."""
    left_out = {*but}
    return {column.name: TYPES[column.type] for column in list_columns(kind) if column.name not in left_out}


def listed(columns: Iterable[str], prefix: str = "") -> str:
    """Return columns as the list of a SELECT."""
    return ", ".join(prefix + column for column in columns)


# A task is two rows: the fields that never change, and those that do, with its latest lease.
FIELDS = list(stored.Task.__struct_fields__)
QUEUED = ("lane", "priority", "max_attempts")   # of these only the priority changes; the queue's index needs them
MUTABLE = typed(stored.Task, FIELDS[:FIELDS.index("asyncgate_instance")])
HELD = {"lease_fence" if name == "fence" else name: kind for name, kind in typed(stored.Lease, ["task_id"]).items()}
OWN = {"ready": "boolean", "check_at": "float8", "told": "bigint"}
CONTRACT = typed(stored.Task, [*QUEUED, *MUTABLE])
contract_of = attrgetter(*CONTRACT)
CHANGING = {**MUTABLE, **OWN, **HELD}
STATE = {"task_id": "text", **dict.fromkeys(QUEUED, "bigint"), **CHANGING}
RECEIPT, PROGRESS = typed(stored.Receipt), typed(stored.Progress)


def task_columns(task: str = "t.", state: str = "s.") -> str:
    """Return the columns of a Task, from its two rows."""
    return ", ".join((task if name in CONTRACT else state) + name for name in FIELDS)


def row_columns(task: str = "t.", state: str = "s.", progress: str = "p.") -> str:
    """Return the columns from which `named_row` makes a task, its lease and its progress."""
    return (f"{task_columns(task, state)}, {state}task_id, {listed(HELD, state)}, {state}told, "
            f"{listed(PROGRESS, progress)}")


ROW = row_columns()
LEASE_AT, TOLD_AT = len(FIELDS), len(FIELDS) + 1 + len(HELD)
PAYLOAD_AT = FIELDS.index("payload")


def named_row(row: tuple[Any, ...]) -> tuple[stored.Task, stored.Lease | None, stored.Progress | None]:
    """Make a task, its lease and its progress from a row of `row_columns`."""
    lease, progress = row[LEASE_AT:TOLD_AT], row[TOLD_AT + 1:]
    return (stored.Task(*row[:LEASE_AT]), stored.Lease(*lease) if lease[1] is not None else None,
            stored.Progress(*progress) if progress[0] is not None else None)


def is_read(row: tuple[Any, ...]) -> bool:
    """Whether a row has its payload."""
    return row[PAYLOAD_AT] is not None


def is_stale(row: tuple[Any, ...]) -> bool:
    """Whether the progress in a row is older than its state, because the statement waited for the state's row lock."""
    return bool((row[TOLD_AT + 3] or 0) != row[TOLD_AT])


BEHIND_WALL = "SELECT set_config('app.tenant_id', $1, true)"
# Of a transaction through PgBouncer, whose sessions have settings of their own: its client may be gone without a word.
HASTEN = ("SELECT set_config('statement_timeout', $1, true), "
          "set_config('idle_in_transaction_session_timeout', $1, true)")
LOCK_WRITERS = "SELECT pg_advisory_xact_lock_shared($1::int, key) FROM unnest($2::int[]) AS key"
LOCK_ALONE = LOCK_WRITERS.replace("_shared", "")
LOCK_SHARED = LOCK_WRITERS.replace("SELECT ", "SELECT set_config('lock_timeout', '200', true), ")     # milliseconds
LOCK_TURNS = "SELECT pg_advisory_xact_lock(key) FROM unnest($1::bigint[]) AS key"
WRITERS = 0x6761_7465       # the first half of the writers lock's key; the second half is writers_key


def writers_key(tenant: uuid.UUID) -> int:
    """Return the second half of the key of a tenant's writers lock; tenants that share a key only wait needlessly."""
    return tenant.int % (1 << 31)


# Name locks: advisory locks for the names of instances and jobs, held by a session.
NAME_KEY = "hashtextextended({0}, 25959)"
NAME_IS_HELD = f"""{NAME_KEY.format('i.instance_id::text')} IN (
    SELECT classid::bigint << 32 | objid::bigint FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 1 AND granted
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"""

# A frozen process holds its lock, so the lock counts for six heartbeats, or ten seconds if that is more.  Fences make
# it safe to go on without such a process.
SERVES = f"({NAME_IS_HELD} AND beat_at > now() - make_interval(secs => greatest(6 * beat_seconds, 10)))"

# Loading.  Parameters are written as `:name`.

# How a batch names tasks: each of these fields of `Needs`, and the query that finds their ids.
NAMED = {
    "tasks": "SELECT unnest(:tasks::text[]) AS task_id",
    "keys": """SELECT t.task_id
        FROM unnest(:owner_kinds::text[], :owner_ids::text[], :keys::text[]) AS k (kind, id, key),
        LATERAL (SELECT task_id FROM asyncgate.tasks WHERE tenant_id = :tenant AND owner_kind = k.kind
                 AND owner_id = k.id AND idempotency_key = k.key LIMIT 1) AS t""",
    "leases": """SELECT s.task_id FROM unnest(:leases::text[]) AS k (id),
        LATERAL (SELECT task_id FROM asyncgate.states WHERE tenant_id = :tenant AND lease_id = k.id
                 AND status IN ('leased', 'running') LIMIT 1) AS s""",
    "repeats": """SELECT s.task_id
        FROM unnest(:worker_kinds::text[], :worker_ids::text[], :claims::text[]) AS k (kind, id, claim),
        LATERAL (SELECT task_id FROM asyncgate.states WHERE tenant_id = :tenant AND worker_kind = k.kind
                 AND worker_id = k.id AND claim_id = k.claim AND status IN ('leased', 'running') LIMIT 1000) AS s"""}
# Rows are locked in one order, so that no two batches wait for each other's: that of the ids in `bind_needs`, or, of
# several ways to name them, each with its own collation, that of COLLATE.
BY_IDS_ALONE = f"""
SELECT {{asked_for}}::bigint AS number, s.* FROM unnest(:tasks::text[]) AS i (id), LATERAL (
    SELECT {listed(STATE)} FROM asyncgate.states
    WHERE tenant_id = :tenant AND task_id = i.id LIMIT 1 FOR UPDATE) AS s"""
LOCKED = f"""
ids AS MATERIALIZED (
    {{found}}),
named AS MATERIALIZED (
    SELECT s.* FROM (SELECT task_id FROM ids ORDER BY task_id COLLATE "C") AS i, LATERAL (
        SELECT {listed(STATE)} FROM asyncgate.states
        WHERE tenant_id = :tenant AND task_id = i.task_id LIMIT 1 FOR UPDATE) AS s)"""

# The best tasks of the only lane that is asked for, read from its head.
OFFERED_OF_LANE = f"""
SELECT 0::bigint AS number, s.* FROM (
    SELECT {listed(STATE)} FROM asyncgate.states
    WHERE tenant_id = :tenant AND lane = :lane AND status = 'queued' AND ready
    ORDER BY priority DESC, task_id LIMIT :most::bigint FOR UPDATE SKIP LOCKED) AS s"""
# The best tasks of each group of lanes, no more than wanted, because other claims skip the rows that are locked here.
OFFERED = f"""
groups AS (SELECT * FROM unnest(:groups::bigint[], :wanted::bigint[]) AS g (number, most)),
candidates AS MATERIALIZED (
    SELECT g.number, c.* FROM groups AS g, LATERAL (
        SELECT c.* FROM unnest(:lane_groups::bigint[], :lanes::bigint[], :priorities::bigint[], :starts::text[])
            AS w (number, lane, priority, start), LATERAL (
            (SELECT lane, priority, task_id FROM asyncgate.states
             WHERE tenant_id = :tenant AND lane = w.lane AND status = 'queued' AND ready
             AND priority = w.priority AND task_id >= w.start
             ORDER BY priority DESC, task_id LIMIT g.most + :slack::bigint)
            UNION ALL
            (SELECT lane, priority, task_id FROM asyncgate.states
             WHERE tenant_id = :tenant AND lane = w.lane AND status = 'queued' AND ready AND priority < w.priority
             ORDER BY priority DESC, task_id LIMIT g.most + :slack::bigint)) AS c
        WHERE w.number = g.number ORDER BY c.priority DESC, c.task_id LIMIT g.most + :slack::bigint) AS c),
offered AS MATERIALIZED (
    SELECT s.* FROM groups AS g, LATERAL (
        SELECT g.number, s.* FROM (
            SELECT * FROM candidates WHERE number = g.number ORDER BY priority DESC, task_id) AS c, LATERAL (
            SELECT {listed(STATE)} FROM asyncgate.states
            WHERE tenant_id = :tenant AND lane = c.lane AND priority = c.priority AND task_id = c.task_id
            AND status = 'queued' AND ready FOR UPDATE SKIP LOCKED) AS s
        LIMIT g.most) AS s)"""
FULL = """EXISTS (SELECT FROM groups AS g WHERE (SELECT count(*) FROM candidates AS c WHERE c.number = g.number)
                    = g.most + :slack::bigint
                AND (SELECT count(*) FROM offered AS o WHERE o.number = g.number) < g.most)"""
# If fewer are offered, others had locked them: who is late for a row lock may find the task taken by a claim that began
# later, and the snapshot does not have the one that came in its place.
SEEN = """(SELECT sum(least(g.most, (SELECT count(*) FROM candidates AS c WHERE c.number = g.number)))::bigint
            FROM groups AS g)"""
SEEN_OF_LANE = """(SELECT count(*) FROM (SELECT FROM asyncgate.states WHERE tenant_id = :tenant AND lane = :lane
                                          AND status = 'queued' AND ready LIMIT :most::bigint) AS c)"""
# Only the first delayed task is checked: clock_timestamp() is volatile, so it cannot bound an index scan.
DUE = """coalesce((SELECT next_eligible_at FROM asyncgate.states
                   WHERE tenant_id = :tenant AND status = 'queued' AND NOT ready AND held IS NULL
                   ORDER BY next_eligible_at LIMIT 1)
                  <= extract(epoch FROM clock_timestamp())::float8 + :skew, false)"""

# The payload of an offered task, null behind those that are enough for all claims; of how many, `Portions` explains.
# The length of a stored text is known without reading the text.
PORTION = f"""CASE WHEN coalesce(sum(least(octet_length(t.payload) + coalesce(octet_length(p.progress), 0),
                                           {MOST_PAGE_BYTES})) OVER (
                      PARTITION BY s.number ORDER BY s.priority DESC, s.task_id
                      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) <= :portions::bigint * {MOST_PAGE_BYTES}
                  OR s.number = {{asked_for}} THEN t.payload END"""

PAUSED = "(SELECT listed FROM asyncgate.pauses WHERE tenant_id = :tenant)"


class Head(NamedTuple):
    """The columns at the beginning of each row of LOAD."""

    clock: float                # the time when all row locks were held
    transaction: str | None     # its number; None of a claim that has locked nothing
    seconds: float              # how long it took
    lanes: str                  # the sum of the lanes' ids; a difference shows that another process changed the lanes
    newest: str | None          # the newest receipt
    pauses: str | None          # what is paused, if tasks are claimed
    due: bool                   # whether delayed tasks must be promoted
    full: bool                  # whether a group with too few offers may have more candidates than were read
    seen: int                   # how many candidates there were, no more than wanted of each group
    group: int | None           # the group of lanes for which the row is offered, or ASKED_FOR; None: no row


TRANSACTION = "pg_current_xact_id()::text"
HEAD, ASKED_FOR = len(Head._fields), -1
PORTIONED_ROW = ROW.replace("t.payload,", f"{PORTION.format(asked_for=ASKED_FOR)},")


@cache
def load(named: tuple[str, ...], offered: bool, claiming: bool = False, portioned: bool = False,
         of_lane: bool = False, limited: bool = False) -> tuple[str, tuple[str, ...]]:
    """Return the LOAD statement of batches that name tasks in these ways or are offered some, and its parameters.

    A batch that is `claiming` learns what is paused; if everything is, it is offered nothing.  `portioned`: of many
    large tasks, those that no claim can get are offered without their payloads.  `of_lane`: of the only lane that its
    claims may be offered tasks of, and from its head; then no search is needed further down.  `limited`: tasks with
    limits, which are read by turns, may have become due.

    Clock: it is read for each returned row, so the last row's time is later than the last row lock.  The transaction's
    number is asked for here, because the answer to SAVE can be lost together with that to COMMIT.
    """
    tables, rows = list[str](), list[str]()
    if named == ("tasks",):
        rows.append(BY_IDS_ALONE.format(asked_for=ASKED_FOR))
    elif named:
        tables.append(LOCKED.format(found="\n    UNION ".join([NAMED[way] for way in named])))
        rows.append(f"SELECT {ASKED_FOR}::bigint AS number, {listed(STATE)} FROM named")
    if offered and not of_lane:
        tables.append(OFFERED)
    if offered:
        rows.append(OFFERED_OF_LANE if of_lane else f"SELECT number, {listed(STATE)} FROM offered")
    row = PORTIONED_ROW if portioned else ROW
    number = TRANSACTION.replace("id()", "id_if_assigned()") if claiming else TRANSACTION
    joins = f"""
LEFT JOIN ({' UNION ALL '.join(rows)}) AS s ON true
LEFT JOIN LATERAL (SELECT {listed(CONTRACT)} FROM asyncgate.tasks
                   WHERE tenant_id = :tenant AND task_id = s.task_id LIMIT 1) AS t ON true
LEFT JOIN LATERAL (SELECT {listed(PROGRESS)} FROM asyncgate.progress
                   WHERE tenant_id = :tenant AND task_id = s.task_id AND s.told > 0 LIMIT 1) AS p ON true"""
    return number_parameters(f"""{'WITH ' * bool(tables)}{','.join(tables)}
SELECT extract(epoch FROM clock_timestamp())::float8 + :skew::float8, {number},
       extract(epoch FROM clock_timestamp() - statement_timestamp())::float8, one.*,
       {f's.number, {row}' if rows else 'NULL'}
FROM (SELECT (SELECT coalesce(sum(lane), 0)::text FROM asyncgate.lanes WHERE tenant_id = :tenant::uuid),
             (SELECT receipt_id FROM asyncgate.receipts WHERE tenant_id = :tenant ORDER BY receipt_id DESC LIMIT 1),
             {PAUSED if claiming else 'NULL::text'}, {DUE if offered or limited else 'false'},
             {FULL if offered and not of_lane else 'false'},
             {(SEEN_OF_LANE if of_lane else SEEN) if offered else '0::bigint'}) AS one{joins if rows else ''}""")


def read_load(rows: Fetched) -> tuple[Head, Fetched, Fetched]:
    """Return the head of what LOAD answered, the rows that were named, and those that are offered."""
    named, offered = Fetched(), Fetched()
    for row in rows:
        if (group := row[HEAD - 1]) is not None:
            (named if group == ASKED_FOR else offered).append(row[HEAD:])
    return Head(*rows[-1][:HEAD]), named, offered


def number_parameters(template: str) -> tuple[str, tuple[str, ...]]:
    """Replace each `:name` in a statement by a number; return the statement and the names in order."""
    names: dict[str, str] = {}

    def place(match: re.Match[str]) -> str:
        return names.setdefault(match[1], f"${len(names) + 1}")
    return re.sub(r"(?<!:):([a-z_]+)", place, template), tuple(names)


def columns(rows: Collection[tuple[Any, ...]], width: int) -> list[list[Any]]:
    """Turn rows into a list of columns."""
    return [[row[at] for row in rows] for at in range(width)]


def arrays(names: Collection[str], rows: Collection[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Turn rows into columns by name."""
    return dict(zip(names, columns(rows, len(names)), strict=True))


def bind_needs(needs: Needs) -> dict[str, Any]:
    """Return the arguments of LOAD for the tasks that a batch names."""
    return {"tasks": sorted(needs.tasks), **arrays(("owner_kinds", "owner_ids", "keys"), needs.keys),
            "leases": list(needs.leases), **arrays(("worker_kinds", "worker_ids", "claims"), needs.repeats)}


def bind_wanted(wanted: dict[frozenset[int], int], slack: int,
                starts: Callable[[int], tuple[int, str]]) -> dict[str, Any]:
    """Return the arguments of LOAD for claimable tasks: how many of each group of lanes, and where each lane starts."""
    groups = list(enumerate(wanted.items()))
    probes = [(number, lane, *starts(lane)) for number, (lanes, _) in groups for lane in lanes]
    return {**arrays(("groups", "wanted"), [(number, most) for number, (_, most) in groups]),
            **arrays(("lane_groups", "lanes", "priorities", "starts"), probes), "slack": slack,
            "lane": probes[0][1], "most": groups[0][1][1]}


LANES = "SELECT lane, type, capabilities, pattern FROM asyncgate.lanes WHERE tenant_id = $1"
WAITING_LANES = """
SELECT l.pattern, sum(q.queued)::bigint FROM asyncgate.lanes AS l JOIN asyncgate.queues AS q USING (tenant_id, lane)
WHERE l.tenant_id = $1 AND l.pattern IS NOT NULL GROUP BY l.pattern"""
COUNT_HOLDS = """
SELECT count(*) FROM (SELECT FROM asyncgate.holds WHERE tenant_id = $1 AND limit_name = $2 LIMIT $3) AS h"""
COUNT_KEY_HOLDS = COUNT_HOLDS.replace("limit_name = $2", "limit_name = $2 AND limit_key = $4")
EMPTY_LANES = """
SELECT l.lane FROM asyncgate.lanes AS l
WHERE l.tenant_id = $1
AND NOT EXISTS (SELECT FROM asyncgate.states WHERE tenant_id = $1 AND lane = l.lane AND status = 'queued' AND ready)
AND l.lane NOT IN (SELECT lane FROM asyncgate.states
                   WHERE tenant_id = $1 AND status = 'queued' AND NOT ready AND held IS NULL)
AND l.lane NOT IN (SELECT lane FROM asyncgate.states WHERE tenant_id = $1 AND status IN ('leased', 'running'))"""
# Lanes of which the numbers of all processes are zero together, and have been for a while.
EMPTY_QUEUES = """
SELECT lane FROM asyncgate.queues WHERE tenant_id = $1
GROUP BY lane HAVING sum(queued) = 0 AND sum(held) = 0 AND sum(leased) = 0 AND max(counted_at) <= $2"""
PROMOTE = """
UPDATE asyncgate.states SET ready = true
WHERE tenant_id = $1 AND task_id = ANY (ARRAY(
    SELECT task_id FROM asyncgate.states
    WHERE tenant_id = $1 AND status = 'queued' AND NOT ready AND held IS NULL AND next_eligible_at <= $2
    ORDER BY next_eligible_at LIMIT $3 FOR UPDATE SKIP LOCKED))"""

# Saving: kind of change → its columns → its statement.  An existing row is changed by an INSERT with ON CONFLICT, which
# finds it by its key; an UPDATE joined with the new values may be planned as a scan over all rows of the tenant.  For
# the same reason rows are deleted by `= ANY`.


def insert(table: str, names: Iterable[str], key: str | None = None, changed: Iterable[str] = (),
           also: str = "") -> str:
    """Return an INSERT of whole rows; with a key, an existing row gets the new values of the `changed` columns."""
    names = list(names)
    sets = ", ".join(f"{name} = excluded.{name}" for name in changed) + also
    upsert = "" if key is None else f" ON CONFLICT (tenant_id{', ' * bool(key)}{key}) DO UPDATE SET {sets}"
    return (f"INSERT INTO asyncgate.{table} AS old (tenant_id, {listed(names)}) "
            f"SELECT :tenant::uuid, r.* FROM {{rows}}{upsert}")


def delete_by_key(kind: type[Struct]) -> str:
    """Return a DELETE of rows that are found by their keys."""
    table, (first, *others) = stored.RECORDS[kind], stored.export_order(kind)
    both = f" AND ({first}, {', '.join(others)}) IN (SELECT r.* FROM {{rows}})" if others else ""
    return f"DELETE FROM asyncgate.{table} WHERE tenant_id = :tenant AND {among(first)}{both}"


def among(column: str) -> str:
    """Return the condition that a column has one of the values in the rows of a change."""
    return f"{column} = ANY (ARRAY(SELECT r.{column} FROM {{rows}}))"


NOTHING = " ON CONFLICT DO NOTHING"
INSERT_TENANT = f"INSERT INTO asyncgate.tenants (tenant_id, since) VALUES ($1, $2){NOTHING}"
COUNTED = ("queued", "held", "leased")
QUEUE = {"lane": "bigint", "type": "text", "capabilities": "text", **dict.fromkeys(COUNTED, "bigint"),
         "counted_at": "float8", "slot": "bigint"}
METERED = typed(stored.Meter)
METER = {**METERED, "passed": "bigint"}       # and how many seconds of its period have passed
NEW_BODIES = "(SELECT coalesce(sum(bytes), 0)::bigint FROM receipts)"
METERED_NOW = ", ".join({"receipt_bytes": "r.receipt_bytes + {stored}", "receipt_moments": (
    "r.receipt_moments + r.passed * {stored}")}.get(name, f"r.{name}") for name in METERED)
LANE = {"lane": "bigint", "type": "text", "capabilities": "text", "pattern": "text"}
TO = {"to_kind": "text", "to_id": "text", "receipt_id": "text"}
EDGE = {"child_id": "text", "parent_id": "text"}
DELIVERY = {"receipt_id": "text", "delivered_at": "float8"}
STATED = {**RECEIPT, "parent_id": "text"}
EVENT, AUDIT, OUTGOING, ENTRY = typed(stored.Event), typed(stored.Audit), typed(stored.Outgoing), typed(stored.Entry)
SAVES: dict[str, tuple[dict[str, str], str]] = {
    "lanes": (LANE, insert("lanes", LANE) + NOTHING),
    "queues": (QUEUE, insert("queues", QUEUE, "lane, slot", (), ", ".join(
        (*(f"{name} = old.{name} + excluded.{name}" for name in COUNTED), "counted_at = excluded.counted_at")))),
    "contracts": ({**CONTRACT, "summary": "text"}, insert("tasks", [*CONTRACT, "summary"])),
    "states": (STATE, insert("states", STATE)),
    # Upkeep may check too early, never too late: an unchanged check_at keeps the update HOT, and upkeep moves it later.
    "moved": (STATE, insert("states", STATE, "task_id", ["priority", *(n for n in CHANGING if n != "check_at")],
                            ", check_at = CASE WHEN excluded.check_at > old.check_at THEN old.check_at "
                            "ELSE excluded.check_at END")),
    # Tasks of which only the lease has changed.
    "kept": (STATE, insert("states", STATE, "task_id", HELD, ", check_at = least(old.check_at, excluded.expires_at)")),
    "progress": (PROGRESS, insert("progress", PROGRESS, "task_id", PROGRESS)),
    "receipts": (STATED, insert("receipts", STATED) + " ON CONFLICT (tenant_id, task_id, receipt_key) DO NOTHING"),
    # Of the bodies of receipts only those count that this statement stores.
    "meters": (METER, f"INSERT INTO asyncgate.meters AS old (tenant_id, {listed(METERED)}) "
               f"SELECT :tenant::uuid, {METERED_NOW} FROM {{rows}} ON CONFLICT (tenant_id, period, slot) DO UPDATE SET "
               + ", ".join(f"{name} = old.{name} + excluded.{name}" for name in [*METERED][2:])),
    # Only together with its receipt, whose INSERT returns its id: a receipt stored earlier is not sent again.
    "posted": (OUTGOING, insert("outbox", OUTGOING) + " WHERE r.receipt_id IN (SELECT receipt_id FROM receipts)"),
    "edges": (EDGE, insert("edges", EDGE)),
    "opened": (TO, insert("obligations", TO)),
    # Found one by one and deleted by ctid: Postgres 16 and older treat `= ANY` on a later column of an index as a
    # filter.  The rows cannot move meanwhile, because a batch that discharges a task has its row lock.
    "closed": (TO, "DELETE FROM asyncgate.obligations WHERE tenant_id = :tenant AND ctid = ANY (ARRAY("
                   "SELECT o.ctid FROM {rows}, LATERAL ("
                   "SELECT ctid FROM asyncgate.obligations WHERE tenant_id = :tenant AND to_kind = r.to_kind "
                   "AND to_id = r.to_id AND receipt_id = r.receipt_id LIMIT 1) AS o))"),
    "events": (EVENT, insert("events", EVENT)),
    "audit": (AUDIT, insert("audit", AUDIT)),
    "deliveries": (DELIVERY, insert("deliveries", DELIVERY, "receipt_id", DELIVERY)),
    **{f"kept_{table}": (typed(kind), insert(table, typed(kind)) if CARDS[kind].append_only else insert(
           table, typed(kind), ", ".join(stored.export_order(kind)), typed(kind))) for kind,
       table in stored.RECORDS.items()},
    **{f"dropped_{table}": (dict.fromkeys(stored.export_order(kind), "text"), delete_by_key(kind))
       for kind, table in stored.RECORDS.items() if CARDS[kind].droppable},
    "dropped_outbox": ({"receipt_id": "text"}, "DELETE FROM asyncgate.outbox WHERE tenant_id = :tenant "
                       "AND ctid = ANY (ARRAY(SELECT o.ctid FROM {rows}, LATERAL ("
                       "SELECT ctid FROM asyncgate.outbox WHERE tenant_id = :tenant "
                       "AND receipt_id = r.receipt_id LIMIT 1 FOR UPDATE) AS o))"),
    # What is dropped of any minute is all that there is of it.
    "dropped_traffic": ({"minute": "text", "process": "text"}, "DELETE FROM asyncgate.traffic "
                        f"WHERE tenant_id = :tenant AND {among('minute')} AND {among('process')}"),
}


def unpacked(packed: str, columns: dict[str, str]) -> str:
    """Return the source of the rows `r` that one parameter holds; see `pack`."""
    fields = ", ".join(f"(e->>{at})::{kind} AS {name}" for at, (name, kind) in enumerate(columns.items()))
    return f"(SELECT {fields} FROM jsonb_array_elements({packed}::jsonb) AS e) AS r"


def pack(rows: Collection[tuple[Any, ...]]) -> str:
    """Return rows as one parameter: a JSON array of arrays.

    An array for each column was measured to take three times as long to send, and four times to read: Postgres copies
    each of them into a table of its own, even for one row.
    """
    return msgspec.json.encode(rows).decode()


def update(names: Iterable[str], check_at: str) -> str:
    """Return the UPDATE of a row of `states`, whose new fields are parameters."""
    sets = ", ".join(f"{name} = :{name}::{STATE[name]}" for name in names if name != "check_at")
    return (f"UPDATE asyncgate.states SET {sets}, check_at = {check_at} "
            "WHERE tenant_id = :tenant AND task_id = :task_id")


# What costs less by the key of a row, if rows are few.
ROW_BY_ROW = {
    "moved": update(["priority", *CHANGING], "CASE WHEN :check_at > check_at THEN check_at ELSE :check_at END"),
    "kept": update(HELD, "least(check_at, :expires_at)"),
    "closed": "DELETE FROM asyncgate.obligations "
              "WHERE tenant_id = :tenant AND to_kind = :to_kind AND to_id = :to_id AND receipt_id = :receipt_id"}
# Of the bodies of receipts only those count that their own statement stores, and only these receipts are sent.
TOGETHER = ("receipts", "meters", "posted")
MOST_BOUND = 3         # rows that travel field by field, which Postgres reads faster than JSON


@cache
def save(parts: tuple[tuple[str, int], ...]) -> str:
    """Return the statement that saves rows of tables: so many of each, field by field, or, with 0, any as JSON.

    The tenant is its first parameter.
    """
    texts, at = [], 2
    for table, number in parts:
        columns, statement = SAVES[table]
        width = len(columns)
        rows = ", ".join([f"({listed([f'${place}::{kind}' for place, kind in enumerate(columns.values(), first)])})"
                          for first in range(at, at + number * width, width)])
        source = f"(VALUES {rows}) AS r ({listed(columns)})" if number else unpacked(f"${at}", columns)
        at += number * width or 1
        text = statement.format(rows=source, stored=NEW_BODIES if parts[0][0] == "receipts" else "0")
        texts.append(f"{text} RETURNING receipt_id, octet_length(body) AS bytes" if table == "receipts" else text)
    named = ", ".join(f"{table} AS ({text})" for (table, _), text in zip(parts, texts[:-1], strict=False))
    return f"{f'WITH {named} ' * bool(named)}{texts[-1]}".replace(":tenant", "$1")


@cache
def save_row(table: str) -> tuple[str, Callable[[tuple[Any, ...]], tuple[Any, ...]]]:
    """Return the statement that saves one row, and what takes its parameters from the tenant's id and the row."""
    if table not in ROW_BY_ROW:
        return save(((table, 1),)), tuple
    text, names = number_parameters(ROW_BY_ROW[table])
    return text, itemgetter(*[["tenant", *SAVES[table][0]].index(name) for name in names])


def list_saves(tenant_id: str, changes: dict[str, list[tuple[Any, ...]]]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the statements that save the rows of a batch, and their arguments."""
    for table, rows in changes.items():
        if not rows or (table in TOGETHER[1:] and changes["receipts"]):
            continue
        if len(rows) <= MOST_BOUND and table != "receipts":     # one by one: each further text is planned anew
            text, take = save_row(table)
            yield from [(text, [*take((tenant_id, *row))]) for row in rows]
            continue
        parts = [part for part in TOGETHER if changes[part]] if table == "receipts" else [table]
        given, shape = [tenant_id], list[tuple[str, int]]()
        for part in parts:
            few = len(changes[part]) < MOST_BOUND
            given += itertools.chain(*changes[part]) if few else [pack(changes[part])]
            shape.append((part, few * len(changes[part])))
        yield save(tuple(shape)), given


def changes(work: Work, slot: int) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows that a batch must save, by kind of change; `slot` is where it counts."""
    changed = {task_id: None for task_id in (*work.moved, *work.progressed) if task_id not in work.added}
    kept = [task_id for task_id in work.leased if task_id not in work.added and task_id not in changed]
    receipts, moves = work.written.values(), count_moves(work.before, work.added, work.moved)
    meter = measure_use(work, sum([move[5] for move in moves]), 0, slot)
    return {
        "lanes": [(lane, type, json.dumps(sorted(needed)), pattern)
                  for lane, (type, needed, pattern) in sorted(work.lanes.items())],
        "queues": [(*row, work.now, slot) for row in moves],
        "contracts": [(*contract_of(task), summarize(task)) for task in work.added.values()],
        "states": [state_row(work, task_id) for task_id in work.added],
        "moved": [state_row(work, task_id) for task_id in changed],
        "kept": [state_row(work, task_id) for task_id in kept],
        "progress": [astuple(progress) for progress in work.progressed.values()],
        "receipts": [(*astuple(receipt)[:len(RECEIPT)], receipt.parents[0] if receipt.parents else None)
                     for receipt in receipts],
        "meters": [] if meter is None else [(*astuple(meter), passed_ms(work.now) // 1000)],
        "posted": [astuple(row) for row in work.posted.values()],
        "edges": [(receipt.receipt_id, parent) for receipt in receipts for parent in receipt.parents[1:]],
        "opened": [(to.kind, to.id, receipt_id) for receipt_id, to in work.opened.items()],
        "closed": [(to.kind, to.id, receipt_id) for receipt_id, to in work.closed.items()],
        "events": [astuple(event) for event in work.events.values()],
        "audit": [astuple(line) for line in work.audited.values()],
        "deliveries": sorted(work.delivered.items()),
        **records(work)}


def records(work: Work) -> dict[str, list[tuple[Any, ...]]]:
    """Return the records to keep and the keys of those to drop, by table, in the order of keys."""
    rows: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for kind, key in sorted((entry for entry in work.kept if not is_dropped(work, entry)), key=lambda entry: entry[1]):
        row = work.kept[kind, key]
        rows[f"{'dropped' if row is None else 'kept'}_{stored.RECORDS[kind]}"].append(key if row is None
                                                                                      else astuple(row))
    return rows


# Rows that prove that a batch was committed, the best first.  Saved rows of a table in SURE are neither deleted nor
# changed a moment later, so a missing row also proves that the batch was not committed.  Lanes, edges and obligations
# are not proof, because another batch may save the same row; but none of them is saved without another row.
SURE = ("contracts", "events", "audit",
        *(f"kept_{table}" for kind, table in stored.RECORDS.items() if CARDS[kind].append_only))
PROOFS = (*SURE, "receipts", "moved", "kept", "progress", "deliveries",
          *(f"kept_{table}" for kind, table in stored.RECORDS.items() if not CARDS[kind].append_only))
TABLES = {"contracts": "tasks", "moved": "states", "kept": "states"}
COMPARED = {"moved": ["task_id", "priority", *(name for name in CHANGING if name != "check_at")],
            "kept": ["task_id", *HELD]}
KEYS = {"events": ("task_id", "event_id"),
        **{f"kept_{table}": stored.export_order(kind) for kind, table in stored.RECORDS.items()}}


class Proof(NamedTuple):
    """A query for a saved row that shows whether a batch was committed."""

    statement: str
    row: str
    sure: bool                  # whether a missing row proves that the batch was not committed


def find_proof(changes: dict[str, list[tuple[Any, ...]]]) -> Proof | None:
    """Return the query that shows whether a batch was committed, if its COMMIT gets no answer."""
    for table in PROOFS:
        if rows := changes.get(table):
            return Proof(proof_statement(table), pack(rows[:1]), table in SURE)
    return None


@cache
def proof_statement(table: str) -> str:
    """Return the statement that checks whether a row is stored exactly as saved, found by an index."""
    types = SAVES[table][0]
    key = KEYS.get(table, (next(iter(types)),))
    same = "".join(f" AND t.{name} = r.{name}" for name in key)
    compared = COMPARED.get(table, list(types))
    return (f"SELECT EXISTS (SELECT FROM {unpacked('$2', types)}, LATERAL ("
            f"SELECT * FROM asyncgate.{TABLES.get(table, table.removeprefix('kept_'))} AS t "
            f"WHERE t.tenant_id = $1{same} LIMIT 1) AS t "
            f"WHERE ({listed(compared, 't.')}) IS NOT DISTINCT FROM ({listed(compared, 'r.')}))")


# Rows that only these functions may delete; each function checks that the row may be deleted.
DROPS = {stored.Receipt: "asyncgate.archive_receipts($1::text[])",
         stored.Archived: "asyncgate.forget_pointers($1::text[])",
         stored.Task: "asyncgate.prune_tasks($1::text[])", stored.Audit: "asyncgate.prune_audit($1::text[])",
         stored.Key: "asyncgate.erase_keys($1::text[])"}


def is_dropped(work: Work, entry: tuple[type[Struct], tuple[str, ...]]) -> bool:
    """Whether a batch drops a row that only one of these functions may delete."""
    return entry[0] in DROPS and work.kept[entry] is None


# Rows that only these functions may change, and of mutable ones the statements that change nothing else.
ERASES: dict[type[Struct], str] = {
    stored.Receipt: "SELECT asyncgate.erase_receipts({given})", stored.Event: "SELECT asyncgate.erase_events({given})",
    stored.Audit: "SELECT asyncgate.erase_audit({given})", stored.Entry: "SELECT asyncgate.erase_entries({given})",
    stored.Task: "UPDATE asyncgate.states AS s SET lost_to = n.lost_to FROM unnest({given}) AS n (task_id, lost_to) "
          "WHERE s.tenant_id = asyncgate.tenant() AND s.task_id = n.task_id",
    stored.Progress: "UPDATE asyncgate.progress AS p SET inputs = n.inputs "
              "FROM unnest({given}) AS n (task_id, inputs) "
              "WHERE p.tenant_id = asyncgate.tenant() AND p.task_id = n.task_id",
    stored.Lease: "UPDATE asyncgate.states AS s SET worker_id = n.worker_id, worker_instance = n.worker_instance, "
           "claim_id = n.claim_id, resumed_by = n.resumed_by "
           "FROM unnest({given}) AS n (task_id, worker_id, worker_instance, claim_id, resumed_by) "
           "WHERE s.tenant_id = asyncgate.tenant() AND s.task_id = n.task_id"}


def erase_statements(work: Work) -> Iterator[tuple[str, list[list[Any]]]]:
    """Yield the statements that take content away, and their arguments: the keys of rows, then their new fields."""
    if not work.erased:     # as in nearly all batches
        return
    for kind, statement in ERASES.items():
        if rows := [(*place, *(getattr(row, name) for name in CARDS[kind].erasable))
                    for (of, place), row in sorted(work.erased.items(), key=lambda entry: entry[0][1]) if of is kind]:
            width = len(rows[0])
            given = ", ".join(f"${at}::text[]" for at in range(1, width + 1))
            yield statement.format(given=given), columns(rows, width)


def amend_statements(work: Work) -> list[tuple[str, list[list[Any]]]]:
    """Return the call that replaces the contracts of tasks, behind the rows that say that no worker has had them."""
    rows = [(task.task_id, task.payload, task.payload_pointer, task.terms, summarize(task))
            for task in work.amended.values()]
    return [("SELECT asyncgate.amend_tasks($1::text[], $2::text[], $3::text[], $4::text[], $5::text[])",
             columns(rows, 5))] if rows else []


def drop_statements(work: Work) -> list[tuple[str, list[list[str]]]]:
    """Return the calls of these functions for a batch, and their arguments."""
    if not work.kept:       # as in most batches
        return []
    ids = {kind: sorted(entry[1][0] for entry in work.kept if entry[0] is kind and is_dropped(work, entry))
           for kind in DROPS}
    return [(f"SELECT {DROPS[kind]}", [given]) for kind, given in ids.items() if given]


def state_row(work: Work, task_id: str) -> tuple[Any, ...]:
    """Return a task's row in `states`, with its latest lease."""
    task, lease, progress = work.tasks[task_id], work.leases.get(task_id), work.progress.get(task_id)
    held = astuple(lease)[1:] if lease else (None,) * len(HELD)
    return (task_id, task.lane, task.priority, task.max_attempts, *astuple(task)[-len(MUTABLE):],
            task.offerable(work.now), check_at(task, lease), progress.sequence if progress else 0, *held)


def check_at(task: stored.Task, lease: stored.Lease | None) -> float | None:
    """Return when upkeep must check a task: at the end of its lease, its deadline, or when what it waits for is late.

    A task that is stuck is checked at once.
    """
    if is_stuck(task):
        return 0.0
    moments = [lease.expires_at] if lease and task.status in stored.ACTIVE else []
    if task.deadline_at is not None and task.status not in stored.TERMINAL:
        moments.append(task.deadline_at)
    if task.held in stored.AWAITING and task.next_eligible_at is not None:
        moments.append(task.next_eligible_at)
    return min(moments, default=None)


# Reading.


def record(kind: type[Struct], table: str) -> str:
    """Return the statement that reads records by their keys, given as one array for each column of the key."""
    key, names = stored.export_order(kind), listed(typed(kind))
    if not key:
        return f"SELECT {names} FROM asyncgate.{table} WHERE tenant_id = $1"
    given = ", ".join(f"${at}::text[]" for at, _ in enumerate(key, 2))
    same = " AND ".join(f"{name} = k.{name}" for name in key)
    # Batches add to meters without a turn key: whoever takes one away waits until they have, or lets them begin anew.
    lock = " FOR UPDATE" * (kind is stored.Meter)
    return (f"SELECT {listed(typed(kind), 'r.')} FROM unnest({given}) AS k ({listed(key)}), LATERAL ("
            f"SELECT {names} FROM asyncgate.{table} WHERE tenant_id = $1 AND {same} LIMIT 1{lock}) AS r")


ROWS = f"""
SELECT {ROW} FROM asyncgate.tasks AS t
JOIN LATERAL (SELECT {listed(STATE)} FROM asyncgate.states
              WHERE tenant_id = $1 AND task_id = t.task_id LIMIT 1) AS s ON true
LEFT JOIN LATERAL (SELECT {listed(PROGRESS)} FROM asyncgate.progress
                   WHERE tenant_id = $1 AND task_id = t.task_id LIMIT 1) AS p ON true
WHERE t.tenant_id = $1"""
FOUND = f"""
JOIN LATERAL (SELECT {listed([*CONTRACT, 'summary'])} FROM asyncgate.tasks
              WHERE tenant_id = $1 AND task_id = s.task_id LIMIT 1) AS t ON true
LEFT JOIN LATERAL (SELECT {listed(PROGRESS)} FROM asyncgate.progress
                   WHERE tenant_id = $1 AND task_id = s.task_id LIMIT 1) AS p ON true"""
# The same by what changes about a task, and by ids.
BY_STATE = f"SELECT {ROW} FROM asyncgate.states AS s {FOUND} WHERE s.tenant_id = $1"
BY_IDS = f"""
SELECT {ROW} FROM unnest($2::text[]) AS i (id)
JOIN LATERAL (SELECT {listed(STATE)} FROM asyncgate.states
              WHERE tenant_id = $1 AND task_id = i.id LIMIT 1) AS s ON true {FOUND} WHERE true"""
# What filters ask of tasks.
FACTS = """
JOIN LATERAL (SELECT task_id, status, held, updated_at FROM asyncgate.states
              WHERE tenant_id = $1 AND task_id = i.id LIMIT 1) AS s ON true
JOIN LATERAL (SELECT type, owner_kind, owner_id, parent_task_id, summary FROM asyncgate.tasks
              WHERE tenant_id = $1 AND task_id = i.id LIMIT 1) AS t ON true"""
TYPES_OF = """
WITH RECURSIVE found (type) AS (
    (SELECT type::text FROM asyncgate.tasks WHERE tenant_id = $1 AND type >= $2 AND type < $3 ORDER BY type LIMIT 1)
    UNION ALL
    SELECT (SELECT type::text FROM asyncgate.tasks AS t
            WHERE t.tenant_id = $1 AND t.type > found.type AND t.type < $3 ORDER BY t.type LIMIT 1)
    FROM found WHERE found.type IS NOT NULL)
SELECT type FROM found WHERE type IS NOT NULL LIMIT $4"""
ONE_TASK = f"SELECT {row_columns('(f.task).', '(f.state).', '(f.progress).')} FROM asyncgate.one_task($1, $2) AS f"
LEASES = f"""
SELECT t.type, s.* FROM (
    SELECT task_id, {listed(HELD)} FROM asyncgate.states WHERE tenant_id = $1 AND worker_kind = $2 AND worker_id = $3
    AND status IN ('leased', 'running') ORDER BY acquired_at, task_id) AS s
JOIN LATERAL (SELECT type FROM asyncgate.tasks WHERE tenant_id = $1 AND task_id = s.task_id LIMIT 1) AS t ON true"""
PROGRESS_OF = f"SELECT {listed(PROGRESS)} FROM asyncgate.progress WHERE tenant_id = $1 AND task_id = ANY ($2)"
FURTHER = """ARRAY(SELECT e.parent_id::text FROM asyncgate.edges AS e
                   WHERE e.tenant_id = $1 AND e.child_id = r.receipt_id)"""
RECEIPTS = f"""
SELECT {listed(STATED, 'r.')}, d.delivered_at, {FURTHER} FROM asyncgate.receipts AS r
LEFT JOIN LATERAL (SELECT delivered_at FROM asyncgate.deliveries
                   WHERE tenant_id = $1 AND receipt_id = r.receipt_id LIMIT 1) AS d ON true
WHERE r.tenant_id = $1"""
FAMILY = f"""
SELECT {listed(STATED, 'r.')}, NULL::float8, {FURTHER} FROM (
    SELECT unnest($2::text[]) AS receipt_id
    UNION SELECT c.receipt_id FROM unnest($2::text[]) AS k (id), LATERAL (
        SELECT receipt_id FROM asyncgate.receipts WHERE tenant_id = $1 AND parent_id = k.id LIMIT 1000) AS c
    UNION SELECT c.child_id FROM unnest($2::text[]) AS k (id), LATERAL (
        SELECT child_id FROM asyncgate.edges WHERE tenant_id = $1 AND parent_id = k.id LIMIT 1000) AS c) AS f, LATERAL (
    SELECT {listed(STATED)} FROM asyncgate.receipts WHERE tenant_id = $1 AND receipt_id = f.receipt_id LIMIT 1) AS r"""
ENDINGS = f"""
SELECT {listed(STATED, 'r.')}, NULL::float8, {FURTHER}
FROM unnest($2::text[], $3::text[]) AS k (task, lease), LATERAL (
    SELECT {listed(STATED)} FROM asyncgate.receipts
    WHERE tenant_id = $1 AND task_id = k.task AND lease_id = k.lease LIMIT 1000) AS r"""
STATES = f"""
SELECT {listed(STATED, 'r.')}, NULL::float8, {FURTHER}
FROM unnest($2::text[], $3::text[]) AS k (task, key), LATERAL (
    SELECT {listed(STATED)} FROM asyncgate.receipts
    WHERE tenant_id = $1 AND task_id = k.task AND receipt_key = k.key LIMIT 1) AS r"""
TERMINATED = """
SELECT EXISTS (SELECT FROM asyncgate.receipts
               WHERE tenant_id = $1 AND parent_id = $2 AND receipt_type = ANY ($3::text[]))
    OR EXISTS (SELECT FROM asyncgate.edges AS e, LATERAL (
                   SELECT FROM asyncgate.receipts WHERE tenant_id = $1 AND receipt_id = e.child_id
                   AND receipt_type = ANY ($3::text[]) LIMIT 1) AS r
               WHERE e.tenant_id = $1 AND e.parent_id = $2)"""
OPEN = f"""
SELECT {', '.join(f'(f.receipt).{name}' for name in STATED)}, f.delivered_at, f.further
FROM asyncgate.open_obligations($1, $2, $3, $4, $5) AS f"""
OPEN_FOR_ALL = f"""
SELECT {listed(STATED, 'r.')}, d.delivered_at, {FURTHER} FROM (
    SELECT receipt_id FROM asyncgate.obligations
    WHERE tenant_id = $1 AND receipt_id > $2 ORDER BY receipt_id LIMIT $3) AS o
JOIN LATERAL (SELECT {listed(STATED)} FROM asyncgate.receipts
              WHERE tenant_id = $1 AND receipt_id = o.receipt_id LIMIT 1) AS r ON true
LEFT JOIN LATERAL (SELECT delivered_at FROM asyncgate.deliveries
                   WHERE tenant_id = $1 AND receipt_id = o.receipt_id LIMIT 1) AS d ON true"""
SCHEDULES = f"""
SELECT {listed(typed(stored.Schedule))} FROM asyncgate.schedules
WHERE tenant_id = $1 AND schedule_id > $2 ORDER BY schedule_id LIMIT $3"""
SCHEDULES_OF = f"""
SELECT {listed(typed(stored.Schedule))} FROM asyncgate.schedules
WHERE tenant_id = $1 AND owner_kind = $2 AND owner_id = $3 AND schedule_id > $4 ORDER BY schedule_id LIMIT $5"""
WORKERS = f"""
SELECT {listed(typed(stored.Presence))} FROM asyncgate.presences
WHERE tenant_id = $1 AND claimed_at IS NOT NULL AND (kind, id) > ($2, $3) ORDER BY kind, id LIMIT $4"""
LATEST_WORKERS = f"""
SELECT {listed(typed(stored.Presence))} FROM asyncgate.presences
WHERE tenant_id = $1 AND claimed_at IS NOT NULL ORDER BY claimed_at DESC LIMIT $2"""
IDS_LIKE = {table: f"""
SELECT {id} FROM asyncgate.{name} WHERE tenant_id = $1 AND {id} >= $2 AND {id} < $3
UNION
SELECT {id} FROM (SELECT {id} FROM asyncgate.{name} WHERE tenant_id = $1 ORDER BY {id} DESC LIMIT $4) AS newest
WHERE right({id}, length($2)) = $2
LIMIT $5""" for table, name, id in ((stored.Task, "states", "task_id"), (stored.Receipt, "receipts", "receipt_id"))}
HOLDINGS = """
SELECT w.kind, w.id, (
    SELECT count(*) FROM (
        SELECT FROM asyncgate.states WHERE tenant_id = $1 AND worker_kind = w.kind AND worker_id = w.id
        AND status IN ('leased', 'running') LIMIT $4) AS l)
FROM unnest($2::text[], $3::text[]) AS w (kind, id)"""
COUNT_AHEAD = """
SELECT count(*) FROM (
    (SELECT FROM asyncgate.states WHERE tenant_id = $1 AND lane = $2 AND status = 'queued' AND ready AND priority > $3
     ORDER BY priority DESC, task_id LIMIT $5)
    UNION ALL
    (SELECT FROM asyncgate.states WHERE tenant_id = $1 AND lane = $2 AND status = 'queued' AND ready
     AND priority = $3 AND task_id < $4 ORDER BY task_id LIMIT $5)
    LIMIT $5) AS a"""
COUNT_AHEAD_IN_TURN = COUNT_AHEAD.replace("lane = $2", "lane = $2 AND limits = $6")
UNSENT_OF = f"""
SELECT {listed(OUTGOING, 'o.')} FROM (
    SELECT receipt_id FROM asyncgate.receipts WHERE tenant_id = $1 AND task_id = $2 LIMIT 1000) AS r, LATERAL (
    SELECT * FROM asyncgate.outbox WHERE tenant_id = $1 AND receipt_id = r.receipt_id LIMIT 1) AS o LIMIT $3"""
INSTANCE = f"""
SELECT instance_id::text, extract(epoch FROM beat_at)::float8, {SERVES}
FROM asyncgate.instances AS i WHERE instance_id = $1"""
RECORD = {kind: record(kind, table) for kind, table in stored.RECORDS.items()}
EVENTS = f"""
SELECT {listed(EVENT)} FROM asyncgate.events
WHERE tenant_id = $1 AND task_id = $2 AND event_id > $3 ORDER BY event_id LIMIT $4"""
NEXT_DUE = """
SELECT least((SELECT min(next_eligible_at) FROM asyncgate.states
              WHERE tenant_id = $1 AND status = 'queued' AND NOT ready AND held IS NULL AND next_eligible_at > $2),
             (SELECT min(until) FROM asyncgate.turns
              WHERE tenant_id = $1 AND stage = 'blocked' AND until IS NOT NULL AND until > $2))"""
QUEUES = """
SELECT lane, type::text, min(capabilities), sum(queued)::bigint, sum(held)::bigint, sum(leased)::bigint
FROM asyncgate.queues WHERE tenant_id = $1 GROUP BY lane, type HAVING true"""
DELAYED = f"""
SELECT lane, count(*) FILTER (WHERE next_eligible_at > $2), min(next_eligible_at), count(*) FROM (
    SELECT lane, next_eligible_at FROM asyncgate.states
    WHERE tenant_id = $1 AND status = 'queued' AND NOT ready AND held IS NULL
    ORDER BY next_eligible_at LIMIT {queries.DELAYED_COUNTED + 1}) AS s
GROUP BY lane"""
# From one priority of a lane to the next one: the oldest task of each priority is found by the index of the queue.
HEAD_OF = "priority, greatest(updated_at, coalesce(next_eligible_at, 0)) AS since"
OLDEST = f"""
SELECT l.lane, h.task_id, h.fence, h.since FROM unnest($2::bigint[]) AS l (lane), LATERAL (
    WITH RECURSIVE heads AS (
        (SELECT task_id::text, fence, {HEAD_OF}, 1 AS number FROM asyncgate.states
         WHERE tenant_id = $1 AND lane = l.lane AND status = 'queued' AND ready ORDER BY priority DESC, states.task_id
         LIMIT 1)
        UNION ALL
        SELECT s.*, h.number + 1 FROM heads AS h, LATERAL (
            SELECT task_id::text, fence, {HEAD_OF} FROM asyncgate.states
            WHERE tenant_id = $1 AND lane = l.lane AND status = 'queued' AND ready AND priority < h.priority
            ORDER BY priority DESC, states.task_id LIMIT 1) AS s
        WHERE h.number < {queries.MOST_PRIORITIES})
    SELECT * FROM heads) AS h"""
OVERDUE = f"""
SELECT tenant_id::text, kind, id FROM asyncgate.overdue($1, $2, $3, ARRAY(
    SELECT instance_id::text FROM asyncgate.instances AS i WHERE instance_id <> $4::text AND {SERVES}), $5)"""
LAST_SERVED = """
SELECT coalesce(extract(epoch FROM max(beat_at)), 0)::float8 FROM asyncgate.instances WHERE instance_id <> $1"""
BEGIN_WITH = """
SELECT value, extract(epoch FROM clock_timestamp())::float8 FROM asyncgate.meta WHERE name = 'cursor_key'"""
DEPTHS = f"SELECT * FROM asyncgate.depths($1, {queries.MOST_PRIORITIES}, {queries.DUE_LOOKED_AT})"
COUNT_OVERDUE = f"SELECT asyncgate.count_overdue($1, {queries.OVERDUE_COUNTED})"
CUT_CASCADES = "SELECT tenant::text, task_id FROM asyncgate.cut_cascades($1, $2)"
LIMIT_DEPTHS = f"SELECT * FROM asyncgate.limit_depths({queries.HOLDS_COUNTED})"
COUNT_UNANSWERED = f"SELECT number, since FROM asyncgate.count_unanswered({queries.UNANSWERED_COUNTED})"
LAPSES = "SELECT look_at, tenant_id::text, task_id FROM asyncgate.lapses($1, $2)"
COUNT = """
SELECT (SELECT count(*) FROM asyncgate.states WHERE tenant_id = $1 AND status IN ('queued', 'leased', 'running')),
       (SELECT count(*) FROM asyncgate.states WHERE tenant_id = $1 AND status IN ('leased', 'running')),
       (SELECT coalesce(sum(octet_length(body)), 0)::bigint FROM asyncgate.receipts WHERE tenant_id = $1),
       (SELECT count(*) FROM asyncgate.states WHERE tenant_id = $1 AND status IN ('succeeded', 'failed', 'canceled')),
       (SELECT coalesce(sum(step_bytes), 0)::bigint FROM asyncgate.progress WHERE tenant_id = $1)"""
LEASED = "SELECT coalesce(sum(leased), 0)::bigint FROM asyncgate.queues WHERE tenant_id = $1"
LEASED_OF_TYPE, LEASED_IN = f"{LEASED} AND type = $2", f"{LEASED} AND lane = $2"
LEASED_TO = f"""
SELECT count(*) FROM asyncgate.states WHERE tenant_id = $1 AND status IN ('leased', 'running') AND worker_id = $2
AND worker_kind IN ({', '.join([f"'{kind}'" for kind in get_args(wire.Kind)])})"""
TALLY = """
SELECT k.id, (SELECT count(*) FROM asyncgate.receipts WHERE tenant_id = $1 AND task_id = k.id)
FROM unnest($2::text[]) AS k (id)"""
ARCHIVED = (f"SELECT {listed(typed(stored.Archived))} FROM asyncgate.archived "
            "WHERE tenant_id = $1 AND task_id = $2 ORDER BY receipt_id")
FIND_KEY = (f"SELECT f.tenant::text, f.suspended, {listed(typed(stored.Key), '(f.key).')} "
            "FROM asyncgate.find_key($1) AS f")
UNSENT = "SELECT asyncgate.unsent()::text"
OPEN_WEBHOOKS = f"""
SELECT {listed(typed(stored_webhooks.Webhook))} FROM asyncgate.webhooks
WHERE tenant_id = $1 AND state <> 'ended' AND webhook_id > $2 ORDER BY webhook_id LIMIT $3"""
HANDOVER_TENANTS = "SELECT asyncgate.handover_tenants()::text"
WEBHOOK_TENANTS = "SELECT asyncgate.webhook_tenants()::text"
WAITING = f"""
SELECT {listed(OUTGOING)} FROM asyncgate.outbox
WHERE tenant_id = $1 AND state = 'waiting' AND receipt_id > $2 ORDER BY receipt_id LIMIT $3"""
STRICTLY_OFFERED = WAITING.replace("'waiting'", "'offered'")
ON_THE_WAY = f"""
SELECT {listed(OUTGOING, 'o.')} FROM unnest($2::text[]) AS k (id), LATERAL (
    SELECT * FROM asyncgate.outbox WHERE tenant_id = $1 AND receipt_id = k.id LIMIT 1) AS o"""
LAG = """
SELECT (SELECT count(*) FROM asyncgate.outbox WHERE tenant_id = $1 AND state = 'waiting'),
       (SELECT count(*) FROM asyncgate.outbox WHERE tenant_id = $1 AND state = 'parked'),
       (SELECT posted_at FROM asyncgate.outbox
        WHERE tenant_id = $1 AND state = 'waiting' ORDER BY receipt_id LIMIT 1)"""
ENTRIES = f"SELECT {listed(ENTRY)} FROM asyncgate.ledger WHERE tenant_id = $1 AND arrival > $2 AND arrival <= $3"
TENANTS = "SELECT asyncgate.all_tenants()::text"

# The newest receipt, and the start of the oldest open transaction that may still add receipts of this tenant: it holds
# the shared writers lock of `begin`.  Order: the statement's snapshot is older than its read of pg_locks, so no
# transaction can be missed.
OLDEST_WRITER = f"""
       (SELECT min(extract(epoch FROM coalesce(a.xact_start, '-infinity'))::float8) FROM pg_locks AS l
        LEFT JOIN pg_stat_activity AS a USING (pid)
        WHERE l.locktype = 'advisory' AND l.classid = {WRITERS} AND l.objid = $2::oid AND l.objsubid = 2
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()))"""
HORIZONS = {table: f"""
SELECT (SELECT {key} FROM asyncgate.{table} WHERE tenant_id = $1 ORDER BY {key} DESC LIMIT 1), {OLDEST_WRITER}"""
            for table, key in (("receipts", "receipt_id"), ("ledger", "arrival"))}
# And the first receipt for somebody that a strict gate has offered and may commit later.  Only of offered rows `reason`
# is JSON, and the planner is free to look at it before it looks at their state.
HORIZONS["settled"] = f"""{HORIZONS["receipts"]},
       (SELECT receipt_id FROM asyncgate.outbox WHERE tenant_id = $1 AND state = 'offered'
        AND coalesce(CASE state WHEN 'offered' THEN reason::json #>> '{{receipt,to_id}}' END = $3::text, true)
        ORDER BY receipt_id LIMIT 1)"""
# The same for changes of tasks, whose times are read behind that lock.  Order: this time is that of the statement's
# arrival, so a transaction that takes the lock behind this look changes tasks later.
SETTLED = f"SELECT extract(epoch FROM statement_timestamp())::float8, {OLDEST_WRITER} WHERE $1::uuid IS NOT NULL"


@cache
def export(table: type[Struct], keys: tuple[str, ...], limit: int) -> str:
    """Return the statement that reads the next rows of a table that stores one Struct per row."""
    after = ", ".join(f"${at}" for at, _ in enumerate(keys, 2))
    return (f"SELECT {listed(typed(table))} FROM asyncgate.{CARDS[table].table} "
            f"WHERE tenant_id = $1 AND ({listed(keys)}) > ({after}) ORDER BY {listed(keys)} LIMIT {limit:d}")


# What an index of tasks begins with, before the ids.
LEADING = {"status": ("s.status",), "type": ("t.type",), "parent_task_id": ("t.parent_task_id",),
           "owner": ("t.owner_kind", "t.owner_id")}


OF_STATES = ("changed", "held", "status")      # whose indexes are of what changes


def select_tasks(of: queries.TaskFilter, ranges: list[TaskRange], ids: list[str]) -> tuple[str, list[Any]]:
    """Return the statement that reads a page of tasks from some ranges, or of some ids, and its parameters."""
    given: list[Any] = [ids] if ids else []
    bind = make_binder(given)
    if ids:
        conditions = " AND ".join([BY_IDS, *narrow_tasks(of, bind, "s", "t.task_id")])
        return f"{conditions} ORDER BY {order_by(of, 's', 't.task_id')} LIMIT {of.limit:d}", given
    return queries.merge_parts([select_range(of, range_, bind) for range_ in ranges], of.limit), given


def select_range(of: queries.TaskFilter, range_: TaskRange, bind: Callable[[Any], str]) -> str:
    """Return the statement that reads a page of tasks from one range."""
    led, at = (BY_STATE, "s.task_id") if range_.by in OF_STATES else (ROWS, "t.task_id")
    columns, within, rest = LEADING.get(range_.by, ()), list[str](), of
    if columns:
        within, rest = bound_range(of, range_, [*columns, at], bind), leave_out(of, range_)
    conditions = " AND ".join([led, *within, *narrow_tasks(rest, bind, "s", at)])
    order = order_by(of, "s", at) if of.by_change else listed_down([*columns, at])
    return f"{conditions} ORDER BY {order} LIMIT {of.limit:d}"


def bound_range(of: queries.TaskFilter, range_: TaskRange, columns: list[str], bind: Callable[[Any], str]) -> list[str]:
    """Return the conditions for a range of an index and for the age.

    They are bounds, and the order names all columns: with `status = $2` the order could be that of the primary key, and
    a plan for any status reads all tasks by it, to find the few that have failed.
    """
    owner = [value for _, value in name_owner(of, range_)]
    values = owner if range_.by == "owner" else [range_.value or getattr(of, range_.by)]
    names, row = [bind(value) for value in values], ", ".join(columns)
    there = [f"{columns[0]} IS NOT NULL"] if range_.by == "parent_task_id" else []     # its index has no others
    return there + [f"({row}) {sign} ({', '.join([*names, bind(id)])})"
                    for sign, id in (("<", of.before or HIGHEST), (">=", of.since or ""))]


def select_deliveries(of: queries.DeliveryFilter) -> tuple[str, list[str]]:
    """Return the statement that reads a page of what became of the events of an endpoint, and its parameters.

    Its place is a bound of a row, and the order names all its columns, so that it is read by the index of these.
    """
    led = {"webhook_id": of.webhook_id, **({"state": of.state} if of.state is not None else {})}
    columns, given = ", ".join([*led, "delivery_id"]), list(led.values())
    names = ", ".join(f"${at}" for at, _ in enumerate(given, 2))
    first, last = (of.after or HIGHEST, "") if of.newest else (of.after or "", HIGHEST)
    signs, order = ("<", ">=") if of.newest else (">", "<="), " DESC" * of.newest
    bounds = [f"({columns}) {sign} ({names}, ${len(given) + at}::text)" for at, sign in enumerate(signs, 2)]
    by = ", ".join(f"{name}{order}" for name in [*led, "delivery_id"])
    return (f"SELECT {listed(typed(stored_webhooks.WebhookDelivery))} FROM asyncgate.webhook_deliveries "
            f"WHERE tenant_id = $1 AND {' AND '.join(bounds)} ORDER BY {by} LIMIT {of.limit:d}"), [*given, first, last]


def leave_out(of: queries.TaskFilter, range_: TaskRange) -> queries.TaskFilter:
    """Return what a range leaves to be checked of a filter."""
    own: dict[str, Any] = {range_.by: None}
    return replace(of, before=None, since=None, **own)


def listed_down(columns: Iterable[str]) -> str:
    """Return columns as a falling order."""
    return ", ".join(f"{column} DESC" for column in columns)


def select_ids(of: queries.TaskFilter, range_: TaskRange, most: int) -> tuple[str, list[Any]]:
    """Return the statement that reads the ids of the tasks of a range, and its parameters."""
    given: list[Any] = []
    bind = make_binder(given)
    table = "states AS s" if range_.by in OF_STATES else "tasks AS t"
    if range_.by in LEADING:
        columns = [*LEADING[range_.by], "task_id"]
        conditions, order = " AND ".join(bound_range(of, range_, columns, bind)), listed_down(columns)
    else:
        conditions, order = limit_range(of, range_, bind)
    return (f"SELECT task_id::text FROM asyncgate.{table} WHERE tenant_id = $1 AND {conditions} ORDER BY {order} "
            f"LIMIT {most:d}"), given


def select_count(of: queries.TaskFilter, range_: TaskRange, most: int) -> tuple[str, list[Any]]:
    """Return the statement that counts the tasks of a range, and those of them that pass, and its parameters."""
    statement, given = select_ids(of, range_, most)
    passing = " AND ".join(["true", *narrow_tasks(of, make_binder(given), "s", "i.id")])
    return f"SELECT count(*), count(*) FILTER (WHERE {passing}) FROM ({statement}) AS i (id) {FACTS}", given


def make_binder(given: list[Any]) -> Callable[[Any], str]:
    """Return a function that adds a parameter to a statement and returns its name."""
    def name(value: Any) -> str:
        given.append(value)
        return f"${len(given) + 1}"
    return name


class Others:
    """Receipts, records and counts that a batch needs; each statement has a new snapshot, later than LOAD's locks."""

    def __init__(self, db: Connection, tenant_id: str, needs: Needs) -> None:
        """Ask for them, in the trip of LOAD."""
        self.receipts, self.records, self.usage = list[Fetched](), dict[type[Struct], Fetched](), Fetched()
        if needs.receipts:
            self.receipts.append(db.add(FAMILY, tenant_id, list(needs.receipts)))
        if needs.endings:
            self.receipts.append(db.add(ENDINGS, tenant_id, *columns(needs.endings, 2)))
        if needs.stated:
            self.receipts.append(db.add(STATES, tenant_id, *columns(needs.stated, 2)))
        for kind in {kind for kind, _ in needs.records}:
            keys = [key for of, key in needs.records if of is kind]
            self.records[kind] = db.add(RECORD[kind], tenant_id, *columns(keys, len(keys[0])))
        if needs.recount:
            self.usage = db.add(COUNT, tenant_id)

    def load(self, work: Work) -> None:
        """Load what was answered."""
        for row in itertools.chain(*self.receipts):
            work.load_receipt(receipt_row(row))
        for kind, rows in self.records.items():
            for row in rows:
                work.load_record(kind(*row))
        for row in self.usage:
            work.keep_record(stored.Usage(*row))


def receipt_row(row: tuple[Any, ...]) -> stored.Receipt:
    """Make a receipt from a row of RECEIPTS or a similar statement."""
    *facts, first, delivered_at, further = row
    parents = tuple(sorted([*([first] if first else ()), *further]))
    return stored.Receipt(*facts, parents, delivered_at)  # type: ignore[call-arg]  # mypy cannot count a slice
