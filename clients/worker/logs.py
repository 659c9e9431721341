"""Log lines of a run, kept with the output of its task."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncgate.clients.worker.job import Job

OWN = ("asyncgate", "httpx2", "httpcore2")      # what keeping a line logs itself
FORM = "%(levelname)s %(name)s: %(message)s"

running: ContextVar[Job | None] = ContextVar("asyncgate_running", default=None)


class TaskLog(logging.Handler):
    """Gives each record to the job whose function logs it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, if a task function logs it."""
        job = running.get()
        if job is not None and record.name.partition(".")[0] not in OWN:
            with contextlib.suppress(Exception):        # the function goes on, whatever its log line is
                job.log(self.format(record))


@contextlib.contextmanager
def keep_logs(level: int | None) -> Iterator[None]:
    """Keep with each task what its function logs at this level and above; None keeps nothing."""
    if level is None:
        yield
        return
    handler = TaskLog(level)
    handler.setFormatter(logging.Formatter(FORM))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
