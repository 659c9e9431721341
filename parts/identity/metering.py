"""Metering: what each tenant uses, exact by construction (spec 21.6.4).

**Counting.**  Each batch adds to one row of `meters`, in its own transaction and in the statement that saves it: tasks
that it created, and by how much live leases and stored bytes have changed (`measure_use`).  A change at the time t
is kept together with change × t.  So the use of a time that ends at T, ∫ level dt, is level before × length + Σ change
× (T - t): sums of sums, in whole numbers.  Nothing is read for it, no order matters, and each batch of a process has a
row of its own (`slot`), so nobody waits.  Every lease and every byte is thus counted for as long as it lasts, also
across the marks, without a write at them.

**Closing.**  Every five minutes one process of many takes the rows of the past away, and writes what they say into a
`usage_event`: one transaction, so nothing is lost and nothing comes twice, wherever a process dies.  A row that comes
late, from a batch that began before the mark and was committed long after it, is part of the next event; the sum
stays.  Five minutes in which nothing changed have no row, and no event of their own: one event tells of all of them up
to the next change, or up to midnight (UTC).  Its use is evenly spread.

**Calls** are counted in memory and added to a meter each minute, so a process that dies takes the calls of its last
minute along.  A call is counted once at most.

What else happens: a rebuilt or copied task is not created again, and costs no more than its storage.  A copy takes
meters and events along.  A receipt in the archive, or at another ledger, is not stored here.  A lease is counted until
its end is committed, so also while no gate serves, because it is prolonged by that time.
"""

from __future__ import annotations

import logging
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from asyncgate import Caller, Engine, Extension, Work
from asyncgate.parts.identity.notices import read_rows
from asyncgate.parts.model import errors, queries, stored, wire
from asyncgate.parts.model.counted import PERIOD_SECONDS, write_period
from asyncgate.parts.model.ids import first_id

if TYPE_CHECKING:
    from asyncgate import Operation

log = logging.getLogger("asyncgate")

SETTLE_SECONDS = 10         # after a mark, for batches that began before it
DAY_SECONDS = 86_400
MOST_EVENTS = 300           # that one transaction writes; a day has 288
CALLS_SECONDS = 60.0        # between two times that calls are stored: what a crash may lose
USAGE_EVENTS = uuid.UUID("5d2f0c1a-9d0b-4c38-8b7e-5f9e2f0f7a11")       # the namespace of their ids


# Calls.


class CallMeter(Extension):
    """Counts the calls of each tenant that were carried out; a refused call is not counted."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.counted: defaultdict[str, dict[str, int]] = defaultdict(dict)      # by tenant and kind

    async def after_call(self, op: Operation, caller: Caller, ask: wire.Ask, reply: Any) -> None:
        """Count a call; one that needs no credential belongs to nobody."""
        if not op.open:
            calls = self.counted[caller.tenant_id]
            kind = "heartbeats" if op.heartbeat else "writes" if op.kind == "W" else "reads"
            calls[kind] = calls.get(kind, 0) + 1

    async def store(self) -> int:
        """Store what was counted since the last time; return of how many tenants.

        What a refused transaction did not store is kept for the next time.  If nobody knows whether it was committed,
        it is dropped: no call is counted twice.
        """
        stored = 0
        while self.counted:
            tenant_id, calls = self.counted.popitem()
            try:
                await self.engine.change(tenant_id, partial(Work.count_calls, calls=calls))
            except errors.GateError as refusal:
                if refusal.more.get("outcome") != "unknown":
                    again = self.counted[tenant_id]
                    again.update({kind: number + again.get(kind, 0) for kind, number in calls.items()})
                raise
            stored += 1
        return stored


# Closing.


class Closer:
    """Writes usage events, for all tenants in turn."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.pruned = engine, 0

    async def run(self) -> int:
        """Close what is over of all tenants; return how many events were written."""
        if not await self.engine.leads("usage"):
            return 0        # another process does
        now, closed = self.engine.backend.now(), 0
        until = floor_to(now - SETTLE_SECONDS, PERIOD_SECONDS)
        for tenant_id in await self.engine.backend.tenants():
            closed += await self.close(tenant_id, until)
        if self.pruned != (today := floor_to(now, DAY_SECONDS)):
            for tenant_id in await self.engine.backend.tenants():
                await self._prune(tenant_id, today)
            self.pruned = today
        return closed

    async def close(self, tenant_id: str, until: int) -> int:
        """Close what is over of a tenant; return how many events were written."""
        written, more = 0, True
        while more:
            head = await self.engine.backend.record(tenant_id, stored.UsageHead)
            meters = [row async for row in read_rows(self.engine, tenant_id, stored.Meter) if begin_of(row) < until]
            if not meters and (head is None or not is_used(head) or head.until >= floor_to(until, DAY_SECONDS)):
                break
            done, more = await self.close_meters(tenant_id, [stored.key_of(meter) for meter in meters], until)
            written += done
        return written

    async def close_meters(self, tenant_id: str, keys: list[tuple[str, ...]], until: int) -> tuple[int, bool]:
        """Write events for what is over; return how many, and whether there are more.

        The turn of the head lets two processes close one after another.
        """
        rows = ((stored.Meter, key) for key in keys)
        return await self.engine.change(tenant_id, partial(close_periods, keys, until), (stored.UsageHead, ()), *rows)

    async def _prune(self, tenant_id: str, today: int) -> None:
        """Drop the events that are too old."""
        since = today - self.engine.settings.usage_retention_days * DAY_SECONDS

        def drop(work: Work) -> None:
            for row in old:
                work.drop_record(stored.UsageEvent, row.period)
        while old := [row for row in await self.engine.backend.page(tenant_id, queries.Rows(stored.UsageEvent))
                      if row.ends <= since]:
            await self.engine.change(tenant_id, drop)


def close_periods(keys: list[tuple[str, ...]], until: int, work: Work) -> tuple[int, bool]:
    """Write events for what is over until a time; return how many, and whether there are more."""
    meters = [meter for key in keys if (meter := work.find_record(stored.Meter, *key)) is not None]
    head = work.find_record(stored.UsageHead)
    if head is None and not meters:
        return 0, False
    book = Book(work.tenant_id, head, meters)
    for event in book.close(until, floor_to(until, DAY_SECONDS)):
        work.keep_record(event)
    for meter in book.taken:
        work.drop_record(stored.Meter, *stored.key_of(meter))
    if book.head != head:
        work.keep_record(book.head)
    return book.written, book.written >= MOST_EVENTS


class Book:
    """Makes events of meters; it reads and writes no database."""

    def __init__(self, tenant_id: str, head: stored.UsageHead | None, meters: Iterable[stored.Meter]) -> None:
        self.tenant_id, self.written, self.taken = tenant_id, 0, list[stored.Meter]()
        self.head = head or stored.UsageHead(min(map(begin_of, meters)))
        self.by_period: defaultdict[int, list[stored.Meter]] = defaultdict(list)
        for meter in meters:      # a late one belongs to the first time that has no event yet
            self.by_period[max(begin_of(meter), self.head.until)].append(meter)

    def close(self, until: int, idle_until: int, now: float = inf) -> Iterator[stored.UsageEvent]:
        """Yield an event for each five minutes that have meters, and the even times before and between them.

        The even time at the end is closed up to `idle_until` only.  A time that is still open ends `now`.
        """
        for begins in sorted(begins for begins in self.by_period if begins < until):
            yield from self._pass(begins, inf)
            if self.written >= MOST_EVENTS and now == inf:
                return
            taken = self.by_period[begins]
            yield self._write(int(min(begins + PERIOD_SECONDS, now)), taken)
            self.taken += taken
        yield from self._pass(idle_until, now)

    def _pass(self, until: int, now: float) -> Iterator[stored.UsageEvent]:
        """Yield events for a time in which nothing changes, one for each day; of a tenant that has nothing, none."""
        while is_used(self.head) and (begins := self.head.until) < (until := int(min(until, now))):
            yield self._write(min(until, floor_to(begins, DAY_SECONDS) + DAY_SECONDS), [])
        if until > self.head.until:
            self.head = replace(self.head, until=until)

    def _write(self, ends: int, meters: list[stored.Meter]) -> stored.UsageEvent:
        """Make the next event, and move the head to its end."""
        head, begins = self.head, self.head.until
        self.written += 1
        self.head = stored.UsageHead(
            ends, head.leases + sum(meter.leases for meter in meters),
            head.receipt_bytes + sum(meter.receipt_bytes for meter in meters),
            head.payload_bytes + sum(meter.payload_bytes for meter in meters))
        length = ends - begins
        lease_ms, receipts, payloads = head.leases * length * 1000, head.receipt_bytes * length, (
            head.payload_bytes * length)
        for meter in meters:
            left = ends - begin_of(meter)
            lease_ms += meter.leases * left * 1000 - meter.lease_ms
            receipts += meter.receipt_bytes * left - meter.receipt_moments
            payloads += meter.payload_bytes * left - meter.payload_moments
        return stored.UsageEvent(
            write_period(begins // PERIOD_SECONDS), derive_event_id(self.tenant_id, begins, ends), begins, ends,
            sum(meter.tasks for meter in meters), lease_ms, receipts, payloads,
            sum(meter.reads for meter in meters), sum(meter.writes for meter in meters),
            sum(meter.heartbeats for meter in meters))


def derive_event_id(tenant_id: str, begins: int, ends: int) -> str:
    """Return the id of a usage event: the same whenever it is made, and in the order of time (a UUIDv7)."""
    noise = uuid.uuid5(USAGE_EVENTS, f"{tenant_id} {begins} {ends}").hex
    return f"{first_id(begins)}{noise[:3]}-8{noise[3:6]}-{noise[6:18]}"


def begin_of(meter: stored.Meter) -> int:
    """Return when the five minutes of a meter began."""
    return int(meter.period) * PERIOD_SECONDS


def is_used(head: stored.UsageHead) -> bool:
    """Whether time alone adds to a tenant's usage."""
    return bool(head.leases or head.receipt_bytes or head.payload_bytes)


def floor_to(moment: float, seconds: int) -> int:
    """Return the last mark before a moment."""
    return int(moment // seconds) * seconds
