"""Which refusals of a hand-over are for good."""

from __future__ import annotations

import re
from collections.abc import Iterator

from asyncgate.parts.model import errors

LONGEST_PROBLEM = 2000
ITEM = re.compile(r"^tasks\[\d+\](?:: |\.)")      # which item it was of a call that whoever hands over has not made
FINAL_STATUSES = frozenset({400, 403, 404, 409, 413})       # statuses of refusals that no repetition changes


def walk_errors(kind: type[errors.GateError] = errors.GateError) -> Iterator[type[errors.GateError]]:
    """Go through all kinds of errors."""
    yield kind
    for narrower in kind.__subclasses__():
        yield from walk_errors(narrower)


FINAL_CODES = frozenset(kind.code for kind in walk_errors() if kind.status in FINAL_STATUSES)


def is_final(code: str) -> bool:
    """Whether a refusal of one task will be the same the next time; a quota has room later."""
    return code in FINAL_CODES


def word_refusal(code: str, message: str) -> str:
    """Describe a refusal for whoever looks at the row."""
    return f"{code}: {ITEM.sub('', message)}"[:LONGEST_PROBLEM]
