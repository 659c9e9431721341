"""The extensions that the settings enable, for every program that opens the database."""

from __future__ import annotations

from asyncgate import Engine
from asyncgate.backends import Backend
from asyncgate.parts.identity.quotas import Quotas
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.receipts.escalation import Escalation


def engine_over(backend: Backend, settings: Settings) -> Engine:
    """Return an engine with quotas and escalation, each if the settings enable it."""
    engine = Engine(backend, settings)
    if settings.security.rate_limiting.enabled:
        engine.extend(Quotas(engine))
    if settings.escalation.enabled:
        engine.extend(Escalation(engine))
    return engine
