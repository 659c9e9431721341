"""What is counted: own integers and buckets, because a labelled counter of a library costs ten times as much."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

Counts = defaultdict[tuple[str, ...], int]      # by the values of the labels

OTHER = "other"
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LONG = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class Buckets:
    """A histogram: how many values lie in each bucket, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count one value; a bound belongs to the bucket below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulate(self) -> list[tuple[str, float]]:
        """Return how many values each bound has below it, as Prometheus wants them."""
        below, buckets = 0, list[tuple[str, float]]()
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            buckets.append((bound, below))
        return buckets


Histograms = defaultdict[tuple[str, ...], Buckets]


def histograms(bounds: tuple[float, ...]) -> Histograms:
    """Return histograms by the values of their labels."""
    return defaultdict(lambda: Buckets(bounds))


class Names:
    """The first names that come keep their own line; what comes later is "other", so that no caller can add lines."""

    def __init__(self, most: int) -> None:
        self.most, self.known = most, dict[str, tuple[str]]()

    def label(self, name: str) -> tuple[str]:
        """Return the labels under which a name is counted."""
        if (known := self.known.get(name)) is not None:
            return known
        if len(self.known) >= self.most:
            return (OTHER,)
        return self.known.setdefault(name, (name,))


class Numbers:
    """Everything that a gate counts for Prometheus, from its start on."""

    def __init__(self, most_types: int) -> None:
        self.types = Names(most_types)
        self.requests: Counts = defaultdict(int)            # face, operation, status class
        self.durations = histograms(SHORT)                  # operation
        self.refusals: Counts = defaultdict(int)            # operation, code
        self.claims: Counts = defaultdict(int)              # result
        self.claim_durations = histograms(SHORT)            # result
        self.created: Counts = defaultdict(int)             # type
        self.ended: Counts = defaultdict(int)               # type, status
        self.held: Counts = defaultdict(int)                # type
        self.waits = histograms(LONG)                       # type
        self.granted: Counts = defaultdict(int)             # type
        self.leases_ended: Counts = defaultdict(int)        # type, ending
        self.holds = histograms(LONG)                       # by type, how long its leases were held
        self.receipts: Counts = defaultdict(int)            # receipt type
        self.posted: Counts = defaultdict(int)              # of the outbox
        self.audited: Counts = defaultdict(int)             # severity
        # These are shown from the start: Prometheus sees no increase of what was absent before, and an alert must see
        # the first event that is given up, and the first batch that is not committed.
        self.deliveries: Counts = defaultdict(int, {(result,): 0 for result in ("delivered", "failed", "parked")})
        self.delays = histograms(LONG)                      # from when an event was due to its delivery
        self.delays[()] = Buckets(LONG)
        self.database_errors: Counts = defaultdict(int, {(kind,): 0 for kind in ("unavailable", "refused", "unknown")})
        self.sizes = histograms(SIZES)
        self.stages = histograms(SHORT)                     # stage
        self.lateness = histograms(SHORT)                   # of the event loop
