"""Resources that hosts read and watch, and the prompts that say where one stands."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from mcp.server.subscriptions import ListenHandler, ResourceUpdated
from mcp.shared.exceptions import MCPError

from asyncgate import SCOPES, Caller
from asyncgate.clients.http import AsyncHttp, Http
from asyncgate.parts.faces.mcp import context
from asyncgate.parts.faces.mcp.context import Library
from asyncgate.parts.model.wire import Principal
from asyncgate.parts.operations import OPERATIONS
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

TOKEN = "a-token-for-tests"
ADA = "/mcp?principal_kind=agent&principal_id=ada"
eras = pytest.mark.parametrize("mode", ["legacy", "auto"])


async def read(client: Any, uri: str) -> Any:
    result = await client.read_resource(uri)
    (content,) = result.contents
    assert (content.uri, content.mime_type) == (uri, "application/json")
    return json.loads(content.text)


async def prompt(client: Any, name: str, **arguments: str) -> str:
    (message,) = (await client.get_prompt(name, arguments)).messages
    assert message.role == "user"
    return str(message.content.text)


# Resources.


@eras
async def test_tasks_results_and_obligations_can_be_read(live: Any, connect: Any, mode: str) -> None:
    with Http(live.url, TOKEN) as rest:
        made = rest.call("create_task", type="demo", payload=None, agent_id="ada", result_delivery="inline")
        rest.call("create_task", type="other", payload=None, agent_id="bob")
        async with connect(live, mode, ADA) as client:
            (owed,) = (await read(client, "asyncgate://obligations"))["open_obligations"]
            (offer,) = rest.call("lease_next", worker_id="w1", accept_types=["demo"])["tasks"]
            rest.call("complete", task_id=offer["task_id"], lease_id=offer["lease_id"], worker_id="w1", result={"n": 7})
            task = await read(client, f"asyncgate://tasks/{made['task_id']}")
            (artifact,) = task["result"]["artifacts"]

            assert owed["task_id"] == made["task_id"]
            assert task == rest.call("get_task", task_id=made["task_id"])
            assert await read(client, artifact["uri"]) == {"n": 7}


@eras
async def test_what_can_be_read_is_listed(live_for_all: Any, connect: Any, mode: str) -> None:
    async with connect(live_for_all, mode) as client:
        resources = (await client.list_resources()).resources
        templates = (await client.list_resource_templates()).resource_templates

    assert [str(resource.uri) for resource in resources] == ["asyncgate://obligations"]
    assert [template.uri_template for template in templates] == [
        "asyncgate://tasks/{task_id}", "asyncgate://{instance}/tasks/{task_id}/result"]


@pytest.mark.parametrize("uri", ["asyncgate://tasks/nobody", "asyncgate://gate/tasks/nobody/result", "file:///etc/passwd",
                                 "asyncgate://tasks/", "asyncgate://other"])
async def test_what_is_not_there_is_an_error_that_names_it(live_for_all: Any, connect: Any, uri: str) -> None:
    for mode, code in (("auto", -32602), ("legacy", -32002)):
        async with connect(live_for_all, mode) as client:
            with pytest.raises(MCPError) as caught:
                await client.read_resource(uri)
        assert (caught.value.error.code, caught.value.error.data) == (code, {"uri": uri})


async def test_a_result_that_is_not_there_yet_is_not_there(live: Any, connect: Any) -> None:
    with Http(live.url, TOKEN) as rest:
        made = rest.call("create_task", type="demo", payload=None)
    async with connect(live, "auto") as client:
        with pytest.raises(MCPError, match="there is no resource"):
            await client.read_resource(f"asyncgate://gate/tasks/{made['task_id']}/result")


# Subscriptions.


async def test_a_subscriber_is_told_of_its_task_and_of_its_obligations_only(live: Any, connect: Any) -> None:
    async with AsyncHttp(live.url, TOKEN) as rest, connect(live, "auto", ADA) as client:
        made = await rest.call("create_task", type="demo", payload=None, agent_id="ada")
        uris = [f"asyncgate://tasks/{made['task_id']}", "asyncgate://obligations"]
        async with asyncio.timeout(PATIENCE_SECONDS), client.listen(resource_subscriptions=uris) as heard:
            await rest.call("create_task", type="other", payload=None, agent_id="bob")
            await rest.call("lease_next", worker_id="w1", accept_types=["demo"])
            first = await anext(heard)
            await rest.call("cancel_task", task_id=made["task_id"])
            others = {(await anext(heard)).uri for _ in range(2)}

    assert first == ResourceUpdated(uri=uris[0])
    assert others == set(uris)


async def test_nobody_subscribes_to_what_is_not_there(live_for_all: Any, connect: Any) -> None:
    async with connect(live_for_all, "auto") as client:
        with pytest.raises(MCPError, match="there is no resource"):
            async with client.listen(resource_subscriptions=["asyncgate://tasks/nobody"]):
                raise AssertionError("the subscription was accepted")


META = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}


def message(method: str, name: str = "", **params: Any) -> dict[str, Any]:
    """Return the body and headers of a request in the modern era."""
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": META}}
    return {"body": body, "headers": [
        ("content-type", "application/json"), ("accept", "application/json, text/event-stream"),
        ("mcp-protocol-version", "2026-07-28"), ("mcp-method", method), *([("mcp-name", name)] if name else [])]}


class Bob:
    """A way in for the credential of another agent."""

    def __init__(self, tenant_id: str) -> None:
        self.tenant_id = tenant_id

    async def caller(self, token: str | None, address: str | None = None) -> Caller | None:
        """Return whom the token names."""
        bob = Principal("agent", "bob")
        return Caller(self.tenant_id, bob, "agent", SCOPES) if token == "bob" else None


async def test_another_agents_task_can_neither_be_read_nor_watched(served: Any) -> None:
    resting = served.engine.extensions
    served.gate.identity.ways.append(Bob(served.tenant_id))
    made = await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada"})
    uri = f"asyncgate://tasks/{made['task_id']}"

    reading = await served.call("POST", "/mcp", token="bob", **message("resources/read", uri, uri=uri))
    watching = await served.call("POST", "/mcp", token="bob", **message(
        "subscriptions/listen", notifications={"resourceSubscriptions": [uri]}))

    for answer in (reading, watching):
        assert answer.json()["error"]["data"] == {"uri": uri}
    assert served.engine.extensions == resting


async def test_a_subscription_covers_so_many_resources_and_reads_each_once(
        served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    async def note(self: Library, ctx: Any, uri: str) -> bytes:
        read.append(uri)
        return await text(self, ctx, uri)
    text = Library._text
    monkeypatch.setattr(Library, "_text", note)
    many, none = [f"asyncgate://tasks/{at}" for at in range(101)], "asyncgate://tasks/none"

    too_many, again = [await served.call("POST", "/mcp", **message("subscriptions/listen", notifications={
        "resourceSubscriptions": uris})) for uris in (many, [none] * 1000)]

    assert "at most 100" in too_many.json()["error"]["message"]
    assert again.json()["error"]["data"] == {"uri": none}
    assert read == [none]


async def test_a_subscription_ends_when_its_key_is_revoked(served: Any) -> None:
    key = await served.post("/v1/keys", {"name": "ada's", "principal_id": "ada"})
    resting = len(served.engine.extensions)
    listening = asyncio.create_task(served.call("POST", "/mcp", token=key["api_key"], **message(
        "subscriptions/listen", notifications={"resourceSubscriptions": ["asyncgate://obligations"]})))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(served.engine.extensions) < resting + 2:  # noqa: ASYNC110  # there is nothing to be told by
            await asyncio.sleep(0)
        await served.post(f"/v1/keys/{key['key']['key_id']}/revoke")
        await asyncio.wait([listening])
    listening.exception()       # the answer is a stream, which `call` does not read

    assert len(served.engine.extensions) == resting


async def leave_a_subscription(served: Any, drained: bool = False) -> None:
    """Subscribe, and hang up, or have the gate end it."""
    gone, resting = asyncio.Event(), served.engine.extensions
    asked = message("subscriptions/listen", notifications={"resourceSubscriptions": ["asyncgate://obligations"]})
    headers = [*asked["headers"], ("authorization", f"Bearer {TOKEN}")]
    sent: list[Any] = []

    async def receive() -> Any:
        if not sent:
            sent.append("body")
            return {"type": "http.request", "body": json.dumps(asked["body"]).encode(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {"type": "http", "method": "POST", "path": "/mcp", "raw_path": b"/mcp",
             "query_string": b"principal_kind=agent&principal_id=ada",
             "scheme": "http", "root_path": "",
             "headers": [(b"host", b"localhost"), *((name.encode(), value.encode()) for name, value in headers)]}
    listening = asyncio.create_task(served.gate(scope, receive, send))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while served.engine.extensions == resting:  # noqa: ASYNC110  # there is nothing to be told by
            await asyncio.sleep(0)
        served.gate.drain() if drained else gone.set()
        await asyncio.wait([listening])     # canceled by the time-out, it would end all the same

    assert served.engine.extensions == resting


async def test_a_subscription_ends_with_its_client(served: Any) -> None:
    await leave_a_subscription(served)


async def test_a_gate_that_stops_ends_a_subscription_although_credentials_change_at_the_same_moment(
        served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Left(ListenHandler):
        async def __call__(self, ctx: Any, params: Any) -> Any:
            try:
                return await super().__call__(ctx, params)
            finally:
                for extension in served.engine.extensions:
                    if isinstance(extension, context.Credentials):
                        extension.changed.set()
    monkeypatch.setattr(context, "ListenHandler", Left)

    await leave_a_subscription(served, drained=True)


async def test_a_gate_that_stops_ends_its_subscriptions(live: Any, connect: Any) -> None:
    watched = ["asyncgate://obligations"]
    async with connect(live, "auto", ADA) as client, client.listen(resource_subscriptions=watched) as heard:
        live.process.terminate()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert [event async for event in heard] == []

    assert live.process.wait(PATIENCE_SECONDS) in (0, -15)


# Prompts.


@eras
async def test_resume_session_tells_what_is_owed_both_ways_and_what_is_next(
        live: Any, connect: Any, mode: str) -> None:
    with Http(live.url, TOKEN) as rest:
        tasks = {kind: rest.call("create_task", type=kind, payload=None, agent_id="ada")["task_id"]
                 for kind in ("queued", "run", "done")}
        rest.call("create_task", type="bobs", payload=None, agent_id="bob")
        for kind in ("run", "done"):
            (offer,) = rest.call("lease_next", worker_id="w1", accept_types=[kind])["tasks"]
        rest.call("complete", task_id=tasks["done"], lease_id=offer["lease_id"], worker_id="w1", result=1)

    async with connect(live, mode) as client:
        text = await prompt(client, "resume_session", agent_id="ada", worker_id="w1")
        nothing = await prompt(client, "resume_session", agent_id="nobody", worker_id="nobody")

    owe, owed = text.split("What is owed to you:")
    assert tasks["run"] in owe
    assert re.search(r"renew_lease every \d+ s", owe)
    assert [line.split()[3] for line in owed.strip().splitlines()] == list(tasks.values())
    assert "attach_artifacts" in owed.splitlines()[-1]
    assert "bobs" not in text
    assert nothing.count("- nothing") == 2


@pytest.mark.parametrize("path", ["/mcp", ADA, "/mcp?principal_kind=worker&principal_id=w1"])
@pytest.mark.parametrize("name", ["resume_session", "resume_work"])
async def test_resume_session_needs_no_argument_whomever_the_credential_names(
        served: Any, path: str, name: str) -> None:
    made = [await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": who})
            for who in ("ada", "bob")]
    await served.post("/v1/leases/claim", {"worker_id": "w1"})

    asked = message("prompts/get", name=name)
    asked["body"]["params"]["name"] = name

    answer = await served.call("POST", path, **asked)

    text = answer.json()["result"]["messages"][0]["content"]["text"]
    owe, owed = text.split("What is owed to you:")
    assert (made[0]["task_id"] in owed) == ("worker" not in path)
    assert (made[1]["task_id"] in owed) == (path == "/mcp")
    assert ("renew_lease" in owe) == ("worker" in path)


async def test_no_prompt_has_the_name_of_an_operation(served: Any) -> None:
    listed = (await served.call("POST", "/mcp", **message("prompts/list"))).json()["result"]["prompts"]

    assert not {prompt["name"] for prompt in listed} & OPERATIONS.keys()


async def test_delegate_names_the_calls_and_needs_a_goal(live_for_all: Any, connect: Any) -> None:
    async with connect(live_for_all, "auto") as client:
        text = await prompt(client, "delegate", goal="sum up {the} page", type="page.summarize")
        with pytest.raises(MCPError, match="needs a goal"):
            await client.get_prompt("delegate", {})

    assert "sum up {the} page" in text
    assert '"page.summarize"' in text
    assert "create_task" in text
    assert "list_open_obligations" in text


async def test_white_space_around_a_header_is_not_part_of_it(served: Any) -> None:
    asked = message("tools/list")
    asked["headers"] = [(name, f" {value}\t" if name == "mcp-method" else value) for name, value in asked["headers"]]

    assert "result" in (await served.call("POST", "/mcp", **asked)).json()
