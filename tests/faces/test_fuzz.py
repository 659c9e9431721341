"""A few rounds of the fuzzer for each of its targets: `python tests/fuzz.py --seconds 3600` goes on for an hour."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import fuzz

FUZZ = Path(__file__).parents[1] / "fuzz.py"
TARGETS = ["bodies", "commands", "cursors", "durations", "files", "keys", "ledgers", "requests", "schedules",
           "settings"]
PER_ROUND = 50


@pytest.mark.parametrize("target", TARGETS)
def test_no_mutated_input_breaks_anything(target: str, rounds: int) -> None:
    assert fuzz.attacked(target, PER_ROUND * rounds, 1) == ""


def test_the_command_tries_a_target() -> None:
    done = subprocess.run([sys.executable, str(FUZZ), "--target", "durations", "--rounds", "3"], capture_output=True,
                          text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_every_target_is_tried() -> None:
    told = subprocess.run([sys.executable, str(FUZZ), "--help"], capture_output=True, text=True, check=True).stdout

    assert ",".join(TARGETS) in told.replace("\n", "").replace(" ", "")


def test_what_breaks_is_found(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(text: bytes) -> None:
        assert b"\0" not in text

    monkeypatch.setitem(fuzz.TARGETS, "planted", lambda: ([b'{"a": 1}'], breaks))
    monkeypatch.setattr("logging.disable", lambda level: None)

    assert fuzz.attack("planted", 2000, 1, str(tmp_path / "last")) == 1
    assert "planted --seed 1, round " in capsys.readouterr().out


def test_an_input_that_kills_the_process_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text("import os, sys; open(sys.argv[-1], 'wb').write((3).to_bytes(8, 'big') + b'bad'); os.abort()")
    monkeypatch.setattr(fuzz, "__file__", str(script))

    assert fuzz.attacked("keys", 1, 1) == "keys --seed 1: died of signal 6\nb'bad'"
