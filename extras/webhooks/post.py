"""One attempt to deliver: a POST through the guard of outgoing calls, and what its answer means."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import ssl
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx2
from msgspec import Struct

from asyncgate import __version__
from asyncgate.parts.model import errors
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.process import outgoing
from asyncgate.parts.process.authorities import load_authorities
from asyncgate.parts.process.lookups import asking

SETTING = "webhooks.allow"
UNREACHED = (f"not reached: the host must be public or listed in {SETTING}, and accept connections over https with a "
             "certificate for its name")
SENDING = "http11.send_request_headers.started"        # this step of a call follows the connection
LONGEST_RETRY_AFTER = 3600.0
STATUS_GONE = 410                  # the receiver wants no more events
log = logging.getLogger("asyncgate")
HEADERS = {"content-type": "application/json", "user-agent": f"AsyncGate/{__version__} (webhooks)"}


class Attempt(Struct, frozen=True):
    """What became of one attempt."""

    status: int | None
    reason: str | None          # why it failed; None: it succeeded
    took_ms: float | None = None        # None: nothing was sent
    retry_after: float = 0.0


class Post:
    """Sends events; it follows no redirect, reads no answer, and calls only addresses that the gate may call."""

    def __init__(self, settings: Settings, resolve: outgoing.Resolve | None = None,
                 tls: ssl.SSLContext | None = None) -> None:
        self.timeout_seconds = settings.webhooks.timeout_seconds
        guard = outgoing.GuardedTransport(
            settings.webhooks.allow, False, self.timeout_seconds, 0, resolve, tls or load_authorities(),
            deny=settings.security.outgoing.deny, setting=SETTING)
        self.http = httpx2.AsyncClient(transport=guard, trust_env=False, timeout=self.timeout_seconds,
                                       follow_redirects=False)

    async def send(self, url: str, headers: dict[str, str], body: bytes, tenant_id: str) -> Attempt:
        """Post an event of a tenant once."""
        begun, steps = time.monotonic(), set[str]()
        asking.set(tenant_id)
        status, retry_after = None, 0.0

        async def note(step: str, _: object) -> None:
            steps.add(step)
        try:
            async with self.http.stream("POST", url, content=body, headers={**HEADERS, **headers},
                                        extensions={"trace": note}) as answer:
                status, reason = answer.status_code, explain(answer.status_code)
                retry_after = read_retry_after(answer.headers.get("retry-after", ""))
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as broken:
            log.debug("webhook to %s: %s: %s", httpx2.URL(url).host, type(broken).__name__, broken)
            # Before a connection, every reason is the same: a tenant must not learn which names exist inside.
            if SENDING not in steps:
                return Attempt(None, UNREACHED)
            late = isinstance(broken, httpx2.TimeoutException)
            reason = f"no answer within {self.timeout_seconds:g} s" if late else f"no answer: {type(broken).__name__}"
        return Attempt(status, reason, round((time.monotonic() - begun) * 1000, 1), retry_after)

    async def close(self) -> None:
        """Close all connections."""
        await self.http.aclose()


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
    hosts, networks = outgoing.split_exceptions(settings.webhooks.allow, SETTING)
    try:
        url = httpx2.URL(text)
        host = outgoing.read_host(url)
    except (httpx2.InvalidURL, outgoing.Barred, ValueError) as refusal:
        raise errors.InvalidRequest(f"endpoint: {refusal}") from None
    if url.fragment:
        raise errors.InvalidRequest("endpoint: a URL that is called has no fragment (#); leave it out")
    if url.scheme == "http" and not settings.webhooks.allow:
        raise errors.InvalidRequest(
            f"endpoint: {host} must be called over https; the operator can list a host without TLS "
            f"in the setting {SETTING}")
    with contextlib.suppress(ValueError):       # it is a name
        address = outgoing.unmap_ipv4(ipaddress.ip_address(host.strip("[]")))
        if not (outgoing.is_public(address) or host.rstrip(".") in hosts or any(address in net for net in networks)):
            raise errors.InvalidRequest(f"endpoint: {host} is neither public nor listed in the setting {SETTING}")
