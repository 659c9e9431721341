"""Budgets: how much of each quantity a tenant may use in a month, and what happens when it has (spec 21.6.4).

A budget stops calls that begin work, and never calls that end it, as a quota does (parts/model/quotas.py): at 100 % of
any budget nobody can create a task, and at 100 % of the lease-hours no claim gets a lease.  Running leases go on.

Nothing is counted for budgets: the meters and usage events say what was used.  Each process looks at them when its last
look is 15 seconds old, and counts the tasks that it creates itself in between.  So one process stops at the task that
would be too many; several may together create some more, until each has looked again.  A task that is counted
but not created, because its batch fails, is forgotten by the next look.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncgate import Caller, Engine, Extension, News, Operation, Work
from asyncgate.parts.identity import usage
from asyncgate.parts.identity.admin import audit_change, change_record, target_tenant
from asyncgate.parts.identity.notices import write_notice
from asyncgate.parts.model import errors, stored, wire, wire_usage
from asyncgate.parts.model.content import to_canonical
from asyncgate.parts.model.counted import PERIOD_SECONDS
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.process.kit import Flights

BUDGET_SECONDS = 15.0
REFUSED_SECONDS = 1.0       # after a refusal the next look is that near: it may have been wrong
WARNING_SHARE = 0.8


class Spending(Struct):
    """The budgets of a tenant, and what it has used in this month as of the last look."""

    month: int                          # when it began, Unix time
    ends: int
    looked_at: float
    limits: dict[wire_usage.Quantity, int]
    until: int                          # the events up to here are summed up in `closed`
    closed: usage.Amounts = ()
    used: dict[str, float] = {}
    told: set[tuple[str, str]] = set()  # notices about this month: kind and quantity

    @property
    def reached(self) -> list[wire_usage.Quantity]:
        """The quantities of which nothing is left."""
        return [name for name, limit in self.limits.items() if self.used[name] >= limit]

    @property
    def stops_leases(self) -> bool:
        """Whether claims get no lease."""
        return "lease_hours" in self.reached

    def describe(self, name: wire_usage.Quantity) -> str:
        """Name a budget."""
        return f"budget of {self.limits[name]} {name} for {to_utc(self.month).strftime('%B %Y')}"


class Budgets(Extension):
    """Refuses new work of tenants that have used a budget, and warns their admins before."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known: dict[str, Spending] = {}        # by tenant; most have no limits
        self.flights: Flights[str, Spending] = Flights()
        self.active: set[str] = set()               # tenants that have begun work since the last round
        self.all_at = 0.0

    # Refusing.

    async def count_creation(self, caller: Caller, ask: wire.Ask, create: Callable[[Caller], Awaitable[Any]]) -> Any:
        """Look at what a tenant has used before it creates tasks; `check_new_task` refuses them one by one."""
        await self.look(caller.tenant_id)
        return await create(caller)

    def check_new_task(self, work: Work) -> None:
        """Refuse a task of a tenant that has used a budget."""
        if (spending := self._find_spending(work)) is None:
            return
        if reached := spending.reached:
            spending.looked_at = min(spending.looked_at, work.now - BUDGET_SECONDS + REFUSED_SECONDS)
            name, ends = reached[0], to_utc(spending.ends).isoformat(timespec="minutes")
            raise errors.QuotaExceeded(
                f"this tenant has used its {spending.describe(name)}, so it cannot create tasks before {ends}; an "
                "admin of the tenant raises the budget with set_budget, get_budgets shows all.  Tasks that exist go on",
                quota=f"budget.{name}", limit=spending.limits[name], month=write_month(spending.month),
                retry_after=max(int(spending.ends - work.now) + 1, 1))
        spending.used["tasks"] += 1

    def why_no_lease(self, work: Work, worker: wire.Principal) -> str | None:
        """Return why a claim gets no lease: the tenant has used its budget of lease-hours."""
        spending = self._find_spending(work)
        if spending is None or not spending.stops_leases:
            return None
        return (f"the tenant has used its {spending.describe('lease_hours')}: claims get tasks again next month, or "
                "when an admin raises it with set_budget")

    def _find_spending(self, work: Work) -> Spending | None:
        self.active.add(work.tenant_id)
        spending = self.known.get(work.tenant_id)
        return spending if spending is not None and spending.limits and work.now < spending.ends else None

    # Knowing.

    def after_record_change(self, work: Work) -> None:
        """Forget the budgets of an account that this process has changed."""
        if (stored.Account, ()) in work.kept:
            self._forget(work.tenant_id)

    def hear_news(self, news: News) -> None:
        """Forget the budgets of an account that another process has changed."""
        if news.account:
            self._forget(news.tenant_id)

    def _forget(self, tenant_id: str) -> None:
        self.flights.forget(tenant_id)
        if (old := self.known.pop(tenant_id, None)) is not None and old.stops_leases:
            self.engine.waiting.wake_tenant(tenant_id)

    async def look(self, tenant_id: str) -> Spending:
        """Return the budgets of a tenant and what it has used 15 seconds ago at most; concurrent calls share it."""
        now, old = self.engine.backend.now(), self.known.get(tenant_id)
        if old is not None and 0 <= now - old.looked_at < BUDGET_SECONDS and now < old.ends:
            return old
        return await self.flights.join(tenant_id, lambda: self._look(tenant_id, old))

    async def _look(self, tenant_id: str, old: Spending | None) -> Spending:
        spending = await self._read(tenant_id, old)
        if self.flights.is_current(tenant_id):      # nobody has changed the budgets meanwhile
            self.known[tenant_id] = spending
        if old is not None and old.stops_leases and not spending.stops_leases:
            self.engine.waiting.wake_tenant(tenant_id)
        await self._tell(tenant_id, spending)
        return spending

    async def _read(self, tenant_id: str, old: Spending | None) -> Spending:
        """Read the budgets, and if there are some, what was used since the last event that was looked at."""
        now = self.engine.backend.now()
        month = usage.begin_of_period("month", now)
        account = await self.engine.backend.record(tenant_id, stored.Account)
        spending = Spending(month, usage.end_of_period("month", now), now, read_budgets(account), month)
        if not spending.limits:
            return spending
        if old is not None and old.month == month and old.closed:
            spending.until, spending.closed, spending.told = old.until, old.closed, old.told
        closed, open_ones = await usage.read_use(self.engine, tenant_id, spending.until, longest=PERIOD_SECONDS)
        spending.closed = usage.sum_amounts(spending.closed, *map(usage.amounts_of, closed))
        spending.until = max([spending.until, *(event.ends for event in closed)])
        spending.used = usage.show_amounts(usage.sum_amounts(
            spending.closed, *(usage.amounts_of(event) for event in open_ones if event.begins >= month)))
        return spending

    async def _tell(self, tenant_id: str, spending: Spending) -> None:
        """Tell the admins, once a month, of each budget that is used, or of which less than 20 % is left."""
        month = write_month(spending.month)
        for name, limit in spending.limits.items():
            if spending.used[name] < WARNING_SHARE * limit:
                continue
            kind = "budget_reached" if name in spending.reached else "budget_warning"
            if (kind, name) not in spending.told and await write_notice(
                    self.engine, tenant_id, kind, once=f"{month} {name} {limit}", quantity=name,
                    used=spending.used[name], monthly=limit, month=month):
                spending.told.add((kind, name))

    async def look_around(self) -> int:
        """Look at the tenants that have written since the last time; one process of many looks at all now and then."""
        tenants, self.active = self.active, set()
        now = self.engine.backend.now()
        if not 0 <= now - self.all_at < PERIOD_SECONDS and await self.engine.leads("usage"):
            self.all_at, tenants = now, {*tenants, *await self.engine.backend.tenants()}
        for tenant_id in tenants:
            await self.look(tenant_id)
        return len(tenants)

    async def list_warnings(self, caller: Caller) -> list[str]:
        """Return a warning for each budget of which less than 20 % is left."""
        spending = await self.look(caller.tenant_id)
        used = [name for name, limit in spending.limits.items() if spending.used[name] >= WARNING_SHARE * limit]
        return [f"this tenant has used {spending.used[name]:g} of its {spending.describe(name)}; at 100 % it cannot "
                "create tasks" for name in used]


def read_budgets(account: stored.Account | None) -> dict[wire_usage.Quantity, int]:
    """Return the budgets of an account, by quantity."""
    return msgspec.json.decode(account.budgets, type=dict[wire_usage.Quantity, int]) if account is not None else {}


def write_month(begins: int) -> str:
    """Write a month as ISO 8601 does."""
    return to_utc(begins).strftime("%Y-%m")


async def set_budget(engine: Engine, caller: Caller, ask: wire_usage.SetBudget) -> wire_usage.BudgetReport:
    """Set how much of one quantity a tenant may use in each month (UTC), or remove that budget.

    Admins are told at 80 %.  At 100 % no task can be created until the month ends, or the budget is raised; at 100 %
    of lease_hours no claim gets a lease either.  Running leases go on, and tasks that exist can end.  A tenant's admin
    sets its own; the operator may name a tenant.  Spec 21.6.4.
    """
    tenant_id = await target_tenant(engine, caller, ask.tenant)

    def change(work: Work) -> None:
        account = work.find_record(stored.Account) or stored.Account("", work.now)
        budgets = read_budgets(account)
        budgets.pop(ask.quantity, None)
        if ask.monthly is not None:
            budgets[ask.quantity] = ask.monthly
        work.keep_record(replace(account, budgets=to_canonical(budgets).decode()))
        audit_change(engine, work, "budget_changed", "warning", caller, quantity=ask.quantity, monthly=ask.monthly)
    await change_record(engine, caller, tenant_id, stored.Account, (), change)
    return await report_budgets(engine, tenant_id)


async def get_budgets(engine: Engine, caller: Caller, ask: wire_usage.GetBudgets) -> wire_usage.BudgetReport:
    """Return a tenant's monthly budgets, and how much of each it has used in this month (UTC)."""
    return await report_budgets(engine, await target_tenant(engine, caller, ask.tenant))


async def report_budgets(engine: Engine, tenant_id: str) -> wire_usage.BudgetReport:
    """Show the budgets of a tenant."""
    budgets = engine.find_extension(Budgets)
    assert budgets is not None
    spending = await budgets.look(tenant_id)
    lines = [wire_usage.BudgetLine(name, limit, used := spending.used[name],
                                   round(100 * used / limit, 1) if limit else 100.0, name in spending.reached)
             for name, limit in spending.limits.items()]
    return wire_usage.BudgetReport(tenant_id, write_month(spending.month), lines)


OPERATIONS = [Operation(set_budget, "POST /v1/budgets", "A", "admin:write", "W", idempotent=True),
              Operation(get_budgets, "GET /v1/budgets", "A", "admin:read", "R")]
