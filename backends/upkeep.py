"""Upkeep: the gate's own work, in loops over what is stored.

It sweeps lost leases, says that this process lives, and writes down who was here.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict

from asyncgate import Caller, Engine, Needs, Seen, Sweep
from asyncgate.backends.identity_audit import Pruner
from asyncgate.backends.ledger_upkeep import duties
from asyncgate.parts.duties import Duties, Duty
from asyncgate.parts.errors import GateError
from asyncgate.parts.stored import Presence, Schedule
from asyncgate.parts.wire import Principal

log = logging.getLogger("asyncgate")


class Upkeep(Duties):
    """The gate's own work: loops over stored state, never over workers (spec 15)."""

    SLICE = 100     # leases that one transaction takes back

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        interval = engine.settings.lease_sweep_interval_seconds
        super().__init__({"sweep": Duty(interval, self.sweep), "beat": Duty(interval, self.beat),
                          "presence": Duty(60.0, self.remember), "audit": Duty(3600.0, Pruner(engine).run),
                          **duties(engine)})

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        with contextlib.suppress(Exception):    # who was here in the last minute is not worth a failing stop
            await self.remember()

    async def sweep(self) -> int:
        """Take back what lost leases hold, in small transactions, until nothing new is overdue."""
        done, stuck, seen = 0, 0, set[tuple[str, str]]()
        while True:
            limit, now = self.SLICE + stuck, self.engine.backend.now()
            found = await self.engine.backend.overdue(now, self.engine.settings.lease_grace_seconds, limit)
            fresh = {(tenant, id) for tenant, tasks, schedules in found for id in (*tasks, *schedules)} - seen
            for tenant, tasks, schedules in found:
                done += await self._sweep(tenant, [id for id in tasks if (tenant, id) in fresh],
                                          [id for id in schedules if (tenant, id) in fresh])
            sizes = [len(ids) for _, *both in found for ids in both]
            if not fresh and max(sizes, default=0) < limit:
                return done
            # What comes back again is an anomaly that stays, or a row that cannot be swept: look past it.
            stuck, seen = sum(sizes) - len(fresh) if fresh else stuck + self.SLICE, seen | fresh

    async def _sweep(self, tenant_id: str, tasks: list[str], schedules: list[str]) -> int:
        """Sweep together; if that fails, one by one, so that one bad row never stops the others."""
        size = len(tasks) + len(schedules)
        try:
            if size:
                await self._write(tenant_id, Sweep(tasks=tasks, schedules=schedules))
            return size
        except GateError:
            if size == 1:
                log.exception("upkeep: cannot sweep %s", (tasks or schedules)[0])
                return 0
        alone = [await self._sweep(tenant_id, [task], []) for task in tasks]
        return sum(alone) + sum([await self._sweep(tenant_id, [], [schedule]) for schedule in schedules])

    async def beat(self) -> int:
        """Say that this process lives, or others would take over its tasks."""
        await self.engine.backend.beat()
        return 1

    async def remember(self) -> int:
        """Write down who was here since the last time."""
        seen, self.engine.sightings = self.engine.sightings, {}
        by_tenant: defaultdict[str, list[tuple[Principal, float, float]]] = defaultdict(list)
        for (tenant_id, kind, id, instance_id), (first, last) in seen.items():
            by_tenant[tenant_id].append((Principal(kind, id, instance_id), first, last))
        for tenant_id, sightings in by_tenant.items():
            await self._write(tenant_id, Seen(sightings=sightings))
        return len(seen)

    async def _write(self, tenant_id: str, ask: Sweep | Seen) -> None:
        caller = self.engine.itself(tenant_id)
        run, loads = (Engine.sweep, overdue) if isinstance(ask, Sweep) else (Engine.seen, sighted)
        await self.engine.write(run, loads, caller, ask)


def overdue(needs: Needs, caller: Caller, ask: Sweep) -> None:
    """Load what is to be swept."""
    needs.tasks.update(ask.tasks)
    needs.records.update((Schedule, (schedule_id,)) for schedule_id in ask.schedules)


def sighted(needs: Needs, caller: Caller, ask: Seen) -> None:
    """Load what is known of those who were here."""
    needs.records.update((Presence, (who.kind, who.id)) for who, _, _ in ask.sightings)
