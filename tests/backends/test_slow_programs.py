"""Random programs on a machine that stands still in their midst: the gate is right, and nothing says otherwise."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import hypothesis
import pytest

from asyncgate.backends import open_backend
from asyncgate.conformance import harness, test_programs
from asyncgate.conformance.model import Rules


def make_slow(side: test_programs.Side, draw: random.Random) -> None:
    """Let some calls of a side take seconds, by the clock of its gate."""
    perform, gate = side.perform, side.gates[0]

    def perform_slowly(who: test_programs.Who, name: str, fields: dict[str, object]) -> tuple[object, ...]:
        gate.skip(draw.choice([0.0] * 15 + [7.0]))
        return perform(who, name, fields)
    side.perform = perform_slowly  # type: ignore[method-assign]


class SlowAgainstTheOracle(test_programs.AgainstTheOracle):
    """A slow gate compared with the oracle."""

    def begin(self, rules: Rules) -> None:
        super().begin(rules)
        make_slow(self.side, random.Random(7))


class SlowTwins(test_programs.OnTwoBackends):
    """Two gates of which one is slow."""

    def begin(self, rules: Rules) -> None:
        super().begin(rules)
        make_slow(self.sides[1], random.Random(7))


@pytest.fixture
def settings() -> hypothesis.settings:
    return hypothesis.settings(
        test_programs.budget(1), max_examples=5, derandomize=True, phases=[hypothesis.Phase.generate])


def test_a_machine_that_stands_still_makes_no_gate_wrong(settings: hypothesis.settings) -> None:
    with asyncio.Runner() as runner:
        backend = harness.OwnTenants(runner.run(open_backend("memory:", serving=True)))
        test_programs.run_programs(partial(SlowAgainstTheOracle, runner.run, backend), settings)
        runner.run(backend.aclose())


def test_nor_are_two_gates_of_which_one_stands_still_unequal(settings: hypothesis.settings) -> None:
    with asyncio.Runner() as runner:
        backends: list[harness.OwnTenants] = [
            test_programs.InOrder(runner.run(open_backend("memory:"))) for _ in range(2)]
        test_programs.run_programs(partial(SlowTwins, runner.run, backends), settings)
        for backend in backends:
            runner.run(backend.aclose())
