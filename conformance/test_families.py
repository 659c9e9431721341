"""Families: a task and its children, what a parent waits for, and what each end tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncgate.conformance import load
from asyncgate.conformance.harness import Gate, are_here, body, refused, under
from asyncgate.parts.model import wire
from asyncgate.parts.model.families import MOST_ENDS_TOLD
from asyncgate.parts.model.settings import ArchiveSettings

pytestmark = pytest.mark.anyio
ENDS = ["succeeded", "failed", "canceled"]
DAY = 86_400
needs_families = pytest.mark.skipif(not are_here(["wait_tasks"]), reason="a cascade is of an extra, and none is here")


@pytest.fixture(params=["one engine", "two engines"])
def gates(request: pytest.FixtureRequest, make_gate: Callable[..., Gate]) -> tuple[Gate, Gate]:
    """Return a tenant's gate twice: through one engine, or through two that do not share batches."""
    gate = make_gate()
    return gate, gate.beside() if request.param == "two engines" else gate


async def parent_of(gate: Gate, children: int, **fields: Any) -> tuple[wire.Offer, list[str]]:
    """Lease a task that has children; return its offer and their ids."""
    offer = await gate.leased(type="parent")
    return offer, [await gate.create("child", parent_task_id=offer.task_id, **fields) for _ in range(children)]


async def park(gate: Gate, offer: wire.Offer, until: str = "all", worker: str = "w1", **more: Any) -> wire.Released:
    """Park a parent."""
    parked: wire.Released = await gate.as_worker(worker).release_lease(**under(offer), until_children=until, **more)
    return parked


async def end(gate: Gate, task_id: str, how: str = "succeeded") -> None:
    """Let a child end, in one of the ways in which tasks end."""
    if how == "canceled":
        await gate.as_agent().cancel_task(task_id=task_id)
        return
    offer = await gate.claim("w9", accept_types=["child"])
    while offer is not None and offer.task_id != task_id:
        offer = await gate.claim("w9", accept_types=["child"])
    assert offer is not None
    if how == "succeeded":
        await gate.as_worker("w9").complete(**under(offer), result=1, artifacts=["file:///out"])
    else:
        await gate.as_worker("w9").fail(**under(offer), error="no")


async def claim_parent(gate: Gate, worker: str = "w1") -> wire.Offer | None:
    """Claim a parent."""
    return await gate.claim(worker, accept_types=["parent"])


def told(offer: wire.Offer | None) -> dict[str, str]:
    """Return how the children ended, as an offer tells it."""
    assert offer is not None
    assert isinstance(offer.children, wire.Children)
    return {child.task_id: child.status for child in offer.children.ends}


async def test_a_child_that_ends_beside_a_claim_which_gets_nothing_leaves_its_parent_the_last_lease(gate: Gate) -> None:
    offer, (child,) = await parent_of(gate, 1)
    await gate.as_worker().release_lease(**under(offer))

    *_, claimed = await asyncio.gather(      # in one batch, which reads the parent for the claim
        gate.as_admin().pause_work(type="parent"), gate.as_agent().cancel_task(task_id=child), claim_parent(gate))

    assert claimed is None
    assert (snapshot := await gate.backend.task(gate.tenant_id, offer.task_id)) is not None
    assert (lease := snapshot[1]) is not None
    assert (lease.lease_id, lease.ending) == (offer.lease_id, "released")


# A parent that waits.


async def test_a_parent_waits_without_a_lease_until_its_children_have_ended_and_is_told_how(gate: Gate) -> None:
    offer, (first, second, third) = await parent_of(gate, 3)

    parked = await park(gate, offer, checkpoint={"at": 2})
    waiting = await gate.task(offer.task_id)
    await end(gate, first, "canceled")
    await end(gate, second, "failed")
    early = await claim_parent(gate)
    await end(gate, third, "succeeded")
    again = await claim_parent(gate, "w2")

    assert (parked.status, parked.open_children, parked.next_eligible_at) == ("queued", 3, None)
    assert (waiting.status, waiting.held, waiting.attempt, waiting.expiries, waiting.parks) == (
        "queued", "children_open", 0, 0, 1)
    assert early is None
    assert told(again) == {first: "canceled", second: "failed", third: "succeeded"}
    assert again is not None
    assert bytes(again.progress) == b'{"at":2}'
    assert (await gate.events(offer.task_id)).count("task.children_ended") == 1


@pytest.mark.parametrize("how", ENDS)
async def test_a_parent_goes_on_however_its_last_child_ends(gate: Gate, how: str) -> None:
    offer, (child,) = await parent_of(gate, 1)
    await park(gate, offer)

    await end(gate, child, how)

    assert told(await claim_parent(gate)) == {child: how}


@pytest.mark.parametrize("how", ENDS)
async def test_a_child_that_ends_before_its_parent_parks_does_not_let_it_hang(gate: Gate, how: str) -> None:
    offer, (child,) = await parent_of(gate, 1)
    await end(gate, child, how)

    parked = await park(gate, offer, after_seconds=3600)

    assert (parked.open_children, parked.next_eligible_at) == (None, None)
    assert told(await claim_parent(gate)) == {child: how}


async def test_a_parent_that_waits_for_any_is_offered_with_each_end_that_it_was_not_told(gate: Gate) -> None:
    offer, children = await parent_of(gate, 3)
    await park(gate, offer, "any")
    await end(gate, children[0], "failed")
    first = await claim_parent(gate)
    assert first is not None
    await end(gate, children[1], "canceled")        # before it parks, and after its offer

    at_once = await park(gate, first, "any")
    second = await claim_parent(gate)
    assert second is not None
    waits = await park(gate, second, "any")
    nothing = await claim_parent(gate)
    await end(gate, children[2])
    third = await claim_parent(gate)
    assert third is not None
    over = await park(gate, third, "any")           # nothing can come any more

    assert told(first) == {children[0]: "failed"}
    assert (at_once.open_children, waits.open_children, nothing) == (None, 1, None)
    assert list(told(third)) == children
    assert over.open_children is None
    assert await claim_parent(gate) is not None


async def test_a_child_on_hold_has_not_ended(gate: Gate) -> None:
    offer, (child,) = await parent_of(gate, 1, max_expiries=1)
    await park(gate, offer)
    lost = await gate.claim("w9")
    assert lost is not None
    await gate.lose(lost)

    assert (await gate.task(child)).held == "lease_expiries"
    assert await claim_parent(gate) is None
    await gate.as_agent().release_hold(task_id=child)
    await end(gate, child)
    assert told(await claim_parent(gate)) == {child: "succeeded"}


async def test_a_repeated_park_for_children_says_how_many_are_open(gate: Gate) -> None:
    offer, _ = await parent_of(gate, 2)
    parked = await park(gate, offer)

    async with gate.unchanged():
        assert await park(gate, offer) == parked
    assert parked.open_children == 2


async def test_a_child_that_is_tried_again_has_not_ended(gate: Gate) -> None:
    offer, (child,) = await parent_of(gate, 1, retry_backoff_seconds=0)
    await park(gate, offer)
    attempt = await gate.claim("w9")
    assert attempt is not None

    await gate.as_worker("w9").fail(**under(attempt), error="later", retryable=True)

    assert await claim_parent(gate) is None
    await end(gate, child)
    assert told(await claim_parent(gate)) == {child: "succeeded"}


async def test_a_child_that_fails_because_nobody_answers_lets_its_parent_go_on(gate: Gate) -> None:
    offer, (child,) = await parent_of(gate, 1)
    await park(gate, offer)
    asking = await gate.claim("w9")
    assert asking is not None
    await gate.as_worker("w9").request_input(**under(asking), key="may", message="May I?", expires_in_seconds=60,
                                             on_expiry="fail")

    await gate.wait(61)

    assert told(await claim_parent(gate)) == {child: "failed"}


async def test_a_parent_waits_only_so_long_if_it_says_so(gate: Gate) -> None:
    offer, _ = await parent_of(gate, 1)
    parked = await park(gate, offer, after_seconds=60)

    await gate.wait(59)
    early = await claim_parent(gate)
    await gate.wait(2)
    again = await claim_parent(gate)

    assert (parked.open_children, parked.next_eligible_at is None, early) == (1, False, None)
    assert told(again) == {}
    assert again is not None
    assert isinstance(again.children, wire.Children)
    assert again.children.open == 1


async def test_a_task_without_children_cannot_wait_for_them(gate: Gate) -> None:
    offer = await gate.leased()

    with refused("invalid_state_transition"):
        await park(gate, offer)

    assert (await gate.task(offer.task_id)).status == "leased"


async def test_a_hold_for_children_is_released_by_its_owner(gate: Gate) -> None:
    offer, (child,) = await parent_of(gate, 1)
    await park(gate, offer)

    await gate.as_agent().release_hold(task_id=offer.task_id)
    again = await claim_parent(gate)
    assert again is not None
    await end(gate, child, "canceled")

    assert (await gate.task(offer.task_id)).status == "leased"
    assert (await park(gate, again)).open_children is None


async def test_a_wait_for_children_is_a_park_and_counts_as_one(gate: Gate) -> None:
    offer = await gate.leased(type="parent", max_parks=1)
    await gate.create("child", parent_task_id=offer.task_id)

    await park(gate, offer)

    assert (await gate.task(offer.task_id)).held == "max_parks"


async def test_the_receipt_of_a_park_says_for_what_it_waits(gate: Gate) -> None:
    offer, _ = await parent_of(gate, 1)
    await park(gate, offer, "any", reason="the pages are read")

    ended = body(await gate.receipt(offer.task_id, "lease.expired"))

    assert ended | {"reason": "parked", "until_children": "any", "why": "the pages are read", "parks": 1,
                    "requeued": False} == ended


# Who belongs to a family.


async def test_a_child_names_its_parent_and_a_parent_counts_its_children(gate: Gate) -> None:
    parent = await gate.create("parent")
    first, second = [await gate.create("child", parent_task_id=parent) for _ in range(2)]
    await gate.create()

    await gate.as_agent().cancel_task(task_id=first)
    record, child = await gate.task(parent), await gate.task(second)

    assert record.children == wire.Children(1, 0, 0, 1, [wire.ChildEnd(first, "canceled")])
    assert (child.parent_task_id, record.parent_task_id) == (parent, None)
    page = await gate.as_agent().list_tasks(parent_task_id=parent)
    assert [task.task_id for task in page.tasks] == [second, first]
    assert body(await gate.receipt(second, "task.assigned"))["parent_task_id"] == parent


async def test_children_are_listed_by_what_else_is_asked(gate: Gate) -> None:
    parent = await gate.create("parent")
    first, second, third = [await gate.create(type, parent_task_id=parent) for type in ("a", "b", "a")]
    await gate.as_agent().cancel_task(task_id=first)
    ada = gate.as_agent()

    assert [task.task_id for task in (await ada.list_tasks(parent_task_id=parent, type="a")).tasks] == [third, first]
    assert [task.task_id for task in (await ada.list_tasks(parent_task_id=parent, status="queued")).tasks] == [
        third, second]
    page = await ada.list_tasks(parent_task_id=parent, limit=2)
    rest = await ada.list_tasks(parent_task_id=parent, limit=2, cursor=page.next_cursor)
    assert [task.task_id for task in (*page.tasks, *rest.tasks)] == [third, second, first]


async def test_the_owner_of_a_parent_its_worker_and_an_admin_add_children(gate: Gate) -> None:
    offer = await gate.leased(type="parent")
    as_holder = gate.as_caller("worker", "w1", "agent")

    for who in (gate.as_agent("ada"), as_holder, gate.as_admin()):
        await who.create_task(type="child", payload=1, parent_task_id=offer.task_id)
    for who in (gate.as_agent("bob"), gate.as_caller("worker", "w2", "agent")):
        with refused("forbidden"):
            await who.create_task(type="child", payload=1, parent_task_id=offer.task_id)

    record = await gate.task(offer.task_id)
    assert isinstance(record.children, wire.Children)
    assert record.children.open == 3


async def test_a_worker_that_has_lost_the_lease_adds_no_children(gate: Gate) -> None:
    offer = await gate.leased(type="parent")
    await gate.lose(offer)

    with refused("forbidden"):
        await gate.as_caller("worker", "w1", "agent").create_task(type="child", payload=1,
                                                                  parent_task_id=offer.task_id)


async def test_who_may_read_a_parent_may_read_what_its_worker_has_made(gate: Gate) -> None:
    offer = await gate.leased(type="parent")
    made = await gate.as_caller("worker", "w1", "agent").create_task(type="child", payload=1,
                                                                     parent_task_id=offer.task_id)
    await park(gate, offer)
    await end(gate, made.task_id)
    assert await claim_parent(gate, "w2") is not None

    for reader in (gate.as_agent("ada"), gate.as_worker("w2")):
        assert (await reader.get_task(task_id=made.task_id)).status == "succeeded"
    with refused("forbidden"):
        await gate.as_agent("bob").get_task(task_id=made.task_id)


async def test_a_task_that_has_ended_gets_no_children_and_a_repetition_is_answered_still(gate: Gate) -> None:
    parent = await gate.create("parent")
    fields = {"type": "child", "payload": 1, "parent_task_id": parent, "idempotency_key": "a"}
    first = await gate.as_agent().create_task(**fields)
    await gate.as_agent().cancel_task(task_id=parent)

    with refused("invalid_state_transition", status="canceled"):
        await gate.as_agent().create_task(**{**fields, "idempotency_key": "b"})
    again = await gate.as_agent().create_task(**fields)

    assert (again.task_id, again.payload_differs) == (first.task_id, False)
    assert (await gate.task(parent)).children == wire.Children(1, 0, 0, 0, [])


async def test_the_same_key_with_another_parent_is_another_request(gate: Gate) -> None:
    first, other = await gate.create("parent"), await gate.create("parent")
    fields = {"type": "child", "payload": 1, "idempotency_key": "a"}
    await gate.as_agent().create_task(**fields, parent_task_id=first)

    again = await gate.as_agent().create_task(**fields, parent_task_id=other)

    assert again.payload_differs
    assert not isinstance((await gate.task(other)).children, wire.Children)


async def test_a_parent_must_be_there_and_of_the_same_tenant(gate: Gate) -> None:
    foreign = await gate.stranger().create("parent")

    for parent in ("none", foreign):
        with refused("task_not_found"):
            await gate.create("child", parent_task_id=parent)


async def test_each_task_of_a_batch_joins_its_family_or_is_refused_by_itself(gate: Gate) -> None:
    parent = await gate.create("parent")
    tasks = [{"type": "child", "payload": 1, "parent_task_id": id} for id in (parent.upper(), "none", parent)]

    reply = await gate.as_agent().create_tasks(tasks=tasks)

    assert [item.error and item.error.error for item in reply.results] == [None, "task_not_found", None]
    assert (await gate.task(parent)).children == wire.Children(2, 0, 0, 0, [])


async def test_children_that_end_in_one_batch_are_each_counted(gate: Gate) -> None:
    offer, children = await parent_of(gate, 4)
    await park(gate, offer)
    offers = (await gate.as_worker("w9").lease_next(max_tasks=4)).tasks

    reply = await gate.as_worker("w9").complete_tasks(tasks=[under(child, artifacts=["a"]) for child in offers])

    assert all(item.error is None for item in reply.results)
    assert told(await claim_parent(gate)) == dict.fromkeys(children, "succeeded")


async def test_an_offer_names_the_last_ends_and_counts_all(gate: Gate) -> None:
    offer = await gate.leased(type="parent")
    tasks = [{"type": "child", "payload": 1, "parent_task_id": offer.task_id}] * (MOST_ENDS_TOLD + 5)
    made = [item.task_id for item in (await gate.as_agent().create_tasks(tasks=tasks)).results]
    await park(gate, offer)
    while offers := (await gate.as_worker("w9").lease_next(max_tasks=50, accept_types=["child"])).tasks:
        await gate.as_worker("w9").complete_tasks(tasks=[under(child, artifacts=["a"]) for child in offers])

    again = await claim_parent(gate)

    assert again is not None
    assert isinstance(again.children, wire.Children)
    assert (again.children.open, again.children.succeeded) == (0, MOST_ENDS_TOLD + 5)
    assert list(told(again)) == made[5:]


async def test_a_task_that_has_no_children_says_nothing_of_them(gate: Gate) -> None:
    offer = await gate.leased()

    assert not isinstance(offer.children, wire.Children)
    assert not isinstance((await gate.task(offer.task_id)).children, wire.Children)


# Cancel.


@needs_families
async def test_cascade_cancels_all_descendants_that_have_not_ended(gate: Gate) -> None:
    top = await gate.create("parent")
    child, done = [await gate.create("child", parent_task_id=top) for _ in range(2)]
    grandchild, beside = [await gate.create("leaf", parent_task_id=parent) for parent in (child, done)]
    await end(gate, done)
    stranger = await gate.create()

    canceled = await gate.as_agent().cancel_task(task_id=top, cascade=True, reason="too late")
    again = await gate.as_agent().cancel_task(task_id=top, cascade=True)

    assert (canceled.ok, canceled.descendants, again.ok, again.descendants) == (True, 3, True, 0)
    states = [(await gate.task(task_id)).status for task_id in (top, child, grandchild, beside, done, stranger)]
    assert states == ["canceled"] * 4 + ["succeeded", "queued"]
    why = body(await gate.receipt(grandchild, "task.canceled"))
    assert why | {"cascade_of": top, "reason": "too late", "canceled_by": {"kind": "agent", "id": "ada"}} == why
    assert [receipt.task_id for receipt in await gate.owed()] == [stranger]


async def test_without_cascade_children_go_on(gate: Gate) -> None:
    parent = await gate.create("parent")
    child = await gate.create("child", parent_task_id=parent)

    canceled = await gate.as_agent().cancel_task(task_id=parent)

    assert canceled.descendants is None
    assert (await gate.task(child)).status == "queued"
    await end(gate, child)
    assert (await gate.task(parent)).children == wire.Children(0, 1, 0, 0, [wire.ChildEnd(child, "succeeded")])


@needs_families
async def test_a_cascade_below_a_task_lets_its_parent_go_on(gate: Gate) -> None:
    offer, (child,) = await parent_of(gate, 1)
    await gate.create("leaf", parent_task_id=child)
    await park(gate, offer)

    await gate.as_agent().cancel_task(task_id=child, cascade=True)

    assert told(await claim_parent(gate)) == {child: "canceled"}


@needs_families
async def test_a_cascade_ends_a_large_family_also_below_a_task_that_has_succeeded(gate: Gate) -> None:
    offer = await gate.leased(type="parent")
    tasks = [{"type": "child", "payload": 1, "parent_task_id": offer.task_id}] * 120
    await gate.as_agent().create_tasks(tasks=tasks)
    await gate.as_worker().complete(**under(offer), artifacts=["a"])

    answer = await gate.as_agent().cancel_task(task_id=offer.task_id, cascade=True)

    assert (answer.ok, answer.status, answer.descendants) == (False, "succeeded", 120)
    children = (await gate.task(offer.task_id)).children
    assert isinstance(children, wire.Children)
    assert (children.open, children.canceled) == (0, 120)


@needs_families
async def test_only_whoever_may_cancel_a_task_cancels_its_family(gate: Gate) -> None:
    parent = await gate.create("parent")
    child = await gate.create("child", parent_task_id=parent)

    with refused("forbidden"):
        await gate.as_agent("bob").cancel_task(task_id=parent, cascade=True)

    assert (await gate.task(child)).status == "queued"


# Waiting for several tasks.


@pytest.mark.parametrize(("until", "done"), [("any", [False, True, True]), ("all", [False, False, True])])
async def test_tasks_are_waited_for_until_any_or_all_have_ended(gate: Gate, until: str, done: list[bool]) -> None:
    ids = [await gate.create("child") for _ in range(2)]
    ada, replies = gate.as_agent(), []
    for task_id in (None, *ids):
        if task_id is not None:
            await end(gate, task_id, "canceled")
        replies.append(await ada.wait_tasks(ids=ids, until=until))

    assert [reply.done for reply in replies] == done
    assert [reply.open for reply in replies] == [2, 1, 0]
    assert replies[-1].ended == [wire.ChildEnd(task_id, "canceled") for task_id in ids]


async def test_a_call_that_waits_for_tasks_is_answered_when_they_have_ended(gate: Gate) -> None:
    parent = await gate.create("parent")
    ids = [await gate.create("child", parent_task_id=parent) for _ in range(2)]
    ada = gate.as_agent()
    waits = [asyncio.create_task(ada.wait_tasks(**which, until=until, wait_seconds=30))
             for which in ({"ids": ids}, {"parent_task_id": parent}) for until in ("any", "all")]
    await asyncio.sleep(0)

    await end(gate, ids[0], "failed")
    first = await asyncio.gather(waits[0], waits[2])
    assert [wait.done() for wait in waits] == [True, False, True, False]
    await end(gate, ids[1])
    last = await asyncio.gather(waits[1], waits[3])

    assert [(reply.done, reply.open, reply.ended) for reply in first] == [
        (True, 1, [wire.ChildEnd(ids[0], "failed")])] * 2
    assert [(reply.done, reply.open) for reply in last] == [(True, 0)] * 2


async def test_nobody_waits_for_the_tasks_of_others(gate: Gate) -> None:
    own, other = await gate.create(), await gate.create(by="bob")

    with refused("forbidden"):
        await gate.as_agent().wait_tasks(ids=[own, other])
    with refused("task_not_found"):
        await gate.as_agent().wait_tasks(ids=[own, "none"])
    with refused("invalid_request"):
        await gate.as_agent().wait_tasks(ids=[own], parent_task_id=own)
    with refused("invalid_request"):
        await gate.as_agent().wait_tasks()


# Races.


async def test_a_parent_that_parks_while_its_children_end_never_hangs(gates: tuple[Gate, Gate]) -> None:
    here, there = gates
    for number in range(6):
        offer, children = await parent_of(here, 3)
        offers = (await there.as_worker("w9").lease_next(max_tasks=3, accept_types=["child"])).tasks
        ends = [there.as_worker("w9").complete(**under(child), artifacts=["a"]) for child in offers[:2]]
        ends.append((here if number % 2 else there).as_agent().cancel_task(task_id=offers[2].task_id))

        await asyncio.gather(*ends[:number % 3], park(here, offer), *ends[number % 3:])

        again = await claim_parent(there)
        assert set(told(again)) == set(children)
        assert again is not None
        await there.as_worker().complete(**under(again), artifacts=["a"])


async def test_a_child_added_while_others_end_is_waited_for(gates: tuple[Gate, Gate]) -> None:
    here, there = gates
    for _ in range(4):
        offer, (child,) = await parent_of(here, 1)
        await park(here, offer)
        late, _ = await asyncio.gather(
            there.as_agent().create_task(type="child", payload=1, parent_task_id=offer.task_id),
            here.as_agent().cancel_task(task_id=child))
        record = await here.task(offer.task_id)
        assert isinstance(record.children, wire.Children)
        assert (record.children.open, record.children.canceled) == (1, 1)
        await here.as_agent().cancel_task(task_id=late.task_id)
        again = await claim_parent(there)
        assert again is not None
        await there.as_worker().complete(**under(again), artifacts=["a"])


# Erasure and retention.


async def test_a_parent_goes_on_when_the_creator_of_its_children_is_erased(gate: Gate) -> None:
    offer = await gate.leased(type="parent")
    await gate.as_caller("worker", "w1", "agent").create_task(type="child", payload=1, parent_task_id=offer.task_id)
    await park(gate, offer)

    await gate.as_admin().erase_principal(principal_kind="worker", principal_id="w1", confirm="w1")

    assert list(told(await claim_parent(gate, "w2")).values()) == ["canceled"]


async def test_a_parent_still_counts_children_that_were_pruned(make_gate: Callable[..., Gate], tmp_path: Path) -> None:
    gate = make_gate(archive=ArchiveSettings(directory=str(tmp_path)), task_retention_days=10)
    offer, (done, late) = await parent_of(gate, 2)
    await end(gate, done)
    await park(gate, offer)
    gate.skip(40 * DAY)

    assert (await gate.as_admin().run_archive()).tasks_pruned == 1
    await end(gate, late, "canceled")

    assert told(await claim_parent(gate)) == {done: "succeeded", late: "canceled"}


async def test_a_child_ends_whose_parent_was_pruned(make_gate: Callable[..., Gate], tmp_path: Path) -> None:
    gate = make_gate(archive=ArchiveSettings(directory=str(tmp_path)), task_retention_days=10)
    offer, (child,) = await parent_of(gate, 1)
    await gate.as_worker().complete(**under(offer), artifacts=["a"])
    gate.skip(40 * DAY)
    assert (await gate.as_admin().run_archive()).tasks_pruned == 1

    await end(gate, child)

    assert (await gate.task(child)).parent_task_id == offer.task_id
    with refused("task_not_found"):
        await gate.create("child", parent_task_id=offer.task_id)


# Why it waits.


async def test_what_waits_for_its_children_says_for_which(gate: Gate) -> None:
    offer, children = await parent_of(gate, 3)
    await end(gate, children[0], "failed")
    await park(gate, offer)

    outcome = await gate.as_agent().explain_task(task_id=offer.task_id)

    assert [outcome.cause, *(cause.cause for cause in outcome.also)] == ["children_open"]
    assert outcome.summary == "It waits for its children: 1 of 3 has ended (1 failed)."
    assert (outcome.evidence.held, outcome.next.operation, outcome.next.arguments) == (
        "children_open", "list_tasks", {"parent_task_id": offer.task_id})
    assert len((await gate.as_agent().list_tasks(**outcome.next.arguments)).tasks) == 3


@needs_families
async def test_a_cascade_that_was_cut_off_is_finished_by_upkeep(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncgate.extras.families import rules
    top = await gate.create("parent")
    child = await gate.create("child", parent_task_id=top)
    leaf = await gate.create("leaf", parent_task_id=child)
    with monkeypatch.context() as broken:
        broken.setattr(gate.engine.on, "after_call", ())       # as if the process had ended behind the commit
        await gate.as_agent().cancel_task(task_id=top, cascade=True, reason="too late")
    cut_off = (await gate.task(leaf)).status

    early = await rules.resume_cascades(gate.engine)
    gate.skip(61)
    finished = await rules.resume_cascades(gate.engine), await rules.resume_cascades(gate.engine)

    assert (cut_off, early, finished) == ("queued", 0, (2, 0))
    why = body(await gate.receipt(leaf, "task.canceled"))
    assert why | {"cascade_of": top, "reason": "too late", "canceled_by": {"kind": "agent", "id": "ada"}} == why


@needs_families
@pytest.mark.skipif(not load.CAN_ASK, reason="the extra asking is not here")
async def test_what_finishes_a_cut_cascade_for_a_judgment_leaves_no_question_open(
        gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    top = (await gate.leased("w2", type="parent")).task_id
    offer = await gate.leased(type="child", parent_task_id=top)
    await gate.as_worker("w1").request_input(**under(offer), key="may", message="May I?")
    with monkeypatch.context() as broken:
        broken.setattr(gate.engine.on, "after_call", ())
        await gate.as_agent().cancel_task(task_id=top, cascade=True)

    await load.finish_cascades(load.OneTenant(gate.backend, gate.tenant_id))

    assert (await gate.task(offer.task_id)).status == "canceled"
    told = body(await gate.receipt(offer.task_id, "input.expired"))
    assert (told["key"], told["reason"]) == ("may", "task_ended")
