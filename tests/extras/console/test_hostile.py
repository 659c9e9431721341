"""Names, payloads and results that try to break the console, or to run in it, are shown as the texts that they are."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.extras.console.conftest import OpenConsole
from tests.support.chromium import Chromium
from tests.support.console import VIEWS, Console
from tests.support.filled_gate import HOSTILE, MARKUP, Filled

FOREIGN_ADDRESSES = """() => [...document.querySelectorAll(
    "a[href], form[action], img[src], iframe, object, embed, base")]
    .map(one => one.href || one.action || one.src || one.outerHTML)
    .filter(address => !address.startsWith(location.origin) && !/^https?:/.test(address))"""


@pytest.fixture
def console(chromium: Chromium, open_console: OpenConsole, gate_to_read: Filled) -> Console:
    """Return the console of the gate that all tests share."""
    return open_console(gate_to_read)


def hostile_tasks(gate: Filled) -> list[dict[str, str]]:
    """Return the tasks whose texts are hostile."""
    tasks = gate.call("list_tasks", limit=200)["tasks"]
    return [task for task in tasks if task.get("task_summary") in HOSTILE.values()]


@pytest.mark.parametrize("view", [
    *VIEWS, *(f"admin?tab={tab}" for tab in ("people", "sessions", "tenants", "usage", "audit"))])
def test_no_view_runs_or_follows_what_it_shows(view: str, chromium: Chromium, console: Console) -> None:
    console.visit(view)

    assert console.faults() == []
    assert console.page.evaluate(FOREIGN_ADDRESSES) == []


def test_the_view_of_a_task_shows_every_hostile_text_as_it_is(
        chromium: Chromium, console: Console, gate_to_read: Filled) -> None:
    tasks = hostile_tasks(gate_to_read)
    assert len(tasks) == len(HOSTILE)

    for task in tasks:
        console.visit(f"task/{task['task_id']}")
        assert console.faults() == []
        assert console.page.evaluate(FOREIGN_ADDRESSES) == []
        assert task["task_summary"].split()[0] in (console.page.locator("#main").text_content() or "")
        console.picture(f"hostile-{task['task_id'][-6:]}")


def test_numbers_keep_every_digit(chromium: Chromium, console: Console, gate_to_read: Filled) -> None:
    for task in gate_to_read.call("list_tasks", type="data.check")["tasks"]:
        console.visit(f"task/{task['task_id']}")
        console.page.evaluate("() => document.querySelectorAll('details').forEach(one => { one.open = true; })")
        console.settle()
        assert console.faults() == []
        told = console.page.locator("#main").text_content() or ""
        if "int64" in told:
            break

    for number in ("9223372036854775807", "18446744073709551615", "9007199254740993",
                   "1234567890123456789012345678901234567890", "3.14159265358979323846264338327950288419"):
        assert number in told
    assert console.page.evaluate("() => ({}).polluted === undefined")


def test_an_address_full_of_markup_is_only_an_address(chromium: Chromium, console: Console) -> None:
    for place in (f"tasks?q={MARKUP}", f"task/{MARKUP}", "tasks?q=%E0%A4%A", f"admin?tab={MARKUP}&tenant={MARKUP}"):
        console.open("/console/#/" + place)
        console.page.wait_for_selector("#main *")
        assert console.seen("ran") + console.seen("violations") + console.watch.errors == []


def test_an_exported_table_gives_a_spreadsheet_no_formula(
        chromium: Chromium, console: Console, tmp_path: Path) -> None:
    console.visit("queues")

    for kind in ("CSV", "JSON"):
        console.page.locator("summary", has_text="Export").first.click()
        with console.page.expect_download() as got:
            console.page.get_by_role("menuitem", name=kind).first.click()
        got.value.save_as(tmp_path / kind)

    with (tmp_path / "CSV").open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.reader(file))
    assert [cell for row in rows for cell in row if cell[:1] in ("=", "+", "@", "\t", "\r")] == []
    types = [queue["type"] for queue in json.loads((tmp_path / "JSON").read_text())]
    assert HOSTILE["formula"] in types
    assert len(rows) == len(types) + 1


@pytest.mark.parametrize("view", ["tasks", "inbox"])
def test_a_type_of_one_long_word_fits_where_it_can_be_stopped(
        view: str, chromium: Chromium, console: Console) -> None:
    console.visit(f"{view}?q=type:{HOSTILE['word']}", width=390)

    console.page.locator(".stop-type").wait_for()
    assert console.faults() == []
