"""What an outage writes into the log: enough to see it, and not more."""

from __future__ import annotations

import logging
import sys

from asyncgate.parts.model.errors import DatabaseUnavailable
from asyncgate.parts.process.outages import EVERY_SECONDS, OFTEN, Sparse


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def record(text: str, *args: object, error: Exception | None = None, often: bool = False) -> logging.LogRecord:
    """Make a record as a logger would."""
    about = None
    if error is not None:
        try:
            raise error
        except Exception:
            about = sys.exc_info()
    return logging.getLogger("asyncgate").makeRecord(
        "asyncgate", logging.ERROR, "f.py", 1, text, args, about, extra=OFTEN if often else None)


def test_a_line_that_an_outage_repeats_is_written_every_few_seconds_with_the_number_left_out() -> None:
    clock = Clock()
    sparse = Sparse(clock)

    written = [sparse.filter(record("no answer to %s", n, often=True)) for n in range(100)]
    clock.now = EVERY_SECONDS
    later = record("no answer to %s", 100, often=True)

    assert written == [True] + [False] * 99
    assert sparse.filter(later)
    assert later.getMessage() == "no answer to 100 (99 more like it)"


def test_a_server_that_is_full_does_not_fill_the_log() -> None:
    sparse = Sparse(Clock())

    assert [sparse.filter(record("Exceeded concurrency limit.")) for _ in range(3)] == [True, False, False]


def test_a_503_is_told_without_its_traceback() -> None:
    line = record("upkeep: %s failed", "sweep", error=DatabaseUnavailable("the database does not answer"))

    assert Sparse(Clock()).filter(line)
    assert (line.getMessage(), line.exc_info) == ("upkeep: sweep failed: the database does not answer", None)


def test_a_connection_that_broke_after_it_was_given_up_is_a_line_without_a_traceback() -> None:
    left = record("Future exception was never retrieved", error=ConnectionResetError("the server has gone"))
    fault = record("Future exception was never retrieved", error=ValueError("a fault"))
    left.name = fault.name = "asyncio"
    sparse = Sparse(Clock())

    assert (sparse.filter(left), left.exc_info) == (True, None)
    assert left.getMessage() == "Future exception was never retrieved: the server has gone"
    assert sparse.filter(fault)
    assert fault.exc_info is not None


def test_any_other_failure_keeps_its_traceback_however_often_it_comes() -> None:
    sparse = Sparse(Clock())
    lines = [record("upkeep: %s failed", "sweep", error=ValueError("a fault")) for _ in range(3)]

    assert all(sparse.filter(line) and line.exc_info for line in lines)
