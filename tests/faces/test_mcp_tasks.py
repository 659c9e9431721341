"""MCP tasks: a handle from run_task that any connection, any process and any later day can ask by."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import mcp_types as types
import pytest
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.shared.exceptions import MCPError

from asyncgate.backends import open_backend
from asyncgate.clients.http import Http
from asyncgate.conformance.harness import settings_for_tests
from asyncgate.parts.app import Gate
from asyncgate.parts.operations import OPERATIONS, table_of
from tests.conftest import Served

pytestmark = pytest.mark.anyio

TOKEN = "a-token-for-tests"
EXTENSION = "io.modelcontextprotocol/tasks"
ASKING = {"request_input", "answer_input", "list_inputs"}       # of the extra


class Handle(types.Result):
    """What run_task answers to a client that takes handles."""

    result_type: Literal["task"] = "task"
    task_id: str
    status: str
    status_message: str
    created_at: str
    last_updated_at: str
    ttl_ms: int | None
    poll_interval_ms: int | None = None


class State(types.Result):
    """What tasks/get answers."""

    task_id: str
    status: str
    status_message: str
    poll_interval_ms: int | None = None
    result: dict[str, Any] | None = None
    input_requests: dict[str, Any] | None = None


class Params(types.RequestParams):
    """What is said of a handle."""

    task_id: str


class Get(types.Request[Params, Literal["tasks/get"]]):
    """Ask for the state of a task."""

    method: Literal["tasks/get"] = "tasks/get"
    name_param: ClassVar[str | None] = "taskId"
    params: Params


class Answers(Params):
    """What is answered to a task's questions."""

    input_responses: dict[str, Any] | None = None


class Update(types.Request[Answers, Literal["tasks/update"]]):
    """Answer a task's questions."""

    method: Literal["tasks/update"] = "tasks/update"
    name_param: ClassVar[str | None] = "taskId"
    params: Answers


class Cancel(types.Request[Params, Literal["tasks/cancel"]]):
    """Cancel a task."""

    method: Literal["tasks/cancel"] = "tasks/cancel"
    name_param: ClassVar[str | None] = "taskId"
    params: Params


async def unresolved(handle: Handle, context: ClaimContext) -> types.CallToolResult:
    raise AssertionError("the test wanted the handle itself")


class TakesHandles(ClientExtension):
    """The client's side of the extension, as far as these tests need it."""

    identifier = EXTENSION

    def claims(self) -> Sequence[ResultClaim[Any]]:
        """Take the results that are handles."""
        return [ResultClaim(result_type="task", model=Handle, resolve=unresolved)]


async def run_task(client: Any, **fields: Any) -> Handle:
    handle = await client.session.call_tool("asyncgate.run_task", {"type": "demo", "payload": None, **fields},
                                            allow_claimed=True)
    assert isinstance(handle, Handle), handle
    return handle


async def state(client: Any, task_id: str) -> State:
    task = await client.session.send_request(Get(params=Params(task_id=task_id)), State)
    assert isinstance(task, State)
    return task


def taking() -> dict[str, Any]:
    return {"extensions": [TakesHandles()]}


def lease(rest: Http) -> dict[str, Any]:
    """Lease the one task there is, as a worker that knows nothing of MCP."""
    (offer,) = rest.call("lease_next", worker_id="w1")["tasks"]
    return {"task_id": offer["task_id"], "lease_id": offer["lease_id"], "worker_id": "w1"}


async def test_a_handle_outlives_the_server_and_the_connection(start: Any, connect: Any, tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/gate.db"
    first = start(database=database)
    async with connect(first, "auto", **taking()) as client:
        handle = await run_task(client, payload={"n": 1}, agent_id="ada")
        assert (handle.status, handle.ttl_ms) == ("working", None)

        first.kill()

    second = start(database=database)
    with Http(second.url, TOKEN) as rest:
        held = lease(rest)
        assert held["task_id"] == handle.task_id
        async with connect(second, "auto", **taking()) as client:
            assert (await state(client, handle.task_id)).status == "working"
        rest.call("complete", **held, result={"answer": 42}, artifacts=[{"uri": "file:///x"}])

    async with connect(second, "auto", **taking()) as client:
        task = await state(client, handle.task_id)
    assert task.status == "completed"
    assert task.result
    assert task.result["isError"] is False
    assert task.result["structuredContent"]["result"]["result"] == {"answer": 42}
    assert json.loads(task.result["content"][0]["text"])["status"] == "succeeded"


async def test_a_client_that_takes_no_handles_gets_the_record(live_for_all: Any, connect: Any) -> None:
    for mode in ("auto", "legacy"):
        async with connect(live_for_all, mode) as client:
            result = await client.call_tool("asyncgate.run_task", {"type": "record", "payload": None,
                                                                   "wait_seconds": 0})
            assert result.structured_content["status"] == "queued"


async def test_create_task_keeps_its_answer_for_everybody(live_for_all: Any, connect: Any) -> None:
    async with connect(live_for_all, "auto", **taking()) as client:
        result = await client.call_tool("asyncgate.create_task", {"type": "record", "payload": None})

    assert set(result.structured_content) == {"task_id", "status"}


async def test_a_failed_task_is_completed_with_an_error_and_shows_its_progress_before(live: Any, connect: Any) -> None:
    with Http(live.url, TOKEN) as rest:
        async with connect(live, "auto", **taking()) as client:
            handle = await run_task(client)
            waiting = await state(client, handle.task_id)
            held = lease(rest)
            rest.call("report_progress", **held, progress={"page": 2})
            working = await state(client, handle.task_id)
            rest.call("fail", **held, error={"message": "no"})
            failed = await state(client, handle.task_id)

    assert (waiting.status, waiting.status_message, waiting.result) == ("working", "queued", None)
    assert (working.status, working.status_message) == ("working", 'running: {"page":2}')
    assert failed.status == "completed"
    assert failed.result
    assert failed.result["isError"] is True
    assert "structuredContent" not in failed.result
    assert json.loads(failed.result["content"][0]["text"])["result"]["error"] == {"message": "no"}


async def test_a_handle_cancels_its_task_once_and_an_update_changes_nothing(live: Any, connect: Any) -> None:
    async with connect(live, "auto", **taking()) as client:
        handle = await run_task(client)
        await client.session.send_request(Update(params=Answers(task_id=handle.task_id)), types.EmptyResult)
        assert (await state(client, handle.task_id)).status == "working"
        for _ in range(2):
            await client.session.send_request(Cancel(params=Params(task_id=handle.task_id)), types.EmptyResult)
        assert (await state(client, handle.task_id)).status == "cancelled"

    with Http(live.url, TOKEN) as rest:
        assert rest.call("get_task", task_id=handle.task_id)["status"] == "canceled"


@pytest.mark.parametrize("request_type", [Get, Update, Cancel])
async def test_an_unknown_handle_and_a_client_that_takes_none_are_refused(
        live_for_all: Any, connect: Any, request_type: Any) -> None:
    request = request_type(params=Answers(task_id="nobody"))
    async with connect(live_for_all, "auto", **taking()) as client:
        with pytest.raises(MCPError, match="no task nobody") as unknown:
            await client.session.send_request(request, types.EmptyResult)
    async with connect(live_for_all, "auto") as client:
        with pytest.raises(MCPError) as undeclared:
            await client.session.send_request(request, types.EmptyResult)

    assert (unknown.value.error.code, undeclared.value.error.code) == (-32602, -32021)
    assert undeclared.value.error.data == {"requiredCapabilities": {"extensions": {EXTENSION: {}}}}


def message(method: str, task_id: str, name: str, **more: Any) -> dict[str, Any]:
    """Return the body and headers of a request about a handle."""
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": {"extensions": {EXTENSION: {}}}}
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"taskId": task_id, "_meta": meta, **more}}
    return {"body": body, "headers": [
        ("content-type", "application/json"), ("accept", "application/json, text/event-stream"),
        ("mcp-protocol-version", "2026-07-28"), ("mcp-method", method), ("mcp-name", name)]}


async def test_the_name_in_the_header_is_the_handle(served: Any) -> None:
    made = await served.post("/v1/tasks", {"type": "demo", "payload": None})

    answer = await served.call("POST", "/mcp", **message("tasks/get", made["task_id"], "another"))

    assert (answer.status, answer.json()["error"]["code"]) == (400, -32020)


@pytest.mark.parametrize("method", ["tasks/list", "tasks/result"])
async def test_the_methods_of_the_older_experiment_do_not_exist(served: Any, method: str) -> None:
    answer = await served.call("POST", "/mcp", **message(method, "x", "x"))

    assert answer.json()["error"]["code"] == -32601


async def test_a_task_of_somebody_else_is_unknown(served: Any) -> None:
    from asyncgate import SCOPES, Caller
    from asyncgate.parts.model.wire import Principal

    class Bob:
        """A way in for a credential of another agent."""

        async def caller(self, token: str | None, address: str | None = None) -> Caller | None:
            """Return whom the token names."""
            bob = Principal("agent", "bob")
            return Caller(served.tenant_id, bob, "agent", SCOPES) if token == "bob" else None

    made = await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada"})
    served.gate.identity.ways.append(Bob())

    for method in ("tasks/get", "tasks/update", "tasks/cancel"):
        theirs, nobodys = [
            (await served.call("POST", "/mcp", token="bob", **message(method, id, id))).json()["error"]
            for id in (made["task_id"], "nobody")]
        assert json.loads(json.dumps(theirs).replace(made["task_id"], "nobody")) == nobodys


async def test_a_task_that_asks_its_owner_is_answered_by_its_handle(start: Any, connect: Any, tmp_path: Path) -> None:
    gate = start(database=f"sqlite:///{tmp_path}/gate.db")
    schema = {"type": "object", "properties": {"window": {"type": "string"}}}
    async with connect(gate, "auto", **taking()) as client:
        handle = await run_task(client, agent_id="ada", wait_seconds=0)
        with Http(gate.url, TOKEN) as rest:
            held = lease(rest)
            rest.call("request_input", **held, key="may", message="May I?", keep_lease=True)
            rest.call("request_input", **held, key="when", message="When?", schema=schema)

            asked = await state(client, handle.task_id)
            await client.session.send_request(Update(params=Answers(task_id=handle.task_id, input_responses={
                "when": {"action": "accept", "content": {"window": "tonight"}}})), types.EmptyResult)
            partly = await state(client, handle.task_id)
            await client.session.send_request(Update(params=Answers(task_id=handle.task_id, input_responses={
                "when": {"action": "decline"}, "may": {"action": "decline"}, "unknown": {"action": "accept"}})),
                types.EmptyResult)
            after = await state(client, handle.task_id)
            (offer,) = rest.call("lease_next", worker_id="w2")["tasks"]

    assert asked.status == partly.status == "input_required"
    assert asked.input_requests is not None
    assert partly.input_requests is not None
    assert asked.input_requests["when"] == {"method": "elicitation/create", "params": {
        "mode": "form", "message": "When?", "requestedSchema": schema}}
    assert [*partly.input_requests] == ["may"]
    assert (after.status, after.input_requests) == ("working", None)
    assert {key: told["action"] for key, told in offer["inputs"].items()} == {"may": "decline", "when": "accept"}


async def test_answers_are_refused_and_not_dropped_where_no_task_asks_anything(url: str) -> None:
    table = table_of(*(op for name, op in OPERATIONS.items() if name not in ASKING))
    gate = Gate(settings_for_tests(api_key=TOKEN), await open_backend(url), table)
    async with gate.app.router.lifespan_context(gate.app):
        served = Served(gate)
        task_id = (await served.post("/v1/tasks", {"type": "demo", "payload": None}))["task_id"]

        async def say(method: str, **more: Any) -> Any:
            return (await served.call("POST", "/mcp", **message(method, task_id, task_id, **more))).json()
        shown = await say("tasks/get")
        answered = await say("tasks/update", inputResponses={"when": {"action": "decline"}})
        empty = [await say("tasks/update"), await say("tasks/update", inputResponses={})]

    assert shown["result"]["status"] == "working"
    assert "inputRequests" not in shown["result"]
    assert answered["error"]["code"] == -32602
    assert answered["error"]["message"].startswith("nothing was answered: ")
    assert ["error" in told for told in empty] == [False, False]
