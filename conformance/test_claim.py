"""Claiming: the next task, its worker, and the contents of an offer (spec 6.2, 7, 18.8)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from asyncgate.conformance import harness

pytestmark = pytest.mark.anyio


async def claimed(gate: harness.Gate, **ask: Any) -> list[str]:
    """Return the ids of the tasks of a claim, in order."""
    return [offer.task_id for offer in (await gate.as_worker().lease_next(**ask)).tasks]


async def test_an_empty_queue_answers_with_an_empty_list(gate: harness.Gate) -> None:
    assert await claimed(gate) == []


async def test_the_oldest_of_equal_tasks_comes_first(gate: harness.Gate) -> None:
    tasks = [await gate.create() for _ in range(5)]

    assert await claimed(gate, max_tasks=3) == tasks[:3]
    assert await claimed(gate, max_tasks=3) == tasks[3:]


async def test_a_higher_priority_comes_before_an_older_task(gate: harness.Gate) -> None:
    low, middle, high = [await gate.create(priority=priority) for priority in (-5, 0, 9)]
    later = await gate.create(priority=9)

    assert await claimed(gate, max_tasks=9) == [high, later, middle, low]


async def test_order_holds_across_types_and_capability_sets(gate: harness.Gate) -> None:
    tasks = [await gate.create(type=type, requirements={"capabilities": needed})
             for type, needed in (("a", ["x"]), ("b", []), ("a", []), ("c", ["x", "y"]), ("b", ["y"]))]

    assert await claimed(gate, capabilities=["x", "y"], max_tasks=9) == tasks


async def test_a_worker_gets_only_what_needs_a_subset_of_its_capabilities(gate: harness.Gate) -> None:
    needs: tuple[list[str], ...] = ([], ["gpu"], ["gpu", "eu"], ["eu"])
    free, gpu, both, eu = [await gate.create(requirements={"capabilities": needed}) for needed in needs]

    assert await claimed(gate, capabilities=["gpu"], max_tasks=9) == [free, gpu]
    assert await claimed(gate, capabilities=["eu", "other"], max_tasks=9) == [eu]
    assert await claimed(gate, max_tasks=9) == []
    assert await claimed(gate, capabilities=["other", "eu", "gpu"], max_tasks=9) == [both]


async def test_accept_types_keeps_other_types_away(gate: harness.Gate) -> None:
    await gate.create(type="a")
    b = await gate.create(type="b")

    assert await claimed(gate, accept_types=["b", "c"], max_tasks=9) == [b]


async def test_an_empty_list_of_accepted_types_accepts_all(gate: harness.Gate) -> None:
    assert await claimed(gate, accept_types=[]) == []

    assert [await gate.create()] == await claimed(gate, accept_types=[])


async def test_preferred_kinds_come_first_and_the_rest_still_comes(gate: harness.Gate) -> None:
    urgent, plain = await gate.create(type="a", priority=5), await gate.create(type="a")
    liked, best = await gate.create(type="b"), await gate.create(type="b", priority=1)

    assert await claimed(gate, preferred_kinds=["b"], max_tasks=9) == [best, liked, urgent, plain]


async def test_a_delayed_task_is_no_obstacle_for_those_behind_it(gate: harness.Gate) -> None:
    delayed = await gate.create(priority=9, delay_seconds=30)
    ready = await gate.create()

    assert await claimed(gate, max_tasks=9) == [ready]
    gate.skip(30)
    assert await claimed(gate, max_tasks=9) == [delayed]


async def test_a_delayed_task_takes_its_place_by_priority_and_age_when_its_time_has_come(gate: harness.Gate) -> None:
    delayed = await gate.create(delay_seconds=30)
    tasks = [await gate.create(), await gate.create()]
    gate.skip(30)

    assert await claimed(gate, max_tasks=9) == [delayed, *tasks]


async def test_a_claim_takes_one_task_unless_it_asks_for_more(gate: harness.Gate) -> None:
    tasks = [await gate.create() for _ in range(2)]

    assert await claimed(gate) == tasks[:1]


@pytest.mark.one_store
async def test_a_claim_of_too_many_is_clamped(make_gate: Callable[..., harness.Gate]) -> None:
    gate = make_gate(max_claim_tasks=3)
    await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 5)

    assert len(await claimed(gate, max_tasks=1000)) == 3


async def test_a_claim_gets_a_hundred_tasks_at_most(gate: harness.Gate) -> None:
    await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 101)

    assert len(await claimed(gate, max_tasks=500)) == 100


@pytest.mark.one_store
@pytest.mark.parametrize("ask", [
    {"max_tasks": 0}, {"max_tasks": -1}, {"max_tasks": 1.5}, {"max_tasks": "2"}, {"lease_ttl_seconds": 0},
    {"lease_ttl_seconds": 1.5}, {"wait_seconds": -1}, {"capabilities": ["x" * 101]}, {"capabilities": "gpu"},
    {"capabilities": [f"c{n}" for n in range(65)]}, {"claim_id": ""}], ids=str)
async def test_a_claim_that_asks_for_nonsense_is_refused(gate: harness.Gate, ask: dict[str, Any]) -> None:
    await gate.create()

    async with gate.unchanged():
        with harness.refused("invalid_request"):
            await gate.as_worker().lease_next(**ask)


@pytest.mark.one_store
async def test_a_lease_lives_300_seconds_unless_told_otherwise(gate: harness.Gate) -> None:
    offer = await gate.leased()

    task = await gate.task(offer.task_id)
    assert offer.expires_at - task.updated_at == timedelta(seconds=300)
    assert offer.renew_every_seconds == pytest.approx(100)
    assert task.lease_expires_at == offer.expires_at


@pytest.mark.one_store
@pytest.mark.parametrize(("asked", "given"), [(1, 1), (60, 60), (1800, 1800), (1801, 1800), (10**9, 1800)])
async def test_a_lease_of_more_than_1800_seconds_is_clamped(gate: harness.Gate, asked: int, given: int) -> None:
    task_id = await gate.create()

    offer = await gate.claim(lease_ttl_seconds=asked)

    assert offer is not None
    assert offer.expires_at - (await gate.task(task_id)).updated_at == timedelta(seconds=given)
    assert offer.renew_every_seconds == pytest.approx(given / 3)


@pytest.mark.one_store
async def test_a_claim_that_names_no_ttl_gets_the_tasks_own(gate: harness.Gate) -> None:
    task_id = await gate.create(timeouts={"lease_ttl_seconds": 42})

    offer = await gate.claim()

    assert offer is not None
    assert offer.expires_at - (await gate.task(task_id)).updated_at == timedelta(seconds=42)


@pytest.mark.one_store
async def test_the_ttl_of_the_claim_goes_before_that_of_the_task(gate: harness.Gate) -> None:
    task_id = await gate.create(timeouts={"lease_ttl_seconds": 42})

    offer = await gate.claim(lease_ttl_seconds=7)

    assert offer is not None
    assert offer.expires_at - (await gate.task(task_id)).updated_at == timedelta(seconds=7)


async def test_an_offer_carries_all_that_a_worker_needs(gate: harness.Gate) -> None:
    terms = {"type": "demo", "payload_pointer": "s3://in", "principal_ai": "claude", "task_summary": "sum",
             "instructions": "do", "expected_outcome_kind": "file", "expected_artifact_mime": "text/csv",
             "result_delivery": "inline"}
    offer = await gate.leased(payload={"a": 1}, requirements={"capabilities": []}, **terms)

    task = await gate.task(offer.task_id)
    assert {name: getattr(offer, name) for name in terms} == terms
    assert msgspec.json.decode(offer.payload) == {"a": 1}
    assert msgspec.json.decode(offer.requirements) == {"capabilities": []}
    assert (offer.created_by.kind, offer.created_by.id, offer.tenant_id) == ("agent", "ada", gate.tenant_id)
    assert (offer.attempt, offer.fence) == (0, 1)
    assert offer.obligation_receipt_id == offer.caused_by_receipt_id == task.obligation_receipt_id
    assert bytes(offer.progress) == b"null"


async def test_a_leased_task_says_who_has_it(gate: harness.Gate) -> None:
    await gate.create()
    offer = (await gate.as_worker("w1", instance="i1").lease_next()).tasks[0]

    task = await gate.task(offer.task_id)
    assert task.status == "leased"
    assert task.leased_to is not None
    assert (task.leased_to.kind, task.leased_to.id, task.leased_to.instance_id) == ("worker", "w1", "i1")


async def test_a_leased_task_is_not_offered_again(gate: harness.Gate) -> None:
    await gate.leased("w1")

    assert await gate.claim("w2") is None
    assert await gate.claim("w1") is None


@pytest.mark.parametrize("end", ["complete", "fail", "cancel"])
async def test_a_finished_task_is_never_offered_again(gate: harness.Gate, end: str) -> None:
    offer = await gate.leased()
    if end == "cancel":
        await gate.as_agent().cancel_task(task_id=offer.task_id)
    else:
        await getattr(gate.as_worker(), end)(**harness.NEEDED.get(end, {}), **harness.under(offer))

    await gate.wait(2000)

    assert await gate.claim() is None


async def test_a_canceled_task_in_the_queue_is_not_offered(gate: harness.Gate) -> None:
    gone, there = await gate.create(), await gate.create()
    await gate.as_agent().cancel_task(task_id=gone)

    assert await claimed(gate, max_tasks=9) == [there]


async def test_the_same_claim_again_returns_the_same_leases_and_writes_nothing(gate: harness.Gate) -> None:
    await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 5)
    first = await gate.as_worker().lease_next(max_tasks=2, claim_id="c1")

    async with gate.unchanged():
        again = await gate.as_worker().lease_next(max_tasks=2, claim_id="c1")

    def seen(offers: Any) -> Any:
        return sorted((offer.task_id, offer.lease_id, offer.fence, offer.expires_at) for offer in offers.tasks)
    assert seen(again) == seen(first)
    assert len(again.tasks) == 2


async def test_another_claim_id_is_another_claim(gate: harness.Gate) -> None:
    tasks = [await gate.create() for _ in range(2)]

    assert await claimed(gate, claim_id="c1") == tasks[:1]
    assert await claimed(gate, claim_id="c2") == tasks[1:]


async def test_the_claim_id_of_another_worker_means_nothing(gate: harness.Gate) -> None:
    tasks = [await gate.create() for _ in range(2)]
    assert await claimed(gate, claim_id="c1") == tasks[:1]

    other = await gate.claim("w2", claim_id="c1")

    assert other is not None
    assert other.task_id == tasks[1]


async def test_a_claim_whose_lease_is_over_claims_anew(gate: harness.Gate) -> None:
    tasks = [await gate.create() for _ in range(2)]
    offer = await gate.claim(claim_id="c1")
    assert offer is not None
    await gate.as_worker().complete(**harness.under(offer))

    assert await claimed(gate, claim_id="c1") == tasks[1:]


async def test_a_claim_whose_lease_has_run_out_does_not_return_it(gate: harness.Gate) -> None:
    await gate.create()
    offer = await gate.claim(claim_id="c1")
    assert offer is not None
    gate.skip(300)

    assert await claimed(gate, claim_id="c1") == []


@pytest.mark.one_store
async def test_an_unbound_credential_must_name_the_worker(gate: harness.Gate) -> None:
    await gate.create()

    with harness.refused("invalid_request"):
        await gate.lease_next()

    offers = await gate.lease_next(worker_id="w7", worker_kind="service")
    assert str((await gate.task(offers.tasks[0].task_id)).leased_to) == "service w7"


async def test_a_claim_among_many_lanes_finds_the_one_that_fits(gate: harness.Gate) -> None:
    await gate.as_agent().create_tasks(tasks=[
        {"type": f"t{n}", "payload": None, "requirements": {"capabilities": [f"c{n % 7}", "x"]},
         "priority": 5} for n in range(60)])
    task_id = await gate.create(type="fit", requirements={"capabilities": ["x"]})

    assert await claimed(gate, capabilities=["x"], max_tasks=9) == [task_id]
