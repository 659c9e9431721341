"""The OpenAPI document of declared types: a path for each, with its own payload and result, for generators of clients.

`POST /v1/types/ocr.scan/run` is `run_task` with the type in the path; `GET /v1/types/openapi.json` describes such a
path for each type that the credential may create, beside `get_task` and `cancel_task`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from copy import copy
from typing import Any
from urllib.parse import quote

from asyncgate import Operation, __version__
from asyncgate.extras.types.rules import Declared
from asyncgate.extras.types.schemas import Checker
from asyncgate.extras.types.tools import DeclaredTools
from asyncgate.parts.faces import openapi
from asyncgate.parts.faces.rest import Endpoint
from asyncgate.parts.model.content import JsonObject, decode_json

DOCUMENT_PATH, RUN_PATH = "/v1/types/openapi.json", "/v1/types/{type}/run"
BESIDE_RUN = ("get_task", "cancel_task")
UNNAMED = re.compile(r"\W", re.ASCII)


class PathReader:
    """Reads requests whose type is in the path, which replaces the one that stands here."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def body(self, body: bytes, *rest: Any) -> Any:
        """Read a body."""
        start, brace, members = body.partition(b"{")
        if not start.strip() and brace:
            body = b'{"type":"type"' + (b"" if members.lstrip().startswith(b"}") else b",") + members
        return self.reader.body(body, *rest)

    def __getattr__(self, name: str) -> Any:
        """Do all else as the reader does."""
        return getattr(self.reader, name)


def take_from_path(run_task: Operation) -> Operation:
    """Return the operation as it is called with the type in its path."""
    op = copy(run_task)
    op.reader = PathReader(run_task.reader)     # type: ignore[assignment]  # it reads the same requests
    return op


class TypesDocument(Endpoint):
    """Describes the types of the tenant to whoever may list them."""

    async def _perform(self, scope: Any, receive: Callable[[], Awaitable[Any]],
                       more: list[tuple[bytes, bytes]]) -> JsonObject:
        """Answer as list_types does whether the caller may have it, then with the document."""
        await super()._perform(scope, receive, more)
        caller, tools = scope["asyncgate.caller"], self.gate.typed_tools
        assert isinstance(tools, DeclaredTools)
        named = await tools.name_types(caller)
        beside = [op for name in BESIDE_RUN if (op := self.gate.operations.get(name)) is not None and op.fits(caller)]
        return describe_types(named, tools.run_task, beside)


def describe_types(named: Mapping[str, Declared], run_task: Operation | None, beside: list[Operation]) -> JsonObject:
    """Return the document of declared types by the names of their tools."""
    ops = [*beside, *([run_task] if run_task is not None else [])]
    document: JsonObject = decode_json(openapi.build_document(ops, __version__))
    document["info"]["title"] = "AsyncGate: declared types"
    run = document["paths"].pop(run_task.rest[0][1])["post"] if run_task is not None else {}
    schemas: dict[str, JsonObject] = document["components"]["schemas"]
    for name, declared in sorted(named.items()):
        path = f"/v1/types/{quote(declared.row.type, safe='')}/run"
        document["paths"][path] = {"post": describe_run(name, declared, run, schemas)}
    reached = openapi.find_schemas([document["paths"], document["components"]["responses"]], schemas)
    document["components"]["schemas"] = dict(sorted(reached.items()))
    return document


def describe_run(name: str, declared: Declared, run: JsonObject, schemas: dict[str, JsonObject]) -> JsonObject:
    """Describe the path of a type, and add its schemas."""
    title = "".join(word[:1].upper() + word[1:] for word in name.replace("-", "_").split("_")) + "Task"
    payload = add_schema(f"{title}Payload", declared.payload, schemas)
    result = add_schema(f"{title}Result", declared.result, schemas)
    ask, record, outcome = schemas["RunTask"], schemas["TaskRecord"], schemas["Outcome"]
    fields = {field: held for field, held in ask["properties"].items() if field != "type"}
    schemas[f"{title}Run"] = {**ask, "title": f"{title}Run", "required": ["payload"],
                              "properties": {**fields, "payload": payload}}
    schemas[f"{title}Outcome"] = {**outcome, "title": f"{title}Outcome", "properties": {
        **outcome["properties"], "result": {"anyOf": [result, {"type": "null"}]} if result else {}}}
    schemas[f"{title}Record"] = {**record, "title": f"{title}Record", "properties": {
        **record["properties"], "payload": payload,
        "result": {"anyOf": [openapi.refer_to(f"{title}Outcome"), {"type": "null"}]}}}
    words = declared.row.description.strip() or f"Run a task of the type {declared.row.type}."
    return {**run, "operationId": f"run_{name.replace('-', '_')}", "summary": words.split("\n")[0],
            "description": words, "parameters": [], "requestBody": {
                "content": openapi.wrap_content(openapi.refer_to(f"{title}Run")), "required": True},
            "responses": {**run["responses"], "200": {
                "description": "The task, with its result if it has ended.",
                "content": openapi.wrap_content(openapi.refer_to(f"{title}Record"))}}}


def add_schema(name: str, checker: Checker | None, schemas: dict[str, JsonObject]) -> JsonObject:
    """Add a declared schema, its $defs each by itself, and return a reference to it; any value, if none is declared."""
    if checker is None:
        return {}
    schema: JsonObject = checker.schema
    names = {f"#/$defs/{defined}": f"{name}_{UNNAMED.sub('_', defined)}" for defined in schema.get("$defs", {})}
    names["#"] = name
    for defined, held in schema.get("$defs", {}).items():
        schemas[names[f"#/$defs/{defined}"]] = point_to(held, names)
    own = {keyword: held for keyword, held in schema.items() if keyword not in ("$defs", "$schema")}
    schemas[name] = point_to(own, names)
    return openapi.refer_to(name)


def point_to(schema: Any, names: Mapping[str, str]) -> Any:
    """Return a schema whose references lead to where its parts are now."""
    if isinstance(schema, list):
        return [point_to(part, names) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {keyword: openapi.refer_to(names[held])["$ref"] if keyword == "$ref" and str(held) in names
            else point_to(held, names) for keyword, held in schema.items()}
