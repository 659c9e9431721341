"""Deletes what turns and rates leave behind: 100,000 customers who come once must not stay."""

from __future__ import annotations

from typing import Any

from asyncgate import Caller, Engine, Needs, Work
from asyncgate.parts.identity.notices import read_rows
from asyncgate.parts.model import stored, stored_limits, wire
from asyncgate.parts.model.limiting import NO_RULES, decode_rules

PRUNE_SECONDS = 3600.0
MOST_PRUNED = 500           # rows that one transaction deletes
KEPT_SECONDS = 3600.0       # an unused window of a limit that has no such rate any more


class TurnPruner:
    """Deletes turns in which no task waits, and windows of rates that are over, in the one process that leads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def run(self) -> int:
        """Go through all tenants; return how many rows were deleted."""
        if not await self.engine.leads("limits"):
            return 0
        return sum([await self._prune(tenant_id, kind) for tenant_id in await self.engine.backend.tenants()
                    for kind in (stored_limits.Turn, stored_limits.RateUse)])

    async def _prune(self, tenant_id: str, kind: Any) -> int:
        rules = {row.name: decode_rules(row.rules) async for row in read_rows(
            self.engine, tenant_id, stored_limits.Limit)}
        now = self.engine.backend.now()

        def is_over(row: Any) -> bool:
            if isinstance(row, stored_limits.Turn):
                return row.stage == "idle"
            rate = rules.get(row.limit_name, NO_RULES).find_rate(row.limit_key)
            windows = 1.0 if rate is None else max(1.0, row.used / rate.count)     # what is too much is carried on
            over: bool = row.began + windows * (KEPT_SECONDS if rate is None else rate.seconds) <= now
            return over
        keys = [stored.key_of(row) async for row in read_rows(self.engine, tenant_id, kind) if is_over(row)]
        return sum([await self._drop(tenant_id, kind, keys[at:at + MOST_PRUNED], is_over)
                    for at in range(0, len(keys), MOST_PRUNED)])

    async def _drop(self, tenant_id: str, kind: Any, keys: list[tuple[str, ...]], is_over: Any) -> int:
        def load(needs: Needs, caller: Caller, ask: Any) -> None:
            needs.records |= {(kind, key) for key in keys}
            needs.alone = True      # a task that is being queued would open a turn that is deleted here

        def drop(engine: Engine, work: Work, caller: Caller, ask: Any) -> int:
            rows = [row for key in keys if (row := work.find_record(kind, *key)) is not None and is_over(row)]
            for row in rows:
                work.drop_record(kind, *stored.key_of(row))
            return len(rows)
        own = self.engine.make_own_caller(tenant_id)
        number: int = await self.engine.write(drop, load, own, wire.Ask())
        return number
