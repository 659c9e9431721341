"""Serve a gate with the tools that the tasks scenarios of the MCP conformance suite call; a program, for tests only.

Each tool that takes time is a task of the real engine, which a worker in this process leases and ends.  Handles, their
states, their results and their end are the gate's own; what no task of a gate does is added here: to ask its caller
something, which a worker does with its progress, and to break the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine
from typing import Any

import mcp_types as types
import msgspec
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from asyncgate.commands.main import main
from asyncgate.parts.faces.mcp import facade as mcp_facade
from asyncgate.parts.faces.mcp.tasks import (
    EXTENSION,
    Context,
    TaskParams,
    Tasks,
    UpdateParams,
    make_handle,
    wants_handle,
)
from asyncgate.parts.faces.mcp.tools import make_result
from asyncgate.parts.model.content import JsonObject
from asyncgate.parts.model.errors import LeaseInvalid
from asyncgate.parts.operations import OPERATIONS

STRING, NUMBER = {"type": "string"}, {"type": "number"}
TOOLS: dict[str, JsonObject] = {
    "greet": {"name": STRING}, "slow_compute": {"seconds": NUMBER, "label": STRING}, "failing_job": {},
    "protocol_error_job": {}, "confirm_delete": {"filename": STRING}, "multi_input": {}, "test_tool_with_task": {}}
NEEDS_HANDLES = {"failing_job", "test_tool_with_task"}
WORKER = "fixtures"
_json = msgspec.json.Decoder(JsonObject).decode


def question(name: str) -> JsonObject:
    """Ask the caller for one text."""
    wants = {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
    return {"method": "elicitation/create", "params": {"mode": "form", "message": name, "requestedSchema": wants}}


QUESTIONS = {"confirm_delete": {"confirm": question("confirm")},
             "multi_input": {name: question(name) for name in ("first", "second")}}


class AskingTasks(Tasks):
    """The gate's tasks, of which some ask something before they end, and one breaks."""

    def __init__(self, perform: Any) -> None:
        super().__init__(perform, can_ask=False)
        self.asked: dict[str, JsonObject] = {}
        self.answered = asyncio.Condition()

    async def get(self, ctx: Context, params: TaskParams) -> JsonObject:
        """Show what a task still asks, and a request that broke as broken."""
        shown = await super().get(ctx, params)
        if shown["status"] == "working" and (open_ := self.asked.get(params.task_id)):
            return {**shown, "status": "input_required", "inputRequests": open_}
        if "protocol_error" in str(shown.get("result")):
            return {**{name: value for name, value in shown.items() if name != "result"}, "status": "failed",
                    "error": {"code": types.INTERNAL_ERROR, "message": "the request broke"}}
        return shown

    async def update(self, ctx: Context, params: UpdateParams) -> JsonObject:
        """Take answers to what a task has asked."""
        acknowledged = await super().update(ctx, params)
        async with self.answered:
            for name in params.input_responses or {}:
                self.asked.get(params.task_id, {}).pop(name, None)
            self.answered.notify_all()
        return acknowledged

    async def ask(self, task_id: str, questions: JsonObject) -> None:
        """Ask, and wait until all is answered."""
        async with self.answered:
            self.asked[task_id] = dict(questions)
            await self.answered.wait_for(lambda: not self.asked[task_id])


class Fixtures(mcp_facade.Facade):
    """The gate's façade with the fixture tools beside its own, and a worker for them."""

    def _server(self) -> Server[Any]:
        server = super()._server()
        self.tasks = AskingTasks(self._do)
        self.tasks.join(server)
        return server

    async def open(self) -> mcp_facade.Facade:
        """Start the worker too."""
        self.jobs: set[asyncio.Task[None]] = set()
        self._begin(self._work())
        return await super().open()

    async def close(self) -> None:
        """End the worker too."""
        for job in self.jobs:
            job.cancel()
        await super().close()

    async def _list(self, ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        own = [types.Tool(name=name, input_schema={"type": "object", "properties": fields})
               for name, fields in TOOLS.items()]
        return types.ListToolsResult(tools=[*(await super()._list(ctx, params)).tools, *own])

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
                return {"resultType": "input_required", "inputRequests": {"user_name": question("name")}}
            (answer,) = params.input_responses.values()
            fields = msgspec.to_builtins(getattr(answer, "content", {}))
        return await self._run_task(ctx, params.name, fields)

    async def _run_task(self, ctx: Context, name: str, fields: JsonObject) -> JsonObject:
        waits = 0.0 if wants_handle(ctx) else 20.0
        reply = await self._do(ctx, "run_task", {"type": name, "payload": fields, "wait_seconds": waits})
        return make_handle(reply) if wants_handle(ctx) else mcp_facade.COMPLETE | make_result(reply)

    # The worker.

    async def _say(self, operation: str, **fields: Any) -> JsonObject:
        op = OPERATIONS[operation]
        asks = op.reader.body(msgspec.json.encode({"worker_id": WORKER, **fields}))[0]
        caller = await self.gate.guard.known([])
        return _json(msgspec.json.encode(await self.gate.engine.perform(op, caller, asks)))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        job = asyncio.create_task(work)
        self.jobs.add(job)
        job.add_done_callback(self.jobs.discard)

    async def _work(self) -> None:
        while True:
            leased = await self._say("lease_next", wait_seconds=5, max_tasks=10, accept_types=list(TOOLS))
            for offer in leased["tasks"]:
                self._begin(self._do_one(offer))

    async def _do_one(self, offer: JsonObject) -> None:
        with contextlib.suppress(LeaseInvalid):     # somebody has canceled it
            await self._end(offer)

    async def _end(self, offer: JsonObject) -> None:
        held = {"task_id": offer["task_id"], "lease_id": offer["lease_id"]}
        kind, payload = offer["type"], offer["payload"]
        await self._say("start_task", **held)
        if kind in QUESTIONS:
            await self.tasks.ask(offer["task_id"], QUESTIONS[kind])
        if kind in ("failing_job", "protocol_error_job"):
            await self._say("fail", **held, error={"code": "protocol_error" if kind[0] == "p" else "it_failed"})
        else:
            await asyncio.sleep(payload.get("seconds", 0))
            await self._say("complete", **held, result=payload)


if __name__ == "__main__":
    mcp_facade.Facade = Fixtures  # type: ignore[misc]
    sys.exit(main())
