"""`asyncgate receipts tree`: the chain of a task as people see it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from asyncgate.clients.http import Http
from asyncgate.commands.main import main
from asyncgate.commands.receipts import BOXES, can_print
from tests.conftest import TOKEN, Live


@pytest.fixture
def gate(live_for_all: Live) -> Iterator[Http]:
    with Http(live_for_all.url, TOKEN) as gate:
        yield gate


def tree(gate: Http, task_id: str, *more: str, colour: bool = False) -> Result:
    return CliRunner().invoke(main, ["receipts", "tree", task_id, "--url", gate.url, "--token", TOKEN, *more],
                              color=colour)


def leased(gate: Http, **task: Any) -> dict[str, Any]:
    gate.call("create_task", type="tree", agent_id="ada", **{"payload": 1, **task})
    offer: dict[str, Any] = gate.call("lease_next", worker_id="w1", accept_types=["tree"])["tasks"][0]
    return offer


def done(gate: Http, **result: Any) -> str:
    """Create and complete a task that was given back once; return its id."""
    offer = leased(gate)
    gate.call("release_lease", worker_id="w1", task_id=offer["task_id"], lease_id=offer["lease_id"])
    offer = gate.call("lease_next", worker_id="w2", accept_types=["tree"])["tasks"][0]
    gate.call("complete", worker_id="w2", task_id=offer["task_id"], lease_id=offer["lease_id"], result={"n": 1},
              **result)
    return str(offer["task_id"])


LOCATED = {"artifacts": [{"uri": "file:///out"}]}


def test_each_receipt_stands_under_the_one_that_it_answers(gate: Http) -> None:
    told = tree(gate, done(gate, **LOCATED))

    head, *lines = told.output.splitlines()
    assert told.exit_code == 0, told.output
    assert head.endswith("succeeded")
    assert [(line.index("─"), line.split("─ ")[1].split("  ")[0]) for line in lines] == [
        (1, "task.assigned"), (4, "task.accepted"), (7, "lease.expired (released)"), (4, "task.accepted"),
        (4, "task.completed"), (7, "task.result_ready")]
    assert "agent ada → agent ada" in lines[0]
    assert "worker w2 → asyncgate" in lines[4]
    assert "+0." in lines[1]


def test_a_chain_that_is_closed_has_no_open_end(gate: Http) -> None:
    assert "○" not in tree(gate, done(gate, **LOCATED)).output


@pytest.mark.parametrize("ends", ["task.assigned", "task.accepted"])
def test_what_is_owed_and_who_is_at_work_are_open_ends(gate: Http, ends: str) -> None:
    told = tree(gate, leased(gate)["task_id"])

    [line] = [line for line in told.output.splitlines() if ends in line]
    assert ("○ open: owed to agent ada" if ends == "task.assigned" else "○ open: worker w1 is at work") in line


def test_success_that_can_be_found_nowhere_leaves_its_duty_open(gate: Http) -> None:
    told = tree(gate, done(gate))

    [assigned] = [line for line in told.output.splitlines() if "task.assigned" in line]
    [completed] = [line for line in told.output.splitlines() if "task.completed" in line]
    assert "○ open: owed to agent ada" in assigned
    assert completed.index("─") == 1        # it answers nothing


def test_ascii_is_for_whoever_cannot_see_boxes(gate: Http) -> None:
    told = tree(gate, leased(gate)["task_id"], "--ascii")

    assert told.output.isascii()
    assert "`- task.assigned  agent ada -> agent ada" in told.output
    assert "(open): owed to agent ada" in told.output


@pytest.mark.parametrize(("encoding", "can"), [("utf-8", True), ("ascii", False), ("latin-1", False)])
def test_the_encoding_of_the_terminal_says_what_it_can_show(
        monkeypatch: pytest.MonkeyPatch, encoding: str, can: bool) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))

    assert can_print(BOXES) is can


def test_colours_are_for_a_terminal_only(gate: Http) -> None:
    task_id = done(gate, **LOCATED)

    assert "\x1b[" not in tree(gate, task_id).output
    assert "\x1b[" in tree(gate, task_id, colour=True).output


def test_json_has_the_same_tree(gate: Http) -> None:
    told = json.loads(tree(gate, done(gate, **LOCATED), "--json").output)

    [assigned] = told["receipts"]
    assert (told["status"], assigned["receipt"]["receipt_type"], assigned["open"]) == (
        "succeeded", "task.assigned", None)
    assert [child["receipt"]["receipt_type"] for child in assigned["children"]] == [
        "task.accepted", "task.accepted", "task.completed"]


def test_a_receipt_with_several_parents_stands_under_the_oldest_and_names_the_others(gate: Http) -> None:
    task = leased(gate)
    accepted = gate.call("list_receipts", task_id=task["task_id"], receipt_type="task.accepted")["receipts"][0]
    gate.call("complete", worker_id="w1", task_id=task["task_id"], lease_id=task["lease_id"], result={}, **LOCATED)
    made = gate.call("create_task", type="schedule.create", payload={}, agent_id="ada")
    offer = gate.call("lease_next", worker_id="w1", accept_types=["schedule.create"])["tasks"][0]
    gate.call("emit_receipt", worker_id="w1", receipt_type="schedule.created", task_id=made["task_id"],
              lease_id=offer["lease_id"], schedule_id=f"s-{made['task_id']}",
              parents=[offer["obligation_receipt_id"], accepted["receipt_id"]])

    told = tree(gate, made["task_id"])

    [line] = [line for line in told.output.splitlines() if "schedule.created" in line]
    assert f"↖ {accepted['receipt_id']}" in line
    assert line.index("─") == 4
    assert "○ open: owed to agent ada" in line


def test_a_task_that_is_not_there_is_said_in_a_line(gate: Http) -> None:
    told = tree(gate, "none")

    assert (told.exit_code, told.output.splitlines()) == (4, [
        "Error: task_not_found (404): no task none; list_tasks shows the tasks, "
        "list_archived_receipts the archived receipts of a pruned task"])
