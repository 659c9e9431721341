"""The OpenAPI document of the REST interface, made from the table of operations, and the page that shows it.

Texts come from the Engine's docstrings, schemas and the descriptions of fields from the Structs of the wire.  What only
this file knows, an example of every operation and which refusals it may answer with, the tests hold against the gate.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, Collection
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
from starlette.routing import Route

from asyncgate.parts.model.clauses import plainly
from asyncgate.parts.model.wire import PLAIN, Name, Problem, Requirements

TASK, DUTY = "019a8f3c-51de-7a10-9c6e-0d3a51b7f2c4", "019a8f3c-51de-7a11-8f02-6b9d40e1c7aa"
DONE, LEASE = "019a8f3d-0b42-7c03-a1de-94c2f07b5e18", "6f1f0c8e-2a5b-4b57-9a0e-3d8f4c1b2a90"
TENANT, NOW, LATER = "00000000-0000-0000-0000-000000000000", "2026-11-21T09:30:00Z", "2026-11-21T09:35:00Z"
ADA, WORKER = {"kind": "agent", "id": "ada"}, {"kind": "worker", "id": "reader-1"}
OWNER = {**ADA, "principal_kind": "agent", "principal_id": "ada"}      # in both spellings (spec 3)
HELD = {"task_id": TASK, "lease_id": LEASE, "worker_id": "reader-1"}
WORK, NEEDS = {"type": "page.summarize", "payload": {"url": "https://example.org/a"}}, {"capabilities": ["web.read"]}
SUMMARY = {"result": {"summary": "Three pages on rivers."}, "artifacts": [{"type": "file", "uri": "file:///out/a.md"}]}
RECORD = {
    "task_id": TASK, "tenant_id": TENANT, **WORK, "status": "succeeded", "created_by": OWNER, "principal_ai": "ada",
    "payload_pointer": None, "requirements": NEEDS, "priority": 0, "attempt": 0, "max_attempts": 3,
    "retry_backoff_seconds": 30, "fence": 1, "expiries": 0, "max_expiries": 10, "held": None,
    "idempotency_key": "page-a", "asyncgate_instance": "asyncgate-1", "obligation_receipt_id": DUTY,
    "obligation_open": False, "created_at": NOW, "updated_at": LATER, "next_eligible_at": None, "started_at": NOW,
    "result": {"outcome": "succeeded", "error": None, **SUMMARY, "completed_at": LATER}}
OFFER = {name: RECORD[name] for name in ("task_id", "tenant_id", "type", "payload", "payload_pointer", "requirements",
                                         "principal_ai", "created_by", "attempt", "fence", "obligation_receipt_id")} | {
    "lease_id": LEASE, "expires_at": LATER, "renew_every_seconds": 100.0, "caused_by_receipt_id": DUTY}
ASSIGNED: dict[str, Any] = {
    "receipt_id": DUTY, "tenant_id": TENANT, "receipt_type": "task.assigned", "created_at": NOW, "from": ADA, "to": ADA,
    "task_id": TASK, "lease_id": None, "schedule_id": None, "parents": [], "asyncgate_instance": "asyncgate-1",
    "body": {"type": "page.summarize", "schema_version": "1"}, "hash": "9b1f5f0f" * 8}
CARRIED = {
    "receipt_id": DUTY, "receipt_key": "5d0c1e72" * 8, "receipt_type": "task.assigned", "created_at": 1771502400.0,
    "from_kind": "agent", "from_id": "ada", "to_kind": "agent", "to_id": "ada", "task_id": TASK, "lease_id": None,
    "schedule_id": None, "asyncgate_instance": "asyncgate-1", "parents": [], "hash": "9b1f5f0f" * 8,
    "body": '{"schema_version":"1","type":"page.summarize"}'}
SELF = {"version": "0.1.0", "instance_id": "asyncgate-1"}
SERVER = {"name": "AsyncGate", **SELF, "environment": "local", "uptime": 4711}
ASKER = {"principal_kind": "agent", "principal_id": "ada"}
SEEN = {**ASKER, "principal_instance_id": None, "first_seen_at": NOW, "last_seen_at": LATER, "sessions_count": 2}
OTHER, KEY_ID = "3c9d1f52-7a3e-4d0b-9f43-5b1e6c2a8d70", "4fK8sWq1ZbXe"
ROOM = {"tenant": OTHER, "name": "Reading Room", "tier": "paid", "created_at": NOW}
ALLOWED = {"tenant": TENANT, "tier": "free", "enforced": True, "tasks_per_hour": 100, "api_calls_per_hour": 1000,
           "active_tasks": 1000, "concurrent_leases": 10, "receipt_storage_gb": 1,
           "terminal_tasks": -1, "receipts_per_task": -1}
KEY = {"key_id": KEY_ID, "tenant": TENANT, "name": "the reader", "principal_kind": "worker", "principal_id": "reader-1",
       "role": "worker", "scopes": ["receipts:read", "tasks:lease"], "task_types": ["page.summarize"],
       "created_at": NOW, "created_by": "human ada", "not_before": NOW, "expires_at": "2099-01-01T00:00:00Z"}

# What each operation is asked with and answers; what a path carries stands beside the rest of the request.
EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "create_task": ({**WORK, "agent_id": "ada", "idempotency_key": "page-a"}, {"task_id": TASK, "status": "queued"}),
    "create_tasks": ({"tasks": [{**WORK, "agent_id": "ada"}]}, {"results": [{"task_id": TASK, "status": "queued"}]}),
    "run_task": ({**WORK, "agent_id": "ada", "wait_seconds": 30}, RECORD),
    "get_task": ({"task_id": TASK, "wait_seconds": 30}, RECORD),
    "get_task_history": ({"task_id": TASK, "limit": 50}, {"task_id": TASK, "events": [{
        "event_id": DUTY, "event_type": "task.assigned", "created_at": NOW, "receipt": ASSIGNED}]}),
    "list_tasks": ({"status": "succeeded", "limit": 20}, {"tasks": [RECORD]}),
    "cancel_task": ({"task_id": TASK, **ASKER, "reason": "no longer needed"}, {"ok": True, "status": "canceled"}),
    "attach_artifacts": ({"task_id": TASK, "artifacts": SUMMARY["artifacts"]}, {"ok": True, "status": "succeeded"}),
    "release_hold": ({"task_id": TASK, **ASKER}, {"ok": True, "status": "queued"}),
    "lease_next": ({"worker_id": "reader-1", "capabilities": ["web.read"], "max_tasks": 1, "wait_seconds": 20},
                   {"tasks": [OFFER]}),
    "renew_lease": ({**HELD, "extend_by_seconds": 300}, {"ok": True, "expires_at": LATER, "renew_every_seconds": 100}),
    "release_lease": (HELD, {"ok": True, "status": "queued", "requeued": True}),
    "list_leases": ({"worker_id": "reader-1"}, {"leases": [{
        "task_id": TASK, "lease_id": LEASE, "fence": 1, "type": "page.summarize", "worker": WORKER, "acquired_at": NOW,
        "expires_at": LATER, "renewals": 0, "renew_every_seconds": 100.0}]}),
    "start_task": (HELD, {"ok": True, "status": "running", "started_at": NOW}),
    "report_progress": ({**HELD, "progress": {"pages_done": 2}}, {"ok": True, "status": "running"}),
    "complete": ({**HELD, **SUMMARY}, {"ok": True, "status": "succeeded"}),
    "complete_tasks": ({"worker_id": "reader-1", "tasks": [{"task_id": TASK, "lease_id": LEASE, **SUMMARY}]},
                       {"results": [{"task_id": TASK, "status": "succeeded"}]}),
    "fail": ({**HELD, "error": {"message": "the page does not answer"}, "retryable": True},
             {"ok": True, "status": "queued", "requeued": True, "next_eligible_at": LATER}),
    "list_receipts": ({"to_id": "ada", "limit": 50}, {"receipts": [ASSIGNED]}),
    "get_receipt": ({"receipt_id": DUTY}, ASSIGNED),
    "ack_receipt": ({"receipt_id": DUTY, **ASKER}, {"ok": True, "receipt_id": DONE}),
    "emit_receipt": ({"receipt_type": "schedule.created", "task_id": TASK, "lease_id": LEASE, "worker_id": "clock-1",
                      "schedule_id": "nightly", "body": {"cron": "0 3 * * *"}}, {"ok": True, "receipt_id": DONE}),
    "report_schedule": ({"worker_id": "clock-1", "schedules": [{
        "schedule_id": "nightly", "next_run_at": LATER, "interval_seconds": 86400}]}, {"ok": True, "unknown": []}),
    "check_terminator": ({"parent_receipt_id": DUTY}, {"parent_receipt_id": DUTY, "has_terminator": True}),
    "list_open_obligations": (ASKER, {"server": SERVER, "relationship": SEEN, "open_obligations": [ASSIGNED],
                                      "cursor": DUTY}),
    "bootstrap": ({**ASKER, "max_items": 10}, {
        "server": SERVER, "relationship": SEEN, "attention": {"inbox_receipts": [ASSIGNED]},
        "cursor": {"latest_receipt_id": DUTY}, "environment": "local"}),
    "create_tenant": ({"tenant": OTHER, "name": "Reading Room", "tier": "paid"}, ROOM),
    "list_tenants": ({}, {"tenants": [ROOM]}),
    "suspend_tenant": ({"tenant": OTHER, "reason": "a key of theirs was published"}, {**ROOM, "suspended_at": LATER}),
    "get_limits": ({"tenant": TENANT}, ALLOWED),
    "set_limits": ({"tenant": TENANT, "tier": "free", "exempt_until": LATER, "reason": "the move of all their tasks"},
                   {**ALLOWED, "exempt_until": LATER}),
    "issue_key": ({"name": "the reader", "principal_kind": "worker", "principal_id": "reader-1", "task_types": [
        "page.summarize"], "expires_at": "2099-01-01T00:00:00Z"}, {"api_key": f"aga_{KEY_ID}…", "key": KEY}),
    "list_keys": ({"limit": 20}, {"keys": [KEY]}),
    "rotate_key": ({"key_id": KEY_ID, "overlap_seconds": 3600}, {"api_key": "aga_7dRtQ0cLZx2u…", "key": {
        **KEY, "key_id": "7dRtQ0cLZx2u"}}),
    "rotate_credentials": ({"overlap_seconds": 0, "reason": "a laptop was stolen"}, {
        "keys": [{"api_key": "aga_7dRtQ0cLZx2u…", "key": {**KEY, "key_id": "7dRtQ0cLZx2u"}}], "issued_before": NOW,
        "more": False}),
    "revoke_key": ({"key_id": KEY_ID, "reason": "published by mistake"}, {"ok": True}),
    "list_audit": ({"severity": "warning", "limit": 20}, {"lines": [{
        "audit_id": "000000000007", "tenant_id": TENANT, "number": 7, "timestamp": NOW,
        "event": "key_revoked", "severity": "warning", "principal_id": "ada", "ip": "192.0.2.7",
        "user_agent": "asyncgate-client/0.1.0", "reason": None,
        "details": {"principal_kind": "human", "principal_id": "ada", "revoked": KEY_ID}, "hash": "5d0c1e72" * 8}]}),
    "seal_receipts": ({}, {"tenant_id": TENANT, "number": 12, "last_receipt_id": DONE, "hash": "9b1f04ce" * 8}),
    "list_seals": ({"limit": 20}, {"seals": [{
        "number": 12, "last_receipt_id": DONE, "count": 2, "digest": "c0ffee11" * 8, "marks": "3q2+78r+uq8=",
        "sealed_at": NOW, "hash": "9b1f04ce" * 8}]}),
    "export_receipts": ({"limit": 1000}, {"receipts": [CARRIED]}),
    "import_receipts": ({"receipts": [CARRIED]}, {"imported": 0, "present": 0, "refused": [{
        "receipt_id": DUTY, "reason": "differs", "message": "another receipt has this id here"}]}),
    "run_archive": ({"most": 5000}, {"receipts": 4711, "segments": 3, "tasks_pruned": 815, "more": False}),
    "list_archived_receipts": ({"task_id": TASK}, {"receipts": [ASSIGNED], "next_cursor": None, "cursor": None}),
    "restore_archive": ({"task_id": TASK}, {"task_ids": [TASK], "receipts": 4}),
    "get_config": ({}, {"receipt_mode": "standalone", "memorygate_url": None, "capabilities": ["leases"], **SELF}),
    "whoami": ({}, {"tenant_id": TENANT, "bound": True, "role": "worker", "scopes": ["tasks:lease"],
                    "operations": ["complete", "fail", "lease_next"], "principal_kind": "worker",
                    "principal_id": "reader-1", "principal_instance_id": None, "key_id": "EcTWh2MDGOXC",
                    "capabilities": None, "task_types": None}),
    "health": ({}, {"status": "healthy", "service": "AsyncGate", "uptime": 47, "database": "ok", "upkeep": {}, **SELF}),
}

# And what the lease protocol's own ways are.
EXAMPLES |= {
    "offer_task": ({"worker_id": "worker.reader-1", "capabilities": ["web.read"], "max_tasks": 1}, {
        "lease_id": LEASE, "lease_expires_at": LATER, "task": {
            "task_id": TASK, "principal_ai": "ada", "task_type": "page.summarize", "task_summary": "page.summarize",
            "task_body": None, "payload_pointer": None, "inputs": WORK["payload"], "expected_outcome_kind": None,
            "expected_artifact_mime": None, "attempt": 0, "fence": 1, "caused_by_receipt_id": DUTY}}),
    "extend_lease": ({"lease_id": LEASE, "worker_id": "worker.reader-1"},
                     {"lease_id": LEASE, "lease_expires_at": LATER})}
NOTHING = {"offer_task": "There is no task for this worker now."}      # what a 204 means

TAGS = {"Tasks": ("tasks", "Hand over work, and learn how it ended."),
        "Leases": ("leases lease", "Take work, keep it while it runs, and end it."),
        "Receipts and obligations": ("receipts obligations bootstrap", "What was said, what is owed, and the proof."),
        "Schedules": ("schedules", "What a scheduler tells, so that its silence is noticed."),
        "Administration": ("tenants limits keys credentials audit",
                           "Who may come in, what they may use, and what happened."),
        "Ledger": ("seals export import archive", "What keeps receipts as they are, and carries them elsewhere."),
        "Gate": ("config health whoami", "The gate itself, and who one is to it.")}

# The refusals by HTTP status, what they mean, and the headers that come with them.
STATUS = {
    400: "The request breaks a rule; the message names the field and the rule.",
    401: "A credential is needed, or this one is not known.",
    403: "This credential may not do that.",
    404: "There is nothing of that id in this tenant.",
    408: "The body did not come in time.",
    409: "The state of things forbids it; `reason` says why a lease is lost.",
    413: "The request, or one part of it, is too large; nothing was written.",
    415: "A body is sent as `application/json`, without content-encoding.",
    421: "The gate does not answer for the Host that was asked.", 431: "Path, query and headers are too large.",
    429: "A limit is used up, too many claims wait, or too many keys were wrong; come back after `Retry-After`.",
    500: "A defect of the gate; its log says more.",
    503: "The database, or what counts calls, does not answer, so the outcome may be unknown, or the gate is "
         "overloaded; repeat after `Retry-After`."}
SECONDS = {"headers": {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}}
SCHEME = {"headers": {"WWW-Authenticate": {"schema": {"type": "string"}, "description": "The scheme to use."}}}
HEADERS = {401: SCHEME, 429: SECONDS, 503: SECONDS}
LOST, LARGE = "409 lease_invalid_or_expired", "400 receipt_too_large"
ARTIFACTS = f"{LARGE}, 400 not_locatable, 400 too_many_artifacts"
UNKNOWN_TASK, UNKNOWN_RECEIPT = "404 task_not_found", "404 receipt_not_found"
HOLDER = f"{UNKNOWN_TASK}, {LOST}"
# Beyond what follows from the method and the path.
REFUSALS = {name: f", {refusals}" for name, refusals in {
    **dict.fromkeys(("create_task", "run_task"), f"{LARGE}, 409 idempotency_conflict, 429 quota_exceeded"),
    "get_task": UNKNOWN_TASK, "get_task_history": UNKNOWN_TASK, "release_hold": UNKNOWN_TASK,
    "cancel_task": f"{LARGE}, {UNKNOWN_TASK}", "list_receipts": UNKNOWN_TASK,
    "attach_artifacts": f"{ARTIFACTS}, {UNKNOWN_TASK}, 409 invalid_state_transition",
    "release_lease": HOLDER, "start_task": HOLDER,
    "offer_task": "400 invalid_worker_id",
    "extend_lease": f"400 invalid_worker_id, {HOLDER}, 409 lease_renewal_limit, 409 lease_lifetime_limit",
    "renew_lease": f"{HOLDER}, 409 lease_renewal_limit, 409 lease_lifetime_limit",
    "report_progress": f"{LARGE}, {HOLDER}", "fail": f"{LARGE}, {HOLDER}", "complete": f"{ARTIFACTS}, {HOLDER}",
    "get_receipt": UNKNOWN_RECEIPT, "ack_receipt": UNKNOWN_RECEIPT,
    "emit_receipt": f"{LARGE}, 400 too_many_parents, 400 parents_required, 400 parent_not_found, {HOLDER}",
    **dict.fromkeys(("export_receipts", "run_archive", "list_archived_receipts"), "503 archive_unavailable"),
    "restore_archive": f"{UNKNOWN_RECEIPT}, 503 archive_unavailable",
    **dict.fromkeys(("suspend_tenant", "get_limits", "set_limits", "rotate_credentials", "issue_key", "list_keys",
                     "list_audit"), "404 tenant_not_found"),
    **dict.fromkeys(("rotate_key", "revoke_key"), "404 tenant_not_found, 404 key_not_found")}.items()}

ABOUT = """A durable task gate for agents that forget: hand over work, any worker leases it, nothing is lost when either
side dies, and one call tells a principal what it is owed, with the proof.

- Send the credential as `Authorization: Bearer …` or as `X-API-Key`, never in the URL.
- Unknown fields are ignored, and an explicit null means absent.  Times are RFC 3339, durations are seconds.
- A credential without a principal lets the request name one: in the body, or as `principal_id` in the query.
- Every refusal has a stable code in `error` and a sentence in `message`; `detail` repeats it."""

Json = dict[str, Any]
Headers = list[tuple[bytes, bytes]]
Send = Callable[..., Awaitable[None]]
NAME, NULL = msgspec.json.schema(Name), {"type": "null"}


def document(operations: Collection[Any], version: str) -> bytes:
    """Return the OpenAPI 3.1 document of these operations, as JSON."""
    schemas, paths = components(operations), dict[str, Json]()
    for op in operations:
        for number, (verb, path) in enumerate(op.rest, 1):
            name = op.name if number == 1 else f"{op.name}_{number}"
            paths.setdefault(path, {})[verb.lower()] = described(op, name, verb, path, schemas)
    schemas = reached(paths, schemas)
    return msgspec.json.encode({
        "openapi": "3.1.0", "info": {
            "title": "AsyncGate", "version": version, "description": ABOUT,
            "contact": {"name": "The AsyncGate founders"}, "license": {"name": "MIT", "identifier": "MIT"}},
        "servers": [{"url": "/"}], "tags": [{"name": name, "description": text} for name, (_, text) in TAGS.items()],
        "security": [{"bearer": []}, {"api_key": []}], "paths": dict(sorted(paths.items())),
        "components": {"schemas": dict(sorted(schemas.items())), "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"},
            "api_key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}}}})


def reached(paths: Json, schemas: dict[str, Json]) -> dict[str, Json]:
    """Return the schemas that something points to; what a path or a query carries needs none."""
    found: dict[str, Json] = {}
    text = msgspec.json.encode(paths).decode()
    while names := {*re.findall(r"#/components/schemas/(\w+)", text)} - found.keys():
        found |= {name: schemas[name] for name in names}
        text = msgspec.json.encode([schemas[name] for name in names]).decode()
    return found


def components(ops: Collection[Any]) -> dict[str, Json]:
    """Return the schemas of all requests and replies by name; those of requests say what they need."""
    takes, gives = ({name: said(schema) for name, schema in msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}")[1].items()} for kinds in (
            [Requirements, *(op.takes for op in ops)], [Problem, *(op.gives for op in ops)]))
    schemas = {"Name": NAME | {"pattern": PLAIN}} | gives | takes
    for op in ops:
        schema = schemas[op.takes.__name__]
        if op.reader.refuses:       # also in what it holds, which no other request does
            for inner in (schema, *reached(schema, schemas).values()):
                if "properties" in inner:
                    inner["additionalProperties"] = False
        schema["required"] = sorted({*schema["required"], *op.takes.needed})
        if asked := schema["properties"].get("requirements"):
            asked.pop("type", None)
            asked["anyOf"] = [ref("Requirements"), NULL]
    for schema in takes.values():   # an explicit null means absent; a default would make TypeScript require the field
        for name in schema["properties"].keys() - {*schema["required"]}:
            schema["properties"][name] = nullable(optional(schema["properties"][name]))
    return schemas


def optional(schema: Json) -> Json:
    """Say in words what a field is when it is absent."""
    if "default" not in schema:
        return schema
    text = f"{schema.get('description', '')}; default {msgspec.json.encode(schema['default']).decode()}".lstrip("; ")
    return {name: part for name, part in schema.items() if name != "default"} | {"description": text}


def nullable(schema: Json) -> Json:
    """Let a field be null too."""
    inner = {name: part for name, part in schema.items() if name not in ("default", "description")}
    free = not inner or "anyOf" in inner or "null" in inner.get("type", "")
    return schema if free else {**{name: schema[name] for name in schema.keys() - inner}, "anyOf": [inner, NULL]}


def said(schema: Any) -> Any:
    """Say of a schema what the gate means: a set may repeat itself, no id is empty by default, a choice is text.

    And say it as generators of clients understand it: no null for a default, and any JSON as a schema without a type.
    """
    if not isinstance(schema, dict):
        return [said(part) for part in schema] if isinstance(schema, list) else schema
    name = NAME.items() <= schema.items()
    out = {"uniqueItems", *(NAME if name else ()), *(["default"] if schema.get("default") in ("", None) else ()),
           *(["type"] if is_any(schema.get("type")) else ())}
    kept = {name: said(part) for name, part in schema.items() if name not in out}
    if isinstance(text := kept.get("description"), str):
        kept["description"] = plainly(text)
    return kept | (ref("Name") if name else {"type": "string"} if "enum" in schema else {})


def is_any(kind: Any) -> bool:
    """Whether a type is a choice of several; no generator makes one of those, each takes any value for it."""
    return isinstance(kind, list) and len({*kind} - {"null"}) > 1


def ref(name: str) -> Json:
    """Point to a schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def described(op: Any, name: str, verb: str, path: str, schemas: dict[str, Json]) -> Json:
    """Describe one way to one operation."""
    asked, answered = EXAMPLES[op.name]
    carried = re.findall(r"{(\w+)}", path)
    whole, reply = schemas[op.takes.__name__], op.gives.__name__
    told: Json = {
        "operationId": name, "summary": (summary := plainly(op.summary)),
        "description": plainly(op.text.strip()) or summary,
        "tags": [tag_of(op, path)],
        "parameters": [parameter(field, "path", whole, asked) for field in carried],
        "responses": {"200": {"description": schemas[reply]["description"], "content": content(ref(reply), answered)},
                      **({"204": {"description": NOTHING[op.name]}} if op.name in NOTHING else {}),
                      **refused(op, verb, path)}, "x-roles": op.roles,
        "x-scopes": sorted(op.scope.split())}
    if verb == "GET":
        asks = [field for field in whole["properties"] if field not in carried]
        told["parameters"] += [parameter(field, "query", whole, asked) for field in asks]
    else:
        told["requestBody"] = body(op.takes.__name__, carried, schemas, asked)
    return told | ({"security": []} if op.open else {}) | ({"deprecated": True} if op.name == "bootstrap" else {})


def tag_of(op: Any, path: str) -> str:
    """Say where an operation belongs: what only workers do is about their leases, whatever its path."""
    word = path.removeprefix("/v1").split("/")[1]
    tag = next(name for name, (words, _) in TAGS.items() if word in words.split())
    return "Leases" if tag == "Tasks" and "agent" not in op.roles else tag


def parameter(name: str, where: str, whole: Json, example: Json) -> Json:
    """Describe a field that the path or the query carries; neither has a null."""
    schema = dict(whole["properties"][name])
    for one in schema.pop("anyOf", []):
        schema = (one if one.get("type") != "null" else {}) | schema
    text = {"description": inner} if (inner := schema.pop("description", "")) else {}
    schema = {key: part for key, part in schema.items() if (key, part) != ("default", None)}
    told = {"name": name, "in": where, "required": where == "path" or name in whole["required"], "schema": schema}
    return told | text | ({"example": example[name]} if name in example else {})


def body(name: str, carried: list[str], schemas: dict[str, Json], example: Json) -> Json:
    """Describe a request's body: the request without what its path carries."""
    whole, rest = schemas[name], name + ("Body" if carried else "")
    schemas[rest] = {
        **whole, "title": rest, "required": [field for field in whole["required"] if field not in carried],
        "properties": {field: schema for field, schema in whole["properties"].items() if field not in carried}}
    sent = {field: value for field, value in example.items() if field not in carried}
    return {"content": content(ref(rest), sent), "required": bool(schemas[rest]["required"])}


def content(schema: Json, *example: Json) -> Json:
    """Wrap a schema of JSON, and an example."""
    return {"application/json": {"schema": schema, **({"example": example[0]} if example else {})}}


def codes(op: Any, verb: str, path: str) -> dict[int, list[str]]:
    """Return the codes that an operation may refuse with, by status."""
    told = "400 invalid_request, 403 forbidden, 421 misdirected_request, 431 invalid_request, 500 internal_error"
    if not op.open:
        told += (", 401 unauthenticated, 403 tenant_mismatch, 429 rate_limit_exceeded, 503 overloaded, "
                 "503 rate_limiter_unavailable, 503 issuer_unavailable")
    told += ", 503 database_unavailable" if op.open or op.kind != "B" else ""
    told += ", 503 receipt_ledger_unavailable" if op.kind == "W" else ""
    told += ", 400 invalid_cursor" if {"cursor", "since_receipt_id"} & {*op.takes.__struct_fields__} else ""
    told += ", 404 not_found" if "{" in path else ""
    if verb != "GET":
        told += ", 400 payload_too_deep, 408 request_timeout, 413 payload_too_large, 415 unsupported_media_type"
    refusals = [refusal.split() for refusal in (told + REFUSALS.get(op.name, "")).split(", ")]
    return {status: names for status in STATUS if (names := [code for its, code in refusals if int(its) == status])}


def refused(op: Any, verb: str, path: str) -> Json:
    """Describe the refusals of an operation."""
    return {str(status): {
        "description": STATUS[status], **HEADERS.get(status, {}),
        "content": content({"allOf": [ref("Problem"), {"properties": {"error": {"enum": sorted(names)}}}]})}
        for status, names in codes(op, verb, path).items()}


class Served:
    """A document at a path of its own, made when it is first asked for."""

    def __init__(self, make: Callable[[], tuple[bytes, Headers]], kind: bytes, send: Send) -> None:
        self.made, self.kind, self.send = cache(make), (b"content-type", kind), send

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer GET and HEAD."""
        if scope["method"] in ("GET", "HEAD"):
            text, more = self.made()
            return await self.send(send, scope, 200, text, more, self.kind)
        no = f"{scope['method']} is not for {scope['path']}"
        problem = {"error": "method_not_allowed", "message": no, "detail": no, "allow": ["GET", "HEAD"]}
        await self.send(send, scope, 405, msgspec.json.encode(problem), [(b"allow", b"GET, HEAD")])


def routes(operations: Collection[Any], version: str, send: Send) -> list[Route]:
    """Return the routes of the document and of the page that shows it; neither needs a credential."""
    return [Route("/openapi.json", Served(lambda: (document(operations, version), []), b"application/json", send)),
            Route("/docs", Served(page, b"text/html; charset=utf-8", send))]


def page() -> tuple[bytes, Headers]:
    """Return the page; it may run its own script and style, by their hashes, ask this gate, and do nothing else."""
    text = files("asyncgate.parts.faces").joinpath("docs.html").read_bytes()
    style, script = (b" ".join(
        b"'sha256-%b'" % base64.b64encode(hashlib.sha256(inside).digest())
        for inside in re.findall(b"<%b>(.*?)</%b>" % (tag, tag), text, re.DOTALL)) for tag in (b"style", b"script"))
    return text, [(b"content-security-policy", b"default-src 'none'; style-src %b; script-src %b; connect-src 'self'; "
                   b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'" % (style, script))]
