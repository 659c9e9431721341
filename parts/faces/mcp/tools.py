"""The operations as MCP tools: names, descriptions for models, and JSON Schemas, made from the table.

This module does not need the SDK, so a program that only lists tools does not import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import cache
from typing import Any, Literal

import msgspec

from asyncgate.parts.faces.mcp.summaries import DEFAULT_PAGE, LARGEST_PAGE, is_list
from asyncgate.parts.model import errors, wire
from asyncgate.parts.model.clauses import remove_clause_numbers
from asyncgate.parts.model.content import JsonObject, decode_json, encode_json
from asyncgate.parts.model.jsonrpc import TOOL_PREFIX

# The sets that a host may choose with /mcp?tools=…: tools for agents, for workers, for administration, and those that
# few agents and workers need; and each declared type as a tool, with those that follow what it has begun.
SETS = {"delegate": "agent", "work": "worker", "admin": "", "more": "", "types": ""}
ALL = "all"
TYPES = "types"
FOLLOWING = frozenset({"get_task", "cancel_task"})
RARE = frozenset({
    "append_output", "check_terminator", "create_task_webhook", "declare_type", "emit_receipt", "end_session",
    "find_id", "get_config", "get_receipt", "get_traffic", "health", "list_archived_receipts", "list_consents",
    "list_schedules", "list_sessions", "list_steps", "list_task_webhooks", "pause_schedule", "read_output", "ready",
    "record_step", "remove_task_webhook", "remove_type", "report_schedule", "resume_schedule", "run_schedule",
    "search_tasks", "sign_out_everywhere", "wait_tasks", "withdraw_consent"})
RARE_FOR_WORKERS = frozenset({"answer_input", "list_inputs", "list_receipts"})
# Arguments that few models need: the gate takes them, and brief lists do not show them.
RARE_ARGUMENTS = frozenset({"checkpoint", "expected_artifact_mime", "expected_outcome_kind", "max_expiries",
                            "payload_pointer", "principal_ai", "retry_backoff_seconds", "success_criteria", "timeouts",
                            "created_by_kind", "id_prefix", "summary_prefix", "type_prefix",
                            "max_parks", "process", "until", "until_children", "newest", "resumption_id", "to_id",
                            "to_kind", "types", "cascade", "parent_task_id", "cost", "unique", "debounce"})
ADMINISTERING = frozenset({"admin:read", "admin:write"})
# The forms of a listed tool: full; brief, with the caller's id as an argument, or only that of an agent or a worker; or
# brief without it.
ToolForm = Literal["full", "brief", "agent", "worker", "named"]
FULL_FORM: ToolForm = "full"
BRIEF_NAMED: ToolForm = "named"
# The arguments by which a model names itself; other spellings are accepted, but not shown.
ASKER_ARGUMENTS = {"agent_id": "your id", "worker_id": "your worker id; keep it after a restart"}
NOT_OF_FORM: dict[ToolForm, Set[str]] = {"brief": set(), "agent": {"worker_id"}, "worker": {"agent_id"},
                                         "named": ASKER_ARGUMENTS.keys()}
ASKING = (wire.AsPrincipal, wire.AsWorker, wire.AsEither)
SOME_JSON = [kind for kind in wire.ANY_JSON["type"] if kind != "null"]
ASKERS = frozenset(name for kind in ASKING for name in kind.__struct_fields__)
# The verbs of operations that only add something, go on with it, or give it back.
ADDITIVE = frozenset({"ack", "answer", "append", "attach", "bootstrap", "complete", "create", "emit", "import",
                      "invite", "issue", "lease", "make", "record", "register", "release", "renew", "replay", "report",
                      "request", "rerun", "restore", "resume", "seal", "start", "test"})
MOST_REPEATED = 10_000      # bytes of an answer that structuredContent repeats for a model
INSTRUCTIONS = """AsyncGate keeps tasks for agents that forget. As an agent: create_task or run_task, then get_task.
After a restart, call list_open_obligations first: it lists what is still owed to you. As a worker: lease_next,
renew_lease every renew_every_seconds, then complete, fail or release_lease; a lease that ran out is lost. A worker
that needs a decision asks with request_input; answer_input answers an input.requested among your obligations. Every
error has a code and names the next legal call. If your credential does not name you, send agent_id or worker_id."""


def describe_tool(op: Any, name: str, form: ToolForm = FULL_FORM) -> JsonObject:
    """Describe the tool of an operation; a brief form costs a model fewer tokens."""
    takes = {"inputSchema": make_input_schema(op), "outputSchema": make_output_schema(op)} if form == FULL_FORM else {
        "inputSchema": make_brief_schema(op, NOT_OF_FORM[form])}
    hints = {"readOnlyHint": op.kind != "W", "destructiveHint": is_destructive(op), "idempotentHint": op.idempotent,
             "openWorldHint": False}
    return {
        "name": name, **({"title": op.name.replace("_", " ").capitalize()} if form == FULL_FORM else {}),
        "description": describe_purpose(op, name.startswith(TOOL_PREFIX) or name == op.name), **takes,
        "annotations": hints if form == FULL_FORM else leave_out_defaults(hints)}


def leave_out_defaults(hints: dict[str, bool]) -> dict[str, bool]:
    """Leave out hints that say what MCP takes for granted: of what only reads, and what is false by itself."""
    needless = {"destructiveHint", "idempotentHint"} if hints["readOnlyHint"] else {
        name for name in ("readOnlyHint", "idempotentHint") if not hints[name]}
    return {name: value for name, value in hints.items() if name not in needless}


def choose_brief(sets: Set[str]) -> ToolForm:
    """Return the brief form for whom these sets are, where a credential does not name the caller."""
    users = {SETS[name] for name in sets} - {""}
    return "brief" if len(users) > 1 else "worker" if users == {"worker"} else "agent"


def describe_tools(operations: Iterable[Any], separator: str, form: ToolForm = FULL_FORM,
                   prefix: str = TOOL_PREFIX) -> list[JsonObject]:
    """Describe the tools of all operations, sorted by name."""
    by_name = sorted(operations, key=lambda op: op.name)
    return [describe_tool(op, f"{prefix}{separator}{op.name}" if separator else op.name, form) for op in by_name]


def is_destructive(op: Any) -> bool:
    """Whether a call may end, stop, replace or remove something: MCP calls every other writing additive."""
    return op.kind == "W" and not op.takes.creates and op.name.partition("_")[0] not in ADDITIVE


def read_sets(named: str | None, default: str = "delegate,work,admin") -> frozenset[str]:
    """Return the sets of tools that a query names, or the default."""
    wanted = frozenset((named or default).split(","))
    if unknown := wanted - SETS.keys() - {ALL}:
        raise errors.InvalidRequest(
            f"tools={','.join(sorted(unknown))} is unknown; the sets are {', '.join(SETS)} and {ALL}")
    return frozenset(SETS) - {TYPES} | wanted & {TYPES} if ALL in wanted else wanted


def is_in(op: Any, sets: frozenset[str]) -> bool:
    """Whether an operation belongs to one of these sets; what needs a scope of administration belongs to that."""
    if op.name in RARE or op.successor:
        return "more" in sets
    if op.name in FOLLOWING and TYPES in sets:
        return True
    everyday = op.scopes - ADMINISTERING or not op.scopes
    users = {"agent", "worker"} & {*op.roles} if everyday else set[str]()
    if op.name in RARE_FOR_WORKERS:
        users.discard("worker")
        return "more" in sets or bool({SETS[name] for name in sets} & users)
    return bool({SETS[name] for name in sets} & users) or ("admin" in sets and not users)


def describe_purpose(op: Any, of_a_gate: bool = True) -> str:
    """Describe what a tool does and, for tools of a gate, the next call."""
    text = remove_clause_numbers(" ".join(f"{op.summary} {op.text.strip()}".split())).removesuffix(" One transaction.")
    return f"{text} Next: {op.takes.next_step}" if of_a_gate and op.takes.next_step else text


@cache      # each form of listing begins with it, and most of the time of the first request went there
def make_input_schema(op: Any) -> JsonObject:
    """Return the schema of a tool's arguments, an object at its root; do not change it."""
    schema = make_rooted_schema(op.reader.exact)
    required = sorted({*schema.get("required", ()), *op.takes.needed})
    properties = {name: (refuse_null if name in required else allow_null)(part)
                  for name, part in schema.get("properties", {}).items()}
    return {**schema, "properties": properties, "required": required}


def make_brief_schema(op: Any, hidden: Set[str]) -> JsonObject:
    """Return the schema of a tool's arguments, reduced to what a model needs.

    It omits other spellings of the caller's name (and the spellings in `hidden`), limits that no sensible call reaches,
    and the fact that null means absent.  The gate still accepts all arguments.
    """
    hidden = {*hidden, *(() if "worker" in op.roles else ("worker_id",))}
    schema: JsonObject = shorten_schema(make_input_schema(op), hidden)
    if (limit := schema["properties"].get("limit")) and is_list(op.name):
        limit["description"] = f"default {DEFAULT_PAGE}, clamped to {LARGEST_PAGE}"
    for name in schema["properties"].keys() & ASKER_ARGUMENTS.keys() if issubclass(op.takes, ASKING) else ():
        schema["properties"][name]["description"] = ASKER_ARGUMENTS[name]
    defs: JsonObject = schema.pop("$defs", {})
    for item in defs.keys() & find_kinds(wire.Ask).keys():      # of a batch: the tool of one has the same words
        for part in defs[item]["properties"].values():
            part.pop("description", None)
    used = {name: definition for name, definition in defs.items()
            if f"/{name}\"" in encode_json([schema, defs]).decode()}
    return {**schema, "$defs": used} if used else schema


def shorten_schema(schema: Any, hidden: Set[str]) -> Any:
    """Return a schema without the parts that a model does not need."""
    if isinstance(schema, list):
        return [shorten_schema(part, hidden) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: shorten_schema(part, hidden) for name, part in schema.items() if not is_needless(name, part)}
    if "properties" in schema:
        out = find_spellings(schema["title"], hidden)
        kept["properties"] = {name: shorten_schema(part, hidden) for name, part in schema["properties"].items()
                              if name not in out}
        for name in kept.get("required", ()):       # in a nested object a required field may be null
            if {"type": "null"} in schema["properties"][name].get("anyOf", ()):
                kept["properties"][name] = allow_null(kept["properties"][name])
    return drop_null(kept)


def find_spellings(title: str, hidden: Set[str]) -> Set[str]:
    """Return the members that name the caller, except those shown to a model, and those that few models need."""
    kind = find_kinds(wire.Ask).get(title)
    if kind is None or not issubclass(kind, ASKING):
        return {"tenant_id"} if kind else frozenset()
    creators = {"created_by", "tasker_principal"} if issubclass(kind, wire.CreateTask) else set[str]()
    rare = RARE_ARGUMENTS if issubclass(
        kind, wire.CreateTask | wire.ListTasks | wire.ListReceipts | wire.ReleaseLease | wire.LeaseNext) else frozenset[
            str]()
    return (ASKERS - ASKER_ARGUMENTS.keys()) | hidden | creators | rare


@cache
def find_kinds(above: type[wire.Ask]) -> dict[str, type[wire.Ask]]:
    """Return every request class by its name."""
    types = {above.__name__: above}
    for kind in above.__subclasses__():
        types |= find_kinds(kind)
    return types


def is_needless(name: str, value: Any) -> bool:
    """Whether a schema keyword is useless for a model."""
    return (name in ("title", "minLength", "maxLength", "additionalProperties", "properties")
            or (name == "default" and value is None) or (name == "required" and not value)
            or (name in ("minimum", "maximum") and abs(value) in (wire.WIDEST, wire.LONGEST_PAUSE_SECONDS)))


def drop_null(schema: JsonObject) -> JsonObject:
    """Remove null, which means absent, from a schema; keep it where any JSON is accepted."""
    if "anyOf" in schema:
        some = [choice for choice in schema["anyOf"] if choice != {"type": "null"}]
        rest = {name: value for name, value in schema.items() if name != "anyOf"}
        return {**some[0], **rest} if len(some) == 1 else {**rest, "anyOf": some}
    if "enum" in schema:
        return {**schema, "enum": [choice for choice in schema["enum"] if choice is not None]}
    if isinstance(kinds := schema.get("type"), list) and kinds != wire.ANY_JSON["type"]:
        some = [kind for kind in kinds if kind != "null"]
        return {**schema, "type": some if len(some) > 1 else some[0]}
    return schema


def make_output_schema(op: Any) -> JsonObject:
    """Return the schema of a tool's structured content, an object at its root."""
    return make_rooted_schema(op.gives)


def make_rooted_schema(kind: type[msgspec.Struct]) -> JsonObject:
    """Return a Struct's schema with its properties at the root, as older revisions of MCP require."""
    schema = simplify_schema(msgspec.json.schema(kind))
    defs: JsonObject = schema["$defs"]
    root: JsonObject = defs.pop(schema["$ref"].rpartition("/")[2])
    return {**root, "$defs": defs} if defs else root


def simplify_schema(schema: Any) -> Any:
    """Remove keywords that some clients cannot handle; the gate checks the values anyway."""
    if isinstance(schema, list):
        return [simplify_schema(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {"pattern", "uniqueItems", *(["default"] if schema.get("default") == "" else ())}
    kept = {name: simplify_schema(part) for name, part in schema.items() if name not in out}
    if isinstance(description := kept.get("description"), str):
        kept["description"] = remove_clause_numbers(description)
    return {**kept, **wire.ANY_JSON} if kept.keys() <= {"default", "description"} and "default" in kept else kept


def refuse_null(schema: JsonObject) -> JsonObject:
    """Refuse null, which means absent, as a required argument."""
    rest = {name: part for name, part in schema.items() if (name, part) != ("default", None)}
    return drop_null({**rest, "type": SOME_JSON} if rest.get("type") == wire.ANY_JSON["type"] else rest)


def allow_null(schema: JsonObject) -> JsonObject:
    """Allow null, which means absent, as an argument."""
    if "anyOf" in schema or "$ref" in schema:
        inner = schema.get("anyOf") or [{"$ref": schema["$ref"]}]
        rest = {name: value for name, value in schema.items() if name not in ("anyOf", "$ref")}
        return {**rest, "anyOf": inner if {"type": "null"} in inner else [*inner, {"type": "null"}]}
    if "enum" in schema and None not in schema["enum"]:
        return {**schema, "enum": [*schema["enum"], None]}
    kind = schema.get("type")
    if kind is None or kind == "null" or (isinstance(kind, list) and "null" in kind):
        return schema
    return {**schema, "type": [*(kind if isinstance(kind, list) else [kind]), "null"]}


# Answers.


def describe_refusal(refusal: errors.GateError) -> JsonObject:
    """Return the code of a refusal, and whether the same call may succeed later."""
    later = {"retry_after": refusal.more["retry_after"]} if "retry_after" in refusal.more else {}
    return {"code": refusal.code, "retryable": refusal.status in (408, 429, 503), **later}


def make_refusal_data(refusal: errors.GateError) -> JsonObject:
    """Return all members of a refusal, for the data of a JSON-RPC error."""
    return {**refusal.body(), **describe_refusal(refusal)}


def make_result(reply: bytes, *, once: bool = False) -> JsonObject:
    """Wrap a reply as the result of a tool; a large one may be sent only `once`, because some hosts show both forms."""
    text = {"type": "text", "text": reply.decode()}
    again = {} if once and len(reply) > MOST_REPEATED else {"structuredContent": decode_json(reply)}
    return {"content": [text], **again, "isError": False}


def make_refusal_result(refusal: errors.GateError) -> JsonObject:
    """Wrap a refusal; it has no structuredContent, because some clients would check that against the output schema."""
    return {"content": [{"type": "text", "text": encode_json(refusal.body()).decode()}], "isError": True,
            "_meta": {"asyncgate/error": describe_refusal(refusal)}}
