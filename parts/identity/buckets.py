"""Rate limits: which buckets a call draws from, and the headers of its answer (spec 21.4).

Every call draws from up to four buckets: the server's, its tenant's, its principal's and its address's; one with many
items draws once for each.  Heartbeats
(`renew_lease`, `report_progress`) draw from buckets of their own, so that a worker can live on the free tier: five
heartbeats for each call are 5,000 an hour, of which one principal may use 80 percent, and ten leases that report every
ten seconds and are renewed every hundred need 3,960.  Ends of leases are counted and never refused (`Guard.meter`).
How a bucket fills and empties is described in `asyncgate.parts.identity.limits`.
"""

from __future__ import annotations

from urllib.parse import quote

from msgspec import Struct

from asyncgate.parts.model import errors, wire
from asyncgate.parts.model.connection import group_address
from asyncgate.parts.model.settings import Settings, Tier

HOUR, MINUTE = 3600, 60
MOST_CALL_SECONDS = 2**51 // 1000        # limit times window: Lua counts in floats, which are exact up to 2**53
TIER_NAMES = {"server": "Server", "ip": "Address", "tenant": "Tenant", "principal": "Principal"}
CALL_NAMES = {"api_calls": "API call", "heartbeats": "heartbeat", "anonymous": "anonymous call", "tasks": "task"}
WINDOW_UNITS = [("d", "day", 86_400), ("h", "hour", HOUR), ("m", "minute", MINUTE), ("s", "second", 1)]


class Bucket(Struct, frozen=True):
    """An allowance: `limit` calls in any window, at most `burst` of them at once; a limit of -1 means no limit."""

    tier: str
    key: str                # printable ASCII; it names the bucket in the store and to the caller
    limit: int
    window_seconds: int
    burst: int

    def __post_init__(self) -> None:
        if not (-1 <= self.limit <= MOST_CALL_SECONDS // self.window_seconds and self.burst >= min(self.limit, 0)):
            raise ValueError(f"{self.limit} in {self.window_seconds} s cannot be counted exactly")


class LimitVerdict(Struct, frozen=True):
    """Whether a call may pass, and the state of the deciding bucket: the emptiest, or the last to refill."""

    admitted: bool
    tier: str
    bucket: str
    limit: int
    remaining: int
    reset_at: int           # epoch seconds; when the bucket is full again
    retry_after: int        # whole seconds, at least `wait_ms`
    window_seconds: int
    wait_ms: int            # exact: an earlier call is refused, a call after this wait is admitted


UNLIMITED = LimitVerdict(True, "", "", -1, -1, 0, 0, 0, 0)


def buckets_for(settings: Settings, may: Tier | None, tenant_id: str | None, principal: wire.Principal | None,
                address: str, *, heartbeat: bool = False) -> list[Bucket]:
    """Return the buckets that a call draws from; without a tenant (no valid credential) the server's and the address's.

    The principal must come from the credential: a caller that chooses its own name could evade its limit.  Without
    `may` the tenant is exempt from all limits but the server's.
    """
    limiting, place = settings.security.rate_limiting, f"ip:{group_address(address)}"
    server = make_bucket("server", "server:api_calls", limiting.server_calls_per_minute, MINUTE)
    if tenant_id is None:
        return [server, make_bucket("ip", f"{place}:anonymous", limiting.anonymous_calls_per_minute, MINUTE)]
    if may is None:
        return [server]
    limit, what = may.api_calls_per_hour, "api_calls"
    if heartbeat:
        limit, what = percent_of(limit, 100 * limiting.heartbeat_factor), "heartbeats"
    buckets = [server, make_bucket("tenant", f"tenant:{tenant_id}:{what}", limit, HOUR)]
    if principal:
        name = f"principal:{tenant_id}:{principal.kind}:{quote(principal.id, safe='@')}:{what}"
        buckets.append(make_bucket("principal", name, percent_of(limit, limiting.principal_percent), HOUR))
    return [*buckets, make_bucket("ip", f"{place}:api_calls", limiting.address_calls_per_minute, MINUTE)]


def call_bucket(may: Tier, tenant_id: str) -> Bucket:
    """Return the bucket that all calls of a tenant are drawn from."""
    return make_bucket("tenant", f"tenant:{tenant_id}:api_calls", may.api_calls_per_hour, HOUR)


def task_bucket(may: Tier, tenant_id: str) -> Bucket:
    """Return the bucket that new tasks are drawn from, each one apart from the call that creates it (21.4.2)."""
    return make_bucket("tenant", f"tenant:{tenant_id}:tasks", may.tasks_per_hour, HOUR)


def make_bucket(tier: str, key: str, limit: int, window_seconds: int) -> Bucket:
    """Make a bucket whose burst is its limit; a limit too large to count becomes the largest countable."""
    limit = min(limit, MOST_CALL_SECONDS // window_seconds)
    return Bucket(tier, key, limit, window_seconds, max(limit, 0))


def percent_of(limit: int, percent: int) -> int:
    """Return a percentage of a limit: at least 1; no calls (0) and no limit (-1) stay the same."""
    return max(1, limit * percent // 100) if limit > 0 else limit


def limit_headers(verdict: LimitVerdict) -> list[tuple[bytes, bytes]]:
    """Return the rate-limit headers of an answer (21.4.3); none for a caller without limits."""
    if verdict.limit < 0:
        return []
    return [(b"x-ratelimit-limit", b"%d" % verdict.limit), (b"x-ratelimit-remaining", b"%d" % verdict.remaining),
            (b"x-ratelimit-reset", b"%d" % verdict.reset_at), (b"x-ratelimit-bucket", verdict.bucket.encode("ascii"))]


def limit_error(verdict: LimitVerdict, cost: int = 1) -> errors.RateLimitExceeded:
    """Make the refusal of a call that found its bucket empty (21.4.4)."""
    who, what = TIER_NAMES[verdict.tier], CALL_NAMES[verdict.bucket.rpartition(":")[2]]
    short, long, seconds = next(unit for unit in WINDOW_UNITS if verdict.window_seconds % unit[2] == 0)
    count = verdict.window_seconds // seconds
    per = long if count == 1 else f"{count} {long}s"
    large = cost > 1 and cost >= verdict.limit
    advice = f"; each item counts as a call, so send at most {verdict.limit}" if large else ""
    return errors.RateLimitExceeded(f"{who} {what} limit exceeded ({verdict.limit}/{per}){advice}",
                                    retry_after=verdict.retry_after,
                                    limit=verdict.limit, window=f"{count}{short}")

