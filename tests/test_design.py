"""docs/design.md says the truth: its departures name tests that exist, and its index has every clause that is cited."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.each import each

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "design.md").read_text()
# What the specification or its readers ask to find on that page.
EXPECTED = ("idempotency key", "release_lease", "attach_artifacts", "archived", "workers emit", "receipt_ledger_lag",
            "task.assigned", "refresh token", "metadata document", "`aud`", "delivery_proof", "headers of limits")

CODE = [path for folder in ("backends", "bench", "clients", "commands", "conformance", "extras", "parts", "tests")
        for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", ".sql")] + [
            ROOT / "asyncgate.py", ROOT / "fly.toml"]
NUMBER = r"\d{1,2}(?:\.\d{1,2}){0,3}"
ADDENDUM = re.compile(rf"\b(P?H\.{NUMBER})")
SECTION = re.compile(rf"\b[Ss]pec §?({NUMBER}(?:(?:, | and ){NUMBER}\b(?! [a-z]))*)")
BARE = re.compile(r"[(,;] ?((?:1[4-9]|2[01])\.(?!0)\d{1,2}(?:\.\d{1,2})?)(?=[),;:])")     # (21.6.3)
AMENDMENT = re.compile(r"\b(Clarification [A-Z])\b")
PROTOCOL = re.compile(r"\b([Ll]ease protocol, [A-Z]\w+(?: [A-Z]\w+)*)")


def rows(chapter: str) -> list[str]:
    """Return the lines of a chapter's table, without its head."""
    text = PAGE.partition(f"\n## {chapter}\n")[2].partition("\n## ")[0]
    return [line for line in text.splitlines() if line.startswith("| ")][1:]


def cited(text: str) -> set[str]:
    """Return the clauses that a text cites, as the index names them."""
    sections = {number for listed in SECTION.findall(text) for number in re.findall(NUMBER, listed)}
    references = {f"spec {number}" for number in sections | set(BARE.findall(text))}
    protocol = {f"lease protocol, {name.partition(', ')[2]}" for name in PROTOCOL.findall(text)}
    return references | protocol | set(ADDENDUM.findall(text)) | set(AMENDMENT.findall(text))


@each("row", rows("Departures"))
def test_each_departure_names_a_test_that_exists(row: str) -> None:
    """A row is the text, what the gate does instead, why, and what pins it."""
    *_, pins, _ = cells = row.split("|")
    named = re.findall(r"`((?:tests|conformance)/[\w/]+\.py)::(\w+)`", pins)

    assert len(cells) == 6
    assert all(cell.strip() for cell in cells[1:-1])
    assert named
    for file, test in named:
        assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.M), f"{file} has no {test}"


@each("departure", EXPECTED)
def test_what_readers_ask_about_is_on_the_page(departure: str) -> None:
    assert any(departure in row for row in rows("Departures"))


def test_every_clause_that_is_cited_is_in_the_index() -> None:
    index = {row.split("|")[1].strip() for row in rows("Clauses")}
    missing = {clause: path.name for path in CODE for clause in cited(path.read_text()) - index}

    assert missing == {}
    assert len(index) == len(rows("Clauses"))


def test_how_a_clause_is_cited_is_known() -> None:
    text = '"""Say it (spec 6.2, H.4 and PH.1.3; 21.9.1).  Spec 21.2.2, 21.4.5.  Clarification C, pair=(20.0, 15.0)"""'

    assert cited(text) == {"spec 6.2", "H.4", "PH.1.3", "spec 21.9.1", "spec 21.2.2", "spec 21.4.5", "Clarification C"}


@pytest.mark.parametrize("chapter", ["What the gate decides", "Clauses"])
def test_what_a_rule_is_kept_in_exists(chapter: str) -> None:
    for row in rows(chapter):
        named = re.findall(r"`([^`]+)`", row.split("|")[3])
        files = [name for name in named if (ROOT / name).exists()]
        text = "\n".join((ROOT / file).read_text() for file in files if (ROOT / file).is_file())

        assert files or named == ["inline_result_bytes"], row
        for name in set(named) - set(files):
            assert all(re.search(rf"\b{part}\b", text) for part in name.split(".")), row

def test_nobody_cites_a_design_that_is_not_here() -> None:
    number = re.compile(r"\bDESIGN[ ,]+(?:§ ?)?\d")        # docs/design.md has names, no numbers

    assert [f"{path.relative_to(ROOT)}: {line.strip()}" for path in CODE for line in path.read_text().splitlines()
            if number.search(line)] == []
