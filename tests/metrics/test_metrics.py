"""Metrics: what /metrics shows agrees with what was done, for whoever may see it, and Prometheus can read it."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from asyncgate import main
from asyncgate.commands.tables import walk_errors
from asyncgate.conformance.postgres_server import free_port
from asyncgate.parts.extras import list_families
from asyncgate.parts.metrics.counting import Metrics
from asyncgate.parts.metrics.numbers import OTHER, Buckets, Names
from asyncgate.parts.model.settings import MetricsSettings
from tests.conftest import TOKEN, Live, Serve, Served

pytestmark = pytest.mark.anyio
ON = MetricsSettings(enabled=True)
Labels = frozenset[tuple[str, str]]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Store in a file, as most gates do."""
    return f"sqlite:///{tmp_path}/gate.db"


class Scrape:
    """What one scrape has told, as the library's own parser reads it."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.values: dict[tuple[str, Labels], float] = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values() for sample in family.samples}

    def get(self, name: str, **labels: str) -> float:
        """Return one number; what was never counted is 0."""
        return self.values.get((f"asyncgate_{name}", frozenset(labels.items())), 0.0)

    def sum(self, name: str) -> float:
        """Return the sum over all labels."""
        return sum(value for (metric, _), value in self.values.items() if metric == f"asyncgate_{name}")


async def scrape(served: Served) -> Scrape:
    answer = await served.call("GET", "/metrics")
    assert answer.status == 200, answer
    return Scrape(answer.content.decode())


async def work_through(served: Served, cycles: int) -> None:
    """Create, claim and complete."""
    for _ in range(cycles):
        offer = await served.leased()
        await complete(served, offer)


async def complete(served: Served, offer: dict[str, Any]) -> None:
    await served.post(f"/v1/tasks/{offer['task_id']}/complete", {
        "lease_id": offer["lease_id"], "worker_id": "w1", "result": {}, "artifacts": [{"uri": "file:///out"}]})


async def call_tool(served: Served, name: str, *, headers: list[tuple[str, str]], **arguments: Any) -> None:
    await served.call("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {
        "name": f"asyncgate.{name}", "arguments": arguments}}, headers=headers)


async def test_the_numbers_are_those_of_what_was_done(serve: Serve) -> None:
    served = await serve(metrics=ON)

    await work_through(served, 7)
    told = await scrape(served)

    for operation in ("create_task", "lease_next", "complete"):
        assert told.get("requests_total", face="rest", operation=operation, status="2xx") == 7
        assert told.get("request_duration_seconds_count", operation=operation) == 7
    assert told.get("claims_total", result="leased") == 7
    assert told.get("tasks_created_total", type="demo") == 7
    assert told.get("tasks_ended_total", type="demo", status="succeeded") == 7
    assert told.get("leases_granted_total", type="demo") == 7
    assert told.get("leases_ended_total", type="demo", ending="completed") == 7
    assert told.get("task_wait_seconds_count", type="demo") == 7
    assert told.get("lease_held_seconds_count", type="demo") == 7
    for receipt in ("task.assigned", "task.accepted", "task.completed", "task.result_ready"):
        assert told.get("receipts_total", type=receipt) == 7


async def test_every_batch_is_counted_with_its_writes_and_its_stages(serve: Serve) -> None:
    served = await serve(metrics=ON)

    task = {"type": "demo", "payload": None, "agent_id": "ada"}
    await asyncio.gather(*(served.post("/v1/tasks", task) for _ in range(20)))
    told = await scrape(served)

    assert told.get("batch_writes_sum") == 20
    batches = told.get("batch_writes_count")
    assert 1 <= batches <= 20
    assert told.get("commits_total") == batches
    for stage in ("load", "decide", "commit"):
        assert told.get("batch_stage_seconds_count", stage=stage) == batches


async def test_refusals_are_counted_once_by_operation_and_code_on_every_face(serve: Serve) -> None:
    served = await serve(metrics=ON)

    await served.call("GET", "/v1/tasks/none")
    await served.call("GET", "/v1/tasks", token="wrong")
    await served.call("DELETE", "/v1/tasks")
    await served.call("POST", "/v1/leases/claim", {})
    await served.call("GET", "/v1/tasks", headers=[("host", "elsewhere.example")])
    for headers in ([], [("accept", "application/json, text/event-stream")]):       # of a peer, and of an MCP client
        await call_tool(served, "get_task", headers=headers, task_id="none")
    await call_tool(served, "no_such_tool", headers=[])
    told = await scrape(served)

    assert told.get("refusals_total", operation="get_task", code="task_not_found") == 3
    assert told.get("refusals_total", operation="list_tasks", code="unauthenticated") == 1
    assert told.get("refusals_total", operation=OTHER, code="method_not_allowed") == 1
    assert told.get("refusals_total", operation=OTHER, code="misdirected_request") == 1
    assert told.get("refusals_total", operation=OTHER, code="invalid_request") == 1
    assert told.get("claims_total", result="refused") == 1
    assert told.get("requests_total", face="mcp", operation="get_task", status="4xx") == 2
    assert told.sum("refusals_total") == 8


async def test_claims_that_find_nothing_are_counted_apart(serve: Serve) -> None:
    served = await serve(metrics=ON)

    await served.post("/v1/leases/claim", {"worker_id": "w1"})
    await served.call("POST", "/lease", {"worker_id": "worker.one", "capabilities": []})
    told = await scrape(served)

    assert told.get("claims_total", result="empty") == 2
    assert told.get("claim_duration_seconds_count", result="empty") == 2
    assert told.get("claims_waiting") == 0


async def test_leases_that_run_out_and_tasks_on_hold_are_counted(serve: Serve) -> None:
    served = await serve(metrics=ON, max_expiries=1)

    await served.leased()
    served.backend.skew += 301
    await served.gate.upkeep.once("sweep")
    told = await scrape(served)

    assert told.get("leases_ended_total", type="demo", ending="expired") == 1
    assert told.get("tasks_held_total", type="demo") == 1
    assert told.get("upkeep_done_total", duty="sweep") == 1
    assert told.get("upkeep_last_run_timestamp_seconds", duty="sweep") > 0


async def test_what_alerts_wait_for_is_shown_before_it_happens(serve: Serve) -> None:
    """Prometheus sees no increase of what was absent before."""
    served = await serve(metrics=ON)

    await served.leased()
    told = await scrape(served)

    of_demo, zeros = {"type": "demo"}, {name for name, value in told.values.items() if value == 0}
    failures = [("database_errors_total", {"kind": kind}) for kind in ("unavailable", "refused", "unknown")]
    for name, labels in [("leases_ended_total", {**of_demo, "ending": "expired"}), ("tasks_held_total", of_demo),
                         *failures]:
        assert (f"asyncgate_{name}", frozenset(labels.items())) in zeros


async def test_queues_are_told_as_of_the_last_look_at_them(serve: Serve) -> None:
    served = await serve(metrics=ON)
    await served.gate.meter.__aexit__()     # it looks by itself, too
    await served.leased(type="other")
    for seconds in (0, 0, 300):
        await served.post("/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada", "delay_seconds": seconds})
    served.backend.skew += 100
    assert (await scrape(served)).get("queue_tasks", type="demo", state="queued") == 0

    await served.gate.meter.look_at_queues()
    told = await scrape(served)

    assert told.get("queue_tasks", type="demo", state="queued") == 3
    assert told.get("queue_tasks", type="other", state="leased") == 1
    assert told.get("queue_oldest_seconds", type="demo") == pytest.approx(100, abs=20)
    assert told.get("queue_oldest_seconds", type="other") == 0
    assert told.get("leases_overdue") == 0

    served.backend.skew += 250      # the delayed task may be claimed now, and the lease has run out
    await served.gate.meter.look_at_queues()
    assert (await scrape(served)).get("leases_overdue") == 1

    await served.gate.upkeep.once("sweep")
    await served.gate.meter.look_at_queues()
    told = await scrape(served)
    assert (told.get("leases_overdue"), told.get("queue_tasks", type="other", state="queued")) == (0, 1)


async def test_types_beyond_the_limit_share_one_queue(serve: Serve) -> None:
    served = await serve(metrics=MetricsSettings(enabled=True, most_types=1))
    for number in range(3):
        await served.post("/v1/tasks", {"type": f"kind{number}", "payload": None, "agent_id": "ada"})

    await served.gate.meter.look_at_queues()
    told = await scrape(served)

    assert [told.get("queue_tasks", type=kind, state="queued") for kind in ("kind0", "kind1", OTHER)] == [1, 0, 2]
    assert told.get("queue_oldest_seconds", type=OTHER) > 0


async def test_a_renewal_is_neither_a_grant_nor_an_end(serve: Serve) -> None:
    served = await serve(metrics=ON)

    offer = await served.leased()
    await served.post("/v1/leases/renew", {
        "lease_id": offer["lease_id"], "task_id": offer["task_id"], "worker_id": "w1"})
    await complete(served, offer)
    await served.post(f"/v1/tasks/{offer['task_id']}/artifacts", {"artifacts": [{"uri": "file:///more"}]})
    told = await scrape(served)

    for name in ("leases_granted_total", "leases_ended_total", "tasks_ended_total"):
        assert told.sum(name) == 1


async def test_types_beyond_the_limit_are_counted_as_other(serve: Serve) -> None:
    served = await serve(metrics=MetricsSettings(enabled=True, most_types=2))

    for number in range(5):
        await served.post("/v1/tasks", {"type": f"kind{number}", "payload": None, "agent_id": "ada"})
    told = await scrape(served)

    assert [told.get("tasks_created_total", type=kind) for kind in ("kind0", "kind1", "kind2", OTHER)] == [1, 1, 0, 3]


async def test_nobody_sees_metrics_without_their_scope(serve: Serve) -> None:
    served = await serve(metrics=ON)
    about: dict[str, Any] = {"name": "p", "principal_kind": "service", "principal_id": "prometheus"}
    asked: dict[str, dict[str, Any]] = {
        "scraper": {"scopes": ["metrics:read"]}, "agent": {}, "admin": {"role": "admin"}}
    keys = {name: (await served.post("/v1/keys", {**about, **more}))["api_key"] for name, more in asked.items()}

    statuses = {name: (await served.call("GET", "/metrics", token=key)).status for name, key in keys.items()}
    stranger = await served.call("GET", "/metrics", token=None)
    more_than_it_has = await served.call(
        "POST", "/v1/keys", {**about, "scopes": ["metrics:read"]}, token=keys["admin"])

    assert statuses == {"scraper": 200, "agent": 403, "admin": 403}
    assert (stranger.status, more_than_it_has.status) == (401, 403)
    assert (await served.call("GET", "/v1/tasks", token=keys["scraper"])).status == 403
    assert (await served.call("POST", "/metrics")).status == 405


async def test_the_command_that_a_refusal_names_issues_a_key_for_metrics(serve: Serve, tmp_path: Path) -> None:
    served = await serve(metrics=ON)
    key = (await served.post("/v1/keys", {"name": "a", "principal_id": "ada"}))["api_key"]

    message = (await served.call("GET", "/metrics", token=key)).json()["message"]
    _, *command = shlex.split(message.partition("issues it: ")[2])
    made = await asyncio.to_thread(CliRunner().invoke, main, [*command, "--database", f"sqlite:///{tmp_path}/new.db"])

    assert (made.exit_code, made.stdout.startswith("aga_")) == (0, True), made.output


async def test_a_gate_that_is_not_asked_to_count_has_no_metrics(served: Served) -> None:
    assert (await served.call("GET", "/metrics")).status == 404
    assert served.gate.meter is None
    assert served.engine.find_extension(Metrics) is None


async def test_every_metric_is_named_and_described_as_prometheus_wants(serve: Serve) -> None:
    told = await scrape(await serve(metrics=ON))

    for family in list_families():
        name = family.name.removesuffix("_total") if family.kind == "counter" else family.name
        assert told.families[name].documentation == family.says
        assert (family.kind == "counter") == family.name.endswith("_total")
        assert family.says.endswith(".")
    assert {"process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds"} <= told.families.keys()


def test_the_codes_that_a_description_names_are_codes_of_errors() -> None:
    [refusals] = [family for family in list_families() if family.name == "asyncgate_refusals_total"]

    named = set(re.findall(r"\w+_\w+", refusals.says))

    assert named
    assert named <= {error.code for error in walk_errors()}


async def test_whoever_asks_for_openmetrics_gets_it(serve: Serve) -> None:
    served = await serve(metrics=ON)

    answer = await served.call("GET", "/metrics", headers=[("accept", "application/openmetrics-text; version=1.0.0")])

    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.content.endswith(b"# EOF\n")


def test_a_bucket_holds_what_is_not_above_its_bound() -> None:
    buckets = Buckets((1.0, 2.0))

    for value in (0.5, 1.0, 1.5, 3.0):
        buckets.add(value)

    assert buckets.cumulate() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert buckets.sum == 6.0


def test_the_first_names_keep_their_line() -> None:
    names = Names(1)

    assert [names.label(name) for name in ("a", "b", "a")] == [("a",), (OTHER,), ("a",)]


# Real parts.


def fetch(url: str, token: str = TOKEN) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()


@pytest.fixture
def promtool() -> str:
    """Return Prometheus's own checker."""
    if (program := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed: Debian's package prometheus has it")
    return program


def test_promtool_finds_nothing_to_mend(start: Callable[..., Live], promtool: str) -> None:
    live = start("metrics.enabled=true")
    _, text = fetch(f"{live.url}/metrics")
    ours = "".join(part for part in text.split("# HELP ") if part.startswith("asyncgate_"))
    assert ours

    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)

    assert [line for line in checked.stderr.splitlines() if line.startswith("asyncgate_")] == []


def test_a_second_listener_serves_metrics_alone_and_the_first_one_everything_else(start: Callable[..., Live]) -> None:
    port = free_port()
    live = start("metrics.enabled=true", f"metrics.port={port}")
    beside = f"http://127.0.0.1:{port}"

    status, text = fetch(f"{beside}/metrics")

    assert (status, "asyncgate_info" in text) == (200, True)
    assert fetch(f"{beside}/metrics", token="wrong")[0] == 401
    assert fetch(f"{beside}/v1/tasks")[0] == 404
    assert fetch(f"{live.url}/metrics")[0] == 404
    assert fetch(f"{live.url}/v1/tasks")[0] == 200
