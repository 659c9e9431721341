"""What upkeep does for the ledger, beside leases and schedules."""

from __future__ import annotations

from asyncgate import Duty, Engine
from asyncgate.backends.ledger_seals import Sealer


def duties(engine: Engine) -> dict[str, Duty]:
    """Return the jobs by name; where another ledger keeps the receipts, it seals them itself."""
    if engine.settings.receipt_mode != "standalone":
        return {}
    return {"seal": Duty(engine.settings.receipts.seal_interval_seconds, Sealer(engine).run)}
