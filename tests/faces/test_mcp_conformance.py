"""The official conformance suite of MCP against a gate, and its scenarios of tasks and questions over a real worker.

The suite checks every message against the schema of its revision, whatever else a scenario is about.  It sends no
credential, so the gates here ask for none.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import TOKEN

SUPPORT = Path(__file__).parents[1] / "support"
BASELINE, FIXTURES = SUPPORT / "mcp_conformance_baseline.yml", SUPPORT / "mcp_fixture_tools.py"
MODERN, LEGACY = "2026-07-28", "2025-11-25"
# These concern any server; the others ask for tools, prompts and resources that only a server made for them has.
GENERIC = {
    MODERN: {"server-stateless", "tools-list", "sep-2164-resource-not-found", "dns-rebinding-protection", "caching",
             "http-header-validation", "input-required-result-unsupported-methods",
             "input-required-result-validate-input", "server-sse-multiple-streams"},
    LEGACY: {"server-initialize", "ping", "tools-list", "dns-rebinding-protection"},
}
TASKS = {"tasks-capability-negotiation", "tasks-dispatch-and-envelope", "tasks-lifecycle", "tasks-mrtr-composition",
         "tasks-mrtr-input", "tasks-request-headers", "tasks-request-state-removal", "tasks-required-task-error",
         "tasks-wire-fields"}
# What a call that waits is answered with, and repeated with. What the other scenarios of this kind want no task asks:
# samples of a model, roots, prompts; and answers without the state that they belong to would be answers unasked.
IN_LINE = {f"input-required-result-{name}" for name in (
    "basic-elicitation", "request-state", "multi-round", "missing-input-response", "result-type", "tampered-state",
    "validate-input", "unsupported-methods")}
BAD = {"FAILURE", "WARNING"}
Checks = dict[str, dict[str, set[str]]]


def judged(node: Any, url: str, revision: str, results: Path, *options: str) -> tuple[Checks, Any]:
    """Run the scenarios of a revision; return the states of each check of each scenario, and how the run ended."""
    # A credential that stands for everybody, as here, is asked about somebody: the address says whom.
    address = f"{url}/mcp?principal_kind=agent&principal_id=suite"
    ran = node.run("conformance", "server", "--url", address, "--requirements", revision, "-o", str(results), *options)
    checks: Checks = {}
    for path in results.glob("*/checks.json"):
        named = re.fullmatch(r"server-(.+)-\d{4}-\d\d-\d\dT[\d-]+Z", path.parent.name)
        assert named, path
        for check in json.loads(path.read_text()):
            checks.setdefault(named[1], {}).setdefault(check["id"], set()).add(check["status"])
    assert checks, ran.stdout + ran.stderr
    return checks, ran


def named(checks: Checks, states: set[str]) -> set[str]:
    """Name the checks that ended in one of these states."""
    return {f"{scenario}:{check}" for scenario, verdicts in checks.items() for check, ended in verdicts.items()
            if ended & states}


def needless(excused: set[str], checks: Checks) -> set[str]:
    """Return what excuses nothing in this run; a check that the suite did not come to keeps its excuse."""
    bad, good = named(checks, BAD), named(checks, {"SUCCESS"})
    whole = {scenario for scenario in excused & checks.keys()
             if not any(name.startswith(f"{scenario}:") for name in bad)}
    return (excused & (good - bad)) | whole


@pytest.mark.parametrize("revision", [MODERN, LEGACY])
def test_the_official_suite_finds_nothing_that_is_not_explained(
        node: Any, start: Any, tmp_path: Path, revision: str) -> None:
    excused = set(yaml.safe_load(BASELINE.read_text())["server"])
    gate = start("allow_insecure_dev=true")

    checks, ran = judged(node, gate.url, revision, tmp_path, "--expected-failures", str(BASELINE))

    assert {name for name in named(checks, BAD) if not {name, name.partition(":")[0]} & excused} == set()
    assert needless(excused, checks) == set()
    assert {name.partition(":")[0] for name in named(checks, {"SUCCESS"})} >= GENERIC[revision]
    assert ran.returncode == 0, ran.stdout


@contextlib.contextmanager
def worker(url: str) -> Iterator[None]:
    """Let a worker do the tasks of the fixture tools, and ask what they ask."""
    with subprocess.Popen([sys.executable, str(FIXTURES), "work", url, TOKEN]) as process:
        try:
            yield
        finally:
            process.kill()


def test_the_scenarios_of_tasks_and_of_questions_pass_over_a_real_worker(node: Any, start: Any, tmp_path: Path) -> None:
    gate = start("allow_insecure_dev=true", database=f"sqlite:///{tmp_path}/gate.db", program=(str(FIXTURES),))

    with worker(gate.url):
        checks, _ = judged(node, gate.url, MODERN, tmp_path / "results")

    scenarios = {scenario: states for scenario, states in checks.items()
                 if scenario.startswith("tasks-") or scenario in IN_LINE}
    # the suite skips it
    assert scenarios.pop("tasks-status-notifications", {}).keys() <= {"tasks-status-notifications"}
    assert scenarios.keys() == TASKS | IN_LINE
    assert named(scenarios, {"FAILURE", "WARNING", "SKIPPED"}) == set()
    assert {name.partition(":")[0] for name in named(scenarios, {"SUCCESS"})} == TASKS | IN_LINE
