"""The plans of Postgres: each statement is a handful of index probes, on an empty database and on a full one.

What is judged is the shape of the plan, as the gate's role gets it with the settings of the gate's sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import asyncpg
import pytest

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.backends.pages import TaskRange
from asyncgate.backends.postgres import PROBES_ONLY, turns
from asyncgate.backends.postgres import statements as sql
from asyncgate.conformance.harness import Gate, settings_for_tests, under
from asyncgate.conformance.postgres_server import Cluster, connected
from asyncgate.parts.identity.metering import Closer, floor_to
from asyncgate.parts.model.queries import (
    DeliveryFilter,
    EntryFilter,
    OpenWebhooks,
    OutboxFilter,
    ReceiptFilter,
    Rows,
    Settled,
    TaskCount,
    TaskFilter,
)
from asyncgate.parts.model.stored import (
    Account,
    Audit,
    AuditHead,
    Event,
    Key,
    Lease,
    Obligation,
    Presence,
    Progress,
    Receipt,
    Schedule,
    Task,
)
from asyncgate.parts.model.wire import Principal
from asyncgate.parts.upkeep import Upkeep
from tests.support.each import each
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

TENANT, SMALL = "00000000-0000-0000-0000-00000000000a", "00000000-0000-0000-0000-00000000000b"
EXPORTED = (Task, Lease, Progress, Receipt, Event, Schedule, Obligation, Presence, Account, Key, Audit, AuditHead)
Plan = dict[str, Any]
Sent = dict[str, tuple[Any, ...]]       # statement → what it was given

# A tenant's tasks and what belongs to them, at scale: most are done, some wait, some are being worked on.
ID = "'00000000-0000-7000-8000-' || lpad(to_hex({}), 12, '0')"
FILL = """
INSERT INTO asyncgate.tenants VALUES ({tenant}, 0);
INSERT INTO asyncgate.lanes SELECT {tenant}, n, 'type-' || n, '[]' FROM generate_series(1, 20) AS n;
INSERT INTO asyncgate.tasks (
    tenant_id, task_id, type, payload, requirements, terms, owner_kind, owner_id, principal_ai, retry_backoff_seconds,
    max_expiries, created_at, duty, idempotency_key, summary)
SELECT {tenant}, {id}, 'type-' || n % 20 + 1, '0', '0', '0', 'agent', 'agent-' || n % 50, 'x', 1, 10, n, {id},
    CASE WHEN n % 3 = 0 THEN 'key-' || n END, CASE WHEN n % 2 = 0 THEN 'summary ' || n END
FROM generate_series(1, {tasks}) AS n;
INSERT INTO asyncgate.states (
    tenant_id, task_id, lane, priority, max_attempts, asyncgate_instance, updated_at, status, attempt, fence, expiries,
    owed, lost_to, next_eligible_at, ready, check_at, told, lease_id, worker_kind, worker_id, lease_fence, acquired_at,
    expires_at, renewals, accepted, claim_id, ending, limits)
SELECT {tenant}, {id}, n % 20 + 1, 0, 2, 'gate', n, status, 0, 1, 0, status <> 'succeeded', '[]',
    CASE WHEN status = 'queued' AND n % 4 = 0 THEN 1e10 END, NOT (status = 'queued' AND n % 4 = 0),
    CASE WHEN status = 'leased' THEN n END, 0, {id}, 'worker', 'w-' || n % 50, 1, n, n, 0, {id}, 'claim-' || n, 'live',
    CASE WHEN n % 7 = 0 THEN '{{"customer":"' || n % 700 || '"}}' END
FROM generate_series(1, {tasks}) AS n, LATERAL (
    SELECT CASE n % 10 WHEN 0 THEN 'queued' WHEN 1 THEN 'leased' ELSE 'succeeded' END AS status) AS s;
INSERT INTO asyncgate.limits
SELECT {tenant}, 'limit-' || n, '{{}}', 0, 'agent', 'x', NULL, NULL FROM generate_series(1, 50) AS n;
INSERT INTO asyncgate.holds SELECT {tenant}, 'limit-' || n % 50, n, {id}, 0 FROM generate_series(1, {tasks}, 10) AS n;
INSERT INTO asyncgate.turns
SELECT {tenant}, n % 20 + 1, '{{"customer":"' || n || '"}}', n, CASE n % 3 WHEN 0 THEN 'blocked' ELSE 'open' END,
    CASE n % 3 WHEN 0 THEN 'limit-' || n % 50 ELSE '' END, CASE n % 3 WHEN 0 THEN n::text ELSE '' END,
    CASE n % 6 WHEN 0 THEN n END
FROM generate_series(1, {tasks}) AS n;
INSERT INTO asyncgate.rate_uses SELECT {tenant}, 'limit-' || n % 50, n, 0, 1 FROM generate_series(1, {tasks}) AS n;
INSERT INTO asyncgate.progress SELECT {tenant}, {id}, '1', 1, 1, n FROM generate_series(1, {tasks}, 3) AS n;
INSERT INTO asyncgate.receipts (
    tenant_id, receipt_id, receipt_key, receipt_type, created_at, from_kind, from_id, to_kind, to_id, task_id, lease_id,
    asyncgate_instance, hash, body, parent_id)
SELECT {tenant}, {id}, n, (ARRAY['task.assigned', 'task.accepted', 'task.completed'])[n % 3 + 1], n, 'agent', 'x',
    CASE n % 3 WHEN 0 THEN 'agent' ELSE 'asyncgate' END, CASE n % 3 WHEN 0 THEN 'agent-' || n % 50 ELSE 'gate' END,
    {third}, {third}, 'gate', 'h', '0', CASE WHEN n > 1 THEN {before} END
FROM generate_series(1, {tasks} * 3) AS n;
INSERT INTO asyncgate.edges SELECT {tenant}, {id}, {before} FROM generate_series(2, {tasks} * 3, 5) AS n;
INSERT INTO asyncgate.obligations
SELECT {tenant}, 'agent', 'agent-' || n % 50, {id} FROM generate_series(3, {tasks} * 3, 12) AS n;
INSERT INTO asyncgate.deliveries SELECT {tenant}, {id}, n FROM generate_series(1, {tasks} * 3, 3) AS n;
INSERT INTO asyncgate.events SELECT {tenant}, {id}, {id}, 'task.started', '0', n FROM generate_series(1, {tasks}) AS n;
INSERT INTO asyncgate.archived
SELECT {tenant}, 'away-' || n, 'task-' || n / 4, 'task.accepted', 'segment', n, 'digest', 'chain', '[]'
FROM generate_series(1, {tasks}) AS n;
INSERT INTO asyncgate.schedules
SELECT {tenant}, 's-' || n, 'agent', 'agent-' || n % 50, 'worker', 'cron', 'c', true, n, 60,
    CASE WHEN n % 2 = 0 THEN n END
FROM generate_series(1, {tasks} / 10) AS n;
INSERT INTO asyncgate.presences
SELECT {tenant}, 'agent', 'agent-' || n, NULL, 0, 0, 1 FROM generate_series(1, {tasks} / 10) AS n;
INSERT INTO asyncgate.accounts SELECT coalesce(other, {tenant}), 'a name', 0, '', NULL, NULL, NULL
FROM (SELECT NULL::uuid UNION ALL SELECT gen_random_uuid() FROM generate_series(1, {tasks} / 10)) AS t (other);
INSERT INTO asyncgate.api_keys (
    tenant_id, key_id, hash, name, principal_kind, principal_id, role, scopes, not_before, version, created_at,
    created_by)
SELECT {tenant}, {tasks} || '-' || n, 'hash', 'a key', 'worker', 'w-' || n, 'worker', '[]', 0, 1, n, 'ada'
FROM generate_series(1, {tasks} / 10) AS n;
INSERT INTO asyncgate.audit
SELECT {tenant}, lpad(n::text, 12, '0'), n, n, 'auth_success', 'info', '{{}}', 'hash'
FROM generate_series(1, {tasks}) AS n;
INSERT INTO asyncgate.audit_heads VALUES ({tenant}, {tasks}, 'hash');
INSERT INTO asyncgate.outbox
SELECT {tenant}, {id}, {third}, '{{}}', n, CASE WHEN n % 10 = 0 THEN 'parked' ELSE 'waiting' END, NULL, 0
FROM generate_series(1, {tasks}) AS n;
INSERT INTO asyncgate.ledger
SELECT {tenant}, {id}, {id}, 'task.assigned', {third}, 'agent', 'x', 'agent', 'agent-' || n % 50, 'gate-' || n % 50,
    'd', '{{}}' FROM generate_series(1, {tasks}) AS n;
INSERT INTO asyncgate.webhook_deliveries
SELECT {tenant}, 'webhook-' || n % 5, {id}, 'task.assigned', {third},
    CASE WHEN n % 50 = 0 THEN 'parked' ELSE 'delivered' END, 1, n, n, NULL, 204, NULL, 1
FROM generate_series(1, {tasks}) AS n;
INSERT INTO asyncgate.webhooks
SELECT {tenant}, {id} || '.0', 'https://hooks.invalid/', '', '[]', '[]', 's', NULL, NULL, {id},
    CASE WHEN n % 50 = 0 THEN 'active' ELSE 'ended' END, NULL, n, 'agent ada', n, NULL, NULL, NULL, NULL, {id}, NULL,
    'receipt' FROM generate_series(1, {tasks}) AS n;
INSERT INTO asyncgate.ledger_marks VALUES ({tenant}, 'task.completed', 'r'), ({tenant}, 'task.failed', 'r');
"""


def fill(tenant: str, tasks: int) -> str:
    """Return what gives a tenant so many tasks, and three receipts for each."""
    return FILL.format(tenant=f"'{tenant}'::uuid", tasks=tasks, id=ID.format("n"), before=ID.format("n - 1"),
                       third=ID.format("n / 3"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A server whose tables nobody looks at behind our back."""
    async def quiet(url: str) -> None:
        async with connected(url) as db:
            await db.execute("ALTER SYSTEM SET autovacuum = off")
            await db.execute("SELECT pg_reload_conf()")

    with Cluster() as running:
        asyncio.run(quiet(running.admin_url()))
        yield running


@pytest.fixture(scope="module")
def databases(cluster: Cluster) -> dict[str, str]:
    """A new database, one with 20,000 tasks and 60,000 receipts of one tenant, and one whose tasks are all alike."""
    async def filled(url: str) -> None:
        async with connected(url) as db:
            await db.execute(fill(TENANT, 20_000) + fill(SMALL, 200))
            await db.execute("ANALYZE")

    async def alike(url: str) -> None:
        async with connected(url) as db:
            await db.execute(fill(TENANT, 5_000))
            await db.execute("UPDATE asyncgate.tasks SET type = 'only', owner_id = 'only'; "
                             "UPDATE asyncgate.states SET status = 'succeeded'; ANALYZE")

    urls = {name: asyncio.run(cluster.migrated_database(name)) for name in ("empty", "full", "alike", "lived_in")}
    asyncio.run(alike(cluster.admin_url("alike")))
    asyncio.run(filled(cluster.admin_url("full")))
    return urls


# What the backend sends.


class Listening:
    """A pool that keeps what is sent through it."""

    def __init__(self, pool: Any) -> None:
        self.pool, self.sent = pool, Sent()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    @contextlib.asynccontextmanager
    async def acquire(self) -> AsyncIterator[Any]:
        """Hand out a connection that is listened to."""
        async with self.pool.acquire() as db:
            yield Heard(db, self.sent)


class Heard:
    """A connection that keeps what is added to it."""

    def __init__(self, db: Any, sent: Sent) -> None:
        self.db, self.sent = db, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self.db, name)

    def add(self, statement: str, *given: Any) -> Any:
        """Keep a statement, and add it."""
        if "asyncgate." in statement:
            self.sent[statement] = given
        return self.db.add(statement, *given)

    async def fetch(self, statement: str, *given: Any) -> Any:
        """Keep a statement, and send it."""
        rows = self.add(statement, *given)
        await self.db.run()
        return rows

    async def fetchval(self, statement: str, *given: Any) -> Any:
        """Keep a statement, and send it."""
        return (await self.fetch(statement, *given))[0][0]


async def tell(backend: Any) -> None:
    """Let a gate do everything that sends another statement."""
    gate = Gate(Engine(backend, settings_for_tests()), TENANT)
    ada, w1 = gate.as_agent(), gate.as_worker()
    for _ in range(3):
        await gate.create(type="mine", idempotency_key=str(uuid.uuid4()), max_attempts=2, retry_backoff_seconds=60)
    first, second = (await w1.lease_next(accept_types=["mine"], max_tasks=2, claim_id="claim")).tasks
    await w1.renew_lease(**under(first))
    await w1.report_progress(**under(first), progress=1)
    await w1.fail(**under(second), error="no", retryable=True)
    gate.skip(61)
    await w1.lease_next(accept_types=["mine"])
    await w1.complete(**under(first), artifacts=[{"uri": "x"}])
    await ada.ack_receipt(receipt_id=first.obligation_receipt_id)
    await ada.bootstrap()
    await ada.list_open_obligations()
    await ada.check_terminator(parent_receipt_id=first.obligation_receipt_id)
    await ada.get_task_history(task_id=first.task_id)
    await w1.list_leases()
    await w1.report_schedule(schedules=[{"schedule_id": "s-1"}])
    await Upkeep(gate.engine).store_presences()
    await administer(gate)
    await gate.as_admin().list_queues(type="mine")
    await ada.list_tasks(status="queued")
    await ada.list_tasks(status="queued", order="changed", count=True)
    await gate.as_admin().list_tasks(status="queued")
    await gate.as_admin().list_tasks(type_prefix="m")
    await backend.next_due(TENANT)
    for table in EXPORTED:
        await backend.page(TENANT, Rows(table))


async def administer(gate: Gate) -> None:
    """Make keys and take them back, change what is agreed with the tenant, and read all of it."""
    root, operator = gate.as_admin(), gate.beside(default_tenant_id=TENANT).as_admin()
    made = await root.issue_key(name="a key", principal_id="w1")
    await root.rotate_key(key_id=made.key.key_id)
    await root.revoke_key(key_id=made.key.key_id)
    await operator.set_limits(tenant=TENANT, tier="paid")
    await root.get_limits()
    await root.list_keys(limit=1)
    await root.list_audit(limit=1)
    await Closer(gate.engine).close(TENANT, floor_to(gate.now(), 300) + 300)
    await root.get_usage()
    assert await gate.backend.find_key(made.key.key_id)


OWNERS = (None, Principal("agent", "agent-1"))
ANYBODY = Principal("", "agent-1")       # of any kind: a range of the index for each
IDS = (None, "00000000-0000-7000-8000-000000000100")


@contextlib.asynccontextmanager
async def listening(url: str) -> AsyncIterator[tuple[Any, Sent]]:
    """Open a database for the time of a block, and keep what is sent to it."""
    backend: Any = await open_backend(url)
    backend.pool = heard = Listening(backend.pool)
    try:
        yield backend, heard.sent
    finally:
        await backend.close()


async def listened(url: str, what: Any) -> Sent:
    """Return all statements about a tenant that a backend sends meanwhile, the last of each."""
    async with listening(url) as (backend, sent):
        await what(backend)
    return {text: given for text, given in sent.items() if TENANT in map(str, given) and text not in WHOLE}


# All of a tenant is only read to count it, seldom; and once a minute upkeep reads all that is delayed or leased, to
# find the lanes that nothing needs.
WHOLE = {sql.COUNT, sql.LAG, sql.EMPTY_LANES}


def written(sent: Iterable[str]) -> Iterator[str]:
    """Yield every statement that the backend could send of a tenant; what is part of a sent one is judged there."""
    yield from (text for text in vars(turns).values() if isinstance(text, str) and VERB.match(text.strip())
                and "{" not in text and "tenant_id = $1" in text)
    for text in vars(sql).values():
        if (isinstance(text, str) and "tenant_id = $1" in text
                and not any(text in statement for statement in {*sent, *WHOLE})):
            yield text
    yield from sql.HORIZONS.values()
    for few in range(sql.MOST_BOUND + 1):
        for tables in [*((table,) for table in sql.SAVES if table != "posted"), sql.TOGETHER]:
            yield sql.save(tuple([(table, few) for table in tables]))
    for table in sql.ROW_BY_ROW:
        yield sql.save_row(table)[0]
    for number in range(len(sql.NAMED) + 1):
        for ways, some in itertools.product(itertools.combinations(sql.NAMED, number), (False, True)):
            yield sql.load(ways, some)[0]
        yield sql.load(ways, True, portioned=True)[0]
        yield sql.load(ways, True, portioned=True, of_lane=True)[0]


async def functions(db: Any) -> dict[str, list[tuple[str, list[str]]]]:
    """Return what the functions of the schema ask, as statements with the types of what they are given."""
    statements: dict[str, list[tuple[str, list[str]]]] = {}
    for name, source, names, types in await db.fetch("""
            SELECT proname, prosrc, proargnames[1:pronargs], proargtypes::oid[]::regtype[]::text[]
            FROM pg_proc JOIN pg_language AS l ON l.oid = prolang
            WHERE pronamespace = 'asyncgate'::regnamespace AND prorettype <> 'trigger'::regtype
            AND (lanname = 'plpgsql' OR proname = 'find_key')"""):
        inside = source[source.index("BEGIN") + len("BEGIN"):source.rindex("END")] if "BEGIN" in source else source
        body = re.sub("--.*", "", inside)
        body = re.sub(r"(?<!INSERT) INTO \w+", "", body)        # a variable
        parts = [re.sub(r"^(RETURN QUERY|FOR \w+ IN)\s+", "", part.strip())
                 for part in re.split(r";|\bLOOP\b|\bTHEN *\n", body)]
        asks = [part[1:-1].strip() if part.startswith("(") else part for part in parts]
        given = dict(zip(names, types, strict=True)) | LOOPED
        statements[name] = [(numbered(part, given), list(given.values())) for part in asks if VERB.match(part)]
    return statements


VERB = re.compile("SELECT|UPDATE|INSERT|DELETE|WITH")
LOOPED = {"late.next_at": "float8", "late.tenant_id": "uuid", "late.task_id": "text",      # what a loop goes over
          "tenant": "uuid", "id": "text", "who.for_tenant": "uuid", "who.principal_kind": "text",
          "who.principal_id": "text",
          **{f"one.{name}": "text" for name in ("item", "key", "sender", "recipient", "schedule", "hash", "body",
                                                "salt", "task_id", "payload", "arrival", "author", "digest",
                                                "content", "pointer", "terms", "summary")}}


def numbered(statement: str, names: Iterable[str]) -> str:
    """Write the arguments of a function as those of a statement."""
    known = list(names)
    pattern = rf"(?<![.\w])({'|'.join(map(re.escape, known))})(?![.\w(])"
    into = re.match(r"INSERT INTO [\w.]+ \([^)]*\)|", statement)      # columns may have the name of an argument
    assert into is not None
    rest = re.sub(pattern, lambda match: f"${known.index(match[1]) + 1}", statement[into.end():])
    return into[0] + rest


# How plans are judged.

UNTIL_THE_END = {"lanes", "queues"}     # a tenant has few, and all of them are wanted
# What a strict gate has offered to its ledger: calls that are under way, of which those for others are passed over.
UNDER_WAY = {"outbox_offered"}
# What looks across tenants asks by these.
LED_BY = {"states_check": "check_at", "schedules_late": "late_at", "api_keys_id": "key_id",
          "enqueuers_pkey": "role_name"}
ACROSS = {"overdue": "asyncgate_sweeper", "find_key": "asyncgate_auth",
          **dict.fromkeys(("archive_receipts", "forget_pointers", "prune_tasks", "prune_audit", "amend_tasks",
                           "allow_enqueue", "enqueue", "retry_handover", "drop_handover"),
                          "asyncgate_owner"),
          **dict.fromkeys(("erase_receipts", "erase_events", "erase_audit", "erase_entries", "erase_keys"),
                          "asyncgate_owner")}
# What these find under their first two columns is few, so it may be sorted: a worker's leases, a task's receipts, the
# obligation that a receipt opened.  So are the tasks that upkeep must check by now.
FEW = {"states_holder", "receipts_key", "obligations_age", "states_check"}
# What has an index of its own is never looked for row by row.
KEYS = re.compile(r"\b(idempotency_key|owner_id|lane|worker_id|claim_id|parent_id|to_id|next_eligible_at|check_at"
                  r"|late_at|asyncgate_instance|task_id|state)\b\)?(::text)? (=|<|>|<=|>=) ")


class Judge:
    """Finds fault with plans."""

    def __init__(self, tables: set[str], indexes: dict[str, tuple[list[str], bool]]) -> None:
        self.tables, self.indexes = tables, indexes

    @classmethod
    async def of(cls, db: Any) -> Judge:
        """Return one that knows the tables of tenants, and the columns of their indexes and whether they are unique."""
        rows = await db.fetch("""
            SELECT t.relname, i.relname, x.indisunique,
                ARRAY(SELECT pg_get_indexdef(i.oid, column_at, true) FROM generate_series(1, x.indnatts) AS column_at)
            FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid JOIN pg_class AS t ON t.oid = x.indrelid
            WHERE t.relnamespace = 'asyncgate'::regnamespace
            AND t.relname NOT IN ('meta', 'migrations', 'instances',
                                  'erasures')""")       # a tenant has few of these
        return cls({row[0] for row in rows}, {row[1]: (row[3], row[2]) for row in rows})

    def faults(self, plan: Plan, above: tuple[Plan, ...] = ()) -> Iterator[str]:
        """Yield what reads or sorts more than it must."""
        if plan.get("Relation Name") in self.tables and plan["Node Type"].endswith("Scan"):
            if fault := self._scan(plan, above):
                yield f"{fault}: {plan['Node Type']} of {plan['Relation Name']} by {plan.get('Index Name')}, " \
                      f"{plan.get('Index Cond')}, filter {plan.get('Filter')}"
        elif plan["Node Type"] in ("Hash Join", "Merge Join", "BitmapAnd", "BitmapOr"):
            yield f"not a probe: {plan['Node Type']}"
        elif "Sort" in plan["Node Type"] and plan.get("Presorted Key") != ["s.updated_at"] and not all(
                map(self._few, sorted_by(plan))):       # of one moment there are as many as one batch changes
            yield f"sorts what may be many: {plan['Sort Key']}"
        for part in plan.get("Plans", ()):
            yield from self.faults(part, (*above, plan))

    def _scan(self, plan: Plan, above: tuple[Plan, ...]) -> str | None:
        if plan["Node Type"] == "Tid Scan":     # goes to rows that an index has found before
            return None
        if plan["Node Type"] not in ("Index Scan", "Index Only Scan"):
            return "no index"
        (first, *others), unique = self.indexes[plan["Index Name"]]
        if not named(plan, first) or first not in ("tenant_id", LED_BY.get(plan["Index Name"])):
            return "not led by the tenant"
        # By changes, what is passed over is of one moment: as many as one batch changes.
        if plan["Index Name"] not in {*FEW, "states_changed"} and KEYS.search(plan.get("Filter", "")) and not (
                self._few(plan)):
            return "looks through"
        if first != "tenant_id" or plan["Relation Name"] in UNTIL_THE_END or plan["Index Name"] in UNDER_WAY:
            return None
        if named(plan, others[0]) if others else unique:    # of the latter a tenant has one row
            return None
        return None if self._first_of_all(plan, above) else "all of a tenant"

    def _first_of_all(self, plan: Plan, above: tuple[Plan, ...]) -> bool:
        """Whether only the first rows are taken, in the order of the index, and none is passed over."""
        kinds = [node["Node Type"] for node in above]
        ordered = "Limit" in kinds and not any("Sort" in kind for kind in kinds[kinds.index("Limit"):])
        return ordered and "Filter" not in plan

    def _few(self, plan: Plan) -> bool:
        columns, unique = self.indexes.get(plan.get("Index Name", ""), ([], False))
        if plan["Relation Name"] in UNTIL_THE_END:
            return True
        if unique and all(f"{column} = " in plan["Index Cond"].replace(")::text", "") for column in columns):
            return True
        return plan.get("Index Name") in FEW and named(plan, columns[1])


def named(plan: Plan, column: str) -> bool:
    """Whether a column is a condition of an index scan, or the first of a row that is one."""
    condition = rf"\b{column}\b\)?(::text)? (=|<|>|<=|>=) |ROW\(\(?{column}\b"
    return re.search(condition, plan.get("Index Cond", "")) is not None


def sorted_by(plan: Plan) -> Iterator[Plan]:
    """Yield the scans below a sort that no limit stops before."""
    for part in plan.get("Plans", ()):
        if part["Node Type"] == "Limit" or "Subplan Name" in part:
            continue
        if "Relation Name" in part and part["Node Type"].endswith("Scan"):
            yield part
        yield from sorted_by(part)


async def plan_of(db: Any, statement: str, given: tuple[Any, ...] | None = None) -> Plan:
    """Return the plan for what is given, or the one for whatever may come."""
    if given is not None:
        text = await db.fetchval(f"EXPLAIN (FORMAT JSON) {statement}", *given)
    else:
        prepared = await db.prepare(statement)
        nulls = ", ".join("NULL" for _ in prepared.get_parameters())
        text = await db.fetchval(f'EXPLAIN (FORMAT JSON) EXECUTE "{prepared.get_name()}" ({nulls})'.replace(" ()", ""))
    plan: Plan = json.loads(text)[0]["Plan"]
    return plan


async def function_plan(db: Any, statement: str, types: list[str]) -> Plan:
    """Return the plan that a function keeps for a statement."""
    await db.execute(f"PREPARE asked ({', '.join(types)}) AS {statement}")
    text = await db.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE asked ({', '.join('NULL' for _ in types)})")
    await db.execute("DEALLOCATE asked")
    plan: Plan = json.loads(text)[0]["Plan"]
    return plan


@contextlib.asynccontextmanager
async def session(url: str, role: str = "asyncgate_app", **more: str) -> AsyncIterator[Any]:
    """Connect as the gate does, for the time of a block."""
    db = await asyncpg.connect(url, server_settings={**PROBES_ONLY, **more})
    try:
        await db.execute(f"SET ROLE {role}; SET app.tenant_id = '{TENANT}'")
        yield db
    finally:
        await db.close()


async def find_faults(db: Any, judge: Judge, sent: dict[str, tuple[Any, ...] | None]) -> AsyncIterator[str]:
    """Yield what is wrong with the plans of many statements."""
    for text, given in sent.items():
        for fault in judge.faults(await plan_of(db, text, given)):
            yield f"{fault}\n    in {' '.join(text.split())[:200]} …"


async def all_faults(db: Any, judge: Judge, sent: dict[str, tuple[Any, ...] | None]) -> list[str]:
    """Return what is wrong with the plans of many statements."""
    return [fault async for fault in find_faults(db, judge, sent)]


# The plans.


@pytest.mark.parametrize("database", ["empty", "full"])
async def test_no_statement_reads_more_than_it_must(
        databases: dict[str, str], cluster: Cluster, database: str) -> None:
    sent = await listened(databases["lived_in"], tell)
    asked: dict[str, tuple[Any, ...] | None] = dict.fromkeys([*sent, *written(sent)])

    async with session(databases[database]) as db, connected(cluster.admin_url(database)) as root:
        assert await all_faults(db, await Judge.of(root), asked) == []
    assert len(asked) >= 50


async def test_nor_does_it_when_it_is_planned_for_what_it_is_given(
        databases: dict[str, str], cluster: Cluster) -> None:
    sent = await listened(databases["lived_in"], tell)

    async with connected(cluster.admin_url("full")) as root:
        judge = await Judge.of(root)
    async with session(databases["full"], plan_cache_mode="force_custom_plan") as db:
        assert await all_faults(db, judge, {**sent}) == []


@pytest.mark.parametrize("database", ["empty", "full"])
async def test_no_function_reads_more_than_it_must(databases: dict[str, str], cluster: Cluster, database: str) -> None:
    async with connected(cluster.admin_url(database)) as root:
        judge, asked = await Judge.of(root), await functions(root)
    assert {name: len(parts) for name, parts in asked.items()} == {
        "one_task": 1, "open_obligations": 1, "overdue": 5, "find_key": 1,
        "archive_receipts": 4, "forget_pointers": 1, "prune_tasks": 6, "prune_audit": 1,
        "amend_tasks": 2, "erase_receipts": 2, "erase_events": 2, "erase_audit": 2, "erase_entries": 2, "erase_keys": 1,
        "allow_enqueue": 1, "enqueue": 2, "check_handover": 0, "retry_handover": 2, "drop_handover": 2}

    for name, parts in asked.items():
        async with session(cluster.admin_url(database), ACROSS.get(name, "asyncgate_app")) as db:
            for statement, types in parts:
                assert list(judge.faults(await function_plan(db, statement, types))) == [], statement


async def first_scan(db: Any, statement: str, table: str) -> tuple[str, str]:
    """Return the index and the condition by which a statement finds the rows of a table."""
    def scans(plan: Plan) -> Iterator[Plan]:
        if plan.get("Relation Name") == table:
            yield plan
        for part in plan.get("Plans", ()):
            yield from scans(part)
    plan = next(scans(await plan_of(db, statement)))
    return plan["Index Name"], plan["Index Cond"]


# By which index a list of tasks is read that has one filter.
FILTERED_BY: list[tuple[str, dict[str, Any]]] = [
    ("tasks_pkey", {}), ("tasks_pkey", {"held": False}), ("tasks_owner", {"owner": OWNERS[1]}),
    ("tasks_owner", {"owner": ANYBODY}), ("states_status", {"status": "queued"}), ("states_held", {"held": True}),
    ("tasks_type", {"type": "type-2"}), ("tasks_type", {"type_prefix": "type-"}),
    ("tasks_summary", {"summary_prefix": "summary 9"}), ("tasks_parent", {"parent_task_id": IDS[1]})]


def filtered(before: str | None, since: str | None, **fields: Any) -> TaskFilter:
    """Return what asks for a list of tasks."""
    return TaskFilter(**{"owner": None, "status": None, "type": None, **fields, "before": before, "limit": 50,
                         "since": since})


@pytest.mark.parametrize("database", ["empty", "full", "alike"])
@pytest.mark.parametrize("age", list(itertools.product(IDS, IDS)), ids=str)
async def test_a_list_of_tasks_is_read_by_the_index_of_what_it_lists(
        databases: dict[str, str], cluster: Cluster, database: str, age: tuple[str | None, str | None]) -> None:
    async with connected(cluster.admin_url("full")) as root:
        judge = await Judge.of(root)
    full = databases["full"]        # where there are none they are not asked for
    async with session(databases[database]) as db, listening(full) as (backend, sent):
        for wanted, fields in FILTERED_BY:
            sent.clear()
            await backend.page(TENANT, filtered(*age, **fields))
            text = next(iter(sent))
            index, condition = await first_scan(db, text, wanted.partition("_")[0])

            assert await all_faults(db, judge, dict.fromkeys(sent)) == [], fields
            assert index == wanted, fields
            if not {*fields} & {"type_prefix", "summary_prefix"}:
                assert condition.count("task_id)::text)") == 2 if "ROW(" in condition else (
                    "task_id)::text <" in condition,
                    "task_id)::text >=" in condition) == tuple(map(bool, age)), condition


@pytest.mark.parametrize("database", ["empty", "full", "alike"])
async def test_a_list_by_changes_is_read_by_their_index(
        databases: dict[str, str], cluster: Cluster, database: str) -> None:
    async with connected(cluster.admin_url("full")) as root:
        judge = await Judge.of(root)
    places: list[dict[str, Any]] = [{}, {"changed_since": 1.0}, {"behind": (90.0, IDS[1])}]
    async with session(databases[database]) as db, listening(databases["full"]) as (backend, sent):
        for place, (_, fields) in itertools.product(places, FILTERED_BY):
            sent.clear()
            of = filtered(None, None, **place, **fields, by_change=True, changed_before=100.0)
            await backend.page(TENANT, of)
            await backend.page(TENANT, TaskCount(of, 10))
            await backend.page(TENANT, Settled())
            assert await all_faults(db, judge, dict.fromkeys(sent)) == [], (place, fields)
        sent.clear()
        await backend.read_tasks(TENANT, filtered(None, None, by_change=True, changed_before=2.0), [
            TaskRange("changed")], [])
        index, condition = await first_scan(db, next(iter(sent)), "states")
        assert (index, "updated_at <" in condition) == ("states_changed", True)


@pytest.mark.parametrize("database", ["empty", "full", "alike"])
async def test_nor_do_several_filters_make_a_list_look_at_more(
        databases: dict[str, str], cluster: Cluster, database: str) -> None:
    async with connected(cluster.admin_url("full")) as root:
        judge = await Judge.of(root)
    async with session(databases[database]) as db, listening(databases["full"]) as (backend, sent):
        for (_, first), (_, second) in itertools.combinations(FILTERED_BY[2:], 2):
            if not {*first} & {*second}:
                sent.clear()
                await backend.page(TENANT, filtered(*IDS, **{**first, **second}))
                assert await all_faults(db, judge, dict.fromkeys(sent)) == [], (first, second)


@pytest.mark.parametrize("database", ["empty", "full"])
async def test_a_list_of_receipts_is_read_by_the_index_of_what_it_lists(
        databases: dict[str, str], database: str) -> None:
    full = databases["full"]        # where there are none they are not asked for
    async with session(databases[database]) as db, listening(full) as (backend, sent):
        lists = itertools.product([*OWNERS, ANYBODY], IDS, (None, "task.assigned"), IDS, [50])
        for of in itertools.starmap(ReceiptFilter, lists):
            sent.clear()
            await backend.page(TENANT, of)
            [text] = [text for text in sent if "LIMIT 50" in text]
            index, _ = await first_scan(db, text, "receipts")

            assert index in [*(["receipts_key"] if of.task_id else []), *(["receipts_to"] if of.to else []),
                             *(["receipts_pkey"] if not of.task_id and not of.to else [])], of


SECONDARY = ["tasks_key", "tasks_owner", "tasks_type", "tasks_summary", "states_queue", "states_delayed",
             "states_lease", "states_holder", "states_status", "states_held", "states_check", "receipts_key",
             "receipts_to", "receipts_parent", "edges_parent", "obligations_age", "schedules_owner", "schedules_late",
             "presences_worker", "presences_claimed", "api_keys_id", "outbox_waiting", "outbox_offered",
             "ledger_arrival", "ledger_to", "ledger_task", "ledger_instance", "archived_task",
             "webhook_deliveries_state", "webhooks_open", "states_turn", "states_limited", "turns_open",
             "turns_blocked", "turns_until", "tasks_parent", "states_changed"]


async def test_all_indexes_are_known(cluster: Cluster, databases: dict[str, str]) -> None:
    async with connected(cluster.admin_url("empty")) as root:
        assert {name for name in (await Judge.of(root)).indexes if not name.endswith("_pkey")} == set(SECONDARY)


@pytest.fixture
async def lists(databases: dict[str, str]) -> Sent:
    """Return the statements of some lists."""
    return await listened(databases["full"], list_some)


@each("index", SECONDARY)
async def test_without_an_index_some_plan_would_be_at_fault(lists: Sent, cluster: Cluster, index: str) -> None:
    url = cluster.admin_url("full")
    async with connected(url) as root:
        judge, asked = await Judge.of(root), await functions(root)
        table = await root.fetchval("SELECT tablename FROM pg_indexes WHERE indexname = $1", index)
    # First those of its table: of the others none can be at fault.
    statements = sorted([*written(lists), *lists], key=lambda text: f"asyncgate.{table}" not in text)
    async with session(url) as db:
        await db.execute(f"BEGIN; RESET ROLE; DROP INDEX asyncgate.{index}; SET LOCAL ROLE asyncgate_app")
        if index == "receipts_key":     # a conflict is found by it, so without it a statement cannot be planned at all
            return
        fault: str | None = await anext(find_faults(db, judge, dict.fromkeys(statements)), None)
        for name, role in ACROSS.items():
            await db.execute(f"SET LOCAL ROLE {role}")
            for statement, types in asked[name]:
                fault = fault or next(iter(judge.faults(await function_plan(db, statement, types))), None)
        assert fault


async def list_some(backend: Any) -> None:
    """List the tasks of an owner, the receipts of an inbox, and one of them."""
    ada = Principal("agent", "agent-1")
    for _, fields in FILTERED_BY:
        await backend.page(TENANT, filtered(None, None, **fields))
    await backend.page(TENANT, filtered(None, None, by_change=True, changed_since=1.0, changed_before=2.0))
    await backend.page(TENANT, TaskCount(filtered(None, None), 10))
    await backend.page(TENANT, ReceiptFilter(ada, None, None, None, 50))
    await backend.receipt(TENANT, "none")
    for to, task_id, instance in [(ada, None, None), (None, "none", None), (None, None, "gate"), (None, None, None)]:
        await backend.page(TENANT, EntryFilter(to, task_id, None, instance, None, 50))
    await backend.page(TENANT, OutboxFilter("", 50))
    await backend.page(TENANT, OpenWebhooks())
    for state, newest in itertools.product(("parked", None), (False, True)):
        await backend.page(TENANT, DeliveryFilter("webhook-1", state, None, 50, newest))


# Heartbeats.


async def updates(backend: Any, admin: str, least: int) -> tuple[int, int]:
    """Return how many rows of states were updated so far, at least so many, and how many of those HOT."""
    backend.pool.expire()       # a session tells what it has done when it ends, if not before
    async with connected(admin) as db, asyncio.timeout(PATIENCE_SECONDS):
        while True:
            await backend.alive()
            done, hot = await db.fetchrow("SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables "
                                          "WHERE relname = 'states'")
            if done >= least:
                return done, hot
            await db.execute("SELECT pg_sleep(0.05)")


async def test_heartbeats_touch_no_index(cluster: Cluster) -> None:
    url = await cluster.migrated_database("heartbeats")
    backend: Any = await open_backend(url)
    gate = Gate(Engine(backend, settings_for_tests()), TENANT)
    w1 = gate.as_worker()
    for _ in range(10):
        await gate.create()
    offers = (await w1.lease_next(max_tasks=10)).tasks
    for offer in offers:
        await w1.start_task(**under(offer))
    before, hot_before = await updates(backend, cluster.admin_url("heartbeats"), 20)

    for _ in range(20):
        for offer in offers:
            await w1.renew_lease(**under(offer))
            await w1.report_progress(**under(offer), progress=1)

    after, hot_after = await updates(backend, cluster.admin_url("heartbeats"), before + 400)
    await backend.close()
    assert after - before == hot_after - hot_before == 400
