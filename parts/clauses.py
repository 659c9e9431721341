"""Texts for those who have not read the specification: the same ones, without its clause numbers."""

from __future__ import annotations

import re

ONE = r"(?:(?:PH|H)\.\d+(?:\.\d+)*|\d+(?:\.\d+)+|[Ss]pec \d+(?:\.\d+)*)"
BESIDE = re.compile(rf"\s*\((?:{ONE}|\d\d?)(?:(?:, | and )(?:{ONE}|\d+))*\)")        # in parentheses, anywhere
AFTER = re.compile(rf"\s*(?:[Ss]pec )?{ONE}(?:, (?:{ONE}|\d+))*\.?\s*\Z")      # a sentence of its own, at the end


def plainly(text: str) -> str:
    """Leave the clause numbers of the specification out of a text."""
    while (shorter := AFTER.sub("", BESIDE.sub("", text))) != text:
        text = shorter
    return text
