"""What the gate's own calls can reach: G1 of the threats, the URLs that attackers of such a client are known to use."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ipaddress
import re
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import httpx2
import pytest
import trustme

from asyncgate.extras.ledger.calls import Calls
from asyncgate.parts.model.errors import StartupError
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.process.authorities import load_authorities
from asyncgate.parts.process.lookups import Lookups
from asyncgate.parts.process.outgoing import (
    Barred,
    GuardedTransport,
    Oversized,
    check_headers,
    is_own,
    is_public,
    make_client,
    split_exceptions,
    unmap_ipv4,
)
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PUBLIC = "93.184.216.34"
NAMES = {
    "public.example": [PUBLIC, "2606:2800:220:1:248:1893:25c8:1946"],
    "half.example": [PUBLIC, "127.0.0.1"],
    "metadata.google.internal": ["169.254.169.254"],
    "localtest.example": ["127.0.0.1"],
    "sub.localtest.example": ["127.0.0.1"],
    "mapped.example": ["::ffff:10.0.0.5"],
    "zone.example": ["fe80::1%1"],
    "nothing.example": [],
}


async def by_hand(host: str, port: int) -> list[str]:
    """Resolve the names of this page; numbers, in whatever spelling, are for the system, which needs no network."""
    if host in NAMES:
        return NAMES[host]
    assert host == "localhost" or re.fullmatch(r"[0-9a-fx.:]+", host), host
    return await Lookups().resolve(host, port)


def guard(*allow: str, plain: bool = True) -> GuardedTransport:
    return GuardedTransport(allow, plain, 5.0, 2**20, by_hand, httpx2.create_ssl_context())


class Server:
    """A server on loopback that tells every connection the same, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.connections = 0
        self.tell: Conversation = self.greet
        self.port = 0

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the head of one request, and answer."""
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            self.asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
            await self.tell(reader, writer)
        writer.close()

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer, and leave the connection open for more."""
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
        await writer.drain()
        await reader.read(1)

    def says(self, head: str, body: bytes = b"") -> None:
        """Answer with this from now on."""
        async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(f"HTTP/1.1 {head}\r\n\r\n".encode() + body)
            await writer.drain()
        self.tell = tell


@contextlib.asynccontextmanager
async def listening(tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server()
    running = await asyncio.start_server(server.hear, "127.0.0.1", 0, ssl=tls)
    server.port = running.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        running.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """Return a server that must not be reached unless a test allows it."""
    async with listening() as server:
        yield server


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Return who certifies servers in these tests."""
    return trustme.CA()


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def certified(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*names).configure_cert(context)
    return context


# Every spelling of this machine.  The port is that of a server which listens, so a hole would be a call that succeeds.
LOOPBACK = [
    "http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://LOCALHOST:{port}/", "http://127.1:{port}/",
    "http://2130706433:{port}/", "http://0x7f000001:{port}/", "http://0x7f.0.0.1:{port}/", "http://0177.0.0.1:{port}/",
    "http://017700000001:{port}/", "http://0:{port}/", "http://0.0.0.0:{port}/", "http://127.8.8.8:{port}/",
    "http://[::1]:{port}/", "http://[::]:{port}/", "http://[::ffff:127.0.0.1]:{port}/", "http://[::ffff:7f00:1]:{port}/",
    "http://[0:0:0:0:0:ffff:127.0.0.1]:{port}/", "http://[::127.0.0.1]:{port}/", "http://127。0。0。1:{port}/",
    "http://localtest.example:{port}/", "http://half.example:{port}/", "http://public.example@127.0.0.1:{port}/",
    "http://public.example\\@127.0.0.1:{port}/", "http://127.0.0.1:{port}\\@public.example/",
    "http://user:secret@localtest.example:{port}/", "http://127.0.0.1%2f.public.example:{port}/",
    "http://\uff11\uff12\uff17.\uff10.\uff10.\uff11:{port}/", "http://①②⑦.⓪.⓪.①:{port}/",
    "http://127.0.0.1\t:{port}/", "http://127.0.0.1\r\n:{port}/",
    "http://127.0.0.1 :{port}/",
]
# And of what else is not the public internet.
ELSEWHERE = [
    "http://169.254.169.254/latest/meta-data/", "http://metadata.google.internal/", "http://[fd00:ec2::254]/",
    "http://192.0.0.192/", "http://100.100.100.200/", "http://100.64.0.1/", "http://10.0.0.1/", "http://172.16.0.1/",
    "http://192.168.0.1/", "http://198.18.0.1/", "http://192.0.2.1/", "http://224.0.0.1/", "http://240.0.0.1/",
    "http://255.255.255.255/", "http://[fc00::1]/", "http://[fe80::1]/", "http://[fe80::1%25lo]/", "http://[fec0::1]/",
    "http://[ff02::1]/", "http://[64:ff9b::7f00:1]/", "http://[64:ff9b::a9fe:a9fe]/", "http://[64:ff9b:1::a00:1]/",
    "http://[2002:7f00:1::]/", "http://[2001:0:7f00:1::80ff:fffe]/", "http://[2001:db8::1]/", "http://[100::1]/",
    "http://mapped.example/", "http://zone.example/",
]
NO_CALL = ["file:///etc/passwd", "gopher://127.0.0.1:6379/_FLUSHALL", "ftp://public.example/", "http:///x", "https://",
           "//public.example/", "dict://127.0.0.1:11211/stats", "unix:///var/run/docker.sock", "http://[::1"]


@pytest.mark.parametrize("url", LOOPBACK)
async def test_no_spelling_of_this_machine_is_called(server: Server, url: str) -> None:
    async with make_client(plain=True, resolve=by_hand) as http:
        with pytest.raises((Barred, httpx2.InvalidURL, httpx2.ConnectError)):
            await http.get(url.format(port=server.port))

    assert server.connections == 0


@pytest.mark.parametrize("url", ELSEWHERE)
async def test_nothing_that_is_not_public_is_called(url: str) -> None:
    async with make_client(plain=True, resolve=by_hand) as http:
        with pytest.raises(Barred):
            await http.get(url)


@pytest.mark.parametrize("url", NO_CALL)
async def test_what_is_no_http_url_with_a_host_is_not_called(url: str) -> None:
    async with make_client(plain=True, resolve=by_hand) as http:
        with pytest.raises((Barred, httpx2.InvalidURL)):
            await http.get(url)


@pytest.mark.parametrize("host", ["public.example", PUBLIC, "[::ffff:5db8:d822]", "[64:ff9b::5db8:d822]", "[2606::1]"])
async def test_the_public_internet_may_be_called(host: str) -> None:
    addresses = await guard().judged(httpx2.URL(f"https://{host}/"))

    assert [address for address in addresses if not is_public(address)] == []
    assert addresses != []


async def test_a_public_host_is_called_over_https_unless_the_caller_says_otherwise() -> None:
    with pytest.raises(Barred, match="https"):
        await guard(plain=False).judged(httpx2.URL("http://public.example/"))

    assert await guard(plain=True).judged(httpx2.URL("http://public.example/"))


async def test_a_name_that_does_not_resolve_is_a_failed_connection() -> None:
    async def failing(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    for resolve in (failing, by_hand):
        async with make_client(resolve=resolve) as http:
            with pytest.raises(httpx2.ConnectError):
                await http.get("https://nothing.example/")


async def test_a_name_that_no_dns_could_hold_is_a_failed_connection() -> None:
    async with make_client(plain=True) as http:
        with pytest.raises(httpx2.ConnectError):
            await http.get(f"http://{'a' * 300}.example/")


# One look-up.


class Rebinding:
    """A name server that answers with a public address first, and with this machine afterwards."""

    def __init__(self) -> None:
        self.answers = [PUBLIC]
        self.asked = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked += 1
        return [self.answers.pop()] if self.answers else ["127.0.0.1"]


async def test_a_host_is_looked_up_once_and_called_where_it_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    rebinding = Rebinding()

    async def connect(remote_host: str, *args: Any, **more: Any) -> Any:
        called.append(remote_host)
        raise OSError("this test has no internet")

    monkeypatch.setattr("anyio.connect_tcp", connect)     # the system's door, below everything that is tested
    async with make_client(plain=True, resolve=rebinding) as http:
        with pytest.raises(httpx2.ConnectError):
            await http.get("http://rebind.example/")

    assert (called, rebinding.asked) == ([PUBLIC], 1)


async def test_a_name_that_has_moved_to_this_machine_is_not_called_the_second_time(server: Server) -> None:
    rebinding = Rebinding()
    rebinding.answers = []

    async with make_client(plain=True, resolve=rebinding) as http:
        with pytest.raises(Barred):
            await http.get(f"http://rebind.example:{server.port}/")

    assert server.connections == 0


# What the operator allows.


@pytest.mark.parametrize("allow", ["127.0.0.1", "127.0.0.0/8", "0.0.0.0/0"])
async def test_a_network_on_the_list_may_be_called_also_without_tls(server: Server, allow: str) -> None:
    async with make_client(allow=[allow], resolve=by_hand) as http:
        answer = await http.get(f"http://localtest.example:{server.port}/x?y=1")

    assert (answer.status_code, answer.text) == (200, "hello")
    assert server.asked[0].startswith("GET /x?y=1 HTTP/1.1\r\n")
    assert f"host: localtest.example:{server.port}\r\n" in server.asked[0].lower()


@pytest.mark.parametrize("allow", ["localtest.example", "LocalTest.Example", "localtest.example."])
async def test_a_host_on_the_list_may_be_called_but_not_another_name_of_its_address(server: Server, allow: str) -> None:
    async with make_client(allow=[allow], resolve=by_hand) as http:
        answer = await http.get(f"http://localtest.example:{server.port}/")
        with pytest.raises(Barred):
            await http.get(f"http://127.0.0.1:{server.port}/")
        with pytest.raises(Barred):
            await http.get(f"http://sub.localtest.example:{server.port}/")

    assert (answer.text, server.connections) == ("hello", 1)


async def test_a_list_of_one_network_opens_no_other(server: Server) -> None:
    async with make_client(allow=["10.0.0.0/8"], resolve=by_hand, plain=True) as http:
        with pytest.raises(Barred):
            await http.get(f"http://127.0.0.1:{server.port}/")

    assert server.connections == 0


async def test_all_addresses_of_a_host_must_be_on_the_list(server: Server) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1", "10.0.0.1"]

    async with make_client(allow=["127.0.0.0/8"], resolve=resolve, plain=True) as http:
        with pytest.raises(Barred):
            await http.get(f"http://both.example:{server.port}/")

    assert server.connections == 0


@pytest.mark.parametrize("wrong", ["10.0.0.0/33", "10.0.0.1/8", "http://localhost", "localhost:8080", "fe80::/200"])
def test_what_is_neither_host_nor_network_stops_the_start(wrong: str) -> None:
    with pytest.raises(StartupError, match=r"security\.outgoing\.allow"):
        split_exceptions([wrong])


async def test_proxies_of_the_environment_are_not_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{server.port}")

    async with make_client(plain=True, resolve=by_hand) as http:
        with pytest.raises(Barred):
            await http.get("http://10.0.0.1/")

    assert server.connections == 0


# Redirects.


async def test_a_redirect_is_not_followed_unless_asked_for(server: Server) -> None:
    server.says("302 Found\r\nlocation: /there\r\ncontent-length: 0")

    async with make_client(allow=["127.0.0.1"]) as http:
        answer = await http.get(f"http://127.0.0.1:{server.port}/")

    assert (answer.status_code, server.connections) == (302, 1)


@pytest.mark.parametrize("there", ["http://169.254.169.254/", "http://sub.localtest.example:{port}/", "file:///etc/passwd",
                                   "//[::1]:{port}/", "http://2130706433:{port}/"])
async def test_a_redirect_leads_nowhere_that_the_first_url_could_not(server: Server, there: str) -> None:
    server.says(f"302 Found\r\nlocation: {there.format(port=server.port)}\r\ncontent-length: 0")

    async with make_client(allow=["localtest.example"], redirects=3, resolve=by_hand, plain=True) as http:
        with pytest.raises((Barred, httpx2.UnsupportedProtocol)):
            await http.get(f"http://localtest.example:{server.port}/")

    assert server.connections == 1


@pytest.mark.parametrize("asked", [3, 50])
async def test_at_most_three_redirects_are_followed(server: Server, asked: int) -> None:
    server.says("302 Found\r\nlocation: /again\r\ncontent-length: 0")

    async with make_client(allow=["127.0.0.1"], redirects=asked) as http:
        with pytest.raises(httpx2.TooManyRedirects):
            await http.get(f"http://127.0.0.1:{server.port}/")

    assert server.connections == 4


# TLS.


async def test_the_certificate_is_checked_for_the_name_though_the_address_is_called(authority: trustme.CA) -> None:
    async with (listening(certified(authority, "localtest.example")) as server,
                make_client(allow=["127.0.0.1"], resolve=by_hand, tls=trusting(authority)) as http):
        answer = await http.get(f"https://localtest.example:{server.port}/")

    assert answer.text == "hello"


@pytest.mark.parametrize("certificate", ["other.example", "127.0.0.1"])
async def test_a_certificate_for_another_name_is_refused(authority: trustme.CA, certificate: str) -> None:
    async with (listening(certified(authority, certificate)) as server,
                make_client(allow=["127.0.0.1"], resolve=by_hand, tls=trusting(authority)) as http):
        with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await http.get(f"https://localtest.example:{server.port}/")

    assert server.asked == []


async def test_a_certificate_of_an_unknown_authority_is_refused(authority: trustme.CA) -> None:
    async with (listening(certified(authority, "localtest.example")) as server,
                make_client(allow=["127.0.0.1"], resolve=by_hand) as http):
        with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await http.get(f"https://localtest.example:{server.port}/")

    assert server.asked == []


async def test_a_connection_to_one_name_serves_no_other_name_of_the_same_address(authority: trustme.CA) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async with (listening(certified(authority, "one.example")) as server,
                make_client(allow=["127.0.0.1"], resolve=resolve, tls=trusting(authority)) as http):
        answer = await http.get(f"https://one.example:{server.port}/")
        with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await http.get(f"https://two.example:{server.port}/")

    assert answer.text == "hello"
    assert len(server.asked) == 1


async def test_the_next_address_is_tried_when_one_does_not_answer(server: Server) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.9.9.9", "127.0.0.1"]        # nobody listens at the first one

    async with make_client(allow=["127.0.0.0/8"], resolve=resolve) as http:
        answer = await http.post(f"http://two.example:{server.port}/", content=b"once")

    assert answer.text == "hello"


# What comes back.


def endless(piece: bytes) -> Conversation:
    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
    return tell


async def test_an_endless_body_ends_at_the_limit(server: Server) -> None:
    server.tell = endless(b"x" * 65_536)

    async with make_client(allow=["127.0.0.1"], timeout_seconds=30) as http:
        with pytest.raises(Oversized, match="1048576"):
            await http.get(f"http://127.0.0.1:{server.port}/")


@pytest.mark.parametrize(("size", "good"), [(1000, True), (1001, False)])
async def test_the_limit_is_exact(server: Server, size: int, good: bool) -> None:
    server.says(f"200 OK\r\ncontent-length: {size}", b"x" * size)

    async with make_client(allow=["127.0.0.1"], most_bytes=1000) as http:
        with contextlib.nullcontext() if good else pytest.raises(Oversized):
            assert len((await http.get(f"http://127.0.0.1:{server.port}/")).content) == size


async def test_a_small_body_that_unpacks_to_a_large_one_is_refused(server: Server) -> None:
    packed = gzip.compress(bytes(50_000_000))
    server.says(f"200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(packed)}", packed)

    async with make_client(allow=["127.0.0.1"]) as http:
        with pytest.raises(Oversized, match="compressed"):
            await http.get(f"http://127.0.0.1:{server.port}/")

    assert len(packed) < 2**20
    assert "accept-encoding: identity\r\n" in server.asked[0].lower()


async def test_a_server_that_says_nothing_is_left_in_time(server: Server) -> None:
    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()     # until the client goes

    server.tell = tell
    async with make_client(allow=["127.0.0.1"], timeout_seconds=0.05) as http:
        with pytest.raises(httpx2.TimeoutException):
            await http.get(f"http://127.0.0.1:{server.port}/")


async def test_a_server_that_always_says_a_little_more_is_left_in_time_too(server: Server) -> None:
    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        while not reader.at_eof():
            writer.write(b"x")
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.01)     # faster than any timeout for a single read

    server.tell = tell
    async with make_client(allow=["127.0.0.1"], timeout_seconds=0.2) as http:
        with pytest.raises(httpx2.ReadTimeout, match="no complete answer"):
            await http.get(f"http://127.0.0.1:{server.port}/")


async def test_redirects_share_the_time(server: Server) -> None:
    times: list[float] = []

    class Noting(GuardedTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            response = await super().handle_async_request(request)
            times.append(request.extensions["deadline"])
            return response

    server.says("302 Found\r\nlocation: /again\r\ncontent-length: 0")
    noting = Noting(["127.0.0.1"], False, 5.0, 1000, by_hand, httpx2.create_ssl_context())
    async with httpx2.AsyncClient(transport=noting, follow_redirects=True, max_redirects=2, trust_env=False) as http:
        with pytest.raises(httpx2.TooManyRedirects):
            await http.get(f"http://127.0.0.1:{server.port}/")

    assert len(times) == 3
    assert len(set(times)) == 1


async def test_a_slow_name_server_costs_no_more_time_than_there_is() -> None:
    async def never(host: str, port: int) -> Iterable[str]:
        await asyncio.Event().wait()
        return []

    async with make_client(resolve=never, timeout_seconds=0.05) as http:
        with pytest.raises(httpx2.TimeoutException):
            await http.get("https://public.example/")


def test_an_ipv4_address_in_disguise_is_judged_as_what_it_is() -> None:
    from ipaddress import ip_address

    assert unmap_ipv4(ip_address("::ffff:10.0.0.1")) == ip_address("10.0.0.1")
    assert unmap_ipv4(ip_address("2001:db8::1")) == ip_address("2001:db8::1")
    assert not is_public(unmap_ipv4(ip_address("::ffff:192.168.1.1")))
    assert is_public(unmap_ipv4(ip_address("::ffff:93.184.216.34")))


# This machine, by an address that is public.


def facing(*own: str, allow: Iterable[str] = (), deny: Iterable[str] = ()) -> GuardedTransport:
    """A guard on a machine that has these addresses."""
    return GuardedTransport(allow, True, 5.0, 2**20, by_hand, httpx2.create_ssl_context(), deny=deny,
                            own=lambda address: str(address) in own)


async def test_the_public_addresses_of_this_machine_are_not_called() -> None:
    with pytest.raises(Barred, match="neither public"):
        await facing(PUBLIC).judged(httpx2.URL("https://public.example/"))
    with pytest.raises(Barred, match="neither public"):
        await facing(PUBLIC).judged(httpx2.URL(f"https://{PUBLIC}/"))
    assert await facing(PUBLIC, allow=["public.example"]).judged(httpx2.URL("https://public.example/"))
    assert await facing("93.184.216.35").judged(httpx2.URL("https://public.example/"))


@pytest.mark.parametrize("deny", ["public.example", PUBLIC, "93.184.0.0/16"])
async def test_what_is_denied_is_not_called_even_where_it_is_allowed(deny: str) -> None:
    with pytest.raises(Barred, match="deny"):
        await facing(deny=[deny], allow=["public.example"]).judged(httpx2.URL("https://public.example/"))


@pytest.mark.parametrize(("address", "own"), [("127.0.0.1", True), ("127.8.9.10", True), (PUBLIC, False),
                                              ("2606:2800:220:1:248:1893:25c8:1946", False)])
def test_an_address_of_this_machine_is_known_by_binding_it(address: str, own: bool) -> None:
    assert is_own(ipaddress.ip_address(address)) is own


@pytest.mark.parametrize("headers", [
    {"Host": "internal.example"}, {"host": "a"}, {"Transfer-Encoding": "chunked"}, {"Content-Length": "0"},
    {"Connection": "upgrade"}, {"Upgrade": "h2c"}, {"Expect": "100-continue"}, {"X-Forwarded-For": "127.0.0.1"},
    {"Forwarded": "for=127.0.0.1"}, {"Metadata-Flavor": "Google"}, {"X-aws-ec2-metadata-token": "x"},
    {"Proxy-Authorization": "x"}, {"X-A": "b\r\nHost: c"}, {"X-A": "b\0"}, {"X-A": "\u2028"}, {"X A": "b"}, {"": "b"},
    {"X-A:": "b"}, {"X-A\r\nHost": "c"}, {f"x-{number}": "a" for number in range(51)}, {"X-A": "b" * 9000}])
def test_headers_that_say_more_than_what_is_asked_for_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Barred):
        check_headers(headers)


def test_other_headers_are_the_caller_s() -> None:
    check_headers({
        "Authorization": "Bearer x", "Accept": "text/html", "X-Who": "ada", "If-None-Match": '"1"', "X_Y": ""})


async def test_a_call_has_the_host_header_of_its_url(server: Server) -> None:
    async with make_client(allow=["127.0.0.1"], plain=True) as http:
        with pytest.raises(Barred, match="Host"):
            await http.get(f"http://127.0.0.1:{server.port}/", headers={"Host": "internal.example"})
    assert server.asked == []


async def test_all_outgoing_calls_read_the_certificate_authorities_once(
        server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    post = pytest.importorskip("asyncgate.extras.webhooks.post", reason="webhooks are not installed")
    make, made = ssl.create_default_context, []

    def count(*given: Any, **named: Any) -> ssl.SSLContext:
        made.append(make(*given, **named))
        return made[-1]
    monkeypatch.setattr(ssl, "create_default_context", count)
    load_authorities.cache_clear()

    calls = Calls("", 1)
    async with make_client(), make_client(allow=["127.0.0.1"]):
        await post.Post(Settings()).close()
        await calls.ask("GET", f"http://127.0.0.1:{server.port}/", seconds=60.0)
    await calls.close()

    assert len(made) == 1


async def test_a_host_is_looked_up_again_after_the_machine_had_no_thread_to_spare(
        monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")
    lookups = Lookups(most=1)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", find_none)
        with pytest.raises(RuntimeError, match="new thread"):
            await lookups.resolve("127.0.0.1", 80)

    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await lookups.resolve("127.0.0.1", 80) == ["127.0.0.1"]
