"""Remove the specification's clause numbers from texts for readers who do not know the specification."""

from __future__ import annotations

import re

NUMBER = r"\d{1,2}(?:\.\d{1,2}){0,3}"     # bounded, so that no pattern repeats a repetition
ONE = rf"(?:(?:PH|H)\.{NUMBER}|\d{{1,2}}(?:\.\d{{1,2}}){{1,3}}|[Ss]pec {NUMBER})"
BESIDE = re.compile(rf"\s*\((?:{ONE}|\d\d?)(?:(?:, | and )(?:{ONE}|\d{{1,2}}))*\)")        # in parentheses, anywhere
AFTER = re.compile(rf"\s*(?:[Ss]pec )?{ONE}(?:, (?:{ONE}|\d{{1,2}}))*\.?\s*\Z")      # a sentence of its own, at the end


def remove_clause_numbers(text: str) -> str:
    """Return a text without the clause numbers of the specification."""
    while (shorter := AFTER.sub("", BESIDE.sub("", text))) != text:
        text = shorter
    return text
