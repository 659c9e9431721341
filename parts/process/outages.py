"""Outages in the log: one line every few seconds instead of a traceback for each failed call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from asyncgate.parts.model import errors

OFTEN = {"often": True}     # `extra` of a record that an outage repeats
EVERY_SECONDS = 10.0
REPEATED = {"Exceeded concurrency limit."}      # uvicorn's text for each request above its limit


class Sparse(logging.Filter):
    """Logs each line of an outage once every few seconds, with the number of lines left out.

    Outages are records marked OFTEN, a server at its limit, errors with status 503, and broken connections of which
    nobody asks any more; these are logged without a traceback, because their cause was logged where it was found.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.clock = clock
        self.last: dict[tuple[str, str], tuple[float, int]] = {}   # by logger and text: when logged, lines left out

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write a record."""
        error = record.exc_info[1] if record.exc_info else None
        away = (isinstance(error, errors.GateError) and error.status == 503) or is_left(record, error)
        if not away and not getattr(record, "often", False) and record.msg not in REPEATED:
            return True
        kind, now = (record.name, str(record.msg)), self.clock()
        before, left_out = self.last.get(kind, (now - EVERY_SECONDS, 0))
        if now - before < EVERY_SECONDS:
            self.last[kind] = before, left_out + 1
            return False
        self.last[kind] = now, 0
        message = record.getMessage() + (f": {error}" if away and error else "")
        record.msg, record.args = message + (f" ({left_out} more like it)" if left_out else ""), ()
        if away:
            record.exc_info = record.exc_text = None
        return True


def is_left(record: logging.LogRecord, error: BaseException | None) -> bool:
    """Whether asyncio tells of a connection that broke after whoever used it had given it up, as a driver's may."""
    return record.name == "asyncio" and "never retrieved" in str(record.msg) and (
        isinstance(error, OSError | EOFError) or type(error).__module__.startswith("asyncpg."))
