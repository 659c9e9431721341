"""The core without extras/: it starts, serves, and passes its own tests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncgate.parts.extras import find_extras
from asyncgate.parts.operations import OPERATIONS
from tests.support.programs import FEW_PLUGINS

ROOT = Path(__file__).parents[2]
CORE = ("asyncgate.py", "backends", "clients", "commands", "conformance", "parts", "docs", "pyproject.toml",
        "tests")
# Rules of every kind of operation, and of what an extra looks after where it is installed.
TESTS = ("test_permissions.py", "test_leases.py", "test_carry.py", "test_retention.py", "test_export.py",
         "test_receipts.py", "test_obligations.py", "test_seals.py", "test_archive.py")


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the house without the extras."""
    copy = tmp_path_factory.mktemp("core")
    for name in CORE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "operations.pyc"))
        else:
            shutil.copy(source, copy / name)
    run(copy, "-m", "asyncgate.commands.declare")
    return copy


def run(core: Path, *arguments: str, status: int = 0) -> str:
    """Run Python in the copy, and return what it wrote."""
    done = subprocess.run([sys.executable, *arguments], cwd=core, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env={**os.environ, **FEW_PLUGINS, "PYTHONPATH": str(core)})
    assert done.returncode == status, done.stdout
    return done.stdout


def test_the_table_lacks_the_operations_of_the_extras_and_nothing_else(core: Path) -> None:
    ask = "import json; from asyncgate.parts.operations import OPERATIONS; print(json.dumps([*OPERATIONS]))"
    of_extras = {op.name for extra in find_extras().values() for op in extra.operations}

    names = json.loads(run(core, "-c", ask))

    assert of_extras
    assert {*names} == OPERATIONS.keys() - of_extras


def test_it_does_the_whole_main_job(core: Path) -> None:
    assert "0 open obligations" in run(core, "-m", "asyncgate", "demo")


def test_a_command_of_an_extra_is_unknown_and_an_option_names_what_it_lacks(core: Path) -> None:
    assert "No such command 'doctor'" in run(core, "-m", "asyncgate", "doctor", status=2)
    assert "needs the extra ai_worker" in run(core, "-m", "asyncgate", "worker", "--ai", "x.yaml", status=2)
    assert "needs the extra a2a_worker" in run(
        core, "-m", "asyncgate", "worker", "--a2a", "http://x", "--type", "t", status=2)


def test_a_gate_whose_settings_ask_for_an_extra_says_that_it_lacks_it(core: Path) -> None:
    for setting, extra in (("receipt_mode=memorygate_integrated", "ledger"), ("security.oauth.enabled=true", "oauth")):
        output = run(core, "-m", "asyncgate", "serve", "--database", "sqlite:///gate.db", "--set", setting, status=2)
        assert f"needs the extra {extra}, which this installation lacks" in output


def test_it_refuses_the_answer_of_an_mcp_client_that_nothing_has_asked(core: Path) -> None:
    output = run(core, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/faces/test_mcp_tasks.py", "-k",
                 "answers_are_refused")

    assert "1 passed" in output


def test_it_passes_the_tests_of_the_core(core: Path) -> None:
    output = run(core, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--backend", "memory:",
                 *(f"conformance/{name}" for name in TESTS), "tests/receipts")

    counted = re.search(r"(\d+) passed, (\d+) skipped", output)
    assert counted, output
    assert int(counted[1]) > 100


def test_a_cascade_is_refused_and_not_ignored(core: Path) -> None:
    ask = """if True:
        from asyncgate.clients.testing import Gate
        from asyncgate.clients import Refusal
        with Gate(agent_id="ada") as gate:
            task = gate.create_task("demo", payload=None)
            try:
                gate.cancel_task(task.task_id, cascade=True)
            except Refusal as refusal:
                print(refusal.code, "families" in str(refusal), gate.get_task(task.task_id).status)"""

    assert run(core, "-c", ask).strip() == "invalid_request True queued"
