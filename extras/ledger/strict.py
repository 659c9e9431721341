"""Strict mode: a change is committed only after the ledger has stored its receipts (spec 20.10, option B).

A batch is decided once, and its changes are rolled back: only its receipts are stored, as `offered`.  They are stored
at the ledger.  Then the batch is decided again, on the same rows and at the same time, and each receipt, task and lease
gets the id that it had before, by its name and not by its turn.  If the result is the same, it is committed, and the
offered rows go.  If another process changed the tasks meanwhile, it is offered as it is then, at a later time and under
new ids.  So no transaction is open during a call to the ledger, and no tenant waits for another tenant's calls.

What only informs (anomalies, acknowledgements, progress) goes through the outbox, and so does task.result_ready: it is
at the ledger only if the end that it tells of was committed, which shows which of two ends counts.

A ledger that did not answer may have stored the receipt.  So the same bytes are sent again before the call fails.  What
then stays offered is settled: by the repeat of the call, by the next call about the same task, or after REPEAT_SECONDS
(settling.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from asyncgate import ACCEPTED, ACKNOWLEDGED, ANOMALY, PROGRESSED, RESULT_READY, Extension, Needs
from asyncgate.extras.ledger import settling, sinks
from asyncgate.extras.ledger.adoption import JOB
from asyncgate.parts.model import errors, queries, stored
from asyncgate.parts.model.ids import Ids

if TYPE_CHECKING:
    from asyncgate import Engine, Transact, Work
    from asyncgate.extras.ledger.outbox import Breaker
    from asyncgate.extras.ledger.pacing import Wires
    from asyncgate.extras.ledger.sinks import Sink

log = logging.getLogger("asyncgate.ledger")

ATTEMPTS = 5            # how often a batch is decided again because its result differed
OFFERS = 3              # how often a receipt is sent without an answer before the call fails
BUSY_SECONDS = 10.0     # how long another process that has not failed is left alone
REPEAT_SECONDS = 20.0   # how long an offered receipt waits for the repeat of its call
POLL_OFFERED_SECONDS = 5.0      # how often offered receipts are looked for
OFFERED_AT_ONCE = 500
INFORMS = {ACKNOWLEDGED.type, ANOMALY.type, PROGRESSED.type, RESULT_READY.type}
Decide = Callable[["Work"], None]


class Named(Ids):
    """Gives each name the id that it had when the batch was decided before; the second use of a name is another one.

    An id that is new sorts behind what others have committed since: it is made by the time that it is now.
    """

    def __init__(self, ids: Ids, given: dict[Any, str], now: float) -> None:
        super().__init__()
        self.ids, self.given, self.now, self.used = ids, given, now, Counter[Any]()

    def new(self, now: float, mark: int = 0, name: object = None) -> str:
        """Return the id of a name."""
        return self._give(name, lambda: self.ids.new(max(now, self.now), mark))

    def lease(self, mark: int = 0, name: object = None) -> str:
        """Return the lease id of a name."""
        return self._give(name, lambda: self.ids.lease(mark))

    def _give(self, name: object, make: Callable[[], str]) -> str:
        if name is None:
            return make()
        self.used[name] += 1
        use = name, self.used[name]
        if use not in self.given:
            self.given[use] = make()
        return self.given[use]


class Draft(Struct):
    """The result of deciding a batch."""

    sink: Sink
    earlier: dict[str, settling.Tried]           # what other calls have offered, by receipt
    hidden: frozenset[str] = frozenset()    # tasks that another process is about to change
    only: dict[str, str] = field(default_factory=dict)  # the bytes of the receipts that it must have, to settle these
    now: float | None = None
    first: dict[Any, str] = field(default_factory=dict)     # ids that earlier calls have offered, by name
    given: dict[Any, str] = field(default_factory=dict)
    leased: list[str] = field(default_factory=list)         # tasks that its claims got, in order
    given_up: bool = False      # whether it could not lease one of them again: its claim may get another one
    posted: list[stored.Outgoing] = field(default_factory=list)     # what the ledger must store before the commit
    accepted: list[stored.Outgoing] = field(default_factory=list)    # those of the result that the ledger has stored
    kept: bool = False
    differs: bool = False               # it has others than `only`, or other bytes, which the ledger would refuse
    outrun: bool = False                # it must be decided at a later time, under new ids
    blocked: list[settling.Tried] = field(default_factory=list)      # what must be settled first
    tried: dict[str, settling.Tried] = field(default_factory=dict)   # its own rows in the outbox, of all attempts
    offered: set[str] = field(default_factory=set)          # receipts that the ledger may have

    def load(self, needs: Needs) -> Needs:
        """Return what deciding needs: when it is decided again, the same rows, and what it has offered."""
        rows = needs.records | {(stored.Outgoing, (receipt_id,)) for receipt_id in self.tried}
        if self.now is None:        # as many claimable tasks as are left when some are hidden
            return replace(needs, records=rows, claims=needs.claims * 2 if self.hidden else needs.claims)
        read = {(stored.Pauses, ())} if needs.claims else set()     # which claims would have loaded
        return replace(needs, claims=[], tasks=needs.tasks | {*self.leased}, granted=needs.granted | {*self.leased},
                       records=rows | read)

    def decide(self, decide: Decide, work: Work) -> None:
        """Decide with the remembered ids and time; keep a result that the ledger has stored, roll back any other.

        A database that loses a race or its connection decides more than once in one transaction.  So the result is
        compared with what the ledger has stored, not with the last result.
        """
        savepoint, real = work.savepoint(), (work.ids, work.now)
        for task_id in self.leased if not (work.ready or work.limiting.queues) else ():
            if (task := work.tasks.get(task_id)) and task.claimable(work.now):
                work.add_claimable(task) if task.limits is None else work.limiting.grant(task)
        for queue in work.ready.values() if self.hidden else ():
            queue.ids = [task_id for task_id in queue.ids if task_id not in self.hidden]
        for turns in work.limiting.queues.values() if self.hidden else ():
            turns.hide(self.hidden)
        work.limiting.unread |= self.given_up
        work.replay(Named(work.ids, self.given, work.now), work.now if self.now is None else self.now)
        decide(work)
        same = self._take_over(work)
        self.offered |= same        # by the earlier call
        self.posted = [row for row in work.posted.values()
                       if work.written[row.receipt_id].receipt_type not in INFORMS]
        self.blocked = [*self._find_blocking(same)]
        self.differs = bool(self.only) and {row.receipt_id: row.content for row in self.posted} != self.only
        self.outrun = not self.only and any(self._is_outrun(row, work) for row in self.posted)
        self.kept = not (self.blocked or self.differs or self.outrun) and self.posted == self.accepted
        if self.kept:
            self._forget_rows(work)
        else:
            self._roll_back(work, savepoint, *real)

    def _take_over(self, work: Work) -> set[str]:
        """Give receipts that an earlier call has offered the bytes that they had; return which these are."""
        same = set[str]()
        for id, row in work.posted.items():
            if (before := self.earlier.get(id)) and before.receipt.hash == work.written[id].hash:
                work.written[id] = replace(work.written[id], created_at=before.receipt.created_at,
                                           asyncgate_instance=before.receipt.asyncgate_instance)
                work.posted[id] = replace(row, content=before.row.content)
                same.add(id)
        return same

    def _find_blocking(self, same: set[str]) -> Iterable[settling.Tried]:
        tasks, ids = {row.task_id for row in self.posted} - {""}, {row.receipt_id for row in self.posted}
        for id, before in self.earlier.items():
            if id not in same and (id in ids or before.row.task_id in tasks):
                yield before

    def _is_outrun(self, row: stored.Outgoing, work: Work) -> bool:
        """Whether a receipt would get other bytes than the ledger may have, or an id older than its task's last change.

        The ledger refuses the former; of the latter the receipts of a task would not tell in which order they came.
        """
        tried, task = self.tried.get(row.receipt_id), work.before.get(row.task_id)
        if tried is not None and row.receipt_id in self.offered and tried.row.content != row.content:
            return True
        return self.now is not None and task is not None and task.updated_at > self.now

    def _forget_rows(self, work: Work) -> None:
        rows = {id: row for id in self.tried
                if (row := work.find_record(stored.Outgoing, id)) is not None and row.state == "offered"}
        if not {row.receipt_id for row in self.posted} <= rows.keys():
            self.kept = False
            raise errors.DatabaseUnavailable("this took so long that another process has settled it; try again",
                                             retry_after=1)
        for row in self.posted:
            del work.posted[row.receipt_id]
            work.drop_record(stored.Outgoing, row.receipt_id)
            del rows[row.receipt_id]
        for receipt_id in self.offered & rows.keys():       # of an earlier decision
            work.keep_record(settling.drop_row(rows[receipt_id]))

    def _roll_back(self, work: Work, savepoint: int, ids: Ids, now: float) -> None:
        """Take the changes back, and keep only what is to be offered.

        What only informs gets an id with the commit: readers wait for nothing but what is offered.
        """
        self.now = work.now
        informing = {id for id, receipt in work.written.items() if receipt.receipt_type in INFORMS}
        self.given = {use: id for use, id in self.given.items() if id not in informing}
        before = {*self.leased}
        self.leased = [receipt.task_id for receipt in work.written.values() if receipt.receipt_type == ACCEPTED.type]
        self.given_up |= not before <= {*self.leased}
        rows = [] if self.blocked or self.differs or self.outrun else [
            settling.write_row(row, work, self.sink) for row in self.posted]
        if self.outrun:
            self.now, self.given, self.leased = None, {**self.first}, []
        work.take_back(savepoint)
        work.replay(ids, now)
        for row in rows:
            row = replace(row, tries=1) if self.only else row       # so whose call it was does not forget it
            work.keep_record(row)
            self.tried[row.receipt_id] = settling.read_row(row)


class Strict(Extension):
    """Commits a tenant's batches one after another, each after the ledger has its receipts."""

    def __init__(self, engine: Engine, sink: Sink, breaker: Breaker, wires: Wires,
                 sent: Callable[[str], None] = lambda tenant_id: None) -> None:
        self.engine = engine
        self.within: Transact = engine.backend.transact
        self.sink, self.breaker, self.wires = sink, breaker, wires
        self.lasting = engine.settings.receipt_consistency_mode == "strict"
        self.sent = sent        # called with a tenant whose outbox has new receipts
        self.turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def wrap_transact(self, transact: Transact) -> Transact:
        """Replace the engine's transact by one that waits for the ledger, if the gate is strict."""
        self.within = transact
        return self.commit if self.lasting else transact

    async def commit(self, tenant_id: str, needs: Needs, decide: Decide) -> None:
        """Commit one batch; raises LedgerUnavailable if the ledger does not store its receipts."""
        async with self.turns[tenant_id]:
            earlier = await self.find_offered(tenant_id)
            busy = self._find_busy(earlier)
            named = [attempt for attempt in earlier if attempt.row.receipt_id not in busy and (
                attempt.row.task_id in needs.tasks or attempt.claim in needs.repeats)]
            with contextlib.suppress(errors.LedgerUnavailable):    # a call that needs no ledger goes on
                earlier = await self._settle_before(tenant_id, needs, named) if named else earlier
            draft = self._draft(earlier)
            while not await self._carry_out(tenant_id, needs, decide, draft):
                if not busy.isdisjoint(attempt.row.receipt_id for attempt in draft.blocked):
                    later = errors.DatabaseUnavailable("another process is changing this task; try again",
                                                       retry_after=1)
                    raise errors.Refused("another process is about to commit") from later
                draft = self._draft(await self._settle_before(tenant_id, needs, draft.blocked))

    def _draft(self, earlier: list[settling.Tried]) -> Draft:
        given = {(name, 1): id for attempt in earlier if attempt.memo.key is not None for name, id in attempt.names()}
        busy = self._find_busy(earlier)
        return Draft(self.sink, {attempt.row.receipt_id: attempt for attempt in earlier}, first=given, given={**given},
                     hidden=frozenset(attempt.row.task_id for attempt in earlier if attempt.row.receipt_id in busy))

    def _find_busy(self, earlier: list[settling.Tried]) -> set[str]:
        """Return what another process may be about to commit: its call has neither failed nor taken too long."""
        if self.engine.is_alone():
            return set()
        since = self.engine.backend.now() - BUSY_SECONDS
        return {attempt.row.receipt_id for attempt in earlier if not attempt.row.tries
                and attempt.row.posted_at > since}

    async def find_offered(self, tenant_id: str) -> list[settling.Tried]:
        """Return what is offered and not committed."""
        rows = await self.engine.backend.page(tenant_id, queries.OutboxFilter("", OFFERED_AT_ONCE, "offered"))
        return [settling.read_row(row) for row in rows if row.state == "offered"]

    async def _carry_out(self, tenant_id: str, needs: Needs, decide: Decide, draft: Draft) -> bool:
        """Decide, offer and commit a batch; return False if something must be settled before."""
        done = False
        try:
            for _ in range(ATTEMPTS):
                await self.within(tenant_id, draft.load(needs), partial(draft.decide, decide))
                if draft.kept or draft.differs or draft.blocked:
                    done = draft.kept
                    return not draft.blocked
                if draft.outrun:
                    continue
                await self._store(tenant_id, [row for row in draft.posted if row not in draft.accepted], draft)
                draft.accepted = draft.posted
        finally:
            await self._leave(tenant_id, draft, done)
        raise errors.DatabaseUnavailable("other calls keep changing the same tasks; try again", retry_after=1)

    async def _leave(self, tenant_id: str, draft: Draft, done: bool) -> None:
        """Forget what the ledger surely does not have; withdraw at once what no repeat of the call could take up.

        What the batch has come to is answered, so that nothing else that it had offered is adopted.
        """
        committed = {row.receipt_id for row in draft.posted} if done else set[str]()
        left = [replace(attempt, memo=replace(attempt.memo, dropped=done)) for id, attempt in draft.tried.items()
                if id not in committed and not draft.only]
        never = [attempt for attempt in left if attempt.row.receipt_id not in draft.offered]
        unsure = [attempt for attempt in left if attempt.row.receipt_id in draft.offered]
        kept = [attempt for attempt in unsure if attempt.may_be_repeated() and not done]
        lost = [attempt for attempt in unsure if attempt not in kept]
        try:
            for attempts, end in (never, forget), (kept, note_failure):
                for group in settling.group_by_task(attempts):
                    await self._change(tenant_id, group, partial(end, group))
            await self.settle(tenant_id, lost)
        except Exception as error:
            log.warning("what the ledger may have of a failed call is settled later: %s", error)

    # Settling.

    async def run(self) -> None:
        """Settle what no call has taken up, until canceled; a gate that is not strict only ends what is left."""
        while True:
            try:
                if not await self.look() and not self.lasting:
                    return
            except Exception as error:
                log.warning("offered receipts cannot be settled now: %s", error)
            await asyncio.sleep(POLL_OFFERED_SECONDS)

    async def look(self) -> int:
        """Settle what has waited long enough for the repeat of its call; return how many offered receipts are left."""
        if not await self.engine.leads(JOB):
            return 0
        left = 0
        for tenant_id in await self.engine.backend.unsent():
            since = self.engine.backend.now() - REPEAT_SECONDS
            async with self.turns[tenant_id]:
                offered = await self.find_offered(tenant_id)
                left += len(offered)
                for group in settling.group_by_task(offered):
                    if group[-1].row.posted_at <= since:
                        await self._settle_later(tenant_id, group)
        return left

    async def _settle_later(self, tenant_id: str, group: list[settling.Tried]) -> None:
        """Settle the receipts of one task; what fails is tried again, and holds up no other task."""
        try:
            await self.settle(tenant_id, group)
        except errors.GateError as error:
            log.warning("receipts of task %s are settled later: %s", group[0].row.task_id, error)

    async def count_unsettled(self, tenants: Iterable[str]) -> int:
        """Return how many offered receipts are older than a call takes."""
        now = self.engine.backend.now()
        return sum([attempt.row.posted_at <= now - POLL_OFFERED_SECONDS for tenant_id in tenants
                    for attempt in await self.find_offered(tenant_id)])

    async def _settle_before(self, tenant_id: str, needs: Needs, tried: list[settling.Tried]) -> list[settling.Tried]:
        """Settle receipts that a batch meets, with all others of their tasks; return what is offered then."""
        tasks = {attempt.row.task_id or attempt.row.receipt_id for attempt in tried}
        offered = await self.find_offered(tenant_id)
        await self.settle(tenant_id,
                          [attempt for attempt in offered if (attempt.row.task_id or attempt.row.receipt_id) in tasks],
                          needs.repeats)
        return await self.find_offered(tenant_id)

    async def settle(self, tenant_id: str, tried: list[settling.Tried],
                     claims: set[tuple[str, str, str]] | frozenset[tuple[str, str, str]] = frozenset()) -> None:
        """Adopt, withdraw or overtake receipts; a claim that is among `claims` is repeated, and so its lease granted.

        Raises LedgerUnavailable.
        """
        for group in settling.group_by_task(tried):
            begun = [of for of in group if self.sink.undone(of.row.content.encode(), "", 0.0) is not None]
            begins = group[0] in begun
            lawful = (not begins or group[0].claim in claims) and not any(attempt.memo.dropped for attempt in group)
            if lawful and await self._adopt(tenant_id, group):
                continue
            if begins:
                await self._change(tenant_id, begun, partial(settling.withdraw, self.sink, begun))
                await self.settle(tenant_id, [of for of in group if of not in begun])
            else:
                await self._overtake(tenant_id, group)
            self.sent(tenant_id)

    async def _change(self, tenant_id: str, group: list[settling.Tried], run: Decide) -> None:
        """Change what belongs to the receipts of one task."""
        await self.within(tenant_id, settling.needs_of(group, self.engine, tenant_id), run)

    async def _adopt(self, tenant_id: str, group: list[settling.Tried], needs: Needs | None = None) -> bool:
        """Commit what the receipts of one task say, if it was lawful and still is; return whether it is."""
        only = {attempt.row.receipt_id: attempt.row.content for attempt in group}
        draft = Draft(self.sink, {}, only=only, now=group[0].receipt.created_at,
                      given={(name, 1): id for attempt in group for name, id in attempt.names()})
        needs, lacking = needs or settling.needs_of(group, self.engine, tenant_id), list[errors.Unloaded]()
        decided: list[Work] = []

        def decide(work: Work) -> None:
            decided[:] = [work]
            try:
                settling.decide_again(self.engine, group, work)
            except errors.Unloaded as unloaded:     # such as its parent; a database would let other batches fail, too
                lacking.append(unloaded)
        with contextlib.suppress(errors.Refused):
            await self._carry_out(tenant_id, needs, decide, draft)
        if lacking and not draft.kept:
            needs.add(lacking[-1])
            return await self._adopt(tenant_id, group, needs)
        if draft.kept:
            self.engine.batches.after_commit(decided[0])
        return draft.kept

    async def _overtake(self, tenant_id: str, group: list[settling.Tried]) -> None:
        """Tell that receipts of one task did not count, as far as the ledger has them."""
        known = set[str]()
        for attempt in group:
            # Not only asked for: what an earlier process has sent may be on its way and arrive later.
            with contextlib.suppress(sinks.Refusal):
                try:
                    await self.sink.send(tenant_id, attempt.row.content.encode())
                except sinks.Outage as away:
                    raise errors.LedgerUnavailable(f"the receipt ledger does not answer: {away}",
                                                   retry_after=1) from None
                known.add(attempt.row.receipt_id)
        await self._change(tenant_id, group, partial(settling.overtake, self.engine, group, known))

    # Sending.

    async def _store(self, tenant_id: str, rows: list[stored.Outgoing], draft: Draft) -> None:
        """Store receipts at the ledger: those of one task in order, those of different tasks concurrently."""
        chains: defaultdict[str, list[stored.Outgoing]] = defaultdict(list)
        for row in rows:
            chains[row.task_id or row.receipt_id].append(row)
        problems = await asyncio.gather(*(self._store_chain(tenant_id, chain, draft) for chain in chains.values()))
        for problem in problems:
            if isinstance(problem, sinks.Outage):
                raise errors.LedgerUnavailable(
                    f"the receipt ledger does not answer, and this gate is strict: {problem}",
                    retry_after=max(1, round(problem.retry_after)))
        for problem in problems:
            if problem is not None:     # Refused: each job of the batch is then tried alone, and only this one fails
                raise errors.Refused("the ledger refuses a receipt") from errors.LedgerUnavailable(
                    f"the receipt ledger refuses this, and this gate is strict: {problem}")

    async def _store_chain(self, tenant_id: str, rows: list[stored.Outgoing], draft: Draft) -> Exception | None:
        for row in rows:
            for left in reversed(range(OFFERS)):
                problem = await self._offer(tenant_id, row, draft)
                if not (left and isinstance(problem, sinks.Unanswered)):
                    break
            if problem is not None:
                return problem
        return None

    async def _offer(self, tenant_id: str, row: stored.Outgoing, draft: Draft) -> Exception | None:
        """Send one receipt; from then on the ledger may have it, unless the error says that it does not."""
        if not self.breaker.let_through():
            return sinks.Outage("the circuit breaker is open", self.breaker.wait())
        before = row.receipt_id in draft.offered
        draft.offered.add(row.receipt_id)
        try:
            async with self.wires:
                await self.wires.send(self.sink, tenant_id, row.content.encode())
        except asyncio.CancelledError:
            self.breaker.cancel_probe()
            raise
        except sinks.Outage as away:
            if away.untaken and not before:
                draft.offered.discard(row.receipt_id)
            self.breaker.note_answer() if isinstance(away,
                                                     sinks.Unanswered | sinks.Garbled) else self.breaker.note_outage()
            return away
        except sinks.Refusal as refusal:
            if not before:
                draft.offered.discard(row.receipt_id)
            self.breaker.note_answer()
            return refusal
        self.breaker.note_answer()
        return None


def forget(group: list[settling.Tried], work: Work) -> None:
    """Forget receipts that the ledger does not have; not those that another process has offered it meanwhile."""
    for attempt in settling.drop_committed(group, work):
        if work.find_record(stored.Outgoing, attempt.row.receipt_id) == attempt.row:
            work.drop_record(stored.Outgoing, attempt.row.receipt_id)


def note_failure(group: list[settling.Tried], work: Work) -> None:
    """Note that the call has failed, so that no other process waits for it."""
    for attempt in settling.drop_committed(group, work):
        work.keep_record(replace(attempt.row, tries=1))
