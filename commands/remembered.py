"""The ids that a terminal showed shortened, so that commands accept the short form.

They are stored in the user's cache folder, which only the user can read: ids of tasks and receipts, no secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MOST_IDS = 2000         # the newest ids that are kept
# The eight random digits: the digits before them are the time, the five after them mark the tenant.
SHORT_DIGITS, SPOT = 8, slice(19, 27)
LONG = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
SHORT = re.compile(rf"[0-9a-f]{{{SHORT_DIGITS}}}")


class Ambiguous(ValueError):
    """Several ids have this short form."""


def ids_file() -> Path:
    """Return the path of the file of ids."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "asyncgate" / "ids"


def shorten_id(text: str) -> str:
    """Shorten an id; return other texts unchanged."""
    return text.replace("-", "")[SPOT] if LONG.fullmatch(text) else text


def remember(ids: Iterable[str]) -> None:
    """Store ids; no-op if the file cannot be written."""
    with suppress(OSError, RuntimeError):
        path = ids_file()
        kept = dict.fromkeys([*read_ids(), *(one for one in ids if LONG.fullmatch(one))])
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_name(f"ids.{os.getpid()}")
        with open(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as out:
            out.write("\n".join([*kept][-MOST_IDS:]))
        fresh.replace(path)


def read_ids() -> list[str]:
    """Return the stored ids, oldest first."""
    with suppress(OSError, RuntimeError, ValueError):
        return [line for line in ids_file().read_text().splitlines() if LONG.fullmatch(line)]
    return []


def expand_id(text: str) -> str:
    """Return the id with this short form, or the text itself if no id has it. Raises Ambiguous."""
    if not SHORT.fullmatch(text):
        return text
    found = [one for one in read_ids() if shorten_id(one) == text]
    if len(found) > 1:
        raise Ambiguous(f"{text} is the short form of {len(found)} ids: {', '.join(found)}")
    return found[0] if found else text
