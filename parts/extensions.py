"""The extensions that the settings enable, for every program that opens the database."""

from __future__ import annotations

from asyncgate import Engine, Extension
from asyncgate.backends import Backend
from asyncgate.parts.extras import find_extras
from asyncgate.parts.identity.budgets import Budgets
from asyncgate.parts.identity.metering import CallMeter
from asyncgate.parts.identity.quotas import OwnLimits, Quotas
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.operating.pausing import Pausing
from asyncgate.parts.operating.traffic import TrafficCounter
from asyncgate.parts.receipts.escalation import Escalation


def engine_over(backend: Backend, settings: Settings) -> Engine:
    """Return an engine with pauses, counts and budgets; with quotas and escalation if the settings enable them.

    The extras that are installed join theirs.
    """
    engine = Engine(backend, settings)
    extensions: list[Extension] = [Pausing(engine), TrafficCounter(engine), CallMeter(engine), Budgets(engine)]
    if settings.security.rate_limiting.enabled:
        extensions += [Quotas(engine), OwnLimits(settings)]
    if settings.escalation.enabled:
        extensions.append(Escalation(engine))
    for extra in find_extras().values():
        extensions += extra.extensions(engine)
    engine.extend(*extensions)      # at once: to join them takes more than to make them
    return engine
