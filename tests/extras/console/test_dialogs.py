"""What somebody writes into a dialog is not lost, and what comes of it is told, however the dialog ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.extras.console.conftest import OpenConsole
from tests.support.chromium import Chromium
from tests.support.console import Console
from tests.support.filled_gate import Filled

REFUSAL = "somebody was faster"


@pytest.fixture
def console(chromium: Chromium, open_console: OpenConsole, gate_to_read: Filled) -> Console:
    """Return the console of the gate that all tests share."""
    return open_console(gate_to_read)


def ask_for_a_pause(console: Console) -> None:
    """Fill the form for a pause."""
    console.visit("queues")
    console.page.get_by_role("button", name="Pause …").click()
    console.page.get_by_label("Its name").fill("ocr.scan")
    console.page.get_by_label("Why").fill("a long reason")


def test_a_text_that_is_selected_beyond_the_edge_of_its_dialog_stays(chromium: Chromium, console: Console) -> None:
    ask_for_a_pause(console)
    field = console.page.get_by_label("Why")
    place = field.bounding_box()
    assert place is not None

    console.page.mouse.move(place["x"] + 40, place["y"] + 10)
    console.page.mouse.down()
    console.page.mouse.move(5, place["y"] + 10, steps=3)
    console.page.mouse.up()
    console.settle()

    assert field.input_value() == "a long reason"


def test_a_refusal_is_told_also_if_its_dialog_was_closed_meanwhile(chromium: Chromium, console: Console) -> None:
    held: list[Any] = []
    console.route("**/v1/pauses", lambda route: held.append(route) if route.request.method == "POST"
                  else route.continue_())
    ask_for_a_pause(console)
    with console.page.expect_request(lambda request: request.method == "POST"):
        console.press("Enter")
    console.press("Escape")
    console.page.get_by_role("dialog").wait_for(state="detached")

    held[0].fulfill(status=409, json={"error": "conflict", "message": REFUSAL})

    console.page.locator("#notes").get_by_text(REFUSAL).wait_for()


def test_a_question_about_a_task_goes_with_its_page(
        chromium: Chromium, console: Console, gate_to_read: Filled) -> None:
    task = gate_to_read.call("get_task", task_id=gate_to_read.find(type="ocr.scan", status="queued"))
    console.visit("tasks")
    console.visit(f"task/{task['task_id']}")
    console.page.get_by_role("button", name="Cancel …").first.click()
    console.page.get_by_role("dialog").wait_for()

    console.page.go_back()

    console.await_view("tasks")
    assert console.page.get_by_role("dialog").count() == 0


def test_a_question_names_the_id_of_what_it_is_about(
        chromium: Chromium, console: Console, gate_to_read: Filled) -> None:
    console.visit("tasks?q=type:data.check")      # three tasks of one name

    console.page.get_by_role("button", name="Cancel data.check").nth(1).click()

    shown = gate_to_read.call("list_tasks", type="data.check")["tasks"][1]["task_id"]
    assert shown[-12:] in console.page.get_by_role("dialog").inner_text()


@pytest.mark.parametrize("until", ["45", "tomorrow", "45 minutes"])
def test_what_is_no_time_does_not_end_a_pause(until: str, chromium: Chromium, console: Console) -> None:
    ask_for_a_pause(console)
    console.page.get_by_label("Until").fill(until)

    console.press("Enter")

    console.page.get_by_role("dialog").get_by_text(f"{until} is not a time").wait_for()


def test_a_dialog_on_a_dialog_has_its_own_name(chromium: Chromium, console: Console, gate_to_read: Filled) -> None:
    console.visit(f"task/{gate_to_read.find(type='ocr.scan', status='queued')}")
    console.page.get_by_role("button", name="Cancel …").first.click()

    console.page.get_by_role("button", name="Cancel it").click()

    console.page.get_by_role("dialog", name="In whose name?").wait_for()


def test_no_button_that_ends_tasks_is_called_as_that_which_ends_nothing(chromium: Chromium, console: Console) -> None:
    console.visit("tasks?q=type:data.check")

    console.page.get_by_role("button", name="Cancel data.check").first.click()

    dialog = console.page.get_by_role("dialog")
    dialog.get_by_role("button", name="Cancel it").wait_for()
    assert dialog.get_by_role("button", name="Cancel", exact=True).count() == 0
