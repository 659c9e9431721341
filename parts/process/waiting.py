"""The claims that wait for work.  A waiting claim costs no database connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from asyncgate.parts.model import errors, stored, wire
from asyncgate.parts.model.content import needs_of
from asyncgate.parts.model.news import News
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.views import to_raw
from asyncgate.parts.process.readers import resolve

log = logging.getLogger("asyncgate")

Wanted = tuple[str, frozenset[str]]     # the type of a task, and the capabilities that it needs
Matches = Callable[[str, frozenset[str], wire.LeaseNext], bool]


class Asked(Protocol):
    """The engine whose claims wait."""

    settings: Settings
    backend: Any
    longest_wait: float

    async def wait_for_call(self, call: asyncio.Future[None], until: float) -> bool:
        """Wait for a call until a time of the loop's clock."""


class Place:
    """A waiting claim's place in the queue of its tenant."""

    def __init__(self, engine: Asked, ask: wire.LeaseNext, worker_id: str) -> None:
        self.engine, self.ask, self.worker_id = engine, ask, worker_id
        self.call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls: list[Wanted | None] = []      # for what it was called
        self.spent: list[Wanted | None] = []      # and for what it has set out, and may leave untouched

    async def wait_for_call(self, until: float) -> bool:
        """Wait for a call; return whether it came in time."""
        if not await self.engine.wait_for_call(self.call, until):
            return False
        self.call, self.spent, self.calls = asyncio.get_running_loop().create_future(), self.calls, []
        return True

    def leave_rest(self, offers: list[wire.Offer]) -> None:
        """Leave to others what this place was called for, if its claim got something else instead."""
        kinds = [kind for kind in self.spent if kind is not None] if offers else []
        if kinds:
            got = {(offer.type, needs_of(offer.requirements)) for offer in offers}
            self.calls += [kind for kind in kinds if kind not in got]

    def wake(self, kind: Wanted | None) -> None:
        """Call this place for a task of a kind, or for whatever there may be."""
        self.calls.append(kind)
        resolve(self.call)


class Waiting:
    """The claims that wait for work; a waiting claim costs no database connection."""

    def __init__(self, engine: Asked, matches: Matches) -> None:
        self.engine, self.matches = engine, matches
        self.places: defaultdict[str, dict[Place, None]] = defaultdict(dict)    # first come, first served
        self.timers: dict[str, tuple[float, asyncio.TimerHandle]] = {}
        self.checks: set[asyncio.Task[None]] = set()
        self.resting: dict[str, frozenset[str]] = {}        # workers that get nothing, so that others are called
        self.count = 0

    @contextlib.contextmanager
    def take_place(self, tenant_id: str, ask: wire.LeaseNext, worker_id: str) -> Iterator[Place]:
        """Take a place in the tenant's queue; when it is left, its unused calls go to the next that match."""
        if self.count >= self.engine.settings.max_waiting_claims:
            raise errors.TooManyWaiting(f"{self.count} claims are waiting already; claim without wait_seconds",
                                        retry_after=1)
        place, queue = Place(self.engine, ask, worker_id), self.places[tenant_id]
        queue[place] = None
        self.count += 1
        if len(queue) == 1:     # from now on the timer is kept: every task that is delayed from here on is offered
            self._plan_timer(tenant_id)
        try:
            yield place
        except BaseException:       # it was called and could not come
            place.calls += place.spent
            raise
        finally:
            self.count -= 1
            del queue[place]
            for kind in place.calls:
                self._wake_places(tenant_id, kind)
            if not queue:
                del self.places[tenant_id]
                if timer := self.timers.pop(tenant_id, None):
                    timer[1].cancel()

    def offer_task(self, tenant_id: str, task: stored.Task, now: float) -> None:
        """Call the first waiting claim that a queued task fits, now or when its time comes."""
        if not self.places.get(tenant_id) or task.held:
            return
        if task.next_eligible_at is None or task.next_eligible_at <= now:
            self._wake_places(tenant_id, (task.type, needs_of(to_raw(task.requirements))))
        else:
            self.wake_at(tenant_id, task.next_eligible_at, now)

    def hear_news(self, news: News) -> None:
        """Call waiting claims for what another process has queued."""
        if not self.places.get(news.tenant_id):
            return
        for type, needed in news.queued if not news.many else ():
            self._wake_places(news.tenant_id, (type, frozenset(needed)))
        if news.many or news.pauses:
            self.wake_tenant(news.tenant_id)
        if news.due is not None:
            self.wake_at(news.tenant_id, news.due, self.engine.backend.now())

    def wake_tenant(self, tenant_id: str) -> None:
        """Call every waiting claim of a tenant."""
        self._wake_places(tenant_id, None)

    def wake_kind(self, tenant_id: str, kind: Wanted) -> None:
        """Call the first waiting claim that tasks of a kind fit."""
        self._wake_places(tenant_id, kind)

    def _wake_places(self, tenant_id: str, kind: Wanted | None) -> None:
        resting = self.resting.get(tenant_id, ())
        for place in self.places.get(tenant_id, ()):
            if kind is None:
                place.wake(kind)
            elif not place.calls and place.worker_id not in resting and self.matches(*kind, place.ask):
                return place.wake(kind)

    def let_rest(self, tenant_id: str, workers: frozenset[str]) -> None:
        """Call these workers for no single task from now on; what they were called for goes to others."""
        if workers == self.resting.get(tenant_id, frozenset()):
            return
        self.resting.pop(tenant_id, None) if not workers else self.resting.__setitem__(tenant_id, workers)
        for place in list(self.places.get(tenant_id, ())):
            if place.worker_id in workers:
                calls, place.calls, place.spent = place.calls + place.spent, [], []
                for kind in calls:
                    self._wake_places(tenant_id, kind)

    def wake_at(self, tenant_id: str, due: float, now: float) -> None:
        """Call every waiting claim of a tenant when its next delayed task is due; a tenant has one timer."""
        if tenant_id in self.timers:
            if self.timers[tenant_id][0] <= due:
                return
            self.timers[tenant_id][1].cancel()
        loop = asyncio.get_running_loop()
        self.timers[tenant_id] = due, loop.call_later(max(due - now, 0.0) + 0.002, self._wake_due, tenant_id)

    def _wake_due(self, tenant_id: str) -> None:
        self.timers.pop(tenant_id, None)
        self._wake_places(tenant_id, None)
        self._plan_timer(tenant_id)

    def _plan_timer(self, tenant_id: str) -> None:
        """Find out when the tenant's next delayed task is due, unless that is known."""
        if tenant_id not in self.timers and self.places.get(tenant_id) and self.engine.longest_wait:
            check = asyncio.get_running_loop().create_task(self._look_ahead(tenant_id))
            self.checks.add(check)
            check.add_done_callback(self.checks.discard)

    async def _look_ahead(self, tenant_id: str) -> None:
        try:
            due = await self.engine.backend.next_due(tenant_id)
        except Exception:
            return log.exception("cannot tell when the next delayed task is due")
        if due is not None and self.places.get(tenant_id):
            self.wake_at(tenant_id, due, self.engine.backend.now())

    def wake_all(self) -> None:
        """Call every waiting claim."""
        for tenant_id in list(self.places):
            self._wake_places(tenant_id, None)
