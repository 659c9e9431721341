"""A captive portal: it passes calls on to a gate, or answers each itself with what is not an answer of a gate."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2

from tests.support.patience import PATIENCE_SECONDS

PAGE = (200, "text/html", b"<html>Welcome! Accept our terms.</html>")
# Status, content type, body.
FOREIGN = {
    "a page": PAGE,
    "no content": (200, "text/plain", b""),
    "the JSON of another product": (200, "application/json", b'{"ok":"yes","status":"up","tasks":{"a":1}}'),
    "a list": (200, "application/json", b'[{"task_id":"t1"}]'),
    "lists of another shape": (200, "application/json",
                               b'{"tasks":[{"task_id":1}],"leases":[3],"receipts":[{}],"queues":[0],"findings":{}}'),
    "bytes that are not text": (200, "application/json", b"\xff\xfe"),
    "JSON without an end": (200, "application/json", b"[" * 100_000),
    "events of something else": (200, "text/event-stream", b"data: [1]\n\n"),
    "a way to elsewhere": (302, "text/html", b""),
    "no such page": (404, "text/html", b"<html>404</html>"),
    "no such path": (404, "application/json", b'{"detail":"Not Found"}'),
}


class Portal(ThreadingHTTPServer):
    """Answers calls, or passes them on to a gate while `answer` is None."""

    daemon_threads = True

    def __init__(self, gate_url: str = "") -> None:
        super().__init__(("127.0.0.1", 0), PortalCall)
        self.gate_url, self.answer = gate_url, None if gate_url else PAGE
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.passed = self.answered = 0     # calls to the gate, calls that it answered itself

    answer: tuple[int, str, bytes] | None
    kept = ("x-asyncgate",)     # headers of the gate's answers that it passes on


class PortalCall(BaseHTTPRequestHandler):
    """One call."""

    server: Portal

    def reply(self) -> None:
        """Answer the call."""
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        told = self.server.answer
        (status, kind, content), more = (told, {}) if told else self.ask_gate(body)
        self.server.passed += told is None
        self.server.answered += told is not None
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        for header in more.items():
            self.send_header(*header)
        if status == 302:
            self.send_header("location", "http://portal.test/login")
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = reply      # the names that http.server calls

    def ask_gate(self, body: bytes) -> tuple[tuple[int, str, bytes], dict[str, str]]:
        """Pass the call on; return the gate's answer and its marks; a read does not wait, so that it comes often."""
        path = re.sub(r"wait_seconds=[^&]*", "wait_seconds=0", self.path)
        passed = {name: self.headers[name] for name in ("authorization", "content-type") if name in self.headers}
        response = httpx2.request(self.command, self.server.gate_url + path, content=body, headers=passed,
                                  timeout=PATIENCE_SECONDS)
        marks = {name: response.headers[name] for name in self.server.kept}
        return (response.status_code, response.headers["content-type"], response.content), marks

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def open_portal(gate_url: str = "") -> Iterator[Portal]:
    """Serve a portal in a thread of its own."""
    with Portal(gate_url) as portal:
        threading.Thread(target=portal.serve_forever, daemon=True).start()
        yield portal
        portal.shutdown()
