"""Strict mode: what the ledger may have of a call whose answer or commit was lost is repeated, adopted or withdrawn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from msgspec.structs import replace

from asyncgate.conformance.harness import Gate, refused, under
from asyncgate.conformance.history import assemble, read_checked_rows, violations
from asyncgate.conformance.ledgers import HASTY
from asyncgate.conformance.torture import list_undone
from asyncgate.extras.ledger.outbox import Ledger
from asyncgate.extras.ledger.sinks import Outage
from asyncgate.extras.ledger.strict import POLL_OFFERED_SECONDS, REPEAT_SECONDS
from asyncgate.parts.model.errors import GateError
from asyncgate.parts.model.queries import OutboxFilter, Rows
from asyncgate.parts.model.settings import LedgerSettings, RateLimiting, RateLimits, SecuritySettings, Tier
from asyncgate.parts.model.stored import Receipt, Task
from tests.support.patience import PATIENCE_SECONDS
from tests.support.stub_ledger import CUT, Answer, StubLedger

pytestmark = pytest.mark.anyio
FINE: Answer = (200, {}, "{}")
FILE = [{"uri": "s3://b/r"}]


class Losing(StubLedger):
    """A ledger that stores everything, and whose answers about one type of receipts are lost while that is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = ""
        self.answer = self.store

    def store(self, receipt: dict[str, Any]) -> Answer:
        """Store a receipt, and answer or not."""
        if receipt["receipt_type"] != self.lost:
            return FINE
        if receipt not in self.taken:
            self.taken.append(receipt)
        return 502, {}, "the answer is lost"

    def types(self) -> list[str]:
        """Return the types of what is stored."""
        return [receipt["receipt_type"] for receipt in self.taken]

    def one(self, receipt_type: str) -> dict[str, Any]:
        """Return the only receipt of a type."""
        [only] = [receipt for receipt in self.taken if receipt["receipt_type"] == receipt_type]
        return only


@pytest.fixture
async def stub() -> AsyncIterator[Losing]:
    losing = Losing()
    async with losing:
        yield losing


@pytest.fixture
async def strict(make_gate: Callable[..., Gate], stub: Losing) -> AsyncIterator[Callable[..., Any]]:
    """Return what makes strict gates of one tenant and database; each is another process."""
    gates: list[Gate] = []
    async with AsyncExitStack() as running:
        async def make(**more: Any) -> Gate:
            more |= {
                "receipt_mode": "memorygate_integrated", "receipt_consistency_mode": "strict",
                "ledger": LedgerSettings(**{"url": stub.url, **HASTY}), "instance_id": f"asyncgate-{len(gates) + 1}"}
            gates.append(gate := gates[0].beside(**more) if gates else make_gate(**more))
            gate.engine.extend(Ledger(gate.engine))
            await running.enter_async_context(gate.ledger)
            return gate
        yield make


@pytest.fixture
async def gate(strict: Callable[..., Any]) -> Gate:
    made: Gate = await strict()
    return made


async def lose(stub: Losing, receipt_type: str, call: Any) -> None:
    """Make a call whose receipt is stored, and not answered."""
    stub.lost = receipt_type
    with refused("receipt_ledger_unavailable"):
        await call
    stub.lost = ""


async def look_later(gate: Gate) -> None:
    """Let the gate settle what nobody has repeated."""
    gate.skip(REPEAT_SECONDS + 1)
    strict = gate.ledger.strict
    assert strict is not None
    await strict.look()
    assert await gate.backend.page(gate.tenant_id, OutboxFilter("", 10, "offered")) == []


async def test_a_repeated_creation_offers_the_very_receipt_of_the_first_try_also_from_another_process(
        gate: Gate, stub: Losing, strict: Callable[..., Any]) -> None:
    asked = {"type": "demo", "payload": {"n": 1}, "idempotency_key": "k"}
    for _ in range(2):
        await lose(stub, "task.assigned", gate.as_agent().create_task(**asked))
        gate.skip(1.0)
    other = await strict()

    made = await other.as_agent().create_task(**asked)

    assert stub.one("task.assigned")["task_id"] == made.task_id
    [receipt] = await gate.receipts(made.task_id)
    assert receipt.receipt_id == stub.one("task.assigned")["receipt_id"]
    await look_later(other)
    assert stub.types() == ["task.assigned"]


@pytest.mark.parametrize("key", ["k", None])
async def test_a_creation_that_nobody_repeats_is_withdrawn(gate: Gate, stub: Losing, key: str | None) -> None:
    await lose(stub, "task.assigned", gate.as_agent().create_task(type="demo", payload=None, idempotency_key=key))

    await look_later(gate)
    await stub.until(lambda: "task.canceled" in stub.types())

    assert stub.one("task.canceled")["parents"] == [stub.one("task.assigned")["receipt_id"]]
    assert (await gate.as_admin().list_tasks()).tasks == []


async def test_another_body_under_the_same_key_withdraws_the_first_creation(gate: Gate, stub: Losing) -> None:
    await lose(stub, "task.assigned", gate.as_agent().create_task(type="demo", payload=1, idempotency_key="k"))

    made = await gate.as_agent().create_task(type="demo", payload=2, idempotency_key="k")
    await stub.until(lambda: "task.canceled" in stub.types())

    assert [receipt["task_id"] == made.task_id for receipt in stub.taken
            if receipt["receipt_type"] == "task.assigned"] == [
        False, True]


async def test_a_repeated_claim_gets_the_lease_that_the_ledger_has_also_from_another_process(
        gate: Gate, stub: Losing, strict: Callable[..., Any]) -> None:
    await gate.create()
    await lose(stub, "task.accepted", gate.claim(claim_id="c"))
    gate.skip(1.0)
    other = await strict()

    offer = await other.claim(claim_id="c")

    assert offer is not None
    assert stub.one("task.accepted")["lease_id"] == offer.lease_id
    await other.as_worker().complete(**under(offer), artifacts=FILE)
    await look_later(other)
    await stub.until(lambda: "task.result_ready" in stub.types())
    assert stub.types() == ["task.assigned", "task.accepted", "task.completed", "task.result_ready"]


@pytest.mark.parametrize("claim_id", ["c", None])
async def test_a_lease_that_nobody_got_is_withdrawn_before_another_worker_gets_the_task(
        gate: Gate, stub: Losing, claim_id: str | None) -> None:
    task_id = await gate.create()
    await lose(stub, "task.accepted", gate.claim("w1", claim_id=claim_id))

    offer = await gate.claim("w2")
    await stub.until(lambda: "lease.expired" in stub.types())

    assert offer is not None
    assert offer.task_id == task_id
    assert stub.one("lease.expired")["parents"] == [
        receipt["receipt_id"] for receipt in stub.taken if receipt["from"]["id"] == "w1"]


async def test_a_completion_that_nobody_repeats_is_adopted(gate: Gate, stub: Losing) -> None:
    offer, large = await gate.leased(), "x" * 40_000       # the receipt has only the hash of such a result
    await lose(stub, "task.completed", gate.as_worker().complete(**under(offer), result=large, artifacts=FILE))
    gate.skip(POLL_OFFERED_SECONDS + 1)
    health = await gate.as_admin().health()

    await look_later(gate)
    await stub.until(lambda: "task.result_ready" in stub.types())

    assert health.receipt_ledger_lag.unsettled == 1
    assert (await gate.as_admin().health()).receipt_ledger_lag.unsettled == 0
    row = await gate.backend.task(gate.tenant_id, offer.task_id)
    assert row is not None
    assert (row[0].status, row[0].outcome) == ("succeeded", f'"{large}"')
    assert stub.types() == ["task.assigned", "task.accepted", "task.completed", "task.result_ready"]


@pytest.mark.parametrize(("first", "receipt_type", "ending"), [
    ("complete", "task.completed", "completed"), ("fail", "task.failed", "failed"),
    ("release_lease", "lease.expired", "released")])
@pytest.mark.parametrize("again", ["complete", "fail", "cancel_task"])
async def test_an_end_whose_answer_was_lost_comes_before_every_other_end(
        gate: Gate, stub: Losing, first: str, receipt_type: str, ending: str, again: str,
        strict: Callable[..., Any]) -> None:
    more: dict[str, dict[str, Any]] = {"complete": {"artifacts": FILE}, "fail": {"error": "no"}}
    offer = await gate.leased()
    await lose(stub, receipt_type, getattr(gate.as_worker(), first)(**under(offer), **more.get(first, {})))
    gate.skip(1.0)
    other = await strict()

    if again == "cancel_task":
        answer = await other.as_agent().cancel_task(task_id=offer.task_id)
        assert answer.ok == (first == "release_lease")
    elif again == first:
        assert (await getattr(other.as_worker(), again)(**under(offer), **more[again])).ok
    else:
        with refused("lease_invalid_or_expired", reason=ending):
            await getattr(other.as_worker(), again)(**under(offer), **more[again])

    await look_later(other)
    assert stub.types().count(receipt_type) == 1
    assert (stub.types().count("task.completed") + stub.types().count("task.failed")
            + stub.types().count("task.canceled")) == (first != "release_lease") + (again == "cancel_task") * (
                first == "release_lease")


async def test_a_cancellation_whose_answer_was_lost_is_adopted(gate: Gate, stub: Losing) -> None:
    offer = await gate.leased()
    await lose(stub, "task.canceled", gate.as_agent().cancel_task(task_id=offer.task_id, reason="late"))

    with refused("lease_invalid_or_expired", reason="canceled"):
        await gate.as_worker().complete(**under(offer), artifacts=FILE)

    assert (await gate.task(offer.task_id)).status == "canceled"
    assert stub.types().count("task.canceled") == 1


async def test_an_expiry_whose_answer_was_lost_is_adopted_by_another_process(
        gate: Gate, stub: Losing, strict: Callable[..., Any]) -> None:
    offer = await gate.leased()
    stub.lost = "lease.expired"
    gate.skip(400.0)
    await gate.sweep()
    stub.lost = ""
    other = await strict()

    await other.sweep()
    again = await other.claim("w2")

    assert again is not None
    assert again.fence == offer.fence + 1
    assert (await gate.task(offer.task_id)).expiries == 1
    assert stub.types().count("lease.expired") == 1


async def test_an_end_that_is_not_lawful_any_more_is_told_as_overtaken(gate: Gate, stub: Losing) -> None:
    offer = await gate.leased()
    await lose(stub, "task.completed", gate.as_worker().complete(**under(offer), artifacts=FILE))
    await gate.beside().as_agent().cancel_task(task_id=offer.task_id)      # a process that does not know strict mode

    await look_later(gate)
    await stub.until(lambda: "system.anomaly" in stub.types())

    body = stub.one("system.anomaly")["body"]
    assert body["kind"] == "receipt_overtaken"
    assert body["details"]["receipt_id"] == stub.one("task.completed")["receipt_id"]
    assert (await gate.task(offer.task_id)).status == "canceled"


@pytest.mark.parametrize("overtaken", [False, True])
async def test_what_followed_a_lease_that_nobody_got_is_settled_with_it(
        gate: Gate, stub: Losing, overtaken: bool) -> None:
    """A claim and a cancellation of its task, decided together."""
    task_id = await gate.create()
    stub.lost = "task.canceled"
    calls = gate.claim(claim_id="c"), gate.cancel_task(task_id=task_id)
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(answer, GateError)
    stub.lost = ""
    accepted, canceled = (stub.one(type)["receipt_id"] for type in ("task.accepted", "task.canceled"))
    if overtaken:
        other = gate.beside()       # a process that does not know strict mode
        offer = await other.claim("w2")
        assert offer is not None
        await other.as_worker("w2").complete(**under(offer), artifacts=FILE)

    await look_later(gate)
    await stub.until(lambda: {"lease.expired", *["system.anomaly"] * overtaken} <= {*stub.types()})

    assert (await gate.task(task_id)).status == ("succeeded" if overtaken else "canceled")
    undone, here = list_undone(stub.taken), {receipt.receipt_id for receipt in await gate.receipts()}
    assert (accepted in undone, accepted in here) == (True, False)
    assert (canceled in undone, canceled in here) == (overtaken, not overtaken)


@pytest.mark.parametrize("on_conflict", ["supersede", "replace"])
async def test_what_followed_a_task_that_never_was_is_undone_with_it(
        gate: Gate, stub: Losing, on_conflict: str) -> None:
    """Unique work that is asked for twice in one call; the second request changes or ends the task of the first."""
    followed = {"supersede": "task.canceled", "replace": "task.amended"}[on_conflict]
    unique = {"key": "k", "on_conflict": on_conflict}
    await lose(stub, followed, gate.as_agent().create_tasks(
        tasks=[{"type": "sync", "payload": n, "unique": unique} for n in range(2)]))
    offered = {receipt["receipt_id"] for receipt in stub.taken}
    assert followed in stub.types()

    await look_later(gate)

    await stub.until(lambda: offered <= list_undone(stub.taken))
    assert (await gate.as_agent().list_tasks()).tasks == []


async def test_a_heartbeat_goes_on_while_an_end_is_not_settled(gate: Gate, stub: Losing) -> None:
    offer = await gate.leased()
    stub.lost = "task.completed"
    with refused("receipt_ledger_unavailable"):
        await gate.as_worker().complete(**under(offer), artifacts=FILE)

    assert (await gate.as_worker().renew_lease(**under(offer))).ok


async def test_what_is_open_survives_an_outage_in_which_it_cannot_be_settled(gate: Gate, stub: Losing) -> None:
    offer, asked = await gate.leased(), {"type": "demo", "payload": None, "idempotency_key": "k"}
    await lose(stub, "task.completed", gate.as_worker().complete(**under(offer), artifacts=FILE))
    await lose(stub, "task.assigned", gate.as_agent().create_task(**asked))
    stub.answer = lambda receipt: (503, {}, "surely not stored")
    for call in (gate.as_agent().cancel_task(task_id=offer.task_id), gate.as_agent().create_task(**asked)):
        with refused("receipt_ledger_unavailable"):
            await call
    stub.answer = stub.store
    async with asyncio.timeout(PATIENCE_SECONDS):
        while gate.ledger.circuit == "open":  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    made = await gate.as_agent().create_task(**asked)
    await look_later(gate)

    assert (await gate.task(offer.task_id)).status == "succeeded"
    assert [receipt["task_id"] for receipt in stub.taken
            if receipt["receipt_type"] == "task.assigned"][1:] == [made.task_id]
    assert "task.canceled" not in stub.types()


async def test_a_repeated_claim_whose_task_is_gone_withdraws_the_lease(gate: Gate, stub: Losing) -> None:
    task_id = await gate.create()
    await lose(stub, "task.accepted", gate.claim(claim_id="c"))
    await gate.beside().as_agent().cancel_task(task_id=task_id)     # a process that does not know strict mode

    assert await gate.claim(claim_id="c") is None

    await stub.until(lambda: "lease.expired" in stub.types())
    assert stub.one("lease.expired")["body"]["reason"] == "never_committed"


async def test_what_another_process_is_about_to_commit_is_left_to_it(
        gate: Gate, stub: Losing, strict: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    other, first, second = await strict(), await gate.create(), await gate.create()
    for peer in (gate, other):
        monkeypatch.setattr(peer.engine, "is_alone", lambda: False)
    refusal, offers = list[str](), list[Any]()

    async def meanwhile(receipt: dict[str, Any]) -> Answer:
        if receipt["receipt_type"] == "task.accepted" and not offers:
            offers.append(None)
            offers[0] = await other.claim("w2")
            with refused("database_unavailable") as caught:
                await other.as_agent().cancel_task(task_id=first)
            refusal.append(str(caught.value))
        return FINE
    stub.answer = meanwhile

    offer = await gate.claim("w1")

    assert offer is not None
    assert (offer.task_id, offers[0].task_id) == (first, second)
    assert "another process" in refusal[0]
    await gate.as_worker("w1").complete(**under(offer), artifacts=FILE)


@pytest.mark.parametrize("away", [False, True])
async def test_an_end_that_was_refused_in_the_end_is_not_adopted_later(
        gate: Gate, stub: Losing, strict: Callable[..., Any], away: bool) -> None:
    """It was lawful when it was offered; its worker knows only that its lease had expired."""
    offer = await gate.leased()

    async def begin_late() -> None:
        gate.skip(1.0)
        await gate.beside().as_worker().start_task(**under(offer))
        gate.skip(400.0)
        if away:        # so that this can be settled only later, by any process
            stub.answer = lambda receipt: CUT
    stub.do_meanwhile("task.completed", begin_late)

    with refused("lease_invalid_or_expired", reason="expired"):
        await gate.as_worker().complete(**under(offer), artifacts=FILE)
    stub.answer = stub.store
    assert len(await gate.backend.page(gate.tenant_id, OutboxFilter("", 10, "offered"))) == away
    await look_later(await strict() if away else gate)
    await stub.until(lambda: "system.anomaly" in stub.types())

    assert stub.one("task.completed")["receipt_id"] in list_undone(stub.taken)
    assert (await gate.task(offer.task_id)).status != "succeeded"


async def test_a_task_that_another_process_has_withdrawn_meanwhile_is_not_committed(
        gate: Gate, stub: Losing, strict: Callable[..., Any]) -> None:
    other = await strict()
    stub.do_meanwhile("task.assigned", lambda: look_later(other))

    with refused("database_unavailable"):
        await gate.as_agent().create_task(type="demo", payload=None)
    await stub.until(lambda: "task.canceled" in stub.types())

    assert stub.one("task.assigned")["receipt_id"] in list_undone(stub.taken)
    assert (await gate.as_agent().list_tasks()).tasks == []


async def test_a_bulk_that_has_ended_counts_nothing_more(gate: Gate, stub: Losing) -> None:
    """What it was about to cancel was leased meanwhile, which its filter leaves out."""
    leased, queued = await gate.create(), await gate.create()
    confirmation = (await gate.as_admin().preview_bulk(action="cancel", status="queued", reason="late")).confirmation
    stub.do_meanwhile("task.canceled", lambda: gate.beside().claim("w2"))

    record = await gate.as_admin().run_bulk(confirmation=confirmation)
    await look_later(gate)

    assert (record.done, record.skipped, record.ended) == (1, 1, True)
    assert await gate.as_admin().get_bulk(bulk_id=record.bulk_id) == record
    assert [(await gate.task(task_id)).status for task_id in (leased, queued)] == ["leased", "canceled"]


async def test_an_adopted_end_has_what_its_call_asked_for_and_its_receipt_does_not_tell(
        gate: Gate, stub: Losing) -> None:
    """A checkpoint for the next worker, and a limit that is stopped: a repeat of the call would change nothing."""
    await gate.as_admin().set_limit(name="openai", concurrency_total=5)
    parked, failed, waiting = [await gate.create(type, limits={"openai": ""}) for type in ("parked", "failed", "waits")]
    first, second = [await gate.claim(accept_types=[type]) for type in ("parked", "failed")]
    assert first is not None
    assert second is not None
    await lose(stub, "lease.expired", gate.as_worker().release_lease(
        **under(first), after_seconds=5, checkpoint={"page": 2}, reason="busy"))
    await lose(stub, "task.failed", gate.as_worker().fail(
        **under(second), error="429", retryable=True, retry_after_seconds=3600, stop_limit="openai"))

    await look_later(gate)

    assert await gate.claim(accept_types=["waits"]) is None
    assert (await gate.task(waiting)).status == (await gate.task(failed)).status == "queued"
    await gate.as_admin().set_limit(name="openai", concurrency_total=5)
    gate.skip(3600)
    again = await gate.claim(accept_types=["parked"])
    assert again is not None
    assert (again.task_id, bytes(again.progress)) == (parked, b'{"page":2}')


async def test_an_adopted_end_of_many_has_used_what_its_worker_told(gate: Gate, stub: Losing) -> None:
    await gate.as_admin().set_limit(name="tokens", rate={"count": 100, "seconds": 86_400})
    for _ in range(2):
        await gate.create(limits={"tokens": ""})
    offer = await gate.claim()
    assert offer is not None
    await lose(stub, "task.completed", gate.as_worker().complete_tasks(
        tasks=[{**under(offer), "artifacts": FILE, "cost": 100}]))

    await look_later(gate)

    assert (await gate.task(offer.task_id)).status == "succeeded"
    assert await gate.claim() is None


async def test_a_cancellation_of_a_bulk_that_is_adopted_is_counted_by_the_bulk(gate: Gate, stub: Losing) -> None:
    tasks = [await gate.create() for _ in range(3)]
    confirmation = (await gate.as_admin().preview_bulk(action="cancel", reason="late")).confirmation
    await lose(stub, "task.canceled", gate.as_admin().run_bulk(confirmation=confirmation))

    await look_later(gate)
    record = await gate.as_admin().run_bulk(confirmation=confirmation)

    assert [(await gate.task(task_id)).status for task_id in tasks] == ["canceled"] * 3
    assert (record.done, record.skipped, record.refused, record.ended) == (3, 0, 0, True)
    assert stub.types().count("task.canceled") == 3


async def test_a_bulk_that_meets_its_own_cancellations_at_the_ledger_counts_them_once(
        gate: Gate, stub: Losing) -> None:
    """It has read its batch before they were adopted."""
    tasks = [await gate.create() for _ in range(3)]
    confirmation = (await gate.as_admin().preview_bulk(action="cancel", reason="late")).confirmation
    await lose(stub, "task.canceled", gate.as_admin().run_bulk(confirmation=confirmation))

    record = await gate.as_admin().run_bulk(confirmation=confirmation)

    assert [(await gate.task(task_id)).status for task_id in tasks] == ["canceled"] * 3
    assert (record.done, record.skipped, record.refused, record.ended) == (3, 0, 0, True)
    assert stub.types().count("task.canceled") == 3


LATEST: dict[str, Any] = {"type": "demo", "unique": {"key": "k", "on_conflict": "keep_latest"}}


async def test_what_cannot_be_adopted_is_told_as_overtaken_also_after_a_crash_in_the_middle(
        gate: Gate, stub: Losing, strict: Callable[..., Any]) -> None:
    """A cancellation by another task's creation names that task in its receipt, so it cannot be adopted alone."""
    old = await gate.as_agent().create_task(**LATEST, payload=1)
    await lose(stub, "task.canceled", gate.as_agent().create_task(**LATEST, payload=2))
    [canceled] = [receipt for receipt in stub.taken if receipt["receipt_type"] == "task.canceled"
                  and receipt["task_id"] == old.task_id]
    answer, stub.answer = stub.answer, lambda receipt: (503, {}, "away")
    gate.skip(REPEAT_SECONDS + 1)
    assert gate.ledger.strict is not None
    await gate.ledger.strict.look()
    stub.answer = answer
    other = await strict()

    await look_later(other)
    await stub.until(lambda: "system.anomaly" in stub.types())

    assert stub.one("system.anomaly")["body"]["details"]["receipt_id"] == canceled["receipt_id"]
    assert (await other.task(old.task_id)).status == "queued"


async def test_what_is_decided_otherwise_the_second_time_has_ids_of_its_own(gate: Gate, stub: Losing) -> None:
    """A ledger refuses other bytes under the same id, and the gate would forget that it has the first ones."""
    old, beside, between = await gate.as_agent().create_task(**LATEST, payload=1), gate.beside(), list[str]()

    async def answer(receipt: dict[str, Any]) -> Answer:
        if receipt["body"].get("supersedes") == old.task_id and not between:
            between.append((await beside.as_agent().create_task(**LATEST, payload="between")).task_id)
        if any(receipt["receipt_id"] == other["receipt_id"] and receipt != other for other in stub.taken):
            return 409, {}, '{"error": "receipt_id_collision"}'
        return FINE
    stub.answer = answer

    new = await gate.as_agent().create_task(**LATEST, payload=2)
    await look_later(gate)
    await stub.until(lambda: "system.anomaly" in stub.types())

    ours = [receipt for receipt in stub.taken if receipt["receipt_type"] == "task.assigned"]
    assert [receipt["body"].get("supersedes") for receipt in ours] == [None, old.task_id, *between]
    assert ours[-1]["task_id"] == new.task_id
    here = {row.receipt_id for row in await gate.backend.page(gate.tenant_id, Rows(Receipt))}
    assert {receipt["receipt_id"] for receipt in stub.taken} - here == list_undone(stub.taken)


async def test_an_end_that_concerns_another_task_is_adopted_with_it(gate: Gate, stub: Losing) -> None:
    """Its parent counts it, and the task that waits for its key is offered: neither stands in the receipt."""
    parent = await gate.create("family")
    unique = {"key": "k", "on_conflict": "keep_latest"}
    child = await gate.create(parent_task_id=parent, unique=unique, priority=1)
    offer = await gate.claim()
    assert offer is not None
    waiting = await gate.create(unique=unique)
    await lose(stub, "task.completed", gate.as_worker().complete(**under(offer), artifacts=FILE))

    await look_later(gate)

    assert offer.task_id == child
    assert (await gate.task(child)).status == "succeeded"
    family = (await gate.task(parent)).children
    assert family
    assert (family.open, family.succeeded) == (0, 1)
    assert (await gate.task(waiting)).held is None


async def test_an_adopted_end_makes_room_in_the_quotas_of_its_tenant(strict: Callable[..., Any], stub: Losing) -> None:
    gate = await strict(security=SecuritySettings(rate_limiting=RateLimiting(enabled=True)),
                        rate_limits=RateLimits(free_tier=Tier(concurrent_leases=1)))
    for _ in range(2):
        await gate.create()
    offer = await gate.claim()
    await lose(stub, "task.completed", gate.as_worker().complete(**under(offer), artifacts=FILE))

    await look_later(gate)

    assert await gate.claim() is not None


async def test_an_adopted_claim_counts_in_its_rate(gate: Gate, stub: Losing) -> None:
    await gate.as_admin().set_limit(name="api", rate={"count": 1, "seconds": 600})
    first, second = [await gate.create(limits={"api": ""}) for _ in range(2)]
    await lose(stub, "task.accepted", gate.claim(claim_id="c"))

    offer = await gate.claim(claim_id="c")

    assert offer is not None
    assert offer.task_id == first
    assert await gate.claim() is None
    assert (await gate.task(second)).status == "queued"


async def test_a_repeated_creation_takes_its_key_in_the_batch_in_which_the_other_task_gives_it_up(
        gate: Gate, stub: Losing) -> None:
    """Its receipt is older than that task, which a bulk has run again; the judge of histories must not mind."""
    ask = {"type": "demo", "payload": 1, "unique": {"key": "k", "on_conflict": "refuse"}}
    ada, new = gate.as_agent(), {**ask, "idempotency_key": "x"}
    ended = await ada.create_task(**ask)
    await ada.cancel_task(task_id=ended.task_id)
    await lose(stub, "task.assigned", ada.create_task(**new))
    gate.skip(1.0)
    preview = await gate.as_admin().preview_bulk(action="rerun", type="demo")
    await gate.as_admin().run_bulk(confirmation=preview.confirmation)
    [again] = (await gate.as_admin().list_tasks(status="queued")).tasks
    with refused("unique_conflict", task_id=again.task_id):
        await ada.create_task(**new)
    gate.skip(1.0)

    _, made = await asyncio.gather(ada.cancel_task(task_id=again.task_id), ada.create_task(**new))

    rows = await read_checked_rows(gate.backend, gate.tenant_id)
    bodies = {receipt["receipt_id"]: json.dumps(receipt["body"]) for receipt in stub.taken}
    rows[Receipt] = [replace(row, body=row.body or bodies[row.receipt_id]) for row in rows[Receipt]]
    assert made.task_id in {row.task_id for row in rows[Task]}
    assert violations([], {gate.tenant_id: assemble(rows)}, {"UNIQUE"}) == []


async def test_a_process_does_not_forget_what_another_one_has_offered_meanwhile(
        gate: Gate, stub: Losing, strict: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is not there for the first; it is there again for the second, which repeats the call and dies."""
    other, asked = await strict(), {"type": "demo", "payload": 1, "idempotency_key": "k"}

    async def send(tenant_id: str, content: bytes) -> None:
        await lose(stub, "task.assigned", other.as_agent().create_task(**asked))
        raise Outage("connection refused", untaken=True)
    monkeypatch.setattr(gate.ledger.sink, "send", send)
    with refused("receipt_ledger_unavailable"):
        await gate.as_agent().create_task(**asked)

    await look_later(other)
    await stub.until(lambda: "task.canceled" in stub.types())

    assert list_undone(stub.taken) >= {receipt["receipt_id"] for receipt in stub.taken}
