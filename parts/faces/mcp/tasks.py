"""MCP tasks (extension io.modelcontextprotocol/tasks, SEP-2663): durable handles to tasks of the gate.

A client that declares the extension gets a handle as the answer of run_task, and reads the outcome with it: over any
connection, from any instance, after any restart.  The handle is the task's id: only callers who may read the task may
use it, and nobody else learns that the task exists.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, get_args

import mcp_types as types
import msgspec
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from asyncgate.parts.faces.mcp.tools import make_refusal_data, make_result
from asyncgate.parts.model import errors, stored, wire
from asyncgate.parts.model.content import JsonObject

Context = ServerRequestContext[Any]
Perform = Callable[[Context, str, dict[str, Any]], Awaitable[bytes]]

EXTENSION = "io.modelcontextprotocol/tasks"
POLL_MS = {"queued": 2000, "leased": 1000, "running": 1000}
# A failed task is "completed" with an error result; MCP's "failed" means a broken request.
MCP_STATUSES = {"queued": "working", "leased": "working", "running": "working", "succeeded": "completed",
                "failed": "completed", "canceled": "cancelled"}
IGNORED = (errors.AlreadyAnswered, errors.InputExpired)     # by SEP-2663, and keys that were never asked
NOTHING_ASKED = ("nothing was answered: the tasks of this gate ask nothing, because it lacks the extra asking; "
                 "tasks/get shows the state of this one")
MOST_PROGRESS = 500     # characters of progress in a status message
_record = msgspec.json.Decoder(JsonObject).decode


class TaskParams(types.RequestParams):
    """The parameters of all requests about a handle."""

    task_id: str


class UpdateParams(TaskParams):
    """Answers to a task's questions."""

    input_responses: JsonObject | None = None


FORM_FIELDS = ("string", "number", "integer", "boolean")       # what a form of MCP may have fields of
ANSWER = "answer"       # the only field of a form for a question whose answer is not an object of such fields


def wants_handle(ctx: Context) -> bool:
    """Whether a client accepts handles: it declares that in every request; older revisions have no handles."""
    can = ctx.session.client_capabilities
    return bool(ctx.protocol_version in MODERN_PROTOCOL_VERSIONS and can and can.extensions
                and EXTENSION in can.extensions)


def make_handle(reply: bytes) -> JsonObject:
    """Make the handle of a task from its record."""
    return {"resultType": "task", **show_state(_record(reply))}


def show_state(record: JsonObject) -> JsonObject:
    """Return the state of a task."""
    progress = "" if record["progress"] is None else f": {msgspec.json.encode(record['progress']).decode()}"
    return {"taskId": record["task_id"], "status": MCP_STATUSES[record["status"]], "createdAt": record["created_at"],
            "lastUpdatedAt": record["updated_at"], "ttlMs": None,
            "statusMessage": (record["held"] or record["status"]) + progress[:MOST_PROGRESS],
            **({"pollIntervalMs": POLL_MS[record["status"]]} if record["status"] in POLL_MS else {})}


def show_progress(reply: bytes) -> JsonObject:
    """Return the state of a task, with the result of the call that created it if it has ended."""
    record = _record(reply)
    if MCP_STATUSES[record["status"]] != "completed":
        return show_state(record)
    text = {"content": [{"type": "text", "text": reply.decode()}], "isError": True,
            "_meta": {"asyncgate/error": {"code": "task_failed", "retryable": False}}}
    return {**show_state(record), "result": {"resultType": "complete", **(
        make_result(reply, once=True) if record["status"] == "succeeded" else text)}}


def show_requests(reply: bytes, owner: JsonObject, problems: Mapping[str, str] = MappingProxyType({})) -> JsonObject:
    """Return what a task asks its owner, as a client asks it of its user; others answer elsewhere.

    `problems` says of keys why the last answer was refused.
    """
    return {(key := question["key"]): {"method": "elicitation/create", "params": {
        "mode": "form", "requestedSchema": make_form(question["schema"]),
        "message": question["message"] + (f"\n\nRefused: {problems[key]}" if key in problems else "")}}
        for question in _record(reply)["inputs"] if question["state"] == "open" and (
            question["to"]["kind"], question["to"]["id"]) == (owner["kind"], owner["id"])}


def is_form(schema: Any) -> bool:
    """Whether a client can show a form for a schema: MCP's are flat objects."""
    return isinstance(schema, dict) and schema.get("type") == "object" and not {"oneOf", "anyOf"} & schema.keys() and (
        all(map(is_field, schema.get("properties", {}).values())))


def is_field(schema: Any) -> bool:
    """Whether a form can have a field for a schema; a choice of several words is one, too."""
    if schema.get("type") == "array":
        return "enum" in schema.get("items", {}) or "anyOf" in schema.get("items", {})
    return schema.get("type") in FORM_FIELDS and "anyOf" not in schema


def make_form(schema: Any) -> JsonObject:
    """Return the schema of the form in which a user answers."""
    if is_form(schema):
        return dict(schema)
    field = {"type": "string"}
    if schema is not None:
        field = schema if is_field(schema) else {
            "type": "string", "description": f"JSON, as this schema wants it: {msgspec.json.encode(schema).decode()}"}
    return {"type": "object", "properties": {ANSWER: {"title": "Answer", **field}},
            **({} if schema is None else {"required": [ANSWER]})}


def read_form(schema: Any, content: Any) -> Any:
    """Return the answer that the content of a form means."""
    if is_form(schema) or not isinstance(content, dict) or content.keys() != {ANSWER}:
        return content
    answer = content[ANSWER]
    if schema is None or is_field(schema) or not isinstance(answer, str):
        return answer
    try:
        return msgspec.json.decode(answer)
    except (ValueError, RecursionError):        # so it is refused, with what should be there
        return answer


async def answer_all(perform: Callable[..., Awaitable[bytes]], responses: JsonObject) -> None:
    """Answer what a task asks; what it has never asked is ignored."""
    for question in _record(await perform("list_inputs"))["inputs"]:
        if (key := question["key"]) not in responses:
            continue
        response = responses[key]
        if not isinstance(response, dict) or response.get("action") not in get_args(wire.InputAction):
            raise MCPError(types.INVALID_PARAMS, f"inputResponses.{key} has no action: accept, decline or cancel")
        content = read_form(question["schema"], response.get("content"))
        await perform("answer_input", key=key, action=response["action"], content=content)


class Tasks:
    """The three methods of the extension."""

    def __init__(self, perform: Perform, can_ask: bool) -> None:
        self.perform, self.can_ask = perform, can_ask       # tasks ask nothing in a gate without that extra

    def join(self, server: Server[Any]) -> None:
        """Register the handlers with a server."""
        server.extensions[EXTENSION] = {}
        server.add_request_handler("tasks/get", TaskParams, self.get)
        server.add_request_handler("tasks/update", UpdateParams, self.update)
        server.add_request_handler("tasks/cancel", TaskParams, self.cancel)

    async def get(self, ctx: Context, params: TaskParams) -> JsonObject:
        """Return the state of a task, its result if it has one, and what it asks."""
        reply = await self._task(ctx, params)
        shown, record = show_progress(reply), _record(reply)
        if self.can_ask and record["status"] not in stored.TERMINAL:      # also one whose worker waits under its lease
            requests = show_requests(await self._done(ctx, "list_inputs", params), record["created_by"])
            shown |= {"status": "input_required", "inputRequests": requests} if requests else {}
        return shown

    async def update(self, ctx: Context, params: UpdateParams) -> JsonObject:
        """Answer what a task asks; what is answered already, or was never asked, is ignored."""
        await self._task(ctx, params)
        if params.input_responses and not self.can_ask:
            raise MCPError(types.INVALID_PARAMS, NOTHING_ASKED)
        if params.input_responses:
            await answer_all(lambda operation, **more: self._done(ctx, operation, params, ignored=IGNORED, **more),
                             params.input_responses)
        return {}

    async def cancel(self, ctx: Context, params: TaskParams) -> JsonObject:
        """Cancel a task; an ended task stays unchanged."""
        await self._task(ctx, params)
        await self._done(ctx, "cancel_task", params)
        return {}

    async def _task(self, ctx: Context, params: TaskParams) -> bytes:
        if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            raise MCPError(types.METHOD_NOT_FOUND, "this protocol revision has no such method")
        named = ctx.request.headers.get("mcp-name") if ctx.request else None
        if named is not None and named != params.task_id:
            raise MCPError(types.HEADER_MISMATCH, "send the same id in Mcp-Name and params.taskId")
        if not wants_handle(ctx):
            raise MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, f"declare the extension {EXTENSION}",
                           {"requiredCapabilities": {"extensions": {EXTENSION: {}}}})
        return await self._done(ctx, "get_task", params)

    async def _done(self, ctx: Context, operation: str, params: TaskParams,
                    ignored: tuple[type[errors.GateError], ...] = (), **more: Any) -> bytes:
        try:
            return await self.perform(ctx, operation, {"task_id": params.task_id, **more})
        except ignored:
            return b""
        except errors.GateError as refusal:
            code = types.INVALID_PARAMS if refusal.status < 500 else types.INTERNAL_ERROR
            # Callers must not learn whether a foreign task exists; who answers may read the task.
            if refusal.status == 403 and operation != "answer_input":
                refusal = errors.no_task(params.task_id)
            raise MCPError(code, str(refusal), make_refusal_data(refusal)) from None
