"""Durations and moments as people write them: `90d`, `2h30m`, `1.5h`; `2026-12-31`, `2026-12-31 18:00`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

__all__ = ["DAY_SECONDS", "LONGEST_SECONDS", "parse_duration", "parse_moment", "parse_seconds"]

DAY_SECONDS = 86_400
UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_SECONDS, "w": 604_800.0}
PARTS = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)\s*")
LONGEST_SECONDS = 100 * 365 * DAY_SECONDS


def parse_seconds(text: str) -> float | None:
    """Return the seconds of a text with units; None if the text has another form."""
    phrase = text.strip().lower()
    if not phrase or PARTS.sub("", phrase):
        return None
    return sum(float(number) * UNIT_SECONDS[unit] for number, unit in PARTS.findall(phrase))


def parse_duration(text: str, unit_seconds: float = 1.0) -> float:
    """Return a duration in units of `unit_seconds`; a bare number is such a count already. Raises ValueError."""
    if (seconds := parse_seconds(text)) is not None:
        return seconds / unit_seconds
    return float(text)


def parse_moment(text: str, now: datetime) -> datetime:
    """Return the moment that a text names, in UTC unless the text has an offset; a duration counts from now.

    A date without a time means 00:00. Raises ValueError.
    """
    if (seconds := parse_seconds(text)) is not None:
        if seconds > LONGEST_SECONDS:
            raise ValueError(f"{text} from now is too far away")
        return now + timedelta(seconds=seconds)
    moment = datetime.fromisoformat(text.strip())
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
