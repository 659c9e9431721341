"""What somebody reads who knows the gate little: codes have words, numbers say what they count, ids are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import click
import pytest

from asyncgate import Engine
from asyncgate.backends import open_backend
from asyncgate.commands.main import main
from asyncgate.conformance.harness import Gate, settings_for_tests, under
from asyncgate.parts.model.quotas import RECEIPTS_QUOTA
from asyncgate.parts.model.wire_workers import CauseName, Evidence, WorkerFact
from tests.conftest import Live
from tests.extras.console.conftest import OPEN, OpenConsole
from tests.extras.console.test_page_logic import run
from tests.support.chromium import Chromium
from tests.support.console import Console
from tests.support.filled_gate import Filled, fill_gate
from tests.support.identity_tools import HOME

SHORTEST_END = 12       # of an id, as lists show it


@pytest.fixture
def console(chromium: Chromium, open_console: OpenConsole, gate_to_read: Filled) -> Console:
    """Return the console of the gate that all tests share."""
    return open_console(gate_to_read)


def test_every_code_of_an_explanation_has_words() -> None:
    codes = [*get_args(CauseName), *Evidence.__struct_fields__, *WorkerFact.__struct_fields__, "lease_expiries",
             RECEIPTS_QUOTA]

    told = run("words.js", f"return {codes}.filter(code => !its.hasWords(code));")

    assert told == []


WORDS = """async (evidence) => {
  const {showEvidence} = await import("/console/views/task_evidence.js");
  const list = (node) => node.text === undefined ? node.children.flatMap(list) : [node.text];
  return Object.entries(evidence).map(([name, value]) => {
    const shown = showEvidence({cause: "leased", evidence: {[name]: value}}, {now: Date.now});
    return [name, list(shown.children[0]).join("")];
  }).filter(([, text]) => /[{[]/.test(text) || text.endsWith("leased"));
}"""


def test_every_fact_of_an_explanation_is_shown_in_words(chromium: Chromium, console: Console) -> None:
    who, when = {"kind": "worker", "id": "w1"}, "2026-11-23T11:00:00Z"
    samples: dict[Any, Any] = {
        "datetime": when, "int": 2, "float": 2.5, "str": "text", "list[str]": ["one", "two"], "wire.Principal": who,
        "list[WorkerFact]": [{"worker": who, "asked_at": when, "accept_types": [], "capabilities": ["gpu"]}],
        "dict[str, int]": {"open": 1, "succeeded": 2, "failed": 0, "canceled": 0}}
    evidence = {name: samples[type.removesuffix(" | None")] for name, type in Evidence.__annotations__.items()}

    console.visit("tasks")
    assert console.page.evaluate(WORDS, evidence) == []


def test_a_task_is_found_by_the_beginning_and_by_the_end_of_its_id(
        chromium: Chromium, console: Console, gate_to_read: Filled) -> None:
    task_id = gate_to_read.find(held=True)

    for part in (task_id[:18], task_id[-SHORTEST_END:], f"id:{task_id[-SHORTEST_END:]}", task_id):
        console.visit(f"tasks?q={part}")
        console.page.get_by_text("1 task", exact=True).wait_for()
        assert console.page.locator(f"#main a[href='#/task/{task_id}']").count() == 1
    console.visit("tasks?q=ffffffffffff")
    console.page.get_by_text("No id begins or ends so").wait_for()
    console.visit(f"inbox?q={task_id}")
    console.page.get_by_text("ids are found in the view Tasks").wait_for()
    assert console.faults() == []


def test_numbers_that_a_filter_does_not_change_say_what_they_count(chromium: Chromium, console: Console) -> None:
    for view in ("tasks", "inbox"):
        console.visit(view)
        console.page.locator(".chips").first.wait_for()
        assert "whatever" not in console.text()
        console.visit(f"{view}?q={'owner' if view == 'tasks' else 'to'}%3Aada")
        console.page.get_by_text("whatever").wait_for()


def test_a_tile_of_workers_counts_what_its_link_shows(chromium: Chromium, console: Console) -> None:
    console.visit("workers?q=reader")
    tile = console.page.locator("a.tile", has_text="silent")
    count = int(tile.locator("strong").inner_text())
    assert count > 0

    tile.click()

    rows = console.page.locator("table.rows", has_text="Workers").first.locator("tr[data-row]")
    rows.nth(count).wait_for(state="detached")      # what was shown before goes
    rows.nth(count - 1).wait_for()
    assert rows.count() == count


def test_a_filter_for_one_owner_keeps_the_queues_that_nobody_can_take(chromium: Chromium, console: Console) -> None:
    console.visit("inbox?q=to%3Aada")

    look = console.page.get_by_role("region", name="Needs a look")
    look.get_by_text("no worker that takes ocr.scan").wait_for()
    console.page.locator("a.tile", has_text="a look").click()
    look.get_by_role("button", name="Show fewer").wait_for()
    assert console.page.evaluate("() => document.activeElement.closest('#look') !== null")


def test_the_drawing_of_a_task_says_what_its_signs_mean(
        chromium: Chromium, console: Console, gate_to_read: Filled) -> None:
    console.visit(f"task/{gate_to_read.find(type='page.summarize', status='failed')}")

    legend = console.page.get_by_role("list", name="What the drawing means").inner_text()

    assert "✕" in legend
    assert "failed" in legend


def test_the_links_of_a_schedule_lead_to_filters_that_their_views_know(
        chromium: Chromium, console: Console) -> None:
    for words, view in (("what is owed to its owner", "inbox"), ("those of its owner", "tasks"),
                        ("those that the scheduler created", "tasks")):
        console.visit("schedules/nightly-report")
        console.page.get_by_role("link", name=words).click()
        console.await_view(view)
        assert console.page.locator("#filter-problem").count() == 0, words


def test_what_needs_a_look_is_not_nothing_while_the_gate_has_not_said_so(chromium: Chromium, console: Console) -> None:
    console.route("**/v1/receipts?*", lambda route: route.fulfill(
        status=503, json={"error": "unavailable", "message": "the database is away"}))

    console.visit("inbox?q=type:page.summarise")      # a type that nobody has: no queue needs a look

    look = console.page.get_by_role("region", name="Needs a look")
    look.get_by_text("the database is away").wait_for()
    assert "Nothing" not in look.inner_text()
    assert console.page.locator(".tile", has_text="need a look").inner_text().split()[0] == "–"


def test_a_call_with_a_no_is_copied_as_a_command_that_runs(chromium: Chromium, console: Console) -> None:
    console.visit("tasks")

    copied = console.page.evaluate("""async () => (await import("./share.js")).asCommand("list_tasks",
        {held: false, type: "ocr.scan"})""")

    assert "--no-held --type ocr.scan" in copied


def test_an_export_says_that_the_page_has_not_read_all(chromium: Chromium, console: Console) -> None:
    console.route("**/v1/tasks?*", lambda route: route.fulfill(json={
        **route.fetch().json(), "next_cursor": "more"}))

    console.visit("tasks")
    console.page.locator("summary", has_text="Export").first.click()

    rows = console.page.locator("#main .list-end").inner_text().split()[0]
    item = console.page.get_by_role("menuitem", name="CSV").first
    assert item.inner_text() == f"CSV: only the {rows} rows read so far"


async def lease_often(url: str) -> None:
    """Let one task of a gate be leased more often than a page reads rows of a list, which is 1,000."""
    backend = await open_backend(url)
    gate = Gate(Engine(backend, settings_for_tests()), HOME)
    await gate.create("often", task_summary="The newest")
    for fence in range(1, 1006):
        offer = await gate.claim("w", accept_types=["often"])
        assert offer is not None
        assert offer.fence == fence
        await gate.as_worker("w").release_lease(**under(offer))
    await backend.close()


@pytest.fixture
async def gate_with_attempts(fresh: Callable[..., Any], start: Callable[..., Live], anyio_backend: str) -> Filled:
    await lease_often(url := await fresh("sqlite", fill_gate))
    return Filled(start(*OPEN, database=url))


def test_the_last_attempts_are_the_newest_however_many_leases_there_were(
        chromium: Chromium, open_console: OpenConsole, gate_with_attempts: Filled) -> None:
    console = open_console(gate_with_attempts)

    console.visit("workers")

    first = console.page.get_by_role("region", name="Last attempts").locator("tr[data-row]").first
    first.get_by_text("The newest").wait_for()
    assert first.locator("[data-title=Attempt]").inner_text() == "1,005"


def test_what_is_on_hold_is_counted_in_all_queues_of_many(
        chromium: Chromium, open_console: OpenConsole, gate_to_change: Filled) -> None:
    queues = [{"type": f"aaa.{number:03}", "payload": None} for number in range(205)]
    gate_to_change.call("create_tasks", tasks=queues, agent_id="ada")       # before the held task; a page has 200
    console = open_console(gate_to_change)

    for view in ("inbox", "tasks"):
        console.visit(view)
        tile = console.page.locator("a.tile", has_text="on hold")
        tile.wait_for()
        assert tile.locator("strong").inner_text() == "1"
    console.visit("inbox?look=all")
    console.page.get_by_role("region", name="Needs a look").get_by_text("on hold", exact=True).first.wait_for()
    assert console.faults() == []


@pytest.mark.parametrize("width", [390, 800, 1280, 1800])
def test_a_task_is_told_apart_by_its_short_id_in_windows_of_each_width(
        width: int, chromium: Chromium, console: Console) -> None:
    console.visit("tasks", width=width)

    ids = console.page.locator("tr[data-row]").first.locator("button.id:visible")
    task_id = console.page.locator("a.row-link").first.get_attribute("href")
    assert task_id is not None
    assert ids.all_inner_texts() == [task_id[-12:]]
    assert console.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert console.axe() == []


EMPTY = {"tasks": ("tasks", "/v1/tasks"), "queues": ("queues", "/v1/queues"), "workers": ("workers", "/v1/workers"),
         "schedules": ("schedules", "/v1/schedules"), "admin?tab=keys": ("keys", "/v1/keys"),
         "admin?tab=people": ("users", "/v1/users"), "admin?tab=sessions": ("sessions", "/v1/sessions"),
         "ledger": ("seals", "/v1/seals"), "admin?tab=usage": ("usage", "/v1/usage"),
         "admin?tab=audit": ("lines", "/v1/audit")}


@pytest.mark.parametrize("view", EMPTY)
def test_an_empty_view_offers_a_command_that_exists(view: str, chromium: Chromium, console: Console) -> None:
    listed, path = EMPTY[view]
    console.route(f"**{path}*", lambda route: route.fulfill(json={listed: [], "next_cursor": None}))

    console.visit(view)

    commands = console.page.locator("#main .empty .command code").all_inner_texts()
    assert commands != []
    for program, name, *_ in map(str.split, commands):
        assert program == "claude" or name in main.list_commands(click.Context(main))
    assert console.axe() == []
