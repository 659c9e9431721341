"""The ids that a terminal showed short: so that what was read off it can be typed again.

They lie in the user's cache folder, readable by the user alone: ids of tasks and receipts, which open nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MOST_IDS = 2000         # ids that are kept, the newest
# Eight digits that are random: those before them are the time, and the five behind them the mark of the tenant.
SHORT_DIGITS, SPOT = 8, slice(19, 27)
LONG = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
SHORT = re.compile(rf"[0-9a-f]{{{SHORT_DIGITS}}}")


class Ambiguous(ValueError):
    """Several ids are written like this."""


def ids_file() -> Path:
    """Return where they are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "asyncgate" / "ids"


def shorten_id(text: str) -> str:
    """Write an id short; anything else stays as it is."""
    return text.replace("-", "")[SPOT] if LONG.fullmatch(text) else text


def remember(ids: Iterable[str]) -> None:
    """Keep ids; without a place to keep them, do nothing."""
    with suppress(OSError, RuntimeError):
        path = ids_file()
        kept = dict.fromkeys([*read_ids(), *(one for one in ids if LONG.fullmatch(one))])
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_name(f"ids.{os.getpid()}")
        with open(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as out:
            out.write("\n".join([*kept][-MOST_IDS:]))
        fresh.replace(path)


def read_ids() -> list[str]:
    """Return the ids that are kept, oldest first."""
    with suppress(OSError, RuntimeError, ValueError):
        return [line for line in ids_file().read_text().splitlines() if LONG.fullmatch(line)]
    return []


def expand_id(text: str) -> str:
    """Return the id that was shown as this; a text that was not stays as it is. Raises Ambiguous."""
    if not SHORT.fullmatch(text):
        return text
    found = [one for one in read_ids() if shorten_id(one) == text]
    if len(found) > 1:
        raise Ambiguous(f"{text} stands for {len(found)} ids that were shown: {', '.join(found)}")
    return found[0] if found else text
