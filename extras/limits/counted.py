"""What /metrics shows of limits: by their names, of which the first `metrics.most_types` have lines of their own."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable

from asyncgate import Engine
from asyncgate.extras.limits.rules import RoomCalls
from asyncgate.parts.metrics.counting import Metrics
from asyncgate.parts.metrics.numbers import Names
from asyncgate.parts.metrics.shown import Family, Sources, Values
from asyncgate.parts.model import stored_limits


def watch(engine: Engine) -> contextlib.nullcontext[None]:
    """Look at limits whenever the gate looks at its queues."""
    metrics, limits = engine.find_extension(Metrics), engine.find_extension(RoomCalls)
    if metrics is not None and limits is not None:
        limits.names = Names(engine.settings.metrics.most_types)
        metrics.looks.append(limits.look)
    return contextlib.nullcontext()


def per_limit(number: Callable[[stored_limits.LimitDepth, float], float]) -> Callable[[Sources], Values]:
    """Return what reads one number of each limit, as it was at the last look."""
    def read(sources: Sources) -> Values:
        limits, now = sources.engine.find_extension(RoomCalls), sources.engine.backend.now()
        values: dict[tuple[str, ...], float] = defaultdict(float)
        if limits is None:
            return values
        for depth in limits.depths:
            if depth.is_set:
                values[limits.names.label(depth.name)] += number(depth, now)
        return values
    return read


def count_unset(sources: Sources) -> Values:
    """Return how many tasks waited at the last look that name a limit which nobody has set."""
    limits = sources.engine.find_extension(RoomCalls)
    return {} if limits is None else {(): sum(depth.waiting for depth in limits.depths if not depth.is_set)}


LIMIT_FAMILIES = (
    Family("asyncgate_limit_leases", "gauge",
           "Live leases of the whole database that count against a limit, 10,000 of each tenant at most; looked at "
           "every 15 seconds.", ("limit",), per_limit(lambda depth, now: depth.held)),
    Family("asyncgate_limit_waiting_tasks", "gauge",
           "Tasks that name a limit and wait, for it or for anything else; looked at every 15 seconds.", ("limit",),
           per_limit(lambda depth, now: depth.waiting)),
    Family("asyncgate_limit_stopped", "gauge",
           "1 (of those that share the line `other`: how many) while nothing of a limit is leased because it is "
           "stopped, else 0; looked at every 15 seconds.", ("limit",),
           per_limit(lambda depth, now: depth.stopped_until is not None and depth.stopped_until > now)),
    Family("asyncgate_limit_unset_tasks", "gauge",
           "Tasks that wait and name a limit which nobody has set, so that it keeps nothing; looked at every 15 "
           "seconds.", (), count_unset))
