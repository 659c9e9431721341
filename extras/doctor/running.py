"""What only a running gate can tell: its upkeep, its sending to the ledger, its limits; and `examine_gate`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from asyncgate import Caller, Engine, Operation
from asyncgate.extras.doctor import CHECKS, Check, examine
from asyncgate.extras.doctor.installation import Installation
from asyncgate.extras.doctor.questions import check_questions
from asyncgate.parts.identity.admin import require_operator
from asyncgate.parts.identity.guard import Guard
from asyncgate.parts.identity.notices import read_rows
from asyncgate.parts.model import findings, stored_webhooks
from asyncgate.parts.model.words import say_first, say_length
from asyncgate.parts.service import Service
from asyncgate.parts.upkeep import Upkeep

if TYPE_CHECKING:
    from asyncgate.parts.process.duties import Duty

LATE_ROUNDS, SLACK_SECONDS = 3, 10.0        # a job is late that has not begun for so many intervals and a moment


def check_upkeep(at: Installation) -> Iterator[findings.Finding]:
    """Look for jobs of upkeep that are late, or whose last run failed."""
    upkeep = at.running.find_extension(Upkeep) if at.running else None
    if upkeep is None:
        return
    now = datetime.fromtimestamp(at.clock(), UTC)
    flaws = [finding for name, duty in upkeep.duties.items() for finding in judge_duty(name, duty, now)]
    yield from flaws or [findings.all_well(f"{len(upkeep.duties)} jobs of upkeep run in time")]


def judge_duty(name: str, duty: Duty, now: datetime) -> Iterator[findings.Finding]:
    """Yield what is wrong with one job."""
    if duty.last_error is not None:
        yield findings.alarm(
            f"the last run of the job {name} failed with {duty.last_error} ({duty.failures} of {duty.runs} "
            "runs failed)", f"look for `upkeep: {name} failed` in the gate's log")
    since = (now - duty.last_run_at).total_seconds() if duty.last_run_at else 0.0
    if since > LATE_ROUNDS * duty.every_seconds + SLACK_SECONDS:
        yield findings.alarm(f"the job {name} began {say_length(since)} ago, and should begin every "
                             f"{say_length(duty.every_seconds)}: it hangs",
                             "look for `upkeep` in the gate's log, then restart the gate")


async def check_sending(at: Installation) -> AsyncIterator[findings.Finding]:
    """Look whether sending to the ledger is paused."""
    if at.running is None or at.running.settings.receipt_mode == "standalone":
        return
    from asyncgate.extras.ledger import find_ledger  # a gate with these settings has that extra
    if (ledger := find_ledger(at.running)) is None:
        return
    circuit, lag = ledger.circuit, await ledger.lag()
    waits = f"receipts that wait: {lag.waiting}"
    if circuit == "closed":
        yield findings.all_well(f"receipts go to the ledger; {waits}")
    else:
        yield findings.warn(f"the circuit breaker of the ledger is {circuit}: {waits}",
                            "see what is said of the ledger; the breaker closes when the ledger answers")


async def check_shared_limits(at: Installation) -> AsyncIterator[findings.Finding]:
    """Look whether this gate counts calls where it should, and whether it has lost the store of the limits."""
    guard = at.running.find_extension(Guard) if at.running else None
    if at.running is None or guard is None:
        return
    if not guard.enforced:
        tenants = len(await at.running.backend.tenants())
        if tenants > 1 and at.settings.security.rate_limiting.enabled is None and not at.settings.allow_insecure_dev:
            yield findings.warn(f"{tenants} tenants share this gate, and it had one when it started: limits are off",
                                "restart the gate: it then has limits")
    elif guard.limits.degraded:
        yield findings.warn("this gate has lost the store of the limits, and counts alone or refuses calls",
                            "start the store; the gate tries it again every few seconds")
    else:
        yield findings.all_well("calls are counted")


async def check_service(at: Installation) -> AsyncIterator[findings.Finding]:
    """Look whether this process takes new callers."""
    if at.running is None or (service := at.running.find_extension(Service)) is None:
        return
    ready = await service.readiness()
    if ready.draining:
        yield findings.note("this gate drains: load balancers send it nobody new",
                            "`asyncgate resume-gate` takes new callers again; or stop it when nothing is left")
    if ready.database and not ready.joined:
        yield findings.alarm("this gate has lost its lock in the database: others take its tasks over",
                             "see `no locks` in its log; it retries automatically; if it does not, restart it")
    if ready.ready:
        yield findings.all_well("this gate takes new callers")


async def check_webhooks(at: Installation) -> AsyncIterator[findings.Finding]:
    """Look for endpoints of webhooks, of all tenants, that fail or are given up."""
    if at.running is None:
        return
    failing, parked, number = list[str](), list[str](), 0
    for tenant_id in await at.running.backend.webhook_tenants():
        async for row in read_rows(at.running, tenant_id, stored_webhooks.Webhook):
            number += row.state != "removing"
            if row.state == "parked" or (row.state == "active" and row.failing_since is not None):
                (parked if row.state == "parked" else failing).append(f"{row.webhook_id} of tenant {tenant_id}")
    if failing:
        yield findings.warn(f"webhooks that fail: {say_first(failing)}",
                            "`asyncgate list-webhooks --tenant TENANT` says why; the gate tries them again")
    if parked:
        yield findings.warn(f"webhooks that failed for days, so that nothing is sent: {say_first(parked)}",
                            "when the receiver is repaired: `asyncgate change-webhook WEBHOOK_ID --tenant TENANT "
                            "--active`")
    if number and not failing and not parked:
        yield findings.all_well(f"webhooks: {number}, none of which fails")


async def check_task_limits(at: Installation) -> AsyncIterator[findings.Finding]:
    """Look for limits of tasks that are stopped while tasks wait, that allow nothing, or that nobody has set."""
    if at.running is None:
        return
    depths, now = await at.running.backend.limit_depths(), at.running.backend.now()
    for depth in depths:
        if not depth.is_set:
            yield findings.note(f"tasks that wait and name a limit which nobody has set, such as {depth.name}: "
                                f"{depth.waiting}; it keeps none of them", "`asyncgate set-limit NAME …` sets it")
        elif depth.waiting and depth.stopped_until is not None and depth.stopped_until > now:
            yield findings.warn(f"the limit {depth.name} is stopped for {say_length(depth.stopped_until - now)}, and "
                                f"{depth.waiting} tasks that name it wait",
                                f"`asyncgate get-limit {depth.name}` says which task has stopped it")
    if depths and not any(depth.stopped_until is not None and depth.stopped_until > now for depth in depths):
        yield findings.all_well(f"limits of tasks: {sum(depth.is_set for depth in depths)}, none of which is stopped")


RUNNING: dict[str, Check] = {
    "service": check_service, "upkeep": check_upkeep, "sending": check_sending, "webhooks": check_webhooks,
    "counting": check_shared_limits, "task limits": check_task_limits, "questions": check_questions}


async def examine_gate(engine: Engine, caller: Caller, ask: findings.ExamineGate) -> findings.Examination:
    """Examine the gate: settings, files, disk, clock, database, ledger, limits, upkeep; each finding has its cure.

    For the operator.  It changes nothing.  `asyncgate doctor` asks it too, and sees what it cannot: files that the
    settings came from, and a gate that does not run.
    """
    require_operator(engine, caller)
    results = await examine(Installation(engine.settings, running=engine), {**CHECKS, **RUNNING})
    return findings.Examination(findings.worst_of(results), results)


OPERATIONS = [Operation(examine_gate, "GET /v1/examination", "A", "admin:read", "R")]
