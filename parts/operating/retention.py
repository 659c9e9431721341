"""Forgets rows that nobody needs any more, of the kinds whose card names the last moment of a row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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


async def run_in_tenants(engine: Engine, job: str, run: Callable[[str], Awaitable[int]]) -> int:
    """Run a job in each tenant, in the one process of many that leads it; return how much it has done."""
    if not await engine.leads(job):
        return 0        # another process does
    return sum([await run(tenant_id) for tenant_id in await engine.backend.tenants()])


async def drop_old(engine: Engine, tenant_id: str, kind: type[Struct], is_over: Callable[[Any, float], bool], *,
                   alone: bool = False) -> int:
    """Delete the rows of a kind that are over, `alone` beside no other batch; return how many."""
    now = engine.backend.now()
    keys = [stored.key_of(row) async for row in read_rows(engine, tenant_id, kind) if is_over(row, now)]

    async def drop_some(keys: list[tuple[str, ...]]) -> int:
        def drop(work: Work) -> int:
            # A row may have changed since it was read: the principal may just have called again.
            rows = [row for key in keys if (row := work.find_record(kind, *key)) is not None and is_over(row, work.now)]
            for row in rows:
                work.drop_record(kind, *stored.key_of(row))
            return len(rows)
        return await engine.change(tenant_id, drop, *((kind, key) for key in keys), alone=alone)
    return sum([await drop_some(keys[at:at + MOST_FORGOTTEN]) for at in range(0, len(keys), MOST_FORGOTTEN)])


class RowPruner:
    """Deletes old rows of all tenants."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def run(self) -> int:
        """Delete what is old; return how many rows."""
        return await run_in_tenants(self.engine, "retention", self._prune_tenant)

    async def _prune_tenant(self, tenant_id: str) -> int:
        return sum([await self.prune(tenant_id, kind) for kind in KEPT])

    async def prune(self, tenant_id: str, kind: type[Struct]) -> int:
        """Delete the old rows of a kind; return how many."""
        return await drop_old(self.engine, tenant_id, kind, lambda row, now: is_old(row, self.engine.settings, now))
