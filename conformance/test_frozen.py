"""A gate that is frozen or whose clock jumps: a real server is stopped and continued, and its wall clock is set."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from asyncgate.backends import is_lasting, is_shared
from asyncgate.conformance.history import Call
from asyncgate.conformance.ledgers import PROCESS_SECONDS
from asyncgate.conformance.load import Client, own_tenant, serving

pytestmark = [pytest.mark.anyio, pytest.mark.databases(fits=is_lasting)]
HOUR = 3600
# How a lease that was frozen away comes back is measured in seconds; a busy machine is late with the completion.
PATIENT: dict[str, Any] = {"restart_grace_seconds": 60, "lease_sweep_interval_seconds": 0.2, "expiry_jitter_seconds": 0}
SHIM = """
import time, pathlib
set_by = pathlib.Path({!r})
real = time.time
time.time = lambda: real() + float(set_by.read_text())
"""


async def lease(agent: Client, worker: Client, seconds: float) -> dict[str, Any]:
    """Create a task and lease it."""
    await agent.ask("create_task", type="demo", payload=None)
    claim = await worker.ask("lease_next", lease_ttl_seconds=seconds)
    assert claim.reply is not None
    [offer] = claim.reply["tasks"]
    return offer  # type: ignore[no-any-return]


def under(offer: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that name a lease."""
    return {name: offer[name] for name in ("task_id", "lease_id", "fence")}


def leased(claim: Call) -> list[str]:
    """Return the tasks that a claim got."""
    return [task["task_id"] for task in (claim.reply or {"tasks": []})["tasks"]]


async def wait_until(moment: str) -> None:
    """Wait until a time of this machine has passed."""
    await asyncio.sleep(max(datetime.fromisoformat(moment).timestamp() + 0.1 - time.time(), 0.0))


async def test_a_lease_that_ran_out_while_its_gate_was_frozen_still_holds(database: str, rounds: int) -> None:
    async with (serving(database, **PATIENT, **own_tenant()) as server, aclosing(Client(server, "a1")) as agent,
                aclosing(Client(server, "w1")) as worker):
        for _ in range(rounds):
            offer = await lease(agent, worker, 3)
            server.process.send_signal(signal.SIGSTOP)
            await wait_until(offer["expires_at"])
            server.process.send_signal(signal.SIGCONT)

            renewed = await worker.ask("renew_lease", **under(offer))
            done = await worker.ask("complete", **under(offer), artifacts=[{"uri": "file:///out"}])

            assert (renewed.error, done.error) == (None, None)
            task = (await agent.ask("get_task", task_id=offer["task_id"])).reply
            assert task is not None
            assert (task["status"], task["expiries"]) == ("succeeded", 0)


async def test_the_lease_of_a_dead_worker_is_taken_back_after_a_freeze(database: str) -> None:
    hasty = {**PATIENT, "restart_grace_seconds": 1}
    async with (serving(database, **hasty, **own_tenant()) as server, aclosing(Client(server, "a1")) as agent,
                aclosing(Client(server, "w1")) as worker, aclosing(Client(server, "w2")) as heir):
        offer = await lease(agent, worker, 3)
        server.process.send_signal(signal.SIGSTOP)
        await wait_until(offer["expires_at"])
        server.process.send_signal(signal.SIGCONT)

        again = await heir.ask("lease_next", wait_seconds=30)

        assert leased(again) == [offer["task_id"]]


async def test_a_clock_that_is_set_costs_no_live_lease_and_keeps_no_lost_one(
        database: str, rounds: int, tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("0")
    async with (serving(database, first=SHIM.format(str(clock)), **PATIENT, **own_tenant()) as server,
                aclosing(Client(server, "a1")) as agent, aclosing(Client(server, "w1")) as worker,
                aclosing(Client(server, "w2")) as heir):
        for number in range(rounds):
            offer = await lease(agent, worker, 30)
            clock.write_text(str(0 if number % 2 else (-HOUR, HOUR)[number // 2 % 2]))
            lost = await lease(agent, worker, 1)

            again = await heir.ask("lease_next", wait_seconds=30)

            assert leased(again) == [lost["task_id"]]
            assert again.reply is not None
            for by, held in ((worker, offer), (heir, again.reply["tasks"][0])):
                assert (await by.ask("complete", **under(held), artifacts=[{"uri": "file:///out"}])).error is None
        receipts = (await agent.ask("list_receipts", limit=100)).reply
        assert receipts is not None
        stored = receipts["receipts"]
        assert [receipt["created_at"] for receipt in stored] == sorted(receipt["created_at"] for receipt in stored)
        assert [receipt["receipt_id"] for receipt in stored] == sorted(receipt["receipt_id"] for receipt in stored)


@pytest.mark.parametrize("jump", [-HOUR, HOUR])
async def test_a_gate_that_starts_by_another_clock_keeps_live_leases_and_takes_lost_ones_back(
        database: str, tmp_path: Path, jump: int) -> None:
    clock = tmp_path / "clock"
    clock.write_text("0")
    hasty = {**PATIENT, "restart_grace_seconds": 1}
    async with (serving(database, first=SHIM.format(str(clock)), **hasty, **own_tenant()) as server,
                aclosing(Client(server, "a1")) as agent, aclosing(Client(server, "w1")) as worker,
                aclosing(Client(server, "w2")) as heir):
        offer, lost = await lease(agent, worker, 30), await lease(agent, worker, 3)
        await server.stop(signal.SIGKILL)
        clock.write_text(str(jump))
        await server.start()

        again = await heir.insist("lease_next", wait_seconds=30)

        assert leased(again) == [lost["task_id"]]
        assert (await worker.ask("complete", **under(offer), artifacts=[{"uri": "file:///out"}])).error is None


@pytest.fixture
def shared(database: str) -> str:
    """Return the URL of a database that several gates may serve."""
    if not is_shared(database):
        pytest.skip("only one process may serve it")
    return database


async def test_leases_hold_when_all_gates_of_a_database_were_frozen(shared: str) -> None:
    own = own_tenant()
    async with (serving(shared, **PATIENT, **own) as first, serving(shared, **PATIENT, **own) as second,
                aclosing(Client(first, "a1")) as agent, aclosing(Client(second, "w1")) as worker,
                aclosing(Client(first, "w1")) as elsewhere):
        offer = await lease(agent, worker, 3)
        for server in (first, second):
            server.process.send_signal(signal.SIGSTOP)
        await wait_until(offer["expires_at"])
        for server in (first, second):
            server.process.send_signal(signal.SIGCONT)

        assert (await elsewhere.ask("renew_lease", **under(offer))).error is None
        assert (await worker.ask("complete", **under(offer), artifacts=[{"uri": "file:///out"}])).error is None


async def test_the_lost_leases_of_a_frozen_gate_are_taken_back_by_another(shared: str) -> None:
    own = own_tenant()
    async with (serving(shared, **PATIENT, **own) as server, serving(shared, **PATIENT, **own) as other,
                aclosing(Client(server, "a1")) as agent, aclosing(Client(other, "w1")) as worker,
                aclosing(Client(server, "w2")) as heir):
        offer = await lease(agent, worker, 1)
        other.process.send_signal(signal.SIGSTOP)

        async with asyncio.timeout(PROCESS_SECONDS):
            again = await heir.ask("lease_next", wait_seconds=30)

        assert leased(again) == [offer["task_id"]]
