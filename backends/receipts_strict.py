"""Strict mode: a change counts only when the ledger has its receipts (spec 20.10, option B).

A batch is decided and taken back, its receipts are stored at the ledger, and then it is decided again, with the same
ids and at the same moment, and committed: if it comes out as before.  If it does not, because another process was
faster, it begins again.  So no transaction is open while the ledger is asked, and no tenant waits for another's ledger.
What only informs (anomalies, acknowledgements, progress) goes through the outbox: it changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct, field

from asyncgate import ACKNOWLEDGED, ANOMALY, PROGRESSED, DatabaseUnavailable, Ids, LedgerUnavailable, Outgoing, Refused
from asyncgate.backends.receipts_sinks import Garbled, Outage, Refusal, Unanswered

if TYPE_CHECKING:
    from asyncgate import Needs, Work
    from asyncgate.backends import Backend
    from asyncgate.backends.receipts_outbox import Breaker
    from asyncgate.backends.receipts_sinks import Sink
    from asyncgate.backends.receipts_wires import Wires

ATTEMPTS = 5        # at a batch that came out otherwise
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
            work.take_back(mark)
            work.ids, work.now = real


class Strict:
    """Commits a tenant's batches one after another, each behind the ledger."""

    def __init__(self, backend: Backend, sink: Sink, breaker: Breaker, wires: Wires) -> None:
        self.backend, self.sink, self.breaker, self.wires = backend, sink, breaker, wires
        self.turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def transact(self, tenant_id: str, needs: Needs, decide: Decide) -> None:
        """Carry out one batch; raises LedgerUnavailable when the ledger does not take its receipts."""
        async with self.turns[tenant_id]:
            draft = Draft()
            for _ in range(ATTEMPTS):
                stored = draft.posted
                await self.backend.transact(tenant_id, needs, partial(draft.decide, decide))
                if draft.kept:
                    return
                await self._store(tenant_id, [row for row in draft.posted if row not in stored])
        raise DatabaseUnavailable("others change the same tasks; try again", retry_after=1)

    async def _store(self, tenant_id: str, rows: list[Outgoing]) -> None:
        """Let the ledger have receipts: those of a task one after another, those of several at once."""
        chains: defaultdict[str, list[Outgoing]] = defaultdict(list)
        for row in rows:
            chains[row.task_id or row.receipt_id].append(row)
        problems = await asyncio.gather(*(self._store_chain(tenant_id, chain) for chain in chains.values()))
        for problem in problems:
            if isinstance(problem, Outage):
                raise LedgerUnavailable(f"the receipt ledger does not answer, and this gate is strict: {problem}",
                                        retry_after=max(1, round(problem.retry_after)))
        for problem in problems:
            if problem is not None:     # of a batch each job is tried alone then, and only this one fails
                no = LedgerUnavailable(f"the receipt ledger refuses this, and this gate is strict: {problem}")
                raise Refused("the ledger refuses a receipt") from no

    async def _store_chain(self, tenant_id: str, rows: list[Outgoing]) -> Exception | None:
        for row in rows:
            if not self.breaker.admits():
                return Outage("it is left in peace for a while", self.breaker.wait())
            try:
                async with self.wires:
                    await self.wires.send(self.sink, tenant_id, row.content.encode())
            except asyncio.CancelledError:
                self.breaker.forgo()
                raise
            except Outage as away:
                self.breaker.passed() if isinstance(away, Unanswered | Garbled) else self.breaker.failed()
                return away
            except Refusal as no:
                self.breaker.passed()
                return no
            self.breaker.passed()
        return None
