"""A checker is worth nothing unless it finds what is wrong: each gate that is broken on purpose, soon, and by name."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("asyncgate.extras.families", reason="some of what is broken is an extra, and none is installed")
from asyncgate.conformance.disks import NoShim
from asyncgate.conformance.minimizing import minimize
from tests.support.defects import DEFECTS, run_broken_round, try_defect

pytestmark = pytest.mark.anyio
TRIALS = 60             # of 500 calls; most need one or two, the rarest six, so that one run in 50,000 misses it
ROUNDS_OF_A_DEFECT = 8  # of torture; half of those with a ledger are strict, and send before they commit


@pytest.mark.parametrize("name", [name for name, defect in DEFECTS.items() if not defect.fault])
async def test_a_gate_that_breaks_a_rule_is_found_by_the_check_of_that_rule(name: str) -> None:
    seeds = [random.randrange(2**32) for _ in range(TRIALS)]
    for seed in seeds:
        told = {text.partition(":")[0] for text in (await try_defect(name, seed)).judge()}
        if told & DEFECTS[name].found_by:
            return
    pytest.fail(f"{name} was not found by {sorted(DEFECTS[name].found_by)} in {TRIALS} trials, of the seeds {seeds}")


@pytest.mark.parametrize("name", [name for name, defect in DEFECTS.items() if defect.fault])
async def test_a_gate_that_breaks_its_word_under_a_fault_is_found_by_the_check_of_that(
        name: str, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    for number in range(1, ROUNDS_OF_A_DEFECT + 1):
        try:
            done = await run_broken_round(name, seed, number, tmp_path)
        except NoShim as why:
            pytest.skip(str(why))
        if {word for text in done.violations for word in text.split(": ")} & DEFECTS[name].found_by:
            return
    pytest.fail(f"{name} was not found by {sorted(DEFECTS[name].found_by)} in {ROUNDS_OF_A_DEFECT} rounds of {seed}")


async def test_there_are_twenty_defects_and_a_sound_gate_has_none() -> None:
    assert len(DEFECTS) >= 20
    for _ in range(3):
        record = await try_defect("", seed := random.randrange(2**32))

        assert [*record.judge(), *record.others] == [], f"seed {seed}"
        assert any(call.unknown for call in record.calls)


def test_the_page_of_evidence_names_each_defect_and_what_finds_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()

    for name, defect in DEFECTS.items():
        assert f"| `{name}` | {defect.break_gate.__doc__} | {', '.join(sorted(defect.found_by))} |" in page


async def test_the_smallest_history_of_a_defect_is_a_few_calls() -> None:
    for _ in range(TRIALS):
        record = await try_defect("lease_used_by_a_stranger", random.randrange(2**32))
        if told := [text for text in record.judge() if text.startswith("I4")]:
            break

    smallest = minimize(record, told[0])

    assert smallest.judge(frozenset({"I4"}))
    assert len(smallest.calls) + sum(map(len, smallest.rows.values())) <= 3


async def test_a_real_gate_that_acknowledges_before_it_commits_is_found(tmp_path: Path) -> None:
    done = await run_broken_round("acknowledged_before_the_commit", random.randrange(2**32), 1, tmp_path)

    assert [text for text in done.violations if text.startswith("I1: ")]
