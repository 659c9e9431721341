"""A site of somebody else on another port of this machine; its pages are what a test says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Elsewhere(ThreadingHTTPServer):
    """The server; a page is its HTML and the headers it is sent with."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.pages: dict[str, tuple[str, dict[str, str]]] = {}
        self.asked: list[str] = []

    def add(self, path: str, html: str, **headers: str) -> str:
        """Add a page; return its address."""
        self.pages[path] = html, {name.replace("_", "-"): value for name, value in headers.items()}
        return f"{self.url}{path}"

    @property
    def url(self) -> str:
        """Return the address of the site."""
        return f"http://127.0.0.1:{self.server_port}"


class Answering(BaseHTTPRequestHandler):
    """Answers from the pages of its server."""

    server: Elsewhere

    def do_GET(self) -> None:
        """Answer with a page."""
        self.server.asked.append(self.path)
        html, headers = self.server.pages.get(self.path.partition("?")[0], ("", {}))
        self.send_response(200)
        for name, value in {"content-type": "text/html; charset=utf-8", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(html.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def serve_elsewhere() -> Iterator[Elsewhere]:
    """Run the site."""
    with Elsewhere() as site:
        Thread(target=site.serve_forever, args=(0.01,), daemon=True).start()
        yield site
        site.shutdown()
