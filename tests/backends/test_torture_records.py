"""The record of a round: read again it says the same, and its smallest part shows the violation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncgate.conformance.evidence import draw_history
from asyncgate.conformance.minimizing import minimize
from asyncgate.conformance.recording import Mark, Recorded, RowsByKind, read_record, write_record
from asyncgate.conformance.torture import take_bodies
from asyncgate.parts.model.stored import Obligation
from tests.backends.test_history_checker import HERE, Forgery, truth


def record(f: Forgery) -> Recorded:
    rows: RowsByKind = {"Task": [*f.end.tasks.values()], "Lease": [*f.end.leases.values()], "Event": f.end.events,
            "Receipt": [*f.end.receipts.values()], "Bulk": [*f.end.bulks.values()],
            "Obligation": [Obligation("agent", "ada", receipt_id) for receipt_id in sorted(f.end.obligations)]}
    return Recorded({"seed": 7}, HERE, f.calls, [Mark(1010.0, "kill gate 0")], rows)


@pytest.fixture
def lost() -> Recorded:
    """A history of which a task is lost."""
    whole = record(truth())
    whole.rows["Task"] = [task for task in whole.rows["Task"] if task.task_id != "v"]
    return whole


def test_a_history_says_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    whole = record(truth())
    whole.others = ["VERIFY: something"]
    write_record(tmp_path / "h.jsonl", whole)

    again = read_record(tmp_path / "h.jsonl")

    assert again == whole
    assert again.judge() == []


def test_the_smallest_history_of_a_lost_task_is_its_acknowledgement(lost: Recorded) -> None:
    [told] = [text for text in lost.judge() if text.startswith("I1")]

    smallest = minimize(lost, told)

    assert [(call.operation, call.reply) for call in smallest.calls] == [
        ("create_task", {"task_id": "v", "status": "queued"})]
    assert smallest.rows == {}
    assert smallest.judge(frozenset({"I1"})) == [told]


def test_a_history_that_cannot_be_made_smaller_stays(lost: Recorded) -> None:
    [told] = [text for text in lost.judge() if text.startswith("I1")]
    smallest = minimize(lost, told)

    assert minimize(smallest, told) == smallest


def test_a_receipt_of_no_task_is_the_same_at_the_ledger() -> None:
    whole = record(truth())
    [first, *others] = whole.rows["Receipt"]
    whole.rows["Receipt"] = [replace(first, task_id="", body="")]       # as the anomaly of a schedule that is late
    there = {"receipt_id": first.receipt_id, "receipt_type": first.receipt_type, "task_id": None, "body": {"n": 1}}

    assert take_bodies(whole.rows, [there], set()) == []
    assert whole.rows["Receipt"] == [replace(first, task_id="", body='{"n": 1}')]
    assert take_bodies({"Receipt": others[:1]}, [{**there, "receipt_id": others[0].receipt_id}], set()) != []


def test_a_drawing_has_each_call_by_its_outcome_and_each_fault(lost: Recorded) -> None:
    page = draw_history(lost, "I1: <task> v")

    assert page.count("<rect ") == len(lost.calls)
    assert "I1: &lt;task&gt; v" in page
    assert "<title>kill gate 0</title>" in page
    assert re.search(r"w2: renew_lease fail ", page)
    assert "http" not in page


@pytest.mark.parametrize("whole", [True, False])
def test_a_history_is_judged_again_by_command(lost: Recorded, tmp_path: Path, whole: bool) -> None:
    write_record(tmp_path / "h.jsonl", record(truth()) if whole else lost)

    done = subprocess.run([sys.executable, "-m", "asyncgate", "torture", "--judge", tmp_path / "h.jsonl"],
                          capture_output=True, text=True)

    assert (done.returncode, "I1: task v was acknowledged and is lost" in done.stdout) == (int(not whole), not whole)
    assert f"{len(lost.calls)} operations, " in done.stdout
