"""One package, however it arrives: wheel, sdist, editable install and bare checkout."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import asyncgate
from tests.support.installing import ROOT, build, checkout, copy_sources, install, installed, run, shared, wheel

__all__ = ["checkout", "installed", "shared", "wheel"]
PARTS = ("backends", "clients", "commands", "conformance", "docs", "extras", "parts", "skills")
PAGES = ("CHANGELOG.md", "README.md", "SECURITY.md")        # of the documentation, though they lie beside docs/
FACTS = f"asyncgate-{asyncgate.__version__}.dist-info"

# Prints where the gate and its backends were found.
WHERE = "import asyncgate, asyncgate.backends as b; print(asyncgate.__file__, b.__file__, sep='\\n')"

# Makes a click group tell which module it belongs to: `__main__` would mean that every class exists twice.
WHOSE_MAIN = """
import runpy, click
import asyncgate.parts.app as app
click.Group.main = lambda self, *args, **kwargs: print(app.Engine.__module__)
"""


def files_of_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def files_of(*parts: str) -> set[str]:
    paths = (path for part in parts for path in (ROOT / part).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in paths if not {"__pycache__", "typescript"} & {*path.parts}}


def places(checkout: Path) -> list[str]:
    return [str(checkout / "asyncgate.py"), str(checkout / "backends" / "__init__.py")]


def test_the_wheel_holds_the_gate_its_parts_and_nothing_else(wheel: Path) -> None:
    package = {name for name in files_of_wheel(wheel) if not name.startswith(f"{FACTS}/")}

    gate = {"asyncgate/__init__.py", "asyncgate/__main__.py", "asyncgate/py.typed"}
    pages = {f"asyncgate/{name}" for name in PAGES}
    assert package == gate | pages | {f"asyncgate/{name}" for name in files_of(*PARTS)}


def test_the_wheel_brings_the_schema_and_the_conformance_suite(wheel: Path) -> None:
    names = files_of_wheel(wheel)

    assert "asyncgate/backends/schema/sqlite/0001_initial.sql" in names
    assert "asyncgate/conformance/plugin.py" in names


def test_the_package_is_the_module_of_the_checkout_to_the_byte(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.read("asyncgate/__init__.py")

    assert packed == (ROOT / "asyncgate.py").read_bytes()


def test_a_wheel_built_in_the_image_equals_the_one_built_from_the_sdist(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")       # the gate that is installed here must not stand in for the copy
    copy_sources(tmp_path / "image")
    build(tmp_path / "image", tmp_path / "direct", "--wheel")

    direct = next((tmp_path / "direct").glob("*.whl"))
    assert direct.name == wheel.name
    assert files_of_wheel(direct) == files_of_wheel(wheel)


def test_the_version_is_that_of_the_gate_and_the_licence_is_mit(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"{FACTS}/METADATA").decode())
        licence = archive.read(f"{FACTS}/licenses/LICENSE").decode()

    assert metadata["Version"] == asyncgate.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    assert licence.startswith("MIT License")


def test_dependencies_state_a_lowest_version_and_no_highest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    bounds = [line.split(";")[0] for lines in lists for line in lines]
    assert [bound for bound in bounds if bound.count(">=") != 1 or any(sign in bound for sign in "<,~!")] == []


def test_a_new_environment_imports_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    gate, backends = map(Path, run(installed / "python", "-c", WHERE, cwd=tmp_path).split())

    assert gate.is_relative_to(installed.parent)
    assert gate.parts[-2:] == ("asyncgate", "__init__.py")
    assert backends == gate.parent / "backends" / "__init__.py"


def test_the_installed_command_and_module_tell_the_version(installed: Path, tmp_path: Path) -> None:
    assert asyncgate.__version__ in run(installed / "asyncgate", "--version", cwd=tmp_path)
    assert asyncgate.__version__ in run(installed / "python", "-m", "asyncgate", "--version", cwd=tmp_path)


def test_the_demo_runs_to_its_end_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    told = run(installed / "asyncgate", "demo", cwd=tmp_path)

    assert "0 open obligations" in told


@pytest.mark.parametrize("asked", [["--hostile"], ["--slow-disk", "4"], ["--beside", "nats"], ["--rival", "1",
                                   "--rival-kind", "bad-key"]], ids=lambda asked: asked[-1])
def test_the_installed_benchmark_says_where_what_it_lacks_is(installed: Path, tmp_path: Path, asked: list[str]) -> None:
    done = subprocess.run([installed / "asyncgate", "bench", *asked], cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 2
    assert "clone the repository or unpack the source distribution" in " ".join(done.stderr.split())


def test_the_source_distribution_brings_the_whole_benchmark(wheel: Path) -> None:
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert files_of("bench") <= names


def test_the_installed_gate_brings_its_documentation_and_its_skill(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "asyncgate", "docs", "readme", cwd=tmp_path) == (ROOT / "README.md").read_text()
    assert run(installed / "asyncgate", "docs", "design", cwd=tmp_path) == (ROOT / "docs" / "design.md").read_text()

    skill = ROOT / "skills" / "asyncgate" / "SKILL.md"
    assert run(installed / "asyncgate", "skill", cwd=tmp_path) == skill.read_text()


def test_a_bare_checkout_runs_and_finds_its_parts(checkout: Path) -> None:
    assert asyncgate.__version__ in run(sys.executable, "asyncgate.py", "--version", cwd=checkout)
    assert run(sys.executable, "-c", WHERE, cwd=checkout).split() == places(checkout)


def test_a_bare_checkout_says_how_to_generate_its_client(tmp_path: Path) -> None:
    copy_sources(bare := tmp_path / "bare")
    ask = [sys.executable, "asyncgate.py", "demo"]

    refused = subprocess.run(ask, cwd=bare, capture_output=True, text=True)
    command = refused.stderr.split("`")[1].split()
    run(sys.executable, *command[1:], cwd=bare)

    assert (refused.returncode, refused.stderr.count("\n"), command[0]) == (1, 1, "python")
    assert "0 open obligations" in run(*ask, cwd=bare)


def test_an_editable_install_imports_the_checkout(tmp_path: Path) -> None:
    copy_sources(checkout := tmp_path / "checkout")
    editable = "import sys, hatchling.build as backend; print(backend.build_editable(sys.argv[1]))"
    name = run(sys.executable, "-c", editable, tmp_path, cwd=checkout).split()[-1]

    install(tmp_path / name, tmp_path / "editable")

    scripts = tmp_path / "editable" / "bin"
    assert asyncgate.__version__ in run(scripts / "asyncgate", "--version", cwd=tmp_path)
    assert run(scripts / "python", "-c", WHERE, cwd=tmp_path).split() == places(checkout)
    database = ("--database", f"sqlite:///{tmp_path}/gate.db")
    run(scripts / "asyncgate", "migrate", *database, cwd=tmp_path)
    run(scripts / "asyncgate", "verify", *database, cwd=tmp_path)


def test_a_gate_run_as_a_script_has_one_copy_of_every_class(checkout: Path) -> None:
    script = WHOSE_MAIN + "runpy.run_path('asyncgate.py', run_name='__main__')"

    assert run(sys.executable, "-c", script, cwd=checkout).split() == ["asyncgate"]


def test_a_gate_run_as_a_module_has_one_copy_of_every_class(installed: Path, checkout: Path, tmp_path: Path) -> None:
    script = WHOSE_MAIN + "runpy.run_module('asyncgate', run_name='__main__', alter_sys=True)"

    assert run(sys.executable, "-c", script, cwd=checkout).split() == ["asyncgate"]
    assert run(installed / "python", "-c", script, cwd=tmp_path).split() == ["asyncgate"]
