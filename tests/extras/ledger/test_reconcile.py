"""`asyncgate reconcile`: every difference between a gate and its ledger is found, and mended where that is safe."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from asyncgate import FENCES_SKIPPED, Engine, Needs, Work
from asyncgate.backends import open_backend
from asyncgate.commands.main import main
from asyncgate.conformance.harness import Gate, under
from asyncgate.conformance.ledgers import LedgerServer
from asyncgate.conformance.verify import verify
from asyncgate.extras.ledger.collected import Unreadable
from asyncgate.extras.ledger.mending import Mender
from asyncgate.extras.ledger.outbox import Ledger
from asyncgate.extras.ledger.reconcile import KINDS, Difference, compare_all
from asyncgate.extras.ledger.strict import Strict
from asyncgate.parts.model.database import ArchivingBackend, LastingBackend
from asyncgate.parts.model.queries import OutboxFilter, Rows
from asyncgate.parts.model.settings import Settings
from asyncgate.parts.model.stored import (
    Account,
    Archived,
    Event,
    Lease,
    Obligation,
    Outgoing,
    Receipt,
    SealHead,
    Task,
    export_key,
)
from asyncgate.parts.model.wire import Principal
from asyncgate.parts.receipts.incoming import computed_hash
from asyncgate.parts.receipts.seals import receipt_digest
from tests.support.ledger_tools import emptied

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("receipts", ["eventual"], indirect=True)]
ARTIFACTS = [{"uri": "s3://bucket/result"}]
SUPPORTED = (Task, Lease, Receipt, Event, Obligation, Outgoing)


async def rows(gate: Gate, table: Any) -> list[Any]:
    records: list[Any] = []
    while page := await gate.backend.page(gate.tenant_id, Rows(table, export_key(records[-1]) if records else "")):
        records += page
    return records


async def stored(gate: Gate) -> list[Any]:
    return [await rows(gate, table) for table in SUPPORTED]


async def found(gate: Gate, mend: Any = None) -> list[Difference]:
    """Compare, and return what differs."""
    findings = await compare_all(gate.backend, gate.ledger.sink, {gate.engine.instance}, lambda rows: None,
                                 [gate.tenant_id], mend)
    listed = list(findings.all())
    assert sum(findings.counts.values()) == len(listed)
    findings.close()
    return listed


async def kinds(gate: Gate) -> list[str]:
    return sorted(difference.kind for difference in await found(gate))


async def mended(gate: Gate) -> dict[str, int]:
    """Repair as the command does; return what was done."""
    engine = Engine(gate.backend, gate.engine.settings)
    mender = Mender(engine, ledger := Ledger(engine))
    await found(gate, mender)
    assert await mender.send() == 0
    await ledger.sink.close()
    return {kind: count for kind, count in mender.done.items() if count}


async def sound(gate: Gate) -> list[str]:
    """What verify finds wrong with this tenant's rows."""
    verdict = await verify(gate.backend)
    return [problem for problem in verdict.problems if "audit" not in problem]


async def decided(gate: Gate, decide: Callable[[Work], None], **needs: Any) -> None:
    """Change what is stored past all rules."""
    await gate.backend.transact(gate.tenant_id, Needs(**needs), decide)


# A past that is brought back: what a gate knew at some moment, beside a ledger that knows more.


class Past:
    """A gate restored from an old backup: another tenant with the rows of a moment, and all receipts until now."""

    def __init__(self, gate: Gate, ledger: LedgerServer) -> None:
        self.gate, self.ledger, self.then = gate, ledger, gate.stranger()

    async def remember(self) -> Gate:
        """Copy what is stored now into the other tenant."""
        await emptied(self.gate)
        tables = {table: await rows(self.gate, table) for table in (Task, Lease, Receipt, Obligation)}

        def decide(work: Work) -> None:
            for task in tables[Task]:
                work.add_task(task, frozenset())
            for lease in tables[Lease]:
                work.set_lease(lease)
            work.written.update((row.receipt_id, replace(row, delivered_at=None)) for row in tables[Receipt])
            work.opened.update((row.receipt_id, Principal(row.to_kind, row.to_id)) for row in tables[Obligation])
        await decided(self.then, decide, tasks={task.task_id for task in tables[Task]})
        return self.then

    async def catch_up(self, wanted: Callable[[dict[str, Any]], bool] = lambda receipt: True) -> None:
        """Let the ledger have what the gate has written since, under the other tenant."""
        await emptied(self.gate)
        for receipt in self.ledger.receipts(self.gate.tenant_id):
            if wanted(receipt):
                self.ledger.call("POST", "/v1/receipts", {**receipt, "tenant_id": self.then.tenant_id})


@pytest.fixture
def past(gate: Gate, ledger: LedgerServer) -> Past:
    return Past(gate, ledger)


# What agrees.


async def test_a_gate_and_its_ledger_agree_and_what_is_on_its_way_is_no_difference(gate: Gate) -> None:
    await gate.finished()
    offer = await gate.leased()
    await gate.as_worker().complete(**under(offer), result={"n": 1})
    await emptied(gate)
    assert await found(gate) == []

    silent = gate.beside(receipt_mode="memorygate_integrated", ledger=gate.engine.settings.ledger)
    silent.engine.extend(gate.ledger.__class__(silent.engine))
    await silent.create()

    assert await found(silent) == []
    await silent.ledger.sink.close()


async def test_receipts_of_others_are_no_difference(gate: Gate, ledger: LedgerServer) -> None:
    await gate.finished()
    plan = {"receipt_id": str(uuid.uuid4()), "tenant_id": gate.tenant_id, "receipt_type": "plan.made", "parents": [],
            "created_at": "2026-11-22T07:00:00Z", "from": {"kind": "service", "id": "delegate"},
            "to": {"kind": "agent", "id": "ada"}, "body": {}}
    ledger.call("POST", "/v1/receipts", plan)
    ledger.call("POST", "/v1/receipts", {**plan, "receipt_id": str(uuid.uuid4()), "receipt_type": "task.assigned",
                                         "asyncgate_instance": "another", "receipt_key": "k", "task_id": "theirs"})
    await emptied(gate)

    assert await found(gate) == []


async def test_what_is_in_the_archive_here_is_no_difference_unless_somebody_changed_it(
        gate: Gate, ledger: LedgerServer) -> None:
    offer = await gate.finished()
    await emptied(gate)
    here = await rows(gate, Receipt)

    def pointer(receipt: Receipt) -> Archived:
        return Archived(receipt.receipt_id, receipt.task_id, receipt.receipt_type, "segment", 2,
                        receipt_digest(receipt).hex(),
                        here[0].receipt_id, json.dumps([offer.task_id]))

    def let_go(work: Work) -> None:
        for receipt in here:
            work.keep_record(pointer(receipt))
            work.drop_record(Receipt, receipt.receipt_id)
    await decided(gate, lambda work: work.keep_record(SealHead(last_id=here[-1].receipt_id)))
    if isinstance(gate.backend, ArchivingBackend):
        await gate.backend.register_segment(gate.tenant_id, "segment")
    await decided(gate, let_go, receipts={receipt.receipt_id for receipt in here})
    assert await rows(gate, Receipt) == []
    assert await kinds(gate) == []

    other = replace(here[-1], receipt_id=gate.engine.backend.ids.new(gate.backend.now()))
    told = ledger.receipts(gate.tenant_id)[-1]
    ledger.call("POST", "/v1/receipts", {**told, "receipt_id": other.receipt_id, "body": {"made": "up"}})
    await decided(gate, lambda work: work.keep_record(pointer(other)))
    assert await kinds(gate) == ["tampered"]


async def test_what_an_erasure_has_changed_here_is_no_difference(gate: Gate) -> None:
    await gate.finished()
    await emptied(gate)

    await gate.as_admin().erase_principal(principal_kind="agent", principal_id="ada", confirm="ada")
    gate.ledger.sender.call(gate.tenant_id)
    await emptied(gate)
    assert await found(gate) == []


async def test_comparing_changes_nothing(past: Past, gate: Gate) -> None:
    offer = await gate.leased()
    then = await past.remember()
    await gate.as_worker().complete(**under(offer), artifacts=ARTIFACTS)
    await past.catch_up()
    before = await stored(then)

    assert await kinds(then) == ["ended_at_ledger"]

    assert await stored(then) == before


# What the ledger lacks.


async def test_a_receipt_that_is_here_whole_is_sent_again_by_its_key(make_gate: Callable[..., Gate], gate: Gate,
                                                                     ledger: LedgerServer) -> None:
    """As after a change from standalone to integrated mode."""
    before = gate.beside(instance_id="asyncgate-1")
    await before.finished()
    assert await kinds(gate) == ["missing_at_ledger"] * 4

    assert await mended(gate) == {"missing_at_ledger": 4}

    assert await found(gate) == []
    assert await mended(gate) == {}
    there = ledger.receipts(gate.tenant_id)
    assert [receipt["receipt_key"] for receipt in there] == [row.receipt_key for row in await rows(gate, Receipt)]
    assert await sound(gate) == []


async def test_a_receipt_that_the_ledger_has_lost_is_told_and_nothing_mends_it(past: Past, gate: Gate) -> None:
    await gate.finished()
    then = await past.remember()
    await past.catch_up(lambda receipt: receipt["receipt_type"] != "task.completed")

    [lost] = await found(then)

    assert (lost.kind, lost.detail) == (
        "lost_by_ledger", "the ledger does not have the task.completed and counts an obligation as open")
    assert await mended(then) == {}
    assert await kinds(then) == ["lost_by_ledger"]


async def test_a_refused_receipt_is_offered_once_more(gate: Gate, ledger: LedgerServer) -> None:
    silent = gate.beside(receipt_mode="memorygate_integrated", ledger=gate.engine.settings.ledger)
    silent.engine.extend(gate.ledger.__class__(silent.engine))
    gate.ledger.sender.closed = True
    await silent.create()
    await silent.ledger.sink.close()
    [row] = await gate.backend.page(gate.tenant_id, OutboxFilter("", 10))
    await decided(gate, lambda work: work.keep_record(replace(row, state="parked", reason="422 no")))
    [parked] = await found(gate)
    assert (parked.kind, parked.detail) == ("parked", "the ledger refuses the task.assigned: 422 no")

    assert await mended(gate) == {"parked": 1}

    assert await found(gate) == []
    assert len(ledger.receipts(gate.tenant_id)) == 1


async def test_a_lease_that_the_ledger_does_not_back_is_withdrawn_without_a_receipt(past: Past, gate: Gate) -> None:
    offer = await gate.leased()
    then = await past.remember()
    await past.catch_up(lambda receipt: receipt["receipt_type"] != "task.accepted")
    assert await kinds(then) == ["lease_unbacked", "lost_by_ledger"]
    receipts = await rows(then, Receipt)

    assert await mended(then) == {"lease_unbacked": 1}

    assert await kinds(then) == ["lost_by_ledger"]
    assert await rows(then, Receipt) == receipts
    [task], [lease] = await rows(then, Task), await rows(then, Lease)
    assert (task.status, task.fence, lease.ending) == ("queued", offer.fence + FENCES_SKIPPED, "withdrawn")
    assert [event.event_type for event in await rows(then, Event)] == ["task.reconciled"]
    assert await mended(then) == {}
    assert await sound(then) == []


# What the ledger has beyond the gate.


async def end(gate: Gate, how: str, offer: Any) -> None:
    if how == "succeeded":
        await gate.as_worker().complete(**under(offer), result={"n": 1}, artifacts=ARTIFACTS)
    elif how == "failed":
        await gate.as_worker().fail(**under(offer), error={"why": "broken"})
    else:
        await gate.as_agent().cancel_task(task_id=offer.task_id)


@pytest.mark.parametrize("how", ["succeeded", "failed", "canceled"])
async def test_an_end_that_only_the_ledger_knows_is_taken_over_with_its_receipts(past: Past, gate: Gate,
                                                                                  how: str) -> None:
    offer = await gate.leased()
    then = await past.remember()
    await end(gate, how, offer)
    await past.catch_up()
    [task] = await rows(gate, Task)
    assert await kinds(then) == ["ended_at_ledger"]

    assert await mended(then) == {"ended_at_ledger": 1}

    assert await found(then) == []
    assert await mended(then) == {}
    [mine], [lease] = await rows(then, Task), await rows(then, Lease)
    assert (mine.status, mine.owed, mine.outcome, mine.artifacts) == (how, False, task.outcome, task.artifacts)
    assert lease.ending == {"succeeded": "completed"}.get(how, how)
    assert {row.receipt_id for row in await rows(then, Receipt)} == {
        row.receipt_id for row in await rows(gate, Receipt)}
    assert await rows(then, Obligation) == []
    assert await rows(then, Outgoing) == []
    assert await sound(then) == []


async def test_an_obligation_that_was_discharged_later_is_closed_here_too(past: Past, gate: Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().complete(**under(offer), result={"n": 1})
    then = await past.remember()
    await gate.as_agent().attach_artifacts(task_id=offer.task_id, artifacts=ARTIFACTS)
    await past.catch_up()
    assert await kinds(then) == ["ended_at_ledger"]

    await mended(then)

    assert await found(then) == []
    [task] = await rows(then, Task)
    assert (task.status, task.owed, json.loads(task.artifacts)) == ("succeeded", False, ARTIFACTS)
    assert await rows(then, Obligation) == []
    assert await sound(then) == []


@pytest.mark.parametrize("how", ["released", "failed", "expired"])
async def test_the_end_of_a_lease_that_only_the_ledger_knows_is_taken_over(past: Past, gate: Gate, how: str) -> None:
    offer = await gate.leased(max_attempts=3, retry_backoff_seconds=0)
    then = await past.remember()
    if how == "released":
        await gate.as_worker().release_lease(**under(offer))
    elif how == "failed":
        await gate.as_worker().fail(**under(offer), error="once more", retryable=True)
    else:
        gate.own.discard(then.tenant_id)        # nobody sweeps what is not served
        await gate.lose(offer)
        gate.own.add(then.tenant_id)
    await past.catch_up()
    assert await kinds(then) == ["lease_ended_at_ledger"]

    await mended(then)

    assert await found(then) == []
    [task], [lease] = await rows(then, Task), await rows(then, Lease)
    assert (task.status, lease.ending) == ("queued", how)
    assert (task.attempt, task.expiries) == (int(how == "failed"), int(how == "expired"))
    assert await sound(then) == []
    again = await then.claim("w2")
    assert again is not None
    assert again.fence > FENCES_SKIPPED


async def test_a_lease_that_only_the_ledger_knows_is_outranked(past: Past, gate: Gate) -> None:
    await gate.create()
    then = await past.remember()
    offer = await gate.claim()
    await past.catch_up()
    assert await kinds(then) == ["not_committed"]

    await mended(then)

    assert await found(then) == []
    [task], [lease] = await rows(then, Task), await rows(then, Lease)
    assert offer is not None
    assert (task.status, lease.lease_id, lease.ending) == ("queued", offer.lease_id, "superseded")
    assert task.fence == offer.fence + FENCES_SKIPPED
    assert await sound(then) == []


async def test_a_deleted_schedule_is_forgotten_here_too(past: Past, gate: Gate) -> None:
    offer = await gate.leased("cron", type="schedule.create")
    made = await gate.as_worker("cron").emit_receipt(**under(offer), receipt_type="schedule.created", schedule_id="s")
    await gate.as_worker("cron").complete(**under(offer), artifacts=ARTIFACTS)
    then = await past.remember()
    await gate.as_worker("cron").emit_receipt(receipt_type="schedule.deleted", parents=[made.receipt_id])
    await past.catch_up()
    assert await kinds(then) == ["not_committed"]

    await mended(then)

    assert await found(then) == []
    assert await rows(then, Obligation) == []
    assert await sound(then) == []


async def test_a_task_that_only_the_ledger_knows_is_told_and_not_invented(past: Past, gate: Gate) -> None:
    await gate.finished()
    then = await past.remember()
    await gate.finished()       # owed no more, so nothing is missing
    task_id = await gate.create()
    await past.catch_up()

    [unknown] = await found(then)

    assert (unknown.kind, unknown.task_id) == ("obligation_unknown", task_id)
    before = await stored(then)
    assert await mended(then) == {}
    assert await stored(then) == before


async def test_a_step_that_was_stated_in_part_is_not_taken_over(past: Past, gate: Gate) -> None:
    offer = await gate.leased()
    then = await past.remember()
    await gate.as_worker().complete(**under(offer), artifacts=ARTIFACTS)
    await past.catch_up(lambda receipt: receipt["receipt_type"] != "task.result_ready")
    assert await kinds(then) == ["half_stated"]

    assert await mended(then) == {}

    assert (await then.task(offer.task_id)).status == "leased"


async def test_an_end_that_contradicts_the_one_here_is_told(past: Past, gate: Gate) -> None:
    offer = await gate.leased()
    then = await past.remember()
    await past.catch_up()
    await then.as_agent().cancel_task(task_id=offer.task_id)
    await gate.as_worker().complete(**under(offer), artifacts=ARTIFACTS)
    await emptied(then)
    await past.catch_up()

    assert await kinds(then) == ["ended_otherwise"]

    assert await mended(then) == {}
    assert (await then.task(offer.task_id)).status == "canceled"


async def test_what_a_worker_states_for_an_open_task_is_told(gate: Gate, ledger: LedgerServer) -> None:
    offer = await gate.leased()
    ledger.call("POST", "/v1/receipts", {
        "receipt_id": str(uuid.uuid4()), "tenant_id": gate.tenant_id, "receipt_type": "task.completed",
        "created_at": "2026-11-22T07:00:00Z", "from": {"kind": "worker", "id": "w1"}, "parents": [],
        "to": {"kind": "asyncgate", "id": "asyncgate-1"}, "task_id": offer.task_id, "lease_id": "unknown", "body": {}})
    await emptied(gate)

    [stated] = [difference for difference in await found(gate) if difference.kind != "missing_at_ledger"]

    assert (stated.kind, stated.task_id) == ("stated_by_worker", offer.task_id)


async def test_a_try_that_the_database_did_not_take_leaves_no_difference(
        make_gate: Callable[..., Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = make_gate(receipt_consistency_mode="strict")
    await asyncio.sleep(0)      # in which the ledger opens
    offer = await gate.leased()
    strict = gate.engine.find_extension(Strict)
    assert strict
    real, calls = strict.within, 0

    async def breaking(tenant_id: str, needs: Any, decide: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:      # the one that would have committed
            raise RuntimeError("the database is gone")
        await real(tenant_id, needs, decide)

    monkeypatch.setattr(strict, "within", breaking)
    with pytest.raises(Exception, match="database"):
        await gate.as_worker().complete(**under(offer), artifacts=ARTIFACTS)
    monkeypatch.undo()
    assert await kinds(gate) == []      # the gate settles it when it serves

    await gate.as_worker().complete(**under(offer), artifacts=ARTIFACTS)
    await emptied(gate)

    assert await kinds(gate) == []


async def test_of_two_ends_in_the_ledger_the_announced_one_counts_and_the_other_is_restated(
        gate: Gate, ledger: LedgerServer) -> None:
    offer = await gate.leased()
    await gate.as_worker().fail(**under(offer), error="no")
    await emptied(gate)
    [failed] = [receipt for receipt in ledger.receipts(gate.tenant_id) if receipt["receipt_type"] == "task.failed"]
    never = Receipt(str(uuid.uuid4()), "a key", "task.completed", gate.now(), "worker", "w1", "asyncgate",
                    gate.engine.instance, offer.task_id, offer.lease_id, None, gate.engine.instance, "",
                    '{"artifacts":[{"uri":"x"}]}', parents=tuple(failed["parents"]))
    never = replace(never, hash=computed_hash(never))
    content = gate.ledger.sink.render(gate.tenant_id, never, None)
    ledger.call("POST", "/v1/receipts", msgspec.json.decode(content or b""))
    assert await kinds(gate) == ["ended_twice"]

    done = await mended(gate)
    await emptied(gate)

    assert done == {"ended_twice": 1}
    assert await kinds(gate) == []
    assert [receipt["body"]["details"]["receipt_id"] for receipt in ledger.receipts(gate.tenant_id)
            if receipt["receipt_type"] == "system.anomaly"] == [never.receipt_id]


# Tampering.


@pytest.mark.parametrize(("change", "named"), [
    ({"body": {"canceled_by": "nobody"}}, "body"), ({"to": {"kind": "agent", "id": "eve"}}, "to"),
    ({"created_at": "2020-01-01T00:00:00Z"}, "created_at"), ({"parents": []}, "parents"),
    ({"receipt_type": "task.canceled"}, "receipt_type"), ({"hash": "0" * 64}, "hash")],
    ids=lambda value: str(value)[:20])
async def test_other_content_under_the_same_id_is_named_as_tampering(past: Past, gate: Gate, ledger: LedgerServer,
                                                                     change: dict[str, Any], named: str) -> None:
    await gate.finished()
    then = await past.remember()
    [victim] = [receipt for receipt in ledger.receipts(gate.tenant_id) if receipt["receipt_type"] == "task.completed"]
    ledger.call("POST", "/v1/receipts", {**victim, **change, "tenant_id": then.tenant_id})
    await past.catch_up(lambda receipt: receipt["receipt_id"] != victim["receipt_id"])

    [tampered] = await found(then)

    assert (tampered.kind, tampered.receipt_id) == ("tampered", victim["receipt_id"])
    assert named in tampered.detail
    assert await mended(then) == {}


async def test_a_receipt_that_somebody_made_up_in_the_name_of_the_gate_is_named(gate: Gate,
                                                                                ledger: LedgerServer) -> None:
    offer = await gate.leased()
    await emptied(gate)
    [real] = [receipt for receipt in ledger.receipts(gate.tenant_id) if receipt["receipt_type"] == "task.accepted"]
    forged = {**real, "receipt_id": str(uuid.uuid4()), "receipt_type": "task.completed", "receipt_key": "made up",
              "parents": [offer.obligation_receipt_id], "body": {"artifacts": ARTIFACTS}}
    ledger.call("POST", "/v1/receipts", forged)

    [tampered] = await found(gate)

    assert (tampered.kind, tampered.receipt_id) == ("tampered", forged["receipt_id"])
    assert await mended(gate) == {}
    assert (await gate.task(offer.task_id)).status == "leased"


# The command.


@pytest.fixture(params=["sqlite", "postgres"])
async def url(request: pytest.FixtureRequest, fresh: Callable[[str], Awaitable[str]]) -> str:
    """A database of a gate of its own."""
    return await fresh(request.param)


def options(ledger: LedgerServer, **more: str) -> list[str]:
    sets = {"receipt_mode": "memorygate_integrated", "ledger.url": ledger.url,
            "ledger.auth_token": ledger.token, "instance_id": "asyncgate-1", **more}
    return [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]


async def command(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, ["reconcile", *arguments], prog_name="asyncgate")


async def standalone(url: str) -> str:
    """A gate with receipts that no ledger has; returns its tenant."""
    backend = await open_backend(url, serving=True)
    gate = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), str(uuid.uuid4()))
    await gate.finished()
    await backend.close()
    return gate.tenant_id


async def test_the_command_tells_each_difference_with_its_cure_and_repairs_it(url: str, ledger: LedgerServer,
                                                                              receipts: Any) -> None:
    await standalone(url)

    told = await command("--database", url, *options(ledger))
    again = await command("--database", url, *options(ledger))
    mended = await command("--database", url, "--repair", *options(ledger))
    after = await command("--database", url, "--json", *options(ledger))

    assert (told.exit_code, mended.exit_code, after.exit_code) == (5, 0, 0), mended.output
    assert again.stdout == told.stdout
    assert told.stdout.count("missing_at_ledger: receipt ") == 4
    assert told.stdout.count("    repair: send it again, by its key; --repair does") == 1
    assert told.stdout.endswith(": 4 differences\n")
    assert "repaired: 4 missing_at_ledger" in mended.stdout
    assert mended.stdout.endswith(": the ledger agrees\n")
    assert json.loads(after.stdout) == {"differences": 0, "kinds": {}, "repaired": {}, "waiting": 0, "receipts": 4,
                                        "tasks": 1, "foreign": 0}


async def test_json_has_a_line_for_each_difference(url: str, ledger: LedgerServer, receipts: Any) -> None:
    tenant_id = await standalone(url)

    result = await command("--database", url, "--json", *options(ledger))

    *lines, last = [json.loads(line) for line in result.stdout.splitlines()]
    assert {line["kind"] for line in lines} == {"missing_at_ledger"}
    assert {line["tenant_id"] for line in lines} == {tenant_id}
    assert all(line["cure"] for line in lines)
    assert last["kinds"] == {"missing_at_ledger": 4}


async def test_an_unreadable_ledger_changes_nothing_and_has_a_status_of_its_own(url: str, ledger: LedgerServer,
                                                                                receipts: Any) -> None:
    await standalone(url)

    result = await command("--database", url, "--repair", *options(ledger, **{"ledger.url": "http://127.0.0.1:9"}))

    assert result.exit_code == 7
    assert "nothing was compared, and nothing was changed" in result.stderr
    backend = await open_backend(url)
    assert await backend.unsent() == []
    await backend.close()


async def test_a_repair_beside_a_serving_gate_is_refused_and_says_why(url: str, ledger: LedgerServer,
                                                                      receipts: Any) -> None:
    await standalone(url)
    serving = await open_backend(url, serving=True)
    assert isinstance(serving, LastingBackend)
    await serving.join("asyncgate-1", 1.0, lambda news: None)
    await serving.beat()        # until then it only begins, and others that begin wait for it

    refused = await command("--database", url, "--repair", *options(ledger))
    compared = await command("--database", url, *options(ledger))

    await serving.close()
    assert (refused.exit_code, compared.exit_code) == (1, 5)
    assert "for exclusive use" in refused.stderr


async def test_a_standalone_gate_has_nothing_to_be_compared_with(url: str, receipts: Any) -> None:
    await standalone(url)

    result = await command("--database", url)

    assert result.exit_code == 2
    assert "asyncgate verify" in result.stderr


async def test_a_state_that_contradicts_its_own_receipts_is_told_too(url: str, ledger: LedgerServer,
                                                                     receipts: Any) -> None:
    tenant_id = await standalone(url)
    backend = await open_backend(url, serving=True)
    gate = Gate(Engine(backend, Settings(instance_id="asyncgate-1")), tenant_id)
    receipt = (await rows(gate, Receipt))[-1]
    await decided(gate, lambda work: work.opened.update({receipt.receipt_id: receipt.to}))
    await backend.close()

    result = await command("--database", url, "--repair", *options(ledger))

    assert result.exit_code == 5
    assert f"state: obligation {receipt.receipt_id} is in the index, but it is discharged" in result.stdout


async def test_a_reader_that_breaks_off_in_the_middle_finds_nothing(gate: Gate) -> None:
    await gate.finished()
    await emptied(gate)

    class Broken:
        reads = True

        async def page(self, tenant_id: str, of: Any) -> Any:
            if of.after is None:
                return await gate.ledger.sink.page(tenant_id, replace(of, limit=2))
            raise msgspec.DecodeError("cut off")

    called: list[str] = []

    async def mend(*of: Any) -> None:
        called.append("mend")

    with pytest.raises(Unreadable):
        await compare_all(gate.backend, Broken(), {"asyncgate-1"}, lambda rows: None, [gate.tenant_id], mend)  # type: ignore[arg-type]
    assert called == []


def test_every_kind_says_what_is_to_be_done(receipts: Any) -> None:
    assert all(kind.cure for kind in KINDS.values())
    assert not any(kind.repair and kind.harmless for kind in KINDS.values())



async def named_tenant(url: str) -> str:
    """A gate of a tenant with a name, and with receipts that no ledger has; returns the tenant's id."""
    tenant_id = await standalone(url)
    backend = await open_backend(url, serving=True)
    await backend.transact(tenant_id, Needs(), lambda work: work.keep_record(Account(name="acme", created_at=1.0)))
    await backend.close()
    return tenant_id


@pytest.mark.parametrize("wrong", ["acne", "1f0a3b5c-0000-4000-8000-000000000000"])
async def test_a_tenant_is_named_or_refused_by_every_command_that_takes_one(
        url: str, ledger: LedgerServer, receipts: Any, fresh: Callable[[str], Awaitable[str]], wrong: str) -> None:
    tenant_id, options_of = await named_tenant(url), options(ledger)
    target = await fresh("sqlite")

    async def run(*words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, main, [*words, *options_of], prog_name="asyncgate")
    pushed = await run("receipts", "push", "--database", url, "--tenant", "acme")
    compared = await run("reconcile", "--database", url, "--tenant", "acme")
    refusals = [await run("receipts", "push", "--database", url, "--tenant", wrong),
                await run("reconcile", "--database", url, "--tenant", wrong),
                await run("rebuild", "--database", target, "--tenant", wrong)]

    assert (pushed.exit_code, compared.exit_code) == (0, 0), pushed.output + compared.output
    assert len(ledger.receipts(tenant_id)) == 4
    assert all(refusal.exit_code and wrong in refusal.output for refusal in refusals), [refusal.output
                                                                                        for refusal in refusals]
