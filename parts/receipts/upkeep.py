"""The upkeep jobs for receipts: seals and the archive."""

from __future__ import annotations

import logging

from asyncgate import Engine
from asyncgate.parts.model import errors
from asyncgate.parts.process.duties import Duty
from asyncgate.parts.receipts import archive
from asyncgate.parts.receipts.sealing import Sealer, keeps_bodies

log = logging.getLogger("asyncgate.ledger")
RECEIPTS_PER_TURN = 5000      # receipts of one tenant, before the next tenant has its turn


def duties(engine: Engine) -> dict[str, Duty]:
    """Return the jobs by name; where another ledger keeps the receipts, it seals and archives them itself."""
    settings = engine.settings
    if not keeps_bodies(settings):
        return {}
    jobs = {"seal": Duty(settings.receipts.seal_interval_seconds, Sealer(engine).run)}
    if settings.archive.enabled:
        if not settings.archive.directory:
            raise errors.StartupError("archive.enabled needs archive.directory; set it to the folder for old receipts")
        jobs["archive"] = Duty(settings.archive.interval_seconds, Archiver(engine).run)
    return jobs


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
