"""Gates that are killed and stopped at any moment, under load: nothing is lost, repeated or contradicted.

`asyncgate torture` runs the same rounds by command, with more faults.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from asyncgate.backends import is_lasting, is_shared
from asyncgate.conformance.faults import Site
from asyncgate.conformance.harness import are_here
from asyncgate.conformance.load import CAN_LIMIT
from asyncgate.conformance.scheduled import TICK
from asyncgate.conformance.torture import TorturePlan, is_missing, run_round

pytestmark = [pytest.mark.anyio, pytest.mark.databases(fits=is_lasting)]


@pytest.mark.parametrize("gates", [1, 4])
async def test_gates_that_are_killed_and_stopped_at_any_moment_lose_and_repeat_nothing(
        database: str, gates: int, rounds: int, tmp_path: Path, record_property: Any) -> None:
    if gates > 1 and not is_shared(database):
        pytest.skip("only one process may serve it")
    plan, unknown, limited = TorturePlan(database, ("kill", "pause"), random.randrange(2**32), gates), 0, False
    for number in range(1, rounds + 1):
        done = await run_round(plan, Site(database, tmp_path), number)

        record_property("torture", done.describe())
        print(done.describe())
        assert done.violations == [], f"seed {plan.seed}"
        assert done.record is not None
        unknown += done.unknown
        limited = limited or any(call.operation == "set_limit" and call.reply for call in done.record.calls)
    assert unknown > 0
    assert limited or not CAN_LIMIT


async def test_workers_schedulers_ledgers_and_wires_that_break_lose_and_repeat_nothing(
        database: str, rounds: int, tmp_path: Path, record_property: Any) -> None:
    """Real workers, a scheduler, clients over MCP, and gates whose receipts go to a ledger, and may wait for it."""
    faults = ("kill", "worker", *["ledger"] * bool(are_here(["receive_receipts"])),
              *["scheduler"] * (not is_missing("scheduler")), "reset")
    plan = TorturePlan(database, faults, random.randrange(2**32), strikes=6, calls=60)
    for number in range(1, rounds + 1):
        done = await run_round(plan, Site(database, tmp_path), number)

        record_property("torture", done.describe())
        print(done.describe())
        assert done.violations == [], f"seed {plan.seed}"
        assert done.faults.keys() == set(faults)
        assert done.record is not None
        programs = [call for call in done.record.calls if call.by.startswith("w-program")]
        assert any(call.operation == "complete" and call.reply for call in programs)
        ticks = [task for task in done.record.rows["Task"] if task.type == TICK]
        assert ticks or "scheduler" not in faults
