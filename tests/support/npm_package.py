"""The npm package, built and packed once, and installed into an empty folder as a user does it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncgate.commands.declare_typescript import render_typescript
from tests.conftest import Node, tools_of_npm
from tests.support.patience import PATIENCE_SECONDS

SOURCE = Path(__file__).parents[2] / "clients" / "typescript"
# What it is used with in the tests; it needs none of them.
BESIDE = ("ai@7.0.173", "esbuild@0.28.2", "react@19.2.7", "react-dom@19.2.7", "valibot@1.5.0", "zod@4.6.7")


class Package:
    """An empty folder in which the packed package is installed."""

    def __init__(self, folder: Path, tarball: Path, node: Node) -> None:
        self.folder, self.tarball, self.node = folder, tarball, node
        self.environment = {**node.environment, "ASYNCGATE_TEST_COMMAND": f"{sys.executable} -m asyncgate"}

    def run(self, command: str, *arguments: str, cwd: Path | None = None, **more: Any) -> str:
        """Run node, or a program of a package, to its good end; return what it says."""
        ran: subprocess.CompletedProcess[str] = subprocess.run(
            [self.find(command), *arguments], cwd=cwd or self.folder, env=self.environment, capture_output=True,
            text=True, stdin=subprocess.DEVNULL, timeout=2 * PATIENCE_SECONDS, **more)
        assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]
        return ran.stdout

    def find(self, command: str) -> str:
        """Return a program: node, npm, or one of a package."""
        own = self.node.folder / "node_modules/.bin" / command
        return str(own if own.exists() else shutil.which(command, path=self.environment["PATH"]))


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory, tools_cache: Path) -> Package:
    """Return the package, installed from its tarball; what is built of the same sources is built once."""
    told = json.loads((SOURCE / "package.json").read_text())
    builders = tuple(f"{name}@{version}" for name, version in told["devDependencies"].items())
    node = Node(Node.install(tools_of_npm(tools_cache), (*builders, *BESIDE)), tmp_path_factory.mktemp("home"))
    (folder := tmp_path_factory.mktemp("user")).joinpath("package.json").write_text('{"private": true}')
    package = Package(folder, build(package_sources(), node, tools_cache), node)
    package.run("npm", "install", "--offline", "--no-audit", "--no-fund", "--legacy-peer-deps", str(package.tarball))
    return package


def package_sources() -> dict[str, str]:
    """Return the sources, with what is generated of the table as it is now."""
    paths = [path for path in SOURCE.rglob("*") if path.is_file() and not {"node_modules", "dist"} & {*path.parts}
             and path.suffix != ".tgz"]
    sources = {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    licence = (SOURCE.parents[1] / "LICENSE").read_text(encoding="utf-8")
    return sources | {"src/operations.ts": render_typescript(), "LICENSE": licence}


def hash_sources(sources: dict[str, str], node: Node) -> str:
    """Name the sources, and the tools with their versions."""
    return hashlib.sha256(json.dumps([sources, str(node.folder)], sort_keys=True).encode()).hexdigest()[:16]


def build(sources: dict[str, str], node: Node, cache: Path) -> Path:
    """Build and pack the sources by the package's own command; return the tarball."""
    folder = cache / f"npm-package-{hash_sources(sources, node)}"
    with (cache / "lock-of-npm-package").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("*.tgz")):
            shutil.rmtree(folder, ignore_errors=True)
            for name, text in sources.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")
            (folder / "node_modules").symlink_to(node.folder / "node_modules")
            npm = shutil.which("npm", path=node.environment["PATH"]) or "npm"
            ran = subprocess.run([npm, "pack", "--loglevel=error"], cwd=folder, env={**node.environment},
                                 capture_output=True, text=True, timeout=300)
            assert ran.returncode == 0, ran.stdout + ran.stderr
    [tarball] = folder.glob("*.tgz")
    return tarball
