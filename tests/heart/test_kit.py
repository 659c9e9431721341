"""The kit against floods and slow peers: what each user of it relies on."""

from __future__ import annotations

import asyncio

import pytest

from asyncgate.parts.process.kit import MOST_ENTRIES, Bounded, Flights, Rate, Refetch

pytestmark = pytest.mark.anyio


class Clock:
    """A time that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class Source:
    """A slow peer that counts its calls; each waits until it is released."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None
        self.release = asyncio.Event()

    async def call(self) -> int:
        """Count a call, wait, and return its number."""
        self.calls += 1
        number = self.calls
        await self.release.wait()
        if self.error is not None:
            raise self.error
        return number

    async def fetch(self) -> None:
        """Count a call, and wait."""
        await self.call()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def source() -> Source:
    return Source()


async def turns() -> None:
    """Let everything that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


# Bounded.


def test_what_is_used_stays_and_what_is_not_goes() -> None:
    kept: Bounded[str, int] = Bounded(3)
    for at, name in enumerate("abc"):
        kept.put(name, at)

    kept.move_to_end("a")
    kept.put("d", 3)

    assert list(kept) == ["c", "a", "d"]


def test_an_entry_that_is_set_again_is_new_and_drops_nothing() -> None:
    kept: Bounded[str, int] = Bounded(2)
    for name, value in (("a", 1), ("b", 2), ("a", 3)):
        kept.put(name, value)

    assert list(kept.items()) == [("b", 2), ("a", 3)]


# Rates.


def test_a_key_has_so_many_uses_in_a_window_and_as_many_in_the_next(clock: Clock) -> None:
    rate = Rate(2, 60.0, clock)

    assert [rate.take("a") for _ in range(4)] == [True, True, False, False]
    assert rate.take("b")
    clock.now += 59.9
    assert not rate.take("a")
    clock.now += 0.1
    assert [rate.take("a") for _ in range(3)] == [True, True, False]


def test_uses_that_were_refused_do_not_prolong_a_window(clock: Clock) -> None:
    rate = Rate(1, 60.0, clock)
    for _ in range(60):
        rate.take("a")
        clock.now += 1.0

    assert rate.take("a")


def test_a_rate_tells_since_when_a_key_is_used_up_and_counts_nothing_by_that(clock: Clock) -> None:
    rate = Rate(2, 60.0, clock)
    rate.add("a", "b")
    clock.now += 5.0
    assert [rate.over("a", "b") for _ in range(3)] == [None] * 3

    rate.add("b")

    assert (rate.over("a"), rate.over("a", "b"), rate.over()) == (None, 1000.0, None)


def test_a_clock_that_is_set_back_begins_a_window(clock: Clock) -> None:
    rate = Rate(1, 60.0, clock)
    rate.add("a")
    clock.now -= 3600.0

    assert rate.over("a") is None


def test_a_flood_of_keys_fills_no_memory(clock: Clock) -> None:
    rate = Rate(1, 60.0, clock)
    for number in range(MOST_ENTRIES + 10):
        rate.take(str(number))

    assert len(rate.counted) == MOST_ENTRIES
    assert rate.over("9") is None
    assert rate.over("10") == 1000.0


# Flights.


async def test_whoever_asks_meanwhile_shares_a_call_and_the_next_one_makes_another(source: Source) -> None:
    flights: Flights[str, int] = Flights()
    waiting = [asyncio.create_task(flights.join("a", source.call)) for _ in range(3)]
    await turns()
    assert source.calls == 1

    source.release.set()

    assert await asyncio.gather(*waiting) == [1, 1, 1]
    assert flights.under_way == {}
    assert await flights.join("a", source.call) == 2


async def test_calls_for_different_keys_do_not_wait_for_each_other(source: Source) -> None:
    flights: Flights[str, int] = Flights()
    held = asyncio.create_task(flights.join("a", source.call))
    await turns()

    other = Source()
    other.release.set()

    assert await flights.join("b", other.call) == 1
    assert not held.done()
    source.release.set()
    assert await held == 1


async def test_a_failure_reaches_all_who_wait_and_is_not_kept(source: Source) -> None:
    flights: Flights[str, int] = Flights()
    waiting = [asyncio.create_task(flights.join("a", source.call)) for _ in range(2)]
    await turns()
    source.error = OSError("away")
    source.release.set()

    assert [type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == [OSError, OSError]
    source.error = None
    assert await flights.join("a", source.call) == 2


async def test_who_hangs_up_ends_no_call_of_others(source: Source) -> None:
    flights: Flights[str, int] = Flights()
    first, second = (asyncio.create_task(flights.join("a", source.call)) for _ in range(2))
    await turns()

    first.cancel()
    await turns()
    source.release.set()

    assert await second == 1
    assert first.cancelled()


async def test_a_failure_that_nobody_waits_for_any_more_is_no_line_of_the_log(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    flights: Flights[str, int] = Flights()
    waiting = asyncio.create_task(flights.join("a", source.call))
    await turns()
    waiting.cancel()
    source.error = OSError("away")
    source.release.set()
    await turns()

    assert flights.under_way == {}
    assert [record for record in caplog.records if record.name == "asyncio"] == []


async def test_a_call_that_was_forgotten_is_not_the_current_one_and_ends_without_the_next(source: Source) -> None:
    flights: Flights[str, int] = Flights()
    current = list[bool]()

    async def call() -> int:
        number = await source.call()
        current.append(flights.is_current("a"))
        return number

    old = asyncio.create_task(flights.join("a", call))
    await turns()
    flights.forget("a")
    new = asyncio.create_task(flights.join("a", call))
    await turns()
    source.release.set()

    assert [*await asyncio.gather(old, new)] == [1, 2]
    assert current == [False, True]
    assert flights.under_way == {}


# Refetch.


async def test_one_fetch_at_a_time_and_a_rest_between_them(clock: Clock, source: Source) -> None:
    keys = Refetch(source.fetch, clock)
    for _ in range(3):
        keys.begin(60.0)
    await turns()
    clock.now += 120.0
    keys.begin(60.0)        # the first is still under way
    await turns()
    assert source.calls == 1

    source.release.set()
    await keys.wait()
    clock.now = 1059.9
    keys.begin(60.0)
    await turns()
    assert source.calls == 1
    clock.now = 1060.0
    keys.begin(60.0)
    await keys.wait()
    assert source.calls == 2


async def test_all_who_wait_share_a_fetch_and_none_waits_without_one(clock: Clock, source: Source) -> None:
    keys = Refetch(source.fetch, clock)
    await keys.wait()
    keys.begin(0.0)
    waiting = [asyncio.create_task(keys.wait()) for _ in range(3)]
    await turns()
    waiting[0].cancel()
    await turns()
    assert not waiting[1].done()

    source.release.set()
    await asyncio.gather(*waiting[1:])

    assert source.calls == 1


async def test_a_fetch_that_failed_is_made_again_after_its_rest(clock: Clock, source: Source) -> None:
    keys = Refetch(source.fetch, clock)
    source.error = OSError("away")
    source.release.set()
    keys.begin(60.0)
    with pytest.raises(OSError, match="away"):
        await keys.wait()

    keys.begin(60.0)
    await turns()
    assert source.calls == 1
    source.error = None
    clock.now += 60.0
    keys.begin(60.0)
    await keys.wait()
    assert source.calls == 2
