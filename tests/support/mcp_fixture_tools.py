"""Serve a gate with the tools that scenarios of the MCP conformance suite call, or work for it; for tests only.

Each tool that takes time is a task of the real engine, done by a worker in a process of its own, which asks what it
asks by the gate: handles, questions, answers, results and ends are the gate's own.  What no task of a gate does is
added here: to break the request.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import Any

import mcp_types as types
import msgspec
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from asyncgate import Caller
from asyncgate.clients import Fail, Job, Question, Worker
from asyncgate.commands.main import main
from asyncgate.parts.faces.mcp import facade as mcp_facade
from asyncgate.parts.faces.mcp.tasks import EXTENSION, Context, TaskParams, Tasks, make_handle, wants_handle
from asyncgate.parts.faces.mcp.tools import make_result
from asyncgate.parts.model import connection
from asyncgate.parts.model.content import JsonObject

STRING, NUMBER = {"type": "string"}, {"type": "number"}
TOOLS: dict[str, JsonObject] = {
    "greet": {"name": STRING}, "slow_compute": {"seconds": NUMBER, "label": STRING}, "failing_job": {},
    "protocol_error_job": {}, "confirm_delete": {"filename": STRING}, "multi_input": {}, "test_tool_with_task": {}}
NEEDS_HANDLES = {"failing_job", "test_tool_with_task"}
# Tools whose caller is asked in line what their task asks; each answers to one scenario or several.
ASKS = "test_input_required_result_"
IN_LINE = {f"{ASKS}{name}" for name in ("elicitation", "request_state", "multi_round", "tampered_state")}


def form(name: str, type: str = "string") -> JsonObject:
    """Return the schema of an answer with one member."""
    return {"type": "object", "properties": {name: {"type": type}}, "required": [name]}


# What the task of a tool asks: in rounds, and in each round the schemas of the answers by key.
ROUNDS: dict[str, list[dict[str, JsonObject]]] = {
    "confirm_delete": [{"confirm": form("confirm", "boolean")}],
    "multi_input": [{"first": form("name"), "second": form("name")}],
    f"{ASKS}elicitation": [{"user_name": form("name")}],
    f"{ASKS}request_state": [{"confirm": form("ok", "boolean")}],
    f"{ASKS}tampered_state": [{"confirm": form("ok", "boolean")}],
    f"{ASKS}multi_round": [{"step1": form("name")}, {"step2": form("color")}]}


# The worker.


def work(url: str, token: str) -> None:
    """Do the tasks of the tools until the process is ended."""
    worker = Worker(url, "fixtures", token=token, state=None, concurrency=10, declare=False)

    @worker.task(*TOOLS, *IN_LINE)
    async def do(payload: Any, job: Job) -> Any:
        for number, round in enumerate(ROUNDS.get(job.type, ()), 1):
            await job.ask_all(*(Question(key=key, message=f"{key} ({number})", schema=schema)
                                for key, schema in round.items()))
        if job.type in ("failing_job", "protocol_error_job"):
            raise Fail(code=job.type)
        await asyncio.sleep(payload.get("seconds", 0))
        return payload
    worker.run()


# The gate.


class BreakingTasks(Tasks):
    """The gate's tasks, of which one breaks the request."""

    async def get(self, ctx: Context, params: TaskParams) -> JsonObject:
        """Show a request that broke as broken."""
        shown = await super().get(ctx, params)
        if "protocol_error_job" in str(shown.get("result")):
            return {**{name: value for name, value in shown.items() if name != "result"}, "status": "failed",
                    "error": {"code": types.INTERNAL_ERROR, "message": "the request broke"}}
        return shown


class Fixtures(mcp_facade.Facade):
    """The gate's façade with the fixture tools beside its own."""

    def _server(self) -> Server[Any]:
        server = super()._server()
        BreakingTasks(partial(self._do, brief=True), self.can_ask).join(server)
        return server

    async def _list(self, ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        own = [types.Tool(name=name, input_schema={"type": "object", "properties": fields})
               for name, fields in {**TOOLS, **{name: {} for name in IN_LINE}}.items()]
        return types.ListToolsResult(tools=[*(await super()._list(ctx, params)).tools, *own])

    async def _read_type(self, scope: connection.Scope, message: mcp_facade.JsonRpcMessage, caller: Caller) -> None:
        """Let a call of a tool that asks in line be a call of run_task that waits, as that of a declared type."""
        if message.name in IN_LINE:
            arguments = msgspec.json.encode({"type": message.name, "payload": {}, "wait_seconds": 20})
            message.means, message.params = mcp_facade.TYPED_MEANS, {
                **message.params, "arguments": msgspec.Raw(arguments)}

    async def _call(self, ctx: Context, params: types.CallToolRequestParams) -> JsonObject:
        fields = params.arguments or {}
        if params.name not in TOOLS:
            return await super()._call(ctx, params)
        if params.name == "greet":
            return mcp_facade.COMPLETE | {"content": [{"type": "text", "text": f"Hello, {fields['name']}!"}]}
        if params.name in NEEDS_HANDLES and not wants_handle(ctx):
            raise MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, f"declare the extension {EXTENSION}",
                           {"requiredCapabilities": {"extensions": {EXTENSION: {}}}})
        if params.name == "test_tool_with_task":
            if not params.input_responses:
                return {"resultType": "input_required", "inputRequests": {"user_name": {
                    "method": "elicitation/create",
                    "params": {"mode": "form", "message": "name", "requestedSchema": form("name")}}}}
            (answer,) = params.input_responses.values()
            fields = msgspec.to_builtins(getattr(answer, "content", {}))
        waits = 0.0 if wants_handle(ctx) else 20.0
        reply = await self._do(ctx, "run_task", {"type": params.name, "payload": fields, "wait_seconds": waits})
        return make_handle(reply) if wants_handle(ctx) else mcp_facade.COMPLETE | make_result(reply)


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(*sys.argv[2:])
    else:
        mcp_facade.Facade = Fixtures  # type: ignore[misc]
        sys.exit(main())
