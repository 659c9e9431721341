"""Strict mode: a change is committed only after the ledger has stored its receipts (spec 20.10, option B).

A batch is decided once and rolled back; its receipts are stored at the ledger; then the batch is decided again with the
same ids and the same time.  If the result is the same, it is committed.  If it differs, because another process changed
the tasks meanwhile, the batch starts again.  So no transaction is open during a call to the ledger, and no tenant waits
for another tenant's calls.  Receipts that only inform (anomalies, acknowledgements, progress) go through the outbox.

A ledger that did not answer may have stored the receipt.  So the same bytes are sent again before the call fails.  If
the caller repeats the failed step, the same receipt is sent again.  If a lease was not granted, the outbox gets its
receipt and the one that undoes it, so that the ledger does not keep the acceptance.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct, field

from asyncgate import ACKNOWLEDGED, ANOMALY, PROGRESSED, Extension, Needs
from asyncgate.parts.model.errors import DatabaseUnavailable, GateError, LedgerUnavailable, Refused
from asyncgate.parts.model.ids import Ids
from asyncgate.parts.model.stored import Outgoing
from asyncgate.parts.receipts.sinks import Garbled, Outage, Refusal, Unanswered

if TYPE_CHECKING:
    from asyncgate import Transact, Work
    from asyncgate.backends import Backend
    from asyncgate.parts.receipts.outbox import Breaker
    from asyncgate.parts.receipts.sinks import Sink
    from asyncgate.parts.receipts.wires import Wires

log = logging.getLogger("asyncgate.ledger")

ATTEMPTS = 5        # how often a batch is decided again because its result differed
OFFERS = 3          # how often a receipt is sent without an answer before the call fails
STRANDED = 1000     # remembered failed batches whose receipts the ledger may have
INFORMS = {ACKNOWLEDGED.type, ANOMALY.type, PROGRESSED.type}
Decide = Callable[["Work"], None]


class Recorded(Ids):
    """Returns given ids first, then new ones, and remembers all that it returned."""

    def __init__(self, ids: Ids, first: list[str]) -> None:
        super().__init__()
        self.ids, self.first, self.given = ids, deque(first), list[str]()

    def new(self, now: float, mark: int = 0) -> str:
        """Return the next id."""
        return self._give(lambda: self.ids.new(now, mark))

    def lease(self, mark: int = 0) -> str:
        """Return the next lease id."""
        return self._give(lambda: self.ids.lease(mark))

    def _give(self, make: Callable[[], str]) -> str:
        self.given.append(self.first.popleft() if self.first else make())
        return self.given[-1]


class Draft(Struct):
    """The result of deciding a batch."""

    now: float | None = None
    ids: list[str] = field(default_factory=list)
    posted: list[Outgoing] = field(default_factory=list)       # receipts that the ledger must store before the commit
    stored: list[Outgoing] = field(default_factory=list)       # those of the result that the ledger has stored
    kept: bool = False
    steps: frozenset[tuple[str, str]] = frozenset()             # task and receipt key: equal for a repeated step
    offered: dict[str, Outgoing] = field(default_factory=dict)  # receipts that the ledger may have

    def decide(self, decide: Decide, work: Work) -> None:
        """Decide with the remembered ids and time; keep a result that the ledger has stored, roll back any other.

        A database that loses a race or its connection decides more than once in one transaction.  So the result is
        compared with what the ledger has stored, not with the last result.
        """
        mark, real, ids = work.mark(), (work.ids, work.now), Recorded(work.ids, self.ids)
        work.replay(ids, work.now if self.now is None else self.now)
        decide(work)
        self.posted = [row for row in work.posted.values()
                       if work.written[row.receipt_id].receipt_type not in INFORMS]
        self.kept = self.posted == self.stored
        if self.kept:
            for row in self.posted:
                del work.posted[row.receipt_id]
        else:
            self.now, self.ids = work.now, ids.given
            self.steps = frozenset((row.task_id, work.written[row.receipt_id].receipt_key) for row in self.posted)
            work.take_back(mark)
            work.replay(*real)


class Strict(Extension):
    """Commits a tenant's batches one after another, each after the ledger has its receipts."""

    def __init__(self, backend: Backend, sink: Sink, breaker: Breaker, wires: Wires,
                 sent: Callable[[str], None] = lambda tenant_id: None) -> None:
        self.within: Transact = backend.transact
        self.sink, self.breaker, self.wires = sink, breaker, wires
        self.sent = sent        # called with a tenant whose outbox has new receipts
        self.turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.stranded: OrderedDict[tuple[str, frozenset[tuple[str, str]]], Draft] = OrderedDict()

    def wrap_transact(self, transact: Transact) -> Transact:
        """Replace the engine's transact by one that waits for the ledger."""
        self.within = transact
        return self.commit

    async def commit(self, tenant_id: str, needs: Needs, decide: Decide) -> None:
        """Commit one batch; raises LedgerUnavailable if the ledger does not store its receipts."""
        async with self.turns[tenant_id]:
            draft = Draft()
            try:
                for attempt in range(ATTEMPTS):
                    await self.within(tenant_id, needs, partial(draft.decide, decide))
                    if not attempt and not draft.kept:
                        draft = await self._reuse_stranded(tenant_id, needs, decide, draft)
                    if draft.kept:
                        return
                    await self._store(tenant_id, [row for row in draft.posted if row not in draft.stored], draft)
                    draft.stored = draft.posted
            except Exception as error:
                if draft.kept:      # the database failed, and the ledger has the receipts
                    self._strand(tenant_id, draft)
                    draft.kept = is_unknown(error)
                raise
            finally:
                await self._settle(tenant_id, draft)
        raise DatabaseUnavailable("other calls keep changing the same tasks; try again", retry_after=1)

    async def _reuse_stranded(self, tenant_id: str, needs: Needs, decide: Decide, draft: Draft) -> Draft:
        """Return the draft of an earlier failed call for the same steps, if deciding them again gives the same."""
        if (before := self.stranded.pop((tenant_id, draft.steps), None)) is None:
            return draft
        again = Draft(before.now, before.ids)
        await self.within(tenant_id, needs, partial(again.decide, decide))
        return again if again.posted == before.posted else draft

    async def _settle(self, tenant_id: str, draft: Draft) -> None:
        """Remember, and for leases undo, receipts that the ledger may have and that were not committed."""
        counts = {row.receipt_id for row in draft.posted} if draft.kept else set()
        left = [row for row in draft.offered.values() if row.receipt_id not in counts]
        if not left:
            return
        self._strand(tenant_id, draft)
        granted = [row for row in left if self.sink.undone(row.content.encode(), "", 0.0) is not None]
        if granted:
            needs = Needs(tasks={row.task_id for row in granted})
            try:
                await self.within(tenant_id, needs, partial(undo, self.sink, granted))
            except Exception:
                log.exception("the ledger may have leases that were never granted; `asyncgate reconcile` names them")
            else:
                self.sent(tenant_id)

    def _strand(self, tenant_id: str, draft: Draft) -> None:
        """Remember a draft whose receipts the ledger may have, for a caller that repeats the step."""
        self.stranded[tenant_id, draft.steps] = draft
        while len(self.stranded) > STRANDED:
            self.stranded.popitem(last=False)

    async def _store(self, tenant_id: str, rows: list[Outgoing], draft: Draft) -> None:
        """Store receipts at the ledger: those of one task in order, those of different tasks concurrently."""
        chains: defaultdict[str, list[Outgoing]] = defaultdict(list)
        for row in rows:
            chains[row.task_id or row.receipt_id].append(row)
        problems = await asyncio.gather(*(self._store_chain(tenant_id, chain, draft) for chain in chains.values()))
        for problem in problems:
            if isinstance(problem, Outage):
                raise LedgerUnavailable(f"the receipt ledger does not answer, and this gate is strict: {problem}",
                                        retry_after=max(1, round(problem.retry_after)))
        for problem in problems:
            if problem is not None:     # Refused: each job of the batch is then tried alone, and only this one fails
                no = LedgerUnavailable(f"the receipt ledger refuses this, and this gate is strict: {problem}")
                raise Refused("the ledger refuses a receipt") from no

    async def _store_chain(self, tenant_id: str, rows: list[Outgoing], draft: Draft) -> Exception | None:
        for row in rows:
            for left in reversed(range(OFFERS)):
                problem = await self._offer(tenant_id, row, draft)
                if not (left and isinstance(problem, Unanswered)):
                    break
            if problem is not None:
                return problem
        return None

    async def _offer(self, tenant_id: str, row: Outgoing, draft: Draft) -> Exception | None:
        """Send one receipt; from then on the ledger may have it, unless the error says that it does not."""
        if not self.breaker.let_through():
            return Outage("the circuit breaker is open", self.breaker.wait())
        before = row.receipt_id in draft.offered
        draft.offered[row.receipt_id] = row
        try:
            async with self.wires:
                await self.wires.send(self.sink, tenant_id, row.content.encode())
        except asyncio.CancelledError:
            self.breaker.cancel_probe()
            raise
        except Outage as away:
            if away.untaken and not before:
                draft.offered.pop(row.receipt_id)
            self.breaker.note_answer() if isinstance(away, Unanswered | Garbled) else self.breaker.note_outage()
            return away
        except Refusal as no:
            draft.offered.pop(row.receipt_id)
            self.breaker.note_answer()
            return no
        self.breaker.note_answer()
        return None


def is_unknown(error: Exception) -> bool:
    """Whether a batch may be committed although its transaction failed with this error."""
    return not isinstance(error, Refused | GateError) or getattr(error, "more", {}).get("outcome") == "unknown"


def undo(sink: Sink, rows: list[Outgoing], work: Work) -> None:
    """Put acceptances of leases that were never granted into the outbox, each with the receipt that undoes it."""
    for row in rows:
        task, lease = work.tasks.get(row.task_id), work.leases.get(row.task_id)
        back = work.new_id()
        content = sink.undone(row.content.encode(), back, work.now)
        if content is None or task is None:
            continue
        work.keep_record(row)
        work.keep_record(Outgoing(back, row.task_id, content.decode(), work.now))
        if (handed := sink.taken_back(back, task, lease)) is not None:
            work.change_task(task, handed=handed)
