"""SECURITY.md, the threat model and the page about OWASP ASVS 5 name tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("SECURITY.md", "docs/threat-model.md", "docs/asvs.md")
NAMED = re.compile(r"`((?:\w+/)*test_\w+\.py)(?:::(test_\w+))?`")
ROW = re.compile(r"^\| (\d+\.\d+\.\d+) \| (\w+) \| ([^|]+) \| ([^|]*) ?\|$", re.M)
STATES = {"met", "partly", "no", "other"}


def rows() -> list[tuple[str, str, str, str]]:
    return [(row[0], row[1], row[2], row[3]) for row in ROW.findall((ROOT / "docs/asvs.md").read_text())]


@cache
def path_of(file: str) -> Path:
    """Return where a test file is; a name alone is that of one below tests/."""
    return ROOT / file if "/" in file else next((ROOT / "tests").rglob(file), ROOT / "tests" / file)


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_is_there(page: str) -> None:
    named = NAMED.findall((ROOT / page).read_text())

    assert named
    assert [file for file, _ in named if not path_of(file).exists()] == []
    assert [f"{file}::{test}" for file, test in named if test and test not in functions_of(path_of(file))] == []


def test_every_line_of_the_page_is_a_requirement_in_its_order_with_a_state() -> None:
    table = rows()
    lines = [line for line in (ROOT / "docs/asvs.md").read_text().splitlines() if re.match(r"\| \d", line)]
    numbers = [tuple(map(int, number.split("."))) for number, *_ in table]

    assert len(lines) == len(table) > 90
    assert numbers == sorted(set(numbers))
    assert {state for _, state, *_ in table} == STATES


def test_what_is_met_is_shown_by_a_test_and_nothing_else_claims_so() -> None:
    shown = {number: (state, NAMED.findall(where)) for number, state, _, where in rows()}

    assert [number for number, (state, tests) in shown.items() if state == "met" and not tests] == []
    assert [number for number, (state, tests) in shown.items() if state in ("no", "other") and tests] == []


def test_what_security_md_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "SECURITY.md").read_text())

    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
