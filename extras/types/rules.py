"""Declaring types, and holding payloads and results to what is declared.

What a tenant has declared is in memory, and read again when it changes: so whoever declares nothing pays for nothing,
and a batch loads nothing more.  A small value is checked in the batch that takes it; a large one on a thread before, so
that nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from msgspec import UNSET, Raw, Struct
from msgspec.structs import replace

from asyncgate import Caller, Engine, Extension, Operation, Task, Work
from asyncgate.extras.types import schemas, served, wire_types
from asyncgate.parts.model import errors, queries, stored, stored_types, wire
from asyncgate.parts.model.caller import forbid_type
from asyncgate.parts.model.content import sha256
from asyncgate.parts.model.naming import require_addressable
from asyncgate.parts.model.news import News
from asyncgate.parts.model.views import decode_terms, to_raw, to_utc
from asyncgate.parts.process.kit import Bounded

MOST_TYPES = 500            # that a tenant declares
MOST_DECLARED_BYTES = 2**20     # of all of them
TENANTS_KEPT = 200          # whose types are kept in memory
STALE_SECONDS = 30.0        # after which other processes are not trusted to have told of a change
MOST_VERDICTS, MOST_WARNINGS = 2000, 10_000
NULL = b"null"
CHECKED = (wire.CreateTask, wire.CreateTasks, wire.Complete, wire.CompleteTasks)


class Declared(Struct):
    """What is declared of a type, ready for use."""

    row: stored_types.DeclaredType
    payload: schemas.Checker | None
    result: schemas.Checker | None


class Known(Struct):
    """What a tenant has declared."""

    types: dict[str, Declared]
    on_mismatch: wire_types.OnMismatch
    read_at: float
    stale: bool = False


class Typed(Extension):
    """Knows what is declared, and refuses or warns of what does not fit."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known: Bounded[str, Known] = Bounded(TENANTS_KEPT)
        self.verdicts: Bounded[tuple[str, str], schemas.Flaw | None] = Bounded(MOST_VERDICTS)   # by schema and value
        self.warnings: Bounded[str, str] = Bounded(MOST_WARNINGS)       # by task, for the answer
        self.thread = asyncio.Lock()        # one large value after another: a thread of Python slows all others

    # What is declared.

    async def know(self, tenant_id: str) -> Known:
        """Return what a tenant has declared."""
        now, known = self.engine.backend.now(), self.known.get(tenant_id)
        late = known is None or known.stale or not (
            self.engine.is_alone() or 0 <= now - known.read_at < STALE_SECONDS)
        if known is not None and not late:
            return known
        before = Known({}, "refuse", now) if known is None else known
        if known is None:
            self.known.put(tenant_id, before)
        before.stale = False        # a change that comes while it is read makes it stale again
        try:
            fresh = await self._read(tenant_id, before)
        except BaseException:
            before.stale = True
            raise
        fresh.stale = before.stale
        self.known.put(tenant_id, fresh)
        return fresh

    async def _read(self, tenant_id: str, before: Known) -> Known:
        backend, now = self.engine.backend, self.engine.backend.now()
        rows = await backend.page(tenant_id, queries.Rows(stored_types.DeclaredType, "", MOST_TYPES))
        policy = await backend.record(tenant_id, stored_types.TypePolicy)
        types = {row.type: declared for row in rows
                 if (declared := before.types.get(row.type)) is not None and declared.row == row}
        if fresh := [row for row in rows if row.type not in types]:
            types |= await asyncio.to_thread(lambda: {row.type: Declared(row, *(
                None if text is None else schemas.Checker(text)
                for text in (row.payload_schema, row.result_schema))) for row in fresh})
        return Known(types, "warn" if policy is not None and policy.on_mismatch == "warn" else "refuse", now)

    def after_record_change(self, work: Work) -> None:
        """Read again what this process has changed, and tell the others."""
        if any(kind in (stored_types.DeclaredType, stored_types.TypePolicy) for kind, _ in work.kept):
            self._forget(work.tenant_id)
            if self.engine.shared and not self.engine.is_alone():
                self.engine.shared.tell(News(work.tenant_id, types=True))

    def hear_news(self, news: News) -> None:
        """Read again what another process has changed."""
        if news.types:
            self._forget(news.tenant_id)

    def _forget(self, tenant_id: str) -> None:
        if (known := self.known.get(tenant_id)) is not None:
            known.stale = True

    # Calls.

    async def before_call(self, op: Operation, caller: Caller, ask: wire.Ask) -> None:
        """Declare what a claim declares, and hold large values to their schemas before a batch has to wait for it."""
        if isinstance(ask, wire.LeaseNext) and ask.types:
            for type, about in ask.types.items():
                await keep_declaration(self.engine, caller, type, about.description, about.payload_schema,
                                       about.result_schema)
        elif isinstance(ask, CHECKED):
            known = await self.know(caller.tenant_id)
            if known.types and (large := await self._list_large(caller, ask, known)):
                async with self.thread:
                    self.verdicts.update(await asyncio.to_thread(judge_values, large))
                while len(self.verdicts) > MOST_VERDICTS:
                    self.verdicts.popitem(last=False)

    async def _list_large(self, caller: Caller, ask: wire.Ask,
                          known: Known) -> list[tuple[schemas.Checker, bytes, str]]:
        """Return the values of a call that no batch should look at; in a call with many these are all of them."""
        items: Iterable[Any] = getattr(ask, ask.items) if ask.items else [ask]
        values = list[tuple[schemas.Checker, bytes, str]]()
        with_results = any(row.result for row in known.types.values())
        for item in items:
            if isinstance(item, wire.CreateTask) and (declared := known.types.get(item.type)) and declared.payload:
                values.append((declared.payload, bytes(item.payload) or NULL, "payload"))
            elif isinstance(item, wire.Complete) and with_results and (
                    ask.items or len(item.result) > schemas.SMALL_BYTES):
                snapshot = await self.engine.backend.task(caller.tenant_id, item.task_id)
                if snapshot and (declared := known.types.get(snapshot[0].type)) and declared.result:
                    values.append((declared.result, bytes(item.result), "result"))
        return values if ask.items or sum(len(text) for _, text, _ in values) > schemas.SMALL_BYTES else []

    async def after_call(self, op: Operation, caller: Caller, ask: wire.Ask, reply: Any) -> None:
        """Add the warnings of a call to its answer."""
        if not self.warnings or not isinstance(ask, CHECKED):
            return
        done = reply.results if isinstance(reply, wire.Items) else [reply]
        ids = [getattr(item, "task_id", None) or getattr(ask, "task_id", "") for item in done]
        if fresh := [text for task_id in ids if (text := self.warnings.pop(task_id or "", None)) is not None]:
            reply.warnings = [*(getattr(reply, "warnings", UNSET) or ()), *fresh]

    # In a batch.

    def check_payload(self, work: Work, task: Task) -> None:
        """Refuse a task whose payload does not fit; one that is run again has the payload that it had."""
        if (known := self.known.get(work.tenant_id)) is None or (
                declared := known.types.get(task.type)) is None or declared.payload is None:
            return
        text = task.payload.encode()
        if (text == NULL and task.payload_pointer is not None) or decode_terms(task.terms).rerun_of is not None:
            return
        if (flaw := self._find_flaw(declared.payload, text, "payload")) is not None:
            self._act(known, task, errors.PayloadInvalid, flaw)

    def check_result(self, work: Work, task: Task, ask: wire.Complete) -> None:
        """Refuse a result that does not fit; no result is none that could, if it is said to be elsewhere."""
        self.warnings.pop(task.task_id, None)       # of a call that was refused for another reason
        text, ended = bytes(ask.result), task.status in stored.TERMINAL
        if (known := self.known.get(work.tenant_id)) is None or (
                declared := known.types.get(task.type)) is None or declared.result is None or (
                text == NULL and (ask.artifacts or ask.delivery_proof or ended)) or (
                ended and known.on_mismatch == "refuse"):   # what was taken stays taken, whatever was declared since
            return
        if (flaw := self._find_flaw(declared.result, text, "result")) is not None:
            self._act(known, task, errors.ResultInvalid, flaw)

    def _find_flaw(self, checker: schemas.Checker, text: bytes, name: str) -> schemas.Flaw | None:
        if self.verdicts and (key := (checker.text, sha256(text.decode()))) in self.verdicts:
            return self.verdicts[key]
        if len(text) > schemas.SMALL_BYTES:
            raise errors.Overloaded(f"the {name} was not checked yet, because the declaration of its type has just "
                                    "changed; repeat the call", retry_after=1)
        return checker.find_flaw(text, name, schemas.Looks(schemas.LOOKS_IN_A_BATCH))

    def _act(self, known: Known, task: Task, refusal: type[errors.GateError], flaw: schemas.Flaw) -> None:
        text = f"{flaw.path} {flaw.why}, as is declared of the type {task.type}"
        if known.on_mismatch == "refuse":
            raise refusal(f"{text}; list_types with type {task.type} shows the schemas", path=flaw.path)
        self.warnings.put(task.task_id, text)


def judge_values(values: list[tuple[schemas.Checker, bytes, str]]) -> dict[tuple[str, str], schemas.Flaw | None]:
    """Hold the values of a call to their schemas."""
    looks = schemas.Looks(schemas.LOOKS_OF_A_CALL)
    return {(checker.text, sha256(text.decode())): checker.find_flaw(text, name, looks)
            for checker, text, name in values}


# The operations.


async def declare_type(engine: Engine, caller: Caller, ask: wire_types.DeclareType) -> wire_types.TypeRecord:
    """Declare what a type of tasks does, which payloads it takes and which results it gives, for agents.

    What is absent stays as it was declared before; an empty schema takes anything.  From then on create_task refuses a
    payload that does not fit (payload_invalid), and complete a result (result_invalid), unless the tenant only warns.
    """
    return show_type(await keep_declaration(engine, caller, ask.type, ask.description, ask.payload_schema,
                                            ask.result_schema))


async def keep_declaration(engine: Engine, caller: Caller, type: str, description: str | None, payload_schema: Raw,
                           result_schema: Raw) -> stored_types.DeclaredType:
    """Store what is declared of a type, if it is new."""
    require_addressable(type)
    require_type(caller, type)
    given = {name: bytes(text).decode() for name, text in (
        ("payload_schema", payload_schema), ("result_schema", result_schema)) if bytes(text) not in (b"", NULL)}
    known = (await require_typed(engine).know(caller.tenant_id)).types
    changes: dict[str, Any] = {**given, **({} if description is None else {"description": description})}
    row = known[type].row if type in known else None
    if row is not None and all(getattr(row, name) == value for name, value in changes.items()):
        return row
    for name, text in given.items():
        await asyncio.to_thread(schemas.check_declared_schema, text.encode(), name)
    others = [declared.row for name, declared in known.items() if name != type]

    def decide(work: Work) -> stored_types.DeclaredType:
        before = work.find_record(stored_types.DeclaredType, type) or stored_types.DeclaredType(
            type, "", None, None, work.now)
        after = replace(before, declared_at=work.now, **changes)
        if len(others) >= MOST_TYPES or sum(map(measure_declared, [*others, after])) > MOST_DECLARED_BYTES:
            raise errors.QuotaExceeded(
                f"a tenant declares {MOST_TYPES} types of {MOST_DECLARED_BYTES} bytes together at most; remove_type "
                "makes room", quota="declared_types", limit=MOST_TYPES, retry_after=60)
        work.keep_record(after)
        return after
    return await engine.change(caller.tenant_id, decide, (stored_types.DeclaredType, (type,)))


def measure_declared(row: stored_types.DeclaredType) -> int:
    """Return how large a declaration is."""
    return len(row.type) + len(row.description) + len(row.payload_schema or "") + len(row.result_schema or "")


def require_type(caller: Caller, type: str) -> None:
    """Refuse a credential that is not good for tasks of a type."""
    if caller.task_types is not None and type not in caller.task_types:
        raise forbid_type(caller)


def require_typed(engine: Engine) -> Typed:
    """Return what knows the types; an engine of other extensions gets one."""
    if (typed := engine.find_extension(Typed)) is None:
        engine.extend(typed := Typed(engine))
    return typed


async def remove_type(engine: Engine, caller: Caller, ask: wire_types.RemoveType) -> wire.Ok:
    """Remove the declaration of a type: nothing is checked against it any more; list_types shows it if served."""
    require_type(caller, ask.type)

    def decide(work: Work) -> wire.Ok:
        if work.find_record(stored_types.DeclaredType, ask.type) is None:
            raise errors.TypeUnknown(f"nobody has declared the type {ask.type}; list_types shows what is declared")
        work.drop_record(stored_types.DeclaredType, ask.type)
        return wire.Ok(True)
    return await engine.change(caller.tenant_id, decide, (stored_types.DeclaredType, (ask.type,)))


async def set_type_policy(engine: Engine, caller: Caller, ask: wire_types.SetTypePolicy) -> wire_types.Policy:
    """Choose whether payloads and results that do not fit their type are refused, or taken with a warning."""
    def decide(work: Work) -> wire_types.Policy:
        work.keep_record(stored_types.TypePolicy(ask.on_mismatch))
        return wire_types.Policy(ask.on_mismatch)
    return await engine.change(caller.tenant_id, decide, (stored_types.TypePolicy, ()))


async def list_types(engine: Engine, caller: Caller, ask: wire_types.ListTypes) -> wire_types.ServedTypes:
    """List the types of tasks that workers declare or have asked for lately, and what those workers can do.

    A task requires at most the capabilities of one row; a row without a type takes any.
    """
    known = await require_typed(engine).know(caller.tenant_id)
    rows = served.list_served(await served.read_lately(engine, caller.tenant_id))
    names = {row.type for row in rows}
    rows += [wire_types.ServedType(type, [], 0, None) for type in known.types if type not in names]
    shown = [add_declared(row, known.types.get(row.type or ""), ask.type is not None)
             for row in sorted(rows, key=lambda row: (row.type or "", row.capabilities))
             if ask.type in (None, row.type)]
    return wire_types.ServedTypes(shown, known.on_mismatch)


def add_declared(row: wire_types.ServedType, declared: Declared | None, whole: bool) -> wire_types.ServedType:
    """Add to a row what is declared."""
    if declared is not None:
        row.description = declared.row.description
        if whole:
            row.payload_schema = to_raw(declared.row.payload_schema)
            row.result_schema = to_raw(declared.row.result_schema)
    return row


def show_type(row: stored_types.DeclaredType) -> wire_types.TypeRecord:
    """Show what is declared of a type."""
    return wire_types.TypeRecord(row.type, row.description, to_raw(row.payload_schema), to_raw(row.result_schema),
                                 to_utc(row.declared_at))


OPERATIONS = [
    Operation(list_types, "GET /v1/types", "a A", "tasks:read", "R"),
    Operation(declare_type, "POST /v1/types", "w A", "tasks:lease", "W", idempotent=True),
    Operation(remove_type, "POST /v1/types/{type}/remove", "w A", "tasks:lease", "W"),
    Operation(set_type_policy, "POST /v1/type-policy", "A", "admin:write", "W", idempotent=True),
]
