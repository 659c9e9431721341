"""What goes over the wire for people who look after a gate."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from asyncgate.parts.model import errors, examples, wire, wire_admin

QUEUE: dict[str, Any] = {
    "queue_id": "6f1c09d2b7a4e385", "type": "page.summarize", "capabilities": ["web.read"], "claimable": 12,
    "delayed": 3, "delayed_at_least": False, "held": 1, "leased": 4, "oldest_wait_seconds": 41.5,
    "workers": 2, "last_minute": {"started": 6, "ended": 5, "failed": 0, "expired": 0},
    "last_hour": {"started": 310, "ended": 302, "failed": 4, "expired": 1}}


SERIES: dict[str, Any] = {"started": [6, 5], "ended": [5, 6], "failed": [0, 1], "expired": [0, 0], "begun": [6, 4],
                          "waited_seconds": [1.5, 2.25]}


class ListSchedules(wire.PageAsk, kw_only=True):
    """List schedules."""

    example = ({"limit": 20}, {"schedules": [{
        "schedule_id": "nightly", "owner": examples.ADA, "scheduler": {"kind": "worker", "id": "clock-1"},
        "enabled": True,
        "next_run_at": examples.LATER, "interval_seconds": 86400.0, "late_since": None,
        "created_receipt_id": examples.DUTY,
        "name": "report", "task_type": "report.make", "cron_expr": None, "timezone": "UTC",
        "next_runs": [examples.LATER],
        "last_run_at": examples.NOW, "last_status": "created", "last_task_id": examples.TASK_ID}]})
    next_step = "late_since is not null: check that its scheduler runs."
    lists = "all"
    runs: Annotated[int, Meta(ge=0, le=200),
                    wire.says("how many of the next runs to show, if so many were reported")] = 5


class ScheduleAsk(wire.AsPrincipal, kw_only=True):
    """Order something of one schedule."""

    needed: ClassVar[tuple[str, ...]] = ("schedule_id",)
    refusals = (errors.ScheduleNotFound, errors.QuotaExceeded, errors.ReceiptTooLarge)
    next_step = "get_task with wait_seconds returns when the scheduler has done it."
    schedule_id: Annotated[wire.Name, wire.says("its id, as list_schedules shows it")] = ""


class PauseSchedule(ScheduleAsk, kw_only=True):
    """Pause one schedule."""

    example = ({"schedule_id": "nightly"}, {"task_id": examples.TASK_ID, "status": "queued"})


class ResumeSchedule(ScheduleAsk, kw_only=True):
    """Resume one schedule."""

    example = ({"schedule_id": "nightly", "agent_id": "ada"}, {"task_id": examples.TASK_ID, "status": "queued"})


class RunSchedule(ScheduleAsk, kw_only=True):
    """Run one schedule now."""

    example = ({"schedule_id": "weekly-report"}, {"task_id": examples.TASK_ID, "status": "queued"})


class SearchTasks(wire.TaskFilters, kw_only=True):
    """Search tasks."""

    example = ({"payload": "doc:7", "limit": 20}, {"tasks": [examples.TASK_RECORD], "searched": 140})
    payload: Annotated[wire.Name | None,
                       wire.says("a member of the payload and its value: doc:7, or order.id:A-7")] = None
    tag: Annotated[wire.Name | None, wire.says("a label in requirements.tags: night, or of an object team:blue")] = None


class FoundTasks(Struct):
    """The tasks that were found, newest first, among those that were looked at."""

    columns = "task_id type status payload task_summary created_by created_at"
    newest_first = True
    tasks: list[wire.TaskRecord]
    next_cursor: str | None = None
    cursor: str | None = None
    searched: int = 0


class FindId(wire.Ask, kw_only=True):
    """Find whole ids."""

    needed: ClassVar[tuple[str, ...]] = ("part",)
    example = ({"part": examples.TASK_ID[-12:]}, {"found": [{"kind": "task", "id": examples.TASK_ID}]})
    next_step = "With several found, repeat with more digits."
    part: Annotated[str, Meta(min_length=4, max_length=200, pattern=wire.UNTAGGED), wire.says(
        "the last 12 digits of an id, how it begins, or the name of a schedule")] = ""


class FoundId(Struct):
    """An id that begins or ends as asked."""

    kind: Literal["task", "receipt", "schedule"]
    id: str


class FoundIds(Struct):
    """The ids that were found; none, or several, if the digits do not tell one apart."""

    columns = "kind id"
    found: list[FoundId]


class ListObligations(wire.PageAsk, kw_only=True):
    """List the open obligations of all principals."""

    example = ({"limit": 20}, {"obligations": [{
        "receipt_id": examples.DUTY, "receipt_type": "task.assigned", "to": examples.ADA, "task_id": examples.TASK_ID,
        "schedule_id": None,
        "created_at": examples.NOW, "age_seconds": 300.0}]})
    next_step = "get_task for a task_id shows what the task waits for."
    lists = "all"
    count: Annotated[bool, wire.says("also count what is owed to whom, up to 10,000 obligations")] = False


TrafficSpan = Literal["hour", "day"]
Minutes = Annotated[int, Meta(ge=0, le=60), wire.says("of how many minutes to return the numbers one by one")]


class ListQueues(wire.PageAsk, kw_only=True):
    """List queues."""

    example = ({"limit": 20}, {"queues": [QUEUE]})
    next_step = "get_queue shows one queue; list_tasks with its type the tasks."
    lists = "all"
    type: Annotated[wire.Name | None, wire.says("queues with tasks of this type only")] = None
    minutes: Minutes = 0


class GetQueue(wire.Ask, kw_only=True):
    """Read one queue."""

    needed: ClassVar[tuple[str, ...]] = ("queue_id",)
    example = ({"queue_id": QUEUE["queue_id"]}, QUEUE)
    refusals = (errors.QueueNotFound,)
    queue_id: Annotated[wire.Name, wire.says("the queue; list_queues shows it")] = ""
    minutes: Minutes = 0


class GetTraffic(wire.Ask, kw_only=True):
    """Read what happened over time."""

    example = ({"span": "day"}, {
        "begins_at": examples.NOW, "step_seconds": 300, "total": SERIES, "by_type": {"page.summarize": SERIES},
        "types_left": 0})
    next_step = "get_queue shows what waits in one queue now; explain_task why one task waits."
    span: Annotated[TrafficSpan, wire.says("hour: by the minute; day: by five minutes")] = "hour"
    type: Annotated[wire.Name | None, wire.says("tasks of this type only")] = None
    most_types: Annotated[int, Meta(ge=0, le=100), wire.says("how many types to tell apart, the busiest first")] = 20


class Flow(Struct):
    """What happened in a queue in some time."""

    started: int                        # leases that were granted
    ended: int                          # tasks that succeeded, failed or were canceled
    failed: int                         # attempts that failed, whether or not another one followed
    expired: int                        # leases that ran out


class Series(Struct):
    """What happened in a queue by the minute, the oldest first; the last minute is not over yet."""

    started: list[int]
    ended: list[int]
    failed: list[int]
    expired: list[int]


class WaitSeries(Series):
    """What happened step by step, and how long tasks waited."""

    begun: list[int]                        # tasks that got their first lease
    waited_seconds: list[float | None]      # mean time that these had waited for it; null: there were none


class TrafficReport(Struct):
    """What happened over an hour or a day, the oldest first; the last step is not over yet."""

    begins_at: datetime
    step_seconds: int                   # of each number: 60 or 300
    total: WaitSeries                   # of all types, or of the one that was asked for
    by_type: dict[str, WaitSeries]      # "": the quiet queues of a day with more than 200 are counted together
    types_left: int                     # that are in the total only


class QueueRecord(Struct):
    """The tasks that have one type and require the same capabilities."""

    queue_id: str
    type: str
    capabilities: list[str]             # a worker needs all of them
    claimable: int                      # tasks that a worker may claim now
    delayed: int                        # tasks that wait for their time: a delay or a back-off
    delayed_at_least: bool              # whether there are more delayed tasks, which are counted as claimable here
    held: int                           # tasks on hold: their owner releases them
    leased: int                         # leased and running tasks
    oldest_wait_seconds: float | None   # how long the oldest claimable task has been waiting
    workers: int                        # of the last 100 that asked, those that can take these and give signs of life
    last_minute: Flow                   # about: counted by whole minutes; of other processes up to half a minute late
    last_hour: Flow
    by_minute: Series | UnsetType = UNSET     # if minutes were asked for


class Queues(Struct):
    """A page of queues, in the order of their types."""

    columns = "queue_id type capabilities claimable delayed held leased oldest_wait_seconds workers"
    queues: list[QueueRecord]
    next_cursor: str | None = None
    cursor: str | None = None


class ScheduleRecord(Struct):
    """What a scheduler last reported of a schedule."""

    schedule_id: str
    owner: wire.Principal
    scheduler: wire.Principal
    enabled: bool
    next_run_at: datetime | None
    interval_seconds: float | None
    late_since: datetime | None         # the run that did not come; null until it is overdue
    created_receipt_id: str
    name: str | None
    task_type: str | None               # of the tasks that it creates
    cron_expr: str | None
    timezone: str | None                # of cron_expr
    next_runs: list[datetime]
    last_run_at: datetime | None
    last_status: str | None             # created, or why a run was refused or waits
    last_task_id: str | None


class Schedules(Struct):
    """A page of schedules, in the order of their ids."""

    columns = "schedule_id name task_type enabled next_run_at late_since last_status owner scheduler"
    schedules: list[ScheduleRecord]
    next_cursor: str | None = None
    cursor: str | None = None


class OpenObligation(Struct):
    """What is owed to somebody."""

    receipt_id: str
    receipt_type: str
    to: wire.Principal
    task_id: str | None
    schedule_id: str | None
    created_at: datetime
    age_seconds: float


class Owed(Struct):
    """How much is owed to somebody."""

    to: wire.Principal
    open: int
    at_least: bool                      # whether there are more than were counted


class AllObligations(Struct):
    """A page of open obligations, oldest first."""

    columns = "receipt_id receipt_type to task_id created_at age_seconds"
    obligations: list[OpenObligation]
    next_cursor: str | None = None
    cursor: str | None = None
    owed_to: list[Owed] | UnsetType = UNSET     # if it was asked for: the most first


Reason = Annotated[str, Meta(max_length=500)]


class WorkTarget(wire.Ask, kw_only=True):
    """What a pause is about: exactly one of a type, a worker, or the whole tenant."""

    refusals = (errors.TenantNotFound,)
    tenant: wire_admin.Whose = None
    type: Annotated[wire.Name | None, wire.says("tasks of this type")] = None
    capabilities: Annotated[wire.Capabilities | None, wire.says(
        "with type: only its tasks that require exactly these; [] for those that require none")] = None
    worker: Annotated[wire.Name | None, wire.says("the worker with this worker_id")] = None
    whole_tenant: Annotated[bool, wire.says("true: all tasks")] = False


class PauseWork(WorkTarget, kw_only=True):
    """Pause a type, a lane, a worker, or the whole tenant."""

    example = ({"type": "page.summarize", "until": examples.FAR, "reason": "the model is down"}, examples.PAUSED)
    next_step = "drain_work waits until no lease is left; resume_work ends the pause."
    until: Annotated[wire.Moment | None, wire.says("when the pause ends; default: when resume_work is called")] = None
    reason: Annotated[Reason | None, wire.says("why; audited, and shown to workers that claim")] = None


class DrainWork(PauseWork, kw_only=True):
    """Pause, and wait until no lease is left."""

    example = ({"worker": "reader-1", "reason": "its machine is replaced", "wait_seconds": 30}, {
        **examples.PAUSED, "type": None, "worker": "reader-1", "until": None, "reason": "its machine is replaced",
        "leases_left": 0})
    next_step = "While leases_left is not 0, call it again. Then do what you paused for, and call resume_work."
    wait_seconds: Annotated[wire.Wait, wire.says("seconds to wait until no lease is left; clamped to 30")] = 0.0


class ResumeWork(WorkTarget, kw_only=True):
    """End a pause."""

    example = ({"type": "page.summarize"}, {"resumed": True, "pauses_left": 0})
    next_step = "list_pauses shows what else is paused."
    reason: Annotated[Reason | None, wire.says("why; audited")] = None


class ListPauses(wire.Ask, kw_only=True):
    """List what is paused."""

    filters: ClassVar[bool] = True
    example = ({}, {"pauses": [examples.PAUSED]})
    refusals = (errors.TenantNotFound,)
    next_step = "resume_work ends a pause."
    tenant: wire_admin.Whose = None


class PauseRecord(Struct):
    """A pause: workers get no new leases of it, and keep those that they have."""

    type: str | None
    capabilities: list[str] | None      # of one lane of the type; null: all tasks of the type
    worker: str | None
    whole_tenant: bool
    since: datetime
    until: datetime | None
    reason: str | None
    paused_by: wire.Principal
    leases_left: int                    # live leases of what is paused


class WorkPauses(Struct):
    """What is paused, the oldest pause first."""

    columns = "type capabilities worker whole_tenant since until paused_by reason leases_left"
    pauses: list[PauseRecord]


class ResumedWork(Struct):
    """Whether there was such a pause, and how many others there are."""

    resumed: bool
    pauses_left: int


BulkAction = Literal["cancel", "release", "prioritize", "rerun"]
BULK: dict[str, Any] = {
    "bulk_id": examples.NEXT_TASK_ID, "action": "rerun", "matches": 2, "at_least": False, "done": 2, "skipped": 0,
    "refused": 0,
    "problem": None, "ended": True, "begun_by": {"kind": "human", "id": "root"}, "begun_at": examples.NOW,
    "updated_at": examples.LATER,
    "ended_at": examples.LATER}


class PreviewBulk(wire.Ask, kw_only=True):
    """Count the tasks that something would be done to."""

    filters: ClassVar[bool] = True
    example = ({"action": "rerun", "status": "failed", "ended_after": examples.NOW}, {
        "action": "rerun", "matches": 2, "at_least": False, "confirmation": "mXz0…", "expires_at": examples.LATER,
        "sample": [{
            "task_id": examples.TASK_ID, "type": "page.summarize", "status": "failed", "created_by": examples.ADA,
            "priority": 0,
            "held": None, "created_at": examples.NOW, "task_summary": "The page on rivers"}]})
    next_step = "Look at the sample. If these are the tasks that you mean, call run_bulk with the confirmation."
    action: Annotated[BulkAction, wire.says(
        "cancel: end them; release: offer those on hold again; prioritize: set priority; rerun: run ended ones again, "
        "but none that was run again before")]
    priority: Annotated[wire.Integer | None, wire.says("with prioritize: the new priority")] = None
    reason: Annotated[Reason | None, wire.says("why; audited, and sent to the owner of a canceled task")] = None
    status: Annotated[wire.Status | None, wire.says("only tasks in this status")] = None
    type: Annotated[wire.Name | None, wire.says("only tasks of this type")] = None
    created_by: Annotated[wire.Name | None, wire.says("id of the creator")] = None
    created_by_kind: Annotated[wire.Kind | None, wire.says("kind of created_by; default: any")] = None
    created_after: Annotated[wire.Moment | None, wire.says("created then or later")] = None
    created_before: Annotated[wire.Moment | None, wire.says("created earlier")] = None
    ended_after: Annotated[wire.Moment | None, wire.says("ended then or later")] = None
    id_prefix: Annotated[wire.Name | None, wire.says("how the task_id begins")] = None
    held: Annotated[bool | None, wire.says("true: only those on hold; false: none of them")] = None


class RunBulk(wire.Ask, kw_only=True):
    """Do it to the tasks that a preview has found."""

    paged: ClassVar[bool] = True
    example = ({"confirmation": "mXz0…"}, BULK)
    refusals = (errors.InvalidConfirmation, errors.QuotaExceeded)
    next_step = "While ended is false, call it again with the same confirmation: it goes on where it was."
    confirmation: Annotated[str, Meta(max_length=20_000), wire.says("of preview_bulk; good for 15 minutes to begin")]
    max_tasks: Annotated[wire.Whole | None, wire.says("tasks in this call; default 500, clamped to 5000")] = None


class GetBulk(wire.Ask, kw_only=True):
    """Read how far a bulk is."""

    needed: ClassVar[tuple[str, ...]] = ("bulk_id",)
    example = ({"bulk_id": examples.NEXT_TASK_ID}, BULK)
    refusals = (errors.BulkNotFound,)
    next_step = "While ended is false, run_bulk with its confirmation goes on."
    bulk_id: Annotated[wire.Name, wire.says("the bulk that run_bulk began")] = ""


class BulkSample(Struct):
    """One of the tasks that something would be done to."""

    task_id: str
    type: str
    status: str
    created_by: wire.Principal
    priority: int
    held: str | None
    created_at: datetime
    task_summary: str | None = None     # how it begins


class BulkPreview(Struct):
    """What would be done to how many tasks; nothing was changed."""

    action: str
    matches: int
    at_least: bool              # true: there are more, which were not counted
    sample: list[BulkSample]    # the newest of them
    confirmation: str           # run_bulk needs it
    expires_at: datetime        # until then run_bulk may begin


class BulkRecord(Struct):
    """How far a bulk is."""

    bulk_id: str
    action: str
    matches: int                # that the preview has counted
    at_least: bool
    done: int
    skipped: int                # had changed in between, so that nothing was done to them
    refused: int
    problem: str | None         # why the last one was refused
    ended: bool
    begun_by: wire.Principal
    begun_at: datetime
    updated_at: datetime
    ended_at: datetime | None
