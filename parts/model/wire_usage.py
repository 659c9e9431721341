"""What goes over the wire about usage (spec 21.6.4)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import Struct

from asyncgate.parts.model import errors, wire, wire_admin
from asyncgate.parts.model.examples import TENANT_ID

Period = Literal["5-minute", "hour", "day", "month"]
Quantity = Literal["tasks", "lease_hours", "receipt_byte_hours", "payload_byte_hours", "reads", "writes", "heartbeats"]
NOVEMBER: dict[str, Any] = {
    "tenant": TENANT_ID, "begins": "2026-11-01T00:00:00Z", "ends": "2026-12-01T00:00:00Z", "tasks": 5120,
    "lease_hours": 211.25, "receipt_byte_hours": 1.5e9, "payload_byte_hours": 4.0e8, "reads": 9200, "writes": 15800,
    "heartbeats": 44000}
BUDGETS: dict[str, Any] = {
    "tenant": TENANT_ID, "month": "2026-11", "budgets": [{
        "quantity": "lease_hours", "monthly": 250, "used": 211.25, "percent": 84.5, "reached": False}]}


class GetUsage(wire.PageAsk, kw_only=True):
    """Read what a tenant has used."""

    example = ({"period": "month", "since": "2026-11-01T00:00:00Z"}, {
        "period": "month", "usage": [NOVEMBER], "counted_until": "2026-11-23T20:36:00Z"})
    refusals = (errors.TenantNotFound,)
    tenant: wire_admin.Whose = None
    all_tenants: Annotated[bool,
                           wire.says("the usage of all tenants, a page of them at a time; for the operator")] = False
    period: Annotated[Period, wire.says("what each line sums up; days and months are those of UTC")] = "month"
    since: Annotated[wire.Moment | None,
                     wire.says("begin with the period of this time; default: the last hour, day, 31 days or "
                               "12 months")] = None
    until: Annotated[wire.Moment | None, wire.says("end with the period before this time; default now")] = None


class UsageLine(Struct):
    """What a tenant used in one period; of a period that is not over, so far."""

    tenant: str
    begins: datetime
    ends: datetime
    tasks: int                  # created
    lease_hours: float          # of all leases together
    receipt_byte_hours: float   # stored bodies of receipts
    payload_byte_hours: float   # stored payloads, results and errors of tasks
    reads: int                  # calls that were carried out
    writes: int                 # but for heartbeats
    heartbeats: int


class UsageReport(Struct):
    """What a tenant used, oldest period first; a period in which it used nothing has no line."""

    columns = "begins ends tasks lease_hours receipt_byte_hours payload_byte_hours reads writes heartbeats"
    period: Period
    usage: list[UsageLine]
    counted_until: datetime
    next_cursor: str | None = None
    cursor: str | None = None


class SetBudget(wire.Ask, kw_only=True):
    """Change a budget of a tenant."""

    example = ({"quantity": "lease_hours", "monthly": 250}, BUDGETS)
    refusals = (errors.TenantNotFound,)
    tenant: wire_admin.Whose = None
    quantity: Annotated[Quantity, wire.says("what is limited, as get_usage names and counts it")]
    monthly: Annotated[wire_admin.Amount | None, wire.says(
        "how much may be used in a month; leave it out to remove the budget")] = None


class GetBudgets(wire.Ask, kw_only=True):
    """Read the budgets of a tenant."""

    example = ({}, BUDGETS)
    refusals = (errors.TenantNotFound,)
    tenant: wire_admin.Whose = None


class BudgetLine(Struct):
    """One budget."""

    quantity: Quantity
    monthly: int
    used: float         # in this month, as of some seconds ago
    percent: float
    reached: bool       # nothing is left


class BudgetReport(Struct):
    """The budgets of a tenant, and what is used of them in this month (UTC)."""

    columns = "quantity monthly used percent reached"
    tenant: str
    month: str          # as in 2026-11
    budgets: list[BudgetLine]
