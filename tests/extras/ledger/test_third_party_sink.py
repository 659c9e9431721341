"""A sink that lives in somebody else's package is found by its entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SINK = """
from pathlib import Path
from asyncgate.extras.ledger.sinks.standalone import Standalone

class Lines(Standalone):
    def __init__(self, path):
        self.path = Path(path)

    def render(self, tenant_id, receipt, task, lease=None):
        return receipt.receipt_id.encode()

    async def send(self, tenant_id, content):
        with self.path.open("ab") as file:
            file.write(content + b"\\n")

def open_sink(settings):
    return Lines(settings.ledger.url.removeprefix("file://"))
"""
SEND = """
import asyncio, sys
from asyncgate import load_settings
from asyncgate.parts.model.errors import StartupError
from asyncgate.extras.ledger.sinks import open_sink

flags = {"receipt_mode": "memorygate_integrated", "ledger.profile": sys.argv[1], "ledger.url": sys.argv[2]}
try:
    asyncio.run(open_sink(load_settings(flags=flags).settings).send("tenant", b"receipt"))
except StartupError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Install the package; return the environment that has it."""
    (tmp_path / "lines_sink.py").write_text(SINK)
    (tmp_path / "reading_sink.py").write_text(SINK + "Lines.reads = True\n")
    metadata = tmp_path / "lines_sink-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lines-sink\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[asyncgate.sinks]\nlines = lines_sink\nreading = reading_sink\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def send(profile: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SEND, profile, f"file://{folder / 'receipts'}"], cwd=folder,
                          env=environment, capture_output=True, text=True)


def test_the_profile_names_a_sink_of_another_package(tmp_path: Path, environment: dict[str, str]) -> None:
    run = send("lines", tmp_path, environment)

    assert run.returncode == 0, run.stderr
    assert (tmp_path / "receipts").read_text() == "receipt\n"


@pytest.mark.parametrize(("profile", "says"), [
    ("other", "ledger.profile: there is no sink 'other'; choose one of lines, memorygate, reading, receiptgate"),
    ("reading", "ledger.profile: the sink 'reading' has reads = True")])
def test_a_profile_that_cannot_be_used_stops_the_start(
        tmp_path: Path, environment: dict[str, str], profile: str, says: str) -> None:
    run = send(profile, tmp_path, environment)

    assert run.returncode == 1
    assert says in run.stderr
