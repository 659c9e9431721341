"""The operations on limits, and what calls the claims that wait for room.

A limit is written while no other batch of the tenant is under way, so no claim is decided by rules that have changed.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from asyncgate import Caller, Engine, Extension, Needs, News, Operation, Work
from asyncgate.extras.limits import wire_limits
from asyncgate.parts.identity.admin import audit_change, target_tenant, write_audited
from asyncgate.parts.metrics.numbers import Names
from asyncgate.parts.model import errors, queries, stored_limits, wire
from asyncgate.parts.model.clock import instant
from asyncgate.parts.model.limiting import MOST_CONCURRENT, Rules, decode_rules, read_pattern
from asyncgate.parts.model.naming import require_addressable
from asyncgate.parts.model.views import to_utc, to_utc_or_none
from asyncgate.parts.process.kit import Bounded

MOST_WARNED = 20            # names that one call looks up
MOST_SEEN_SET, SEEN_SET_SECONDS = 1000, 30.0      # limits that are not looked up for a warning, and for how long
MOST_SET = 100              # limits of a tenant
MOST_HOLDERS = 100          # shown at once
MOST_RULES_BYTES = 64 * 2**10


class RoomCalls(Extension):
    """Calls claims that wait when a limit has room again, or will have; warns of limits that nobody has set."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.depths: list[stored_limits.LimitDepth] = []    # when metrics last looked at them
        self.names = Names(0)                               # which of them have lines of their own
        self.known: Bounded[tuple[str, str], float] = Bounded(MOST_SEEN_SET)       # limits that were set, and when seen

    async def look(self) -> None:
        """Read what the limits have, for metrics."""
        self.depths = await self.engine.backend.limit_depths()

    async def after_call(self, op: Operation, caller: Caller, ask: wire.Ask, reply: Any) -> None:
        """Warn whoever creates tasks that name a limit which nobody has set: it may be misspelt, and keeps nothing."""
        if not isinstance(ask, wire.CreateTask | wire.CreateTasks) or not hasattr(reply, "warnings"):
            return
        orders: list[Any] = list(ask.tasks) if isinstance(ask, wire.CreateTasks) else [ask]
        names = {name for order in orders if isinstance(order, wire.CreateTask) for name in order.limits or ()}
        if unset := [name for name in sorted(names)[:MOST_WARNED] if not await self._is_set(caller.tenant_id, name)]:
            before = getattr(reply, "warnings", UNSET) or ()
            reply.warnings = [*before, f"nobody has set the limit {', '.join(unset)}: it keeps nothing, until an admin "
                                       "calls set_limit"]

    async def _is_set(self, tenant_id: str, name: str) -> bool:
        """Whether somebody has set a limit; one that was is not looked up again for a while."""
        now = self.engine.backend.now()
        if 0 <= now - self.known.get((tenant_id, name), -SEEN_SET_SECONDS) < SEEN_SET_SECONDS:
            return True
        if await self.engine.backend.record(tenant_id, stored_limits.Limit, name) is None:
            return False
        self.known.put((tenant_id, name), now)
        return True

    def after_commit(self, work: Work) -> None:
        """Call claims for the tasks of each lane that a lease has made room for; all when a limit was set."""
        waiting, limiting = self.engine.waiting, work.limiting
        if limiting.freed:
            kinds = [work.known[lane] for lane, pattern in limiting.patterns.items()
                     if lane in work.known and not limiting.freed.keys().isdisjoint(dict(read_pattern(pattern)))]
            for kind in kinds:
                waiting.wake_kind(work.tenant_id, kind)
            self.tell(News(work.tenant_id, tuple((type, tuple(sorted(needed))) for type, needed in kinds)))
        if limiting.until is not None and waiting.places.get(work.tenant_id):
            waiting.wake_at(work.tenant_id, limiting.until, work.now)
        ends = [row.until for row in work.kept.values()
                if isinstance(row, stored_limits.Turn) and row.stage == "blocked" and row.until is not None]
        if ends:        # a claim that waits elsewhere has perhaps not met the turn while it was open
            self.tell(News(work.tenant_id, due=min(ends)))
        if any(kind is stored_limits.Limit for kind, _ in work.kept):
            waiting.wake_tenant(work.tenant_id)
            self.tell(News(work.tenant_id, many=True))

    def tell(self, news: News) -> None:
        """Tell the processes that share the database."""
        shared = self.engine.shared
        if shared is not None and not shared.is_alone():
            shared.tell(news)


async def set_limit(engine: Engine, caller: Caller, ask: wire_limits.SetLimit) -> wire_limits.LimitRecord:
    """Set how many tasks that name a limit may run at once, in total and per key, and how many may begin in a time.

    Tasks name their limits and their keys in create_task; several at once, and all must allow.  Only live leases count.
    The same again replaces what was set, from the next claim on; leases that are too many go on.  With nothing but
    stopped_until a limit that there is keeps what was set.
    """
    require_addressable(ask.name)
    tenant_id, name, stop = await target_tenant(engine, caller, ask.tenant), ask.name, instant(ask.stopped_until)
    asked = Rules(ask.concurrency_total, ask.concurrency_per_key, ask.rate, ask.overrides or {})
    text, by = msgspec.json.encode(asked), caller.principal
    if len(text) > MOST_RULES_BYTES:
        raise errors.InvalidRequest(f"the overrides of a limit have {MOST_RULES_BYTES} bytes at most, and these have "
                                    f"{len(text)}")
    await require_room(engine, tenant_id, name)

    def put(work: Work) -> stored_limits.Limit:
        before: stored_limits.Limit | None = work.find_record(stored_limits.Limit, name)
        until, stopped_by = (before.stopped_until, before.stopped_by) if before else (None, None)
        if stop is not None:
            until, stopped_by = (stop, None) if stop > work.now else (None, None)
        kept = before.rules if before and stop is not None and asked == Rules() else text.decode()
        limit, rules = stored_limits.Limit(name, kept, work.now, by.kind, by.id, until, stopped_by), decode_rules(kept)
        work.keep_record(limit)
        work.limiting.wake_all(name)
        audit_change(engine, work, "limit_set", "info", caller, limit=name, overrides=len(rules.overrides),
                     concurrency_total=rules.concurrency_total, concurrency_per_key=rules.concurrency_per_key,
                     stopped_until=to_utc_or_none(until))
        return limit
    limit = await change_limit(engine, caller, tenant_id, name, put)
    return wire_limits.LimitRecord(**await describe_limit(engine, tenant_id, limit))


async def require_room(engine: Engine, tenant_id: str, name: str) -> None:
    """Refuse one more limit than a tenant may have."""
    rows = await engine.backend.page(tenant_id, queries.Rows(stored_limits.Limit, "", MOST_SET))
    if len(rows) >= MOST_SET and all(row.name != name for row in rows):
        raise errors.InvalidRequest(f"{MOST_SET} limits are all that a tenant may have; list_limits shows them, "
                                    "remove_limit removes one. One limit may have any number of keys")


async def get_limit(engine: Engine, caller: Caller, ask: wire_limits.GetLimit) -> wire_limits.HeldLimit:
    """Show a limit: what it allows, how much is in use, who holds it, and how many tasks that name it wait."""
    tenant_id = await target_tenant(engine, caller, ask.tenant)
    if (limit := await engine.backend.record(tenant_id, stored_limits.Limit, ask.name)) is None:
        raise errors.LimitNotFound(f"no limit {ask.name}; list_limits shows those there are, set_limit sets one")
    after = "\0".join((ask.name, ask.key or "", ""))
    rows = await engine.backend.page(tenant_id, queries.Rows(stored_limits.Hold, after, MOST_HOLDERS + 1))
    holders = [wire_limits.LimitHolder(row.limit_key, row.task_id, to_utc(row.since)) for row in rows
               if row.limit_name == ask.name and ask.key in (None, row.limit_key)]
    return wire_limits.HeldLimit(**await describe_limit(engine, tenant_id, limit), holders=holders[:MOST_HOLDERS],
                                 more_holders=len(holders) > MOST_HOLDERS)


async def list_limits(engine: Engine, caller: Caller, ask: wire_limits.ListLimits) -> wire_limits.LimitRecords:
    """List the limits: what each allows, how much of it is in use, and how many tasks that name it wait."""
    tenant_id = await target_tenant(engine, caller, ask.tenant)
    rows = await engine.backend.page(tenant_id, queries.Rows(stored_limits.Limit, "", MOST_SET))
    return wire_limits.LimitRecords([wire_limits.LimitRecord(**await describe_limit(engine, tenant_id, row))
                                     for row in rows])


async def remove_limit(engine: Engine, caller: Caller, ask: wire_limits.RemoveLimit) -> wire_limits.RemovedLimit:
    """Remove a limit; tasks that name it no longer wait for it."""
    tenant_id = await target_tenant(engine, caller, ask.tenant)

    def remove(work: Work) -> bool:
        if work.find_record(stored_limits.Limit, ask.name) is None:
            return False
        work.drop_record(stored_limits.Limit, ask.name)
        work.limiting.wake_all(ask.name)
        audit_change(engine, work, "limit_removed", "info", caller, limit=ask.name)
        return True
    removed = await change_limit(engine, caller, tenant_id, ask.name, remove)
    rows = await engine.backend.page(tenant_id, queries.Rows(stored_limits.Limit, "", MOST_SET))
    return wire_limits.RemovedLimit(removed, len(rows))


async def change_limit(engine: Engine, caller: Caller, tenant_id: str, name: str, run: Any) -> Any:
    """Let `run` change a limit, while no batch of its tenant is under way."""
    def load(needs: Needs, caller: Caller, ask: Any) -> None:
        needs.records.add((stored_limits.Limit, (name,)))
        needs.alone = True      # a claim under way would go by what was set before
    return await write_audited(engine, caller, tenant_id, load, run)


async def describe_limit(engine: Engine, tenant_id: str, limit: stored_limits.Limit) -> dict[str, Any]:
    """Return the members of a limit that is shown."""
    [(held, waiting)] = await engine.backend.page(tenant_id, queries.LimitUse(limit.name, MOST_CONCURRENT))
    rules, stopped = decode_rules(limit.rules), limit.stopped_until
    lasts = stopped is not None and stopped > engine.backend.now()
    return {"name": limit.name, "concurrency_total": rules.concurrency_total, "rate": rules.rate,
            "concurrency_per_key": rules.concurrency_per_key, "overrides": rules.overrides,
            "stopped_until": to_utc_or_none(stopped) if lasts else None,
            "stopped_by": limit.stopped_by if lasts else None, "since": to_utc(limit.since),
            "set_by": wire.Principal(limit.by_kind, limit.by_id), "in_use": held, "waiting": waiting}


OPERATIONS = [
    Operation(set_limit, "POST /v1/task-limits", "A", "admin:write", "W", idempotent=True),
    Operation(get_limit, "GET /v1/task-limits/{name}", "A", "admin:read", "R"),
    Operation(list_limits, "GET /v1/task-limits", "A", "admin:read", "R"),
    Operation(remove_limit, "POST /v1/task-limits/{name}/remove", "A", "admin:write", "W", idempotent=True),
]
