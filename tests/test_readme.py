"""The README says what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from asyncgate.parts.settings import load_settings
from asyncgate.parts.tables import refreshed, tables

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["operations", "settings"])
def test_the_tables_are_those_of_the_code(name: str) -> None:
    assert f"<!-- {name}:begin -->" in README
    assert refreshed(README, tables()) == README, "run: python -m asyncgate.parts.tables README.md"


def test_every_yaml_example_loads(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", README, re.S)
    assert examples
    for example in examples:
        (tmp_path / "config.yaml").write_text(example)
        load_settings(str(tmp_path / "config.yaml"), environ={"ASYNCGATE_API_KEY": "secret"})


def test_every_json_example_is_json() -> None:
    examples = re.findall(r"```json\n(.*?)```", README, re.S)
    assert examples
    for example in examples:
        json.loads(example)


def test_the_backend_of_the_readme_is_the_one_that_the_suite_runs_against() -> None:
    shown = re.search(r"<!-- third-party -->\n```python\n(.*?)```", README, re.S)
    assert shown
    assert shown[1] == (ROOT / "tests" / "third_party_backend.py").read_text()
