"""What the tests of the console stand on: a browser that sees what is wrong with a page, and only that."""

from __future__ import annotations

from pathlib import Path

from tests.extras.console.conftest import Show
from tests.support.chromium import Chromium
from tests.support.elsewhere import Elsewhere
from tests.support.filled_gate import Filled

STRICT = ("default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; require-trusted-types-for 'script'; "
          "trusted-types 'none'")
UNSOUND = """<!doctype html><html lang="en"><title>Unsound</title>
<script src="/script.js"></script><script>alert("inline")</script>
<main><h1>Unsound</h1><img src="/missing.png"><button style="outline: none"></button>
<div style="width: 3000px">wide</div></main>"""
SCRIPT = "alert('planted'); console.error('complaint'); throw new Error('thrown');"
SOUND = """<!doctype html><html lang="en"><title>Sound</title>
<main><h1>Sound</h1><a href="#a">One</a> <button>Two</button> <div style="width: 300px; overflow: auto">
<p style="width: 5000px">wide within</p></div></main>"""


def test_the_browser_tells_everything_that_is_wrong_with_a_page(
        chromium: Chromium, show: Show, elsewhere: Elsewhere) -> None:
    elsewhere.add("/script.js", SCRIPT, content_type="text/javascript")
    screen = show(elsewhere.add("/", UNSOUND, content_security_policy=STRICT))

    screen.open()

    told = "\n".join(screen.faults())
    for wrong in ("ran: alert planted", "complaint", "thrown", "policy: img-src", "policy: script-src-elem inline",
                  "the page is 30"):
        assert wrong in told
    assert "inline" not in screen.seen("ran")
    assert screen.walk() == ["button   UNSEEN"]
    assert {line.partition(" ")[0] for line in screen.axe()} == {"image-alt", "button-name"}


def test_the_browser_tells_nothing_of_a_sound_page(chromium: Chromium, show: Show, elsewhere: Elsewhere) -> None:
    screen = show(elsewhere.add("/", SOUND))

    screen.open(width=390, scheme="dark")

    assert (screen.faults(), screen.axe()) == ([], [])
    assert screen.walk() == ["a  One", "button  Two", "div  wide within"]


def test_the_browser_notes_what_is_sent_and_answered(chromium: Chromium, show: Show, elsewhere: Elsewhere) -> None:
    elsewhere.add("/answer", "what was answered")
    screen = show(elsewhere.add("/", SOUND), keep=True)
    screen.open()
    before = screen.watch.bytes

    screen.page.evaluate("() => fetch('/answer', {headers: {'x-said': 'in a header'}}).then(got => got.text())")

    told = screen.watch.told()
    assert "what was answered" in told
    assert "in a header" in told
    assert screen.watch.urls[-1] == f"{elsewhere.url}/answer"
    assert screen.watch.bytes > before > len(SOUND)


def test_a_route_counts_for_all_that_a_page_asks_from_its_load_on(
        chromium: Chromium, show: Show, elsewhere: Elsewhere) -> None:
    screen = show(elsewhere.add("/", SOUND))
    screen.open()
    screen.page.evaluate("() => { window.isOfBefore = true; }")

    screen.route("**/answer", lambda route: route.fulfill(body="from the test"))
    told = screen.page.evaluate("() => fetch('/answer').then(got => got.text())")

    assert told == "from the test"
    assert "/answer" not in elsewhere.asked
    assert screen.page.evaluate("() => window.isOfBefore") is None


def test_no_test_routes_what_a_page_asks_while_it_is_loaded() -> None:
    bare = ".page" + ".route("

    assert [path.name for path in Path(__file__).parent.glob("*.py") if bare in path.read_text()] == []


def test_the_page_of_the_api_is_sound(chromium: Chromium, show: Show, gate_to_read: Filled) -> None:
    screen = show(gate_to_read.url)

    for width, scheme in ((390, "dark"), (1280, "light")):
        screen.open("/docs", width=width, scheme=scheme)
        screen.page.wait_for_selector("#create_task")
        assert screen.faults() == []
        screen.picture(f"docs-{width}-{scheme}")
