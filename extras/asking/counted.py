"""What /metrics shows of questions."""

from __future__ import annotations

import contextlib

from asyncgate import Engine
from asyncgate.extras.asking.rules import Asking
from asyncgate.parts.metrics.counting import Metrics
from asyncgate.parts.metrics.shown import Family, Sources, Values


def watch(engine: Engine) -> contextlib.nullcontext[None]:
    """Look at questions whenever the gate looks at its queues."""
    metrics, asking = engine.find_extension(Metrics), engine.find_extension(Asking)
    if metrics is not None and asking is not None:
        metrics.looks.append(asking.look)
    return contextlib.nullcontext()


def count_waiting(sources: Sources) -> Values:
    """Return how many tasks waited for an answer at the last look."""
    asking = sources.engine.find_extension(Asking)
    return {} if asking is None or asking.waiting is None else {(): asking.waiting[0]}


def find_oldest(sources: Sources) -> Values:
    """Return how long the first of them waits; 0 if none does."""
    asking = sources.engine.find_extension(Asking)
    if asking is None or asking.waiting is None:
        return {}
    since = asking.waiting[1]
    return {(): 0.0 if since is None else max(sources.engine.backend.now() - since, 0.0)}


QUESTION_FAMILIES = (
    Family("asyncgate_unanswered_tasks", "gauge",
           "Tasks of the whole database that are on hold for an answer, 10,000 at most; looked at every 15 seconds.",
           (), count_waiting),
    Family("asyncgate_unanswered_oldest_seconds", "gauge",
           "How long the first of them has been waiting since it asked, or got a part of its answers; looked at "
           "every 15 seconds.", (), find_oldest))
