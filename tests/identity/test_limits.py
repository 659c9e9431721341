"""The maths of the rate limits on one gate, whose calls they count, and what answers say about it (spec 21.4)."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest

from asyncgate.parts.faces.http import make_refusal_headers
from asyncgate.parts.identity.buckets import (
    UNLIMITED,
    Bucket,
    LimitVerdict,
    buckets_for,
    limit_error,
    limit_headers,
    make_bucket,
    task_bucket,
)
from asyncgate.parts.identity.limits import open_limits
from asyncgate.parts.identity.limits.memory import MemoryLimits, steady_clock
from asyncgate.parts.model.connection import find_client_address
from asyncgate.parts.model.settings import Settings, SettingsError, load_settings
from asyncgate.parts.model.wire import Principal

HOUR_MS, SECOND_MS = 3_600_000, 1000
START = 490_000 * HOUR_MS       # a window begins here
TENANT = "0c7a1b52-0000-4000-8000-000000000001"
ADA = Principal("agent", "ada")
FREE = Settings()
TIER = FREE.rate_limits.free_tier


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The time that the limits go by."""
    return Clock()


@pytest.fixture
def limits(clock: Clock) -> MemoryLimits:
    """Limits whose time the test moves."""
    return MemoryLimits(clock)


def hourly(limit: int, key: str = "k", burst: int | None = None) -> Bucket:
    return Bucket("tenant", key, limit, 3600, limit if burst is None else burst)


def admitted(limits: MemoryLimits, *buckets: Bucket, times: int = 1) -> int:
    """How many of so many calls pass."""
    return sum(limits.take_now(buckets).admitted for _ in range(times))


# What a bucket lets through


def test_a_bucket_lets_its_limit_through_and_no_more(limits: MemoryLimits) -> None:
    assert admitted(limits, hourly(100), times=150) == 100


def test_a_burst_below_the_limit_is_refilled_evenly(limits: MemoryLimits, clock: Clock) -> None:
    assert admitted(limits, hourly(3600, burst=10), times=50) == 10

    clock.now += 5 * SECOND_MS

    assert admitted(limits, hourly(3600, burst=10), times=50) == 5


def test_a_steady_caller_below_the_limit_is_never_refused(limits: MemoryLimits, clock: Clock) -> None:
    for _ in range(900):
        clock.now += HOUR_MS // 90

        assert limits.take_now([hourly(100)]).admitted


def test_a_greedy_caller_gets_hardly_more_than_the_limit_in_any_hour(limits: MemoryLimits, clock: Clock) -> None:
    lately: deque[int] = deque()
    most = 0
    for _ in range(4 * 3600):
        clock.now += SECOND_MS
        while limits.take_now([hourly(1000)]).admitted:
            lately.append(clock.now)
        while lately and lately[0] <= clock.now - HOUR_MS:
            lately.popleft()
        most = max(most, len(lately))

    assert 1000 <= most < 1130


def test_a_refused_call_costs_no_bucket_anything(limits: MemoryLimits) -> None:
    wide, narrow = hourly(100, "wide"), hourly(2, "narrow")

    assert admitted(limits, wide, narrow, times=50) == 2

    assert limits.take_now([wide], 0).remaining == 98


def test_a_refused_call_waits_for_the_slowest_bucket(limits: MemoryLimits, clock: Clock) -> None:
    quick, slow = Bucket("ip", "quick", 1, 60, 1), hourly(1, "slow")
    limits.take_now([quick, slow])

    verdict = limits.take_now([quick, slow])

    assert (verdict.bucket, verdict.admitted) == ("slow", False)
    clock.now += verdict.wait_ms - 1
    assert not limits.take_now([quick, slow]).admitted
    clock.now += 1
    assert limits.take_now([quick, slow]).admitted


def test_retry_after_and_reset_are_whole_seconds_rounded_up(limits: MemoryLimits, clock: Clock) -> None:
    fast = Bucket("tenant", "k", 3600, 3600, 1)
    limits.take_now([fast])
    clock.now += 1

    verdict = limits.take_now([fast])

    assert (verdict.wait_ms, verdict.retry_after, verdict.reset_at) == (999, 1, START // 1000 + 1)


def test_a_caller_that_waits_as_long_as_it_is_told_passes(limits: MemoryLimits, clock: Clock) -> None:
    admitted(limits, hourly(7), times=8)
    refused = limits.take_now([hourly(7)])

    clock.now = refused.reset_at * 1000

    assert limits.take_now([hourly(7)]).admitted
    assert refused.retry_after * 1000 >= refused.wait_ms > 0


def test_the_tightest_bucket_speaks(limits: MemoryLimits) -> None:
    verdict = limits.take_now([hourly(10, "wide"), hourly(5, "tight"), hourly(20, "wider")])

    assert (verdict.bucket, verdict.limit, verdict.remaining) == ("tight", 5, 4)


def test_what_has_no_limit_is_not_counted(limits: MemoryLimits) -> None:
    assert limits.take_now([hourly(-1)]) == UNLIMITED
    assert limits.take_now([]) == UNLIMITED
    assert len(limits) == 0


def test_a_limit_of_nothing_refuses_all(limits: MemoryLimits) -> None:
    verdict = limits.take_now([hourly(0)])

    assert not verdict.admitted
    assert verdict.retry_after == 3600


def test_a_cost_is_taken_whole_or_not_at_all(limits: MemoryLimits) -> None:
    assert limits.take_now([hourly(10)], 8).remaining == 2
    assert not limits.take_now([hourly(10)], 3).admitted
    assert limits.take_now([hourly(10)], 2).remaining == 0


def test_a_cost_that_no_bucket_ever_holds_is_refused_for_ever(limits: MemoryLimits, clock: Clock) -> None:
    for _ in range(3):
        verdict = limits.take_now([hourly(10)], 11)
        assert (verdict.admitted, verdict.retry_after, verdict.remaining) == (False, 3600, 10)
        clock.now += verdict.wait_ms


def test_a_clock_that_is_set_back_gives_nothing_away(limits: MemoryLimits, clock: Clock) -> None:
    admitted(limits, hourly(10), times=10)

    clock.now -= 30 * HOUR_MS

    verdict = limits.take_now([hourly(10)])
    assert not verdict.admitted
    clock.now += verdict.wait_ms
    assert limits.take_now([hourly(10)]).admitted


def test_a_tenant_that_changes_its_tier_keeps_what_it_has_used(limits: MemoryLimits) -> None:
    admitted(limits, hourly(100), times=100)

    assert not limits.take_now([hourly(10)]).admitted
    assert admitted(limits, hourly(1000), times=1) == 0     # the new limit fills from where the old one stood


def test_a_limit_that_cannot_be_counted_exactly_is_no_bucket() -> None:
    for limit, burst in [(2**53, 1), (-2, -1), (1, -1)]:
        with pytest.raises(ValueError, match="cannot be counted exactly"):
            hourly(limit, burst=burst)

    assert make_bucket("tenant", "k", 2**53 - 1, 3600).limit > 600_000_000


def test_the_clock_of_a_gate_tells_the_time_and_does_not_run_back() -> None:
    clock = steady_clock()

    times = [clock() for _ in range(1000)]

    assert times == sorted(times)
    assert times[0] > START


# What is kept


def test_a_flood_of_other_keys_frees_no_one_and_is_forgotten(limits: MemoryLimits, clock: Clock) -> None:
    assert admitted(limits, hourly(5, "victim"), times=6) == 5

    for number in range(100_000):
        limits.take_now([Bucket("ip", f"ip:{number}", 5, 60, 5)])

    assert not limits.take_now([hourly(5, "victim")]).admitted
    assert len(limits) == 100_001
    clock.now += 3 * 60 * SECOND_MS
    for _ in range(20_000):
        limits.take_now([hourly(5, "victim")])
    assert len(limits) == 1


def test_keys_in_use_do_not_add_up(limits: MemoryLimits, clock: Clock) -> None:
    most = 0
    for number in range(50_000):
        clock.now += 100
        limits.take_now([Bucket("ip", "busy", 10_000, 60, 10_000), Bucket("ip", f"ip:{number}", 5, 60, 5)])
        most = max(most, len(limits))

    assert most <= 3 * 600 + 2


# Who is counted


def by_tier(buckets: list[Bucket]) -> dict[str, tuple[str, int, int]]:
    return {bucket.tier: (bucket.key, bucket.limit, bucket.window_seconds) for bucket in buckets}


def test_a_call_draws_from_its_tenant_its_principal_and_its_address() -> None:
    assert by_tier(buckets_for(FREE, TIER, TENANT, ADA, "192.0.2.7")) == {
        "server": ("server:api_calls", 600_000, 60),
        "tenant": (f"tenant:{TENANT}:api_calls", 1000, 3600),
        "principal": (f"principal:{TENANT}:agent:ada:api_calls", 800, 3600),
        "ip": ("ip:192.0.2.7:api_calls", 6000, 60),
    }


def test_without_a_credential_only_the_address_counts() -> None:
    assert by_tier(buckets_for(FREE, None, None, None, "192.0.2.7")) == {
        "server": ("server:api_calls", 600_000, 60), "ip": ("ip:192.0.2.7:anonymous", 300, 60)}


def test_heartbeats_have_their_own_and_larger_budget() -> None:
    calls, beats = (buckets_for(FREE, TIER, TENANT, ADA, "192.0.2.7", heartbeat=on) for on in (False, True))

    assert [beat.limit for beat in beats] == [600_000, 5000, 4000, 6000]
    assert {bucket.key for bucket in calls} & {beat.key for beat in beats} == {"server:api_calls",
                                                                               "ip:192.0.2.7:api_calls"}


def test_ten_leases_can_be_kept_alive_on_the_free_tier_beside_a_polling_worker(
    limits: MemoryLimits, clock: Clock
) -> None:
    beat = buckets_for(FREE, TIER, TENANT, ADA, "192.0.2.7", heartbeat=True)
    call = buckets_for(FREE, TIER, TENANT, ADA, "192.0.2.7")

    for second in range(3 * 3600):
        clock.now += SECOND_MS
        reports, renewals, polls = second % 10 == 0, second % 100 == 0, second % 5 == 0
        assert all(limits.take_now(beat).admitted for _ in range(10 * (reports + renewals)))
        assert not polls or limits.take_now(call).admitted


def test_one_principal_may_be_kept_from_using_up_its_tenant(limits: MemoryLimits) -> None:
    settings = load_settings(environ={"ASYNCGATE_SECURITY_RATE_LIMITING_PRINCIPAL_PERCENT": "25"}).settings
    bob = Principal("agent", "bob")

    tier = settings.rate_limits.free_tier
    passed = admitted(limits, *buckets_for(settings, tier, TENANT, ADA, "192.0.2.7"), times=500)

    assert passed == 250
    assert limits.take_now(buckets_for(settings, tier, TENANT, bob, "192.0.2.7")).admitted


def test_nobody_waits_longer_than_a_window(limits: MemoryLimits, clock: Clock) -> None:
    """All calls at once, late in the counter's window: a window later none of them is within any."""
    bucket = Bucket("tenant", "t", 100, 3600, 100)
    clock.now += 3_600_000 // 20
    assert limits.take_now([bucket], 100).admitted

    told = limits.take_now([bucket], 100)

    assert (told.admitted, told.wait_ms) == (False, 3_600_000)
    clock.now += told.wait_ms - 1
    assert not limits.take_now([bucket], 100).admitted
    clock.now += 1
    assert limits.take_now([bucket], 100).admitted


def test_many_principals_of_one_tenant_share_its_limit(limits: MemoryLimits) -> None:
    names = [Principal("agent", f"a{number}") for number in range(1100)]

    assert sum(admitted(limits, *buckets_for(FREE, TIER, TENANT, who, "192.0.2.7")) for who in names) == 1000


def test_instances_of_a_principal_are_one_principal() -> None:
    here, there = Principal("worker", "w", "here"), Principal("worker", "w", "there")

    assert buckets_for(FREE, TIER, TENANT, here, "::1") == buckets_for(FREE, TIER, TENANT, there, "::1")


def test_tenants_do_not_share() -> None:
    mine, yours = (by_tier(buckets_for(FREE, TIER, tenant, ADA, "::1")) for tenant in (TENANT, TENANT[:-1] + "2"))

    assert {tier for tier in mine if mine[tier] == yours[tier]} == {"server", "ip"}


def test_an_enterprise_is_limited_by_its_address_alone(limits: MemoryLimits) -> None:
    buckets = buckets_for(FREE, FREE.rate_limits.enterprise_tier, TENANT, ADA, "192.0.2.7", heartbeat=True)

    assert [bucket.limit for bucket in buckets] == [600_000, -1, -1, 6000]
    assert limits.take_now(buckets).tier == "ip"


def test_new_tasks_are_drawn_from_a_budget_of_their_own() -> None:
    assert task_bucket(TIER, TENANT) == Bucket("tenant", f"tenant:{TENANT}:tasks", 100, 3600, 100)


def test_a_name_of_any_letters_makes_a_key_that_a_header_may_carry() -> None:
    strange = Principal("agent", "ä: b\r\nx-evil: 1")

    (key,) = (bucket.key for bucket in buckets_for(FREE, TIER, TENANT, strange, "::1") if bucket.tier == "principal")

    assert key.isascii()
    assert key.isprintable()
    assert key.count(":") == 4


@pytest.mark.parametrize(("address", "counted"), [
    ("2001:db8:1:2:3:4:5:6", "ip:2001:db8:1:2::/64:api_calls"),
    ("2001:db8:1:2::9", "ip:2001:db8:1:2::/64:api_calls"),
    ("::ffff:192.0.2.7", "ip:192.0.2.7:api_calls"),
    ("fe80::1%eth0", "ip:fe80::/64:api_calls"),
    ("", "ip:unknown:api_calls"),
    ("a\nb", "ip:a%0Ab:api_calls"),
])
def test_of_ipv6_a_network_counts_as_one_address(address: str, counted: str) -> None:
    assert buckets_for(FREE, TIER, TENANT, None, address)[-1].key == counted


# Whose address it is

PROXIES = ("10.0.0.0/8", "2001:db8:ffff::/48")


def seen(peer: str | None, *forwarded: str, trusted: tuple[str, ...] = PROXIES) -> str:
    scope: dict[str, Any] = {"client": peer and (peer, 1234)}
    return find_client_address(scope, [(b"x-forwarded-for", header.encode("latin-1")) for header in forwarded], trusted)


@pytest.mark.parametrize(("peer", "forwarded", "address"), [
    ("203.0.113.9", [], "203.0.113.9"),
    ("203.0.113.9", ["192.0.2.1"], "203.0.113.9"),                          # a client that plays a proxy
    ("10.0.0.1", ["192.0.2.1"], "192.0.2.1"),
    ("10.0.0.1", ["198.51.100.1, 192.0.2.1"], "192.0.2.1"),                 # the first one is made up
    ("10.0.0.1", ["198.51.100.1", "192.0.2.1"], "192.0.2.1"),               # in two headers
    ("10.0.0.1", ["10.9.9.9, 192.0.2.1, 10.0.0.2"], "192.0.2.1"),           # through two proxies
    ("10.0.0.1", ["10.9.9.9"], "10.9.9.9"),
    ("10.0.0.1", [], "10.0.0.1"),
    ("10.0.0.1", ["192.0.2.1, unknown"], "10.0.0.1"),
    ("10.0.0.1", ["192.0.2.1,"], "10.0.0.1"),
    ("10.0.0.1", ["192.0.2.1, junk, 10.0.0.2"], "10.0.0.2"),
    ("10.0.0.1", ["\xff" * 5000], "10.0.0.1"),
    ("10.0.0.1", ["192.0.2.1:55555"], "192.0.2.1"),
    ("10.0.0.1", ["[2001:db8::1]:443"], "2001:db8::1"),
    ("::ffff:10.0.0.1", ["::ffff:192.0.2.1"], "192.0.2.1"),
    ("2001:db8:ffff::1", ["2001:DB8::1"], "2001:db8::1"),
    (None, ["192.0.2.1"], ""),
])
def test_only_trusted_proxies_say_whose_request_it_is(peer: str | None, forwarded: list[str], address: str) -> None:
    assert seen(peer, *forwarded) == address


def test_without_trusted_proxies_the_peer_counts() -> None:
    assert seen("10.0.0.1", "192.0.2.1", trusted=()) == "10.0.0.1"


def test_made_up_addresses_do_not_escape_the_limit(limits: MemoryLimits) -> None:
    addresses = [seen("10.0.0.1", f"198.51.100.{number % 256}, 192.0.2.1") for number in range(400)]

    assert sum(admitted(limits, *buckets_for(FREE, None, None, None, address)) for address in addresses) == 300


@pytest.mark.parametrize("network", ["10.0.0.1/8", "proxy.example", "10.0.0.0/33", "999.1.1.1"])
def test_a_trusted_proxy_that_is_no_network_stops_the_start(network: str) -> None:
    with pytest.raises(SettingsError, match=r"trusted_proxies: .* is neither an address nor a network"):
        load_settings(environ={"ASYNCGATE_TRUSTED_PROXIES": f"::1, {network}"})


# What answers say

REFUSED = LimitVerdict(False, "tenant", f"tenant:{TENANT}:api_calls", 1000, 0, 1_764_000_036, 36, 3600, 35_001)


def test_the_headers_are_those_of_the_spec() -> None:
    assert limit_headers(REFUSED) == [
        (b"x-ratelimit-limit", b"1000"), (b"x-ratelimit-remaining", b"0"), (b"x-ratelimit-reset", b"1764000036"),
        (b"x-ratelimit-bucket", f"tenant:{TENANT}:api_calls".encode())]


def test_an_unlimited_caller_is_told_no_limit() -> None:
    assert limit_headers(UNLIMITED) == []


def test_the_refusal_is_that_of_the_spec() -> None:
    message = "Tenant API call limit exceeded (1000/hour)"

    refusal = limit_error(REFUSED)

    assert refusal.status == 429
    assert refusal.body() == {"error": "rate_limit_exceeded", "message": message, "detail": message, "retry_after": 36,
                         "limit": 1000, "window": "1h"}
    assert make_refusal_headers(refusal) == [(b"retry-after", b"36")]


@pytest.mark.parametrize(("tier", "counted", "seconds", "message", "window"), [
    ("ip", "ip:::1:anonymous", 60, "Address anonymous call limit exceeded (1000/minute)", "1m"),
    ("principal", "principal:t:agent:ada:heartbeats", 86400, "Principal heartbeat limit exceeded (1000/day)", "1d"),
    ("tenant", "tenant:t:tasks", 7200, "Tenant task limit exceeded (1000/2 hours)", "2h"),
    ("tenant", "tenant:t:tasks", 90, "Tenant task limit exceeded (1000/90 seconds)", "90s"),
])
def test_the_refusal_names_who_what_and_how_long(
    tier: str, counted: str, seconds: int, message: str, window: str
) -> None:
    refusal = limit_error(msgspec.structs.replace(REFUSED, tier=tier, bucket=counted, window_seconds=seconds))

    assert (str(refusal), refusal.more["window"]) == (message, window)


def test_limits_live_in_memory_unless_the_settings_say_otherwise() -> None:
    assert isinstance(open_limits(FREE), MemoryLimits)
