"""Which limit keeps a waiting task, read without a claim."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from asyncgate.parts.model import queries, stored, stored_limits
from asyncgate.parts.model.limiting import MOST_CONCURRENT, Full, Limiting, find_pattern, read_limits

if TYPE_CHECKING:
    from asyncgate.backends import Backend

MOST_HOLDERS = 5


class Reached(Struct, frozen=True):
    """A limit that keeps a task, and who holds it."""

    why: Full
    in_use: int
    holders: list[str]


class Look:
    """The rows of limits as they are stored, for one look at them."""

    def __init__(self, now: float) -> None:
        self.now, self.tasks = now, dict[str, stored.Task]()
        self.records: dict[tuple[type[Struct], tuple[str, ...]], Struct] = {}

    def find_record(self, kind: type[Any], *key: str) -> Any:
        """Return a record, if there is one."""
        return self.records.get((kind, key))

    def load_record(self, row: Struct) -> None:
        """Take in a record."""
        self.records[type(row), stored.key_of(row)] = row

    keep_record, find_loaded = load_record, find_record

    def drop_record(self, kind: type[Struct], *key: str) -> None:
        """Change nothing: a look has nothing to save."""


async def find_reached(backend: Backend, tenant_id: str, task: stored.Task, now: float) -> Reached | None:
    """Return the first limit that keeps a task, and the first tasks that count against it."""
    if (pattern := find_pattern(task.limits)) is None:
        return None
    rows = Look(now)
    limiting = Limiting(rows, dict.__setitem__)
    limiting.patterns = {task.lane: pattern}
    for name, key in read_limits(task.limits):
        if (limit := await backend.record(tenant_id, stored_limits.Limit, name)) is not None:
            rows.load_record(limit)
        if (use := await backend.record(tenant_id, stored_limits.RateUse, name, key)) is not None:
            rows.load_record(use)
        for of in (None, key):
            [(number, _)] = await backend.page(tenant_id, queries.LimitUse(name, MOST_CONCURRENT, of))
            limiting.held[name, of] = number
    if (why := limiting.find_closed(task.lane) or limiting.find_full(task.limits or "")) is None:
        return None
    after = "\0".join((why.name, why.key or "", ""))
    holds = await backend.page(tenant_id, queries.Rows(stored_limits.Hold, after, MOST_HOLDERS))
    return Reached(why, limiting.held[why.name, why.key], [
        hold.task_id for hold in holds if hold.limit_name == why.name and why.key in (None, hold.limit_key)])
