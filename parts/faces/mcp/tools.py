"""The operations as MCP tools: names, texts that a model can act on, and JSON Schemas; made from the table.

Nothing here needs the SDK, so whoever only wants to know what the tools are pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import cache
from typing import Any, Literal

import msgspec

from asyncgate.parts.model.clauses import plainly
from asyncgate.parts.model.content import any_json
from asyncgate.parts.model.errors import GateError, InvalidRequest
from asyncgate.parts.model.jsonrpc import PREFIX
from asyncgate.parts.model.wire import (
    ANY_JSON,
    LONGEST,
    WIDEST,
    AsEither,
    Ask,
    AsPrincipal,
    AsWorker,
    CreateTask,
)

Json = dict[str, Any]
encode = msgspec.json.encode
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
# What a host may pick with /mcp?tools=…: what agents do, what workers do, and what neither may.
SETS = {"delegate": "agent", "work": "worker", "admin": ""}
# How a tool is listed: with all there is to say of it, or briefly, with who asks among its arguments or without.
Form = Literal["full", "brief", "named"]
FULL: Form = "full"
BRIEF: Form = "brief"
NAMED: Form = "named"
# Who asks, as a model says it; the other spellings, and what peers send beside it, are accepted and not shown.
WHO = {"agent_id": "who you are", "worker_id": "the worker you are; the same after a restart"}
ASKING = (AsPrincipal, AsWorker, AsEither)
ASKERS = frozenset(name for kind in ASKING for name in kind.__struct_fields__)
IDEMPOTENT = {"cancel_task", "complete", "complete_tasks", "fail", "release_lease", "ack_receipt", "attach_artifacts",
              "start_task", "report_schedule", "emit_receipt", "renew_lease"}
DESTRUCTIVE = {"cancel_task", "fail"}
ABOUT = """AsyncGate keeps tasks for agents that forget. As an agent: create_task or run_task, then get_task; after a
restart call list_open_obligations first, it says what is still owed to you. As a worker: lease_next, renew_lease every
renew_every_seconds, then complete, fail or release_lease; a lease that ran out is lost. Every error has a code and
names the next legal call. Name yourself with agent_id or worker_id where your credential does not."""


def tool(op: Any, name: str, form: Form = FULL) -> Json:
    """Describe the tool of an operation; a model reads every word of it, so briefly if it may be."""
    reads = op.kind != "W"
    takes = {"inputSchema": input_schema(op), "outputSchema": output_schema(op)} if form == FULL else {
        "inputSchema": brief(op, named=form == NAMED)}
    return {
        "name": name, "title": op.name.replace("_", " ").capitalize(),
        "description": description(op, name.startswith(PREFIX)), **takes,
        "annotations": {"readOnlyHint": reads, "destructiveHint": op.name in DESTRUCTIVE,
                        "idempotentHint": reads or op.name in IDEMPOTENT, "openWorldHint": False}}


def tools(operations: Iterable[Any], separator: str, form: Form = FULL, prefix: str = PREFIX) -> list[Json]:
    """Describe the tools of all operations, sorted by name."""
    return [tool(op, f"{prefix}{separator}{op.name}", form) for op in sorted(operations, key=lambda op: op.name)]


def sets_of(named: str | None) -> frozenset[str]:
    """Read which sets of tools an address asks for; all if it names none."""
    wanted = frozenset(named.split(",")) if named else frozenset(SETS)
    if unknown := wanted - SETS.keys():
        raise InvalidRequest(f"tools={','.join(sorted(unknown))}: there are the sets {', '.join(SETS)}")
    return wanted


def is_in(op: Any, sets: frozenset[str]) -> bool:
    """Whether an operation belongs to one of these sets."""
    roles = {SETS[name] for name in sets}
    return op.open or bool(roles & {*op.roles}) or ("" in roles and not {"agent", "worker"} & {*op.roles})


def description(op: Any, of_a_gate: bool = True) -> str:
    """Say what a tool does and, where it is one of a gate, what may follow it."""
    text = plainly(" ".join(f"{op.summary} {op.text.strip()}".split())).removesuffix(" One transaction.")
    return f"{text} Next: {NEXT[op.name]}" if of_a_gate and op.name in NEXT else text


def input_schema(op: Any) -> Json:
    """Return the schema of a tool's arguments, an object at its root."""
    schema = rooted(op.reader.exact)
    required = sorted({*schema.get("required", ()), *op.takes.needed})
    properties = {name: said if name in required else nullable(said)
                  for name, said in schema.get("properties", {}).items()}
    return {**schema, "properties": properties, "required": required}


def brief(op: Any, *, named: bool) -> Json:
    """Return the schema of a tool's arguments as a model needs it: what to send, without what it can leave to the gate.

    Other spellings of who asks are left out, and if the credential names the caller all of them are.  Limits that no
    sensible call comes near are left out too, and that null means absent.  The gate takes what it always takes.
    """
    hidden = {*(WHO if named else ()), *(() if "worker" in op.roles else ("worker_id",))}
    schema: Json = shortened(input_schema(op), hidden)
    for name in schema["properties"].keys() & WHO.keys() if issubclass(op.takes, ASKING) else ():
        schema["properties"][name]["description"] = WHO[name]
    defs: Json = schema.pop("$defs", {})
    used = {name: said for name, said in defs.items() if f"/{name}\"" in encode([schema, defs]).decode()}
    return {**schema, "$defs": used} if used else schema


def shortened(schema: Any, hidden: Set[str]) -> Any:
    """Leave out of a schema what a model does not need."""
    if isinstance(schema, list):
        return [shortened(part, hidden) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: shortened(part, hidden) for name, part in schema.items() if not needless(name, part)}
    if "properties" in schema:
        out = spellings(schema["title"], hidden)
        kept["properties"] = {name: shortened(part, hidden) for name, part in schema["properties"].items()
                              if name not in out}
        for name in kept.get("required", ()):       # what cannot be absent may be null
            if {"type": "null"} in schema["properties"][name].get("anyOf", ()):
                kept["properties"][name] = nullable(kept["properties"][name])
    return without_null(kept)


def spellings(title: str, hidden: Set[str]) -> Set[str]:
    """Return the members of a request by which it says who asks, but for those that a model is shown."""
    kind = kinds(Ask).get(title)
    if kind is None or not issubclass(kind, ASKING):
        return {"tenant_id"} if kind else frozenset()
    return (ASKERS - WHO.keys()) | hidden | ({"created_by"} if issubclass(kind, CreateTask) else set())


@cache
def kinds(above: type[Ask]) -> dict[str, type[Ask]]:
    """Return every kind of request by its name."""
    found = {above.__name__: above}
    for kind in above.__subclasses__():
        found |= kinds(kind)
    return found


def needless(name: str, said: Any) -> bool:
    """Whether a keyword of a schema tells a model nothing."""
    return (name in ("title", "minLength", "maxLength", "additionalProperties", "properties")
            or (name == "default" and said is None) or (name == "required" and not said)
            or (name in ("minimum", "maximum") and abs(said) in (WIDEST, LONGEST)))


def without_null(schema: Json) -> Json:
    """Say nothing of null, which means absent; where any JSON is taken it is one of the values."""
    if "anyOf" in schema:
        some = [one for one in schema["anyOf"] if one != {"type": "null"}]
        rest = {name: said for name, said in schema.items() if name != "anyOf"}
        return {**some[0], **rest} if len(some) == 1 else {**rest, "anyOf": some}
    if "enum" in schema:
        return {**schema, "enum": [one for one in schema["enum"] if one is not None]}
    if isinstance(kinds := schema.get("type"), list) and kinds != ANY_JSON["type"]:
        some = [kind for kind in kinds if kind != "null"]
        return {**schema, "type": some if len(some) > 1 else some[0]}
    return schema


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
    if isinstance(said := kept.get("description"), str):
        kept["description"] = plainly(said)
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
