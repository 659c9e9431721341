"""Batches of several tenants that share a transaction: a commit costs more than what most of them have to store.

While GROUPS are under way, batches wait, and leave together.  Each has its own wall.  If a group fails, or waits for a
lock for long, each of its batches is carried out again by itself, so that it is the only one that its problem harms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from asyncgate import Needs, Work
from asyncgate.parts.model import stored

GROUPS = 2          # that run at once
GROUP_CALLS = 64     # of a group
MOST_SHARING = 16   # calls of a batch that goes with others


class Search:
    """A batch's search for claimable tasks: what it found, and how long the database took."""

    def __init__(self) -> None:
        self.tasks, self.seconds = list[stored.Task](), 0.0
        self.forgotten = 0      # how often the cache had been emptied when it began


class Flight:
    """A batch on its way."""

    def __init__(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        self.tenant_id, self.needs, self.decide = tenant_id, needs, decide
        self.landed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.problem: Exception | None = None       # why it has to go alone
        self.search = Search()

    def may_share(self) -> bool:
        """Whether it may go with others: none that takes long, or that waits until all others are done."""
        return not self.needs.alone and self.needs.calls <= MOST_SHARING


class Groups:
    """The batches that share transactions, or wait for one."""

    def __init__(self, run: Callable[[list[Flight]], Awaitable[None]], most: int) -> None:
        self.run, self.most = run, min(most, GROUPS)
        self.waiting: list[Flight] = []
        self.under_way: dict[asyncio.Task[None], list[Flight]] = {}

    async def carry(self, flight: Flight) -> Exception | None:
        """Carry a batch out; return why it has to go alone."""
        self.waiting.append(flight)
        if len(self.waiting) == 1:      # not at once: what else arrives in this tick shares the commit
            asyncio.get_running_loop().call_soon(self._launch)
        try:
            return await flight.landed
        except asyncio.CancelledError:
            for task, flights in self.under_way.items():
                if flights == [flight]:
                    task.cancel()
            raise

    def _launch(self) -> None:
        while self.waiting and len(self.under_way) < self.most:
            group, later, calls = dict[str, Flight](), list[Flight](), 0
            for flight in self.waiting:
                if flight.tenant_id in group or calls + flight.needs.calls > GROUP_CALLS:
                    later.append(flight)        # of a tenant, a batch has to see what the one before it has stored
                elif not flight.landed.done():  # whoever asked may have gone
                    group[flight.tenant_id] = flight
                    calls += flight.needs.calls
            self.waiting = later
            if group:       # order: every group locks rows of its tenants in the same one
                flights = [group[tenant_id] for tenant_id in sorted(group)]
                task = asyncio.get_running_loop().create_task(self._run(flights))
                self.under_way[task] = flights
                task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        for flight in self.under_way.pop(task):
            flight.landed.cancel()      # if the task was: all others have landed
        self._launch()

    async def _run(self, flights: list[Flight]) -> None:
        try:
            await self.run(flights)
        except Exception as error:
            for flight in flights:
                if not flight.landed.done():
                    flight.landed.set_exception(error)
        else:
            for flight in flights:
                if not flight.landed.done():
                    flight.landed.set_result(flight.problem)
