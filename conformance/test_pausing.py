"""Pausing work: what is paused gets no new leases, running ones go on, and claims wake when a pause ends."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from asyncgate import SCOPES, Caller, Engine
from asyncgate.conformance import harness, test_waiting
from asyncgate.parts.model import queries, stored, wire

pytestmark = pytest.mark.anyio

GPU = {"capabilities": ["gpu"]}


def later(gate: harness.Gate, seconds: float) -> datetime:
    """Return a moment from now."""
    return datetime.fromtimestamp(gate.now() + seconds, UTC)


async def audited(gate: harness.Gate) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of the audit log, with what their lines say."""
    lines = await gate.backend.page(gate.tenant_id, queries.Rows(stored.Audit))
    return [(line.event, msgspec.json.decode(line.body)) for line in lines]


# What is paused.


@pytest.mark.parametrize(("target", "claimable"), [
    ({"type": "a"}, ["b", "b gpu"]),
    ({"type": "a", "capabilities": []}, ["a gpu", "b", "b gpu"]),
    ({"type": "a", "capabilities": ["gpu"]}, ["a", "b", "b gpu"]),
    ({"worker": "w1"}, []), ({"worker": "w2"}, ["a", "a gpu", "b", "b gpu"]),
    ({"whole_tenant": True}, [])])
async def test_what_is_paused_is_leased_to_nobody_and_all_else_is(
        gate: harness.Gate, target: dict[str, Any], claimable: list[str]) -> None:
    made = {await gate.create(type=type, requirements=needs): name for type, needs, name in (
        ("a", {}, "a"), ("a", GPU, "a gpu"), ("b", {}, "b"), ("b", GPU, "b gpu"))}

    await gate.as_admin().pause_work(**target)

    offers = await gate.as_worker().lease_next(max_tasks=10, **GPU)
    assert [made[offer.task_id] for offer in offers.tasks] == claimable


async def test_a_paused_type_hides_no_task_behind_it(gate: harness.Gate) -> None:
    for _ in range(40):
        await gate.create(type="paused", priority=9)
    wanted = await gate.create(type="open")
    await gate.as_admin().pause_work(type="paused")

    offer = await gate.claim()

    assert offer is not None
    assert offer.task_id == wanted
    assert await gate.claim() is None


async def test_running_leases_go_on(gate: harness.Gate) -> None:
    offer, other = await gate.leased(type="a"), await gate.leased(type="a")

    paused = await gate.as_admin().pause_work(type="a")

    assert paused.leases_left == 2
    await gate.as_worker().renew_lease(**harness.under(offer))
    await gate.as_worker().complete(**harness.under(offer), artifacts=[{"uri": "x"}])
    await gate.as_worker().fail(**harness.under(other), error="no", retryable=True, retry_after_seconds=0)
    assert (await gate.task(offer.task_id)).status == "succeeded"
    assert await gate.claim() is None
    await gate.as_admin().resume_work(type="a")
    again = await gate.claim()
    assert again is not None
    assert again.task_id == other.task_id


async def test_a_repeated_claim_gets_the_leases_that_it_has(gate: harness.Gate) -> None:
    await gate.create()
    first = await gate.claim(claim_id="c1")

    await gate.as_admin().pause_work(whole_tenant=True)

    again = await gate.claim(claim_id="c1")
    assert again is not None
    assert first is not None
    assert again.lease_id == first.lease_id


async def test_an_empty_claim_is_told_what_is_paused(gate: harness.Gate) -> None:
    admin, until = gate.as_admin(), later(gate, 600)
    await admin.pause_work(type="a", until=until, reason="the model is down")
    await admin.pause_work(type="b", capabilities=["gpu"])

    async def told(**claim: Any) -> Any:
        return (await gate.as_worker().lease_next(**claim)).warnings

    of_a = f"type a is paused until {until:%Y-%m-%d %H:%M:%S} UTC: the model is down"
    of_b = "type b with the capability gpu is paused until somebody resumes it"
    assert await told() == [of_a]
    assert await told(accept_types=["b", "c"], **GPU) == [of_b]
    assert await told(**GPU) == [f"{of_a}; {of_b}"]
    assert await told(accept_types=["c"]) is msgspec.UNSET
    await admin.pause_work(worker="w1", reason="look at it")
    assert await told(accept_types=["c"]) == ["worker w1 is paused until somebody resumes it: look at it"]
    await admin.pause_work(whole_tenant=True)
    assert (await gate.as_worker("w2").lease_next()).warnings == [
        "the whole tenant is paused until somebody resumes it"]


async def test_a_claim_that_gets_tasks_is_told_nothing(gate: harness.Gate) -> None:
    await gate.as_admin().pause_work(type="a")
    await gate.create(type="b")

    offers = await gate.as_worker().lease_next()

    assert len(offers.tasks) == 1
    assert offers.warnings is msgspec.UNSET


# Until when.


async def test_a_pause_ends_at_its_time(gate: harness.Gate) -> None:
    await gate.create(type="a")
    await gate.as_admin().pause_work(type="a", until=later(gate, 60))
    assert await gate.claim() is None

    gate.skip(61)

    assert (await gate.as_admin().list_pauses()).pauses == []
    assert await gate.claim() is not None


async def test_a_claim_that_waits_is_called_when_a_pause_ends_by_itself(gate: harness.Gate) -> None:
    await gate.as_admin().pause_work(type="a", until=later(gate, 3600))
    task_id = await gate.create(type="a")
    gate.skip(3599.8)       # the rest passes by itself; a shorter pause could be over before a busy gate has read it

    assert await test_waiting.got(test_waiting.start(test_waiting.wait(gate))) == [task_id]


async def test_a_claim_that_waits_is_called_when_somebody_ends_the_pause(gate: harness.Gate) -> None:
    task_id = await gate.create(type="a")
    await gate.as_admin().pause_work(type="a")
    claim = test_waiting.start(test_waiting.wait(gate))
    await test_waiting.settle(gate, 1)

    await gate.as_admin().resume_work(type="a")

    assert await test_waiting.got(claim) == [task_id]


async def test_a_paused_worker_that_waits_takes_no_call_from_others(gate: harness.Gate) -> None:
    first = test_waiting.start(test_waiting.wait(gate, "w1"))
    await test_waiting.settle(gate, 1)
    await gate.as_admin().pause_work(worker="w1")
    second = test_waiting.start(test_waiting.wait(gate, "w2"))
    await test_waiting.settle(gate, 2)

    task_id = await gate.create()

    assert await test_waiting.got(second) == [task_id]
    more = await gate.create()
    await test_waiting.settle(gate, 1)
    assert not first.done()
    await gate.as_admin().resume_work(worker="w1")
    assert await test_waiting.got(first) == [more]


async def test_of_a_worker_that_is_paused_while_it_is_called_the_call_goes_on_to_another(gate: harness.Gate) -> None:
    claims = [test_waiting.start(test_waiting.wait(gate, "w1")), test_waiting.start(test_waiting.wait(gate, "w2"))]
    await test_waiting.settle(gate, 2)

    task_id, _ = await asyncio.gather(gate.create(), gate.as_admin().pause_work(worker="w1"))

    done, _ = await asyncio.wait(claims, return_when=asyncio.FIRST_COMPLETED, timeout=harness.PATIENCE)
    assert [await test_waiting.got(claim) for claim in done] == [[task_id]]
    await gate.as_admin().resume_work(worker="w1")
    await gate.create()
    await asyncio.gather(*map(test_waiting.got, claims))


async def test_a_time_that_has_passed_is_refused(gate: harness.Gate) -> None:
    with harness.refused("invalid_request"):
        await gate.as_admin().pause_work(type="a", until=later(gate, -1))


# Who, and what is written down.


async def test_pauses_are_listed_with_what_was_said_of_them(gate: harness.Gate) -> None:
    offer = await gate.leased(type="a")
    until = later(gate, 60)
    await gate.as_admin().pause_work(type="a", capabilities=[], until=until, reason="why not")
    await gate.as_admin("bob").pause_work(worker="w1")
    await gate.as_admin().pause_work(whole_tenant=True)

    of_a, of_worker, of_all = (await gate.as_admin().list_pauses()).pauses

    assert (of_a.type, of_a.capabilities, of_a.worker, of_a.whole_tenant) == ("a", [], None, False)
    assert of_a.until is not None
    assert of_a.until.timestamp() == pytest.approx(until.timestamp())
    assert (of_a.reason, str(of_a.paused_by), of_a.leases_left) == ("why not", "human root", 1)
    assert (of_worker.type, of_worker.worker, str(of_worker.paused_by), of_worker.leases_left) == (
        None, "w1", "human bob", 1)
    assert (of_all.whole_tenant, of_all.until, of_all.leases_left) == (True, None, 1)
    await gate.as_worker().complete(**harness.under(offer), artifacts=[{"uri": "x"}])
    assert [pause.leases_left for pause in (await gate.as_admin().list_pauses()).pauses] == [0, 0, 0]


async def test_a_pause_that_is_asked_for_again_changes_and_a_resumed_one_is_gone(gate: harness.Gate) -> None:
    admin = gate.as_admin()
    first = await admin.pause_work(type="a", reason="one")
    gate.skip(5)

    second = await admin.pause_work(type="a", reason="two", until=later(gate, 60))

    assert (second.since, second.reason) == (first.since, "two")
    assert len((await admin.list_pauses()).pauses) == 1
    await admin.pause_work(type="b")
    ended = await admin.resume_work(type="a")
    assert (ended.resumed, ended.pauses_left) == (True, 1)
    again = await admin.resume_work(type="a")
    assert (again.resumed, again.pauses_left) == (False, 1)


async def test_the_end_of_the_pause_of_the_tenant_leaves_the_others(gate: harness.Gate) -> None:
    admin = gate.as_admin()
    await admin.pause_work(whole_tenant=True)
    await admin.pause_work(type="a")
    await gate.create(type="a")

    await admin.resume_work(whole_tenant=True)

    assert await gate.claim() is None
    assert [pause.type for pause in (await admin.list_pauses()).pauses] == ["a"]


@pytest.mark.one_store
@pytest.mark.parametrize("fields", [
    {}, {"type": "a", "worker": "w1"}, {"type": "a", "whole_tenant": True}, {"worker": "w1", "capabilities": []},
    {"whole_tenant": True, "capabilities": ["gpu"]}])
@pytest.mark.parametrize("operation", ["pause_work", "drain_work", "resume_work"])
async def test_a_request_names_exactly_one_thing(gate: harness.Gate, operation: str, fields: dict[str, Any]) -> None:
    with harness.refused("invalid_request"):
        await getattr(gate.as_admin(), operation)(**fields)


async def test_each_change_is_audited_once(gate: harness.Gate) -> None:
    admin = gate.as_admin()
    await admin.pause_work(type="a", reason="why")
    await admin.pause_work(type="a", reason="why")
    await admin.drain_work(type="a")
    await admin.drain_work(worker="w1")
    await admin.resume_work(type="a", reason="well again")
    await admin.resume_work(type="a")

    told = [(event, details["target"], details.get("reason"), details["principal_id"])
            for event, details in await audited(gate)]
    assert told == [("work_paused", "type a", "why", "root"), ("work_draining", "worker w1", None, "root"),
                    ("work_resumed", "type a", "well again", "root")]


async def test_a_tenant_has_no_more_pauses_than_every_claim_can_read(gate: harness.Gate) -> None:
    for number in range(100):
        await gate.as_admin().pause_work(type=f"t{number}")

    with harness.refused("invalid_request"):
        await gate.as_admin().pause_work(type="one more")
    await gate.as_admin().pause_work(type="t7", reason="again")


async def test_another_tenant_goes_on(gate: harness.Gate) -> None:
    other = gate.stranger()
    await other.create(type="a")

    await gate.as_admin().pause_work(type="a")
    await gate.as_admin().pause_work(whole_tenant=True)

    assert await other.claim() is not None
    assert (await other.as_admin().list_pauses()).pauses == []
    assert (await other.as_admin().resume_work(whole_tenant=True)).resumed is False
    with harness.refused("tenant_not_found"):
        await other.as_admin().pause_work(whole_tenant=True, tenant=gate.tenant_id)


async def test_the_operator_pauses_another_tenant(gate: harness.Gate) -> None:
    own = gate.beside(default_tenant_id=gate.tenant_id)
    other = own.stranger()
    await other.create()

    await own.as_admin().pause_work(whole_tenant=True, tenant=other.tenant_id)

    assert await other.claim() is None
    assert [pause.whole_tenant for pause in (await other.as_admin().list_pauses()).pauses] == [True]
    assert [event for event, _ in await audited(other)] == ["work_paused"]


@pytest.mark.one_store
@pytest.mark.parametrize("role", ["agent", "worker", "reader"])
async def test_only_an_admin_who_may_write_pauses(gate: harness.Gate, role: str) -> None:
    who = Caller(gate.tenant_id, wire.Principal("human", "x"), "admin", SCOPES - {"admin:write"})
    view = {"agent": gate.as_agent(), "worker": gate.as_worker(), "reader": harness.View(gate.engine, who)}[role]
    for operation in ("pause_work", "drain_work", "resume_work"):
        with harness.refused("forbidden"):
            await getattr(view, operation)(type="a")


# Draining.


async def test_a_drain_says_how_many_leases_are_left_until_there_are_none(gate: harness.Gate) -> None:
    first, second = await gate.leased(type="a"), await gate.leased("w2", type="a")
    await gate.create(type="a")

    assert (await gate.as_admin().drain_work(type="a")).leases_left == 2

    assert await gate.claim() is None
    await gate.as_worker().complete(**harness.under(first), artifacts=[{"uri": "x"}])
    assert (await gate.as_admin().drain_work(type="a")).leases_left == 1
    await gate.lose(second)
    assert (await gate.as_admin().drain_work(type="a")).leases_left == 0


async def test_a_drain_that_waits_is_answered_when_the_last_lease_has_ended(gate: harness.Gate) -> None:
    first, second = await gate.leased(), await gate.leased("w2")
    drain = test_waiting.start(gate.as_admin().drain_work(whole_tenant=True, wait_seconds=30))
    async with asyncio.timeout(harness.PATIENCE):
        await gate.as_worker().release_lease(**harness.under(first))
        await gate.as_worker("w2").complete(**harness.under(second), artifacts=[{"uri": "x"}])

        assert (await drain).leases_left == 0
    assert not gate.engine.polls.tenants


async def test_a_drain_whose_time_is_over_says_what_is_left(gate: harness.Gate) -> None:
    await gate.leased()

    assert (await gate.as_admin().drain_work(worker="w1", wait_seconds=0.01)).leases_left == 1


async def test_a_drain_keeps_until_and_reason_of_the_pause_that_there_is(gate: harness.Gate) -> None:
    paused = await gate.as_admin().pause_work(type="a", until=later(gate, 60), reason="why")

    drained = await gate.as_admin("bob").drain_work(type="a")

    assert (drained.until, drained.reason, str(drained.paused_by)) == (paused.until, "why", "human root")


# Other processes, and restarts.


async def test_a_pause_holds_in_another_process_and_after_a_restart(gate: harness.Gate) -> None:
    await gate.create(type="a")
    await gate.create(type="b")
    await gate.as_admin().pause_work(type="a")

    beside = gate.beside()

    offer = await beside.claim()
    assert offer is not None
    assert offer.type == "b"
    assert await beside.claim() is None
    await beside.as_admin().resume_work(type="a")
    again = await gate.claim()
    assert again is not None
    assert again.type == "a"


async def test_of_claims_that_race_with_a_pause_none_gets_a_lease_after_it(gate: harness.Gate) -> None:
    await gate.as_agent().create_tasks(tasks=[{"type": "a", "payload": None}] * 60)
    other, granted = gate.beside(), list[float]()

    async def claim(view: harness.Gate, worker: str) -> None:
        while (await view.claim(worker)) is not None:
            granted.append(asyncio.get_running_loop().time())

    racers = [asyncio.ensure_future(claim(peer, f"w{number}")) for number, peer in enumerate([gate, other] * 4)]
    while len(granted) < 5:     # noqa: ASYNC110 - the racers say nothing
        await asyncio.sleep(0)
    await gate.as_admin().pause_work(type="a")
    leases = (await gate.as_admin().list_pauses()).pauses[0].leases_left
    await asyncio.gather(*racers)

    assert (await gate.as_admin().list_pauses()).pauses[0].leases_left == leases
    assert isinstance(gate.engine, Engine)
