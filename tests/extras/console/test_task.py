"""The page of a task: its chain of receipts and its timeline, which need no browser to be right."""

from __future__ import annotations

import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

VIEWS = files("asyncgate.extras.console").joinpath("page", "views")
RULES = Path(__file__).parents[2].joinpath("support", "console_task.mjs")


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
def test_the_chain_and_the_timeline_of_a_task_tell_what_its_receipts_say(tmp_path: Path) -> None:
    for name in ("task_layout.js", "task_story.js"):
        (tmp_path / name).write_bytes(VIEWS.joinpath(name).read_bytes())
    (tmp_path / "package.json").write_text('{"type": "module"}')

    ran = subprocess.run(["node", RULES, tmp_path], capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
