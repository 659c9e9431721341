"""What came out of calls that shared a batch, and does not come out of calls that have one each."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from asyncgate import Principal
from asyncgate.conformance.harness import Gate, refused, under
from asyncgate.extras.privacy import erasure
from asyncgate.extras.privacy.erasing import Eraser
from asyncgate.parts.model import stored
from asyncgate.parts.model.errors import GateError
from asyncgate.parts.model.settings import ArchiveSettings
from asyncgate.parts.model.wire import Offer
from asyncgate.parts.receipts import archive
from tests.extras.limits.test_limits_at_once import call_at_once

pytestmark = pytest.mark.anyio
DAY = 86_400.0
DEMO: dict[str, Any] = {"accept_types": ["demo"]}


async def refusal_of(call: Coroutine[Any, Any, Any]) -> GateError:
    """Make a call that is refused."""
    with pytest.raises(GateError) as refusal:
        await call
    return refusal.value


async def ask(gate: Gate, lease: Offer, key: str) -> list[stored.Progress]:
    """Ask something under a lease that goes on; return how far the task is."""
    await gate.as_worker().request_input(**under(lease), key=key, message="?", keep_lease=True)
    rows: list[stored.Progress] = (await gate.everything())["Progress"]
    return rows


async def begin_erasure(gate: Gate, worker: str) -> Eraser:
    """Begin the erasure of a worker."""
    drafted = await erasure.draft(gate.engine, gate.tenant_id, Principal("worker", worker))
    await erasure.keep_erasure(gate.engine, gate.as_admin().caller, gate.tenant_id, drafted)
    return Eraser(gate.engine, drafted)


async def test_a_claim_beside_a_cancel_gets_the_task_behind_the_canceled_one(gate: Gate) -> None:
    first, second = await gate.create(), await gate.create()

    _, offer = await call_at_once(gate, [], gate.cancel_task(task_id=first), gate.claim(**DEMO))

    assert offer is not None
    assert offer.task_id == second


async def test_a_claim_beside_a_creation_gets_the_new_task(gate: Gate) -> None:
    task_id, offer = await call_at_once(gate, [], gate.create(), gate.claim(**DEMO))

    assert offer is not None
    assert offer.task_id == task_id


async def test_a_claim_gets_a_task_that_was_made_more_urgent_in_its_batch(gate: Gate) -> None:
    await gate.create()
    task_id, offer = await call_at_once(gate, [], gate.create(priority=5), gate.claim(**DEMO))

    assert offer is not None
    assert offer.task_id == task_id


async def test_claims_that_may_get_the_same_tasks_and_others_get_one_each(gate: Gate) -> None:
    await gate.create("rare", priority=-1)
    first, second = await gate.create(), await gate.create()

    offer, other = await call_at_once(gate, [], gate.claim("w1", accept_types=["demo", "rare"]),
                                      gate.claim("w2", **DEMO))

    assert offer is not None
    assert other is not None
    assert (offer.task_id, other.task_id) == (first, second)


async def test_a_claim_beside_the_end_of_a_lease_gets_the_room_under_a_limit(gate: Gate) -> None:
    await gate.as_admin().set_limit(name="openai", concurrency_total=1)
    lease = await gate.leased(limits={"openai": ""})
    task_id = await gate.create(limits={"openai": ""})

    _, offer = await call_at_once(gate, [], gate.as_worker().release_lease(**under(lease), after_seconds=60),
                                  gate.claim(**DEMO))

    assert offer is not None
    assert offer.task_id == task_id


async def test_a_claim_beside_a_dear_completion_keeps_to_the_rate(gate: Gate) -> None:
    await gate.as_admin().set_limit(name="openai", rate={"count": 3, "seconds": 3600})
    lease = await gate.leased(limits={"openai": ""})
    await gate.create(limits={"openai": ""})

    _, offer = await call_at_once(gate, [], gate.as_worker().complete(**under(lease), cost=9.0), gate.claim(**DEMO))

    assert offer is None


async def test_a_repeated_claim_does_not_get_what_another_claim_of_the_batch_got(gate: Gate) -> None:
    """The task was the earlier claim's once, and that lease has run out."""
    await gate.create()
    lost = await gate.claim(claim_id="first", lease_ttl_seconds=10)
    assert lost is not None
    await gate.lose(lost)

    late = gate.as_worker().report_progress(**under(lost), progress=1)
    new, refusal, repeated = await call_at_once(
        gate, [], gate.claim(claim_id="second", **DEMO), refusal_of(late), gate.claim(claim_id="first", **DEMO))

    assert refusal.code == "lease_invalid_or_expired"
    assert new is not None
    assert repeated is None


async def test_a_renewal_by_the_lease_alone_finds_no_lease_that_has_ended(gate: Gate) -> None:
    lease = await gate.leased()

    _, beside = await call_at_once(
        gate, [], gate.as_worker().complete(**under(lease)), refusal_of(gate.as_worker().renew_lease(
            lease_id=lease.lease_id)))
    with refused("lease_invalid_or_expired", reason="unknown") as later:
        await gate.as_worker().renew_lease(lease_id=lease.lease_id)

    assert str(beside) == str(later.value)


@pytest.fixture
def archiving(make_gate: Callable[..., Gate], tmp_path: Path) -> Gate:
    return make_gate(archive=ArchiveSettings(directory=str(tmp_path)), receipt_retention_days=1, task_retention_days=90)


async def test_a_creation_beside_the_pruning_of_the_task_with_its_key_makes_a_new_task(archiving: Gate) -> None:
    gate, admin = archiving, archiving.as_admin()
    old = await gate.finished(idempotency_key="k")
    gate.skip(40 * DAY)
    await admin.run_archive()
    ages = archive.Ages(now := gate.now(), now, now, "")

    pruned, new = await call_at_once(
        gate, [], archive.drop_tasks(gate.engine, gate.tenant_id, ages, [old.task_id]),
        gate.create(idempotency_key="k"))

    assert pruned == 1
    assert new != old.task_id
    assert (await admin.get_task(task_id=new)).status == "queued"


async def test_each_state_of_a_task_that_gives_output_is_an_entry_also_of_two_in_one_batch(gate: Gate) -> None:
    lease = await gate.leased()
    await gate.as_worker().append_output(**under(lease), chunks=["a"])

    await call_at_once(gate, [], gate.as_worker().release_lease(**under(lease)),
                       gate.cancel_task(task_id=lease.task_id))

    page = await gate.as_admin().read_output(task_id=lease.task_id)
    assert [entry.status for entry in page.entries if entry.chunk is UNSET] == ["running", "queued", "canceled"]


async def test_a_claim_beside_the_erasure_of_the_worker_before_is_its_workers(gate: Gate) -> None:
    await gate.create()
    lost = await gate.claim("w1")
    assert lost is not None
    await gate.lose(lost)
    [lease] = (await gate.everything())["Lease"]
    eraser = await begin_erasure(gate, "w1")

    _, offer = await call_at_once(
        gate, [], eraser.erase(gate.tenant_id, eraser.whom, stored.Lease, [lease]), gate.claim("w2", **DEMO))

    assert (await gate.as_worker("w2").complete(**under(offer))).status == "succeeded"


async def test_a_question_asked_while_those_to_somebody_are_erased_stays(gate: Gate) -> None:
    lease = await gate.leased()
    [before] = await ask(gate, lease, "q1")
    eraser = await begin_erasure(gate, "w1")

    await ask(gate, lease, "q2")
    await eraser.erase(gate.tenant_id, eraser.whom, stored.Progress, [before])

    [after] = (await gate.everything())["Progress"]
    assert list(stored.read_questions(after)) == ["q1", "q2"]


async def test_the_archive_finds_the_answers_to_a_receipt_and_not_what_shares_their_batch(archiving: Gate) -> None:
    gate = archiving
    offer = await gate.finished()
    mine = {receipt.receipt_id for receipt in await gate.receipts(offer.task_id)}
    duty = await gate.receipt(offer.task_id, "task.assigned")

    _, answers = await call_at_once(gate, [], gate.create("another"), archive.find_answers(
        gate.engine, gate.tenant_id, [duty.receipt_id]))

    assert answers <= mine
