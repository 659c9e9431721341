"""Unique work: one task under a key at a time, and what becomes of the next request for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import UNSET, json
from msgspec.structs import replace

from asyncgate import Engine, its_key
from asyncgate.conformance.harness import Gate, body, refused, under
from asyncgate.extras.unique.pruning import KeyPruner
from asyncgate.parts.model import errors, queries, stored, stored_unique, wire
from asyncgate.parts.model.settings import ArchiveSettings

pytestmark = pytest.mark.anyio
DAY = 86_400


@pytest.fixture(params=["one engine", "two engines"])
def gates(request: pytest.FixtureRequest, make_gate: Callable[..., Gate]) -> tuple[Gate, Gate]:
    """Return a tenant's gate twice: through one engine, or through two that do not share batches."""
    gate = make_gate()
    return gate, gate.beside() if request.param == "two engines" else gate


async def make(gate: Gate, on_conflict: str = "return", payload: Any = None, by: str = "ada", key: str = "k",
               lasts: Any = "unfinished", **fields: Any) -> wire.Created:
    """Create a task under a key."""
    made: wire.Created = await gate.as_agent(by).create_task(**{
        "type": "sync", "payload": payload, "unique": {"key": key, "while": lasts, "on_conflict": on_conflict},
        **fields})
    return made


async def done(gate: Gate, offer: wire.Offer, worker: str = "w1") -> None:
    """Complete a task."""
    await gate.as_worker(worker).complete(**under(offer), result=1, artifacts=["file:///out"])


async def waiting(gate: Gate) -> list[str]:
    """Return the tasks that have not ended, the oldest first."""
    page = await gate.as_admin().list_tasks()
    return [task.task_id for task in reversed(page.tasks) if task.status not in stored.TERMINAL]


async def test_the_same_work_again_gives_the_task_that_has_not_ended(gates: tuple[Gate, Gate]) -> None:
    here, there = gates
    first = await make(here, payload=1)

    again = await make(there, payload=2)

    assert (again.task_id, again.unique, again.payload_differs) == (first.task_id, "returned", True)
    offer = await here.claim()
    assert offer is not None
    assert bytes(offer.payload) == b"1"
    assert (await make(there, payload=1)).task_id == first.task_id
    await done(here, offer)
    assert (await make(there)).task_id != first.task_id


async def test_keys_of_two_creators_two_types_and_two_tenants_have_nothing_to_do_with_each_other(gate: Gate) -> None:
    made = [await make(gate), await make(gate, by="bob"), await make(gate, type="other"), await make(gate, key="l"),
            await make(gate.stranger())]

    assert len({answer.task_id for answer in made}) == 5
    assert {answer.unique for answer in made} == {UNSET}


async def test_a_conflict_is_refused_with_the_task_and_the_next_call(gate: Gate) -> None:
    first = await make(gate)

    async with gate.unchanged():
        with refused("unique_conflict", task_id=first.task_id, status="queued") as refusal:
            await make(gate, "refuse")

    assert "is queued (get_task shows it): on_conflict return gives that task" in str(refusal.value)


async def test_a_task_that_is_unique_while_queued_gives_its_key_up_at_its_first_lease_for_good(gate: Gate) -> None:
    first = await make(gate, lasts="queued")
    assert (await make(gate, lasts="queued")).task_id == first.task_id
    offer = await gate.claim()
    assert offer is not None

    second = await make(gate, lasts="queued")
    await gate.as_worker().release_lease(**under(offer))
    third = await make(gate, lasts="queued")

    assert first.task_id != second.task_id == third.task_id


async def test_a_task_may_hold_its_key_for_some_seconds_also_behind_its_end(gate: Gate) -> None:
    first = await make(gate, lasts=600)
    offer = await gate.claim()
    assert offer is not None
    await done(gate, offer)

    again = await make(gate, lasts=600)
    with refused("unique_conflict", status="succeeded"):
        await make(gate, "replace", lasts=600)
    gate.skip(601)
    later = await make(gate, lasts=600)

    assert (again.task_id, again.status, again.unique) == (first.task_id, "succeeded", "returned")
    assert later.task_id != first.task_id


async def test_who_supersedes_a_task_that_has_ended_takes_the_rest_of_its_time_over(gate: Gate) -> None:
    first = await make(gate, lasts=600)
    offer = await gate.claim()
    assert offer is not None
    await done(gate, offer)
    second = await make(gate, "supersede")
    offer = await gate.claim()
    assert offer is not None
    await done(gate, offer)

    third = await make(gate)

    assert len({first.task_id, second.task_id, third.task_id}) == 3
    assert third.status == "queued"


async def test_a_replaced_payload_leaves_a_receipt_with_both_hashes(gates: tuple[Gate, Gate]) -> None:
    here, there = gates
    first = await make(here, payload={"n": 1}, priority=3, task_summary="one")

    again = await make(there, "replace", payload={"n": 2}, task_summary="two")
    third = await make(there, "replace", payload={"n": 1}, task_summary="one")
    fourth = await make(here, "replace", payload={"n": 3}, instructions="quickly")

    assert {again.task_id, third.task_id, fourth.task_id} == {first.task_id}
    assert (again.unique, again.payload_differs) == ("replaced", False)
    amended = await here.receipts(first.task_id, "task.amended")
    assigned = body(await here.receipt(first.task_id, "task.assigned"))
    told = [body(receipt) for receipt in amended]
    hashes = [(terms["payload_sha256_before"], terms["payload_sha256"]) for terms in told]
    assert [after for _, after in hashes[:-1]] == [before for before, _ in hashes[1:]]
    assert hashes[0][0] == hashes[1][1] == assigned["payload_sha256"] != hashes[0][1]
    assert {receipt.parents[0] for receipt in amended} == {(await here.task(first.task_id)).obligation_receipt_id}
    offer = await there.claim()
    assert offer is not None
    assert (bytes(offer.payload), offer.instructions, offer.task_summary) == (b'{"n":3}', "quickly", None)
    assert (await here.task(first.task_id)).priority == 3
    assert [task.task_id for task in (await here.as_admin().list_tasks(summary_prefix="two")).tasks] == []


async def test_the_same_payload_again_replaces_nothing_and_writes_nothing(gate: Gate) -> None:
    first = await make(gate, "replace", payload={"a": 1, "b": 2})

    async with gate.unchanged():
        again = await make(gate, "replace", payload={"b": 2, "a": 1})

    assert again.task_id == first.task_id


async def test_no_payload_is_replaced_that_a_worker_has(gate: Gate) -> None:
    first = await make(gate)
    offer = await gate.claim()
    assert offer is not None

    for _ in range(2):
        async with gate.unchanged():
            with refused("unique_conflict", task_id=first.task_id):
                await make(gate, "replace", payload=2)
        if offer is not None:
            await gate.as_worker().release_lease(**under(offer))
            offer = None


async def test_no_payload_is_replaced_that_a_worker_has_had_though_a_claim_of_the_same_batch_may_get_it(
        gate: Gate) -> None:
    first = await make(gate, type="sync")
    offer = await gate.claim()
    assert offer is not None
    await gate.as_worker().release_lease(**under(offer))

    _, replaced, claimed = await asyncio.gather(        # the first is a batch alone, and the others are the next one
        gate.create("other"), make(gate, "replace", payload=2), gate.claim("w2", accept_types=["sync"]),
        return_exceptions=True)

    assert isinstance(replaced, errors.UniqueConflict)
    assert isinstance(claimed, wire.Offer)
    assert (claimed.task_id, bytes(claimed.payload)) == (first.task_id, b"null")


async def test_who_supersedes_cancels_the_other_task_as_its_creator(gates: tuple[Gate, Gate]) -> None:
    here, there = gates
    first = await make(here)
    offer = await there.claim()
    assert offer is not None

    second = await make(there, "supersede")

    before, after = await here.task(first.task_id), await here.task(second.task_id)
    assert (before.status, before.superseded_by, before.obligation_open) == ("canceled", second.task_id, False)
    assert (after.status, after.supersedes, after.unique and after.unique.key) == ("queued", first.task_id, "k")
    canceled = await here.receipt(first.task_id, "task.canceled")
    assert body(canceled)["superseded_by"] == second.task_id
    assert (canceled.sender.kind, canceled.sender.id) == ("agent", "ada")
    assert body(await here.receipt(second.task_id, "task.assigned"))["supersedes"] == first.task_id
    assert [owed.task_id for owed in await here.owed()] == [second.task_id]
    with refused("lease_invalid_or_expired", reason="canceled"):
        await done(there, offer)
    told = await here.as_agent().explain_task(task_id=first.task_id)
    assert second.task_id in told.summary


async def test_a_task_that_was_read_for_a_claim_of_the_same_batch_has_been_had_and_keeps_its_lease(gate: Gate) -> None:
    first = await make(gate)

    async def make_beside_a_claim(on_conflict: str) -> wire.Created:
        """Make a task in a batch in which a claim comes after it."""
        claim = asyncio.create_task(gate.claim())
        try:
            return await make(gate, on_conflict, payload=on_conflict)
        finally:
            offers.append(await claim)
    offers = [await gate.claim()]
    assert offers[0] is not None
    await gate.as_worker().release_lease(**under(offers[0]))
    with refused("unique_conflict", task_id=first.task_id):
        await make_beside_a_claim("replace")
    assert offers[1] is not None
    await gate.as_worker().release_lease(**under(offers[1]))
    superseding = await make_beside_a_claim("supersede")

    assert superseding.unique == "superseded"
    assert (await gate.task(first.task_id)).status == "canceled"
    assert (snapshot := await gate.backend.task(gate.tenant_id, first.task_id)) is not None
    assert (lease := snapshot[1]) is not None
    assert lease.fence == (await gate.task(first.task_id)).fence


async def test_while_one_runs_only_the_newest_waits(gates: tuple[Gate, Gate]) -> None:
    here, there = gates
    first = await make(here, "keep_latest", payload=1)
    offer = await here.claim()
    assert offer is not None
    second = await make(there, "keep_latest", payload=2)
    third = await make(here, "keep_latest", payload=3)

    assert (second.unique, third.unique) == ("waits", "waits")
    assert await waiting(here) == [first.task_id, third.task_id]
    assert (await here.task(second.task_id)).superseded_by == third.task_id
    assert (await here.task(third.task_id)).held == stored.KEY_TAKEN
    assert (await here.task(first.task_id)).next_task_id == third.task_id
    assert await there.claim("w2") is None
    told = await there.as_agent().explain_task(task_id=third.task_id)
    assert (told.cause, told.evidence.holders) == ("key_taken", [first.task_id])
    with refused("invalid_state_transition"):
        await here.as_admin().release_hold(task_id=third.task_id)
    await done(there, offer)
    last = await there.claim("w2")
    assert last is not None
    assert last.task_id == third.task_id
    fourth = await make(here, "keep_latest", payload=4)
    assert (await here.task(fourth.task_id)).held == stored.KEY_TAKEN


@pytest.mark.parametrize("how", ["fail", "cancel", "lose", "release"])
async def test_what_waits_is_offered_when_the_other_task_has_ended_however_and_not_before(gate: Gate, how: str) -> None:
    first = await make(gate, "keep_latest", max_attempts=1)
    offer = await gate.claim()
    assert offer is not None
    second = await make(gate, "keep_latest")
    if how == "fail":
        await gate.as_worker().fail(**under(offer), error="no", retryable=True)
    elif how == "cancel":
        await gate.as_agent().cancel_task(task_id=first.task_id)
    else:
        if how == "lose":
            await gate.lose(offer)
        else:
            await gate.as_worker().release_lease(**under(offer))
        again = await gate.claim()
        assert again is not None
        assert again.task_id == first.task_id
        assert await gate.claim("w2") is None
        await done(gate, again)

    last = await gate.claim("w2")

    assert last is not None
    assert last.task_id == second.task_id


async def test_the_newest_supersedes_one_that_nobody_has_begun(gate: Gate) -> None:
    first = await make(gate, "keep_latest")

    second = await make(gate, "keep_latest")

    assert await waiting(gate) == [second.task_id]
    assert ((await gate.task(first.task_id)).superseded_by, second.unique) == (second.task_id, "superseded")
    assert await gate.claim() is not None


async def test_who_supersedes_cancels_also_what_waits(gate: Gate) -> None:
    await make(gate, "keep_latest")
    assert await gate.claim() is not None
    await make(gate, "keep_latest")

    last = await make(gate, "supersede")

    assert await waiting(gate) == [last.task_id]
    offer = await gate.claim("w2")
    assert offer is not None
    assert offer.task_id == last.task_id


async def test_a_task_that_waits_may_be_canceled_and_leaves_its_place(gate: Gate) -> None:
    first = await make(gate, "keep_latest")
    offer = await gate.claim()
    assert offer is not None
    second = await make(gate, "keep_latest")

    await gate.as_agent().cancel_task(task_id=second.task_id)

    assert (await make(gate)).task_id == first.task_id
    await done(gate, offer)
    assert await waiting(gate) == []


async def test_a_debounced_task_is_due_some_seconds_after_the_last_call_but_not_later_than_at_most(gate: Gate) -> None:
    bounce = {"seconds": 10, "at_most_seconds": 25}
    first = await make(gate, "replace", payload=0, debounce=bounce)
    for number in range(1, 4):
        gate.skip(9)
        again = await make(gate, "replace", payload=number, debounce=bounce)
        assert again.task_id == first.task_id if number < 3 else True

    task = await gate.task(first.task_id)

    assert task.next_eligible_at is None or (task.next_eligible_at - task.created_at).total_seconds() == 25
    offer = await gate.claim()
    assert offer is not None
    assert bytes(offer.payload) == b"3"


async def test_a_debounce_goes_on_over_tasks_that_supersede_each_other(gate: Gate) -> None:
    bounce = {"seconds": 10, "at_most_seconds": 15}
    first = await make(gate, "supersede", debounce=bounce)
    gate.skip(8)

    second = await make(gate, "supersede", debounce=bounce)

    assert second.task_id != first.task_id
    due = (await gate.task(second.task_id)).next_eligible_at
    assert due is not None
    assert (due - (await gate.task(first.task_id)).created_at).total_seconds() == 15
    assert await gate.claim() is None
    gate.skip(8)
    assert await gate.claim() is not None


@pytest.mark.one_store
@pytest.mark.parametrize("wrong", [
    {"debounce": {"seconds": 1}}, {"unique": {"key": "k"}, "debounce": {"seconds": 1}, "delay_seconds": 1},
    {"unique": {"key": "k"}, "debounce": {"seconds": 2, "at_most_seconds": 1}}, {"unique": {"key": ""}},
    {"unique": {"key": "k", "while": "queued", "on_conflict": "keep_latest"}}, {"unique": {}},
    {"unique": {"key": "k", "while": 0}}, {"unique": {"key": "k", "on_conflict": "merge"}}])
async def test_what_makes_no_sense_is_refused(gate: Gate, wrong: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"unique|debounce|while|key|Expected|Invalid"):
        await gate.create(**wrong)


async def test_each_item_of_a_list_is_unique_also_within_the_list(gates: tuple[Gate, Gate]) -> None:
    here, there = gates
    first = await make(here, key="a")

    made = await there.as_agent().create_tasks(tasks=[
        {"type": "sync", "payload": number, "unique": {"key": key, "on_conflict": conflict}}
        for number, (key, conflict) in enumerate([("a", "return"), ("b", "return"), ("b", "refuse"), ("b", "replace"),
                                                  ("c", "return"), ("c", "supersede")])])

    ids = [item.task_id for item in made.results]
    assert (ids[0], ids[3]) == (first.task_id, ids[1])
    assert [item.unique for item in made.results] == ["returned", UNSET, UNSET, "replaced", UNSET,
                                                      "superseded"]
    assert made.results[2].error is not None
    conflict = made.results[2].error
    assert (conflict.error, conflict.task_id, conflict.status) == ("unique_conflict", ids[1], "queued")
    assert await waiting(here) == sorted({first.task_id, str(ids[1]), str(ids[5])})


async def test_a_request_that_another_task_has_answered_changes_nothing_when_it_is_repeated(
        gates: tuple[Gate, Gate]) -> None:
    here, there = gates
    first = await make(here, payload=1)
    older = await make(here, "replace", payload=2, idempotency_key="older")
    await make(there, "replace", payload=3, idempotency_key="newer")
    joined = await make(here, payload=4, idempotency_key="joined")

    assert await make(there, "replace", payload=2, idempotency_key="older") == older
    assert bytes((await here.task(first.task_id)).payload) == b"3"
    offer = await here.claim()
    assert offer is not None
    assert (await make(there, "replace", payload=2, idempotency_key="older")).unique == "replaced"
    await done(here, offer)
    again = await make(there, payload=4, idempotency_key="joined")
    assert (again.task_id, again.unique, again.status) == (joined.task_id, "returned", "succeeded")
    second = await make(here)
    assert second.task_id != first.task_id
    assert (await make(there, payload=4, idempotency_key="joined")).task_id == first.task_id
    for number in range(40):
        await make(here, payload=number, idempotency_key=f"many {number}")
    assert (await make(there, payload=4, idempotency_key="joined")).task_id == second.task_id


async def test_a_long_list_of_taken_keys_is_decided_in_two_batches(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [{"type": "sync", "payload": 1, "unique": {"key": f"{number}"}} for number in range(50)]
    first = await gate.as_agent().create_tasks(tasks=tasks)
    batches, transact = list[str](), gate.engine.batches.transact

    async def counted(*given: Any) -> None:
        batches.append(given[0])
        await transact(*given)
    monkeypatch.setattr(gate.engine.batches, "transact", counted)

    again = await gate.as_agent().create_tasks(tasks=tasks)

    assert [item.task_id for item in again.results] == [item.task_id for item in first.results]
    assert len(batches) == 2


async def test_a_repeated_request_gets_its_task_whatever_holds_the_key_now(gate: Gate) -> None:
    first = await make(gate, idempotency_key="1")
    second = await make(gate, "supersede", idempotency_key="2")

    async with gate.unchanged():
        assert (await make(gate, idempotency_key="1")).task_id == first.task_id
        assert (await make(gate, "supersede", idempotency_key="2")).task_id == second.task_id


async def test_of_many_who_ask_at_once_through_two_gates_one_makes_the_task(gate: Gate) -> None:
    other = gate.beside()

    made = await asyncio.gather(*(make(side, key=f"{number % 3}") for number in range(10) for side in (gate, other)))

    assert len({answer.task_id for answer in made}) == len(await waiting(gate)) == 3


async def test_a_task_that_is_run_again_takes_its_key_again_or_meets_who_holds_it(gate: Gate) -> None:
    first = await make(gate, lasts=600)
    offer = await gate.claim()
    assert offer is not None
    await done(gate, offer)

    again = await gate.as_agent().rerun_task(task_id=first.task_id)
    twice = await gate.as_agent().rerun_task(task_id=first.task_id)

    assert again.task_id != first.task_id
    assert (twice.task_id, twice.unique) == (again.task_id, "returned")
    assert (await gate.task(again.task_id)).unique == wire.Unique("k", 600)


async def test_a_bulk_that_runs_tasks_again_makes_one_under_each_key(gate: Gate) -> None:
    for _ in range(3):
        await make(gate)
        offer = await gate.claim()
        assert offer is not None
        await done(gate, offer)
    admin = gate.as_admin()
    plan = await admin.preview_bulk(action="rerun", status="succeeded")

    bulk = await admin.run_bulk(confirmation=plan.confirmation)

    assert bulk.ended
    assert len(await waiting(gate)) == 1


async def test_keys_that_nobody_holds_are_deleted_and_no_others(gate: Gate) -> None:
    await make(gate, key="ended")
    offer = await gate.claim()
    assert offer is not None
    await done(gate, offer)
    held = await make(gate, key="held")

    await KeyPruner(gate.engine).run()

    rows = await gate.backend.page(gate.tenant_id, queries.Rows(stored_unique.UniqueKey, "", 10))
    assert [row.task_id for row in rows] == [held.task_id]


async def test_a_key_whose_task_has_been_pruned_is_free(make_gate: Callable[..., Gate], tmp_path: Any) -> None:
    gate = make_gate(archive=ArchiveSettings(directory=str(tmp_path)), task_retention_days=10)
    first = await make(gate, lasts=900 * DAY)
    offer = await gate.claim()
    assert offer is not None
    await done(gate, offer)
    gate.skip(500 * DAY)
    assert (await gate.as_admin().run_archive()).tasks_pruned == 1

    again = await make(gate, lasts=900 * DAY)

    assert again.task_id != first.task_id


async def test_a_quota_that_is_full_leaves_the_task_that_would_be_superseded(gate: Gate) -> None:
    first, no_more = await make(gate), errors.QuotaExceeded("full", quota="tasks", limit=1, retry_after=1)
    caller = replace(gate.as_agent().caller, no_new_tasks=no_more)
    ask = wire.CreateTask(type="sync", payload=wire.JSON_NULL, unique=wire.Unique("k", on_conflict="supersede"))

    async with gate.unchanged():
        with refused("quota_exceeded"):
            await gate.engine.write(Engine.create_task, its_key, caller, ask)

    assert (await gate.task(first.task_id)).status == "queued"


async def test_a_bulk_meets_who_holds_the_key_already(gate: Gate) -> None:
    await make(gate)
    offer = await gate.claim()
    assert offer is not None
    await done(gate, offer)
    held = await make(gate)
    plan = await gate.as_admin().preview_bulk(action="rerun", status="succeeded")

    bulk = await gate.as_admin().run_bulk(confirmation=plan.confirmation)

    assert (bulk.done, bulk.skipped, await waiting(gate)) == (0, 1, [held.task_id])


async def test_a_task_whose_payload_a_rerun_replaces_runs_nothing_again_itself(gate: Gate) -> None:
    first = await make(gate, "replace", payload=1)
    offer = await gate.claim()
    assert offer is not None
    await done(gate, offer)
    second = await make(gate, payload=2)

    again = await gate.as_agent().rerun_task(task_id=first.task_id)

    task = await gate.task(second.task_id)
    assert (again.task_id, again.unique, bytes(task.payload)) == (second.task_id, "replaced", b"1")
    assert (task.rerun_of, task.amendments) == (None, 1)
    assert task.unique == wire.Unique("k", "unfinished")


async def test_a_replaced_payload_must_fit_its_type(gate: Gate) -> None:
    await gate.as_worker().declare_type(type="sync", payload_schema={"type": "integer"})
    first = await make(gate, payload=1)

    async with gate.unchanged():
        with refused("payload_invalid"):
            await make(gate, "replace", payload="x")

    assert (await make(gate, "replace", payload=2)).task_id == first.task_id


async def test_a_task_without_a_key_loads_and_saves_nothing_more(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    await gate.create()     # the first batch of a tenant counts its usage
    transact, batches = gate.engine.batches.transact, list[Any]()

    async def watched(tenant_id: str, needs: Any, decide: Callable[[Any], None]) -> None:
        def decided(work: Any) -> None:
            decide(work)
            batches.append((needs.records, work.progressed, work.amended, [kind for kind, _ in work.kept]))
        await transact(tenant_id, needs, decided)
    monkeypatch.setattr(gate.engine.batches, "transact", watched)

    task_id = await gate.create()
    offer = await gate.claim(max_tasks=1)
    assert offer is not None
    await done(gate, offer)
    await gate.as_agent().cancel_task(task_id=task_id)

    assert len(batches) == 4
    for records, progressed, amended, kept in batches:
        assert stored_unique.UniqueKey not in {*kept, *(kind for kind, _ in records)}
        assert (progressed, amended) == ({}, {})


async def test_the_same_key_of_two_kinds_of_owner_is_two_keys(gates: tuple[Gate, Gate]) -> None:
    here, there = gates
    first = await make(here)
    human = there.as_caller("human", "ada", "agent")

    other = await human.create_task(type="sync", payload=None, unique={"key": "k"})

    assert other.task_id != first.task_id
    assert await waiting(here) == sorted([first.task_id, other.task_id])


async def test_a_task_that_waited_for_its_key_tells_after_which_one_it_is_offered(gates: tuple[Gate, Gate]) -> None:
    here, there = gates
    first = await make(here)
    offer = await here.claim()
    assert offer is not None
    second = await make(there, "keep_latest")

    await done(here, offer)

    history = await here.as_agent("ada").get_task_history(task_id=second.task_id)
    assert [json.decode(event.payload) for event in history.events if event.event_type == "task.key_free"] == [
        {"after": first.task_id}]
