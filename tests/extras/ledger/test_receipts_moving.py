"""`asyncgate receipts push` and `home`: a gate goes to a ledger and comes back with all that was said (20.9)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from asyncgate import Engine, Needs, Work
from asyncgate.backends import open_backend
from asyncgate.clients.http import Http
from asyncgate.commands import carry
from asyncgate.commands.cli import database_exists
from asyncgate.commands.main import main
from asyncgate.conformance.harness import Gate, under
from asyncgate.conformance.ledgers import LedgerServer
from asyncgate.conformance.verify import verify
from asyncgate.conformance.verify_ledger import verify_ledger
from asyncgate.extras.ledger.adoption import Adopter
from asyncgate.extras.ledger.outbox import Ledger
from asyncgate.extras.ledger.reading import Reading
from asyncgate.parts.model.erased import read_note
from asyncgate.parts.model.ids import Ids
from asyncgate.parts.model.queries import Rows
from asyncgate.parts.model.settings import ArchiveSettings, Settings
from asyncgate.parts.model.stored import Archived, Obligation, Outgoing, Receipt, SealHead, Task, export_key
from asyncgate.parts.model.wire import ReceiptRecord
from asyncgate.parts.receipts import archive
from asyncgate.parts.receipts.sealing import seal
from tests.support.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
ARTIFACTS = [{"uri": "s3://bucket/result"}]
LONG: dict[str, Any] = {"timeouts": {"lease_ttl_seconds": 3600}}
WAYS = [("sqlite", "sqlite"), ("sqlite", "postgres"), ("postgres", "sqlite")]
Kinds = Callable[[str], Awaitable[str]]


class Moving:
    """One gate on its way from database to database, and the ledger beside it."""

    def __init__(self, ledger: LedgerServer, tenant_id: str) -> None:
        self.ledger, self.tenant_id = ledger, tenant_id

    @asynccontextmanager
    async def standalone(self, url: str, **settings: Any) -> AsyncIterator[Gate]:
        """Serve a database by itself."""
        backend = await open_backend(url, serving=True)
        engine = Engine(backend, Settings(**{"instance_id": "asyncgate-1", **settings}))
        try:
            yield Gate(engine, self.tenant_id)
        finally:
            engine.drain()
            await engine.batches.wait_for_all()
            await backend.close()

    @asynccontextmanager
    async def integrated(self, url: str, **settings: Any) -> AsyncIterator[Gate]:
        """Serve a database with the ledger; at the end it has everything."""
        settings |= {"receipt_mode": "memorygate_integrated", "ledger": self.ledger.settings()}
        async with self.standalone(url, **settings) as gate:
            gate.engine.extend(ledger := Ledger(gate.engine))
            ledger.open()
            try:
                yield gate
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while (await gate.backend.lag(gate.tenant_id)).waiting:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            finally:
                await ledger.close()

    async def run(self, *words: str, mode: str = "memorygate_integrated", **sets: Any) -> Result:
        """Run a command with the settings of the gate."""
        given = {"receipt_mode": mode, "ledger.url": self.ledger.url, "ledger.auth_token": self.ledger.token,
                 "instance_id": "asyncgate-1", **{name.replace("__", "."): value for name, value in sets.items()}}
        arguments = [*words, *(word for name, value in given.items() for word in ("--set", f"{name}={value}"))]
        return await asyncio.to_thread(CliRunner().invoke, main, arguments, prog_name="asyncgate")

    async def push(self, *words: str, **sets: Any) -> Result:
        """Push while the settings still say standalone."""
        return await self.run("receipts", "push", *words, mode="standalone", **sets)

    async def home(self, source: str, target: str, *words: str) -> Result:
        """Bring receipts home."""
        return await self.run("receipts", "home", target, "--database", source, *words)

    def there(self) -> dict[str, Any]:
        """What the ledger has."""
        return {receipt["receipt_id"]: receipt for receipt in self.ledger.receipts(self.tenant_id)}


@pytest.fixture
def moving(ledger: LedgerServer) -> Moving:
    return Moving(ledger, str(uuid.uuid4()))


def good(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result


async def rows(gate: Gate, table: Any) -> list[Any]:
    records: list[Any] = []
    while page := await gate.backend.page(gate.tenant_id, Rows(table, export_key(records[-1]) if records else "")):
        records += page
    return records


async def everything(gate: Gate) -> dict[str, ReceiptRecord]:
    """All receipts of the gate as an agent is shown them, but for when they were handed over."""
    own = {row.receipt_id for row in await rows(gate, Receipt)}
    return {receipt.receipt_id: replace(receipt, delivered_at=None) for receipt in await gate.receipts()
            if receipt.receipt_id in own}


def said(receipt: ReceiptRecord) -> ReceiptRecord:
    """What a receipt says; one that a worker stated has at home the hash that a gate gives it."""
    return replace(receipt, hash="")


async def busy(gate: Gate) -> dict[str, str]:
    """Bring tasks into every state; return them by what became of them."""
    worker, agent = gate.as_worker(), gate.as_agent()
    made = {"done": (await gate.finished()).task_id}
    made["failed"] = (offer := await gate.leased(max_attempts=1)).task_id
    await worker.fail(**under(offer), error={"why": "ünï"}, retryable=True)
    made["unlocated"] = (offer := await gate.leased()).task_id
    await worker.complete(**under(offer), result={"n": 1.5})
    made["canceled"] = (await gate.leased()).task_id
    await agent.cancel_task(task_id=made["canceled"], reason="no more")
    made["retried"] = (offer := await gate.leased(retry_backoff_seconds=600, max_attempts=5)).task_id
    await worker.fail(**under(offer), error="once more", retryable=True)
    made["scheduled"] = (offer := await gate.leased("cron", type="schedule.create")).task_id
    await gate.as_worker("cron").emit_receipt(**under(offer), receipt_type="schedule.created", schedule_id="nightly")
    await gate.as_worker("cron").complete(**under(offer), artifacts=[{"schedule_id": "nightly"}])
    for name in ("running", "leased", "stated"):
        made[name] = (offer := await gate.leased(type=name, **LONG)).task_id
        if name == "running":
            await worker.report_progress(**under(offer), progress={"at": 7})
    made["queued"] = await gate.create(payload={"secret": 1}, priority=9, by="bob", type="later",
                                       requirements={"capabilities": ["gpu"]})
    await agent.ack_receipt(receipt_id=(await gate.receipt(made["done"], "task.result_ready")).receipt_id)
    return made


async def lease(gate: Gate, task_id: str) -> dict[str, str]:
    """Under what a worker goes on."""
    snapshot = await gate.backend.task(gate.tenant_id, task_id)
    assert snapshot is not None
    assert snapshot[1] is not None
    return {"task_id": task_id, "lease_id": snapshot[1].lease_id}


async def more(gate: Gate, moving: Moving, made: dict[str, str]) -> None:
    """What happens while receipts go to the ledger: to old tasks, to new ones, and by a worker's own statement."""
    await gate.as_worker().complete(**await lease(gate, made["running"]), artifacts=ARTIFACTS)
    await gate.as_agent().attach_artifacts(task_id=made["unlocated"], artifacts=ARTIFACTS)
    made["later done"] = (await gate.finished("w7", type="new")).task_id
    made["later leased"] = (await gate.leased("w8", type="newer", **LONG)).task_id
    held = await lease(gate, made["stated"])
    moving.ledger.call("POST", "/v1/receipts", {
        "receipt_id": str(uuid.uuid4()), "tenant_id": gate.tenant_id, "receipt_type": "task.completed",
        "created_at": "2026-11-22T07:00:00Z", "from": {"kind": "worker", "id": "w1"}, "hash": "a hash of its own",
        "to": {"kind": "agent", "id": "ada"}, "parents": [(await gate.task(made["stated"])).obligation_receipt_id],
        "body": {"result_payload": {"n": 2}, "artifacts": ARTIFACTS}, **held},
        token=moving.ledger.key_of(gate.tenant_id))
    moving.ledger.call("POST", "/v1/receipts", {
        "receipt_id": Ids().new(gate.now()), "tenant_id": gate.tenant_id, "receipt_type": "plan.made",
        "created_at": "2026-11-22T07:00:00Z", "from": {"kind": "agent", "id": "eve"}, "parents": [],
        "to": {"kind": "agent", "id": "dan"}, "body": {}})
    bound = gate.ledger
    await Adopter(gate.engine, Reading(gate.engine, bound.sink, bound.sender.breaker)).poll()
    assert (await gate.task(made["stated"])).status == "succeeded"


async def sound(gate: Gate) -> None:
    """State, receipts, obligations and seals agree."""
    assert (await verify(gate.backend)).problems == []
    assert (await verify_ledger(gate.backend)).problems == []


# Both ways.


@pytest.mark.parametrize("kinds", WAYS, ids=" to ".join)
async def test_there_and_back_every_chain_is_whole(moving: Moving, fresh: Kinds, kinds: tuple[str, str]) -> None:
    source, target = await fresh(kinds[0]), await fresh(kinds[1])
    async with moving.standalone(source) as gate:
        made = await busy(gate)
        sealed = await seal(gate.engine, gate.tenant_id)
        before, owed = await everything(gate), await rows(gate, Obligation)

    pushed = good(await moving.push("--database", source))
    assert f"the ledger has {len(before)} of the receipts and refuses 0\n" in pushed.output
    assert moving.there().keys() == before.keys()
    good(await moving.run("reconcile", "--database", source, "--tenant", moving.tenant_id))

    async with moving.integrated(source) as gate:
        assert await everything(gate) == before
        assert await rows(gate, Obligation) == owed
        await more(gate, moving, made)
        between, owed = await everything(gate), await rows(gate, Obligation)
        tasks = await rows(gate, Task)
        assert await seal(gate.engine, gate.tenant_id) == sealed
        assert [row.body for row in await rows(gate, Receipt)].count("") == len(between) - len(before)
        await sound(gate)

    brought = good(await moving.home(source, target))
    filled = f"{len(between) - len(before)} receipts from the ledger or the outbox"
    assert f"{filled}, {len(before)} already whole in the gate\n" in brought.output
    assert "1 receipt of other authors left in the ledger" in brought.output

    async with moving.standalone(target) as gate:
        back = await everything(gate)
        assert [id for id, receipt in between.items() if receipt.hash == "a hash of its own"] == [
            id for id, receipt in back.items() if receipt != between[id]]
        assert {id: said(receipt) for id, receipt in back.items()} == {id: said(receipt)
                                                                       for id, receipt in between.items()}
        assert await rows(gate, Obligation) == owed
        assert [(row.task_id, row.status, row.payload, row.outcome) for row in await rows(gate, Task)] == [
            (task.task_id, task.status, task.payload, task.outcome) for task in tasks]
        await sound(gate)
        assert (await seal(gate.engine, gate.tenant_id)).last_id == max(between)
        await gate.as_worker("w8").complete(**await lease(gate, made["later leased"]), artifacts=ARTIFACTS)
        await seal(gate.engine, gate.tenant_id)
        await sound(gate)
        after = await everything(gate)

    again = good(await moving.push("--database", target))       # also what a worker had stated in other words
    assert f"the ledger has {len(after)} of the receipts and refuses 0\n" in again.output
    assert after.keys() < moving.there().keys()
    good(await moving.run("reconcile", "--database", target, "--tenant", moving.tenant_id))


async def test_the_archive_goes_to_the_ledger_too(moving: Moving, fresh: Kinds, tmp_path: Path) -> None:
    source, away = await fresh("sqlite"), tmp_path / "away"
    async with moving.standalone(source, archive=ArchiveSettings(enabled=True, directory=str(away))) as gate:
        await gate.finished()
        await gate.create()
        before = await everything(gate)
        await seal(gate.engine, gate.tenant_id)
        gate.skip(60 * 86_400)
        assert (await archive.archive_receipts(gate.engine, gate.tenant_id, 5000)).receipts == 4
        assert len(await rows(gate, Archived)) == 4

    good(await moving.push("--database", source, archive__directory=away))

    assert moving.there().keys() == before.keys()
    async with moving.integrated(source, instance_id="another") as gate:
        assert len(await gate.receipts()) == 1      # what is in the archive is shown nowhere else, nor as somebody's


# What goes wrong on the way there.


async def test_a_push_after_an_outage_goes_on(moving: Moving, fresh: Kinds) -> None:
    source = await fresh("sqlite")
    async with moving.standalone(source) as gate:
        await busy(gate)
        before = sorted(await everything(gate))
    hasty = {"ledger__emission_retry__max_retries": 1, "ledger__timeout_ms": 2000}
    away = await moving.push("--database", source, **hasty, ledger__url="http://127.0.0.1:9")
    assert away.exit_code == 7
    assert "does not answer" in away.output
    assert moving.there() == {}

    rest = good(await moving.push("--database", source, "--after", f"{moving.tenant_id}:{before[4]}"))
    assert f"the ledger has {len(before) - 5} of" in rest.output
    assert sorted(moving.there()) == before[5:]
    good(await moving.push("--database", source))
    assert sorted(moving.there()) == before


async def test_what_the_ledger_refuses_is_listed_and_the_others_go(moving: Moving, fresh: Kinds) -> None:
    source = await fresh("sqlite")
    async with moving.standalone(source) as gate:
        await gate.finished()
        before = sorted(await everything(gate))
    moving.ledger.call("POST", "/v1/receipts", {
        "receipt_id": before[1], "tenant_id": moving.tenant_id, "receipt_type": "task.accepted", "parents": [],
        "created_at": "2026-11-22T07:00:00Z", "from": {"kind": "worker", "id": "w1"},
        "to": {"kind": "agent", "id": "ada"}, "body": {"not": "what the gate wrote"}})

    result = await moving.push("--database", source)

    assert result.exit_code == 5
    assert f"{before[1]}: receipt_id_collision" in result.output
    assert f"the ledger has {len(before) - 1} of the receipts and refuses 1\n" in result.output
    assert sorted(moving.there()) == before


async def test_what_the_ledger_had_refused_and_a_push_sent_is_offered_by_the_next_repair(
        moving: Moving, fresh: Kinds) -> None:
    source = await fresh("sqlite")
    async with moving.integrated(source) as gate:
        await gate.create()
    async with moving.standalone(source, receipt_mode="memorygate_integrated",
                                 ledger=moving.ledger.settings()) as gate:
        gate.engine.extend(ledger := Ledger(gate.engine))       # which sends nothing: it is not open
        await gate.create()
        (row,) = await rows(gate, Outgoing)

        def park(work: Work) -> None:
            work.keep_record(replace(row, state="parked", reason="it was refused"))
        await gate.backend.transact(gate.tenant_id, Needs(), park)
        await ledger.sink.close()

    good(await moving.push("--database", source))
    assert row.receipt_id in moving.there()
    words = ("reconcile", "--database", source, "--tenant", moving.tenant_id)
    told = await moving.run(*words)
    assert told.exit_code == 5
    assert "refused the task.assigned, but has it now" in told.output
    assert "repaired: 1 parked" in good(await moving.run(*words, "--repair")).output
    async with moving.standalone(source) as gate:
        assert await rows(gate, Outgoing) == []


async def test_what_was_erased_goes_to_the_ledger_as_erased(moving: Moving, fresh: Kinds) -> None:
    """From a database and from a file alike; and a ledger that still has the content is named."""
    source, target = await fresh("sqlite"), await fresh("sqlite")
    async with moving.standalone(source) as gate:
        kept = await gate.finished(by="bob")
        good(await moving.push("--database", source))
        await gate.finished(by="ada")
        for name in ("ada", "bob"):
            await gate.as_admin().erase_principal(principal_kind="agent", principal_id=name, confirm=name)
        erased = [row.receipt_id for row in await rows(gate, Receipt) if read_note(row.body) is not None]

    pushed = await moving.push("--database", source)

    there = moving.there()
    assert pushed.exit_code == 5
    assert pushed.output.count("ask who runs it to erase that") == len(
        [id for id in erased if there[id]["task_id"] == kept.task_id])
    now = [there[id] for id in erased if there[id]["task_id"] != kept.task_id]
    assert now
    assert f"{len(now)} receipts were erased, and went without content" in pushed.output
    assert all(receipt["body"].keys() == {"erased", "sealed"} for receipt in now)
    assert "ada" not in {receipt[end]["id"] for receipt in now for end in ("from", "to")}
    good(await moving.run("reconcile", "--database", source, "--tenant", moving.tenant_id))

    rebuilt = good(await moving.run("rebuild", "--database", target, "--tenant", moving.tenant_id))
    assert f"({len(now)} of them erased)" in rebuilt.output


async def test_a_file_goes_to_the_ledger_and_a_damaged_one_does_not(
        moving: Moving, tmp_path: Path, live_for_all: Any) -> None:
    with Http(live_for_all.url, "a-token-for-tests") as gate:
        await asyncio.to_thread(gate.call, "create_task", type="files", payload=None, agent_id="ada")
        path = tmp_path / "out.jsonl"
        done = await asyncio.to_thread(carry.export_receipts, gate, str(path), lambda rows: None)

    result = good(await moving.push("--file", str(path), "--tenant", moving.tenant_id))

    assert f"the ledger has {done.writer.receipts} of" in result.output
    assert len(moving.there()) == done.writer.receipts
    path.write_bytes(path.read_bytes().replace(b"files", b"filed"))
    damaged = await moving.push("--file", str(path), "--tenant", moving.tenant_id)
    assert damaged.exit_code == 1
    assert "is damaged" in damaged.output


# What goes wrong on the way back.


async def test_what_still_waits_in_the_outbox_comes_home_too(moving: Moving, fresh: Kinds) -> None:
    source, target = await fresh("sqlite"), await fresh("sqlite")
    async with moving.integrated(source) as gate:
        await gate.finished()
    silent = {"receipt_mode": "memorygate_integrated", "ledger": moving.ledger.settings()}
    async with moving.standalone(source, **silent) as gate:
        gate.engine.extend(Ledger(gate.engine))        # which sends nothing: it is not open
        await gate.finished()
        waiting = len(await rows(gate, Outgoing))
        ids = {row.receipt_id for row in await rows(gate, Receipt)}
        await gate.ledger.sink.close()

    result = good(await moving.home(source, target))

    assert waiting == 4
    assert "4 of them are not in the ledger yet" in result.output
    async with moving.standalone(target) as gate:
        assert {row.receipt_id for row in await rows(gate, Receipt) if row.body} == ids
        await sound(gate)
    good(await moving.push("--database", target))
    assert moving.there().keys() == ids


async def test_a_receipt_that_the_ledger_does_not_have_keeps_the_gate_from_coming_home(
        moving: Moving, fresh: Kinds) -> None:
    source, target = await fresh("sqlite"), await fresh("sqlite")
    async with moving.integrated(source) as gate:
        await gate.finished()
    with LedgerServer() as other:
        somewhere = Moving(other, moving.tenant_id)
        for id, receipt in list(moving.there().items())[:3]:
            other.call("POST", "/v1/receipts", receipt)
            assert id in somewhere.there()

        stopped = await somewhere.home(source, target)
        assert stopped.exit_code == 5
        assert "1 lost_by_ledger" in stopped.output
        assert not database_exists(target)

        pushed = await somewhere.push("--database", source)
        assert pushed.exit_code == 5
        assert "only its hash is here, and the ledger does not have it" in pushed.output

        left = good(await somewhere.home(source, target, "--leave-lost"))
    assert "1 are hashes only" in left.output
    async with moving.standalone(target) as gate:
        assert [row.body for row in await rows(gate, Receipt)].count("") == 1
        assert (await verify(gate.backend)).problems == []


async def test_a_ledger_that_cannot_be_read_writes_nothing(moving: Moving, fresh: Kinds) -> None:
    source, target = await fresh("sqlite"), await fresh("sqlite")
    async with moving.integrated(source) as gate:
        await gate.create()

    away = await moving.run("receipts", "home", target, "--database", source, ledger__url="http://127.0.0.1:9")

    assert away.exit_code == 7
    assert not database_exists(target)


async def test_a_gate_that_went_standalone_without_its_receipts_seals_none_of_them(
        moving: Moving, fresh: Kinds, caplog: pytest.LogCaptureFixture) -> None:
    source, target = await fresh("sqlite"), await fresh("sqlite")
    async with moving.integrated(source) as gate:
        await gate.finished()
    async with moving.standalone(source) as gate:
        await gate.create()
        assert await seal(gate.engine, gate.tenant_id) == SealHead()
        assert "are not sealed" in caplog.text

    good(await moving.home(source, target))
    async with moving.standalone(target) as gate:
        assert (await seal(gate.engine, gate.tenant_id)).number == 1
        await sound(gate)
