"""The transport keeps its promises to slow, hostile and parting clients: a real server process, raw sockets."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.conformance.forks import FORKED
from tests.support.each import each
from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
HEADER_TIMEOUT_SECONDS = 0.5

APP = """
import asyncio, gc, json, sys
from types import SimpleNamespace

sys.path.append(sys.argv[1])
options = json.loads(sys.argv[2], object_hook=lambda members: SimpleNamespace(**members))

from asyncgate.parts.faces import server

server.STALL_SECONDS = 0.5
server.KEEP_ALIVE_SECONDS = options.keep_alive_seconds
released = asyncio.Event()


def say(line):
    print(line, flush=True)


class NoKey(Exception):
    startup_message = "the app does not start: no key is set"


async def lifespan(receive, send):
    await receive()
    if options.start == "refuse":
        await send({"type": "lifespan.startup.failed", "message": "Traceback (most recent call last)"})
        raise NoKey
    if options.start == "break":
        raise ValueError("the app is broken")
    if options.start == "hang":
        say("starting")
        await asyncio.Event().wait()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    say("closing")
    if options.close == "hang":
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()        # and so does the next step
    await send({"type": "lifespan.shutdown.complete"})


async def read_body(receive):
    body = b""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message["body"]
        more = message["more_body"]
    return body


async def flood(send):
    say("flooding")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(100):
        await send({"type": "http.response.body", "body": b"x" * 1_000_000, "more_body": True})
    say("flood over")


async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        return await lifespan(receive, send)
    if scope["path"] != "/again":
        say("got " + scope["path"])
    if scope["path"] == "/poll":
        await released.wait()
    if scope["path"] == "/stuck":
        await asyncio.Event().wait()
    if scope["path"] == "/flood":
        return await flood(send)
    whole = scope["extensions"]["asyncgate.whole"] if scope["path"] != "/ordinary" else None
    body = b"" if scope["path"] == "/early" else whole.body() if whole else None
    if body is None:
        say("by messages")
        body = await read_body(receive)
    if body is None:
        return say("disconnected")
    names = [name.decode() for name, _ in scope["headers"]]
    if scope["path"] == "/kept":
        gc.disable()
        names = [kind for one in gc.get_objects() if (kind := type(one).__name__) == "RequestResponseCycle"]
    if scope["path"] == "/values":
        names = [value.decode() for _, value in scope["headers"]]
    answer = json.dumps({"path": scope["path"], "body": body.decode(), "headers": names}).encode()
    if whole and whole.answer(200, b"x-kind: test\\r\\n", answer):
        return
    headers = [(b"x-kind", b"test"), (b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


def drain():
    say("drained")
    released.set()


if options.tell == "rests":
    rest = server.Http._rest_between_reads
    server.Http._rest_between_reads = lambda self: (say("rest"), rest(self))[1]
sys.exit(server.run_server(app, options, drain=drain, ready=say))
"""


class Server:
    """A server process whose output is read line by line, never longer than patience allows."""

    def __init__(self, script: Path, **options: Any) -> None:
        settings = {
            "host": "127.0.0.1",
            "port": 0,
            "header_timeout_seconds": HEADER_TIMEOUT_SECONDS,
            "shutdown_seconds": 10,
            "limit_concurrency": None,
            "max_connections_per_address": 0,
            "trusted_proxies": [],
            "security": {"tls": {"certificate_path": ""}},
            "log_level": "WARNING",
            "start": "well",
            "close": "well",
            "tell": "",
            "keep_alive_seconds": 75,
        }
        command = [sys.executable, str(script), str(ROOT), json.dumps(settings | options)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
        self.output = b""
        self.clients: list[Client] = []

    def line(self) -> str:
        """Return the next line of the output."""
        assert self.process.stdout
        deadline = time.monotonic() + PATIENCE_SECONDS
        while b"\n" not in self.output:
            assert select.select([self.process.stdout], [], [], deadline - time.monotonic())[0], "no line came"
            piece = self.process.stdout.read(65536)
            assert piece, f"the server ended: {self.process.communicate()}"
            self.output += piece
        line, _, self.output = self.output.partition(b"\n")
        return line.decode()

    def until(self, wanted: str) -> None:
        """Read lines until the wanted one has come."""
        while self.line() != wanted:
            pass

    def start(self) -> Server:
        """Wait for the address."""
        self.url = self.line()
        self.port = int(self.url.rpartition(":")[2])
        return self

    def end(self) -> tuple[int, str, str]:
        """Return exit status, the output not read yet and the errors."""
        output, errors = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, (self.output + output).decode(), errors.decode()

    def kill(self) -> None:
        """End the process, if it still runs, and all connections to it."""
        for client in self.clients:
            client.close()
        self.process.kill()
        self.process.communicate()


class Client:
    """One connection that says exactly the bytes it is given."""

    def __init__(self, server: Server) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS)
        self.reader = self.socket.makefile("rb")
        server.clients.append(self)

    def say(self, data: bytes) -> Client:
        """Send; a server that has already closed shows in what is read."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)
        return self

    def answer(self) -> tuple[int, dict[str, str], Any]:
        """Return status, headers and decoded body of the next response."""
        status = int(self.reader.readline().split()[1])
        headers = {}
        while line := self.reader.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name] = value.strip()
        return status, headers, json.loads(self.reader.read(int(headers["content-length"])))

    def rest(self) -> bytes:
        """Return what comes until the server closes."""
        try:
            return self.reader.read()
        except ConnectionResetError:
            return b""

    def close(self) -> None:
        """Give up the connection."""
        self.reader.close()
        self.socket.close()

    def get(self, path: str) -> Any:
        """Return the decoded body of a good answer."""
        status, _, body = self.say(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()).answer()
        assert status == 200
        return body


Start = Callable[..., Server]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Start]:
    script = tmp_path / "served.py"
    script.write_text(FORKED + APP)
    servers: list[Server] = []

    def launch(**options: Any) -> Server:
        servers.append(Server(script, **options))
        return servers[-1]

    yield launch
    for server in servers:
        server.kill()


@pytest.fixture
def server(launch: Start) -> Server:
    return launch().start()


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server)


# Clocks


@pytest.mark.parametrize("start", [b"", b"GET / HTT", b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ", b"\r\n\r\n"])
def test_a_connection_without_complete_headers_is_cut(client: Client, start: bytes) -> None:
    assert client.say(start).rest() == b""


def test_headers_that_arrive_drop_by_drop_do_not_restart_the_clock(client: Client) -> None:
    client.say(b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ")
    client.socket.settimeout(0.05)
    deadline = time.monotonic() + PATIENCE_SECONDS
    cut = False
    while not cut:
        assert time.monotonic() < deadline
        try:
            cut = client.say(b"a").socket.recv(1) == b""
        except TimeoutError:
            continue
        except ConnectionResetError:
            cut = True


@pytest.mark.parametrize("start", [b"GET / HTT", b"GET / HTTP/1.1\r\nHost: a\r\n", b"\r\n"])
def test_a_slow_second_request_on_a_connection_is_cut(client: Client, start: bytes) -> None:
    client.get("/1")

    assert client.say(start).rest() == b""


def test_fast_requests_on_one_connection_outlive_the_header_timeout(client: Client) -> None:
    until = time.monotonic() + 3 * HEADER_TIMEOUT_SECONDS
    while time.monotonic() < until:
        client.get("/again")

    assert client.get("/last")["path"] == "/last"


def test_an_idle_connection_outlives_the_header_timeout(server: Server, client: Client) -> None:
    client.get("/1")

    Client(server).rest()  # it was opened later, so the header timeout has passed when it is cut

    assert client.get("/2")["path"] == "/2"


def test_an_idle_connection_is_cut_so_long_after_its_last_answer_not_its_first(launch: Start) -> None:
    seconds = 3 * HEADER_TIMEOUT_SECONDS
    client = Client(launch(keep_alive_seconds=seconds).start())
    until = time.monotonic() + 0.7 * seconds
    while time.monotonic() < until:
        client.get("/again")
    last = time.monotonic()

    assert client.rest() == b""
    assert time.monotonic() - last > 0.9 * seconds


def test_a_head_that_begins_late_has_its_own_time(launch: Start) -> None:
    seconds = HEADER_TIMEOUT_SECONDS
    server = launch(keep_alive_seconds=seconds, header_timeout_seconds=4 * seconds).start()
    client, idle = Client(server), Client(server)
    client.get("/1")
    idle.get("/1")      # later, so it is cut when the other one's idle time is over
    client.say(b"GET /2 HTTP/1.1\r\nHost:")
    idle.rest()

    assert client.say(b" a\r\n\r\n").answer()[2]["path"] == "/2"


def test_a_waiting_request_with_a_piece_of_the_next_one_behind_it_is_not_cut(server: Server, client: Client) -> None:
    client.say(b"GET /poll HTTP/1.1\r\nHost: a\r\n\r\nGET /next HTT")
    server.until("got /poll")

    Client(server).rest()
    server.process.send_signal(signal.SIGTERM)

    assert client.answer()[2]["path"] == "/poll"


def test_an_answer_that_nobody_reads_is_given_up(server: Server, client: Client) -> None:
    client.say(b"GET /flood HTTP/1.1\r\nHost: a\r\n\r\n")

    server.until("flood over")


# Limits and framing


def refusal(client: Client) -> tuple[int, dict[str, str], dict[str, str]]:
    """Return an answer after which the server has closed."""
    status, headers, body = client.answer()
    assert client.rest() == b""
    assert headers["connection"] == "close"
    assert set(body) == {"error", "message", "detail"}
    assert body["error"] == "invalid_request"
    return status, headers, body


def test_headers_of_200_kb_are_answered_431(client: Client) -> None:
    client.say(b"GET / HTTP/1.1\r\nHost: a\r\nX-Large: " + b"a" * 200_000 + b"\r\n\r\n")

    status, _, body = refusal(client)

    assert status == 431
    assert "32768" in body["message"]


@pytest.mark.parametrize(
    "head",
    [
        b"Host: a\r\nX-Endless: " + b"a" * 2_000_000,
        b"Host: a\r\n" + b"X-Many: a\r\n" * 10_000,
        b"Host: a\r\nX-Just-Over: " + b"a" * 32_768 + b"\r\n\r\n",
    ],
    ids=["one that never ends", "many small ones", "just over"],
)
def test_headers_over_the_limit_are_answered_431(client: Client, head: bytes) -> None:
    assert refusal(client.say(b"GET / HTTP/1.1\r\n" + head))[0] == 431


def test_a_path_over_the_limit_is_answered_431(client: Client) -> None:
    assert refusal(client.say(b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"))[0] == 431


def test_headers_of_30_kb_and_a_large_body_are_served(client: Client) -> None:
    head = b"POST /large HTTP/1.1\r\nHost: a\r\nX-Large: " + b"a" * 30_000 + b"\r\nContent-Length: 500000\r\n\r\n"

    status, _, body = client.say(head + b"b" * 500_000).answer()

    assert status == 200
    assert len(body["body"]) == 500_000


CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"


MALFORMED = {repr(line[:70]): line for line in (
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nhOST: a\r\n\r\n",
    b"GET / HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nAccept: */*\r\n\r\n",
    CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\nhello",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\nhello",
    b"POST / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: gzip\r\n\r\nhello",
    CHUNKED + b"\r\nnot-a-size\r\n",
    CHUNKED + b"\r\n5\r\nhello\r\n0\r\nX-Trailer: " + b"a" * 400_000,
    b"GET / HTTP/1.1\nHost: a\n\n",
    b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n",
    b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET http://a:81/ HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET http://a@b/ HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET http://b?a HTTP/1.0\r\nHost: a\r\n\r\n",
    b"GET http://b/ HTTP/1.0\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"\r\n" * 100_000,
)}


@each("name", MALFORMED)
def test_an_ambiguous_or_malformed_request_is_answered_400(server: Server, name: str) -> None:
    assert refusal(Client(server).say(MALFORMED[name]))[0] == 400


@pytest.mark.parametrize("target", [b"http://a/same", b"http://A/same", b"HTTP://a/same", b"https://a/same?x=1"])
def test_a_target_may_repeat_the_host(client: Client, target: bytes) -> None:
    status, _, body = client.say(b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n").answer()

    assert (status, body["path"]) == (200, "/same")


@pytest.mark.parametrize("version", [b"2.0", b"1.2", b"0.9", b"3.0"])
def test_another_version_of_http_is_not_taken_for_1_1(client: Client, version: bytes) -> None:
    assert refusal(client.say(b"GET / HTTP/" + version + b"\r\nHost: a\r\n\r\n"))[0] in (400, 505)


def test_http_1_0_without_host_is_served(client: Client) -> None:
    status, headers, _ = client.say(b"GET /old HTTP/1.0\r\n\r\n").answer()

    assert status == 200
    assert headers["connection"] == "close"


def test_a_refusal_carries_the_headers_that_every_answer_carries(client: Client) -> None:
    _, headers, _ = refusal(client.say(b"GET / HTTP/1.1\r\n\r\n"))

    assert headers["content-type"] == "application/json"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert "date" in headers
    assert "server" not in headers


def test_no_answer_names_the_server(client: Client) -> None:
    client.say(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")

    headers = client.answer()[1]

    assert "date" in headers
    assert "server" not in headers


def test_a_body_shorter_than_its_content_length_ends_as_a_disconnect(server: Server, client: Client) -> None:
    client.say(b"POST /short HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nhello")
    client.socket.shutdown(socket.SHUT_WR)

    server.until("disconnected")


def test_bytes_beyond_the_content_length_are_refused_and_never_join_the_body(client: Client) -> None:
    client.say(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n")

    assert client.say(b"hello").answer()[2]["body"] == "hello"
    assert refusal(client.say(b"{}, and more\r\n\r\n"))[0] == 400


def test_a_refusal_never_passes_for_the_answer_to_an_earlier_request(server: Server, client: Client) -> None:
    client.say(b"GET /poll HTTP/1.1\r\nHost: a\r\n\r\n")
    server.until("got /poll")

    assert client.say(b"GET / HTTP/1.1\r\n\r\n").rest() == b""


def test_blanks_around_the_value_of_a_header_are_no_part_of_it(client: Client) -> None:
    client.say(b"GET /values HTTP/1.1\r\nHost: a\r\nX-First: \t b c \t \r\nX-Second:d\r\nX-Third: \t \r\n\r\n")

    assert client.answer()[2]["headers"] == ["a", "b c", "d", ""]


def test_trailers_do_not_join_the_headers(client: Client) -> None:
    client.say(CHUNKED + b"\r\n").say(b"5\r\nhello\r\n0\r\nX-Trailer: a\r\n\r\n")

    body = client.answer()[2]

    assert body == {"path": "/", "body": "hello", "headers": ["host", "transfer-encoding"]}
    assert client.get("/next")["headers"] == ["host"]


def test_what_an_answered_client_still_sends_is_read_with_rests_between(launch: Start) -> None:
    server = launch(tell="rests").start()
    client = Client(server)
    size = 4 * 2**20

    assert client.say(b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size).answer()[0] == 200
    client.say(b"x" * size)

    for _ in range(5):
        server.until("rest")
    assert client.rest() == b""


def test_an_answer_given_before_the_body_came_keeps_the_connection(client: Client) -> None:
    client.say(b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n")

    assert client.answer()[0] == 200
    assert client.say(b"hello").get("/next")["body"] == ""


@pytest.mark.parametrize("version", ["HTTP/1.1\r\nConnection: close", "HTTP/1.0"])
def test_who_sends_a_large_body_and_asks_to_close_can_read_an_early_answer(client: Client, version: str) -> None:
    client.say(f"POST /early {version}\r\nHost: a\r\nContent-Length: {4 * 2**20}\r\n\r\n".encode())
    client.socket.sendall(b"x" * 4 * 2**20)         # it would be reset while it sends

    assert client.answer()[0] == 200
    assert client.reader.read() == b""


def test_a_client_that_goes_on_with_an_answered_request_is_closed_without_a_second_answer(client: Client) -> None:
    client.say(b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 9000000\r\n\r\n")

    assert client.answer()[0] == 200
    assert client.say(b"a" * 2_000_000).rest() == b""


def test_pipelined_requests_are_answered_in_order(client: Client) -> None:
    client.say(b"".join(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(50)))

    assert [client.answer()[2]["path"] for _ in range(50)] == [f"/{number}" for number in range(50)]


def test_an_answered_request_leaves_nothing_to_the_garbage_collector(client: Client) -> None:
    kept = [len(client.get("/kept")["headers"]) for _ in range(5)]

    assert max(kept[1:]) <= 2, "this one, and the one before, until its connection forgets it"


def test_the_short_way_and_the_messages_of_asgi_give_the_same_answer(client: Client) -> None:
    ask = "POST /%s HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"

    short = client.say((ask % "shortcut").encode()).answer()
    ordinary = client.say((ask % "ordinary").encode()).answer()

    assert short[1].keys() == ordinary[1].keys() == {"date", "x-kind", "content-length"}
    assert short[2] == {**ordinary[2], "path": "/shortcut"}


def test_a_body_in_pieces_comes_by_the_messages_of_asgi(server: Server, client: Client) -> None:
    client.say(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nhello")
    server.until("by messages")

    assert client.say(b"again").answer()[2]["body"] == "helloagain"


def test_a_client_that_asks_whether_to_go_on_is_told_so(client: Client) -> None:
    client.say(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")

    assert client.reader.readline() == b"HTTP/1.1 100 Continue\r\n"
    assert client.reader.readline() == b"\r\n"
    assert client.say(b"hello").answer()[2]["body"] == "hello"


def test_the_last_request_of_a_connection_is_answered_and_the_connection_closed(client: Client) -> None:
    client.say(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")

    assert client.answer()[1]["connection"] == "close"
    assert client.rest() == b""


def test_head_is_answered_without_a_body(client: Client) -> None:
    client.say(b"HEAD / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")

    head, _, body = client.rest().partition(b"\r\n\r\n")

    assert b"content-length: " in head
    assert body == b""


UPGRADE = (
    b"Host: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
)


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_an_offer_of_another_protocol_is_ignored(client: Client, protocol: bytes) -> None:
    client.say(b"GET /1 HTTP/1.1\r\n" + UPGRADE % protocol + b"\r\n")

    assert client.answer()[2]["path"] == "/1"
    assert client.get("/2")["path"] == "/2"


@pytest.mark.parametrize("separately", [False, True], ids=["in one piece", "body apart"])
@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"Content-Length: 44\r\n", b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n12345678\n"),
        (b"Transfer-Encoding: chunked\r\n", b"2c\r\nGET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n12345678\n\r\n0\r\n\r\n"),
    ],
    ids=["length", "chunked"],
)
def test_the_body_of_a_request_that_offers_another_protocol_is_its_body(
    server: Server, client: Client, framing: bytes, body: bytes, separately: bool
) -> None:
    head = b"POST /1 HTTP/1.1\r\n" + UPGRADE % b"h2c" + framing + b"\r\n"
    if separately:
        client.say(head)
        server.until("got /1")
        client.say(body + b"GET /2 HTTP/1.1\r\nHost: a\r\n\r\n")
    else:
        client.say(head + body + b"GET /2 HTTP/1.1\r\nHost: a\r\n\r\n")

    first, second = client.answer()[2], client.answer()[2]

    assert (first["path"], second["path"]) == ("/1", "/2")
    assert first["body"] == "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n12345678\n"


def test_a_connection_beyond_the_limit_is_answered_503_with_retry_after(launch: Start) -> None:
    server = launch(limit_concurrency=2, header_timeout_seconds=PATIENCE_SECONDS).start()
    kept = Client(server).say(b"POST /work HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhe")
    server.until("got /work")

    status, headers, body = Client(server).say(b"GET /2 HTTP/1.1\r\nHost: a\r\n\r\n").answer()

    assert status == 503
    assert headers["retry-after"] == "1"
    assert body["error"] == "overloaded"
    assert kept.say(b"llo").answer()[0] == 200


# The end


def test_a_request_in_flight_is_answered_after_sigterm_and_the_status_is_0(server: Server, client: Client) -> None:
    client.say(b"POST /work HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhe")
    server.until("got /work")

    server.process.send_signal(signal.SIGTERM)
    server.until("drained")
    status, headers, body = client.say(b"llo").answer()

    assert (status, body["body"], headers["connection"]) == (200, "hello", "close")
    assert server.end() == (0, "closing\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_waiting_poll_is_drained_and_answered(server: Server, client: Client, number: signal.Signals) -> None:
    client.say(b"GET /poll HTTP/1.1\r\nHost: a\r\n\r\n")
    idle = Client(server)
    idle.get("/1")
    server.until("got /1")

    server.process.send_signal(number)

    assert client.answer()[0] == 200
    assert idle.rest() == b""
    assert server.end() == (0, "drained\nclosing\n", "")


def test_a_request_that_never_ends_does_not_keep_the_server(launch: Start) -> None:
    server = launch(shutdown_seconds=1).start()
    Client(server).say(b"GET /stuck HTTP/1.1\r\nHost: a\r\n\r\n")
    server.until("got /stuck")

    server.process.send_signal(signal.SIGTERM)
    status, output, _ = server.end()

    assert status == 0
    assert output == "drained\nclosing\n"


def test_an_app_that_does_not_close_is_left_and_the_status_is_1(launch: Start) -> None:
    server = launch(shutdown_seconds=1, close="hang").start()

    server.process.send_signal(signal.SIGTERM)
    status, output, errors = server.end()

    assert (status, output) == (1, "drained\nclosing\n")
    assert errors == "the app did not close within 1 seconds\n"


def test_a_second_signal_cuts_what_still_runs(launch: Start) -> None:
    server = launch(shutdown_seconds=10 * PATIENCE_SECONDS).start()
    client = Client(server).say(b"GET /stuck HTTP/1.1\r\nHost: a\r\n\r\n")
    server.until("got /stuck")

    server.process.send_signal(signal.SIGTERM)
    server.until("drained")
    server.process.send_signal(signal.SIGTERM)

    assert client.rest() == b""
    assert server.end()[0] == 1


def test_a_second_signal_ends_an_app_that_does_not_close(launch: Start) -> None:
    server = launch(shutdown_seconds=10 * PATIENCE_SECONDS, close="hang").start()

    server.process.send_signal(signal.SIGTERM)
    server.until("closing")
    server.process.send_signal(signal.SIGTERM)

    assert server.end()[0] == 1


def test_a_signal_during_the_start_ends_it(launch: Start) -> None:
    server = launch(start="hang")
    server.until("starting")

    server.process.send_signal(signal.SIGTERM)

    assert server.end() == (0, "", "")


# The start


def test_port_0_is_told_as_the_real_port(server: Server) -> None:
    assert server.port != 0
    assert server.url == f"http://127.0.0.1:{server.port}"


def test_localhost_is_served(launch: Start) -> None:
    server = launch(host="localhost").start()

    assert server.url == f"http://localhost:{server.port}"
    assert Client(server).get("/1")["path"] == "/1"


def test_a_port_in_use_is_one_line_and_status_1(launch: Start, server: Server) -> None:
    status, output, errors = launch(port=server.port).end()

    assert (status, output) == (1, "")
    assert errors == f"asyncgate: cannot listen on 127.0.0.1:{server.port}: Address already in use\n"


def test_a_host_that_is_not_ours_is_one_line_and_status_1(launch: Start) -> None:
    status, output, errors = launch(host="192.0.2.1", port=8000).end()

    assert (status, output) == (1, "")
    assert errors.startswith("asyncgate: cannot listen on 192.0.2.1:8000: ")
    assert errors.count("\n") == 1


def test_an_app_that_refuses_to_start_is_one_line_in_its_own_words(launch: Start) -> None:
    assert launch(start="refuse").end() == (1, "", "the app does not start: no key is set\n")


def test_an_app_that_breaks_while_starting_is_logged_with_its_traceback(launch: Start) -> None:
    status, output, errors = launch(start="break").end()

    assert (status, output) == (1, "")
    assert errors.startswith("the app failed: the app is broken\nTraceback")
