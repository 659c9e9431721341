"""`useTask` of the npm package: bundled as a user does it, in a real browser, against a real gate that is restarted."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.clients.http import Http
from asyncgate.conformance.postgres_server import free_port
from tests.clients.test_typescript import use
from tests.conftest import TOKEN, Live
from tests.support.chromium import Chromium, find_program
from tests.support.patience import PATIENCE_SECONDS

WORKER = {"worker_id": "w1"}
FAILURES = 5        # more than there are events at the end of a task


@pytest.fixture
def chromium() -> Iterator[Chromium]:
    """Return a browser."""
    find_program()
    running = Chromium()
    yield running
    running.close()


@contextlib.contextmanager
def serve_page(package: Any, folder: Path, gate_url: str, port: int) -> Iterator[str]:
    """Serve the page that follows a task, as its own server does; give its address."""
    bundling = ("page.jsx", "--bundle", "--jsx=automatic", "--preserve-symlinks", "--outfile=page.js")
    package.run("esbuild", *bundling, cwd=use(package, folder, "page.jsx", "page_server.mjs"))
    environment = {**package.environment, "ASYNCGATE_URL": gate_url, "ASYNCGATE_API_KEY": TOKEN}
    with subprocess.Popen([package.find("node"), "page_server.mjs", str(port)], cwd=folder, env=environment,
                          stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield f"http://127.0.0.1:{port}"
        process.kill()


def test_a_page_without_a_key_follows_a_task_through_a_restart_of_the_gate(
        package: Any, start: Callable[..., Live], chromium: Chromium, tmp_path: Path) -> None:
    port, database = free_port(), f"sqlite:///{tmp_path}/gate.db"
    settings = (f"allowed_origins=http://127.0.0.1:{port}", "restart_grace_seconds=0")
    gate = start(*settings, database=database)
    with serve_page(package, tmp_path / "page", gate.url, port) as url, Http(gate.url, TOKEN) as raw:
        task_id = raw.call("create_task", type="read", payload=1, agent_id="ada")["task_id"]
        held = {**WORKER, "task_id": task_id, "lease_id": raw.call("lease_next", **WORKER)["tasks"][0]["lease_id"]}
        asked: list[tuple[str, dict[str, str]]] = []

        def open_page() -> Any:
            page = chromium.browser().new_page()
            page.on("request", lambda request: asked.append((request.url, request.headers)))
            page.goto(f"{url}/?task={task_id}&gate={gate.url}")
            return page

        page = chromium.run(open_page)

        def wait_for(text: str) -> None:
            chromium.run(page.get_by_text(text, exact=True).wait_for, timeout=1000 * PATIENCE_SECONDS)

        wait_for("leased at 0, going on")
        raw.call("report_progress", **held, progress={"page": 1})
        wait_for("running at 1, going on")
        gate.kill()
        wait_for("away")
        start(*settings, database=database, port=gate.port)
        wait_for("running at 1, going on")
        raw.call("report_progress", **held, progress={"page": 2})
        wait_for("running at 2, going on")
        raw.call("complete", **held, result="read", artifacts=[{"uri": "file:///x"}])
        wait_for("succeeded at 2, ended with read")
        chromium.run(page.close)

    of_gate = [(address, headers) for address, headers in asked if address.startswith(gate.url)]
    assert len(of_gate) >= 2
    assert all("ticket=" in address for address, _ in of_gate)
    assert not any(TOKEN in f"{address}{headers}" for address, headers in asked)


def test_a_page_sees_the_end_of_a_task_though_its_server_fails_just_then(
        package: Any, start: Callable[..., Live], chromium: Chromium, tmp_path: Path) -> None:
    port, failed = free_port(), list[str]()
    gate = start(f"allowed_origins=http://127.0.0.1:{port}")
    with serve_page(package, tmp_path / "page", gate.url, port) as url, Http(gate.url, TOKEN) as raw:
        task_id = raw.call("create_task", type="read", payload=1, agent_id="ada")["task_id"]

        def answer(route: Any) -> None:
            task = route.fetch()
            if task.json()["status"] == "succeeded" and len(failed) < FAILURES:
                failed.append(task_id)
                route.fulfill(status=502, body="it restarts")
            else:
                route.fulfill(response=task)

        def open_page() -> Any:
            page = chromium.browser().new_page()
            page.route(f"**/tasks/{task_id}", answer)
            page.goto(f"{url}/?task={task_id}&gate={gate.url}")
            page.get_by_text("queued at 0, going on", exact=True).wait_for()
            return page

        def see_the_end(page: Any) -> None:
            page.get_by_text("succeeded at 0, ended with read", exact=True).wait_for(timeout=1000 * PATIENCE_SECONDS)
            page.close()

        page = chromium.run(open_page)
        held = {**WORKER, "task_id": task_id, "lease_id": raw.call("lease_next", **WORKER)["tasks"][0]["lease_id"]}
        raw.call("complete", **held, result="read", artifacts=[{"uri": "file:///x"}])
        chromium.run(see_the_end, page)

    assert len(failed) == FAILURES
