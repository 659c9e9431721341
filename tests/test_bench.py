"""The benchmark, run for a moment against a real server: that it measures, never how fast."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVE = "from asyncgate import main; main()"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bench-server on a database of its own."""
    file = tmp_path_factory.mktemp("bench") / "gate.db"
    asked = [sys.executable, "-c", SERVE, "bench-server", "--port", "0", "--database", f"sqlite:///{file}"]
    environment = {**os.environ, "ASYNCGATE_API_KEY": "secret"}
    server = subprocess.Popen(asked, env=environment, stderr=subprocess.PIPE, text=True)
    assert server.stderr
    found = next(found for line in server.stderr if (found := re.search(r"serves (http://\S+)", line)))
    yield found[1]
    server.terminate()
    server.communicate()
    assert server.returncode == 0


def bench(url: str, *arguments: str, token: str = "secret") -> subprocess.CompletedProcess[str]:
    asked = [sys.executable, "-c", SERVE, "bench", "--url", url, "--token", token, *arguments]
    return subprocess.run(asked, capture_output=True, text=True, cwd=Path(__file__).parent)


def test_every_mode_measures_each_of_its_operations(url: str) -> None:
    modes = [part for mode in ("cycle", "create", "claim-empty", "batch", "echo") for part in ("--mode", mode)]

    done = bench(url, *modes, "--clients", "1,2", "--seconds", "0.2", "--rounds", "1", "--json")

    rows = json.loads(done.stdout)
    assert {(row["mode"], row["operation"]) for row in rows} == {
        ("cycle", "create"), ("cycle", "claim"), ("cycle", "complete"), ("create", "create"), ("claim-empty", "claim"),
        ("batch", "create 100"), ("batch", "claim 100"), ("batch", "complete 100"), ("echo", "echo")}
    assert {row["clients"] for row in rows} == {1, 2}
    assert all(0 < row["p50_ms"] <= row["p99_ms"] <= row["p999_ms"] for row in rows)
    assert all(row["requests_per_second"] > 0 for row in rows)


def test_the_table_shows_rates_as_a_part_of_the_echos(url: str) -> None:
    done = bench(url, "--mode", "create", "--mode", "echo", "--clients", "2", "--seconds", "0.2", "--rounds", "2")

    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["mode", "clients", "operation"]
    assert re.search(r"^create +2 +create +[\d,]+ +\d\.\d\d ", done.stdout, re.M)
    assert re.search(r"^echo +2 +echo +[\d,]+ +1\.00 ", done.stdout, re.M)


def test_mcp_is_measured_beside_rest(url: str) -> None:
    done = bench(url, "--mcp", "--clients", "1", "--seconds", "0.3", "--rounds", "1", "--json")

    assert {row["operation"] for row in json.loads(done.stdout)} == {"create", "create over MCP"}


def test_a_refusal_ends_the_benchmark_and_is_shown(url: str) -> None:
    done = bench(url, "--mode", "create", token="wrong")

    assert done.returncode == 1
    assert "401" in done.stderr
    assert "unauthenticated" in done.stderr


def test_no_gate_is_one_clear_line() -> None:
    done = bench("http://127.0.0.1:9", "--mode", "create")

    assert done.returncode == 1
    assert "http://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("clients", ["none", "0", "1,"])
def test_clients_that_are_no_numbers_are_refused(url: str, clients: str) -> None:
    assert bench(url, "--clients", clients).returncode == 2
