"""Counts what a gate does: an extension of its engine, and what its faces tell about each call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from asyncgate import Engine, Extension, Needs, Refused, Transact, Work
from asyncgate.parts.metrics.numbers import OTHER, Buckets, Numbers
from asyncgate.parts.model import errors, stored, stored_webhooks
from asyncgate.parts.model.counted import find_wait

if TYPE_CHECKING:
    from asyncgate.parts.model import stored

TICK_SECONDS = 0.5          # between two looks at how late the event loop is
LOOK_TICKS = 30             # between two looks at queues, leases and the outbox: a scrape reads no database
CLAIMS = {"lease_next": "tasks", "offer_task": ""}      # claims, and where their reply has the tasks
CLASSES = {number: f"{number}xx" for number in range(1, 6)}


class Metrics(Extension):
    """Counts calls, batches, and what was committed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.numbers = Numbers(engine.settings.metrics.most_types)
        stages = self.numbers.stages        # those of every batch are looked up once
        self.load, self.decide, self.commit = stages["load",], stages["decide",], stages["commit",]
        self.sizes: Buckets = self.numbers.sizes[()]
        self.looks: list[Callable[[], Awaitable[object]]] = []      # what extras look at with it, now and then
        self.depths: list[stored.Depth] = []       # of the queues, when they were last looked at
        self.overdue: int | None = None     # live leases that had expired then
        self.looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Metrics:
        self.looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.looking is not None:
            self.looking.cancel()
            await asyncio.gather(self.looking, return_exceptions=True)

    async def _look(self) -> None:
        """Measure how late this loop wakes, and now and then how much waits."""
        loop, ticks = asyncio.get_running_loop(), 0
        while True:
            if ticks % LOOK_TICKS == 0:
                with contextlib.suppress(errors.GateError):        # the database is away; the last numbers stay
                    await self.look_at_queues()
            due, ticks = loop.time() + TICK_SECONDS, ticks + 1
            await asyncio.sleep(TICK_SECONDS)
            self.numbers.lateness[()].add(max(loop.time() - due, 0.0))

    async def look_at_queues(self) -> None:
        """Read how much waits for workers, and which leases wait for the sweep; then have the extras look."""
        backend, grace = self.engine.backend, self.engine.settings.lease_grace_seconds
        now = backend.now()
        self.depths, self.overdue = await backend.depths(now), await backend.count_overdue(now - grace)
        for look in self.looks:
            await look()

    # What the faces tell.

    def note_call(self, face: str, operation: str, begun: float, reply: Any, refusal: errors.GateError | None) -> None:
        """Count a call of an operation, with its time, its refusal, and what a claim has found."""
        numbers, seconds = self.numbers, perf_counter() - begun
        numbers.requests[face, operation, "2xx" if refusal is None else CLASSES[refusal.status // 100]] += 1
        numbers.durations[operation,].add(seconds)
        if refusal is not None:
            refusal.counted = True
            numbers.refusals[operation, refusal.code] += 1
        if (tasks := CLAIMS.get(operation)) is not None:
            offers = getattr(reply, tasks) if tasks and reply is not None else reply
            result = "refused" if refusal else "leased" if offers else "empty"
            numbers.claims[result,] += 1
            numbers.claim_durations[result,].add(seconds)

    def note_refusal(self, face: str, refusal: errors.GateError) -> None:
        """Count a request that was refused before its operation was known."""
        if not refusal.counted:
            refusal.counted = True
            self.numbers.requests[face, OTHER, CLASSES[refusal.status // 100]] += 1
            self.numbers.refusals[OTHER, refusal.code] += 1

    # What the engine tells.

    def wrap_transact(self, transact: Transact) -> Transact:
        """Measure each batch: how long its rows take to load, its operations to decide, its changes to be committed."""
        async def measure(tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
            times = Times(decide)
            try:
                await transact(tenant_id, needs, times.decide)
            except Exception as error:
                self.numbers.database_errors[kind_of(error),] += 1
                raise
            self.sizes.add(needs.calls)
            self.load.add(times.decided_first - times.begun)
            self.decide.add(times.deciding)
            self.commit.add(perf_counter() - times.decided_last)
        return measure

    def after_commit(self, work: Work) -> None:
        """Count what a batch has changed."""
        numbers, label = self.numbers, self.numbers.types.label
        for task in work.added.values():
            numbers.created[label(task.type)] += 1
        for task in work.moved.values():
            if task.completed_at == work.now and task.status in stored.TERMINAL:
                numbers.ended[*label(task.type), task.status] += 1
        for lease in work.leased.values():
            self._note_lease(work, lease)
        for receipt in work.written.values():
            numbers.receipts[receipt.receipt_type,] += 1
        if work.posted:
            numbers.posted[()] += len(work.posted)
        for line in work.audited.values():
            numbers.audited[line.severity,] += 1
        for row in work.kept.values():
            if type(row) is stored_webhooks.WebhookDelivery:
                if row.state != "waiting" or row.tries:
                    self.numbers.deliveries["failed" if row.state == "waiting" else row.state,] += 1
                if row.state == "delivered" and row.last_at is not None:
                    self.numbers.delays[()].add(max(row.last_at - row.first_at, 0.0))

    def _note_lease(self, work: Work, lease: stored.Lease) -> None:
        """Count a lease that was granted or has ended; a renewed one is neither."""
        numbers, task = self.numbers, work.tasks[lease.task_id]
        label = numbers.types.label(task.type)
        if lease.ending != "live":
            numbers.leases_ended[*label, lease.ending] += 1
            numbers.holds[label].add(max(work.now - lease.acquired_at, 0.0))
            if task.held is not None and task.held not in stored.AWAITING:      # that needs no look
                numbers.held[label] += 1
        elif lease.acquired_at == work.now:
            numbers.granted[label] += 1
            numbers.leases_ended.setdefault((*label, "expired"), 0)     # so that alerts see the first one; see Numbers
            numbers.held.setdefault(label, 0)
            if (wait := find_wait(lease, task, work.now)) is not None:
                numbers.waits[label].add(wait)


class Times:
    """When a batch began, and when it was decided; one that is decided again counts all of its decisions."""

    __slots__ = ("begun", "decided_first", "decided_last", "deciding", "run")

    def __init__(self, run: Callable[[Work], None]) -> None:
        self.run, self.deciding = run, 0.0
        self.begun = self.decided_last = perf_counter()
        self.decided_first = 0.0

    def decide(self, work: Work) -> None:
        """Decide the batch, and measure that."""
        since = perf_counter()
        self.decided_first = self.decided_first or since
        self.run(work)
        self.decided_last = perf_counter()
        self.deciding += self.decided_last - since


def kind_of(error: Exception) -> str:
    """Return what became of a batch that was not committed."""
    if isinstance(error, Refused):
        return "refused"
    sure = isinstance(error, errors.GateError) and error.more.get("outcome") != "unknown"
    return "unavailable" if sure and isinstance(error, errors.DatabaseUnavailable) else "refused" if sure else "unknown"
