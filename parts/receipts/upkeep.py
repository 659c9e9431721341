"""The upkeep jobs for receipts: seals and the archive, and the comparison with the ledger."""

from __future__ import annotations

import logging

from asyncgate import Engine
from asyncgate.parts.model import errors
from asyncgate.parts.process.duties import Duty
from asyncgate.parts.receipts import archive
from asyncgate.parts.receipts.sealing import Sealer, keeps_bodies
from asyncgate.parts.receipts.sinks import ledger_profile

log = logging.getLogger("asyncgate.ledger")
RECEIPTS_PER_TURN = 5000      # receipts of one tenant, before the next tenant has its turn


def duties(engine: Engine) -> dict[str, Duty]:
    """Return the jobs by name; where another ledger keeps the receipts, it seals and archives them itself."""
    settings = engine.settings
    found = comparison(engine)
    if not keeps_bodies(settings):
        return found
    found["seal"] = Duty(settings.receipts.seal_interval_seconds, Sealer(engine).run)
    if settings.archive.enabled:
        if not settings.archive.directory:
            raise errors.StartupError("archive.enabled needs archive.directory; set it to the folder for old receipts")
        found["archive"] = Duty(settings.archive.interval_seconds, Archiver(engine).run)
    return found


def comparison(engine: Engine) -> dict[str, Duty]:
    """Return the job that compares the gate with its ledger, if the ledger is of a kind that can be asked."""
    every = engine.settings.ledger.compare_interval_seconds
    if not every or ledger_profile(engine.settings) not in ("memorygate", "receiptgate"):
        return {}
    from asyncgate.parts.receipts.comparing import Comparer  # it imports the HTTP client, which is large
    comparer = Comparer(engine)
    return {"comparison": Duty(every, comparer.run, comparer.alarm)}


class Archiver:
    """Runs the archive for all tenants, in turns."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def run(self) -> int:
        """Archive all that is old enough; return how many receipts moved and tasks were pruned."""
        if not await self.engine.leads("archive"):
            return 0        # another process does
        waiting, done = await self.engine.backend.tenants(), 0
        while waiting:
            more = []
            for tenant_id in waiting:
                moved = await archive.archive_receipts(self.engine, tenant_id, RECEIPTS_PER_TURN)
                done += moved.receipts + moved.pruned
                more += [tenant_id] * moved.more
                if moved.receipts or moved.pruned:
                    log.info("archived tenant=%s receipts=%d segments=%d tasks_pruned=%d", tenant_id, moved.receipts,
                             moved.segments, moved.pruned)
            waiting = more
        return done
