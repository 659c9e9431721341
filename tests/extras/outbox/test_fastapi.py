"""The FastAPI application of the documentation: an order and its task are one transaction, whatever is killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest

from asyncgate.clients.http import Http
from asyncgate.conformance.postgres_server import free_port
from tests.conftest import TOKEN, Live
from tests.support import hasty
from tests.support.pages import ROOT, blocks

if find_spec("fastapi") is None:
    pytest.skip("fastapi is not installed: its application of the documentation is not run", allow_module_level=True)

either = hasty.either
WORKER = """
import os
from asyncgate.clients import Worker

worker = Worker(worker_id="shipper", state=None, ttl_seconds=1)


@worker.task("order.ship")
def ship(payload):
    with open("shipped", "a") as file:
        file.write("shipping\\n")
    if open("shipped").read().count("shipping") == 1:
        os.kill(os.getpid(), 9)
    return f"order {payload['order']} is shipped"


worker.run()
"""


@pytest.mark.parametrize("either", ["sqlite", "postgres"], indirect=True)
def test_an_order_and_its_task_are_one_transaction_and_survive_a_kill_of_each_program(
        either: Live, tmp_path: Path) -> None:
    [page] = [block for block in blocks("python", mark="agent:run") if block.more == "fastapi"]
    (tmp_path / "shop_api.py").write_text(page.text)
    around = {**os.environ, "PYTHONPATH": str(ROOT), "ASYNCGATE_URL": either.url, "ASYNCGATE_API_KEY": TOKEN}
    with ExitStack() as stack:
        def run(*command: str, **more: Any) -> subprocess.Popen[str]:
            process = stack.enter_context(subprocess.Popen(
                [sys.executable, *command], env=around, cwd=tmp_path, text=True, **more))
            stack.callback(process.kill)
            return process

        port = free_port()
        serving = run("-m", "uvicorn", "shop_api:app", "--port", str(port), stderr=subprocess.PIPE)
        assert serving.stderr
        while "Uvicorn running" not in serving.stderr.readline():
            assert serving.poll() is None
        site = stack.enter_context(httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False))
        answers = [site.post("/orders/7").status_code, site.post("/orders/7").status_code]
        serving.send_signal(signal.SIGKILL)     # it has answered, and nobody has told the gate
        serving.wait()
        with sqlite3.connect(tmp_path / "shop.db") as database:
            waiting = database.execute("SELECT id FROM asyncgate_outbox").fetchall()
        relay = ("-m", "asyncgate", "relay", f"sqlite:///{tmp_path}/shop.db", "--once", "--as", "shop")
        moved = [run(*relay, stdout=subprocess.PIPE).communicate()[0].strip() for _ in range(2)]
        assert run("-c", WORKER).wait() == -signal.SIGKILL
        run("-c", WORKER)
        raw = stack.enter_context(Http(either.url, TOKEN))
        [listed] = raw.call("list_tasks", agent_id="shop")["tasks"]
        task: dict[str, Any] = {}
        while task.get("status") != "succeeded":
            task = raw.call("get_task", task_id=listed["task_id"], wait_seconds=30)
        again = run("-m", "uvicorn", "shop_api:app", "--port", str(port), stderr=subprocess.PIPE)
        assert again.stderr
        while "Uvicorn running" not in again.stderr.readline():
            assert again.poll() is None
        shown = site.get(f"/tasks/{listed['task_id']}").json()

    assert (answers, waiting) == ([200, 500], [("order-7",)])
    assert moved == ["moved 1, parked 0", "moved 0, parked 0"]
    assert (task["result"]["result"], shown) == ("order 7 is shipped", {"status": "succeeded"})
    assert (tmp_path / "shipped").read_text() == "shipping\n" * 2
