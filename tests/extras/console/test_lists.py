"""The long lists and the text filter of the console, which need no browser to be right."""

from __future__ import annotations

import shutil
import subprocess
from importlib.resources import as_file, files
from pathlib import Path

import pytest

PAGE = files("asyncgate.extras.console").joinpath("page")
RULES = Path(__file__).parents[2].joinpath("support", "console_lists.mjs")


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
def test_long_lists_miss_no_row_and_filters_leave_nothing_out(tmp_path: Path) -> None:
    with as_file(PAGE) as page:
        shutil.copytree(page, tmp_path / "page")
    (tmp_path / "package.json").write_text('{"type": "module"}')

    ran = subprocess.run(["node", RULES, tmp_path / "page"], capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
