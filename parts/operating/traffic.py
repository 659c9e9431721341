"""What happened in each queue in the last minute and the last hour: counted beside the work, stored every half minute.

A process stores one row for each minute, with the numbers of all queues, so processes never write the same row.  A
process that dies takes at most the last half minute of its numbers along.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from functools import partial

import msgspec
from msgspec import UNSET, Struct, UnsetType

from asyncgate import Engine, Extension, Work
from asyncgate.parts.model import errors, queries, stored, wire_operating
from asyncgate.parts.model.walking import walk_rows

HOUR = 60           # minutes
STARTED, ENDED, FAILED, EXPIRED = range(4)
OUTCOMES = {"failed": FAILED, "expired": EXPIRED}
Numbers = dict[int, list[int]]      # by lane: leases granted, tasks ended, attempts failed, leases expired

write_numbers = msgspec.json.Encoder().encode
read_numbers = msgspec.json.Decoder(dict[int, tuple[int, int, int, int]]).decode


class TrafficCounter(Extension):
    """Counts what happens in each queue, in the memory of this process until it is stored."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.process = engine, secrets.token_hex(8)
        self.counted: defaultdict[str, dict[int, Numbers]] = defaultdict(dict)      # by tenant and minute
        self.unsaved: defaultdict[str, set[int]] = defaultdict(set)                 # minutes, by tenant
        self.pruned: dict[str, int] = {}        # by tenant, the minute in which old rows were dropped

    def after_commit(self, work: Work) -> None:
        """Count what a batch has changed."""
        for lease in work.leased.values():
            if lease.ending == "live":
                if lease.acquired_at == work.now:
                    self._count(work, lease.task_id, STARTED)
            elif (outcome := OUTCOMES.get(lease.ending)) is not None:
                self._count(work, lease.task_id, outcome)
        for task in work.moved.values():
            if task.completed_at == work.now and task.status in stored.TERMINAL:
                self._count(work, task.task_id, ENDED)

    def _count(self, work: Work, task_id: str, what: int) -> None:
        minute = int(work.now // 60)
        if (numbers := self.counted[work.tenant_id].get(minute)) is None:
            minutes = self.counted[work.tenant_id]
            for old in [other for other in minutes if other < minute - HOUR]:
                del minutes[old]
                self.unsaved[work.tenant_id].discard(old)
            numbers = minutes.setdefault(minute, {})
        lane = work.tasks[task_id].lane
        if lane not in numbers:
            numbers[lane] = [0, 0, 0, 0]
        numbers[lane][what] += 1
        self.unsaved[work.tenant_id].add(minute)

    def list_rows(self, tenant_id: str, minutes: Iterable[int]) -> list[stored.Traffic]:
        """Return what this process has counted in some minutes, as it is stored."""
        counted = self.counted.get(tenant_id, {})
        return [stored.Traffic(write_minute(minute), self.process, write_numbers(counted[minute]).decode())
                for minute in minutes if minute in counted]

    async def store(self) -> int:
        """Store what was counted since the last time; return how many rows."""
        now, stored = int(self.engine.backend.now() // 60), 0
        for tenant_id in [tenant for tenant, minutes in self.counted.items() if max(minutes, default=0) < now - HOUR]:
            del self.counted[tenant_id]
        for tenant_id, minutes in list(self.unsaved.items()):
            rows = self.list_rows(tenant_id, sorted(minutes))
            old = await self._find_old(tenant_id, now)
            del self.unsaved[tenant_id]
            try:
                await self.engine.change(tenant_id, partial(store_traffic, rows, old))
            except errors.GateError:
                self.unsaved[tenant_id] |= minutes
                raise
            stored += len(rows)
        return stored

    async def _find_old(self, tenant_id: str, now: int) -> list[stored.Traffic]:
        """Return rows that nobody asks for any more, once an hour."""
        if now < self.pruned.get(tenant_id, 0) + HOUR:
            return []
        self.pruned[tenant_id] = now
        return [row async for row in walk_rows(self.engine.backend, tenant_id, queries.Rows(stored.Traffic))
                if row.minute < write_minute(now - HOUR)]


def store_traffic(rows: list[stored.Traffic], old: list[stored.Traffic], work: Work) -> None:
    """Store what a process has counted, and drop old rows."""
    for row in rows:
        work.keep_record(row)
    for row in old:
        work.drop_record(stored.Traffic, row.minute, row.process)


def write_minute(minute: int) -> str:
    """Write the number of a minute so that it sorts."""
    return f"{minute:012d}"


class Flows(Struct):
    """What happened in the last minute and in the last hour."""

    minute: wire_operating.Flow
    hour: wire_operating.Flow
    by_minute: wire_operating.Series | UnsetType


async def read_flows(engine: Engine, tenant_id: str, lanes: set[int], now: float, minutes: int) -> dict[int, Flows]:
    """Return what happened in some queues; of other processes what they have stored, of this one all."""
    minute, share = int(now // 60), 1 - now % 60 / 60       # of the oldest minute that counts
    parts: dict[int, dict[str, list[float]]] = {lane: {"minute": [0.0] * 4, "hour": [0.0] * 4} for lane in lanes}
    series = {lane: wire_operating.Series(*([0] * minutes for _ in range(4))) for lane in lanes} if minutes else {}
    async for row in iterate_recent(engine, tenant_id, minute):
        age = minute - int(row.minute)
        weights = {"minute": 1.0 if age <= 0 else share if age == 1 else 0.0, "hour": share if age >= HOUR else 1.0}
        counted = read_numbers(row.counts)
        for lane in lanes & counted.keys():
            for span, weight in weights.items():
                parts[lane][span] = [have + weight * more
                                     for have, more in zip(parts[lane][span], counted[lane], strict=True)]
            if 0 <= age < minutes:
                counts = series[lane]
                for numbers, number in zip((counts.started, counts.ended, counts.failed, counts.expired), counted[lane],
                                           strict=True):
                    numbers[-1 - age] += number
    return {lane: Flows(wire_operating.Flow(*map(round, spans["minute"])),
                        wire_operating.Flow(*map(round, spans["hour"])), series.get(lane, UNSET))
            for lane, spans in parts.items()}


async def iterate_recent(engine: Engine, tenant_id: str, minute: int) -> AsyncIterator[stored.Traffic]:
    """Yield what all processes have counted in the last hour; what this one counted comes from its memory."""
    counter = engine.find_extension(TrafficCounter)
    own = counter.process if counter else ""
    hour = queries.Rows(stored.Traffic, f"{write_minute(minute - HOUR)}\0")
    async for row in walk_rows(engine.backend, tenant_id, hour):
        if row.process != own:
            yield row
    for row in counter.list_rows(tenant_id, range(minute - HOUR, minute + 2)) if counter else ():
        yield row
