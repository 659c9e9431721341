"""Upkeep compares the gate with its ledger from time to time, and sends again what the ledger has lost (20.6)."""

from __future__ import annotations

import json
import logging
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate import Needs, Work
from asyncgate.conformance.harness import Gate, under
from asyncgate.conformance.ledgers import LedgerServer
from asyncgate.conformance.postgres_server import free_port
from asyncgate.extras.ledger import comparing
from asyncgate.extras.ledger.comparing import SETTLED_SECONDS, Comparer
from asyncgate.extras.ledger.extra import list_duties
from asyncgate.extras.ledger.outbox import Ledger
from asyncgate.parts.model.caller import NOBODY
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.settings import LedgerSettings, Settings
from asyncgate.parts.model.stored import Audit, LedgerMark, Outgoing, Receipt
from asyncgate.parts.model.wire import Health, LedgerComparison
from tests.support.ledger_tools import emptied

pytestmark = pytest.mark.anyio
ARTIFACTS = [{"uri": "s3://bucket/result"}]


class Books:
    """A ledger in a file, from which a test takes receipts past all rules."""

    def __init__(self, server: LedgerServer, path: Path) -> None:
        self.server, self.path = server, path

    def receipts(self, gate: Gate) -> list[dict[str, Any]]:
        return self.server.receipts(gate.tenant_id)

    def _change(self, statement: str, receipt_id: str) -> None:
        with sqlite3.connect(self.path) as file:
            file.execute("DROP TRIGGER IF EXISTS ledger_keep")
            file.execute("DROP TRIGGER IF EXISTS ledger_stay")
            # The wall stands where the ledger's last transaction has put it, which may have been another tenant's.
            whose = "SELECT tenant_id FROM ledger WHERE receipt_id = ?"
            file.execute(f"UPDATE wall SET tenant_id = ({whose})", (receipt_id,))
            assert file.execute(statement, (receipt_id,)).rowcount == 1
        file.close()

    def lose(self, gate: Gate, *types: str, task_id: str = "") -> list[dict[str, Any]]:
        """Lose all receipts of these types, of one task or all; return them."""
        gone = [receipt for receipt in self.receipts(gate) if receipt["receipt_type"] in types
                and task_id in ("", receipt["task_id"])]
        for receipt in gone:
            self._change("DELETE FROM ledger WHERE receipt_id = ?", receipt["receipt_id"])
        return gone

    def forge(self, gate: Gate, receipt_type: str) -> str:
        """Change what a receipt says; return its id."""
        [receipt] = [receipt for receipt in self.receipts(gate) if receipt["receipt_type"] == receipt_type]
        self._change("UPDATE ledger SET content = replace(content, '\"ok\":true', '\"ok\":null') WHERE receipt_id = ?",
                     receipt["receipt_id"])
        return str(receipt["receipt_id"])


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    path = tmp_path / "ledger.db"
    with LedgerServer(f"sqlite:///{path}", free_port(), secrets.token_hex(16)) as server:
        yield Books(server, path)


@pytest.fixture
async def gate(make_gate: Callable[..., Gate], books: Books, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    """A gate whose receipts go to these books, and whose pages are small."""
    monkeypatch.setattr(comparing, "RECEIPTS_PER_LOOK", 3)
    monkeypatch.setattr(comparing, "PAUSE_SECONDS", 0.0)
    made = make_gate(receipt_mode="memorygate_integrated", ledger=books.server.settings())
    made.engine.extend(Ledger(made.engine))
    async with made.ledger:
        yield made


async def compare(gate: Gate) -> LedgerComparison:
    """Compare once, when all receipts have settled; return what health then tells."""
    await emptied(gate)
    gate.skip(SETTLED_SECONDS + 1.0)
    await Comparer(gate.engine).compare()
    await emptied(gate)
    ledger_comparison = (await gate.engine.health(NOBODY, Health())).ledger_comparison
    assert isinstance(ledger_comparison, LedgerComparison)
    return ledger_comparison


async def audited(gate: Gate) -> list[tuple[str, dict[str, Any]]]:
    lines: list[Audit] = await gate.backend.page(gate.tenant_id, Rows(Audit))
    return [(line.severity, json.loads(line.body)) for line in lines if line.event == "ledger_differs"]


async def test_a_gate_and_its_ledger_agree(gate: Gate) -> None:
    await gate.finished()
    canceled = await gate.create()
    await gate.as_agent().cancel_task(task_id=canceled)
    lost = await gate.leased()
    await gate.lose(lost)

    comparison = await compare(gate)

    assert (comparison.differences, comparison.sent_again) == ({}, 0)
    assert comparison.receipts >= 4 + 3 + 3
    assert await audited(gate) == []


async def test_what_the_ledger_lost_is_found_and_sent_again_and_then_nothing_differs(
        gate: Gate, books: Books, caplog: pytest.LogCaptureFixture) -> None:
    await gate.finished()
    await emptied(gate)
    before = books.receipts(gate)
    lost = books.lose(gate, "task.completed", "task.result_ready")

    comparison = await compare(gate)

    assert (comparison.differences, comparison.sent_again) == ({"lost_by_ledger": 2}, 2)
    assert sorted(map(json.dumps, books.receipts(gate))) == sorted(map(json.dumps, before))
    assert caplog.text.count("gate and ledger differ: lost_by_ledger") == 2
    [(severity, line)] = await audited(gate)
    assert (severity, line["differences"], line["sent_again"]) == ("warning", {"lost_by_ledger": 2}, 2)
    assert line["named"] == [f"lost_by_ledger {receipt['receipt_id']}" for receipt in lost]

    again = await compare(gate)

    assert (again.differences, again.sent_again, len(await audited(gate))) == ({}, 0, 1)


async def test_every_receipt_that_its_task_still_tells_is_restored(gate: Gate, books: Books) -> None:
    """Also when the ledger has lost all of them, as after a backup of long ago was restored."""
    worker = gate.as_worker()
    offer = await gate.leased(payload={"n": 1}, task_summary="count", success_criteria="a number")
    await worker.complete(**under(offer), result={"n": 2, "summary": "two"}, artifacts=ARTIFACTS)
    large = await gate.leased()
    await worker.complete(**under(large), result={"x": "y" * 20_000}, delivery_proof={"status": "succeeded"})
    bare = await gate.leased()
    await worker.complete(**under(bare), result={"n": 3})
    failed = await gate.leased(max_attempts=1)
    await worker.fail(**under(failed), error={"code": "no"}, retryable=False)
    canceled = await gate.create()
    await gate.as_agent().cancel_task(task_id=canceled)
    await gate.lose(await gate.leased())
    duty = (await gate.task(canceled)).obligation_receipt_id
    await gate.as_agent().ack_receipt(receipt_id=duty)
    await emptied(gate)
    before = {receipt["receipt_id"]: receipt for receipt in books.receipts(gate)}
    types = {receipt["receipt_type"] for receipt in before.values()}
    books.lose(gate, *types)

    comparison = await compare(gate)

    assert comparison.differences == {"lost_by_ledger": len(before)}
    after = {receipt["receipt_id"]: receipt for receipt in books.receipts(gate)}
    assert all(before[id] == receipt for id, receipt in after.items())
    # A delivery proof was said in the lost receipts alone; so is what an anomaly tells.
    gone = sorted(before[id]["receipt_type"] for id in before.keys() - after.keys())
    assert gone == ["system.anomaly", "task.completed", "task.result_ready"]
    assert (await compare(gate)).differences == {"lost_by_ledger": 3}


async def test_what_others_were_told_restores_what_the_task_does_not_tell(gate: Gate, books: Books) -> None:
    offer = await gate.leased()
    await gate.as_worker().complete(**under(offer), result={"n": 2}, result_summary="two", artifacts=ARTIFACTS)
    await emptied(gate)
    before = books.receipts(gate)
    books.lose(gate, "task.completed")

    assert (await compare(gate)).sent_again == 1

    assert sorted(map(json.dumps, books.receipts(gate))) == sorted(map(json.dumps, before))


async def test_a_changed_receipt_is_told_as_critical_and_stays_as_it_is(gate: Gate, books: Books) -> None:
    await gate.finished()
    await emptied(gate)
    forged = books.forge(gate, "task.completed")
    before = books.receipts(gate)

    comparison = await compare(gate)

    assert (comparison.differences, comparison.sent_again) == ({"tampered": 1}, 0)
    assert books.receipts(gate) == before
    [(severity, line)] = await audited(gate)
    assert (severity, line["named"]) == ("critical", [f"tampered {forged}"])


async def test_a_receipt_that_is_here_whole_and_was_never_sent_is_sent(gate: Gate, books: Books) -> None:
    """As after a change from standalone to integrated mode."""
    before = gate.beside(instance_id="asyncgate-1")
    await before.finished()

    assert (await compare(gate)).differences == {"missing_at_ledger": 4}

    assert len(books.receipts(gate)) == 4
    assert (await compare(gate)).differences == {}


async def test_the_ledgers_list_is_read_in_step_whatever_its_order(
        gate: Gate, books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others filed between, what came late and what is remembered no more is still found, by its id."""
    monkeypatch.setattr(comparing, "RECEIPTS_PER_COPY", 2)
    monkeypatch.setattr(comparing, "MOST_AHEAD", 4)
    for _ in range(4):
        await gate.finished()
    await emptied(gate)
    [first, *_] = books.receipts(gate)
    books.lose(gate, "task.assigned", task_id=first["task_id"])
    for at in range(5):
        books.server.call("POST", "/v1/receipts", {**first, "receipt_id": f"of-others-{at}"})
    books.server.call("POST", "/v1/receipts", first)

    comparison = await compare(gate)

    assert (comparison.differences, comparison.receipts) == ({}, 16)


async def test_an_end_without_a_receipt_is_told(gate: Gate) -> None:
    task_id = await gate.create()
    await emptied(gate)

    def end(work: Work) -> None:
        work.change_task(work.require_task(task_id), status="succeeded")
    await gate.backend.transact(gate.tenant_id, Needs(tasks={task_id}), end)

    assert (await compare(gate)).differences == {"end_unproven": 1}
    [(_, line)] = await audited(gate)
    assert line["named"] == [f"end_unproven {task_id}"]


async def test_what_waits_or_is_parked_or_is_young_is_no_difference(gate: Gate, books: Books) -> None:
    gate.ledger.sender.closed = True
    await gate.create()
    await gate.create()
    [first, _] = await gate.backend.page(gate.tenant_id, Rows(Outgoing))
    parked = replace(first, state="parked", reason="no")
    await gate.backend.transact(gate.tenant_id, Needs(), lambda work: work.keep_record(parked))
    gate.skip(SETTLED_SECONDS + 1.0)
    await Comparer(gate.engine).compare()
    assert gate.ledger.last_comparison
    assert (gate.ledger.last_comparison.receipts, gate.ledger.last_comparison.differences) == (2, {})

    gate.ledger.sender.closed = False
    await gate.claim()
    gate.ledger.sender.call(gate.tenant_id)
    await emptied(gate)
    assert books.lose(gate, "task.accepted")
    await Comparer(gate.engine).compare()
    assert gate.ledger.last_comparison.differences == {}


async def test_an_end_that_a_worker_stated_itself_is_found_under_its_own_id(gate: Gate, books: Books) -> None:
    """Lost, it is only told: it is the worker's word, and not the gate's to say again."""
    await gate.finished()
    await emptied(gate)
    [end] = [receipt for receipt in await gate.backend.page(gate.tenant_id, Rows(Receipt))
             if receipt.receipt_type == "task.completed"]
    theirs = next(receipt for receipt in books.receipts(gate) if receipt["receipt_id"] == end.receipt_id)
    books.lose(gate, "task.completed")
    own = {**theirs, "receipt_id": "of-the-worker", "receipt_key": ""}
    books.server.call("POST", "/v1/receipts", own)
    mark = LedgerMark(f"stated {end.receipt_id}", "of-the-worker")
    await gate.backend.transact(gate.tenant_id, Needs(), lambda work: work.keep_record(mark))
    assert (await compare(gate)).differences == {}

    books.lose(gate, "task.completed")

    comparison = await compare(gate)
    assert (comparison.differences, comparison.sent_again) == ({"lost_by_ledger": 1}, 0)


async def test_what_was_erased_here_is_no_difference_and_is_not_sent_again(gate: Gate, books: Books) -> None:
    """Nor if the ledger has erased it, too: there it then has another id."""
    offer = await gate.finished()
    await emptied(gate)

    await gate.as_admin().erase_principal(principal_kind="agent", principal_id="ada", confirm="ada")
    gate.ledger.sender.call(gate.tenant_id)
    assert (await compare(gate)).differences == {}

    books.lose(gate, "task.assigned", "task.result_ready", task_id=offer.task_id)

    assert (await compare(gate)).differences == {}
    assert [receipt["receipt_type"] for receipt in books.receipts(gate) if receipt["task_id"] == offer.task_id] == [
        "task.accepted", "task.completed"]


async def test_a_ledger_that_is_away_is_compared_again_soon(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    await gate.finished()
    await emptied(gate)
    away = gate.beside(receipt_mode="memorygate_integrated", ledger=LedgerSettings(url="http://127.0.0.1:1"))
    away.engine.extend(ledger := Ledger(away.engine))
    gate.skip(SETTLED_SECONDS + 1.0)
    comparer = Comparer(away.engine)
    comparer.begun = True

    assert await comparer.run() == 0

    assert "the gate was not compared with its ledger to the end" in caplog.text
    assert comparer.alarm.moved.is_set()
    assert ledger.last_comparison is None
    await ledger.sink.close()


async def test_the_first_run_only_waits_so_that_a_gate_starts_quickly(gate: Gate) -> None:
    comparer = Comparer(gate.engine)

    assert await comparer.run() == 0
    assert gate.ledger.last_comparison is None
    assert comparer.alarm.moved.is_set()

    await comparer.run()
    assert gate.ledger.last_comparison is not None


async def test_one_of_several_gates_compares(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    comparer = Comparer(gate.engine)
    comparer.begun = True

    async def follows(job: str) -> bool:
        return False
    monkeypatch.setattr(gate.engine, "leads", follows)

    await comparer.run()

    assert gate.ledger.last_comparison is None


async def test_the_log_names_some_differences_and_counts_the_others(
        gate: Gate, books: Books, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "NAMED_PER_TENANT", 2)
    caplog.set_level(logging.INFO, "asyncgate")
    await gate.finished()
    await emptied(gate)
    books.lose(gate, "task.assigned", "task.accepted", "task.completed", "task.result_ready")

    await compare(gate)

    assert caplog.text.count("gate and ledger differ") == 2
    [(_, line)] = await audited(gate)
    assert (line["differences"], len(line["named"])) == ({"lost_by_ledger": 4}, 2)


@pytest.mark.parametrize(("settings", "compares"), [
    ({}, False),
    ({"receipt_mode": "memorygate_integrated"}, True),
    ({"receipt_mode": "receiptgate_integrated"}, True),
    ({"receipt_mode": "memorygate_integrated", "ledger": LedgerSettings(profile="mine")}, False),
    ({"receipt_mode": "memorygate_integrated", "ledger": LedgerSettings(compare_interval_seconds=0)}, False)])
async def test_only_a_gate_with_a_ledger_that_can_be_asked_compares(
        make_gate: Callable[..., Gate], settings: dict[str, Any], compares: bool) -> None:
    engine = make_gate().engine
    engine.settings = Settings(**settings)

    assert ("comparison" in list_duties(engine)) is compares
