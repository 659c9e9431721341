"""Schedules: store a scheduler's reports, and tell the owner of a schedule when it does not run (H.7.4)."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

import asyncgate
from asyncgate import Caller, Engine, Needs, Operation, Sweep, Work, forbid, its_key, its_tasks, speaker
from asyncgate.parts.model import errors, stored, wire, wire_operating
from asyncgate.parts.model.clock import instant
from asyncgate.parts.model.content import encode_json
from asyncgate.parts.model.members import Unreadable
from asyncgate.parts.model.overdue import has_passed
from asyncgate.parts.model.views import to_utc


def load_schedules(needs: Needs, caller: Caller, ask: wire.ReportSchedule) -> None:
    """Load the reported schedules."""
    needs.records.update((stored.Schedule, (state.schedule_id,)) for state in ask.schedules
                         if not isinstance(state, Unreadable))


def report_schedule(engine: Engine, work: Work, caller: Caller, ask: wire.ReportSchedule) -> wire.Reported:
    """Report when schedules run next, so that the gate notices when they do not (H.7.4)."""
    by, unknown, refused = speaker(caller, ask), [], []
    for state in ask.schedules:
        if isinstance(state, Unreadable):
            refused.append(wire.Problem(state.problem.code, str(state.problem)))
            continue
        known = work.find_record(stored.Schedule, state.schedule_id)
        if known is None or not known.scheduler.same(by):
            unknown.append(state.schedule_id)
            continue
        try:
            work.keep_record(known := update_schedule(known, state))
        except errors.GateError as refusal:
            refused.append(wire.Problem(refusal.code, f"{state.schedule_id}: {refusal}"))
        else:
            tell_if_late(engine, work, known)
    return wire.Reported(True, unknown, refused)


def update_schedule(known: stored.Schedule, state: wire.ScheduleState) -> stored.Schedule:
    """Return a schedule with the reported fields; the other fields stay unchanged."""
    due = known.next_run_at if state.next_run_at is None else instant(state.next_run_at)
    every = known.interval_seconds if state.interval_seconds is None else state.interval_seconds
    enabled = state.enabled if state.enabled is not None else known.enabled or known.next_run_at is None
    schedule = replace(known, enabled=enabled, next_run_at=due, interval_seconds=every,
                       details=update_details(known.details, state))
    return replace(schedule, late_at=schedule.late_after)


def update_details(known: str, state: wire.ScheduleState) -> str:
    """Return what is known beside the next run, with the reported fields."""
    reported = {name: getattr(state, name) for name in stored.ScheduleDetails.__struct_fields__}
    for name in ("last_run_at", "next_runs"):
        reported[name] = instants(reported[name])
    news = {name: value for name, value in reported.items() if value is not None}
    return msgspec.json.encode(replace(stored.read_details(known), **news)).decode()


def instants(moments: datetime | list[datetime] | None) -> Any:
    """Return times as seconds."""
    return [moment.timestamp() for moment in moments] if isinstance(moments, list) else instant(moments)


def tell_if_late(engine: Engine, work: Work, schedule: stored.Schedule) -> None:
    """Tell the owner of a schedule that the schedule has missed two runs; once for each missed time."""
    if not has_passed(schedule.late_at, work.now):
        return
    name = stored.read_details(schedule.details).name or schedule.schedule_id
    due = to_utc(schedule.next_run_at or 0).isoformat()
    action = (f"Schedule {name} is late: its scheduler {schedule.scheduler_id} has reported no run. "
              f"Check that {schedule.scheduler_id} runs.")
    body = {"kind": "schedule_late", "recommended_action": action,
            "details": {"schedule_id": schedule.schedule_id, "next_run_at": due,
                        "interval_seconds": schedule.interval_seconds}}
    engine.write_receipt(work, asyncgate.ANOMALY, None, body, to=wire.Principal(schedule.owner_kind, schedule.owner_id),
                         schedule_id=schedule.schedule_id, parents=(schedule.created,),
                         discriminator=f"schedule_late {due}")
    work.keep_record(replace(schedule, late_at=None))


def load_schedule(needs: Needs, caller: Caller, ask: wire_operating.ScheduleAsk) -> None:
    """Load the schedule of an order, and what creating a task needs."""
    needs.records.add((stored.Schedule, (ask.schedule_id,)))
    its_key(needs, caller, wire.CreateTask(type="schedule"))


def pause_schedule(engine: Engine, work: Work, caller: Caller, ask: wire_operating.PauseSchedule) -> wire.Created:
    """Ask a schedule's scheduler to pause it: for its owner, or an admin.  The answer is the task that does it."""
    return order_schedule(engine, work, caller, ask, "schedule.pause")


def resume_schedule(engine: Engine, work: Work, caller: Caller, ask: wire_operating.ResumeSchedule) -> wire.Created:
    """Ask a schedule's scheduler to resume it from now on: for its owner, or an admin.

    The answer is the task that does it.  Runs during the pause do not count as missed.
    """
    return order_schedule(engine, work, caller, ask, "schedule.resume")


def run_schedule(engine: Engine, work: Work, caller: Caller, ask: wire_operating.RunSchedule) -> wire.Created:
    """Ask a schedule's scheduler to run it now, beside its plan, even if paused: for its owner, or an admin.

    The answer is the task that does it.
    """
    return order_schedule(engine, work, caller, ask, "schedule.run")


def order_schedule(engine: Engine, work: Work, caller: Caller, ask: wire_operating.ScheduleAsk,
                   type: str) -> wire.Created:
    """Create a control task of a schedule's owner, whom its scheduler obeys; its history names who asked for it."""
    schedule, by = work.find_record(stored.Schedule, ask.schedule_id), speaker(caller, ask)
    if schedule is None:
        raise errors.ScheduleNotFound(
            f"no schedule {ask.schedule_id} is known here; list_schedules shows those that are")
    owner = wire.Principal(schedule.owner_kind, schedule.owner_id)
    if not caller.unlimited and not owner.same(by):
        raise forbid(caller, f"schedule {ask.schedule_id} belongs to another principal")
    order = wire.CreateTask(type=type, payload=Raw(encode_json({"schedule_id": ask.schedule_id})),
                            task_summary=f"{type.partition('.')[2]} "
                                         f"{stored.read_details(schedule.details).name or 'a schedule'}")
    made = engine.create_task(work, replace(caller, principal=owner, bound=True), order, (schedule.created,))
    work.add_event(made.task_id, "schedule.ordered", order=type, by={"kind": by.kind, "id": by.id})
    return made


def load_overdue(needs: Needs, caller: Caller, ask: Sweep) -> None:
    """Load the tasks and schedules to sweep."""
    its_tasks(needs, caller, ask)
    needs.records.update((stored.Schedule, (schedule_id,)) for schedule_id in ask.schedules)


def sweep(engine: Engine, work: Work, caller: Caller, ask: Sweep) -> None:
    """Sweep tasks, and tell the owners of late schedules."""
    engine.sweep(work, caller, ask)
    for schedule_id in ask.schedules:
        if schedule := work.find_record(stored.Schedule, schedule_id):
            tell_if_late(engine, work, schedule)


OPERATIONS = [
    Operation(pause_schedule, "POST /v1/schedules/{schedule_id}/pause", "a A", "tasks:write", "W", load_schedule),
    Operation(resume_schedule, "POST /v1/schedules/{schedule_id}/resume", "a A", "tasks:write", "W", load_schedule),
    Operation(run_schedule, "POST /v1/schedules/{schedule_id}/run", "a A", "tasks:write", "W", load_schedule),
]
REPORT_SCHEDULE = Operation(report_schedule, "POST /v1/schedules/report", "w A", "tasks:lease", "W", load_schedules,
                            idempotent=True)
