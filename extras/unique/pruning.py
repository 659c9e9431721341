"""Deletes keys that nobody holds any more: a key that is used once must not stay."""

from __future__ import annotations

from asyncgate import Engine, Work
from asyncgate.extras.unique.rules import list_holders
from asyncgate.parts.identity.notices import read_rows
from asyncgate.parts.model import stored_unique
from asyncgate.parts.operating.retention import run_in_tenants

PRUNE_SECONDS = 3600.0
KEYS_AT_ONCE = 100          # keys that one transaction looks at, with their tasks


class KeyPruner:
    """Deletes the keys whose tasks hold them no more."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def run(self) -> int:
        """Go through all tenants; return how many keys were deleted."""
        return await run_in_tenants(self.engine, "unique", self._prune)

    async def _prune(self, tenant_id: str) -> int:
        rows = [row async for row in read_rows(self.engine, tenant_id, stored_unique.UniqueKey)]
        return sum([await self._drop(tenant_id, rows[at:at + KEYS_AT_ONCE])
                    for at in range(0, len(rows), KEYS_AT_ONCE)])

    async def _drop(self, tenant_id: str, rows: list[stored_unique.UniqueKey]) -> int:
        def drop(work: Work) -> int:
            now = [work.find_record(stored_unique.UniqueKey, row.key_digest) for row in rows]
            free = [row for row in now if row is not None and not list_holders(work, row)]
            for row in free:
                work.drop_record(stored_unique.UniqueKey, row.key_digest)
            return len(free)
        keys = [(stored_unique.UniqueKey, (row.key_digest,)) for row in rows]
        tasks = {task_id for row in rows for task_id in (row.task_id, row.next_id) if task_id is not None}
        return await self.engine.change(tenant_id, drop, *keys, tasks=tasks)
