"""Changes of state that have no receipt, for those who follow them while they happen.

They are told once and kept nowhere: whoever was away reads the task.  A process tells the others about them only
while one of those says that somebody follows there, so nobody pays for what nobody watches.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from asyncgate.parts.model import queries, wire
from asyncgate.parts.model.news import Change, News
from asyncgate.parts.process.kit import Bounded
from asyncgate.parts.process.readers import Wants, resolve

MOST_KEPT = 200             # changes that wait for one follower; of more it learns the number
MOST_SPREAD = 50              # changes of one batch that other processes are told about
AT_ONCE = 5                 # of them in one News: it must fit into what a database passes on
ANNOUNCE_SECONDS, FORGET_SECONDS = 5.0, 15.0    # how often a process says that it follows, and how long that holds
SEEN_SECONDS = 30.0         # between two changes that say that a worker was seen
LEFT_OUT = "left_out"


class Follower:
    """One who follows: the changes that wait for it, and a call when there are some."""

    def __init__(self, wants: Wants, sees_all: bool) -> None:
        self.wants, self.sees_all = wants, sees_all
        self.kept: deque[Change] = deque()
        self.left_out = 0
        self.call: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def offer(self, change: Change) -> None:
        """Keep a change that this follower may see."""
        if not self._fits(change):
            return
        if change.change == LEFT_OUT or len(self.kept) >= MOST_KEPT:
            self.left_out += change.number if change.change == LEFT_OUT else 1
        else:
            self.kept.append(change)
        resolve(self.call)

    def _fits(self, change: Change) -> bool:
        if not change.task_id:      # of workers, of pauses, or of all owners together
            return self.sees_all
        return self.wants.task_id in (None, change.task_id) and queries.wanted_is(self.wants.to,
                                                                                  wire.Principal(*change.owner))

    def take(self) -> list[Change]:
        """Return what waits, at the end of it how many are left out."""
        changes, number = [*self.kept], self.left_out
        self.kept.clear()
        self.left_out, self.call = 0, asyncio.get_running_loop().create_future()
        return [*changes, Change(LEFT_OUT, changes[-1].at if changes else 0.0, number=number)] if number else changes


class Followers:
    """All who follow in this process, by tenant, and the tenants that are followed in other ones."""

    def __init__(self, tell: Callable[[News], None] | None, clock: Callable[[], float]) -> None:
        self.tell, self.clock = tell, clock
        self.here: defaultdict[str, dict[Follower, None]] = defaultdict(dict)
        self.elsewhere: dict[str, float] = {}       # until when
        self.announced: dict[str, float] = {}
        self.seen: Bounded[tuple[str, wire.Principal], float] = Bounded()

    def join(self, tenant_id: str, follower: Follower) -> None:
        """Tell a follower of a tenant's changes from now on."""
        self.here[tenant_id][follower] = None
        self.announce(tenant_id)

    def leave(self, tenant_id: str, follower: Follower) -> None:
        """Tell a follower nothing any more."""
        self.here[tenant_id].pop(follower, None)
        if not self.here[tenant_id]:
            del self.here[tenant_id]
            self.announced.pop(tenant_id, None)

    def announce(self, tenant_id: str) -> None:
        """Say to the other processes, now and then, that somebody follows here."""
        now = self.clock()
        if self.tell is not None and now - self.announced.get(tenant_id, -ANNOUNCE_SECONDS) >= ANNOUNCE_SECONDS:
            self.announced[tenant_id] = now
            self.tell(News(tenant_id, followed=True))

    def hear(self, news: News) -> None:
        """Learn who follows elsewhere, and what has changed there."""
        if news.followed:
            self.elsewhere[news.tenant_id] = self.clock() + FORGET_SECONDS
        self._offer(news.tenant_id, news.changes)

    def is_followed(self, tenant_id: str) -> bool:
        """Whether somebody follows a tenant's changes, here or elsewhere."""
        return tenant_id in self.here or self._is_followed_elsewhere(tenant_id)

    def is_anybody_there(self) -> bool:
        """Whether somebody follows anything."""
        return bool(self.here) or any(map(self._is_followed_elsewhere, list(self.elsewhere)))

    def _is_followed_elsewhere(self, tenant_id: str) -> bool:
        if self.elsewhere.get(tenant_id, 0.0) > self.clock():
            return True
        self.elsewhere.pop(tenant_id, None)
        return False

    def spread(self, tenant_id: str, changes: list[Change]) -> None:
        """Tell changes to those who follow here, and to the processes where somebody does."""
        self._offer(tenant_id, changes)
        if self.tell is None or not self._is_followed_elsewhere(tenant_id):
            return
        told, more = changes[:MOST_SPREAD], len(changes) - MOST_SPREAD
        if more > 0:
            told.append(Change(LEFT_OUT, changes[-1].at, number=more))
        for first in range(0, len(told), AT_ONCE):
            self.tell(News(tenant_id, changes=tuple(told[first:first + AT_ONCE])))

    def _offer(self, tenant_id: str, changes: Iterable[Change]) -> None:
        for follower in tuple(self.here.get(tenant_id, ())):
            for change in changes:
                follower.offer(change)

    def see(self, tenant_id: str, worker: wire.Principal, now: float) -> None:
        """Tell that a worker has asked for tasks, unless that was told a moment ago."""
        key = tenant_id, worker
        if now - self.seen.get(key, -SEEN_SECONDS) < SEEN_SECONDS:
            return
        self.seen.put(key, now)
        self.spread(tenant_id, [Change("worker.seen", now, worker=(worker.kind, worker.id, worker.instance_id or ""))])
