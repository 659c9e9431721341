"""Budgets: at 80 % of a month's budget admins are told, at 100 % new work stops, and what is there goes on (21.6.4)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.json import decode

from asyncgate.conformance.harness import Gate, refused, under
from asyncgate.parts.identity.budgets import BUDGET_SECONDS, Budgets
from asyncgate.parts.identity.usage import end_of_period
from asyncgate.parts.model import errors, queries, stored

pytestmark = pytest.mark.anyio


def to_new_month(gate: Gate) -> None:
    """Move the clock a day into the next month."""
    gate.skip(end_of_period("month", gate.now()) - gate.now() + 86_400)


async def notices(gate: Gate) -> list[tuple[str, str]]:
    """Return the notices in the inbox of the admin."""
    bodies = [decode(receipt.body) for receipt in await gate.receipts(None, "system.anomaly")
              if receipt.to.id == "root"]
    return [(body["kind"], body["details"]["quantity"]) for body in bodies]


async def look_around(*gates: Gate) -> None:
    """Let the upkeep of some processes look, after their last looks have become old."""
    gates[0].skip(BUDGET_SECONDS)
    for gate in gates:
        budgets = gate.engine.find_extension(Budgets)
        assert budgets is not None
        budgets.active.add(gate.tenant_id)
        await budgets.look_around()


async def test_the_task_that_is_too_many_is_refused_and_the_others_can_end(gate: Gate) -> None:
    to_new_month(gate)
    await gate.as_admin().set_budget(quantity="tasks", monthly=3)
    made = await gate.as_agent().create_tasks(tasks=[{"type": "demo", "payload": None}] * 4)
    month = f"{(await gate.as_admin().get_budgets()).month}"

    assert [item.error.error if item.error else item.status for item in made.results] == [
        *["queued"] * 3, "quota_exceeded"]
    with refused("quota_exceeded", quota="budget.tasks", limit=3, month=month) as refusal:
        await gate.create()
    for word in ("budget of 3 tasks for ", "set_budget", "an admin", "before "):
        assert word in str(refusal.value)
    offer = await gate.claim()
    assert offer is not None
    await gate.as_worker().complete(**under(offer), artifacts=["file:///out"])

    raised = await gate.as_admin().set_budget(quantity="tasks", monthly=5)
    assert [(budget.used, budget.monthly, budget.percent, budget.reached)
            for budget in raised.budgets] == [(3, 5, 60, False)]
    await gate.create()
    await gate.create()
    with refused("quota_exceeded"):
        await gate.create()
    to_new_month(gate)
    await gate.create()
    assert (await gate.as_admin().set_budget(quantity="tasks")).budgets == []


async def test_a_repeated_creation_gets_its_task_when_the_budget_is_used(gate: Gate) -> None:
    to_new_month(gate)
    await gate.as_admin().set_budget(quantity="tasks", monthly=1)
    first = await gate.create(idempotency_key="once")
    orders = [{"type": "demo", "payload": None, "idempotency_key": key} for key in ("twice", "thrice")]

    again = await gate.create(idempotency_key="once")
    new = await gate.as_agent().create_tasks(tasks=orders)

    assert again == first
    assert [item.error.error for item in new.results if item.error] == ["quota_exceeded"] * 2


async def test_at_its_budget_of_lease_hours_a_claim_gets_nothing_and_says_why(gate: Gate) -> None:
    to_new_month(gate)
    await gate.as_admin().set_budget(quantity="lease_hours", monthly=1)
    await gate.leased()
    await gate.create()
    gate.skip(3600)
    await look_around(gate)

    answer = await gate.as_worker("w2").lease_next()

    assert answer.tasks == []
    assert "budget of 1 lease_hours" in str(answer)
    with refused("quota_exceeded", quota="budget.lease_hours"):
        await gate.create()
    await gate.as_admin().set_budget(quantity="lease_hours", monthly=9)
    assert await gate.claim("w2") is not None


async def test_admins_are_told_once_of_each_budget_whatever_process_looks(gate: Gate) -> None:
    to_new_month(gate)
    root, other = gate.as_admin(), gate.beside(instance_id=gate.engine.instance)
    await root.issue_key(name="root", principal_kind="human", principal_id="root", role="admin")
    await root.set_budget(quantity="tasks", monthly=5)
    for _ in range(4):
        await gate.create()
    await look_around(gate, other)
    assert await notices(gate) == [("budget_warning", "tasks")]
    assert "4 of its budget of 5 tasks" in str((await gate.as_agent().bootstrap()).warnings)

    await gate.create()
    await look_around(other, gate)

    assert await notices(gate) == [("budget_warning", "tasks"), ("budget_reached", "tasks")]
    with refused("quota_exceeded", limit=5):
        await Gate(other.engine, gate.tenant_id).create()


async def test_admins_who_could_not_be_told_of_a_budget_are_told_after_the_outage(
        gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    to_new_month(gate)
    root, page = gate.as_admin(), gate.backend.page
    await root.issue_key(name="root", principal_kind="human", principal_id="root", role="admin")
    await root.set_budget(quantity="tasks", monthly=1)
    await gate.create()

    async def away(tenant_id: str, of: Any) -> Any:
        if isinstance(of, queries.Rows) and of.table is stored.Key:
            raise errors.DatabaseUnavailable("the database does not answer; try again")
        return await page(tenant_id, of)

    with monkeypatch.context() as outage:
        outage.setattr(gate.backend, "page", away)
        await look_around(gate)
    assert await notices(gate) == []
    await look_around(gate)

    assert await notices(gate) == [("budget_reached", "tasks")]


async def test_a_tenant_has_its_own_budgets_and_the_operator_may_set_them(gate: Gate) -> None:
    to_new_month(gate)
    operator = Gate(gate.engine, gate.engine.settings.default_tenant_id).as_admin()
    stranger = gate.stranger()
    await stranger.create()

    await operator.set_budget(tenant=gate.tenant_id, quantity="payload_byte_hours", monthly=0)

    with refused("quota_exceeded", quota="budget.payload_byte_hours"):
        await gate.create()
    await stranger.create()
    with refused("tenant_not_found"):
        await stranger.as_admin().get_budgets(tenant=gate.tenant_id)
    shown = (await operator.get_budgets(tenant=gate.tenant_id)).budgets
    assert [(budget.quantity, budget.percent, budget.reached)
            for budget in shown] == [("payload_byte_hours", 100.0, True)]
