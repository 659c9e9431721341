"""Usage: what is counted is what receipts and tasks say, whatever dies, and each time is told once (spec 21.6.4)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from asyncgate import Needs, Work
from asyncgate.conformance.harness import Gate, refused, under
from asyncgate.conformance.recount import wrong_usage
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.identity.metering import CallMeter, Closer, floor_to
from asyncgate.parts.identity.notices import read_rows
from asyncgate.parts.model import errors, stored
from asyncgate.parts.model.database import Around

pytestmark = pytest.mark.anyio
STEPS = 60


class Killed(Exception):
    """The process died at a commit."""


class Mortal(Around):
    """A backend whose process may die right before or right after any commit."""

    def __init__(self, backend: Any, draw: random.Random) -> None:
        super().__init__(backend)
        self.draw, self.deaths = draw, 0

    async def transact(self, tenant_id: str, needs: Needs, decide: Callable[[Work], None]) -> None:
        """Carry out a batch, if the process lives."""
        fate = self.draw.random()
        if fate > 0.15:
            await self.backend.transact(tenant_id, needs, decide)
        if fate < 0.3:
            self.deaths += 1
            raise Killed


async def events_of(gate: Gate) -> list[stored.UsageEvent]:
    """Return the stored events."""
    return [row async for row in read_rows(gate.engine, gate.tenant_id, stored.UsageEvent)]


async def close(gate: Gate, now: float | None = None) -> int:
    """Close what is over."""
    return await Closer(gate.engine).close(gate.tenant_id, floor_to(gate.now() if now is None else now, 300))


async def to_mark(gate: Gate, behind: float = 1.0) -> None:
    """Move the clock to just behind the next mark."""
    gate.skip(300 - gate.now() % 300 + behind)


class Program:
    """A random program over one tenant, whose processes die now and then."""

    def __init__(self, gate: Gate, seed: int) -> None:
        self.draw, self.gate = random.Random(seed), gate
        self.backend = Mortal(gate.backend, self.draw)
        self.offers: list[Any] = []
        self.start()

    def start(self) -> None:
        """Begin a process; what the last one had in memory is gone."""
        self.mortal = Gate(engine_over(self.backend, self.gate.engine.settings), self.gate.tenant_id)

    async def run(self) -> None:
        """Take random steps."""
        steps = [self.create, self.claim, self.end, self.end, self.keep, self.wait, self.close, self.cancel, self.flush]
        for _ in range(STEPS):
            deaths = self.backend.deaths
            try:
                await self.draw.choice(steps)()
            except errors.GateError as refusal:
                if refusal.status >= 500 and self.backend.deaths == deaths:
                    raise
            if self.backend.deaths > deaths:
                self.start()

    async def create(self) -> None:
        """Create a task."""
        await self.mortal.create(payload="é" * self.draw.randrange(50), max_attempts=3)

    async def claim(self) -> None:
        """Claim tasks."""
        seconds = self.draw.choice([1, 300, 1800])
        self.offers += (await self.mortal.as_worker().lease_next(max_tasks=3, lease_ttl_seconds=seconds)).tasks

    async def end(self) -> None:
        """End a lease in some way."""
        if not self.offers:
            return
        offer, worker = self.draw.choice(self.offers), self.mortal.as_worker()
        ways: list[Callable[[], Any]] = [
            lambda: worker.complete(**under(offer), result={"n": "x" * self.draw.randrange(99)},
                                    artifacts=["file:///o"]),
            lambda: worker.complete(**under(offer), result=None),
            lambda: worker.fail(**under(offer), error={"why": "no"}, retryable=self.draw.random() < 0.6),
            lambda: worker.release_lease(**under(offer))]
        await self.draw.choice(ways)()

    async def keep(self) -> None:
        """Renew a lease and report progress."""
        for offer in self.offers[-2:]:
            await self.mortal.as_worker().renew_lease(**under(offer))
            await self.mortal.as_worker().report_progress(**under(offer), progress={"at": 1})

    async def wait(self) -> None:
        """Let time pass, now and then much of it."""
        await self.mortal.wait(self.draw.choice([0.5, 7, 200, 300, 4000, 100_000]))

    async def close(self) -> None:
        """Close what is over, as two processes that believe that they lead."""
        await close(self.mortal)
        await close(self.gate, self.gate.now() - self.draw.choice([0, 600]))

    async def cancel(self) -> None:
        """Cancel a task that was leased once."""
        if self.offers:
            await self.mortal.as_admin().cancel_task(task_id=self.draw.choice(self.offers).task_id)

    async def flush(self) -> None:
        """Store the calls."""
        meter = self.mortal.engine.find_extension(CallMeter)
        assert meter is not None
        await meter.store()


async def test_usage_is_what_receipts_and_tasks_say_whatever_dies(gate: Gate, rounds: int) -> None:
    for _ in range(2 * rounds):
        seed = random.randrange(2**32)
        program = Program(gate.stranger(), seed)
        await program.run()

        assert await wrong_usage(gate.engine, program.gate.tenant_id) == [], f"seed {seed}"
        program.gate.skip(700)
        await close(program.gate)
        assert await wrong_usage(gate.engine, program.gate.tenant_id) == [], f"seed {seed}, closed"


async def test_a_lease_counts_in_each_five_minutes_that_it_lives(gate: Gate) -> None:
    await to_mark(gate)
    await gate.create()
    await to_mark(gate, 100)
    offer = await gate.claim(lease_ttl_seconds=1800)
    assert offer is not None
    for _ in range(2):
        await to_mark(gate, 50)
        await close(gate)
    await gate.as_worker().complete(**under(offer), result=None, artifacts=["file:///out"])
    await to_mark(gate)
    await close(gate)

    first, *rest = [event.lease_ms for event in await events_of(gate)]
    began, ended = [(await gate.receipt(offer.task_id, type)).created_at.timestamp()
                    for type in ("task.accepted", "task.completed")]

    assert (first, rest[1]) == (0, 300_000)
    assert rest[0] == pytest.approx(1000 * (300 - began % 300), abs=2)
    assert rest[2] == pytest.approx(1000 * (ended % 300), abs=2)
    assert len({event.usage_event_id for event in await events_of(gate)}) == len(rest) + 1


async def test_what_is_closed_twice_is_told_once(gate: Gate) -> None:
    await to_mark(gate)
    await gate.create()
    await to_mark(gate)
    meters = [stored.key_of(meter) async for meter in read_rows(gate.engine, gate.tenant_id, stored.Meter)]

    closer, until = Closer(gate.engine), floor_to(gate.now(), 300)
    first, again = [await closer.close_meters(gate.tenant_id, meters, until) for _ in range(2)]

    assert (first, again) == ((1, False), (0, False))
    assert [event.tasks for event in await events_of(gate)] == [1]


async def test_what_comes_late_is_part_of_the_next_event(gate: Gate) -> None:
    await to_mark(gate, 290)
    await gate.create()
    await to_mark(gate, 200)
    await close(gate)
    gate.skip(-210)         # a batch that began before the mark is committed now
    await gate.create()
    gate.skip(600)
    await close(gate)

    assert [event.tasks for event in await events_of(gate)] == [1, 1]
    assert await wrong_usage(gate.engine, gate.tenant_id) == []


async def test_a_clock_that_stands_closes_nothing_and_loses_nothing(gate: Gate) -> None:
    await to_mark(gate)
    await gate.create()

    assert [await close(gate) for _ in range(3)] == [0, 0, 0]
    assert await gate.backend.record(gate.tenant_id, stored.UsageHead) is None
    assert await wrong_usage(gate.engine, gate.tenant_id) == []


async def test_days_in_which_nothing_changes_are_one_event_each(gate: Gate) -> None:
    gate.skip(129_600 - gate.now() % 86_400 + 100)      # at noon, some day: at midnight a day has one event less
    await gate.create(payload="x" * 998)
    gate.skip(3 * 86_400)
    await close(gate)

    stored = await events_of(gate)

    assert len(stored) == 4
    assert sum(event.tasks for event in stored) == 1
    report = await gate.as_admin().get_usage(period="hour")
    assert {line.payload_byte_hours for line in report.usage[:-1]} == {1000.0}
    assert len(report.usage) == 25


async def test_months_end_where_the_calendar_says(gate: Gate) -> None:
    await gate.create(payload="x" * 998)
    gate.skip(62 * 86_400)

    months = (await gate.as_admin().get_usage()).usage

    assert all(line.begins.day == line.ends.day == 1 for line in months)
    assert [month.ends for month in months[:-1]] == [month.begins for month in months[1:]]
    whole = months[1]
    assert whole.payload_byte_hours == (whole.ends - whole.begins).total_seconds() / 3600 * 1000
    assert [line.tasks for line in months] == [1, *[0] * (len(months) - 1)]


async def test_calls_are_counted_by_kind_and_refused_ones_are_not(gate: Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().renew_lease(**under(offer))
    await gate.as_worker().get_task(task_id=offer.task_id)
    with refused("task_not_found"):
        await gate.as_agent().get_task(task_id="none")
    meter = gate.engine.find_extension(CallMeter)
    assert meter is not None
    await meter.store()

    [line] = (await gate.as_admin().get_usage()).usage

    assert (line.reads, line.writes, line.heartbeats) == (1, 2, 1)


async def test_what_was_used_in_the_first_second_of_five_minutes_is_shown_in_it(gate: Gate) -> None:
    await to_mark(gate, 0.001)
    await gate.create()

    for period in ("5-minute", "hour", "day", "month"):
        [line] = (await gate.as_admin().get_usage(period=period)).usage
        assert line.tasks == 1


async def test_a_tenants_admin_sees_its_own_usage_and_the_operator_all(gate: Gate) -> None:
    operator = Gate(gate.engine, gate.engine.settings.default_tenant_id).as_admin()
    await gate.create()

    own = (await gate.as_admin().get_usage()).usage
    with refused("forbidden"):
        await gate.as_admin().get_usage(all_tenants=True)
    with refused("tenant_not_found"):
        await gate.as_admin().get_usage(tenant=operator.caller.tenant_id)
    with refused("invalid_request"):
        await gate.as_admin().get_usage(period="5-minute", since="2020-01-01T00:00:00Z")

    assert [line.tenant for line in own] == [gate.tenant_id]
    tenants, cursor = list[str](), None
    while True:
        page = await operator.get_usage(all_tenants=True, limit=200, cursor=cursor)
        tenants += [line.tenant for line in page.usage]
        if (cursor := page.next_cursor) is None:
            break
    assert gate.tenant_id in tenants
    assert [line.tasks for line in (await operator.get_usage(tenant=gate.tenant_id)).usage] == [1]
