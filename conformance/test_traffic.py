"""What happened over time: by the minute for an hour, by five minutes for a day, whichever process has counted it."""

from __future__ import annotations

import pytest

from asyncgate.conformance import harness
from asyncgate.parts.model import queries, stored
from asyncgate.parts.operating.traffic import TrafficCounter
from asyncgate.parts.upkeep import Upkeep

pytestmark = pytest.mark.anyio


async def to_a_mark(gate: harness.Gate, seconds: int) -> None:
    """Move the clock to the beginning of a minute, or of five: numbers are kept by them."""
    gate.skip(seconds - gate.now() % seconds)


async def test_what_happened_is_told_by_type_for_an_hour_and_for_a_day(gate: harness.Gate) -> None:
    await to_a_mark(gate, 60)
    for seconds in (2, 4):
        await gate.create("scan")
        gate.skip(seconds)
        offer = await gate.claim(accept_types=["scan"])
        assert offer is not None
        await gate.as_worker().complete(**harness.under(offer), artifacts=["a"])
    gate.skip(120)
    await gate.leased(type="mail", retry_backoff_seconds=0)
    gate.skip(310)
    await gate.sweep()

    hour = await gate.as_admin().get_traffic()
    day = await gate.as_admin().get_traffic(span="day")
    mail = await gate.as_admin().get_traffic(type="mail")
    busiest = await gate.as_admin().get_traffic(most_types=1)

    assert (hour.step_seconds, len(hour.total.started)) == (60, 60)
    assert (day.step_seconds, len(day.total.started)) == (300, 288)
    assert list(hour.by_type) == list(day.by_type) == ["scan", "mail"]
    at = hour.by_type["scan"].ended.index(2)
    wait = hour.by_type["scan"].waited_seconds[at]
    assert (hour.by_type["scan"].begun[at], wait is not None and 3 <= wait < 30) == (2, True)     # the mean of 2 and 4
    assert {at for at, wait in enumerate(hour.by_type["scan"].waited_seconds) if wait is not None} == {at}
    for report in (hour, day):
        sums = [sum(getattr(report.total, name)) for name in ("started", "ended", "failed", "expired", "begun")]
        assert sums == [3, 2, 0, 1, 3]
    assert (list(mail.by_type), sum(mail.total.started), sum(mail.total.expired)) == (["mail"], 1, 1)
    assert (list(busiest.by_type), busiest.types_left, busiest.total) == (["scan"], 1, hour.total)
    assert (hour.begins_at.timestamp() + 3600) // 60 == gate.now() // 60 + 1


async def test_minutes_are_folded_into_five_for_a_day_whoever_has_counted_them(gate: harness.Gate) -> None:
    other = gate.beside()
    await to_a_mark(gate, 300)
    for _ in range(10):
        await gate.finished()
        await other.finished()
        await Upkeep(other.engine).store_traffic()
        await Upkeep(gate.engine).store_traffic()
        gate.skip(60)
    gate.skip(3700)
    before = await gate.as_admin().get_traffic(span="day")
    for _ in range(2):
        await gate.finished(type="late")
        await Upkeep(gate.engine).store_traffic()
        await other.finished(type="late")
        await Upkeep(other.engine).store_traffic()
        gate.skip(3660)

    after = await gate.as_admin().get_traffic(span="day")
    rows = await gate.backend.page(gate.tenant_id, queries.Rows(stored.Traffic))

    assert [row.process for row in rows].count("") == 2      # ten minutes of two processes
    assert [number for number in before.by_type["demo"].ended if number] == [10, 10]
    assert [number for number in after.by_type["demo"].ended if number] == [10, 10]
    assert sum(after.total.ended) == 24
    gate.skip(86400)
    await gate.finished(type="last")
    await Upkeep(gate.engine).store_traffic()
    kept = await gate.backend.page(gate.tenant_id, queries.Rows(stored.Traffic))
    assert [row.process for row in kept] == [find_counter(gate).process]
    assert list((await gate.as_admin().get_traffic(span="day")).by_type) == ["last"]


def find_counter(gate: harness.Gate) -> TrafficCounter:
    """Return what counts in a process."""
    counter = gate.engine.find_extension(TrafficCounter)
    assert counter is not None
    return counter
