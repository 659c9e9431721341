"""How answers look: whole in a pipe; on a terminal in colour, no wider than it, with ids that can be typed again."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncgate.commands.terminal import Bar, draw_block, draw_table, escape_text, flatten_reply, format_table
from asyncgate.parts.process.logs import Lines

COLUMNS = ["task_id", "type", "status", "created_by", "created_at", "progress"]
IDS = ["01a20485-687b-71d8-bc09-771a1970dfca", "01a20495-3884-7cdf-a51e-6fa4457ced0f"]
OWNER = {"kind": "agent", "id": "ada", "principal_kind": "agent", "principal_id": "ada"}
ROWS = [{"task_id": task_id, "type": "ocr.page", "status": "succeeded", "created_by": OWNER,
         "created_at": "2020-01-02T03:04:05.678Z", "progress": {"text": "x" * 300}} for task_id in IDS]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return tmp_path


def drawn(width: int, **more: Any) -> str:
    out = io.StringIO()
    draw_table(COLUMNS, ROWS, Console(file=out, force_terminal=True, width=width, highlight=False, **more))
    return out.getvalue()


def test_a_pipe_gets_every_value_whole() -> None:
    lines = list(format_table(COLUMNS, ROWS))

    assert [line.split()[0] for line in lines] == ["TASK_ID", *IDS]
    assert all("x" * 300 in line for line in lines[1:])


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_table_is_never_wider_than_the_window(width: int) -> None:
    lines = drawn(width, no_color=True).splitlines()

    assert len(lines) == 1 + len(ROWS)
    assert all(len(plain_of(line)) <= width for line in lines)


def test_ids_are_whole_where_there_is_room_and_short_where_there_is_none() -> None:
    rows = [{"task_id": IDS[0], "type": "echo"}]
    wide, narrow = io.StringIO(), io.StringIO()

    draw_table(["task_id", "type"], rows, Console(file=wide, force_terminal=True, width=60))
    draw_table(["task_id", "type"], rows, Console(file=narrow, force_terminal=True, width=30))

    assert IDS[0] in wide.getvalue()
    assert IDS[0] not in narrow.getvalue()
    assert IDS[0][-12:] in narrow.getvalue()


def test_a_terminal_has_colours_unless_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[32m" in drawn(200)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in drawn(200)


def test_what_others_wrote_moves_no_cursor_and_is_no_markup() -> None:
    out = io.StringIO()
    draw_block([("task_summary", "a\x1b[2Jb[red]c\u202e")], Console(file=out, force_terminal=True, width=80,
                                                                   highlight=False, markup=False))

    assert "a\\x1b[2Jb[red]c\\u202e" in out.getvalue()


def test_a_value_that_is_very_long_says_how_much_is_missing() -> None:
    out = io.StringIO()
    draw_block([("payload", {"x": "y" * 5000})], Console(file=out, force_terminal=True, width=80, highlight=False))

    assert "1,008 characters more; --json shows them" in " ".join(out.getvalue().split())


def test_a_bar_is_silent_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    bar = Bar("checking", total=3)
    bar.add(2)
    bar.close()

    assert capfd.readouterr() == ("", "")


def test_plain_text_stays_as_it_is() -> None:
    assert escape_text("überall 日本 ☃") == "überall 日本 ☃"


@pytest.mark.parametrize("hidden", "\u00ad\u061c\u180e\u200d\u202e\u2066\u3164\ufeff\ufffb\U000e0001\U000e0041")
def test_what_hides_or_turns_text_is_escaped_on_a_terminal_and_in_the_log(hidden: str) -> None:
    record = logging.LogRecord("asyncgate", logging.INFO, "", 0, "a%sb", (hidden,), None)

    assert escape_text(f"a{hidden}b") == f"a{hidden.encode('unicode_escape').decode()}b"
    assert json.loads(f'"{Lines("%(message)s").format(record)}"') == f"a{hidden}b"
    assert hidden not in Lines("%(message)s").format(record)


def plain_of(line: str) -> str:
    """A line without what sets colours."""
    import re
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


def test_the_traceback_of_a_failed_task_is_shown_line_by_line() -> None:
    error = {"code": "ValueError", "message": "bug", "traceback": "Traceback:\n  at work\nValueError: bug"}
    task = {"task_id": "t", "result": {"outcome": "failed", "error": error}}

    assert [*flatten_reply(task)] == [
        ("task_id", "t"), ("result.outcome", "failed"), ("result.error", {"code": "ValueError", "message": "bug"}),
        ("result.error.traceback", "Traceback:"), ("", "  at work"), ("", "ValueError: bug")]
