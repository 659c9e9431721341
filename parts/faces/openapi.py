"""The OpenAPI document of the REST interface, made from the table of operations, and the page that shows it.

Texts come from the Engine's docstrings; schemas, field descriptions, examples and an operation's own refusals come
from the Structs of the wire.  The refusals that follow from method and path are listed here.
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

from asyncgate.parts.model import wire
from asyncgate.parts.model.clauses import remove_clause_numbers
from asyncgate.parts.model.connection import Headers
from asyncgate.parts.model.content import JsonObject

TAGS = {"Tasks": ("tasks", "Create tasks and get their results."),
        "Leases": ("leases lease", "Lease tasks, renew the leases, and end the tasks."),
        "Receipts and obligations": ("receipts obligations bootstrap",
                                     "Read receipts and open obligations, and acknowledge receipts."),
        "Schedules": ("schedules", "Reports from schedulers; the gate raises an anomaly if they stop."),
        "Administration": ("tenants limits keys credentials audit",
                           "Tenants, keys, limits and the audit log."),
        "Ledger": ("seals export import archive", "Seal, export, import and archive receipts."),
        "Gate": ("config health whoami", "The gate's health and configuration, and the caller's identity.")}

# The meaning of each HTTP status, and its headers.
STATUS = {
    400: "The request breaks a rule; the message names the field and the rule.",
    401: "The credential is missing or invalid.",
    403: "This credential does not permit the call.",
    404: "This tenant has nothing with that id.",
    408: "The body did not arrive in time.",
    409: "The current state forbids it; `reason` says why a lease is lost.",
    413: "The request, or one part of it, is too large; nothing was written.",
    415: "Send the body as `application/json`, without content-encoding.",
    421: "The gate does not answer for this Host.", 431: "Path, query and headers are too large.",
    429: "A limit is reached, too many calls wait, or too many keys were wrong; repeat after `Retry-After`.",
    500: "A bug in the gate; its log has the details.",
    503: "The database or the store of the rate limits does not answer, so the outcome may be unknown, or the "
         "gate is overloaded; repeat after `Retry-After`."}
RETRY_AFTER = {"headers": {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}}
CHALLENGE = {"headers": {"WWW-Authenticate": {"schema": {"type": "string"}, "description": "The scheme to use."}}}
HEADERS = {401: CHALLENGE, 429: RETRY_AFTER, 503: RETRY_AFTER}

API_DESCRIPTION = """A durable task gate for agents that forget: hand over work, any worker leases it, nothing is lost
when either side dies, and one call shows a principal what it is owed, with the proof.

- Send the credential as `Authorization: Bearer …` or as `X-API-Key`, never in the URL.
- Unknown fields are ignored with a warning, and null means absent.  Times are RFC 3339, durations are seconds.
- A credential without a principal lets the request name one: in the body, or as `principal_id` in the query.
- Every refusal has a stable code in `error` and a sentence in `message`; `detail` repeats it."""

SendAnswer = Callable[..., Awaitable[None]]
NAME_SCHEMA, NULL_SCHEMA = msgspec.json.schema(wire.Name), {"type": "null"}


def build_document(operations: Collection[Any], version: str) -> bytes:
    """Return the OpenAPI 3.1 document of these operations, as JSON."""
    schemas, paths = build_schemas(operations), dict[str, JsonObject]()
    for op in operations:
        for number, (verb, path) in enumerate(op.rest):
            name = f"{op.name}_at_{'_'.join(re.findall('/([a-z][a-z_-]+)', path))}" if number else op.name
            paths.setdefault(path, {})[verb.lower()] = describe_operation(op, name, verb, path, schemas)
    responses = share_refusals(paths)
    schemas = find_schemas([paths, responses], schemas)
    return msgspec.json.encode({
        "openapi": "3.1.0", "info": {
            "title": "AsyncGate", "version": version, "description": API_DESCRIPTION,
            "contact": {"name": "The AsyncGate founders"}, "license": {"name": "MIT", "identifier": "MIT"}},
        "servers": [{"url": "/"}], "tags": [{"name": name, "description": text} for name, (_, text) in TAGS.items()],
        "security": [{"bearer": []}, {"api_key": []}], "paths": dict(sorted(paths.items())),
        "components": {"schemas": dict(sorted(schemas.items())), "responses": responses, "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"},
            "api_key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}}}})


def share_refusals(paths: dict[str, JsonObject]) -> dict[str, JsonObject]:
    """Move the refusals out of the operations, which refer to them: many operations have the same ones.

    Each is named by its status and by the codes that not all refusals of this status have.
    """
    places = [(responses, status) for item in paths.values() for method in item.values()
              for responses in [method["responses"]] for status in responses if status[0] in "45"]
    codes = {status: [list_response_codes(responses[of]) for responses, of in places if of == status]
             for status in {status for _, status in places}}
    shared: dict[str, JsonObject] = {}
    for responses, status in places:
        own = sorted(list_response_codes(responses[status]) - frozenset.intersection(*codes[status]))
        name = f"Refusal{status}{'_or_'.join(own).title().replace('_', '')}"
        shared[name], responses[status] = responses[status], {"$ref": f"#/components/responses/{name}"}
    return dict(sorted(shared.items()))


def list_response_codes(response: JsonObject) -> frozenset[str]:
    """Return the error codes of a refusal."""
    return frozenset(response["content"]["application/json"]["schema"]["allOf"][1]["properties"]["error"]["enum"])


def find_schemas(paths: Any, schemas: dict[str, JsonObject]) -> dict[str, JsonObject]:
    """Return the schemas that are referenced; fields in a path or query need none."""
    definitions: dict[str, JsonObject] = {}
    text = msgspec.json.encode(paths).decode()
    while names := {*re.findall(r"#/components/schemas/(\w+)", text)} & schemas.keys() - definitions.keys():
        definitions |= {name: schemas[name] for name in names}
        text = msgspec.json.encode([schemas[name] for name in names]).decode()
    return definitions


def build_schemas(ops: Collection[Any]) -> dict[str, JsonObject]:
    """Return the schemas of all requests and replies by name, with the required fields of requests."""
    takes, gives = ({name: clean_schema(schema) for name, schema in msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}")[1].items()} for kinds in (
            [wire.Requirements, *(op.takes for op in ops)], [wire.Problem, *(op.gives for op in ops)]))
    schemas = {"Name": NAME_SCHEMA | {"pattern": wire.PLAIN}} | gives | takes
    for op in ops:
        schema = schemas[op.takes.__name__]
        if op.reader.refuses:       # also in its nested objects, which no other request has
            for inner in (schema, *find_schemas(schema, schemas).values()):
                if "properties" in inner:
                    inner["additionalProperties"] = False
        schema["required"] = sorted({*schema["required"], *op.takes.needed})
        if requirements := schema["properties"].get("requirements"):
            requirements.pop("type", None)
            requirements["anyOf"] = [refer_to("Requirements"), NULL_SCHEMA]
    for schema in takes.values():   # an explicit null means absent; a default would make TypeScript require the field
        if "payload_pointer" in schema["properties"]:   # no generator knows "one of two": who has a pointer says null
            schema["required"] = sorted({*schema["required"], "payload"})
        for name in schema["properties"].keys() - {*schema["required"]}:
            schema["properties"][name] = allow_null_in(describe_default(schema["properties"][name]))
    return schemas


def describe_default(schema: JsonObject) -> JsonObject:
    """Move the default of a field into its description."""
    if "default" not in schema:
        return schema
    text = f"{schema.get('description', '')}; default {msgspec.json.encode(schema['default']).decode()}".lstrip("; ")
    return {name: part for name, part in schema.items() if name != "default"} | {"description": text}


def allow_null_in(schema: JsonObject) -> JsonObject:
    """Allow null as a value of a field."""
    inner = {name: part for name, part in schema.items() if name not in ("default", "description")}
    free = not inner or "anyOf" in inner or "null" in inner.get("type", "")
    return schema if free else {**{name: schema[name] for name in schema.keys() - inner}, "anyOf": [inner, NULL_SCHEMA]}


def clean_schema(schema: Any) -> Any:
    """Correct a schema: sets may have duplicates, ids have no empty default, choices are strings.

    Also adapt it to client generators: no null as a default, and no type where any JSON is accepted.
    """
    if not isinstance(schema, dict):
        return [clean_schema(part) for part in schema] if isinstance(schema, list) else schema
    name = NAME_SCHEMA.items() <= schema.items()
    kind = schema.get("type")       # one of several types: client generators do not know that, so any value is accepted
    out = {"uniqueItems", *(NAME_SCHEMA if name else ()), *(["default"] if schema.get("default") in ("", None) else ()),
           *(["type"] if isinstance(kind, list) and len({*kind} - {"null"}) > 1 else ())}
    kept = {name: clean_schema(part) for name, part in schema.items() if name not in out}
    if isinstance(text := kept.get("description"), str):
        kept["description"] = remove_clause_numbers(text)
    if wire.TAGS in kept.get("pattern", ""):
        kept["pattern"] = kept["pattern"].replace(wire.TAGS, "")    # JavaScript reads them with a flag only
    if kept.get("type") == "object" and not {"properties", "additionalProperties"} & kept.keys():
        kept["additionalProperties"] = True     # else a type for TypeScript is an object without any member
    return kept | (refer_to("Name") if name else {"type": "string"} if "enum" in schema else {})


def refer_to(name: str) -> JsonObject:
    """Return a reference to a schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def describe_operation(op: Any, name: str, verb: str, path: str, schemas: dict[str, JsonObject]) -> JsonObject:
    """Describe one method and path of an operation."""
    request, answer = op.takes.example
    carried = re.findall(r"{(\w+)}", path)
    whole, reply = schemas[op.takes.__name__], op.gives.__name__
    [content] = wrap_content(refer_to(reply), answer).values()
    method: JsonObject = {
        "operationId": name, "summary": (summary := remove_clause_numbers(op.summary)),
        "description": remove_clause_numbers(op.text.strip()) or summary,
        "tags": [tag_of(op, path)],
        "parameters": [describe_parameter(field, "path", whole, request) for field in carried],
        "responses": {"200": {"description": schemas[reply]["description"],
                              "content": {getattr(op.gives, "media", "application/json"): content}},
                      **({"204": {"description": op.nothing}} if op.nothing else {}),
                      **{str(status): {
                          "description": STATUS[status], **HEADERS.get(status, {}),
                          "content": wrap_content({"allOf": [
                              refer_to("Problem"), {"properties": {"error": {"enum": sorted(set(names))}}}]})}
                         for status, names in list_codes(op, verb, path).items()}}, "x-roles": op.roles,
        "x-scopes": sorted(op.scope.split())}
    if verb == "GET":
        asks = [field for field in whole["properties"] if field not in carried]
        method["parameters"] += [describe_parameter(field, "query", whole, request) for field in asks]
    else:
        whole, rest = schemas[op.takes.__name__], op.takes.__name__ + ("Body" if carried else "")
        schemas[rest] = {
            **whole, "title": rest, "required": [field for field in whole["required"] if field not in carried],
            "properties": {field: schema for field, schema in whole["properties"].items() if field not in carried}}
        sent = {field: value for field, value in request.items() if field not in carried}
        method["requestBody"] = {"content": wrap_content(refer_to(rest), sent),
                                 "required": bool(schemas[rest]["required"])}
    return method | ({"security": []} if op.open else {}) | ({"deprecated": True} if op.successor else {})


def tag_of(op: Any, path: str) -> str:
    """Return the tag of an operation; all operations for workers alone belong to leases, whatever their path."""
    word = path.removeprefix("/v1").split("/")[1]
    tag = next((name for name, (words, _) in TAGS.items() if word in words.split()), "Gate")
    return "Leases" if tag == "Tasks" and "agent" not in op.roles else tag


def describe_parameter(name: str, where: str, whole: JsonObject, example: JsonObject) -> JsonObject:
    """Describe a field in the path or the query; neither can be null."""
    schema = dict(whole["properties"][name])
    for choice in schema.pop("anyOf", []):
        schema = (choice if choice.get("type") != "null" else {}) | schema
    text = {"description": inner} if (inner := schema.pop("description", "")) else {}
    schema = {key: part for key, part in schema.items() if (key, part) != ("default", None)}
    parameter = {"name": name, "in": where, "required": where == "path" or name in whole["required"], "schema": schema}
    return parameter | text | ({"example": example[name]} if name in example else {})


def wrap_content(schema: JsonObject, *example: JsonObject) -> JsonObject:
    """Wrap a JSON schema and an example as content."""
    return {"application/json": {"schema": schema, **({"example": example[0]} if example else {})}}


def list_codes(op: Any, verb: str, path: str) -> dict[int, list[str]]:
    """Return the error codes of an operation, by status."""
    entries = "400 invalid_request, 403 forbidden, 421 misdirected_request, 431 invalid_request, 500 internal_error"
    if not op.open:
        entries += (", 401 unauthenticated, 403 tenant_mismatch, 429 rate_limit_exceeded, 503 overloaded, "
                    "503 rate_limiter_unavailable, 503 issuer_unavailable")
    entries += ", 503 database_unavailable" if op.open or op.kind != "B" else ""
    entries += ", 503 receipt_ledger_unavailable" if op.kind == "W" else ""
    entries += ", 400 invalid_cursor" if {"cursor", "since_receipt_id"} & {*op.takes.__struct_fields__} else ""
    entries += ", 404 not_found" if "{" in path else ""
    if verb != "GET":
        entries += ", 400 payload_too_deep, 408 request_timeout, 413 payload_too_large, 415 unsupported_media_type"
    refusals = [(int(status), code) for status, code in (entry.split() for entry in entries.split(", "))]
    refusals += [(kind.status, kind.code) for kind in op.takes.refusals]
    return {status: names for status in STATUS if (names := [code for its, code in refusals if its == status])}


class ServedDocument:
    """A document at a path of its own, built on the first request."""

    def __init__(self, make: Callable[[], tuple[bytes, Headers]], kind: bytes, send: SendAnswer) -> None:
        self.made, self.kind, self.send = cache(make), (b"content-type", kind), send

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer GET and HEAD."""
        if scope["method"] in ("GET", "HEAD"):
            text, more = self.made()
            return await self.send(send, scope, 200, text, more, self.kind)
        message = f"{scope['path']} does not support {scope['method']}"
        problem = {"error": "method_not_allowed", "message": message, "detail": message, "allow": ["GET", "HEAD"]}
        await self.send(send, scope, 405, msgspec.json.encode(problem), [(b"allow", b"GET, HEAD")])


def make_routes(operations: Collection[Any], version: str, send: SendAnswer) -> list[Route]:
    """Return the routes of the document and its page; neither needs a credential."""
    made = ServedDocument(lambda: (build_document(operations, version), []), b"application/json", send)
    return [Route("/openapi.json", made),
            Route("/docs", ServedDocument(render_page, b"text/html; charset=utf-8", send))]


def render_page() -> tuple[bytes, Headers]:
    """Return the page; its policy allows only its own script and style, by hash, and requests to this gate."""
    text = files("asyncgate.parts.faces").joinpath("docs.html").read_bytes()
    style, script = (b" ".join(
        b"'sha256-%b'" % base64.b64encode(hashlib.sha256(inside).digest())
        for inside in re.findall(b"<%b>(.*?)</%b>" % (tag, tag), text, re.DOTALL)) for tag in (b"style", b"script"))
    return text, [(b"content-security-policy", b"default-src 'none'; style-src %b; script-src %b; connect-src 'self'; "
                   b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'" % (style, script))]
