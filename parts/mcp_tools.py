"""The operations as MCP tools: names, texts that a model can act on, and JSON Schemas; made from the table.

Nothing here needs the SDK, so whoever only wants to know what the tools are pays nothing for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from asyncgate.parts.content import any_json
from asyncgate.parts.errors import GateError
from asyncgate.parts.wire import ANY_JSON, Ask

Json = dict[str, Any]
encode = msgspec.json.encode
PREFIX = "asyncgate"
DOTTED, UNDERSCORED = ".", "_"
# JSON-RPC wants integers; ours lie in the range that MCP leaves to servers.
CODES = {400: -32602, 401: -32001, 403: -32003, 404: -32004, 405: -32601, 408: -32008, 409: -32009, 413: -32602,
         415: -32602, 421: -32003, 429: -32010, 503: -32013}
PARSE_ERROR, UNKNOWN_METHOD, BROKEN = -32700, -32601, -32603

# What may follow each operation; the rest of a tool's text is the Engine's docstring.
NEXT = {
    "create_tasks": "Look at each entry of results: it has a task_id or an error. Then get_task for each.",
    "run_task": "If the status is queued, leased or running, call get_task with wait_seconds; do not create it again.",
    "get_task": "When result is there and obligation_open is true, call attach_artifacts to say where the result lies.",
    "get_task_history": "Go on with next_cursor as cursor while it is not null.",
    "list_tasks": "Go on with next_cursor as cursor while it is not null; get_task shows one task.",
    "cancel_task": "After ok: true the task is canceled for good and nothing is owed any more.",
    "attach_artifacts": "check_terminator with the obligation_receipt_id tells that the obligation is discharged.",
    "release_hold": "get_task with wait_seconds waits for the outcome.",
    "lease_next": "For each task: do the work, call renew_lease in time, then exactly one of complete, fail, "
                  "release_lease, always with its task_id and lease_id. Begin from progress if it is not null.",
    "renew_lease": "Renew again after renew_every_seconds. On lease_invalid_or_expired drop the work and call "
                   "lease_next: somebody else may hold the task by now.",
    "release_lease": "lease_next gives other work.",
    "list_leases": "Go on with each: renew_lease in time, then complete, fail or release_lease.",
    "start_task": "Then report_progress now and then, renew_lease in time, and complete or fail.",
    "report_progress": "It does not renew the lease: call renew_lease for that.",
    "complete": "lease_next gives more work. On lease_invalid_or_expired drop the work, do not repeat it.",
    "complete_tasks": "Look at each entry of results for an error; lease_next gives more work.",
    "fail": "lease_next gives more work; with requeued: true the task comes back to some worker.",
    "list_receipts": "ack_receipt says that one was read; it discharges nothing.",
    "get_receipt": "check_terminator tells whether an obligation is discharged.",
    "emit_receipt": "After schedule.created keep reporting with report_schedule.",
    "report_schedule": "For a schedule in unknown, emit_receipt schedule.created first.",
    "check_terminator": "With has_terminator: false the obligation is still owed: get_task shows how far it is.",
    "list_open_obligations": "get_task for the task_id of each receipt says what it waits for.",
}
IDEMPOTENT = {"cancel_task", "complete", "complete_tasks", "fail", "release_lease", "ack_receipt", "attach_artifacts",
              "start_task", "report_schedule", "emit_receipt", "renew_lease"}
DESTRUCTIVE = {"cancel_task", "fail"}
# References that mean nothing to a model.
CLAUSE = re.compile(r"\s*(?:One transaction\.\s+)?(?:\((?:PH|H)\.[\d.]+\)|(?:Spec \d[\d., ]*|PH\.[\d.]+,? ?)+$)")
ABOUT = """AsyncGate keeps tasks for agents that forget. As an agent: create_task or run_task, then get_task; after a
restart call list_open_obligations first, it says what is still owed to you. As a worker: lease_next, renew_lease every
renew_every_seconds, then complete, fail or release_lease; a lease that ran out is lost. Every error has a code and
names the next legal call. Name yourself with agent_id or worker_id where your credential does not."""


def both_names(operation: str, prefix: str = PREFIX) -> tuple[str, str]:
    """Return the two spellings of a tool's name, dotted first; both are always accepted."""
    return f"{prefix}{DOTTED}{operation}", f"{prefix}{UNDERSCORED}{operation}"


def strict(op: Any) -> type[Ask]:
    """Return the request of an operation as MCP takes it: an argument that it does not know is a mistake."""
    made: Any = msgspec.defstruct(op.takes.__name__, [], bases=(op.takes,), kw_only=True, forbid_unknown_fields=True)
    kind: type[Ask] = made
    return kind


def tool(op: Any, name: str) -> Json:
    """Describe the tool of an operation."""
    reads = op.kind != "W"
    return {
        "name": name, "title": op.name.replace("_", " ").capitalize(),
        "description": description(op, name.startswith(PREFIX)),
        "inputSchema": input_schema(op), "outputSchema": output_schema(op),
        "annotations": {"readOnlyHint": reads, "destructiveHint": op.name in DESTRUCTIVE,
                        "idempotentHint": reads or op.name in IDEMPOTENT, "openWorldHint": False}}


def tools(operations: Iterable[Any], separator: str, prefix: str = PREFIX) -> list[Json]:
    """Describe the tools of all operations, sorted by name."""
    return [tool(op, f"{prefix}{separator}{op.name}") for op in sorted(operations, key=lambda op: op.name)]


def description(op: Any, of_a_gate: bool = True) -> str:
    """Say what a tool does and, where it is one of a gate, what may follow it."""
    text = " ".join(f"{op.summary} {op.text.strip()}".split())
    while (shorter := CLAUSE.sub("", text)) != text:
        text = shorter
    return f"{text} Next: {NEXT[op.name]}" if of_a_gate and op.name in NEXT else text


def input_schema(op: Any) -> Json:
    """Return the schema of a tool's arguments, an object at its root."""
    schema = rooted(strict(op))
    required = sorted({*schema.get("required", ()), *op.takes.needed})
    properties = {name: said if name in required else nullable(said)
                  for name, said in schema.get("properties", {}).items()}
    return {**schema, "properties": properties, "required": required}


def output_schema(op: Any) -> Json:
    """Return the schema of a tool's structured content, an object at its root."""
    return rooted(op.gives)


def rooted(kind: type[msgspec.Struct]) -> Json:
    """Return a Struct's schema with its own properties at the root, where older revisions of MCP want them."""
    schema = plain(msgspec.json.schema(kind))
    defs: Json = schema["$defs"]
    root: Json = defs.pop(schema["$ref"].rpartition("/")[2])
    return {**root, "$defs": defs} if defs else root


def plain(schema: Any) -> Any:
    """Leave out what readers of schemas stumble over; the gate checks it all the same."""
    if isinstance(schema, list):
        return [plain(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {"pattern", "uniqueItems", *(["default"] if schema.get("default") == "" else ())}
    kept = {name: plain(part) for name, part in schema.items() if name not in out}
    return {**kept, **ANY_JSON} if kept.keys() <= {"default", "description"} and "default" in kept else kept


def nullable(schema: Json) -> Json:
    """Let an argument be null, which means absent."""
    if "anyOf" in schema or "$ref" in schema:
        inner = schema.get("anyOf") or [{"$ref": schema["$ref"]}]
        rest = {name: said for name, said in schema.items() if name not in ("anyOf", "$ref")}
        return {**rest, "anyOf": inner if {"type": "null"} in inner else [*inner, {"type": "null"}]}
    if "enum" in schema and None not in schema["enum"]:
        return {**schema, "enum": [*schema["enum"], None]}
    kind = schema.get("type")
    if kind is None or kind == "null" or (isinstance(kind, list) and "null" in kind):
        return schema
    return {**schema, "type": [*(kind if isinstance(kind, list) else [kind]), "null"]}


# Answers.


def about(no: GateError) -> Json:
    """Name a refusal, and say whether the same call may succeed later."""
    return {"code": no.code, "retryable": no.status in (408, 429, 503)}


def told_refusal(no: GateError) -> Json:
    """Return all there is to say of a refusal, for the data of a JSON-RPC error."""
    return {**no.body(), **about(no)}


def found(reply: bytes) -> Json:
    """Wrap a reply as the result of a tool."""
    text = {"type": "text", "text": reply.decode()}
    return {"content": [text], "structuredContent": any_json(reply), "isError": False}


def refused(no: GateError) -> Json:
    """Wrap a refusal; without structuredContent, which some clients would hold against the output schema."""
    return {"content": [{"type": "text", "text": encode(no.body()).decode()}], "isError": True,
            "_meta": {"asyncgate/error": about(no)}}
