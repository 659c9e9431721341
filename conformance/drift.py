"""What grows and what slows down while gates serve: measurements of a soak, and the judgement of them.

A leak is a trend of the second half, when caches are full: by Theil and Sen's slope it grows by more than a tolerance,
and by Mann and Kendall's test that is not chance.  Neither looks at single values, so a noisy run is not blamed.  What
a call takes is compared by the medians of the second and the last quarter, in units of what a fixed piece of work took
at the same time, and by Mann and Whitney's test: a machine that others use is slow for both.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from math import sqrt
from statistics import median

from msgspec import Struct, field

MIB = 2 ** 20
LEAST_SAMPLES, LEAST_SECONDS = 24, 960.0     # of a run that is judged: until the middle of it caches fill
DISK_SAMPLES = 10           # a file grows by many pages at once
SURE = 3.0                  # standard deviations of a trend that is not chance
# What may grow in the second half: by a share of its median, and by so much in any case.
GROWTH: dict[str, tuple[float, float]] = {
    "memory": (0.05, 8 * MIB), "worker memory": (0.05, 8 * MIB), "scheduler memory": (0.05, 8 * MIB),
    "descriptors": (0.0, 8), "threads": (0.0, 4), "connections": (0.0, 8), "log": (0.25, 16 * MIB)}
# What may become slower or larger for each call or task: so many times, and by so much in any case.
DRIFT: dict[str, tuple[float, float]] = {
    "cpu ms a call": (1.5, 0.5), "p50 ms": (1.5, 5.0), "p99 ms": (2.0, 25.0), "disk a task": (1.5, 4096)}
OF_WORK = {"cpu ms a call": "work cpu ms", "p50 ms": "work ms", "p99 ms": "work ms"}


class Sample(Struct):
    """One measurement: seconds since the beginning, and values by name; sums grow over the whole run."""

    at: float
    values: dict[str, float]
    sums: dict[str, float] = field(default_factory=dict)


class Trend(Struct):
    """How one value went, and what of that is allowed."""

    name: str
    first: float            # median of the second quarter
    last: float             # median of the last one
    change: float           # in the second half, or how many times as much
    allowed: float
    wrong: bool

    def describe(self) -> str:
        """Return a line of words."""
        if self.name in DRIFT:
            return (f"{self.name} went from {self.first:.4g} to {self.last:.4g}, {self.change:.2f} times as much "
                    f"beside a fixed piece of work; {self.allowed:g} times is allowed")
        return (f"{self.name} grows by {self.change:,.0f} in the second half, from {self.first:,.0f} to "
                f"{self.last:,.0f}; {self.allowed:,.0f} is allowed")


def judge_samples(samples: list[Sample]) -> list[str]:
    """Return what leaks or drifts."""
    if not samples or samples[-1].at - samples[0].at < LEAST_SECONDS:
        return []
    return [f"SOAK: {trend.describe()}" for trend in find_trends(samples) if trend.wrong]


def find_trends(samples: list[Sample]) -> list[Trend]:
    """Return the trend of each value that was measured often enough."""
    if len(samples) < LEAST_SAMPLES:
        return []
    rows = [{**sample.values, **ratios, "at": sample.at}
            for sample, ratios in zip(samples[1:], list_ratios(samples), strict=True)]
    names = [name for name in (*GROWTH, *DRIFT) if any(name in row for row in rows)]
    return [find_growth(name, rows) if name in GROWTH else find_drift(name, rows) for name in names]


def list_ratios(samples: list[Sample]) -> list[dict[str, float]]:
    """Return for each pair of neighbours what a call took, and what the tasks of the last samples left on the disk."""
    ratios = []
    for number, (before, after) in enumerate(pairwise(samples)):
        ratio, long_before = {}, samples[max(number - DISK_SAMPLES, 0)]
        if "cpu" in after.sums and (calls := after.sums["calls"] - before.sums["calls"]):
            ratio["cpu ms a call"] = (after.sums["cpu"] - before.sums["cpu"]) / calls * 1000
        if "disk" in after.values and (tasks := after.sums["tasks"] - long_before.sums["tasks"]):
            ratio["disk a task"] = (after.values["disk"] - long_before.values["disk"]) / tasks
        ratios.append(ratio)
    return ratios


def find_growth(name: str, rows: list[dict[str, float]]) -> Trend:
    """Return how a value grew in the second half, by the median of the slopes between all pairs."""
    points = [(row["at"], row[name]) for row in rows[len(rows) // 2:] if name in row]
    slopes = [(later[1] - earlier[1]) / (later[0] - earlier[0]) for earlier, later in combinations(points, 2)]
    grown = median(slopes) * (points[-1][0] - points[0][0]) if slopes else 0.0
    share, least = GROWTH[name]
    allowed = max(share * median(value for _, value in points), least) if points else least
    wrong = grown > allowed and score_trend([value for _, value in points]) >= SURE
    first, last = (median_of(name, part) for part in quarters(rows))
    return Trend(name, first, last, grown, allowed, wrong)


def score_trend(values: list[float]) -> float:
    """Return by how many standard deviations more pairs rise than fall (Mann, Kendall)."""
    count = len(values)
    rising = sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2))
    spread = sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return (rising - 1) / spread if rising > 0 else 0.0


def find_drift(name: str, rows: list[dict[str, float]]) -> Trend:
    """Return how many times as much a value is in the last quarter as in the second, beside a fixed piece of work."""
    first, last = ([row[name] for row in part if name in row] for part in quarters(rows))
    work = [median_of(OF_WORK.get(name, ""), part) for part in quarters(rows)]
    slower = max(work[1] / work[0], 1.0) if work[0] else 1.0
    before, after = (median(values) if values else 0.0 for values in (first, last))
    times, (most, least) = (after / before / slower if before > 0 else 1.0), DRIFT[name]
    wrong = times > most and after - before * slower > least and score_shift(first, last, slower) >= SURE
    return Trend(name, before, after, times, most, wrong)


def score_shift(first: list[float], last: list[float], slower: float) -> float:
    """Return by how many standard deviations more pairs of a value of each rise than fall (Mann, Whitney)."""
    pairs = len(first) * len(last)
    rising = sum((later / slower > earlier) - (later / slower < earlier) for earlier in first for later in last)
    return rising / 2 / sqrt(pairs * (len(first) + len(last) + 1) / 12) if pairs else 0.0


def quarters(rows: list[dict[str, float]]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return the second and the last quarter."""
    length = len(rows) // 4
    return rows[length:2 * length], rows[-length:]


def median_of(name: str, rows: list[dict[str, float]]) -> float:
    """Return the median of a value."""
    return median([row[name] for row in rows if name in row] or [0.0])


def list_rows(trends: list[Trend]) -> list[list[str]]:
    """Return trends as the rows of a table."""
    return [[trend.name, f"{trend.first:,.4g}", f"{trend.last:,.4g}", f"{trend.change:,.4g}", f"{trend.allowed:,.4g}",
             "grows" if trend.wrong else "as it was"] for trend in trends]
