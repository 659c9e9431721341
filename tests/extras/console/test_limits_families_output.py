"""Limits, families and output in a browser: what an admin sets, whose child is whose, what comes while it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Live
from tests.extras.console.conftest import OPEN, OpenConsole
from tests.extras.console.test_actions import answer, press
from tests.support.chromium import Chromium
from tests.support.console import Console
from tests.support.filled_gate import Filled
from tests.support.patience import poll

SLOW_REMOVAL = """() => { const real = window.fetch; window.fetch = async (...given) => {
    const reply = await real(...given);
    if (String(given[0]).endsWith("/remove")) await new Promise((resolve) => setTimeout(resolve, 3000));
    return reply; }; }"""
LAST_LINE = """text => document.querySelector("pre.output")?.innerText.endsWith(text)"""


@pytest.fixture
def console(chromium: Chromium, open_console: OpenConsole, gate_to_change: Filled) -> Console:
    """Return the console of a gate of the test's own."""
    return open_console(gate_to_change)


def lease(gate: Filled, type: str) -> dict[str, Any]:
    """Lease a task; return what is asked under its lease."""
    [offer] = gate.call("lease_next", worker_id="w1", accept_types=[type])["tasks"]
    return {"task_id": offer["task_id"], "lease_id": offer["lease_id"], "worker_id": "w1"}


@pytest.mark.parametrize("gate_to_change", ["sqlite", "postgres"], indirect=True)
def test_a_limit_is_set_held_stopped_let_go_on_and_removed(
        chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    console.visit("limits")
    console.page.get_by_text("No limit is set.").wait_for()
    press(console, "Set a limit")
    answer(console, "Set", Name="openai", Leases_at_once="2")
    for _ in range(4):
        gate_to_change.call("create_task", type="calls", payload=None, agent_id="ada", limits={"openai": ""})
    holders = {lease(gate_to_change, "calls")["task_id"] for _ in range(2)}
    console.press("r")
    row = console.page.locator("tr[data-row]", has_text="openai")
    row.locator("[data-title='In use']", has_text="2").wait_for()
    assert row.locator("[data-title=Waiting]").inner_text() == "2"

    row.get_by_role("link", name="openai").click()
    console.page.get_by_role("region", name="Who holds it").wait_for()
    links = console.page.get_by_role("region", name="Who holds it").get_by_role("link").all()
    assert {link.get_attribute("title") for link in links} == holders
    press(console, "Stop")
    answer(console, "Stop", Until="30m")
    console.page.get_by_text("Nothing of it is leased.").wait_for()
    stopped = gate_to_change.call("get_limit", name="openai")
    assert console.axe() == []
    press(console, "Let it go on")
    console.page.get_by_text("Nothing of it is leased.").wait_for(state="detached")
    goes_on = gate_to_change.call("get_limit", name="openai")
    press(console, "Remove")
    answer(console, "Remove")
    console.page.get_by_text("No limit is set.").wait_for()

    assert (stopped["concurrency_total"], goes_on["concurrency_total"]) == (2, 2)
    assert stopped["stopped_until"] is not None
    assert goes_on["stopped_until"] is None
    assert gate_to_change.call("list_limits")["limits"] == []
    assert console.faults() == []


def test_a_limit_is_not_looked_at_after_it_was_removed(
        chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    gate_to_change.call("set_limit", name="openai", concurrency_total=2)
    console.visit("limits/openai")
    console.page.evaluate(SLOW_REMOVAL)
    press(console, "Remove")
    console.page.get_by_role("dialog").get_by_role("button", name="Remove", exact=True).click()
    poll(lambda: gate_to_change.call("list_limits")["limits"] == [])
    gate_to_change.call("create_task", type="calls", payload=None, agent_id="ada", limits={"openai": ""})

    console.page.get_by_text("No limit is set.").wait_for()
    assert console.faults() == []


def test_a_family_is_a_tree_from_the_parent_to_grandchildren_that_says_how_each_does(
        chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    def create(name: str, **more: Any) -> str:
        return str(gate_to_change.call("create_task", type=name, payload=None, agent_id="ada", task_summary=name,
                                       **more)["task_id"])
    top = create("top")
    middle, done = [create(name, parent_task_id=top) for name in ("middle", "done")]
    leaf = create("leaf", parent_task_id=middle)
    gate_to_change.call("complete", **lease(gate_to_change, "done"), result=1, artifacts=["a"])

    console.visit(f"task/{top}")
    family = console.page.get_by_role("region", name="Family")
    family.wait_for()
    told = family.inner_text()
    below = family.locator("li", has_text="middle").last.locator("ul").inner_text()

    assert "1 open, 1 succeeded" in told
    assert "leaf" in below
    assert "done" not in below
    assert family.get_by_role("link", name="done").get_attribute("title") == done
    assert console.axe() == []
    family.get_by_role("link", name="leaf").click()
    console.page.locator("h1", has_text="leaf").wait_for()
    upwards = console.page.get_by_role("region", name="Family").get_by_role("link", name="its parent")
    assert (upwards.get_attribute("title"), leaf in console.page.url) == (middle, True)
    gate_to_change.call("cancel_task", task_id=top, cascade=True, agent_id="ada")
    console.page.get_by_role("region", name="Family").locator("[aria-current=true]", has_text="canceled").wait_for()
    assert console.faults() == []


def test_a_parent_that_waits_for_its_children_says_how_many_are_open(
        chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    top = gate_to_change.call("create_task", type="top", payload=None, agent_id="ada")["task_id"]
    for number in range(2):
        gate_to_change.call("create_task", type="child", payload=number, agent_id="ada", parent_task_id=top)
    gate_to_change.call("release_lease", **lease(gate_to_change, "top"), until_children="all")

    console.visit(f"task/{top}")
    console.page.get_by_text("Evidence", exact=True).click()
    evidence = console.page.locator(".evidence dl")
    evidence.wait_for()

    assert "2 open" in evidence.inner_text()
    assert console.axe() == []
    assert console.faults() == []


def test_what_waits_for_its_time_or_an_answer_needs_no_look_and_is_not_offered_for_release(
        chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    for name in ("parked", "asking"):
        gate_to_change.call("create_task", type=name, payload=None, agent_id="ada", task_summary=f"the {name} one")
    gate_to_change.call("release_lease", **lease(gate_to_change, "parked"), after_seconds=3600)
    gate_to_change.call("request_input", **lease(gate_to_change, "asking"), key="may", message="May I?")

    console.visit("inbox")
    console.page.get_by_text("May I?").first.wait_for()
    look = console.text()
    console.visit("tasks?q=type%3Aasking")
    console.page.locator("tr[data-row]", has_text="the asking one").wait_for()
    offered = console.page.get_by_role("button", name="Release the asking one").count()

    assert "w1 lost its lease" not in look
    assert offered == 0
    assert console.faults() == []


def test_a_task_says_which_key_it_has_who_waits_for_its_end_and_what_it_superseded(
        chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    def create(on_conflict: str) -> str:
        unique = {"key": "customer 42", "on_conflict": on_conflict}
        return str(gate_to_change.call("create_task", type="sync", payload=on_conflict, agent_id="ada",
                                       unique=unique)["task_id"])

    def read_terms(task_id: str) -> dict[str, str | None]:
        console.visit(f"task/{task_id}")
        terms = console.page.get_by_role("region", name="Terms")
        terms.get_by_text("customer 42", exact=True).wait_for()
        return {name: terms.locator(f"dt:text-is('{name}') + dd a").get_attribute("title") for name in (
            "Has that key", "Waits for its end", "Supersedes", "Superseded by")
            if terms.get_by_text(name, exact=True).count()}
    first, second = create("return"), create("supersede")
    lease(gate_to_change, "sync")
    latest = create("keep_latest")

    assert read_terms(first) == {"Superseded by": second}
    assert read_terms(second) == {"Supersedes": first, "Waits for its end": latest}
    assert read_terms(latest) == {"Has that key": second}
    assert console.axe() == []
    assert console.faults() == []


def test_output_is_seen_as_it_comes_and_goes_on_behind_a_gate_that_was_away(
        chromium: Chromium, console: Console, gate_to_change: Filled, start: Callable[..., Live]) -> None:
    made = gate_to_change.call("create_task", type="story.tell", payload=None, agent_id="ada")
    console.visit(f"task/{made['task_id']}")
    under = lease(gate_to_change, "story.tell")
    gate_to_change.call("append_output", **under, chunks=["Once upon", " a time", {"page": 1}])
    console.page.wait_for_function(LAST_LINE, arg='{"page":1}')
    assert "Once upon a time" in console.page.locator("pre.output").inner_text()
    assert console.axe() == []

    gate_to_change.live.kill()
    start(*OPEN, database=gate_to_change.live.database, port=gate_to_change.live.port)
    gate_to_change.call("append_output", **under, chunks=["<img src=x onerror=alert('ran')>", "x" * 60_000])
    gate_to_change.call("append_output", **under, chunks=["y" * 60_000, "the end"])

    console.page.wait_for_function(LAST_LINE, arg="the end")
    text = console.page.locator("pre.output").inner_text()
    assert 99_000 < len(text) < 101_000
    assert console.page.get_by_text("Only the last").count() == 1
    gate_to_change.call("complete", **under, result=1, artifacts=["a"])
    console.page.get_by_role("region", name="Output", exact=True).get_by_text("7 chunks", exact=True).wait_for()
    assert console.page.locator("pre.output *").count() < 10
    assert console.watch.errors == []
