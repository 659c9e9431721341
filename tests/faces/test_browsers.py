"""Pages of other sites that the operator allows: CORS, and a ticket for the stream of one task."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncgate.parts.faces import tickets
from asyncgate.parts.model.caller import Caller
from tests.support.identity_tools import House, security

pytestmark = pytest.mark.anyio

APP = "https://app.example"
ORIGIN = ("origin", APP)
PREFLIGHT = [ORIGIN, ("access-control-request-method", "POST"), ("access-control-request-headers", "authorization")]


@pytest.mark.parametrize("path", ["/v1/tasks", "/mcp", "/v1/receipts/stream", "/v1/health"])
async def test_a_page_of_an_allowed_origin_may_call(serve: Any, path: str) -> None:
    served = await serve(allowed_origins=(APP,))

    asked = await served.call("OPTIONS", path, headers=PREFLIGHT, token=None)
    answer = await served.call("GET", "/v1/tasks", headers=[ORIGIN, ("sec-fetch-site", "cross-site")])
    refusal = await served.call("GET", "/v1/tasks", headers=[ORIGIN], token=None)

    assert asked.status == 204
    assert {"POST", "GET"} <= {name.strip() for name in asked.headers["access-control-allow-methods"].split(",")}
    assert "authorization" in asked.headers["access-control-allow-headers"]
    for reply, status in ((asked, 204), (answer, 200), (refusal, 401)):
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, APP)
        assert reply.headers["vary"] == "origin"
        assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize("origin", ["https://evil.example", "https://app.example.evil.example", "null"])
async def test_a_page_of_another_origin_is_told_nothing(serve: Any, origin: str) -> None:
    served = await serve(allowed_origins=(APP,))

    for method in ("OPTIONS", "GET"):
        answer = await served.call(method, "/v1/tasks", headers=[("origin", origin), *PREFLIGHT[1:]])
        assert answer.status == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_without_a_page_options_is_no_method(served: Any) -> None:
    assert (await served.call("OPTIONS", "/v1/tasks")).status == 405


async def follow(house: House, path: str, until: str) -> str:
    """Follow a stream without a credential, as an EventSource does, until a text has come."""
    come, got = asyncio.Event(), list[bytes]()

    async def receive() -> Any:
        await come.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        got.append(message.get("body", str(message.get("status")).encode()))
        if until.encode() in b"".join(got):
            come.set()
    target, _, query = path.partition("?")
    scope = {"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "path": target,
             "raw_path": target.encode(), "query_string": query.encode(), "headers": [(b"host", b"localhost")],
             "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "root_path": ""}
    await house.served.gate(scope, receive, send)
    return b"".join(got).decode()


async def ticket_of(house: House, token: str, task_id: str) -> Any:
    """Ask for a ticket."""
    return await house.served.post("/v1/receipts/stream/ticket", {"task_id": task_id}, token=token)


async def test_a_ticket_opens_the_stream_of_its_task_and_no_other(serve: Any) -> None:
    house = House(await serve(security=security()))
    ada = await house.key("agent", "ada")
    mine, other = [(await house.good("create_task", {"type": "x", "payload": 1}, token=ada))["task_id"]
                   for _ in range(2)]
    ticket = await ticket_of(house, ada, mine)
    await house.good("cancel_task", {"task_id": other}, token=ada)
    await house.good("cancel_task", {"task_id": mine}, token=ada)

    told = await follow(house, f"{ticket['path']}&task_id={other}", "task.result_ready")

    assert "task.canceled" in told
    assert mine in told
    assert other not in told


async def test_a_ticket_is_for_those_who_may_read_the_task(serve: Any) -> None:
    house = House(await serve(security=security()))
    ada, bob = await house.key("agent", "ada"), await house.key("agent", "bob")
    task = (await house.good("create_task", {"type": "x", "payload": 1}, token=ada))["task_id"]

    answer = await house.served.call("POST", "/v1/receipts/stream/ticket", {"task_id": task}, token=bob)

    assert (answer.status, answer.json()["error"]) == (403, "forbidden")


@pytest.mark.parametrize("what", ["forged", "changed", "expired", "revoked", "elsewhere"])
async def test_a_ticket_that_is_not_good_opens_nothing(
        serve: Any, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    house = House(await serve(security=security()))
    ada = await house.key("agent", "ada")
    task = (await house.good("create_task", {"type": "x", "payload": 1}, token=ada))["task_id"]
    if what == "expired":
        monkeypatch.setattr(tickets, "TICKET_SECONDS", -1)
    text = (await ticket_of(house, ada, task))["ticket"]
    if what == "revoked":
        await house.good("revoke_key", {"key_id": house.ids[ada]})
    text = {"forged": "x" * 80, "changed": text[:50] + ("A" if text[50] != "A" else "B") + text[51:]}.get(what, text)
    path = "/v1/tasks" if what == "elsewhere" else "/v1/receipts/stream"

    answer = await house.served.call("GET", f"{path}?ticket={text}", token=None)

    assert (answer.status, answer.json()["error"]) == (401, "unauthenticated")


def test_a_ticket_holds_all_that_a_callers_rights_depend_on() -> None:
    held = set(tickets.SealedCaller.__struct_fields__)
    # By claims, creations and waiting calls over MCP, none of which is made with a ticket.
    asked_elsewhere = {"capabilities", "task_types", "trace", "console", "no_new_tasks", "note_wait"}

    assert set(Caller.__struct_fields__) - held == asked_elsewhere
