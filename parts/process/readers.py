"""The reads that wait: for the end of a task, or for a receipt.  A waiting read costs no database connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

from msgspec import Struct

from asyncgate.parts.model import errors, queries, stored, wire
from asyncgate.parts.model.news import Announced, News

MOST_ANNOUNCED = 20         # receipts that one News names: it must fit into what a database passes on
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 2.0
Topic = tuple[str, str]     # what to be called for: the kind of the name, and the name


class Waits(Protocol):
    """A request that may wait."""

    @property
    def wait_seconds(self) -> float:
        """How long it waits at most."""


class Wants(Struct, frozen=True):
    """What a waiting read is called for: the end of some task, or a receipt that passes a filter."""

    ends: tuple[str, ...] = ()  # of tasks; or name_family of one: of its children
    to: wire.Principal | None = None         # None: everybody; of ANY_KIND: whoever has that id
    task_id: str | None = None
    types: frozenset[str] | None = None
    output_of: str | None = None            # a task: for further output of it, or its end

    @property
    def topics(self) -> list[Topic]:
        """Return the most selective topics that name all that is wanted."""
        if self.ends:
            return [("end", task_id) for task_id in self.ends]
        if self.output_of is not None:
            return [("output", self.output_of)]
        if self.task_id is not None:
            return [("task", self.task_id)]
        return [("to", self.to.id) if self.to is not None else ("all", "")]

    def fits(self, receipt: stored.Receipt) -> bool:
        """Whether a receipt passes the filter."""
        return (queries.wanted_is(self.to, receipt.to) and self.task_id in (None, receipt.task_id)
                and (self.types is None or receipt.receipt_type in self.types))

    def may_fit(self, to_id: str, receipt_type: str, task_id: str) -> bool:
        """Whether a receipt of which another process tells may pass the filter; an empty text tells nothing."""
        return ((self.to is None or to_id in ("", self.to.id))
                and (self.task_id is None or task_id in ("", self.task_id))
                and (self.types is None or not receipt_type or receipt_type in self.types))


class Seat:
    """The place of one waiting read."""

    def __init__(self, wants: Wants) -> None:
        self.wants, self.loop = wants, asyncio.get_running_loop()
        self.call: asyncio.Future[None] = self.loop.create_future()
        self.looking = True         # until it has read and waits
        self.pause = LONGEST_PAUSE_SECONDS
        self.timer: asyncio.TimerHandle | None = None

    def begin_look(self) -> None:
        """Be ready for the next call; begin before reading, or what comes meanwhile would be missed."""
        self.looking = True
        if self.call.done():
            self.call = self.loop.create_future()

    def plan_look(self) -> asyncio.Future[None]:
        """Return the next call; after one in vain it comes soon, because an older transaction may hide new rows."""
        self.looking = False
        if self.pause < LONGEST_PAUSE_SECONDS and not self.call.done():
            self.stop()
            self.timer = self.loop.call_later(self.pause, resolve, self.call)
            self.pause *= 2
        return self.call

    def wake(self) -> None:
        """Call the read."""
        self.pause = FIRST_PAUSE_SECONDS
        resolve(self.call)

    def stop(self) -> None:
        """Cancel the planned look."""
        if self.timer is not None:
            self.timer.cancel()


Topics = dict[Topic, dict[Seat, None]]


class Readers:
    """All reads that wait in this process, by tenant and topic."""

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0
        self.seats: defaultdict[str, Topics] = defaultdict(dict)

    @contextlib.contextmanager
    def take_seat(self, tenant_id: str, wants: Wants) -> Iterator[Seat]:
        """Take a seat for a waiting read; raises TooManyWaiting if none is free."""
        if self.count >= self.most:
            raise errors.TooManyWaiting(
                f"{self.most} reads are waiting already, the most (max_waiting_readers); read without "
                "wait_seconds, or come back when one has been answered", retry_after=1)
        seat, topics = Seat(wants), self.seats[tenant_id]
        for topic in wants.topics:
            topics.setdefault(topic, {})[seat] = None
        self.count += 1
        try:
            yield seat
        finally:
            self.count -= 1
            seat.stop()
            for topic in wants.topics:
                del topics[topic][seat]
                if not topics[topic]:
                    del topics[topic]
            if not topics:
                self.seats.pop(tenant_id, None)

    def announce(self, tenant_id: str, changed: Collection[stored.Task], receipts: Iterable[stored.Receipt]) -> None:
        """Call the reads that wait for what a batch of this process has committed."""
        if not (topics := self.seats.get(tenant_id)):
            return
        self._wake_ends(topics, [*list_ended(changed), *map(name_family, list_families(changed))])
        for receipt in receipts:
            for topic in (("to", receipt.to_id), ("task", receipt.task_id), ("all", "")):
                for seat in topics.get(topic, ()):
                    if seat.wants.fits(receipt):
                        seat.wake()

    def hear(self, news: News) -> None:
        """Call the reads that wait for what another process has committed."""
        if not (topics := self.seats.get(news.tenant_id)):
            return
        self._wake_ends(topics, [*news.ended, *map(name_family, news.families)])
        self.announce_output(news.tenant_id, news.outputs)
        for seat in list_seats(topics) if news.receipts or news.many else ():
            if news.many or (not seat.wants.ends and seat.wants.output_of is None
                             and any(seat.wants.may_fit(*receipt) for receipt in news.receipts)):
                seat.wake()

    def wake_all(self) -> None:
        """Call every waiting read."""
        for seat in self.list_seats():
            seat.wake()

    def _wake_ends(self, topics: Topics, ended: Iterable[str]) -> None:
        for task_id in ended:
            for kind in ("end", "output"):
                for seat in topics.get((kind, task_id), ()):
                    seat.wake()

    def announce_output(self, tenant_id: str, tasks: Iterable[str]) -> None:
        """Call the reads that wait for the output of these tasks."""
        for task_id in tasks if tenant_id in self.seats else ():
            for seat in self.seats[tenant_id].get(("output", task_id), ()):
                seat.wake()

    def list_seats(self) -> list[Seat]:
        """Return the seats that are taken."""
        return [seat for topics in self.seats.values() for seat in list_seats(topics)]


def list_seats(topics: Topics) -> list[Seat]:
    """Return the seats of a tenant."""
    return list(dict.fromkeys(seat for seats in topics.values() for seat in seats))


def name_family(task_id: str) -> str:
    """Name the children of a task, of which one ends."""
    return f"children of {task_id}"


def list_ended(changed: Iterable[stored.Task]) -> list[str]:
    """Return those of the changed tasks that have ended."""
    return [task.task_id for task in changed if task.status in stored.TERMINAL]


def list_families(changed: Iterable[stored.Task]) -> list[str]:
    """Return the parents of those of the changed tasks that have ended."""
    return list(dict.fromkeys(task.parent_task_id for task in changed
                              if task.parent_task_id is not None and task.status in stored.TERMINAL))


def is_awaited(receipts: Iterable[stored.Receipt]) -> bool:
    """Whether somebody may wait for one of these receipts in its inbox; nobody does in that of a gate."""
    return any(receipt.to_kind != "asyncgate" for receipt in receipts)


def list_announced(receipts: Iterable[stored.Receipt]) -> tuple[Announced, ...]:
    """Return what to tell other processes about new receipts; the more there are, the less about each."""
    exact = {(receipt.to_id, receipt.receipt_type, receipt.task_id): None for receipt in receipts}
    if len(exact) <= MOST_ANNOUNCED:
        return tuple(exact)
    rough = dict.fromkeys((to_id, receipt_type, "") for to_id, receipt_type, _ in exact)
    return tuple(rough) if len(rough) <= MOST_ANNOUNCED else (("", "", ""),)


def resolve(future: asyncio.Future[None]) -> None:
    """Resolve a future, unless it is resolved already."""
    if not future.done():
        future.set_result(None)


async def wait_until(future: asyncio.Future[None], until: float) -> bool:
    """Wait for a future until a time of the loop's clock; tell whether it came."""
    left = until - asyncio.get_running_loop().time()
    return bool(left > 0 and (await asyncio.wait([future], timeout=left))[0])
