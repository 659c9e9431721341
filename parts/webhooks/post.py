"""One attempt to deliver: a POST through the guard of outgoing calls, and what its answer means."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx2
from msgspec import Struct

from asyncgate import __version__
from asyncgate.parts.model.errors import InvalidRequest
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.process.authorities import load_authorities
from asyncgate.parts.process.outgoing import (
    Barred,
    GuardedTransport,
    Resolve,
    is_public,
    read_host,
    split_exceptions,
    unmap_ipv4,
)

SETTING = "webhooks.allow"
LOOKUP_THREADS = 128        # a name server that hangs holds a thread; the other calls of the gate have their own
LOOKUPS_OF_TENANT = 16      # at once: who names many hosts whose name servers hang holds no more of the threads
LONGEST_RETRY_AFTER = 3600.0
STATUS_GONE = 410                  # the receiver wants no more events
HEADERS = {"content-type": "application/json", "user-agent": f"AsyncGate/{__version__} (webhooks)"}


class Attempt(Struct, frozen=True):
    """What became of one attempt."""

    status: int | None
    reason: str | None          # why it failed; None: it succeeded
    took_ms: float
    retry_after: float = 0.0


class Post:
    """Sends events; it follows no redirect, reads no answer, and calls only addresses that the gate may call."""

    def __init__(self, settings: Settings, resolve: Resolve | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.timeout_seconds = settings.webhooks.timeout_seconds
        self.lookups = Lookups()
        guard = GuardedTransport(
            settings.webhooks.allow, False, self.timeout_seconds, 0, resolve or self.lookups.resolve,
            tls or load_authorities(), deny=settings.security.outgoing.deny, setting=SETTING)
        self.http = httpx2.AsyncClient(transport=guard, trust_env=False, timeout=self.timeout_seconds,
                                       follow_redirects=False)

    async def send(self, url: str, headers: dict[str, str], body: bytes, tenant_id: str) -> Attempt:
        """Post an event of a tenant once."""
        begun = time.monotonic()
        asking.set(tenant_id)
        status, reason, retry_after = None, None, 0.0
        try:
            async with self.http.stream("POST", url, content=body, headers={**HEADERS, **headers}) as answer:
                status, reason = answer.status_code, explain(answer.status_code)
                retry_after = read_retry_after(answer.headers.get("retry-after", ""))
        except Barred as no:
            reason = str(no)
        except httpx2.TimeoutException:
            reason = f"no answer within {self.timeout_seconds:g} s"
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as broken:
            reason = f"no answer: {type(broken).__name__}"
        return Attempt(status, reason, round((time.monotonic() - begun) * 1000, 1), retry_after)

    async def close(self) -> None:
        """Close all connections."""
        await self.http.aclose()
        self.lookups.close()


asking: ContextVar[str] = ContextVar("asking", default="")      # the tenant for which the running task sends an event


class Lookups:
    """Looks hosts up in threads of its own, each host once at a time, and so many at once for a tenant."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(LOOKUP_THREADS, "webhook-lookup")
        self.under_way: dict[tuple[str, int], asyncio.Future[list[str]]] = {}
        self.places = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(LOOKUPS_OF_TENANT))

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host now; whoever asks meanwhile shares the look-up."""
        if (host, port) not in self.under_way:
            await (places := self.places[asking.get()]).acquire()
            if (host, port) in self.under_way:      # it has begun while this one waited
                places.release()
            else:
                self._begin(host, port, places)
        return await asyncio.shield(self.under_way[host, port])      # another one may still wait for it

    def _begin(self, host: str, port: int, places: asyncio.Semaphore) -> None:
        begun = asyncio.get_running_loop().run_in_executor(self.threads, look_up, host, port)
        self.under_way[host, port] = begun
        begun.add_done_callback(lambda done: self._end(host, port, places, done))

    def _end(self, host: str, port: int, places: asyncio.Semaphore, done: asyncio.Future[list[str]]) -> None:
        places.release()        # only now: nobody may wait for the thread any more, but it is still held
        self.under_way.pop((host, port), None)
        if not done.cancelled():
            done.exception()            # nobody may be left who asks for it

    def close(self) -> None:
        """Let no thread begin another look-up."""
        self.threads.shutdown(wait=False, cancel_futures=True)


def look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


def explain(status: int) -> str | None:
    """Return why an answer is no success."""
    if 200 <= status < 300:
        return None
    if 300 <= status < 400:
        return f"{status}: redirects are not followed; change_webhook takes the new URL"
    return f"{status}: gone" if status == STATUS_GONE else f"{status}: not a success"


def read_retry_after(text: str) -> float:
    """Return how many seconds a receiver wants to be left alone, an hour at most."""
    seconds = 0.0
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        seconds = float(text) if text[:1].isdigit() else (
            parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds() if text else 0.0
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER)


def check_url(settings: Settings, text: str) -> None:
    """Refuse a URL that could never be called; a name is looked up at each delivery, not here."""
    hosts, networks = split_exceptions(settings.webhooks.allow, SETTING)
    try:
        url = httpx2.URL(text)
        host = read_host(url)
    except (httpx2.InvalidURL, Barred, ValueError) as no:
        raise InvalidRequest(f"endpoint: {no}") from None
    if url.fragment:
        raise InvalidRequest("endpoint: a URL that is called has no fragment (#); leave it out")
    if url.scheme == "http" and not settings.webhooks.allow:
        raise InvalidRequest(f"endpoint: {host} must be called over https; the operator can list a host without TLS "
                             f"in the setting {SETTING}")
    with contextlib.suppress(ValueError):       # it is a name
        address = unmap_ipv4(ipaddress.ip_address(host.strip("[]")))
        if not (is_public(address) or host.rstrip(".") in hosts or any(address in net for net in networks)):
            raise InvalidRequest(f"endpoint: {host} is neither public nor listed in the setting {SETTING}")
