"""The console by keyboard alone: keys lead everywhere, Tab reaches everything, and what has the focus shows it."""

from __future__ import annotations

import pytest

from tests.extras.console.conftest import OpenConsole
from tests.support.chromium import Chromium
from tests.support.console import VIEWS, Console
from tests.support.filled_gate import Filled


@pytest.fixture
def console(chromium: Chromium, open_console: OpenConsole, gate_to_read: Filled) -> Console:
    """Return the console of the gate that all tests share, at its first view."""
    console = open_console(gate_to_read)
    chromium.run(console.visit, "inbox")
    return console


def test_g_and_a_letter_go_to_every_view(chromium: Chromium, console: Console) -> None:
    for view, letter in VIEWS.items():
        console.press("g", letter)

        console.await_view(view)
        assert console.page.url.partition("#")[2].startswith(f"/{view}")
    console.page.go_back()
    console.await_view(list(VIEWS)[-2])
    assert console.faults() == []


def test_a_question_mark_shows_the_keys_and_escape_leads_back(chromium: Chromium, console: Console) -> None:
    console.press("Tab", "Tab")
    before = console.focused()

    console.press("?")
    console.page.get_by_role("dialog", name="Keys").wait_for()
    text = console.page.get_by_role("dialog").inner_text()
    violations = console.axe()
    console.press("Escape")

    assert all(f"Go to {view.capitalize()}" in text for view in VIEWS)
    assert violations == []
    assert console.page.get_by_role("dialog").count() == 0
    assert console.focused() == before


def test_a_slash_goes_to_the_search_and_letters_stay_in_it(chromium: Chromium, console: Console) -> None:
    console.visit("tasks")

    console.press("/")
    console.page.keyboard.type("type:ocr.scan status:queued")

    console.page.wait_for_function("() => location.hash.includes('ocr.scan')")
    assert "searchbox" in console.focused() or console.focused().startswith("input")
    console.page.wait_for_function(
        "() => document.querySelector('#main tbody')?.innerText.includes('page.summarize') === false")


def test_rows_are_walked_with_j_and_k_and_opened_with_enter(chromium: Chromium, console: Console) -> None:
    console.visit("tasks")

    def press(key: str) -> str:
        console.press(key)
        return str(console.page.evaluate("() => document.activeElement.href"))

    first, second, again = press("j"), press("j"), press("k")
    console.press("Enter")

    assert first != second
    assert first == again
    console.await_view("task")


@pytest.mark.parametrize("view", VIEWS)
def test_tab_reaches_everything_and_shows_where_it_is(view: str, chromium: Chromium, console: Console) -> None:
    console.visit(view)
    console.rest()      # what comes later may take the place of what is counted
    there = console.page.evaluate("""() => [...document.querySelectorAll(
        "a[href], button, input, select, textarea, summary")].filter(one =>
            one.checkVisibility({visibilityProperty: true}) && !one.disabled && one.tabIndex >= 0).length""")

    walked = console.walk()

    assert [place for place in walked if place.endswith("UNSEEN")] == []
    assert len(walked) >= there, walked
    assert "Skip to the content" in walked[0]


def test_the_way_past_the_navigation_leads_to_the_content(chromium: Chromium, console: Console) -> None:
    console.visit("queues")
    console.begin_walk()

    console.press("Tab", "Enter", "Tab")

    assert console.page.evaluate("() => document.querySelector('#main').contains(document.activeElement)")
    console.await_view("queues")


def test_what_is_done_in_a_dialog_is_done_by_keyboard(chromium: Chromium, open_console: OpenConsole,
                                                      gate_to_change: Filled) -> None:
    console = open_console(gate_to_change)
    console.visit("queues")

    console.page.get_by_role("button", name="Pause …").focus()
    console.press("Enter")
    console.page.get_by_role("dialog").wait_for()
    assert console.axe() == []
    console.press("Tab")
    console.page.keyboard.type("ocr.scan")
    console.press("Tab", "Tab")
    console.page.keyboard.type("the typist says so")
    console.press("Enter")
    console.page.locator("#main").get_by_text("the typist says so").wait_for()

    assert "the typist says so" in {pause["reason"] for pause in gate_to_change.call("list_pauses")["pauses"]}


def test_who_ends_the_task_of_a_row_goes_on_with_the_next_row(
        chromium: Chromium, open_console: OpenConsole, gate_to_change: Filled) -> None:
    console = open_console(gate_to_change)
    console.visit("tasks?q=type:data.check status:queued")
    console.page.locator("#main tr[data-row]").nth(2).wait_for()
    following = console.page.locator(".row-link").nth(1).get_attribute("href")
    console.page.evaluate("""async () => (await import("./api.js")).keepActor({kind: "human", id: "grace"})""")

    console.page.get_by_role("button", name="Cancel data.check").first.focus()
    console.press("Enter", "Enter")
    console.page.locator("#main tr[data-row]").nth(2).wait_for(state="detached")

    assert console.page.evaluate("() => document.activeElement.getAttribute('href')") == following
