"""What /metrics tells of the outbox, the ledger and the circuit breakers, with a real ledger that comes and goes."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from asyncgate.conformance.ledgers import LedgerServer
from asyncgate.conformance.postgres_server import free_port
from asyncgate.extras.ledger.comparing import SETTLED_SECONDS, Comparer
from asyncgate.parts.model.queries import OutboxFilter
from tests.conftest import Serve, Served
from tests.metrics.test_metrics import ON, Scrape, scrape, work_through
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
RECEIPTS = 4        # of a task that is created, leased and completed


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Store in a file, as most gates do."""
    return f"sqlite:///{tmp_path}/gate.db"


@pytest.fixture
def books(tmp_path: Path) -> LedgerServer:
    """A ledger that does not run yet, and whose port and file stay the same."""
    port = free_port()
    away = LedgerServer(f"sqlite:///{tmp_path}/ledger.db", port, secrets.token_hex(16))
    away.url = f"http://127.0.0.1:{port}"
    return away


def integrated(books: LedgerServer, **more: Any) -> dict[str, Any]:
    """Return the settings of a gate that counts, and sends its receipts to a ledger."""
    return {"metrics": ON, "receipt_mode": "memorygate_integrated", "ledger": books.settings(), **more}


async def look(served: Served) -> Scrape:
    """Return what is told after a look at the outbox."""
    meter: Any = served.gate.meter
    await meter.look_at_queues()
    return await scrape(served)


async def until(served: Served, name: str, value: float, **labels: str) -> Scrape:
    """Scrape until a number has been reached, and return that scrape."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (told := await look(served)).get(name, **labels) != value:  # noqa: ASYNC110  # a ledger is waited for
            await asyncio.sleep(0.02)
        return told


async def emptied(served: Served) -> None:
    """Wait until nothing waits for the ledger."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await served.backend.lag(served.tenant_id)).waiting:  # noqa: ASYNC110  # a ledger is waited for
            await asyncio.sleep(0.02)


def circuits(told: Scrape) -> dict[str, float]:
    """Return which circuit breakers are open."""
    return {name: told.values["asyncgate_ledger_circuit_open", frozenset({("circuit", name)})]
            for name in ("sending", "reading", "strict")}


async def test_what_the_ledger_has_stored_is_counted(serve: Serve, books: LedgerServer) -> None:
    with books:
        served = await serve(**integrated(books))
        await work_through(served, 3)
        await until(served, "ledger_answers_total", 3 * RECEIPTS, result="stored")
        told = await until(served, "ledger_outbox_receipts", 0, state="waiting")

    assert told.get("ledger_posted_total") == told.sum("receipts_total") == 3 * RECEIPTS
    assert told.get("ledger_answers_total", result="refused") == 0
    assert told.get("ledger_answers_total", result="unanswered") == 0
    assert told.get("ledger_outbox_receipts", state="parked") == 0
    assert told.get("ledger_oldest_seconds") == 0
    assert circuits(told) == {"sending": 0, "reading": 0, "strict": 0}


async def test_what_waits_while_the_ledger_is_away_is_told_until_it_is_back(serve: Serve, books: LedgerServer) -> None:
    served = await serve(**integrated(books))
    await work_through(served, 2)
    await until(served, "ledger_outbox_receipts", 2 * RECEIPTS, state="waiting")
    told = await until(served, "ledger_circuit_open", 1, circuit="sending")

    assert told.get("ledger_answers_total", result="unanswered") > 0
    assert told.get("ledger_answers_total", result="stored") == 0
    assert told.get("ledger_posted_total") == 2 * RECEIPTS
    served.backend.skew += 500
    assert (await look(served)).get("ledger_oldest_seconds") >= 500

    with books:
        await until(served, "ledger_outbox_receipts", 0, state="waiting")
        told = await until(served, "ledger_circuit_open", 0, circuit="sending")
    assert told.get("ledger_answers_total", result="stored") == told.get("ledger_posted_total") == 2 * RECEIPTS
    assert told.get("ledger_oldest_seconds") == 0


async def test_what_the_ledger_refuses_is_counted_and_parked(serve: Serve, books: LedgerServer) -> None:
    served = await serve(**integrated(books))
    await work_through(served, 1)
    [first, *_] = await served.backend.page(served.tenant_id, OutboxFilter("", RECEIPTS))
    with LedgerServer(books.database, token=books.token) as elsewhere:      # another receipt of this id is there before
        elsewhere.call("POST", "/v1/receipts", {**json.loads(first.content), "body": {"another": True}})

    with books:
        await until(served, "ledger_outbox_receipts", 1, state="parked")
        told = await until(served, "ledger_outbox_receipts", 0, state="waiting")

    assert told.get("ledger_answers_total", result="refused") == 1
    assert told.get("receipts_total", type="system.anomaly") == 1       # tells of it, and is sent itself
    assert told.get("ledger_posted_total") == RECEIPTS + 1
    assert told.get("ledger_answers_total", result="stored") == RECEIPTS


async def test_what_a_comparison_with_the_ledger_finds_is_counted(serve: Serve, books: LedgerServer) -> None:
    with books:
        served = await serve(**integrated(books))
        await work_through(served, 1)
        told = await until(served, "ledger_answers_total", RECEIPTS, result="stored")
        await emptied(served)
        assert told.get("ledger_differences_total", kind="lost_by_ledger") == 0
    path = Path(books.database.removeprefix("sqlite:///"))
    for file in path.parent.glob(f"{path.name}*"):      # the ledger is restored as it was before all of it
        file.unlink()

    with books:
        served.backend.skew += SETTLED_SECONDS + 1
        await Comparer(served.engine).compare()
        told = await until(served, "ledger_answers_total", 2 * RECEIPTS, result="stored")

    assert told.get("ledger_compared_receipts_total") == RECEIPTS
    assert told.get("ledger_differences_total", kind="lost_by_ledger") == RECEIPTS


async def test_a_strict_gate_tells_that_it_refuses_because_of_its_ledger(serve: Serve, books: LedgerServer) -> None:
    served = await serve(**integrated(books, receipt_consistency_mode="strict"))
    threshold = served.engine.settings.ledger.circuit_breaker.failure_threshold
    for _ in range(threshold):
        answer = await served.call("POST", "/v1/tasks", {"type": "demo", "payload": None, "agent_id": "ada"})
        assert answer.json()["error"] == "receipt_ledger_unavailable"

    told = await look(served)

    assert circuits(told) == {"sending": 0, "reading": 0, "strict": 1}
    assert told.get("refusals_total", operation="create_task", code="receipt_ledger_unavailable") == threshold
    assert told.get("ledger_posted_total") == told.sum("tasks_created_total") == 0


async def test_a_gate_without_a_ledger_tells_nothing_of_one(serve: Serve) -> None:
    served = await serve(metrics=ON)
    await work_through(served, 1)

    assert not [name for name, _ in (await look(served)).values if name.startswith("asyncgate_ledger_")]
