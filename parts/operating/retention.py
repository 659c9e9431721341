"""Forgets rows that nobody needs any more: principals that have not called for long, and bulks that ended long ago."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from asyncgate import Engine, Work
from asyncgate.parts.identity.notices import read_rows
from asyncgate.parts.model import stored
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.settings import Settings

RETENTION_SECONDS = 6 * 3600.0      # between two runs
MOST_FORGOTTEN = 500                # rows that one transaction deletes


class Kept(Struct, frozen=True):
    """How long rows of a kind are kept after their last moment; one that has none yet stays."""

    kind: type[Struct]
    last_moment: Callable[[Any], float | None]
    days: Callable[[Settings], int]

    def is_old(self, row: Any, settings: Settings, now: float) -> bool:
        """Whether a row is not needed any more."""
        last = self.last_moment(row)
        return last is not None and last + self.days(settings) * DAY_SECONDS <= now


KEPT = (
    Kept(stored.Presence, lambda row: row.last_seen_at, lambda settings: settings.presence_retention_days),
    Kept(stored.Bulk, lambda row: row.ended_at, lambda settings: settings.bulk_retention_days),
)


class RowPruner:
    """Deletes old rows of all tenants, in the one process that leads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def run(self) -> int:
        """Delete what is old; return how many rows."""
        if not await self.engine.leads("retention"):
            return 0
        return sum([await self.prune(tenant_id, kept) for tenant_id in await self.engine.backend.tenants()
                    for kept in KEPT])

    async def prune(self, tenant_id: str, kept: Kept) -> int:
        """Delete the old rows of a kind; return how many."""
        settings, now = self.engine.settings, self.engine.backend.now()
        old = [stored.key_of(row) async for row in read_rows(self.engine, tenant_id, kept.kind)
               if kept.is_old(row, settings, now)]
        return sum([await self._drop(tenant_id, kept, old[at:at + MOST_FORGOTTEN])
                    for at in range(0, len(old), MOST_FORGOTTEN)])

    async def _drop(self, tenant_id: str, kept: Kept, keys: list[tuple[str, ...]]) -> int:
        def drop(work: Work) -> int:
            # A row may have changed since it was read: the principal may just have called again.
            rows = [row for key in keys if (row := work.find_record(kept.kind, *key)) is not None
                    and kept.is_old(row, self.engine.settings, work.now)]
            for row in rows:
                work.drop_record(kept.kind, *stored.key_of(row))
            return len(rows)
        return await self.engine.change(tenant_id, drop, *((kept.kind, key) for key in keys))
