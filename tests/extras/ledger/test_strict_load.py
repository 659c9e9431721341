"""Strict mode under load, with and without kills: the ledger has no receipt of a change that did not happen.

Four workers claim, one agent creates, and every fifth task fails once and waits a second: what is claimable changes all
the time.  `--rounds 40` is the full proof.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asyncgate.backends import is_lasting, is_shared
from asyncgate.commands.main import main
from asyncgate.conformance.history import Call
from asyncgate.conformance.ledgers import LedgerServer
from asyncgate.conformance.load import TENANT, Client, GateServer, serving
from asyncgate.conformance.postgres_server import free_port
from tests.support.patience import PATIENCE_SECONDS
from tests.support.receiptgate_stand_in import KEY, StandIn, served

pytestmark = [pytest.mark.anyio, pytest.mark.databases(fits=is_lasting)]
TASKS, WORKERS, KILLS = 50, 4, 4
TOKEN = "a-token-of-the-ledger"


class MemoryLedger:
    """A ledger of the memorygate profile."""

    def __init__(self, tmp_path: Path) -> None:
        self.server = LedgerServer(f"sqlite:///{tmp_path / 'ledger.db'}", free_port(), TOKEN)
        self.server.start()
        self.settings = {"receipt_mode": "memorygate_integrated", "ledger.url": self.server.url,
                         "ledger.auth_token": TOKEN}

    def count_open(self) -> int:
        """Return how many tasks are owed there."""
        receipts = self.server.receipts(TENANT)
        ended = {parent for receipt in receipts
                 if receipt["receipt_type"] in ("task.completed", "task.failed", "task.canceled")
                 for parent in receipt["parents"]}
        return sum(receipt["receipt_type"] == "task.assigned" and receipt["receipt_id"] not in ended
                   for receipt in receipts)


class StandInLedger:
    """A ReceiptGate; of dialect 1.1 it keeps custody."""

    def __init__(self, dialect: str, url: str, ledger: StandIn) -> None:
        self.ledger = ledger
        ledger.begin(dialect, notary=dialect == "1.1")
        self.settings = {"receipt_mode": "receiptgate_integrated", "ledger.url": url, "ledger.auth_token": KEY,
                         "ledger.tenant_id": "default"}

    def count_open(self) -> int:
        """Return how many obligations are open there."""
        if self.ledger.notary:
            return sum(not custody.closed for custody in self.ledger.custody.values())
        accepted = {receipt["task_id"] for receipt in self.ledger.receipts.values() if receipt["phase"] == "accepted"}
        return len(accepted - {receipt["task_id"] for receipt in self.ledger.receipts.values()
                               if receipt["phase"] == "complete"})


@pytest.fixture(params=["memorygate", "1.0", "1.1"])
def books(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A ledger of each profile and dialect."""
    if request.param == "memorygate":
        books = MemoryLedger(tmp_path)
        yield books
        books.server.kill()
    else:
        ledger = StandIn()
        with served(ledger) as url:
            yield StandInLedger(request.param, url, ledger)


async def until_answered(client: Client, operation: str, **ask: Any) -> Call:
    """Repeat a call, as it is, until somebody answers it."""
    while True:
        if (call := await client.insist(operation, **ask)).error != "receipt_ledger_unavailable":
            return call
        await asyncio.sleep(0.01)


class Round:
    """One load: its tasks, those that have failed once, and those that have ended, which some do before who created
    them is told."""

    def __init__(self, server: GateServer, number: int) -> None:
        self.server, self.number = server, number
        self.tasks, self.failed, self.ended = set[str](), set[str](), set[str]()

    @property
    def over(self) -> bool:
        """Whether all tasks have ended."""
        return len(self.tasks) == TASKS and self.tasks <= self.ended

    async def create(self) -> None:
        """Create all tasks."""
        client = Client(self.server, "a0")
        for n in range(TASKS):
            made = await until_answered(client, "create_task", type="demo", payload={"n": n}, retry_backoff_seconds=1,
                                        max_attempts=9, idempotency_key=f"{self.number}-{n}")
            assert made.reply is not None, made
            self.tasks.add(made.reply["task_id"])
        await client.aclose()

    async def work(self, name: str, beside: GateServer | None = None) -> None:
        """Claim and end tasks until none is left; every fifth one fails the first time."""
        client, number = Client(beside or self.server, name), 0
        while not self.over:
            number += 1
            claim = await until_answered(client, "lease_next", claim_id=f"{name}-{self.number}-{number}", max_tasks=2)
            for offer in claim.reply["tasks"] if claim.reply else ():
                under = {"task_id": offer["task_id"], "lease_id": offer["lease_id"]}
                if offer["payload"]["n"] % 5 == 0 and offer["task_id"] not in self.failed:
                    self.failed.add(offer["task_id"])
                    await until_answered(client, "fail", **under, error="once more", retryable=True)
                elif (await until_answered(client, "complete", **under, result={"ok": True},
                                           artifacts=[{"uri": "s3://b/r", "type": "s3"}])).reply:
                    self.ended.add(offer["task_id"])
        await client.aclose()

    async def kill(self) -> None:
        """Kill the gate again and again while there is work."""
        for n in range(KILLS):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(self.ended) < TASKS * (n + 1) // (KILLS + 1):  # noqa: ASYNC110
                    await asyncio.sleep(0.003)
            await self.server.stop(signal.SIGKILL)
            await self.server.start()


@contextlib.asynccontextmanager
async def strict(database: str, books: Any, name: str = "asyncgate-1") -> AsyncIterator[GateServer]:
    settings = {**books.settings, "receipt_consistency_mode": "strict", "instance_id": name,
                "lease_sweep_interval_seconds": 0.5, "ledger.timeout_ms": 20_000,
                "ledger.circuit_breaker.timeout_seconds": 0.1, "ledger.emission_retry.retry_interval_seconds": 0.2}
    async with serving(database, **settings) as server:
        yield server


async def settled(server: GateServer) -> None:
    """Wait until nothing is on the way to the ledger."""
    client = Client(server, "a0")
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            health = await client.insist("health")
            lag = health.reply["receipt_ledger_lag"] if health.reply else {}
            if lag.get("waiting") == lag.get("unsettled") == 0:
                break
            await asyncio.sleep(0.1)
    await client.aclose()


def command(name: str, database: str, books: Any, *more: str) -> Any:
    sets = [part for key, value in {**books.settings, "instance_id": "asyncgate-1"}.items()
            for part in ("--set", f"{key}={value}")]
    return CliRunner().invoke(main, [name, "--database", database, *sets, *more], prog_name="asyncgate")


@pytest.mark.parametrize("killed", [False, True], ids=["alone", "killed"])
async def test_the_ledger_has_no_orphans_after_a_load_in_strict_mode(
        database: str, books: Any, rounds: int, killed: bool, tmp_path: Path) -> None:
    async with strict(database, books) as server:
        for number in range(rounds):
            load = Round(server, number)
            await asyncio.gather(load.create(), *(load.work(f"w{n}") for n in range(WORKERS)),
                                 *([load.kill()] if killed else []))
        await settled(server)
        await server.stop(signal.SIGTERM)

    assert books.count_open() == 0
    compared = await asyncio.to_thread(command, "reconcile", database, books)
    assert compared.exit_code == 0, compared.output
    if isinstance(books, MemoryLedger):
        target = f"sqlite:///{tmp_path / 'rebuilt.db'}"
        rebuilt = await asyncio.to_thread(command, "rebuild", target, books)
        assert rebuilt.exit_code == 0, rebuilt.output
        assert f"{rounds * TASKS:,} tasks" in rebuilt.output, rebuilt.output


@pytest.mark.databases(fits=is_shared)
async def test_two_gates_on_a_shared_database_leave_no_orphans_either(
        database: str, books: Any, rounds: int) -> None:
    async with strict(database, books) as server, strict(database, books, "asyncgate-2") as other:
        for number in range(rounds):
            load = Round(server, number)
            await asyncio.gather(load.create(), *(
                load.work(f"w{n}", other if n % 2 else server) for n in range(WORKERS)))
        await settled(server)

    assert books.count_open() == 0
    compared = await asyncio.to_thread(command, "reconcile", database, books)
    assert compared.exit_code == 0, compared.output
