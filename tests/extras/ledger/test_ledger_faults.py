"""Two real processes, a gate and its ledger, either of which may die at any moment: nothing is lost or said twice."""

from __future__ import annotations

import asyncio
import json
import math
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncgate.backends import is_lasting, is_shared
from asyncgate.conformance.ledgers import LedgerServer
from asyncgate.conformance.load import TENANT, Client, GateServer, serving
from asyncgate.conformance.postgres_server import free_port
from tests.support.patience import PATIENCE_SECONDS

pytestmark = [pytest.mark.anyio, pytest.mark.databases(fits=is_lasting)]
LANES = 8
TASKS_PER_ROUND = 100
MORE = (1, 50, 100)     # receipts from one death of the ledger to the next
ARTIFACTS = [{"uri": "file:///out"}]
TOKEN = "a-token-of-the-ledger"
HASTY: dict[str, Any] = {
    "lease_sweep_interval_seconds": 0.5, "receipt_mode": "memorygate_integrated", "ledger.auth_token": TOKEN,
    "ledger.timeout_ms": 2000, "ledger.circuit_breaker.timeout_seconds": 0.2,
    "ledger.emission_retry.retry_interval_seconds": 0.3, "ledger.emission_retry.max_retries": 3}


@pytest.fixture
def books(tmp_path: Path) -> LedgerServer:
    """A ledger that keeps its port and its file over all its lives; it does not run yet."""
    return LedgerServer(f"sqlite:///{tmp_path / 'ledger.db'}", free_port(), TOKEN)


def integrated(database: str, books: LedgerServer, **more: Any) -> Any:
    """Serve a gate whose receipts go to a ledger."""
    return serving(database, **{**HASTY, "ledger.url": f"http://127.0.0.1:{books.port}", **more})


async def told(server: GateServer) -> dict[str, Any]:
    """What the gate says of its ledger."""
    client = Client(server, "a0")
    answer = await client.insist("health")
    await client.aclose()
    assert answer.reply is not None
    return dict(answer.reply["receipt_ledger_lag"])


async def until_sent(server: GateServer) -> None:
    """Wait until the ledger has everything, for as long as it gets more."""
    least, deadline = 10**9, asyncio.get_running_loop().time() + PATIENCE_SECONDS
    while waiting := (await told(server))["waiting"]:
        if waiting < least:
            least, deadline = waiting, asyncio.get_running_loop().time() + PATIENCE_SECONDS
        assert asyncio.get_running_loop().time() < deadline, f"{waiting} receipts wait"
        await asyncio.sleep(0.05)


# The same program every time: each lane has one task after another, and no two lanes meet.


async def lane(server: GateServer, number: int, tasks: int, beside: GateServer | None = None) -> None:
    """Bring so many tasks to their ends, each kind of end in turn; the worker may come to another gate."""
    agent, worker = Client(server, f"a{number}"), Client(beside or server, f"w{number}")
    for n in range(tasks):
        made = await agent.insist("create_task", type=f"demo-{number}", payload={"n": n}, retry_backoff_seconds=0,
                                  idempotency_key=f"{number}-{n}")
        under = await leased(worker, number, f"{n}-1")
        if n % 5 == 0:
            await worker.insist("complete", **under, result={"n": n}, artifacts=ARTIFACTS)
        elif n % 5 == 1:
            await worker.insist("fail", **under, error="no luck")
        elif n % 5 == 2:
            await worker.insist("fail", **under, error="once more", retryable=True)
            await worker.insist("complete", **await leased(worker, number, f"{n}-2"), artifacts=ARTIFACTS)
        elif n % 5 == 3:
            await worker.insist("release_lease", **under)
            await agent.insist("cancel_task", task_id=made.reply["task_id"] if made.reply else "")
        else:
            await worker.insist("complete", **under, result={"n": n})
            await worker.insist("complete", **under, result={"n": n}, artifacts=ARTIFACTS)
    await agent.aclose()
    await worker.aclose()


async def leased(worker: Client, number: int, claim: str) -> dict[str, Any]:
    """Claim the one task of a lane."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            call = await worker.insist("lease_next", accept_types=[f"demo-{number}"], claim_id=claim)
            assert call.reply is not None, call
            for offer in call.reply["tasks"]:
                return {"task_id": offer["task_id"], "lease_id": offer["lease_id"]}


async def run(server: GateServer, tasks: int, beside: GateServer | None = None, lanes: range = range(LANES)) -> None:
    await asyncio.gather(*(lane(server, number, tasks // len(lanes), beside) for number in lanes))


def stories(receipts: list[dict[str, Any]]) -> Counter[str]:
    """What was said of each task, in order, without ids and times."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for receipt in receipts:
        tasks.setdefault(receipt["task_id"], []).append(receipt)
    return Counter(story(mine) for mine in tasks.values())


def story(receipts: list[dict[str, Any]]) -> str:
    places = {receipt["receipt_id"]: f"#{at}" for at, receipt in enumerate(receipts)}
    names = {**places, receipts[0]["task_id"]: "TASK", **{receipt["lease_id"]: "LEASE" for receipt in receipts
                                                          if receipt["lease_id"]}}
    told = [[receipt["receipt_type"], receipt["from"]["kind"], receipt["to"]["kind"], receipt["parents"],
             receipt["lease_id"], receipt["body"]]
            for receipt in receipts]
    return re.sub("|".join(map(re.escape, names)), lambda match: names[match[0]], json.dumps(told, sort_keys=True))


async def all_receipts(server: GateServer) -> list[dict[str, Any]]:
    """All receipts, as the gate shows them."""
    client, receipts, cursor = Client(server, "a0"), list[dict[str, Any]](), ""
    while True:
        status, page = await client.http("GET", "/v1/receipts", {"limit": 200, "cursor": cursor})
        assert status == 200, page
        receipts += page["receipts"]
        if not (cursor := page["next_cursor"]):
            await client.aclose()
            return receipts


async def alone(tasks: int, lanes: range = range(LANES)) -> list[dict[str, Any]]:
    """What a standalone gate writes for the same program."""
    async with serving("memory://") as server:
        await run(server, tasks, lanes=lanes)
        return await all_receipts(server)


class Killer:
    """Kills the ledger whenever it holds so many more receipts, and starts it again; in the end it runs."""

    def __init__(self, books: LedgerServer) -> None:
        self.books, self.kills, self.enough = books, 0, math.inf
        self.task = asyncio.create_task(self._keep_killing())

    async def _keep_killing(self) -> None:
        holds = had = 0
        await asyncio.to_thread(self.books.__enter__)
        while holds < self.enough or (self.enough and not self.kills):
            holds = len(await asyncio.to_thread(self.books.receipts, TENANT))
            if holds >= had + MORE[self.kills % len(MORE)]:
                await asyncio.to_thread(self.books.__exit__)
                had, self.kills = holds, self.kills + 1
                await asyncio.to_thread(self.books.__enter__)

    async def stop(self, enough: int) -> int:
        """Stop when the ledger holds so many, if it was killed at all; return how often that was."""
        self.enough = enough
        await self.task
        return self.kills


@pytest.fixture
async def killer(books: LedgerServer) -> AsyncIterator[Killer]:
    """What kills the ledger again and again for as long as it is wanted."""
    killer = Killer(books)
    yield killer
    await killer.stop(0)
    books.kill()


async def test_a_ledger_that_dies_again_and_again_has_in_the_end_what_a_standalone_gate_writes(
        database: str, books: LedgerServer, rounds: int, killer: Killer, record_property: Any) -> None:
    tasks = rounds * TASKS_PER_ROUND // LANES * LANES
    async with integrated(database, books) as server:
        await run(server, tasks)
        kills = await killer.stop(3 * tasks)
        await until_sent(server)
        there = books.receipts(TENANT)
        shown = await all_receipts(server)
        assert (await told(server))["parked"] == 0

    expected = await alone(tasks)
    record_property("ledger", f"{tasks} tasks, {len(there)} receipts, the ledger was killed {kills} times")
    print(f"{tasks} tasks, {len(there)} receipts, the ledger was killed {kills} times")
    assert len({receipt["receipt_id"] for receipt in there}) == len(there)
    assert stories(there) == stories(expected)
    assert stories(shown) == stories(expected)
    assert kills > 0


async def test_a_gate_that_is_killed_between_commit_and_sending_sends_when_it_lives_again(
        database: str, books: LedgerServer) -> None:
    tasks = 2 * LANES
    async with integrated(database, books) as server:     # nobody takes anything yet
        await run(server, tasks)
        assert (await told(server))["waiting"] > 4 * tasks - 1
        await server.stop(signal.SIGKILL)
        with books:
            await server.start()
            await until_sent(server)
            there = books.receipts(TENANT)

    assert stories(there) == stories(await alone(tasks))


async def test_a_gate_that_is_killed_while_it_sends_sends_nothing_twice_and_loses_nothing(
        database: str, books: LedgerServer, rounds: int) -> None:
    tasks = 5 * LANES
    with books:
        async with integrated(database, books) as server:
            running = asyncio.create_task(run(server, tasks))
            for _ in range(rounds):
                had = len(books.receipts(TENANT))
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while len(books.receipts(TENANT)) < had + 10 and not running.done():  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                await server.stop(signal.SIGKILL)
                await server.start()
            await running
            await until_sent(server)
            there = books.receipts(TENANT)

    assert stories(there) == stories(await alone(tasks))


@pytest.mark.databases(fits=is_shared)
async def test_of_gates_on_a_shared_database_one_sends_for_all_and_another_goes_on_when_it_dies(
        database: str, books: LedgerServer) -> None:
    tasks = 5 * LANES
    async with integrated(database, books) as first, integrated(database, books) as second:
        with books:
            await run(first, tasks, second)
            await until_sent(second)
            assert stories(books.receipts(TENANT)) == stories(await alone(tasks))
        await first.stop(signal.SIGTERM)
        await first.start()
        await run(first, tasks, second, range(LANES, 2 * LANES))
        await first.stop(signal.SIGKILL)        # with what both have left
        with books:
            await until_sent(second)
            there = books.receipts(TENANT)

    assert stories(there) == stories(await alone(2 * tasks, range(2 * LANES)))


async def test_a_ledger_that_is_away_costs_no_answer_and_is_told_of(
        database: str, books: LedgerServer) -> None:
    async with integrated(database, books) as server:
        await run(server, LANES)
        shown = await all_receipts(server)
        lag = await told(server)

        assert lag["waiting"] == len(shown) > 0
        assert all(receipt["body"] for receipt in shown)        # what waits is here


async def test_a_strict_gate_refuses_while_its_ledger_is_away_and_goes_on_when_it_is_back(
        database: str, books: LedgerServer) -> None:
    patient = {"ledger.timeout_ms": 60_000}     # a late answer is a refusal, too, and a busy machine answers late
    async with integrated(database, books, receipt_consistency_mode="strict", **patient) as server:
        agent = Client(server, "a0")
        refused = await agent.ask("create_task", type="demo", payload=None)
        assert refused.error == "receipt_ledger_unavailable"
        assert await all_receipts(server) == []
        with books:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (await agent.ask("create_task", type="probe", payload=None)).error:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await run(server, 2 * LANES)
            await until_sent(server)        # task.result_ready follows its committed end
            there = books.receipts(TENANT)
        await agent.aclose()

    assert stories([receipt for receipt in there if receipt["body"].get("type") != "probe"]) == stories(
        await alone(2 * LANES))
