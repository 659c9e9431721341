"""Durations and dates as people write them, in options and in settings."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from asyncgate.parts.model.durations import parse_duration, parse_moment, parse_seconds
from asyncgate.parts.model.settings import SettingsError, load_settings
from asyncgate.parts.model.words import cut_line, say_count, say_length, say_list

NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(("text", "seconds"), [
    ("90d", 7_776_000), ("2h30m", 9000), ("1.5h", 5400), ("45s", 45), ("500ms", 0.5), ("2w", 1_209_600),
    ("1h 30m", 5400), (" 5M ", 300), ("45", None), ("", None), ("d", None), ("5 apples", None), ("-5m", None),
    ("5m5", None)])
def test_a_duration_is_numbers_with_units(text: str, seconds: float | None) -> None:
    assert parse_seconds(text) == seconds


def test_a_number_without_a_unit_counts_in_its_own() -> None:
    assert parse_duration("45") == 45
    assert parse_duration("36h", 86_400) == 1.5


@pytest.mark.parametrize(("text", "moment"), [
    ("2026-12-31", "2026-12-31T00:00:00+00:00"), ("2026-12-31 18:00", "2026-12-31T18:00:00+00:00"),
    ("2026-12-31T18:00:00Z", "2026-12-31T18:00:00+00:00"), ("2026-12-31T18:00+02:00", "2026-12-31T18:00:00+02:00"),
    ("90d", "2027-02-20T12:00:00+00:00"), ("1h", "2026-11-22T13:00:00+00:00")])
def test_a_moment_is_a_day_a_time_or_a_duration_from_now(text: str, moment: str) -> None:
    assert parse_moment(text, NOW).isoformat() == moment


@pytest.mark.parametrize("text", ["", "soon", "31.12.2026", "2026-13-01", "99999w"])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_moment(text, NOW)


@pytest.mark.parametrize(("name", "text", "value"), [
    ("default_lease_ttl_seconds", "2m", 120), ("receipt_retention_days", "12w", 84),
    ("body_timeout_seconds", "1.5s", 1.5),
    ("ledger.timeout_ms", "2s", 2000), ("default_lease_ttl_seconds", "120", 120)])
def test_a_setting_takes_a_duration_with_its_unit(name: str, text: str, value: float) -> None:
    node: Any = load_settings(None, {}, {name: text}).settings
    for part in name.split("."):
        node = getattr(node, part)

    assert node == value


@pytest.mark.parametrize(("name", "text"), [
    ("receipt_retention_days", "36h"), ("default_lease_ttl_seconds", "100ms"), ("default_max_attempts", "3m")])
def test_a_duration_that_a_setting_cannot_count_is_refused(name: str, text: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}: '{text}' is not a whole number"):
        load_settings(None, {}, {name: text})


@pytest.mark.parametrize(("seconds", "words"), [
    (-3, "0 s"), (0, "0 s"), (0.0004, "1 ms"), (0.25, "250 ms"), (1, "1 s"), (59.4, "59 s"), (60, "1 min"),
    (185, "3 min 5 s"), (599.9, "10 min"), (24 * 60 + 50, "24 min"), (3600, "1 h"), (3600 + 59, "1 h"),
    (47 * 3600, "1 d 23 h"), (12 * 86_400 + 3600, "12 d")])
def test_a_length_of_time_is_said_in_two_units_at_most(seconds: float, words: str) -> None:
    assert say_length(seconds) == words


def test_numbers_lists_and_texts_of_others_are_said_as_in_a_sentence() -> None:
    assert [say_count(number, "task") for number in (0, 1, 1200)] == ["0 tasks", "1 task", "1,200 tasks"]
    assert [say_list(names) for names in ("", "a", "ab", "abc")] == ["", "a", "a and b", "a, b and c"]
    assert [cut_line("no\n  such page.", most) for most in (12, 11)] == ["no such page"[:12], "no such pa…"]
