"""The oracle: the specified behaviour of a gate in the simplest Python, without any code of the engine.

One Model is one tenant.  Its state is in lists and dictionaries; each call passes `now`, in seconds since the program
began.  Ids come from outside, so that they can equal those of the gate under test.  Comments name the clause of the
spec (H and PH are its addenda); docs/design.md, "What the gate decides", describes the cases that the spec leaves open.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from asyncgate.parts.model import wire

GATE = wire.Principal("asyncgate", "asyncgate-1")
ENDED = ("succeeded", "failed", "canceled")
OPENS = {"task.assigned": ("task.completed", "task.failed", "task.canceled"),        # PH.1.3
         "input.requested": ("input.answered", "input.expired")}
# by class, if a program enables it
ESCALATES_TO = {1: wire.Principal("agent", "bob"), 2: wire.Principal("worker", "w2")}
TERMS = ("task_summary", "instructions", "success_criteria", "expected_outcome_kind", "expected_artifact_mime",
         "max_parks", "result_delivery")
PROSE = "recommended_action"        # free text that the spec does not define, so comparisons skip it
SEALED = "sealed"                   # what a confirmation holds, which only the gate can read

Target = tuple[str | None, frozenset[str] | None, str | None]       # type, capabilities, worker; none: the tenant
Reply = dict[str, Any] | None
NewId = Callable[[str, str, str], str]      # kind of the id, its task, its type


@dataclass
class Rules:
    """The settings that programs change."""

    strict: bool = False                # PH.3 locatability
    progress_receipts: bool = False
    refuse_mismatch: bool = False       # policy for a reused idempotency key
    max_lease_renewals: int = 0
    max_lease_lifetime: int = 0
    escalation: bool = False


class ModelRefusal(Exception):
    """A refusal: its code, and the reason for a lost lease."""

    def __init__(self, code: str, reason: str | None = None) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


@dataclass
class Receipt:
    """A fact stated by a principal (spec 14)."""

    receipt_id: str
    type: str
    sender: wire.Principal
    to: wire.Principal
    task_id: str
    lease_id: str | None
    parents: list[str]
    body: dict[str, Any]

    def hash(self, body: dict[str, Any]) -> str:
        """Return the hash of its contents, without its id, its time and the gate."""
        ends = [[end.kind, None if end.kind == "asyncgate" else end.id] for end in (self.sender, self.to)]
        return sha256([self.type, *ends, self.task_id, self.lease_id, None, sorted(self.parents), body])


@dataclass
class Lease:
    """One lease on a task; ended ones are kept."""

    lease_id: str
    worker: wire.Principal
    fence: int
    acquired_at: float
    expires_at: float
    accepted: str
    claim_id: str | None
    length: int                         # in seconds, as it was granted
    renewals: int = 0
    taken_up: tuple[str | None, int | None] | None = None   # by which instance, and after how many renewals
    ending: str = "live"
    first_outcome: Reply = None         # the answer to the call that ended it


@dataclass
class Inquiry:
    """What a worker has asked somebody, and how that ended."""

    key: str
    terms: list[Any]                    # all that was asked: the same again asks nothing more
    request: str                        # the receipt
    lease_id: str
    to: wire.Principal
    asked_by: wire.Principal
    schema: Any
    expires_at: float | None
    on_expiry: str
    state: str = "open"
    content: Any = None
    answered_by: wire.Principal | None = None
    ended_by: str | None = None         # the receipt of its end

    def outcome(self) -> dict[str, Any]:
        """Return how it ended, as workers learn it."""
        return {"action": self.state, "content": self.content, "receipt_id": self.ended_by,
                "by": self.answered_by and show_principal(self.answered_by)}


@dataclass
class Task:
    """One task (spec 3)."""

    task_id: str
    owner: wire.Principal
    ask: wire.CreateTask
    contract: Any
    priority: int
    max_attempts: int
    backoff: int
    max_expiries: int
    next_eligible_at: float | None
    deadline_at: float | None
    duty: str = ""
    ended_by: str = ""                  # the receipt of its end; of a success that was located later, the located one
    rerun_of: str | None = None
    status: str = "queued"
    attempt: int = 0
    expiries: int = 0
    owed: bool = True
    held: str | None = None
    lost_to: list[str] = field(default_factory=list)
    parks: int = 0
    steps: dict[int, tuple[str, Any]] = field(default_factory=dict)
    steps_sha256: str | None = None
    output: list[dict[str, Any]] = field(default_factory=list)     # its entries, in their order
    output_sha256: str | None = None
    started_at: float | None = None
    progress: Any = None
    sequence: int = 0
    progress_fence: int = 0
    outcome: Any = None
    artifacts: Any = None
    leases: list[Lease] = field(default_factory=list)
    questions: dict[str, Inquiry] = field(default_factory=dict)
    children: list[Task] = field(default_factory=list)
    ends: list[Task] = field(default_factory=list)      # of its children, in their order
    told: int = 0                       # how many of them its last offer has told
    until: str = "all"                  # what it waits for

    @property
    def family(self) -> dict[str, Any] | None:
        """Return how its children do, if it has any."""
        counts = {name: [child.status for child in self.ends].count(name) for name in ENDED}
        return {"open": len(self.children) - len(self.ends), **counts,
                "ends": [{"task_id": child.task_id, "status": child.status} for child in self.ends]
                } if self.children else None

    def has_come(self, until: str) -> bool:
        """Whether it has to wait for nothing."""
        return len(self.ends) == len(self.children) or (until == "any" and len(self.ends) > self.told)

    @property
    def chunks(self) -> int:
        """Return how many chunks it has given."""
        return sum("chunk" in entry for entry in self.output)

    def note_state(self) -> None:
        """Add its state to its output, if that is not the last one there."""
        state = {"fence": len(self.leases), "status": self.status, "held": self.held}
        if state != next(({name: entry[name] for name in state} for entry in self.output[::-1] if "status" in entry),
                         None):
            self.output.append({"offset": len(self.output) + 1, **state})
            self.sequence += 1

    @property
    def open_questions(self) -> list[Inquiry]:
        """Return the questions that nobody has answered."""
        return [question for question in self.questions.values() if question.state == "open"]

    @property
    def lease(self) -> Lease | None:
        """Return the latest lease."""
        return self.leases[-1] if self.leases else None

    @property
    def needs(self) -> set[str]:
        """Return the capabilities that a worker must have."""
        return set((parsed(self.ask.requirements) or {}).get("capabilities") or ())

    def state(self) -> dict[str, Any]:
        """Return the members of get_task that rules decide."""
        live = self.lease if self.lease and self.lease.ending == "live" else None
        return {"task_id": self.task_id, "status": self.status, "attempt": self.attempt, "fence": len(self.leases),
                "expiries": self.expiries, "parks": self.parks, "steps": len(self.steps), "held": self.held,
                "outputs": len(self.output), "obligation_receipt_id": self.duty,
                "obligation_open": self.owed, "started_at": self.started_at, "progress": self.progress,
                "next_eligible_at": self.next_eligible_at if self.status == "queued" else None,
                "leased_to": live and show_principal(live.worker), "lease_expires_at": live and live.expires_at,
                "created_by": owned(self.owner), "priority": self.priority, "rerun_of": self.rerun_of,
                "parent_task_id": self.ask.parent_task_id, "children": self.family}


@dataclass
class BulkOrder:
    """One thing that is to be done to many tasks, from the newest to the oldest."""

    by: wire.Principal
    ask: Any
    matches: int
    good_until: float
    left: list[Task] | None = None      # that were not looked at; None before it begins
    done: int = 0
    skipped: int = 0
    refused: int = 0


class Model:
    """One tenant of a gate."""

    def __init__(self, rules: Rules, epoch: float = 0.0) -> None:
        self.rules, self.epoch, self.now = rules, epoch, 0.0        # epoch: start of the program, in Unix seconds
        self.tasks: dict[str, Task] = {}                # in the order of creation
        self.receipts: list[Receipt] = []
        self.acks: dict[tuple[str, str, str], str] = {}
        self.told: set[tuple[str, str, str | None]] = set()     # anomalies, each once per cause (H.7)
        self.paused: dict[Target, tuple[float | None, wire.Principal, str | None]] = {}      # until when, by whom, why
        self.orders: dict[str, BulkOrder] = {}               # by confirmation
        self.admin = False
        self.before: tuple[Task, Lease, int, list[str], Any, int] | None = None     # the call that takes a lease up

    def perform(self, name: str, by: wire.Principal, ask: wire.Ask, now: float, new_id: NewId,
                admin: bool = False) -> Reply:
        """Perform one operation for a principal at a time; a refusal changes nothing."""
        self.now, self.new_id, self.admin = now, new_id, admin
        self.before = None
        try:
            reply: Reply = getattr(self, name)(by, ask)
        except ModelRefusal:
            self.take_back()
            raise
        for task in self.tasks.values():
            if task.output:
                task.note_state()
        return reply

    def take_back(self) -> None:
        """Undo that a refused call took a lease up."""
        if self.before is not None:
            task, lease, expiries, lost_to, taken_up, receipts = self.before
            task.expiries, task.lost_to, lease.taken_up = expiries, lost_to, taken_up
            for receipt in self.receipts[receipts:]:
                self.told.discard((task.task_id, receipt.body["kind"], None))
            del self.receipts[receipts:]

    # Creating and watching tasks.

    def create_task(self, by: wire.Principal, ask: wire.CreateTask) -> Reply:
        """Create one task per creator and key; a replay returns the first task, with a mark if the body differs."""
        return self.make_task(by, ask, None)

    def make_task(self, by: wire.Principal, ask: wire.CreateTask, origin: Task | None) -> Reply:
        """Create a task, perhaps from another one."""
        first = [task for task in self.tasks.values()
                 if ask.idempotency_key and task.ask.idempotency_key == ask.idempotency_key and same(task.owner, by)]
        named = {"rerun_of": origin.task_id if origin else None}
        contract = contract_of(ask, by), named
        if first and first[0].contract != contract and self.rules.refuse_mismatch:
            raise ModelRefusal("idempotency_conflict")
        if first:
            return {"task_id": first[0].task_id, "status": first[0].status,
                    "payload_differs": first[0].contract != contract}
        parent = self.join_family(by, ask.parent_task_id) if ask.parent_task_id else None
        task = Task(self.new_id("task", "", ""), by, ask, contract, ask.priority or 0, ask.max_attempts or 3,
                    30 if ask.retry_backoff_seconds is None else ask.retry_backoff_seconds,
                    10 if ask.max_expiries is None else ask.max_expiries,
                    self.now + ask.delay_seconds if ask.delay_seconds else None,
                    ask.timeouts.deadline.timestamp() - self.epoch if ask.timeouts and ask.timeouts.deadline else None)
        self.tasks[task.task_id] = task
        if parent:
            parent.children.append(task)
            parent.sequence += 1
        task.rerun_of = named["rerun_of"]
        task.duty = self.emit("task.assigned", by, by, task, {**assignment(ask), **named},
                              [origin.ended_by] if origin else []).receipt_id
        return {"task_id": task.task_id, "status": "queued", "payload_differs": False}

    def join_family(self, by: wire.Principal, parent_id: str) -> Task:
        """Return the parent of a new task: open, and its owner's, its worker's or an admin's to extend."""
        parent = self.task(parent_id)
        holds = parent.lease and self.alive(parent.lease) and same(parent.lease.worker, by)
        if not (self.admin or same(parent.owner, by) or holds):
            raise ModelRefusal("forbidden")
        if parent.status in ENDED:
            raise ModelRefusal("invalid_state_transition")
        return parent

    def end_child(self, task: Task) -> None:
        """Tell the parent of a task that has ended; offer it again if that is what it waits for."""
        parent = self.tasks.get(task.ask.parent_task_id or "")
        if parent is None:
            return
        parent.ends.append(task)
        parent.sequence += 1
        if parent.held == "children_open" and parent.has_come(parent.until):
            parent.held = parent.next_eligible_at = None

    def may_read(self, by: wire.Principal, task: Task) -> bool:
        """Whether a principal may read a task: its own, one that it has or had, a child of these; an admin any."""
        parent = self.tasks.get(task.ask.parent_task_id or "")
        return (self.admin or same(task.owner, by) or bool(task.lease and same(task.lease.worker, by))
                or (parent is not None and self.may_read(by, parent)))

    def wait_tasks(self, by: wire.Principal, ask: Any) -> Reply:
        """Tell which of some tasks, or of all children of one, have ended."""
        tasks = list[Task]()
        for task_id in dict.fromkeys(ask.ids or [ask.parent_task_id]):
            tasks.append(self.task(task_id))
            if not self.may_read(by, tasks[-1]):
                raise ModelRefusal("forbidden")
        ended = [task for task in tasks if task.status in ENDED] if ask.ids else tasks[0].ends
        open = len(tasks if ask.ids else tasks[0].children) - len(ended)
        return {"done": open == 0 or (ask.until == "any" and bool(ended)), "open": open,
                "ended": [{"task_id": task.task_id, "status": task.status} for task in ended]}

    def get_task(self, by: wire.Principal, ask: Any) -> Reply:
        """Return a task to those who may read it."""
        task = self.task(ask.task_id)
        if not self.may_read(by, task):
            raise ModelRefusal("forbidden")
        ended = task.status in ENDED
        result = {"outcome": task.status, "result": task.outcome if task.status == "succeeded" else None,
                  "error": task.outcome if task.status == "failed" else None, "artifacts": task.artifacts}
        return {**task.state(), "result": result if ended else None}

    def cancel_task(self, by: wire.Principal, ask: Any) -> Reply:
        """Cancel a task for its owner or an admin; a terminal task stays unchanged."""
        task = self.own(by, ask.task_id)
        ok = task.status not in ENDED or task.status == "canceled"
        if task.status not in ENDED:
            self.cancel(task, by, reason=ask.reason)
        return {"ok": ok, "status": task.status,
                "descendants": self.cancel_descendants(task, by, ask.reason) if ask.cascade else None}

    def cancel(self, task: Task, by: wire.Principal, **why: Any) -> None:
        """Cancel a task that has not ended."""
        if task.lease and task.lease.ending == "live":
            task.lease.ending = "canceled"
        task.status, task.held, task.owed = "canceled", None, False
        self.end_child(task)
        why = {"canceled_by": {"kind": by.kind, "id": by.id}, **why}
        self.result_ready(task, self.emit("task.canceled", by, GATE, task, why, [task.duty]), why)
        self.look_after(task)

    def cancel_descendants(self, top: Task, by: wire.Principal, reason: str | None) -> int:
        """Cancel what is open below a task, from the top down."""
        left, canceled = [top], 0
        while left:
            children = left.pop().children[::-1]
            open = [child for child in children if child.status not in ENDED]
            for child in open:
                self.cancel(child, by, reason=reason, cascade_of=top.task_id)
            canceled += len(open)
            left += [child for child in children if child not in open and child.children]
            left += [child for child in open if child.children]
        return canceled

    def release_hold(self, by: wire.Principal, ask: Any) -> Reply:
        """Offer a task on hold again, for its owner or an admin; reset the count of lost leases."""
        task = self.own(by, ask.task_id)
        if task.status in ENDED:
            return {"ok": False, "status": task.status}
        if task.held == "input_required":
            raise ModelRefusal("invalid_state_transition")
        if task.held:
            task.held, task.expiries, task.lost_to, task.next_eligible_at = None, 0, [], None
            if task.parks:
                task.parks, task.sequence = 0, task.sequence + 1
            task.held = "input_required" if task.open_questions else None
            self.look_after(task)
        return {"ok": True, "status": task.status}

    def rerun_task(self, by: wire.Principal, ask: Any) -> Reply:
        """Make a task with the contract of an ended one, for its owner; without its deadline and its delay."""
        task = self.own(by, ask.task_id)
        if task.status not in ENDED:
            raise ModelRefusal("invalid_state_transition")
        if bytes(ask.payload):      # for a task that has lost its own
            raise ModelRefusal("invalid_request")
        return self.run_again(task, by, ask.idempotency_key)

    def run_again(self, task: Task, by: wire.Principal, key: str | None) -> Reply:
        """Make a task with the contract of an ended one."""
        lease_ttl = task.ask.timeouts and task.ask.timeouts.lease_ttl_seconds
        again = replace(task.ask, idempotency_key=key, delay_seconds=None, priority=task.priority,
                        principal_ai=task.ask.principal_ai or task.owner.id, parent_task_id=None,
                        timeouts=wire.Timeouts(lease_ttl_seconds=lease_ttl) if lease_ttl else None)
        return self.make_task(by if same(by, task.owner) else task.owner, again, task)

    def attach_artifacts(self, by: wire.Principal, ask: Any) -> Reply:
        """Locate a result, for the owner, the worker that completed it, or an admin."""
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

    def lease_next(self, by: wire.Principal, ask: wire.LeaseNext) -> Reply:
        """Lease tasks to a worker; a repeated claim returns the same leases while they are live."""
        if ask.claim_id:
            again = [task for task in self.tasks.values() if task.lease and self.alive(task.lease)
                     and same(task.lease.worker, by) and task.lease.claim_id == ask.claim_id
                     and (not task.lease.renewals or self.take_up(task, task.lease, by))]
            if again:
                again.sort(key=lambda task: self.queue_order(task, ask))
                return {"tasks": [self.offer(task) for task in again]}
        ready = [task for task in self.tasks.values() if self.claimable(task, ask) and not self.stopped(task, by)]
        ready.sort(key=lambda task: self.queue_order(task, ask))
        return {"tasks": [self.grant(task, by, ask) for task in ready[:min(ask.max_tasks or 1, 100)]]}

    def claimable(self, task: Task, ask: wire.LeaseNext) -> bool:
        """Whether a task is queued, not on hold, due, of an accepted type, and within the worker's capabilities."""
        return (task.status == "queued" and not task.held and (task.next_eligible_at or 0) <= self.now
                and (not ask.accept_types or task.ask.type in ask.accept_types)
                and task.needs <= (ask.capabilities or set()))

    def queue_order(self, task: Task, ask: wire.LeaseNext) -> tuple[bool, int, int]:
        """Order by preferred types, then highest priority, then age."""
        return (task.ask.type not in (ask.preferred_kinds or ()), -task.priority, list(self.tasks).index(task.task_id))

    def grant(self, task: Task, by: wire.Principal, ask: wire.LeaseNext) -> dict[str, Any]:
        """Grant a new lease; the fence rises by one."""
        wished = ask.lease_ttl_seconds or (task.ask.timeouts.lease_ttl_seconds if task.ask.timeouts else None)
        lease_id, fence = self.new_id("lease", task.task_id, ""), len(task.leases) + 1
        body = {"worker_capabilities": sorted(ask.capabilities or ()), "attempt": task.attempt, "fence": fence}
        accepted = self.emit("task.accepted", by, GATE, task, body, [task.duty], lease_id)
        longest = self.rules.max_lease_lifetime or ttl(wished)
        until = self.now + min(ttl(wished), longest)
        task.leases.append(Lease(lease_id, by, fence, self.now, until, accepted.receipt_id, ask.claim_id, ttl(wished)))
        task.status = "leased"
        task.sequence += task.told != len(task.ends)
        task.told = len(task.ends)
        return self.offer(task)

    def offer(self, task: Task) -> dict[str, Any]:
        """Return the offer for a worker."""
        lease = task.lease
        assert lease is not None
        return {"task_id": task.task_id, "lease_id": lease.lease_id, "fence": lease.fence, "type": task.ask.type,
                "payload": parsed(task.ask.payload), "attempt": task.attempt, "expires_at": lease.expires_at,
                "obligation_receipt_id": task.duty, "progress": task.progress, "created_by": owned(task.owner),
                "inputs": {key: question.outcome() for key, question in task.questions.items()
                           if question.state != "open"} if task.questions else None, "children": task.family}

    def renew_lease(self, by: wire.Principal, ask: Any) -> Reply:
        """Renew a live lease by its own length from now; the eleventh renewal is an anomaly (H.7.3)."""
        if not ask.task_id:
            tasks = [task for task in self.tasks.values() for lease in task.leases
                     if lease.lease_id == ask.lease_id and lease.ending == "live"]
            if not tasks:
                raise ModelRefusal("lease_invalid_or_expired", "unknown")
            ask.task_id = tasks[0].task_id
        task, lease = self.holder(by, ask)
        if self.rules.max_lease_renewals and lease.renewals >= self.rules.max_lease_renewals:
            raise ModelRefusal("lease_renewal_limit")
        if lease.taken_up and 0 < task.max_expiries <= task.expiries:
            raise ModelRefusal("lease_invalid_or_expired", "expired")
        longest = self.rules.max_lease_lifetime
        if longest and lease.expires_at >= lease.acquired_at + longest:
            raise ModelRefusal("lease_lifetime_limit")
        until = self.now + ttl(ask.extend_by_seconds or lease.length)
        until = min(until, lease.acquired_at + longest) if longest else until
        lease.expires_at = max(until, lease.expires_at)     # the end never moves earlier
        lease.renewals += 1
        if lease.renewals == 11:
            self.anomaly(task, "lease_renewed_often", lease, renewals=11,
                         progress_reported=task.progress_fence == lease.fence)
        self.look_after(task)
        return {"ok": True, "expires_at": lease.expires_at}

    def release_lease(self, by: wire.Principal, ask: Any) -> Reply:
        """End a lease early, without counting an attempt or an expiry; a park is counted, and has its time."""
        if again := self.repeated(by, ask, "released"):
            task = self.task(ask.task_id)
            if again is not task.lease:     # leased again since
                return {"ok": True, "status": "queued", "requeued": True, "next_eligible_at": None,
                        "open_children": None}
            return self.returned(task)
        task, lease = self.holder(by, ask)
        if ask.until_children is not None and not task.children:
            raise ModelRefusal("invalid_state_transition")
        until = None if ask.until is None else max(ask.until.timestamp() - self.epoch, self.now)
        if parsed(ask.checkpoint) is not None:
            self.keep_progress(task, lease, ask.checkpoint)
        task.held = "input_required" if task.open_questions else None
        parks = until is not None or ask.until_children is not None
        if ask.until_children is not None and task.has_come(ask.until_children):
            until = None
        elif ask.until_children is not None:
            task.until, task.held = ask.until_children, task.held or "children_open"
            task.sequence += 1
        if parks:
            task.parks, task.sequence, task.progress_fence = task.parks + 1, task.sequence + 1, lease.fence
            most = 1000 if task.ask.max_parks is None else task.ask.max_parks
            task.held = "max_parks" if 0 < most <= task.parks else task.held
        task.status, task.next_eligible_at, task.started_at = "queued", until, None
        told = {"why": ask.reason, "until_children": ask.until_children, "parks": task.parks if parks else None,
                "parked_until": None if until is None else ask.until.strftime("%Y-%m-%dT%H:%M:%SZ")}
        self.emit("lease.expired", GATE, task.owner, task,
                  {**lost(task, lease, "parked" if parks else "released"), **told}, [lease.accepted],
                  lease.lease_id)
        self.tell_hold(task, lease)
        return self.over(lease, "released", self.returned(task))

    def returned(self, task: Task) -> dict[str, Any]:
        """Return what a release is told of a task, however often it is repeated."""
        failed = task.status == "failed"
        waits = len(task.children) - len(task.ends) if task.held == "children_open" else None
        return {"ok": True, "status": "failed" if failed else "queued", "requeued": not failed,
                "next_eligible_at": task.next_eligible_at, "open_children": waits}

    def list_leases(self, by: wire.Principal, ask: Any) -> Reply:
        """Return the live leases of a worker."""
        held = [lease for task in self.tasks.values() for lease in task.leases if self.alive(lease)
                and same(lease.worker, by) and by.instance_id in (None, lease.worker.instance_id)
                and self.take_up(task, lease, by)]
        return {"leases": [{"lease_id": lease.lease_id, "fence": lease.fence, "expires_at": lease.expires_at,
                            "renewals": lease.renewals} for lease in sorted(held, key=lambda lease: lease.lease_id)]}

    def start_task(self, by: wire.Principal, ask: Any) -> Reply:
        """Set a leased task to running; no-op if it is running."""
        task, _ = self.holder(by, ask)
        if task.status == "leased":
            task.status, task.started_at = "running", self.now
        return {"ok": True, "status": "running", "started_at": task.started_at}

    def report_progress(self, by: wire.Principal, ask: Any) -> Reply:
        """Keep the last progress for the next worker; the first progress starts the task."""
        task, lease = self.holder(by, ask)
        self.start_task(by, ask)
        self.keep_progress(task, lease, ask.progress)
        return {"ok": True, "status": "running"}

    def keep_progress(self, task: Task, lease: Lease, told: Any) -> None:
        """Keep the last progress, or the checkpoint with which a lease is given back."""
        task.progress, task.sequence, task.progress_fence = parsed(told), task.sequence + 1, lease.fence
        if self.rules.progress_receipts:
            self.emit("task.progress", lease.worker, GATE, task, {"progress": task.progress, "sequence": task.sequence},
                      [lease.accepted], lease.lease_id)

    def record_step(self, by: wire.Principal, ask: Any) -> Reply:
        """Keep a step under its number; its name and its first value stay."""
        task, lease = self.holder(by, ask)
        if (known := task.steps.get(ask.seq)) is not None:
            if known[0] != ask.name:
                raise ModelRefusal("step_conflict")
            return {"seq": ask.seq, "name": ask.name, "steps": len(task.steps), "replayed": True, "value": known[1]}
        self.start_task(by, ask)
        task.steps[ask.seq] = ask.name, parsed(ask.value)
        task.sequence, task.progress_fence = task.sequence + 1, lease.fence
        task.steps_sha256 = sha256([task.steps_sha256, ask.seq, ask.name,
                                    hashlib.sha256(bytes(ask.value)).hexdigest()])
        return {"seq": ask.seq, "name": ask.name, "steps": len(task.steps), "replayed": False}

    def list_steps(self, by: wire.Principal, ask: Any) -> Reply:
        """List the steps of a task, in the order of their numbers, for those who may read it."""
        self.get_task(by, ask)
        return {"steps": [{"seq": seq, "name": name, "value": value}
                          for seq, (name, value) in sorted(self.task(ask.task_id).steps.items())]}

    def append_output(self, by: wire.Principal, ask: Any) -> Reply:
        """Append chunks behind the state of the task; those that it has had already are not appended again."""
        task, lease = self.holder(by, ask)
        known = 0 if ask.position is None else task.chunks - ask.position
        if known < 0:
            raise ModelRefusal("output_conflict")
        if fresh := ask.chunks[known:]:
            self.start_task(by, ask)
            task.note_state()
            task.sequence, task.progress_fence = task.sequence + 1, lease.fence
        for chunk in fresh:
            task.output.append({"offset": len(task.output) + 1, "fence": lease.fence, "chunk": parsed(chunk)})
            task.output_sha256 = sha256([task.output_sha256, len(task.output),
                                         hashlib.sha256(bytes(chunk)).hexdigest()])
        return {"offset": len(task.output), "chunks": task.chunks}

    def read_output(self, by: wire.Principal, ask: Any) -> Reply:
        """Return the entries behind an offset; of a task that has given none, its end."""
        self.get_task(by, ask)
        task = self.task(ask.task_id)
        over, first = task.status in ENDED, {"offset": 1, "fence": len(task.leases), "status": task.status}
        entries = task.output or [first] * over
        page = [entry for entry in entries if entry["offset"] > ask.after][:ask.limit or 50]
        after = page[-1]["offset"] if page else max(ask.after, int(over and not task.output))
        return {"entries": page, "after": after, "ended": over and after >= len(entries)}

    def complete(self, by: wire.Principal, ask: Any) -> Reply:
        """Complete a task: a located success discharges the duty; others are an anomaly, or refused if strict."""
        where = located(ask)
        if again := self.repeated(by, ask, "completed"):
            if where and self.task(ask.task_id).owed:
                self.locate(self.task(ask.task_id), again.worker, where)
            return {"ok": True, "status": "succeeded", **self.differing("result", ask.result, ask.task_id),
                    "obligation": "open" if self.task(ask.task_id).owed else "discharged"}
        task, lease = self.holder(by, ask)
        where = where or inline(task, ask)
        if not where and self.rules.strict:
            raise ModelRefusal("not_locatable")
        task.status, task.outcome, task.owed = "succeeded", parsed(ask.result), not where
        task.artifacts = where.get("artifacts")
        self.end_child(task)
        body = {"result_summary": summary(ask), "delivery_proof": ask.delivery_proof or None,
                **enclosed("result", ask.result, task.task_id)}
        steps = {"steps": len(task.steps), "steps_sha256": task.steps_sha256} if task.steps else {}
        output = {"output_chunks": task.chunks, "output_sha256": task.output_sha256} if task.chunks else {}
        ended = self.emit("task.completed", lease.worker, GATE, task,
                          {**body, "completion_metadata": ask.completion_metadata, **where, **steps, **output},
                          [task.duty] if where else [], lease.lease_id)
        self.result_ready(task, ended, {**body, **where})
        self.look_after(task)
        if not where:
            self.anomaly(task, "success_without_locatability", lease, worker_id=lease.worker.id,
                         receipt_id=ended.receipt_id, obligation_receipt_id=task.duty,
                         result_delivery=task.ask.result_delivery)
        return self.over(lease, "completed", {"ok": True, "status": "succeeded",
                                              "obligation": "discharged" if where else "open"})

    def differing(self, name: str, told: Any, task_id: str) -> dict[str, Any]:
        """Say that a repeated end tells something else than the first."""
        value = parsed(told)
        return {f"{name}_differs": True} if value is not None and value != self.task(task_id).outcome else {}

    def fail(self, by: wire.Principal, ask: Any) -> Reply:
        """Fail a task; retry it while attempts remain and the worker says that it is retryable."""
        if again := self.repeated(by, ask, "failed"):
            if again is not self.tasks[ask.task_id].lease and again.first_outcome:
                again.first_outcome.pop("next_eligible_at", None)   # leased again since, so that time is past
            assert again.first_outcome is not None
            final = not again.first_outcome["requeued"]
            return again.first_outcome | (self.differing("error", ask.error, ask.task_id) if final else {})
        task, lease = self.holder(by, ask)
        requeued = bool(ask.retryable) and task.attempt + 1 < task.max_attempts
        error = enclosed("error", ask.error, task.task_id)
        body = {**error, "attempt": task.attempt, "requeued": requeued, "retry_recommended": bool(ask.retryable),
                "retry_after_seconds": ask.retry_after_seconds}
        if not requeued:
            task.status, task.outcome, task.owed = "failed", parsed(ask.error), False
            self.end_child(task)
            if ask.retryable:       # lease protocol: the escalation, then the end
                self.escalate(task, lease, "max_retries_exceeded")
            ended = self.emit("task.failed", lease.worker, GATE, task, body, [task.duty], lease.lease_id)
            self.result_ready(task, ended, error)
            self.look_after(task)
            return self.over(lease, "failed", {"ok": True, "status": "failed", "requeued": False,
                                               "next_eligible_at": None})
        self.emit("task.failed", lease.worker, GATE, task, body, [lease.accepted], lease.lease_id)
        wished = task.backoff * 2 ** task.attempt if ask.retry_after_seconds is None else ask.retry_after_seconds
        pause = min(wished, 900)
        task.status, task.attempt, task.started_at = "queued", task.attempt + 1, None
        task.next_eligible_at = self.now + pause
        task.held = "input_required" if task.open_questions else None
        self.look_after(task)
        return self.over(lease, "failed", {"ok": True, "status": task.status, "requeued": task.status == "queued",
                                           "next_eligible_at": task.next_eligible_at})

    # Asking and answering.

    def request_input(self, by: wire.Principal, ask: Any) -> Reply:
        """Ask somebody, which ends the lease unless it is kept; a key names one question in the life of a task."""
        task = self.task(ask.task_id)
        question, schema = task.questions.get(ask.key), parsed(ask.schema)
        to = wire.Principal(ask.to.kind, ask.to.id) if ask.to else task.owner
        terms = [ask.key, ask.message, schema, [to.kind, to.id] if ask.to else None, ask.expires_in_seconds,
                 ask.on_expiry]
        lives = task.lease is not None and task.lease.ending == "live" and task.lease.lease_id == ask.lease_id
        if question and not lives and question.lease_id == ask.lease_id and same(question.asked_by, by):
            if question.terms != terms:
                raise ModelRefusal("key_conflict")
            return self.show_request(task, question, lease_ended=True)
        task, lease = self.holder(by, ask)
        if question and question.terms != terms:
            raise ModelRefusal("key_conflict")
        if not question and same(to, by):
            raise ModelRefusal("self_answer")
        if bytes(ask.checkpoint):
            task.progress, task.progress_fence = parsed(ask.checkpoint), lease.fence
            task.sequence += 1
        if question and question.state == "open" and passed(question.expires_at, self.now):
            self.expire_question(task, question, "expired")
            task.sequence += 1
        if question and question.state != "open":
            return self.show_request(task, question, lease_ended=False)
        if not question:
            question = self.add_question(task, lease, ask, terms, to, schema)
        elif not ask.keep_lease:
            body = {**lost(task, lease, "input_required"), "requeued": False}
            self.emit("lease.expired", GATE, task.owner, task, body, [lease.accepted], lease.lease_id)
        if not ask.keep_lease:
            lease.ending = "asked"
            task.status, task.held, task.started_at = "queued", "input_required", None
            task.next_eligible_at = first_expiry(task)
        return self.show_request(task, question, lease_ended=not ask.keep_lease)

    def add_question(self, task: Task, lease: Lease, ask: Any, terms: list[Any], to: wire.Principal,
                     schema: Any) -> Inquiry:
        """Write the receipt that opens the obligation of whoever is asked."""
        body = {"key": ask.key, "message": ask.message, "schema": schema, "on_expiry": ask.on_expiry,
                "expires_in_seconds": ask.expires_in_seconds, "attempt": task.attempt,
                "lease_ended": not ask.keep_lease, "question_sha256": sha256(terms)}
        asked = self.emit("input.requested", lease.worker, to, task, body, [lease.accepted], lease.lease_id)
        until = None if ask.expires_in_seconds is None else self.now + ask.expires_in_seconds
        question = Inquiry(ask.key, terms, asked.receipt_id, lease.lease_id, to,
                            wire.Principal(lease.worker.kind, lease.worker.id), schema, until, ask.on_expiry)
        task.questions[ask.key] = question
        task.sequence += 1
        return question

    def show_request(self, task: Task, question: Inquiry, *, lease_ended: bool) -> Reply:
        """Return the answer to a request."""
        return {"key": question.key, "state": question.state, "receipt_id": question.request, "status": task.status,
                "lease_ended": lease_ended, "expires_at": question.expires_at,
                "input": None if question.state == "open" else question.outcome()}

    def answer_input(self, by: wire.Principal, ask: Any) -> Reply:
        """Answer for whoever is asked, or as an admin in its place; never as the worker that asks."""
        task = self.task(ask.task_id)
        question, content = task.questions.get(ask.key), parsed(ask.content)
        if question is None:
            raise ModelRefusal("input_not_found" if self.admin or same(task.owner, by) else "not_addressed")
        if same(question.asked_by, by):
            raise ModelRefusal("self_answer")
        if not (self.admin or same(question.to, by)):
            raise ModelRefusal("not_addressed")
        if question.answered_by:
            if (question.state, question.content) != (ask.action, content) or not same(question.answered_by, by):
                raise ModelRefusal("already_answered")
            return self.show_answer(task, question)
        if question.state == "expired" or passed(question.expires_at, self.now):
            raise ModelRefusal("input_expired")
        if ask.action == "accept" and question.schema and not has_integer(content):
            raise ModelRefusal("answer_invalid")
        body = {"key": question.key, "action": ask.action, "question_sha256": sha256(question.terms),
                "content_sha256": sha256(content), "content_bytes": len(bytes(ask.content) or b"null"),
                "in_place_of": None if same(question.to, by) else {"kind": question.to.kind, "id": question.to.id}}
        question.ended_by = self.emit("input.answered", by, GATE, task, body, [question.request]).receipt_id
        question.state, question.content, question.answered_by = ask.action, content, wire.Principal(by.kind, by.id)
        task.sequence += 1
        self.go_on(task)
        return self.show_answer(task, question)

    def show_answer(self, task: Task, question: Inquiry) -> Reply:
        """Return the answer to an answer."""
        return {"ok": True, "key": question.key, "action": question.state, "receipt_id": question.ended_by,
                "status": task.status, "open_inputs": len(task.open_questions)}

    def list_inputs(self, by: wire.Principal, ask: Any) -> Reply:
        """Show all questions to the owner, the latest worker or an admin, and to others those that concern them."""
        task = self.task(ask.task_id)
        seen = [question for question in task.questions.values()
                if self.admin or same(task.owner, by) or (task.lease and same(task.lease.worker, by))
                or same(question.to, by) or same(question.asked_by, by)]
        if not seen and not (self.admin or same(task.owner, by) or (task.lease and same(task.lease.worker, by))):
            raise ModelRefusal("forbidden")
        over = {question.key for question in task.open_questions if passed(question.expires_at, self.now)}
        return {"inputs": [{"key": question.key, "state": "expired" if question.key in over else question.state,
                            "request_receipt_id": question.request, "content": question.content,
                            "expires_at": question.expires_at} for question in seen]}

    def go_on(self, task: Task) -> None:
        """Offer a task again when nothing is asked any more."""
        if task.held == "input_required":
            task.held = "input_required" if task.open_questions else None
            task.next_eligible_at = first_expiry(task)

    def look_after(self, task: Task) -> None:
        """End the questions of a task that has ended, and those that were not answered in time."""
        if task.held == "children_open" and passed(task.next_eligible_at, self.now):
            task.held = task.next_eligible_at = None
        late = [question for question in task.open_questions if passed(question.expires_at, self.now)]
        if not (waited := task.open_questions):
            return
        for question in waited if task.status in ENDED else late:
            self.expire_question(task, question, "task_ended" if task.status in ENDED else "expired")
        task.sequence += bool(late) or task.status in ENDED
        fatal = [question for question in late if question.on_expiry == "fail"]
        if task.status == "queued" and fatal:
            return self.give_up(task, fatal[0])
        self.go_on(task)

    def expire_question(self, task: Task, question: Inquiry, reason: str) -> None:
        """Discharge a question that needs no answer any more."""
        question.state = "expired"
        question.ended_by = self.emit("input.expired", GATE, question.to, task, {"key": question.key, "reason": reason},
                                      [question.request]).receipt_id

    def give_up(self, task: Task, question: Inquiry) -> None:
        """Let a task fail because a question was not answered in time."""
        error = {"code": "input_expired", "key": question.key,
                 "message": f"{question.to} has not answered {question.key} in time"}
        task.status, task.outcome, task.owed, task.held = "failed", error, False, None
        self.end_child(task)
        body = {"error": error, "attempt": task.attempt, "requeued": False, "retry_recommended": False}
        self.result_ready(task, self.emit("task.failed", GATE, GATE, task, body, [task.duty]), {"error": error})
        self.look_after(task)

    # Operating.

    def pause_work(self, by: wire.Principal, ask: Any) -> Reply:
        """Keep new leases back; the same again changes until and reason."""
        return self.pause(by, ask, None)

    def drain_work(self, by: wire.Principal, ask: Any) -> Reply:
        """Pause; what is paused already stays as it is, if nothing new is said."""
        return self.pause(by, ask, self.paused.get(self.target(ask)))

    def pause(self, by: wire.Principal, ask: Any, before: Any) -> Reply:
        """Store a pause and show it."""
        self.require_admin()
        target, until = self.target(ask), ask.until and ask.until.timestamp() - self.epoch
        if until is not None and until <= self.now:
            raise ModelRefusal("invalid_request")
        self.forget_pauses()
        if not (before and target in self.paused and ask.until is None and ask.reason is None):
            self.paused[target] = until, by, ask.reason
        return self.show_pause(target)

    def resume_work(self, by: wire.Principal, ask: Any) -> Reply:
        """End one pause."""
        self.require_admin()
        target = self.target(ask)
        self.forget_pauses()
        return {"resumed": self.paused.pop(target, None) is not None, "pauses_left": len(self.paused)}

    def list_pauses(self, by: wire.Principal, ask: Any) -> Reply:
        """Show what is paused, the oldest first."""
        self.require_admin()
        self.forget_pauses()
        return {"pauses": [self.show_pause(target) for target in self.paused]}

    def require_admin(self) -> None:
        """Refuse what is for admins."""
        if not self.admin:
            raise ModelRefusal("forbidden")

    def target(self, ask: Any) -> Target:
        """Return what a request is about."""
        self.require_admin()
        if [ask.type is not None, ask.worker is not None, ask.whole_tenant].count(True) != 1:
            raise ModelRefusal("invalid_request")
        if ask.capabilities is not None and ask.type is None:
            raise ModelRefusal("invalid_request")
        return ask.type, None if ask.capabilities is None else frozenset(ask.capabilities), ask.worker

    def forget_pauses(self) -> None:
        """Drop the pauses that have ended by themselves."""
        self.paused = {target: pause for target, pause in self.paused.items() if pause[0] is None
                       or pause[0] > self.now}

    def show_pause(self, target: Target) -> dict[str, Any]:
        """Show a pause, and how many leases of it are left."""
        _, by, reason = self.paused[target]
        type, needed, worker = target
        left = [lease for task in self.tasks.values() if (lease := task.lease) and lease.ending == "live"
                and is_about(target, task, lease.worker)]
        return {"type": type, "capabilities": None if needed is None else sorted(needed), "worker": worker,
                "whole_tenant": type is worker is None, "reason": reason, "paused_by": show_principal(by),
                "leases_left": len(left)}

    def stopped(self, task: Task, worker: wire.Principal) -> bool:
        """Whether a task is not leased to a worker because of a pause."""
        self.forget_pauses()
        return any(is_about(target, task, worker) for target in self.paused)

    def preview_bulk(self, by: wire.Principal, ask: Any) -> Reply:
        """Count the tasks that are meant; change nothing."""
        self.require_admin()
        if (ask.priority is not None) != (ask.action == "prioritize"):
            raise ModelRefusal("invalid_request")
        meant = [task for task in reversed(self.tasks.values()) if self.meant(task, ask)]
        name = f"confirmation {len(self.orders)}"
        self.orders[name] = BulkOrder(by, ask, len(meant), self.now + 900)
        return {"action": ask.action, "matches": len(meant), "at_least": False, "confirmation": name,
                "sample": [{"task_id": task.task_id, "status": task.status, "priority": task.priority}
                           for task in meant[:10]]}

    def run_bulk(self, by: wire.Principal, ask: Any) -> Reply:
        """Do it to the next tasks that are meant, each once."""
        self.require_admin()
        bulk = self.orders.get(ask.confirmation)
        if bulk is None or not same(bulk.by, by) or (bulk.left is None and self.now >= bulk.good_until):
            raise ModelRefusal("invalid_confirmation")
        if bulk.left is None:       # the ids of these programs do not tell when a task was created
            bulk.left = list(reversed(self.tasks.values()))
        meant = [task for task in bulk.left if self.meant(task, bulk.ask)]      # read at once, and looked at again
        batch = meant[:ask.max_tasks or 500]
        for task in batch:
            if self.meant(task, bulk.ask):
                self.step(bulk, task)
            else:
                bulk.skipped += 1
        bulk.left = bulk.left[bulk.left.index(batch[-1]) + 1:] if len(meant) > len(batch) else []
        return {"action": bulk.ask.action, "matches": bulk.matches, "at_least": False, "done": bulk.done,
                "skipped": bulk.skipped, "refused": bulk.refused, "ended": not bulk.left,
                "begun_by": show_principal(bulk.by)}

    def step(self, bulk: BulkOrder, task: Task) -> None:
        """Do to one task what is asked; none is run again that was run again before."""
        if bulk.ask.action == "rerun" and any(other.rerun_of == task.task_id for other in self.tasks.values()):
            bulk.skipped += 1
            return
        if bulk.ask.action == "release" and task.held == "input_required":
            bulk.refused += 1
            return
        bulk.done += 1
        if bulk.ask.action == "rerun":
            self.run_again(task, task.owner, None)
        elif bulk.ask.action == "prioritize":
            task.priority = bulk.ask.priority
        elif bulk.ask.action == "cancel":
            self.cancel(task, bulk.by, reason=bulk.ask.reason, bulk_id=SEALED)
        else:
            self.release_hold(bulk.by, wire.ReleaseHold(task_id=task.task_id))

    def meant(self, task: Task, ask: Any) -> bool:
        """Whether a bulk is for a task, and changes anything about it."""
        changes = {"cancel": task.status not in ENDED, "release": task.held is not None,
                   "prioritize": task.status not in ENDED and task.priority != ask.priority,
                   "rerun": task.status in ENDED}
        return (changes[ask.action] and ask.status in (None, task.status) and ask.type in (None, task.ask.type)
                and ask.created_by in (None, task.owner.id) and ask.held in (None, task.held is not None))

    # Receipts and obligations.

    def ack_receipt(self, by: wire.Principal, ask: Any) -> Reply:
        """Acknowledge a receipt: add one fact per acknowledging principal, and change nothing else (H.8)."""
        receipts = [receipt for receipt in self.receipts if receipt.receipt_id == ask.receipt_id]
        if not receipts:
            raise ModelRefusal("receipt_not_found")
        if not (self.admin or same(receipts[0].to, by)):
            raise ModelRefusal("forbidden")
        key = (ask.receipt_id, by.kind, by.id)
        if key not in self.acks:
            self.acks[key] = self.emit("receipt.acknowledged", by, GATE, receipts[0].task_id,
                                       {"receipt_id": ask.receipt_id}, [ask.receipt_id]).receipt_id
        return {"ok": True, "receipt_id": self.acks[key]}

    def list_open_obligations(self, by: wire.Principal, ask: Any) -> Reply:
        """Return a principal's open obligations by the evidence, oldest first (PH.6)."""
        ids = sorted(receipt.receipt_id for receipt in self.receipts if receipt.type in OPENS and same(receipt.to, by)
                     and not self.terminated(receipt.receipt_id))
        page = [receipt_id for receipt_id in ids if receipt_id > (ask.since_receipt_id or "")][:ask.limit]
        return {"open_obligations": [{"receipt_id": receipt_id} for receipt_id in page],
                "cursor": page[-1] if page else ask.since_receipt_id}      # spec 17: the place reached

    def list_receipts(self, by: wire.Principal, ask: Any) -> Reply:
        """One's own inbox, oldest first; to wait for a receipt changes nothing but the time of the answer."""
        ids = sorted(receipt.receipt_id for receipt in self.receipts if same(receipt.to, by)
                     and ask.receipt_type in (None, receipt.type))
        page = [receipt_id for receipt_id in ids if receipt_id > (ask.since_receipt_id or "")][:ask.limit]
        return {"receipts": [{"receipt_id": receipt_id} for receipt_id in page]}

    def check_terminator(self, by: wire.Principal, ask: Any) -> Reply:
        """Return whether a receipt that may discharge this one names it as a parent (PH.1.4)."""
        return {"has_terminator": self.terminated(ask.parent_receipt_id)}

    def terminated(self, receipt_id: str) -> bool:
        types = {receipt.receipt_id: OPENS.get(receipt.type, ()) for receipt in self.receipts}.get(receipt_id, ())
        return any(receipt_id in receipt.parents and receipt.type in types for receipt in self.receipts)

    # The gate's own upkeep.

    def sweep(self, by: wire.Principal, ask: Any) -> Reply:
        """Expire lost leases; write an anomaly for each passed deadline (PH.4)."""
        for task in self.tasks.values():
            swept = task.held in ("input_required", "children_open") and passed(task.next_eligible_at, self.now)
            if task.status in ("leased", "running") and task.lease and not self.alive(task.lease):
                self.expire(task, task.lease)
                swept = True
            if passed(task.deadline_at, self.now) and task.status not in ENDED:
                task.deadline_at, swept = None, True
                self.anomaly(task, "deadline_passed", None, status=task.status)
            if swept:
                self.look_after(task)
        return None

    def take_up(self, task: Task, lease: Lease, by: wire.Principal) -> bool:
        """A worker asks for its lease: after a renewal it is another process, and the one before is a loss."""
        renewals = lease.renewals if lease.worker.instance_id == by.instance_id else 0
        if lease.taken_up == (by.instance_id, renewals):
            return True
        lease.taken_up = (by.instance_id, renewals)
        if renewals and 0 < task.max_expiries <= task.expiries + 1:
            self.expire(task, lease)
        elif renewals:
            self.lose(task, lease)
        return lease.ending == "live"

    def lose(self, task: Task, lease: Lease) -> None:
        """Count the loss of a worker."""
        task.expiries, task.lost_to = task.expiries + 1, [*task.lost_to, lease.worker.id][-10:]
        self.warn_of_losses(task)

    def warn_of_losses(self, task: Task) -> None:
        """Write an anomaly about a task that has lost four workers (H.7.2: requeued more than three times)."""
        if task.expiries == 4:
            self.anomaly(task, "lease_expired_often", None, expiries=4)

    def expire(self, task: Task, lease: Lease) -> None:
        """Expire a lease: it costs no attempt, but too many expiries put the task on hold."""
        task.status, task.started_at, task.next_eligible_at = "queued", None, None
        task.expiries, task.lost_to = task.expiries + 1, [*task.lost_to, lease.worker.id][-10:]
        task.held = "input_required" if task.open_questions else None
        if task.max_expiries and task.expiries >= task.max_expiries:
            task.held = "lease_expiries"
        lease.ending = "expired"
        self.emit("lease.expired", GATE, task.owner, task, lost(task, lease, "expired"), [lease.accepted],
                  lease.lease_id)
        self.escalate(task, lease, "lease_expired")
        self.warn_of_losses(task)
        self.tell_hold(task, lease)

    def tell_hold(self, task: Task, lease: Lease) -> None:
        """Write an anomaly about a task that is on hold."""
        if task.held in ("input_required", "children_open"):
            self.look_after(task)
        elif task.held:
            text = json.dumps(task.progress, separators=(",", ":"), ensure_ascii=False)
            last = enclosed("last_progress", text.encode(), task.task_id)
            self.anomaly(task, "task_held", lease, expiries=task.expiries, workers=sorted(set(task.lost_to)),
                         held=task.held, **(last or {"last_progress": None}))

    def escalate(self, task: Task, lease: Lease, reason: str) -> None:
        """Escalate to the target of the payload's class, by default class 1."""
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

    # Shared by the rules above.

    def task(self, task_id: str) -> Task:
        """Return a task of this tenant; tasks of others are unknown."""
        if task_id not in self.tasks:
            raise ModelRefusal("task_not_found")
        return self.tasks[task_id]

    def own(self, by: wire.Principal, task_id: str) -> Task:
        """Return a task if the caller is its owner or an admin."""
        task = self.task(task_id)
        if not (self.admin or same(task.owner, by)):
            raise ModelRefusal("forbidden")
        return task

    def alive(self, lease: Lease) -> bool:
        """Whether a lease is live; it ends at its time, even before the sweep."""
        return lease.ending == "live" and lease.expires_at > self.now

    def holder(self, by: wire.Principal, ask: Any) -> tuple[Task, Lease]:
        """Require that lease, worker, and fence if sent, match the live lease."""
        task = self.task(ask.task_id)
        if task.lease is None:
            raise ModelRefusal("lease_invalid_or_expired", "unknown")
        lease = task.lease
        if lease.lease_id != ask.lease_id or ask.fence not in (None, lease.fence):
            newer = lease.fence > (ask.fence or 1)      # a call without a fence counts as fence 1
            raise ModelRefusal("lease_invalid_or_expired", "superseded" if newer else "unknown")
        if not same(lease.worker, by) or (by.instance_id and lease.worker.instance_id
                                          and by.instance_id != lease.worker.instance_id):
            raise ModelRefusal("lease_invalid_or_expired", "unknown")
        if not self.alive(lease):
            raise ModelRefusal("lease_invalid_or_expired", "expired" if lease.ending == "live" else lease.ending)
        if by.instance_id and not lease.worker.instance_id and by.instance_id != (lease.taken_up or [None])[0]:
            # It was granted to a process that gave no name.
            self.before = task, lease, task.expiries, task.lost_to, lease.taken_up, len(self.receipts)
            lease.taken_up = (by.instance_id, None)
            self.lose(task, lease)
        return task, lease

    def repeated(self, by: wire.Principal, ask: Any, ending: str) -> Lease | None:
        """Return the lease that this verb of this worker has already ended, however long ago."""
        return next((lease for lease in self.task(ask.task_id).leases if lease.lease_id == ask.lease_id
                     and lease.ending == ending and same(lease.worker, by)), None)

    def over(self, lease: Lease, ending: str, outcome: dict[str, Any]) -> Reply:
        """End a lease, and keep the answer to its verb."""
        lease.ending, lease.first_outcome = ending, outcome
        return outcome

    def locate(self, task: Task, by: wire.Principal, where: dict[str, Any]) -> None:
        """Write a new, linked completion; only the artifacts of the task change."""
        task.artifacts, task.owed = where.get("artifacts"), False
        lease_id = task.lease.lease_id if task.lease else None
        ended = self.emit("task.completed", by, GATE, task, where, [task.duty], lease_id)
        self.result_ready(task, ended, where)

    def result_ready(self, task: Task, ended: Receipt, news: dict[str, Any]) -> None:
        """Write task.result_ready to the owner, after any terminal receipt."""
        task.ended_by = ended.receipt_id
        self.emit("task.result_ready", GATE, task.owner, task, {"status": task.status, **news}, [ended.receipt_id])

    def anomaly(self, task: Task, kind: str, lease: Lease | None, **details: Any) -> None:
        """Write an anomaly, which is informational, once per cause (H.7)."""
        cause = (task.task_id, kind, lease.lease_id if lease else None)
        if cause not in self.told:
            self.told.add(cause)
            self.emit("system.anomaly", GATE, task.owner, task, {"kind": kind, "details": details}, [], cause[2])

    def emit(self, type: str, sender: wire.Principal, to: wire.Principal, task: Task | str, body: dict[str, Any],
             parents: list[str] | None = None, lease_id: str | None = None) -> Receipt:
        """Write one receipt; omit nulls."""
        task_id = task if isinstance(task, str) else task.task_id
        members = {name: value for name, value in {**body, "principal_instance_id": sender.instance_id}.items()
                   if value is not None}
        ends = wire.Principal(sender.kind, sender.id), wire.Principal(to.kind, to.id)     # without their sessions
        receipt = Receipt(self.new_id("receipt", task_id, type), type, *ends, task_id, lease_id, parents or [],
                          {**members, "schema_version": "1"})
        self.receipts.append(receipt)
        return receipt


def same(principal: wire.Principal, other: wire.Principal) -> bool:
    """Whether two principals are the same: kind and id count, an instance is only a session."""
    return (principal.kind, principal.id) == (other.kind, other.id)


def is_about(target: Target, task: Task, worker: wire.Principal) -> bool:
    """Whether a lease of a task for a worker falls under what is paused."""
    type, needed, paused = target
    if paused is not None:
        return paused == worker.id
    return type in (None, task.ask.type) and (needed is None or task.needs == needed)


def show_principal(who: wire.Principal) -> dict[str, str]:
    """Return a principal in the form of replies."""
    shown = {"kind": who.kind, "id": who.id, "instance_id": who.instance_id}
    return {name: value for name, value in shown.items() if value is not None}


def owned(who: wire.Principal) -> dict[str, str]:
    """Return a task's creator in both spellings (spec 3, 19.6)."""
    return {**show_principal(who), **{f"principal_{name}": value for name, value in show_principal(who).items()}}


def sha256(value: Any) -> str:
    """Return the hash of canonical JSON: sorted names, no whitespace."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def passed(moment: float | None, now: float) -> bool:
    """Whether a moment has come."""
    return moment is not None and moment <= now


def first_expiry(task: Task) -> float | None:
    """Return when the first open question expires."""
    moments = [question.expires_at for question in task.open_questions]
    return min((moment for moment in moments if moment is not None), default=None)


def has_integer(content: Any) -> bool:
    """Whether an answer matches the one schema that the programs send: an object whose `n`, if any, is an integer."""
    return isinstance(content, dict) and isinstance(content.get("n", 0), int)


def parsed(raw: Any) -> Any:
    """Decode JSON that was stored verbatim."""
    return json.loads(bytes(raw) or b"null")


def ttl(wished: int | None) -> int:
    """Return the TTL: by default 300 seconds, at most 1800 (19.1)."""
    return min(wished or 300, 1800)


def assignment(ask: wire.CreateTask) -> dict[str, Any]:
    """Return the contract (14.1), with hash and size in place of the payload."""
    waits = ask.timeouts and {name: value for name, value in (
        ("lease_ttl_seconds", ask.timeouts.lease_ttl_seconds),
        ("deadline", ask.timeouts.deadline and ask.timeouts.deadline.strftime("%Y-%m-%dT%H:%M:%SZ"))) if value}
    return {**{name: getattr(ask, name) for name in TERMS}, "timeouts": waits, "type": ask.type,
            "requirements": parsed(ask.requirements), "payload_pointer": ask.payload_pointer,
            "parent_task_id": ask.parent_task_id, "payload_sha256": sha256(parsed(ask.payload)),
            "payload_bytes": len(bytes(ask.payload) or b"null")}


def contract_of(ask: wire.CreateTask, by: wire.Principal) -> Any:
    """Return the contract of a create with defaults filled in, to compare replays."""
    return ({**assignment(ask), "payload_bytes": 0, "requirements": parsed(ask.requirements) or None},
            ask.principal_ai or by.id, ask.priority or 0,
            ask.max_attempts or 3, 30 if ask.retry_backoff_seconds is None else ask.retry_backoff_seconds,
            10 if ask.max_expiries is None else ask.max_expiries, ask.delay_seconds or 0)


def failed(proof: Any) -> bool:
    """Whether a proof does not say that the delivery succeeded (PH.3.3)."""
    return not proof or proof.get("status") != "succeeded"


EMPTY_POINTERS: list[Any] = [[None], [{"type": "file"}]]      # of those that the programs send


def located(ask: Any) -> dict[str, Any]:
    """Return the location of a result: artifacts in any accepted shape, or a proof; empty ones do not count."""
    given = ask.artifacts
    if isinstance(given, dict):
        given = given.get("pointers", [given] if given else [])
    if given in EMPTY_POINTERS:
        given = []
    fields = {"artifacts": given if isinstance(given, list) or not given else [given],
              "delivery_proof": None if failed(ask.delivery_proof) else ask.delivery_proof}
    return {name: value for name, value in fields.items() if value}


def inline(task: Task, ask: Any) -> dict[str, Any]:
    """Return the location of a result that the creator wants inline; empty if there is none."""
    if task.ask.result_delivery != "inline" or parsed(ask.result) in (None, "", [], {}):
        return {}
    return {"artifacts": [{"type": "asyncgate", "uri": f"asyncgate://{GATE.id}/tasks/{task.task_id}/result"}]}


def enclosed(name: str, raw: Any, task_id: str) -> dict[str, Any]:
    """Return a value up to 16 KB; for a larger one, its hash, size and location."""
    value, size = parsed(raw), len(bytes(raw))
    if value is None:
        return {}
    if size <= 16384:
        return {"result_payload" if name == "result" else name: value}
    return {f"{name}_sha256": sha256(value), f"{name}_bytes": size,
            "how_to_retrieve": {"operation": "get_task", "task_id": task_id}}


def summary(ask: Any) -> str | None:
    """14.3: return the worker's summary, else the summary in its result."""
    value = parsed(ask.result)
    told = value.get("summary") if isinstance(value, dict) else None
    return ask.result_summary or (told[:1000] if isinstance(told, str) else None)


def lost(task: Task, lease: Lease, reason: str) -> dict[str, Any]:
    """14.6: return the body of a lost lease's receipt."""
    return {"task_id": task.task_id, "previous_worker_id": lease.worker.id, "attempt": task.attempt,
            "requeued": task.held is None, "reason": reason}
