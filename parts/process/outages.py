"""An outage in the log: one line every few seconds instead of a traceback for each call that it stops."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from asyncgate.parts.model.errors import GateError

OFTEN = {"often": True}     # `extra` of a record that an outage writes again and again
EVERY_SECONDS = 10.0
DRIVERS = {"asyncpg.pool"}  # what they log are attempts to reach the database again
REPEATED = {"Exceeded concurrency limit."}      # what uvicorn says of each request that it turns away


class Sparse(logging.Filter):
    """Lets an outage through once every few seconds, and says how many lines like it were left out.

    An outage is what a record marked OFTEN tells, a server that is full, and a failure whose error is a 503: that is
    told without its traceback, because its cause was logged where it was found.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.clock = clock
        self.last: dict[tuple[str, str], tuple[float, int]] = {}   # by logger and text: when, and left out since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is to be written."""
        error = record.exc_info[1] if record.exc_info else None
        away = (isinstance(error, GateError) and error.status == 503) or record.name in DRIVERS
        if not away and not getattr(record, "often", False) and record.msg not in REPEATED:
            return True
        kind, now = (record.name, str(record.msg)), self.clock()
        before, left_out = self.last.get(kind, (now - EVERY_SECONDS, 0))
        if now - before < EVERY_SECONDS:
            self.last[kind] = before, left_out + 1
            return False
        self.last[kind] = now, 0
        said = record.getMessage() + (f": {error}" if away and error else "")
        record.msg, record.args = said + (f" ({left_out} more like it)" if left_out else ""), ()
        if away:
            record.exc_info = record.exc_text = None
        return True
