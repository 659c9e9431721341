"""The wires to a ledger: how many receipts are on the way at once, and what a missing answer means.

A ledger may take one receipt after the other, and slowly.  Whoever sends it more at once than it can take in time is
told of time-outs, sends the same again, and never catches up.  So the number of wires follows the answers: one more for
each round of answers that come soon, half as many for a call that is late.  And a receipt that was not answered in time
may be stored all the same: the ledger is asked for it before it is sent again, or called away.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from asyncgate.parts.receipts.sinks import Outage, Refusal, Unanswered, ledger_profile

if TYPE_CHECKING:
    from asyncgate.parts.model.settings import Settings
    from asyncgate.parts.receipts.sinks import Sink

LOOK_SECONDS = 10.0     # that a look may take: what a slow ledger was sent before comes first there
SOON_SHARE = 0.5      # of the time-out: a ledger that needs longer gets no further wire


class Pace(Struct, frozen=True):
    """How a kind of ledger is called where the settings leave that to the profile."""

    timeout_seconds: float
    most: int       # wires
    first: int


BY_PROFILE = {"receiptgate": Pace(10.0, 4, 1)}      # it takes one receipt after another
FAST = Pace(0.5, 16, 16)                            # spec 20.12


def pace_of(settings: Settings) -> Pace:
    """Return how the ledger of the settings is called."""
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

        Unanswered says that the ledger lives and does not have it, or not yet: no reason to leave it in peace.
        """
        began = self.clock()
        try:
            await sink.send(tenant_id, content)
        except Unanswered:
            self.late(began)
            if not await self._look(sink, tenant_id, content):
                raise
        except Refusal:
            self.in_time(began)
            raise
        else:
            self.in_time(began)

    async def _look(self, sink: Sink, tenant_id: str, content: bytes) -> bool:
        """Ask whether a receipt has arrived; one at a time, for those before it are still being worked off there."""
        came = self.clock()
        async with self.looking:
            if self.unanswered_at > came:       # who looked meanwhile got no answer, and nor would this one
                raise Outage("the ledger answers in time neither what it is sent nor what it is asked")
            try:
                return await sink.holds(tenant_id, content)
            except Outage:
                self.unanswered_at = self.clock()
                raise

    def in_time(self, began: float) -> None:
        """Note an answer: a round of them that came soon is worth a wire more."""
        if self.clock() - began < SOON_SHARE * self.pace.timeout_seconds:
            self.limit = min(self.limit + 1 / self.limit, float(self.pace.most))

    def late(self, began: float) -> None:
        """Note a call that was not answered in time: half as many from now on; once for all that were on the way."""
        if began > self.cut_at:
            self.limit, self.cut_at = max(self.limit / 2, 1.0), self.clock()


def same_receipt(ours: bytes, theirs: Any, unlike: set[str]) -> bool:
    """Whether a ledger has a receipt just as it was sent, but for what a ledger says itself."""
    sent = json.loads(ours)
    return isinstance(theirs, dict) and all(theirs.get(name) == value for name, value in sent.items()
                                            if name not in unlike)
