"""The trial on a phone: from the sign-in page to an approved deployment and its proof, by somebody who is new.

A finger taps only what is in sight.  Seconds are not counted, which belong to machines, but taps, bytes and calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from asyncgate.conformance.ledgers import Drain
from tests.conftest import Live
from tests.extras.agents.test_agents import FRAMEWORKS, SCRIPTS, running, write_page
from tests.extras.console.conftest import GUARDED, OpenConsole
from tests.support.chromium import Chromium
from tests.support.console import Console
from tests.support.filled_gate import Filled, fill_gate

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 3}
TAPS_TO_APPROVE, TAPS_TO_PROVE = 3, 2
MOST_BYTES = 230_000        # of everything until the deployment is approved
IN_SIGHT = """element => {
  const {top, bottom, left, right} = element.getBoundingClientRect();
  return top >= 0 && left >= 0 && bottom <= innerHeight && right <= innerWidth;
}"""


class Finger:
    """Taps what is in sight, and counts."""

    def __init__(self, console: Console) -> None:
        self.page, self.taps = console.page, 0

    def tap(self, role: Any, name: str | re.Pattern[str]) -> None:
        """Tap the first thing of a role and a name."""
        thing = self.page.get_by_role(role, name=name, exact=True).first
        thing.wait_for()
        assert thing.evaluate(IN_SIGHT), name
        thing.tap()
        self.taps += 1


@pytest.fixture
async def gate(fresh: Callable[..., Any], start: Callable[..., Live], anyio_backend: str) -> Filled:
    """Return a gate that has seen three days, and asks everybody for a credential."""
    live = start(*GUARDED, database=await fresh("sqlite", fill_gate))
    Drain(live.process)
    return Filled(live, guarded=True)


@pytest.fixture
def key(gate: Filled) -> str:
    """Return the key of the boss."""
    return str(gate.call("issue_key", name="phone", principal_kind="human", principal_id="boss",
                         role="agent")["api_key"])


def ask(gate: Filled) -> None:
    """Ask the boss whether something may be deployed."""
    made = gate.call("create_task", type="deploy.run", payload={"version": 7}, agent_id="ada",
                     task_summary="Deploy version 7")
    [offer] = gate.call("lease_next", worker_id="deployer", accept_types=["deploy.run"])["tasks"]
    gate.call("request_input", task_id=made["task_id"], lease_id=offer["lease_id"], worker_id="deployer",
              key="deploy", message="Deploy version 7 to production?", to={"kind": "human", "id": "boss"})


@pytest.fixture
def phone(chromium: Chromium, axe: Callable[[], str], gate: Filled) -> Any:
    """Return the console of the gate on a phone."""
    opened = chromium.run(Console, chromium, axe, gate.url, **PHONE)
    yield opened
    chromium.run(opened.close)


def sign_in(phone: Console, key: str) -> Finger:
    """Sign in from the first page; the field has the focus, so that the key is typed without a tap."""
    finger, page = Finger(phone), phone.open("/console/")
    page.get_by_label("Key", exact=True).wait_for()
    page.keyboard.type(key)
    finger.tap("button", "Sign in")
    page.wait_for_selector("#main .view")
    return finger


def test_a_deployment_is_approved_from_a_phone_and_its_proof_is_two_taps_away(
        chromium: Chromium, phone: Console, gate: Filled, key: str) -> None:
    ask(gate)
    finger, page = sign_in(phone, key), phone.page

    finger.tap("button", "Accept: Deploy version 7 to production?")
    finger.tap("button", "Accept it")
    page.get_by_text("Answered: the task is queued").wait_for()
    approved, spent, calls = finger.taps, phone.watch.bytes, len(phone.watch.requests)
    finger.tap("button", "Show its receipt")
    receipt = page.get_by_role("dialog", name="input.answered")
    receipt.wait_for()

    [offer] = gate.call("lease_next", worker_id="deployer", accept_types=["deploy.run"])["tasks"]
    proof = gate.call("get_receipt", receipt_id=offer["inputs"]["deploy"]["receipt_id"])
    told = receipt.inner_text()
    for digest in (proof["hash"], proof["body"]["question_sha256"], proof["body"]["content_sha256"]):
        assert digest in told
    assert "boss" in told
    assert json.dumps("accept") in told
    assert page.get_by_role("heading", name="input.answered").evaluate(IN_SIGHT)
    assert (approved, finger.taps - approved) <= (TAPS_TO_APPROVE, TAPS_TO_PROVE)
    assert spent < MOST_BYTES, spent
    assert calls < 75, [request.url for request in phone.watch.requests]
    assert phone.faults() == []


@pytest.mark.parametrize("framework", SCRIPTS)
def test_an_agent_of_a_framework_is_approved_by_a_person_on_a_phone(
        framework: str, chromium: Chromium, phone: Console, gate: Filled, key: str, tmp_path: Path) -> None:
    if find_spec(FRAMEWORKS[framework]) is None:
        pytest.skip(f"{FRAMEWORKS[framework]} is not installed")
    made = gate.call("create_task", type="clerk", payload="v7", agent_id="ada")

    (program := tmp_path / "program.py").write_text(write_page(framework))
    with running(gate, str(program)):
        finger = sign_in(phone, key)
        finger.tap("button", re.compile("^Accept: May .*v7"))
        finger.tap("button", "Accept it")
        task = gate.call("get_task", task_id=made["task_id"], wait_seconds=30)

    assert task["result"]["result"] == "deployed: v7"
    assert phone.faults() == []


def test_the_steps_and_answers_of_a_task_are_read_by_keyboard_on_a_narrow_page(
        chromium: Chromium, open_console: OpenConsole, gate_to_read: Filled) -> None:
    console = chromium.run(open_console, gate_to_read)
    page = console.page
    console.visit(f"task/{gate_to_read.find(type='site.publish')}", width=390)
    steps, question = page.get_by_role("region", name="Steps"), page.get_by_role("region", name="Question")
    heads = steps.locator("summary").all_inner_texts()
    asked = [request for request in console.watch.urls if "/steps" in request]

    steps.locator("summary").last.focus()
    console.press("Enter")
    steps.get_by_text("x" * 1000).wait_for()
    console.press("Enter", "Enter")     # closed, and opened again: the value is not read twice
    console.rest()
    values = [request for request in console.watch.urls if "/steps" in request][len(asked):]

    assert [head.split()[0] for head in heads] == ["1", "2", "3"]
    assert "30.0 kB" in heads[2]
    assert all("values=false" in request for request in asked)
    assert [request.partition("?")[2] for request in values] == ["seq=3"]
    told = question.inner_text()
    assert "accepted" in told
    assert "grace" in told
    assert "tonight" in told
    question.get_by_role("link", name="Show its receipt").focus()
    console.press("Enter")
    receipt = page.get_by_role("complementary", name="Receipt input.answered")
    receipt.wait_for()
    console.rest()
    assert receipt.get_by_role("heading", name="input.answered").evaluate(IN_SIGHT)
    assert console.faults() == []
    assert console.axe() == []
