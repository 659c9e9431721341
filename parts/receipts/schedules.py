"""Schedules: store a scheduler's reports, and tell the owner of a schedule when it does not run (H.7.4)."""

from __future__ import annotations

from msgspec.structs import replace

from asyncgate import ANOMALY, Caller, Engine, Needs, Operation, Sweep, Work, instant, its_tasks, speaker
from asyncgate.parts.model.errors import GateError
from asyncgate.parts.model.members import Unreadable
from asyncgate.parts.model.overdue import has_passed
from asyncgate.parts.model.stored import Schedule
from asyncgate.parts.model.views import to_utc
from asyncgate.parts.model.wire import Principal, Problem, Reported, ReportSchedule, ScheduleState


def load_schedules(needs: Needs, caller: Caller, ask: ReportSchedule) -> None:
    """Load the reported schedules."""
    needs.records.update((Schedule, (state.schedule_id,)) for state in ask.schedules
                         if not isinstance(state, Unreadable))


def report_schedule(engine: Engine, work: Work, caller: Caller, ask: ReportSchedule) -> Reported:
    """Report when schedules run next, so that the gate notices when they do not (H.7.4)."""
    by, unknown, refused = speaker(caller, ask), [], []
    for state in ask.schedules:
        if isinstance(state, Unreadable):
            refused.append(Problem(state.problem.code, str(state.problem)))
            continue
        known = work.find_record(Schedule, state.schedule_id)
        if known is None or not known.scheduler.same(by):
            unknown.append(state.schedule_id)
            continue
        try:
            work.keep_record(known := update_schedule(known, state))
        except GateError as no:
            refused.append(Problem(no.code, f"{state.schedule_id}: {no}"))
        else:
            tell_if_late(engine, work, known)
    return Reported(True, unknown, refused)


def update_schedule(known: Schedule, state: ScheduleState) -> Schedule:
    """Return a schedule with the reported fields; the other fields stay unchanged."""
    due = known.next_run_at if state.next_run_at is None else instant(state.next_run_at)
    every = known.interval_seconds if state.interval_seconds is None else state.interval_seconds
    enabled = state.enabled if state.enabled is not None else known.enabled or known.next_run_at is None
    late_at = due + 2 * every if enabled and due is not None and every is not None else None
    return replace(known, enabled=enabled, next_run_at=due, interval_seconds=every, late_at=late_at)


def tell_if_late(engine: Engine, work: Work, schedule: Schedule) -> None:
    """Tell the owner of a schedule that the schedule has missed two runs; once for each missed time."""
    if not has_passed(schedule.late_at, work.now):
        return
    due = to_utc(schedule.next_run_at or 0).isoformat()
    action = (f"Schedule {schedule.schedule_id} is late: its scheduler {schedule.scheduler_id} has reported no run. "
              f"Check that {schedule.scheduler_id} runs.")
    body = {"kind": "schedule_late", "recommended_action": action,
            "details": {"schedule_id": schedule.schedule_id, "next_run_at": due,
                        "interval_seconds": schedule.interval_seconds}}
    engine.write_receipt(work, ANOMALY, None, body, to=Principal(schedule.owner_kind, schedule.owner_id),
                         schedule_id=schedule.schedule_id, parents=(schedule.created,), mark=f"schedule_late {due}")
    work.keep_record(replace(schedule, late_at=None))


def load_overdue(needs: Needs, caller: Caller, ask: Sweep) -> None:
    """Load the tasks and schedules to sweep."""
    its_tasks(needs, caller, ask)
    needs.records.update((Schedule, (schedule_id,)) for schedule_id in ask.schedules)


def sweep(engine: Engine, work: Work, caller: Caller, ask: Sweep) -> None:
    """Sweep tasks, and tell the owners of late schedules."""
    engine.sweep(work, caller, ask)
    for schedule_id in ask.schedules:
        if schedule := work.find_record(Schedule, schedule_id):
            tell_if_late(engine, work, schedule)


REPORT_SCHEDULE = Operation(report_schedule, "POST /v1/schedules/report", "w A", "tasks:lease", "W", load_schedules,
                            idempotent=True)
