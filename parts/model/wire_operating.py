"""What goes over the wire for people who look after a gate."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from asyncgate.parts.model.errors import QueueNotFound, TenantNotFound
from asyncgate.parts.model.examples import ADA, DUTY, LATER, NOW, PAUSED, TASK_ID
from asyncgate.parts.model.wire import Ask, Capabilities, Moment, Name, PageAsk, Principal, Wait, says
from asyncgate.parts.model.wire_admin import Whose

QUEUE: dict[str, Any] = {
    "queue_id": "6f1c09d2b7a4e385", "type": "page.summarize", "capabilities": ["web.read"], "claimable": 12,
    "delayed": 3, "delayed_at_least": False, "held": 1, "leased": 4, "oldest_wait_seconds": 41.5,
    "workers": 2, "last_minute": {"started": 6, "ended": 5, "failed": 0, "expired": 0},
    "last_hour": {"started": 310, "ended": 302, "failed": 4, "expired": 1}}


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


class ListQueues(PageAsk, kw_only=True):
    """List queues."""

    example = ({"limit": 20}, {"queues": [QUEUE]})
    next_step = "get_queue shows one queue; list_tasks with its type the tasks."
    lists = "all"
    type: Annotated[Name | None, says("queues with tasks of this type only")] = None


class GetQueue(Ask, kw_only=True):
    """Read one queue."""

    needed: ClassVar[tuple[str, ...]] = ("queue_id",)
    example = ({"queue_id": QUEUE["queue_id"]}, QUEUE)
    refusals = (QueueNotFound,)
    queue_id: Name = ""


class Flow(Struct):
    """What happened in a queue in some time."""

    started: int                        # leases that were granted
    ended: int                          # tasks that succeeded, failed or were canceled
    failed: int                         # attempts that failed, whether or not another one followed
    expired: int                        # leases that ran out


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
    workers: int                        # of the last 100 workers that asked for tasks, those that can take these
    last_minute: Flow                   # about: counted by whole minutes; of other processes up to half a minute late
    last_hour: Flow


class Queues(Struct):
    """A page of queues, in the order of their types."""

    columns = "queue_id type capabilities claimable delayed held leased oldest_wait_seconds workers"
    queues: list[QueueRecord]
    next_cursor: str | None = None
    cursor: str | None = None


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


Reason = Annotated[str, Meta(max_length=500)]


class WorkTarget(Ask, kw_only=True):
    """What a pause is about: exactly one of a type, a worker, or the whole tenant."""

    refusals = (TenantNotFound,)
    tenant: Whose = None
    type: Annotated[Name | None, says("tasks of this type")] = None
    capabilities: Annotated[Capabilities | None, says(
        "with type: only its tasks that require exactly these; [] for those that require none")] = None
    worker: Annotated[Name | None, says("the worker with this worker_id")] = None
    whole_tenant: Annotated[bool, says("true: all tasks")] = False


class PauseWork(WorkTarget, kw_only=True):
    """Pause a type, a lane, a worker, or the whole tenant."""

    example = ({"type": "page.summarize", "until": LATER, "reason": "the model is down"}, PAUSED)
    next_step = "drain_work waits until no lease is left; resume_work ends the pause."
    until: Annotated[Moment | None, says("when it ends by itself; default: with resume_work")] = None
    reason: Annotated[Reason | None, says("why; claims are told it, and it is audited")] = None


class DrainWork(PauseWork, kw_only=True):
    """Pause, and wait until no lease is left."""

    example = ({"worker": "reader-1", "reason": "its machine is replaced", "wait_seconds": 30}, {
        **PAUSED, "type": None, "worker": "reader-1", "until": None, "reason": "its machine is replaced",
        "leases_left": 0})
    next_step = "While leases_left is not 0, call it again. Then do what you paused for, and call resume_work."
    wait_seconds: Annotated[Wait, says("seconds to wait until no lease is left; clamped to 30")] = 0.0


class ResumeWork(WorkTarget, kw_only=True):
    """End a pause."""

    example = ({"type": "page.summarize"}, {"resumed": True, "pauses_left": 0})
    next_step = "list_pauses shows what else is paused."
    reason: Annotated[Reason | None, says("why; audited")] = None


class ListPauses(Ask, kw_only=True):
    """List what is paused."""

    filters: ClassVar[bool] = True
    example = ({}, {"pauses": [PAUSED]})
    refusals = (TenantNotFound,)
    next_step = "resume_work ends a pause."
    tenant: Whose = None


class PauseRecord(Struct):
    """A pause: workers get no new leases of it, and keep those that they have."""

    type: str | None
    capabilities: list[str] | None      # of one lane of the type; null: all tasks of the type
    worker: str | None
    whole_tenant: bool
    since: datetime
    until: datetime | None
    reason: str | None
    paused_by: Principal
    leases_left: int                    # live leases of what is paused


class WorkPauses(Struct):
    """What is paused, the oldest pause first."""

    columns = "type capabilities worker whole_tenant since until paused_by reason leases_left"
    pauses: list[PauseRecord]


class ResumedWork(Struct):
    """Whether there was such a pause, and how many others there are."""

    resumed: bool
    pauses_left: int
