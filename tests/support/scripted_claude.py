"""The real Claude Code, with a model that wants one command to be run and repeats what came of it."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import install_beside

SDK = "claude-agent-sdk==0.2.189"       # its wheel has the program, 178 MB


class Script(ThreadingHTTPServer):
    """Speaks as the API of a model: it calls a tool, and when it is told what came of that, it repeats it.

    A call that was cut off it makes again.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.command, self.cut_off, self.asked = "", 0, 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def answer(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of an answer."""
        results = [json.dumps(part["content"]) for message in asked["messages"] if isinstance(message["content"], list)
                   for part in message["content"] if part.get("type") == "tool_result"]
        self.cut_off = sum("interrupted" in result for result in results)
        calls = len(results) == self.cut_off and any(tool["name"] == "Bash" for tool in asked.get("tools", ()))
        block: dict[str, Any] = {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": results[-1] if results else "nothing"}
        if calls:
            block = {"type": "tool_use", "id": f"toolu_{len(results) + 1}", "name": "Bash", "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps({"command": self.command})}
        usage = {"input_tokens": 1, "output_tokens": 1}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": asked["model"], "content": [],
                   "stop_reason": None, "stop_sequence": None, "usage": usage}
        stop = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
        return [{"type": "message_start", "message": message},
                {"type": "content_block_start", "index": 0, "content_block": block},
                {"type": "content_block_delta", "index": 0, "delta": delta}, {"type": "content_block_stop", "index": 0},
                {"type": "message_delta", "usage": usage, "delta": stop}, {"type": "message_stop"}]

    def surroundings(self, home: Path) -> dict[str, str]:
        """Return what leads the program to this model, and nowhere else."""
        return {"HOME": str(home), "ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": "sk-ant-nothing",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
                "MCP_CONNECTION_NONBLOCKING": "0", "CLAUDE_AGENT_SDK_SKIP_VERSION_CHECK": "1"}


class Answering(BaseHTTPRequestHandler):
    """A connection to the model."""

    protocol_version = "HTTP/1.1"
    server: Script

    def do_POST(self) -> None:
        """Answer with a stream of events."""
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.path.startswith("/v1/messages") or "count_tokens" in self.path:
            return self.reply(b'{"input_tokens": 1}', "application/json")
        self.server.asked += 1
        self.server.may_answer.wait()
        events = self.server.answer(asked)
        self.reply(b"".join(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), json.dumps(event).encode())
                            for event in events), "text/event-stream")

    def reply(self, body: bytes, type: str) -> None:
        """Send an answer."""
        self.send_response(200)
        self.send_header("content-type", type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *about: Any) -> None:
        """Say nothing."""


@pytest.fixture
def model() -> Iterator[Script]:
    """Serve the model."""
    with Script() as script:
        threading.Thread(target=script.serve_forever, daemon=True).start()
        yield script
        script.may_answer.set()
        script.shutdown()


@pytest.fixture(scope="session")
def claude_sdk(tools_cache: Path) -> Path:
    """Return a folder for PYTHONPATH with the Claude Agent SDK and its program, installed once."""
    return install_beside(tools_cache, SDK.replace("==", "-"), SDK, "--no-deps")


@pytest.fixture
def claude(request: pytest.FixtureRequest) -> str:
    """Return the real program."""
    if program := os.environ.get("ASYNCGATE_TEST_CLAUDE") or shutil.which("claude"):
        return program
    return str(request.getfixturevalue("claude_sdk") / "claude_agent_sdk" / "_bundled" / "claude")
