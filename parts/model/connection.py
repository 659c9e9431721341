"""What a connection says about its peer: ASGI types, addresses, proxies, and the credential.  And the way past ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Protocol
from urllib.parse import quote

from asyncgate.parts.model import errors

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Address = IPv4Address | IPv6Address

GATE_MARK = (b"x-asyncgate", b"1")      # of every answer, so that a client knows a gate from what answers in its place
BROWSER_POLICY = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
STRICT_TRANSPORT = (b"strict-transport-security", b"max-age=31536000; includeSubDomains")
BLANKS = " \t"      # stripped from header values; other white space is kept, so that a token has one spelling
LONGEST_ADDRESS = 80        # characters of an address with port and zone; longer texts would fill the cache


class Shortcut(Protocol):
    """An optional feature of a server: read the whole body and send the whole answer without ASGI messages."""

    def body(self) -> bytes | None:
        """Return the body of the request if all of it has arrived, else None."""

    def answer(self, status: int, lines: bytes, body: bytes) -> bool:
        """Send an answer with formatted header lines; return whether it was sent."""


def find_shortcut(scope: Scope) -> Shortcut | None:
    """Return the server's shortcut past ASGI messages, if it has one."""
    extensions = scope.get("extensions")
    return extensions.get("asyncgate.whole") if extensions else None


def read_token(headers: Headers) -> str | None:
    """Return the token of a request; refuse a request with two different tokens."""
    bearers = 0
    tokens: set[str | None] = set()
    for name, value in headers:
        if name == b"authorization":
            bearers += 1
            scheme, _, token = value.decode("latin-1").partition(" ")
            tokens.add(token.strip(BLANKS) if scheme.lower() == "bearer" else None)
        elif name == b"x-api-key":
            tokens.add(value.decode("latin-1").strip(BLANKS))
    if len(tokens) > 1 or bearers > 1:
        raise errors.TwoCredentials(
            "two different credentials in one request; send one: Authorization: Bearer <token>, or "
            "X-API-Key: <token>")
    if None in tokens:
        raise errors.TwoCredentials("send one credential: Authorization: Bearer <token>, or X-API-Key: <token>")
    return (tokens.pop() if tokens else None) or None       # an empty token means none: its variable was not set


def list_cookies(headers: Headers) -> Iterator[tuple[str, str]]:
    """Yield names and values of the cookies of a request, also of repeated ones.

    Other programs of the host and its domain set cookies, too, in forms of their own: none of them hides another.
    """
    for header, text in headers:
        if header == b"cookie":
            for pair in text.decode("latin-1").split(";"):
                name, _, value = pair.strip().partition("=")
                yield name, value


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address to listen on."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def find_client_address(scope: Any, headers: Iterable[tuple[bytes, bytes]], trusted_proxies: tuple[str, ...]) -> str:
    """Return the client's address: the peer, or the address that trusted proxies report.

    Each proxy appends its own peer to X-Forwarded-For.  So the list is read from its end, and the first address that
    is not a trusted proxy wins: the client may have made up everything before it.
    """
    peer = (scope.get("client") or ("",))[0]
    if not trusted_proxies:
        return _show(peer)
    address, trusted = _read(peer), _networks(trusted_proxies)
    if address is None or not _within(address, trusted):
        return _show(peer)
    header = b",".join(value for name, value in headers if name == b"x-forwarded-for").decode("latin-1")
    for hop in reversed(header.split(",")):
        if (before := _read(hop.strip())) is None:
            break       # the proxy did not know its client; the proxy's own address stands
        address = before
        if not _within(address, trusted):
            break
    return str(address)


def is_from_proxy(scope: Any, trusted_proxies: tuple[str, ...]) -> bool:
    """Whether the peer is a trusted proxy, whose headers about its client are believed."""
    address = _read((scope.get("client") or ("",))[0])
    return address is not None and _within(address, _networks(trusted_proxies))


def group_address(address: str) -> str:
    """Return the unit that limits count: an IPv4 address, or an IPv6 /64, because one host owns a whole /64."""
    return _group_short(address) if len(address) <= LONGEST_ADDRESS else quote(address, safe="")


@lru_cache(4096)
def _group_short(address: str) -> str:
    ip = _read(address)
    if isinstance(ip, IPv6Address):
        return f"{IPv6Address(int(ip) >> 64 << 64)}/64"
    return str(ip) if ip else quote(address, safe="") or "unknown"


def _read(text: str) -> Address | None:
    """Read an address, with or without a port and a zone; an IPv4-mapped IPv6 address becomes IPv4."""
    return _read_short(text) if len(text) <= LONGEST_ADDRESS else None


def _show(text: str) -> str:
    """Write an address as the gate writes it, whatever it came as; other texts stay as they are."""
    return _show_short(text) if len(text) <= LONGEST_ADDRESS else text


@lru_cache(4096)
def _show_short(text: str) -> str:
    return str(_read(text) or text)


@lru_cache(4096)
def _read_short(text: str) -> Address | None:
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        ip = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return (ip.ipv4_mapped if isinstance(ip, IPv6Address) else None) or ip


@lru_cache(8)
def _networks(names: tuple[str, ...]) -> tuple[IPv4Network | IPv6Network, ...]:
    return tuple(ip_network(name) for name in names)


def _within(address: Address, networks: tuple[IPv4Network | IPv6Network, ...]) -> bool:
    return any(address in network for network in networks)


def is_https_by_proxy(scope: Scope, trusted_proxies: tuple[str, ...]) -> bool:
    """Whether a trusted proxy says that its client used HTTPS; the first of several proxies decides."""
    protocols = (value for name, value in scope["headers"] if name == b"x-forwarded-proto")
    return next(protocols, b"").partition(b",")[0].strip().lower() == b"https" and is_from_proxy(scope, trusted_proxies)
