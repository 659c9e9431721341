"""A backend that lives in somebody else's package is found by its entry point and passes the suite."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncgate.conformance import run as suite
from tests.support.programs import FEW_PLUGINS

SUPPORT = Path(__file__).parents[1] / "support"
URL = "third://{tmp}/receipts.jsonl"
SOURCE = SUPPORT / "third_party_backend.py"


def installed(folder: Path) -> dict[str, str]:
    """Install the package; return the environment that has it."""
    (folder / SOURCE.name).write_text(SOURCE.read_text())
    metadata = folder / "third_party_backend-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party-backend\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[asyncgate.backends]\nthird = third_party_backend\n")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **FEW_PLUGINS, "PYTHONPATH": os.pathsep.join(paths)}


def test_the_example_is_as_short_as_the_documentation_promises() -> None:
    assert len(SOURCE.read_text().splitlines()) <= 40


def test_a_backend_of_another_package_passes_the_suite(tmp_path: Path) -> None:
    chosen = "test_claim or test_complete or test_obligations or test_tenants or test_races or test_schedules"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--pyargs", "asyncgate.conformance", "-p", "asyncgate.conformance.plugin",
         "--backend", URL, "-k", chosen, "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir",
         str(tmp_path), "--import-mode=importlib"],
        cwd=tmp_path, env={**installed(tmp_path), "PYTEST_DEBUG_TEMPROOT": str(tmp_path)}, capture_output=True,
        text=True)

    assert run.returncode == 0, run.stdout + run.stderr
    assert f"asyncgate backends: {URL}" in run.stdout
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed
    assert int(passed[1]) > 100
    written = [file.read_text().splitlines() for file in tmp_path.rglob("receipts.jsonl")]
    assert any(json.loads(line)["receipt_type"] == "task.completed" for lines in written for line in lines)


TALKATIVE = """
from asyncgate.backends.memory import BACKEND, Memory

async def open_backend(url, *, serving=False, settings=None):
    print(serving, settings.pool_size)
    return Memory()
"""
SERVE = """
import asyncio
from asyncgate import Gate, load_settings

async def live(gate):
    async with gate.app.router.lifespan_context(gate.app):
        pass

flags = {"database.url": "third://", "database.pool_size": "3", "api_key": "x"}
asyncio.run(live(Gate(load_settings(flags=flags).settings)))
"""


@pytest.mark.parametrize(("arguments", "told"), [
    (["-c", SERVE], "True 3"),
    (["-m", "asyncgate", "migrate", "--database", "third://", "--set", "database.pool_size=4"], "False 4"),
    (["-m", "asyncgate", "verify", "--database", "third://", "--set", "database.pool_size=5"], "False 5")],
    ids=["serve", "migrate", "verify"])
def test_who_opens_a_database_is_told_its_settings(tmp_path: Path, arguments: list[str], told: str) -> None:
    environment = installed(tmp_path)
    (tmp_path / SOURCE.name).write_text(TALKATIVE)

    run = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == told


def test_the_suite_runs_from_the_package_by_one_call(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import sys; from asyncgate.conformance.run import run; "
         "sys.exit(run([sys.argv[1], 'memory:'], ['-k', 'test_cancel']))", URL],
        cwd=tmp_path, env=installed(tmp_path), capture_output=True, text=True)

    assert run.returncode == 0, run.stdout + run.stderr
    assert f"asyncgate backends: {URL}, memory:" in run.stdout


def test_without_pytest_the_suite_says_what_to_install(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import sys, importlib.util as u; find = u.find_spec; "
         "u.find_spec = lambda name, *more: None if name == 'pytest' else find(name, *more); "
         "from asyncgate.conformance.run import run; sys.exit(run(['memory:']))"],
        cwd=tmp_path, capture_output=True, text=True)

    assert run.returncode == 2
    assert "pip install 'asyncgate[test]'" in run.stderr


@pytest.mark.parametrize(("url", "why"), [
    ("nosuch://here", "there is no backend for nosuch:"), ("sqlite:///no/such/folder/gate.db", "cannot open")])
def test_a_database_that_cannot_be_used_ends_the_suite_in_one_line(
        url: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.run(["memory:", url]) == 2

    assert capsys.readouterr().err.startswith(f"Error: {why}")


def test_the_example_can_be_imported() -> None:
    spec = importlib.util.spec_from_file_location("third_party_backend", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert callable(module.open_backend)
