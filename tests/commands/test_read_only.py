"""A database on a read-only mount can be restored, copied and verified; nothing is written beside it."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.conformance.harness import Gate

OWN_MOUNTS = ["unshare", "--map-root-user", "--mount"]
GATE = [sys.executable, "-m", "asyncgate"]


def can_mount() -> bool:
    """Whether a process of this user may have mounts of its own."""
    try:
        return subprocess.run([*OWN_MOUNTS, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return a folder with the database of a gate with two tasks."""
    (folder := tmp_path / "kept").mkdir()
    asyncio.run(fill(f"sqlite:///{folder / 'gate.db'}"))
    return folder


async def fill(url: str) -> None:
    """Make a database with two tasks."""
    backend = await open_backend(url)
    gate = Gate(Engine(backend), "00000000-0000-0000-0000-000000000000")
    await gate.finished()
    await gate.create()
    await backend.close()


COMMANDS = {
    "verify": "verify --database sqlite:///kept/gate.db",
    "verify --ledger": "verify --ledger --database sqlite:///kept/gate.db",
    "restore": "restore kept/gate.db --database sqlite:///new.db",
    "copy": "copy sqlite:///kept/gate.db sqlite:///new.db",
    "backup": "backup --database sqlite:///kept/gate.db new.db",
}


@pytest.mark.skipif(not can_mount(), reason="this user may not mount anything")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_database_on_a_read_only_mount_is_read(kept: Path, command: str) -> None:
    before = {path: path.read_bytes() for path in kept.iterdir()}
    ask = shlex.join([*GATE, *COMMANDS[command].split()])
    script = f"mount --bind kept kept && mount -o remount,bind,ro kept && ! touch kept/x 2>/dev/null && {ask}"
    (own := kept.parent / "tmp").mkdir()

    done = subprocess.run([*OWN_MOUNTS, "sh", "-c", script], cwd=kept.parent, capture_output=True, text=True,
                          env={**os.environ, "TMPDIR": str(own)})

    assert done.returncode == 0, done.stderr
    assert "2 tasks, 5 receipts" in done.stdout
    assert {path: path.read_bytes() for path in kept.iterdir()} == before
    left = {path.name for path in (*kept.parent.iterdir(), *own.iterdir())} - {"new.db", "new.db.lock", "kept", "tmp"}
    assert left == set()
