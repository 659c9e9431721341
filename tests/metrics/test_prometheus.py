"""A real Prometheus scrapes a real gate, and has the series that alerts and dashboards ask for."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncgate.conformance.postgres_server import free_port
from tests.conftest import TOKEN, Live
from tests.metrics.test_alerts import BOARDS, expressions, named, rules
from tests.support.ai_tools import until

SETTINGS = ("metrics.enabled=true", "max_expiries=1")
# What a gate shows only in integrated mode, or after something went wrong.
ABSENT = {"asyncgate_refusals_total"}


@pytest.fixture
def prometheus() -> str:
    """Return the program."""
    if (program := shutil.which("prometheus")) is None:
        pytest.skip("prometheus is not installed: Debian's package prometheus has it")
    return program


def call(live: Live, verb: str, path: str, body: Any = None) -> Any:
    """Call the gate."""
    request = urllib.request.Request(
        live.url + path, None if body is None else json.dumps(body).encode(), method=verb,
        headers={"authorization": f"Bearer {TOKEN}", "content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def work_on(live: Live, *more: str) -> None:
    """Create, claim and complete one task, and leave others waiting."""
    for type in ("done", *more):
        call(live, "POST", "/v1/tasks", {"type": type, "payload": None, "agent_id": "ada"})
    (offer,) = call(live, "POST", "/v1/leases/claim", {"worker_id": "w1", "accept_types": ["done"]})["tasks"]
    call(live, "POST", f"/v1/tasks/{offer['task_id']}/complete", {
        "lease_id": offer["lease_id"], "worker_id": "w1", "result": {}, "artifacts": [{"uri": "file:///out"}]})


def configure(folder: Path, live: Live) -> Path:
    """Write what Prometheus scrapes, and how."""
    (folder / "key").write_text(TOKEN)
    jobs = [{"job_name": "asyncgate", "authorization": {"credentials_file": str(folder / "key")},
             "static_configs": [{"targets": [live.url.removeprefix("http://")]}]}]
    told = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(told))
    return folder / "prometheus.yml"


def ask(port: int, expression: str) -> list[Any]:
    """Ask Prometheus; nothing while it does not answer yet."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}") as answer:
            series: list[Any] = json.load(answer)["data"]["result"]
            return series
    except OSError:
        return []


def test_a_real_prometheus_has_what_alerts_and_dashboards_ask_for(
        prometheus: str, start: Callable[..., Live], tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/gate.db"
    first = start(*SETTINGS, database=database)
    work_on(first, "waiting")
    call(first, "POST", "/v1/task-limits", {"name": "openai"})
    first.process.terminate()
    first.process.communicate()
    live, port = start(*SETTINGS, database=database), free_port()    # queues are looked at when it starts
    work_on(live)

    process = subprocess.Popen(
        [prometheus, f"--config.file={configure(tmp_path, live)}", f"--storage.tsdb.path={tmp_path}/data",
         f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        (waits,) = until(lambda: ask(port, 'asyncgate_queue_oldest_seconds{type="waiting"} > 0'), "the oldest wait")
        assert waits["metric"]["job"] == "asyncgate"
        (depth,) = ask(port, 'asyncgate_queue_tasks{type="waiting", state="queued"}')
        assert depth["value"][1] == "1"
        asked = [*(rule["expr"] for rule in rules().values()),
                 *(expression for board in BOARDS for expression in expressions(board))]
        names = {name for expression in asked for name in named(expression) if "_ledger_" not in name} - ABSENT
        assert {name for name in names if not ask(port, name)} == set()
    finally:
        process.terminate()
        process.wait()
