"""The console while things happen: changes come by themselves, an idle page is quiet, a lost gate is healed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Live
from tests.extras.console.conftest import OPEN, OpenConsole
from tests.support.chromium import Chromium
from tests.support.console import Console
from tests.support.filled_gate import Filled

FIRST_VIEW_BYTES = 150_000
MINUTE = 60


@pytest.fixture
def console(chromium: Chromium, open_console: OpenConsole, gate_to_change: Filled) -> Console:
    """Return the console of a gate of the test's own."""
    return open_console(gate_to_change)


@pytest.mark.parametrize("gate_to_change", ["sqlite", "postgres"], indirect=True)
def test_a_change_appears_by_itself(chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    console.visit("queues")
    console.page.get_by_text("live", exact=True).wait_for()

    gate_to_change.call("create_task", type="just.now", payload=None, agent_id="ada")

    console.page.locator("#main").get_by_text("just.now").first.wait_for()
    assert console.faults() == []


def test_a_lost_gate_is_shown_and_healed(
        chromium: Chromium, console: Console, gate_to_change: Filled, start: Callable[..., Live]) -> None:
    console.visit("queues")
    console.page.get_by_text("live", exact=True).wait_for()

    gate_to_change.live.kill()
    console.page.get_by_text("reconnecting").or_(console.page.get_by_text("gate not reachable")).wait_for()
    assert "page.summarize" in console.text()       # what was known stays in sight
    start(*OPEN, database=gate_to_change.live.database, port=gate_to_change.live.port)
    gate_to_change.call("create_task", type="after.the.crash", payload=None, agent_id="ada")

    console.page.get_by_text("live", exact=True).wait_for()
    console.page.locator("#main").get_by_text("after.the.crash").first.wait_for()
    assert console.watch.errors == []


SELECT = "element => getSelection().selectAllChildren(element)"
DESELECT = "getSelection().removeAllRanges()"


def test_a_page_that_waits_for_a_selection_says_so_and_goes_on_when_it_ends(
        chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    console.visit("queues")
    status = console.page.locator("header").get_by_role("status")
    console.page.get_by_text("live", exact=True).wait_for()

    console.page.locator("#main h1").evaluate(SELECT)
    status.get_by_text("paused while you select", exact=True).wait_for()
    gate_to_change.call("create_task", type="while.selected", payload=None, agent_id="ada")
    with console.page.expect_response("**/v1/queues**"):
        console.page.evaluate(DESELECT)

    status.get_by_text("live", exact=True).wait_for()
    console.page.locator("#main").get_by_text("while.selected").first.wait_for()
    assert console.faults() == []


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_has_room_for_what_the_page_says_of_a_selection(
        chromium: Chromium, console: Console, width: int) -> None:
    console.page.set_viewport_size({"width": width, "height": 700})
    console.visit("queues")

    console.page.locator("#main h1").evaluate(SELECT)
    console.page.get_by_text("paused while you select", exact=True).wait_for()

    assert console.page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_first_view_is_light(chromium: Chromium, open_console: OpenConsole, gate_to_read: Filled) -> None:
    console = open_console(gate_to_read)

    console.visit("inbox")

    page = [answer for answer in console.watch.responses if "/console/" in answer.url]
    assert len(page) > 3
    assert sum(len(answer.body()) for answer in page) <= FIRST_VIEW_BYTES


def test_an_idle_page_asks_at_most_once_in_five_seconds(
        chromium: Chromium, open_console: OpenConsole, gate_to_read: Filled) -> None:
    console = open_console(gate_to_read)
    console.page.clock.install()
    console.visit("inbox")
    console.rest()
    console.watch.clear()

    console.page.clock.run_for(MINUTE * 1000)       # of the page's own clock: nobody waits

    assert 1 <= len(console.watch.requests) <= MINUTE / 5
    assert console.faults() == []


def test_a_hidden_page_asks_for_nothing(chromium: Chromium, open_console: OpenConsole, gate_to_read: Filled) -> None:
    console = open_console(gate_to_read)
    console.page.clock.install()
    console.visit("inbox")
    console.rest()
    console.page.evaluate("""() => { Object.defineProperty(document, "hidden", {get: () => true});
        document.dispatchEvent(new Event("visibilitychange")); }""")
    console.watch.clear()

    console.page.clock.run_for(MINUTE * 1000)

    assert console.watch.urls == []


def test_what_somebody_is_reading_does_not_move(chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    console.visit("queues")
    console.page.get_by_text("live", exact=True).wait_for()
    console.page.get_by_text("page.summarize").first.select_text()
    console.watch.clear()

    gate_to_change.call("create_task", type="just.now", payload=None, agent_id="ada")
    console.page.clock.install()
    console.page.clock.run_for(MINUTE * 1000)
    assert "just.now" not in console.text()

    console.page.evaluate("() => getSelection().removeAllRanges()")
    console.page.clock.run_for(MINUTE * 1000)
    console.page.locator("#main").get_by_text("just.now").first.wait_for()


def test_a_view_that_the_gate_did_not_send_comes_when_it_is_asked_for_again(
        chromium: Chromium, open_console: OpenConsole, gate_to_read: Filled) -> None:
    console = open_console(gate_to_read)
    away = True
    console.route("**/views/workers.js*", lambda route: route.abort() if away else route.continue_())
    console.visit("inbox")

    console.page.get_by_role("link", name="Workers").click()
    console.page.get_by_role("alert").get_by_text("the gate did not send this view").wait_for()
    heading = console.page.get_by_role("heading", level=1).inner_text()
    away = False        # the route stays: a request that is under way while it is removed would never be answered
    console.page.get_by_role("button", name="Try again").click()

    assert heading == "Workers"
    console.await_view("workers")


def test_the_view_is_that_of_the_address_although_another_one_comes_later(
        chromium: Chromium, open_console: OpenConsole, gate_to_read: Filled) -> None:
    console = open_console(gate_to_read)
    held: list[Any] = []
    console.route("**/views/tasks.js", lambda route: held.append(route))
    console.visit("inbox")

    with console.page.expect_request("**/views/tasks.js"):
        console.press("g", "t")
    console.press("g", "q")
    console.await_view("queues")
    with console.page.expect_response("**/views/tasks.js"):
        held[0].continue_()
    console.rest()

    assert console.page.locator("#main h1").inner_text() == "Queues"
