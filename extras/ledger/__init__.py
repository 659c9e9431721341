"""The ledger: a gate sends its receipts to one, reads them there, compares, mends and moves; or it is one itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncgate import Engine

if TYPE_CHECKING:
    from asyncgate.extras.ledger.outbox import Ledger


def find_ledger(engine: Engine) -> Ledger | None:
    """Return what sends receipts to a ledger, if this gate does."""
    if engine.settings.receipt_mode == "standalone":
        return None
    from asyncgate.extras.ledger.outbox import Ledger  # it imports the HTTP client, which is large
    return engine.find_extension(Ledger)
