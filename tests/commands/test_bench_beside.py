"""Other queues beside a gate, measured for a moment: that it measures what it says, never how fast."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from asyncgate import main
from asyncgate.bench.peers.known import RESTATE_PROGRAM, ask_node
from asyncgate.bench.peers.runner import Comparison, format_comparison
from asyncgate.conformance.plugin import SHARED
from asyncgate.conformance.postgres_server import PostgresServer, connected
from tests.conftest import Node, tools_of_npm

SERVE = "from asyncgate import main; main()"
SHORT = ("--rounds", "1", "--warm-up", "0")
STEPS = {("create", 1): 4, ("claim", 1): 4, ("complete", 1): 4, ("all", 1): 12}
BATCHES = {("create 100", 1): 4, ("claim 100", 1): 4, ("complete 100", 1): 4, ("all", 1): 12}


def bench(*arguments: str, folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, where Node finds the packages of that folder only."""
    environment = {**os.environ, **more.pop("env", {}), "TMPDIR": str(more.pop("temporary", folder))}
    environment.pop("NODE_PATH", None)
    return subprocess.run([sys.executable, "-c", SERVE, "bench", "--beside", *arguments], cwd=folder, env=environment,
                          capture_output=True, text=True, **more)


def report_of(done: subprocess.CompletedProcess[str]) -> Comparison:
    assert done.returncode == 0, done.stderr
    return msgspec.convert(json.loads(done.stdout), Comparison)


def counts(report: Comparison, name: str, mode: str) -> dict[tuple[str, int], int]:
    return {(row.operation, row.clients): row.requests for row in report.rows
            if (row.database, row.mode) == (name, mode)}


@pytest.fixture
def server(pytestconfig: pytest.Config) -> PostgresServer:
    """The suite's own server."""
    shared = pytestconfig.stash.get(SHARED, None)
    if shared is None or (running := shared.started()) is None:
        pytest.skip(shared.about if shared else "postgres: is not among the backends")
    return running


async def left_over(server: PostgresServer) -> list[Any]:
    async with connected(server.admin_url()) as db:
        query = "SELECT datname FROM pg_database UNION ALL SELECT rolname FROM pg_roles"
        return [name for [name] in await db.fetch(query) if name.startswith("asyncgate_bench")]


def test_a_queue_on_postgres_is_measured_beside_a_gate_on_both_databases(server: PostgresServer,
                                                                         tmp_path: Path) -> None:
    done = bench("pgqueuer,bullmq", "--database", server.superuser, "--clients", "1,2", "--count", "4", "--json",
                 "--tenants", "2", *SHORT, folder=tmp_path)

    report = report_of(done)
    assert [queue.name for queue in report.queues] == [
        "AsyncGate on SQLite", "AsyncGate on SQLite, 2 tenants", "AsyncGate on Postgres",
        "AsyncGate on Postgres, 2 tenants", "pgqueuer"]
    for queue in report.queues:
        two = {(operation, 2): number for (operation, _), number in STEPS.items()}
        assert counts(report, queue.name, "cycle") == {**STEPS, **two}, queue.name
        assert counts(report, queue.name, "batch") == BATCHES
    assert [queue.server.split()[0] for queue in report.queues] == ["SQLite"] * 2 + ["Postgres"] * 3
    assert all(queue.version and queue.steps and queue.remark for queue in report.queues)
    assert (report.method["rounds"], report.method["count"]) == (1, 4)
    assert [missing.name for missing in report.missing] == ["bullmq"]
    assert asyncio.run(left_over(server)) == []
    assert list(tmp_path.iterdir()) == []

    table = format_comparison(report).splitlines()
    assert table[0] == "| cycles/s | 1 client | 2 clients | 100 a call, 1 client |"
    assert [re.sub(r"[\d,]+ \|", "N |", line) for line in table[2:7]] == [
        f"| {queue.name} | N | N | N |" for queue in report.queues]
    assert table[-1].startswith("- bullmq is not installed: ")
    assert "npm install bullmq ioredis" in table[-1]


def test_a_queue_of_npm_is_measured_with_a_server_of_its_own(tools_cache: Path, tmp_path: Path) -> None:
    node = Node(Node.install(tools_of_npm(tools_cache), ("bullmq@6.7.0", "ioredis@5.8.2")), tmp_path)

    done = bench("bullmq", "--clients", "1", "--count", "4", "--json", *SHORT, folder=node.folder, env=node.environment,
                 temporary=tmp_path)

    report = report_of(done)
    assert [(queue.name, queue.server.split()[0]) for queue in report.queues] == [
        ("AsyncGate on SQLite", "SQLite"), ("bullmq", "valkey-server")]
    assert counts(report, "bullmq", "cycle") == STEPS
    assert counts(report, "bullmq", "batch") == {}
    assert format_comparison(report).splitlines()[3].endswith("| – |")
    assert list(tmp_path.iterdir()) == []


def test_an_engine_of_durable_workflows_is_measured_and_the_trip_to_its_database_named(server: PostgresServer,
                                                                                      tmp_path: Path) -> None:
    pytest.importorskip("dbos", reason="DBOS is not installed: pip install dbos")
    done = bench("dbos", "--database", server.superuser, "--clients", "2", "--count", "4", "--json", "--mode", "cycle",
                 *SHORT, folder=tmp_path)

    report = report_of(done)
    assert counts(report, "dbos", "cycle") == {("create", 2): 4, ("complete", 2): 4, ("all", 2): 8}
    assert re.search(r"A round trip to Postgres takes \d+ µs\.", format_comparison(report))


def test_a_server_of_durable_workflows_is_measured(tmp_path: Path) -> None:
    if (program := ask_node("where", RESTATE_PROGRAM)) is None:
        pytest.skip("Restate is not installed: npm install @restatedev/restate-server @restatedev/restate-sdk@1.10, "
                    "and set NODE_PATH")
    done = bench("restate", "--clients", "2", "--count", "4", "--json", "--mode", "cycle", *SHORT,
                 folder=Path(program).parents[4], temporary=tmp_path)

    report = report_of(done)
    assert counts(report, "restate", "cycle") == {("create", 2): 4, ("complete", 2): 4, ("all", 2): 8}
    assert report.queues[-1].server.startswith("restate-server 1.")


def test_a_queue_that_ends_is_one_clear_line_and_leaves_nothing_running(tmp_path: Path) -> None:
    if not shutil.which("node"):
        pytest.skip("Node is not installed")
    (here := tmp_path / "here").mkdir()
    for name in ("bullmq", "ioredis"):
        (package := tmp_path / "node_modules" / name).mkdir(parents=True)
        (package / "package.json").write_text('{"version": "0.0.1", "main": "index.js"}')
        (package / "index.js").write_text("throw new Error('there is nothing in it')")

    done = bench("bullmq", folder=here)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: bullmq ended: Error: there is nothing in it\n"
    assert list(here.iterdir()) == []


def test_queues_that_are_not_installed_are_named_with_what_to_install(tmp_path: Path) -> None:
    done = bench("bullmq,pg-boss", folder=tmp_path)

    assert done.returncode == 1
    assert re.search(r"bullmq is not installed: (Node\.js on PATH; )?npm install bullmq ioredis", done.stderr)
    assert re.search(r"pg-boss is not installed: (Node\.js on PATH; )?npm install pg-boss", done.stderr)


def test_a_postgres_that_does_not_answer_is_one_clear_line(tmp_path: Path) -> None:
    done = bench("pgqueuer", "--database", "postgresql://u:hidden@127.0.0.1:9", folder=tmp_path)

    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"Error: the Postgres server at postgresql://u:\*+@127\.0\.0\.1:9 cannot be used: .+\n",
                        done.stderr)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--beside", "pgqueuer,rabbit"], "rabbit is not known: name some of pgqueuer, procrastinate, nats, bullmq"),
    (["--beside", ",nats"], "an empty name is not known"),
    (["--beside", "nats", "--mode", "create"], "only the modes cycle and batch"),
    (["--beside", "nats", "--url", "http://127.0.0.1:9"], "omit --url and --token"),
    (["--beside", "nats", "--hostile"], "exclude each other"),
    (["--beside", "nats", "--database", "sqlite:///x.db"], "needs a Postgres server as its --database")])
def test_what_cannot_be_measured_beside_is_refused(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["bench", *arguments])

    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
