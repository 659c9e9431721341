"""Ids: they order tasks and receipts by age, and nobody can guess a lease's."""

from __future__ import annotations

import os
import uuid

STEP = (1 << 46) - 1    # random bits by which ids of one moment lie apart: nobody guesses the next one


class Ids:
    """Makes ids: UUIDv7 that never run backwards in this process, and order by age to a quarter of a microsecond.

    So the ids of several processes on one database's clock order by age too.
    """

    def __init__(self) -> None:
        self._last = 0

    def after(self, seen: str | None) -> None:
        """Continue behind an id of an earlier process, whatever the clock says now."""
        if seen:
            self._last = max(self._last, _packed(uuid.UUID(seen).int))

    def new(self, now: float) -> str:
        """Return the next id: 12 bits count the parts of the clock's millisecond (RFC 9562 6.2, 3)."""
        noise = int.from_bytes(os.urandom(8), "big") >> 2
        self._last = max(int(now * 4_096_000) << 62 | noise, self._last + (noise & STEP) + 1)
        high, low = self._last >> 62, self._last & (1 << 62) - 1
        text = f"{high >> 12:012x}7{high & 0xFFF:03x}{low | 1 << 63:016x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def lease(self) -> str:
        """Return a lease id, which nobody can guess."""
        return str(uuid.uuid4())


def _packed(number: int) -> int:
    """Take version and variant out of a UUIDv7, leaving 60 bits of time and 62 that count on."""
    return (number >> 80) << 74 | (number >> 64 & 0xFFF) << 62 | number & (1 << 62) - 1
