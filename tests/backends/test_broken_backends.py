"""A suite is worth nothing unless it fails: each backend of broken.py must be caught, and where expected."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncgate import conformance

SUPPORT = Path(__file__).parents[1] / "support"
# The fault, the file that is run against it, and a test that must be among those that fail.
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
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def conform(folder: Path, environment: dict[str, str], url: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the suite, or the files that are named, as a user of the package would."""
    command = [sys.executable, "-m", "pytest", "--pyargs", *args, "-p", "asyncgate.conformance.plugin", "--backend",
               url, "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull, "--rootdir", str(folder), "-q",
               "--tb=no", "-rf", "--import-mode=importlib"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("fault", CAUGHT)
def test_a_backend_that_breaks_a_rule_is_caught(fault: str, tmp_path: Path) -> None:
    file, expected = CAUGHT[fault]
    environment = installed(tmp_path, "broken", "broken")
    suite = Path(conformance.__file__).parent / f"test_{file}.py"

    run = conform(tmp_path, environment, f"broken:{fault}", str(suite), "-k", expected)

    failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
    assert run.returncode == 1, run.stdout + run.stderr
    assert any(f"::{expected}" in line for line in failed), run.stdout


def test_every_broken_backend_is_expected_to_be_caught() -> None:
    spec = importlib.util.spec_from_file_location("broken", SUPPORT / "broken.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert module.FAULTS.keys() == CAUGHT.keys()
