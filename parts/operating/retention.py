"""Forgets rows that nobody needs any more, of the kinds whose card names the last moment of a row."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from asyncgate import Engine, Work
from asyncgate.parts.identity.notices import read_rows
from asyncgate.parts.model import stored
from asyncgate.parts.model.cards import CARDS
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.settings import Settings

RETENTION_SECONDS = 6 * 3600.0      # between two runs
MOST_FORGOTTEN = 500                # rows that one transaction deletes
KEPT = [kind for kind, card in CARDS.items() if card.last_moment]


def is_old(row: Any, settings: Settings, now: float) -> bool:
    """Whether a row is not needed any more; one that has no last moment yet stays."""
    card = CARDS[type(row)]
    (days,) = card.lifetime.list_settings()
    last = getattr(row, card.last_moment)
    return last is not None and last + getattr(settings, days) * DAY_SECONDS <= now


class RowPruner:
    """Deletes old rows of all tenants, in the one process that leads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def run(self) -> int:
        """Delete what is old; return how many rows."""
        if not await self.engine.leads("retention"):
            return 0
        return sum([await self.prune(tenant_id, kind) for tenant_id in await self.engine.backend.tenants()
                    for kind in KEPT])

    async def prune(self, tenant_id: str, kind: type[Struct]) -> int:
        """Delete the old rows of a kind; return how many."""
        settings, now = self.engine.settings, self.engine.backend.now()
        old = [stored.key_of(row) async for row in read_rows(self.engine, tenant_id, kind)
               if is_old(row, settings, now)]
        return sum([await self._drop(tenant_id, kind, old[at:at + MOST_FORGOTTEN])
                    for at in range(0, len(old), MOST_FORGOTTEN)])

    async def _drop(self, tenant_id: str, kind: type[Struct], keys: list[tuple[str, ...]]) -> int:
        def drop(work: Work) -> int:
            # A row may have changed since it was read: the principal may just have called again.
            rows = [row for key in keys if (row := work.find_record(kind, *key)) is not None
                    and is_old(row, self.engine.settings, work.now)]
            for row in rows:
                work.drop_record(kind, *stored.key_of(row))
            return len(rows)
        return await self.engine.change(tenant_id, drop, *((kind, key) for key in keys))
