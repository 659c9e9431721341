"""What a batch reads and changes where tasks have limits.

Claims of such tasks take the limits lock alone, and read behind it; whoever ends a lease or queues a task shares it, so
that no turn is blocked, or found empty, because of what is just being changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncgate import Work
from asyncgate.backends.postgres import statements as sql
from asyncgate.backends.postgres.instances import turn_key
from asyncgate.backends.postgres.pipeline import Connection, Fetched
from asyncgate.parts.model import stored, stored_limits
from asyncgate.parts.model.limiting import MOST_TURNS, SPARE_TURNS, list_names, list_opened, read_limits

LOCK = "SELECT pg_advisory_xact_lock($1::bigint)"
LOCK_SHARED = LOCK.replace("lock(", "lock_shared(")
# Those that are open already are left alone: ON CONFLICT would lock them, which the log of the database has to tell.
# A turn that begins again gets no more than its share: it is put level with the one that is next.
NEXT_SERVED = """coalesce((SELECT o.served FROM asyncgate.turns AS o
    WHERE o.tenant_id = $1 AND o.lane = {lane} AND o.stage = 'open' ORDER BY o.served LIMIT 1), 0)"""
BEGINS = f"""
INSERT INTO asyncgate.turns AS old (tenant_id, lane, limits, served, stage, blocked_by, blocked_key)
SELECT $1, t.lane, t.limits, {NEXT_SERVED.format(lane='t.lane')}, 'open', '', '' FROM {{tasks}} AS t
WHERE coalesce((SELECT n.stage FROM asyncgate.turns AS n
                WHERE n.tenant_id = $1 AND n.lane = t.lane AND n.limits = t.limits LIMIT 1), 'idle') = 'idle'
ON CONFLICT (tenant_id, lane, limits) DO UPDATE
SET stage = 'open', served = greatest(old.served, excluded.served) WHERE old.stage = 'idle'"""
BEGIN = BEGINS.format(tasks="unnest($2::text[], $3::text[])").replace("AS t\n", "AS t (lane, limits)\n")
BEGIN_PROMOTED = BEGINS.format(tasks="""(SELECT DISTINCT d.lane::text AS lane, d.limits::text AS limits FROM (
    SELECT lane, limits FROM asyncgate.states
    WHERE tenant_id = $1 AND status = 'queued' AND NOT ready AND held IS NULL AND limits IS NOT NULL
    AND next_eligible_at <= $2 ORDER BY next_eligible_at LIMIT $3) AS d)""")
AGAIN = f"""
WITH b AS MATERIALIZED ({{which}})
UPDATE asyncgate.turns AS t SET stage = 'open', until = NULL, blocked_by = '', blocked_key = '',
    served = greatest(t.served, {NEXT_SERVED.format(lane='t.lane')})
WHERE t.tenant_id = $1 AND t.lane = ANY (ARRAY(SELECT lane FROM b)) AND t.limits = ANY (ARRAY(SELECT limits FROM b))
AND (t.lane, t.limits) IN (SELECT lane, limits FROM b)"""
WAKE = AGAIN.format(which="""
    SELECT b.* FROM unnest($2::text[], $3::text[], $4::bigint[]) AS w (name, key, most), LATERAL (
        SELECT lane, limits FROM asyncgate.turns
        WHERE tenant_id = $1 AND stage = 'blocked' AND blocked_by = w.name AND blocked_key = w.key
        ORDER BY served LIMIT w.most FOR UPDATE) AS b""")
WAKE_ALL = AGAIN.format(which="""
    SELECT lane, limits FROM asyncgate.turns
    WHERE tenant_id = $1 AND stage = 'blocked' AND blocked_by = ANY ($2::text[]) FOR UPDATE""")
OPEN_DUE = AGAIN.format(which="""
    SELECT lane, limits FROM asyncgate.turns
    WHERE tenant_id = $1 AND stage = 'blocked' AND until IS NOT NULL
    AND until <= $2 ORDER BY until LIMIT $3 FOR UPDATE""")
CORRECT = """
UPDATE asyncgate.rate_uses SET used = greatest(0, used + $4)
WHERE tenant_id = $1 AND limit_name = $2 AND limit_key = $3"""
# Leases are counted where a rule asks for it, and all of them: after a limit was lowered there are more than it allows,
# and those that end in this batch make no room.
HELD_LIMITS = f"""
SELECT {sql.listed(sql.typed(stored_limits.Limit), 'l.')}, (
    SELECT count(*) FROM (SELECT FROM asyncgate.holds WHERE tenant_id = $1 AND limit_name = l.name
                          LIMIT CASE WHEN l.rules::json->>'concurrency_total' IS NULL THEN 0 END) AS h)
FROM unnest($2::text[]) AS n (name), LATERAL (
    SELECT * FROM asyncgate.limits WHERE tenant_id = $1 AND name = n.name LIMIT 1) AS l"""
TURNS = f"""(SELECT t.* FROM unnest($2::text[]) AS w (lane), LATERAL (
    SELECT {sql.listed(sql.typed(stored_limits.Turn))} FROM asyncgate.turns
    WHERE tenant_id = $1 AND lane = w.lane AND stage = 'open' ORDER BY served, limits LIMIT $3) AS t) AS t"""
HELD = f"""
SELECT k.name, k.key, h.number, {sql.listed(sql.typed(stored_limits.RateUse), 'u.')}
FROM {{keys}}
JOIN LATERAL (SELECT rules::json AS rules FROM asyncgate.limits WHERE tenant_id = $1 AND name = k.name LIMIT 1) AS l
    ON true
LEFT JOIN LATERAL (SELECT count(*) AS number FROM (
    SELECT FROM asyncgate.holds WHERE tenant_id = $1 AND limit_name = k.name AND limit_key = k.key
    LIMIT CASE WHEN coalesce(l.rules->'overrides'->k.key->>'concurrency_per_key',
                             l.rules->>'concurrency_per_key') IS NULL THEN 0 END) AS h) AS h ON true
LEFT JOIN LATERAL (SELECT {sql.listed(sql.typed(stored_limits.RateUse))} FROM asyncgate.rate_uses
                   WHERE tenant_id = $1 AND limit_name = k.name AND limit_key = k.key LIMIT 1) AS u ON true"""
# Of a limit that tasks have without a key, the empty key is read for all of them.
HELD_KEYS = HELD.format(keys=f"""(SELECT DISTINCT e.key AS name, e.value AS key
    FROM {TURNS}, json_each_text(t.limits::json) AS e UNION SELECT unnest($4::text[]), '') AS k""")
HELD_PAIRS = HELD.format(keys="unnest($2::text[], $3::text[]) AS k (name, key)")
# A turn with a task that others have locked is not known to be empty.  One that has just changed is left by the rules.
HEADS = f"""
WITH turns AS MATERIALIZED (SELECT t.*, count(*) OVER (PARTITION BY t.lane) AS number FROM {TURNS}),
candidates AS MATERIALIZED (
    SELECT t.lane, t.limits, c.* FROM turns AS t, LATERAL (
        SELECT task_id FROM asyncgate.states
        WHERE tenant_id = $1 AND lane = t.lane::bigint AND limits = t.limits AND status = 'queued' AND ready
        AND limits IS NOT NULL
        ORDER BY priority DESC, task_id LIMIT least($4::bigint, 2 * $4::bigint / t.number + 1)) AS c),
locked AS MATERIALIZED (
    SELECT s.* FROM candidates AS c, LATERAL (
        SELECT {sql.listed(sql.STATE)} FROM asyncgate.states
        WHERE tenant_id = $1 AND task_id = c.task_id LIMIT 1 FOR UPDATE SKIP LOCKED) AS s)
SELECT {sql.listed(sql.typed(stored_limits.Turn), 'o.')}, o.number, (
    SELECT count(*) FROM candidates AS c WHERE c.lane = o.lane AND c.limits = o.limits), {sql.ROW}
FROM turns AS o
LEFT JOIN locked AS s ON s.lane = o.lane::bigint AND s.limits = o.limits
LEFT JOIN LATERAL (SELECT {sql.listed(sql.CONTRACT)} FROM asyncgate.tasks
                   WHERE tenant_id = $1 AND task_id = s.task_id LIMIT 1) AS t ON true
LEFT JOIN LATERAL (SELECT {sql.listed(sql.PROGRESS)} FROM asyncgate.progress
                   WHERE tenant_id = $1 AND task_id = s.task_id AND s.told > 0 LIMIT 1) AS p ON true"""
LIMIT, TURN = len(sql.typed(stored_limits.Limit)), len(sql.typed(stored_limits.Turn))
MOST_DUE = 1000      # turns that one batch opens because their time has come


def lock(db: Connection, tenant_id: str, *, shared: bool = False) -> None:
    """Take the limits lock of a tenant."""
    db.add(LOCK_SHARED if shared else LOCK, turn_key(tenant_id, "limits"))


class TurnsRead:
    """What a claim asks for of lanes with limits; the statements travel together."""

    def __init__(self, db: Connection, tenant_id: str, patterns: Mapping[int, str], enough: int, now: float,
                 skew: float) -> None:
        lanes, names = [str(lane) for lane in patterns], list_names(patterns.values())
        self.enough, self.most = enough, min(enough + SPARE_TURNS, MOST_TURNS)
        lock(db, tenant_id)
        db.add(OPEN_DUE, tenant_id, now, MOST_DUE)
        self.limits: Fetched = db.add(HELD_LIMITS, tenant_id, names)
        self.keys: Fetched = db.add(HELD_KEYS, tenant_id, lanes, self.most, list_names(patterns.values(), unkeyed=True))
        self.heads: Fetched = db.add(HEADS, tenant_id, lanes, self.most, self.enough)
        self.clock: Fetched = db.add("SELECT extract(epoch FROM clock_timestamp())::float8 + $1::float8", skew)

    def load(self, work: Work) -> None:
        """Load what was answered."""
        work.now = max(work.now, self.clock[0][0])     # later than every row lock
        load_held(work, self.limits, self.keys)
        turns: dict[tuple[str, str], tuple[stored_limits.Turn, int, int, list[str]]] = {}
        for row in self.heads:
            turn, (number, there) = stored_limits.Turn(*row[:TURN]), row[TURN:TURN + 2]
            tasks = turns.setdefault((turn.lane, turn.limits), (turn, number, there, []))[3]
            if row[TURN + 2] is not None:
                task, _, progress = sql.named_row(tuple(row[TURN + 2:]))
                if task.task_id not in work.tasks:
                    work.load_task(task, progress=progress)
                tasks.append(task.task_id)
        for turn, number, there, tasks in turns.values():
            piece = min(self.enough, 2 * self.enough // number + 1)
            work.limiting.add_turn(turn, tasks, there == len(tasks) < piece)
            if number == self.most:
                work.limiting.cut.add(int(turn.lane))


class GrantedRead:
    """What a batch asks for that leases tasks without finding them by a claim."""

    def __init__(self, db: Connection, tenant_id: str, tasks: list[stored.Task]) -> None:
        pairs = list({pair for task in tasks for pair in read_limits(task.limits)})
        lock(db, tenant_id)
        self.limits: Fetched = db.add(HELD_LIMITS, tenant_id, list({name for name, _ in pairs}))
        self.keys: Fetched = db.add(HELD_PAIRS, tenant_id, *sql.columns(pairs, 2))
        self.turns: Fetched = db.add(sql.RECORD[stored_limits.Turn], tenant_id,
                                     *sql.columns({(str(task.lane), task.limits) for task in tasks}, 2))

    def load(self, work: Work) -> None:
        """Load what was answered."""
        load_held(work, self.limits, self.keys)
        for row in self.turns:
            work.load_record(stored_limits.Turn(*row))


def load_held(work: Work, limits: Fetched, keys: Fetched) -> None:
    """Load limits, and what counts in them in total and under some keys."""
    for row in limits:
        work.load_record(stored_limits.Limit(*row[:LIMIT]))
        work.limiting.held[row[0], None] = row[LIMIT]
    for name, key, number, *use in keys:
        work.limiting.held[name, key] = number
        if use[0] is not None:
            work.load_record(stored_limits.RateUse(*use))


def is_touched(work: Work) -> bool:
    """Whether a batch changes what claims of tasks with limits go by."""
    return bool(work.limiting.freed or work.limiting.changed or list_opened(work))


def save(db: Connection, work: Work) -> None:
    """Add what opens turns, behind the rows that the batch has saved."""
    limiting, opened = work.limiting, list_opened(work)
    if opened:
        db.add(BEGIN, work.tenant_id, [lane for lane, _ in opened], [limits for _, limits in opened])
    for (name, key), more in limiting.costs.items():
        db.add(CORRECT, work.tenant_id, name, key, float(more))
    if limiting.changed:
        db.add(WAKE_ALL, work.tenant_id, list(limiting.changed))
    if limiting.woken:
        pairs = list(limiting.woken)
        db.add(WAKE, work.tenant_id, [name for name, _ in pairs], [key for _, key in pairs],
               [limiting.woken[pair] for pair in pairs])
