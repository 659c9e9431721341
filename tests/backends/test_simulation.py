"""The simulation: the same seed is the same history, a sound gate has no violation, and a broken one is found."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

pytest.importorskip("asyncgate.extras.families", reason="some of what is broken is an extra, and none is installed")
from asyncgate.conformance.simulated_programs import simulate_programs
from asyncgate.conformance.simulation import simulate
from tests.support.defects import DEFECTS, broken

SEEDS = range(1, 13)
SOON = ("lease_read_outside_the_lock", "acknowledged_before_the_commit", "key_checked_after_the_insert")
TWO_ROUNDS = """
from asyncgate.conformance.simulated_programs import simulate_programs
from asyncgate.conformance.simulation import simulate
print(simulate({seed}, 150)[1], simulate_programs({seed}, 1)[1])"""


def test_the_same_seed_is_the_same_history_in_every_process() -> None:
    seed = random.randrange(2**32)
    here = f"{simulate(seed, 150)[1]} {simulate_programs(seed, 1)[1]}\n"

    there = subprocess.run([sys.executable, "-c", TWO_ROUNDS.format(seed=seed)], capture_output=True, text=True,
                           check=True, env={**os.environ, "PYTHONHASHSEED": "7"}).stdout

    assert there == here, f"seed {seed}"
    assert simulate(seed + 1, 150)[1] not in here


@pytest.mark.parametrize("gates", [1, 3])
def test_simulated_gates_that_die_anywhere_lose_and_repeat_nothing(gates: int, rounds: int) -> None:
    for _ in range(rounds):
        done, _ = simulate(seed := random.randrange(2**32), gates=gates)

        assert done.violations == [], f"simulate({seed}, gates={gates})"
        assert done.faults["kill"]
        assert done.unknown


def test_programs_on_a_gate_that_dies_in_the_midst_of_calls_are_as_the_oracle_says(rounds: int) -> None:
    done, _ = simulate_programs(seed := random.randrange(2**32), 2 * rounds)

    assert done.violations == [], f"simulate_programs({seed}, {2 * rounds})"
    assert done.operations


def test_broken_gates_are_found_within_a_dozen_seeds(rounds: int) -> None:
    """With more rounds all of DEFECTS, but for those that need another fault."""
    for name in SOON if rounds == 1 else [name for name, defect in DEFECTS.items() if not defect.fault]:
        assert any(told_of(name, seed) & DEFECTS[name].found_by for seed in SEEDS), name


def told_of(name: str, seed: int) -> set[str]:
    """Return which checks find something in a gate with a defect."""
    with broken(name):
        done, _ = simulate(seed)
    return {text.partition(":")[0] for text in done.violations}
