"""Pauses: what gets no new leases for a while.  A batch with claims loads them, and decides by its own `now`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import msgspec
from msgspec import Struct

from asyncgate.parts.model import stored


class Pause(Struct, frozen=True, omit_defaults=True):
    """A type, a lane (a type and capabilities), a worker, or the whole tenant (none of them) that is paused."""

    since: float
    by_kind: str
    by_id: str
    type: str | None = None
    capabilities: tuple[str, ...] | None = None     # sorted
    worker: str | None = None
    until: float | None = None
    reason: str | None = None

    @property
    def target(self) -> tuple[str | None, tuple[str, ...] | None, str | None]:
        """Return what is paused."""
        return self.type, self.capabilities, self.worker

    def stops_worker(self, worker_id: str) -> bool:
        """Whether a worker gets no lease at all."""
        return self.worker == worker_id if self.worker else self.type is None

    def stops_lane(self, type: str, needed: frozenset[str]) -> bool:
        """Whether no task of a lane is leased to anybody."""
        return (self.worker is None and self.type in (None, type)
                and (self.capabilities is None or needed == frozenset(self.capabilities)))


@lru_cache(256)
def decode_pauses(listed: str) -> tuple[Pause, ...]:
    """Decode the stored pauses of a tenant."""
    return msgspec.json.decode(listed, type=tuple[Pause, ...])


def encode_pauses(pauses: Iterable[Pause]) -> stored.Pauses:
    """Return pauses as they are stored."""
    return stored.Pauses(msgspec.json.encode(tuple(pauses)).decode())


def find_pauses(row: stored.Pauses | None, now: float) -> tuple[Pause, ...]:
    """Return the pauses that have not ended, in the order in which they began."""
    if row is None:
        return ()
    return tuple([pause for pause in decode_pauses(row.listed) if pause.until is None or pause.until > now])
