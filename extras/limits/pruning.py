"""Deletes what turns and rates leave behind: 100,000 customers who come once must not stay."""

from __future__ import annotations

from typing import Any

from asyncgate import Engine
from asyncgate.parts.identity.notices import read_rows
from asyncgate.parts.model import stored_limits
from asyncgate.parts.model.limiting import NO_RULES, decode_rules
from asyncgate.parts.operating.retention import drop_old, run_in_tenants

PRUNE_SECONDS = 3600.0
KEPT_SECONDS = 3600.0       # an unused window of a limit that has no such rate any more


class TurnPruner:
    """Deletes turns in which no task waits, and windows of rates that are over."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def run(self) -> int:
        """Go through all tenants; return how many rows were deleted."""
        return await run_in_tenants(self.engine, "limits", self._prune)

    async def _prune(self, tenant_id: str) -> int:
        rules = {row.name: decode_rules(row.rules) async for row in read_rows(
            self.engine, tenant_id, stored_limits.Limit)}

        def is_over(row: Any, now: float) -> bool:
            if isinstance(row, stored_limits.Turn):
                return row.stage == "idle"
            rate = rules.get(row.limit_name, NO_RULES).find_rate(row.limit_key)
            windows = 1.0 if rate is None else max(1.0, row.used / rate.count)     # what is too much is carried on
            over: bool = row.began + windows * (KEPT_SECONDS if rate is None else rate.seconds) <= now
            return over
        # Alone: a task that is being queued would open a turn that is deleted here.
        return sum([await drop_old(self.engine, tenant_id, kind, is_over, alone=True)
                    for kind in (stored_limits.Turn, stored_limits.RateUse)])
