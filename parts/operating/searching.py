"""search_tasks: tasks by a member of their payload or by a label, which no index holds: so each call looks at a few."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec.structs import replace

from asyncgate import Caller, Engine, Operation
from asyncgate.parts.model import wire, wire_operating
from asyncgate.parts.model.content import decode_json, encode_json
from asyncgate.parts.operating.listing import list_by_age, read_filters

MOST_SEARCHED = 2000        # tasks that one call looks at
LARGE_BYTES = 1 << 15       # of a payload: after one that is as large, other requests have their turn


async def search_tasks(engine: Engine, caller: Caller, ask: wire_operating.SearchTasks) -> wire_operating.FoundTasks:
    """Search tasks by a member of their payload or by a label, newest first: an agent's own, or any for an admin.

    Each call looks at up to 2,000 of the tasks that the other filters leave, and stops once it has found limit of them
    or a few more: repeat it with next_cursor to look further, also if it has found none.
    """
    of = replace(read_filters(engine, caller, ask), limit=engine.limit_page(MOST_SEARCHED) + 1)
    tasks, searched, most = list[wire.TaskRecord](), 0, engine.limit_page(ask.limit)
    while True:
        page = await list_by_age(engine, caller, ask, of)
        for task in page.tasks:
            if is_meant(task, ask):
                tasks.append(task)
            if len(bytes(task.payload)) >= LARGE_BYTES:
                await asyncio.sleep(0)
        searched, ask = searched + len(page.tasks), replace(ask, cursor=page.next_cursor)
        if page.next_cursor is None or len(tasks) >= most or searched >= MOST_SEARCHED:
            return wire_operating.FoundTasks(tasks, page.next_cursor, page.cursor, searched)


def is_meant(task: wire.TaskRecord, ask: wire_operating.SearchTasks) -> bool:
    """Whether a task has what is searched for."""
    if ask.tag is not None and not has_tag(decode_json(bytes(task.requirements)), ask.tag):
        return False
    if ask.payload is None:
        return True
    path, _, wanted = ask.payload.partition(":")
    return is_like(find_member(decode_json(bytes(task.payload)), path.split(".")), wanted)


def find_member(value: Any, path: list[str]) -> Any:
    """Return a member of an object by the names that lead to it; None if there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def is_like(value: Any, wanted: str) -> bool:
    """Whether a value is written like a text; of a list, whether one of its items is."""
    if isinstance(value, list):
        return any(is_like(item, wanted) for item in value)
    return value is not None and wanted == (value if isinstance(value, str) else encode_json(value).decode())


def has_tag(requirements: Any, wanted: str) -> bool:
    """Whether requirements have a label: one of a list, or a member of an object, as name or as name:value."""
    tags = find_member(requirements, ["tags"])
    name, _, value = wanted.partition(":")
    return is_like(tags, wanted) or (isinstance(tags, dict) and name in tags and value in ("", str(tags[name])))


OPERATIONS = [
    Operation(search_tasks, "GET /v1/search", "a A", "tasks:read", "R"),
]
