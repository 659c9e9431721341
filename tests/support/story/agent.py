"""The agent of the story in the Python client: a JSON line for each command, a JSON line for each answer."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from asyncgate.clients import SyncGate

gates: dict[Any, SyncGate] = {}


def submit(gate: SyncGate, type: str, payload: Any = None, **told: Any) -> Any:
    handle = gate.submit(type, payload, **told)
    return {"task_id": handle.task_id, "differs": handle.payload_differs}


def first(gate: SyncGate, task_id: str, held: bool = False, progress: bool = False) -> Any:
    for task in gate.handle(task_id).updates():
        if (held and task.held) or (progress and task.progress and task.progress.get("checkpoint")):
            return task
    return None


def each(gate: SyncGate, operation: str, most: int = 1000, **fields: Any) -> Any:
    return [item for item, _ in zip(gate.each(operation, **fields), range(most), strict=False)]


VERBS: dict[str, Any] = {
    "submit": submit, "first": first, "each": each,
    "result": lambda gate, task_id, timeout=None: gate.handle(task_id).result(timeout),
    "cancel": lambda gate, task_id: gate.handle(task_id).cancel("the story says so"),
    "updates": lambda gate, task_id: [task.status for task in gate.handle(task_id).updates()],
    "stream": lambda gate, task_id, after=0: list(gate.handle(task_id).stream(after)),
    "call": lambda gate, operation, **fields: gate.call(operation, **fields),
}


def do(verb: str, url: str | None = None, credential: str | None = None, patience: float = 10, **told: Any) -> Any:
    """Do one command."""
    if (url, credential) not in gates:
        gates[url, credential] = SyncGate(url, credential, agent_id="ada",
                                   patience_seconds=patience).__enter__()
    return VERBS[verb](gates[url, credential], **told)


for line in sys.stdin:
    try:
        answer: Any = {"value": do(**json.loads(line))}
    except Exception as problem:
        answer = {"error": type(problem).__name__, "code": getattr(problem, "code", None),
                  "status": getattr(problem, "status", None), "told": getattr(problem, "error", None),
                  "text": str(problem)}
    print(msgspec.json.encode(answer).decode(), flush=True)
