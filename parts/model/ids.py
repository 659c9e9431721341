"""Ids: they order tasks and receipts by age, and nobody can guess a lease id.  And the salt of receipts."""

from __future__ import annotations

import hashlib
import os
import secrets
import uuid
from functools import lru_cache
from struct import unpack

MARKS = (1 << 20) - 1   # the last bits of an id: the mark of its tenant
STEP = (1 << 46) - 1    # random distance between ids of one moment: nobody can guess the next id
HIGHEST = chr(0x10FFFF)       # sorts behind every other, byte by byte too
LOW, VARIANT = (1 << 62) - 1, 1 << 63   # of the lower half of a UUID


class Ids:
    """Makes UUIDv7 ids that never run backwards in this process, and order by age to a quarter of a microsecond.

    So the ids of several processes on one database's clock order by age too.  The last 20 bits are the mark of a
    tenant: they show which tenants an id may belong to, without a search of every tenant.
    """

    def __init__(self) -> None:
        self._last = 0
        self._random: list[int] = []

    def after(self, seen: str | None) -> None:
        """Continue after an id of an earlier process, whatever the clock says now."""
        if seen:
            self._last = max(self._last, _packed(uuid.UUID(seen).int))

    def new(self, now: float, mark: int = 0, name: object = None) -> str:
        """Return the next id: 12 bits count fractions of the clock's millisecond (RFC 9562 6.2, method 3).

        `name` says what the id is for; only a strict gate, which decides a batch again, needs to know.
        """
        noise = self._draw() >> 2 & ~MARKS
        self._last = last = max(int(now * 4_096_000) << 62 | noise, (self._last | MARKS) + 1 + (noise & STEP))
        return _text(last >> 74 << 80 | (last >> 62 & 0xFFF | 0x7000) << 64 | last & LOW | VARIANT | mark)

    def lease(self, mark: int = 0, name: object = None) -> str:
        """Return a lease id, which nobody can guess: a UUIDv4, with 102 random bits."""
        return _text((self._draw() & ~0xF000 | 0x4000) << 64 | self._draw() & LOW & ~MARKS | VARIANT | mark)

    def _draw(self) -> int:
        """Return 64 random bits; the system is asked for 512 times as many, and each is used once."""
        try:
            return self._random.pop()
        except IndexError:
            self._random = list(unpack("512Q", os.urandom(4096)))
            return self._random.pop()


_salts: list[str] = []


def make_salt() -> str:
    """Return 96 random bits as text; the system is asked for 256 times as many, and each is used once."""
    try:
        return _salts.pop()
    except IndexError:
        many = secrets.token_urlsafe(256 * 12)
        _salts.extend([many[start:start + 16] for start in range(0, len(many), 16)])
        return _salts.pop()


def first_id(moment: float) -> str:
    """Return a text that is less than every id made from a moment on, and greater than those made before."""
    ms = int(moment * 1000) if moment > 0 else 0     # it may be minus infinity
    return f"{ms >> 16:08x}-{ms & 0xFFFF:04x}-7"


def span_ids(created_after: float | None, created_before: float | None,
             prefix: str | None) -> tuple[str | None, str | None]:
    """Return between which ids those lie that were made in a time and begin with a prefix: the first one belongs to it.

    Ids order by age, so an age is a range of ids, and so is a prefix.  None means no limit.
    """
    least = [*([] if created_after is None else [first_id(created_after)]), *([prefix] if prefix else [])]
    most = [*([] if created_before is None else [first_id(created_before)]), *([prefix + HIGHEST] if prefix else [])]
    return max(least, default=None), min(most, default=None)


@lru_cache(4096)
def mark_of(tenant_id: str) -> int:
    """Return the mark of a tenant, the same in every gate; two tenants share a mark once in a million."""
    return int.from_bytes(hashlib.blake2b(tenant_id.encode(), digest_size=4).digest(), "big") & MARKS


def mark_in(id: str) -> int | None:
    """Return the mark in an id, whoever made it; None if the id is not a UUID."""
    try:
        return uuid.UUID(id).int & MARKS
    except ValueError:
        return None


def _text(number: int) -> str:
    """Write a UUID."""
    digits = number.to_bytes(16, "big").hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _packed(number: int) -> int:
    """Remove version and variant from a UUIDv7, leaving 60 bits of time and 62 that count on."""
    return (number >> 80) << 74 | (number >> 64 & 0xFFF) << 62 | number & (1 << 62) - 1
