"""A suite is worth nothing unless it fails: each backend of broken.py must be caught, and where expected."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from asyncgate import conformance
from tests.support.programs import FEW_PLUGINS

SUPPORT = Path(__file__).parents[1] / "support"
# The fault, the file of the suite with its rule, and the test of it, which must fail.
CAUGHT = {
    "drops_parents": ("receipts", "test_each_step_writes_exactly_its_receipts"),
    "offers_delayed_tasks": ("claim", "test_a_delayed_task_is_no_obstacle_for_those_behind_it"),
    "forgets_priority": ("claim", "test_a_higher_priority_comes_before_an_older_task"),
    "loses_renewals": ("leases", "test_a_renewed_lease_survives_the_sweep_at_its_old_end"),
    "loses_commits": ("races", "test_writers_of_many_tenants_do_not_disturb_each_other"),
    "shows_others_obligations": ("tenants", "test_no_list_shows_anything_of_another_tenant"),
    "forgets_discharge": ("obligations", "test_open_obligations_are_created_minus_discharged"),
    "reads_stale": ("complete", "test_saying_later_where_the_result_lies_discharges_the_duty"),
    "filters_after_the_limit": ("lists", "test_a_page_of_receipts_is_full_while_more_remains"),
    "forgets_keys": ("races", "test_50_creates_with_one_key_are_one_task"),
    "ignores_lanes": ("claim", "test_a_worker_gets_only_what_needs_a_subset_of_its_capabilities"),
    "keeps_refused_batches": ("batches", "test_an_operation_that_the_database_refuses_fails_alone"),
    "keeps_one_line": ("identity", "test_a_log_is_one_chain_however_many_write_at_once"),
    "overlooks_stuck_tasks": ("overdue", "test_a_database_finds_the_tasks_that_the_law_calls_overdue"),
    "forgets_suspensions": ("identity", "test_a_key_tells_at_once_whether_its_tenant_is_suspended"),
}


def installed(folder: Path, scheme: str, module: str) -> dict[str, str]:
    """Install a package whose only module registers a backend; return the environment that has it."""
    (folder / f"{module}.py").write_text((SUPPORT / f"{module}.py").read_text())
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[asyncgate.backends]\n{scheme} = {module}\n")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **FEW_PLUGINS, "PYTHONPATH": os.pathsep.join(paths)}


def test_each_backend_that_breaks_a_rule_is_caught_by_the_test_of_that_rule(tmp_path: Path) -> None:
    suite = Path(conformance.__file__).parent
    backends = [part for fault in CAUGHT for part in ("--backend", f"broken:{fault}")]
    rules = sorted({f"{suite}/test_{file}.py::{expected}" for file, expected in CAUGHT.values()})
    command = [sys.executable, "-m", "pytest", *rules, "-p", "asyncgate.conformance.plugin", *backends, "-c",
               os.devnull, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-q", "--tb=no",
               "-rf", "--import-mode=importlib"]

    run = subprocess.run(command, cwd=tmp_path, env=installed(tmp_path, "broken", "broken"), capture_output=True,
                         text=True)

    assert run.returncode == 1, run.stdout + run.stderr
    failed = re.findall(r"^FAILED .*::(\w+)\[broken(\d+)\b", run.stdout, re.M)
    missed = [fault for at, (fault, (_, expected)) in enumerate(CAUGHT.items()) if (expected, str(at)) not in failed]
    assert missed == []


def test_every_broken_backend_is_expected_to_be_caught() -> None:
    spec = importlib.util.spec_from_file_location("broken", SUPPORT / "broken.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert module.FAULTS.keys() == CAUGHT.keys()
