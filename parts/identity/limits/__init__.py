"""How calls are counted, and where: `memory` for one gate, `redis` for several that share the limits.

A bucket is two limits at once, and a call passes only where both let it.
- A token bucket holds `burst` calls and gains `limit` in a window, evenly.  Alone it would let twice its limit through
  in one window: first what it holds, then what it gains.
- A sliding counter adds the calls of the current window to those of the one before, weighted by how much of that one
  the last `window_seconds` still cover.  Windows begin at whole multiples of their length since 1970.  A window
  after the last charge all of them have slid out, so no wait is longer than that.

A call is admitted only if every bucket has room for its cost; then all of them are charged, in one step.  A refused
call costs nothing.  All is counted in integers (milliseconds, and calls times milliseconds), so that the stores agree
to the last digit and the wait they name is exact.  A cost above what a bucket ever holds is refused each time, and the
wait it is told is one window.  A clock that is set back stands still until it is past the last charge again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncgate.parts.identity.buckets import UNLIMITED, Bucket, LimitVerdict
from asyncgate.parts.model.settings import Settings

__all__ = ["UNLIMITED", "Bucket", "LimitVerdict", "Limits", "judged", "open_limits"]


class Limits(Protocol):
    """Where calls are counted.  It evicts no bucket that anybody has drawn from within the last two windows."""

    @property
    def degraded(self) -> bool:
        """Whether the shared store is unreachable, so that this gate counts alone or refuses."""

    async def take(self, buckets: Sequence[Bucket], cost: int = 1) -> LimitVerdict:
        """Charge all buckets or none, and return the state of the deciding one; buckets without a limit are skipped.

        Raises LimiterUnavailable when the store is lost and the settings say not to go on without it.
        """

    async def give_back(self, one: Bucket, cost: int) -> None:
        """Undo a charge for something that was not done."""

    async def close(self) -> None:
        """Close the store."""


def open_limits(settings: Settings, *, shared: bool = True) -> Limits:
    """Make the limits that the settings ask for; a shared store is reached for when the first call comes."""
    if shared and settings.security.rate_limiting.storage == "redis":
        from asyncgate.parts.identity.limits import redis  # whose library is an extra
        return redis.open_limits(settings)
    from asyncgate.parts.identity.limits import memory  # which is made of this module
    return memory.open_limits(settings)


def verdict_of(of: Bucket, now: int, wait: int, remaining: int, full_in: int) -> LimitVerdict:
    """Make the verdict of the deciding bucket from what its store counted; times in milliseconds."""
    reset_at = -(-(now + max(wait, full_in)) // 1000)
    return LimitVerdict(
        not wait, of.tier, of.key, of.limit, remaining, reset_at, -(-wait // 1000), of.window_seconds, wait)
