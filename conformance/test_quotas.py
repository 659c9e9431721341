"""Quotas: exact limits per tenant, also for concurrent calls (spec 21.6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.json import decode

from asyncgate import Caller, Engine, Needs, Work
from asyncgate.conformance import harness
from asyncgate.parts.extensions import engine_over
from asyncgate.parts.model import errors, settings, stored, wire, wire_admin

pytestmark = pytest.mark.anyio
FOREVER = 4e9


def limited(**tier: Any) -> dict[str, Any]:
    """Return settings with only these limits for every tenant."""
    return {"security": settings.SecuritySettings(rate_limiting=settings.RateLimiting(enabled=True)),
            "rate_limits": settings.RateLimits(free_tier=settings.Tier(**tier))}


async def used(gate: harness.Gate) -> stored.Usage:
    """Return the stored usage of the tenant."""
    usage = await gate.backend.record(gate.tenant_id, stored.Usage)
    assert usage is not None
    return usage


async def counted_anew(gate: harness.Gate) -> stored.Usage:
    """Return the usage of the tenant, counted from its rows."""
    seen: list[stored.Usage | None] = []
    await gate.backend.transact(gate.tenant_id, Needs(recount=True),
                                lambda work: seen.append(work.find_record(stored.Usage)))
    assert seen[-1] is not None
    return seen[-1]


async def keep(gate: harness.Gate, row: stored.Account | stored.Usage) -> None:
    """Store the account or the usage of the tenant."""
    def change(engine: Engine, work: Work, caller: Caller, ask: Any) -> None:
        work.keep_record(row)
    await gate.engine.write(change, None,
                            Caller(gate.tenant_id, wire.Principal("system", "test"), "system", frozenset()),
                            wire.Ask())


async def test_a_task_too_many_is_refused_until_one_has_ended(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(**limited(active_tasks=2))
    await gate.create()
    await gate.create()

    async with gate.unchanged():
        with harness.refused("quota_exceeded", quota="active_tasks", limit=2):
            await gate.create()

    offer = await gate.claim()
    assert offer is not None
    await gate.as_worker().complete(**harness.under(offer), artifacts=[{"uri": "file:///out"}])
    await gate.create()


async def test_of_many_that_ask_at_once_as_many_get_in_as_fit(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(**limited(active_tasks=10))
    for _ in range(9):
        await gate.create()

    outcomes = await asyncio.gather(*(gate.create() for _ in range(50)), return_exceptions=True)

    assert sum(isinstance(outcome, str) for outcome in outcomes) == 1
    assert {outcome.code for outcome in outcomes if isinstance(outcome, errors.GateError)} == {"quota_exceeded"}
    assert (await used(gate)).active == 10


async def test_of_a_batch_the_first_tasks_get_in(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(**limited(active_tasks=3))

    made = await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 5)

    assert [item.error.error if item.error else item.status for item in made.results] == [
        "queued"] * 3 + ["quota_exceeded"] * 2


async def test_a_repeated_creation_needs_no_room(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(**limited(active_tasks=1))
    first = await gate.create(idempotency_key="once")

    assert await gate.create(idempotency_key="once") == first


async def test_at_its_limit_of_leases_a_claim_comes_back_empty(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(**limited(concurrent_leases=2))
    for _ in range(4):
        await gate.create()

    offers = (await gate.as_worker().lease_next(max_tasks=10)).tasks

    assert len(offers) == 2
    assert await gate.claim("w2") is None
    await gate.as_worker().release_lease(**harness.under(offers[0]))
    assert await gate.claim("w2") is not None


@pytest.mark.parametrize("end", ["complete", "release_lease", "cancel"])
async def test_a_waiting_claim_is_called_when_the_tenant_has_room_for_leases_again(
        make_gate: Callable[..., harness.Gate], end: str) -> None:
    gate = make_gate(**limited(concurrent_leases=1))
    offer, other = await gate.leased("w1"), await gate.create(priority=1)
    claim = asyncio.ensure_future(gate.claim("w2", wait_seconds=30))
    while not gate.engine.waiting.count or gate.engine.batches.flights or gate.engine.batches.waiting:  # noqa: ASYNC110
        await asyncio.sleep(0)

    if end == "cancel":
        await gate.as_agent().cancel_task(task_id=offer.task_id)
    else:
        await getattr(gate.as_worker("w1"), end)(**harness.under(offer))

    async with asyncio.timeout(harness.PATIENCE):
        given = await claim
    assert given is not None
    assert given.task_id == other


async def test_a_claim_that_the_limit_leaves_without_tasks_says_so(make_gate: Callable[..., harness.Gate]) -> None:
    """21.6.2: no lease is granted above the limit, and the answer says why it is empty."""
    gate = make_gate(**limited(concurrent_leases=1))
    for _ in range(2):
        await gate.create()

    first = await gate.as_worker().lease_next(max_tasks=1)
    second = await gate.as_worker("w2").lease_next(max_tasks=1)

    assert (len(first.tasks), first.warnings) == (1, UNSET)
    assert (second.tasks, [text.partition(":")[0] for text in second.warnings]) == (
        [], ["the tenant has reached its limit of leases (concurrent_leases)"])


async def test_claims_at_once_never_pass_the_limit(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(**limited(concurrent_leases=5))
    for _ in range(20):
        await gate.create()

    offers = await asyncio.gather(*(gate.claim(f"w{number}") for number in range(20)))

    assert sum(offer is not None for offer in offers) == 5


async def test_a_lost_lease_makes_room(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(**limited(concurrent_leases=1))
    await gate.create()
    await gate.create()
    offer = await gate.claim()
    assert offer is not None
    assert await gate.claim("w2") is None

    await gate.lose(offer)

    assert await gate.claim("w2") is not None


async def test_no_room_for_receipts_refuses_new_tasks_and_lets_old_ones_end(make_gate: Callable[...,
                                                                                                harness.Gate]) -> None:
    offer = await (free := make_gate()).leased()
    full = harness.Gate(engine_over(free.backend,
                                    settings.Settings(instance_id="asyncgate-1", **limited(receipt_storage_gb=0))),
                        free.tenant_id)

    with harness.refused("quota_exceeded", quota="receipt_storage_gb"):
        await full.create()
    await full.as_worker().complete(**harness.under(offer), artifacts=[{"uri": "file:///out"}])

    assert "receipts use" in (await full.as_agent().bootstrap()).warnings[0]
    assert (await full.task(offer.task_id)).status == "succeeded"


@pytest.mark.parametrize(("used", "warned"), [(790_000_000, False), (810_000_000, True)])
async def test_bootstrap_warns_when_the_room_for_receipts_comes_to_its_end(
        make_gate: Callable[..., harness.Gate], used: int, warned: bool) -> None:
    gate = make_gate(**limited(receipt_storage_gb=1))
    await gate.create()

    await keep(gate, stored.Usage(active=1, receipt_bytes=used))

    assert bool((await gate.as_agent().bootstrap()).warnings) is warned
    await gate.create()     # below the limit


async def test_a_task_has_its_place_among_the_ended_ones_from_the_start(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(**limited(terminal_tasks=3))
    await gate.finished()
    waiting, canceled = await gate.create(), await gate.create()

    async with gate.unchanged():
        with harness.refused("quota_exceeded", quota="terminal_tasks", limit=3):
            await gate.create()

    offer = await gate.claim()
    assert offer is not None
    await gate.as_worker().fail(**harness.under(offer, error="no"))
    await gate.as_agent().cancel_task(task_id=canceled)
    assert ((await gate.task(waiting)).status, (await gate.task(canceled)).status) == ("failed", "canceled")
    with harness.refused("quota_exceeded", quota="terminal_tasks", limit=3):
        await gate.create()
    assert await used(gate) == await counted_anew(gate)
    assert (await used(gate)).terminal == 3


async def test_of_many_that_ask_at_once_as_many_get_in_as_may_ever_end(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(**limited(terminal_tasks=10))
    for number in range(5):
        await gate.finished(f"w{number}")
    ended = [await gate.create() for _ in range(3)]

    outcomes = await asyncio.gather(*(gate.create() for _ in range(20)),
                                    *(gate.as_agent().cancel_task(task_id=task_id) for task_id in ended),
                                    return_exceptions=True)

    assert sum(isinstance(outcome, str) for outcome in outcomes) == 2
    assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)
                and getattr(outcome, "code", "") != "quota_exceeded"]
    assert ((await used(gate)).active, (await used(gate)).terminal) == (2, 8)


def talkative(**more: Any) -> dict[str, Any]:
    """Return settings with a receipt per progress report, and at most five receipts per task."""
    return limited(receipts_per_task=5) | {"progress_receipts": True, "expiry_jitter_seconds": 0.0} | more


async def about(gate: harness.Gate, task_id: str) -> list[str]:
    """Return the types of a task's receipts, oldest first."""
    listed = await gate.as_admin().list_receipts(task_id=task_id)
    return [receipt.receipt_type for receipt in listed.receipts]


async def test_progress_too_much_is_refused_and_the_task_ends_all_the_same(make_gate: Callable[...,
                                                                                               harness.Gate]) -> None:
    gate = make_gate(**talkative())
    offer = await gate.leased()
    for step in range(3):
        await gate.as_worker().report_progress(**harness.under(offer, progress=step))

    async with gate.unchanged():
        with harness.refused("quota_exceeded", quota="receipts_per_task", limit=5):
            await gate.as_worker().report_progress(**harness.under(offer, progress=3))

    await gate.as_worker().renew_lease(lease_id=offer.lease_id)
    await gate.as_worker().complete(**harness.under(offer))
    await gate.as_agent().attach_artifacts(task_id=offer.task_id, artifacts=[{"uri": "file:///out"}])
    assert (await gate.task(offer.task_id)).obligation_open is False
    assert (await about(gate, offer.task_id))[5:] == [
        "task.completed", "task.result_ready", "system.anomaly", "task.completed", "task.result_ready"]


async def test_of_much_progress_at_once_as_much_is_told_as_fits(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(**talkative())
    offer = await gate.leased()

    outcomes = await asyncio.gather(*(gate.as_worker().report_progress(**harness.under(offer, progress=step))
                                      for step in range(20)), return_exceptions=True)

    assert sum(isinstance(outcome, errors.GateError) and outcome.code == "quota_exceeded" for outcome in outcomes) == 17
    assert (await about(gate, offer.task_id)).count("task.progress") == 3


async def test_who_has_acknowledged_already_is_not_refused(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(**limited(receipts_per_task=2))
    task_id = await gate.create()
    [assigned] = (await gate.as_agent().list_receipts(task_id=task_id)).receipts
    first = await gate.as_agent().ack_receipt(receipt_id=assigned.receipt_id)

    again = await gate.as_agent().ack_receipt(receipt_id=assigned.receipt_id)
    with harness.refused("quota_exceeded", quota="receipts_per_task", limit=2):
        await gate.as_admin().ack_receipt(receipt_id=first.receipt_id)

    assert again.receipt_id == first.receipt_id
    assert await about(gate, task_id) == ["task.assigned", "receipt.acknowledged"]


async def test_a_task_with_receipts_enough_opens_no_schedule_and_closes_one(make_gate: Callable[...,
                                                                                                harness.Gate]) -> None:
    gate = make_gate(**limited(receipts_per_task=3))
    offer = await gate.leased(type="schedule.create")
    made = await gate.as_worker().emit_receipt(receipt_type="schedule.created", schedule_id="s1",
                                               **harness.under(offer))

    with harness.refused("quota_exceeded", quota="receipts_per_task", limit=3):
        await gate.as_worker().emit_receipt(receipt_type="schedule.created", schedule_id="s2", **harness.under(offer))
    again = await gate.as_worker().emit_receipt(receipt_type="schedule.created", schedule_id="s1",
                                                **harness.under(offer))
    await gate.as_worker().emit_receipt(receipt_type="schedule.deleted", parents=[made.receipt_id])

    assert again.receipt_id == made.receipt_id
    assert (await about(gate, offer.task_id))[-1] == "schedule.deleted"


LOSSES = ["release", "fail", "lose"]


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_task_with_receipts_enough_is_held_when_its_lease_ends(
        make_gate: Callable[..., harness.Gate], loss: str) -> None:
    gate = make_gate(**talkative())
    offer = await gate.leased(max_attempts=100, retry_backoff_seconds=0)
    await lost_by(loss, gate, offer)
    again = await gate.claim()
    assert again is not None

    await lost_by(loss, gate, again)

    assert (await gate.task(offer.task_id)).held == "receipts_per_task"
    assert await gate.claim() is None
    [told] = [anomaly for anomaly in await gate.anomalies(offer.task_id) if anomaly["kind"] == "task_held"]
    assert told["details"]["held"] == "receipts_per_task"
    await gate.as_agent().release_hold(task_id=offer.task_id)
    last = await gate.claim()
    assert last is not None
    await gate.as_worker().complete(**harness.under(last), artifacts=[{"uri": "file:///out"}])
    assert (await gate.task(offer.task_id)).obligation_open is False


async def lost_by(loss: str, gate: harness.Gate, offer: wire.Offer) -> None:
    """Make a worker lose its lease."""
    if loss == "lose":
        await gate.lose(offer)
    elif loss == "fail":
        await gate.as_worker().fail(**harness.under(offer, retryable=True, error="no"))
    else:
        await gate.as_worker().release_lease(**harness.under(offer))


async def test_what_was_there_before_limits_counts(make_gate: Callable[..., harness.Gate]) -> None:
    before = make_gate()
    await before.finished()
    await before.leased()
    await before.create()
    gate = harness.Gate(engine_over(before.backend,
                                    settings.Settings(instance_id="asyncgate-1", **limited(active_tasks=3))),
                        before.tenant_id)

    await gate.create()
    with harness.refused("quota_exceeded"):
        await gate.create()

    assert await used(gate) == await counted_anew(gate)


async def test_what_is_kept_is_what_there_is(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(**limited())
    lost = await gate.leased()
    await gate.lose(lost)
    again = await gate.claim("w2")
    assert again is not None
    await gate.as_worker("w2").fail(**harness.under(again, retryable=True, retry_after_seconds=0, error="no"))
    failed = await gate.claim("w3")
    assert failed is not None
    await gate.as_worker("w3").fail(**harness.under(failed, error="no"))
    await gate.as_agent().cancel_task(task_id=await gate.create())
    await gate.as_agent().cancel_task(task_id=(await gate.leased("w4")).task_id)
    await gate.finished("w5")
    await gate.leased("w6")

    assert await used(gate) == await counted_anew(gate)
    assert ((await used(gate)).active, (await used(gate)).leases, (await used(gate)).terminal) == (1, 1, 4)


async def test_who_is_exempt_is_not_limited(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(**limited(active_tasks=0, concurrent_leases=0, terminal_tasks=0, receipts_per_task=0))
    with harness.refused("quota_exceeded"):
        await gate.create()

    await keep(gate, stored.Account("acme", 0.0, exempt_until=FOREVER, exempt_why="contract"))

    await gate.create()
    assert await gate.claim() is not None


async def test_tenants_have_their_own(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(**limited(active_tasks=1))
    await gate.create()

    await gate.stranger().create()


# A tenant's own limits of payloads and leases (21.6.1, 21.6.2).


@pytest.fixture
def gate(make_gate: Callable[..., harness.Gate]) -> harness.Gate:
    """A gate that counts quotas: each batch has the account; elsewhere the guard has it (test_admin.py)."""
    return make_gate(**limited())


def operator_of(gate: harness.Gate) -> harness.View:
    """Return the operator, who sets the limits of all tenants."""
    return harness.Gate(gate.engine, gate.engine.settings.default_tenant_id).as_admin()


async def limit(gate: harness.Gate, **own: int) -> wire_admin.Limits:
    """Set limits of the tenant."""
    set_to: wire_admin.Limits = await operator_of(gate).set_limits(tenant=gate.tenant_id, **own)
    return set_to


async def claim_every(gate: harness.Gate, **ask: Any) -> float:
    """Create a task and claim it; return after how many seconds its lease is to be renewed: after a third of it."""
    await gate.create()
    offer = await gate.claim(**ask)
    assert offer is not None
    return offer.renew_every_seconds


async def test_a_payload_above_the_limit_of_its_tenant_is_refused_with_that_limit(gate: harness.Gate) -> None:
    await limit(gate, max_payload_bytes=12)
    fits, long = "x" * 10, "x" * 11

    async with gate.unchanged():
        with harness.refused("payload_too_large", quota="max_payload_bytes", limit=12) as refusal:
            await gate.create(payload=long)
    made = await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": text} for text in (long, fits)])

    assert "13 bytes; the limit of this tenant is 12" in str(refusal.value)
    assert [item.error and (item.error.error, item.error.quota, item.error.limit) for item in made.results] == [
        ("payload_too_large", "max_payload_bytes", 12), None]
    await gate.create(payload=fits)
    await gate.stranger().create(payload=long)


async def test_bytes_count_against_the_limit_of_payloads_and_not_letters(gate: harness.Gate) -> None:
    await limit(gate, max_payload_bytes=12)

    await gate.create(payload="éééée")
    with harness.refused("payload_too_large"):
        await gate.create(payload="ééééée")


async def test_a_repeated_creation_has_its_task_whatever_the_limit_is_now(gate: harness.Gate) -> None:
    first = await gate.create(idempotency_key="once", payload="x" * 50)
    await limit(gate, max_payload_bytes=10)

    assert await gate.create(idempotency_key="once", payload="x" * 50) == first
    with harness.refused("payload_too_large"):
        await gate.create(idempotency_key="twice", payload="x" * 50)


async def test_a_task_is_run_again_only_with_a_payload_within_the_limit_of_now(gate: harness.Gate) -> None:
    task_id = await gate.create(payload="x" * 50)
    await gate.as_agent().cancel_task(task_id=task_id)
    await limit(gate, max_payload_bytes=10)

    with harness.refused("payload_too_large", quota="max_payload_bytes"):
        await gate.as_agent().rerun_task(task_id=task_id)
    await limit(gate, max_payload_bytes=-1)
    await gate.as_agent().rerun_task(task_id=task_id)


@pytest.mark.parametrize(("wished", "gets"), [({}, 90), ({"lease_ttl_seconds": 600}, 90),
                                              ({"lease_ttl_seconds": 30}, 30)])
async def test_a_lease_lasts_no_longer_than_its_tenant_may_have(gate: harness.Gate, wished: dict[str, int],
                                                                gets: int) -> None:
    await limit(gate, max_lease_ttl_seconds=90)

    assert await claim_every(gate, **wished) == pytest.approx(gets / 3)
    assert await claim_every(gate.stranger(), lease_ttl_seconds=600) == pytest.approx(200)


async def test_the_wish_of_a_task_is_clamped_like_that_of_a_worker(gate: harness.Gate) -> None:
    await limit(gate, max_lease_ttl_seconds=90)
    await gate.create(timeouts={"lease_ttl_seconds": 600})

    offer = await gate.claim(lease_ttl_seconds=None)

    assert offer is not None
    assert offer.renew_every_seconds == pytest.approx(30)


async def test_a_renewal_is_clamped_to_what_its_tenant_may_have(gate: harness.Gate) -> None:
    await limit(gate, max_lease_ttl_seconds=90)
    await gate.create()
    offer = await gate.claim(lease_ttl_seconds=30)
    assert offer is not None

    renewed = await gate.as_worker().renew_lease(**harness.under(offer, extend_by_seconds=600))

    assert renewed.renew_every_seconds == pytest.approx(30)


async def test_a_lease_from_before_goes_on_to_its_end_and_is_then_renewed_for_less(gate: harness.Gate) -> None:
    await gate.create()
    offer = await gate.claim(lease_ttl_seconds=600)
    assert offer is not None
    await limit(gate, max_lease_ttl_seconds=60)

    at_once = await gate.as_worker().renew_lease(**harness.under(offer))
    gate.skip(590)
    later = await gate.as_worker().renew_lease(**harness.under(offer))

    assert at_once.expires_at == offer.expires_at
    assert later.renew_every_seconds == pytest.approx(20)


async def test_a_change_of_limits_holds_for_the_next_call(gate: harness.Gate) -> None:
    for most, fits in [(10, False), (-1, True), (12, False), (60, True)]:
        await limit(gate, max_payload_bytes=most)
        if fits:
            await gate.create(payload="x" * 50)
        else:
            with harness.refused("payload_too_large", limit=most):
                await gate.create(payload="x" * 50)


async def test_another_process_has_the_limits_from_its_first_call_on(gate: harness.Gate) -> None:
    await limit(gate, max_payload_bytes=10, max_lease_ttl_seconds=60)
    await gate.create()

    other = gate.beside(**limited())

    offer = await other.claim()
    assert offer is not None
    assert offer.renew_every_seconds == pytest.approx(20)
    with harness.refused("payload_too_large", limit=10):
        await gate.beside(**limited()).create(payload="x" * 50)


async def test_limits_of_payloads_and_leases_are_shown_and_never_above_those_of_the_gate(
        make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(max_payload_bytes=5000, max_lease_ttl_seconds=400, **limited())
    admin = gate.as_admin()

    def told(limits: wire_admin.Limits) -> tuple[int, int]:
        return limits.max_payload_bytes, limits.max_lease_ttl_seconds

    assert told(await admin.get_limits()) == (5000, 400)
    assert told(await limit(gate, max_payload_bytes=1000, max_lease_ttl_seconds=60)) == (1000, 60)
    assert told(await limit(gate, max_payload_bytes=2000)) == (2000, 60)
    assert told(await admin.get_limits()) == (2000, 60)
    for wrong in ({"max_payload_bytes": 5001}, {"max_lease_ttl_seconds": 401}, {"max_payload_bytes": 0},
                  {"max_lease_ttl_seconds": 0}, {"max_payload_bytes": -2}):
        with harness.refused("invalid_request"):
            await limit(gate, **wrong)
    assert told(await limit(gate, max_lease_ttl_seconds=-1)) == (2000, 400)
    lowered = gate.beside(max_payload_bytes=1500, **limited())
    assert told(await lowered.as_admin().get_limits()) == (1500, 1800)
    with harness.refused("payload_too_large", limit=1500):
        await lowered.create(payload="x" * 1600)


async def test_who_is_exempt_has_the_limits_of_the_gate(gate: harness.Gate) -> None:
    await limit(gate, max_payload_bytes=10, max_lease_ttl_seconds=60)
    await operator_of(gate).set_limits(tenant=gate.tenant_id, exempt_until="2100-01-01T00:00:00Z", reason="contract")

    await gate.create(payload="x" * 50)

    assert await claim_every(gate, lease_ttl_seconds=600) == pytest.approx(200)


async def test_only_the_operator_sets_limits_and_the_audit_log_says_which(gate: harness.Gate) -> None:
    with harness.refused("forbidden"):
        await gate.as_admin().set_limits(tenant=gate.tenant_id, max_payload_bytes=10)

    await operator_of(gate).set_limits(tenant=gate.tenant_id, max_payload_bytes=10, reason="they send films")

    [line] = (await gate.as_admin().list_audit(event="own_limits_changed")).lines
    details = decode(line.details)
    assert (details["max_payload_bytes"], details["reason"], "max_lease_ttl_seconds" in details) == (
        10, "they send films", False)
