"""The heartbeat of a process: for how long it has not served, whatever the reason."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from math import inf
from typing import Any

from asyncgate.parts.model import errors
from asyncgate.parts.model.clock import elapsed

BEAT_SECONDS = 0.5
SILENT_SECONDS = 2.0        # a gap in the heartbeat from which on nobody was served


class Silence(Exception):
    """Nobody was served for a while, so nothing may be decided before leases have got that time back."""


class Heartbeat:
    """Beats while this process runs and its database answers: a gap means that it was frozen, asleep or cut off."""

    def __init__(self, clock: Callable[[], float] = elapsed) -> None:
        self.clock = clock
        self.resume()

    def resume(self) -> None:
        """Begin anew: nothing has been missed, or everything that was missed has been made good."""
        self.at = self.proven_at = self.clock()
        self.failing = False

    def beat(self) -> None:
        """Note that this process runs; it does not serve while its database fails."""
        if not self.failing and not self.measure():
            self.at = self.clock()

    def note_commit(self) -> None:
        """Note that the database works."""
        self.proven_at, self.failing = self.clock(), False

    def note_failure(self, begun: float) -> None:
        """Note that the database did not answer what began then."""
        self.at, self.failing = min(self.at, max(begun, self.proven_at)), True

    def measure(self) -> float:
        """Return for how many seconds nobody has been served; 0 if the heart beats."""
        passed = self.clock() - self.at
        return passed if passed > SILENT_SECONDS else 0.0

    def require(self, begun: float) -> None:
        """Refuse to decide what began then, after a gap, or if it waited as long for the database; raises Silence."""
        if self.clock() - max(begun, self.proven_at) > SILENT_SECONDS:
            self.note_failure(begun)
        if self.measure():
            raise Silence

    def guard(self, transact: Callable[..., Awaitable[None]],
              recover: Callable[[], Awaitable[None]]) -> Callable[..., Coroutine[Any, Any, None]]:
        """Return a `transact` that decides no batch between a gap and its `recover`, and notes how each ends."""
        async def serve(tenant_id: str, needs: Any, decide: Callable[[Any], None]) -> None:
            begun = self.clock()
            while True:
                if self.measure():
                    await recover()
                try:
                    await transact(tenant_id, needs, partial(self._decide_in_time, decide, begun))
                except Silence:
                    begun = inf         # only once, or a batch that waits long for a lock would never be decided
                except Exception as error:
                    if isinstance(error, errors.DatabaseUnavailable) or not isinstance(error, errors.GateError
                                                                                       | errors.Refused):
                        self.note_failure(begun)
                    raise
                else:
                    return self.note_commit()
        return serve

    def _decide_in_time(self, decide: Callable[[Any], None], begun: float, work: Any) -> None:
        self.require(begun)
        decide(work)
