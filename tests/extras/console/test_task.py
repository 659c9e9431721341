"""The page of a task: its chain of receipts and its timeline, which need no browser to be right."""

from __future__ import annotations

import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from tests.extras.console.conftest import OpenConsole
from tests.support.filled_gate import Filled

VIEWS = files("asyncgate.extras.console").joinpath("page", "views")
RULES = Path(__file__).parents[2].joinpath("support", "console_task.mjs")


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
def test_the_chain_and_the_timeline_of_a_task_tell_what_its_receipts_say(tmp_path: Path) -> None:
    for name in ("task_layout.js", "task_story.js"):
        (tmp_path / name).write_bytes(VIEWS.joinpath(name).read_bytes())
    (tmp_path / "package.json").write_text('{"type": "module"}')

    ran = subprocess.run(["node", RULES, tmp_path], capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("gate_to_change", ["sqlite"], indirect=True)
def test_who_has_come_over_a2a_is_shown_with_the_context(open_console: OpenConsole, gate_to_change: Filled) -> None:
    console = open_console(gate_to_change)
    made = gate_to_change.call("create_task", type="scan", payload=None, agent_id="ada",
                               agent_instance_id="a2a:<b>talk</b>")
    console.visit(f"task/{made['task_id']}")

    console.page.get_by_text("owned by agent:ada, over A2A in the context <b>talk</b>").wait_for()
    assert console.watch.errors == []
