"""How texts for people say lengths of time, numbers and lists; the console says lengths in the same way (time.js)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from asyncgate.parts.model.durations import DAY_SECONDS

# On a terminal they move the cursor, hide, or reverse text; a joiner or a tag character is not a letter either.
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
                    "\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]")
UNITS = (("d", DAY_SECONDS), ("h", 3600), ("min", 60), ("s", 1))
TOLD_ALONE = 10        # of a unit, below which the next smaller one is said too


def say_length(seconds: float) -> str:
    """Say a length of time in at most two units: 41 s, 3 min 5 s, 24 min, 1 d 23 h."""
    if 0 < seconds < 1:
        return f"{max(round(seconds * 1000), 1)} ms"
    whole = max(round(seconds), 0)
    at = next((at for at, (_, length) in enumerate(UNITS) if whole >= length), len(UNITS) - 1)
    unit, length = UNITS[at]
    count, rest = divmod(whole, length)
    if count >= TOLD_ALONE or at + 1 == len(UNITS) or rest < UNITS[at + 1][1]:
        return f"{count} {unit}"
    smaller, its_length = UNITS[at + 1]
    return f"{count} {unit} {rest // its_length} {smaller}"


def say_count(number: int, what: str) -> str:
    """Say how many there are of something whose plural ends in s: 1 task, 1,200 tasks."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def say_times(number: int) -> str:
    """Say how often something happened."""
    return "once" if number == 1 else f"{number:,} times"


def say_first(names: list[str], most: int = 5) -> str:
    """Say the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def say_list(names: Iterable[str]) -> str:
    """Say names as a sentence does: a; a and b; a, b and c."""
    words = list(names)
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def begin_sentence(sentence: str) -> str:
    """Return a sentence that begins with a capital."""
    return sentence[:1].upper() + sentence[1:]


def cut_line(text: str, most: int) -> str:
    """Return a text of somebody else as part of one line: no line breaks, no full stop, and so many letters at most."""
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= most else f"{line[:most - 1].rstrip()}…"
