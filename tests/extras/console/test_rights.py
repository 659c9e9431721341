"""What a credential may not see or do is neither in the page nor in any of its requests, and the gate refuses it."""

from __future__ import annotations

import pytest

from tests.conftest import TOKEN
from tests.extras.console.conftest import OpenConsole
from tests.support.chromium import Chromium
from tests.support.console import VIEWS, Console
from tests.support.filled_gate import FOREIGN, OTHER_TENANT, Filled

READING = ["tasks:read", "receipts:read", "admin:read"]
HARMLESS = ("Export", "Copy", "CSV", "JSON", "Try again", "Read", "Explain", "Why", "Show", "all", "Look", "curl",
            "command", "Python", "Print", "Find", "Download")
# Every operation of the page that changes something, with ids that name nothing.
WRITES = """async () => {
  const {OPERATIONS, call} = await import("./api.js"), got = {};
  for (const [name, said] of Object.entries(OPERATIONS)) {
    if (said.startsWith("GET ") || name === "sign_out_everywhere") continue;
    const ids = Object.fromEntries([...said.matchAll(/\\{(\\w+)\\}/g)].map(([, id]) => [id, "none"]));
    got[name] = await call(name, ids).then(() => 200, problem => problem.status);
  }
  return got; }"""
SHOW_HALF = "half => fetch('/v1/tasks', {headers: {'x-asyncgate-session': half}}).then(got => got.status)"
CHANGES = """() => [...document.querySelectorAll(
  "#main button:not(.chip):not(.id):not(.node), #main input[type=checkbox]")]
  .map(one => one.textContent || one.ariaLabel || one.outerHTML)"""


def visit_all(console: Console, gate: Filled) -> None:
    """Visit every view that the credential has, each tab, and a task."""
    links = console.page.locator("nav.views a").all()
    places = [(link.get_attribute("href") or "").removeprefix("#/") for link in links]
    tabs = [f"admin?tab={tab}" for tab in ("people", "sessions", "tenants", "usage", "audit") if "admin" in places]
    for place in [*places, *tabs]:
        console.visit(place)


def test_nothing_of_another_tenant_is_in_the_page_or_in_any_answer(
        chromium: Chromium, open_console: OpenConsole, guarded_gate: Filled) -> None:
    ours = open_console(guarded_gate, guarded_gate.issue("admin"), keep=True)
    theirs = open_console(guarded_gate, guarded_gate.issue("admin", tenant=OTHER_TENANT, name=FOREIGN,
                                                           principal_id=FOREIGN), keep=True)
    task_id = guarded_gate.find(type="video.render")

    visit_all(ours, guarded_gate)
    ours.visit(f"task/{task_id}")
    visit_all(theirs, guarded_gate)
    theirs.open(f"/console/#/task/{task_id}")
    theirs.page.get_by_role("alert").wait_for()

    assert FOREIGN not in ours.watch.told()
    assert FOREIGN in theirs.watch.told()
    for name in ("page.summarize", "linus", "reader-1", "nightly-report", "video.render"):
        assert name in ours.watch.told()
        assert name not in theirs.watch.told()


def test_a_reading_credential_sees_no_button_that_changes_something(
        chromium: Chromium, open_console: OpenConsole, guarded_gate: Filled) -> None:
    key = guarded_gate.issue("admin", scopes=READING)
    console = open_console(guarded_gate, key)

    shown: dict[str, list[str]] = {}
    for view in [*VIEWS, f"task/{guarded_gate.find(status='running')}", f"task/{guarded_gate.find(held=True)}"]:
        console.visit(view)
        shown[view] = [label for label in console.page.evaluate(CHANGES) if not label.startswith(HARMLESS)]
        assert console.faults() == [], view

    assert {view: labels for view, labels in shown.items() if labels} == {}


def test_the_gate_refuses_what_a_reading_credential_tries_anyway(
        chromium: Chromium, open_console: OpenConsole, guarded_gate: Filled) -> None:
    console = open_console(guarded_gate, guarded_gate.issue("admin", scopes=READING))

    got = console.page.evaluate(WRITES)

    assert len(got) > 15
    assert {name for name, status in got.items() if status == 200} == set()
    assert {name for name, status in got.items() if status != 403} <= {"end_session", "preview_bulk"}


@pytest.mark.parametrize(("role", "views"), [("agent", {"inbox", "tasks", "schedules"}), ("worker", {"inbox"})])
def test_a_credential_is_led_only_to_the_views_that_it_may_see(
        role: str, views: set[str], chromium: Chromium, open_console: OpenConsole, guarded_gate: Filled) -> None:
    console = open_console(guarded_gate, guarded_gate.issue(role, principal_kind=role, principal_id="ada"))

    shown = {(link.get_attribute("href") or "")[2:] for link in console.page.locator("nav.views a").all()}

    assert views <= shown
    assert not shown & {"admin", "queues", "workers"}
    visit_all(console, guarded_gate)
    assert [fault for fault in console.faults() if "403" in fault] == []
    assert console.seen("violations") + console.watch.errors == []


def test_a_session_is_worth_nothing_without_its_cookie_or_without_its_page(
        chromium: Chromium, open_console: OpenConsole, guarded_gate: Filled) -> None:
    console = open_console(guarded_gate, guarded_gate.issue("admin"))
    cookies = console.context.cookies()
    half = console.page.evaluate("() => localStorage.getItem('asyncgate-session')")

    bare = console.page.evaluate("() => fetch('/v1/tasks').then(got => got.status)")
    console.context.clear_cookies()
    alone = console.page.evaluate(SHOW_HALF, half)

    assert (bare, alone) == (401, 401)
    assert cookies
    assert all(cookie["httpOnly"] and cookie["sameSite"] == "Strict" for cookie in cookies)
    assert guarded_gate.issue("agent") not in str(cookies)


def test_signing_out_ends_the_session_and_leads_back_to_the_sign_in(
        chromium: Chromium, open_console: OpenConsole, guarded_gate: Filled) -> None:
    console = open_console(guarded_gate, guarded_gate.issue("admin"))
    half = console.page.evaluate("() => localStorage.getItem('asyncgate-session')")

    console.page.locator("button.you").click()
    assert console.axe() == []
    console.page.get_by_role("button", name="Sign out", exact=True).click()
    console.page.get_by_label("Key", exact=True).wait_for()

    assert console.axe() == []
    console.picture("sign-in")
    assert console.page.evaluate("() => localStorage.getItem('asyncgate-session')") is None
    assert console.page.evaluate(SHOW_HALF, half) == 401


def test_a_wrong_key_is_refused_in_words(chromium: Chromium, open_console: OpenConsole, guarded_gate: Filled) -> None:
    console = open_console(guarded_gate, guarded_gate.issue("agent"))
    console.context.clear_cookies()

    console.open("/console/")
    console.page.evaluate("() => localStorage.clear()")
    console.page.reload()
    console.page.get_by_label("Key", exact=True).fill("aga_of-nobody")
    console.press("Enter")

    console.page.get_by_role("alert").wait_for()
    assert console.axe() == []


def test_a_session_that_has_ended_shows_no_more_however_the_tab_is_left(
        chromium: Chromium, open_console: OpenConsole, guarded_gate: Filled) -> None:
    made = guarded_gate.call("issue_key", name="short", role="admin", principal_kind="human", principal_id="grace")
    console = open_console(guarded_gate, made["api_key"])
    console.visit("tasks")
    guarded_gate.call("revoke_key", key_id=made["key"]["key_id"])
    console.press("r")
    field = console.page.get_by_label("Key", exact=True)
    field.wait_for()
    console.watch.clear()

    for hidden in ("true", "false"):      # to another window, where the key is, and back
        console.page.evaluate(f"""() => {{ Object.defineProperty(document, "hidden",
            {{configurable: true, get: () => {hidden}}}); document.dispatchEvent(new Event("visibilitychange")); }}""")
    console.rest()
    assert field.is_visible()
    assert console.watch.urls == []
    field.fill("aga_of-nobody")
    console.press("Enter")
    console.page.get_by_role("alert").wait_for()
    console.rest()

    assert console.page.get_by_role("alert").inner_text()
    assert "page.summarize" not in console.page.locator("body").inner_text()


def test_a_tab_shows_whose_session_another_tab_has_begun(
        chromium: Chromium, open_console: OpenConsole, guarded_gate: Filled) -> None:
    console = open_console(guarded_gate, guarded_gate.issue("admin", principal_id="ada"))
    other = console.context.new_page()
    other.goto(f"{guarded_gate.url}/console/")
    other.locator("button.you").click()
    other.get_by_role("button", name="Sign out", exact=True).click()
    console.page.get_by_label("Key", exact=True).wait_for()

    other.get_by_label("Key", exact=True).fill(guarded_gate.issue("agent", principal_id="linus"))
    other.keyboard.press("Enter")

    console.page.locator("button.you", has_text="linus").wait_for()


def test_who_signs_in_acts_in_nobody_elses_name(
        chromium: Chromium, open_console: OpenConsole, guarded_gate: Filled) -> None:
    console = open_console(guarded_gate)      # with a credential that many share
    console.page.locator("button.you").click()
    console.page.get_by_role("button", name="Act as").click()
    console.page.get_by_label("Id", exact=True).fill("grace")
    console.press("Enter")
    console.page.locator("button.you", has_text="grace").click()
    console.page.get_by_role("button", name="Sign out", exact=True).click()

    console.page.get_by_label("Key", exact=True).wait_for()
    console.sign_in(TOKEN)

    assert console.page.locator("button.you").inner_text() == "admin"


@pytest.mark.parametrize("role", ["agent", "worker"])
def test_who_sees_only_their_own_is_told_nothing_of_everybody(
        role: str, chromium: Chromium, open_console: OpenConsole, guarded_gate: Filled) -> None:
    console = open_console(guarded_gate, guarded_gate.issue(role, principal_kind=role, principal_id="newcomer"))
    console.visit("inbox")

    console.page.get_by_text("Nothing is owed to newcomer.").wait_for()
    console.page.get_by_text("Nothing of yours: no anomaly").wait_for()
    assert "owed in all" not in console.text()
    assert "anybody" not in console.text()


def test_the_sessions_of_one_tenant_are_only_its_own(
        chromium: Chromium, open_console: OpenConsole, guarded_gate: Filled) -> None:
    console = open_console(guarded_gate)
    mine = {"client_id": "c", "principal_kind": "human", "principal_id": "a", "begun_at": "2026-01-01T00:00:00Z",
            "ends_at": "2099-01-01T00:00:00Z"}
    sessions = [{**mine, "session_id": tenant, "tenant": tenant, "client_name": f"program of {name}"}
                for tenant, name in ((OTHER_TENANT, "them"), ("another", "us"))]
    console.route("**/v1/sessions?*", lambda route: route.fulfill(json={"sessions": sessions}))

    console.visit(f"admin?tab=sessions&tenant={OTHER_TENANT}")

    console.page.get_by_text("program of them").wait_for()
    assert "program of us" not in console.text()
