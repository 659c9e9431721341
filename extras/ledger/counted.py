"""What /metrics shows of the ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncgate.extras.ledger import find_ledger
from asyncgate.parts.metrics.shown import Family, Sources, Values

if TYPE_CHECKING:
    from asyncgate.extras.ledger.outbox import Ledger


def if_there(read: Callable[[Sources, Ledger], Values]) -> Callable[[Sources], Values]:
    """Return what reads numbers of a gate that has a ledger."""
    return lambda sources: read(sources, ledger) if (ledger := find_ledger(sources.engine)) else {}


def find_open_circuits(sources: Sources, ledger: Ledger) -> Values:
    """Return which circuit breakers keep calls from the ledger."""
    breakers = {"sending": ledger.sender.breaker, "reading": ledger.reading_breaker, "strict": ledger.strict_breaker}
    return {(name,): breaker.state != "closed" for name, breaker in breakers.items()}


def count_in_outbox(sources: Sources, ledger: Ledger) -> Values:
    """Return how many receipts wait in the outbox, and how many are parked, as of the last look."""
    looked_at, lag = ledger.sender.measured
    return {("waiting",): lag.waiting, ("parked",): lag.parked} if looked_at >= 0 else {}


def find_oldest_age(sources: Sources, ledger: Ledger) -> Values:
    """Return how long the oldest receipt waits, by the gate's clock; 0 if none does."""
    looked_at, lag = ledger.sender.measured
    if looked_at < 0:
        return {}
    return {(): max(sources.engine.backend.now() - lag.oldest_at, 0.0) if lag.oldest_at is not None else 0.0}


FAMILIES = (
    Family("asyncgate_ledger_posted_total", "counter", "Receipts that were put into the outbox for the ledger.", (),
           if_there(lambda sources, ledger: {(): 0, **sources.metrics.numbers.posted})),
    Family("asyncgate_ledger_answers_total", "counter", "Receipts that the ledger stored, refused or left unanswered.",
           ("result",), if_there(lambda sources, ledger: {
               (result,): count for result, count in ledger.sender.answers.items()})),
    Family("asyncgate_ledger_outbox_receipts", "gauge",
           "Receipts in the outbox; looked at every 15 seconds, not at a scrape.", ("state",),
           if_there(count_in_outbox)),
    Family("asyncgate_ledger_oldest_seconds", "gauge",
           "Age of the oldest receipt that waits for the ledger; looked at every 15 seconds.", (),
           if_there(find_oldest_age)),
    Family("asyncgate_ledger_circuit_open", "gauge",
           "1 while a circuit breaker keeps calls from the ledger or only probes it, else 0.", ("circuit",),
           if_there(find_open_circuits)),
    Family("asyncgate_ledger_compared_receipts_total", "counter",
           "Receipts that were compared with the ledger's, in the process that compares.", (),
           if_there(lambda sources, ledger: {(): ledger.compared.receipts})),
    Family("asyncgate_ledger_differences_total", "counter",
           "Differences that comparisons with the ledger found, by kind; one that lasts is found each time.", ("kind",),
           if_there(lambda sources, ledger: {(kind,): count for kind, count in ledger.compared.differences.items()})),
)
