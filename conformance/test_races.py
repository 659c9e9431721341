"""Races: of concurrent calls exactly one takes effect (I2, I3, I7, I10; spec 4)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from asyncgate.conformance.harness import Gate, under
from asyncgate.parts.model import errors

pytestmark = pytest.mark.anyio


async def race(*runners: Any) -> list[Any]:
    """Run all calls concurrently; return each reply or the code of its refusal."""
    answers = await asyncio.gather(*runners, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, errors.GateError):
            raise answer
    return [answer.code if isinstance(answer, errors.GateError) else answer for answer in answers]


@pytest.fixture(params=["one engine", "two engines"])
def gates(request: pytest.FixtureRequest, make_gate: Callable[..., Gate]) -> tuple[Gate, Gate]:
    """Return a tenant's gate twice: through one engine, or through two that do not share batches."""
    gate = make_gate()
    return gate, gate.beside() if request.param == "two engines" else gate


async def test_64_claims_for_one_task_are_one_lease(gates: tuple[Gate, Gate]) -> None:
    task_id = await gates[0].create()

    answers = await race(*(gates[n % 2].claim(f"w{n}") for n in range(64)))

    won = [offer for offer in answers if offer is not None]
    assert [(offer.task_id, offer.fence) for offer in won] == [(task_id, 1)]
    assert len(await gates[0].receipts(task_id, "task.accepted")) == 1


async def test_every_task_goes_to_one_of_many_claims(gates: tuple[Gate, Gate]) -> None:
    made = await gates[0].as_agent().create_tasks(tasks=[{"type": f"t{n % 3}", "payload": None,
                                                          "priority": n % 2} for n in range(60)])

    answers = await race(*(gates[n % 2].as_worker(f"w{n}").lease_next(max_tasks=1 + n % 5) for n in range(30)))

    got = Counter(offer.task_id for answer in answers for offer in answer.tasks)
    assert set(got.values()) == {1}
    assert set(got) <= {item.task_id for item in made.results}
    assert sum(got.values()) == 60


async def test_claims_of_one_batch_are_each_served_in_order(gate: Gate) -> None:
    tasks = [await gate.create(priority=priority) for priority in (3, 2, 1)]

    answers = await race(*(gate.claim(f"w{n}") for n in range(4)))

    assert [offer and offer.task_id for offer in answers] == [*tasks, None]


async def test_the_same_claim_sent_often_at_once_is_one_claim(gates: tuple[Gate, Gate]) -> None:
    await gates[0].as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 5)

    answers = await race(*(gates[n % 2].claim("w1", claim_id="c") for n in range(20)))

    assert len({offer.lease_id for offer in answers}) == 1
    assert len(await gates[0].receipts(type="task.accepted")) == 1


async def test_50_creates_with_one_key_are_one_task(gates: tuple[Gate, Gate]) -> None:
    made = await race(*(gates[n % 2].create(idempotency_key="k") for n in range(50)))

    ids = {answer for answer in made if answer != "internal_error"}
    assert len(ids) == 1
    assert "internal_error" not in made
    assert len(await gates[0].receipts(type="task.assigned")) == len(await gates[0].owed()) == 1


@pytest.mark.parametrize("order", range(6))
async def test_of_complete_cancel_and_fail_at_once_one_stands(gates: tuple[Gate, Gate], order: int) -> None:
    offer = await gates[0].leased()
    here, there = gates
    runners = [here.as_worker().complete(**under(offer, artifacts=[{"uri": "x"}])),
               there.as_agent().cancel_task(task_id=offer.task_id), there.as_worker().fail(**under(offer, error="no"))]
    runners = runners[order % 3:] + runners[:order % 3]
    if order >= 3:
        runners.reverse()

    await race(*runners)

    ends = [r.receipt_type for r in await here.receipts(offer.task_id)
            if r.receipt_type in ("task.completed", "task.failed", "task.canceled")]
    status = (await here.task(offer.task_id)).status
    assert ends == [{"succeeded": "task.completed", "failed": "task.failed", "canceled": "task.canceled"}[status]]
    assert len(await here.receipts(offer.task_id, "task.result_ready")) == 1
    assert await here.owed() == []


async def test_one_completion_sent_often_at_once_is_one(gates: tuple[Gate, Gate]) -> None:
    offer = await gates[0].leased()

    ask = under(offer, artifacts=[{"uri": "x"}])
    answers = await race(*(gates[n % 2].as_worker().complete(**ask) for n in range(20)))

    assert {answer.status for answer in answers} == {"succeeded"}
    assert len(await gates[0].receipts(offer.task_id)) == 4


async def test_one_failure_sent_often_at_once_spends_one_attempt(gates: tuple[Gate, Gate]) -> None:
    offer = await gates[0].leased(max_attempts=9)

    await race(*(gates[n % 2].as_worker().fail(**under(offer, retryable=True, error="no")) for n in range(20)))

    assert (await gates[0].task(offer.task_id)).attempt == 1
    assert len(await gates[0].receipts(offer.task_id, "task.failed")) == 1


@pytest.mark.parametrize("ahead", [299.0, 300.0])
async def test_renewal_and_sweep_at_once_agree_on_who_has_the_task(gates: tuple[Gate, Gate], ahead: float) -> None:
    here, there = gates
    offer = await here.leased()
    here.skip(ahead)

    renewed, _ = await race(here.as_worker().renew_lease(**under(offer)), there.sweep())

    task = await here.task(offer.task_id)
    if renewed == "lease_invalid_or_expired":
        assert task.status == "queued"
    else:
        assert task.status == "leased"
        assert await here.receipts(offer.task_id, "lease.expired") == []


async def test_many_sweeps_at_once_take_a_lease_back_once(gates: tuple[Gate, Gate]) -> None:
    here, there = gates
    offer = await here.leased()
    here.skip(301)

    await race(*(gate.sweep() for gate in (here, there) * 4))

    assert (await here.task(offer.task_id)).expiries == 1
    assert len(await here.receipts(offer.task_id, "lease.expired")) == 1


async def test_completion_and_sweep_at_once_agree(gates: tuple[Gate, Gate]) -> None:
    here, there = gates
    offer = await here.leased()
    here.skip(301)

    done, _ = await race(here.as_worker().complete(**under(offer, artifacts=[{"uri": "x"}])), there.sweep())

    assert done == "lease_invalid_or_expired"
    assert (await here.task(offer.task_id)).status == "queued"


async def test_attachments_at_once_discharge_once(gates: tuple[Gate, Gate]) -> None:
    here, there = gates
    offer = await here.leased()
    await here.as_worker().complete(**under(offer))

    await race(*(gate.as_agent().attach_artifacts(task_id=offer.task_id, artifacts=[{"uri": "x"}])
                 for gate in (here, there) * 5))

    assert len(await here.receipts(offer.task_id, "task.completed")) == 2
    assert await here.owed() == []


async def test_writers_of_many_tenants_do_not_disturb_each_other(gate: Gate) -> None:
    tenants = [gate, *(gate.stranger() for _ in range(9))]

    await race(*(tenant.finished(f"w{n}") for n, tenant in enumerate(tenants)))

    for tenant in tenants:
        assert len(await tenant.receipts()) == 4
        assert await tenant.owed() == []
