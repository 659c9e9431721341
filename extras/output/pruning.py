"""Upkeep's job for output: deletes that of tasks that have ended long enough ago."""

from __future__ import annotations

from asyncgate import Engine, Work
from asyncgate.parts.model import queries, stored, stored_output
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.operating.retention import run_in_tenants

ENTRIES_AT_ONCE = 200           # entries that one transaction deletes
BEHIND = "~"            # sorts behind every offset


class OutputPruner:
    """Deletes the output of tasks that ended output_retention_days ago."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def run(self) -> int:
        """Look at the first entry of each task that has some; return how many entries were deleted."""
        return await run_in_tenants(self.engine, "output", self._prune)

    async def _prune(self, tenant_id: str) -> int:
        done, after = 0, ""
        while rows := await self._read(tenant_id, after, 1):
            task_id = rows[0].task_id
            if await self._is_old(tenant_id, task_id):
                done += await self._drop(tenant_id, task_id)
            after = f"{task_id}\0{BEHIND}"
        return done

    async def _read(self, tenant_id: str, after: str, limit: int) -> list[stored_output.OutputEntry]:
        return await self.engine.backend.page(tenant_id, queries.Rows(stored_output.OutputEntry, after, limit))

    async def _is_old(self, tenant_id: str, task_id: str) -> bool:
        until = self.engine.backend.now() - self.engine.settings.output_retention_days * DAY_SECONDS
        snapshot = await self.engine.backend.task(tenant_id, task_id)
        return snapshot is None or (snapshot[0].completed_at is not None and snapshot[0].completed_at <= until)

    async def _drop(self, tenant_id: str, task_id: str) -> int:
        done, kind = 0, stored_output.OutputEntry
        while keys := [stored.key_of(row) for row in await self._read(tenant_id, f"{task_id}\0", ENTRIES_AT_ONCE)
                       if row.task_id == task_id]:
            def drop(work: Work, keys: list[tuple[str, ...]] = keys) -> None:
                for key in keys:
                    work.drop_record(kind, *key)
            await self.engine.change(tenant_id, drop, *((kind, key) for key in keys))
            done += len(keys)
        return done
