"""Each declared type as a tool of MCP: its arguments are the payload, and its answer is a durable task.

The name of a tool is that of its type in the letters that every host takes, so `ocr.scan` is `ocr_scan`; types that
would share a name get one with a part of their hash.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from msgspec import Raw

from asyncgate import Engine
from asyncgate.extras.types.rules import Declared, Known, require_typed
from asyncgate.parts.model.content import JsonObject, decode_json, encode_json, sha256

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncgate import Caller, Operation

STRANGE = re.compile(r"[^a-zA-Z0-9_-]")
LONGEST_NAME, HASH_LETTERS = 64, 8
NEXT = "The answer is the task, which lives on if this call is cut off. If it has not ended, call get_task."


class DeclaredTools:
    """The tools of declared types at one gate."""

    def __init__(self, engine: Engine, operations: Mapping[str, Operation]) -> None:
        self.engine, self.run_task = engine, operations.get("run_task")
        self.taken = frozenset(operations)

    async def list_tools(self, caller: Caller) -> list[Raw]:
        """Return the tools that a caller may use, in JSON."""
        named = await self.name_types(caller)
        return [Raw(encode_json(describe_type_tool(name, declared))) for name, declared in sorted(named.items())]

    async def find_arguments(self, caller: Caller, name: str, arguments: Raw) -> Raw | None:
        """Return the arguments of `run_task` that a call of a tool means; None if there is no such tool."""
        if (declared := (await self.name_types(caller)).get(name)) is None:
            return None
        inner = takes_members(declared)
        payload = arguments if inner else Raw(encode_json(decode_json(arguments).get("payload")))
        return Raw(encode_json({"type": declared.row.type, "payload": payload}))

    async def name_types(self, caller: Caller) -> dict[str, Declared]:
        """Return the declared types that a caller may create, by the names of their tools."""
        if self.run_task is None or not self.run_task.fits(caller):
            return {}
        named = name_tools(await require_typed(self.engine).know(caller.tenant_id), self.taken)
        return {name: declared for name, declared in named.items()
                if caller.task_types is None or declared.row.type in caller.task_types}


def name_tools(known: Known, taken: frozenset[str]) -> dict[str, Declared]:
    """Return the declared types by the names of their tools."""
    alike = defaultdict[str, list[Declared]](list)
    for declared in known.types.values():
        alike[STRANGE.sub("_", declared.row.type)[:LONGEST_NAME]].append(declared)
    named: dict[str, Declared] = {}
    for name, several in alike.items():
        plain = len(several) == 1 and name not in taken and not name.startswith("asyncgate")
        for declared in several:
            digest = sha256(declared.row.type)[:HASH_LETTERS]
            named[name if plain else f"{name[:LONGEST_NAME - HASH_LETTERS - 1]}_{digest}"] = declared
    return named


def takes_members(declared: Declared) -> bool:
    """Whether the payload of a type is an object, whose members are the arguments of the tool."""
    return declared.payload is not None and (
        declared.payload.schema.get("type") == "object" or (
            "type" not in declared.payload.schema and "properties" in declared.payload.schema))


def describe_type_tool(name: str, declared: Declared) -> JsonObject:
    """Describe the tool of a type."""
    schema: dict[str, Any] = declared.payload.schema if declared.payload is not None else {}
    if takes_members(declared):
        takes = {**schema, "type": "object"}
    else:
        inner = {keyword: held for keyword, held in schema.items() if keyword not in ("$defs", "$schema")}
        takes = {"type": "object", "properties": {"payload": inner}, "required": ["payload"],
                 **({"$defs": schema["$defs"]} if "$defs" in schema else {})}
    words = declared.row.description.strip() or f"Run a task of the type {declared.row.type}."
    return {"name": name, "description": f"{words} {NEXT}",
            "inputSchema": {keyword: held for keyword, held in takes.items() if keyword != "$schema"},
            "annotations": {"readOnlyHint": False, "destructiveHint": False, "idempotentHint": False,
                            "openWorldHint": True}}
