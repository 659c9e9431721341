"""The oracle: what the texts say a gate does, in the plainest Python; nothing of the engine is in it.

One Model is one tenant.  Lists and dictionaries hold what is, `now` comes with each call as seconds since the program
began, and ids come from outside, so that they can be those of the gate it is compared with.  Where a text decides, its
clause is named (H and PH are the spec's addenda); what the texts leave open is in docs/design.md, "What the gate
decides".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncgate.parts.model.wire import Ask, CreateTask, LeaseNext, Principal

GATE = Principal("asyncgate", "asyncgate-1")
ENDED = ("succeeded", "failed", "canceled")
OPENS = {"task.assigned": ("task.completed", "task.failed", "task.canceled")}       # PH.1.3
ESCALATES_TO = {1: Principal("agent", "bob"), 2: Principal("worker", "w2")}     # by class, where a program turns it on
TERMS = ("task_summary", "instructions", "success_criteria", "expected_outcome_kind", "expected_artifact_mime",
         "result_delivery")
PROSE = "recommended_action"        # words for people: no text fixes them, so a comparison leaves them out

Reply = dict[str, Any] | None
NewId = Callable[[str, str, str], str]      # what is named, of which task, of what type


@dataclass
class Rules:
    """The settings that programs turn."""

    strict: bool = False                # PH.3 locatability
    progress_receipts: bool = False
    refuse_mismatch: bool = False       # of a used idempotency key
    max_lease_renewals: int = 0
    max_lease_lifetime: int = 0
    escalation: bool = False


class ModelRefusal(Exception):
    """The gate says no: the code, and the reason of a lost lease."""

    def __init__(self, code: str, reason: str | None = None) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


@dataclass
class Receipt:
    """A fact that somebody states (spec 14)."""

    receipt_id: str
    type: str
    sender: Principal
    to: Principal
    task_id: str
    lease_id: str | None
    parents: list[str]
    body: dict[str, Any]

    def hash(self, body: dict[str, Any]) -> str:
        """Return everything it says, but no id of its own, no time, and not which gate it was."""
        ends = [[end.kind, None if end.kind == "asyncgate" else end.id] for end in (self.sender, self.to)]
        return sha256([self.type, *ends, self.task_id, self.lease_id, None, sorted(self.parents), body])


@dataclass
class Lease:
    """One claim on one task; all of them are kept here."""

    lease_id: str
    worker: Principal
    fence: int
    acquired_at: float
    expires_at: float
    accepted: str
    claim_id: str | None
    length: int                         # in seconds, as it was granted
    renewals: int = 0
    ending: str = "live"
    first_outcome: Reply = None         # what the verb that ended it was answered


@dataclass
class Task:
    """One piece of work (spec 3)."""

    task_id: str
    owner: Principal
    ask: CreateTask
    contract: Any
    priority: int
    max_attempts: int
    backoff: int
    max_expiries: int
    next_eligible_at: float | None
    deadline_at: float | None
    duty: str = ""
    status: str = "queued"
    attempt: int = 0
    expiries: int = 0
    owed: bool = True
    held: str | None = None
    lost_to: list[str] = field(default_factory=list)
    started_at: float | None = None
    progress: Any = None
    sequence: int = 0
    progress_fence: int = 0
    outcome: Any = None
    artifacts: Any = None
    leases: list[Lease] = field(default_factory=list)

    @property
    def lease(self) -> Lease | None:
        """The latest lease."""
        return self.leases[-1] if self.leases else None

    @property
    def needs(self) -> set[str]:
        """The capabilities that a worker must have."""
        return set((parsed(self.ask.requirements) or {}).get("capabilities") or ())

    def state(self) -> dict[str, Any]:
        """What get_task shows, as far as rules decide it."""
        live = self.lease if self.lease and self.lease.ending == "live" else None
        return {"task_id": self.task_id, "status": self.status, "attempt": self.attempt, "fence": len(self.leases),
                "expiries": self.expiries, "held": self.held, "obligation_receipt_id": self.duty,
                "obligation_open": self.owed, "started_at": self.started_at, "progress": self.progress,
                "next_eligible_at": self.next_eligible_at if self.status == "queued" else None,
                "leased_to": live and show_principal(live.worker), "lease_expires_at": live and live.expires_at,
                "created_by": owned(self.owner), "priority": self.priority}


class Model:
    """One tenant of a gate."""

    def __init__(self, rules: Rules, epoch: float = 0.0) -> None:
        self.rules, self.epoch, self.now = rules, epoch, 0.0        # epoch: when the program began, in Unix seconds
        self.tasks: dict[str, Task] = {}                # in the order of creation
        self.receipts: list[Receipt] = []
        self.acks: dict[tuple[str, str, str], str] = {}
        self.told: set[tuple[str, str, str | None]] = set()     # anomalies, each once per cause (H.7)
        self.admin = False

    def perform(self, name: str, by: Principal, ask: Ask, now: float, new_id: NewId, admin: bool = False) -> Reply:
        """Carry out one operation for a principal at a time; a refusal changes nothing."""
        self.now, self.new_id, self.admin = now, new_id, admin
        reply: Reply = getattr(self, name)(by, ask)
        return reply

    # Creating and watching tasks.

    def create_task(self, by: Principal, ask: CreateTask) -> Reply:
        """Make one task per creator and key; the first one is returned, and says so if the body differs."""
        first = [task for task in self.tasks.values()
                 if ask.idempotency_key and task.ask.idempotency_key == ask.idempotency_key and same(task.owner, by)]
        contract = contract_of(ask, by)
        if first and first[0].contract != contract and self.rules.refuse_mismatch:
            raise ModelRefusal("idempotency_conflict")
        if first:
            return {"task_id": first[0].task_id, "status": first[0].status,
                    "payload_differs": first[0].contract != contract}
        task = Task(self.new_id("task", "", ""), by, ask, contract, ask.priority or 0, ask.max_attempts or 3,
                    30 if ask.retry_backoff_seconds is None else ask.retry_backoff_seconds,
                    10 if ask.max_expiries is None else ask.max_expiries,
                    self.now + ask.delay_seconds if ask.delay_seconds else None,
                    ask.timeouts.deadline.timestamp() - self.epoch if ask.timeouts and ask.timeouts.deadline else None)
        self.tasks[task.task_id] = task
        task.duty = self.emit("task.assigned", by, by, task, assignment(ask)).receipt_id
        return {"task_id": task.task_id, "status": "queued", "payload_differs": False}

    def get_task(self, by: Principal, ask: Any) -> Reply:
        """For the owner, the latest worker and admins."""
        task = self.task(ask.task_id)
        if not (self.admin or same(task.owner, by) or (task.lease and same(task.lease.worker, by))):
            raise ModelRefusal("forbidden")
        ended = task.status in ENDED
        result = {"outcome": task.status, "result": task.outcome if task.status == "succeeded" else None,
                  "error": task.outcome if task.status == "failed" else None, "artifacts": task.artifacts}
        return {**task.state(), "result": result if ended else None}

    def cancel_task(self, by: Principal, ask: Any) -> Reply:
        """Cancel for the owner or an admin; a terminal task stays what it is."""
        task = self.own(by, ask.task_id)
        if task.status in ENDED:
            return {"ok": False, "status": task.status}
        if task.lease and task.lease.ending == "live":
            task.lease.ending = "canceled"
        task.status, task.held, task.owed = "canceled", None, False
        why = {"canceled_by": {"kind": by.kind, "id": by.id}, "reason": ask.reason}
        self.result_ready(task, self.emit("task.canceled", by, GATE, task, why, [task.duty]), why)
        return {"ok": True, "status": "canceled"}

    def release_hold(self, by: Principal, ask: Any) -> Reply:
        """Offer a task on hold again, for its owner or an admin; the count of losses starts anew."""
        task = self.own(by, ask.task_id)
        if task.status in ENDED:
            return {"ok": False, "status": task.status}
        if task.held:
            task.held, task.expiries, task.lost_to, task.next_eligible_at = None, 0, [], None
        return {"ok": True, "status": task.status}

    def attach_artifacts(self, by: Principal, ask: Any) -> Reply:
        """Say where a result lies, for the owner, the worker that completed it, or an admin."""
        task = self.task(ask.task_id)
        if not (self.admin or same(task.owner, by) or (task.lease and same(task.lease.worker, by))):
            raise ModelRefusal("forbidden")
        if task.status != "succeeded":
            raise ModelRefusal("invalid_state_transition")
        if not (where := located(ask)):
            raise ModelRefusal("not_locatable")
        if task.owed:
            self.locate(task, by, where)
        return {"ok": True, "status": "succeeded", "obligation": "discharged"}

    # Leasing tasks and working on them.

    def lease_next(self, by: Principal, ask: LeaseNext) -> Reply:
        """Say who gets what; a repeated claim gets what it got, while that lives."""
        if ask.claim_id:
            again = [task for task in self.tasks.values() if task.lease and self.alive(task.lease)
                     and same(task.lease.worker, by) and task.lease.claim_id == ask.claim_id]
            if again:
                again.sort(key=lambda task: self.queue_order(task, ask))
                return {"tasks": [self.offer(task) for task in again]}
        ready = [task for task in self.tasks.values() if self.claimable(task, ask)]
        ready.sort(key=lambda task: self.queue_order(task, ask))
        return {"tasks": [self.grant(task, by, ask) for task in ready[:min(ask.max_tasks or 1, 100)]]}

    def claimable(self, task: Task, ask: LeaseNext) -> bool:
        """Queued, not held, its time has come, of an accepted type, and the worker can do it."""
        return (task.status == "queued" and not task.held and (task.next_eligible_at or 0) <= self.now
                and (not ask.accept_types or task.ask.type in ask.accept_types)
                and task.needs <= (ask.capabilities or set()))

    def queue_order(self, task: Task, ask: LeaseNext) -> tuple[bool, int, int]:
        """Preferred types, then highest priority, then oldest."""
        return (task.ask.type not in (ask.preferred_kinds or ()), -task.priority, list(self.tasks).index(task.task_id))

    def grant(self, task: Task, by: Principal, ask: LeaseNext) -> dict[str, Any]:
        """One new lease: the fence rises by one."""
        wished = ask.lease_ttl_seconds or (task.ask.timeouts.lease_ttl_seconds if task.ask.timeouts else None)
        lease_id, fence = self.new_id("lease", task.task_id, ""), len(task.leases) + 1
        body = {"worker_capabilities": sorted(ask.capabilities or ()), "attempt": task.attempt, "fence": fence}
        accepted = self.emit("task.accepted", by, GATE, task, body, [task.duty], lease_id)
        longest = self.rules.max_lease_lifetime or ttl(wished)
        until = self.now + min(ttl(wished), longest)
        task.leases.append(Lease(lease_id, by, fence, self.now, until, accepted.receipt_id, ask.claim_id, ttl(wished)))
        task.status = "leased"
        return self.offer(task)

    def offer(self, task: Task) -> dict[str, Any]:
        """What a worker is handed."""
        lease = task.lease
        assert lease is not None
        return {"task_id": task.task_id, "lease_id": lease.lease_id, "fence": lease.fence, "type": task.ask.type,
                "payload": parsed(task.ask.payload), "attempt": task.attempt, "expires_at": lease.expires_at,
                "obligation_receipt_id": task.duty, "progress": task.progress, "created_by": owned(task.owner)}

    def renew_lease(self, by: Principal, ask: Any) -> Reply:
        """Renew only a live lease, by its own length from now on; the eleventh renewal is an anomaly (H.7.3)."""
        if not ask.task_id:
            found = [task for task in self.tasks.values() for lease in task.leases
                     if lease.lease_id == ask.lease_id and lease.ending == "live"]
            if not found:
                raise ModelRefusal("lease_invalid_or_expired", "unknown")
            ask.task_id = found[0].task_id
        task, lease = self.holder(by, ask)
        if self.rules.max_lease_renewals and lease.renewals >= self.rules.max_lease_renewals:
            raise ModelRefusal("lease_renewal_limit")
        longest = self.rules.max_lease_lifetime
        if longest and lease.expires_at >= lease.acquired_at + longest:
            raise ModelRefusal("lease_lifetime_limit")
        until = self.now + ttl(ask.extend_by_seconds or lease.length)
        until = min(until, lease.acquired_at + longest) if longest else until
        lease.expires_at = max(until, lease.expires_at)     # it never moves earlier
        lease.renewals += 1
        if lease.renewals == 11:
            self.anomaly(task, "lease_renewed_often", lease, renewals=11,
                         progress_reported=task.progress_fence == lease.fence)
        return {"ok": True, "expires_at": lease.expires_at}

    def release_lease(self, by: Principal, ask: Any) -> Reply:
        """Grant an early expiry; neither attempt nor expiry is spent."""
        if again := self.repeated(by, ask, "released"):
            return again.first_outcome
        task, lease = self.holder(by, ask)
        task.status, task.next_eligible_at, task.started_at = "queued", None, None
        self.emit("lease.expired", GATE, task.owner, task, lost(task, lease, "released"), [lease.accepted],
                  lease.lease_id)
        return self.over(lease, "released", {"ok": True, "status": "queued", "requeued": True})

    def list_leases(self, by: Principal, ask: Any) -> Reply:
        """What a worker holds."""
        held = [lease for task in self.tasks.values() for lease in task.leases if self.alive(lease)
                and same(lease.worker, by) and by.instance_id in (None, lease.worker.instance_id)]
        return {"leases": [{"lease_id": lease.lease_id, "fence": lease.fence, "expires_at": lease.expires_at,
                            "renewals": lease.renewals} for lease in sorted(held, key=lambda lease: lease.lease_id)]}

    def start_task(self, by: Principal, ask: Any) -> Reply:
        """Make a leased task running, once."""
        task, _ = self.holder(by, ask)
        if task.status == "leased":
            task.status, task.started_at = "running", self.now
        return {"ok": True, "status": "running", "started_at": task.started_at}

    def report_progress(self, by: Principal, ask: Any) -> Reply:
        """Keep the last report for the next worker; the first one starts the task."""
        task, lease = self.holder(by, ask)
        self.start_task(by, ask)
        task.progress, task.sequence, task.progress_fence = parsed(ask.progress), task.sequence + 1, lease.fence
        if self.rules.progress_receipts:
            self.emit("task.progress", lease.worker, GATE, task, {"progress": task.progress, "sequence": task.sequence},
                      [lease.accepted], lease.lease_id)
        return {"ok": True, "status": "running"}

    def complete(self, by: Principal, ask: Any) -> Reply:
        """End well: located success discharges the duty; lenient success without is told, strict refuses it."""
        where = located(ask)
        if again := self.repeated(by, ask, "completed"):
            if where and self.task(ask.task_id).owed:
                self.locate(self.task(ask.task_id), again.worker, where)
            return {"ok": True, "status": "succeeded",
                    "obligation": "open" if self.task(ask.task_id).owed else "discharged"}
        task, lease = self.holder(by, ask)
        where = where or inline(task, ask)
        if not where and self.rules.strict:
            raise ModelRefusal("not_locatable")
        task.status, task.outcome, task.owed = "succeeded", parsed(ask.result), not where
        task.artifacts = where.get("artifacts")
        said = {"result_summary": summary(ask), "delivery_proof": ask.delivery_proof or None,
                **enclosed("result", ask.result, task.task_id)}
        ended = self.emit("task.completed", lease.worker, GATE, task,
                          {**said, "completion_metadata": ask.completion_metadata, **where},
                          [task.duty] if where else [], lease.lease_id)
        self.result_ready(task, ended, {**said, **where})
        if not where:
            self.anomaly(task, "success_without_locatability", lease, worker_id=lease.worker.id,
                         receipt_id=ended.receipt_id, obligation_receipt_id=task.duty,
                         result_delivery=task.ask.result_delivery)
        return self.over(lease, "completed", {"ok": True, "status": "succeeded",
                                              "obligation": "discharged" if where else "open"})

    def fail(self, by: Principal, ask: Any) -> Reply:
        """Retry while attempts remain and the worker thinks it may help, else over."""
        if again := self.repeated(by, ask, "failed"):
            if again is not self.tasks[ask.task_id].lease and again.first_outcome:
                again.first_outcome.pop("next_eligible_at", None)   # leased again since, so that moment is past
            return again.first_outcome
        task, lease = self.holder(by, ask)
        requeued = bool(ask.retryable) and task.attempt + 1 < task.max_attempts
        error = enclosed("error", ask.error, task.task_id)
        body = {**error, "attempt": task.attempt, "requeued": requeued, "retry_recommended": bool(ask.retryable),
                "retry_after_seconds": ask.retry_after_seconds}
        if not requeued:
            task.status, task.outcome, task.owed = "failed", parsed(ask.error), False
            if ask.retryable:       # lease protocol: the escalation, then the end
                self.escalate(task, lease, "max_retries_exceeded")
            ended = self.emit("task.failed", lease.worker, GATE, task, body, [task.duty], lease.lease_id)
            self.result_ready(task, ended, error)
            return self.over(lease, "failed", {"ok": True, "status": "failed", "requeued": False,
                                               "next_eligible_at": None})
        self.emit("task.failed", lease.worker, GATE, task, body, [lease.accepted], lease.lease_id)
        wished = task.backoff * 2 ** task.attempt if ask.retry_after_seconds is None else ask.retry_after_seconds
        pause = min(wished, 900)
        task.status, task.attempt, task.started_at = "queued", task.attempt + 1, None
        task.next_eligible_at = self.now + pause
        return self.over(lease, "failed", {"ok": True, "status": "queued", "requeued": True,
                                           "next_eligible_at": self.now + pause})

    # Receipts and obligations.

    def ack_receipt(self, by: Principal, ask: Any) -> Reply:
        """H.8: a fact more, once for each who acknowledges, and nothing else."""
        found = [receipt for receipt in self.receipts if receipt.receipt_id == ask.receipt_id]
        if not found:
            raise ModelRefusal("receipt_not_found")
        if not (self.admin or same(found[0].to, by)):
            raise ModelRefusal("forbidden")
        key = (ask.receipt_id, by.kind, by.id)
        if key not in self.acks:
            self.acks[key] = self.emit("receipt.acknowledged", by, GATE, found[0].task_id,
                                       {"receipt_id": ask.receipt_id}, [ask.receipt_id]).receipt_id
        return {"ok": True, "receipt_id": self.acks[key]}

    def list_open_obligations(self, by: Principal, ask: Any) -> Reply:
        """PH.6: what is still owed to somebody, by the evidence, oldest first."""
        ids = sorted(receipt.receipt_id for receipt in self.receipts if receipt.type in OPENS and same(receipt.to, by)
                     and not self.terminated(receipt.receipt_id))
        page = [receipt_id for receipt_id in ids if receipt_id > (ask.since_receipt_id or "")][:ask.limit]
        return {"open_obligations": [{"receipt_id": receipt_id} for receipt_id in page],
                "cursor": page[-1] if page else ask.since_receipt_id}      # spec 17: the place reached

    def list_receipts(self, by: Principal, ask: Any) -> Reply:
        """One's own inbox, oldest first; to wait for a receipt changes nothing but the time of the answer."""
        ids = sorted(receipt.receipt_id for receipt in self.receipts if same(receipt.to, by)
                     and ask.receipt_type in (None, receipt.type))
        page = [receipt_id for receipt_id in ids if receipt_id > (ask.since_receipt_id or "")][:ask.limit]
        return {"receipts": [{"receipt_id": receipt_id} for receipt_id in page]}

    def check_terminator(self, by: Principal, ask: Any) -> Reply:
        """PH.1.4: whether some receipt that may discharge this one names it as a parent."""
        return {"has_terminator": self.terminated(ask.parent_receipt_id)}

    def terminated(self, receipt_id: str) -> bool:
        types = {receipt.receipt_id: OPENS.get(receipt.type, ()) for receipt in self.receipts}.get(receipt_id, ())
        return any(receipt_id in receipt.parents and receipt.type in types for receipt in self.receipts)

    # The gate's own upkeep.

    def sweep(self, by: Principal, ask: Any) -> Reply:
        """Take back what lost leases hold; tell of passed deadlines (PH.4)."""
        for task in self.tasks.values():
            if task.status in ("leased", "running") and task.lease and not self.alive(task.lease):
                self.expire(task, task.lease)
            if task.deadline_at is not None and task.deadline_at <= self.now and task.status not in ENDED:
                task.deadline_at = None
                self.anomaly(task, "deadline_passed", None, status=task.status)
        return None

    def expire(self, task: Task, lease: Lease) -> None:
        """A lost lease costs no attempt; too many of them, and the task is held."""
        task.status, task.started_at, task.next_eligible_at = "queued", None, None
        task.expiries, task.lost_to = task.expiries + 1, [*task.lost_to, lease.worker.id][-10:]
        task.held = "lease_expiries" if task.max_expiries and task.expiries >= task.max_expiries else None
        lease.ending = "expired"
        self.emit("lease.expired", GATE, task.owner, task, lost(task, lease, "expired"), [lease.accepted],
                  lease.lease_id)
        self.escalate(task, lease, "lease_expired")
        if task.expiries == 4:      # H.7.2: requeued more than three times
            self.anomaly(task, "lease_expired_often", None, expiries=4)
        if task.held:
            self.anomaly(task, "task_held", lease, expiries=task.expiries, workers=sorted(set(task.lost_to)),
                         held=task.held, last_progress=task.progress)

    def escalate(self, task: Task, lease: Lease, reason: str) -> None:
        """Tell whom the class names; the class of the payload, or else 1."""
        payload = parsed(task.ask.payload)
        wished = payload.get("escalation_class") if isinstance(payload, dict) else None
        chosen = wished if isinstance(wished, int) and not isinstance(wished, bool) else 1
        to = ESCALATES_TO.get(chosen) if self.rules.escalation else None
        if to is None:
            return
        self.emit("task.escalated", GATE, to, task, {
            "escalation_class": chosen, "escalation_reason": reason, "escalation_to": {"kind": to.kind, "id": to.id},
            "type": task.ask.type, "attempt": task.attempt, "expiries": task.expiries,
            "previous_worker_id": lease.worker.id, "expected_outcome_kind": task.ask.expected_outcome_kind,
            "expected_artifact_mime": task.ask.expected_artifact_mime}, [task.duty], lease.lease_id)

    # What the rules above share.

    def task(self, task_id: str) -> Task:
        """A task of this tenant; another's is as unknown as none."""
        if task_id not in self.tasks:
            raise ModelRefusal("task_not_found")
        return self.tasks[task_id]

    def own(self, by: Principal, task_id: str) -> Task:
        """A task that its owner or an admin asks about."""
        task = self.task(task_id)
        if not (self.admin or same(task.owner, by)):
            raise ModelRefusal("forbidden")
        return task

    def alive(self, lease: Lease) -> bool:
        """A lease ends at its time, whether or not the sweep has seen it."""
        return lease.ending == "live" and lease.expires_at > self.now

    def holder(self, by: Principal, ask: Any) -> tuple[Task, Lease]:
        """Demand that lease, worker, and the fence if it is sent, are those of the live lease."""
        task = self.task(ask.task_id)
        if task.lease is None:
            raise ModelRefusal("lease_invalid_or_expired", "unknown")
        lease = task.lease
        if lease.lease_id != ask.lease_id or ask.fence not in (None, lease.fence):
            newer = lease.fence > (ask.fence or 1)      # a lease without a fence is judged as the first
            raise ModelRefusal("lease_invalid_or_expired", "superseded" if newer else "unknown")
        if not same(lease.worker, by) or (by.instance_id and lease.worker.instance_id
                                          and by.instance_id != lease.worker.instance_id):
            raise ModelRefusal("lease_invalid_or_expired", "unknown")
        if not self.alive(lease):
            reasons = {"completed": "completed", "failed": "failed", "canceled": "canceled"}
            raise ModelRefusal("lease_invalid_or_expired", reasons.get(lease.ending, "expired"))
        return task, lease

    def repeated(self, by: Principal, ask: Any, ending: str) -> Lease | None:
        """Return the lease that this verb of this worker ended before, however long ago."""
        return next((lease for lease in self.task(ask.task_id).leases if lease.lease_id == ask.lease_id
                     and lease.ending == ending and same(lease.worker, by)), None)

    def over(self, lease: Lease, ending: str, outcome: dict[str, Any]) -> Reply:
        """End a lease, and keep what its verb was answered."""
        lease.ending, lease.first_outcome = ending, outcome
        return outcome

    def locate(self, task: Task, by: Principal, where: dict[str, Any]) -> None:
        """Write a new, linked completion; nothing of the task changes but its artifacts."""
        task.artifacts, task.owed = where.get("artifacts"), False
        lease_id = task.lease.lease_id if task.lease else None
        ended = self.emit("task.completed", by, GATE, task, where, [task.duty], lease_id)
        self.result_ready(task, ended, where)

    def result_ready(self, task: Task, ended: Receipt, news: dict[str, Any]) -> None:
        """Tell the owner, after any terminal receipt."""
        self.emit("task.result_ready", GATE, task.owner, task, {"status": task.status, **news}, [ended.receipt_id])

    def anomaly(self, task: Task, kind: str, lease: Lease | None, **details: Any) -> None:
        """H.7: informational, once per cause."""
        cause = (task.task_id, kind, lease.lease_id if lease else None)
        if cause not in self.told:
            self.told.add(cause)
            self.emit("system.anomaly", GATE, task.owner, task, {"kind": kind, "details": details}, [], cause[2])

    def emit(self, type: str, sender: Principal, to: Principal, task: Task | str, body: dict[str, Any],
             parents: list[str] | None = None, lease_id: str | None = None) -> Receipt:
        """Write one receipt; what is null is not said."""
        task_id = task if isinstance(task, str) else task.task_id
        said = {name: value for name, value in {**body, "principal_instance_id": sender.instance_id}.items()
                if value is not None}
        ends = Principal(sender.kind, sender.id), Principal(to.kind, to.id)     # without their sessions
        receipt = Receipt(self.new_id("receipt", task_id, type), type, *ends, task_id, lease_id, parents or [],
                          {**said, "schema_version": "1"})
        self.receipts.append(receipt)
        return receipt


def same(one: Principal, other: Principal) -> bool:
    """A principal is kind and id; an instance is a session."""
    return (one.kind, one.id) == (other.kind, other.id)


def show_principal(who: Principal) -> dict[str, str]:
    """A principal as replies show it."""
    shown = {"kind": who.kind, "id": who.id, "instance_id": who.instance_id}
    return {name: value for name, value in shown.items() if value is not None}


def owned(who: Principal) -> dict[str, str]:
    """A task's creator, in both spellings (spec 3, 19.6)."""
    return {**show_principal(who), **{f"principal_{name}": value for name, value in show_principal(who).items()}}


def sha256(value: Any) -> str:
    """The hash of canonical JSON: sorted names, no white space."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def parsed(raw: Any) -> Any:
    """JSON that came as it is."""
    return json.loads(bytes(raw) or b"null")


def ttl(wished: int | None) -> int:
    """Return 300 seconds by default, 1800 at most (19.1)."""
    return min(wished or 300, 1800)


def assignment(ask: CreateTask) -> dict[str, Any]:
    """Return the contract (14.1), with the hash and size of the payload in its place."""
    waits = ask.timeouts and {name: value for name, value in (
        ("lease_ttl_seconds", ask.timeouts.lease_ttl_seconds),
        ("deadline", ask.timeouts.deadline and ask.timeouts.deadline.strftime("%Y-%m-%dT%H:%M:%SZ"))) if value}
    return {**{name: getattr(ask, name) for name in TERMS}, "timeouts": waits, "type": ask.type,
            "requirements": parsed(ask.requirements), "payload_pointer": ask.payload_pointer,
            "payload_sha256": sha256(parsed(ask.payload)), "payload_bytes": len(bytes(ask.payload) or b"null")}


def contract_of(ask: CreateTask, by: Principal) -> Any:
    """What makes a repeated create another one: all that it asks for, with defaults filled in."""
    return ({**assignment(ask), "payload_bytes": 0, "requirements": parsed(ask.requirements) or None},
            ask.principal_ai or by.id, ask.priority or 0,
            ask.max_attempts or 3, 30 if ask.retry_backoff_seconds is None else ask.retry_backoff_seconds,
            10 if ask.max_expiries is None else ask.max_expiries, ask.delay_seconds or 0)


def failed(proof: Any) -> bool:
    """PH.3.3: a proof of the opposite proves nothing."""
    return bool(proof) and str(proof.get("status", "")).lower() == "failed"


def located(ask: Any) -> dict[str, Any]:
    """Read artifacts in any of the shapes of peers, or a proof; empty is none."""
    given = ask.artifacts
    if isinstance(given, dict):
        given = given.get("pointers", [given] if given else [])
    found = {"artifacts": given if isinstance(given, list) or not given else [given],
             "delivery_proof": None if failed(ask.delivery_proof) else ask.delivery_proof}
    return {name: value for name, value in found.items() if value}


def inline(task: Task, ask: Any) -> dict[str, Any]:
    """Say whether a result in the task record is where the creator wants it."""
    if task.ask.result_delivery != "inline" or parsed(ask.result) in (None, "", [], {}):
        return {}
    return {"artifacts": [{"type": "asyncgate", "uri": f"asyncgate://{GATE.id}/tasks/{task.task_id}/result"}]}


def enclosed(name: str, raw: Any, task_id: str) -> dict[str, Any]:
    """Return up to 16 KB; of more, the hash, the size and the way to it."""
    value, size = parsed(raw), len(bytes(raw))
    if value is None:
        return {}
    if size <= 16384:
        return {"result_payload" if name == "result" else name: value}
    return {f"{name}_sha256": sha256(value), f"{name}_bytes": size,
            "how_to_retrieve": {"operation": "get_task", "task_id": task_id}}


def summary(ask: Any) -> str | None:
    """14.3: what the worker says in a sentence; if it says none, what its result calls its summary."""
    value = parsed(ask.result)
    told = value.get("summary") if isinstance(value, dict) else None
    return ask.result_summary or (told[:1000] if isinstance(told, str) else None)


def lost(task: Task, lease: Lease, reason: str) -> dict[str, Any]:
    """14.6."""
    return {"task_id": task.task_id, "previous_worker_id": lease.worker.id, "attempt": task.attempt,
            "requeued": task.held is None, "reason": reason}
