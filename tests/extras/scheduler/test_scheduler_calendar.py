"""The calendar of the scheduler, beside a plain model that looks at every minute of every clock."""

from __future__ import annotations

import calendar
from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgate.extras.scheduler.calendar import (
    CHOICES,
    Calendar,
    Cron,
    Every,
    MisfirePolicy,
    Timing,
    find_due_runs,
    format_time,
)

MINUTE, DAY = 60, 86_400
# Some change in the middle of the night, some by half an hour, one by a whole day, one at midnight, one not at all.
ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Cairo", "America/Havana",
         "Pacific/Apia", "Asia/Kathmandu", "America/Santiago", "Africa/Casablanca"]
# Windows of four days around changes of these clocks, and some without any.
DAYS = ["2026-03-27", "2026-10-23", "2026-03-06", "2026-10-30", "2026-04-03", "2026-10-02", "2026-04-22", "2026-10-28",
        "2011-12-28", "2026-09-04", "2026-02-15", "2026-03-20", "2024-02-27", "2026-12-30", "2026-07-01"]


def at(text: str, zone: str = "UTC") -> int:
    """Read a time on the clock of a zone."""
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp())


def shown(runs: list[int], zone: str = "UTC") -> list[str]:
    """Write times as the clock of a zone shows them."""
    return [datetime.fromtimestamp(run, ZoneInfo(zone)).isoformat(timespec="minutes") for run in runs]


def runs(expr: str, zone: str, since: str, count: int) -> list[str]:
    """Return the first runs after a time on the clock of the zone."""
    return shown(list(islice(Cron(expr, zone).after(at(since, zone)), count)), zone)


# The plain model.


def values(field: str, least: int, most: int) -> set[int]:
    """Read one field of a cron expression, as far as these tests write them."""
    numbers: set[int] = set()
    for term in field.split(","):
        span, _, step = term.partition("/")
        low, _, high = (f"{least}-{most}" if span == "*" else span if "-" in span else f"{span}-{span}").partition("-")
        numbers |= set(range(int(low), int(high) + 1, int(step or 1)))
    return numbers


class Plain:
    """A cron expression, matched field by field."""

    def __init__(self, expr: str) -> None:
        minute, hour, day, month, weekday = expr.split()
        self.fixed = "*" not in (minute[0], hour[0])
        self.both = "*" in (day[0], weekday[0])
        self.minutes, self.hours = values(minute, 0, 59), values(hour, 0, 23)
        self.days, self.months = values(day, 1, 31), values(month, 1, 12)
        self.weekdays = {number % 7 for number in values(weekday, 0, 6)}

    def matches(self, wall: datetime) -> bool:
        """Whether a clock that shows this time shows a match."""
        days = wall.day in self.days, wall.isoweekday() % 7 in self.weekdays
        return (wall.minute in self.minutes and wall.hour in self.hours and wall.month in self.months
                and (all(days) if self.both else any(days)))

    def between(self, zone: str, start: int, end: int) -> list[int]:
        """Look at each minute: a fixed time runs when the clock first reaches it, another when the clock shows it."""
        clock, moments, reached = ZoneInfo(zone), [], None
        for moment in range(start - start % MINUTE - 2 * DAY, end + 1, MINUTE):
            wall = datetime.fromtimestamp(moment, clock).replace(tzinfo=None)
            if self.fixed:
                reached = wall if reached is None else reached
                hit = any(map(self.matches, minutes(reached, wall)))
                reached = max(reached, wall)
            else:
                hit = self.matches(wall)
            if hit and moment > start:
                moments.append(moment)
        return moments


def minutes(after: datetime, until: datetime) -> list[datetime]:
    """List what a clock shows after one time and up to another, if it went evenly."""
    return [after + timedelta(minutes=count) for count in range(1, int((until - after) / timedelta(minutes=1)) + 1)]


def field(least: int, most: int) -> st.SearchStrategy[str]:
    """Write one field of a cron expression in one of its ways."""
    numbers = st.integers(least, most)
    return st.one_of(
        st.just("*"), st.sampled_from([2, 5, 7, 20]).map(lambda step: f"*/{step}"), numbers.map(str),
        st.lists(numbers, min_size=2, max_size=3, unique=True).map(lambda some: ",".join(map(str, sorted(some)))),
        st.tuples(numbers, numbers).map(lambda ends: f"{min(ends)}-{max(ends)}"))


HOURS = st.one_of(field(0, 23), field(0, 4))     # most clocks change at night
EXPRESSIONS = st.tuples(field(0, 59), HOURS, st.one_of(st.just("*"), field(1, 28)), st.just("*"),
                        st.one_of(st.just("*"), field(0, 6))).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS, st.sampled_from(ZONES), st.sampled_from(DAYS), st.integers(0, 3 * 24 * 60))
def test_cron_runs_when_a_look_at_every_minute_finds_it(expr: str, zone: str, day: str, skipped: int) -> None:
    start, end = at(day) + skipped * MINUTE, at(day) + 4 * DAY

    moments = []
    for run in Cron(expr, zone).after(start):
        if run > end:
            break
        moments.append(run)

    assert shown(moments, zone) == shown(Plain(expr).between(zone, start, end), zone)


# Cron, by example.


def test_a_time_that_spring_skips_runs_when_the_clock_has_skipped_it() -> None:
    assert runs("30 2 * * *", "Europe/Berlin", "2026-03-28T00:00", 3) == [
        "2026-03-28T02:30+01:00", "2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"]


def test_several_times_in_a_skipped_hour_are_one_run() -> None:
    assert runs("0,30 2,3 * * *", "Europe/Berlin", "2026-03-29T00:00", 3) == [
        "2026-03-29T03:00+02:00", "2026-03-29T03:30+02:00", "2026-03-30T02:00+02:00"]


def test_a_time_that_comes_twice_in_autumn_runs_the_first_time() -> None:
    assert runs("30 2 * * *", "Europe/Berlin", "2026-10-25T00:00", 2) == [
        "2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]


def test_a_search_that_begins_in_the_second_of_two_equal_hours_does_not_run_again() -> None:
    second = at("2026-10-25T01:15")     # 02:15 in Berlin, for the second time

    assert shown(list(islice(Cron("30 2 * * *", "Europe/Berlin").after(second), 1)), "Europe/Berlin") == [
        "2026-10-26T02:30+01:00"]


def test_every_so_often_runs_evenly_through_both_changes() -> None:
    spring = [at(run) for run in ("2026-03-29T00:30", "2026-03-29T01:00", "2026-03-29T01:30")]
    autumn = [at(run) for run in ("2026-10-25T00:30", "2026-10-25T01:00", "2026-10-25T01:30")]
    half_hours = Cron("*/30 * * * *", "Europe/Berlin")

    assert list(islice(half_hours.after(spring[0] - 1), 3)) == spring
    assert list(islice(half_hours.after(autumn[0] - 1), 3)) == autumn


def test_a_leap_day_comes_every_four_years() -> None:
    assert runs("0 12 29 2 *", "UTC", "2026-01-01T00:00", 2) == ["2028-02-29T12:00+00:00", "2032-02-29T12:00+00:00"]


def test_the_31st_comes_in_seven_months_and_the_last_day_in_all() -> None:
    ends = [f"2026-{month:02}-{calendar.monthrange(2026, month)[1]}T00:00+00:00" for month in range(1, 13)]

    assert runs("0 0 31 * *", "UTC", "2026-01-01T00:00", 7) == [end for end in ends if "-31T" in end]
    assert runs("0 0 L * *", "UTC", "2026-01-01T00:00", 12) == ends


def test_a_day_of_the_month_or_a_weekday_will_do_when_both_are_named() -> None:
    assert runs("0 0 13 * FRI", "UTC", "2026-03-01T00:00", 4) == [
        "2026-03-06T00:00+00:00", "2026-03-13T00:00+00:00", "2026-03-20T00:00+00:00", "2026-03-27T00:00+00:00"]


@pytest.mark.parametrize(("expr", "zone", "says"), [
    ("0 3 * *", "UTC", "five fields"),
    ("0 0 3 * * *", "UTC", "five fields"),
    ("@daily", "UTC", "five fields"),
    ("", "UTC", "five fields"),
    ("60 3 * * *", "UTC", "bad minute"),
    ("0 24 * * *", "UTC", "bad hour"),
    ("0 0 0 * *", "UTC", "bad day-of-month"),
    ("0 0 30 2 *", "UTC", "bad day-of-month"),
    ("0 0 * FOO *", "UTC", "bad month"),
    ("*/0 * * * *", "UTC", "bad minute"),
    ("0 3 * * *", "Europe/Nowhere", "is not a time zone"),
    ("0 3 * * *", "../zoneinfo/UTC", "is not a time zone"),
    ("0 3 * * *", "Europe", "is not a time zone"),
    ("0 3 * * *", "", "is not a time zone"),
])
def test_what_is_no_cron_expression_or_no_zone_is_told(expr: str, zone: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Cron(expr, zone)


# Intervals, jitter and what was missed.


def test_an_interval_counts_from_its_anchor_and_not_from_where_one_looks() -> None:
    every = Every(1000, 60)

    assert list(islice(every.after(0), 2)) == [1060, 1120]
    assert list(islice(every.after(1060), 2)) == [1120, 1180]
    assert list(islice(every.after(1060.5), 1)) == [1120]
    assert list(islice(every.after(1059.5), 1)) == [1060]


@given(st.integers(1, 5000), st.integers(0, 10_000), st.text(max_size=9))
def test_jitter_delays_a_run_but_never_up_to_the_next(seconds: int, jitter: int, schedule_id: str) -> None:
    timing = Timing(schedule_id, Every(0, seconds), jitter)

    for run, due in islice(timing.after(0), 5):
        assert run <= due < run + seconds
        assert due - run <= jitter


def test_jitter_is_the_same_in_every_process_and_differs_between_runs_and_schedules() -> None:
    def delays(schedule_id: str) -> list[float]:
        return [due - run for run, due in islice(Timing(schedule_id, Every(0, 3600), 600).after(0), 3)]

    assert delays("a") == delays("a")
    assert len({*delays("a"), *delays("b")}) == 6


def test_a_run_that_is_delayed_is_not_owed_before_it_is_due() -> None:
    timing = Timing("a", Every(0, 3600), 600)
    run, due = next(timing.after(0))

    assert find_due_runs(timing, "catch_up_all", 0, due - 0.01) == []
    assert find_due_runs(timing, "catch_up_all", 0, due) == [run]


def misfires(calendar: Calendar, since: int, now: int) -> list[int]:
    """H.5 to the letter: what was expected, without the current tick."""
    expected = []
    for run in calendar.after(since):
        if run > now:
            break
        expected.append(run)
    return expected[:-1]


@pytest.mark.parametrize(("policy", "made_up"), [("skip", 0), ("catch_up_one", 1), ("catch_up_all", 9)])
def test_each_policy_makes_up_for_what_it_promises_and_runs_the_current_one(policy: MisfirePolicy,
                                                                            made_up: int) -> None:
    every = Every(0, 60)
    missed = misfires(every, 0, 630)
    assert len(missed) == 9

    assert find_due_runs(Timing("a", every), policy, 0, 630) == [*missed[len(missed) - made_up:], 600]


@pytest.mark.parametrize("policy", CHOICES)
def test_a_run_in_time_is_the_current_one_under_every_policy(policy: MisfirePolicy) -> None:
    timing = Timing("a", Every(0, 60))

    assert find_due_runs(timing, policy, 0, 59.9) == []
    assert find_due_runs(timing, policy, 0, 60) == [60]
    assert find_due_runs(timing, policy, 60, 60) == []
    assert find_due_runs(timing, policy, 60, 30) == [], "a clock that is set back runs nothing again"


def test_a_long_absence_is_made_up_for_a_piece_at_a_time() -> None:
    timing, since, caught_up = Timing("a", Every(0, 60)), 0, []
    while owed := find_due_runs(timing, "catch_up_all", since, 6000, most=30):
        assert len(owed) <= 30
        caught_up += owed
        since = owed[-1]

    assert caught_up == list(range(60, 6001, 60))


@settings(deadline=None)
@given(st.sampled_from(["* * * * *", "*/7 3 * * *", "30 2 * * *", "0 0 1 * *", "0 9 * * MON"]),
       st.integers(0, 60 * DAY), st.sampled_from([0, 90, 100_000]))
def test_the_newest_runs_are_found_without_a_walk_through_all(expr: str, back: int, jitter: int) -> None:
    timing, now = Timing("a", Cron(expr, "Europe/Berlin"), jitter), at("2026-11-01T12:34")

    assert timing.newest(now - back, now, 2) == list(timing.expected(now - back, now))[-2:]


def test_times_are_named_in_utc() -> None:
    assert format_time(at("2026-03-29T03:00", "Europe/Berlin")) == "2026-03-29T01:00:00+00:00"
    assert datetime.fromisoformat(format_time(1)) == datetime.fromtimestamp(1, UTC)
