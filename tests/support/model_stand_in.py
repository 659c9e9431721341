"""A stand-in for an OpenAI-compatible endpoint, in a process of its own: `python model_stand_in.py` prints its address.

What it answers is scripted by what it is asked: the payload of the task (in the first user message) holds `script`, a
list with one entry for each answer; for other payloads the script is the second argument.  It is strict: a request that
a real endpoint might refuse is refused with 400.
An entry may hold: `call` (tools to call), `say` (text; {last} is the last tool's result, {known} the opening),
`finish` (a call of the tool finish), `status` with `times` and `headers` (refuse so often first), `raw` with `times`
(a body that is not a completion), `hang` (no answer until the client leaves), `tokens`, `reason` (finish_reason).
"""

from __future__ import annotations

import json
import re
import select
import socket
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-stand-in-1234567890"
KNOWN = {"messages", "model", "tools", "temperature"}
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
Json = dict[str, Any]


class Wrong(Exception):
    """The request is not what an endpoint takes."""


def insist(good: Any, says: str) -> None:
    """Refuse the request unless something holds."""
    if not good:
        raise Wrong(says)


def check_tools(tools: Any) -> set[str]:
    """Look at the tools of a request; return their names."""
    insist(isinstance(tools, list) and tools, "tools: a list with something in it")
    for tool in tools:
        insist(set(tool) == {"type", "function"} and tool["type"] == "function", "tools: of type function")
        function = tool["function"]
        insist(set(function) == {"name", "description", "parameters"}, "function: name, description, parameters")
        insist(NAME.fullmatch(function["name"]), f"function: the name {function['name']!r}")
        insist(function["parameters"].get("type") == "object", "parameters: a schema of an object")
    names = [tool["function"]["name"] for tool in tools]
    insist(len(set(names)) == len(names), "tools: a name twice")
    return set(names)


def check_calls(message: Json) -> list[str]:
    """Look at an answer in the conversation; return the ids of its calls."""
    insist(set(message) <= {"role", "content", "tool_calls"}, "assistant: an unknown member")
    calls = message.get("tool_calls", [])
    insist(calls or isinstance(message["content"], str), "assistant: neither text nor calls")
    for call in calls:
        insist({"id", "type", "function"} <= set(call) and call["type"] == "function", "tool_calls: id, type, function")
        insist(isinstance(json.loads(call["function"]["arguments"]), dict), "tool_calls: arguments of an object")
    return [call["id"] for call in calls]


def check_messages(messages: Any) -> None:
    """Look at a conversation: who speaks when, and that each call is answered in its turn."""
    insist([message["role"] for message in messages[:2]] == ["system", "user"], "messages: system and user first")
    insist(all(isinstance(message["content"], str) for message in messages[:2]), "messages: content is a text")
    waiting: list[str] = []
    for message in messages[2:]:
        if message["role"] == "tool":
            insist(waiting and message["tool_call_id"] == waiting.pop(0), "tool: an answer to no call")
            insist(isinstance(message["content"], str), "tool: content is a text")
        else:
            insist(message["role"] == "assistant" and not waiting, "messages: a call without an answer")
            waiting = check_calls(message)
    insist(not waiting, "messages: a call without an answer")


def section(messages: list[Json], name: str) -> str:
    """Return what stands between the marks of a section."""
    for message in messages[:2]:
        if match := re.search(rf"\[begin {name} ([0-9a-f]{{16}})\]\n(.*)\n\[end {name} \1\]", message["content"], re.S):
            return match[2]
    raise Wrong(f"there is no section {name}")


class Endpoint(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    seen: list[Json] = []
    left: Counter[str] = Counter()
    lock = threading.Lock()

    def do_GET(self) -> None:
        """Tell what was asked so far."""
        with self.lock:
            self._send(200, {"seen": self.seen})

    def do_POST(self) -> None:
        """Answer one request."""
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            asked = self._asked(body)
            entry, at = self._entry(asked["messages"])
        except (Wrong, KeyError, TypeError, ValueError) as wrong:
            note: Json = {"wrong": f"{type(wrong).__name__}: {wrong}"}
            with self.lock:
                self.seen.append(note)
            return self._send(400, {"error": {"message": note["wrong"], "type": "invalid_request_error"}})
        note = {"step": at, "messages": asked["messages"], "tools": asked.get("tools", [])}
        with self.lock:
            self.seen.append(note)
        self._play(entry, asked["messages"], note)

    def _asked(self, body: bytes) -> Json:
        insist(self.path == "/v1/chat/completions", f"no such path: {self.path}")
        insist(self.headers["content-type"] == "application/json", "content-type")
        insist(self.headers["authorization"] == f"Bearer {KEY}", "authorization")
        asked: Json = json.loads(body)
        insist(set(asked) <= KNOWN, f"an unknown member: {set(asked) - KNOWN}")
        insist(asked["model"] == "stand-in", "model")
        check_messages(asked["messages"])
        if "tools" in asked:
            check_tools(asked["tools"])
        return asked

    def _entry(self, messages: list[Json]) -> tuple[Json, int]:
        """Find the entry of the script that is next; earlier tries of it count."""
        payload = json.loads(section(messages, "payload"))
        script = payload["script"] if "script" in payload else json.loads(sys.argv[2])
        at = sum(message["role"] == "assistant" for message in messages)
        if "[earlier steps were dropped" in json.dumps(messages):
            at = len(script) - 1
        with self.lock:
            key = json.dumps([script, at])
            self.left[key] += 1
            tried = self.left[key]
        entry: Json = script[min(at, len(script) - 1)]
        if tried > entry.get("times", tried):
            entry = {name: value for name, value in entry.items() if name not in ("status", "raw", "hang")}
        return entry, at

    def _play(self, entry: Json, messages: list[Json], note: Json) -> None:
        if entry.get("hang"):
            note["hanging"] = True
            select.select([self.connection], [], [], 60)
            note["left"] = not self.connection.recv(1, socket.MSG_PEEK)
            self.close_connection = True
        elif "status" in entry:
            self._send(entry["status"], {"error": {"message": entry.get("message", "not now"),
                                                   "code": entry.get("code")}}, entry.get("headers", {}))
        elif "raw" in entry:
            self._send(200, entry["raw"])
        else:
            self._send(200, self._completion(entry, messages))

    def _completion(self, entry: Json, messages: list[Json]) -> Json:
        last = next((message["content"] for message in reversed(messages) if message["role"] == "tool"), "")
        text = entry.get("say")
        if isinstance(text, str):
            text = text.replace("{last}", last).replace("{known}", messages[0]["content"] + messages[1]["content"])
        wanted = entry.get("call", [])
        if "finish" in entry:
            wanted = [*wanted, {"name": "finish", "arguments": entry["finish"]}]
        calls = [{"id": f"call_{len(messages)}_{at}", "type": "function", "function": {
            "name": call["name"], "arguments": call["text"] if "text" in call else json.dumps(call["arguments"])}}
            for at, call in enumerate(wanted)]
        message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        reason = entry.get("reason", "tool_calls" if calls else "stop")
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": entry.get("tokens", 100)}
        return {"id": "chatcmpl-1", "object": "chat.completion", "model": "stand-in", "usage": usage,
                "choices": [{"index": 0, "message": message, "finish_reason": reason}]}

    def _send(self, status: int, told: Any, headers: Json | None = None) -> None:
        content = told.encode() if isinstance(told, str) else json.dumps(told).encode()
        self.send_response(status)
        for name, value in {"content-type": "application/json", "content-length": str(len(content)),
                            **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if sys.argv[1:] else 0), Endpoint)
    print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()
