"""Verification of issued keys, the credentials of services and workers (spec 21.2.2).

Argon2 is costly by design, so a key goes through ever costlier steps, and most end early:

    form        length, prefix, letters, checksum: a typo costs no look-up (for a proven key only the length is checked)
    proven      a digest of the key, in this process only: the secret was right within the last 24 hours
    status      revoked, suspended, limits: the row is read again after 5 seconds, or at once after `forget`
    refused     a digest that was wrong within the last minute is refused again
    failures    after ten wrong keys a minute, by address or key id, the slow lane, and a second before each refusal
    Argon2      two at a time, sixteen waiting; in the slow lane one, which rests between two

Failures of others never refuse a valid key: it is proven, if slowly.  From a network where it was used before it is
proven at once, unless that address has failures too.  The answer is the same whatever is wrong with a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from hmac import compare_digest
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from math import ceil, inf
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct

from asyncgate import SCOPES, Caller
from asyncgate.parts.identity import WayIn
from asyncgate.parts.identity.keys_stored import (
    ID_END,
    ID_START,
    LENGTH,
    KeyStore,
    hash_secret,
    parse,
    proves_secret,
)
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.model.errors import Overloaded, RateLimitExceeded
from asyncgate.parts.model.settings import ApiKeys
from asyncgate.parts.model.stored import Key
from asyncgate.parts.model.wire import Principal

log = logging.getLogger("asyncgate")

A = TypeVar("A")
K = TypeVar("K")
V = TypeVar("V")

PROVEN_SECONDS, ROW_SECONDS, REFUSED_SECONDS, USED_SECONDS = DAY_SECONDS, 5.0, 60.0, 60.0
FAILURES, FAILURES_SECONDS = 10, 60.0       # wrong keys by one address, or for one key id
MOST_HASHING, MOST_WAITING = 2, 16
REST_SECONDS, SLOW_EACH, SLOW_ALL = 0.25, 32, 1000     # of the slow lane: between two proofs, and how many may wait
HELD_SECONDS, MOST_HELD = 1.0, 1000         # refusals of those who go on trying
PLACES, ADDRESSES = 16, 256                 # of one key: networks that are kept, addresses that a process remembers
MOST_PROOFS_REMEMBERED = 10_000                         # entries of each memory


# What a process remembers.


class Bounded(OrderedDict[K, V]):
    """A mapping that forgets what has not been put or moved to the end for longest."""

    def __init__(self, most: int = MOST_PROOFS_REMEMBERED) -> None:
        super().__init__()
        self.most = most

    def put(self, key: K, value: V) -> None:
        """Set an entry and count it as the latest."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)


class Failures:
    """Counts wrong keys by name, an address or a key id; ten in a minute are too many."""

    def __init__(self) -> None:
        self.counted: Bounded[str, tuple[float, int]] = Bounded()   # since when, how many

    def refusal(self, now: float, over: float) -> RateLimitExceeded:
        """Make the refusal of a wrong key after ten others."""
        return RateLimitExceeded("too many wrong keys; wait, then send a valid key", limit=FAILURES, window="1m",
                                 retry_after=max(1, ceil(over + FAILURES_SECONDS - now)))

    def over(self, now: float, *names: str) -> float | None:
        """Return since when the minute runs that one of the names has used up."""
        windows = (self._window(name, now) for name in names if name)
        return next((since for since, count in windows if count >= FAILURES), None)

    def add(self, now: float, *names: str) -> None:
        """Count one failure for each name."""
        for name in filter(None, names):
            since, count = self._window(name, now)
            self.counted.put(name, (since, count + 1))

    def _window(self, name: str, now: float) -> tuple[float, int]:
        since, count = self.counted.get(name, (now, 0))
        return (since, count) if 0 <= now - since < FAILURES_SECONDS else (now, 0)


class Proven(Struct, eq=False):
    """A key whose secret was right, and its row as last read."""

    digest: bytes
    version: int
    proven_at: float
    caller: Caller | None = None
    since: float = inf                  # from here to `until` the caller is good without a question
    until: float = -inf
    begins: float = inf                 # from here to `ends` the row lets it in
    ends: float = -inf
    read_at: float = -inf
    used_at: float = -inf               # as far as it has been written down
    places: list[str] = []              # networks that it was used from, as far as that is known
    addresses: set[str | None] = set()  # those of this process: of the same nobody asks again
    stale: bool = True                  # the row has changed, or may have, since it was last asked for
    void: bool = False                  # the row is gone, or has another hash
    reading: asyncio.Task[None] | None = None

    def take(self, tenant_id: str, suspended: bool, key: Key, read_at: float) -> None:
        """Take over the row; it is read again if the clock goes back."""
        barred = suspended or key.revoked_at is not None or key.role == "system" or key.principal_kind in UNREACHABLE
        self.begins = inf if barred else key.not_before
        self.ends = inf if key.expires_at is None else key.expires_at
        self.since = max(read_at, self.begins)
        self.until = min(read_at + ROW_SECONDS, self.ends, self.proven_at + PROVEN_SECONDS)
        self.read_at, self.caller = read_at, caller_of_key(tenant_id, key)
        self.places = [*dict.fromkeys([*self.places, *places_of(key)])][:PLACES]

    def forget(self) -> None:
        """Stop trusting the row, also a read of it that is under way."""
        self.stale, self.since, self.read_at = True, inf, -inf


def places_of(key: Key) -> list[str]:
    """Return the networks that a key was used from."""
    return msgspec.json.decode(key.places, type=list[str]) if key.places else []


UNREACHABLE = ("system", "asyncgate")   # kinds of principal that nobody outside is


def caller_of_key(tenant_id: str, key: Key) -> Caller:
    """Return the caller that a key identifies."""
    def names(text: str) -> frozenset[str]:
        return msgspec.json.decode(text, type=frozenset[str])

    who = Principal(key.principal_kind, key.principal_id, key.principal_instance_id)
    capabilities, task_types = (None if text is None else names(text) for text in (key.capabilities, key.task_types))
    return Caller(tenant_id, who, key.role, names(key.scopes) & SCOPES, key_id=key.key_id, capabilities=capabilities,
                  task_types=task_types)


def network_of(address: str | None) -> str:
    """Return the network that failures are counted by; for IPv6 the /64, which one client has to itself."""
    try:
        ip = ip_address(address or "")
    except ValueError:
        return address or ""
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is None:
        return str(ip_network((int(ip), 64), strict=False))
    return str(ip if isinstance(ip, IPv4Address) else ip.ipv4_mapped)


def place_of(address: str | None) -> str:
    """Return the network by which usual addresses of a key are remembered."""
    try:
        ip = ip_address(network_of(address).partition("/")[0])
    except ValueError:
        return ""
    return str(ip_network((ip, 24 if isinstance(ip, IPv4Address) else 48), strict=False))


# Letting in.


async def share_outcome(task: asyncio.Task[A]) -> A:
    """Wait for a shared task; a waiter that is canceled does not cancel the task."""
    await asyncio.wait([task])
    return task.result()


def lower_priority() -> None:
    """Give this thread a lower priority than the event loop; a no-op outside Linux."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):      # a sandbox may forbid it
            os.nice(10)


class Hasher:
    """Argon2 on threads: two at a time and sixteen waiting; further calls are refused as overload."""

    def __init__(self, executor: Executor | None = None) -> None:
        self.executor = executor or ThreadPoolExecutor(MOST_HASHING, "asyncgate-keys", lower_priority)
        self.turns, self.waiting = asyncio.Semaphore(MOST_HASHING), 0

    async def run(self, work: Callable[[], A], still: Callable[[], None] = lambda: None) -> A:
        """Run the work when its turn comes; `still` may refuse it then as not needed any more."""
        if self.waiting >= MOST_WAITING:
            raise Overloaded("more keys are to be checked than the gate can keep up with; try again", retry_after=1)
        self.waiting += 1
        try:
            await self.turns.acquire()
        finally:
            self.waiting -= 1
        try:
            still()
            return await asyncio.get_running_loop().run_in_executor(self.executor, work)
        finally:
            self.turns.release()


class Guessing(Exception):
    """A caller that waits for a proof may be guessing."""


class SlowLane:
    """Argon2 for those behind too many failures: one at a time with a rest, in turns by address and key id.

    So deliberate failures get a small share of the processor, and a valid key among them gets its turn.
    """

    def __init__(self, hasher: Hasher, sleep: Callable[[float], Awaitable[None]]) -> None:
        self.hasher, self.sleep = hasher, sleep
        self.queues: OrderedDict[tuple[str, str], deque[asyncio.Future[None]]] = OrderedDict()
        self.busy = False
        self.resting: asyncio.Task[None] | None = None

    async def run(self, name: tuple[str, str], work: Callable[[], A]) -> A:
        """Run the work when its turn comes."""
        queue = self.queues.get(name, deque())
        if len(queue) >= SLOW_EACH or len(self.queues) >= SLOW_ALL:
            raise Overloaded("more keys are to be checked than the gate can keep up with; try again", retry_after=1)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self.queues[name] = queue
        self._next()
        await turn
        try:
            return await asyncio.get_running_loop().run_in_executor(self.hasher.executor, work)
        finally:
            self.resting = asyncio.create_task(self._rest())

    def _next(self) -> None:
        if self.busy or not self.queues:
            return
        self.busy = True
        name, queue = self.queues.popitem(last=False)
        turn = queue.popleft()
        if queue:
            self.queues[name] = queue       # behind the others
        turn.set_result(None)

    async def _rest(self) -> None:
        await self.sleep(REST_SECONDS)
        self.busy = False
        self._next()

    def close(self) -> None:
        """Refuse the waiting calls."""
        for queue in self.queues.values():
            for turn in queue:
                turn.set_exception(Overloaded("the gate is about to stop", retry_after=1))
        self.queues.clear()


class IssuedKeys:
    """Verifies issued keys, on the event loop except for Argon2; `clock` decides which have expired."""

    def __init__(self, store: KeyStore, costs: ApiKeys, clock: Callable[[], float] = time.time,
                 executor: Executor | None = None, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
                 moved: Callable[[Caller, str], None] = lambda caller, place: None) -> None:
        self.store, self.costs, self.clock, self.hasher = store, costs, clock, Hasher(executor)
        self.sleep, self.held, self.moved = sleep, 0, moved
        # The digests mean nothing outside this process: what is stored stays Argon2id.
        self.keyed = blake2b(key=secrets.token_bytes(32), digest_size=32)
        self.proven: Bounded[str, Proven] = Bounded()       # by key id
        self.refused: Bounded[bytes, float] = Bounded()     # by digest, since when
        self.failures, self.slow = Failures(), SlowLane(self.hasher, sleep)
        self.flights: dict[bytes, asyncio.Task[Proven | None]] = {}
        self.tasks: set[asyncio.Task[Any]] = set()

    async def caller(self, token: str | None, address: str | None = None) -> Caller | None:
        """Return the caller of a key, or None; raises RateLimitExceeded, Overloaded and DatabaseUnavailable."""
        if token is None or len(token) != LENGTH or not token.isascii():
            return None
        keyed = self.keyed.copy()
        keyed.update(token.encode())
        digest, entry = keyed.digest(), self.proven.get(key_id := token[ID_START:ID_END])
        if entry is not None and entry.since <= self.clock() < entry.until and compare_digest(entry.digest, digest):
            self.proven.move_to_end(key_id)     # its checksum was right when it was proven, and it is the same text
            caller = entry.caller
        else:
            caller = await self._admit(*parts, digest, address) if (parts := parse(token)) else None
            entry = self.proven.get(key_id)
        if caller is not None and entry is not None and address not in entry.addresses:
            self._place(entry, caller, address)
        return caller

    def _place(self, entry: Proven, caller: Caller, address: str | None) -> None:
        """Note the network that a key is used from; report one that is new for the key."""
        if len(entry.addresses) >= ADDRESSES:
            entry.addresses.clear()
        entry.addresses.add(address)
        if not (place := place_of(address)) or place in entry.places:
            return
        if entry.places:
            self.moved(caller, place)
        entry.places = [place, *entry.places][:PLACES]
        assert caller.key_id is not None
        self._begin(self._touch(caller.tenant_id, caller.key_id, self.clock(), place))

    async def guessed(self, address: str | None) -> None:
        """Count a credential of no known kind, such as a guess at the shared token; repeated guesses must wait."""
        where, now = network_of(address), self.clock()
        over = self.failures.over(now, where)
        self.failures.add(now, where)
        if over is not None:
            await self._hold_back()

    async def still_good(self, key_id: str) -> bool:
        """Whether a key that was accepted would be accepted again."""
        if (entry := self.proven.get(key_id)) is None:      # pushed out by others, or void
            if (found := await self.store.find_key(key_id)) is None:
                return False
            entry = Proven(b"", found[2].version, self.clock())
            entry.take(*found, self.clock())
        return await self._is_current(key_id, entry) and entry.begins <= self.clock() < entry.ends

    def forget(self, key_id: str) -> None:
        """Read the row before the key is accepted again: it was revoked or changed, here or in another process."""
        if entry := self.proven.get(key_id):
            entry.forget()

    def forget_tenant(self, tenant_id: str) -> None:
        """Do so for all keys of a tenant that was suspended or deleted."""
        for entry in self.proven.values():
            if entry.caller is None or entry.caller.tenant_id == tenant_id:
                entry.forget()

    async def hash(self, secret: str) -> str:
        """Return the hash of a new key's secret, with the costs of the settings, when its turn has come."""
        return await self.hasher.run(partial(hash_secret, secret, self.costs))

    async def close(self) -> None:
        """Finish the running work and end the threads."""
        self.slow.close()
        while self.tasks:
            await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.slow.resting is not None:
            self.slow.resting.cancel()
        await asyncio.to_thread(self.hasher.executor.shutdown)

    # The slow way.

    async def _admit(self, key_id: str, secret: str, digest: bytes, address: str | None) -> Caller | None:
        while entry := self._known(key_id, digest) or await self._proved(key_id, secret, digest, address):
            if await self._is_current(key_id, entry):
                return entry.caller if entry.begins <= self.clock() < entry.ends else None
        return None

    def _known(self, key_id: str, digest: bytes) -> Proven | None:
        entry = self.proven.get(key_id)
        if entry is None or not compare_digest(entry.digest, digest):
            return None
        self.proven.move_to_end(key_id)
        return entry if self.clock() - entry.proven_at < PROVEN_SECONDS else None

    async def _proved(self, key_id: str, secret: str, digest: bytes, address: str | None) -> Proven | None:
        """Prove the secret, once for all calls that show it meanwhile."""
        where, now = network_of(address), self.clock()
        over = self.failures.over(now, where, key_id)
        found: Proven | None = None
        if not 0 <= now - self.refused.get(digest, -inf) < REFUSED_SECONDS:
            if (flight := self.flights.get(digest)) is None:
                flight = self.flights[digest] = self._begin(self._fly(key_id, secret, digest, address))
            found = await share_outcome(flight)
        if found is None and over is not None:
            await self._hold_back()
            raise self.failures.refusal(self.clock(), over)
        return found

    async def _hold_back(self) -> None:
        """Delay callers that try key after key, so that a flood leaves the gate to others (threat A10)."""
        if self.held < MOST_HELD:
            self.held += 1
            try:
                await self.sleep(HELD_SECONDS)
            finally:
                self.held -= 1

    async def _fly(self, key_id: str, secret: str, digest: bytes, address: str | None) -> Proven | None:
        try:
            return await self._prove(key_id, secret, digest, address)
        finally:
            del self.flights[digest]

    async def _prove(self, key_id: str, secret: str, digest: bytes, address: str | None) -> Proven | None:
        where, found = network_of(address), await self.store.find_key(key_id)
        if found is None:   # no Argon2 to hide that: the id is no secret, and a flood of them would be handed the CPU
            self._refuse(digest, where)
            return None
        key = found[2]
        if not await self._verified(key, secret, address):
            self._refuse(digest, where, key_id)
            return None
        entry = Proven(digest, key.version, self.clock())
        self.proven.put(key_id, entry)      # where `forget` finds it, before the row is read that counts
        await self._is_current(key_id, entry)
        if not entry.begins <= self.clock() < entry.ends:
            self.failures.add(self.clock(), where, key_id)  # or a count would tell a revoked key from a wrong one
        return entry

    async def _verified(self, key: Key, secret: str, address: str | None) -> bool:
        """Whether a secret is the key's; who may be guessing is told so slowly."""
        where, work = network_of(address), partial(proves_secret, secret, key.hash)
        if self._suspect(key, address):
            return await self.slow.run((where, key.key_id), work)
        with contextlib.suppress(Guessing):
            return await self.hasher.run(work, partial(self._still_trusted, key, address))
        return await self.slow.run((where, key.key_id), work)

    def _suspect(self, key: Key, address: str | None) -> bool:
        """Whether recent failures suggest that the caller is not the key's holder."""
        now, where = self.clock(), network_of(address)
        if self.failures.over(now, where) is not None:
            return True
        usual = place_of(address) in places_of(key)     # it was proven from there: that outlives a restart
        return self.failures.over(now, key.key_id) is not None and not usual

    def _still_trusted(self, key: Key, address: str | None) -> None:
        if self._suspect(key, address):     # others have failed while this one waited
            raise Guessing

    def _refuse(self, digest: bytes, *names: str) -> None:
        self.refused.put(digest, self.clock())
        self.failures.add(self.clock(), *names)

    async def _is_current(self, key_id: str, entry: Proven) -> bool:
        """Read the row again if it is too old, once for all waiting calls; false if the entry is void.

        While the database does not answer, a row is trusted for 5 seconds at most: the key may have been revoked.
        """
        if not 0 <= self.clock() - entry.read_at < ROW_SECONDS and not entry.void:
            entry.reading = entry.reading or self._begin(self._read(key_id, entry))
            await share_outcome(entry.reading)
        return not entry.void

    async def _read(self, key_id: str, entry: Proven) -> None:
        try:
            entry.stale = True
            while entry.stale:      # `forget` came while the row was on its way: it may be from before the change
                entry.stale, began = False, self.clock()
                found = await self.store.find_key(key_id)
        finally:
            entry.reading = None
        if found is None or found[2].version != entry.version:
            return self._drop(key_id, entry)
        entry.take(*found, began)
        self._note(entry, found[0], found[2])

    def _drop(self, key_id: str, entry: Proven) -> None:
        entry.void = True
        if self.proven.get(key_id) is entry:
            del self.proven[key_id]

    def _note(self, entry: Proven, tenant_id: str, key: Key) -> None:
        """Write that a key was used, at most once a minute."""
        now, used = self.clock(), max(entry.used_at, -inf if key.last_used_at is None else key.last_used_at)
        if entry.begins <= now < entry.ends and now - used >= USED_SECONDS:
            entry.used_at = now
            self._begin(self._touch(tenant_id, key.key_id, now))

    async def _touch(self, tenant_id: str, key_id: str, now: float, place: str | None = None) -> None:
        try:
            await self.store.touch_key(tenant_id, key_id, now, place)
        except Exception:       # nobody waits for it, and no call fails for it
            log.exception("cannot note that key %s was used", key_id)

    def _begin(self, work: Coroutine[Any, Any, A]) -> asyncio.Task[A]:
        """Start a task that goes on after its waiters have gone."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()    # seen, even if nobody waits any more


if TYPE_CHECKING:
    _: type[WayIn] = IssuedKeys
