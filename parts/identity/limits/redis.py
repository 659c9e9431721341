"""Rate limits that several gates share, counted in Redis or Valkey: one EVALSHA per call, by the server's clock.

The script repeats the arithmetic of `memory`.  Its keys expire after two idle windows, when a bucket is full again.
The store must be a single primary: the keys of one call may be in several slots of a cluster.

If the store does not answer in `store_timeout_seconds`, which is the longest that any call waits for it, it counts as
unreachable.  Then each gate counts its own calls in memory against its part of the limits, or refuses them
(`on_store_failure`).  Calls then do not wait; in the background the store is tried again every RETRY_SECONDS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from asyncgate.parts.identity import limits
from asyncgate.parts.identity.limits.memory import MemoryLimits
from asyncgate.parts.model import errors
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.process.lookups import Lookups

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("asyncgate")

REDIS_PREFIX = "asyncgate:limits"
RETRY_SECONDS = 5.0
TRIAL = limits.Bucket("", "trial", 1_000_000, 1, 1_000_000)

# KEYS are the buckets.  ARGV is the time in milliseconds (empty: the server's; only tests give one), the cost, and for
# each bucket its limit, burst and window in milliseconds.  The answer is the deciding bucket, the time, the wait, the
# remaining calls, and the time until it is full.  Numbers are floats: integers are exact up to 2^53, and below that the
# quotient of two integers is never rounded to the next integer.
SCRIPT = """
local now, cost = tonumber(ARGV[1]), tonumber(ARGV[2])
if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000 + math.floor(time[2] / 1000)
end

local function refilled(kept, limit, burst, window)
    local full = math.min(limit, burst) * window
    local one = {limit = limit, window = window, full = full, tokens = full, at = now, last = now, current = 0,
                 previous = 0}
    if not kept then
        return one
    end
    local tokens, at, current, previous = string.match(kept, '(%d+) (%d+) (%d+) (%d+)')
    at = tonumber(at)
    one.at, one.last = math.max(now, at), at
    one.tokens = math.min(full, tonumber(tokens) + (one.at - at) * limit)
    local passed = math.floor(one.at / window) - math.floor(at / window)
    if one.at - at >= window then
        return one
    elseif passed == 0 then
        one.current, one.previous = tonumber(current), tonumber(previous)
    elseif passed == 1 then
        one.previous = tonumber(current)
    end
    return one
end

local function sliding(one)
    local window, room, passed = one.window, one.limit - one.current - cost, one.at % one.window
    if room < 0 then
        return 2 * window - passed - math.floor((one.limit - cost) * window / one.current)
    elseif one.previous * (window - passed) <= room * window then
        return 0
    end
    return window - passed - math.floor(room * window / one.previous)
end

local function wait_for(one)
    if cost * one.window > one.full then
        return one.window
    end
    local missing = cost * one.window - one.tokens
    local slid = math.min(sliding(one), one.window + one.last - one.at)
    local wait = math.max(missing > 0 and math.ceil(missing / one.limit) or 0, slid)
    return wait > 0 and wait + one.at - now or 0
end

local function remaining(one)
    local used = one.previous * (one.window - one.at % one.window) + one.current * one.window
    return math.max(0, math.floor(math.min(one.tokens, one.limit * one.window - used) / one.window))
end

local buckets, kept, deciding, wait = {}, redis.call('MGET', unpack(KEYS)), 1, -1
for i = 1, #KEYS do
    buckets[i] = refilled(kept[i], tonumber(ARGV[3 * i]), tonumber(ARGV[3 * i + 1]), tonumber(ARGV[3 * i + 2]))
    local its = wait_for(buckets[i])
    if its > wait then
        deciding, wait = i, its
    end
end

if wait == 0 then
    for i, one in ipairs(buckets) do
        one.tokens, one.current = one.tokens - cost * one.window, one.current + cost
        if cost > 0 then
            local text = string.format('%.0f %.0f %.0f %.0f', one.tokens, one.at, one.current, one.previous)
            redis.call('SET', KEYS[i], text, 'PX', 2 * one.window)
        end
        if remaining(one) < remaining(buckets[deciding]) then
            deciding = i
        end
    end
end

local one = buckets[deciding]
local full_in = one.limit > 0 and math.ceil((one.full - one.tokens) / one.limit) or one.window
return {deciding, now, wait, remaining(one), full_in}
"""

# KEYS is the bucket.  ARGV is its size and the returned tokens, each times its window, and the number of calls.
GIVE_BACK = """
local kept = redis.call('GET', KEYS[1])
if kept then
    local tokens, at, current, previous = string.match(kept, '(%d+) (%d+) (%d+) (%d+)')
    tokens = math.min(tonumber(ARGV[1]), tonumber(tokens) + tonumber(ARGV[2]))
    current = math.max(0, tonumber(current) - tonumber(ARGV[3]))
    local text = string.format('%.0f %.0f %.0f %.0f', tokens, tonumber(at), current, tonumber(previous))
    redis.call('SET', KEYS[1], text, 'KEEPTTL')
end
"""


def open_limits(settings: Settings) -> RedisLimits:
    """Make limits that all gates with the same Redis share."""
    limiting = settings.security.rate_limiting
    if not limiting.redis_url:
        raise errors.StartupError(
            "security.rate_limiting.storage is redis: set security.rate_limiting.redis_url, or memory")
    return RedisLimits(limiting.redis_url, gates=limiting.gates, timeout_seconds=limiting.store_timeout_seconds,
                       deny=limiting.on_store_failure == "deny")


def connect_redis(url: str, timeout_seconds: float) -> Redis:
    """Make a client that connects at its first use and never retries, because a lost call may have been counted."""
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ModuleNotFoundError:
        raise errors.StartupError("limits in Redis need the Redis client: pip install 'asyncgate[redis]'") from None
    try:
        # The limits set one timeout for a whole batch: the client's own timer for each answer costs 20 % of a call.
        return Redis.from_url(url.replace("valkey", "redis", 1) if url.startswith("valkey") else url, protocol=2,
                              retry=Retry(NoBackoff(), 0), socket_timeout=None,
                              socket_connect_timeout=timeout_seconds)
    except ValueError as error:
        raise errors.StartupError(f"security.rate_limiting.redis_url is invalid: {error}") from None


class RedisLimits:
    """Limits in Redis.  The calls of one turn of the event loop go out together, on one connection."""

    def __init__(self, url: str, *, gates: int = 1, deny: bool = False, timeout_seconds: float = 0.25,
                 retry_seconds: float = RETRY_SECONDS, clock: Callable[[], int] | None = None) -> None:
        self.redis, self.gates, self.deny = connect_redis(url, timeout_seconds), gates, deny
        self.timeout_seconds, self.retry_seconds, self.clock = timeout_seconds, retry_seconds, clock
        self.host, self.lookups = urlsplit(url).hostname, Lookups()
        self.alone, self.degraded, self.try_again_at = MemoryLimits(), False, 0.0
        self.sha = ""
        self.asked: list[tuple[list[Any], asyncio.Future[list[int]]]] = []
        self.sending: asyncio.Task[None] | None = None
        self.trying: asyncio.Task[None] | None = None

    async def take(self, buckets: Sequence[limits.Bucket], cost: int = 1) -> limits.LimitVerdict:
        limited = [bucket for bucket in buckets if bucket.limit >= 0]
        if not limited:
            return limits.UNLIMITED
        if not self.degraded:
            try:
                return await self._ask(limited, cost)
            except self._failures() as error:
                self._lose(error)
        if self.trying is None and time.monotonic() >= self.try_again_at:
            self.trying = asyncio.create_task(self._try())
        if self.deny:
            raise errors.LimiterUnavailable("the store of the rate limits does not answer; try again",
                                            retry_after=math.ceil(self.retry_seconds))
        return self.alone.take_now([divide_bucket(bucket, self.gates) for bucket in limited], cost)

    def _failures(self) -> tuple[type[Exception], ...]:
        from redis import RedisError
        return RedisError, OSError      # a TimeoutError is an OSError

    async def give_back(self, bucket: limits.Bucket, cost: int) -> None:
        window = bucket.window_seconds * 1000
        if self.degraded:
            return await self.alone.give_back(bucket, cost)
        with contextlib.suppress(*self._failures()):    # harmless: the bucket then has a little less left
            async with asyncio.timeout(self.timeout_seconds):
                await self.redis.eval(GIVE_BACK, 1, f"{REDIS_PREFIX}:{bucket.window_seconds}:{bucket.key}",
                                      min(bucket.limit, bucket.burst) * window, cost * window, cost)

    async def _ask(self, buckets: list[limits.Bucket], cost: int) -> limits.LimitVerdict:
        """Ask the store; the timeout covers the whole round trip."""
        asked: list[Any] = [len(buckets),
                            *(f"{REDIS_PREFIX}:{bucket.window_seconds}:{bucket.key}" for bucket in buckets)]
        asked += [self.clock() if self.clock else "", cost]
        for bucket in buckets:
            asked += [bucket.limit, bucket.burst, bucket.window_seconds * 1000]
        async with asyncio.timeout(self.timeout_seconds):
            deciding, *counted = await self._answer(asked)
        return limits.verdict_of(buckets[deciding - 1], *counted)

    def _answer(self, asked: list[Any]) -> asyncio.Future[list[int]]:
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self.asked.append((asked, answer))
        if self.sending is None:
            self.sending = asyncio.create_task(self._send())
        return answer

    async def _send(self) -> None:
        """Send all waiting calls at once, until none is left."""
        try:
            while asking := [(asked, answer) for asked, answer in self.asked if not answer.done()]:
                self.asked = []
                await self._send_all(asking)
        finally:
            self.sending = None

    async def _send_all(self, asking: list[tuple[list[Any], asyncio.Future[list[int]]]]) -> None:
        try:
            async with asyncio.timeout(self.timeout_seconds):
                outcomes = await self._evaluated([asked for asked, _ in asking])
        except self._failures() as error:
            outcomes = [error] * len(asking)
        for (_, answer), outcome in zip(asking, outcomes, strict=True):
            if isinstance(outcome, Exception) and not answer.done():
                answer.set_exception(outcome)
            elif not answer.done():
                answer.set_result(outcome)

    async def _evaluated(self, asking: list[list[Any]]) -> list[Any]:
        """Run the script for each call, loading it first if the server does not know it; no call runs twice."""
        from redis.exceptions import NoScriptError
        outcomes = await self._pipelined(asking) if self.sha else [NoScriptError()] * len(asking)
        unknown = [at for at, outcome in enumerate(outcomes) if isinstance(outcome, NoScriptError)]
        if unknown:
            self.sha = await self.redis.script_load(SCRIPT)
            for at, outcome in zip(unknown, await self._pipelined([asking[at] for at in unknown]), strict=True):
                outcomes[at] = outcome
        return outcomes

    async def _pipelined(self, asking: list[list[Any]]) -> list[Any]:
        pipeline = self.redis.pipeline(transaction=False)
        for asked in asking:
            pipeline.execute_command("EVALSHA", self.sha, *asked)
        return await pipeline.execute(raise_on_error=False)

    def _lose(self, error: Exception) -> None:
        if not self.degraded:
            instead = "calls are refused" if self.deny else f"1/{self.gates} of each limit is counted here"
            log.warning("the store of the rate limits is unreachable (%s); until it answers again %s",
                        str(error) or "no answer", instead)
            self.degraded, self.try_again_at = True, time.monotonic() + self.retry_seconds

    async def _try(self) -> None:
        """Check whether the store is back."""
        try:
            if self.host:       # in a thread of its own: a hanging name server must not take those of the database
                async with asyncio.timeout(self.timeout_seconds):
                    await self.lookups.resolve(self.host, 0)
            await self._ask([TRIAL], 1)
            self.degraded = False
            log.warning("the store of the rate limits answers again")
        except self._failures():
            self.try_again_at = time.monotonic() + self.retry_seconds
        finally:
            self.trying = None

    async def close(self) -> None:
        tasks = [task for task in (self.sending, self.trying) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.redis.aclose()


def divide_bucket(bucket: limits.Bucket, gates: int) -> limits.Bucket:
    """Return a gate's part of a bucket: at least one call, unless the limit is 0."""
    if gates == 1 or not bucket.limit:
        return bucket
    return msgspec.structs.replace(bucket, limit=max(1, bucket.limit // gates), burst=max(1, bucket.burst // gates))


if TYPE_CHECKING:
    _: type[limits.Limits] = RedisLimits
