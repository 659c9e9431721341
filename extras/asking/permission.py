"""`asyncgate permission-prompt`: the tool that a model's host asks for permission, and a person answers at the gate.

Claude Code calls it as `--permission-prompt-tool` says: with the name of a tool and its input.  The answer is a text
with JSON: `{"behavior": "allow", "updatedInput": …}` or `{"behavior": "deny", "message": …}`.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import click
import msgspec

from asyncgate import __version__
from asyncgate.clients import http
from asyncgate.clients.worker.asking import read_principal
from asyncgate.commands import calling
from asyncgate.commands.profiles import Connection

MOST_CHARACTERS = 16_000        # that a person is shown: what is not shown is not allowed
WAIT_SECONDS = 30.0
AWAY_SECONDS = 1.0              # between two calls of a gate that is away
REASON = {"type": "object", "properties": {"reason": {"type": "string", "title": "Reason"}}}
TOOL = {"type": "object", "required": ["tool_name", "input"], "properties": {
    "tool_name": {"type": "string", "description": "the tool that is to be called"},
    "input": {"type": "object", "description": "what it is to be called with"},
    "tool_use_id": {"type": "string", "description": "the call"}}}


class Prompts:
    """Asks for each permission under the lease of one task, which the worker around the host keeps alive."""

    def __init__(self, gate: http.Http, under: Mapping[str, str], to: dict[str, str] | None) -> None:
        self.gate, self.under, self.to = gate, under, to
        self.calls: Counter[str] = Counter()

    def ask(self, tool: str, given: Any) -> dict[str, Any]:
        """Return whether a tool may be called, when somebody has said so."""
        shown = msgspec.json.format(msgspec.json.encode(given)).decode()
        if len(shown) > MOST_CHARACTERS:
            return deny(f"the input has {len(shown)} characters, and who is asked is shown {MOST_CHARACTERS}: "
                        "make it smaller")
        digest = hashlib.sha256(msgspec.json.encode([tool, given], order="sorted")).hexdigest()[:32]
        self.calls[digest] += 1
        # A host that was started again asks for the same calls in the same order, and gets the answers of before.
        key = f"{tool[:80]} {digest} {self.calls[digest]}"
        asks = {"key": key, "message": f"May {tool} be called with this?\n\n{shown}", "schema": REASON, "to": self.to}
        try:
            answer = self._call("request_input", **self.under, **asks, keep_lease=True)["input"]
            while answer is None:
                inputs = self._call("list_inputs", task_id=self.under["task_id"], worker_id=self.under["worker_id"],
                                    wait_seconds=WAIT_SECONDS)["inputs"]
                answer = next((read_answer(row) for row in inputs if row["key"] == key and row["state"] != "open"),
                              None)
        except http.Refusal as refusal:
            return deny(f"nobody could be asked: {refusal}")
        return make_decision(answer, given)

    def _call(self, operation: str, **fields: Any) -> dict[str, Any]:
        """Call the gate until it answers."""
        while True:
            try:
                return dict(self.gate.call(operation, **fields))
            except http.Unreachable:
                time.sleep(AWAY_SECONDS)


def read_answer(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of a question, as an offer has it."""
    return {"action": row["state"], "content": row["content"], "by": row["answered_by"]}


def make_decision(answer: Mapping[str, Any], given: Any) -> dict[str, Any]:
    """Return what a host wants to be told of an answer."""
    if answer["action"] == "accept":
        return {"behavior": "allow", "updatedInput": given}
    if answer["action"] != "decline":
        return deny("nobody has decided")
    reason = answer["content"].get("reason") if isinstance(answer["content"], dict) else None
    return deny(f"declined by {answer['by']['kind']} {answer['by']['id']}" + (f": {reason}" if reason else ""))


def deny(message: str) -> dict[str, Any]:
    """Return what keeps a host from calling a tool."""
    return {"behavior": "deny", "message": message}


# MCP over standard input and output, by hand: a host waits five seconds for its tools, and the SDK takes two of them.


def answer_message(prompts: Prompts, message: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the answer to a message, or None if it wants none."""
    params, id = message.get("params") or {}, message.get("id")
    if id is None:
        return None
    result: dict[str, Any] | None = None
    if message.get("method") == "initialize":
        result = {"protocolVersion": params.get("protocolVersion"), "capabilities": {"tools": {}},
                  "serverInfo": {"name": "asyncgate", "version": __version__}}
    elif message.get("method") == "ping":
        result = {}
    elif message.get("method") == "tools/list":
        result = {"tools": [{"name": "approve", "description": "Ask a person whether a tool may be called.",
                             "inputSchema": TOOL}]}
    elif message.get("method") == "tools/call" and params.get("name") == "approve":
        given = params.get("arguments") or {}
        told = prompts.ask(str(given.get("tool_name")), given.get("input") or {})
        result = {"content": [{"type": "text", "text": msgspec.json.encode(told).decode()}]}
    if result is None:
        return {"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "there is one tool here: approve"}}
    return {"jsonrpc": "2.0", "id": id, "result": result}


def answer_lines(prompts: Prompts) -> None:
    """Answer each line of standard input, each in its own thread, until the host closes it."""
    def answer(line: bytes) -> None:
        if (told := answer_message(prompts, msgspec.json.decode(line))) is not None:
            with lock:
                sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
                sys.stdout.buffer.flush()
    lock = threading.Lock()
    for line in sys.stdin.buffer:
        threading.Thread(target=answer, args=(line,), daemon=True).start()


@click.command("permission-prompt")
@click.option("--task", "task_id", envvar="ASYNCGATE_TASK_ID", required=True, help="Default ASYNCGATE_TASK_ID.")
@click.option("--lease-id", envvar="ASYNCGATE_LEASE_ID", required=True, help="Default ASYNCGATE_LEASE_ID.")
@click.option("--worker-id", envvar="ASYNCGATE_WORKER_ID", required=True, help="Default ASYNCGATE_WORKER_ID.")
@click.option("--to", metavar="KIND:ID", help="Who is asked; default: the owner of the task.")
@calling.add_gate_options
def permission_prompt(at: Connection, task_id: str, lease_id: str, worker_id: str, to: str | None) -> None:
    """Serve the MCP tool `approve`, by which a host such as Claude Code asks a person before it calls a tool."""
    under = {"task_id": task_id, "lease_id": lease_id, "worker_id": worker_id}
    try:
        who = None if to is None else read_principal(to)
    except ValueError as wrong:
        raise calling.exit_with(f"--{wrong}", calling.EXIT_WRONG) from None
    with calling.connect_to_gate(at) as gate:
        answer_lines(Prompts(gate, under, who))
