"""`asyncgate rebuild`: a gate made anew of its receipts, which says of itself what it does not know."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec import UNSET
from msgspec.structs import replace

from asyncgate import FENCES_SKIPPED, Engine
from asyncgate.backends import open_backend
from asyncgate.clients import Job, Worker
from asyncgate.clients.http import AsyncHttp
from asyncgate.commands.main import main
from asyncgate.conformance.harness import Gate, refused, under
from asyncgate.conformance.ledgers import LedgerServer
from asyncgate.conformance.verify import verify
from asyncgate.extras.ledger.adoption import Adopter
from asyncgate.extras.ledger.collected import Collected, collect_from_ledger
from asyncgate.extras.ledger.reading import Reading
from asyncgate.extras.ledger.rebuild import Damaged, NotEmpty, Rebuild, choose, require_empty, require_undamaged
from asyncgate.extras.ledger.sinks import open_sink
from asyncgate.parts.model.content import decode_json, sha256
from asyncgate.parts.model.ids import Ids
from asyncgate.parts.model.queries import OutboxFilter, Rows
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.stored import Event, Lease, Obligation, Receipt, Schedule, Task, export_key
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.model.wire import Principal
from asyncgate.parts.receipts.files import Header, pack_receipts
from asyncgate.parts.receipts.incoming import computed_hash
from tests.support import npm_package
from tests.support.hasty import TOKEN, ended
from tests.support.ledger_tools import emptied

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("receipts", ["eventual"], indirect=True)]
ARTIFACTS = [{"uri": "s3://bucket/result"}]
package = npm_package.package
Kinds = Callable[[str], Awaitable[str]]


@pytest.fixture
async def target(backend_url: str, fresh: Kinds) -> str:
    """A database for the new gate, of the kind that the old one has: what lies between them is the same for all."""
    return await fresh(backend_url.partition(":")[0].replace("postgresql", "postgres"))


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Any]:
    backend = await open_backend(url, serving=True)
    try:
        yield backend
    finally:
        await backend.close()


async def rows(backend: Any, table: Any, tenant_id: str) -> list[Any]:
    records: list[Any] = []
    while page := await backend.page(tenant_id, Rows(table, export_key(records[-1]) if records else "")):
        records += page
    return records


async def live(gate: Gate) -> dict[str, str]:
    """Bring tasks into every state; return them by what became of them."""
    worker, agent = gate.as_worker(), gate.as_agent()
    made = {"done": (await gate.finished(requirements={"capabilities": []}, instructions="do it")).task_id}
    made["large"] = (large := await gate.leased()).task_id
    await worker.complete(**under(large), result={"text": "x" * 20_000}, artifacts=ARTIFACTS)
    made["failed"] = await gate.create(max_attempts=2, retry_backoff_seconds=0)
    for _ in range(2):
        await worker.fail(**under(await gate.claim()), error={"why": "broken"}, retryable=True)    # type: ignore[arg-type]
    for name in ("unlocated", "located later"):
        made[name] = (offer := await gate.leased()).task_id
        await worker.complete(**under(offer), result={"n": 1})
    await agent.attach_artifacts(task_id=made["located later"], artifacts=ARTIFACTS)
    made["canceled"] = (await gate.leased()).task_id
    await agent.cancel_task(task_id=made["canceled"], reason="no more")
    made["held"] = (await gate.leased(max_expiries=1, timeouts={"lease_ttl_seconds": 1})).task_id
    await gate.wait(2)
    made["retried"] = (offer := await gate.leased(retry_backoff_seconds=600, max_attempts=5)).task_id
    await worker.fail(**under(offer), error="once more", retryable=True)
    made["released"] = (offer := await gate.leased(type="released")).task_id
    await worker.release_lease(**under(offer))
    await gate.claim("w9", accept_types=["released"])
    made["running"] = (offer := await gate.leased(type="long", timeouts={"lease_ttl_seconds": 1800})).task_id
    await worker.report_progress(**under(offer), progress={"at": 7})
    made["leased"] = (await gate.leased("w2", type="leased", timeouts={"lease_ttl_seconds": 1800})).task_id
    made["queued"] = await gate.create(payload={"secret": 1}, priority=9, by="bob", type="later",
                                       requirements={"capabilities": ["gpu"]}, idempotency_key="k")
    await schedules(gate)
    ready = await gate.receipt(made["done"], "task.result_ready")
    await agent.ack_receipt(receipt_id=ready.receipt_id)
    await emptied(gate)
    return made


async def schedules(gate: Gate) -> None:
    for name in ("kept", "deleted"):
        offer = await gate.leased("cron", type="schedule.create")
        made = await gate.as_worker("cron").emit_receipt(**under(offer), receipt_type="schedule.created",
                                                         schedule_id=name)
        await gate.as_worker("cron").complete(**under(offer), artifacts=[{"schedule_id": name}])
    await gate.as_worker("cron").emit_receipt(receipt_type="schedule.deleted", parents=[made.receipt_id])


def shown(receipt: Receipt) -> Receipt:
    """A receipt with its time as the world sees it, and without its salt, which is what a ledger has."""
    return replace(receipt, created_at=to_utc(receipt.created_at).timestamp(), delivered_at=None, salt="")


async def rebuilt(gate: Gate, target: str, **more: Any) -> Result:
    """Run the command against the ledger of a gate."""
    ours = gate.engine.settings.ledger
    sets = {"receipt_mode": "memorygate_integrated", "ledger.url": ours.url,
            "ledger.auth_token": ours.auth_token, "instance_id": "asyncgate-1"}
    arguments = ["rebuild", "--database", target, "--tenant", gate.tenant_id]
    for name, value in sets.items():
        arguments += ["--set", f"{name}={value}"]
    for name, value in more.items():
        arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return await asyncio.to_thread(CliRunner().invoke, main, arguments, prog_name="asyncgate")


# What comes back.


async def test_open_obligations_statuses_and_receipts_are_what_they_were(gate: Gate, target: str) -> None:
    made = await live(gate)
    before = {table: await rows(gate.backend, table, gate.tenant_id) for table in (Task, Receipt, Obligation, Schedule)}

    result = await rebuilt(gate, target)

    assert result.exit_code == 0, result.output
    async with opened(target) as backend:
        after = {table: await rows(backend, table, gate.tenant_id) for table in before}
        assert (await verify(backend)).problems == []
        assert await backend.lag(gate.tenant_id) == await gate.backend.lag(gate.tenant_id)
    assert after[Obligation] == before[Obligation]
    assert [shown(row) for row in after[Receipt]] == [shown(row) for row in before[Receipt]]
    old, new = ({task.task_id: task for task in tables[Task]} for tables in (before, after))
    ended = {"succeeded", "failed", "canceled"}
    assert {id: task.status if task.status in ended else "queued" for id, task in old.items()} == {
        id: task.status for id, task in new.items()}
    for name in ("type", "owner", "duty", "terms", "lane", "owed", "attempt", "asyncgate_instance"):
        assert {id: getattr(task, name) for id, task in old.items()} == {
            id: getattr(task, name) for id, task in new.items()}, name
    assert [row.schedule_id for row in after[Schedule]] == ["kept"]
    for name in ("done", "failed", "unlocated", "located later"):
        assert [json.loads(str(new[made[name]].outcome)), new[made[name]].artifacts] == [
            json.loads(str(old[made[name]].outcome)), old[made[name]].artifacts]
    assert new[made["large"]].outcome is None
    assert new[made["held"]].expiries == 1
    assert json.loads(new[made["held"]].lost_to) == ["w1"]


async def test_a_task_that_lost_its_payload_is_run_again_with_a_given_one(gate: Gate, target: str) -> None:
    first = (await gate.finished(payload={"n": 1}, task_summary="sum")).task_id
    second = await gate.create()
    await gate.as_agent().cancel_task(task_id=second)
    again = (await gate.as_agent().rerun_task(task_id=second)).task_id
    await emptied(gate)

    await rebuilt(gate, target)

    async with opened(target) as backend:
        ada = (new := Gate(Engine(backend, Settings(instance_id="asyncgate-1")), gate.tenant_id)).as_agent()
        assert (await new.task(again)).rerun_of == second
        with refused("invalid_request"):
            await ada.rerun_task(task_id=first)
        with refused("invalid_request"):
            await ada.rerun_task(task_id=second, payload=1)     # it had none, so nothing of it is lost
        made = await new.task((await ada.rerun_task(task_id=first, payload={"n": 2})).task_id)
        assert (bytes(made.payload), made.task_summary, made.rerun_of) == (b'{"n":2}', "sum", first)


async def test_an_open_task_is_held_and_says_what_is_not_known(gate: Gate, target: str) -> None:
    made = await live(gate)

    await rebuilt(gate, target)

    async with opened(target) as backend:
        new = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), gate.tenant_id)
        for name in ("held", "retried", "released", "running", "leased", "queued"):
            assert (await new.task(made[name])).held == "rebuilt", name
        for worker in ("w1", "w2"):
            assert await new.claim(worker, capabilities=["gpu"]) is None
        events = {event.task_id: event for event in await rows(backend, Event, gate.tenant_id)}
        assert {event.event_type for event in events.values()} == {"task.rebuilt"}
        assert "payload" in json.loads(events[made["queued"]].payload)["unknown"]
        assert "payload" not in json.loads(events[made["leased"]].payload)["unknown"]       # it had none
        assert "result" in json.loads(events[made["large"]].payload)["unknown"]
        assert "task.rebuilt" in await new.events(made["queued"])


async def test_lost_steps_are_told_by_the_command_the_events_and_the_next_offer(gate: Gate, target: str) -> None:
    done, leased = [await gate.leased(worker, by="ada") for worker in ("w1", "w2")]
    untouched = await gate.create(type="other")
    for worker, offer in (("w1", done), ("w2", leased)):
        await gate.as_worker(worker).record_step(**under(offer), seq=1, name="fetch", value=7)
    await gate.as_worker("w1").complete(**under(done), artifacts=ARTIFACTS)
    proof = decode_json((await gate.receipt(done.task_id, "task.completed")).body)["steps_sha256"]
    await emptied(gate)

    result = await rebuilt(gate, target)

    assert "no recorded step: receipts have none" in result.output
    assert "still proves those of 1 task; 1 unfinished task had a worker" in result.output
    async with opened(target) as backend:
        new = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), gate.tenant_id)
        events = {event.task_id: json.loads(event.payload) for event in await rows(backend, Event, gate.tenant_id)}
        assert [("steps" in events[id]["unknown"]) for id in (done.task_id, leased.task_id, untouched)] == [
            True, True, False]
        assert "nor what its workers had recorded" in (await new.as_agent("ada").explain_task(
            task_id=leased.task_id)).summary
        for task_id in (leased.task_id, untouched):
            await new.as_admin().release_hold(task_id=task_id)
        again, other = await new.claim("w2", accept_types=["demo"]), await new.claim("w2", accept_types=["other"])
        assert again is not None
        assert other is not None
        assert (again.steps, again.steps_lost) == (UNSET, True)
        assert other.steps_lost is UNSET
        recorded = await new.as_worker("w2").record_step(**under(again), seq=1, name="fetch", value=8)
        assert (recorded.steps, recorded.replayed) == (1, False)
        await new.as_worker("w2").release_lease(**under(again))
        last = await new.claim("w3", accept_types=["demo"])
        assert last is not None
        assert (last.steps, last.steps_lost) == (1, UNSET)
    assert sha256(None, 1, "fetch", hashlib.sha256(b"7").hexdigest()) == proof


async def lose_step(gate: Gate, target: str, start: Any) -> tuple[Any, str]:
    """Record a step, rebuild the gate, and serve the new one; return the old offer, and the URL."""
    offer = await gate.leased(type="t", max_attempts=1)
    await gate.as_worker().record_step(**under(offer), seq=1, name="pay", value=7)
    await emptied(gate)
    await rebuilt(gate, target)
    return offer, start(f"default_tenant_id={gate.tenant_id}", database=target).url


PAYING = """
import { Worker } from "asyncgate";
const worker = new Worker({ workerId: "w2", state: null });
worker.task("t", (_, job) => job.step("pay", () => console.log("paid")));
await worker.run();
"""


@pytest.mark.one_store
async def test_a_worker_in_typescript_does_not_do_again_what_a_lost_step_has_done(
        gate: Gate, target: str, start: Any, package: Any, tmp_path: Path) -> None:
    offer, url = await lose_step(gate, target, start)
    (tmp_path / "node_modules").symlink_to(package.folder / "node_modules")
    (tmp_path / "worker.mjs").write_text(PAYING)

    async with AsyncHttp(url, TOKEN) as new:
        await new.call("release_hold", task_id=offer.task_id)
        environment = {**package.environment, "ASYNCGATE_URL": url, "ASYNCGATE_API_KEY": TOKEN}
        worker = await asyncio.create_subprocess_exec(package.find("node"), "worker.mjs", cwd=tmp_path, env=environment,
                                                      stdout=asyncio.subprocess.PIPE)
        task = await ended(new, offer.task_id)
        worker.terminate()
        paid = (await worker.communicate())[0]

    assert paid == b""
    assert (task["result"]["error"]["code"], task["attempt"]) == ("StepsLost", 0)     # and no other attempt follows
    assert "is lost, because the gate was rebuilt" in task["result"]["error"]["message"]


@pytest.mark.one_store
async def test_a_worker_does_not_do_again_what_a_lost_step_has_done(gate: Gate, target: str, start: Any) -> None:
    offer, url = await lose_step(gate, target, start)
    paid: list[int] = []
    worker = Worker(url, "w2", token=TOKEN, state=None)

    @worker.task("t")
    def pay(payload: Any, job: Job) -> Any:
        return job.step("pay", paid.append, 7)

    async with AsyncHttp(url, TOKEN) as new:
        await new.call("release_hold", task_id=offer.task_id)
        working = asyncio.create_task(worker.serve())
        task = await ended(new, offer.task_id)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)

    assert paid == []
    assert (task["result"]["error"]["code"], task["attempt"]) == ("StepsLost", 0)     # and no other attempt follows
    assert "is lost, because the gate was rebuilt" in task["result"]["error"]["message"]


async def test_fences_begin_above_every_earlier_lease(gate: Gate, target: str) -> None:
    made = await live(gate)
    old = {lease.task_id: lease for lease in await rows(gate.backend, Lease, gate.tenant_id)}

    await rebuilt(gate, target)

    async with opened(target) as backend:
        new = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), gate.tenant_id)
        with refused("lease_invalid_or_expired"):
            await new.as_worker("w2").complete(task_id=made["leased"], lease_id=old[made["leased"]].lease_id,
                                               artifacts=ARTIFACTS)
        await new.as_agent().release_hold(task_id=made["leased"])
        offer = await new.claim("w2")
        assert offer is not None
        assert (offer.task_id, offer.fence) == (made["leased"], old[made["leased"]].fence + FENCES_SKIPPED + 1)
        await new.as_worker("w2").complete(**under(offer), artifacts=ARTIFACTS)
        await new.as_agent().cancel_task(task_id=made["retried"])
        assert (await verify(backend)).problems == []


async def test_what_the_old_gate_could_not_tell_any_more_is_told_now(gate: Gate, ledger: LedgerServer,
                                                                      target: str) -> None:
    """The ledger has a task.completed, and the gate died before its task.result_ready was sent."""
    offer = await gate.finished()
    await emptied(gate)
    away = replace_tenant(ledger, gate, lambda receipt: receipt["receipt_type"] != "task.result_ready")

    result = await rebuilt(away, target)

    assert result.exit_code == 0, result.output
    async with opened(target) as backend:
        new = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), away.tenant_id)
        [waiting] = await backend.page(away.tenant_id, OutboxFilter("", 10))
        receipt = json.loads(waiting.content)
        assert receipt["receipt_type"] == "task.result_ready"
        assert receipt["body"] == {"status": "succeeded", "result_payload": {"ok": True}, "schema_version": "1",
                                   "artifacts": [{"uri": "file:///out"}]}
        assert (await new.task(offer.task_id)).status == "succeeded"


def replace_tenant(ledger: LedgerServer, gate: Gate, wanted: Callable[[dict[str, Any]], bool]) -> Gate:
    """Let the ledger have some of the receipts of a gate under another tenant."""
    other = gate.stranger()
    for receipt in ledger.receipts(gate.tenant_id):
        if wanted(receipt):
            ledger.call("POST", "/v1/receipts", {**receipt, "tenant_id": other.tenant_id})
    return other


async def test_what_a_worker_stated_itself_comes_back_as_the_step_that_it_was(gate: Gate, ledger: LedgerServer,
                                                                               target: str) -> None:
    offer = await gate.leased()
    stated = {"receipt_id": Ids().new(gate.now()), "tenant_id": gate.tenant_id, "receipt_type": "task.completed",
              "created_at": "2026-11-22T07:00:00Z", "from": {"kind": "worker", "id": "w1"},
              "to": {"kind": "asyncgate", "id": "asyncgate-1"}, "parents": [offer.obligation_receipt_id],
              "task_id": offer.task_id, "lease_id": offer.lease_id,
              "body": {"result": {"n": 1}, "artifacts": ARTIFACTS}}
    ledger.call("POST", "/v1/receipts", stated, token=ledger.key_of(gate.tenant_id))
    ledger.call("POST", "/v1/receipts", {**stated, "receipt_id": Ids().new(gate.now()), "receipt_type": "plan.made"})
    await emptied(gate)
    bound = gate.ledger
    await Adopter(gate.engine, Reading(gate.engine, bound.sink, bound.sender.breaker)).poll()
    await emptied(gate)
    keys = {row.receipt_id: row.receipt_key for row in await rows(gate.backend, Receipt, gate.tenant_id)}

    result = await rebuilt(gate, target)

    assert result.exit_code == 0, result.output
    async with opened(target) as backend:
        assert {row.receipt_id: row.receipt_key for row in await rows(backend, Receipt, gate.tenant_id)} == keys
        assert await rows(backend, Obligation, gate.tenant_id) == []


# From a file, whole.


async def exported(gate: Gate, path: Path) -> None:
    """Write the receipts of a gate as `asyncgate receipts export` does."""
    sink = open_sink(gate.engine.settings)
    collected = await collect_from_ledger(sink, gate.tenant_id, lambda rows: None)
    await sink.close()
    text = pack_receipts(Header("asyncgate-receipts", gate.tenant_id), collected.all())
    await asyncio.to_thread(path.write_bytes, text if path.suffix == ".gz" else gzip.decompress(text))
    collected.close()


@pytest.mark.parametrize("name", ["receipts.jsonl", "receipts.jsonl.gz"])
async def test_an_exported_file_makes_a_gate_that_keeps_its_receipts_whole(gate: Gate, fresh: Kinds, tmp_path: Path,
                                                                            name: str) -> None:
    made = await live(gate)
    await exported(gate, tmp_path / name)
    target = await fresh("sqlite")

    arguments = ["rebuild", "--database", target, "--file", str(tmp_path / name), "--set", "instance_id=asyncgate-1"]
    result = await asyncio.to_thread(CliRunner().invoke, main, arguments, prog_name="asyncgate")

    assert result.exit_code == 0, result.output
    async with opened(target) as backend:
        kept = await rows(backend, Receipt, gate.tenant_id)
        assert all(receipt.body for receipt in kept)
        assert len(kept) == len(await rows(gate.backend, Receipt, gate.tenant_id))
        new = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), gate.tenant_id)
        assert {receipt.task_id for receipt in await new.owed()} == {receipt.task_id for receipt in await gate.owed()}
        assert (await new.task(made["failed"])).status == "failed"


@pytest.mark.one_store
@pytest.mark.parametrize("text", ["", "nonsense\n", '{"header": {"tenant_id": "t"}}\n', '{"trailer": {}}\n'])
async def test_a_file_that_is_not_whole_writes_nothing(gate: Gate, tmp_path: Path, text: str) -> None:
    await asyncio.to_thread((tmp_path / "part").write_text, text)

    result = await rebuilt(gate, f"sqlite:///{tmp_path}/x.db", file=tmp_path / "part")

    assert result.exit_code == 7
    assert result.stderr.rstrip().endswith("; nothing was written")


@pytest.mark.one_store
async def test_a_file_that_lacks_a_line_writes_nothing_unless_that_is_wanted(gate: Gate, fresh: Kinds,
                                                                              tmp_path: Path) -> None:
    await live(gate)
    await exported(gate, path := tmp_path / "gap.jsonl")
    lines = (await asyncio.to_thread(path.read_bytes)).splitlines(keepends=True)
    [last] = [at for at, line in enumerate(lines) if b"task.result_ready" in line][-1:]
    await asyncio.to_thread(path.write_bytes, b"".join([*lines[:last], *lines[last + 1:]]))
    target = await fresh("sqlite")

    refused = await rebuilt(gate, target, file=path)
    async with opened(target) as backend:
        assert await rows(backend, Receipt, gate.tenant_id) == []
    forced = await rebuilt(gate, target, file=path, skip_damaged=True)

    assert (refused.exit_code, forced.exit_code) == (5, 1)
    assert "the file is damaged" in refused.stderr
    async with opened(target) as backend:
        assert len(await rows(backend, Receipt, gate.tenant_id)) == len(lines) - 2      # the lost end is told anew


# What is refused.


async def test_a_database_that_is_not_empty_is_refused_so_a_second_rebuild_changes_nothing(gate: Gate,
                                                                                            target: str) -> None:
    await live(gate)
    await rebuilt(gate, target)
    async with opened(target) as backend:
        before = [await rows(backend, table, gate.tenant_id) for table in (Task, Lease, Receipt, Event, Obligation)]

    again = await rebuilt(gate, target)

    assert again.exit_code == 5
    assert "is in use" in again.stderr
    async with opened(target) as backend:
        after = [await rows(backend, table, gate.tenant_id) for table in (Task, Lease, Receipt, Event, Obligation)]
        with pytest.raises(NotEmpty):
            await require_empty(backend)
    assert after == before


@pytest.mark.one_store
async def test_a_ledger_that_cannot_be_read_writes_nothing(gate: Gate, tmp_path: Path) -> None:
    settings = gate.engine.settings
    gate.engine.settings = replace(settings, ledger=replace(settings.ledger, url="http://127.0.0.1:9"))

    result = await rebuilt(gate, f"sqlite:///{tmp_path}/x.db")

    gate.engine.settings = settings
    assert result.exit_code == 7
    assert "the ledger cannot be read" in result.stderr
    async with opened(f"sqlite:///{tmp_path}/x.db") as backend:
        assert await backend.tenants() == []


async def test_receipts_of_several_gates_are_not_mixed(gate: Gate, ledger: LedgerServer, fresh: Kinds) -> None:
    await gate.create()
    other = gate.beside(**{"receipt_mode": "memorygate_integrated", "instance_id": "asyncgate-2",
                           "ledger": gate.engine.settings.ledger})
    other.engine.extend(type(gate.ledger)(other.engine))
    await other.create()
    await emptied(gate)

    unclear = await rebuilt(gate, await fresh("sqlite"))
    single = await rebuilt(gate, first := await fresh("sqlite"), instance="asyncgate-2")
    both = await rebuilt(gate, second := await fresh("sqlite"), all_instances=True)

    await other.ledger.sink.close()
    assert (unclear.exit_code, single.exit_code, both.exit_code) == (5, 0, 0)
    assert "asyncgate-1 (1), asyncgate-2 (1)" in unclear.stderr
    for url, many in ((first, 1), (second, 2)):
        async with opened(url) as backend:
            assert len(await rows(backend, Task, gate.tenant_id)) == many


@pytest.mark.one_store
async def test_a_damaged_receipt_is_named_and_stops_it_unless_it_is_left_out(gate: Gate, ledger: LedgerServer,
                                                                              fresh: Kinds) -> None:
    offer = await gate.finished()
    await emptied(gate)
    damaged = [receipt["receipt_id"] for receipt in ledger.receipts(gate.tenant_id)
               if receipt["receipt_type"] == "task.result_ready"]
    other = gate.stranger()
    for receipt in ledger.receipts(gate.tenant_id):
        body = {**receipt["body"], "status": "failed"} if receipt["receipt_id"] in damaged else receipt["body"]
        ledger.call("POST", "/v1/receipts", {**receipt, "body": body, "tenant_id": other.tenant_id})

    stopped = await rebuilt(other, await fresh("sqlite"))
    went_on = await rebuilt(other, url := await fresh("sqlite"), skip_damaged=True)

    assert (stopped.exit_code, went_on.exit_code) == (5, 1)
    assert damaged[0] in stopped.stderr
    assert f"receipt {damaged[0]} was left out" in went_on.stdout
    async with opened(url) as backend:
        [task] = await rows(backend, Task, other.tenant_id)
        assert (task.task_id, task.status) == (offer.task_id, "succeeded")


@pytest.mark.one_store
async def test_receipts_without_their_task_assigned_make_no_task(gate: Gate, ledger: LedgerServer,
                                                                 fresh: Kinds) -> None:
    await gate.finished()
    await emptied(gate)
    other = replace_tenant(ledger, gate, lambda receipt: receipt["receipt_type"] != "task.assigned")

    result = await rebuilt(other, url := await fresh("sqlite"))

    assert result.exit_code == 1
    assert "no task.assigned: it was not rebuilt" in result.stdout
    async with opened(url) as backend:
        assert await rows(backend, Task, other.tenant_id) == []


def test_what_is_collected_is_read_page_by_page_and_what_is_damaged_is_named(tmp_path: Path, receipts: Any) -> None:
    collected, receipt = Collected(), Receipt(
        "", "k", "task.progress", 1.0, "worker", "w", "asyncgate", "g", "t", None, None, "g", "", "{}")
    for start in range(0, 3000, 500):
        collected.add([replace(receipt, receipt_id=f"{n:06}") for n in range(start, start + 500)])

    assert collected.count() == len([*collected.all()]) == 3000
    assert [row.receipt_id for row in collected.all()] == sorted(f"{n:06}" for n in range(3000))
    assert undamaged_count(collected) == 3000
    collected.close()


def undamaged_count(collected: Collected) -> int:
    choose(collected, None)
    with pytest.raises(Damaged) as named:
        require_undamaged(collected, skip=False)
    assert "and 2990 more" in str(named.value)
    return len(require_undamaged(collected, skip=True))


async def test_a_rebuild_leaves_its_name_on_nothing_that_has_ended(gate: Gate, target: str) -> None:
    """Only open tasks get another fence: what has ended is as it was."""
    made = await live(gate)
    old = {task.task_id: task for task in await rows(gate.backend, Task, gate.tenant_id)}

    async with opened(target) as backend:
        sink = open_sink(gate.engine.settings)
        collected = await collect_from_ledger(sink, gate.tenant_id, lambda rows: None)
        choose(collected, None)
        tally = await Rebuild(backend, gate.engine.settings, gate.tenant_id, collected, skeletons=True,
                              count=lambda rows: None).run()
        await sink.close()
        new = {task.task_id: task for task in await rows(backend, Task, gate.tenant_id)}

    for name in ("done", "failed", "canceled", "unlocated"):
        assert (new[made[name]].fence, new[made[name]].held) == (old[made[name]].fence, None)
    assert new[made["queued"]].owner == Principal("agent", "bob")
    assert tally.tasks == len(old)
    assert tally.told == 0


@pytest.mark.parametrize("receipt_id", ["00000000-0000-7000-8000-000000000000", "ffffffff-0000-7000-8000-000000000000"])
async def test_of_two_ends_in_the_ledger_the_one_that_was_announced_comes_back(
        gate: Gate, ledger: LedgerServer, target: str, receipt_id: str) -> None:
    """A strict gate offers an end before its commit, and announces it behind that."""
    offer = await gate.leased()
    await gate.as_worker().fail(**under(offer), error="no")
    await emptied(gate)
    never = Receipt(receipt_id, "a key", "task.completed", gate.now(), "worker", "w1", "asyncgate", "asyncgate-1",
                    offer.task_id, offer.lease_id, None, "asyncgate-1", "", '{"artifacts":[{"uri":"x"}]}',
                    parents=(offer.obligation_receipt_id,))
    content = gate.ledger.sink.render(gate.tenant_id, replace(never, hash=computed_hash(never)), None)
    ledger.call("POST", "/v1/receipts", json.loads(content or b""))

    result = await rebuilt(gate, target)

    assert result.exit_code == 0, result.output
    async with opened(target) as backend:
        [task] = await rows(backend, Task, gate.tenant_id)
    assert (task.status, task.outcome, task.artifacts) == ("failed", '"no"', None)


async def test_what_was_never_committed_comes_back_as_nothing(gate: Gate, ledger: LedgerServer, target: str) -> None:
    """A strict gate withdraws it in the ledger, where receipts stay."""
    done = await gate.finished()
    await emptied(gate)
    [duty] = [receipt for receipt in ledger.receipts(gate.tenant_id) if receipt["receipt_type"] == "task.assigned"]
    ghost = Receipt(Ids().new(gate.now()), "a key", "task.assigned", gate.now(), "agent", "ada", "agent", "ada",
                    "a-task", None, None, "asyncgate-1", "", json.dumps(duty["body"]))
    begun = gate.ledger.sink.render(gate.tenant_id, replace(ghost, hash=computed_hash(ghost)), None) or b""
    over = gate.ledger.sink.undone(begun, Ids().new(gate.now()), gate.now()) or b""
    for content in (begun, over):
        ledger.call("POST", "/v1/receipts", json.loads(content))

    result = await rebuilt(gate, target)

    assert result.exit_code == 0, result.output
    async with opened(target) as backend:
        assert [task.task_id for task in await rows(backend, Task, gate.tenant_id)] == [done.task_id]
