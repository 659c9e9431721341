"""Strict mode: a change counts only when the ledger has its receipts (spec 20.10, option B).

A batch is decided and taken back, its receipts are stored at the ledger, and then it is decided again, with the same
ids and at the same moment, and committed: if it comes out as before.  If it does not, because another process was
faster, it begins again.  So no transaction is open while the ledger is asked, and no tenant waits for another's ledger.
What only informs (anomalies, acknowledgements, progress) goes through the outbox: it changes nothing.

A receipt that the ledger did not answer may be there all the same.  It is offered again, byte for byte, before the call
is given up; then the same step, asked for once more, offers that very receipt; and for a lease that was never granted
the outbox gets the receipt and behind it the one that undoes it, so that the ledger holds nobody to it.
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
from asyncgate.parts.model.errors import DatabaseUnavailable, LedgerUnavailable, Refused
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

ATTEMPTS = 5        # at a batch that came out otherwise
OFFERS = 3          # of a receipt that is not answered, before the call is given up
STRANDED = 1000     # batches whose receipts may be at the ledger, and which may be asked for once more
INFORMS = {ACKNOWLEDGED.type, ANOMALY.type, PROGRESSED.type}
Decide = Callable[["Work"], None]


class Recorded(Ids):
    """Gives the ids of an earlier time first, and remembers all that it gave."""

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
    """What a batch came out as."""

    now: float | None = None
    ids: list[str] = field(default_factory=list)
    posted: list[Outgoing] = field(default_factory=list)       # that the ledger must have before it counts
    kept: bool = False
    steps: frozenset[tuple[str, str]] = frozenset()             # task and key of each: what is stated, whenever
    offered: dict[str, Outgoing] = field(default_factory=dict)  # that may be at the ledger, as this batch or before

    def decide(self, decide: Decide, work: Work) -> None:
        """Decide as before; keep what comes out if the ledger has it, else take it back and remember it."""
        mark, real, ids = work.mark(), (work.ids, work.now), Recorded(work.ids, self.ids)
        work.ids, work.now = ids, work.now if self.now is None else self.now
        decide(work)
        posted = [row for row in work.posted.values() if work.written[row.receipt_id].receipt_type not in INFORMS]
        self.kept = posted == self.posted
        if self.kept:
            for row in posted:
                del work.posted[row.receipt_id]
        else:
            self.now, self.ids, self.posted = work.now, ids.given, posted
            self.steps = frozenset((row.task_id, work.written[row.receipt_id].receipt_key) for row in posted)
            work.take_back(mark)
            work.ids, work.now = real


class Strict(Extension):
    """Commits a tenant's batches one after another, each behind the ledger."""

    def __init__(self, backend: Backend, sink: Sink, breaker: Breaker, wires: Wires,
                 sent: Callable[[str], None] = lambda tenant_id: None) -> None:
        self.within: Transact = backend.transact
        self.sink, self.breaker, self.wires = sink, breaker, wires
        self.sent = sent        # told that something of a tenant waits in the outbox
        self.turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.stranded: OrderedDict[tuple[str, frozenset[tuple[str, str]]], Draft] = OrderedDict()

    def transact(self, transact: Transact) -> Transact:
        """Carry out each batch behind the ledger."""
        self.within = transact
        return self.commit

    async def commit(self, tenant_id: str, needs: Needs, decide: Decide) -> None:
        """Carry out one batch; raises LedgerUnavailable when the ledger does not take its receipts."""
        async with self.turns[tenant_id]:
            draft = Draft()
            try:
                for attempt in range(ATTEMPTS):
                    stored = draft.posted
                    await self.within(tenant_id, needs, partial(draft.decide, decide))
                    if not attempt and not draft.kept:
                        draft = await self._as_before(tenant_id, needs, decide, draft)
                    if draft.kept:
                        return
                    await self._store(tenant_id, [row for row in draft.posted if row not in stored], draft)
            finally:
                await self._settle(tenant_id, draft)
        raise DatabaseUnavailable("others change the same tasks; try again", retry_after=1)

    async def _as_before(self, tenant_id: str, needs: Needs, decide: Decide, draft: Draft) -> Draft:
        """Return the draft of the same steps whose receipts may be at the ledger, if the steps come out so again."""
        if (before := self.stranded.pop((tenant_id, draft.steps), None)) is None:
            return draft
        again = Draft(before.now, before.ids)
        await self.within(tenant_id, needs, partial(again.decide, decide))
        return again if again.posted == before.posted else draft

    async def _settle(self, tenant_id: str, draft: Draft) -> None:
        """See to what may be at the ledger and does not count here."""
        counts = {row.receipt_id for row in draft.posted} if draft.kept else set()
        left = [row for row in draft.offered.values() if row.receipt_id not in counts]
        if not left:
            return
        self.stranded[tenant_id, draft.steps] = draft
        while len(self.stranded) > STRANDED:
            self.stranded.popitem(last=False)
        granted = [row for row in left if self.sink.undone(row.content.encode(), "", 0.0) is not None]
        if granted:
            needs = Needs(tasks={row.task_id for row in granted})
            try:
                await self.within(tenant_id, needs, partial(undo, self.sink, granted))
            except Exception:
                log.exception("the ledger may have leases that were never granted; `asyncgate reconcile` tells which")
            else:
                self.sent(tenant_id)

    async def _store(self, tenant_id: str, rows: list[Outgoing], draft: Draft) -> None:
        """Let the ledger have receipts: those of a task one after another, those of several at once."""
        chains: defaultdict[str, list[Outgoing]] = defaultdict(list)
        for row in rows:
            chains[row.task_id or row.receipt_id].append(row)
        problems = await asyncio.gather(*(self._store_chain(tenant_id, chain, draft) for chain in chains.values()))
        for problem in problems:
            if isinstance(problem, Outage):
                raise LedgerUnavailable(f"the receipt ledger does not answer, and this gate is strict: {problem}",
                                        retry_after=max(1, round(problem.retry_after)))
        for problem in problems:
            if problem is not None:     # of a batch each job is tried alone then, and only this one fails
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
        """Offer one receipt; it may be at the ledger from then on, unless that has plainly not taken it."""
        if not self.breaker.admits():
            return Outage("the circuit breaker is open", self.breaker.wait())
        before = row.receipt_id in draft.offered
        draft.offered[row.receipt_id] = row
        try:
            async with self.wires:
                await self.wires.send(self.sink, tenant_id, row.content.encode())
        except asyncio.CancelledError:
            self.breaker.forgo()
            raise
        except Outage as away:
            if away.untaken and not before:
                draft.offered.pop(row.receipt_id)
            self.breaker.passed() if isinstance(away, Unanswered | Garbled) else self.breaker.failed()
            return away
        except Refusal as no:
            draft.offered.pop(row.receipt_id)
            self.breaker.passed()
            return no
        self.breaker.passed()
        return None


def undo(sink: Sink, rows: list[Outgoing], work: Work) -> None:
    """Put leases that were never granted into the outbox, each with what undoes it behind it."""
    for row in rows:
        task, lease = work.tasks.get(row.task_id), work.leases.get(row.task_id)
        back = work.new_id()
        content = sink.undone(row.content.encode(), back, work.now)
        if content is None or task is None:
            continue
        work.keep(row)
        work.keep(Outgoing(back, row.task_id, content.decode(), work.now))
        if (handed := sink.taken_back(back, task, lease)) is not None:
            work.change(task, handed=handed)
