"""What a ledger joins to the gate."""

from __future__ import annotations

import contextlib
from functools import partial

from starlette.routing import Route

from asyncgate import Engine
from asyncgate.extras.ledger import find_ledger
from asyncgate.extras.ledger.counted import FAMILIES
from asyncgate.parts.extras import Extra, Opening
from asyncgate.parts.identity.guard import Guard
from asyncgate.parts.metrics.counting import Metrics
from asyncgate.parts.process.duties import Duty
from asyncgate.parts.receipts.sealing import ledger_profile


def join_ledger(gate: Opening) -> list[Route]:
    """Have a gate send its receipts to the ledger in the settings, if they name one; it has no paths for that."""
    if gate.settings.receipt_mode != "standalone":
        gate.when_opened.append(add_ledger)
    return []


def add_ledger(engine: Engine, guard: Guard) -> None:
    """Add the ledger to an engine, behind what measures the database alone."""
    from asyncgate.extras.ledger.outbox import Ledger  # it imports the HTTP client, which is large
    engine.extend(ledger := Ledger(engine))
    if (metrics := engine.find_extension(Metrics)) is not None:
        metrics.looks.append(partial(ledger.sender.lag, None))


def list_duties(engine: Engine) -> dict[str, Duty]:
    """Return the job that compares the gate with its ledger, if the ledger is of a kind that can be asked."""
    every = engine.settings.ledger.compare_interval_seconds
    if not every or ledger_profile(engine.settings) not in ("memorygate", "receiptgate"):
        return {}
    from asyncgate.extras.ledger.comparing import Comparer  # it imports the HTTP client, which is large
    comparer = Comparer(engine)
    return {"comparison": Duty(every, comparer.run, comparer.alarm)}


COMMANDS = {"ledger": "serving", "rebuild": "recovery", "reconcile": "recovery", "receipts home": "moving",
            "receipts push": "moving"}
EXTRA = Extra(routes=join_ledger, duties=list_duties, families=FAMILIES,
              beside=lambda engine: find_ledger(engine) or contextlib.nullcontext(),
              commands={name: f"asyncgate.extras.ledger.commands.{module}" for name, module in COMMANDS.items()})
