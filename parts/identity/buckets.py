"""Rate limits as the gate sees them: which buckets a call draws from, and what its answer says about them (spec 21.4).

Every call draws from up to four buckets: the server's, its tenant's, its principal's and its address's.  Heartbeats
(`renew_lease`, `report_progress`) draw from buckets of their own, so that a worker can live on the free tier: four
heartbeats for each call are 4,000 an hour, and ten leases that report every ten seconds and are renewed every hundred
need 3,960.
How a bucket fills and empties is said in `asyncgate.parts.identity.limits`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from asyncgate.parts.model.errors import RateLimitExceeded
from asyncgate.parts.model.settings import Settings, Tier
from asyncgate.parts.model.wire import Principal

HOUR, MINUTE = 3600, 60
MOST = 2**51 // 1000        # calls times seconds: Lua counts in floats, which are exact to 2**53
LONGEST = 80                # of an address with port and zone; longer texts would fill the cache
WHO = {"server": "Server", "ip": "Address", "tenant": "Tenant", "principal": "Principal"}
WHAT = {"api_calls": "API call", "heartbeats": "heartbeat", "anonymous": "anonymous call", "tasks": "task"}
UNITS = [("d", "day", 86_400), ("h", "hour", HOUR), ("m", "minute", MINUTE), ("s", "second", 1)]

Address = IPv4Address | IPv6Address


class Bucket(Struct, frozen=True):
    """An allowance: `limit` calls in any window, at most `burst` of them at once; a limit of -1 is no limit."""

    tier: str
    key: str                # printable ASCII; it names the bucket in the store and to the caller
    limit: int
    window_seconds: int
    burst: int

    def __post_init__(self) -> None:
        if not (-1 <= self.limit <= MOST // self.window_seconds and self.burst >= min(self.limit, 0)):
            raise ValueError(f"{self.limit} in {self.window_seconds} s cannot be counted exactly")


class Verdict(Struct, frozen=True):
    """Whether a call may pass, and how it stands with the bucket that decides: the emptiest, or the last to refill."""

    admitted: bool
    tier: str
    bucket: str
    limit: int
    remaining: int
    reset_at: int           # epoch seconds; when the burst is there again
    retry_after: int        # whole seconds, at least `wait_ms`
    window_seconds: int
    wait_ms: int            # exact: a call that comes earlier is refused, one that comes then is admitted


UNLIMITED = Verdict(True, "", "", -1, -1, 0, 0, 0, 0)


def buckets_for(settings: Settings, may: Tier | None, tenant_id: str | None, principal: Principal | None,
                address: str, *, heartbeat: bool = False) -> list[Bucket]:
    """Return the buckets that a call draws from; without a tenant, for lack of a good credential, its address's.

    The principal must be one that the credential names: a name that a caller picks itself is no limit.  A tenant that
    may do everything is exempt from all limits but the server's.
    """
    limiting, place = settings.security.rate_limiting, f"ip:{neighbourhood(address)}"
    server = bucket("server", "server:api_calls", limiting.server_calls_per_minute, MINUTE)
    if tenant_id is None:
        return [server, bucket("ip", f"{place}:anonymous", limiting.anonymous_calls_per_minute, MINUTE)]
    if may is None:
        return [server]
    limit, what = may.api_calls_per_hour, "api_calls"
    if heartbeat:
        limit, what = part(limit, 100 * limiting.heartbeat_factor), "heartbeats"
    found = [server, bucket("tenant", f"tenant:{tenant_id}:{what}", limit, HOUR)]
    if principal:
        name = f"principal:{tenant_id}:{principal.kind}:{quote(principal.id, safe='@')}:{what}"
        found.append(bucket("principal", name, part(limit, limiting.principal_percent), HOUR))
    return [*found, bucket("ip", f"{place}:api_calls", limiting.address_calls_per_minute, MINUTE)]


def call_bucket(may: Tier, tenant_id: str) -> Bucket:
    """Return the bucket that all calls of a tenant are drawn from."""
    return bucket("tenant", f"tenant:{tenant_id}:api_calls", may.api_calls_per_hour, HOUR)


def task_bucket(may: Tier, tenant_id: str) -> Bucket:
    """Return the bucket that new tasks are drawn from, each one apart from the call that creates it (21.4.2)."""
    return bucket("tenant", f"tenant:{tenant_id}:tasks", may.tasks_per_hour, HOUR)


def bucket(tier: str, key: str, limit: int, window_seconds: int) -> Bucket:
    """Make a bucket that may be emptied at once; a limit beyond what can be counted is the greatest that can."""
    limit = min(limit, MOST // window_seconds)
    return Bucket(tier, key, limit, window_seconds, max(limit, 0))


def part(limit: int, percent: int) -> int:
    """Take a part of a limit; of some it is at least one, of none and of no limit it is the same."""
    return max(1, limit * percent // 100) if limit > 0 else limit


def headers(verdict: Verdict) -> list[tuple[bytes, bytes]]:
    """Say in the answer's headers how the caller stands (21.4.3); to whom nothing is limited they say nothing."""
    if verdict.limit < 0:
        return []
    return [(b"x-ratelimit-limit", b"%d" % verdict.limit), (b"x-ratelimit-remaining", b"%d" % verdict.remaining),
            (b"x-ratelimit-reset", b"%d" % verdict.reset_at), (b"x-ratelimit-bucket", verdict.bucket.encode("ascii"))]


def exceeded(verdict: Verdict) -> RateLimitExceeded:
    """Make the refusal of a call that found a bucket empty (21.4.4)."""
    who, what = WHO[verdict.tier], WHAT[verdict.bucket.rpartition(":")[2]]
    short, long, seconds = next(unit for unit in UNITS if verdict.window_seconds % unit[2] == 0)
    count = verdict.window_seconds // seconds
    per = long if count == 1 else f"{count} {long}s"
    return RateLimitExceeded(f"{who} {what} limit exceeded ({verdict.limit}/{per})", retry_after=verdict.retry_after,
                             limit=verdict.limit, window=f"{count}{short}")


def client_address(scope: Any, headers: Iterable[tuple[bytes, bytes]], trusted_proxies: tuple[str, ...]) -> str:
    """Return whom a request comes from: its peer, or what trusted proxies say of theirs.

    Each proxy appends its own peer to X-Forwarded-For.  So the list is read from its end, and the first address that is
    no trusted proxy's counts: what stands before it the client may have made up.
    """
    peer = (scope.get("client") or ("",))[0]
    address, trusted = _read(peer), _networks(trusted_proxies)
    if not trusted or address is None or not _within(address, trusted):
        return str(address or peer)
    said = b",".join(value for name, value in headers if name == b"x-forwarded-for").decode("latin-1")
    for hop in reversed(said.split(",")):
        if (before := _read(hop.strip())) is None:
            break       # what a proxy could not name is the proxy's own
        address = before
        if not _within(address, trusted):
            break
    return str(address)


def from_proxy(scope: Any, trusted_proxies: tuple[str, ...]) -> bool:
    """Whether a request comes straight from a trusted proxy, so that what it says of its client is believed."""
    address = _read((scope.get("client") or ("",))[0])
    return address is not None and _within(address, _networks(trusted_proxies))


def neighbourhood(address: str) -> str:
    """Return what is counted as one address: of IPv6 the /64, for that is what a single host is given."""
    found = _read(address)
    if isinstance(found, IPv6Address):
        return f"{IPv6Address(int(found) >> 64 << 64)}/64"
    return str(found) if found else quote(address, safe="") or "unknown"


def _read(text: str) -> Address | None:
    """Read an address, with or without a port and a zone; an IPv4 address within IPv6 is the IPv4 one."""
    return _read_short(text) if len(text) <= LONGEST else None


@lru_cache(4096)
def _read_short(text: str) -> Address | None:
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return (found.ipv4_mapped if isinstance(found, IPv6Address) else None) or found


@lru_cache(8)
def _networks(names: tuple[str, ...]) -> tuple[IPv4Network | IPv6Network, ...]:
    return tuple(ip_network(name) for name in names)


def _within(address: Address, networks: tuple[IPv4Network | IPv6Network, ...]) -> bool:
    return any(address in network for network in networks)
