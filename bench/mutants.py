"""Whether tests notice a change: `python -m bench.mutants MODULE TEST...` runs tests on each mutant of a module.

For example `python -m bench.mutants parts/model/pausing.py conformance/test_pausing.py`.  mutmut makes the mutants:
`pip install mutmut`.  It needs an ordinary package, so it works on a copy of this checkout in the layout of the wheel.
What survives is printed as a diff: a test is missing, or the line is not needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ("backends", "clients", "commands", "conformance", "docs", "extras", "parts", "skills")
SETTINGS = """
[tool.pytest.ini_options]
addopts = "--strict-markers --import-mode=importlib -p asyncgate.conformance.plugin -p no:xdist -p no:cacheprovider"
[tool.mutmut]
source_paths = ["asyncgate"]
only_mutate = ["asyncgate/{module}"]
pytest_add_cli_args = ["--backend", "{backend}"]
pytest_add_cli_args_test_selection = {tests}
"""
COUNTS = re.compile(r"(\d+)/(\d+)  \S+ (\d+)")       # of all, and caught


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("module", help="a module of the gate, such as parts/model/pausing.py")
    parser.add_argument("tests", nargs="+", help="files of tests, such as conformance/test_pausing.py")
    parser.add_argument("--backend", default="memory:", help="of the tests that run on one (default %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at once (default: each processor)")
    return parser.parse_args()


def lay_out(folder: Path, asked: argparse.Namespace) -> None:
    """Copy the checkout as the wheel has it, with the tests beside it."""
    package = folder / "asyncgate"
    for name in PACKAGE:
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "asyncgate.py", package / "__init__.py")
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    module = "__init__.py" if asked.module == "asyncgate.py" else asked.module
    (folder / "mutants").mkdir()        # Python looks only once for a folder of its path that is not there
    tests = [path if path.startswith("tests/") else f"asyncgate/{path}" for path in asked.tests]
    (folder / "pyproject.toml").write_text(SETTINGS.format(module=module, backend=asked.backend, tests=tests))


def run_mutmut(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start mutmut where the copy is; its mutants are found before the copy and a checkout that is installed."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "mutants")}
    return subprocess.Popen([sys.executable, "-P", "-m", "mutmut", *arguments], cwd=folder, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def main() -> int:
    """Mutate, and tell how many mutants the tests caught and which they did not."""
    if importlib.util.find_spec("mutmut") is None:
        print("bench.mutants: mutmut makes the mutants: pip install mutmut", file=sys.stderr)
        return 2
    asked, counts = read_arguments(), ("0", "0", "0")
    for path in (asked.module, *asked.tests):
        if not (ROOT / path.partition("::")[0]).exists():
            print(f"bench.mutants: {path} is not in the checkout", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory() as name:
        lay_out(folder := Path(name), asked)
        running = run_mutmut(folder, "run", "--max-children", str(asked.processes))
        assert running.stdout
        output = ""
        for line in running.stdout:         # each state of mutmut's one line of progress, too: newlines are universal
            output += line
            if match := COUNTS.search(line):
                counts = match[1], match[2], match[3]
                print(f"\r{counts[0]} of {counts[1]} mutants tried, {counts[2]} caught", end="", flush=True)
        print()
        if running.wait() or counts[1] == "0":
            print(output[-4000:], file=sys.stderr)
            return 1
        listed = run_mutmut(folder, "results").communicate()[0]
        survivors = re.findall(r"^\s*(\S+): (?:survived|no tests)", listed, re.M)
        for survivor in survivors:
            print(run_mutmut(folder, "show", survivor).communicate()[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
