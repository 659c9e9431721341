"""Erasure: everything that is kept of a principal or of a tenant goes, on request (spec 21.12.1).

First a plan, which changes nothing, then the erasure with a confirmation.  Whoever asks again goes on where an
interrupted one was; when nothing is left, nothing changes.  docs/privacy.md says what goes, what stays and why.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from asyncgate import ANOMALY, Caller, Engine, Operation, Work, forbid, its_key, receipt_key
from asyncgate.extras.privacy import erasing, wire_erasure
from asyncgate.extras.privacy.rules import judge
from asyncgate.extras.privacy.whom import OURS
from asyncgate.parts.identity import admin
from asyncgate.parts.identity.notices import mark_once, read_rows, tell_admins
from asyncgate.parts.model import errors, queries, stored, stored_oauth, wire
from asyncgate.parts.model.content import to_canonical
from asyncgate.parts.model.database import FileBackend
from asyncgate.parts.model.ids import mark_of
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.views import to_utc, to_utc_or_none
from asyncgate.parts.receipts.archive import note_return

PLAN_SECONDS = 2.0
COUNTED_TOGETHER = 20
MOST_COUNTED = 1000         # tasks in flight, leases and obligations that a plan counts
SHORTEST_NAME = 3           # of a person, to be looked for in texts

GOES = [
    "Credentials first: keys, sign-ins, sessions, links and consents. Its access tokens are refused from then on.",
    "Tasks: those in flight are canceled, each with its receipts; then all of them go, with payloads, results, "
    "progress, leases and events.",
    "Leases on tasks of others: they are given back, and those tasks wait for another worker. Their last lease keeps a "
    "pseudonym.",
    "Obligations: what is owed to it is discharged by task.canceled or schedule.deleted from the gate; they pass to "
    "nobody. Its schedules end likewise.",
    "Receipts from it, to it and of its tasks, and the gate's own that name it: body, names, key and hash.",
    "Files of the archive that have such receipts: their other receipts come back to the database until the archive "
    "runs again.",
    "Receipts that wait for a ledger; what it has stored in this gate as a ledger.",
    "Presence, pauses and bulk actions: its name and its words.",
    "Lines of the audit log: addresses, programs, texts and names; event, time, operation and ids stay, with a "
    "pseudonym.",
]
STAYS = [
    "Receipts keep id, type, time, task, parents and kinds of sender and recipient, and the digest that seals have of "
    "them: others' chains and the seals stay sound. The digest covers a salt, which "
    "goes: it confirms no guess.",
    "Results and progress that it has delivered for tasks of others, and what others have written about it: that is "
    "theirs.",
    "Ids: of tasks, receipts, leases, keys and sessions, in receipts, revocations and the audit log. They are random "
    "or numbered.",
    "Revocations: until the access tokens that they refuse have expired, 90 days at most, with whom or what "
    "they are of, who revoked them and why.",
    "Types and capabilities that workers name in their own claims: those are the workers'.",
    "Webhooks and programs: the tenant's, with a pseudonym of who made them and instead of its name. An endpoint that "
    "names it is disabled, a redirect address that names it is removed.",
    "Usage and counts: numbers of the tenant.",
]
AFTERWARDS = [
    "The database: freed pages and the logs beside the file keep old bytes until they are rewritten. On SQLite erase "
    "with vacuum. On Postgres, each when no older transaction is open in any database of the server, run as a "
    "superuser VACUUM FULL on the whole database, DELETE FROM pg_statistic (its samples have names), VACUUM FULL "
    "pg_statistic, ANALYZE and CHECKPOINT; "
    "the files of pg_wal keep old bytes until they are reused or, with wal_recycle off, deleted, and archived WAL "
    "until it expires.",
    "Backups, replicas and copies: they keep it until they are replaced. After restoring an older one, erase again.",
    "Exports and receipts that somebody has fetched or that webhooks have posted, and the folders of workers (the "
    "state of AI workers, payloads in artifacts): delete them there.",
    "Logs of the gate, of proxies and of tracing: they name principals and tasks; let them expire.",
    "A ledger (receipt_mode {mode}): {ledger}",
    "Tokens of an outside issuer and the shared token are not the gate's to revoke: who still has one can call under "
    "that name again.",
    "Tasks and receipts of others whose texts name it, and short names within the words of others, are not looked for.",
]
NO_LEDGER = "none is set."
LEDGER_TYPE = "erasure.ledger"      # of the task that asks who runs a ledger
LEDGER = ("it has its own copies of the receipts, and only who runs it can erase them. The erasure creates a task of "
          f"type {LEDGER_TYPE}, owed to you until it is completed: ask there, and complete it with the answer.")
LEDGER_REQUEST = """Ask who runs the ledger to erase the receipts of this erasure; complete this task with the answer.
list_erasures shows its pseudonym when it has ended, list_receipts the ids of the receipts by the pseudonym."""


async def erase_principal(engine: Engine, caller: Caller,
                          ask: wire_erasure.ErasePrincipal) -> wire_erasure.ErasureReport:
    """Erase everything that is kept about a principal: first with plan, which changes nothing, then with confirm.

    Credentials go first, work in flight is canceled, obligations are discharged; receipts stay without content, so that
    seals and the chains of others stay sound.  An interrupted erasure goes on when it is called again.  Spec 21.12.1.
    """
    tenant_id = await admin.target_tenant(engine, caller, ask.tenant)
    who = wire.Principal(ask.principal_kind, ask.principal_id)
    if who.kind in OURS:
        raise errors.InvalidRequest(
            f"the gate itself, {who}, cannot be erased; erase an agent, a worker, a service or a human")
    if caller.bound and who.same(caller.principal) and tenant_id == caller.tenant_id:
        raise errors.Forbidden("nobody can erase itself, because it could not see the outcome; ask another admin")
    return await erase(engine, caller, ask, tenant_id, who, ask.principal_id)


async def erase_tenant(engine: Engine, caller: Caller, ask: wire_erasure.EraseTenant) -> wire_erasure.ErasureReport:
    """Erase everything that is kept about a tenant: first with plan, which changes nothing, then with confirm.

    For the operator.  The tenant is suspended at once and stays so, without a name.  Receipts stay without content, so
    that its seals stay sound.  An interrupted erasure goes on when it is called again.  Spec 21.12.1.
    """
    admin.require_operator(engine, caller)
    tenant_id = await admin.tenant_of(engine, ask.tenant or "")
    if tenant_id == engine.settings.default_tenant_id:
        raise errors.Forbidden(
            "the default tenant is the operator's own and cannot be erased; delete the database instead")
    return await erase(engine, caller, ask, tenant_id, None, ask.tenant or "")


async def list_erasures(engine: Engine, caller: Caller, ask: wire_erasure.ListErasures) -> wire_erasure.Erasures:
    """List the tenant's erasures, the oldest first, with their counts and proofs."""
    tenant_id = await admin.target_tenant(engine, caller, ask.tenant)
    rows, *ends = await admin.read_page(engine, caller, ask, ("erasures", tenant_id), tenant_id,
                                        queries.Rows(stored.Erasure), lambda row: row.of_tenant == tenant_id)
    # Without its key, and while it is under way without the name of whom it is of.
    return wire_erasure.Erasures([wire_erasure.ErasureRecord(
        row.erasure_id, row.of_tenant, "principal" if row.principal_kind else "tenant",
        row.principal_id if row.ended_at is not None else None, row.ended_at is not None,
        show_counts(erasing.decode_counts(row.counts)), to_utc(row.begun_at), to_utc_or_none(row.ended_at),
        row.digest or None, row.proof) for row in rows], *ends)


async def erase(engine: Engine, caller: Caller, ask: wire_erasure.ErasePrincipal | wire_erasure.EraseTenant,
                tenant_id: str,
                who: wire.Principal | None, name: str) -> wire_erasure.ErasureReport:
    """Plan an erasure, begin it, or go on with it."""
    if caller.capabilities is not None or caller.task_types is not None:
        raise forbid(caller, "a key that is limited to capabilities or task types cannot erase")
    if not ask.plan and ask.confirm != name:
        raise errors.InvalidConfirmation(
            f"confirm must be {name!r}, the name of what is erased for ever; call with plan "
            "first to see what goes and what stays")
    under_way = await find_open(engine, tenant_id, who)
    if ask.plan or under_way is None:
        planned = await make_plan(engine, tenant_id, who, under_way)
        if ask.plan:
            return report_plan(engine.settings, planned, "planned")
        if not planned.left:
            await compact_if_asked(engine, caller, ask)     # upkeep may have ended it, or the disk was full before
            return report_plan(engine.settings, planned, "nothing")
    erasure = under_way or await draft(engine, tenant_id, who)
    request = await ask_ledger(engine, caller, erasure)     # first: a request too many is seen, a lost one is not
    if under_way is None:
        await keep_erasure(engine, caller, tenant_id, erasure)
    erasure = await go_on(engine, caller, erasure)
    if erasure.ended_at is not None:
        def note(work: Work) -> None:
            admin.audit_change(engine, work, "erasure_confirmed", "critical", caller, erasure_id=erasure.erasure_id,
                               tenant=erasure.of_tenant, digest=erasure.digest)
        await admin.change_record(engine, caller, caller.tenant_id, stored.Erasure, (erasure.erasure_id,), note)
        await compact_if_asked(engine, caller, ask)
    return wire_erasure.ErasureReport(
        "erased" if erasure.ended_at is not None else "erasing", show_counts(erasing.decode_counts(erasure.counts)), 0,
        0, 0, len(msgspec.json.decode(erasure.segments)), [], STAYS, list_afterwards(engine.settings),
        erasure.erasure_id, to_utc(erasure.begun_at), to_utc_or_none(erasure.ended_at), erasure.digest or None,
        erasure.proof, request)


async def compact_if_asked(engine: Engine, caller: Caller,
                           ask: wire_erasure.ErasePrincipal | wire_erasure.EraseTenant) -> None:
    """Rewrite the file for an operator that asks for it, so that no page keeps old bytes."""
    if ask.vacuum and admin.operates(engine, caller) and isinstance(engine.backend, FileBackend):
        await engine.backend.compact()


async def ask_ledger(engine: Engine, caller: Caller, erasure: stored.Erasure) -> str | None:
    """Ask for erasure at the ledger, by a task that its caller is owed until somebody completes it; once."""
    if engine.settings.receipt_mode == "standalone":
        return None
    order = wire.CreateTask(type=LEDGER_TYPE, payload=Raw(to_canonical({
        "erasure_id": erasure.erasure_id, "tenant": erasure.of_tenant})), idempotency_key=erasure.erasure_id,
        task_summary="Ask for erasure at the ledger", instructions=LEDGER_REQUEST)
    made: wire.Created = await engine.write(Engine.create_task, its_key, replace(caller, bound=True), order)
    return made.task_id


async def go_on(engine: Engine, caller: Caller, erasure: stored.Erasure) -> stored.Erasure:
    """Go on with an erasure that has begun; return how far it is."""
    operator = engine.settings.default_tenant_id
    if operator != erasure.of_tenant and await engine.backend.record(operator, stored.Erasure,
                                                                     erasure.erasure_id) is None:
        await keep_erasure(engine, caller, operator, erasure)       # an interrupted call may not have come this far
    eraser = erasing.Eraser(engine, erasure)
    erasure = await eraser.run()
    if erasure.step == "end" and erasure.ended_at is None:
        await tell_caller(engine, caller, erasure)
        sign = await make_signer(engine.settings)
        erasure = await eraser.end(sign, {"scope": "principal" if erasure.principal_kind else "tenant"})
    return erasure


class ErasureFinisher:
    """Goes on with erasures that were interrupted, or had to wait for other processes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def run(self) -> int:
        """Go on with each that is open; return how many have ended."""
        if not await self.engine.leads("erasures"):
            return 0        # another process does
        return sum([await self.finish(tenant_id) for tenant_id in await self.engine.backend.tenants()])

    async def finish(self, tenant_id: str) -> int:
        """Go on with those of a tenant; return how many have ended."""
        under_way = [row async for row in read_rows(self.engine, tenant_id, stored.Erasure)
                     if row.ended_at is None and row.of_tenant == tenant_id]
        own = replace(self.engine.make_own_caller(tenant_id), bound=False)      # nobody asks, so nobody is told
        ended = [await go_on(self.engine, own, row) for row in under_way]
        return sum(row.ended_at is not None for row in ended)


async def find_open(engine: Engine, tenant_id: str, who: wire.Principal | None) -> stored.Erasure | None:
    """Return the erasure of a principal or a tenant that is under way."""
    kind, id = (who.kind, who.id) if who else ("", "")
    async for row in read_rows(engine, tenant_id, stored.Erasure):
        if row.ended_at is None and (row.of_tenant, row.principal_kind, row.principal_id) == (tenant_id, kind, id):
            return row
    return None


# The plan.


class Planned(Struct):
    """What an erasure would do."""

    counts: erasing.Counts
    in_flight: int
    leases: int
    obligations: int
    segments: int
    at_least: bool          # it had no time to look at everything

    @property
    def left(self) -> bool:
        """Whether there is anything to erase."""
        return bool(self.counts or self.in_flight or self.leases or self.obligations or self.segments
                    or self.at_least)


async def make_plan(engine: Engine, tenant_id: str, who: wire.Principal | None,
                    under_way: stored.Erasure | None) -> Planned:
    """Judge each row, and count what would change, for a few seconds: nobody waits longer for a plan."""
    until, over = asyncio.get_running_loop().time() + PLAN_SECONDS, False
    eraser = erasing.Eraser(engine, under_way or await draft(engine, tenant_id, who))
    counts: erasing.Counts = {}
    for place, kind in erasing.places(engine, eraser.whom):
        whom = erasing.here_or_there(eraser.whom, place)
        async for row in read_rows(engine, place, kind):
            if (after := judge(whom, row, eraser.owned)) != row:
                of = counts.setdefault(stored.TABLES[kind], {})
                what = "deleted" if after is None else "changed"
                of[what] = of.get(what, 0) + 1
            if over := asyncio.get_running_loop().time() > until:
                break
        if over:
            break
    in_flight = sum([await count_tasks(engine, tenant_id, queries.TaskFilter(who, status, None, None, COUNTED_TOGETHER),
                                       until)
                     for status in erasing.LIVE])
    over = over or asyncio.get_running_loop().time() > until
    leases = await engine.backend.page(tenant_id, queries.LeaseFilter(who)) if who else []
    owed = await engine.backend.page(tenant_id, queries.ObligationFilter(who, None, MOST_COUNTED))
    return Planned(counts, in_flight, len(leases), len(owed),
                   0 if over else len(await eraser.find_segments()), over)


async def count_tasks(engine: Engine, tenant_id: str, of: queries.TaskFilter, until: float) -> int:
    """Count tasks up to a number and a time, few of them read together: each may have a megabyte."""
    count = 0
    while rows := await engine.backend.page(tenant_id, of):
        count, of = count + len(rows), replace(of, before=rows[-1][0].task_id)
        if count >= MOST_COUNTED or asyncio.get_running_loop().time() > until:
            break
    return count


async def draft(engine: Engine, tenant_id: str, who: wire.Principal | None) -> stored.Erasure:
    """Return a new erasure, with all that names the people who act as the principal."""
    now = engine.backend.now()
    id = engine.backend.ids.new(now, mark_of(tenant_id))
    kind, name = (who.kind, who.id) if who else ("", "")
    return stored.Erasure(id, tenant_id, kind, name, to_canonical(await find_names(engine, tenant_id, who)).decode(),
                          secrets.token_hex(32), "credentials", "[]", "{}", now)


async def find_names(engine: Engine, tenant_id: str, who: wire.Principal | None) -> list[str]:
    """Return the ids of the users who act as a principal, and their names with their providers.

    Only what a provider has proven is a `name`; what an admin or the person has `chosen` may be anybody's, or a word.
    """
    users, proven, texts = set[str](), set[str](), set[str]()
    async for user in read_rows(engine, engine.settings.default_tenant_id, stored_oauth.User):
        if user.tenant == tenant_id and who in (None, user.principal):
            users.add(user.user_id)
            texts |= {text for text in (user.email, user.subject, user.name) if len(text) >= SHORTEST_NAME}
            proven |= texts & {user.email, user.subject} if user.issuer else set()
    return [*(f"user {id}" for id in sorted(users)), *(f"name {text}" for text in sorted(proven)),
            *(f"chosen {text}" for text in sorted(texts - proven))]


def report_plan(settings: Settings, planned: Planned,
                state: Literal["planned", "nothing"]) -> wire_erasure.ErasureReport:
    """Show a plan, or that there is nothing to erase."""
    return wire_erasure.ErasureReport(
        state, show_counts(planned.counts), planned.in_flight, planned.leases,
        planned.obligations, planned.segments, GOES if state == "planned" else [], STAYS, list_afterwards(settings),
        at_least=planned.at_least)


def show_counts(counts: erasing.Counts) -> list[wire_erasure.ErasedRows]:
    """Show what happens to the rows of each table."""
    return [wire_erasure.ErasedRows(table, of.get("changed", 0), of.get("deleted", 0)) for table,
            of in sorted(counts.items())]


def list_afterwards(settings: Settings) -> list[str]:
    """Return what is outside of the gate's reach."""
    ledger = NO_LEDGER if settings.receipt_mode == "standalone" else LEDGER
    return [text.format(mode=settings.receipt_mode, ledger=ledger) if text.startswith("A ledger") else text
            for text in AFTERWARDS]


# Its beginning and its end.


async def keep_erasure(engine: Engine, caller: Caller, tenant_id: str, erasure: stored.Erasure) -> None:
    """Store the beginning of an erasure; the audit line of an erased tenant names nobody.

    In the same transaction the head of the seals changes, so that no run of the archive goes on that began before.
    """
    def keep(work: Work) -> None:
        work.keep_record(erasure)
        note_return(work)
        if tenant_id == caller.tenant_id:
            scope = "principal" if erasure.principal_kind else "tenant"
            admin.audit_change(engine, work, "erasure_begun", "critical", caller, erasure_id=erasure.erasure_id,
                               scope=scope,
                               tenant=erasure.of_tenant)
    await admin.change_record(engine, caller, tenant_id, stored.Erasure, (erasure.erasure_id,), keep,
                              beside=[(stored.SealHead, ())])


async def tell_caller(engine: Engine, caller: Caller, erasure: stored.Erasure) -> None:
    """Write the receipt of an erasure into the inbox of who asked for it; once."""
    if not caller.bound:
        return

    kind, id = "data_erased", erasure.erasure_id

    def tell(work: Work) -> None:
        tell_admins(engine, work, [caller.principal], kind, once=id, erasure_id=id, tenant=erasure.of_tenant,
                    counts=erasing.decode_counts(erasure.counts))
    key = receipt_key(ANOMALY, "", engine.gate, None, (), mark_once(kind, id, caller.principal))
    await engine.change(caller.tenant_id, tell, stated=[("", key)])


async def make_signer(settings: Settings) -> Callable[[dict[str, Any]], str | None]:
    """Return what signs the proof with the key that signs access tokens; without that key there is no signature."""
    if not (path := settings.security.jwt.private_key_path):
        return lambda claims: None
    from joserfc import jwt

    from asyncgate.parts.identity.signing import load_signing_keys
    key = (await asyncio.to_thread(load_signing_keys, path)).current.key
    return lambda claims: jwt.encode({"alg": "RS256", "typ": "erasure+jwt", "kid": key.kid}, claims, key)


# What is shown.


OPERATIONS = [
    Operation(erase_principal, "POST /v1/principals/erase", "A", "admin:write", "W", idempotent=True),
    Operation(erase_tenant, "POST /v1/tenants/{tenant}/erase", "A", "admin:write", "W", idempotent=True),
    Operation(list_erasures, "GET /v1/erasures", "A", "admin:read", "R"),
]
