"""Refusals inside MCP are answers in JSON-RPC, so that no client loses its session by one.

Only what asks for another credential keeps its HTTP status: clients begin their authorization by it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from asyncgate.conformance.proxy import Proxy
from tests.support.identity_tools import OTHER, House, mcp_call, security, tiers
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

TOKEN = "a-token-for-tests"
SUPPORT = Path(__file__).parents[1] / "support"
FACES = ("legacy", "modern", "bare")
faces = pytest.mark.parametrize("face", FACES)


def call(face: str, method: str = "tools/call") -> tuple[str, str, Any, list[tuple[str, str]]]:
    """Return a call of list_tasks, or a request of another method."""
    verb, path, message, headers = mcp_call("list_tasks", {"agent_id": "ada"}, face)
    if method != "tools/call":
        headers = [("mcp-method", method) if name == "mcp-method" else (name, value) for name, value in headers
                   if name != "mcp-name"]
        message |= {"method": method, "params": {name: value for name, value in message["params"].items()
                                                 if name == "_meta"}}
    return verb, path, message, headers


def refusal(answer: Any) -> dict[str, Any]:
    """Return what a JSON-RPC answer to request 1 says of a refusal: its code, and when to try again."""
    told = answer.json()
    assert told["id"] == 1
    if "error" in told:
        assert isinstance(told["error"]["code"], int)
        return dict(told["error"]["data"])
    assert told["result"]["isError"] is True
    assert "structuredContent" not in told["result"]
    return {**json.loads(told["result"]["content"][0]["text"]), **told["result"]["_meta"]["asyncgate/error"]}


@pytest.fixture
async def limited(serve: Any) -> tuple[House, str]:
    """A gate and the key of an agent who has spent the calls of its tenant."""
    limits = security(limits=True, default_tier="enterprise", address_calls_per_minute=-1,
                      anonymous_calls_per_minute=-1)
    house = House(await serve(security=limits, rate_limits=tiers(1, -1)))
    house.counting()
    await house.good("create_tenant", {"tenant": OTHER, "name": "free", "tier": "free"})
    key = await house.key("agent", "ada", tenant=OTHER)
    await house.good("list_tasks", token=key)
    return house, key


@faces
@pytest.mark.parametrize("method", ["tools/call", "tools/list"])
async def test_a_rate_limit_is_answered_in_json_rpc(limited: tuple[House, str], face: str, method: str) -> None:
    house, key = limited
    verb, path, message, headers = call(face, method)

    answer = await house.served.call(verb, path, message, headers=headers, token=key)

    assert answer.status == 200
    told = refusal(answer)
    assert (told["code"], told["retryable"], told["retry_after"]) == (
        "rate_limit_exceeded", True, int(answer.headers["retry-after"]))


async def test_a_handshake_beyond_the_limit_is_answered_in_json_rpc(limited: tuple[House, str]) -> None:
    house, key = limited
    about = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "a-test", "version": "1"}}

    answer = await house.served.post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about},
                                     token=key, headers=[("accept", "application/json, text/event-stream")])

    assert answer["error"]["data"]["code"] == "rate_limit_exceeded"


async def test_a_notification_beyond_the_limit_is_dropped_and_ends_no_session(limited: tuple[House, str]) -> None:
    house, key = limited
    _, path, message, headers = call("legacy", "notifications/initialized")
    del message["id"]

    answer = await house.served.call("POST", path, message, headers=headers, token=key)

    assert (answer.status, answer.content) == (202, b"")


@faces
async def test_too_many_calls_of_strangers_are_still_refused_as_http(serve: Any, face: str) -> None:
    limits = security(limits=True, anonymous_calls_per_minute=1, address_calls_per_minute=-1)
    house = House(await serve(security=limits))
    house.counting()
    verb, path, message, headers = call(face)

    answers = [await house.served.call(verb, path, message, headers=headers, token="wrong") for _ in range(3)]

    assert answers[0].status == 401
    assert [refusal(answer)["code"] for answer in answers[1:]] == ["rate_limit_exceeded"] * 2
    assert "list_tasks" not in answers[2].content.decode()


@faces
def test_an_overload_of_the_server_is_answered_in_json_rpc(start: Any, face: str) -> None:
    live = start("limit_concurrency=2")
    _, path, message, headers = call(face)
    waiting = json.dumps({"worker_id": "w1", "wait_seconds": 30})
    busy = [socket.create_connection(("127.0.0.1", live.port)) for _ in range(2)]
    for connection in busy:
        connection.sendall(f"POST /v1/leases/claim HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n"
                           f"content-type: application/json\r\ncontent-length: {len(waiting)}\r\n\r\n{waiting}"
                           .encode())
    with httpx2.Client(headers={"authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE_SECONDS) as client:
        while client.get(f"{live.url}/v1/config").status_code == 200:
            pass        # until the gate has read the other requests
        answer = client.post(live.url + path, json=message, headers=dict(headers))
    for connection in busy:
        connection.close()

    assert answer.status_code == 200
    assert (refusal(answer)["code"], refusal(answer)["retry_after"]) == ("overloaded", 1)


@faces
async def test_a_suspended_tenant_is_told_in_json_rpc_and_a_wrong_credential_by_its_http_status(
        serve: Any, face: str) -> None:
    house = House(await serve(security=security()))
    key = await house.admin_of(OTHER)
    await house.good("suspend_tenant", {"tenant": OTHER})
    verb, path, message, headers = call(face)

    suspended, wrong = [await house.served.call(verb, path, message, headers=headers, token=token)
                        for token in (key, "wrong")]

    assert refusal(suspended)["code"] == "unauthenticated"
    assert suspended.status == (401 if face == "bare" else 200)
    assert (wrong.status, wrong.headers["www-authenticate"]) == (401, 'Bearer error="invalid_token"')


# With the official clients, each through an outage of the database and a rate limit.


class Session:
    """A client of a gate in a process of its own, which answers line by line."""

    def __init__(self, command: list[str], **more: Any) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
                                        **more)

    async def say(self, *asked: Any) -> dict[str, Any]:
        """Ask for a tool call, or say "connect"; return the answer."""
        return await asyncio.to_thread(self._say, asked)

    async def hear(self) -> dict[str, Any]:
        """Return the next line: a call that is told of its progress has several."""
        return await asyncio.to_thread(self._hear)

    def _say(self, asked: tuple[Any, ...]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked[0] if len(asked) == 1 else asked) + "\n")
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answered: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answered


CLIENTS = ["python 1", "python 2 legacy", "python 2 auto", "typescript v1 legacy", "typescript v2 legacy",
           "typescript v2 auto"]
LOOK = ("asyncgate.list_tasks", {"agent_id": "ada"})
Open = Callable[[str, str], Session]


@pytest.fixture
def open_session(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Return what starts a client."""
    sessions: list[Session] = []

    def opened(client: str, url: str) -> Session:
        language, generation, *mode = client.split()
        if language == "typescript":
            node = request.getfixturevalue("node")
            script = node.folder / "asyncgate_session.mjs"      # beside the packages that it imports
            script.write_bytes((SUPPORT / "mcp_session.js").read_bytes())
            sessions.append(Session(["node", script.name, generation, *mode, url, TOKEN], cwd=node.folder,
                                    env=node.environment))
        else:
            first = [str(request.getfixturevalue("first_mcp_sdk"))] if generation == "1" else []
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(first)}
            sessions.append(Session([sys.executable, str(SUPPORT / "mcp_session.py"), url, TOKEN, *(mode or ["-"])],
                                    env=environment))
        return sessions[-1]

    yield opened
    for session in sessions:
        session.process.kill()
        session.process.communicate(timeout=PATIENCE_SECONDS)


def code(result: dict[str, Any]) -> str:
    """Return the code of a refusal; insist on what a client needs to go on: its result, and when to try again."""
    assert result["isError"], result
    assert result["_meta"]["asyncgate/error"]["retry_after"] >= 1
    return str(result["_meta"]["asyncgate/error"]["code"])


def code_of_failure(told: dict[str, Any]) -> str:
    """Return the code of a refused handshake."""
    assert told["data"]["retry_after"] >= 1, told
    return str(told["data"]["code"])


@pytest.mark.parametrize("client", CLIENTS)
async def test_an_official_client_keeps_its_session_through_an_outage_and_a_rate_limit(
        start: Any, fresh: Any, open_session: Open, client: str) -> None:
    database = await fresh("postgres")
    async with Proxy(urlsplit(database).port or 5432) as proxy:
        live = await asyncio.to_thread(
            start, "security.rate_limiting.enabled=true", "security.rate_limiting.default_tier=free",
            "rate_limits.free_tier.api_calls_per_hour=20", "database.timeout_seconds=1", database=proxy.url(database))
        session = await asyncio.to_thread(open_session, client, f"{live.url}/mcp")

        proxy.close_door()
        down = await session.say("connect")     # the first call on this gate
        await proxy.restore()
        while (up := await session.say("connect")) != {"connected": True}:
            assert code_of_failure(up) == "database_unavailable"
        good = await session.say(*LOOK)
        while not (over := await session.say(*LOOK)).get("isError"):
            pass
        still = await session.say(*LOOK)

    assert code_of_failure(down) == "database_unavailable"
    assert good["structuredContent"]["tasks"] == []
    assert [code(over), code(still)] == ["rate_limit_exceeded"] * 2
