"""What happened over time, in a browser: charts of an hour and of a day, of everything and of one type."""

from __future__ import annotations

from typing import Any

import pytest

from tests.extras.console.conftest import OpenConsole
from tests.support.chromium import Chromium
from tests.support.console import Console
from tests.support.filled_gate import Filled


@pytest.fixture
def console(chromium: Chromium, open_console: OpenConsole, gate_to_change: Filled) -> Console:
    """Return the console of a gate of the test's own."""
    return open_console(gate_to_change)


def finish(gate: Filled, type: str, *, fails: bool = False) -> None:
    """Let a task of a type end, or its only attempt fail."""
    gate.call("create_task", type=type, payload=None, agent_id="ada", max_attempts=1)
    [offer] = gate.call("lease_next", worker_id="w1", accept_types=[type])["tasks"]
    under: dict[str, Any] = {"task_id": offer["task_id"], "lease_id": offer["lease_id"], "worker_id": "w1"}
    if fails:
        gate.call("fail", **under, error={"code": "x", "message": "y"}, retryable=False)
    else:
        gate.call("complete", **under, result=1, artifacts=["a"])


@pytest.mark.parametrize("gate_to_change", ["sqlite", "postgres"], indirect=True)
def test_an_hour_and_a_day_are_drawn_by_type_and_told_in_numbers(
        chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    for _ in range(3):
        finish(gate_to_change, "scan.page")
    finish(gate_to_change, "scan.page", fails=True)
    told = gate_to_change.call("get_traffic", type="scan.page")

    console.visit("queues")
    console.press("g")
    console.press("f")
    console.await_view("traffic")
    row = console.page.get_by_role("region", name="By type").locator("tr[data-row]", has_text="scan.page")
    row.wait_for()
    assert row.locator("[data-title=Ended]").inner_text() == "4"
    assert row.locator("[data-title='Failed or expired']").inner_text() == "1"
    assert row.get_by_role("img", name="Throughput of scan.page, from 0 to").count() == 1
    assert console.axe() == []

    row.get_by_role("link", name="scan.page").focus()
    console.press("Enter")
    console.page.locator("h1", has_text="Traffic: scan.page").wait_for()
    console.page.locator("figure", has_text="Ended in a minute").get_by_role("img").wait_for()
    assert console.page.locator(".tile", has_text="attempts failed").locator("strong").inner_text() == "1"
    console.page.get_by_text("All numbers").click()
    numbers = console.page.get_by_role("region", name="Last hour").locator("tr[data-row]")
    numbers.first.wait_for()
    ended = [int(cell.inner_text()) for cell in numbers.locator("[data-title=Ended]").all()]
    assert (len(ended), sum(ended), sum(told["total"]["ended"])) == (60, 4, 4)

    console.page.get_by_role("button", name="Last day").click()
    console.page.get_by_role("region", name="Last day").locator("figure", has_text="Ended in 5 minutes").wait_for()
    assert console.page.locator(".tile", has_text="attempts failed").locator("strong").inner_text() == "1"
    assert console.axe() == []
    assert console.faults() == []


def test_a_gate_at_which_nothing_has_happened_says_so(chromium: Chromium, console: Console) -> None:
    nothing = {"started": [0], "ended": [0], "failed": [0], "expired": [0], "begun": [0], "waited_seconds": [None]}
    console.route("**/v1/traffic*", lambda route: route.fulfill(json={
        "begins_at": "2026-11-23T12:00:00Z", "step_seconds": 60, "total": nothing, "by_type": {}, "types_left": 0}))

    console.visit("traffic")

    console.page.get_by_text("Nothing has happened in this time.").wait_for()
    assert console.axe() == []
