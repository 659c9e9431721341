"""The limits in a real Valkey: the same verdicts as in memory, shared by gates, and what becomes of them without it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgate.conformance.valkey import Valkey
from asyncgate.parts.identity.buckets import MOST_CALL_SECONDS
from asyncgate.parts.identity.limits import UNLIMITED, Bucket, open_limits
from asyncgate.parts.identity.limits.memory import MemoryLimits
from asyncgate.parts.identity.limits.redis import RedisLimits
from asyncgate.parts.model.errors import LimiterUnavailable, StartupError
from asyncgate.parts.model.settings import Settings, load_settings
from tests.support.patience import PATIENCE_SECONDS

START = 490_000 * 3_600_000
REDIS = "ASYNCGATE_SECURITY_RATE_LIMITING_"
names = (f"{os.getpid()}-{number}" for number in count())


def started() -> Valkey:
    """Start a server, or skip where that may be."""
    try:
        return Valkey()
    except (OSError, RuntimeError) as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no Valkey: {error}")


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    """The server that tests share; each uses buckets of its own."""
    with started() as server:
        yield server


@pytest.fixture
def mortal() -> Iterator[Valkey]:
    """A server that a test may kill."""
    with started() as server:
        yield server


@pytest.fixture
async def limits(valkey: Valkey) -> AsyncIterator[RedisLimits]:
    """Limits as a gate has them, by the server's clock."""
    limits = RedisLimits(valkey.url, timeout_seconds=PATIENCE_SECONDS)
    yield limits
    await limits.close()


def hourly(limit: int, key: str | None = None) -> Bucket:
    return Bucket("tenant", key or next(names), limit, 3600, limit)


# The same verdicts

AMOUNTS = [0, 1, 2, 3, 7, 100, 999, 1000, 600_000_000]
limit_and_burst = st.tuples(st.sampled_from([-1, *AMOUNTS, 10**15]), st.sampled_from([*AMOUNTS, 10**15]))
limits_of_windows = st.tuples(limit_and_burst, st.sampled_from([60, 61, 3600]))
drawn_from = st.lists(st.tuples(st.sampled_from("abc"), limits_of_windows), max_size=4, unique_by=lambda pair: pair[0])
passing = st.one_of(st.integers(0, 3), st.integers(0, 70_000), st.integers(0, 8_000_000), st.integers(-5000, 0))
costs = st.one_of(st.just(1), st.integers(0, 8), st.sampled_from([100, 999, 10**6, 600_000_000]))
steps = st.lists(st.tuples(passing, drawn_from, costs, st.integers(1, 12)), min_size=15, max_size=40)


class Both:
    """The two stores under one clock; they must agree."""

    def __init__(self, url: str) -> None:
        self.now, self.runner, self.steps = START, asyncio.Runner(), 0
        self.memory = MemoryLimits(lambda: self.now)
        self.redis = RedisLimits(url, timeout_seconds=PATIENCE_SECONDS, clock=lambda: self.now)

    async def take(self, buckets: list[Bucket], cost: int) -> Any:
        """Take from both; a lost store would count in memory too, and agree with itself."""
        told = await self.redis.take(buckets, cost)
        self.steps += 1
        assert not self.redis.degraded
        assert told == self.memory.take_now(buckets, cost)
        return told

    async def follow(self, step: Any, name: str) -> None:
        """Take one step; whoever is refused comes back just before its time, and in time."""
        passed, drawn, cost, times = step
        self.now += passed
        buckets = [Bucket("tenant", f"{name}:{key}", min(limit, MOST_CALL_SECONDS // window), window, burst)
                   for key, ((limit, burst), window) in drawn]
        for _ in range(times):
            verdict = await self.take(buckets, cost)
            if not verdict.admitted:
                break
        if not verdict.admitted and all(cost <= min(bucket.limit, bucket.burst) for bucket in buckets
                                        if bucket.limit >= 0):
            self.now += verdict.wait_ms - 1
            assert not (await self.take(buckets, cost)).admitted
            self.now += 1
            assert (await self.take(buckets, cost)).admitted

    def close(self) -> None:
        """Let go of the store."""
        self.runner.run(self.redis.close())
        self.runner.close()


@pytest.fixture(scope="module")
def both(valkey: Valkey) -> Iterator[Both]:
    """The two stores."""
    both = Both(valkey.url)
    yield both
    both.close()


def test_the_stores_agree_to_the_millisecond(both: Both) -> None:
    @settings(max_examples=100, deadline=None)
    @given(steps)
    def agree(steps: list[Any]) -> None:
        async def follow_all() -> None:
            for step in steps:
                await both.follow(step, name)

        name, both.now = next(names), START
        both.runner.run(follow_all())

    agree()

    assert both.steps > 3000


# One store for several gates


@pytest.mark.anyio
async def test_gates_that_share_a_store_admit_no_more_than_the_limit_together(valkey: Valkey) -> None:
    gates = [RedisLimits(valkey.url, timeout_seconds=PATIENCE_SECONDS) for _ in range(2)]
    shared = hourly(100)

    verdicts = await asyncio.gather(*(gate.take([shared]) for _ in range(200) for gate in gates))

    assert sum(verdict.admitted for verdict in verdicts) == 100
    assert not any(gate.degraded for gate in gates)
    await asyncio.gather(*(gate.close() for gate in gates))


@pytest.mark.anyio
async def test_buckets_expire_after_two_windows(limits: RedisLimits) -> None:
    bucket = hourly(10)

    await limits.take([bucket])

    left = await limits.redis.pttl(f"asyncgate:limits:3600:{bucket.key}")
    assert 0 < left <= 7_200_000


@pytest.mark.anyio
async def test_a_refused_call_writes_nothing(limits: RedisLimits) -> None:
    wide, closed = hourly(10), hourly(0)

    assert not (await limits.take([wide, closed])).admitted

    assert await limits.redis.exists(f"asyncgate:limits:3600:{wide.key}", f"asyncgate:limits:3600:{closed.key}") == 0


@pytest.mark.anyio
async def test_a_server_that_forgot_the_script_is_given_it_again(limits: RedisLimits) -> None:
    bucket = hourly(10)
    await limits.take([bucket])

    await limits.redis.script_flush()
    verdicts = await asyncio.gather(*(limits.take([bucket]) for _ in range(4)))

    assert [verdict.remaining for verdict in verdicts] == [8, 7, 6, 5]
    assert not limits.degraded


@pytest.mark.anyio
async def test_a_call_that_is_given_up_holds_up_no_other(limits: RedisLimits) -> None:
    bucket = hourly(10)
    calls = [asyncio.ensure_future(limits.take([bucket])) for _ in range(5)]
    await asyncio.sleep(0)

    calls[0].cancel()
    done = await asyncio.gather(*calls, return_exceptions=True)

    assert isinstance(done[0], asyncio.CancelledError)
    assert all(verdict.admitted for verdict in done[1:] if not isinstance(verdict, BaseException))
    assert (await limits.take([bucket])).admitted


@pytest.mark.anyio
async def test_a_caller_without_limits_does_not_ask_the_store() -> None:
    limits = RedisLimits("unix:///nowhere")

    assert await limits.take([hourly(-1)]) == UNLIMITED

    assert not limits.degraded
    await limits.close()


# Without the store


async def recovered(limits: RedisLimits) -> None:
    """Return when the store is found again, which calls bring about."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while limits.degraded:
            await limits.take([hourly(10)])
            await asyncio.sleep(0.005)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["killed", "paused"])
async def test_a_gate_counts_its_part_alone_while_the_store_is_lost(
    how: str, mortal: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    limits, bucket = RedisLimits(mortal.url, gates=4, timeout_seconds=PATIENCE_SECONDS, retry_seconds=0.01), hourly(20)
    assert (await limits.take([bucket])).remaining == 19

    if how == "killed":
        mortal.kill()
    else:
        mortal.process.send_signal(signal.SIGSTOP)
    limits.timeout_seconds = 0.25       # only now: a server on a busy machine may need longer
    async with asyncio.timeout(PATIENCE_SECONDS):
        verdicts = await asyncio.gather(*(limits.take([bucket]) for _ in range(50)))

    assert limits.degraded
    assert sum(verdict.admitted for verdict in verdicts) == 5
    assert {verdict.limit for verdict in verdicts} == {5}
    assert len(warnings(caplog)) == 1
    assert warnings(caplog)[0].endswith("until it answers again 1/4 of each limit is counted here")

    if how == "killed":
        mortal.start()
    else:
        mortal.process.send_signal(signal.SIGCONT)
    limits.timeout_seconds = PATIENCE_SECONDS
    await recovered(limits)
    assert (await limits.take([bucket])).limit == 20
    assert warnings(caplog)[1:] == ["the store of the rate limits answers again"]
    await limits.close()


@pytest.mark.anyio
async def test_a_gate_told_to_deny_refuses_while_the_store_is_lost(mortal: Valkey) -> None:
    limits = RedisLimits(mortal.url, deny=True, retry_seconds=0.01)
    mortal.kill()

    with pytest.raises(LimiterUnavailable) as refusal:
        await limits.take([hourly(10)])

    assert refusal.value.status == 503
    assert refusal.value.body()["retry_after"] == 1
    await limits.close()


@pytest.mark.anyio
async def test_a_store_that_takes_no_writes_is_lost(mortal: Valkey) -> None:
    limits = RedisLimits(mortal.url, retry_seconds=0.01)
    await limits.redis.replicaof("127.0.0.1", 1)

    assert (await limits.take([hourly(10)])).remaining == 9
    assert limits.degraded

    await limits.redis.replicaof("NO", "ONE")
    await recovered(limits)
    await limits.close()


@pytest.mark.anyio
async def test_limits_are_closed_while_the_store_hangs(mortal: Valkey) -> None:
    limits = RedisLimits(mortal.url, retry_seconds=0.0)
    mortal.process.send_signal(signal.SIGSTOP)
    await limits.take([hourly(10)])
    await limits.take([hourly(10)])

    async with asyncio.timeout(PATIENCE_SECONDS):
        await limits.close()

    mortal.process.send_signal(signal.SIGCONT)


# From the settings


def redis_settings(**more: str) -> Settings:
    environ = {f"{REDIS}STORAGE": "redis"} | {f"{REDIS}{name.upper()}": value for name, value in more.items()}
    return load_settings(environ=environ).settings


@pytest.mark.anyio
@pytest.mark.parametrize("scheme", ["redis", "rediss", "valkey", "valkeys"])
async def test_the_settings_open_the_store(scheme: str) -> None:
    limits = open_limits(redis_settings(redis_url=f"{scheme}://localhost:1/0", gates="3", on_store_failure="deny",
                                        store_timeout_seconds="0.5"))

    assert isinstance(limits, RedisLimits)
    assert (limits.gates, limits.deny, limits.timeout_seconds) == (3, True, 0.5)
    await limits.close()


def test_redis_without_an_address_stops_the_start() -> None:
    with pytest.raises(StartupError, match=r"set security\.rate_limiting\.redis_url"):
        open_limits(redis_settings())


def test_an_address_of_something_else_stops_the_start() -> None:
    with pytest.raises(StartupError, match="redis_url is invalid"):
        open_limits(redis_settings(redis_url="postgresql://localhost"))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})])       # its resolver is Python's
async def test_a_store_whose_name_server_hangs_takes_no_further_thread_of_the_event_loop(
        monkeypatch: pytest.MonkeyPatch) -> None:
    threads, answer = list[str](), threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        threads.append(threading.current_thread().name)
        answer.wait(PATIENCE_SECONDS)
        raise socket.gaierror
    monkeypatch.setattr(socket, "getaddrinfo", hang)
    limits = RedisLimits("redis://store.example/0", timeout_seconds=0.05, retry_seconds=0.0)
    try:
        for _ in range(4):      # the first call takes one
            await limits.take([Bucket("tenant", "t", 10, 60, 10)])
            if limits.trying is not None:
                await limits.trying
    finally:
        answer.set()
        await limits.close()

    assert threads[1:] == ["look-up"]
