"""Pausing work: a type, a lane, a worker, or the whole tenant gets no new leases for a while; running ones go on.

A claim loads what is paused in its own transaction, and a pause is written while no other batch of the tenant is under
way.  So no process grants a lease of what is paused once the pause is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from asyncgate import Caller, Engine, Extension, Needs, News, Operation, Work, lane_of
from asyncgate.parts.identity.admin import audit_change, target_tenant, write_audited
from asyncgate.parts.model import errors, queries, stored, wire, wire_operating
from asyncgate.parts.model.clock import instant
from asyncgate.parts.model.pausing import Pause, encode_pauses, find_pauses
from asyncgate.parts.model.views import to_utc, to_utc_or_none
from asyncgate.parts.model.words import say_list
from asyncgate.parts.process.readers import resolve

MOST_PAUSES = 100       # of a tenant: every claim reads them
PAUSES_TOLD = 3           # of which an empty claim tells
Target = tuple[str | None, tuple[str, ...] | None, str | None]
T = TypeVar("T")


class Pausing(Extension):
    """Keeps claims from what is paused, and calls those that wait when a pause ends."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def why_no_lease(self, work: Work, worker: wire.Principal) -> str | None:
        """Return why a worker gets no lease: it or the whole tenant is paused."""
        for pause in find_pauses(work.find_record(stored.Pauses), work.now):
            if pause.stops_worker(worker.id):
                return describe_pause(pause)
        return None

    def why_no_task(self, work: Work, ask: wire.LeaseNext) -> str | None:
        """Return why a claim may find no task: types or lanes that it asks for are paused."""
        pauses = find_pauses(work.find_record(stored.Pauses), work.now)
        return "; ".join([describe_pause(pause) for pause in pauses if concerns(pause, ask)][:PAUSES_TOLD]) or None

    def note_pauses(self, work: Work) -> None:
        """Call the claims that wait for the end of a pause, and none of a worker that is paused."""
        waiting, pauses = self.engine.waiting, find_pauses(work.find_loaded(stored.Pauses), work.now)
        waiting.let_rest(work.tenant_id, frozenset([pause.worker for pause in pauses if pause.worker]))
        if (stored.Pauses, ()) in work.kept:
            waiting.wake_tenant(work.tenant_id)
        ends = [pause.until for pause in pauses if pause.until is not None]
        if ends and waiting.places.get(work.tenant_id):
            waiting.wake_at(work.tenant_id, min(ends), work.now)


class Drain(Extension):
    """Calls a drain that waits, when leases of its tenant end; it joins an engine for so long."""

    def __init__(self, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self.call: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def expect_call(self) -> asyncio.Future[None]:
        """Return the next call; expect it before counting, or an end in between would be missed."""
        self.call = asyncio.get_running_loop().create_future()
        return self.call

    def after_commit(self, work: Work) -> None:
        """Let it count again: leases have ended."""
        if work.tenant_id == self.tenant_id and any(lease.ending != "live" for lease in work.leased.values()):
            resolve(self.call)

    def hear_news(self, news: News) -> None:
        """Let it count again: leases may have ended in another process."""
        if news.tenant_id == self.tenant_id:
            resolve(self.call)


def concerns(pause: Pause, ask: wire.LeaseNext) -> bool:
    """Whether a claim asks for tasks that are paused for everybody."""
    return (pause.worker is None and (pause.type is None or not ask.accept_types or pause.type in ask.accept_types)
            and frozenset(pause.capabilities or ()) <= (ask.capabilities or frozenset()))


def describe_target(target: Target) -> str:
    """Name what is paused."""
    type, capabilities, worker = target
    if worker is not None:
        return f"worker {worker}"
    if type is None:
        return "the whole tenant"
    if capabilities is None:
        return f"type {type}"
    if not capabilities:
        return f"type {type} without capabilities"
    return f"type {type} with the capabilit{'y' if len(capabilities) == 1 else 'ies'} {say_list(capabilities)}"


def describe_pause(pause: Pause) -> str:
    """Say what is paused, until when, and why."""
    end = None if pause.until is None else to_utc(pause.until)
    until = "until somebody resumes it" if end is None else f"until {end:%Y-%m-%d %H:%M:%S} UTC"
    return f"{describe_target(pause.target)} is paused {until}{f': {pause.reason}' if pause.reason else ''}"


def read_target(ask: wire_operating.WorkTarget) -> Target:
    """Return what a request is about."""
    if (ask.type is not None) + (ask.worker is not None) + ask.whole_tenant != 1:
        raise errors.InvalidRequest("say what is meant by exactly one of type, worker and whole_tenant: true")
    if ask.capabilities is not None and ask.type is None:
        raise errors.InvalidRequest("capabilities belong to a type: say type too, or leave capabilities out")
    lane = None if ask.capabilities is None else tuple(sorted(ask.capabilities))
    return ask.type, lane, ask.worker


async def pause_work(engine: Engine, caller: Caller, ask: wire_operating.PauseWork) -> wire_operating.PauseRecord:
    """Pause a type, a lane (a type and capabilities), a worker, or the whole tenant: no new leases, also elsewhere.

    Running leases go on; leases_left says how many.  The same again changes until and reason.  Processes that share
    the database obey at once.
    """
    tenant_id, pause = await put_pause(engine, caller, ask, "work_paused")
    return show_pause(pause, await count_left(engine, tenant_id, pause))


async def drain_work(engine: Engine, caller: Caller, ask: wire_operating.DrainWork) -> wire_operating.PauseRecord:
    """Pause, and wait up to wait_seconds for what is leased to end; leases_left says how many leases remain.

    Call it again until leases_left is 0.  The pause stays until resume_work; what is paused already keeps its until.
    """
    begun = asyncio.get_running_loop().time()
    tenant_id, pause = await put_pause(engine, caller, ask, "work_draining")
    drain = Drain(tenant_id)
    engine.extend(drain)
    try:
        while True:
            call = drain.expect_call()
            left = await count_left(engine, tenant_id, pause)
            until = begun + min(ask.wait_seconds, engine.longest_wait)
            if not left or not await engine.wait_for_call(call, until):
                return show_pause(pause, left)
            await engine.check_caller(caller)
    finally:
        engine.withdraw(drain)


async def resume_work(engine: Engine, caller: Caller, ask: wire_operating.ResumeWork) -> wire_operating.ResumedWork:
    """End a pause; claims that wait are called at once.

    whole_tenant ends only the pause of the whole tenant: types and workers that are paused stay so.
    """
    target, tenant_id = read_target(ask), await target_tenant(engine, caller, ask.tenant)

    def resume(work: Work) -> wire_operating.ResumedWork:
        pauses = find_pauses(work.find_record(stored.Pauses), work.now)
        left = [pause for pause in pauses if pause.target != target]
        if len(left) < len(pauses):
            work.keep_record(encode_pauses(left))
            audit_change(engine, work, "work_resumed", "warning", caller, target=describe_target(target),
                         reason=ask.reason)
        return wire_operating.ResumedWork(len(left) < len(pauses), len(left))
    return await change_pauses(engine, caller, tenant_id, resume)


async def list_pauses(engine: Engine, caller: Caller, ask: wire_operating.ListPauses) -> wire_operating.WorkPauses:
    """List what is paused: since when, until when, by whom, why, and how many leases are left of each."""
    tenant_id = await target_tenant(engine, caller, ask.tenant)
    pauses = find_pauses(await engine.backend.record(tenant_id, stored.Pauses), engine.backend.now())
    return wire_operating.WorkPauses([show_pause(pause, await count_left(engine, tenant_id, pause))
                                      for pause in pauses])


async def put_pause(engine: Engine, caller: Caller, ask: wire_operating.PauseWork, event: str) -> tuple[str, Pause]:
    """Store a pause, in place of an earlier one of the same; return its tenant too."""
    target, tenant_id, until = read_target(ask), await target_tenant(engine, caller, ask.tenant), instant(ask.until)
    if engine.find_extension(Pausing) is None:
        engine.extend(Pausing(engine))

    def put(work: Work) -> Pause:
        if until is not None and until <= work.now:
            raise errors.InvalidRequest(f"until {ask.until} has passed; say a later time, or call resume_work")
        pauses = {pause.target: pause for pause in find_pauses(work.find_record(stored.Pauses), work.now)}
        before, by = pauses.get(target), caller.principal
        if before and isinstance(ask, wire_operating.DrainWork) and ask.until is None and ask.reason is None:
            return before       # a drain that is asked for again, or of what was paused before
        since = work.now if before is None else before.since
        new = Pause(since, by.kind, by.id, *target, until, ask.reason)
        if new == before:
            return new
        if len(pauses := {**pauses, target: new}) > MOST_PAUSES:
            raise errors.InvalidRequest(f"{MOST_PAUSES} pauses are all that a tenant may have; list_pauses shows them, "
                                        "resume_work ends one")
        work.keep_record(encode_pauses(pauses.values()))
        audit_change(engine, work, event, "warning", caller, target=describe_target(target), reason=ask.reason,
                     until=to_utc_or_none(until))
        return new
    return tenant_id, await change_pauses(engine, caller, tenant_id, put)


async def change_pauses(engine: Engine, caller: Caller, tenant_id: str, run: Callable[[Work], T]) -> T:
    """Let `run` change the pauses of a tenant, while none of its batches is under way."""
    return await write_audited(engine, caller, tenant_id, load_pauses, run)


def load_pauses(needs: Needs, caller: Caller, ask: Any) -> None:
    """Load what is paused; a claim under way would not see the change."""
    needs.records.add((stored.Pauses, ()))
    needs.alone = True


async def count_left(engine: Engine, tenant_id: str, pause: Pause) -> int:
    """Return how many leases of what is paused are live."""
    type, capabilities, worker = pause.target
    query = queries.LeaseCount(type, None, worker)
    if type is not None and capabilities is not None:
        query = queries.LeaseCount(lane=lane_of(type, frozenset(capabilities)))
    [number] = await engine.backend.page(tenant_id, query)
    return number


def show_pause(pause: Pause, left: int) -> wire_operating.PauseRecord:
    """Show a pause."""
    capabilities = None if pause.capabilities is None else list(pause.capabilities)
    return wire_operating.PauseRecord(pause.type, capabilities, pause.worker,
                                      pause.type is None and pause.worker is None,
                                      to_utc(pause.since), to_utc_or_none(pause.until), pause.reason,
                                      wire.Principal(pause.by_kind, pause.by_id), left)


OPERATIONS = [
    Operation(pause_work, "POST /v1/pauses", "A", "admin:write", "W", idempotent=True),
    Operation(drain_work, "POST /v1/pauses/drain", "A", "admin:write", "W", idempotent=True),
    Operation(resume_work, "POST /v1/pauses/resume", "A", "admin:write", "W", idempotent=True),
    Operation(list_pauses, "GET /v1/pauses", "A", "admin:read", "R"),
]
