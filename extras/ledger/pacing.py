"""The wires to a ledger: how many receipts are on the way at once, and what a missing answer means.

A ledger may be slow and store one receipt after another.  A sender that sends more at once than the ledger can answer
in time gets time-outs, sends the same receipts again, and never catches up.  So the number of wires follows the
answers: one more after each round of quick answers, half as many after a late one.  A receipt that was not answered in
time may be stored anyway: the sender looks for it at the ledger before it sends it again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from asyncgate.extras.ledger import sinks
from asyncgate.parts.receipts.sealing import ledger_profile

if TYPE_CHECKING:
    from asyncgate.extras.ledger.sinks import Sink
    from asyncgate.parts.model.settings import Settings

LOOK_SECONDS = 10.0     # timeout of a query for a receipt: a slow ledger answers earlier calls first
SOON_SHARE = 0.5      # of the time-out: a ledger that needs longer gets no further wire


class Pace(Struct, frozen=True):
    """The default timeout and number of wires for a kind of ledger."""

    timeout_seconds: float
    most: int       # wires
    first: int


BY_PROFILE = {"receiptgate": Pace(10.0, 4, 1)}      # it takes one receipt after another
FAST = Pace(0.5, 16, 16)                            # spec 20.12


def pace_of(settings: Settings) -> Pace:
    """Return the pace for the ledger of the settings."""
    usual, ours = BY_PROFILE.get(ledger_profile(settings), FAST), settings.ledger
    most = ours.parallel or usual.most
    return Pace(ours.timeout_ms / 1000 or usual.timeout_seconds, most, min(usual.first, most))


class Wires:
    """As many receipts on the way as the ledger answers in time; `async with` takes one of the wires."""

    def __init__(self, pace: Pace, clock: Callable[[], float] = time.monotonic) -> None:
        self.pace, self.clock = pace, clock
        self.limit, self.busy = float(pace.first), 0
        self.cut_at = self.unanswered_at = -1.0
        self.looking = asyncio.Lock()
        self.freed = asyncio.Condition()

    async def __aenter__(self) -> Wires:
        async with self.freed:
            await self.freed.wait_for(self._has_one)
            self.busy += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self.busy -= 1
        async with self.freed:
            self.freed.notify(max(int(self.limit) - self.busy, 0))

    def _has_one(self) -> bool:
        return self.busy < int(self.limit)

    async def send(self, sink: Sink, tenant_id: str, content: bytes) -> None:
        """Send a receipt, and look for it if there is no answer; raises Refusal, Outage, or Unanswered.

        Unanswered means that the ledger lives but does not have the receipt yet, so the circuit breaker stays closed.
        """
        began = self.clock()
        try:
            await sink.send(tenant_id, content)
        except sinks.Unanswered:
            self.late(began)
            if not await self._look(sink, tenant_id, content):
                raise
        except sinks.Refusal:
            self.in_time(began)
            raise
        else:
            self.in_time(began)

    async def _look(self, sink: Sink, tenant_id: str, content: bytes) -> bool:
        """Ask whether a receipt has arrived; one at a time, because the ledger still works on earlier ones."""
        came = self.clock()
        async with self.looking:
            if self.unanswered_at > came:       # an earlier query got no answer meanwhile, so this one would not either
                raise sinks.Outage("the ledger answers neither receipts nor queries in time")
            try:
                return await sink.holds(tenant_id, content)
            except sinks.Outage as away:
                self.unanswered_at, away.untaken = self.clock(), False      # what was not taken is the query
                raise

    def in_time(self, began: float) -> None:
        """Note an answer in time; a round of quick answers adds a wire."""
        if self.clock() - began < SOON_SHARE * self.pace.timeout_seconds:
            self.limit = min(self.limit + 1 / self.limit, float(self.pace.most))

    def late(self, began: float) -> None:
        """Note a late answer: halve the wires, once for all receipts that were on the way."""
        if began > self.cut_at:
            self.limit, self.cut_at = max(self.limit / 2, 1.0), self.clock()


def same_receipt(ours: bytes, theirs: Any, unlike: set[str]) -> bool:
    """Whether a ledger has a receipt as it was sent, except for the fields that the ledger adds."""
    sent = json.loads(ours)
    return isinstance(theirs, dict) and all(theirs.get(name) == value for name, value in sent.items()
                                            if name not in unlike)
