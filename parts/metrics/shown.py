"""What /metrics shows: one table of names, kinds, labels and words, and the numbers behind each line of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from asyncgate import __version__
from asyncgate.parts.metrics.numbers import Buckets

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

    from asyncgate import Engine
    from asyncgate.parts.identity.limits import Limits
    from asyncgate.parts.metrics.counting import Metrics
    from asyncgate.parts.process.duties import Duty

Values = Mapping[tuple[str, ...], float | Buckets]


class Sources(Struct):
    """Where the numbers of a gate are."""

    families: Sequence[Family]
    metrics: Metrics
    engine: Engine
    limits: Limits
    duties: Mapping[str, Duty]


class Family(Struct, frozen=True):
    """One metric: how it is called, what it means, and where its numbers are."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    says: str
    labels: tuple[str, ...]
    read: Callable[[Sources], Values]


def counted(name: str) -> Callable[[Sources], Values]:
    """Return what reads one member of `Numbers`."""
    def read(sources: Sources) -> Values:
        values: Values = getattr(sources.metrics.numbers, name)
        return dict(values)
    return read


def per_duty(number: Callable[[Duty], float]) -> Callable[[Sources], Values]:
    """Return what reads one number of each upkeep job."""
    return lambda sources: {(name,): number(duty) for name, duty in sources.duties.items()}


def find_last_run(sources: Sources) -> Values:
    """Return when each upkeep job began its last run."""
    return {(name,): at.timestamp() for name, duty in sources.duties.items() if (at := duty.last_run_at) is not None}


def count_in_queues(sources: Sources) -> Values:
    """Return how many tasks the queues of each type had at the last look; a type that was ever counted has a line."""
    names = sources.metrics.numbers.types
    counts: dict[tuple[str, ...], float] = defaultdict(float)
    for depth in sources.metrics.depths:
        for state, count in (("queued", depth.queued), ("held", depth.held), ("leased", depth.leased)):
            counts[*names.label(depth.type), state] += count
    for name in names.known:
        counts[name, "queued"] += 0
    return counts


def find_oldest_waits(sources: Sources) -> Values:
    """Return how long the oldest claimable task of each type waits; 0 if none does."""
    names, now = sources.metrics.numbers.types, sources.engine.backend.now()
    waits: dict[tuple[str, ...], float] = {(name,): 0.0 for name in names.known}
    for depth in sources.metrics.depths:
        label = names.label(depth.type)
        waits[label] = max(waits.get(label, 0.0), now - depth.oldest_at if depth.oldest_at is not None else 0.0)
    return waits


def one(number: Callable[[Sources], float]) -> Callable[[Sources], Values]:
    """Return what reads a number without labels."""
    return lambda sources: {(): number(sources)}


FAMILIES = (
    Family("asyncgate_info", "gauge", "Version and name of this gate; the value is always 1.", ("version", "gate"),
           lambda sources: {(__version__, sources.engine.instance): 1}),
    Family("asyncgate_requests_total", "counter",
           "Calls that were answered; a refused tool call has the status that REST gives it.",
           ("face", "operation", "status"), counted("requests")),
    Family("asyncgate_request_duration_seconds", "histogram",
           "Time from a call's arrival to its answer, with the time that it waited on purpose.", ("operation",),
           counted("durations")),
    Family("asyncgate_refusals_total", "counter",
           "Calls that were refused or failed, by the code of their error; rate_limit_exceeded and quota_exceeded are "
           "limits.",
           ("operation", "code"), counted("refusals")),
    Family("asyncgate_claims_total", "counter", "Claims that were answered with tasks, with none, or refused.",
           ("result",), counted("claims")),
    Family("asyncgate_claim_duration_seconds", "histogram", "Time that claims took, with their waits.", ("result",),
           counted("claim_durations")),
    Family("asyncgate_claims_waiting", "gauge", "Claims that wait for a task now.", (),
           one(lambda sources: sources.engine.waiting.count)),
    Family("asyncgate_tasks_created_total", "counter", "Tasks that were created.", ("type",), counted("created")),
    Family("asyncgate_tasks_ended_total", "counter", "Tasks that reached a terminal status.", ("type", "status"),
           counted("ended")),
    Family("asyncgate_tasks_held_total", "counter", "Tasks that were put on hold when a lease of theirs ran out.",
           ("type",), counted("held")),
    Family("asyncgate_task_wait_seconds", "histogram",
           "Time from when a task may be claimed to its first lease, seen when it is leased.", ("type",),
           counted("waits")),
    Family("asyncgate_leases_granted_total", "counter", "Leases that were granted.", ("type",), counted("granted")),
    Family("asyncgate_leases_ended_total", "counter",
           "Leases that ended: completed, failed, expired, released or canceled.", ("type", "ending"),
           counted("leases_ended")),
    Family("asyncgate_lease_held_seconds", "histogram", "Time from a lease's grant to its end.", ("type",),
           counted("holds")),
    Family("asyncgate_queue_tasks", "gauge",
           "Tasks of the whole database that are queued (also those whose time has not come), held or leased; looked "
           "at every 15 seconds, not at a scrape.", ("type", "state"), count_in_queues),
    Family("asyncgate_queue_oldest_seconds", "gauge",
           "How long the oldest task that may be claimed has been waiting, in the whole database; looked at every 15 "
           "seconds.", ("type",), find_oldest_waits),
    Family("asyncgate_leases_overdue", "gauge",
           "Leases of the whole database that have expired and wait for the sweep, 10,000 at most; looked at every 15 "
           "seconds.", (), lambda sources: {} if sources.metrics.overdue is None else {(): sources.metrics.overdue}),
    Family("asyncgate_receipts_total", "counter", "Receipts that were written.", ("type",), counted("receipts")),
    Family("asyncgate_audit_lines_total", "counter", "Lines that were added to the audit log.", ("severity",),
           counted("audited")),
    Family("asyncgate_webhook_deliveries_total", "counter",
           "Events of webhooks that were delivered, that failed and wait for another attempt, or that were given up "
           "(parked).", ("result",), counted("deliveries")),
    Family("asyncgate_webhook_delay_seconds", "histogram",
           "Time from when an event of a webhook was due to its delivery, with the pauses between attempts.", (),
           counted("delays")),
    Family("asyncgate_commits_total", "counter", "Batches of writes that were committed.", (),
           one(lambda sources: sum(sources.metrics.sizes.counts))),
    Family("asyncgate_batch_writes", "histogram", "Writes that shared one batch.", (), counted("sizes")),
    Family("asyncgate_batch_stage_seconds", "histogram",
           "Time that a committed batch spent on loading its rows, deciding, and saving with the commit.", ("stage",),
           counted("stages")),
    Family("asyncgate_database_errors_total", "counter",
           "Batches that were not committed: unavailable, refused by the database, or unknown, which may be saved.",
           ("kind",), counted("database_errors")),
    Family("asyncgate_batches_running", "gauge", "Batches that are in the database now.", (),
           one(lambda sources: len(sources.engine.batches.flights))),
    Family("asyncgate_writes_waiting", "gauge", "Writes that wait for the next batch now.", (),
           one(lambda sources: sum(map(len, list(sources.engine.batches.waiting.values()))))),
    Family("asyncgate_upkeep_runs_total", "counter", "Runs of the gate's own jobs.", ("duty",),
           per_duty(lambda duty: duty.runs)),
    Family("asyncgate_upkeep_failures_total", "counter", "Runs of the gate's own jobs that failed.", ("duty",),
           per_duty(lambda duty: duty.failures)),
    Family("asyncgate_upkeep_done_total", "counter",
           "What the gate's own jobs have done: tasks swept, receipts sealed or archived, and so on.", ("duty",),
           per_duty(lambda duty: duty.done)),
    Family("asyncgate_upkeep_last_run_timestamp_seconds", "gauge", "When a job of the gate began its last run.",
           ("duty",), find_last_run),
    Family("asyncgate_limits_degraded", "gauge", "1 while the shared store of rate limits does not answer, else 0.", (),
           one(lambda sources: sources.limits.degraded)),
    Family("asyncgate_event_loop_delay_seconds", "histogram",
           "How late the event loop ran a timer; every half second.", (), counted("lateness")),
)


class Shown:
    """The collector: it makes the library's families from the gate's own numbers when somebody looks."""

    def __init__(self, sources: Sources) -> None:
        from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR
        self.sources = sources
        self.process: tuple[Collector, ...] = (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR)

    def collect(self) -> Iterator[Metric]:
        """Yield every family, those of the process last."""
        for family in self.sources.families:
            yield show_family(family, family.read(self.sources))
        for collector in self.process:
            yield from collector.collect()


def show_family(family: Family, values: Values) -> Metric:
    """Return a family as the library has it."""
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    if family.kind == "histogram":
        shown = HistogramMetricFamily(family.name, family.says, labels=family.labels)
        for labels, value in values.items():
            if isinstance(value, Buckets):
                shown.add_metric(labels, value.cumulate(), value.sum)
        return shown
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    plain = kind(family.name, family.says, labels=family.labels)
    for labels, value in values.items():
        if not isinstance(value, Buckets):
            plain.add_metric(labels, value)
    return plain
