"""The scheduler: a TASKEE that creates tasks at the times that agents ordered (spec 8, H.5).

It leases six types of control task (`schedule.create`, `.pause`, `.resume`, `.run`, `.delete`, `.status`), stores the
schedules in its own SQLite file, and calls create_task when one is due.  It needs two credentials, because only an
admin may do both: a worker's for the control tasks, and an agent's, who owns the created tasks.

If it is killed at any moment, no run and no order is lost or duplicated:

- The scheduler writes each due run to disk, with the whole create_task request, before it creates the task.
- It creates each run under the key `schedule:{schedule_id}:{run_at_iso}`, then removes the run from disk.  If it dies
  in between, the next process repeats the call, and the gate deduplicates it.
- A control task changes the file and stores its answer in one transaction.  If the gate offers the task again, after a
  lost lease or a lost reply, the scheduler repeats the stored answer and changes nothing.
- A new schedule starts to run when the gate has accepted the answer to its schedule.create.  If that task was canceled
  meanwhile, the schedule is deleted, and its receipts say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import groupby, islice
from math import inf
from typing import Any, Protocol

from msgspec import structs

from asyncgate.clients import http
from asyncgate.extras.scheduler import store
from asyncgate.extras.scheduler.calendar import find_due_runs, format_time
from asyncgate.extras.scheduler.plan import InvalidOrder, ScheduleRef, read_payload, read_plan
from asyncgate.parts.model import wire
from asyncgate.parts.model.durations import DAY_SECONDS

CONTROL_TYPES = ("schedule.create", "schedule.delete", "schedule.pause", "schedule.resume", "schedule.run",
                 "schedule.status")
UNCHANGING = ("schedule.run", "schedule.status")
TERMINAL_STATUSES = ("succeeded", "failed", "canceled")
FINAL_STATUSES = (400, 409, 413)                 # refusals that a retry would not change
LEASE_LOST = "lease_invalid_or_expired"
TTL_SECONDS, ORDER_WAIT_SECONDS = 60, 25.0    # length of a control task's lease; how long a claim waits
TICK_SECONDS = 1.0                      # pause between checks of the clock, which may be set at any time
LATER_SECONDS = 60.0                    # pause before another check of a state that only others can change
LEAP_SECONDS = 60.0                     # a clock that is set back by less only delays runs
CONCURRENT_SCHEDULES = 16                              # schedules whose runs are created concurrently
REPORTED = 500                          # the most schedules in one report
LATE_SECONDS = 300.0                    # a run that comes later than that is late
NEXT_RUNS, WEEK_SECONDS = 5, 7 * DAY_SECONDS    # the next runs that a report names, and of a cron expression
REMEMBERED_SECONDS = 30 * 86_400.0      # how long an answer is kept after the gate has accepted it


class OperationCaller(Protocol):
    """A client of the gate with one of the two credentials."""

    async def call(self, operation: str, /, **fields: Any) -> Any:
        """Return the reply; raise Refusal or Unreachable."""


class Patience:
    """Pauses after failures, by name; each pause is twice as long as the last."""

    def __init__(self) -> None:
        self.until: dict[str, float] = {}
        self.failures = Counter[str]()

    def wants(self, what: str) -> bool:
        """Whether something is paused now."""
        return self.until.get(what, 0.0) > time.monotonic()

    def failed(self, what: str, at_least: float | None = None) -> float:
        """Pause something after a failure; return the seconds."""
        self.failures[what] += 1
        pause = max(http.pause_after(self.failures[what], 0.5), at_least or 0.0)
        self.until[what] = time.monotonic() + pause
        return pause

    def worked(self, what: str) -> None:
        """Forget the failures of something that succeeded."""
        self.until.pop(what, None)
        self.failures.pop(what, None)


class Scheduler:
    """Carries out control tasks, and creates the tasks of due runs."""

    def __init__(self, store: store.Store, worker: OperationCaller, agent: OperationCaller, *,
                 clock: Callable[[], float] = time.time,
                 as_worker: Mapping[str, str] = {}, as_agent: Mapping[str, str] = {},
                 say: Callable[[str], None] = lambda text: None) -> None:
        self.store, self.worker, self.agent, self.clock, self.say = store, worker, agent, clock, say
        self.as_worker, self.as_agent = dict(as_worker), dict(as_agent)
        self.turn, self.woken, self.patience = asyncio.Lock(), asyncio.Event(), Patience()
        self.reported: dict[str, tuple[Any, ...]] = {}
        self.in_hand = set[str]()       # control tasks that are being answered
        self.complaints: dict[str, str] = {}
        self.instance = ""
        self.seen_at = inf              # the time at the last look; at first any time may be behind the file's

    # The clock.

    async def run(self) -> None:
        """Create due tasks and carry out control tasks until cancelled; then release all leases."""
        self.store.forget(self.clock() - REMEMBERED_SECONDS)
        await self.tick()       # first: an earlier process may have left answers, which need its leases
        await self._give_back()
        obeying = asyncio.ensure_future(self._obey())
        try:
            while not obeying.done():
                await self.tick()
                with contextlib.suppress(TimeoutError):     # wait_for may swallow a cancellation before Python 3.12
                    async with asyncio.timeout(self._pause()):
                        await self.woken.wait()
                self.woken.clear()
            await obeying
        finally:
            obeying.cancel()
            await asyncio.gather(obeying, return_exceptions=True)
            await self._give_back()

    def _pause(self) -> float:
        """Return the seconds to sleep; short, because the clock may be set and an unreachable gate may return."""
        due = self.store.next_due_at()
        return min(max(due - self.clock(), 0.0), TICK_SECONDS) if due is not None else TICK_SECONDS

    async def tick(self) -> None:
        """Send open answers, create due tasks, and report schedules: all that is possible now (H.5)."""
        for control in self.store.unanswered():
            if control.task_id not in self.in_hand and not self.patience.wants(control.task_id):
                await self._try(control.task_id, self._answer(control))
        async with self.turn:
            await self._create_due()
        for schedule in self.store.deleted():
            if not self.patience.wants(schedule.schedule_id):
                await self._try(schedule.schedule_id, self._take_leave(schedule))
        if not self.patience.wants("report"):
            await self._try("report", self._report())

    async def _try(self, what: str, doing: Any) -> None:
        try:
            await doing
            self.complaints.pop(what, None)
            if not self.patience.wants(what):
                self.patience.worked(what)
        except (http.Refusal, http.Unreachable) as error:
            self.patience.failed(what, getattr(error, "retry_after", None))
            self._complain(what, error)

    def _complain(self, what: str, error: Exception, key: str = "worker") -> None:
        """Print an error once until it changes; an unreachable gate is one error for all calls."""
        what = "gate" if isinstance(error, http.Unreachable) else what
        if self.complaints.get(what) != str(error):
            self.complaints[what] = str(error)
            asked = f" (asked with the {key}'s key)" if getattr(error, "status", None) in (401, 403) else ""
            self.say(f"{error}; retrying" if what == "gate" else f"{what}: {error}{asked}")

    # What is due.

    async def _create_due(self) -> None:
        """Create the runs on disk, then write the runs that are due now, and create them."""
        self._follow_clock_back()
        await self._fire()
        if decisions := [self._decision(schedule, self.clock()) for schedule in self.store.due(self.clock())]:
            self.store.decide(decisions)
            await self._fire()

    def _follow_clock_back(self) -> None:
        """If the clock was ahead and is set back, plan again what is settled up to a time that has not come.

        A run that was created ahead of its time comes again under its key, so the gate creates no second task.
        """
        now, before = self.clock(), self.seen_at
        self.seen_at = now
        if now > before - LEAP_SECONDS:
            return
        for schedule in self.store.live():
            if schedule.enabled and schedule.since > now + LEAP_SECONDS:
                self.say(f"schedule {schedule.schedule_id}: the clock is set back; its runs go on from now")
                with contextlib.suppress(ValueError):       # its time zone is gone
                    self.store.keep(schedule.settled(now))

    def _decision(self, schedule: store.Schedule, now: float) -> tuple[store.Schedule, list[store.Firing]]:
        try:
            return self._runs(schedule, now)
        except ValueError as wrong:     # its time zone is gone: retry later, and let the others run
            self._complain(f"schedule {schedule.schedule_id}", wrong)
            return structs.replace(schedule, due_at=now + LATER_SECONDS, last_status=f"waiting: {wrong}"), []

    def _runs(self, schedule: store.Schedule, now: float) -> tuple[store.Schedule, list[store.Firing]]:
        runs = find_due_runs(schedule.timing(), schedule.plan.misfire_policy, schedule.since, now)
        firings = [store.Firing(schedule.schedule_id, run,
                                schedule.plan.task(schedule.schedule_id, schedule.owner_id, run,
                                                                       now)) for run in runs]
        return schedule.settled(runs[-1] if runs else schedule.since), firings

    async def _fire(self) -> None:
        lanes = asyncio.Semaphore(CONCURRENT_SCHEDULES)

        async def fire_group(schedule_id: str, firings: list[store.Firing]) -> list[store.Fired]:
            async with lanes:
                waits = self.patience.wants("gate") or self.patience.wants(schedule_id)
                return [] if waits else await self._fire_in_order(schedule_id, firings)

        groups = [(name, list(of)) for name, of in groupby(self.store.firings(), lambda firing: firing.schedule_id)]
        outcomes = await asyncio.gather(*(fire_group(*group) for group in groups))
        if fired := [firing for some in outcomes for firing in some]:
            self.store.fired(fired)

    async def _fire_in_order(self, schedule_id: str, firings: list[store.Firing]) -> list[store.Fired]:
        """Create runs until one fails for now; a run that the gate refuses for good counts as done."""
        done = []
        for firing in firings:
            try:
                reply = await self.agent.call("create_task", **self.as_agent, **firing.ask)
            except (http.Refusal, http.Unreachable) as error:
                if not is_final(error):
                    self._put_off(schedule_id, error)
                    break
                done.append(store.Fired(firing, f"refused: {getattr(error, 'code', '')}: {error}"))
            else:
                done.append(store.Fired(firing, "created", reply["task_id"]))
                for what in ("gate", schedule_id):
                    self.patience.worked(what)
                    self.complaints.pop(what, None)
        return done

    def _put_off(self, schedule_id: str, error: http.Refusal | http.Unreachable) -> None:
        """Pause one schedule, or all of them if no gate answers."""
        if isinstance(error, http.Unreachable):
            self.patience.failed("gate")
            return self._complain("gate", error)
        self.patience.failed(schedule_id, error.retry_after)
        self._complain(schedule_id, error, key="agent")
        status = f"waiting: {error.code}: {error}"
        if (schedule := self.store.schedule(schedule_id)) and schedule.last_status != status:
            self.store.keep(structs.replace(schedule, last_status=status))

    # Reports, by which the gate notices a silent scheduler: H.7.4.

    async def _report(self) -> None:
        """Tell the gate the next run of each schedule for which it has changed."""
        live = {schedule.schedule_id: schedule for schedule in self.store.live()}
        news = [name for name, schedule in live.items() if self.reported.get(name) != report_key(schedule)]
        for at in range(0, len(news), REPORTED):
            some = [live[name] for name in news[at:at + REPORTED]]
            reply = await self.worker.call("report_schedule", **self.as_worker, schedules=list(map(make_report, some)))
            self.reported |= {schedule.schedule_id: report_key(schedule) for schedule in some}
            for unknown in reply["unknown"]:
                self.say(f"schedule {unknown}: unknown to the gate, which will not notice if it stops running")
        self.reported = {name: told for name, told in self.reported.items() if name in live}

    # Control tasks.

    async def _obey(self) -> None:
        """Carry out control tasks, one after another, for ever."""
        while True:
            asked = time.monotonic()
            try:
                obeyed = await self.obey()
                for what in ("gate", "control tasks"):
                    self.patience.worked(what)
                    self.complaints.pop(what, None)
                if not obeyed and time.monotonic() - asked < http.FIRST_PAUSE:
                    await asyncio.sleep(http.FIRST_PAUSE)      # a gate that is stopping answers waiting claims at once
            except (http.Refusal, http.Unreachable) as error:
                self._complain("control tasks", error)
                await asyncio.sleep(self.patience.failed("control tasks", getattr(error, "retry_after", None)))

    async def obey(self, wait_seconds: float = ORDER_WAIT_SECONDS) -> bool:
        """Wait for a control task and carry it out; return whether one came."""
        reply = await self.worker.call(
            "lease_next", **self.as_worker, accept_types=list(CONTROL_TYPES), capabilities=["scheduler"],
            lease_ttl_seconds=TTL_SECONDS, wait_seconds=wait_seconds, process=http.name_process())
        for offer in reply["tasks"]:
            await self.carry_out(offer)
        return bool(reply["tasks"])

    async def carry_out(self, offer: Mapping[str, Any]) -> None:
        """Carry out a control task; repeat the stored answer if it came before."""
        lease = {name: offer[name] for name in ("lease_id", "fence")}
        if control := self.store.control(offer["task_id"]):
            control = structs.replace(control, lease=lease)
            self.store.carry_out(control)
        else:
            async with self.turn:
                await self._create_due()        # the order does not apply to runs that were due before it
                control = self._carried_out(offer, lease)
        self.in_hand.add(control.task_id)
        try:
            await self._answer(control)
        finally:
            self.in_hand.discard(control.task_id)
            self.woken.set()

    def _carried_out(self, offer: Mapping[str, Any], lease: dict[str, Any]) -> store.Control:
        control = store.Control(task_id=offer["task_id"], type=offer["type"], lease=lease)
        schedule, run = None, None
        try:
            schedule, control.result = self._ordered(offer)
            control.schedule_id = schedule.schedule_id
        except InvalidOrder as wrong:
            control.error = {"code": wrong.code, "field": wrong.field, "message": str(wrong)}
        else:
            run = self._extra_run(schedule) if control.type == "schedule.run" else None
        self.store.carry_out(control, None if control.type in UNCHANGING else schedule, run)
        return control

    def _extra_run(self, schedule: store.Schedule) -> store.Firing:
        """Return a run for now, beside those of the plan, which go on unchanged."""
        now = self.clock()
        return store.Firing(schedule.schedule_id, int(now), schedule.plan.task(
            schedule.schedule_id, schedule.owner_id, int(now), now))

    def _ordered(self, offer: Mapping[str, Any]) -> tuple[store.Schedule, dict[str, Any]]:
        """Return the changed schedule of a control task, and the answer; only its owner may change one."""
        owner = offer["created_by"]
        if offer["type"] == "schedule.create":
            now = self.clock()
            new = store.Schedule(       # with an id from the task, so that a repeated order makes no second one
                schedule_id=f"sched-{offer['task_id']}", plan=read_plan(offer["payload"], now),
                owner_kind=owner["kind"], owner_id=owner["id"], task_id=offer["task_id"], created_at=int(now),
                since=int(now)).settled(int(now))
            return new, {"schedule_id": new.schedule_id, "next_run_at": format_time_or_none(new.next_run_at)}
        schedule_id = read_payload(offer["payload"], ScheduleRef).schedule_id
        schedule = self.store.schedule(schedule_id)
        if schedule is None or (schedule.owner_kind, schedule.owner_id) != (owner["kind"], owner["id"]):
            raise InvalidOrder("schedule_id", f"{owner['kind']} {owner['id']} has no schedule {schedule_id} here",
                          "schedule_not_found")
        if offer["type"] == "schedule.status":
            return schedule, {
                "schedule_id": schedule.schedule_id, "name": schedule.plan.name, "enabled": schedule.enabled,
                "next_run_at": format_time_or_none(schedule.next_run_at),
                "last_run_at": format_time_or_none(schedule.last_run_at),
                "last_status": schedule.last_status, "last_task_id": schedule.last_task_id}
        if offer["type"] == "schedule.run":
            return schedule, {"ok": True, "run_at": format_time(int(self.clock()))}
        if offer["type"] == "schedule.delete":
            return mark_deleted(schedule), {"ok": True}
        if offer["type"] == "schedule.pause":
            return structs.replace(schedule, enabled=False).settled(schedule.since), {"ok": True}
        if not schedule.enabled:
            schedule = self._resumed(schedule)
        return schedule, {"ok": True, "next_run_at": format_time_or_none(schedule.next_run_at)}

    def _resumed(self, schedule: store.Schedule) -> store.Schedule:
        """Return a paused schedule as it goes on from now: runs during the pause do not count as missed."""
        try:
            return structs.replace(schedule, enabled=True).settled(self.clock())
        except ValueError as wrong:     # its time zone is gone
            raise InvalidOrder("timezone", str(wrong)) from None

    # Answers, and the receipts of schedules.

    async def _answer(self, control: store.Control) -> None:
        """Send the answer to a control task; if its lease is lost, wait until the task comes again or has ended."""
        try:
            if control.type == "schedule.create" and control.error is None:
                await self._announce(control)
            await self._end(control)
        except http.Refusal as refusal:
            if refusal.code != "task_not_found" and refusal.code != LEASE_LOST:
                raise
            if refusal.code == "task_not_found" or await self._over(control, refusal):
                return self._unwanted(control)
            self.patience.failed(control.task_id, LATER_SECONDS)
            return
        schedule = self.store.schedule(control.schedule_id or "") if control.type == "schedule.create" else None
        self.store.answered(control, self.clock(), schedule and structs.replace(schedule, state="live"))

    async def _over(self, control: store.Control, lost: http.Refusal) -> bool:
        """Whether the task of a lost lease has ended; release_lease tells that to any earlier holder."""
        if "status" not in lost.more:
            try:
                await self.worker.call("release_lease", **self.as_worker, **control.lease, task_id=control.task_id)
            except http.Refusal as refusal:
                lost = refusal
        return lost.more.get("status") in TERMINAL_STATUSES

    async def _announce(self, control: store.Control) -> None:
        """Emit schedule.created once; if the gate refuses the receipt, delete the schedule."""
        schedule = self.store.schedule(control.schedule_id or "")
        if schedule is None or schedule.receipt_id:
            return
        try:
            receipt_id = await self._created(schedule, control.lease)
        except http.Refusal as refusal:
            if refusal.code == LEASE_LOST or not is_final(refusal):
                raise
            control.error, control.result = {"code": refusal.code, "field": "payload", "message": str(refusal)}, None
            self.store.carry_out(control, mark_deleted(schedule))
        else:
            if schedule := self.store.schedule(schedule.schedule_id):
                self.store.keep(structs.replace(schedule, receipt_id=receipt_id))

    async def _created(self, schedule: store.Schedule, lease: Mapping[str, Any]) -> str:
        body = {"name": schedule.plan.name, "mode": schedule.plan.mode, "timezone": schedule.plan.timezone,
                "interval_seconds": schedule.plan.interval_seconds, "cron_expr": schedule.plan.cron_expr,
                "misfire_policy": schedule.plan.misfire_policy, "task_type": schedule.plan.task_template.type}
        reply = await self.worker.call(
            "emit_receipt", **self.as_worker, **lease, receipt_type="schedule.created", task_id=schedule.task_id,
            schedule_id=schedule.schedule_id, body={name: value for name, value in body.items() if value is not None})
        return str(reply["receipt_id"])

    async def _end(self, control: store.Control) -> None:
        mine = {**self.as_worker, **control.lease, "task_id": control.task_id}
        if control.error is not None:
            await self.worker.call("fail", **mine, error=control.error, retryable=False)
            return
        if not self.instance:
            self.instance = (await self.worker.call("get_config"))["instance_id"]
        record = {"type": "asyncgate", "uri": f"asyncgate://{self.instance}/tasks/{control.task_id}/result"}
        await self.worker.call("complete", **mine, result=control.result, artifacts=[record])

    def _unwanted(self, control: store.Control) -> None:
        """Drop an answer that nobody waits for; the schedule of a canceled schedule.create must not run."""
        schedule = self.store.schedule(control.schedule_id or "") if control.type == "schedule.create" else None
        if schedule is not None and schedule.state == "new":
            schedule = mark_deleted(schedule)
        self.store.answered(control, self.clock(), schedule)

    async def _take_leave(self, schedule: store.Schedule) -> None:
        """Emit schedule.deleted for a schedule that has its schedule.created, then remove it."""
        try:
            created = schedule.receipt_id or await self._announced(schedule)
            if created is not None:
                await self.worker.call("emit_receipt", **self.as_worker, receipt_type="schedule.deleted",
                                       schedule_id=schedule.schedule_id, parents=[created])
        except http.Refusal as refusal:
            if not is_final(refusal):
                raise
            self.say(f"schedule {schedule.schedule_id} is deleted, but the gate refused the receipt: {refusal}")
        self.store.remove(schedule.schedule_id)

    async def _announced(self, schedule: store.Schedule) -> str | None:
        """Emit the schedule.created of a schedule again, in case the first reply was lost."""
        if (control := self.store.control(schedule.task_id)) is None:
            return None
        try:
            return await self._created(schedule, control.lease)
        except http.Refusal as refusal:
            if not is_final(refusal):
                raise
            return None         # the receipt was never emitted, or another scheduler holds the task

    async def _give_back(self) -> None:
        """Release all control tasks, including those of a claim whose answer was lost."""
        with contextlib.suppress(http.Unreachable, http.Refusal):
            for lease in (await self.worker.call("list_leases", **self.as_worker, resume=False))["leases"]:
                if lease["type"] in CONTROL_TYPES:
                    held = {name: lease[name] for name in ("task_id", "lease_id")}
                    with contextlib.suppress(http.Refusal):      # the others are released all the same
                        await self.worker.call("release_lease", **self.as_worker, **held)


def is_final(error: http.Refusal | http.Unreachable) -> bool:
    """Whether a gate (not a proxy) has refused for good."""
    return isinstance(error, http.Refusal) and error.status in FINAL_STATUSES and error.code != "unexpected_answer"


def format_time_or_none(moment: int | None) -> str | None:
    """Format a time, or return None."""
    return None if moment is None else format_time(moment)


def mark_deleted(schedule: store.Schedule) -> store.Schedule:
    """Return a schedule as deleted, without further runs."""
    return structs.replace(schedule, state="deleted", enabled=False, next_run_at=None, due_at=None)


def report_key(schedule: store.Schedule) -> tuple[Any, ...]:
    """Return the values whose change needs a new report."""
    return schedule.enabled, schedule.next_run_at, schedule.last_run_at, schedule.last_status, schedule.last_task_id


def make_report(schedule: store.Schedule) -> dict[str, Any]:
    """Return an item of report_schedule; a cron schedule's interval is the time between its next two runs."""
    plan, runs = schedule.plan, list_next_runs(schedule)
    gap = min(runs[1] - runs[0], wire.LONGEST_PAUSE_SECONDS) if len(runs) > 1 else None
    patience = min(2 * (gap or inf), LATE_SECONDS) + plan.jitter_seconds
    return {"schedule_id": schedule.schedule_id, "enabled": schedule.enabled, "interval_seconds": gap,
            "next_run_at": format_time_or_none(schedule.next_run_at), "next_runs": list(map(format_time, runs)),
            "late_after_seconds": min(patience, wire.LONGEST_PAUSE_SECONDS), "name": plan.name,
            "task_type": plan.task_template.type, "cron_expr": plan.cron_expr, "timezone": plan.timezone,
            "last_run_at": format_time_or_none(schedule.last_run_at), "last_status": schedule.last_status,
            "last_task_id": schedule.last_task_id}


def list_next_runs(schedule: store.Schedule) -> list[int]:
    """Return the next runs: of a cron expression those of a week, because nobody else can work them out."""
    if schedule.next_run_at is None:
        return []
    runs, end = [schedule.next_run_at], schedule.next_run_at + WEEK_SECONDS
    with contextlib.suppress(ValueError):       # its time zone is gone
        for run, _ in islice(schedule.timing().after(schedule.next_run_at), wire.MOST_RUNS - 1):
            if len(runs) >= NEXT_RUNS and (run > end or schedule.plan.mode == "interval"):
                break
            runs.append(run)
    return runs
