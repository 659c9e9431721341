"""Naming the caller: incomplete names are refused, and filters are applied or refused (3, 18.2, 18.5, 19.6)."""

from __future__ import annotations

from typing import Any

import pytest

from asyncgate.conformance.harness import Gate, refused, under
from asyncgate.parts.model import wire
from asyncgate.parts.model.identities import IDENTITY_MEMBERS
from asyncgate.parts.operations import OPERATIONS

pytestmark = pytest.mark.anyio

ABOUT = ["list_open_obligations", "bootstrap", "list_leases"]
HALVES: list[dict[str, Any]] = [
    {"principal_kind": "agent"}, {"worker_kind": "worker"}, {"created_by": {}}, {"created_by": {"kind": "agent"}},
    {"created_by": {"principal_kind": "human"}}, {"created_by": {"instance_id": "i"}}, {"tasker_principal": {}},
    {"tasker_principal": {"principal_kind": "agent"}}]


def shared(gate: Gate) -> Gate:
    """Return the gate for the shared token, with which requests name the caller."""
    whole = Gate(gate.engine, gate.tenant_id)
    whole.caller = type(whole.caller)(gate.tenant_id, wire.Principal("system", "asyncgate"), "admin",
                                      whole.caller.scopes,
                                      bound=False)
    return whole


@pytest.mark.one_store
@pytest.mark.parametrize("operation", ABOUT)
@pytest.mark.parametrize("named", [{}, {"principal_kind": "agent"}, {"principal_instance_id": "i"},
                                   {"worker_kind": "worker"}, {"worker_instance_id": "i"}])
async def test_a_read_about_somebody_needs_a_name(gate: Gate, operation: str, named: dict[str, str]) -> None:
    """12, PH.6.2: an agent with a typo in its name must not get an empty list of obligations."""
    with refused("invalid_request"):
        await getattr(shared(gate), operation)(**named)


async def test_a_read_about_a_named_somebody_is_answered(gate: Gate) -> None:
    await gate.leased("w1")

    owed = await shared(gate).list_open_obligations(principal_kind="agent", principal_id="ada")
    held = await shared(gate).list_leases(worker_id="w1")

    assert (owed.relationship.principal_id, len(owed.open_obligations), len(held.leases)) == ("ada", 1, 1)


@pytest.mark.one_store
@pytest.mark.parametrize("who", HALVES)
async def test_a_create_with_half_an_identity_is_refused(gate: Gate, who: dict[str, Any]) -> None:
    half = "worker_kind" not in who      # members that a create does not accept
    if half:
        for view in (shared(gate), gate.as_agent(), gate.as_admin()):
            with refused("invalid_request"):
                await view.create_task(type="demo", payload=None, **who)

    assert [task for task in (await gate.as_admin().list_tasks()).tasks if half] == []


async def test_half_an_identity_in_a_batch_refuses_that_item_only(gate: Gate) -> None:
    reply = await shared(gate).create_tasks(principal_id="ada", tasks=[
        {"type": "demo", "payload": None}, {"type": "demo", "payload": None, "created_by": {}},
        {"type": "demo", "payload": None, "principal_kind": "human"},
        {"type": "demo", "payload": None, "created_by": {"principal_id": "bob"}}])

    assert [item.error and item.error.error for item in reply.results] == [
        None, "invalid_request", "invalid_request", None]


async def test_a_create_that_names_nobody_belongs_to_the_fallback_owner(gate: Gate) -> None:
    made = await shared(gate).create_task(type="demo", payload=None)

    owner = (await gate.task(made.task_id)).created_by
    assert (owner.kind, owner.id) == ("system", "asyncgate")      # 19.6


async def test_a_create_may_call_its_creator_the_tasker(gate: Gate) -> None:
    """18.6."""
    bob = {"principal_kind": "human", "principal_id": "bob"}
    made = await shared(gate).create_task(type="demo", payload=None, tasker_principal=bob)
    [item] = (await shared(gate).create_tasks(principal_id="ada", tasks=[
        {"type": "demo", "payload": None, "tasker_principal": bob}])).results

    for task_id in (made.task_id, item.task_id):
        owner = (await gate.task(task_id)).created_by
        assert (owner.kind, owner.id) == ("human", "bob")
    with refused("forbidden"):
        await gate.as_agent().create_task(type="demo", payload=None, tasker_principal=bob)


async def test_an_instance_completes_what_the_credential_says(gate: Gate) -> None:
    """18.2: the key names the principal, the request its session."""
    await gate.create()
    w1 = gate.as_worker("w1")

    offer = (await w1.lease_next(worker_instance_id="here")).tasks[0]

    assert [held.worker for held in (await w1.list_leases()).leases] == [wire.Principal("worker", "w1", "here")]
    with refused("lease_invalid_or_expired"):
        await w1.complete(**under(offer, worker_instance_id="there"))
    await w1.complete(**under(offer, worker_instance_id="here"))


@pytest.mark.parametrize("kind", ["agent", "human", "service", "worker"])
async def test_created_by_alone_finds_whatever_kind_made_the_task(gate: Gate, kind: str) -> None:
    """18.5: the query does not name a kind."""
    made = [await shared(gate).create_task(type="demo", payload=None, principal_kind=kind,
                                           principal_id="eve") for _ in range(3)]
    await gate.create(by="ada")
    ids = [task.task_id for task in made][::-1]

    tasks = await gate.as_admin().list_tasks(created_by="eve")
    page = await gate.as_admin().list_tasks(created_by="eve", limit=2)
    rest = await gate.as_admin().list_tasks(created_by="eve", limit=2, cursor=page.next_cursor)

    assert [task.task_id for task in tasks.tasks] == ids
    assert [task.task_id for task in (*page.tasks, *rest.tasks)] == ids
    assert len((await gate.as_admin().list_tasks(created_by="eve", created_by_kind=kind)).tasks) == 3
    other = "human" if kind != "human" else "agent"
    assert (await gate.as_admin().list_tasks(created_by="eve", created_by_kind=other)).tasks == []


async def test_a_name_that_several_kinds_have_finds_all_of_them_in_order(gate: Gate) -> None:
    made = [(await shared(gate).create_task(type="demo", payload=None, principal_kind=kind, principal_id="eve")).task_id
            for kind in ("agent", "human", "worker", "agent")]

    tasks = await gate.as_admin().list_tasks(created_by="eve")
    inbox = await gate.receipts(to_id="eve")
    first = await gate.as_admin().list_receipts(to_id="eve", limit=3)
    rest = await gate.as_admin().list_receipts(to_id="eve", limit=3, since_receipt_id=first.cursor)

    assert [task.task_id for task in tasks.tasks] == made[::-1]
    assert [receipt.task_id for receipt in inbox] == made
    assert [receipt.task_id for receipt in (*first.receipts, *rest.receipts)] == made


async def test_an_agent_may_name_itself_without_its_kind_and_nobody_else(gate: Gate) -> None:
    task_id = await gate.create(by="ada")
    await gate.create(by="bob")
    ada = gate.as_agent("ada")

    assert [task.task_id for task in (await ada.list_tasks(created_by="ada")).tasks] == [task_id]
    assert [receipt.task_id for receipt in (await ada.list_receipts(to_id="ada")).receipts] == [task_id]
    for operation, name in (("list_tasks", "created_by"), ("list_receipts", "to_id")):
        with refused("forbidden"):
            await getattr(ada, operation)(**{name: "bob"})


@pytest.mark.parametrize(("operation", "filter"), [
    ("list_tasks", {"created_by_kind": "agent"}), ("list_tasks", {"principal_kind": "agent"}),
    ("list_tasks", {"status": "bogus"}), ("list_tasks", {"created_by": "ada", "created_by_kind": "bogus"}),
    ("list_receipts", {"to_kind": "agent"}), ("list_receipts", {"receipt_type": "bogus"}),
    ("list_receipts", {"to_kind": "bogus", "to_id": "ada"})])
async def test_a_filter_is_applied_or_refused(gate: Gate, operation: str, filter: dict[str, str]) -> None:
    """to_kind without to_id must not show the receipts of others."""
    await gate.finished()

    for view in (gate.as_admin(), gate.as_agent(), shared(gate)):
        with refused("invalid_request"):
            await getattr(view, operation)(**filter)


async def test_every_type_of_receipt_can_be_asked_for(gate: Gate) -> None:
    await gate.finished()

    assert [len(await gate.receipts(type=type)) for type in ("task.assigned", "task.progress", "system.anomaly")] == [
        1, 0, 0]


async def test_bootstrap_without_a_cursor_shows_the_most_recent_ones(gate: Gate) -> None:
    """13: receipts since a cursor, or the most recent N, oldest first; the cursor continues after them."""
    tasks = [await gate.create() for _ in range(5)]
    ada = gate.as_agent("ada")

    welcome = await ada.bootstrap(max_items=2)
    tasks.append(await gate.create())
    later = await ada.bootstrap(max_items=2, since_receipt_id=welcome.cursor.latest_receipt_id)

    assert [receipt.task_id for receipt in welcome.attention.inbox_receipts] == tasks[3:5]
    assert [receipt.task_id for receipt in later.attention.inbox_receipts] == tasks[5:]


# Each of these would otherwise be resolved in silence, and somebody would act as another than they wrote.
CONTRADICTIONS: list[dict[str, Any]] = [
    {"agent_id": "al", "principal_id": "bo"}, {"agent_id": "al", "principal_kind": "human"},
    {"agent_id": "al", "principal_id": "al", "principal_kind": "service"},
    {"worker_id": "w", "principal_id": "bo"}, {"worker_id": "w", "agent_id": "w"},
    {"worker_id": "w", "principal_kind": "agent", "principal_id": "w"},
    {"worker_id": "w", "worker_kind": "worker", "principal_kind": "agent"},
    {"agent_id": "al", "agent_instance_id": "a", "principal_instance_id": "b"},
    {"worker_id": "w", "worker_instance_id": "a", "principal_instance_id": "b"},
    {"created_by": {"id": "al"}, "principal_id": "bo"}, {"created_by": {"id": "al", "principal_id": "bo"}},
    {"created_by": {"kind": "human", "principal_kind": "agent", "id": "al"}},
    {"created_by": {"kind": "human", "id": "al"}, "agent_id": "al"},
    {"created_by": {"id": "al", "instance_id": "a"}, "principal_instance_id": "b"}]
AGREEMENTS: list[dict[str, Any]] = [
    {"agent_id": "al", "principal_id": "al"}, {"agent_id": "al", "principal_kind": "agent", "principal_id": "al"},
    {"agent_id": "al", "agent_instance_id": "a", "principal_instance_id": "a"},
    {"created_by": {"kind": "agent", "id": "al", "principal_kind": "agent", "principal_id": "al"}},
    {"created_by": {"id": "al"}, "agent_id": "al"}]


@pytest.mark.one_store
@pytest.mark.parametrize("named", CONTRADICTIONS, ids=str)
async def test_a_request_that_names_two_principals_is_refused_by_each_operation(
        gate: Gate, named: dict[str, Any]) -> None:
    tried = 0
    async with gate.unchanged():
        for op in OPERATIONS.values():
            if set(named) <= set(op.takes.__struct_fields__) and not (
                    op.open or op.reader.is_batch or ("created_by" in named and not op.takes.creates)):
                tried += 1
                least = {name: value for name, value in op.takes.example[0].items() if name not in IDENTITY_MEMBERS}
                with refused("invalid_request") as told:
                    await getattr(shared(gate), op.name)(**{**least, **named})
                assert "one principal" in str(told.value), op.name
    assert tried


@pytest.mark.one_store
@pytest.mark.parametrize("named", AGREEMENTS, ids=str)
async def test_a_request_may_name_one_principal_twice(gate: Gate, named: dict[str, Any]) -> None:
    made = await shared(gate).create_task(type="demo", payload=None, **named)

    assert (await gate.task(made.task_id)).created_by.id == "al"


async def test_two_principals_in_an_item_of_a_batch_refuse_that_item_only(gate: Gate) -> None:
    reply = await shared(gate).create_tasks(tasks=[
        {"type": "demo", "payload": None, "agent_id": "al", "principal_id": "bo"}, {"type": "demo", "payload": None}])

    assert [item.error and item.error.error for item in reply.results] == ["invalid_request", None]


async def test_two_spellings_of_one_member_may_not_differ(gate: Gate) -> None:
    both = {"lease_ttl": 9, "lease_ttl_seconds": 9}
    same = await gate.as_agent().create_task(type="demo", payload=None, timeouts=both)
    for wrong in ({"timeouts": {"lease_ttl": 9, "lease_ttl_seconds": 10}},
                  {"created_by": {"id": "ada"}, "tasker_principal": {"id": "bob"}}):
        with refused("invalid_request"):
            await gate.as_agent().create_task(type="demo", payload=None, **wrong)

    timeouts = (await gate.task(same.task_id)).timeouts
    assert timeouts is not None
    assert timeouts.lease_ttl_seconds == 9
