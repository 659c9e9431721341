"""What goes over the wire for people who look after a gate."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from asyncgate.parts.model.examples import ADA, DUTY, LATER, NOW, TASK_ID
from asyncgate.parts.model.wire import PageAsk, Principal


class ListSchedules(PageAsk, kw_only=True):
    """List schedules."""

    example = ({"limit": 20}, {"schedules": [{
        "schedule_id": "nightly", "owner": ADA, "scheduler": {"kind": "worker", "id": "clock-1"}, "enabled": True,
        "next_run_at": LATER, "interval_seconds": 86400.0, "late_since": None, "created_receipt_id": DUTY}]})
    next_step = "late_since is not null: check that its scheduler runs."
    lists = "all"


class ListObligations(PageAsk, kw_only=True):
    """List the open obligations of all principals."""

    example = ({"limit": 20}, {"obligations": [{
        "receipt_id": DUTY, "receipt_type": "task.assigned", "to": ADA, "task_id": TASK_ID, "schedule_id": None,
        "created_at": NOW, "age_seconds": 300.0}]})
    next_step = "get_task for a task_id shows what the task waits for."
    lists = "all"


class ScheduleRecord(Struct):
    """What a scheduler last reported of a schedule."""

    schedule_id: str
    owner: Principal
    scheduler: Principal
    enabled: bool
    next_run_at: datetime | None
    interval_seconds: float | None
    late_since: datetime | None         # the run that did not come; null until two runs are missed
    created_receipt_id: str


class Schedules(Struct):
    """A page of schedules, in the order of their ids."""

    columns = "schedule_id owner scheduler enabled next_run_at late_since"
    schedules: list[ScheduleRecord]
    next_cursor: str | None = None
    cursor: str | None = None


class OpenObligation(Struct):
    """What is owed to somebody."""

    receipt_id: str
    receipt_type: str
    to: Principal
    task_id: str | None
    schedule_id: str | None
    created_at: datetime
    age_seconds: float


class AllObligations(Struct):
    """A page of open obligations, oldest first."""

    columns = "receipt_id receipt_type to task_id created_at age_seconds"
    obligations: list[OpenObligation]
    next_cursor: str | None = None
    cursor: str | None = None
