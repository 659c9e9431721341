"""What happened in each queue: counted beside the work, stored every half minute.

A process stores one row for each minute, with the numbers of all queues, so processes never write the same row.  A
process that dies takes at most the last half minute of its numbers along.  Minutes that are older than an hour are
folded: one row has five of them, of all processes, and is kept for a day.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from functools import partial

import msgspec
from msgspec import UNSET, Struct, UnsetType

from asyncgate import Caller, Engine, Extension, Work
from asyncgate.parts.model import counted, errors, queries, stored, wire_operating
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.model.walking import walk_rows

HOUR, DAY, FIVE = 60, 1440, 5           # minutes
FOLDED = ""             # the process of a row that has five minutes of all of them
MOST_FOLDED_QUEUES = 200    # of such a row; the others are counted together
MOST_FOLDED_ROWS = 300         # that are folded in one transaction
QUIET = 0              # the lane of the queues that are counted together


class Tally(Struct, array_like=True):
    """What happened in a queue in some minutes."""

    started: int = 0        # leases granted
    ended: int = 0          # tasks
    failed: int = 0         # attempts
    expired: int = 0        # leases
    begun: int = 0          # tasks that got their first lease
    waited_ms: int = 0      # for it
    type: str = ""

    def add(self, more: Tally) -> None:
        """Add what else happened."""
        for name in TALLIED:
            setattr(self, name, getattr(self, name) + getattr(more, name))


TALLIED = Tally.__struct_fields__[:-1]
NO_TRAFFIC = Tally()
ByLane = dict[int, Tally]

write_tallies = msgspec.json.Encoder().encode
read_tallies = msgspec.json.Decoder(ByLane).decode


class TrafficCounter(Extension):
    """Tally what happens in each queue, in the memory of this process until it is stored."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.process = engine, secrets.token_hex(8)
        self.counted: defaultdict[str, dict[int, ByLane]] = defaultdict(dict)       # by tenant and minute
        self.unsaved: defaultdict[str, set[int]] = defaultdict(set)                 # minutes, by tenant
        self.pruned: dict[str, int] = {}        # by tenant, the minute in which old rows were folded

    def after_commit(self, work: Work) -> None:
        """Count what a batch has changed."""
        for lease in work.leased.values():
            if lease.ending == "live":
                if lease.acquired_at == work.now:
                    counts, task = self._find(work, lease.task_id), work.tasks[lease.task_id]
                    counts.started += 1
                    if (wait := counted.find_wait(lease, task, work.now)) is not None:
                        counts.begun += 1
                        counts.waited_ms += int(wait * 1000)
            elif lease.ending == "failed":
                self._find(work, lease.task_id).failed += 1
            elif lease.ending == "expired":
                self._find(work, lease.task_id).expired += 1
        for task in work.moved.values():
            if task.completed_at == work.now and task.status in stored.TERMINAL:
                self._find(work, task.task_id).ended += 1

    def _find(self, work: Work, task_id: str) -> Tally:
        """Return where to count what happens to a task."""
        minute = int(work.now // 60)
        if (by_lane := self.counted[work.tenant_id].get(minute)) is None:
            minutes = self.counted[work.tenant_id]
            for old in [other for other in minutes if other < minute - HOUR]:
                del minutes[old]
                self.unsaved[work.tenant_id].discard(old)
            by_lane = minutes.setdefault(minute, {})
        task = work.tasks[task_id]
        if (counts := by_lane.get(task.lane)) is None:
            counts = by_lane[task.lane] = Tally(type=task.type)
        self.unsaved[work.tenant_id].add(minute)
        return counts

    def list_tenants(self, since: float) -> list[str]:
        """Return the tenants in which this process has counted something since then."""
        return [tenant_id for tenant_id, minutes in self.counted.items() if max(minutes, default=0) >= since // 60]

    def list_rows(self, tenant_id: str, minutes: Iterable[int]) -> list[stored.Traffic]:
        """Return what this process has counted in some minutes, as it is stored."""
        by_minute = self.counted.get(tenant_id, {})
        return [stored.Traffic(write_minute(minute), self.process, write_tallies(by_minute[minute]).decode())
                for minute in minutes if minute in by_minute]

    async def store(self) -> int:
        """Store what was counted since the last time; return how many rows."""
        now, stored_rows = int(self.engine.backend.now() // 60), 0
        for tenant_id in [tenant for tenant, minutes in self.counted.items() if max(minutes, default=0) < now - HOUR]:
            del self.counted[tenant_id]
        for tenant_id, minutes in list(self.unsaved.items()):
            rows = self.list_rows(tenant_id, sorted(minutes))
            old = await self._find_old(tenant_id, now)
            loaded = {(stored.Traffic, key) for row in old
                      for key in ((row.minute, row.process), (write_minute(floor_to_five(row)), FOLDED))}
            del self.unsaved[tenant_id]
            try:
                await self.engine.change(tenant_id, partial(store_traffic, rows, old), *loaded)
            except errors.GateError:
                self.unsaved[tenant_id] |= minutes
                raise
            stored_rows += len(rows)
        return stored_rows

    async def _find_old(self, tenant_id: str, now: int) -> list[stored.Traffic]:
        """Return rows that are to be folded, or that nobody asks for any more, once an hour."""
        if now < self.pruned.get(tenant_id, 0) + HOUR:
            return []
        old = [row async for row in walk_rows(self.engine.backend, tenant_id, queries.Rows(stored.Traffic))
               if floor_to_five(row) + FIVE <= now - (DAY if row.process == FOLDED else HOUR)]
        if len(old) <= MOST_FOLDED_ROWS:       # else the rest is folded soon
            self.pruned[tenant_id] = now
        return old[:MOST_FOLDED_ROWS]


def store_traffic(rows: list[stored.Traffic], old: list[stored.Traffic], work: Work) -> None:
    """Store what a process has counted, fold minutes, and drop days."""
    for row in rows:
        work.keep_record(row)
    folded = defaultdict[int, list[stored.Traffic]](list)
    for listed in old:
        if (counted_row := work.find_record(stored.Traffic, listed.minute, listed.process)) is None:
            continue        # another process has folded it
        work.drop_record(stored.Traffic, listed.minute, listed.process)
        if listed.process != FOLDED and (first := floor_to_five(listed)) + FIVE > work.now // 60 - DAY:
            folded[first].append(counted_row)
    for first, minutes in folded.items():
        known = work.find_record(stored.Traffic, write_minute(first), FOLDED)
        work.keep_record(stored.Traffic(write_minute(first), FOLDED, fold([*minutes, *([known] if known else ())])))


def fold(rows: Iterable[stored.Traffic]) -> str:
    """Add up what rows have counted; of many queues, what happened in the quiet ones together."""
    sums: ByLane = {}
    for row in rows:
        for lane, counts in read_tallies(row.counts).items():
            sums.setdefault(lane, Tally(type=counts.type)).add(counts)
    busy = sorted(sums, key=lambda lane: (lane == QUIET, -sums[lane].started - sums[lane].ended))
    for lane in busy[MOST_FOLDED_QUEUES:]:
        if lane != QUIET:
            sums.setdefault(QUIET, Tally()).add(sums.pop(lane))
    return write_tallies(sums).decode()


def write_minute(minute: int) -> str:
    """Write the number of a minute so that it sorts."""
    return f"{minute:012d}"


def floor_to_five(row: stored.Traffic) -> int:
    """Return the first of the five minutes to which a row belongs."""
    return int(row.minute) // FIVE * FIVE


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
    async for row in iterate_since(engine, tenant_id, minute - HOUR, minute):
        age = minute - int(row.minute)
        weights = {"minute": 1.0 if age <= 0 else share if age == 1 else 0.0, "hour": share if age >= HOUR else 1.0}
        by_lane = read_tallies(row.counts)
        for lane in lanes & by_lane.keys():
            counts = by_lane[lane]
            flow = (counts.started, counts.ended, counts.failed, counts.expired)
            for span, weight in weights.items():
                parts[lane][span] = [have + weight * more for have, more in zip(parts[lane][span], flow, strict=True)]
            if 0 <= age < minutes:
                each = series[lane]
                for numbers, number in zip((each.started, each.ended, each.failed, each.expired), flow, strict=True):
                    numbers[-1 - age] += number
    return {lane: Flows(wire_operating.Flow(*map(round, spans["minute"])),
                        wire_operating.Flow(*map(round, spans["hour"])), series.get(lane, UNSET))
            for lane, spans in parts.items()}


async def iterate_since(engine: Engine, tenant_id: str, since: int, now: int) -> AsyncIterator[stored.Traffic]:
    """Yield what all processes have counted since a minute; what this one counted lately comes from its memory."""
    counter = engine.find_extension(TrafficCounter)
    own = counter.process if counter else ""
    async for row in walk_rows(engine.backend, tenant_id, queries.Rows(stored.Traffic, f"{write_minute(since)}\0")):
        if row.process != own or int(row.minute) < now - HOUR:
            yield row
    for row in counter.list_rows(tenant_id, range(max(since, now - HOUR), now + 2)) if counter else ():
        yield row


async def get_traffic(engine: Engine, caller: Caller, ask: wire_operating.GetTraffic) -> wire_operating.TrafficReport:
    """Return what happened over an hour or a day, by type: leases, ends, failures, and how long tasks waited.

    An hour is told by the minute, a day by five minutes; the last of them are not over yet.  What another process has
    seen in the last half minute may be missing.
    """
    step, length = (1, HOUR) if ask.span == "hour" else (FIVE, DAY // FIVE)
    minute = int(engine.backend.now() // 60)
    first = minute // step - length + 1
    total, by_type = dict[int, Tally](), defaultdict[str, dict[int, Tally]](dict)
    async for row in iterate_since(engine, caller.tenant_id, first * step - 1, minute):
        at = int(row.minute) // step - first
        for counts in read_tallies(row.counts).values() if 0 <= at < length else ():
            if ask.type in (None, counts.type):
                for places in (total, by_type[counts.type]):
                    places.setdefault(at, Tally()).add(counts)
    busy = sorted(by_type, key=lambda type: (not type, -count_all(by_type[type]), type))
    shown = {type: show_series(by_type[type], length) for type in busy[:ask.most_types]}
    return wire_operating.TrafficReport(to_utc(first * step * 60), step * 60, show_series(total, length), shown,
                                        len(busy) - len(shown))


def count_all(places: dict[int, Tally]) -> int:
    """Return how busy a type was."""
    return sum(counts.started + counts.ended for counts in places.values())


def show_series(places: dict[int, Tally], length: int) -> wire_operating.WaitSeries:
    """Show what happened step by step."""
    steps = [places.get(at, NO_TRAFFIC) for at in range(length)]
    return wire_operating.WaitSeries(
        [counts.started for counts in steps], [counts.ended for counts in steps], [counts.failed for counts in steps],
        [counts.expired for counts in steps], [counts.begun for counts in steps],
        [round(counts.waited_ms / counts.begun / 1000, 3) if counts.begun else None for counts in steps])
