"""The pictures of docs/console.md are screenshots of a gate that the tests fill; README's is one of `asyncgate demo`.

ASYNCGATE_TEST_DOCS_PICTURES=1 writes them anew.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncgate.conformance.ledgers import Drain
from tests.conftest import Live
from tests.extras.console.conftest import OPEN, OpenConsole
from tests.support.chromium import Chromium
from tests.support.filled_gate import Filled, Presentable, fill_gate
from tests.support.pictures import read_size, shrink_png

DOCS = Path(__file__).parents[3] / "docs"
WRITES = bool(os.environ.get("ASYNCGATE_TEST_DOCS_PICTURES"))
MOST_BYTES, MOST_BYTES_IN_ALL = 60_000, 300_000
WIDTH, HEIGHT = 1232, 780
# The places that are shown; a task is named by what a filter of list_tasks finds.
PLACES = {"inbox": "inbox", "task": "task/{failed}", "queues": "queues", "workers": "workers", "schedules": "schedules"}


@pytest.fixture(scope="module")
def presentable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """Return a gate whose content nobody means badly."""
    database = f"sqlite:///{tmp_path_factory.mktemp('presentable') / 'gate.db'}"
    asyncio.run(fill_gate(database, Presentable))
    running = Live(*OPEN, database=database)
    drain = Drain(running.process)
    yield Filled(running)
    drain.kill()


@pytest.mark.parametrize("name", PLACES)
def test_a_picture_shows_its_view_without_a_fault(
        chromium: Chromium, open_console: OpenConsole, presentable: Filled, name: str) -> None:
    console = open_console(presentable, viewport={"width": WIDTH, "height": HEIGHT})
    failed = presentable.find(status="failed", type="page.summarize")

    console.visit(PLACES[name].format(failed=failed))
    console.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    console.page.wait_for_function("() => !document.querySelector('#main .empty')?.innerText.includes('Loading')")
    png = console.page.screenshot()

    assert console.faults() == []
    if WRITES:
        (DOCS / "pictures").mkdir(exist_ok=True)
        (DOCS / "pictures" / f"console-{name}.png").write_bytes(shrink_png(png))
    assert read_size((DOCS / "pictures" / f"console-{name}.png").read_bytes()) == read_size(png) == (WIDTH, HEIGHT)


def test_the_pictures_are_shown_with_words_and_small_enough_for_the_wheel() -> None:
    pages = (DOCS / "console.md").read_text() + (DOCS.parent / "README.md").read_text()
    shown = {place: words for words, place in re.findall(r"!\[([^\]]*)\]\((?:docs/)?(pictures/[^)]+)\)", pages)}
    sizes = {f"pictures/{path.name}": path.stat().st_size for path in (DOCS / "pictures").iterdir()}

    assert shown.keys() == sizes.keys() == {f"pictures/console-{name}.png" for name in (*PLACES, "demo")}
    assert all(len(words) > 20 for words in shown.values())
    assert max(sizes.values()) <= MOST_BYTES
    assert sum(sizes.values()) <= MOST_BYTES_IN_ALL
