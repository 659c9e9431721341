"""Each numbered threat of a list has its tests: the tables in test_threats_*.py name tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support.each import each

TESTS = Path(__file__).parent
ROW = re.compile(r"^    ([A-H]\d+)? +((?:conformance/)?test_\w+\.py)::(test_\w+)$", re.M)
NUMBERS = {
    "test_threats_input.py": [f"E{number}" for number in range(1, 12)],
    "test_threats_transport.py": [*(f"F{number}" for number in range(1, 8)), "F11", "F12"],
    "test_threats_config.py": [f"H{number}" for number in range(1, 6)]}


def rows(name: str) -> dict[str, list[tuple[str, str]]]:
    """Return the tests that a table names, by number; a line without a number belongs to the one above."""
    tests: dict[str, list[tuple[str, str]]] = {}
    number = ""
    for given, file, test in ROW.findall(ast.get_docstring(ast.parse(path_of(name).read_text()), clean=False) or ""):
        number = given or number
        tests.setdefault(number, []).append((file, test))
    return tests


def path_of(file: str) -> Path:
    """Return where a test file is; a name alone is that of one below tests/."""
    return TESTS.parent / file if "/" in file else next(TESTS.rglob(file), TESTS / file)


def functions_of(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path_of(file).read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@each("name", NUMBERS)
def test_every_number_has_a_test_and_every_named_test_is_there(name: str) -> None:
    table = rows(name)

    assert list(table) == NUMBERS[name]
    named = [row for rows in table.values() for row in rows]
    assert [f"{file}::{test}" for file, test in named if test not in functions_of(file)] == []


@each("name", NUMBERS)
def test_no_line_of_a_table_is_overlooked(name: str) -> None:
    text = path_of(name).read_text().partition('"""\n')[0]

    assert text.count("::") == sum(len(named) for named in rows(name).values())


@each("name", NUMBERS)
def test_a_test_that_carries_a_number_stands_in_the_table_under_it(name: str) -> None:
    numbered = {test for test in functions_of(name) if re.match(r"test_[a-h]\d+_", test)}
    told = {number: {test for file, test in named if file == name} for number, named in rows(name).items()}

    assert {test for test in numbered if test not in told[test.split("_")[1].upper()]} == set()
