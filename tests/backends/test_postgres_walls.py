"""The wall between tenants on Postgres: it stands in the catalog, and holds whatever a statement or a caller forgets.

Everything is proven twice: the rule holds, and the test would notice if it did not.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import asyncpg
import msgspec
import pytest
from msgspec.structs import replace

import asyncgate
from asyncgate import Engine, Needs, Work
from asyncgate.backends import open_backend
from asyncgate.backends.postgres import statements as sql
from asyncgate.backends.postgres import turns
from asyncgate.backends.postgres.hosts import as_user
from asyncgate.clients.http import Exchange
from asyncgate.conformance.harness import NEEDED, Gate, Numbered, View, settings_for_tests, under
from asyncgate.conformance.postgres_server import Cluster, connected
from asyncgate.extras.ledger.outbox import Ledger
from asyncgate.extras.unique.rules import UniqueWork
from asyncgate.parts.app import Gate as App
from asyncgate.parts.identity.directory import Directory
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.errors import ArchiveUnavailable, DatabaseUnavailable, GateError, StartupError
from asyncgate.parts.model.ids import Ids
from asyncgate.parts.model.queries import (
    AheadOf,
    ArchivedFilter,
    EntryFilter,
    LeaseCount,
    LimitUse,
    ObligationFilter,
    OutboxFilter,
    OutboxOf,
    QueueFilter,
    ReceiptFilter,
    ScheduleFilter,
    TaskCount,
    TaskFilter,
    UnsentOf,
    WorkerFilter,
)
from asyncgate.parts.model.settings import (
    ArchiveSettings,
    DatabaseSettings,
    LedgerSettings,
    RateLimiting,
    RateLimits,
    SecuritySettings,
    Settings,
    Tier,
)
from asyncgate.parts.model.stored import (
    Bulk,
    Entry,
    Key,
    LedgerMark,
    Meter,
    Outgoing,
    Presence,
    Traffic,
    UsageEvent,
    UsageHead,
    key_of,
)
from asyncgate.parts.model.stored_families import Cascade
from asyncgate.parts.model.stored_handover import Handover
from asyncgate.parts.model.stored_limits import Hold, Limit, RateUse, Turn
from asyncgate.parts.model.stored_oauth import Consent, Grant, OAuthClient, Revocation, SignInLink, User
from asyncgate.parts.model.stored_output import OutputEntry
from asyncgate.parts.model.stored_types import DeclaredType
from asyncgate.parts.model.stored_unique import UniqueKey
from asyncgate.parts.model.stored_webhooks import Webhook, WebhookDelivery
from asyncgate.parts.model.wire import Principal
from asyncgate.parts.operations import OPERATIONS
from asyncgate.parts.receipts import archive
from asyncgate.parts.receipts.sealing import seal
from asyncgate.parts.upkeep import Upkeep
from tests.conftest import Served
from tests.support.each import each
from tests.support.kept_rows import WEBHOOK_ID, keep_erasure, keep_sign_ins, keep_webhooks
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

SCHEMA = Path(asyncgate.__file__).parent / "backends" / "schema" / "postgres"
FILE = [{"type": "file", "uri": "file:///out"}]

# In these no row belongs to a tenant, and these indexes serve upkeep, which asks for all tenants at once, and whoever
# shows a key, whose tenant is not known before it is found.
TENANTLESS = {"meta", "migrations", "instances", "enqueuers"}
LED_BY_TIME, LED_BY_ID = {"states_check", "schedules_late"}, {"api_keys_id"}
# What the owner may take rows of, behind the wall, in the functions that look whether they may go.
KEPT = ("receipts", "edges", "deliveries", "archived", "tasks", "states", "progress", "steps", "outputs", "events",
        "audit", "ledger", "api_keys")
WALL = "(tenant_id = ( SELECT asyncgate.tenant() AS tenant))"
TABLES = "pg_class AS c WHERE c.relnamespace = 'asyncgate'::regnamespace AND c.relkind IN ('r', 'p')"


def spell(before: str, *groups: str) -> set[str]:
    """Put words before each of several names: `spell("may", "a b")` is {"may a", "may b"}."""
    return {f"{before} {name}" for group in groups for name in group.split()}


# A rule → what breaks it, one text each → what may.
RULES: dict[str, tuple[str, set[str]]] = {
    "every table has a primary key": (f"""
        SELECT relname FROM {TABLES} AND NOT EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid AND indisprimary)""",
        set()),
    "every row says whose it is": (f"""
        SELECT relname FROM {TABLES} AND NOT EXISTS (
            SELECT FROM pg_attribute WHERE attrelid = c.oid AND attname = 'tenant_id' AND attnotnull
            AND atttypid = 'uuid'::regtype)""", TENANTLESS),
    "tenant_id leads every index": ("""
        SELECT i.relname FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid
        LEFT JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = x.indkey[0]
        WHERE i.relnamespace = 'asyncgate'::regnamespace AND a.attname IS DISTINCT FROM 'tenant_id'""",
        LED_BY_TIME | LED_BY_ID | {f"{name}_pkey" for name in TENANTLESS}),
    "row-level security is on, for the owner too": (f"""
        SELECT relname FROM {TABLES} AND NOT (relrowsecurity AND relforcerowsecurity)""", TENANTLESS),
    "the gate's role sees one tenant": (f"""
        SELECT relname FROM {TABLES} AND NOT EXISTS (
            SELECT FROM pg_policies WHERE schemaname = 'asyncgate' AND tablename = relname AND cmd = 'ALL'
            AND roles = '{{asyncgate_app}}' AND qual = '{WALL}' AND with_check = '{WALL}')""",
        TENANTLESS),
    "no other policy lets anybody see more": (f"""
        SELECT concat_ws(' ', cmd, tablename, roles) FROM pg_policies WHERE schemaname = 'asyncgate'
        AND NOT (roles = '{{asyncgate_app}}' AND qual = '{WALL}' AND with_check = '{WALL}')""",
        {f"{what} {{asyncgate_sweeper}}"
         for what in ("SELECT tenants", "SELECT schedules", "ALL states", "SELECT outbox", "SELECT queues",
                      "SELECT webhook_heads", "SELECT lanes", "SELECT limits", "SELECT holds", "SELECT cascades",
                      "SELECT handovers")}
        | {f"SELECT {table} {{asyncgate_auth}}" for table in ("api_keys", "accounts")}
        | {f"ALL {table} {{asyncgate_owner}}" for table in (*KEPT, "handovers")}
        | {"ALL segments {asyncgate_archivist}"}
        | {f"SELECT {table} {{asyncgate_owner}}" for table in (
            "segments", "seal_heads", "obligations", "erasures", "erased")}),
    "no role of ours is strong": ("""
        SELECT rolname FROM pg_roles WHERE rolname LIKE 'asyncgate\\_%'
        AND (rolsuper OR rolbypassrls OR rolcreaterole OR rolcreatedb OR rolreplication)""", set()),
    "only the gate and who looks after its archive can log in": ("""
        SELECT rolname FROM pg_roles WHERE rolname LIKE 'asyncgate\\_%' AND rolcanlogin""",
        {"asyncgate_app", "asyncgate_archivist"}),
    "no role of ours is another one too": ("""
        SELECT concat_ws(' in ', m.rolname, r.rolname) FROM pg_auth_members AS a
        JOIN pg_roles AS m ON m.oid = a.member JOIN pg_roles AS r ON r.oid = a.roleid
        WHERE m.rolname LIKE 'asyncgate\\_%'""", set()),
    "the owner, who cannot log in, owns all": ("""
        SELECT concat_ws(' owns ', pg_get_userbyid(owner), name) FROM (
            SELECT relowner, relname FROM pg_class WHERE relnamespace = 'asyncgate'::regnamespace
            UNION ALL SELECT proowner, proname FROM pg_proc WHERE pronamespace = 'asyncgate'::regnamespace
            UNION ALL SELECT nspowner, nspname FROM pg_namespace WHERE nspname = 'asyncgate') AS o (owner, name)
        WHERE pg_get_userbyid(owner) <> 'asyncgate_owner'""",
        spell("asyncgate_sweeper owns", "all_tenants overdue lapses unsent webhook_tenants depths count_overdue "
              "count_unanswered limit_depths cut_cascades handover_tenants")
        | {"asyncgate_auth owns find_key"}),
    "what the gate's role may change": (f"""
        SELECT concat_ws(' ', may, relname)
        FROM unnest(ARRAY['UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) AS may, {TABLES}
        AND (has_table_privilege('asyncgate_app', c.oid, may) OR may IN ('UPDATE', 'REFERENCES')
             AND has_any_column_privilege('asyncgate_app', c.oid, may))""",
        spell("UPDATE", "states queues progress schedules presences deliveries instances meta accounts api_keys "
                       "audit_heads usage meters usage_heads outbox ledger_marks seal_heads pauses "
                       "traffic bulks oauth_clients oauth_users oauth_consents oauth_grants "
                       "oauth_links revocation_heads webhooks webhook_heads webhook_deliveries "
                       "erasures declared_types type_policies holds limits rate_uses turns cascades unique_keys "
                       "handovers")
        | spell("DELETE", "obligations schedules instances outbox lanes queues traffic meters usage_events "
                         "oauth_clients oauth_users oauth_consents oauth_grants oauth_links revocations webhooks "
                         "webhook_deliveries presences bulks declared_types outputs holds limits rate_uses turns "
                         "cascades unique_keys handovers")),
    "what the roles that look across tenants may": (f"""
        SELECT concat_ws(' ', role, may, relname || '.' || attname)
        FROM unnest(ARRAY['asyncgate_sweeper', 'asyncgate_auth']) AS role,
             unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'REFERENCES']) AS may, pg_attribute AS a, {TABLES}
        AND a.attrelid = c.oid AND a.attnum > 0 AND has_column_privilege(role, c.oid, a.attnum, may)""",
        spell("asyncgate_sweeper SELECT", "tenants.tenant_id tenants.since outbox.tenant_id",
             "webhook_heads.tenant_id webhook_heads.number webhook_heads.tasks",
             "schedules.tenant_id schedules.schedule_id schedules.late_at",
             "states.tenant_id states.task_id states.asyncgate_instance states.status states.attempt "
             "states.max_attempts states.deadline_at states.expires_at states.check_at "
             "states.lane states.priority states.ready states.held states.updated_at states.next_eligible_at",
             "queues.tenant_id queues.lane queues.type queues.queued queues.held queues.leased",
             "lanes.tenant_id lanes.lane lanes.pattern limits.tenant_id limits.name limits.stopped_until",
             "holds.tenant_id holds.limit_name cascades.tenant_id cascades.task_id cascades.since",
             "handovers.tenant_id")
        | spell("asyncgate_sweeper UPDATE", "states.check_at")
        | spell("asyncgate_auth SELECT", "accounts.tenant_id accounts.suspended_at")
        | {f"asyncgate_auth SELECT api_keys.{name}" for name in ("tenant_id", *Key.__struct_fields__)}),
    "nor may they take rows away": (f"""
        SELECT concat_ws(' ', role, may, relname) FROM unnest(ARRAY['asyncgate_sweeper', 'asyncgate_auth']) AS role,
            unnest(ARRAY['DELETE', 'TRUNCATE', 'TRIGGER']) AS may, {TABLES}
        AND has_table_privilege(role, c.oid, may)""", set()),
    "who looks after the archive may say which segments there are": (f"""
        SELECT concat_ws(' ', may, relname)
        FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) AS may, {TABLES}
        AND has_table_privilege('asyncgate_archivist', c.oid, may)""", spell("SELECT", "segments") | spell(
            "INSERT", "segments")),
    "and the gate's role may not": (f"""
        SELECT may FROM unnest(ARRAY['INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) AS may, {TABLES}
        AND relname = 'segments' AND has_table_privilege('asyncgate_app', c.oid, may)""", set()),
    "nobody else may anything": (f"""
        SELECT relname FROM {TABLES} AND EXISTS (SELECT FROM aclexplode(relacl) WHERE grantee = 0)
        UNION ALL SELECT nspname FROM pg_namespace
        WHERE nspname = 'asyncgate' AND has_schema_privilege('public', oid, 'USAGE, CREATE')""", set()),
    "only the look-ups across tenants and the ways to take rows away run as another role": ("""
        SELECT proname FROM pg_proc WHERE pronamespace = 'asyncgate'::regnamespace AND prosecdef""",
        {"all_tenants", "overdue", "lapses", "unsent", "webhook_tenants", "find_key", "depths", "count_overdue",
         "count_unanswered", "limit_depths", "cut_cascades", "handover_tenants",
         "enqueue", "list_handovers", "retry_handover", "drop_handover",
         "archive_receipts", "forget_pointers", "prune_tasks", "prune_audit", "amend_tasks",
         "erase_receipts", "erase_events", "erase_audit", "erase_entries", "erase_keys"}),
    "nobody can lend them other tables, nor call them unasked": ("""
        SELECT proname FROM pg_proc WHERE pronamespace = 'asyncgate'::regnamespace AND prosecdef
        AND (proconfig IS DISTINCT FROM '{"search_path=pg_catalog, pg_temp"}'
             OR has_function_privilege('public', oid, 'EXECUTE')
             OR NOT has_function_privilege('asyncgate_app', oid, 'EXECUTE'))""", set()),
    "a view shows what its reader may see": ("""
        SELECT relname FROM pg_class WHERE relnamespace = 'asyncgate'::regnamespace AND relkind IN ('v', 'm', 'f')
        AND NOT (relkind = 'v' AND 'security_invoker=true' = ANY (coalesce(reloptions, '{}')))""", set()),
}
# For each rule a way to break it.
BREACHES = {
    "every table has a primary key": "CREATE TABLE asyncgate.stray (tenant_id uuid NOT NULL)",
    "every row says whose it is": "ALTER TABLE asyncgate.lanes ALTER tenant_id TYPE text USING tenant_id::text",
    "tenant_id leads every index": "CREATE INDEX stray ON asyncgate.tasks (type)",
    "row-level security is on, for the owner too": "ALTER TABLE asyncgate.events NO FORCE ROW LEVEL SECURITY",
    "the gate's role sees one tenant": "DROP POLICY tenant ON asyncgate.edges",
    "no other policy lets anybody see more": "CREATE POLICY stray ON asyncgate.tasks TO asyncgate_app USING (true)",
    "no role of ours is strong": "ALTER ROLE asyncgate_app BYPASSRLS",
    "only the gate and who looks after its archive can log in": "ALTER ROLE asyncgate_sweeper LOGIN",
    "no role of ours is another one too": "GRANT asyncgate_sweeper TO asyncgate_app",
    "the owner, who cannot log in, owns all": "ALTER TABLE asyncgate.lanes OWNER TO asyncgate_app",
    "what the gate's role may change": "GRANT UPDATE (body) ON asyncgate.receipts TO asyncgate_app",
    "what the roles that look across tenants may": "GRANT SELECT (body) ON asyncgate.receipts TO asyncgate_sweeper",
    "who looks after the archive may say which segments there are": "GRANT INSERT ON asyncgate.archived "
    "TO asyncgate_archivist",
    "and the gate's role may not": "GRANT INSERT ON asyncgate.segments TO asyncgate_app",
    "nor may they take rows away": "GRANT DELETE ON asyncgate.states TO asyncgate_sweeper",
    "nobody else may anything": "GRANT SELECT (body) ON asyncgate.receipts TO PUBLIC; "
    "GRANT SELECT ON asyncgate.edges TO PUBLIC",
    "only the look-ups across tenants and the ways to take rows away run as another role":
        "ALTER FUNCTION asyncgate.one_task SECURITY DEFINER",
    "nobody can lend them other tables, nor call them unasked": "ALTER FUNCTION asyncgate.overdue RESET search_path",
    "a view shows what its reader may see": "CREATE VIEW asyncgate.stray AS SELECT * FROM asyncgate.receipts",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        yield running


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> str:
    """The database of this module, as a gate gets in."""
    return asyncio.run(cluster.migrated_database("walls"))


@pytest.fixture(scope="module")
def admin(cluster: Cluster, url: str) -> str:
    """The same database, as a superuser gets in."""
    return cluster.admin_url("walls")


# The catalog.


async def breaches(db: Any, rule: str) -> set[str]:
    """What breaks a rule, or is let off although it does not."""
    query, exempt = RULES[rule]
    return {row[0] for row in await db.fetch(query)} ^ exempt


@each("rule", RULES)
async def test_the_catalog_keeps_the_rule(admin: str, rule: str) -> None:
    async with connected(admin) as db:
        assert await breaches(db, rule) == set()


@each("rule", RULES)
async def test_a_breach_of_the_rule_is_found(admin: str, rule: str) -> None:
    async with connected(admin) as db:
        await db.execute("BEGIN")
        if rule == "every row says whose it is":        # its type cannot change while others depend on it
            await db.execute("DROP POLICY tenant ON asyncgate.lanes")
        await db.execute(BREACHES[rule])
        assert await breaches(db, rule) != set()


def test_an_index_that_a_tenant_does_not_lead_says_why() -> None:
    text = "\n".join(path.read_text() for path in sorted(SCHEMA.glob("*.sql")))
    reasons = dict(re.findall(r"^CREATE (?:UNIQUE )?INDEX (\w+) ON .*?-- (.+)$", text, re.M))

    assert {name for name, reason in reasons.items() if "begins with the time" in reason} == LED_BY_TIME
    assert {name for name, reason in reasons.items() if "begins with the id" in reason} == LED_BY_ID


# Two tenants with rows of every kind, and the same ids of everything.

OURS, THEIRS = "it is ours", "it is theirs"


ARCHIVE = tempfile.TemporaryDirectory()
atexit.register(ARCHIVE.cleanup)


async def away(gate: Gate, mark: str) -> dict[str, str]:
    """Let a tenant have something in the archive; return what it is called."""
    await gate.create(payload=mark, type="away")
    done = await gate.claim("w-away", accept_types=["away"])
    assert done is not None
    await gate.as_worker("w-away").complete(**under(done), result={"said": mark}, artifacts=FILE)
    beside = gate.beside(archive=ArchiveSettings(directory=ARCHIVE.name))
    duty = await gate.backend.receipt(gate.tenant_id, done.obligation_receipt_id)
    assert duty is not None
    chain = await archive.gather_chain(beside.engine, gate.tenant_id, duty)
    assert chain is not None
    moved, ages = archive.ArchiveTally(), archive.Ages(math.inf, math.inf, math.inf, "g")
    head = await seal(gate.engine, gate.tenant_id)
    if head.last_id < max(chain.receipts):  # nothing is sealed behind what is in a ledger, and what is not sealed stays
        head = replace(head, last_id=max(chain.receipts))
        await gate.backend.transact(gate.tenant_id, Needs(), lambda work: work.keep_record(head))
    await archive.move_chains(beside.engine, gate.tenant_id, ages, [chain], moved)
    assert moved.receipts == 4
    page = await beside.as_admin().list_archived_receipts(task_id=done.task_id, limit=1)
    return {"away_task_id": done.task_id, "away_receipt_id": done.obligation_receipt_id,
            "away_cursor": str(page.next_cursor)}


async def live(gate: Gate, mark: str) -> dict[str, str]:
    """Let a tenant have rows of every kind; return what some are called, which another tenant's are called, too."""
    archived = await away(gate, mark)
    ada, w1, cron = gate.as_agent(), gate.as_worker(), gate.as_worker("cron")
    done = await gate.leased(payload=mark, idempotency_key="key", max_attempts=3)
    await w1.report_progress(**under(done), progress=mark)
    await w1.record_step(**under(done), seq=1, name="read", value=mark)
    await w1.append_output(**under(done), chunks=[mark])
    await w1.declare_type(type=f"declared-{mark}", description=mark, payload_schema={"title": mark})
    await gate.as_admin().set_type_policy(on_mismatch="refuse")
    cut_off = Cascade("cut off", "agent", "ada", mark, gate.now())
    handed = Handover("refused", "agent", "ada", "handed over", "{}", gate.now(), mark)
    for row in (cut_off, handed):
        await gate.engine.change(gate.tenant_id, partial(Work.keep_record, row=row), (type(row), key_of(row)))
    await w1.complete(**under(done), result={"said": mark}, artifacts=FILE)
    retried = await gate.leased(payload=mark, max_attempts=3, retry_backoff_seconds=600)
    await w1.fail(**under(retried), error=mark, retryable=True)
    made = []
    for schedule_id in ("nightly", "weekly"):
        offer = await gate.leased("cron", type="schedule.create", payload=mark)
        receipt = {"receipt_type": "schedule.created", "schedule_id": schedule_id, "body": {"said": mark}}
        made.append((await cron.emit_receipt(**under(offer), **receipt)).receipt_id)
    parents = [made[1], offer.obligation_receipt_id]
    await cron.emit_receipt(receipt_type="schedule.deleted", parents=parents, schedule_id="weekly")
    await cron.report_schedule(schedules=[
        {"schedule_id": "nightly", "next_run_at": "2099-01-01T00:00:00Z", "interval_seconds": 60}])
    await ada.ack_receipt(receipt_id=done.obligation_receipt_id)
    await ada.bootstrap()
    await gate.create(payload=mark, type="running")
    running = await gate.claim(accept_types=["running"], claim_id="claim")
    assert running is not None
    await w1.start_task(**under(running))
    await w1.report_progress(**under(running), progress=mark)
    await w1.renew_lease(**under(running))
    await w1.renew_lease(lease_id=running.lease_id)
    await gate.create(payload=mark, type="waiting")
    await Upkeep(gate.engine).store_presences()
    await operator_of(gate).create_tenant(tenant=gate.tenant_id, name=f"{mark} {gate.tenant_id}")
    await keep_books(gate, mark)
    await gate.as_admin().pause_work(type="never", reason=mark)
    limit = await limit_of(gate, "limit", mark)
    await gate.create(payload=mark, type="child", parent_task_id=running.task_id)
    gate.engine.extend(UniqueWork(gate.engine))
    await gate.create(payload=mark, type="unique", unique={"key": "k"})
    bulk = await bulk_of(gate, mark)
    return {**under(running), **await keys_of(gate, mark), **archived, **limit, "parent_task_id": running.task_id,
            "receipt_id": running.obligation_receipt_id, "created": made[0],
            "discharged": done.obligation_receipt_id, "schedule_id": "nightly", "key": "key", "claim": "claim",
            "worker": "w1", "agent": "ada", "type": "waiting", **bulk,
            **await webhook_of(gate, WEBHOOK_ID),
            "cursor": str((await ada.list_tasks(limit=1)).next_cursor), **await lists_of(gate, "waiting")}


async def webhook_of(gate: Gate, webhook_id: str, mark: str = "") -> dict[str, str]:
    """Return what an endpoint is called, and where the list of its deliveries goes on; with a mark it is made."""
    if mark:
        await gate.backend.transact(gate.tenant_id, Needs(), lambda work: keep_webhooks(work, mark, webhook_id))
    page = await gate.as_admin().list_deliveries(webhook_id=webhook_id, limit=1)
    return {"webhook_id": webhook_id, "deliveries_cursor": str(page.next_cursor)}


async def limit_of(gate: Gate, name: str, mark: str) -> dict[str, str]:
    """Let a tenant have a limit, tasks that have ended, count against it and wait for their turn; return its name."""
    await gate.as_admin().set_limit(name=name, concurrency_total=9, concurrency_per_key=1,
                                    rate={"count": 9, "seconds": 60}, overrides={mark: {"weight": 2}})
    for _ in range(3):
        await gate.create(payload=mark, type="limited", limits={name: "key"})
    done = await gate.claim("w-limited", accept_types=["limited"])
    assert done is not None
    assert await gate.claim("w-limited", accept_types=["limited"]) is None
    await gate.as_worker("w-limited").complete(**under(done), result=mark, artifacts=FILE, cost=2)
    leased = await gate.claim("w-limited", accept_types=["limited"])
    assert leased is not None
    assert await gate.claim("w-limited", accept_types=["limited"]) is None
    granted = {leased.task_id}
    await gate.backend.transact(gate.tenant_id, Needs(tasks=granted, granted=granted), lambda work: None)
    return {"limit": name}


async def bulk_of(gate: Gate, mark: str) -> dict[str, str]:
    """Let a tenant have a bulk that is not complete; return what it is called."""
    for _ in range(2):
        await gate.create(payload=mark, type="in bulk")
    preview = await gate.as_admin().preview_bulk(action="prioritize", type="in bulk", priority=1, reason=mark)
    begun = await gate.as_admin().run_bulk(confirmation=preview.confirmation, max_tasks=1)
    return {"bulk_id": begun.bulk_id, "confirmation": preview.confirmation}


async def lists_of(gate: Gate, type: str) -> dict[str, str]:
    """Return where the lists of those who look after a gate can go on, and a queue with tasks of a type."""
    root = gate.as_admin()
    return {"workers_cursor": str((await root.list_workers(limit=1)).cursor),
            "queue_id": (await root.list_queues(type=type)).queues[0].queue_id,
            "queues_cursor": str((await root.list_queues(limit=1)).next_cursor),
            "schedules_cursor": str((await root.list_schedules(limit=1)).cursor),
            "erasures_cursor": str((await root.list_erasures(limit=1)).cursor),
            "obligations_cursor": str((await root.list_obligations(limit=1)).next_cursor)}


# What goes by itself, or when somebody removes it.
OVER = [Limit("over", "{}", 0.0, "agent", "ada"), Hold("over", "key", "task", 0.0), RateUse("over", "key", 0.0, 1.0),
        Turn("0", "{}", 0.0, "idle"), DeclaredType("over", "", None, None, 0.0),
        OutputEntry("over", "1", "chunk", "null", 0, 0.0), Cascade("over", "agent", "ada", None, 0.0),
        UniqueKey("over", "task", 0.0), Handover("refused", "agent", "ada", "over", "{}", 0.0)]


async def keep_books(gate: Gate, mark: str) -> None:
    """Let a tenant have receipts on their way to a ledger, and some that others stored here."""
    gate.engine.extend(Ledger(Engine(gate.backend, Settings(
        receipt_mode="memorygate_integrated", ledger=LedgerSettings(url="http://127.0.0.1:9")))))
    await gate.create(payload=mark, type="told elsewhere")
    gate.engine.withdraw(gate.ledger)

    def store(work: Work) -> None:
        work.keep_record(Outgoing("sent", "", encode_json(mark).decode(), work.now))
        work.keep_record(
            Entry("stated", work.new_id(), "plan.made", "", "agent", "ada", "agent", "ada", "", mark, "{}"))
        work.keep_record(LedgerMark("task.completed", "stated"))
        for minute in ("1", "2"):
            work.keep_record(Traffic(minute, mark, "{}"))
        work.keep_record(UsageHead(300))
        for period in ("000000000000", "000000000001"):
            work.keep_record(UsageEvent(period, mark, 0, 300))
            work.keep_record(Meter(period, "0009", 1))
        keep_sign_ins(work, mark)
        keep_erasure(work, mark)
        work.keep_record(Presence("agent", "gone", None, 0.0, 0.0, 0))
        work.keep_record(Bulk("over", "cancel", "{}", "agent", "ada", 0, False, 0.0, 0.0, ""))
        for row in OVER:
            work.keep_record(row)
        keep_webhooks(work, mark)

    def take_out(work: Work) -> None:
        work.drop_record(Outgoing, "sent")
        work.drop_record(Traffic, "2", mark)
        work.drop_record(UsageEvent, "000000000001")
        work.drop_record(Meter, "000000000001", "0009")
        if mark == OURS:        # the neighbour keeps its own, which the same names would find
            for kind, name in ((OAuthClient, "client"), (User, "user"), (Grant, "grant"), (SignInLink, "link"),
                               (Revocation, "00000001")):
                work.drop_record(kind, name)
            work.drop_record(Consent, "user", "client")
            work.drop_record(Presence, "agent", "gone")
            work.drop_record(Bulk, "over")
            for row in OVER:
                work.drop_record(type(row), *key_of(row))
            work.drop_record(Webhook, WEBHOOK_ID)
            work.drop_record(WebhookDelivery, WEBHOOK_ID, "delivery")

    def put_back(work: Work) -> None:
        if mark == OURS:
            keep_sign_ins(work, mark)
            keep_webhooks(work, mark)
    for decide in (store, take_out, put_back):
        await gate.backend.transact(gate.tenant_id, Needs(), decide)


def operator_of(gate: Gate) -> View:
    """Return a gate that keeps tenants to their limits as the operator sees it, who looks after all of them."""
    security = SecuritySettings(rate_limiting=RateLimiting(enabled=True))
    return gate.beside(default_tenant_id=gate.tenant_id, security=security).as_admin()


def counting(gate: Gate) -> Gate:
    """Return the gate of a tenant whose tasks may have only so many receipts, so that they are counted."""
    tiers = RateLimits(free_tier=Tier(receipts_per_task=100))
    return gate.beside(security=SecuritySettings(rate_limiting=RateLimiting(enabled=True)), rate_limits=tiers)


async def keys_of(gate: Gate, mark: str) -> dict[str, str]:
    """Let a tenant have keys, one of them revoked, and a log that says so."""
    root = gate.as_admin()
    made = [await root.issue_key(name=mark, principal_id=mark) for _ in range(2)]
    await root.revoke_key(key_id=made[1].key.key_id, reason=mark)
    for _ in range(2):
        await gate.create(payload=mark)
        await root.seal_receipts()
    clients = [await root.register_client(client_name=mark, redirect_uris=["https://app.example/cb"]) for _ in range(2)]
    people = [await root.invite_user(email=f"{uuid.uuid4().hex}@example.com", name=mark) for _ in range(2)]
    session_id = await allow_sessions(gate, people[0].user_id, [client.client_id for client in clients])
    return {"tenant": gate.tenant_id, "key_id": made[0].key.key_id, "client_id": clients[0].client_id,
            "session_id": session_id, "sessions_cursor": str((await root.list_sessions(limit=1)).next_cursor),
            "consents_cursor": str((await root.list_consents(limit=1)).next_cursor),
            "user_id": people[0].user_id, "email": people[0].email,
            "users_cursor": str((await root.list_users(limit=1)).next_cursor),
            "clients_cursor": str((await root.list_clients(limit=1)).next_cursor),
            "keys_cursor": str((await root.list_keys(limit=1)).next_cursor),
            "audit_cursor": str((await root.list_audit(limit=1)).next_cursor),
            "export_cursor": str((await root.export_tenant(limit=1)).next_cursor),
            "seals_cursor": str((await root.list_seals(limit=1)).next_cursor)}


async def allow_sessions(gate: Gate, user_id: str, clients: list[str]) -> str:
    """Let a person have a session with each of some programs; return the id of one."""
    sessions = [str(uuid.uuid4()) for _ in clients]

    def keep(work: Work) -> None:
        for session_id, client_id in zip(sessions, clients, strict=True):
            work.keep_record(Grant(
                session_id, user_id, client_id, gate.tenant_id, "human", "ada", "agent", "[]", "https://gate.example",
                "https://app.example/cb", "", "", work.now, 3600, work.now, work.now + 3600, work.now,
                last_used_at=work.now))
            work.keep_record(Consent(user_id, client_id, "[]", "https://app.example/cb", work.now))
    await Directory(gate.engine).change(keep)
    return sessions[0]


async def live_more(gate: Gate, mark: str) -> dict[str, str]:
    """Let a tenant have what no other has; return what it is called."""
    offers = []
    for type, key in (("type-there", "key-there"), ("schedule.create", None), ("type-there", None)):
        await gate.create(type=type, payload=mark, idempotency_key=key)
        offers.append(await gate.claim("w-there", accept_types=[type], claim_id=f"{type}-claim-there"))
    await gate.create(type="type-there", by="bob-there", payload=mark)
    await gate.as_worker("w-there").declare_type(type="type-there", description=mark)
    first, second, _ = offers
    assert first is not None
    assert second is not None
    w = gate.as_worker("w-there")
    created = await w.emit_receipt(receipt_type="schedule.created", schedule_id="s-there", **under(second))
    await gate.create(type="child-there", payload=mark, parent_task_id=first.task_id)
    await gate.create(type="unique", payload=mark, unique={"key": "k"})
    bob, ended = gate.as_agent("bob-there"), await gate.create(type="type-there", by="bob-there")
    await bob.cancel_task(task_id=ended)
    duty = await gate.receipt(ended, "task.assigned")
    return {**under(first), **await keys_of(gate, mark), **await away(gate, mark),
            "receipt_id": first.obligation_receipt_id, "created": created.receipt_id,
            "discharged": duty.receipt_id, "schedule_id": "s-there", "key": "key-there",
            **await bulk_of(gate, mark), **await webhook_of(gate, "webhook-there", mark),
            **await limit_of(gate, "limit-there", mark), "parent_task_id": first.task_id,
            "claim": "type-there-claim-there", "worker": "w-there", "agent": "bob-there", "type": "type-there",
            "cursor": str((await bob.list_tasks(limit=1)).next_cursor),
            **await lists_of(gate, "type-there")}


def unlike(name: str) -> str:
    """Return a name of the same length that nobody has."""
    return re.sub(r"[0-9a-f]{8}$", "ffff0000", name) if re.fullmatch("[0-9a-f-]{36}", name) else name.swapcase()


class Neighbour:
    """The tenant whose rows nobody else may see or change."""

    def __init__(self, tenant_id: str, shared: dict[str, str], own: dict[str, str], tables: list[str]) -> None:
        self.tenant_id, self.shared, self.own, self.tables = tenant_id, shared, own, tables

    async def rows(self, db: Any) -> list[tuple[str, str]]:
        """Return all its rows, as somebody who may see them."""
        parts = [f"SELECT '{table}', r::text FROM asyncgate.{table} AS r WHERE tenant_id = '{self.tenant_id}'"
                 for table in self.tables]
        return [tuple(row) for row in await db.fetch(" UNION ALL ".join(parts) + " ORDER BY 1, 2")]

    @contextlib.asynccontextmanager
    async def untouched(self, admin: str) -> AsyncIterator[None]:
        """Expect that not a byte of its rows changes."""
        async with connected(admin) as db:
            before = await self.rows(db)
            yield
            assert await self.rows(db) == before


@contextlib.asynccontextmanager
async def backend_of(url: str, **settings: Any) -> AsyncIterator[Any]:
    """Open a database for the time of a block."""
    backend: Any = await open_backend(url, settings=DatabaseSettings(**settings))
    try:
        yield backend
    finally:
        await backend.close()


async def tables_of(db: Any) -> list[str]:
    """Name the tables whose rows belong to tenants, by the catalog."""
    return sorted({row[0] for row in await db.fetch(f"SELECT relname FROM {TABLES}")} - TENANTLESS)


async def settle(url: str, admin: str) -> Neighbour:
    """Let the neighbour live."""
    async with connected(admin) as db, backend_of(url) as backend:
        backend.ids, gate = Numbered(), Gate(Engine(backend, settings_for_tests()), str(uuid.uuid4()))
        shared, own = await live(gate, THEIRS), await live_more(gate, THEIRS)
        return Neighbour(gate.tenant_id, shared, own, await tables_of(db))


@pytest.fixture(scope="module")
def neighbour(url: str, admin: str) -> Neighbour:
    return asyncio.run(settle(url, admin))


@pytest.fixture(scope="module")
def our_tenant(url: str) -> str:
    """A tenant whose ids are the neighbour's, too; whoever changes its rows takes that back."""
    async def settled() -> str:
        async with backend_of(url) as backend:
            return (await twin(backend)).tenant_id
    return asyncio.run(settled())


async def twin(backend: Any, engine: Engine | None = None) -> Gate:
    """Return a tenant whose ids are the neighbour's, too."""
    gate = Gate(engine or Engine(backend, settings_for_tests()), str(uuid.uuid4()))
    backend.ids = Numbered()
    await live(gate, OURS)
    backend.ids = Ids()
    return gate


async def test_the_twins_have_rows_in_every_table_and_share_their_ids(
        admin: str, neighbour: Neighbour, our_tenant: str) -> None:
    async with connected(admin) as db:
        ours = Neighbour(our_tenant, {}, {}, neighbour.tables)
        assert {table for table, _ in await ours.rows(db)} == set(neighbour.tables)
        for table, key in (("states", "task_id"), ("states", "lease_id"), ("receipts", "receipt_id"),
                           ("events", "event_id"), ("edges", "child_id"), ("obligations", "receipt_id"),
                           ("audit", "audit_id")):
            mine, both = [await db.fetchval(f"""
                SELECT count(DISTINCT o.{key}) FROM asyncgate.{table} AS o
                WHERE o.tenant_id = $1 AND {more}""", our_tenant, *given) for more, given in (
                    (f"o.{key} IS NOT NULL", ()),
                    (f"o.{key} IN (SELECT {key} FROM asyncgate.{table} WHERE tenant_id = $2)", (neighbour.tenant_id,)))]
            assert mine == both > 0, table


# What the gate's role can do by hand.


@contextlib.asynccontextmanager
async def behind_the_wall(url: str, tenant_id: str | None) -> AsyncIterator[Any]:
    """Talk as the gate's role, within a transaction of a tenant that is taken back in the end."""
    async with connected(url) as db:
        await db.execute("BEGIN")
        if tenant_id is not None:
            await db.execute(f"SET LOCAL app.tenant_id = '{tenant_id}'")
        yield db
        await db.execute("ROLLBACK")


@pytest.mark.parametrize("tenant_id", [None, "", str(uuid.uuid4())], ids=["none", "empty", "one that has nothing"])
async def test_without_a_tenant_there_are_no_rows(url: str, neighbour: Neighbour, tenant_id: str | None) -> None:
    async with behind_the_wall(url, tenant_id) as db:
        counts = {table: await db.fetchval(f"SELECT count(*) FROM asyncgate.{table}") for table in neighbour.tables}

    assert counts == dict.fromkeys(neighbour.tables, 0)


async def test_a_tenant_sees_its_own_rows_and_all_of_them(url: str, admin: str, neighbour: Neighbour) -> None:
    async with behind_the_wall(url, neighbour.tenant_id) as db, connected(admin) as root:
        assert await root.fetchval("SELECT count(DISTINCT tenant_id) FROM asyncgate.tenants") > 0
        for table in neighbour.tables:
            seen = await db.fetch(f"SELECT tenant_id::text, count(*) FROM asyncgate.{table} GROUP BY 1")
            there = f"SELECT count(*) FROM asyncgate.{table} WHERE tenant_id = $1"
            assert [tuple(row) for row in seen] == [
                (neighbour.tenant_id, await root.fetchval(there, neighbour.tenant_id))], table


@pytest.mark.usefixtures("neighbour")       # of no row it is asked whose it is
async def test_a_tenant_that_is_no_uuid_is_an_error(url: str) -> None:
    async with behind_the_wall(url, "' OR true --".replace("'", "''")) as db:
        with pytest.raises(asyncpg.InvalidTextRepresentationError):
            await db.fetch("SELECT * FROM asyncgate.tasks")


DENIED = asyncpg.InsufficientPrivilegeError
FORBIDDEN = [
    "ALTER TABLE asyncgate.receipts DISABLE ROW LEVEL SECURITY",
    "ALTER TABLE asyncgate.receipts NO FORCE ROW LEVEL SECURITY",
    "CREATE POLICY mine ON asyncgate.receipts USING (true)",
    "DROP POLICY tenant ON asyncgate.receipts",
    "SET LOCAL row_security = off; SELECT count(*) FROM asyncgate.receipts",
    "SET LOCAL ROLE asyncgate_owner",
    "SET LOCAL ROLE asyncgate_sweeper",
    "SET LOCAL ROLE asyncgate_auth",
    "SET LOCAL ROLE asyncgate_archivist",
    "INSERT INTO asyncgate.segments VALUES ('{ours}', 'mine')",
    "SET LOCAL ROLE postgres",
    "SET LOCAL SESSION AUTHORIZATION postgres",
    "ALTER ROLE asyncgate_app BYPASSRLS",
    "CREATE OR REPLACE FUNCTION asyncgate.tenant() RETURNS uuid LANGUAGE sql AS 'SELECT NULL::uuid'",
    "CREATE TABLE asyncgate.mine ()",
    "SELECT lo_create(0)",
    "SELECT lo_creat(-1)",
    "SELECT lo_from_bytea(0, 'mine')",
    "CREATE TRIGGER mine BEFORE INSERT ON asyncgate.tasks EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    "TRUNCATE asyncgate.obligations",
    "DROP TABLE asyncgate.receipts",
    "UPDATE asyncgate.tasks SET payload = '{}'",
    "DELETE FROM asyncgate.tasks",
    "DELETE FROM asyncgate.audit_heads",
    "DELETE FROM asyncgate.api_keys",
    "DELETE FROM asyncgate.accounts",
    "UPDATE asyncgate.meta SET name = ''",
    "DELETE FROM asyncgate.meta",
    "INSERT INTO asyncgate.migrations VALUES (9999, 'mine', 1)",
    "INSERT INTO asyncgate.lanes VALUES ('{theirs}', 1, 'demo', '[]')",
    "INSERT INTO asyncgate.presences VALUES ('{theirs}', 'agent', 'ada', NULL, 0, 0, 0) "
    "ON CONFLICT (tenant_id, kind, id) DO UPDATE SET sessions = 99",
    "INSERT INTO asyncgate.lanes SELECT '{theirs}', lane, type, capabilities FROM asyncgate.lanes",
    "INSERT INTO asyncgate.audit_heads VALUES ('{theirs}', 9, 'made up') "
    "ON CONFLICT (tenant_id) DO UPDATE SET number = 9",
    "INSERT INTO asyncgate.audit "
    "SELECT '{theirs}', 'another', 99, at, event, severity, body, hash FROM asyncgate.audit",
    "INSERT INTO asyncgate.accounts VALUES ('{theirs}', 'mine', 0, 'paid', NULL, NULL, NULL) "
    "ON CONFLICT (tenant_id) DO UPDATE SET tier = 'paid'",
    "UPDATE asyncgate.api_keys SET tenant_id = '{theirs}'",
    "UPDATE asyncgate.accounts SET tenant_id = '{theirs}'",
    "UPDATE asyncgate.states SET tenant_id = '{theirs}'",
    "UPDATE asyncgate.schedules SET tenant_id = '{theirs}'",
]


APPEND_ONLY = {"receipts": "receipt_id", "edges": "child_id", "events": "event_id", "audit": "audit_id"}
FORBIDDEN += [change.format(table=table, column=column) for table, column in APPEND_ONLY.items() for change in (
    "UPDATE asyncgate.{table} SET {column} = 'made up'",
    "DELETE FROM asyncgate.{table}",
    "TRUNCATE asyncgate.{table}",
    "INSERT INTO asyncgate.{table} SELECT * FROM asyncgate.{table} "
    "ON CONFLICT ON CONSTRAINT {table}_pkey DO UPDATE SET {column} = 'made up'")]


@each("statement", FORBIDDEN)
async def test_the_role_of_the_gate_cannot(
        url: str, neighbour: Neighbour, our_tenant: str, statement: str) -> None:
    async with behind_the_wall(url, our_tenant) as db:
        with pytest.raises(DENIED):
            await db.execute(statement.replace("{theirs}", neighbour.tenant_id).replace("{ours}", our_tenant))


POINTER = ("INSERT INTO asyncgate.archived SELECT tenant_id, receipt_id, task_id, receipt_type, 'made up', 1, "
           "'made up', receipt_id, '[]' FROM asyncgate.receipts WHERE receipt_id = $1 RETURNING receipt_id")
SEALED_UP_TO = "UPDATE asyncgate.seal_heads SET last_id = $1"


@pytest.mark.parametrize("what", ["discharged", "owed", "not sealed"])
@pytest.mark.parametrize("registered", [False, True], ids=["made up", "registered"])
async def test_a_false_pointer_erases_no_receipt(
        url: str, admin: str, our_tenant: str, what: str, registered: bool) -> None:
    async with connected(admin) as root:
        receipt_id = await root.fetchval(
            "SELECT receipt_id FROM asyncgate.receipts WHERE tenant_id = $1 AND receipt_type = 'task.assigned' "
            "AND EXISTS (SELECT FROM asyncgate.obligations AS o WHERE o.tenant_id = $1 "
            "AND o.receipt_id = receipts.receipt_id) = $2 ORDER BY receipt_id LIMIT 1", our_tenant, what == "owed")
        if registered:
            await root.execute("INSERT INTO asyncgate.segments VALUES ($1, 'made up')", our_tenant)
    async with behind_the_wall(url, our_tenant) as db:
        assert await db.fetchval(POINTER, receipt_id) == receipt_id
        await db.execute(SEALED_UP_TO, "0" if what == "not sealed" else "z")
        if registered and what == "discharged":
            await db.execute("SELECT asyncgate.archive_receipts(ARRAY[$1])", receipt_id)
        else:
            with pytest.raises(DENIED, match=f"receipt {receipt_id} may not go"):
                await db.execute("SELECT asyncgate.archive_receipts(ARRAY[$1])", receipt_id)
    async with connected(admin) as root:
        await root.execute("DELETE FROM asyncgate.segments WHERE segment = 'made up'")


async def test_the_role_of_the_gate_registers_no_segment(url: str) -> None:
    async with backend_of(url, archive_url=url) as backend:
        with pytest.raises(ArchiveUnavailable, match=r"permission denied .* set database\.archive_url"):
            await backend.register_segment(str(uuid.uuid4()), "made up")


@pytest.mark.parametrize(("url", "expected"), [
    ("postgresql://app:hush@a,b:5433/gate?sslmode=require", "postgresql://archivist@a,b:5433/gate?sslmode=require"),
    ("postgresql:///gate?host=/run&user=app&password=hush", "postgresql://archivist@/gate?host=/run"),
    ("postgresql://db/gate", "postgresql://archivist@db/gate")])
def test_another_role_takes_no_password_along(url: str, expected: str) -> None:
    assert as_user(url, "archivist") == expected


@each("statement", [
    "UPDATE asyncgate.states SET priority = 9 WHERE tenant_id = '{theirs}'",
    "UPDATE asyncgate.progress AS p SET progress = s.task_id FROM asyncgate.states AS s "
    "WHERE s.tenant_id <> asyncgate.tenant() AND s.task_id = p.task_id",
    "DELETE FROM asyncgate.obligations WHERE tenant_id <> asyncgate.tenant()",
    "DELETE FROM asyncgate.schedules WHERE tenant_id = '{theirs}'",
    "DELETE FROM asyncgate.lanes WHERE tenant_id = '{theirs}'",
    "UPDATE asyncgate.queues SET queued = 0 WHERE tenant_id = '{theirs}'",
    "DELETE FROM asyncgate.queues WHERE tenant_id <> asyncgate.tenant()",
    "UPDATE asyncgate.api_keys SET revoked_at = 1 WHERE tenant_id = '{theirs}'",
    "UPDATE asyncgate.accounts SET suspended_at = 1 WHERE tenant_id <> asyncgate.tenant()",
    "UPDATE asyncgate.audit_heads SET number = 9 WHERE tenant_id = '{theirs}'",
])
async def test_what_the_role_of_the_gate_may_change_it_does_not_find_at_a_neighbour(
        url: str, admin: str, neighbour: Neighbour, our_tenant: str, statement: str) -> None:
    async with neighbour.untouched(admin), behind_the_wall(url, our_tenant) as db:
        assert (await db.execute(statement.replace("{theirs}", neighbour.tenant_id))).split()[1] == "0"


# Every operation, called with what only the neighbour has.

MINE: dict[str, Any] = {"task_id": "{task_id}", "lease_id": "{lease_id}"}
HELD: dict[str, Any] = {**MINE, "worker_id": "{worker}"}
ASKING: dict[str, Any] = {"principal_kind": "agent", "principal_id": "{agent}"}
OFFERED: dict[str, Any] = {
    "receipt_id": "01000000-0000-7000-8000-000000000000", "receipt_key": "{key}", "receipt_type": "task.completed",
    "created_at": 1.0, "from_kind": "worker", "from_id": "{worker}", "to_kind": "agent", "to_id": "{agent}",
    "task_id": "{task_id}", "lease_id": "{lease_id}", "schedule_id": "{schedule_id}", "asyncgate_instance": "g",
    "hash": "0" * 64, "body": "{{}}", "parents": []}
# How to call an operation so that it names everything it can; others name the ids that they take.
HOW: dict[str, list[dict[str, Any]]] = {
    "lease_next": [{"worker_id": "{worker}", "claim_id": "{claim}", "accept_types": ["{type}"]}],
    "create_task": [{"type": "another", "payload": None, "idempotency_key": "{key}", "agent_id": "ada"},
                    {"type": "another", "payload": None, "parent_task_id": "{task_id}"}],
    "create_tasks": [{"tasks": [{"type": "another", "payload": None, "idempotency_key": "{key}"}], "agent_id": "ada"}],
    "run_task": [{"type": "another", "payload": None, "idempotency_key": "{key}", "agent_id": "ada",
                  "wait_seconds": 0}, {"type": "another", "payload": None, "parent_task_id": "{task_id}",
                                       "wait_seconds": 0}],
    "list_tasks": [{"created_by": "{agent}"}, {"parent_task_id": "{parent_task_id}"}, {"type": "{type}"},
                   {"cursor": "{cursor}"}, {"id_prefix": "{task_id}"}],
    "rerun_task": [{"task_id": "{task_id}", "idempotency_key": "{key}"}],
    "pause_work": [{"type": "paused", "tenant": "{tenant}"}, {"worker": "{worker}"}],
    "drain_work": [{"type": "paused", "tenant": "{tenant}"}],
    "resume_work": [{"type": "paused", "tenant": "{tenant}"}, {"worker": "{worker}"}],
    "list_pauses": [{"tenant": "{tenant}"}],
    "set_limit": [{"name": "{limit}", "concurrency_per_key": 1, "tenant": "{tenant}"},
                  {"name": "{limit}", "overrides": {"some key": {"weight": 2}}}],
    "get_limit": [{"name": "{limit}", "tenant": "{tenant}"}, {"name": "{limit}"}],
    "list_limits": [{"tenant": "{tenant}"}],
    "remove_limit": [{"name": "{limit}", "tenant": "{tenant}"}, {"name": "{limit}"}],
    "preview_bulk": [{"action": "cancel", "type": "nothing"}, {"action": "rerun", "created_by": "{agent}"},
                     {"action": "cancel", "id_prefix": "{task_id}"}],
    "run_bulk": [{"confirmation": "{confirmation}"}],
    "get_bulk": [{"bulk_id": "{bulk_id}"}],
    "find_id": [{"part": "{task_id}"}],
    "search_tasks": [{"payload": "doc:7", "type": "{type}"}, {"created_by": "{agent}"}, {"cursor": "{cursor}"},
                     {"parent_task_id": "{parent_task_id}"}],
    "list_schedules": [{"principal_kind": "worker", "principal_id": "{worker}"}, {"cursor": "{schedules_cursor}"}],
    "list_obligations": [{}, ASKING, {"cursor": "{obligations_cursor}"}],
    "list_workers": [{}, {"principal_kind": "worker", "principal_id": "{worker}"}, {"cursor": "{workers_cursor}"}],
    "list_types": [{}, {"type": "{type}"}],
    "declare_type": [{"type": "{type}", "payload_schema": {}}],
    "remove_type": [{"type": "{type}"}],
    "set_type_policy": [{"on_mismatch": "warn"}],
    "list_queues": [{}, {"type": "{type}"}, {"cursor": "{queues_cursor}"}],
    "get_queue": [{"queue_id": "{queue_id}"}],
    "get_traffic": [{}, {"type": "{type}", "span": "day"}],
    "get_task_history": [{"task_id": "{task_id}"}, {"task_id": "{task_id}", "cursor": "{cursor}"}],
    "attach_artifacts": [{"task_id": "{task_id}", "artifacts": FILE}],
    "start_task": [HELD, MINE],
    "renew_lease": [HELD, MINE, {"lease_id": "{lease_id}"}, {"lease_id": "{lease_id}", "worker_id": "{worker}"}],
    "report_progress": [{**HELD, "progress": 1}, {**MINE, "progress": 1}],
    "complete": [{**HELD, "artifacts": FILE}, {**MINE, "artifacts": FILE}],
    "complete_tasks": [{"tasks": [{**HELD, "artifacts": FILE}, {**MINE, "artifacts": FILE}]}],
    "fail": [{**HELD, "error": "no"}, {**MINE, "error": "no"}],
    "release_lease": [HELD, MINE, {**MINE, "after_seconds": 60, "checkpoint": 1}],
    "request_input": [{**HELD, "key": "a", "message": "?"}, {**MINE, "key": "a", "message": "?", "checkpoint": 1}],
    "answer_input": [{"task_id": "{task_id}", "key": "a", "action": "accept"}],
    "list_inputs": [{"task_id": "{task_id}"}],
    "record_step": [{**HELD, "seq": 1, "name": "a", "value": 1}, {**MINE, "seq": 1, "name": "a", "value": 1}],
    "list_steps": [{"task_id": "{task_id}"}, {"task_id": "{task_id}", "seq": 1, "values": False},
                   {"task_id": "{task_id}", "cursor": "{cursor}"}],
    "wait_tasks": [{"parent_task_id": "{parent_task_id}"}, {"ids": ["{task_id}"]}],
    "append_output": [{**HELD, "chunks": ["a"]}, {**MINE, "chunks": ["a"], "position": 0}],
    "read_output": [{"task_id": "{task_id}"}, {"task_id": "{task_id}", "after": 1}],
    "list_leases": [{"worker_id": "{worker}"}, {"worker_id": "{worker}", "resumption_id": "{claim}"}],
    "list_receipts": [{"task_id": "{task_id}"}, {"to_id": "{agent}"}, {"since_receipt_id": "{receipt_id}"},
                      {"cursor": "{cursor}"}],
    "emit_receipt": [
        {**HELD, "receipt_type": "schedule.created", "schedule_id": "{schedule_id}", "parents": ["{receipt_id}"]},
        {**HELD, "receipt_type": "schedule.created", "schedule_id": "{schedule_id}"},
        {"receipt_type": "schedule.deleted", "schedule_id": "{schedule_id}", "parents": ["{created}"]}],
    "report_schedule": [{"worker_id": "{worker}", "schedules": [{"schedule_id": "{schedule_id}"}]},
                        {"worker_id": "cron", "schedules": [{"schedule_id": "{schedule_id}"}]}],
    "check_terminator": [{"parent_receipt_id": "{receipt_id}"}, {"parent_receipt_id": "{discharged}"}],
    "list_open_obligations": [ASKING, {"since_receipt_id": "{receipt_id}"}],
    "bootstrap": [ASKING, {"since_receipt_id": "{receipt_id}"}],
    "create_tenant": [{"tenant": "{tenant}", "name": "a name"}],
    "set_limits": [{"tenant": "{tenant}", "tier": "paid"}],
    "issue_key": [{"tenant": "{tenant}", "name": "a key", "principal_id": "{worker}"}],
    "list_keys": [{"tenant": "{tenant}"}, {"cursor": "{keys_cursor}"}],
    "rotate_key": [{"key_id": "{key_id}"}, {"key_id": "{key_id}", "tenant": "{tenant}"}],
    "rotate_credentials": [{"tenant": "{tenant}"}],
    "revoke_key": [{"key_id": "{key_id}"}, {"key_id": "{key_id}", "tenant": "{tenant}"}],
    "revoke_token": [{"token_id": "t1", "tenant": "{tenant}"}],
    "erase_principal": [{"principal_id": "{agent}", "plan": True},
                        {"tenant": "{tenant}", "principal_id": "{agent}", "plan": True}],
    "erase_tenant": [{"tenant": "{tenant}", "plan": True}],
    "list_erasures": [{"tenant": "{tenant}"}, {"cursor": "{erasures_cursor}"}],
    "register_client": [{"tenant": "{tenant}", "client_name": "an app", "redirect_uris": ["https://app.example/cb"]},
                        {"client_id": "{client_id}", "client_name": "an app", "redirect_uris": [
                            "https://app.example/cb"]}],
    "list_sessions": [{"user_id": "{user_id}"}, {"cursor": "{sessions_cursor}"}],
    "end_session": [{"session_id": "{session_id}"}],
    "sign_out_everywhere": [{"user_id": "{user_id}"}],
    "list_consents": [{"user_id": "{user_id}"}, {"cursor": "{consents_cursor}"}],
    "withdraw_consent": [{"user_id": "{user_id}", "client_id": "{client_id}"}],
    "list_clients": [{"tenant": "{tenant}"}, {"cursor": "{clients_cursor}"}],
    "change_client": [{"client_id": "{client_id}", "trusted": True}, {"client_id": "{client_id}", "disabled": True}],
    "remove_client": [{"client_id": "{client_id}"}],
    "list_users": [{"tenant": "{tenant}"}, {"cursor": "{users_cursor}"}, {"email": "{email}"}],
    "invite_user": [{"tenant": "{tenant}", "email": "new@example.com"}],
    "change_user": [{"user_id": "{user_id}", "role": "worker"}, {"user_id": "{user_id}", "disabled": True}],
    "remove_user": [{"user_id": "{user_id}"}],
    "make_sign_in_link": [{"tenant": "{tenant}", "principal_id": "{worker}"}],
    "create_webhook": [{"tenant": "{tenant}", "endpoint": "https://hooks.invalid/"}],
    "list_webhooks": [{"tenant": "{tenant}"}],
    "create_task_webhook": [{"task_id": "{task_id}", "endpoint": "https://hooks.invalid/"}],
    "list_task_webhooks": [{"task_id": "{task_id}"}],
    "remove_task_webhook": [{"webhook_id": "{task_id}.0"}],
    **{name: [{"webhook_id": "{webhook_id}", "tenant": "{tenant}"}, {"webhook_id": "{webhook_id}"}]
       for name in ("change_webhook", "remove_webhook", "rotate_webhook_secret", "test_webhook")},
    "list_deliveries": [{"webhook_id": "{webhook_id}", "tenant": "{tenant}"},
                        {"webhook_id": "{webhook_id}", "cursor": "{deliveries_cursor}"}],
    "replay_deliveries": [{"webhook_id": "{webhook_id}", "tenant": "{tenant}"},
                          {"webhook_id": "{webhook_id}", "delivery_ids": ["delivery"]}],
    "list_seals": [{"cursor": "{seals_cursor}"}],
    "export_receipts": [{"after": "{receipt_id}"}],
    "export_tenant": [{"tenant": "{tenant}"}, {"cursor": "{export_cursor}"}],
    "export_principal": [{"principal_kind": "worker", "principal_id": "{worker}"},
                         {"principal_id": "ada", "tenant": "{tenant}"}, {"cursor": "{export_cursor}"}],
    "import_receipts": [{"receipts": [{**OFFERED, "receipt_id": "{receipt_id}"}]},
                        {"receipts": [{**OFFERED, "parents": ["{receipt_id}"], "task_id": "{task_id}"}]}],
    "list_archived_receipts": [{"task_id": "{away_task_id}"}, {"receipt_id": "{away_receipt_id}"},
                               {"task_id": "{away_task_id}", "cursor": "{away_cursor}"}],
    "restore_archive": [{"task_id": "{away_task_id}"}],
    "set_budget": [{"tenant": "{tenant}", "quantity": "tasks", "monthly": 0}],
    "get_budgets": [{"tenant": "{tenant}"}],
    "get_usage": [{"tenant": "{tenant}"}, {"cursor": "{audit_cursor}", "all_tenants": True}],
    "list_audit": [{"tenant": "{tenant}"}, {"cursor": "{audit_cursor}"}, {"event": "key_issued"},
                   {"key_id": "{key_id}"}, {"session_id": "{session_id}"}, {"token_id": "{session_id}"}],
}
# These are for the operator only, who looks after all tenants.
OPERATORS = {"create_tenant", "list_tenants", "suspend_tenant", "set_limits", "drain_gate", "resume_gate",
             "erase_tenant"}
# Whoever asks is named by these, and by these all that is asked about.
ASKERS = {"tenant_id", "principal_id", "principal_instance_id", "agent_id", "agent_instance_id", "worker_id",
          "worker_instance_id"}
PROCESSES = {"instance_id"}     # these name a process of the gate, which no tenant owns
IDS = {"task_id", "lease_id", "receipt_id", "schedule_id", "key_id", "tenant"}
NAMING = re.compile(r".*_id|.*_key|parents|cursor|created_by|accept_types|tenant")


def how(operation: str) -> list[dict[str, Any]]:
    """Return the ways to call an operation."""
    ids = {name: f"{{{name}}}" for name in OPERATIONS[operation].takes.__struct_fields__ if name in IDS}
    return HOW.get(operation, [{**NEEDED.get(operation, {}), **ids}])


def filled(value: Any, names: dict[str, str]) -> Any:
    """Put names into a request."""
    if isinstance(value, str):
        return value.format_map(names)
    if isinstance(value, dict):
        return {name: filled(held, names) for name, held in value.items()}
    return [filled(item, names) for item in value] if isinstance(value, list) else value


VARYING = re.compile(rb'[0-9a-f]{8}-[0-9a-f]{4}-[47][0-9a-f-]{21}|20\d\d-\d\d-\d\dT[0-9:.]+Z|'
                     rb'(?:uptime|(?:age|oldest_wait)_seconds)\\?": ?[0-9.e-]+|'
                     rb'(?:confirmation|next_cursor)\\?": ?\\?"[\w-]+')
Tongue = Callable[[str, dict[str, Any]], Awaitable[bytes]]


def tongues(served: Any, gate: Gate, token: str) -> dict[str, Tongue]:
    """The ways to ask the gate of one tenant: at the engine in every role, over REST, and over MCP."""
    def at_engine(view: View) -> Tongue:
        async def ask(operation: str, fields: dict[str, Any]) -> bytes:
            try:
                return msgspec.json.encode(await view.perform(OPERATIONS[operation], **fields))
            except GateError as refusal:
                return f"{refusal.status} ".encode() + msgspec.json.encode(refusal.body())
        return ask

    async def rest(operation: str, fields: dict[str, Any]) -> bytes:
        request = Exchange("http://localhost", "").request(operation, fields)
        target = request["url"].removeprefix("http://localhost")
        query = "?" + urlencode(request["params"]) if request.get("params") else ""
        answer = await served.call(request["method"], target + query, request.get("content"), token=token)
        pairs = [(name, value) for name, value in answer.pairs if name != "content-length"]   # ages differ in length
        return repr((answer.status, pairs)).encode() + bytes(answer.content)

    async def mcp(operation: str, fields: dict[str, Any]) -> bytes:
        told = {"jsonrpc": "2.0", "id": 1, "method": "tools/call",
                "params": {"name": f"asyncgate.{operation}", "arguments": fields}}
        answer = await served.call("POST", "/mcp", told, headers=[("content-type", "application/json")], token=token)
        return bytes(answer.content)

    return {"as admin": at_engine(gate.as_admin()), "as agent": at_engine(gate.as_agent()),
            "as worker": at_engine(gate.as_worker()), "over REST": rest, "over MCP": mcp}


WITHOUT_LIMITS: dict[str, Any] = {"security": SecuritySettings(rate_limiting=RateLimiting(enabled=False))}


@pytest.fixture
async def served(serve: Any) -> Any:
    """A gate without upkeep, which would seal the receipts of all twins, and tell of other runs in each health.

    Without limits, too, which a gate of several tenants has by default: each answer would tell how many calls are left.
    """
    served = await serve(**WITHOUT_LIMITS)
    await served.end_loops()
    return served


@pytest.fixture
async def ours(served: Any, neighbour: Neighbour) -> dict[str, Tongue]:
    """The ways to ask as a tenant that is the neighbour's twin."""
    gate = await twin(served.backend, served.engine)
    made = await gate.as_admin().issue_key(name="root", principal_kind="human", principal_id="root", role="admin")
    return tongues(served, gate, made.api_key)


def test_each_request_names_all_that_it_can() -> None:
    def named(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(named, value))
        return {*value, *named(list(value.values()))} if isinstance(value, dict) else set()

    missing = {name: {field for field in op.takes.__struct_fields__ if NAMING.fullmatch(field)} - ASKERS - PROCESSES
               - named(how(name)) for name, op in OPERATIONS.items()}
    # What is told of somebody or something else is not looked for.
    missing = {name: fields - {"created_by"} if name in ("create_task", "run_task") else fields
               for name, fields in missing.items()}
    unnamed = {name: fields for name, fields in missing.items() if fields}
    assert unnamed == {}, "say in HOW how to call these, with the name of everything that they can be asked about"


def masked(text: bytes, names: dict[str, str]) -> bytes:
    """Take out of an answer what was asked about, and what differs whenever one asks."""
    for name in names.values():
        text = text.replace(name.encode(), b"it")
    return VARYING.sub(b"varies", text)


@pytest.mark.parametrize("text", [b'"uptime":%d', b'\\"uptime\\":%d', b'\\"age_seconds\\": %d'])
def test_what_differs_whenever_one_asks_is_taken_out_of_an_answer_however_it_is_quoted(text: bytes) -> None:
    assert masked(text % 9, {}) == masked(text % 10, {})


# A read leaves the twin as it is; a write gets one for itself.
WRITES = [name for name, op in OPERATIONS.items() if op.kind == "W"]
READS = sorted(OPERATIONS.keys() - WRITES)
# What leaves something behind that another answer would show comes behind that one.
ORDERED = [*READS, *sorted(WRITES, key=lambda name: name not in ("resume_work", "remove_limit"))]


@each("operation", ORDERED)
async def test_what_only_the_neighbour_has_is_answered_like_what_nobody_has(
        admin: str, neighbour: Neighbour, ours: dict[str, Tongue], operation: str) -> None:
    unknown = {what: unlike(name) for what, name in neighbour.own.items()}

    async with neighbour.untouched(admin):
        for fields in how(operation):
            for way, ask in ours.items():
                foreign, none = [masked(await ask(operation, filled(fields, names)), names)
                                 for names in (neighbour.own, unknown)]
                assert foreign == none, f"{way}: {fields}"
                assert THEIRS.encode() not in foreign


async def expect_own(admin: str, neighbour: Neighbour, ours: dict[str, Tongue], operation: str) -> None:
    """Expect that what both have is one's own."""
    async with neighbour.untouched(admin):
        for fields in how(operation):
            for way, ask in ours.items():
                assert THEIRS.encode() not in await ask(operation, filled(fields, neighbour.shared)), f"{way}: {fields}"


@each("operation", READS)
async def test_what_both_have_is_ones_own_to_read(
        admin: str, neighbour: Neighbour, ours: dict[str, Tongue], operation: str) -> None:
    await expect_own(admin, neighbour, ours, operation)


# These name nothing that somebody could have.
NAMELESS = {"export_receipts", *(name for name in OPERATIONS if "'{" not in str(how(name)))}


async def expect_otherwise(ask: Tongue, own: dict[str, str], operation: str) -> None:
    """Expect another answer for what somebody has than for what nobody has."""
    answers = []
    for fields in how(operation):
        for names in (own, {what: unlike(name) for what, name in own.items()}):
            answers.append(masked(await ask(operation, filled(fields, names)), names))

    assert answers[::2] != answers[1::2]


@pytest.fixture
async def theirs(served: Any) -> tuple[Tongue, dict[str, str]]:
    """Return a way to ask as a tenant, and what it has."""
    gate = Gate(served.engine, str(uuid.uuid4()))
    return tongues(served, gate, "none")["as admin"], await live_more(gate, THEIRS)


class Stage:
    """A database with the neighbour and its twin, of which each write gets a copy: to let them live takes longer."""

    def __init__(self, cluster: Cluster, neighbour: Neighbour, tenant_id: str, key: str) -> None:
        self.cluster, self.neighbour, self.tenant_id, self.key = cluster, neighbour, tenant_id, key

    @classmethod
    async def build(cls, cluster: Cluster) -> Stage:
        """Let both live."""
        url = await cluster.migrated_database("stage")
        neighbour = await settle(url, cluster.admin_url("stage"))
        async with backend_of(url) as backend:
            gate = await twin(backend)
            made = await gate.as_admin().issue_key(
                name="root", principal_kind="human", principal_id="root", role="admin")
        return cls(cluster, neighbour, gate.tenant_id, made.api_key)

    @contextlib.asynccontextmanager
    async def copied(self) -> AsyncIterator[Any]:
        """Serve a copy."""
        await self.cluster.create_database("stage_copy", "stage")
        app = App(settings_for_tests(**WITHOUT_LIMITS), await open_backend(self.cluster.url("stage_copy")))
        async with app.app.router.lifespan_context(app.app):
            served = Served(app)
            await served.end_loops()
            yield served
        await self.cluster.drop_databases("stage_copy")


@pytest.fixture(scope="module")
def stage(cluster: Cluster) -> Stage:
    return asyncio.run(Stage.build(cluster))


@each("operation", WRITES)
async def test_what_both_have_is_ones_own_to_change_and_whoever_has_it_is_answered_otherwise(
        stage: Stage, operation: str) -> None:
    neighbour = stage.neighbour
    async with stage.copied() as served:
        ours, theirs = (Gate(served.engine, tenant_id) for tenant_id in (stage.tenant_id, neighbour.tenant_id))

        await expect_own(stage.cluster.admin_url("stage_copy"), neighbour, tongues(served, ours, stage.key), operation)
        if operation not in OPERATORS | NAMELESS:
            await expect_otherwise(tongues(served, theirs, "none")["as admin"], neighbour.own, operation)


@each("operation", sorted({*READS} - OPERATORS - NAMELESS))
async def test_whoever_has_it_reads_otherwise(theirs: tuple[Tongue, dict[str, str]], operation: str) -> None:
    await expect_otherwise(*theirs, operation)


@each("operation", sorted(OPERATORS))
async def test_what_is_for_the_operator_is_refused_whoever_else_asks(
        neighbour: Neighbour, ours: dict[str, Tongue], operation: str) -> None:
    for fields in how(operation):
        for way, ask in ours.items():
            assert b"forbidden" in await ask(operation, filled(fields, neighbour.own)), way


# Every statement, robbed of what makes it ask for one tenant.

PREDICATE = re.compile(r"(?:\b\w+\.)?\btenant_id = (\$\d+)(?:::uuid)?")
# How many rows this transaction has written so far, those of savepoints that were rolled back among them.
WRITTEN = """
    SELECT sum(pg_stat_get_xact_tuples_inserted(oid) + pg_stat_get_xact_tuples_updated(oid)
               + pg_stat_get_xact_tuples_deleted(oid))
    FROM pg_class WHERE relnamespace = 'asyncgate'::regnamespace AND relkind = 'r'"""


def mutants(statement: str) -> Iterator[str]:
    """Return a statement without each of its tenant predicates in turn, and without any."""
    for match in PREDICATE.finditer(statement):
        yield f"{statement[:match.start()]}{match[1]}::uuid IS NOT NULL{statement[match.end():]}"
    yield PREDICATE.sub(r"\1::uuid IS NOT NULL", statement)


class Trials:
    """What a gate sends, tried out with every tenant predicate missing, and with another tenant's id."""

    def __init__(self, pool: Any, superuser: str, tenant_id: str, neighbour: Neighbour,
                 rows: list[tuple[str, str]]) -> None:
        self.pool, self.superuser, self.tenant_id, self.neighbour = pool, superuser, tenant_id, neighbour
        self.rows = rows        # of the neighbour, who does nothing meanwhile
        self.tried, self.lent = set[str](), set[str]()      # mutants, and statements that were lent another id
        self.leaks_without, self.faults = set[str](), list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    @contextlib.asynccontextmanager
    async def acquire(self) -> AsyncIterator[Any]:
        """Hand out a connection that tries before it sends."""
        async with self.pool.acquire() as db:
            yield Trying(db, self)

    async def attempt(self, db: Any, statement: str, given: tuple[Any, ...]) -> None:
        """Try all that can be left out of a statement, and leave no trace of it."""
        if not db.is_in_transaction() or self.tenant_id not in map(str, given) or statement == sql.BEHIND_WALL:
            return
        self.lent.add(statement)
        right = await self.outcome(db, statement, given)
        for mutant in set(mutants(statement)) - {statement}:
            self.tried.add(mutant)
            if await self.outcome(db, mutant, given) != right:
                self.faults.append(mutant)
            if await self.outcome(db, mutant, given, wall=False) != right:
                self.leaks_without.add(mutant)
        foreign, nobody = [[other if str(argument) == self.tenant_id else argument for argument in given]
                           for other in (self.neighbour.tenant_id, str(uuid.uuid4()))]
        if await self.outcome(db, statement, foreign) != await self.outcome(db, statement, nobody):
            self.faults.append(f"with the neighbour's id: {statement}")

    async def outcome(self, db: Any, statement: str, given: Iterable[Any], wall: bool = True) -> Any:
        """Return what a statement answers, and the neighbour's rows after it, with or without the wall.

        The rows are read only after a statement that wrote something: to read them takes longer than most statements.
        """
        before = await db.fetchval(WRITTEN)
        db.add("SAVEPOINT trial")
        if not wall:
            db.add(f"SET LOCAL ROLE {self.superuser}")
        try:
            # The clock, the transaction and the seconds are the first that LOAD answers.
            rows = [row[3 * ("clock_timestamp()" in statement):] for row in await db.fetch(statement, *given)]
            await db.execute(f"SET LOCAL ROLE {self.superuser}")
            wrote = await db.fetchval(WRITTEN) > before
            return sorted(map(repr, rows)), await self.neighbour.rows(db) if wrote else self.rows
        except asyncpg.PostgresError as refusal:
            return type(refusal)
        finally:
            await db.execute("ROLLBACK TO trial")


class Trying:
    """A connection that tries before it sends."""

    def __init__(self, db: Any, trials: Trials) -> None:
        self.db, self.trials, self.noted = db, trials, list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.db, name)

    def add(self, statement: str, *given: Any) -> list[Any]:
        """Note a statement."""
        rows: list[Any] = []
        self.noted.append((statement, given, rows))
        return rows

    async def run(self) -> None:
        """Try each statement, then send it by itself."""
        noted, self.noted = self.noted, []
        for statement, given, rows in noted:
            await self.trials.attempt(self.db, statement, given)
            rows += await self.db.fetch(statement, *given)

    async def fetch(self, statement: str, *given: Any) -> list[Any]:
        """Try, then send."""
        rows = self.add(statement, *given)
        await self.run()
        return rows

    execute = fetch

    async def fetchval(self, statement: str, *given: Any) -> Any:
        """Try, then send."""
        return (await self.fetch(statement, *given))[0][0]


async def read_all(gate: Gate, names: dict[str, str]) -> None:
    """Read in every way there is."""
    tenant, ada = gate.tenant_id, Principal("agent", "ada")
    for owner in (None, ada):
        for before in (None, "f"):
            await gate.backend.page(tenant, TaskFilter(owner, "queued" if before else None, None, before, 10))
            await gate.backend.page(tenant, TaskFilter(owner, None, None, before, 10, None, bool(before), "d", "S"))
            await gate.backend.page(tenant, TaskFilter(owner, None, None, before, 10, type_prefix="d"))
        for task_id in (None, names["task_id"]):
            await gate.backend.page(tenant, ReceiptFilter(owner, task_id, None, None, 10))
        await gate.backend.page(tenant, TaskCount(TaskFilter(owner, "queued", None, None, 0, type_prefix="d"), 10))
        changed = TaskFilter(owner, None, None, None, 10, by_change=True, changed_since=0.0, changed_before=1e12)
        await gate.backend.page(tenant, changed)
    await gate.as_worker().list_leases()
    await gate.as_admin().list_webhooks()
    await gate.as_agent().get_task_history(task_id=names["task_id"])
    await gate.as_agent().check_terminator(parent_receipt_id=names["discharged"])
    await gate.as_agent().list_open_obligations()
    for asked in (None, ada):
        await gate.backend.page(tenant, ObligationFilter(asked, None, 10))
        await gate.backend.page(tenant, ScheduleFilter(asked, None, 10))
    for count in (LeaseCount(), LeaseCount("demo"), LeaseCount(lane=0), LeaseCount(worker_id="w1")):
        await gate.backend.page(tenant, count)
    for type, after in ((None, None), ("demo", ("demo", 0))):
        await gate.backend.page(tenant, QueueFilter(type, None, after, 10))
    await gate.backend.next_due(tenant)
    await gate.backend.page(tenant, ArchivedFilter(names["away_task_id"]))
    await gate.as_admin().import_receipts(**filled(HOW["import_receipts"][0], names))
    await gate.everything()
    for to in (None, ada):
        await gate.backend.page(tenant, EntryFilter(to, None, None, None, None, 10))
    waiting = await gate.backend.page(tenant, OutboxFilter("", 10))
    await gate.backend.page(tenant, OutboxFilter("", 10, "offered"))
    await gate.backend.page(tenant, OutboxOf(tuple([row.receipt_id for row in waiting])))
    await gate.backend.lag(tenant)
    await gate.backend.page(tenant, WorkerFilter(("", ""), 10, latest=True))
    await gate.backend.page(tenant, UnsentOf(names["task_id"], 10))
    stored = await gate.backend.page(tenant, TaskFilter(None, None, None, None, 10))
    for limits in (None, '{"limit":"key"}'):
        await gate.backend.page(tenant, AheadOf(stored[0][0].lane, 0, "f", 10, limits))
        await gate.backend.page(tenant, LimitUse("limit", 10, limits and "key"))


async def beat_many(gate: Gate) -> None:
    """Change so many rows at once that they travel together: renew leases, and complete."""
    w = gate.as_worker("w-many")
    await gate.as_agent().create_tasks(tasks=[{"type": "many", "payload": None}] * (sql.MOST_BOUND + 1))
    offers = (await w.lease_next(accept_types=["many"], max_tasks=sql.MOST_BOUND + 1)).tasks
    await asyncio.gather(*(w.renew_lease(**under(offer)) for offer in offers))
    await w.complete_tasks(tasks=[{**under(offer), "artifacts": [{"uri": "x"}]} for offer in offers])


async def waited_for(admin: str, tenant_id: str, task_id: str) -> None:
    """Let a task look as if its progress had come in while somebody waited for its lock."""
    async with connected(admin) as db:
        await db.execute("UPDATE asyncgate.states SET told = told + 1 WHERE tenant_id = $1 AND task_id = $2",
                         tenant_id, task_id)


async def test_a_statement_without_its_tenant_still_finds_nothing_of_a_neighbour(
        admin: str, neighbour: Neighbour) -> None:
    async with connected(admin) as db:
        rows = await neighbour.rows(db)
    async with backend_of(admin, trusted_role=True) as backend:
        gate = Gate(Engine(backend, settings_for_tests()), str(uuid.uuid4()))
        trials = backend.pool = Trials(backend.pool, str(urlsplit(admin).username), gate.tenant_id, neighbour, rows)
        backend.ids = Numbered()

        async with neighbour.untouched(admin):
            names = await live(gate, OURS)
            await live_more(gate, OURS)
            await read_all(gate, names)
            await waited_for(admin, gate.tenant_id, names["task_id"])
            await counting(gate).as_agent().cancel_task(task_id=names["task_id"])
            await beat_many(gate)
            backend.lanes.clear()
            gate.skip(601)
            assert await gate.claim(accept_types=["demo"])
            leaks, tried = len(trials.leaks_without), len(trials.tried)
            await backend.drop_lanes()      # what it asks most is which lanes are in use: more of them show nothing

    assert trials.faults == []
    # Without the wall most would have reached the neighbour's rows: it is the wall that is tested here.
    assert leaks > tried / 2 > 50
    assert never_sent(trials.lent) == set()


def never_sent(statements: set[str]) -> set[str]:
    """Name what the backend can send of a tenant and has not sent."""
    texts = {**vars(sql), **{name: text for name, text in vars(turns).items() if "{" not in str(text)}}
    whole = {name: text for name, text in texts.items() if isinstance(text, str) and PREDICATE.search(text)}
    unsent = {name for name, text in whole.items() if not any(text in statement for statement in statements)}
    return unsent | never_loaded(statements) | never_saved(statements)


def never_saved(statements: set[str]) -> set[str]:
    """Name each table of which no statement saves rows, or saves them as JSON where it else goes row by row."""
    ways = {name: sql.SAVES[name][1].partition("{")[0].replace(":tenant", "$1") for name in sql.SAVES}
    ways |= {f"a row of {name}": sql.save_row(name)[0] for name in sql.ROW_BY_ROW}
    return {name for name, text in ways.items() if not any(text in statement for statement in statements)}


def never_loaded(statements: set[str]) -> set[str]:
    """Name each way to name tasks, and each kind of LOAD, that no statement is."""
    loads = [(ways, some) for number in range(len(sql.NAMED) + 1) for some in (False, True)
             for ways in itertools.combinations(sql.NAMED, number)
             if any(sql.load(ways, some, some, of_lane=lane)[0] in statement
                    for statement in statements for lane in (False, True))]
    kinds = {*sql.NAMED, *itertools.product((False, True), repeat=2)}
    kinds -= {way for ways, _ in loads for way in ways} | {(bool(ways), some) for ways, some in loads}
    return {f"load {kind}" for kind in kinds}


async def test_a_key_is_found_before_its_tenant_is_known_and_only_by_its_whole_id(
        url: str, neighbour: Neighbour, our_tenant: str) -> None:
    key_id = neighbour.own["key_id"]
    for tenant_id in (None, our_tenant):
        async with behind_the_wall(url, tenant_id) as db:
            rows = await db.fetch("SELECT tenant::text, suspended, (key).name FROM asyncgate.find_key($1)", key_id)
            assert [tuple(row) for row in rows] == [(neighbour.tenant_id, False, THEIRS)]
            for name in ("", "%", "_" * len(key_id), key_id[:-1], key_id + " ", unlike(key_id), None):
                assert await db.fetch("SELECT * FROM asyncgate.find_key($1)", name) == [], name


# What the functions of the schema ask for whoever calls them, tried in the same way.
CALLS = {"one_task": "SELECT f::text FROM asyncgate.one_task($1, '{task_id}') AS f",
         "open_obligations": "SELECT f::text FROM asyncgate.open_obligations($1, 'agent', 'ada', '', 100) AS f"}


async def test_a_function_without_its_tenant_still_finds_nothing_of_a_neighbour(
        admin: str, neighbour: Neighbour, our_tenant: str) -> None:
    # Which of two rows is the first one is chance, but it is wrong for one of the two.
    tried, leaks_without, both = 0, 0, (our_tenant, neighbour.tenant_id)
    async with connected(admin) as db:
        written = dict(await db.fetch("""
            SELECT proname, pg_get_functiondef(oid) FROM pg_proc
            WHERE pronamespace = 'asyncgate'::regnamespace AND NOT prosecdef AND prosrc LIKE '%asyncgate.%'
                AND has_function_privilege('asyncgate_app', oid, 'EXECUTE')"""))
        assert written.keys() == CALLS.keys()
        for name, text in written.items():
            call = CALLS[name].format_map(neighbour.shared)
            right = {tenant: await answer_of(db, "", call, tenant, "asyncgate_app") for tenant in both}
            assert all(right.values())
            for match in re.finditer(r"\b\w+\.tenant_id = tenant\b", text):
                mutant = f"{text[:match.start()]}true{text[match.end():]}"
                walled, open_to_all = [{tenant: await answer_of(db, mutant, call, tenant, role) for tenant in both}
                                       for role in ("asyncgate_app", "session_user")]
                assert walled == right, match[0]
                leaks_without += open_to_all != right
                tried += 1
    assert (tried, leaks_without >= 5) == (7, True)


async def answer_of(db: Any, function: str, call: str, tenant_id: str, role: str) -> list[str]:
    """Return what a role is answered by a function, which is as it was afterwards."""
    await db.execute(f"BEGIN; {function or 'SELECT'}; SET LOCAL ROLE {role if role != 'session_user' else 'NONE'}")
    try:
        return sorted(row[0] for row in await db.fetch(call, tenant_id))
    finally:
        await db.execute("ROLLBACK")


# What goes wrong in the middle of a transaction leaves no tenant behind.

POOL = 3


@contextlib.asynccontextmanager
async def waiting_batch(backend: Any, admin: str, tenant_id: str, task_id: str) -> AsyncIterator[asyncio.Task[None]]:
    """Begin a batch that waits, its tenant set, for a row that somebody else has locked."""
    async with connected(admin) as db, db.transaction():
        await db.execute("SELECT FROM asyncgate.states WHERE tenant_id = $1 AND task_id = $2 FOR UPDATE",
                         tenant_id, task_id)
        batch = asyncio.ensure_future(backend.transact(tenant_id, Needs(tasks={task_id}), lambda work: None))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await db.fetchval("SELECT count(*) FROM pg_locks "   # who waits for this one
                                        "WHERE NOT granted AND transactionid = pg_current_xact_id()::xid"):
                await db.execute("SELECT pg_sleep(0.01)")
        yield batch


async def a_bug(backend: Any, admin: str, tenant_id: str, task_id: str) -> None:
    def decide(work: Work) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await backend.transact(tenant_id, Needs(tasks={task_id}), decide)


async def an_error_of_the_database(backend: Any, admin: str, tenant_id: str, task_id: str) -> None:
    with pytest.raises(DatabaseUnavailable):
        await backend.receipt(tenant_id, "\0")


async def a_cancel(backend: Any, admin: str, tenant_id: str, task_id: str) -> None:
    async with waiting_batch(backend, admin, tenant_id, task_id) as batch:
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch


async def a_timeout(backend: Any, admin: str, tenant_id: str, task_id: str) -> None:
    async with waiting_batch(backend, admin, tenant_id, task_id) as batch:
        with pytest.raises(DatabaseUnavailable):
            await batch


@pytest.mark.parametrize("mishap", [a_bug, an_error_of_the_database, a_cancel, a_timeout])
async def test_no_connection_of_the_pool_keeps_a_tenant(
        url: str, admin: str, our_tenant: str, neighbour: Neighbour, mishap: Any) -> None:
    async with backend_of(url, pool_size=POOL, timeout_seconds=2.0) as backend:
        before = await sessions(backend, neighbour.tables)

        await mishap(backend, admin, our_tenant, neighbour.shared["task_id"])

        assert await sessions(backend, neighbour.tables) == before == [("", 0)] * POOL
        assert await backend.task(our_tenant, neighbour.shared["task_id"])


async def sessions(backend: Any, tables: list[str]) -> list[tuple[str, int]]:
    """Return which tenant each connection of the pool has, and how many rows it sees."""
    count = " + ".join(f"(SELECT count(*) FROM asyncgate.{table})" for table in tables)
    async with contextlib.AsyncExitStack() as taken:
        pool = [await taken.enter_async_context(backend.pool.acquire()) for _ in range(POOL)]
        return [row for db in pool
                for row in await db.fetch(f"SELECT coalesce(current_setting('app.tenant_id', true), ''), {count}")]


async def test_a_tenant_that_outlives_its_transaction_would_be_found(
        url: str, our_tenant: str, neighbour: Neighbour) -> None:
    async with backend_of(url, pool_size=POOL) as backend:
        async with backend.pool.acquire() as db:
            await db.execute(f"SET app.tenant_id = '{our_tenant}'")

        tenants = [tenant for tenant, rows in await sessions(backend, neighbour.tables) if rows]
        assert tenants == [our_tenant]


# Who may not serve.

STRONG = {
    "a superuser": ("postgres", "is a superuser"),
    "one that bypasses the wall": ("bypasses", "may bypass row-level security"),
    "a member of the owner": ("owns", "owns the tables"),
    "one that can become the owner": ("can_own", "owns the tables"),
    "a member of the sweeper": ("sweeps", "sees all tenants' work"),
    "a member of those who look up keys": ("looks_up", "sees all tenants' keys"),
    "one that can become a superuser": ("can_all", "is a superuser"),
}


@pytest.fixture(scope="module")
def strong(cluster: Cluster, admin: str) -> Callable[[str], str]:
    """Return what gives the URL for a role that is too strong."""
    async def make() -> None:
        async with connected(admin) as db:
            await db.execute("""
                CREATE ROLE bypasses LOGIN BYPASSRLS IN ROLE asyncgate_app;
                CREATE ROLE owns LOGIN IN ROLE asyncgate_app, asyncgate_owner;
                CREATE ROLE can_own LOGIN IN ROLE asyncgate_app;
                CREATE ROLE between NOINHERIT IN ROLE asyncgate_owner;
                GRANT between TO can_own;
                CREATE ROLE sweeps LOGIN IN ROLE asyncgate_app, asyncgate_sweeper;
                CREATE ROLE looks_up LOGIN IN ROLE asyncgate_app, asyncgate_auth;
                CREATE ROLE all_may NOLOGIN SUPERUSER;
                CREATE ROLE can_all LOGIN IN ROLE asyncgate_app, all_may""")
    asyncio.run(make())
    return lambda role: cluster.url("walls", role)


@pytest.mark.parametrize("who", STRONG)
async def test_a_backend_does_not_open_for(strong: Callable[[str], str], who: str) -> None:
    role, why = STRONG[who]

    with pytest.raises(StartupError, match=rf"^the role {role} {why}, .*: connect as asyncgate_app") as refused:
        await open_backend(strong(role))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("who", STRONG)
def test_a_server_does_not_start_for(strong: Callable[[str], str], who: str) -> None:
    role, why = STRONG[who]

    ran = subprocess.run([sys.executable, "-m", "asyncgate", "serve", "--port", "0", "--database", strong(role)],
                         env={**os.environ, "ASYNCGATE_API_KEY": "x"}, capture_output=True, text=True,
                         timeout=PATIENCE_SECONDS)

    assert ran.returncode != 0
    assert ran.stdout == ""
    assert [line for line in ran.stderr.splitlines() if " INFO " not in line] == [
        f"the role {role} {why}, so the wall between tenants would not restrict it: connect as asyncgate_app, or "
        "set database.trusted_role=true for trials on your own machine"]


@pytest.mark.parametrize("who", STRONG)
async def test_for_trials_it_works_as_the_role_of_the_gate(
        strong: Callable[[str], str], who: str, our_tenant: str, neighbour: Neighbour) -> None:
    async with backend_of(strong(STRONG[who][0]), trusted_role=True, pool_size=POOL) as backend:
        async with backend.pool.acquire() as db:
            assert await db.fetchval("SELECT current_user") == "asyncgate_app"

        assert await sessions(backend, neighbour.tables) == [("", 0)] * POOL
        gate = Gate(Engine(backend, settings_for_tests()), our_tenant)
        assert (await gate.task(neighbour.shared["task_id"])).tenant_id == our_tenant
