"""The gate's outgoing HTTP: to the public internet only, never to hosts of this machine or its private network.

A caller who can make the gate call a URL of their choice (a webhook, a discovery document, a key set) must not reach
the metadata service of the cloud, the database next door or the gate itself.  So a host is resolved once, all its
addresses are checked, and the connection goes to a checked address: no second look-up can answer differently (DNS
rebinding).  The name stays in the Host header and in the TLS handshake, so the certificate must be valid for the name,
not for the address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import cache
from typing import Any

import httpx2

from asyncgate.parts.model import errors
from asyncgate.parts.model.connection import Address
from asyncgate.parts.process.authorities import load_authorities
from asyncgate.parts.process.lookups import Lookups

Resolve = Callable[[str, int], Awaitable[Iterable[str]]]

MOST_ANSWER_BYTES = 2**20          # in a response body
MOST_REDIRECTS = 3
MOST_HEADERS, HEADER_BYTES = 50, 8192       # limits for headers that callers set
HEADER_NAME, HEADER_VALUE = re.compile(r"\A[A-Za-z0-9_-]+\Z"), re.compile(r"\A[\x20-\x7e]*\Z")
# These frame a request, change its host or sender, or unlock the metadata services of clouds.
RESERVED = {"host", "content-length", "transfer-encoding", "te", "trailer", "connection", "keep-alive", "upgrade",
            "expect", "accept-encoding", "forwarded", "via", "x-real-ip", "true-client-ip", "cf-connecting-ip",
            "metadata", "metadata-flavor", "x-http-method-override", "x-original-url", "x-rewrite-url"}
RESERVED_BEGINNINGS = ("proxy-", "x-forwarded-", "x-aws-", "x-google-", "x-ms-", "sec-")
PORTS = {"http": 80, "https": 443}
PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")       # all assigned public addresses; the rest is local or reserved
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")       # IPv6-only networks reach the public IPv4 internet through it
# Some releases of Python call these global, wrongly: protocol assignments (among them a metadata service), and 6to4,
# which hides an IPv4 address.
BARRED = [ipaddress.ip_network(text) for text in ("192.0.0.0/24", "192.88.99.0/24", "2002::/16", "3fff::/20")]


class Barred(httpx2.TransportError):
    """The gate may not call this URL."""


class Oversized(httpx2.ReadError):
    """The answer is larger than the limit."""


def make_client(*, allow: Iterable[str] = (), deny: Iterable[str] = (), plain: bool = False, redirects: int = 0,
           timeout_seconds: float = 10.0, most_bytes: int = MOST_ANSWER_BYTES, resolve: Resolve | None = None,
           tls: ssl.SSLContext | None = None, setting: str = "security.outgoing.allow") -> httpx2.AsyncClient:
    """Make an HTTP client that can only reach hosts that the gate may call.

    `allow` lists private hosts and networks that may be called, `deny` public ones that may not.  Plain HTTP is open to
    hosts in `allow`, and to others if `plain` is true.  Each redirect is checked like the first URL; the client
    follows at most three.  `timeout_seconds` covers everything, from the first look-up to the last byte.  Refusals
    name `setting` as the place of `allow`.
    """
    guard = GuardedTransport(allow, plain, timeout_seconds, most_bytes, resolve,
                             tls or load_authorities(), deny=deny, setting=setting)
    return httpx2.AsyncClient(transport=guard, trust_env=False, timeout=timeout_seconds,
                              follow_redirects=redirects > 0, max_redirects=min(redirects, MOST_REDIRECTS))


class GuardedTransport(httpx2.AsyncBaseTransport):
    """A transport that checks the target of each request, and limits the response."""

    def __init__(self, allow: Iterable[str], plain: bool, timeout_seconds: float, most_bytes: int,
                 resolve: Resolve | None, tls: ssl.SSLContext, *, deny: Iterable[str] = (),
                 own: Callable[[Address], bool] | None = None, setting: str = "security.outgoing.allow") -> None:
        self.hosts, self.networks = split_exceptions(allow, setting)
        self.setting = setting          # which lists the private hosts that may be called
        self.no_hosts, self.no_networks = split_exceptions(deny, "security.outgoing.deny")
        self.own = own or is_own
        self.plain, self.timeout_seconds, self.most_bytes = plain, timeout_seconds, most_bytes
        self.resolve = resolve or Lookups().resolve
        # The pool keys a connection by its address.  Kept open, it would serve another name at that address without a
        # check of the certificate.
        limits = httpx2.Limits(max_keepalive_connections=0)
        self.inner = httpx2.AsyncHTTPTransport(verify=tls, trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send one request; a redirect is another request within the remaining time."""
        loop = asyncio.get_running_loop()
        deadline: float = request.extensions.setdefault("deadline", loop.time() + self.timeout_seconds)
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._reach(request)
        except TimeoutError:
            raise make_timeout(self.timeout_seconds) from None
        bounded = BoundedBody(response.stream, self.most_bytes, deadline, self.timeout_seconds)
        packed = response.headers.get("content-encoding", "identity") != "identity"
        if packed and self.most_bytes:      # a megabyte may unpack to a gigabyte; who reads nothing does not mind
            await bounded.aclose()
            raise Oversized("the answer is compressed, but the gate asked for identity")
        response.stream = bounded
        return response

    async def _reach(self, request: httpx2.Request) -> httpx2.Response:
        """Try the addresses of a host in turn until one accepts a connection."""
        read_host(request.url)      # first: a URL of another scheme is to be called so
        if request.headers.get_list("host") != [request.url.netloc.decode("ascii")]:
            raise Barred("the Host header must equal the host of the URL")
        failed: httpx2.TransportError = httpx2.ConnectError(f"{request.url.host} has no address")
        for address in await self.judged(request.url):
            try:
                return await self.inner.handle_async_request(aim_request(request, address))
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                failed = error
        raise failed

    async def judged(self, url: httpx2.URL) -> list[Address]:
        """Return the addresses of a URL's host; raises Barred if the gate may not call one of them."""
        host = read_host(url)
        addresses = await self._addresses(host, url.port or PORTS[url.scheme])
        chosen = host.rstrip(".") in self.hosts or all(any(ip in net for net in self.networks) for ip in addresses)
        if url.scheme == "http" and not (self.plain or chosen):
            raise Barred(f"{host} must be called over https, or be listed in {self.setting}")
        if host.rstrip(".") in self.no_hosts or any(ip in net for net in self.no_networks for ip in addresses):
            raise Barred(f"{host} is blocked by the setting security.outgoing.deny")
        for address in addresses:
            strange = not is_public(address) or self.own(address)
            if not chosen and strange and not any(address in net for net in self.networks):
                # The message hides the address: the caller must not map the network behind the gate.
                raise Barred(f"{host} has an address that is neither public nor listed in {self.setting}")
        return addresses

    async def _addresses(self, host: str, port: int) -> list[Address]:
        try:
            return [unmap_ipv4(ipaddress.ip_address(text)) for text in await self.resolve(host, port)]
        except (OSError, ValueError) as error:      # UnicodeError, for a name that DNS cannot hold, is a ValueError
            raise httpx2.ConnectError(f"{host} cannot be resolved: {type(error).__name__}") from None

    async def aclose(self) -> None:
        """Close the transport."""
        await self.inner.aclose()


class NamedTransport(httpx2.AsyncBaseTransport):
    """A transport to the one host that a setting names; a name server that hangs keeps nothing else waiting."""

    def __init__(self, tls: ssl.SSLContext, limits: httpx2.Limits, resolve: Resolve | None = None) -> None:
        self.resolve = resolve or Lookups().resolve
        self.inner = httpx2.AsyncHTTPTransport(verify=tls, trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send one request to the first address of the host that accepts a connection."""
        url = request.url
        failed: httpx2.TransportError = httpx2.ConnectError(f"{url.host} has no address")
        for address in await self._find_addresses(url, request.extensions.get("timeout", {}).get("connect")):
            try:
                return await self.inner.handle_async_request(aim_request(request, address))
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                failed = error
        raise failed

    async def _find_addresses(self, url: httpx2.URL, seconds: float | None) -> list[Address]:
        try:
            return [ipaddress.ip_address(url.host)]
        except ValueError:
            pass
        try:
            async with asyncio.timeout(seconds):
                texts = await self.resolve(url.host, url.port or PORTS[url.scheme])
            return [ipaddress.ip_address(text) for text in texts]
        except TimeoutError:
            raise httpx2.ConnectTimeout(f"no answer from {url.host} within {seconds} s") from None
        except (OSError, ValueError) as error:
            raise httpx2.ConnectError(f"{url.host} cannot be resolved: {type(error).__name__}") from None

    async def aclose(self) -> None:
        """Close the transport."""
        await self.inner.aclose()


class BoundedBody(httpx2.AsyncByteStream):
    """A body with a deadline and a size limit; it raises an error at either."""

    def __init__(self, stream: Any, most_bytes: int, deadline: float, timeout_seconds: float) -> None:
        self.stream, self.most_bytes = stream, most_bytes
        self.deadline, self.timeout_seconds = deadline, timeout_seconds

    async def __aiter__(self) -> AsyncIterator[bytes]:
        parts, size = aiter(self.stream), 0
        while True:
            try:
                async with asyncio.timeout_at(self.deadline):
                    part = await anext(parts)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise make_timeout(self.timeout_seconds) from None
            size += len(part)
            if size > self.most_bytes:
                raise Oversized(f"the answer is larger than {self.most_bytes} bytes")
            yield part

    async def aclose(self) -> None:
        """Release the connection."""
        await self.stream.aclose()


def make_timeout(timeout_seconds: float) -> httpx2.ReadTimeout:
    return httpx2.ReadTimeout(f"no complete answer within {timeout_seconds} s")


def read_host(url: httpx2.URL) -> str:
    """Return the host of a URL; refuse ambiguous URLs."""
    host = url.raw_host.decode("ascii").lower()
    if url.scheme not in PORTS or not host:
        raise Barred("only http and https URLs with a host may be called")
    if url.userinfo or "%" in host:     # URL parsers disagree about such a host
        raise Barred("a URL may not contain a user, nor % in its host")
    return host


def aim_request(request: httpx2.Request, address: Address) -> httpx2.Request:
    """Redirect a request to an address; the name stays in Host and TLS."""
    headers = httpx2.Headers([*request.headers.raw])        # including Host, as in the URL
    headers["accept-encoding"] = "identity"
    extensions = {**request.extensions, "sni_hostname": request.url.raw_host.decode("ascii")}
    return httpx2.Request(request.method, request.url.copy_with(host=str(address)), headers=headers,
                          stream=request.stream, extensions=extensions)


def is_public(address: Address) -> bool:
    """Whether an address is a public unicast address, also after unwrapping an embedded IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in PUBLIC_V6:
            return False
    return address.is_global and not address.is_multicast and not any(address in net for net in BARRED)


def is_own(address: Address) -> bool:
    """Whether an address belongs to this machine, told by binding to it."""
    return not binds_any() and binds(address)


def binds(address: Address) -> bool:
    """Whether a socket can be bound to an address."""
    family = socket.AF_INET6 if isinstance(address, ipaddress.IPv6Address) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.bind((str(address), 0))
    except OSError:
        return False
    return True


@cache
def binds_any() -> bool:
    """Whether this machine can bind addresses that it does not have, which makes a test by binding useless."""
    return binds(ipaddress.IPv4Address("192.0.2.1"))


def check_headers(headers: Mapping[str, str]) -> None:
    """Refuse a caller's headers that frame a request or change its host or sender."""
    if len(headers) > MOST_HEADERS or sum(len(name) + len(value) for name, value in headers.items()) > HEADER_BYTES:
        raise Barred(f"a call may have at most {MOST_HEADERS} headers with {HEADER_BYTES} characters in total")
    for name, value in headers.items():
        if name.lower() in RESERVED or name.lower().startswith(RESERVED_BEGINNINGS):
            raise Barred(f"callers may not set the header {name.lower()}")
        if not HEADER_NAME.match(name) or not HEADER_VALUE.match(value):
            raise Barred("a header name consists of letters, digits, - and _; its value of visible ASCII")


def unmap_ipv4(address: Address) -> Address:
    """Return an IPv4-mapped IPv6 address as IPv4."""
    return getattr(address, "ipv4_mapped", None) or address


def split_exceptions(
        allow: Iterable[str], setting: str = "security.outgoing.allow") -> tuple[frozenset[str], list[Any]]:
    """Split the list of a setting into hosts and networks."""
    hosts, networks = set(), []
    for text in allow:
        try:
            networks.append(ipaddress.ip_network(text.strip("[]")))
        except ValueError:
            if "/" in text or ":" in text:
                raise errors.StartupError(f"{setting}: {text!r} is neither a host nor a network such as "
                                          f"10.0.0.0/8") from None
            hosts.add(text.lower().rstrip("."))
    return frozenset(hosts), networks
