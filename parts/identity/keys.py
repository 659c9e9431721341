"""Verification of issued keys, the credentials of services and workers (spec 21.2.2).

Argon2 is costly by design, so a key goes through ever costlier steps, and most end early:

    form        length, prefix, letters, checksum: a typo costs no query (of a proven key only the length is checked)
    proven      the key's digest is cached in this process: Argon2 accepted the secret within the last 24 hours
    status      revoked, suspended, limits: the row is read again after 5 seconds, or at once after `forget`
    refused     a digest that was wrong within the last minute is refused again without Argon2
    failures    after ten wrong keys a minute, by address or key id: the slow lane, and a second before each refusal
    Argon2      two at a time, sixteen waiting; in the slow lane one at a time, with a pause after each

A valid key is never refused because of others' failures; verifying it may take longer.  From a network where the key
was used before it is verified at once, unless that address has failures too.  The answer is the same whatever is wrong
with a key.
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
from asyncgate.parts.identity import WayIn, keys_stored
from asyncgate.parts.model import errors, stored, wire
from asyncgate.parts.model.durations import DAY_SECONDS
from asyncgate.parts.process.kit import Bounded, Flights, Rate

log = logging.getLogger("asyncgate")

A = TypeVar("A")

PROVEN_SECONDS, ROW_SECONDS, REFUSED_SECONDS, USED_SECONDS = DAY_SECONDS, 5.0, 60.0, 60.0
FAILURES, FAILURES_SECONDS = 10, 60.0       # wrong keys by one address, or for one key id: more are too many
MOST_HASHING, MOST_WAITING = 2, 16
REST_SECONDS, SLOW_EACH, SLOW_ALL = 0.25, 32, 1000     # the slow lane: pause between two keys, and how many may wait
DELAY_SECONDS, MOST_DELAYED = 1.0, 1000     # delay of refusals after too many failures, and how many at once
PLACES, ADDRESSES = 16, 256                 # of one key: networks that are stored, addresses that a process remembers


# Keys that this process has checked.


class Proven(Struct, eq=False):
    """A key whose secret Argon2 accepted, and its row as last read."""

    digest: bytes
    version: int
    proven_at: float
    caller: Caller | None = None
    since: float = inf                  # from here to `until` the caller is valid without another check
    until: float = -inf
    begins: float = inf                 # from here to `ends` the row says that the key is valid
    ends: float = -inf
    read_at: float = -inf
    used_at: float = -inf               # the last use that was stored
    places: list[str] = []              # known networks that it was used from
    addresses: set[str | None] = set()  # addresses that this process has already checked
    stale: bool = True                  # the row may have changed since the last query for it
    suspended: bool = False             # the tenant is
    void: bool = False                  # the row is gone, or has another hash
    why: tuple[str, str] | None = None  # that the row does not let the key in, as a code and in words

    def take(self, tenant_id: str, suspended: bool, key: stored.Key, read_at: float) -> None:
        """Take over the row; it is read again if the clock goes back."""
        barred = suspended or key.revoked_at is not None or key.role == "system" or key.principal_kind in UNREACHABLE
        self.suspended = suspended
        self.why = why_barred(suspended, key, read_at)
        self.begins = inf if barred else key.not_before
        self.ends = inf if key.expires_at is None else key.expires_at
        self.since = max(read_at, self.begins)
        self.until = min(read_at + ROW_SECONDS, self.ends, self.proven_at + PROVEN_SECONDS)
        self.read_at, self.caller = read_at, caller_of_key(tenant_id, key)
        self.places = [*dict.fromkeys([*self.places, *places_of(key)])][:PLACES]

    def forget(self) -> None:
        """Stop trusting the row, also a read of it that is under way."""
        self.stale, self.since, self.read_at = True, inf, -inf


def why_barred(suspended: bool, key: stored.Key, now: float) -> tuple[str, str] | None:
    """Say why a key with the right secret is refused, as a code and in words."""
    if suspended:
        return "tenant_suspended", "the tenant is suspended"
    if key.revoked_at is not None:
        return "key_revoked", "the key was revoked"
    if key.expires_at is not None and key.expires_at <= now:
        return "key_expired", "the key has expired"
    return ("key_not_yet_valid", "the key is not valid yet") if now < key.not_before else None


def places_of(key: stored.Key) -> list[str]:
    """Return the networks that a key was used from."""
    return msgspec.json.decode(key.places, type=list[str]) if key.places else []


UNREACHABLE = ("system", "asyncgate")   # kinds of principal that no key may stand for


def caller_of_key(tenant_id: str, key: stored.Key) -> Caller:
    """Return the caller that a key identifies."""
    names = keys_stored.decode_names
    who = wire.Principal(key.principal_kind, key.principal_id, key.principal_instance_id)
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


# Argon2.


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
        """Run the work when its turn comes; `still` is called then and may raise to cancel it."""
        if self.waiting >= MOST_WAITING:
            raise errors.Overloaded("the gate is checking too many keys; try again", retry_after=1)
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
    """The caller of a waiting check may be guessing, so the check moves to the slow lane."""


class SlowLane:
    """Argon2 for callers with too many failures: one at a time with pauses, in turns by address and key id.

    So deliberate failures get a small share of the CPU, and a valid key among them gets its turn.
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
            raise errors.Overloaded("the gate is checking too many keys; try again", retry_after=1)
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
            self.queues[name] = queue       # at the end of the line
        turn.set_result(None)

    async def _rest(self) -> None:
        await self.sleep(REST_SECONDS)
        self.busy = False
        self._next()

    def close(self) -> None:
        """Refuse the waiting calls."""
        for queue in self.queues.values():
            for turn in queue:
                turn.set_exception(errors.Overloaded("the gate is about to stop", retry_after=1))
        self.queues.clear()


class IssuedKeys:
    """Verifies issued keys, on the event loop except for Argon2; `clock` decides which have expired."""

    def __init__(self, store: keys_stored.KeyStore, clock: Callable[[], float] = time.time,
                 executor: Executor | None = None, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
                 note_new_place: Callable[[Caller, str], None] = lambda caller, place: None) -> None:
        self.store, self.clock, self.hasher = store, clock, Hasher(executor)
        self.sleep, self.delayed, self.note_new_place = sleep, 0, note_new_place
        # Security: keyed digests are worthless outside this process; the database has only Argon2id hashes.
        self.keyed = blake2b(key=secrets.token_bytes(32), digest_size=32)
        self.proven: Bounded[str, Proven] = Bounded()       # by key id
        self.refused: Bounded[bytes, float] = Bounded()     # by digest, the time of the refusal
        self.failures = Rate(FAILURES, FAILURES_SECONDS, lambda: self.clock())
        self.slow = SlowLane(self.hasher, sleep)
        self.proofs: Flights[bytes, Proven | None] = Flights()      # by digest
        self.reads: Flights[Proven, None] = Flights()
        self.tasks: set[asyncio.Task[Any]] = set()

    async def caller(self, token: str | None, address: str | None = None) -> Caller | None:
        """Return the caller of a key, or None; raises RateLimitExceeded, Overloaded and DatabaseUnavailable."""
        if token is None or len(token) != keys_stored.LENGTH or not token.isascii():
            return None
        keyed = self.keyed.copy()
        keyed.update(token.encode())
        digest, entry = keyed.digest(), self.proven.get(key_id := token[keys_stored.ID_START:keys_stored.ID_END])
        if entry is not None and entry.since <= self.clock() < entry.until and compare_digest(entry.digest, digest):
            self.proven.move_to_end(key_id)     # the same text was checked in full when it was proven
            caller = entry.caller
        else:
            caller = await self._verify(*parts, digest, address) if (parts := keys_stored.parse(token)) else None
            entry = self.proven.get(key_id)
        if caller is not None and entry is not None and address not in entry.addresses:
            self._note_address(entry, caller, address)
        return caller

    def explain_refusal(self, token: str) -> tuple[tuple[str, dict[str, Any]] | None, tuple[str, str] | None]:
        """Say whose key was refused, and why, for the audit log; None if its secret was not proven here."""
        entry = self.proven.get(key_id := token[keys_stored.ID_START:keys_stored.ID_END])
        keyed = self.keyed.copy()
        keyed.update(token.encode(errors="replace"))
        if entry is not None and entry.caller is not None and compare_digest(entry.digest, keyed.digest()):
            return (entry.caller.tenant_id, {"about_key": key_id}), entry.why
        return None, None

    def _note_address(self, entry: Proven, caller: Caller, address: str | None) -> None:
        """Note the network that a key is used from; report a network that is new for the key."""
        if len(entry.addresses) >= ADDRESSES:
            entry.addresses.clear()
        entry.addresses.add(address)
        if not (place := place_of(address)) or place in entry.places:
            return
        if entry.places:
            self.note_new_place(caller, place)
        entry.places = [place, *entry.places][:PLACES]
        assert caller.key_id is not None
        self._begin(self._touch(caller.tenant_id, caller.key_id, self.clock(), place))

    async def note_guess(self, address: str | None) -> None:
        """Count a credential of no known kind, such as a guess at the shared token; delay repeated guesses."""
        where = network_of(address)
        since = self._failing_since(where)
        self._count_failure(where)
        if since is not None:
            await self._delay()

    async def still_good(self, key_id: str) -> bool:
        """Whether a key that was accepted is still valid."""
        if (entry := self.proven.get(key_id)) is None:      # dropped from the cache, or void
            if (row := await self.store.find_key(key_id)) is None:
                return False
            entry = Proven(b"", row[2].version, self.clock())
            entry.take(*row, self.clock())
        return await self._is_current(key_id, entry) and entry.begins <= self.clock() < entry.ends

    def forget(self, key_id: str) -> None:
        """Read the key's row before its next use, because the key was revoked or changed here or in another process."""
        if entry := self.proven.get(key_id):
            entry.forget()

    def forget_tenant(self, tenant_id: str) -> None:
        """Read the rows of all keys of a tenant before their next use, because the tenant was suspended or deleted."""
        for entry in self.proven.values():
            if entry.caller is None or entry.caller.tenant_id == tenant_id:
                entry.forget()

    async def close(self) -> None:
        """Finish the running work and end the threads."""
        self.slow.close()
        while tasks := {*self.tasks, *self.proofs.under_way.values(), *self.reads.under_way.values()}:
            await asyncio.gather(*tasks, return_exceptions=True)
        if self.slow.resting is not None:
            self.slow.resting.cancel()
        await asyncio.to_thread(self.hasher.executor.shutdown)

    # Keys that the cache cannot answer for.

    async def _verify(self, key_id: str, secret: str, digest: bytes, address: str | None) -> Caller | None:
        while entry := self._find_proven(key_id, digest) or await self._prove_once(key_id, secret, digest, address):
            if await self._is_current(key_id, entry):
                if entry.suspended:
                    refusal = errors.refuse_suspended()
                    refusal.whose = (entry.caller.tenant_id, {"about_key": key_id}) if entry.caller else None
                    raise refusal
                return entry.caller if entry.begins <= self.clock() < entry.ends else None
        return None

    def _find_proven(self, key_id: str, digest: bytes) -> Proven | None:
        entry = self.proven.get(key_id)
        if entry is None or not compare_digest(entry.digest, digest):
            return None
        self.proven.move_to_end(key_id)
        return entry if self.clock() - entry.proven_at < PROVEN_SECONDS else None

    async def _prove_once(self, key_id: str, secret: str, digest: bytes, address: str | None) -> Proven | None:
        """Verify the secret, once for all concurrent calls with the same key."""
        now, since = self.clock(), self._failing_since(network_of(address), key_id)
        proof: Proven | None = None
        if not 0 <= now - self.refused.get(digest, -inf) < REFUSED_SECONDS:
            proof = await self.proofs.join(digest, lambda: self._prove(key_id, secret, digest, address))
        if proof is None and since is not None:
            await self._delay()
            raise errors.RateLimitExceeded("too many wrong keys; wait, then send a valid key", limit=FAILURES,
                                           window="1m",
                                           retry_after=max(1, ceil(since + FAILURES_SECONDS - self.clock())))
        return proof

    async def _delay(self) -> None:
        """Delay a caller that tries key after key, so that a flood does not slow others down (threat A10)."""
        if self.delayed < MOST_DELAYED:
            self.delayed += 1
            try:
                await self.sleep(DELAY_SECONDS)
            finally:
                self.delayed -= 1

    async def _prove(self, key_id: str, secret: str, digest: bytes, address: str | None) -> Proven | None:
        where, row = network_of(address), await self.store.find_key(key_id)
        if row is None:   # no Argon2 to hide that: ids are not secret, and a flood would use up the CPU
            self._refuse(digest, where)
            return None
        key = row[2]
        if not await self._proves(key, secret, address):
            self._refuse(digest, where, key_id)
            return None
        entry = Proven(digest, key.version, self.clock())
        self.proven.put(key_id, entry)      # order: before the row is read, so that `forget` finds the entry
        await self._is_current(key_id, entry)
        if not entry.begins <= self.clock() < entry.ends:
            self._count_failure(where, key_id)  # else the count would tell a revoked key from a wrong one
        return entry

    async def _proves(self, key: stored.Key, secret: str, address: str | None) -> bool:
        """Whether a secret is the key's; in the slow lane if the caller may be guessing."""
        where, work = network_of(address), partial(keys_stored.proves_secret, secret, key.hash)
        if self._suspect(key, address):
            return await self.slow.run((where, key.key_id), work)
        with contextlib.suppress(Guessing):
            return await self.hasher.run(work, partial(self._still_trusted, key, address))
        return await self.slow.run((where, key.key_id), work)

    def _suspect(self, key: stored.Key, address: str | None) -> bool:
        """Whether recent failures suggest that the caller is not the key's holder."""
        if self._failing_since(network_of(address)) is not None:
            return True
        usual = place_of(address) in places_of(key)     # stored, so known after a restart too
        return self._failing_since(key.key_id) is not None and not usual

    def _still_trusted(self, key: stored.Key, address: str | None) -> None:
        if self._suspect(key, address):     # further failures came while this check waited
            raise Guessing

    def _refuse(self, digest: bytes, *names: str) -> None:
        self.refused.put(digest, self.clock())
        self._count_failure(*names)

    def _failing_since(self, *names: str) -> float | None:
        return self.failures.over(*filter(None, names))     # a caller without an address has no network

    def _count_failure(self, *names: str) -> None:
        self.failures.add(*filter(None, names))

    async def _is_current(self, key_id: str, entry: Proven) -> bool:
        """Read the row again if it is too old, once for all waiting calls; return False if the entry is void.

        Security: even while the database does not answer, a row counts for 5 seconds at most, because the key may have
        been revoked.
        """
        if not 0 <= self.clock() - entry.read_at < ROW_SECONDS and not entry.void:
            await self.reads.join(entry, lambda: self._read(key_id, entry))
        return not entry.void

    async def _read(self, key_id: str, entry: Proven) -> None:
        entry.stale = True
        while entry.stale:      # `forget` came during the query, so the row may be from before the change
            entry.stale, began = False, self.clock()
            row = await self.store.find_key(key_id)
        if row is None or row[2].version != entry.version:
            return self._drop(key_id, entry)
        entry.take(*row, began)
        self._note(entry, row[0], row[2])

    def _drop(self, key_id: str, entry: Proven) -> None:
        entry.void = True
        if self.proven.get(key_id) is entry:
            del self.proven[key_id]

    def _note(self, entry: Proven, tenant_id: str, key: stored.Key) -> None:
        """Store that a key was used, at most once a minute."""
        now, used = self.clock(), max(entry.used_at, -inf if key.last_used_at is None else key.last_used_at)
        if entry.begins <= now < entry.ends and now - used >= USED_SECONDS:
            entry.used_at = now
            self._begin(self._touch(tenant_id, key.key_id, now))

    async def _touch(self, tenant_id: str, key_id: str, now: float, place: str | None = None) -> None:
        try:
            await self.store.touch_key(tenant_id, key_id, now, place)
        except Exception:       # in the background: no call fails because of it
            log.exception("cannot store that key %s was used", key_id)

    def _begin(self, work: Coroutine[Any, Any, A]) -> asyncio.Task[A]:
        """Start a task that goes on after its waiters have gone."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()    # retrieved, so that asyncio does not complain when nobody waits any more


if TYPE_CHECKING:
    _: type[WayIn] = IssuedKeys
