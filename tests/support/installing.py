"""The package as it is built and installed, once for a whole run: fixtures for the modules that import them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

Shared = Callable[[str, Callable[[Path], None]], Path]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command as a stranger would, without this process's import path, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(source: Path, folder: Path, *what: str) -> None:
    """Build without a network; the default is a wheel by way of an sdist."""
    run(sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", folder, source, cwd=folder.parent)


def install(wheel: Path, folder: Path) -> None:
    """Install the wheel in a new environment that borrows this one's dependencies."""
    venv.EnvBuilder(symlinks=True).create(folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    # Written last, so that pip sees no other asyncgate; and the .pth files of a borrowed folder, such as that of an
    # editable install, are not obeyed.
    packages = next(folder.glob("lib/python*/site-packages"))
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))


def copied_into_the_image() -> list[str]:
    lines = [line.split() for line in (ROOT / "Dockerfile").read_text().splitlines()]
    return [name for line in lines if line[:1] == ["COPY"] and "--from" not in line[1] for name in line[1:-1]]


def copy_sources(folder: Path) -> None:
    folder.mkdir()
    for name in copied_into_the_image():
        if (ROOT / name).is_dir():
            left_out = ("operations.py", "typescript") if name == "clients" else ()
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", *left_out))
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Fill a folder once for the whole run, also when its tests are spread over processes."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def make(name: str, fill: Callable[[Path], None]) -> Path:
        folder, done = base / name, base / f"{name}.done"
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                fill(folder)
                done.touch()
        return folder

    return make


@pytest.fixture(scope="session")
def checkout(shared: Shared) -> Path:
    """What the Dockerfile copies of the checkout: nothing that is installed points here."""
    return shared("checkout", copy_sources)


@pytest.fixture(scope="session")
def wheel(shared: Shared) -> Path:
    """The wheel that is built from the sdist."""
    return next(shared("built", lambda folder: build(ROOT, folder)).glob("*.whl"))


@pytest.fixture(scope="session")
def installed(shared: Shared, wheel: Path) -> Path:
    """The bin folder of a new environment that holds the wheel."""
    return shared("installed", lambda folder: install(wheel, folder)) / "bin"


@pytest.fixture(scope="session")
def built(shared: Shared) -> Path:
    """The site of the documentation, as the checkout builds it over an earlier one; nothing is wrong with any page."""
    def fill(folder: Path) -> None:
        folder.mkdir()
        (folder / "llms.txt").write_text("of the earlier site")
        done = subprocess.run([sys.executable, "-m", "asyncgate", "docs", "--build", str(folder)],
                              capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == (f"{folder / 'index.html'}\n", "")

    return shared("site", fill)
