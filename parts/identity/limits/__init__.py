"""How rate limits are counted: in `memory` for one gate, in `redis` for several gates that share the limits.

A bucket has two limits, and a call must pass both.
- A token bucket holds `burst` calls and gains `limit` calls per window, evenly.  Alone it would let twice its limit
  through in one window: first its content, then its gain.
- A sliding counter adds the calls of the current window to those of the one before, weighted by how much of that one
  the last `window_seconds` still cover.  Windows begin at whole multiples of their length since 1970.  One window
  after the last charge no call counts any more, so no wait is longer than that.

A call is admitted only if every bucket has room for its cost; then all buckets are charged, in one step.  A refused
call costs nothing.  Everything is counted in integers (milliseconds, and calls times milliseconds), so both stores
give exactly the same results and the returned wait is exact.  A cost above the size of a bucket is always refused, with
a wait of one window.  If the clock is set back, time stands still until the clock has passed the last charge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncgate.parts.identity.buckets import UNLIMITED, Bucket, LimitVerdict
from asyncgate.parts.model.settings import Settings

__all__ = ["UNLIMITED", "Bucket", "LimitVerdict", "Limits", "judged", "open_limits"]


class Limits(Protocol):
    """A store of buckets.  It must not evict a bucket that was charged within the last two windows."""

    @property
    def degraded(self) -> bool:
        """Whether the shared store is unreachable, so that this gate counts alone or refuses."""

    async def take(self, buckets: Sequence[Bucket], cost: int = 1) -> LimitVerdict:
        """Charge all buckets or none, and return the state of the deciding one; buckets without a limit are skipped.

        Raises LimiterUnavailable if the store is unreachable and the settings forbid going on without it.
        """

    async def give_back(self, bucket: Bucket, cost: int) -> None:
        """Undo a charge for something that was not done."""

    async def close(self) -> None:
        """Close the store."""


def open_limits(settings: Settings, *, shared: bool = True) -> Limits:
    """Make the limits that the settings name; a shared store is connected at the first call."""
    if shared and settings.security.rate_limiting.storage == "redis":
        from asyncgate.parts.identity.limits import redis  # needs the extra `redis`
        return redis.open_limits(settings)
    from asyncgate.parts.identity.limits import memory  # imports this module
    return memory.open_limits(settings)


def verdict_of(of: Bucket, now: int, wait: int, remaining: int, full_in: int) -> LimitVerdict:
    """Make the verdict of the deciding bucket from its store's numbers; times in milliseconds."""
    reset_at = -(-(now + max(wait, full_in)) // 1000)
    return LimitVerdict(
        not wait, of.tier, of.key, of.limit, remaining, reset_at, -(-wait // 1000), of.window_seconds, wait)
