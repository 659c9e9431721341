"""Whether tests notice a change: `python -m bench.mutants [MODULE TEST...]` runs tests on mutants of a module.

For example `python -m bench.mutants parts/model/pausing.py conformance/test_pausing.py`.  Without arguments it takes
the modules of SELECTION with the fast tests that are named there, of a large one a sample, and prints the table of
docs/evidence.md.  mutmut makes the mutants: `pip install mutmut`.  It needs an ordinary package, so it works on a copy
of this checkout in the layout of the wheel.  What survives is printed as a diff: a test is missing, or the line is not
needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ("backends", "clients", "commands", "conformance", "docs", "extras", "parts", "skills")
SETTINGS = """
[tool.pytest.ini_options]
addopts = "--strict-markers --import-mode=importlib -p asyncgate.conformance.plugin -p no:xdist -p no:cacheprovider"
[tool.mutmut]
source_paths = ["asyncgate"]
only_mutate = ["asyncgate/{module}"]
do_not_mutate_patterns = ['raise errors\\.', 'f?"[^"]* [^"]* ']
pytest_add_cli_args = ["--backend", "{backend}"]
pytest_add_cli_args_test_selection = {tests}
"""
COUNTS = re.compile(r"(\d+)/(\d+)  \S+ (\d+)")       # of all, and caught
CAUGHT = {"killed", "timeout", "segfault", "caught by type check"}
SEED, SAMPLE = 20261127, 120
# Rules, then the engine, then what writes; and the tests of each that run in memory within a second or two.
SELECTION: dict[str, tuple[str, ...]] = {
    "parts/model/pausing.py": ("conformance/test_pausing.py",),
    "parts/model/parking.py": ("conformance/test_parking.py", "conformance/test_families.py"),
    "parts/model/overdue.py": (
        "tests/heart/test_law.py", "tests/heart/test_attempts.py", "conformance/test_overdue.py",
        "conformance/test_leases.py", "conformance/test_fail.py", "conformance/test_expiry.py"),
    "parts/model/unique.py": ("conformance/test_unique.py", "conformance/test_unique_model.py"),
    "parts/model/limiting.py": ("conformance/test_task_limits.py", "conformance/test_task_limits_model.py"),
    "parts/model/families.py": ("conformance/test_families.py",),
    "extras/unique/rules.py": ("conformance/test_unique.py", "conformance/test_unique_model.py"),
    "extras/limits/rules.py": (
        "conformance/test_task_limits.py", "conformance/test_task_limits_model.py", "conformance/test_explain.py",
        "tests/extras/limits/test_limits_seen.py"),
    "extras/families/rules.py": ("conformance/test_families.py",),
    "extras/asking/rules.py": ("conformance/test_asking.py",),
    "extras/output/rules.py": ("conformance/test_output.py", "tests/extras/output/test_output_stream.py"),
    "parts/receipts/seals.py": (
        "conformance/test_seals.py", "conformance/test_archive.py", "tests/receipts/test_seals.py"),
    "asyncgate.py": (*(f"conformance/test_{name}.py" for name in (
        "create", "claim", "complete", "fail", "cancel", "expiry", "leases", "batches", "receipts", "obligations",
        "progress", "rerun", "steps", "waiting", "parking", "sessions", "resuming", "permissions", "task_limits",
        "usage", "identity", "tenants", "explain", "pausing", "modes", "quotas", "workers", "ends",
        "escalation", "unique")),
        "tests/heart/test_law.py", "tests/heart/test_extensions.py",
        "tests/heart/test_attempts.py::test_a_second_attempt_answers_by_what_it_finds",
        "tests/heart/test_adding_an_operation.py::test_an_operation_is_what_its_line_and_its_docstring_say"),
    "backends/sqlite_tables.py": (*(f"conformance/test_{name}.py" for name in (
        "create", "claim", "complete", "fail", "expiry", "lists", "receipts", "lanes", "task_limits", "unique",
        "queues", "usage", "workers", "schedules", "erasure", "asking", "families", "output", "obligations",
        "retention", "quotas", "tenants", "waiting", "operating", "modes", "explain", "export")),
        "conformance/test_changes.py::test_a_total_says_when_counting_ended_early",
        "conformance/test_changes.py::test_a_total_counts_what_the_filters_leave",
        "tests/backends/test_sqlite_schema.py::test_statements_name_the_tenant_first_and_change_no_part_of_a_key",
        "tests/backends/test_sqlite_commits.py::"
        "test_a_key_is_good_after_a_restart_although_the_clock_was_set_back_meanwhile",
        "tests/heart/test_clock.py", "tests/receipts/test_seals.py", "tests/extras/ledger/test_ledger.py",
        "tests/extras/ledger/test_strict.py", *(f"tests/extras/webhooks/test_webhooks.py::test_{name}" for name in (
            "no_tenant_sees_changes_or_is_told_of_what_is_anothers",
            "deliveries_are_replayed_by_id_by_time_and_when_they_are_parked"))),
}


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("module", nargs="?", help="a module of the gate, such as parts/model/pausing.py; default all "
                                                  "of the selection")
    parser.add_argument("tests", nargs="*", help="files of tests, such as conformance/test_pausing.py; default those "
                                                 "of the selection")
    parser.add_argument("--backend", default="memory:", help="of the tests that run on one (default %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at once (default: each processor)")
    parser.add_argument("--sample", type=int, help="at most so many mutants of a module (default: all of one that is "
                                                   f"named, else {SAMPLE})")
    parser.add_argument("--seed", type=int, default=SEED, help="decides which (default %(default)s)")
    return parser.parse_args()


def lay_out(folder: Path, module: str, tests: Sequence[str], backend: str) -> None:
    """Copy the checkout as the wheel has it, with the tests beside it."""
    package = folder / "asyncgate"
    for name in PACKAGE:
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    shutil.copy(ROOT / "asyncgate.py", package / "__init__.py")
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    (folder / "mutants").mkdir()        # Python looks only once for a folder of its path that is not there
    paths = [path if path.startswith("tests/") else f"asyncgate/{path}" for path in tests]
    (folder / "pyproject.toml").write_text(SETTINGS.format(module=file_of(module), backend=backend, tests=paths))


def file_of(module: str) -> str:
    """Return where the wheel has a module."""
    return "__init__.py" if module == "asyncgate.py" else module


def run_mutmut(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start mutmut where the copy is; its mutants are found before the copy and a checkout that is installed."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "mutants")}
    return subprocess.Popen([sys.executable, "-P", "-m", "mutmut", *arguments], cwd=folder, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def choose_mutants(folder: Path, module: str, most: int, seed: int) -> list[str]:
    """Have all mutants of a module made, and choose some of them."""
    run_mutmut(folder, "run", "none").communicate()      # no mutant is called so: it ends where it would try them
    meta = folder / "mutants" / "asyncgate" / f"{file_of(module)}.meta"
    if not meta.exists():
        return []
    names = sorted(name.replace("__init__.", "") for name in json.loads(meta.read_text())["exit_code_by_key"])
    return sorted(random.Random(f"{seed} {module}").sample(names, min(most, len(names))))


def try_module(module: str, tests: Sequence[str], asked: argparse.Namespace, most: int | None) -> tuple[int, int, int]:
    """Run tests on the mutants of a module; return how many were made, were tried, and were caught."""
    with tempfile.TemporaryDirectory() as name:
        lay_out(folder := Path(name), module, tests, asked.backend)
        chosen = [] if most is None else choose_mutants(folder, module, most, asked.seed)
        running = run_mutmut(folder, "run", "--max-children", str(asked.processes), *chosen)
        counts, output = ("0", "0", "0"), ""
        assert running.stdout
        for line in running.stdout:         # each state of mutmut's one line of progress, too: newlines are universal
            output += line
            if match := COUNTS.search(line):
                counts = match[1], match[2], match[3]
                print(f"\r{counts[0]} of {counts[1]} mutants of {module} seen, {counts[2]} caught", end="", flush=True)
        print()
        if running.wait() or counts[1] == "0":
            raise SystemExit(output[-4000:])
        listed = run_mutmut(folder, "results", "--all", "true").communicate()[0]
        states = dict(re.findall(r"^\s*(\S+): (.+?)\s*$", listed, re.M))
        tried = {name: state for name, state in states.items() if not chosen or name.replace("__init__.", "") in chosen}
        for survivor in [name for name, state in tried.items() if state not in CAUGHT]:
            print(f"{tried[survivor]}:", run_mutmut(folder, "show", survivor).communicate()[0], flush=True)
        return len(states), len(tried), sum(state in CAUGHT for state in tried.values())


def try_selection(asked: argparse.Namespace) -> None:
    """Try samples of the mutants of each module of the selection, and print a table of them."""
    rows = list[tuple[str, int, int, int]]()
    for module, tests in SELECTION.items():
        rows.append((f"`{module}`", *try_module(module, tests, asked, asked.sample or SAMPLE)))
        print(rows[-1], flush=True)
    made, tried, caught = zip(*(row[1:] for row in rows), strict=True)
    rows.append(("all", sum(made), sum(tried), sum(caught)))
    print("\n| module | mutants | tried | caught | share |\n| --- | ---: | ---: | ---: | ---: |")
    for name, *counts in rows:
        print(f"| {name} | {counts[0]:,} | {counts[1]:,} | {counts[2]:,} | {counts[2] / counts[1]:.0%} |")


def main() -> int:
    """Mutate, and tell how many mutants the tests caught and which they did not."""
    if importlib.util.find_spec("mutmut") is None:
        print("bench.mutants: mutmut makes the mutants: pip install mutmut", file=sys.stderr)
        return 2
    asked = read_arguments()
    tests = asked.tests or SELECTION.get(asked.module, ())
    if asked.module and not tests:
        print(f"bench.mutants: name the tests of {asked.module}", file=sys.stderr)
        return 2
    for path in filter(None, (asked.module, *tests)):
        if not (ROOT / path.partition("::")[0]).exists():
            print(f"bench.mutants: {path} is not in the checkout", file=sys.stderr)
            return 2
    if asked.module is None:
        try_selection(asked)
    else:
        made, tried, caught = try_module(asked.module, tests, asked, asked.sample)
        print(f"{caught} of {tried} mutants caught, {made} made")
    return 0


if __name__ == "__main__":
    sys.exit(main())
