"""Transport and resources (threats F1 to F7, F11, F12): who holds on to connections, places or time that others need.

A gate in a process of its own and real connections, wherever one could tell the difference.

    F1   test_transport.py::test_a_connection_without_complete_headers_is_cut
         test_transport.py::test_headers_that_arrive_drop_by_drop_do_not_restart_the_clock
         test_transport.py::test_a_slow_second_request_on_a_connection_is_cut
         test_transport.py::test_an_answer_that_nobody_reads_is_given_up
         test_rest.py::test_a_body_that_does_not_come_is_408
         test_threats_transport.py::test_f1_over_tls_neither_handshake_nor_headers_may_take_for_ever
    F2   test_transport.py::test_a_connection_beyond_the_limit_is_answered_503_with_retry_after
         test_threats_transport.py::test_f2_an_address_has_so_many_connections_and_no_more
         test_threats_transport.py::test_f2_behind_a_proxy_connections_are_not_counted_by_address
         test_threats_transport.py::test_f2_of_ipv6_a_network_counts_as_one_address
         test_threats_transport.py::test_f2_who_is_not_counted_is_never_too_many
         test_threats_transport.py::test_f2_idle_connections_of_strangers_keep_nobody_out
         test_threats_transport.py::test_f2_who_leaves_before_its_answers_leaves_no_traceback
    F3   test_rest.py::test_asking_to_wait_too_long_is_clamped
         test_rest.py::test_too_many_waiting_claims_are_429_and_say_when_to_come_back
         test_rest.py::test_over_a_socket_a_stopping_server_answers_its_waiting_calls
         test_rest.py::test_a_waiting_claim_whose_client_goes_frees_its_place_and_takes_no_work
         test_mcp.py::test_a_waiting_claim_ends_with_its_client
         test_threats_transport.py::test_f3_a_principal_and_a_tenant_have_so_many_places_to_wait_on_both_facades
         test_threats_transport.py::test_f3_a_client_that_goes_frees_its_place_at_once
         test_threats_transport.py::test_f3_calls_that_wait_hold_no_connection_to_the_database
         test_threats_transport.py::test_f3_hundreds_of_waiting_readers_hold_no_connection_to_the_database
         test_threats_transport.py::test_f3_tenants_do_not_share_their_places_and_nothing_is_kept_of_who_has_left
         test_threats_transport.py::test_f3_a_refused_run_task_creates_nothing
    F4   test_mcp.py::test_there_is_no_stream_to_get_and_no_session_to_delete
         test_mcp_context.py::test_a_subscription_ends_with_its_client
         test_mcp_context.py::test_a_gate_that_stops_ends_its_subscriptions
         test_threats_transport.py::test_f4_no_session_is_given_and_none_is_obeyed
         test_threats_transport.py::test_f4_subscriptions_take_places_too
         (there are no sessions to cap or to expire: each POST stands alone)
    F5   test_rest.py::test_on_loopback_the_gate_answers_for_no_other_name
         test_rest.py::test_on_loopback_no_page_of_another_site_may_call
         test_rest.py::test_the_names_that_are_served_can_be_listed
         test_rest.py::test_a_body_of_no_type_is_415_and_no_body_needs_none
         test_transport.py::test_a_target_may_repeat_the_host
         test_transport.py::test_another_version_of_http_is_not_taken_for_1_1
         test_mcp.py::test_pages_of_other_sites_are_kept_out
    F6   test_rest.py::test_another_method_is_405_and_allow_names_all_that_are_served
         test_threats_transport.py::test_f6_a_method_that_mcp_does_not_have_is_405
    F7   test_limits.py::test_only_trusted_proxies_say_whose_request_it_is
         test_limits.py::test_made_up_addresses_do_not_escape_the_limit
         test_limits.py::test_many_principals_of_one_tenant_share_its_limit
         test_limits.py::test_instances_of_a_principal_are_one_principal
         test_bad_input.py::test_another_spelling_of_a_path_is_another_path
         test_threats_transport.py::test_f7_a_batch_of_json_rpc_is_refused_whole
    F11  test_threats_transport.py::test_f11_strangers_leave_nothing_behind
         (there are no metrics yet; their labels are the business of the issue that brings them)
    F12  test_threats_transport.py::test_f12_no_pattern_repeats_a_repetition
         test_threats_transport.py::test_f12_every_pattern_reads_a_hostile_text_to_its_end
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import pkgutil
import re
import select
import signal
import socket
import ssl
import struct
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import trustme

import asyncgate
from asyncgate.parts.faces.server import Crowd
from asyncgate.parts.model.errors import TooManyWaiting
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.wire import Principal
from asyncgate.parts.operations import OPERATIONS
from asyncgate.parts.process.polls import Polls
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

TOKEN = "a-token-for-tests"
MODERN = "2026-07-28"
META = {"io.modelcontextprotocol/protocolVersion": MODERN, "io.modelcontextprotocol/clientCapabilities": {}}


# A client that may leave in the middle.


class Line:
    """One connection to a gate."""

    def __init__(self, live: Any, context: ssl.SSLContext | None = None) -> None:
        self.socket: socket.socket = socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE_SECONDS)
        if context:
            self.socket = context.wrap_socket(self.socket, server_hostname="127.0.0.1")
        self.reader = self.socket.makefile("rb")
        self.request: tuple[Any, ...] = ()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()
        self.socket.close()

    def say(self, method: str, target: str, body: Any = None, *headers: tuple[str, str]) -> Line:
        """Send one request."""
        sent = b"" if body is None else json.dumps(body).encode()
        given = [("Host", "localhost"), ("Authorization", f"Bearer {TOKEN}"), *headers,
                 ("Content-Length", str(len(sent)))]
        given += [] if any(name == "Content-Type" for name, _ in headers) else [("Content-Type", "application/json")]
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in given), "", ""]
        self.socket.sendall("\r\n".join(lines).encode() + sent)
        return self

    def answer(self) -> tuple[int, dict[str, str], Any]:
        """Return status, headers and decoded body of the next answer."""
        status, headers = int(self.reader.readline().split()[1]), {}
        while line := self.reader.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return status, headers, json.loads(self.reader.read(int(headers["content-length"])))

    def is_cut(self) -> bool:
        """Whether the server closes without an answer."""
        try:
            return self.reader.read() == b""
        except ConnectionResetError:
            return True


def until(holds: Callable[[], bool]) -> None:
    """Try until something holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline


def tool(name: str, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Return what `Line.say` takes to call a tool over MCP."""
    params = {"name": f"asyncgate.{name}", "arguments": arguments, "_meta": META}
    return ("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params},
            ("Content-Type", "application/json"), ("Accept", "application/json, text/event-stream"),
            ("MCP-Protocol-Version", MODERN), ("MCP-Method", "tools/call"), ("MCP-Name", f"asyncgate.{name}"))


# F1: clocks, also inside TLS.


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Return who signs the certificates of these tests."""
    return trustme.CA()


@pytest.fixture
def certified(authority: trustme.CA, tmp_path: Path) -> str:
    """Return the file of a certificate with its key."""
    path = tmp_path / "gate.pem"
    path.touch(0o600)
    authority.issue_cert("127.0.0.1", "localhost").private_key_and_cert_chain_pem.write_to_path(path)
    return str(path)


@pytest.fixture
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    """Return a client's context that trusts that authority and nobody else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    return context


def test_f1_over_tls_neither_handshake_nor_headers_may_take_for_ever(
    start: Any, certified: str, trusting: ssl.SSLContext
) -> None:
    live = start(f"security.tls.certificate_path={certified}", "header_timeout_seconds=2")

    with Line(live) as silent, Line(live, trusting) as slow:
        slow.socket.sendall(b"GET /health HTTP/1.1\r\nHost: lo")
        until(lambda: is_served(live, trusting))    # who is good may be late, too, on a busy machine
        assert silent.is_cut()
        assert slow.is_cut()


# F2: connections.


def is_served(live: Any, context: ssl.SSLContext | None = None) -> bool:
    """Whether a new connection gets an answer, and is not cut."""
    try:
        with Line(live, context) as line:
            return line.say("GET", "/health").reader.readline() == b"HTTP/1.1 200 OK\r\n"
    except (ConnectionError, ssl.SSLError):
        return False


def test_f2_an_address_has_so_many_connections_and_no_more(start: Any) -> None:
    live = start("max_connections_per_address=3")

    with Line(live) as first, Line(live) as second, Line(live) as third:
        assert [line.say("GET", "/health").answer()[0] for line in (first, second, third)] == [200] * 3
        assert not is_served(live)
        assert first.say("GET", "/health").answer()[0] == 200
        third.__exit__()
        until(lambda: is_served(live))
    assert live.kill().count("3 connections, the limit per address") == 1


def test_f2_behind_a_proxy_connections_are_not_counted_by_address(start: Any) -> None:
    live = start("max_connections_per_address=1", "trusted_proxies=127.0.0.1")

    with Line(live) as first, Line(live) as second:
        assert [line.say("GET", "/health").answer()[0] for line in (first, second)] == [200, 200]


@pytest.mark.parametrize(("first", "second", "same"), [
    ("2001:db8::1", "2001:db8::ffff", True), ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
    ("fe80::1%eth0", "fe80::2%eth1", True), ("192.0.2.1", "192.0.2.1", True), ("192.0.2.1", "192.0.2.2", False)])
def test_f2_of_ipv6_a_network_counts_as_one_address(first: str, second: str, same: bool) -> None:
    crowd = Crowd(1)

    places = [crowd.enter((address, 1)) for address in (first, second)]

    assert crowd.is_too_large(places[1]) is same
    for place in places:
        crowd.leave(place)
    assert not crowd.counts


def test_f2_who_is_not_counted_is_never_too_many() -> None:
    for crowd, peer in ((Crowd(0), ("192.0.2.1", 1)), (Crowd(1), None)):
        places = [crowd.enter(peer) for _ in range(3)]
        assert [crowd.is_too_large(place) for place in places] == [False] * 3
        crowd.leave(places[0])


# F3: places to wait.


FEW = ("max_waiting_per_principal=2", "max_waiting_per_tenant=3", "database.pool_size=2")


@pytest.fixture
def crowded(start: Any, backend_url: str) -> Any:
    """Return a gate with few places, over each kind of store."""
    return start(*FEW, database=backend_url.replace("memory:", "memory://"))


def claim(worker: str, seconds: float = 30) -> dict[str, Any]:
    return {"worker_id": worker, "accept_types": ["none"], "wait_seconds": seconds}


def polling(line: Line, *request: Any) -> Line:
    """Let a line wait; `refusal` sees to it that it does."""
    line.request = request
    return line.say(*request)


def refusal(live: Any, worker: str, *waiting: Line) -> tuple[int, dict[str, str], Any]:
    """Ask for a place until there is none, because these lines have them; return that answer.

    To ask takes a place for a moment, so a line may be refused that comes just then; it asks again.  The next question
    waits for it, longer each time: the gate may always answer the one before the other.
    """
    answers: list[tuple[int, dict[str, str], Any]] = []
    pauses = (2**count * 0.01 for count in itertools.count())

    def is_full() -> bool:
        for line in waiting:
            if select.select([line.socket], [], [], 0)[0]:
                assert b"rate_limit_exceeded" in json.dumps(line.answer()).encode()
                line.say(*line.request)
                time.sleep(next(pauses))
        answers.append(probe.say("POST", "/v1/leases/claim", claim(worker, 0.01)).answer())
        return answers[-1][0] != 200

    with Line(live) as probe:
        until(is_full)
    return answers[-1]


def rest_poll(worker: str) -> tuple[Any, ...]:
    return "POST", "/v1/leases/claim", claim(worker)


def test_f3_a_principal_and_a_tenant_have_so_many_places_to_wait_on_both_facades(crowded: Any) -> None:
    with contextlib.ExitStack() as lines:
        first, second, third, more = (lines.enter_context(Line(crowded)).say("GET", "/health") for _ in range(4))
        assert [line.answer()[0] for line in (first, second, third, more)] == [200] * 4
        polling(first, *rest_poll("w1"))
        polling(second, *tool("lease_next", claim("w1")))
        by_rest = refusal(crowded, "w1", first, second)
        by_mcp = more.say(*tool("lease_next", claim("w1"))).answer()[2]["result"]
        by_peer = more.say("POST", "/mcp", {"method": "tools/call", "params": {
            "name": "asyncgate.lease_next", "arguments": claim("w1")}}).answer()[2]["error"]
        polling(third, *rest_poll("w2"))
        of_tenant = refusal(crowded, "w3", third)
        task_id = more.say("POST", "/v1/tasks", {"type": "other", "payload": None,
                                                 "agent_id": "ada"}).answer()[2]["task_id"]
        reading = more.say("GET", f"/v1/tasks/{task_id}?wait_seconds=30").answer()
        unwaiting = more.say("POST", "/v1/leases/claim", {"worker_id": "w1", "accept_types": ["no"]}).answer()

    for status, headers, body in (by_rest, of_tenant, reading):
        assert (status, headers["retry-after"], body["error"]) == (429, "1", "rate_limit_exceeded")
        assert body["retry_after"] == 1
    assert "2 calls of this principal" in by_rest[2]["message"]
    assert "3 calls of this tenant" in of_tenant[2]["message"]
    told = json.loads(by_mcp["content"][0]["text"])
    assert (by_mcp["isError"], told["error"], told["retry_after"]) == (True, "rate_limit_exceeded", 1)
    assert (by_peer["data"]["code"], by_peer["data"]["retry_after"]) == ("rate_limit_exceeded", 1)
    assert (unwaiting[0], unwaiting[2]) == (200, {"tasks": []})


@pytest.mark.parametrize("facade", ["rest", "mcp"])
def test_f3_a_client_that_goes_frees_its_place_at_once(crowded: Any, facade: str) -> None:
    poll = rest_poll("w1") if facade == "rest" else tool("lease_next", claim("w1"))
    with Line(crowded) as stays, Line(crowded) as goes, Line(crowded) as probe:
        assert probe.say("GET", "/health").answer()[0] == 200
        refusal(crowded, "w1", polling(stays, *poll), polling(goes, *poll))

        goes.__exit__()

        until(lambda: probe.say("POST", "/v1/leases/claim", claim("w1", 0.01)).answer()[0] == 200)


def test_f3_calls_that_wait_hold_no_connection_to_the_database(crowded: Any) -> None:
    with Line(crowded) as first, Line(crowded) as second, Line(crowded) as third, Line(crowded) as other:
        assert other.say("GET", "/health").answer()[0] == 200
        refusal(crowded, "w3", *(polling(line, *rest_poll(worker)) for line, worker in (
            (first, "w1"), (second, "w1"), (third, "w2"))))

        made = [other.say("POST", "/v1/tasks", {"type": "none", "payload": None}).answer() for _ in range(3)]
        offers = [line.answer()[2]["tasks"][0]["task_id"] for line in (first, second, third)]

    assert sorted(offers) == sorted(answer[2]["task_id"] for answer in made)


def test_f3_hundreds_of_waiting_readers_hold_no_connection_to_the_database(start: Any, backend_url: str) -> None:
    most = 300
    crowded = start(f"max_waiting_readers={most}", f"max_waiting_per_principal={most * 2}", "database.pool_size=2",
                    f"max_connections_per_address={most + 10}", database=backend_url.replace("memory:", "memory://"))
    targets = [f"/v1/{path}?agent_id=ada&wait_seconds=30" for path in ("receipts", "obligations/open")]
    with contextlib.ExitStack() as lines:
        probe = lines.enter_context(Line(crowded))
        waiting = [lines.enter_context(Line(crowded)).say("GET", targets[number % 2]) for number in range(most)]

        def is_full() -> bool:
            for number, line in enumerate(waiting):     # one that came while the probe had a place asks again
                if select.select([line.socket], [], [], 0)[0]:
                    assert line.answer()[0] == 429
                    line.say("GET", targets[number % 2])
            return bool(probe.say("GET", targets[0].replace("=30", "=0.01")).answer()[0] == 429)

        until(is_full)
        status, _, refused = probe.say("GET", targets[0]).answer()

        made = probe.say("POST", "/v1/tasks", {"type": "none", "payload": None, "agent_id": "ada"}).answer()[2]
        answers = [line.answer()[2] for line in waiting]

    assert (status, refused["error"], refused["retry_after"]) == (429, "rate_limit_exceeded", 1)
    assert "max_waiting_readers" in refused["message"]
    read = [row["task_id"] for answer in answers for row in answer.get("receipts") or answer["open_obligations"]]
    assert read == [made["task_id"]] * most


def test_f3_tenants_do_not_share_their_places_and_nothing_is_kept_of_who_has_left() -> None:
    polls = Polls(Settings(max_waiting_per_tenant=2, max_waiting_per_principal=1))
    ada, bob, eve = (Principal("agent", name) for name in ("ada", "bob", "eve"))

    with polls.place("a", ada), polls.place("a", bob):
        for who, whose in ((ada, "principal"), (Principal("agent", "ada", "2"), "principal"), (eve, "tenant")):
            with pytest.raises(TooManyWaiting, match=f"of this {whose}"), polls.place("a", who):
                raise AssertionError("there was a place")
        with polls.place("b", ada), pytest.raises(RuntimeError), polls.place("b", eve):
            raise RuntimeError

    assert not polls.tenants
    assert not polls.principals


async def test_f3_a_refused_run_task_creates_nothing(serve: Any, url: str) -> None:
    served = await serve(max_waiting_per_principal=1)

    with served.engine.polls.place(served.tenant_id, Principal("agent", "ada")):
        async with served.unchanged():
            refused = await served.call("POST", "/v1/tasks/run", {"type": "x", "payload": None, "agent_id": "ada",
                                                                  "wait_seconds": 5})
        at_once = await served.call("POST", "/v1/tasks/run", {"type": "x", "payload": None, "agent_id": "ada",
                                                              "wait_seconds": 0})

    assert (refused.status, at_once.status) == (429, 200)


# F4, F6, F7: what MCP has and has not.


def listening(uri: str = "asyncgate://obligations") -> tuple[bytes, list[tuple[str, str]]]:
    """Return a request to be told of changes."""
    params = {"notifications": {"resourceSubscriptions": [uri]}, "_meta": META}
    body = {"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen", "params": params}
    return json.dumps(body).encode(), [
        ("content-type", "application/json"), ("accept", "application/json, text/event-stream"),
        ("mcp-protocol-version", MODERN), ("mcp-method", "subscriptions/listen"), ("authorization", f"Bearer {TOKEN}")]


ADA = "/mcp?principal_kind=agent&principal_id=ada"


async def test_f4_subscriptions_take_places_too(serve: Any) -> None:
    served, gone = await serve(max_waiting_per_tenant=1), asyncio.Event()
    body, headers = listening()
    first = asyncio.create_task(served.send("POST", ADA, body, headers=headers, gone=gone))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not served.engine.extensions:  # noqa: ASYNC110  # there is nothing to be told by
            await asyncio.sleep(0)

    refused = await asyncio.wait_for(served.send("POST", ADA, body, headers=headers), PATIENCE_SECONDS)
    poll = await served.call("POST", "/v1/leases/claim", claim("w1"))

    gone.set()
    await asyncio.wait_for(first, PATIENCE_SECONDS)
    assert b"rate_limit_exceeded" in refused.content
    assert poll.status == 429
    assert not served.engine.polls.tenants


async def test_f4_no_session_is_given_and_none_is_obeyed(served: Any) -> None:
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}}}
    headers = [("content-type", "application/json"), ("accept", "application/json, text/event-stream")]
    begun = await served.call("POST", "/mcp", hello, headers=headers)
    again = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    headers += [("mcp-protocol-version", "2025-11-25"), ("mcp-session-id", "somebody-elses")]

    own = await served.call("POST", "/mcp", again, headers=headers)
    stolen = await served.call("POST", "/mcp", again, headers=headers, token="wrong")
    nobody = await served.call("POST", "/mcp", again, headers=headers, token=None)

    assert begun.status == own.status == 200
    assert "mcp-session-id" not in {**begun.headers, **own.headers}
    assert (stolen.status, nobody.status) == (401, 401)


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "HEAD", "PATCH", "BREW", "post"])
@pytest.mark.parametrize("path", ["/mcp", "/mcp/u"])
async def test_f6_a_method_that_mcp_does_not_have_is_405(served: Any, method: str, path: str) -> None:
    answer = await served.call(method, path, headers=[("mcp-method", "tools/call")])

    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert TOKEN not in answer.content.decode()


async def test_f7_a_batch_of_json_rpc_is_refused_whole(served: Any) -> None:
    _, path, body, *headers = tool("create_task", {"type": "demo", "payload": None})

    async with served.unchanged():
        for given in ([(name.lower(), value) for name, value in headers], [("content-type", "application/json")]):
            answer = await served.call("POST", path, json.dumps([body] * 20).encode(), headers=given)
            assert answer.status in (200, 400)
            assert "error" in answer.json()


# F11: what strangers could fill.


async def test_f11_strangers_leave_nothing_behind(served: Any) -> None:
    def kept() -> list[int]:
        engine = served.engine
        engine.sightings.count()
        return [len(part) for part in (engine.polls.tenants, engine.polls.principals, engine.waiting.places,
                                       engine.waiting.timers, engine.readers.seats, engine.sightings.fresh,
                                       engine.extensions, engine.batches.__dict__, served.gate.endpoints)]

    async def at_once(seconds: float) -> None:
        """Hold nobody back: who goes on guessing waits a second each time."""

    served.gate.guard.keys.sleep = at_once
    before = kept()
    async with served.unchanged():
        for number in range(300):
            headers = [("host", "localhost"), ("user-agent", f"a{number}"), ("x-tenant-id", f"t{number}")]
            for target in (f"/v1/tasks/{number}?wait_seconds=30", f"/{number}", f"/v1/tasks?principal_id={number}"):
                answer = await served.call("GET", target, headers=headers, token=f"guess-{number}")
                assert answer.status in (401, 404)
            await served.call("POST", "/v1/leases/claim", claim(f"w{number}"), headers=headers, token=None)

    assert kept() == before


# F12: no text takes longer than its length.


def modules() -> Iterator[Any]:
    """Import every module that reads what others wrote."""
    for part in ("parts", "backends", "clients", "commands", "extras"):
        package = importlib.import_module(f"asyncgate.{part}")
        yield package
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                imported = importlib.import_module(module.name)
            except ModuleNotFoundError as missing:      # a framework that is too large for the tests to install
                if missing.name not in ("smolagents", "claude_agent_sdk"):
                    raise
            else:
                yield imported
    yield asyncgate


def patterns() -> dict[str, Any]:
    """Return every pattern that reads what others wrote, and those of the fields of requests and settings."""
    regexes: dict[str, Any] = {}
    for module in modules():
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern) and name != "CLAUSE":      # which reads our own docstrings
                regexes[f"{module.__name__}.{name}"] = value
    schemas = [json.dumps(msgspec.json.schema(op.takes)) for op in OPERATIONS.values()]
    schemas.append(json.dumps(msgspec.json.schema(Settings)))
    for text in {pattern for schema in schemas for pattern in re.findall(r'"pattern": ("(?:[^"\\]|\\.)*")', schema)}:
        regexes[text] = re.compile(json.loads(text))
    return regexes


def repeats(parsed: Any, inside: bool = False) -> bool:
    """Whether a pattern repeats without an end what repeats without an end, which can take exponential time."""
    parser = importlib.import_module("re._parser")
    for op, value in parsed:
        endless = str(op) in ("MAX_REPEAT", "MIN_REPEAT") and value[1] == parser.MAXREPEAT
        if inside and endless:
            return True
        parts = value if isinstance(value, tuple | list) else [value]
        flat = [node for part in parts for node in (part if isinstance(part, list) else [part])]
        if any(isinstance(node, parser.SubPattern) and repeats(node, inside or endless) for node in flat):
            return True
    return False


def test_f12_no_pattern_repeats_a_repetition() -> None:
    parse = importlib.import_module("re._parser").parse

    assert repeats(parse(r"a(b|[cd]+)*e"))
    assert not repeats(parse(r"(a+|b)c*(d|e)+"))
    assert [name for name, pattern in patterns().items() if repeats(parse(pattern.pattern))] == []
    assert len(patterns()) > 10


@pytest.mark.parametrize("text", ["a", " ", "0", "+", "=", "://", "a:", "a@", "-", "\u202e", "2026-", "[", "${", ";a"])
def test_f12_every_pattern_reads_a_hostile_text_to_its_end(text: str) -> None:
    hostile = text * (20_000 // len(text)) + "!"

    for pattern in patterns().values():
        given: Any = hostile.encode() if isinstance(pattern.pattern, bytes) else hostile
        pattern.fullmatch(given)
        pattern.search(given[:2_000])


# TLS does not change how a gate ends and is reached.


def test_a_gate_over_tls_ends_in_order(start: Any, certified: str, trusting: ssl.SSLContext) -> None:
    live = start(f"security.tls.certificate_path={certified}", "shutdown_seconds=2")

    with Line(live, trusting) as poll, Line(live, trusting) as other:
        poll.say("POST", "/v1/leases/claim", claim("w1"))
        assert other.say("GET", "/health").answer()[0] == 200
        live.process.send_signal(signal.SIGTERM)
        assert poll.answer()[2] == {"tasks": []}
        assert live.process.wait(PATIENCE_SECONDS) == 0
    live.kill()


async def test_an_ordinary_client_reaches_a_gate_over_tls(start: Any, certified: str, trusting: ssl.SSLContext) -> None:
    live = start(f"security.tls.certificate_path={certified}")

    async with httpx2.AsyncClient(verify=trusting, trust_env=False) as http:
        answer = await http.get(f"{live.url}/health")

    assert live.url.startswith("https://127.0.0.1:")
    assert answer.json()["status"] == "healthy"


# Who stays.


def test_f2_idle_connections_of_strangers_keep_nobody_out(start: Callable[..., Any]) -> None:
    """When all places are taken, those that have been idle for longest make room."""
    live = start("limit_concurrency=8")
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    idle = []
    for _ in range(20):     # each asks at once: who has only connected makes room for those that ask
        idle.append(connection := socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE_SECONDS))
        connection.sendall(request)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")

    for _ in range(10):
        with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE_SECONDS) as admin:
            admin.sendall(request)
            assert admin.recv(65536).startswith(b"HTTP/1.1 200")
    assert idle[0].recv(1) == b"", "the oldest was closed"
    for connection in idle:
        connection.close()


# Who leaves.


@pytest.mark.parametrize("farewell", ["closes", "resets", "half-closes"])
def test_f2_who_leaves_before_its_answers_leaves_no_traceback(start: Callable[..., Any], farewell: str) -> None:
    """Three pipelined requests and a close would each write 1 KB into the log, without any credential."""
    live = start()
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", live.port)) as client:
            if farewell == "resets":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5)
            if farewell == "half-closes":
                client.shutdown(socket.SHUT_WR)
    assert urllib.request.urlopen(f"{live.url}/health").status == 200
    live.process.terminate()

    assert "Traceback" not in live.process.communicate(timeout=PATIENCE_SECONDS)[1]
