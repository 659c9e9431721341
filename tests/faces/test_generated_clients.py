"""The OpenAPI document is clean to linters, and clients that generators make of it run the whole cycle.

The generators are programs that nobody here wrote, each of its version; what cannot be installed is skipped by name.
What they have made of the document is kept for as long as it stays the same; the cycle runs each time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncgate import __version__
from asyncgate.parts.faces import openapi
from asyncgate.parts.faces.lease_protocol import LEASE_PROTOCOL
from asyncgate.parts.operations import OPERATIONS
from tests.support.keeping import keep

TOKEN = "a-token-for-tests"
CYCLES = Path(__file__).parents[1].joinpath("support", "generated")
PARTS = "models,apis,supportingFiles,apiTests=false,modelTests=false,apiDocs=false,modelDocs=false"
# Each generator of Python, and what the clients that it makes import.
GENERATORS = {
    "openapi-python-client": ("openapi-python-client==0.29.1", "httpx==0.28.1", "attrs", "python-dateutil"),
    "openapi-generator": ("openapi-generator-cli==7.26.0", "pydantic>=2", "urllib3>=2", "python-dateutil"),
}


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """Return the file of the document."""
    path = tmp_path / "openapi.json"
    path.write_bytes(openapi.build_document((*OPERATIONS.values(), *LEASE_PROTOCOL), __version__))
    return path


def made_by(generator: str, cache: Path) -> Path:
    """Install a generator of Python, once for all processes, and return the folder of its packages."""
    wanted = GENERATORS[generator]
    folder = cache / hashlib.sha256(f"{sys.version} {wanted}".encode()).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"lock.{generator}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = folder.with_suffix(".part")
            shutil.rmtree(unfinished, ignore_errors=True)
            ran = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check",
                                  "--target", unfinished, *wanted], capture_output=True, text=True, timeout=300)
            if ran.returncode != 0:
                pytest.skip(f"pip cannot install {wanted[0]}: {' '.join(ran.stderr.split())[-300:]}")
            unfinished.rename(folder)
    return folder


def ended(command: list[Any], **more: Any) -> str:
    """Run a program to its good end; return what it says."""
    ran: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, timeout=240, **more)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def test_the_linters_find_nothing(node_for_openapi: Any, described: Path, tools_cache: Path) -> None:
    rules, options = "extends: ['spectral:oas']\n", ("lint", "--max-problems=20", "--format=json")

    def lint(folder: Path) -> None:
        (folder / "rules.yaml").write_text(rules)
        spectral = node_for_openapi.run("spectral", "lint", "--fail-severity=hint", "-r", str(folder / "rules.yaml"),
                                        str(described))
        redocly = node_for_openapi.run("redocly", *options, str(described))

        assert spectral.returncode == 0, spectral.stdout
        assert redocly.returncode == 0, redocly.stdout + redocly.stderr
        assert '"warnings": 0' in redocly.stdout, redocly.stdout

    keep(tools_cache, "linted", [described.read_text(), node_for_openapi.folder.name, rules, *options], lint)


@pytest.mark.parametrize(("generator", "cycle"), [
    ("openapi-python-client", "cycle_attrs.py"), ("openapi-generator", "cycle_pydantic.py")])
def test_a_generated_client_for_python_runs_the_whole_cycle(
        live: Any, described: Path, tmp_path: Path, tools_cache: Path, generator: str, cycle: str) -> None:
    if generator == "openapi-generator" and not shutil.which("java"):
        pytest.skip("there is no Java: openapi-generator does not run")
    tools = made_by(generator, tools_cache)
    surroundings = {**os.environ, "PYTHONPATH": str(tools), "HOME": str(tmp_path)}

    def generate(folder: Path) -> None:
        command, *options = {
            "openapi-python-client": ["openapi-python-client", "generate", "--path", described, "--meta", "none",
                                      "--output-path", folder / "made"],
            "openapi-generator": ["openapi-generator-cli", "generate", "-g", "python", "-i", described, "-o", folder,
                                  "--package-name", "made", "--global-property", PARTS]}[generator]
        output = ended([sys.executable, tools / "bin" / str(command), *options], env=surroundings, cwd=tmp_path)
        assert "WARNING parsing" not in output      # of what a generator leaves out because it does not understand it

    folder = keep(tools_cache, f"client-of-{generator}", [described.read_text(), tools.name, PARTS], generate)
    told = ended([sys.executable, CYCLES / cycle, folder, live.url, TOKEN], env=surroundings, cwd=tmp_path)

    assert told == "the cycle is whole\n"


def test_generated_types_for_typescript_run_the_whole_cycle(
        node_for_openapi: Any, live: Any, described: Path, tools_cache: Path) -> None:
    node, checks = node_for_openapi, ("--strict", "--target", "es2022", "--module", "nodenext", "--skipLibCheck")
    program = CYCLES / "cycle.mts"

    def generate(folder: Path) -> None:
        (folder / "node_modules").symlink_to(node.folder / "node_modules")
        shutil.copy(program, folder)
        types = node.run("openapi-typescript", str(described), "-o", str(folder / "made.d.ts"))
        checked = node.run("tsc", *checks, str(folder / program.name))

        assert types.returncode == 0, types.stdout + types.stderr
        assert checked.returncode == 0, checked.stdout

    folder = keep(tools_cache, "types-of-openapi",
                  [described.read_text(), program.read_text(), node.folder.name, *checks], generate)
    ran = node.run("node", str(folder / "cycle.mjs"), live.url, TOKEN)

    assert (ran.stdout, ran.returncode) == ("the cycle is whole\n", 0), ran.stderr
