"""The commands behind a proxy, which answers for a gate that is away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

from asyncgate.clients.http import Http
from tests.conftest import TOKEN, Live
from tests.support.patience import PATIENCE_SECONDS

GATE = [sys.executable, "-m", "asyncgate"]


class Proxy(ThreadingHTTPServer):
    """Passes calls on to a gate, or says that it does not answer."""

    daemon_threads = True

    def __init__(self, gate: Live) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.gate, self.away, self.status = gate, False, 502
        self.url = f"http://127.0.0.1:{self.server_port}"


class Passing(BaseHTTPRequestHandler):
    """Takes one call."""

    server: Proxy

    def pass_on(self) -> None:
        """Answer with what the gate says, or for it."""
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.server.away:
            return self.answer(self.server.status, "text/html", b"<h1>Bad Gateway</h1>")
        response = httpx2.request(self.command, self.server.gate.url + self.path, content=body,
                                  timeout=PATIENCE_SECONDS,
                                  headers={name: self.headers[name] for name in ("authorization", "content-type")
                                           if name in self.headers})
        self.answer(response.status_code, response.headers["content-type"], response.content)

    do_GET = do_POST = pass_on      # the names that http.server calls

    def answer(self, status: int, kind: str, body: bytes) -> None:
        """Write an answer."""
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def proxy(live: Live) -> Iterator[Proxy]:
    with Proxy(live) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def start(proxy: Proxy, *asked: str) -> subprocess.Popen[str]:
    surroundings = {**os.environ, "ASYNCGATE_URL": proxy.url, "ASYNCGATE_API_KEY": TOKEN}
    return subprocess.Popen([*GATE, *asked], env=surroundings, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, bufsize=1)


def read_until(file: object, wanted: str) -> None:
    """Read lines until one has a text."""
    for line in file:       # type: ignore[attr-defined]
        if wanted in line:
            return
    raise AssertionError(f"it ended without {wanted!r}")


@pytest.mark.parametrize("status", [502, 504])
def test_waiting_goes_on_while_a_proxy_says_that_the_gate_is_away(proxy: Proxy, status: int) -> None:
    proxy.status = status
    with start(proxy, "run-task", "--type", "sing", "--payload", "1", "--wait-seconds", "60") as waiting:
        read_until(waiting.stderr, "queued")
        proxy.away = True
        read_until(waiting.stderr, "; trying again")
        proxy.away = False
        with Http(proxy.gate.url, TOKEN) as gate:
            [offer] = gate.call("lease_next", worker_id="w1", accept_types=["sing"])["tasks"]
            gate.call("complete", worker_id="w1", task_id=offer["task_id"], lease_id=offer["lease_id"], result=1)

        shown, output = waiting.communicate(timeout=PATIENCE_SECONDS)

    assert waiting.returncode == 0, output
    assert "succeeded" in shown


@pytest.mark.parametrize("asked", [("list-tasks", "--watch", "0.1s"), ("tail",)], ids=" ".join)
def test_watching_goes_on_while_a_proxy_says_that_the_gate_is_away(proxy: Proxy, asked: tuple[str, ...]) -> None:
    proxy.away = asked == ("tail",)     # a stream does not pass through this proxy
    with start(proxy, *asked) as watching:
        if not proxy.away:
            read_until(watching.stdout, "nothing")
            proxy.away = True
        read_until(watching.stderr, "; trying again")

        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=PATIENCE_SECONDS)

    assert watching.returncode == 130


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_gate_that_is_away_behind_a_proxy_is_a_gate_that_does_not_answer(proxy: Proxy, status: int) -> None:
    proxy.away, proxy.status = True, status

    with start(proxy, "list-tasks") as asking:
        output = asking.communicate(timeout=PATIENCE_SECONDS)[1]

    assert asking.returncode == 7, output
    assert f"status {status}" in output
