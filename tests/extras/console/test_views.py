"""Every view of the console, at three widths, in light and dark, over a gate whose texts try to break it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.extras.console.conftest import OpenConsole
from tests.support.chromium import Chromium
from tests.support.console import VIEWS, Console
from tests.support.filled_gate import Filled

WIDTHS = (390, 1280, 2560)
# What leads to a task that shows something that others do not.
TASKS: dict[str, dict[str, Any]] = {
    "failed": {"type": "page.summarize", "status": "failed"}, "lost": {"type": "video.render"},
    "held": {"type": "ocr.scan", "held": True}, "running": {"status": "running"}, "canceled": {"status": "canceled"},
    "scheduled": {"type": "schedule.create"}, "approved": {"type": "site.publish"},
}


@pytest.fixture
def console(chromium: Chromium, open_console: OpenConsole, gate_to_read: Filled) -> Console:
    """Return the console of the gate that all tests share."""
    return open_console(gate_to_read)


def require_sound(console: Console, name: str) -> None:
    """Look at what is shown at every width, in light and dark; axe looks at the narrow and at the usual width."""
    for width in WIDTHS:
        for scheme in ("light", "dark"):
            console.dress(width, scheme)
            console.settle()
            assert console.faults() == [], (width, scheme)
            console.picture(f"{name}-{width}-{scheme}")
            if (width, scheme) in ((390, "dark"), (1280, "light")):
                assert console.axe() == [], (width, scheme)


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_sound_at_every_width_in_light_and_dark(view: str, chromium: Chromium, console: Console) -> None:
    console.visit(view)

    require_sound(console, view)


@pytest.mark.parametrize("name", TASKS)
def test_the_view_of_a_task_is_sound_at_every_width(
        name: str, chromium: Chromium, console: Console, gate_to_read: Filled) -> None:
    task_id = gate_to_read.find(**TASKS[name])

    console.visit(f"task/{task_id}")

    assert task_id[-8:] in console.text()
    require_sound(console, f"task-{name}")


def test_an_address_that_leads_nowhere_shows_the_first_view(chromium: Chromium, console: Console) -> None:
    console.open("/console/#/nowhere/%00/%")

    console.await_view("inbox")
    assert console.faults() == []


def test_a_task_that_is_not_there_is_said_to_be_missing(chromium: Chromium, console: Console) -> None:
    console.open("/console/#/task/019a8f3c-51de-7a10-9c6e-0d3a51b7f2c4")

    console.page.get_by_role("alert").wait_for()
    assert console.seen("violations") + console.watch.errors == []
    assert console.axe() == []
