"""Everything that the console can do, done in a browser and seen at the gate.

What the page sends is the same whatever database is behind the gate: some of it is tried on both.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.extras.console.conftest import OpenConsole
from tests.support.chromium import Chromium
from tests.support.console import Console
from tests.support.filled_gate import OTHER_TENANT, Filled

# On Postgres behind a sign-in.
BOTH = pytest.mark.parametrize("gate_to_change", ["sqlite", "postgres"], indirect=True)
REASON = "because a test says so"
REVOCABLE = """left => [...document.querySelectorAll("#main tr")].filter(row =>
  row.innerText.includes("for a robot") && row.innerText.includes("Revoke")).length === left"""


@pytest.fixture
def console(chromium: Chromium, open_console: OpenConsole, gate_to_change: Filled) -> Console:
    """Return the console of a gate of the test's own; its user acts as grace, for the credential is nobody's own."""
    console = open_console(gate_to_change)
    chromium.run(act_as, console, "grace")
    return console


def act_as(console: Console, name: str) -> None:
    """Say in whose name the page acts."""
    console.visit("inbox")
    console.page.locator("button.you").click()
    console.page.get_by_role("button", name="Act as").click()
    answer(console, "Go on", Id=name)


def press(console: Console, name: str, *, within: str = "#main") -> None:
    """Press the first button of a name."""
    console.page.locator(within).get_by_role("button", name=name).first.click()


def answer(console: Console, button: str, **fields: str) -> None:
    """Fill the fields of the dialog that is open, by their labels, and press its button; wait until it is gone."""
    dialog = console.page.get_by_role("dialog").last
    for label, value in fields.items():
        dialog.get_by_label(label.replace("_", " "), exact=True).fill(value)
    assert console.axe() == []
    asked = dialog.element_handle()
    dialog.get_by_role("button", name=button, exact=True).click()
    asked.wait_for_element_state("hidden")


@BOTH
def test_the_inbox_acknowledges_releases_cancels_and_attaches(
        chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    held, lost = gate_to_change.find(held=True), gate_to_change.find(type="report.lost")
    named = gate_to_change.call("get_task", task_id=gate_to_change.find(type="mail.send"))
    console.visit("inbox")

    press(console, "Acknowledge: The report that nobody can find")
    console.page.get_by_text("Acknowledged: it was seen").wait_for()
    press(console, "Say where it is: The report that nobody can find")
    answer(console, "Attach", Where_the_result_is="s3://bucket/report.pdf")
    press(console, "Release: ")
    console.page.get_by_text("Released").first.wait_for()
    press(console, f"Cancel: {named['task_summary']}")
    answer(console, "Cancel it", Why=REASON)

    assert gate_to_change.call("get_task", task_id=held)["held"] is None
    assert gate_to_change.call("get_task", task_id=lost)["obligation_open"] is False
    assert gate_to_change.call("get_task", task_id=named["task_id"])["status"] == "canceled"
    assert console.faults() == []


def test_the_page_of_a_task_cancels_runs_again_and_attaches(
        chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    failed, lost = gate_to_change.find(status="failed", type="page.summarize"), gate_to_change.find(type="report.lost")

    console.visit(f"task/{failed}")
    press(console, "Run again")
    answer(console, "Run again")
    console.page.wait_for_function("id => !location.hash.includes(id)", arg=failed)
    again = console.page.url.rpartition("/")[2]
    console.page.get_by_text(again[-8:]).first.wait_for()
    press(console, "Cancel")
    answer(console, "Cancel it", Why=REASON)
    console.visit(f"task/{lost}")
    press(console, "Attach")
    answer(console, "Attach", Where_the_result_is="https://example.com/report.pdf", Media_type="application/pdf")

    task = gate_to_change.call("get_task", task_id=again)
    assert (task["status"], task["type"]) == ("canceled", "page.summarize")
    assert gate_to_change.call("get_task", task_id=lost)["obligation_open"] is False
    assert console.faults() == []


def test_a_new_task_begins_with_what_the_newest_of_its_type_had(
        chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    gate_to_change.call("create_task", type="small", payload={"page": 7}, agent_id="grace")
    gate_to_change.call("create_task", type="large", payload={"text": "x" * 5000}, agent_id="grace")
    gate_to_change.call("lease_next", worker_id="w9", accept_types=["small", "large"])

    console.visit("tasks")
    press(console, "New task")
    dialog = console.page.get_by_role("dialog")
    hint = dialog.locator("#field-type-hint").inner_text()
    payloads = []
    for kind in ("large", "small"):
        with console.page.expect_response("**/v1/tasks?*"):
            dialog.get_by_label("Type").fill(kind)
            dialog.get_by_label("Type").press("Tab")
        dialog.get_by_text("Create it").wait_for()
        payloads.append(dialog.get_by_label("Payload (JSON)").input_value())
    answer(console, "Create it")

    assert {"large", "small"} <= set(hint.removeprefix("Workers ask for ").split(", "))
    assert payloads[0] == "{}"
    made = gate_to_change.find(type="small", status="queued")
    assert gate_to_change.call("get_task", task_id=made)["payload"] == {"page": 7}


def test_work_is_paused_drained_and_resumed(chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    def reasons() -> dict[str, Any]:
        return {str(pause["type"]): pause["reason"] for pause in gate_to_change.call("list_pauses")["pauses"]}

    console.visit("inbox?q=type%3Aocr.scan")
    press(console, "Pause …")
    answer(console, "Pause", Why=REASON)
    console.page.get_by_text("Paused").first.wait_for()
    assert reasons()["ocr.scan"] == REASON
    press(console, "Resume", within=".stop-type")
    console.page.get_by_text("Resumed").first.wait_for()
    assert "ocr.scan" not in reasons()
    press(console, "Drain …")
    console.page.get_by_role("dialog").get_by_role("button", name="Drain", exact=True).click()
    console.page.get_by_text("No lease is left").or_(console.page.get_by_text("left. Waiting for")).wait_for()
    assert "ocr.scan" in reasons()
    console.page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    console.page.get_by_role("dialog").wait_for(state="detached")
    console.visit("inbox?look=all")
    press(console, "Resume: mail.send")
    console.page.get_by_role("button", name="Resume: mail.send").wait_for(state="detached")

    assert reasons().keys() & {"ocr.scan", "mail.send"} == set()
    assert console.faults() == []


def test_a_pause_and_its_end_are_shown_at_once_where_no_event_tells_of_them(
        chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    console.route("**/v1/receipts/stream*", lambda route: route.abort())
    console.visit("inbox?q=type%3Aocr.scan")
    press(console, "Pause …")
    answer(console, "Pause", Why=REASON)
    press(console, "Resume", within=".stop-type")

    console.page.locator("#main").get_by_role("button", name="Drain …").first.wait_for()

    assert "ocr.scan" not in {pause["type"] for pause in gate_to_change.call("list_pauses")["pauses"]}


@BOTH
def test_a_bulk_is_counted_confirmed_by_typing_and_carried_out(
        chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    console.visit("tasks?q=type%3Apage.summarize")
    console.page.get_by_text("Do to all").click()
    console.page.get_by_role("menuitem", name="Cancel them all").click()
    answer_bulk = console.page.get_by_role("dialog")
    answer_bulk.get_by_label("Why").fill(REASON)
    answer_bulk.get_by_role("button", name="Count them first").click()
    words = answer_bulk.locator("label code").inner_text()
    assert "Summarize page" in answer_bulk.locator(".sample").inner_text()
    run = answer_bulk.get_by_role("button", name="Cancel them all")
    assert run.is_disabled()
    answer_bulk.get_by_role("textbox").fill(words)
    run.click()
    answer_bulk.get_by_text("Ended:").wait_for()
    assert console.axe() == []
    answer_bulk.get_by_role("button", name="Done").click()

    left = [task["status"] for task in gate_to_change.call("list_tasks", type="page.summarize", limit=200)["tasks"]]
    assert left.count("canceled") >= int(words.split()[1])
    assert not {"queued", "leased", "running"} & set(left)
    assert console.faults() == []


@BOTH
def test_keys_are_issued_rotated_and_revoked(chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    console.visit("admin")
    press(console, "Issue a key")
    answer(console, "Issue", Name="for a robot", **{"Whose:_id": "robot"})
    secret = console.page.locator("pre.secret").inner_text()
    assert gate_to_change.call("list_tasks", token=secret)["tasks"] is not None
    press(console, "Done", within="dialog")
    row = console.page.locator("tr", has_text="for a robot")
    row.get_by_role("button", name="Rotate").click()
    answer(console, "Rotate")
    second = console.page.locator("pre.secret").inner_text()
    press(console, "Done", within="dialog")
    for left in (1, 0):
        row.get_by_role("button", name="Revoke").first.click()
        answer(console, "Revoke", Why=REASON)
        console.page.wait_for_function(REVOCABLE, arg=left)

    assert second != secret
    keys = [key for key in gate_to_change.call("list_keys", limit=200)["keys"] if key["principal_id"] == "robot"]
    assert [bool(key["revoked_at"]) for key in keys] == [True, True]
    assert console.faults() == []


@BOTH
def test_tenants_are_limited_and_suspended_and_receipts_sealed_and_archived(
        chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    console.visit(f"admin?tab=tenants&tenant={OTHER_TENANT}")
    press(console, "Change …")
    console.page.get_by_role("dialog").get_by_label("Tier").select_option("enterprise")
    answer(console, "Change", Why=REASON, **{"Largest payload, in bytes": "4000", "Longest lease, in seconds": "600"})
    console.page.get_by_text("4000 bytes").wait_for()
    console.page.locator("tr", has_text="Northwind").get_by_role("button", name="Suspend").click()
    answer(console, "Suspend", Why=REASON)
    console.page.locator("tr", has_text="Northwind").get_by_role("button", name="Let go on").wait_for()
    limits = gate_to_change.call("get_limits", tenant=OTHER_TENANT)
    assert (limits["tier"], limits["max_payload_bytes"], limits["max_lease_ttl_seconds"]) == ("enterprise", 4000, 600)
    assert [tenant["suspended_at"] is None for tenant in gate_to_change.call("list_tenants")["tenants"]
            if tenant["tenant"] == OTHER_TENANT] == [False]
    console.visit("ledger")
    press(console, "Seal now")
    last = gate_to_change.call("list_seals", last=1)["seals"][0]
    console.page.get_by_text(f"Sealed up to seal {last['number']}").wait_for()
    press(console, "Archive now")
    press(console, "Archive", within="dialog form")
    alert = console.page.get_by_role("dialog").get_by_role("alert")
    alert.wait_for()

    assert "archive.directory" in alert.inner_text()      # no archive is set, and the answer says how
    assert [fault for fault in console.faults() if "/v1/archive/run" not in fault] == []


def test_a_budget_is_set_and_removed_beside_what_was_used(
        chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    console.visit("admin?tab=usage")
    [month] = gate_to_change.call("get_usage", period="month")["usage"]
    assert console.page.locator("tbody tr").first.inner_text().split()[:2] == [month["begins"][:7], str(month["tasks"])]

    for given, kept in (("100000", [100_000]), ("", [])):
        press(console, "Change …")
        answer(console, "Change", **{"In a month": given})
        console.page.get_by_text("No budget is set" if not kept else "of 100,000").wait_for()
        assert [budget["monthly"] for budget in gate_to_change.call("get_budgets")["budgets"]] == kept
    assert console.faults() == []


def test_a_question_is_answered_from_its_card(chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    call, worker = gate_to_change.call, {"worker_id": "deployer"}
    schema = {"type": "object", "required": ["window"], "properties": {
        "window": {"type": "string", "title": "When", "enum": ["now", "tonight"]},
        "note": {"type": "string", "title": "Note"}}}
    made = call("create_task", type="deploy.run", payload=None, principal_kind="human", principal_id="grace")
    task_id = made["task_id"]
    offer = call("lease_next", accept_types=["deploy.run"], **worker)["tasks"][0]
    call("request_input", task_id=task_id, lease_id=offer["lease_id"], key="deploy", message="Deploy version 7?",
         schema=schema, **worker)
    console.visit("inbox")

    press(console, "Accept: Deploy version 7?")
    console.page.get_by_role("dialog").last.get_by_label("When").select_option("tonight")
    answer(console, "Accept it", Note="after the backup")
    console.page.get_by_text("Answered: the task is queued").wait_for()

    again = call("lease_next", accept_types=["deploy.run"], **worker)["tasks"][0]
    assert again["inputs"]["deploy"]["action"] == "accept"
    assert again["inputs"]["deploy"]["content"] == {"window": "tonight", "note": "after the backup"}


SCHEMA = {"type": "object", "required": ["file", "pages", "to"], "properties": {
    "file": {"type": "string", "title": "File"}, "pages": {"type": "integer", "title": "Pages", "minimum": 1},
    "scale": {"type": "number", "title": "Scale", "default": 1.5}, "to": {"enum": ["text", "html"], "title": "Into"},
    "deskew": {"type": "boolean", "title": "Deskew"}, "box": {"$ref": "#/$defs/Box"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "Note", "default": None}},
    "$defs": {"Box": {"type": "object", "title": "Box", "properties": {"left": {"type": "integer"}}}}}


def test_a_task_of_a_declared_type_is_created_in_a_form_made_of_its_schema(
        chromium: Chromium, console: Console, gate_to_change: Filled) -> None:
    gate_to_change.call("declare_type", worker_id="w9", type="scan.page", description="Reads a page.",
                        payload_schema=SCHEMA)
    console.visit("tasks")
    press(console, "New task")
    dialog = console.page.get_by_role("dialog")
    dialog.get_by_label("Type").fill("scan.page")
    dialog.get_by_label("Type").press("Tab")
    dialog.get_by_label("Into").select_option("html")
    dialog.get_by_label("Deskew").check()
    assert dialog.locator("#field-type-hint").inner_text() == "Reads a page."
    assert dialog.get_by_label("Payload (JSON)").count() == 0
    for label, value in {"File": "a.png", "Pages": "0", "Scale": "0.25", "Box": '{"left": 3}'}.items():
        dialog.get_by_label(label, exact=True).fill(value)
    dialog.get_by_role("button", name="Create it").click()
    dialog.get_by_role("alert").get_by_text("payload.pages").wait_for()
    answer(console, "Create it", Pages="2")
    console.page.locator("h1").wait_for()

    made = gate_to_change.call("get_task", task_id=gate_to_change.find(type="scan.page"))
    assert made["payload"] == {"file": "a.png", "pages": 2, "scale": 0.25, "to": "html", "deskew": True,
                               "box": {"left": 3}}
    console.visit(f"queues/{gate_to_change.call('list_queues', type='scan.page')['queues'][0]['queue_id']}")
    press(console, "New task")
    dialog.get_by_label("File", exact=True).fill("b.png")
    dialog.get_by_label("Pages", exact=True).fill("1")
    dialog.get_by_label("Write the payload as JSON").check()
    written = dialog.get_by_label("Payload (JSON)").input_value()
    assert json.loads(written) == {"file": "b.png", "pages": 1, "scale": 1.5, "to": "text", "deskew": False}
    answer(console, "Create it", **{"Payload (JSON)": '{"file": "c.png", "pages": 9, "to": "text"}'})
    console.page.locator("h1").wait_for()
    last = gate_to_change.call("get_task", task_id=gate_to_change.find(type="scan.page"))
    assert last["payload"] == {"file": "c.png", "pages": 9, "to": "text"}
    [refused] = console.faults()
    assert "400 (Bad Request)" in refused
