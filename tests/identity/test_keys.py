"""Issued keys: what lets them in, what keeps them out, and what that may cost (spec 21.2.2)."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import string
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncgate import SCOPES, Caller
from asyncgate.parts.identity import keys as identity_keys
from asyncgate.parts.identity.keys import IssuedKeys, network_of
from asyncgate.parts.identity.keys_stored import (
    checksum,
    default_role,
    default_scopes,
    encode_names,
    generate,
    hash_secret,
    parse,
    proves_secret,
    retire_key,
)
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.errors import DatabaseUnavailable, GateError, InvalidToken, Overloaded, RateLimitExceeded
from asyncgate.parts.model.settings import ApiKeys, Settings
from asyncgate.parts.model.stored import Key
from asyncgate.parts.model.wire import Principal
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
T = TypeVar("T")

CHEAP = ApiKeys(hash_time_cost=1, hash_memory_cost=8)
TENANT = "00000000-0000-4000-8000-000000000001"
HOME = "192.0.2.1"
NOON = 1_800_000_000.0


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


class Table:
    """A database of keys, in memory, that counts what it is asked."""

    def __init__(self) -> None:
        self.keys: dict[str, Key] = {}
        self.suspended, self.down = set[str](), False
        self.asked: list[str] = []
        self.touched: list[tuple[str, str, float]] = []
        self.answers: asyncio.Event | None = None       # until it is set, rows that were read stay on their way

    async def find_key(self, key_id: str) -> tuple[str, bool, Key] | None:
        self.asked.append(key_id)
        if self.down:
            raise DatabaseUnavailable("the database does not answer; try again", retry_after=1)
        key, suspended = self.keys.get(key_id), TENANT in self.suspended
        if self.answers:
            await self.answers.wait()
        return (TENANT, suspended, key) if key else None

    async def touch_key(self, tenant_id: str, key_id: str, now: float, place: str | None = None) -> None:
        if self.down:
            raise DatabaseUnavailable("the database does not answer; try again", retry_after=1)
        if place is None:
            self.touched.append((tenant_id, key_id, now))
        self.keys[key_id] = replace(self.keys[key_id], last_used_at=now)

    def change(self, token: str, **fields: Any) -> None:
        """Commit a change of a key's row."""
        key_id, _ = parts(token)
        self.keys[key_id] = replace(self.keys[key_id], **fields)


class Counting(ThreadPoolExecutor):
    """Threads, more than are needed, that count what they are given and begin when they are let."""

    def __init__(self) -> None:
        super().__init__(8, "counting")
        self.given, self.go = 0, threading.Event()
        self.go.set()

    def submit(self, work: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        self.given += 1
        return super().submit(self._later, work, *args, **named)

    def _later(self, work: Callable[..., T], *args: Any, **named: Any) -> T:
        assert self.go.wait(PATIENCE_SECONDS)
        return work(*args, **named)


class World:
    """A way in with all that it needs."""

    def __init__(self) -> None:
        self.table, self.clock, self.threads = Table(), Clock(), Counting()
        self.naps: list[float] = []
        self.keys = self.process()

    def process(self, threads: ThreadPoolExecutor | None = None) -> IssuedKeys:
        """Return what another process, or this one after a restart, would let in by."""
        return IssuedKeys(self.table, self.clock, threads or self.threads, self.sleep)

    async def sleep(self, seconds: float) -> None:
        """Be kept waiting as long as the others need."""
        self.naps.append(seconds)
        await asyncio.sleep(0)

    def issue(self, **fields: Any) -> str:
        """Store a new key and return it."""
        token = generate()
        key_id, secret = parts(token)
        key = Key(key_id, hash_secret(secret, CHEAP), "a key", "worker", "w1", None, "worker",
                  '["receipts:read","tasks:lease"]', None, None, NOON - DAY_SECONDS, None, None, None, 1,
                  NOON - DAY_SECONDS, "root")
        self.table.keys[key_id] = replace(key, **fields)
        return token

    async def show(self, token: str | None, address: str | None = HOME) -> Caller | None:
        return await self.keys.caller(token, address)

    async def lets_in(self, token: str) -> bool:
        try:
            return await self.show(token) is not None
        except InvalidToken:        # of a suspended tenant
            return False

    async def together(self, *tokens: str, address: Callable[[int], str] = lambda _: HOME) -> list[Any]:
        """Show keys at the same time; return who each one is, or the error."""
        shown = [self.show(token, address(at)) for at, token in enumerate(tokens)]
        return await asyncio.gather(*shown, return_exceptions=True)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """Return a way in; that it closes is part of every test."""
    opened = World()
    yield opened
    opened.threads.go.set()
    await opened.keys.close()


def parts(token: str) -> tuple[str, str]:
    """Return the key id and the secret of a good key."""
    pair = parse(token)
    assert pair is not None
    return pair


def key_of(key_id: str, secret: str) -> str:
    """Write a key with a checksum that is right, whatever the rest is."""
    return f"aga_{key_id}{secret}" + checksum(f"aga_{key_id}{secret}")


def with_wrong_secret(token: str) -> str:
    """Return a well-formed key of the same id with another secret."""
    return key_of(parts(token)[0], parts(generate())[1])


def errors(answers: list[Any]) -> list[str]:
    return [answer.code for answer in answers if isinstance(answer, GateError)]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what threads do."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  # threads tell nobody
            await asyncio.sleep(0.001)


# The form.

LETTERS = string.ascii_letters + string.digits
KEY = generate()


def test_a_key_is_a_prefix_an_id_a_secret_and_a_checksum_in_letters_and_digits() -> None:
    key_id, secret = parts(KEY)

    assert (KEY[:4], len(key_id), len(secret), len(KEY)) == ("aga_", 12, 43, 65)
    assert set(KEY[4:]) <= set(LETTERS)
    assert key_of(key_id, secret) == KEY


def test_two_keys_share_nothing() -> None:
    made = [parts(generate()) for _ in range(100)]

    assert len({key_id for key_id, _ in made}) == len({secret for _, secret in made}) == 100


@given(st.integers(0, 64), st.one_of(st.sampled_from(LETTERS), st.characters()))
def test_a_key_with_one_wrong_character_is_no_key(at: int, character: str) -> None:
    changed = KEY[:at] + character + KEY[at + 1:]

    assert (parse(changed) is None) == (changed != KEY)


@given(st.text())
def test_whatever_is_shown_is_parsed_without_an_error(text: str) -> None:
    assert parse(text) is None
    assert parse("aga_" + text) is None
    assert len(checksum(text)) == 6


def test_letters_beyond_base62_are_no_key_even_with_the_right_checksum() -> None:
    for odd in ("-" * 43, "_" * 43, "٣" * 43, "é" * 43, " " * 43, "\0" * 43):
        assert parse(key_of("A" * 12, odd)) is None


def test_another_prefix_is_no_key_even_with_the_right_checksum() -> None:
    assert parse("agb_" + KEY[4:59] + checksum("agb_" + KEY[4:59])) is None


# Who is let in, and who is not.


async def test_a_good_key_stands_for_the_principal_and_the_limits_of_its_row(world: World) -> None:
    token = world.issue(principal_instance_id="i1", capabilities='["gpu"]', task_types='["demo","train"]')

    assert await world.show(token) == Caller(
        TENANT, Principal("worker", "w1", "i1"), "worker", frozenset({"tasks:lease", "receipts:read"}), True,
        parts(token)[0], frozenset({"gpu"}), frozenset({"demo", "train"}))


async def test_a_key_without_limits_has_none(world: World) -> None:
    caller = await world.show(world.issue())

    assert caller is not None
    assert (caller.capabilities, caller.task_types) == (None, None)


async def test_a_scope_that_there_is_not_is_not_given(world: World) -> None:
    caller = await world.show(world.issue(scopes='["tasks:lease","tasks:steal"]'))

    assert caller is not None
    assert caller.scopes == {"tasks:lease"}


MALFORMED = {
    "nothing": lambda key: None,
    "empty": lambda key: "",
    "prefix alone": lambda key: "aga_",
    "wrong checksum": lambda key: key[:59] + ("111111" if key[59:] != "111111" else "222222"),
    "lower case": lambda key: key.lower(),
    "upper case prefix": lambda key: "AGA_" + key[4:],
    "trailing space": lambda key: key + " ",
    "leading space": lambda key: " " + key,
    "trailing newline": lambda key: key + "\n",
    "cut short": lambda key: key[:-1],
    "unicode digits": lambda key: key[:4] + "".join(chr(0xFF10 + int(c)) if c.isdigit() else c for c in key[4:]),
    "wide": lambda key: "aga_" + "é" * 61,
    "100 KB": lambda key: key + "A" * 100_000,
    "a lone surrogate": lambda key: key[:-1] + "\ud800",
    "another scheme": lambda key: "sk-" + key,
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED.keys())
async def test_what_is_no_key_costs_no_look_up(world: World, change: Callable[[str], str | None]) -> None:
    token = world.issue()
    while not any(letter.isdigit() for letter in token[4:]) or token == token.lower():
        token = world.issue()

    assert await world.show(change(token)) is None
    assert (world.table.asked, world.threads.given, len(world.keys.failures.counted)) == ([], 0, 0)
    assert await world.lets_in(token)


BARRED: dict[str, dict[str, Any]] = {
    "expired": {"expires_at": NOON}, "revoked": {"revoked_at": NOON - 1}, "not yet valid": {"not_before": NOON + 0.001},
    "revoked later, by another clock": {"revoked_at": NOON + 1}, "role system": {"role": "system"},
    "kind system": {"principal_kind": "system"}, "kind asyncgate": {"principal_kind": "asyncgate"}}


@pytest.mark.parametrize("fields", BARRED.values(), ids=BARRED.keys())
async def test_a_right_secret_does_not_help_a_barred_key(world: World, fields: dict[str, Any]) -> None:
    token = world.issue(**fields)

    assert [await world.lets_in(token) for _ in range(3)] == [False, False, False]


async def test_a_key_of_a_suspended_tenant_is_refused_until_it_is_not(world: World) -> None:
    token = world.issue()
    world.table.suspended.add(TENANT)
    assert not await world.lets_in(token)

    world.table.suspended.clear()
    world.clock.now += 5

    assert await world.lets_in(token)


async def test_the_secret_of_one_key_does_not_open_another(world: World) -> None:
    first, second = world.issue(), world.issue()
    mixed = key_of(parts(first)[0], parts(second)[1])

    assert not await world.lets_in(mixed)
    assert await world.lets_in(first)
    assert not await world.lets_in(mixed)
    assert not await world.lets_in(with_wrong_secret(first))


async def test_an_unknown_key_is_refused_without_argon2(world: World) -> None:
    assert not await world.lets_in(generate())
    assert world.threads.given == 0


async def test_the_default_costs_make_hashes_that_hold() -> None:
    _, secret = parts(generate())

    hash = hash_secret(secret, ApiKeys())

    assert hash.startswith("$argon2id$v=19$m=65536,t=2,p=1$")
    assert secret not in hash
    assert proves_secret(secret, hash)
    assert not proves_secret(secret[:-1] + "é", hash)


def test_roles_and_scopes_default_by_the_kind_of_principal() -> None:
    assert [default_role(kind) for kind in ("human", "agent", "service", "worker")] == ["agent"] * 3 + ["worker"]
    assert encode_names(default_scopes("agent")) == '["receipts:ack","receipts:read","tasks:read","tasks:write"]'
    assert encode_names(default_scopes("worker")) == '["receipts:read","tasks:lease"]'
    assert default_scopes("admin") == SCOPES - {"metrics:read"}
    assert (default_scopes("system"), encode_names(None)) == (frozenset(), None)


# Hot and cold.


async def test_a_hot_key_costs_neither_argon2_nor_a_look_up_nor_an_object(world: World) -> None:
    token = world.issue()
    first = await world.show(token)
    asked = len(world.table.asked)

    shown = [await world.show(token) for _ in range(100)]

    assert all(caller is first for caller in shown)
    assert (len(world.table.asked), world.threads.given) == (asked, 1)


async def test_a_restart_proves_again(world: World) -> None:
    token = world.issue()
    await world.show(token)

    assert await world.process().caller(token, HOME)
    assert world.threads.given == 2


async def test_the_row_is_read_again_after_five_seconds_and_the_secret_stays_proven(world: World) -> None:
    token = world.issue()
    await world.show(token)
    asked = len(world.table.asked)

    world.clock.now += 4.999
    await world.show(token)
    assert len(world.table.asked) == asked
    world.clock.now = NOON + 5
    await world.show(token)

    assert (len(world.table.asked), world.threads.given) == (asked + 1, 1)


async def test_after_a_day_the_secret_is_proven_again(world: World) -> None:
    token = world.issue()
    await world.show(token)

    world.clock.now = NOON + DAY_SECONDS - 1
    assert await world.lets_in(token)
    assert world.threads.given == 1
    world.clock.now = NOON + DAY_SECONDS
    assert await world.lets_in(token)

    assert world.threads.given == 2


async def test_what_a_row_newly_says_holds_after_five_seconds(world: World) -> None:
    token = world.issue()
    await world.show(token)
    world.table.change(token, scopes='["receipts:read"]', capabilities='["cpu"]')

    world.clock.now += 5
    caller = await world.show(token)

    assert caller is not None
    assert (encode_names(caller.scopes), encode_names(caller.capabilities)) == ('["receipts:read"]', '["cpu"]')


async def test_many_who_show_a_cold_key_at_once_have_it_proven_once(world: World) -> None:
    token = world.issue()

    callers = await world.together(*[token] * 50)

    assert isinstance(callers[0], Caller)
    assert all(caller is callers[0] for caller in callers)
    assert (world.threads.given, len(world.table.asked)) == (1, 2)     # the hash, then what the row says by now


async def test_many_who_show_a_key_at_once_have_its_row_read_again_once(world: World) -> None:
    token = world.issue()
    await world.show(token)
    world.clock.now += 6
    world.table.asked.clear()

    callers = await world.together(*[token] * 50)

    assert all(isinstance(caller, Caller) for caller in callers)
    assert (world.threads.given, len(world.table.asked)) == (1, 1)


async def test_who_leaves_takes_the_proof_from_nobody(world: World) -> None:
    token = world.issue()
    world.threads.go.clear()
    first, second = (asyncio.ensure_future(world.show(token)) for _ in range(2))
    await until(lambda: world.threads.given == 1)

    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    world.threads.go.set()

    assert isinstance(await second, Caller)
    assert world.threads.given == 1


async def test_who_leaves_takes_the_row_from_nobody(world: World) -> None:
    token = world.issue()
    await world.show(token)
    world.clock.now += 6
    world.table.asked.clear()
    world.table.answers = asyncio.Event()
    first, second = (asyncio.ensure_future(world.show(token)) for _ in range(2))
    await until(lambda: bool(world.table.asked))

    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    world.table.answers.set()

    assert isinstance(await second, Caller)
    assert len(world.table.asked) == 1


async def test_a_failure_that_nobody_waits_for_is_no_noise(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.table.answers = asyncio.Event()
    left = asyncio.ensure_future(world.show(world.issue(hash="no hash")))
    await until(lambda: bool(world.table.asked))

    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    world.table.answers.set()
    await until(lambda: not world.keys.proofs.under_way)
    del left
    gc.collect()

    assert world.threads.given == 1
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


# What a process remembers is bounded.


async def test_the_key_that_was_not_used_for_longest_is_proven_again(world: World) -> None:
    world.keys.proven.most = 2
    a, b, c = (world.issue() for _ in range(3))
    for token in (a, b, a, c):
        assert await world.lets_in(token)
    assert world.threads.given == 3

    assert await world.lets_in(a)
    assert world.threads.given == 3
    assert await world.lets_in(b)
    assert world.threads.given == 4


async def test_a_key_that_is_used_now_and_then_is_not_forgotten_for_busier_ones(world: World) -> None:
    world.keys.proven.most = 2
    rare, b, c = (world.issue() for _ in range(3))
    for token in (rare, b):
        assert await world.lets_in(token)
    world.clock.now += 6

    for token in (rare, c, rare):
        assert await world.lets_in(token)

    assert world.threads.given == 3


async def test_a_flood_of_made_up_keys_does_not_fill_the_memory(world: World) -> None:
    for at in range(10_100):
        assert await world.show(generate(), f"10.{at >> 16}.{at >> 8 & 255}.{at & 255}") is None

    assert (len(world.keys.refused), len(world.keys.failures.counted)) == (10_000, 10_000)
    assert (len(world.keys.proven), world.keys.proven.most, len(world.keys.proofs.under_way)) == (0, 10_000, 0)
    assert world.threads.given == 0


# Wrong keys.


async def test_a_wrong_key_is_wrong_for_a_minute_without_another_look(world: World) -> None:
    wrong = with_wrong_secret(world.issue())

    for _ in range(50):
        assert not await world.lets_in(wrong)
    assert (world.threads.given, len(world.table.asked)) == (1, 1)
    world.clock.now += 60
    assert not await world.lets_in(wrong)

    assert (world.threads.given, len(world.table.asked)) == (2, 2)


async def test_behind_ten_wrong_keys_of_an_address_a_wrong_one_is_refused_and_a_good_one_is_not(world: World) -> None:
    """Failures never refuse a credential that verifies: somebody else behind the same NAT may have failed."""
    for _ in range(10):
        assert not await world.lets_in(generate())
    world.clock.now += 0.5

    with pytest.raises(RateLimitExceeded) as refusal:
        await world.show(generate())

    assert refusal.value.body() | {"message": "", "detail": ""} == {
        "error": "rate_limit_exceeded", "message": "", "detail": "", "retry_after": 60, "limit": 10, "window": "1m"}
    assert world.threads.given == 0
    for _ in range(3):
        assert await world.lets_in(world.issue())


async def test_the_slow_lane_takes_turns_by_address_and_key(world: World) -> None:
    """A good key's proof waits for one of each other's, however many those are."""
    victim, holder = world.issue(), world.issue()
    for _ in range(10):
        assert not await world.lets_in(generate())
    world.threads.go.clear()

    wrong = [with_wrong_secret(victim) for _ in range(20)]
    answers = asyncio.ensure_future(world.together(*wrong))
    await until(lambda: world.threads.given == 1 and len(world.table.asked) >= 30)
    good = asyncio.ensure_future(world.show(holder))
    await until(lambda: len(world.keys.slow.queues) == 2)
    world.threads.go.set()

    assert isinstance(await good, Caller)
    assert world.threads.given <= 4
    told = await answers
    assert set(errors(told)) == {"rate_limit_exceeded"}


async def test_who_waits_in_the_slow_lane_is_told_when_that_is_full_or_the_gate_stops(
        world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_keys, "SLOW_EACH", 2)
    victim = world.issue()
    for _ in range(10):
        assert not await world.lets_in(generate())
    world.threads.go.clear()

    wrong = [with_wrong_secret(victim) for _ in range(6)]
    answers = asyncio.ensure_future(world.together(*wrong))
    await until(lambda: len(world.table.asked) >= 16)
    world.keys.slow.close()
    world.threads.go.set()

    told = await answers
    assert sorted(errors(told)) == ["overloaded"] * 5 + ["rate_limit_exceeded"]


async def test_from_where_a_key_was_used_it_is_proven_at_once_also_after_a_restart(world: World) -> None:
    """That it was proven is kept with its row, and no digest of it."""
    token = world.issue(places='["192.0.2.0/24"]')
    for at in range(10):
        assert await world.show(with_wrong_secret(token), f"198.51.{at}.1") is None
    naps = len(world.naps)

    assert isinstance(await world.process().caller(token, "192.0.2.7"), Caller)
    assert isinstance(await world.show(token, "192.0.2.7"), Caller)

    assert len(world.naps) == naps, "not by the slow lane"


async def test_who_goes_on_trying_is_kept_waiting_and_nobody_else(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_keys, "MOST_DELAYED", 3)      # more than that would cost memory
    hot = world.issue()
    await world.show(hot)
    for _ in range(10):
        assert not await world.lets_in(generate())
    quick = list(world.naps)

    await world.together(hot, *[generate() for _ in range(5)])
    await world.show(generate(), "192.0.2.9")

    assert (quick, world.naps) == ([], [identity_keys.DELAY_SECONDS] * 3)
    assert world.keys.delayed == 0


async def test_who_waits_as_long_as_told_fails_no_more_than_others(world: World) -> None:
    for _ in range(10):
        assert not await world.lets_in(generate())
    world.clock.now += 20.5

    with pytest.raises(RateLimitExceeded) as refusal:
        await world.show(generate())
    world.clock.now += refusal.value.more["retry_after"] - 0.501
    with pytest.raises(RateLimitExceeded):
        await world.show(generate())
    world.clock.now += 0.501

    assert await world.show(generate()) is None


async def test_wrong_secrets_from_everywhere_slow_down_a_key_and_do_not_bar_its_holder(world: World) -> None:
    """Ten wrong secrets for a key id, which is not a secret, would otherwise keep its holder out for ever."""
    token = world.issue()
    for at in range(10):
        assert await world.show(with_wrong_secret(token), f"192.0.2.{at}") is None
    naps = len(world.naps)

    with pytest.raises(RateLimitExceeded):
        await world.show(with_wrong_secret(token), "198.51.100.1")

    assert isinstance(await world.show(token, "203.0.113.1"), Caller)
    assert world.naps[naps:].count(identity_keys.REST_SECONDS) >= 1
    assert isinstance(await world.show(world.issue(), "198.51.100.1"), Caller)


async def test_a_hot_key_does_not_suffer_from_wrong_ones(world: World) -> None:
    token = world.issue()
    await world.show(token)

    for _ in range(10):
        assert not await world.lets_in(with_wrong_secret(token))
    world.clock.now += 6

    assert await world.lets_in(token)


async def test_a_right_key_is_no_failure(world: World) -> None:
    for _ in range(30):
        assert await world.lets_in(world.issue())


async def test_an_id_that_is_unknown_is_not_counted(world: World) -> None:
    key_id, _ = parts(generate())
    for at in range(30):
        assert await world.show(key_of(key_id, parts(generate())[1]), f"192.0.2.{at}") is None


async def test_without_an_address_only_the_key_id_counts(world: World) -> None:
    for _ in range(30):
        assert await world.show(generate(), None) is None


@pytest.mark.parametrize("fields", [{}, *BARRED.values()], ids=["wrong secret", *BARRED])
async def test_a_wrong_secret_and_a_barred_key_cost_and_count_the_same(world: World, fields: dict[str, Any]) -> None:
    token = world.issue(**fields)
    shown = token if fields else with_wrong_secret(token)

    assert await world.together(*[shown] * 5) == [None] * 5
    assert await world.show(shown) is None
    assert world.threads.given == 1
    for _ in range(9):
        assert await world.show(with_wrong_secret(token)) is None
    with pytest.raises(RateLimitExceeded):
        await world.show(with_wrong_secret(token))
    assert world.threads.given == 11


def test_an_ipv6_client_is_counted_by_its_network() -> None:
    assert network_of("2001:db8:1:2:3:4:5:6") == network_of("2001:db8:1:2::") == "2001:db8:1:2::/64"
    assert network_of("2001:db8:1:3::1") != network_of("2001:db8:1:2::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") == "192.0.2.1"
    assert (network_of(None), network_of("testclient")) == ("", "testclient")
    assert network_of("fe80::1%eth0") == "fe80::/64"


async def test_of_200_wrong_keys_at_once_two_are_hashed_at_a_time_and_most_not_at_all(world: World) -> None:
    good = world.issue()
    await world.show(good)
    wrong = [with_wrong_secret(world.issue()) for _ in range(200)]
    world.threads.go.clear()

    answers = asyncio.ensure_future(world.together(*wrong, address=lambda at: f"192.0.2.{at}"))
    await until(lambda: len(world.table.asked) == 202 and world.threads.given >= 3)

    assert (world.threads.given, world.keys.hasher.waiting) == (3, 16)      # the good one is among them
    assert await world.lets_in(good)
    world.threads.go.set()
    assert sorted(errors(await answers)) == ["overloaded"] * 182
    assert world.threads.given == 1 + 18


async def test_who_is_turned_away_for_want_of_room_is_told_when_to_come_back(world: World) -> None:
    world.threads.go.clear()
    crowd = [world.issue() for _ in range(18)]
    answers = asyncio.ensure_future(world.together(*crowd))
    await until(lambda: world.keys.hasher.waiting == 16)
    late = world.issue()

    with pytest.raises(Overloaded) as refusal:
        await world.show(late)
    world.threads.go.set()

    assert (refusal.value.status, refusal.value.more) == (503, {"retry_after": 1})
    assert all(isinstance(answer, Caller) for answer in await answers)
    assert await world.lets_in(late)


async def test_of_200_wrong_secrets_for_one_key_no_more_are_hashed_than_find_room(world: World) -> None:
    token = world.issue()

    answers = await world.together(*[with_wrong_secret(token) for _ in range(200)])

    assert set(errors(answers)) == {"overloaded"}
    assert world.threads.given == 18
    assert world.naps, "behind ten of them the others had to take the slow lane"


async def test_who_gives_up_waiting_leaves_room(world: World) -> None:
    world.threads.go.clear()
    work = partial(hash_secret, "secret", CHEAP)
    hashing = [asyncio.ensure_future(world.keys.hasher.run(work)) for _ in range(18)]
    await until(lambda: world.keys.hasher.waiting == 16)

    for waiting in hashing[2:]:
        waiting.cancel()
    await asyncio.gather(*hashing[2:], return_exceptions=True)
    world.threads.go.set()

    assert world.keys.hasher.waiting == 0
    assert all(proves_secret("secret", hash) for hash in await asyncio.gather(*hashing[:2]))


# Revocation and rotation.


async def test_a_revoked_key_is_refused_at_once_here_and_within_five_seconds_elsewhere(world: World) -> None:
    token, elsewhere = world.issue(), world.process()
    assert await world.lets_in(token)
    assert await elsewhere.caller(token)

    world.table.change(token, revoked_at=NOON)
    world.keys.forget(parts(token)[0])

    assert not await world.lets_in(token)
    world.clock.now += 4.999
    assert await elsewhere.caller(token)
    world.clock.now = NOON + 5
    assert await elsewhere.caller(token) is None


async def test_to_forget_a_key_costs_a_look_up_and_no_argon2(world: World) -> None:
    token = world.issue()
    await world.show(token)
    asked = len(world.table.asked)

    world.keys.forget(parts(token)[0])
    world.keys.forget("unknown")

    assert await world.lets_in(token)
    assert (len(world.table.asked), world.threads.given) == (asked + 1, 1)


async def test_a_row_that_was_read_before_the_revocation_lets_nobody_in_after_it(world: World) -> None:
    token = world.issue()
    await world.show(token)
    world.clock.now += 6
    world.table.asked.clear()
    world.table.answers = asyncio.Event()
    before = asyncio.ensure_future(world.show(token))
    await until(lambda: len(world.table.asked) == 1)

    world.table.change(token, revoked_at=world.clock.now)
    world.keys.forget(parts(token)[0])
    after = asyncio.ensure_future(world.show(token))
    world.table.answers.set()

    assert (await before, await after) == (None, None)
    assert len(world.table.asked) == 2


async def test_a_key_that_is_revoked_while_it_is_being_proven_is_refused(world: World) -> None:
    token = world.issue()
    world.threads.go.clear()
    shown = asyncio.ensure_future(world.show(token))
    await until(lambda: world.threads.given == 1)

    world.table.change(token, revoked_at=NOON)
    world.keys.forget(parts(token)[0])
    world.threads.go.set()

    assert await shown is None
    assert not await world.lets_in(token)


async def test_a_tenant_is_suspended_at_once_here_and_others_notice_nothing(world: World) -> None:
    token = world.issue()
    await world.show(token)
    asked = len(world.table.asked)

    world.keys.forget_tenant("another")
    assert await world.lets_in(token)
    assert len(world.table.asked) == asked
    world.table.suspended.add(TENANT)
    world.keys.forget_tenant(TENANT)

    assert not await world.lets_in(token)


async def test_a_key_whose_row_is_gone_is_unknown(world: World) -> None:
    token = world.issue()
    await world.show(token)

    del world.table.keys[parts(token)[0]]
    world.keys.forget(parts(token)[0])

    assert not await world.lets_in(token)
    assert len(world.keys.proven) == 0


async def test_another_hash_must_be_proven_anew(world: World) -> None:
    same, other = world.issue(), world.issue()
    assert [await world.lets_in(token) for token in (same, other)] == [True, True]

    world.table.change(same, version=2, hash=hash_secret(parts(same)[1], CHEAP))
    world.table.change(other, version=2, hash=hash_secret("another secret", CHEAP))
    world.clock.now += 5

    assert [await world.lets_in(token) for token in (same, other)] == [True, False]
    assert world.threads.given == 4


async def test_both_keys_of_a_rotation_are_good_until_the_second_when_the_old_one_ends(world: World) -> None:
    old, new = world.issue(), world.issue()
    key = retire_key(world.table.keys[parts(old)[0]], parts(new)[0], NOON, overlap_seconds=3600)
    world.table.keys[key.key_id] = key

    for moment in (NOON, NOON + 1800, NOON + 3599.999):
        world.clock.now = moment
        assert [await world.lets_in(token) for token in (old, new)] == [True, True]
    world.clock.now = NOON + 3600
    assert [await world.lets_in(token) for token in (old, new)] == [False, True]

    assert (key.rotated_to, key.expires_at) == (parts(new)[0], NOON + 3600)


def test_a_retired_key_lasts_a_day_or_as_told_30_days_at_most_and_no_longer_than_before() -> None:
    world = World()
    key = world.table.keys[parts(world.issue())[0]]

    assert retire_key(key, "next", NOON).expires_at == NOON + DAY_SECONDS
    assert retire_key(key, "next", NOON, overlap_seconds=90 * DAY_SECONDS).expires_at == NOON + 30 * DAY_SECONDS
    assert retire_key(key, "next", NOON, overlap_seconds=0).expires_at == NOON
    assert retire_key(replace(key, expires_at=NOON + 60), "next", NOON).expires_at == NOON + 60


# The clock.


async def test_a_hot_key_begins_and_ends_to_the_moment(world: World) -> None:
    token = world.issue(not_before=NOON + 1, expires_at=NOON + 3)
    moments = {NOON + 0.999: False, NOON + 1: True, NOON + 2.999: True, NOON + 3: False, NOON + 2: True}

    for moment, good in moments.items():
        world.clock.now = moment
        assert await world.lets_in(token) == good, moment
    assert world.threads.given == 1


@pytest.mark.parametrize("leap", [-1e9, -DAY_SECONDS, -3.0, 3.0, DAY_SECONDS, 1e9])
async def test_a_clock_that_leaps_lets_no_revoked_key_in_for_longer(world: World, leap: float) -> None:
    token = world.issue(not_before=0.0)
    assert await world.lets_in(token)
    world.table.change(token, revoked_at=NOON)

    world.clock.now += leap
    await world.show(token)
    world.clock.now += 5

    assert not await world.lets_in(token)


async def test_a_clock_that_goes_back_keeps_nobody_out(world: World) -> None:
    token = world.issue(not_before=0.0)
    row = world.table.keys.pop(parts(token)[0])
    for wrong in [token, *(generate() for _ in range(9))]:
        assert not await world.lets_in(wrong)

    world.table.keys[row.key_id] = row
    world.clock.now -= DAY_SECONDS

    assert await world.lets_in(token)


# The database.


async def test_without_the_database_a_key_is_good_for_the_five_seconds_and_no_longer(world: World) -> None:
    token = world.issue()
    await world.show(token)
    world.table.down = True

    world.clock.now += 4.999
    assert await world.lets_in(token)
    world.clock.now = NOON + 5
    for shown in (token, world.issue(), generate()):
        with pytest.raises(DatabaseUnavailable):
            await world.show(shown)
    world.table.down = False

    assert await world.lets_in(token)
    assert world.threads.given == 1


async def test_that_the_database_is_down_is_nobodys_failure(world: World) -> None:
    world.table.down = True
    for _ in range(30):
        with pytest.raises(DatabaseUnavailable):
            await world.show(generate())
    world.table.down = False

    assert await world.lets_in(world.issue())


async def test_a_database_slower_than_the_five_seconds_still_lets_in(world: World) -> None:
    token = world.issue()
    await world.show(token)
    world.clock.now += 6
    world.table.asked.clear()
    world.table.answers = asyncio.Event()

    shown = asyncio.ensure_future(world.show(token))
    await until(lambda: bool(world.table.asked))
    world.clock.now += 7
    world.table.answers.set()

    assert isinstance(await shown, Caller)
    assert len(world.table.asked) == 1


async def test_the_last_use_is_written_at_most_once_a_minute_by_all_processes(world: World) -> None:
    token, elsewhere = world.issue(), world.process()
    key_id, _ = parts(token)

    for _ in range(130):
        await world.show(token)
        await elsewhere.caller(token)
        world.clock.now += 1
    await asyncio.gather(*world.keys.tasks, *elsewhere.tasks)

    assert [(tenant, key) for tenant, key, _ in world.table.touched] == [(TENANT, key_id)] * 3
    times = [now for *_, now in world.table.touched]
    assert times[0] == NOON
    assert all(60 <= later - earlier <= 65 for earlier, later in pairwise(times))


async def test_what_is_refused_is_no_use(world: World) -> None:
    await world.together(with_wrong_secret(world.issue()), world.issue(revoked_at=NOON), generate())
    await world.keys.close()

    assert world.table.touched == []


async def test_a_use_that_cannot_be_noted_keeps_nobody_out(world: World, caplog: pytest.LogCaptureFixture) -> None:
    token = world.issue()
    world.table.touch_key = None  # type: ignore[method-assign, assignment]

    for _ in range(3):
        assert await world.lets_in(token)
        world.clock.now += 6
    await asyncio.gather(*world.keys.tasks)

    told = [record for record in caplog.records if "cannot store" in record.getMessage()]
    assert [parts(token)[0] in record.getMessage() for record in told] == [True] * 2, "the use, and the place"


# Threads, secrets, façades.


def keys_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncgate-keys")]


async def test_close_finishes_what_is_under_way_and_ends_the_threads(world: World) -> None:
    token, keys = world.issue(), IssuedKeys(world.table, world.clock)
    assert keys_threads() == []
    shown = [asyncio.ensure_future(keys.caller(credential)) for credential in (token, world.issue(), world.issue())]
    await until(lambda: bool(keys_threads()))

    assert len(keys_threads()) <= 2
    await keys.close()

    assert all(isinstance(caller, Caller) for caller in await asyncio.gather(*shown))
    assert keys_threads() == []
    assert len(world.table.touched) == 3


async def test_close_waits_for_a_database_that_is_slow(world: World) -> None:
    world.table.answers = asyncio.Event()
    shown = asyncio.ensure_future(world.show(world.issue()))
    await until(lambda: bool(world.table.asked))

    closing = asyncio.ensure_future(world.keys.close())
    await asyncio.sleep(0)
    world.table.answers.set()
    await closing

    assert isinstance(await shown, Caller)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
async def test_argon2_stands_back_for_the_event_loop() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before, keys = priority(), IssuedKeys(Table())
    theirs = await keys.hasher.run(priority)
    await keys.close()

    assert (theirs, priority()) == (min(before + 10, 19), before)


@pytest.fixture
def everything_logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Return all that is logged, at any level."""
    with caplog.at_level(logging.DEBUG):
        yield caplog


async def test_no_secret_and_no_hash_is_ever_told(world: World, everything_logged: pytest.LogCaptureFixture) -> None:
    good, revoked, broken = world.issue(), world.issue(revoked_at=NOON), world.issue(hash="no hash")
    wrong = with_wrong_secret(good)
    told: list[Any] = [await world.together(good, revoked, broken, wrong)]
    told += [world.keys.proven, world.keys.refused, world.keys.failures.counted, *world.table.keys.values()]
    world.clock.now += 70
    world.table.down = True
    told += [await world.together(good, revoked, broken, wrong)]
    world.table.down, world.threads = False, Counting()
    told += [await world.together(*[with_wrong_secret(good) for _ in range(30)])]
    told += [await world.together(*[with_wrong_secret(good) for _ in range(3)])]
    await world.keys.close()

    text = everything_logged.text + "".join(map(repr, told)) + "".join(
        str(answer.body()) for answers in told if isinstance(answers, list) for answer in answers
        if isinstance(answer, GateError))
    secrets = [parts(token)[1] for token in (good, revoked, broken, wrong)]
    assert [secret for secret in secrets if secret in text] == []
    assert "$argon2" not in text
    assert "RateLimitExceeded" in text


FACADES = ["rest", "mcp", "bare", "argument"]
MCP = [("accept", "application/json, text/event-stream"), ("content-type", "application/json")]


async def ask(served: Any, facade: str, token: str) -> Any:
    """Ask what the gate is set to, over one of the façades."""
    if facade == "rest":
        return await served.call("GET", "/v1/config", token=token)
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {
        "name": "asyncgate.get_config", "arguments": {"auth_token": token} if facade == "argument" else {}}}
    return await served.call("POST", "/mcp", call, token=None if facade == "argument" else token,
                             headers=MCP if facade == "mcp" else MCP[1:])


@pytest.mark.parametrize("facade", FACADES)
async def test_every_wrong_key_gets_the_same_answer_and_the_eleventh_of_an_address_another(
        world: World, served: Any, facade: str) -> None:
    served.gate.identity.ways[0].keys = world.keys
    good = world.issue()
    wrong = [good[:-1] + ("1" if good[-1] != "1" else "2"), with_wrong_secret(good), generate(),
             *(world.issue(**fields) for fields in BARRED.values())]
    assert (await ask(served, facade, good)).json().get("error") is None

    answers = [await ask(served, facade, token) for token in wrong]
    last, after = await ask(served, facade, generate()), await ask(served, facade, generate())

    assert {answer.status for answer in [*answers, last]} == {401}
    assert len({answer.content for answer in answers}) == 1
    assert b"rate_limit_exceeded" in after.content
    assert (after.status, after.headers["retry-after"]) == (429 if facade == "rest" else 200, "60")
    assert re.search(rb'limit\\?":10', after.content)      # in MCP it is text
    assert (await ask(served, facade, good)).json().get("error") is None


async def test_a_gate_that_is_asked_for_too_much_argon2_still_tells_its_health(world: World, served: Any) -> None:
    served.gate.identity.ways[0].keys = world.keys
    world.threads.go.clear()
    wrong = [with_wrong_secret(world.issue()) for _ in range(200)]

    flood = [asyncio.ensure_future(served.call("GET", "/v1/config", token=token)) for token in wrong]
    await until(lambda: world.keys.hasher.waiting == 16)
    health = await served.call("GET", "/v1/health", token=None)
    world.threads.go.set()
    answers = await asyncio.gather(*flood)

    assert health.status == 200
    assert {answer.status for answer in answers} == {401, 503}
    assert {answer.headers["retry-after"] for answer in answers if answer.status == 503} == {"1"}


def test_the_settings_say_what_a_hash_costs() -> None:
    assert Settings().security.api_keys == ApiKeys("argon2id", 2, 65536, 1)


def test_the_default_clock_is_that_of_the_process() -> None:
    assert IssuedKeys(Table()).clock is time.time
