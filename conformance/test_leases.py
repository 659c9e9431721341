"""Leases: fences, renewal, release, and refusals without a live lease (spec 4.2, H.4)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from asyncgate import TASKS_AT_ONCE
from asyncgate.conformance import harness
from asyncgate.parts.model import queries, wire

pytestmark = pytest.mark.anyio

VERBS = ["renew_lease", "start_task", "report_progress", "complete", "fail", "release_lease"]


async def expect(gate: harness.Gate, verb: str, offer: wire.Offer, reason: str, worker: str = "w1",
                 **more: Any) -> None:
    """Expect that a verb with this lease is refused for this reason and changes nothing."""
    async with gate.unchanged():
        with harness.refused("lease_invalid_or_expired", reason=reason):
            await getattr(gate.as_worker(worker), verb)(**harness.NEEDED.get(verb, {}), **harness.under(offer, **more))


async def test_the_fence_rises_by_one_with_every_lease(gate: harness.Gate) -> None:
    offer = await gate.leased()
    for fence in (1, 2, 3):
        assert offer.fence == fence == (await gate.task(offer.task_id)).fence
        await gate.lose(offer)
        again = await gate.claim()
        assert again is not None
        offer = again


@pytest.mark.parametrize("verb", VERBS)
async def test_a_lease_id_that_nobody_has_is_unknown(gate: harness.Gate, verb: str) -> None:
    offer = await gate.leased()

    async with gate.unchanged():
        with harness.refused("lease_invalid_or_expired", reason="unknown"):
            await getattr(gate.as_worker(), verb)(**harness.NEEDED.get(verb, {}), task_id=offer.task_id,
                                                  lease_id="11111111-1111-4111-8111-111111111")


@pytest.mark.one_store
@pytest.mark.parametrize("verb", VERBS)
async def test_a_task_that_was_never_leased_has_an_unknown_lease(gate: harness.Gate, verb: str) -> None:
    task_id = await gate.create()

    async with gate.unchanged():
        with harness.refused("lease_invalid_or_expired", reason="unknown"):
            await getattr(gate.as_worker(), verb)(**harness.NEEDED.get(verb, {}), task_id=task_id, lease_id="none")


@pytest.mark.parametrize("verb", VERBS)
async def test_another_worker_cannot_act_under_a_lease_it_does_not_hold(gate: harness.Gate, verb: str) -> None:
    offer = await gate.leased("w1")

    await expect(gate, verb, offer, "unknown", worker="w2")


@pytest.mark.parametrize("verb", VERBS)
async def test_a_lease_that_has_run_out_can_do_nothing_before_the_sweep(gate: harness.Gate, verb: str) -> None:
    offer = await gate.leased()
    gate.skip(300)

    await expect(gate, verb, offer, "expired")


@pytest.mark.parametrize("verb", VERBS)
async def test_a_lease_that_has_run_out_can_do_nothing_after_the_sweep(gate: harness.Gate, verb: str) -> None:
    offer = await gate.leased()
    await gate.wait(301)

    await expect(gate, verb, offer, "expired")


@pytest.mark.parametrize("verb", VERBS)
async def test_a_superseded_lease_can_do_nothing(gate: harness.Gate, verb: str) -> None:
    offer = await gate.leased("w1")
    await gate.lose(offer)
    assert await gate.claim("w2") is not None

    await expect(gate, verb, offer, "superseded")


@pytest.mark.parametrize("verb", VERBS)
async def test_a_worker_whose_task_was_canceled_is_told_so(gate: harness.Gate, verb: str) -> None:
    offer = await gate.leased()
    await gate.as_agent().cancel_task(task_id=offer.task_id)

    await expect(gate, verb, offer, "canceled")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "complete"])
async def test_another_verb_after_the_end_is_told_completed(gate: harness.Gate, verb: str) -> None:
    offer = await gate.finished()

    await expect(gate, verb, offer, "completed")


@pytest.mark.parametrize("retryable", [True, False])
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "fail"])
async def test_another_verb_after_a_failure_is_told_failed(gate: harness.Gate, verb: str, retryable: bool) -> None:
    offer = await gate.leased()
    await gate.as_worker().fail(**harness.under(offer, error="x", retryable=retryable))

    await expect(gate, verb, offer, "failed")


@pytest.mark.parametrize("verb", VERBS)
async def test_a_verb_under_a_lease_that_a_question_has_ended_is_told_asked(gate: harness.Gate, verb: str) -> None:
    offer = await gate.leased()
    await gate.as_worker().request_input(**harness.under(offer, key="q", message="May I?"))

    await expect(gate, verb, offer, "asked")


@pytest.mark.one_store
@pytest.mark.parametrize("verb", VERBS)
async def test_a_wrong_fence_is_refused(gate: harness.Gate, verb: str) -> None:
    offer = await gate.leased()

    async with gate.unchanged():
        with harness.refused("lease_invalid_or_expired"):
            await getattr(gate.as_worker(), verb)(**harness.NEEDED.get(verb, {}),
                                                  **harness.under(offer, fence=offer.fence + 1))


@pytest.mark.one_store
@pytest.mark.parametrize("verb", VERBS)
async def test_the_right_fence_is_accepted(gate: harness.Gate, verb: str) -> None:
    offer = await gate.leased()

    assert (await getattr(gate.as_worker(), verb)(**harness.NEEDED.get(verb, {}),
                                                  **harness.under(offer, fence=offer.fence))).ok


@pytest.mark.one_store
@pytest.mark.parametrize("verb", VERBS)
async def test_another_instance_of_the_worker_does_not_hold_the_lease(gate: harness.Gate, verb: str) -> None:
    await gate.create()
    offer = (await gate.as_worker("w1", instance="one").lease_next()).tasks[0]

    async with gate.unchanged():
        with harness.refused("lease_invalid_or_expired", reason="unknown"):
            await getattr(gate.as_worker("w1", instance="two"), verb)(**harness.NEEDED.get(verb, {}),
                                                                      **harness.under(offer))

    assert (await getattr(gate.as_worker("w1", instance="one"), verb)(**harness.NEEDED.get(verb, {}),
                                                                      **harness.under(offer))).ok


@pytest.mark.one_store
@pytest.mark.parametrize("verb", VERBS)
async def test_a_task_that_does_not_exist_is_not_found(gate: harness.Gate, verb: str) -> None:
    with harness.refused("task_not_found"):
        await getattr(gate.as_worker(), verb)(**harness.NEEDED.get(verb, {}), task_id="no-such-task", lease_id="l")


async def test_a_renewal_runs_from_now(gate: harness.Gate) -> None:
    offer = await gate.leased()
    gate.skip(200)

    renewed = await gate.as_worker().renew_lease(**harness.under(offer))

    assert renewed.ok
    assert renewed.renew_every_seconds == pytest.approx(100)
    assert 270 < renewed.expires_at.timestamp() - gate.now() <= 300
    assert (await gate.task(offer.task_id)).lease_expires_at == renewed.expires_at
    gate.skip(200)
    assert (await gate.as_worker().complete(**harness.under(offer))).ok


@pytest.mark.one_store
@pytest.mark.parametrize(("asked", "given"), [(300, 300), (1800, 1800), (99999, 1800)])
async def test_a_renewal_is_clamped(gate: harness.Gate, asked: int, given: int) -> None:
    offer = await gate.leased()

    renewed = await gate.as_worker().renew_lease(**harness.under(offer, extend_by_seconds=asked))

    assert renewed.renew_every_seconds == pytest.approx(given / 3)


@pytest.mark.one_store
@pytest.mark.parametrize("seconds", [0, -5, 1.5, "60"])
async def test_a_renewal_by_nonsense_is_refused(gate: harness.Gate, seconds: Any) -> None:
    offer = await gate.leased()

    with harness.refused("invalid_request"):
        await gate.as_worker().renew_lease(**harness.under(offer, extend_by_seconds=seconds))


async def test_a_renewed_lease_survives_the_sweep_at_its_old_end(gate: harness.Gate) -> None:
    offer = await gate.leased()
    gate.skip(270)
    await gate.as_worker().renew_lease(**harness.under(offer))

    await gate.wait(200)

    assert (await gate.task(offer.task_id)).status == "leased"
    assert await gate.receipts(offer.task_id, "lease.expired") == []


@pytest.mark.one_store
@pytest.mark.parametrize("wished", [1, 10, 270])
async def test_a_renewal_never_shortens_a_lease(gate: harness.Gate, wished: int) -> None:
    offer = await gate.leased()

    renewed = await gate.as_worker().renew_lease(**harness.under(offer, extend_by_seconds=wished))

    assert renewed.expires_at == offer.expires_at
    assert 90 < renewed.renew_every_seconds <= 100
    await gate.wait(290)
    assert (await gate.task(offer.task_id)).status == "leased"
    assert (await gate.as_worker().complete(**harness.under(offer))).ok


@pytest.mark.one_store
@pytest.mark.parametrize(("claimed", "task", "length"), [
    (900, None, 900), (None, 900, 900), (60, 900, 60), (None, None, 300), (99999, None, 1800)])
async def test_a_renewal_without_a_wish_gives_as_much_as_the_lease_was_granted_for(
        gate: harness.Gate, claimed: int | None, task: int | None, length: int) -> None:
    await gate.create(timeouts={"lease_ttl_seconds": task} if task else None)
    offer = await gate.claim(lease_ttl_seconds=claimed)
    assert offer is not None

    for _ in range(2):      # also after an earlier renewal
        gate.skip(offer.renew_every_seconds)
        renewed = await gate.as_worker().renew_lease(**harness.under(offer))
        assert length - 15 < renewed.expires_at.timestamp() - gate.now() <= length
        assert renewed.renew_every_seconds == pytest.approx(length / 3, abs=0.1)
    gate.skip(length - 1)
    assert (await gate.as_worker().complete(**harness.under(offer))).ok


async def test_a_wish_of_one_renewal_does_not_change_the_length_of_the_lease(gate: harness.Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().renew_lease(**harness.under(offer, extend_by_seconds=600))
    gate.skip(500)

    renewed = await gate.as_worker().renew_lease(**harness.under(offer))

    assert 270 < renewed.expires_at.timestamp() - gate.now() <= 300


async def test_a_renewal_that_names_the_lease_only_finds_its_task(gate: harness.Gate) -> None:
    offer = await gate.leased()

    assert (await gate.as_worker().renew_lease(lease_id=offer.lease_id)).ok
    assert (await gate.renew_lease(lease_id=offer.lease_id)).ok
    with harness.refused("lease_invalid_or_expired", reason="unknown"):
        await gate.as_worker().renew_lease(lease_id="nobody-has-this")


async def test_a_limit_of_renewals_has_its_own_code(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(max_lease_renewals=2)
    offer = await gate.leased()
    for _ in range(2):
        await gate.as_worker().renew_lease(**harness.under(offer))

    async with gate.unchanged():
        with harness.refused("lease_renewal_limit"):
            await gate.as_worker().renew_lease(**harness.under(offer))

    assert (await gate.as_worker().complete(**harness.under(offer))).ok


async def test_a_lifetime_of_leases_has_its_own_code_and_clamps_before(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(max_lease_lifetime_seconds=400)
    offer = await gate.leased()
    gate.skip(200)

    renewed = await gate.as_worker().renew_lease(**harness.under(offer))

    acquired = offer.expires_at - timedelta(seconds=300)
    assert (renewed.expires_at - acquired).total_seconds() == pytest.approx(400, abs=1e-3)
    async with gate.unchanged():
        with harness.refused("lease_lifetime_limit"):
            await gate.as_worker().renew_lease(**harness.under(offer))
    assert (await gate.as_worker().complete(**harness.under(offer))).ok


async def test_a_claim_gets_no_lease_longer_than_a_lifetime(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(max_lease_lifetime_seconds=100)

    offer = await gate.leased()

    assert offer.renew_every_seconds == pytest.approx(100 / 3)


async def test_a_grace_lets_a_late_worker_finish(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(lease_grace_seconds=30)
    offer = await gate.leased()

    await gate.wait(310)

    assert (await gate.as_worker().complete(**harness.under(offer))).ok


async def test_a_released_task_is_offered_again_at_once_and_costs_nothing(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")

    released = await gate.as_worker("w1").release_lease(**harness.under(offer))

    assert (released.ok, released.status, released.requeued) == (True, "queued", True)
    task = await gate.task(offer.task_id)
    assert (task.attempt, task.expiries, task.next_eligible_at, task.leased_to) == (0, 0, None, None)
    again = await gate.claim("w2")
    assert again is not None
    assert (again.task_id, again.fence) == (offer.task_id, 2)


async def test_a_release_is_told_to_the_owner_with_its_reason(gate: harness.Gate) -> None:
    offer = await gate.leased()
    accepted = await gate.receipt(offer.task_id, "task.accepted")

    await gate.as_worker().release_lease(**harness.under(offer))

    told = await gate.receipt(offer.task_id, "lease.expired")
    assert harness.body(told)["reason"] == "released"
    assert told.parents == [accepted.receipt_id]
    assert (told.to.kind, told.to.id) == ("agent", "ada")


async def test_a_repeated_release_returns_its_first_outcome_and_writes_nothing(gate: harness.Gate) -> None:
    offer = await gate.leased()
    first = await gate.as_worker().release_lease(**harness.under(offer))

    async with gate.unchanged():
        assert await gate.as_worker().release_lease(**harness.under(offer)) == first


async def test_a_release_may_be_repeated_by_its_worker_only(gate: harness.Gate) -> None:
    offer = await gate.leased("w1")
    await gate.as_worker("w1").release_lease(**harness.under(offer))

    await expect(gate, "release_lease", offer, "unknown", worker="w2")


@pytest.mark.parametrize("how", [{}, {"after_seconds": 60}])
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "release_lease"])
async def test_a_released_lease_can_do_nothing(gate: harness.Gate, verb: str, how: dict[str, int]) -> None:
    offer = await gate.leased()
    await gate.as_worker().release_lease(**harness.under(offer, **how))

    await expect(gate, verb, offer, "released")


async def test_a_worker_finds_its_leases_after_a_restart(gate: harness.Gate) -> None:
    await gate.create(type="a")
    await gate.create(type="b")
    first, second = (await gate.as_worker().lease_next(max_tasks=2)).tasks
    await gate.as_worker().renew_lease(**harness.under(second))

    leases = (await gate.as_worker().list_leases()).leases

    assert {(lease.task_id, lease.lease_id, lease.fence, lease.type) for lease in leases} == {
        (offer.task_id, offer.lease_id, offer.fence, offer.type) for offer in (first, second)}
    assert {lease.task_id: lease.renewals for lease in leases} == {first.task_id: 0, second.task_id: 1}
    assert {lease.task_id: lease.expires_at for lease in leases}[first.task_id] == first.expires_at


async def test_only_live_leases_of_this_worker_are_listed(gate: harness.Gate) -> None:
    await gate.leased("w2")
    over = await gate.leased("w1")
    await gate.create()
    assert await gate.claim("w1", lease_ttl_seconds=5) is not None
    await gate.as_worker("w1").complete(**harness.under(over))
    gate.skip(6)
    alive = await gate.leased("w1")

    leases = (await gate.as_worker("w1").list_leases()).leases

    assert [lease.task_id for lease in leases] == [alive.task_id]


async def test_leases_are_listed_by_instance_when_it_is_named(gate: harness.Gate) -> None:
    await gate.create()
    offer = (await gate.as_worker("w1", instance="one").lease_next()).tasks[0]

    listed = {instance: [lease.task_id for lease in (await gate.as_worker("w1", instance).list_leases()).leases]
              for instance in ("one", "two", None)}

    assert listed == {"one": [offer.task_id], "two": [], None: [offer.task_id]}


async def test_of_the_tasks_of_a_worker_only_the_types_are_read(gate: harness.Gate) -> None:
    """Payloads and results may be large, and list_leases shows none."""
    await gate.create(type="b")
    offer = (await gate.as_worker("w1").lease_next()).tasks[0]

    [(lease, type)] = await gate.engine.backend.page(gate.tenant_id,
                                                     queries.LeaseFilter(wire.Principal("worker", "w1")))

    assert (lease.task_id, lease.lease_id, type) == (offer.task_id, offer.lease_id, "b")


async def test_a_worker_resumes_all_its_leases_however_many(gate: harness.Gate) -> None:
    await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * (2 * TASKS_AT_ONCE + 1))
    offers = (await gate.as_worker("w1").lease_next(max_tasks=50)).tasks

    leases = (await gate.as_worker("w1", "again").list_leases()).leases
    kept = await gate.engine.backend.page(gate.tenant_id, queries.LeaseFilter(wire.Principal("worker", "w1")))

    assert leases == []
    assert [lease.resumed_by for lease, _ in kept] == [None] * len(offers)
    assert len((await gate.as_worker("w1").list_leases()).leases) == len(offers) == 2 * TASKS_AT_ONCE + 1
    kept = await gate.engine.backend.page(gate.tenant_id, queries.LeaseFilter(wire.Principal("worker", "w1")))
    assert [lease.resumed_by for lease, _ in kept] == ["@0"] * len(offers)


async def test_two_leases_of_one_task_never_share_an_id(gate: harness.Gate) -> None:
    offer = await gate.leased()
    await gate.as_worker().release_lease(**harness.under(offer))

    again = await gate.claim()

    assert again is not None
    assert again.lease_id != offer.lease_id
