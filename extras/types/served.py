"""Which types of tasks somebody serves, and a warning for those who create a task of a type that nobody serves.

A task of a misspelt type waits for ever, and only an administrator may list workers and queues.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Raw

from asyncgate import Caller, Engine, Extension
from asyncgate.extras.types import wire_types
from asyncgate.parts.model import errors, queries, stored, wire
from asyncgate.parts.model.content import needs_of
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.model.words import say_list
from asyncgate.parts.operating import explain
from asyncgate.parts.process.kit import Bounded

LATELY_SECONDS = 3600.0     # a worker may be busy with one task for long, and does not ask meanwhile
ROWS_SECONDS = 1.0          # for which the stored workers of a tenant are not read again for a warning
MOST_SERVED = 10_000        # types with requirements of which it is kept for so long that somebody serves them
MOST_TENANTS = 1000         # whose workers are kept for so long
MOST_QUOTED = 65_536        # bytes of a payload that is looked into
TYPES_TOLD = 5               # types in a warning
Row = tuple[str | None, tuple[str, ...]]      # a type, and what a worker that takes it can do
IN_QUOTES = ("the payload is a text that holds JSON, and the worker gets the text: if you meant an object or an array, "
             "send it as such, without quotes around it")


def holds_json(payload: Raw) -> bool:
    """Whether a payload is a text that holds an object or an array, as hosts send it that quote arguments."""
    if not bytes(payload).startswith(b'"') or len(bytes(payload)) > MOST_QUOTED:
        return False
    try:
        text: str = msgspec.json.decode(payload, type=str)
        return text.lstrip()[:1] in ("{", "[") and isinstance(msgspec.json.decode(text), dict | list)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def list_served(asked: list[explain.Claimant]) -> list[wire_types.ServedType]:
    """Return a row for each type and set of capabilities, sorted."""
    rows: dict[Row, wire_types.ServedType] = {}
    for _, claims in asked:
        asked_for: dict[Row, float] = {(type, tuple(claim.capabilities)): claim.at
                                       for claim in claims for type in (*claim.types, *([] if claim.types else [None]))}
        for key, at in asked_for.items():
            row = rows.setdefault(key, wire_types.ServedType(key[0], list(key[1]), 0, to_utc(at)))
            row.workers, row.asked_at = row.workers + 1, max(row.asked_at or to_utc(at), to_utc(at))
    return [rows[key] for key in sorted(rows, key=lambda key: (key[0] or "", key[1]))]


async def read_lately(engine: Engine, tenant_id: str,
                      rows: list[stored.Presence] | None = None) -> list[explain.Claimant]:
    """Return the workers that asked lately with what they asked for, as stored and as seen since."""
    if rows is None:
        rows = await engine.backend.page(tenant_id, queries.WorkerFilter(("", ""), explain.MOST_ASKED, latest=True))
    now = engine.backend.now()
    asked = [(row, [claim for claim in claims if claim.at > now - LATELY_SECONDS])
             for row, claims in explain.join_sightings(engine, tenant_id, rows, now)]
    return [(row, claims) for row, claims in asked if claims]


class TypeWarnings(Extension):
    """Tells whoever creates a task of a type that no worker has asked for lately, where workers ask for others.

    A tenant whose first worker has not begun yet gets no warning: each of its tasks would have one.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.read: Bounded[str, tuple[float, list[stored.Presence]]] = Bounded(MOST_TENANTS)
        self.served: Bounded[tuple[str, str, frozenset[str]], float] = Bounded(MOST_SERVED)

    async def count_creation(self, caller: Caller, ask: wire.Ask, create: Callable[[Caller], Awaitable[Any]]) -> Any:
        """Create tasks, and add warnings to the answer."""
        reply = await create(caller)
        await self._warn(caller, ask, reply)
        return reply

    async def _warn(self, caller: Caller, ask: wire.Ask, reply: Any) -> None:
        if not (isinstance(ask, wire.CreateTask | wire.CreateTasks) and getattr(reply, "status", "queued") == "queued"
                and isinstance(reply, wire.Created | wire.Items | wire.TaskRecord)):    # not of a bulk: nobody waits
            return
        orders = ask.tasks if isinstance(ask, wire.CreateTasks) else [ask]
        done = reply.results if isinstance(reply, wire.Items) else [reply]
        made = [(order, item.task_id) for order, item in zip(orders, done, strict=False)
                if item.task_id is not None and isinstance(order, wire.CreateTask)]       # an item may be unreadable
        try:
            warnings = await self._warn_of_types(caller.tenant_id, {order.type: (order, id) for order, id in made})
        except errors.GateError:       # the tasks are created, and the answer must say so
            return
        if any(holds_json(order.payload) for order, _ in made):
            warnings.insert(0, IN_QUOTES)
        if warnings:
            reply.warnings = warnings[:TYPES_TOLD]

    async def _warn_of_types(self, tenant_id: str, waiting: dict[str, tuple[wire.CreateTask, str]]) -> list[str]:
        now, warnings = self.engine.backend.now(), list[str]()
        asked: list[explain.Claimant] | None = None
        for type, (order, task_id) in waiting.items():
            needs = needs_of(order.requirements)
            row = tenant_id, type, needs
            if 0 <= now - self.served.get(row, -ROWS_SECONDS) < ROWS_SECONDS:
                continue
            asked = await self._read(tenant_id, now) if asked is None else asked
            if explain.find_able(type, needs, asked):
                self.served.put(row, now)
            elif asked:
                warnings.append(describe_unserved(type, task_id, asked))
        return warnings

    async def _read(self, tenant_id: str, now: float) -> list[explain.Claimant]:
        at, rows = self.read.get(tenant_id, (0.0, []))
        if not 0 <= now - at < ROWS_SECONDS:
            rows = await self.engine.backend.page(tenant_id,
                                                  queries.WorkerFilter(("", ""), explain.MOST_ASKED, latest=True))
            self.read.put(tenant_id, (now, rows))
        return await read_lately(self.engine, tenant_id, rows)


def describe_unserved(type: str, task_id: str, asked: list[explain.Claimant]) -> str:
    """Return the warning about a type."""
    served = [row.type for row in list_served(asked) if row.type is not None and row.type != type]
    names = [*dict.fromkeys(served)]
    others = f"; others ask for {say_list(names[:TYPES_TOLD])}" if names else ""
    return (f"no worker that can do this has asked for tasks of type {type} in the last hour{others}: the task waits "
            f"until one does. Next: explain_task with task_id {task_id}; list_types shows what is served.")
