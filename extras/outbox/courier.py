"""The courier: makes tasks of what applications hand over with asyncgate.enqueue, in the gate's own Postgres.

One process of many does (`Engine.leads`).  A row goes after its task is stored, and its id is the idempotency key of
that task: a process that is killed between the two hands the row over again, and gets the task that there is.  A
notification, sent with the application's commit, calls the courier; it may be lost, so the courier also looks by
itself.
"""

from __future__ import annotations

import logging
from collections import Counter

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from asyncgate import ANOMALY, CORE_OPERATIONS, Caller, Engine, Extension, News, Work
from asyncgate.extras.outbox.refusals import is_final, word_refusal
from asyncgate.parts.metrics.shown import Family, Sources, Values
from asyncgate.parts.model import errors, queries, stored, stored_handover, wire
from asyncgate.parts.model.database import HandoverBackend
from asyncgate.parts.model.members import Reader
from asyncgate.parts.process.duties import Duty
from asyncgate.parts.process.outages import OFTEN

COURIER_SECONDS = 10.0         # between two looks that nobody has called for
ROWS_AT_ONCE = 20           # that one call hands over; a row may have a megabyte
BEHIND = "~"                # sorts behind every id of a row
HOW_TO_MEND = ("Mend the request with asyncgate.retry_handover, or drop it with asyncgate.drop_handover; "
               "asyncgate.list_handovers shows its problem.")
CREATE_TASKS = CORE_OPERATIONS["create_tasks"]
READ = Reader(wire.CreateTasks)

log = logging.getLogger("asyncgate.courier")
TakenRow = tuple[stored_handover.Handover, str | None]       # a row, and the code and words of why it is refused


class Courier(Extension):
    """Moves what waits, and puts aside what the gate refuses for good."""

    def __init__(self, engine: Engine, backend: HandoverBackend) -> None:
        self.engine, self.backend = engine, backend
        self.duty = Duty(COURIER_SECONDS, self.run)
        self.outcomes = Counter[str]()

    def hear_news(self, news: News) -> None:
        """Look at once when an application has handed something over."""
        if news.handed:
            self.duty.alarm.set(0.0)

    async def run(self) -> int:
        """Move what waits in all tenants, in the one process that leads; return how much became tasks."""
        if not await self.engine.leads("handovers"):
            return 0
        done = 0
        for tenant_id in await self.backend.handover_tenants():
            try:
                done += await self.move(tenant_id)
            except errors.GateError as problem:     # also a database that is away: the next look comes
                log.warning("what is handed over in tenant %s waits: %s", tenant_id, problem, extra=OFTEN)
        return done

    async def move(self, tenant_id: str) -> int:
        """Move what waits in a tenant, in the order of each principal: one that may not create now keeps no other."""
        done, after = 0, tuple[str, ...](("waiting", "", "", ""))
        while rows := await self._read(tenant_id, after):
            first = rows[0]
            mine = [row for row in rows if (row.owner_kind, row.owner_id) == (first.owner_kind, first.owner_id)]
            try:
                done += await self._hand_over(tenant_id, mine)
                after = stored.key_of(mine[-1])
            except errors.GateError as problem:
                if problem.status >= 500:
                    raise
                log.warning("what %s %s hands over waits: %s", first.owner_kind, first.owner_id, problem, extra=OFTEN)
                after = ("waiting", first.owner_kind, first.owner_id, BEHIND)
        return done

    async def _read(self, tenant_id: str, after: tuple[str, ...]) -> list[stored_handover.Handover]:
        return await self.engine.backend.page(tenant_id, queries.Rows(
            stored_handover.Handover, "\0".join(after), ROWS_AT_ONCE))

    async def _hand_over(self, tenant_id: str, rows: list[stored_handover.Handover]) -> int:
        """Create the tasks of some rows of a principal, and note what became of the rows."""
        caller = Caller(tenant_id, wire.Principal(rows[0].owner_kind, rows[0].owner_id), "agent",
                        frozenset({"tasks:write"}))
        await self.engine.check_caller(caller)      # of a suspended tenant
        try:
            ask = self._read_request(rows)
            reply: wire.Items = await self.engine.perform(CREATE_TASKS, caller, ask)
        except errors.GateError as refusal:
            if not is_final(refusal.code):
                raise
            if len(rows) > 1:       # refused as a whole: whichever is the reason is put aside alone
                return sum([await self._hand_over(tenant_id, [row]) for row in rows])
            return await self._settle(tenant_id, [(rows[0], word_refusal(refusal.code, str(refusal)))])
        done: list[TakenRow] = [
            (row, word_refusal(item.error.error, item.error.message) if item.error is not None else None)
            for row, item in zip(rows, reply.results, strict=True)
            if item.error is None or is_final(item.error.error)]
        return await self._settle(tenant_id, done)

    def _read_request(self, rows: list[stored_handover.Handover]) -> wire.CreateTasks:
        """Return the call that creates the tasks of some rows."""
        try:
            items = [{"idempotency_key": Raw(msgspec.json.encode(row.handover_id)),
                      **msgspec.json.decode(row.request, type=dict[str, Raw])} for row in rows]
            ask, _ = READ.body(msgspec.json.encode({"tasks": items}), self.engine.settings.unknown_members)
        except (msgspec.DecodeError, RecursionError) as wrong:
            raise errors.InvalidRequest(f"this is not a request for create_task: {wrong}") from None
        return ask

    async def _settle(self, tenant_id: str, done: list[TakenRow]) -> int:
        """Drop rows that are tasks now, and put aside those that are refused; a notice tells who handed them over."""
        def settle(work: Work) -> None:
            for row, problem in done:
                if work.find_record(stored_handover.Handover, *stored.key_of(row)) is None:
                    continue        # the application has dropped it meanwhile
                work.drop_record(stored_handover.Handover, *stored.key_of(row))
                if problem is not None:
                    work.keep_record(replace(row, stage="refused", problem=problem))
                    self._write_notice(work, row, problem)
        await self.engine.change(tenant_id, settle, *[
            (stored_handover.Handover, stored.key_of(row)) for row, _ in done])
        refused = sum(problem is not None for _, problem in done)
        self.outcomes.update(moved=len(done) - refused, refused=refused)
        return len(done) - refused

    def _write_notice(self, work: Work, row: stored_handover.Handover, problem: str) -> None:
        log.error("handover %s is refused: %s", row.handover_id, problem)
        details = {"handover_id": row.handover_id, "code": problem.partition(":")[0]}
        self.engine.write_receipt(
            work, ANOMALY, None, {"kind": "handover_refused", "details": details, "recommended_action": HOW_TO_MEND},
            to=wire.Principal(row.owner_kind, row.owner_id), discriminator=f"handover_refused {work.new_id()}")


def make_couriers(engine: Engine) -> list[Courier]:
    """Return the courier of an engine whose database applications can hand work over in."""
    backend = engine.backend
    return [Courier(engine, backend)] if isinstance(backend, HandoverBackend) else []


def find_duties(engine: Engine) -> dict[str, Duty]:
    """Return the courier's job for the upkeep."""
    courier = engine.find_extension(Courier)
    return {} if courier is None else {"handovers": courier.duty}


def count_outcomes(sources: Sources) -> Values:
    """Return what became of handovers since this process began."""
    courier = sources.engine.find_extension(Courier)
    return {} if courier is None else {(outcome,): courier.outcomes[outcome] for outcome in ("moved", "refused")}


HANDOVER_FAMILIES = (Family("asyncgate_handovers_total", "counter",
                   "What applications have handed over in SQL and this process has taken: moved (a task) or refused.",
                   ("outcome",), count_outcomes),)
